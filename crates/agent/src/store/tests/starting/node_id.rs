//! The files with the ID of the node, and crashes while they are written.

use super::*;

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
