//! A kubelet's file that would take devices or claims from pods on record, or give their devices to other pods, too.
//!
//! Such a file may be the word of a kubelet that was in charge meanwhile, an old copy, or a forgery, and only an operator
//! can tell. So it is copied, no new pod is admitted, and the devices of both sides stay held, until the operator imports
//! the copy or forgets it. Pods that the file adds or changes, and pods that hold the same devices, are not answered.
//!
//! A contest ends in no other way. A further file that is found meanwhile is contested, too, unless it has exactly what is
//! on record: the devices of all sides stay held. Of several files of one kind at most one can be adopted, so the operator
//! forgets the others first. A forgotten file releases only devices that are neither on record, an import since then
//! included, nor in another contested file.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::{Allocation, Blocked, ContainerName, DeviceId, Pod, PodClaim, PodUid, ResourceName};

use super::claims_file::ImportedClaims;
use super::database::{Contents, Hash};
use super::import::{Content, Imported};
use super::record::{ContestedRecord, InvalidRecord, Names, PodRecord, SidesRecord, encode_pod};

/// More losses or pods than this are counted, not named.
const MAX_NAMED: usize = 5;

/// Where a file contradicts the record, in words. Empty if the file only adds.
#[derive(Debug, Default)]
pub(crate) struct Disagreement {
    /// Devices and claims that it takes from pods on record.
    lost: Vec<String>,
    /// Devices of pods on record that it gives to other pods, too.
    doubled: Vec<String>,
    /// Claims on record to which it gives other devices.
    other_devices: Vec<String>,
}

impl Disagreement {
    pub(crate) fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.doubled.is_empty() && self.other_devices.is_empty()
    }
}

/// Compares a file with the record.
pub(crate) fn disagreement(contents: &Contents, content: &Content) -> Disagreement {
    let pods = contents.pods.values();
    match content {
        Content::Devices(imported) => Disagreement {
            lost: pods.flat_map(|pod| lost_devices(pod, imported)).collect(),
            doubled: doubled_devices(contents, imported),
            other_devices: Vec::new(),
        },
        Content::Claims(imported) => Disagreement {
            lost: pods
                .flat_map(|pod| lost_claims(contents, pod, imported))
                .collect(),
            doubled: Vec::new(),
            other_devices: claims_with_other_devices(contents, imported),
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
pub(crate) fn unanswered(contents: &Contents, changed: &BTreeSet<PodUid>) -> Vec<PodUid> {
    let is_changed = |pod: &&Pod| changed.contains(&pod.uid);
    let open = contents.pods.values().filter(is_changed);
    let open: BTreeSet<_> = open.flat_map(|pod| devices(&pod.allocations)).collect();
    let shares =
        |pod: &&Pod| is_changed(pod) || devices(&pod.allocations).any(|device| open.contains(&device));
    let pods = contents.pods.values().filter(shares);
    pods.map(|pod| pod.uid.clone()).collect()
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
    let lost = pod.claims.iter().filter_map(|claim| {
        let what = match contents
            .claims
            .get(&claim.uid)
            .zip(imported.claims.get(&claim.uid))
        {
            _ if !listed.iter().any(|each| each.uid == claim.uid) => "ResourceClaim",
            Some((ours, theirs)) if ours.has_more_than(theirs) => "devices of ResourceClaim",
            _ => return None,
        };
        Some(format!("{what} {} of {}", claim.key, named(pod)))
    });
    lost.collect()
}

/// Claims of which the record and the file each have a device of one driver that the other lacks.
fn claims_with_other_devices(contents: &Contents, imported: &ImportedClaims) -> Vec<String> {
    let both = imported
        .claims
        .iter()
        .filter_map(|(uid, theirs)| Some((contents.claims.get(uid)?, theirs)));
    let other = both.filter(|(ours, theirs)| ours.conflicts_with(theirs));
    other
        .map(|(ours, _)| format!("ResourceClaim {}", ours.key))
        .collect()
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
    let Disagreement {
        lost,
        doubled,
        other_devices,
    } = disagreement;
    let mut parts = Vec::new();
    if !lost.is_empty() {
        parts.push(format!("it lacks {}", list(lost)));
    }
    if !doubled.is_empty() {
        parts.push(format!("it also gives {}", list(doubled)));
    }
    if !other_devices.is_empty() {
        parts.push(format!("it has other devices for {}", list(other_devices)));
    }
    if !new.is_empty() {
        parts.push(format!("it has {} that is not on record", list(&new)));
    }
    if parts.is_empty() {
        parts.push("it agrees with all that is held, but another file does not".to_owned());
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

/// A kubelet's file that disagrees with the record, until an operator chooses.
///
/// While it is open, each of its pods holds the devices of all sides: those on record, and those in each contested file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Contest {
    /// Where a copy of the file is.
    pub(crate) file: String,
    pub(crate) hash: Hash,
    /// The difference between the file and the record, in words.
    pub(crate) difference: String,
    /// Pods that are not answered until then: those that the file adds or changes, and those that hold the same devices.
    pub(crate) unanswered: Vec<PodUid>,
    /// Pods of a file about devices.
    pub(crate) pods: BTreeMap<PodUid, Sides>,
}

/// The allocations of a pod of a contested file.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Sides {
    /// Without contested files. The same in each contest about the pod.
    pub(crate) on_record: Vec<Allocation>,
    pub(crate) in_file: Vec<Allocation>,
}

impl Contest {
    /// Why no pod is admitted until an operator chooses.
    pub(crate) fn blocked(&self) -> Blocked {
        Blocked::ContestedFile {
            file: self.file.clone(),
            difference: self.difference.clone(),
            pods: self.unanswered.clone(),
        }
    }

    pub(crate) fn record(&self) -> ContestedRecord {
        let encoded = |uid: &PodUid, allocations: &[Allocation]| match allocations {
            [] => Vec::new(),
            some => encode_pod(&Imported::new_pod(uid, some)).1,
        };
        let sides = self.pods.iter().map(|(uid, sides)| SidesRecord {
            uid: uid.to_string(),
            on_record: encoded(uid, &sides.on_record),
            in_file: encoded(uid, &sides.in_file),
        });
        ContestedRecord {
            file: self.file.clone(),
            hash: self.hash.to_vec(),
            difference: self.difference.clone(),
            sides: sides.collect(),
            pods: self.unanswered.iter().map(PodUid::to_string).collect(),
        }
    }
}

impl TryFrom<ContestedRecord> for Contest {
    type Error = InvalidRecord;

    fn try_from(record: ContestedRecord) -> Result<Self, InvalidRecord> {
        let mut names = Names::default();
        let mut decoded = |uid: &str, bytes: &[u8]| match bytes {
            [] => Ok(Vec::new()),
            some => {
                let pod = PodRecord::decode_from(some)?.into_pod(uid, &mut names);
                pod.map(|pod| pod.allocations)
            }
        };
        let sides = record.sides.iter().map(|each| {
            let sides = Sides {
                on_record: decoded(&each.uid, &each.on_record)?,
                in_file: decoded(&each.uid, &each.in_file)?,
            };
            Ok((PodUid::from(each.uid.as_str()), sides))
        });
        let pods = sides.collect::<Result<_, InvalidRecord>>()?;
        Ok(Self {
            hash: record
                .hash
                .as_slice()
                .try_into()
                .map_err(|_| InvalidRecord::Length(record.hash.len()))?,
            file: record.file,
            difference: record.difference,
            unanswered: record.pods.into_iter().map(PodUid::from).collect(),
            pods,
        })
    }
}

/// The allocations of a pod with the devices that contested files give it.
pub(crate) fn held<'a>(
    contests: impl IntoIterator<Item = &'a Contest>,
    uid: &PodUid,
    on_record: &[Allocation],
) -> Vec<Allocation> {
    let mut held = on_record.to_vec();
    let sides = contests.into_iter().filter_map(|contest| contest.pods.get(uid));
    let theirs = sides.flat_map(|sides| &sides.in_file);
    theirs.for_each(|theirs| add(&mut held, theirs));
    held
}

/// Notes what a pod holds without contested files.
pub(crate) fn note_on_record<'a>(
    contests: impl IntoIterator<Item = &'a mut Contest>,
    uid: &PodUid,
    on_record: &[Allocation],
) {
    let sides = contests
        .into_iter()
        .filter_map(|contest| contest.pods.get_mut(uid));
    sides.for_each(|sides| sides.on_record = on_record.to_vec());
}

/// What a pod holds without contested files.
fn on_record<'a>(contents: &'a Contents, uid: &PodUid) -> &'a [Allocation] {
    let Some(pod) = contents.pods.get(uid) else {
        return &[];
    };
    let mut contests = contents.around.contested.values();
    let sides = contests.find_map(|contest| contest.pods.get(uid));
    sides.map_or(&pod.allocations, |sides| &sides.on_record)
}

/// Returns `true` if a file has exactly what is on record without contested files.
pub(crate) fn is_on_record(contents: &Contents, content: &Content) -> bool {
    match content {
        Content::Devices(imported) => {
            let ours = contents.pods.keys().map(|uid| (uid, on_record(contents, uid)));
            let theirs = imported.pods.iter().map(|(uid, each)| (uid, each.as_slice()));
            placed_devices(ours) == placed_devices(theirs)
        }
        Content::Claims(imported) => {
            let mut claims = imported.claims.keys();
            let has_pod = |(uid, theirs): (&PodUid, &Vec<PodClaim>)| {
                let ours = contents.pods.get(uid).map_or(&[][..], |pod| &pod.claims);
                let is_known = |theirs: &PodClaim| ours.iter().any(|ours| ours.uid == theirs.uid);
                theirs.iter().all(is_known)
            };
            disagreement(contents, content).is_empty()
                && claims.all(|uid| contents.claims.contains_key(uid))
                && imported.pods.iter().all(has_pod)
        }
    }
}

type Placed<'a> = (&'a PodUid, &'a ContainerName, &'a ResourceName, &'a DeviceId);

fn placed_devices<'a>(pods: impl Iterator<Item = (&'a PodUid, &'a [Allocation])>) -> BTreeSet<Placed<'a>> {
    let mut placed = BTreeSet::new();
    for (uid, allocations) in pods {
        for each in allocations {
            let devices = each.devices.iter();
            placed.extend(devices.map(|id| (uid, &each.container, &each.resource, id)));
        }
    }
    placed
}

/// Lets the pods of a file hold its devices besides their own. Returns the sides of each, and the pods to which the file
/// gives more than what is on record.
pub(crate) fn hold_both(
    contents: &mut Contents,
    imported: &Imported,
) -> (BTreeMap<PodUid, Sides>, BTreeSet<PodUid>) {
    let (mut all, mut changed) = (BTreeMap::new(), BTreeSet::new());
    for (uid, theirs) in &imported.pods {
        let on_record = on_record(contents, uid).to_vec();
        // One that was removed meanwhile is not on record.
        note_on_record(contents.around.contested.values_mut(), uid, &on_record);
        let mut alone = on_record.clone();
        let mut all_sides = held(contents.around.contested.values(), uid, &on_record);
        for theirs in theirs {
            add(&mut alone, theirs);
            add(&mut all_sides, theirs);
        }
        let is_known = contents.pods.contains_key(uid);
        if !is_known || alone != on_record {
            changed.insert(uid.clone());
        }
        let new = || Imported::new_pod(uid, &[]);
        contents.pods.entry(uid.clone()).or_insert_with(new).allocations = all_sides;
        let in_file = theirs.clone();
        all.insert(uid.clone(), Sides { on_record, in_file });
    }
    (all, changed)
}

/// Adds the devices of an allocation to others.
fn add(allocations: &mut Vec<Allocation>, theirs: &Allocation) {
    let is_same =
        |ours: &&mut Allocation| ours.container == theirs.container && ours.resource == theirs.resource;
    let Some(ours) = allocations.iter_mut().find(is_same) else {
        allocations.push(theirs.clone());
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
