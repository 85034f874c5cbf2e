//! Damage anywhere in a file affects only the damaged part.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_kubelet_files::dra::{self, envelope};
use devlet_kubelet_files::salvage::{INCOMPLETE_POD, Salvage, UNKNOWN_CLAIM, UNKNOWN_POD};
use devlet_kubelet_files::{Document, Role, salvage, verify};

fn vector(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn entries_of(text: &str) -> Vec<Entry> {
    let file = device_plugin::read(text.as_bytes()).unwrap();
    file.unverified().entries.clone().unwrap_or_default()
}

/// Returns the range of each element that begins with `marker`. `end` follows the last one.
fn ranges(text: &str, marker: &str, end: &str) -> Vec<Range<usize>> {
    let starts: Vec<usize> = text.match_indices(marker).map(|(at, _)| at).collect();
    let ends = starts[1..].iter().map(|next| next - 1);
    let last = text.rfind(end).unwrap();
    starts
        .iter()
        .zip(ends.chain([last]))
        .map(|(&from, to)| from..to)
        .collect()
}

/// Returns the file with each bit of each byte flipped in turn, and the range of that byte.
fn flipped(bytes: &[u8], bits: Range<u32>) -> impl Iterator<Item = (Vec<u8>, Range<usize>)> {
    let places = (0..bytes.len()).flat_map(move |at| bits.clone().map(move |bit| (at, bit)));
    places.map(|(at, bit)| {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 1 << bit;
        (damaged, at..at + 1)
    })
}

/// Returns the file with each stretch of `length` bytes zeroed in turn, `step` bytes apart, and the stretch.
fn zeroed(bytes: &[u8], length: usize, step: usize) -> impl Iterator<Item = (Vec<u8>, Range<usize>)> {
    (0..bytes.len()).step_by(step).map(move |from| {
        let hit = from..bytes.len().min(from + length);
        let mut damaged = bytes.to_vec();
        damaged[hit.clone()].fill(0);
        (damaged, hit)
    })
}

fn is_hit(range: &Range<usize>, hit: &Range<usize>) -> bool {
    hit.start < range.end && range.start < hit.end
}

/// Compares the entries. Keys match without regard to case, so some damage changes nothing.
fn is_same(salvaged: &Salvage, entries: &[Entry]) -> bool {
    matches!(&salvaged.kept, Document::DevicePlugin(kept) if kept.entries.as_deref() == Some(entries))
}

/// Asserts that the devices of undamaged entries are held, by their pod or by an unknown one.
fn assert_held(entries: &[Entry], ranges: &[Range<usize>], damaged: &[u8], hit: &Range<usize>) {
    let shown = || format!("{hit:?}: {}", String::from_utf8_lossy(damaged));
    let salvaged = salvage(damaged, Some(Role::DevicePlugin)).unwrap_or_else(|e| panic!("{e}: {}", shown()));
    assert!(
        salvaged.has_losses() || is_same(&salvaged, entries),
        "{}",
        shown()
    );
    let verdict = verify(salvaged.text.as_bytes(), None);
    assert!(verdict.is_fine(), "{:?}: {}", verdict.problems, shown());
    let Document::DevicePlugin(kept) = &salvaged.kept else {
        panic!("another file: {}", shown())
    };
    for (entry, _) in entries
        .iter()
        .zip(ranges)
        .filter(|(_, range)| !is_hit(range, hit))
    {
        for id in entry.devices.ids() {
            let holds = |kept: &&Entry| kept.resource == entry.resource && kept.devices.ids().contains(&id);
            let mut holders = kept.entries.iter().flatten().filter(holds);
            let is_held = holders
                .any(|holder| holder.pod_uid == entry.pod_uid || holder.pod_uid.starts_with(UNKNOWN_POD));
            assert!(
                is_held,
                "{id} of {} is free: {:?} of {}",
                entry.holder(),
                kept,
                shown()
            );
        }
    }
}

#[test]
fn a_flipped_bit_frees_no_device_of_another_entry() {
    for path in [
        "deviceplugin/v2-two-resources-one-container.json",
        "deviceplugin/v1-historic-1.19.json",
    ] {
        let text = vector(path);
        let (entries, ranges) = (
            entries_of(&text),
            ranges(&text, "{\"PodUID\"", "],\"RegisteredDevices\""),
        );
        assert_eq!(entries.len(), ranges.len());
        for (damaged, hit) in flipped(text.as_bytes(), 0..8) {
            assert_held(&entries, &ranges, &damaged, &hit);
        }
    }
}

/// Builds a file of several sectors with all entries of the real files. Each entry has its own device ids.
fn several_sectors() -> (String, Vec<Entry>) {
    let paths = [
        "deviceplugin/v2-two-resources-one-container.json",
        "deviceplugin/v2-full-response.json",
        "deviceplugin/v2-no-topology.json",
        "deviceplugin/v2-one-pod.json",
        "deviceplugin/v1-historic-1.19.json",
    ];
    let mut text = String::new();
    let mut number = 0;
    let mut registered = BTreeMap::new();
    for path in paths.into_iter().cycle().take(3 * paths.len()) {
        for mut entry in entries_of(&vector(path)) {
            number += 1;
            entry.pod_uid = format!("{}-{number}", entry.pod_uid);
            entry.devices = entry.devices.into_per_numa();
            registered.insert(entry.resource.clone(), Some(vec![format!("gpu-{number}")]));
            let one = Checkpoint {
                entries: Some(vec![entry]),
                registered: None,
            };
            let one = device_plugin::write(&one).replace("gpu", &format!("gpu-{number}-"));
            let range = ranges(&one, "{\"PodUID\"", "],\"RegisteredDevices\"").remove(0);
            text.push_str(if text.is_empty() { "" } else { "," });
            text.push_str(&one[range]);
        }
    }
    let text = format!(r#"{{"Data":{{"PodDeviceEntries":[{text}],"RegisteredDevices":{{}}}},"Checksum":0}}"#);
    let checkpoint = Checkpoint {
        entries: Some(entries_of(&text)),
        registered: Some(registered),
    };
    let text = device_plugin::write(&checkpoint);
    assert!(text.len() > 8 * 512, "{}", text.len());
    let entries = entries_of(&text);
    (text, entries)
}

#[test]
fn a_zeroed_sector_frees_no_device_of_another_entry() {
    let (text, entries) = several_sectors();
    let ranges = ranges(&text, "{\"PodUID\"", "],\"RegisteredDevices\"");
    assert_eq!(entries.len(), ranges.len());
    for (length, step) in [(512, 512), (512, 37), (64, 23), (1, 11)] {
        for (damaged, hit) in zeroed(text.as_bytes(), length, step) {
            assert_held(&entries, &ranges, &damaged, &hit);
        }
    }
}

#[test]
fn the_readable_part_of_a_broken_entry_stays_held() {
    let text = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"p","ContainerName":"c","ResourceName":"v.com/gpu","DeviceIDs":{"0":["a0","a1"],"1":["a2"]},"AllocResp":""},{"PodUID":"q","ContainerName":"d","ResourceName":"v.com/nic","DeviceIDs":{"-1":["b0"]},"AllocResp":""}],"RegisteredDevices":{"v.com/gpu":["a0","a1","a2","a3"],"v.com/nic":["b0"]}},"Checksum":0}"#;
    let unknown = UNKNOWN_POD;
    let zeros = |part: &str| "\0".repeat(part.len());
    for (sound, damaged, expected) in [
        // A quote or bracket of the device list.
        (r#""a1"]"#, r#""a1!]"#.to_owned(), vec![("p", "a0 a1 a2")]),
        (r#""a1"]"#, r#"!a1"]"#.to_owned(), vec![("p", "a0 a1 a2")]),
        (r#"["a0""#, r#"{"a0""#.to_owned(), vec![("p", "a0 a1 a2")]),
        (
            r#"]},"AllocResp""#,
            r#"]!,"AllocResp""#.to_owned(),
            vec![("p", "a0 a1 a2")],
        ),
        // A key, and the values before the list.
        (
            r#""DeviceIDs""#,
            "\"Dev\u{1}ceIDs\"".to_owned(),
            vec![("p", "a0 a1 a2")],
        ),
        (r#""c","#, r#""c!,"#.to_owned(), vec![("p", "a0 a1 a2")]),
        (
            r#"{"PodUID":"p","#,
            r#"{"PodUID":"p!,"#.to_owned(),
            vec![(unknown, "a0 a1 a2")],
        ),
        // Zeros may hide the end of one entry and the beginning of another.
        (r#""c","#, zeros(r#""c","#), vec![(unknown, "a0 a1 a2")]),
        ("PodUID", zeros("PodUID"), vec![(unknown, "a0 a1 a2")]),
        (r#"v.com/gpu"#, zeros("v.com/gpu"), vec![(unknown, "a0 a1 a2")]),
        ("a1", zeros("a1"), vec![("p", "a0"), (unknown, "a2")]),
        (
            r#"DeviceIDs":{"0"#,
            zeros(r#"DeviceIDs":{"0"#),
            vec![(unknown, "a0 a1 a2")],
        ),
        // The next entry has lost its beginning.
        (
            r#""AllocResp":""},{"PodUID":"q","ContainerName":"d","ResourceName":"v.com/nic""#,
            zeros(r#""AllocResp":""},{"PodUID":"q","ContainerName":"d","ResourceName":"v.com/nic""#),
            vec![("p", "a0 a1 a2")],
        ),
    ] {
        let damaged = text.replacen(sound, &damaged, 1);
        let salvaged = salvage(damaged.as_bytes(), Some(Role::DevicePlugin)).unwrap();
        let Document::DevicePlugin(kept) = &salvaged.kept else {
            panic!("another file: {damaged}")
        };
        let (gpus, nics): (Vec<&Entry>, Vec<&Entry>) = kept
            .entries
            .iter()
            .flatten()
            .partition(|entry| entry.resource == "v.com/gpu");
        let held: Vec<(&str, String)> = gpus
            .iter()
            .map(|entry| {
                let is_unknown = entry.pod_uid.starts_with(unknown);
                let pod = if is_unknown {
                    unknown
                } else {
                    entry.pod_uid.as_str()
                };
                (pod, entry.devices.ids().join(" "))
            })
            .collect();
        let expected: Vec<(&str, String)> =
            expected.into_iter().map(|(pod, ids)| (pod, ids.into())).collect();
        assert_eq!(held, expected, "{damaged}");
        assert!(
            nics.iter().any(|entry| entry.devices.ids() == ["b0"]),
            "{damaged}"
        );
    }
}

#[test]
fn a_device_without_a_readable_resource_is_held_under_the_others() {
    let text = two_pods();
    let list = text.find(",\"RegisteredDevices\"").unwrap();
    let damaged = text[..list].replacen("sample.devlet.dev/widget", "\0\0", 1);
    let salvaged = salvage(damaged.as_bytes(), Some(Role::DevicePlugin)).unwrap();
    let Document::DevicePlugin(kept) = &salvaged.kept else {
        panic!("another file")
    };
    let entries = kept.entries.iter().flatten();
    let held: Vec<(&str, String)> = entries
        .map(|entry| (entry.resource.as_str(), entry.devices.ids().join(" ")))
        .collect();
    let expected = ["widget-1", "widget-0"].map(|id| ("sample.devlet.dev/widget", id.to_owned()));
    assert_eq!(held, expected);
}

#[test]
fn a_damaged_result_of_a_repair_has_one_mark() {
    let claims = envelope::write(Some(&[claim(2), claim(0)]));
    for (text, role) in [(two_pods(), Role::DevicePlugin), (claims, Role::DraManager)] {
        let cut = &text.as_bytes()[..text.len() - 4];
        let first = salvage(cut, Some(role)).unwrap();
        let cut = &first.text.as_bytes()[..first.text.len() - 4];
        let second = salvage(cut, Some(role)).unwrap();
        assert_eq!(second.text, first.text);
    }
}

/// Damage reported by an operator: to the backslash before a quote, and to a quote.
#[test]
fn a_claim_with_a_damaged_quote_is_kept_and_reported() {
    let text = envelope::write(Some(&[claim(2), claim(0)]));
    for (sound, damaged) in [
        (r#"\"Devices\""#, r#"T"Devices\""#),
        (r#"\"sample\""#, r#"\&sample\""#),
    ] {
        let damaged = text.replacen(sound, damaged, 1);
        let salvaged = salvage(damaged.as_bytes(), Some(Role::DraManager)).unwrap();
        let Document::DraEnvelope(kept) = &salvaged.kept else {
            panic!("another file")
        };
        let identity = |claim: &dra::Claim| (claim.uid.clone(), claim.key(), claim.pods.clone());
        let kept: Vec<_> = kept.claims.iter().flatten().map(identity).collect();
        assert_eq!(kept, [identity(&claim(2)), identity(&claim(0))], "{damaged}");
        let reported = salvaged
            .dropped
            .iter()
            .any(|part| part.what.contains("default/c2") && part.what.contains("gadget-2"));
        assert!(reported, "{:?}", salvaged.dropped);
        assert!(salvaged.incomplete && salvaged.text.contains(INCOMPLETE_POD));
    }
}

#[test]
fn a_claim_without_a_readable_identity_is_held_by_an_unknown_claim_and_pod() {
    let text = envelope::write(Some(&[claim(2), claim(0)]));
    let end = text.find(r#",\"DriverState"#).unwrap();
    let start = text.find("ClaimUID").unwrap();
    let damaged = format!("{}{}{}", &text[..start], "\0".repeat(end - start), &text[end..]);
    let salvaged = salvage(damaged.as_bytes(), Some(Role::DraManager)).unwrap();
    let Document::DraEnvelope(kept) = &salvaged.kept else {
        panic!("another file")
    };
    let [unknown, other] = kept.claims.as_deref().unwrap() else {
        panic!("{kept:?}")
    };
    let name = format!("{UNKNOWN_CLAIM}1");
    assert_eq!(
        (unknown.uid.as_str(), unknown.key()),
        (name.as_str(), format!("devlet/{name}"))
    );
    let pods: Vec<&String> = unknown.pods.iter().flatten().collect();
    assert!(
        matches!(pods[..], [pod] if pod.starts_with(UNKNOWN_POD)),
        "{pods:?}"
    );
    assert_eq!(*other, claim(0));
}

#[test]
fn a_damaged_name_that_another_claim_has_frees_no_device() {
    let text = envelope::write(Some(&[claim(2), claim(0)]));
    for (own, taken) in [(r#"\"c2\""#, r#"\"c0\""#), ("2cc91b09", "0cc91b09")] {
        let damaged = text.replacen(own, taken, 1);
        let salvaged = salvage(damaged.as_bytes(), Some(Role::DraManager)).unwrap();
        assert_eq!(held_devices(&salvaged.kept).len(), 2, "{:?}", salvaged.kept);
        let read = envelope::read(salvaged.text.as_bytes())
            .unwrap()
            .verified()
            .unwrap();
        let read = read.claims.unwrap();
        let keys: BTreeSet<String> = read.iter().map(dra::Claim::key).collect();
        let uids: BTreeSet<&str> = read.iter().map(|claim| claim.uid.as_str()).collect();
        assert_eq!((keys.len(), uids.len()), (3, 3));
    }
}

#[test]
fn hostile_files_are_scanned_in_linear_time() {
    for part in [
        r#"{"PodUID":["#,
        r#"{"PodUID":""#,
        r#""DeviceIDs":{"#,
        r#"{"ClaimUID":["#,
        r#"{\"ClaimUID\":{"#,
        r#"{"DriverName":["#,
        r#"{"ClaimUID":"","DriverState":{"a":{"Devices":[{"DeviceName":"b",,"#,
        r#"{"DeviceName":"b","#,
        "\"",
        "\\",
    ] {
        let text = part.repeat(20_000);
        for role in [Role::DevicePlugin, Role::DraManager] {
            let _ = salvage(text.as_bytes(), Some(role));
            let text = format!(r#"{{"version":"v1","entries":[{text}"#);
            let _ = salvage(text.as_bytes(), Some(role));
        }
    }
}

#[test]
fn a_damaged_claim_does_not_affect_another_claim() {
    let text = vector("dra/envelope-v1/06-two-claims.json");
    let claims = envelope::read(text.as_bytes())
        .unwrap()
        .verified()
        .unwrap()
        .claims
        .unwrap();
    let ranges = ranges(&text, r#"{\"ClaimUID\""#, r#"]}","Checksum""#);
    assert_eq!(claims.len(), ranges.len());
    let damages = flipped(text.as_bytes(), 0..8).chain(zeroed(text.as_bytes(), 64, 7));
    for (damaged, hit) in damages {
        let shown = || format!("{hit:?}: {}", String::from_utf8_lossy(&damaged));
        let salvaged =
            salvage(&damaged, Some(Role::DraManager)).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        let is_same = |kept: &Document| matches!(kept, Document::DraEnvelope(kept) if kept.claims.as_ref() == Some(&claims));
        assert!(salvaged.has_losses() || is_same(&salvaged.kept), "{}", shown());
        let Document::DraEnvelope(kept) = &salvaged.kept else {
            panic!("another file: {}", shown())
        };
        for (claim, _) in claims
            .iter()
            .zip(&ranges)
            .filter(|(_, range)| !is_hit(range, &hit))
        {
            let is_kept = kept.claims.iter().flatten().any(|kept| kept == claim);
            assert!(is_kept, "{} is lost: {}", claim.key(), shown());
        }
    }
}

/// A claim of one pod with one device, as a kubelet writes it.
fn claim(number: usize) -> dra::Claim {
    let device = dra::Device {
        pool: "sample".into(),
        name: format!("gadget-{number}"),
        share_id: None,
        requests: Some(vec!["r".into()]),
        cdi_devices: Some(vec![format!("sample.devlet.dev/gadget=gadget-{number}")]),
    };
    let driver = dra::Driver {
        devices: Some(vec![device]),
        skip_node_operations: None,
    };
    dra::Claim {
        uid: format!("{number}cc91b09-ab23-5ad3-8330-16078c65c3e2"),
        name: format!("c{number}"),
        namespace: "default".into(),
        pods: Some(BTreeSet::from([format!(
            "{number}766463f-0cf0-59a0-a056-ffe91f6d11a8"
        )])),
        drivers: Some(BTreeMap::from([("gadget.sample.devlet.dev".into(), driver)])),
    }
}

/// Returns the complete texts between `before` and `after` in the bytes.
fn texts_between(bytes: &[u8], before: &str, after: &str) -> Vec<String> {
    let find = |from: usize, text: &str| {
        let found = bytes[from..]
            .windows(text.len())
            .position(|window| window == text.as_bytes());
        found.map(|at| from + at)
    };
    let (mut texts, mut at) = (Vec::new(), 0);
    while let Some(start) = find(at, before).map(|found| found + before.len()) {
        at = start;
        let length = bytes[start..]
            .iter()
            .take_while(|byte| !b"\"\\".contains(byte))
            .count();
        if bytes[start + length..].starts_with(after.as_bytes()) {
            let text = String::from_utf8(bytes[start..start + length].to_vec()).ok();
            texts.extend(text.filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic())));
        }
    }
    texts
}

/// Returns driver, pool and name of each device that a claim with a pod holds.
fn held_devices(document: &Document) -> BTreeSet<(String, String, String)> {
    let Document::DraEnvelope(kept) = document else {
        panic!("another file: {document:?}")
    };
    let mut held = BTreeSet::new();
    for claim in kept.claims.iter().flatten() {
        assert!(!claim.uid.is_empty() && !claim.name.is_empty(), "{claim:?}");
        for (name, driver) in claim.drivers.iter().flatten() {
            for device in driver.devices.iter().flatten() {
                assert!(claim.pods.iter().flatten().next().is_some(), "{claim:?}");
                held.insert((name.clone(), device.pool.clone(), device.name.clone()));
            }
        }
    }
    held
}

/// Asserts that each device with a readable name stays held, and that the file is marked. `hit` are the damaged bytes.
fn assert_claims_hold(text: &str, damaged: &[u8], hit: &Range<usize>) {
    let shown = || format!("{hit:?}: {}", String::from_utf8_lossy(damaged));
    // A damaged name of a driver or a pool is a different name.
    let places = ["gadget.sample.devlet.dev", "\\\"sample\\\""];
    let mut names = places.iter().flat_map(|name| text.match_indices(name));
    let is_place_hit = names.any(|(at, name)| is_hit(&(at..at + name.len()), hit));
    for role in [Some(Role::DraManager), None] {
        let salvaged = salvage(damaged, role).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        let held = held_devices(&salvaged.kept);
        for name in texts_between(damaged, r#"\"DeviceName\":\""#, r#"\""#) {
            let is_held = held.iter().any(|(driver, pool, device)| {
                let is_placed = driver == "gadget.sample.devlet.dev" && pool == "sample";
                *device == name && (is_placed || is_place_hit)
            });
            assert!(is_held, "{name} is free: {held:?} of {}", shown());
        }
        let is_same = held.len() == 2 && salvaged.is_undamaged();
        assert!(salvaged.incomplete || is_same, "{}", shown());
        let verdict = verify(salvaged.text.as_bytes(), None);
        assert!(verdict.is_fine(), "{:?}: {}", verdict.problems, shown());
    }
}

#[test]
fn a_flipped_bit_frees_no_device_of_a_claim() {
    let text = envelope::write(Some(&[claim(2), claim(0)]));
    for (damaged, hit) in flipped(text.as_bytes(), 0..8) {
        assert_claims_hold(&text, &damaged, &hit);
    }
}

#[test]
fn a_zeroed_stretch_frees_no_device_of_a_claim() {
    let text = envelope::write(Some(&[claim(2), claim(0)]));
    for length in [2, 3, 9, 40] {
        for (damaged, hit) in zeroed(text.as_bytes(), length, 1) {
            assert_claims_hold(&text, &damaged, &hit);
        }
    }
}

/// A file with two pods, each with one device.
fn two_pods() -> String {
    let entry = |number: usize| Entry {
        pod_uid: format!("{number}c80a151-aeaf-52e7-a551-916eb2229a51"),
        container: "main".into(),
        resource: "sample.devlet.dev/widget".into(),
        devices: Devices::PerNuma(Some(BTreeMap::from([(
            0,
            Some(vec![format!("widget-{number}")]),
        )]))),
        alloc_resp: Some(Vec::new()),
    };
    let devices = (0..3).map(|number| format!("widget-{number}")).collect();
    device_plugin::write(&Checkpoint {
        entries: Some(vec![entry(0), entry(1)]),
        registered: Some(BTreeMap::from([(
            "sample.devlet.dev/widget".into(),
            Some(devices),
        )])),
    })
}

/// Asserts that each device that is readable in an entry stays held, and that the file is marked.
fn assert_entries_hold(text: &str, damaged: &[u8], hit: &Range<usize>) {
    let shown = || format!("{hit:?}: {}", String::from_utf8_lossy(damaged));
    let mut resources = text.match_indices("sample.devlet.dev/widget");
    let is_resource_hit = resources.any(|(at, name)| is_hit(&(at..at + name.len()), hit));
    // The devices at the end are those of the plugin.
    let list = text.find("\"RegisteredDevices\"").unwrap();
    for role in [Some(Role::DevicePlugin), None] {
        let salvaged = salvage(damaged, role).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        let Document::DevicePlugin(kept) = &salvaged.kept else {
            panic!("another file: {}", shown())
        };
        for name in texts_between(&damaged[..list], r#"[""#, r#""]"#) {
            let holds = |entry: &&Entry| {
                let is_resource = entry.resource == "sample.devlet.dev/widget" || is_resource_hit;
                is_resource && !entry.pod_uid.is_empty() && entry.devices.ids().contains(&name.as_str())
            };
            let is_held = kept.entries.iter().flatten().any(|entry| holds(&entry));
            assert!(is_held, "{name} is free: {kept:?} of {}", shown());
        }
        assert!(
            salvaged.incomplete || is_same(&salvaged, &entries_of(text)),
            "{}",
            shown()
        );
        let verdict = verify(salvaged.text.as_bytes(), None);
        assert!(verdict.is_fine(), "{:?}: {}", verdict.problems, shown());
    }
}

#[test]
fn a_flipped_bit_frees_no_device_of_a_pod() {
    let text = two_pods();
    for (damaged, hit) in flipped(text.as_bytes(), 0..8) {
        assert_entries_hold(&text, &damaged, &hit);
    }
}

#[test]
fn a_zeroed_stretch_frees_no_device_of_a_pod() {
    let text = two_pods();
    for length in [2, 3, 9, 40] {
        for (damaged, hit) in zeroed(text.as_bytes(), length, 1) {
            assert_entries_hold(&text, &damaged, &hit);
        }
    }
}

#[test]
fn a_damaged_key_of_a_list_frees_no_device() {
    let text = two_pods();
    for key in ["Data", "PodDeviceEntries", "RegisteredDevices", "Checksum"] {
        for damage in ["", "x", "PodDevicesEntriesAndMore", "\"", "\\"] {
            let damaged = text.replacen(key, damage, 1);
            let at = text.find(key).unwrap();
            assert_entries_hold(&text, damaged.as_bytes(), &(at..at + key.len()));
        }
    }
}
