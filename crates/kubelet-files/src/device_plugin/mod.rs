//! `kubelet_internal_checkpoint`: devices held by containers, and the plugins' answers.
//!
//! The file has had three formats:
//!
//! | format | written by | devices of an entry | checksum |
//! | --- | --- | --- | --- |
//! | V0 | 1.8 to 1.10 | a list (1.8: one entry per device) | none |
//! | V1 | 1.11 to 1.19 | a list | FNV-1a over the printed value |
//! | V2 | 1.20 and later | lists by NUMA node | FNV-1a over the printed value |
//!
//! [`read`] accepts V1 and V2, which differ only in [`Devices`]; [`v0::read`] accepts V0. [`write()`] writes V2.

mod checksum;
mod read;
pub mod response;
mod scan;
pub mod v0;
mod write;

use std::collections::BTreeMap;

pub use read::read;
pub(crate) use read::{read_strict_v2, salvage};
pub use write::write;

/// The content of a checkpoint. `None` is Go's `nil`: it prints as `null`, and its checksum differs from that of an
/// empty value.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkpoint {
    /// Devices by container and resource, in the order of the file.
    pub entries: Option<Vec<Entry>>,
    /// Each resource's healthy devices at the time of writing. On restore only the names count.
    pub registered: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// The devices of one resource that one container holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Entry {
    pub pod_uid: String,
    pub container: String,
    pub resource: String,
    pub devices: Devices,
    /// The plugin's answer to `Allocate`: a serialized `v1beta1.ContainerAllocateResponse`, see [`response`].
    /// Kept as the bytes of the file, including unknown fields.
    pub alloc_resp: Option<Vec<u8>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// By NUMA node; -1 if the plugin did not name a node. A device on several nodes is listed under each.
    PerNuma(Option<BTreeMap<i64, Option<Vec<String>>>>),
    /// Without topology: V0 and V1.
    Flat(Option<Vec<String>>),
}

impl Default for Devices {
    fn default() -> Self {
        Self::PerNuma(None)
    }
}

impl Devices {
    /// Returns every device once, in the order of the file.
    pub fn ids(&self) -> Vec<&str> {
        let lists: Vec<&Vec<String>> = match self {
            Self::PerNuma(nodes) => nodes
                .iter()
                .flatten()
                .filter_map(|(_, ids)| ids.as_ref())
                .collect(),
            Self::Flat(ids) => ids.iter().collect(),
        };
        let mut seen = std::collections::HashSet::new();
        lists
            .into_iter()
            .flatten()
            .map(String::as_str)
            .filter(|id| seen.insert(*id))
            .collect()
    }

    /// Removes the devices that `keep` rejects.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let lists: Vec<&mut Vec<String>> = match self {
            Self::PerNuma(nodes) => nodes
                .iter_mut()
                .flatten()
                .filter_map(|(_, ids)| ids.as_mut())
                .collect(),
            Self::Flat(ids) => ids.iter_mut().collect(),
        };
        lists
            .into_iter()
            .for_each(|ids| ids.retain(|id| keep(id.as_str())));
    }

    /// Returns the devices by NUMA node. Devices without topology go to node 0, where kubelets 1.20 to 1.30 put those
    /// of a V1 file.
    pub fn into_per_numa(self) -> Self {
        match self {
            Self::Flat(ids) => Self::PerNuma(Some(BTreeMap::from([(0, ids)]))),
            per_numa @ Self::PerNuma(_) => per_numa,
        }
    }
}

impl Entry {
    /// Returns pod, container and resource: the key under which a kubelet keeps an entry.
    pub fn holder(&self) -> String {
        format!("{}/{} {}", self.pod_uid, self.container, self.resource)
    }

    /// Returns the holder and its devices, for display.
    pub(crate) fn describe(&self) -> String {
        let devices = self.devices.ids();
        let devices = if devices.is_empty() {
            "no devices".to_owned()
        } else {
            devices.join(", ")
        };
        format!("{} with {devices}", self.holder())
    }

    pub(crate) fn key(&self) -> (&str, &str, &str) {
        (&self.pod_uid, &self.container, &self.resource)
    }
}

impl Checkpoint {
    /// Returns the checkpoint with its devices by NUMA node, as V2 requires.
    pub fn into_per_numa(mut self) -> Self {
        for entry in self.entries.iter_mut().flatten() {
            entry.devices = std::mem::take(&mut entry.devices).into_per_numa();
        }
        self
    }
}

#[cfg(test)]
mod tests;
