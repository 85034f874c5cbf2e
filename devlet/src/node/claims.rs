//! Claims in the format of `-o json`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::dra_device;
use super::pods::PodId;
use super::time;
use crate::output::or_dash;
use crate::table::Tone;

/// A claim in the answer to `admit`, with the devices that its drivers prepared.
#[derive(Debug, Serialize)]
pub(super) struct AdmittedClaim {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) drivers: Vec<AdmittedDriver>,
}

#[derive(Debug, Serialize)]
pub(super) struct AdmittedDriver {
    pub(super) name: String,
    pub(super) devices: Vec<AdmittedDevice>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmittedDevice {
    pub(super) requests: Vec<String>,
    pub(super) pool: String,
    pub(super) device: String,
    #[serde(rename = "shareID")]
    pub(super) share_id: Option<String>,
    pub(super) cdi_devices: Vec<String>,
}

impl From<v1::Claim> for AdmittedClaim {
    fn from(claim: v1::Claim) -> Self {
        let device = |device: v1::ClaimDevice| AdmittedDevice {
            requests: device.requests,
            pool: device.pool,
            device: device.device,
            share_id: device.share_id,
            cdi_devices: device.cdi_devices,
        };
        let driver = |driver: v1::ClaimDriver| AdmittedDriver {
            name: driver.name,
            devices: driver.devices.into_iter().map(device).collect(),
        };
        // An abandoned claim does not belong to the pod.
        let is_used = |driver: &v1::ClaimDriver| driver.state() != v1::PreparationState::Abandoned;
        let drivers = claim.drivers.into_iter().filter(is_used);
        let id = claim.id.unwrap_or_default();
        Self {
            name: id.name,
            namespace: id.namespace,
            uid: id.uid,
            drivers: drivers.map(driver).collect(),
        }
    }
}

/// Returns the claims of a pod, each once.
pub(super) fn admitted(claims: Vec<v1::PodClaim>) -> Vec<AdmittedClaim> {
    let mut admitted: Vec<AdmittedClaim> = Vec::new();
    for claim in claims.into_iter().filter_map(|each| each.claim) {
        let claim = AdmittedClaim::from(claim);
        if !admitted.iter().any(|known| known.uid == claim.uid) {
            admitted.push(claim);
        }
    }
    admitted
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct ClaimId {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

impl From<v1::ClaimId> for ClaimId {
    fn from(id: v1::ClaimId) -> Self {
        Self {
            namespace: id.namespace,
            name: id.name,
            uid: id.uid,
        }
    }
}

impl ClaimId {
    pub(super) fn short(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Claim {
    #[serde(flatten)]
    pub(super) id: ClaimId,
    pub(super) phase: &'static str,
    pub(super) pods: Vec<PodId>,
    /// The last pod that held it, or was about to, if none does.
    pub(super) last_pod: Option<PodId>,
    pub(super) drivers: Vec<ClaimDriver>,
    pub(super) waits: Vec<Wait>,
    /// Time at which the first pod that uses it was admitted; `None` if unknown.
    pub(super) admitted_at: Option<String>,
    #[serde(skip)]
    pub(super) age_ms: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClaimDriver {
    pub(super) name: String,
    pub(super) state: &'static str,
    pub(super) allocated: Vec<AllocatedDevice>,
    pub(super) skip_node_operations: Vec<String>,
    pub(super) devices: Vec<ClaimDevice>,
    /// Allocated devices that the driver left out of its answer.
    pub(super) not_prepared: Vec<AllocatedDevice>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AllocatedDevice {
    pub(super) request: String,
    pub(super) pool: String,
    pub(super) device: String,
    #[serde(rename = "shareID")]
    pub(super) share_id: Option<String>,
    pub(super) admin_access: bool,
}

/// A device that a driver prepared.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClaimDevice {
    pub(super) requests: Vec<String>,
    pub(super) pool: String,
    pub(super) device: String,
    #[serde(rename = "shareID")]
    pub(super) share_id: Option<String>,
    pub(super) cdi_devices: Vec<String>,
    pub(super) health: &'static str,
    pub(super) health_message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Wait {
    pub(super) claim: ClaimId,
    pub(super) driver: String,
    pub(super) reason: &'static str,
    /// The operation that is waited for.
    pub(super) text: String,
    /// Time of the next call of the driver; `None` if no call has failed.
    pub(super) retry_at: Option<String>,
    /// Error of the last call.
    pub(super) failure: Option<String>,
}

impl From<v1::Claim> for Claim {
    fn from(claim: v1::Claim) -> Self {
        let phase = dra_device::phase(claim.phase());
        Self {
            id: claim.id.unwrap_or_default().into(),
            phase,
            pods: claim.pods.into_iter().map(PodId::from).collect(),
            last_pod: claim.last_pod.map(PodId::from),
            drivers: claim.drivers.into_iter().map(ClaimDriver::from).collect(),
            waits: claim.waits.into_iter().map(Wait::from).collect(),
            admitted_at: time::known_moment(claim.admitted_at_ms),
            age_ms: claim.age_ms,
        }
    }
}

impl From<v1::ClaimDriver> for ClaimDriver {
    fn from(driver: v1::ClaimDriver) -> Self {
        let state = match driver.state() {
            v1::PreparationState::Unspecified => "unknown",
            v1::PreparationState::Pending => "pending",
            v1::PreparationState::Prepared => "prepared",
            v1::PreparationState::Unprepared => "unprepared",
            v1::PreparationState::Abandoned => "abandoned",
        };
        let allocated = |device: v1::AllocatedDevice| AllocatedDevice {
            request: device.request,
            pool: device.pool,
            device: device.device,
            share_id: device.share_id,
            admin_access: device.admin_access,
        };
        Self {
            name: driver.name,
            state,
            allocated: driver.allocated.into_iter().map(allocated).collect(),
            skip_node_operations: driver.skip_node_operations,
            devices: driver.devices.into_iter().map(ClaimDevice::from).collect(),
            not_prepared: driver.not_prepared.into_iter().map(allocated).collect(),
        }
    }
}

impl From<v1::ClaimDevice> for ClaimDevice {
    fn from(device: v1::ClaimDevice) -> Self {
        let health = dra_device::health(device.health());
        Self {
            requests: device.requests,
            pool: device.pool,
            device: device.device,
            share_id: device.share_id,
            cdi_devices: device.cdi_devices,
            health,
            health_message: device.health_message,
        }
    }
}

impl From<v1::Wait> for Wait {
    fn from(wait: v1::Wait) -> Self {
        let reason = match wait.reason() {
            v1::WaitReason::Unspecified => "unknown",
            v1::WaitReason::NotWritten => "notWritten",
            v1::WaitReason::NoDriver => "noDriver",
            v1::WaitReason::Calling => "calling",
            v1::WaitReason::Due => "retrying",
        };
        Self {
            claim: wait.claim.unwrap_or_default().into(),
            driver: wait.driver,
            reason,
            text: wait.text,
            retry_at: (wait.retry_at_ms > 0).then(|| time::moment(wait.retry_at_ms)),
            failure: Some(wait.failure).filter(|failure| !failure.is_empty()),
        }
    }
}

impl Claim {
    /// Returns the age for people; `-` if unknown.
    pub(super) fn age_text(&self) -> String {
        match self.admitted_at {
            Some(_) => time::age(self.age_ms),
            None => "-".to_owned(),
        }
    }

    pub(super) fn tone(&self) -> Tone {
        match self.phase {
            "preparing" | "unpreparing" => Tone::Waiting,
            "abandoned" => Tone::Bad,
            _ => Tone::Plain,
        }
    }

    /// Returns the pods that hold it.
    pub(super) fn pods_text(&self) -> String {
        let pods: Vec<String> = self.pods.iter().map(PodId::short).collect();
        or_dash(pods.join(", "))
    }

    pub(super) fn drivers_text(&self) -> String {
        let drivers: Vec<&str> = self.drivers.iter().map(|driver| driver.name.as_str()).collect();
        or_dash(drivers.join(", "))
    }

    /// Returns the prepared devices; for a driver that has not answered, the allocated ones.
    pub(super) fn devices_text(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for driver in &self.drivers {
            match driver.devices.is_empty() && driver.state != "prepared" {
                true => names.extend(driver.allocated.iter().map(|each| each.device.as_str())),
                false => names.extend(driver.devices.iter().map(|each| each.device.as_str())),
            }
        }
        or_dash(names.join(","))
    }

    pub(super) fn waits_text(&self) -> String {
        waits_text(&self.waits)
    }
}

/// Returns the drivers that the claim waits for.
pub(super) fn waits_text(waits: &[Wait]) -> String {
    let waits: Vec<String> = waits
        .iter()
        .map(|wait| format!("{} ({})", wait.driver, wait.reason))
        .collect();
    or_dash(waits.join(", "))
}

impl ClaimDevice {
    pub(super) fn tone(&self) -> Tone {
        match self.health {
            "unhealthy" => Tone::Bad,
            _ => Tone::Plain,
        }
    }

    /// Returns the health and its reason.
    pub(super) fn health_text(&self) -> String {
        match self.health_message.as_str() {
            "" => self.health.to_owned(),
            message => format!("{}: {message}", self.health),
        }
    }
}

/// Returns the claims of a pod, each once: a pod may use one claim under several names.
pub(super) fn each_once(claims: &[PodClaim]) -> Vec<&PodClaim> {
    let mut once: Vec<&PodClaim> = Vec::new();
    for claim in claims {
        if !once.iter().any(|known| known.id.uid == claim.id.uid) {
            once.push(claim);
        }
    }
    once
}

/// A claim of a pod in `get` and `describe`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodClaim {
    /// The pod's name for the claim; empty for the claim of its extended resources.
    pub(super) pod_claim: String,
    #[serde(flatten)]
    pub(super) id: ClaimId,
    pub(super) phase: &'static str,
    pub(super) waits: Vec<Wait>,
    #[serde(skip)]
    pub(super) drivers: String,
}

impl From<v1::PodClaim> for PodClaim {
    fn from(claim: v1::PodClaim) -> Self {
        let pod_claim = claim.name;
        let claim = Claim::from(claim.claim.unwrap_or_default());
        Self {
            pod_claim,
            drivers: claim.drivers_text(),
            id: claim.id,
            phase: claim.phase,
            waits: claim.waits,
        }
    }
}

/// A device of a claim that a container uses.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct UsedDevice {
    /// The pod's name for the claim.
    pub(super) pod_claim: String,
    /// The request of the claim; `None` for the whole claim.
    pub(super) request: Option<String>,
    pub(super) claim: ClaimId,
    pub(super) driver: String,
    #[serde(flatten)]
    pub(super) device: ClaimDevice,
}

impl From<v1::UsedDevice> for UsedDevice {
    fn from(used: v1::UsedDevice) -> Self {
        Self {
            pod_claim: used.claim,
            request: Some(used.request).filter(|request| !request.is_empty()),
            claim: used.id.unwrap_or_default().into(),
            driver: used.driver,
            device: used.device.unwrap_or_default().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node::samples;

    #[test]
    fn a_claim_of_an_admission_has_exactly_the_documented_keys_and_comes_once() {
        let claim = |name: &str| v1::PodClaim {
            name: name.into(),
            claim: Some(samples::claim()),
        };
        let shown = serde_json::to_value(admitted(vec![claim("a"), claim("b")])).unwrap();
        let devices = json!([{
            "requests": ["big"], "pool": "node-1", "device": "gpu-0", "shareID": null,
            "cdiDevices": ["acme.com/gpu=gpu-0"],
        }]);
        let expected = json!([{
            "name": "gpu",
            "namespace": "default",
            "uid": "c-1",
            "drivers": [{"name": "gpu.acme.com", "devices": devices}, {"name": "nic.acme.com", "devices": []}],
        }]);
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_claim_lists_its_waits_in_json_and_text() {
        let claim = Claim::from(samples::claim());
        assert_eq!(claim.waits_text(), "nic.acme.com (noDriver)");
        let shown = serde_json::to_value(&claim).unwrap();
        assert_eq!(shown["phase"], "preparing");
        assert_eq!(shown["drivers"][0]["devices"][0]["health"], "unhealthy");
        assert_eq!(shown["waits"][0]["reason"], "noDriver");
        assert_eq!(shown["waits"][0]["failure"], "it broke");
    }
}
