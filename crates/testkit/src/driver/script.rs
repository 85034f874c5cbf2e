//! What a DRA driver is like.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use devlet_kubelet_api::plugin_registration::DRA_PLUGIN;
use devlet_kubelet_api::{dra, dra_health};
use serde::{Deserialize, Serialize};

use crate::script::{Fault, Faults};

/// What a DRA driver is like.
///
/// It knows no API server: what it prepares for a claim is what the script says. `{name}` and `{uid}` in a
/// [`PreparedDevice`] stand for those of the claim, `{driver}` for the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DriverScript {
    /// The root directory of the node: the kubelet's layout.
    pub root: PathBuf,
    /// What it calls itself.
    pub driver: String,
    /// The kind of plugin that it says it is.
    pub kind: String,
    /// Tells several plugins of one driver apart: part of the names of their sockets.
    pub instance: String,
    /// What it says it serves; and what it serves, unless `serves` says otherwise.
    pub services: Vec<String>,
    /// What it serves, by the names above. Anything that is no name of a service means the one of 2024, as it does
    /// to a kubelet.
    pub serves: Option<Vec<String>>,
    pub endpoint: DriverEndpoint,
    /// Not before the command `register`.
    pub later: bool,
    /// What it prepares for any claim.
    pub devices: Vec<PreparedDevice>,
    /// What it prepares for these claims instead, by name.
    pub claims: BTreeMap<String, Vec<PreparedDevice>>,
    /// What its streams of health say at first.
    pub health: Vec<DeviceHealth>,
    /// Faults by the name of the call, such as `NodePrepareResources`.
    pub faults: Faults,
}

/// Where a driver can be called.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverEndpoint {
    /// At a socket of its own, below `plugins`.
    #[default]
    Own,
    /// At the socket in `plugins_registry`; it names none.
    Registration,
    /// It names this one, and does not serve it.
    Named(String),
}

/// A device that is made usable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// For which requests of the claim; for all if there are none.
    #[serde(default)]
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    #[serde(default)]
    pub cdi: Vec<String>,
    /// Which share of it; only the newest service can say so.
    #[serde(default)]
    pub share: Option<String>,
}

impl PreparedDevice {
    /// A device for all requests, with one CDI name.
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

/// How a device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceHealth {
    pub pool: String,
    pub device: String,
    /// As a number of the protocol: 0 unknown, 1 healthy, 2 unhealthy.
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
    /// A driver of today that registers at once. For each claim it prepares the device of the claim's name, of the
    /// pool `pool`; it has no health to tell.
    pub fn new(root: impl Into<PathBuf>, driver: &str) -> Self {
        Self {
            root: root.into(),
            driver: driver.into(),
            ..Self::default()
        }
    }

    /// As `Self`, with other services.
    #[must_use]
    pub fn with_services(mut self, services: &[&str]) -> Self {
        self.services = services.iter().map(ToString::to_string).collect();
        self
    }

    /// As `Self`, with both services of health, and what they say.
    #[must_use]
    pub fn with_health(mut self, health: Vec<DeviceHealth>) -> Self {
        let services = [dra_health::v1::SERVICE, dra_health::v1alpha1::SERVICE];
        self.services.extend(services.map(str::to_owned));
        self.health = health;
        self
    }

    /// As `Self`, with a fault.
    #[must_use]
    pub fn with_fault(mut self, call: &str, fault: Fault) -> Self {
        self.faults.insert(call.into(), fault);
        self
    }

    /// The socket in `plugins_registry`.
    pub fn registration_socket(&self) -> PathBuf {
        let name = format!("{}{}-reg.sock", self.driver, self.suffix());
        self.root.join("plugins_registry").join(name)
    }

    /// The socket at which it can be called.
    pub fn endpoint_socket(&self) -> PathBuf {
        match &self.endpoint {
            DriverEndpoint::Own => self.directory().join(format!("dra{}.sock", self.suffix())),
            DriverEndpoint::Registration => self.registration_socket(),
            DriverEndpoint::Named(path) => path.into(),
        }
    }

    /// What it says of its endpoint.
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
