//! Damage anywhere in a file costs only the part that is hit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ops::Range;
use std::path::Path;

use devlet_kubelet_files::device_plugin::{self, Checkpoint, Entry};
use devlet_kubelet_files::dra::envelope;
use devlet_kubelet_files::salvage::{Salvage, UNKNOWN_POD};
use devlet_kubelet_files::{Document, Role, salvage, verify};

fn vector(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn entries_of(text: &str) -> Vec<Entry> {
    let file = device_plugin::read(text.as_bytes()).unwrap();
    file.unverified().entries.clone().unwrap_or_default()
}

/// Where each element that begins with `marker` stands. `end` follows the last one.
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

/// The file with each bit of each byte flipped in turn, and the byte.
fn flipped(bytes: &[u8], bits: Range<u32>) -> impl Iterator<Item = (Vec<u8>, Range<usize>)> {
    let places = (0..bytes.len()).flat_map(move |at| bits.clone().map(move |bit| (at, bit)));
    places.map(|(at, bit)| {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 1 << bit;
        (damaged, at..at + 1)
    })
}

/// The file with each stretch of `length` bytes zeroed in turn, `step` bytes apart, and the stretch.
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

/// Keys have no case: some damage changes nothing.
fn is_same(salvaged: &Salvage, entries: &[Entry]) -> bool {
    matches!(&salvaged.kept, Document::DevicePlugin(kept) if kept.entries.as_deref() == Some(entries))
}

/// Asserts that the devices of entries that are not hit are held, by their pod or by an unknown one.
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

/// A file of several sectors, with all entries of the real files, each with device ids of its own.
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
    let mut registered = std::collections::BTreeMap::new();
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
fn hostile_files_are_scanned_in_linear_time() {
    for part in [
        r#"{"PodUID":["#,
        r#"{"PodUID":""#,
        r#""DeviceIDs":{"#,
        r#"{"ClaimUID":["#,
        r#"{\"ClaimUID\":{"#,
        r#"{"DriverName":["#,
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
fn a_damaged_claim_costs_no_other_claim() {
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
