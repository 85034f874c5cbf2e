//! Of DRA drivers: what is counted and measured, and what there is.

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

use super::names::{DriverLabel, Label, Names};
use super::{ByLimit, Durations, Metrics, Recorded, reason};
use crate::dra::registration::RegisterError;
use crate::grpc::call::{CallError, InvalidAnswer};

/// The kubelet's, from 0.1 to 40 seconds.
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

/// What is counted of drivers.
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
        // So that the first one is a step from 0 to 1, which rates see.
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

/// What is done for a pod with claims. The names are the kubelet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimOperation {
    /// Before it starts.
    Prepare,
    /// When it is removed.
    Unprepare,
}

impl Metrics {
    /// A plugin of a driver was taken in, or not.
    pub(crate) fn driver_registered<T>(&self, ended: &Result<T, RegisterError>) {
        match ended {
            Ok(_) => self.registration(super::TAKEN_IN),
            Err(error) => self.registration_refused(reason::of_driver_registration(error)),
        }
    }

    /// A connection to a driver ended.
    pub(crate) fn driver_lost(&self, driver: &DriverName) {
        let drivers = &self.recorded.drivers;
        let driver_name = drivers.names.offered(driver);
        drivers.lost.get_or_create(&ByDriver { driver_name }).inc();
    }

    /// A driver said how its devices are.
    pub(crate) fn health_reported(&self, driver: &DriverName, changed: bool) {
        let drivers = &self.recorded.drivers;
        let driver_name = drivers.names.offered(driver);
        let labels = ByNews { driver_name, changed };
        drivers.reports.get_or_create(&labels).inc();
    }

    /// The claims of a pod are about to be prepared or unprepared.
    pub fn claims(&self, operation: ClaimOperation) -> Operating {
        Operating {
            recorded: Arc::clone(&self.recorded),
            operation,
            began: Instant::now(),
            is_error: true,
        }
    }

    /// Measures the calls on a driver.
    pub fn driver(&self, driver: &DriverName) -> DriverRpcs {
        DriverRpcs {
            driver: self.recorded.drivers.names.offered(driver),
            recorded: Arc::clone(&self.recorded),
        }
    }
}

/// What is done for the claims of a pod. If it is dropped before its end, it has failed.
#[derive(Debug)]
pub struct Operating {
    recorded: Arc<Recorded>,
    operation: ClaimOperation,
    began: Instant,
    is_error: bool,
}

impl Operating {
    /// It ended.
    pub fn ended<T, E>(mut self, ended: &Result<T, E>) {
        self.is_error = ended.is_err();
    }
}

impl Drop for Operating {
    fn drop(&mut self) {
        let operations = &self.recorded.drivers.operations;
        let labels = by_operation(self.operation, self.is_error);
        let seconds = self.began.elapsed().as_secs_f64();
        operations.get_or_create(&labels).observe(seconds);
    }
}

/// Measures the calls on one driver.
#[derive(Debug, Clone)]
pub struct DriverRpcs {
    recorded: Arc<Recorded>,
    driver: DriverLabel,
}

impl DriverRpcs {
    /// A call of the method with this path ended.
    pub(crate) fn took<T>(&self, path: &'static str, time: Duration, ended: &Result<T, CallError>) {
        let grpc_status_code = match ended {
            Ok(_) => reason::code(tonic::Code::Ok),
            // A client of gRPC calls it that.
            Err(CallError::Invalid { .. }) => reason::code(tonic::Code::ResourceExhausted),
            Err(error) => reason::of_call(error).1,
        };
        let labels = ByRpc {
            driver_name: self.driver.clone(),
            method_name: path,
            grpc_status_code,
        };
        let rpcs = &self.recorded.drivers.rpcs;
        rpcs.get_or_create(&labels).observe(time.as_secs_f64());
        if let Err(error) = ended {
            self.failed(error);
        }
    }

    /// An answer cannot be used.
    pub(crate) fn failed(&self, error: &CallError) {
        if let CallError::Invalid {
            problem: InvalidAnswer::LimitExceeded(over),
            ..
        } = error
        {
            let limit = over.limit.name();
            self.recorded.limit_hits.get_or_create(&ByLimit { limit }).inc();
        }
        let (method, code) = reason::of_call(error);
        self.count(method, code);
    }

    /// The stream of health ended with this code.
    pub(crate) fn watch_ended(&self, code: tonic::Code) {
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

/// A driver, how many devices it reports that are how, and how many containers use one that is not well.
pub(super) type LookedAt = (DriverView, BTreeMap<DeviceHealth, usize>, usize);

/// How many claims are how far, and how many of those that are being prepared wait for a driver.
pub(super) type ClaimCounts = (BTreeMap<Phase, usize>, usize);

/// How many prepared claims pods hold: by driver, and in all.
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

    pub(super) fn look(&self, registry: &mut Registry, drivers: &[LookedAt], in_use: &ClaimsInUse) {
        // Where several drivers share a label, it is up if all of them are.
        let mut all: BTreeMap<DriverLabel, (bool, usize)> = BTreeMap::new();
        let devices: Family<ByHealth, Gauge> = Family::default();
        let containers: Family<ByDriver, Gauge> = Family::default();
        for (driver, healths, ill) in drivers {
            let driver_name = self.names.offered(&driver.name);
            containers
                .get_or_create(&ByDriver { driver_name })
                .inc_by(number(*ill));
            for (health, count) in healths {
                let labels = ByHealth {
                    driver_name: self.names.offered(&driver.name),
                    health: match health {
                        DeviceHealth::Unknown => "Unknown",
                        DeviceHealth::Healthy => "Healthy",
                        DeviceHealth::Unhealthy => "Unhealthy",
                    },
                };
                devices.get_or_create(&labels).inc_by(number(*count));
            }
            let entry = all.entry(self.names.offered(&driver.name)).or_insert((true, 0));
            let connected = driver.plugins.iter().filter(|plugin| plugin.connected).count();
            entry.0 &= connected > 0;
            entry.1 += connected;
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
        let claims: Family<ByDriver, Gauge> = Family::default();
        let (by_driver, any) = in_use;
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

/// All states are there, also those that no claim is in.
pub(super) fn look_at_claims(registry: &mut Registry, (phases, waiting): &ClaimCounts) {
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
