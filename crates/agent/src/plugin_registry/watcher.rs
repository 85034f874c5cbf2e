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
mod tests;
