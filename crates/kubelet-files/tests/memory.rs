//! Memory stays within a small multiple of the input, for any input.
//!
//! The peak is the memory that the call holds besides the file's own bytes, divided by the length of the file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use devlet_kubelet_files::{Role, device_plugin, dra, read, salvage, verify};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The counter is global to the process, so only one test may run at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const SIZE: usize = 1 << 15;

/// Maximum multiple for hostile files: `{}` is two bytes, and its entry has five fields.
const HOSTILE: f64 = 128.0;
/// Maximum multiple for hostile files that get a line per entry, because each entry is replaced by the next.
const HOSTILE_VERDICT: f64 = 192.0;
/// Maximum multiple for files written by kubelets.
const REALISTIC: f64 = 8.0;

fn peak(input: &[u8], call: impl FnOnce(&[u8])) -> f64 {
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    call(input);
    let peak = ALLOCATOR.peak_usage().saturating_sub(before);
    peak as f64 / input.len() as f64
}

/// Measures every public entry point.
fn peaks(input: &[u8]) -> Vec<(&'static str, f64)> {
    let mut peaks = vec![
        (
            "device_plugin::read",
            peak(input, |input| drop(device_plugin::read(input))),
        ),
        (
            "device_plugin::v0::read",
            peak(input, |input| drop(device_plugin::v0::read(input))),
        ),
        (
            "dra::flat::read",
            peak(input, |input| drop(dra::flat::read(input))),
        ),
        (
            "dra::envelope::read",
            peak(input, |input| drop(dra::envelope::read(input))),
        ),
        (
            "dra::health::read",
            peak(input, |input| drop(dra::health::read(input))),
        ),
        (
            "response::decode",
            peak(input, |input| drop(device_plugin::response::decode(input))),
        ),
    ];
    for role in [
        None,
        Some(Role::DevicePlugin),
        Some(Role::DraManager),
        Some(Role::DraHealth),
    ] {
        peaks.push(("read", peak(input, |input| drop(read(input, role)))));
        peaks.push(("verify", peak(input, |input| drop(verify(input, role)))));
        peaks.push(("salvage", peak(input, |input| drop(salvage(input, role)))));
    }
    peaks
}

fn assert_within(bound: f64, name: &str, input: &[u8]) {
    for (call, factor) in peaks(input) {
        if factor > bound / 4.0 {
            println!("{name}: {call} holds {factor:.1} times the input");
        }
        assert!(
            factor <= bound,
            "{name}: {call} holds {factor:.1} times the input"
        );
    }
}

/// Returns `start`, then `part` until the file is full, then `end`.
fn filled(start: &str, part: &str, end: &str) -> Vec<u8> {
    let times = SIZE.saturating_sub(start.len() + end.len()) / part.len();
    let part = part.repeat(times);
    [start, part.trim_end_matches(','), end].concat().into_bytes()
}

/// Like [`filled`], as the document inside an envelope.
fn enveloped(start: &str, part: &str, end: &str) -> Vec<u8> {
    let inner = String::from_utf8_lossy(&filled(start, part, end))
        .replace('\\', "\\\\")
        .replace('"', "\\\"");
    format!("{{\"Data\":\"{inner}\",\"Checksum\":0}}").into_bytes()
}

#[test]
fn lists_of_almost_nothing_cost_a_bounded_multiple() {
    let _alone = alone();
    let devices = "{\"Data\":{\"PodDeviceEntries\":[";
    for part in [
        "{},",
        "null,",
        "1,",
        "[],",
        "{\"DeviceIDs\":{\"0\":[]}},",
        "{\"DeviceIDs\":[\"\"]},",
    ] {
        assert_within(HOSTILE, part, &filled(devices, part, "]},\"Checksum\":0}"));
        assert_within(HOSTILE, part, &filled(devices, part, ""));
    }
    let one = "{\"Data\":{\"PodDeviceEntries\":[{\"DeviceIDs\":{\"0\":[";
    assert_within(
        HOSTILE,
        "device ids",
        &filled(one, "\"\",", "]}}]},\"Checksum\":0}"),
    );
    let answer = "{\"Data\":{\"PodDeviceEntries\":[{\"AllocResp\":[";
    assert_within(HOSTILE, "bytes", &filled(answer, "1,", "]}]},\"Checksum\":0}"));
    assert_within(HOSTILE_VERDICT, "1.8", &filled("{\"Entries\":[", "{},", "]}"));
    assert_within(
        HOSTILE_VERDICT,
        "1.9",
        &filled("{\"PodDeviceEntries\":[", "{\"DeviceID\":\"\"},", "]}"),
    );
    assert_within(
        HOSTILE,
        "flat",
        &filled("{\"version\":\"v1\",\"entries\":[", "{},", "],\"checksum\":0}"),
    );
    let handles = "{\"version\":\"v1\",\"entries\":[{\"ResourceHandles\":[";
    assert_within(
        HOSTILE,
        "handles",
        &filled(handles, "{\"structuredData\":{}},", "]}],\"checksum\":0}"),
    );
    let claims = "{\"ClaimInfoStateList\":[";
    assert_within(HOSTILE, "claims", &enveloped(claims, "{},", "]}"));
    let devices = "{\"ClaimInfoStateList\":[{\"DriverState\":{\"d\":{\"Devices\":[";
    assert_within(HOSTILE, "prepared devices", &enveloped(devices, "{},", "]}}}]}"));
}

#[test]
fn lists_of_almost_nothing_with_the_right_checksum_cost_a_bounded_multiple() {
    let _alone = alone();
    // Only a file with the right checksum is checked entry by entry, and here each but the last is replaced.
    let devices = |sum: u64| {
        filled(
            "{\"Data\":{\"PodDeviceEntries\":[",
            "{},",
            &format!("]}},\"Checksum\":{sum:10}}}"),
        )
    };
    let file = device_plugin::read(&devices(0)).expect("it decodes");
    let sum = file.checksum.expect("it has one").computed;
    drop(file);
    assert_within(HOSTILE_VERDICT, "entries", &devices(sum));

    let claims = |sum: u64| {
        filled(
            "{\"version\":\"v1\",\"entries\":[",
            "{},",
            &format!("],\"checksum\":{sum:10}}}"),
        )
    };
    let file = dra::flat::read(&claims(0)).expect("it decodes");
    let sum = file.checksum.expect("it has one").computed;
    drop(file);
    assert_within(HOSTILE_VERDICT, "flat claims", &claims(sum));
}

#[test]
fn many_keys_cost_a_bounded_multiple() {
    let _alone = alone();
    let numbered = |start: &str, part: fn(usize) -> String, end: &str| {
        let mut text = start.to_owned();
        for index in 0.. {
            let part = part(index);
            if text.len() + part.len() + end.len() > SIZE {
                break;
            }
            text.push_str(&part);
        }
        [text.trim_end_matches(','), end].concat().into_bytes()
    };
    let unknown = numbered(
        "{\"Data\":{",
        |index| format!("\"{index}\":0,"),
        "},\"Checksum\":0}",
    );
    assert_within(HOSTILE, "unknown keys", &unknown);
    let registered = numbered(
        "{\"Data\":{\"RegisteredDevices\":{",
        |index| format!("\"{index}\":[],"),
        "}},\"Checksum\":0}",
    );
    assert_within(HOSTILE, "registered", &registered);
    let nodes = numbered(
        "{\"Data\":{\"PodDeviceEntries\":[{\"DeviceIDs\":{",
        |index| format!("\"{index}\":[\"\"],"),
        "}}]},\"Checksum\":0}",
    );
    assert_within(HOSTILE, "NUMA nodes", &nodes);
    let drivers = numbered(
        "{",
        |index| format!("\"{index}\":{{\"Devices\":{{\"\":{{}}}}}},"),
        "}",
    );
    assert_within(HOSTILE, "health", &drivers);
    let devices = numbered(
        "{\"d\":{\"Devices\":{",
        |index| format!("\"{index}\":{{}},"),
        "}}}",
    );
    assert_within(HOSTILE, "health of devices", &devices);
    assert_within(
        HOSTILE,
        "duplicate keys",
        &filled("{\"Data\":{},", "\"Checksum\":0,", "\"Checksum\":0}"),
    );
    let again = "\"PodDeviceEntries\":[{\"PodUID\":\"a\"}],";
    assert_within(
        HOSTILE,
        "duplicate lists",
        &filled("{\"Data\":{", again, "\"x\":0},\"Checksum\":0}"),
    );
}

#[test]
fn text_costs_a_bounded_multiple() {
    let _alone = alone();
    let uid = "{\"Data\":{\"PodDeviceEntries\":[{\"PodUID\":\"";
    for part in ["x", "\\n", "\\u0000", "\\ud800", "ü", "<"] {
        assert_within(16.0, part, &filled(uid, part, "\"}]},\"Checksum\":0}"));
        assert_within(16.0, part, &filled(uid, part, ""));
        assert_within(16.0, part, &filled("{\"Data\":\"", part, "\",\"Checksum\":0}"));
        assert_within(16.0, part, &filled("{\"Data\":\"", part, ""));
        assert_within(16.0, part, &filled("{\"", part, "\":0}"));
    }
    let mut invalid = filled(uid, "x", "\"}]},\"Checksum\":0}");
    for byte in invalid.iter_mut().filter(|byte| **byte == b'x') {
        *byte = 0xff;
    }
    assert_within(16.0, "invalid UTF-8", &invalid);
    let number = filled("{\"Data\":{},\"Checksum\":", "9", "}");
    assert_within(16.0, "a long number", &number);
    let node = filled(
        "{\"Data\":{\"PodDeviceEntries\":[{\"DeviceIDs\":{\"",
        "9",
        "\":[]}}]},\"Checksum\":0}",
    );
    assert_within(16.0, "a long NUMA node", &node);
}

#[test]
fn nesting_costs_a_bounded_multiple() {
    let _alone = alone();
    for depth in [9_998, 10_001, SIZE] {
        for (start, part) in [
            ("", "["),
            ("{\"Data\":", "["),
            ("{\"x\":", "{\"a\":"),
            ("{\"Data\":{\"PodDeviceEntries\":", "["),
        ] {
            assert_within(16.0, part, [start, &part.repeat(depth)].concat().as_bytes());
        }
    }
    // Nested groups: bytes of a plugin's answer that open groups and never close them.
    let groups = vec![0x0b; SIZE];
    assert_within(16.0, "groups", &groups);
    assert_within(HOSTILE, "empty mounts", &[0x12, 0x00].repeat(SIZE / 2));
}

#[test]
fn files_of_kubelets_cost_less_than_eight_times_their_size() {
    let _alone = alone();
    let mut devices = String::from("{\"Data\":{\"PodDeviceEntries\":[");
    let mut claims = String::new();
    for index in 0..4_000 {
        let comma = if index > 0 { "," } else { "" };
        devices.push_str(&format!(
            "{comma}{{\"PodUID\":\"{index:08x}-5b7c-4a7a-9c0e-3f3a8f1f0000\",\"ContainerName\":\"main\",\
             \"ResourceName\":\"vendor.com/gpu\",\"DeviceIDs\":{{\"0\":[\"gpu-{index}\"]}},\
             \"AllocResp\":\"CiIKHUVYQU1QTEVDT01ERVZJQ0VBX0RFVkEzX1RUWTEwEgEwGhwKCi9kZXYvdHR5MTASCi9kZXYvdHR5MTAaAnJ3\"}}"
        ));
        claims.push_str(&format!(
            "{comma}{{\"ClaimUID\":\"{index:08x}-5b7c-4a7a-9c0e-3f3a8f1f0000\",\"ClaimName\":\"claim-{index}\",\
             \"Namespace\":\"default\",\"PodUIDs\":{{\"{index:08x}-5b7c-4a7a-9c0e-3f3a8f1f0001\":{{}}}},\
             \"DriverState\":{{\"gpu.example.com\":{{\"Devices\":[{{\"PoolName\":\"worker-1\",\"DeviceName\":\"gpu-{index}\",\
             \"ShareID\":null,\"RequestNames\":[\"gpu\"],\"CDIDeviceIDs\":[\"example.com/gpu=gpu-{index}\"]}}]}}}}}}"
        ));
    }
    devices.push_str("],\"RegisteredDevices\":{\"vendor.com/gpu\":[\"gpu-0\"]}},\"Checksum\":0}");
    let checkpoint = device_plugin::read(devices.as_bytes()).expect("it decodes");
    let devices = device_plugin::write(checkpoint.unverified());
    drop(checkpoint);
    assert_within(REALISTIC, "devices", devices.as_bytes());

    let inner = format!("{{\"ClaimInfoStateList\":[{claims}]}}").replace('"', "\\\"");
    let file = format!("{{\"Data\":\"{inner}\",\"Checksum\":0}}");
    let checkpoint = dra::envelope::read(file.as_bytes()).expect("it decodes");
    let claims = dra::envelope::write(checkpoint.unverified().claims.as_deref());
    drop(checkpoint);
    assert_within(REALISTIC, "claims", claims.as_bytes());
}

#[test]
fn a_megabyte_of_empty_entries_costs_no_more_per_byte() {
    let _alone = alone();
    let file = format!("{{\"Data\":{{\"PodDeviceEntries\":[{}", "{},".repeat(350_000));
    for factor in [
        peak(file.as_bytes(), |input| drop(device_plugin::read(input))),
        peak(file.as_bytes(), |input| drop(verify(input, None))),
        peak(file.as_bytes(), |input| drop(salvage(input, None))),
    ] {
        assert!(factor <= HOSTILE, "holds {factor:.1} times the input");
    }
}

#[test]
fn the_number_of_warnings_about_unknown_keys_is_limited() {
    let _alone = alone();
    let file = filled("{\"Data\":{", "\"x\":[[]],", "\"y\":0},\"Checksum\":0}");
    let verdict = verify(&file, None);
    assert!(verdict.warnings.len() <= 101, "{}", verdict.warnings.len());
}
