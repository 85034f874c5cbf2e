//! Lists the sockets below a directory, whenever they change.
//!
//! Each inotify event causes a scan of the whole tree, and its content is ignored. So an overflow of the queue, a new
//! directory without a watch, and the start need no code of their own. Hidden entries are skipped at every depth.
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

/// Maximum depth of directories: a loop of bind mounts is infinitely deep. A kubelet does not limit it.
const MAX_DEPTH: usize = 16;

/// Maximum directories that are watched.
const MAX_DIRECTORIES: usize = 1024;

/// Maximum sockets of root and devlet's own user together, and of all others together.
const MAX_SOCKETS: usize = 4096;

/// Interval of scans of a directory that was deleted or cannot be watched.
const RESCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between scans, as a multiple of the scan time. It limits the CPU time that endless events use.
const PAUSE_FACTOR: u32 = 9;
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
#[error("cannot watch {}: {problem}", directory.display())]
pub struct WatchError {
    pub directory: PathBuf,
    pub problem: io::Error,
}

/// Identifies a socket among those that were created under the same name. It stays when a plugin changes the mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// `None` if the file system does not record it; then `changed` is used.
    created: Option<SystemTime>,
    changed: Option<(i64, i64)>,
}

/// A socket of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket {
    pub(super) identity: Identity,
    /// The user that owns the file.
    pub(super) owner: u32,
    /// The owner is root or devlet's own user.
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

/// Watches a directory tree.
#[derive(Debug)]
pub struct Watcher {
    directory: PathBuf,
    own_uid: u32,
    inotify: Arc<OwnedFd>,
    /// Watch descriptors of the last scan.
    watches: BTreeSet<i32>,
    /// The last scan could not watch all directories.
    is_incomplete: bool,
    /// Earliest time of the next scan.
    next_scan: Instant,
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
                next_scan: Instant::now(),
                last: None,
            }),
            Err(problem) => Err(WatchError { directory, problem }),
        }
    }

    /// Returns all sockets once they differ from the last call. The first call returns at once.
    pub async fn changed(&mut self) -> Result<Listing, WatchError> {
        loop {
            tokio::time::sleep_until(self.next_scan).await;
            let failed = |problem| WatchError {
                directory: self.directory.clone(),
                problem,
            };
            self.discard_events().map_err(failed)?;
            let began = Instant::now();
            let (directory, inotify, own_uid) = (self.directory.clone(), self.inotify.clone(), self.own_uid);
            // A directory with many entries takes a while.
            let scan = tokio::task::spawn_blocking(move || Scan::of(&directory, &inotify, own_uid)).await;
            let scan = scan.map_err(|error| failed(io::Error::other(error)))?;
            let ended = Instant::now();
            self.next_scan = ended + ((ended - began) * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE);
            for unused in self.watches.difference(&scan.watches) {
                // The kernel has removed those of directories that are gone.
                let _ = inotify::remove_watch(&*self.inotify, *unused);
            }
            self.watches = scan.watches;
            let is_incomplete = scan.watch_error.is_some();
            if let Some(error) = scan.watch_error.filter(|_| !self.is_incomplete) {
                tracing::warn!(directory = %self.directory.display(), %error, "directories not watched, scanned every second");
            }
            self.is_incomplete = is_incomplete;
            if self.last.as_ref() != Some(&scan.listing) {
                self.last = Some(scan.listing.clone());
                return Ok(scan.listing);
            }
            if scan.exists && !is_incomplete {
                self.event().await;
            } else {
                // No event reports a directory that is made again, or that is not watched.
                let _ = tokio::time::timeout(RESCAN_INTERVAL, self.event()).await;
            }
        }
    }

    /// Waits for an event. If the system cannot report events, waits for [`RESCAN_INTERVAL`].
    async fn event(&self) {
        // Its successor is unsafe, because the descriptor of a type may change. This descriptor does not.
        #[allow(deprecated)]
        let ready = AsyncFd::with_interest(self.inotify.as_fd(), Interest::READABLE);
        let event = match &ready {
            Ok(ready) => ready.readable().await.map(drop),
            Err(error) => Err(error.kind().into()),
        };
        if let Err(error) = event {
            tracing::warn!(directory = %self.directory.display(), %error, "inotify failed, directory scanned every second");
            tokio::time::sleep(RESCAN_INTERVAL).await;
        }
    }

    /// Reads all queued events, without a look at them.
    fn discard_events(&self) -> io::Result<()> {
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

/// A scan of the whole tree.
#[derive(Debug, Default)]
struct Scan {
    listing: Listing,
    /// The directory itself exists.
    exists: bool,
    watches: BTreeSet<i32>,
    /// Why a directory is not watched.
    watch_error: Option<io::Error>,
    /// Unread directories of trusted owners, with their depth.
    trusted: VecDeque<(PathBuf, usize)>,
    /// Unread directories of other owners, with their depth.
    others: VecDeque<(PathBuf, usize)>,
}

impl Scan {
    /// Reads the tree breadth first. Entries that disappear during the scan are skipped.
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
            if read == MAX_DIRECTORIES {
                scan.listing.skipped_directories += 1 + scan.trusted.len() + scan.others.len();
                return scan;
            }
            read += 1;
            let (path, depth) = next;
            let exists = scan.read(&path, depth, is_trusted, inotify, own_uid, &mut sockets);
            scan.exists |= depth == 0 && exists;
        }
    }

    /// Reads one directory. Returns `true` if it exists.
    fn read(
        &mut self,
        directory: &Path,
        depth: usize,
        is_trusted: bool,
        inotify: &OwnedFd,
        own_uid: u32,
        sockets: &mut [usize; 2],
    ) -> bool {
        // The watch is set before the directory is read, so that no change is missed.
        self.watch(directory, inotify);
        let Ok(entries) = std::fs::read_dir(directory) else {
            return false;
        };
        for entry in entries.flatten() {
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            // Links are not followed: they could make devlet dial sockets elsewhere.
            let kind = entry.file_type();
            if hidden || !kind.is_ok_and(|kind| kind.is_dir() || kind.is_socket()) {
                continue;
            }
            let Ok(about) = entry.metadata() else { continue };
            let owner = about.uid();
            let is_owned = owner == 0 || owner == own_uid;
            if about.is_dir() {
                // The owner of a directory controls its content, also if root owns the entries.
                let queue = match is_trusted && is_owned {
                    true => &mut self.trusted,
                    false => &mut self.others,
                };
                if depth < MAX_DEPTH && queue.len() < MAX_DIRECTORIES {
                    queue.push_back((entry.path(), depth + 1));
                } else {
                    self.listing.skipped_directories += 1;
                }
            } else if about.file_type().is_socket() {
                let count = &mut sockets[usize::from(is_owned)];
                if *count == MAX_SOCKETS {
                    self.listing.skipped_sockets += 1;
                    continue;
                }
                *count += 1;
                let created = about.created().ok();
                let identity = Identity {
                    device: about.dev(),
                    inode: about.ino(),
                    created,
                    changed: created.is_none().then(|| (about.ctime(), about.ctime_nsec())),
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
mod tests;
