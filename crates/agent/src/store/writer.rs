//! The one thread that writes to the database.
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
//! A write that failed leaves the database in doubt: the change may be on disk or not, and pages may look written
//! that are not. So the file is given up, and before the next write a new one is made from memory, which is what
//! has been answered for. That is tried again with every batch, and from time to time without one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use devlet_core::{Pod, PodUid, ReservationId};
use tokio::sync::oneshot;

use super::database::{Database, Place, Row, Snapshot, Surroundings, io_kind, reason};
use super::mirror::Doorbell;
use super::{Shared, State};

/// How often the disk is tried again while it refuses writes and nobody asks.
const RETRY: Duration = Duration::from_secs(1);

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
    /// The store has been stopped.
    #[error("the store has been stopped")]
    Stopped,
}

/// A change on its way to disk.
pub(crate) struct Change {
    rows: Vec<Row>,
    second: SecondPhase,
    // After the second phase: whoever sees that no answer comes sees that it was cancelled, too.
    done: oneshot::Sender<Result<(), WriteError>>,
}

/// Carried out when the change is on disk; a change that is lost on the way is cancelled.
struct SecondPhase {
    phase: Option<Phase>,
    shared: Arc<Shared>,
}

impl SecondPhase {
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
    Commit(ReservationId),
    Release(PodUid),
    /// `claimed` are all pods of the file, `pods` those that are different now.
    Import {
        pods: Vec<Pod>,
        claimed: Vec<PodUid>,
    },
    Forget,
    /// Nothing: the change is about the disk only.
    Nothing,
}

impl Phase {
    pub(crate) fn finish(self, state: &mut State) {
        let node = &mut state.node;
        match self {
            Self::Commit(id) => node.finish_commit(id),
            Self::Release(pod) => node.finish_release(&pod),
            Self::Import { pods, claimed } => {
                for pod in pods {
                    let taken_in = node.put(pod);
                    debug_assert!(taken_in.is_ok(), "a claimed pod is in flight");
                }
                node.unblock();
                state.give_back(&claimed);
            }
            Self::Forget => node.unblock(),
            Self::Nothing => {}
        }
    }

    pub(crate) fn cancel(self, state: &mut State) {
        match self {
            Self::Commit(id) => state.node.cancel_commit(id),
            Self::Release(pod) => state.node.cancel_release(&pod),
            Self::Import { claimed, .. } => state.give_back(&claimed),
            Self::Forget | Self::Nothing => {}
        }
    }
}

pub(crate) enum Message {
    Write(Change),
    Read(oneshot::Sender<Result<Snapshot, WriteError>>),
    Stop(oneshot::Sender<()>),
}

/// The way to the writer.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    sender: Sender<Message>,
    shared: Arc<Shared>,
}

impl Outbox {
    pub(crate) fn new(sender: Sender<Message>, shared: Arc<Shared>) -> Self {
        Self { sender, shared }
    }

    /// Hands a change over. If there is nobody to take it, it is cancelled, and the answer never comes.
    pub(crate) fn write(&self, rows: Vec<Row>, phase: Phase) -> oneshot::Receiver<Result<(), WriteError>> {
        let (done, answer) = oneshot::channel();
        let second = SecondPhase {
            phase: Some(phase),
            shared: Arc::clone(&self.shared),
        };
        let _ = self.sender.send(Message::Write(Change { rows, second, done }));
        answer
    }

    pub(crate) fn read(&self) -> oneshot::Receiver<Result<Snapshot, WriteError>> {
        let (done, answer) = oneshot::channel();
        // If nobody takes it, the answer is closed: the store has been stopped.
        let _ = self.sender.send(Message::Read(done));
        answer
    }

    pub(crate) fn stop(&self) -> oneshot::Receiver<()> {
        let (done, answer) = oneshot::channel();
        let _ = self.sender.send(Message::Stop(done));
        answer
    }
}

/// What an answer means: an answer that never comes is that of a writer that has been stopped.
pub(crate) fn settled<T>(
    answer: Result<Result<T, WriteError>, oneshot::error::RecvError>,
) -> Result<T, WriteError> {
    answer.unwrap_or(Err(WriteError::Stopped))
}

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) place: Place,
    /// `None` after a failure.
    pub(crate) database: Option<Database>,
    pub(crate) around: Surroundings,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) doorbell: Doorbell,
}

impl Writer {
    /// Until stopped, or until nobody is left who could send anything.
    pub(crate) fn run(mut self) {
        loop {
            let first = if self.database.is_some() {
                self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.inbox.recv_timeout(RETRY)
            };
            let mut next = match first {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => {
                    let healed = self.rebuild();
                    self.note_health(healed.err());
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let (mut batch, mut readers, mut stop) = (Vec::new(), Vec::new(), None);
            while let Some(message) = next {
                match message {
                    Message::Write(change) => batch.push(change),
                    Message::Read(reader) => readers.push(reader),
                    Message::Stop(done) => stop = Some(done),
                }
                next = self.inbox.try_recv().ok().filter(|_| stop.is_none());
            }
            if !batch.is_empty() {
                self.write(batch);
            }
            for reader in readers {
                // A reader that has gone needs no answer.
                let _ = reader.send(self.read());
            }
            if let Some(done) = stop {
                self.database = None;
                let _ = done.send(());
                return;
            }
        }
    }

    fn write(&mut self, batch: Vec<Change>) {
        let started = Instant::now();
        let written = self.try_write(&batch);
        let counters = &self.place.counters;
        counters.write_durations.add_duration(started.elapsed());
        counters.batches.add_count(batch.len());
        self.note_health(written.clone().err());
        let is_news = batch.iter().any(|change| change.second.is_about_the_node());
        self.settle(batch, &written);
        if written.is_ok() && is_news {
            self.doorbell.ring();
        }
    }

    fn try_write(&mut self, batch: &[Change]) -> Result<(), WriteError> {
        self.rebuild()?;
        let rows = || batch.iter().flat_map(|change| &change.rows);
        let written = match &self.database {
            Some(database) => database.write(rows()),
            None => return Err(WriteError::Stopped),
        };
        if let Err(error) = written {
            self.database = None;
            return Err(self.failure(&error));
        }
        rows().for_each(|row| self.around.follow(row));
        Ok(())
    }

    /// Carries out the second phase of every change, in order; then the callers are answered.
    fn settle(&self, batch: Vec<Change>, written: &Result<(), WriteError>) {
        let waiting = self.shared.change(|state| {
            let settle = |mut change: Change| {
                change.second.settle(state, written.is_ok());
                change.done
            };
            batch.into_iter().map(settle).collect::<Vec<_>>()
        });
        for done in waiting {
            // Whoever has gone has what it asked for all the same.
            let _ = done.send(written.clone());
        }
    }

    /// Makes the database anew after a failure.
    fn rebuild(&mut self) -> Result<(), WriteError> {
        if self.database.is_some() {
            return Ok(());
        }
        let mut rows = self.around.rows();
        self.shared.read(|node| rows.extend(node.pods().map(Row::pod)));
        match self.place.create(&rows) {
            Ok(database) => {
                self.database = Some(database);
                Ok(())
            }
            Err(error) => Err(self.failure(&error)),
        }
    }

    fn failure(&self, error: &redb::Error) -> WriteError {
        self.place.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: self.place.path.clone(),
            reason: reason(error),
            kind: io_kind(error),
        }
    }

    fn note_health(&self, now: Option<WriteError>) {
        let before = self.shared.health.send_replace(now.clone());
        match (before, now) {
            (None, Some(error)) => {
                tracing::error!(%error, "state cannot be written, no pod is admitted");
            }
            (Some(_), None) => tracing::info!("state can be written again"),
            _ => {}
        }
    }

    fn read(&self) -> Result<Snapshot, WriteError> {
        match &self.database {
            Some(database) => database.snapshot().map_err(|error| self.failure(&error)),
            None => Err(self.shared.health.borrow().clone().unwrap_or(WriteError::Stopped)),
        }
    }
}
