//! The content of a spec file.
//!
//! The types mirror the file. An empty text and a zero number count as absent, as in the reference
//! implementation, and so does `null`. An unknown field is an error. Other rules are not checked here; see
//! [`Spec::validate`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::field::{
    Entry, boolean, entries, integer, integers, items, optional_integer, optional_items, or_default,
    texts_by_key,
};
use crate::name::{InvalidName, QualifiedName, split_kind};

/// The content of one spec file: the devices of one vendor and class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Spec {
    /// The CDI version in the file. [`Spec::write`] ignores it and writes the lowest possible.
    #[serde(rename = "cdiVersion", deserialize_with = "or_default")]
    pub version: String,
    /// `vendor/class`.
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    /// Annotations of the spec, which do not reach the container.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "texts_by_key")]
    pub annotations: BTreeMap<String, String>,
    /// At least one, with different names.
    #[serde(deserialize_with = "entries")]
    pub devices: Vec<Device>,
    /// Edits applied once if any of the devices is used.
    #[serde(
        skip_serializing_if = "ContainerEdits::is_empty",
        deserialize_with = "or_default"
    )]
    pub container_edits: ContainerEdits,
}

impl Spec {
    /// Returns the part of `kind` before the `/`.
    pub fn vendor(&self) -> Result<&str, InvalidName> {
        split_kind(&self.kind).map(|(vendor, _)| vendor)
    }

    /// Returns the part of `kind` after the `/`.
    pub fn class(&self) -> Result<&str, InvalidName> {
        split_kind(&self.kind).map(|(_, class)| class)
    }

    /// Returns the qualified name of one of the spec's devices.
    pub fn qualify(&self, device: &Device) -> Result<QualifiedName, InvalidName> {
        let (vendor, class) = split_kind(&self.kind)?;
        QualifiedName::new(vendor, class, &device.name)
    }
}

/// A device that a container can use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Device {
    /// The last part of the qualified name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Annotations of the device, which do not reach the container.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "texts_by_key")]
    pub annotations: BTreeMap<String, String>,
    /// Edits applied if this device is used; never empty.
    #[serde(deserialize_with = "or_default")]
    pub container_edits: ContainerEdits,
}

/// Changes to the OCI runtime spec of a container.
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
    /// Programs that run at stages of the container's lifecycle.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub hooks: Vec<Hook>,
    /// Mounts; each replaces one of the same destination.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "entries")]
    pub mounts: Vec<Mount>,
    /// Cache and memory bandwidth allocation; replaces that of the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups for the container's process; 0 is ignored.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "integers")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// Returns `true` if there are no edits, which is an error in a device.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Appends the edits of `other`. An Intel RDT configuration replaces the earlier one.
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
    /// Path in the container.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Path on the host, if it differs from `path`.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub host_path: String,
    /// `b` (block), `c` or `u` (character), `p` (fifo), or empty to use the type on the host.
    #[serde(
        rename = "type",
        skip_serializing_if = "String::is_empty",
        deserialize_with = "or_default"
    )]
    pub node_type: String,
    /// 0 to use both numbers from the host.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "integer")]
    pub major: i64,
    /// Used only together with `major`.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "integer")]
    pub minor: i64,
    /// Permission bits of the node; default: those of the node on the host.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub file_mode: Option<u32>,
    /// Permissions in the device cgroup, out of `rwm`; empty means all, `none` means none.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub permissions: String,
    /// The node's owner; default: the user of the container's process.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "optional_integer"
    )]
    pub uid: Option<u32>,
    /// The node's group; default: the group of the container's process.
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
    /// Source path on the host.
    #[serde(deserialize_with = "or_default")]
    pub host_path: String,
    /// Destination path in the container.
    #[serde(deserialize_with = "or_default")]
    pub container_path: String,
    /// Mount options, as in fstab.
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

/// A program that runs at a stage of the container's lifecycle.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Hook {
    /// The stage: one of [`Hook::NAMES`].
    #[serde(deserialize_with = "or_default")]
    pub hook_name: String,
    /// Path of the program.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Its arguments, from `argv[0]`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub args: Vec<String>,
    /// Its environment, `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "items")]
    pub env: Vec<String>,
    /// Timeout in seconds.
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
    /// Complete lines of the schemata file. Even an empty list needs version 1.1.0.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "optional_items")]
    pub schemata: Option<Vec<String>>,
    /// `true` to create a monitoring group for the container.
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "boolean")]
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
