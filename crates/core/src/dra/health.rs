//! What plugins say about the health of their devices.
//!
//! Each report of a device holds for its lease, whatever becomes of the plugin meanwhile: a driver may restart
//! without its devices becoming unknown. A device of which nothing is known, or nothing any longer, is unknown.
//! If several plugins of a driver report the same device, the newest plugin that still reports is believed.
//!
//! Memory is bounded: [`MOST_DEVICES`] of a driver are kept, for [`LONGEST_LEASE_MS`] at most, and
//! [`LONGEST_MESSAGE`] bytes of each message. When the places are taken, what a plugin has left that reports no
//! longer makes room, what expires first before the rest.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::id::{ConnectionId, Moment};

/// How long a report holds that does not say.
pub const DEFAULT_LEASE_MS: u64 = 30 * 1000;
/// How long a report holds at most, whatever it says.
pub const LONGEST_LEASE_MS: u64 = 60 * 60 * 1000;
/// How many devices of one driver are kept.
pub const MOST_DEVICES: usize = 16_384;
/// How long a message may be, in bytes; what is longer is cut and ends in dots.
pub const LONGEST_MESSAGE: usize = 1024;
const DOTS: &str = "...";

/// How a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum DeviceHealth {
    /// Nobody knows.
    #[default]
    Unknown,
    /// Well.
    Healthy,
    /// Not well.
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

/// What a plugin says about one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// Which one.
    pub device: PoolDevice,
    /// How it is.
    pub health: DeviceHealth,
    /// Why, for people.
    pub message: String,
    /// How long that holds, in milliseconds; 0 stands for the default, and more than the longest for the longest.
    pub lease_ms: u64,
}

#[derive(Debug)]
struct Known {
    by: ConnectionId,
    health: DeviceHealth,
    message: String,
    lease_ms: u64,
    until: Moment,
}

/// The health of a driver's devices.
#[derive(Debug, Default)]
pub(crate) struct Health {
    devices: BTreeMap<PoolDevice, Known>,
    /// When each of them expires.
    expiries: BTreeSet<(Moment, PoolDevice)>,
    /// Plugins that are reporting.
    reporting: BTreeSet<ConnectionId>,
    /// How many devices each plugin has said last how they are.
    said: BTreeMap<ConnectionId, usize>,
    /// How many devices are how.
    counts: BTreeMap<DeviceHealth, usize>,
}

impl Health {
    /// The devices that plugins report.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &PoolDevice> {
        self.devices.keys()
    }

    /// The devices that changed, and how many reports there was no room for.
    pub(crate) fn reported(
        &mut self,
        by: ConnectionId,
        reports: Vec<HealthReport>,
        now: Moment,
    ) -> (Vec<PoolDevice>, usize) {
        self.reporting.insert(by);
        let mut changed = self.expire(now);
        let mut left_out = 0;
        let mut left_behind = None;
        for report in reports {
            let lease_ms = match report.lease_ms {
                0 => DEFAULT_LEASE_MS,
                lease => lease.min(LONGEST_LEASE_MS),
            };
            let known = self.devices.get(&report.device);
            let outranked =
                |known: &Known| known.by > by && self.reporting.contains(&known.by) && known.until > now;
            if known.is_some_and(outranked) {
                continue;
            }
            if known.is_none() && self.devices.len() >= MOST_DEVICES {
                let left_behind = left_behind.get_or_insert_with(|| self.left_behind().into_iter());
                let Some(gone) = left_behind.find(|place| self.is_left_behind(place)) else {
                    left_out += 1;
                    continue;
                };
                changed.extend(self.forget(gone));
            }
            let known = self.devices.get(&report.device);
            let message = truncate(report.message);
            let same = |known: &Known| {
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
            let known = Known {
                by,
                health: report.health,
                message,
                lease_ms,
                until,
            };
            *self.counts.entry(known.health).or_default() += 1;
            *self.said.entry(by).or_default() += 1;
            if let Some(before) = self.devices.insert(report.device, known) {
                self.uncount(&before);
            }
        }
        (changed, left_out)
    }

    /// A plugin says nothing any longer; what it said holds until it expires.
    pub(crate) fn stream_ended(&mut self, by: ConnectionId) {
        self.reporting.remove(&by);
    }

    /// Forgets what has expired: the devices that are unknown from now on.
    pub(crate) fn expire(&mut self, now: Moment) -> Vec<PoolDevice> {
        let mut changed = Vec::new();
        while let Some(expired) = self.expiries.first().filter(|(until, _)| *until <= now).cloned() {
            changed.extend(self.forget(expired));
        }
        changed
    }

    /// What plugins have said that report no longer, by when it expires.
    fn left_behind(&self) -> Vec<(Moment, PoolDevice)> {
        // Mostly there is none, and a plugin that says too much would have it looked for again and again.
        if self.said.keys().all(|by| self.reporting.contains(by)) {
            return Vec::new();
        }
        let places = self.expiries.iter();
        places
            .filter(|place| self.is_left_behind(place))
            .cloned()
            .collect()
    }

    fn is_left_behind(&self, (until, device): &(Moment, PoolDevice)) -> bool {
        let known = self.devices.get(device);
        known.is_some_and(|known| known.until == *until && !self.reporting.contains(&known.by))
    }

    /// Nothing is known of a device any longer. The device, if that changes how it is.
    fn forget(&mut self, place: (Moment, PoolDevice)) -> Option<PoolDevice> {
        self.expiries.remove(&place);
        let (_, device) = place;
        let known = self.devices.remove(&device)?;
        self.uncount(&known);
        (known.health != DeviceHealth::Unknown).then_some(device)
    }

    fn uncount(&mut self, known: &Known) {
        if let Some(count) = self.counts.get_mut(&known.health) {
            *count = count.saturating_sub(1);
        }
        if let Some(count) = self.said.get_mut(&known.by) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.said.remove(&known.by);
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

    /// How a device is, and why.
    pub(crate) fn of(&self, device: &PoolDevice, now: Moment) -> (DeviceHealth, &str) {
        let known = self.devices.get(device).filter(|known| known.until > now);
        known.map_or((DeviceHealth::Unknown, ""), |known| {
            (known.health, &*known.message)
        })
    }
}

/// Cuts what is too long.
pub(crate) fn truncate(mut message: String) -> String {
    if message.len() > LONGEST_MESSAGE {
        let end = message.floor_char_boundary(LONGEST_MESSAGE - DOTS.len());
        message.truncate(end);
        message.push_str(DOTS);
        message.shrink_to_fit();
    }
    message
}

#[cfg(test)]
mod tests;
