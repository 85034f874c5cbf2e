//! The heartbeat of a node without a kubelet: its lease, its `Ready` condition, and the Node object itself.
//!
//! The node agent publishes everything else about the Node: addresses, cpu, memory, and the maximum number of pods.

use std::time::Duration;

use devlet_agent::agent::Agent;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::connection::{CallError, Connection};
use crate::node::{NodeFacts, NodeReceiver};
use crate::task::{PASS_PAUSE, Task};

/// A kubelet's values: a lease of 40 s is renewed every 10 s, and the condition every 5 minutes.
const LEASE_SECONDS: i32 = 40;
const LEASE_PAUSE: Duration = Duration::from_secs(10);
const CONDITION_AGE: SignedDuration = SignedDuration::from_mins(5);

const LEASE_NAMESPACE: &str = "kube-node-lease";

/// A manager of its own, because each apply replaces all fields of its manager.
const FIELD_MANAGER: &str = "devlet-heartbeat";

/// Renews lease and condition until the node stops.
pub(crate) async fn run(agent: Agent, connection: Connection, name: String, mut facts: NodeReceiver) {
    let mut task = Task::new("heartbeat", &agent);
    let mut reported: Option<Timestamp> = None;
    // Until the first list, the Node is not known.
    tokio::select! {
        _ = facts.changed() => {}
        () = task.stopped() => return,
    }
    loop {
        let node = facts.borrow_and_update().clone();
        let is_ready = agent.store().health().is_ok();
        let beat = beat(&connection, &name, node.as_ref(), is_ready, &mut reported);
        let least = match beat.await {
            Ok(()) => {
                task.succeeded();
                PASS_PAUSE
            }
            Err(error) => task.failed(&error).max(PASS_PAUSE),
        };
        // However often the Node changes, also because of another writer of the same condition.
        if !task.pause(least).await {
            return;
        }
        tokio::select! {
            Ok(()) = facts.changed() => {}
            () = tokio::time::sleep(LEASE_PAUSE.saturating_sub(least)) => {}
            () = task.stopped() => return,
        }
    }
}

async fn beat(
    connection: &Connection,
    name: &str,
    node: Option<&NodeFacts>,
    is_ready: bool,
    reported: &mut Option<Timestamp>,
) -> Result<(), CallError> {
    let Some(node) = node else {
        return create(connection, name).await;
    };
    let now = Timestamp::now();
    if is_condition_due(node, is_ready, *reported, now) {
        let patch = condition(name, node, is_ready, now);
        let applied = connection.call(|client| async move {
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let nodes = Api::<Node>::all(client);
            nodes.patch_status(name, &params, &Patch::Apply(&patch)).await
        });
        applied.await?;
        *reported = Some(now);
    }
    let lease = lease(name, &node.uid, now);
    let renewed = connection.call(|client| async move {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let leases = Api::<Lease>::namespaced(client, LEASE_NAMESPACE);
        leases.patch(name, &params, &Patch::Apply(&lease)).await
    });
    renewed.await.map(drop)
}

/// Creates the Node. Its watch reports the result.
async fn create(connection: &Connection, name: &str) -> Result<(), CallError> {
    let label = |key: &str, value: &str| (format!("kubernetes.io/{key}"), value.to_owned());
    let labels = [
        label("hostname", name),
        label("os", std::env::consts::OS),
        label("arch", architecture(std::env::consts::ARCH)),
    ];
    let node = Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(labels.into()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    };
    let created = connection.call(|client| async move {
        let nodes = Api::<Node>::all(client);
        nodes.create(&PostParams::default(), &node).await
    });
    match created.await {
        Ok(_) => {
            tracing::info!(node = name, "Node object created");
            Ok(())
        }
        // The watch has not reported it yet.
        Err(error) if error.is_conflict() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns the name of an architecture in Go, which labels of nodes use.
fn architecture(rust: &str) -> &str {
    match rust {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn is_condition_due(node: &NodeFacts, is_ready: bool, reported: Option<Timestamp>, now: Timestamp) -> bool {
    let is_same = node
        .ready
        .as_ref()
        .is_some_and(|(status, _)| *status == text(is_ready));
    !is_same || reported.is_none_or(|last| now.duration_since(last) >= CONDITION_AGE)
}

fn condition(name: &str, node: &NodeFacts, is_ready: bool, now: Timestamp) -> Value {
    let changed = match &node.ready {
        Some((status, changed)) if *status == text(is_ready) && !changed.is_empty() => changed.clone(),
        Some(_) | None => seconds(now),
    };
    let (reason, message) = match is_ready {
        true => ("DevletReady", "devlet is running"),
        false => (
            "DevletNotReady",
            "devlet cannot write its state; see `devlet status`",
        ),
    };
    let condition = json!({
        "type": "Ready",
        "status": text(is_ready),
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": seconds(now),
        "lastTransitionTime": changed,
    });
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "uid": node.uid },
        "status": { "conditions": [condition] },
    })
}

fn lease(name: &str, uid: &str, now: Timestamp) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": LEASE_NAMESPACE,
            // The lease goes with the Node.
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": uid }],
        },
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": format!("{now:.6}"),
        },
    })
}

fn text(is_true: bool) -> &'static str {
    if is_true { "True" } else { "False" }
}

/// Returns a time as the API server writes it, without fractions.
fn seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(ready: Option<&str>) -> NodeFacts {
        NodeFacts {
            uid: "1".to_owned(),
            ready: ready.map(|status| (status.to_owned(), "2026-01-01T00:00:00Z".to_owned())),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn the_condition_is_written_when_it_differs_and_every_five_minutes() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let ago = |minutes| Some(now - SignedDuration::from_mins(minutes));
        assert!(!is_condition_due(&node(Some("True")), true, ago(4), now));
        assert!(is_condition_due(&node(Some("True")), true, ago(5), now));
        assert!(is_condition_due(&node(Some("True")), true, None, now));
        assert!(is_condition_due(&node(Some("True")), false, ago(1), now));
        // Set by the node-lifecycle controller.
        assert!(is_condition_due(&node(Some("Unknown")), true, ago(1), now));
        assert!(is_condition_due(&node(None), true, ago(1), now));
    }

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
        let now: Timestamp = "2026-01-02T00:00:00.123456789Z".parse().unwrap();
        let transition = |node: &NodeFacts, is_ready| {
            let patch = condition("n", node, is_ready, now);
            patch["status"]["conditions"][0]["lastTransitionTime"].clone()
        };
        assert_eq!(transition(&node(Some("True")), true), "2026-01-01T00:00:00Z");
        assert_eq!(transition(&node(Some("Unknown")), true), "2026-01-02T00:00:00Z");
        assert_eq!(transition(&node(None), true), "2026-01-02T00:00:00Z");
        assert_eq!(
            lease("n", "1", now)["spec"]["renewTime"],
            "2026-01-02T00:00:00.123456Z"
        );
    }
}
