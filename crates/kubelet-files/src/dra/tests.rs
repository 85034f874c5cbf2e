//! Tests of the printed forms that are hashed, of times, and of the kubelets that load a file.

use std::fs;
use std::path::Path;

use super::{envelope, flat, health};
use crate::verify::Problem;
use crate::{Format, Role, salvage, verify};

#[test]
fn every_flat_vector_prints_as_the_kubelet_printed_it() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/dra");
    let mut compared = 0;
    for (name, format) in [
        ("flat-1.27", Format::DraFlat1_27),
        ("flat-1.28-1.29", Format::DraFlat1_28),
        ("flat-1.28-extra", Format::DraFlat1_28),
        ("flat-1.30", Format::DraFlat1_30),
        ("flat-1.30-extra", Format::DraFlat1_30),
        ("flat-1.30-extra/rejected", Format::DraFlat1_30),
    ] {
        for entry in fs::read_dir(directory.join(name)).expect("test data") {
            let path = entry.expect("test data").path();
            let expected = path.with_extension("hashed.txt");
            if path.extension().is_none_or(|extension| extension != "json") || !expected.exists() {
                continue;
            }
            let expected = fs::read(expected).expect("test data");
            let printed = flat::printed(&fs::read(&path).expect("test data"), format);
            assert_eq!(
                String::from_utf8_lossy(&printed),
                String::from_utf8_lossy(&expected),
                "{}",
                path.display()
            );
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
}

fn loaded_by(document: &str) -> Option<&'static str> {
    verify(document.as_bytes(), Some(Role::DraManager)).loaded_by_older
}

fn flat_with_sum(document: &str, format: Format) -> String {
    let zero = document.replace("SUM", "0");
    let file = flat::read_as(zero.as_bytes(), format)
        .expect("a flat format")
        .expect("it decodes");
    document.replace("SUM", &file.checksum.expect("it has one").computed.to_string())
}

#[test]
fn a_file_of_1_27_is_loaded_later_only_with_version_v1_and_without_wrong_handles() {
    let entry = r#"{"ClaimName":"c","PodUIDs":{"p":{}}}"#;
    let v1 = flat_with_sum(
        &format!(r#"{{"version":"v1","entries":[{entry}],"checksum":SUM}}"#),
        Format::DraFlat1_27,
    );
    assert_eq!(loaded_by(&v1), Some("1.27 to 1.30"));
    let v2 = flat_with_sum(
        &format!(r#"{{"version":"v2","entries":[{entry}],"checksum":SUM}}"#),
        Format::DraFlat1_27,
    );
    assert_eq!(loaded_by(&v2), Some("1.27"));
    // The sum is that of v1, which 1.28 and later assume and 1.27 does not.
    let assumed = v1.replace("\"v1\"", "\"v2\"");
    assert_eq!(loaded_by(&assumed), Some("1.28 to 1.30"));
    // 1.27 ignores the key, so its type does not matter there.
    let handles = v1.replace("\"PodUIDs\"", "\"ResourceHandles\":1,\"PodUIDs\"");
    assert_eq!(loaded_by(&handles), Some("1.27"));
}

#[test]
fn claims_that_share_name_and_namespace_run_together_displace_each_other_in_old_kubelets() {
    let document = r#"{"version":"v1","entries":[{"ClaimName":"a","Namespace":"bc"},{"ClaimName":"ab","Namespace":"c"}],"checksum":SUM}"#;
    assert_eq!(loaded_by(&flat_with_sum(document, Format::DraFlat1_27)), None);
}

#[test]
fn a_flat_file_gets_the_error_that_todays_kubelet_reports() {
    let first = |document: &str| {
        verify(document.as_bytes(), Some(Role::DraManager))
            .problems
            .remove(0)
    };
    let corrupted = "checkpoint is corrupted (the kubelet does not start)".to_owned();
    let problem = first(r#"{"version":"v1","entries":[],"checksum":1}"#);
    assert_eq!(problem, Problem::TooOld { error: corrupted });
    let problem = first(r#"{"version":"v1","entries":[],"checksum":4294967296}"#).to_string();
    assert!(
        problem.contains("number 4294967296 into Go struct field Checkpoint.Checksum of type uint32"),
        "{problem}"
    );
    // Without a checksum the kubelet assumes its own, and an empty state.
    assert!(matches!(
        first(r#"{"version":"v1"}"#),
        Problem::EmptyByAccident(_)
    ));
}

#[test]
fn inner_errors_have_the_text_of_the_kubelet() {
    let text = |inner: &str| {
        let document = format!(
            "{{\"Data\":{:?},\"Checksum\":{}}}",
            inner,
            crc32fast::hash(inner.as_bytes())
        );
        let error = envelope::read(document.as_bytes()).expect_err("it does not decode");
        error.kubelet_text().map(str::to_owned)
    };
    assert_eq!(text("{").as_deref(), Some("unexpected end of JSON input"));
    assert_eq!(
        text("{\"kind\":1}").as_deref(),
        Some(
            "json: cannot unmarshal number into Go struct field CheckpointData.TypeMeta.kind of type string"
        )
    );
    assert_eq!(
        text("{\"ClaimInfoStateList\":[{\"PodUIDs\":[]}]}").as_deref(),
        Some(
            "json: cannot unmarshal array into Go struct field ClaimInfoState.ClaimInfoStateList.PodUIDs of type sets.Set[string]"
        )
    );
}

fn health_error(device: &str) -> Option<String> {
    let document = format!("{{\"d\":{{\"Devices\":{{\"p/d\":{device}}}}}}}");
    let error = health::read(document.as_bytes()).err()?;
    Some(error.kubelet_text().unwrap_or_default().to_owned())
}

#[test]
fn times_are_accepted_as_go_accepts_them() {
    let is_time = |time: &str| health_error(&format!("{{\"LastUpdated\":\"{time}\"}}")).is_none();
    for time in [
        "2024-02-29T23:59:59Z",
        "2000-02-29T00:00:00Z",
        "2024-04-30T01:02:03.5Z",
        "2024-04-30T01:02:03.1234567891234+01:00",
        "2024-04-30T01:02:03-00:00",
        // Not RFC 3339, but Go accepts them.
        "2024-04-30T1:02:03Z",
        "2024-04-30T01:02:03,5Z",
        "2024-04-30T01:02:03+24:60",
    ] {
        assert!(is_time(time), "{time}");
    }
    for time in [
        "",
        "2023-02-29T00:00:00Z",
        "1900-02-29T00:00:00Z",
        "2024-13-01T00:00:00Z",
        "2024-00-01T00:00:00Z",
        "2024-04-31T00:00:00Z",
        "2024-04-00T00:00:00Z",
        "2024-04-30T24:00:00Z",
        "2024-04-30T01:60:00Z",
        "2024-04-30T01:02:60Z",
        "2024-4-30T01:02:03Z",
        "2024-04-30t01:02:03Z",
        "2024-04-30 01:02:03Z",
        "2024-04-30T01:02:03z",
        "2024-04-30T01:02:03",
        "2024-04-30T01:02:03.Z",
        "2024-04-30T01:02:03+0100",
        "2024-04-30T01:02:03+25:00",
        "2024-04-30T01:02:03+01:61",
        "2024-04-30T01:02:03Zx",
        "2024-04-30T01:02:03\\u005a",
    ] {
        assert!(!is_time(time), "{time}");
    }
    assert!(health_error("{\"LastUpdated\":null}").is_none());
    let expected = "Time.UnmarshalJSON: input is not a JSON string";
    assert_eq!(health_error("{\"LastUpdated\":1}").as_deref(), Some(expected));
}

#[test]
fn a_bad_time_is_reported_even_after_another_error() {
    let error = health_error("{\"PoolName\":1,\"LastUpdated\":true,\"Message\":1}");
    assert_eq!(
        error.as_deref(),
        Some("Time.UnmarshalJSON: input is not a JSON string")
    );
}

#[test]
fn the_beginning_of_a_truncated_envelope_is_read() {
    let inner = r#"{\"ClaimInfoStateList\":[{\"ClaimUID\":\"1\",\"ClaimName\":\"a\"},{\"ClaimUID\":\"2\",\"ClaimName\":\"b"#;
    let document = format!("{{\"Data\":\"{inner}");
    let saved = salvage(document.as_bytes(), Some(Role::DraManager)).expect("it is recognised");
    assert!(saved.text.contains(r#"\"ClaimName\":\"a\""#), "{}", saved.text);
    assert!(!saved.text.contains(r#"\"ClaimName\":\"b\""#), "{}", saved.text);
    assert!(!saved.is_undamaged());
}
