//! Drivers that are gone for good: after the configured time, removals stop waiting for them.
//!
//! Only claims that no pod holds are concerned. Each abandoned claim stays on record, and its driver is still called if it
//! comes back.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_core::{ClaimUid, DriverName, Moment, Node};

use crate::events::{Events, Kind, PodRef};

/// Pause between a change of the node and the pass that follows it.
const PASS_DELAY: Duration = Duration::from_secs(1);

/// Abandons each driver that has been away for its configured time, until the node stops.
pub(crate) async fn run(agent: Agent, after: BTreeMap<DriverName, Duration>, events: Events) {
    let started = agent.store().now();
    let stop = agent.stopping();
    let mut changes = agent.store().subscribe();
    loop {
        changes.borrow_and_update();
        let now = agent.store().now();
        let mut next = None;
        for (driver, after) in &after {
            let Some(due) = agent.store().read(|node| due(node, driver, *after, started)) else {
                continue;
            };
            if due > now {
                next = Some(next.map_or(due, |next: Moment| next.min(due)));
                continue;
            }
            for left in agent.store().read(|node| left(node, driver)) {
                abandon(&agent, driver, left, &events).await;
            }
        }
        let pause = async {
            match next {
                Some(due) => tokio::time::sleep(Duration::from_millis(due.since(now))).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = pause => {}
            () = stop.cancelled() => return,
        }
        let _ = tokio::time::timeout(PASS_DELAY, stop.cancelled()).await;
    }
}

/// Returns the time when a driver counts as gone for good; `None` while it is connected.
fn due(node: &Node, driver: &DriverName, after: Duration, started: Moment) -> Option<Moment> {
    let since = match node.driver(driver) {
        Some(view) => view.unusable_since?,
        None => started,
    };
    Some(since.after(u64::try_from(after.as_millis()).unwrap_or(u64::MAX)))
}

/// A claim that waits for a driver, and the pod that held it last.
type Left = (ClaimUid, PodRef);

fn left(node: &Node, driver: &DriverName) -> Vec<Left> {
    let claims = node.claims().filter(|view| view.pods.is_empty());
    let waiting = claims.filter(|view| view.waits.iter().any(|wait| wait.driver == *driver));
    let left = waiting.map(|view| {
        let pod = PodRef {
            name: view.claim.pod_name.clone(),
            uid: view.claim.pod.clone(),
        };
        (view.claim.uid.clone(), pod)
    });
    left.collect()
}

async fn abandon(agent: &Agent, driver: &DriverName, (claim, pod): Left, events: &Events) {
    match agent.abandon_claim(&claim, driver).await {
        Ok(true) => {
            let message = format!(
                "DRA driver {driver} has been away for longer than abandonAfter: devlet no longer waits for it to unprepare \
                 ResourceClaim {claim}"
            );
            events.record(&pod, Kind::Warning, "DriverAbandoned", message);
        }
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(%driver, %claim, %error, "driver not abandoned yet: state cannot be written");
        }
    }
}
