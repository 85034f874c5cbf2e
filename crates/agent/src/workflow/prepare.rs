//! Prepares the claims of an admission.

use devlet_core::ReserveError;
use devlet_core::dra::view::{Reason, Wait, listed};
use tokio::time::Instant;

use super::claims::{Claims, PendingCalls};
use super::written;
use crate::dra::DriverCalls;
use crate::metrics::ClaimOperation;
use crate::store::{Held, WriteError};

/// Why claims are not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Drivers did not prepare them by the deadline.
    #[error("{}", listed(.0))]
    TimedOut(Vec<Wait>),
    /// The intent to prepare them could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl<D: DriverCalls + 'static> Claims<D> {
    /// Calls drivers until all claims of an admission are prepared, up to `deadline`.
    ///
    /// If the admission fails, prepared claims are unprepared in the background once `held` is dropped. `waiting` is called
    /// for drivers that are missing or failed; its result is dropped when that wait ends.
    pub async fn prepare<W>(
        &self,
        held: &Held,
        deadline: Instant,
        waiting: &mut impl FnMut(&ReserveError) -> W,
    ) -> Result<(), PrepareError> {
        if held.reservation().claims.is_empty() {
            return Ok(());
        }
        let operation = self.metrics().claims(ClaimOperation::Prepare);
        let prepared = self.prepare_all(held, deadline, waiting).await;
        operation.ended(&prepared);
        prepared
    }

    async fn prepare_all<W>(
        &self,
        held: &Held,
        deadline: Instant,
        waiting: &mut impl FnMut(&ReserveError) -> W,
    ) -> Result<(), PrepareError> {
        let store = self.store();
        let mut changes = store.changes();
        let mut pending = PendingCalls::default();
        written(deadline, held.intent()).await?;
        loop {
            changes.mark_seen();
            let now = store.now();
            let (calls, waits) = store.update(|node| {
                let calls = node.prepare_calls(held.id(), now);
                (calls, node.waiting_for(held.id()))
            });
            if waits.is_empty() {
                return Ok(());
            }
            self.start_calls(calls, &mut pending);
            // Another admission was to write the intent, and failed.
            let is_unwritten = waits.iter().any(|wait| wait.reason == Reason::NotWritten);
            if is_unwritten && written(deadline, held.intent()).await? {
                continue;
            }
            let is_trouble = |wait: &Wait| wait.failure.is_some() || wait.reason == Reason::NoDriver;
            let reason = ReserveError::NotPrepared { waits };
            let ReserveError::NotPrepared { waits } = &reason else {
                return Ok(());
            };
            let _waits = waits.iter().any(is_trouble).then(|| waiting(&reason));
            if !self.wait(&mut changes, &mut pending, waits, deadline).await {
                return Err(PrepareError::TimedOut(waits.clone()));
            }
        }
    }
}
