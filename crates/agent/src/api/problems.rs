//! Problems that an operator should look at.

use devlet_client::v1::Problem;
use devlet_core::device_plugin::impaired::{Impaired, Impairment};
use devlet_core::dra::claims::{AllocatedDevice, DeviceShare, Failure, PreparationState};
use devlet_core::dra::view::{ClaimView, Phase, Reason, Wait};
use devlet_core::{Availability, Blocked, DeviceView, Moment, Node, PodUid};
use devlet_uds::SocketMissing;

use super::lookup::shown_claims;
use crate::cluster::{ClusterState, TaskState};
use crate::display::{NamedPod, first, format_since};
use crate::plugin_registry::status::Summary;
use crate::store::{WriteError, is_unknown_pod};

/// Time for which errors of a reconciler are not a problem: it retries.
const TOLERATED_FAILURE_MS: u64 = 60 * 1000;

/// Returns the current problems of the node.
pub(super) fn current(
    node: &Node,
    now: Moment,
    health: Option<&WriteError>,
    mirror: Option<&str>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    problems.extend(node.blocked_by().iter().map(blocked));
    if let Some(error) = health {
        problems.push(Problem {
            what: format!("changes cannot be written: {error}"),
            hint: "pods that run are not touched; devlet continues once the disk accepts writes".to_owned(),
            blocking: true,
        });
    }
    if let Some(reason) = mirror {
        problems.push(Problem {
            what: format!("the kubelet's file is out of date: {reason}"),
            hint: match node.blocked() {
                None => "pods are admitted as before, but no kubelet may take over until it is written again, which is \
                         tried every few seconds",
                Some(_) => "no kubelet may take over until it is written again, which waits until pods are admitted",
            }
            .to_owned(),
            blocking: false,
        });
    }
    problems.extend(unknown_pods(node));
    problems.extend(node.all_impaired().iter().map(|group| impaired(node, group)));
    problems.extend(rejected(node, now));
    problems.extend(refused(node));
    problems.extend(abandoned(node));
    problems.extend(partly_prepared(node));
    problems.extend(not_unprepared(node));
    problems.extend(node.shared_claim_devices().iter().map(shared_device));
    problems.extend(node.doubly_held().iter().map(|device| Problem {
        what: doubly_held(device),
        hint: "no other pod gets it until all of them are gone: devlet remove UID".to_owned(),
        blocking: false,
    }));
    problems
}

/// Returns the problem of a file that blocks admissions.
fn blocked(reason: &Blocked) -> Problem {
    let hint = match reason {
        Blocked::UnreadableState { file, .. } | Blocked::UnreadableClaims { file, .. } => format!(
            "if a kubelet of this node wrote it, devlet checkpoint repair {file} --out repaired; devlet import repaired; otherwise, devlet forget {file}"
        ),
        Blocked::UnreadableDatabase { file, files } => format!(
            "devlet get pods shows what is known; if that is not all, devlet import FILE, with a copy of {files} \
             from before; if it is, devlet forget {file}"
        ),
        Blocked::LostDatabase { file, files, .. } => format!(
            "stop devlet, put the database back (mount its disk, move it to its place) and start again; or devlet get \
             pods shows what is known: if that is not all, devlet import FILE, with a copy of {files} from before; if it is, devlet forget {file}"
        ),
        Blocked::ContestedFile { file, .. } => format!(
            "if a kubelet was in charge of this node and wrote the file, devlet import {file}; otherwise, devlet forget \
             {file}; the devices of both sides stay held until then"
        ),
    };
    Problem {
        what: reason.to_string(),
        hint,
        blocking: true,
    }
}

/// Returns a problem for each pod of a repaired file whose UID could not be read.
fn unknown_pods(node: &Node) -> impl Iterator<Item = Problem> {
    let unknown = node.pods().filter(|pod| is_unknown_pod(&pod.uid));
    unknown.map(|pod| {
        let devices = pod.allocations.iter().flat_map(|each| &each.devices);
        let claims = pod
            .claims
            .iter()
            .map(|claim| format!("ResourceClaim {}", claim.key));
        let held = devices.map(ToString::to_string).chain(claims);
        let count = held.clone().count();
        Problem {
            what: format!(
                "an unknown pod ({}) holds {} ({count} in all)",
                pod.uid,
                first(held)
            ),
            hint: format!(
                "the file that was repaired did not say which pod; when it is gone: devlet forget --pod {}",
                pod.uid
            ),
            blocking: false,
        }
    })
}

/// Returns the problem of devices that pods hold and no plugin lists as healthy.
fn impaired(node: &Node, group: &Impaired) -> Problem {
    let Impaired {
        impairment,
        resource,
        devices,
        pods,
    } = group;
    let pods = first(pods.iter().map(|pod| NamedPod::of(node, pod)));
    let held = match devices.len() {
        1 => format!("1 device of {resource} that a pod holds"),
        many => format!("{many} devices of {resource} that pods hold"),
    };
    let are = if devices.len() == 1 { "is" } else { "are" };
    let named = format!("{} (held by {pods})", first(devices));
    let (what, hint) = match impairment {
        Impairment::PluginGone => {
            let since = match node.availability(resource) {
                Availability::Gone(Some(last)) => format_since(
                    &format!("; the last one answered at {} until ", last.endpoint),
                    last.gone_since,
                ),
                _ => String::new(),
            };
            (
                format!("no device plugin serves {held}: {named}{since}"),
                "the pods keep their devices; start the device plugin again",
            )
        }
        Impairment::NotListed => (
            format!("{held} {are} no longer listed by the device plugin: {named}"),
            "the pods keep their devices; see the device plugin's log, or stop the pods and devlet remove POD",
        ),
        Impairment::Unhealthy => (
            format!("{held} {are} unhealthy: {named}"),
            "the pods keep their devices; see the device plugin's log, or stop the pods and devlet remove POD",
        ),
    };
    Problem {
        what,
        hint: hint.to_owned(),
        blocking: false,
    }
}

/// Returns a problem for the device plugins that were rejected recently.
fn rejected(node: &Node, now: Moment) -> Option<Problem> {
    let rejected: Vec<_> = node.rejected_plugins(now).map(|each| &each.rejection).collect();
    let what = match &rejected[..] {
        [] => return None,
        [only] => format!(
            "the device plugin of {} was rejected: {}",
            only.resource, only.reason
        ),
        many => {
            let names = first(many.iter().map(|each| &each.resource));
            format!("{} device plugins were rejected: {names}", many.len())
        }
    };
    Some(Problem {
        what,
        hint: "devlet get plugins shows each with its reason; this ends when the plugin registers, or after an hour"
            .to_owned(),
        blocking: false,
    })
}

/// Returns a problem for the rejected plugins of DRA drivers.
fn refused(node: &Node) -> Option<Problem> {
    let mut names: Vec<&str> = node
        .refused_drivers()
        .map(|(socket, each)| match each.refusal.driver.as_str() {
            "" => socket,
            name => name,
        })
        .collect();
    let what = match names.len() {
        0 => return None,
        1 => "1 plugin of a DRA driver is".to_owned(),
        many => format!("{many} plugins of DRA drivers are"),
    };
    names.sort_unstable();
    names.dedup();
    Some(Problem {
        what: format!("{what} there and not registered: {}", first(names)),
        hint: "devlet get drivers -o wide shows why, and devlet describe driver NAME what to do".to_owned(),
        blocking: false,
    })
}

/// Returns a problem for each claim that an operator abandoned.
fn abandoned(node: &Node) -> impl Iterator<Item = Problem> {
    let abandoned = node
        .claims()
        .filter(|view| view.claim.abandoned().next().is_some());
    abandoned.map(|view| {
        let preparations = view.claim.preparations.iter();
        let given_up = preparations.filter(|(_, each)| each.state == PreparationState::Abandoned);
        let drivers: Vec<&str> = given_up.map(|(driver, _)| driver.as_str()).collect();
        Problem {
            what: format!(
                "ResourceClaim {} (UID {}) was abandoned: {} may still have devices prepared for it",
                view.claim.key,
                view.claim.uid,
                drivers.join(" and ")
            ),
            hint: if view.pods.is_empty() {
                format!(
                    "if a driver comes back, devlet has it unprepare the claim; otherwise, devlet forget --claim {}",
                    view.claim.key
                )
            } else {
                "if a driver comes back, devlet has it unprepare the claim".to_owned()
            },
            blocking: false,
        }
    })
}

/// Returns the problem of a device that several claims hold according to records or a kubelet's file.
fn shared_device((device, claims): &(DeviceShare, Vec<ClaimView<'_>>)) -> Problem {
    let holders: Vec<String> = claims.iter().map(|view| view.claim.key.to_string()).collect();
    Problem {
        what: format!("{device} is held by ResourceClaims {}", holders.join(" and ")),
        hint: "no other claim gets it until all but one of them are unprepared: devlet describe claim NAME shows the pods \
               to remove"
            .to_owned(),
        blocking: false,
    }
}

/// Returns the problem of an id file that cannot be written while the other one can.
pub(super) fn of_id_files(failure: Option<&str>) -> Option<Problem> {
    failure.map(|reason| Problem {
        what: format!("an id file of the node is out of date: {reason}"),
        hint: "pods are admitted as before, but an older copy of the directory devlet may not be recognised; devlet \
               keeps trying"
            .to_owned(),
        blocking: false,
    })
}

/// Returns a problem for each socket that peers cannot dial. Without them a node is not ready, as in `/readyz`.
pub(super) fn of_sockets(unreachable: &[SocketMissing]) -> Vec<Problem> {
    let problem = |socket: &SocketMissing| Problem {
        what: socket.to_string(),
        hint: "pods and plugins that are there are not touched; once nothing is in its way, it is made again"
            .to_owned(),
        blocking: true,
    };
    unreachable.iter().map(problem).collect()
}

/// Returns the problems of sockets in `plugins_registry` that are not served.
pub(super) fn of_registry(summary: &Summary) -> Vec<Problem> {
    let mut problems = Vec::new();
    if summary.dead > 0 {
        let sockets = if summary.dead == 1 {
            "1 socket in plugins_registry is dead".to_owned()
        } else {
            format!("{} sockets in plugins_registry are dead", summary.dead)
        };
        let mut names: Vec<String> = summary
            .named
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        if summary.dead > names.len() {
            names.push("...".to_owned());
        }
        problems.push(Problem {
            what: format!("{sockets}: {}", names.join(", ")),
            hint: "start the plugins again, or remove the sockets; until then devlet retries them every 2 minutes".to_owned(),
            blocking: false,
        });
    }
    let (sockets, directories) = (summary.skipped_sockets, summary.skipped_directories);
    if sockets + directories > 0 {
        problems.push(Problem {
            what: format!(
                "plugins_registry has more in it than devlet watches: {sockets} sockets and {directories} directories are \
                 skipped"
            ),
            hint: "remove those that are not of plugins; sockets and directories of root come first".to_owned(),
            blocking: false,
        });
    }
    problems
}

/// Returns the problems of an integration with a cluster.
pub(super) fn of_cluster(state: &ClusterState, now: Moment) -> Vec<Problem> {
    let failing = |(name, task): (&&str, &TaskState)| {
        let since = task.failing_since?;
        let error = task.last_error.as_ref()?;
        (now.since(since) > TOLERATED_FAILURE_MS).then(|| Problem {
            what: format!(
                "reconciler {name} fails{}: {}",
                format_since(" since ", since),
                error.message
            ),
            hint: "devlet keeps retrying; admitted pods keep their devices and claims".to_owned(),
            blocking: false,
        })
    };
    let stale = state.stale_drivers.iter().map(|driver| Problem {
        what: format!(
            "the owner of ResourceSlices of driver {driver} is an earlier Node object, so they are deleted as garbage"
        ),
        hint: format!("driver {driver} must restart to publish its devices again"),
        blocking: false,
    });
    let node = state.connection.as_ref().zip(state.node_missing_since);
    let missing = node.map(|(connection, since)| Problem {
        what: format!(
            "the API server has had no Node object {}{}",
            connection.node,
            format_since(" since ", since)
        ),
        hint: "check --node-name; the kubelet or node agent creates the object, or devlet with kubernetes.heartbeat"
            .to_owned(),
        blocking: false,
    });
    let foreign = state.pods_of.as_ref().map(|owner| Problem {
        what: format!(
            "the pods on record are those of {owner}, and the API server lists none of them, so devlet removes none"
        ),
        hint: "go back to that Node name and API server; otherwise end these pods, release each with devlet remove, and \
               restart devlet"
            .to_owned(),
        blocking: true,
    });
    let failing = state.tasks.iter().filter_map(failing);
    let of_node = foreign.into_iter().chain(missing);
    of_node.chain(failing).chain(stale).collect()
}

/// Describes a device that several pods hold.
pub(super) fn doubly_held(device: &DeviceView) -> String {
    let holders: Vec<&str> = device.holders.iter().map(PodUid::as_str).collect();
    format!(
        "device {} of {} is held by pods {}",
        device.id,
        device.resource,
        holders.join(" and ")
    )
}

/// Returns a problem for each claim that a driver reported as prepared without all of its devices. A kubelet accepts
/// such an answer, too.
fn partly_prepared(node: &Node) -> Vec<Problem> {
    let mut problems = Vec::new();
    for view in shown_claims(node).filter(|view| !view.pods.is_empty()) {
        for (driver, preparation) in &view.claim.preparations {
            let missing: Vec<String> = preparation.missing_devices().map(device_name).collect();
            if missing.is_empty() {
                continue;
            }
            problems.push(Problem {
                what: format!(
                    "ResourceClaim {} (UID {}) is prepared in part: driver {driver} did not prepare {}",
                    view.claim.key,
                    view.claim.uid,
                    missing.join(", ")
                ),
                hint: format!(
                    "its containers run without these devices; see the log of the driver, then remove and admit the pods \
                     again (devlet describe claim {})",
                    view.claim.key
                ),
                blocking: false,
            });
        }
    }
    problems
}

/// Returns a problem for each unused claim that a driver has not unprepared because its last call failed or it is not
/// connected.
fn not_unprepared(node: &Node) -> Vec<Problem> {
    let unused = shown_claims(node).filter(|view| view.phase == Phase::Unpreparing);
    let waits = unused.flat_map(|view| view.waits);
    let failing = waits.filter(|wait| wait.failure.is_some() || wait.reason == Reason::NoDriver);
    let problem = |wait: Wait| {
        let Wait {
            claim,
            uid,
            driver,
            failure,
            ..
        } = &wait;
        let reason = match failure {
            Some(Failure::Driver { reason, .. } | Failure::Call { reason, .. }) => reason.clone(),
            Some(Failure::Invalid(answer)) => answer.to_string(),
            None => {
                let since = wait.since.map(|since| format_since(" since ", since));
                format!("it is not connected{}", since.unwrap_or_default())
            }
        };
        Problem {
            what: format!(
                "ResourceClaim {claim} (UID {uid}) is not unprepared by driver {driver}, and holds its devices: {reason}"
            ),
            hint: format!(
                "see the log of the driver; devlet keeps trying; if the driver is gone for good: devlet remove --claim \
                 {claim} --abandon-driver {driver}"
            ),
            blocking: false,
        }
    };
    failing.map(problem).collect()
}

fn device_name(device: &AllocatedDevice) -> String {
    let AllocatedDevice { pool, device, .. } = device;
    format!("{pool}/{device}")
}
