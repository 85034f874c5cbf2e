use std::collections::BTreeSet;

use devlet_core::device_plugin::inventory::{EVICT_AFTER_MS, Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::{Moment, Pod, ReserveError};
use tempfile::TempDir;
use tonic::Status;

use super::*;
use crate::cluster::{ClusterConnection, ClusterReport, ClusterSlice};
use crate::grpc::call::CallError;
use crate::store::{OpenOptions, Store};
use crate::workflow::admit::AdmitError;
use crate::workflow::register_plugin::RegisterError;

const GPU: &str = "acme.com/gpu";

struct World {
    metrics: Metrics,
    store: Store,
    cluster: ClusterReport,
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
        let (store, report) = Store::open(options).unwrap();
        let metrics = Metrics::default();
        metrics.files_set_aside(report.quarantined.len());
        Self {
            metrics,
            store,
            cluster: ClusterReport::default(),
            directory,
        }
    }

    /// A plugin with one healthy device and one that is not.
    fn offer(&self, resource: &str) {
        self.offer_devices(resource, 2);
    }

    /// A plugin with devices of which every other one is healthy.
    fn offer_devices(&self, resource: &str, count: usize) {
        let offer = Offer {
            resource: resource.into(),
            endpoint: format!("{resource}.sock"),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            options: PluginOptions::default(),
        };
        let device = |number: usize| Device {
            id: format!("device-{number}").into(),
            healthy: number.is_multiple_of(2),
            nodes: Vec::new(),
        };
        let (list, _) = DeviceList::new((0..count).map(device).collect());
        let now = self.store.now();
        self.store.update(|node| {
            let (connection, _) = node.plugin_connected(offer, now).unwrap();
            node.devices_listed(connection, list);
        });
    }

    fn text(&self) -> String {
        let database = self.directory.path().join("state.redb");
        let store = StoreView {
            is_healthy: self.store.health().is_ok(),
            statistics: self.store.statistics(),
            database_bytes: database.metadata().unwrap().len(),
        };
        let now = self.store.now();
        let view = self.store.read(|node| View::new(node, now, store));
        let view = self.cluster.read(|state| view.with_cluster(state));
        self.metrics.text(&view).unwrap()
    }

    fn register(&self, resource: &str) {
        self.metrics
            .registered(&resource.into(), &Ok::<_, RegisterError>(()));
    }

    fn assert_has(&self, lines: &[&str]) {
        let text = self.text();
        for line in lines {
            assert!(text.lines().any(|each| each == *line), "{line}\n{text}");
        }
    }
}

fn not_served(resource: &str) -> ReserveError {
    ReserveError::NotServed {
        resource: resource.into(),
        last: None,
    }
}

/// The values of a label on the lines of a metric.
fn label_values(text: &str, metric: &str, label: &str) -> BTreeSet<String> {
    let lines = text
        .lines()
        .filter(|line| line.starts_with(&format!("{metric}{{")));
    let value = |line: &str| {
        let rest = line.split(&format!("{label}=\"")).nth(1)?;
        rest.split('"').next().map(str::to_owned)
    };
    lines.filter_map(value).collect()
}

#[test]
fn counters_and_gauges_have_the_kubelets_names() {
    let world = World::new();
    world.offer(GPU);
    let metrics = &world.metrics;
    world.register(GPU);
    metrics
        .plugin(&GPU.into())
        .took("Allocate", Duration::from_millis(7));
    metrics.limit_hit("connectionsPerUid");
    world.assert_has(&[
        r#"kubelet_device_plugin_registration_total{resource_name="acme.com/gpu"} 1"#,
        r#"kubelet_device_plugin_alloc_duration_seconds_bucket{le="0.005",resource_name="acme.com/gpu"} 0"#,
        r#"kubelet_device_plugin_alloc_duration_seconds_bucket{le="0.01",resource_name="acme.com/gpu"} 1"#,
        r#"kubelet_device_plugin_alloc_duration_seconds_count{resource_name="acme.com/gpu"} 1"#,
        r#"kubelet_admission_rejections_total{reason="UnexpectedAdmissionError"} 0"#,
        r#"devlet_plugin_registrations_total{outcome="registered",reason=""} 1"#,
        r#"devlet_limit_hits_total{limit="connectionsPerUid"} 1"#,
        r#"devlet_resource_capacity{resource_name="acme.com/gpu"} 2"#,
        r#"devlet_resource_allocatable{resource_name="acme.com/gpu"} 1"#,
        r#"devlet_resource_held{resource_name="acme.com/gpu"} 0"#,
        r#"devlet_resource_free{resource_name="acme.com/gpu"} 1"#,
        r#"devlet_plugin_up{resource_name="acme.com/gpu"} 1"#,
        r#"devlet_plugins_connected{resource_name="acme.com/gpu"} 1"#,
        "devlet_pods 0",
        "devlet_state_blocked 0",
        "devlet_state_files_set_aside 0",
        "devlet_store_healthy 1",
    ]);
}

#[test]
fn calls_are_counted_by_plugin_method_and_code() {
    let world = World::new();
    let calls = world.metrics.plugin(&GPU.into());
    calls.took("PreStartContainer", Duration::from_millis(1));
    calls.failed(&CallError::TimedOut {
        method: "Allocate",
        deadline: Duration::from_secs(30),
    });
    calls.failed(&CallError::Refused {
        method: "Allocate",
        status: Box::new(Status::permission_denied("no")),
    });
    calls.lists_ended(tonic::Code::Cancelled);
    world.assert_has(&[
        r#"devlet_plugin_rpc_duration_seconds_count{resource_name="acme.com/gpu",method="PreStartContainer"} 1"#,
        r#"devlet_plugin_rpc_errors_total{resource_name="acme.com/gpu",method="Allocate",code="DeadlineExceeded"} 1"#,
        r#"devlet_plugin_rpc_errors_total{resource_name="acme.com/gpu",method="Allocate",code="PermissionDenied"} 1"#,
        r#"devlet_plugin_rpc_errors_total{resource_name="acme.com/gpu",method="ListAndWatch",code="Canceled"} 1"#,
    ]);
    let text = world.text();
    let allocations = "kubelet_device_plugin_alloc_duration_seconds_count";
    assert!(!text.contains(allocations), "only Allocate is one: {text}");
}

#[test]
fn a_wait_is_counted_while_it_lasts_and_measured_once() {
    let world = World::new();
    let mut admission = world.metrics.admission();
    admission.started -= Duration::from_secs(8);
    for seconds in [2, 4] {
        let mut waits = admission.waits(&not_served(GPU));
        waits.since -= Duration::from_secs(seconds);
        world.assert_has(&[
            r#"devlet_admissions_waiting{resource_name="acme.com/gpu",reason="not_served"} 1"#,
        ]);
        drop(waits);
        world.assert_has(&[
            r#"devlet_admissions_waiting{resource_name="acme.com/gpu",reason="not_served"} 0"#,
        ]);
    }
    admission.ended(&Err::<Pod, _>(AdmitError::TimedOut {
        waited: Duration::from_secs(6),
        reason: not_served(GPU),
    }));
    world.assert_has(&[
        r#"devlet_admission_wait_seconds_bucket{le="5.0",resource_name="acme.com/gpu"} 0"#,
        r#"devlet_admission_wait_seconds_count{resource_name="acme.com/gpu"} 1"#,
        r#"devlet_admission_duration_seconds_count{outcome="timed_out"} 1"#,
        r#"devlet_admissions_total{outcome="timed_out",reason="not_served"} 1"#,
        r#"kubelet_admission_rejections_total{reason="UnexpectedAdmissionError"} 1"#,
    ]);
    let text = world.text();
    let sum = |name: &str| {
        let lines = text
            .lines()
            .filter(|line| line.starts_with(&format!("{name}_seconds_sum")));
        let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        lines.map(value).sum::<f64>()
    };
    assert!(sum("devlet_admission_wait") >= 6.0, "{text}");
    assert!(
        sum("devlet_admission_duration") >= sum("devlet_admission_wait") + 1.0,
        "{text}"
    );
}

#[test]
fn a_dropped_admission_counts_as_given_up_and_not_as_rejected() {
    let world = World::new();
    drop(world.metrics.admission());
    world.metrics.rejected("invalid");
    world.assert_has(&[
        r#"devlet_admissions_total{outcome="given_up",reason="caller_left"} 1"#,
        r#"devlet_admissions_total{outcome="admitted",reason=""} 0"#,
        r#"devlet_admissions_total{outcome="refused",reason="invalid"} 1"#,
        r#"kubelet_admission_rejections_total{reason="UnexpectedAdmissionError"} 1"#,
    ]);
}

#[test]
fn a_plugin_that_invents_resources_gets_so_many_labels_and_pods_cannot_take_them() {
    let world = World::new();
    let admission = world.metrics.admission();
    for number in 0..MAX_AWAITED + 50 {
        drop(admission.waits(&not_served(&format!("pods.org/r{number}"))));
    }
    for number in 0..MAX_RESOURCES + 10 {
        let resource = format!("acme.com/r{number}");
        world.register(&resource);
        world.metrics.listed(&resource.as_str().into(), true);
        let calls = world.metrics.plugin(&resource.as_str().into());
        calls.took("Allocate", Duration::from_millis(1));
        world.offer(&resource);
    }
    world.register("acme.com/r0");
    let text = world.text();
    for metric in [
        "kubelet_device_plugin_registration_total",
        "kubelet_device_plugin_alloc_duration_seconds_count",
        "devlet_plugin_rpc_duration_seconds_count",
        "devlet_plugin_lists_total",
        "devlet_resource_capacity",
        "devlet_plugin_up",
    ] {
        let values = label_values(&text, metric, "resource_name");
        assert_eq!(values.len(), MAX_RESOURCES + 1, "{metric}: {values:?}");
        assert!(values.contains("other"), "{metric}: {values:?}");
    }
    let awaited = label_values(&text, "devlet_admissions_waiting", "resource_name");
    assert_eq!(awaited.len(), MAX_AWAITED + 1, "{awaited:?}");
    for line in [
        r#"kubelet_device_plugin_registration_total{resource_name="other"} 10"#,
        r#"kubelet_device_plugin_registration_total{resource_name="acme.com/r0"} 2"#,
        r#"devlet_resource_capacity{resource_name="other"} 20"#,
        r#"devlet_plugins_connected{resource_name="other"} 10"#,
    ] {
        assert!(text.lines().any(|each| each == line), "{line}");
    }
}

#[test]
fn the_label_of_a_forgotten_resource_becomes_free() {
    let world = World::new();
    let offered = |resource: &str| {
        let name = resource.into();
        world.register(resource);
        world.metrics.listed(&name, true);
        let calls = world.metrics.plugin(&name);
        calls.took("Allocate", Duration::from_millis(1));
        calls.lists_ended(tonic::Code::Unavailable);
        drop(world.metrics.admission().waits(&not_served(resource)));
        world.offer(resource);
    };
    (0..MAX_RESOURCES).for_each(|number| offered(&format!("acme.com/r{number}")));
    world
        .metrics
        .plugin(&"acme.com/never".into())
        .lists_ended(tonic::Code::Unknown);
    world.text();
    let gone = world.store.now();
    world.store.update(|node| {
        let first = node
            .plugins()
            .into_iter()
            .find(|each| each.resource.as_str() == "acme.com/r0");
        node.connection_lost(first.unwrap().connection, gone);
        world.metrics.lost(&"acme.com/r0".into());
    });
    assert!(world.text().contains("\"acme.com/r0\""), "it may come back");

    world
        .store
        .update(|node| node.evict_idle(Moment(gone.0 + EVICT_AFTER_MS)));
    let text = world.text();
    assert!(!text.contains("\"acme.com/r0\""), "{text}");
    offered("acme.com/new");
    let text = world.text();
    for metric in [
        "kubelet_device_plugin_registration_total",
        "kubelet_device_plugin_alloc_duration_seconds_count",
        "devlet_plugin_rpc_duration_seconds_count",
        "devlet_plugin_lists_total",
        "devlet_resource_capacity",
        "devlet_admissions_waiting",
    ] {
        let values = label_values(&text, metric, "resource_name");
        assert!(values.contains("acme.com/new"), "{metric}: {values:?}");
        assert_eq!(values.len(), MAX_RESOURCES, "{metric}: {values:?}");
    }
    // A plugin that never registered keeps its errors.
    assert!(text.contains("devlet_plugin_rpc_errors_total{resource_name=\"other\",method=\"ListAndWatch\",code=\"Unknown\"} 1"), "{text}");
}

#[test]
fn a_label_of_several_resources_is_up_if_all_of_them_are() {
    let world = World::new();
    for number in 0..MAX_RESOURCES + 2 {
        world.offer(&format!("acme.com/r{number:03}"));
    }
    world.assert_has(&[r#"devlet_plugin_up{resource_name="other"} 1"#]);
    let now = world.store.now();
    world.store.update(|node| {
        let last = node.plugins().pop().unwrap();
        node.connection_lost(last.connection, now)
    });
    world.assert_has(&[
        r#"devlet_plugin_up{resource_name="other"} 0"#,
        r#"devlet_plugins_connected{resource_name="other"} 1"#,
    ]);
}

#[test]
fn sockets_are_bounded_and_their_names_cannot_break_the_format() {
    let world = World::new();
    let hostile = Path::new("/plugins_registry/a\"} 1\n# EOF\n\\x.sock");
    world.metrics.socket_found(hostile);
    world.metrics.socket_registered(hostile);
    for number in 0..MAX_SOCKETS + 4 {
        world
            .metrics
            .socket_found(Path::new(&format!("/plugins_registry/s{number}.sock")));
    }
    let text = world.text();
    let escaped =
        r#"socket_path="/plugins_registry/a\"} 1\n# EOF\n\\x.sock",state="actual_state_of_world"} 1"#;
    assert!(text.contains(escaped), "{text}");
    assert_eq!(text.matches("\n# EOF\n").count(), 1, "{text}");
    let desired = text
        .lines()
        .filter(|line| line.starts_with("plugin_manager_total_plugins{") && line.contains("desired"));
    assert_eq!(desired.count(), MAX_SOCKETS + 1);
    assert!(
        text.contains(r#"{socket_path="other",state="desired_state_of_world"} 5"#),
        "{text}"
    );
    world.metrics.socket_left(hostile);
    assert!(!world.text().contains("actual_state_of_world"));
}

#[test]
fn buckets_resolve_from_50_microseconds_to_a_minute_and_have_the_kubelets_bounds() {
    let world = World::new();
    let calls = world.metrics.plugin(&GPU.into());
    // One value above each bound, in its own bucket.
    for bound in DURATION_BOUNDS {
        calls.took("Allocate", Duration::from_secs_f64(bound * 1.01));
    }
    let text = world.text();
    let name = "kubelet_device_plugin_alloc_duration_seconds";
    let counts: Vec<(f64, u64)> = text
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(&format!("{name}_bucket{{le=\""))?;
            let bound = rest.split('"').next()?.replace("+Inf", "inf");
            Some((bound.parse().ok()?, line.rsplit(' ').next()?.parse().ok()?))
        })
        .collect();
    assert_eq!(counts.first(), Some(&(0.00005, 0)));
    assert_eq!(counts[counts.len() - 2].0, 60.0);
    assert!(
        counts.windows(2).all(|two| two[0].1 + 1 == two[1].1),
        "{counts:?}"
    );
    // No step is larger than from 10 s to 30 s.
    let finite = &counts[..counts.len() - 1];
    assert!(
        finite.windows(2).all(|two| two[1].0 <= two[0].0 * 3.0),
        "{counts:?}"
    );
    for kubelet in [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0] {
        assert!(counts.iter().any(|(bound, _)| *bound == kubelet), "{kubelet}");
    }
}

#[tokio::test]
async fn the_counters_of_the_store_are_exported() {
    let world = World::new();
    // An empty file is recorded, too.
    let nothing = r#"{"PodDeviceEntries":null,"RegisteredDevices":{"acme.com/gpu":[]}}"#;
    world.store.import(nothing.as_bytes()).await.unwrap();
    let text = world.text();
    for name in [
        "devlet_store_sync_duration_seconds",
        "devlet_store_write_duration_seconds",
        "devlet_store_batch_changes",
    ] {
        let value = |suffix: &str| {
            let line = text
                .lines()
                .find(|line| line.starts_with(&format!("{name}_{suffix}")));
            line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        assert!(value("count") >= 1.0, "{name}");
        assert_eq!(value("bucket{le=\"+Inf\"}"), value("count"), "{name}");
    }
    let size = text
        .lines()
        .find_map(|line| line.strip_prefix("devlet_store_database_bytes "));
    assert!(size.unwrap().parse::<u64>().unwrap() > 0, "{text}");
    assert!(text.contains("\ndevlet_tasks "), "{text}");
}

#[test]
fn the_number_of_lines_does_not_depend_on_devices_and_pods() {
    let lines = |devices, admissions| {
        let world = World::new();
        world.offer_devices(GPU, devices);
        for _ in 0..admissions {
            let admission = world.metrics.admission();
            drop(admission.waits(&not_served(GPU)));
        }
        world.text().lines().count()
    };
    assert_eq!(lines(2, 1), lines(5000, 1000));
}

/// Returns the metrics of a table of `docs/metrics.md`.
fn documented(prefix: &str) -> BTreeSet<String> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let text = std::fs::read_to_string(file).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| row.split('`').next());
    names
        .filter(|name| name.starts_with(prefix))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_metrics_of_an_integration_with_a_cluster_are_documented_and_absent_without_it() {
    let world = World::new();
    world.cluster.succeeded("pods", Moment(1_700_000_000_500));
    world
        .cluster
        .failed("pods", Moment(1_700_000_001_000), "first".into());
    world
        .cluster
        .failed("node", Moment(1_700_000_001_000), "second".into());
    world.cluster.succeeded("node", Moment(1_700_000_002_000));
    assert!(!world.text().contains("kubernetes_"));

    let connection = ClusterConnection::default();
    world.cluster.update(|state| {
        state.connection = Some(connection);
        let slice = |has_stale_owner| ClusterSlice {
            has_stale_owner,
            ..ClusterSlice::default()
        };
        state.slices = [("a".to_owned(), slice(true)), ("b".to_owned(), slice(false))].into();
    });
    world.assert_has(&[
        r#"devlet_kubernetes_reconciler_errors_total{reconciler="pods"} 1"#,
        r#"devlet_kubernetes_reconciler_failing{reconciler="pods"} 1"#,
        r#"devlet_kubernetes_reconciler_failing{reconciler="node"} 0"#,
        r#"devlet_kubernetes_reconciler_last_success_timestamp_seconds{reconciler="pods"} 1700000000.5"#,
        "devlet_kubernetes_pods_waiting 0",
        "devlet_kubernetes_slices 2",
        "devlet_kubernetes_slices_stale 1",
    ]);
    let text = world.text();
    let samples = text.lines().filter(|line| line.starts_with("devlet_kubernetes_"));
    let printed: BTreeSet<String> = samples
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(str::to_owned)
        .collect();
    assert_eq!(printed, documented("devlet_kubernetes_"));
}

#[test]
fn the_metrics_of_a_shield_are_documented_and_absent_without_it() {
    let world = World::new();
    assert!(!world.text().contains("devlet_shield_"));
    let view = world.store.read(|node| {
        let store = StoreView {
            is_healthy: true,
            statistics: world.store.statistics(),
            database_bytes: 0,
        };
        let counts = ShieldCounts {
            registered: 2,
            missing: 1,
            ..ShieldCounts::default()
        };
        View::new(node, world.store.now(), store).with_shield(counts, node)
    });

    let text = world.metrics.text(&view).unwrap();

    for line in [
        r#"devlet_shield_registrations{state="registered"} 2"#,
        r#"devlet_shield_containers{state="without_devices"} 1"#,
        "devlet_shield_leases 0",
        "devlet_shield_runtime_ready 0",
    ] {
        assert!(text.lines().any(|each| each == line), "{line}\n{text}");
    }
    let samples = text.lines().filter(|line| line.starts_with("devlet_shield_"));
    let printed: BTreeSet<String> = samples
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(str::to_owned)
        .collect();
    assert_eq!(printed, documented("devlet_shield_"));
}
