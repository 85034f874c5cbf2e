//! The kubelet's calls about a lease: `Allocate` grants it, `PreStartContainer` prepares it.
//!
//! 1. `Allocate` does not call the plugin. A kubelet fails a pod for good if `Allocate` fails, and stops everything else
//!    while it waits.
//! 2. `PreStartContainer` calls the plugin, keeps its answer, and writes the CDI spec: see [`prepare`].
//!
//! A lease that devlet does not know is found in the kubelet's checkpoint.

pub mod prepare;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::shield::Lease;
use devlet_core::{Availability, DeviceId, LeaseName, Node, PluginView, PreferenceQuery, ResourceName};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::{Config, Shield};
use crate::device_plugin::clients::PluginClients;
use crate::grpc::call::CallDeadline;
use crate::lease::checkpoint::{self, UnusableCheckpoint};
use crate::lease::containers;
use crate::lease::spec::{self, RuntimeCdi, SpecError};
use crate::lease::{self, process};
use crate::metrics::Metrics;
use crate::store::{LeaseError, Store, WriteError, in_time};

/// Time for the write of a new lease. The kubelet waits for it, and serves no other pod meanwhile.
const GRANT_TIME: Duration = Duration::from_millis(500);

/// Time for a plugin to say which devices it prefers. The kubelet waits for it, too.
const PREFERENCE_TIME: Duration = Duration::from_millis(200);

/// Why the devices of the kubelet's checkpoint are not taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] UnusableCheckpoint),
    /// The leases cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the devices are not handed back to the kubelet.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// A container waits for its plugin.
    #[error(
        "a container waits for devices {devices} of {resource}, and only devlet can prepare them; wait until its plugin \
         is back, or delete its pod"
    )]
    Waiting { resource: ResourceName, devices: String },
    /// A spec cannot be written.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

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

    /// Takes over the devices of the kubelet's checkpoint. Returns the number of containers, and of those among them that
    /// got their devices before devlet stood between.
    pub async fn adopt(&self) -> Result<(usize, usize), AdoptError> {
        let path = self.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        let held = read.unwrap_or_else(|_| Ok(Vec::new()))?;
        let containers = containers::list(&self.shield).await.ok();
        let held = self.current(&held, containers.as_ref());
        let now = self.store.now();
        let leases: Vec<Lease> = held.iter().map(|held| held.to_lease(now)).collect();
        let direct = leases.iter().filter(|lease| lease.is_direct).count();
        let all = leases.len();
        self.store.adopt_leases(leases).await?;
        self.store.update(|node| {
            for held in &held {
                node.leases_mut().identify(&held.name(), &held.holder);
            }
        });
        Ok((all, direct))
    }

    /// Returns all leases that devlet serves, if the plugin has answered for each.
    pub fn answered_leases(&self) -> Result<Vec<Lease>, LeaveError> {
        let leases: Vec<Lease> = self.store.read(|node| {
            let leases = node.leases().iter().map(|view| view.lease.clone());
            leases.filter(|lease| !lease.is_direct).collect()
        });
        match leases.iter().find(|lease| lease.answer.is_none()) {
            None => Ok(leases),
            Some(lease) => Err(LeaveError::Waiting {
                resource: lease.resource.clone(),
                devices: lease
                    .devices
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    /// Writes the specs of all leases so that containers start without devlet, also after a reboot. Returns the number of
    /// leases and the directory.
    pub async fn write_permanent_specs(&self) -> Result<(usize, PathBuf), LeaveError> {
        let leases = self.answered_leases()?;
        let count = leases.len();
        let (temporary, permanent) = (self.shield.cdi.clone(), self.shield.permanent_cdi.clone());
        let directory = permanent.clone();
        let runtime = self.runtime.borrow().clone();
        let written = tokio::task::spawn_blocking(move || {
            for lease in leases {
                let Some(answer) = &lease.answer else { continue };
                spec::write(&permanent, &runtime, &lease.name, &answer.options(), None)?;
                if permanent != temporary {
                    // Specs in the temporary directory take precedence.
                    spec::remove(&temporary, &lease.name);
                }
            }
            Ok(())
        });
        written.await.unwrap_or(Err(SpecError::Internal))?;
        Ok((count, directory))
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
                let (directory, ended) = (self.shield.cdi.clone(), name.clone());
                let removed = tokio::task::spawn_blocking(move || spec::remove(&directory, &ended));
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
    let dead = containers.filter(|(_, (_, process))| !process::is_alive(process));
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
