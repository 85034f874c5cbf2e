//! Released versions of the CDI specification, and the lowest one that a spec needs.
//!
//! A runtime rejects a whole spec file with an unknown version, so a spec should state the lowest version that
//! has all of its fields: [`Spec::minimum_version`].

use std::fmt;
use std::str::FromStr;

use crate::spec::{ContainerEdits, Spec};

/// A released version of the CDI specification that spec files may state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// The first supported version.
    V0_3_0,
    /// Mounts have a type.
    V0_4_0,
    /// Device nodes have a host path, and device names may begin with a digit.
    V0_5_0,
    /// Specs and devices have annotations, and classes may contain a dot.
    V0_6_0,
    /// Intel RDT and additional group IDs.
    V0_7_0,
    /// No change to the content of specs.
    V0_8_0,
    /// No change to the content of specs.
    V1_0_0,
    /// Network devices, and `schemata` and `enableMonitoring` of Intel RDT.
    V1_1_0,
}

impl Version {
    /// All versions, from the oldest to the newest.
    pub const ALL: [Self; 8] = [
        Self::V0_3_0,
        Self::V0_4_0,
        Self::V0_5_0,
        Self::V0_6_0,
        Self::V0_7_0,
        Self::V0_8_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];

    /// The oldest supported version.
    pub const OLDEST: Self = Self::V0_3_0;

    /// The newest released version.
    pub const NEWEST: Self = Self::V1_1_0;

    /// Returns the text for `cdiVersion`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_4_0 => "0.4.0",
            Self::V0_5_0 => "0.5.0",
            Self::V0_6_0 => "0.6.0",
            Self::V0_7_0 => "0.7.0",
            Self::V0_8_0 => "0.8.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that is not a supported version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CDI version {version:?} is not one of 0.3.0, 0.4.0, 0.5.0, 0.6.0, 0.7.0, 0.8.0, 1.0.0, 1.1.0")]
pub struct UnknownVersion {
    /// The text as given.
    pub version: String,
}

impl FromStr for Version {
    type Err = UnknownVersion;

    /// Accepts a `v` before the number, as the reference implementation does.
    fn from_str(text: &str) -> Result<Self, UnknownVersion> {
        let number = text.strip_prefix('v').unwrap_or(text);
        let known = Self::ALL.into_iter().find(|version| version.as_str() == number);
        known.ok_or_else(|| UnknownVersion {
            version: text.to_owned(),
        })
    }
}

impl Spec {
    /// Returns the lowest version that has every feature this spec uses. Ignores the spec's `version`.
    pub fn minimum_version(&self) -> Version {
        let of_paths = self
            .devices
            .iter()
            .map(|device| of_paths(&device.container_edits))
            .max();
        self.version_seen_by_runtimes()
            .max(of_paths.unwrap_or(Version::OLDEST))
    }

    /// Returns the version that runtimes require. They overlook host paths and mount types of all devices but the
    /// last, because the reference implementation takes the address of a loop variable.
    pub(crate) fn version_seen_by_runtimes(&self) -> Version {
        let of_spec = [
            (!self.annotations.is_empty()).then_some(Version::V0_6_0),
            self.kind
                .split_once('/')
                .filter(|(_, class)| class.contains('.'))
                .map(|_| Version::V0_6_0),
            Some(of_features(&self.container_edits)),
            Some(of_paths(&self.container_edits)),
            self.devices
                .last()
                .map(|device| of_paths(&device.container_edits)),
        ];
        let of_devices = self.devices.iter().flat_map(|device| {
            [
                device
                    .name
                    .starts_with(|c: char| c.is_ascii_digit())
                    .then_some(Version::V0_5_0),
                (!device.annotations.is_empty()).then_some(Version::V0_6_0),
                Some(of_features(&device.container_edits)),
            ]
        });
        of_spec
            .into_iter()
            .chain(of_devices)
            .flatten()
            .max()
            .unwrap_or(Version::OLDEST)
    }
}

fn of_features(edits: &ContainerEdits) -> Version {
    let newest_rdt = edits
        .intel_rdt
        .as_ref()
        .is_some_and(|rdt| rdt.schemata.is_some() || rdt.enable_monitoring);
    if newest_rdt || !edits.net_devices.is_empty() {
        Version::V1_1_0
    } else if edits.intel_rdt.is_some() || !edits.additional_gids.is_empty() {
        Version::V0_7_0
    } else {
        Version::OLDEST
    }
}

fn of_paths(edits: &ContainerEdits) -> Version {
    if edits.device_nodes.iter().any(|node| !node.host_path.is_empty()) {
        Version::V0_5_0
    } else if edits.mounts.iter().any(|mount| !mount.mount_type.is_empty()) {
        Version::V0_4_0
    } else {
        Version::OLDEST
    }
}

#[cfg(test)]
mod tests;
