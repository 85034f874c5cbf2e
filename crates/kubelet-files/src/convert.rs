//! Converts a file to the newest format of its kind.

use std::borrow::Cow;

use crate::device_plugin::{self, Devices, Entry};
use crate::dra::{envelope, flat};
use crate::file::{ChecksumMismatch, File};
use crate::{Document, Format};

/// A file in the newest format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The format of `text`.
    pub format: Format,
    /// The whole file.
    pub text: String,
    /// Differences between the old content and the new one.
    pub remarks: Vec<Remark>,
}

/// A decision that a conversion made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Remark {
    /// One file has entries of V1 and of V2.
    #[error("the file mixes entries of two formats, V1 and V2")]
    MixedFormats,
    /// V0 and V1 do not record topology.
    #[error(
        "devices are placed on NUMA node 0, as kubelets 1.20 to 1.30 did: the old format does not record topology"
    )]
    NumaNodeZero,
    /// The file is from 1.8.
    #[error(
        "the file does not hold what the plugins answered: a container that restarts gets nothing injected \
         until its pod is admitted again"
    )]
    AnswersNotStored,
    /// Flat DRA files record only CDI ids.
    #[error(
        "pools, device and request names are empty: the old format has only the CDI ids. A kubelet prepares \
         these claims again"
    )]
    DeviceNamesUnknown,
    /// Flat DRA files hold data that today's format cannot store.
    #[error("resource classes and resource handles are left out: the new format cannot store them")]
    HandlesLeftOut,
}

/// Why a file cannot be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// Its checksum is wrong.
    #[error(transparent)]
    Corrupted(#[from] ChecksumMismatch),
    /// The list of claims is missing.
    #[error("the list of claims is missing: there is no state in it that could be converted")]
    NoClaimList,
    /// Its kind has only one format.
    #[error("a health file has only one format: there is nothing to convert")]
    OnlyOneFormat,
}

/// Converts to [`Format::DevicePluginV2`] or [`Format::DraEnvelopeV1`]. Entries keep their order, and plugins'
/// answers keep their bytes.
pub fn convert(file: File<Document>) -> Result<Converted, ConvertError> {
    let found = file.format;
    let document = file.verified()?;
    if matches!(&document, Document::DraEnvelope(checkpoint) if !checkpoint.has_claim_list) {
        return Err(ConvertError::NoClaimList);
    }
    convert_document(&document, found)
}

pub(crate) fn convert_document(document: &Document, found: Format) -> Result<Converted, ConvertError> {
    match document {
        Document::DevicePlugin(checkpoint) => Ok(convert_devices(checkpoint, found)),
        Document::DraFlat(checkpoint) => Ok(convert_flat(checkpoint)),
        Document::DraEnvelope(checkpoint) => {
            let text = envelope::write(checkpoint.claims.as_deref());
            Ok(Converted {
                format: Format::DraEnvelopeV1,
                text,
                remarks: Vec::new(),
            })
        }
        Document::DraHealth(_) => Err(ConvertError::OnlyOneFormat),
    }
}

fn convert_devices(checkpoint: &device_plugin::Checkpoint, found: Format) -> Converted {
    let mut remarks = Vec::new();
    let entries = checkpoint.entries.as_deref().unwrap_or_default();
    let is_flat = |entry: &Entry| matches!(entry.devices, Devices::Flat(Some(_)));
    if entries.iter().any(is_flat) {
        remarks.push(Remark::NumaNodeZero);
    }
    let has_no_answer = |entry: &Entry| entry.alloc_resp.is_none();
    let mut text = None;
    if found == Format::DevicePluginV0 && entries.iter().any(has_no_answer) {
        remarks.push(Remark::AnswersNotStored);
        let mut answered = checkpoint.clone();
        for entry in answered.entries.iter_mut().flatten() {
            // As a kubelet writes an empty answer.
            entry.alloc_resp.get_or_insert_default();
        }
        text = Some(device_plugin::write(&answered));
    }
    Converted {
        format: Format::DevicePluginV2,
        text: text.unwrap_or_else(|| device_plugin::write(checkpoint)),
        remarks,
    }
}

fn convert_flat(checkpoint: &flat::Checkpoint) -> Converted {
    let mut remarks = Vec::new();
    let claims = checkpoint.claims.as_deref().unwrap_or_default();
    if claims.iter().any(|claim| {
        claim
            .cdi_devices
            .as_ref()
            .is_some_and(|drivers| !drivers.is_empty())
    }) {
        remarks.push(Remark::DeviceNamesUnknown);
    }
    if claims
        .iter()
        .any(|claim| !claim.class.is_empty() || claim.handles.is_some())
    {
        remarks.push(Remark::HandlesLeftOut);
    }
    let claims = checkpoint.claims.as_ref();
    let converted = claims.map(|claims| claims.iter().map(|claim| Cow::Owned(claim.clone().into_claim())));
    Converted {
        format: Format::DraEnvelopeV1,
        text: envelope::write_all(converted),
        remarks,
    }
}
