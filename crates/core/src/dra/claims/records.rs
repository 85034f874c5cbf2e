//! What is written by and by, and what nobody waits for any longer.

use alloc::vec;
use alloc::vec::Vec;

use super::{Claim, Claims, NotForgotten, PreparationState, Record, Task};
use crate::id::{ClaimUid, DriverName, PodUid, RecordId};

impl Claims {
    /// An operator gives up on a driver, for all claims that a pod has left. The claims that this is about.
    pub(crate) fn abandon(&mut self, pod: &PodUid, driver: &DriverName) -> Vec<ClaimUid> {
        let left = self.left.get(pod).cloned().unwrap_or_default();
        left.into_iter()
            .filter(|uid| self.abandon_claim(uid, driver))
            .collect()
    }

    /// An operator gives up on a driver, for a claim that no pod wants. Whether the driver had something to do for it.
    pub(crate) fn abandon_claim(&mut self, uid: &ClaimUid, driver: &DriverName) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else {
            return false;
        };
        let is_left = entry.is_unused() && !entry.deleting;
        if !is_left || !entry.blocking().any(|blocking| blocking == driver) {
            return false;
        }
        if let Some(preparation) = entry.claim.preparations.get_mut(driver) {
            preparation.state = PreparationState::Abandoned;
            entry.dirty = true;
        }
        self.reindex(uid);
        true
    }

    pub(crate) fn has_unrecorded(&self) -> bool {
        !self.to_write.is_empty() || !self.done.is_empty()
    }

    pub(crate) fn begin_record(&mut self) -> Option<Record> {
        if !self.has_unrecorded() {
            return None;
        }
        let id = RecordId(self.next_record);
        self.next_record += 1;
        let mut record = Record {
            id,
            put: Vec::new(),
            delete: self.done.iter().cloned().collect(),
        };
        for uid in self.to_write.clone() {
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.dirty = false;
                entry.writing += 1;
                record.put.push(entry.claim.clone());
            }
            self.reindex(&uid);
        }
        for uid in &record.delete {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.deleting = true;
            }
            self.reindex(uid);
        }
        self.records.insert(id, record.clone());
        Some(record)
    }

    /// An operator does not even want to know any longer that drivers were given up on: the record of a claim is to be
    /// deleted as it is. Ends as any record.
    pub(crate) fn begin_forget(&mut self, uid: &ClaimUid) -> Result<Record, NotForgotten> {
        let entry = self.entries.get_mut(uid).ok_or(NotForgotten::Unknown)?;
        let claim = || entry.claim.key.clone();
        if !entry.is_unused() {
            let (claim, pods) = (claim(), entry.pods());
            return Err(NotForgotten::Held { claim, pods });
        }
        let drivers: Vec<DriverName> = entry.blocking().cloned().collect();
        if !drivers.is_empty() || entry.claim.abandoned().next().is_none() {
            let claim = claim();
            return Err(NotForgotten::NotAbandoned { claim, drivers });
        }
        if !entry.is_abandoned() || entry.tasks.values().any(Task::is_busy) {
            return Err(NotForgotten::InFlight { claim: claim() });
        }
        entry.deleting = true;
        let id = RecordId(self.next_record);
        self.next_record += 1;
        let record = Record {
            id,
            put: Vec::new(),
            delete: vec![uid.clone()],
        };
        self.records.insert(id, record.clone());
        self.reindex(uid);
        Ok(record)
    }

    pub(crate) fn end_record(&mut self, id: RecordId, is_written: bool) {
        let Some(record) = self.records.remove(&id) else {
            return;
        };
        for Claim { uid, .. } in &record.put {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.dirty |= !is_written;
            }
            if is_written {
                self.release_unneeded(uid);
            }
            self.reindex(uid);
        }
        self.end_deletion(&record.delete, is_written);
    }

    /// Records of claims were deleted, or could not be.
    pub(super) fn end_deletion(&mut self, uids: &[ClaimUid], is_written: bool) {
        for uid in uids {
            if is_written {
                self.forget(uid);
            } else if let Some(entry) = self.entries.get_mut(uid) {
                entry.deleting = false;
                self.reindex(uid);
            }
        }
    }
}
