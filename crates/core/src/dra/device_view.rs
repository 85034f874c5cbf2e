//! Devices of DRA drivers: those of claims, and those whose health a driver reports.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use super::claims::{AllocatedDevice, Preparation, PreparationState, PreparedDevice};
use super::health::{DeviceHealth, PoolDevice};
use super::view::{ClaimView, Phase};
use crate::id::{DriverName, Moment};
use crate::node::Node;

/// A device of a DRA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraDeviceView<'a> {
    /// The driver.
    pub driver: DriverName,
    /// The device.
    pub device: PoolDevice,
    /// Its health as the driver reports it.
    pub health: DeviceHealth,
    /// The reason.
    pub message: &'a str,
    /// The claims that have it, by UID.
    pub claims: Vec<DeviceClaimView<'a>>,
}

/// A claim that has a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceClaimView<'a> {
    /// The claim.
    pub claim: ClaimView<'a>,
    /// The share ID; `None` for the whole device.
    pub share: Option<String>,
    /// `true` if other claims may have the device too.
    pub admin_access: bool,
    /// `true` if the driver has prepared the device for the claim.
    pub prepared: bool,
}

impl Preparation {
    /// Returns the allocated devices that are missing in the answer of a driver that has prepared the claim.
    pub fn missing_devices(&self) -> impl Iterator<Item = &AllocatedDevice> {
        let is_prepared = self.state == PreparationState::Prepared && !self.skips_prepare();
        let allocated = self.allocated.iter().flatten().filter(move |_| is_prepared);
        allocated.filter(|each| !self.devices.iter().any(|device| is_for(device, each)))
    }

    /// Returns each device of the claim: device, share, admin access, and `true` if it is prepared.
    pub fn all_devices(&self) -> Vec<(PoolDevice, Option<String>, bool, bool)> {
        let is_prepared = self.state == PreparationState::Prepared;
        let Some(allocated) = &self.allocated else {
            let named = self.devices.iter().filter(|device| !device.device.is_empty());
            return named
                .map(|device| (device.pool_device(), device.share.clone(), false, is_prepared))
                .collect();
        };
        let mut devices: Vec<_> = allocated
            .iter()
            .map(|each| {
                let place = PoolDevice {
                    pool: each.pool.clone(),
                    device: each.device.clone(),
                };
                let has = self.skips_prepare() || self.devices.iter().any(|device| is_for(device, each));
                (place, each.share.clone(), each.admin_access, is_prepared && has)
            })
            .collect();
        devices.dedup();
        devices
    }
}

fn is_for(device: &PreparedDevice, allocated: &AllocatedDevice) -> bool {
    // A driver of an older API version does not name shares.
    let is_share = device.share.is_none() || device.share == allocated.share;
    device.pool == allocated.pool && device.device == allocated.device && is_share
}

impl Node {
    /// Returns the devices of all drivers, or of one: by driver, pool and name.
    pub fn dra_devices(&self, of: Option<&DriverName>, now: Moment) -> Vec<DraDeviceView<'_>> {
        let is_selected = |driver: &DriverName| of.is_none_or(|of| of == driver);
        let mut devices: BTreeMap<(DriverName, PoolDevice), Vec<DeviceClaimView<'_>>> = BTreeMap::new();
        for (name, driver) in self
            .dra
            .drivers
            .drivers
            .iter()
            .filter(|(name, _)| is_selected(name))
        {
            for device in driver.health.devices() {
                devices.entry((name.clone(), device.clone())).or_default();
            }
        }
        for view in self.claims().filter(|view| view.phase != Phase::Unprepared) {
            let preparations = view.claim.preparations.iter();
            let preparations = preparations
                .filter(|(driver, each)| is_selected(driver) && each.state != PreparationState::Unprepared);
            for (driver, preparation) in preparations {
                for (device, share, admin_access, prepared) in preparation.all_devices() {
                    let claims = devices.entry((driver.clone(), device)).or_default();
                    claims.push(DeviceClaimView {
                        claim: view.clone(),
                        share,
                        admin_access,
                        prepared,
                    });
                }
            }
        }
        devices
            .into_iter()
            .map(|((driver, device), claims)| {
                let (health, message) = self.device_health(&driver, &device, now);
                DraDeviceView {
                    health,
                    message,
                    driver,
                    device,
                    claims,
                }
            })
            .collect()
    }
}
