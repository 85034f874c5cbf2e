//! Between the wire and the core: device lists.

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};

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
