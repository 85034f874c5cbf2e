//! A connection to a running devlet.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::Status;

use crate::admission::Admission;
use crate::channel::Channel;
use crate::deadline::{Deadline, NoAnswer};
use crate::v1;
use crate::v1::devlet_client::DevletClient;
use crate::watch::Watch;

/// The largest message in either direction: lists of many devices, and whole state files, go in one.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// The pause before the next attempt when the socket's queue of connections is full.
const RETRY: Duration = Duration::from_millis(20);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no socket.
    #[error("devlet is not running: no socket at {}; start it with `devlet serve`", Places(.paths))]
    NotRunning {
        /// Where it should be.
        paths: Vec<PathBuf>,
    },
    /// There is a socket on which no process listens.
    #[error("devlet is not running: no process listens on {}; start it with `devlet serve`", path.display())]
    Stale {
        /// The socket.
        path: PathBuf,
    },
    /// The socket is not for this user.
    #[error(
        "you may not open {}: run this as the user that devlet runs as, as a member of the socket's group, or \
         as root",
        path.display()
    )]
    NotAllowed {
        /// The socket.
        path: PathBuf,
    },
    /// The process behind the socket accepts no connection.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// Something else is wrong with the socket.
    #[error("cannot connect to {}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The process behind the socket closed the connection at once.
    #[error(
        "devlet at {} has stopped before it answered, or this user has too many connections ({source}): see devlet's log",
        path.display()
    )]
    Transport {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        source: h2::Error,
    },
}

struct Places<'a>(&'a [PathBuf]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, path) in self.0.iter().enumerate() {
            let separator = if place == 0 { "" } else { " or " };
            write!(f, "{separator}{}", path.display())?;
        }
        Ok(())
    }
}

/// A connection to a running devlet. Clones share it.
#[derive(Debug, Clone)]
pub struct Client {
    inner: DevletClient<Channel>,
    channel: Channel,
    timeout: Option<Duration>,
}

macro_rules! calls {
    ($limit:ident: $($(#[$doc:meta])* $name:ident($request:ident) -> $answer:ty;)*) => {$(
        $(#[$doc])*
        pub async fn $name(&self, request: v1::$request) -> Result<$answer, Status> {
            let deadline = calls!(@$limit self, request);
            let mut inner = self.inner.clone();
            let answer = deadline.bound(inner.$name(request)).await?;
            Ok(answer.into_inner())
        }
    )*};
    (@reads $client:ident, $request:ident) => { $client.deadline_of_read() };
    (@waits $client:ident, $request:ident) => { $client.deadline_of_wait($request.wait_ms).await? };
    (@changes $client:ident, $request:ident) => { $client.deadline_of_wait(None).await? };
}

macro_rules! watches {
    ($($(#[$doc:meta])* $name:ident($request:ident) -> $answer:ident;)*) => {$(
        $(#[$doc])*
        pub async fn $name(&self, request: v1::$request) -> Result<Watch<v1::$answer>, Status> {
            let mut inner = self.inner.clone();
            let first = async { Watch::new(inner.$name(request).await?.into_inner()).await };
            let watch = self.deadline_of_read().bound(first).await?;
            Ok(match self.timeout {
                None => watch,
                Some(timeout) => watch.with_keepalive(self.channel.clone(), timeout),
            })
        }
    )*};
}

impl Client {
    /// Connects to the socket of a running devlet. Calls may take as long as devlet takes; see [`Client::with_timeout`].
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        Self::connect_until(path.as_ref(), Deadline::none(path.as_ref())).await
    }

    async fn connect_until(path: &Path, deadline: Deadline) -> Result<Self, ConnectError> {
        let stream = loop {
            match UnixStream::connect(path).await {
                Ok(stream) => break stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if deadline.is_past() {
                        return Err(deadline.passed().into());
                    }
                    tokio::time::sleep(RETRY).await;
                }
                Err(source) => return Err(failed(path.to_owned(), source)),
            }
        };
        // The connection is made once: behind the same path may be another devlet later.
        let channel = Channel::open(stream, path).await;
        let channel = channel.map_err(|source| ConnectError::Transport {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::new(channel))
    }

    /// Connects to the first socket on which a process listens, with a timeout for every call. See
    /// [`crate::locate::sockets`] and [`Client::with_timeout`].
    ///
    /// A process that listens and does not answer is an error, not a reason to try the next socket: the caller would
    /// talk to another devlet than usual.
    pub async fn connect_any(paths: &[PathBuf], timeout: Duration) -> Result<Self, ConnectError> {
        let mut problem = None;
        for path in paths {
            let deadline = Deadline::after(path, timeout);
            match Self::connect_until(path, deadline).await {
                Ok(client) => return Ok(client.with_timeout(timeout)),
                Err(ConnectError::NotRunning { .. }) => {}
                Err(error @ ConnectError::NoAnswer(_)) => return Err(error),
                // If no process listens on the other sockets either, this says more than that there are none.
                Err(error) => _ = problem.get_or_insert(error),
            }
        }
        let paths = paths.to_vec();
        Err(problem.unwrap_or(ConnectError::NotRunning { paths }))
    }

    /// A client on a channel of one's own.
    pub fn new(channel: Channel) -> Self {
        let inner = DevletClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self {
            inner,
            channel,
            timeout: None,
        }
    }

    /// The socket that it is connected to.
    pub fn path(&self) -> &Path {
        self.channel.path()
    }

    /// Bounds how long every call may take. A call that only reads may take as long as `timeout`, and so may the first
    /// message of a watch and the answers to its keepalive pings. A call that changes something may take as long as its `wait_ms`, or the wait that devlet is
    /// configured with, and `timeout` on top. After that it ends with a status whose source is [`NoAnswer`].
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    fn deadline_of_read(&self) -> Deadline {
        match self.timeout {
            None => Deadline::none(self.path()),
            Some(timeout) => Deadline::after(self.path(), timeout),
        }
    }

    async fn deadline_of_wait(&self, wait_ms: Option<u64>) -> Result<Deadline, Status> {
        let Some(timeout) = self.timeout else {
            return Ok(Deadline::none(self.path()));
        };
        let wait_ms = match wait_ms {
            Some(wait_ms) => wait_ms,
            None => self.status(v1::StatusRequest {}).await?.wait_ms,
        };
        let limit = Duration::from_millis(wait_ms).saturating_add(timeout);
        Ok(Deadline::after(self.path(), limit))
    }

    /// Admits a pod: any number of `waiting`, then `admitted`.
    pub async fn admit(&self, request: v1::AdmitRequest) -> Result<Admission, Status> {
        let deadline = self.deadline_of_wait(request.wait_ms).await?;
        let mut inner = self.inner.clone();
        let events = deadline.bound(inner.admit(request)).await?;
        Ok(Admission::new(events.into_inner(), deadline))
    }

    calls! { waits:
        /// What the runtime must add to a container that is about to start.
        start_container(StartContainerRequest) -> v1::StartContainerResponse;
        /// Removes a pod.
        remove_pod(RemovePodRequest) -> v1::RemovePodResponse;
    }

    calls! { changes:
        /// Gives up on drivers for a claim that no pod wants.
        abandon_claim(AbandonClaimRequest) -> v1::AbandonClaimResponse;
        /// Forgets a claim that was abandoned.
        forget_claim(ForgetClaimRequest) -> v1::ForgetClaimResponse;
        /// Takes over the pods of a kubelet's file.
        import(ImportRequest) -> v1::ImportResponse;
        /// Declares that a file that could not be read held nothing.
        forget(ForgetRequest) -> v1::ForgetResponse;
    }

    calls! { reads:
        /// All resources.
        list_resources(ListResourcesRequest) -> v1::ResourceList;
        /// All devices, or those of a resource.
        list_devices(ListDevicesRequest) -> v1::DeviceList;
        /// All connected plugins.
        list_plugins(ListPluginsRequest) -> v1::PluginList;
        /// All pods, or one.
        list_pods(ListPodsRequest) -> v1::PodList;
        /// All drivers, or one.
        list_drivers(ListDriversRequest) -> v1::DriverList;
        /// All claims, or those of a name.
        list_claims(ListClaimsRequest) -> v1::ClaimList;
        /// Whether a pod may still have to be unprepared.
        might_need_unprepare(MightNeedUnprepareRequest) -> v1::MightNeedUnprepareResponse;
        /// How devlet is doing.
        status(StatusRequest) -> v1::StatusResponse;
        /// All of the database.
        dump_state(DumpStateRequest) -> v1::DumpStateResponse;
    }

    watches! {
        /// All resources, now and after each change.
        watch_resources(ListResourcesRequest) -> ResourceList;
        /// All devices, now and after each change.
        watch_devices(ListDevicesRequest) -> DeviceList;
        /// All connected plugins, now and after each change.
        watch_plugins(ListPluginsRequest) -> PluginList;
        /// All pods, now and after each change.
        watch_pods(ListPodsRequest) -> PodList;
        /// All drivers, now and after each change.
        watch_drivers(ListDriversRequest) -> DriverList;
        /// All claims, now and after each change.
        watch_claims(ListClaimsRequest) -> ClaimList;
    }
}

fn failed(path: PathBuf, source: io::Error) -> ConnectError {
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            ConnectError::NotRunning { paths: vec![path] }
        }
        io::ErrorKind::ConnectionRefused => ConnectError::Stale { path },
        io::ErrorKind::PermissionDenied => ConnectError::NotAllowed { path },
        _ => ConnectError::Io { path, source },
    }
}
