//! Before each start of a container: tell the plugins that want to know, and say what the runtime must add.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::{Availability, DeviceId, PodUid, ResourceName};
use tokio::time::{Instant, timeout_at};

use crate::config::Deadlines;
use crate::device_plugin::client::{CallError, Patience};
use crate::device_plugin::plugins::Plugins;
use crate::store::Store;

/// Why a container cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartContainerError {
    /// The pod holds nothing.
    #[error("no such pod: admit it first")]
    UnknownPod,
    /// The pod has no such container.
    #[error("the pod has no container {container:?}; it has {}", .containers.join(", "))]
    UnknownContainer {
        /// What was asked for.
        container: String,
        /// All that it has.
        containers: Vec<String>,
    },
    /// A plugin said no, or nothing.
    #[error("device plugin of {resource} at {endpoint}: {problem}")]
    Plugin {
        /// The resource.
        resource: ResourceName,
        /// Where the plugin answers.
        endpoint: String,
        /// What happened.
        problem: CallError,
    },
    /// The plugin that wants to be told is not there.
    #[error("gave up after {} s: the device plugin of {resource} wants to be told before the start, and is not there", .waited.as_secs())]
    TimedOut {
        /// The resource.
        resource: ResourceName,
        /// How long it waited.
        waited: Duration,
    },
}

/// What the runtime must add to the container, after its plugins have been told that it starts, all by `deadline`.
pub async fn start_container(
    store: &Store,
    plugins: &Plugins,
    deadlines: &Deadlines,
    pod: &PodUid,
    container: &str,
    deadline: Instant,
) -> Result<(RunOptions, Vec<Conflict>), StartContainerError> {
    let to_tell: BTreeMap<ResourceName, Vec<DeviceId>> = store.read(|node| {
        let pod = node.pod(pod).ok_or(StartContainerError::UnknownPod)?;
        if !pod.may_have(container) {
            return Err(StartContainerError::UnknownContainer {
                container: container.to_owned(),
                containers: pod.containers.iter().map(ToString::to_string).collect(),
            });
        }
        let wants = pod
            .allocations_of(container)
            .filter(|allocation| allocation.pre_start_required);
        Ok(wants
            .map(|each| (each.resource.clone(), each.devices.clone()))
            .collect())
    })?;
    for (resource, devices) in to_tell {
        tell(store, plugins, deadlines.pre_start, &resource, &devices, deadline).await?;
    }
    Ok(store.read(|node| node.run_options(pod, container)))
}

/// Tells a plugin, once it is there.
async fn tell(
    store: &Store,
    plugins: &Plugins,
    patience: Duration,
    resource: &ResourceName,
    devices: &[DeviceId],
    deadline: Instant,
) -> Result<(), StartContainerError> {
    let started = Instant::now();
    let mut changes = store.changed();
    loop {
        changes.borrow_and_update();
        let plugin = store.read(|node| match node.availability(resource) {
            Availability::Serving => node.plugin(node.serving(resource)?),
            Availability::NotListed | Availability::Gone(_) => None,
        });
        if let Some(plugin) = plugin
            && let Some(client) = plugins.client(plugin.connection)
        {
            let patience = Patience {
                own: patience,
                caller: Some(deadline),
            };
            match client.pre_start(devices, patience).await {
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
