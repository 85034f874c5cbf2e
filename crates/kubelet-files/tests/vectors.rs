//! Files made by real kubelets, and how those kubelets loaded them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use devlet_kubelet_files::device_plugin::Devices;
use devlet_kubelet_files::salvage::{INCOMPLETE_POD, UNKNOWN_POD};
use devlet_kubelet_files::verify::Problem;
use devlet_kubelet_files::{Document, Format, Role, convert, device_plugin, dra, read, salvage, verify};
use serde::Deserialize;

fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path)
}

fn bytes_of(path: &str) -> Vec<u8> {
    std::fs::read(testdata(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn json_files(folder: &str) -> Vec<String> {
    let mut files: Vec<String> = std::fs::read_dir(testdata(folder))
        .unwrap_or_else(|error| panic!("{folder}: {error}"))
        .map(|file| format!("{folder}/{}", file.unwrap().file_name().to_str().unwrap()))
        .filter(|file| {
            file.ends_with(".json") && !file.contains("load-results") && !file.ends_with("manifest.json")
        })
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no files in {folder}");
    files
}

#[derive(Deserialize)]
struct Measured {
    file: String,
    kind: String,
    kubelet_1_37_accepts: bool,
    kubelet_error: String,
    entries_restored: usize,
    computed_checksum_after_decode: Option<u64>,
    #[serde(default)]
    resources_known_after_restore: Vec<String>,
}

fn manifest() -> Vec<Measured> {
    let list: Vec<Measured> = serde_json::from_slice(&bytes_of("deviceplugin/manifest.json")).unwrap();
    assert!(list.len() > 40, "the manifest lost rows");
    list
}

#[test]
fn device_files_are_judged_as_a_kubelet_did() {
    for measured in manifest() {
        let bytes = bytes_of(&format!("deviceplugin/{}", measured.file));
        let verdict = verify(&bytes, Some(Role::DevicePlugin));
        let refused = verdict.problems.iter().any(|problem| {
            matches!(
                problem,
                Problem::Unreadable(_) | Problem::Corrupted(_) | Problem::TooOld { .. }
            )
        });
        assert_eq!(
            refused, !measured.kubelet_1_37_accepts,
            "{}: {:?}",
            measured.file, verdict.problems
        );
        let reported: Vec<String> = verdict.problems.iter().map(ToString::to_string).collect();
        let kubelet_text = measured
            .kubelet_error
            .trim_start_matches("failed to get checkpoint: ");
        let same_text = reported.iter().any(|problem| problem.contains(kubelet_text));
        assert!(
            !refused || same_text,
            "{}: {reported:?} does not contain {kubelet_text:?}",
            measured.file
        );
    }
}

#[test]
fn device_files_restore_the_entries_that_a_kubelet_restored() {
    for measured in manifest()
        .into_iter()
        .filter(|measured| measured.kubelet_1_37_accepts)
    {
        let bytes = bytes_of(&format!("deviceplugin/{}", measured.file));
        let verdict = verify(&bytes, Some(Role::DevicePlugin));
        let checkpoint = device_plugin::read(&bytes).unwrap().verified().unwrap();
        let entries = checkpoint.entries.unwrap_or_default().len();
        assert_eq!(
            entries - verdict.problems.len(),
            measured.entries_restored,
            "{}",
            measured.file
        );
        let mut resources: Vec<String> = checkpoint.registered.unwrap_or_default().into_keys().collect();
        resources.sort();
        assert_eq!(
            resources, measured.resources_known_after_restore,
            "{}",
            measured.file
        );
    }
}

#[test]
fn device_file_checksums_are_those_of_the_kubelet() {
    for measured in manifest() {
        let Some(expected) = measured.computed_checksum_after_decode else {
            continue;
        };
        let file = device_plugin::read(&bytes_of(&format!("deviceplugin/{}", measured.file))).unwrap();
        assert_eq!(file.checksum.unwrap().computed, expected, "{}", measured.file);
    }
}

#[test]
fn valid_v2_files_are_written_back_byte_for_byte() {
    let mut compared = 0;
    for measured in manifest()
        .into_iter()
        .filter(|measured| measured.kind.ends_with("valid"))
    {
        let bytes = bytes_of(&format!("deviceplugin/{}", measured.file));
        let file = device_plugin::read(&bytes).unwrap();
        if file.format == Format::DevicePluginV2 {
            let written = device_plugin::write(&file.verified().unwrap());
            assert_eq!(written, String::from_utf8(bytes).unwrap(), "{}", measured.file);
            compared += 1;
        }
    }
    assert_eq!(compared, 16);
}

#[test]
fn v1_files_are_read_and_become_v2_on_numa_node_zero() {
    let mut files = json_files("deviceplugin-v1-extra");
    files.extend([
        "deviceplugin/v1-one-pod.json".into(),
        "deviceplugin/v1-historic-1.19.json".into(),
    ]);
    for path in files {
        let bytes = bytes_of(&path);
        let file = read(&bytes, None).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(file.checksum.unwrap().is_valid(), "{path}");
        let Document::DevicePlugin(before) = file.unverified().clone() else {
            panic!("{path}")
        };
        let converted = convert(file).unwrap();
        let again = device_plugin::read(converted.text.as_bytes()).unwrap();
        assert_eq!(again.format, Format::DevicePluginV2, "{path}");
        let after = again.verified().unwrap();
        assert_eq!(
            after.entries.as_ref().map(Vec::len),
            before.entries.as_ref().map(Vec::len),
            "{path}"
        );
        for (old, new) in before
            .entries
            .iter()
            .flatten()
            .zip(after.entries.iter().flatten())
        {
            assert_eq!(old.holder(), new.holder(), "{path}: the order of entries");
            assert_eq!(old.alloc_resp, new.alloc_resp, "{path}: the plugin's answer");
            if let (Devices::Flat(Some(old)), Devices::PerNuma(Some(new))) = (&old.devices, &new.devices) {
                assert_eq!(new, &BTreeMap::from([(0, Some(old.clone()))]), "{path}");
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LoadResult {
    file: String,
    kubelet_starts: bool,
    #[serde(default)]
    error: String,
    #[serde(default)]
    claims: Vec<String>,
}

fn dra_load_results() -> Vec<LoadResult> {
    let all: Vec<LoadResult> = serde_json::from_slice(&bytes_of("dra/load-results-head.json")).unwrap();
    let files: Vec<LoadResult> = all
        .into_iter()
        .filter(|result| !result.file.starts_with('('))
        .collect();
    assert!(files.len() > 40, "the load results lost rows");
    files
}

#[test]
fn dra_files_are_judged_as_a_kubelet_did() {
    for result in dra_load_results() {
        let bytes = bytes_of(&format!("dra/{}", result.file));
        let verdict = verify(&bytes, Some(Role::DraManager));
        let refused = verdict.problems.iter().any(|problem| {
            matches!(
                problem,
                Problem::Unreadable(_) | Problem::Corrupted(_) | Problem::TooOld { .. }
            )
        });
        assert_eq!(
            refused, !result.kubelet_starts,
            "{}: {:?}",
            result.file, verdict.problems
        );
        let reported = verdict
            .problems
            .iter()
            .map(ToString::to_string)
            .collect::<String>();
        let text = result.error.rsplit("dra_manager_state: ").next().unwrap();
        let text = text.rsplit("GetEntries() on checkpoint: ").next().unwrap();
        assert!(
            !refused || reported.contains(text),
            "{}: {reported:?} does not contain {text:?}",
            result.file
        );
    }
}

#[test]
fn dra_files_restore_the_claims_that_a_kubelet_restored() {
    for result in dra_load_results()
        .into_iter()
        .filter(|result| result.kubelet_starts)
    {
        let bytes = bytes_of(&format!("dra/{}", result.file));
        let checkpoint = dra::envelope::read(&bytes).unwrap().verified().unwrap();
        // As in the kubelet, a later claim of the same name replaces an earlier one.
        let restored: BTreeMap<String, String> = checkpoint
            .claims
            .iter()
            .flatten()
            .map(|claim| {
                let pods: Vec<&str> = claim.pods.iter().flatten().map(String::as_str).collect();
                let drivers = claim.drivers.as_ref().map_or(0, BTreeMap::len);
                let text = format!(
                    "{} uid={} pods=[{}] drivers={drivers} prepared=false",
                    claim.key(),
                    claim.uid,
                    pods.join(" ")
                );
                (claim.key(), text)
            })
            .collect();
        let restored: Vec<String> = restored.into_values().collect();
        assert_eq!(restored, result.claims, "{}", result.file);
    }
}

#[test]
fn documents_that_pass_for_an_empty_state_are_not_fine() {
    for file in [
        "json-empty-object",
        "json-null",
        "data-empty-object",
        "data-legacy-Entries-key",
    ] {
        let bytes = bytes_of(&format!("dra/odd/{file}.json"));
        for role in [None, Some(Role::DraManager)] {
            let verdict = verify(&bytes, role);
            let problems = &verdict.problems;
            assert!(
                matches!(problems[..], [Problem::EmptyByAccident(_)]),
                "{file}: {problems:?}"
            );
        }
    }
}

#[test]
fn envelopes_are_written_back_byte_for_byte() {
    for path in json_files("dra/envelope-v1") {
        let bytes = bytes_of(&path);
        let checkpoint = dra::envelope::read(&bytes).unwrap().verified().unwrap();
        let written = dra::envelope::write(checkpoint.claims.as_deref());
        assert_eq!(written, String::from_utf8(bytes).unwrap(), "{path}");
    }
}

#[test]
fn flat_files_are_told_apart_and_verify() {
    let folders = [
        ("dra/flat-1.27", Format::DraFlat1_27),
        ("dra/flat-1.28-1.29", Format::DraFlat1_28),
        ("dra/flat-1.28-extra", Format::DraFlat1_28),
        ("dra/flat-1.30", Format::DraFlat1_30),
        ("dra/flat-1.30-extra", Format::DraFlat1_30),
    ];
    for (folder, format) in folders {
        for path in json_files(folder) {
            let bytes = bytes_of(&path);
            let file = read(&bytes, None).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(file.checksum.unwrap().is_valid(), "{path}");
            let Document::DraFlat(checkpoint) = file.unverified() else {
                panic!("{path}")
            };
            // Without claims, or without handles, the same bytes are valid in an older dialect too, and get its
            // name.
            let handles = || {
                checkpoint
                    .claims
                    .iter()
                    .flatten()
                    .filter_map(|claim| claim.handles.as_ref())
            };
            let claims = checkpoint.claims.as_ref().map_or(0, Vec::len);
            let expected = if claims == 0 {
                Format::DraFlat1_27
            } else if handles().all(Vec::is_empty) && format != Format::DraFlat1_27 {
                Format::DraFlat1_28
            } else {
                format
            };
            assert_eq!(file.format, expected, "{path}");
        }
    }
}

#[test]
fn flat_files_are_loaded_by_the_kubelets_that_did_load_them() {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Row {
        file: String,
        #[serde(rename = "K127")]
        k127: String,
        #[serde(rename = "K128")]
        k128: String,
        #[serde(rename = "K130")]
        k130: String,
    }
    let rows: Vec<Row> = serde_json::from_slice(&bytes_of("dra/load-results-old-kubelets.json")).unwrap();
    for row in rows.iter().filter(|row| row.file.starts_with("flat")) {
        let loads = [&row.k127, &row.k128, &row.k130].map(|answer| answer.starts_with("ok"));
        let expected = match loads {
            [true, true, true] => Some("1.27 to 1.30"),
            [false, true, false] => Some("1.28 and 1.29"),
            [false, false, true] => Some("1.30"),
            other => panic!("{}: {other:?}", row.file),
        };
        let verdict = verify(&bytes_of(&format!("dra/{}", row.file)), None);
        assert_eq!(verdict.loaded_by_older, expected, "{}", row.file);
    }
}

#[test]
fn files_that_their_own_kubelet_rejected_are_rejected() {
    for folder in ["dra/flat-1.30-extra/rejected", "dra/flat-1.28-extra/rejected"] {
        for path in json_files(folder) {
            let file = read(&bytes_of(&path), None).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(!file.checksum.unwrap().is_valid(), "{path}");
        }
    }
}

#[test]
fn flat_claims_become_claims_with_one_device_per_driver() {
    let file = read(&bytes_of("dra/flat-1.28-1.29/01-single.json"), None).unwrap();
    let converted = convert(file).unwrap();
    let claims = dra::envelope::read(converted.text.as_bytes())
        .unwrap()
        .verified()
        .unwrap()
        .claims
        .unwrap();
    let [claim] = &claims[..] else {
        panic!("{claims:?}")
    };
    assert_eq!(claim.key(), "default/example");
    assert_eq!(claim.uid, "067798be-454e-4be4-9047-1aa06aea63f7");
    assert!(
        claim
            .pods
            .as_ref()
            .unwrap()
            .contains("139cdb46-f989-4f17-9561-ca10cfb509a6")
    );
    let devices = claim.drivers.as_ref().unwrap()["test-driver.cdi.k8s.io"]
        .devices
        .as_ref()
        .unwrap();
    assert_eq!(
        devices[0].cdi_devices.as_deref(),
        Some(&["example.com/example=cdi-example".to_owned()][..])
    );
}

#[test]
fn an_unprepared_flat_claim_keeps_its_driver() {
    let file = read(&bytes_of("dra/flat-1.27/03-not-prepared.json"), None).unwrap();
    let converted = convert(file).unwrap();
    let claims = dra::envelope::read(converted.text.as_bytes())
        .unwrap()
        .verified()
        .unwrap()
        .claims
        .unwrap();
    assert_eq!(claims[0].drivers.as_ref().unwrap()["d"].devices, None);
}

#[test]
fn every_prefix_of_a_file_keeps_the_devices_that_it_names() {
    let bytes = bytes_of("deviceplugin/v2-two-resources-one-container.json");
    let all = device_plugin::read(&bytes)
        .unwrap()
        .verified()
        .unwrap()
        .entries
        .unwrap();
    let mut most = 0;
    for end in 0..bytes.len() {
        let Ok(salvaged) = salvage(&bytes[..end], Some(Role::DevicePlugin)) else {
            continue;
        };
        let Document::DevicePlugin(kept) = &salvaged.kept else {
            panic!("prefix of {end} bytes")
        };
        let kept = kept.entries.as_deref().unwrap_or_default();
        for (kept, whole) in kept.iter().zip(&all) {
            assert_eq!(
                (&kept.pod_uid, &kept.resource),
                (&whole.pod_uid, &whole.resource),
                "{end}"
            );
            let ids = whole.devices.ids();
            assert!(kept.devices.ids().iter().all(|id| ids.contains(id)), "{end}");
        }
        assert!(
            salvaged.incomplete && salvaged.text.contains(INCOMPLETE_POD),
            "{end}"
        );
        assert!(
            !salvaged.dropped.is_empty(),
            "prefix of {end} bytes: no loss reported"
        );
        assert!(
            verify(salvaged.text.as_bytes(), None).is_fine(),
            "prefix of {end} bytes"
        );
        assert!(
            kept.len() >= most,
            "prefix of {end} bytes kept less than a shorter one"
        );
        most = kept.len();
    }
    assert_eq!(most, all.len());
}

#[test]
fn every_prefix_of_an_envelope_keeps_the_devices_that_it_names() {
    let bytes = bytes_of("dra/envelope-v1/06-two-claims.json");
    let all = dra::envelope::read(&bytes)
        .unwrap()
        .verified()
        .unwrap()
        .claims
        .unwrap();
    let mut most = 0;
    for end in 0..bytes.len() {
        let Ok(salvaged) = salvage(&bytes[..end], Some(Role::DraManager)) else {
            continue;
        };
        let Document::DraEnvelope(kept) = &salvaged.kept else {
            panic!("prefix of {end} bytes")
        };
        let kept = kept.claims.as_deref().unwrap_or_default();
        let devices = |claims: &[dra::Claim]| -> Vec<(String, String)> {
            let drivers = claims.iter().flat_map(|claim| claim.drivers.iter().flatten());
            let devices = drivers.flat_map(|(_, driver)| driver.devices.iter().flatten());
            devices
                .map(|device| (device.pool.clone(), device.name.clone()))
                .collect()
        };
        let named = all
            .iter()
            .map(|claim| devices(std::slice::from_ref(claim)).remove(0));
        let mut from = 0;
        let named = named.take_while(|(_, name)| {
            let text = format!("\\\"DeviceName\\\":\\\"{name}\\\"");
            let found = bytes[from..end]
                .windows(text.len())
                .position(|window| window == text.as_bytes());
            from += found.map_or(0, |at| at + text.len());
            found.is_some()
        });
        assert_eq!(devices(kept), named.collect::<Vec<_>>(), "prefix of {end} bytes");
        for (kept, whole) in kept.iter().zip(&all) {
            assert_eq!(
                (&kept.uid, &kept.name, &kept.pods),
                (&whole.uid, &whole.name, &whole.pods),
                "prefix of {end} bytes"
            );
        }
        assert!(
            !salvaged.dropped.is_empty(),
            "prefix of {end} bytes: no loss reported"
        );
        assert!(
            kept.len() >= most,
            "prefix of {end} bytes kept less than a shorter one"
        );
        most = kept.len();
    }
    assert_eq!(most, all.len());
}

#[test]
fn a_wrong_checksum_drops_nothing_but_any_value_may_be_wrong() {
    let salvaged = salvage(&bytes_of("deviceplugin/corrupt-checksum-wrong.json"), None).unwrap();
    assert_eq!(salvaged.dropped, []);
    assert!(!salvaged.is_undamaged());
    assert!(salvaged.incomplete && salvaged.text.contains(INCOMPLETE_POD));
    let whole = device_plugin::read(&bytes_of("deviceplugin/v2-one-pod.json")).unwrap();
    assert_eq!(salvaged.kept, Document::DevicePlugin(whole.verified().unwrap()));
}

#[test]
fn the_rest_of_a_damaged_file_of_claims_is_marked() {
    for name in [
        "dra/flat-1.27/01-single.json",
        "dra/envelope-v1/03-single-device.json",
    ] {
        let whole = bytes_of(name);
        let sound = salvage(&whole, None).unwrap();
        assert!(!sound.text.contains(INCOMPLETE_POD), "{name}");
        let damaged = &whole[..whole.len() - 3];
        let salvaged = salvage(damaged, None).unwrap();
        assert!(
            salvaged.incomplete && salvaged.text.contains(INCOMPLETE_POD),
            "{name}"
        );
        assert!(!format!("{:?}", salvaged.kept).contains(INCOMPLETE_POD), "{name}");
        assert!(
            verify(salvaged.text.as_bytes(), None).is_fine(),
            "{name}: a kubelet loads it"
        );
    }
}

#[test]
fn one_bad_entry_keeps_its_devices_and_the_others_are_whole() {
    let text = String::from_utf8(bytes_of("deviceplugin/v2-two-resources-one-container.json")).unwrap();
    let damaged = text.replacen("\"ContainerName\":\"sidecar\"", "\"ContainerName\":7", 1);
    let salvaged = salvage(damaged.as_bytes(), None).unwrap();
    let Document::DevicePlugin(kept) = &salvaged.kept else {
        panic!("{salvaged:?}")
    };
    let containers: Vec<&str> = kept
        .entries
        .iter()
        .flatten()
        .map(|entry| entry.container.as_str())
        .collect();
    assert_eq!(containers, ["init", "unknown-container-2", "app", "app"]);
    let [dropped] = &salvaged.dropped[..] else {
        panic!("{:?}", salvaged.dropped)
    };
    assert_eq!(
        dropped.what,
        "Data.PodDeviceEntries[1]: pod-a/ vendor.com/gpu with gpu1"
    );
    assert!(
        dropped.reason.contains("cannot unmarshal number"),
        "{}",
        dropped.reason
    );
}

#[test]
fn a_file_that_mixes_v1_and_v2_entries_is_refused_and_can_be_salvaged() {
    let text = String::from_utf8(bytes_of("deviceplugin/v2-two-resources-one-container.json")).unwrap();
    let mixed = text.replacen("{\"0\":[\"gpu0\",\"gpu1\"]}", "[\"gpu0\",\"gpu1\"]", 1);
    let refused = read(mixed.as_bytes(), None).unwrap_err().to_string();
    assert!(
        refused.starts_with("entries of two formats in one file"),
        "{refused}"
    );
    assert!(
        refused.contains("Data.PodDeviceEntries[0].DeviceIDs"),
        "{refused}"
    );
    let salvaged = salvage(mixed.as_bytes(), None).unwrap();
    assert_eq!(salvaged.dropped, []);
    let entries = |text: &str| {
        device_plugin::read(text.as_bytes())
            .unwrap()
            .verified()
            .unwrap()
            .entries
            .unwrap()
    };
    assert_eq!(entries(&salvaged.text)[..entries(&text).len()], entries(&text));
}

#[test]
fn an_entry_whose_answer_does_not_decode_is_kept_without_it() {
    let salvaged = salvage(
        &bytes_of("deviceplugin/corrupt-allocresp-invalid-utf8.json"),
        None,
    )
    .unwrap();
    let [dropped] = &salvaged.dropped[..] else {
        panic!("{:?}", salvaged.dropped)
    };
    assert_eq!(
        dropped.what,
        "the plugin's answer for pod-bad/c vendor.com/gpu with gpu1"
    );
    assert!(salvaged.has_losses());
    let Document::DevicePlugin(kept) = salvaged.kept else {
        panic!()
    };
    let held = kept
        .entries
        .unwrap()
        .into_iter()
        .find(|entry| entry.pod_uid == "pod-bad");
    let held = held.unwrap();
    assert_eq!((held.devices.ids(), held.alloc_resp), (vec!["gpu1"], None));
}

#[test]
fn entries_of_one_container_in_a_damaged_file_hold_their_devices_together() {
    let sound = r#""AllocResp":"CgsKA0RFVhIEZ3B1MA==""#;
    let damaged = r#""AllocResp":"/////w==""#;
    let unreadable = r#""AllocResp":[18446744073709551615,7,[],[]]"#;
    let held = |answers: [&str; 2]| {
        let entry = |device: &str, answer: &str| {
            format!(
                r#"{{"PodUID":"p","ContainerName":"main","ResourceName":"v.com/gpu","DeviceIDs":{{"0":["{device}"]}},{answer}}}"#
            )
        };
        let file = format!(
            r#"{{"Data":{{"PodDeviceEntries":[{},{}],"RegisteredDevices":{{}}}},"Checksum":1}}"#,
            entry("gpu0", answers[0]),
            entry("gpu1", answers[1])
        );
        let salvaged = salvage(file.as_bytes(), None).unwrap();
        let verdict = verify(salvaged.text.as_bytes(), None);
        assert!(verdict.is_fine(), "{answers:?}: {:?}", verdict.problems);
        let Document::DevicePlugin(kept) = salvaged.kept else {
            panic!()
        };
        let kept = kept.entries.unwrap().into_iter();
        kept.map(|entry| (entry.container.clone(), entry.devices.ids().concat()))
            .collect::<Vec<_>>()
    };
    let pair =
        |first: &str, second: &str| vec![(first.into(), "gpu0".into()), (second.into(), "gpu1".into())];
    // A sound answer takes precedence over a damaged one, and a later one over an earlier one.
    assert_eq!(held([sound, damaged]), pair("main", "main-entry-2"));
    assert_eq!(held([damaged, sound]), pair("main-entry-1", "main"));
    assert_eq!(held([damaged, damaged]), pair("main-entry-1", "main"));
    assert_eq!(held([sound, unreadable]).len(), 2);
    // The checksum is wrong: the container of the first may be a damaged name.
    assert_eq!(held([sound, sound]), pair("main-entry-1", "main"));
}

#[test]
fn devices_of_a_damaged_entry_stay_held() {
    let whole = String::from_utf8(bytes_of("deviceplugin/v2-two-resources-one-container.json")).unwrap();
    let entries = device_plugin::read(whole.as_bytes())
        .unwrap()
        .verified()
        .unwrap()
        .entries
        .unwrap();
    let uid = &entries[0].pod_uid;
    let held = |damaged: &str| {
        let salvaged = salvage(damaged.as_bytes(), None).unwrap();
        assert!(salvaged.has_losses());
        assert!(
            verify(salvaged.text.as_bytes(), None).is_fine(),
            "a kubelet loads it"
        );
        let Document::DevicePlugin(kept) = salvaged.kept else {
            panic!()
        };
        let entry = &kept.entries.unwrap()[0];
        assert_eq!(entry.devices, entries[0].devices);
        entry.pod_uid.clone()
    };
    // A byte that JSON does not allow in the answer, and an answer that is not base64.
    let answer = whole.find("\"AllocResp\":\"").unwrap() + 13;
    for byte in ["\u{1}", "!"] {
        let damaged = format!("{}{byte}{}", &whole[..answer], &whole[answer + 1..]);
        assert_eq!(held(&damaged), *uid);
    }
    let unknown = held(&whole.replacen(&format!("{uid:?}"), "7", 1));
    assert!(unknown.starts_with(UNKNOWN_POD), "{unknown}");
}

#[test]
fn health_files_are_judged_as_a_kubelet_did() {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Row {
        content: String,
        result: String,
    }
    let rows: Vec<Row> = serde_json::from_slice(&bytes_of("dra/health/load-results.json")).unwrap();
    for row in rows {
        let verdict = verify(row.content.as_bytes(), Some(Role::DraHealth));
        let fine = row.result.starts_with("load err=<nil>, update err=<nil>");
        assert_eq!(
            verdict.is_fine(),
            fine,
            "{:?}: {} but {:?}",
            row.content,
            row.result,
            verdict.problems
        );
    }
    let two = read(&bytes_of("dra/health/01-two-devices.json"), None).unwrap();
    assert_eq!(two.format, Format::DraHealth);
}

const V0_OF_1_8: &str = r#"{"Entries":[
    {"PodUID":"p1","ContainerName":"c1","ResourceName":"acme.com/gpu","DeviceID":"a"},
    {"PodUID":"p2","ContainerName":"c1","ResourceName":"acme.com/gpu","DeviceID":"b"},
    {"PodUID":"p1","ContainerName":"c1","ResourceName":"acme.com/gpu","DeviceID":"c"}]}"#;

#[test]
fn entries_of_1_8_are_joined_per_container_in_the_order_of_their_first_device() {
    let file = read(V0_OF_1_8.as_bytes(), None).unwrap();
    assert_eq!((file.format, file.checksum), (Format::DevicePluginV0, None));
    let text = convert(file).unwrap().text;
    let entries = device_plugin::read(text.as_bytes())
        .unwrap()
        .verified()
        .unwrap()
        .entries
        .unwrap();
    let holders: Vec<_> = entries
        .iter()
        .map(|entry| (entry.pod_uid.as_str(), entry.devices.ids()))
        .collect();
    assert_eq!(holders, [("p1", vec!["a", "c"]), ("p2", vec!["b"])]);
    assert!(
        entries
            .iter()
            .all(|entry| entry.alloc_resp.as_deref() == Some(&[]))
    );
}

#[test]
fn files_of_late_2017_and_of_1_9_keep_the_plugins_answer() {
    let entry = r#"{"PodUID":"p","ContainerName":"c","ResourceName":"acme.com/gpu","DeviceIDs":["a"],"AllocResp":"CgUKAUESADoBeA=="}"#;
    for text in [
        format!(r#"{{"Entries":[{entry}]}}"#),
        format!(r#"{{"PodDeviceEntries":[{entry}],"RegisteredDevices":{{"acme.com/gpu":["a","b"]}}}}"#),
    ] {
        let file = read(text.as_bytes(), None).unwrap();
        assert_eq!(file.format, Format::DevicePluginV0, "{text}");
        let converted = convert(file).unwrap();
        assert!(
            converted.text.contains("\"AllocResp\":\"CgUKAUESADoBeA==\""),
            "{}",
            converted.text
        );
        let verdict = verify(text.as_bytes(), None);
        assert!(
            matches!(verdict.problems[..], [Problem::TooOld { .. }]),
            "{:?}",
            verdict.problems
        );
    }
}

#[test]
fn a_truncated_or_wrongly_typed_v1_file_says_where_and_what() {
    let text = String::from_utf8(bytes_of("deviceplugin/v1-one-pod.json")).unwrap();
    let truncated = read(&text.as_bytes()[..text.len() / 2], None)
        .unwrap_err()
        .to_string();
    assert!(
        truncated.starts_with("unexpected end of JSON input, at Data.PodDeviceEntries[0]"),
        "{truncated}"
    );
    let wrong = text.replacen("[\"gpu0\"]", "[17]", 1);
    let wrong = read(wrong.as_bytes(), None).unwrap_err().to_string();
    assert!(wrong.contains("cannot unmarshal number"), "{wrong}");
    assert!(
        wrong.contains("at Data.PodDeviceEntries[0].DeviceIDs[0], line 1, column"),
        "{wrong}"
    );
}

#[test]
fn every_dropped_entry_is_named_whatever_else_there_is_to_warn_of() {
    let unknown: String = (0..70).map(|number| format!("\"x{number}\":0,")).collect();
    let entry = |extra: &str, uid: &str| {
        format!(
            r#"{{{extra}"PodUID":{uid},"ContainerName":"c","ResourceName":"a.b/c","DeviceIDs":{{"0":["gpu7"]}},"AllocResp":""}}"#
        )
    };
    let file = |entries: &[String]| {
        format!(
            r#"{{"Data":{{"PodDeviceEntries":[{}],"RegisteredDevices":{{}}}},"Checksum":0}}"#,
            entries.join(",")
        )
    };
    let text = file(&[entry(&unknown, "\"p\""), entry("", "7")]);
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    let [dropped] = &salvaged.dropped[..] else {
        panic!("{:?}", salvaged.dropped)
    };
    assert_eq!(dropped.what, "Data.PodDeviceEntries[1]: /c a.b/c with gpu7");

    let bad: Vec<String> = (0..100).map(|_| entry("", "7")).collect();
    let text = file(&bad);
    assert_eq!(salvage(text.as_bytes(), None).unwrap().dropped.len(), 100);
}

#[test]
fn unknown_keys_are_not_damage() {
    let unknown: String = (0..70).map(|number| format!("\"x{number}\":0,")).collect();
    let text = format!(
        r#"{{{unknown}"Data":{{"PodDeviceEntries":null,"RegisteredDevices":{{}}}},"Checksum":3467439661}}"#
    );
    assert!(verify(text.as_bytes(), None).is_fine());
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    assert!(salvaged.is_undamaged(), "{:?}", salvaged.dropped);
    // Not even if they look like damaged ones.
    let text = text.replacen("x0", "Dat0", 1);
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    assert!(salvaged.is_undamaged(), "{:?}", salvaged.dropped);
    let text = String::from_utf8(bytes_of("dra/envelope-v1/06-two-claims.json")).unwrap();
    let text = text.replacen("{\"Data", "{\"Dat0\":0,\"Data", 1);
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    assert!(salvaged.is_undamaged(), "{:?}", salvaged.dropped);
    let text = String::from_utf8(bytes_of("dra/flat-1.28-extra/33-three-claims.json")).unwrap();
    let text = text.replacen("{\"DriverName", "{\"DriverNam0\":0,\"DriverName", 1);
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    assert!(salvaged.is_undamaged(), "{:?}", salvaged.dropped);
}

#[test]
fn entries_behind_one_with_broken_syntax_are_saved() {
    let text = String::from_utf8(bytes_of("deviceplugin/v2-two-resources-one-container.json")).unwrap();
    let broken = text.replacen("sidecar", "side\u{1}car", 1);
    let salvaged = salvage(broken.as_bytes(), None).unwrap();
    let Document::DevicePlugin(kept) = &salvaged.kept else {
        panic!("{salvaged:?}")
    };
    let entries: Vec<_> = kept.entries.iter().flatten().collect();
    let containers: Vec<&str> = entries.iter().map(|entry| entry.container.as_str()).collect();
    assert_eq!(containers, ["init", "unknown-container-2", "app", "app"]);
    assert!(entries[1].pod_uid.starts_with(UNKNOWN_POD) && entries[1].devices.ids() == ["gpu1"]);
    assert_eq!(kept.registered.as_ref().map(BTreeMap::len), Some(2));
    // The part before the syntax error, the part behind it, and the error.
    assert_eq!(salvaged.dropped.len(), 3, "{:?}", salvaged.dropped);
}

#[test]
fn a_repeated_list_is_salvaged_in_linear_time() {
    let many = |item: &str| vec![item; 100_000].join(",");
    let text = format!(
        r#"{{"Data":{{"PodDeviceEntries":[{}],"PodDeviceEntries":[{}]}},"Checksum":1}}"#,
        many("{}"),
        many("1")
    );
    let salvaged = salvage(text.as_bytes(), None).unwrap();
    assert!(salvaged.is_lost());
    assert_eq!(salvaged.dropped.last().unwrap().what, "99000 more of these");
}

#[test]
fn the_content_of_another_file_is_not_fine() {
    for (path, role) in [
        ("deviceplugin/v2-one-pod.json", Role::DraManager),
        ("dra/envelope-v1/03-single-device.json", Role::DevicePlugin),
        ("dra/health/01-two-devices.json", Role::DevicePlugin),
        ("dra/flat-1.27/01-single.json", Role::DraHealth),
    ] {
        let verdict = verify(&bytes_of(path), Some(role));
        let first = verdict.problems.first();
        assert!(
            matches!(first, Some(Problem::OtherFile { .. })),
            "{path}: {:?}",
            verdict.problems
        );
    }
}

#[test]
fn the_role_decides_what_a_document_with_a_misleading_key_is() {
    for name in ["version", "Data", "entries", "checksum", "gpu.acme.com"] {
        let text = format!(r#"{{"{name}":{{"Devices":{{}}}}}}"#);
        assert_eq!(
            read(text.as_bytes(), Some(Role::DraHealth)).unwrap().format,
            Format::DraHealth,
            "{name}"
        );
        assert!(verify(text.as_bytes(), Some(Role::DraHealth)).is_fine(), "{name}");
    }
    for text in [r#"{"Checksum":5}"#, r#"{"Data":null}"#, "{}"] {
        let file = read(text.as_bytes(), Some(Role::DraManager)).unwrap();
        assert_eq!(file.format, Format::DraEnvelopeV1, "{text}");
    }
}

#[test]
fn a_document_without_a_claim_list_is_neither_converted_nor_saved() {
    for text in [
        "{}",
        "null",
        r#"{"foo":{"bar":1}}"#,
        r#"{"Data":"{}","Checksum":2745614147}"#,
    ] {
        let file = read(text.as_bytes(), Some(Role::DraManager)).unwrap();
        assert!(convert(file).is_err(), "{text}");
        assert!(
            salvage(text.as_bytes(), Some(Role::DraManager)).is_err(),
            "{text}"
        );
    }
    for text in ["{}", "null"] {
        assert!(
            salvage(text.as_bytes(), Some(Role::DevicePlugin)).is_err(),
            "{text}"
        );
    }
}

#[test]
fn older_kubelets_are_named_only_if_they_load_everything() {
    let older = |path: &str| verify(&bytes_of(path), None).loaded_by_older;
    assert_eq!(older("deviceplugin-v1-extra/05-same-entry-twice.json"), None);
    assert_eq!(older("deviceplugin-v1-extra/06-bad-response.json"), None);
    assert!(older("deviceplugin/v1-one-pod.json").is_some());
    let entry = r#"{"PodUID":"p","ContainerName":"c","ResourceName":"a.b/c""#;
    for (text, expected) in [
        (
            format!(r#"{{"Entries":[{entry},"DeviceID":"a"}}]}}"#),
            Some("1.8"),
        ),
        (
            format!(r#"{{"Entries":[{entry},"DeviceIDs":["a"],"AllocResp":""}}]}}"#),
            None,
        ),
        (
            format!(r#"{{"PodDeviceEntries":[{entry},"DeviceIDs":["a"],"AllocResp":""}}]}}"#),
            Some("1.9 and 1.10"),
        ),
    ] {
        assert_eq!(verify(text.as_bytes(), None).loaded_by_older, expected, "{text}");
    }
}

#[test]
fn a_v0_entry_with_one_device_and_a_list_keeps_both() {
    let text = r#"{"Entries":[{"PodUID":"p","ContainerName":"c","ResourceName":"a.b/c","DeviceID":"a","DeviceIDs":["b","c"]}]}"#;
    let file = read(text.as_bytes(), None).unwrap();
    let Document::DevicePlugin(checkpoint) = file.unverified() else {
        panic!("{file:?}")
    };
    assert_eq!(
        checkpoint.entries.as_ref().unwrap()[0].devices.ids(),
        ["a", "b", "c"]
    );
}

#[test]
fn null_with_space_inside_is_not_null() {
    let verdict = verify(b"n u l l", None);
    assert!(
        matches!(verdict.problems[..], [Problem::Unreadable(_)]),
        "{:?}",
        verdict.problems
    );
    let spaced = verify(b" { } ", None);
    assert!(
        matches!(spaced.problems[..], [Problem::EmptyByAccident(_)]),
        "{:?}",
        spaced.problems
    );
}
