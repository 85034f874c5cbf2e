//! Notes about files: those set aside or adopted at start, and imported ones.

use devlet_client::v1::Problem;
use devlet_core::PodUid;

use super::problems::doubly_held;
use crate::display::first;
use crate::store::{ImportReport, OpenReport, Quarantined};

/// Returns a note for each file that was set aside since the start.
pub(super) fn since_start(all: &[Quarantined]) -> Vec<Problem> {
    all.iter()
        .map(|aside| set_aside("since the start", aside))
        .collect()
}

fn set_aside(when: &str, aside: &Quarantined) -> Problem {
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

/// Returns the notes about files at start.
pub(super) fn at_start(report: &OpenReport) -> Vec<Problem> {
    let note = |what: String, hint: String| Problem {
        what,
        hint,
        blocking: false,
    };
    let aside = report
        .quarantined
        .iter()
        .map(|aside| set_aside("at start", aside));
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

/// Describes entries of a file that later entries replaced.
fn replaced(report: &ImportReport) -> Option<String> {
    let what = "replaced by later ones for the same container and resource, or claim";
    match report.replaced_entries {
        0 => None,
        1 => Some(format!("1 entry is {what}")),
        many => Some(format!("{many} entries are {what}")),
    }
}

/// Describes a number of pods, and names the first ones.
fn counted(what: &str, pods: &[PodUid]) -> String {
    match pods.len() {
        0 => format!("no pods {what}"),
        1 => format!("1 pod {what} ({})", first(pods)),
        many => format!("{many} pods {what} ({})", first(pods)),
    }
}

/// Returns the notes about an imported file.
pub(super) fn of_import(report: &ImportReport) -> Vec<String> {
    let doubly = report.doubly_held.iter().map(|device| {
        let what = doubly_held(device);
        format!("{what}; no other pod gets it until all of them are gone")
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
