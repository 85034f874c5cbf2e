//! Group commit: callers queue changes, one thread writes all that are queued with one sync.
//!
//! ```text
//!   callers ──enqueue──► queue ──all of it──► writer thread ──► one record ──► one sync ──► answers
//! ```
//!
//! A queued change is carried out, whether its caller still waits or not. So a caller may stop waiting at its deadline
//! even if the disk hangs, and a retry finds the change done or in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SendError, Sender};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::Shared;
use super::row::Row;
use super::tables::Snapshot;
use super::writer::{Change, Message, Phase, SecondPhase, Unplaced, WriteError};

/// A change that the writer did not accept because it has ended. Dropping it cancels the change.
#[must_use = "a change is cancelled where this is dropped"]
pub(crate) struct RejectedChange(
    #[expect(dead_code, reason = "it is there to be dropped")] Option<SendError<Message>>,
);

/// The queue to the writer thread, which ends with the last clone.
#[derive(Clone)]
pub(crate) struct CommitQueue {
    sender: Sender<Message>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for CommitQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommitQueue").finish_non_exhaustive()
    }
}

impl CommitQueue {
    pub(crate) fn new(sender: Sender<Message>, shared: Arc<Shared>) -> Self {
        Self { sender, shared }
    }

    /// Queues a change. If the writer has ended, the change is cancelled.
    pub(crate) fn write(&self, rows: Vec<Row>, phase: Phase) -> PendingCommit {
        let (pending, rejected) = self.enqueue(rows, phase);
        drop(rejected);
        pending
    }

    /// Queues a change under the state lock, so that changes are written in the order in which they were begun. A
    /// rejected change must be dropped after the lock is released: its cancellation takes the lock.
    pub(crate) fn enqueue(&self, rows: Vec<Row>, phase: Phase) -> (PendingCommit, RejectedChange) {
        let (done, answer) = oneshot::channel();
        let change = Change {
            rows,
            second: SecondPhase::new(phase, Arc::clone(&self.shared)),
            done,
        };
        let sent = self.sender.send(Message::Write(change));
        let pending = PendingCommit {
            answer,
            timeout: self.shared.patience,
        };
        (pending, RejectedChange(sent.err()))
    }

    fn send(&self, message: Message) {
        // Fails if the store has been stopped; then the answer never comes.
        let _ = self.sender.send(message);
    }

    /// Reports that the known resources have changed.
    pub(crate) fn note(&self) {
        if !self.shared.noted.swap(true, Ordering::AcqRel) {
            self.send(Message::Note);
        }
    }

    pub(crate) fn read(&self) -> oneshot::Receiver<Result<Snapshot, WriteError>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Read(done));
        answer
    }

    pub(crate) fn stop(&self) -> oneshot::Receiver<Result<(), Unplaced>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Stop(done));
        answer
    }
}

/// A queued change. It is carried out even if this is dropped.
pub(crate) struct PendingCommit {
    answer: oneshot::Receiver<Result<(), WriteError>>,
    /// Longest wait for the disk.
    timeout: Duration,
}

impl PendingCommit {
    /// Waits until the change is on disk. A disk that does not answer in time is an error; the change may still be
    /// written then.
    pub(crate) async fn done(self) -> Result<(), WriteError> {
        in_time(Instant::now() + self.timeout, async {
            flatten_recv(self.answer.await)
        })
        .await
    }

    /// Like [`PendingCommit::done`], without a time limit.
    pub(crate) async fn ended(self) -> Result<(), WriteError> {
        flatten_recv(self.answer.await)
    }

    /// Like [`PendingCommit::ended`], for threads.
    pub(crate) fn wait(self) -> Result<(), WriteError> {
        flatten_recv(self.answer.blocking_recv())
    }
}

/// Waits for a write until `deadline`. The write is carried out even if this gives up.
pub(crate) async fn in_time<T, E: From<WriteError>>(
    deadline: Instant,
    write: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let started = Instant::now();
    timeout_at(deadline, write).await.unwrap_or_else(|_| {
        let waited = started.elapsed();
        Err(WriteError::TimedOut { waited }.into())
    })
}

/// An answer that never comes means that the writer has ended.
pub(crate) fn flatten_recv<T>(
    answer: Result<Result<T, WriteError>, oneshot::error::RecvError>,
) -> Result<T, WriteError> {
    answer.unwrap_or(Err(WriteError::Stopped))
}
