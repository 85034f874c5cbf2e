//! A reservation that undoes itself.

use devlet_core::device_plugin::ledger::Reservation;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{Pod, PodRequest, ReservationId};

#[cfg(doc)]
use super::answer;
use super::completion::Completion;
use super::error::{CommitError, WriteError};
use super::row::Row;
use super::{Store, done};

/// A reservation. Dropping it frees the devices and leaves the claims, so an early return and a cancelled request both
/// leave the node as it was.
#[must_use = "dropping a hold frees the devices"]
#[derive(Debug)]
pub struct Held {
    pub(super) store: Store,
    pub(super) id: ReservationId,
    pub(super) reservation: Reservation,
}

impl Held {
    /// Returns the reserved devices and claims.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Returns the ID of the reservation.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// Records the pod's claims, which must be on disk before a driver is called for them. Returns `true` when they are on
    /// disk, or `false` if there is nothing to write, for example because another admission is writing it.
    ///
    /// After the first poll the change is written even if the future is dropped.
    pub async fn intent(&self) -> Result<bool, WriteError> {
        let written = self.store.begin(|state| {
            let intent = state.node.begin_intent(self.id);
            let mut rows: Vec<Row> = intent.put.iter().map(Row::claim).collect();
            rows.extend(intent.delete.into_iter().map(|uid| Row::Claim(uid, None)));
            let change = (!rows.is_empty()).then_some((rows, Completion::Intent(self.id)));
            Ok::<_, WriteError>(change)
        })?;
        let is_news = written.is_some();
        done(written).await?;
        Ok(is_news)
    }

    /// Allocates the reservation to the pod, after the plugins have answered and all claims are prepared. Returns when that is
    /// on disk.
    ///
    /// `answers` are those of the plugins, in the order of the grants, from [`answer()`]; `true` with an answer if the
    /// plugin requires a call before each start. If the future is dropped before its first poll, the devices are free
    /// again. After the first poll the change is written even if the future is dropped.
    pub async fn commit(
        self,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
    ) -> Result<Pod, CommitError> {
        let mut pod = None;
        let written = self.store.begin(|state| {
            let commit = state.node.begin_commit(self.id, request, answers)?;
            let mut rows: Vec<Row> = commit.claims.iter().map(Row::claim).collect();
            rows.push(Row::pod(&commit.pod));
            pod = Some(commit.pod);
            Ok::<_, devlet_core::CommitError>(Some((rows, Completion::Commit(self.id))))
        })?;
        done(written).await?;
        Ok(pod.ok_or(devlet_core::CommitError::Ended)?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Does nothing once the commit has begun.
        self.store.shared.update(|node| node.abort(self.id));
    }
}
