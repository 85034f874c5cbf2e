//! Description of a plugin's behaviour.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The behaviour of a plugin.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Script {
    /// The root directory of the node, with the kubelet's layout.
    pub root: PathBuf,
    /// The resource of the plugin.
    pub resource: String,
    /// The name of the plugin's socket; derived from the resource if empty.
    pub socket: String,
    pub api: Api,
    pub door: Door,
    pub devices: Vec<Device>,
    /// Number of additional devices: `many-0`, `many-1`, and so on.
    pub many: usize,
    pub options: Options,
    pub answer: Answer,
    pub faults: Faults,
}

/// The version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Api {
    #[default]
    V1beta1,
    /// Version of 2017: the plugin serves only after its registration was answered.
    V1alpha2,
}

/// How the plugin registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Door {
    /// By calling `Register` on `kubelet.sock`.
    #[default]
    Kubelet,
    /// By a socket in `plugins_registry` that also serves the devices.
    Registry,
    /// By a socket in `plugins_registry` that names another socket of the plugin.
    RegistryWithEndpoint,
    /// After the command `register`, by `kubelet.sock`.
    Later,
    /// By calling `Register` with a socket of another process, or one that does not exist.
    Claim,
}

/// A device of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub id: String,
    /// NUMA nodes; no topology if empty.
    #[serde(default)]
    pub numa: Vec<i64>,
    #[serde(default = "healthy")]
    pub health: String,
}

fn healthy() -> String {
    "Healthy".into()
}

impl Device {
    /// Creates a healthy device without topology.
    pub fn new(id: &str) -> Self {
        Self {
            id: id.into(),
            numa: Vec::new(),
            health: healthy(),
        }
    }

    /// Creates a healthy device on a NUMA node.
    pub fn on(id: &str, node: i64) -> Self {
        Self {
            numa: vec![node],
            ..Self::new(id)
        }
    }
}

/// The optional calls that the plugin requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Options {
    pub pre_start: bool,
    /// Requests `GetPreferredAllocation`, and prefers the last of the available devices.
    pub preferred: bool,
}

/// The answer to `Allocate`. `{ids}` in a value of `envs` is replaced by the devices, joined by commas.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Answer {
    pub envs: BTreeMap<String, String>,
    pub mounts: Vec<Mount>,
    pub device_nodes: Vec<DeviceNode>,
    pub annotations: BTreeMap<String, String>,
    pub cdi_devices: Vec<String>,
    /// Text of field 1000, which kubelets do not know.
    pub unknown_field: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    pub container_path: String,
    pub host_path: String,
    #[serde(default)]
    pub read_only: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    pub container_path: String,
    pub host_path: String,
    pub permissions: String,
}

/// The fault of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fault {
    /// The call is never answered.
    Hang,
    /// The call is answered after the command `proceed`. A DRA driver executes the call before, and reports
    /// [`Event::Waits`](crate::Event::Waits).
    Wait,
    /// The call fails with a gRPC code.
    Refuse { code: i32, message: String },
    /// The process crashes at once; its sockets are left behind.
    Die,
    /// `Allocate` only: the device is removed from the list, then the call is answered after the command `proceed`.
    DropDevice(String),
    /// `Allocate` only: the answer contains no containers.
    NoContainers,
    /// `Allocate` and `GetPreferredAllocation`: the answer contains one container too many.
    TooManyContainers,
    /// `Allocate` only: an environment variable with a value of this size in bytes.
    LargeEnv(usize),
    /// DRA drivers only: these claims, by name, fail with this error. All claims if there are no names.
    FailClaims { names: Vec<String>, message: String },
    /// DRA drivers only: these claims are ignored, and missing in the answer.
    LeaveOut(Vec<String>),
    /// DRA drivers only: the answer contains one more claim, which was not in the request.
    UnknownClaim,
    /// `NodePrepareResources` only: number of devices for each claim.
    ManyDevices(usize),
    /// `NodePrepareResources` only: length of the device names in bytes.
    LongName(usize),
    /// DRA drivers only: after the answer is sent, the process crashes.
    DieAfterwards,
    /// DRA drivers only: after the answer is sent, the caller is killed as by `kill -9`.
    KillCaller,
    /// Half of the answer is sent, and the call stays open.
    Half,
    /// An endless answer, one byte at a time.
    Drip { pause_ms: u64 },
    /// The answer consists of these bytes. A stream stays open after them.
    Raw(Vec<u8>),
    /// The answer consists of this number of zero bytes.
    Zeros(usize),
    /// Streams only: these bytes are sent repeatedly, without a rate limit.
    Endless(Vec<u8>),
    /// `ListAndWatch` only: lists of this number of devices with alternating health, without a rate limit. They are
    /// encoded only once, so that sending is cheap.
    EndlessDevices(usize),
}

/// Faults by the name of the call, such as `Allocate` or `GetInfo`.
pub type Faults = BTreeMap<String, Fault>;

impl Script {
    /// Creates a plugin of the current API version that registers at once.
    pub fn new(root: impl Into<PathBuf>, resource: &str, devices: Vec<Device>) -> Self {
        Self {
            root: root.into(),
            resource: resource.into(),
            devices,
            ..Self::default()
        }
    }

    /// Adds a fault.
    #[must_use]
    pub fn with_fault(mut self, call: &str, fault: Fault) -> Self {
        self.faults.insert(call.into(), fault);
        self
    }

    /// Returns the first list.
    pub(crate) fn all_devices(&self) -> Vec<Device> {
        let many = (0..self.many).map(|number| Device::new(&format!("many-{number}")));
        self.devices.iter().cloned().chain(many).collect()
    }

    pub(crate) fn socket_name(&self) -> String {
        if self.socket.is_empty() {
            format!("{}.sock", self.resource.replace('/', "_"))
        } else {
            self.socket.clone()
        }
    }
}
