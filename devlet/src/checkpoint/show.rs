//! `devlet checkpoint show`

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};
use devlet_kubelet_files::device_plugin::{self, Devices};
use devlet_kubelet_files::dra::{self, envelope, flat, health};
use devlet_kubelet_files::{Checksum, Document, File, read};
use serde::{Serialize, Serializer};

use super::RoleArg;
use crate::files::name_of;
use crate::output::{self, Output, count, table, table_of_lines};
use crate::{Outcome, files};

pub(super) fn run(path: &Path, role: &RoleArg, output: Output) -> anyhow::Result<Outcome> {
    let bytes = files::read(path)?;
    let file = match read(&bytes, role.of(path)) {
        Ok(file) => file,
        Err(error) => {
            output::warn(&format!("error: {}: {error}", name_of(path)));
            output::warn("hint: devlet checkpoint repair shows the parts that can be saved");
            return Ok(Outcome::Bad);
        }
    };
    let shown = Shown::of(path, &file);
    output::print(output, &shown, |shown| shown.table(&file))?;
    Ok(Outcome::Fine)
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Shown {
    file: String,
    format: &'static str,
    checksum: ChecksumShown,
    #[serde(flatten)]
    content: Content,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ChecksumShown {
    stored: Option<u64>,
    computed: Option<u64>,
    valid: Option<bool>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Content {
    Devices(Allocations),
    Claims(Claims),
    Health(HealthShown),
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Allocations {
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

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Claims {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// Null if it is null in the file: the checksum distinguishes null from an empty list.
    claims: Option<Vec<ClaimShown>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClaimShown {
    namespace: String,
    name: String,
    uid: String,
    pods: Vec<String>,
    /// By driver name. For a flat file, as after a conversion.
    drivers: BTreeMap<String, DriverShown>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flat: Option<FlatShown>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DriverShown {
    /// Null until the driver has answered.
    devices: Option<Vec<DraDeviceShown>>,
    skip_node_operations: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DraDeviceShown {
    pool: String,
    device: String,
    #[serde(rename = "shareID")]
    share_id: Option<String>,
    requests: Vec<String>,
    cdi_devices: Vec<String>,
}

/// Fields that only the formats of 1.27 to 1.30 have.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FlatShown {
    driver_name: String,
    class_name: String,
    resource_handles: Option<Vec<HandleShown>>,
    cdi_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HandleShown {
    driver_name: String,
    data: String,
    structured_data: Option<StructuredShown>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct StructuredShown {
    vendor_class_parameters: Option<serde_json::Value>,
    vendor_claim_parameters: Option<serde_json::Value>,
    node_name: String,
    results: Option<Vec<ResultShown>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ResultShown {
    vendor_request_parameters: Option<serde_json::Value>,
    named_resource: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct HealthShown {
    drivers: BTreeMap<String, BTreeMap<String, DeviceHealthShown>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceHealthShown {
    pool: String,
    device: String,
    health: String,
    last_updated: String,
    timeout_seconds: f64,
    message: String,
}

impl Shown {
    fn of(path: &Path, file: &File<Document>) -> Self {
        let mut warnings = file.warnings.lines();
        if let Document::DraEnvelope(checkpoint) = file.unverified()
            && !checkpoint.has_claim_list
        {
            warnings.push("there is no list of claims: a kubelet reads this as an empty state".into());
        }
        if let Document::DraHealth(state) = file.unverified()
            && state.drivers.as_ref().is_some_and(BTreeMap::is_empty)
        {
            warnings.push("an empty object is read as a dra_health_state: the kubelet writes only that file in this form".into());
        }
        let checksum = ChecksumShown {
            stored: file.checksum.map(|checksum| checksum.stored),
            computed: file.checksum.map(|checksum| checksum.computed),
            valid: file.checksum.map(Checksum::is_valid),
        };
        let (file_name, format) = (name_of(path), file.format.name());
        Self {
            file: file_name,
            format,
            checksum,
            content: Content::of(file.unverified()),
            warnings,
        }
    }

    fn table(&self, file: &File<Document>) -> String {
        let checksum = match file.checksum {
            None => "none in this format".to_owned(),
            Some(checksum) if checksum.is_valid() => format!("{}, right", checksum.stored),
            Some(Checksum { stored, computed }) => {
                format!("{stored}, WRONG: the content has {computed}; a kubelet refuses this file")
            }
        };
        let mut text = format!(
            "File:      {}\nFormat:    {} ({})\nChecksum:  {checksum}\nContent:   {}\n",
            output::line(&self.file),
            file.format,
            file.format.description(),
            self.content.summary(),
        );
        for warning in &self.warnings {
            text.push_str(&format!("Warning:   {}\n", output::line(warning)));
        }
        text.push_str(&self.content.table());
        text
    }
}

impl Content {
    pub(super) fn of(document: &Document) -> Self {
        match document {
            Document::DevicePlugin(checkpoint) => Self::Devices(Allocations::of(checkpoint)),
            Document::DraFlat(checkpoint) => Self::Claims(Claims::of_flat(checkpoint)),
            Document::DraEnvelope(checkpoint) => Self::Claims(Claims::of(checkpoint)),
            Document::DraHealth(state) => Self::Health(HealthShown::of(state)),
        }
    }

    pub(super) fn summary(&self) -> String {
        match self {
            Self::Devices(Allocations {
                entries,
                registered_devices,
            }) => {
                let entries = entries.as_deref().unwrap_or_default();
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
                let known = registered_devices.as_ref().map_or(0, BTreeMap::len);
                let (pods, devices) = (count(pods.len(), "pod"), count(devices.len(), "device"));
                format!("{pods} with {devices}; {} registered", count(known, "resource"))
            }
            Self::Claims(Claims { claims, .. }) => {
                let claims = claims.as_deref().unwrap_or_default();
                let pods: BTreeSet<&String> = claims.iter().flat_map(|claim| &claim.pods).collect();
                format!("{} of {}", count(claims.len(), "claim"), count(pods.len(), "pod"))
            }
            Self::Health(HealthShown { drivers }) => {
                let devices = drivers.values().map(BTreeMap::len).sum();
                format!(
                    "{} of {}",
                    count(devices, "device"),
                    count(drivers.len(), "driver")
                )
            }
        }
    }

    pub(super) fn table(&self) -> String {
        match self {
            Self::Devices(allocations) => allocations.table(),
            Self::Claims(claims) => claims.table(),
            Self::Health(health) => health.table(),
        }
    }
}

impl Allocations {
    fn of(checkpoint: &device_plugin::Checkpoint) -> Self {
        Self {
            entries: checkpoint
                .entries
                .as_ref()
                .map(|entries| entries.iter().map(EntryShown::of).collect()),
            registered_devices: checkpoint.registered.clone(),
        }
    }

    fn table(&self) -> String {
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
    fn of(entry: &device_plugin::Entry) -> Self {
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
    fn of(response: devlet_kubelet_api::device_plugin::v1beta1::ContainerAllocateResponse) -> Self {
        let mount = |mount: devlet_kubelet_api::device_plugin::v1beta1::Mount| MountShown {
            container_path: mount.container_path,
            host_path: mount.host_path,
            read_only: mount.read_only,
        };
        let device = |device: devlet_kubelet_api::device_plugin::v1beta1::DeviceSpec| DeviceShown {
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

impl Claims {
    fn of(checkpoint: &envelope::Checkpoint) -> Self {
        Self {
            kind: Some(checkpoint.kind.clone()),
            api_version: Some(checkpoint.api_version.clone()),
            version: None,
            claims: checkpoint
                .claims
                .as_ref()
                .map(|claims| claims.iter().cloned().map(ClaimShown::of).collect()),
        }
    }

    fn of_flat(checkpoint: &flat::Checkpoint) -> Self {
        let claim = |claim: &flat::FlatClaim| {
            let flat = Some(FlatShown::of(claim));
            ClaimShown {
                flat,
                ..ClaimShown::of(claim.clone().into_claim())
            }
        };
        Self {
            kind: None,
            api_version: None,
            version: Some(checkpoint.version.clone()),
            claims: checkpoint
                .claims
                .as_ref()
                .map(|claims| claims.iter().map(claim).collect()),
        }
    }

    fn table(&self) -> String {
        let Some(claims) = self.claims.as_ref().filter(|claims| !claims.is_empty()) else {
            return String::new();
        };
        let header = ["CLAIM", "UID", "PODS", "DRIVER", "DEVICES"];
        let rows = claims.iter().flat_map(ClaimShown::rows);
        format!("\n{}", table_of_lines(header, rows))
    }
}

impl ClaimShown {
    fn of(claim: dra::Claim) -> Self {
        let drivers = claim.drivers.into_iter().flatten();
        Self {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
            pods: claim.pods.into_iter().flatten().collect(),
            drivers: drivers
                .map(|(name, driver)| (name, DriverShown::of(driver)))
                .collect(),
            flat: None,
        }
    }

    /// Returns a row for each driver. Only the first one names the claim.
    fn rows(&self) -> Vec<[Vec<String>; 5]> {
        let mut rows: Vec<[Vec<String>; 5]> = self
            .drivers
            .iter()
            .map(|(name, driver)| [vec![], vec![], vec![], vec![name.clone()], driver.lines()])
            .collect();
        if rows.is_empty() {
            rows.push([const { Vec::new() }; 5]);
        }
        let pods = if self.pods.is_empty() {
            vec!["-".to_owned()]
        } else {
            self.pods.clone()
        };
        rows[0][..3].clone_from_slice(&[
            vec![format!("{}/{}", self.namespace, self.name)],
            vec![self.uid.clone()],
            pods,
        ]);
        rows
    }
}

impl DriverShown {
    fn of(driver: dra::Driver) -> Self {
        let device = |device: dra::Device| DraDeviceShown {
            pool: device.pool,
            device: device.name,
            share_id: device.share_id,
            requests: device.requests.unwrap_or_default(),
            cdi_devices: device.cdi_devices.unwrap_or_default(),
        };
        Self {
            devices: driver
                .devices
                .map(|devices| devices.into_iter().map(device).collect()),
            skip_node_operations: driver.skip_node_operations.unwrap_or_default(),
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        match &self.devices {
            None => lines.push("not answered yet".into()),
            Some(devices) if devices.is_empty() => lines.push("-".into()),
            Some(devices) => lines.extend(devices.iter().map(DraDeviceShown::text)),
        }
        if !self.skip_node_operations.is_empty() {
            lines.push(format!("skips {}", self.skip_node_operations.join(" ")));
        }
        lines
    }
}

impl DraDeviceShown {
    fn text(&self) -> String {
        let mut text = if self.pool.is_empty() && self.device.is_empty() {
            "(device not recorded)".to_owned()
        } else {
            format!("{}/{}", self.pool, self.device)
        };
        if let Some(share) = &self.share_id {
            text.push_str(&format!(" share {share}"));
        }
        if !self.requests.is_empty() {
            text.push_str(&format!(" for {}", self.requests.join(" ")));
        }
        if !self.cdi_devices.is_empty() {
            text.push_str(&format!(": {}", self.cdi_devices.join(" ")));
        }
        text
    }
}

impl FlatShown {
    fn of(claim: &flat::FlatClaim) -> Self {
        // The stored value is JSON, but may not be valid UTF-8.
        let json = |raw: &Vec<u8>| {
            serde_json::from_slice(raw)
                .unwrap_or_else(|_| serde_json::Value::from(String::from_utf8_lossy(raw).into_owned()))
        };
        let result = |result: &flat::AllocationResult| ResultShown {
            vendor_request_parameters: result.request_parameters.as_ref().map(json),
            named_resource: result.named_resource.clone(),
        };
        let structured = |structured: &flat::StructuredHandle| StructuredShown {
            vendor_class_parameters: structured.class_parameters.as_ref().map(json),
            vendor_claim_parameters: structured.claim_parameters.as_ref().map(json),
            node_name: structured.node.clone(),
            results: structured
                .results
                .as_ref()
                .map(|results| results.iter().map(result).collect()),
        };
        let handle = |handle: &flat::ResourceHandle| HandleShown {
            driver_name: handle.driver.clone(),
            data: handle.data.clone(),
            structured_data: handle.structured.as_ref().map(structured),
        };
        Self {
            driver_name: claim.driver.clone(),
            class_name: claim.class.clone(),
            resource_handles: claim
                .handles
                .as_ref()
                .map(|handles| handles.iter().map(handle).collect()),
            cdi_devices: claim.cdi_devices.clone(),
        }
    }
}

impl HealthShown {
    fn of(state: &health::HealthState) -> Self {
        let device = |device: &health::DeviceHealth| DeviceHealthShown {
            pool: device.pool.clone(),
            device: device.device.clone(),
            health: device.health.clone(),
            last_updated: device.last_updated.clone(),
            timeout_seconds: device.timeout_ns as f64 / 1e9,
            message: device.message.clone(),
        };
        let devices = |driver: &health::DriverHealth| {
            let devices = driver.devices.iter().flatten();
            devices
                .map(|(key, health)| (key.clone(), device(health)))
                .collect()
        };
        let drivers = state.drivers.iter().flatten();
        Self {
            drivers: drivers
                .map(|(name, driver)| (name.clone(), devices(driver)))
                .collect(),
        }
    }

    fn table(&self) -> String {
        let rows: Vec<[String; 6]> = self
            .drivers
            .iter()
            .flat_map(|(driver, devices)| {
                devices.iter().map(move |(key, device)| {
                    let timeout = format!("{} s", device.timeout_seconds);
                    let DeviceHealthShown {
                        health,
                        last_updated,
                        message,
                        ..
                    } = device;
                    [driver, key, health, last_updated, &timeout, message].map(Clone::clone)
                })
            })
            .collect();
        if rows.is_empty() {
            return String::new();
        }
        let header = ["DRIVER", "DEVICE", "HEALTH", "LAST UPDATED", "TIMEOUT", "MESSAGE"];
        format!("\n{}", table(header, rows))
    }
}
