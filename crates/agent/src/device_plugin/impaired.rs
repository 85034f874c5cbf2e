//! Logs changes of devices that pods hold: the plugin is gone, or no longer lists them, or lists them as unhealthy.

use std::collections::BTreeSet;

use devlet_core::device_plugin::impaired::{Impaired, Impairment};
use devlet_core::{DeviceId, Node, ResourceName};

use crate::display::{NamedPod, first};
use crate::store::Store;

/// Applies a change of a plugin's state, and logs newly impaired devices that pods hold.
pub(crate) fn update<T>(store: &Store, resource: &ResourceName, change: impl FnOnce(&mut Node) -> T) -> T {
    let (changed, lines) = store.update(|node| {
        let before = node.impaired(resource);
        let changed = change(node);
        let after = node.impaired(resource);
        let lines: Vec<Line> = if before == after {
            Vec::new()
        } else {
            let lines = after.iter().filter_map(|group| Line::new(node, group, &before));
            lines.collect()
        };
        (changed, lines)
    });
    for line in lines {
        line.log(resource);
    }
    changed
}

struct Line {
    impairment: Impairment,
    count: usize,
    devices: String,
    pods: String,
}

impl Line {
    /// Returns the entry for devices that are new in a group; `None` without new devices.
    fn new(node: &Node, group: &Impaired, before: &[Impaired]) -> Option<Self> {
        let before = before.iter().find(|each| each.impairment == group.impairment);
        let known = before.map(|before| &before.devices);
        let is_new = |id: &&DeviceId| known.is_none_or(|known| !known.contains(*id));
        let devices: BTreeSet<&DeviceId> = group.devices.iter().filter(is_new).collect();
        let pods = group.pods.iter().map(|pod| NamedPod::of(node, pod));
        (!devices.is_empty()).then(|| Self {
            impairment: group.impairment,
            count: devices.len(),
            devices: first(devices),
            pods: first(pods),
        })
    }

    fn log(self, resource: &ResourceName) {
        let Self {
            impairment,
            count,
            devices,
            pods,
        } = self;
        match impairment {
            Impairment::PluginGone => {
                tracing::warn!(%resource, count, devices, pods, "device plugin gone while pods hold its devices");
            }
            Impairment::NotListed => {
                tracing::warn!(%resource, count, devices, pods, "held devices no longer listed");
            }
            Impairment::Unhealthy => {
                tracing::warn!(%resource, count, devices, pods, "held devices unhealthy");
            }
        }
    }
}
