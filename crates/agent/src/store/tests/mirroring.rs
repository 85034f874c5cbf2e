//! Mirrors in the kubelet's files.

use devlet_kubelet_files::{Role, verify};

use super::disk::Disk;
use super::*;
use crate::store::{MirrorError, StopError};

fn read(root: &Root) -> String {
    std::fs::read_to_string(root.checkpoint()).unwrap()
}

/// Returns the number of hashes of mirrors in the database.
async fn known(store: &Store) -> usize {
    store.dump().await.unwrap()["mirrors"].as_array().unwrap().len()
}

#[tokio::test]
async fn a_mirror_is_what_a_kubelet_would_write() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 4);
    offer(&store, "acme.com/nic", 1);
    admit(&store, "b", 3).await.unwrap();
    admit(&store, "a", 1).await.unwrap();

    store.mirror().await.unwrap();

    let entry = |uid: &str, nodes: &[(i64, &[&str])]| Entry {
        pod_uid: uid.into(),
        container: "main".into(),
        resource: GPU.into(),
        devices: Devices::PerNuma(Some(
            nodes
                .iter()
                .map(|(node, ids)| (*node, Some(ids.iter().map(|&id| id.into()).collect())))
                .collect(),
        )),
        alloc_resp: Some(RAW.to_vec()),
    };
    let ids = |ids: &[&str]| Some(ids.iter().map(|&id| id.into()).collect());
    let devices = pods(&store)[0].allocations[0].devices[0].to_string();
    assert_eq!(
        devices, "03",
        "pod b has the first node and one device of the second"
    );
    let expected = Checkpoint {
        entries: Some(vec![
            entry("a", &[(1, &["03"])]),
            entry("b", &[(0, &["00", "01"]), (1, &["02"])]),
        ]),
        registered: Some(BTreeMap::from([
            (GPU.into(), ids(&["00", "01", "02", "03"])),
            ("acme.com/nic".into(), ids(&["00"])),
        ])),
    };
    assert_eq!(read(&root), device_plugin::write(&expected));
    assert!(verify(read(&root).as_bytes(), Some(Role::DevicePlugin)).is_fine());
}

#[tokio::test]
async fn a_mirror_of_nothing_is_a_kubelets_empty_file() {
    let root = Root::new();
    let store = root.open();
    store.stop().await.unwrap();
    let empty = include_str!("../../../../kubelet-files/testdata/deviceplugin/v2-empty.json");
    assert_eq!(read(&root), empty.trim_end());
}

#[tokio::test]
async fn an_imported_file_comes_back_in_the_newest_format() {
    let root = Root::new();
    let v1 = include_bytes!("../../../../kubelet-files/testdata/deviceplugin/v1-one-pod.json");
    std::fs::write(root.checkpoint(), v1).unwrap();
    let store = root.open();
    store.mirror().await.unwrap();

    let verdict = verify(read(&root).as_bytes(), Some(Role::DevicePlugin));
    assert!(verdict.is_fine(), "{verdict:?}");
    let before = pods(&store);
    store.stop().await.unwrap();
    std::fs::remove_file(root.database()).unwrap();
    assert_eq!(pods(&root.open()), before, "nothing is lost on the way");
}

#[tokio::test]
async fn an_unchanged_mirror_is_not_written() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    store.mirror().await.unwrap();
    let (syncs, mirrors) = (disk.syncs(), store.statistics().mirrors);

    store.mirror().await.unwrap();

    assert_eq!((disk.syncs(), store.statistics().mirrors), (syncs, mirrors));
}

#[tokio::test]
async fn a_hash_is_on_disk_before_its_mirror() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    // The resource is on disk with it, so only the hash is left to write.
    store.mirror().await.unwrap();
    admit(&store, "a", 1).await.unwrap();
    let before = read(&root);

    disk.fail_syncs(Some(std::io::ErrorKind::Other));
    let refused = store.mirror().await.unwrap_err();

    assert!(matches!(refused, MirrorError::Write(_)), "{refused:?}");
    assert_eq!(read(&root), before);
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    admit(&store, "b", 1).await.unwrap();
    store.mirror().await.unwrap();
    assert!(read(&root).contains("\"b\""));
}

#[tokio::test]
async fn a_crash_before_or_after_a_mirror_is_replaced_is_not_a_takeover() {
    let root = Root::new();
    let disk = Disk::default();
    let mirror = root.path().join(LONG_NAME);
    let options = OpenOptions {
        storage: disk.storage(),
        checkpoint: Some(mirror.clone()),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    offer(&store, GPU, 4);
    store.mirror().await.unwrap();
    let before = read(&mirror);
    admit(&store, "a", 1).await.unwrap();
    let obstacle = obstruct(&mirror);
    store.mirror().await.unwrap_err();
    // The files as a kill between the record and the replacement leaves them.
    let recorded = std::fs::read(root.database()).unwrap();
    std::fs::remove_dir_all(obstacle).unwrap();
    store.mirror().await.unwrap();
    let after = read(&mirror);
    assert_ne!(before, after);

    for file in [before, after.clone()] {
        let revived = Root::new();
        std::fs::write(revived.database(), &recorded).unwrap();
        std::fs::write(revived.checkpoint(), file).unwrap();
        let (store, report) = revived.open_with_report();
        assert!(report.takeover.is_none(), "{report:?}");
        assert_eq!(uids(&store), ["a"]);
        assert_eq!(known(&store).await, 2);
        // From then on, only one hash is known.
        offer(&store, GPU, 4);
        store.mirror().await.unwrap();
        assert_eq!(read(&revived.checkpoint()), after);
        assert_eq!(known(&store).await, 1);
    }
}

#[tokio::test]
async fn a_mirror_that_cannot_be_confirmed_is_confirmed_later() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    store.mirror().await.unwrap();
    admit(&store, "a", 1).await.unwrap();
    let syncs = disk.syncs();

    disk.fail_syncs_after(syncs + 1);
    let refused = store.mirror().await.unwrap_err();

    assert!(matches!(refused, MirrorError::Write(_)), "{refused:?}");
    assert!(read(&root).contains("\"a\""), "the file is there");
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    assert_eq!(known(&store).await, 2);
    store.mirror().await.unwrap();
    assert_eq!(known(&store).await, 1);
}

#[tokio::test]
async fn a_mirror_that_cannot_be_written_does_not_fail_admissions() {
    let root = Root::new();
    let mirror = root.path().join(LONG_NAME);
    let options = OpenOptions {
        checkpoint: Some(mirror.clone()),
        ..root.options()
    };
    let (store, _) = Store::open(options.clone()).unwrap();
    let read = || std::fs::read_to_string(&mirror).unwrap();
    offer(&store, GPU, 64);
    store.mirror().await.unwrap();
    let before = read();
    let obstacle = obstruct(&mirror);

    for number in 0..40 {
        admit(&store, &format!("pod-{number}"), 1).await.unwrap();
        let refused = store.mirror().await.unwrap_err();
        assert!(matches!(refused, MirrorError::File { .. }), "{refused:?}");
    }
    assert_eq!(store.health(), Ok(()), "pods are admitted");
    let failure = store.mirror_failure().unwrap();
    assert!(failure.contains("cannot be replaced: "), "{failure}");
    assert_eq!(
        known(&store).await,
        2,
        "the one that is there, and the one that is tried"
    );
    let refused = store.stop().await.unwrap_err();
    assert!(matches!(refused, StopError::Mirror(_)), "{refused:?}");

    assert_eq!(read(), before);
    std::fs::remove_dir_all(obstacle).unwrap();
    let (store, report) = Store::open(options).unwrap();
    assert!(
        report.takeover.is_none(),
        "the file is still known as ours: {report:?}"
    );
    assert_eq!(pods(&store).len(), 40);
}

#[tokio::test]
async fn a_mirror_comes_by_itself() {
    let root = Root::new();
    let options = OpenOptions {
        mirror_interval: Duration::from_millis(1),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    offer(&store, GPU, 4);
    admit(&store, "a", 1).await.unwrap();
    // The thread retries after its own pause.
    let is_written = || std::fs::read_to_string(root.checkpoint()).is_ok_and(|file| file.contains("\"a\""));
    wait_until("the mirror is written", is_written).await;
}

#[tokio::test]
async fn without_a_kubelets_file_there_is_no_mirror() {
    let root = Root::new();
    let options = OpenOptions {
        checkpoint: None,
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    store.stop().await.unwrap();
    assert_eq!(root.names(), ["node-id", "state.redb"]);
}

#[tokio::test]
async fn a_file_of_another_process_is_left_alone() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    admit(&store, "a", 1).await.unwrap();
    store.mirror().await.unwrap();
    let theirs = include_str!("../../../../kubelet-files/testdata/deviceplugin/v2-one-pod.json");
    std::fs::write(root.checkpoint(), theirs).unwrap();

    admit(&store, "b", 1).await.unwrap();

    let refused = store.mirror().await.unwrap_err();
    assert!(matches!(refused, MirrorError::Foreign { .. }), "{refused}");
    assert_eq!(read(&root), theirs);
    assert_eq!(store.mirror_failure(), Some(refused.to_string()));
    std::fs::remove_file(root.checkpoint()).unwrap();
    store.mirror().await.unwrap();
    assert_eq!(store.mirror_failure(), None);
    std::fs::write(root.checkpoint(), theirs).unwrap();
    store.release(&"b".into()).await.unwrap();
    // A clean stop does not overwrite it either.
    assert!(store.stop().await.is_err());
    assert_eq!(read(&root), theirs);
    // devlet was running, so a kubelet was not in charge.
    let (store, report) = root.open_with_report();
    assert!(
        report.takeover.is_none() && report.blocked.is_none(),
        "{report:?}"
    );
    let [aside] = &report.quarantined[..] else {
        panic!("{report:?}");
    };
    assert_eq!(std::fs::read_to_string(&aside.kept).unwrap(), theirs);
    assert_eq!(uids(&store), ["a"]);
    store.stop().await.unwrap();
    assert!(read(&root).contains("\"a\""), "the mirror is back");
}

/// A store with a short mirror interval, and with pod `a` in its mirror.
async fn watchful(root: &Root) -> Store {
    let options = OpenOptions {
        mirror_interval: Duration::from_millis(1),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    offer(&store, GPU, 2);
    admit(&store, "a", 1).await.unwrap();
    store.mirror().await.unwrap();
    store
}

/// Puts a file of this kind in the place of a mirror, which may be written at any time.
fn put(kind: &str, path: &Path) {
    let made = path.with_extension("made");
    make(kind, &made);
    // A directory cannot replace a file.
    while std::fs::rename(&made, path).is_err() {
        std::fs::remove_file(path).unwrap();
    }
}

/// A root with pod `a`, killed after devlet had noticed this file in the place of a mirror.
async fn killed_with_a_foreign_file(theirs: &str) -> (Root, OpenOptions) {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.mirror().await.unwrap();
    std::fs::write(root.checkpoint(), theirs).unwrap();
    store.mirror().await.unwrap_err();
    let killed = Root::new();
    for name in root.names() {
        std::fs::copy(root.path().join(&name), killed.path().join(&name)).unwrap();
    }
    let options = killed.options();
    (killed, options)
}

#[tokio::test]
async fn the_hash_of_a_foreign_file_is_removed_with_the_file() {
    let theirs = kubelet_file(&[("a", &["00"]), ("b", &["07"]), ("c", &["01"])]);
    for how in ["set aside", "set aside with a second name", "replaced by our own"] {
        let (root, options) = killed_with_a_foreign_file(&theirs).await;
        match how {
            "set aside" => {}
            "set aside with a second name" => {
                std::fs::hard_link(root.checkpoint(), root.path().join("second")).unwrap();
            }
            _ => std::fs::remove_file(root.checkpoint()).unwrap(),
        }
        let (store, report) = Store::open(options.clone()).unwrap();
        assert_eq!(report.blocked, None, "{how}");
        assert_eq!(
            report.quarantined.len(),
            usize::from(how != "replaced by our own")
        );
        assert_eq!(uids(&store), ["a"], "{how}");
        offer(&store, GPU, 8);
        admit(&store, "c", 1).await.unwrap();
        if how == "replaced by our own" {
            store.mirror().await.unwrap();
        }
        // After a kill, a kubelet takes over and reaches the same state.
        let killed = Root::new();
        for name in ["state.redb", "node-id"] {
            std::fs::copy(root.path().join(name), killed.path().join(name)).unwrap();
        }
        std::fs::write(killed.checkpoint(), &theirs).unwrap();

        let (store, report) = killed.open_with_report();

        assert!(
            report.takeover.is_some() && report.quarantined.is_empty(),
            "{how}: {report:?}"
        );
        assert_eq!(uids(&store), ["a", "b", "c"], "{how}");
    }
}

#[tokio::test]
async fn a_foreign_file_that_a_crash_leaves_in_its_place_is_still_foreign() {
    let theirs = kubelet_file(&[("a", &["00"]), ("b", &["07"]), ("c", &["01"])]);
    let (root, options) = killed_with_a_foreign_file(&theirs).await;
    // The first start repairs the database.
    drop(root.database_file(Storage::default()).open().unwrap());
    let disk = Disk::default();
    let loaded = root.database_file(disk.storage()).open().unwrap();
    let opened = disk.syncs();
    drop(loaded);
    let disk = Disk::default();
    // A crash at the first write of the start.
    disk.fail_syncs_after(opened);
    let storage = disk.storage();
    let (store, report) = Store::open(OpenOptions { storage, ..options }).unwrap();
    assert_eq!(report.quarantined.len(), 1);
    assert!(store.health().is_err());
    let killed = Root::new();
    for name in ["state.redb", "node-id"] {
        std::fs::copy(root.path().join(name), killed.path().join(name)).unwrap();
    }
    // The file has not been removed yet.
    std::fs::write(killed.checkpoint(), &theirs).unwrap();

    let (store, report) = killed.open_with_report();

    assert_eq!(report.quarantined.len(), 1, "{report:?}");
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_foreign_file_is_noticed_on_an_idle_node() {
    let root = Root::new();
    let options = OpenOptions {
        mirror_interval: Duration::from_millis(1),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    // Without changes from here on.
    store.mirror().await.unwrap();

    let theirs = kubelet_file(&[("k", &["01"])]);
    std::fs::write(root.checkpoint(), &theirs).unwrap();

    wait_until("a problem is reported", || store.mirror_failure().is_some()).await;
    assert_eq!(read(&root), theirs);
    std::fs::remove_file(root.checkpoint()).unwrap();
    wait_until("the mirror is written", || root.checkpoint().exists()).await;
    wait_until("the problem is gone", || store.mirror_failure().is_none()).await;
}

#[tokio::test]
async fn a_foreign_file_is_noticed_while_the_node_is_blocked() {
    let root = Root::new();
    watchful(&root).await.stop().await.unwrap();
    std::fs::write(root.checkpoint(), kubelet_file(&[("c", &["05"])])).unwrap();
    let options = OpenOptions {
        mirror_interval: Duration::from_millis(1),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    let contested = store.read(|node| node.blocked().cloned());
    assert!(contested.is_some());
    store.mirror().await.unwrap_err();

    let theirs = kubelet_file(&[("a", &["00"]), ("k", &["01"])]);
    std::fs::write(root.checkpoint(), &theirs).unwrap();

    let is_foreign = |failure: String| failure.contains("written by another process");
    wait_until("the file is reported", || {
        store.mirror_failure().is_some_and(is_foreign)
    })
    .await;
    store.stop().await.unwrap_err();
    assert_eq!(read(&root), theirs);
    // devlet was running, so a kubelet was not in charge.
    let (store, report) = root.open_with_report();
    assert_eq!(report.quarantined[0].original, root.checkpoint());
    assert_eq!(report.blocked, contested);
    assert_eq!(uids(&store), ["a", "c"]);
}

#[tokio::test]
async fn a_non_regular_file_in_the_place_of_a_mirror_is_quarantined_without_hanging() {
    for kind in NOT_FILES {
        let root = Root::new();
        let store = watchful(&root).await;

        put(kind, &root.checkpoint());

        // The file is there a moment before the store knows what it replaced.
        let is_written = || root.checkpoint().is_file() && !store.quarantined().is_empty();
        wait_until("the mirror is written", is_written).await;
        assert!(read(&root).contains("\"a\""), "{kind}");
        let [aside] = &store.quarantined()[..] else {
            panic!("{kind}: {:?}", store.quarantined());
        };
        assert!(aside.kept.symlink_metadata().is_ok(), "{kind}");
        put(kind, &root.checkpoint());
        store.stop().await.unwrap();
        assert!(read(&root).contains("\"a\""), "{kind}");
    }
}

#[tokio::test]
async fn a_directory_at_the_temporary_name_of_a_file_is_quarantined() {
    let root = Root::new();
    let outside = root.path().join(".devlet-node-id");
    let options = OpenOptions {
        node_id: Some(outside.clone()),
        ..root.options()
    };
    let obstacles = [
        "state.redb.new",
        ".node-id.new",
        "..devlet-node-id.new",
        ".kubelet_internal_checkpoint.new",
    ];
    let obstruct = || {
        for name in obstacles {
            std::fs::create_dir_all(root.path().join(name).join("x")).unwrap();
        }
    };
    obstruct();
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();
    store.mirror().await.unwrap();
    obstruct();
    std::fs::remove_file(root.database()).unwrap();
    admit(&store, "b", 1).await.unwrap();
    store.stop().await.unwrap();

    assert_eq!(store.id_failure(), None);
    assert!(read(&root).contains("\"b\""));
    for name in obstacles {
        assert!(!root.path().join(name).exists(), "{name}");
        let aside = format!("{name}.unreadable-");
        let asides = root.names().into_iter().filter(|other| other.starts_with(&aside));
        assert_eq!(asides.count(), 2, "{name}");
    }
    let (store, report) = Store::open(options).unwrap();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["a", "b"]);
}
