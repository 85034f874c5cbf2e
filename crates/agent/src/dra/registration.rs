//! Registers a plugin of a DRA driver: checks what it sends, chooses the service, tells the node, and starts its session.
//!
//! A plugin is registered until its socket in `plugins_registry` goes, or another plugin of the same driver registers
//! the same endpoint. A plugin whose endpoint does not accept connections yet is registered, and not connected.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use devlet_core::dra::drivers::{self, DriverOffer, Refusal};
use devlet_core::{ConnectionId, DriverName, Node, PluginIdentity, ProcessId};
use devlet_kubelet_api::plugin_registration::PluginInfo;
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::{PeerCred, ReadLimits};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::client::DriverClient;
use super::clients::DriverClients;
use super::services::{self, NoService, NodeService, Services};
use super::session::{self, ConnectError};
use crate::config::Config;
use crate::grpc::call::CallError;
use crate::limits::{Limit, LimitExceeded, truncate_quoted};
use crate::long_decode::LongDecoder;
use crate::metrics::Metrics;
use crate::store::Store;

/// The longest name that a driver can have in Kubernetes.
const LONGEST_NAME: usize = 63;

/// A plugin that cannot be what it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDriver {
    /// No claim could name it. The text is the kubelet's.
    #[error("DRA driver name is empty")]
    NoName,
    /// No claim could name it.
    #[error("the DRA driver name {} is not a DNS name of at most {LONGEST_NAME} characters", truncate_quoted(.0))]
    Name(String),
    /// It names a socket relative to nothing.
    #[error("the endpoint {} is not an absolute path", truncate_quoted(.0))]
    Endpoint(String),
    /// It speaks nothing that is spoken here. The text is the kubelet's.
    #[error(
        "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {}: {problem}",
        endpoint.display()
    )]
    Services {
        /// The driver.
        driver: DriverName,
        /// Where it answers.
        endpoint: PathBuf,
        /// What is wrong.
        problem: NoService,
    },
}

/// A well-formed wish to serve a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The driver.
    pub driver: DriverName,
    /// Where the plugin answers.
    pub endpoint: PathBuf,
    /// What is spoken with it.
    pub services: Services,
    /// What it lists, in short.
    pub listed: String,
    /// The process that registers it.
    pub process: ProcessId,
}

impl Candidate {
    /// What the plugin behind `socket` says. Without an endpoint of its own it answers there.
    pub fn new(info: &PluginInfo, socket: &Path, peer: &PeerCred) -> Result<Self, InvalidDriver> {
        if info.name.is_empty() {
            return Err(InvalidDriver::NoName);
        }
        if !is_driver_name(&info.name) {
            return Err(InvalidDriver::Name(info.name.clone()));
        }
        let endpoint = match info.endpoint.as_str() {
            "" => socket,
            endpoint => Path::new(endpoint),
        };
        if !endpoint.is_absolute() {
            return Err(InvalidDriver::Endpoint(info.endpoint.clone()));
        }
        let driver = DriverName::from(info.name.as_str());
        let services = services::choose(&info.supported_versions).map_err(|problem| {
            let (driver, endpoint) = (driver.clone(), endpoint.to_owned());
            InvalidDriver::Services {
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

/// As Kubernetes has it: a DNS name, in which case does not matter.
fn is_driver_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let inner = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    text.len() <= LONGEST_NAME && text.split('.').all(is_label)
}

/// Why a plugin is not taken in.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// Its user may not serve the driver.
    #[error("user {uid} may not serve {driver}; allow it under access.register in devlet's configuration")]
    NotAllowed {
        /// The user.
        uid: u32,
        /// The driver.
        driver: DriverName,
    },
    /// It cannot be reached, or must not be.
    #[error(transparent)]
    Link(#[from] ConnectError),
    /// It does not say whether it has the one service that may be left.
    #[error("cannot tell whether the plugin has the service {}: {problem}", NodeService::V1alpha3.name())]
    Asked {
        /// What it said instead.
        problem: CallError,
    },
    /// It has no service that is spoken here.
    #[error(transparent)]
    Services(InvalidDriver),
    /// It asks for too much.
    #[error(transparent)]
    LimitExceeded(#[from] LimitExceeded),
    /// The node does not want it.
    #[error("{0}; a rule under access.register in devlet's configuration allows it with share: true")]
    Refused(#[from] drivers::RegisterError),
}

impl InvalidDriver {
    /// What to do about it, where the text does not say.
    fn hint(&self) -> &'static str {
        match self {
            Self::NoName | Self::Name(_) => "have the driver register under the name that claims have for it",
            Self::Endpoint(_) => "have the driver register the absolute path of its socket, or none",
            Self::Services { .. } => "use a release of the driver for Kubernetes 1.31 or later",
        }
    }
}

impl RegisterError {
    /// What to do about it, where the text does not say.
    fn hint(&self) -> &'static str {
        match self {
            Self::Services(problem) => problem.hint(),
            Self::Link(_) => "see whether the driver runs, and who owns its socket",
            Self::Asked { .. } => "see the driver's log",
            Self::LimitExceeded(_) => {
                "the limit can be raised in devlet's configuration, if the driver is not at fault"
            }
            Self::NotAllowed { .. } | Self::Refused(_) => "",
        }
    }
}

/// Takes plugins of drivers in.
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
    /// For long reports of health, which do not wait for plugins' lists.
    pub(crate) decoder: LongDecoder,
    /// Limits log entries about rejections.
    pub(crate) rejection_log: Arc<LogThrottle>,
    /// Limits on the bytes of processes that are dialled.
    pub(crate) read_limits: ReadLimits,
}

impl DriverRegistrar {
    /// Takes a plugin in; it stays until the answer is dropped.
    pub async fn register(&self, candidate: Candidate) -> Result<Registered, RegisterError> {
        let registered = self.take_in(candidate).await;
        self.metrics.driver_registered(&registered);
        if let Err(RegisterError::LimitExceeded(over)) = &registered {
            self.metrics.limit_hit(over.limit.name());
        }
        registered
    }

    /// A plugin says something impossible.
    pub(crate) fn invalid(&self, name: &str, socket: &Path, peer: &PeerCred, problem: &InvalidDriver) {
        self.note(name, socket, peer, &problem.to_string(), problem.hint());
    }

    /// Records that a plugin was rejected, for `devlet get drivers` and, the first time, for the log.
    pub(crate) fn refused(&self, name: &str, socket: &Path, peer: &PeerCred, error: &RegisterError) {
        self.note(name, socket, peer, &error.to_string(), error.hint());
    }

    fn note(&self, name: &str, socket: &Path, peer: &PeerCred, reason: &str, hint: &str) {
        let refusal = Refusal {
            driver: name.to_owned(),
            reason: reason.to_owned(),
            hint: hint.to_owned(),
        };
        let (socket, now) = (socket.display().to_string(), self.store.now());
        let is_news = self.store.update(|node| {
            let last = |node: &Node| {
                let mut refused = node.refused_drivers();
                let known = refused.find(|(known, _)| *known == socket);
                known.map(|(_, refused)| refused.refusal.clone())
            };
            let before = last(node);
            node.driver_refused(&socket, refusal, now);
            last(node) != before
        });
        if is_news && let Some(suppressed) = self.rejection_log.try_acquire(Instant::now()) {
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

    /// The plugin at a socket was taken in, or the socket is gone.
    pub(crate) fn refusal_ended(&self, socket: &Path) {
        let socket = socket.display().to_string();
        let is_known = |node: &Node| node.refused_drivers().any(|(known, _)| known == socket);
        if self.store.read(is_known) {
            self.store.update(|node| node.refusal_ended(&socket));
        }
    }

    async fn take_in(&self, candidate: Candidate) -> Result<Registered, RegisterError> {
        let (config, driver) = (&self.config, &candidate.driver);
        self.in_time(&candidate)?;
        if !config.access.may_register(candidate.process.uid, driver.as_str()) {
            return Err(RegisterError::NotAllowed {
                uid: candidate.process.uid,
                driver: driver.clone(),
            });
        }
        let endpoint = candidate.endpoint.display().to_string();
        let check_quota = |node: &Node| {
            let plugin = PluginIdentity {
                process: candidate.process,
                name: driver.as_str(),
                endpoint: &endpoint,
            };
            let (limits, access) = (&config.limits, &config.access);
            let checked =
                node.check_plugin_quota(plugin, &limits.plugin_limits(), |uid| access.is_trusted(uid));
            checked.map_err(|error| limits.quota_exceeded(&error))
        };
        // Before the plugin is called, and again when it is added.
        self.store.read(check_quota)?;
        let is_alpha = candidate.services.node == NodeService::V1alpha3;
        let dialed = match session::dial(&candidate, config, &self.read_limits).await {
            Ok(dialed) => Some(dialed),
            // It may listen in a moment.
            Err(ConnectError::Dial(_)) if !is_alpha => None,
            Err(error) => return Err(error.into()),
        };
        if let (Some(dialed), true) = (&dialed, is_alpha) {
            let rpcs = self.metrics.driver(driver);
            let client = DriverClient::new(dialed, &candidate.services, rpcs, &config.limits);
            let asked = client.has_service(config.deadlines.options).await;
            if !asked.map_err(|problem| RegisterError::Asked { problem })? {
                return Err(RegisterError::Services(InvalidDriver::Services {
                    driver: driver.clone(),
                    endpoint: candidate.endpoint,
                    problem: NoService::Unknown {
                        listed: candidate.listed,
                    },
                }));
            }
        }
        let uid = dialed
            .as_ref()
            .map_or(candidate.process.uid, |dialed| dialed.peer.uid);
        let offer = DriverOffer {
            driver: driver.clone(),
            endpoint: endpoint.clone(),
            process: ProcessId {
                uid,
                ..candidate.process
            },
            may_share: config.access.may_share(uid, driver.as_str()),
            service: candidate.services.node.name().to_owned(),
            service_reason: candidate.services.why.clone(),
            health_service: candidate.services.health.map(|each| each.name().to_owned()),
        };
        let now = self.store.now();
        let (id, replaced) = self.store.update(|node| {
            check_quota(node)?;
            Ok::<_, RegisterError>(node.driver_registered(offer, now)?)
        })?;
        if let Some(replaced) = replaced {
            self.drivers.cancel(replaced);
        }
        let cancelled = self.stop.child_token();
        self.drivers.insert(id, cancelled.clone());
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

    /// Whether its process may register again already.
    fn in_time(&self, candidate: &Candidate) -> Result<(), LimitExceeded> {
        if self.registrations.try_acquire(candidate.process, Instant::now()) {
            return Ok(());
        }
        let most = usize::try_from(self.config.limits.registrations_per_minute).unwrap_or(usize::MAX);
        Err(Limit::REGISTRATIONS_PER_MINUTE.exceeded("the process registers too often", most))
    }
}

/// A plugin that is registered.
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
        let news = registrar
            .store
            .update(|node| node.driver_deregistered(self.id, now));
        registrar.drivers.cancel(self.id);
        if news {
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

    fn candidate(info: &PluginInfo) -> Result<Candidate, String> {
        let socket = Path::new("/registry/x.sock");
        Candidate::new(info, socket, &PEER).map_err(|error| error.to_string())
    }

    #[test]
    fn a_driver_answers_at_its_endpoint_or_where_it_registers() {
        let there = candidate(&info("gpu.acme.com", "/plugins/dra.sock", &["v1.DRAPlugin"])).unwrap();
        assert_eq!(there.endpoint, Path::new("/plugins/dra.sock"));
        assert_eq!((there.process.uid, there.process.pid), (7, Some(9)));
        let here = candidate(&info("gpu.acme.com", "", &["v1.DRAPlugin"])).unwrap();
        assert_eq!(here.endpoint, Path::new("/registry/x.sock"));
        let nowhere = candidate(&info("gpu.acme.com", "dra.sock", &["v1.DRAPlugin"]));
        assert_eq!(
            nowhere.unwrap_err(),
            r#"the endpoint "dra.sock" is not an absolute path"#
        );
    }

    #[test]
    fn names_that_no_claim_can_have_are_refused() {
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
            let said = named(name).unwrap_err();
            assert!(
                said.ends_with("is not a DNS name of at most 63 characters"),
                "{said}"
            );
        }
    }

    // TestRegistrationHandler/no-services
    #[test]
    fn a_driver_without_services_is_told_so_in_the_kubelets_words() {
        assert_eq!(
            candidate(&info("gpu.acme.com", "/dra.sock", &[])).unwrap_err(),
            "invalid supported gRPC versions of DRA driver plugin gpu.acme.com at endpoint /dra.sock: empty list of \
             supported gRPC services (aka supported versions)"
        );
    }
}
