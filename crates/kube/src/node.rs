//! Publishes the device counts of extended resources in the status of the Node.
//!
//! Server-side apply with the whole set: a resource that is gone is left out, and the API server removes it. The values are
//! applied again when another writer changes them, and when the Node is created again. Apart from that nothing is written.

use std::collections::BTreeMap;

use devlet_agent::agent::Agent;
use devlet_agent::manifest::quantity;
use devlet_core::device_plugin::inventory::GRACE_MS;
use devlet_core::{Availability, Moment, ResourceName, ResourceView};
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::FIELD_MANAGER;
use crate::connection::{CallError, Connection};
use crate::task::{PASS_PAUSE, Task};
use crate::watch::{self as objects, Change};

const TASK: &str = "node";

/// How resources are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSettings {
    /// `true` if a kubelet owns the Node and the statuses of its containers.
    pub beside_kubelet: bool,
    /// Renew the lease and the `Ready` condition of the Node, and create it if it does not exist. For nodes without a
    /// kubelet.
    pub heartbeat: bool,
}

/// The Node as the API server has it; `None` if it does not exist, or is not known yet.
pub(crate) type NodeReceiver = watch::Receiver<Option<NodeFacts>>;

/// The parts of the Node that tasks need.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NodeFacts {
    pub(crate) uid: String,
    pub(crate) capacity: BTreeMap<String, String>,
    pub(crate) allocatable: BTreeMap<String, String>,
    /// Status of the `Ready` condition, and the time of its last change.
    pub(crate) ready: Option<(String, String)>,
}

/// The published counts of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    capacity: usize,
    allocatable: usize,
}

type Published = BTreeMap<ResourceName, Counts>;

impl NodeFacts {
    fn of(node: Node) -> Self {
        let NodeStatus {
            capacity,
            allocatable,
            conditions,
            ..
        } = node.status.unwrap_or_default();
        let quantities = |values: Option<BTreeMap<String, Quantity>>| {
            let values = values.unwrap_or_default().into_iter();
            // Other resources, such as cpu, are not devlet's.
            let extended = values.filter(|(name, _)| name.contains('/'));
            extended.map(|(name, value)| (name, value.0)).collect()
        };
        let ready = conditions
            .into_iter()
            .flatten()
            .find(|each| each.type_ == "Ready");
        let ready = ready.map(|each| {
            let changed = each
                .last_transition_time
                .map_or_else(String::new, |time| time.0.to_string());
            (each.status, changed)
        });
        Self {
            uid: node.metadata.uid.unwrap_or_default(),
            capacity: quantities(capacity),
            allocatable: quantities(allocatable),
            ready,
        }
    }

    /// Returns `true` if these counts are published. `11k` equals 11000.
    fn has(&self, published: &Published) -> bool {
        let is = |values: &BTreeMap<String, String>, name: &ResourceName, count: usize| {
            let value = values.get(name.as_str()).map(|text| quantity(text));
            value == Some(Ok(count))
        };
        published.iter().all(|(name, counts)| {
            is(&self.capacity, name, counts.capacity) && is(&self.allocatable, name, counts.allocatable)
        })
    }
}

/// Keeps the facts about the Node up to date until the node stops.
pub(crate) async fn follow_node(
    agent: Agent,
    connection: Connection,
    name: String,
    facts: watch::Sender<Option<NodeFacts>>,
) {
    let (sender, mut changes) = mpsc::channel(1);
    let fields = format!("metadata.name={name}");
    let watching = objects::follow(TASK, agent.clone(), connection, fields, sender);
    agent.spawn(watching);
    let is_known = |is_known: bool| {
        let missing = (!is_known).then(|| agent.store().now());
        let is_changed = agent
            .cluster()
            .read(|state| state.node_missing_since.is_some() == is_known);
        if is_changed {
            agent.cluster().update(|state| state.node_missing_since = missing);
        }
    };
    let mut is_present = false;
    while let Some(change) = changes.recv().await {
        match change {
            Change::ListBegin => is_present = false,
            Change::ListEnd if is_present => {}
            Change::ListEnd => {
                tracing::warn!(node = name, "Node object does not exist; devlet waits for it");
                is_known(false);
                facts.send_replace(None);
            }
            Change::Present(node) => {
                is_present = true;
                is_known(true);
                facts.send_replace(Some(NodeFacts::of(node)));
            }
            Change::Deleted(_) => {
                tracing::warn!(node = name, "Node object deleted; devlet waits for it");
                is_known(false);
                facts.send_replace(None);
            }
        }
    }
}

/// Publishes the resources until the node stops.
pub(crate) async fn publish(
    agent: Agent,
    connection: Connection,
    name: String,
    settings: NodeSettings,
    mut facts: NodeReceiver,
) {
    let mut task = Task::new(TASK, &agent);
    let mut changes = agent.store().subscribe();
    // The Node and the counts of the last write. A restart writes once, which removes resources that are gone.
    let mut written: Option<(String, Published)> = None;
    let mut conflict = None;
    loop {
        changes.borrow_and_update();
        let node = facts.borrow_and_update().clone();
        let now = agent.store().now();
        let views = agent.store().read(|node| node.resources(now));
        let published = published(views, settings.beside_kubelet, now);
        let pause = match node {
            Some(node) if is_due(&node, &published, written.as_ref()) => {
                match apply(&connection, &name, &node.uid, &published, &mut conflict).await {
                    Ok(()) => {
                        task.succeeded();
                        written = Some((node.uid, published));
                        // Two writers that disagree do not flood the API server.
                        PASS_PAUSE
                    }
                    Err(error) => task.failed(&error),
                }
            }
            Some(_) | None => {
                tokio::select! {
                    Ok(()) = changes.changed() => {}
                    Ok(()) = facts.changed() => {}
                    () = task.stopped() => return,
                }
                continue;
            }
        };
        if !task.pause(pause).await {
            return;
        }
    }
}

/// Returns the counts to publish. A resource is gone when its grace period has ended and no pod holds its devices.
///
/// A kubelet sets allocatable to capacity for resources that are not its own, and fails pods at its start that request more
/// than the capacity. Beside it, both are the number of healthy devices, and at least that of held devices.
fn published(resources: Vec<ResourceView>, beside_kubelet: bool, now: Moment) -> Published {
    let is_gone = |view: &ResourceView| match &view.availability {
        Availability::Serving | Availability::NotListed => false,
        Availability::Gone(last) => {
            let ended = last
                .as_ref()
                .is_none_or(|last| now.since(last.gone_since) > GRACE_MS);
            ended && view.capacity.held == 0
        }
    };
    let resources = resources.into_iter().filter(|view| !is_gone(view));
    resources
        .map(|view| {
            let counts = match beside_kubelet {
                true => {
                    let count = view.capacity.allocatable.max(view.capacity.held);
                    Counts {
                        capacity: count,
                        allocatable: count,
                    }
                }
                false => Counts {
                    capacity: view.capacity.capacity,
                    allocatable: view.capacity.allocatable,
                },
            };
            (view.name, counts)
        })
        .collect()
}

fn is_due(node: &NodeFacts, published: &Published, written: Option<&(String, Published)>) -> bool {
    let is_written = written.is_some_and(|(uid, last)| *uid == node.uid && last == published);
    !is_written || !node.has(published)
}

async fn apply(
    connection: &Connection,
    name: &str,
    uid: &str,
    published: &Published,
    conflict: &mut Option<CallError>,
) -> Result<(), CallError> {
    let patch = patch(name, uid, published);
    let apply = |params: PatchParams| {
        let patch = Patch::Apply(&patch);
        connection.call(move |client| async move {
            let nodes = Api::<Node>::all(client);
            nodes.patch_status(name, &params, &patch).await.map(drop)
        })
    };
    match apply(PatchParams::apply(FIELD_MANAGER)).await {
        Err(error) if error.is_conflict() => {
            // The message names the other writer, such as a kubelet that has set the counts to 0.
            if conflict.as_ref() != Some(&error) {
                tracing::warn!(%error, "extended resources of the Node changed by another writer; devlet overwrites them");
                *conflict = Some(error);
            }
            apply(PatchParams::apply(FIELD_MANAGER).force()).await
        }
        other => other,
    }
}

fn patch(name: &str, uid: &str, published: &Published) -> Value {
    let counts = |count: fn(&Counts) -> usize| -> BTreeMap<&str, String> {
        let counts = published.iter();
        counts
            .map(|(name, counts)| (name.as_str(), count(counts).to_string()))
            .collect()
    };
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        // The UID is a precondition.
        "metadata": { "name": name, "uid": uid },
        "status": {
            "capacity": counts(|counts| counts.capacity),
            "allocatable": counts(|counts| counts.allocatable),
        },
    })
}

#[cfg(test)]
mod tests {
    use devlet_core::Capacity;
    use devlet_core::device_plugin::inventory::LastPlugin;

    use super::*;

    const NOW: Moment = Moment(10 * GRACE_MS);

    fn resource(
        capacity: usize,
        allocatable: usize,
        held: usize,
        availability: Availability,
    ) -> ResourceView {
        ResourceView {
            name: "acme.com/gpu".into(),
            capacity: Capacity {
                capacity,
                allocatable,
                held,
                free: 0,
            },
            availability,
            plugins: Vec::new(),
        }
    }

    fn gone_for(milliseconds: u64) -> Availability {
        Availability::Gone(Some(LastPlugin {
            endpoint: String::new(),
            gone_since: Moment(NOW.0 - milliseconds),
        }))
    }

    fn counts(capacity: usize, allocatable: usize) -> Published {
        let counts = Counts {
            capacity,
            allocatable,
        };
        BTreeMap::from([("acme.com/gpu".into(), counts)])
    }

    fn node(uid: &str, capacity: &str, allocatable: &str) -> NodeFacts {
        let of = |value: &str| BTreeMap::from([("acme.com/gpu".to_owned(), value.to_owned())]);
        NodeFacts {
            uid: uid.to_owned(),
            capacity: of(capacity),
            allocatable: of(allocatable),
            ready: None,
        }
    }

    #[test]
    fn capacity_counts_all_devices_and_allocatable_the_healthy_ones() {
        let views = || vec![resource(4, 3, 2, Availability::Serving)];
        assert_eq!(published(views(), false, NOW), counts(4, 3));
    }

    #[test]
    fn beside_a_kubelet_both_are_the_healthy_devices_and_never_below_the_held_ones() {
        let healthy = vec![resource(4, 3, 2, Availability::Serving)];
        assert_eq!(published(healthy, true, NOW), counts(3, 3));
        let away = vec![resource(4, 0, 2, gone_for(0))];
        assert_eq!(published(away, true, NOW), counts(2, 2));
    }

    #[test]
    fn a_resource_is_removed_after_its_grace_period_unless_its_devices_are_held() {
        let in_grace = vec![resource(0, 0, 0, gone_for(GRACE_MS))];
        assert_eq!(published(in_grace, false, NOW), counts(0, 0));
        let ended = vec![resource(0, 0, 0, gone_for(GRACE_MS + 1))];
        assert_eq!(published(ended, false, NOW), Published::new());
        let held = vec![resource(0, 0, 1, gone_for(GRACE_MS + 1))];
        assert_eq!(published(held, true, NOW), counts(1, 1));
    }

    #[test]
    fn quantities_are_compared_by_value() {
        assert!(node("1", "11k", "11k").has(&counts(11_000, 11_000)));
        assert!(!node("1", "11k", "11k").has(&counts(11_000, 10_999)));
        assert!(!NodeFacts::default().has(&counts(0, 0)));
    }

    #[test]
    fn counts_are_written_at_the_start_after_a_change_and_for_another_node_object() {
        let written = ("1".to_owned(), counts(4, 4));
        let same = node("1", "4", "4");
        assert!(!is_due(&same, &counts(4, 4), Some(&written)));
        assert!(is_due(&same, &counts(4, 4), None));
        assert!(is_due(&same, &Published::new(), Some(&written)));
        assert!(is_due(&node("2", "4", "4"), &counts(4, 4), Some(&written)));
        // A kubelet has set them to 0.
        assert!(is_due(&node("1", "0", "0"), &counts(4, 4), Some(&written)));
    }
}
