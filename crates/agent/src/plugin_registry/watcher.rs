//! Lists the sockets below a directory, whenever they change.
//!
//! inotify only says that something changed; then everything is read again. So an overflow of its queue, an
//! event for a directory that is not watched yet, and the start are one and the same case. Hidden entries are
//! skipped, at every depth and at any time.
//!
//! The number of directories and sockets is limited. Those of root and of devlet's own user come first, so that others
//! cannot push them out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::inotify;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Maximum depth of directories. A kubelet has no limit; a loop of bind mounts has none either.
const DEEPEST: usize = 16;

/// Maximum directories that are watched.
const MOST_DIRECTORIES: usize = 1024;

/// Maximum sockets of root and devlet's own user, and of all others.
const MOST_SOCKETS: usize = 4096;

/// How often a directory that was deleted is looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// After a look, the next one waits so many times as long as it took, and between so long and so long: whoever makes
/// events without end is not looked after all the time.
const LEFT_TO_OTHERS: u32 = 9;
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
#[error("cannot watch {}: {problem}", directory.display())]
pub struct WatchError {
    /// The directory.
    pub directory: PathBuf,
    /// What the system says.
    pub problem: io::Error,
}

/// Tells a socket from another one that was made under the same name. Its mode may change meanwhile: plugins do that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// `None` where files do not know; then it is when they were changed.
    made: Option<SystemTime>,
    changed: Option<(i64, i64)>,
}

/// A socket that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket {
    pub(super) identity: Identity,
    /// The user that owns the file.
    pub(super) owner: u32,
    /// Whether that is root or devlet's own user.
    pub(super) is_trusted: bool,
}

/// The sockets below a directory at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub(super) sockets: BTreeMap<PathBuf, Socket>,
    /// Number of sockets over the limit.
    pub(super) skipped_sockets: usize,
    /// Number of directories over the limit, or too deep. Directories below those are not counted.
    pub(super) skipped_directories: usize,
}

/// A directory that is watched.
#[derive(Debug)]
pub struct Watcher {
    directory: PathBuf,
    own_uid: u32,
    inotify: Arc<OwnedFd>,
    /// Watch descriptors of the last scan.
    watches: BTreeSet<i32>,
    /// Whether the last scan could not watch all directories.
    is_incomplete: bool,
    /// When it is looked at again at the earliest.
    rests: Instant,
    last: Option<Listing>,
}

impl Watcher {
    /// Watches `directory`, which must exist. `own_uid` is the user that devlet runs as.
    pub fn new(directory: PathBuf, own_uid: u32) -> Result<Self, WatchError> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let start = || -> io::Result<OwnedFd> {
            std::fs::read_dir(&directory)?;
            Ok(inotify::init(flags)?)
        };
        match start() {
            Ok(inotify) => Ok(Self {
                directory,
                own_uid,
                inotify: Arc::new(inotify),
                watches: BTreeSet::new(),
                is_incomplete: false,
                rests: Instant::now(),
                last: None,
            }),
            Err(problem) => Err(WatchError { directory, problem }),
        }
    }

    /// Returns all sockets, as soon as they are other ones than last time. The first call returns at once.
    pub async fn changed(&mut self) -> Result<Listing, WatchError> {
        loop {
            tokio::time::sleep_until(self.rests).await;
            let failed = |problem| WatchError {
                directory: self.directory.clone(),
                problem,
            };
            self.forget_events().map_err(failed)?;
            let began = Instant::now();
            let (directory, inotify, own_uid) = (self.directory.clone(), self.inotify.clone(), self.own_uid);
            // A directory with many entries takes a while.
            let scan = tokio::task::spawn_blocking(move || Scan::of(&directory, &inotify, own_uid)).await;
            let scan = scan.map_err(|error| failed(io::Error::other(error)))?;
            let ended = Instant::now();
            self.rests = ended + ((ended - began) * LEFT_TO_OTHERS).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            for unused in self.watches.difference(&scan.watches) {
                // The kernel has removed those of directories that are gone.
                let _ = inotify::remove_watch(&*self.inotify, *unused);
            }
            self.watches = scan.watches;
            let is_incomplete = scan.watch_error.is_some();
            if let Some(error) = scan.watch_error.filter(|_| !self.is_incomplete) {
                tracing::warn!(directory = %self.directory.display(), %error, "directories are not watched, but read every second");
            }
            self.is_incomplete = is_incomplete;
            if self.last.as_ref() != Some(&scan.listing) {
                self.last = Some(scan.listing.clone());
                return Ok(scan.listing);
            }
            if scan.is_there && !is_incomplete {
                self.happened().await;
            } else {
                // No event reports a directory that is made again, or that is not watched.
                let _ = tokio::time::timeout(LOOK_AGAIN, self.happened()).await;
            }
        }
    }

    /// Until something happens. Nobody is woken by what happens later, until this is asked again. Where the system cannot
    /// tell, it is time to look in a moment.
    async fn happened(&self) {
        // Its successor is unsafe for types whose descriptor may change; this one has the same for life.
        #[allow(deprecated)]
        let ready = AsyncFd::with_interest(self.inotify.as_fd(), Interest::READABLE);
        let happened = match &ready {
            Ok(ready) => ready.readable().await.map(drop),
            Err(error) => Err(error.kind().into()),
        };
        if let Err(error) = happened {
            tracing::warn!(directory = %self.directory.display(), %error, "directory is looked at every second");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// What happened does not matter.
    fn forget_events(&self) -> io::Result<()> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        loop {
            match rustix::io::read(&*self.inotify, &mut buffer[..]) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// One reading of the whole tree.
#[derive(Debug, Default)]
struct Scan {
    listing: Listing,
    /// Whether the directory itself exists.
    is_there: bool,
    watches: BTreeSet<i32>,
    /// Why a directory is not watched.
    watch_error: Option<io::Error>,
    /// Directories that are still to be read, with their depth: those of trusted owners, and others.
    trusted: VecDeque<(PathBuf, usize)>,
    others: VecDeque<(PathBuf, usize)>,
}

impl Scan {
    /// Reads the tree breadth first. Entries come and go meanwhile: those that have gone are skipped.
    fn of(directory: &Path, inotify: &OwnedFd, own_uid: u32) -> Self {
        let mut scan = Self::default();
        scan.trusted.push_back((directory.to_owned(), 0));
        let (mut read, mut sockets) = (0, [0, 0]);
        loop {
            let (next, is_trusted) = match scan.trusted.pop_front() {
                Some(next) => (next, true),
                None => match scan.others.pop_front() {
                    Some(next) => (next, false),
                    None => return scan,
                },
            };
            if read == MOST_DIRECTORIES {
                scan.listing.skipped_directories += 1 + scan.trusted.len() + scan.others.len();
                return scan;
            }
            read += 1;
            let (path, depth) = next;
            let is_there = scan.read(&path, depth, is_trusted, inotify, own_uid, &mut sockets);
            scan.is_there |= depth == 0 && is_there;
        }
    }

    /// Reads one directory. Returns whether it exists.
    fn read(
        &mut self,
        directory: &Path,
        depth: usize,
        is_trusted: bool,
        inotify: &OwnedFd,
        own_uid: u32,
        sockets: &mut [usize; 2],
    ) -> bool {
        // The watch is set before the directory is read, so that no change falls in between.
        self.watch(directory, inotify);
        let Ok(entries) = std::fs::read_dir(directory) else {
            return false;
        };
        for entry in entries.flatten() {
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            // Not through links, so that devlet is not made to dial elsewhere.
            let kind = entry.file_type();
            if hidden || !kind.is_ok_and(|kind| kind.is_dir() || kind.is_socket()) {
                continue;
            }
            let Ok(about) = entry.metadata() else { continue };
            let owner = about.uid();
            let is_owned = owner == 0 || owner == own_uid;
            if about.is_dir() {
                // Inside a directory of another user, that user decides what there is.
                let queue = match is_trusted && is_owned {
                    true => &mut self.trusted,
                    false => &mut self.others,
                };
                if depth < DEEPEST && queue.len() < MOST_DIRECTORIES {
                    queue.push_back((entry.path(), depth + 1));
                } else {
                    self.listing.skipped_directories += 1;
                }
            } else if about.file_type().is_socket() {
                let count = &mut sockets[usize::from(is_owned)];
                if *count == MOST_SOCKETS {
                    self.listing.skipped_sockets += 1;
                    continue;
                }
                *count += 1;
                let made = about.created().ok();
                let identity = Identity {
                    device: about.dev(),
                    inode: about.ino(),
                    made,
                    changed: made.is_none().then(|| (about.ctime(), about.ctime_nsec())),
                };
                let socket = Socket {
                    identity,
                    owner,
                    is_trusted: is_owned,
                };
                self.listing.sockets.insert(entry.path(), socket);
            }
        }
        true
    }

    fn watch(&mut self, directory: &Path, inotify: &OwnedFd) {
        use inotify::WatchFlags;
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        match inotify::add_watch(inotify, directory, flags) {
            Ok(watch) => _ = self.watches.insert(watch),
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => self.watch_error = Some(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
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
    async fn sockets_that_are_there_at_the_start_are_found_at_every_depth() {
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
    async fn sockets_that_come_go_and_are_made_anew_are_told() {
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
    async fn a_socket_whose_mode_changes_is_the_same_one() {
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
    async fn sockets_in_a_directory_that_is_made_later_are_found() {
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
        for number in 0..MOST_DIRECTORIES + 10 {
            std::fs::create_dir(root.path().join(format!("{number}"))).unwrap();
        }
        let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();
        let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
        let found = watcher.changed().await.unwrap();
        assert_eq!(paths(&found, root.path()), ["x.sock"]);
        // The directory itself counts, too.
        assert_eq!(found.skipped_directories, 11);
        assert_eq!(watcher.watches.len(), MOST_DIRECTORIES);

        let root = tempfile::tempdir().unwrap();
        let deepest = root.path().join(["d"; DEEPEST].join("/"));
        std::fs::create_dir_all(deepest.join("e/f")).unwrap();
        let _sockets =
            [&deepest, &deepest.join("e")].map(|directory| UnixListener::bind(directory.join("x.sock")));
        let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
        let found = watcher.changed().await.unwrap();
        assert_eq!((found.sockets.len(), found.skipped_directories), (1, 1));
    }

    #[tokio::test]
    async fn watches_of_directories_that_left_are_removed() {
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
    async fn hidden_entries_are_passed_over_at_every_depth_and_at_any_time() {
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
        // What a plugin makes under a hidden name is found once it has its real one.
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
        assert!(looked.is_pending(), "there is nothing yet");
        // A witness has a queue of its own, of the same length, and gets fewer events.
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let witness = inotify::init(flags).unwrap();
        let flags = inotify::WatchFlags::CREATE | inotify::WatchFlags::DELETE;
        inotify::add_watch(&witness, root.path(), flags).unwrap();
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        // Nobody reads meanwhile. Events that are alike are merged, so they alternate.
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

    // A kubelet keeps such a plugin for ever.
    #[tokio::test]
    async fn a_socket_that_is_renamed_away_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let _socket = UnixListener::bind(root.path().join("x.sock")).unwrap();
        let mut watcher = Watcher::new(root.path().to_owned(), own_uid()).unwrap();
        assert_eq!(watcher.changed().await.unwrap().sockets.len(), 1);
        std::fs::rename(root.path().join("x.sock"), elsewhere.path().join("x.sock")).unwrap();
        assert!(watcher.changed().await.unwrap().sockets.is_empty());
    }

    #[tokio::test]
    async fn a_directory_that_is_deleted_or_moved_away_and_made_anew_is_watched_again() {
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
            let made_anew = async {
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
            let (_socket, found) = tokio::join!(made_anew, found);
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
}
