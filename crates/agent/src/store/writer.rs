//! The thread that writes to the database: one record and one sync for all queued changes (`commit_queue.rs`).
//!
//! ```text
//!   queue ──all changes──► one record ──► one sync
//!                                            │
//!      ◄── answers ◄── completions, in order, under one lock ◄──┘
//! ```
//!
//! Memory follows the disk: a change is completed in memory after its sync, and cancelled if the sync fails.
//!
//! Metadata of resources (the last plugin, and since when it is gone) is flushed asynchronously: with the next change,
//! which needs no additional sync, or alone after [`RESOURCE_FLUSH_DELAY`].
//!
//! After a failed write the content of the file is unknown: the change may be on disk, and pages may be readable that were
//! not written. So the file is discarded, and the next write creates a new one from memory, which has all answered
//! changes. The writer retries with every batch, and every [`RETRY_INTERVAL`] without one.
//!
//! The writer also creates a new file if another process removed or replaced the current one. A change is answered only
//! after a check that the file is still in place. A file of another process is left alone, and no change is written until
//! it is gone. The writer then raises the progress in the id files (`node_id.rs`) above that of every existing database, so
//! that a start after a kill accepts none of them.
//!
//! While no id file has the progress of the database, no change is written either.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::clock::MonotonicClock;
use super::commit_queue::{Change, Message};
use super::database::{Database, DatabaseFile};
use super::error::{MisplacedDatabase, WriteError};
use super::fs::{self, FileId};
use super::kubelet_file::BlockedBy;
use super::kubelet_files::MirrorHandle;
use super::node_id::{IdFiles, Progress};
use super::persisted_state::NodeMetadata;
use super::record::known_resources;
use super::row::Row;
use super::tables::Snapshot;
use super::{Shared, wal};

/// Interval of retries while writes fail and no change is queued.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time that changed metadata of resources waits for another change to be written with.
pub(crate) const RESOURCE_FLUSH_DELAY: Duration = Duration::from_millis(100);

/// Interval of idle checks: the database is still in place, idle resources are evicted.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) file: DatabaseFile,
    /// `None` after a failure.
    pub(crate) database: Option<Database>,
    /// The file that this writer created or opened.
    pub(crate) own_file: Option<FileId>,
    pub(crate) metadata: NodeMetadata,
    pub(crate) id_files: IdFiles,
    /// An id file has the progress of the database, so that an older copy is recognised.
    pub(crate) is_progress_recorded: bool,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) mirror: MirrorHandle,
    pub(crate) clock: MonotonicClock,
    /// Deadline for changed metadata of resources; `None` if nothing has changed.
    pub(crate) resource_flush_at: Option<Instant>,
    /// Time of the last work.
    pub(crate) last_active: Instant,
}

/// The messages in the queue, by kind.
#[derive(Default)]
struct Batch {
    changes: Vec<Change>,
    readers: Vec<oneshot::Sender<Result<Snapshot, WriteError>>>,
    stop: Option<oneshot::Sender<Result<(), MisplacedDatabase>>>,
}

impl Writer {
    /// Writes until the store is stopped, or until the last sender is dropped.
    pub(crate) fn run(self) {
        let shared = Arc::clone(&self.shared);
        if catch_unwind(AssertUnwindSafe(|| self.write_until_stopped())).is_err() {
            // It is unknown whether the last change is on disk, so no further change is written.
            shared.health.send_replace(Some(WriteError::Stopped));
            tracing::error!("writer ended by a panic, no pod is admitted");
        }
    }

    fn write_until_stopped(mut self) {
        loop {
            let idle = self.next_wakeup().saturating_duration_since(Instant::now());
            let mut batch = Batch::default();
            match self.inbox.recv_timeout(idle) {
                Ok(message) => self.sort_message(message, &mut batch),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Messages behind a stop are not read.
            while batch.stop.is_none()
                && let Ok(message) = self.inbox.try_recv()
            {
                self.sort_message(message, &mut batch);
            }
            self.shared.set_writing_since(Some(Instant::now()));
            let goes_on = self.work(batch);
            self.shared.set_writing_since(None);
            if !goes_on {
                return;
            }
        }
    }

    fn sort_message(&mut self, message: Message, batch: &mut Batch) {
        match message {
            Message::Write(change) => batch.changes.push(change),
            Message::Read(reader) => batch.readers.push(reader),
            Message::Stop(done) => batch.stop = Some(done),
            Message::ResourcesChanged => {
                self.resource_flush_at
                    .get_or_insert_with(|| Instant::now() + RESOURCE_FLUSH_DELAY);
            }
        }
    }

    /// Handles a batch of messages and the work that is due. Returns `false` after a stop.
    fn work(&mut self, batch: Batch) -> bool {
        if !batch.changes.is_empty() || !batch.readers.is_empty() {
            self.last_active = Instant::now();
        }
        if !batch.changes.is_empty() {
            self.write(batch.changes);
        }
        for reader in batch.readers {
            // Fails if the reader has stopped waiting.
            let snapshot = self.read();
            let _ = reader.send(snapshot);
        }
        if let Some(done) = batch.stop {
            if self.resource_flush_at.is_some() {
                self.write(Vec::new());
            }
            if self.is_in_place() {
                self.record_stop();
            } else {
                self.recover();
            }
            self.database = None;
            let _ = done.send(self.final_result());
            return false;
        }
        if Instant::now() >= self.next_wakeup() {
            self.work_while_idle();
            self.last_active = Instant::now();
        }
        true
    }

    /// Returns the time of the next work that needs no message.
    fn next_wakeup(&self) -> Instant {
        match (&self.database, self.resource_flush_at) {
            (None, _) => self.last_active + RETRY_INTERVAL,
            _ if !self.is_progress_recorded => self.last_active + RETRY_INTERVAL,
            (Some(_), Some(due)) => due,
            (Some(_), None) => self.last_active + IDLE_CHECK_INTERVAL,
        }
    }

    /// Flushes metadata of resources, makes a checkpoint, or recovers the database.
    fn work_while_idle(&mut self) {
        if self.is_in_place() && self.is_progress_recorded {
            let is_idle = self.resource_flush_at.is_none();
            self.resource_flush_at.get_or_insert_with(Instant::now);
            self.write(Vec::new());
            if is_idle {
                self.checkpoint();
            }
            if self.shared.has_id_failure()
                && let Err(error) = self.record_progress()
            {
                self.set_health(Some(error));
            }
        } else {
            self.recover();
        }
    }

    fn recover(&mut self) {
        let rebuilt = self.rebuild();
        self.set_health(rebuilt.err());
    }

    /// Returns `true` if the open database is still in place. Otherwise abandons its file.
    fn is_in_place(&mut self) -> bool {
        let Some(database) = &self.database else {
            return false;
        };
        let is_in_place = FileId::of_at_least(&self.file.path, wal::LENGTH) == Some(database.file_id);
        if !is_in_place {
            let path = self.file.path.display();
            tracing::error!(%path, "the database was removed or replaced while devlet ran");
            self.abandon_file();
        }
        is_in_place
    }

    /// Closes a database whose file was removed, replaced or truncated. Raises the progress in the id files above that of
    /// every existing database: after a kill, the next start treats the file in its place as an older copy.
    fn abandon_file(&mut self) {
        self.database = None;
        if self.metadata.is_blocked_by_database() {
            self.own_file = None;
            return;
        }
        if self.own_file.take().is_some() {
            let starts = self.metadata.progress.starts.saturating_add(1);
            self.metadata.progress = Progress::of_start(starts);
            self.is_progress_recorded = false;
        }
        // Retried with every attempt to create the database.
        if !self.is_progress_recorded
            && let Err(error) = self.record_progress()
        {
            tracing::warn!(%error, "loss of the database not recorded");
        }
    }

    /// Returns the changed metadata of resources.
    fn resource_updates(&mut self) -> Vec<Row> {
        // A change from here on may be missing in the copy below, so it must be reported again.
        self.shared.resources_dirty.store(false, Ordering::Release);
        let now = self.clock.now();
        let known = self.shared.change(|state| {
            state.node.evict_idle(now);
            known_resources(&state.node)
        });
        let recorded = &self.metadata.resources;
        let forgotten = recorded.keys().filter(|name| !known.contains_key(*name));
        let mut rows: Vec<Row> = forgotten
            .flat_map(|name| [Row::Resource(name.clone(), None), Row::List(name.clone(), None)])
            .collect();
        let news = known
            .into_iter()
            .filter(|(name, record)| recorded.get(name) != Some(record));
        rows.extend(news.map(|(name, record)| Row::Resource(name, Some(record))));
        rows
    }

    /// Writes changes, and the metadata of resources if a flush is due.
    fn write(&mut self, batch: Vec<Change>) {
        let started = Instant::now();
        let resource_updates = match self.resource_flush_at.take() {
            Some(_) => self.resource_updates(),
            None => Vec::new(),
        };
        if batch.is_empty() && resource_updates.is_empty() {
            return;
        }
        let written = self.try_write(&batch, &resource_updates);
        if written.is_err() && !resource_updates.is_empty() {
            self.resource_flush_at = Some(Instant::now() + RETRY_INTERVAL);
        }
        let counters = &self.file.counters;
        if !batch.is_empty() {
            counters.write_durations.add_duration(started.elapsed());
            counters.batches.add_count(batch.len());
        }
        self.set_health(written.clone().err());
        let is_news = batch.iter().any(|change| change.completion.changes_node());
        self.complete(batch, &written);
        if written.is_ok() && is_news {
            self.mirror.request();
        }
        self.maintain(Database::ensure_wal_space);
    }

    fn try_write(&mut self, batch: &[Change], resource_updates: &[Row]) -> Result<(), WriteError> {
        // Changes come last, so that they override metadata of the same resource.
        let rows = || {
            resource_updates
                .iter()
                .chain(batch.iter().flat_map(|change| &change.rows))
        };
        self.write_rows(rows())?;
        if !self.is_in_place() {
            // Written to a removed file, so written again to a new one.
            self.write_rows(rows())?;
            if !self.is_in_place() {
                return Err(self.refusal("another process keeps removing it"));
            }
        }
        // An operator has decided about the lost database, so the id files may name this one.
        let was_blocked = self.metadata.is_blocked_by_database();
        if was_blocked && rows().any(|row| matches!(row, Row::Blocked(BlockedBy::Database, None))) {
            let recorded = self.record_progress();
            if recorded.is_err() {
                // Still blocked: the database is created again from memory.
                (self.database, self.is_progress_recorded) = (None, true);
            }
            recorded?;
        }
        rows().for_each(|row| self.metadata.apply(row));
        Ok(())
    }

    /// Writes the progress of the database to the id files.
    fn record_progress(&mut self) -> Result<(), WriteError> {
        let Some(id) = &self.metadata.node_id else {
            return Ok(());
        };
        let written = self.id_files.write(id, &self.metadata.progress);
        self.is_progress_recorded = written.is_ok();
        let failure = written.as_ref().map_or_else(Some, Option::as_ref);
        self.shared.set_id_failure(failure.map(ToString::to_string));
        written.map(drop).map_err(|not| self.file.not_written(&not))
    }

    /// Writes a new ID of this stop to the database and then to the id files. The next start recognises every other
    /// database by it.
    fn record_stop(&mut self) {
        let row = Row::Progress(self.metadata.progress.stopped());
        let written = self.write_rows(std::iter::once(&row));
        let is_written = written.is_ok();
        if let Err(error) = written {
            self.set_health(Some(error));
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
        written.map_err(|error| self.discard_database(&error))
    }

    /// Completes or cancels every change in memory, in order. Then answers the callers.
    fn complete(&self, batch: Vec<Change>, written: &Result<(), WriteError>) {
        // Changes are not moved into the closure: a guard that is dropped under the lock, even by a panic, would deadlock.
        let mut batch = batch;
        self.shared.change(|state| {
            for change in &mut batch {
                change.completion.run(state, written.is_ok());
            }
        });
        for change in batch {
            // Fails if the caller has stopped waiting. The change is done in any case.
            let _ = change.done.send(written.clone());
        }
    }

    /// Creates the database again after a failure, unless another file is in its place, and updates the id files.
    fn rebuild(&mut self) -> Result<(), WriteError> {
        if self.database.is_none() {
            self.create()?;
        }
        if self.is_progress_recorded || self.metadata.is_blocked_by_database() {
            return Ok(());
        }
        self.record_progress()
    }

    fn create(&mut self) -> Result<(), WriteError> {
        let found = FileId::at(&self.file.path);
        if found.is_none() || found != self.own_file {
            self.abandon_file();
        }
        if found.is_some() && found != self.own_file {
            return Err(self.refusal("another file is in its place; move that away"));
        }
        match self.file.create(&self.rows()) {
            Ok(database) => {
                self.own_file = Some(database.file_id);
                self.database = Some(database);
                Ok(())
            }
            Err(error) => {
                // The new file may already have its final name.
                self.own_file = FileId::at(&self.file.path);
                Err(self.failure(&error))
            }
        }
    }

    /// Returns the whole content of the database, from memory.
    fn rows(&self) -> Vec<Row> {
        let mut rows = self.metadata.rows();
        self.shared.read(|node| {
            rows.extend(node.recorded_claims().map(Row::claim));
            rows.extend(node.pods().map(Row::pod));
            rows.extend(node.leases().iter().map(|view| Row::lease(view.lease)));
            rows.extend(node.remembered_lists().map(|(name, list)| Row::list(name, list)));
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

    pub(crate) fn set_health(&self, now: Option<WriteError>) {
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
            Some(database) => database.snapshot().map_err(|error| self.discard_database(&error)),
            None => Err(self.problem()),
        }
    }

    fn problem(&self) -> WriteError {
        self.shared.health.borrow().clone().unwrap_or(WriteError::Stopped)
    }

    /// Returns `Ok` if the writer's own file is in place: it has all answered changes. Otherwise saves them in another file.
    fn final_result(&mut self) -> Result<(), MisplacedDatabase> {
        let found = FileId::at(&self.file.path);
        if found.is_some() && found == self.own_file {
            return Ok(());
        }
        let name = format!(".saved-{}", fs::timestamp(self.clock.now()));
        let file = DatabaseFile {
            path: fs::with_suffix(&self.file.path, &name),
            ..self.file.clone()
        };
        // The id files name this stop, so that the next start does not accept the file in the place of the database.
        self.metadata.progress = self.metadata.progress.stopped();
        let saved = file.create(&self.rows());
        if !self.metadata.is_blocked_by_database()
            && let Err(error) = self.record_progress()
        {
            tracing::warn!(%error, "stop not recorded");
        }
        Err(MisplacedDatabase {
            problem: self.problem(),
            saved: saved.is_ok().then_some(file.path),
        })
    }

    fn checkpoint(&mut self) {
        self.maintain(Database::checkpoint);
    }

    /// Does background work. If it fails, no change is accepted until the database has recovered.
    fn maintain(&mut self, work: fn(&mut Database) -> Result<(), redb::Error>) {
        if let Some(database) = &mut self.database
            && let Err(error) = work(database)
        {
            let error = self.discard_database(&error);
            self.set_health(Some(error));
        }
    }

    /// Closes the database: its content is unknown after a failed write.
    fn discard_database(&mut self, error: &redb::Error) -> WriteError {
        self.database = None;
        self.failure(error)
    }
}
