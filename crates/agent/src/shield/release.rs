//! Ends leases that the kubelet does not know any more: there is no call for that.
//!
//! A lease is known while the kubelet's checkpoint names it and, if the kubelet lists pod resources, a container has its
//! devices. A lease that is not known twice in a row ends, unless a container of it may run, or the runtime still has its
//! pod. A lease that ended too early does no harm: it is found in the checkpoint again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::run_options::Conflict;
use devlet_core::shield::{LeaseHolder, LeaseView};
use devlet_core::{LeaseName, Moment, Node, PodName};
use tokio_util::sync::CancellationToken;

use super::beside;
use super::missing;
use super::pod_resources::{self, Listed};
use super::report::{MissingDevices, ShieldReport};
use crate::lease::checkpoint::{self, Held};
use crate::lease::conflicts;
use crate::lease::containers::{self, Containers};
use crate::workflow::lease::{LeaseWorkflow, dead_containers};

/// Pause between two comparisons.
const PAUSE: Duration = Duration::from_secs(5);

/// Age from which a lease is compared: the kubelet writes its checkpoint after the call.
const MIN_AGE_MS: u64 = 30_000;

/// The most containers beside devlet that are shown.
const MAX_BYPASSED: usize = 20;

/// What one comparison has found, for the next one.
#[derive(Debug, Default)]
struct Suspects {
    /// Leases that the kubelet does not know.
    leases: BTreeSet<LeaseName>,
    /// Containers without devices.
    missing: BTreeSet<MissingDevices>,
}

/// Compares until devlet stops.
pub(super) async fn run(workflow: LeaseWorkflow, report: ShieldReport, stop: CancellationToken) {
    let mut suspects = Suspects::default();
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

/// Ends the leases that are unknown now and were suspects before, and reports containers without devices in the same
/// way. Returns the suspects of now.
async fn compare(workflow: &LeaseWorkflow, report: &ShieldReport, suspects: Suspects) -> Suspects {
    let store = &workflow.store;
    let dead = store.read(|node| dead_containers(node.leases().iter().map(|view| view.lease)));
    for (lease, container) in dead {
        if let Err(error) = store.stop_leased(lease.as_str(), &container).await {
            tracing::warn!(%error, "end of a container not recorded, trying again");
        }
    }
    let containers = ask_runtime(workflow, report).await;
    let beside = beside::list(&workflow.shield.device_plugins()).await;
    report.update(|state| state.beside = beside);
    let path = workflow.shield.checkpoint();
    let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
    let Ok(read) = read else { return suspects };
    report.update(|state| state.checkpoint = read.as_ref().err().map(ToString::to_string));
    let Ok(held) = read else { return suspects };
    adopt(workflow, report, &held, containers.as_ref()).await;
    if let Some(containers) = &containers {
        workflow.record_witnessed(containers).await;
    }
    workflow.sweep_specs().await;
    identify(workflow, &held);
    let listed = pod_resources::list(&workflow.shield.kubelet).await;
    let now = store.now();
    let named: BTreeSet<LeaseName> = held.iter().map(Held::name).collect();
    let state = report.get();
    let unknown: BTreeSet<LeaseName> = store.read(|node| {
        let views = node.leases().iter();
        let unknown = views.filter(|view| {
            let pod = view.lease.pod().and_then(|pod| state.pod_name(pod));
            is_unknown(view, &named, listed.as_ref(), pod, now)
        });
        unknown.map(|view| view.lease.name.clone()).collect()
    });
    for name in unknown.intersection(&suspects.leases) {
        workflow.end_if_stopped(name, containers.as_ref()).await;
    }
    forget_bypassed(workflow, report);
    let missing = match &listed {
        Some(listed) => {
            let find = |node: &Node| missing::find(node, &state, &held, listed, containers.as_ref());
            let missing = store.read(find);
            report_missing(report, missing.intersection(&suspects.missing));
            missing
        }
        None => suspects.missing,
    };
    Suspects {
        leases: unknown,
        missing,
    }
}

/// Asks the runtime for its pods and containers.
async fn ask_runtime(workflow: &LeaseWorkflow, report: &ShieldReport) -> Option<Containers> {
    let asked = containers::list(&workflow.shield).await;
    report.update(|state| {
        state.silent = asked.as_ref().err().map(ToString::to_string);
        if let Ok(containers) = &asked
            && *state.sandboxes != containers.pods
        {
            state.sandboxes = Arc::new(containers.pods.clone());
        }
    });
    asked.ok()
}

/// Notes which containers have leases.
fn identify(workflow: &LeaseWorkflow, held: &[Held]) {
    let store = &workflow.store;
    let holders: BTreeMap<LeaseName, &LeaseHolder> =
        held.iter().map(|held| (held.name(), &held.holder)).collect();
    let is_news = |view: &LeaseView<'_>| {
        let holder = holders.get(view.lease.name.as_str()).copied();
        holder.is_some() && view.lease.holder.as_ref() != holder
    };
    // A change wakes all receivers.
    if store.read(|node| node.leases().iter().any(|view| is_news(&view))) {
        store.update(|node| {
            for (name, holder) in &holders {
                node.leases_mut().identify(name, holder);
            }
        });
    }
}

/// Forgets containers beside devlet whose leases have ended.
fn forget_bypassed(workflow: &LeaseWorkflow, report: &ShieldReport) {
    let mut bypassed = report.get().bypassed;
    workflow.store.read(|node| {
        bypassed.retain(|name, _| node.leases().get(name.as_str()).is_some());
    });
    report.update(|state| state.bypassed = bypassed);
}

/// Reports containers without devices that were found twice.
fn report_missing<'a>(report: &ShieldReport, found: impl Iterator<Item = &'a MissingDevices>) {
    let missing: Vec<MissingDevices> = found.cloned().collect();
    let before = report.get().missing;
    for found in missing.iter().filter(|found| !before.contains(found)) {
        let MissingDevices {
            pod,
            container,
            resource,
            state,
        } = found;
        let (namespace, pod) = (&pod.namespace, &pod.name);
        tracing::error!(namespace, pod, %container, %resource, ?state, "container without its devices");
    }
    report.update(|state| state.missing = missing);
}

/// Adds the leases of the checkpoint that devlet does not know. A container that got its devices from a plugin itself,
/// although devlet serves the resource, is reported.
async fn adopt(
    workflow: &LeaseWorkflow,
    report: &ShieldReport,
    held: &[Held],
    containers: Option<&Containers>,
) {
    let store = &workflow.store;
    let now = store.now();
    let is_unknown = |held: &&Held| store.read(|node| node.leases().get(held.name().as_str()).is_none());
    let current = workflow.current(held, containers).into_iter();
    let unknown: Vec<&Held> = current.filter(is_unknown).collect();
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
        report.update(|state| {
            if state.bypassed.len() < MAX_BYPASSED {
                state.bypassed.insert(held.name(), held.holder.clone());
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
        conflicts::find(views.filter_map(|view| Some((view.lease.holder.as_ref()?, view.lease))))
    });
    for (LeaseHolder { pod, container }, conflict) in found.iter().filter(|each| !known.contains(each)) {
        tracing::warn!(%pod, %container, ?conflict, "answers of two plugins disagree, and any of them may win");
    }
    found
}

/// Returns `true` if the kubelet does not know a lease. `pod` is the name of its pod, if it is known.
fn is_unknown(
    view: &LeaseView<'_>,
    named: &BTreeSet<LeaseName>,
    listed: Option<&Listed>,
    pod: Option<&PodName>,
    now: Moment,
) -> bool {
    let lease = view.lease;
    if now.since(lease.granted_at) < MIN_AGE_MS {
        return false;
    }
    let is_listed = listed.is_none_or(|listed| listed.has(lease, pod));
    !(named.contains(&lease.name) && is_listed)
}

#[cfg(test)]
mod tests;
