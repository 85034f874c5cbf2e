//! Between the wire and the core: device lists.

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};

use crate::limits::{Limit, Limits, OverLimit, shortened};

/// What a device takes besides its id and nodes, roughly: a place in the list, and the allocations around it.
const DEVICE_BYTES: usize = 96;

/// A device's id, and how many nodes it names.
pub(super) type Outline<'a> = (&'a str, usize);

pub(super) fn outline(device: &v1beta1::Device) -> Outline<'_> {
    let nodes = device
        .topology
        .as_ref()
        .map_or(0, |topology| topology.nodes.len());
    (&device.id, nodes)
}

pub(super) fn outline_2017(device: &v1alpha2::Device) -> Outline<'_> {
    (&device.id, 0)
}

/// How much memory a list takes, roughly, if it is within bounds.
pub(super) fn check<'a>(
    devices: impl ExactSizeIterator<Item = Outline<'a>>,
    limits: &Limits,
) -> Result<usize, OverLimit> {
    let count = devices.len();
    Limit::DEVICES_PER_RESOURCE.check(count, limits.devices_per_resource, || {
        format!("the list has {count} devices")
    })?;
    let mut memory = 0;
    for (id, nodes) in devices {
        Limit::ID_BYTES.check(id.len(), limits.id_bytes, || {
            format!("the id {} has {} bytes", shortened(id), id.len())
        })?;
        memory += DEVICE_BYTES + id.len() + nodes * size_of::<i64>();
    }
    Ok(memory)
}

/// A list of `ListAndWatch`, and how many entries named a device again.
pub fn device_list(message: v1beta1::ListAndWatchResponse) -> (DeviceList, usize) {
    let device = |device: v1beta1::Device| Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1beta1::HEALTHY,
        nodes: device
            .topology
            .into_iter()
            .flat_map(|each| each.nodes)
            .map(|node| node.id)
            .collect(),
    };
    DeviceList::new(message.devices.into_iter().map(device).collect())
}

/// The same from a plugin of 2017, which knows nothing of topology.
pub fn device_list_2017(message: v1alpha2::ListAndWatchResponse) -> (DeviceList, usize) {
    let device = |device: v1alpha2::Device| Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1alpha2::HEALTHY,
        nodes: Vec::new(),
    };
    DeviceList::new(message.devices.into_iter().map(device).collect())
}
