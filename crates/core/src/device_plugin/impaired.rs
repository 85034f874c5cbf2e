//! Held devices that no plugin lists as healthy. Pods keep them, and devlet reports them.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::id::{DeviceId, PodUid, ResourceName};
use crate::node::Node;

/// Reasons why a held device is impaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Impairment {
    /// No plugin of its resource is connected.
    PluginGone,
    /// The plugin does not list it.
    NotListed,
    /// The plugin lists it as unhealthy.
    Unhealthy,
}

/// Held devices of one resource with the same impairment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impaired {
    /// The reason.
    pub impairment: Impairment,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, by id.
    pub devices: BTreeSet<DeviceId>,
    /// The recorded pods that hold them, by UID.
    pub pods: BTreeSet<PodUid>,
}

impl Node {
    /// Returns the impaired devices of every resource.
    pub fn all_impaired(&self) -> Vec<Impaired> {
        let resources = self.ledger.held.keys();
        resources.flat_map(|name| self.impaired(name)).collect()
    }

    /// Returns the impaired devices of one resource. None is impaired while a connected plugin has not listed its devices
    /// yet.
    pub fn impaired(&self, name: &ResourceName) -> Vec<Impaired> {
        let Some(held) = self.ledger.held.get(name) else {
            return Vec::new();
        };
        let resource = self.resources.get(name);
        let is_gone = resource.is_none_or(|resource| resource.plugins.is_empty());
        let list = resource.filter(|resource| resource.active.is_some());
        let list = list.map(|resource| &*resource.list);
        let healthy = list.map_or(0, |list| list.healthy().count());
        let free = self.ledger.free.get(name).map_or(0, |free| free.count());
        if !is_gone && (list.is_none() || held.len() == healthy.saturating_sub(free)) {
            // The counts show that all held devices are healthy, so the long list is not walked.
            return Vec::new();
        }
        let mut found: Vec<Impaired> = Vec::new();
        for (id, holders) in held {
            let impairment = match list.map(|list| list.get(id.as_str())) {
                None => Impairment::PluginGone,
                Some(None) => Impairment::NotListed,
                Some(Some(device)) if !device.healthy => Impairment::Unhealthy,
                Some(Some(_)) => continue,
            };
            let pods = holders.iter().filter(|pod| self.ledger.pods.contains_key(*pod));
            let mut pods = pods.cloned().peekable();
            if pods.peek().is_none() {
                // The device is only reserved.
                continue;
            }
            let group = match found.iter_mut().find(|group| group.impairment == impairment) {
                Some(group) => group,
                None => {
                    found.push(Impaired {
                        impairment,
                        resource: name.clone(),
                        devices: BTreeSet::new(),
                        pods: BTreeSet::new(),
                    });
                    let Some(group) = found.last_mut() else { continue };
                    group
                }
            };
            group.devices.insert(id.clone());
            group.pods.extend(pods);
        }
        found.sort_by_key(|group| group.impairment);
        found
    }
}
