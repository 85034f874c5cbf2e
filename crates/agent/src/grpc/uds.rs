//! Unix sockets: listening, dialling, and who is at the other end.
//!
//! A socket appears at its path with its final mode and already listening: it is bound under a name of its own
//! and then linked. The socket of a live process is never replaced; a stale one is taken away first, and
//! checked again once no other process can reach it. A socket that disappears is made again in the same way: the server runs
//! a `SocketCheck` from time to time, and a [`Published`] tells whether the socket can be dialled. Checks and removals
//! run on threads of their own, because the disk may hang.
//!
//! One dial is one connection. A [`Dialed`] channel never reconnects, because behind the same path may be
//! another process by then; once the connection is gone, calls fail with `UNAVAILABLE` and [`Gone`] completes.
//! The path is opened once, and what was checked (a socket, no symbolic link, its owner) is what is connected
//! to.
//!
//! Keepalive pings are off: grpc-go servers answer them with GOAWAY. Calls need deadlines of their own.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use devlet_client::channel::Channel;
use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::chatter::{Chatter, Hearing};
use super::severable::Severable;
use crate::metrics::Metrics;

/// The longest path that peers can dial: `sun_path` without its final zero.
pub const PATH_LIMIT: usize = 107;

/// The mode of a socket unless there is a reason for another: its owner and group may connect.
pub const DEFAULT_MODE: u32 = 0o660;

/// Directories are for us and our group.
pub const DIRECTORY_MODE: u32 = 0o750;

const BACKLOG: i32 = 1024;

/// How often, and after which pause, a turn is asked for: a second in all.
const TURN_TRIES: u32 = 500;
const TURN_PAUSE: Duration = Duration::from_millis(2);
/// Longest wait for the removal of a socket. After that a thread goes on with it.
const REMOVAL_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for the disk to tell whether a socket is in place.
const STAT_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(5);
const LAST_RETRY: Duration = Duration::from_millis(250);

/// The process at the other end of a socket, as the kernel knows it.
///
/// On the accepting side it is the process that connected, on the dialling side the one that listens. In
/// handlers it is the connect info: `request.extensions().get::<PeerCred>()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerCred {
    pub uid: u32,
    pub gid: u32,
    /// `None` for a process that is not visible from here, such as one outside our PID namespace.
    pub pid: Option<i32>,
}

impl PeerCred {
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        Ok(Self {
            uid: cred.uid(),
            gid: cred.gid(),
            pid: cred.pid().filter(|&pid| pid != 0),
        })
    }
}

impl fmt::Display for PeerCred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid {pid}, uid {}", self.uid),
            None => write!(f, "uid {}", self.uid),
        }
    }
}

/// Why a path cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Peers could not dial it.
    #[error("socket path {} has {length} bytes, {PATH_LIMIT} are possible: use a shorter directory", path.display())]
    PathTooLong { path: PathBuf, length: usize },
    /// The path does not end in a file name.
    #[error("{} does not name a socket: add a file name", path.display())]
    NoName { path: PathBuf },
    /// A live process answers there.
    #[error("another process ({}) is listening on {}: stop it first", peer.map_or_else(|| "not identified".to_owned(), |peer| peer.to_string()), path.display())]
    InUse { path: PathBuf, peer: Option<PeerCred> },
    /// Something else is in the way, and is left alone.
    #[error("{} exists and is not a socket: remove it, or choose another path", path.display())]
    NotASocket { path: PathBuf },
    /// Others keep putting sockets there.
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

type Admission = dyn Fn(&PeerCred) -> bool + Send + Sync;

/// A listening socket, removed from its path when dropped.
pub struct Listener {
    bound: Bound,
    path: PathBuf,
    mode: u32,
    admission: Arc<Admission>,
    standing: watch::Sender<Standing>,
}

/// A socket at its path, removed from there when dropped.
struct Bound {
    inner: UnixListener,
    directory: Arc<OwnedFd>,
    name: OsString,
    identity: Identity,
}

/// How it stands with a socket.
#[derive(Debug, Clone)]
struct Standing {
    /// Of the one that we listen on.
    identity: Identity,
    /// Why it could not be made again.
    problem: Option<String>,
}

/// Tells whether a socket of ours can be dialled.
#[derive(Debug, Clone)]
pub struct Published {
    path: PathBuf,
    standing: watch::Receiver<Standing>,
}

/// Nobody can dial a socket that we listen on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the socket {} is gone, {}", path.display(), .problem.as_ref().map_or_else(
    || "and is made again in a moment".to_owned(),
    |problem| format!("and cannot be made again: {problem}")
))]
pub struct Unreachable {
    /// Where it was.
    pub path: PathBuf,
    /// Why it cannot be made again; nothing if that was not tried yet.
    pub problem: Option<String>,
}

impl Published {
    /// Checks whether the path still leads to our socket, on a thread of its own: the disk may hang.
    pub async fn check(&self) -> Result<(), Unreachable> {
        let path = self.path.clone();
        let found = tokio::task::spawn_blocking(move || at(&path));
        let found = tokio::time::timeout(STAT_TIMEOUT, found).await;
        let standing = self.standing.borrow();
        let problem = match found {
            Ok(Ok(Ok(identity))) if identity == standing.identity => return Ok(()),
            Ok(_) => standing.problem.clone(),
            Err(_) => Some("the disk does not answer".to_owned()),
        };
        Err(Unreachable {
            path: self.path.clone(),
            problem,
        })
    }
}

/// Tells one file from another, whatever it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
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

/// Listens on `path` with exactly `mode`.
///
/// Needs a tokio runtime. Stale sockets are replaced, those of live processes never.
pub fn listen(path: impl AsRef<Path>, mode: u32) -> Result<Listener, ListenError> {
    let path = path.as_ref();
    let bound = bind(path, mode)?;
    let standing = Standing {
        identity: bound.identity,
        problem: None,
    };
    Ok(Listener {
        bound,
        path: path.to_owned(),
        mode,
        admission: Arc::new(|_| true),
        standing: watch::Sender::new(standing),
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

    let hidden = Hidden::new(&directory);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(failed("create a socket"))?;
    // By way of the directory's descriptor, so that the length of its path does not matter.
    let bound = reachable(&directory).join(&hidden.name);
    let address = SocketAddrUnix::new(bound).map_err(failed("name a socket"))?;
    rustix::net::bind(&socket, &address).map_err(failed("bind a socket"))?;
    // Nobody can connect before `listen`, so that no mode but the final one is ever of use to anybody.
    rustix::fs::chmodat(
        &directory,
        &hidden.name,
        Mode::from_raw_mode(mode),
        AtFlags::empty(),
    )
    .map_err(failed("set the mode"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
    let identity = identity(&directory, &hidden.name).map_err(failed("look at the socket"))?;
    publish(path, &directory, &hidden.name, name)?;

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
    drop(hidden);
    Ok(Bound {
        inner,
        directory: Arc::new(directory),
        name: name.to_owned(),
        identity,
    })
}

/// One at a time takes stale sockets away in a directory: while one that was put in place meanwhile is being put back, nobody
/// else may take its place. Held until it is dropped. Whoever keeps it from us for long keeps us from nothing else.
fn turn(directory: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let turn = rustix::fs::openat(directory, ".", flags, Mode::empty()).ok()?;
    for _ in 0..TURN_TRIES {
        match rustix::fs::flock(&turn, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(turn),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(TURN_PAUSE),
            Err(_) => return None,
        }
    }
    None
}

/// Gives the socket its real name once no live process has it.
fn publish(path: &Path, directory: &OwnedFd, hidden: &OsStr, name: &OsStr) -> Result<(), ListenError> {
    let failed = |step| {
        move |problem: Errno| ListenError::Io {
            path: path.to_owned(),
            step,
            problem: problem.into(),
        }
    };
    let _turn = turn(directory);
    // Each round loses against somebody who was faster.
    for _ in 0..16 {
        match rustix::fs::linkat(directory, hidden, directory, name, AtFlags::empty()) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("publish the socket")(error)),
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
        let aside = Hidden::new(directory);
        match rustix::fs::renameat(directory, name, directory, &aside.name) {
            Ok(()) => {}
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(failed("take the stale socket away")(error)),
        }
        if identity(directory, &aside.name) != Ok(stale) {
            // Replaced since the probe: it goes back, unless its place is taken again.
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
    match rustix::net::connect(&socket, &SocketAddrUnix::new(reachable(&file))?) {
        Ok(()) => {
            let stream = UnixStream::from_std(socket.into());
            Ok(Probe::Live(stream.and_then(|stream| PeerCred::of(&stream)).ok()))
        }
        // A full backlog, or a socket that is not for streams: somebody is there.
        Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(Probe::Live(None)),
        Err(Errno::CONNREFUSED) => Ok(Probe::Stale(stat.into())),
        Err(error) => Err(error),
    }
}

/// A path to an open file, short enough for any socket address.
fn reachable(file: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn at(path: &Path) -> Result<Identity, Errno> {
    rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map(Identity::from)
}

fn identity(directory: &OwnedFd, name: &OsStr) -> Result<Identity, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map(Identity::from)
}

fn remove_if_same(directory: &OwnedFd, name: &OsStr, expected: Identity) {
    if identity(directory, name) == Ok(expected) {
        // If it fails the socket stays behind as a stale one, which the next `listen` replaces.
        let _ = rustix::fs::unlinkat(directory, name, AtFlags::empty());
    }
}

/// A name for a file that is on its way in or out; the file is removed when dropped.
struct Hidden<'a> {
    directory: &'a OwnedFd,
    name: OsString,
}

impl<'a> Hidden<'a> {
    /// The name is unique among processes, and begins with a dot: plugin watchers pass over it.
    fn new(directory: &'a OwnedFd) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".devlet-{}-{number}", std::process::id()).into();
        // A process with our number may have died half way.
        let _ = rustix::fs::unlinkat(directory, &name, AtFlags::empty());
        Self { directory, name }
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        // Gone already, or not ours to remove; neither can be helped.
        let _ = rustix::fs::unlinkat(self.directory, &self.name, AtFlags::empty());
    }
}

impl Listener {
    /// Drops peers for whom `admission` is false as soon as they are accepted, before a byte is read.
    pub fn admit(mut self, admission: impl Fn(&PeerCred) -> bool + Send + Sync + 'static) -> Self {
        self.admission = Arc::new(admission);
        self
    }

    /// Where peers dial.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// To be asked whether peers can dial it.
    pub fn published(&self) -> Published {
        Published {
            path: self.path.clone(),
            standing: self.standing.subscribe(),
        }
    }

    /// Returns the check whether the socket is still at its path.
    pub(super) fn check(&self) -> SocketCheck {
        SocketCheck {
            path: self.path.clone(),
            mode: self.mode,
            identity: self.bound.identity,
        }
    }

    /// Listens on the socket that a check made, if it made one. Accepted connections stay. Returns whether peers can dial the
    /// socket.
    pub(super) fn apply(&mut self, checked: Checked) -> bool {
        match checked.0 {
            Ok(None) => true,
            Ok(Some(bound)) => {
                tracing::warn!(socket = %self.path.display(), "the socket was gone and is made again");
                self.bound = bound;
                self.standing.send_replace(Standing {
                    identity: self.bound.identity,
                    problem: None,
                });
                true
            }
            Err(error) => {
                let problem = Some(error.to_string());
                self.standing.send_if_modified(|standing| {
                    let is_new = standing.problem != problem;
                    if is_new {
                        tracing::error!(socket = %self.path.display(), %error, "the socket is gone and cannot be made again");
                        standing.problem = problem;
                    }
                    is_new
                });
                false
            }
        }
    }

    pub(super) fn socket(&self) -> &UnixListener {
        &self.bound.inner
    }

    pub(super) fn admits(&self, peer: &PeerCred) -> bool {
        (self.admission)(peer)
    }
}

/// A check whether a socket is still at its path.
pub(super) struct SocketCheck {
    path: PathBuf,
    mode: u32,
    identity: Identity,
}

/// Result of a [`SocketCheck`]: the new socket, if the old one was gone.
pub(super) struct Checked(Result<Option<Bound>, ListenError>);

impl SocketCheck {
    /// Makes the socket again if it is gone. Another file at its path stays, unless it is a socket without a listener.
    ///
    /// Calls the file system, so it may hang. Needs a tokio runtime.
    pub(super) fn run(self) -> Checked {
        // The listener keeps the old socket open, so no other file gets its inode.
        if at(&self.path) == Ok(self.identity) {
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

/// Why a socket cannot be dialled.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Until the deadline.
    #[error("no socket at {}: is its process running?", path.display())]
    Missing { path: PathBuf },
    /// Sockets are dialled where they are said to be.
    #[error("{} is a symbolic link: name the socket itself", path.display())]
    Symlink { path: PathBuf },
    /// Something else is there.
    #[error("{} is not a socket", path.display())]
    NotASocket { path: PathBuf },
    /// Until the deadline: the process that made the socket has ended, or does not listen yet.
    #[error("nobody listens on {}: has its process ended?", path.display())]
    Refused { path: PathBuf },
    /// The process listens, and accepted nobody until the deadline.
    #[error("the process at {} did not accept the connection in time", path.display())]
    TimedOut { path: PathBuf },
    /// Longer than any path can be.
    #[error("socket path has {length} bytes, which no file can have")]
    PathTooLong { length: usize },
    /// The system refused.
    #[error("cannot dial {}: {problem}", path.display())]
    Io { path: PathBuf, problem: io::Error },
}

/// A connection to a peer. With the last clone it is cut, at once: a peer that does not read cannot be told goodbye, and
/// would keep it.
#[derive(Debug, Clone)]
pub struct Dialed {
    /// For generated clients, which need the size of the largest message that is expected.
    pub channel: Channel,
    /// Who listens.
    pub peer: PeerCred,
    /// The user who owns the socket file.
    pub owner: u32,
    gone: Gone,
    cut: CancellationToken,
    _end: Arc<DropGuard>,
}

impl Dialed {
    /// Completes when the connection has ended.
    pub fn gone(&self) -> Gone {
        self.gone.clone()
    }

    /// Ends the connection at once, with every call that is under way.
    pub fn hang_up(&self) {
        self.cut.cancel();
    }
}

/// Tells that a connection has ended, to everyone who asks and at any time.
#[derive(Debug, Clone)]
pub struct Gone(CancellationToken);

impl Gone {
    /// Returns once the connection has ended, also if that was long ago.
    pub async fn wait(&self) {
        self.0.cancelled().await;
    }

    /// Whether the connection has ended.
    pub fn is_gone(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// Connects to the process that listens on `path`, and waits for it to do so until `deadline`.
///
/// Dropping the future gives up.
pub async fn connect(path: impl AsRef<Path>, deadline: Instant) -> Result<Dialed, DialError> {
    // As good as all of it.
    let hearing = Hearing {
        frames_per_second: u32::MAX,
        metrics: Metrics::default(),
    };
    connect_to_hear(path, deadline, &hearing).await
}

/// The same, with a limit to how much the process may say besides its answers.
pub(crate) async fn connect_to_hear(
    path: impl AsRef<Path>,
    deadline: Instant,
    hearing: &Hearing,
) -> Result<Dialed, DialError> {
    let path = path.as_ref();
    open(path, dial(path, deadline).await?, hearing).await
}

/// As [`connect_to_hear`], but fails at once if no process accepts connections.
pub(crate) async fn connect_once_to_hear(
    path: &Path,
    deadline: Instant,
    hearing: &Hearing,
) -> Result<Dialed, DialError> {
    let connected = tokio::time::timeout_at(deadline, attempt(path)).await;
    let connected = connected.map_err(|_| DialError::TimedOut {
        path: path.to_owned(),
    });
    open(path, connected??, hearing).await
}

/// Speaks HTTP/2 on a connection to a socket of this owner.
async fn open(
    path: &Path,
    (stream, owner): (UnixStream, u32),
    hearing: &Hearing,
) -> Result<Dialed, DialError> {
    let failed = |problem| DialError::Io {
        path: path.to_owned(),
        problem,
    };
    let peer = PeerCred::of(&stream).map_err(failed)?;
    let (cut, gone) = (CancellationToken::new(), CancellationToken::new());
    let chatter = Chatter::dialed(&peer, hearing);
    let stream = Severable::new(stream, cut.clone(), gone.clone(), chatter);
    let opened = Channel::open(stream, path).await;
    let channel = opened.map_err(|error| failed(io::Error::other(error)))?;
    Ok(Dialed {
        channel,
        peer,
        owner,
        gone: Gone(gone),
        _end: Arc::new(cut.clone().drop_guard()),
        cut,
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
    match UnixStream::connect(reachable(&file)).await {
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
