//! Metrics of DRA drivers and claims.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::DriverName;
use devlet_core::dra::health::DeviceHealth;
use devlet_core::dra::view::{DriverView, Phase};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tonic::Code;

use super::names::{DriverLabel, Label, Names};
use super::reason::{self, CallFailure, REGISTERED, Reason};
use super::{Durations, Metrics, Recorded};

/// The kubelet's histogram buckets for DRA calls, in seconds.
const BOUNDS: [f64; 15] = [
    0.1, 0.1534, 0.2354, 0.3611, 0.5539, 0.8498, 1.3037, 2.0, 3.0683, 4.7071, 7.2213, 11.0784, 16.9956,
    26.0735, 40.0,
];

const WATCH: &str = "NodeWatchResources";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDriver {
    driver_name: DriverLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOperation {
    operation_name: &'static str,
    is_error: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByRpc {
    driver_name: DriverLabel,
    method_name: &'static str,
    grpc_status_code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByError {
    driver_name: DriverLabel,
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByNews {
    driver_name: DriverLabel,
    changed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByHealth {
    driver_name: DriverLabel,
    health: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    state: &'static str,
}

fn durations<L: Clone + std::hash::Hash + Eq>() -> Durations<L> {
    Family::new_with_constructor(|| Histogram::new(BOUNDS))
}

/// Counters and histograms of all drivers.
#[derive(Debug)]
pub(super) struct Drivers {
    names: Names<DriverName>,
    operations: Durations<ByOperation>,
    rpcs: Durations<ByRpc>,
    rpc_errors: Family<ByError, Counter>,
    lost: Family<ByDriver, Counter>,
    reports: Family<ByNews, Counter>,
}

impl Default for Drivers {
    fn default() -> Self {
        let drivers = Self {
            names: Names::default(),
            operations: durations(),
            rpcs: durations(),
            rpc_errors: Family::default(),
            lost: Family::default(),
            reports: Family::default(),
        };
        // A counter that starts at 0 lets `rate()` see the first increment.
        for operation in [ClaimOperation::Prepare, ClaimOperation::Unprepare] {
            for is_error in [false, true] {
                drop(
                    drivers
                        .operations
                        .get_or_create(&by_operation(operation, is_error)),
                );
            }
        }
        drivers
    }
}

fn by_operation(operation: ClaimOperation, is_error: bool) -> ByOperation {
    let operation_name = match operation {
        ClaimOperation::Prepare => "PrepareResources",
        ClaimOperation::Unprepare => "UnprepareResources",
    };
    ByOperation {
        operation_name,
        is_error,
    }
}

/// An operation on the claims of a pod. The names are the kubelet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimOperation {
    /// Before the pod starts.
    Prepare,
    /// After the pod was removed.
    Unprepare,
}

impl Metrics {
    /// Counts the registration of a driver's plugin.
    pub(crate) fn driver_registered<T, E>(&self, result: &Result<T, E>)
    where
        Reason: for<'a> From<&'a E>,
    {
        match result {
            Ok(_) => self.registration(REGISTERED),
            Err(error) => self.registration_refused(Reason::from(error).0),
        }
    }

    /// Counts the end of a connection to a driver.
    pub(crate) fn driver_lost(&self, driver: &DriverName) {
        let drivers = &self.recorded.drivers;
        let driver_name = drivers.names.offered(driver);
        drivers.lost.get_or_create(&ByDriver { driver_name }).inc();
    }

    /// Counts a health message of a driver.
    pub(crate) fn health_reported(&self, driver: &DriverName, changed: bool) {
        let drivers = &self.recorded.drivers;
        let driver_name = drivers.names.offered(driver);
        let labels = ByNews { driver_name, changed };
        drivers.reports.get_or_create(&labels).inc();
    }

    /// Starts to measure the preparation or unpreparation of the claims of a pod.
    pub fn claims(&self, operation: ClaimOperation) -> OperationTimer {
        OperationTimer {
            recorded: Arc::clone(&self.recorded),
            operation,
            began: Instant::now(),
            is_error: true,
        }
    }

    /// Returns the recorder of calls on a driver.
    pub fn driver(&self, driver: &DriverName) -> DriverRpcs {
        DriverRpcs {
            driver: self.recorded.drivers.names.offered(driver),
            recorded: Arc::clone(&self.recorded),
        }
    }
}

/// An operation in progress. Dropped before [`OperationTimer::ended`], it counts as failed.
#[derive(Debug)]
pub struct OperationTimer {
    recorded: Arc<Recorded>,
    operation: ClaimOperation,
    began: Instant,
    is_error: bool,
}

impl OperationTimer {
    /// Records the result.
    pub fn ended<T, E>(mut self, ended: &Result<T, E>) {
        self.is_error = ended.is_err();
    }
}

impl Drop for OperationTimer {
    fn drop(&mut self) {
        let operations = &self.recorded.drivers.operations;
        let labels = by_operation(self.operation, self.is_error);
        let seconds = self.began.elapsed().as_secs_f64();
        operations.get_or_create(&labels).observe(seconds);
    }
}

/// Records the calls on one driver.
#[derive(Debug, Clone)]
pub struct DriverRpcs {
    recorded: Arc<Recorded>,
    driver: DriverLabel,
}

impl DriverRpcs {
    /// Records a finished call of the method with this path.
    pub(crate) fn took<T, E>(&self, path: &'static str, time: Duration, result: &Result<T, E>)
    where
        CallFailure: for<'a> From<&'a E>,
    {
        let failure = result.as_ref().err().map(CallFailure::from);
        let grpc_status_code = match failure {
            None => reason::code(Code::Ok),
            // gRPC clients report an answer that is too large with this code.
            Some(failure) => reason::code(failure.code.unwrap_or(Code::ResourceExhausted)),
        };
        let labels = ByRpc {
            driver_name: self.driver.clone(),
            method_name: path,
            grpc_status_code,
        };
        let rpcs = &self.recorded.drivers.rpcs;
        rpcs.get_or_create(&labels).observe(time.as_secs_f64());
        if let Some(failure) = failure {
            self.failed(failure);
        }
    }

    /// Counts a failed call.
    pub(crate) fn failed(&self, failure: impl Into<CallFailure>) {
        let failure = failure.into();
        self.recorded.count_limit(&failure);
        self.count(failure.method, failure.code());
    }

    /// Counts the end of the health stream with this code.
    pub(crate) fn watch_ended(&self, code: Code) {
        self.count(WATCH, reason::code(code));
    }

    fn count(&self, method: &'static str, code: &'static str) {
        let labels = ByError {
            driver_name: self.driver.clone(),
            method,
            code,
        };
        self.recorded.drivers.rpc_errors.get_or_create(&labels).inc();
    }
}

/// A driver, its reported devices by health, and the number of containers that use an unhealthy one.
pub(super) type DriverCounts = (DriverView, BTreeMap<DeviceHealth, usize>, usize);

/// Claims by phase, and the number of those in preparation that wait for a driver.
pub(super) type ClaimCounts = (BTreeMap<Phase, usize>, usize);

/// Prepared claims that pods hold: by driver, and in total.
pub(super) type ClaimsInUse = (BTreeMap<DriverName, usize>, usize);

impl Drivers {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "dra_operations_duration_seconds",
            "How long it took to prepare or unprepare the claims of a pod",
            self.operations.clone(),
        );
        registry.register(
            "dra_grpc_operations_duration_seconds",
            "How long drivers took to answer, well or not",
            self.rpcs.clone(),
        );
        registry.register(
            "devlet_driver_rpc_errors",
            "Calls on drivers that did not end well",
            self.rpc_errors.clone(),
        );
        registry.register(
            "devlet_driver_disconnects",
            "Connections to drivers that ended",
            self.lost.clone(),
        );
        registry.register(
            "devlet_driver_health_messages",
            "Messages of drivers about the health of devices",
            self.reports.clone(),
        );
    }

    pub(super) fn register_gauges(&self, registry: &mut Registry, drivers: &[DriverCounts]) {
        // A label that several drivers share is up if all of them are.
        let mut all: BTreeMap<DriverLabel, (bool, usize)> = BTreeMap::new();
        let devices: Family<ByHealth, Gauge> = Family::default();
        let containers: Family<ByDriver, Gauge> = Family::default();
        for (driver, healths, unhealthy) in drivers {
            let driver_name = self.names.offered(&driver.name);
            for (health, count) in healths {
                let labels = ByHealth {
                    driver_name: driver_name.clone(),
                    health: health_label(*health),
                };
                devices.get_or_create(&labels).inc_by(number(*count));
            }
            let connected = driver.plugins.iter().filter(|plugin| plugin.connected).count();
            let entry = all.entry(driver_name.clone()).or_insert((true, 0));
            entry.0 &= connected > 0;
            entry.1 += connected;
            containers
                .get_or_create(&ByDriver { driver_name })
                .inc_by(number(*unhealthy));
        }
        let up: Family<ByDriver, Gauge> = Family::default();
        let connected: Family<ByDriver, Gauge> = Family::default();
        for (driver_name, (is_up, plugins)) in all {
            let labels = ByDriver { driver_name };
            up.get_or_create(&labels).set(i64::from(is_up));
            connected.get_or_create(&labels).set(number(plugins));
        }
        registry.register(
            "devlet_driver_up",
            "Whether a plugin of the driver is connected",
            up,
        );
        registry.register(
            "devlet_driver_plugins_connected",
            "Plugins of the driver that are connected",
            connected,
        );
        registry.register(
            "devlet_driver_devices",
            "Devices whose health the driver reports",
            devices,
        );
        registry.register(
            "devlet_driver_containers_with_unhealthy_devices",
            "Containers that use a device that the driver calls unhealthy",
            containers,
        );
    }

    pub(super) fn register_claims_in_use(&self, registry: &mut Registry, (by_driver, any): &ClaimsInUse) {
        let claims: Family<ByDriver, Gauge> = Family::default();
        let driver_name = Label::any();
        claims.get_or_create(&ByDriver { driver_name }).set(number(*any));
        for (driver, count) in by_driver {
            let driver_name = self.names.awaited(driver);
            claims
                .get_or_create(&ByDriver { driver_name })
                .inc_by(number(*count));
        }
        registry.register(
            "dra_resource_claims_in_use",
            "Prepared claims that pods hold",
            claims,
        );
    }
}

fn health_label(health: DeviceHealth) -> &'static str {
    match health {
        DeviceHealth::Unknown => "Unknown",
        DeviceHealth::Healthy => "Healthy",
        DeviceHealth::Unhealthy => "Unhealthy",
    }
}

/// Registers the number of claims in each state, states without claims included.
pub(super) fn register_claims(registry: &mut Registry, (phases, waiting): &ClaimCounts) {
    let of = |phase: Phase| phases.get(&phase).copied().unwrap_or(0);
    let states = [
        ("waiting", *waiting),
        ("preparing", of(Phase::Preparing).saturating_sub(*waiting)),
        ("prepared", of(Phase::Prepared)),
        ("unpreparing", of(Phase::Unpreparing)),
        ("abandoned", of(Phase::Abandoned)),
    ];
    let claims: Family<ByState, Gauge> = Family::default();
    for (state, count) in states {
        claims.get_or_create(&ByState { state }).set(number(count));
    }
    registry.register(
        "devlet_claims",
        "Claims on this node, by how far they are",
        claims,
    );
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
