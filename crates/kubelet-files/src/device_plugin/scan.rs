//! Reads entries from a file with broken syntax.
//!
//! The scan looks for the keys of entries at any position, and reads the value behind each. One byte of a key may be
//! damaged. The next key ends every value, so a lost quote or bracket cannot hide the entries behind it, and the work
//! is linear.
//!
//! An entry begins at its `PodUID`. Another part begins where a key repeats or is out of the kubelet's order, and behind a
//! stretch that may hide the end of an entry. The pod of such a part is unknown. Of a device list with broken syntax, the
//! scan keeps every text between two quotes. A misread device does not exist, so holding it is harmless.
//!
//! Zeroed bytes may hide the beginning of another entry. Texts between quotes from there to the next key are held by an unknown
//! pod, under the resource of the entry and under those that list them in `RegisteredDevices`. The latter also hold devices
//! with an unreadable resource. If no list has such a device, each resource of another entry holds it.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::read::{Accept, Shapes, decode_devices, decode_registered};
use super::{Checkpoint, Devices, Entry};
use crate::go_json::decode;
use crate::go_json::{DroppedList, Reader, SyntaxError, unescape};
use crate::loose::{is_control, is_structure, next_byte, next_key, space};

/// Maximum number of resources under which a device is held that no `RegisteredDevices` lists.
const MAX_RESOURCES: usize = 16;

/// The readable part of a file.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) checkpoint: Checkpoint,
    pub(super) stored: u64,
    pub(super) shapes: Shapes,
    pub(super) dropped: DroppedList,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    PodUid,
    ContainerName,
    ResourceName,
    DeviceIds,
    /// In files of 1.8.
    DeviceId,
    AllocResp,
    RegisteredDevices,
    Checksum,
}

/// The keys as they are written in a file.
const KEYS: [(Key, &[u8]); 8] = [
    (Key::PodUid, b"\"PodUID\":"),
    (Key::ContainerName, b"\"ContainerName\":"),
    (Key::ResourceName, b"\"ResourceName\":"),
    (Key::DeviceIds, b"\"DeviceIDs\":"),
    (Key::DeviceId, b"\"DeviceID\":"),
    (Key::AllocResp, b"\"AllocResp\":"),
    (Key::RegisteredDevices, b"\"RegisteredDevices\":"),
    (Key::Checksum, b"\"Checksum\":"),
];

/// Devices without a known pod.
#[derive(Debug, Default)]
struct Strays {
    /// By resource.
    ids: BTreeMap<String, BTreeSet<String>>,
    without_resource: HashSet<String>,
    /// Devices of entries without a readable resource.
    of_entries: BTreeSet<String>,
}

/// A partially read entry.
#[derive(Debug, Default)]
struct Part {
    entry: Entry,
    /// Devices that may belong to another entry.
    strays: Vec<String>,
    last: Option<Key>,
    is_damaged: bool,
    is_closed: bool,
}

/// Reads all entries of a broken file as far as possible.
pub(super) fn scan(bytes: &[u8]) -> Scan {
    let mut scan = Scan {
        checkpoint: Checkpoint {
            entries: Some(Vec::new()),
            registered: Some(BTreeMap::new()),
        },
        ..Scan::default()
    };
    let mut strays = Strays::default();
    let mut part = Part::default();
    // The end of the last value if a comma follows it, and `true` if an entry may end unseen before the next key.
    let (mut expected, mut may_hide_end) = (None, true);
    let mut number = 0;
    let mut next = next_key(bytes, 0, &KEYS);
    let (_, behind) = split_at_control(&bytes[..next.map_or(0, |first| first.start)]);
    strays.without_resource.extend(loose_ids(behind));
    while let Some(found) = next {
        next = next_key(bytes, found.value, &KEYS);
        let value = &bytes[found.value..next.map_or(bytes.len(), |next| next.start)];
        let is_next = part.last.is_some_and(|last| last < found.key) && !part.is_closed;
        let is_continued = is_next && (expected == Some(found.start) || !may_hide_end);
        if !is_continued || found.key >= Key::RegisteredDevices {
            scan.finish(std::mem::take(&mut part), &mut number, &mut strays);
            part.is_damaged = found.key != Key::PodUid;
        } else if expected != Some(found.start) {
            part.is_damaged = true;
        }
        part.last = Some(found.key);
        let end = scan.read(found.key, value, &mut part);
        let rest = &value[end.unwrap_or_default()..];
        let (separator, length) = next_byte(rest);
        expected = match (end, separator) {
            (Some(end), Some(b',')) => {
                let after = end + length;
                Some(found.value + after + space(&value[after..]))
            }
            _ => None,
        };
        part.is_closed = end.is_some() && separator == Some(b'}');
        part.is_damaged |= end.is_none() || !matches!(separator, Some(b',' | b'}'));
        let (before, behind) = split_at_control(rest);
        part.strays.extend(loose_ids(behind));
        may_hide_end = before.contains(&b'}') || !behind.is_empty();
    }
    scan.finish(part, &mut number, &mut strays);
    scan.hold(strays);
    scan
}

impl Scan {
    /// Reads the value of a key. Returns the length of the value if its syntax is sound.
    fn read(&mut self, key: Key, value: &[u8], part: &mut Part) -> Option<usize> {
        let mut reader = Reader::salvaging(value);
        let entry = &mut part.entry;
        let text = |reader: &mut Reader<'_>, target: &mut String| decode::text(reader, target, "string");
        let ended: Result<(), SyntaxError> = match key {
            Key::PodUid => text(&mut reader, &mut entry.pod_uid),
            Key::ContainerName => text(&mut reader, &mut entry.container),
            Key::ResourceName => text(&mut reader, &mut entry.resource),
            Key::DeviceIds => {
                let devices = &mut entry.devices;
                let ended = decode_devices(&mut reader, devices, Accept::Either, &mut self.shapes);
                // A wrong type drops the list of a NUMA node.
                let is_damaged = ended.is_err() || !reader.take_dropped().list.is_empty();
                if is_damaged || reader.first_type_error().is_some() {
                    part.is_damaged = true;
                    let list = &value[..ended.as_ref().map_or(value.len(), |()| reader.offset())];
                    let (before, _) = split_at_control(list);
                    let ids = Some(loose_ids(before));
                    *devices = match devices {
                        Devices::Flat(_) => Devices::Flat(ids),
                        Devices::PerNuma(_) => Devices::PerNuma(Some(BTreeMap::from([(-1, ids)]))),
                    };
                }
                ended
            }
            Key::DeviceId => {
                let mut id = String::new();
                let ended = text(&mut reader, &mut id);
                entry.devices = Devices::Flat((!id.is_empty()).then(|| vec![id]));
                ended
            }
            Key::AllocResp => decode::bytes(&mut reader, &mut entry.alloc_resp),
            Key::RegisteredDevices => decode_registered(&mut reader, &mut self.checkpoint.registered),
            Key::Checksum => decode::unsigned(&mut reader, &mut self.stored, u64::MAX, "checksum.Checksum"),
        };
        part.is_damaged |= reader.first_type_error().is_some();
        ended.is_ok().then(|| reader.offset())
    }

    fn finish(&mut self, part: Part, number: &mut usize, strays: &mut Strays) {
        let Part { mut entry, last, .. } = part;
        if last.is_none_or(|last| last >= Key::RegisteredDevices) {
            return;
        }
        let is_whole = !part.is_damaged && part.is_closed;
        if !is_whole {
            entry.alloc_resp = None;
            let what = format!("Data.PodDeviceEntries[{number}]: {}", entry.describe());
            let reason = "broken syntax in or before it; the devices that could be read stay held";
            self.dropped.push(what, reason.into());
        }
        *number += 1;
        if entry.resource.is_empty() {
            let ids = entry.devices.ids();
            strays
                .without_resource
                .extend(ids.iter().map(ToString::to_string));
            strays.of_entries.extend(ids.into_iter().map(str::to_owned));
        } else if !part.strays.is_empty() {
            let of_resource = strays.ids.entry(entry.resource.clone()).or_default();
            of_resource.extend(part.strays.iter().cloned());
        }
        strays.without_resource.extend(part.strays);
        if !entry.resource.is_empty() && (is_whole || !entry.devices.ids().is_empty()) {
            self.checkpoint.entries.get_or_insert_default().push(entry);
        }
    }

    /// Holds devices without a known pod, unless another entry holds them.
    fn hold(&mut self, strays: Strays) {
        let Strays {
            mut ids,
            without_resource,
            mut of_entries,
        } = strays;
        let Checkpoint { entries, registered } = &mut self.checkpoint;
        if !without_resource.is_empty() {
            for (resource, listed) in registered.iter().flatten() {
                let listed = listed.iter().flatten();
                let found: BTreeSet<String> = listed
                    .filter(|id| without_resource.contains(*id))
                    .cloned()
                    .collect();
                found.iter().for_each(|id| _ = of_entries.remove(id));
                ids.entry(resource.clone()).or_default().extend(found);
            }
        }
        let entries = entries.get_or_insert_default();
        let resources: BTreeSet<String> = entries.iter().map(|entry| entry.resource.clone()).collect();
        for resource in resources
            .into_iter()
            .take(MAX_RESOURCES)
            .filter(|_| !of_entries.is_empty())
        {
            ids.entry(resource)
                .or_default()
                .extend(of_entries.iter().cloned());
        }
        for entry in entries.iter() {
            if let Some(ids) = ids.get_mut(&entry.resource) {
                for id in entry.devices.ids() {
                    ids.remove(id);
                }
            }
        }
        for (resource, ids) in ids.into_iter().filter(|(_, ids)| !ids.is_empty()) {
            let ids = ids.into_iter().collect();
            entries.push(Entry {
                resource,
                devices: Devices::PerNuma(Some(BTreeMap::from([(-1, Some(ids))]))),
                ..Entry::default()
            });
        }
    }
}

/// Returns the texts between quotes in a device list with broken syntax, without the NUMA nodes.
fn loose_ids(value: &[u8]) -> Vec<String> {
    let mut pieces: Vec<&[u8]> = Vec::new();
    let (mut start, mut at) = (0, 0);
    while let Some(&byte) = value.get(at) {
        if byte == b'"' {
            pieces.push(&value[start..at]);
            start = at + 1;
        }
        at += if byte == b'\\' { 2 } else { 1 };
    }
    pieces.push(&value[start..]);
    let mut ids = Vec::new();
    for (index, &piece) in pieces.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| pieces[before].trim_ascii());
        let is_value = before == Some(b":");
        let next = pieces.get(index + 1);
        let is_numa_node = matches!(before, Some(b"{" | b"],"))
            || next.is_some_and(|next| next.trim_ascii_start().starts_with(b":"));
        let is_cut_off = next.is_none() && !piece.last().is_some_and(|&byte| is_structure(byte));
        if is_value || is_numa_node || is_cut_off || piece.iter().any(|&byte| is_control(byte)) {
            continue;
        }
        // A bracket or comma at one end: the quote beside it is the damaged byte.
        let front = piece.iter().take_while(|&&byte| is_structure(byte)).count();
        let back = piece.iter().rev().take_while(|&&byte| is_structure(byte)).count();
        let damaged = |length: usize| if length > 0 { length + 1 } else { 0 };
        let id = piece.get(damaged(front)..piece.len().saturating_sub(damaged(back)));
        if let Some(id) = id.filter(|id| !id.is_empty()) {
            ids.push(unescape(id).0);
        }
    }
    ids
}

fn split_at_control(bytes: &[u8]) -> (&[u8], &[u8]) {
    let control = bytes.iter().position(|&byte| is_control(byte));
    bytes.split_at(control.unwrap_or(bytes.len()))
}
