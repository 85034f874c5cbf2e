//! Checks that every message has the bytes that the kubelet and its plugins exchange.
//!
//! The expected bytes are written by hand from the field numbers. A field is a tag and a value; the tag is
//! `number << 3 | type`:
//!
//! | field | 1 | 2 | 3 | 4 | 5 |
//! | --- | --- | --- | --- | --- | --- |
//! | number or bool (type 0), then a varint | `08` | `10` | `18` | `20` | `28` |
//! | string, message, map entry, packed list (type 2), then length and bytes | `0a` | `12` | `1a` | `22` | `2a` |
//!
//! A varint has seven bits per byte, lowest first, the top bit set on all but the last: 300 is `ac 02`. A map
//! entry is a message of key (1) and value (2).

#![allow(clippy::unwrap_used)]

mod device_plugin;
mod dra;
mod dra_health;
mod plugin_registration;
mod pod_resources;

use std::fmt::Debug;

use prost::Message;

/// Checks encoding and decoding.
#[track_caller]
fn encodes_as<M: Message + Default + PartialEq + Debug>(message: &M, bytes: &[u8]) {
    assert_eq!(
        message.encode_to_vec().escape_ascii().to_string(),
        bytes.escape_ascii().to_string()
    );
    decodes_as(bytes, message);
}

/// Checks decoding only, for bytes that a peer may send but prost does not.
#[track_caller]
fn decodes_as<M: Message + Default + PartialEq + Debug>(bytes: &[u8], message: &M) {
    assert_eq!(M::decode(bytes).unwrap(), *message);
}

fn strings<const N: usize>(strings: [&str; N]) -> Vec<String> {
    strings.map(str::to_owned).into()
}
