//! Which claims are on the node, who holds them, and what their drivers still have to do.
//!
//! ```text
//!                begin_intent               every driver answered
//!   (unknown) ─────────────────► preparing ───────────────────────► prepared
//!                                   │  ▲   another pod joins   ▲       │
//!                                   │  └───────────────────────┘       │ the last pod leaves
//!                                   └───────────► unpreparing ◄────────┘
//!                                                      │ every driver agreed, and the record is gone
//!                                                      ▼
//!                                                  (unknown)
//! ```
//!
//! Who holds a claim is on record with the pods, and nowhere else: a claim that no pod holds and no admission has
//! joined is being unprepared. So nothing is written when a pod leaves but that the pod is gone, and after a crash
//! an admission that never was answered has left.
//!
//! A [`Claim`] is what is on record. It is written as an intent before the first driver is called, and with what
//! drivers answered together with the pod. What comes after that is written by and by (`Claims::begin_record`),
//! and a record is deleted when nothing is left to unprepare. In between memory may know more than the disk: it
//! costs a repeated call after a crash, and drivers are used to that.
//!
//! For each driver of a claim there is at most one call at a time. Calls that failed are repeated with a growing
//! pause, and alone, so that one claim holds up no other.
//!
//! `by_key`, `left`, `due`, `failing`, `to_write`, `done`, `devices`, `holders`, `in_use`, `phases` and `preparing` are derived:
//! no question looks through all claims. `Claims::reindex` keeps them, and `check` recomputes them, after
//! every step of the history tests (`indexes.rs`). Pods join in `joining.rs`; drivers are called in `calls.rs`; what nobody
//! waits for is written in `records.rs`.

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
    Allocated, AllocatedClaim, AllocatedDevice, AllocationResult, Call, Claim, ClaimKey, Failure, Intent,
    NotForgotten, Operation, Preparation, PreparationState, PreparedDevice, Record,
};
pub(crate) use device_holders::DeviceConflict;
use device_holders::DeviceHolders;
pub use device_holders::{DeviceInUse, DeviceShare, HolderState};
use entry::InFlight;
pub(crate) use entry::{Entry, InUse, Task};
use indexes::{DeviceIndex, index_devices};
pub use reallocation::Reallocation;

/// How many claims are put into one call.
pub const MOST_CLAIMS: usize = 256;
/// How many calls of one driver run at a time for which nobody waits.
pub const MOST_CALLS: usize = 8;
/// The pause after the first failure; it doubles with each.
pub const FIRST_PAUSE_MS: u64 = 1000;
/// The longest pause.
pub const LONGEST_PAUSE_MS: u64 = 60 * 1000;

/// All claims.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub(crate) entries: BTreeMap<ClaimUid, Entry>,
    /// The claim that has a name; older ones that were given up on do not count.
    pub(crate) by_key: BTreeMap<ClaimKey, ClaimUid>,
    /// Unused claims by the pod that left last.
    pub(crate) left: BTreeMap<PodUid, BTreeSet<ClaimUid>>,
    /// Claims for which a driver is to be called without anybody waiting for it, and from when on.
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
    /// Takes in a claim from disk or from a kubelet's file. One that is known stays as it is.
    pub(crate) fn put(&mut self, claim: Claim) {
        if self.entries.contains_key(&claim.uid) {
            return;
        }
        let uid = claim.uid.clone();
        for (driver, preparation) in &claim.preparations {
            index_devices(&mut self.devices, &uid, driver, &preparation.devices);
        }
        // Of several claims of one name, at most one counts: the others were given up on.
        let named = self.by_key.get(&claim.key).and_then(|uid| self.entries.get(uid));
        if named.is_none_or(|other| other.is_unused() && other.blocking().next().is_none()) {
            self.by_key.insert(claim.key.clone(), uid.clone());
        }
        self.entries.insert(uid.clone(), Entry::new(claim, true));
        self.reindex(&uid);
    }

    /// A pod on record holds a claim.
    pub(crate) fn hold(&mut self, pod: &PodUid, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.joiners.remove(pod);
            entry.holders.insert(pod.clone());
            self.by_key.insert(entry.claim.key.clone(), uid.clone());
            self.reindex(uid);
        }
    }

    /// A pod on record is gone.
    pub(crate) fn release(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.holders.remove(pod);
            self.left_by(pod, name, uid);
        }
    }

    /// A pod is to leave. The records of the claims that it is the last to leave, as far as they do not say so.
    pub(crate) fn begin_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        uids: &[ClaimUid],
        is_leaving: impl Fn(&PodUid) -> bool,
    ) -> Vec<Claim> {
        let mut last_words = Vec::new();
        for uid in uids {
            let Some(entry) = self.entries.get_mut(uid) else {
                continue;
            };
            let stays = |other: &PodUid| other != pod && !is_leaving(other);
            let is_last = entry.joiners.is_empty() && !entry.holders.iter().any(stays);
            if is_last && entry.claim.pod != *pod {
                entry.writing += 1;
                last_words.push(Claim {
                    pod: pod.clone(),
                    pod_name: name.clone(),
                    ..entry.claim.clone()
                });
            }
        }
        last_words
    }

    /// What [`Claims::begin_release`] said is on disk, or will never be. To be called before the pod is gone.
    pub(crate) fn end_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        last_words: &[ClaimUid],
        is_written: bool,
    ) {
        for uid in last_words {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                if is_written {
                    entry.claim.pod = pod.clone();
                    entry.claim.pod_name = name.clone();
                    // Somebody came after all, who may have learned something.
                    entry.dirty |= entry.pods() != [pod.clone()];
                }
            }
            self.reindex(uid);
        }
    }

    /// An admission ended in nothing.
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
            Self::unuse(entry);
            // Unpreparing starts afresh, whatever happened to preparing.
            entry.tasks.values_mut().for_each(Task::succeeded);
        }
        self.reindex(uid);
    }
}

#[cfg(test)]
mod tests;
