//! The content of a DRA checkpoint: claims and their drivers.

use std::collections::{BTreeMap, BTreeSet};

use devlet_kubelet_files::dra::{self, envelope, flat};
use serde::Serialize;

use crate::output::{count, table_of_lines};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::checkpoint) struct Claims {
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

impl Claims {
    pub(super) fn of(checkpoint: &envelope::Checkpoint) -> Self {
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

    pub(super) fn of_flat(checkpoint: &flat::Checkpoint) -> Self {
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

    pub(super) fn summary(&self) -> String {
        let claims = self.claims.as_deref().unwrap_or_default();
        let pods: BTreeSet<&String> = claims.iter().flat_map(|claim| &claim.pods).collect();
        format!("{} of {}", count(claims.len(), "claim"), count(pods.len(), "pod"))
    }

    pub(super) fn table(&self) -> String {
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
