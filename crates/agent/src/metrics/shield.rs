//! Metrics of a devlet beside a kubelet: leases, registrations, and containers without their devices.

use devlet_core::Node;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What the shield reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShieldCounts {
    /// Resources that are registered with the kubelet.
    pub registered: usize,
    /// Resources whose registration failed.
    pub unregistered: usize,
    /// Containers without devices that they must have.
    pub missing: usize,
    /// Containers that got devices from a plugin beside devlet.
    pub bypassed: usize,
    /// `true` if the runtime has CDI on.
    pub is_runtime_ready: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    state: &'static str,
}

/// The values at one moment.
#[derive(Debug, Clone)]
pub(super) struct ShieldValues {
    counts: ShieldCounts,
    leases: usize,
    running: usize,
    unwitnessed: usize,
}

impl ShieldValues {
    pub(super) fn new(counts: ShieldCounts, node: &Node) -> Self {
        let leases = || node.leases().iter().map(|view| view.lease);
        Self {
            counts,
            leases: leases().count(),
            running: leases().filter(|lease| !lease.containers.is_empty()).count(),
            unwitnessed: leases().filter(|lease| !lease.is_witnessed).count(),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let ShieldCounts {
            registered,
            unregistered,
            missing,
            bypassed,
            is_runtime_ready,
        } = self.counts;
        let states = |values: [(&'static str, usize); 2]| {
            let family: Family<ByState, Gauge> = Family::default();
            for (state, value) in values {
                family.get_or_create(&ByState { state }).set(gauge(value));
            }
            family
        };
        registry.register(
            "devlet_shield_registrations",
            "Resources that are registered with the kubelet, and those whose registration failed",
            states([("registered", registered), ("failed", unregistered)]),
        );
        registry.register(
            "devlet_shield_containers",
            "Containers without devices that they request, and with devices of a plugin beside devlet",
            states([("without_devices", missing), ("beside_devlet", bypassed)]),
        );
        let gauges = [
            (
                "leases",
                "Devices of a resource that a container has",
                self.leases,
            ),
            (
                "leases_running",
                "Leases with a container that may run",
                self.running,
            ),
            (
                "leases_unwitnessed",
                "Leases that may have containers devlet did not see start",
                self.unwitnessed,
            ),
            (
                "runtime_ready",
                "Whether the container runtime has CDI on and reads devlet's directory",
                usize::from(is_runtime_ready),
            ),
        ];
        for (name, help, value) in gauges {
            let metric = Gauge::<i64>::default();
            metric.set(gauge(value));
            registry.register(format!("devlet_shield_{name}"), help, metric);
        }
    }
}

fn gauge(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
