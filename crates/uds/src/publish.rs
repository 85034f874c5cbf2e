//! Putting a socket at its path: it appears there with its final mode and already listening.
//!
//! The socket is bound under a temporary name and then linked. The socket of a live process is never replaced. A stale
//! one is renamed first, and checked again once no other process can reach it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixStream;

use crate::peer::PeerCred;

/// Maximum bytes of a path that peers can dial: `sun_path` without its final zero.
pub const PATH_LIMIT: usize = 107;

/// Attempts to lock a directory, and the pause between two of them: one second in all.
const LOCK_TRIES: u32 = 500;
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Error of [`listen`](crate::listen).
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Peers cannot dial a path of this length.
    #[error("socket path {} has {length} bytes, {PATH_LIMIT} are possible: use a shorter directory", path.display())]
    PathTooLong { path: PathBuf, length: usize },
    /// The path does not end in a file name.
    #[error("{} does not name a socket: add a file name", path.display())]
    NoName { path: PathBuf },
    /// A live process listens there.
    #[error("another process ({}) is listening on {}: stop it first", peer.map_or_else(|| "not identified".to_owned(), |peer| peer.to_string()), path.display())]
    InUse { path: PathBuf, peer: Option<PeerCred> },
    /// Another kind of file is there; it is not touched.
    #[error("{} exists and is not a socket: remove it, or choose another path", path.display())]
    NotASocket { path: PathBuf },
    /// Other processes keep creating sockets there.
    #[error("the socket at {} keeps changing: is another process starting there?", path.display())]
    Contended { path: PathBuf },
    /// The system refused a step.
    #[error("cannot {step} for {}: {problem}", path.display())]
    Io {
        path: PathBuf,
        step: &'static str,
        problem: io::Error,
    },
}

/// Identity of a file, whatever its name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl From<Stat> for Identity {
    // The types differ between architectures.
    #[allow(clippy::useless_conversion)]
    fn from(stat: Stat) -> Self {
        Self {
            device: stat.st_dev.into(),
            inode: stat.st_ino.into(),
        }
    }
}

/// Locks the directory while a stale socket is replaced; gives up after one second, since the lock is advisory.
///
/// The lock is released when the descriptor is dropped.
fn lock_directory(directory: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = rustix::fs::openat(directory, ".", flags, Mode::empty()).ok()?;
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(lock),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            Err(_) => return None,
        }
    }
    None
}

/// Gives the socket its real name, unless a live process has a socket there.
pub(crate) fn publish(
    path: &Path,
    directory: &OwnedFd,
    temporary: &OsStr,
    name: &OsStr,
) -> Result<(), ListenError> {
    let failed = |step| {
        move |problem: Errno| ListenError::Io {
            path: path.to_owned(),
            step,
            problem: problem.into(),
        }
    };
    let mut lock = None;
    // A round fails if another process was faster.
    for _ in 0..16 {
        match rustix::fs::linkat(directory, temporary, directory, name, AtFlags::empty()) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("publish the socket")(error)),
        }
        if lock.is_none() {
            lock = lock_directory(directory);
        }
        let stale = match probe(directory, name) {
            Ok(Probe::Absent) => continue,
            Ok(Probe::NotASocket) => {
                return Err(ListenError::NotASocket {
                    path: path.to_owned(),
                });
            }
            Ok(Probe::Live(peer)) => {
                return Err(ListenError::InUse {
                    path: path.to_owned(),
                    peer,
                });
            }
            Ok(Probe::Stale(identity)) => identity,
            Err(error) => return Err(failed("probe the socket")(error)),
        };
        let aside = TempName::new(directory);
        match rustix::fs::renameat(directory, name, directory, &aside.name) {
            Ok(()) => {}
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(failed("take the stale socket away")(error)),
        }
        if identity(directory, &aside.name) != Ok(stale) {
            // Another process replaced it since the probe: it goes back, unless the name is in use again.
            match rustix::fs::linkat(directory, &aside.name, directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(failed("put the socket of another process back")(error)),
            }
        }
    }
    Err(ListenError::Contended {
        path: path.to_owned(),
    })
}

enum Probe {
    Absent,
    NotASocket,
    Stale(Identity),
    Live(Option<PeerCred>),
}

fn probe(directory: &OwnedFd, name: &OsStr) -> Result<Probe, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(Probe::Absent),
        Err(error) => return Err(error),
    };
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Ok(Probe::NotASocket);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(proc_fd_path(&file))?) {
        Ok(()) => {
            let stream = UnixStream::from_std(socket.into());
            Ok(Probe::Live(stream.and_then(|stream| PeerCred::of(&stream)).ok()))
        }
        // A full backlog, or a socket of another type: a process listens.
        Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(Probe::Live(None)),
        Err(Errno::CONNREFUSED) => Ok(Probe::Stale(stat.into())),
        Err(error) => Err(error),
    }
}

/// Returns a path to an open file that is short enough for any socket address.
pub(crate) fn proc_fd_path(file: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Returns the identity of the file at `path`.
pub(crate) fn identity_at(path: &Path) -> Result<Identity, Errno> {
    rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map(Identity::from)
}

pub(crate) fn identity(directory: &OwnedFd, name: &OsStr) -> Result<Identity, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map(Identity::from)
}

pub(crate) fn remove_if_same(directory: &OwnedFd, name: &OsStr, expected: Identity) {
    if identity(directory, name) == Ok(expected) {
        // On failure the socket stays behind as a stale one, which the next `listen` replaces.
        let _ = rustix::fs::unlinkat(directory, name, AtFlags::empty());
    }
}

/// Temporary name of a socket; the file is removed when this is dropped.
pub(crate) struct TempName<'a> {
    directory: &'a OwnedFd,
    pub(crate) name: OsString,
}

impl<'a> TempName<'a> {
    /// The name is unique among processes, and begins with a dot: plugin watchers ignore it.
    pub(crate) fn new(directory: &'a OwnedFd) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".devlet-{}-{number}", std::process::id()).into();
        // A process with the same pid may have left the file behind.
        let _ = rustix::fs::unlinkat(directory, &name, AtFlags::empty());
        Self { directory, name }
    }
}

impl Drop for TempName<'_> {
    fn drop(&mut self) {
        // On failure the file stays; the next process with this pid removes it.
        let _ = rustix::fs::unlinkat(self.directory, &self.name, AtFlags::empty());
    }
}
