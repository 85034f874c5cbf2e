//! What a plugin is like.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a plugin is like.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Script {
    /// The root directory of the node: the kubelet's layout.
    pub root: PathBuf,
    /// What is offered.
    pub resource: String,
    /// The name of the plugin's socket; made from the resource if empty.
    pub socket: String,
    pub api: Api,
    pub door: Door,
    pub devices: Vec<Device>,
    /// So many more devices: `many-0`, `many-1`, and so on.
    pub many: usize,
    pub options: Options,
    pub answer: Answer,
    pub faults: Faults,
}

/// Which protocol is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Api {
    #[default]
    V1beta1,
    /// Of 2017: the plugin serves only once its registration has been answered.
    V1alpha2,
}

/// How the plugin gets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Door {
    /// By `Register` on `kubelet.sock`.
    #[default]
    Kubelet,
    /// By a socket in `plugins_registry`, that also serves the devices.
    Registry,
    /// By a socket in `plugins_registry` that names the plugin's socket elsewhere.
    RegistryWithEndpoint,
    /// Not before the command `register`, then by `kubelet.sock`.
    Later,
    /// By `Register`, for a socket that somebody else serves, or nobody.
    Claim,
}

/// A device of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub id: String,
    /// NUMA nodes; no topology at all if empty.
    #[serde(default)]
    pub numa: Vec<i64>,
    #[serde(default = "healthy")]
    pub health: String,
}

fn healthy() -> String {
    "Healthy".into()
}

impl Device {
    /// A healthy device without topology.
    pub fn new(id: &str) -> Self {
        Self {
            id: id.into(),
            numa: Vec::new(),
            health: healthy(),
        }
    }

    /// A healthy device on a NUMA node.
    pub fn on(id: &str, node: i64) -> Self {
        Self {
            numa: vec![node],
            ..Self::new(id)
        }
    }
}

/// What the plugin wants to be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Options {
    pub pre_start: bool,
    /// Wants to be asked, and advises the last of the devices that there are.
    pub preferred: bool,
}

/// What `Allocate` answers. `{ids}` in a value of `envs` stands for the devices, joined by commas.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Answer {
    pub envs: BTreeMap<String, String>,
    pub mounts: Vec<Mount>,
    pub device_nodes: Vec<DeviceNode>,
    pub annotations: BTreeMap<String, String>,
    pub cdi_devices: Vec<String>,
    /// Text of a field that no kubelet knows, number 1000.
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

/// How a call goes wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fault {
    /// It is never answered.
    Hang,
    /// It is answered after the command `proceed`. What a DRA driver is asked for is done before,
    /// and [`Event::Waits`](crate::Event::Waits) tells so.
    Wait,
    /// It is refused with a gRPC code.
    Refuse { code: i32, message: String },
    /// The process dies at once, as by a crash; its sockets stay behind.
    Die,
    /// `Allocate` only: the device leaves the list, then the call is answered after the command `proceed`.
    DropDevice(String),
    /// `Allocate` only: an answer for no container.
    NoContainers,
    /// `Allocate` and `GetPreferredAllocation`: an answer too many.
    TooManyContainers,
    /// `Allocate` only: a variable with a value of so many bytes.
    LargeEnv(usize),
    /// Of a DRA driver: these claims, by name, fail with this error; all if there are none.
    FailClaims { names: Vec<String>, message: String },
    /// Of a DRA driver: nothing is done for these claims, and nothing said of them.
    LeaveOut(Vec<String>),
    /// Of a DRA driver: the answer names one more claim, which nobody asked about.
    UnknownClaim,
    /// `NodePrepareResources` only: so many devices for each claim.
    ManyDevices(usize),
    /// `NodePrepareResources` only: devices with names of so many bytes.
    LongName(usize),
    /// Of a DRA driver: once the answer is out, the process dies as by a crash.
    DieAfterwards,
    /// Of a DRA driver: once the answer is out, whoever asked is killed as by `kill -9`.
    KillCaller,
    /// The answer breaks off in its middle, and the call stays open.
    Half,
    /// An answer without end, one byte at a time.
    Drip { pause_ms: u64 },
    /// The answer is these bytes, whatever they mean. A stream stays open after them.
    Raw(Vec<u8>),
    /// A stream only: these bytes again and again, as fast as they are taken.
    Endless(Vec<u8>),
    /// `ListAndWatch` only: lists of so many devices, all of which fall ill and recover, as fast as they are taken. They are
    /// made once, so that it takes little to send them.
    EndlessDevices(usize),
}

/// Faults by the name of the call, such as `Allocate` or `GetInfo`.
pub type Faults = BTreeMap<String, Fault>;

impl Script {
    /// A plugin of today that registers at once.
    pub fn new(root: impl Into<PathBuf>, resource: &str, devices: Vec<Device>) -> Self {
        Self {
            root: root.into(),
            resource: resource.into(),
            devices,
            ..Self::default()
        }
    }

    /// As `Self`, with a fault.
    #[must_use]
    pub fn with_fault(mut self, call: &str, fault: Fault) -> Self {
        self.faults.insert(call.into(), fault);
        self
    }

    /// What is listed at first.
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
