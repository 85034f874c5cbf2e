//! Registers a plugin of a DRA driver: checks its answer, chooses the service, adds it to the node, and starts its session.
//!
//! A plugin is registered until its socket in `plugins_registry` is removed, or another plugin of the same driver registers
//! the same endpoint. A plugin can be registered before its endpoint accepts connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use devlet_core::dra::drivers::{DriverConflict, DriverOffer, Refusal};
use devlet_core::{ConnectionId, DriverName, Node, PluginIdentity, ProcessId};
use devlet_kubelet_api::plugin_registration::PluginInfo;
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::{PeerConnection, PeerCred, ReadLimits};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::client::DriverClient;
use super::clients::DriverClients;
use super::services::{self, NodeService, Services, UnsupportedServices};
use super::session::{self, ConnectError};
use crate::config::Config;
use crate::grpc::call::CallError;
use crate::limits::{LimitExceeded, truncate_quoted};
use crate::long_decode::LongDecoder;
use crate::metrics::Metrics;
use crate::store::Store;

/// Maximum length of a driver's name in Kubernetes.
const MAX_NAME_CHARS: usize = 63;

/// Reason why a driver's answer to `GetInfo` is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDriverInfo {
    /// The name is empty. The text is the kubelet's.
    #[error("DRA driver name is empty")]
    NoName,
    /// The name is not a valid driver name, so that claims cannot contain it.
    #[error("the DRA driver name {} is not a DNS name of at most {MAX_NAME_CHARS} characters", truncate_quoted(.0))]
    Name(String),
    /// The endpoint is a relative path.
    #[error("the endpoint {} is not an absolute path", truncate_quoted(.0))]
    Endpoint(String),
    /// devlet cannot call any of the driver's services. The text is the kubelet's.
    #[error(
        "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {}: {problem}",
        endpoint.display()
    )]
    Services {
        /// The driver.
        driver: DriverName,
        /// The socket of the driver.
        endpoint: PathBuf,
        /// The reason.
        problem: UnsupportedServices,
    },
}

/// A plugin that is about to be registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverCandidate {
    /// The driver.
    pub driver: DriverName,
    /// The socket of the plugin.
    pub endpoint: PathBuf,
    /// The services that are called.
    pub services: Services,
    /// The services that it lists, shortened for errors.
    pub listed: String,
    /// The process that registers it.
    pub process: ProcessId,
}

impl DriverCandidate {
    /// Checks the answer to `GetInfo`. Without an endpoint in the answer, the plugin serves on `socket`.
    pub fn new(info: &PluginInfo, socket: &Path, peer: &PeerCred) -> Result<Self, InvalidDriverInfo> {
        if info.name.is_empty() {
            return Err(InvalidDriverInfo::NoName);
        }
        if !is_driver_name(&info.name) {
            return Err(InvalidDriverInfo::Name(info.name.clone()));
        }
        let endpoint = match info.endpoint.as_str() {
            "" => socket,
            endpoint => Path::new(endpoint),
        };
        if !endpoint.is_absolute() {
            return Err(InvalidDriverInfo::Endpoint(info.endpoint.clone()));
        }
        let driver = DriverName::from(info.name.as_str());
        let services = services::choose(&info.supported_versions).map_err(|problem| {
            let (driver, endpoint) = (driver.clone(), endpoint.to_owned());
            InvalidDriverInfo::Services {
                driver,
                endpoint,
                problem,
            }
        })?;
        Ok(Self {
            driver,
            endpoint: endpoint.to_owned(),
            services,
            listed: services::quoted(&info.supported_versions),
            process: ProcessId {
                uid: peer.uid,
                pid: peer.pid,
            },
        })
    }
}

/// Returns `true` for a DNS name in upper or lower case, as Kubernetes requires.
fn is_driver_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let inner = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    text.len() <= MAX_NAME_CHARS && text.split('.').all(is_label)
}

/// Reason why a driver's plugin is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RegisterDriverError {
    /// Access rules do not allow the user to serve the driver.
    #[error("user {uid} may not serve {driver}; allow it under access.register in devlet's configuration")]
    NotAllowed {
        /// The user.
        uid: u32,
        /// The driver.
        driver: DriverName,
    },
    /// The plugin is not connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The call that checks for the alpha service failed.
    #[error("cannot tell whether the plugin has the service {}: {problem}", NodeService::V1alpha3.name())]
    ServiceProbe {
        /// The error of the call.
        problem: CallError,
    },
    /// devlet cannot call any of the driver's services.
    #[error(transparent)]
    Services(InvalidDriverInfo),
    /// The registration exceeds a limit.
    #[error(transparent)]
    LimitExceeded(#[from] LimitExceeded),
    /// A plugin of another user serves the driver.
    #[error("{0}; a rule under access.register in devlet's configuration allows it with share: true")]
    Refused(#[from] DriverConflict),
}

impl InvalidDriverInfo {
    /// Returns advice for the operator; empty if the error text contains it.
    fn hint(&self) -> &'static str {
        match self {
            Self::NoName | Self::Name(_) => "register the driver under the name that claims use",
            Self::Endpoint(_) => {
                "register the absolute path of the driver's socket, or leave the endpoint empty"
            }
            Self::Services { .. } => "use a release of the driver for Kubernetes 1.31 or later",
        }
    }
}

impl RegisterDriverError {
    /// Returns advice for the operator; empty if the error text contains it.
    fn hint(&self) -> &'static str {
        match self {
            Self::Services(problem) => problem.hint(),
            Self::Connect(_) => "check that the driver runs, and which user owns its socket",
            Self::ServiceProbe { .. } => "check the driver's log",
            Self::LimitExceeded(_) => "check the driver, or raise the limit in devlet's configuration",
            Self::NotAllowed { .. } | Self::Refused(_) => "",
        }
    }
}

/// Registers plugins of drivers.
#[derive(Debug, Clone)]
pub struct DriverRegistrar {
    pub(crate) config: Arc<Config>,
    pub(crate) store: Store,
    pub(crate) drivers: DriverClients,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Registrations of each process, of device plugins and DRA drivers.
    pub(crate) registrations: Arc<KeyedRateLimiter<ProcessId>>,
    /// Decodes long health reports, separately from device lists.
    pub(crate) decoder: LongDecoder,
    /// Limits log entries about rejections.
    pub(crate) rejection_log: Arc<LogThrottle>,
    /// Limits on the bytes that are read from dialled processes.
    pub(crate) read_limits: ReadLimits,
}

impl DriverRegistrar {
    /// Registers a plugin until the returned value is dropped.
    pub async fn register(&self, candidate: DriverCandidate) -> Result<Registered, RegisterDriverError> {
        let registered = self.try_register(candidate).await;
        self.metrics.driver_registered(&registered);
        if let Err(RegisterDriverError::LimitExceeded(over)) = &registered {
            self.metrics.limit_hit(over.limit.name());
        }
        registered
    }

    /// Records that a driver's answer to `GetInfo` was rejected.
    pub(crate) fn invalid(&self, name: &str, socket: &Path, peer: &PeerCred, problem: &InvalidDriverInfo) {
        self.record_rejection(name, socket, peer, &problem.to_string(), problem.hint());
    }

    /// Records that a plugin was rejected.
    pub(crate) fn refused(&self, name: &str, socket: &Path, peer: &PeerCred, error: &RegisterDriverError) {
        self.record_rejection(name, socket, peer, &error.to_string(), error.hint());
    }

    /// Records a rejection for `devlet get drivers`. Logs it if it differs from the last one of the socket.
    fn record_rejection(&self, name: &str, socket: &Path, peer: &PeerCred, reason: &str, hint: &str) {
        let refusal = Refusal {
            driver: name.to_owned(),
            reason: reason.to_owned(),
            hint: hint.to_owned(),
        };
        let (socket, now) = (socket.display().to_string(), self.store.now());
        let is_new = self.store.update(|node| {
            let last = |node: &Node| {
                let mut refused = node.refused_drivers();
                let known = refused.find(|(known, _)| *known == socket);
                known.map(|(_, refused)| refused.refusal.clone())
            };
            let before = last(node);
            node.driver_refused(&socket, refusal, now);
            last(node) != before
        });
        if is_new && let Some(suppressed) = self.rejection_log.try_acquire(Instant::now()) {
            let PeerCred { uid, pid, .. } = peer;
            tracing::warn!(
                driver = name,
                endpoint = socket,
                pid,
                uid,
                reason,
                suppressed,
                "DRA driver rejected"
            );
        }
    }

    /// Forgets the rejection of a socket, when its plugin is registered or the socket is removed.
    pub(crate) fn refusal_ended(&self, socket: &Path) {
        let socket = socket.display().to_string();
        let is_known = |node: &Node| node.refused_drivers().any(|(known, _)| known == socket);
        if self.store.read(is_known) {
            self.store.update(|node| node.refusal_ended(&socket));
        }
    }

    async fn try_register(&self, candidate: DriverCandidate) -> Result<Registered, RegisterDriverError> {
        self.check_rate(&candidate)?;
        self.check_access(&candidate)?;
        // Checked here to avoid useless calls, and again under the lock that adds the plugin.
        self.store.read(|node| self.check_quota(node, &candidate))?;
        let dialed = self.connect(&candidate).await?;
        let uid = dialed
            .as_ref()
            .map_or(candidate.process.uid, |dialed| dialed.peer.uid);
        let offer = self.offer(&candidate, uid);
        let now = self.store.now();
        let (id, replaced) = self.store.update(|node| {
            self.check_quota(node, &candidate)?;
            Ok::<_, RegisterDriverError>(node.driver_registered(offer, now)?)
        })?;
        if let Some(replaced) = replaced {
            self.drivers.cancel(replaced);
        }
        let cancelled = self.stop.child_token();
        self.drivers.insert(id, cancelled.clone());
        let driver = &candidate.driver;
        tracing::info!(
            %driver, endpoint = %candidate.endpoint.display(), conn = %id,
            service = candidate.services.node.name(), why = candidate.services.why, connected = dialed.is_some(),
            "DRA driver registered"
        );
        let registered = Registered {
            registrar: self.clone(),
            driver: driver.clone(),
            id,
        };
        let plugin = session::Plugin {
            id,
            candidate,
            cancelled,
        };
        self.tasks.spawn(session::run(self.clone(), plugin, dialed));
        Ok(registered)
    }

    /// Checks that access rules allow the user of the process to serve the driver.
    fn check_access(&self, candidate: &DriverCandidate) -> Result<(), RegisterDriverError> {
        let (uid, driver) = (candidate.process.uid, &candidate.driver);
        if self.config.access.may_register(uid, driver.as_str()) {
            return Ok(());
        }
        let driver = driver.clone();
        Err(RegisterDriverError::NotAllowed { uid, driver })
    }

    /// Checks that the node has room for the plugin.
    fn check_quota(&self, node: &Node, candidate: &DriverCandidate) -> Result<(), LimitExceeded> {
        let plugin = PluginIdentity {
            process: candidate.process,
            name: candidate.driver.as_str(),
            endpoint: &candidate.endpoint.display().to_string(),
        };
        self.config.check_plugin_quota(node, plugin)
    }

    /// Connects to the plugin. Returns `None` if it does not listen yet: its session dials again. A plugin chosen for the
    /// alpha service must listen, because only a call shows whether it has that service.
    async fn connect(
        &self,
        candidate: &DriverCandidate,
    ) -> Result<Option<PeerConnection>, RegisterDriverError> {
        let is_alpha = candidate.services.node == NodeService::V1alpha3;
        let dialed = match session::dial(candidate, &self.config, &self.read_limits).await {
            Ok(dialed) => dialed,
            Err(ConnectError::Dial(_)) if !is_alpha => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if is_alpha {
            self.check_alpha_service(candidate, &dialed).await?;
        }
        Ok(Some(dialed))
    }

    /// Checks by a call that the plugin has the alpha service.
    async fn check_alpha_service(
        &self,
        candidate: &DriverCandidate,
        dialed: &PeerConnection,
    ) -> Result<(), RegisterDriverError> {
        let rpcs = self.metrics.driver(&candidate.driver);
        let client = DriverClient::new(dialed, &candidate.services, rpcs, &self.config.limits);
        let implemented = client.has_service(self.config.deadlines.options).await;
        if implemented.map_err(|problem| RegisterDriverError::ServiceProbe { problem })? {
            return Ok(());
        }
        Err(RegisterDriverError::Services(InvalidDriverInfo::Services {
            driver: candidate.driver.clone(),
            endpoint: candidate.endpoint.clone(),
            problem: UnsupportedServices::Unknown {
                listed: candidate.listed.clone(),
            },
        }))
    }

    /// Returns the offer of a plugin that `uid` serves.
    fn offer(&self, candidate: &DriverCandidate, uid: u32) -> DriverOffer {
        let (driver, services) = (&candidate.driver, &candidate.services);
        DriverOffer {
            driver: driver.clone(),
            endpoint: candidate.endpoint.display().to_string(),
            process: ProcessId {
                uid,
                ..candidate.process
            },
            may_share: self.config.access.may_share(uid, driver.as_str()),
            service: services.node.name().to_owned(),
            service_reason: services.why.clone(),
            health_service: services.health.map(|each| each.name().to_owned()),
        }
    }

    /// Checks the registration rate of the process.
    fn check_rate(&self, candidate: &DriverCandidate) -> Result<(), LimitExceeded> {
        if self.registrations.try_acquire(candidate.process, Instant::now()) {
            return Ok(());
        }
        Err(self.config.limits.registers_too_often())
    }
}

/// A registered plugin.
#[derive(Debug)]
#[must_use = "dropping it deregisters the plugin"]
pub struct Registered {
    registrar: DriverRegistrar,
    driver: DriverName,
    id: ConnectionId,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let registrar = &self.registrar;
        let now = registrar.store.now();
        let changed = registrar
            .store
            .update(|node| node.driver_deregistered(self.id, now));
        registrar.drivers.cancel(self.id);
        if changed {
            let (driver, conn) = (&self.driver, self.id);
            tracing::info!(%driver, %conn, "DRA driver deregistered");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerCred = PeerCred {
        uid: 7,
        gid: 8,
        pid: Some(9),
    };

    fn info(name: &str, endpoint: &str, versions: &[&str]) -> PluginInfo {
        PluginInfo {
            r#type: "DRAPlugin".into(),
            name: name.into(),
            endpoint: endpoint.into(),
            supported_versions: versions.iter().map(|each| (*each).to_owned()).collect(),
        }
    }

    fn candidate(info: &PluginInfo) -> Result<DriverCandidate, String> {
        let socket = Path::new("/registry/x.sock");
        DriverCandidate::new(info, socket, &PEER).map_err(|error| error.to_string())
    }

    #[test]
    fn a_driver_serves_at_its_endpoint_or_else_at_the_socket_in_the_registry() {
        let absolute = candidate(&info("gpu.acme.com", "/plugins/dra.sock", &["v1.DRAPlugin"])).unwrap();
        assert_eq!(absolute.endpoint, Path::new("/plugins/dra.sock"));
        assert_eq!((absolute.process.uid, absolute.process.pid), (7, Some(9)));
        let empty = candidate(&info("gpu.acme.com", "", &["v1.DRAPlugin"])).unwrap();
        assert_eq!(empty.endpoint, Path::new("/registry/x.sock"));
        let relative = candidate(&info("gpu.acme.com", "dra.sock", &["v1.DRAPlugin"]));
        assert_eq!(
            relative.unwrap_err(),
            r#"the endpoint "dra.sock" is not an absolute path"#
        );
    }

    #[test]
    fn invalid_driver_names_are_rejected() {
        let named = |name: &str| candidate(&info(name, "", &["v1.DRAPlugin"]));
        let longest = format!("{}.com", "a".repeat(59));
        for name in ["gpu.acme.com", "GPU.acme.com", "a", "1-2.x", &longest] {
            assert!(named(name).is_ok(), "{name}");
        }
        assert_eq!(named("").unwrap_err(), "DRA driver name is empty");
        let long = "a".repeat(64);
        for name in [
            "a..b",
            "-a",
            "a-",
            "acme.com/gpu",
            "a_b",
            "ä",
            " ",
            "<any>",
            &long,
        ] {
            let error = named(name).unwrap_err();
            assert!(
                error.ends_with("is not a DNS name of at most 63 characters"),
                "{error}"
            );
        }
    }

    // TestRegistrationHandler/no-services
    #[test]
    fn a_driver_without_services_is_rejected_with_the_kubelets_text() {
        assert_eq!(
            candidate(&info("gpu.acme.com", "/dra.sock", &[])).unwrap_err(),
            "invalid supported gRPC versions of DRA driver plugin gpu.acme.com at endpoint /dra.sock: empty list of \
             supported gRPC services (aka supported versions)"
        );
    }
}
