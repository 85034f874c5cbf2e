//! `dra_health_state`: the last health reports of drivers about their devices. The file does not have a checksum.

use std::collections::BTreeMap;

use crate::file::{File, ReadError, document};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{Kind, Reader, SyntaxError};

const DRIVER: Shape = Shape::new("state.DriverHealthState", &["Devices"]);
const DEVICE: Shape = Shape::new(
    "state.DeviceHealth",
    &[
        "PoolName",
        "DeviceName",
        "Health",
        "LastUpdated",
        "HealthCheckTimeout",
        "Message",
    ],
);

/// The content of the file. `None` is Go's `nil`: a kubelet that loads one panics at the next report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HealthState {
    /// By driver name.
    pub drivers: Option<BTreeMap<String, DriverHealth>>,
}

/// One driver's devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverHealth {
    /// By `pool/device`.
    pub devices: Option<BTreeMap<String, DeviceHealth>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceHealth {
    /// The pool that the device is from.
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// `Healthy`, `Unhealthy` or `Unknown`.
    pub health: String,
    /// RFC 3339, as in the file; empty if the file does not have it.
    pub last_updated: String,
    /// In nanoseconds; 0 means 30 seconds.
    pub timeout_ns: i64,
    /// The driver's message.
    pub message: String,
}

/// Reads a `dra_health_state`.
pub fn read(bytes: &[u8]) -> Result<File<HealthState>, ReadError> {
    let mut state = HealthState {
        drivers: Some(BTreeMap::new()),
    };
    let warnings = document(bytes, |reader| {
        decode::map(
            reader,
            &mut state.drivers,
            "state.DevicesHealthMap",
            decode_driver,
        )
    })?;
    Ok(File::new(Format::DraHealth, None, warnings, state))
}

fn decode_driver(reader: &mut Reader<'_>, driver: &mut DriverHealth) -> Result<(), SyntaxError> {
    decode::object(reader, &DRIVER, |_, reader| {
        decode::map(
            reader,
            &mut driver.devices,
            "map[string]state.DeviceHealth",
            decode_device,
        )
    })
}

fn decode_device(reader: &mut Reader<'_>, device: &mut DeviceHealth) -> Result<(), SyntaxError> {
    decode::object(reader, &DEVICE, |field, reader| match field {
        0 => decode::text(reader, &mut device.pool, "string"),
        1 => decode::text(reader, &mut device.device, "string"),
        2 => decode::text(reader, &mut device.health, "state.DeviceHealthStatus"),
        3 => decode_time(reader, &mut device.last_updated),
        4 => decode::signed(reader, &mut device.timeout_ns, "time.Duration"),
        _ => decode::text(reader, &mut device.message, "string"),
    })
}

/// Decodes a Go `time.Time`. Go parses the bytes between the quotes without unescaping them.
fn decode_time(reader: &mut Reader<'_>, time: &mut String) -> Result<(), SyntaxError> {
    let kind = reader.kind()?;
    let start = reader.offset();
    reader.skip()?;
    match kind {
        Kind::Null => {}
        Kind::String => {
            let quoted = reader.slice(start + 1, reader.offset() - 1);
            match std::str::from_utf8(quoted) {
                Ok(text) if is_go_time(text.as_bytes()) => text.clone_into(time),
                _ => {
                    let shown = decode::shortened(&String::from_utf8_lossy(quoted));
                    reader.abort(format!("{shown:?} is not an RFC 3339 time"), start);
                }
            }
        }
        _ => reader.abort("Time.UnmarshalJSON: input is not a JSON string".into(), start),
    }
    Ok(())
}

/// Returns `true` if Go accepts this as a time. Go intends RFC 3339, but also accepts an hour of one digit, a
/// comma before the fraction, and offsets of 24 hours or 60 minutes (<https://go.dev/issue/54580>).
fn is_go_time(text: &[u8]) -> bool {
    parse_time(text).is_some_and(<[u8]>::is_empty)
}

/// Parses the time at the start of `text` and returns the rest.
fn parse_time(text: &[u8]) -> Option<&[u8]> {
    let (year, text) = number(text, 4)?;
    let (month, text) = number(text.strip_prefix(b"-")?, 2)?;
    let (day, text) = number(text.strip_prefix(b"-")?, 2)?;
    let text = text.strip_prefix(b"T")?;
    let (hour, text) = number(text, 2).or_else(|| number(text, 1))?;
    let (minute, text) = number(text.strip_prefix(b":")?, 2)?;
    let (second, mut text) = number(text.strip_prefix(b":")?, 2)?;
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if day == 0 || day > days || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    if let [b'.' | b',', b'0'..=b'9', rest @ ..] = text {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        text = &rest[digits..];
    }
    match text {
        [b'Z', rest @ ..] => Some(rest),
        [b'+' | b'-', rest @ ..] => {
            let (hours, rest) = number(rest, 2)?;
            let (minutes, rest) = number(rest.strip_prefix(b":")?, 2)?;
            (hours <= 24 && minutes <= 60).then_some(rest)
        }
        _ => None,
    }
}

/// Parses a number of `digits` digits and returns it with the rest.
fn number(text: &[u8], digits: usize) -> Option<(u32, &[u8])> {
    let (number, rest) = text.split_at_checked(digits)?;
    let value = |number: &[u8]| {
        let digits = number.iter().map(|digit| u32::from(digit - b'0'));
        digits.fold(0, |value, digit| value * 10 + digit)
    };
    number
        .iter()
        .all(u8::is_ascii_digit)
        .then(|| (value(number), rest))
}
