//! One attempt to register the plugin behind a socket in `plugins_registry`.
//!
//! `GetInfo`, validate, register, `NotifyRegistrationStatus`. A plugin that was taken in and does not listen when it is told so serves all the
//! same: a kubelet would turn it away and begin anew, again and again.
//!
//! A device plugin is followed by a task of its own from then on; a DRA driver is registered for as long as its socket is
//! there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use devlet_core::ProcessId;
use devlet_core::device_plugin::rejections::Rejection;
use devlet_core::{InvalidResourceName, ResourceName};
use devlet_kubelet_api::device_plugin::v1beta1;
use devlet_kubelet_api::plugin_registration::registration_client::RegistrationClient;
use devlet_kubelet_api::plugin_registration::{
    DEVICE_PLUGIN, DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus,
};
use devlet_uds::{DialError, PeerConnection};
use tokio::time::Instant;
use tonic::Status;

use crate::deadline;
use crate::device_plugin::client::Api;
use crate::dra::registration::{self, DriverRegistrar, InvalidDriverInfo, Registered};
use crate::grpc::call::log_call;
use crate::grpc::oversize::is_too_large;
use crate::limits::{Limit, LimitExceeded, MAX_SHORT_MESSAGE};
use crate::peer_text::{shorten, shorten_status};
use crate::workflow::register_plugin::{Candidate, RegisterError, Registrar};

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The socket cannot be dialled.
    #[error("dial failed at socket {}, err: {problem}", socket.display())]
    Dial {
        /// The socket.
        socket: PathBuf,
        /// Why.
        problem: DialError,
    },
    /// A call was not answered well, or not in time.
    #[error("{method} at socket {}: {problem}", socket.display())]
    Call {
        /// The call.
        method: &'static str,
        /// The socket.
        socket: PathBuf,
        /// What came back.
        problem: String,
    },
    /// It says too much.
    #[error("{method}: {over}")]
    LimitExceeded {
        /// The call.
        method: &'static str,
        /// By which limit.
        over: LimitExceeded,
    },
    /// It is nothing that is served here.
    #[error("no handler registered for plugin type: {kind} at socket {}", socket.display())]
    Kind {
        /// What it says it is.
        kind: String,
        /// The socket.
        socket: PathBuf,
    },
    /// It says something impossible.
    #[error("plugin validation failed with err: {0}")]
    Invalid(InvalidPlugin),
    /// It is not taken in.
    #[error("plugin registration failed with err: {0}")]
    Register(RegisterError),
    /// It is not taken in.
    #[error("plugin registration failed with err: {0}")]
    RegisterDriver(registration::RegisterDriverError),
}

/// A plugin that cannot be what it says. The texts are the kubelet's, known to authors of plugins.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPlugin {
    /// It speaks none of our versions.
    #[error("manager version, v1beta1, is not among plugin supported versions {0}")]
    Version(String),
    /// It serves no extended resource.
    #[error("invalid name of device plugin socket: {0}")]
    Name(InvalidResourceName),
    /// It names a socket relative to nothing.
    #[error("the endpoint {0:?} is not an absolute path")]
    Endpoint(String),
    /// It is no driver.
    #[error(transparent)]
    Driver(InvalidDriverInfo),
}

impl HandshakeError {
    /// In one word, unless the registrar has counted it.
    pub(super) fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Dial { .. } => Some("dial"),
            Self::Call { .. } | Self::LimitExceeded { .. } => Some("handshake"),
            Self::Kind { .. } => Some("kind"),
            Self::Invalid(_) => Some("invalid"),
            Self::Register(_) | Self::RegisterDriver(_) => None,
        }
    }

    /// Whether a device plugin or a DRA driver was rejected, which is logged where that is decided.
    pub(super) fn is_rejection(&self) -> bool {
        matches!(
            self,
            Self::Invalid(_) | Self::Register(_) | Self::RegisterDriver(_)
        )
    }

    /// Whether the plugin should be told: it can only be told if it could be asked.
    fn is_for_the_plugin(&self) -> bool {
        matches!(
            self,
            Self::LimitExceeded { .. }
                | Self::Kind { .. }
                | Self::Invalid(_)
                | Self::Register(_)
                | Self::RegisterDriver(_)
        )
    }
}

/// What each socket's task needs.
#[derive(Debug, Clone)]
pub struct Handshake {
    pub registrar: Registrar,
    pub drivers: DriverRegistrar,
}

/// A plugin that was taken in.
#[derive(Debug)]
pub(super) enum TakenIn {
    DevicePlugin,
    /// It stays until this is dropped.
    Driver(Registered),
}

impl Handshake {
    /// Asks a socket for its plugin, registers it, and notifies it of the outcome.
    pub(super) async fn attempt(&self, socket: &Path) -> Result<TakenIn, HandshakeError> {
        let deadlines = &self.registrar.config.deadlines;
        let limits = &self.registrar.read_limits;
        let dialed = devlet_uds::connect_once_limited(socket, deadline::after(deadlines.dial), limits)
            .await
            .map_err(|problem| HandshakeError::Dial {
                socket: socket.to_owned(),
                problem,
            })?;
        let client = RegistrationClient::new(dialed.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_SHORT_MESSAGE);
        let info = client.get_info(InfoRequest {});
        let taken_in = match self.call("GetInfo", socket, deadlines.info, info).await {
            Ok(info) => self.take_in(shortened(info), socket, &dialed).await,
            Err(error) => Err(error),
        };
        let status = match &taken_in {
            Ok(_) => RegistrationStatus {
                plugin_registered: true,
                error: String::new(),
            },
            Err(error) if error.is_for_the_plugin() => {
                let error = shorten(format!("RegisterPlugin error -- {error}"));
                RegistrationStatus {
                    plugin_registered: false,
                    error,
                }
            }
            Err(_) => return taken_in,
        };
        let told = client.notify_registration_status(status);
        let told = self.call("NotifyRegistrationStatus", socket, deadlines.notify, told);
        let told = told.await;
        if let (Ok(_), Err(error)) = (&taken_in, told) {
            tracing::warn!(socket = %socket.display(), %error, "plugin registered; NotifyRegistrationStatus failed");
        }
        taken_in
    }

    async fn take_in(
        &self,
        info: PluginInfo,
        socket: &Path,
        dialed: &PeerConnection,
    ) -> Result<TakenIn, HandshakeError> {
        match info.r#type.as_str() {
            DEVICE_PLUGIN => {
                let name = info.name.clone();
                let endpoint = match info.endpoint.as_str() {
                    "" => socket.display().to_string(),
                    endpoint => endpoint.to_owned(),
                };
                let candidate = candidate(info, socket, dialed)
                    .inspect_err(|problem| {
                        self.registrar.rejected(Rejection {
                            resource: name,
                            endpoint,
                            uid: Some(dialed.peer.uid),
                            pid: dialed.peer.pid,
                            reason: problem.to_string(),
                        });
                    })
                    .map_err(HandshakeError::Invalid)?;
                let registered = self.registrar.register(candidate).await;
                registered
                    .map(|_| TakenIn::DevicePlugin)
                    .map_err(HandshakeError::Register)
            }
            DRA_PLUGIN => {
                let candidate = registration::DriverCandidate::new(&info, socket, &dialed.peer)
                    .inspect_err(|problem| self.drivers.invalid(&info.name, socket, &dialed.peer, problem))
                    .map_err(|problem| HandshakeError::Invalid(InvalidPlugin::Driver(problem)))?;
                let registered = self.drivers.register(candidate).await;
                registered
                    .inspect_err(|error| self.drivers.refused(&info.name, socket, &dialed.peer, error))
                    .map(TakenIn::Driver)
                    .map_err(HandshakeError::RegisterDriver)
            }
            _ => Err(HandshakeError::Kind {
                kind: info.r#type,
                socket: socket.to_owned(),
            }),
        }
    }

    async fn call<T>(
        &self,
        method: &'static str,
        socket: &Path,
        deadline: Duration,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, HandshakeError> {
        let called = Instant::now();
        let ended = tokio::time::timeout(deadline, call).await;
        log_call(method, socket, called.elapsed(), ended.as_ref().ok());
        let problem = match ended {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) if is_too_large(&status) => {
                let over = Limit::FIXED.exceeded("the answer is too large", MAX_SHORT_MESSAGE);
                return Err(HandshakeError::LimitExceeded { method, over });
            }
            Ok(Err(status)) => {
                let status = shorten_status(&status);
                format!("{} ({:?})", status.message(), status.code())
            }
            Err(_) => format!("no answer within {} s", deadline.as_secs_f32()),
        };
        Err(HandshakeError::Call {
            method,
            socket: socket.to_owned(),
            problem,
        })
    }
}

/// Shortens the texts of an answer to `GetInfo`; nothing valid is that long.
fn shortened(info: PluginInfo) -> PluginInfo {
    PluginInfo {
        r#type: shorten(info.r#type),
        name: shorten(info.name),
        endpoint: shorten(info.endpoint),
        supported_versions: info.supported_versions,
    }
}

fn candidate(info: PluginInfo, socket: &Path, dialed: &PeerConnection) -> Result<Candidate, InvalidPlugin> {
    if !info
        .supported_versions
        .iter()
        .any(|version| version == v1beta1::VERSION)
    {
        let versions = shorten(format!("{:?}", info.supported_versions));
        return Err(InvalidPlugin::Version(versions));
    }
    let resource = ResourceName::parse(&info.name).map_err(InvalidPlugin::Name)?;
    let endpoint = if info.endpoint.is_empty() {
        socket.to_owned()
    } else {
        PathBuf::from(&info.endpoint)
    };
    if !endpoint.is_absolute() {
        return Err(InvalidPlugin::Endpoint(info.endpoint));
    }
    // Whoever could put the socket there asks.
    Ok(Candidate {
        resource,
        socket: endpoint,
        api: Api::V1beta1,
        process: ProcessId {
            uid: dialed.peer.uid,
            pid: dialed.peer.pid,
        },
    })
}
