//! The thread that writes to the database, for all that is queued at once (`commit_queue.rs`).
//!
//! ```text
//!   queue ──everything queued──► one record ──► one sync
//!                                                 │
//!      ◄── answers ◄── second phase, in order, one lock ◄──┘
//! ```
//!
//! Memory follows the disk: the second phase of a change runs after its sync, and if that fails the change is cancelled.
//!
//! What is known of resources (the plugin last seen, and since when it is gone) is written without anybody waiting for
//! it: with the next change, which costs no sync more, or by itself when a moment has passed without one.
//!
//! A write that failed leaves the database in doubt: the change may be on disk or not, and pages may look written
//! that are not. So the file is given up, and before the next write a new one is made from memory, which is what
//! has been answered for. That is tried again with every batch, and from time to time without one.
//!
//! The same is done if the file has lost its name, because somebody removed it: what is in it would be gone with us.
//! Nothing is answered before it has been seen that the file is in its place. A file that somebody else put there is
//! left alone, and nothing is written until it is gone. As soon as that is noticed, the id files get ahead of every database
//! there is (`node_id.rs`): after a kill, the next start accepts none of them.
//!
//! Nothing is written either while no id file has the progress of the database.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use devlet_core::dra::claims::Claim;
use devlet_core::{Importing, Pod, PodUid, RecordId, ReservationId, ResourceName};
use tokio::sync::oneshot;

use super::database::{Database, DatabaseFile};
use super::fs::{self, FileId};
use super::kubelet_file::BlockedBy;
use super::mirror::Doorbell;
use super::node_id::{IdFiles, Progress};
use super::persisted_state::NodeMetadata;
use super::record::known_resources;
use super::row::Row;
use super::tables::Snapshot;
use super::{Settled, Shared, State, Steady, wal};

/// How often the disk is tried again while it refuses writes and nobody asks.
const RETRY: Duration = Duration::from_secs(1);

/// How long news of resources wait for a change that takes them along.
pub(crate) const NOTE_PAUSE: Duration = Duration::from_millis(100);

/// How often, if nobody asks, it is seen whether the database is in its place, and which resources nobody needs any
/// longer.
const TIDY: Duration = Duration::from_secs(10);

/// Why something is not on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The disk refuses.
    #[error("{} cannot be written: {reason}", .path.display())]
    Disk {
        /// The database.
        path: PathBuf,
        /// What the disk says.
        reason: String,
        /// The same, for programs.
        kind: Option<std::io::ErrorKind>,
    },
    /// The disk does not answer.
    #[error("the disk has not answered for {} s: look at it, and at the kernel's log", .waited.as_secs())]
    Hangs {
        /// For how long.
        waited: Duration,
    },
    /// The disk did not answer in time for a change that is queued.
    #[error(
        "the disk does not answer (waited {:.1} s); the change may still be written; try again, and look at the \
         kernel's log if it stays so",
        .waited.as_secs_f64()
    )]
    TimedOut {
        /// How long the caller waited.
        waited: Duration,
    },
    /// The store has been stopped.
    #[error("the store has been stopped")]
    Stopped,
}

/// In the end, the database is not in its place.
#[derive(Debug)]
pub(crate) struct Unplaced {
    pub(crate) problem: WriteError,
    /// Where it is instead.
    pub(crate) saved: Option<PathBuf>,
}

/// A change on its way to disk.
pub(crate) struct Change {
    pub(crate) rows: Vec<Row>,
    pub(crate) second: SecondPhase,
    // After the second phase: whoever sees that no answer comes sees that it was cancelled, too.
    pub(crate) done: oneshot::Sender<Result<(), WriteError>>,
}

/// Carried out when the change is on disk; a change that is lost on the way is cancelled.
pub(crate) struct SecondPhase {
    phase: Option<Phase>,
    shared: Arc<Shared>,
}

impl SecondPhase {
    pub(crate) fn new(phase: Phase, shared: Arc<Shared>) -> Self {
        let phase = Some(phase);
        Self { phase, shared }
    }

    fn is_about_the_node(&self) -> bool {
        !matches!(self.phase, None | Some(Phase::Nothing))
    }

    /// Under the lock.
    fn settle(&mut self, state: &mut State, is_written: bool) {
        match self.phase.take() {
            Some(phase) if is_written => phase.finish(state),
            Some(phase) => phase.cancel(state),
            None => {}
        }
    }
}

impl Drop for SecondPhase {
    fn drop(&mut self) {
        if let Some(phase) = self.phase.take() {
            self.shared.change(|state| phase.cancel(state));
        }
    }
}

/// What becomes true in memory when a change is on disk.
#[derive(Debug)]
pub(crate) enum Phase {
    Intent(ReservationId),
    Commit(ReservationId),
    Release(PodUid),
    Record(RecordId),
    /// `pods` are those that are different now.
    Import {
        pods: Vec<Pod>,
        removed: Vec<PodUid>,
        importing: Importing,
        resources: BTreeSet<ResourceName>,
        claims: Vec<Claim>,
        settled: Box<Settled>,
    },
    /// `pods` are those that hold what they held before a contested file, `removed` those that only it had.
    Forget {
        settled: Box<Settled>,
        pods: Vec<Pod>,
        removed: Vec<PodUid>,
    },
    /// Nothing: the change is about the disk only.
    Nothing,
}

impl Phase {
    pub(crate) fn finish(self, state: &mut State) {
        let node = &mut state.node;
        match self {
            Self::Intent(id) => node.finish_intent(id),
            Self::Commit(id) => node.finish_commit(id),
            Self::Release(pod) => node.finish_release(&pod),
            Self::Record(id) => node.finish_record(id),
            Self::Import {
                pods,
                removed,
                importing,
                resources,
                claims,
                settled,
            } => {
                node.end_import(&importing);
                for pod in &removed {
                    node.finish_release(pod);
                }
                for claim in claims {
                    node.put_claim(claim);
                }
                for pod in pods {
                    let taken_in = node.put(pod);
                    debug_assert!(taken_in.is_ok(), "a pod that is being imported is in flight");
                }
                node.add_resources(resources);
                state.settle(*settled);
            }
            Self::Forget {
                settled,
                pods,
                removed,
            } => {
                for pod in &removed {
                    node.finish_release(pod);
                }
                for pod in pods {
                    // One that is being admitted or removed by now has what that ends with.
                    let _ = node.put(pod);
                }
                state.settle(*settled);
            }
            Self::Nothing => {}
        }
    }

    pub(crate) fn cancel(self, state: &mut State) {
        match self {
            Self::Intent(id) => state.node.cancel_intent(id),
            Self::Commit(id) => state.node.cancel_commit(id),
            Self::Release(pod) => state.node.cancel_release(&pod),
            Self::Record(id) => state.node.cancel_record(id),
            Self::Import {
                importing, removed, ..
            } => {
                state.node.end_import(&importing);
                for pod in &removed {
                    state.node.cancel_release(pod);
                }
            }
            Self::Forget { removed, .. } => {
                for pod in &removed {
                    state.node.cancel_release(pod);
                }
            }
            Self::Nothing => {}
        }
    }
}

pub(crate) enum Message {
    Write(Change),
    /// What is known of resources has changed.
    Note,
    Read(oneshot::Sender<Result<Snapshot, WriteError>>),
    Stop(oneshot::Sender<Result<(), Unplaced>>),
}

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) file: DatabaseFile,
    /// `None` after a failure.
    pub(crate) database: Option<Database>,
    /// The file that is in its place if nobody else put one there.
    pub(crate) ours: Option<FileId>,
    pub(crate) metadata: NodeMetadata,
    pub(crate) id_files: IdFiles,
    /// Whether an id file has the progress of the database, so that an older copy is recognised.
    pub(crate) is_recorded: bool,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) doorbell: Doorbell,
    pub(crate) clock: Steady,
    /// When news of resources are written at the latest; `None` if there are none.
    pub(crate) note_due: Option<Instant>,
    /// When it last did something.
    pub(crate) active: Instant,
}

/// The messages that were queued.
#[derive(Default)]
struct Queue {
    changes: Vec<Change>,
    readers: Vec<oneshot::Sender<Result<Snapshot, WriteError>>>,
    stop: Option<oneshot::Sender<Result<(), Unplaced>>>,
}

impl Writer {
    /// Writes until the store is stopped, or until the last sender is gone.
    pub(crate) fn run(self) {
        let shared = Arc::clone(&self.shared);
        if catch_unwind(AssertUnwindSafe(|| self.write_until_stopped())).is_err() {
            // Whether the last change is on disk is not known, so nothing more is written.
            shared.health.send_replace(Some(WriteError::Stopped));
            tracing::error!("writer ended by a panic, no pod is admitted");
        }
    }

    fn write_until_stopped(mut self) {
        loop {
            let idle = self.due().saturating_duration_since(Instant::now());
            let mut queue = Queue::default();
            match self.inbox.recv_timeout(idle) {
                Ok(message) => self.sort(message, &mut queue),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // In order, and nothing behind a stop.
            while queue.stop.is_none()
                && let Ok(message) = self.inbox.try_recv()
            {
                self.sort(message, &mut queue);
            }
            if !self.work(queue) {
                return;
            }
        }
    }

    fn sort(&mut self, message: Message, queue: &mut Queue) {
        match message {
            Message::Write(change) => queue.changes.push(change),
            Message::Read(reader) => queue.readers.push(reader),
            Message::Stop(done) => queue.stop = Some(done),
            Message::Note => {
                self.note_due.get_or_insert_with(|| Instant::now() + NOTE_PAUSE);
            }
        }
    }

    /// Handles the queued messages, and the work that is due. Returns `false` after a stop.
    fn work(&mut self, queue: Queue) -> bool {
        if !queue.changes.is_empty() || !queue.readers.is_empty() {
            self.active = Instant::now();
        }
        if !queue.changes.is_empty() {
            self.write(queue.changes);
        }
        for reader in queue.readers {
            // A reader that has gone needs no answer.
            let snapshot = self.read();
            let _ = reader.send(snapshot);
        }
        if let Some(done) = queue.stop {
            if self.note_due.is_some() {
                self.write(Vec::new());
            }
            if self.is_in_place() {
                self.record_stop();
            } else {
                self.heal();
            }
            self.database = None;
            let _ = done.send(self.outcome());
            return false;
        }
        if Instant::now() >= self.due() {
            self.write_by_itself();
            self.active = Instant::now();
        }
        true
    }

    /// When there is work without a message.
    fn due(&self) -> Instant {
        match (&self.database, self.note_due) {
            (None, _) => self.active + RETRY,
            _ if !self.is_recorded => self.active + RETRY,
            (Some(_), Some(due)) => due,
            (Some(_), None) => self.active + TIDY,
        }
    }

    /// Nobody has asked for a while.
    fn write_by_itself(&mut self) {
        if self.is_in_place() && self.is_recorded {
            let is_idle = self.note_due.is_none();
            self.note_due.get_or_insert_with(Instant::now);
            self.write(Vec::new());
            if is_idle {
                self.checkpoint();
            }
            if self.shared.has_id_failure()
                && let Err(error) = self.record_progress()
            {
                self.note_health(Some(error));
            }
        } else {
            self.heal();
        }
    }

    fn heal(&mut self) {
        let healed = self.rebuild();
        self.note_health(healed.err());
    }

    /// Whether there is a database under its name. One that has lost it is given up.
    fn is_in_place(&mut self) -> bool {
        let Some(database) = &self.database else {
            return false;
        };
        let is_in_place = FileId::of_at_least(&self.file.path, wal::LENGTH) == Some(database.file_id);
        if !is_in_place {
            let path = self.file.path.display();
            tracing::error!(%path, "the database was removed or replaced while devlet ran");
            self.disown();
        }
        is_in_place
    }

    /// Gives up a database whose file was removed, replaced or cut short. The id files get ahead of every database there is:
    /// if this process is killed, the next start takes the file in its place for an older copy.
    fn disown(&mut self) {
        self.database = None;
        if self.metadata.is_blocked_by_database() {
            self.ours = None;
            return;
        }
        if self.ours.take().is_some() {
            let starts = self.metadata.progress.starts.saturating_add(1);
            self.metadata.progress = Progress::of_start(starts);
            self.is_recorded = false;
        }
        // Tried again with every attempt to make the database again.
        if !self.is_recorded
            && let Err(error) = self.record_progress()
        {
            tracing::warn!(%error, "loss of the database not recorded");
        }
    }

    /// News of resources.
    fn notes(&mut self) -> Vec<Row> {
        // From here on, a change may be missing in what is read, so it must be noted again.
        self.shared.noted.store(false, Ordering::Release);
        let now = self.clock.now();
        let known = self.shared.change(|state| {
            state.node.evict_idle(now);
            known_resources(&state.node)
        });
        let recorded = &self.metadata.resources;
        let forgotten = recorded.keys().filter(|name| !known.contains_key(*name));
        let mut rows: Vec<Row> = forgotten.map(|name| Row::Resource(name.clone(), None)).collect();
        let news = known
            .into_iter()
            .filter(|(name, record)| recorded.get(name) != Some(record));
        rows.extend(news.map(|(name, record)| Row::Resource(name, Some(record))));
        rows
    }

    /// Writes changes, and what there is to be noted.
    fn write(&mut self, batch: Vec<Change>) {
        let started = Instant::now();
        let notes = match self.note_due.take() {
            Some(_) => self.notes(),
            None => Vec::new(),
        };
        if batch.is_empty() && notes.is_empty() {
            return;
        }
        self.shared.writes_since(Some(started));
        let written = self.try_write(&batch, &notes);
        self.shared.writes_since(None);
        if written.is_err() && !notes.is_empty() {
            self.note_due = Some(Instant::now() + RETRY);
        }
        let counters = &self.file.counters;
        if !batch.is_empty() {
            counters.write_durations.add_duration(started.elapsed());
            counters.batches.add_count(batch.len());
        }
        self.note_health(written.clone().err());
        let is_news = batch.iter().any(|change| change.second.is_about_the_node());
        self.settle(batch, &written);
        if written.is_ok() && is_news {
            self.doorbell.ring();
        }
        self.maintain(Database::ensure_wal_space);
    }

    fn try_write(&mut self, batch: &[Change], notes: &[Row]) -> Result<(), WriteError> {
        // Changes come last: of what is said twice, their word counts.
        let rows = || notes.iter().chain(batch.iter().flat_map(|change| &change.rows));
        self.write_rows(rows())?;
        if !self.is_in_place() {
            // Written, but to a file without a name; so once more, to one that has it.
            self.write_rows(rows())?;
            if !self.is_in_place() {
                return Err(self.refusal("it is removed again and again"));
            }
        }
        // The database that was lost is replaced for good.
        let was_blocked = self.metadata.is_blocked_by_database();
        if was_blocked && rows().any(|row| matches!(row, Row::Blocked(BlockedBy::Database, None))) {
            let recorded = self.record_progress();
            if recorded.is_err() {
                // Still blocked: the database is made again from memory.
                (self.database, self.is_recorded) = (None, true);
            }
            recorded?;
        }
        rows().for_each(|row| self.metadata.apply(row));
        Ok(())
    }

    /// Writes to the id files how far the database has come.
    fn record_progress(&mut self) -> Result<(), WriteError> {
        let Some(id) = &self.metadata.node_id else {
            return Ok(());
        };
        let written = self.id_files.write(id, &self.metadata.progress);
        self.is_recorded = written.is_ok();
        let failure = written.as_ref().map_or_else(Some, Option::as_ref);
        self.shared.note_id_failure(failure.map(ToString::to_string));
        written.map(drop).map_err(|not| self.file.not_written(&not))
    }

    /// Writes a new id of this stop to the database and then to the id files: a start after it recognises every other
    /// database.
    fn record_stop(&mut self) {
        let row = Row::Progress(self.metadata.progress.stopped());
        let written = self.write_rows(std::iter::once(&row));
        let is_written = written.is_ok();
        if let Err(error) = written {
            self.note_health(Some(error));
        }
        self.checkpoint();
        if is_written && self.database.is_some() && !self.metadata.is_blocked_by_database() {
            self.metadata.apply(&row);
            if let Err(error) = self.record_progress() {
                tracing::warn!(%error, "clean stop not recorded");
            }
        }
    }

    fn write_rows<'a>(&mut self, rows: impl Iterator<Item = &'a Row>) -> Result<(), WriteError> {
        self.rebuild()?;
        let written = match &mut self.database {
            Some(database) => database.write(rows),
            None => return Err(WriteError::Stopped),
        };
        written.map_err(|error| self.give_up(&error))
    }

    /// Carries out the second phase of every change, in order; then the callers are answered.
    fn settle(&self, batch: Vec<Change>, written: &Result<(), WriteError>) {
        // In place: what is dropped under the lock, and be it because of a panic, would wait for the lock.
        let mut batch = batch;
        self.shared.change(|state| {
            for change in &mut batch {
                change.second.settle(state, written.is_ok());
            }
        });
        for change in batch {
            // Fails if the caller has left. The change is carried out all the same.
            let _ = change.done.send(written.clone());
        }
    }

    /// Makes the database again after a failure, unless another file is in its place, and the id files ready for it.
    fn rebuild(&mut self) -> Result<(), WriteError> {
        if self.database.is_none() {
            self.create()?;
        }
        if self.is_recorded || self.metadata.is_blocked_by_database() {
            return Ok(());
        }
        self.record_progress()
    }

    fn create(&mut self) -> Result<(), WriteError> {
        let found = FileId::at(&self.file.path);
        if found.is_none() || found != self.ours {
            self.disown();
        }
        if found.is_some() && found != self.ours {
            return Err(self.refusal("another file is in its place; move that away"));
        }
        match self.file.create(&self.rows()) {
            Ok(database) => {
                self.ours = Some(database.file_id);
                self.database = Some(database);
                Ok(())
            }
            Err(error) => {
                // It may have come as far as to its name.
                self.ours = FileId::at(&self.file.path);
                Err(self.failure(&error))
            }
        }
    }

    /// Everything, from memory.
    fn rows(&self) -> Vec<Row> {
        let mut rows = self.metadata.rows();
        self.shared.read(|node| {
            rows.extend(node.recorded_claims().map(Row::claim));
            rows.extend(node.pods().map(Row::pod));
        });
        rows
    }

    fn refusal(&self, reason: &str) -> WriteError {
        self.file.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: self.file.path.clone(),
            reason: reason.into(),
            kind: None,
        }
    }

    fn failure(&self, error: &redb::Error) -> WriteError {
        self.file.failure(error)
    }

    pub(crate) fn note_health(&self, now: Option<WriteError>) {
        let before = self.shared.health.send_replace(now.clone());
        match (before, now) {
            (None, Some(error)) => {
                tracing::error!(%error, "state cannot be written, no pod is admitted");
            }
            (Some(_), None) => tracing::info!("state can be written again"),
            _ => {}
        }
    }

    fn read(&mut self) -> Result<Snapshot, WriteError> {
        match &mut self.database {
            Some(database) => database.snapshot().map_err(|error| self.give_up(&error)),
            None => Err(self.problem()),
        }
    }

    fn problem(&self) -> WriteError {
        self.shared.health.borrow().clone().unwrap_or(WriteError::Stopped)
    }

    /// In the end: what was answered is on disk, or at least somewhere. A file of ours has that, whatever it did not take
    /// since.
    fn outcome(&mut self) -> Result<(), Unplaced> {
        let found = FileId::at(&self.file.path);
        if found.is_some() && found == self.ours {
            return Ok(());
        }
        let name = format!(".saved-{}", fs::timestamp(self.clock.now()));
        let file = DatabaseFile {
            path: fs::with_suffix(&self.file.path, &name),
            ..self.file.clone()
        };
        // The id files name this stop, so that the next start recognises the file in the place of the database as
        // another one.
        self.metadata.progress = self.metadata.progress.stopped();
        let saved = file.create(&self.rows());
        if !self.metadata.is_blocked_by_database()
            && let Err(error) = self.record_progress()
        {
            tracing::warn!(%error, "stop not recorded");
        }
        Err(Unplaced {
            problem: self.problem(),
            saved: saved.is_ok().then_some(file.path),
        })
    }

    fn checkpoint(&mut self) {
        self.maintain(Database::checkpoint);
    }

    /// Does work that no caller waits for. If it fails, no change is accepted until the database is healthy again.
    fn maintain(&mut self, work: fn(&mut Database) -> Result<(), redb::Error>) {
        if let Some(database) = &mut self.database
            && let Err(error) = work(database)
        {
            let error = self.give_up(&error);
            self.note_health(Some(error));
        }
    }

    /// After a failed write nothing in the file can be trusted.
    fn give_up(&mut self, error: &redb::Error) -> WriteError {
        self.database = None;
        self.failure(error)
    }
}
