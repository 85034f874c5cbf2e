//! `dra_manager_state`: prepared claims with their pods and drivers.
//!
//! | format | written by | outside | checksum |
//! | --- | --- | --- | --- |
//! | flat | 1.27 to 1.30 | `version`, `entries`, `checksum` | FNV-1a over the printed value |
//! | envelope | 1.31 and later | `Data` (a document in a string), `Checksum` | CRC-32 over that string |
//!
//! The flat format has three dialects with the same keys but different printed values, see [`flat`].
//! `dra_health_state` is a separate file in the same directory, see [`health`].

pub mod envelope;
pub mod flat;
pub mod health;
mod scan;

use std::collections::{BTreeMap, BTreeSet};

/// A claim in the format of kubelets since 1.31. `None` is Go's `nil`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claim {
    /// The ResourceClaim's UID.
    pub uid: String,
    pub name: String,
    pub namespace: String,
    /// UIDs of the pods that use it.
    pub pods: Option<BTreeSet<String>>,
    /// The drivers that allocated devices to it.
    pub drivers: Option<BTreeMap<String, Driver>>,
}

impl Claim {
    /// Returns namespace and name: the key under which a kubelet keeps a claim.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns `true` if a driver has prepared a device for it.
    pub(crate) fn holds_devices(&self) -> bool {
        let drivers = self.drivers.iter().flat_map(BTreeMap::values);
        drivers
            .flat_map(|driver| &driver.devices)
            .any(|devices| !devices.is_empty())
    }

    /// Describes the claim for display.
    pub(crate) fn describe(&self) -> String {
        describe_claim(&self.key(), self.pods.as_ref())
    }
}

/// Describes a claim and its pods.
fn describe_claim(key: &str, pods: Option<&BTreeSet<String>>) -> String {
    let pods: Vec<&str> = pods.into_iter().flatten().map(String::as_str).collect();
    format!("claim {key} of pods {}", pods.join(", "))
}

/// One driver's part of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Driver {
    /// The devices that the driver prepared; `None` until it has answered.
    pub devices: Option<Vec<Device>>,
    /// Node operations that the driver opted out of. Since 1.37; omitted if empty.
    pub skip_node_operations: Option<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Device {
    /// The pool that the device is from.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
    /// ID of the share, for a shared device. Since 1.35.
    pub share_id: Option<String>,
    /// The claim's requests that it satisfies; empty means all of them.
    pub requests: Option<Vec<String>>,
    /// CDI devices that the container runtime injects.
    pub cdi_devices: Option<Vec<String>>,
}

#[cfg(test)]
mod tests;
