//! Every row of the table in `open.rs`, and reboots.

use std::collections::BTreeSet;
use std::io;
use std::ops::Bound;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use devlet_core::dra::claims::{Claim, ClaimKey};
use devlet_core::{Blocked, PodUid};
use devlet_kubelet_files::Format;
use redb::{BackendError, StorageBackend};

use super::disk::Disk;
use super::*;
use crate::store::database::{KubeletFile, LoadError, Mirror, Row};
use crate::store::record::{BlockedRecord, ResourceRecord};
use crate::store::{Found, HoldError, OnReboot, OpenError};

const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kubelet-files/testdata");

fn testdata(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TESTDATA).join(name)).unwrap()
}

fn devices(store: &Store, uid: &str) -> Vec<String> {
    let pod = store.read(|node| node.pod(&uid.into()).cloned()).unwrap();
    let devices = pod.devices().into_values().flatten();
    devices.map(ToString::to_string).collect()
}

/// A root whose database has pod `a` with device 00, and whose mirror says so.
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
async fn nothing_there_is_a_fresh_start() {
    let root = Root::new();
    let (store, report) = root.open_with_report();
    assert_eq!(report.found, Found::Nothing);
    assert_eq!(report.blocked, None);
    assert!(report.set_aside.is_empty());
    assert_eq!(uids(&store), Vec::<String>::new());
    assert_eq!(root.names(), ["state.redb"]);
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
        // Before the first mirror is written, the file is known all the same.
        drop(store);
        let after = Root::new();
        std::fs::copy(root.database(), after.database()).unwrap();
        std::fs::copy(root.checkpoint(), after.checkpoint()).unwrap();
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

        let [aside] = &report.set_aside[..] else {
            panic!("{report:?}");
        };
        assert_eq!(aside.original, root.checkpoint());
        assert_eq!(std::fs::read(&aside.kept).unwrap(), file);
        assert!(!root.checkpoint().exists());
        assert!(!aside.reason.is_empty());
        let file = aside.kept.display().to_string();
        assert_eq!(report.blocked, Some(Blocked::UnreadableState { file }));
        let name = aside.kept.file_name().unwrap().to_str().unwrap();
        assert_eq!(
            name,
            "kubelet_internal_checkpoint.unreadable-20260921T141320.123Z"
        );
    }
}

#[tokio::test]
async fn what_is_set_aside_overwrites_nothing() {
    let root = root_with_a_pod().await;
    for number in 1..=3 {
        std::fs::write(root.checkpoint(), format!("broken {number}")).unwrap();
        let (store, report) = root.open_with_report();
        assert_eq!(report.set_aside.len(), 1);
        store.stop().await.unwrap();
    }
    let asides = asides(&root);
    let contents: Vec<_> = asides
        .iter()
        .map(|name| std::fs::read_to_string(root.path().join(name)).unwrap())
        .collect();
    assert_eq!(contents, ["broken 1", "broken 2", "broken 3"]);
}

#[tokio::test]
async fn a_crash_while_setting_aside_is_no_fresh_start() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "broken").unwrap();
    // The database cannot be made: its temporary name is taken by a directory with something in it.
    std::fs::create_dir_all(root.path().join("state.redb.new/x")).unwrap();
    let failed = Store::open(root.options()).unwrap_err();
    assert!(matches!(failed, OpenError::Disk { .. }), "{failed:?}");
    assert!(
        root.checkpoint().exists(),
        "it is kept under its name until the database knows of it"
    );
    std::fs::remove_dir_all(root.path().join("state.redb.new")).unwrap();

    let (_store, report) = root.open_with_report();

    assert!(report.blocked.is_some());
    assert_eq!(asides(&root).len(), 2);
}

#[tokio::test]
async fn a_database_is_right_when_the_file_is_absent_or_ours() {
    let root = root_with_a_pod().await;
    let (store, report) = root.open_with_report();
    assert_eq!(report.found, Found::Database);
    assert!(report.takeover.is_none() && report.set_aside.is_empty());
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
async fn a_kubelet_that_gives_a_device_again_in_the_words_of_an_older_mirror_is_believed() {
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

#[tokio::test]
async fn a_kubelet_that_takes_a_device_back_in_the_words_of_an_older_mirror_is_believed() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    store.mirror().await.unwrap();
    let empty = std::fs::read(root.checkpoint()).unwrap();
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();

    std::fs::write(root.checkpoint(), empty).unwrap();
    let (store, report) = root.open_with_report();

    let takeover = report.takeover.unwrap();
    assert_eq!(takeover.difference.removed, ["a".into()]);
    assert_eq!(uids(&store), Vec::<String>::new());
}

#[tokio::test]
async fn after_a_takeover_the_mirror_from_before_it_is_not_ours_any_longer() {
    let root = root_with_a_pod().await;
    let ours = std::fs::read(root.checkpoint()).unwrap();
    std::fs::write(root.checkpoint(), kubelet_file(&[("k", &["05"])])).unwrap();
    let (store, report) = root.open_with_report();
    assert!(report.takeover.is_some());
    drop(store);
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();

    std::fs::write(after.checkpoint(), ours).unwrap();
    let (store, report) = after.open_with_report();

    assert!(report.takeover.is_some());
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_file_that_a_kubelet_wrote_is_taken_over() {
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

    let (store, report) = root.open_with_report();

    let takeover = report.takeover.unwrap();
    assert_eq!(takeover.difference.added, ["new".into()]);
    assert_eq!(takeover.difference.removed, ["gone".into()]);
    assert_eq!(takeover.difference.changed, ["changed".into()]);
    assert_eq!(uids(&store), ["changed", "new", "same"]);
    assert_eq!(devices(&store, "changed"), ["07"]);
    assert_eq!(store.read(|node| node.pod(&"same".into()).cloned()), Some(same));
    let changed = store.read(|node| node.pod(&"changed".into()).cloned()).unwrap();
    assert_eq!(changed.name.name, "changed", "the file knows no names");
    assert!(changed.allocations[0].pre_start_required);
    let archive = std::fs::read_to_string(&takeover.archive).unwrap();
    let archive: serde_json::Value = serde_json::from_str(&archive).unwrap();
    assert_eq!(archive["pods"].as_array().unwrap().len(), 3);
    assert_eq!(
        takeover.archive,
        root.path().join("archive/20260921T141320.123Z.json")
    );

    // It lasts, and is known from now on.
    drop(store);
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();
    std::fs::copy(root.checkpoint(), after.checkpoint()).unwrap();
    let (store, report) = after.open_with_report();
    assert!(report.takeover.is_none());
    assert_eq!(uids(&store), ["changed", "new", "same"]);
}

#[tokio::test]
async fn a_readable_database_beats_an_unreadable_file() {
    let root = root_with_a_pod().await;
    std::fs::write(root.checkpoint(), "broken").unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(uids(&store), ["a"]);
    assert_eq!(report.set_aside.len(), 1);
    assert_eq!(report.blocked, None);
    assert_eq!(asides(&root).len(), 1);
    store.mirror().await.unwrap();
    assert!(root.checkpoint().exists());
}

/// Damages that no reader should survive.
fn damage(root: &Root, how: &str) {
    let path = root.database();
    let mut bytes = std::fs::read(&path).unwrap();
    match how {
        "empty" => bytes.clear(),
        "cut" => bytes.truncate(100),
        "journal" => bytes.truncate(journal::LENGTH as usize),
        "text" => bytes = b"this is no database".to_vec(),
        "ones" => bytes.iter_mut().skip(64).for_each(|byte| *byte = 0xff),
        "zeros" => bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0),
        other => panic!("{other}"),
    }
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn an_unreadable_database_is_set_aside_and_the_mirror_imported_but_nobody_new_is_admitted() {
    for how in ["empty", "cut", "journal", "text", "ones", "zeros"] {
        let root = root_with_a_pod().await;
        damage(&root, how);
        let damaged = std::fs::read(root.database()).unwrap();

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::KubeletFile, "{how}: {report:?}");
        let [aside] = &report.set_aside[..] else {
            panic!("{report:?}");
        };
        assert_eq!(std::fs::read(&aside.kept).unwrap(), damaged, "{how}");
        // The mirror may lag behind what was in the database.
        let file = aside.kept.display().to_string();
        assert_eq!(
            report.blocked,
            Some(Blocked::UnreadableDatabase { file }),
            "{how}"
        );
        assert_eq!(devices(&store, "a"), ["00"], "{how}");
    }
}

/// A file of which it is known what was read when it was locked.
#[derive(Debug)]
struct Watched {
    file: FileBackend,
    /// The reads before it was locked, by their lengths.
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
async fn a_journal_is_not_read_while_another_process_may_write_it() {
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
async fn a_flipped_bit_in_a_pod_is_not_believed() {
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
        assert_eq!(report.set_aside.len(), 1 + usize::from(file.is_some()));
        store.stop().await.unwrap();
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
    // Admitted again, it is a pod of today.
    let request = request("a", 1);
    let held = store.hold(&request, &Advice::new()).unwrap().unwrap();
    held.commit(&request, Vec::new()).await.unwrap();
    assert!(!pods(&store)[0].before_reboot);
}

#[tokio::test]
async fn a_reboot_releases_pods_of_our_api_if_told_so() {
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
async fn a_reboot_that_cannot_be_written_starts_all_the_same_and_is_written_later() {
    let root = root_with_a_pod().await;
    let disk = Disk::default();
    let place = root.place(disk.storage());
    let loaded = place.open().unwrap();
    // What opening costs is granted; the first write is not.
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
    let hold = store.hold(&request("b", 1), &Advice::new()).unwrap_err();
    assert_eq!(hold, HoldError::Write(refused));
    disk.fail_syncs(None);
    healed(&store).await;
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
async fn a_database_that_may_not_be_read_is_not_taken_for_a_broken_one() {
    let root = root_with_a_pod().await;
    std::fs::remove_file(root.database()).unwrap();
    std::fs::create_dir(root.database()).unwrap();

    let refused = Store::open(root.options()).unwrap_err();

    assert!(matches!(refused, OpenError::Disk { .. }), "{refused:?}");
}

#[tokio::test]
async fn many_records_are_read_from_both_ends_and_one_that_is_wrong_is_noticed_at_either() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 1);
    let like = admit(&store, "like", 1).await.unwrap();
    store.stop().await.unwrap();
    let place = root.place(Storage::default());
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
        drop(place.create(&rows).unwrap());
        assert_eq!(place.open().unwrap().contents.pods, pods);

        for wrong in [0, count / 2, count - 1] {
            let mut rows = rows.clone();
            let uid = PodUid::from(format!("{wrong:05}"));
            rows.push(Row::Pod(uid, Some(vec![0xff])));
            drop(place.create(&rows).unwrap());
            let refused = place.open().map(|_| ()).unwrap_err();
            assert!(
                matches!(refused, LoadError::Unreadable(_)),
                "{wrong}: {refused:?}"
            );
        }
    }
}

#[tokio::test]
async fn what_is_in_the_journal_alone_counts_as_if_it_were_in_the_database() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    let like = admit(&store, "like", 1).await.unwrap();
    store.stop().await.unwrap();
    let place = root.place(Storage::default());
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
    let blocked = |file: &str| BlockedRecord {
        file: file.into(),
        ..BlockedRecord::default()
    };
    let mirror = |number, forget| Mirror {
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
        Row::Blocked(KubeletFile::Devices, Some(blocked("gone"))),
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
        Row::Blocked(KubeletFile::Devices, None),
        Row::Blocked(KubeletFile::Claims, Some(blocked("new"))),
        Row::Mirror(KubeletFile::Claims, mirror(2, vec![1])),
        Row::Mirror(KubeletFile::Devices, mirror(1, vec![])),
    ];
    let mut database = place.create(&before).unwrap();
    database.write(&after).unwrap();
    // As a crash leaves it: nothing is taken over.
    drop(database);

    let mut loaded = place.open().unwrap();

    assert!(loaded.repaired, "there was something in the journal");
    let contents = loaded.contents;
    let pods: Vec<(&str, u64)> = contents
        .pods
        .iter()
        .map(|(uid, pod)| (uid.as_str(), pod.fingerprint))
        .collect();
    assert_eq!(pods, [("changed", 2), ("new", 3)]);
    assert_eq!(contents.claims, BTreeMap::from([("new".into(), claim("new"))]));
    assert_eq!(contents.around.boot_id.as_deref(), Some("after"));
    assert_eq!(
        contents.around.blocked,
        BTreeMap::from([(KubeletFile::Claims, blocked("new"))])
    );
    assert!(
        contents
            .around
            .resources
            .keys()
            .map(|name| name.as_str())
            .eq(["acme.com/new"])
    );
    let mirrors = |file| {
        contents
            .around
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
    // It is the same when the database knows it.
    assert_eq!(loaded.database.snapshot().unwrap().contents().unwrap(), contents);
}
