//! The devices that the kubelet is told about, and the devices that it is advised to choose.
//!
//! A kubelet fails pods for good whose plugin is away. So the devices of a plugin that is away, or that still looks for
//! its devices, stay advertised as they were last known, until its time is over. Then they are unhealthy.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::device_plugin::bit_set::BitSet;
use crate::device_plugin::inventory::Resource;
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::select::select;
use crate::id::{DeviceId, Moment, ResourceName};
use crate::node::Node;

/// The devices of a resource, for the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// The devices.
    pub list: Arc<DeviceList>,
    /// `true` if the plugin has been away for too long: every device counts as unhealthy.
    pub is_expired: bool,
    /// When the devices become unhealthy unless the plugin comes back; `None` if it is there.
    pub until: Option<Moment>,
}

impl Resource {
    /// Returns the plugin's list, if the plugin has found its devices.
    fn ready_list(&self) -> Option<&Arc<DeviceList>> {
        let (_, plugin) = self.serving()?;
        plugin.ready.then_some(&self.list)
    }
}

impl Node {
    /// Returns the resources with devices to advertise: listed now, or known from an earlier list.
    pub fn advertised_resources(&self) -> BTreeSet<ResourceName> {
        let known = |(_, resource): &(&ResourceName, &Resource)| {
            resource.active.is_some() || !resource.remembered.is_empty()
        };
        let resources = self.resources.iter().filter(known);
        resources.map(|(name, _)| name.clone()).collect()
    }

    /// Returns what to tell the kubelet about a resource. A plugin that is away has `away_ms` from its end, or from
    /// `started`, when devlet started, to come back.
    pub fn advertised(&self, name: &ResourceName, now: Moment, started: Moment, away_ms: u64) -> Advertised {
        let Some(resource) = self.resources.get(name) else {
            return Advertised {
                list: Arc::default(),
                is_expired: true,
                until: None,
            };
        };
        if let Some(list) = resource.ready_list() {
            return Advertised {
                list: Arc::clone(list),
                is_expired: false,
                until: None,
            };
        }
        let since = resource.last.as_ref().map_or(started, |last| last.gone_since);
        let until = since.max(started).after(away_ms);
        let is_expired = now >= until;
        Advertised {
            list: Arc::clone(&resource.remembered),
            is_expired,
            until: (!is_expired).then_some(until),
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
