//! Property tests: reading a written file returns the same content.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_kubelet_files::dra::envelope;
use devlet_kubelet_files::dra::{Claim, Device, Driver};
use devlet_kubelet_files::{Format, Role, read, salvage, verify};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;

/// Names as in kubelets' files, and arbitrary strings.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[a-z0-9./-]{0,12}",
        1 => any::<String>(),
        1 => "[<>&\"\\\\\u{0}-\u{1f}\u{7f}\u{2028}\u{2029}\u{fffd}😀]{0,6}",
    ]
}

fn texts() -> impl Strategy<Value = Option<Vec<String>>> {
    option::of(vec(text(), 0..4))
}

prop_compose! {
    fn entry()(
        pod_uid in text(),
        container in text(),
        resource in text(),
        nodes in option::of(btree_map(any::<i64>(), texts(), 0..4)),
        alloc_resp in option::of(vec(any::<u8>(), 0..40)),
    ) -> Entry {
        Entry { pod_uid, container, resource, devices: Devices::PerNuma(nodes), alloc_resp }
    }
}

prop_compose! {
    fn checkpoint()(
        entries in option::of(vec(entry(), 0..6)),
        registered in option::of(btree_map(text(), texts(), 0..4)),
    ) -> Checkpoint {
        Checkpoint { entries, registered }
    }
}

prop_compose! {
    fn device()(
        pool in text(),
        name in text(),
        share_id in option::of(text()),
        requests in texts(),
        cdi_devices in texts(),
    ) -> Device {
        Device { pool, name, share_id, requests, cdi_devices }
    }
}

prop_compose! {
    fn driver()(
        devices in option::of(vec(device(), 0..3)),
        skip_node_operations in option::of(vec(text(), 1..3)),
    ) -> Driver {
        Driver { devices, skip_node_operations }
    }
}

prop_compose! {
    fn claim()(
        uid in text(),
        name in text(),
        namespace in text(),
        pods in option::of(btree_set(text(), 0..3)),
        drivers in option::of(btree_map(text(), driver(), 0..3)),
    ) -> Claim {
        Claim { uid, name, namespace, pods, drivers }
    }
}

/// Like [`device_plugin::write`], in the format of 1.11 to 1.19, which this crate does not write.
fn as_v1(checkpoint: &Checkpoint, checksum: u64) -> Vec<u8> {
    let entries = checkpoint.entries.as_ref().map(|entries| {
        let entry = |entry: &Entry| {
            serde_json::json!({
                "PodUID": entry.pod_uid, "ContainerName": entry.container, "ResourceName": entry.resource,
                "DeviceIDs": entry.devices.ids(), "AllocResp": entry.alloc_resp,
            })
        };
        entries.iter().map(entry).collect::<Vec<_>>()
    });
    let data = serde_json::json!({"PodDeviceEntries": entries, "RegisteredDevices": checkpoint.registered});
    serde_json::json!({"Data": data, "Checksum": checksum})
        .to_string()
        .into_bytes()
}

proptest! {
    #[test]
    fn any_checkpoint_is_read_back_as_it_was_written(checkpoint in checkpoint()) {
        let text = device_plugin::write(&checkpoint);
        let file = device_plugin::read(text.as_bytes()).unwrap();
        prop_assert_eq!(file.format, Format::DevicePluginV2);
        prop_assert!(file.warnings.is_empty(), "{:?}", file.warnings);
        prop_assert_eq!(file.verified().unwrap(), checkpoint);
    }

    #[test]
    fn any_v1_file_with_its_checksum_is_read(checkpoint in checkpoint()) {
        let wrong = device_plugin::read(&as_v1(&checkpoint, 0)).unwrap();
        let checksum = wrong.checksum.unwrap().computed;
        let file = device_plugin::read(&as_v1(&checkpoint, checksum)).unwrap();
        let entries = checkpoint.entries.as_ref().map_or(0, Vec::len);
        let expected = if entries == 0 { Format::DevicePluginV2 } else { Format::DevicePluginV1 };
        prop_assert_eq!(file.format, expected);
        let read = file.verified().unwrap();
        let ids = |checkpoint: &Checkpoint| -> Vec<Vec<String>> {
            let entries = checkpoint.entries.iter().flatten();
            entries.map(|entry| entry.devices.ids().into_iter().map(str::to_owned).collect()).collect()
        };
        prop_assert_eq!(ids(&read), ids(&checkpoint));
        prop_assert_eq!(read.registered, checkpoint.registered);
    }

    #[test]
    fn any_claims_are_read_back_as_they_were_written(claims in option::of(vec(claim(), 0..5))) {
        let text = envelope::write(claims.as_deref());
        let file = envelope::read(text.as_bytes()).unwrap();
        prop_assert!(file.warnings.is_empty(), "{:?}", file.warnings);
        prop_assert_eq!(file.verified().unwrap(), envelope::Checkpoint::new(claims));
    }

    #[test]
    fn a_salvaged_prefix_loads_in_full(checkpoint in checkpoint(), cut in any::<prop::sample::Index>(), noise in vec(any::<u8>(), 0..3)) {
        let mut bytes = device_plugin::write(&checkpoint).into_bytes();
        bytes.truncate(cut.index(bytes.len() + 1));
        bytes.extend(noise);
        if let Ok(salvaged) = salvage(&bytes, None) {
            let verdict = verify(salvaged.text.as_bytes(), None);
            prop_assert!(verdict.is_fine(), "{:?} from {:?}", verdict.problems, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_file_salvaged_behind_damage_loads_in_full(
        checkpoint in checkpoint(),
        claims in vec(claim(), 0..4),
        at in any::<prop::sample::Index>(),
        damage in vec(any::<u8>(), 1..8),
    ) {
        for (text, role) in [
            (device_plugin::write(&checkpoint), Role::DevicePlugin),
            (envelope::write(Some(&claims)), Role::DraManager),
        ] {
            let mut bytes = text.into_bytes();
            let at = at.index(bytes.len());
            let end = bytes.len().min(at + damage.len());
            bytes.splice(at..end, damage.iter().copied());
            if let Ok(salvaged) = salvage(&bytes, Some(role)) {
                let verdict = verify(salvaged.text.as_bytes(), None);
                prop_assert!(verdict.is_fine(), "{:?} from {:?}", verdict.problems, String::from_utf8_lossy(&bytes));
            }
        }
    }

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes, None);
        let _ = verify(&bytes, None);
        let _ = salvage(&bytes, None);
    }
}

#[test]
fn an_empty_list_of_skipped_operations_is_left_out() {
    let driver = Driver {
        devices: None,
        skip_node_operations: Some(Vec::new()),
    };
    let drivers = Some(BTreeMap::from([("d".to_owned(), driver)]));
    let claim = Claim {
        drivers,
        pods: Some(BTreeSet::new()),
        ..Claim::default()
    };
    assert!(!envelope::write(Some(&[claim])).contains("skipNodeOperations"));
}
