//! Drivers and claims: which one a caller means, and the messages about them.

use std::collections::{BTreeMap, BTreeSet};

use devlet_client::v1;
use devlet_core::dra::claims::{
    AllocatedDevice, Claim, ClaimKey, Preparation, PreparationState, PreparedDevice,
};
use devlet_core::dra::health::DeviceHealth;
use devlet_core::dra::view::{
    ClaimView, ClaimedDeviceView, DriverPluginView, DriverView, Phase, Reason, Wait,
};
use devlet_core::{ClaimUid, DriverName, Moment, Node, PodName, PodUid};
use tonic::Status;

use super::convert::{age, last_plugin, number, pod_id};
use crate::display::{self, NamedPod};

/// Why a text does not lead to a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimLookupError {
    /// None is called that.
    #[error("no such claim on this node: {name}")]
    Unknown {
        /// The text.
        name: String,
    },
    /// Several are.
    #[error("several claims are called {name}: name one of {}", .claims.join(", "))]
    Ambiguous {
        /// The text.
        name: String,
        /// With their namespaces.
        claims: Vec<String>,
    },
}

/// There is no driver of that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no such driver: {driver} has not registered since devlet started, and no claim has devices of it")]
pub struct UnknownDriver {
    /// The name.
    pub driver: String,
}

/// Why a driver cannot be given up on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NothingToAbandon {
    /// The removal of a pod does not wait for it.
    #[error("pod {pod} has no claim with devices of driver {driver}{}", those(.drivers))]
    ByPod {
        /// The pod.
        pod: NamedPod,
        /// The driver.
        driver: DriverName,
        /// Those that it has.
        drivers: BTreeSet<DriverName>,
    },
    /// The claim has nothing of it.
    #[error("ResourceClaim {claim} has no devices of driver {driver}{}", those(.drivers))]
    ByClaim {
        /// The claim.
        claim: ClaimKey,
        /// The driver.
        driver: DriverName,
        /// Those that it has.
        drivers: BTreeSet<DriverName>,
    },
    /// No driver is named.
    #[error("ResourceClaim {claim}: name the drivers to give up on{}", those(.drivers))]
    NoDriver {
        /// The claim.
        claim: ClaimKey,
        /// Those that it has.
        drivers: BTreeSet<DriverName>,
    },
    /// The claim is in use.
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

/// The claims that a caller means: by UID, `uid:` and a UID, `namespace/name`, or a name that only one namespace has. A
/// claim and an older one of the same name may both be there.
pub(super) fn find(node: &Node, name: &str) -> Result<Vec<ClaimUid>, ClaimLookupError> {
    let uid = ClaimUid::from(name.strip_prefix("uid:").unwrap_or(name));
    if node.claim(&uid).is_some_and(|view| is_shown(&view)) {
        return Ok(vec![uid]);
    }
    let is_meant = |key: &ClaimKey| match name.split_once('/') {
        Some((namespace, name)) => key.namespace == namespace && key.name == name,
        None => key.name == name,
    };
    let mut found: BTreeMap<ClaimKey, Vec<ClaimUid>> = BTreeMap::new();
    for view in shown(node).filter(|view| is_meant(&view.claim.key)) {
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

/// Returns `false` for a claim that every driver has unprepared: only its record is left, to be deleted.
fn is_shown(view: &ClaimView<'_>) -> bool {
    view.phase != Phase::Unprepared
}

/// All claims that are shown.
pub(super) fn shown(node: &Node) -> impl Iterator<Item = ClaimView<'_>> {
    node.claims().filter(is_shown)
}

/// The same, in full.
pub(super) fn ids(node: &Node, name: &str) -> Result<Vec<v1::ClaimId>, ClaimLookupError> {
    let uids = find(node, name)?;
    let views = uids.iter().filter_map(|uid| node.claim(uid));
    Ok(views.map(|view| id(&view.claim.key, &view.claim.uid)).collect())
}

/// Whether there is something to give up on for each driver.
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

/// The claims of a name that no pod wants, if there is something to give up on for each driver.
pub(super) fn find_to_abandon(
    node: &Node,
    name: &str,
    drivers: &BTreeSet<DriverName>,
) -> Result<Vec<ClaimUid>, Status> {
    let uids = find(node, name)?;
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

/// The pod of this name, of which only claims are left, if it is clear which one is meant.
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

/// The drivers of the claims that a pod holds, or has left.
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

/// All claims, or those of a name.
pub(super) fn claims(node: &Node, name: &str, now: Moment) -> Vec<v1::Claim> {
    let mut claims: Vec<v1::Claim> = if name.is_empty() {
        shown(node).map(|view| claim(node, &view, now)).collect()
    } else {
        let uids = find(node, name).unwrap_or_default();
        let views = uids.iter().filter_map(|uid| node.claim(uid));
        views.map(|view| claim(node, &view, now)).collect()
    };
    claims.sort_by_cached_key(|claim| {
        let id = claim.id.clone().unwrap_or_default();
        (id.namespace, id.name, id.uid)
    });
    claims
}

/// All drivers, or one.
pub(super) fn drivers(node: &Node, name: &str, now: Moment) -> Vec<v1::Driver> {
    let is_meant = |driver: &DriverName| name.is_empty() || driver.as_str() == name;
    let registered = node.drivers().into_iter();
    let mut drivers: BTreeMap<DriverName, v1::Driver> = registered
        .filter(|view| is_meant(&view.name))
        .map(|view| (view.name.clone(), driver(view, now)))
        .collect();
    for view in shown(node) {
        for name in view.claim.preparations.keys().filter(|name| is_meant(name)) {
            let driver = drivers.entry(name.clone()).or_insert_with(|| v1::Driver {
                name: name.to_string(),
                ..v1::Driver::default()
            });
            driver.claims += 1;
            let waits = view.waits.iter().filter(|wait| wait.driver == *name);
            driver.waits.extend(waits.map(wait));
        }
    }
    drivers.into_values().collect()
}

/// All plugins of drivers that are not taken in, or those of one.
pub(super) fn refused(node: &Node, name: &str, now: Moment) -> Vec<v1::RefusedDriver> {
    let refused = node.refused_drivers();
    let refused = refused.filter(|(_, each)| name.is_empty() || each.refusal.driver == name);
    let refused = refused.map(|(socket, each)| v1::RefusedDriver {
        name: each.refusal.driver.clone(),
        socket: socket.to_owned(),
        reason: each.refusal.reason.clone(),
        hint: each.refusal.hint.clone(),
        refused_at_ms: each.at.0,
        age_ms: age(each.at, now),
        attempts: each.attempts,
    });
    refused.collect()
}

fn driver(view: DriverView, now: Moment) -> v1::Driver {
    let plugin = |plugin: DriverPluginView| v1::DriverPlugin {
        endpoint: plugin.endpoint,
        uid: plugin.uid,
        service: plugin.service,
        service_reason: plugin.service_reason,
        health_service: plugin.health_service.unwrap_or_default(),
        registered_at_ms: plugin.registered_at.0,
        age_ms: age(plugin.registered_at, now),
        connected: plugin.connected,
        serving: plugin.serving,
        connection: plugin.connection.to_string(),
    };
    v1::Driver {
        name: view.name.to_string(),
        plugins: view.plugins.into_iter().map(plugin).collect(),
        unusable_since_ms: view.unusable_since.map(|since| since.0),
        unusable_for_ms: view.unusable_since.map_or(0, |since| age(since, now)),
        last_plugin: view.last.map(|last| last_plugin(last, now)),
        claims: 0,
        waits: Vec::new(),
    }
}

pub(super) fn phase(phase: Phase) -> v1::ClaimPhase {
    match phase {
        Phase::Preparing => v1::ClaimPhase::Preparing,
        Phase::Prepared => v1::ClaimPhase::Prepared,
        Phase::Unpreparing | Phase::Unprepared => v1::ClaimPhase::Unpreparing,
        Phase::Abandoned => v1::ClaimPhase::Abandoned,
    }
}

pub(super) fn claim(node: &Node, view: &ClaimView<'_>, now: Moment) -> v1::Claim {
    let claim = view.claim;
    let drivers = claim.preparations.iter();
    let pods = view.pods.iter().filter_map(|uid| node.pod(uid));
    let first_admitted = pods.filter_map(|pod| pod.metadata.admitted_at).min();
    v1::Claim {
        id: Some(id(&claim.key, &claim.uid)),
        phase: phase(view.phase).into(),
        pods: view.pods.iter().map(|pod| pod_id(node, pod)).collect(),
        last_pod: view.pods.is_empty().then(|| v1::PodId {
            uid: claim.pod.to_string(),
            namespace: claim.pod_name.namespace.clone(),
            name: claim.pod_name.name.clone(),
        }),
        drivers: drivers
            .map(|(name, each)| preparation(node, name, each, !view.pods.is_empty(), now))
            .collect(),
        waits: view.waits.iter().map(wait).collect(),
        admitted_at_ms: first_admitted.map_or(0, |moment| moment.0),
        age_ms: first_admitted.map_or(0, |moment| age(moment, now)),
    }
}

fn preparation(
    node: &Node,
    driver: &DriverName,
    preparation: &Preparation,
    is_used: bool,
    now: Moment,
) -> v1::ClaimDriver {
    let state = match preparation.state {
        PreparationState::Pending => v1::PreparationState::Pending,
        PreparationState::Prepared => v1::PreparationState::Prepared,
        PreparationState::Unprepared => v1::PreparationState::Unprepared,
        PreparationState::Abandoned => v1::PreparationState::Abandoned,
    };
    let allocated = |device: &AllocatedDevice| v1::AllocatedDevice {
        request: device.request.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share.clone(),
        admin_access: device.admin_access,
    };
    let prepared = |device: &PreparedDevice| {
        let (health, message) = node.device_health(driver, &device.place(), now);
        claim_device(device.clone(), health, message.to_owned())
    };
    let missing = preparation.missing_devices().filter(|_| is_used);
    v1::ClaimDriver {
        name: driver.to_string(),
        state: state.into(),
        allocated: preparation.allocated.iter().flatten().map(allocated).collect(),
        skip_node_operations: preparation.skip.iter().cloned().collect(),
        devices: preparation.devices.iter().map(prepared).collect(),
        not_prepared: missing.map(allocated).collect(),
    }
}

pub(super) fn health(health: DeviceHealth) -> v1::DeviceHealth {
    match health {
        DeviceHealth::Unknown => v1::DeviceHealth::Unknown,
        DeviceHealth::Healthy => v1::DeviceHealth::Healthy,
        DeviceHealth::Unhealthy => v1::DeviceHealth::Unhealthy,
    }
}

fn claim_device(device: PreparedDevice, health: DeviceHealth, health_message: String) -> v1::ClaimDevice {
    v1::ClaimDevice {
        requests: device.requests,
        pool: device.pool,
        device: device.device,
        share_id: device.share,
        cdi_devices: device.cdi_devices,
        health: self::health(health).into(),
        health_message,
    }
}

/// A device that a container uses.
pub(super) fn used_device(view: ClaimedDeviceView) -> v1::UsedDevice {
    v1::UsedDevice {
        claim: view.claim,
        request: view.request.unwrap_or_default(),
        id: Some(id(&view.key, &view.uid)),
        driver: view.driver.to_string(),
        device: Some(claim_device(view.device, view.health, view.message)),
    }
}

pub(super) fn id(key: &ClaimKey, uid: &ClaimUid) -> v1::ClaimId {
    v1::ClaimId {
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        uid: uid.to_string(),
    }
}

pub(super) fn wait(wait: &Wait) -> v1::Wait {
    let (reason, retry_at) = match wait.reason {
        Reason::NotWritten => (v1::WaitReason::NotWritten, Moment::default()),
        Reason::NoDriver => (v1::WaitReason::NoDriver, Moment::default()),
        Reason::Calling => (v1::WaitReason::Calling, Moment::default()),
        Reason::Due(at) => (v1::WaitReason::Due, at),
    };
    v1::Wait {
        claim: Some(id(&wait.claim, &wait.uid)),
        driver: wait.driver.to_string(),
        text: display::wait(wait),
        reason: reason.into(),
        retry_at_ms: retry_at.0,
        failure: wait.failure.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// How many drivers and claims there are, and how many of them have nobody to call or are waiting.
pub(super) struct Counts {
    pub(super) drivers: u64,
    pub(super) drivers_without_plugin: u64,
    pub(super) claims: u64,
    pub(super) claims_waiting: u64,
}

pub(super) fn counts(node: &Node) -> Counts {
    let drivers = node.drivers();
    let unusable = drivers.iter().filter(|view| view.unusable_since.is_some());
    Counts {
        drivers: number(drivers.len()),
        drivers_without_plugin: number(unusable.count()),
        claims: number(shown(node).count()),
        claims_waiting: number(shown(node).filter(|view| !view.waits.is_empty()).count()),
    }
}
