//! Extracts the sound parts of a damaged file.
//!
//! The result is written in the newest format, and every damaged part is listed with the reason.
//!
//! A device that is held according to a readable part of the file stays held. An entry with a damaged answer is kept without
//! the answer. One with an unreadable pod is kept under the UID of an unknown pod ([`UNKNOWN_POD`]). Devices of parts that
//! cannot be read at all are not known. So the result of every damaged file has one more entry, of the pod
//! [`INCOMPLETE_POD`]. A kubelet loads it as an entry of a pod that does not exist. devlet's import does not admit pods
//! again because of such a file: an operator has to decide that (`devlet forget`).
//!
//! A damaged claim with a readable device is kept as far as it can be read. An unreadable UID or name is generated
//! ([`UNKNOWN_CLAIM`]), and an unknown pod holds the claim if its pods are unreadable. Claims of the formats before 1.31, which
//! do not name devices, are kept whole or not at all.
//!
//! Broken syntax does not end the reading. `device_plugin::scan`, `dra::scan` and `decode::find_whole` look for the keys of
//! each entry or claim and read it from there.

use std::collections::{BTreeMap, HashSet};

use crate::convert::{Remark, convert_document};
use crate::device_plugin::{self, response};
use crate::dra::{Claim, envelope, flat};
use crate::file::{Checksum, ReadError, Salvaged};
use crate::go_json;
use crate::kind::{self, FileKind};
use crate::{Document, Format, Role};

/// The sound part of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Salvage {
    /// The format of the damaged file.
    pub found: Format,
    /// The parts that are kept.
    pub kept: Document,
    /// The file to write, in the newest format.
    pub text: String,
    /// The format of `text`.
    pub format: Format,
    /// The damaged parts.
    pub dropped: Vec<Dropped>,
    /// `true` if the file was damaged: it may have had more content than this.
    pub incomplete: bool,
    /// `true` if an answer of a plugin was dropped.
    pub answers_lost: bool,
    /// The checksum, if the format has one.
    pub checksum: Option<Checksum>,
    /// Differences between the newest format and the old one.
    pub remarks: Vec<Remark>,
}

impl Salvage {
    /// Returns `true` if the file was damaged and no part of it could be kept.
    pub fn is_lost(&self) -> bool {
        let kept = match &self.kept {
            Document::DevicePlugin(checkpoint) => {
                checkpoint.entries.iter().flatten().next().is_some()
                    || checkpoint.registered.iter().flatten().next().is_some()
            }
            Document::DraFlat(checkpoint) => checkpoint.claims.iter().flatten().next().is_some(),
            Document::DraEnvelope(checkpoint) => checkpoint.claims.iter().flatten().next().is_some(),
            Document::DraHealth(_) => false,
        };
        !kept && !self.is_undamaged()
    }

    /// Returns `true` if content of the file is missing in the result, or may be missing.
    pub fn has_losses(&self) -> bool {
        self.incomplete || self.answers_lost
    }

    /// Returns `true` if the file was sound.
    pub fn is_undamaged(&self) -> bool {
        self.dropped.is_empty() && self.checksum.is_none_or(Checksum::is_valid)
    }
}

/// A part that could not be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// The part.
    pub what: String,
    pub reason: String,
}

/// Why no part can be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SalvageError {
    /// The format could not be detected.
    #[error(transparent)]
    Unrecognised(#[from] ReadError),
    /// It does not hold any devices, and is not a sound empty state either.
    #[error(
        "there is nothing in it that could be saved: it is neither a damaged state nor a sound empty one"
    )]
    NothingInIt,
    /// It is a health file.
    #[error(
        "a health file holds nothing that is worth saving: delete it, drivers report health again as soon as \
         they are connected"
    )]
    NotWorthIt,
}

/// Keeps the sound parts. `role` follows from the file's name, see [`Role::of_file_name`].
pub fn salvage(bytes: &[u8], role: Option<Role>) -> Result<Salvage, SalvageError> {
    let mut is_mixed = false;
    let mut answers_lost = false;
    let has_damage;
    let role = role.or_else(|| Role::of_words(bytes));
    let (found, kept, checksum, dropped) = match kind::of(bytes, role)? {
        FileKind::DevicePluginV0 => {
            let salvaged = device_plugin::v0::salvage(bytes);
            let mut dropped = losses(&salvaged);
            has_damage = !dropped.is_empty();
            let kept = keep_entries(salvaged.content, has_damage, &mut dropped, &mut answers_lost);
            (
                Format::DevicePluginV0,
                Document::DevicePlugin(kept),
                None,
                dropped,
            )
        }
        FileKind::DevicePlugin => {
            let salvaged = device_plugin::salvage(bytes);
            let mut dropped = losses(&salvaged);
            has_damage = !dropped.is_empty();
            let (checkpoint, checksum, mixed) = salvaged.content;
            let empty = checkpoint.entries.iter().flatten().next().is_none()
                && checkpoint.registered.iter().flatten().next().is_none();
            if empty && dropped.is_empty() && !checksum.is_valid() {
                return Err(SalvageError::NothingInIt);
            }
            is_mixed = mixed;
            let is_flat =
                |entry: &device_plugin::Entry| matches!(entry.devices, device_plugin::Devices::Flat(_));
            let has_v1_entries = checkpoint.entries.iter().flatten().any(is_flat);
            let found = if has_v1_entries {
                Format::DevicePluginV1
            } else {
                Format::DevicePluginV2
            };
            let is_damaged = has_damage || !checksum.is_valid();
            let kept = keep_entries(checkpoint, is_damaged, &mut dropped, &mut answers_lost);
            (found, Document::DevicePlugin(kept), Some(checksum), dropped)
        }
        FileKind::DraFlat => {
            let salvaged = flat::salvage(bytes);
            let mut dropped = losses(&salvaged);
            has_damage = !dropped.is_empty();
            let (mut checkpoint, checksum, format) = salvaged.content;
            keep_last(&mut checkpoint.claims, &mut dropped, |claim: &flat::FlatClaim| {
                format!("{}/{}", claim.namespace, claim.name)
            });
            (format, Document::DraFlat(checkpoint), Some(checksum), dropped)
        }
        FileKind::DraEnvelope => {
            let salvaged = envelope::salvage(bytes);
            let mut dropped = losses(&salvaged);
            has_damage = !dropped.is_empty();
            let (mut checkpoint, checksum) = salvaged.content;
            if !checkpoint.has_claim_list && dropped.is_empty() {
                return Err(SalvageError::NothingInIt);
            }
            if has_damage || !checksum.is_valid() {
                hold_claims(&mut checkpoint.claims, &mut dropped);
            } else {
                keep_last(&mut checkpoint.claims, &mut dropped, Claim::key);
            }
            (
                Format::DraEnvelopeV1,
                Document::DraEnvelope(checkpoint),
                Some(checksum),
                dropped,
            )
        }
        FileKind::DraHealth => return Err(SalvageError::NotWorthIt),
    };
    let incomplete = has_damage || checksum.is_some_and(|checksum| !checksum.is_valid());
    let mut kept = kept;
    if incomplete {
        mark_incomplete(&mut kept);
    }
    let converted = convert_document(&kept, found).map_err(|_| SalvageError::NotWorthIt)?;
    if incomplete {
        unmark(&mut kept);
    }
    let (text, format, mut remarks) = (converted.text, converted.format, converted.remarks);
    if is_mixed {
        remarks.insert(0, Remark::MixedFormats);
    }
    Ok(Salvage {
        found,
        kept,
        text,
        format,
        dropped,
        incomplete,
        answers_lost,
        checksum,
        remarks,
    })
}

fn losses<T>(salvaged: &Salvaged<T>) -> Vec<Dropped> {
    let go_json::DroppedList { list, left_out: more } = &salvaged.dropped;
    let mut dropped = Vec::with_capacity(list.len());
    dropped.extend(list.iter().map(|unit| Dropped {
        what: unit.what.clone(),
        reason: unit.reason.clone(),
    }));
    if *more > 0 {
        let what = format!("{more} more of these");
        dropped.push(Dropped {
            what,
            reason: "too many to list one by one".into(),
        });
    }
    for (error, what) in [
        (&salvaged.outside, ""),
        (&salvaged.broken_off, "everything from here on: "),
    ] {
        if let Some(ReadError::Syntax { problem, at } | ReadError::Type { problem, at }) = error {
            let path = if at.path.is_empty() {
                "the document"
            } else {
                &at.path
            };
            let what = format!("{what}{path} (line {}, column {})", at.line, at.column);
            dropped.push(Dropped {
                what,
                reason: problem.clone(),
            });
        }
    }
    dropped
}

/// Prefix of the UIDs of pods with an unreadable UID.
pub const UNKNOWN_POD: &str = "devlet-unknown-pod-";

/// UID of the pod or claim that marks a file as the rest of a damaged one.
pub const INCOMPLETE_POD: &str = "devlet-incomplete-file";

/// Prefix of the UIDs and names of claims with an unreadable UID or name.
pub const UNKNOWN_CLAIM: &str = "devlet-unknown-claim-";

fn mark_incomplete(document: &mut Document) {
    if let Document::DevicePlugin(checkpoint) = document {
        let nodes = BTreeMap::from([(-1, Some(vec!["parts-were-lost".to_owned()]))]);
        checkpoint
            .entries
            .get_or_insert_default()
            .push(device_plugin::Entry {
                pod_uid: INCOMPLETE_POD.into(),
                container: "repair".into(),
                resource: "devlet.dev/incomplete".into(),
                devices: device_plugin::Devices::PerNuma(Some(nodes)),
                alloc_resp: None,
            });
    }
    // The result of a flat file is an envelope, too.
    if let Document::DraFlat(checkpoint) = document {
        checkpoint.claims.get_or_insert_default().push(flat::FlatClaim {
            uid: INCOMPLETE_POD.into(),
            name: INCOMPLETE_POD.into(),
            namespace: "devlet".into(),
            ..flat::FlatClaim::default()
        });
    }
    if let Document::DraEnvelope(checkpoint) = document {
        checkpoint.claims.get_or_insert_default().push(Claim {
            uid: INCOMPLETE_POD.into(),
            name: INCOMPLETE_POD.into(),
            namespace: "devlet".into(),
            pods: None,
            drivers: None,
        });
    }
}

/// Removes the mark.
fn unmark(document: &mut Document) {
    match document {
        Document::DevicePlugin(checkpoint) => drop(checkpoint.entries.as_mut().and_then(Vec::pop)),
        Document::DraEnvelope(checkpoint) => drop(checkpoint.claims.as_mut().and_then(Vec::pop)),
        Document::DraFlat(checkpoint) => drop(checkpoint.claims.as_mut().and_then(Vec::pop)),
        Document::DraHealth(_) => {}
    }
}

/// Drops answers that do not decode, and gives unreadable pods a UID. Of several entries with the same key one takes
/// effect. In a damaged file the same pod keeps holding the devices of the others, in a container of another name.
fn keep_entries(
    mut checkpoint: device_plugin::Checkpoint,
    has_damage: bool,
    dropped: &mut Vec<Dropped>,
    answers_lost: &mut bool,
) -> device_plugin::Checkpoint {
    let Some(entries) = &mut checkpoint.entries else {
        return checkpoint;
    };
    if has_damage {
        // Written by an earlier repair. The result gets a new one.
        entries.retain(|entry| entry.pod_uid != INCOMPLETE_POD);
    }
    let holding = entries.iter_mut().filter(|entry| !entry.devices.ids().is_empty());
    for (number, entry) in (1..).zip(holding) {
        if entry.pod_uid.is_empty() {
            entry.pod_uid = format!("{UNKNOWN_POD}{number}");
        }
        // Two of them must not replace each other.
        if entry.container.is_empty() {
            entry.container = format!("unknown-container-{number}");
        }
    }
    let answers: Vec<Option<String>> = entries
        .iter()
        .map(|entry| response::decode(entry.alloc_resp.as_deref().unwrap_or_default()).err())
        .map(|error| error.map(|error| error.to_string()))
        .collect();
    let has_damage = has_damage || answers.iter().any(Option::is_some);
    let mut decisions = decide(entries, &answers, has_damage);
    for ((entry, answer), decision) in entries.iter_mut().zip(answers).zip(&mut decisions) {
        let described = (answer.is_some() || *decision != Decision::Keep).then(|| entry.describe());
        let reason = match decision {
            Decision::Keep => None,
            Decision::Drop => Some("a later entry for the same container counts".to_owned()),
            Decision::Rename { container, devices } => {
                let reason = format!(
                    "another entry for the same container counts; its devices stay held, by container {container}"
                );
                entry.container = std::mem::take(container);
                entry
                    .devices
                    .retain(|id| devices.binary_search_by(|kept| kept.as_str().cmp(id)).is_ok());
                Some(reason)
            }
        };
        let Some(described) = described else { continue };
        dropped.push(match answer {
            Some(problem) => {
                entry.alloc_resp = None;
                *answers_lost = true;
                let reason = reason.unwrap_or_else(|| "its devices stay held, without the answer".into());
                Dropped {
                    what: format!("the plugin's answer for {described}"),
                    reason: format!("{problem}; {reason}"),
                }
            }
            None => Dropped {
                what: described,
                reason: reason.unwrap_or_default(),
            },
        });
    }
    let mut decisions = decisions.into_iter();
    entries.retain(|_| decisions.next() != Some(Decision::Drop));
    checkpoint
}

/// How an entry is handled.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decision {
    Keep,
    Drop,
    /// Another entry has the same key.
    Rename {
        container: String,
        /// The devices that no other entry of the pod holds, sorted.
        devices: Vec<String>,
    },
}

/// Picks the entry that takes effect for each key: the last one with a sound answer. `answers` has the problem of each
/// answer.
fn decide(entries: &[device_plugin::Entry], answers: &[Option<String>], has_damage: bool) -> Vec<Decision> {
    let mut decisions = vec![Decision::Keep; entries.len()];
    let mut order: Vec<usize> = (0..entries.len()).rev().collect();
    order.sort_by_key(|index| answers[*index].is_some());
    let mut keys = HashSet::new();
    let others: Vec<usize> = order
        .into_iter()
        .filter(|index| !keys.insert(entries[*index].key()))
        .collect();
    if !has_damage {
        others
            .into_iter()
            .for_each(|index| decisions[index] = Decision::Drop);
        return decisions;
    }
    // In a damaged file it is not known which of them a kubelet would load: all of their devices stay held.
    let mut held = HashSet::new();
    if !others.is_empty() {
        let is_other: HashSet<usize> = others.iter().copied().collect();
        for (_, entry) in entries
            .iter()
            .enumerate()
            .filter(|(index, _)| !is_other.contains(index))
        {
            let ids = entry.devices.ids().into_iter();
            held.extend(ids.map(|id| (entry.pod_uid.as_str(), entry.resource.as_str(), id)));
        }
    }
    for index in others {
        let entry = &entries[index];
        let ids = entry.devices.ids().into_iter();
        let mut devices: Vec<String> = ids
            .filter(|id| held.insert((&entry.pod_uid, &entry.resource, id)))
            .map(str::to_owned)
            .collect();
        devices.sort_unstable();
        let named = |number: usize| format!("{}-entry-{number}", entry.container);
        let is_free = |name: &String| !keys.contains(&(&*entry.pod_uid, name, &*entry.resource));
        let free = (index + 1..).step_by(entries.len()).map(named).find(is_free);
        decisions[index] = match free {
            Some(container) if !devices.is_empty() => Decision::Rename { container, devices },
            _ => Decision::Drop,
        };
    }
    decisions
}

/// Generates unreadable names, UIDs and pods of claims in a damaged file, so that no claim replaces another.
///
/// Of several claims with one name or UID the last takes effect. The devices of the others stay held under another name.
fn hold_claims(claims: &mut Option<Vec<Claim>>, dropped: &mut Vec<Dropped>) {
    let Some(claims) = claims else { return };
    // Written by an earlier repair. The result gets a new one.
    claims.retain(|claim| claim.uid != INCOMPLETE_POD);
    let mut names: HashSet<String> = claims.iter().map(|claim| claim.name.clone()).collect();
    names.extend(claims.iter().map(|claim| claim.uid.clone()));
    let mut numbers = 1..;
    let mut unknown = || {
        let named = numbers.by_ref().map(|number| format!("{UNKNOWN_CLAIM}{number}"));
        let free = named.into_iter().find(|name| !names.contains(name));
        free.unwrap_or_default()
    };
    for claim in claims.iter_mut().filter(|claim| claim.holds_devices()) {
        let has_identity = !claim.uid.is_empty() && !claim.name.is_empty() && !claim.namespace.is_empty();
        let pods = claim.pods.get_or_insert_default();
        let has_pods = !pods.remove("") && !pods.is_empty();
        if has_identity && has_pods {
            continue;
        }
        let name = unknown();
        if !has_pods {
            pods.insert(name.replace(UNKNOWN_CLAIM, &format!("{UNKNOWN_POD}of-claim-")));
        }
        if !has_identity {
            claim.namespace = "devlet".into();
            if claim.uid.is_empty() {
                claim.uid.clone_from(&name);
            }
            claim.name = name;
        }
    }
    let (mut keys, mut uids) = (HashSet::new(), HashSet::new());
    let mut is_replaced = vec![false; claims.len()];
    for (claim, is_replaced) in claims.iter_mut().zip(&mut is_replaced).rev() {
        let (is_new, is_new_uid) = (keys.insert(claim.key()), uids.insert(claim.uid.clone()));
        if is_new && is_new_uid {
            continue;
        }
        let what = format!("claim {}", claim.key());
        let reason = if claim.holds_devices() {
            let name = unknown();
            claim.namespace = "devlet".into();
            claim.name.clone_from(&name);
            if !is_new_uid {
                claim.uid.clone_from(&name);
            }
            format!(
                "a later claim of the same name or UID counts; its devices stay held, by claim devlet/{name}"
            )
        } else {
            *is_replaced = true;
            "a later claim of the same name or UID counts".into()
        };
        dropped.push(Dropped { what, reason });
    }
    let mut is_replaced = is_replaced.into_iter();
    claims.retain(|_| is_replaced.next() == Some(false));
}

/// Removes the claims that a later one replaces.
fn keep_last<T>(claims: &mut Option<Vec<T>>, dropped: &mut Vec<Dropped>, key: impl Fn(&T) -> String) {
    let Some(claims) = claims else { return };
    let keys: Vec<String> = claims.iter().map(&key).collect();
    let mut is_last = vec![false; keys.len()];
    let mut seen = HashSet::new();
    for (key, is_last) in keys.iter().zip(&mut is_last).rev() {
        *is_last = seen.insert(key.as_str());
    }
    dropped.reserve_exact(is_last.iter().filter(|is_last| !**is_last).count());
    let mut index = 0;
    claims.retain(|_| {
        let kept = is_last[index];
        if !kept {
            let reason = "a later claim of the same name counts".into();
            let what = format!("claim {}", keys[index]);
            dropped.push(Dropped { what, reason });
        }
        index += 1;
        kept
    });
}
