//! Read-only queries about device plugins, devices and pods.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::device_plugin::inventory::{LastPlugin, PluginOptions};
use crate::device_plugin::ledger::Ledger;
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::rejections::Rejected;
use crate::device_plugin::run_options::{self, Conflict, RunOptions};
use crate::id::{ConnectionId, DeviceId, Moment, PodUid, ResourceName};
use crate::node::{Blocked, Node};
use crate::pod::{Pod, PodName, Source};

/// Device counts of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// All devices, healthy or not.
    pub capacity: usize,
    /// Healthy devices, whether held or not.
    pub allocatable: usize,
    /// Devices that pods or reservations hold, listed or not.
    pub held: usize,
    /// Healthy devices without a holder.
    pub free: usize,
}

/// The availability of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// A plugin has listed its devices.
    Serving,
    /// A plugin is connected and has not listed its devices yet.
    NotListed,
    /// No plugin is connected.
    Gone(Option<LastPlugin>),
}

/// A resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceView {
    /// Its name.
    pub name: ResourceName,
    /// Its device counts.
    pub capacity: Capacity,
    /// Its availability.
    pub availability: Availability,
    /// Its plugins, oldest connection first.
    pub plugins: Vec<ConnectionId>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceView {
    /// Its resource.
    pub resource: ResourceName,
    /// Its id.
    pub id: DeviceId,
    /// `true` if a connected plugin lists it.
    pub listed: bool,
    /// `true` if a connected plugin lists it as healthy.
    pub healthy: bool,
    /// Its NUMA nodes; empty if the plugin does not report them.
    pub nodes: Vec<i64>,
    /// The pods that hold it: more than one only if an imported file says so.
    pub holders: Vec<PodUid>,
}

/// A connected plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginView {
    /// Its connection.
    pub connection: ConnectionId,
    /// Its resource.
    pub resource: ResourceName,
    /// Its socket.
    pub endpoint: String,
    /// The user ID of its process.
    pub uid: u32,
    /// Its options.
    pub options: PluginOptions,
    /// The time of the connection.
    pub connected_at: Moment,
    /// The length of its last list; `None` before its first list.
    pub devices: Option<usize>,
    /// `true` if its list is the active one.
    pub is_active: bool,
}

impl Node {
    /// Returns the first reason why admissions are refused.
    pub fn blocked(&self) -> Option<&Blocked> {
        self.blocked.first()
    }

    /// Returns all reasons why admissions are refused.
    pub fn blocked_by(&self) -> &[Blocked] {
        &self.blocked
    }

    /// Returns the contested file that concerns a pod.
    pub fn contested_by(&self, pod: &PodUid) -> Option<&Blocked> {
        let is_open =
            |reason: &&Blocked| matches!(reason, Blocked::ContestedFile { pods, .. } if pods.contains(pod));
        self.blocked.iter().find(is_open)
    }

    /// Returns the device counts of each known resource.
    pub fn capacity(&self, now: Moment) -> BTreeMap<ResourceName, Capacity> {
        let held = self.ledger.held.keys().chain(self.leases.resources());
        let names: BTreeSet<&ResourceName> = self.resources.keys().chain(held).collect();
        names
            .into_iter()
            .map(|name| (name.clone(), self.capacity_of(name, now)))
            .collect()
    }

    /// Returns the device counts of one resource.
    pub fn capacity_of(&self, name: &ResourceName, now: Moment) -> Capacity {
        let leased = self.leases.devices_of(name).count();
        let held = self.ledger.held.get(name).map_or(0, BTreeMap::len) + leased;
        let Some(resource) = self.resources.get(name) else {
            return Capacity {
                held,
                ..Capacity::default()
            };
        };
        let serving = resource.active.is_some();
        Capacity {
            capacity: if resource.counts(now) {
                resource.list.len()
            } else {
                0
            },
            allocatable: if serving {
                resource.list.healthy().count()
            } else {
                0
            },
            held,
            free: self
                .ledger
                .free
                .get(name)
                .filter(|_| serving)
                .map_or(0, |free| free.count().saturating_sub(self.leased_healthy(name))),
        }
    }

    /// Returns the number of healthy devices that leases have. Pods on record have none of them.
    fn leased_healthy(&self, name: &ResourceName) -> usize {
        let leased = self.leases.devices_of(name);
        leased.filter(|device| self.is_healthy(name, device)).count()
    }

    /// Returns the availability of a resource.
    pub fn availability(&self, name: &ResourceName) -> Availability {
        let Some(resource) = self.resources.get(name) else {
            return Availability::Gone(None);
        };
        if resource.plugins.is_empty() {
            Availability::Gone(resource.last.clone())
        } else if resource.active.is_none() {
            Availability::NotListed
        } else {
            Availability::Serving
        }
    }

    /// Returns all known resources, by name.
    pub fn resources(&self, now: Moment) -> Vec<ResourceView> {
        let view = |(name, capacity): (ResourceName, Capacity)| ResourceView {
            capacity,
            availability: self.availability(&name),
            plugins: self
                .resources
                .get(&name)
                .into_iter()
                .flat_map(|each| each.plugins.keys().copied())
                .collect(),
            name,
        };
        self.capacity(now).into_iter().map(view).collect()
    }

    /// Returns all listed or held devices of a resource, by id. Pods that hold a device through a lease are among its
    /// holders, if the kubelet has told which they are.
    pub fn devices(&self, name: &ResourceName) -> Vec<DeviceView> {
        let resource = self.resources.get(name);
        let list = resource
            .map(|resource| resource.list.devices())
            .unwrap_or_default();
        let serving = resource.is_some_and(|resource| resource.active.is_some());
        let held = self.ledger.held.get(name);
        let mut views: BTreeMap<&DeviceId, DeviceView> = BTreeMap::new();
        for device in list {
            let view = DeviceView {
                resource: name.clone(),
                id: device.id.clone(),
                listed: serving,
                healthy: serving && device.healthy,
                nodes: device.nodes.clone(),
                holders: Vec::new(),
            };
            views.insert(&device.id, view);
        }
        let absent = |id: &DeviceId| DeviceView {
            resource: name.clone(),
            id: id.clone(),
            listed: false,
            healthy: false,
            nodes: Vec::new(),
            holders: Vec::new(),
        };
        for (id, pods) in held.into_iter().flatten() {
            let view = views.entry(id).or_insert_with(|| absent(id));
            view.holders.clone_from(pods);
        }
        for (id, pod) in self.leases.holders_of(name) {
            let view = views.entry(id).or_insert_with(|| absent(id));
            if !view.holders.contains(pod) {
                view.holders.push(pod.clone());
            }
        }
        views.into_values().collect()
    }

    /// Returns `true` if the active list of a resource has the device as healthy.
    pub fn is_healthy(&self, name: &ResourceName, device: &DeviceId) -> bool {
        let healthy = |resource: &crate::device_plugin::inventory::Resource| {
            let listed = resource.list.get(device.as_str());
            resource.active.is_some() && listed.is_some_and(|device| device.healthy)
        };
        self.resources.get(name).is_some_and(healthy)
    }

    /// Returns the active list of every resource without copying the devices; `None` if no list is active.
    pub fn active_lists(&self) -> BTreeMap<ResourceName, Option<Arc<DeviceList>>> {
        let list = |resource: &crate::device_plugin::inventory::Resource| {
            let list = resource.active.map(|_| &resource.list);
            list.cloned()
        };
        let lists = self.resources.iter();
        lists
            .map(|(name, resource)| (name.clone(), list(resource)))
            .collect()
    }

    /// Returns devices that more than one pod holds. Only imported files cause this.
    pub fn doubly_held(&self) -> Vec<DeviceView> {
        let has_any = |held: &BTreeMap<DeviceId, Vec<PodUid>>| held.values().any(|holders| holders.len() > 1);
        let resources = self.ledger.held.iter().filter(|(_, held)| has_any(held));
        resources
            .flat_map(|(name, _)| self.devices(name))
            .filter(|device| device.holders.len() > 1)
            .collect()
    }

    /// Returns all connected plugins, oldest first.
    pub fn plugins(&self) -> Vec<PluginView> {
        self.connections
            .keys()
            .filter_map(|id| self.plugin(*id))
            .collect()
    }

    /// Returns recently rejected plugins that have not registered since then, by resource and endpoint.
    pub fn rejected_plugins(&self, now: Moment) -> impl Iterator<Item = &Rejected> {
        self.rejections.iter(now)
    }

    /// Returns a connected plugin.
    pub fn plugin(&self, connection: ConnectionId) -> Option<PluginView> {
        let name = self.connections.get(&connection)?;
        let resource = self.resources.get(name)?;
        let plugin = resource.plugins.get(&connection)?;
        Some(PluginView {
            connection,
            resource: name.clone(),
            endpoint: plugin.endpoint.clone(),
            uid: plugin.process.uid,
            options: plugin.options,
            connected_at: plugin.connected_at,
            devices: plugin.list.as_ref().map(|(_, list)| list.len()),
            is_active: resource.active == Some(connection),
        })
    }

    /// Returns the plugin to call for a resource.
    pub fn serving(&self, name: &ResourceName) -> Option<ConnectionId> {
        self.resources.get(name)?.serving().map(|(id, _)| id)
    }

    /// Returns the last plugin of every known resource, to be recorded.
    pub fn known_resources(&self) -> BTreeMap<ResourceName, Option<LastPlugin>> {
        self.resources
            .iter()
            .map(|(name, resource)| (name.clone(), resource.last.clone()))
            .collect()
    }

    /// Returns all recorded pods, by UID.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.ledger.pods.values()
    }

    /// Returns the number of recorded pods.
    pub fn pod_count(&self) -> usize {
        self.ledger.pods.len()
    }

    /// Returns a pod by UID.
    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        self.ledger.pods.get(uid)
    }

    /// Returns a pod by name.
    pub fn pod_named(&self, name: &PodName) -> Option<&Pod> {
        self.ledger.pods.get(self.ledger.names.get(name)?)
    }

    /// Returns the changes that the runtime must apply to a container, and conflicts between plugins. CDI devices of
    /// claims come first.
    pub fn run_options(&self, pod: &PodUid, container: &str) -> (RunOptions, Vec<Conflict>) {
        let allocations = self.ledger.pods.get(pod).into_iter();
        let (mut options, conflicts) =
            run_options::merge(allocations.flat_map(|pod| pod.allocations_of(container)));
        let mut cdi_devices = self.cdi_devices(pod, container);
        if !cdi_devices.is_empty() {
            let others = options.cdi_devices.drain(..);
            let others: Vec<String> = others.filter(|name| !cdi_devices.contains(name)).collect();
            cdi_devices.extend(others);
            options.cdi_devices = cdi_devices;
        }
        (options, conflicts)
    }

    /// Returns the pods of a source that are missing in its complete list, `active`. The list was requested after `asked`
    /// admissions ([`Node::admissions`]). Pods that were admitted after that are not returned.
    pub fn orphans(&self, source: Source, active: &BTreeSet<PodUid>, asked: u64) -> Vec<PodUid> {
        let pods = self.ledger.pods.values();
        let missing = pods.filter(|pod| !active.contains(&pod.uid));
        missing
            .filter(|pod| self.list_covers(&pod.uid, source, asked))
            .map(|pod| pod.uid.clone())
            .collect()
    }

    /// Returns `true` if a list of this source, requested after `asked` admissions, covers this pod.
    pub fn list_covers(&self, pod: &PodUid, source: Source, asked: u64) -> bool {
        let answers = |pod: &Pod| pod.source == source || pod.source == Source::Imported;
        let admitted = self.ledger.admitted.get(pod);
        self.ledger.pods.get(pod).is_some_and(answers) && admitted.is_none_or(|number| *number < asked)
    }

    /// Returns the next end of a grace period, without those that [`Node::grace_ended`] has ended.
    pub fn next_grace_end(&self) -> Option<Moment> {
        let ends = self
            .resources
            .values()
            .filter_map(|resource| resource.grace_end());
        ends.min()
    }

    /// Returns `true` if a pod is being admitted, removed or imported.
    pub fn is_in_flight(&self, pod: &PodUid) -> bool {
        let Ledger {
            in_flight, releasing, ..
        } = &self.ledger;
        in_flight.contains_key(pod) || releasing.contains_key(pod) || self.importing.pods.contains(pod)
    }
}
