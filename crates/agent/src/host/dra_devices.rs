//! Devices of DRA drivers as messages of our API, and problems of claims: prepared in part, not unprepared.

use devlet_client::v1;
use devlet_core::dra::claims::{AllocatedDevice, Failure};
use devlet_core::dra::device_view::{DeviceClaimView, DraDeviceView};
use devlet_core::dra::view::{Phase, Reason, Wait};
use devlet_core::{DriverName, Moment, Node, PodUid};

use super::claims;
use super::convert::pod_id;
use crate::display;

/// Returns the devices of all DRA drivers, or of one.
pub(super) fn devices(node: &Node, driver: &str, now: Moment) -> Vec<v1::Device> {
    let of = DriverName::from(driver);
    let of = (!driver.is_empty()).then_some(&of);
    let devices = node.dra_devices(of, now);
    devices.into_iter().map(|view| device(node, view)).collect()
}

fn device(node: &Node, view: DraDeviceView<'_>) -> v1::Device {
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
            health: claims::health(view.health).into(),
            health_message: view.message.to_owned(),
            claims: view.claims.into_iter().map(claim).collect(),
        }),
    }
}

fn claim(each: DeviceClaimView<'_>) -> v1::DeviceClaim {
    v1::DeviceClaim {
        claim: Some(claims::id(&each.claim.claim.key, &each.claim.claim.uid)),
        phase: claims::phase(each.claim.phase).into(),
        share_id: each.share,
        admin_access: each.admin_access,
        prepared: each.prepared,
    }
}

/// Returns a problem for each claim that a driver called prepared without all of its devices. A kubelet accepts
/// that, too.
pub(super) fn partly_prepared(node: &Node) -> Vec<v1::Problem> {
    let mut problems = Vec::new();
    for view in claims::shown(node).filter(|view| !view.pods.is_empty()) {
        for (driver, preparation) in &view.claim.preparations {
            let missing: Vec<String> = preparation.missing_devices().map(name).collect();
            if missing.is_empty() {
                continue;
            }
            problems.push(v1::Problem {
                what: format!(
                    "ResourceClaim {} (UID {}) is prepared in part: driver {driver} did not prepare {}",
                    view.claim.key,
                    view.claim.uid,
                    missing.join(", ")
                ),
                hint: format!(
                    "its containers run without these devices; see the log of the driver, then remove and admit the pods \
                     again (devlet describe claim {})",
                    view.claim.key
                ),
                blocking: false,
            });
        }
    }
    problems
}

/// Returns a problem for each driver that has not unprepared a claim which no pod uses: its last call failed, or it is not
/// connected.
pub(super) fn not_unprepared(node: &Node) -> Vec<v1::Problem> {
    let unused = claims::shown(node).filter(|view| view.phase == Phase::Unpreparing);
    let waits = unused.flat_map(|view| view.waits);
    let failing = waits.filter(|wait| wait.failure.is_some() || wait.reason == Reason::NoDriver);
    let problem = |wait: Wait| {
        let Wait {
            claim,
            uid,
            driver,
            failure,
            ..
        } = &wait;
        let reason = match failure {
            Some(Failure::Driver { reason, .. } | Failure::Call { reason, .. }) => reason.clone(),
            Some(Failure::Invalid(answer)) => answer.to_string(),
            None => {
                let since = wait.since.map(|since| display::format_since(" since ", since));
                format!("it is not connected{}", since.unwrap_or_default())
            }
        };
        v1::Problem {
            what: format!(
                "ResourceClaim {claim} (UID {uid}) is not unprepared by driver {driver}, and holds its devices: {reason}"
            ),
            hint: format!(
                "see the log of the driver; devlet keeps trying; if the driver is gone for good: devlet remove --claim \
                 {claim} --abandon-driver {driver}"
            ),
            blocking: false,
        }
    };
    failing.map(problem).collect()
}

fn name(device: &AllocatedDevice) -> String {
    let AllocatedDevice { pool, device, .. } = device;
    format!("{pool}/{device}")
}
