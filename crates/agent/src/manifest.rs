//! Kubernetes manifests, as far as devices are concerned: one Pod, and the ResourceClaims that it uses.
//!
//! Everything that is not about devices is ignored: these are standard objects, and say much that is for others. What
//! is about devices is held to the rules of the Kubernetes API, because a pod that asks for devices in a way that
//! nobody hears would be admitted without them: extended resources are asked for in `limits`, by containers, and
//! claims in `spec.resourceClaims`, to be named by containers.
//!
//! `object` is what is read of each document, `pod` and `claim` what it means.

mod claim;
mod fingerprint;
mod object;
mod pod;
mod quantity;

use std::collections::BTreeMap;
use std::fmt;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::{ClaimUid, PodName, PodRequest, PodUid, Source};
use serde_saphyr::budget::BudgetBreach;
use uuid::Uuid;

use crate::claims::{ClaimSource, ResolveError, ResourceClaim, UnresolvedPod};
use crate::limits::shortened;
use object::{Head, Kind, Object};

pub use quantity::InvalidQuantity;

/// Derived UIDs are UUIDs of version 5 of `namespace/name` in this namespace, which is ours and never changes: other
/// programs can derive them too. For claims it is `resourceclaims/namespace/name`.
pub const UID_NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_5c0e_8a7b_4b0f_9d53_2b7c_41e6_90a4);

/// The longest namespace and name of a container: a DNS label.
const LONGEST_LABEL: usize = 63;

/// The longest name of a pod or a claim: a DNS name. A UID is not longer either.
const LONGEST_NAME: usize = 253;

/// How deep a manifest may be nested; those of Kubernetes are a dozen levels deep.
const DEEPEST: usize = 64;

/// How much of what a parser says is told: it may quote what it read.
const LONGEST_MESSAGE: usize = 500;

/// Why texts are no pod that could be admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// Nothing in it.
    #[error("the manifest is empty")]
    Empty,
    /// One of several texts has a problem.
    #[error("manifest {number}: {problem}")]
    OneOfSeveral {
        /// Which one, beginning with 1.
        number: usize,
        /// What is wrong with it.
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
    #[error("the manifest is neither a Pod nor a ResourceClaim: {message}")]
    Malformed {
        /// What the parser says, with the place.
        message: String,
    },
    /// Another object.
    #[error("the manifest is a {} {}, not a v1 Pod{}", Short(.api_version), Short(.kind), instead(.kind))]
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
    #[error("{field}: {} is not {rule}", shortened(.value))]
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
    #[error("container {container}: {resource}: {} is not a quantity: {problem}", shortened(.value))]
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
        "container {container}: {} is not the name of an extended resource, such as acme.com/gpu",
        shortened(.resource)
    )]
    Resource {
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
    /// The pod may not use its claims.
    #[error(transparent)]
    Claims(#[from] ResolveError),
}

/// What to give instead of an object that is about claims, too.
fn instead(kind: &str) -> &'static str {
    match kind {
        "ResourceClaim" => " or a resource.k8s.io/v1, v1beta2 or v1beta1 ResourceClaim",
        "ResourceClaimTemplate" => {
            " or ResourceClaim; give the ResourceClaim that was created from the template"
        }
        _ => " or ResourceClaim",
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
    let Manifests { pod, claims } = read([text], source, foreign)?;
    Ok(pod.resolve_with(|key| claims.find(key))?)
}

/// The pod and the claims in some texts, each with one or more documents, in any order.
pub fn read<'a>(
    texts: impl IntoIterator<Item = &'a str>,
    source: Source,
    foreign: &[String],
) -> Result<Manifests, InvalidManifest> {
    let texts: Vec<&str> = texts.into_iter().collect();
    let mut found = Found::default();
    for (place, text) in texts.iter().enumerate() {
        found
            .add(text, source, foreign)
            .map_err(|problem| match &*texts {
                [_] => problem,
                _ => InvalidManifest::OneOfSeveral {
                    number: place + 1,
                    problem: Box::new(problem),
                },
            })?;
    }
    let claims = found.claims;
    match found.pod {
        Some(pod) => Ok(Manifests { pod, claims }),
        None if claims.claims.is_empty() => Err(InvalidManifest::Empty),
        None => Err(InvalidManifest::NoPod),
    }
}

#[derive(Default)]
struct Found {
    pod: Option<UnresolvedPod>,
    claims: GivenClaims,
}

impl Found {
    fn add(&mut self, text: &str, source: Source, foreign: &[String]) -> Result<(), InvalidManifest> {
        let mut objects = objects(text)?;
        objects.reverse();
        let mut is_empty = true;
        while let Some(mut object) = objects.pop() {
            is_empty = false;
            match object.kind()? {
                Kind::List => {
                    let items = object.items.take().unwrap_or_default();
                    objects.extend(items.into_iter().flatten().rev());
                }
                Kind::Pod => self.add_pod(pod::unresolved(object, source, foreign)?)?,
                Kind::ResourceClaim => self.add_claim(claim::resource_claim(object)?)?,
            }
        }
        if is_empty {
            return Err(InvalidManifest::Empty);
        }
        Ok(())
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
    documents(text).map_err(|message| {
        // Of another kind it is no wonder that it has another shape.
        let heads: Vec<Head> = documents(text).unwrap_or_default();
        let foreign = heads.iter().find_map(|head| head.kind().err());
        foreign.unwrap_or(InvalidManifest::Malformed { message })
    })
}

/// The documents of a text in which each is JSON, as programs write them: that takes much less time than YAML
/// does. What is not JSON may still be YAML, such as `{kind: Pod}`.
fn json_documents<T: serde::de::DeserializeOwned>(text: &str) -> Option<Vec<T>> {
    // No text in JSON spans lines.
    let documents = text
        .split("\n---\n")
        .filter(|document| !document.trim().is_empty());
    let documents = documents.map(|document| {
        let is_object = document.trim_start().starts_with('{');
        is_object.then(|| serde_json::from_str(document).ok())?
    });
    documents.collect()
}

fn documents<T: serde::de::DeserializeOwned>(text: &str) -> Result<Vec<T>, String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    if let Some(documents) = json_documents(text) {
        return Ok(documents);
    }
    match serde_saphyr::from_multiple_with_options::<Option<T>>(text, options(text.len())) {
        Ok(documents) => Ok(documents.into_iter().flatten().collect()),
        Err(error) => {
            let mut message = error.to_string();
            let is_over = |breach: &BudgetBreach| matches!(breach, BudgetBreach::Depth { .. });
            let is_too_deep = match error.without_snippet() {
                serde_saphyr::Error::Budget { breach, .. } => is_over(breach),
                // The scanner has a limit of its own.
                _ => message.starts_with("recursion limit exceeded"),
            };
            if is_too_deep {
                message = format!("it is nested more than {DEEPEST} levels deep");
            }
            message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
            Err(message)
        }
    }
}

/// Bounds what aliases can make of a text by its length, with room for small ones.
fn options(length: usize) -> serde_saphyr::Options {
    let most = 2 * length + 1024;
    serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_depth: DEEPEST,
            max_events: 2 * most,
            max_nodes: most,
            max_total_scalar_bytes: most,
            max_recorded_anchor_events: most,
            max_recorded_anchor_bytes: most,
            max_aliases: most,
            max_anchors: most,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: most,
        },
    }
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
