//! Questions about a node. Asking changes nothing.

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

/// How many devices of a resource there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// All devices, healthy or not.
    pub capacity: usize,
    /// Healthy devices, whether held or not.
    pub allocatable: usize,
    /// Devices that pods or reservations hold, listed or not.
    pub held: usize,
    /// Healthy devices that nobody holds.
    pub free: usize,
}

/// Whether a resource can be had now.
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
    /// How many devices it has.
    pub capacity: Capacity,
    /// Whether it can be had now.
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
    /// Whether a connected plugin lists it.
    pub listed: bool,
    /// Whether a connected plugin calls it healthy.
    pub healthy: bool,
    /// Its NUMA nodes, if any plugin has said.
    pub nodes: Vec<i64>,
    /// Who holds it: one, unless an imported file says otherwise.
    pub holders: Vec<PodUid>,
}

/// A connected plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginView {
    /// Its connection.
    pub connection: ConnectionId,
    /// What it serves.
    pub resource: ResourceName,
    /// Where it answers.
    pub endpoint: String,
    /// The user that it runs as.
    pub uid: u32,
    /// What it wants to be asked.
    pub options: PluginOptions,
    /// Since when it is connected.
    pub connected_at: Moment,
    /// How many devices it listed last; `None` before its first list.
    pub devices: Option<usize>,
    /// Whether its list counts.
    pub is_active: bool,
}

impl Node {
    /// Why nobody is admitted.
    pub fn blocked(&self) -> Option<&Blocked> {
        self.blocked.first()
    }

    /// All the reasons.
    pub fn blocked_by(&self) -> &[Blocked] {
        &self.blocked
    }

    /// The contested file that leaves open what a pod holds.
    pub fn contested_by(&self, pod: &PodUid) -> Option<&Blocked> {
        let is_open =
            |reason: &&Blocked| matches!(reason, Blocked::ContestedFile { pods, .. } if pods.contains(pod));
        self.blocked.iter().find(is_open)
    }

    /// How many devices of each known resource there are.
    pub fn capacity(&self, now: Moment) -> BTreeMap<ResourceName, Capacity> {
        let names: BTreeSet<&ResourceName> = self.resources.keys().chain(self.ledger.held.keys()).collect();
        names
            .into_iter()
            .map(|name| (name.clone(), self.capacity_of(name, now)))
            .collect()
    }

    /// How many devices of one resource there are.
    pub fn capacity_of(&self, name: &ResourceName, now: Moment) -> Capacity {
        let held = self.ledger.held.get(name).map_or(0, BTreeMap::len);
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
                .map_or(0, |free| if serving { free.count() } else { 0 }),
        }
    }

    /// Allocatable devices, raised to what is held: for the fit check of a pod that holds its devices already,
    /// while its plugin is away.
    pub fn allocatable_for_holders(&self, name: &ResourceName, now: Moment) -> usize {
        let capacity = self.capacity_of(name, now);
        capacity.allocatable.max(capacity.held)
    }

    /// Whether a resource can be had now.
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

    /// All known resources, by name.
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

    /// All devices of a resource, listed or held, by id.
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
        for (id, pods) in held.into_iter().flatten() {
            let absent = || DeviceView {
                resource: name.clone(),
                id: id.clone(),
                listed: false,
                healthy: false,
                nodes: Vec::new(),
                holders: Vec::new(),
            };
            views.entry(id).or_insert_with(absent).holders.clone_from(pods);
        }
        views.into_values().collect()
    }

    /// Whether the plugin that serves a resource calls a device healthy.
    pub fn is_healthy(&self, name: &ResourceName, device: &DeviceId) -> bool {
        let healthy = |resource: &crate::device_plugin::inventory::Resource| {
            let listed = resource.list.get(device.as_str());
            resource.active.is_some() && listed.is_some_and(|device| device.healthy)
        };
        self.resources.get(name).is_some_and(healthy)
    }

    /// The list of every resource, if it is in force. Not what is in it, which takes longer to say.
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

    /// Devices that more than one pod holds. Only an imported file can bring that about.
    pub fn doubly_held(&self) -> Vec<DeviceView> {
        let has_any = |held: &BTreeMap<DeviceId, Vec<PodUid>>| held.values().any(|holders| holders.len() > 1);
        let resources = self.ledger.held.iter().filter(|(_, held)| has_any(held));
        resources
            .flat_map(|(name, _)| self.devices(name))
            .filter(|device| device.holders.len() > 1)
            .collect()
    }

    /// All connected plugins, oldest first.
    pub fn plugins(&self) -> Vec<PluginView> {
        self.connections
            .keys()
            .filter_map(|id| self.plugin(*id))
            .collect()
    }

    /// Plugins that were rejected lately and have not registered since, by resource and endpoint.
    pub fn rejected_plugins(&self, now: Moment) -> impl Iterator<Item = &Rejected> {
        self.rejections.iter(now)
    }

    /// A connected plugin.
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

    /// The plugin to call for a resource.
    pub fn serving(&self, name: &ResourceName) -> Option<ConnectionId> {
        self.resources.get(name)?.serving().map(|(id, _)| id)
    }

    /// The last plugin of every known resource, for the record.
    pub fn known_resources(&self) -> BTreeMap<ResourceName, Option<LastPlugin>> {
        self.resources
            .iter()
            .map(|(name, resource)| (name.clone(), resource.last.clone()))
            .collect()
    }

    /// All pods that hold devices, by UID.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.ledger.pods.values()
    }

    /// How many pods hold devices.
    pub fn pod_count(&self) -> usize {
        self.ledger.pods.len()
    }

    /// A pod by UID.
    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        self.ledger.pods.get(uid)
    }

    /// A pod by name.
    pub fn pod_named(&self, name: &PodName) -> Option<&Pod> {
        self.ledger.pods.get(self.ledger.names.get(name)?)
    }

    /// What the runtime must add to a container, and where plugins disagree. CDI devices of claims come first.
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

    /// Pods of a source that its list, which is complete, does not have. The list was asked for after `asked`
    /// admissions ([`Node::admissions`]), and does not speak for pods that were admitted, again or for the first time,
    /// since.
    pub fn orphans(&self, source: Source, active: &BTreeSet<PodUid>, asked: u64) -> Vec<PodUid> {
        let pods = self.ledger.pods.values();
        let missing = pods.filter(|pod| !active.contains(&pod.uid));
        missing
            .filter(|pod| self.list_speaks_for(&pod.uid, source, asked))
            .map(|pod| pod.uid.clone())
            .collect()
    }

    /// Whether a list of this source that was asked for after `asked` admissions says if this pod is still there.
    pub fn list_speaks_for(&self, pod: &PodUid, source: Source, asked: u64) -> bool {
        let answers = |pod: &Pod| pod.source == source || pod.source == Source::Imported;
        let admitted = self.ledger.admitted.get(pod);
        self.ledger.pods.get(pod).is_some_and(answers) && admitted.is_none_or(|number| *number < asked)
    }

    /// When the next grace period ends of a plugin that left, unless [`Node::grace_ended`] was called for it.
    pub fn next_grace_end(&self) -> Option<Moment> {
        let ends = self
            .resources
            .values()
            .filter_map(|resource| resource.grace_end());
        ends.min()
    }

    /// Whether a pod is being admitted, removed or imported.
    pub fn is_in_flight(&self, pod: &PodUid) -> bool {
        let Ledger {
            in_flight, releasing, ..
        } = &self.ledger;
        in_flight.contains_key(pod) || releasing.contains_key(pod) || self.importing.pods.contains(pod)
    }
}
