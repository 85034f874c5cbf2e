//! Imports of a `kubelet_internal_checkpoint` into a running store.

use super::*;

#[tokio::test]
async fn a_blocked_node_stays_blocked_until_an_operator_decides() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "{ broken").unwrap();
    let (store, report) = root.open_with_report();
    let Some(Blocked::UnreadableState { file, .. }) = report.blocked else {
        panic!("{report:?}");
    };
    assert!(Path::new(&file).exists());
    stop(&store).await;

    let (store, report) = root.open_with_report();
    assert!(report.blocked.is_some());
    assert!(report.quarantined.is_empty());
    offer(&store, GPU, 2);
    let refused = store.hold(&request("a", 1), &Preferences::new()).unwrap_err();
    assert!(
        matches!(refused, HoldError::Refused(ReserveError::Blocked(_))),
        "{refused:?}"
    );
    assert!(
        !root.checkpoint().exists(),
        "an empty mirror would say that nothing is held"
    );

    store.forget().await.unwrap();
    admit(&store, "a", 1).await.unwrap();
    store.stop().await.unwrap();
    assert!(root.checkpoint().exists());
    let (_store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
}

#[tokio::test]
async fn an_import_unblocks_the_node_durably() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "{ broken").unwrap();
    let store = root.open();
    store.import(b"{ broken, too").await.unwrap_err();
    assert!(store.read(|node| node.blocked().is_some()));

    let file = kubelet_file(&[("k", &["00"])]);
    let report = store.import(file.as_bytes()).await.unwrap();

    assert_eq!(report.difference.added, ["k".into()]);
    assert_eq!(store.read(|node| node.blocked().cloned()), None);
    store.stop().await.unwrap();
    let (store, report) = root.open_with_report();
    assert_eq!(report.blocked, None);
    assert_eq!(uids(&store), ["k"]);
    let pod = &pods(&store)[0];
    assert_eq!((pod.source, pod.fingerprint), (Source::Imported, 0));
}

#[tokio::test]
async fn a_file_without_pods_does_not_unblock() {
    let root = Root::new();
    std::fs::write(root.checkpoint(), "{ broken").unwrap();
    let (store, report) = root.open_with_report();
    let kept = report.blocked.unwrap().file().to_owned();

    let refused = store.import(kubelet_file(&[]).as_bytes()).await.unwrap_err();

    assert!(
        refused.to_string().contains(&format!("devlet forget {kept}")),
        "{refused}"
    );
    assert!(store.read(|node| node.blocked().is_some()));
    store.forget().await.unwrap();
    let report = store.import(kubelet_file(&[]).as_bytes()).await.unwrap();
    assert_eq!(report.difference, Difference::default(), "harmless otherwise");
}

#[tokio::test]
async fn an_import_adds_to_held_devices() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    admit(&store, "ours", 1).await.unwrap();
    let file = kubelet_file(&[("k", &["00", "03"])]);

    disk.hold_syncs();
    let mut import = pin!(store.import(file.as_bytes()));
    assert!(start(&mut import).is_pending());
    let refused = store.hold(&request("k", 1), &Preferences::new()).unwrap_err();
    assert_eq!(
        refused,
        ReserveError::InFlight.into(),
        "no other operation writes a pod that is being imported"
    );
    disk.release_syncs();
    let report = import.await.unwrap();

    assert_eq!(uids(&store), ["k", "ours"]);
    let twice: Vec<&str> = report
        .doubly_held
        .iter()
        .map(|device| device.id.as_str())
        .collect();
    assert_eq!(twice, ["00"]);
    assert_eq!(free(&store), 2);
    store.release(&"ours".into()).await.unwrap();
    assert_eq!(free(&store), 2, "one holder is left");
    store.release(&"k".into()).await.unwrap();
    assert_eq!(free(&store), 4);
}

#[tokio::test]
async fn a_failed_import_changes_nothing() {
    let root = Root::new();
    let disk = Disk::default();
    std::fs::write(root.checkpoint(), "{ broken").unwrap();
    let store = root.open_on(disk.storage());
    let file = kubelet_file(&[("k", &["00"])]);

    disk.fail_syncs(Some(ErrorKind::Other));
    store.import(file.as_bytes()).await.unwrap_err();
    store.forget().await.unwrap_err();
    assert!(store.read(|node| node.blocked().is_some()));
    assert_eq!(uids(&store), Vec::<String>::new());

    disk.fail_syncs(None);
    store.import(file.as_bytes()).await.unwrap();
    assert_eq!(uids(&store), ["k"]);
}

#[tokio::test]
async fn an_incomplete_file_keeps_its_devices_held_and_the_node_blocked() {
    let root = Root::new();
    let whole = kubelet_file(&[("a", &["00"]), ("b", &["01"])]);
    // The UID of one pod is damaged, and the file is cut off behind it.
    let cut = whole.find("RegisteredDevices").unwrap();
    let damaged = whole[..cut].replace("\"a\"", "5");
    std::fs::write(root.checkpoint(), &damaged).unwrap();
    let store = root.open();
    assert!(store.read(|node| node.blocked().is_some()));
    let repaired = devlet_kubelet_files::salvage(damaged.as_bytes(), None).unwrap();

    let report = store.import(repaired.text.as_bytes()).await.unwrap();

    assert!(report.incomplete);
    assert!(store.read(|node| node.blocked().is_some()), "an operator decides");
    assert_eq!(uids(&store), ["b", "devlet-unknown-pod-1"]);
    store.forget().await.unwrap();
    offer(&store, GPU, 3);
    assert_eq!(free(&store), 1);
}
