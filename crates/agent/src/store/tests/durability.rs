//! Answered changes survive; failed changes leave no trace.

mod imports;
mod misplaced;
mod resources;
mod stalls;

use std::future::Future;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use devlet_core::device_plugin::inventory::EVICT_AFTER_MS;
use devlet_core::{Blocked, Preferences, ReserveError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::disk::Disk;
use super::*;
use crate::store::{Difference, HoldError, ReleaseError, StopError, WriteError};

/// Polls a future once.
pub(super) fn start<T>(future: &mut Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn a_restart_restores_every_pod() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "a", 3).await.unwrap();
    admit(&store, "b", 1).await.unwrap();
    admit(&store, "c", 1).await.unwrap();
    store.release(&"b".into()).await.unwrap();
    let before = pods(&store);
    store.stop().await.unwrap();

    let (store, report) = root.open_with_report();

    assert_eq!(pods(&store), before);
    assert_eq!(uids(&store), ["a", "c"]);
    assert!(!report.repaired);
    let allocation = &before[0].allocations[0];
    assert_eq!(&*allocation.answer.raw, RAW, "unknown fields survive");
    assert_eq!(allocation.answer.options().envs["K"], "V");
    assert!(allocation.pre_start_required);
    assert_eq!((allocation.nodes[0].0, allocation.nodes[0].1.len()), (0, 3));
    offer(&store, GPU, 8);
    assert_eq!(free(&store), 4);
}

#[tokio::test]
async fn answered_changes_survive_a_kill() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "a", 2).await.unwrap();
    // A kill leaves the file as it is at that moment.
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();

    let (revived, report) = after.open_with_report();

    assert_eq!(pods(&revived), pods(&store));
    assert!(report.repaired);
}

#[tokio::test]
async fn a_readmission_does_not_write() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "a", 2).await.unwrap();
    let syncs = store.statistics().syncs;

    let held = store.hold(&request("a", 2), &Preferences::new()).unwrap();

    assert!(held.is_none());
    assert_eq!(store.statistics().syncs, syncs);
}

#[tokio::test]
async fn a_change_costs_one_sync_and_a_read_none() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 8);
    store.mirror().await.unwrap();
    let syncs = disk.syncs();

    admit(&store, "a", 1).await.unwrap();
    assert_eq!(disk.syncs(), syncs + 1);
    store.release(&"a".into()).await.unwrap();
    assert_eq!(disk.syncs(), syncs + 2);
    pods(&store);
    store.dump().await.unwrap();
    assert_eq!(disk.syncs(), syncs + 2);
    assert_eq!(
        store.statistics().batches.count,
        store.statistics().write_durations.count
    );
}

#[tokio::test]
async fn changes_that_come_together_share_a_sync() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 32);
    store.mirror().await.unwrap();
    let syncs = disk.syncs();

    disk.hold_syncs();
    let mut first = pin!(admit(&store, "first", 1));
    assert!(start(&mut first).is_pending());
    disk.wait_for_a_sync();
    let names: Vec<String> = (0..20).map(|number| format!("pod-{number:02}")).collect();
    let mut others: Vec<_> = names
        .iter()
        .map(|name| Box::pin(admit(&store, name, 1)))
        .collect();
    for other in &mut others {
        assert!(start(&mut other.as_mut()).is_pending());
    }
    disk.release_syncs();
    first.await.unwrap();
    for other in others {
        other.await.unwrap();
    }

    assert_eq!(disk.syncs(), syncs + 2, "one for the first, one for all others");
    assert_eq!(pods(&store).len(), 21);
    let batches = store.statistics().batches;
    let of_at_most = |count: f64| {
        batches
            .buckets
            .iter()
            .find(|(bound, _)| *bound == count)
            .unwrap()
            .1
    };
    assert_eq!(
        of_at_most(32.0) - of_at_most(16.0),
        1,
        "a batch of 20: {batches:?}"
    );
}

#[tokio::test]
async fn a_change_takes_effect_in_memory_after_it_is_on_disk() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 2);

    disk.hold_syncs();
    let mut admission = pin!(admit(&store, "a", 1));
    assert!(start(&mut admission).is_pending());
    disk.wait_for_a_sync();
    assert_eq!(uids(&store), Vec::<String>::new(), "not before it is on disk");
    assert_eq!(free(&store), 1, "no other pod gets the device");
    disk.release_syncs();
    admission.await.unwrap();
    assert_eq!(uids(&store), ["a"]);

    disk.hold_syncs();
    let uid = "a".into();
    let mut removal = pin!(store.release(&uid));
    assert!(start(&mut removal).is_pending());
    disk.wait_for_a_sync();
    assert_eq!(uids(&store), ["a"]);
    assert_eq!(free(&store), 1);
    disk.release_syncs();
    removal.await.unwrap();
    assert_eq!(free(&store), 2);
}

#[tokio::test]
async fn a_failed_sync_changes_nothing_and_the_store_recovers() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    admit(&store, "kept", 1).await.unwrap();
    let before = pods(&store);

    disk.fail_syncs(Some(ErrorKind::StorageFull));
    let refused = admit(&store, "refused", 1).await.unwrap_err();
    let removal = store.release(&"kept".into()).await.unwrap_err();

    let CommitError::Write(error) = refused else {
        panic!("{refused:?}");
    };
    let WriteError::Disk { path, kind, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!((path, *kind), (&root.database(), Some(ErrorKind::StorageFull)));
    let text = error.to_string();
    assert_eq!(
        text,
        format!("{} cannot be written: no storage space", path.display())
    );
    assert!(
        matches!(removal, ReleaseError::Write(WriteError::Disk { .. })),
        "{removal:?}"
    );
    assert!(store.health().is_err());
    assert_eq!(pods(&store), before);
    assert_eq!(free(&store), 3);

    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    admit(&store, "later", 2).await.unwrap();

    assert_eq!(store.health(), Ok(()));
    let before = pods(&store);
    store.stop().await.unwrap();
    let store = root.open();
    assert_eq!(pods(&store), before, "what was refused is not on disk either");
    assert_eq!(uids(&store), ["kept", "later"]);
}

#[tokio::test]
async fn a_full_disk_rejects_changes_and_the_store_recovers_alone() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    disk.fail_writes(Some(ErrorKind::StorageFull));
    admit(&store, "refused", 1).await.unwrap_err();

    disk.fail_writes(None);

    wait_until_healthy(&store).await;
    assert_eq!(
        root.names().iter().filter(|name| name.ends_with(".new")).count(),
        0
    );
}

#[tokio::test]
async fn a_failed_batch_fails_every_change_in_it() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);

    disk.hold_syncs();
    let mut first = pin!(admit(&store, "first", 1));
    assert!(start(&mut first).is_pending());
    disk.wait_for_a_sync();
    let (mut one, mut two) = (pin!(admit(&store, "one", 1)), pin!(admit(&store, "two", 1)));
    assert!(start(&mut one).is_pending());
    assert!(start(&mut two).is_pending());
    disk.fail_syncs(Some(ErrorKind::Other));
    disk.release_syncs();

    first.await.unwrap_err();
    one.await.unwrap_err();
    two.await.unwrap_err();
    assert_eq!(free(&store), 4);
}

#[tokio::test]
async fn a_dropped_reservation_frees_its_devices() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    let held = store
        .hold(&request("a", 2), &Preferences::new())
        .unwrap()
        .unwrap();
    assert_eq!(held.reservation().grants[0].devices.len(), 2);
    assert_eq!(free(&store), 0);

    drop(held);

    assert_eq!(free(&store), 2);
}

#[tokio::test]
async fn a_commit_dropped_before_its_first_poll_changes_nothing() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    let request = request("a", 2);
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    let commit = held.commit(&request, vec![(answer(RAW).unwrap(), false)]);

    drop(commit);

    assert_eq!(free(&store), 2);
    assert_eq!(store.dump().await.unwrap()["pods"], serde_json::json!([]));
}

#[tokio::test]
async fn a_commit_dropped_after_its_first_poll_is_written() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 2);
    disk.hold_syncs();
    {
        let mut admission = pin!(admit(&store, "a", 1));
        assert!(start(&mut admission).is_pending());
        disk.wait_for_a_sync();
    }
    let refused = store.hold(&request("a", 1), &Preferences::new()).unwrap_err();
    assert_eq!(refused, ReserveError::InFlight.into());
    disk.release_syncs();

    admit(&store, "b", 1).await.unwrap();
    assert_eq!(uids(&store), ["a", "b"]);
    disk.hold_syncs();
    {
        let uid = "a".into();
        let mut removal = pin!(store.release(&uid));
        assert!(start(&mut removal).is_pending());
    }
    disk.release_syncs();
    store.stop().await.unwrap();
    assert_eq!(uids(&root.open()), ["b"]);
}

#[tokio::test]
async fn a_stopped_store_rejects_changes_and_frees_devices() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    store.stop().await.unwrap();

    let refused = admit(&store, "a", 1).await;

    assert_eq!(refused, Err(CommitError::Write(WriteError::Stopped)));
    assert_eq!(free(&store), 2);
    assert!(store.stop().await.is_err());
}

#[tokio::test]
async fn subscribers_are_woken_by_changes() {
    let root = Root::new();
    let store = root.open();
    let mut changed = store.subscribe();
    changed.mark_unchanged();

    offer(&store, GPU, 2);

    assert!(changed.has_changed().unwrap());
    assert_eq!(
        *changed.borrow_and_update(),
        store.read(devlet_core::Node::changes)
    );
    admit(&store, "a", 1).await.unwrap();
    assert_eq!(
        *changed.borrow_and_update(),
        store.read(devlet_core::Node::changes)
    );
    store.update(|_| ());
    assert!(!changed.has_changed().unwrap());
}

#[tokio::test]
async fn files_are_for_us_only() {
    let root = Root::new();
    let store = root.open();
    store.mirror().await.unwrap();
    for path in [root.database(), root.checkpoint()] {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
    }
    store.stop().await.unwrap();

    std::fs::set_permissions(root.database(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let _store = root.open();
    let mode = std::fs::metadata(root.database()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn nothing_is_reserved_while_writes_fail() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 4);
    admit(&store, "kept", 1).await.unwrap();
    disk.fail_writes(Some(ErrorKind::StorageFull));
    admit(&store, "first", 1).await.unwrap_err();

    let refused = store
        .hold(&request("second", 1), &Preferences::new())
        .unwrap_err();

    assert!(matches!(refused, HoldError::Write(_)), "{refused:?}");
    assert_eq!(free(&store), 3);
    let kept = store.hold(&request("kept", 1), &Preferences::new()).unwrap();
    assert!(kept.is_none(), "it has everything, on disk");
    let mut of_another_source = request("kept", 1);
    of_another_source.source = Source::Embedder;
    let kept = store.hold(&of_another_source, &Preferences::new()).unwrap();
    assert!(kept.is_none(), "only a note about it cannot be written");
    disk.fail_writes(None);
    wait_until_healthy(&store).await;
    admit(&store, "second", 1).await.unwrap();
}

#[tokio::test]
async fn setting_the_clock_changes_nothing() {
    let root = Root::new();
    let clock = Arc::new(AtomicU64::new(NOW.0));
    let options = OpenOptions {
        clock: Arc::new({
            let clock = Arc::clone(&clock);
            move || Moment(clock.load(Ordering::Relaxed))
        }),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    let hour = 60 * 60 * 1000;
    for set in [NOW.0 + hour, NOW.0 - hour] {
        clock.store(set, Ordering::Relaxed);
        let passed = store.now().0 - NOW.0;
        assert!(passed < hour / 2, "{passed} ms");
    }
}

#[tokio::test]
async fn everything_is_in_a_dump() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 4);
    admit(&store, "a", 1).await.unwrap();
    store.mirror().await.unwrap();

    let dump = store.dump().await.unwrap();

    assert_eq!(dump["schema"], 1);
    assert_eq!(dump["bootId"], "boot-1");
    assert_eq!(dump["pods"][0]["name"], "a");
    let allocation = &dump["pods"][0]["allocations"][0];
    assert_eq!(allocation["devices"], serde_json::json!(["00"]));
    assert_eq!(allocation["numaNodes"], serde_json::json!({ "0": ["00"] }));
    assert_eq!(dump["resources"][GPU]["endpoint"], "/run/plugin.sock");
    assert_eq!(dump["mirrors"].as_array().unwrap().len(), 1);
    assert_eq!(dump["blocked"], serde_json::json!([]));
}

#[tokio::test]
async fn all_containers_of_a_pod_are_recorded() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    let mut request = request("a", 1);
    request.containers.push(ContainerRequest {
        name: "log".into(),
        kind: ContainerKind::App,
        wants: BTreeMap::new(),
        claims: Vec::new(),
    });
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.commit(&request, vec![(answer(RAW).unwrap(), false)])
        .await
        .unwrap();
    store
        .import(kubelet_file(&[("k", &["01"])]).as_bytes())
        .await
        .unwrap();
    store.stop().await.unwrap();

    let store = root.open();

    let [admitted, imported] = &pods(&store)[..] else {
        panic!("two pods");
    };
    assert_eq!(admitted.containers, ["main".into(), "log".into()]);
    let known = ["main", "log", "lgo"].map(|name| admitted.may_have(name));
    assert_eq!(known, [true, true, false]);
    assert!(imported.may_have("lgo"), "its spec is not known");
}
