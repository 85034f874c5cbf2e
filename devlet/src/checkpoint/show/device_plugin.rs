//! The content of a device plugin checkpoint: allocations and registered devices.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use devlet_kubelet_api::device_plugin::v1beta1::{ContainerAllocateResponse, DeviceSpec, Mount};
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};
use devlet_kubelet_files::device_plugin::{Checkpoint, Devices, Entry};
use serde::{Serialize, Serializer};

use crate::output::{count, table, table_of_lines};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::checkpoint) struct Allocations {
    /// Null if it is null in the file: the checksum distinguishes null from an empty list.
    entries: Option<Vec<EntryShown>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EntryShown {
    #[serde(rename = "podUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// Every device once.
    devices: Vec<String>,
    /// The devices by NUMA node; null in formats without topology.
    #[serde(serialize_with = "with_text_keys")]
    numa_nodes: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's answer as stored, in base64.
    alloc_resp: Option<String>,
    /// The decoded answer of the plugin; null if decoding failed.
    response: Option<Response>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_error: Option<String>,
}

/// Serializes map keys as text: YAML would write numbers, which JSON does not allow as keys.
fn with_text_keys<S: Serializer>(
    nodes: &Option<BTreeMap<i64, Option<Vec<String>>>>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match nodes {
        None => to.serialize_none(),
        Some(nodes) => to.collect_map(nodes.iter().map(|(node, ids)| (node.to_string(), ids))),
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    envs: BTreeMap<String, String>,
    mounts: Vec<MountShown>,
    devices: Vec<DeviceShown>,
    annotations: BTreeMap<String, String>,
    cdi_devices: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MountShown {
    container_path: String,
    host_path: String,
    read_only: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceShown {
    container_path: String,
    host_path: String,
    permissions: String,
}

impl Allocations {
    pub(super) fn of(checkpoint: &Checkpoint) -> Self {
        Self {
            entries: checkpoint
                .entries
                .as_ref()
                .map(|entries| entries.iter().map(EntryShown::of).collect()),
            registered_devices: checkpoint.registered.clone(),
        }
    }

    pub(super) fn summary(&self) -> String {
        let entries = self.entries.as_deref().unwrap_or_default();
        let pods: BTreeSet<&str> = entries.iter().map(|entry| entry.pod_uid.as_str()).collect();
        let devices: BTreeSet<(&str, &str)> = entries
            .iter()
            .flat_map(|entry| {
                entry
                    .devices
                    .iter()
                    .map(|device| (entry.resource_name.as_str(), device.as_str()))
            })
            .collect();
        let known = self.registered_devices.as_ref().map_or(0, BTreeMap::len);
        let (pods, devices) = (count(pods.len(), "pod"), count(devices.len(), "device"));
        format!("{pods} with {devices}; {} registered", count(known, "resource"))
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        if let Some(entries) = self.entries.as_ref().filter(|entries| !entries.is_empty()) {
            let header = ["POD", "CONTAINER", "RESOURCE", "DEVICES", "ANSWER OF THE PLUGIN"];
            let rows = entries.iter().map(|entry| {
                let holder = [&entry.pod_uid, &entry.container_name, &entry.resource_name];
                let [pod, container, resource] = holder.map(|text| vec![text.clone()]);
                [
                    pod,
                    container,
                    resource,
                    entry.devices_lines(),
                    entry.answer_lines(),
                ]
            });
            text.push_str(&format!("\n{}", table_of_lines(header, rows)));
        }
        if let Some(resources) = self
            .registered_devices
            .as_ref()
            .filter(|resources| !resources.is_empty())
        {
            let rows = resources.iter().map(|(resource, devices)| {
                let devices = devices.as_deref().unwrap_or_default();
                let list = if devices.is_empty() {
                    "-".to_owned()
                } else {
                    devices.join(" ")
                };
                [resource.clone(), devices.len().to_string(), list]
            });
            text.push_str(&format!(
                "\n{}",
                table(["REGISTERED RESOURCE", "HEALTHY", "DEVICES"], rows)
            ));
        }
        text
    }
}

impl EntryShown {
    fn of(entry: &Entry) -> Self {
        let (response, response_error) =
            match response::decode(entry.alloc_resp.as_deref().unwrap_or_default()) {
                Ok(response) => (Some(Response::of(response)), None),
                Err(error @ (InvalidResponse::Malformed | InvalidResponse::InvalidUtf8 { .. })) => {
                    (None, Some(error.to_string()))
                }
            };
        Self {
            pod_uid: entry.pod_uid.clone(),
            container_name: entry.container.clone(),
            resource_name: entry.resource.clone(),
            devices: entry.devices.ids().into_iter().map(str::to_owned).collect(),
            numa_nodes: match &entry.devices {
                Devices::PerNuma(nodes) => nodes.clone(),
                Devices::Flat(_) => None,
            },
            alloc_resp: entry.alloc_resp.as_ref().map(|bytes| STANDARD.encode(bytes)),
            response,
            response_error,
        }
    }

    fn devices_lines(&self) -> Vec<String> {
        let Some(nodes) = &self.numa_nodes else {
            return vec![self.devices.join(" ")];
        };
        let lines = nodes.iter().map(|(node, ids)| {
            let ids = ids.as_deref().unwrap_or_default().join(" ");
            if *node < 0 {
                format!("no node: {ids}")
            } else {
                format!("node {node}: {ids}")
            }
        });
        lines.collect()
    }

    fn answer_lines(&self) -> Vec<String> {
        let Some(response) = &self.response else {
            let error = self.response_error.as_deref().unwrap_or_default();
            return vec![format!("undecodable: {error}")];
        };
        let mut lines: Vec<String> = Vec::new();
        lines.extend(
            response
                .envs
                .iter()
                .map(|(name, value)| format!("env {name}={value}")),
        );
        lines.extend(response.mounts.iter().map(|mount| {
            let mode = if mount.read_only { "ro" } else { "rw" };
            format!("mount {} -> {} ({mode})", mount.host_path, mount.container_path)
        }));
        lines.extend(response.devices.iter().map(|device| {
            let DeviceShown {
                container_path,
                host_path,
                permissions,
            } = device;
            // Runtimes use the same default.
            let container_path = Some(container_path).filter(|path| !path.is_empty());
            let container_path = container_path.unwrap_or(host_path);
            let permissions = Some(permissions.as_str()).filter(|each| !each.is_empty());
            let permissions = permissions.unwrap_or("rwm");
            format!("device {host_path} -> {container_path} ({permissions})")
        }));
        lines.extend(
            response
                .annotations
                .iter()
                .map(|(key, value)| format!("annotation {key}={value}")),
        );
        lines.extend(response.cdi_devices.iter().map(|name| format!("cdi {name}")));
        if lines.is_empty() {
            lines.push("-".into());
        }
        lines
    }
}

impl Response {
    fn of(response: ContainerAllocateResponse) -> Self {
        let mount = |mount: Mount| MountShown {
            container_path: mount.container_path,
            host_path: mount.host_path,
            read_only: mount.read_only,
        };
        let device = |device: DeviceSpec| DeviceShown {
            container_path: device.container_path,
            host_path: device.host_path,
            permissions: device.permissions,
        };
        Self {
            envs: response.envs,
            mounts: response.mounts.into_iter().map(mount).collect(),
            devices: response.devices.into_iter().map(device).collect(),
            annotations: response.annotations,
            cdi_devices: response
                .cdi_devices
                .into_iter()
                .map(|device| device.name)
                .collect(),
        }
    }
}
