//! Run options of a container, merged from the `Allocate` answers of its plugins.
//!
//! Answers are merged in the order of resource names. The first value of a variable, an annotation or a container path
//! wins. A different value, or the same path with other access, is a [`Conflict`]: it is reported and dropped. Each CDI
//! device is named once.

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
/// Decoded lazily: few of 10,000 recorded answers are read.
#[derive(Clone, Default)]
pub struct Answer {
    /// The encoded answer, including unknown fields.
    pub raw: Arc<[u8]>,
    source: OptionsSource,
}

#[derive(Clone)]
enum OptionsSource {
    Decoded(Arc<RunOptions>),
    Lazy(fn(&[u8]) -> RunOptions),
}

impl Default for OptionsSource {
    fn default() -> Self {
        Self::Lazy(|_| RunOptions::default())
    }
}

impl Answer {
    /// Returns an answer with these options.
    pub fn new(raw: impl Into<Arc<[u8]>>, options: RunOptions) -> Self {
        Self {
            raw: raw.into(),
            source: OptionsSource::Decoded(Arc::new(options)),
        }
    }

    /// Returns an answer that `decode` decodes when the options are needed.
    pub fn lazy(raw: impl Into<Arc<[u8]>>, decode: fn(&[u8]) -> RunOptions) -> Self {
        Self {
            raw: raw.into(),
            source: OptionsSource::Lazy(decode),
        }
    }

    /// Returns the decoded options.
    pub fn options(&self) -> Cow<'_, RunOptions> {
        match &self.source {
            OptionsSource::Decoded(options) => Cow::Borrowed(options),
            OptionsSource::Lazy(decode) => Cow::Owned(decode(&self.raw)),
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

/// The changes that the runtime must apply to a container.
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

/// A mount of a host path into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The path in the container.
    pub container_path: String,
    /// The path on the host.
    pub host_path: String,
    /// `true` for a read-only mount.
    pub read_only: bool,
}

/// A device node of the host that the container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// The path in the container.
    pub container_path: String,
    /// The path on the host.
    pub host_path: String,
    /// A subset of `r`, `w` and `m`.
    pub permissions: String,
}

/// Different values of two plugins for the same key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The kind of the key.
    pub kind: ConflictKind,
    /// The variable, annotation or path in the container.
    pub key: String,
    /// The resource of the value that was kept.
    pub kept: ResourceName,
    /// The resource of the value that was dropped.
    pub dropped: ResourceName,
}

/// The kind of key in a [`Conflict`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConflictKind {
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
    let mut merger = Merger::default();
    for (&resource, options) in &by_resource {
        for (name, value) in &options.envs {
            if merger.first(ConflictKind::Env, name, (value, ""), resource) {
                merged.envs.insert(name.clone(), value.clone());
            }
        }
        for mount in &options.mounts {
            let access = if mount.read_only { "ro" } else { "rw" };
            let value = (mount.host_path.as_str(), access);
            if merger.first(ConflictKind::Mount, &mount.container_path, value, resource) {
                merged.mounts.push(mount.clone());
            }
        }
        for node in &options.device_nodes {
            let value = (node.host_path.as_str(), node.permissions.as_str());
            if merger.first(ConflictKind::DeviceNode, &node.container_path, value, resource) {
                merged.device_nodes.push(node.clone());
            }
        }
        for (key, value) in &options.annotations {
            if merger.first(ConflictKind::Annotation, key, (value, ""), resource) {
                merged.annotations.insert(key.clone(), value.clone());
            }
        }
        for name in &options.cdi_devices {
            if merger.cdi_devices.insert(name) {
                merged.cdi_devices.push(name.clone());
            }
        }
    }
    (merged, merger.conflicts)
}

/// The value of a key: a text or host path, and the access.
type Value<'a> = (&'a str, &'a str);

#[derive(Default)]
struct Merger<'a> {
    values: BTreeMap<(ConflictKind, &'a str), (Value<'a>, &'a ResourceName)>,
    cdi_devices: BTreeSet<&'a str>,
    conflicts: Vec<Conflict>,
}

impl<'a> Merger<'a> {
    /// Returns `true` for the first value of a key. A later, different value is recorded as a conflict.
    fn first(
        &mut self,
        kind: ConflictKind,
        key: &'a str,
        value: Value<'a>,
        resource: &'a ResourceName,
    ) -> bool {
        let Some(&(earlier, kept)) = self.values.get(&(kind, key)) else {
            self.values.insert((kind, key), (value, resource));
            return true;
        };
        if earlier != value {
            let (key, kept, dropped) = (key.into(), kept.clone(), resource.clone());
            self.conflicts.push(Conflict {
                kind,
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
