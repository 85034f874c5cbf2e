//! Leases and remembered devices on disk: after a restart, a kill, a reboot, and a disk that fails.

use std::collections::BTreeSet;

use devlet_core::shield::{ContainerProcess, Lease};
use devlet_core::{DeviceId, ResourceName};

use super::disk::Disk;
use super::*;
use crate::store::LeaseError;

fn process() -> ContainerProcess {
    ContainerProcess {
        pid: 7,
        started: 70,
        pid_namespace: 700,
        cgroup: Some("/sys/fs/cgroup/c".into()),
    }
}

fn devices(ids: &[&str]) -> BTreeSet<DeviceId> {
    ids.iter().map(|id| DeviceId::from(*id)).collect()
}

async fn grant(store: &Store, name: &str, ids: &[&str]) {
    let granted = store.grant_lease(name.into(), GPU.into(), devices(ids).into_iter().collect());
    granted.await.unwrap();
}

async fn prepare(store: &Store, name: &str, ids: &[&str]) {
    let preparing = store
        .prepare_leases(&ResourceName::from(GPU), &devices(ids))
        .unwrap();
    let answer = answer(&b"\x0a\x06\x0a\x01A\x12\x01B"[..]).unwrap();
    preparing.record(vec![(name.into(), answer, true)]).await.unwrap();
}

fn leases(store: &Store) -> Vec<Lease> {
    store.read(|node| node.leases().iter().map(|view| view.lease.clone()).collect())
}

/// A store with a lease whose container runs, and one that has only been granted.
async fn two_leases(root: &Root) -> (Store, Vec<Lease>) {
    let store = root.open();
    grant(&store, "a", &["g0", "g1"]).await;
    prepare(&store, "a", &["g0", "g1"]).await;
    store.start_leased("a", "c1", process()).await.unwrap();
    grant(&store, "b", &["g2"]).await;
    let before = leases(&store);
    assert_eq!(before.len(), 2);
    (store, before)
}

#[tokio::test]
async fn leases_survive_a_stop_and_a_kill() {
    let root = Root::new();
    let (store, before) = two_leases(&root).await;
    assert_eq!(before[0].answer.as_ref().unwrap().options().envs["A"], "B");
    assert!(before[0].pre_start_required);
    // Nothing is written after this: the start reads the log.
    let copy = Root::new();
    for name in root.names() {
        std::fs::copy(root.path().join(&name), copy.path().join(&name)).unwrap();
    }
    assert_eq!(leases(&copy.open()), before);
    store.stop().await.unwrap();

    let store = root.open();
    assert_eq!(leases(&store), before);
    store.stop_leased("a", "c1").await.unwrap();
    store.end_lease("a").await.unwrap();
    store.stop().await.unwrap();

    let store = root.open();
    assert_eq!(leases(&store), before[1..]);
    let dump = store.dump().await.unwrap();
    assert_eq!(dump["leases"][0]["devices"], serde_json::json!(["g2"]));
}

#[tokio::test]
async fn a_reboot_ends_the_containers_and_asks_the_plugin_again() {
    let root = Root::new();
    let (store, _) = two_leases(&root).await;
    store.stop().await.unwrap();
    let rebooted = || OpenOptions {
        boot_id: "later".into(),
        ..root.options()
    };
    for _ in 0..2 {
        let store = Store::open(rebooted()).unwrap().0;
        for lease in leases(&store) {
            assert_eq!((lease.answer, lease.containers.len()), (None, 0));
        }
        store.stop().await.unwrap();
    }
}

#[tokio::test]
async fn devices_of_a_plugin_are_remembered() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 3);
    store.record_lists().await.unwrap();
    assert!(store.read(|node| node.unrecorded_lists().is_empty()));
    store.stop().await.unwrap();

    let store = root.open();

    let now = store.now();
    let advertised = store.read(|node| node.advertised(&GPU.into(), now, now, 1_000));
    assert_eq!(advertised.list.len(), 3);
    assert_eq!(advertised.until, Some(now.after(1_000)));
    let late = store.read(|node| node.advertised(&GPU.into(), now.after(1_000), now, 1_000));
    assert!(late.is_expired);
}

#[tokio::test]
async fn a_restart_gives_a_plugin_that_is_away_no_more_time() {
    let root = Root::new();
    let at = |now: Moment| OpenOptions {
        clock: Arc::new(move || now),
        ..root.options()
    };
    let store = root.open();
    offer(&store, GPU, 3);
    store.record_lists().await.unwrap();
    // It is away from here on.
    store.stop().await.unwrap();
    let advertised =
        |store: &Store, now| store.read(|node| node.advertised(&GPU.into(), now, Moment(0), 1_000));
    let store = Store::open(at(NOW.after(400))).unwrap().0;
    assert!(!advertised(&store, NOW.after(400)).is_expired);
    store.stop().await.unwrap();

    let store = Store::open(at(NOW.after(2_000))).unwrap().0;

    assert!(advertised(&store, NOW.after(2_000)).is_expired);
    store.update(|node| node.forget_lists(&[GPU.into()]));
    store.record_lists().await.unwrap();
    store.stop().await.unwrap();
    let store = root.open();
    assert!(store.read(|node| node.advertised_resources()).is_empty());
}

#[tokio::test]
async fn a_start_that_is_not_written_is_refused_and_forgotten() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    grant(&store, "a", &["g0"]).await;
    prepare(&store, "a", &["g0"]).await;
    disk.fail_syncs(Some(std::io::ErrorKind::Other));

    let refused = store.start_leased("a", "c1", process()).await;

    assert!(matches!(refused, Err(LeaseError::Write(_))), "{refused:?}");
    assert_eq!(leases(&store)[0].containers.len(), 0);
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    store.start_leased("a", "c1", process()).await.unwrap();
    let before = leases(&store);
    store.stop().await.unwrap();
    assert_eq!(leases(&root.open()), before);
}
