//! Every row of the table in `open.rs`, and reboots.

mod contested;
mod lost;
mod node_id;
mod ownership;
mod reboots;
mod unreadable;

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
use crate::store::ClusterRecord;
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

fn with_outside(root: &Root, outside: &Path) -> OpenOptions {
    OpenOptions {
        node_id: Some(outside.to_owned()),
        ..root.options()
    }
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
    let cluster = ClusterRecord {
        node: "worker-1".into(),
        server: "https://10.0.0.1:6443/".into(),
    };
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
        Row::Cluster(cluster.clone()),
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
    assert_eq!(persisted.metadata.cluster, Some(cluster));
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
