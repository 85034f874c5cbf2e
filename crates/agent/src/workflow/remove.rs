//! Removing a pod: it is gone when that is on disk, and removed when its claims are unprepared.

use std::collections::BTreeSet;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::dra::view::Wait;
use devlet_core::{ClaimUid, DriverName, Node, PodUid, ReleaseError};
use tokio::time::{Instant, timeout_at};

use super::claims::Claims;
use super::written;
use crate::display::{self, NamedPod};
use crate::dra::DriverCalls;
use crate::store::{self, Store, WriteError};

/// Why a pod was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// It holds nothing.
    #[error("no such pod: {pod}")]
    Unknown {
        /// The pod.
        pod: NamedPod,
    },
    /// It is still being admitted, or removed by somebody else.
    #[error("pod {pod} is still being admitted or removed, which did not end in time; wait longer")]
    InFlight {
        /// The pod.
        pod: NamedPod,
    },
    /// It is removed, but drivers have not unprepared its claims, which hold their devices until then.
    #[error(
        "pod {pod} is removed, but its claims still hold their devices until drivers have unprepared them: {}; devlet \
         keeps trying; if a driver is gone for good, remove the pod again and abandon the driver{}",
        display::waits(.waits),
        on_record(.abandoned)
    )]
    Unpreparing {
        /// The pod.
        pod: NamedPod,
        /// Which drivers, and which claims.
        waits: Vec<Wait>,
        /// The drivers that are not waited for.
        abandoned: Vec<Abandoned>,
    },
    /// It could not be written down.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// A driver that an operator gave up on, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    /// The claim.
    pub claim: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// The driver.
    pub driver: DriverName,
}

fn on_record(abandoned: &[Abandoned]) -> String {
    let texts = abandoned.iter().map(|Abandoned { claim, uid, driver }| {
        format!("; ResourceClaim {claim} (UID {uid}) is abandoned at driver {driver}, which is on record")
    });
    texts.collect()
}

/// Removes a pod: when this returns its devices are free, and the claims that it was the last to hold are unprepared,
/// except by the drivers that are given up on. What those have not unprepared is returned. An admission of the same pod that
/// is under way is waited for. A pod of which only claims are left is waited for again.
pub async fn remove(
    store: &Store,
    claims: &Claims<impl DriverCalls + 'static>,
    pod: &PodUid,
    drivers: &BTreeSet<DriverName>,
    deadline: Instant,
) -> Result<Vec<Abandoned>, RemoveError> {
    release(store, pod, deadline).await?;
    for driver in drivers {
        written(deadline, abandon(store, pod, driver)).await?;
    }
    let unprepared = claims.unprepare(pod, deadline).await;
    let abandoned = match drivers.is_empty() {
        true => Vec::new(),
        false => store.read(|node| abandoned(node, pod, drivers)),
    };
    match unprepared {
        Ok(()) => Ok(abandoned),
        Err(waits) => Err(RemoveError::Unpreparing {
            pod: store.read(|node| NamedPod::of(node, pod)),
            waits,
            abandoned,
        }),
    }
}

/// The claims that a pod has left and that these drivers were given up on for.
fn abandoned(node: &Node, pod: &PodUid, drivers: &BTreeSet<DriverName>) -> Vec<Abandoned> {
    let left = node
        .claims()
        .filter(|view| view.pods.is_empty() && view.claim.pod == *pod);
    let abandoned = left.flat_map(|view| {
        let given_up = view.claim.abandoned().filter(|driver| drivers.contains(*driver));
        let what = |driver: &DriverName| Abandoned {
            claim: view.claim.key.clone(),
            uid: view.claim.uid.clone(),
            driver: driver.clone(),
        };
        given_up.map(what).collect::<Vec<_>>()
    });
    abandoned.collect()
}

async fn release(store: &Store, pod: &PodUid, deadline: Instant) -> Result<(), RemoveError> {
    let named = || store.read(|node| NamedPod::of(node, pod));
    let mut changes = store.subscribe();
    loop {
        changes.borrow_and_update();
        match written(deadline, store.release(pod)).await {
            Ok(()) => return Ok(()),
            Err(store::ReleaseError::Refused(ReleaseError::Unknown)) => {
                let is_known = store.read(|node| node.has_left(pod));
                let unknown = || RemoveError::Unknown { pod: named() };
                return is_known.then_some(()).ok_or_else(unknown);
            }
            Err(store::ReleaseError::Refused(ReleaseError::InFlight)) => {}
            Err(store::ReleaseError::Write(error)) => return Err(error.into()),
        }
        if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
            return Err(RemoveError::InFlight { pod: named() });
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
    for uid in abandoned {
        let key = store.read(|node| node.claim(uid).map(|view| view.claim.key.clone()));
        let claim = key.map(tracing::field::display);
        tracing::warn!(claim, %uid, %driver, "claim abandoned");
    }
    Ok(())
}
