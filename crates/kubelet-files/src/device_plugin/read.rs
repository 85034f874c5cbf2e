//! Reads V1 and V2.

use std::collections::HashSet;

use super::checksum::Version;
use super::scan::{Scan, scan};
use super::{Checkpoint, Devices, Entry};
use crate::file::{Checksum, File, ReadError, Salvaged, Warnings, document, salvage_with};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{DroppedList, Kind, Reader, SyntaxError};
use crate::position::Position;

const DATA: Shape = Shape::new("checkpoint.Data", &["Data", "Checksum"]);
const CHECKPOINT_DATA: Shape = Shape::new(
    "checkpoint.checkpointData",
    &["PodDeviceEntries", "RegisteredDevices"],
);
const ENTRY: Shape = Shape::new(
    "checkpoint.PodDevicesEntry",
    &[
        "PodUID",
        "ContainerName",
        "ResourceName",
        "DeviceIDs",
        "AllocResp",
    ],
);

/// Reads a `kubelet_internal_checkpoint`, V1 or V2, as the kubelets that supported both did.
pub fn read(bytes: &[u8]) -> Result<File<Checkpoint>, ReadError> {
    let mut draft = Draft::new(Accept::Either);
    let warnings = document(bytes, |reader| draft.decode(reader))?;
    match draft.shapes {
        Shapes {
            flat: Some(flat),
            per_numa: Some(per_numa),
        } => Err(ReadError::Mixed {
            flat: Position::of(bytes, flat),
            per_numa: Position::of(bytes, per_numa),
        }),
        Shapes {
            flat: Some(_),
            per_numa: None,
        } => Ok(draft.finish_v1(warnings)),
        Shapes { flat: None, per_numa } => {
            let v2 = draft.checkpoint.checksum(Version::V2);
            // Entries without devices look the same in both; then the checksum decides.
            let is_v1 = per_numa.is_none()
                && draft.stored != v2
                && draft.checkpoint.checksum(Version::V1) == draft.stored;
            if is_v1 {
                return Ok(draft.finish_v1(warnings));
            }
            let checksum = Checksum {
                stored: draft.stored,
                computed: v2,
            };
            Ok(File::new(
                Format::DevicePluginV2,
                Some(checksum),
                warnings,
                draft.checkpoint,
            ))
        }
    }
}

/// Reads as kubelets since 1.31 do: V2 only.
pub(crate) fn read_strict_v2(bytes: &[u8]) -> Result<Checksum, ReadError> {
    let mut draft = Draft::new(Accept::PerNuma);
    document(bytes, |reader| draft.decode(reader))?;
    Ok(Checksum {
        stored: draft.stored,
        computed: draft.checkpoint.checksum(Version::V2),
    })
}

/// Reads a damaged V1 or V2 file as far as possible. Of a damaged entry, it keeps the devices.
///
/// The last value is `true` if entries of V1 and V2 are mixed.
pub(crate) fn salvage(bytes: &[u8]) -> Salvaged<(Checkpoint, Checksum, bool)> {
    let mut draft = Draft::new(Accept::Either);
    let error = match read(bytes) {
        Ok(file) => {
            let checksum = file.checksum;
            if let (Some(checksum), Ok(checkpoint)) = (checksum, file.verified()) {
                return Salvaged::sound((checkpoint, checksum, false));
            }
            None
        }
        Err(error) => Some(error),
    };
    let found = scan(bytes);
    let salvaged = match error {
        Some(error @ ReadError::Syntax { .. }) => {
            let Scan {
                checkpoint,
                stored,
                shapes,
                dropped,
            } = found;
            draft = Draft {
                checkpoint,
                stored,
                shapes,
                ..draft
            };
            Salvaged::scanned((), error, bytes.len(), dropped)
        }
        _ => {
            let mut salvaged = salvage_with(bytes, |reader| draft.decode(reader));
            draft.add_missing(found.checkpoint, &mut salvaged.dropped);
            salvaged
        }
    };
    salvaged.map(|()| {
        let version = if draft.shapes.flat.is_some() {
            Version::V1
        } else {
            Version::V2
        };
        let computed = draft.checkpoint.checksum(version);
        let checksum = Checksum {
            stored: draft.stored,
            computed,
        };
        let mixed = draft.shapes.flat.is_some() && draft.shapes.per_numa.is_some();
        (draft.checkpoint, checksum, mixed)
    })
}

/// An entry as a unit of salvage.
const UNIT: decode::Unit<Entry> = decode::Unit {
    describe: Entry::describe,
    is_kept: |entry| !entry.resource.is_empty() && !entry.devices.ids().is_empty(),
};

/// Accepted forms of a device list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accept {
    PerNuma,
    Either,
}

/// The offset of the first device list of each form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shapes {
    pub(crate) flat: Option<usize>,
    pub(crate) per_numa: Option<usize>,
}

#[derive(Debug)]
struct Draft {
    checkpoint: Checkpoint,
    stored: u64,
    accept: Accept,
    shapes: Shapes,
}

impl Draft {
    /// Kubelets decode into an empty checkpoint, not into a nil one: absent keys stay empty, not nil.
    fn new(accept: Accept) -> Self {
        let checkpoint = Checkpoint {
            entries: Some(Vec::new()),
            registered: Some(Default::default()),
        };
        Self {
            checkpoint,
            stored: 0,
            accept,
            shapes: Shapes::default(),
        }
    }

    fn finish_v1(mut self, warnings: Warnings) -> File<Checkpoint> {
        for entry in self.checkpoint.entries.iter_mut().flatten() {
            if entry.devices == Devices::PerNuma(None) {
                entry.devices = Devices::Flat(None);
            }
        }
        let checksum = Checksum {
            stored: self.stored,
            computed: self.checkpoint.checksum(Version::V1),
        };
        File::new(Format::DevicePluginV1, Some(checksum), warnings, self.checkpoint)
    }

    /// Adds the devices of a scan that no entry holds. A damaged key hides the list behind it from the decoder.
    fn add_missing(&mut self, scanned: Checkpoint, dropped: &mut DroppedList) {
        let entries = self.checkpoint.entries.get_or_insert_default();
        let mut held: HashSet<(String, String)> = HashSet::new();
        for entry in entries.iter() {
            let ids = entry.devices.ids().into_iter();
            held.extend(ids.map(|id| (entry.resource.clone(), id.to_owned())));
        }
        for mut entry in scanned.entries.into_iter().flatten() {
            let resource = entry.resource.clone();
            entry
                .devices
                .retain(|id| !held.contains(&(resource.clone(), id.to_owned())));
            if entry.devices.ids().is_empty() {
                continue;
            }
            let reason = "not where an entry belongs; its devices stay held";
            dropped.push(
                format!("Data.PodDeviceEntries: {}", entry.describe()),
                reason.into(),
            );
            match &entry.devices {
                Devices::Flat(_) => self.shapes.flat.get_or_insert_default(),
                Devices::PerNuma(_) => self.shapes.per_numa.get_or_insert_default(),
            };
            entries.push(entry);
        }
        let registered = self.checkpoint.registered.get_or_insert_default();
        for (resource, ids) in scanned.registered.into_iter().flatten() {
            registered.entry(resource).or_insert(ids);
        }
    }

    fn decode(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        decode::object(reader, &DATA, |field, reader| match field {
            0 => self.decode_data(reader),
            _ => decode::unsigned(reader, &mut self.stored, u64::MAX, "checksum.Checksum"),
        })
    }

    fn decode_data(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        let Self {
            checkpoint,
            accept,
            shapes,
            ..
        } = self;
        decode::object(reader, &CHECKPOINT_DATA, |field, reader| match field {
            0 => decode::units(
                reader,
                &mut checkpoint.entries,
                "[]checkpoint.PodDevicesEntry",
                &UNIT,
                |reader, entry| decode_entry(reader, entry, *accept, shapes),
            ),
            _ => decode_registered(reader, &mut checkpoint.registered),
        })
    }
}

pub(super) fn decode_registered(
    reader: &mut Reader<'_>,
    registered: &mut Option<std::collections::BTreeMap<String, Option<Vec<String>>>>,
) -> Result<(), SyntaxError> {
    decode::map(reader, registered, "map[string][]string", decode_ids)
}

/// Decodes a Go `[]string`.
pub(super) fn decode_ids(reader: &mut Reader<'_>, ids: &mut Option<Vec<String>>) -> Result<(), SyntaxError> {
    decode::list(reader, ids, "[]string", |reader, id| {
        decode::text(reader, id, "string")
    })
}

fn decode_entry(
    reader: &mut Reader<'_>,
    entry: &mut Entry,
    accept: Accept,
    shapes: &mut Shapes,
) -> Result<(), SyntaxError> {
    decode::object(reader, &ENTRY, |field, reader| match field {
        0 => decode::text(reader, &mut entry.pod_uid, "string"),
        1 => decode::text(reader, &mut entry.container, "string"),
        2 => decode::text(reader, &mut entry.resource, "string"),
        3 => decode_devices(reader, &mut entry.devices, accept, shapes),
        _ => decode::bytes(reader, &mut entry.alloc_resp),
    })
}

pub(super) fn decode_devices(
    reader: &mut Reader<'_>,
    devices: &mut Devices,
    accept: Accept,
    shapes: &mut Shapes,
) -> Result<(), SyntaxError> {
    let kind = reader.kind()?;
    if kind == Kind::Array && accept == Accept::Either {
        shapes.flat.get_or_insert(reader.offset());
        if let Devices::PerNuma(_) = devices {
            *devices = Devices::Flat(None);
        }
    } else if kind == Kind::Object {
        shapes.per_numa.get_or_insert(reader.offset());
        if let Devices::Flat(_) = devices {
            *devices = Devices::PerNuma(None);
        }
    }
    let is_list = matches!(kind, Kind::Array | Kind::Object | Kind::Null);
    if !is_list && shapes.flat.is_some() && shapes.per_numa.is_none() {
        // The error text of a V1 reader, since this is not a V2 file.
        return reader.mismatch(kind, "[]string");
    }
    match devices {
        Devices::Flat(ids) => decode_ids(reader, ids),
        Devices::PerNuma(nodes) => decode::int_map(reader, nodes, "checkpoint.DevicesPerNUMA", decode_ids),
    }
}
