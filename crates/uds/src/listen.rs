//! Listening on a unix socket, and keeping it at its path.
//!
//! The socket of a live process is never replaced; see `publish.rs`. If a socket disappears from its path, the server makes it again:
//! it runs a `SocketCheck` from time to time, and a [`SocketHandle`] tells whether peers can dial the socket.
//! Checks and removals run on threads of their own, because the disk may hang.

use std::ffi::OsString;
use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;
use tokio::sync::watch;

use crate::peer::PeerCred;
use crate::publish::{
    Identity, ListenError, PATH_LIMIT, TempName, identity, identity_at, proc_fd_path, publish, remove_if_same,
};

/// Usual mode of a socket: its owner and group may connect.
pub const DEFAULT_MODE: u32 = 0o660;

/// Mode of a directory of sockets: its owner and group may enter.
pub const DIRECTORY_MODE: u32 = 0o750;

const BACKLOG: i32 = 1024;

/// Longest wait for the removal of a socket. After that a thread continues it.
const REMOVAL_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for the check whether a socket is in place.
const STAT_TIMEOUT: Duration = Duration::from_secs(1);

type Filter = dyn Fn(&PeerCred) -> bool + Send + Sync;

/// A listening socket, removed from its path when dropped.
pub struct Listener {
    bound: Bound,
    path: PathBuf,
    mode: u32,
    admission: Arc<Filter>,
    state: watch::Sender<SocketState>,
}

/// A socket at its path, removed from there when dropped.
struct Bound {
    inner: UnixListener,
    directory: Arc<OwnedFd>,
    name: OsString,
    identity: Identity,
}

/// State of a listening socket.
#[derive(Debug, Clone)]
struct SocketState {
    /// Of the socket that the listener has open.
    identity: Identity,
    /// Why the last attempt to make the socket again failed.
    problem: Option<String>,
}

/// Handle of a listening socket that tells whether peers can dial it.
#[derive(Debug, Clone)]
pub struct SocketHandle {
    path: PathBuf,
    state: watch::Receiver<SocketState>,
}

/// Error: a listening socket is no longer at its path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the socket {} is gone, {}", path.display(), .problem.as_ref().map_or_else(
    || "and is made again in a moment".to_owned(),
    |problem| format!("and cannot be made again: {problem}")
))]
pub struct SocketMissing {
    pub path: PathBuf,
    /// Why it cannot be made again; `None` before the first attempt.
    pub problem: Option<String>,
}

impl SocketHandle {
    /// Returns an error if the path no longer leads to the socket. Runs on a thread of its own: the disk may hang.
    pub async fn check(&self) -> Result<(), SocketMissing> {
        let path = self.path.clone();
        let found = tokio::task::spawn_blocking(move || identity_at(&path));
        let found = tokio::time::timeout(STAT_TIMEOUT, found).await;
        let state = self.state.borrow();
        let problem = match found {
            Ok(Ok(Ok(identity))) if identity == state.identity => return Ok(()),
            Ok(_) => state.problem.clone(),
            Err(_) => Some("the disk does not answer".to_owned()),
        };
        Err(SocketMissing {
            path: self.path.clone(),
            problem,
        })
    }
}

/// Listens on `path` with exactly `mode`.
///
/// Needs a tokio runtime. Stale sockets are replaced, those of live processes never.
pub fn listen(path: impl AsRef<Path>, mode: u32) -> Result<Listener, ListenError> {
    let path = path.as_ref();
    let bound = bind(path, mode)?;
    let state = SocketState {
        identity: bound.identity,
        problem: None,
    };
    Ok(Listener {
        bound,
        path: path.to_owned(),
        mode,
        admission: Arc::new(|_| true),
        state: watch::Sender::new(state),
    })
}

fn bind(path: &Path, mode: u32) -> Result<Bound, ListenError> {
    let length = path.as_os_str().len();
    if length > PATH_LIMIT {
        return Err(ListenError::PathTooLong {
            path: path.to_owned(),
            length,
        });
    }
    let ends_in_name = !path.as_os_str().as_bytes().ends_with(b"/");
    let Some(name) = path.file_name().filter(|_| ends_in_name) else {
        return Err(ListenError::NoName {
            path: path.to_owned(),
        });
    };
    let failed = |step| {
        move |problem: Errno| ListenError::Io {
            path: path.to_owned(),
            step,
            problem: problem.into(),
        }
    };
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags, Mode::empty()).map_err(failed("open the directory"))?;

    let temporary = TempName::new(&directory);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(failed("create a socket"))?;
    // Through the directory's descriptor, so that the length of its path does not matter.
    let bound = proc_fd_path(&directory).join(&temporary.name);
    let address = SocketAddrUnix::new(bound).map_err(failed("name a socket"))?;
    rustix::net::bind(&socket, &address).map_err(failed("bind a socket"))?;
    // Peers cannot connect before `listen`, so they never see another mode.
    rustix::fs::chmodat(
        &directory,
        &temporary.name,
        Mode::from_raw_mode(mode),
        AtFlags::empty(),
    )
    .map_err(failed("set the mode"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
    let identity = identity(&directory, &temporary.name).map_err(failed("look at the socket"))?;
    publish(path, &directory, &temporary.name, name)?;

    let inner = UnixListener::from_std(socket.into()).map_err(|problem| ListenError::Io {
        path: path.to_owned(),
        step: "watch the socket",
        problem,
    });
    let inner = match inner {
        Ok(inner) => inner,
        Err(error) => {
            remove_if_same(&directory, name, identity);
            return Err(error);
        }
    };
    drop(temporary);
    Ok(Bound {
        inner,
        directory: Arc::new(directory),
        name: name.to_owned(),
        identity,
    })
}

impl Listener {
    /// Drops peers for which `admission` returns `false` as soon as they are accepted, before a byte is read.
    pub fn admit(mut self, admission: impl Fn(&PeerCred) -> bool + Send + Sync + 'static) -> Self {
        self.admission = Arc::new(admission);
        self
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a handle that tells whether peers can dial the socket.
    pub fn handle(&self) -> SocketHandle {
        SocketHandle {
            path: self.path.clone(),
            state: self.state.subscribe(),
        }
    }

    /// Returns the check whether the socket is still at its path.
    pub(crate) fn check(&self) -> SocketCheck {
        SocketCheck {
            path: self.path.clone(),
            mode: self.mode,
            identity: self.bound.identity,
        }
    }

    /// Listens on the socket that a check made, if it made one. Accepted connections stay. Returns `true` if peers can dial
    /// the socket.
    pub(crate) fn ensure_published(&mut self, checked: Checked) -> bool {
        match checked.0 {
            Ok(None) => true,
            Ok(Some(bound)) => {
                tracing::warn!(socket = %self.path.display(), "missing socket created again");
                self.bound = bound;
                self.state.send_replace(SocketState {
                    identity: self.bound.identity,
                    problem: None,
                });
                true
            }
            Err(error) => {
                let problem = Some(error.to_string());
                self.state.send_if_modified(|state| {
                    let is_new = state.problem != problem;
                    if is_new {
                        tracing::error!(socket = %self.path.display(), %error, "missing socket not created again");
                        state.problem = problem;
                    }
                    is_new
                });
                false
            }
        }
    }

    pub(crate) fn socket(&self) -> &UnixListener {
        &self.bound.inner
    }

    pub(crate) fn admits(&self, peer: &PeerCred) -> bool {
        (self.admission)(peer)
    }
}

/// A check whether a socket is still at its path.
pub(crate) struct SocketCheck {
    path: PathBuf,
    mode: u32,
    identity: Identity,
}

/// Result of a [`SocketCheck`]: the new socket, if the old one was gone.
pub(crate) struct Checked(Result<Option<Bound>, ListenError>);

impl SocketCheck {
    /// Makes the socket again if it is gone. Another file at its path stays, unless it is a socket without a listener.
    ///
    /// Calls the file system, so it may hang. Needs a tokio runtime.
    pub(crate) fn run(self) -> Checked {
        // The listener keeps the old socket open, so no other file gets its inode.
        if identity_at(&self.path) == Ok(self.identity) {
            return Checked(Ok(None));
        }
        // The directory may have been removed as well.
        if let Some(directory) = self.path.parent() {
            let _ = std::fs::DirBuilder::new().mode(DIRECTORY_MODE).create(directory);
        }
        Checked(bind(&self.path, self.mode).map(Some))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // As long as the socket is open, no other file gets its inode.
        let open = self.inner.as_fd().try_clone_to_owned();
        let (directory, name, identity) = (Arc::clone(&self.directory), self.name.clone(), self.identity);
        let (done, removed) = mpsc::channel::<()>();
        let started = std::thread::Builder::new()
            .name("socket-removal".into())
            .spawn(move || {
                remove_if_same(&directory, &name, identity);
                drop((open, done));
            });
        // Without a thread the socket stays behind as a stale one, which the next `listen` replaces.
        if started.is_ok() && removed.recv_timeout(REMOVAL_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!(name = %self.name.display(), "socket not removed yet: the disk does not answer");
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}
