//! Builds a node: sockets, state, services and background tasks.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::server::{self, ServeError, ServerLimits};
use devlet_uds::{ListenError, Listener, ReadLimits};
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use super::{Inner, root};
use crate::cluster::ClusterReport;
use crate::config::Config;
use crate::device_plugin::clients::PluginClients;
use crate::dra::clients::DriverClients;
use crate::dra::registration::DriverRegistrar;
use crate::limits::{Limit, MAX_SHORT_MESSAGE, PLUGIN_FAILURES_PER_MINUTE, REGISTRATIONS_PER_RESOURCE};
use crate::long_decode::LongDecoder;
use crate::metrics::Metrics;
use crate::plugin_registry;
use crate::plugin_registry::handshake::Handshake;
use crate::plugin_registry::status::RegistryStatus;
use crate::plugin_registry::watcher::{WatchError, Watcher};
use crate::reconcile::{self, capacity};
use crate::registration::RegistrationService;
use crate::shield::report::HAS_LEFT;
use crate::shield::{self, ShieldReport};
use crate::store::{self, OpenError, OpenReport, Store};
use crate::workflow::claims::Claims;
use crate::workflow::lease::LeaseWorkflow;
use crate::workflow::register_plugin::Registrar;

const MINUTE: Duration = Duration::from_secs(60);

/// Time after which a connection to `kubelet.sock` without a call in flight is closed.
const REGISTRATION_IDLE: Duration = Duration::from_secs(10);

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The reason why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory cannot be created.
    #[error("cannot create {}: {problem}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        problem: io::Error,
    },
    /// Another user controls a directory or file of the state.
    #[error("{}: {problem}, so that user could replace devlet's state; to allow it: {remedy}", path.display())]
    Untrusted {
        /// The directory or file.
        path: PathBuf,
        /// The users besides root and devlet's own that may write it.
        problem: String,
        /// The command that changes that.
        remedy: String,
    },
    /// Another node uses this root directory.
    #[error("another devlet runs on {}; stop it, or choose another --root-dir", root.display())]
    Locked {
        /// The root.
        root: PathBuf,
    },
    /// The lock file cannot be locked.
    #[error("cannot lock {}: {problem}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The error of the system.
        problem: io::Error,
    },
    /// The socket for plugins belongs to another process, or cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The directory of plugins' sockets cannot be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The kubelet's directory cannot be watched.
    #[error(transparent)]
    Shield(#[from] shield::WatchError),
    /// The id of the current boot cannot be read.
    #[error("cannot read {BOOT_ID}: {problem}")]
    BootId {
        /// The error of the system.
        problem: io::Error,
    },
    /// The state cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Starts a node. Plugins can register when this returns.
pub(super) fn start(config: Config) -> Result<(Inner, OpenReport), StartError> {
    let config = Arc::new(config);
    root::prepare(&config)?;
    let (lock, set_aside) = root::lock(&config)?;
    let old_sockets = plugin_sockets(&config);
    // Before any change: if a kubelet is running, its directory stays as it is.
    let listener = devlet_uds::listen(config.kubelet_socket(), devlet_uds::DEFAULT_MODE)?;
    let kubelet_socket = listener.handle();
    let (store, mut report) = Store::open(open_options(&config)?)?;
    report.quarantined.extend(set_aside);
    // Only now: if the node does not start, plugins keep their sockets.
    remove_sockets(old_sockets);
    let metrics = Metrics::default();
    metrics.files_set_aside(report.quarantined.len());
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let registrar = registrar(&config, &store, &metrics, &tasks, &stop);
    let plugins = registrar.clients.clone();
    let drivers = DriverClients::new(Arc::clone(&config));
    let registry = watch_registry(registrar.clone(), drivers.clone())?;
    serve_registration(listener, registrar);
    tasks.spawn(capacity::end_graces(store.clone(), stop.clone()));
    let eviction = capacity::evict_idle(store.clone(), stop.clone(), capacity::EVICT_PAUSE);
    tasks.spawn(eviction);
    let claims = Claims::new(
        store.clone(),
        drivers,
        metrics.clone(),
        tasks.clone(),
        stop.clone(),
        config.limits.bytes_per_driver,
    );
    tasks.spawn(reconcile::claims::run(claims.clone(), stop.clone()));
    let shield = ShieldReport::default();
    let mut leases = None;
    if let Some(settings) = &config.shield {
        let workflow = LeaseWorkflow {
            store: store.clone(),
            plugins: plugins.clone(),
            config: Arc::clone(&config),
            shield: Arc::new(settings.clone()),
            metrics: metrics.clone(),
            runtime: Arc::default(),
        };
        leases = Some(workflow.clone());
        if config.left_marker().exists() {
            shield.update(|state| state.left = Some(HAS_LEFT.to_owned()));
        }
        shield::start(workflow, shield.clone(), &tasks, &stop)?;
    }
    let inner = Inner {
        config,
        store,
        plugins,
        claims,
        plugin_failures: KeyedRateLimiter::new(PLUGIN_FAILURES_PER_MINUTE, MINUTE),
        metrics,
        cluster: ClusterReport::default(),
        claim_source: OnceLock::new(),
        shield,
        leases,
        tasks,
        stop,
        kubelet_socket,
        registry,
        api_socket: OnceLock::new(),
        stopped: OnceCell::new(),
        _lock: lock,
    };
    Ok((inner, report))
}

fn registrar(
    config: &Arc<Config>,
    store: &Store,
    metrics: &Metrics,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Registrar {
    Registrar {
        config: Arc::clone(config),
        store: store.clone(),
        clients: PluginClients::default(),
        metrics: metrics.clone(),
        tasks: tasks.clone(),
        stop: stop.clone(),
        registrations: Arc::new(KeyedRateLimiter::new(
            config.limits.registrations_per_minute,
            MINUTE,
        )),
        resource_registrations: Arc::new(KeyedRateLimiter::new(
            REGISTRATIONS_PER_RESOURCE,
            Duration::from_secs(1),
        )),
        decoder: LongDecoder::default(),
        rejection_log: Arc::new(LogThrottle::new(Instant::now())),
        read_limits: ReadLimits::default(),
    }
}

/// Starts to watch `plugins_registry`.
fn watch_registry(registrar: Registrar, drivers: DriverClients) -> Result<RegistryStatus, StartError> {
    let config = &registrar.config;
    let watcher = Watcher::new(config.plugins_registry(), config.access.own_uid)?;
    let (tasks, stop) = (registrar.tasks.clone(), registrar.stop.clone());
    let handshake = Handshake {
        drivers: DriverRegistrar {
            config: Arc::clone(config),
            store: registrar.store.clone(),
            drivers,
            metrics: registrar.metrics.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            registrations: Arc::clone(&registrar.registrations),
            decoder: LongDecoder::default(),
            rejection_log: Arc::clone(&registrar.rejection_log),
            read_limits: registrar.read_limits.clone(),
        },
        registrar,
    };
    let status = RegistryStatus::default();
    let watching = plugin_registry::run(watcher, handshake, status.clone(), stop);
    tasks.spawn(async move {
        if let Err(error) = watching.await {
            tracing::error!(%error, "plugins_registry watcher stopped");
        }
    });
    Ok(status)
}

/// Starts to serve the registration of device plugins.
fn serve_registration(listener: Listener, registrar: Registrar) {
    let Registrar {
        config,
        metrics,
        tasks,
        stop,
        ..
    } = registrar.clone();
    let service = RegistrationService::new(registrar);
    let v1beta1 = v1beta1::registration_server::RegistrationServer::new(service.clone());
    let v1beta1 = v1beta1.max_decoding_message_size(MAX_SHORT_MESSAGE);
    let v1alpha2 = v1alpha2::registration_server::RegistrationServer::new(service);
    let v1alpha2 = v1alpha2.max_decoding_message_size(MAX_SHORT_MESSAGE);
    let routes = Routes::new(v1beta1).add_service(v1alpha2);
    let access = config.access.clone();
    let listener = listener.admit(move |peer| access.may_connect(peer.uid));
    // The only reason to connect here is to register.
    let limits = ServerLimits {
        expects_call: true,
        connections_per_uid: config.limits.connections_per_uid,
        idle: Some(REGISTRATION_IDLE),
        ..ServerLimits::default()
    };
    let serving = server::serve(
        listener,
        routes,
        limits,
        metrics.on_refusal(Limit::CONNECTIONS_PER_UID),
        stop.cancelled_owned(),
    );
    tasks.spawn(report_end(serving));
}

async fn report_end(serving: impl Future<Output = Result<(), ServeError>>) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "registration of device plugins stopped");
    }
}

fn open_options(config: &Config) -> Result<store::OpenOptions, StartError> {
    let boot_id = std::fs::read_to_string(BOOT_ID).map_err(|problem| StartError::BootId { problem })?;
    let mut options = store::OpenOptions::new(config.database(), boot_id.trim());
    options.node_id = Some(config.node_id());
    options.checkpoint = Some(config.kubelet_checkpoint());
    options.claims = Some(config.kubelet_claims());
    options.on_reboot = config.on_reboot;
    Ok(options)
}

/// Returns the sockets of plugins, each with a stamp that a later socket of that name does not have.
fn plugin_sockets(config: &Config) -> Vec<(PathBuf, SocketStamp)> {
    let Ok(entries) = std::fs::read_dir(config.device_plugins()) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let plugins = paths.filter(|path| *path != config.kubelet_socket());
    plugins
        .filter_map(|path| socket_stamp(&path).map(|stamp| (path, stamp)))
        .collect()
}

/// Inode, and time of the last status change.
type SocketStamp = (u64, i64, i64);

fn socket_stamp(path: &Path) -> Option<SocketStamp> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| (metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

/// Removes the sockets of all plugins, as a kubelet does when it starts: many plugins take that as the signal to
/// register again. Sockets that were created since then belong to plugins that have registered again.
fn remove_sockets(before: Vec<(PathBuf, SocketStamp)>) {
    for (path, stamp) in before {
        if socket_stamp(&path) == Some(stamp)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(socket = %path.display(), %error, "old plugin socket not removed");
        }
    }
}
