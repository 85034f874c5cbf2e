//! The content of a spec file, field by field.
//!
//! The types mirror the file: a text that is empty and a number that is zero count as absent, as they do in
//! the reference implementation, and `null` is the same as leaving a field out. A field that is not known is
//! an error. Nothing here is checked beyond that; see [`Spec::validate`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::field::{
    Entry, entries, integer, integers, items, optional_integer, optional_items, or_default, switch,
    texts_by_key,
};
use crate::name::{InvalidName, QualifiedName, split_kind};

/// What one spec file says: the devices of one vendor and class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Spec {
    /// The CDI version that the file states. [`Spec::write`] ignores it and states the lowest possible.
    #[serde(rename = "cdiVersion", deserialize_with = "or_default")]
    pub version: String,
    /// `vendor/class`.
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    /// Notes about the spec, which do not reach the container.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "texts_by_key")]
    pub annotations: BTreeMap<String, String>,
    /// At least one, with different names.
    #[serde(deserialize_with = "entries")]
    pub devices: Vec<Device>,
    /// Edits to make once when any of the devices is used.
    #[serde(
        skip_serializing_if = "ContainerEdits::is_empty",
        deserialize_with = "or_default"
    )]
    pub container_edits: ContainerEdits,
}

impl Spec {
    /// The part of `kind` before the `/`.
    pub fn vendor(&self) -> Result<&str, InvalidName> {
        split_kind(&self.kind).map(|(vendor, _)| vendor)
    }

    /// The part of `kind` after the `/`.
    pub fn class(&self) -> Result<&str, InvalidName> {
        split_kind(&self.kind).map(|(_, class)| class)
    }

    /// The qualified name of one of the spec's devices.
    pub fn qualify(&self, device: &Device) -> Result<QualifiedName, InvalidName> {
        let (vendor, class) = split_kind(&self.kind)?;
        QualifiedName::new(vendor, class, &device.name)
    }
}

/// One device that a container can be given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Device {
    /// The last part of the qualified name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Notes about the device, which do not reach the container.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "texts_by_key")]
    pub annotations: BTreeMap<String, String>,
    /// Edits to make when this device is used; never empty.
    #[serde(deserialize_with = "or_default")]
    pub container_edits: ContainerEdits,
}

/// Changes to make to the OCI runtime spec of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerEdits {
    /// Environment variables, `NAME=value`; each replaces one of the same name.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub env: Vec<String>,
    /// Device nodes; each replaces one of the same path.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces to move into the container.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub net_devices: Vec<NetDevice>,
    /// Programs to run at stages of the container's life.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub hooks: Vec<Hook>,
    /// Mounts; each replaces one of the same destination.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub mounts: Vec<Mount>,
    /// Cache and memory bandwidth allocation; replaces what the container has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups for the container's process; 0 is ignored.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "integers")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// Whether there is nothing to do, which is an error in a device.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds the edits of `other` after those that are here. An Intel RDT configuration replaces the former.
    pub fn append(&mut self, other: &Self) {
        self.env.extend_from_slice(&other.env);
        self.device_nodes.extend_from_slice(&other.device_nodes);
        self.net_devices.extend_from_slice(&other.net_devices);
        self.hooks.extend_from_slice(&other.hooks);
        self.mounts.extend_from_slice(&other.mounts);
        if other.intel_rdt.is_some() {
            self.intel_rdt.clone_from(&other.intel_rdt);
        }
        self.additional_gids.extend_from_slice(&other.additional_gids);
    }
}

/// A device node in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DeviceNode {
    /// Where it is in the container.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Where it is on the host, if not at `path`.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub host_path: String,
    /// `b` (block), `c` or `u` (character), `p` (fifo), or empty to look at the host.
    #[serde(
        rename = "type",
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
    pub node_type: String,
    /// 0 to take both numbers from the host.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "integer")]
    pub major: i64,
    /// Counts only together with `major`.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "integer")]
    pub minor: i64,
    /// Permission bits of the node, by default those of the node on the host.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub file_mode: Option<u32>,
    /// What the device cgroup allows, out of `rwm`; all of them when empty, nothing for `none`.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub permissions: String,
    /// The node's owner, by default the user of the container's process.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub uid: Option<u32>,
    /// The node's group, by default the group of the container's process.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub gid: Option<u32>,
}

/// A mount in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Mount {
    /// What to mount.
    #[serde(deserialize_with = "or_default")]
    pub host_path: String,
    /// Where to mount it.
    #[serde(deserialize_with = "or_default")]
    pub container_path: String,
    /// As in fstab.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub options: Vec<String>,
    /// The type of file system.
    #[serde(
        rename = "type",
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
    pub mount_type: String,
}

/// A program to run at a stage of the container's life.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Hook {
    /// When: one of [`Hook::NAMES`].
    #[serde(deserialize_with = "or_default")]
    pub hook_name: String,
    /// The program.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Its arguments, from `argv[0]`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub args: Vec<String>,
    /// Its environment, `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub env: Vec<String>,
    /// Seconds until it is given up.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub timeout: Option<i64>,
}

impl Hook {
    /// The names of all stages.
    pub const NAMES: [&'static str; 6] = [
        "prestart",
        "createRuntime",
        "createContainer",
        "startContainer",
        "poststart",
        "poststop",
    ];
}

/// Cache and memory bandwidth allocation through resctrl.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct IntelRdt {
    /// The class of service: a directory name, or `/` for the root class.
    #[serde(
        rename = "closID",
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
    pub clos_id: String,
    /// The L3 cache allocation.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub l3_cache_schema: String,
    /// The memory bandwidth allocation.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub mem_bw_schema: String,
    /// Whole lines of the schemata file. Even an empty list needs version 1.1.0.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "optional_items")]
    pub schemata: Option<Vec<String>>,
    /// Whether to make a monitoring group for the container.
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub enable_monitoring: bool,
}

/// A network interface to move from the host into the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NetDevice {
    /// The interface's name on the host.
    #[serde(deserialize_with = "or_default")]
    pub host_interface_name: String,
    /// The interface's name in the container.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

fn first_empty(fields: &[(&'static str, &String)]) -> Option<&'static str> {
    fields
        .iter()
        .find(|(_, text)| text.is_empty())
        .map(|(field, _)| *field)
}

impl Entry for Device {
    fn missing(&self) -> Option<&'static str> {
        first_empty(&[("name", &self.name)])
    }
}

impl Entry for DeviceNode {
    fn missing(&self) -> Option<&'static str> {
        first_empty(&[("path", &self.path)])
    }
}

impl Entry for Mount {
    fn missing(&self) -> Option<&'static str> {
        first_empty(&[
            ("hostPath", &self.host_path),
            ("containerPath", &self.container_path),
        ])
    }
}

impl Entry for Hook {
    fn missing(&self) -> Option<&'static str> {
        first_empty(&[("hookName", &self.hook_name), ("path", &self.path)])
    }
}

impl Entry for NetDevice {
    fn missing(&self) -> Option<&'static str> {
        first_empty(&[
            ("hostInterfaceName", &self.host_interface_name),
            ("name", &self.name),
        ])
    }
}
