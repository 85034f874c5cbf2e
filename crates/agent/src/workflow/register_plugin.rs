//! Registers a device plugin: dials it, gets its options, adds it to the node, and starts its session.

use std::path::PathBuf;
use std::sync::Arc;

use devlet_core::device_plugin::inventory::Offer;
use devlet_core::device_plugin::rejections::Rejection;
use devlet_core::{ConnectError, ConnectionId, Node, PluginIdentity, ProcessId, ResourceName};
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::{DialError, PeerConnection, ReadLimits};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::REJECTION_PAUSE;
use super::plugin_session::{self, Connection, SocketIdentity, has_reregistered};
use crate::config::Config;
use crate::deadline;
use crate::device_plugin::client::{Api, PluginClient};
use crate::device_plugin::clients::PluginClients;
use crate::grpc::call::CallError;
use crate::limits::{Limit, LimitExceeded, REGISTRATIONS_PER_RESOURCE};
use crate::long_decode::LongDecoder;
use crate::metrics::Metrics;
use crate::store::Store;

/// A well-formed request to serve a resource.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub resource: ResourceName,
    pub socket: PathBuf,
    /// The version of the API that the plugin serves.
    pub api: Api,
    /// The process that registers the plugin.
    pub process: ProcessId,
}

impl Candidate {
    /// Returns the record of its rejection.
    pub(crate) fn rejection(&self, error: &RegisterError) -> Rejection {
        Rejection {
            resource: self.resource.to_string(),
            endpoint: self.socket.display().to_string(),
            uid: Some(self.process.uid),
            pid: self.process.pid,
            reason: error.to_string(),
        }
    }
}

/// Why a plugin is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The plugin cannot be dialled. The first words are the kubelet's.
    #[error("failed to dial device plugin: {0}")]
    Dial(DialError),
    /// `GetDevicePluginOptions` failed. The first words are the kubelet's.
    #[error("failed to get device plugin options: {0}")]
    Options(CallError),
    #[error("user {uid} may not serve {resource}; allow it under access.register in devlet's configuration")]
    NotAllowed { uid: u32, resource: ResourceName },
    /// Another user owns or serves the socket.
    #[error("the socket {} is of user {owner}, not of user {uid}, who registers it", socket.display())]
    SocketOwnerMismatch {
        socket: PathBuf,
        owner: u32,
        /// The user that registers it.
        uid: u32,
    },
    /// While the plugin was dialled again, it registered by itself, or another plugin replaced it.
    #[error("another plugin has replaced it")]
    Superseded,
    #[error(transparent)]
    LimitExceeded(#[from] LimitExceeded),
    /// A plugin of another user serves the resource.
    #[error("{0}; a rule under access.register in devlet's configuration allows it with share: true")]
    Refused(#[from] ConnectError),
}

/// Registers device plugins.
#[derive(Debug, Clone)]
pub struct Registrar {
    pub(crate) config: Arc<Config>,
    pub(crate) store: Store,
    pub(crate) clients: PluginClients,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Registrations of each process, of device plugins and DRA drivers.
    pub(crate) registrations: Arc<KeyedRateLimiter<ProcessId>>,
    /// Registrations of each resource by each process.
    pub(crate) resource_registrations: Arc<KeyedRateLimiter<(ProcessId, ResourceName)>>,
    pub(crate) decoder: LongDecoder,
    /// Limits log entries about rejections.
    pub(crate) rejection_log: Arc<LogThrottle>,
    /// Limits on the bytes of processes that are dialled.
    pub(crate) read_limits: ReadLimits,
}

impl Registrar {
    /// Registers a plugin, and starts its session. A rejection is recorded.
    pub async fn register(&self, candidate: Candidate) -> Result<ConnectionId, RegisterError> {
        self.check_rate(&candidate).await?;
        self.connect_and_run(candidate).await
    }

    /// Registers a plugin in a task of the node: the outcome is recorded even if the caller leaves. The task returns `None`
    /// if the node stops first.
    pub(crate) fn register_in_task(
        &self,
        candidate: Candidate,
    ) -> JoinHandle<Option<Result<ConnectionId, RegisterError>>> {
        let registrar = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                ended = registrar.connect_and_run(candidate) => Some(ended),
                () = registrar.stop.cancelled() => None,
            }
        })
    }

    /// Checks that a plugin's process may register now. A rejection is recorded at once and answered after a pause.
    pub(crate) async fn check_rate(&self, candidate: &Candidate) -> Result<(), RegisterError> {
        let Err(exceeded) = self.try_acquire(candidate) else {
            return Ok(());
        };
        self.metrics.limit_hit(exceeded.limit.name());
        let error = RegisterError::from(exceeded);
        self.rejected(candidate.rejection(&error));
        let refused = Err(error);
        self.metrics.registered(&candidate.resource, &refused);
        tokio::select! {
            () = tokio::time::sleep(REJECTION_PAUSE) => {}
            () = self.stop.cancelled() => {}
        }
        refused
    }

    /// Registers a plugin that is within its rate.
    async fn connect_and_run(&self, candidate: Candidate) -> Result<ConnectionId, RegisterError> {
        let connected = self.connect(&candidate, None).await;
        self.metrics.registered(&candidate.resource, &connected);
        if let Err(error) = &connected {
            self.rejected(candidate.rejection(error));
        }
        if let Err(RegisterError::LimitExceeded(exceeded)) = &connected {
            self.metrics.limit_hit(exceeded.limit.name());
        }
        let connection = connected?;
        let id = connection.id;
        tracing::info!(
            resource = %candidate.resource, endpoint = %candidate.socket.display(), conn = %id,
            "device plugin registered"
        );
        self.tasks
            .spawn(plugin_session::run(self.clone(), candidate, connection));
        Ok(id)
    }

    /// Records that a plugin was rejected, for `devlet get plugins` and, the first time, for the log.
    pub(crate) fn rejected(&self, rejection: Rejection) {
        let Rejection {
            resource,
            endpoint,
            uid,
            pid,
            reason,
        } = rejection.clone();
        let now = self.store.now();
        let is_news = self.store.update(|node| node.plugin_rejected(rejection, now));
        if is_news && let Some(suppressed) = self.rejection_log.try_acquire(Instant::now()) {
            tracing::warn!(
                resource,
                endpoint,
                pid,
                uid,
                reason,
                suppressed,
                "device plugin rejected"
            );
        }
    }

    /// Counts a registration of a process. Returns `false` if it registers too often.
    pub(crate) fn is_within_rate(&self, process: ProcessId) -> bool {
        self.registrations.try_acquire(process, Instant::now())
    }

    fn try_acquire(&self, candidate: &Candidate) -> Result<(), LimitExceeded> {
        if !self.is_within_rate(candidate.process) {
            return Err(self.config.limits.registers_too_often());
        }
        let key = (candidate.process, candidate.resource.clone());
        if self.resource_registrations.try_acquire(key, Instant::now()) {
            return Ok(());
        }
        let subject = format!("the process registers {} too often", candidate.resource);
        Err(Limit::FIXED.exceeded(subject, REGISTRATIONS_PER_RESOURCE as usize))
    }

    /// Dials a plugin and adds it to the node. A plugin that is dialled `again` must still have the same socket, and must not
    /// have registered by itself.
    pub(super) async fn connect(
        &self,
        candidate: &Candidate,
        again: Option<SocketIdentity>,
    ) -> Result<Connection, RegisterError> {
        let resource = &candidate.resource;
        let (access, limits) = (&self.config.access, &self.config.limits);
        let dialed = self.dial(candidate).await?;
        let process = ProcessId {
            uid: dialed.peer.uid,
            pid: dialed.peer.pid,
        };
        let endpoint = candidate.socket.display().to_string();
        let check_quota = |node: &Node| {
            let plugin = PluginIdentity {
                process,
                name: resource.as_str(),
                endpoint: &endpoint,
            };
            self.config.check_plugin_quota(node, plugin)
        };
        // Before the plugin is called, and again when it is added.
        self.store.read(check_quota)?;
        let client = PluginClient::new(&dialed, candidate.api, self.metrics.plugin(resource), limits);
        let options = client
            .options(self.config.deadlines.options)
            .await
            .map_err(RegisterError::Options)?;
        let offer = Offer {
            resource: resource.clone(),
            endpoint: endpoint.clone(),
            process,
            may_share: access.may_share(process.uid, resource.as_str()),
            options,
        };
        if again.is_some() && SocketIdentity::of(&candidate.socket) != again {
            return Err(RegisterError::Superseded);
        }
        let now = self.store.now();
        let (id, replaced) = self.store.update(|node| {
            if again.is_some() && has_reregistered(node, candidate) {
                return Err(RegisterError::Superseded);
            }
            check_quota(node)?;
            Ok(node.plugin_connected(offer, now)?)
        })?;
        if let Some(replaced) = replaced {
            self.clients.cancel(replaced);
        }
        let cancelled = self.stop.child_token();
        let entry = self.clients.insert(id, client.clone(), cancelled.clone());
        // Another registration may have replaced this one before its client could be cancelled.
        if !self.store.read(|node| node.is_connected(id)) {
            cancelled.cancel();
        }
        Ok(Connection {
            id,
            client,
            peer: dialed,
            cancelled,
            _entry: entry,
        })
    }

    /// Dials a plugin whose user may serve the resource, and checks the users of its socket and of its process.
    async fn dial(&self, candidate: &Candidate) -> Result<PeerConnection, RegisterError> {
        let (resource, socket, uid) = (&candidate.resource, &candidate.socket, candidate.process.uid);
        let access = &self.config.access;
        if !access.may_register(uid, resource.as_str()) {
            return Err(RegisterError::NotAllowed {
                uid,
                resource: resource.clone(),
            });
        }
        let timeout = self.config.deadlines.dial;
        let dialed = devlet_uds::connect_limited(socket, deadline::after(timeout), &self.read_limits)
            .await
            .map_err(RegisterError::Dial)?;
        for owner in [dialed.owner, dialed.peer.uid] {
            if !access.may_name(uid, owner, resource.as_str()) {
                let socket = socket.clone();
                return Err(RegisterError::SocketOwnerMismatch { socket, owner, uid });
            }
        }
        Ok(dialed)
    }
}
