//! Indexes of the claims, updated by [`Claims::reindex`] and recomputed by `check`.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::{Claims, Entry, PreparedDevice};
use crate::dra::health::PoolDevice;
use crate::dra::view::Phase;
use crate::id::{ClaimUid, DriverName, Moment};

impl Claims {
    pub(super) fn remove(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.remove(uid) else {
            return;
        };
        if self.by_key.get(&entry.claim.key) == Some(uid) {
            self.by_key.remove(&entry.claim.key);
        }
        if let Some(pod) = &entry.left {
            remove(&mut self.left, pod, uid);
        }
        if entry.counts {
            self.in_use.remove(&entry.claim);
        }
        self.count_phase(uid, entry.counted, None);
        for device in &entry.holds {
            self.holders.remove(uid, device);
        }
        for (driver, preparation) in &entry.claim.preparations {
            unindex_devices(&mut self.devices, uid, driver, &preparation.devices);
            remove(&mut self.failing, driver, uid);
            let queued = entry.tasks.get(driver).and_then(|task| task.queued);
            if let Some(queued) = queued {
                remove(&mut self.due, driver, &(queued, uid.clone()));
            }
        }
        self.to_write.remove(uid);
        self.done.remove(uid);
    }

    /// Updates the counts of claims by phase.
    fn count_phase(&mut self, uid: &ClaimUid, before: Option<Phase>, after: Option<Phase>) {
        if before == after {
            return;
        }
        if let Some(count) = before.and_then(|phase| self.phases.get_mut(&phase)) {
            *count = count.saturating_sub(1);
        }
        if let Some(phase) = after {
            *self.phases.entry(phase).or_default() += 1;
        }
        if before == Some(Phase::Preparing) {
            self.preparing.remove(uid);
        }
        if after == Some(Phase::Preparing) {
            self.preparing.insert(uid.clone());
        }
    }

    /// Updates the indexes of a claim. Removes the claim if it is done and not on disk.
    pub(super) fn reindex(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.get(uid) else {
            return;
        };
        let is_done = entry.is_done();
        if is_done && !entry.on_disk {
            self.remove(uid);
            return;
        }
        self.index_holds(uid);
        let Some(entry) = self.entries.get(uid) else {
            return;
        };
        let is_to_be_written = entry.is_to_be_written();
        let counts = !entry.holders.is_empty() && entry.claim.is_prepared();
        match (entry.counts, counts) {
            (false, true) => self.in_use.add(&entry.claim),
            (true, false) => self.in_use.remove(&entry.claim),
            _ => {}
        }
        let (before, phase) = (entry.counted, Some(entry.phase()));
        let left = entry.is_unused().then(|| entry.claim.pod.clone());
        if entry.left != left {
            if let Some(pod) = &entry.left {
                remove(&mut self.left, pod, uid);
            }
            if let Some(pod) = &left {
                self.left.entry(pod.clone()).or_default().insert(uid.clone());
            }
        }
        let due: Vec<Option<Moment>> = entry
            .claim
            .preparations
            .iter()
            .map(|(driver, preparation)| entry.due(driver, preparation))
            .collect();
        self.count_phase(uid, before, phase);
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        entry.left = left;
        entry.counts = counts;
        entry.counted = phase;
        for ((driver, task), due) in entry.tasks.iter_mut().zip(due) {
            if task.failures > 0 {
                self.failing
                    .entry(driver.clone())
                    .or_default()
                    .insert(uid.clone());
            } else {
                remove(&mut self.failing, driver, uid);
            }
            if task.queued != due {
                if let Some(queued) = task.queued {
                    remove(&mut self.due, driver, &(queued, uid.clone()));
                }
                if let Some(due) = due {
                    self.due
                        .entry(driver.clone())
                        .or_default()
                        .insert((due, uid.clone()));
                }
                task.queued = due;
            }
        }
        for (set, is_in) in [(&mut self.to_write, is_to_be_written), (&mut self.done, is_done)] {
            if is_in {
                set.insert(uid.clone());
            } else {
                set.remove(uid);
            }
        }
    }

    /// Returns the memory of a driver's prepared devices if these were its devices of the claim, in bytes.
    pub(crate) fn memory_with(
        &self,
        driver: &DriverName,
        uid: &ClaimUid,
        devices: &[PreparedDevice],
    ) -> usize {
        let memory = |devices: &[PreparedDevice]| devices.iter().map(PreparedDevice::memory).sum::<usize>();
        let preparations = self.entries.get(uid).map(|entry| &entry.claim.preparations);
        let known = preparations.and_then(|preparations| preparations.get(driver));
        let before = known.map_or(0, |known| memory(&known.devices));
        let all = self.devices.bytes.get(driver).copied().unwrap_or(0);
        all.saturating_sub(before) + memory(devices)
    }

    /// Returns the claims that use a device.
    pub(crate) fn using(&self, driver: &DriverName, device: &PoolDevice) -> impl Iterator<Item = &Entry> {
        let of_driver = self.devices.users.get(driver);
        let uids = of_driver.and_then(|devices| devices.get(device));
        uids.into_iter().flatten().filter_map(|uid| self.entries.get(uid))
    }

    /// Recomputes the indexes and compares them.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let mut again = Self {
            entries: self.entries.clone(),
            ..Self::default()
        };
        for entry in again.entries.values_mut() {
            entry.left = None;
            entry.counts = false;
            entry.counted = None;
            entry.tasks.values_mut().for_each(|task| task.queued = None);
        }
        for (uid, entry) in &self.entries {
            let needed = entry.needed_devices();
            assert!(
                needed.is_subset(&entry.holds),
                "a claim does not hold a device that it needs"
            );
            if !entry.on_disk && entry.writing == 0 {
                assert_eq!(
                    needed, entry.holds,
                    "a claim holds a device that it does not need"
                );
            }
            for device in &entry.holds {
                again.holders.insert(uid, device);
            }
            for (driver, preparation) in &entry.claim.preparations {
                index_devices(&mut again.devices, uid, driver, &preparation.devices);
            }
            again.reindex(uid);
        }
        assert_eq!(
            again.entries.len(),
            self.entries.len(),
            "a claim without pods is not on disk"
        );
        assert_eq!(
            again.left, self.left,
            "the index of claims that pods left is inconsistent"
        );
        assert_eq!(again.due, self.due, "the index of calls to make is inconsistent");
        assert_eq!(
            again.failing, self.failing,
            "the index of failing calls is inconsistent"
        );
        assert_eq!(
            again.to_write, self.to_write,
            "the index of claims to write is inconsistent"
        );
        assert_eq!(
            again.done, self.done,
            "the index of claims to delete is inconsistent"
        );
        assert_eq!(
            again.devices, self.devices,
            "the index of devices is inconsistent"
        );
        assert_eq!(
            again.holders, self.holders,
            "the index of device holders is inconsistent"
        );
        assert_eq!(
            again.in_use, self.in_use,
            "the number of claims in use is inconsistent"
        );
        let counted = |phases: &BTreeMap<Phase, usize>| {
            let counts = phases.iter().filter(|(_, count)| **count > 0);
            counts.map(|(phase, count)| (*phase, *count)).collect::<Vec<_>>()
        };
        assert_eq!(
            counted(&again.phases),
            counted(&self.phases),
            "the number of claims by phase is inconsistent"
        );
        assert_eq!(
            again.preparing, self.preparing,
            "the index of claims that are being prepared is inconsistent"
        );
        for (key, uid) in &self.by_key {
            assert_eq!(self.entries.get(uid).map(|entry| &entry.claim.key), Some(key));
        }
        for entry in self.entries.values().filter(|entry| !entry.is_unused()) {
            let named = self.by_key.get(&entry.claim.key);
            assert_eq!(named, Some(&entry.claim.uid), "two claims have one name");
        }
        let busy: BTreeSet<(crate::id::CallId, &ClaimUid, &DriverName)> = self
            .entries
            .iter()
            .flat_map(|(uid, entry)| {
                let tasks = entry.tasks.iter();
                tasks.filter_map(move |(driver, task)| Some((task.busy?, uid, driver)))
            })
            .collect();
        let calls: BTreeSet<(crate::id::CallId, &ClaimUid, &DriverName)> = self
            .calls
            .iter()
            .flat_map(|(id, call)| call.claims.iter().map(move |uid| (*id, uid, &call.driver)))
            .collect();
        assert_eq!(
            busy, calls,
            "a call is lost, or a driver is called twice for a claim"
        );
        for (driver, running) in &self.background {
            let calls = self
                .calls
                .values()
                .filter(|call| call.background && call.driver == *driver);
            assert_eq!(*running, calls.count());
        }
    }
}

/// The claims that use each device, and the memory of each driver's devices in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceIndex {
    users: BTreeMap<DriverName, BTreeMap<PoolDevice, BTreeSet<ClaimUid>>>,
    bytes: BTreeMap<DriverName, usize>,
}

pub(super) fn index_devices(
    index: &mut DeviceIndex,
    uid: &ClaimUid,
    driver: &DriverName,
    devices: &[PreparedDevice],
) {
    for device in devices {
        let users = index.users.entry(driver.clone()).or_default();
        users.entry(device.pool_device()).or_default().insert(uid.clone());
        *index.bytes.entry(driver.clone()).or_default() += device.memory();
    }
}

pub(super) fn unindex_devices(
    index: &mut DeviceIndex,
    uid: &ClaimUid,
    driver: &DriverName,
    devices: &[PreparedDevice],
) {
    let Some(of_driver) = index.users.get_mut(driver) else {
        return;
    };
    for device in devices {
        remove(of_driver, &device.pool_device(), uid);
    }
    if of_driver.is_empty() {
        index.users.remove(driver);
        index.bytes.remove(driver);
    } else if let Some(bytes) = index.bytes.get_mut(driver) {
        let freed: usize = devices.iter().map(PreparedDevice::memory).sum();
        *bytes = bytes.saturating_sub(freed);
    }
}

/// Removes a value, and its set if that is empty then.
pub(super) fn remove<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}
