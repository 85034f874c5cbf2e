//! Checks how a kubelet would load a file.
//!
//! The reference is a kubelet of 1.37. "Fine" means that it loads everything that the document contains. Content
//! that it would reject, drop or replace is a [`Problem`]. A document that it reads as an empty state by accident
//! is one too. Content that it accepts silently but that is unusual is a warning.

use std::collections::HashMap;

use crate::device_plugin::response::{self, InvalidResponse};
use crate::device_plugin::v0::Generation;
use crate::device_plugin::{self, Entry};
use crate::dra::{Claim, envelope, flat, health};
use crate::file::{Checksum, ChecksumMismatch, File, ReadError};
use crate::{Document, Format, Role, read};

/// The result for one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The format of the file, if it could be detected.
    pub format: Option<Format>,
    /// Why a kubelet of 1.37 would not load all of it; empty when it would.
    pub problems: Vec<Problem>,
    /// Unusual content that a kubelet accepts silently.
    pub warnings: Vec<String>,
    /// If there are problems: the older kubelets that would load all of the file.
    pub loaded_by_older: Option<&'static str>,
}

impl Verdict {
    /// Returns `true` if a kubelet of 1.37 loads everything that the document contains.
    pub fn is_fine(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Something that a kubelet of 1.37 would not load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// It does not decode.
    #[error("refused: {0}")]
    Unreadable(ReadError),
    /// Its name belongs to another file.
    #[error("refused: this is the content of a {content}, not of a {role}")]
    OtherFile {
        /// The role that its name gives.
        role: Role,
        /// The role that its content gives.
        content: Role,
    },
    /// It decodes, but its checksum is wrong.
    #[error("refused: {0}")]
    Corrupted(ChecksumMismatch),
    /// It is sound, but kubelets no longer read its format.
    #[error("refused, because the format is too old: {error}")]
    TooOld {
        /// The kubelet's error text.
        error: String,
    },
    /// One entry would be dropped, and its devices would become free.
    #[error(
        "entry {index} ({holder}) is dropped and its devices become free: the plugin's answer does not decode, {reason}"
    )]
    DroppedEntry {
        /// Index in the list, from 0.
        index: usize,
        /// Pod, container and resource.
        holder: String,
        /// Why the answer does not decode.
        reason: InvalidResponse,
    },
    /// A later entry or claim has the same key.
    #[error("{what} {index} ({key}) is replaced by {what} {by}")]
    Replaced {
        /// "entry" or "claim".
        what: &'static str,
        /// Index in the list, from 0.
        index: usize,
        /// The key of both.
        key: String,
        /// Index of the one that takes effect.
        by: usize,
    },
    /// A kubelet would read it as an empty state.
    #[error("read as empty, although {0}")]
    EmptyByAccident(Accident),
    /// It loads, and the kubelet panics at the next health report.
    #[error("loaded, and then the kubelet panics at the next health report: {place} is null")]
    Panics {
        /// The null value.
        place: String,
    },
}

/// Why a document is read as an empty state by accident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Accident {
    /// The document is `{}`.
    #[error("it is an empty object (only a dra_health_state may be one; give that name or --role)")]
    EmptyObject,
    /// The document is `null`.
    #[error("it is null")]
    Null,
    /// It has an old format without `Data`, and the checksum of an empty state of today.
    #[error("Data is missing in it")]
    NoData,
    /// The list of claims is missing.
    #[error("the list of claims is missing: there is no Data in it, or no ClaimInfoStateList in Data")]
    NoClaimList,
}

/// Checks a file. `role` follows from its name, see [`Role::of_file_name`].
pub fn verify(bytes: &[u8], role: Option<Role>) -> Verdict {
    if let Some(accident) = accident(bytes, role) {
        let problems = vec![Problem::EmptyByAccident(accident)];
        return Verdict {
            format: None,
            problems,
            warnings: Vec::new(),
            loaded_by_older: None,
        };
    }
    match read(bytes, role) {
        Ok(file) => {
            let mut verdict = check(&file, bytes);
            let content = file.format.role();
            if let Some(role) = role.filter(|role| *role != content) {
                verdict.problems.insert(0, Problem::OtherFile { role, content });
                verdict.loaded_by_older = None;
            }
            verdict
        }
        Err(error) => {
            let problems = vec![Problem::Unreadable(error)];
            Verdict {
                format: None,
                problems,
                warnings: Vec::new(),
                loaded_by_older: None,
            }
        }
    }
}

/// Detects documents without any key of a known format.
fn accident(bytes: &[u8], role: Option<Role>) -> Option<Accident> {
    let text = bytes.trim_ascii();
    let is_empty_object = text.strip_prefix(b"{").and_then(|rest| rest.strip_suffix(b"}"));
    match role {
        Some(Role::DevicePlugin | Role::DraHealth) => None,
        None | Some(Role::DraManager) if text == b"null" => Some(Accident::Null),
        None | Some(Role::DraManager) => is_empty_object
            .filter(|inner| inner.trim_ascii().is_empty())
            .map(|_| Accident::EmptyObject),
    }
}

fn check(file: &File<Document>, bytes: &[u8]) -> Verdict {
    let mut verdict = Verdict {
        format: Some(file.format),
        problems: Vec::new(),
        warnings: file.warnings.lines(),
        loaded_by_older: None,
    };
    verdict.problems.extend(problem_of_old_format(file.format, bytes));
    let is_accident = matches!(verdict.problems[..], [Problem::EmptyByAccident(_)]);
    if let Some(checksum) = file
        .checksum
        .filter(|checksum| !checksum.is_valid() && !is_accident)
    {
        verdict
            .problems
            .push(Problem::Corrupted(ChecksumMismatch(checksum)));
        return verdict;
    }
    match file.unverified() {
        Document::DevicePlugin(checkpoint) => check_devices(checkpoint, file.format, bytes, &mut verdict),
        Document::DraFlat(checkpoint) => check_flat(checkpoint, bytes, &mut verdict),
        Document::DraEnvelope(checkpoint) => check_envelope(checkpoint, &mut verdict),
        Document::DraHealth(state) => check_health(state, &mut verdict),
    }
    verdict
}

/// Returns the problem of a format that a kubelet of 1.37 no longer reads. The kubelet reads it as a broken file
/// of today's format, or as an empty one if the checksum happens to be right.
fn problem_of_old_format(format: Format, bytes: &[u8]) -> Option<Problem> {
    const CORRUPTED: &str = "checkpoint is corrupted";
    let text_of = |error: &ReadError| error.kubelet_text().unwrap_or(CORRUPTED).to_owned();
    let is_valid = |checksum: Option<Checksum>| checksum.is_some_and(Checksum::is_valid);
    match format {
        Format::DevicePluginV0 | Format::DevicePluginV1 => {
            let error = match device_plugin::read_strict_v2(bytes) {
                Err(error) => text_of(&error),
                Ok(checksum) if checksum.is_valid() => {
                    return Some(Problem::EmptyByAccident(Accident::NoData));
                }
                Ok(_) => CORRUPTED.to_owned(),
            };
            Some(Problem::TooOld { error })
        }
        Format::DraFlat1_27 | Format::DraFlat1_28 | Format::DraFlat1_30 => {
            let error = match envelope::read(bytes) {
                Err(error) => text_of(&error),
                Ok(file) if is_valid(file.checksum) => {
                    return Some(Problem::EmptyByAccident(Accident::NoData));
                }
                Ok(_) => CORRUPTED.to_owned(),
            };
            let error = format!("{error} (the kubelet does not start)");
            Some(Problem::TooOld { error })
        }
        Format::DevicePluginV2 | Format::DraEnvelopeV1 | Format::DraHealth => None,
    }
}

fn check_devices(
    checkpoint: &device_plugin::Checkpoint,
    format: Format,
    bytes: &[u8],
    verdict: &mut Verdict,
) {
    let entries = checkpoint.entries.as_deref().unwrap_or_default();
    let replaced = replaced_entries(entries);
    verdict.problems.reserve_exact(replaced.len());
    for (index, entry) in entries.iter().enumerate() {
        if let Err(reason) = response::decode(entry.alloc_resp.as_deref().unwrap_or_default()) {
            verdict.problems.push(Problem::DroppedEntry {
                index,
                holder: entry.holder(),
                reason,
            });
        } else if let Some(&by) = replaced.get(&index) {
            let key = entry.holder();
            verdict.problems.push(Problem::Replaced {
                what: "entry",
                index,
                key,
                by,
            });
        }
    }
    // Kubelets up to 1.30 do not check the UTF-8 of answers; everything else they dropped and replaced too.
    let is_utf8 = |problem: &Problem| {
        matches!(
            problem,
            Problem::DroppedEntry {
                reason: InvalidResponse::InvalidUtf8 { .. },
                ..
            }
        )
    };
    let is_old = |problem: &Problem| matches!(problem, Problem::TooOld { .. });
    if !verdict.problems.is_empty() && verdict.problems.iter().all(|each| is_utf8(each) || is_old(each)) {
        verdict.loaded_by_older = match format {
            Format::DevicePluginV0 => match device_plugin::v0::generation(bytes) {
                Generation::Single => Some("1.8"),
                Generation::Listed => None,
                Generation::Registered => Some("1.9 and 1.10"),
            },
            Format::DevicePluginV1 => Some(
                "1.11 to 1.19, 1.20 from 1.20.14 on, 1.21 from 1.21.8 on, 1.22 from 1.22.5 on, and 1.23 to 1.30",
            ),
            _ => Some("1.20 to 1.30, which do not check the UTF-8 of answers"),
        };
    }
    warn_of_shared_devices(entries, verdict);
}

/// Returns the entries that a later one with the same key replaces: their index, and that of the last such entry.
/// Entries with answers that do not decode do not replace others.
fn replaced_entries(entries: &[Entry]) -> HashMap<usize, usize> {
    let decodes = |entry: &Entry| response::decode(entry.alloc_resp.as_deref().unwrap_or_default()).is_ok();
    let mut last = HashMap::new();
    for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| decodes(entry)) {
        last.insert(entry.key(), index);
    }
    let replaced_by = |(index, entry): (usize, &Entry)| {
        let &by = last.get(&entry.key())?;
        (by > index).then_some((index, by))
    };
    entries.iter().enumerate().filter_map(replaced_by).collect()
}

/// Warns of devices that two pods hold. Such a file loads, but two pods must never share a device. Within one pod
/// it is normal: an init container passes devices on.
fn warn_of_shared_devices(entries: &[Entry], verdict: &mut Verdict) {
    let mut holders: HashMap<(&str, &str), &str> = HashMap::new();
    for entry in entries {
        for id in entry.devices.ids() {
            let first = *holders.entry((&entry.resource, id)).or_insert(&entry.pod_uid);
            if first != entry.pod_uid && verdict.warnings.len() < 100 {
                let (resource, other) = (&entry.resource, &entry.pod_uid);
                verdict.warnings.push(format!(
                    "device {id} of {resource} is held by two pods, {first} and {other}"
                ));
            }
        }
    }
}

fn check_flat(checkpoint: &flat::Checkpoint, bytes: &[u8], verdict: &mut Verdict) {
    verdict.loaded_by_older = match flat::loaded_by(bytes).as_slice() {
        [Format::DraFlat1_27, Format::DraFlat1_28, Format::DraFlat1_30] => Some("1.27 to 1.30"),
        [Format::DraFlat1_27, Format::DraFlat1_28] => Some("1.27 to 1.29"),
        [Format::DraFlat1_27, Format::DraFlat1_30] => Some("1.27 and 1.30"),
        [Format::DraFlat1_27] => Some("1.27"),
        [Format::DraFlat1_28, Format::DraFlat1_30] => Some("1.28 to 1.30"),
        [Format::DraFlat1_28] => Some("1.28 and 1.29"),
        [Format::DraFlat1_30] => Some("1.30"),
        _ => None,
    };
    let claims = checkpoint.claims.as_deref().unwrap_or_default();
    let keys = claims
        .iter()
        .map(|claim| format!("{}/{}", claim.namespace, claim.name));
    check_replaced_claims(&keys.collect::<Vec<_>>(), verdict);
    // These kubelets concatenate name and namespace without a separator.
    let keys = claims
        .iter()
        .map(|claim| format!("{}{}", claim.name, claim.namespace));
    if !replaced_claims(&keys.collect::<Vec<_>>()).is_empty() {
        verdict.loaded_by_older = None;
    }
}

fn check_envelope(checkpoint: &envelope::Checkpoint, verdict: &mut Verdict) {
    if !checkpoint.has_claim_list {
        verdict
            .problems
            .push(Problem::EmptyByAccident(Accident::NoClaimList));
        return;
    }
    if checkpoint.kind != envelope::KIND || checkpoint.api_version != envelope::API_VERSION {
        let (kind, version) = (&checkpoint.kind, &checkpoint.api_version);
        let (ours, our_version) = (envelope::KIND, envelope::API_VERSION);
        verdict.warnings.push(format!(
            "kind {kind:?} and apiVersion {version:?} are ignored and replaced by {ours:?} and {our_version:?} \
             at the next write"
        ));
    }
    let claims = checkpoint.claims.as_deref().unwrap_or_default();
    check_replaced_claims(&claims.iter().map(Claim::key).collect::<Vec<_>>(), verdict);
}

/// Returns the claims that a later one with the same key replaces.
fn replaced_claims(keys: &[String]) -> Vec<(usize, usize)> {
    let last: HashMap<&str, usize> = keys
        .iter()
        .enumerate()
        .map(|(index, key)| (key.as_str(), index))
        .collect();
    let replaced_by = |(index, key): (usize, &String)| {
        let &by = last.get(key.as_str())?;
        (by > index).then_some((index, by))
    };
    keys.iter().enumerate().filter_map(replaced_by).collect()
}

fn check_replaced_claims(keys: &[String], verdict: &mut Verdict) {
    let replaced = replaced_claims(keys);
    verdict.problems.reserve_exact(replaced.len());
    for (index, by) in replaced {
        verdict.problems.push(Problem::Replaced {
            what: "claim",
            index,
            key: keys[index].clone(),
            by,
        });
    }
    if verdict
        .problems
        .iter()
        .any(|problem| matches!(problem, Problem::Replaced { .. }))
    {
        verdict.loaded_by_older = None;
    }
}

fn check_health(state: &health::HealthState, verdict: &mut Verdict) {
    let Some(drivers) = &state.drivers else {
        verdict.problems.push(Problem::Panics {
            place: "the document".into(),
        });
        return;
    };
    for (name, _) in drivers.iter().filter(|(_, driver)| driver.devices.is_none()) {
        verdict.problems.push(Problem::Panics {
            place: format!("Devices of driver {name}"),
        });
    }
}
