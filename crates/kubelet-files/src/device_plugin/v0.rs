//! The files without a checksum, 1.8 to 1.10.
//!
//! Three shapes were written, the middle one only between releases:
//!
//! ```text
//! 1.8        {"Entries":[{"PodUID":"","ContainerName":"","ResourceName":"","DeviceID":""}]}
//! late 2017  {"Entries":[{"PodUID":"","ContainerName":"","ResourceName":"","DeviceIDs":[""],"AllocResp":""}]}
//! 1.9, 1.10  {"PodDeviceEntries":[{ ...as late 2017... }],"RegisteredDevices":{"":[""]}}
//! ```
//!
//! The plugin's answer was a `deviceplugin.AllocateResponse` then; its fields have the numbers of today's
//! `ContainerAllocateResponse`, so its bytes serve unchanged. In 1.8 it was not stored at all.

use std::collections::BTreeMap;

use super::read::{decode_ids, decode_registered};
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

/// Everything of a damaged file that can be read, whole entries only.
pub(crate) fn salvage(bytes: &[u8]) -> Salvaged<Checkpoint> {
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
            0 => decode::units(reader, &mut self.entries, "[]checkpointEntry", decode_entry),
            1 => {
                let go_type = "[]podDevicesCheckpointEntry";
                decode::units(reader, &mut self.pod_device_entries, go_type, decode_entry)
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

/// One entry per device becomes one per container and resource, at the place of its first device.
fn join_single_devices(old: Vec<EntryV0>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::with_capacity(old.len());
    let mut places: BTreeMap<(String, String, String), usize> = BTreeMap::new();
    for EntryV0 {
        pod_uid,
        container,
        resource,
        device_ids,
        alloc_resp,
        device_id,
    } in old
    {
        let Some(device_id) = device_id else {
            let devices = Devices::Flat(device_ids);
            entries.push(Entry {
                pod_uid,
                container,
                resource,
                devices,
                alloc_resp,
            });
            continue;
        };
        let key = (pod_uid.clone(), container.clone(), resource.clone());
        let place = *places.entry(key).or_insert_with(|| {
            let devices = Devices::Flat(Some(Vec::new()));
            entries.push(Entry {
                pod_uid,
                container,
                resource,
                devices,
                alloc_resp,
            });
            entries.len() - 1
        });
        if let Devices::Flat(Some(ids)) = &mut entries[place].devices {
            ids.push(device_id);
        }
    }
    entries
}
