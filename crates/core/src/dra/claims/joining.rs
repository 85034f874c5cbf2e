//! Joining of claims by pods, and the intent that is written before a driver is called.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::indexes::unindex_devices;
use super::{AllocatedClaim, Claim, Claims, Entry, Intent, PreparationState, Reallocation};
use crate::dra::drivers::Drivers;
use crate::id::{ClaimUid, DriverName, PodUid, ReservationId};
use crate::node::{LastSeen, ReserveError};
use crate::pod::PodName;

impl Claims {
    /// Returns an error if a pod cannot join a claim now. `is_leaving` returns `true` for a recorded pod that is being
    /// removed.
    pub(crate) fn plan(
        &self,
        wanted: &AllocatedClaim,
        drivers: &Drivers,
        is_leaving: impl Fn(&PodUid) -> bool,
    ) -> Result<(), ReserveError> {
        let unpreparing = |entry: &Entry, abandoned: Vec<DriverName>| ReserveError::Unpreparing {
            claim: entry.claim.key.clone(),
            uid: entry.claim.uid.clone(),
            drivers: entry.blocking().cloned().collect(),
            abandoned,
        };
        // The error is final only if a holder is not being removed.
        let refused = |entry: &Entry, final_error: ReserveError| match entry.holders.iter().all(&is_leaving) {
            true => ReserveError::ClaimReserved {
                claim: wanted.key.clone(),
                uid: entry.claim.uid.clone(),
                pods: entry.pods(),
            },
            false => final_error,
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
            if other.is_unused() {
                return Err(unpreparing(other, other.claim.abandoned().cloned().collect()));
            }
            let taken = ReserveError::ClaimUidTaken {
                claim: wanted.key.clone(),
                other: other.claim.key.clone(),
                uid: wanted.uid.clone(),
            };
            return Err(refused(other, taken));
        }
        if let Some(entry) = known.filter(|entry| entry.is_unused()) {
            // An abandoned driver blocks only requests that need this driver.
            let is_needed = |driver: &&DriverName| wanted.drivers.contains_key(*driver);
            let needed: Vec<DriverName> = entry.claim.abandoned().filter(is_needed).cloned().collect();
            if !entry.is_reusable() || !needed.is_empty() {
                return Err(unpreparing(entry, needed));
            }
        }
        if let Some(entry) = known.filter(|entry| !entry.is_unused()) {
            if !entry.claim.matches(wanted) {
                let reallocated = ReserveError::Reallocated {
                    claim: wanted.key.clone(),
                    pods: entry.pods(),
                    change: Box::new(Reallocation::new(&entry.claim, wanted)),
                };
                return Err(refused(entry, reallocated));
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
                let taken = ReserveError::ClaimNameTaken {
                    claim: wanted.key.clone(),
                    other: entry.claim.uid.clone(),
                    pods: entry.pods(),
                };
                return Err(refused(entry, taken));
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

    /// Adds an admission to a claim. Must be called only after [`Claims::plan`] succeeded.
    pub(crate) fn join(&mut self, pod: &PodUid, name: &PodName, wanted: &AllocatedClaim) {
        let uid = &wanted.uid;
        if self.entries.get(uid).is_some_and(Entry::is_unused) {
            self.reuse(Claim::new(wanted, pod, name));
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
        self.reindex(uid);
    }

    /// Replaces an unprepared claim by the version of a new pod. Abandoned drivers stay on record without their devices, so
    /// that no container gets these.
    fn reuse(&mut self, new: Claim) {
        let uid = new.uid.clone();
        let Some(entry) = self.entries.get_mut(&uid) else {
            return;
        };
        for (driver, preparation) in &mut entry.claim.preparations {
            unindex_devices(&mut self.devices, &uid, driver, &preparation.devices);
            preparation.keep_allocated();
            preparation.devices.clear();
        }
        let old = core::mem::replace(&mut entry.claim, new);
        let abandoned = old
            .preparations
            .into_iter()
            .filter(|(_, each)| each.is_abandoned());
        entry.claim.preparations.extend(abandoned);
        // The other drivers do not have pending work or calls in flight.
        let tasks = entry.claim.preparations.iter().map(|(driver, each)| {
            let known = entry.tasks.remove(driver).filter(|_| each.is_abandoned());
            (driver.clone(), known.unwrap_or_default())
        });
        entry.tasks = tasks.collect();
        entry.is_intended = false;
        entry.dirty = true;
    }

    /// Removes the drivers of an admission that reused a claim and ended before a driver was called.
    pub(super) fn undo_reuse(entry: &mut Entry) {
        if !entry.is_intended && entry.on_disk {
            let Entry { claim, tasks, .. } = entry;
            claim.preparations.retain(|driver, each| {
                each.is_abandoned() || tasks.get(driver).is_some_and(|task| task.called)
            });
            tasks.retain(|driver, _| claim.preparations.contains_key(driver));
        }
    }

    /// Returns the claims that must be on disk before a driver is called, and the records of earlier holders of their
    /// devices, which are deleted in the same transaction. Claims that another admission is writing are omitted, and so
    /// are claims with a device that another write releases. The next call returns them if they are still needed.
    pub(crate) fn begin_intent(&mut self, id: ReservationId, uids: &[ClaimUid]) -> Intent {
        let mut intent = Intent::default();
        if self.intents.contains_key(&id) {
            return intent;
        }
        for uid in uids {
            let entry = self.entries.get(uid);
            if entry.is_none_or(|entry| entry.is_intended || entry.writing > 0) {
                continue;
            }
            let superseded = self.superseded(uid);
            let is_done = |uid: &ClaimUid| {
                let is_done = self.entries.get(uid).is_some_and(Entry::is_done);
                is_done || intent.delete.contains(uid)
            };
            if !superseded.iter().all(is_done) {
                continue;
            }
            for uid in superseded {
                if let Some(entry) = self.entries.get_mut(&uid)
                    && !entry.deleting
                {
                    entry.deleting = true;
                    self.reindex(&uid);
                    intent.delete.push(uid);
                }
            }
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing += 1;
                intent.put.push(entry.claim.clone());
            }
        }
        if !intent.is_empty() {
            self.intents.insert(id, intent.clone());
        }
        intent
    }

    pub(crate) fn end_intent(&mut self, id: ReservationId, is_written: bool) {
        let Intent { put, delete } = self.intents.remove(&id).unwrap_or_default();
        for Claim { uid, .. } in put {
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
            }
            self.reindex(&uid);
        }
        self.end_deletion(&delete, is_written);
    }

    /// Returns `true` if the first record of a claim has to wait for [`Claims::begin_intent`].
    pub(crate) fn needs_intent(&self, entry: &Entry) -> bool {
        !entry.is_intended && !self.superseded(&entry.claim.uid).is_empty()
    }

    /// Returns the claims of a pod that differ from their records, for its commit; `None` if one is not prepared. A claim
    /// that does not need a driver does not need an intent either, so it may not be on disk.
    pub(crate) fn to_commit(&self, uids: &[ClaimUid]) -> Option<Vec<Claim>> {
        let mut claims = Vec::new();
        for uid in uids {
            let entry = self.entries.get(uid).filter(|entry| entry.claim.is_prepared())?;
            if self.needs_intent(entry) {
                return None;
            }
            // A write in flight may be older, or fail.
            if entry.dirty || entry.writing > 0 || !entry.is_intended {
                claims.push(entry.claim.clone());
            }
        }
        Some(claims)
    }

    /// Begins the write of the claims that [`Claims::to_commit`] returned. Later changes are not part of it.
    pub(crate) fn begin_commit(&mut self, written: &[Claim]) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.committing |= entry.dirty;
                entry.dirty = false;
                entry.writing += 1;
            }
            self.reindex(uid);
        }
    }

    /// Ends the write of [`Claims::begin_commit`]. Must be called before the pod holds or leaves the claims.
    pub(crate) fn end_commit(&mut self, written: &[Claim], is_written: bool) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
                entry.dirty |= entry.committing && !is_written;
                entry.committing &= entry.writing > 0;
            }
            if is_written {
                self.release_unneeded(uid);
            }
            self.reindex(uid);
        }
    }
}
