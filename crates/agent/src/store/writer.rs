//! What writes to the database: one at a time, see [`super::desk`].
//!
//! ```text
//!   callers ──change──► inbox ──everything queued──► one transaction ──► one sync
//!                                                                          │
//!      ◄──────── answers ◄──────── second phase, in order, one lock ◄──────┘
//! ```
//!
//! A change that has been handed over is carried out, whether its caller still waits or not. Memory follows the
//! disk: the second phase of a change runs after its sync, and if that fails the change never was.
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
//! left alone, and nothing is written until it is gone.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use devlet_core::dra::claims::Claim;
use devlet_core::{Blocked, Importing, Pod, PodUid, RecordId, ReservationId, ResourceName};
use tokio::sync::oneshot;

use super::database::{Database, Place, Row, Snapshot, Surroundings};
use super::desk::Queued;
use super::files::{self, Identity};
use super::mirror::Doorbell;
use super::record::known_resources;
use super::{Shared, State, Steady, journal};

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
    pub(crate) _queued: Queued,
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
        importing: Importing,
        resources: BTreeSet<ResourceName>,
        claims: Vec<Claim>,
        settled: Vec<Blocked>,
    },
    Forget(Blocked),
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
                importing,
                resources,
                claims,
                settled,
            } => {
                node.end_import(&importing);
                for claim in claims {
                    node.put_claim(claim);
                }
                for pod in pods {
                    let taken_in = node.put(pod);
                    debug_assert!(taken_in.is_ok(), "a pod that is being imported is in flight");
                }
                node.know(resources);
                node.unblock(|reason| settled.contains(reason));
            }
            Self::Forget(settled) => node.unblock(|reason| *reason == settled),
            Self::Nothing => {}
        }
    }

    pub(crate) fn cancel(self, state: &mut State) {
        match self {
            Self::Intent(id) => state.node.cancel_intent(id),
            Self::Commit(id) => state.node.cancel_commit(id),
            Self::Release(pod) => state.node.cancel_release(&pod),
            Self::Record(id) => state.node.cancel_record(id),
            Self::Import { importing, .. } => state.node.end_import(&importing),
            Self::Forget(_) | Self::Nothing => {}
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
    pub(crate) place: Place,
    /// `None` after a failure.
    pub(crate) database: Option<Database>,
    /// The file that is in its place if nobody else put one there.
    pub(crate) ours: Option<Identity>,
    pub(crate) around: Surroundings,
    /// `None` at the end.
    pub(crate) inbox: Option<Receiver<Message>>,
    /// Taken out of it, and not for who took it.
    pub(crate) left: Option<Message>,
    pub(crate) doorbell: Doorbell,
    pub(crate) clock: Steady,
    /// When news of resources are written at the latest; `None` if there are none.
    pub(crate) note_due: Option<Instant>,
    /// When it last did something.
    pub(crate) active: Instant,
}

/// What was queued.
#[derive(Default)]
struct Queue {
    changes: Vec<Change>,
    readers: Vec<oneshot::Sender<Result<Snapshot, WriteError>>>,
    stop: Option<oneshot::Sender<Result<(), Unplaced>>>,
    /// Nobody is left who could send anything.
    is_last: bool,
}

impl Writer {
    /// Does everything that is queued, and what is due. `false`: there is nothing more to do, ever.
    pub(crate) fn work(&mut self) -> bool {
        let Queue {
            changes,
            readers,
            stop,
            is_last,
        } = self.take(true);
        if !changes.is_empty() {
            self.write(changes);
        }
        for reader in readers {
            // A reader that has gone needs no answer.
            let snapshot = self.read();
            let _ = reader.send(snapshot);
        }
        if let Some(done) = stop {
            if self.note_due.is_some() {
                self.write(Vec::new());
            }
            if self.is_in_place() {
                self.take_over();
            } else {
                self.heal();
            }
            self.end();
            let _ = done.send(self.outcome());
            return false;
        }
        if is_last {
            return false;
        }
        if Instant::now() >= self.due() {
            self.write_by_itself();
            self.active = Instant::now();
        }
        true
    }

    /// Writes the changes that are queued. The rest is left for [`Writer::work`].
    pub(crate) fn write_queued(&mut self) {
        let queue = self.take(false);
        if !queue.changes.is_empty() {
            self.write(queue.changes);
        }
    }

    /// Whether a small change takes as long as its sync.
    pub(crate) fn is_quick(&self) -> bool {
        let has_room = |database: &Database| database.has_room();
        self.left.is_none() && self.database.as_ref().is_some_and(has_room)
    }

    /// Somebody panicked while writing: what is on disk is not known, so nothing more is written.
    pub(crate) fn end_in_doubt(&mut self) {
        self.end();
        self.note_health(Some(WriteError::Stopped));
    }

    /// Closes the database. Nobody who comes later is answered.
    pub(crate) fn end(&mut self) {
        (self.database, self.inbox, self.left) = (None, None, None);
    }

    fn take(&mut self, everything: bool) -> Queue {
        let mut queue = Queue::default();
        while queue.stop.is_none() {
            let next = match (self.left.take(), &self.inbox) {
                (Some(left), _) => Ok(left),
                (None, Some(inbox)) => inbox.try_recv(),
                (None, None) => Err(TryRecvError::Disconnected),
            };
            match next {
                Ok(Message::Write(change)) => queue.changes.push(change),
                Ok(Message::Note) => {
                    self.note_due.get_or_insert_with(|| Instant::now() + NOTE_PAUSE);
                }
                // In the order in which it came.
                Ok(other) if !everything => {
                    self.left = Some(other);
                    break;
                }
                Ok(Message::Read(reader)) => queue.readers.push(reader),
                Ok(Message::Stop(done)) => queue.stop = Some(done),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    queue.is_last = true;
                    break;
                }
            }
        }
        if !queue.changes.is_empty() || !queue.readers.is_empty() {
            self.active = Instant::now();
        }
        queue
    }

    /// When something is to be done if nobody asks.
    pub(crate) fn due(&self) -> Instant {
        match (&self.database, self.note_due) {
            (None, _) => self.active + RETRY,
            (Some(_), Some(due)) => due,
            (Some(_), None) => self.active + TIDY,
        }
    }

    /// Nobody has asked for a while.
    fn write_by_itself(&mut self) {
        if self.is_in_place() {
            let is_idle = self.note_due.is_none();
            self.note_due.get_or_insert_with(Instant::now);
            self.write(Vec::new());
            if is_idle {
                self.take_over();
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
        let is_in_place = Identity::of_at_least(&self.place.path, journal::LENGTH) == Some(database.identity);
        if !is_in_place {
            let path = self.place.path.display();
            tracing::error!(%path, "the database was removed or replaced while devlet ran");
            (self.database, self.ours) = (None, None);
        }
        is_in_place
    }

    /// News of resources.
    fn notes(&mut self) -> Vec<Row> {
        // From here on, a change may be missing in what is read, so it must be noted again.
        self.shared.noted.store(false, Ordering::Release);
        let now = self.clock.now();
        let known = self.shared.change(|state| {
            state.node.forget_idle(now);
            known_resources(&state.node)
        });
        let recorded = &self.around.resources;
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
        let counters = &self.place.counters;
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
        rows().for_each(|row| self.around.follow(row));
        Ok(())
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
        // Whoever is answered may come back at once, and is alone.
        let waiting: Vec<_> = batch.into_iter().map(|change| change.done).collect();
        for done in waiting {
            // Whoever has gone has what it asked for all the same.
            let _ = done.send(written.clone());
        }
    }

    /// Makes the database anew after a failure, unless another file is in its place.
    fn rebuild(&mut self) -> Result<(), WriteError> {
        if self.database.is_some() {
            return Ok(());
        }
        let path = &self.place.path;
        if Identity::at(path).is_some_and(|found| self.ours != Some(found)) {
            return Err(self.refusal("another file is in its place; move that away"));
        }
        match self.place.create(&self.rows()) {
            Ok(database) => {
                self.ours = Some(database.identity);
                self.database = Some(database);
                Ok(())
            }
            Err(error) => {
                // It may have come as far as to its name.
                self.ours = Identity::at(&self.place.path);
                Err(self.failure(&error))
            }
        }
    }

    /// Everything, from memory.
    fn rows(&self) -> Vec<Row> {
        let mut rows = self.around.rows();
        self.shared.read(|node| {
            rows.extend(node.recorded_claims().map(Row::claim));
            rows.extend(node.pods().map(Row::pod));
        });
        rows
    }

    fn refusal(&self, reason: &str) -> WriteError {
        self.place.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: self.place.path.clone(),
            reason: reason.into(),
            kind: None,
        }
    }

    fn failure(&self, error: &redb::Error) -> WriteError {
        self.place.failure(error)
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
    fn outcome(&self) -> Result<(), Unplaced> {
        let found = Identity::at(&self.place.path);
        if found.is_some() && found == self.ours {
            return Ok(());
        }
        let name = format!(".saved-{}", files::timestamp(self.clock.now()));
        let place = Place {
            path: files::beside(&self.place.path, &name),
            ..self.place.clone()
        };
        let saved = place.create(&self.rows());
        Err(Unplaced {
            problem: self.problem(),
            saved: saved.is_ok().then_some(place.path),
        })
    }

    /// Brings the database up to date, so that nobody who comes later has to wait for it.
    fn take_over(&mut self) {
        if let Some(database) = &mut self.database
            && let Err(error) = database.take_over()
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
