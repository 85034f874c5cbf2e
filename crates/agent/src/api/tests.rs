mod cluster;
mod shield;

use devlet_client::v1;
use devlet_client::v1::devlet_server::Devlet as _;
use devlet_core::{Moment, Node, Pod, PodName, PodUid, Restored, Source};
use tonic::Request;

use super::{DevletService, convert, file_notes};
use crate::agent::Agent;
use crate::config::Config;
use crate::store::{Difference, Found, ImportReport, OpenReport};

/// Returns a node with pods of these UIDs, namespaces and names.
pub(super) fn node(pods: &[(&str, &str, &str)]) -> Node {
    let pod = |(uid, namespace, name): &(&str, &str, &str)| Pod {
        uid: PodUid::from(*uid),
        name: PodName {
            namespace: (*namespace).to_owned(),
            name: (*name).to_owned(),
        },
        source: Source::Api,
        fingerprint: 1,
        metadata: devlet_core::PodMetadata::default(),
        before_reboot: false,
        containers: Vec::new(),
        allocations: Vec::new(),
        claims: Vec::new(),
        claim_uses: Vec::new(),
    };
    Node::restore(Restored {
        pods: pods.iter().map(pod).map(|pod| (pod.uid.clone(), pod)).collect(),
        ..Restored::default()
    })
}

#[test]
fn entries_that_were_lost_in_an_import_at_the_start_are_shown() {
    let imported = ImportReport {
        incomplete: false,
        format: devlet_kubelet_files::Format::DraEnvelopeV1,
        difference: Difference::default(),
        doubly_held: Vec::new(),
        undecodable: Vec::new(),
        replaced_entries: 1,
        claims: Vec::new(),
        left_out: Vec::new(),
    };
    let report = |imported_claims| OpenReport {
        found: Found::KubeletFile,
        imported: None,
        imported_claims,
        takeover: None,
        contested: Vec::new(),
        quarantined: Vec::new(),
        reboot: None,
        repaired: false,
        doubly_held: Vec::new(),
        blocked: None,
    };
    assert_eq!(file_notes::at_start(&report(None)), []);
    let found = file_notes::at_start(&report(Some(imported)));
    let found: Vec<&str> = found.iter().map(|each| each.what.as_str()).collect();
    assert_eq!(
        found,
        [
            "at start, of an imported file 1 entry is replaced by later ones for the same container and resource, or claim"
        ]
    );
}

#[tokio::test]
async fn the_uptime_does_not_change_when_the_clock_of_the_system_is_set() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let mut service = DevletService::new(agent.clone(), &report);
    let day = 24 * 60 * 60 * 1000;
    for wall_clock in [|| Moment(0), || Moment(u64::MAX)] {
        service.wall_clock = wall_clock;
        let status = service.status(Request::new(v1::StatusRequest {})).await;
        let status = status.unwrap().into_inner();
        assert!(status.uptime_ms < day, "{}", status.uptime_ms);
        assert!(status.started_at_ms <= wall_clock().0);
    }
    // A clock that is read once, at the start, and goes on evenly from there.
    service.started = Moment(agent.store().now().0 - day);
    let status = service.status(Request::new(v1::StatusRequest {})).await;
    let uptime = status.unwrap().into_inner().uptime_ms;
    assert!((day..2 * day).contains(&uptime), "{uptime}");
    agent.stop().await.unwrap();
}

#[test]
fn ages_use_the_clock_of_devlet_and_are_never_negative() {
    let node = node(&[("u1", "a", "job")]);
    let admitted = |moment: u64| {
        let mut pod = node.pods().next().unwrap().clone();
        pod.metadata.admitted_at = Some(Moment(moment));
        convert::pod(&node, &pod, Moment(5_000)).age_ms
    };
    assert_eq!(admitted(2_000), 3_000);
    // Of an earlier run, before the clock was set back.
    assert_eq!(admitted(9_000), 0);
}
