//! Decodes Go-shaped values from a [`Reader`].
//!
//! Each function decodes *onto* its target, as Go does: absent fields keep their value, and `null` empties lists,
//! maps and pointers but changes nothing else. A Go `nil` is `None` here, because the kubelet's checksums
//! distinguish `nil` from empty.
//!
//! One behaviour of Go is not reproduced. If a key repeats a third time and its list grows again, Go brings back
//! values of the first list. Such a file fails its checksum here.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};

use super::reader::{DroppedList, Kind, Reader, SyntaxError, WarningKind};

type Read = Result<(), SyntaxError>;

/// Go's `base64.StdEncoding`: padded; the unused bits of the last character are ignored.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// Decodes a Go struct: calls `field` with the index of each known field.
pub(crate) fn object(
    reader: &mut Reader<'_>,
    shape: &Shape,
    mut field: impl FnMut(usize, &mut Reader<'_>) -> Read,
) -> Read {
    match reader.kind()? {
        Kind::Object => {}
        Kind::Null => return reader.literal("null"),
        other => return reader.mismatch(other, shape.go_type),
    }
    if !reader.enter(b'}')? {
        return Ok(());
    }
    let mut seen = 0_u32;
    let mut expected = 0;
    loop {
        // Files that a kubelet wrote have the fields in this order.
        let at_once = shape.fields.get(expected).and_then(|name| reader.exact_key(name));
        let (key, index, offset) = match at_once {
            Some(offset) => (Cow::Borrowed(shape.fields[expected]), Some(expected), offset),
            None => {
                let (key, offset) = reader.key()?;
                let mut index = shape.index_of(&key);
                if index.is_none() && reader.is_salvaging() {
                    index = shape.near(&key);
                    if let Some(index) = index {
                        let reason = format!("read as {:?}, which differs in one byte", shape.fields[index]);
                        reader.left_out(&format!(": key {:?}", shortened(&key)), reason);
                    }
                }
                (key, index, offset)
            }
        };
        match index {
            Some(index) => {
                expected = index + 1;
                if seen & (1 << index) != 0 {
                    reader.warn(WarningKind::DuplicateKey(shortened(&key)), offset);
                }
                seen |= 1 << index;
                reader.in_field(shape.go_type, shape.paths[index], |reader| field(index, reader))?;
            }
            None => {
                reader.warn(WarningKind::UnknownKey(shortened(&key)), offset);
                reader.skip()?;
            }
        }
        if !reader.next(b'}')? {
            return Ok(());
        }
    }
}

/// A Go struct as reflection sees it.
#[derive(Debug)]
pub(crate) struct Shape {
    /// With its package, as type errors print it: `checkpoint.PodDevicesEntry`.
    go_type: &'static str,
    /// Names in JSON.
    fields: &'static [&'static str],
    /// Names in type errors: a promoted field has its path, as in `TypeMeta.kind`.
    paths: &'static [&'static str],
}

impl Shape {
    pub(crate) const fn new(go_type: &'static str, fields: &'static [&'static str]) -> Self {
        Self::promoted(go_type, fields, fields)
    }

    pub(crate) const fn promoted(
        go_type: &'static str,
        fields: &'static [&'static str],
        paths: &'static [&'static str],
    ) -> Self {
        Self {
            go_type,
            fields,
            paths,
        }
    }

    /// Returns the field with exactly this name, or else the one that matches without regard to case.
    fn index_of(&self, key: &str) -> Option<usize> {
        self.fields
            .iter()
            .position(|&name| name == key)
            .or_else(|| self.fields.iter().position(|name| folds_to(key, name)))
    }

    /// Returns the field with a name that differs from `key` in one byte.
    fn near(&self, key: &str) -> Option<usize> {
        // A byte that is not UTF-8 was read as one character.
        let is_near = |name: &&str| {
            let differences = key.chars().zip(name.chars()).filter(|(one, other)| one != other);
            key.chars().count() == name.len() && differences.take(2).count() == 1
        };
        self.fields.iter().position(is_near)
    }
}

/// Returns `true` if two texts differ in exactly one byte.
pub(crate) fn differs_in_one_byte(one: &[u8], other: &[u8]) -> bool {
    let differences = one.iter().zip(other).filter(|(one, other)| one != other);
    one.len() == other.len() && differences.take(2).count() == 1
}

/// Compares by Unicode simple case folding with an ASCII name. Two letters outside ASCII fold into it.
pub(crate) fn folds_to(key: &str, name: &str) -> bool {
    let folded = |character: char| match character {
        '\u{17f}' => 'S',
        '\u{212a}' => 'K',
        other => other.to_ascii_uppercase(),
    };
    key.chars().map(folded).eq(name.chars().map(folded))
}

/// Decodes a Go string of the type `go_type`.
pub(crate) fn text(reader: &mut Reader<'_>, target: &mut String, go_type: &str) -> Read {
    match reader.kind()? {
        Kind::String => {
            *target = reader.string()?.into_owned();
            Ok(())
        }
        Kind::Null => reader.literal("null"),
        other => reader.mismatch(other, go_type),
    }
}

/// Decodes a pointer to a Go string.
pub(crate) fn optional_text(reader: &mut Reader<'_>, target: &mut Option<String>, go_type: &str) -> Read {
    if reader.kind()? == Kind::Null {
        *target = None;
        return reader.literal("null");
    }
    text(reader, target.get_or_insert_default(), go_type)
}

/// Decodes a Go unsigned integer with values up to `max`.
pub(crate) fn unsigned(reader: &mut Reader<'_>, target: &mut u64, max: u64, go_type: &str) -> Read {
    number(reader, target, go_type, |digits| {
        digits.parse().ok().filter(|&value| value <= max)
    })
}

/// Decodes a Go `int64` of the type `go_type`.
pub(crate) fn signed(reader: &mut Reader<'_>, target: &mut i64, go_type: &str) -> Read {
    number(reader, target, go_type, |digits| digits.parse().ok())
}

fn number<T>(
    reader: &mut Reader<'_>,
    target: &mut T,
    go_type: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Read {
    match reader.kind()? {
        Kind::Number => {
            let offset = reader.offset();
            let digits = reader.number()?;
            match parse(digits) {
                Some(value) => *target = value,
                None => reader.type_error(format_args!("number {digits}"), go_type, offset),
            }
            Ok(())
        }
        Kind::Null => reader.literal("null"),
        other => reader.mismatch(other, go_type),
    }
}

/// Decodes a Go `[]byte`: base64 in a string, or a list of numbers.
pub(crate) fn bytes(reader: &mut Reader<'_>, target: &mut Option<Vec<u8>>) -> Read {
    if reader.kind()? != Kind::String {
        return list(reader, target, "[]uint8", |reader, byte| {
            let mut value = u64::from(*byte);
            unsigned(reader, &mut value, u64::from(u8::MAX), "uint8")?;
            *byte = u8::try_from(value).unwrap_or_default();
            Ok(())
        });
    }
    let offset = reader.offset();
    let encoded = reader.string()?;
    match from_base64(&encoded) {
        Ok(decoded) => *target = Some(decoded),
        Err(at) => reader.fail(format!("illegal base64 data at input byte {at}"), offset),
    }
    Ok(())
}

/// Decodes as Go's `StdEncoding` does: line breaks are ignored. An error is the offset of the first invalid byte.
fn from_base64(encoded: &str) -> Result<Vec<u8>, usize> {
    let is_break = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let decoded = BASE64.decode(encoded).or_else(|error| {
        if !encoded.bytes().any(|byte| is_break(&byte)) {
            return Err(error);
        }
        let joined: Vec<u8> = encoded.bytes().filter(|byte| !is_break(byte)).collect();
        BASE64.decode(joined)
    });
    decoded.map_err(|_| first_corrupt(encoded.as_bytes()))
}

/// Returns the offset at which Go's decoder reports broken base64. Go reads four characters at a time. If fewer
/// than four are left, it reports the first of them.
fn first_corrupt(encoded: &[u8]) -> usize {
    let is_break = |at: usize| matches!(encoded.get(at), Some(b'\r' | b'\n'));
    let after_breaks = |mut at: usize| {
        while is_break(at) {
            at += 1;
        }
        at
    };
    let (mut at, mut taken) = (0, 0);
    while let Some(&byte) = encoded.get(at) {
        match byte {
            b'\r' | b'\n' => {}
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'+' | b'/' => taken = (taken + 1) % 4,
            b'=' if taken == 2 => {
                let second = after_breaks(at + 1);
                return match encoded.get(second) {
                    None => encoded.len(),
                    Some(b'=') => after_breaks(second + 1),
                    Some(_) => second - 1,
                };
            }
            b'=' if taken == 3 => return after_breaks(at + 1),
            _ => return at,
        }
        at += 1;
    }
    at - taken
}

/// Decodes a Go slice of the type `go_type`.
pub(crate) fn list<T: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<Vec<T>>,
    go_type: &str,
    element: impl FnMut(&mut Reader<'_>, &mut T) -> Read,
) -> Read {
    elements(reader, target, go_type, None, element)
}

/// How to handle elements that salvaging keeps or drops one by one.
pub(crate) struct Unit<T> {
    /// Describes an element for display, as far as it could be read.
    pub(crate) describe: fn(&T) -> String,
    /// Returns `true` if the readable part of a damaged element is kept.
    pub(crate) is_kept: fn(&T) -> bool,
}

/// Decodes a Go slice of [`Unit`]s.
pub(crate) fn units<T: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<Vec<T>>,
    go_type: &str,
    unit: &Unit<T>,
    element: impl FnMut(&mut Reader<'_>, &mut T) -> Read,
) -> Read {
    elements(reader, target, go_type, Some(unit), element)
}

fn elements<T: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<Vec<T>>,
    go_type: &str,
    unit: Option<&Unit<T>>,
    mut element: impl FnMut(&mut Reader<'_>, &mut T) -> Read,
) -> Read {
    match reader.kind()? {
        Kind::Array => {}
        Kind::Null => {
            *target = None;
            return reader.literal("null");
        }
        other => return reader.mismatch(other, go_type),
    }
    let items = target.get_or_insert_default();
    if !reader.enter(b']')? {
        items.clear();
        return Ok(());
    }
    let mut length = 0;
    let start = reader.offset();
    for index in 0.. {
        if length == items.len() {
            reserve(items, reader, start);
            items.push(T::default());
        }
        let item = &mut items[length];
        let problem = match unit {
            None => element(reader, item).map(|()| None),
            Some(_) => reader.unit(|reader| element(reader, item)),
        }?;
        match problem {
            None => length += 1,
            Some(reason) => {
                length += usize::from(record_damage(reader, unit, index, item, reason.message));
                items.truncate(length);
            }
        }
        if !reader.next(b']')? {
            break;
        }
    }
    items.truncate(length);
    Ok(())
}

/// Reads the whole objects of a list in a document with broken syntax. `first_key` is the key that kubelets write first
/// in each object.
///
/// Each is read from that key up to the next such key, so the work is linear, and damage to one element does not
/// affect another.
pub(crate) fn find_whole<T: Default>(
    bytes: &[u8],
    first_key: &str,
    unit: &Unit<T>,
    dropped: &mut DroppedList,
    mut element: impl FnMut(&mut Reader<'_>, &mut T) -> Read,
) -> Vec<T> {
    let is_start = |at: &usize| {
        let inner = bytes[*at..].strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
        let key = inner.and_then(|inner| inner.strip_prefix(b"\""));
        let rest = key.and_then(|key| key.strip_prefix(first_key.as_bytes()));
        rest.is_some_and(|rest| rest.starts_with(b"\""))
    };
    let mut items = Vec::new();
    let mut start = (0..bytes.len()).find(is_start);
    for index in 0.. {
        let Some(from) = start else { break };
        start = (from + 1..bytes.len()).find(is_start);
        let mut reader = Reader::salvaging(&bytes[from..start.unwrap_or(bytes.len())]);
        let mut item = T::default();
        let ended = element(&mut reader, &mut item).map_err(|error| error.message);
        let ended = ended.and_then(|()| {
            reader
                .first_type_error()
                .map_or(Ok(()), |error| Err(error.message.clone()))
        });
        match ended {
            Ok(()) => items.push(item),
            Err(reason) => dropped.push(format!("[{index}]: {}", (unit.describe)(&item)), reason),
        }
    }
    items
}

/// Records that an element is damaged. Returns `true` if the readable part of it is kept.
fn record_damage<T>(
    reader: &mut Reader<'_>,
    unit: Option<&Unit<T>>,
    index: usize,
    item: &T,
    reason: String,
) -> bool {
    let description = unit.map(|unit| (unit.describe)(item)).unwrap_or_default();
    let is_kept = unit.is_some_and(|unit| (unit.is_kept)(item));
    let reason = match is_kept {
        true => format!("{reason}; the devices that could be read stay held"),
        false => reason,
    };
    let separator = if description.is_empty() { "" } else { ": " };
    reader.left_out(&format!("[{index}]{separator}{description}"), reason);
    is_kept
}

/// Reserves memory before an item is pushed. The list is expected to continue as it began: the items so far predict
/// how many fit into the rest of the document. One exact reservation costs less time and peak memory than doubling.
fn reserve<T>(items: &mut Vec<T>, reader: &Reader<'_>, start: usize) {
    const FEW: usize = 64;
    if items.len() < FEW || items.len() < items.capacity() {
        return;
    }
    let read = (reader.offset() - start).max(1);
    let to_come = items.len().saturating_mul(reader.remaining()) / read;
    // Some more, so that the last few items do not cause a copy of all.
    items.reserve_exact(to_come + to_come / 16 + FEW);
}

/// Decodes a Go map with string keys.
pub(crate) fn map<V: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<BTreeMap<String, V>>,
    go_type: &str,
    value: impl FnMut(&mut Reader<'_>, &mut V) -> Read,
) -> Read {
    entries(reader, target, go_type, |_, key, _| Some(key.to_owned()), value)
}

/// Decodes a Go map with `int64` keys.
pub(crate) fn int_map<V: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<BTreeMap<i64, V>>,
    go_type: &str,
    value: impl FnMut(&mut Reader<'_>, &mut V) -> Read,
) -> Read {
    let parse = |reader: &mut Reader<'_>, key: &str, offset: usize| {
        let number = key.parse().ok();
        if number.is_none() {
            reader.type_error(format_args!("number {key}"), "int64", offset);
        }
        number
    };
    entries(reader, target, go_type, parse, value)
}

fn entries<K: Ord, V: Default>(
    reader: &mut Reader<'_>,
    target: &mut Option<BTreeMap<K, V>>,
    go_type: &str,
    mut parse_key: impl FnMut(&mut Reader<'_>, &str, usize) -> Option<K>,
    mut value: impl FnMut(&mut Reader<'_>, &mut V) -> Read,
) -> Read {
    match reader.kind()? {
        Kind::Object => {}
        Kind::Null => {
            *target = None;
            return reader.literal("null");
        }
        other => return reader.mismatch(other, go_type),
    }
    let map = target.get_or_insert_default();
    if !reader.enter(b'}')? {
        return Ok(());
    }
    loop {
        let (key, offset) = reader.key()?;
        let mut fresh = V::default();
        let mut parsed = None;
        let dropped = reader.unit(|reader| {
            value(reader, &mut fresh)?;
            parsed = parse_key(reader, &key, offset);
            Ok(())
        })?;
        if let Some(reason) = dropped {
            reader.left_out(&format!("[{:?}]", shortened(&key)), reason.message);
        } else if let Some(parsed) = parsed {
            match map.entry(parsed) {
                Entry::Vacant(place) => drop(place.insert(fresh)),
                Entry::Occupied(mut place) => {
                    place.insert(fresh);
                    reader.warn(WarningKind::DuplicateKey(shortened(&key)), offset);
                }
            }
        }
        if !reader.next(b'}')? {
            return Ok(());
        }
    }
}

/// Truncates a text for display in a message.
pub(crate) fn shortened(text: &str) -> String {
    const LONGEST: usize = 120;
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
