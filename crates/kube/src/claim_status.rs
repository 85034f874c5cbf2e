//! Writes into `status.devices` of ResourceClaims which devices are prepared here, and their health.
//!
//! Two conditions for each allocated device, by server-side apply: the data of drivers, and their conditions, stay as they
//! are. They are not removed when the claim is unprepared: the API server removes them when the claim is deallocated, and that
//! is the claim controller's decision. A claim is read before each write, because conditions keep the time of their last change,
//! and it is written at most once per second. The identity of a node may never write them, so then nothing is tried.

mod report;

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_core::ClaimUid;
use devlet_core::dra::claims::ClaimKey;
use devlet_core::dra::health::DEFAULT_LEASE_MS;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::FIELD_MANAGER;
use crate::connection::{CallError, Connection};
use crate::task::{PASS_PAUSE, Task};
use report::{ClaimReport, Merged};

/// The prefix of the user names of nodes.
const NODE_USER: &str = "system:node:";

/// The last write of each claim. It is repeated if the report differs, or if all pods of that time are gone: the claim may
/// have been deallocated in between.
type Written = BTreeMap<ClaimUid, ClaimReport>;

/// Writes the devices of prepared claims until the node stops. Everything is compared again after a new list of pods, as the
/// API server may have been restored.
pub(crate) async fn run(
    agent: Agent,
    connection: Connection,
    mut identity: watch::Receiver<Option<String>>,
    mut lists: watch::Receiver<u64>,
) {
    let mut task = Task::new("claim-status", &agent);
    let mut changes = agent.store().subscribe();
    let mut written = Written::new();
    let early_until = Instant::now() + Duration::from_millis(DEFAULT_LEASE_MS);
    loop {
        let user = identity.borrow_and_update().clone();
        if !user.is_some_and(|user| may_write(&user)) {
            tokio::select! {
                Ok(()) = identity.changed() => continue,
                () = task.stopped() => return,
            }
        }
        changes.borrow_and_update();
        lists.borrow_and_update();
        let now = agent.store().now();
        let is_early = Instant::now() < early_until;
        let reports = agent.store().read(|node| ClaimReport::all(node, now, is_early));
        let failure = tokio::select! {
            failure = write_due(&connection, reports, &mut written) => failure,
            () = task.stopped() => return,
        };
        let pause = match &failure {
            None => {
                task.succeeded();
                PASS_PAUSE
            }
            Some(error) => task.failed(error).max(PASS_PAUSE),
        };
        if !task.pause(pause).await {
            return;
        }
        tokio::select! {
            Ok(()) = changes.changed() => {}
            Ok(()) = identity.changed() => written.clear(),
            Ok(()) = lists.changed() => written.clear(),
            () = tokio::time::sleep_until(early_until), if is_early => {}
            () = std::future::ready(()), if failure.is_some() => {}
            () = task.stopped() => return,
        }
    }
}

/// Returns `false` for nodes: the node authorizer never lets them write the status of claims.
fn may_write(user: &str) -> bool {
    !user.is_empty() && !user.starts_with(NODE_USER)
}

/// Writes the reports that are due. Returns the last failure.
async fn write_due(
    connection: &Connection,
    reports: BTreeMap<ClaimUid, ClaimReport>,
    written: &mut Written,
) -> Option<CallError> {
    written.retain(|uid, _| reports.contains_key(uid));
    let mut failure = None;
    for (uid, report) in reports {
        if written.get(&uid).is_some_and(|last| report.is_written(last)) {
            continue;
        }
        match write(connection, &uid, &report).await {
            Ok(()) => {
                written.insert(uid, report);
            }
            Err(error) if error.is_outdated() => {
                tracing::debug!(claim = %report.key, %error, "status of devices not written: the claim has changed");
                written.insert(uid, report);
            }
            Err(error) => {
                // Without the right for one driver, claims of others can still be written.
                let is_of_claim = error.code() == Some(http::StatusCode::UNPROCESSABLE_ENTITY);
                failure = Some(error);
                if !is_of_claim {
                    break;
                }
            }
        }
    }
    failure
}

/// Writes the conditions of a claim that differ. A claim that is gone is not an error.
async fn write(connection: &Connection, uid: &ClaimUid, report: &ClaimReport) -> Result<(), CallError> {
    let ClaimKey { namespace, name } = &report.key;
    let known = connection.call(|client| async move {
        let claims = Api::<ResourceClaim>::namespaced(client, namespace);
        claims.get_opt(name).await
    });
    let Some(known) = known.await? else {
        return Ok(());
    };
    if known.metadata.uid.as_deref() != Some(uid.as_str()) {
        return Ok(());
    }
    let status = known.status.unwrap_or_default();
    let Merged::Differs(devices) = report.merge(&status, Timestamp::now()) else {
        return Ok(());
    };
    let patch = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        // The UID is a precondition.
        "metadata": { "name": name, "namespace": namespace, "uid": uid.as_str() },
        "status": { "devices": devices },
    });
    let applied = connection.call(|client| async move {
        let claims = Api::<ResourceClaim>::namespaced(client, namespace);
        // The types of the conditions are devlet's, so other writers of them are earlier versions.
        let params = PatchParams::apply(FIELD_MANAGER).force();
        claims.patch_status(name, &params, &Patch::Apply(&patch)).await
    });
    applied.await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_does_not_try_to_write() {
        assert!(may_write("system:serviceaccount:devlet:devlet"));
        assert!(!may_write("system:node:worker-1"));
        assert!(!may_write(""));
    }
}
