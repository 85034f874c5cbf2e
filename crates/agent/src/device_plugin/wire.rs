//! Between the wire and the core: device lists and answers.

use std::sync::Arc;

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::device_plugin::run_options::{Answer, DeviceNode, Mount, RunOptions};
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};

/// A list of `ListAndWatch`, and how many entries named a device again.
pub fn device_list(message: v1beta1::ListAndWatchResponse) -> (DeviceList, usize) {
    let device = |device: v1beta1::Device| Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1beta1::HEALTHY,
        nodes: device.topology.into_iter().flat_map(|each| each.nodes).map(|node| node.id).collect(),
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

/// A plugin's answer from its bytes, which are kept as they came.
pub fn answer(raw: &[u8]) -> Result<Answer, InvalidResponse> {
    let response = response::decode(raw)?;
    let mount = |mount: v1beta1::Mount| Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    };
    let device = |device: v1beta1::DeviceSpec| DeviceNode {
        container_path: device.container_path,
        host_path: device.host_path,
        permissions: device.permissions,
    };
    let options = RunOptions {
        envs: response.envs,
        mounts: response.mounts.into_iter().map(mount).collect(),
        device_nodes: response.devices.into_iter().map(device).collect(),
        annotations: response.annotations,
        cdi_devices: response.cdi_devices.into_iter().map(|device| device.name).collect(),
    };
    Ok(Answer { options, raw: Arc::from(raw) })
}
