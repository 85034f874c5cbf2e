//! Claims: drivers prepare them for pods, and unprepare them when the last pod has left.
//!
//! Calls are tasks of the node, not of whoever waits for them: a caller that leaves does not take a driver's answer with
//! it. A call that ends in any way is told to the node, so that the next one can be made.
//!
//! What nobody waits for is done in rounds, a moment after something has changed: those who wait make their own calls
//! first, and what comes together is written together. An admission that is given up leaves its claims to the rounds,
//! and so does a removal whose caller has no more time; a restart and a reboot are nothing else.

use std::sync::Arc;
use std::time::Duration;

use devlet_core::dra::claims::{Call, ClaimKey, Failure, Operation, PreparedDevice};
use devlet_core::dra::view::{Reason, Wait, listed};
use devlet_core::{CallId, ClaimUid, DriverName, Moment, Node, PodUid, ReserveError};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::written;
use crate::deadline;
use crate::dra::{DriverCallError, DriverCalls, Prepared};
use crate::grpc::call::MIN_CALL_TIME;
use crate::limits::Limit;
use crate::metrics::{ClaimOperation, Metrics};
use crate::store::{Held, Store, WriteError};

/// How long a call may take at most; drivers have deadlines of their own.
const LONGEST_CALL: Duration = Duration::from_secs(60 * 60);

/// How long after a change a round begins.
const ROUND_PAUSE: Duration = Duration::from_millis(20);

/// How long nothing is written after a write that failed.
const WRITE_PAUSE: Duration = Duration::from_secs(1);

/// Why claims are not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Their drivers were not done in time.
    #[error("{}", listed(.0))]
    TimedOut(Vec<Wait>),
    /// It could not be written down that they are to be prepared.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Has claims prepared and unprepared. Clones do the same work.
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
    hurry: Notify,
    /// Memory that a driver can fill.
    bytes_per_driver: usize,
}

impl<D> Clone for Claims<D> {
    fn clone(&self) -> Self {
        let inner = Arc::clone(&self.inner);
        Self { inner }
    }
}

/// A call that is told to the node when it ends, however it does.
struct Ending<'a> {
    store: &'a Store,
    call: CallId,
    is_told: bool,
}

impl Ending<'_> {
    fn tell(mut self, end: impl FnOnce(&mut Node, Moment)) {
        self.is_told = true;
        let now = self.store.now();
        self.store.update(|node| end(node, now));
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if !self.is_told {
            let now = self.store.now();
            self.store
                .update(|node| node.call_failed(self.call, "the call was given up", now));
        }
    }
}

/// A call that somebody waits for.
struct Pending {
    driver: DriverName,
    claims: Vec<ClaimUid>,
}

impl Pending {
    fn is_about(&self, wait: &Wait) -> bool {
        self.driver == wait.driver && self.claims.contains(&wait.uid)
    }
}

/// Calls that somebody waits for.
#[derive(Default)]
struct Calls {
    ends: FuturesUnordered<JoinHandle<CallId>>,
    pending: Vec<(CallId, Pending)>,
}

impl Calls {
    /// Whether something is waited for that none of these calls is about.
    fn leave(&self, waits: &[Wait]) -> bool {
        let is_ours = |wait: &Wait| self.pending.iter().any(|(_, pending)| pending.is_about(wait));
        !waits.iter().all(is_ours)
    }

    /// Completes when a call has ended; never if there are none.
    async fn end(&mut self) {
        match self.ends.next().await {
            Some(ended) => match ended {
                Ok(ended) => self.pending.retain(|(id, _)| *id != ended),
                // It is gone with its task; the node has been told.
                Err(_) => self.pending.clear(),
            },
            None => std::future::pending().await,
        }
    }
}

impl<D: DriverCalls + 'static> Claims<D> {
    /// Calls drivers by these means, for the claims of this node. None may fill more memory than that.
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
                hurry: Notify::new(),
                bytes_per_driver,
            }),
        }
    }

    /// Makes a call, whoever waits for it.
    fn make(&self, call: Call) -> JoinHandle<CallId> {
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

    fn make_all(&self, calls: Vec<Call>, waited_for: &mut Calls) {
        for call in calls {
            let pending = Pending {
                driver: call.driver.clone(),
                claims: call.claims.iter().map(|(uid, _)| uid.clone()).collect(),
            };
            waited_for.pending.push((call.id, pending));
            waited_for.ends.push(self.make(call));
        }
    }

    /// Has all claims of an admission prepared, by `deadline`. What has been prepared by then is unprepared in a round
    /// once the admission is dropped. `waiting` is told of drivers that are not there or failed; its answer is dropped when
    /// that has ended.
    pub async fn prepare<W>(
        &self,
        held: &Held,
        deadline: Instant,
        waiting: &mut impl FnMut(&ReserveError) -> W,
    ) -> Result<(), PrepareError> {
        if held.reservation().claims.is_empty() {
            return Ok(());
        }
        let operation = self.inner.metrics.claims(ClaimOperation::Prepare);
        let prepared = self.prepare_all(held, deadline, waiting).await;
        operation.ended(&prepared);
        prepared
    }

    async fn prepare_all<W>(
        &self,
        held: &Held,
        deadline: Instant,
        waiting: &mut impl FnMut(&ReserveError) -> W,
    ) -> Result<(), PrepareError> {
        let store = &self.inner.store;
        let mut changes = store.subscribe();
        let mut waited_for = Calls::default();
        written(deadline, held.intent()).await?;
        loop {
            changes.borrow_and_update();
            let now = store.now();
            let (calls, waits) = store.update(|node| {
                let calls = node.prepare_calls(held.id(), now);
                (calls, node.waiting_for(held.id()))
            });
            if waits.is_empty() {
                return Ok(());
            }
            self.make_all(calls, &mut waited_for);
            // Another admission was to write it, and could not.
            let is_unwritten = waits.iter().any(|wait| wait.reason == Reason::NotWritten);
            if is_unwritten && written(deadline, held.intent()).await? {
                continue;
            }
            let is_trouble = |wait: &Wait| wait.failure.is_some() || wait.reason == Reason::NoDriver;
            let reason = ReserveError::NotPrepared { waits };
            let ReserveError::NotPrepared { waits } = &reason else {
                return Ok(());
            };
            let _waits = waits.iter().any(is_trouble).then(|| waiting(&reason));
            if !self.wait(&mut changes, &mut waited_for, waits, deadline).await {
                return Err(PrepareError::TimedOut(waits.clone()));
            }
        }
    }

    /// Has the claims unprepared that a pod was the last to leave, by `deadline`; connected drivers get at least
    /// [`MIN_CALL_TIME`]. Claims that are not unprepared by then are returned, and retried in the background.
    pub async fn unprepare(&self, pod: &PodUid, deadline: Instant) -> Result<(), Vec<Wait>> {
        if self
            .inner
            .store
            .read(|node| node.pending_unprepare(pod))
            .is_empty()
        {
            return Ok(());
        }
        let operation = self.inner.metrics.claims(ClaimOperation::Unprepare);
        let unprepared = self.unprepare_all(pod, deadline).await;
        operation.ended(&unprepared);
        unprepared
    }

    async fn unprepare_all(&self, pod: &PodUid, deadline: Instant) -> Result<(), Vec<Wait>> {
        let store = &self.inner.store;
        let mut changes = store.subscribe();
        let mut waited_for = Calls::default();
        let least = deadline.max(Instant::now() + MIN_CALL_TIME);
        loop {
            changes.borrow_and_update();
            let now = store.now();
            let (calls, waits) = store.update(|node| {
                let calls = node.unprepare_calls(pod, now);
                (calls, node.pending_unprepare(pod))
            });
            if waits.is_empty() {
                return Ok(());
            }
            self.make_all(calls, &mut waited_for);
            let is_called = |wait: &Wait| matches!(wait.reason, Reason::Calling | Reason::NotWritten);
            let until = if waits.iter().any(is_called) {
                least
            } else {
                deadline
            };
            if !self.wait(&mut changes, &mut waited_for, &waits, until).await {
                return Err(waits);
            }
        }
    }

    /// Waits until there may be something to do. `false`: there is no time left.
    async fn wait(
        &self,
        changes: &mut tokio::sync::watch::Receiver<u64>,
        waited_for: &mut Calls,
        waits: &[Wait],
        deadline: Instant,
    ) -> bool {
        let now = self.inner.store.now();
        let retry = waits.iter().filter_map(|wait| match wait.reason {
            Reason::Due(at) => Some(at),
            _ => None,
        });
        let retry = retry.min().map(|at| at_moment(at, now));
        // Most changes are none of ours.
        let by_others = waited_for.leave(waits);
        tokio::select! {
            () = waited_for.end() => true,
            changed = changes.changed(), if by_others => changed.is_ok(),
            () = at(retry) => true,
            () = sleep_until(deadline) => false,
            () = self.inner.stop.cancelled() => false,
        }
    }

    /// A round is to begin at once: somebody waits for what only a round does.
    pub fn hurry(&self) {
        self.inner.hurry.notify_one();
    }

    /// Does what nobody waits for, until the node stops.
    pub async fn run(self) {
        let Inner {
            store, stop, hurry, ..
        } = &*self.inner;
        let mut changes = store.subscribe();
        let mut may_write = Instant::now();
        loop {
            changes.borrow_and_update();
            let next = self.round(&mut may_write).await;
            let begin = async {
                tokio::select! {
                    // Nobody changes anything any longer.
                    changed = changes.changed() => match changed {
                        Ok(()) => tokio::time::sleep(ROUND_PAUSE).await,
                        Err(_) => std::future::pending().await,
                    },
                    () = at(next) => {}
                }
            };
            tokio::select! {
                () = begin => {}
                () = hurry.notified() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// One round, and when the next one is due if nothing changes.
    async fn round(&self, may_write: &mut Instant) -> Option<Instant> {
        let store = &self.inner.store;
        let now = store.now();
        let is_past = |moment: Option<Moment>| moment.is_some_and(|moment| moment <= now);
        let (calls, expiry, records) = store.read(|node| {
            let calls = is_past(node.next_call());
            (calls, is_past(node.next_expiry()), node.has_unrecorded())
        });
        if calls {
            for call in store.update(|node| node.due_calls(now)) {
                // The node is told, and nobody else wants to know.
                drop(self.make(call));
            }
        }
        if expiry {
            let expired = store.update(|node| node.tick(now));
            for (driver, device) in expired.devices {
                let (pool, device) = (device.pool, device.device);
                tracing::warn!(%driver, pool, device, "the health of a device is not known any longer");
            }
        }
        if records
            && Instant::now() >= *may_write
            && let Err(error) = store.record_claims().await
        {
            tracing::warn!(%error, "what drivers did for claims is not on disk yet");
            *may_write = Instant::now() + WRITE_PAUSE;
        }
        let next = store.read(Node::has_unrecorded).then_some(*may_write);
        // What is due already waits for a change.
        let later = |moment: Option<Moment>| {
            let moment = moment.filter(|moment| *moment > now);
            moment.map(|moment| at_moment(moment, now))
        };
        let (call, expiry) = store.read(|node| (node.next_call(), node.next_expiry()));
        [next, later(call), later(expiry)].into_iter().flatten().min()
    }
}

impl<D: DriverCalls> Inner<D> {
    /// What a driver prepared, without that for which it takes too much memory.
    fn within_limit(&self, node: &Node, driver: &DriverName, results: Prepared) -> Prepared {
        let most = self.bytes_per_driver;
        let (before, mut new) = (node.memory_with(driver, &ClaimUid::from(""), &[]), 0);
        let mut fits = |uid: &ClaimUid, devices: Vec<PreparedDevice>| {
            let memory = node.memory_with(driver, uid, &devices) + new;
            let checked = Limit::BYTES_PER_DRIVER.check(memory, most, || {
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

    async fn call(&self, call: Call) {
        let ending = Ending {
            store: &self.store,
            call: call.id,
            is_told: false,
        };
        let deadline = Instant::now() + LONGEST_CALL;
        let failed = |error: DriverCallError, ending: Ending<'_>| {
            let reason = error.to_string();
            tracing::warn!(driver = %call.driver, error = reason, "DRA driver does not answer");
            ending.tell(|node, now| node.call_failed(call.id, &reason, now));
        };
        let mut failures = Vec::new();
        let mut missing = Vec::new();
        match call.operation {
            Operation::Prepare => match self.drivers.prepare(&call, deadline).await {
                Ok(results) => ending.tell(|node, now| {
                    let results = self.within_limit(node, &call.driver, results);
                    failures = node.prepared(call.id, results, is_cdi_name, now);
                    missing = missing_devices(node, &call);
                }),
                Err(error) => failed(error, ending),
            },
            Operation::Unprepare => match self.drivers.unprepare(&call, deadline).await {
                Ok(results) => ending.tell(|node, now| {
                    failures = node.unprepared(call.id, results, now);
                }),
                Err(error) => failed(error, ending),
            },
        }
        for (claim, devices) in missing {
            tracing::warn!(driver = %call.driver, %claim, ?devices, "claim prepared in part");
        }
        for failure in failures {
            let (driver, claim) = (&call.driver, failure.claim().map(tracing::field::display));
            let error = match &failure {
                Failure::Driver { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            match call.operation {
                Operation::Prepare => tracing::warn!(claim, %driver, error, "claim not prepared"),
                Operation::Unprepare => tracing::warn!(claim, %driver, error, "claim not unprepared"),
            }
        }
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

/// When it is that moment.
fn at_moment(moment: Moment, now: Moment) -> Instant {
    // Not a part of a millisecond too early.
    deadline::after(Duration::from_millis(moment.since(now).saturating_add(1)))
}

async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
