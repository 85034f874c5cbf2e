//! Unprepares the claims that a removed pod held last.

use devlet_core::PodUid;
use devlet_core::dra::view::{Reason, Wait};
use tokio::time::Instant;

use super::claims::{Claims, PendingCalls};
use crate::dra::DriverCalls;
use crate::grpc::call::MIN_CALL_TIME;
use crate::metrics::ClaimOperation;

impl<D: DriverCalls + 'static> Claims<D> {
    /// Calls drivers until the claims that a pod held last are unprepared, up to `deadline`. Connected drivers get at
    /// least [`MIN_CALL_TIME`]. Returns the claims that are left; they are retried in the background.
    pub async fn unprepare(&self, pod: &PodUid, deadline: Instant) -> Result<(), Vec<Wait>> {
        if self.store().read(|node| node.pending_unprepare(pod)).is_empty() {
            return Ok(());
        }
        let operation = self.metrics().claims(ClaimOperation::Unprepare);
        let unprepared = self.unprepare_all(pod, deadline).await;
        operation.ended(&unprepared);
        unprepared
    }

    async fn unprepare_all(&self, pod: &PodUid, deadline: Instant) -> Result<(), Vec<Wait>> {
        let store = self.store();
        let mut changes = store.changes();
        let mut pending = PendingCalls::default();
        let min_deadline = deadline.max(Instant::now() + MIN_CALL_TIME);
        loop {
            changes.mark_seen();
            let now = store.now();
            let (calls, waits) = store.update(|node| {
                let calls = node.unprepare_calls(pod, now);
                (calls, node.pending_unprepare(pod))
            });
            if waits.is_empty() {
                return Ok(());
            }
            self.start_calls(calls, &mut pending);
            let is_called = |wait: &Wait| matches!(wait.reason, Reason::Calling | Reason::NotWritten);
            let until = match waits.iter().any(is_called) {
                true => min_deadline,
                false => deadline,
            };
            if !self.wait(&mut changes, &mut pending, &waits, until).await {
                return Err(waits);
            }
        }
    }
}
