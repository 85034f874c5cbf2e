//! Group commit: callers queue changes, and one thread writes all queued changes with one sync.
//!
//! ```text
//!   callers ──enqueue──► queue ──all changes──► writer thread ──► one record ──► one sync ──► answers
//! ```
//!
//! A queued change is written even if its caller stops waiting. So a caller can give up at its deadline while the disk
//! hangs, and a retry finds the change done or in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SendError, Sender};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::Shared;
use super::completion::{Completion, CompletionGuard};
use super::error::{MisplacedDatabase, WriteError};
use super::row::Row;
use super::tables::Snapshot;

/// A change on its way to disk.
pub(crate) struct Change {
    pub(crate) rows: Vec<Row>,
    pub(crate) completion: CompletionGuard,
    // Declared after the completion: dropped unsent, it reports the failure only after the change is cancelled.
    pub(crate) done: oneshot::Sender<Result<(), WriteError>>,
}

/// A message to the writer thread.
pub(crate) enum Message {
    Write(Change),
    /// Metadata of resources has changed.
    ResourcesChanged,
    Read(oneshot::Sender<Result<Snapshot, WriteError>>),
    Stop(oneshot::Sender<Result<(), MisplacedDatabase>>),
}

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
    pub(crate) fn write(&self, rows: Vec<Row>, completion: Completion) -> PendingCommit {
        let (pending, rejected) = self.enqueue(rows, completion);
        drop(rejected);
        pending
    }

    /// Queues a change under the state lock, so that changes are written in the order in which they were begun. A
    /// rejected change must be dropped after the lock is released: its cancellation takes the lock.
    pub(crate) fn enqueue(&self, rows: Vec<Row>, completion: Completion) -> (PendingCommit, RejectedChange) {
        let (done, answer) = oneshot::channel();
        let change = Change {
            rows,
            completion: CompletionGuard::new(completion, Arc::clone(&self.shared)),
            done,
        };
        let sent = self.sender.send(Message::Write(change));
        let pending = PendingCommit {
            answer,
            timeout: self.shared.write_timeout,
        };
        (pending, RejectedChange(sent.err()))
    }

    fn send(&self, message: Message) {
        // Fails if the store has been stopped; then the answer never comes.
        let _ = self.sender.send(message);
    }

    /// Reports that metadata of resources has changed.
    pub(crate) fn resources_changed(&self) {
        if !self.shared.resources_dirty.swap(true, Ordering::AcqRel) {
            self.send(Message::ResourcesChanged);
        }
    }

    pub(crate) fn read(&self) -> oneshot::Receiver<Result<Snapshot, WriteError>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Read(done));
        answer
    }

    pub(crate) fn stop(&self) -> oneshot::Receiver<Result<(), MisplacedDatabase>> {
        let (done, answer) = oneshot::channel();
        self.send(Message::Stop(done));
        answer
    }
}

/// A queued change. It is written even if this is dropped.
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

/// Waits for a write until `deadline`. The write continues after that.
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
