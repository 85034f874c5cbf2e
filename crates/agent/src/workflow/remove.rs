//! Removes a pod: releases its devices on disk, then unprepares the claims that it held last.

use std::collections::BTreeSet;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::dra::view::Wait;
use devlet_core::{ClaimUid, DriverName, Node, PodUid, ReleaseError};
use tokio::time::Instant;

use super::claims::Claims;
use super::written;
use crate::display::{self, NamedPod};
use crate::dra::DriverCalls;
use crate::store::{self, Store, WriteError};

/// Why a pod was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The pod is not on record.
    #[error("no such pod: {pod}")]
    Unknown { pod: NamedPod },
    /// Another admission or removal of the pod is in progress.
    #[error("pod {pod} is still being admitted or removed, which did not end in time; wait longer")]
    InFlight { pod: NamedPod },
    /// The pod is removed, but its claims hold their devices until drivers have unprepared them.
    #[error(
        "pod {pod} is removed, but its claims still hold their devices until drivers have unprepared them: {}; devlet \
         keeps trying; if a driver is gone for good, remove the pod again and abandon the driver{}",
        display::waits(.waits),
        describe(.abandoned)
    )]
    Unpreparing {
        pod: NamedPod,
        /// The pending claims and their drivers.
        waits: Vec<Wait>,
        /// The claims that were abandoned.
        abandoned: Vec<Abandoned>,
    },
    /// The removal could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// A claim that an operator abandoned at a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    pub claim: ClaimKey,
    pub uid: ClaimUid,
    pub driver: DriverName,
}

fn describe(abandoned: &[Abandoned]) -> String {
    let texts = abandoned.iter().map(|Abandoned { claim, uid, driver }| {
        format!("; ResourceClaim {claim} (UID {uid}) is abandoned at driver {driver}, which is on record")
    });
    texts.collect()
}

/// Removes a pod. When this returns, its devices are free, and the claims that it held last are unprepared.
///
/// `drivers` are abandoned: devlet does not wait for them, and their claims are returned. Waits for an admission of the pod in
/// progress. A removed pod with claims left can be removed again, to wait for them.
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

/// Returns the claims of a removed pod that are abandoned at one of these drivers.
fn abandoned(node: &Node, pod: &PodUid, drivers: &BTreeSet<DriverName>) -> Vec<Abandoned> {
    let left = node
        .claims()
        .filter(|view| view.pods.is_empty() && view.claim.pod == *pod);
    let abandoned = left.flat_map(|view| {
        let names = view.claim.abandoned().filter(|driver| drivers.contains(*driver));
        let abandoned = |driver: &DriverName| Abandoned {
            claim: view.claim.key.clone(),
            uid: view.claim.uid.clone(),
            driver: driver.clone(),
        };
        names.map(abandoned).collect::<Vec<_>>()
    });
    abandoned.collect()
}

/// Releases a pod once no admission or removal of it is in progress.
async fn release(store: &Store, pod: &PodUid, deadline: Instant) -> Result<(), RemoveError> {
    let named = || store.read(|node| NamedPod::of(node, pod));
    loop {
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
        let has_ended = |node: &Node| (!node.is_in_flight(pod)).then_some(()).ok_or(());
        if store.wait_for(deadline, has_ended).await.is_err() {
            return Err(RemoveError::InFlight { pod: named() });
        }
    }
}

/// Abandons a driver for the claims that a removed pod held last. That is on disk when this returns.
pub async fn abandon(store: &Store, pod: &PodUid, driver: &DriverName) -> Result<Vec<ClaimUid>, WriteError> {
    let abandoned = store.update(|node| node.abandon(pod, driver));
    record(store, driver, &abandoned).await?;
    Ok(abandoned)
}

/// Abandons a driver for a claim that no pod holds. That is on disk when this returns. Returns `true` if the driver had to
/// unprepare the claim.
pub async fn abandon_claim(store: &Store, claim: &ClaimUid, driver: &DriverName) -> Result<bool, WriteError> {
    let is_abandoned = store.update(|node| node.abandon_claim(claim, driver));
    if is_abandoned {
        record(store, driver, std::slice::from_ref(claim)).await?;
    }
    Ok(is_abandoned)
}

async fn record(store: &Store, driver: &DriverName, abandoned: &[ClaimUid]) -> Result<(), WriteError> {
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
