//! The content of a DRA health state: the health of each device.

use std::collections::BTreeMap;

use devlet_kubelet_files::dra::health::{DeviceHealth, DriverHealth, HealthState};
use serde::Serialize;

use crate::output::{count, table};

#[derive(Debug, Serialize)]
pub(in crate::checkpoint) struct HealthShown {
    drivers: BTreeMap<String, BTreeMap<String, DeviceHealthShown>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceHealthShown {
    pool: String,
    device: String,
    health: String,
    last_updated: String,
    timeout_seconds: f64,
    message: String,
}

impl HealthShown {
    pub(super) fn of(state: &HealthState) -> Self {
        let device = |device: &DeviceHealth| DeviceHealthShown {
            pool: device.pool.clone(),
            device: device.device.clone(),
            health: device.health.clone(),
            last_updated: device.last_updated.clone(),
            timeout_seconds: device.timeout_ns as f64 / 1e9,
            message: device.message.clone(),
        };
        let devices = |driver: &DriverHealth| {
            let devices = driver.devices.iter().flatten();
            devices
                .map(|(key, health)| (key.clone(), device(health)))
                .collect()
        };
        let drivers = state.drivers.iter().flatten();
        Self {
            drivers: drivers
                .map(|(name, driver)| (name.clone(), devices(driver)))
                .collect(),
        }
    }

    pub(super) fn summary(&self) -> String {
        let devices = self.drivers.values().map(BTreeMap::len).sum();
        format!(
            "{} of {}",
            count(devices, "device"),
            count(self.drivers.len(), "driver")
        )
    }

    pub(super) fn table(&self) -> String {
        let rows: Vec<[String; 6]> = self
            .drivers
            .iter()
            .flat_map(|(driver, devices)| {
                devices.iter().map(move |(key, device)| {
                    let timeout = format!("{} s", device.timeout_seconds);
                    let DeviceHealthShown {
                        health,
                        last_updated,
                        message,
                        ..
                    } = device;
                    [driver, key, health, last_updated, &timeout, message].map(Clone::clone)
                })
            })
            .collect();
        if rows.is_empty() {
            return String::new();
        }
        let header = ["DRIVER", "DEVICE", "HEALTH", "LAST UPDATED", "TIMEOUT", "MESSAGE"];
        format!("\n{}", table(header, rows))
    }
}
