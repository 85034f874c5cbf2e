//! The start of a container, which the hook of the runtime asks for: waits for the end of an earlier container.
//!
//! A refusal fails a pod with `restartPolicy: Never` for good, so a start waits if that can help.

use std::time::Duration;

use devlet_core::shield::{ContainerProcess, StartError};
use tokio::time::{Instant, timeout_at};

use super::LeaseWorkflow;
use crate::store::{LeaseError, in_time};

/// Pause between looks at processes, and between writes to a disk that fails.
const CHECK_PAUSE: Duration = Duration::from_millis(200);

impl LeaseWorkflow {
    /// Lets a container of a lease start. Waits until `deadline` for earlier containers, and for preparations in
    /// progress. Returns when the start is on disk.
    pub async fn start(
        &self,
        name: &str,
        container: &str,
        process: ContainerProcess,
        deadline: Instant,
    ) -> Result<(), LeaseError<StartError>> {
        let mut changes = self.store.subscribe();
        loop {
            changes.borrow_and_update();
            let checked = self.store.read(|node| node.leases().check_start(name, container));
            let refused = match checked {
                Ok(()) => {
                    let starting = self.store.start_leased(name, container, process.clone());
                    match in_time(deadline.max(Instant::now() + CHECK_PAUSE), starting).await {
                        Ok(()) => return Ok(()),
                        Err(refused) => refused,
                    }
                }
                Err(refused) => LeaseError::Refused(refused),
            };
            let now = Instant::now();
            let until = deadline.min(now + CHECK_PAUSE);
            match &refused {
                _ if now >= deadline => return Err(refused),
                LeaseError::Refused(StartError::Ended | StartError::NotPrepared) => return Err(refused),
                LeaseError::Refused(StartError::Running { .. }) if self.bury_of(name).await => {}
                LeaseError::Refused(_) => _ = timeout_at(until, changes.changed()).await,
                // Not until a change: a start that is not written is one.
                LeaseError::Write(_) => tokio::time::sleep_until(until).await,
            }
        }
    }

    /// Records the end of dead containers with a device of this lease. Returns `true` if there was one.
    async fn bury_of(&self, name: &str) -> bool {
        let lease = self.store.read(|node| {
            let view = node.leases().get(name)?;
            Some((view.lease.resource.clone(), view.lease.devices.clone()))
        });
        match lease {
            Some((resource, devices)) => self.bury(&resource, &devices).await,
            None => false,
        }
    }
}
