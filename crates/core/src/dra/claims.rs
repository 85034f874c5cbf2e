//! Claims of the node: their holders, and the pending work of their drivers.
//!
//! ```text
//!                begin_intent               every driver answered
//!   (unknown) ─────────────────► preparing ───────────────────────► prepared
//!                                   │  ▲   another pod joins   ▲       │
//!                                   │  └───────────────────────┘       │ the last pod leaves
//!                                   └───────────► unpreparing ◄────────┘
//!                                                      │ every driver unprepared it, and the record is deleted
//!                                                      ▼
//!                                                  (unknown)
//! ```
//!
//! Only the records of pods say which pods hold a claim. A claim that no pod holds and no admission has joined is being
//! unprepared. So the removal of a pod usually writes only the pod, and an admission that was in flight at a crash has left
//! its claims.
//!
//! A [`Claim`] is the record. It is written as an intent before the first driver is called, and with the drivers' answers
//! together with the pod. Later changes are written in the background (`Claims::begin_record`). The record is deleted when
//! every driver has unprepared the claim. Memory may be newer than the disk, so calls may be repeated after a crash; calls
//! are idempotent.
//!
//! For each driver of a claim, at most one call is in flight. A failed call is retried with exponential backoff and with
//! only one claim, so that a failing claim does not delay other claims.
//!
//! `by_key`, `left`, `due`, `failing`, `to_write`, `done`, `devices`, `holders`, `in_use`, `phases` and `preparing` are indexes:
//! no query scans all claims. `Claims::reindex` updates them, and `check` recomputes them after every step of the history
//! tests (`indexes.rs`). `joining.rs` has the joining of pods, `calls.rs` the calls of drivers, and `records.rs` the
//! background writes.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::view::Phase;
use crate::id::{CallId, ClaimUid, DriverName, Moment, PodUid, RecordId, ReservationId};
use crate::pod::PodName;

mod calls;
mod claim;
mod device_holders;
mod entry;
mod indexes;
mod joining;
mod reallocation;
mod records;

pub use claim::{
    Allocated, AllocatedClaim, AllocatedDevice, AllocationResult, BeginForgetError, Call, Claim, ClaimKey,
    Failure, Intent, Operation, Preparation, PreparationState, PreparedDevice, Record,
};
pub(crate) use device_holders::DeviceConflict;
use device_holders::DeviceHolders;
pub use device_holders::{DeviceInUse, DeviceShare, HolderState};
use entry::InFlight;
pub(crate) use entry::{Entry, InUse, Task};
use indexes::{DeviceIndex, index_devices};
pub use reallocation::Reallocation;

/// The maximum number of claims in one call.
pub const MAX_CLAIMS: usize = 256;
/// The maximum number of background calls of one driver in flight.
pub const MAX_BACKGROUND_CALLS: usize = 8;
/// The delay before the first retry, in milliseconds. It doubles with each failure.
pub const MIN_BACKOFF_MS: u64 = 1000;
/// The maximum delay before a retry, in milliseconds.
pub const MAX_BACKOFF_MS: u64 = 60 * 1000;

/// All claims.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub(crate) entries: BTreeMap<ClaimUid, Entry>,
    /// The current claim of each name, without older abandoned claims.
    pub(crate) by_key: BTreeMap<ClaimKey, ClaimUid>,
    /// Unused claims by the pod that was the last to leave.
    pub(crate) left: BTreeMap<PodUid, BTreeSet<ClaimUid>>,
    /// Claims with a due background call of a driver, by the time of the call.
    due: BTreeMap<DriverName, BTreeSet<(Moment, ClaimUid)>>,
    /// Claims for which the last call of a driver failed.
    failing: BTreeMap<DriverName, BTreeSet<ClaimUid>>,
    to_write: BTreeSet<ClaimUid>,
    done: BTreeSet<ClaimUid>,
    devices: DeviceIndex,
    holders: DeviceHolders,
    pub(crate) in_use: InUse,
    pub(crate) phases: BTreeMap<Phase, usize>,
    /// Claims that are being prepared.
    pub(crate) preparing: BTreeSet<ClaimUid>,
    calls: BTreeMap<CallId, InFlight>,
    background: BTreeMap<DriverName, usize>,
    intents: BTreeMap<ReservationId, Intent>,
    records: BTreeMap<RecordId, Record>,
    next_call: u64,
    next_record: u64,
}

impl Claims {
    /// Adds a claim from disk or from a kubelet's file. A known claim stays unchanged.
    pub(crate) fn put(&mut self, claim: Claim) {
        if self.entries.contains_key(&claim.uid) {
            return;
        }
        let uid = claim.uid.clone();
        for (driver, preparation) in &claim.preparations {
            index_devices(&mut self.devices, &uid, driver, &preparation.devices);
        }
        // At most one of several claims with the same name is not abandoned.
        let named = self.by_key.get(&claim.key).and_then(|uid| self.entries.get(uid));
        if named.is_none_or(|other| other.is_unused() && other.blocking().next().is_none()) {
            self.by_key.insert(claim.key.clone(), uid.clone());
        }
        self.entries.insert(uid.clone(), Entry::new(claim, true));
        self.reindex(&uid);
    }

    /// Adds a recorded pod to the holders of a claim.
    pub(crate) fn hold(&mut self, pod: &PodUid, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.joiners.remove(pod);
            entry.holders.insert(pod.clone());
            self.by_key.insert(entry.claim.key.clone(), uid.clone());
            self.reindex(uid);
        }
    }

    /// Removes a pod from the holders of a claim.
    pub(crate) fn release(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.holders.remove(pod);
            self.left_by(pod, name, uid);
        }
    }

    /// Begins the removal of a pod. Returns the records of claims that it is the last to leave and that name another pod.
    pub(crate) fn begin_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        uids: &[ClaimUid],
        is_leaving: impl Fn(&PodUid) -> bool,
    ) -> Vec<Claim> {
        let mut written = Vec::new();
        for uid in uids {
            let Some(entry) = self.entries.get_mut(uid) else {
                continue;
            };
            let stays = |other: &PodUid| other != pod && !is_leaving(other);
            let is_last = entry.joiners.is_empty() && !entry.holders.iter().any(stays);
            if is_last && entry.claim.pod != *pod {
                entry.writing += 1;
                written.push(Claim {
                    pod: pod.clone(),
                    pod_name: name.clone(),
                    ..entry.claim.clone()
                });
            }
        }
        written
    }

    /// Ends the write of the claims that [`Claims::begin_release`] returned. Must be called before the pod is removed.
    pub(crate) fn end_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        written: &[ClaimUid],
        is_written: bool,
    ) {
        for uid in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                if is_written {
                    entry.claim.pod = pod.clone();
                    entry.claim.pod_name = name.clone();
                    // A pod joined meanwhile, and its changes may not be in the record.
                    entry.dirty |= entry.pods() != [pod.clone()];
                }
            }
            self.reindex(uid);
        }
    }

    /// Removes an admission that did not commit from a claim.
    pub(crate) fn leave(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.joiners.remove(pod);
            self.left_by(pod, name, uid);
        }
    }

    fn left_by(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid)
            && entry.is_unused()
        {
            if entry.claim.pod != *pod {
                entry.claim.pod = pod.clone();
                entry.claim.pod_name = name.clone();
                entry.dirty = true;
            }
            Self::undo_reuse(entry);
            // Failures of prepare calls do not delay unprepare calls.
            entry.tasks.values_mut().for_each(Task::succeeded);
        }
        self.reindex(uid);
    }
}

#[cfg(test)]
mod tests;
