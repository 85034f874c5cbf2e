//! A kubelet's file, as pods.
//!
//! The file says who holds what, and nothing else: no names, no specs. So it is the truth about allocations only.
//! A pod that we know keeps its name, its source and its fingerprint, and an allocation that is the same keeps
//! what the file cannot say.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::dra::claims::ClaimKey;
use devlet_core::{
    Allocation, ClaimUid, ContainerName, DeviceId, DeviceView, Pod, PodMetadata, PodName, PodUid,
    ResourceName, Source,
};
use devlet_kubelet_files::device_plugin::response::{self, InvalidResponse};
use devlet_kubelet_files::device_plugin::{Checkpoint, Devices, Entry};
use devlet_kubelet_files::salvage::{INCOMPLETE_POD, UNKNOWN_POD};
use devlet_kubelet_files::{ChecksumMismatch, Document, Format, ReadError, Role};

use super::answer::recorded;
use super::claims_file::ImportedClaims;

/// Why a file is not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableFile {
    /// It does not decode.
    #[error(transparent)]
    Syntax(#[from] ReadError),
    /// It decodes, but is not what was written.
    #[error(transparent)]
    Checksum(#[from] ChecksumMismatch),
    /// It is another one of the kubelet's files.
    #[error("it is a file about DRA claims, not about devices")]
    OtherKind,
    /// It is another one of the kubelet's files.
    #[error("it is a file about devices of plugins, not about DRA claims")]
    DevicesNotClaims,
    /// It is another one of the kubelet's files, and nothing of it is taken in.
    #[error("it is a file about the health of DRA devices, which drivers report anew")]
    Health,
    /// `devlet checkpoint repair` made it from a damaged one.
    #[error("it is the rest of a damaged file, of which parts were lost")]
    Incomplete,
    /// It does not say that there are none, either.
    #[error("there is no list of claims in it")]
    NoClaims,
}

/// What came out of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportReport {
    /// What the file was written in.
    pub format: Format,
    /// What is different from before.
    pub difference: Difference,
    /// Devices that more than one pod holds now. All of them keep it; it is given to nobody else.
    pub doubly_held: Vec<DeviceView>,
    /// Allocations whose answer does not decode. The devices are held, but add nothing to the container.
    pub undecodable: Vec<Undecodable>,
    /// Entries that a later one for the same container and resource, or claim, replaces, as in a kubelet.
    pub replaced_entries: usize,
    /// Claims that were not known before.
    pub claims: Vec<ClaimUid>,
    /// Whether the file is the rest of a damaged one. Then pods are not admitted again because of it.
    pub incomplete: bool,
    /// Claims that were left out, because pods hold another one of the same name, or because they are being unprepared.
    pub left_out: Vec<ClaimKey>,
}

/// Which pods are different, by UID.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Difference {
    /// New ones.
    pub added: Vec<PodUid>,
    /// Those that hold nothing any longer.
    pub removed: Vec<PodUid>,
    /// Those that hold something else.
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
    /// What is wrong with it.
    pub reason: InvalidResponse,
}

/// A file of either kind that has been read.
pub(crate) enum Content {
    Devices(Imported),
    Claims(ImportedClaims),
}

/// Reads a file that may have any name: what it is follows from its content.
pub(crate) fn read(bytes: &[u8]) -> Result<Content, UnreadableFile> {
    let file = devlet_kubelet_files::read(bytes, None)?;
    let format = file.format;
    match file.verified()? {
        Document::DevicePlugin(checkpoint) => Ok(Content::Devices(Imported::new(format, checkpoint))),
        document => ImportedClaims::new(format, document).map(Content::Claims),
    }
}

/// A file that has been read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Imported {
    pub(crate) format: Format,
    pub(crate) pods: BTreeMap<PodUid, Vec<Allocation>>,
    pub(crate) resources: BTreeSet<ResourceName>,
    pub(crate) undecodable: Vec<Undecodable>,
    pub(crate) replaced_entries: usize,
    /// Whether the file is the rest of a damaged one.
    pub(crate) is_incomplete: bool,
}

/// Whether a pod stands for one whose UID could not be read. It keeps its devices until an operator forgets it.
pub(crate) fn is_unknown_pod(uid: &PodUid) -> bool {
    uid.as_str().starts_with(UNKNOWN_POD)
}

impl Imported {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, UnreadableFile> {
        let file = devlet_kubelet_files::read(bytes, Some(Role::DevicePlugin))?;
        let format = file.format;
        let Document::DevicePlugin(checkpoint) = file.verified()? else {
            return Err(UnreadableFile::OtherKind);
        };
        let imported = Self::new(format, checkpoint);
        match imported.is_incomplete {
            true => Err(UnreadableFile::Incomplete),
            false => Ok(imported),
        }
    }

    fn new(format: Format, checkpoint: Checkpoint) -> Self {
        let mut imported = Self {
            format,
            pods: BTreeMap::new(),
            resources: BTreeSet::new(),
            undecodable: Vec::new(),
            replaced_entries: 0,
            is_incomplete: false,
        };
        let checkpoint = checkpoint.into_per_numa();
        let registered = checkpoint.registered.into_iter().flatten();
        imported.resources.extend(registered.map(|(name, _)| name.into()));
        for entry in checkpoint.entries.into_iter().flatten() {
            imported.add(entry);
        }
        imported
    }

    fn add(&mut self, entry: Entry) {
        if entry.pod_uid == INCOMPLETE_POD {
            self.is_incomplete = true;
            return;
        }
        let pod = PodUid::from(entry.pod_uid);
        let mut devices: Vec<DeviceId> = entry.devices.ids().into_iter().map(DeviceId::from).collect();
        devices.sort();
        let Devices::PerNuma(nodes) = entry.devices else {
            return;
        };
        let on_node = |ids: Option<Vec<String>>| {
            let ids: BTreeSet<DeviceId> = ids.into_iter().flatten().map(DeviceId::from).collect();
            ids.into_iter().collect()
        };
        let nodes = nodes.into_iter().flatten();
        let raw = entry.alloc_resp.unwrap_or_default();
        let undecodable = response::decode(&raw).err();
        let allocation = Allocation {
            container: entry.container.into(),
            kind: None,
            resource: entry.resource.into(),
            devices,
            nodes: nodes.map(|(node, ids)| (node, on_node(ids))).collect(),
            answer: recorded(raw),
            pre_start_required: false,
        };
        let (container, resource) = (allocation.container.clone(), allocation.resource.clone());
        self.resources.insert(resource.clone());
        let allocations = self.pods.entry(pod.clone()).or_default();
        match find(allocations, &container, &resource) {
            Some(place) => {
                allocations[place] = allocation;
                self.replaced_entries += 1;
                self.undecodable.retain(|each| {
                    (&each.pod, &each.container, &each.resource) != (&pod, &container, &resource)
                });
            }
            None => allocations.push(allocation),
        }
        self.undecodable.extend(undecodable.map(|reason| Undecodable {
            pod,
            container,
            resource,
            reason,
        }));
    }

    /// The pods to be written, given those that there are. Nothing is said about pods that the file does not have.
    pub(crate) fn against<'a>(&self, known: impl Fn(&PodUid) -> Option<&'a Pod>) -> (Vec<Pod>, Difference) {
        let mut difference = Difference::default();
        let mut changed = Vec::new();
        for (uid, allocations) in &self.pods {
            match known(uid) {
                None => {
                    difference.added.push(uid.clone());
                    changed.push(Self::new_pod(uid, allocations));
                }
                Some(pod) => {
                    let merged = merge(pod, allocations);
                    if merged != *pod {
                        difference.changed.push(uid.clone());
                        changed.push(merged);
                    }
                }
            }
        }
        (changed, difference)
    }

    /// A pod of which only its allocations are known.
    pub(crate) fn new_pod(uid: &PodUid, allocations: &[Allocation]) -> Pod {
        Pod {
            uid: uid.clone(),
            name: PodName::default(),
            metadata: PodMetadata::default(),
            source: Source::Imported,
            fingerprint: 0,
            before_reboot: false,
            containers: Vec::new(),
            allocations: allocations.to_vec(),
            claims: Vec::new(),
            claim_uses: Vec::new(),
        }
    }

    pub(crate) fn report(&self, difference: Difference, doubly_held: Vec<DeviceView>) -> ImportReport {
        ImportReport {
            format: self.format,
            difference,
            doubly_held,
            undecodable: self.undecodable.clone(),
            replaced_entries: self.replaced_entries,
            claims: Vec::new(),
            incomplete: self.is_incomplete,
            left_out: Vec::new(),
        }
    }
}

fn find(allocations: &[Allocation], container: &ContainerName, resource: &ResourceName) -> Option<usize> {
    allocations
        .iter()
        .position(|each| each.container == *container && each.resource == *resource)
}

/// The pod with the allocations of a file: in its own order as far as it has them.
fn merge(pod: &Pod, allocations: &[Allocation]) -> Pod {
    let mut merged = Vec::with_capacity(allocations.len());
    for ours in &pod.allocations {
        if let Some(place) = find(allocations, &ours.container, &ours.resource) {
            let theirs = &allocations[place];
            // Neither is in the file.
            merged.push(Allocation {
                kind: ours.kind,
                pre_start_required: ours.pre_start_required,
                ..theirs.clone()
            });
        }
    }
    for theirs in allocations {
        if find(&pod.allocations, &theirs.container, &theirs.resource).is_none() {
            merged.push(theirs.clone());
        }
    }
    Pod {
        allocations: merged,
        ..pod.clone()
    }
}
