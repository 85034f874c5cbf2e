//! The devices of a prepared claim, in the terms of its status.

use std::collections::BTreeMap;

use devlet_core::dra::claims::{ClaimKey, DeviceShare, PreparationState};
use devlet_core::dra::health::{DeviceHealth, PoolDevice};
use devlet_core::dra::view::{ClaimView, Phase};
use devlet_core::{ClaimUid, DriverName, Moment, Node, PodUid};
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

const PREPARED: &str = "devlet.dev/Prepared";
const HEALTHY: &str = "devlet.dev/Healthy";

/// The devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClaimReport {
    pub(super) key: ClaimKey,
    /// The pods that hold it.
    pods: Vec<PodUid>,
    devices: BTreeMap<DeviceShare, DeviceReport>,
}

/// The state of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceReport {
    /// `false` if the driver has left it out.
    is_prepared: bool,
    /// `None` soon after the start, when the driver may not have reported it yet.
    health: Option<DeviceHealth>,
    message: String,
}

/// A report compared with the status of its claim.
#[derive(Debug, PartialEq)]
pub(super) enum Merged {
    /// The status has it, or the devices are not allocated any longer.
    Same,
    /// The conditions to apply.
    Differs(Vec<AllocatedDeviceStatus>),
}

impl ClaimReport {
    /// Returns the claims that are prepared and in use, by UID. `is_early` is `true` soon after the start.
    pub(super) fn all(node: &Node, now: Moment, is_early: bool) -> BTreeMap<ClaimUid, Self> {
        let claims = node.claims().filter(|view| view.phase == Phase::Prepared);
        let reports = claims.map(|view| (view.claim.uid.clone(), Self::of(node, view, now, is_early)));
        reports.filter(|(_, report)| !report.devices.is_empty()).collect()
    }

    fn of(node: &Node, view: ClaimView<'_>, now: Moment, is_early: bool) -> Self {
        let preparations = view.claim.preparations.iter();
        let preparations = preparations.filter(|(_, each)| each.state == PreparationState::Prepared);
        let devices = preparations.flat_map(|(driver, preparation)| {
            let devices = preparation.all_devices().into_iter();
            devices.map(|(device, share, _, is_prepared)| {
                let (health, message) = node.device_health(driver, &device, now);
                let report = DeviceReport {
                    is_prepared,
                    health: (!is_early || health != DeviceHealth::Unknown).then_some(health),
                    message: message.to_owned(),
                };
                let driver = driver.clone();
                let share = DeviceShare {
                    driver,
                    device,
                    share,
                };
                (share, report)
            })
        });
        Self {
            devices: devices.collect(),
            key: view.claim.key.clone(),
            pods: view.pods,
        }
    }

    /// Returns `true` if `last` was the same report, and a pod has held the claim ever since.
    pub(super) fn is_written(&self, last: &Self) -> bool {
        self.devices == last.devices && self.pods.iter().any(|pod| last.pods.contains(pod))
    }

    /// Returns the conditions to apply. A condition whose status is the same keeps its time.
    pub(super) fn merge(&self, status: &ResourceClaimStatus, now: Timestamp) -> Merged {
        let known = status.devices.as_deref().unwrap_or_default();
        let known: BTreeMap<DeviceShare, &[Condition]> = known
            .iter()
            .map(|each| {
                let share = share(&each.driver, &each.pool, &each.device, each.share_id.as_ref());
                (share, each.conditions.as_deref().unwrap_or_default())
            })
            .collect();
        let is_allocated = |each: &DeviceShare| {
            let results = status.allocation.as_ref().and_then(|it| it.devices.as_ref());
            let mut results = results.and_then(|it| it.results.as_ref()).into_iter().flatten();
            results.any(|it| share(&it.driver, &it.pool, &it.device, it.share_id.as_ref()) == *each)
        };
        let mut is_same = true;
        let devices = self.devices.iter().filter(|(share, _)| is_allocated(share));
        let devices: Vec<AllocatedDeviceStatus> = devices
            .map(|(share, report)| {
                let known = known.get(share).copied().unwrap_or_default();
                let conditions = report.conditions(known, now);
                let ours = known.iter().filter(|each| is_ours(each));
                is_same &= ours.eq(conditions.iter());
                AllocatedDeviceStatus {
                    driver: share.driver.to_string(),
                    pool: share.device.pool.clone(),
                    device: share.device.device.clone(),
                    share_id: share.share.clone(),
                    conditions: Some(conditions),
                    ..AllocatedDeviceStatus::default()
                }
            })
            .collect();
        if is_same {
            Merged::Same
        } else {
            Merged::Differs(devices)
        }
    }
}

impl DeviceReport {
    /// Returns the conditions, by type.
    fn conditions(&self, known: &[Condition], now: Timestamp) -> Vec<Condition> {
        let condition = |kind: &str, is_true: bool, reason: &str, message: &str| {
            let status = if is_true { "True" } else { "False" };
            let last = known
                .iter()
                .find(|each| each.type_ == kind && each.status == status);
            Condition {
                type_: kind.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message: message.to_owned(),
                last_transition_time: last.map_or(Time(now), |last| last.last_transition_time.clone()),
                observed_generation: None,
            }
        };
        let healthy = match self.health {
            None => known.iter().find(|each| each.type_ == HEALTHY).cloned(),
            Some(DeviceHealth::Unknown) => None,
            Some(DeviceHealth::Healthy) => Some(condition(HEALTHY, true, "Healthy", &self.message)),
            Some(DeviceHealth::Unhealthy) => Some(condition(HEALTHY, false, "Unhealthy", &self.message)),
        };
        let prepared = match self.is_prepared {
            true => condition(PREPARED, true, "Prepared", ""),
            false => condition(
                PREPARED,
                false,
                "LeftOut",
                "the driver prepared the claim without this device",
            ),
        };
        healthy.into_iter().chain([prepared]).collect()
    }
}

fn share(driver: &str, pool: &str, device: &str, share: Option<&String>) -> DeviceShare {
    DeviceShare {
        driver: DriverName::from(driver),
        device: PoolDevice {
            pool: pool.to_owned(),
            device: device.to_owned(),
        },
        share: share.cloned(),
    }
}

fn is_ours(condition: &Condition) -> bool {
    [PREPARED, HEALTHY].contains(&condition.type_.as_str())
}

#[cfg(test)]
mod tests;
