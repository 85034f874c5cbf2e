//! Pods: what they ask for, and what they hold.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::device_plugin::run_options::Answer;
use crate::dra::claims::{AllocatedClaim, ClaimKey};
use crate::id::{ClaimUid, ContainerName, DeviceId, Moment, PodUid, ResourceName};

/// Who says that a pod exists, and so who can say that it is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// Somebody who called our API: until they remove it.
    Api,
    /// A program that embeds the node: while its list has it.
    Embedder,
    /// A kubelet's file: until a synced source or an operator says otherwise.
    Imported,
}

/// What people call a pod. Imported pods have no name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PodName {
    /// Empty for an imported pod.
    pub namespace: String,
    /// Empty for an imported pod.
    pub name: String,
}

/// Facts about a pod for its users. No decision depends on them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodMetadata {
    /// The labels of its manifest.
    pub labels: BTreeMap<String, String>,
    /// When it was admitted first; `None` if that is not known.
    pub admitted_at: Option<Moment>,
}

/// When a container runs, as far as devices are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Ends before the next container starts, so it passes its devices on.
    Init,
    /// A restartable init container: runs beside all later ones.
    Sidecar,
    /// Runs beside the other app containers and the sidecars.
    App,
}

/// What a whole pod asks for: one decision for all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRequest {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: PodName,
    /// Who asks.
    pub source: Source,
    /// A hash of its spec: the same UID with another spec is another pod under a stolen name.
    pub fingerprint: u64,
    /// Its labels, and the time of the request.
    pub metadata: PodMetadata,
    /// Init containers and sidecars in the order of the spec, then app containers.
    pub containers: Vec<ContainerRequest>,
    /// Its claims, in the order of the spec. Two of them may be the same claim.
    pub claims: Vec<ClaimRequest>,
}

/// A claim that a pod brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// What the pod calls it; empty for the claim behind its extended resources.
    pub name: String,
    /// The claim.
    pub claim: AllocatedClaim,
}

/// What one container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// Its name.
    pub name: ContainerName,
    /// When it runs.
    pub kind: ContainerKind,
    /// How many devices of each resource. A resource that is wanted zero times is not wanted.
    pub wants: BTreeMap<ResourceName, usize>,
    /// Which of the pod's claims, in the order of the spec.
    pub claims: Vec<ClaimReference>,
}

/// A claim that a container names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimReference {
    /// What the pod calls it.
    pub claim: String,
    /// Which of its requests; `None` for all of it.
    pub request: Option<String>,
}

/// A pod that holds devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: PodName,
    /// Who says that it exists.
    pub source: Source,
    /// A hash of its spec; 0 when that is not known.
    pub fingerprint: u64,
    /// For its users.
    pub metadata: PodMetadata,
    /// It was admitted before the machine last booted.
    pub before_reboot: bool,
    /// All of its containers, also those that hold nothing, in the order of the spec; empty when the spec is not
    /// known.
    pub containers: Vec<ContainerName>,
    /// What its containers hold, in the order of the spec.
    pub allocations: Vec<Allocation>,
    /// The claims that it holds, in the order of the spec. Two of them may be the same claim.
    pub claims: Vec<PodClaim>,
    /// What its containers use of them, in the order of the spec; nothing is known of an imported pod.
    pub claim_uses: Vec<ClaimUse>,
}

/// A claim that a pod holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodClaim {
    /// What the pod calls it; empty for the claim behind its extended resources, and for an imported pod.
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
    /// What the pod calls the claim.
    pub claim: String,
    /// Which of its requests; `None` for all of it.
    pub request: Option<String>,
}

/// What one container holds of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The container.
    pub container: ContainerName,
    /// When it runs; `None` for an imported pod, whose spec is not known.
    pub kind: Option<ContainerKind>,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// Where they were when they were allocated: devices by NUMA node, ascending, -1 for those without one.
    pub nodes: Vec<(i64, Vec<DeviceId>)>,
    /// What the plugin answered.
    pub answer: Answer,
    /// The plugin wants to be called before each start of the container.
    pub pre_start_required: bool,
}

impl Pod {
    /// Whether it may have a container of this name: one that it is known to have, or any if its spec is not known.
    pub fn may_have(&self, container: &str) -> bool {
        let known = |name: &ContainerName| name.as_str() == container;
        self.containers.is_empty()
            || self.containers.iter().any(known)
            || self.allocations_of(container).next().is_some()
    }

    /// What a container holds.
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

    /// The UIDs of its claims, each once.
    pub fn claim_uids(&self) -> Vec<ClaimUid> {
        let uids: BTreeSet<&ClaimUid> = self.claims.iter().map(|claim| &claim.uid).collect();
        uids.into_iter().cloned().collect()
    }

    /// What a container uses of the pod's claims.
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

    /// Every device once, by resource: within a pod, containers may pass devices on.
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
