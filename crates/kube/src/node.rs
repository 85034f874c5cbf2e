//! Publishes the device counts of extended resources in the status of the Node.
//!
//! Server-side apply with the whole set: a resource that is gone is left out, and the API server removes it. The values are
//! applied again when the watch shows that another writer has changed them, with pauses that double while both disagree, and
//! when the Node is created again. Apart from that nothing is written.

use std::collections::BTreeMap;
use std::time::Duration;

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
use tokio::time::Instant;

use crate::FIELD_MANAGER;
use crate::connection::{CallError, Connection};
use crate::task::{PASS_PAUSE, Task, reached};
use crate::watch::{self as objects, Change};

const TASK: &str = "node";

/// Apart from the watch: its events do not show that a write works.
const STATUS: &str = "node-status";

/// Longest pause between two writes of the same counts, when another writer disagrees.
const MAX_OVERWRITE_PAUSE: Duration = Duration::from_secs(60);

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

/// The last successful write.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    /// UID of the Node.
    node: String,
    counts: Published,
    at: Instant,
    /// Least time until the same counts are written again.
    pause: Duration,
}

impl Written {
    fn new(last: Option<Self>, node: String, counts: Published, at: Instant) -> Self {
        let again = last.filter(|last| {
            let is_soon = at < last.at + 2 * MAX_OVERWRITE_PAUSE;
            is_soon && last.node == node && last.counts == counts
        });
        let pause = again.map_or(PASS_PAUSE, |last| (2 * last.pause).min(MAX_OVERWRITE_PAUSE));
        Self {
            node,
            counts,
            at,
            pause,
        }
    }
}

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
    let mut task = Task::new(STATUS, &agent);
    let mut changes = agent.store().subscribe();
    // A restart writes once, which removes resources that are gone.
    let mut written: Option<Written> = None;
    // Has the watch reported the Node since the last write?
    let mut is_fresh = false;
    let mut conflict = None;
    loop {
        changes.borrow_and_update();
        is_fresh |= facts.has_changed().unwrap_or(false);
        let node = facts.borrow_and_update().clone();
        let now = agent.store().now();
        let views = agent.store().read(|node| node.resources(now));
        let published = published(views, settings.beside_kubelet, now);
        let due = node.and_then(|node| Some((due(&node, &published, written.as_ref(), is_fresh)?, node.uid)));
        match due {
            Some((due, uid)) if due.is_none_or(|due| due <= Instant::now()) => {
                let pause = match apply(&connection, &name, &uid, &published, &mut conflict).await {
                    Ok(()) => {
                        task.succeeded();
                        written = Some(Written::new(written, uid, published, Instant::now()));
                        is_fresh = false;
                        PASS_PAUSE
                    }
                    Err(error) => task.failed(&error),
                };
                if !task.pause(pause).await {
                    return;
                }
            }
            other => {
                let due = other.and_then(|(due, _)| due);
                tokio::select! {
                    Ok(()) = changes.changed() => {}
                    Ok(()) = facts.changed() => is_fresh = true,
                    () = reached(due) => {}
                    () = task.stopped() => return,
                }
            }
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

/// Returns `None` if there is nothing to write, `Some(None)` for a write at once, or the time of a write over the counts of
/// another writer. Values from before the last write do not show another writer.
fn due(
    node: &NodeFacts,
    published: &Published,
    written: Option<&Written>,
    is_fresh: bool,
) -> Option<Option<Instant>> {
    match written.filter(|last| last.node == node.uid && last.counts == *published) {
        None => Some(None),
        Some(last) => (is_fresh && !node.has(published)).then_some(Some(last.at + last.pause)),
    }
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
        let written = Written::new(None, "1".to_owned(), counts(4, 4), Instant::now());
        let same = node("1", "4", "4");
        assert_eq!(due(&same, &counts(4, 4), Some(&written), true), None);
        assert_eq!(due(&same, &counts(4, 4), None, false), Some(None));
        assert_eq!(due(&same, &Published::new(), Some(&written), false), Some(None));
        let another = node("2", "4", "4");
        assert_eq!(due(&another, &counts(4, 4), Some(&written), false), Some(None));
    }

    #[test]
    fn counts_are_written_over_those_of_another_writer_only_after_a_report_of_the_watch() {
        let written = Written::new(None, "1".to_owned(), counts(4, 4), Instant::now());
        // A kubelet has set them to 0, or this is the state from before the write.
        let zero = node("1", "0", "0");
        assert_eq!(due(&zero, &counts(4, 4), Some(&written), false), None);
        let after_a_pause = Some(Some(written.at + PASS_PAUSE));
        assert_eq!(due(&zero, &counts(4, 4), Some(&written), true), after_a_pause);
    }

    #[test]
    fn pauses_double_while_another_writer_disagrees() {
        let mut at = Instant::now();
        let mut pauses = Vec::new();
        let mut written: Option<Written> = None;
        for _ in 0..8 {
            let next = Written::new(written, "1".to_owned(), counts(4, 4), at);
            at += next.pause;
            pauses.push(next.pause.as_secs());
            written = Some(next);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        let other = Written::new(written.clone(), "1".to_owned(), counts(4, 3), at);
        assert_eq!(other.pause, PASS_PAUSE);
        let agreed = at + 2 * MAX_OVERWRITE_PAUSE;
        let later = Written::new(written, "1".to_owned(), counts(4, 4), agreed);
        assert_eq!(later.pause, PASS_PAUSE);
    }
}
