//! A kubelet's file that would take devices or claims from pods on record, or give their devices to other pods, too.
//!
//! Such a file may be the word of a kubelet that was in charge meanwhile, an old copy, or a forgery, and only an operator
//! can tell. So it is copied, no new pod is admitted, and the devices of both sides stay held, until the operator imports
//! the copy or forgets it. Pods that the file adds or changes, and pods that hold the same devices, are not answered.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::dra::claims::{Claim, PreparationState};
use devlet_core::{Allocation, Blocked, ClaimUid, DeviceId, Pod, PodUid, ResourceName};

use super::claims_file::ImportedClaims;
use super::database::Contents;
use super::import::{Content, Imported};
use super::record::{ContestedRecord, InvalidRecord, Names, PodBeforeRecord, PodRecord, encode_pod};

/// More losses or pods than this are counted, not named.
const MAX_NAMED: usize = 5;

/// Where a file contradicts the record, in words. Empty if the file only adds.
#[derive(Debug, Default)]
pub(crate) struct Disagreement {
    /// Devices and claims that it takes from pods on record.
    lost: Vec<String>,
    /// Devices of pods on record that it gives to other pods, too.
    doubled: Vec<String>,
}

impl Disagreement {
    pub(crate) fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.doubled.is_empty()
    }
}

/// Compares a file with the record.
pub(crate) fn disagreement(contents: &Contents, content: &Content) -> Disagreement {
    let pods = contents.pods.values();
    match content {
        Content::Devices(imported) => Disagreement {
            lost: pods.flat_map(|pod| lost_devices(pod, imported)).collect(),
            doubled: doubled_devices(contents, imported),
        },
        Content::Claims(imported) => Disagreement {
            lost: pods
                .flat_map(|pod| lost_claims(contents, pod, imported))
                .collect(),
            doubled: Vec::new(),
        },
    }
}

fn devices(allocations: &[Allocation]) -> impl Iterator<Item = (&ResourceName, &DeviceId)> {
    let each = allocations.iter();
    each.flat_map(|each| each.devices.iter().map(|id| (&each.resource, id)))
}

/// Devices that a pod on record keeps, and that the file gives to another pod as well.
fn doubled_devices(contents: &Contents, imported: &Imported) -> Vec<String> {
    let theirs = |uid: &PodUid| imported.pods.get(uid).map_or(&[][..], Vec::as_slice);
    let mut kept = BTreeMap::new();
    for pod in contents.pods.values() {
        let in_file: BTreeSet<_> = devices(theirs(&pod.uid)).collect();
        let ours = devices(&pod.allocations).filter(|device| in_file.contains(device));
        kept.extend(ours.map(|device| (device, pod)));
    }
    let mut doubled = Vec::new();
    for (uid, allocations) in &imported.pods {
        let ours = contents
            .pods
            .get(uid)
            .map_or(&[][..], |pod| pod.allocations.as_slice());
        let ours: BTreeSet<_> = devices(ours).collect();
        for device in devices(allocations).filter(|device| !ours.contains(device)) {
            if let Some(holder) = kept.get(&device).filter(|holder| holder.uid != *uid) {
                let (resource, id) = device;
                doubled.push(format!("{resource} {id} of {} to pod {uid}", named(holder)));
            }
        }
    }
    doubled
}

/// The pods that are not answered while a file is contested: those that it adds or changes, and those that hold the same
/// devices.
pub(crate) fn open_pods(contents: &Contents, before: &[PodBeforeRecord]) -> Vec<String> {
    let before: BTreeSet<&str> = before.iter().map(|each| each.uid.as_str()).collect();
    let is_before = |pod: &&Pod| before.contains(pod.uid.as_str());
    let open = contents.pods.values().filter(is_before);
    let open: BTreeSet<_> = open.flat_map(|pod| devices(&pod.allocations)).collect();
    let shares =
        |pod: &&Pod| is_before(pod) || devices(&pod.allocations).any(|device| open.contains(&device));
    let pods = contents.pods.values().filter(shares);
    pods.map(|pod| pod.uid.to_string()).collect()
}

fn lost_devices(pod: &Pod, imported: &Imported) -> Vec<String> {
    let theirs = imported.pods.get(&pod.uid).map_or(&[][..], Vec::as_slice);
    let has = |ours: &Allocation, id: &DeviceId| {
        let same =
            |theirs: &&Allocation| theirs.container == ours.container && theirs.resource == ours.resource;
        theirs
            .iter()
            .filter(same)
            .any(|theirs| theirs.devices.contains(id))
    };
    let lost = pod.allocations.iter().flat_map(|ours| {
        let lost = ours.devices.iter().filter(|id| !has(ours, id));
        lost.map(|id| format!("{} {id} of {}", ours.resource, named(pod)))
    });
    lost.collect()
}

fn lost_claims(contents: &Contents, pod: &Pod, imported: &ImportedClaims) -> Vec<String> {
    let listed = imported.pods.get(&pod.uid).map_or(&[][..], Vec::as_slice);
    let is_lost = |uid: &ClaimUid| {
        !listed.iter().any(|claim| claim.uid == *uid)
            || contents.claims.get(uid).is_some_and(|ours| {
                let theirs = imported.claims.get(uid);
                theirs.is_none_or(|theirs| loses_devices(ours, theirs))
            })
    };
    let lost = pod.claims.iter().filter(|claim| is_lost(&claim.uid));
    lost.map(|claim| format!("ResourceClaim {} of {}", claim.key, named(pod)))
        .collect()
}

/// Whether a claim in a file lacks devices that are prepared on record.
fn loses_devices(ours: &Claim, theirs: &Claim) -> bool {
    let prepared = ours.preparations.iter();
    let mut prepared = prepared.filter(|(_, each)| each.state == PreparationState::Prepared);
    prepared.any(|(driver, ours)| {
        let theirs = theirs.preparations.get(driver);
        ours.devices.iter().any(|device| {
            let is_same = |other: &devlet_core::dra::claims::PreparedDevice| {
                (&other.pool, &other.device, &other.share) == (&device.pool, &device.device, &device.share)
            };
            !theirs.is_some_and(|theirs| theirs.devices.iter().any(is_same))
        })
    })
}

fn named(pod: &Pod) -> String {
    match pod.name.name.as_str() {
        "" => format!("pod {}", pod.uid),
        name => format!("pod {}/{name} ({})", pod.name.namespace, pod.uid),
    }
}

/// The difference between a file and the record, in words.
pub(crate) fn difference(contents: &Contents, content: &Content, disagreement: &Disagreement) -> String {
    let pods: BTreeSet<&PodUid> = match content {
        Content::Devices(imported) => imported.pods.keys().collect(),
        Content::Claims(imported) => imported.pods.keys().collect(),
    };
    let new = pods.into_iter().filter(|uid| !contents.pods.contains_key(*uid));
    let new: Vec<String> = new.map(|uid| format!("pod {uid}")).collect();
    let Disagreement { lost, doubled } = disagreement;
    let mut parts = Vec::new();
    if !lost.is_empty() {
        parts.push(format!("it lacks {}", list(lost)));
    }
    if !doubled.is_empty() {
        parts.push(format!("it also gives {}", list(doubled)));
    }
    if !new.is_empty() {
        parts.push(format!("it has {} that is not on record", list(&new)));
    }
    parts.join(", and ")
}

fn list(texts: &[String]) -> String {
    let mut named = texts.get(..MAX_NAMED).unwrap_or(texts).join(", ");
    if texts.len() > MAX_NAMED {
        named.push_str(&format!(" and {} more", texts.len() - MAX_NAMED));
    }
    named
}

/// Lets pods hold the devices of a file besides their own. Returns the pods as they were.
pub(crate) fn hold_both(contents: &mut Contents, imported: &Imported) -> Vec<PodBeforeRecord> {
    let mut before = Vec::new();
    for (uid, theirs) in &imported.pods {
        let record = |pod: Option<&Pod>| PodBeforeRecord {
            uid: uid.to_string(),
            pod: pod.map(|pod| encode_pod(pod).1),
        };
        match contents.pods.get_mut(uid) {
            None => {
                before.push(record(None));
                let pod = Imported::new_pod(uid, theirs);
                contents.pods.insert(uid.clone(), pod);
            }
            Some(pod) => {
                let mut both = pod.clone();
                theirs.iter().for_each(|theirs| add(&mut both, theirs));
                if both != *pod {
                    before.push(record(Some(pod)));
                    *pod = both;
                }
            }
        }
    }
    before
}

/// Adds the devices of an allocation to those of a pod.
fn add(pod: &mut Pod, theirs: &Allocation) {
    let is_same =
        |ours: &&mut Allocation| ours.container == theirs.container && ours.resource == theirs.resource;
    let Some(ours) = pod.allocations.iter_mut().find(is_same) else {
        pod.allocations.push(theirs.clone());
        return;
    };
    let new: BTreeSet<&DeviceId> = theirs
        .devices
        .iter()
        .filter(|id| !ours.devices.contains(id))
        .collect();
    for (node, ids) in &theirs.nodes {
        let ids: Vec<DeviceId> = ids.iter().filter(|id| new.contains(id)).cloned().collect();
        match ours.nodes.iter_mut().find(|(other, _)| other == node) {
            _ if ids.is_empty() => {}
            Some((_, known)) => known.extend(ids),
            None => ours.nodes.push((*node, ids)),
        }
    }
    ours.nodes.iter_mut().for_each(|(_, ids)| ids.sort());
    ours.nodes.sort();
    ours.devices.extend(new.into_iter().cloned());
    ours.devices.sort();
}

impl ContestedRecord {
    /// Why no pod is admitted until an operator chooses.
    pub(crate) fn blocked(&self) -> Blocked {
        Blocked::ContestedFile {
            file: self.file.clone(),
            difference: self.difference.clone(),
            pods: self.pods.iter().map(|uid| uid.as_str().into()).collect(),
        }
    }

    /// The pods as they were before the file; `None` for those that were not on record.
    pub(crate) fn pods_before(&self) -> Result<Vec<(PodUid, Option<Pod>)>, InvalidRecord> {
        let mut names = Names::default();
        let before = self.before.iter().map(|before| {
            let pod = before.pod.as_deref();
            let pod = pod.map(|bytes| PodRecord::decode_from(bytes)?.into_pod(&before.uid, &mut names));
            Ok((PodUid::from(before.uid.as_str()), pod.transpose()?))
        });
        before.collect()
    }

    /// Undoes what [`hold_both`] did. Pods that are gone since stay gone.
    pub(crate) fn undo(&self, contents: &mut Contents) -> Result<(), InvalidRecord> {
        for (uid, before) in self.pods_before()? {
            match (before, contents.pods.get_mut(&uid)) {
                (Some(before), Some(pod)) => pod.allocations = before.allocations,
                (None, Some(pod)) => {
                    pod.allocations.clear();
                    if pod.claims.is_empty() {
                        contents.pods.remove(&uid);
                    }
                }
                (_, None) => {}
            }
        }
        Ok(())
    }
}
