//! A pod joins claims: what keeps it from that, and what is written before a driver is called.

use alloc::vec::Vec;

use super::indexes::unindex_devices;
use super::{AllocatedClaim, Claim, Claims, Entry, PreparationState};
use crate::dra::drivers::Drivers;
use crate::id::{ClaimUid, DriverName, PodUid, ReservationId};
use crate::node::{LastSeen, ReserveError};
use crate::pod::PodName;

impl Claims {
    /// Whether a pod can join a claim now.
    pub(crate) fn plan(&self, wanted: &AllocatedClaim, drivers: &Drivers) -> Result<(), ReserveError> {
        let unpreparing = |entry: &Entry, abandoned: Vec<DriverName>| ReserveError::Unpreparing {
            claim: entry.claim.key.clone(),
            uid: entry.claim.uid.clone(),
            drivers: entry.blocking().cloned().collect(),
            abandoned,
        };
        let missing = |driver: &DriverName| {
            let known = drivers.drivers.get(driver);
            let registered = known.and_then(|known| known.plugins.values().next_back());
            let last = known.and_then(|known| known.last.clone());
            Err(ReserveError::NoDriver {
                driver: driver.clone(),
                claim: wanted.key.clone(),
                seen: match (registered, drivers.unusable_since(driver), last) {
                    (Some(plugin), Some(since), _) => LastSeen::NotConnected {
                        endpoint: plugin.endpoint.clone(),
                        since,
                    },
                    (_, _, Some(last)) => LastSeen::Gone(last),
                    _ => LastSeen::Never,
                },
            })
        };
        let known = self.entries.get(&wanted.uid);
        if let Some(other) = known.filter(|entry| entry.claim.key != wanted.key) {
            return Err(ReserveError::ClaimUidTaken {
                claim: wanted.key.clone(),
                other: other.claim.key.clone(),
                uid: wanted.uid.clone(),
            });
        }
        if let Some(entry) = known.filter(|entry| entry.is_unused()) {
            // Drivers that were given up on are in the way of those who need them, and of nobody else.
            let is_needed = |driver: &&DriverName| wanted.drivers.contains_key(*driver);
            let needed: Vec<DriverName> = entry.claim.abandoned().filter(is_needed).cloned().collect();
            if !entry.is_abandoned() || !needed.is_empty() {
                return Err(unpreparing(entry, needed));
            }
        }
        if let Some(entry) = known.filter(|entry| !entry.is_unused()) {
            if !entry.claim.matches(wanted) {
                return Err(ReserveError::Reallocated {
                    claim: wanted.key.clone(),
                    pods: entry.pods(),
                });
            }
            for (driver, preparation) in &entry.claim.preparations {
                let allocated = wanted
                    .drivers
                    .get(driver)
                    .filter(|_| preparation.allocated.is_none());
                let pending = preparation.state == PreparationState::Pending
                    || allocated.is_some_and(|allocated| preparation.lacks(&allocated.devices));
                if pending && drivers.serving(driver).is_none() {
                    return missing(driver);
                }
            }
            return Ok(());
        }
        if let Some(entry) = self.by_key.get(&wanted.key).and_then(|uid| self.entries.get(uid)) {
            if !entry.is_unused() {
                return Err(ReserveError::ClaimNameTaken {
                    claim: wanted.key.clone(),
                    other: entry.claim.uid.clone(),
                    pods: entry.pods(),
                });
            }
            if entry.blocking().next().is_some() {
                return Err(unpreparing(entry, Vec::new()));
            }
        }
        for (driver, preparation) in Claim::new(wanted, &PodUid::from(""), &PodName::default()).preparations {
            let pending = preparation.state == PreparationState::Pending;
            if pending && drivers.serving(&driver).is_none() {
                return missing(&driver);
            }
        }
        Ok(())
    }

    /// An admission joins a claim. Only after [`Claims::plan`] said that it can.
    pub(crate) fn join(&mut self, pod: &PodUid, name: &PodName, wanted: &AllocatedClaim) {
        let uid = &wanted.uid;
        if self.entries.get(uid).is_some_and(Entry::is_unused) {
            self.use_again(Claim::new(wanted, pod, name));
        }
        let entry = self.entries.entry(uid.clone());
        let entry = entry.or_insert_with(|| Entry::new(Claim::new(wanted, pod, name), false));
        entry.joiners.insert(pod.clone());
        for (driver, preparation) in &mut entry.claim.preparations {
            if let (None, Some(allocated)) = (&preparation.allocated, wanted.drivers.get(driver)) {
                if preparation.lacks(&allocated.devices) {
                    preparation.state = PreparationState::Pending;
                }
                preparation.allocated = Some(allocated.devices.clone());
                entry.dirty = true;
            }
        }
        self.by_key.insert(wanted.key.clone(), uid.clone());
        self.settle(uid);
    }

    /// A claim that was abandoned is allocated anew, at other drivers. Those that were given up on stay on record, without
    /// what they prepared: nobody gets that.
    fn use_again(&mut self, anew: Claim) {
        let uid = anew.uid.clone();
        let Some(entry) = self.entries.get_mut(&uid) else {
            return;
        };
        for (driver, preparation) in &mut entry.claim.preparations {
            unindex_devices(&mut self.devices, &uid, driver, &preparation.devices);
            preparation.devices.clear();
        }
        let old = core::mem::replace(&mut entry.claim, anew);
        let given_up = old
            .preparations
            .into_iter()
            .filter(|(_, each)| each.is_abandoned());
        entry.claim.preparations.extend(given_up);
        // What the others had to do is done: no call is on its way or to be made.
        let tasks = entry.claim.preparations.iter().map(|(driver, each)| {
            let known = entry.tasks.remove(driver).filter(|_| each.is_abandoned());
            (driver.clone(), known.unwrap_or_default())
        });
        entry.tasks = tasks.collect();
        entry.is_intended = false;
        entry.dirty = true;
    }

    /// An admission of a claim that was abandoned ended before anything was asked for: what it brought is gone.
    pub(super) fn unuse(entry: &mut Entry) {
        if !entry.is_intended && entry.on_disk {
            let Entry { claim, tasks, .. } = entry;
            claim.preparations.retain(|driver, each| {
                each.is_abandoned() || tasks.get(driver).is_some_and(|task| task.called)
            });
            tasks.retain(|driver, _| claim.preparations.contains_key(driver));
        }
    }

    /// The claims that must be on disk before a driver is called. What another admission is writing is not
    /// written twice: should that fail, it is here the next time.
    pub(crate) fn begin_intent(&mut self, id: ReservationId, uids: &[ClaimUid]) -> Vec<Claim> {
        let mut claims = Vec::new();
        for uid in uids {
            if let Some(entry) = self.entries.get_mut(uid)
                && !entry.is_intended
                && entry.writing == 0
            {
                entry.writing += 1;
                claims.push(entry.claim.clone());
            }
        }
        if !claims.is_empty() {
            let uids = claims.iter().map(|claim| claim.uid.clone());
            self.intents.entry(id).or_default().extend(uids);
        }
        claims
    }

    pub(crate) fn end_intent(&mut self, id: ReservationId, is_written: bool) {
        for uid in self.intents.remove(&id).unwrap_or_default() {
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
            }
            self.settle(&uid);
        }
    }

    /// The claims of a pod that is to be committed, as far as the disk does not have them like this; `None` if
    /// one is not prepared. One that needs no driver needs no intent either: it may be on its way to disk, or not even that.
    pub(crate) fn to_commit(&self, uids: &[ClaimUid]) -> Option<Vec<Claim>> {
        let mut claims = Vec::new();
        for uid in uids {
            let entry = self.entries.get(uid).filter(|entry| entry.claim.is_prepared())?;
            // A write that is in flight may say less, or fail.
            if entry.dirty || entry.writing > 0 || !entry.is_intended {
                claims.push(entry.claim.clone());
            }
        }
        Some(claims)
    }

    /// What [`Claims::to_commit`] returned is being written. What is learned from here on is not in it.
    pub(crate) fn begin_commit(&mut self, written: &[Claim]) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.committing |= entry.dirty;
                entry.dirty = false;
                entry.writing += 1;
            }
            self.settle(uid);
        }
    }

    /// It is on disk, or will never be. To be called before the pod holds them, or leaves them.
    pub(crate) fn end_commit(&mut self, written: &[Claim], is_written: bool) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
                entry.dirty |= entry.committing && !is_written;
                entry.committing &= entry.writing > 0;
            }
            self.settle(uid);
        }
    }
}
