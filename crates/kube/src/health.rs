//! Writes the health of devices into the status of pods.
//!
//! The latest state only: however often a device changes, a pod is written at most once per second. Beside a kubelet, which
//! owns the statuses of containers and writes differences back, the health is a condition of the pod.
//!
//! Pods are removed, if configured, only when a device has stayed unhealthy for a while (`unhealthy.rs`).
//!
//! Patches only: reading and replacing a status would drop fields that are newer than this program.

mod report;
mod status;
mod unhealthy;

use std::collections::BTreeMap;
use std::sync::Arc;

use devlet_agent::agent::Agent;
use devlet_core::PodUid;
use futures_util::StreamExt as _;
use futures_util::stream;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use serde_json::Value;
use tokio::time::Instant;

use crate::FIELD_MANAGER;
use crate::connection::{CallError, Connection};
use crate::events::{Events, Kind, PodRef};
use crate::task::{PASS_PAUSE, Task};
use report::PodHealth;
use status::SeenPod;
pub(crate) use status::{PodStatus, SeenPods};
use unhealthy::Unhealthy;

/// Maximum writes in flight.
const MAX_WRITES: usize = 8;

const JSON_PATCH: &str = "application/json-patch+json";
const STRATEGIC_MERGE: &str = "application/strategic-merge-patch+json";

/// Treatment of pods whose device is unhealthy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HealthSettings {
    /// By name of an extended resource or of a DRA driver. Pods of others are left alone.
    pub on_unhealthy: BTreeMap<String, OnUnhealthy>,
}

/// How a pod is removed whose device is unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OnUnhealthy {
    /// By the eviction API, which keeps to disruption budgets.
    Evict,
    /// By deleting it.
    Delete,
}

/// The writes that a pod needs.
struct Due {
    seen: Arc<SeenPod>,
    health: PodHealth,
    patch: Option<(&'static str, Value)>,
    removal: Option<OnUnhealthy>,
}

/// The last attempts by pod: an attempt is repeated only if the health, the resource version or the removal has changed, or
/// the call failed.
type Attempts = BTreeMap<PodUid, (PodHealth, String, Option<OnUnhealthy>)>;

/// Writes the health of devices until the node stops.
pub(crate) async fn run(
    agent: Agent,
    connection: Connection,
    pods: SeenPods,
    settings: HealthSettings,
    beside_kubelet: bool,
    events: Events,
) {
    let mut task = Task::new("health", &agent);
    let stop = agent.stopping();
    let mut changes = agent.store().subscribe();
    let mut seen = pods.subscribe();
    let mut attempts = Attempts::new();
    let mut unhealthy = Unhealthy::new(settings);
    let mut is_dropped = false;
    loop {
        let began = Instant::now();
        changes.borrow_and_update();
        let current = seen.borrow_and_update().clone();
        attempts.retain(|uid, _| current.contains_key(uid));
        unhealthy.forget_recovered(&agent, &current);
        let due = current.into_values().filter_map(|seen| {
            let health = PodHealth::current(&agent, &seen);
            let removal = unhealthy.observe(&seen.pod.uid, &health, began);
            due(seen, health, removal, beside_kubelet, &attempts)
        });
        let due: Vec<Due> = due.collect();
        let pass = async {
            let written = write_all(&connection, &task, due, &mut attempts, &mut is_dropped).await;
            let pause = match &written.failure {
                None => {
                    task.succeeded();
                    PASS_PAUSE
                }
                Some(error) => task.failed(error).max(PASS_PAUSE),
            };
            tokio::time::sleep(pause).await;
            written
        };
        tokio::pin!(pass);
        let mut is_changed = false;
        let written = loop {
            tokio::select! {
                written = &mut pass => break written,
                Ok(()) = changes.changed(), if !unhealthy.is_empty() => {
                    is_changed = true;
                    unhealthy.forget_recovered(&agent, &seen.borrow());
                }
                () = stop.cancelled() => return,
            }
        };
        for (pod, error) in &written.refused {
            let message =
                format!("a device is unhealthy, and the pod is not evicted: {error}; devlet keeps trying");
            events.record(pod, Kind::Warning, "FailedEviction", message);
            unhealthy.refused(&pod.uid, error.retry_after(), began);
        }
        if written.failure.is_none() && !is_changed {
            tokio::select! {
                Ok(()) = changes.changed() => {}
                Ok(()) = seen.changed() => {}
                () = unhealthy.due(began) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// The result of a pass.
#[derive(Default)]
struct Written {
    /// The last failure.
    failure: Option<CallError>,
    /// Pods that the API server does not evict for now, such as those in a disruption budget.
    refused: Vec<(PodRef, CallError)>,
}

/// Makes the writes. `is_dropped` is set if the API server does not keep the health.
async fn write_all(
    connection: &Connection,
    task: &Task,
    due: Vec<Due>,
    attempts: &mut Attempts,
    is_dropped: &mut bool,
) -> Written {
    let writes = due.into_iter().map(|due| write(connection, due));
    let mut writes = stream::iter(writes).buffer_unordered(MAX_WRITES);
    let mut written = Written::default();
    loop {
        let ended = tokio::select! {
            ended = writes.next() => ended,
            () = task.stopped() => None,
        };
        match ended {
            None => return written,
            Some((due, Ok(is_kept), refusal)) => {
                if !is_kept && !std::mem::replace(is_dropped, true) {
                    tracing::warn!(
                        pod = %label(&due.seen.pod),
                        "health of devices dropped by the API server; enable its feature gate ResourceHealthStatus"
                    );
                }
                let version = due.seen.object.version().to_owned();
                let removal = due.removal.filter(|_| refusal.is_none());
                attempts.insert(due.seen.pod.uid.clone(), (due.health, version, removal));
                let refused = refusal.map(|error| (due.seen.pod.clone(), error));
                written.refused.extend(refused);
            }
            Some((_, Err(error), _)) => written.failure = Some(error),
        }
    }
}

/// Returns the writes that a pod needs, if any.
fn due(
    seen: Arc<SeenPod>,
    health: PodHealth,
    removal: Option<OnUnhealthy>,
    beside_kubelet: bool,
    attempts: &Attempts,
) -> Option<Due> {
    let SeenPod { pod, object } = &*seen;
    let removal = removal.filter(|_| !object.is_deleted());
    let is_tried = |(last, version, how): &(PodHealth, String, Option<OnUnhealthy>)| {
        *last == health && version == object.version() && *how == removal
    };
    if health.is_empty() || attempts.get(&pod.uid).is_some_and(is_tried) {
        return None;
    }
    let patch = match beside_kubelet {
        true => {
            let now = format!("{:.0}", Timestamp::now());
            let patch = health.condition_patch(&pod.uid, object, &now);
            patch.map(|patch| (STRATEGIC_MERGE, patch))
        }
        false => health.patch(&pod.uid, object).map(|patch| (JSON_PATCH, patch)),
    };
    (patch.is_some() || removal.is_some()).then_some(Due {
        seen,
        health,
        patch,
        removal,
    })
}

/// Makes the writes of a pod. Returns `false` if the API server does not keep them, and the error if it refuses the removal for
/// now. A pod that has changed meanwhile is not an error: its watch reports the change.
async fn write(connection: &Connection, due: Due) -> (Due, Result<bool, CallError>, Option<CallError>) {
    let pod = &due.seen.pod;
    let patched = match &due.patch {
        Some((kind, patch)) => patch_status(connection, pod, kind, patch).await,
        None => Ok(true),
    };
    let mut refusal = None;
    let written = match (patched, due.removal) {
        (Ok(is_kept), Some(how)) => match remove(connection, pod, how).await {
            Err(error) if error.code() == Some(StatusCode::TOO_MANY_REQUESTS) => {
                refusal = Some(error);
                Ok(is_kept)
            }
            removed => removed.map(|()| is_kept),
        },
        (patched, _) => patched,
    };
    let written = match written {
        Err(error) if error.is_not_found() => Ok(true),
        Err(error) if error.is_outdated() => {
            tracing::warn!(pod = %label(pod), %error, "health of devices not written; devlet retries when the pod changes");
            Ok(true)
        }
        other => other,
    };
    (due, written, refusal)
}

/// Returns `false` if the API server has dropped the health, because its feature gate is off.
async fn patch_status(
    connection: &Connection,
    pod: &PodRef,
    kind: &str,
    patch: &Value,
) -> Result<bool, CallError> {
    let path = format!(
        "/api/v1/namespaces/{}/pods/{}/status?fieldManager={FIELD_MANAGER}",
        pod.name.namespace, pod.name.name
    );
    let patched = connection.call(|client| async move {
        let body = patch.to_string().into_bytes();
        let request = http::Request::patch(path).header(CONTENT_TYPE, kind).body(body);
        let request = request.map_err(kube::Error::HttpError)?;
        client.request::<PodStatus>(request).await
    });
    let answer = patched.await?;
    Ok(kind != JSON_PATCH || answer.has_health())
}

async fn remove(connection: &Connection, pod: &PodRef, how: OnUnhealthy) -> Result<(), CallError> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(pod.uid.to_string()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    let removed = connection.call(|client| async move {
        let pods = Api::<Pod>::namespaced(client, &pod.name.namespace);
        match how {
            OnUnhealthy::Delete => pods.delete(&pod.name.name, &params).await.map(drop),
            OnUnhealthy::Evict => {
                let params = EvictParams {
                    delete_options: Some(params),
                    ..EvictParams::default()
                };
                pods.evict(&pod.name.name, &params).await.map(drop)
            }
        }
    });
    removed.await?;
    tracing::warn!(pod = %label(pod), uid = %pod.uid, ?how, "pod removed: one of its devices is unhealthy");
    Ok(())
}

fn label(pod: &PodRef) -> String {
    format!("{}/{}", pod.name.namespace, pod.name.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(version: &str) -> Arc<SeenPod> {
        let object = serde_json::json!({ "metadata": { "resourceVersion": version } });
        Arc::new(SeenPod {
            pod: PodRef {
                name: devlet_core::PodName::default(),
                uid: "u".into(),
            },
            object: serde_json::from_value(object).unwrap(),
        })
    }

    #[test]
    fn an_attempt_is_repeated_only_after_a_change() {
        let health = || PodHealth::unhealthy_device("acme.com/gpu");
        let attempts = Attempts::from([("u".into(), (health(), "1".to_owned(), None))]);
        let is_due =
            |version, health, removal| due(seen(version), health, removal, true, &attempts).is_some();
        assert!(!is_due("1", health(), None));
        assert!(is_due("2", health(), None));
        assert!(is_due("1", PodHealth::unhealthy_device("acme.com/nic"), None));
        assert!(is_due("1", health(), Some(OnUnhealthy::Evict)));
    }
}
