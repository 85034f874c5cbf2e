//! Background work on claims: driver calls without a waiting caller, expired health reports, and records of results.
//!
//! Each pass runs [`PASS_DELAY`] after a change. In that time waiting callers make their own calls, and changes
//! collect, so that one write records all of them.
//!
//! Cancelled admissions, removals that timed out, restarts and reboots leave claims behind. A pass calls the drivers for
//! them like for all others.

use std::time::Duration;

use devlet_core::{Moment, Node};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::deadline::sleep_until_some;
use crate::dra::DriverCalls;
use crate::store::Store;
use crate::workflow::claims::{Claims, instant_of};

/// Delay between a change and the pass that follows it.
const PASS_DELAY: Duration = Duration::from_millis(20);

/// Pause after a failed write.
const WRITE_PAUSE: Duration = Duration::from_secs(1);

/// Runs a pass after each change, until `stop`.
pub(crate) async fn run<D: DriverCalls + 'static>(claims: Claims<D>, stop: CancellationToken) {
    let mut changes = claims.store().subscribe();
    let mut next_write = Instant::now();
    loop {
        changes.borrow_and_update();
        let next_pass = reconcile_once(&claims, &mut next_write).await;
        let due = async {
            tokio::select! {
                changed = changes.changed() => match changed {
                    Ok(()) => tokio::time::sleep(PASS_DELAY).await,
                    // The store is gone, so no further change can follow.
                    Err(_) => std::future::pending().await,
                },
                () = sleep_until_some(next_pass) => {}
            }
        };
        tokio::select! {
            () = due => {}
            () = claims.woken() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Runs one pass. Returns when the next one is due if no change comes first.
async fn reconcile_once<D: DriverCalls + 'static>(
    claims: &Claims<D>,
    next_write: &mut Instant,
) -> Option<Instant> {
    let store = claims.store();
    let now = store.now();
    let is_past = |moment: Option<Moment>| moment.is_some_and(|moment| moment <= now);
    let (has_due_calls, has_expired, has_unrecorded) = store.read(|node| {
        let (call, expiry) = (node.next_call(), node.next_expiry());
        (is_past(call), is_past(expiry), node.has_unrecorded())
    });
    if has_due_calls {
        for call in store.update(|node| node.due_calls(now)) {
            // The task reports the result to the node.
            drop(claims.start_call(call));
        }
    }
    if has_expired {
        expire_health(store, now);
    }
    if has_unrecorded
        && Instant::now() >= *next_write
        && let Err(error) = store.record_claims().await
    {
        tracing::warn!(%error, "results of DRA drivers not written, trying again");
        *next_write = Instant::now() + WRITE_PAUSE;
    }
    let write = store.read(Node::has_unrecorded).then_some(*next_write);
    // Work that is still due waits for a change.
    let later = |moment: Option<Moment>| {
        let moment = moment.filter(|moment| *moment > now);
        moment.map(|moment| instant_of(moment, now))
    };
    let (call, expiry) = store.read(|node| (node.next_call(), node.next_expiry()));
    [write, later(call), later(expiry)].into_iter().flatten().min()
}

/// Marks the health of devices as unknown if their report has expired.
fn expire_health(store: &Store, now: Moment) {
    for (driver, device) in store.update(|node| node.tick(now)).devices {
        let (pool, device) = (device.pool, device.device);
        tracing::warn!(%driver, pool, device, "device health report expired");
    }
}
