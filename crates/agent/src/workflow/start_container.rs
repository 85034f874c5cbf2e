//! Before each start of a container: calls `PreStartContainer`, and returns the options that the runtime must add.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::dra::view::Wait;
use devlet_core::{Allocation, Availability, Blocked, DeviceId, Node, PluginView, PodUid, ResourceName};
use tokio::time::{Instant, timeout_at};

use crate::config::Deadlines;
use crate::device_plugin::clients::PluginClients;
use crate::display;
use crate::grpc::call::{CallDeadline, CallError, seconds};
use crate::run_options;
use crate::store::Store;

/// Why a container cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartContainerError {
    /// The pod is not on record.
    #[error("no such pod: admit it first")]
    UnknownPod,
    /// An operator must decide first whether the pod holds its devices.
    #[error(transparent)]
    Contested(Blocked),
    #[error("the pod does not have a container {container:?}; it has {}", .containers.join(", "))]
    UnknownContainer {
        /// The requested container.
        container: String,
        /// All containers of the pod.
        containers: Vec<String>,
    },
    /// A call to a plugin failed.
    #[error("device plugin of {resource} at {endpoint}: {problem}")]
    Plugin {
        resource: ResourceName,
        /// The socket of the plugin.
        endpoint: String,
        problem: CallError,
    },
    /// Drivers have not prepared the pod's claims again after a reboot.
    #[error("gave up after {}: {}", seconds(*.waited), display::waits(.waits))]
    Unprepared {
        waited: Duration,
        /// The claims that are not prepared.
        waits: Vec<Wait>,
    },
    /// The plugin that must be called is missing.
    #[error("gave up after {}: no device plugin serves {resource}, and it may require PreStartContainer", seconds(*.waited))]
    TimedOut {
        resource: ResourceName,
        waited: Duration,
    },
}

/// Calls `PreStartContainer` where plugins require it, up to `deadline`. Returns the options that the runtime must add.
pub async fn start_container(
    store: &Store,
    plugins: &PluginClients,
    deadlines: &Deadlines,
    pod: &PodUid,
    container: &str,
    deadline: Instant,
) -> Result<(RunOptions, Vec<Conflict>), StartContainerError> {
    let to_notify: BTreeMap<ResourceName, Vec<DeviceId>> = store.read(|node| {
        if let Some(contested) = node.contested_by(pod) {
            return Err(StartContainerError::Contested(contested.clone()));
        }
        let pod = node.pod(pod).ok_or(StartContainerError::UnknownPod)?;
        if !pod.may_have(container) {
            return Err(StartContainerError::UnknownContainer {
                container: container.to_owned(),
                containers: pod.containers.iter().map(ToString::to_string).collect(),
            });
        }
        let to_notify = pod
            .allocations_of(container)
            .filter(|each| serving(node, &each.resource).is_some() || may_require_pre_start(each));
        Ok(to_notify
            .map(|each| (each.resource.clone(), each.devices.clone()))
            .collect())
    })?;
    wait_for_claims(store, pod, deadline).await?;
    for (resource, devices) in to_notify {
        notify_pre_start(store, plugins, deadlines.pre_start, &resource, &devices, deadline).await?;
    }
    Ok(store.read(|node| run_options::of_container(node, pod, container)))
}

/// Waits until the pod's claims are prepared. After an admission they are, but not after a reboot.
async fn wait_for_claims(store: &Store, pod: &PodUid, deadline: Instant) -> Result<(), StartContainerError> {
    let started = Instant::now();
    let all_prepared = |node: &Node| match node.unprepared_claims(pod) {
        waits if waits.is_empty() => Ok(()),
        waits => Err(waits),
    };
    let prepared = store.wait_for(deadline, all_prepared).await;
    prepared.map_err(|waits| StartContainerError::Unprepared {
        waited: started.elapsed(),
        waits,
    })
}

/// Returns `true` if the plugin of an allocation required a call when it was last connected. For allocations from a
/// kubelet's file that is not known, and this returns `true`.
fn may_require_pre_start(allocation: &Allocation) -> bool {
    allocation.pre_start_required || allocation.kind.is_none()
}

fn serving(node: &Node, resource: &ResourceName) -> Option<PluginView> {
    match node.availability(resource) {
        Availability::Serving => node.plugin(node.serving(resource)?),
        Availability::NotListed | Availability::Gone(_) => None,
    }
}

/// Waits for the plugin of a resource, and calls `PreStartContainer` if its options require that. This may be another plugin
/// than the one that allocated.
async fn notify_pre_start(
    store: &Store,
    plugins: &PluginClients,
    timeout: Duration,
    resource: &ResourceName,
    devices: &[DeviceId],
    deadline: Instant,
) -> Result<(), StartContainerError> {
    let started = Instant::now();
    let mut changes = store.changes();
    loop {
        changes.mark_seen();
        let plugin = store.read(|node| serving(node, resource));
        if plugin
            .as_ref()
            .is_some_and(|plugin| !plugin.options.pre_start_required)
        {
            return Ok(());
        }
        if let Some(plugin) = plugin
            && let Some(client) = plugins.client(plugin.connection)
        {
            let call_deadline = CallDeadline {
                own: timeout,
                caller: Some(deadline),
            };
            match client.pre_start(devices, call_deadline).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_gone() => {}
                Err(problem) => {
                    return Err(StartContainerError::Plugin {
                        resource: resource.clone(),
                        endpoint: plugin.endpoint,
                        problem,
                    });
                }
            }
        }
        if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
            let (resource, waited) = (resource.clone(), started.elapsed());
            return Err(StartContainerError::TimedOut { resource, waited });
        }
    }
}
