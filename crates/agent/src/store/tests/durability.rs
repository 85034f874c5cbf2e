//! Answered changes survive; failed changes leave no trace.

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
async fn no_thread_of_a_runtime_waits_for_the_disk() {
    const WRITER: &str = "devlet-writer";
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 8);
    // The syncs of the start.
    let before = disk.syncs() - disk.syncs_by(WRITER);

    admit(&store, "a", 1).await.unwrap();

    assert_eq!(disk.syncs_by(WRITER), disk.syncs() - before);
}

#[tokio::test]
async fn a_stalled_disk_is_reported_until_it_answers() {
    let root = Root::new();
    let disk = Disk::default();
    let options = OpenOptions {
        write_timeout: Duration::from_millis(50),
        storage: disk.storage(),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    offer(&store, GPU, 8);

    let first = request("a", 1);
    let held = store.hold(&first, &Preferences::new()).unwrap().unwrap();
    disk.hold_syncs();
    let refused = held.commit(&first, vec![(answer(RAW).unwrap(), true)]).await;
    let refused = refused.unwrap_err();
    let text = refused.to_string();
    assert!(
        matches!(refused, CommitError::Write(WriteError::TimedOut { .. })),
        "{refused:?}"
    );
    assert!(
        text.contains("the change may still be written; try again"),
        "{text}"
    );
    // The caller may wait before the write begins.
    wait_until("the stall is reported", || is_stalled(&store)).await;
    let refused = store.hold(&request("b", 1), &Preferences::new());
    assert!(matches!(refused, Err(HoldError::Write(WriteError::Hangs { .. }))));

    // The device is not free either: the allocation may be on disk.
    assert_eq!(free(&store), 7);
    let again = store.hold(&request("a", 1), &Preferences::new());
    assert!(
        matches!(again, Err(HoldError::Refused(ReserveError::InFlight))),
        "{again:?}"
    );

    let mut changed = store.subscribe();
    disk.release_syncs();
    while pods(&store).is_empty() {
        changed.changed().await.unwrap();
    }
    wait_until("the disk works again", || store.health().is_ok()).await;
    let again = store.hold(&request("a", 1), &Preferences::new());
    assert!(again.unwrap().is_none(), "it has everything");
}

fn is_stalled(store: &Store) -> bool {
    matches!(store.health(), Err(WriteError::Hangs { .. }))
}

#[tokio::test]
async fn a_disk_that_stalls_in_a_checkpoint_is_reported() {
    let root = Root::new();
    let disk = Disk::default();
    let options = OpenOptions {
        write_timeout: Duration::from_millis(50),
        storage: disk.storage(),
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "a", 1).await.unwrap();

    // A stop writes one record, and then makes a checkpoint.
    disk.hold_syncs_after(disk.syncs() + 1);
    let stopping = tokio::spawn({
        let store = store.clone();
        async move { store.stop().await }
    });
    let reported = wait_until("the stall is reported", || is_stalled(&store));
    let reported = tokio::time::timeout(Duration::from_secs(20), reported).await;
    disk.release_syncs();

    reported.unwrap();
    stopping.await.unwrap().unwrap();
}

/// A signal that a thread or a task can send.
fn pair() -> (std::os::unix::net::UnixStream, tokio::net::UnixStream) {
    let (near, far) = tokio::net::UnixStream::pair().unwrap();
    let near = near.into_std().unwrap();
    near.set_nonblocking(false).unwrap();
    near.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    (near, far)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_disk_blocks_only_callers_that_write() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 8);
    store.mirror().await.unwrap();

    // Both calls are made from outside of the runtime.
    let (mut echo, far) = pair();
    tokio::spawn(async move {
        let mut far = far;
        while let Ok(byte) = far.read_u8().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
            far.write_u8(byte + 1).await.unwrap();
        }
    });
    for round in 0..20 {
        disk.hold_syncs();
        let name = format!("pod-{round}");
        let (mut door, mut far) = pair();
        let admission = tokio::spawn({
            let (store, name) = (store.clone(), name.clone());
            async move {
                far.read_u8().await.unwrap();
                admit(&store, &name, 1).await
            }
        });
        door.write_all(&[1]).unwrap();
        disk.wait_for_a_sync();
        // A free thread serves sockets and timers.
        echo.write_all(&[round]).unwrap();
        let mut answer = [0];
        echo.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [round + 1]);
        assert!(!admission.is_finished());
        assert_eq!(pods(&store).len(), 0);

        // Changes that are queued in the meantime are written together.
        let another = tokio::spawn({
            let store = store.clone();
            async move { admit(&store, "another", 1).await }
        });
        disk.release_syncs();
        admission.await.unwrap().unwrap();
        another.await.unwrap().unwrap();
        store.release(&name.as_str().into()).await.unwrap();
        store.release(&"another".into()).await.unwrap();
    }
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

/// Opens a copy of the files as a kill at this moment would leave them.
fn after_a_kill(root: &Root) -> (Root, Store) {
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();
    let store = after.open();
    (after, store)
}

#[tokio::test]
async fn a_removed_database_is_created_again_before_the_next_answer() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();

    std::fs::remove_file(root.database()).unwrap();
    admit(&store, "after", 1).await.unwrap();

    let (_root, revived) = after_a_kill(&root);
    assert_eq!(uids(&revived), ["after", "before"]);
    // A clean stop keeps it.
    std::fs::remove_file(root.database()).unwrap();
    store.stop().await.unwrap();
    assert_eq!(uids(&root.open()), ["after", "before"]);
}

#[tokio::test]
async fn a_database_removed_during_a_write_is_created_again_before_the_answer() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();

    disk.hold_syncs();
    let mut admission = pin!(admit(&store, "after", 1));
    assert!(start(&mut admission).is_pending());
    disk.wait_for_a_sync();
    std::fs::remove_file(root.database()).unwrap();
    disk.release_syncs();
    admission.await.unwrap();

    let (_root, revived) = after_a_kill(&root);
    assert_eq!(uids(&revived), ["after", "before"]);
}

#[tokio::test]
async fn without_the_directory_of_the_database_nothing_is_answered() {
    let root = Root::new();
    let directory = root.path().join("state");
    std::fs::create_dir(&directory).unwrap();
    let options = OpenOptions {
        database: directory.join("state.redb"),
        ..root.options()
    };
    let (store, _) = Store::open(options.clone()).unwrap();
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();

    std::fs::remove_dir_all(&directory).unwrap();
    admit(&store, "refused", 1).await.unwrap_err();
    assert!(store.health().is_err());
    std::fs::create_dir(&directory).unwrap();
    wait_until_healthy(&store).await;
    admit(&store, "after", 1).await.unwrap();

    store.stop().await.unwrap();
    assert_eq!(uids(&Store::open(options).unwrap().0), ["after", "before"]);
}

#[tokio::test]
async fn a_file_of_another_process_in_the_place_of_the_database_is_not_overwritten() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();
    let other = root.path().join("other");
    std::fs::write(&other, "theirs").unwrap();

    std::fs::rename(&other, root.database()).unwrap();
    let refused = admit(&store, "refused", 1).await.unwrap_err();

    let text = format!(
        "{} cannot be written: another file is in its place; move that away",
        root.database().display()
    );
    assert_eq!(refused.to_string(), text);
    assert_eq!(store.health().unwrap_err().to_string(), text);
    assert_eq!(std::fs::read_to_string(root.database()).unwrap(), "theirs");
    std::fs::remove_file(root.database()).unwrap();
    wait_until_healthy(&store).await;
    store.stop().await.unwrap();
    assert_eq!(uids(&root.open()), ["before"]);
}

#[tokio::test]
async fn a_stop_saves_the_database_beside_a_file_of_another_process() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();
    std::fs::remove_file(root.database()).unwrap();
    std::fs::create_dir(root.database()).unwrap();

    let error = store.stop().await.unwrap_err();

    let said = error.to_string();
    let StopError::Misplaced { saved, .. } = error else {
        panic!("{said}");
    };
    assert!(
        said.contains("another file is in its place; move that away"),
        "{said}"
    );
    assert!(said.contains(saved.to_str().unwrap()), "{said}");
    std::fs::remove_dir(root.database()).unwrap();
    std::fs::rename(saved, root.database()).unwrap();
    assert_eq!(uids(&root.open()), ["before"]);
}

#[tokio::test]
async fn a_stop_without_any_database_is_an_error() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 8);
    admit(&store, "before", 1).await.unwrap();
    let directory = root.database().parent().unwrap().to_owned();
    std::fs::remove_dir_all(&directory).unwrap();
    std::fs::write(&directory, "theirs").unwrap();

    let error = store.stop().await.unwrap_err();

    assert!(matches!(error, StopError::Lost { .. }), "{error}");
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
async fn the_last_plugin_of_a_resource_is_recorded() {
    let root = Root::new();
    let store = root.open();
    let connection = offer(&store, GPU, 2);
    offer(&store, "acme.com/nic", 2);
    let before = Moment(NOW.0 - 5);
    store.update(|node| node.connection_lost(connection, before));
    store.stop().await.unwrap();

    let store = root.open();

    let known = store.read(devlet_core::Node::known_resources);
    let last = |name: &str| known[name].clone().unwrap();
    assert_eq!(last(GPU).gone_since, before);
    assert!(
        last("acme.com/nic").gone_since >= NOW,
        "disconnected since the start"
    );
    assert_eq!(last("acme.com/nic").endpoint, "/run/plugin.sock");
}

#[tokio::test]
async fn a_new_plugin_is_flushed_asynchronously() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    let syncs = disk.syncs();

    let connection = offer(&store, GPU, 2);

    // The mirror is due in an hour.
    wait_for_resource(&store, GPU, |record| record["endpoint"] == "/run/plugin.sock").await;
    assert_eq!(disk.syncs(), syncs + 1);
    store.update(|node| node.connection_lost(connection, NOW));
    wait_for_resource(&store, GPU, |record| record["goneSince"] == NOW.0).await;
    assert_eq!(disk.syncs(), syncs + 2);
}

#[tokio::test]
async fn a_new_plugin_is_flushed_with_an_admission_without_another_sync() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    let syncs = disk.syncs();

    // The writer is held up until both changes are queued.
    disk.hold_syncs();
    let nothing = request("nothing", 0);
    let held = store.hold(&nothing, &Preferences::new()).unwrap().unwrap();
    let mut first = pin!(held.commit(&nothing, Vec::new()));
    assert!(start(&mut first).is_pending());
    disk.wait_for_a_sync();
    offer(&store, GPU, 2);
    let mut second = pin!(admit(&store, "a", 1));
    assert!(start(&mut second).is_pending());
    disk.release_syncs();
    first.await.unwrap();
    second.await.unwrap();

    let dump = store.dump().await.unwrap();
    assert_eq!(dump["resources"][GPU]["endpoint"], "/run/plugin.sock");
    assert_eq!(disk.syncs(), syncs + 2);
}

#[tokio::test]
async fn an_idle_resource_is_evicted() {
    let root = Root::new();
    let store = root.open();
    let long_ago = Moment(NOW.0 - EVICT_AFTER_MS);
    for (resource, since) in [("acme.com/old", long_ago), ("acme.com/new", NOW), (GPU, long_ago)] {
        let connection = offer(&store, resource, 2);
        if resource == GPU {
            admit(&store, "a", 1).await.unwrap();
        }
        store.update(|node| node.connection_lost(connection, since));
    }
    wait_for_resource(&store, "acme.com/old", serde_json::Value::is_null).await;
    store.stop().await.unwrap();

    let store = root.open();

    let known = store.read(devlet_core::Node::known_resources);
    let names: Vec<&str> = known.keys().map(devlet_core::ResourceName::as_str).collect();
    assert_eq!(
        names,
        [GPU, "acme.com/new"],
        "what is held, and what was left just now"
    );
    let dump = store.dump().await.unwrap();
    assert_eq!(dump["resources"].as_object().unwrap().len(), 2);
}

#[tokio::test]
async fn a_resource_from_a_file_is_evicted_unless_a_pod_holds_it() {
    let root = Root::new();
    let store = root.open();
    store.import(kubelet_file(&[]).as_bytes()).await.unwrap();
    let knows = |store: &Store| store.read(|node| node.known_resources().contains_key(GPU));
    assert!(knows(&store));
    store.stop().await.unwrap();

    let store = root.open();
    assert!(!knows(&store));
    wait_for_resource(&store, GPU, serde_json::Value::is_null).await;
    store
        .import(kubelet_file(&[("k", &["00"])]).as_bytes())
        .await
        .unwrap();
    store.stop().await.unwrap();
    assert!(knows(&root.open()));
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
