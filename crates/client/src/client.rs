//! A connection to a running devlet.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::{Code, Status};

use crate::admission::Admission;
use crate::channel::Channel;
use crate::deadline::{Deadline, NoAnswer};
use crate::shield_v1::shield_client::ShieldClient;
use crate::v1::devlet_client::DevletClient;
use crate::watch::Watch;
use crate::{shield_v1, v1};

/// Maximum message size in bytes, in both directions. Lists of many devices and whole state files are single messages.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Pause between attempts while the socket's queue of connections is full.
const RETRY: Duration = Duration::from_millis(20);

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no socket.
    #[error("devlet is not running: no socket at {}; start it with `devlet serve`", Places(.paths))]
    NotRunning {
        /// The expected paths.
        paths: Vec<PathBuf>,
    },
    /// There is a socket on which no process listens.
    #[error("devlet is not running: no process listens on {}; start it with `devlet serve`", path.display())]
    Stale { path: PathBuf },
    /// This user may not open the socket.
    #[error(
        "you may not open {}: run this as the user that devlet runs as, as a member of the socket's group, or \
         as root",
        path.display()
    )]
    NotAllowed { path: PathBuf },
    /// The process behind the socket does not accept the connection.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// Any other error of the socket.
    #[error("cannot connect to {}: {source}", path.display())]
    Io {
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The process behind the socket closed the connection at once.
    #[error(
        "devlet at {} has stopped before it answered, or this user has too many connections ({source}): see devlet's log",
        path.display()
    )]
    Transport {
        path: PathBuf,
        /// The error of the HTTP/2 connection.
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
    /// Connects to the socket of a running devlet, without timeouts for calls; see [`Client::with_timeout`].
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
        // Connect only once: later, another devlet may be at this path.
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
    /// A process that listens and does not answer is an error. The next socket is not tried, because the caller would
    /// use another devlet than usual.
    pub async fn connect_any(paths: &[PathBuf], timeout: Duration) -> Result<Self, ConnectError> {
        let mut problem = None;
        for path in paths {
            let deadline = Deadline::after(path, timeout);
            match Self::connect_until(path, deadline).await {
                Ok(client) => return Ok(client.with_timeout(timeout)),
                Err(ConnectError::NotRunning { .. }) => {}
                Err(error @ ConnectError::NoAnswer(_)) => return Err(error),
                // If no process listens on the other sockets either, this error is the most specific one.
                Err(error) => _ = problem.get_or_insert(error),
            }
        }
        let paths = paths.to_vec();
        Err(problem.unwrap_or(ConnectError::NotRunning { paths }))
    }

    /// Creates a client on an existing channel.
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

    /// Returns the path of the connected socket.
    pub fn path(&self) -> &Path {
        self.channel.path()
    }

    /// Sets a timeout for every call. It applies to a call that only reads, to the first message of a watch, and to the
    /// answers to the watch's keepalive pings. A call that changes state may take its `wait_ms`, or the wait that devlet
    /// is configured with, plus `timeout`. After that it ends with a status with [`NoAnswer`] as its source.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Returns what devlet knows about the kubelet beside it, and all leases; `None` if it does not stand beside one.
    pub async fn shield(&self) -> Result<Option<shield_v1::StateResponse>, Status> {
        let client = ShieldClient::new(self.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_MESSAGE_BYTES);
        let state = client.state(shield_v1::StateRequest {});
        match self.deadline_of_read().bound(state).await {
            Ok(state) => Ok(Some(state.into_inner())),
            // An older devlet does not have the service.
            Err(status) if matches!(status.code(), Code::FailedPrecondition | Code::Unimplemented) => {
                Ok(None)
            }
            Err(status) => Err(status),
        }
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
        /// Returns the changes that the runtime must make to a container before it starts.
        start_container(StartContainerRequest) -> v1::StartContainerResponse;
        /// Removes a pod.
        remove_pod(RemovePodRequest) -> v1::RemovePodResponse;
    }

    calls! { changes:
        /// Stops waiting for drivers for a claim that no pod uses.
        abandon_claim(AbandonClaimRequest) -> v1::AbandonClaimResponse;
        /// Deletes an abandoned claim.
        forget_claim(ForgetClaimRequest) -> v1::ForgetClaimResponse;
        /// Adopts the pods or claims of a kubelet's file.
        import(ImportRequest) -> v1::ImportResponse;
        /// Declares that an unreadable file held nothing.
        forget(ForgetRequest) -> v1::ForgetResponse;
    }

    calls! { reads:
        /// Lists all resources.
        list_resources(ListResourcesRequest) -> v1::ResourceList;
        /// Lists all devices, or those of a resource.
        list_devices(ListDevicesRequest) -> v1::DeviceList;
        /// Lists all plugins.
        list_plugins(ListPluginsRequest) -> v1::PluginList;
        /// Lists all pods, or one.
        list_pods(ListPodsRequest) -> v1::PodList;
        /// Lists all drivers, or one.
        list_drivers(ListDriversRequest) -> v1::DriverList;
        /// Lists all claims, or those of a name.
        list_claims(ListClaimsRequest) -> v1::ClaimList;
        /// Lists all ResourceSlices, or those of a driver.
        list_slices(ListSlicesRequest) -> v1::SliceList;
        /// Returns `true` if a pod may still have to be unprepared.
        might_need_unprepare(MightNeedUnprepareRequest) -> v1::MightNeedUnprepareResponse;
        /// Returns the state of devlet.
        status(StatusRequest) -> v1::StatusResponse;
        /// Returns the whole database.
        dump_state(DumpStateRequest) -> v1::DumpStateResponse;
    }

    watches! {
        /// Lists all resources, now and after each change.
        watch_resources(ListResourcesRequest) -> ResourceList;
        /// Lists all devices, now and after each change.
        watch_devices(ListDevicesRequest) -> DeviceList;
        /// Lists all plugins, now and after each change.
        watch_plugins(ListPluginsRequest) -> PluginList;
        /// Lists all pods, now and after each change.
        watch_pods(ListPodsRequest) -> PodList;
        /// Lists all drivers, now and after each change.
        watch_drivers(ListDriversRequest) -> DriverList;
        /// Lists all claims, now and after each change.
        watch_claims(ListClaimsRequest) -> ClaimList;
        /// Lists all ResourceSlices, now and after each change.
        watch_slices(ListSlicesRequest) -> SliceList;
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
