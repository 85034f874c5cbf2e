//! What is counted and measured, in the words of Prometheus. `docs/metrics.md` says what each means.
//!
//! Counters and histograms are recorded where things happen ([`Metrics`]); gauges are computed when somebody looks
//! (`scrape.rs`), from a view of the node that takes no longer the more pods and devices there are. Names are the
//! kubelet's where it has one, so that its dashboards work here.
//!
//! Labels have values from closed sets (`reason.rs`), or from a bounded number of those that others choose
//! (`names.rs`), so that nobody can fill the memory of whoever scrapes. Pods and devices are never labels.
//!
//! Nothing here survives the process: counters start at zero, as Prometheus expects.

mod drivers;
mod names;
mod process;
mod reason;
mod scrape;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use devlet_core::{Pod, ReserveError, ResourceName};
use devlet_uds::server::OnRefusal;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

use crate::grpc::call::{CallError, InvalidAnswer};
use crate::limits::Limit;
use crate::store::{DURATION_BOUNDS, OpenReport};
use crate::workflow::admit::AdmitError;
use crate::workflow::register::RegisterError;

pub use drivers::{ClaimOperation, DriverRpcs, Operating};
pub use names::{MOST_AWAITED, MOST_RESOURCES, MOST_SOCKETS};
pub use scrape::{CONTENT_TYPE, View};

use names::{Label, Names};
use reason::{ADMITTED, Ended, GIVEN_UP, TAKEN_IN};

/// What a kubelet calls a pod that a device plugin's part of it does not admit, whatever the reason.
const REJECTION: &str = "UnexpectedAdmissionError";

const ALLOCATE: &str = "Allocate";
const LIST_AND_WATCH: &str = "ListAndWatch";

/// What plugins are called for.
const METHODS: [&str; 5] = [
    "GetDevicePluginOptions",
    "GetPreferredAllocation",
    ALLOCATE,
    "PreStartContainer",
    LIST_AND_WATCH,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResource {
    resource_name: Label,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    resource_name: Label,
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByError {
    resource_name: Label,
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByNews {
    resource_name: Label,
    changed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWait {
    resource_name: Label,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByEnd {
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByLimit {
    limit: &'static str,
}

/// Histograms of seconds.
type Durations<L> = Family<L, Histogram, fn() -> Histogram>;

fn durations<L: Clone + std::hash::Hash + Eq>() -> Durations<L> {
    Family::new_with_constructor(|| Histogram::new(DURATION_BOUNDS))
}

/// What is counted. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    recorded: Arc<Recorded>,
}

#[derive(Debug)]
struct Recorded {
    names: Names,
    registered: Family<ByResource, Counter>,
    registrations: Family<ByEnd, Counter>,
    lists: Family<ByNews, Counter>,
    lost: Family<ByResource, Counter>,
    allocations: Durations<ByResource>,
    calls: Durations<ByCall>,
    call_errors: Family<ByError, Counter>,
    admissions: Family<ByEnd, Counter>,
    rejections: Family<ByReason, Counter>,
    admission_times: Durations<ByOutcome>,
    waiting: Family<ByWait, Gauge>,
    waits: Durations<ByResource>,
    limit_hits: Family<ByLimit, Counter>,
    drivers: drivers::Drivers,
    set_aside: AtomicUsize,
    log_lines_dropped: AtomicU64,
    /// Sockets in `plugins_registry`, and whether their plugin was taken in.
    sockets: Mutex<BTreeMap<PathBuf, bool>>,
}

impl Default for Recorded {
    fn default() -> Self {
        let recorded = Self {
            names: Names::default(),
            registered: Family::default(),
            registrations: Family::default(),
            lists: Family::default(),
            lost: Family::default(),
            allocations: durations(),
            calls: durations(),
            call_errors: Family::default(),
            admissions: Family::default(),
            rejections: Family::default(),
            admission_times: durations(),
            waiting: Family::default(),
            waits: durations(),
            limit_hits: Family::default(),
            drivers: drivers::Drivers::default(),
            set_aside: AtomicUsize::new(0),
            log_lines_dropped: AtomicU64::new(0),
            sockets: Mutex::default(),
        };
        // So that the first one is a step from 0 to 1, which rates see.
        drop(recorded.rejections.get_or_create(&ByReason { reason: REJECTION }));
        for ended in reason::ADMISSION_ENDS {
            drop(recorded.admissions.get_or_create(&by_end(ended)));
            let outcome = ended.outcome;
            drop(recorded.admission_times.get_or_create(&ByOutcome { outcome }));
        }
        for ended in reason::REGISTRATION_ENDS {
            drop(recorded.registrations.get_or_create(&by_end(ended)));
        }
        for limit in Limit::ALL {
            let limit = limit.name();
            drop(recorded.limit_hits.get_or_create(&ByLimit { limit }));
        }
        recorded
    }
}

fn by_end(Ended { outcome, reason }: Ended) -> ByEnd {
    ByEnd { outcome, reason }
}

impl Metrics {
    /// The state was opened.
    pub fn opened(&self, report: &OpenReport) {
        let set_aside = report.set_aside.len();
        self.recorded.set_aside.store(set_aside, Ordering::Relaxed);
    }

    /// Sets the number of log lines that were dropped since the start.
    pub fn log_lines_dropped(&self, total: u64) {
        self.recorded.log_lines_dropped.store(total, Ordering::Relaxed);
    }

    /// A plugin was taken in, or not.
    pub fn registered<T>(&self, resource: &ResourceName, ended: &Result<T, RegisterError>) {
        match ended {
            Ok(_) => {
                let resource_name = self.recorded.names.offered(resource);
                let labels = ByResource { resource_name };
                self.recorded.registered.get_or_create(&labels).inc();
                self.registration(TAKEN_IN);
            }
            Err(error) => self.registration_refused(reason::of_registration(error)),
        }
    }

    /// A plugin got not as far as that; `reason` is one word.
    pub fn registration_refused(&self, reason: &'static str) {
        self.registration(Ended {
            outcome: "refused",
            reason,
        });
    }

    fn registration(&self, ended: Ended) {
        self.recorded.registrations.get_or_create(&by_end(ended)).inc();
    }

    /// A plugin sent a list.
    pub fn listed(&self, resource: &ResourceName, changed: bool) {
        let resource_name = self.recorded.names.offered(resource);
        let labels = ByNews {
            resource_name,
            changed,
        };
        self.recorded.lists.get_or_create(&labels).inc();
    }

    /// A connection to a plugin ended.
    pub fn lost(&self, resource: &ResourceName) {
        let resource_name = self.recorded.names.offered(resource);
        self.recorded
            .lost
            .get_or_create(&ByResource { resource_name })
            .inc();
    }

    /// Measures the calls on a plugin.
    pub fn plugin(&self, resource: &ResourceName) -> Calls {
        Calls {
            recorded: Arc::clone(&self.recorded),
            resource: self.recorded.names.offered(resource),
        }
    }

    /// An admission begins.
    pub fn admission(&self) -> Admission {
        Admission {
            recorded: Arc::clone(&self.recorded),
            started: Instant::now(),
            waited: Mutex::default(),
            ended: GIVEN_UP,
        }
    }

    /// A pod was turned away before its admission could begin; `reason` is one word.
    pub fn turned_away(&self, reason: &'static str) {
        let ended = Ended {
            outcome: "refused",
            reason,
        };
        self.recorded.admission_ended(ended);
    }

    /// Returns a callback that counts the refusals of a server whose limit on connections is `connections`.
    pub fn on_refusal(&self, connections: Limit) -> OnRefusal {
        let metrics = self.clone();
        Arc::new(move |_| metrics.limit_hit(connections.name()))
    }

    /// Counts a request or connection that a limit refused or delayed, named as in the configuration.
    pub fn limit_hit(&self, limit: &'static str) {
        self.recorded.limit_hits.get_or_create(&ByLimit { limit }).inc();
    }

    /// There is a socket in `plugins_registry`.
    pub fn socket_found(&self, path: &Path) {
        self.recorded.sockets().insert(path.to_owned(), false);
    }

    /// The plugin behind a socket in `plugins_registry` was taken in.
    pub fn socket_taken_in(&self, path: &Path) {
        if let Some(taken_in) = self.recorded.sockets().get_mut(path) {
            *taken_in = true;
        }
    }

    /// A socket in `plugins_registry` is gone.
    pub fn socket_left(&self, path: &Path) {
        self.recorded.sockets().remove(path);
    }
}

impl Recorded {
    fn sockets(&self) -> MutexGuard<'_, BTreeMap<PathBuf, bool>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is told of a resource any longer.
    fn forget(&self, resource_name: &Label) {
        let labels = || ByResource {
            resource_name: resource_name.clone(),
        };
        self.registered.remove(&labels());
        self.lost.remove(&labels());
        self.allocations.remove(&labels());
        self.waits.remove(&labels());
        for changed in [false, true] {
            let resource_name = resource_name.clone();
            self.lists.remove(&ByNews {
                resource_name,
                changed,
            });
        }
        for method in METHODS {
            let resource_name = resource_name.clone();
            self.calls.remove(&ByCall {
                resource_name,
                method,
            });
        }
        for (method, code) in METHODS
            .into_iter()
            .flat_map(|method| reason::codes().map(move |code| (method, code)))
        {
            let resource_name = resource_name.clone();
            self.call_errors.remove(&ByError {
                resource_name,
                method,
                code,
            });
        }
        for reason in ["not_served", "not_listed", "reserved"] {
            let resource_name = resource_name.clone();
            let labels = ByWait {
                resource_name,
                reason,
            };
            // Whoever waits still has to be counted when the wait ends.
            if self
                .waiting
                .get(&labels)
                .is_some_and(|waiting| waiting.get() == 0)
            {
                self.waiting.remove(&labels);
            }
        }
    }

    fn admission_ended(&self, ended: Ended) {
        self.admissions.get_or_create(&by_end(ended)).inc();
        if !matches!(ended, ADMITTED | GIVEN_UP) {
            self.rejections
                .get_or_create(&ByReason { reason: REJECTION })
                .inc();
        }
    }
}

/// Measures the calls on one plugin.
#[derive(Debug, Clone)]
pub struct Calls {
    recorded: Arc<Recorded>,
    resource: Label,
}

impl Calls {
    /// A call was answered, refused, or given up.
    pub(crate) fn took(&self, method: &'static str, time: Duration) {
        let (resource_name, seconds) = (self.resource.clone(), time.as_secs_f64());
        if method == ALLOCATE {
            let labels = ByResource {
                resource_name: resource_name.clone(),
            };
            self.recorded.allocations.get_or_create(&labels).observe(seconds);
        }
        let labels = ByCall {
            resource_name,
            method,
        };
        self.recorded.calls.get_or_create(&labels).observe(seconds);
    }

    /// A call did not end well.
    pub(crate) fn failed(&self, error: &CallError) {
        if let CallError::Invalid {
            problem: InvalidAnswer::OverLimit(over),
            ..
        } = error
        {
            let limit = over.limit.name();
            self.recorded.limit_hits.get_or_create(&ByLimit { limit }).inc();
        }
        let (method, code) = reason::of_call(error);
        self.count(method, code);
    }

    /// The stream of lists ended with this code.
    pub(crate) fn lists_ended(&self, code: tonic::Code) {
        self.count(LIST_AND_WATCH, reason::code(code));
    }

    fn count(&self, method: &'static str, code: &'static str) {
        let labels = ByError {
            resource_name: self.resource.clone(),
            method,
            code,
        };
        self.recorded.call_errors.get_or_create(&labels).inc();
    }
}

/// One admission. If it is dropped before its end, it was given up.
#[derive(Debug)]
pub struct Admission {
    recorded: Arc<Recorded>,
    started: Instant,
    /// For how long in all, and for what last.
    waited: Mutex<Option<(Duration, Label)>>,
    ended: Ended,
}

impl Admission {
    /// It waits, until the answer is dropped.
    pub fn waits(&self, reason: &ReserveError) -> Waits<'_> {
        let resource_name = match reason {
            ReserveError::NotServed { resource, .. }
            | ReserveError::NotListed { resource, .. }
            | ReserveError::NoHealthyDevice { resource, .. }
            | ReserveError::Reserved { resource, .. } => self.recorded.names.awaited(resource),
            _ => Label::none(),
        };
        let labels = ByWait {
            resource_name,
            reason: reason::of_reservation(reason),
        };
        self.recorded.waiting.get_or_create(&labels).inc();
        Waits {
            admission: self,
            labels,
            since: Instant::now(),
        }
    }

    /// It ended.
    pub fn ended(mut self, ended: &Result<Pod, AdmitError>) {
        self.ended = match ended {
            Ok(_) => ADMITTED,
            Err(error) => reason::of_admission(error),
        };
    }

    fn waited(&self) -> MutexGuard<'_, Option<(Duration, Label)>> {
        self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.recorded.admission_ended(self.ended);
        let outcome = self.ended.outcome;
        let times = &self.recorded.admission_times;
        times
            .get_or_create(&ByOutcome { outcome })
            .observe(self.started.elapsed().as_secs_f64());
        if let Some((waited, resource_name)) = self.waited().take() {
            let waits = self.recorded.waits.get_or_create(&ByResource { resource_name });
            waits.observe(waited.as_secs_f64());
        }
    }
}

/// An admission that waits.
#[derive(Debug)]
#[must_use = "dropping it ends the wait"]
pub struct Waits<'a> {
    admission: &'a Admission,
    labels: ByWait,
    since: Instant,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let recorded = &self.admission.recorded;
        recorded.waiting.get_or_create(&self.labels).dec();
        let mut waited = self.admission.waited();
        let before = waited.take().map_or(Duration::ZERO, |(time, _)| time);
        *waited = Some((before + self.since.elapsed(), self.labels.resource_name.clone()));
    }
}

#[cfg(test)]
mod tests;
