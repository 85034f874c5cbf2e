//! Reads claims from a damaged `dra_manager_state` of 1.31 or later.
//!
//! A claim begins at its `ClaimUID` and ends before the next one, so damage to one claim does not affect another. A claim
//! with sound syntax is kept whole. In any other claim, the scan looks for the keys at any position, and reads the value
//! behind each. One byte of a key may be damaged.
//!
//! Another part begins where a key is out of the kubelet's order, and behind a stretch that may hide the end of a claim.
//! The identity of such a part is unknown. A part is kept if the name of a device can be read in it. `salvage` generates
//! the UID and name that are missing, and adds an unknown pod if the list of pods is damaged.
//!
//! A device with an unreadable driver or pool is held for each driver and pool that the rest of the file names. A misread
//! device does not exist, so holding it is harmless.

use std::collections::{BTreeMap, BTreeSet};

use super::envelope::{decode_claim, decode_pods};
use super::{Claim, Device};
use crate::go_json::decode;
use crate::go_json::{DroppedList, Reader, SyntaxError, Warning, WarningKind};
use crate::loose::{Found, is_control, is_structure, names, next_byte, next_key};

/// Driver of a device if the file does not name a driver.
pub(crate) const UNKNOWN_DRIVER: &str = "unknown-driver.devlet.dev";
/// Pool of a device if the file does not name a pool.
pub(crate) const UNKNOWN_POOL: &str = "devlet-unknown-pool";

/// Maximum number of pairs of driver and pool under which one device is held.
const MAX_PLACES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    ClaimUid,
    ClaimName,
    Namespace,
    PodUids,
    DriverState,
    Devices,
    PoolName,
    DeviceName,
    ShareId,
    RequestNames,
    CdiDeviceIds,
    SkipNodeOperations,
}

/// The keys as they are written in the document.
const KEYS: [(Key, &[u8]); 12] = [
    (Key::ClaimUid, b"\"ClaimUID\":"),
    (Key::ClaimName, b"\"ClaimName\":"),
    (Key::Namespace, b"\"Namespace\":"),
    (Key::PodUids, b"\"PodUIDs\":"),
    (Key::DriverState, b"\"DriverState\":"),
    (Key::Devices, b"\"Devices\":"),
    (Key::PoolName, b"\"PoolName\":"),
    (Key::DeviceName, b"\"DeviceName\":"),
    (Key::ShareId, b"\"ShareID\":"),
    (Key::RequestNames, b"\"RequestNames\":"),
    (Key::CdiDeviceIds, b"\"CDIDeviceIDs\":"),
    (Key::SkipNodeOperations, b"\"skipNodeOperations\":"),
];

/// A driver and a pool. A name is empty if it is unreadable.
type Place = (String, String);

/// The readable part of a document.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) claims: Vec<Claim>,
    pub(super) dropped: DroppedList,
    /// Devices of parts, by the index of the claim.
    parts: Vec<(usize, Vec<PartDevice>)>,
}

/// A device of a part.
#[derive(Debug)]
struct PartDevice {
    places: Vec<Place>,
    device: Device,
}

/// A partially read claim.
#[derive(Debug, Default)]
struct Part {
    claim: Claim,
    devices: Vec<PartDevice>,
    last: Option<Key>,
    has_all_pods: bool,
    /// Possible readings of the name of the current driver. Empty if it is unreadable.
    drivers: Vec<String>,
    pools: Vec<String>,
    /// Index of the first reading of the current device.
    current: usize,
}

/// Reads all claims of a damaged document as far as possible.
pub(super) fn scan(bytes: &[u8]) -> Scan {
    let mut scan = Scan::default();
    let is_claim = &KEYS[..1];
    let mut next = next_key(bytes, 0, is_claim);
    scan.read_parts(&bytes[..next.map_or(bytes.len(), |first| first.start)]);
    while let Some(found) = next {
        next = next_key(bytes, found.value, is_claim);
        let end = next.map_or(bytes.len(), |next| next.start);
        let brace = bytes[..found.start].trim_ascii_end().len().checked_sub(1);
        let whole = brace.filter(|&brace| bytes[brace] == b'{').and_then(|brace| {
            let (claim, length) = whole(&bytes[brace..end])?;
            Some((claim, brace + length))
        });
        match whole {
            Some((claim, after)) => {
                scan.claims.push(claim);
                scan.read_parts(&bytes[after..end]);
            }
            None => scan.read_parts(&bytes[found.start..end]),
        }
    }
    scan.hold();
    scan
}

/// Returns the claim at the beginning of the text and its length, or `None` if any of it is damaged.
fn whole(bytes: &[u8]) -> Option<(Claim, usize)> {
    let mut reader = Reader::salvaging(bytes);
    let mut claim = Claim::default();
    decode_claim(&mut reader, &mut claim).ok()?;
    let is_sound = reader.first_type_error().is_none() && reader.take_dropped().list.is_empty();
    let has_identity = !claim.uid.is_empty() && !claim.name.is_empty() && !claim.namespace.is_empty();
    let has_fields = has_identity && claim.pods.is_some() && claim.drivers.is_some();
    let (warnings, more) = reader.take_warnings();
    let is_unknown = |warning: &Warning| matches!(warning.kind, WarningKind::UnknownKey(_));
    let has_unknown_keys = more > 0 || warnings.iter().any(is_unknown);
    let drivers = claim.drivers.iter().flatten();
    let devices = claim.drivers.iter().flat_map(BTreeMap::values);
    let devices = || devices.clone().flat_map(|driver| driver.devices.iter().flatten());
    let has_names = drivers.into_iter().all(|(name, _)| is_valid_name(name))
        && devices().all(|device| is_valid_name(&device.pool) && is_valid_name(&device.name));
    // A damaged key hides the text behind it.
    let length = reader.offset();
    let named = &[(Key::DeviceName, &b"\"DeviceName\":"[..])];
    let mut found = next_key(&bytes[..length], 0, named);
    let mut count = 0;
    while let Some(key) = found {
        count += 1;
        found = next_key(&bytes[..length], key.value, named);
    }
    let is_whole = is_sound && (has_fields || !has_unknown_keys) && has_names && count <= devices().count();
    is_whole.then_some((claim, length))
}

/// Returns `true` for names that drivers, pools and devices can have.
fn is_valid_name(name: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-./".contains(&byte);
    !name.is_empty() && name.bytes().all(is_valid)
}

impl Scan {
    /// Reads the parts of claims in a text without a whole claim.
    fn read_parts(&mut self, bytes: &[u8]) {
        let mut part = Part::default();
        let mut may_hide_end = false;
        let mut next = next_key(bytes, 0, &KEYS);
        // Where the text between the last value and the next key begins.
        let mut gap = 0;
        while let Some(found) = next {
            next = next_key(bytes, found.value, &KEYS);
            if may_hide_end || !part.is_continued_by(found.key) {
                self.finish(std::mem::take(&mut part));
            }
            if found.key == Key::Devices {
                part.drivers = driver_names(&bytes[gap..found.start]);
            }
            part.last = Some(found.key);
            let value = &bytes[found.value..next.map_or(bytes.len(), |next| next.start)];
            let end = part.read(found, value);
            gap = found.value + end.unwrap_or_default();
            may_hide_end = may_hide(value, end, next.map(|next| next.key));
        }
        self.finish(part);
    }

    fn finish(&mut self, mut part: Part) {
        if part.last.is_none() {
            return;
        }
        if !part.has_all_pods {
            part.claim.pods.get_or_insert_default().insert(String::new());
        }
        let mut pods = part.claim.clone();
        pods.pods.iter_mut().for_each(|pods| _ = pods.remove(""));
        let mut devices: Vec<&str> = part
            .devices
            .iter()
            .map(|each| each.device.name.as_str())
            .collect();
        devices.dedup();
        let is_kept = !devices.is_empty();
        let (devices, reason) = match is_kept {
            true => (
                devices.join(", "),
                "damaged; the devices that could be read stay held",
            ),
            false => (
                "no devices".into(),
                "damaged, and no name of a device could be read",
            ),
        };
        let what = format!("Data.ClaimInfoStateList: {} with {devices}", pods.describe());
        self.dropped.push(what, reason.into());
        if is_kept {
            self.parts.push((self.claims.len(), part.devices));
            self.claims.push(part.claim);
        }
    }

    /// Adds the devices of parts to their claims.
    fn hold(&mut self) {
        let mut known: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, driver) in self
            .claims
            .iter()
            .flat_map(|claim| claim.drivers.iter().flatten())
        {
            let pools = known.entry(name).or_default();
            pools.extend(driver.devices.iter().flatten().map(|device| device.pool.as_str()));
        }
        let read = self.parts.iter().flat_map(|(_, devices)| devices);
        for (driver, pool) in read
            .flat_map(|each| &each.places)
            .filter(|(driver, _)| !driver.is_empty())
        {
            known
                .entry(driver)
                .or_default()
                .extend(Some(pool.as_str()).filter(|pool| !pool.is_empty()));
        }
        let known: BTreeMap<String, BTreeSet<String>> = known
            .into_iter()
            .take(MAX_PLACES)
            .map(|(driver, pools)| {
                (
                    driver.to_owned(),
                    pools.into_iter().take(MAX_PLACES).map(str::to_owned).collect(),
                )
            })
            .collect();
        for (index, devices) in std::mem::take(&mut self.parts) {
            let drivers = self.claims[index].drivers.get_or_insert_default();
            for PartDevice { places, device } in devices {
                let places: BTreeSet<Place> = places
                    .iter()
                    .flat_map(|place| resolve(place, &known))
                    .take(MAX_PLACES)
                    .collect();
                for (driver, pool) in places {
                    let held = drivers.entry(driver).or_default().devices.get_or_insert_default();
                    held.push(Device {
                        pool,
                        ..device.clone()
                    });
                }
            }
        }
    }
}

/// Returns the places that may be meant by a place with unreadable names.
fn resolve((driver, pool): &Place, known: &BTreeMap<String, BTreeSet<String>>) -> Vec<Place> {
    let drivers: Vec<&str> = match driver.as_str() {
        "" if known.is_empty() => vec![UNKNOWN_DRIVER],
        "" => known.keys().map(String::as_str).collect(),
        driver => vec![driver],
    };
    let pools = |driver: &str| -> Vec<Place> {
        let of_driver = known.get(driver).filter(|pools| !pools.is_empty());
        let pools: Vec<String> = match (pool.as_str(), of_driver) {
            ("", Some(pools)) => pools.iter().cloned().collect(),
            ("", None) => vec![UNKNOWN_POOL.to_owned()],
            (pool, _) => vec![pool.to_owned()],
        };
        pools.into_iter().map(|pool| (driver.to_owned(), pool)).collect()
    };
    drivers.into_iter().flat_map(pools).collect()
}

impl Part {
    /// Returns `true` if a key of the same claim can follow in the kubelet's order.
    fn is_continued_by(&self, key: Key) -> bool {
        key > Key::DriverState || self.last.is_none_or(|last| last < key)
    }

    /// Reads the value of a key. Returns the length of the value if its syntax is sound.
    fn read(&mut self, found: Found<Key>, value: &[u8]) -> Option<usize> {
        let mut reader = Reader::salvaging(value);
        let text = |reader: &mut Reader<'_>, target: &mut String| -> Result<(), SyntaxError> {
            let mut read = String::new();
            decode::text(reader, &mut read, "string")?;
            *target = read;
            Ok(())
        };
        let list = |reader: &mut Reader<'_>, target: &mut Option<Vec<String>>| -> Result<(), SyntaxError> {
            let mut read = None;
            decode::list(reader, &mut read, "[]string", |reader, item| {
                decode::text(reader, item, "string")
            })?;
            *target = read;
            Ok(())
        };
        let claim = &mut self.claim;
        let ended = match found.key {
            Key::ClaimUid => text(&mut reader, &mut claim.uid),
            Key::ClaimName => text(&mut reader, &mut claim.name),
            Key::Namespace => text(&mut reader, &mut claim.namespace),
            Key::PodUids => {
                let ended = decode_pods(&mut reader, &mut claim.pods);
                let is_sound = ended.is_ok() && reader.first_type_error().is_none();
                self.has_all_pods = is_sound && claim.pods.iter().flatten().next().is_some();
                ended
            }
            Key::DriverState => return Some(0),
            Key::Devices => {
                self.pools.clear();
                return Some(if value.starts_with(b"null") { 4 } else { 0 });
            }
            Key::PoolName => {
                self.current = self.devices.len();
                let (pools, end) = readings(value);
                self.pools = pools;
                return end;
            }
            Key::DeviceName => {
                self.current = self.devices.len();
                let (names, end) = readings(value);
                let places = self.places();
                self.devices.extend(names.into_iter().map(|name| PartDevice {
                    places: places.clone(),
                    device: Device {
                        name,
                        ..Device::default()
                    },
                }));
                // The next device has a pool of its own.
                self.pools.clear();
                return end;
            }
            Key::ShareId => {
                let mut share = None;
                let ended = decode::optional_text(&mut reader, &mut share, "types.UID");
                self.set(ended.is_ok(), |device| device.share_id.clone_from(&share));
                ended
            }
            Key::RequestNames => {
                let mut names = None;
                let ended = list(&mut reader, &mut names);
                self.set(ended.is_ok(), |device| device.requests.clone_from(&names));
                ended
            }
            Key::CdiDeviceIds => {
                let mut ids = None;
                let ended = list(&mut reader, &mut ids);
                self.set(ended.is_ok(), |device| device.cdi_devices.clone_from(&ids));
                self.current = self.devices.len();
                ended
            }
            Key::SkipNodeOperations => list(&mut reader, &mut None),
        };
        let is_sound = ended.is_ok() && reader.first_type_error().is_none();
        is_sound.then(|| reader.offset())
    }

    /// Changes the current device.
    fn set(&mut self, is_sound: bool, change: impl Fn(&mut Device)) {
        if is_sound {
            self.devices[self.current..]
                .iter_mut()
                .for_each(|each| change(&mut each.device));
        }
    }

    fn places(&self) -> Vec<Place> {
        let unread = [String::new()];
        let or_unread = |names: &[String]| -> Vec<String> {
            if names.is_empty() {
                unread.to_vec()
            } else {
                names.to_vec()
            }
        };
        let (drivers, pools) = (or_unread(&self.drivers), or_unread(&self.pools));
        let places = drivers
            .iter()
            .flat_map(|driver| pools.iter().map(move |pool| (driver.clone(), pool.clone())));
        places.collect()
    }
}

/// Returns the readings of a name before the next key, and the length of the value if its syntax is sound.
fn readings(value: &[u8]) -> (Vec<String>, Option<usize>) {
    let mut reader = Reader::new(value);
    let mut name = String::new();
    let ended = decode::text(&mut reader, &mut name, "string");
    let separator = next_byte(&value[reader.offset()..]).0;
    if ended.is_ok() && (is_valid_name(&name) || matches!(separator, Some(b',' | b'}'))) {
        return (with_shortened(name), Some(reader.offset()));
    }
    let text = value.trim_ascii();
    match text.strip_suffix(b",") {
        Some(text) => (names(text).into_iter().flat_map(with_shortened).collect(), None),
        // The file may end in the middle of the name.
        None if !text.ends_with(b"\"") => (Vec::new(), None),
        None => (names(text), None),
    }
}

/// Returns the name, and the name without its last byte if that byte may be a damaged escape of the quote.
fn with_shortened(name: String) -> Vec<String> {
    let mut names = Vec::new();
    if let Some((at, last)) = name.char_indices().next_back() {
        let shorter = &name[..at];
        if !is_valid_name(&String::from(last)) && is_valid_name(shorter) {
            names.push(shorter.to_owned());
        }
        names.push(name);
    }
    names
}

/// Returns the readings of the driver's name, which ends before `:{` at the end of the text.
fn driver_names(text: &[u8]) -> Vec<String> {
    let text = text.trim_ascii_end();
    let tail = text.len().saturating_sub(3);
    let quote = text[tail..].iter().rposition(|&byte| byte == b'"');
    let text = match quote {
        Some(quote) => &text[..tail + quote + 1],
        // The quote is the damaged byte.
        None => text.strip_suffix(b":{").unwrap_or(text),
    };
    let Some(inner) = text.len().checked_sub(1) else {
        return Vec::new();
    };
    let start = text[..inner]
        .iter()
        .rposition(|&byte| byte == b'"' || is_structure(byte) || is_control(byte));
    let start = match start {
        Some(start) if text[start] == b'"' => start,
        Some(start) => start + 1,
        None => 0,
    };
    let is_sound = text[start..].starts_with(b"\"") && quote.is_some();
    let is_alone = text[..start]
        .iter()
        .all(|&byte| is_structure(byte) || byte.is_ascii_whitespace());
    let mut names: Vec<String> = names(&text[start..])
        .into_iter()
        .flat_map(with_shortened)
        .collect();
    if !is_sound || !is_alone {
        // It may be a part of the name.
        names.push(String::new());
    }
    names
}

/// Returns `true` if the end of a claim may be in the text behind a value, unseen. `end` is the length of the value if its
/// syntax is sound.
fn may_hide(value: &[u8], end: Option<usize>, next: Option<Key>) -> bool {
    let rest = &value[end.unwrap_or_default()..];
    let text = String::from_utf8_lossy(rest);
    let is_noise = |character: &char| {
        *character == char::REPLACEMENT_CHARACTER || u8::try_from(*character).is_ok_and(is_control)
    };
    if text.chars().filter(is_noise).take(2).count() > 1 {
        return true;
    }
    let is_other = |byte: &&u8| !is_structure(**byte) && !byte.is_ascii_whitespace();
    let hidden = match next {
        // The name of a driver precedes it.
        Some(Key::Devices) => rest.iter().filter(|&&byte| byte == b'"').take(3).count(),
        _ => rest.iter().filter(is_other).take(3).count(),
    };
    end.is_some() && hidden > 2
}
