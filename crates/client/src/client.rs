//! A connection to a running devlet.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;
use tonic::{Status, Streaming};

use crate::admission::Admission;
use crate::channel::Channel;
use crate::v1;
use crate::v1::devlet_client::DevletClient;

/// The largest message in either direction: lists of many devices, and whole state files, go in one.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no socket.
    #[error("devlet is not running: no socket at {}; start it with `devlet serve`", Places(.paths))]
    NotRunning {
        /// Where it should be.
        paths: Vec<PathBuf>,
    },
    /// There is a socket, and nobody behind it.
    #[error("devlet is not running: nobody answers at {}; start it with `devlet serve`", path.display())]
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
    /// Something else is wrong with the socket.
    #[error("cannot connect to {}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Whoever answers does not speak gRPC.
    #[error("{} does not answer as devlet does: {source}", path.display())]
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
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($request:ident) -> $answer:ty;)*) => {$(
        $(#[$doc])*
        pub async fn $name(&self, request: v1::$request) -> Result<$answer, Status> {
            Ok(self.inner.clone().$name(request).await?.into_inner())
        }
    )*};
}

impl Client {
    /// Connects to the socket of a running devlet.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let path = path.as_ref().to_owned();
        let stream = match UnixStream::connect(&path).await {
            Ok(stream) => stream,
            Err(source) => return Err(failed(path, source)),
        };
        // The connection is made once: behind the same path may be another devlet later.
        match Channel::open(stream, &path).await {
            Ok(channel) => Ok(Self::new(channel)),
            Err(source) => Err(ConnectError::Transport { path, source }),
        }
    }

    /// Connects to the first socket behind which somebody is. See [`crate::locate::sockets`].
    pub async fn connect_any(paths: &[PathBuf]) -> Result<Self, ConnectError> {
        let mut problem = None;
        for path in paths {
            match Self::connect(path).await {
                Ok(client) => return Ok(client),
                Err(ConnectError::NotRunning { .. }) => {}
                // Nobody may be at the next one either; then this says more.
                Err(error) => _ = problem.get_or_insert(error),
            }
        }
        let paths = paths.to_vec();
        Err(problem.unwrap_or(ConnectError::NotRunning { paths }))
    }

    /// A client on a channel of one's own.
    pub fn new(channel: Channel) -> Self {
        let inner = DevletClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self { inner }
    }

    /// Admits a pod: any number of `waiting`, then `admitted`.
    pub async fn admit(&self, request: v1::AdmitRequest) -> Result<Admission, Status> {
        let events = self.inner.clone().admit(request).await?;
        Ok(Admission::new(events.into_inner()))
    }

    calls! {
        /// What the runtime must add to a container that is about to start.
        start_container(StartContainerRequest) -> v1::StartContainerResponse;
        /// Removes a pod.
        remove_pod(RemovePodRequest) -> v1::RemovePodResponse;
        /// Gives up on drivers for a claim that no pod wants.
        abandon_claim(AbandonClaimRequest) -> v1::AbandonClaimResponse;
        /// Forgets a claim that was abandoned.
        forget_claim(ForgetClaimRequest) -> v1::ForgetClaimResponse;
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
        /// All resources, now and after each change.
        watch_resources(ListResourcesRequest) -> Streaming<v1::ResourceList>;
        /// All devices, now and after each change.
        watch_devices(ListDevicesRequest) -> Streaming<v1::DeviceList>;
        /// All connected plugins, now and after each change.
        watch_plugins(ListPluginsRequest) -> Streaming<v1::PluginList>;
        /// All pods, now and after each change.
        watch_pods(ListPodsRequest) -> Streaming<v1::PodList>;
        /// All drivers, now and after each change.
        watch_drivers(ListDriversRequest) -> Streaming<v1::DriverList>;
        /// All claims, now and after each change.
        watch_claims(ListClaimsRequest) -> Streaming<v1::ClaimList>;
        /// Whether a pod may still have to be unprepared.
        might_need_unprepare(MightNeedUnprepareRequest) -> v1::MightNeedUnprepareResponse;
        /// How devlet is doing.
        status(StatusRequest) -> v1::StatusResponse;
        /// Takes over the pods of a kubelet's file.
        import(ImportRequest) -> v1::ImportResponse;
        /// Declares that a file that could not be read held nothing.
        forget(ForgetRequest) -> v1::ForgetResponse;
        /// All of the database.
        dump_state(DumpStateRequest) -> v1::DumpStateResponse;
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
