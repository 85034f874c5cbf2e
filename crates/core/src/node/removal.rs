//! Removal of a pod in two phases: it keeps its devices and claims until the removal is on disk.

use alloc::vec::Vec;

use super::{Node, ReleaseError};
use crate::dra::claims::Claim;
use crate::id::PodUid;
use crate::pod::{Pod, PodName};

impl Node {
    /// Begins the removal of a pod, which keeps its devices and claims until [`Node::finish_release`]. Returns the claims
    /// to write in the same transaction: those that only this pod holds and whose record names another pod.
    pub fn begin_release(&mut self, pod: &PodUid) -> Result<Vec<Claim>, ReleaseError> {
        if self.is_in_flight(pod) {
            return Err(ReleaseError::InFlight);
        }
        let held = self.ledger.pods.get(pod).ok_or(ReleaseError::Unknown)?;
        let is_leaving = |other: &PodUid| self.ledger.releasing.contains_key(other);
        let (name, uids) = (&held.name, held.claim_uids());
        let claims = self.dra.claims.begin_release(pod, name, &uids, is_leaving);
        let uids = claims.iter().map(|claim| claim.uid.clone()).collect();
        self.ledger.releasing.insert(pod.clone(), uids);
        self.changes += 1;
        Ok(claims)
    }

    /// Completes a removal that is on disk.
    pub fn finish_release(&mut self, pod: &PodUid) {
        let Some(claims) = self.ledger.releasing.remove(pod) else {
            return;
        };
        if let Some(Pod { name, .. }) = self.ledger.pods.get(pod) {
            self.dra.claims.end_release(pod, name, &claims, true);
        }
        let Some(pod) = self.ledger.remove(pod) else {
            return;
        };
        self.ledger.admitted.remove(&pod.uid);
        for uid in pod.claim_uids() {
            self.dra.claims.release(&pod.uid, &pod.name, &uid);
        }
        self.ledger.unname(&pod.name, &pod.uid);
        for (name, devices) in pod.devices() {
            let resource = self.resources.get(name);
            self.ledger.release(&pod.uid, name, devices, resource);
        }
        self.changes += 1;
    }

    /// Cancels a removal that could not be written.
    pub fn cancel_release(&mut self, pod: &PodUid) {
        if let Some(claims) = self.ledger.releasing.remove(pod) {
            let name = PodName::default();
            self.dra.claims.end_release(pod, &name, &claims, false);
            self.changes += 1;
        }
    }
}
