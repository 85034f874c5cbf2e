//! The ResourceSlices of this node: their list for `status`, and the deletion of those of drivers that are gone.
//!
//! The agent decides which drivers are gone ([`Agent::wipe_slices`]). Nothing is deleted in mode observe.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::cluster::{ClusterSlice, slice_drivers};
use devlet_agent::reconcile::slices::{ResourceSlices, SliceDrivers, SliceError};
use devlet_core::dra::drivers::WIPE_DELAY_MS;
use devlet_core::{DriverName, Moment};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Preconditions};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::connection::{CallError, Connection};
use crate::node::NodeReceiver;
use crate::task::Task;
use crate::watch::{self as objects, Change};

const TASK: &str = "slices";

/// Apart from the watch: its events do not show that a deletion works.
const DELETION: &str = "slice-deletion";

/// Changes that wait for the list. Then the watch is not read on.
const MAX_QUEUED: usize = 16;

/// Which slices are deleted at a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WipeAtStart {
    /// Those of drivers that have not registered 30 s after the start.
    #[default]
    Absent,
    /// All slices from before the start at once, as a kubelet does.
    All,
}

/// How slices are deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlicesSettings {
    /// Which slices are deleted at a start.
    pub wipe_at_start: WipeAtStart,
}

/// Deletes the slices of drivers that are gone, until the node stops.
pub(crate) async fn wipe(
    agent: Agent,
    connection: Connection,
    node: String,
    settings: SlicesSettings,
    drivers: watch::Receiver<SliceDrivers>,
) {
    let slices = NodeSlices {
        agent: agent.clone(),
        connection,
        node,
        drivers,
    };
    if settings.wipe_at_start == WipeAtStart::All {
        agent.spawn(slices.clone().wipe_earlier(Timestamp::now()));
    }
    agent.wipe_slices(slices);
}

#[derive(Clone)]
struct NodeSlices {
    agent: Agent,
    connection: Connection,
    node: String,
    drivers: watch::Receiver<SliceDrivers>,
}

impl NodeSlices {
    /// Deletes the slices from before the start. Slices that drivers publish since are left alone, so this is given up when the
    /// API server does not answer in time: then only those of absent drivers are deleted.
    async fn wipe_earlier(self, started: Timestamp) {
        let mut task = Task::new(DELETION, &self.agent);
        let wiping = task.retry(|| self.delete_earlier(started));
        match timeout(Duration::from_millis(WIPE_DELAY_MS), wiping).await {
            Ok(Some(count)) => tracing::info!(count, "ResourceSlices from before the start deleted"),
            Ok(None) => {}
            Err(_) => tracing::warn!(
                "ResourceSlices from before the start not deleted in time; those of absent drivers are deleted"
            ),
        }
    }

    /// Returns the number of deleted slices.
    async fn delete_earlier(&self, started: Timestamp) -> Result<usize, CallError> {
        let slices = self.list().await?.into_iter();
        let earlier: Vec<ResourceSlice> = slices.filter(|slice| is_earlier(slice, started)).collect();
        for slice in &earlier {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let fields = format!("metadata.name={name},{}", selector(&self.node, None));
            let another = Preconditions {
                uid: slice.metadata.uid.clone(),
                resource_version: slice.metadata.resource_version.clone(),
            };
            match self.delete(fields, Some(another)).await {
                // A driver has published it again.
                Err(error) if error.is_conflict() => {}
                other => other?,
            }
        }
        Ok(earlier.len())
    }

    async fn list(&self) -> Result<Vec<ResourceSlice>, CallError> {
        let params = ListParams::default().fields(&selector(&self.node, None));
        let listed = self.connection.call(|client| async move {
            let slices = Api::<ResourceSlice>::all(client);
            slices.list(&params).await
        });
        Ok(listed.await?.items)
    }

    /// Deletes the slices with these fields. The identity of a node may delete collections only of its own node.
    async fn delete(&self, fields: String, preconditions: Option<Preconditions>) -> Result<(), CallError> {
        let params = ListParams::default().fields(&fields);
        let options = DeleteParams {
            preconditions,
            ..DeleteParams::default()
        };
        let deleted = self.connection.call(|client| async move {
            let slices = Api::<ResourceSlice>::all(client);
            slices.delete_collection(&options, &params).await
        });
        deleted.await.map(drop)
    }

    /// Reports the result of a deletion.
    fn report(&self, result: Result<(), CallError>) -> Result<(), SliceError> {
        let now = self.agent.store().now();
        match result {
            Ok(()) => {
                self.agent.cluster().succeeded(DELETION, now);
                Ok(())
            }
            Err(error) => {
                let message = error.to_string();
                self.agent.cluster().failed(DELETION, now, message.clone());
                Err(SliceError {
                    message,
                    retry_after: error.retry_after(),
                })
            }
        }
    }
}

impl ResourceSlices for NodeSlices {
    fn drivers(&self) -> watch::Receiver<SliceDrivers> {
        self.drivers.clone()
    }

    async fn wipe(&self, driver: &DriverName) -> Result<(), SliceError> {
        // The last check before the deletion, which the API server may carry out even if the call is cancelled.
        let is_back = self
            .agent
            .store()
            .read(|node| node.serving_driver(driver).is_some());
        if is_back {
            return Err(SliceError {
                message: "the driver is connected again".to_owned(),
                retry_after: None,
            });
        }
        let deleted = self.delete(selector(&self.node, Some(driver)), None).await;
        self.report(deleted)
    }
}

/// Returns `true` if a slice was created and last changed before the start. Times of the API server have whole seconds.
fn is_earlier(slice: &ResourceSlice, started: Timestamp) -> bool {
    let metadata = &slice.metadata;
    let managed = metadata.managed_fields.iter().flatten();
    let changes = managed.filter_map(|each| each.time.as_ref());
    let last = changes
        .chain(&metadata.creation_timestamp)
        .map(|time| time.0)
        .max();
    last.is_some_and(|last| last.as_second() < started.as_second())
}

/// Returns the field selector of a driver's slices. Without the node, the API server refuses an identity of a node.
fn selector(node: &str, driver: Option<&DriverName>) -> String {
    match driver {
        Some(driver) => format!("spec.driver={driver},spec.nodeName={node}"),
        None => format!("spec.nodeName={node}"),
    }
}

/// Keeps the list of slices up to date until the node stops. Their drivers are sent after each change.
pub(crate) async fn follow_slices(
    agent: Agent,
    connection: Connection,
    node: String,
    mut facts: NodeReceiver,
    drivers: watch::Sender<SliceDrivers>,
) {
    let (sender, mut changes) = mpsc::channel(MAX_QUEUED);
    let fields = selector(&node, None);
    agent.spawn(objects::follow(TASK, agent.clone(), connection, fields, sender));
    let mut known = Slices::default();
    let mut stale = BTreeSet::new();
    let mut plugins = agent.store().subscribe();
    loop {
        tokio::select! {
            change = changes.recv() => match change {
                Some(change) => known.changed(change, agent.store().now()),
                None => return,
            },
            // A task that has ended does not change the Node any more.
            Ok(()) = facts.changed() => {}
            // A driver that must restart may have left.
            Ok(()) = plugins.changed(), if !stale.is_empty() => {}
        }
        plugins.borrow_and_update();
        let uid = facts.borrow_and_update().as_ref().map(|facts| facts.uid.clone());
        let slices = known.with_owner(uid.as_deref());
        let last = mem::replace(
            &mut stale,
            known.stale_drivers(uid.as_deref(), |name| is_away(&agent, name)),
        );
        log_stale(stale.difference(&last));
        drivers.send_replace(slice_drivers(slices.values()));
        let stale_drivers = stale.clone();
        agent.cluster().update(|state| {
            state.slices = slices;
            state.stale_drivers = stale_drivers;
        });
    }
}

/// Returns `true` if all plugins of a driver have left. Beside a kubelet, and in the mode observe, drivers may be connected
/// elsewhere.
fn is_away(agent: &Agent, driver: &DriverName) -> bool {
    let is_ours = agent.cluster().read(|state| state.wipes_slices_since.is_some());
    agent.store().read(|node| match node.driver(driver) {
        Some(_) => node.serving_driver(driver).is_none(),
        None => is_ours,
    })
}

/// Slices by name, with the UIDs of the Node objects that own them.
type Owned = BTreeMap<String, (ClusterSlice, Vec<String>)>;

/// The slices of the node.
#[derive(Debug, Default)]
struct Slices {
    current: Owned,
    /// The slices of a list that is not complete.
    listed: Option<Owned>,
    /// The owners of the last slices of each driver. They are kept when the garbage collector deletes the slices of an earlier
    /// Node object, because their driver does not notice.
    owners: BTreeMap<DriverName, BTreeSet<String>>,
}

impl Slices {
    fn changed(&mut self, change: Change<ResourceSlice>, now: Moment) {
        match change {
            Change::ListBegin => self.listed = Some(BTreeMap::new()),
            Change::ListEnd => {
                if let Some(listed) = self.listed.take() {
                    self.current = listed;
                }
            }
            Change::Present(slice) => {
                let (name, mut slice) = trimmed(slice, now);
                if let Some((known, _)) = self.current.get(&name) {
                    slice.0.seen = known.seen;
                }
                self.listed
                    .as_mut()
                    .unwrap_or(&mut self.current)
                    .insert(name, slice);
            }
            Change::Deleted(slice) => {
                self.current.remove(&slice.metadata.name.unwrap_or_default());
            }
        }
    }

    /// Returns the drivers whose last slices an earlier Node object owns, except drivers without slices that have left: they
    /// read the Node again when they start.
    fn stale_drivers(
        &mut self,
        node: Option<&str>,
        is_away: impl Fn(&DriverName) -> bool,
    ) -> BTreeSet<DriverName> {
        let mut owners: BTreeMap<DriverName, BTreeSet<String>> = BTreeMap::new();
        for (slice, uids) in self.current.values() {
            let driver = DriverName::from(slice.driver.as_str());
            owners.entry(driver).or_default().extend(uids.iter().cloned());
        }
        self.owners
            .retain(|driver, _| owners.contains_key(driver) || !is_away(driver));
        self.owners.extend(owners);
        let is_stale =
            |uids: &BTreeSet<String>| !uids.is_empty() && node.is_some_and(|node| !uids.contains(node));
        let stale = self.owners.iter().filter(|(_, uids)| is_stale(uids));
        stale.map(|(driver, _)| driver.clone()).collect()
    }

    /// Returns the slices. Those that an earlier Node object owns are marked, if the UID of the Node is known.
    fn with_owner(&self, node: Option<&str>) -> BTreeMap<String, ClusterSlice> {
        let slices = self.current.iter();
        let slices = slices.map(|(name, (slice, owners))| {
            let is_stale = |node: &str| !owners.is_empty() && owners.iter().all(|uid| uid != node);
            let slice = ClusterSlice {
                has_stale_owner: node.is_some_and(is_stale),
                ..slice.clone()
            };
            (name.clone(), slice)
        });
        slices.collect()
    }
}

fn trimmed(slice: ResourceSlice, now: Moment) -> (String, (ClusterSlice, Vec<String>)) {
    let metadata = slice.metadata;
    let owners = metadata.owner_references.into_iter().flatten();
    let nodes = owners.filter(|owner| owner.kind == "Node");
    let created = metadata.creation_timestamp;
    let trimmed = ClusterSlice {
        driver: slice.spec.driver,
        pool: slice.spec.pool.name,
        generation: slice.spec.pool.generation,
        devices: slice.spec.devices.map_or(0, |devices| devices.len()),
        created: created.map_or_else(String::new, |time| time.0.to_string()),
        has_stale_owner: false,
        seen: now,
    };
    let owners = nodes.map(|owner| owner.uid).collect();
    (metadata.name.unwrap_or_default(), (trimmed, owners))
}

fn log_stale<'a>(drivers: impl Iterator<Item = &'a DriverName>) {
    for driver in drivers {
        tracing::warn!(%driver, "ResourceSlices owned by a deleted Node object; restart the driver");
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSliceSpec};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, OwnerReference, Time};
    use kube::api::ObjectMeta;

    use super::*;

    fn slice(name: &str, owner: &str) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                owner_references: Some(vec![OwnerReference {
                    kind: "Node".to_owned(),
                    uid: owner.to_owned(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: "gpu.acme.com".to_owned(),
                devices: Some(vec![Device::default(), Device::default()]),
                pool: ResourcePool {
                    name: "n".to_owned(),
                    generation: 3,
                    resource_slice_count: 1,
                },
                ..ResourceSliceSpec::default()
            },
        }
    }

    fn known(changes: Vec<Change<ResourceSlice>>) -> Slices {
        let mut slices = Slices::default();
        let mut change = |change| slices.changed(change, Moment(1));
        changes.into_iter().for_each(&mut change);
        slices
    }

    #[test]
    fn a_list_replaces_the_slices_when_it_is_complete() {
        let mut slices = known(vec![
            Change::ListBegin,
            Change::Present(slice("a", "1")),
            Change::Present(slice("b", "1")),
            Change::ListEnd,
            Change::Deleted(slice("b", "1")),
            Change::Present(slice("c", "1")),
        ]);
        let names = |slices: &Slices| slices.with_owner(None).into_keys().collect::<Vec<_>>();
        assert_eq!(names(&slices), ["a", "c"]);
        let later = Moment(2);
        slices.changed(Change::ListBegin, later);
        slices.changed(Change::Present(slice("c", "1")), later);
        slices.changed(Change::Present(slice("d", "1")), later);
        assert_eq!(names(&slices), ["a", "c"]);
        slices.changed(Change::ListEnd, later);
        assert_eq!(names(&slices), ["c", "d"]);
        let all = slices.with_owner(None);
        assert_eq!((all["c"].seen, all["d"].seen), (Moment(1), later));
        let a = &all["d"];
        let shown = (a.driver.as_str(), a.pool.as_str(), a.generation, a.devices);
        assert_eq!(shown, ("gpu.acme.com", "n", 3, 2));
    }

    #[test]
    fn a_driver_with_slices_of_an_earlier_node_object_must_restart_until_it_has() {
        let mut slices = known(vec![Change::Present(slice("a", "1"))]);
        let is_stale = |slices: &Slices, node| slices.with_owner(node)["a"].has_stale_owner;
        assert!(is_stale(&slices, Some("2")));
        assert!(!is_stale(&slices, Some("1")));
        assert!(!is_stale(&slices, None), "the Node is not known yet");

        let stale = |slices: &mut Slices, is_away| slices.stale_drivers(Some("2"), |_| is_away).len();
        assert_eq!(stale(&mut slices, false), 1);
        // Garbage collection deletes it, again and again.
        for _ in 0..2 {
            slices.changed(Change::Deleted(slice("a", "1")), Moment(1));
            assert_eq!(stale(&mut slices, false), 1);
            slices.changed(Change::Present(slice("b", "1")), Moment(1));
            slices.changed(Change::Deleted(slice("b", "1")), Moment(1));
            assert_eq!(stale(&mut slices, false), 1);
        }
        assert_eq!(stale(&mut slices, true), 0, "it has left");
        assert_eq!(stale(&mut slices, false), 0);
        slices.changed(Change::Present(slice("c", "1")), Moment(1));
        assert_eq!(stale(&mut slices, false), 1);
        slices.changed(Change::Present(slice("d", "2")), Moment(1));
        assert_eq!(stale(&mut slices, false), 0, "it has published again");
    }

    #[test]
    fn slices_that_were_published_or_changed_since_the_start_are_not_earlier() {
        let time = |text: &str| Some(Time(text.parse().unwrap()));
        let started = "2026-01-01T12:00:00.5Z".parse().unwrap();
        let mut each = slice("a", "1");
        assert!(!is_earlier(&each, started), "its age is not known");
        each.metadata.creation_timestamp = time("2026-01-01T11:59:59Z");
        assert!(is_earlier(&each, started));
        let change = ManagedFieldsEntry {
            time: time("2026-01-01T12:00:01Z"),
            ..ManagedFieldsEntry::default()
        };
        each.metadata.managed_fields = Some(vec![change]);
        assert!(!is_earlier(&each, started));
        each.metadata.managed_fields = None;
        each.metadata.creation_timestamp = time("2026-01-01T12:00:00Z");
        assert!(!is_earlier(&each, started));
    }

    #[test]
    fn a_driver_is_selected_together_with_the_node() {
        let driver = DriverName::from("gpu.acme.com");
        assert_eq!(
            selector("n", Some(&driver)),
            "spec.driver=gpu.acme.com,spec.nodeName=n"
        );
    }
}
