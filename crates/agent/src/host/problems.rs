//! What a human should look at, in words.

use devlet_client::v1::Problem;
use devlet_core::dra::claims::PreparationState;
use devlet_core::{Blocked, DeviceView, Node, PodUid};

use crate::grpc::uds::Unreachable;
use crate::store::{ImportReport, OpenReport, WriteError};

/// More pods or drivers than this are counted, not named.
const MOST_NAMED: usize = 10;

/// What is wrong now.
pub(super) fn of_now(node: &Node, health: Option<&WriteError>, mirror: Option<&str>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for blocked in node.blocked_by() {
        let hint = match blocked {
            Blocked::UnreadableState { file } | Blocked::UnreadableClaims { file } => format!(
                "devlet checkpoint repair {file} --out repaired && devlet import repaired, or devlet forget {file}"
            ),
            Blocked::UnreadableDatabase { file } => format!(
                "devlet get pods shows what is known; if that is not all, devlet import FILE, with a copy of \
                 kubelet_internal_checkpoint or dra_manager_state from before; if it is, devlet forget {file}"
            ),
        };
        problems.push(Problem {
            what: blocked.to_string(),
            hint,
            blocking: true,
        });
    }
    if let Some(error) = health {
        problems.push(Problem {
            what: format!("changes cannot be written: {error}"),
            hint: "pods that run are not touched; it goes on by itself once the disk takes writes".to_owned(),
            blocking: true,
        });
    }
    if let Some(reason) = mirror {
        problems.push(Problem {
            what: format!("the kubelet's file is out of date: {reason}"),
            hint: "pods are admitted as before, but no kubelet may take over until it is written again, which is tried \
                   every few seconds"
                .to_owned(),
            blocking: false,
        });
    }
    problems.extend(refused(node));
    problems.extend(abandoned(node));
    problems.extend(node.doubly_held().iter().map(|device| Problem {
        what: doubly_held(device),
        hint: "it is given to nobody else until all of them are gone: devlet remove UID".to_owned(),
        blocking: false,
    }));
    problems
}

/// Plugins of drivers that are there and are not taken in.
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
    if names.len() > MOST_NAMED {
        names.truncate(MOST_NAMED);
        names.push("...");
    }
    Some(Problem {
        what: format!("{what} there and not taken in: {}", names.join(", ")),
        hint: "devlet get drivers -o wide shows why, and devlet describe driver NAME what to do".to_owned(),
        blocking: false,
    })
}

/// Claims that an operator gave up on.
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
                    "should the driver come back, it is asked to unprepare it, and this ends; if it never does: devlet \
                     forget --claim {}",
                    view.claim.key
                )
            } else {
                "should the driver come back, it is asked to unprepare it, and this ends".to_owned()
            },
            blocking: false,
        }
    })
}

/// Sockets that nobody can dial. As `/readyz` has it, a node is not ready without them.
pub(super) fn of_sockets(unreachable: &[Unreachable]) -> Vec<Problem> {
    let problem = |socket: &Unreachable| Problem {
        what: socket.to_string(),
        hint: "pods and plugins that are there are not touched; once nothing is in its way, it is made again"
            .to_owned(),
        blocking: true,
    };
    unreachable.iter().map(problem).collect()
}

fn doubly_held(device: &DeviceView) -> String {
    let holders: Vec<&str> = device.holders.iter().map(PodUid::as_str).collect();
    format!(
        "device {} of {} is held by pods {}",
        device.id,
        device.resource,
        holders.join(" and ")
    )
}

/// What was found at start, and stays worth knowing.
pub(super) fn of_start(report: &OpenReport) -> Vec<Problem> {
    let note = |what: String, hint: String| Problem {
        what,
        hint,
        blocking: false,
    };
    let aside = report.set_aside.iter().map(|aside| {
        let what = format!(
            "at start, {} could not be read: {}",
            aside.original.display(),
            aside.reason
        );
        note(what, format!("it is kept as {}", aside.kept.display()))
    });
    let takeover = report.takeover.iter().map(|takeover| {
        let difference = &takeover.difference;
        let what = format!(
            "at start, a kubelet was found to have been in charge: {}, {}, {}",
            counted("added", &difference.added),
            counted("removed", &difference.removed),
            counted("changed", &difference.changed)
        );
        note(
            what,
            format!("the state from before it is in {}", takeover.archive.display()),
        )
    });
    let imports = [&report.imported, &report.imported_claims];
    let replaced = imports.into_iter().flatten().filter_map(replaced).map(|what| {
        let hint = "a kubelet does the same; devlet checkpoint verify FILE names them in a copy of the file";
        note(format!("at start, of an imported file {what}"), hint.to_owned())
    });
    aside.chain(takeover).chain(replaced).collect()
}

/// Entries of a file that did not count.
fn replaced(report: &ImportReport) -> Option<String> {
    let what = "replaced by later ones for the same container and resource, or claim";
    match report.replaced_entries {
        0 => None,
        1 => Some(format!("1 entry is {what}")),
        many => Some(format!("{many} entries are {what}")),
    }
}

/// How many pods, and which.
fn counted(what: &str, pods: &[PodUid]) -> String {
    let names = pods.iter().take(MOST_NAMED).map(PodUid::as_str);
    let mut names: Vec<&str> = names.collect();
    if pods.len() > MOST_NAMED {
        names.push("...");
    }
    match pods.len() {
        0 => format!("no pods {what}"),
        1 => format!("1 pod {what} ({})", names.join(", ")),
        many => format!("{many} pods {what} ({})", names.join(", ")),
    }
}

/// What was odd about an imported file.
pub(super) fn import_notes(report: &ImportReport) -> Vec<String> {
    let doubly = report.doubly_held.iter().map(|device| {
        let what = doubly_held(device);
        format!("{what}; it is given to nobody else until all of them are gone")
    });
    let undecodable = report.undecodable.iter().map(|each| {
        format!(
            "the answer of the plugin of {} for container {} of pod {} does not decode ({}): the devices are held, \
             but add nothing to the container",
            each.resource, each.container, each.pod, each.reason
        )
    });
    let replaced = replaced(report);
    let claims = match report.claims.len() {
        0 => None,
        1 => Some("1 claim is new".to_owned()),
        many => Some(format!("{many} claims are new")),
    };
    let left_out = report.left_out.iter().map(|key| {
        format!(
            "ResourceClaim {key} is left out: pods hold another one of that name, or it is being unprepared; import again \
             when they are gone, or it is (`devlet describe claim {key}`)"
        )
    });
    doubly
        .chain(undecodable)
        .chain(replaced)
        .chain(claims)
        .chain(left_out)
        .collect()
}
