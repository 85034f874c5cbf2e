//! A plugin's list of devices, as it last said it.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use crate::id::DeviceId;

/// NUMA nodes from here on steer no choice: no machine has them, and a plugin that named a node per device would
/// make every choice slow. The kubelet's limit is the same.
const NODES: i64 = 64;

/// Approximate memory of a device besides its id and nodes: its place in the list, and the allocations around it.
const DEVICE_BYTES: usize = 96;

/// One device of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub id: DeviceId,
    /// Only what the plugin calls exactly `Healthy` is.
    pub healthy: bool,
    /// NUMA nodes; empty when the plugin names none.
    pub nodes: Vec<i64>,
}

/// The devices of a resource, sorted by id, each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceList {
    // First, because lists are compared in this order, and mostly differ here.
    healthy: BitSet,
    by_node: BTreeMap<i64, BitSet>,
    devices: Vec<Device>,
    memory: usize,
}

impl DeviceList {
    /// Builds a list from a plugin's message. Of a device that is named twice the last entry counts. The second value
    /// is the number of entries that were left out.
    pub fn new(mut devices: Vec<Device>) -> (Self, usize) {
        let named = devices.len();
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
        for (place, device) in devices.iter_mut().enumerate() {
            if device.healthy {
                healthy.insert(place);
            }
            device.nodes.sort_unstable();
            device.nodes.dedup();
            for node in device.nodes.iter().filter(|node| (0..NODES).contains(*node)) {
                by_node
                    .entry(*node)
                    .or_insert_with(|| BitSet::none(length))
                    .insert(place);
            }
        }
        let memory = |device: &Device| DEVICE_BYTES + device.id.as_str().len() + size_of_val(&*device.nodes);
        let list = Self {
            healthy,
            by_node,
            memory: devices.iter().map(memory).sum(),
            devices,
        };
        (list, named - length)
    }

    /// Returns the approximate memory that the list takes, in bytes.
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// All devices, sorted by id.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// The places of the healthy devices.
    pub fn healthy(&self) -> &BitSet {
        &self.healthy
    }

    /// The names of the healthy devices.
    pub fn healthy_ids(&self) -> impl Iterator<Item = &DeviceId> {
        self.healthy.iter().filter_map(|place| self.id_at(place))
    }

    /// The places of the devices on each NUMA node that counts. Devices without one are in none.
    pub fn by_node(&self) -> &BTreeMap<i64, BitSet> {
        &self.by_node
    }

    /// A device's place in the list.
    pub fn place_of(&self, id: &str) -> Option<usize> {
        self.devices
            .binary_search_by(|device| device.id.as_str().cmp(id))
            .ok()
    }

    /// The name of the device at a place.
    pub(crate) fn id_at(&self, place: usize) -> Option<&DeviceId> {
        self.devices.get(place).map(|device| &device.id)
    }

    /// A device by name.
    pub fn get(&self, id: &str) -> Option<&Device> {
        self.devices.get(self.place_of(id)?)
    }
}

#[cfg(test)]
mod tests;
