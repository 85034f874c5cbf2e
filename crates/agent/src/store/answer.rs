//! What a plugin's stored answer means.
//!
//! Records keep the answer as it came, byte for byte, and nothing else: what it means is derived again when
//! records are read. One fact, stored once, and fields that a later version understands are not lost.

use std::sync::Arc;

use devlet_core::device_plugin::run_options::{Answer, DeviceNode, Mount, RunOptions};
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};

/// The answer that these bytes of a `v1beta1.ContainerAllocateResponse` are, read as a kubelet reads them.
///
/// The options of an answer that is to be committed must come from here: they are what a restart will bring back.
pub fn answer(raw: impl Into<Arc<[u8]>>) -> Result<Answer, InvalidResponse> {
    let raw = raw.into();
    read(&raw)?;
    Ok(recorded(raw))
}

/// Permissions of a device node that a plugin leaves out.
const ALL_PERMISSIONS: &str = "rwm";

/// Returns a path in the container as runtimes use it: relative paths begin at its root.
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

/// The same for an answer that is on record already: one that says nothing intelligible adds nothing to a
/// container, but its bytes are kept.
pub(crate) fn recorded(raw: impl Into<Arc<[u8]>>) -> Answer {
    Answer::lazy(raw, |raw| read(raw).unwrap_or_default())
}
