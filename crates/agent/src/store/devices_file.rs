//! The kubelet's `kubelet_internal_checkpoint`: read as pods, and written as a mirror.
//!
//! The file has allocations, and neither names nor specs of pods. A known pod keeps its name, source and fingerprint, and
//! an unchanged allocation keeps what the file does not contain.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::{
    Allocation, ContainerName, DeviceId, DeviceView, Pod, PodMetadata, PodName, PodUid, ResourceName, Source,
};
use devlet_kubelet_files::device_plugin::response;
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_kubelet_files::salvage::{INCOMPLETE_POD, UNKNOWN_POD};
use devlet_kubelet_files::{Document, Format, Role};

use super::answer::recorded;
use super::import_report::{Difference, ImportReport, Undecodable, UnreadableFile};
use super::load_error::LoadError;
use super::tables::Snapshot;

/// The content of a file about devices.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ImportedDevices {
    pub(crate) format: Format,
    pub(crate) pods: BTreeMap<PodUid, Vec<Allocation>>,
    pub(crate) resources: BTreeSet<ResourceName>,
    pub(crate) undecodable: Vec<Undecodable>,
    pub(crate) replaced_entries: usize,
    /// The file is the readable rest of a damaged one.
    pub(crate) is_incomplete: bool,
}

/// Returns `true` for a placeholder of a pod with an unreadable UID. It keeps its devices until an operator forgets it.
pub(crate) fn is_unknown_pod(uid: &PodUid) -> bool {
    uid.as_str().starts_with(UNKNOWN_POD)
}

impl ImportedDevices {
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

    pub(super) fn new(format: Format, checkpoint: Checkpoint) -> Self {
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

    /// Returns the pods to write, given the known ones. Pods that the file does not have are not included.
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

    /// Returns a pod of which only the allocations are known.
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

/// Returns the pod with the allocations of the file. Known allocations keep the pod's order.
fn merge(pod: &Pod, allocations: &[Allocation]) -> Pod {
    let mut merged = Vec::with_capacity(allocations.len());
    for ours in &pod.allocations {
        if let Some(place) = find(allocations, &ours.container, &ours.resource) {
            let theirs = &allocations[place];
            // The file contains neither of these.
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

/// Returns the content of the mirror. Entries are in the order of pods, containers and resources.
pub(crate) fn mirror(
    snapshot: &Snapshot,
    lists: &BTreeMap<ResourceName, Option<Arc<DeviceList>>>,
) -> Result<String, LoadError> {
    let mut entries = Vec::new();
    snapshot.pods(|uid, record| {
        let start = entries.len();
        entries.extend(record.allocations.into_iter().map(|allocation| {
            let nodes = allocation.devices_by_node().into_iter();
            Entry {
                pod_uid: uid.to_owned(),
                devices: Devices::PerNuma(Some(nodes.map(|(node, ids)| (node, Some(ids))).collect())),
                container: allocation.container,
                resource: allocation.resource,
                alloc_resp: Some(allocation.answer),
            }
        }));
        if let Some(pod) = entries.get_mut(start..) {
            pod.sort_by(|one, other| {
                (&one.container, &one.resource).cmp(&(&other.container, &other.resource))
            });
        }
    })?;
    let registered = lists.iter().map(|(name, list)| {
        let healthy = list.iter().flat_map(|list| list.healthy_ids());
        let texts = healthy.map(|id| id.as_str().to_owned());
        (name.as_str().to_owned(), Some(texts.collect()))
    });
    Ok(device_plugin::write(&Checkpoint {
        // A kubelet writes null instead of an empty list, too.
        entries: (!entries.is_empty()).then_some(entries),
        registered: Some(registered.collect()),
    }))
}
