//! Kubelet's files that take devices or claims from pods on record, until an operator decides.

use super::*;

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
