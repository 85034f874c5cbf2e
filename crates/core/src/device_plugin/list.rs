//! A plugin's list of devices, as it last said it.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use crate::id::DeviceId;

/// NUMA nodes from here on steer no choice: no machine has them, and a plugin that named a node per device would
/// make every choice slow. The kubelet's limit is the same.
const NODES: i64 = 64;

/// So many nodes of a device are as good as a step.
const NODES_PER_STEP: usize = 64;

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
}

impl DeviceList {
    /// A list from a plugin's message. Of a device that is named twice the last entry counts. The second value
    /// is the number of entries that were left out.
    pub fn new(devices: Vec<Device>) -> (Self, usize) {
        Self::stepwise(devices, &mut || {})
    }

    /// The same, step by step: a long list takes a while, and whoever builds it may want to pause between two steps.
    pub fn stepwise(mut devices: Vec<Device>, step: &mut impl FnMut()) -> (Self, usize) {
        let named = devices.len();
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
        for (place, device) in devices.iter_mut().enumerate() {
            (0..=device.nodes.len() / NODES_PER_STEP).for_each(|_| step());
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
        let left_out = named - length;
        (
            Self {
                healthy,
                by_node,
                devices,
            },
            left_out,
        )
    }

    /// Whether another list says the same, step by step.
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

    /// All devices, sorted by id; the list is no more.
    pub fn into_devices(self) -> Vec<Device> {
        self.devices
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

/// Sorts devices by id, step by step; of equal ids the last one named stays last. What is moved about are small numbers
/// first, each device once in the end: long lists are mostly moves otherwise, and those of a whole run are one step.
fn sort(devices: &mut [Device], step: &mut impl FnMut()) {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    order.sort_by(|one, other| {
        step();
        devices[*one].id.cmp(&devices[*other].id)
    });
    // Where each place is filled from, round by round, until all are.
    for start in 0..order.len() {
        let mut place = start;
        loop {
            step();
            let from = core::mem::replace(&mut order[place], place);
            if from == start {
                break;
            }
            devices.swap(place, from);
            place = from;
        }
    }
}

#[cfg(test)]
mod tests;
