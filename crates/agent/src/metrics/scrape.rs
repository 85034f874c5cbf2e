//! All metrics as OpenMetrics text.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use devlet_core::{Availability, Capacity, Moment, Node, ResourceName, ResourceView};
use prometheus_client::encoding::{
    EncodeGaugeValue, EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use super::cluster::ClusterCounts;
use super::drivers::{ClaimCounts, ClaimsInUse, DriverCounts};
use super::names::{Label, MAX_SOCKETS, OTHER};
use super::process::Process;
use super::shield::{ShieldCounts, ShieldValues};
use super::statistics::{Histogram, Statistics};
use super::{ByResource, Metrics};
use crate::cluster::ClusterState;

/// The `Content-Type` of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The state of the store at one moment.
#[derive(Debug, Clone)]
pub struct StoreView {
    /// `true` if the last write succeeded.
    pub is_healthy: bool,
    /// Counters of writes and syncs.
    pub statistics: Statistics,
    /// Size of the database file.
    pub database_bytes: u64,
}

/// The values of all gauges at one moment.
#[derive(Debug, Clone)]
pub struct View {
    resources: Vec<ResourceView>,
    drivers: Vec<DriverCounts>,
    claims_in_use: ClaimsInUse,
    claims: ClaimCounts,
    pods: usize,
    blocked: bool,
    store: StoreView,
    cluster: Option<ClusterCounts>,
    shield: Option<ShieldValues>,
}

impl View {
    /// Collects the values. The cost does not depend on the number of pods and devices.
    pub fn new(node: &Node, now: Moment, store: StoreView) -> Self {
        let drivers = node.drivers().into_iter().map(|driver| {
            let healths = node.health_counts(&driver.name);
            let unhealthy = node.containers_with_unhealthy_devices(&driver.name);
            (driver, healths, unhealthy)
        });
        Self {
            resources: node.resources(now),
            drivers: drivers.collect(),
            claims_in_use: node.claims_in_use(),
            claims: node.claim_counts(),
            pods: node.pod_count(),
            blocked: node.blocked().is_some(),
            store,
            cluster: None,
            shield: None,
        }
    }

    /// Adds the values of a kubelet beside devlet. The cost depends on the number of leases.
    #[must_use]
    pub fn with_shield(mut self, counts: ShieldCounts, node: &Node) -> Self {
        self.shield = Some(ShieldValues::new(counts, node));
        self
    }

    /// Adds the values of an integration with a cluster.
    #[must_use]
    pub fn with_cluster(mut self, state: &ClusterState) -> Self {
        self.cluster = ClusterCounts::new(state);
        self
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySocket {
    socket_path: String,
    state: &'static str,
}

impl Metrics {
    /// Returns all metrics as OpenMetrics text. Reads files in `/proc`.
    pub fn text(&self, view: &View) -> Result<String, fmt::Error> {
        let mut page = Page::default();
        let resources = view.resources.iter().map(|resource| &resource.name);
        for forgotten in self.recorded.names.forget_all_but(resources) {
            self.recorded.forget(&forgotten);
        }
        self.register_plugin_metrics(&mut page);
        self.register_admission_metrics(&mut page);
        self.sockets(&mut page);
        self.resources(&mut page, &view.resources);
        let drivers = &self.recorded.drivers;
        drivers.register(&mut page.registry);
        drivers.register_gauges(&mut page.registry, &view.drivers);
        drivers.register_claims_in_use(&mut page.registry, &view.claims_in_use);
        super::drivers::register_claims(&mut page.registry, &view.claims);
        state(&mut page, view);
        if let Some(cluster) = &view.cluster {
            cluster.register(&mut page.registry);
        }
        if let Some(shield) = &view.shield {
            shield.register(&mut page.registry);
        }
        let set_aside = self.recorded.set_aside.load(Ordering::Relaxed);
        page.gauge(
            "devlet_state_files_set_aside",
            "Files that could not be read when devlet started",
            set_aside,
        );
        page.registry.register(
            "devlet_log_lines_dropped",
            "Log lines dropped because standard error did not take them",
            ConstCounter::new(self.recorded.log_lines_dropped.load(Ordering::Relaxed)),
        );
        process(&mut page);
        let mut text = String::new();
        text::encode(&mut text, &page.registry)?;
        Ok(text)
    }

    fn register_plugin_metrics(&self, page: &mut Page) {
        let recorded = &self.recorded;
        let registry = &mut page.registry;
        registry.register(
            "kubelet_device_plugin_registration",
            "Device plugins that registered",
            recorded.registered.clone(),
        );
        registry.register(
            "kubelet_device_plugin_alloc_duration_seconds",
            "How long device plugins took to answer Allocate",
            recorded.allocations.clone(),
        );
        registry.register(
            "devlet_plugin_registrations",
            "Attempts of plugins to register",
            recorded.registrations.clone(),
        );
        registry.register(
            "devlet_plugin_lists",
            "Device lists that plugins sent",
            recorded.lists.clone(),
        );
        registry.register(
            "devlet_plugin_disconnects",
            "Connections to plugins that ended",
            recorded.lost.clone(),
        );
        registry.register(
            "devlet_plugin_rpc_duration_seconds",
            "How long plugins took to answer, well or not",
            recorded.calls.clone(),
        );
        registry.register(
            "devlet_plugin_rpc_errors",
            "Calls on plugins that did not end well",
            recorded.call_errors.clone(),
        );
    }

    fn register_admission_metrics(&self, page: &mut Page) {
        let recorded = &self.recorded;
        let registry = &mut page.registry;
        registry.register(
            "kubelet_admission_rejections",
            "Pods that were not admitted",
            recorded.rejections.clone(),
        );
        registry.register(
            "devlet_admissions",
            "Admissions that ended",
            recorded.admissions.clone(),
        );
        registry.register(
            "devlet_admission_duration_seconds",
            "How long admissions took in all",
            recorded.admission_times.clone(),
        );
        registry.register(
            "devlet_admissions_waiting",
            "Admissions that wait now",
            recorded.waiting.clone(),
        );
        registry.register(
            "devlet_admission_wait_seconds",
            "How long admissions that waited did so",
            recorded.waits.clone(),
        );
        registry.register(
            "devlet_limit_hits",
            "Requests and peers that exceeded a limit",
            recorded.limit_hits.clone(),
        );
    }

    fn sockets(&self, page: &mut Page) {
        let sockets: Vec<(PathBuf, bool)> = {
            let sockets = self.recorded.sockets();
            sockets
                .iter()
                .map(|(path, registered)| (path.clone(), *registered))
                .collect()
        };
        let family: Family<BySocket, Gauge> = Family::default();
        for (place, (path, registered)) in sockets.into_iter().enumerate() {
            let socket_path = if place < MAX_SOCKETS {
                path.display().to_string()
            } else {
                OTHER.to_owned()
            };
            let count = |state| {
                let socket_path = socket_path.clone();
                family.get_or_create(&BySocket { socket_path, state }).inc();
            };
            count("desired_state_of_world");
            if registered {
                count("actual_state_of_world");
            }
        }
        page.registry.register(
            "plugin_manager_total_plugins",
            "Sockets in plugins_registry, and those of them whose plugin is registered",
            family,
        );
    }

    fn resources(&self, page: &mut Page, resources: &[ResourceView]) {
        type Number = fn(&Capacity) -> usize;
        let label = |name: &ResourceName| ByResource {
            resource_name: self.recorded.names.offered(name),
        };
        let gauges: [(_, _, Number); 4] = [
            ("capacity", "Devices, healthy or not", |it| it.capacity),
            ("allocatable", "Healthy devices, held or not", |it| it.allocatable),
            ("held", "Devices that pods hold", |it| it.held),
            ("free", "Healthy devices that no pod holds", |it| it.free),
        ];
        for (name, help, number) in gauges {
            let family: Family<ByResource, Gauge> = Family::default();
            for resource in resources {
                let number = i64::try_from(number(&resource.capacity)).unwrap_or(i64::MAX);
                family.get_or_create(&label(&resource.name)).inc_by(number);
            }
            page.registry
                .register(format!("devlet_resource_{name}"), help, family);
        }
        // A label that several resources share is up if all of them are.
        let mut up: BTreeMap<Label, (bool, usize)> = BTreeMap::new();
        for resource in resources {
            let entry = up.entry(label(&resource.name).resource_name).or_insert((true, 0));
            entry.0 &= resource.availability == Availability::Serving;
            entry.1 += resource.plugins.len();
        }
        let is_up: Family<ByResource, Gauge> = Family::default();
        let connected: Family<ByResource, Gauge> = Family::default();
        for (resource_name, (serves, plugins)) in up {
            let label = ByResource { resource_name };
            is_up.get_or_create(&label).set(i64::from(serves));
            let plugins = i64::try_from(plugins).unwrap_or(i64::MAX);
            connected.get_or_create(&label).set(plugins);
        }
        page.registry.register(
            "devlet_plugin_up",
            "Whether a plugin serves the resource and has listed its devices",
            is_up,
        );
        page.registry.register(
            "devlet_plugins_connected",
            "Plugins that are connected",
            connected,
        );
    }
}

fn state(page: &mut Page, view: &View) {
    let statistics = &view.store.statistics;
    page.gauge("devlet_pods", "Pods that hold devices", view.pods);
    page.gauge(
        "devlet_state_blocked",
        "Whether no pod is admitted until an operator decides about state that could not be read",
        usize::from(view.blocked),
    );
    page.gauge(
        "devlet_store_healthy",
        "Whether the disk took what was last written to it",
        usize::from(view.store.is_healthy),
    );
    page.gauge(
        "devlet_store_database_bytes",
        "Size of the database file",
        view.store.database_bytes,
    );
    page.histogram(
        "devlet_store_sync_duration_seconds",
        "How long syncs of the database took",
        &statistics.sync_durations,
    );
    page.histogram(
        "devlet_store_write_duration_seconds",
        "How long writes to the database took, syncs included",
        &statistics.write_durations,
    );
    page.histogram(
        "devlet_store_batch_changes",
        "How many changes shared a write to the database",
        &statistics.batches,
    );
    page.registry.register(
        "devlet_store_failed_writes",
        "Writes to the database that failed",
        ConstCounter::new(statistics.failed_writes),
    );
    page.registry.register(
        "devlet_mirrors_written",
        "How often the kubelet's file was brought up to date",
        ConstCounter::new(statistics.mirrors),
    );
}

fn process(page: &mut Page) {
    let build: Family<Build, Gauge> = Family::default();
    let version = env!("CARGO_PKG_VERSION");
    build.get_or_create(&Build { version }).set(1);
    page.registry
        .register("devlet_build_info", "Which devlet this is", build);
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        page.gauge(
            "devlet_tasks",
            "Tasks that have not ended",
            runtime.metrics().num_alive_tasks(),
        );
    }
    let Some(process) = Process::read() else { return };
    page.registry.register(
        "process_cpu_seconds",
        "CPU time that the process has used",
        ConstCounter::new(process.cpu_seconds),
    );
    let gauges = [
        (
            "start_time_seconds",
            "When the process started, since the epoch",
            process.start_seconds,
        ),
        (
            "resident_memory_bytes",
            "Memory that the process has",
            process.resident_bytes,
        ),
        ("virtual_memory_bytes", "Its address space", process.virtual_bytes),
        ("threads", "Its threads", process.threads),
        ("open_fds", "Its open file descriptors", process.open_fds),
        ("max_fds", "How many it may have", process.max_fds),
    ];
    for (name, help, value) in gauges {
        page.gauge(format!("process_{name}"), help, value);
    }
}

/// The registry that is encoded.
#[derive(Debug, Default)]
struct Page {
    registry: Registry,
}

impl Page {
    fn gauge<N>(&mut self, name: impl Into<String>, help: &str, value: N)
    where
        N: EncodeGaugeValue + fmt::Debug + Send + Sync + 'static,
        ConstGauge<N>: EncodeMetric,
    {
        self.registry.register(name, help, ConstGauge::new(value));
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.registry
            .register(name, help, StoreHistogram(histogram.clone()));
    }
}

/// A histogram that the store counts.
#[derive(Debug)]
struct StoreHistogram(Histogram);

impl EncodeMetric for StoreHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Histogram { buckets, sum, count } = &self.0;
        let mut below = 0;
        let mut each: Vec<(f64, u64)> = Vec::with_capacity(buckets.len() + 1);
        for (bound, up_to) in buckets {
            each.push((*bound, up_to.saturating_sub(below)));
            below = *up_to;
        }
        // A thread may have updated a bucket and not yet the count.
        let count = below.max(*count);
        each.push((f64::INFINITY, count - below));
        encoder.encode_histogram::<NoLabelSet>(*sum, count, &each, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
