//! Reads the files without a checksum, of 1.8 to 1.10.
//!
//! Three variants were written, the middle one only between releases:
//!
//! ```text
//! 1.8        {"Entries":[{"PodUID":"","ContainerName":"","ResourceName":"","DeviceID":""}]}
//! late 2017  {"Entries":[{"PodUID":"","ContainerName":"","ResourceName":"","DeviceIDs":[""],"AllocResp":""}]}
//! 1.9, 1.10  {"PodDeviceEntries":[{ ...as late 2017... }],"RegisteredDevices":{"":[""]}}
//! ```
//!
//! The plugin's answer was a `deviceplugin.AllocateResponse` then. Its fields have the numbers of today's
//! `ContainerAllocateResponse`, so its bytes are used unchanged. 1.8 did not store it.

use std::collections::BTreeMap;

use super::read::{decode_ids, decode_registered};
use super::scan::{Scan, scan};
use super::{Checkpoint, Devices, Entry};
use crate::file::{File, ReadError, Salvaged, document, salvage_with};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{Reader, SyntaxError};

const DATA: Shape = Shape::new(
    "checkpointData",
    &["Entries", "PodDeviceEntries", "RegisteredDevices"],
);
const ENTRY: Shape = Shape::new(
    "podDevicesCheckpointEntry",
    &[
        "PodUID",
        "ContainerName",
        "ResourceName",
        "DeviceIDs",
        "AllocResp",
        "DeviceID",
    ],
);

/// Reads a file of 1.8 to 1.10. Entries of 1.8, one per device, are joined to one per container and resource.
pub fn read(bytes: &[u8]) -> Result<File<Checkpoint>, ReadError> {
    let mut draft = Draft::default();
    let warnings = document(bytes, |reader| draft.decode(reader))?;
    Ok(File::new(Format::DevicePluginV0, None, warnings, draft.finish()))
}

/// Reads a damaged file as far as possible. Of a damaged entry, it keeps the devices.
pub(crate) fn salvage(bytes: &[u8]) -> Salvaged<Checkpoint> {
    if let Err(error @ ReadError::Syntax { .. }) = read(bytes) {
        let Scan {
            checkpoint, dropped, ..
        } = scan(bytes);
        return Salvaged::scanned(checkpoint, error, bytes.len(), dropped);
    }
    let mut draft = Draft::default();
    salvage_with(bytes, |reader| draft.decode(reader)).map(|()| draft.finish())
}

#[derive(Debug, Default)]
struct Draft {
    entries: Option<Vec<EntryV0>>,
    pod_device_entries: Option<Vec<EntryV0>>,
    registered: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Debug, Default)]
struct EntryV0 {
    pod_uid: String,
    container: String,
    resource: String,
    device_ids: Option<Vec<String>>,
    alloc_resp: Option<Vec<u8>>,
    device_id: Option<String>,
}

impl Draft {
    fn decode(&mut self, reader: &mut Reader<'_>) -> Result<(), SyntaxError> {
        decode::object(reader, &DATA, |field, reader| match field {
            0 => decode::units(
                reader,
                &mut self.entries,
                "[]checkpointEntry",
                &UNIT,
                decode_entry,
            ),
            1 => {
                let go_type = "[]podDevicesCheckpointEntry";
                decode::units(reader, &mut self.pod_device_entries, go_type, &UNIT, decode_entry)
            }
            _ => decode_registered(reader, &mut self.registered),
        })
    }

    fn finish(self) -> Checkpoint {
        let entries = match (self.entries, self.pod_device_entries) {
            (None, entries) | (entries, None) => entries,
            (Some(mut earlier), Some(later)) => {
                earlier.extend(later);
                Some(earlier)
            }
        };
        Checkpoint {
            entries: entries.map(join_single_devices),
            registered: Some(self.registered.unwrap_or_default()),
        }
    }
}

fn decode_entry(reader: &mut Reader<'_>, entry: &mut EntryV0) -> Result<(), SyntaxError> {
    decode::object(reader, &ENTRY, |field, reader| match field {
        0 => decode::text(reader, &mut entry.pod_uid, "string"),
        1 => decode::text(reader, &mut entry.container, "string"),
        2 => decode::text(reader, &mut entry.resource, "string"),
        3 => decode_ids(reader, &mut entry.device_ids),
        4 => decode::bytes(reader, &mut entry.alloc_resp),
        _ => decode::optional_text(reader, &mut entry.device_id, "string"),
    })
}

/// An entry as a unit of salvage.
const UNIT: decode::Unit<EntryV0> = decode::Unit {
    describe: EntryV0::describe,
    is_kept: |entry| {
        let has_devices = entry.device_id.is_some() || entry.device_ids.iter().flatten().next().is_some();
        !entry.resource.is_empty() && has_devices
    },
};

impl EntryV0 {
    fn describe(&self) -> String {
        let devices = self.device_id.iter().chain(self.device_ids.iter().flatten());
        let devices: Vec<&str> = devices.map(String::as_str).collect();
        let (pod, container, resource) = (&self.pod_uid, &self.container, &self.resource);
        format!("{pod}/{container} {resource} with {}", devices.join(", "))
    }
}

/// The releases that wrote a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Generation {
    /// 1.8: one entry per device.
    Single,
    /// Late 2017, between releases.
    Listed,
    /// 1.9 and 1.10.
    Registered,
}

/// Returns the generation of a file that [`read`] accepts.
pub(crate) fn generation(bytes: &[u8]) -> Generation {
    let mut draft = Draft::default();
    // The readable part decides.
    let _: Salvaged<()> = salvage_with(bytes, |reader| draft.decode(reader));
    let entries = draft.entries.as_deref().unwrap_or_default();
    if draft.pod_device_entries.is_some() || draft.registered.is_some() {
        Generation::Registered
    } else if entries
        .iter()
        .any(|entry| entry.device_ids.is_some() || entry.alloc_resp.is_some())
    {
        Generation::Listed
    } else {
        Generation::Single
    }
}

/// Joins entries of one device to one per container and resource, at the position of the first device.
fn join_single_devices(old: Vec<EntryV0>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::with_capacity(old.len());
    let mut places: BTreeMap<(String, String, String), usize> = BTreeMap::new();
    for entry in old {
        let EntryV0 {
            pod_uid,
            container,
            resource,
            mut device_ids,
            alloc_resp,
            device_id,
        } = entry;
        let key = (pod_uid.clone(), container.clone(), resource.clone());
        let single = device_id.is_some();
        if let Some(device_id) = device_id {
            device_ids.get_or_insert_default().insert(0, device_id);
        }
        let earlier = places
            .get(&key)
            .filter(|_| single)
            .and_then(|&place| entries.get_mut(place));
        match earlier {
            Some(Entry {
                devices: Devices::Flat(Some(ids)),
                alloc_resp: answer,
                ..
            }) => {
                ids.extend(device_ids.into_iter().flatten());
                if answer.is_none() {
                    *answer = alloc_resp;
                }
            }
            _ => {
                if single {
                    places.insert(key, entries.len());
                }
                let devices = Devices::Flat(device_ids);
                entries.push(Entry {
                    pod_uid,
                    container,
                    resource,
                    devices,
                    alloc_resp,
                });
            }
        }
    }
    entries
}
