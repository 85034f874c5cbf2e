//! The result of importing a kubelet's file, and why a file cannot be imported.

use std::collections::BTreeMap;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::{ClaimUid, ContainerName, DeviceView, Pod, PodUid, ResourceName};
use devlet_kubelet_files::device_plugin::response::InvalidResponse;
use devlet_kubelet_files::{ChecksumMismatch, Format, ReadError};

/// Why a kubelet's file cannot be imported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableFile {
    /// The file does not decode.
    #[error(transparent)]
    Syntax(#[from] ReadError),
    /// The file decodes, but its checksum does not match.
    #[error(transparent)]
    Checksum(#[from] ChecksumMismatch),
    /// A file about claims instead of devices.
    #[error("it is a file about DRA claims, not about devices")]
    OtherKind,
    /// A file about devices instead of claims.
    #[error("it is a file about devices of plugins, not about DRA claims")]
    DevicesNotClaims,
    /// A file about the health of devices, which is not imported.
    #[error("it is a file about the health of DRA devices, which drivers report again")]
    Health,
    /// The output of `devlet checkpoint repair` from a damaged file.
    #[error("it is the rest of a damaged file, of which parts were lost")]
    Incomplete,
    /// The list of claims is missing, which is not the same as an empty one.
    #[error("there is no list of claims in it")]
    NoClaims,
}

/// The result of an import.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportReport {
    /// The format of the file.
    pub format: Format,
    /// The changes to pods.
    pub difference: Difference,
    /// Devices that more than one pod holds now. All of these pods keep the device, and no other pod gets it.
    pub doubly_held: Vec<DeviceView>,
    /// Allocations whose answer does not decode. The devices are held, but add nothing to the container.
    pub undecodable: Vec<Undecodable>,
    /// Entries that a later one for the same container and resource, or claim, replaces, as in a kubelet.
    pub replaced_entries: usize,
    /// Claims that were not known before.
    pub claims: Vec<ClaimUid>,
    /// The file is the readable rest of a damaged one, so it does not end a block.
    pub incomplete: bool,
    /// Claims that were left out, because pods hold another one of the same name, or because they are being unprepared.
    pub left_out: Vec<ClaimKey>,
}

/// Changes to pods, by UID.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Difference {
    /// New pods.
    pub added: Vec<PodUid>,
    /// Pods that hold nothing any longer.
    pub removed: Vec<PodUid>,
    /// Pods that hold something else.
    pub changed: Vec<PodUid>,
}

impl Difference {
    pub(crate) fn between(before: &BTreeMap<PodUid, Pod>, after: &BTreeMap<PodUid, Pod>) -> Self {
        let missing = |one: &BTreeMap<PodUid, Pod>, other: &BTreeMap<PodUid, Pod>| {
            let missing = one.keys().filter(|uid| !other.contains_key(*uid));
            missing.cloned().collect()
        };
        let is_changed = |(uid, pod): &(&PodUid, &Pod)| after.get(*uid).is_some_and(|after| after != *pod);
        Self {
            added: missing(after, before),
            removed: missing(before, after),
            changed: before
                .iter()
                .filter(is_changed)
                .map(|(uid, _)| uid.clone())
                .collect(),
        }
    }
}

/// An allocation whose answer does not decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undecodable {
    /// The pod.
    pub pod: PodUid,
    /// Its container.
    pub container: ContainerName,
    /// The resource.
    pub resource: ResourceName,
    /// The decoding error.
    pub reason: InvalidResponse,
}
