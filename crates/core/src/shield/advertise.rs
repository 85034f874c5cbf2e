//! The devices that the kubelet is told about, and the devices that it is advised to choose.
//!
//! A kubelet fails pods for good whose plugin is away. So the devices of a plugin that is away, or that still looks for
//! its devices, stay advertised as they were last known, until its time is over. Then they are unhealthy, except those that
//! containers have: a kubelet that restarts fails their pods otherwise, and they draw no other pod. A device that a
//! connected plugin lists as unhealthy is unhealthy at once, or after that time if a container has it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Lease;
use crate::device_plugin::bit_set::BitSet;
use crate::device_plugin::inventory::{GRACE_MS, Resource};
use crate::device_plugin::list::{Device, DeviceList};
use crate::device_plugin::select::select;
use crate::id::{DeviceId, Moment, ResourceName};
use crate::node::Node;

/// The devices of a resource, for the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// The devices that the plugin lists, or has listed.
    pub list: Arc<DeviceList>,
    /// Devices that are healthy whatever the list says, because containers have them.
    pub held: BTreeSet<DeviceId>,
    /// `true` if the plugin has been away for too long: every other device counts as unhealthy.
    pub is_expired: bool,
    /// When the devices become unhealthy unless the plugin comes back; `None` if it is there.
    pub until: Option<Moment>,
}

impl Advertised {
    /// Returns `true` if a device of the list counts as healthy.
    pub fn is_healthy(&self, device: &Device) -> bool {
        device.healthy && !self.is_expired || self.held.contains(&device.id)
    }

    /// Returns the devices that are not in the list. They are healthy.
    pub fn unlisted(&self) -> impl Iterator<Item = &DeviceId> {
        self.held.iter().filter(|id| self.list.get(id.as_str()).is_none())
    }

    /// Returns `true` if the kubelet would see no difference.
    pub fn shows_same(&self, other: &Self) -> bool {
        let is_same_list = Arc::ptr_eq(&self.list, &other.list) || self.list == other.list;
        self.is_expired == other.is_expired && self.held == other.held && is_same_list
    }
}

impl Resource {
    /// Returns the plugin's list, if the plugin has found its devices.
    fn ready_list(&self) -> Option<&Arc<DeviceList>> {
        let (_, plugin) = self.serving()?;
        plugin.ready.then_some(&self.list)
    }

    /// Returns when the time of a plugin that is away ends. It begins when the plugin left, or at `booted` if that is later.
    fn away_until(&self, booted: Moment, away_ms: u64) -> Moment {
        let left = self.last.as_ref().map(|last| last.gone_since);
        self.ready_until
            .or(left)
            .unwrap_or(booted)
            .max(booted)
            .after(away_ms)
    }
}

impl Node {
    /// Returns the resources with devices to advertise: listed now, known from an earlier list, or in a container that
    /// got them through devlet.
    pub fn advertised_resources(&self) -> BTreeSet<ResourceName> {
        let known = |(_, resource): &(&ResourceName, &Resource)| {
            resource.active.is_some() || !resource.remembered.is_empty()
        };
        let known = self.resources.iter().filter(known).map(|(name, _)| name);
        let leases = self.leases.iter().map(|view| view.lease);
        let leased = leases
            .filter(|lease| !lease.is_direct)
            .map(|lease| &lease.resource);
        known.chain(leased).cloned().collect()
    }

    /// Returns what to tell the kubelet about a resource. A plugin that is away has `away_ms` to come back, once after each
    /// boot.
    pub fn advertised(&self, name: &ResourceName, now: Moment, booted: Moment, away_ms: u64) -> Advertised {
        let absent = Resource::default();
        let resource = self.resources.get(name).unwrap_or(&absent);
        if let Some(list) = resource.ready_list() {
            return Advertised {
                list: Arc::clone(list),
                held: BTreeSet::new(),
                is_expired: false,
                until: None,
            };
        }
        let until = resource.away_until(booted, away_ms);
        let is_expired = now >= until;
        // An empty list says nothing about a device.
        let is_explicit = resource.active.is_some() && !resource.list.is_empty();
        let list = match is_explicit {
            true => &resource.list,
            false => &resource.remembered,
        };
        let held = self.leases.devices_of(name);
        Advertised {
            list: Arc::clone(list),
            held: held.filter(|_| !(is_explicit && is_expired)).cloned().collect(),
            is_expired,
            until: (!is_expired).then_some(until),
        }
    }

    /// Returns a device of a lease that its plugin does not list, although the plugin has found its devices.
    pub fn absent_device<'a>(&self, lease: &'a Lease) -> Option<&'a DeviceId> {
        let list = self.resources.get(&lease.resource)?.ready_list()?;
        lease.devices.iter().find(|id| list.get(id.as_str()).is_none())
    }

    /// Returns the resources whose plugins are gone for good: their time is over, as is the grace period of a kubelet after
    /// that, and no container has a device.
    pub fn lists_to_forget(&self, now: Moment, booted: Moment, away_ms: u64) -> Vec<ResourceName> {
        let is_gone = |(name, resource): &(&ResourceName, &Resource)| {
            let end = resource.away_until(booted, away_ms).after(GRACE_MS);
            let is_unused = resource.plugins.is_empty() && self.leases.devices_of(name).next().is_none();
            now >= end && is_unused && !resource.remembered.is_empty()
        };
        let gone = self.resources.iter().filter(is_gone);
        gone.map(|(name, _)| name.clone()).collect()
    }

    /// Forgets the devices of plugins that are gone for good.
    pub fn forget_lists(&mut self, names: &[ResourceName]) {
        for name in names {
            if let Some(resource) = self.resources.get_mut(name) {
                resource.remembered = Arc::default();
                self.changes += 1;
            }
        }
    }

    /// Returns the lists that are not on record yet.
    pub fn unrecorded_lists(&self) -> Vec<(ResourceName, Arc<DeviceList>)> {
        let is_new = |(_, resource): &(&ResourceName, &Resource)| match &resource.recorded {
            Some(recorded) => !Arc::ptr_eq(recorded, &resource.remembered),
            None => !resource.remembered.is_empty(),
        };
        let resources = self.resources.iter().filter(is_new);
        resources
            .map(|(name, resource)| (name.clone(), Arc::clone(&resource.remembered)))
            .collect()
    }

    /// Returns the lists that a record of the whole node has.
    pub fn remembered_lists(&self) -> impl Iterator<Item = (&ResourceName, &Arc<DeviceList>)> {
        let lists = self
            .resources
            .iter()
            .map(|(name, resource)| (name, &resource.remembered));
        lists.filter(|(_, list)| !list.is_empty())
    }

    /// Notes that a list is on record.
    pub fn list_recorded(&mut self, name: &ResourceName, list: Arc<DeviceList>) {
        if let Some(resource) = self.resources.get_mut(name) {
            resource.recorded = Some(list);
        }
    }

    /// Advises the kubelet which devices to choose: first those that no container has, then those that the plugin
    /// prefers, then those on few NUMA nodes. Returns nothing if there are too few.
    pub fn lease_choice(
        &self,
        name: &ResourceName,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        wanted: usize,
        preferences: &[DeviceId],
    ) -> Vec<DeviceId> {
        let Some(resource) = self.resources.get(name) else {
            return Vec::new();
        };
        let list = &resource.remembered;
        let choose = |of: &dyn Fn(&DeviceId) -> bool| {
            let mut free = BitSet::none(list.len());
            let candidates = available
                .iter()
                .filter(|id| !must_include.contains(*id) && of(id));
            for index in candidates.filter_map(|id| list.index_of(id.as_str())) {
                free.insert(index);
            }
            select(list, &mut free, must_include, preferences, wanted)
        };
        choose(&|id| !self.leases.is_in_use(name, id))
            .or_else(|| choose(&|_| true))
            .unwrap_or_default()
    }
}

impl super::Leases {
    /// Returns `true` if a container of a lease may have the device.
    pub(crate) fn is_in_use(&self, resource: &ResourceName, device: &DeviceId) -> bool {
        let names = self.by_device.get(&(resource.clone(), device.clone()));
        let mut entries = names
            .into_iter()
            .flatten()
            .filter_map(|name| self.entries.get(name));
        entries.any(|entry| entry.lease.is_direct || !entry.lease.containers.is_empty())
    }
}

/// Returns the resources of durable records with the devices that their plugins listed last.
pub(crate) fn restore(
    resources: &mut BTreeMap<ResourceName, Resource>,
    lists: BTreeMap<ResourceName, DeviceList>,
) {
    for (name, list) in lists {
        let resource = resources.entry(name).or_default();
        resource.remembered = Arc::new(list);
        resource.recorded = Some(Arc::clone(&resource.remembered));
    }
}
