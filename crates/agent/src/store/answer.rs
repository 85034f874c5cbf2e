//! Decoding of a plugin's stored answer.
//!
//! Records keep the bytes of the answer, which are decoded again when records are read. So fields that only a later version
//! understands are not lost.

use std::sync::Arc;

use devlet_core::device_plugin::run_options::{Answer, DeviceNode, Mount, RunOptions};
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};

/// Decodes a `v1beta1.ContainerAllocateResponse` as a kubelet does.
///
/// An answer to commit must come from here, so that a restart decodes the same options.
pub fn answer(raw: impl Into<Arc<[u8]>>) -> Result<Answer, InvalidResponse> {
    let raw = raw.into();
    read(&raw)?;
    Ok(recorded(raw))
}

/// Permissions of a device node if the plugin does not set them.
const ALL_PERMISSIONS: &str = "rwm";

/// Returns a path in the container as runtimes use it: a relative path starts at the root.
fn in_container(path: String) -> String {
    match path.is_empty() || path.starts_with('/') {
        true => path,
        false => format!("/{path}"),
    }
}

/// Reads an answer, with the defaults of container runtimes filled in: a device node without a path in the container is at
/// its path on the host.
fn read(raw: &[u8]) -> Result<RunOptions, InvalidResponse> {
    let response = response::decode(raw)?;
    let mounts = response.mounts.into_iter().map(|mount| Mount {
        container_path: in_container(mount.container_path),
        host_path: mount.host_path,
        read_only: mount.read_only,
    });
    let device_nodes = response.devices.into_iter().map(|device| DeviceNode {
        container_path: match device.container_path.is_empty() {
            true => device.host_path.clone(),
            false => in_container(device.container_path),
        },
        host_path: device.host_path,
        permissions: match device.permissions.is_empty() {
            true => ALL_PERMISSIONS.to_owned(),
            false => device.permissions,
        },
    });
    Ok(RunOptions {
        envs: response.envs.into_iter().collect(),
        mounts: mounts.collect(),
        device_nodes: device_nodes.collect(),
        annotations: response.annotations.into_iter().collect(),
        cdi_devices: response
            .cdi_devices
            .into_iter()
            .map(|device| device.name)
            .collect(),
    })
}

/// Decodes a recorded answer. One that does not decode adds nothing to a container, but its bytes are kept.
pub(crate) fn recorded(raw: impl Into<Arc<[u8]>>) -> Answer {
    Answer::lazy(raw, |raw| read(raw).unwrap_or_default())
}
