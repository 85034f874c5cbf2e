//! The pods of a kubelet beside devlet: those with leases.

use std::collections::{BTreeMap, BTreeSet};

use devlet_client::v1;
use devlet_core::device_plugin::run_options;
use devlet_core::shield::{Lease, LeaseView};
use devlet_core::{Allocation, ContainerName, Moment, Node, PodUid};

use super::convert;
use crate::display::pod_label;
use crate::shield::pods::KubeletContainer;
use crate::shield::report::ShieldState;

/// Returns the pods of the kubelet that have leases.
pub(super) fn pods(node: &Node, state: &ShieldState, now: Moment) -> Vec<v1::Pod> {
    let mut by_pod: BTreeMap<&PodUid, Vec<&Lease>> = BTreeMap::new();
    for LeaseView { lease, .. } in node.leases().iter() {
        if let Some(pod) = lease.pod() {
            by_pod.entry(pod).or_default().push(lease);
        }
    }
    let pods = by_pod.into_iter();
    pods.map(|(uid, leases)| pod(uid, &leases, state, now)).collect()
}

/// Returns the number of pods that have leases.
pub(super) fn count(node: &Node) -> usize {
    let pods: BTreeSet<&PodUid> = node.leases().iter().filter_map(|view| view.lease.pod()).collect();
    pods.len()
}

/// Returns `true` if a pod has this UID, `uid:` and UID, `namespace/name`, or name.
pub(super) fn is_called(pod: &v1::Pod, name: &str) -> bool {
    let Some(id) = &pod.id else { return false };
    match (name.strip_prefix("uid:"), name.split_once('/')) {
        (Some(uid), _) => id.uid == uid,
        (None, Some((namespace, name))) => id.namespace == namespace && id.name == name,
        (None, None) => id.name == name || id.uid == name,
    }
}

/// Adds the names of the kubelet's pods to the holders of devices.
pub(super) fn name_holders(devices: &mut [v1::Device], state: &ShieldState) {
    let holders = devices.iter_mut().flat_map(|device| &mut device.holders);
    for holder in holders.filter(|holder| holder.name.is_empty()) {
        if let Some(name) = state.pod_name(&PodUid::from(holder.uid.as_str())) {
            holder.namespace.clone_from(&name.namespace);
            holder.name.clone_from(&name.name);
        }
    }
}

/// Returns `namespace/name` of a pod, or its UID.
pub(super) fn label(state: &ShieldState, uid: &PodUid) -> String {
    state.pod_name(uid).map_or_else(|| uid.to_string(), pod_label)
}

fn pod(uid: &PodUid, leases: &[&Lease], state: &ShieldState, now: Moment) -> v1::Pod {
    let name = state.pod_name(uid).cloned().unwrap_or_default();
    let reported = state.pods.as_ref().and_then(|pods| pods.get(uid));
    let sandbox = state.sandboxes.get(uid);
    let labels = reported
        .map(|pod| &pod.labels)
        .or(sandbox.map(|sandbox| &sandbox.labels));
    // The time of the admission of a pod from before devlet is not known.
    let granted = leases
        .iter()
        .filter(|lease| !lease.is_direct)
        .map(|lease| lease.granted_at);
    let admitted_at = granted.min();
    let containers: BTreeSet<&ContainerName> = leases
        .iter()
        .filter_map(|lease| Some(&lease.holder.as_ref()?.container))
        .collect();
    v1::Pod {
        id: Some(v1::PodId {
            uid: uid.to_string(),
            namespace: name.namespace,
            name: name.name,
        }),
        source: v1::PodSource::Kubelet.into(),
        containers: containers
            .into_iter()
            .map(|name| container(name, leases, reported.and_then(|pod| pod.containers.get(name))))
            .collect(),
        container_names: reported
            .into_iter()
            .flat_map(|pod| pod.containers.keys().map(ToString::to_string))
            .collect(),
        labels: labels.cloned().unwrap_or_default(),
        admitted_at_ms: admitted_at.map_or(0, |moment| moment.0),
        age_ms: admitted_at.map_or(0, |moment| convert::age(moment, now)),
        ..v1::Pod::default()
    }
}

fn container(name: &ContainerName, leases: &[&Lease], reported: Option<&KubeletContainer>) -> v1::Container {
    let of_container = leases.iter().filter(|lease| {
        let holder = lease.holder.as_ref();
        holder.is_some_and(|holder| holder.container == *name)
    });
    let allocation = |lease: &&Lease| Allocation {
        container: name.clone(),
        kind: reported.map(|container| container.kind),
        resource: lease.resource.clone(),
        devices: lease.devices.iter().cloned().collect(),
        nodes: Vec::new(),
        answer: lease.answer.clone().unwrap_or_default(),
        pre_start_required: lease.pre_start_required,
    };
    let allocations: Vec<Allocation> = of_container.map(allocation).collect();
    let (options, conflicts) = run_options::merge(&allocations);
    convert::container_with(name.as_str(), allocations.iter().collect(), options, conflicts)
}
