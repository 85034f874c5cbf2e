//! Drivers and claims, in the format of `-o json`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::dra_device;
use super::shown::{LastPlugin, PodId, last_plugin, or_dash};
use super::time;
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
    /// For people.
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

    /// Returns the pods that hold it, or the last one that did.
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

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Driver {
    pub(super) name: String,
    pub(super) state: &'static str,
    pub(super) plugins: Vec<DriverPlugin>,
    /// Time at which the last of them disconnected; `None` while one is connected.
    pub(super) unusable_since: Option<String>,
    #[serde(skip)]
    unusable_for_ms: u64,
    pub(super) last_plugin: Option<LastPlugin>,
    pub(super) claims: u64,
    pub(super) waits: Vec<Wait>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DriverPlugin {
    pub(super) endpoint: String,
    /// The user that it runs as.
    pub(super) uid: u32,
    /// The API version in use.
    pub(super) service: String,
    pub(super) service_reason: String,
    pub(super) health_service: Option<String>,
    pub(super) registered_at: String,
    #[serde(skip)]
    pub(super) age_ms: u64,
    pub(super) connected: bool,
    pub(super) serving: bool,
    pub(super) connection: String,
}

/// A refused plugin of a driver.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RefusedDriver {
    pub(super) name: String,
    pub(super) socket: String,
    pub(super) reason: String,
    pub(super) hint: Option<String>,
    pub(super) refused_at: String,
    #[serde(skip)]
    pub(super) age_ms: u64,
    pub(super) attempts: u64,
}

impl From<v1::RefusedDriver> for RefusedDriver {
    fn from(refused: v1::RefusedDriver) -> Self {
        Self {
            name: refused.name,
            socket: refused.socket,
            reason: refused.reason,
            hint: Some(refused.hint).filter(|hint| !hint.is_empty()),
            refused_at: time::moment(refused.refused_at_ms),
            age_ms: refused.age_ms,
            attempts: refused.attempts,
        }
    }
}

impl RefusedDriver {
    /// Returns the reason and the hint.
    pub(super) fn reason_text(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}: {hint}", self.reason),
            None => self.reason.clone(),
        }
    }
}

impl From<v1::Driver> for Driver {
    fn from(driver: v1::Driver) -> Self {
        let plugin = |plugin: v1::DriverPlugin| DriverPlugin {
            endpoint: plugin.endpoint,
            uid: plugin.uid,
            service: plugin.service,
            service_reason: plugin.service_reason,
            health_service: Some(plugin.health_service).filter(|service| !service.is_empty()),
            registered_at: time::moment(plugin.registered_at_ms),
            age_ms: plugin.age_ms,
            connected: plugin.connected,
            serving: plugin.serving,
            connection: plugin.connection,
        };
        let is_serving = driver.plugins.iter().any(|plugin| plugin.serving);
        let state = match (is_serving, driver.unusable_since_ms) {
            (true, _) => "serving",
            (false, Some(_)) if driver.plugins.is_empty() => "gone",
            (false, Some(_)) => "notConnected",
            (false, None) => "neverRegistered",
        };
        Self {
            name: driver.name,
            state,
            plugins: driver.plugins.into_iter().map(plugin).collect(),
            unusable_since: driver.unusable_since_ms.map(time::moment),
            unusable_for_ms: driver.unusable_for_ms,
            last_plugin: driver.last_plugin.map(last_plugin),
            claims: driver.claims,
            waits: driver.waits.into_iter().map(Wait::from).collect(),
        }
    }
}

impl Driver {
    fn serving(&self) -> Option<&DriverPlugin> {
        self.plugins.iter().find(|plugin| plugin.serving)
    }

    pub(super) fn tone(&self) -> Tone {
        match self.state {
            "serving" => Tone::Plain,
            _ => Tone::Bad,
        }
    }

    /// Returns the state and its duration.
    pub(super) fn state_text(&self) -> String {
        match self.unusable_since {
            Some(_) if self.state != "serving" => {
                format!("{} for {}", self.state, time::age(self.unusable_for_ms))
            }
            _ => self.state.to_owned(),
        }
    }

    /// Returns the age of the registration in use.
    pub(super) fn age_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        plugin.map_or_else(|| "-".to_owned(), |plugin| time::age(plugin.age_ms))
    }

    /// Returns the API version in use.
    pub(super) fn service_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        or_dash(plugin.map_or_else(String::new, |plugin| plugin.service.clone()))
    }

    pub(super) fn health_text(&self) -> String {
        let plugin = self.serving().or(self.plugins.last());
        or_dash(
            plugin
                .and_then(|plugin| plugin.health_service.clone())
                .unwrap_or_default(),
        )
    }
}

impl DriverPlugin {
    /// For people.
    pub(super) fn state_text(&self) -> &'static str {
        match (self.serving, self.connected) {
            (true, _) => "serving",
            (false, true) => "standby",
            (false, false) => "notConnected",
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
pub(super) mod samples {
    use super::*;

    pub(in crate::node) fn wait() -> v1::Wait {
        v1::Wait {
            claim: Some(id()),
            driver: "nic.acme.com".into(),
            text: "ResourceClaim default/gpu: DRA driver nic.acme.com is not connected".into(),
            reason: v1::WaitReason::NoDriver.into(),
            retry_at_ms: 0,
            failure: "it broke".into(),
        }
    }

    fn id() -> v1::ClaimId {
        v1::ClaimId {
            namespace: "default".into(),
            name: "gpu".into(),
            uid: "c-1".into(),
        }
    }

    pub(in crate::node) fn device() -> v1::ClaimDevice {
        v1::ClaimDevice {
            requests: vec!["big".into()],
            pool: "node-1".into(),
            device: "gpu-0".into(),
            share_id: None,
            cdi_devices: vec!["acme.com/gpu=gpu-0".into()],
            health: v1::DeviceHealth::Unhealthy.into(),
            health_message: "too hot".into(),
        }
    }

    pub(in crate::node) fn used_device() -> v1::UsedDevice {
        v1::UsedDevice {
            claim: "mine".into(),
            request: "big".into(),
            id: Some(id()),
            driver: "gpu.acme.com".into(),
            device: Some(device()),
        }
    }

    /// Returns a claim with two drivers; one has not completed.
    pub(in crate::node) fn claim() -> v1::Claim {
        let prepared = v1::ClaimDriver {
            name: "gpu.acme.com".into(),
            state: v1::PreparationState::Prepared.into(),
            allocated: vec![v1::AllocatedDevice {
                request: "big/first".into(),
                pool: "node-1".into(),
                device: "gpu-0".into(),
                share_id: None,
                admin_access: true,
            }],
            skip_node_operations: vec!["NodeUnprepareResources".into()],
            not_prepared: Vec::new(),
            devices: vec![device()],
        };
        let pending = v1::ClaimDriver {
            name: "nic.acme.com".into(),
            state: v1::PreparationState::Pending.into(),
            ..Default::default()
        };
        v1::Claim {
            admitted_at_ms: 1_700_000_000_000,
            age_ms: 7_000,
            id: Some(id()),
            phase: v1::ClaimPhase::Preparing.into(),
            pods: vec![v1::PodId {
                uid: "u-1".into(),
                namespace: "default".into(),
                name: "job1".into(),
            }],
            last_pod: None,
            drivers: vec![prepared, pending],
            waits: vec![wait()],
        }
    }

    pub(in crate::node) fn refused() -> v1::RefusedDriver {
        v1::RefusedDriver {
            name: "gpu.acme.com".into(),
            socket: "/registry/gpu.sock".into(),
            reason: "user 7 may not serve gpu.acme.com".into(),
            hint: "ask".into(),
            refused_at_ms: 0,
            age_ms: 0,
            attempts: 3,
        }
    }

    pub(in crate::node) fn driver() -> v1::Driver {
        let plugin = |endpoint: &str, connected, serving| v1::DriverPlugin {
            endpoint: endpoint.into(),
            uid: 0,
            service: "v1.DRAPlugin".into(),
            service_reason: "the newest of v1beta1.DRAPlugin, v1.DRAPlugin".into(),
            health_service: "v1.DRAResourceHealth".into(),
            registered_at_ms: 1,
            age_ms: 7_000,
            connected,
            serving,
            connection: "7".into(),
        };
        v1::Driver {
            name: "gpu.acme.com".into(),
            plugins: vec![
                plugin("/run/old.sock", false, false),
                plugin("/run/new.sock", true, true),
            ],
            claims: 3,
            waits: vec![wait()],
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
    fn the_state_of_a_driver_follows_its_plugins() {
        let serving = Driver::from(samples::driver());
        assert_eq!(serving.state_text(), "serving");
        assert_eq!(serving.service_text(), "v1.DRAPlugin");
        let mut left = samples::driver();
        left.plugins.clear();
        left.unusable_since_ms = Some(u64::MAX);
        assert_eq!(Driver::from(left.clone()).state_text(), "gone for 0s");
        left.unusable_since_ms = None;
        assert_eq!(Driver::from(left).state_text(), "neverRegistered");
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
