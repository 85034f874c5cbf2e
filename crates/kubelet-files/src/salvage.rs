//! Saving what is sound from a damaged file.
//!
//! An entry or a claim is kept whole or not at all: half an entry would be a guess. What is kept is written in
//! the newest format; what is not is listed, with the reason.

use std::collections::HashSet;

use crate::convert::{Remark, convert_document};
use crate::device_plugin::{self, response};
use crate::dra::{Claim, envelope, flat};
use crate::file::{Checksum, ReadError, Salvaged};
use crate::go_json;
use crate::kind::{self, FileKind};
use crate::verify::replaced_entries;
use crate::{Document, Format, Role};

/// The sound part of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Salvage {
    /// What the file was.
    pub found: Format,
    /// Everything that is kept.
    pub kept: Document,
    /// The file to write, in the newest format.
    pub text: String,
    /// The format of `text`.
    pub format: Format,
    /// What could not be kept.
    pub dropped: Vec<Dropped>,
    /// Whether the checksum was right.
    pub checksum: Option<Checksum>,
    /// What the newest format says otherwise than the old one.
    pub remarks: Vec<Remark>,
}

impl Salvage {
    /// Whether the file was damaged and nothing of it could be kept.
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

    /// Whether there was nothing wrong with the file.
    pub fn is_undamaged(&self) -> bool {
        self.dropped.is_empty() && self.checksum.is_none_or(Checksum::is_valid)
    }
}

/// A part that could not be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Which part.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// Why nothing can be saved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SalvageError {
    /// Nothing says what the file was.
    #[error(transparent)]
    Unrecognised(#[from] ReadError),
    /// It says nothing about anybody, and is not a sound empty state either.
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

/// Saves what is sound. `role` is what the file's name says, see [`Role::of_file_name`].
pub fn salvage(bytes: &[u8], role: Option<Role>) -> Result<Salvage, SalvageError> {
    let mut is_mixed = false;
    let (found, kept, checksum, dropped) = match kind::of(bytes, role)? {
        FileKind::DevicePluginV0 => {
            let salvaged = device_plugin::v0::salvage(bytes);
            let mut dropped = losses(&salvaged);
            let kept = keep_entries(salvaged.content, &mut dropped);
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
            let kept = keep_entries(checkpoint, &mut dropped);
            (found, Document::DevicePlugin(kept), Some(checksum), dropped)
        }
        FileKind::DraFlat => {
            // A checksum that some other kubelet would have written is as good.
            let read = flat::read(bytes).ok().and_then(|file| file.checksum);
            let salvaged = flat::salvage(bytes);
            let mut dropped = losses(&salvaged);
            let (mut checkpoint, checksum, format) = salvaged.content;
            keep_last(&mut checkpoint.claims, &mut dropped, |claim: &flat::FlatClaim| {
                format!("{}/{}", claim.namespace, claim.name)
            });
            let checksum = read.unwrap_or(checksum);
            (format, Document::DraFlat(checkpoint), Some(checksum), dropped)
        }
        FileKind::DraEnvelope => {
            let salvaged = envelope::salvage(bytes);
            let mut dropped = losses(&salvaged);
            let (mut checkpoint, checksum) = salvaged.content;
            if !checkpoint.has_claim_list && dropped.is_empty() {
                return Err(SalvageError::NothingInIt);
            }
            keep_last(&mut checkpoint.claims, &mut dropped, Claim::key);
            (
                Format::DraEnvelopeV1,
                Document::DraEnvelope(checkpoint),
                Some(checksum),
                dropped,
            )
        }
        FileKind::DraHealth => return Err(SalvageError::NotWorthIt),
    };
    let converted = convert_document(&kept, found).map_err(|_| SalvageError::NotWorthIt)?;
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
        checksum,
        remarks,
    })
}

fn losses<T>(salvaged: &Salvaged<T>) -> Vec<Dropped> {
    let (units, more) = &salvaged.dropped;
    let unit = |unit: &go_json::Dropped| Dropped {
        what: unit.what.clone(),
        reason: unit.reason.clone(),
    };
    let mut dropped: Vec<Dropped> = units.iter().map(unit).collect();
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

/// Without the entries that a kubelet would not load either.
fn keep_entries(
    mut checkpoint: device_plugin::Checkpoint,
    dropped: &mut Vec<Dropped>,
) -> device_plugin::Checkpoint {
    let Some(entries) = &mut checkpoint.entries else {
        return checkpoint;
    };
    let replaced = replaced_entries(entries);
    dropped.reserve_exact(replaced.len());
    let mut index = 0;
    entries.retain(|entry| {
        let is_replaced = replaced.contains_key(&index);
        index += 1;
        let reason = match response::decode(entry.alloc_resp.as_deref().unwrap_or_default()) {
            Err(reason) => {
                format!("the plugin's answer does not decode, {reason}; its devices count as free")
            }
            Ok(_) if is_replaced => "a later entry for the same container counts".into(),
            Ok(_) => return true,
        };
        let what = entry.describe();
        dropped.push(Dropped { what, reason });
        false
    });
    checkpoint
}

/// Without the claims that a later one replaces.
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
