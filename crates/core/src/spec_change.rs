//! Differences between a request and the recorded pod of the same UID.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::fmt;

use crate::id::{ContainerName, PodUid, ResourceName};
use crate::pod::{Pod, PodName, PodRequest};

/// A pod that was admitted with another spec, or under another name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecChange {
    /// The UID of the pod.
    pub uid: PodUid,
    /// The recorded name.
    pub name: PodName,
    /// The devices and claims that it holds, as text.
    pub held: Vec<String>,
    /// The differences as text; empty if only the hash of the spec shows the change.
    pub differences: Vec<String>,
}

impl SpecChange {
    pub(crate) fn new(pod: &Pod, request: &PodRequest) -> Self {
        Self {
            uid: pod.uid.clone(),
            name: pod.name.clone(),
            held: held(pod),
            differences: differences(pod, request),
        }
    }
}

impl fmt::Display for SpecChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uid, name, .. } = self;
        write!(
            f,
            "pod {}/{} ({uid}) was admitted with another spec; it holds ",
            name.namespace, name.name
        )?;
        list(f, &self.held, "nothing")?;
        f.write_str("; what differs: ")?;
        list(f, &self.differences, "something that is not on record")?;
        f.write_str("; remove it first")
    }
}

fn list(f: &mut fmt::Formatter<'_>, texts: &[String], none: &str) -> fmt::Result {
    for (place, text) in texts.iter().enumerate() {
        f.write_str(if place == 0 { "" } else { ", " })?;
        f.write_str(text)?;
    }
    f.write_str(if texts.is_empty() { none } else { "" })
}

type Counts<'a> = BTreeMap<(&'a ContainerName, &'a ResourceName), usize>;

fn counts(pod: &Pod) -> Counts<'_> {
    let allocations = pod.allocations.iter();
    allocations
        .map(|each| ((&each.container, &each.resource), each.devices.len()))
        .collect()
}

fn held(pod: &Pod) -> Vec<String> {
    let devices = counts(pod).into_iter();
    let devices =
        devices.map(|((container, resource), count)| format!("{count} {resource} in container {container}"));
    let claims: BTreeSet<String> = pod.claims.iter().map(|claim| claim.key.to_string()).collect();
    let claims = claims.into_iter().map(|claim| format!("ResourceClaim {claim}"));
    devices.chain(claims).collect()
}

fn differences(pod: &Pod, request: &PodRequest) -> Vec<String> {
    let mut texts = Vec::new();
    if pod.name != request.name {
        let PodName { namespace, name } = &request.name;
        texts.push(format!("the name is {namespace}/{name} now"));
    }
    let before: BTreeSet<&ContainerName> = pod.containers.iter().collect();
    let now: BTreeSet<&ContainerName> = request.containers.iter().map(|each| &each.name).collect();
    let new = now.difference(&before);
    texts.extend(new.map(|name| format!("container {name} is new")));
    let gone = before.difference(&now);
    texts.extend(gone.map(|name| format!("container {name} is gone")));
    let held = counts(pod);
    let wanted: Counts<'_> = request
        .containers
        .iter()
        .flat_map(|each| {
            let wants = each.wants.iter();
            wants.map(move |(resource, count)| ((&each.name, resource), *count))
        })
        .collect();
    let keys: BTreeSet<_> = held.keys().chain(wanted.keys()).collect();
    for key in keys {
        let (container, resource) = key;
        let count = |counts: &Counts<'_>| counts.get(key).copied().unwrap_or_default();
        let (has, wants) = (count(&held), count(&wanted));
        if has != wants {
            texts.push(format!(
                "container {container} asks for {wants} {resource} and holds {has}"
            ));
        }
    }
    for container in &request.containers {
        let mut kinds = pod
            .allocations_of(container.name.as_str())
            .filter_map(|each| each.kind);
        if kinds.any(|kind| kind != container.kind) {
            texts.push(format!("container {} runs at another time", container.name));
        }
    }
    let before: BTreeSet<String> = pod.claims.iter().map(|claim| claim.key.to_string()).collect();
    let now = request.claims.iter().map(|claim| claim.claim.key.to_string());
    let now: BTreeSet<String> = now.collect();
    let new = now.difference(&before);
    texts.extend(new.map(|claim| format!("ResourceClaim {claim} is new")));
    let gone = before.difference(&now);
    texts.extend(gone.map(|claim| format!("ResourceClaim {claim} is gone")));
    texts
}
