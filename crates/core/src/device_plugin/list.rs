//! Device list of a plugin.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use crate::id::DeviceId;

/// NUMA nodes with this number or a higher one are ignored when devices are selected. A plugin that named a node per device
/// would make every selection slow. The kubelet has the same limit.
const MAX_NODES: i64 = 64;

/// Approximate memory of a device besides its id and nodes: its place in the list, and the allocations around it.
const DEVICE_BYTES: usize = 96;

/// One device of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its ID.
    pub id: DeviceId,
    /// `true` only if the plugin reports exactly `Healthy`.
    pub healthy: bool,
    /// NUMA nodes; empty if the plugin does not report them.
    pub nodes: Vec<i64>,
}

/// The devices of a resource, sorted by id, each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceList {
    // First, because `eq` compares fields in order, and lists differ mostly in health.
    healthy: BitSet,
    by_node: BTreeMap<i64, BitSet>,
    devices: Vec<Device>,
    memory: usize,
}

impl DeviceList {
    /// Builds a list from a plugin's message. Of several entries with the same ID, the last one is used. The second value
    /// is the number of dropped entries.
    pub fn new(mut devices: Vec<Device>) -> (Self, usize) {
        let entries = devices.len();
        devices.sort_by(|one, other| one.id.cmp(&other.id));
        devices.dedup_by(|later, kept| {
            let is_same = later.id == kept.id;
            if is_same {
                core::mem::swap(later, kept);
            }
            is_same
        });
        let length = devices.len();
        let mut healthy = BitSet::none(length);
        let mut by_node: BTreeMap<i64, BitSet> = BTreeMap::new();
        for (index, device) in devices.iter_mut().enumerate() {
            if device.healthy {
                healthy.insert(index);
            }
            device.nodes.sort_unstable();
            device.nodes.dedup();
            for node in device.nodes.iter().filter(|node| (0..MAX_NODES).contains(*node)) {
                by_node
                    .entry(*node)
                    .or_insert_with(|| BitSet::none(length))
                    .insert(index);
            }
        }
        let memory = |device: &Device| DEVICE_BYTES + device.id.as_str().len() + size_of_val(&*device.nodes);
        let list = Self {
            healthy,
            by_node,
            memory: devices.iter().map(memory).sum(),
            devices,
        };
        (list, entries - length)
    }

    /// Returns the approximate memory that the list takes, in bytes.
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// Returns all devices, sorted by id.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns `true` if the list is empty.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Returns the indexes of the healthy devices.
    pub fn healthy(&self) -> &BitSet {
        &self.healthy
    }

    /// Returns the IDs of the healthy devices.
    pub fn healthy_ids(&self) -> impl Iterator<Item = &DeviceId> {
        self.healthy.iter().filter_map(|index| self.id_at(index))
    }

    /// Returns the indexes of the devices on each NUMA node below 64.
    pub fn by_node(&self) -> &BTreeMap<i64, BitSet> {
        &self.by_node
    }

    /// Returns the index of a device in the list.
    pub fn index_of(&self, id: &str) -> Option<usize> {
        self.devices
            .binary_search_by(|device| device.id.as_str().cmp(id))
            .ok()
    }

    /// Returns the ID of the device at an index.
    pub(crate) fn id_at(&self, index: usize) -> Option<&DeviceId> {
        self.devices.get(index).map(|device| &device.id)
    }

    /// Returns a device by ID.
    pub fn get(&self, id: &str) -> Option<&Device> {
        self.devices.get(self.index_of(id)?)
    }
}

#[cfg(test)]
mod tests;
