//! What is counted and measured, in the words of Prometheus.
//!
//! Counters and histograms are recorded where things happen; gauges are computed from the node when somebody
//! looks. Names are the kubelet's where it has one, so that its dashboards work here.
//!
//! The only label is the resource, which plugins choose: beyond [`MOST_RESOURCES`] all others share the label
//! `other`, so that no plugin can fill the memory of whoever scrapes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use devlet_core::{Capacity, ResourceName};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// How many resources have a label of their own.
pub const MOST_RESOURCES: usize = 256;

/// The `Content-Type` of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const OTHER: &str = "other";

/// The kubelet's buckets for calls of plugins are Prometheus' defaults; the last ones are our deadlines.
const SECONDS: [f64; 13] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    resource_name: String,
}

type Number = fn(&Capacity) -> usize;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// What is counted. Clones count together.
#[derive(Clone)]
pub struct Metrics {
    registrations: Family<Labels, Counter>,
    allocations: Histograms,
    named: Arc<Mutex<BTreeSet<ResourceName>>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            registrations: Family::default(),
            allocations: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            named: Arc::default(),
        }
    }
}

impl Metrics {
    /// A plugin was taken in.
    pub fn registered(&self, resource: &ResourceName) {
        self.registrations.get_or_create(&self.labels(resource)).inc();
    }

    /// A plugin was called to allocate, and answered, refused or was given up.
    pub fn allocated(&self, resource: &ResourceName, took: Duration) {
        let histogram = self.allocations.get_or_create(&self.labels(resource));
        histogram.observe(took.as_secs_f64());
    }

    /// Everything, with the gauges of a node's capacity, as OpenMetrics text.
    pub fn text(&self, capacities: &BTreeMap<ResourceName, Capacity>) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register(
            "kubelet_device_plugin_registration",
            "Device plugins that were taken in",
            self.registrations.clone(),
        );
        registry.register(
            "kubelet_device_plugin_alloc_duration_seconds",
            "How long device plugins took to answer Allocate",
            self.allocations.clone(),
        );
        let gauges: [(_, _, Number); 3] = [
            ("capacity", "Devices, healthy or not", |it| it.capacity),
            ("allocatable", "Healthy devices, held or not", |it| it.allocatable),
            ("held", "Devices that pods hold", |it| it.held),
        ];
        for (name, help, number) in gauges {
            let family: Family<Labels, Gauge> = Family::default();
            for (resource, capacity) in capacities {
                let number = i64::try_from(number(capacity)).unwrap_or(i64::MAX);
                family.get_or_create(&self.labels(resource)).inc_by(number);
            }
            registry.register(format!("devlet_resource_{name}"), help, family);
        }
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }

    fn labels(&self, resource: &ResourceName) -> Labels {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let has_label = named.contains(resource) || {
            let room = named.len() < MOST_RESOURCES;
            room && named.insert(resource.clone())
        };
        let resource_name = if has_label { resource.as_str() } else { OTHER };
        Labels {
            resource_name: resource_name.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
    use devlet_core::device_plugin::list::{Device, DeviceList};
    use devlet_core::{Moment, Node};

    use super::*;

    #[test]
    fn what_happened_and_what_there_is_have_the_kubelets_names() {
        let mut node = Node::default();
        let offer = Offer {
            resource: "acme.com/gpu".into(),
            endpoint: "/gpu.sock".into(),
            uid: 0,
            may_share: false,
            options: PluginOptions::default(),
        };
        let (connection, _) = node.plugin_connected(offer, Moment(0)).unwrap();
        let device = |id: &str, healthy| Device {
            id: id.into(),
            healthy,
            nodes: Vec::new(),
        };
        let (list, _) = DeviceList::new(vec![device("a", true), device("b", false)]);
        node.devices_listed(connection, list);
        let metrics = Metrics::default();
        metrics.registered(&"acme.com/gpu".into());
        metrics.allocated(&"acme.com/gpu".into(), Duration::from_millis(7));

        let text = metrics.text(&node.capacity(Moment(0))).unwrap();

        for line in [
            r#"kubelet_device_plugin_registration_total{resource_name="acme.com/gpu"} 1"#,
            r#"kubelet_device_plugin_alloc_duration_seconds_bucket{le="0.005",resource_name="acme.com/gpu"} 0"#,
            r#"kubelet_device_plugin_alloc_duration_seconds_bucket{le="0.01",resource_name="acme.com/gpu"} 1"#,
            r#"kubelet_device_plugin_alloc_duration_seconds_count{resource_name="acme.com/gpu"} 1"#,
            r#"devlet_resource_capacity{resource_name="acme.com/gpu"} 2"#,
            r#"devlet_resource_allocatable{resource_name="acme.com/gpu"} 1"#,
            r#"devlet_resource_held{resource_name="acme.com/gpu"} 0"#,
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn resources_beyond_the_limit_share_a_label() {
        let metrics = Metrics::default();
        for number in 0..MOST_RESOURCES + 10 {
            metrics.registered(&format!("acme.com/r{number}").into());
        }
        metrics.registered(&"acme.com/r0".into());
        let text = metrics.text(&BTreeMap::new()).unwrap();
        let series = text
            .lines()
            .filter(|line| line.starts_with("kubelet_device_plugin_registration_total{"));
        assert_eq!(series.count(), MOST_RESOURCES + 1);
        assert!(
            text.contains(r#"registration_total{resource_name="other"} 10"#),
            "{text}"
        );
        assert!(
            text.contains(r#"registration_total{resource_name="acme.com/r0"} 2"#),
            "{text}"
        );
    }
}
