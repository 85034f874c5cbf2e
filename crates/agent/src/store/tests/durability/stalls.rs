//! Disks that do not answer.

use super::*;

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
