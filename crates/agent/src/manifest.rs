//! Kubernetes manifests, as far as devices are concerned: one Pod, and the ResourceClaims that it uses.
//!
//! Everything that is not about devices is ignored: these are standard objects, and say much that is for others. What
//! is about devices is held to the rules of the Kubernetes API, because a pod that asks for devices in a way that
//! nobody hears would be admitted without them: extended resources are asked for in `limits`, by containers, and
//! claims in `spec.resourceClaims`, to be named by containers.
//!
//! `syntax` finds the documents of a text, `object` is what is read of each, `pod` and `claim` what it means; `place`
//! says where an error is.

mod claim;
mod fingerprint;
mod object;
mod place;
mod pod;
mod quantity;
pub mod syntax;

use std::collections::BTreeMap;
use std::fmt;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::{ClaimUid, PodName, PodRequest, PodUid, Source};
use uuid::Uuid;

use crate::claims::{ClaimSource, ResolveError, ResourceClaim, UnresolvedPod};
use crate::limits::truncate_quoted;
use object::{Head, Kind, Object};
use place::{Step, Trail, keys};

pub use place::{Place, Position, position_of};
pub use quantity::InvalidQuantity;

/// Derived UIDs are UUIDs of version 5 of `namespace/name` in this namespace, which is ours and never changes: other
/// programs can derive them too. For claims it is `resourceclaims/namespace/name`.
pub const UID_NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_5c0e_8a7b_4b0f_9d53_2b7c_41e6_90a4);

/// The longest namespace and name of a container: a DNS label.
const LONGEST_LABEL: usize = 63;

/// The longest name of a pod or a claim: a DNS name. A UID is not longer either.
const LONGEST_NAME: usize = 253;

/// Why texts are no pod that could be admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// Nothing in it.
    #[error("the manifest is empty")]
    Empty,
    /// A problem of which it is known where it is.
    #[error("{place}: {problem}")]
    At {
        /// Where it is.
        place: Place,
        /// What is wrong.
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
    /// Claims, and nobody to use them.
    #[error("there is no Pod, only ResourceClaims; add the pod that is to be admitted")]
    NoPod,
    /// Neither JSON nor YAML, or of another shape than a Pod or a ResourceClaim.
    #[error("{message}")]
    Malformed {
        /// What is wrong.
        message: String,
        /// Where, if the parser knows.
        position: Option<Position>,
    },
    /// Another object.
    #[error("expected a v1 Pod{}, found {} {}{}", or_claim(.kind), Short(.api_version), Short(.kind), instead(.kind))]
    NotAPod {
        /// Its `apiVersion`.
        api_version: String,
        /// Its `kind`.
        kind: String,
    },
    /// Something is wrong with a claim.
    #[error("ResourceClaim {claim}: {problem}")]
    OfClaim {
        /// Which one.
        claim: ClaimKey,
        /// What is wrong.
        problem: Box<InvalidManifest>,
    },
    /// A claim is there more than once.
    #[error("ResourceClaim {0} is there twice; leave one of them out")]
    DuplicateClaim(ClaimKey),
    /// Two claims have the same UID.
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
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A name that Kubernetes would not take.
    #[error("{field}: {} is not {rule}", truncate_quoted(.value))]
    Name {
        /// Where.
        field: String,
        /// What it says.
        value: String,
        /// What would be right.
        rule: &'static str,
    },
    /// Two containers have the same name.
    #[error("two containers are called {0}")]
    DuplicateContainer(String),
    /// Not a number of devices.
    #[error("container {container}: {resource}: {} is not a quantity: {problem}", truncate_quoted(.value))]
    Quantity {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// What it says.
        value: String,
        /// What is wrong with it.
        problem: InvalidQuantity,
    },
    /// No plugin could ever serve it.
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
    /// A name without a domain that is not one of Kubernetes' own.
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
    /// Kubernetes has no overcommitment of devices.
    #[error(
        "container {container}: requests of {resource} ({requested}) differ from its limits ({limited}); devices are \
         not overcommitted, so leave requests out or make them equal"
    )]
    RequestsDiffer {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// What `requests` says.
        requested: String,
        /// What `limits` says.
        limited: String,
    },
    /// What counts are limits.
    #[error(
        "container {container}: {resource} is in requests only; devices are asked for in resources.limits"
    )]
    RequestsOnly {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
    },
    /// Kubernetes has no devices of a whole pod.
    #[error("spec.resources: {resource} is asked for by the pod; devices are asked for by containers")]
    PodLevel {
        /// The resource.
        resource: String,
    },
    /// Kubernetes has no claims of a whole pod.
    #[error("spec.resources: the pod names claims; claims are named by containers, in resources.claims")]
    PodLevelClaims,
    /// A claim of the pod says both where it is and how it is made.
    #[error(
        "spec.resourceClaims: {claim} has both resourceClaimName and resourceClaimTemplateName; leave one of them out"
    )]
    TwoOrigins {
        /// What the pod calls it.
        claim: String,
    },
    /// Two claims of the pod have the same name.
    #[error("spec.resourceClaims: two claims are called {0}")]
    DuplicatePodClaim(String),
    /// A container names a claim that the pod does not have.
    #[error("container {container}: the claim {claim} is not in spec.resourceClaims")]
    UnknownPodClaim {
        /// The container.
        container: String,
        /// What it names.
        claim: String,
    },
    /// The pod may not use a claim.
    #[error(transparent)]
    Claims(#[from] ResolveError),
    /// The pod may not use several claims.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<InvalidManifest>),
}

/// The other object that is read, with its versions if those matter.
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
    /// The resource whose name no plugin could serve.
    pub fn invalid_resource(&self) -> Option<&str> {
        match self {
            Self::At { problem, .. } | Self::OfClaim { problem, .. } => problem.invalid_resource(),
            Self::Resource { resource, .. } | Self::Unqualified { resource, .. } => Some(resource),
            _ => None,
        }
    }

    /// Where the field that this is about may stand in its object. The longest path that leads somewhere counts.
    fn paths(&self) -> Vec<Vec<Step>> {
        let text = |path: &str, value: &str| [keys(path), vec![Step::Text(value.to_owned())]].concat();
        let named = |list: &str, name: &str| [keys(list), vec![Step::Named(name.to_owned())]].concat();
        let containers = |name: &str, steps: Vec<Step>| {
            let lists = ["spec.containers", "spec.initContainers"];
            lists
                .map(|list| [named(list, name), steps.clone()].concat())
                .to_vec()
        };
        let resources = |list: &str, resource: &str| {
            let mut steps = keys(&format!("resources.{list}"));
            steps.push(Step::Key(resource.to_owned()));
            steps
        };
        let limits_or_requests = |container: &str, resource: &str| {
            let lists = ["requests", "limits"].map(|list| containers(container, resources(list, resource)));
            lists.concat()
        };
        match self {
            Self::At { problem, .. } | Self::OfClaim { problem, .. } => problem.paths(),
            Self::NotAPod { .. } => vec![keys("kind")],
            Self::DuplicateClaim(_) => vec![keys("metadata.name")],
            Self::DuplicateClaimUid { .. } => vec![keys("metadata.uid")],
            Self::Missing(field) => vec![keys(field)],
            Self::Name { field, value, .. } => {
                let lists = ["", "spec.containers.", "spec.initContainers."];
                lists.map(|list| text(&format!("{list}{field}"), value)).to_vec()
            }
            Self::DuplicateContainer(name) => containers(name, Vec::new()),
            Self::Quantity {
                container,
                resource,
                value,
                ..
            } => {
                let mut paths = limits_or_requests(container, resource);
                paths
                    .iter_mut()
                    .for_each(|path| path.push(Step::Text(value.clone())));
                paths
            }
            Self::Resource { container, resource } | Self::Unqualified { container, resource } => {
                limits_or_requests(container, resource)
            }
            Self::RequestsDiffer {
                container, resource, ..
            }
            | Self::RequestsOnly { container, resource } => {
                containers(container, resources("requests", resource))
            }
            Self::PodLevel { resource } => {
                let lists = ["limits", "requests"].map(|list| resources(list, resource));
                lists.map(|steps| [keys("spec"), steps].concat()).to_vec()
            }
            Self::PodLevelClaims => vec![keys("spec.resources.claims")],
            Self::TwoOrigins { claim } | Self::DuplicatePodClaim(claim) => {
                vec![named("spec.resourceClaims", claim)]
            }
            Self::UnknownPodClaim { container, claim } => {
                containers(container, text("resources.claims.name", claim))
            }
            Self::Empty
            | Self::SeveralPods { .. }
            | Self::NoPod
            | Self::Malformed { .. }
            | Self::Several(_) => Vec::new(),
            Self::Claims(problem) => match problem {
                ResolveError::Unsupported { claim, .. } | ResolveError::NotCreated { claim, .. } => {
                    vec![named("spec.resourceClaims", claim)]
                }
                ResolveError::Fetch { claim, .. } => {
                    vec![text("spec.resourceClaims.resourceClaimName", claim)]
                }
                ResolveError::UnknownRequest {
                    container, request, ..
                } => containers(container, text("resources.claims.request", request)),
                ResolveError::NotOwner { .. } => vec![keys("metadata.ownerReferences")],
                ResolveError::NotReserved { .. } => vec![keys("status.reservedFor")],
                ResolveError::NotAllocated { .. } => vec![keys("status.allocation")],
                ResolveError::Several(_) => Vec::new(),
            },
        }
    }
}

/// The beginning of a text that may be long.
struct Short<'a>(&'a str);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(LONGEST_LABEL) {
            Some((end, _)) => write!(f, "{}…", &self.0[..end]),
            None => f.write_str(self.0),
        }
    }
}

/// A pod, and the claims that came with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifests {
    /// The pod.
    pub pod: UnresolvedPod,
    /// The claims.
    pub claims: GivenClaims,
}

/// Claims of manifests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GivenClaims {
    claims: BTreeMap<ClaimKey, ResourceClaim>,
}

/// A claim is not among the manifests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{claim} is not among the manifests{}; add it with its status, as in `devlet admit -f pod.yaml -f claim.yaml`, where \
     claim.yaml is what `kubectl get resourceclaims -n {} {} -o yaml` says", but(.others), .claim.namespace, .claim.name
)]
pub struct NotGiven {
    /// The claim.
    pub claim: ClaimKey,
    /// Some of those that are.
    pub others: Vec<ClaimKey>,
}

fn but(others: &[ClaimKey]) -> String {
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    match others.len() {
        0 => String::new(),
        _ => format!(" (which have {})", others.join(", ")),
    }
}

impl GivenClaims {
    fn find(&self, key: &ClaimKey) -> Result<ResourceClaim, NotGiven> {
        /// So many of the others are named.
        const MOST: usize = 3;
        self.claims.get(key).cloned().ok_or_else(|| NotGiven {
            claim: key.clone(),
            others: self.claims.keys().take(MOST).cloned().collect(),
        })
    }
}

impl ClaimSource for GivenClaims {
    type Error = NotGiven;

    async fn claim(&self, key: &ClaimKey) -> Result<ResourceClaim, NotGiven> {
        self.find(key)
    }
}

/// What the pod of a manifest asks for, with the claims that are in the same text. Resources that are not for device
/// plugins, or `foreign`, are left out.
pub fn parse(text: &str, source: Source, foreign: &[String]) -> Result<PodRequest, InvalidManifest> {
    request([text], source, foreign)
}

/// What the pod in some texts asks for, with the claims that are there, too. See [`read`].
pub fn request<'a, T: Into<Text<'a>>>(
    texts: impl IntoIterator<Item = T>,
    source: Source,
    foreign: &[String],
) -> Result<PodRequest, InvalidManifest> {
    let texts: Vec<Text<'_>> = texts.into_iter().map(Into::into).collect();
    let (Manifests { pod, claims }, origins) = found(&texts, source, foreign)?;
    let namespace = pod.request.name.namespace.clone();
    let resolved = pod.resolve_with(|key| claims.find(key));
    resolved.map_err(|error| match error {
        ResolveError::Several(errors) => {
            let errors = errors.into_iter();
            InvalidManifest::Several(
                errors
                    .map(|error| origins.locate(&texts, &namespace, error))
                    .collect(),
            )
        }
        error => origins.locate(&texts, &namespace, error),
    })
}

/// A text, and what it is called in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a> {
    /// Such as the name of its file; may be empty.
    pub name: &'a str,
    /// One or more documents, JSON or YAML.
    pub text: &'a str,
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self { name: "", text }
    }
}

/// The pod and the claims in some texts, each with one or more documents, in any order.
pub fn read<'a, T: Into<Text<'a>>>(
    texts: impl IntoIterator<Item = T>,
    source: Source,
    foreign: &[String],
) -> Result<Manifests, InvalidManifest> {
    let texts: Vec<Text<'_>> = texts.into_iter().map(Into::into).collect();
    Ok(found(&texts, source, foreign)?.0)
}

fn found(
    texts: &[Text<'_>],
    source: Source,
    foreign: &[String],
) -> Result<(Manifests, Origins), InvalidManifest> {
    let mut found = Found::default();
    for (index, Text { text, .. }) in texts.iter().enumerate() {
        found.add(index, text, source, foreign).map_err(|error| {
            let (trail, problem) = *error;
            located(texts, &(index, trail), problem)
        })?;
    }
    let claims = found.claims;
    match found.pod {
        Some(pod) => Ok((Manifests { pod, claims }, found.origins)),
        None if claims.claims.is_empty() => Err(InvalidManifest::Empty),
        None => Err(InvalidManifest::NoPod),
    }
}

/// A problem with the place that it is about, as far as that is known.
fn located(texts: &[Text<'_>], (index, trail): &Origin, problem: InvalidManifest) -> InvalidManifest {
    let Some(Text { name, text }) = texts.get(*index) else {
        return problem;
    };
    let position = match &problem {
        InvalidManifest::Malformed { position, .. } => *position,
        problem => place::position(text, trail, problem),
    };
    let place = Place {
        name: (*name).to_owned(),
        number: (texts.len() > 1).then_some(index + 1),
        position,
    };
    if place.is_unknown() {
        return problem;
    }
    let problem = Box::new(problem);
    InvalidManifest::At { place, problem }
}

/// The text that an object is in, and the object in it.
type Origin = (usize, Trail);

/// Where the objects are.
#[derive(Default)]
struct Origins {
    pod: Origin,
    claims: BTreeMap<ClaimKey, Origin>,
}

impl Origins {
    /// An error about a claim with its place: the claim, or where the pod names it.
    fn locate(&self, texts: &[Text<'_>], namespace: &str, error: ResolveError) -> InvalidManifest {
        let key = match &error {
            ResolveError::NotOwner { claim, .. } => Some(claim.clone()),
            ResolveError::NotReserved { claim, .. } | ResolveError::NotAllocated { claim } => {
                Some(ClaimKey {
                    namespace: namespace.to_owned(),
                    name: claim.clone(),
                })
            }
            _ => None,
        };
        let claim = key.and_then(|key| self.claims.get(&key));
        located(texts, claim.unwrap_or(&self.pod), error.into())
    }
}

#[derive(Default)]
struct Found {
    pod: Option<UnresolvedPod>,
    claims: GivenClaims,
    origins: Origins,
}

impl Found {
    /// On an error also which object it is about.
    fn add(
        &mut self,
        index: usize,
        text: &str,
        source: Source,
        foreign: &[String],
    ) -> Result<(), Box<(Trail, InvalidManifest)>> {
        let objects = objects(text).map_err(|problem| Box::new((vec![0], problem)))?;
        let objects = objects
            .into_iter()
            .enumerate()
            .map(|(index, object)| (vec![index], object));
        let mut objects: Vec<(Trail, Object)> = objects.collect();
        objects.reverse();
        if objects.is_empty() {
            return Err(Box::new((Trail::new(), InvalidManifest::Empty)));
        }
        while let Some((trail, mut object)) = objects.pop() {
            let items = object.items.take().unwrap_or_default();
            let items = items.into_iter().flatten().enumerate();
            let items = items.map(|(index, item)| ([&trail[..], &[index]].concat(), item));
            let items: Vec<(Trail, Object)> = items.collect();
            let origin = (index, trail.clone());
            match self.add_object(origin, object, source, foreign) {
                Ok(Kind::List) => objects.extend(items.into_iter().rev()),
                Ok(Kind::Pod | Kind::ResourceClaim) => {}
                Err(problem) => return Err(Box::new((trail, problem))),
            }
        }
        Ok(())
    }

    fn add_object(
        &mut self,
        origin: Origin,
        object: Object,
        source: Source,
        foreign: &[String],
    ) -> Result<Kind, InvalidManifest> {
        let kind = object.kind()?;
        match kind {
            Kind::List => {}
            Kind::Pod => {
                self.add_pod(pod::unresolved(object, source, foreign)?)?;
                self.origins.pod = origin;
            }
            Kind::ResourceClaim => {
                let claim = claim::resource_claim(object)?;
                let key = claim.key.clone();
                self.add_claim(claim)?;
                self.origins.claims.insert(key, origin);
            }
        }
        Ok(kind)
    }

    fn add_pod(&mut self, pod: UnresolvedPod) -> Result<(), InvalidManifest> {
        if let Some(first) = &self.pod {
            let full =
                |pod: &UnresolvedPod| format!("{}/{}", pod.request.name.namespace, pod.request.name.name);
            let (first, second) = (full(first), full(&pod));
            return Err(InvalidManifest::SeveralPods { first, second });
        }
        self.pod = Some(pod);
        Ok(())
    }

    fn add_claim(&mut self, claim: ResourceClaim) -> Result<(), InvalidManifest> {
        let key = claim.key.clone();
        let mut others = self.claims.claims.values();
        if let Some(other) = others.find(|other| other.uid == claim.uid && other.key != key) {
            return Err(InvalidManifest::DuplicateClaimUid {
                first: other.key.clone(),
                second: key,
                uid: claim.uid,
            });
        }
        match self.claims.claims.insert(key.clone(), claim) {
            Some(_) => Err(InvalidManifest::DuplicateClaim(key)),
            None => Ok(()),
        }
    }
}

/// The UID of a pod whose manifest has none.
pub fn derived_uid(name: &PodName) -> PodUid {
    PodUid::from(derived(&format!("{}/{}", name.namespace, name.name)))
}

fn derived(text: &str) -> String {
    Uuid::new_v5(&UID_NAMESPACE, text.as_bytes()).to_string()
}

/// The objects in a text.
fn objects(text: &str) -> Result<Vec<Object>, InvalidManifest> {
    syntax::documents(text).map_err(|malformed| {
        // An object of another kind has another shape, and its kind says more.
        let heads: Vec<Head> = syntax::documents(text).unwrap_or_default();
        let foreign = heads.iter().find_map(|head| head.kind().err());
        foreign.unwrap_or(InvalidManifest::Malformed {
            message: malformed.message,
            position: malformed.position,
        })
    })
}

/// Name and namespace of an object.
fn full_name(metadata: &object::Metadata) -> Result<(String, String), InvalidManifest> {
    let name = metadata.name.clone().unwrap_or_default();
    if name.is_empty() {
        return Err(InvalidManifest::Missing("metadata.name"));
    }
    check_name("metadata.name", &name)?;
    let namespace = metadata
        .namespace
        .clone()
        .filter(|namespace| !namespace.is_empty());
    let namespace = namespace.unwrap_or_else(|| "default".to_owned());
    check_label("metadata.namespace", &namespace)?;
    Ok((namespace, name))
}

fn check_label(field: &str, value: &str) -> Result<(), InvalidManifest> {
    if is_label(value) && value.len() <= LONGEST_LABEL {
        return Ok(());
    }
    let rule = "a lower-case DNS label of at most 63 characters";
    Err(InvalidManifest::Name {
        field: field.to_owned(),
        value: value.to_owned(),
        rule,
    })
}

/// Checks a label as the Kubernetes API does, which also bounds the memory that labels take.
fn check_pod_label(key: &str, value: &str) -> Result<(), InvalidManifest> {
    let is_word = |text: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        text.len() <= LONGEST_LABEL && text.bytes().all(inner) && edge(bytes.first()) && edge(bytes.last())
    };
    let is_key = match key.split_once('/') {
        Some((domain, name)) => domain.len() <= LONGEST_NAME && is_dns_name(domain) && is_word(name),
        None => is_word(key),
    };
    if is_key && (value.is_empty() || is_word(value)) {
        return Ok(());
    }
    Err(InvalidManifest::Name {
        field: "metadata.labels".to_owned(),
        value: format!("{key}={value}"),
        rule: "a label: at most 63 letters, digits, '-', '_' and '.' for the name and the value",
    })
}

fn check_name(field: &str, value: &str) -> Result<(), InvalidManifest> {
    if value.len() <= LONGEST_NAME && is_dns_name(value) {
        return Ok(());
    }
    let rule = "a lower-case DNS name of at most 253 characters";
    Err(InvalidManifest::Name {
        field: field.to_owned(),
        value: value.to_owned(),
        rule,
    })
}

fn is_dns_name(text: &str) -> bool {
    text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
    bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
}

fn check_uid(uid: &str) -> Result<(), InvalidManifest> {
    let valid = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    if uid.len() <= LONGEST_NAME && uid.bytes().all(valid) {
        return Ok(());
    }
    let rule = "a UID: at most 253 printable characters without spaces or slashes";
    Err(InvalidManifest::Name {
        field: "metadata.uid".to_owned(),
        value: uid.to_owned(),
        rule,
    })
}

#[cfg(test)]
mod tests;
