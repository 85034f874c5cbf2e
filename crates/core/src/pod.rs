//! Pods: their requests and their allocations.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::device_plugin::run_options::Answer;
use crate::dra::claims::{AllocatedClaim, ClaimKey};
use crate::id::{ClaimUid, ContainerName, DeviceId, Moment, PodUid, ResourceName};

/// The authority on whether a pod exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// A client of the API: the pod exists until a client removes it.
    Api,
    /// A program that embeds the node: the pod exists while the program lists it.
    Embedder,
    /// A kubelet's file: the pod exists until a complete list of a source lacks it, or an operator removes it.
    Imported,
}

/// The namespace and name of a pod. Imported pods do not have a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PodName {
    /// Empty for an imported pod.
    pub namespace: String,
    /// Empty for an imported pod.
    pub name: String,
}

/// Metadata of a pod for display. No decision depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodMetadata {
    /// The labels of its manifest.
    pub labels: BTreeMap<String, String>,
    /// The time of the first admission; `None` if unknown.
    pub admitted_at: Option<Moment>,
}

/// The kind of a container, which determines the containers that may run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Ends before the next container starts, so later containers can reuse its devices.
    Init,
    /// A restartable init container: runs at the same time as all later containers.
    Sidecar,
    /// Runs at the same time as the other app containers and the sidecars.
    App,
}

/// The request of a whole pod, which is granted or refused as a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRequest {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: PodName,
    /// The source of the request.
    pub source: Source,
    /// A hash of its spec. A request with the UID of a recorded pod and another hash is refused.
    pub fingerprint: u64,
    /// Its labels, and the time of the request.
    pub metadata: PodMetadata,
    /// Init containers and sidecars in the order of the spec, then app containers.
    pub containers: Vec<ContainerRequest>,
    /// Its claims, in the order of the spec. Two of them may be the same claim.
    pub claims: Vec<ClaimRequest>,
}

/// A claim that a pod requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The name of the claim within the pod; empty for the claim of its extended resources.
    pub name: String,
    /// The claim.
    pub claim: AllocatedClaim,
}

/// The request of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// Its name.
    pub name: ContainerName,
    /// The kind of the container.
    pub kind: ContainerKind,
    /// The number of devices of each resource. 0 is the same as an absent entry.
    pub wants: BTreeMap<ResourceName, usize>,
    /// The claims of the pod that the container uses, in the order of the spec.
    pub claims: Vec<ClaimReference>,
}

/// A reference of a container to a claim of its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimReference {
    /// The name of the claim within the pod.
    pub claim: String,
    /// The request within the claim; `None` for the whole claim.
    pub request: Option<String>,
}

/// A pod that holds devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: PodName,
    /// The authority on whether it exists.
    pub source: Source,
    /// A hash of its spec; 0 if unknown.
    pub fingerprint: u64,
    /// Metadata for display.
    pub metadata: PodMetadata,
    /// `true` if it was admitted before the last boot of the machine.
    pub before_reboot: bool,
    /// All containers, including those without devices, in the order of the spec; empty if the spec is unknown.
    pub containers: Vec<ContainerName>,
    /// The allocations of its containers, in the order of the spec.
    pub allocations: Vec<Allocation>,
    /// The claims that it holds, in the order of the spec. Two of them may be the same claim.
    pub claims: Vec<PodClaim>,
    /// The claims that its containers use, in the order of the spec; empty for an imported pod.
    pub claim_uses: Vec<ClaimUse>,
}

/// A claim that a pod holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodClaim {
    /// The name of the claim within the pod; empty for the claim of its extended resources, and for an imported pod.
    pub name: String,
    /// The claim's name.
    pub key: ClaimKey,
    /// The claim's UID.
    pub uid: ClaimUid,
}

/// A claim that a container of a pod uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimUse {
    /// The container.
    pub container: ContainerName,
    /// The name of the claim within the pod.
    pub claim: String,
    /// The request within the claim; `None` for the whole claim.
    pub request: Option<String>,
}

/// The devices of one resource that one container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The container.
    pub container: ContainerName,
    /// The kind of the container; `None` for an imported pod, which does not have a spec on record.
    pub kind: Option<ContainerKind>,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// The devices by NUMA node at the time of the allocation, ascending, with -1 for devices without a node.
    pub nodes: Vec<(i64, Vec<DeviceId>)>,
    /// The answer of the plugin to `Allocate`.
    pub answer: Answer,
    /// `true` if the plugin requires `PreStartContainer` before each start of the container.
    pub pre_start_required: bool,
}

impl Pod {
    /// Returns `true` if the pod may have a container of this name. With an unknown spec, any name is possible.
    pub fn may_have(&self, container: &str) -> bool {
        let known = |name: &ContainerName| name.as_str() == container;
        self.containers.is_empty()
            || self.containers.iter().any(known)
            || self.allocations_of(container).next().is_some()
    }

    /// Returns the allocations of a container.
    pub fn allocations_of<'a>(&'a self, container: &'a str) -> impl Iterator<Item = &'a Allocation> {
        self.allocations
            .iter()
            .filter(move |allocation| allocation.container.as_str() == container)
    }

    pub(crate) fn allocation(
        &self,
        container: &ContainerName,
        resource: &ResourceName,
    ) -> Option<&Allocation> {
        self.allocations
            .iter()
            .find(|allocation| allocation.container == *container && allocation.resource == *resource)
    }

    /// Returns the UIDs of its claims, each once.
    pub fn claim_uids(&self) -> Vec<ClaimUid> {
        let uids: BTreeSet<&ClaimUid> = self.claims.iter().map(|claim| &claim.uid).collect();
        uids.into_iter().cloned().collect()
    }

    /// Returns the claims of the pod that a container uses.
    pub fn claim_uses_of<'a>(
        &'a self,
        container: &'a str,
    ) -> impl Iterator<Item = (&'a ClaimUse, &'a PodClaim)> {
        let uses = self
            .claim_uses
            .iter()
            .filter(move |each| each.container.as_str() == container);
        uses.filter_map(|each| {
            let claim = self.claims.iter().find(|claim| claim.name == each.claim)?;
            Some((each, claim))
        })
    }

    /// Returns the devices by resource. Each appears once, also if several containers use it one after the other.
    pub fn devices(&self) -> BTreeMap<&ResourceName, BTreeSet<&DeviceId>> {
        let mut devices: BTreeMap<&ResourceName, BTreeSet<&DeviceId>> = BTreeMap::new();
        for allocation in &self.allocations {
            devices
                .entry(&allocation.resource)
                .or_default()
                .extend(&allocation.devices);
        }
        devices
    }
}
