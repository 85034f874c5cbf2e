//! Prometheus metrics. `docs/metrics.md` describes each of them.
//!
//! Counters and histograms are recorded where things happen ([`Metrics`]). Gauges are computed at each scrape
//! (`scrape.rs`), from a view of the node that costs the same for any number of pods and devices. Names are the
//! kubelet's where it has one, so that its dashboards work here.
//!
//! Label values come from closed sets (`reason.rs`), or from a bounded number of names that peers choose (`names.rs`).
//! So no peer can fill the memory of the Prometheus server. Pods and devices are never labels.
//!
//! Counters start at zero with each process, as Prometheus expects. Deliberately absent: error types of other modules,
//! which become label values where they are defined or above.

mod admission;
mod cluster;
mod drivers;
mod names;
mod process;
pub(crate) mod reason;
mod scrape;
mod shield;
pub mod statistics;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use devlet_core::ResourceName;
use devlet_uds::server::OnRefusal;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::limits::Limit;

pub use admission::{Admission, WaitGuard};
pub use drivers::{ClaimOperation, DriverRpcs, OperationTimer};
pub use names::{MAX_AWAITED, MAX_RESOURCES, MAX_SOCKETS};
pub use scrape::{CONTENT_TYPE, StoreView, View};
pub use shield::ShieldCounts;

use names::{Label, Names};
use reason::{ADMITTED, CallFailure, GIVEN_UP, Outcome, REGISTERED, Reason};
use statistics::DURATION_BOUNDS;

/// The kubelet's reason for every pod that its device manager rejects.
const REJECTION: &str = "UnexpectedAdmissionError";

const ALLOCATE: &str = "Allocate";
const LIST_AND_WATCH: &str = "ListAndWatch";

/// The methods that are called on device plugins.
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

/// Histograms of durations in seconds.
type Durations<L> = Family<L, Histogram, fn() -> Histogram>;

fn durations<L: Clone + std::hash::Hash + Eq>() -> Durations<L> {
    Family::new_with_constructor(|| Histogram::new(DURATION_BOUNDS))
}

/// The recorder of all metrics. Clones share their counters.
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
    /// Sockets in `plugins_registry`; `true` if their plugin is registered.
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
        // A counter that starts at 0 lets `rate()` see the first increment.
        drop(recorded.rejections.get_or_create(&ByReason { reason: REJECTION }));
        for ended in reason::ADMISSION_OUTCOMES {
            drop(recorded.admissions.get_or_create(&by_end(ended)));
            let outcome = ended.outcome;
            drop(recorded.admission_times.get_or_create(&ByOutcome { outcome }));
        }
        for ended in reason::REGISTRATION_OUTCOMES {
            drop(recorded.registrations.get_or_create(&by_end(ended)));
        }
        // tonic rejects requests that are too long before they can be counted.
        for limit in Limit::ALL.iter().filter(|limit| **limit != Limit::REQUEST_BYTES) {
            let limit = limit.name();
            drop(recorded.limit_hits.get_or_create(&ByLimit { limit }));
        }
        recorded
    }
}

fn by_end(Outcome { outcome, reason }: Outcome) -> ByEnd {
    ByEnd { outcome, reason }
}

impl Metrics {
    /// Sets the number of state files that were set aside at start.
    pub fn files_set_aside(&self, number: usize) {
        self.recorded.set_aside.store(number, Ordering::Relaxed);
    }

    /// Sets the number of log lines that were dropped since the start.
    pub fn log_lines_dropped(&self, total: u64) {
        self.recorded.log_lines_dropped.store(total, Ordering::Relaxed);
    }

    /// Counts a registration of a device plugin.
    pub(crate) fn registered<T, E>(&self, resource: &ResourceName, result: &Result<T, E>)
    where
        Reason: for<'a> From<&'a E>,
    {
        match result {
            Ok(_) => {
                let resource_name = self.recorded.names.offered(resource);
                let labels = ByResource { resource_name };
                self.recorded.registered.get_or_create(&labels).inc();
                self.registration(REGISTERED);
            }
            Err(error) => self.registration_refused(Reason::from(error).0),
        }
    }

    /// Counts a rejected registration; `reason` is one word.
    pub fn registration_refused(&self, reason: &'static str) {
        self.registration(Outcome::new("refused", reason));
    }

    fn registration(&self, outcome: Outcome) {
        self.recorded.registrations.get_or_create(&by_end(outcome)).inc();
    }

    /// Counts a list of a plugin.
    pub fn listed(&self, resource: &ResourceName, changed: bool) {
        let resource_name = self.recorded.names.offered(resource);
        let labels = ByNews {
            resource_name,
            changed,
        };
        self.recorded.lists.get_or_create(&labels).inc();
    }

    /// Counts the end of a connection to a plugin.
    pub fn lost(&self, resource: &ResourceName) {
        let resource_name = self.recorded.names.offered(resource);
        self.recorded
            .lost
            .get_or_create(&ByResource { resource_name })
            .inc();
    }

    /// Returns the recorder of calls on a plugin.
    pub fn plugin(&self, resource: &ResourceName) -> Calls {
        Calls {
            recorded: Arc::clone(&self.recorded),
            resource: self.recorded.names.offered(resource),
        }
    }

    /// Starts to measure an admission.
    pub fn admission(&self) -> Admission {
        Admission::new(Arc::clone(&self.recorded))
    }

    /// Counts a pod that was rejected before its admission began; `reason` is one word.
    pub fn rejected(&self, reason: &'static str) {
        self.recorded.admission_ended(Outcome::new("refused", reason));
    }

    /// Returns a callback that counts the refusals of a server whose limit on connections is `connections`.
    pub fn on_refusal(&self, connections: Limit) -> OnRefusal {
        let metrics = self.clone();
        Arc::new(move |_| metrics.limit_hit(connections.name()))
    }

    /// Counts a request or connection that a limit refused or delayed, named as in the configuration.
    pub fn limit_hit(&self, limit: &'static str) {
        if limit.is_empty() {
            return;
        }
        self.recorded.limit_hits.get_or_create(&ByLimit { limit }).inc();
    }

    /// Adds a socket in `plugins_registry`.
    pub fn socket_found(&self, path: &Path) {
        self.recorded.sockets().insert(path.to_owned(), false);
    }

    /// Marks the plugin behind a socket in `plugins_registry` as registered.
    pub fn socket_registered(&self, path: &Path) {
        if let Some(registered) = self.recorded.sockets().get_mut(path) {
            *registered = true;
        }
    }

    /// Removes a socket in `plugins_registry`.
    pub fn socket_left(&self, path: &Path) {
        self.recorded.sockets().remove(path);
    }
}

impl Recorded {
    fn sockets(&self) -> MutexGuard<'_, BTreeMap<PathBuf, bool>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes all series of a resource.
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
            // A wait in progress is still counted when it ends.
            if self
                .waiting
                .get(&labels)
                .is_some_and(|waiting| waiting.get() == 0)
            {
                self.waiting.remove(&labels);
            }
        }
    }

    fn admission_ended(&self, outcome: Outcome) {
        self.admissions.get_or_create(&by_end(outcome)).inc();
        if !matches!(outcome, ADMITTED | GIVEN_UP) {
            self.rejections
                .get_or_create(&ByReason { reason: REJECTION })
                .inc();
        }
    }

    /// Counts the limit that an answer exceeded, if that is why the call failed.
    fn count_limit(&self, failure: &CallFailure) {
        if let Some(limit) = failure.limit {
            let limit = limit.name();
            self.limit_hits.get_or_create(&ByLimit { limit }).inc();
        }
    }
}

/// Records the calls on one plugin.
#[derive(Debug, Clone)]
pub struct Calls {
    recorded: Arc<Recorded>,
    resource: Label,
}

impl Calls {
    /// Records the duration of a call, whatever its result.
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

    /// Counts a failed call.
    pub(crate) fn failed(&self, failure: impl Into<CallFailure>) {
        let failure = failure.into();
        self.recorded.count_limit(&failure);
        self.count(failure.method, failure.code());
    }

    /// Counts the end of the stream of lists with this code.
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

#[cfg(test)]
mod tests;
