//! `kubelet_internal_checkpoint`: which container holds which devices, and what the plugin answered.
//!
//! Three generations of the file exist:
//!
//! | format | written by | devices of an entry | checksum |
//! | --- | --- | --- | --- |
//! | V0 | 1.8 to 1.10 | a list (1.8: one entry per device) | none |
//! | V1 | 1.11 to 1.19 | a list | FNV-1a over the printed value |
//! | V2 | 1.20 and later | lists by NUMA node | FNV-1a over the printed value |
//!
//! [`read`] takes V1 and V2, which differ only in [`Devices`]; [`v0::read`] takes what came before. [`write()`]
//! writes V2.

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

/// The content of a checkpoint. `None` is Go's `nil`: it prints as `null`, and checksums tell it from empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkpoint {
    /// Who holds what, in the order of the file.
    pub entries: Option<Vec<Entry>>,
    /// Each resource's healthy devices at the time of writing. On restore only the names count.
    pub registered: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// What one container holds of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Entry {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name in its pod.
    pub container: String,
    /// The extended resource.
    pub resource: String,
    /// The devices.
    pub devices: Devices,
    /// The plugin's answer to `Allocate`: a serialized `v1beta1.ContainerAllocateResponse`, see [`response`].
    /// Kept as the bytes of the file, with fields that we do not know.
    pub alloc_resp: Option<Vec<u8>>,
}

/// An entry's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// By NUMA node; -1 means that the plugin named none. A device on several nodes is listed under each.
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
    /// Every device once, in the order of the file.
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

    /// Keeps the devices that `keep` accepts.
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

    /// By NUMA node. Devices without topology go to node 0, where kubelets 1.20 to 1.30 put those of a V1 file.
    pub fn into_per_numa(self) -> Self {
        match self {
            Self::Flat(ids) => Self::PerNuma(Some(BTreeMap::from([(0, ids)]))),
            per_numa @ Self::PerNuma(_) => per_numa,
        }
    }
}

impl Entry {
    /// Pod, container and resource: the key under which a kubelet keeps an entry.
    pub fn holder(&self) -> String {
        format!("{}/{} {}", self.pod_uid, self.container, self.resource)
    }

    /// The holder and its devices, for people.
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
    /// The checkpoint with its devices by NUMA node, as V2 wants them.
    pub fn into_per_numa(mut self) -> Self {
        for entry in self.entries.iter_mut().flatten() {
            entry.devices = std::mem::take(&mut entry.devices).into_per_numa();
        }
        self
    }
}

#[cfg(test)]
mod tests;
