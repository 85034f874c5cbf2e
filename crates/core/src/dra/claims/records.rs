//! Background writes of claim records, and abandoned drivers.

use alloc::vec;
use alloc::vec::Vec;

use super::{BeginForgetError, Claim, Claims, PreparationState, Record, Task};
use crate::id::{ClaimUid, DriverName, PodUid, RecordId};

impl Claims {
    /// Abandons a driver for all claims that the pod was the last to leave. Returns the claims.
    pub(crate) fn abandon(&mut self, pod: &PodUid, driver: &DriverName) -> Vec<ClaimUid> {
        let left = self.left.get(pod).cloned().unwrap_or_default();
        left.into_iter()
            .filter(|uid| self.abandon_claim(uid, driver))
            .collect()
    }

    /// Abandons a driver for an unused claim. Returns `false` if the claim did not wait for the driver.
    pub(crate) fn abandon_claim(&mut self, uid: &ClaimUid, driver: &DriverName) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else {
            return false;
        };
        let is_unused = entry.is_unused() && !entry.deleting;
        if !is_unused || !entry.blocking().any(|blocking| blocking == driver) {
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

    /// Begins to delete the record of an abandoned claim. Ends with [`Claims::end_record`].
    pub(crate) fn begin_forget(&mut self, uid: &ClaimUid) -> Result<Record, BeginForgetError> {
        let entry = self.entries.get_mut(uid).ok_or(BeginForgetError::Unknown)?;
        let claim = || entry.claim.key.clone();
        if !entry.is_unused() {
            let (claim, pods) = (claim(), entry.pods());
            return Err(BeginForgetError::Held { claim, pods });
        }
        let drivers: Vec<DriverName> = entry.blocking().cloned().collect();
        if !drivers.is_empty() || entry.claim.abandoned().next().is_none() {
            let claim = claim();
            return Err(BeginForgetError::NotAbandoned { claim, drivers });
        }
        if !entry.is_abandoned() || entry.tasks.values().any(Task::is_busy) {
            return Err(BeginForgetError::InFlight { claim: claim() });
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

    /// Ends a deletion of claim records.
    pub(super) fn end_deletion(&mut self, uids: &[ClaimUid], is_written: bool) {
        for uid in uids {
            if is_written {
                self.remove(uid);
            } else if let Some(entry) = self.entries.get_mut(uid) {
                entry.deleting = false;
                self.reindex(uid);
            }
        }
    }
}
