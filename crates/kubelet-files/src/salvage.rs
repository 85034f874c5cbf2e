//! Saving what is sound from a damaged file.
//!
//! An entry or a claim is kept whole or not at all: half an entry would be a guess. What is kept is written in
//! the newest format; what is not is listed, with the reason.

use crate::convert::{Remark, convert_document};
use crate::device_plugin::{self, response};
use crate::dra::{Claim, envelope, flat};
use crate::file::{Checksum, ReadError, Salvaged, WarningKind, Warnings};
use crate::kind::{self, FileKind};
use crate::verify::{replaced_claims, replaced_entries};
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
    /// It is a health file.
    #[error(
        "a health file holds nothing that is worth saving: delete it, drivers report health again as soon as \
         they are connected"
    )]
    NotWorthIt,
}

/// Saves what is sound. `role` is what the file's name says, see [`Role::of_file_name`].
pub fn salvage(bytes: &[u8], role: Option<Role>) -> Result<Salvage, SalvageError> {
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
            let (checkpoint, checksum) = salvaged.content;
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
            let salvaged = flat::salvage(bytes);
            let mut dropped = losses(&salvaged);
            let (mut checkpoint, checksum, format) = salvaged.content;
            keep_last(&mut checkpoint.claims, &mut dropped, |claim: &flat::FlatClaim| {
                format!("{}/{}", claim.namespace, claim.name)
            });
            // A checksum that some other kubelet would have written is as good.
            let checksum = match flat::read(bytes) {
                Ok(file) => file.checksum.unwrap_or(checksum),
                Err(_) => checksum,
            };
            (format, Document::DraFlat(checkpoint), Some(checksum), dropped)
        }
        FileKind::DraEnvelope => {
            let salvaged = envelope::salvage(bytes);
            let mut dropped = losses(&salvaged);
            let (mut checkpoint, checksum) = salvaged.content;
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
    let converted = convert_document(kept.clone(), found).map_err(|_| SalvageError::NotWorthIt)?;
    let (text, format, remarks) = (converted.text, converted.format, converted.remarks);
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
    let Warnings { list, .. } = &salvaged.warnings;
    let mut dropped: Vec<Dropped> = list
        .iter()
        .filter_map(|warning| match &warning.kind {
            WarningKind::Dropped(reason) => Some(Dropped {
                what: warning.at.path.clone(),
                reason: reason.clone(),
            }),
            _ => None,
        })
        .collect();
    if salvaged.warnings.left_out > 0 {
        let what = format!("up to {} more places", salvaged.warnings.left_out);
        dropped.push(Dropped {
            what,
            reason: "too many to list".into(),
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
    let Some(entries) = checkpoint.entries.take() else {
        return checkpoint;
    };
    let replaced = replaced_entries(&entries);
    let mut kept = Vec::with_capacity(entries.len());
    for (index, entry) in entries.into_iter().enumerate() {
        let devices = entry.devices.ids().join(", ");
        let what = format!("{} with devices {devices}", entry.holder());
        if let Err(reason) = response::decode(entry.alloc_resp.as_deref().unwrap_or_default()) {
            let reason = format!("the plugin's answer is {reason}; its devices count as free");
            dropped.push(Dropped { what, reason });
        } else if replaced.contains_key(&index) {
            dropped.push(Dropped {
                what,
                reason: "a later entry for the same container counts".into(),
            });
        } else {
            kept.push(entry);
        }
    }
    checkpoint.entries = Some(kept);
    checkpoint
}

/// Without the claims that a later one replaces.
fn keep_last<T>(claims: &mut Option<Vec<T>>, dropped: &mut Vec<Dropped>, key: impl Fn(&T) -> String) {
    let Some(list) = claims.take() else { return };
    let keys: Vec<String> = list.iter().map(&key).collect();
    let replaced: Vec<usize> = replaced_claims(&keys)
        .into_iter()
        .map(|(index, _)| index)
        .collect();
    let mut kept = Vec::with_capacity(list.len());
    for (index, claim) in list.into_iter().enumerate() {
        if replaced.binary_search(&index).is_ok() {
            let reason = "a later claim of the same name counts".into();
            dropped.push(Dropped {
                what: format!("claim {}", keys[index]),
                reason,
            });
        } else {
            kept.push(claim);
        }
    }
    *claims = Some(kept);
}
