//! Databases that are removed or replaced while a store is open.

use super::*;

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
