//! Calls to DRA drivers, which prepare and unprepare claims.
//!
//! Each call is a task of the node, so that its result is recorded even if the waiting caller leaves. The node is
//! notified when a call ends, in any way, and then allows the next call.
//!
//! `prepare.rs` and `unprepare.rs` make calls for a waiting caller. `reconcile/claims.rs` makes all other calls.

use std::sync::Arc;
use std::time::Duration;

use devlet_core::dra::claims::{Call, ClaimKey, Failure, Operation, PreparedDevice};
use devlet_core::dra::view::{Reason, Wait};
use devlet_core::{CallId, ClaimUid, DriverName, Moment, Node};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::deadline::{self, sleep_until_some};
use crate::dra::{DriverCallError, DriverCalls, Prepared};
use crate::limits::Limit;
use crate::metrics::Metrics;
use crate::store::{Changes, Store};

/// Maximum duration of a call. Drivers have shorter deadlines of their own.
const MAX_CALL_TIME: Duration = Duration::from_secs(60 * 60);

/// Calls drivers for claims. Clones share their state.
#[derive(Debug)]
pub struct Claims<D> {
    inner: Arc<Inner<D>>,
}

#[derive(Debug)]
struct Inner<D> {
    store: Store,
    drivers: D,
    metrics: Metrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    wake: Notify,
    /// Maximum memory, in bytes, for the prepared devices of one driver.
    bytes_per_driver: usize,
}

impl<D> Clone for Claims<D> {
    fn clone(&self) -> Self {
        let inner = Arc::clone(&self.inner);
        Self { inner }
    }
}

/// Reports the end of a call to the node. A call that is dropped is reported as failed.
struct CallGuard<'a> {
    store: &'a Store,
    call: CallId,
    is_reported: bool,
}

impl CallGuard<'_> {
    fn report(mut self, end: impl FnOnce(&mut Node, Moment)) {
        self.is_reported = true;
        let now = self.store.now();
        self.store.update(|node| end(node, now));
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if !self.is_reported {
            let now = self.store.now();
            self.store
                .update(|node| node.call_failed(self.call, "the call was cancelled", now));
        }
    }
}

/// A call in flight that a caller waits for.
struct PendingCall {
    id: CallId,
    driver: DriverName,
    claims: Vec<ClaimUid>,
}

impl PendingCall {
    fn covers(&self, wait: &Wait) -> bool {
        self.driver == wait.driver && self.claims.contains(&wait.uid)
    }
}

/// The calls in flight that a caller waits for.
#[derive(Default)]
pub(super) struct PendingCalls {
    tasks: FuturesUnordered<JoinHandle<CallId>>,
    calls: Vec<PendingCall>,
}

impl PendingCalls {
    /// Returns `true` if each of these waits ends with one of the calls.
    fn cover(&self, waits: &[Wait]) -> bool {
        waits
            .iter()
            .all(|wait| self.calls.iter().any(|call| call.covers(wait)))
    }

    /// Completes when a call has ended. Without calls, never completes.
    async fn next_end(&mut self) {
        match self.tasks.next().await {
            Some(Ok(ended)) => self.calls.retain(|call| call.id != ended),
            // The task panicked; the guard has reported the call as failed.
            Some(Err(_)) => self.calls.clear(),
            None => std::future::pending().await,
        }
    }
}

impl<D: DriverCalls + 'static> Claims<D> {
    /// `bytes_per_driver` limits the memory for the prepared devices of one driver.
    pub fn new(
        store: Store,
        drivers: D,
        metrics: Metrics,
        tasks: TaskTracker,
        stop: CancellationToken,
        bytes_per_driver: usize,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                store,
                drivers,
                metrics,
                tasks,
                stop,
                wake: Notify::new(),
                bytes_per_driver,
            }),
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Starts the next background pass immediately.
    pub fn wake(&self) {
        self.inner.wake.notify_one();
    }

    /// Completes after [`Claims::wake`].
    pub(crate) async fn woken(&self) {
        self.inner.wake.notified().await;
    }

    /// Starts a call in a task of the node.
    pub(crate) fn start_call(&self, call: Call) -> JoinHandle<CallId> {
        let inner = Arc::clone(&self.inner);
        self.inner.tasks.spawn(async move {
            let id = call.id;
            tokio::select! {
                () = inner.call(call) => {}
                () = inner.stop.cancelled() => {}
            }
            id
        })
    }

    /// Starts calls, and adds them to `pending`.
    pub(super) fn start_calls(&self, calls: Vec<Call>, pending: &mut PendingCalls) {
        for call in calls {
            pending.calls.push(PendingCall {
                id: call.id,
                driver: call.driver.clone(),
                claims: call.claims.iter().map(|(uid, _)| uid.clone()).collect(),
            });
            pending.tasks.push(self.start_call(call));
        }
    }

    /// Waits until a call has ended, a retry is due, or the node has changed. Returns `false` if the deadline passes or the
    /// node stops first.
    pub(super) async fn wait(
        &self,
        changes: &mut Changes,
        pending: &mut PendingCalls,
        waits: &[Wait],
        deadline: Instant,
    ) -> bool {
        let now = self.inner.store.now();
        let retries = waits.iter().filter_map(|wait| match wait.reason {
            Reason::Due(at) => Some(at),
            _ => None,
        });
        let retry = retries.min().map(|at| instant_of(at, now));
        // Most changes of the node are unrelated, and need not wake a caller that only waits for its own calls.
        let needs_changes = !pending.cover(waits);
        tokio::select! {
            () = pending.next_end() => true,
            changed = changes.changed(), if needs_changes => changed.is_ok(),
            () = sleep_until_some(retry) => true,
            () = sleep_until(deadline) => false,
            () = self.inner.stop.cancelled() => false,
        }
    }
}

impl<D: DriverCalls> Inner<D> {
    /// Replaces the devices of claims by an error where the driver would exceed its memory limit.
    fn within_limit(&self, node: &Node, driver: &DriverName, results: Prepared) -> Prepared {
        let max = self.bytes_per_driver;
        let (before, mut new) = (node.memory_with(driver, &ClaimUid::from(""), &[]), 0);
        let mut fits = |uid: &ClaimUid, devices: Vec<PreparedDevice>| {
            let memory = node.memory_with(driver, uid, &devices) + new;
            let checked = Limit::BYTES_PER_DRIVER.check(memory, max, || {
                format!("too much: with it, all that the driver has prepared takes {memory} bytes of memory")
            });
            match checked {
                Ok(()) => {
                    new = memory.saturating_sub(before);
                    Ok(devices)
                }
                Err(over) => {
                    self.metrics.limit_hit(over.limit.name());
                    Err(over.to_string())
                }
            }
        };
        let results = results.into_iter();
        results
            .map(|(uid, result)| {
                let result = result.and_then(|devices| fits(&uid, devices));
                (uid, result)
            })
            .collect()
    }

    /// Makes a call, and reports its result to the node and the log.
    async fn call(&self, call: Call) {
        let guard = CallGuard {
            store: &self.store,
            call: call.id,
            is_reported: false,
        };
        let deadline = Instant::now() + MAX_CALL_TIME;
        let failed = |error: DriverCallError, guard: CallGuard<'_>| {
            let reason = error.to_string();
            tracing::warn!(driver = %call.driver, error = reason, "DRA driver call failed");
            guard.report(|node, now| node.call_failed(call.id, &reason, now));
        };
        let mut failures = Vec::new();
        let mut missing = Vec::new();
        match call.operation {
            Operation::Prepare => match self.drivers.prepare(&call, deadline).await {
                Ok(results) => guard.report(|node, now| {
                    let results = self.within_limit(node, &call.driver, results);
                    failures = node.prepared(call.id, results, is_cdi_name, now);
                    missing = missing_devices(node, &call);
                }),
                Err(error) => failed(error, guard),
            },
            Operation::Unprepare => match self.drivers.unprepare(&call, deadline).await {
                Ok(results) => guard.report(|node, now| {
                    failures = node.unprepared(call.id, results, now);
                }),
                Err(error) => failed(error, guard),
            },
        }
        for (claim, devices) in missing {
            tracing::warn!(driver = %call.driver, %claim, ?devices, "claim prepared in part");
        }
        for failure in &failures {
            log_failure(&call, failure);
        }
    }
}

fn log_failure(call: &Call, failure: &Failure) {
    let (driver, claim) = (&call.driver, failure.claim().map(tracing::field::display));
    let error = match failure {
        Failure::Driver { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    match call.operation {
        Operation::Prepare => tracing::warn!(claim, %driver, error, "claim not prepared"),
        Operation::Unprepare => tracing::warn!(claim, %driver, error, "claim not unprepared"),
    }
}

/// Returns the devices that a driver did not prepare, of each claim that it was called for and reported as prepared.
fn missing_devices(node: &Node, call: &Call) -> Vec<(ClaimKey, Vec<String>)> {
    let claims = call.claims.iter().filter_map(|(uid, _)| node.claim(uid));
    let missing = claims.filter_map(|view| {
        let preparation = view.claim.preparations.get(&call.driver)?;
        let devices = preparation.missing_devices();
        let devices: Vec<String> = devices
            .map(|each| format!("{}/{}", each.pool, each.device))
            .collect();
        (!devices.is_empty()).then(|| (view.claim.key.clone(), devices))
    });
    missing.collect()
}

fn is_cdi_name(name: &str) -> bool {
    name.parse::<devlet_cdi::QualifiedName>().is_ok()
}

/// Returns the instant of a moment of the node's clock.
pub(crate) fn instant_of(moment: Moment, now: Moment) -> Instant {
    // One millisecond later, because moments are rounded down.
    deadline::after(Duration::from_millis(moment.since(now).saturating_add(1)))
}

#[cfg(test)]
mod tests;
