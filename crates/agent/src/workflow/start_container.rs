//! Before each start of a container: tell the plugins that want to know, and say what the runtime must add.

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
    /// The pod holds nothing.
    #[error("no such pod: admit it first")]
    UnknownPod,
    /// Whether the pod holds its devices is for an operator to decide.
    #[error(transparent)]
    Contested(Blocked),
    /// The pod has no such container.
    #[error("the pod does not have a container {container:?}; it has {}", .containers.join(", "))]
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
    /// After a reboot: drivers have not prepared the pod's claims again.
    #[error("gave up after {}: {}", seconds(*.waited), display::waits(.waits))]
    Unprepared {
        /// How long it waited.
        waited: Duration,
        /// For what.
        waits: Vec<Wait>,
    },
    /// The plugin that wants to be told is not there.
    #[error("gave up after {}: the device plugin of {resource} wants, or may want, to be told before the start, and is not there", seconds(*.waited))]
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
    plugins: &PluginClients,
    deadlines: &Deadlines,
    pod: &PodUid,
    container: &str,
    deadline: Instant,
) -> Result<(RunOptions, Vec<Conflict>), StartContainerError> {
    let to_tell: BTreeMap<ResourceName, Vec<DeviceId>> = store.read(|node| {
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
        let to_tell = pod
            .allocations_of(container)
            .filter(|each| serving(node, &each.resource).is_some() || may_want_to_know(each));
        Ok(to_tell
            .map(|each| (each.resource.clone(), each.devices.clone()))
            .collect())
    })?;
    claims_are_prepared(store, pod, deadline).await?;
    for (resource, devices) in to_tell {
        tell(store, plugins, deadlines.pre_start, &resource, &devices, deadline).await?;
    }
    Ok(store.read(|node| run_options::of_container(node, pod, container)))
}

/// Waits until the pod's claims are prepared: nothing to wait for, unless the machine was booted.
async fn claims_are_prepared(
    store: &Store,
    pod: &PodUid,
    deadline: Instant,
) -> Result<(), StartContainerError> {
    let started = Instant::now();
    let mut changes = store.subscribe();
    loop {
        changes.borrow_and_update();
        let waits = store.read(|node| node.unprepared_claims(pod));
        if waits.is_empty() {
            return Ok(());
        }
        if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
            let waited = started.elapsed();
            return Err(StartContainerError::Unprepared { waited, waits });
        }
    }
}

/// Whether a plugin that is not there wants to be told, as far as anybody knows. A kubelet's file does not say.
fn may_want_to_know(allocation: &Allocation) -> bool {
    allocation.pre_start_required || allocation.kind.is_none()
}

fn serving(node: &Node, resource: &ResourceName) -> Option<PluginView> {
    match node.availability(resource) {
        Availability::Serving => node.plugin(node.serving(resource)?),
        Availability::NotListed | Availability::Gone(_) => None,
    }
}

/// Tells a plugin, once it is there, if it wants to know. The one that serves now says whether it does; it may be another
/// one than the one that allocated.
async fn tell(
    store: &Store,
    plugins: &PluginClients,
    patience: Duration,
    resource: &ResourceName,
    devices: &[DeviceId],
    deadline: Instant,
) -> Result<(), StartContainerError> {
    let started = Instant::now();
    let mut changes = store.subscribe();
    loop {
        changes.borrow_and_update();
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
            let patience = CallDeadline {
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
