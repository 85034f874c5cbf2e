//! The node: its state, its tasks, and the operations of callers.
//!
//! `start.rs` builds it from a configuration, and `root.rs` prepares its directories.

mod root;
mod start;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::{ClaimUid, DriverName, Pod, PodRequest, PodUid, ReserveError, ResourceName};
use futures_util::future::join_all;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cluster::ClusterReport;
use crate::config::Config;
use crate::device_plugin::clients::PluginClients;
use crate::dra::clients::DriverClients;
use crate::manifest::DynClaimSource;
use crate::metrics::{Metrics, StoreView, View};
use crate::plugin_registry::status::{RegistryStatus, Summary};
use crate::reconcile::capacity::{self, Capacities};
use crate::reconcile::orphans;
pub use crate::reconcile::orphans::ActivePods;
use crate::reconcile::slices::{self, ResourceSlices};
use crate::shield::report::{HAS_LEFT, RuntimeState};
use crate::shield::{ShieldReport, runtime};
use crate::store::{ForgetClaimError, OpenReport, StopError, Store, WriteError};
use crate::workflow::REJECTION_PAUSE;
use crate::workflow::admit::{self, AdmitError, GrpcPluginCalls};
use crate::workflow::claims::Claims;
use crate::workflow::lease::LeaseWorkflow;
use crate::workflow::lease::hand_over::{AdoptError, LeaveError};
use crate::workflow::remove;
pub use crate::workflow::remove::{Abandoned, RemoveError};
use crate::workflow::start_container::{self, StartContainerError};
use devlet_uds::rate_limit::KeyedRateLimiter;
use devlet_uds::server::ServerLimits;
use devlet_uds::{Listener, SocketHandle, SocketMissing};

pub use start::StartError;

/// Time for tasks to end after the drain time of the server.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Longest wait for the disk when the node is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A running node. Clones share it.
#[derive(Debug, Clone)]
pub struct Agent {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Arc<Config>,
    store: Store,
    plugins: PluginClients,
    claims: Claims<DriverClients>,
    /// Admissions that failed at plugins of each resource.
    plugin_failures: KeyedRateLimiter<ResourceName>,
    metrics: Metrics,
    cluster: ClusterReport,
    claim_source: OnceLock<Arc<dyn DynClaimSource>>,
    shield: ShieldReport,
    /// `None` without a kubelet beside devlet.
    leases: Option<LeaseWorkflow>,
    tasks: TaskTracker,
    stop: CancellationToken,
    kubelet_socket: SocketHandle,
    registry: RegistryStatus,
    api_socket: OnceLock<SocketHandle>,
    /// Set once everything has ended without an error.
    stopped: OnceCell<()>,
    /// Held while the node runs.
    _lock: File,
}

impl Agent {
    /// Starts a node. Plugins can register when this returns.
    pub async fn start(config: Config) -> Result<(Self, OpenReport), StartError> {
        let (inner, report) = start::start(config)?;
        let inner = Arc::new(inner);
        Ok((Self { inner }, report))
    }

    /// Returns the configuration of the node.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Returns the state of the node.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Returns the metrics of the node.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Returns the state of an integration with a cluster, which publishes it here.
    pub fn cluster(&self) -> &ClusterReport {
        &self.inner.cluster
    }

    /// Sets the source of claims that are not among the manifests of an admission over the API. The first call counts.
    pub fn set_claim_source(&self, source: Arc<dyn DynClaimSource>) {
        let _ = self.inner.claim_source.set(source);
    }

    /// Returns the source of claims of [`Agent::set_claim_source`].
    pub(crate) fn claim_source(&self) -> Option<&dyn DynClaimSource> {
        self.inner.claim_source.get().map(AsRef::as_ref)
    }

    /// Returns what is known about the kubelet beside devlet.
    pub fn shield(&self) -> &ShieldReport {
        &self.inner.shield
    }

    /// Returns the operations on leases; `None` without a kubelet beside devlet.
    pub(crate) fn leases(&self) -> Option<&LeaseWorkflow> {
        self.inner.leases.as_ref()
    }

    /// Takes over the devices of the kubelet's checkpoint, also after [`Agent::leave_kubelet`]. See [`LeaseWorkflow::adopt`].
    pub async fn adopt_leases(&self) -> Result<(usize, usize), AdoptError> {
        let Some(leases) = &self.inner.leases else {
            return Ok((0, 0));
        };
        if let Some(reason) = self.inner.shield.get().unfit() {
            return Err(AdoptError::Unfit(reason));
        }
        let adopted = leases.adopt().await?;
        self.inner.shield.update(|state| state.left = None);
        Ok(adopted)
    }

    /// Hands the devices back to the kubelet: nothing is registered from then on, also after a restart, and containers start
    /// without devlet. Returns the number of leases, and the directory of their CDI specs.
    pub async fn leave_kubelet(&self) -> Result<(usize, PathBuf), LeaveError> {
        let Some(leases) = &self.inner.leases else {
            return Ok((0, PathBuf::new()));
        };
        // A refusal must not end registrations.
        leases.check_leave().await?;
        let state = match runtime::ask(&leases.shield).await {
            // A runtime that is away has not changed its configuration.
            RuntimeState::Unknown { .. } => self.inner.shield.get().runtime,
            state => state,
        };
        match state {
            RuntimeState::Unfit { problem, .. } => return Err(LeaveError::Unfit(problem)),
            RuntimeState::Ready { cdi, .. }
                if !runtime::reads(&cdi.directories, &leases.shield.permanent_cdi) =>
            {
                return Err(LeaveError::Unread {
                    directory: leases.shield.permanent_cdi.clone(),
                    read: cdi.directories,
                });
            }
            _ => {}
        }
        // Then, so that no lease is granted after the specs are written.
        let before = self.inner.shield.get().left;
        self.inner
            .shield
            .update(|state| state.left = Some(HAS_LEFT.to_owned()));
        let left = leases.leave().await;
        if left.is_err() {
            self.inner.shield.update(|state| state.left = before);
        }
        left
    }

    /// Returns all metrics as OpenMetrics text. Reads files, so it may block.
    pub fn metrics_text(&self) -> Result<String, fmt::Error> {
        let Inner {
            config,
            store,
            metrics,
            ..
        } = &*self.inner;
        let about_store = StoreView {
            is_healthy: store.health().is_ok(),
            statistics: store.statistics(),
            database_bytes: std::fs::metadata(config.database()).map_or(0, |file| file.len()),
        };
        let now = store.now();
        let shield = config.shield.as_ref().map(|_| self.shield().counts());
        let view = store.read(|node| {
            let view = View::new(node, now, about_store);
            match shield {
                Some(counts) => view.with_shield(counts, node),
                None => view,
            }
        });
        metrics.text(&self.cluster().read(|state| view.with_cluster(state)))
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

    /// Returns the sockets and directories in `plugins_registry` that are not served.
    pub(crate) fn registry_summary(&self) -> Summary {
        self.inner.registry.get()
    }

    /// Adds the socket of the API to the sockets of the node.
    pub(crate) fn serves_api_on(&self, listener: &Listener) {
        // Only one listener can have the path, so this is the first call.
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

    /// Calls `report` with the capacity of all resources: at once, and after each change, the end of a grace period
    /// included.
    ///
    /// Calls do not overlap, and no lock is held meanwhile. Changes during a call are reported together. Long work
    /// belongs in another task: it would keep the node from stopping.
    pub fn on_capacity(&self, report: impl FnMut(&Capacities) + Send + 'static) {
        let (store, stop) = (self.inner.store.clone(), self.inner.stop.clone());
        self.spawn(capacity::follow(store, stop, report));
    }

    /// Admits a pod: with everything it requests, on disk when this returns, or with nothing. Waits for missing plugins.
    /// All plugins must have answered by the deadline. See [`admit::admit`].
    ///
    /// If plugins of a resource fail in many admissions, the error comes after a pause of a second.
    pub async fn admit(
        &self,
        request: &PodRequest,
        deadline: Instant,
        waiting: impl FnMut(&ReserveError),
    ) -> Result<Pod, AdmitError> {
        self.admit_unless(request, deadline, &self.inner.stop, waiting)
            .await
    }

    /// Like [`Agent::admit`], but gives up when `give_up` is cancelled, unless a write is in progress.
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
            plugin_failures,
            ..
        } = &*self.inner;
        if self.inner.leases.is_some() {
            return Err(AdmitError::Shielded);
        }
        let calls = GrpcPluginCalls {
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
        if let Err(AdmitError::Plugin { resource, .. }) = &ended
            && !plugin_failures.try_acquire(resource.clone(), Instant::now())
        {
            // Otherwise callers that retry at once could use a core.
            let _ = timeout(REJECTION_PAUSE, give_up.cancelled()).await;
        }
        ended
    }

    /// Returns the options that the runtime must add to a container that is about to start. See
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

    /// Removes a pod. When this returns, its devices are free, and the claims that only it held are unprepared.
    ///
    /// Waits for an admission of the pod in progress. A pod that is gone and has claims left can be removed again, to
    /// wait for them.
    pub async fn remove(&self, pod: &PodUid, deadline: Instant) -> Result<(), RemoveError> {
        self.remove_without(pod, &BTreeSet::new(), deadline)
            .await
            .map(drop)
    }

    /// Like [`Agent::remove`], without waiting for these drivers: see [`Agent::abandon`]. Returns the abandoned claims.
    pub async fn remove_without(
        &self,
        pod: &PodUid,
        drivers: &BTreeSet<DriverName>,
        deadline: Instant,
    ) -> Result<Vec<Abandoned>, RemoveError> {
        let Inner { store, claims, .. } = &*self.inner;
        remove::remove(store, claims, pod, drivers, deadline).await
    }

    /// Stops waiting for a driver on claims that a removed pod held last, and returns these claims.
    ///
    /// That is recorded when this returns, and visible. If the driver comes back, it is still called to unprepare them.
    pub async fn abandon(&self, pod: &PodUid, driver: &DriverName) -> Result<Vec<ClaimUid>, WriteError> {
        remove::abandon(&self.inner.store, pod, driver).await
    }

    /// Stops waiting for a driver on one claim that no pod holds, such as a claim of a kubelet's file. Returns `true` if
    /// the driver had to unprepare it.
    pub async fn abandon_claim(&self, claim: &ClaimUid, driver: &DriverName) -> Result<bool, WriteError> {
        remove::abandon_claim(&self.inner.store, claim, driver).await
    }

    /// Forgets a claim that was abandoned at all its drivers: they are not called to unprepare it if they come back.
    /// That is on disk when this returns.
    pub async fn forget_claim(&self, claim: &ClaimUid) -> Result<(), ForgetClaimError> {
        self.inner.store.forget_claim(claim).await?;
        tracing::warn!(%claim, "claim forgotten; no driver is called to unprepare it");
        Ok(())
    }

    /// Returns `true` if claims of a pod may still be prepared. Until then the pod has not ended.
    pub fn might_need_unprepare(&self, pod: &PodUid) -> bool {
        self.inner.store.read(|node| node.might_need_unprepare(pod))
    }

    /// Calls [`Agent::reconcile`] at once, and then again after each pause.
    pub fn follow_pods(&self, source: impl ActivePods + 'static, pause: Duration) {
        let (store, stop) = (self.inner.store.clone(), self.inner.stop.clone());
        self.spawn(orphans::follow(store, source, pause, stop));
    }

    /// Removes the pods that are gone according to an embedder's source, and returns them.
    ///
    /// This is about the embedder's own pods ([`Source::Embedder`](devlet_core::Source::Embedder)) and imported ones.
    /// Their claims are unprepared in the background. Pods that were admitted after the source was asked are kept.
    pub async fn reconcile(&self, source: &impl ActivePods) -> Vec<PodUid> {
        orphans::remove(&self.inner.store, source).await
    }

    /// Returns the pods that [`Agent::reconcile`] would remove, for an embedder that removes them itself. `active` is a
    /// complete list, which was requested after `asked` admissions
    /// ([`Node::admissions`](devlet_core::Node::admissions)).
    pub fn missing_in(&self, active: &BTreeSet<PodUid>, asked: u64) -> Vec<PodUid> {
        orphans::missing_in(&self.inner.store, active, asked)
    }

    /// Deletes the ResourceSlices of drivers that are gone. See [`slices`].
    pub fn wipe_slices(&self, slices: impl ResourceSlices + 'static) {
        let (store, stop) = (self.inner.store.clone(), self.inner.stop.clone());
        let started = store.now();
        self.cluster()
            .update(|state| state.wipes_slices_since = Some(started));
        self.spawn(slices::follow(store, slices, started, stop));
    }

    /// Stops the node for good: plugins are disconnected, and everything is on disk when this returns.
    ///
    /// Returns within the drain time of the server and a few seconds, even if the disk does not answer.
    pub async fn stop(&self) -> Result<(), StopError> {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        // Calls are cancelled after the drain time. A task that still runs then waits for the disk.
        let limit = ServerLimits::default().drain.saturating_add(STOP_GRACE);
        if timeout(limit, self.inner.tasks.wait()).await.is_err() {
            tracing::warn!(?limit, "tasks still running after a stop");
        }
        let Inner { store, stopped, .. } = &*self.inner;
        let stop = || async {
            // Without this record, drivers are called again after the next start.
            if let Err(error) = store.record_claims().await {
                tracing::warn!(%error, "last results of drivers not written; they are called again after the next start");
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
