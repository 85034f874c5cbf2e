//! One attempt to register the plugin behind a socket in `plugins_registry`.
//!
//! The steps are `GetInfo`, validation, registration and `NotifyRegistrationStatus`. A registered plugin stays registered
//! even if the last step fails. A kubelet would deregister it and start again, without end.
//!
//! A device plugin has its own session from then on. A DRA driver is registered until its socket is removed.

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
    Dial { socket: PathBuf, problem: DialError },
    /// A call failed or timed out.
    #[error("{method} at socket {}: {problem}", socket.display())]
    Call {
        method: &'static str,
        socket: PathBuf,
        problem: String,
    },
    /// The answer exceeds a limit.
    #[error("{method}: {exceeded}")]
    LimitExceeded {
        method: &'static str,
        exceeded: LimitExceeded,
    },
    /// The type of the plugin is not supported.
    #[error("no handler registered for plugin type: {kind} at socket {}", socket.display())]
    Kind {
        /// The type in its answer.
        kind: String,
        socket: PathBuf,
    },
    /// The answer to `GetInfo` is invalid.
    #[error("plugin validation failed with err: {0}")]
    Invalid(InvalidPlugin),
    /// A device plugin was rejected.
    #[error("plugin registration failed with err: {0}")]
    Register(RegisterError),
    /// A DRA driver was rejected.
    #[error("plugin registration failed with err: {0}")]
    RegisterDriver(registration::RegisterDriverError),
}

/// Why an answer to `GetInfo` is invalid. The texts are the kubelet's, which authors of plugins know.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPlugin {
    /// No version of the plugin is supported.
    #[error("manager version, v1beta1, is not among plugin supported versions {0}")]
    Version(String),
    /// The name is not the name of an extended resource.
    #[error("invalid name of device plugin socket: {0}")]
    Name(InvalidResourceName),
    /// The endpoint is a relative path.
    #[error("the endpoint {0:?} is not an absolute path")]
    Endpoint(String),
    /// The answer of a DRA driver is invalid.
    #[error(transparent)]
    Driver(InvalidDriverInfo),
}

impl HandshakeError {
    /// Returns the label value of the metric, or `None` if the registrar has counted the failure.
    pub(super) fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Dial { .. } => Some("dial"),
            Self::Call { .. } | Self::LimitExceeded { .. } => Some("handshake"),
            Self::Kind { .. } => Some("kind"),
            Self::Invalid(_) => Some("invalid"),
            Self::Register(_) | Self::RegisterDriver(_) => None,
        }
    }

    /// Returns `true` if a device plugin or a DRA driver was rejected. The registrar logs that.
    pub(super) fn is_rejection(&self) -> bool {
        matches!(
            self,
            Self::Invalid(_) | Self::Register(_) | Self::RegisterDriver(_)
        )
    }

    /// Returns `true` if the plugin is notified: it answered `GetInfo`.
    fn is_sent_to_plugin(&self) -> bool {
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

/// Registers the plugins behind sockets.
#[derive(Debug, Clone)]
pub struct Handshake {
    pub registrar: Registrar,
    pub drivers: DriverRegistrar,
}

/// The outcome of a successful attempt.
#[derive(Debug)]
pub(super) enum RegisteredPlugin {
    DevicePlugin,
    /// The driver stays registered until this is dropped.
    Driver(Registered),
}

impl Handshake {
    /// Calls `GetInfo` at a socket, registers the plugin, and notifies it of the outcome.
    pub(super) async fn attempt(&self, socket: &Path) -> Result<RegisteredPlugin, HandshakeError> {
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
        let registered = match self.call("GetInfo", socket, deadlines.info, info).await {
            Ok(info) => self.register(shortened(info), socket, &dialed).await,
            Err(error) => Err(error),
        };
        let status = match &registered {
            Ok(_) => RegistrationStatus {
                plugin_registered: true,
                error: String::new(),
            },
            Err(error) if error.is_sent_to_plugin() => {
                let error = shorten(format!("RegisterPlugin error -- {error}"));
                RegistrationStatus {
                    plugin_registered: false,
                    error,
                }
            }
            Err(_) => return registered,
        };
        let notify = client.notify_registration_status(status);
        let notified = self
            .call("NotifyRegistrationStatus", socket, deadlines.notify, notify)
            .await;
        if let (Ok(_), Err(error)) = (&registered, notified) {
            tracing::warn!(socket = %socket.display(), %error, "plugin registered; NotifyRegistrationStatus failed");
        }
        registered
    }

    async fn register(
        &self,
        info: PluginInfo,
        socket: &Path,
        dialed: &PeerConnection,
    ) -> Result<RegisteredPlugin, HandshakeError> {
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
                    .map(|_| RegisteredPlugin::DevicePlugin)
                    .map_err(HandshakeError::Register)
            }
            DRA_PLUGIN => {
                let candidate = registration::DriverCandidate::new(&info, socket, &dialed.peer)
                    .inspect_err(|problem| self.drivers.invalid(&info.name, socket, &dialed.peer, problem))
                    .map_err(|problem| HandshakeError::Invalid(InvalidPlugin::Driver(problem)))?;
                let registered = self.drivers.register(candidate).await;
                registered
                    .inspect_err(|error| self.drivers.refused(&info.name, socket, &dialed.peer, error))
                    .map(RegisteredPlugin::Driver)
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
                let exceeded = Limit::FIXED.exceeded("the answer is too large", MAX_SHORT_MESSAGE);
                return Err(HandshakeError::LimitExceeded { method, exceeded });
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

/// Truncates the texts of an answer to `GetInfo`. Valid texts are shorter.
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
    // The process that serves the socket registers, since it could create the socket there.
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
