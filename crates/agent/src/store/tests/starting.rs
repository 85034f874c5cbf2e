//! Every row of the table in `open.rs`, and reboots.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::ops::Bound;
use std::pin::pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use devlet_core::dra::claims::{Claim, ClaimKey};
use devlet_core::{Blocked, DeviceId, PodUid, ReserveError};
use devlet_kubelet_files::Format;
use redb::{BackendError, StorageBackend};

use super::disk::Disk;
use super::durability::start;
use super::*;
use crate::store::devices_file::ImportedDevices;
use crate::store::kubelet_file::{BlockedBy, KubeletFile, PendingFile};
use crate::store::load_error::LoadError;
use crate::store::mirror_hashes::MirrorUpdate;
use crate::store::record::{BlockedRecord, ResourceRecord};
use crate::store::row::Row;
use crate::store::{
    ForgetFileError, Found, HoldError, ImportError, MirrorError, OnReboot, OpenError, StopError,
};

const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kubelet-files/testdata");

fn testdata(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TESTDATA).join(name)).unwrap()
}

fn devices(store: &Store, uid: &str) -> Vec<String> {
    let pod = store.read(|node| node.pod(&uid.into()).cloned()).unwrap();
    let devices = pod.devices().into_values().flatten();
    devices.map(ToString::to_string).collect()
}

/// Returns a root with pod `a` on device 00 in its database and its mirror.
async fn root_with_a_pod() -> Root {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    root
}

fn asides(root: &Root) -> Vec<String> {
    let mut names = root.names();
    names.retain(|name| name.contains(".unreadable-"));
    names
}

#[tokio::test]
async fn a_start_without_files_is_a_first_start() {
    let root = Root::new();
    let (store, report) = root.open_with_report();
    assert_eq!(report.found, Found::Nothing);
    assert_eq!(report.blocked, None);
    assert!(report.quarantined.is_empty());
    assert_eq!(uids(&store), Vec::<String>::new());
    assert_eq!(root.names(), ["node-id", "state.redb"]);
}

#[tokio::test]
async fn a_first_start_imports_a_file_of_any_version() {
    let v0 = br#"{"PodDeviceEntries":[{"PodUID":"p","ContainerName":"c","ResourceName":"acme.com/gpu","DeviceIDs":["1","0"],"AllocResp":""}],"RegisteredDevices":{"acme.com/nic":["x"]}}"#;
    let cases = [
        (v0.to_vec(), Format::DevicePluginV0, 1),
        (
            testdata("deviceplugin/v1-one-pod.json"),
            Format::DevicePluginV1,
            1,
        ),
        (
            testdata("deviceplugin/v2-one-pod.json"),
            Format::DevicePluginV2,
            1,
        ),
        (
            testdata("deviceplugin/v2-registered-only.json"),
            Format::DevicePluginV2,
            0,
        ),
    ];
    for (file, format, count) in cases {
        let root = Root::new();
        std::fs::write(root.checkpoint(), &file).unwrap();

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::KubeletFile);
        let imported = report.imported.unwrap();
        assert_eq!(imported.format, format);
        assert_eq!(imported.difference.added.len(), count);
        let pods = pods(&store);
        assert_eq!(pods.len(), count, "{format:?}");
        for pod in &pods {
            assert_eq!((pod.source, pod.fingerprint), (Source::Imported, 0));
            assert_eq!(pod.name, PodName::default());
            assert_eq!(pod.allocations[0].kind, None);
            assert!(!pod.allocations[0].devices.is_empty());
        }
        assert!(store.read(|node| !node.known_resources().is_empty()));
        // The hash of the file is known before the first mirror is written.
        let after = Root::new();
        std::fs::copy(root.database(), after.database()).unwrap();
        std::fs::copy(root.checkpoint(), after.checkpoint()).unwrap();
        drop(store);
        let (_, report) = after.open_with_report();
        assert_eq!(report.found, Found::Database);
        assert!(report.takeover.is_none());
    }
}

#[tokio::test]
async fn an_unreadable_file_and_no_database_block_the_node() {
    let mixed = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"p","ContainerName":"c","ResourceName":"r","DeviceIDs":["0"],"AllocResp":""},{"PodUID":"q","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":["1"]},"AllocResp":""}],"RegisteredDevices":{}},"Checksum":1}"#;
    let cases = [
        mixed.to_vec(),
        testdata("deviceplugin/corrupt-truncated.json"),
        testdata("deviceplugin/corrupt-checksum-wrong.json"),
        testdata("deviceplugin/corrupt-empty-file.json"),
        testdata("deviceplugin/corrupt-json-null.json"),
        b"{}".to_vec(),
    ];
    for file in cases {
        let root = Root::new();
        std::fs::write(root.checkpoint(), &file).unwrap();

        let (_store, report) = root.open_with_report();

        let [aside] = &report.quarantined[..] else {
            panic!("{report:?}");
        };
        assert_eq!(aside.original, root.checkpoint());
        assert_eq!(std::fs::read(&aside.kept).unwrap(), file);
        assert!(!root.checkpoint().exists());
        assert!(!aside.reason.is_empty());
        let file = aside.kept.display().to_string();
        let reason = aside.reason.clone();
        assert_eq!(report.blocked, Some(Blocked::UnreadableState { file, reason }));
        let name = aside.kept.file_name().unwrap().to_str().unwrap();
        assert_eq!(
            name,
            "kubelet_internal_checkpoint.unreadable-20260921T141320.123Z"
        );
    }
}

#[tokio::test]
async fn a_quarantined_file_overwrites_no_other() {
    let root = root_with_a_pod().await;
    for number in 1..=3 {
        std::fs::write(root.checkpoint(), format!("broken {number}")).unwrap();
        let (store, report) = root.open_with_report();
        assert_eq!(report.quarantined.len(), 1);
        stop(&store).await;
    }
    let asides = asides(&root);
    let contents: Vec<_> = asides
        .iter()
        .map(|name| std::fs::read_to_string(root.path().join(name)).unwrap())
        .collect();
    assert_eq!(contents, ["broken 1", "broken 2", "broken 3"]);
}

#[tokio::test]
async fn a_crash_during_a_quarantine_is_not_a_first_start() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "broken").unwrap();
    // The database cannot be created.
    let disk = Disk::default();
    disk.fail_writes(Some(ErrorKind::StorageFull));
    let options = OpenOptions {
        storage: disk.storage(),
        ..root.options()
    };
    let failed = Store::open(options).unwrap_err();
    assert!(matches!(failed, OpenError::Disk { .. }), "{failed:?}");
    assert!(
        root.checkpoint().exists(),
        "it is kept under its name until the database knows of it"
    );

    let (_store, report) = root.open_with_report();

    assert!(report.blocked.is_some());
    assert_eq!(asides(&root).len(), 2);
}

#[tokio::test]
async fn the_database_counts_when_the_file_is_absent_or_a_mirror() {
    let root = root_with_a_pod().await;
    let (store, report) = root.open_with_report();
    assert_eq!(report.found, Found::Database);
    assert!(report.takeover.is_none() && report.quarantined.is_empty());
    assert_eq!(uids(&store), ["a"]);
    store.stop().await.unwrap();

    std::fs::remove_file(root.checkpoint()).unwrap();
    let (store, report) = root.open_with_report();
    assert!(report.takeover.is_none());
    assert_eq!(uids(&store), ["a"]);
    store.stop().await.unwrap();
    assert!(root.checkpoint().exists(), "the mirror is back");
}

#[tokio::test]
async fn a_kubelets_file_equal_to_an_older_mirror_is_adopted() {
    let root = root_with_a_pod().await;
    let held = std::fs::read(root.checkpoint()).unwrap();
    let store = root.open();
    offer(&store, GPU, 8);
    store.release(&"a".into()).await.unwrap();
    store.stop().await.unwrap();

    std::fs::write(root.checkpoint(), held).unwrap();
    let (store, report) = root.open_with_report();

    let takeover = report.takeover.unwrap();
    assert_eq!(takeover.difference.added, ["a".into()]);
    assert_eq!(devices(&store, "a"), ["00"]);
}

/// Returns the file that an operator has to decide about.
fn contested(report: &OpenReport) -> Vec<u8> {
    let [contested] = &report.contested[..] else {
        panic!("{report:?}");
    };
    let file = contested.copy.display().to_string();
    let Some(Blocked::ContestedFile {
        file: copy,
        difference,
        ..
    }) = &report.blocked
    else {
        panic!("{report:?}");
    };
    assert_eq!((copy, difference), (&file, &contested.difference));
    assert!(report.takeover.is_none(), "{report:?}");
    std::fs::read(&contested.copy).unwrap()
}

fn refuses(store: &Store) -> bool {
    let held = store.hold(&request("another", 1), &Preferences::new());
    matches!(held, Err(HoldError::Refused(ReserveError::Blocked(_))))
}

#[tokio::test]
async fn an_old_copy_of_a_mirror_is_not_adopted() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    store.mirror().await.unwrap();
    let empty = std::fs::read(root.checkpoint()).unwrap();
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();

    std::fs::write(root.checkpoint(), &empty).unwrap();
    let (store, report) = root.open_with_report();

    assert_eq!(contested(&report), empty);
    assert_eq!(
        report.contested[0].difference,
        "it lacks acme.com/gpu 00 of pod default/a (a)"
    );
    assert_eq!(devices(&store, "a"), ["00"]);
    offer(&store, GPU, 8);
    assert!(refuses(&store));
    store.forget().await.unwrap();
    admit(&store, "b", 1).await.unwrap();
    assert_eq!(devices(&store, "b"), ["01"]);
    store.stop().await.unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a", "b"]);
}

#[tokio::test]
async fn after_a_takeover_the_previous_mirror_is_not_known_any_longer() {
    let root = root_with_a_pod().await;
    let ours = std::fs::read(root.checkpoint()).unwrap();
    std::fs::write(root.checkpoint(), kubelet_file(&[("a", &["00"]), ("k", &["05"])])).unwrap();
    let (store, report) = root.open_with_report();
    assert!(report.takeover.is_some(), "a file that only adds is adopted");
    assert_eq!(uids(&store), ["a", "k"]);
    drop(store);
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();

    std::fs::write(after.checkpoint(), &ours).unwrap();
    let (store, report) = after.open_with_report();

    assert_eq!(contested(&report), ours);
    assert_eq!(uids(&store), ["a", "k"]);
}

/// Returns a root with the pods `changed` (00), `gone` (01) and `same` (02), and a kubelet's file that disagrees.
async fn root_with_a_contested_file() -> (Root, Pod) {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    for uid in ["changed", "gone", "same"] {
        admit(&store, uid, 1).await.unwrap();
    }
    let same = store.read(|node| node.pod(&"same".into()).cloned()).unwrap();
    store.stop().await.unwrap();
    let file = kubelet_file(&[("same", &["02"]), ("new", &["01"]), ("changed", &["07"])]);
    std::fs::write(root.checkpoint(), file).unwrap();
    (root, same)
}

#[tokio::test]
async fn a_file_that_takes_devices_from_pods_is_adopted_only_when_an_operator_imports_it() {
    let (root, same) = root_with_a_contested_file().await;

    let (store, report) = root.open_with_report();

    let file = contested(&report);
    let difference = &report.contested[0].difference;
    for part in [
        "acme.com/gpu 00 of pod default/changed",
        "acme.com/gpu 01 of pod",
        "has pod new",
    ] {
        assert!(difference.contains(part), "{part}: {difference}");
    }
    // The devices of both sides are held, even after another start and without the file.
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();
    for store in [store, after.open()] {
        assert_eq!(uids(&store), ["changed", "gone", "new", "same"]);
        assert_eq!(devices(&store, "changed"), ["00", "07"]);
        assert_eq!(devices(&store, "gone"), ["01"]);
        assert_eq!(devices(&store, "new"), ["01"]);
        offer(&store, GPU, 8);
        assert_eq!(free(&store), 4);
        assert!(refuses(&store));

        let imported = store.import(&file).await.unwrap();

        assert_eq!(imported.difference.added, ["new".into()]);
        assert_eq!(imported.difference.removed, ["gone".into()]);
        assert_eq!(imported.difference.changed, ["changed".into()]);
        assert_eq!(uids(&store), ["changed", "new", "same"]);
        assert_eq!(devices(&store, "changed"), ["07"]);
        assert_eq!(
            store.read(|node| node.pod(&"same".into()).cloned()).as_ref(),
            Some(&same)
        );
        let changed = store.read(|node| node.pod(&"changed".into()).cloned()).unwrap();
        assert_eq!(changed.name.name, "changed", "the file knows no names");
        assert!(changed.allocations[0].pre_start_required);
        assert!(!refuses(&store));
        store.stop().await.unwrap();
    }
    let archive = root.path().join("archive/20260921T141320.123Z.json");
    let archive: serde_json::Value = serde_json::from_slice(&std::fs::read(archive).unwrap()).unwrap();
    assert_eq!(archive["pods"].as_array().unwrap().len(), 3);
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["changed", "new", "same"]);
}

#[tokio::test]
async fn a_contested_file_that_an_operator_forgets_leaves_the_record_as_it_was() {
    let (root, _) = root_with_a_contested_file().await;
    let (store, report) = root.open_with_report();
    contested(&report);

    assert_eq!(store.forget().await.unwrap(), ["new".into()]);

    assert_eq!(uids(&store), ["changed", "gone", "same"]);
    assert_eq!(devices(&store, "changed"), ["00"]);
    offer(&store, GPU, 8);
    assert_eq!(free(&store), 5);
    store.stop().await.unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["changed", "gone", "same"]);
}

/// Returns a root with pod `a` (00), and a contested file with these pods.
async fn root_contested_by(pods: &[(&str, &[&str])]) -> Root {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), kubelet_file(pods)).unwrap();
    let (store, report) = root.open_with_report();
    contested(&report);
    stop(&store).await;
    root
}

fn contests(store: &Store) -> Vec<Blocked> {
    store.read(|node| node.blocked_by().to_vec())
}

#[tokio::test]
async fn a_further_file_does_not_end_a_contest_and_all_devices_stay_held() {
    let first = kubelet_file(&[("c", &["05"])]);
    // Files that take nothing from pods on record, one that takes everything, and one that agrees with the record.
    for further in [
        &[("a", &["00"][..]), ("b", &["01"])][..],
        &[("a", &["00", "02"])],
        &[("c", &["05", "06"])],
        &[],
        &[("a", &["00"]), ("c", &["05"])],
    ] {
        let root = root_contested_by(&[("c", &["05"])]).await;
        let store = root.open();
        let earlier = contests(&store).remove(0);
        stop(&store).await;
        let further = kubelet_file(further);
        std::fs::write(root.checkpoint(), &further).unwrap();

        let (store, report) = root.open_with_report();

        assert!(report.takeover.is_none(), "{report:?}");
        let [contested] = &report.contested[..] else {
            panic!("{report:?}");
        };
        assert_eq!(std::fs::read_to_string(&contested.copy).unwrap(), further);
        let both = contests(&store);
        assert_eq!((both.len(), &both[0]), (2, &earlier));
        let held = pods(&store);
        let imported = ImportedDevices::read(further.as_bytes()).unwrap().pods;
        let mut expected: BTreeMap<_, _> = held
            .iter()
            .map(|pod| (pod.uid.clone(), BTreeSet::new()))
            .collect();
        expected.get_mut("a").unwrap().insert("00".into());
        expected.get_mut("c").unwrap().insert("05".into());
        for (uid, allocations) in &imported {
            let devices = allocations.iter().flat_map(|each| each.devices.clone());
            expected.get_mut(uid).unwrap().extend(devices);
        }
        for pod in &held {
            let devices: BTreeSet<DeviceId> = pod.allocations[0].devices.iter().cloned().collect();
            assert_eq!(devices, expected[&pod.uid], "{}", pod.uid);
        }
        stop(&store).await;
        // Neither a file that is contested already nor the record itself is another contest.
        for known in [&first, &further, &kubelet_file(&[("a", &["00"])])] {
            std::fs::write(root.checkpoint(), known).unwrap();
            let (store, report) = root.open_with_report();
            assert!(
                report.contested.is_empty() && report.takeover.is_none(),
                "{report:?}"
            );
            assert_eq!((contests(&store), pods(&store)), (both.clone(), held.clone()));
            stop(&store).await;
        }

        // Forgetting a file releases only devices that no other side has.
        let store = root.open();
        for (file, other) in [(&first, both[1].file()), (&further, both[0].file())] {
            let refused = store.import(file.as_bytes()).await.unwrap_err();
            let file = other.to_owned();
            assert_eq!(refused, ImportError::OtherContested { file });
        }
        store.forget_reason(&both[0]).await.unwrap();
        assert_eq!(contests(&store), both[1..]);
        assert_eq!(devices(&store, "a")[0], "00");
        for uid in imported.keys() {
            let theirs = &imported[uid][0].devices;
            let held = devices(&store, uid.as_str());
            assert!(
                theirs
                    .iter()
                    .all(|id| held.iter().any(|held| held == id.as_str()))
            );
        }
        assert_eq!(uids(&store).contains(&"c".into()), imported.contains_key("c"));
        let is_unanswered = store.read(|node| node.contested_by(&"c".into()).is_some());
        assert_eq!(is_unanswered, imported.contains_key("c"));
        stop(&store).await;
        let store = root.open();
        store.forget().await.unwrap();
        assert_eq!(uids(&store), ["a"]);
        assert_eq!(devices(&store, "a"), ["00"]);
    }
}

#[tokio::test]
async fn of_two_contested_files_the_last_that_is_not_forgotten_can_be_adopted() {
    let root = root_contested_by(&[("c", &["05"])]).await;
    let further = kubelet_file(&[("b", &["01"])]);
    std::fs::write(root.checkpoint(), &further).unwrap();
    let store = root.open();

    assert_eq!(store.forget().await.unwrap(), ["c".into()]);
    let imported = store.import(further.as_bytes()).await.unwrap();

    assert_eq!(imported.difference.removed, ["a".into()]);
    assert_eq!(uids(&store), ["b"]);
    assert_eq!(contests(&store), []);
}

#[tokio::test]
async fn a_forgotten_file_releases_no_device_that_was_imported_since() {
    for is_restarted in [false, true] {
        let root = root_contested_by(&[("c", &["05", "06"]), ("d", &["07"])]).await;
        let mut store = root.open();
        let file = kubelet_file(&[("a", &["03"]), ("c", &["05"]), ("q", &["02"])]);

        store.import(file.as_bytes()).await.unwrap();

        assert_eq!(devices(&store, "c"), ["05", "06"], "the contest is open");
        if is_restarted {
            stop(&store).await;
            store = root.open();
        }
        assert_eq!(store.forget().await.unwrap(), ["d".into()]);
        assert_eq!(uids(&store), ["a", "c", "q"]);
        assert_eq!(devices(&store, "a"), ["03"]);
        assert_eq!(devices(&store, "c"), ["05"]);
        store.stop().await.unwrap();
        let store = root.open();
        assert_eq!(devices(&store, "c"), ["05"]);
        assert_eq!(contests(&store), []);
    }
}

#[tokio::test]
async fn an_import_takes_no_device_that_a_contested_file_gives_to_a_pod() {
    let root = root_contested_by(&[("a", &["00"]), ("c", &["00"])]).await;
    let store = root.open();

    store
        .import(kubelet_file(&[("a", &["03"])]).as_bytes())
        .await
        .unwrap();

    assert_eq!(devices(&store, "a"), ["00", "03"]);
    store.forget().await.unwrap();
    assert_eq!(devices(&store, "a"), ["03"]);
}

#[tokio::test]
async fn a_removed_pod_of_a_contested_file_is_not_brought_back_by_a_further_file_or_forget() {
    let root = root_contested_by(&[("a", &["05"])]).await;
    let store = root.open();
    store.release(&"a".into()).await.unwrap();
    stop(&store).await;
    std::fs::write(root.checkpoint(), kubelet_file(&[("a", &["06"])])).unwrap();
    let store = root.open();
    assert_eq!(devices(&store, "a"), ["05", "06"], "both files have it");

    store.forget().await.unwrap();
    assert_eq!(devices(&store, "a"), ["06"]);
    assert_eq!(store.forget().await.unwrap(), ["a".into()]);
    assert_eq!(uids(&store), [""; 0]);
}

#[tokio::test]
async fn the_second_of_two_decisions_about_a_file_is_refused() {
    for is_import_first in [false, true] {
        let root = root_contested_by(&[("c", &["05"])]).await;
        let disk = Disk::default();
        let store = root.open_on(disk.storage());
        let reason = contests(&store).remove(0);
        let file = std::fs::read(reason.file()).unwrap();
        disk.hold_syncs();
        let mut import = pin!(store.import(&file));
        let mut forget = pin!(store.forget_reason(&reason));
        if is_import_first {
            assert!(start(&mut import).is_pending());
        }
        assert!(start(&mut forget).is_pending());
        assert!(start(&mut import).is_pending());
        disk.release_syncs();
        let (imported, forgotten) = tokio::join!(import, forget);

        let file = reason.file().to_owned();
        let left = if is_import_first {
            imported.unwrap();
            assert_eq!(forgotten, Err(ForgetFileError::Settled { file }));
            "c"
        } else {
            assert_eq!(forgotten, Ok(vec!["c".into()]));
            assert_eq!(imported, Err(ImportError::Settled { file }));
            "a"
        };
        assert_eq!(uids(&store), [left]);
        store.stop().await.unwrap();
        let store = root.open();
        assert_eq!(
            (uids(&store), contests(&store)),
            (vec![left.to_owned()], Vec::new())
        );
    }
}

#[tokio::test]
async fn a_decision_that_cannot_be_written_leaves_the_contest_to_the_next_one() {
    let root = root_contested_by(&[("c", &["05"])]).await;
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    disk.fail_syncs(Some(ErrorKind::Other));
    store.forget().await.unwrap_err();
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    let file = kubelet_file(&[("c", &["05"])]);
    store.import(file.as_bytes()).await.unwrap();
    assert_eq!(uids(&store), ["c"]);
}

fn with_outside(root: &Root, outside: &Path) -> OpenOptions {
    OpenOptions {
        node_id: Some(outside.to_owned()),
        ..root.options()
    }
}

#[tokio::test]
async fn a_lost_database_blocks_the_node_and_the_mirror_is_imported() {
    for how in [
        "removed",
        "with its mirror",
        "with node-id",
        "with its directory",
        "saved",
        "unreadable",
        "archive",
        "dangling link",
    ] {
        let root = Root::new();
        let elsewhere = tempfile::tempdir().unwrap();
        let outside = elsewhere.path().join(".devlet-node-id");
        let options = with_outside(&root, &outside);
        let (store, _) = Store::open(options.clone()).unwrap();
        offer(&store, GPU, 8);
        admit(&store, "a", 1).await.unwrap();
        store.stop().await.unwrap();
        let inside = root.path().join("node-id");
        std::fs::rename(root.database(), elsewhere.path().join("state.redb")).unwrap();
        let remove = |paths: &[&Path]| paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        match how {
            "removed" => {}
            "with its mirror" => remove(&[&root.checkpoint()]),
            "with node-id" => remove(&[&inside]),
            "with its directory" => remove(&[&inside, &root.checkpoint()]),
            "saved" => {
                remove(&[&inside, &outside]);
                std::fs::write(root.path().join("state.redb.saved-20260101T000000.000Z"), "").unwrap();
            }
            "unreadable" => {
                remove(&[&inside, &outside]);
                std::fs::write(root.path().join("state.redb.unreadable-20260101T000000.000Z"), "").unwrap();
            }
            "archive" => {
                remove(&[&inside, &outside]);
                std::fs::create_dir(root.path().join("archive")).unwrap();
            }
            other => make(other, &root.database()),
        }

        let (store, report) = Store::open(options.clone()).unwrap();

        let Some(Blocked::LostDatabase { file, reason, .. }) = &report.blocked else {
            panic!("{how}: {report:?}");
        };
        let expected = root.database().display().to_string();
        assert!(file.starts_with(&expected), "{how}: {file}");
        assert_eq!(how == "saved", reason.contains("may be it"), "{how}: {reason}");
        let has_mirror = !["with its mirror", "with its directory"].contains(&how);
        assert_eq!(uids(&store).len(), usize::from(has_mirror), "{how}");
        offer(&store, GPU, 8);
        assert!(refuses(&store), "{how}");
        stop(&store).await;
        // The node stays blocked until an operator decides, or the database is back.
        let (store, report) = Store::open(options.clone()).unwrap();
        assert!(report.blocked.is_some(), "{how}");
        if how == "removed" {
            offer(&store, GPU, 8);
            store.forget().await.unwrap();
            admit(&store, "b", 1).await.unwrap();
            assert_eq!(devices(&store, "b"), ["01"]);
        }
        stop(&store).await;
        if !["saved", "unreadable", "archive"].contains(&how) {
            std::fs::rename(elsewhere.path().join("state.redb"), root.database()).unwrap();
            let (store, report) = Store::open(options).unwrap();
            if how == "removed" {
                // Since the decision, the database is an older copy. The mirror has the pods that were admitted since.
                assert!(matches!(report.blocked, Some(Blocked::LostDatabase { .. })));
                assert_eq!(uids(&store), ["a", "b"]);
            } else {
                assert_eq!(report.blocked, None, "{how}");
                assert_eq!(uids(&store), ["a"], "{how}");
            }
        }
    }
}

#[tokio::test]
async fn a_database_of_another_node_is_quarantined_and_blocks_the_node() {
    let (root, other) = (root_with_a_pod().await, Root::new());
    let store = other.open();
    offer(&store, GPU, 8);
    admit(&store, "theirs", 1).await.unwrap();
    store.stop().await.unwrap();
    std::fs::copy(other.database(), root.database()).unwrap();

    let (store, report) = root.open_with_report();

    assert!(
        matches!(report.blocked, Some(Blocked::LostDatabase { .. })),
        "{report:?}"
    );
    assert_eq!(asides(&root).len(), 1);
    assert_eq!(uids(&store), ["a"], "as in the mirror");
}

/// Copies the database and the id files.
struct Copies(BTreeMap<PathBuf, Vec<u8>>);

impl Copies {
    fn of(paths: &[&Path]) -> Self {
        let read = |path: &&Path| (path.to_path_buf(), std::fs::read(path).unwrap());
        Self(paths.iter().map(read).collect())
    }

    fn put(&self, path: &Path) {
        std::fs::write(path, &self.0[path]).unwrap();
    }
}

#[tokio::test]
async fn an_older_copy_of_the_database_is_lost() {
    for (how, copied_in_last_run) in [
        ("clean stop", false),
        ("clean stop", true),
        ("kill", false),
        ("one id file is gone", false),
        ("the directory is from a backup", false),
    ] {
        let elsewhere = tempfile::tempdir().unwrap();
        let (root, outside) = (Root::new(), elsewhere.path().join(".devlet-node-id"));
        let options = with_outside(&root, &outside);
        let (inside, database, mirror) = (root.path().join("node-id"), root.database(), root.checkpoint());
        let all: [&Path; 4] = [&database, &mirror, &inside, &outside];
        let (mut store, _) = Store::open(options.clone()).unwrap();
        offer(&store, GPU, 8);
        admit(&store, "a", 1).await.unwrap();
        store.mirror().await.unwrap();
        if !copied_in_last_run {
            store.stop().await.unwrap();
        }
        let older = Copies::of(&all);
        if !copied_in_last_run {
            let (again, report) = Store::open(options.clone()).unwrap();
            assert_eq!(report.blocked, None, "{how}");
            offer(&again, GPU, 8);
            store = again;
        }
        admit(&store, "b", 1).await.unwrap();
        let killed = Copies::of(&all);
        store.stop().await.unwrap();
        match how {
            "kill" => all.iter().for_each(|path| killed.put(path)),
            "one id file is gone" => std::fs::remove_file(&outside).unwrap(),
            _ => {}
        }
        let newest = Copies::of(&[&database, &mirror]);
        older.put(&database);
        older.put(&mirror);
        if how == "the directory is from a backup" {
            older.put(&inside);
        }

        let (store, report) = Store::open(options.clone()).unwrap();

        let Some(Blocked::LostDatabase { reason, .. }) = &report.blocked else {
            panic!("{how}: {report:?}");
        };
        assert!(reason.contains("older copy"), "{how}: {reason}");
        assert_eq!(uids(&store), ["a"], "{how}: as in the mirror");
        offer(&store, GPU, 8);
        assert!(refuses(&store), "{how}");
        store.stop().await.unwrap();
        // The operator finds the newest database.
        newest.put(&database);
        newest.put(&mirror);
        let (store, report) = Store::open(options).unwrap();
        assert_eq!(report.blocked, None, "{how}");
        assert_eq!(uids(&store), ["a", "b"], "{how}");
    }
}

#[tokio::test]
async fn a_pod_that_a_contested_file_is_about_is_not_answered_until_an_operator_decides() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "old", 1).await.unwrap();
    store.mirror().await.unwrap();
    let old = std::fs::read(root.checkpoint()).unwrap();
    store.release(&"old".into()).await.unwrap();
    admit(&store, "new", 1).await.unwrap();
    admit(&store, "other", 1).await.unwrap();
    store.stop().await.unwrap();
    std::fs::write(root.checkpoint(), &old).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(contested(&report), old);
    offer(&store, GPU, 8);
    // Both hold device 00 now.
    for uid in ["old", "new"] {
        let held = store.hold(&request(uid, 1), &Preferences::new());
        assert!(
            matches!(held, Err(HoldError::Refused(ReserveError::Blocked(_)))),
            "{uid}: {held:?}"
        );
        assert!(store.read(|node| node.contested_by(&uid.into()).is_some()));
    }
    assert!(
        store
            .hold(&request("other", 1), &Preferences::new())
            .unwrap()
            .is_none()
    );
    assert_eq!(store.forget().await.unwrap(), ["old".into()]);
    assert!(
        store
            .hold(&request("new", 1), &Preferences::new())
            .unwrap()
            .is_none()
    );
}

#[tokio::test]
async fn a_file_that_gives_a_held_device_to_a_second_pod_is_contested() {
    let root = root_with_a_pod().await;
    let file = kubelet_file(&[("a", &["00"]), ("k", &["00", "01"])]);
    std::fs::write(root.checkpoint(), &file).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(contested(&report), file.as_bytes());
    assert_eq!(
        report.contested[0].difference,
        "it also gives acme.com/gpu 00 of pod default/a (a) to pod k, and it has pod k that is not on record"
    );
    assert_eq!(store.forget().await.unwrap(), ["k".into()]);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_lost_database_and_an_unusable_file_block_the_node_side_by_side() {
    let root = root_with_a_pod().await;
    let database = std::fs::read(root.database()).unwrap();
    let ids = std::fs::read(root.path().join("node-id")).unwrap();
    std::fs::remove_file(root.database()).unwrap();
    std::fs::hard_link(root.checkpoint(), root.path().join("second")).unwrap();

    let (store, report) = root.open_with_report();

    let reasons = store.read(|node| node.blocked_by().to_vec());
    let [
        Blocked::LostDatabase { .. },
        Blocked::UnreadableState { reason, .. },
    ] = &reasons[..]
    else {
        panic!("{reasons:?}");
    };
    assert!(reason.contains("hard links"), "{reason}");
    assert_eq!(report.quarantined.len(), 1);
    let file = kubelet_file(&[("k", &["05"])]);
    store.import(file.as_bytes()).await.unwrap();
    let reasons = store.read(|node| node.blocked_by().to_vec());
    let [Blocked::LostDatabase { files, .. }] = &reasons[..] else {
        panic!("{reasons:?}");
    };
    assert_eq!(files, "dra_manager_state");
    offer(&store, GPU, 8);
    assert!(refuses(&store));
    stop(&store).await;
    // Nothing changes at another start. The id files were left alone, so the database can be put back.
    let (store, _) = root.open_with_report();
    assert_eq!(store.read(|node| node.blocked_by().to_vec()), reasons);
    stop(&store).await;
    assert_eq!(std::fs::read(root.path().join("node-id")).unwrap(), ids);
    std::fs::write(root.database(), database).unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_database_with_one_wrong_id_file_starts_after_that_file_is_removed() {
    let elsewhere = tempfile::tempdir().unwrap();
    let (root, outside) = (Root::new(), elsewhere.path().join(".devlet-node-id"));
    let options = with_outside(&root, &outside);
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    std::fs::write(&outside, "5e0cd6ab-0000-4000-8000-000000000000\nstarts 1\n").unwrap();
    // Blocked, and again after another start.
    for _ in 0..2 {
        let (store, report) = Store::open(options.clone()).unwrap();
        let Some(Blocked::LostDatabase { reason, .. }) = &report.blocked else {
            panic!("{report:?}");
        };
        assert!(reason.contains(&outside.display().to_string()), "{reason}");
        stop(&store).await;
    }
    let asides = asides(&root);
    assert_eq!(asides.len(), 1, "{asides:?}");
    std::fs::rename(root.path().join(&asides[0]), root.database()).unwrap();
    std::fs::remove_file(&outside).unwrap();

    let (store, report) = Store::open(options).unwrap();

    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_database_replaced_while_devlet_ran_is_lost_at_the_next_start() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    let copy = root.path().join("copy");
    std::fs::copy(root.database(), &copy).unwrap();
    admit(&store, "a", 1).await.unwrap();
    std::fs::rename(&copy, root.database()).unwrap();
    store.stop().await.unwrap_err();
    let is_saved = |name: &String| name.contains(".saved-");
    let saved = root.names().into_iter().find(is_saved).unwrap();

    let (store, report) = root.open_with_report();

    assert!(
        matches!(report.blocked, Some(Blocked::LostDatabase { .. })),
        "{report:?}"
    );
    stop(&store).await;
    std::fs::rename(root.path().join(saved), root.database()).unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a"]);
}

/// Returns a copy of a root, as a kill at this moment would leave it.
fn after_a_kill(root: &Root) -> Root {
    let after = Root::new();
    for name in root.names() {
        match std::fs::copy(root.path().join(&name), after.path().join(&name)) {
            // The running store has removed a temporary file.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            copied => _ = copied.unwrap(),
        }
    }
    after
}

#[tokio::test]
async fn a_replaced_database_that_was_noticed_is_lost_even_after_a_kill() {
    for how in [
        "replaced",
        "removed, then replaced",
        "replaced after a failed write",
    ] {
        let (root, disk) = (Root::new(), Disk::default());
        let store = root.open_on(disk.storage());
        offer(&store, GPU, 8);
        admit(&store, "a", 1).await.unwrap();
        let copy = root.path().join("copy");
        std::fs::copy(root.database(), &copy).unwrap();
        admit(&store, "b", 1).await.unwrap();
        match how {
            "removed, then replaced" => {
                // It cannot be created again.
                disk.fail_writes(Some(ErrorKind::StorageFull));
                std::fs::remove_file(root.database()).unwrap();
                admit(&store, "c", 1).await.unwrap_err();
                let is_noticed = || {
                    let id = std::fs::read_to_string(root.path().join("node-id"));
                    id.unwrap().contains("starts 2")
                };
                wait_until("the loss is recorded", is_noticed).await;
                std::fs::rename(&copy, root.database()).unwrap();
            }
            "replaced after a failed write" => {
                disk.fail_syncs(Some(ErrorKind::Other));
                admit(&store, "c", 1).await.unwrap_err();
                std::fs::rename(&copy, root.database()).unwrap();
                let is_refused = || {
                    let health = store.health();
                    health.is_err_and(|error| error.to_string().contains("another file"))
                };
                wait_until("writes are refused", is_refused).await;
            }
            _ => {
                std::fs::rename(&copy, root.database()).unwrap();
                admit(&store, "c", 1).await.unwrap_err();
            }
        }

        let after = after_a_kill(&root);
        let (killed, report) = after.open_with_report();

        let Some(Blocked::LostDatabase { reason, .. }) = &report.blocked else {
            panic!("{how}: {report:?}");
        };
        assert!(reason.contains("older copy"), "{how}: {reason}");
        offer(&killed, GPU, 8);
        assert!(refuses(&killed), "{how}");
        // The store continues once the file is gone, and leaves the latest database.
        disk.fail_writes(None);
        disk.fail_syncs(None);
        std::fs::remove_file(root.database()).unwrap();
        wait_until_healthy(&store).await;
        admit(&store, "d", 1).await.unwrap();
        let (killed, report) = after_a_kill(&root).open_with_report();
        assert_eq!(report.blocked, None, "{how}");
        assert_eq!(uids(&killed), ["a", "b", "d"], "{how}");
        store.stop().await.unwrap();
        let (store, report) = root.open_with_report();
        assert_eq!(report.blocked, None, "{how}");
        assert_eq!(uids(&store), ["a", "b", "d"], "{how}");
    }
}

#[tokio::test]
async fn an_id_file_that_cannot_be_written_is_a_problem_and_an_older_copy_is_still_recognised() {
    let elsewhere = tempfile::tempdir().unwrap();
    let root = Root::new();
    // In a directory that is lost later.
    let outside = elsewhere.path().join("gone/.devlet-node-id");
    std::fs::create_dir(outside.parent().unwrap()).unwrap();
    let options = with_outside(&root, &outside);
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    let older = Copies::of(&[&root.database(), &root.checkpoint()]);
    std::fs::remove_dir_all(outside.parent().unwrap()).unwrap();

    let (store, report) = Store::open(options.clone()).unwrap();

    assert_eq!(report.blocked, None);
    let failure = store.id_failure().unwrap();
    assert!(failure.contains(&outside.display().to_string()), "{failure}");
    assert_eq!(store.health(), Ok(()), "the other file is written");
    offer(&store, GPU, 8);
    admit(&store, "b", 1).await.unwrap();
    store.stop().await.unwrap();
    older.put(&root.database());
    older.put(&root.checkpoint());
    let (_store, report) = Store::open(options).unwrap();
    assert!(
        matches!(report.blocked, Some(Blocked::LostDatabase { .. })),
        "{report:?}"
    );
}

#[tokio::test]
async fn no_pod_is_admitted_while_no_id_file_can_be_written() {
    // The database is behind a link, so that it can be written while the directories of both id files are gone.
    let (root, elsewhere) = (Root::new(), tempfile::tempdir().unwrap());
    let directories = ["own", "outside"].map(|name| elsewhere.path().join(name));
    directories
        .iter()
        .for_each(|path| std::fs::create_dir(path).unwrap());
    let [own, outside] = &directories;
    let link = own.join("state.redb");
    let options = OpenOptions {
        database: link.clone(),
        ..with_outside(&root, &outside.join(".devlet-node-id"))
    };
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    std::fs::rename(&link, root.database()).unwrap();
    std::os::unix::fs::symlink(root.database(), &link).unwrap();
    let gone = directories.clone();
    let storage = Storage::new(move |file| {
        // After the id files were read, before they are written.
        gone.iter().for_each(|path| drop(std::fs::remove_dir_all(path)));
        Box::new(file)
    });

    let (store, report) = Store::open(OpenOptions { storage, ..options }).unwrap();

    assert_eq!(report.blocked, None);
    offer(&store, GPU, 8);
    let refused = store.hold(&request("b", 1), &Preferences::new()).unwrap_err();
    assert!(matches!(refused, HoldError::Write(_)), "{refused}");
    assert!(refused.to_string().contains("node-id"), "{refused}");
    directories
        .iter()
        .for_each(|path| std::fs::create_dir(path).unwrap());
    wait_until_healthy(&store).await;
    admit(&store, "b", 1).await.unwrap();
    for path in [own.join("node-id"), outside.join(".devlet-node-id")] {
        assert!(std::fs::read_to_string(path).unwrap().contains("starts 2"));
    }
}

#[tokio::test]
async fn an_id_file_that_cannot_be_replaced_is_overwritten() {
    let (root, elsewhere) = (Root::new(), tempfile::tempdir().unwrap());
    let outside = elsewhere.path().join(LONG_NAME);
    let options = with_outside(&root, &outside);
    Store::open(options.clone()).unwrap().0.stop().await.unwrap();
    let obstacle = obstruct(&outside);

    // A start makes the content shorter, a stop longer.
    for start in 2..4 {
        let (store, report) = Store::open(options.clone()).unwrap();
        assert_eq!(report.blocked, None);
        let starts = format!("starts {start}\n");
        assert!(std::fs::read_to_string(&outside).unwrap().contains(&starts));
        assert_eq!(store.id_failure(), None);
        store.stop().await.unwrap();
        let [inside, outside] =
            [&root.path().join("node-id"), &outside].map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(inside.trim_end(), outside.trim_end());
    }
    assert!(obstacle.exists());
}

#[tokio::test]
async fn a_crash_before_the_id_files_are_written_does_not_make_an_older_copy() {
    let elsewhere = tempfile::tempdir().unwrap();
    let (root, outside) = (Root::new(), elsewhere.path().join(".devlet-node-id"));
    let options = with_outside(&root, &outside);
    let (inside, database) = (root.path().join("node-id"), root.database());
    let all: [&Path; 3] = [&database, &inside, &outside];
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    let mut states = vec![Copies::of(&all)];
    store.stop().await.unwrap();
    states.push(Copies::of(&all));
    let (store, _) = Store::open(options.clone()).unwrap();
    states.push(Copies::of(&all));
    store.stop().await.unwrap();
    states.push(Copies::of(&all));
    for [before, after] in states.array_windows() {
        // The database is written first, then one file after the other.
        for files in [&[][..], &[&outside], &[&inside]] {
            all.iter().for_each(|path| before.put(path));
            after.put(&database);
            files.iter().for_each(|path| after.put(path));

            let (store, report) = Store::open(options.clone()).unwrap();

            assert_eq!(report.blocked, None, "{files:?}");
            assert_eq!(uids(&store), ["a"], "{files:?}");
            store.stop().await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_id_files_are_never_ahead_of_a_disk_that_refuses_writes() {
    let root = root_with_a_pod().await;
    let inside = root.path().join("node-id");
    let before = std::fs::read(&inside).unwrap();
    let disk = Disk::default();
    let loaded = root.database_file(disk.storage()).open().unwrap();
    let opened = disk.syncs();
    drop(loaded);
    let disk = Disk::default();
    // Opening succeeds; the first write does not.
    disk.fail_syncs_after(opened);
    let options = OpenOptions {
        storage: disk.storage(),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    assert!(store.health().is_err());
    assert_eq!(std::fs::read(&inside).unwrap(), before);

    disk.fail_syncs(None);
    wait_until_healthy(&store).await;

    assert_ne!(std::fs::read(&inside).unwrap(), before);
    store.stop().await.unwrap();
    assert_eq!(root.open_with_report().1.blocked, None);
}

#[tokio::test]
async fn a_crash_while_the_node_id_is_created_does_not_lose_the_database() {
    let elsewhere = tempfile::tempdir().unwrap();
    let (root, outside) = (Root::new(), elsewhere.path().join(".devlet-node-id"));
    let options = with_outside(&root, &outside);
    let inside = root.path().join("node-id");
    // A database that could not be created leaves no trace.
    let disk = Disk::default();
    disk.fail_writes(Some(ErrorKind::StorageFull));
    let full = OpenOptions {
        storage: disk.storage(),
        ..options.clone()
    };
    Store::open(full).unwrap_err();
    assert!(!inside.exists() && !outside.exists());
    let (store, report) = Store::open(options.clone()).unwrap();
    assert_eq!(report.blocked, None);
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    let id = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().next().unwrap().to_owned()
    };
    let first = id(&inside);
    // A crash leaves the database alone, or one of the files as well.
    for missing in [vec![&inside, &outside], vec![&inside], vec![&outside]] {
        missing
            .iter()
            .for_each(|path| std::fs::remove_file(path).unwrap());
        let (store, report) = Store::open(options.clone()).unwrap();
        assert_eq!(report.blocked, None);
        assert_eq!(uids(&store), ["a"]);
        for path in [&inside, &outside] {
            assert_eq!(id(path), first);
        }
        store.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_file_that_another_user_controls_is_quarantined_and_never_adopted() {
    use std::os::unix::fs::PermissionsExt as _;
    let is_root = rustix::process::geteuid().is_root();
    for how in [
        "group",
        "others",
        "two names",
        "too large",
        "named pipe",
        "directory",
        "link to a device",
        "dangling link",
        "owner",
    ] {
        if how == "owner" && !is_root {
            eprintln!("skipped: only root can give a file to another user");
            continue;
        }
        let root = root_with_a_pod().await;
        let file = root.checkpoint();
        let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::remove_file(&file).unwrap();
        if !NOT_FILES.contains(&how) {
            std::fs::write(&file, kubelet_file(&[("a", &["00"]), ("k", &["01"])])).unwrap();
        }
        match how {
            "group" => mode(0o620),
            "others" => mode(0o602),
            "two names" => std::fs::hard_link(&file, root.path().join("second")).unwrap(),
            "too large" => {
                let file = std::fs::File::options().write(true).open(&file).unwrap();
                file.set_len(300 << 20).unwrap();
            }
            "owner" => std::os::unix::fs::chown(&file, Some(12345), None).unwrap(),
            other => make(other, &file),
        }

        let (store, report) = root.open_with_report();

        assert_eq!(uids(&store), ["a"], "{how}");
        let [aside] = &report.quarantined[..] else {
            panic!("{how}: {report:?}");
        };
        assert!(aside.kept.symlink_metadata().is_ok(), "{how}");
        // A kubelet may have written it, unless it is not a regular file or belongs to another user.
        let may_be_state = ["group", "others", "two names", "too large"].contains(&how);
        assert_eq!(report.blocked.is_some(), may_be_state, "{how}: {report:?}");
        if may_be_state {
            offer(&store, GPU, 8);
            assert!(refuses(&store), "{how}");
            store.forget().await.unwrap();
        }
        store.stop().await.unwrap();
        assert!(file.is_file(), "{how}: the mirror is back");
    }
}

#[tokio::test]
async fn a_database_or_id_that_another_user_controls_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    for name in ["state.redb", "node-id"] {
        let root = root_with_a_pod().await;
        let path = root.path().join(name);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        let refused = Store::open(root.options()).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("chmod go-w {}", path.display())),
            "{refused}"
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(uids(&root.open()), ["a"]);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            let refused = Store::open(root.options()).unwrap_err().to_string();
            assert!(
                refused.contains(&format!("chown 0 {}", path.display())),
                "{refused}"
            );
        } else {
            eprintln!("skipped: only root can give a file to another user");
        }
    }
}

#[tokio::test]
async fn a_non_regular_file_in_the_place_of_the_database_or_its_id_is_quarantined() {
    for kind in NOT_FILES {
        let root = root_with_a_pod().await;
        std::fs::remove_file(root.database()).unwrap();
        make(kind, &root.database());
        let (store, report) = root.open_with_report();
        assert!(
            matches!(report.blocked, Some(Blocked::LostDatabase { .. })),
            "{kind}: {report:?}"
        );
        assert_eq!(uids(&store), ["a"], "{kind}: as in the mirror");
        assert!(report.quarantined[0].kept.symlink_metadata().is_ok(), "{kind}");
        drop(store);

        let root = root_with_a_pod().await;
        std::fs::remove_file(root.path().join("node-id")).unwrap();
        make(kind, &root.path().join("node-id"));
        let (store, report) = root.open_with_report();
        assert_eq!(report.blocked, None, "{kind}");
        assert_eq!(report.quarantined.len(), 1, "{kind}");
        assert_eq!(uids(&store), ["a"], "{kind}");
    }
}

#[tokio::test]
async fn a_database_behind_a_link_stays_behind_it() {
    let root = root_with_a_pod().await;
    let disk = tempfile::tempdir().unwrap();
    let target = disk.path().join("state.redb");
    std::fs::rename(root.database(), &target).unwrap();
    std::os::unix::fs::symlink(&target, root.database()).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(report.blocked, None);
    offer(&store, GPU, 8);
    std::fs::remove_file(&target).unwrap();
    admit(&store, "b", 1).await.unwrap();
    store.stop().await.unwrap();
    assert!(root.database().is_symlink() && target.is_file());
    assert_eq!(uids(&root.open()), ["a", "b"]);
}

#[tokio::test]
async fn a_database_behind_a_link_into_a_directory_of_another_user_is_rejected() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let root = root_with_a_pod().await;
    let (disk, between) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (target, hop) = (disk.path().join("state.redb"), between.path().join("hop"));
    std::fs::rename(root.database(), &target).unwrap();
    symlink(&target, &hop).unwrap();
    symlink(&hop, root.database()).unwrap();
    let allow = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for open in [disk.path(), between.path()] {
        for mode in [0o777, 0o1777] {
            allow(open, mode);
            let refused = Store::open(root.options()).unwrap_err().to_string();
            let remedy = format!("chmod go-w {}", open.display());
            assert!(refused.contains(&remedy), "{refused}");
        }
        allow(open, 0o755);
    }
    assert_eq!(uids(&root.open()), ["a"]);
}

#[tokio::test]
async fn a_saved_copy_is_named_whenever_the_database_is_unusable() {
    for (name, expected) in [
        ("state.redb.saved-20260101T000000.000Z", "may be it"),
        ("state.redb.unreadable-20260101T000000.000Z", "set"),
    ] {
        for how in ["missing", "directory", "damaged", "older copy", "behind a link"] {
            let root = root_with_a_pod().await;
            let older = std::fs::read(root.database()).unwrap();
            let (store, disk) = (root.open(), Root::new());
            store.stop().await.unwrap();
            std::fs::remove_file(root.database()).unwrap();
            let mut copy = root.path().join(name);
            match how {
                "missing" => {}
                "damaged" => std::fs::write(root.database(), "broken").unwrap(),
                "older copy" => std::fs::write(root.database(), &older).unwrap(),
                "behind a link" => {
                    std::os::unix::fs::symlink(disk.database(), root.database()).unwrap();
                    copy = disk.path().join(name);
                }
                other => make(other, &root.database()),
            }
            std::fs::write(&copy, "").unwrap();
            // A directory is not a database.
            std::fs::create_dir(root.path().join("state.redb.saved-20270101T000000.000Z")).unwrap();

            let (_store, report) = root.open_with_report();

            let Some(Blocked::LostDatabase { reason, .. }) = &report.blocked else {
                panic!("{how}: {report:?}");
            };
            let copy = copy.display().to_string();
            assert!(
                reason.contains(&copy) && reason.contains(expected),
                "{how}: {reason}"
            );
        }
    }
}

#[tokio::test]
async fn a_database_without_an_id_beside_id_files_is_lost() {
    let root = root_with_a_pod().await;
    let id = std::fs::read(root.path().join("node-id")).unwrap();
    let rows = [Row::BootId("boot-1".into())];
    drop(root.database_file(Storage::default()).create(&rows).unwrap());

    let (store, report) = root.open_with_report();

    let Some(Blocked::LostDatabase { reason, .. }) = &report.blocked else {
        panic!("{report:?}");
    };
    assert!(reason.contains("does not have a node id"), "{reason}");
    assert_eq!(uids(&store), ["a"], "as in the mirror");
    assert_eq!(std::fs::read(root.path().join("node-id")).unwrap(), id);
    stop(&store).await;
    // A database from before id files, without such files beside it.
    let root = Root::new();
    drop(root.database_file(Storage::default()).create(&rows).unwrap());
    let (_store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(report.found, Found::Database);
}

#[tokio::test]
async fn an_unreadable_file_beside_a_readable_database_blocks_until_an_operator_decides() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "broken").unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(uids(&store), ["a"]);
    assert_eq!(report.quarantined.len(), 1);
    assert_eq!(asides(&root).len(), 1);
    // A kubelet may have written it, and given more devices.
    assert!(
        matches!(report.blocked, Some(Blocked::UnreadableState { .. })),
        "{report:?}"
    );
    store.forget().await.unwrap();
    store.mirror().await.unwrap();
    assert!(root.checkpoint().exists());
    store.stop().await.unwrap();
    // A second name of a mirror has nothing new.
    std::fs::hard_link(root.checkpoint(), root.path().join("second")).unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn each_unreadable_file_needs_its_own_decision() {
    let root = root_with_a_pod().await;
    let mut kept = Vec::new();
    for content in ["half of a file", "half of another"] {
        std::fs::write(root.checkpoint(), content).unwrap();
        let (store, report) = root.open_with_report();
        kept.push(report.quarantined[0].kept.display().to_string());
        store.stop().await.unwrap_err();
    }
    let store = root.open();
    let open = |store: &Store| -> Vec<String> {
        let reasons = contests(store);
        reasons.iter().map(|reason| reason.file().to_owned()).collect()
    };
    assert_eq!(open(&store), kept);
    // It is unknown which of them a sound file replaces.
    store
        .import(kubelet_file(&[("b", &["01"])]).as_bytes())
        .await
        .unwrap();
    assert_eq!(open(&store), kept);
    store.forget_reason(&contests(&store)[1]).await.unwrap();
    assert_eq!(open(&store), kept[..1]);
    assert!(refuses(&store));
    drop(store);

    let killed = after_a_kill(&root);
    let store = killed.open();
    assert_eq!(open(&store), kept[..1]);
    store
        .import(kubelet_file(&[("c", &["02"])]).as_bytes())
        .await
        .unwrap();
    assert_eq!(open(&store), [""; 0]);
}

#[tokio::test]
async fn a_crash_before_an_unreadable_file_is_removed_does_not_block_twice() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "half of a file").unwrap();
    let (store, report) = root.open_with_report();
    store.stop().await.unwrap_err();
    std::fs::hard_link(&report.quarantined[0].kept, root.checkpoint()).unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(contests(&store).len(), 1);
    assert!(report.quarantined.is_empty(), "{report:?}");
    assert!(!root.checkpoint().exists());
}

#[tokio::test]
async fn an_adopted_file_does_not_end_the_block_by_an_unreadable_one() {
    let root = root_contested_by(&[("c", &["05"])]).await;
    let store = root.open();
    let contested = contests(&store).remove(0).file().to_owned();
    stop(&store).await;
    std::fs::write(root.checkpoint(), "half of a file").unwrap();
    let store = root.open();
    assert_eq!(contests(&store).len(), 2);

    let copy = std::fs::read(contested).unwrap();
    // The second time it adds nothing.
    for _ in 0..2 {
        store.import(&copy).await.unwrap();

        let [Blocked::UnreadableState { .. }] = &contests(&store)[..] else {
            panic!("{:?}", contests(&store));
        };
        assert!(refuses(&store));
    }
}

#[tokio::test]
async fn a_stop_fails_while_the_kubelets_file_lacks_what_is_on_record() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "half of a file").unwrap();
    let store = root.open();

    let stopped = store.mirror().await.unwrap_err();
    assert!(matches!(stopped, MirrorError::Blocked { .. }), "{stopped:?}");
    assert!(store.mirror_failure().is_some());
    let stopped = store.stop().await.unwrap_err();
    assert!(
        matches!(stopped, StopError::Mirror(MirrorError::Blocked { .. })),
        "{stopped:?}"
    );

    let store = root.open();
    store.forget().await.unwrap();
    store.stop().await.unwrap();
}

#[tokio::test]
async fn a_start_that_cannot_keep_a_copy_leaves_no_file_behind() {
    let root = Root::new();
    let options = OpenOptions {
        // The name of a copy is longer than names may be.
        checkpoint: Some(root.path().join(format!("{LONG_NAME}-x"))),
        ..root.options()
    };
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 1);
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    std::fs::write(options.checkpoint.as_ref().unwrap(), kubelet_file(&[])).unwrap();

    let refused = Store::open(options).unwrap_err();

    assert!(matches!(refused, OpenError::Archive { .. }), "{refused:?}");
    let archive = std::fs::read_dir(root.path().join("archive")).unwrap();
    assert_eq!(archive.count(), 0);
}

/// Damages the database so that it cannot be read.
fn damage(root: &Root, how: &str) {
    let path = root.database();
    let mut bytes = std::fs::read(&path).unwrap();
    match how {
        "empty" => bytes.clear(),
        "cut" => bytes.truncate(100),
        "log" => bytes.truncate(wal::LENGTH as usize),
        "text" => bytes = b"this is not a database".to_vec(),
        "ones" => bytes.iter_mut().skip(64).for_each(|byte| *byte = 0xff),
        "zeros" => bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0),
        other => panic!("{other}"),
    }
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn an_unreadable_database_is_quarantined_and_the_mirror_imported_but_no_new_pod_admitted() {
    for how in ["empty", "cut", "log", "text", "ones", "zeros"] {
        let root = root_with_a_pod().await;
        damage(&root, how);
        let damaged = std::fs::read(root.database()).unwrap();

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::KubeletFile, "{how}: {report:?}");
        let [aside] = &report.quarantined[..] else {
            panic!("{report:?}");
        };
        assert_eq!(std::fs::read(&aside.kept).unwrap(), damaged, "{how}");
        // The mirror may lag behind the database.
        let file = aside.kept.display().to_string();
        let files = "both kubelet_internal_checkpoint and dra_manager_state".to_owned();
        assert_eq!(
            report.blocked,
            Some(Blocked::UnreadableDatabase { file, files }),
            "{how}"
        );
        assert_eq!(devices(&store, "a"), ["00"], "{how}");
    }
}

/// A file that records the reads before it was locked.
#[derive(Debug)]
struct Watched {
    file: FileBackend,
    /// Lengths of the reads before it was locked.
    unlocked: Arc<Mutex<Vec<usize>>>,
    is_locked: AtomicBool,
}

impl StorageBackend for Watched {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if !self.is_locked.load(Ordering::Relaxed) {
            self.unlocked.lock().unwrap().push(out.len());
        }
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.is_locked.store(true, Ordering::Relaxed);
        self.file.try_lock_range(start, end)
    }
}

#[tokio::test]
async fn the_log_is_not_read_while_another_process_may_write_it() {
    let root = root_with_a_pod().await;
    let unlocked: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut options = root.options();
    options.storage = Storage::new({
        let unlocked = Arc::clone(&unlocked);
        move |file| {
            Box::new(Watched {
                file,
                unlocked: Arc::clone(&unlocked),
                is_locked: AtomicBool::new(false),
            })
        }
    });
    let (store, _) = Store::open(options).unwrap();
    assert_eq!(devices(&store, "a"), ["00"]);
    let unlocked = unlocked.lock().unwrap();
    // The mark at the beginning, which never changes.
    assert!(unlocked.iter().all(|length| *length <= 512), "{unlocked:?}");
}

#[tokio::test]
async fn a_flipped_bit_in_a_pod_is_detected() {
    let root = root_with_a_pod().await;
    let mut bytes = std::fs::read(root.database()).unwrap();
    let needle = b"acme.com/gpu\x22\x0200";
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(|(_, window)| window == needle)
        .map(|(place, _)| place)
        .collect();
    assert!(!places.is_empty());
    for place in places {
        bytes[place + needle.len() - 1] = b'7';
    }
    std::fs::write(root.database(), bytes).unwrap();

    let (store, _) = root.open_with_report();

    assert_eq!(devices(&store, "a"), ["00"]);
}

#[tokio::test]
async fn an_unreadable_database_without_a_sound_file_blocks_the_node() {
    for file in [None, Some("broken")] {
        let root = root_with_a_pod().await;
        damage(&root, "ones");
        std::fs::remove_file(root.checkpoint()).unwrap();
        if let Some(file) = file {
            std::fs::write(root.checkpoint(), file).unwrap();
        }

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::Nothing);
        assert!(report.blocked.is_some(), "{file:?}");
        assert_eq!(report.quarantined.len(), 1 + usize::from(file.is_some()));
        stop(&store).await;
        assert!(root.open_with_report().1.blocked.is_some());
    }
}

#[tokio::test]
async fn a_file_that_holds_a_device_twice_is_imported_and_reported() {
    let root = Root::new();
    let file = kubelet_file(&[("a", &["00", "01"]), ("b", &["01"])]);
    std::fs::write(root.checkpoint(), file).unwrap();

    let (store, report) = root.open_with_report();

    let twice = |views: &[devlet_core::DeviceView]| {
        views
            .iter()
            .map(|view| (view.id.to_string(), view.holders.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(twice(&report.doubly_held), [("01".to_owned(), 2)]);
    assert_eq!(
        twice(&report.imported.unwrap().doubly_held),
        [("01".to_owned(), 2)]
    );
    offer(&store, GPU, 3);
    assert_eq!(free(&store), 1);
    store.release(&"a".into()).await.unwrap();
    assert_eq!(free(&store), 2);
    store.stop().await.unwrap();
    assert!(root.open_with_report().1.doubly_held.is_empty());
}

#[tokio::test]
async fn an_answer_that_does_not_decode_frees_nothing() {
    let root = Root::new();
    let file = testdata("deviceplugin/corrupt-allocresp-invalid-utf8.json");
    std::fs::write(root.checkpoint(), &file).unwrap();

    let (store, report) = root.open_with_report();

    let imported = report.imported.unwrap();
    assert_eq!(imported.undecodable.len(), 1);
    let pod = imported.undecodable[0].pod.to_string();
    assert!(!devices(&store, &pod).is_empty());
}

#[tokio::test]
async fn a_reboot_marks_pods() {
    let root = root_with_a_pod().await;
    let options = OpenOptions {
        boot_id: "boot-2".into(),
        ..root.options()
    };
    let (store, report) = Store::open(options).unwrap();
    let reboot = report.reboot.unwrap();
    assert_eq!((reboot.previous.as_str(), reboot.released.len()), ("boot-1", 0));
    assert_eq!(reboot.kept, ["a".into()]);
    assert!(pods(&store)[0].before_reboot);
    store.stop().await.unwrap();

    let options = OpenOptions {
        boot_id: "boot-2".into(),
        ..root.options()
    };
    let (store, report) = Store::open(options).unwrap();
    assert!(report.reboot.is_none());
    assert!(pods(&store)[0].before_reboot);
    // Admitted again, it is not from before the reboot.
    let request = request("a", 1);
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.commit(&request, Vec::new()).await.unwrap();
    assert!(!pods(&store)[0].before_reboot);
}

#[tokio::test]
async fn a_reboot_releases_pods_of_the_api_if_configured() {
    let root = root_with_a_pod().await;
    let store = root.open();
    let file = kubelet_file(&[("imported", &["05"])]);
    store.import(file.as_bytes()).await.unwrap();
    store.stop().await.unwrap();

    let options = OpenOptions {
        boot_id: "boot-2".into(),
        on_reboot: OnReboot::Release,
        ..root.options()
    };
    let (store, report) = Store::open(options.clone()).unwrap();

    let reboot = report.reboot.unwrap();
    assert_eq!(reboot.released, ["a".into()]);
    assert_eq!(reboot.kept, ["imported".into()]);
    assert_eq!(uids(&store), ["imported"]);
    store.stop().await.unwrap();
    assert_eq!(uids(&Store::open(options).unwrap().0), ["imported"]);
}

#[tokio::test]
async fn a_start_after_a_reboot_succeeds_while_writes_fail() {
    let root = root_with_a_pod().await;
    let disk = Disk::default();
    let file = root.database_file(disk.storage());
    let loaded = file.open().unwrap();
    // Writes of the opening succeed; the first one after it fails.
    let opened = disk.syncs();
    drop(loaded);
    let disk = Disk::default();
    disk.fail_syncs_after(opened);
    let options = OpenOptions {
        boot_id: "boot-2".into(),
        storage: disk.storage(),
        ..root.options()
    };

    let (store, report) = Store::open(options.clone()).unwrap();

    assert_eq!(report.reboot.unwrap().kept, ["a".into()]);
    assert!(pods(&store)[0].before_reboot);
    let refused = store.health().unwrap_err();
    offer(&store, GPU, 8);
    let hold = store.hold(&request("b", 1), &Preferences::new()).unwrap_err();
    assert_eq!(hold, HoldError::Write(refused));
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    admit(&store, "b", 1).await.unwrap();
    store.stop().await.unwrap();
    let (store, report) = Store::open(options).unwrap();
    assert!(report.reboot.is_none());
    let marks: Vec<bool> = pods(&store).iter().map(|pod| pod.before_reboot).collect();
    assert_eq!(marks, [true, false]);
}

#[tokio::test]
async fn a_database_in_use_is_left_alone() {
    let root = root_with_a_pod().await;
    let _store = root.open();

    let refused = Store::open(root.options()).unwrap_err();

    assert!(matches!(refused, OpenError::InUse { .. }), "{refused:?}");
    let text = format!("{} is in use by another process", root.database().display());
    assert_eq!(refused.to_string(), text);
    assert!(asides(&root).is_empty());
}

#[tokio::test]
async fn many_records_are_read_in_two_halves_and_an_invalid_one_is_detected_in_each() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 1);
    let like = admit(&store, "like", 1).await.unwrap();
    store.stop().await.unwrap();
    let file = root.database_file(Storage::default());
    for count in [1_000, 1_001, 2_000] {
        let pods: BTreeMap<PodUid, Pod> = (0..count)
            .map(|number| {
                let uid = PodUid::from(format!("{number:05}"));
                let fingerprint = number;
                (
                    uid.clone(),
                    Pod {
                        uid,
                        fingerprint,
                        ..like.clone()
                    },
                )
            })
            .collect();
        let rows: Vec<Row> = pods.values().map(Row::pod).collect();
        drop(file.create(&rows).unwrap());
        assert_eq!(file.open().unwrap().persisted.pods, pods);

        for wrong in [0, count / 2, count - 1] {
            let mut rows = rows.clone();
            let uid = PodUid::from(format!("{wrong:05}"));
            rows.push(Row::Pod(uid, Some(vec![0xff])));
            drop(file.create(&rows).unwrap());
            let refused = file.open().map(|_| ()).unwrap_err();
            assert!(
                matches!(refused, LoadError::Unreadable(_)),
                "{wrong}: {refused:?}"
            );
        }
    }
}

#[tokio::test]
async fn changes_that_are_only_in_the_log_count() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    let like = admit(&store, "like", 1).await.unwrap();
    store.stop().await.unwrap();
    let file = root.database_file(Storage::default());
    let claim = |uid: &str| {
        Claim::imported(
            ClaimKey {
                namespace: "a".into(),
                name: uid.into(),
            },
            uid.into(),
            PodUid::from(""),
            [("gpu.acme.com".into(), BTreeSet::new(), Vec::new())],
        )
    };
    let pod = |uid: &str, fingerprint| Pod {
        uid: uid.into(),
        fingerprint,
        ..like.clone()
    };
    let by = |kind| BlockedBy::File(PendingFile { kind, number: 1 });
    let blocked = |file: &str| BlockedRecord {
        file: file.into(),
        ..BlockedRecord::default()
    };
    let mirror = |number, forget| MirrorUpdate {
        number,
        hash: [7; 32],
        forget,
    };
    let resource = ResourceRecord::default();
    let before = [
        Row::BootId("before".into()),
        Row::pod(&pod("changed", 1)),
        Row::pod(&pod("gone", 1)),
        Row::claim(&claim("gone")),
        Row::Resource("acme.com/gone".into(), Some(resource.clone())),
        Row::Blocked(by(KubeletFile::Devices), Some(blocked("gone"))),
        Row::Mirror(KubeletFile::Claims, mirror(1, vec![])),
    ];
    let after = [
        Row::BootId("after".into()),
        Row::pod(&pod("changed", 2)),
        Row::Pod("gone".into(), None),
        Row::pod(&pod("new", 3)),
        Row::pod(&pod("passing", 3)),
        Row::Pod("passing".into(), None),
        Row::Claim("gone".into(), None),
        Row::claim(&claim("new")),
        Row::Resource("acme.com/gone".into(), None),
        Row::Resource("acme.com/new".into(), Some(resource)),
        Row::Blocked(by(KubeletFile::Devices), None),
        Row::Blocked(by(KubeletFile::Claims), Some(blocked("new"))),
        Row::Mirror(KubeletFile::Claims, mirror(2, vec![1])),
        Row::Mirror(KubeletFile::Devices, mirror(1, vec![])),
    ];
    let mut database = file.create(&before).unwrap();
    database.write(&after).unwrap();
    // As a crash leaves it: without a checkpoint.
    drop(database);

    let mut loaded = file.open().unwrap();

    assert!(loaded.repaired, "there was something in the log");
    let persisted = loaded.persisted;
    let pods: Vec<(&str, u64)> = persisted
        .pods
        .iter()
        .map(|(uid, pod)| (uid.as_str(), pod.fingerprint))
        .collect();
    assert_eq!(pods, [("changed", 2), ("new", 3)]);
    assert_eq!(persisted.claims, BTreeMap::from([("new".into(), claim("new"))]));
    assert_eq!(persisted.metadata.boot_id.as_deref(), Some("after"));
    assert_eq!(
        persisted.metadata.blocked,
        BTreeMap::from([(by(KubeletFile::Claims), blocked("new"))])
    );
    assert!(
        persisted
            .metadata
            .resources
            .keys()
            .map(|name| name.as_str())
            .eq(["acme.com/new"])
    );
    let mirrors = |file| {
        persisted
            .metadata
            .mirrors(file)
            .0
            .keys()
            .copied()
            .collect::<Vec<u64>>()
    };
    assert_eq!(
        [mirrors(KubeletFile::Claims), mirrors(KubeletFile::Devices)],
        [vec![2], vec![1]]
    );
    // The result is the same after a checkpoint.
    assert_eq!(loaded.database.snapshot().unwrap().load().unwrap(), persisted);
}
