//! Errors of manifests, and the fields that they are about.

use std::fmt;

use devlet_core::ClaimUid;
use devlet_core::dra::claims::ClaimKey;

use super::names::MAX_LABEL;
use super::place::{Place, Position, Step, keys};
use super::{InvalidQuantity, ResolveError};
use crate::limits::truncate_quoted;

/// The reason why manifests cannot be admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// No document.
    #[error("the manifest is empty")]
    Empty,
    /// A problem at a known place.
    #[error("{place}: {problem}")]
    At {
        /// The place.
        place: Place,
        /// The problem.
        problem: Box<InvalidManifest>,
    },
    /// More than one pod.
    #[error("there are several Pods, {first} and {second}: admit one pod at a time")]
    SeveralPods {
        /// One of them.
        first: String,
        /// Another.
        second: String,
    },
    /// Claims without a pod.
    #[error("there is no Pod, only ResourceClaims; add the pod that is to be admitted")]
    NoPod,
    /// Neither JSON nor YAML, or of another shape than a Pod or a ResourceClaim.
    #[error("{message}")]
    Malformed {
        /// The message.
        message: String,
        /// The position, if the parser reports it.
        position: Option<Position>,
    },
    /// An object of another kind.
    #[error("expected a v1 Pod{}, found {} {}{}", or_claim(.kind), Short(.api_version), Short(.kind), instead(.kind))]
    NotAPod {
        /// Its `apiVersion`.
        api_version: String,
        /// Its `kind`.
        kind: String,
    },
    /// A problem of one claim.
    #[error("ResourceClaim {claim}: {problem}")]
    OfClaim {
        /// The claim.
        claim: ClaimKey,
        /// The problem.
        problem: Box<InvalidManifest>,
    },
    /// Two claims with the same name.
    #[error("ResourceClaim {0} is there twice; leave one of them out")]
    DuplicateClaim(ClaimKey),
    /// Two claims with the same UID.
    #[error(
        "ResourceClaims {first} and {second} have the same UID, {uid}; give each its own, or leave it out"
    )]
    DuplicateClaimUid {
        /// One of them.
        first: ClaimKey,
        /// The other.
        second: ClaimKey,
        /// Their UID.
        uid: ClaimUid,
    },
    /// A required field is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A name that Kubernetes rejects.
    #[error("{field}: {} is not {rule}", truncate_quoted(.value))]
    Name {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// A description of valid values.
        rule: &'static str,
    },
    /// Two containers with the same name.
    #[error("two containers are called {0}")]
    DuplicateContainer(String),
    /// A quantity that is not a number of devices.
    #[error("container {container}: {resource}: {} is not a quantity: {problem}", truncate_quoted(.value))]
    Quantity {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// The quantity.
        value: String,
        /// The problem.
        problem: InvalidQuantity,
    },
    /// A resource name that no plugin can serve.
    #[error(
        "container {container}: {} is not the name of a device resource, such as acme.com/gpu",
        truncate_quoted(.resource)
    )]
    Resource {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
    },
    /// A resource name without a domain that is not one of Kubernetes' own.
    #[error(
        "container {container}: {} is not a resource: those of devices have a domain, as in acme.com/gpu, and those \
         without one are cpu, memory, ephemeral-storage and hugepages-SIZE",
        truncate_quoted(.resource)
    )]
    Unqualified {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
    },
    /// Requests that differ from limits: Kubernetes does not overcommit devices.
    #[error(
        "container {container}: requests of {resource} ({requested}) differ from its limits ({limited}); devices are \
         not overcommitted, so leave requests out or make them equal"
    )]
    RequestsDiffer {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// The quantity in `requests`.
        requested: String,
        /// The quantity in `limits`.
        limited: String,
    },
    /// A resource in `requests` but not in `limits`.
    #[error(
        "container {container}: {resource} is in requests only; devices are asked for in resources.limits"
    )]
    RequestsOnly {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
    },
    /// Devices for a whole pod, which Kubernetes does not support.
    #[error("spec.resources: {resource} is asked for by the pod; devices are asked for by containers")]
    PodLevel {
        /// The resource.
        resource: String,
    },
    /// Claims in the resources of a whole pod, which Kubernetes does not support.
    #[error("spec.resources: the pod names claims; claims are named by containers, in resources.claims")]
    PodLevelClaims,
    /// A claim of the pod with both a name and a template.
    #[error(
        "spec.resourceClaims: {claim} has both resourceClaimName and resourceClaimTemplateName; leave one of them out"
    )]
    TwoOrigins {
        /// Its name in the pod.
        claim: String,
    },
    /// Two claims of the pod with the same name.
    #[error("spec.resourceClaims: two claims are called {0}")]
    DuplicatePodClaim(String),
    /// A container refers to a claim that the pod does not have.
    #[error("container {container}: the claim {claim} is not in spec.resourceClaims")]
    UnknownPodClaim {
        /// The container.
        container: String,
        /// The name of the claim.
        claim: String,
    },
    /// The pod may not use a claim.
    #[error(transparent)]
    Claims(#[from] ResolveError),
    /// The pod may not use several claims.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<InvalidManifest>),
}

/// Names the other supported kind, with its versions if the object has that kind.
fn or_claim(kind: &str) -> &'static str {
    match kind {
        "ResourceClaim" => " or a resource.k8s.io/v1, v1beta2 or v1beta1 ResourceClaim",
        _ => " or ResourceClaim",
    }
}

fn instead(kind: &str) -> &'static str {
    match kind {
        "ResourceClaimTemplate" => "; give the ResourceClaim that was created from the template",
        _ => "",
    }
}

impl InvalidManifest {
    /// Returns the resource whose name no plugin can serve.
    pub fn invalid_resource(&self) -> Option<&str> {
        match self {
            Self::At { problem, .. } | Self::OfClaim { problem, .. } => problem.invalid_resource(),
            Self::Resource { resource, .. } | Self::Unqualified { resource, .. } => Some(resource),
            _ => None,
        }
    }

    /// Returns the possible paths of the field that this is about. The longest path that exists counts.
    pub(super) fn paths(&self) -> Vec<Vec<Step>> {
        match self {
            Self::At { problem, .. } | Self::OfClaim { problem, .. } => problem.paths(),
            Self::NotAPod { .. } => vec![keys("kind")],
            Self::DuplicateClaim(_) => vec![keys("metadata.name")],
            Self::DuplicateClaimUid { .. } => vec![keys("metadata.uid")],
            Self::Missing(field) => vec![keys(field)],
            Self::Name { field, value, .. } => {
                let lists = ["", "spec.containers.", "spec.initContainers."];
                lists
                    .map(|list| to_text(&format!("{list}{field}"), value))
                    .to_vec()
            }
            Self::DuplicateContainer(name) => in_containers(name, &[]),
            Self::Quantity {
                container,
                resource,
                value,
                ..
            } => {
                let mut paths = in_limits_or_requests(container, resource);
                paths
                    .iter_mut()
                    .for_each(|path| path.push(Step::Text(value.clone())));
                paths
            }
            Self::Resource { container, resource } | Self::Unqualified { container, resource } => {
                in_limits_or_requests(container, resource)
            }
            Self::RequestsDiffer {
                container, resource, ..
            }
            | Self::RequestsOnly { container, resource } => {
                in_containers(container, &to_resource("requests", resource))
            }
            Self::PodLevel { resource } => {
                let lists = ["limits", "requests"].map(|list| to_resource(list, resource));
                lists.map(|steps| [keys("spec"), steps].concat()).to_vec()
            }
            Self::PodLevelClaims => vec![keys("spec.resources.claims")],
            Self::TwoOrigins { claim } | Self::DuplicatePodClaim(claim) => {
                vec![to_named("spec.resourceClaims", claim)]
            }
            Self::UnknownPodClaim { container, claim } => {
                in_containers(container, &to_text("resources.claims.name", claim))
            }
            Self::Empty
            | Self::SeveralPods { .. }
            | Self::NoPod
            | Self::Malformed { .. }
            | Self::Several(_) => Vec::new(),
            Self::Claims(problem) => claim_paths(problem),
        }
    }
}

/// Returns the possible paths of the field that a problem with a claim is about.
fn claim_paths(problem: &ResolveError) -> Vec<Vec<Step>> {
    match problem {
        ResolveError::Unsupported { claim, .. } | ResolveError::NotCreated { claim, .. } => {
            vec![to_named("spec.resourceClaims", claim)]
        }
        ResolveError::Fetch { claim, .. } => {
            vec![to_text("spec.resourceClaims.resourceClaimName", claim)]
        }
        ResolveError::UnknownRequest {
            container, request, ..
        } => in_containers(container, &to_text("resources.claims.request", request)),
        ResolveError::NotOwner { .. } => vec![keys("metadata.ownerReferences")],
        ResolveError::NotReserved { .. } => vec![keys("status.reservedFor")],
        ResolveError::NotAllocated { .. } => vec![keys("status.allocation")],
        ResolveError::Several(_) => Vec::new(),
    }
}

/// The path of a field with this value.
fn to_text(path: &str, value: &str) -> Vec<Step> {
    [keys(path), vec![Step::Text(value.to_owned())]].concat()
}

/// The path of the element of a list with this name.
fn to_named(list: &str, name: &str) -> Vec<Step> {
    [keys(list), vec![Step::Named(name.to_owned())]].concat()
}

/// The path of a resource in `limits` or `requests`.
fn to_resource(list: &str, resource: &str) -> Vec<Step> {
    let mut steps = keys(&format!("resources.{list}"));
    steps.push(Step::Key(resource.to_owned()));
    steps
}

/// The paths of a field in the containers and init containers of this name.
fn in_containers(name: &str, steps: &[Step]) -> Vec<Vec<Step>> {
    let lists = ["spec.containers", "spec.initContainers"];
    lists
        .map(|list| [to_named(list, name), steps.to_vec()].concat())
        .to_vec()
}

fn in_limits_or_requests(container: &str, resource: &str) -> Vec<Vec<Step>> {
    let lists = ["requests", "limits"];
    lists
        .map(|list| in_containers(container, &to_resource(list, resource)))
        .concat()
}

/// Displays the first characters of a text.
struct Short<'a>(&'a str);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(MAX_LABEL) {
            Some((end, _)) => write!(f, "{}…", &self.0[..end]),
            None => f.write_str(self.0),
        }
    }
}
