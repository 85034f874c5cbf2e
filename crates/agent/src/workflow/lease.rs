//! The kubelet's calls about a lease: `Allocate` grants it, `PreStartContainer` prepares it.
//!
//! 1. `Allocate` does not call the plugin. A kubelet fails a pod for good if `Allocate` fails, and stops everything else
//!    while it waits.
//! 2. `PreStartContainer` calls the plugin, keeps its answer, and writes the CDI spec: see [`prepare`].
//!
//! A lease that devlet does not know is found in the kubelet's checkpoint.

pub mod hand_over;
pub mod prepare;
mod start;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::shield::Lease;
use devlet_core::{Availability, DeviceId, LeaseName, Node, PluginView, PreferenceQuery, ResourceName};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::{Config, Shield};
use crate::device_plugin::clients::PluginClients;
use crate::grpc::call::CallDeadline;
use crate::lease::spec::{self, RuntimeCdi};
use crate::lease::{self, process};
use crate::metrics::Metrics;
use crate::store::{LeaseError, Store, in_time};

/// Time for the write of a new lease. The kubelet waits for it, and serves no other pod meanwhile.
const GRANT_TIME: Duration = Duration::from_millis(500);

/// Time for a plugin to say which devices it prefers. The kubelet waits for it, too.
const PREFERENCE_TIME: Duration = Duration::from_millis(200);

/// Serves the kubelet's calls about leases.
#[derive(Debug, Clone)]
pub struct LeaseWorkflow {
    pub(crate) store: Store,
    pub(crate) plugins: PluginClients,
    pub(crate) config: Arc<Config>,
    pub(crate) shield: Arc<Shield>,
    pub(crate) metrics: Metrics,
    /// How the runtime treats CDI devices, as far as it has told.
    pub(crate) runtime: Arc<watch::Sender<RuntimeCdi>>,
}

impl LeaseWorkflow {
    /// Grants a lease for devices that the kubelet has chosen. Returns its CDI device.
    pub async fn grant(&self, resource: &ResourceName, devices: Vec<DeviceId>) -> String {
        let name = lease::new_name();
        let granting = self.store.grant_lease(name.clone(), resource.clone(), devices);
        let granted = in_time(Instant::now() + GRANT_TIME, granting).await;
        if let Err(error) = granted {
            // The kubelet must not fail the pod. It records the lease, and devlet finds it there.
            tracing::warn!(%resource, %error, "lease not recorded; the kubelet's checkpoint has it");
        }
        lease::qualified(&name)
    }

    /// Returns the devices that the kubelet should choose: as the plugin prefers, if it says so in time.
    pub async fn prefer(
        &self,
        resource: &ResourceName,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Vec<DeviceId> {
        let plugin = self.store.read(|node| serving(node, resource));
        let client = plugin
            .filter(|plugin| plugin.options.preferred_allocation)
            .and_then(|plugin| Some((plugin.connection, self.plugins.client(plugin.connection)?)));
        let mut preferences = Vec::new();
        if let Some((connection, client)) = client {
            let query = PreferenceQuery {
                container: 0,
                connection,
                resource: resource.clone(),
                available: available.iter().cloned().collect(),
                must_include: must_include.iter().cloned().collect(),
                size,
            };
            let deadline = CallDeadline {
                own: PREFERENCE_TIME.min(self.config.deadlines.preferred),
                caller: None,
            };
            match client.preferred(&query, deadline).await {
                Ok(preferred) => preferences = preferred,
                Err(error) => tracing::warn!(%resource, %error, "GetPreferredAllocation failed"),
            }
        }
        self.store
            .read(|node| node.lease_choice(resource, available, must_include, size, &preferences))
    }

    /// Records the end of containers with one of these devices whose process is gone. Returns `true` if there was one.
    async fn bury(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> bool {
        let dead = self.store.read(|node| {
            let leases = node.leases().iter().map(|view| view.lease);
            let leases =
                leases.filter(|lease| lease.resource == *resource && !lease.devices.is_disjoint(devices));
            dead_containers(leases)
        });
        let mut is_news = false;
        for (name, container) in dead {
            is_news |= self.store.stop_leased(name.as_str(), &container).await.is_ok();
        }
        is_news
    }

    /// Removes specs whose leases have ended: a crash or an error may have left them.
    pub(crate) async fn sweep_specs(&self) {
        for directory in [self.shield.cdi.clone(), self.shield.permanent_cdi.clone()] {
            let store = self.store.clone();
            let swept = tokio::task::spawn_blocking(move || {
                // A lease is known before its spec is written.
                let names = spec::names(&directory);
                let has_ended =
                    |name: &&LeaseName| store.read(|node| node.leases().get(name.as_str()).is_none());
                for name in names.iter().filter(has_ended) {
                    spec::remove(&directory, name);
                }
            });
            let _ = swept.await;
        }
    }

    /// Ends a lease that the kubelet does not know any more, unless a container of it may run.
    pub async fn end(&self, name: &LeaseName) -> bool {
        match self.store.end_lease(name.as_str()).await {
            Ok(()) => {
                let directories = [self.shield.cdi.clone(), self.shield.permanent_cdi.clone()];
                let ended = name.clone();
                let removed = tokio::task::spawn_blocking(move || {
                    directories
                        .iter()
                        .for_each(|directory| spec::remove(directory, &ended));
                });
                let _ = removed.await;
                tracing::info!(lease = %short(name), "lease ended");
                true
            }
            Err(LeaseError::Refused(_)) => false,
            Err(LeaseError::Write(error)) => {
                tracing::warn!(lease = %short(name), %error, "end of a lease not recorded, trying again");
                false
            }
        }
    }
}

/// Returns the containers whose processes are gone, each with its lease.
pub(crate) fn dead_containers<'a>(leases: impl Iterator<Item = &'a Lease>) -> Vec<(LeaseName, String)> {
    let containers = leases.flat_map(|lease| lease.containers.iter().map(move |each| (lease, each)));
    let dead = containers.filter(|(_, (_, process))| process::has_ended(process));
    dead.map(|(lease, (id, _))| (lease.name.clone(), id.clone()))
        .collect()
}

/// Returns the beginning of a lease's name, for logs: the whole name would allow others to use it.
pub(crate) fn short(name: &LeaseName) -> &str {
    name.as_str().get(..8).unwrap_or_default()
}

fn serving(node: &Node, resource: &ResourceName) -> Option<PluginView> {
    match node.availability(resource) {
        Availability::Serving => node.plugin(node.serving(resource)?),
        Availability::NotListed | Availability::Gone(_) => None,
    }
}
