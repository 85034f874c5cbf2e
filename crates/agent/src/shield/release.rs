//! Ends leases that the kubelet does not know any more: there is no call for that.
//!
//! A lease is known while the kubelet's checkpoint names it and, if the kubelet lists pod resources, a container has its
//! devices. A lease that is not known twice in a row ends, unless a container of it may run. A lease that ended too early does no
//! harm: it is found in the checkpoint again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use devlet_core::device_plugin::run_options::Conflict;
use devlet_core::shield::{LeaseHolder, LeaseView};
use devlet_core::{DeviceId, LeaseName, Moment, ResourceName};
use devlet_kubelet_api::pod_resources::v1 as pod_resources;
use devlet_uds::ReadLimits;
use pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::report::ShieldReport;
use crate::lease::checkpoint::{self, Held};
use crate::lease::conflicts;
use crate::workflow::lease::{LeaseWorkflow, dead_containers};

/// Pause between two comparisons.
const PAUSE: Duration = Duration::from_secs(5);

/// Age from which a lease is compared: the kubelet writes its checkpoint after the call.
const MIN_AGE_MS: u64 = 30_000;

/// Time for the kubelet to list pod resources.
const LIST_TIME: Duration = Duration::from_secs(2);

/// The most containers beside devlet that are shown.
const MAX_BYPASSED: usize = 20;

/// The longest list of pod resources.
const MAX_LIST: usize = 64 << 20;

/// The devices that containers have, by resource.
type Listed = BTreeMap<ResourceName, BTreeSet<DeviceId>>;

/// Compares until devlet stops.
pub(super) async fn run(workflow: LeaseWorkflow, report: ShieldReport, stop: CancellationToken) {
    let mut suspects = BTreeSet::new();
    let mut conflicts = Vec::new();
    loop {
        suspects = compare(&workflow, &report, suspects).await;
        conflicts = log_conflicts(&workflow, &conflicts);
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Ends the leases that are unknown now and were `suspects` before. Returns those that are unknown for the first time.
async fn compare(
    workflow: &LeaseWorkflow,
    report: &ShieldReport,
    suspects: BTreeSet<LeaseName>,
) -> BTreeSet<LeaseName> {
    let store = &workflow.store;
    let dead = store.read(|node| dead_containers(node.leases().iter().map(|view| view.lease)));
    for (lease, container) in dead {
        if let Err(error) = store.stop_leased(lease.as_str(), &container).await {
            tracing::warn!(%error, "end of a container not recorded, trying again");
        }
    }
    let path = workflow.shield.checkpoint();
    let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
    let Ok(read) = read else { return suspects };
    report.update(|state| state.checkpoint = read.as_ref().err().map(ToString::to_string));
    let Ok(held) = read else { return suspects };
    adopt(workflow, report, &held).await;
    workflow.sweep_specs().await;
    let holders: BTreeMap<LeaseName, LeaseHolder> = held
        .iter()
        .map(|held| (held.name(), held.holder.clone()))
        .collect();
    store.update(|node| {
        for (name, holder) in &holders {
            if node
                .leases()
                .get(name.as_str())
                .is_some_and(|view| view.holder != Some(holder))
            {
                node.leases_mut().identify(name, holder);
            }
        }
    });
    let listed = list(&workflow.shield.kubelet).await;
    let now = store.now();
    let unknown: BTreeSet<LeaseName> = store.read(|node| {
        let views = node.leases().iter();
        let unknown = views.filter(|view| is_unknown(view, &holders, listed.as_ref(), now));
        unknown.map(|view| view.lease.name.clone()).collect()
    });
    for name in unknown.intersection(&suspects) {
        workflow.end(name).await;
    }
    unknown
}

/// Adds the leases of the checkpoint that devlet does not know. A container that got its devices from a plugin itself,
/// although devlet serves the resource, is reported.
async fn adopt(workflow: &LeaseWorkflow, report: &ShieldReport, held: &[Held]) {
    let store = &workflow.store;
    let now = store.now();
    let is_unknown = |held: &&Held| store.read(|node| node.leases().get(held.name().as_str()).is_none());
    let unknown: Vec<&Held> = held.iter().filter(is_unknown).collect();
    if unknown.is_empty() {
        return;
    }
    let leases = unknown.iter().map(|held| held.to_lease(now)).collect();
    if let Err(error) = store.adopt_leases(leases).await {
        tracing::warn!(%error, "leases of the kubelet's checkpoint not recorded, trying again");
        return;
    }
    let registered = report.get().registrations;
    let bypasses = |held: &&&Held| held.lease.is_none() && registered.get(&held.resource) == Some(&None);
    for held in unknown.iter().filter(bypasses) {
        let LeaseHolder { pod, container } = &held.holder;
        let resource = &held.resource;
        tracing::warn!(%pod, %container, %resource, "container got devices from a plugin beside devlet");
        let text = format!("container {container} of pod {pod} got {resource} from a plugin beside devlet");
        report.update(|state| {
            if !state.bypassed.contains(&text) && state.bypassed.len() < MAX_BYPASSED {
                state.bypassed.push(text);
            }
        });
    }
}

/// Logs disagreements between answers for one container that are not among `known`. Returns all.
fn log_conflicts(
    workflow: &LeaseWorkflow,
    known: &[(LeaseHolder, Conflict)],
) -> Vec<(LeaseHolder, Conflict)> {
    let found = workflow.store.read(|node| {
        let views = node.leases().iter();
        conflicts::find(views.filter_map(|view| Some((view.holder?, view.lease))))
    });
    for (LeaseHolder { pod, container }, conflict) in found.iter().filter(|each| !known.contains(each)) {
        tracing::warn!(%pod, %container, ?conflict, "answers of two plugins disagree, and any of them may win");
    }
    found
}

fn is_unknown(
    view: &LeaseView<'_>,
    holders: &BTreeMap<LeaseName, LeaseHolder>,
    listed: Option<&Listed>,
    now: Moment,
) -> bool {
    let lease = view.lease;
    if now.since(lease.granted_at) < MIN_AGE_MS {
        return false;
    }
    let is_listed = listed.is_none_or(|listed| {
        let devices = listed.get(&lease.resource);
        devices.is_some_and(|devices| lease.devices.is_subset(devices))
    });
    !(holders.contains_key(&lease.name) && is_listed)
}

/// Returns the devices of all containers; `None` if the kubelet does not say.
async fn list(kubelet: &Path) -> Option<Listed> {
    let socket = kubelet.join("pod-resources/kubelet.sock");
    let deadline = Instant::now() + LIST_TIME;
    let listing = async {
        let dialed = devlet_uds::connect_once_limited(&socket, deadline, &ReadLimits::default())
            .await
            .ok()?;
        let client = PodResourcesListerClient::new(dialed.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_LIST);
        let answer = client
            .list(pod_resources::ListPodResourcesRequest {})
            .await
            .ok()?;
        Some(answer.into_inner())
    };
    let answer = tokio::time::timeout_at(deadline, listing).await.ok()??;
    let mut listed = Listed::new();
    let containers = answer.pod_resources.into_iter().flat_map(|pod| pod.containers);
    for devices in containers.flat_map(|container| container.devices) {
        let of_resource = listed.entry(devices.resource_name.into()).or_default();
        of_resource.extend(devices.device_ids.into_iter().map(DeviceId::from));
    }
    Some(listed)
}

#[cfg(test)]
mod tests;
