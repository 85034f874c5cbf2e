//! The state of an integration with a cluster, as `status` and the lists of pods and slices show it.
//!
//! The integration publishes it, and nothing in the node depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devlet_core::{DriverName, Moment, PodName, PodUid};
use tokio::sync::watch;

/// The state of an integration. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClusterReport(Arc<watch::Sender<ClusterState>>);

/// What an integration reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterState {
    /// `None` without an integration.
    pub connection: Option<ClusterConnection>,
    /// The Node and cluster whose pods are on record, if the API server is another one.
    pub pods_of: Option<String>,
    /// Background tasks by name.
    pub tasks: BTreeMap<&'static str, TaskState>,
    /// Pods of the cluster on this node that wait for their admission, or for the end of their removal.
    pub waiting: BTreeMap<PodUid, WaitingPod>,
    /// ResourceSlices of this node, by name.
    pub slices: BTreeMap<String, ClusterSlice>,
    /// Time since which the Node object has not existed; `None` if it exists, or is not known.
    pub node_missing_since: Option<Moment>,
    /// The drivers that must restart, because the owner of their last slices is an earlier Node object.
    pub stale_drivers: BTreeSet<DriverName>,
    /// Time since which slices of absent drivers are deleted; `None` if they are not.
    pub wipes_slices_since: Option<Moment>,
}

/// The API server of an integration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterConnection {
    /// `agent` or `observe`.
    pub mode: &'static str,
    /// URL of the API server.
    pub server: String,
    /// Name of the Node object.
    pub node: String,
    /// The user that the API server authenticated; empty while unknown.
    pub identity: String,
}

/// A background task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskState {
    /// Time of the last success.
    pub last_success: Option<Moment>,
    /// The last error. Older than the last success if the task works again.
    pub last_error: Option<TaskError>,
    /// Time of the first error since the last success.
    pub failing_since: Option<Moment>,
    /// Number of errors.
    pub errors: u64,
}

/// An error of a background task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskError {
    /// Its time.
    pub at: Moment,
    /// What failed, why, and what to do.
    pub message: String,
}

/// A pod of the cluster that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingPod {
    /// Its name.
    pub name: PodName,
    /// Time since which it waits.
    pub since: Moment,
    /// What it waits for, or why it was refused.
    pub reason: String,
}

/// A ResourceSlice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSlice {
    /// Name of the driver.
    pub driver: String,
    /// Name of the pool.
    pub pool: String,
    /// Generation of the pool.
    pub generation: i64,
    /// Number of devices.
    pub devices: usize,
    /// Creation time, as the API server reports it.
    pub created: String,
    /// `true` if the owner is an earlier Node object of this name: the driver must restart.
    pub has_stale_owner: bool,
    /// Time when it was first seen.
    pub seen: Moment,
}

/// Returns the drivers of slices, and the time when the first slice of each was seen.
pub fn slice_drivers<'a>(slices: impl IntoIterator<Item = &'a ClusterSlice>) -> BTreeMap<DriverName, Moment> {
    let mut drivers = BTreeMap::new();
    for slice in slices {
        let driver = DriverName::from(slice.driver.as_str());
        let first = drivers.entry(driver).or_insert(slice.seen);
        *first = slice.seen.min(*first);
    }
    drivers
}

impl ClusterReport {
    /// Calls `question` with the state.
    pub fn read<T>(&self, question: impl FnOnce(&ClusterState) -> T) -> T {
        question(&self.0.borrow())
    }

    /// Changes the state.
    pub fn update(&self, change: impl FnOnce(&mut ClusterState)) {
        self.0.send_modify(change);
    }

    /// Returns a receiver that sees every change, except those of tasks.
    pub fn subscribe(&self) -> watch::Receiver<ClusterState> {
        self.0.subscribe()
    }

    /// Records a success of a task.
    pub fn succeeded(&self, task: &'static str, now: Moment) {
        self.update_task(task, |state| {
            state.last_success = Some(now);
            state.failing_since = None;
        });
    }

    /// Records an error of a task.
    pub fn failed(&self, task: &'static str, now: Moment, message: String) {
        self.update_task(task, |state| {
            state.last_error = Some(TaskError { at: now, message });
            state.failing_since.get_or_insert(now);
            state.errors += 1;
        });
    }

    /// Changes the state of a task. Does not wake receivers: lists do not show tasks.
    fn update_task(&self, task: &'static str, change: impl FnOnce(&mut TaskState)) {
        self.0.send_if_modified(|state| {
            change(state.tasks.entry(task).or_default());
            false
        });
    }
}
