//! Pods and claims after a reboot.

use super::*;

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
