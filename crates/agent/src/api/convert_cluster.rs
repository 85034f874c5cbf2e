//! Converts the state of a cluster into messages of the API: reconcilers, waiting pods and ResourceSlices.

use std::collections::BTreeMap;

use devlet_client::v1;
use devlet_core::{DriverName, Moment, Node, PodUid};
use jiff::Timestamp;

use super::convert::{age, number};
use crate::cluster::{ClusterSlice, ClusterState, TaskError, TaskState, WaitingPod, slice_drivers};

/// Returns the status of an integration, if there is one.
pub(super) fn status(state: &ClusterState, now: Moment) -> Option<v1::KubernetesStatus> {
    let connection = state.connection.as_ref()?;
    let tasks = state.tasks.iter();
    Some(v1::KubernetesStatus {
        mode: connection.mode.to_owned(),
        server: connection.server.clone(),
        node: connection.node.clone(),
        identity: connection.identity.clone(),
        reconcilers: tasks.map(|(name, task)| reconciler(name, task, now)).collect(),
        pods_waiting: number(state.waiting.len()),
        slices: number(state.slices.len()),
    })
}

fn reconciler(name: &str, task: &TaskState, now: Moment) -> v1::Reconciler {
    let time = |moment: Option<Moment>| moment.map_or((0, 0), |moment| (moment.0, age(moment, now)));
    let (last_success_ms, last_success_age_ms) = time(task.last_success);
    let (failing_since_ms, failing_for_ms) = time(task.failing_since);
    let error = |error: &TaskError| v1::ReconcilerError {
        message: error.message.clone(),
        at_ms: error.at.0,
        age_ms: age(error.at, now),
    };
    v1::Reconciler {
        name: name.to_owned(),
        last_success_ms,
        last_success_age_ms,
        last_error: task.last_error.as_ref().map(error),
        failing_since_ms,
        failing_for_ms,
    }
}

/// Converts a pod that waits and is not on record.
pub(super) fn waiting_pod(uid: &PodUid, pod: &WaitingPod, now: Moment) -> v1::Pod {
    v1::Pod {
        id: Some(v1::PodId {
            uid: uid.to_string(),
            namespace: pod.name.namespace.clone(),
            name: pod.name.name.clone(),
        }),
        source: v1::PodSource::Kubernetes.into(),
        waiting: Some(waiting(pod, now)),
        ..v1::Pod::default()
    }
}

fn waiting(pod: &WaitingPod, now: Moment) -> v1::PodWaiting {
    v1::PodWaiting {
        reason: pod.reason.clone(),
        since_ms: pod.since.0,
        age_ms: age(pod.since, now),
    }
}

/// Marks a pod on record that the API server has. The integration admits its pods as an embedder does.
pub(super) fn mark(state: &ClusterState, pod: &mut v1::Pod, now: Moment) {
    if state.connection.is_some() && pod.source() == v1::PodSource::Embedder {
        pod.set_source(v1::PodSource::Kubernetes);
        let uid = pod.id.as_ref().map(|id| PodUid::from(id.uid.as_str()));
        let entry = uid.and_then(|uid| state.waiting.get(&uid));
        pod.waiting = entry.map(|pod| waiting(pod, now));
    }
}

/// Returns the slices of all drivers, or of one. `wipes_since` is the time since which those of absent drivers are deleted.
pub(super) fn slices(
    node: &Node,
    slices: &BTreeMap<String, ClusterSlice>,
    wipes_since: Option<Moment>,
    driver: &str,
    now: Moment,
) -> Vec<v1::Slice> {
    let of_driver = |slice: &ClusterSlice| driver.is_empty() || slice.driver == driver;
    let seen = slice_drivers(slices.values());
    let slices = slices.iter().filter(|(_, slice)| of_driver(slice));
    let slices = slices.map(|(name, slice)| {
        let driver = DriverName::from(slice.driver.as_str());
        let seen = seen.get(&driver).copied().unwrap_or_default();
        let wiped_at = wipes_since.and_then(|since| node.wipe_at(&driver, since.max(seen)));
        let created = milliseconds(&slice.created);
        v1::Slice {
            name: name.clone(),
            driver: slice.driver.clone(),
            pool: slice.pool.clone(),
            generation: slice.generation,
            devices: number(slice.devices),
            created_at_ms: created.map_or(0, |created| created.0),
            age_ms: created.map_or(0, |created| age(created, now)),
            has_stale_owner: slice.has_stale_owner,
            wiped_at_ms: wiped_at.map(|at| at.0),
            wiped_in_ms: wiped_at.map_or(0, |at| at.since(now)),
        }
    });
    let mut slices: Vec<v1::Slice> = slices.collect();
    slices.sort_by(|one, other| (&one.driver, &one.pool).cmp(&(&other.driver, &other.pool)));
    slices
}

fn milliseconds(time: &str) -> Option<Moment> {
    let time: Timestamp = time.parse().ok()?;
    time.as_millisecond().try_into().ok().map(Moment)
}
