//! Converts drivers, claims and DRA devices into messages of the API.

use std::collections::BTreeMap;

use devlet_client::v1;
use devlet_core::dra::claims::{AllocatedDevice, ClaimKey, Preparation, PreparationState, PreparedDevice};
use devlet_core::dra::device_view::{DeviceClaimView, DraDeviceView};
use devlet_core::dra::health::DeviceHealth;
use devlet_core::dra::view::{
    ClaimView, ClaimedDeviceView, DriverPluginView, DriverView, Phase, Reason, Wait,
};
use devlet_core::{ClaimUid, DriverName, Moment, Node, PodUid};

use super::convert::{age, last_plugin, number, pod_id};
use super::lookup::{find_claims, shown_claims};
use crate::display;

/// Returns all claims, or those of a name.
pub(super) fn claims(node: &Node, name: &str, now: Moment) -> Vec<v1::Claim> {
    let mut claims: Vec<v1::Claim> = if name.is_empty() {
        shown_claims(node).map(|view| claim(node, &view, now)).collect()
    } else {
        let uids = find_claims(node, name).unwrap_or_default();
        let views = uids.iter().filter_map(|uid| node.claim(uid));
        views.map(|view| claim(node, &view, now)).collect()
    };
    claims.sort_by_cached_key(|claim| {
        let id = claim.id.clone().unwrap_or_default();
        (id.namespace, id.name, id.uid)
    });
    claims
}

/// Returns all drivers, or one.
pub(super) fn drivers(node: &Node, name: &str, now: Moment) -> Vec<v1::Driver> {
    let is_meant = |driver: &DriverName| name.is_empty() || driver.as_str() == name;
    let registered = node.drivers().into_iter();
    let mut drivers: BTreeMap<DriverName, v1::Driver> = registered
        .filter(|view| is_meant(&view.name))
        .map(|view| (view.name.clone(), driver(view, now)))
        .collect();
    for view in shown_claims(node) {
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

/// Returns the rejected plugins of all drivers, or of one.
pub(super) fn rejected_drivers(node: &Node, name: &str, now: Moment) -> Vec<v1::RefusedDriver> {
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
        slices: Vec::new(),
    }
}

fn phase(phase: Phase) -> v1::ClaimPhase {
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
        let (health, message) = node.device_health(driver, &device.pool_device(), now);
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

fn health(health: DeviceHealth) -> v1::DeviceHealth {
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

/// Converts a device that a container uses.
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

/// Numbers of drivers and claims, and of those without a plugin or with a wait.
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
        claims: number(shown_claims(node).count()),
        claims_waiting: number(shown_claims(node).filter(|view| !view.waits.is_empty()).count()),
    }
}

/// Returns the devices of all DRA drivers, or of one.
pub(super) fn dra_devices(node: &Node, driver: &str, now: Moment) -> Vec<v1::Device> {
    let of = DriverName::from(driver);
    let of = (!driver.is_empty()).then_some(&of);
    let devices = node.dra_devices(of, now);
    devices.into_iter().map(|view| dra_device(node, view)).collect()
}

fn dra_device(node: &Node, view: DraDeviceView<'_>) -> v1::Device {
    let mut holders: Vec<&PodUid> = view.claims.iter().flat_map(|each| &each.claim.pods).collect();
    holders.sort();
    holders.dedup();
    v1::Device {
        resource: view.driver.to_string(),
        id: format!("{}/{}", view.device.pool, view.device.device),
        listed: false,
        healthy: false,
        numa_nodes: Vec::new(),
        holders: holders.into_iter().map(|uid| pod_id(node, uid)).collect(),
        dra: Some(v1::DraDevice {
            pool: view.device.pool,
            device: view.device.device,
            health: health(view.health).into(),
            health_message: view.message.to_owned(),
            claims: view.claims.into_iter().map(device_claim).collect(),
        }),
    }
}

fn device_claim(each: DeviceClaimView<'_>) -> v1::DeviceClaim {
    v1::DeviceClaim {
        claim: Some(id(&each.claim.claim.key, &each.claim.claim.uid)),
        phase: phase(each.claim.phase).into(),
        share_id: each.share,
        admin_access: each.admin_access,
        prepared: each.prepared,
    }
}
