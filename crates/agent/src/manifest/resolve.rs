//! Resolves the claims that a pod refers to, and checks that the pod may use them.
//!
//! The order of the checks and their messages are the kubelet's; each message adds what to do. All claims are checked
//! before any of them is used.

use std::collections::BTreeMap;
use std::fmt::Display;

use devlet_core::dra::claims::{AllocatedClaim, AllocationResult, ClaimKey};
use devlet_core::{ClaimRequest, ClaimUid, PodRequest, PodUid, ResourceName};
use futures_util::future::join_all;

use super::claim_source::{ClaimSource, Consumer, Controller, ResourceClaim};
use crate::limits::truncate_quoted;

/// A pod whose claims have not been looked up yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnresolvedPod {
    /// The request without claims, but with the references of containers to them.
    pub request: PodRequest,
    /// Its claims, in the order of the spec.
    pub claims: Vec<PodResourceClaim>,
    /// The claim behind its extended resources.
    pub extended: Option<String>,
    /// The PodGroup that it is scheduled with.
    pub group: Option<String>,
}

/// A claim of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodResourceClaim {
    /// Its name in the pod.
    pub name: String,
    /// The origin of the claim.
    pub origin: ClaimOrigin,
}

/// The origin of a claim of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOrigin {
    /// The claim of this name.
    Named(String),
    /// The claim of this name, which was created for the pod.
    Generated(String),
    /// No claim, on purpose.
    Omitted,
    /// A claim that has not been created from its template yet.
    NotCreated,
    /// The pod does not set a supported field.
    Unsupported,
}

/// The reason why a pod cannot use its claims.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The pod does not say which claim it is.
    #[error(
        "pod {pod:?}, spec.resourceClaim {claim:?}: none of the supported fields are set; set resourceClaimName or \
         resourceClaimTemplateName"
    )]
    Unsupported {
        /// The pod, with its namespace.
        pod: String,
        /// The name of the claim in the pod.
        claim: String,
    },
    /// The claim has not been created from its template.
    #[error(
        "pod {pod:?}: ResourceClaim not created yet; status.resourceClaimStatuses must say which claim was created for \
         {claim:?}"
    )]
    NotCreated {
        /// The pod, with its namespace.
        pod: String,
        /// The name of the claim in the pod.
        claim: String,
    },
    /// The source does not have the claim.
    #[error("fetch ResourceClaim {claim}: {problem}")]
    Fetch {
        /// The claim.
        claim: String,
        /// The reason.
        problem: String,
    },
    /// The claim was created for another owner.
    #[error(
        "ResourceClaim {claim} was not created for Pod {pod} ({}); the UID of its controller must be that of the pod, \
         {uid}", not_owner(.group.as_ref())
    )]
    NotOwner {
        /// The claim.
        claim: ClaimKey,
        /// The pod, with its namespace.
        pod: String,
        /// The pod's UID.
        uid: PodUid,
        /// The pod's group.
        group: Option<String>,
    },
    /// The claim is not reserved for the pod.
    #[error(
        "pod {pod} ({uid}) is not allowed to use ResourceClaim {claim} ({claim_uid}){}; {}{}",
        if *.is_allocated { "" } else { ", which is not allocated" },
        reserve(.pod, .uid, .other_uid.as_ref()),
        if *.is_allocated { "" } else { ", and add the devices that it has to status.allocation" }
    )]
    NotReserved {
        /// The pod's name.
        pod: String,
        /// The pod's UID.
        uid: PodUid,
        /// The claim's name.
        claim: String,
        /// The claim's UID.
        claim_uid: ClaimUid,
        /// The UID under which the claim is reserved for a pod of this name.
        other_uid: Option<String>,
        /// `true` if the claim has devices.
        is_allocated: bool,
    },
    /// Several claims are not complete.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<ResolveError>),
    /// The claim does not have devices.
    #[error("ResourceClaim {claim}: not allocated; add the devices that it has to status.allocation")]
    NotAllocated {
        /// The claim's name.
        claim: String,
    },
    /// A container refers to a request that the claim does not have.
    #[error(
        "container {container}: ResourceClaim {claim} does not have a request {}; it has {}", truncate_quoted(.request),
        .known.join(", ")
    )]
    UnknownRequest {
        /// The container.
        container: String,
        /// The claim's name.
        claim: String,
        /// The name of the request.
        request: String,
        /// The requests of the claim.
        known: Vec<String>,
    },
}

/// Explains how to reserve a claim for a pod. A name suffices, unless an entry has that name and another UID.
fn reserve(pod: &str, uid: &PodUid, other: Option<&String>) -> String {
    match other {
        None => format!("add {{resource: pods, name: {pod}}} to status.reservedFor of the claim"),
        Some(other) => {
            format!("status.reservedFor of the claim has pod {pod} with UID {other}: change that to {uid}")
        }
    }
}

fn not_owner(group: Option<&String>) -> String {
    match group {
        None => "Pod is not owner".to_owned(),
        Some(group) => format!("neither Pod nor PodGroup {group} is the owner"),
    }
}

/// A claim to look up.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    /// Its name in the pod; empty for the claim behind extended resources.
    name: String,
    key: ClaimKey,
    /// `true` if it was created for the pod.
    is_generated: bool,
}

/// By the name of a claim in the pod: the name of the claim, and its requests.
type KnownRequests = BTreeMap<String, (String, Vec<String>)>;

/// Returns the requests in the spec of a claim, and those that only its allocation has.
fn known_requests(mut known: Vec<String>, results: &[AllocationResult]) -> Vec<String> {
    for result in results {
        // An alternative, `request/alternative`, belongs to the request.
        let request = result.device.request.split('/').next().unwrap_or_default();
        if !known.iter().any(|each| each == request) {
            known.push(request.to_owned());
        }
    }
    known
}

impl UnresolvedPod {
    /// Returns the request with its claims, if the pod may use all of them. Looks up each claim once.
    pub async fn resolve(self, source: &impl ClaimSource) -> Result<PodRequest, ResolveError> {
        let wanted = self.wanted()?;
        let keys: std::collections::BTreeSet<ClaimKey> = wanted.iter().map(|each| each.key.clone()).collect();
        let lookups = keys.into_iter().map(|key| async move {
            let found = source.claim(&key).await.map_err(|error| error.to_string());
            (key, found)
        });
        let found: BTreeMap<_, _> = join_all(lookups).await.into_iter().collect();
        self.checked(wanted, |key| match found.get(key) {
            Some(found) => found.clone(),
            None => Err("it was not looked up".to_owned()),
        })
    }

    /// Like [`UnresolvedPod::resolve`], with claims that `find` returns at once.
    pub fn resolve_with<E: Display>(
        self,
        find: impl Fn(&ClaimKey) -> Result<ResourceClaim, E>,
    ) -> Result<PodRequest, ResolveError> {
        let wanted = self.wanted()?;
        self.checked(wanted, find)
    }

    /// Returns `true` if the pod needs devices or claims.
    pub fn needs_anything(&self) -> bool {
        let containers = &self.request.containers;
        containers.iter().any(|container| !container.wants.is_empty()) || self.has_claims()
    }

    /// Returns `true` if the pod has claims. Without claims, its request is complete.
    pub fn has_claims(&self) -> bool {
        self.extended.is_some() || !self.claims.is_empty()
    }

    /// Drops its claims, and the resources that are not ours.
    pub fn retain_devices(&mut self, is_ours: impl Fn(&ResourceName) -> bool) {
        self.claims.clear();
        self.extended = None;
        for container in &mut self.request.containers {
            container.claims.clear();
            container.wants.retain(|resource, _| is_ours(resource));
        }
    }

    /// Returns the names of its claims. The list is empty if one of them does not exist yet.
    pub(super) fn claim_keys(&self) -> Vec<ClaimKey> {
        let mut keys: Vec<ClaimKey> = self.wanted().into_iter().flatten().map(|each| each.key).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    fn wanted(&self) -> Result<Vec<Wanted>, ResolveError> {
        let named = |name: &str, claim: &str, is_generated| Wanted {
            name: name.to_owned(),
            key: ClaimKey {
                namespace: self.request.name.namespace.clone(),
                name: claim.to_owned(),
            },
            is_generated,
        };
        let mut wanted = Vec::new();
        for PodResourceClaim { name, origin } in &self.claims {
            match origin {
                ClaimOrigin::Named(claim) => wanted.push(named(name, claim, false)),
                ClaimOrigin::Generated(claim) => wanted.push(named(name, claim, true)),
                ClaimOrigin::Omitted => {}
                ClaimOrigin::NotCreated => {
                    return Err(ResolveError::NotCreated {
                        pod: self.full_name(),
                        claim: name.clone(),
                    });
                }
                ClaimOrigin::Unsupported => {
                    return Err(ResolveError::Unsupported {
                        pod: self.full_name(),
                        claim: name.clone(),
                    });
                }
            }
        }
        // The owner of this claim is not checked, as in a kubelet.
        wanted.extend(self.extended.iter().map(|claim| named("", claim, false)));
        Ok(wanted)
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.request.name.namespace, self.request.name.name)
    }

    fn checked<E: Display>(
        mut self,
        wanted: Vec<Wanted>,
        find: impl Fn(&ClaimKey) -> Result<ResourceClaim, E>,
    ) -> Result<PodRequest, ResolveError> {
        let mut requests = KnownRequests::new();
        let mut claims = Vec::new();
        let mut incomplete = Vec::new();
        for Wanted {
            name,
            key,
            is_generated,
        } in wanted
        {
            let claim = find(&key).map_err(|problem| ResolveError::Fetch {
                claim: key.name.clone(),
                problem: problem.to_string(),
            })?;
            if is_generated {
                self.check_owner(&claim)?;
            }
            if let Err(error) = self.check_reservation(&claim) {
                incomplete.push(error);
                continue;
            }
            let Some(results) = claim.allocation else {
                incomplete.push(ResolveError::NotAllocated { claim: key.name });
                continue;
            };
            let known = known_requests(claim.requests, &results);
            requests.insert(name.clone(), (key.name, known));
            let claim = AllocatedClaim::new(claim.key, claim.uid, results);
            claims.push(ClaimRequest { name, claim });
        }
        match incomplete.len() {
            0 => {}
            1 => return Err(incomplete.remove(0)),
            _ => return Err(ResolveError::Several(incomplete)),
        }
        self.check_references(&requests)?;
        self.request.claims = claims;
        Ok(self.request)
    }

    /// Drops references of containers to omitted claims, and checks the requests of the others.
    fn check_references(&mut self, requests: &KnownRequests) -> Result<(), ResolveError> {
        for container in &mut self.request.containers {
            container.claims.retain(|each| requests.contains_key(&each.claim));
            for reference in &container.claims {
                let known = requests.get(&reference.claim);
                if let (Some(request), Some((claim, known))) = (&reference.request, known)
                    && !known.contains(request)
                {
                    return Err(ResolveError::UnknownRequest {
                        container: container.name.to_string(),
                        claim: claim.clone(),
                        request: request.clone(),
                        known: known.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_owner(&self, claim: &ResourceClaim) -> Result<(), ResolveError> {
        let is_pod = |owner: &Controller| owner.uid == self.request.uid.as_str();
        let is_group = |owner: &Controller| {
            owner.kind == "PodGroup"
                && Some(&owner.name) == self.group.as_ref()
                && owner.api_version.starts_with("scheduling.k8s.io/")
        };
        let is_ours = |owner: &Controller| is_pod(owner) || is_group(owner);
        if claim.controller.as_ref().is_some_and(is_ours) {
            return Ok(());
        }
        Err(ResolveError::NotOwner {
            claim: claim.key.clone(),
            pod: self.full_name(),
            uid: self.request.uid.clone(),
            group: self.group.clone(),
        })
    }

    fn check_reservation(&self, claim: &ResourceClaim) -> Result<(), ResolveError> {
        let name = &self.request.name.name;
        let is_pod = |consumer: &Consumer| match consumer.uid.as_str() {
            "" => (&*consumer.api_group, &*consumer.resource) == ("", "pods") && consumer.name == *name,
            uid => uid == self.request.uid.as_str(),
        };
        let is_group = |consumer: &Consumer| {
            (&*consumer.api_group, &*consumer.resource) == ("scheduling.k8s.io", "podgroups")
                && Some(&consumer.name) == self.group.as_ref()
        };
        let may_use = |consumer: &Consumer| is_pod(consumer) || is_group(consumer);
        if claim.reserved_for.iter().any(may_use) {
            return Ok(());
        }
        let same_name = claim
            .reserved_for
            .iter()
            .find(|each| each.resource == "pods" && each.name == *name && !each.uid.is_empty());
        Err(ResolveError::NotReserved {
            other_uid: same_name.map(|each| each.uid.clone()),
            is_allocated: claim.allocation.is_some(),
            pod: name.clone(),
            uid: self.request.uid.clone(),
            claim: claim.key.name.clone(),
            claim_uid: claim.uid.clone(),
        })
    }
}

#[cfg(test)]
mod tests;
