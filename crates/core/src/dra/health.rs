//! Health of devices as DRA plugins report it.
//!
//! A report is valid for its lease, independent of the plugin's connection: a driver may restart without its devices
//! becoming unknown. A device without a valid report is unknown. If several plugins of a driver report the same device,
//! the newest plugin with an open stream takes precedence.
//!
//! Memory is bounded: at most [`MAX_DEVICES`] devices of a driver are kept, for at most [`MAX_LEASE_MS`], with
//! [`MAX_MESSAGE`] bytes of each message. A new device in a full table replaces a report of a plugin whose stream has
//! ended, beginning with the report that expires first.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::id::{ConnectionId, Moment};

/// The lease of a report that does not have one, in milliseconds.
pub const DEFAULT_LEASE_MS: u64 = 30 * 1000;
/// The maximum lease, in milliseconds. Longer leases are shortened.
pub const MAX_LEASE_MS: u64 = 60 * 60 * 1000;
/// The maximum number of devices of one driver. Reports beyond it are dropped.
pub const MAX_DEVICES: usize = 16_384;
/// The maximum length of a message, in bytes. Longer messages are truncated and end in dots.
pub const MAX_MESSAGE: usize = 1024;
const ELLIPSIS: &str = "...";

/// The health of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum DeviceHealth {
    /// No valid report exists.
    #[default]
    Unknown,
    /// Reported as healthy.
    Healthy,
    /// Reported as unhealthy.
    Unhealthy,
}

/// A device of a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolDevice {
    /// The pool.
    pub pool: String,
    /// The device, unique within its pool only.
    pub device: String,
}

/// A report of a plugin about one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// The device.
    pub device: PoolDevice,
    /// The health.
    pub health: DeviceHealth,
    /// The reason as text.
    pub message: String,
    /// The lease in milliseconds; 0 means [`DEFAULT_LEASE_MS`], and the maximum is [`MAX_LEASE_MS`].
    pub lease_ms: u64,
}

#[derive(Debug)]
struct StoredReport {
    by: ConnectionId,
    health: DeviceHealth,
    message: String,
    lease_ms: u64,
    until: Moment,
}

/// The health of a driver's devices.
#[derive(Debug, Default)]
pub(crate) struct Health {
    devices: BTreeMap<PoolDevice, StoredReport>,
    /// The devices by the expiry of their reports.
    expiries: BTreeSet<(Moment, PoolDevice)>,
    /// Plugins with an open stream.
    reporting: BTreeSet<ConnectionId>,
    /// The number of stored reports of each plugin.
    reports: BTreeMap<ConnectionId, usize>,
    /// The number of devices by health.
    counts: BTreeMap<DeviceHealth, usize>,
}

impl Health {
    /// Returns the devices with reports.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &PoolDevice> {
        self.devices.keys()
    }

    /// Stores reports. Returns the devices that changed, and the number of dropped reports.
    pub(crate) fn reported(
        &mut self,
        by: ConnectionId,
        reports: Vec<HealthReport>,
        now: Moment,
    ) -> (Vec<PoolDevice>, usize) {
        self.reporting.insert(by);
        let mut changed = self.expire(now);
        let mut dropped = 0;
        let mut replaceable = None;
        for report in reports {
            let lease_ms = match report.lease_ms {
                0 => DEFAULT_LEASE_MS,
                lease => lease.min(MAX_LEASE_MS),
            };
            let known = self.devices.get(&report.device);
            let has_precedence = |known: &StoredReport| {
                known.by > by && self.reporting.contains(&known.by) && known.until > now
            };
            if known.is_some_and(has_precedence) {
                continue;
            }
            if known.is_none() && self.devices.len() >= MAX_DEVICES {
                let replaceable = replaceable.get_or_insert_with(|| self.replaceable().into_iter());
                let Some(gone) = replaceable.find(|entry| self.is_replaceable(entry)) else {
                    dropped += 1;
                    continue;
                };
                changed.extend(self.remove(gone));
            }
            let known = self.devices.get(&report.device);
            let message = truncate(report.message);
            let same = |known: &StoredReport| {
                known.health == report.health && known.message == message && known.lease_ms == lease_ms
            };
            if !known.is_some_and(same) {
                changed.push(report.device.clone());
            }
            if let Some(known) = known {
                self.expiries.remove(&(known.until, report.device.clone()));
            }
            let until = now.after(lease_ms);
            self.expiries.insert((until, report.device.clone()));
            let known = StoredReport {
                by,
                health: report.health,
                message,
                lease_ms,
                until,
            };
            *self.counts.entry(known.health).or_default() += 1;
            *self.reports.entry(by).or_default() += 1;
            if let Some(before) = self.devices.insert(report.device, known) {
                self.uncount(&before);
            }
        }
        (changed, dropped)
    }

    /// Records the end of a plugin's stream. Its reports stay valid until they expire.
    pub(crate) fn stream_ended(&mut self, by: ConnectionId) {
        self.reporting.remove(&by);
    }

    /// Removes expired reports. Returns the devices that become unknown.
    pub(crate) fn expire(&mut self, now: Moment) -> Vec<PoolDevice> {
        let mut changed = Vec::new();
        while let Some(expired) = self.expiries.first().filter(|(until, _)| *until <= now).cloned() {
            changed.extend(self.remove(expired));
        }
        changed
    }

    /// Returns the reports of plugins without an open stream, by expiry.
    fn replaceable(&self) -> Vec<(Moment, PoolDevice)> {
        // Usually there is none. Then a plugin that reports too many devices does not cause repeated scans.
        if self.reports.keys().all(|by| self.reporting.contains(by)) {
            return Vec::new();
        }
        let entries = self.expiries.iter();
        entries
            .filter(|entry| self.is_replaceable(entry))
            .cloned()
            .collect()
    }

    fn is_replaceable(&self, (until, device): &(Moment, PoolDevice)) -> bool {
        let known = self.devices.get(device);
        known.is_some_and(|known| known.until == *until && !self.reporting.contains(&known.by))
    }

    /// Removes the report of a device. Returns the device if its health changes.
    fn remove(&mut self, entry: (Moment, PoolDevice)) -> Option<PoolDevice> {
        self.expiries.remove(&entry);
        let (_, device) = entry;
        let known = self.devices.remove(&device)?;
        self.uncount(&known);
        (known.health != DeviceHealth::Unknown).then_some(device)
    }

    fn uncount(&mut self, known: &StoredReport) {
        if let Some(count) = self.counts.get_mut(&known.health) {
            *count = count.saturating_sub(1);
        }
        if let Some(count) = self.reports.get_mut(&known.by) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.reports.remove(&known.by);
            }
        }
    }

    pub(crate) fn unhealthy(&self) -> impl Iterator<Item = &PoolDevice> {
        let is_any = self.counts.contains_key(&DeviceHealth::Unhealthy);
        let devices = self.devices.iter().filter(move |_| is_any);
        devices
            .filter(|(_, known)| known.health == DeviceHealth::Unhealthy)
            .map(|(device, _)| device)
    }

    pub(crate) fn counts(&self) -> &BTreeMap<DeviceHealth, usize> {
        &self.counts
    }

    pub(crate) fn next_expiry(&self) -> Option<Moment> {
        self.expiries.first().map(|(until, _)| *until)
    }

    /// Returns the health of a device, and the reason.
    pub(crate) fn of(&self, device: &PoolDevice, now: Moment) -> (DeviceHealth, &str) {
        let known = self.devices.get(device).filter(|known| known.until > now);
        known.map_or((DeviceHealth::Unknown, ""), |known| {
            (known.health, &*known.message)
        })
    }
}

/// Truncates a message to [`MAX_MESSAGE`] bytes.
pub(crate) fn truncate(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        let end = message.floor_char_boundary(MAX_MESSAGE - ELLIPSIS.len());
        message.truncate(end);
        message.push_str(ELLIPSIS);
        message.shrink_to_fit();
    }
    message
}

#[cfg(test)]
mod tests;
