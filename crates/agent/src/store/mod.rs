//! The node's state behind one lock, and its durable copy on disk.
//!
//! ```text
//!   workflows, reconcilers
//!      │ read, update, hold          │ commit, release, import, forget
//!      ▼                             ▼
//!   ┌───────────────┐ completion ┌────────┐   one record for    ┌──────────┐
//!   │ Node (a lock) │ ◄───────── │ writer │ ──────────────────► │ database │
//!   └───────────────┘            └────────┘  all queued changes └──────────┘
//!                                    ▲ hash first                    │ snapshot
//!                                ┌──────────────┐   periodically     │
//!                                │ mirror files │ ◄──────────────────┘
//!                                └──────────────┘ ──► kubelet_internal_checkpoint, dra_manager_state
//! ```
//!
//! - Closures that run under the lock cannot await.
//! - Memory follows the disk: a change takes effect and is answered after it has been synced. If the write fails, the change
//!   is cancelled and the caller gets the error.
//! - A queued change is written even if its caller stops waiting (`commit_queue.rs`).
//! - A kubelet's file that devlet did not write is read at start (`open.rs`).
//!
//! Deliberately absent: the lock on the root directory (the caller has it), and retries (the caller gets the error).

mod adopt;
mod answer;
mod changes;
mod claim_record;
mod claims_file;
mod clients;
mod clock;
mod cluster_record;
mod commit_queue;
mod completion;
mod contest;
mod database;
mod database_link;
mod decisions;
mod devices_file;
mod dump;
mod error;
mod file_backend;
mod file_on_disk;
pub(crate) mod fs;
mod held;
mod import;
mod import_report;
mod kubelet_file;
mod kubelet_files;
mod lease_record;
mod leases;
mod load_error;
mod mirror_hashes;
mod node_id;
mod open;
mod open_options;
mod open_report;
mod persisted_state;
mod quarantine;
mod reboot;
mod record;
mod row;
pub(crate) mod state_file;
mod tables;
mod threads;
mod wal;
mod writer;

use crate::metrics::statistics::Counters;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devlet_core::dra::claims::BeginForgetError;
use devlet_core::{ClaimUid, Moment, Node, PodUid, ReleaseError as ReleaseRefused};
use tokio::sync::watch;

pub use crate::config::OnReboot;
pub use crate::metrics::statistics::{BATCH_BOUNDS, DURATION_BOUNDS, Histogram, Statistics};
pub use answer::answer;
pub(crate) use changes::Changes;
pub use clients::Clients;
pub use clock::Clock;
pub(crate) use clock::system_time;
pub use cluster_record::ClusterRecord;
pub(crate) use commit_queue::in_time;
pub(crate) use devices_file::is_unknown_pod;
pub use error::{
    CommitError, DumpError, ForgetClaimError, ForgetFileError, HoldError, ImportError, ReleaseError,
    StopError, WriteError,
};
pub use file_backend::Storage;
pub use held::{Held, Hold};
pub use import_report::{Difference, ImportReport, Undecodable, UnreadableFile};
pub use kubelet_files::MirrorError;
pub use leases::{LeaseError, PreparingLeases};
pub use open_options::OpenOptions;
pub use open_report::{Contested, Found, OpenError, OpenReport, Quarantined, Reboot, Takeover};

use clock::MonotonicClock;
use commit_queue::{PendingCommit, flatten_recv};
use completion::Completion;
use contest::Contest;
use error::MisplacedDatabase;
use kubelet_file::{BlockedBy, PendingFile};
use kubelet_files::MirrorRequest;
use load_error::LoadError;
use record::BlockedRecord;
use row::Row;
use threads::Threads;

/// The state that the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    node: Node,
    /// Blocks by unreadable or lost state, as recorded.
    blocked: BTreeMap<BlockedBy, BlockedRecord>,
    /// Files that an operator has to decide about, as recorded.
    contested: BTreeMap<PendingFile, Contest>,
    cluster: Option<ClusterRecord>,
}

/// The data that the store's threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    latest: watch::Sender<u64>,
    health: watch::Sender<Option<WriteError>>,
    /// Why the kubelet's file is out of date.
    mirror_failure: Mutex<Option<String>>,
    /// Why an id file does not have the progress of the database.
    id_failure: Mutex<Option<String>>,
    /// Found at the path of a kubelet's file since the store was opened.
    quarantined: Mutex<Vec<Quarantined>>,
    /// Start of the write in progress.
    writing_since: Mutex<Option<Instant>>,
    /// Duration from which a write counts as stalled.
    write_timeout: Duration,
    /// The writer has been notified of changed metadata of resources.
    resources_dirty: AtomicBool,
    counters: Arc<Counters>,
    /// Number of times that the lock was taken.
    #[cfg(test)]
    pub(crate) locks: std::sync::atomic::AtomicUsize,
}

impl Shared {
    fn new(state: State, write_timeout: Duration, counters: Arc<Counters>) -> Self {
        let (latest, _) = watch::channel(state.node.changes());
        let (health, _) = watch::channel(None);
        Self {
            state: Mutex::new(state),
            latest,
            health,
            mirror_failure: Mutex::new(None),
            id_failure: Mutex::new(None),
            quarantined: Mutex::default(),
            writing_since: Mutex::new(None),
            write_timeout,
            resources_dirty: AtomicBool::new(false),
            counters,
            #[cfg(test)]
            locks: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    fn set_id_failure(&self, failure: Option<String>) {
        let mut known = self.id_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = failure.as_ref().filter(|_| known.is_none()) {
            tracing::warn!(error, "id file not written, trying again");
        }
        *known = failure;
    }

    fn has_id_failure(&self) -> bool {
        let failure = self.id_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        self.locks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // Transitions check before they change, so a panic in a closure does not leave a partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        question(&self.lock().node)
    }

    fn change<T>(&self, transition: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let before = state.node.changes();
        let answer = transition(&mut state);
        let after = state.node.changes();
        // Unlocked first: woken tasks take the lock. The counter never goes back if threads get here out of order.
        drop(state);
        if after != before {
            self.latest.send_if_modified(|latest| {
                let is_news = *latest < after;
                *latest = after.max(*latest);
                is_news
            });
        }
        answer
    }

    fn update<T>(&self, transition: impl FnOnce(&mut Node) -> T) -> T {
        self.change(|state| transition(&mut state.node))
    }

    fn set_writing_since(&self, start: Option<Instant>) {
        *self.writing_since.lock().unwrap_or_else(PoisonError::into_inner) = start;
    }

    /// Returns an error if the write in progress has stalled.
    fn write_stall(&self) -> Option<WriteError> {
        let since = *self.writing_since.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = since?.elapsed();
        (waited >= self.write_timeout).then_some(WriteError::Hangs { waited })
    }
}

/// The node's state. Cheap to clone; all clones are the same store.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
    threads: Arc<Threads>,
    /// Serialises [`Store::record_claims`]: each call sees the changes of the previous one on disk.
    recording: Arc<tokio::sync::Mutex<()>>,
    /// Serialises imports and forgets while the node is blocked; see [`decisions::Turn`].
    deciding: Arc<tokio::sync::Mutex<()>>,
    clock: MonotonicClock,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the state of a node, or creates it; see [`OpenOptions`].
    pub fn open(options: OpenOptions) -> Result<(Self, OpenReport), OpenError> {
        open::open(options)
    }

    /// Reads the state under the lock.
    pub fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        self.shared.read(question)
    }

    /// Applies an observed fact, which need not be durable. Resource metadata is flushed asynchronously.
    pub fn update<T>(&self, transition: impl FnOnce(&mut Node) -> T) -> T {
        let (answer, has_new_metadata) = self.shared.update(|node| {
            let before = node.resource_changes();
            let answer = transition(node);
            (answer, node.resource_changes() != before)
        });
        if has_new_metadata {
            self.threads.writer.resources_changed();
        }
        self.threads.mirror.request();
        answer
    }

    /// Returns a receiver of [`Node::changes`].
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.latest.subscribe()
    }

    /// Returns the changes of the node, for an operation that waits.
    pub(crate) fn changes(&self) -> Changes {
        Changes::new(self.subscribe())
    }

    /// Waits until `view` returns `Ok`, and returns its value. If `deadline` passes or the store stops first, returns the last
    /// error of `view`.
    pub(crate) async fn wait_for<T, E>(
        &self,
        deadline: tokio::time::Instant,
        view: impl Fn(&Node) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut changes = self.changes();
        loop {
            changes.mark_seen();
            let seen = self.read(&view);
            // Changes in quick succession must not extend the deadline.
            if seen.is_ok() || tokio::time::Instant::now() >= deadline {
                return seen;
            }
            let changed = tokio::time::timeout_at(deadline, changes.changed()).await;
            if !matches!(changed, Ok(Ok(()))) {
                return seen;
            }
        }
    }

    /// Returns the time, which advances steadily even if the system's clock is set.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns an error if the last change could not be written, or if a write has stalled. devlet keeps retrying.
    pub fn health(&self) -> Result<(), WriteError> {
        let failure = self.shared.health.borrow().clone();
        failure.or_else(|| self.shared.write_stall()).map_or(Ok(()), Err)
    }

    /// Returns why the kubelet's file is out of date, if it cannot be written. Pods are still admitted, but a kubelet must
    /// not take over.
    pub fn mirror_failure(&self) -> Option<String> {
        let failure = self.shared.mirror_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns why an id file is out of date. Pods are admitted as long as the other one is up to date.
    pub fn id_failure(&self) -> Option<String> {
        let failure = self.shared.id_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the files that were found at the path of a kubelet's file and quarantined since the store was opened.
    pub fn quarantined(&self) -> Vec<Quarantined> {
        let quarantined = self.shared.quarantined.lock();
        quarantined.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how often the state lock was taken.
    #[cfg(test)]
    pub(crate) fn locks(&self) -> usize {
        self.shared.locks.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns counters since the store was opened.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.snapshot()
    }

    /// Releases the devices and claims of a pod. Returns when that is on disk.
    ///
    /// After the first poll the change is written even if the future is dropped.
    pub async fn release(&self, pod: &PodUid) -> Result<(), ReleaseError> {
        self.release_if(pod, |_| true).await
    }

    /// Like [`Store::release`], but treats the pod as unknown unless `still` returns `true` under the lock.
    pub async fn release_if(
        &self,
        pod: &PodUid,
        still: impl FnOnce(&Node) -> bool,
    ) -> Result<(), ReleaseError> {
        let written = self.begin(|state| {
            if !still(&state.node) {
                return Err(ReleaseRefused::Unknown);
            }
            let claims = state.node.begin_release(pod)?;
            let mut rows = vec![Row::Pod(pod.clone(), None)];
            rows.extend(claims.iter().map(Row::claim));
            Ok(Some((rows, Completion::Release(pod.clone()))))
        })?;
        Ok(done(written).await?)
    }

    /// Writes the results of drivers' background work, and claims that an operator abandoned. Returns `true` if there was
    /// something to write.
    pub async fn record_claims(&self) -> Result<bool, WriteError> {
        // A task of its own: it keeps the lock until the write has ended, even if the caller stops waiting.
        let store = self.clone();
        let recording = tokio::spawn(async move { store.record_claims_in_turn().await });
        let deadline = tokio::time::Instant::now() + self.shared.write_timeout;
        in_time(deadline, async {
            recording.await.unwrap_or(Err(WriteError::Stopped))
        })
        .await
    }

    async fn record_claims_in_turn(&self) -> Result<bool, WriteError> {
        let _turn = self.recording.lock().await;
        let written = self.begin(|state| {
            let change = state.node.begin_record().map(|record| {
                let mut rows: Vec<Row> = record.put.iter().map(Row::claim).collect();
                rows.extend(record.delete.into_iter().map(|uid| Row::Claim(uid, None)));
                (rows, Completion::Record(record.id))
            });
            Ok::<_, WriteError>(change)
        })?;
        match written {
            Some(written) => written.ended().await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Deletes the record of an abandoned claim. Returns when that is on disk.
    pub async fn forget_claim(&self, claim: &ClaimUid) -> Result<(), ForgetClaimError> {
        let written = self.begin(|state| {
            let record = state.node.begin_forget(claim)?;
            let rows = record.delete.into_iter().map(|uid| Row::Claim(uid, None));
            Ok::<_, BeginForgetError>(Some((rows.collect(), Completion::Record(record.id))))
        })?;
        Ok(done(written).await?)
    }

    /// Returns the content of the database as JSON, for people.
    pub async fn dump(&self) -> Result<serde_json::Value, DumpError> {
        let snapshot = flatten_recv(self.threads.writer.read().await)?;
        let unreadable = |error: LoadError| DumpError::Unreadable {
            reason: error.to_string(),
        };
        Ok(dump::to_json(&snapshot.load().map_err(unreadable)?))
    }

    /// Updates the kubelet's files immediately.
    pub async fn mirror(&self) -> Result<(), MirrorError> {
        let answer = self.threads.mirror.send(MirrorRequest::Now).await;
        answer.unwrap_or(Err(MirrorError::Write(WriteError::Stopped)))
    }

    /// Stops the store: writes queued changes, updates the kubelet's files and closes the database. To be called after the
    /// last change.
    pub async fn stop(&self) -> Result<(), StopError> {
        let mirrored = self.threads.mirror.send(MirrorRequest::Stop).await;
        let stopped = self.threads.writer.stop().await;
        let (Ok(mirrored), Ok(stopped)) = (mirrored, stopped) else {
            return Err(StopError::Stopped);
        };
        match stopped {
            Ok(()) => Ok(mirrored?),
            Err(MisplacedDatabase {
                problem,
                saved: Some(saved),
            }) => Err(StopError::Misplaced { problem, saved }),
            Err(MisplacedDatabase { problem, saved: None }) => Err(StopError::Lost { problem }),
        }
    }

    /// Begins a change under the lock and queues it, so that changes are written in order. `None` if there is nothing to
    /// write.
    fn begin<E>(
        &self,
        begin: impl FnOnce(&mut State) -> Result<Option<(Vec<Row>, Completion)>, E>,
    ) -> Result<Option<PendingCommit>, E> {
        let queued = self.shared.change(|state| {
            let change = begin(state)?;
            Ok(change.map(|(rows, completion)| self.threads.writer.enqueue(rows, completion)))
        })?;
        // Dropped after the lock is released: the cancellation of a rejected change takes it.
        Ok(queued.map(|(written, rejected)| {
            drop(rejected);
            written
        }))
    }
}

/// Waits until a change is on disk.
async fn done(written: Option<PendingCommit>) -> Result<(), WriteError> {
    match written {
        Some(written) => written.done().await,
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
