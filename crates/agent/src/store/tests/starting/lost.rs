//! Databases that are missing, of another node, or older than the last start.

use super::*;

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
