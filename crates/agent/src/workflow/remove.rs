//! Removing a pod: it is gone when that is on disk, and removed when its claims are unprepared.

use std::collections::BTreeSet;

use devlet_core::dra::view::{Wait, listed};
use devlet_core::{ClaimUid, DriverName, PodUid, ReleaseError};
use tokio::time::{Instant, timeout_at};

use super::claims::Claims;
use crate::dra::DriverCalls;
use crate::store::{self, Store, WriteError};

/// Why a pod was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// It holds nothing.
    #[error("no such pod: {pod}")]
    Unknown {
        /// The pod.
        pod: PodUid,
    },
    /// It is still being admitted, or removed by somebody else.
    #[error("pod {pod} is still being admitted or removed, which did not end in time; wait longer")]
    InFlight {
        /// The pod.
        pod: PodUid,
    },
    /// It is gone, but drivers have not unprepared its claims.
    #[error(
        "pod {pod} is gone and its devices are free, but not all of its claims are unprepared: {}; this goes on being \
         tried; if a driver is gone for good, remove the pod again and abandon the driver",
        listed(.waits)
    )]
    Unpreparing {
        /// The pod.
        pod: PodUid,
        /// Which drivers, and which claims.
        waits: Vec<Wait>,
    },
    /// It could not be written down.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Removes a pod: when this returns its devices are free, and the claims that it was the last to hold are unprepared,
/// except by the drivers that are given up on. An admission of the same pod that is under way is waited for. A pod of
/// which only claims are left is waited for again.
pub async fn remove(
    store: &Store,
    claims: &Claims<impl DriverCalls + 'static>,
    pod: &PodUid,
    abandoned: &BTreeSet<DriverName>,
    deadline: Instant,
) -> Result<(), RemoveError> {
    release(store, pod, deadline).await?;
    for driver in abandoned {
        abandon(store, pod, driver).await?;
    }
    let unprepared = claims.unprepare(pod, deadline).await;
    unprepared.map_err(|waits| RemoveError::Unpreparing {
        pod: pod.clone(),
        waits,
    })
}

async fn release(store: &Store, pod: &PodUid, deadline: Instant) -> Result<(), RemoveError> {
    let mut changes = store.changed();
    loop {
        changes.borrow_and_update();
        match store.release(pod).await {
            Ok(()) => return Ok(()),
            Err(store::ReleaseError::Refused(ReleaseError::Unknown)) => {
                let is_known = store.read(|node| node.has_left(pod));
                let unknown = || RemoveError::Unknown { pod: pod.clone() };
                return is_known.then_some(()).ok_or_else(unknown);
            }
            Err(store::ReleaseError::Refused(ReleaseError::InFlight)) => {}
            Err(store::ReleaseError::Write(error)) => return Err(error.into()),
        }
        if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
            return Err(RemoveError::InFlight { pod: pod.clone() });
        }
    }
}

/// Gives up on a driver, for the claims that a pod was the last to leave. It is on disk when this returns.
pub async fn abandon(store: &Store, pod: &PodUid, driver: &DriverName) -> Result<Vec<ClaimUid>, WriteError> {
    let abandoned = store.update(|node| node.abandon(pod, driver));
    recorded(store, driver, &abandoned).await?;
    Ok(abandoned)
}

/// Gives up on a driver, for one claim that no pod wants. It is on disk when this returns. Whether the driver had something
/// to do for it.
pub async fn abandon_claim(store: &Store, claim: &ClaimUid, driver: &DriverName) -> Result<bool, WriteError> {
    let is_abandoned = store.update(|node| node.abandon_claim(claim, driver));
    if is_abandoned {
        recorded(store, driver, std::slice::from_ref(claim)).await?;
    }
    Ok(is_abandoned)
}

async fn recorded(store: &Store, driver: &DriverName, abandoned: &[ClaimUid]) -> Result<(), WriteError> {
    if abandoned.is_empty() {
        return Ok(());
    }
    store.record_claims().await?;
    for claim in abandoned {
        tracing::warn!(%driver, %claim, "nobody waits any longer for the driver to unprepare the claim");
    }
    Ok(())
}
