//! Containers for which the kubelet has no devices, although they must have some: its checkpoint was lost, so that it
//! started them without devices, or does not start them again.
//!
//! A kubelet that reports its pods tells what their containers request. With another one, only containers are found that
//! had a lease.
//!
//! A container whose lease is prepared, and whose hook was not called, has no devices either: its runtime ignores CDI.

use std::collections::BTreeSet;

use devlet_core::shield::{LeaseHolder, Leases};
use devlet_core::{Node, PodName, ResourceName};

use super::pod_resources::Listed;
use super::report::{MissingDevices, MissingState, ShieldState};
use crate::lease::checkpoint::Held;
use crate::lease::containers::Containers;

/// A container, and a resource that it requests.
type Request = (LeaseHolder, ResourceName);

/// Returns the containers without devices.
pub(super) fn find(
    node: &Node,
    state: &ShieldState,
    held: &[Held],
    listed: &Listed,
    containers: Option<&Containers>,
) -> BTreeSet<MissingDevices> {
    let named: BTreeSet<(&LeaseHolder, &ResourceName)> =
        held.iter().map(|held| (&held.holder, &held.resource)).collect();
    let found = requests(node, state, containers)
        .into_iter()
        .filter_map(|request| {
            let pod = state.pod_name(&request.0.pod)?;
            lacks(listed, pod, &request, &named, containers).then(|| MissingDevices {
                pod: pod.clone(),
                container: request.0.container.clone(),
                state: state_of(node.leases(), &request, containers),
                resource: request.1,
            })
        });
    found.chain(unhooked(node, state, containers)).collect()
}

/// Returns the containers that run although the hook of their lease was not called.
fn unhooked(node: &Node, state: &ShieldState, containers: Option<&Containers>) -> Vec<MissingDevices> {
    let Some(containers) = containers.filter(|_| state.left.is_none()) else {
        return Vec::new();
    };
    let leases = node.leases().iter().map(|view| view.lease);
    let unhooked = leases.filter_map(|lease| {
        let holder = lease.holder.as_ref()?;
        let has_hook = lease.is_witnessed && lease.containers.is_empty();
        (has_hook && containers.runs(holder)).then(|| MissingDevices {
            pod: state.pod_name(&holder.pod).cloned().unwrap_or_default(),
            container: holder.container.clone(),
            resource: lease.resource.clone(),
            state: MissingState::Unhooked,
        })
    });
    unhooked.collect()
}

/// Returns what containers must have, of the resources that devlet advertises.
fn requests(node: &Node, state: &ShieldState, containers: Option<&Containers>) -> BTreeSet<Request> {
    let served = node.advertised_resources();
    let reported = state.pods.iter().flat_map(|pods| pods.iter());
    let reported = reported.flat_map(|(uid, pod)| {
        pod.containers.iter().flat_map(move |(name, container)| {
            let holder = LeaseHolder {
                pod: uid.clone(),
                container: name.clone(),
            };
            let requests = container.requests.iter();
            requests.map(move |resource| (holder.clone(), resource.clone()))
        })
    });
    let mut all: BTreeSet<Request> = reported
        .filter(|(_, resource)| served.contains(resource))
        .collect();
    if state.pods.is_none() {
        // A pod that ends is not listed any more, or has no container that runs.
        let leased = node.leases().iter().filter_map(|view| {
            let holder = view.lease.holder.clone()?;
            let runs = containers.is_some_and(|containers| containers.may_run(&holder));
            runs.then(|| (holder, view.lease.resource.clone()))
        });
        all.extend(leased);
    }
    all
}

/// Returns `true` if the kubelet has no device for a request. Only its checkpoint has the devices of init containers.
fn lacks(
    listed: &Listed,
    pod: &PodName,
    (holder, resource): &Request,
    named: &BTreeSet<(&LeaseHolder, &ResourceName)>,
    containers: Option<&Containers>,
) -> bool {
    match listed.devices(pod, &holder.container) {
        Some(devices) => devices.get(resource).is_none_or(BTreeSet::is_empty),
        None => {
            let runs = containers.is_some_and(|containers| containers.may_run(holder));
            listed.has_pod(pod) && runs && !named.contains(&(holder, resource))
        }
    }
}

fn state_of(leases: &Leases, (holder, resource): &Request, containers: Option<&Containers>) -> MissingState {
    let has_it = leases.iter().any(|view| {
        let lease = view.lease;
        lease.resource == *resource && lease.holder.as_ref() == Some(holder) && !lease.containers.is_empty()
    });
    match containers {
        _ if has_it => MissingState::Forgotten,
        Some(containers) if !containers.may_run(holder) => MissingState::Stopped,
        _ => MissingState::Running,
    }
}
