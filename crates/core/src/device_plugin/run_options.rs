//! What the runtime must add to a container, from the answers of all plugins involved.
//!
//! Answers are merged in the order of resource names. The first to set a variable, an annotation or a path in
//! the container wins; another value for the same key, or the same path to be used otherwise, is a [`Conflict`],
//! reported and left out. CDI devices are named once each.

use alloc::borrow::Cow;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::id::ResourceName;
use crate::pod::Allocation;

/// A plugin's answer to `Allocate`, for one container.
///
/// What it means is found out when somebody asks: a node holds ten thousand of them, and few are asked for.
#[derive(Clone, Default)]
pub struct Answer {
    /// As it came, with everything that we do not know.
    pub raw: Arc<[u8]>,
    meaning: Meaning,
}

#[derive(Clone)]
enum Meaning {
    Given(Arc<RunOptions>),
    Read(fn(&[u8]) -> RunOptions),
}

impl Default for Meaning {
    fn default() -> Self {
        Self::Read(|_| RunOptions::default())
    }
}

impl Answer {
    /// An answer that means this.
    pub fn new(raw: impl Into<Arc<[u8]>>, options: RunOptions) -> Self {
        Self {
            raw: raw.into(),
            meaning: Meaning::Given(Arc::new(options)),
        }
    }

    /// An answer that means what `read` makes of it.
    pub fn read_by(raw: impl Into<Arc<[u8]>>, read: fn(&[u8]) -> RunOptions) -> Self {
        Self {
            raw: raw.into(),
            meaning: Meaning::Read(read),
        }
    }

    /// What it means.
    pub fn options(&self) -> Cow<'_, RunOptions> {
        match &self.meaning {
            Meaning::Given(options) => Cow::Borrowed(options),
            Meaning::Read(read) => Cow::Owned(read(&self.raw)),
        }
    }
}

impl PartialEq for Answer {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw && self.options() == other.options()
    }
}

impl Eq for Answer {}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer")
            .field("raw", &self.raw)
            .field("options", &self.options())
            .finish()
    }
}

/// What the runtime must add to a container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RunOptions {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<Mount>,
    /// Device nodes.
    pub device_nodes: Vec<DeviceNode>,
    /// Annotations for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// Qualified CDI device names.
    pub cdi_devices: Vec<String>,
}

/// A path of the host in the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where in the container.
    pub container_path: String,
    /// Where on the host.
    pub host_path: String,
    /// Not to be written to.
    pub read_only: bool,
}

/// A device node of the host in the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Where in the container.
    pub container_path: String,
    /// Where on the host.
    pub host_path: String,
    /// Of `r`, `w` and `m`.
    pub permissions: String,
}

/// Two plugins want different things for the same place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// What it is about.
    pub what: Contested,
    /// The variable, annotation or path in the container.
    pub key: String,
    /// Whose wish was followed.
    pub kept: ResourceName,
    /// Whose was not.
    pub dropped: ResourceName,
}

/// What a [`Conflict`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contested {
    /// An environment variable.
    Env,
    /// A mount.
    Mount,
    /// A device node.
    DeviceNode,
    /// An annotation.
    Annotation,
}

/// Merges the answers for one container.
pub fn merge<'a>(allocations: impl IntoIterator<Item = &'a Allocation>) -> (RunOptions, Vec<Conflict>) {
    let by_resource: BTreeMap<&ResourceName, Cow<'_, RunOptions>> = allocations
        .into_iter()
        .map(|allocation| (&allocation.resource, allocation.answer.options()))
        .collect();
    let mut merged = RunOptions::default();
    let mut claims = Claims::default();
    for (&resource, options) in &by_resource {
        for (name, value) in &options.envs {
            if claims.first(Contested::Env, name, (value, ""), resource) {
                merged.envs.insert(name.clone(), value.clone());
            }
        }
        for mount in &options.mounts {
            let access = if mount.read_only { "ro" } else { "rw" };
            let value = (mount.host_path.as_str(), access);
            if claims.first(Contested::Mount, &mount.container_path, value, resource) {
                merged.mounts.push(mount.clone());
            }
        }
        for node in &options.device_nodes {
            let value = (node.host_path.as_str(), node.permissions.as_str());
            if claims.first(Contested::DeviceNode, &node.container_path, value, resource) {
                merged.device_nodes.push(node.clone());
            }
        }
        for (key, value) in &options.annotations {
            if claims.first(Contested::Annotation, key, (value, ""), resource) {
                merged.annotations.insert(key.clone(), value.clone());
            }
        }
        for name in &options.cdi_devices {
            if claims.cdi_devices.insert(name) {
                merged.cdi_devices.push(name.clone());
            }
        }
    }
    (merged, claims.conflicts)
}

/// What is wanted for a key: the value or path, and how it may be used.
type Value<'a> = (&'a str, &'a str);

#[derive(Default)]
struct Claims<'a> {
    values: BTreeMap<(Contested, &'a str), (Value<'a>, &'a ResourceName)>,
    cdi_devices: BTreeSet<&'a str>,
    conflicts: Vec<Conflict>,
}

impl<'a> Claims<'a> {
    /// Whether nobody has set this before. Somebody who set something else makes a conflict.
    fn first(&mut self, what: Contested, key: &'a str, value: Value<'a>, resource: &'a ResourceName) -> bool {
        let Some(&(earlier, kept)) = self.values.get(&(what, key)) else {
            self.values.insert((what, key), (value, resource));
            return true;
        };
        if earlier != value {
            let (key, kept, dropped) = (key.into(), kept.clone(), resource.clone());
            self.conflicts.push(Conflict {
                what,
                key,
                kept,
                dropped,
            });
        }
        false
    }
}

#[cfg(test)]
mod tests;
