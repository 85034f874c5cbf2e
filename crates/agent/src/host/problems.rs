//! What a human should look at, in words.

use devlet_client::v1::Problem;
use devlet_core::device_plugin::impaired::{Impaired, Impairment};
use devlet_core::dra::claims::{DeviceShare, PreparationState};
use devlet_core::dra::view::ClaimView;
use devlet_core::{Availability, Blocked, DeviceView, Moment, Node, PodUid};

use crate::display::{MOST_NAMED, NamedPod, first, format_since};
use crate::grpc::uds::Unreachable;
use crate::plugin_registry::status::Summary;
use crate::store::{ImportReport, OpenReport, SetAside, WriteError, is_unknown_pod};

/// What is wrong now.
pub(super) fn of_now(
    node: &Node,
    now: Moment,
    health: Option<&WriteError>,
    mirror: Option<&str>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for blocked in node.blocked_by() {
        let hint = match blocked {
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
    problems.extend(super::dra_devices::partly_prepared(node));
    problems.extend(super::dra_devices::not_unprepared(node));
    problems.extend(node.shared_claim_devices().iter().map(shared_device));
    problems.extend(node.doubly_held().iter().map(|device| Problem {
        what: doubly_held(device),
        hint: "it is given to nobody else until all of them are gone: devlet remove UID".to_owned(),
        blocking: false,
    }));
    problems
}

/// Pods of a repaired file whose UID could not be read.
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

/// Devices that pods hold although no plugin calls them healthy.
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

/// Device plugins that were rejected lately.
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

/// A device that several claims hold, as records or a kubelet's file have it.
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

/// An id file that cannot be written while the other one can.
pub(super) fn of_id_files(failure: Option<&str>) -> Option<Problem> {
    failure.map(|reason| Problem {
        what: format!("an id file of the node is out of date: {reason}"),
        hint: "pods are admitted as before, but an older copy of the directory devlet may not be recognised; devlet \
               keeps trying"
            .to_owned(),
        blocking: false,
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

/// Sockets in `plugins_registry` that are not served.
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

fn doubly_held(device: &DeviceView) -> String {
    let holders: Vec<&str> = device.holders.iter().map(PodUid::as_str).collect();
    format!(
        "device {} of {} is held by pods {}",
        device.id,
        device.resource,
        holders.join(" and ")
    )
}

/// What was found in the place of a kubelet's file while devlet ran.
pub(super) fn of_set_aside(all: &[SetAside]) -> Vec<Problem> {
    all.iter()
        .map(|aside| set_aside("since the start", aside))
        .collect()
}

fn set_aside(when: &str, aside: &SetAside) -> Problem {
    Problem {
        what: format!(
            "{when}, {} was not used: {}",
            aside.original.display(),
            aside.reason
        ),
        hint: format!("it is kept as {}", aside.kept.display()),
        blocking: false,
    }
}

/// What was found at start, and stays worth knowing.
pub(super) fn of_start(report: &OpenReport) -> Vec<Problem> {
    let note = |what: String, hint: String| Problem {
        what,
        hint,
        blocking: false,
    };
    let aside = report.set_aside.iter().map(|aside| set_aside("at start", aside));
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
    let incomplete = report.incomplete.then(|| {
        "parts of the file were lost, and with them which devices they held: pods are admitted again only after devlet \
         forget FILE, with the file that devlet status names; before that, stop the pods that are not in devlet get pods"
            .to_owned()
    });
    let replaced = replaced(report);
    let claims = match report.claims.len() {
        0 => None,
        1 => Some("1 claim is new".to_owned()),
        many => Some(format!("{many} claims are new")),
    };
    let removed = report.difference.removed.iter();
    let removed = removed.map(|pod| format!("pod {pod} was removed: the file does not have it"));
    let left_out = report.left_out.iter().map(|key| {
        format!(
            "ResourceClaim {key} is left out: pods hold another one of that name, or it is being unprepared; import again \
             when they are gone, or it is (`devlet describe claim {key}`)"
        )
    });
    incomplete
        .into_iter()
        .chain(doubly)
        .chain(undecodable)
        .chain(replaced)
        .chain(claims)
        .chain(removed)
        .chain(left_out)
        .collect()
}
