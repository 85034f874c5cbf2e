//! Device list of a plugin.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use crate::id::DeviceId;

/// NUMA nodes with this number or a higher one are ignored when devices are selected. A plugin that named a node per device
/// would make every selection slow. The kubelet has the same limit.
const MAX_NODES: i64 = 64;

/// The number of NUMA nodes of a device that count as one step.
const NODES_PER_STEP: usize = 64;

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
}

impl DeviceList {
    /// Builds the list of a plugin's message. Of several entries with the same ID, the last one is used. The second value
    /// is the number of dropped entries.
    pub fn new(devices: Vec<Device>) -> (Self, usize) {
        Self::stepwise(devices, &mut || {})
    }

    /// Builds the list like [`DeviceList::new`], calling `step` so that the caller can yield.
    pub fn stepwise(mut devices: Vec<Device>, step: &mut impl FnMut()) -> (Self, usize) {
        let entries = devices.len();
        sort(&mut devices, step);
        devices.dedup_by(|later, kept| {
            step();
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
            (0..=device.nodes.len() / NODES_PER_STEP).for_each(|_| step());
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
        let dropped = entries - length;
        (
            Self {
                healthy,
                by_node,
                devices,
            },
            dropped,
        )
    }

    /// Returns `true` if the lists are equal, calling `step` so that the caller can yield.
    pub fn says_the_same(&self, other: &Self, step: &mut impl FnMut()) -> bool {
        let Self {
            healthy,
            by_node,
            devices,
        } = self;
        let mut pairs = devices.iter().zip(&other.devices);
        *healthy == other.healthy
            && *by_node == other.by_node
            && devices.len() == other.devices.len()
            && pairs.all(|(one, other)| {
                step();
                one == other
            })
    }

    /// Converts the list into its devices, sorted by id.
    pub fn into_devices(self) -> Vec<Device> {
        self.devices
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

/// Sorts devices by id, calling `step`. The sort is stable. It sorts indexes first and then moves each device once: otherwise
/// most time is spent on moves, and one step moves a whole run of devices.
fn sort(devices: &mut [Device], step: &mut impl FnMut()) {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    order.sort_by(|one, other| {
        step();
        devices[*one].id.cmp(&devices[*other].id)
    });
    // Applies the permutation cycle by cycle.
    for start in 0..order.len() {
        let mut index = start;
        loop {
            step();
            let from = core::mem::replace(&mut order[index], index);
            if from == start {
                break;
            }
            devices.swap(index, from);
            index = from;
        }
    }
}

#[cfg(test)]
mod tests;
