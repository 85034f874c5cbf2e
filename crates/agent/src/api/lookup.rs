//! Finds the pods, claims and drivers that a name in a request refers to.

use std::collections::{BTreeMap, BTreeSet};

use devlet_client::v1;
use devlet_core::dra::claims::{Claim, ClaimKey};
use devlet_core::dra::view::{ClaimView, Phase};
use devlet_core::{ClaimUid, DriverName, Node, Pod, PodName, PodUid};
use tonic::Status;

use super::convert::pod_id;
use super::convert_claims::id;
use crate::cluster::{ClusterState, WaitingPod};
use crate::display::{NamedPod, pod_label};
use crate::manifest;

/// The reason why a text does not name one pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodLookupError {
    /// The text is empty.
    #[error("no pod is named: say its UID, its name, or namespace/name")]
    Empty,
    /// No pod has this name or UID.
    #[error("no such pod: {name}")]
    Unknown {
        /// The text.
        name: String,
    },
    /// The pod is one of an API server that waits.
    #[error("pod {name} of the API server is not admitted: {reason}")]
    NotAdmitted {
        /// The text.
        name: String,
        /// What the pod waits for.
        reason: String,
    },
    /// Several pods have this name.
    #[error("several pods are called {name}: name one of {}", .pods.join(", "))]
    Ambiguous {
        /// The text.
        name: String,
        /// The pods, with their namespaces.
        pods: Vec<String>,
    },
    /// The text is the UID of one pod and the name of others.
    #[error(
        "{name} is the UID of one pod and the name of another: say uid:{name} for {}, or {}",
        .of.as_deref().unwrap_or("the first"), .named.join(" or ")
    )]
    UidOrName {
        /// The text.
        name: String,
        /// The pod with this UID, if it has a name.
        of: Option<String>,
        /// The pods with this name, with their namespaces.
        named: Vec<String>,
    },
}

/// The reason why a text does not name one claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimLookupError {
    /// No claim has this name or UID.
    #[error("no such claim on this node: {name}")]
    Unknown {
        /// The text.
        name: String,
    },
    /// Several claims have this name.
    #[error("several claims are called {name}: name one of {}", .claims.join(", "))]
    Ambiguous {
        /// The text.
        name: String,
        /// The claims, with their namespaces.
        claims: Vec<String>,
    },
}

/// There is no driver of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no such driver: {driver} has not registered since devlet started, and no claim has devices of it")]
pub struct UnknownDriver {
    /// The name.
    pub driver: String,
}

/// The reason why a driver cannot be abandoned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NothingToAbandon {
    /// The pod does not have a claim with devices of the driver.
    #[error("pod {pod} does not have a claim with devices of driver {driver}{}", those(.drivers))]
    ByPod {
        /// The pod.
        pod: NamedPod,
        /// The driver.
        driver: DriverName,
        /// The drivers of its claims.
        drivers: BTreeSet<DriverName>,
    },
    /// The claim does not have devices of the driver.
    #[error("ResourceClaim {claim} does not have devices of driver {driver}{}", those(.drivers))]
    ByClaim {
        /// The claim.
        claim: ClaimKey,
        /// The driver.
        driver: DriverName,
        /// The drivers of its claims.
        drivers: BTreeSet<DriverName>,
    },
    /// The request does not name a driver.
    #[error("ResourceClaim {claim}: name the drivers to give up on{}", those(.drivers))]
    NoDriver {
        /// The claim.
        claim: ClaimKey,
        /// The drivers of its claims.
        drivers: BTreeSet<DriverName>,
    },
    /// Pods use the claim.
    #[error(
        "ResourceClaim {claim} is not to be unprepared as long as pods want it; remove them: {}",
        .pods.join(", ")
    )]
    Held {
        /// The claim.
        claim: ClaimKey,
        /// The pods.
        pods: Vec<String>,
    },
}

fn those(drivers: &BTreeSet<DriverName>) -> String {
    let drivers: Vec<&str> = drivers.iter().map(DriverName::as_str).collect();
    match drivers.len() {
        0 => ", nor of any other".to_owned(),
        _ => format!(", only of {}", drivers.join(", ")),
    }
}

/// Finds a recorded pod by UID, `uid:` and a UID, `namespace/name`, or a name that is unique among namespaces.
pub(super) fn find_pod(node: &Node, name: &str) -> Result<PodUid, PodLookupError> {
    let unknown = || PodLookupError::Unknown {
        name: name.to_owned(),
    };
    // Claims of unknown pods have an empty pod UID, which must not match.
    if name.strip_prefix("uid:").unwrap_or(name).is_empty() {
        return Err(PodLookupError::Empty);
    }
    // Names do not contain a colon.
    if let Some(uid) = name.strip_prefix("uid:") {
        let pod = node.pod(&PodUid::from(uid));
        return pod.map(|pod| pod.uid.clone()).ok_or_else(unknown);
    }
    if let Some((namespace, name)) = name.split_once('/') {
        let name = PodName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        return node
            .pod_named(&name)
            .map(|pod| pod.uid.clone())
            .ok_or_else(unknown);
    }
    let named: Vec<_> = node.pods().filter(|pod| pod.name.name == name).collect();
    let full = |pod: &Pod| format!("{}/{}", pod.name.namespace, pod.name.name);
    if let Some(pod) = node.pod(&PodUid::from(name)) {
        let others = named.iter().filter(|other| other.uid != pod.uid);
        let named: Vec<String> = others.map(|other| full(other)).collect();
        if named.is_empty() {
            return Ok(pod.uid.clone());
        }
        return Err(PodLookupError::UidOrName {
            name: name.to_owned(),
            of: (!pod.name.name.is_empty()).then(|| full(pod)),
            named,
        });
    }
    match named[..] {
        [] => Err(unknown()),
        [pod] => Ok(pod.uid.clone()),
        [..] => Err(PodLookupError::Ambiguous {
            name: name.to_owned(),
            pods: named.into_iter().map(full).collect(),
        }),
    }
}

/// Finds the pods of a cluster that wait and have this name or UID. Several pods may have one name: deleted ones
/// and their replacement.
pub(super) fn find_waiting(state: &ClusterState, name: &str) -> Result<Vec<PodUid>, PodLookupError> {
    let is_meant =
        |(uid, pod): &(&PodUid, &WaitingPod)| match (name.strip_prefix("uid:"), name.split_once('/')) {
            (Some(wanted), _) => uid.as_str() == wanted,
            (None, Some((namespace, name))) => pod.name.namespace == namespace && pod.name.name == name,
            (None, None) => pod.name.name == name || uid.as_str() == name,
        };
    let found: Vec<_> = state.waiting.iter().filter(is_meant).collect();
    let names: BTreeSet<String> = found.iter().map(|(_, pod)| pod_label(&pod.name)).collect();
    let name = name.to_owned();
    match names.len() {
        0 => Err(PodLookupError::Unknown { name }),
        1 => Ok(found.into_iter().map(|(uid, _)| uid.clone()).collect()),
        _ => Err(PodLookupError::Ambiguous {
            name,
            pods: names.into_iter().collect(),
        }),
    }
}

/// Returns the error for a pod that must be admitted, if it is not: the pod may be one that waits.
pub(super) fn not_admitted(state: &ClusterState, error: PodLookupError) -> PodLookupError {
    let PodLookupError::Unknown { name } = &error else {
        return error;
    };
    let found = find_waiting(state, name).unwrap_or_default();
    let pod = found.first().and_then(|uid| state.waiting.get(uid));
    match pod {
        Some(pod) => PodLookupError::NotAdmitted {
            name: pod_label(&pod.name),
            reason: pod.reason.clone(),
        },
        None => error,
    }
}

/// Finds a pod without a record: one that is being admitted, or one that is gone while drivers unprepare its claims.
///
/// Only the UID of a pod in admission is known: the given one, or the one that is derived from the name.
pub(super) fn find_unrecorded(node: &Node, name: &str) -> Option<PodUid> {
    let (namespace, short) = name.split_once('/').unwrap_or(("default", name));
    let derived = manifest::derived_uid(&PodName {
        namespace: namespace.to_owned(),
        name: short.to_owned(),
    });
    // A text with a slash is a name, although UIDs in a kubelet's file may contain one, too.
    let uid = match name.strip_prefix("uid:") {
        Some(uid) => Some(uid),
        None => (!name.contains('/')).then_some(name),
    };
    // A recorded pod with this UID has another name, or none, and does not match.
    let is_unrecorded = |uid: &PodUid| {
        node.pod(uid).is_none() && (node.is_in_flight(uid) || !node.pending_unprepare(uid).is_empty())
    };
    (uid.map(PodUid::from).into_iter().chain([derived]))
        .find(is_unrecorded)
        .or_else(|| pod_that_left(node, name))
}

/// Finds a pod to remove, with a record or without.
pub(super) fn find_to_remove(node: &Node, name: &str) -> Result<PodUid, PodLookupError> {
    match find_pod(node, name) {
        Err(unknown @ PodLookupError::Unknown { .. }) => find_unrecorded(node, name).ok_or(unknown),
        found => found,
    }
}

/// Finds claims by UID, `uid:` and a UID, `namespace/name`, or a name that is unique among namespaces. Several claims may
/// have one name: the current one, and older ones that are being unprepared.
pub(super) fn find_claims(node: &Node, name: &str) -> Result<Vec<ClaimUid>, ClaimLookupError> {
    let uid = ClaimUid::from(name.strip_prefix("uid:").unwrap_or(name));
    if node.claim(&uid).is_some_and(|view| is_shown(&view)) {
        return Ok(vec![uid]);
    }
    let is_meant = |key: &ClaimKey| match name.split_once('/') {
        Some((namespace, name)) => key.namespace == namespace && key.name == name,
        None => key.name == name,
    };
    let mut found: BTreeMap<ClaimKey, Vec<ClaimUid>> = BTreeMap::new();
    for view in shown_claims(node).filter(|view| is_meant(&view.claim.key)) {
        let uids = found.entry(view.claim.key.clone()).or_default();
        uids.push(view.claim.uid.clone());
    }
    let mut keys = found.keys().map(ToString::to_string);
    let (first, others): (Option<String>, Vec<String>) = (keys.next(), keys.collect());
    match (first, others.len()) {
        (None, _) => Err(ClaimLookupError::Unknown {
            name: name.to_owned(),
        }),
        (Some(_), 0) => Ok(found.into_values().flatten().collect()),
        (Some(first), _) => Err(ClaimLookupError::Ambiguous {
            name: name.to_owned(),
            claims: std::iter::once(first).chain(others).collect(),
        }),
    }
}

/// Returns `false` for a claim that every driver has unprepared, whose record is about to be deleted.
fn is_shown(view: &ClaimView<'_>) -> bool {
    view.phase != Phase::Unprepared
}

/// Returns all claims, except those that every driver has unprepared.
pub(super) fn shown_claims(node: &Node) -> impl Iterator<Item = ClaimView<'_>> {
    node.claims().filter(is_shown)
}

/// Finds claims as [`find_claims`] does, and returns their names and UIDs.
pub(super) fn claim_ids(node: &Node, name: &str) -> Result<Vec<v1::ClaimId>, ClaimLookupError> {
    let uids = find_claims(node, name)?;
    let views = uids.iter().filter_map(|uid| node.claim(uid));
    Ok(views.map(|view| id(&view.claim.key, &view.claim.uid)).collect())
}

/// Checks that the claims of a pod have devices of each driver.
pub(super) fn check_abandoned(
    node: &Node,
    pod: &PodUid,
    drivers: &BTreeSet<DriverName>,
) -> Result<(), NothingToAbandon> {
    let known = drivers_of(node, pod);
    match drivers.iter().find(|driver| !known.contains(*driver)) {
        None => Ok(()),
        Some(driver) => Err(NothingToAbandon::ByPod {
            pod: NamedPod::of(node, pod),
            driver: driver.clone(),
            drivers: known,
        }),
    }
}

/// Finds the unused claims of a name, and checks that they have devices of each driver.
pub(super) fn find_to_abandon(
    node: &Node,
    name: &str,
    drivers: &BTreeSet<DriverName>,
) -> Result<Vec<ClaimUid>, Status> {
    let uids = find_claims(node, name)?;
    let views: Vec<ClaimView<'_>> = uids.iter().filter_map(|uid| node.claim(uid)).collect();
    let left: Vec<&Claim> = views
        .iter()
        .filter(|view| view.pods.is_empty())
        .map(|view| view.claim)
        .collect();
    let Some(claim) = left.first().map(|claim| claim.key.clone()) else {
        let unknown = ClaimLookupError::Unknown {
            name: name.to_owned(),
        };
        let Some(view) = views.first() else {
            return Err(unknown.into());
        };
        let pods = view.pods.iter().map(|pod| {
            let id = pod_id(node, pod);
            match id.name.is_empty() {
                true => id.uid,
                false => format!("{}/{}", id.namespace, id.name),
            }
        });
        let (claim, pods) = (view.claim.key.clone(), pods.collect());
        return Err(NothingToAbandon::Held { claim, pods }.into());
    };
    let known: BTreeSet<DriverName> = left
        .iter()
        .flat_map(|claim| claim.preparations.keys().cloned())
        .collect();
    if drivers.is_empty() {
        let drivers = known;
        return Err(NothingToAbandon::NoDriver { claim, drivers }.into());
    }
    match drivers.iter().find(|driver| !known.contains(*driver)) {
        None => Ok(left.iter().map(|claim| claim.uid.clone()).collect()),
        Some(driver) => Err(NothingToAbandon::ByClaim {
            claim,
            driver: driver.clone(),
            drivers: known,
        }
        .into()),
    }
}

/// Finds the only pod of this name that is gone and has claims left.
pub(super) fn pod_that_left(node: &Node, name: &str) -> Option<PodUid> {
    let is_meant = |pod: &PodName| match name.split_once('/') {
        _ if pod.name.is_empty() => false,
        Some((namespace, name)) => pod.namespace == namespace && pod.name == name,
        None => pod.name == name,
    };
    let left = node
        .claims()
        .filter(|view| view.pods.is_empty() && !view.waits.is_empty());
    let left = left.filter(|view| is_meant(&view.claim.pod_name));
    let pods: BTreeSet<PodUid> = left.map(|view| view.claim.pod.clone()).collect();
    let mut pods = pods.into_iter();
    pods.next().filter(|_| pods.next().is_none())
}

/// Returns the drivers of the claims that a pod holds or left behind.
fn drivers_of(node: &Node, pod: &PodUid) -> BTreeSet<DriverName> {
    let held = node.pod(pod).map(|pod| pod.claim_uids()).unwrap_or_default();
    let held = held.iter().filter_map(|uid| node.claim(uid));
    let held = held.flat_map(|view| view.claim.preparations.keys().cloned());
    let left = node
        .claims()
        .filter(|view| view.pods.is_empty() && view.claim.pod == *pod);
    let left = left.flat_map(|view| view.claim.preparations.keys().cloned());
    held.chain(left).collect()
}

#[cfg(test)]
mod tests;
