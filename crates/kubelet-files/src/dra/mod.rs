//! `dra_manager_state`: which claims are prepared here, for which pods, by which drivers.
//!
//! | format | written by | outside | checksum |
//! | --- | --- | --- | --- |
//! | flat | 1.27 to 1.30 | `version`, `entries`, `checksum` | FNV-1a over the printed value |
//! | envelope | 1.31 and later | `Data` (a document in a string), `Checksum` | CRC-32 over that string |
//!
//! The flat format has three dialects with the same keys but different printed values, see [`flat`].
//! `dra_health_state` stands beside it, see [`health`].

pub mod envelope;
pub mod flat;
pub mod health;
mod scan;

use std::collections::{BTreeMap, BTreeSet};

/// A claim as kubelets since 1.31 keep it. `None` is Go's `nil`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claim {
    /// The ResourceClaim's UID.
    pub uid: String,
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// UIDs of the pods that use it.
    pub pods: Option<BTreeSet<String>>,
    /// The drivers with a part in its allocation.
    pub drivers: Option<BTreeMap<String, Driver>>,
}

impl Claim {
    /// Namespace and name: the key under which a kubelet keeps a claim.
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

    /// For people.
    pub(crate) fn describe(&self) -> String {
        describe_claim(&self.key(), self.pods.as_ref())
    }
}

/// A claim and its pods.
fn describe_claim(key: &str, pods: Option<&BTreeSet<String>>) -> String {
    let pods: Vec<&str> = pods.into_iter().flatten().map(String::as_str).collect();
    format!("claim {key} of pods {}", pods.join(", "))
}

/// One driver's part of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Driver {
    /// What the driver prepared; `None` until it has answered.
    pub devices: Option<Vec<Device>>,
    /// Node operations that the driver does not want; since 1.37, left out when empty.
    pub skip_node_operations: Option<Vec<String>>,
}

/// A prepared device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Device {
    /// The pool that the device is from.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
    /// Which share of the device, since 1.35.
    pub share_id: Option<String>,
    /// The claim's requests that it satisfies; empty means all of them.
    pub requests: Option<Vec<String>>,
    /// What the container runtime has to inject.
    pub cdi_devices: Option<Vec<String>>,
}

#[cfg(test)]
mod tests;
