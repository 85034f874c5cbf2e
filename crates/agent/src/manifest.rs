//! A Kubernetes Pod manifest, as far as devices are concerned.
//!
//! Everything that is not about devices is ignored: it is a standard Pod, and says much that is for others. What
//! is about devices is held to the rules of the Kubernetes API, because a pod that asks for devices in a way that
//! nobody hears would be admitted without them: extended resources are asked for in `limits`, by containers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use devlet_core::{
    ContainerKind, ContainerName, ContainerRequest, PodName, PodRequest, PodUid, ResourceName, Source,
};
use serde::Deserialize;
use serde::de::{self, DeserializeOwned};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::device_plugin::resource_name;

/// Derived UIDs are UUIDs of version 5 of `namespace/name` in this namespace, which is ours and never changes: other
/// programs can derive them too.
pub const UID_NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_5c0e_8a7b_4b0f_9d53_2b7c_41e6_90a4);

/// The longest namespace and name of a container: a DNS label.
const LONGEST_LABEL: usize = 63;

/// The longest name of a pod: a DNS name. A UID is not longer either.
const LONGEST_NAME: usize = 253;

/// Why a text is no pod that could be admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// Nothing in it.
    #[error("the manifest is empty")]
    Empty,
    /// Several YAML documents.
    #[error("the manifest has several documents (---): admit one pod at a time")]
    SeveralDocuments,
    /// Neither JSON nor YAML, or of another shape than a Pod.
    #[error("the manifest is not a Pod: {message}")]
    Malformed {
        /// What the parser says, with the place.
        message: String,
    },
    /// Another object.
    #[error("the manifest is a {api_version} {kind}, not a v1 Pod")]
    NotAPod {
        /// Its `apiVersion`.
        api_version: String,
        /// Its `kind`.
        kind: String,
    },
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A name that Kubernetes would not take.
    #[error("{field}: {value:?} is not {rule}")]
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
    #[error("container {container}: {resource}: {value:?} is not a quantity: {problem}")]
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
        "container {container}: {resource:?} is not the name of an extended resource, such as acme.com/gpu"
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
    /// Dynamic resource allocation.
    #[error("container {container} wants resource claims, which devlet does not serve yet")]
    Claims {
        /// The container.
        container: String,
    },
}

/// Why a text is not a quantity of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidQuantity {
    /// Not written as Kubernetes quantities are.
    #[error("write a number such as 2")]
    Malformed,
    /// Less than nothing.
    #[error("it is negative")]
    Negative,
    /// More than any node has.
    #[error("it is too large")]
    TooLarge,
}

/// What the pod of a manifest asks for. Resources that are not for device plugins, or `foreign`, are left out.
pub fn parse(text: &str, source: Source, foreign: &[String]) -> Result<PodRequest, InvalidManifest> {
    let manifest: Manifest = document(text)?;
    manifest.check_kind()?;
    let metadata = manifest.metadata.ok_or(InvalidManifest::Missing("metadata"))?;
    let name = pod_name(&metadata)?;
    let spec = manifest.spec.ok_or(InvalidManifest::Missing("spec"))?;
    if let Some(resource) = spec.resources.iter().flat_map(Resources::names).find(|name| {
        // What is not for us may stand here: CPU, memory and huge pages.
        resource_name::is_ours(name, foreign)
    }) {
        return Err(InvalidManifest::PodLevel {
            resource: resource.to_owned(),
        });
    }
    let (containers, fingerprint) = containers(spec, foreign)?;
    let uid = match metadata.uid.filter(|uid| !uid.is_empty()) {
        Some(uid) => checked_uid(uid)?,
        None => derived_uid(&name),
    };
    Ok(PodRequest {
        uid,
        name,
        source,
        fingerprint,
        containers,
        claims: Vec::new(),
    })
}

/// The UID of a pod whose manifest has none.
pub fn derived_uid(name: &PodName) -> PodUid {
    let text = format!("{}/{}", name.namespace, name.name);
    PodUid::from(Uuid::new_v5(&UID_NAMESPACE, text.as_bytes()).to_string())
}

fn document<T: DeserializeOwned>(text: &str) -> Result<T, InvalidManifest> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(InvalidManifest::Empty);
    }
    if text.trim_start().starts_with('{')
        && let Ok(value) = serde_json::from_str::<Option<T>>(text)
    {
        return value.ok_or(InvalidManifest::Empty);
    }
    // JSON that is none may still be YAML: {kind: Pod}.
    match serde_saphyr::from_multiple_with_options::<Option<T>>(text, options(text.len())) {
        Ok(documents) => {
            let mut documents = documents.into_iter().flatten();
            match (documents.next(), documents.next()) {
                (None, _) => Err(InvalidManifest::Empty),
                (Some(only), None) => Ok(only),
                (Some(_), Some(_)) => Err(InvalidManifest::SeveralDocuments),
            }
        }
        Err(error) => Err(InvalidManifest::Malformed {
            message: error.to_string(),
        }),
    }
}

/// Bounds what aliases can make of a text by its length, with room for small ones.
fn options(length: usize) -> serde_saphyr::Options {
    let most = 2 * length + 1024;
    serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        with_snippet: false,
        budget: serde_saphyr::budget! {
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

/// The containers, and the fingerprint of the whole.
fn containers(spec: Spec, foreign: &[String]) -> Result<(Vec<ContainerRequest>, u64), InvalidManifest> {
    let app = spec.containers.unwrap_or_default();
    if app.is_empty() {
        return Err(InvalidManifest::Missing("spec.containers"));
    }
    let mut requests = Vec::new();
    let mut fingerprint = Fingerprint::default();
    let mut names = BTreeSet::new();
    let init = spec
        .init_containers
        .unwrap_or_default()
        .into_iter()
        .map(|container| {
            let kind = match container.restart_policy.as_deref() {
                Some("Always") => ContainerKind::Sidecar,
                _ => ContainerKind::Init,
            };
            (kind, container)
        });
    for (kind, container) in init.chain(app.into_iter().map(|container| (ContainerKind::App, container))) {
        let field = match kind {
            ContainerKind::App => "spec.containers",
            ContainerKind::Init | ContainerKind::Sidecar => "spec.initContainers",
        };
        let name = container.name.unwrap_or_default();
        check_label(&format!("{field}.name"), &name)?;
        if !names.insert(name.clone()) {
            return Err(InvalidManifest::DuplicateContainer(name));
        }
        let resources = container.resources.unwrap_or_default();
        fingerprint.add_container(kind, &name, &resources);
        let wants = wants(&name, resources, foreign)?;
        requests.push(ContainerRequest {
            name: ContainerName::from(name),
            kind,
            wants,
            claims: Vec::new(),
        });
    }
    Ok((requests, fingerprint.finish()))
}

fn wants(
    container: &str,
    resources: Resources,
    foreign: &[String],
) -> Result<BTreeMap<ResourceName, usize>, InvalidManifest> {
    let container = || container.to_owned();
    if resources.claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return Err(InvalidManifest::Claims {
            container: container(),
        });
    }
    let count = |resource: &str, value: &Scalar| {
        quantity(&value.0).map_err(|problem| InvalidManifest::Quantity {
            container: container(),
            resource: resource.to_owned(),
            value: value.0.clone(),
            problem,
        })
    };
    let limits = resources.limits.unwrap_or_default();
    let mut wants = BTreeMap::new();
    for (resource, value) in &limits {
        if !resource_name::is_ours(resource, foreign) {
            continue;
        }
        let Ok(name) = resource_name::parse(resource) else {
            return Err(InvalidManifest::Resource {
                container: container(),
                resource: resource.clone(),
            });
        };
        let count = count(resource, value)?;
        // A resource that is wanted zero times is not wanted.
        if count > 0 {
            wants.insert(name, count);
        }
    }
    for (resource, requested) in resources.requests.unwrap_or_default() {
        if !resource_name::is_ours(&resource, foreign) {
            continue;
        }
        let Some(limited) = limits.get(&resource) else {
            return Err(InvalidManifest::RequestsOnly {
                container: container(),
                resource,
            });
        };
        if count(&resource, &requested)? != count(&resource, limited)? {
            return Err(InvalidManifest::RequestsDiffer {
                container: container(),
                resource,
                requested: requested.0,
                limited: limited.0.clone(),
            });
        }
    }
    Ok(wants)
}

/// A Kubernetes quantity as a number of devices: parts of a device count as a whole one.
fn quantity(text: &str) -> Result<usize, InvalidQuantity> {
    use InvalidQuantity::{Malformed, Negative, TooLarge};
    /// How many digits behind the point are reckoned with; of others it only counts whether there are any.
    const PLACES: u32 = 18;
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let is_number = |each: char| each.is_ascii_digit() || each == '.';
    let (number, suffix) = rest.split_at(rest.find(|each| !is_number(each)).unwrap_or(rest.len()));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || number.len() > 1000 {
        return Err(Malformed);
    }
    let (binary, decimal) = scale(suffix).ok_or(Malformed)?;
    let digits: Vec<u8> = whole
        .bytes()
        .chain(fraction.bytes())
        .map(|digit| digit - b'0')
        .collect();
    if digits.is_empty() {
        return Err(Malformed);
    }
    let Some(first) = (0_i64..)
        .zip(&digits)
        .find(|(_, digit)| **digit != 0)
        .map(|(place, _)| place)
    else {
        return Ok(0);
    };
    if negative {
        return Err(Negative);
    }
    // The place of the point among the digits, or beyond them.
    let point = decimal + i64::try_from(whole.len()).map_err(|_| TooLarge)?;
    if point - first > 19 {
        return Err(TooLarge);
    }
    let digit = |place: i64| {
        usize::try_from(place)
            .ok()
            .and_then(|place| digits.get(place))
            .map_or(0, |digit| *digit)
    };
    let value =
        (first..point + i64::from(PLACES)).fold(0_u128, |value, place| value * 10 + u128::from(digit(place)));
    let more = (0_i64..)
        .zip(&digits)
        .any(|(place, digit)| place >= point + i64::from(PLACES) && *digit != 0);
    let scaled = value
        .checked_mul(1 << binary)
        .and_then(|value| value.checked_add(u128::from(more)));
    let count = scaled.ok_or(TooLarge)?.div_ceil(10_u128.pow(PLACES));
    // The largest quantity that Kubernetes knows.
    i64::try_from(count)
        .ok()
        .and_then(|count| usize::try_from(count).ok())
        .ok_or(TooLarge)
}

/// The powers of two and of ten that a suffix stands for.
fn scale(suffix: &str) -> Option<(u32, i64)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|each| each.is_ascii_digit()) {
                return None;
            }
            // One that does not fit is out of all bounds as well.
            let beyond = if exponent.starts_with('-') {
                -100_000
            } else {
                100_000
            };
            (0, exponent.parse().unwrap_or(beyond).clamp(-100_000, 100_000))
        }
    })
}

fn pod_name(metadata: &Metadata) -> Result<PodName, InvalidManifest> {
    let name = metadata.name.clone().unwrap_or_default();
    if name.is_empty() {
        return Err(InvalidManifest::Missing("metadata.name"));
    }
    let valid = name.len() <= LONGEST_NAME && name.split('.').all(is_label);
    if !valid {
        let rule = "a lower-case DNS name of at most 253 characters";
        return Err(InvalidManifest::Name {
            field: "metadata.name".to_owned(),
            value: name,
            rule,
        });
    }
    let namespace = metadata
        .namespace
        .clone()
        .filter(|namespace| !namespace.is_empty());
    let namespace = namespace.unwrap_or_else(|| "default".to_owned());
    check_label("metadata.namespace", &namespace)?;
    Ok(PodName { namespace, name })
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

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
    bytes.iter().all(inner) && edge(bytes.first()) && edge(bytes.last())
}

fn checked_uid(uid: String) -> Result<PodUid, InvalidManifest> {
    let valid = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    if uid.len() <= LONGEST_NAME && uid.bytes().all(valid) {
        return Ok(PodUid::from(uid));
    }
    let rule = "a UID: at most 253 printable characters without spaces or slashes";
    Err(InvalidManifest::Name {
        field: "metadata.uid".to_owned(),
        value: uid,
        rule,
    })
}

/// A hash of what the pod asks for, of us or of somebody else: what the configuration calls foreign may change.
#[derive(Default)]
struct Fingerprint {
    hash: Sha256,
}

impl Fingerprint {
    fn add(&mut self, text: &str) {
        // With its length, so that no two lists of texts run together.
        self.hash.update((text.len() as u64).to_be_bytes());
        self.hash.update(text);
    }

    fn add_container(&mut self, kind: ContainerKind, name: &str, resources: &Resources) {
        self.add(match kind {
            ContainerKind::Init => "init",
            ContainerKind::Sidecar => "sidecar",
            ContainerKind::App => "app",
        });
        self.add(name);
        let limits = resources.limits.iter().flatten();
        let asked: BTreeMap<&str, String> = limits
            .filter(|(resource, _)| resource_name::is_ours(resource, &[]))
            .map(|(resource, value)| {
                let count = quantity(&value.0).map_or_else(|_| value.0.clone(), |count| count.to_string());
                (resource.as_str(), count)
            })
            // A resource that is wanted zero times is not wanted.
            .filter(|(_, count)| count != "0")
            .collect();
        self.add(&asked.len().to_string());
        for (resource, count) in asked {
            self.add(resource);
            self.add(&count);
        }
    }

    /// Never 0, which stands for one that is not known.
    fn finish(self) -> u64 {
        let hash = self.hash.finalize();
        let first = hash
            .iter()
            .take(8)
            .fold(0, |number, byte| number << 8 | u64::from(*byte));
        if first == 0 { 1 } else { first }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Option<Metadata>,
    spec: Option<Spec>,
}

impl Manifest {
    fn check_kind(&self) -> Result<(), InvalidManifest> {
        let api_version = self.api_version.as_deref().unwrap_or("v1");
        let kind = self.kind.as_deref().unwrap_or("Pod");
        if (api_version, kind) == ("v1", "Pod") {
            return Ok(());
        }
        Err(InvalidManifest::NotAPod {
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
        })
    }
}

#[derive(Debug, Deserialize)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    init_containers: Option<Vec<Container>>,
    containers: Option<Vec<Container>>,
    resources: Option<Resources>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    name: Option<String>,
    restart_policy: Option<String>,
    resources: Option<Resources>,
}

#[derive(Debug, Default, Deserialize)]
struct Resources {
    limits: Option<BTreeMap<String, Scalar>>,
    requests: Option<BTreeMap<String, Scalar>>,
    claims: Option<Vec<de::IgnoredAny>>,
}

impl Resources {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.limits
            .iter()
            .chain(&self.requests)
            .flatten()
            .map(|(name, _)| name.as_str())
    }
}

/// A number or a text, as text.
#[derive(Debug)]
struct Scalar(String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity")
            }

            fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests;
