//! Tests of the printed forms that are hashed, of plugins' answers, and of details of reading V1 and V2.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::checksum::Version;
use super::response::{self, InvalidResponse};
use super::{Checkpoint, Devices, Entry, read, write};
use crate::{Format, Role, verify, verify::Problem};

fn vectors(directory: &str, suffix: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("testdata")
        .join(directory);
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("test data") {
        let text = entry.expect("test data").path();
        if let Some(stem) = text.to_str().and_then(|path| path.strip_suffix(suffix)) {
            found.push((
                PathBuf::from(format!("{stem}.json")),
                fs::read(&text).expect("test data"),
            ));
        }
    }
    assert!(!found.is_empty());
    found
}

#[test]
fn every_vector_prints_as_the_kubelet_printed_it() {
    for (directory, suffix) in [
        ("deviceplugin", ".printed.txt"),
        ("deviceplugin-v1-extra", ".hashed.txt"),
    ] {
        for (path, expected) in vectors(directory, suffix) {
            let file = read(&fs::read(&path).expect("test data")).expect("it decodes");
            // A file without entries is the same in both versions, and so is its text.
            let version = if file.format == Format::DevicePluginV1 {
                Version::V1
            } else {
                Version::V2
            };
            let mut printed = Vec::new();
            file.unverified().print(version, &mut printed);
            assert_eq!(
                String::from_utf8_lossy(&printed),
                String::from_utf8_lossy(&expected),
                "{}",
                path.display()
            );
        }
    }
}

fn text(document: &str) -> String {
    read(document.as_bytes())
        .expect_err("it does not decode")
        .kubelet_text()
        .expect("a kubelet's text")
        .to_owned()
}

#[test]
fn type_errors_are_those_of_the_kubelet() {
    assert_eq!(
        text(r#"{"Data":{"PodDeviceEntries":[{"PodUID":1}]}}"#),
        "json: cannot unmarshal number into Go struct field PodDevicesEntry.Data.PodDeviceEntries.PodUID of type string"
    );
    assert_eq!(
        text(r#"{"Data":{"PodDeviceEntries":[{"DeviceIDs":{"x":[]}}]}}"#),
        "json: cannot unmarshal number x into Go struct field PodDevicesEntry.Data.PodDeviceEntries.DeviceIDs of type int64"
    );
    assert_eq!(
        text(r#"{"Data":[]}"#),
        "json: cannot unmarshal array into Go struct field Data.Data of type checkpoint.checkpointData"
    );
    assert_eq!(
        text(r#"{"Checksum":-0}"#),
        "json: cannot unmarshal number -0 into Go struct field Data.Checksum of type checksum.Checksum"
    );
}

#[test]
fn a_wrong_device_list_in_a_v1_file_is_named_as_a_v1_reader_does() {
    let entry = |devices: &str| format!(r#"{{"DeviceIDs":{devices}}}"#);
    let file = |first: &str, second: &str| {
        format!(
            r#"{{"Data":{{"PodDeviceEntries":[{},{}]}}}}"#,
            entry(first),
            entry(second)
        )
    };
    let place = "Go struct field PodDevicesEntry.Data.PodDeviceEntries.DeviceIDs";
    assert_eq!(
        text(&file("[\"a\"]", "true")),
        format!("json: cannot unmarshal bool into {place} of type []string")
    );
    assert_eq!(
        text(&file("true", "[\"a\"]")),
        format!("json: cannot unmarshal bool into {place} of type checkpoint.DevicesPerNUMA")
    );
}

#[test]
fn null_absent_and_empty_values_are_distinguished() {
    let content = |document: &str| {
        read(document.as_bytes())
            .expect("it decodes")
            .unverified()
            .clone()
    };
    let empty = Checkpoint {
        entries: Some(vec![]),
        registered: Some(BTreeMap::new()),
    };
    assert_eq!(content("{}"), empty);
    assert_eq!(content("null"), empty);
    assert_eq!(content(r#"{"Data":null}"#), empty);
    let nil = Checkpoint {
        entries: None,
        registered: None,
    };
    assert_eq!(
        content(r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null}}"#),
        nil
    );
    let entry = content(r#"{"Data":{"PodDeviceEntries":[{"PodUID":null},null]}}"#).entries;
    assert_eq!(entry, Some(vec![Entry::default(), Entry::default()]));
}

#[test]
fn devices_without_topology_are_on_node_zero_even_if_there_are_none() {
    // As 1.30 writes them: {"0":null}.
    assert_eq!(
        Devices::Flat(None).into_per_numa(),
        Devices::PerNuma(Some(BTreeMap::from([(0, None)])))
    );
    for devices in [Devices::Flat(None), Devices::Flat(Some(vec!["a".into()]))] {
        let entry = Entry {
            devices,
            ..Entry::default()
        };
        let flat = Checkpoint {
            entries: Some(vec![entry]),
            registered: None,
        };
        assert_eq!(write(&flat), write(&flat.clone().into_per_numa()));
    }
}

#[test]
fn an_old_file_gets_the_error_that_todays_kubelet_reports() {
    let problem = |document: &str| match verify(document.as_bytes(), Some(Role::DevicePlugin))
        .problems
        .remove(0)
    {
        Problem::TooOld { error } => error,
        other => other.to_string(),
    };
    assert_eq!(problem(r#"{"PodDeviceEntries":[]}"#), "checkpoint is corrupted");
    assert_eq!(
        problem(r#"{"PodDeviceEntries":[],"Checksum":-0}"#),
        "json: cannot unmarshal number -0 into Go struct field Data.Checksum of type checksum.Checksum"
    );
    // The sum of a checkpoint with empty lists: the kubelet accepts it as an empty state.
    let sum = read(b"{}")
        .expect("it decodes")
        .checksum
        .expect("it has one")
        .computed;
    let by_accident = problem(&format!(
        r#"{{"PodDeviceEntries":[{{"PodUID":"a"}}],"Checksum":{sum}}}"#
    ));
    assert_eq!(by_accident, "read as empty, although Data is missing in it");
}

const MALFORMED: InvalidResponse = InvalidResponse::Malformed;

fn refusal(bytes: &[u8]) -> Option<InvalidResponse> {
    response::decode(bytes).err()
}

#[test]
fn a_field_with_another_wire_type_is_an_unknown_field() {
    let mounts_as_varint = [0x10, 0x05];
    let envs_as_fixed = [0x0d, 1, 2, 3, 4];
    for bytes in [&mounts_as_varint[..], &envs_as_fixed] {
        assert_eq!(response::decode(bytes), Ok(Default::default()));
    }
    let read_only_as_text = [0x12, 0x03, 0x1a, 0x01, b'x'];
    let decoded = response::decode(&read_only_as_text).expect("it decodes");
    assert!(!decoded.mounts[0].read_only);
}

#[test]
fn the_last_of_a_repeated_part_counts() {
    let envs = b"\x0a\x06\x0a\x01A\x12\x01b\x0a\x06\x0a\x01A\x12\x01c";
    let decoded = response::decode(envs).expect("it decodes");
    assert_eq!(decoded.envs.get("A").map(String::as_str), Some("c"));
    let mount = b"\x12\x06\x0a\x01a\x0a\x01b";
    assert_eq!(
        response::decode(mount).expect("it decodes").mounts[0].container_path,
        "b"
    );
}

#[test]
fn text_must_be_utf8() {
    let device = b"\x1a\x03\x0a\x01\xff";
    assert_eq!(
        refusal(device),
        Some(InvalidResponse::InvalidUtf8 { field: "devices" })
    );
    let key = b"\x22\x05\x0a\x03\xed\xa0\x80";
    assert_eq!(
        refusal(key),
        Some(InvalidResponse::InvalidUtf8 { field: "annotations" })
    );
    assert_eq!(refusal(b"\x32\x01\xff"), None, "unknown fields are bytes");
}

#[test]
fn a_truncated_or_overlong_answer_is_malformed() {
    for bytes in [
        &b"\x0a"[..],
        b"\x0a\x05a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x09\x01\x02",
        b"\x08\x80",
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
        b"\x07",
        b"\x06",
        b"\x00\x00",
        b"\x12\x02\x0a\x05",
    ] {
        assert_eq!(refusal(bytes), Some(MALFORMED), "{bytes:?}");
    }
    assert_eq!(refusal(b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), None);
    assert_eq!(
        refusal(b"\x88\x80\x00\x01"),
        None,
        "a tag may be longer than it need be"
    );
}

#[test]
fn field_numbers_may_be_higher_inside_a_skipped_group() {
    let (highest, next) = (b"\xf8\xff\xff\xff\x0f\x01", b"\x80\x80\x80\x80\x10\x01");
    assert_eq!(refusal(highest), None);
    assert_eq!(refusal(next), Some(MALFORMED));
    let group = |inner: &[u8]| [b"\x53", inner, b"\x54"].concat();
    assert_eq!(refusal(&group(next)), None);
    assert_eq!(refusal(&group(b"\xf8\xff\xff\xff\x3f\x01")), None);
    assert_eq!(refusal(&group(b"\x80\x80\x80\x80\x40\x01")), Some(MALFORMED));
}

#[test]
fn groups_must_be_closed_by_their_own_number() {
    assert_eq!(refusal(b"\x53\x08\x01\x54"), None);
    assert_eq!(refusal(b"\x53\x5c"), Some(MALFORMED));
    assert_eq!(refusal(b"\x53"), Some(MALFORMED));
    assert_eq!(refusal(b"\x54"), Some(MALFORMED));
    let nested = |depth: usize| [vec![0x53; depth], vec![0x54; depth]].concat();
    assert_eq!(refusal(&nested(10_001)), None);
    assert_eq!(refusal(&nested(10_002)), Some(MALFORMED));
}
