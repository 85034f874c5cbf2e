//! Metrics of an integration with a cluster: its reconcilers, waiting pods and ResourceSlices.

use std::sync::atomic::AtomicU64;

use devlet_core::Moment;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::cluster::{ClusterState, TaskState};

/// The names of reconcilers are constants, so that labels are bounded.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReconciler {
    reconciler: &'static str,
}

/// The values at one moment.
#[derive(Debug, Clone)]
pub(super) struct ClusterCounts {
    reconcilers: Vec<(&'static str, TaskState)>,
    pods_waiting: usize,
    slices: usize,
    slices_with_stale_owner: usize,
}

impl ClusterCounts {
    /// Collects the values; `None` without an integration.
    pub(super) fn new(state: &ClusterState) -> Option<Self> {
        state.connection.as_ref()?;
        let stale = state.slices.values().filter(|slice| slice.has_stale_owner);
        let tasks = state.tasks.iter();
        Some(Self {
            reconcilers: tasks.map(|(name, task)| (*name, task.clone())).collect(),
            pods_waiting: state.waiting.len(),
            slices: state.slices.len(),
            slices_with_stale_owner: stale.count(),
        })
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let errors: Family<ByReconciler, Counter> = Family::default();
        let failing: Family<ByReconciler, Gauge> = Family::default();
        let success: Family<ByReconciler, Gauge<f64, AtomicU64>> = Family::default();
        for (reconciler, task) in &self.reconcilers {
            let label = ByReconciler { reconciler };
            errors.get_or_create(&label).inc_by(task.errors);
            let is_failing = i64::from(task.failing_since.is_some());
            failing.get_or_create(&label).set(is_failing);
            let last = task.last_success.map_or(0.0, seconds);
            success.get_or_create(&label).set(last);
        }
        registry.register(
            "devlet_kubernetes_reconciler_errors",
            "Attempts of reconcilers that failed",
            errors,
        );
        registry.register(
            "devlet_kubernetes_reconciler_failing",
            "Whether the last attempt of the reconciler failed",
            failing,
        );
        registry.register(
            "devlet_kubernetes_reconciler_last_success_timestamp_seconds",
            "When the reconciler last succeeded, since the epoch; 0 if it never did",
            success,
        );
        let gauges = [
            (
                "pods_waiting",
                "Pods of the API server that wait",
                self.pods_waiting,
            ),
            ("slices", "ResourceSlices of the node", self.slices),
            (
                "slices_stale",
                "ResourceSlices whose owner is an earlier Node object",
                self.slices_with_stale_owner,
            ),
        ];
        for (name, help, value) in gauges {
            let gauge: Gauge = Gauge::default();
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            registry.register(format!("devlet_kubernetes_{name}"), help, gauge);
        }
    }
}

fn seconds(moment: Moment) -> f64 {
    std::time::Duration::from_millis(moment.0).as_secs_f64()
}
