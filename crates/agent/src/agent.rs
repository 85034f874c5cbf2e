//! The node, put together: sockets, tasks, state, and what callers can do.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::{ClaimUid, DriverName, Node, Pod, PodRequest, PodUid, ReserveError, Source};
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_uds::rate_limit::{KeyedRateLimiter, LogThrottle};
use devlet_uds::server::{self, ServeError, ServerLimits};
use devlet_uds::{ListenError, Listener, ReadLimits, SocketHandle, SocketMissing};
use futures_util::future::join_all;
use tokio::sync::OnceCell;
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use crate::capacity::{self, Capacities};
use crate::config::Config;
use crate::device_plugin::plugins::Plugins;
use crate::device_plugin::registration::RegistrationService;
use crate::dra::drivers::Drivers;
use crate::dra::registration::DriverRegistrar;
use crate::dra::slices::{self, ResourceSlices};
use crate::limits::Limit;
use crate::limits::portions::Turns;
use crate::limits::seats::Seats;
use crate::metrics::Metrics;
use crate::plugin_registry;
use crate::plugin_registry::handshake::Handshake;
use crate::plugin_registry::status::{RegistryStatus, Summary};
use crate::plugin_registry::watcher::{WatchError, Watcher};
use crate::root;
use crate::store::{self, ForgetClaimError, OpenError, OpenReport, StopError, Store, WriteError};
use crate::words::NamedPod;
use crate::workflow::admit::{self, AdmitError, RealCalls};
use crate::workflow::claims::Claims;
use crate::workflow::register::{Registrar, repetitions_per_minute};
use crate::workflow::remove;
pub use crate::workflow::remove::{Abandoned, RemoveError};
use crate::workflow::start_container::{self, StartContainerError};

const MINUTE: Duration = Duration::from_secs(60);

/// Time after which a connection to `kubelet.sock` without a call in flight is closed.
const REGISTRATION_IDLE: Duration = Duration::from_secs(10);

/// Time for tasks to end after the drain time of the server.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Longest wait for the disk when the node is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory cannot be made.
    #[error("cannot create {}: {problem}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system says.
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
    /// Another node has this root.
    #[error("another devlet runs on {}; stop it, or choose another --root-dir", root.display())]
    Locked {
        /// The root.
        root: PathBuf,
    },
    /// The lock cannot be had.
    #[error("cannot lock {}: {problem}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the system says.
        problem: io::Error,
    },
    /// The socket for plugins is somebody else's, or cannot be made.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The directory of plugins' sockets cannot be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The kernel does not say which boot this is.
    #[error("cannot read {BOOT_ID}: {problem}")]
    BootId {
        /// What the system says.
        problem: io::Error,
    },
    /// The state cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Knows which pods there are.
///
/// A function that makes the list, `async || Some(...)`, is one.
pub trait ActivePods: Send + Sync {
    /// All pods that there are, or `None` as long as that is not known: then nothing is removed.
    ///
    /// A pod belongs on the list before it is admitted, and until its containers have ended for good.
    fn active(&self) -> impl Future<Output = Option<BTreeSet<PodUid>>> + Send;
}

impl<F, A> ActivePods for F
where
    F: Fn() -> A + Send + Sync,
    A: Future<Output = Option<BTreeSet<PodUid>>> + Send,
{
    fn active(&self) -> impl Future<Output = Option<BTreeSet<PodUid>>> + Send {
        self()
    }
}

/// A running node. Clones are the same node.
#[derive(Debug, Clone)]
pub struct Agent {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Arc<Config>,
    store: Store,
    plugins: Plugins,
    claims: Claims<Drivers>,
    metrics: Metrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    kubelet_socket: SocketHandle,
    registry: RegistryStatus,
    api_socket: OnceLock<SocketHandle>,
    /// Set once everything has ended well.
    stopped: OnceCell<()>,
    /// Held as long as we run.
    _lock: File,
}

impl Agent {
    /// Starts a node. Plugins can register when this returns.
    pub async fn start(config: Config) -> Result<(Self, OpenReport), StartError> {
        let config = Arc::new(config);
        root::prepare(&config)?;
        let (lock, set_aside) = root::lock(&config)?;
        let before = sockets(&config);
        // Before anything is touched: a live kubelet keeps its directory.
        let listener = devlet_uds::listen(config.kubelet_socket(), devlet_uds::DEFAULT_MODE)?;
        let (store, mut report) = Store::open(open_options(&config)?)?;
        report.set_aside.extend(set_aside);
        // Only now: plugins of a node that does not start keep their sockets.
        remove_sockets(before);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let (plugins, metrics) = (Plugins::default(), Metrics::default());
        metrics.opened(&report);
        let registrar = Registrar {
            config: Arc::clone(&config),
            store: store.clone(),
            plugins: plugins.clone(),
            seats: Seats::default(),
            metrics: metrics.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            registrations: Arc::new(KeyedRateLimiter::new(
                config.limits.registrations_per_minute,
                MINUTE,
            )),
            repetitions: Arc::new(KeyedRateLimiter::new(
                repetitions_per_minute(&config.limits),
                MINUTE,
            )),
            decoding: Turns::new(stop.clone()),
            refusals: Arc::new(LogThrottle::new(Instant::now())),
            read_limits: ReadLimits::default(),
        };
        let drivers = Drivers::new(Arc::clone(&config));
        let watcher = Watcher::new(config.plugins_registry(), config.access.own_uid)?;
        let handshake = Handshake {
            drivers: DriverRegistrar::beside(&registrar, drivers.clone()),
            registrar: registrar.clone(),
        };
        let registry = RegistryStatus::default();
        tasks.spawn(watch(watcher, handshake, registry.clone(), stop.clone()));

        let service = RegistrationService::new(registrar);
        let largest = config.limits.registration_bytes;
        let today = v1beta1::registration_server::RegistrationServer::new(service.clone());
        let of_2017 = v1alpha2::registration_server::RegistrationServer::new(service);
        let today = today.max_decoding_message_size(largest);
        let of_2017 = of_2017.max_decoding_message_size(largest);
        let routes = Routes::new(today).add_service(of_2017);
        let access = config.access.clone();
        let kubelet_socket = listener.handle();
        let listener = listener.admit(move |peer| access.may_knock(peer.uid));
        // Peers connect here to register.
        let limits = ServerLimits {
            expects_call: true,
            idle: Some(REGISTRATION_IDLE),
            ..config.limits.server.clone()
        };
        let serving = server::serve(
            listener,
            routes,
            limits,
            metrics.on_refusal(Limit::CONNECTIONS_PER_UID),
            stop.clone().cancelled_owned(),
        );
        tasks.spawn(report_end(serving));
        tasks.spawn(capacity::end_graces(store.clone(), stop.clone()));
        let forgetting = capacity::forget_idle(store.clone(), stop.clone(), capacity::FORGET_PAUSE);
        tasks.spawn(forgetting);
        let claims = Claims::new(
            store.clone(),
            drivers,
            metrics.clone(),
            tasks.clone(),
            stop.clone(),
            config.limits.bytes_per_driver,
        );
        tasks.spawn(claims.clone().run());
        let inner = Inner {
            config,
            store,
            plugins,
            claims,
            metrics,
            tasks,
            stop,
            kubelet_socket,
            registry,
            api_socket: OnceLock::new(),
            stopped: OnceCell::new(),
            _lock: lock,
        };
        Ok((
            Self {
                inner: Arc::new(inner),
            },
            report,
        ))
    }

    /// How the node is set up.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// The node's state, for questions.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// What is counted and measured.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Returns the sockets of the node that peers cannot dial. Sockets on a disk that hangs are among them.
    pub async fn unreachable(&self) -> Vec<SocketMissing> {
        let sockets = [Some(&self.inner.kubelet_socket), self.inner.api_socket.get()];
        let checks = sockets.into_iter().flatten().map(SocketHandle::check);
        join_all(checks)
            .await
            .into_iter()
            .filter_map(Result::err)
            .collect()
    }

    /// Sockets and directories in `plugins_registry` that are not served.
    pub(crate) fn registry_summary(&self) -> Summary {
        self.inner.registry.get()
    }

    /// The socket of our API belongs to the node from now on.
    pub(crate) fn serves_api_on(&self, listener: &Listener) {
        // There is one; a second could not have been made.
        let _ = self.inner.api_socket.set(listener.handle());
    }

    /// Completes when the node is asked to stop.
    pub fn stopping(&self) -> CancellationToken {
        self.inner.stop.clone()
    }

    /// Runs a task until the node stops, and makes stopping wait for it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.spawn(task);
    }

    /// Calls back with the capacity of all resources: at once, and whenever it is another one, also when the grace
    /// period of a plugin that left is over. Never twice at the same time, and never with anything locked; changes that
    /// come meanwhile are told as one. What takes long is to be handed over: it would keep the node from stopping.
    pub fn on_capacity(&self, tell: impl FnMut(&Capacities) + Send + 'static) {
        let (store, stop) = (self.inner.store.clone(), self.inner.stop.clone());
        self.spawn(capacity::follow(store, stop, tell));
    }

    /// Admits a pod: everything it asks for, on disk when this returns, or nothing. Plugins that are not there yet are
    /// waited for, and all plugins must have answered by the deadline. See [`admit::admit`].
    ///
    /// On a runtime with several threads, the task that awaits this may write it itself, and does nothing else meanwhile:
    /// if it has more to look after, spawn this.
    pub async fn admit(
        &self,
        request: &PodRequest,
        deadline: Instant,
        waiting: impl FnMut(&ReserveError),
    ) -> Result<Pod, AdmitError> {
        self.admit_unless(request, deadline, &self.inner.stop, waiting)
            .await
    }

    /// Like [`Agent::admit`], and gives up when told to, as long as nothing is being written.
    pub async fn admit_unless(
        &self,
        request: &PodRequest,
        deadline: Instant,
        give_up: &CancellationToken,
        mut waiting: impl FnMut(&ReserveError),
    ) -> Result<Pod, AdmitError> {
        let Inner {
            store,
            plugins,
            claims,
            config,
            metrics,
            ..
        } = &*self.inner;
        let calls = RealCalls {
            store,
            plugins,
            config,
            metrics,
        };
        let mut request = request.clone();
        request.metadata.admitted_at = Some(store.now());
        let admission = metrics.admission();
        let waits = |reason: &ReserveError| {
            waiting(reason);
            admission.waits(reason)
        };
        let ended = admit::admit(store, &calls, claims, &request, deadline, give_up, waits).await;
        admission.ended(&ended);
        ended
    }

    /// What the runtime must add to a container that is about to start. See
    /// [`start_container::start_container`].
    pub async fn start_container(
        &self,
        pod: &PodUid,
        container: &str,
        deadline: Instant,
    ) -> Result<(RunOptions, Vec<Conflict>), StartContainerError> {
        let Inner {
            store,
            plugins,
            config,
            ..
        } = &*self.inner;
        start_container::start_container(store, plugins, &config.deadlines, pod, container, deadline).await
    }

    /// Removes a pod: when this returns its devices are free, and the claims that it was the last to hold are unprepared.
    /// An admission of the same pod that is under way is waited for. A pod of which only claims are left can be removed
    /// again, to wait for them.
    pub async fn remove(&self, pod: &PodUid, deadline: Instant) -> Result<(), RemoveError> {
        self.remove_without(pod, &BTreeSet::new(), deadline)
            .await
            .map(drop)
    }

    /// Like [`Agent::remove`], without waiting for these drivers: see [`Agent::abandon`]. What they were given up on for.
    pub async fn remove_without(
        &self,
        pod: &PodUid,
        drivers: &BTreeSet<DriverName>,
        deadline: Instant,
    ) -> Result<Vec<Abandoned>, RemoveError> {
        let Inner { store, claims, .. } = &*self.inner;
        remove::remove(store, claims, pod, drivers, deadline).await
    }

    /// Gives up on a driver for the claims that a removed pod was the last to hold: nobody waits for it any longer. That is
    /// on record when this returns, and visible; should the driver come back, it is still asked to unprepare them. The
    /// claims that this is about.
    pub async fn abandon(&self, pod: &PodUid, driver: &DriverName) -> Result<Vec<ClaimUid>, WriteError> {
        remove::abandon(&self.inner.store, pod, driver).await
    }

    /// The same for one claim that no pod holds, whoever left it: one of a kubelet's file may never have had a pod here.
    /// Whether the driver had something to do for it.
    pub async fn abandon_claim(&self, claim: &ClaimUid, driver: &DriverName) -> Result<bool, WriteError> {
        remove::abandon_claim(&self.inner.store, claim, driver).await
    }

    /// Forgets a claim for good that was abandoned at all drivers that had something to do for it: they are not asked to
    /// unprepare it should they come back. That is on disk when this returns.
    pub async fn forget_claim(&self, claim: &ClaimUid) -> Result<(), ForgetClaimError> {
        self.inner.store.forget_claim(claim).await?;
        tracing::warn!(%claim, "the claim is forgotten: no driver is asked any longer to unprepare it");
        Ok(())
    }

    /// Whether a pod may still have to be unprepared: as long as that is so, it has not ended.
    pub fn might_need_unprepare(&self, pod: &PodUid) -> bool {
        self.inner.store.read(|node| node.might_need_unprepare(pod))
    }

    /// Asks an embedder's source of pods at once and from then on, with this pause in between, and removes the pods that
    /// are gone: see [`Agent::reconcile`].
    pub fn follow_pods(&self, source: impl ActivePods + 'static, every: Duration) {
        let agent = self.clone();
        self.spawn(async move {
            let mut ticks = tokio::time::interval(every);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let asking = async {
                loop {
                    ticks.tick().await;
                    agent.reconcile(&source).await;
                }
            };
            tokio::select! {
                () = asking => {}
                () = agent.inner.stop.cancelled() => {}
            }
        });
    }

    /// Has what drivers published about this node wiped when they are gone. See [`slices`].
    pub fn wipe_slices(&self, slices: impl ResourceSlices + 'static) {
        let (store, stop) = (self.inner.store.clone(), self.inner.stop.clone());
        let started = store.now();
        self.spawn(slices::follow(store, slices, started, stop));
    }

    /// Asks an embedder's source once which pods there are. Those of its own ([`Source::Embedder`]), and imported ones,
    /// that are not on its list are gone for good and are removed. The pods that were; their claims are unprepared without
    /// anybody waiting for it.
    ///
    /// The list speaks only for pods that were admitted before it was asked for: one that is admitted, or admitted
    /// again, while the list is made is safe.
    pub async fn reconcile(&self, source: &impl ActivePods) -> Vec<PodUid> {
        let store = &self.inner.store;
        let asked = store.read(Node::admissions);
        let Some(active) = source.active().await else {
            return Vec::new();
        };
        let mut orphans = store.read(|node| node.orphans(Source::Embedder, &active, asked));
        // No list has them: only an operator knows what became of them.
        orphans.retain(|pod| !store::is_unknown_pod(pod));
        // All at once: they share a write.
        let removals = orphans.into_iter().map(async |pod| {
            // It may have been admitted again since we looked.
            let label = store.read(|node| NamedPod::of(node, &pod)).label();
            let still = |node: &Node| node.list_speaks_for(&pod, Source::Embedder, asked);
            match store.release_if(&pod, still).await {
                Ok(()) => {
                    tracing::info!(pod = %label, uid = %pod, "inactive pod removed");
                    Some(pod)
                }
                Err(store::ReleaseError::Refused(_)) => None,
                Err(store::ReleaseError::Write(error)) => {
                    tracing::warn!(pod = %label, uid = %pod, %error, "inactive pod not removed yet: state cannot be written");
                    None
                }
            }
        });
        join_all(removals).await.into_iter().flatten().collect()
    }

    /// Stops the node: plugins are let go, and everything is on disk when this returns. A node that has stopped stays so.
    ///
    /// Returns within the drain time of the server and a few seconds, even if the disk does not answer.
    pub async fn stop(&self) -> Result<(), StopError> {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        // Calls are cut after the drain time. A task that still waits then waits for a disk that does not answer.
        let limit = self.inner.config.limits.server.drain.saturating_add(STOP_GRACE);
        if timeout(limit, self.inner.tasks.wait()).await.is_err() {
            tracing::warn!(?limit, "tasks still running after a stop");
        }
        let Inner { store, stopped, .. } = &*self.inner;
        let stop = || async {
            // Otherwise drivers are asked again after the next start, by devlet or by a kubelet.
            if let Err(error) = store.record_claims().await {
                tracing::warn!(%error, "what drivers did last is not on disk; they are asked again after the next start");
            }
            store.stop().await
        };
        let stop = || async {
            let stopped = timeout(STOP_TIMEOUT, stop()).await;
            stopped.unwrap_or(Err(StopError::Hangs { waited: STOP_TIMEOUT }))
        };
        stopped.get_or_try_init(stop).await.copied()
    }
}

async fn watch(watcher: Watcher, handshake: Handshake, status: RegistryStatus, stop: CancellationToken) {
    if let Err(error) = plugin_registry::run(watcher, handshake, status, stop).await {
        tracing::error!(%error, "plugins in plugins_registry are not found any longer");
    }
}

async fn report_end(serving: impl Future<Output = Result<(), ServeError>>) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "device plugins cannot register any longer");
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

/// The sockets of plugins, and what tells each from a later one of that name.
fn sockets(config: &Config) -> Vec<(PathBuf, SocketMark)> {
    let Ok(entries) = std::fs::read_dir(config.device_plugins()) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let plugins = paths.filter(|path| *path != config.kubelet_socket());
    plugins
        .filter_map(|path| socket_mark(&path).map(|mark| (path, mark)))
        .collect()
}

/// Inode and time of change.
type SocketMark = (u64, i64, i64);

fn socket_mark(path: &Path) -> Option<SocketMark> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| (metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

/// A kubelet that starts removes the sockets of all plugins, live ones too, and many plugins wait for just that to
/// register again. Those that were made since ours appeared belong to plugins that have noticed already.
fn remove_sockets(before: Vec<(PathBuf, SocketMark)>) {
    for (path, mark) in before {
        if socket_mark(&path) == Some(mark)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(socket = %path.display(), %error, "the socket of a plugin from before is not removed");
        }
    }
}
