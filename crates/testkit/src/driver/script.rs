//! Description of a DRA driver's behaviour.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use devlet_kubelet_api::plugin_registration::DRA_PLUGIN;
use devlet_kubelet_api::{dra, dra_health};
use serde::{Deserialize, Serialize};

use crate::script::{Fault, Faults};

/// The behaviour of a DRA driver.
///
/// It does not use an API server: the script sets the devices that it prepares. `{name}` and `{uid}` in a
/// [`PreparedDevice`] are replaced by those of the claim, `{driver}` by the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DriverScript {
    /// The root directory of the node, with the kubelet's layout.
    pub root: PathBuf,
    /// The driver name that it reports.
    pub driver: String,
    /// The plugin type that it reports.
    pub kind: String,
    /// Distinguishes several plugins of one driver: part of the names of their sockets.
    pub instance: String,
    /// The services that it reports. It serves these, unless `serves` is set.
    pub services: Vec<String>,
    /// The services that it serves, by the names above. Any other text means the service of 2024, as it does for a
    /// kubelet.
    pub serves: Option<Vec<String>>,
    pub endpoint: DriverEndpoint,
    /// `true` to register only after the command `register`.
    pub later: bool,
    /// The devices that it prepares for any claim.
    pub devices: Vec<PreparedDevice>,
    /// The devices that it prepares for these claims instead, by name.
    pub claims: BTreeMap<String, Vec<PreparedDevice>>,
    /// The first health report.
    pub health: Vec<DeviceHealth>,
    /// Faults by the name of the call, such as `NodePrepareResources`.
    pub faults: Faults,
}

/// The endpoint of a driver.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverEndpoint {
    /// Its own socket below `plugins`.
    #[default]
    Own,
    /// The socket in `plugins_registry`; the reported endpoint is empty.
    Registration,
    /// This endpoint is reported, but not served.
    Named(String),
}

/// A prepared device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// Requests of the claim that the device satisfies; empty for all.
    #[serde(default)]
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    #[serde(default)]
    pub cdi: Vec<String>,
    /// ID of the share; only the newest service supports it.
    #[serde(default)]
    pub share: Option<String>,
}

impl PreparedDevice {
    /// Creates a device for all requests, with one CDI name.
    pub fn new(pool: &str, device: &str, cdi: &str) -> Self {
        Self {
            requests: Vec::new(),
            pool: pool.into(),
            device: device.into(),
            cdi: vec![cdi.into()],
            share: None,
        }
    }
}

/// The health of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceHealth {
    pub pool: String,
    pub device: String,
    /// The value of the protocol: 0 unknown, 1 healthy, 2 unhealthy.
    pub health: i32,
    #[serde(default)]
    pub timeout_seconds: i64,
    #[serde(default)]
    pub message: String,
}

impl DeviceHealth {
    pub fn healthy(pool: &str, device: &str) -> Self {
        Self {
            pool: pool.into(),
            device: device.into(),
            health: 1,
            timeout_seconds: 0,
            message: String::new(),
        }
    }

    pub fn unhealthy(pool: &str, device: &str, message: &str) -> Self {
        Self {
            health: 2,
            message: message.into(),
            ..Self::healthy(pool, device)
        }
    }
}

impl Default for DriverScript {
    fn default() -> Self {
        Self {
            root: PathBuf::new(),
            driver: String::new(),
            kind: DRA_PLUGIN.into(),
            instance: String::new(),
            services: [dra::v1::SERVICE, dra::v1beta1::SERVICE]
                .map(str::to_owned)
                .into(),
            serves: None,
            endpoint: DriverEndpoint::default(),
            later: false,
            devices: vec![PreparedDevice::new("pool", "{name}", "{driver}/device={name}")],
            claims: BTreeMap::new(),
            health: Vec::new(),
            faults: Faults::new(),
        }
    }
}

impl DriverScript {
    /// Creates a driver of the current API version that registers at once. For each claim it prepares the device with
    /// the claim's name in the pool `pool`. It does not report health.
    pub fn new(root: impl Into<PathBuf>, driver: &str) -> Self {
        Self {
            root: root.into(),
            driver: driver.into(),
            ..Self::default()
        }
    }

    /// Sets the services.
    #[must_use]
    pub fn with_services(mut self, services: &[&str]) -> Self {
        self.services = services.iter().map(ToString::to_string).collect();
        self
    }

    /// Adds both health services, and the first health report.
    #[must_use]
    pub fn with_health(mut self, health: Vec<DeviceHealth>) -> Self {
        let services = [dra_health::v1::SERVICE, dra_health::v1alpha1::SERVICE];
        self.services.extend(services.map(str::to_owned));
        self.health = health;
        self
    }

    /// Adds a fault.
    #[must_use]
    pub fn with_fault(mut self, call: &str, fault: Fault) -> Self {
        self.faults.insert(call.into(), fault);
        self
    }

    /// Returns the path of the socket in `plugins_registry`.
    pub fn registration_socket(&self) -> PathBuf {
        let name = format!("{}{}-reg.sock", self.driver, self.suffix());
        self.root.join("plugins_registry").join(name)
    }

    /// Returns the path of the socket that serves the node service.
    pub fn endpoint_socket(&self) -> PathBuf {
        match &self.endpoint {
            DriverEndpoint::Own => self.directory().join(format!("dra{}.sock", self.suffix())),
            DriverEndpoint::Registration => self.registration_socket(),
            DriverEndpoint::Named(path) => path.into(),
        }
    }

    /// Returns the endpoint that it reports.
    pub(crate) fn endpoint(&self) -> String {
        match &self.endpoint {
            DriverEndpoint::Own => self.endpoint_socket().display().to_string(),
            DriverEndpoint::Registration => String::new(),
            DriverEndpoint::Named(path) => path.clone(),
        }
    }

    pub(crate) fn directory(&self) -> PathBuf {
        self.root.join("plugins").join(Path::new(&self.driver))
    }

    pub(crate) fn serves(&self, service: &str) -> bool {
        let known = [
            dra::v1::SERVICE,
            dra::v1beta1::SERVICE,
            dra_health::v1::SERVICE,
            dra_health::v1alpha1::SERVICE,
        ];
        let services = self.serves.as_ref().unwrap_or(&self.services);
        match service {
            dra::v1alpha3::SERVICE => services.iter().any(|each| !known.contains(&each.as_str())),
            _ => services.iter().any(|each| each == service),
        }
    }

    fn suffix(&self) -> String {
        match self.instance.as_str() {
            "" => String::new(),
            instance => format!("-{instance}"),
        }
    }
}
