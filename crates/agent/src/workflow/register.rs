//! Taking a device plugin in: dial it, ask what it wants, tell the node, and follow its lists from then on.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::inventory::Offer;
use devlet_core::device_plugin::rejections::Rejection;
use devlet_core::{ConnectError, ConnectionId, Node, ResourceName};
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::{DialError, ReadLimits};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::deadline;
use crate::device_plugin::client::{Api, PluginClient};
use crate::device_plugin::connection::{self, Connection};
use crate::device_plugin::plugins::Plugins;
use crate::grpc::call::CallError;
use crate::limits::portions::Turns;
use crate::limits::seats::{self, Process, Seats};
use crate::limits::{Limit, Limits, OverLimit};
use crate::metrics::Metrics;
use crate::store::Store;

/// A well-formed wish to serve a resource.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The resource.
    pub resource: ResourceName,
    /// Where the plugin answers.
    pub socket: PathBuf,
    /// Which protocol it speaks.
    pub api: Api,
    /// The user that asks.
    pub uid: u32,
    /// The process that asks, if it is visible from here.
    pub pid: Option<i32>,
}

impl Candidate {
    /// That it is rejected.
    pub(crate) fn rejection(&self, error: &RegisterError) -> Rejection {
        Rejection {
            resource: self.resource.to_string(),
            endpoint: self.socket.display().to_string(),
            uid: Some(self.uid),
            pid: self.pid,
            reason: error.to_string(),
        }
    }
}

/// Why a plugin is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// It cannot be reached. The first words are the kubelet's.
    #[error("failed to dial device plugin: {0}")]
    Dial(DialError),
    /// It does not say what it wants. The first words are the kubelet's.
    #[error("failed to get device plugin options: {0}")]
    Options(CallError),
    /// Its user may not serve the resource.
    #[error("user {uid} may not serve {resource}; allow it under access.register in devlet's configuration")]
    NotAllowed {
        /// The user.
        uid: u32,
        /// The resource.
        resource: ResourceName,
    },
    /// Its socket is somebody else's.
    #[error("the socket {} is of user {owner}, not of user {uid}, who registers it", socket.display())]
    NotTheirs {
        /// The socket.
        socket: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who asks.
        uid: u32,
    },
    /// While it was dialled again, it registered by itself, or another one took its place.
    #[error("another plugin has taken its place")]
    Superseded,
    /// It asks for too much.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// The node does not want it.
    #[error("{0}; a rule under access.register in devlet's configuration allows it with share: true")]
    Refused(#[from] ConnectError),
}

/// How long a process that registers too often waits to be told so.
const SLOWED_DOWN: Duration = Duration::from_secs(1);

/// How often a process may register one resource.
pub(crate) fn repetitions_per_minute(limits: &Limits) -> u32 {
    (limits.registrations_per_minute / 10).max(1)
}

/// Takes plugins in.
#[derive(Debug, Clone)]
pub struct Registrar {
    pub(crate) config: Arc<Config>,
    pub(crate) store: Store,
    pub(crate) plugins: Plugins,
    pub(crate) seats: Seats,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// How often each process registers.
    pub(crate) registrations: Arc<KeyedRateLimiter<Process>>,
    /// The same for each resource of it.
    pub(crate) repetitions: Arc<KeyedRateLimiter<(Process, ResourceName)>>,
    /// For long lists.
    pub(crate) decoding: Turns,
    /// How often rejections are logged.
    pub(crate) refusals: Arc<LogThrottle>,
    /// Limits on the bytes of processes that are dialled.
    pub(crate) read_limits: ReadLimits,
}

impl Registrar {
    /// Takes a plugin in, and follows it until it is gone for good. A rejection is recorded.
    pub async fn register(&self, candidate: Candidate) -> Result<ConnectionId, RegisterError> {
        self.slow_down(&candidate).await?;
        self.take_in(candidate).await
    }

    /// Takes a plugin in by a task of the node: a caller that gives up does not hide how the registration ended.
    /// Returns `None` if the node stops before that.
    pub(crate) fn take_in_by_task(
        &self,
        candidate: Candidate,
    ) -> JoinHandle<Option<Result<ConnectionId, RegisterError>>> {
        let registrar = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                ended = registrar.take_in(candidate) => Some(ended),
                () = registrar.stop.cancelled() => None,
            }
        })
    }

    /// Checks that a plugin may register now. If not, it is recorded as rejected at once and answered after a while.
    pub(crate) async fn slow_down(&self, candidate: &Candidate) -> Result<(), RegisterError> {
        let Err(over) = self.in_time(candidate) else {
            return Ok(());
        };
        self.metrics.limit_hit(over.limit.name());
        let error = RegisterError::from(over);
        self.rejected(candidate.rejection(&error));
        let refused = Err(error);
        self.metrics.registered(&candidate.resource, &refused);
        // Whoever does not wait for the answer waits for a place.
        tokio::select! {
            () = tokio::time::sleep(SLOWED_DOWN) => {}
            () = self.stop.cancelled() => {}
        }
        refused
    }

    /// Takes a plugin in that may register. A rejection is recorded.
    async fn take_in(&self, candidate: Candidate) -> Result<ConnectionId, RegisterError> {
        let connected = self.connect(&candidate, |_| true).await;
        self.metrics.registered(&candidate.resource, &connected);
        if let Err(error) = &connected {
            self.rejected(candidate.rejection(error));
        }
        if let Err(RegisterError::OverLimit(over)) = &connected {
            self.metrics.limit_hit(over.limit.name());
        }
        let connection = connected?;
        let id = connection.id;
        tracing::info!(
            resource = %candidate.resource, endpoint = %candidate.socket.display(), conn = %id,
            "device plugin registered"
        );
        self.tasks
            .spawn(connection::follow(self.clone(), candidate, connection));
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
        if is_news && let Some(suppressed) = self.refusals.try_acquire(Instant::now()) {
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

    /// Whether its process may register again already.
    fn in_time(&self, candidate: &Candidate) -> Result<(), OverLimit> {
        let process = (candidate.uid, candidate.pid);
        let resource = &candidate.resource;
        let now = Instant::now();
        let often = |what: String, most: u32| {
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            Limit::REGISTRATIONS_PER_MINUTE.exceeded(what, most)
        };
        let most = self.config.limits.registrations_per_minute;
        if !self.registrations.try_acquire(process, now) {
            return Err(often("the process registers too often".into(), most));
        }
        if !self.repetitions.try_acquire((process, resource.clone()), now) {
            let tenth = repetitions_per_minute(&self.config.limits);
            let what = format!(
                "the process registers {resource} more than {tenth} times a minute (each resource has a tenth)"
            );
            return Err(often(what, most));
        }
        Ok(())
    }

    /// Dials a plugin and tells the node, if `still` says so when it comes to that.
    pub(crate) async fn connect(
        &self,
        candidate: &Candidate,
        still: impl FnOnce(&Node) -> bool,
    ) -> Result<Connection, RegisterError> {
        let Candidate {
            resource,
            socket,
            api,
            uid,
            pid: _,
        } = candidate;
        let access = &self.config.access;
        if !access.may_register(*uid, resource.as_str()) {
            return Err(RegisterError::NotAllowed {
                uid: *uid,
                resource: resource.clone(),
            });
        }
        let deadlines = &self.config.deadlines;
        let dialed = devlet_uds::connect_limited(socket, deadline::after(deadlines.dial), &self.read_limits)
            .await
            .map_err(RegisterError::Dial)?;
        for owner in [dialed.owner, dialed.peer.uid] {
            if !access.may_name(*uid, owner, resource.as_str()) {
                let socket = socket.clone();
                return Err(RegisterError::NotTheirs {
                    socket,
                    owner,
                    uid: *uid,
                });
            }
        }
        let limits = &self.config.limits;
        let process = seats::process(&dialed.peer);
        let seat = self
            .seats
            .take(process, access, resource.as_str(), socket.clone(), limits)?;
        let client = PluginClient::new(
            &dialed,
            *api,
            self.metrics.plugin(resource),
            limits,
            seat.account(),
        );
        let options = client
            .options(deadlines.options)
            .await
            .map_err(RegisterError::Options)?;
        let offer = Offer {
            resource: resource.clone(),
            endpoint: socket.display().to_string(),
            uid: dialed.peer.uid,
            may_share: access.may_share(dialed.peer.uid, resource.as_str()),
            options,
        };
        let now = self.store.now();
        let (id, replaced) = self.store.update(|node| {
            if !still(node) {
                return Err(RegisterError::Superseded);
            }
            Ok(node.plugin_connected(offer, now)?)
        })?;
        if let Some(replaced) = replaced {
            self.plugins.dismiss(replaced);
        }
        let dismissed = self.stop.child_token();
        let entered = self.plugins.enter(id, client.clone(), dismissed.clone());
        Ok(Connection {
            id,
            client,
            dialed,
            dismissed,
            _entered: entered,
            _seat: seat,
        })
    }
}
