//! Rules for the content of a spec, beyond its syntax.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::name::{InvalidName, Part, check, split_kind};
use crate::spec::{ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec};
use crate::version::{UnknownVersion, Version};

/// Maximum size in bytes of all keys and values of one set of annotations, from Kubernetes.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

/// The part of a spec that an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The spec as a whole.
    Spec,
    /// The device of this name.
    Device(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spec => f.write_str("spec"),
            Self::Device(name) => write!(f, "device {name:?}"),
        }
    }
}

/// Why a spec is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSpec {
    /// `cdiVersion` is missing or unknown.
    #[error(transparent)]
    Version(#[from] UnknownVersion),
    /// The spec uses a feature that its version does not have.
    #[error("the spec states version {stated}, but its content needs at least {needed}")]
    VersionTooLow {
        /// The version in `cdiVersion`.
        stated: Version,
        /// The minimum version for the content.
        needed: Version,
    },
    /// `kind` is not a valid `vendor/class`.
    #[error("kind: {0}")]
    Kind(#[source] InvalidName),
    /// The list of devices is empty.
    #[error("the spec does not define any devices")]
    NoDevices,
    /// The name of a device is missing or invalid.
    #[error(transparent)]
    DeviceName(InvalidName),
    /// Two devices have the same name.
    #[error("device {name:?} is defined twice")]
    DuplicateDevice {
        /// The name without vendor and class.
        name: String,
    },
    /// A device without edits: it would change nothing in a container.
    #[error("device {name:?} does not have container edits")]
    EmptyEdits {
        /// The name without vendor and class.
        name: String,
    },
    /// An invalid annotation.
    #[error("{place}: {source}")]
    Annotations {
        /// The spec or device with the annotations.
        place: Place,
        /// Why they are invalid.
        source: InvalidAnnotations,
    },
    /// Invalid container edits.
    #[error("{place}: {source}")]
    Edits {
        /// The spec or device with the edits.
        place: Place,
        /// Why they are invalid.
        source: InvalidEdits,
    },
}

/// Why annotations of a spec or device are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnnotations {
    /// Keys are like those of Kubernetes, in any case: an optional DNS subdomain and `/`, and a name.
    #[error(
        "annotation key {key:?} must be at most 63 letters, digits and _ - . with a letter or digit at \
         both ends, after an optional DNS name and a slash"
    )]
    Key {
        /// The whole key.
        key: String,
    },
    /// All keys and values together are too long.
    #[error("annotations have {bytes} bytes, at most {MAX_ANNOTATION_BYTES} are allowed")]
    TooLarge {
        /// Their size in bytes.
        bytes: usize,
    },
}

/// Why container edits are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEdits {
    /// Not `NAME=value`.
    #[error("environment variable {variable:?} must be like NAME=value")]
    Env {
        /// The text as given.
        variable: String,
    },
    /// A device node without `path`.
    #[error("a device node lacks a path")]
    NodePath,
    /// A device node of an unknown type.
    #[error("device node {path:?} has type {node_type:?}, it must be b, c, u or p")]
    NodeType {
        /// The node's path in the container.
        path: String,
        /// The type as given.
        node_type: String,
    },
    /// Unknown cgroup permissions.
    #[error("device node {path:?} has permissions {permissions:?}, they must be some of rwm, or none")]
    NodePermissions {
        /// The node's path in the container.
        path: String,
        /// The permissions as given.
        permissions: String,
    },
    /// A hook for an unknown stage.
    #[error("hook name {name:?} is not one of {}", Hook::NAMES.join(", "))]
    HookName {
        /// The name as given.
        name: String,
    },
    /// A hook without `path`.
    #[error("a {name} hook lacks a path")]
    HookPath {
        /// The hook's name.
        name: String,
    },
    /// A hook's environment variable that is not `NAME=value`.
    #[error("environment variable {variable:?} of a {name} hook must be like NAME=value")]
    HookEnv {
        /// The hook's name.
        name: String,
        /// The text as given.
        variable: String,
    },
    /// A mount without `hostPath`.
    #[error("the mount at {container_path:?} lacks a host path")]
    MountHostPath {
        /// The destination of the mount.
        container_path: String,
    },
    /// A mount without `containerPath`.
    #[error("the mount of {host_path:?} lacks a container path")]
    MountContainerPath {
        /// The source of the mount.
        host_path: String,
    },
    /// A class of service that cannot be a directory name.
    #[error("closID {clos_id:?} must be / or a file name of less than 4096 bytes")]
    ClosId {
        /// The text as given.
        clos_id: String,
    },
    /// A network device without `hostInterfaceName`.
    #[error("network device {name:?} lacks a host interface name")]
    NetHostInterface {
        /// Its name in the container.
        name: String,
    },
    /// A network device without `name`.
    #[error("the network device of host interface {host_interface:?} lacks a name")]
    NetName {
        /// Its name on the host.
        host_interface: String,
    },
    /// One interface is moved twice.
    #[error("host interface {host_interface:?} is used for two network devices")]
    NetHostInterfaceTwice {
        /// Its name on the host.
        host_interface: String,
    },
    /// Two interfaces get the same name.
    #[error("two network devices are named {name:?}")]
    NetNameTwice {
        /// The name in the container.
        name: String,
    },
}

/// Content that is valid but likely to cause problems.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Older CDI libraries panic on such a name.
    #[error(
        "the {part} {value:?} has one character, which crashes container runtimes \
         (containerd 1.7 to 2.3, CRI-O, podman)"
    )]
    OneCharacter {
        /// Vendor or class.
        part: Part,
        /// The character.
        value: String,
    },
    /// Runtimes do not notice it, because the feature that needs the version is not in the last device.
    #[error("the spec states version {stated}, but its content needs {needed}")]
    VersionTooLow {
        /// The version in `cdiVersion`.
        stated: Version,
        /// The minimum version for the content.
        needed: Version,
    },
    /// Runtimes read JSON with a YAML parser that does not support all of JSON.
    #[error(
        "runtimes refuse the file, because they read JSON as YAML: it has the escape \\/, an escaped \
         surrogate, or a control character as such"
    )]
    JsonOnly,
    /// Like runtimes, this crate reads only the first document of a file.
    #[error("the file has more than one YAML document, only the first is read")]
    MoreDocuments,
}

impl Spec {
    /// Checks everything that the reference implementation checks when it loads a spec.
    ///
    /// Returns the parts that are valid but likely to cause problems.
    pub fn validate(&self) -> Result<Vec<Warning>, InvalidSpec> {
        let stated: Version = self.version.parse()?;
        let insisted = self.version_seen_by_runtimes();
        if stated < insisted {
            return Err(InvalidSpec::VersionTooLow {
                stated,
                needed: insisted,
            });
        }
        let mut warnings = self.validate_content()?;
        let needed = self.minimum_version();
        if stated < needed {
            warnings.push(Warning::VersionTooLow { stated, needed });
        }
        Ok(warnings)
    }

    pub(crate) fn validate_content(&self) -> Result<Vec<Warning>, InvalidSpec> {
        let (vendor, class) = split_kind(&self.kind).map_err(InvalidSpec::Kind)?;
        check_annotations(&self.annotations).map_err(|source| InvalidSpec::Annotations {
            place: Place::Spec,
            source,
        })?;
        self.container_edits
            .validate()
            .map_err(|source| InvalidSpec::Edits {
                place: Place::Spec,
                source,
            })?;

        let mut names = BTreeSet::new();
        for device in &self.devices {
            let name = &device.name;
            let place = || Place::Device(name.clone());
            check(Part::Name, name, name).map_err(InvalidSpec::DeviceName)?;
            check_annotations(&device.annotations).map_err(|source| InvalidSpec::Annotations {
                place: place(),
                source,
            })?;
            if device.container_edits.is_empty() {
                return Err(InvalidSpec::EmptyEdits { name: name.clone() });
            }
            device
                .container_edits
                .validate()
                .map_err(|source| InvalidSpec::Edits {
                    place: place(),
                    source,
                })?;
            if !names.insert(name) {
                return Err(InvalidSpec::DuplicateDevice { name: name.clone() });
            }
        }
        if self.devices.is_empty() {
            return Err(InvalidSpec::NoDevices);
        }

        let parts = [(Part::Vendor, vendor), (Part::Class, class)];
        let short = parts.into_iter().filter(|(_, value)| value.len() == 1);
        Ok(short
            .map(|(part, value)| Warning::OneCharacter {
                part,
                value: value.to_owned(),
            })
            .collect())
    }
}

impl ContainerEdits {
    /// Checks each edit by itself, and that the network devices are distinct.
    pub fn validate(&self) -> Result<(), InvalidEdits> {
        if let Some(variable) = self.env.iter().find(|variable| !is_assignment(variable)) {
            return Err(InvalidEdits::Env {
                variable: variable.clone(),
            });
        }
        self.device_nodes.iter().try_for_each(check_node)?;
        self.hooks.iter().try_for_each(check_hook)?;
        self.mounts.iter().try_for_each(check_mount)?;
        self.intel_rdt.iter().try_for_each(check_rdt)?;
        check_net_devices(&self.net_devices)
    }
}

fn is_assignment(variable: &str) -> bool {
    variable.find('=').is_some_and(|at| at > 0)
}

fn check_node(node: &DeviceNode) -> Result<(), InvalidEdits> {
    if node.path.is_empty() {
        return Err(InvalidEdits::NodePath);
    }
    if !matches!(&*node.node_type, "" | "b" | "c" | "u" | "p") {
        return Err(InvalidEdits::NodeType {
            path: node.path.clone(),
            node_type: node.node_type.clone(),
        });
    }
    if node.permissions != "none" && !node.permissions.chars().all(|c| matches!(c, 'r' | 'w' | 'm')) {
        let (path, permissions) = (node.path.clone(), node.permissions.clone());
        return Err(InvalidEdits::NodePermissions { path, permissions });
    }
    Ok(())
}

fn check_hook(hook: &Hook) -> Result<(), InvalidEdits> {
    let name = || hook.hook_name.clone();
    if !Hook::NAMES.contains(&&*hook.hook_name) {
        return Err(InvalidEdits::HookName { name: name() });
    }
    if hook.path.is_empty() {
        return Err(InvalidEdits::HookPath { name: name() });
    }
    match hook.env.iter().find(|variable| !is_assignment(variable)) {
        Some(variable) => Err(InvalidEdits::HookEnv {
            name: name(),
            variable: variable.clone(),
        }),
        None => Ok(()),
    }
}

fn check_mount(mount: &Mount) -> Result<(), InvalidEdits> {
    if mount.host_path.is_empty() {
        return Err(InvalidEdits::MountHostPath {
            container_path: mount.container_path.clone(),
        });
    }
    if mount.container_path.is_empty() {
        return Err(InvalidEdits::MountContainerPath {
            host_path: mount.host_path.clone(),
        });
    }
    Ok(())
}

fn check_rdt(rdt: &IntelRdt) -> Result<(), InvalidEdits> {
    let id = &*rdt.clos_id;
    if id != "/" && (id.len() >= 4096 || matches!(id, "." | "..") || id.contains(['/', '\n'])) {
        return Err(InvalidEdits::ClosId {
            clos_id: id.to_owned(),
        });
    }
    Ok(())
}

fn check_net_devices(devices: &[NetDevice]) -> Result<(), InvalidEdits> {
    let mut interfaces = BTreeSet::new();
    let mut names = BTreeSet::new();
    for NetDevice {
        host_interface_name: host_interface,
        name,
    } in devices
    {
        if host_interface.is_empty() {
            return Err(InvalidEdits::NetHostInterface { name: name.clone() });
        }
        if name.is_empty() {
            return Err(InvalidEdits::NetName {
                host_interface: host_interface.clone(),
            });
        }
        if !interfaces.insert(host_interface) {
            return Err(InvalidEdits::NetHostInterfaceTwice {
                host_interface: host_interface.clone(),
            });
        }
        if !names.insert(name) {
            return Err(InvalidEdits::NetNameTwice { name: name.clone() });
        }
    }
    Ok(())
}

fn check_annotations(annotations: &BTreeMap<String, String>) -> Result<(), InvalidAnnotations> {
    if let Some(key) = annotations.keys().find(|key| !is_annotation_key(key)) {
        return Err(InvalidAnnotations::Key { key: key.clone() });
    }
    let bytes = annotations
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    if bytes > MAX_ANNOTATION_BYTES {
        return Err(InvalidAnnotations::TooLarge { bytes });
    }
    Ok(())
}

fn is_annotation_key(key: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let edges = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    let is_label = |label: &str| {
        edges(label)
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    prefix.is_none_or(|prefix| prefix.len() <= 253 && prefix.split('.').all(is_label))
        && name.len() <= 63
        && edges(name)
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

#[cfg(test)]
mod tests;
