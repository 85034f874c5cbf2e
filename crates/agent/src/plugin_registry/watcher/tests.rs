//! Tests of the watcher on real directories.

use std::os::unix::net::UnixListener;

use super::*;

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn paths(listing: &Listing, root: &Path) -> Vec<String> {
    let relative = |path: &PathBuf| path.strip_prefix(root).unwrap().display().to_string();
    listing.sockets.keys().map(relative).collect()
}

// TestPluginRegistrationAtKubeletStart
#[tokio::test]
async fn existing_sockets_are_found_at_every_depth() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("a/b")).unwrap();
    let _sockets: Vec<UnixListener> = ["x.sock", "a/y.sock", "a/b/z.sock", ".hidden.sock"]
        .map(|name| UnixListener::bind(root.path().join(name)).unwrap())
        .into();
    std::fs::write(root.path().join("file"), "").unwrap();
    std::os::unix::fs::symlink(root.path().join("x.sock"), root.path().join("link.sock")).unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    let found = watcher.changed().await.unwrap();
    assert_eq!(paths(&found, root.path()), ["a/b/z.sock", "a/y.sock", "x.sock"]);
}

// TestPluginRegistration, TestPluginReRegistration
#[tokio::test]
async fn created_removed_and_recreated_sockets_are_reported() {
    let root = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
    let path = root.path().join("x.sock");

    let first = UnixListener::bind(&path).unwrap();
    let one = watcher.changed().await.unwrap();
    assert_eq!(one.sockets.len(), 1);

    std::fs::remove_file(&path).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
    let second = UnixListener::bind(&path).unwrap();
    let two = watcher.changed().await.unwrap();
    assert_ne!(one.sockets[&path].identity, two.sockets[&path].identity);
    drop((first, second));
}

#[tokio::test]
async fn a_socket_with_a_new_mode_keeps_its_identity() {
    let root = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    watcher.changed().await.unwrap();
    let path = root.path().join("x.sock");
    let _socket = UnixListener::bind(&path).unwrap();
    let before = watcher.changed().await.unwrap();
    if std::fs::symlink_metadata(&path).unwrap().created().is_err() {
        return;
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&path, mode).unwrap();
    let _other = UnixListener::bind(root.path().join("y.sock")).unwrap();
    let after = watcher.changed().await.unwrap();
    assert_eq!(before.sockets[&path].identity, after.sockets[&path].identity);
}

#[tokio::test]
async fn sockets_in_a_new_directory_are_found() {
    let root = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    watcher.changed().await.unwrap();
    std::fs::create_dir_all(root.path().join("a/b")).unwrap();
    let _socket = UnixListener::bind(root.path().join("a/b/x.sock")).unwrap();
    let found = watcher.changed().await.unwrap();
    assert_eq!(paths(&found, root.path()), ["a/b/x.sock"]);
}

#[tokio::test]
async fn the_number_and_the_depth_of_directories_are_limited() {
    let root = tempfile::tempdir().unwrap();
    for number in 0..MAX_DIRECTORIES + 10 {
        std::fs::create_dir(root.path().join(format!("{number}"))).unwrap();
    }
    let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    let found = watcher.changed().await.unwrap();
    assert_eq!(paths(&found, root.path()), ["x.sock"]);
    // The directory itself is counted.
    assert_eq!(found.skipped_directories, 11);
    assert_eq!(watcher.watches.len(), MAX_DIRECTORIES);

    let root = tempfile::tempdir().unwrap();
    let deepest = root.path().join(["d"; MAX_DEPTH].join("/"));
    std::fs::create_dir_all(deepest.join("e/f")).unwrap();
    let _sockets =
        [&deepest, &deepest.join("e")].map(|directory| UnixListener::bind(directory.join("x.sock")));
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    let found = watcher.changed().await.unwrap();
    assert_eq!((found.sockets.len(), found.skipped_directories), (1, 1));
}

#[tokio::test]
async fn watches_of_removed_directories_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("a")).unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    watcher.changed().await.unwrap();
    assert_eq!(watcher.watches.len(), 2);
    std::fs::rename(root.path().join("a"), elsewhere.path().join("a")).unwrap();
    let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();
    watcher.changed().await.unwrap();
    assert_eq!(watcher.watches.len(), 1);
}

#[tokio::test]
async fn hidden_entries_are_skipped_at_every_depth_and_at_any_time() {
    let root = tempfile::tempdir().unwrap();
    let bind = |path: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        UnixListener::bind(path).unwrap()
    };
    let _early = [".x.sock", ".a/x.sock", "b/.x.sock", "b/.c/d/x.sock"].map(bind);
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
    let _late = [".y.sock", ".a/y.sock", "b/.y.sock", "e/.f/y.sock"].map(bind);
    let _seen = bind("b/z.sock");
    assert_eq!(
        paths(&watcher.changed().await.unwrap(), root.path()),
        ["b/z.sock"]
    );
    // A socket that is created under a hidden name is found after it is renamed.
    std::fs::rename(root.path().join("b/.y.sock"), root.path().join("b/y.sock")).unwrap();
    let found = watcher.changed().await.unwrap();
    assert_eq!(paths(&found, root.path()), ["b/y.sock", "b/z.sock"]);
}

#[tokio::test]
async fn a_socket_whose_event_is_lost_in_an_overflow_is_found() {
    let root = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
    let mut next = std::pin::pin!(watcher.changed());
    let looked = std::future::poll_fn(|cx| std::task::Poll::Ready(next.as_mut().poll(cx))).await;
    assert!(looked.is_pending(), "the directory is empty");
    // The witness has its own queue of the same length, and gets fewer events.
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let witness = inotify::init(flags).unwrap();
    let flags = inotify::WatchFlags::CREATE | inotify::WatchFlags::DELETE;
    inotify::add_watch(&witness, root.path(), flags).unwrap();
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    // The events are not read meanwhile. Equal events in a row are merged, so they alternate.
    for _ in 0..=limit / 2 {
        std::fs::write(root.path().join("file"), "").unwrap();
        std::fs::remove_file(root.path().join("file")).unwrap();
    }
    let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();

    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&witness, &mut buffer);
    let mut overflown = false;
    while let Ok(event) = events.next() {
        assert_ne!(event.file_name(), Some(c"x.sock"), "the event is not lost");
        overflown |= event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW);
    }
    assert!(overflown);
    let found = tokio::time::timeout(Duration::from_secs(60), next).await;
    assert_eq!(paths(&found.unwrap().unwrap(), root.path()), ["x.sock"]);
}

// A kubelet never removes such a plugin.
#[tokio::test]
async fn a_socket_that_is_moved_away_is_not_listed() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();
    let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
    assert_eq!(watcher.changed().await.unwrap().sockets.len(), 1);
    std::fs::rename(root.path().join("x.sock"), elsewhere.path().join("x.sock")).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
}

#[tokio::test]
async fn a_directory_that_is_deleted_or_moved_and_created_again_is_watched() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("registry");
    std::fs::create_dir(&directory).unwrap();
    let mut watcher = Watcher::new(directory.clone(), own_uid()).unwrap();
    assert!(watcher.changed().await.unwrap().sockets.is_empty());
    for moved in [false, true] {
        match moved {
            false => std::fs::remove_dir_all(&directory).unwrap(),
            true => std::fs::rename(&directory, root.path().join("elsewhere")).unwrap(),
        }
        let create_again = async {
            tokio::task::yield_now().await;
            std::fs::create_dir(&directory).unwrap();
            UnixListener::bind(directory.join("x.sock")).unwrap()
        };
        let found = async {
            loop {
                let found = watcher.changed().await.unwrap();
                if !found.sockets.is_empty() {
                    return found;
                }
            }
        };
        let (_socket, found) = tokio::join!(create_again, found);
        assert_eq!(paths(&found, &directory), ["x.sock"]);
    }
}

#[test]
fn a_directory_that_does_not_exist_is_an_error() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    let error = Watcher::new("/does/not/exist".into(), own_uid()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot watch /does/not/exist: No such file or directory (os error 2)"
    );
}
