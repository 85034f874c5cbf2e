//! Dialling a unix socket.
//!
//! One dial is one connection. A [`PeerConnection`] never reconnects, because another process may be behind the same path
//! by then. Once the connection has ended, calls fail with `UNAVAILABLE` and [`ClosedSignal`] completes. The path is
//! opened once: the file that was checked (a socket, not a symbolic link, its owner) is the one that is connected to.
//!
//! Keepalive pings are off: grpc-go servers answer them with GOAWAY. Calls need deadlines of their own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::abortable::Abortable;
use crate::channel::Channel;
use crate::peer::PeerCred;
use crate::publish::proc_fd_path;
use crate::read_limit::{ReadLimits, ReadThrottle};

/// Short: a socket exists for a moment before its process listens.
const FIRST_RETRY: Duration = Duration::from_millis(1);
const LAST_RETRY: Duration = Duration::from_millis(250);

/// Error of [`connect`].
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No file is at the path until the deadline.
    #[error("no socket at {}: is its process running?", path.display())]
    Missing { path: PathBuf },
    /// Symbolic links are not followed.
    #[error("{} is a symbolic link: name the socket itself", path.display())]
    Symlink { path: PathBuf },
    /// Another kind of file is there.
    #[error("{} is not a socket", path.display())]
    NotASocket { path: PathBuf },
    /// No process listens until the deadline: the one that made the socket has ended, or does not listen yet.
    #[error("no process is listening on {}: start its process", path.display())]
    Refused { path: PathBuf },
    /// The process listens, but did not accept the connection until the deadline.
    #[error("the process at {} did not accept the connection in time", path.display())]
    TimedOut { path: PathBuf },
    /// Longer than any path can be.
    #[error("socket path has {length} bytes, which no file can have")]
    PathTooLong { length: usize },
    /// A system call failed.
    #[error("cannot dial {}: {problem}", path.display())]
    Io { path: PathBuf, problem: io::Error },
}

/// A connection to a peer. Dropping the last clone aborts it at once: a GOAWAY would not reach a peer that does not read.
#[derive(Debug, Clone)]
pub struct PeerConnection {
    /// For generated clients. They need the maximum size of a message.
    pub channel: Channel,
    /// The process that listens.
    pub peer: PeerCred,
    /// Uid of the owner of the socket file.
    pub owner: u32,
    closed: ClosedSignal,
    abort: CancellationToken,
    _abort_on_drop: Arc<DropGuard>,
}

impl PeerConnection {
    /// Returns a signal that completes when the connection has ended.
    pub fn closed(&self) -> ClosedSignal {
        self.closed.clone()
    }

    /// Aborts the connection with every call in flight.
    pub fn close(&self) {
        self.abort.cancel();
    }
}

/// Completes when a connection has ended.
#[derive(Debug, Clone)]
pub struct ClosedSignal(CancellationToken);

impl ClosedSignal {
    /// Waits for the end of the connection; returns at once if it has ended.
    pub async fn wait(&self) {
        self.0.cancelled().await;
    }

    /// Returns `true` if the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// Connects to the process that listens on `path`; waits for the process until `deadline`.
pub async fn connect(path: impl AsRef<Path>, deadline: Instant) -> Result<PeerConnection, DialError> {
    let path = path.as_ref();
    open(path, dial(path, deadline).await?, None).await
}

/// Connects as [`connect`] does, and limits the bytes that the process may send besides its answers.
pub async fn connect_limited(
    path: impl AsRef<Path>,
    deadline: Instant,
    limits: &ReadLimits,
) -> Result<PeerConnection, DialError> {
    let path = path.as_ref();
    open(path, dial(path, deadline).await?, Some(limits)).await
}

/// Connects as [`connect_limited`] does, but fails at once if no process accepts connections.
pub async fn connect_once_limited(
    path: &Path,
    deadline: Instant,
    limits: &ReadLimits,
) -> Result<PeerConnection, DialError> {
    let connected = tokio::time::timeout_at(deadline, attempt(path)).await;
    let connected = connected.map_err(|_| DialError::TimedOut {
        path: path.to_owned(),
    });
    open(path, connected??, Some(limits)).await
}

/// Starts HTTP/2 on a connection to a socket of this owner.
async fn open(
    path: &Path,
    (stream, owner): (UnixStream, u32),
    limits: Option<&ReadLimits>,
) -> Result<PeerConnection, DialError> {
    let failed = |problem| DialError::Io {
        path: path.to_owned(),
        problem,
    };
    let peer = PeerCred::of(&stream).map_err(failed)?;
    let (abort, closed) = (CancellationToken::new(), CancellationToken::new());
    let limit = limits.map(|limits| limits.for_connection(&peer));
    let throttle = limit.clone().map(ReadThrottle::new);
    let stream = Abortable::new(stream, abort.clone(), closed.clone(), throttle);
    let opened = Channel::open_limited(stream, path, limit).await;
    let channel = opened.map_err(|error| failed(io::Error::other(error)))?;
    Ok(PeerConnection {
        channel,
        peer,
        owner,
        closed: ClosedSignal(closed),
        _abort_on_drop: Arc::new(abort.clone().drop_guard()),
        abort,
    })
}

async fn dial(path: &Path, deadline: Instant) -> Result<(UnixStream, u32), DialError> {
    let mut pause = FIRST_RETRY;
    loop {
        let error = match tokio::time::timeout_at(deadline, attempt(path)).await {
            Ok(Ok(connected)) => return Ok(connected),
            Ok(Err(error)) => error,
            Err(_) => {
                return Err(DialError::TimedOut {
                    path: path.to_owned(),
                });
            }
        };
        let may_pass = matches!(
            error,
            DialError::Missing { .. } | DialError::Refused { .. } | DialError::TimedOut { .. }
        );
        if !may_pass || Instant::now() + pause >= deadline {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

async fn attempt(path: &Path) -> Result<(UnixStream, u32), DialError> {
    let owned = || path.to_owned();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => DialError::Missing { path: owned() },
        Errno::NAMETOOLONG => DialError::PathTooLong {
            length: path.as_os_str().len(),
        },
        error => DialError::Io {
            path: owned(),
            problem: error.into(),
        },
    })?;
    let stat = rustix::fs::fstat(&file).map_err(|error| DialError::Io {
        path: owned(),
        problem: error.into(),
    })?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Socket => {}
        FileType::Symlink => return Err(DialError::Symlink { path: owned() }),
        _ => return Err(DialError::NotASocket { path: owned() }),
    }
    match UnixStream::connect(proc_fd_path(&file)).await {
        Ok(stream) => Ok((stream, stat.st_uid)),
        Err(error) => Err(match error.kind() {
            io::ErrorKind::ConnectionRefused => DialError::Refused { path: owned() },
            // The backlog is full.
            io::ErrorKind::WouldBlock => DialError::TimedOut { path: owned() },
            _ => DialError::Io {
                path: owned(),
                problem: error,
            },
        }),
    }
}
