//! `dra_health_state`: what drivers last said about their devices. It has no checksum.

use std::collections::BTreeMap;

use crate::file::{File, ReadError, document};
use crate::format::Format;
use crate::go_json::decode::{self, Shape};
use crate::go_json::{Kind, Reader, SyntaxError};

const DRIVER: Shape = Shape {
    go_type: "state.DriverHealthState",
    fields: &["Devices"],
};
const DEVICE: Shape = Shape {
    go_type: "state.DeviceHealth",
    fields: &[
        "PoolName",
        "DeviceName",
        "Health",
        "LastUpdated",
        "HealthCheckTimeout",
        "Message",
    ],
};

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

/// The health of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceHealth {
    /// The pool that the device is from.
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// `Healthy`, `Unhealthy` or `Unknown`.
    pub health: String,
    /// RFC 3339, as in the file; empty when the file does not say.
    pub last_updated: String,
    /// In nanoseconds; 0 stands for 30 seconds.
    pub timeout_ns: i64,
    /// The driver's words.
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

/// A Go `time.Time`. Go takes the bytes between the quotes as they are, escapes included.
fn decode_time(reader: &mut Reader<'_>, time: &mut String) -> Result<(), SyntaxError> {
    let kind = reader.kind()?;
    let start = reader.offset();
    reader.skip()?;
    match kind {
        Kind::Null => {}
        Kind::String => {
            let quoted = reader.slice(start + 1, reader.offset() - 1);
            match std::str::from_utf8(quoted) {
                Ok(text) if is_rfc3339(text.as_bytes()) => text.clone_into(time),
                _ => {
                    let shown = decode::shortened(&String::from_utf8_lossy(quoted));
                    reader.fail(format!("{shown:?} is not an RFC 3339 time"), start);
                }
            }
        }
        _ => reader.fail("Time.UnmarshalJSON: input is not a JSON string".into(), start),
    }
    Ok(())
}

/// Whether Go's strict RFC 3339 parser takes this. (`jiff` accepts more than Go does.)
fn is_rfc3339(text: &[u8]) -> bool {
    let number = |range: std::ops::Range<usize>| -> Option<u32> {
        let digits = text.get(range)?;
        digits.iter().all(u8::is_ascii_digit).then(|| {
            digits
                .iter()
                .fold(0, |value, digit| value * 10 + u32::from(digit - b'0'))
        })
    };
    let separators = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
    if separators.iter().any(|&(at, byte)| text.get(at) != Some(&byte)) {
        return false;
    }
    let (Some(year), Some(month), Some(day)) = (number(0..4), number(5..7), number(8..10)) else {
        return false;
    };
    let (Some(hour), Some(minute), Some(second)) = (number(11..13), number(14..16), number(17..19)) else {
        return false;
    };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + u32::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return false,
    };
    if day == 0 || day > days || hour > 23 || minute > 59 || second > 59 {
        return false;
    }
    let mut zone = 19;
    if text.get(zone) == Some(&b'.') {
        let digits = text[zone + 1..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        if digits == 0 {
            return false;
        }
        zone += 1 + digits;
    }
    match text.get(zone) {
        Some(b'Z') => text.len() == zone + 1,
        Some(b'+' | b'-') => {
            text.len() == zone + 6
                && text[zone + 3] == b':'
                && number(zone + 1..zone + 3).is_some_and(|hours| hours < 24)
                && number(zone + 4..zone + 6).is_some_and(|minutes| minutes < 60)
        }
        _ => false,
    }
}
