use std::sync::Mutex;

use devlet_core::dra::claims::{Claim, ClaimKey};
use devlet_core::{Pod, Restored};
use devlet_testkit::PATIENCE;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::oneshot;

use super::*;
use crate::config::Config;
use crate::store::{Difference, Found, ImportReport};

fn node(pods: &[(&str, &str, &str)]) -> Node {
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
fn a_pod_is_found_by_uid_by_full_name_and_by_a_name_that_is_clear() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "job"),
        ("u3", "b", "other"),
        ("u4", "", ""),
    ]);
    let found = |name: &str| find(&node, name).map(|uid| uid.to_string());
    for (name, uid) in [
        ("u1", "u1"),
        ("a/job", "u1"),
        ("b/job", "u2"),
        ("other", "u3"),
        ("u4", "u4"),
    ] {
        assert_eq!(found(name).as_deref(), Ok(uid), "{name}");
    }
    for name in ["", "uid:"] {
        assert_eq!(found(name), Err(PodLookupError::Empty), "{name}");
    }
    for name in ["/", "c/job", "u9", "a/other"] {
        let name = name.to_owned();
        assert_eq!(found(&name), Err(PodLookupError::Unknown { name }));
    }
    let ambiguous = found("job").unwrap_err().to_string();
    assert_eq!(ambiguous, "several pods are called job: name one of a/job, b/job");
}

#[test]
fn claims_that_no_pod_is_known_of_are_not_those_of_an_empty_name() {
    let key = ClaimKey {
        namespace: "default".to_owned(),
        name: "one".to_owned(),
    };
    let drivers = [(DriverName::from("gpu.acme.com"), BTreeSet::new(), Vec::new())];
    let claim = Claim::imported(key, "c-1".into(), PodUid::from(""), drivers);
    let node = Node::restore(Restored {
        claims: vec![claim],
        ..Restored::default()
    });
    for name in ["", "uid:"] {
        let refused = find_to_remove(&node, name).unwrap_err().to_string();
        assert_eq!(
            refused,
            "no pod is named: say its UID, its name, or namespace/name"
        );
    }
}

#[test]
fn a_name_with_a_slash_is_never_taken_for_a_pod_without_a_name() {
    let derived = |namespace: &str| {
        manifest::derived_uid(&PodName {
            namespace: namespace.to_owned(),
            name: "job".to_owned(),
        })
    };
    let (nameless, in_default) = (derived("a"), derived("default"));
    let mut node = node(&[
        (nameless.as_str(), "", ""),
        ("a/other", "", ""),
        (in_default.as_str(), "default", "job"),
        ("u2", "b", "job"),
    ]);
    let key = ClaimKey {
        namespace: "a".to_owned(),
        name: "one".to_owned(),
    };
    let drivers = [(DriverName::from("gpu.acme.com"), BTreeSet::new(), Vec::new())];
    let left = Node::restore(Restored {
        claims: vec![Claim::imported(
            key,
            "c-1".into(),
            PodUid::from("a/left"),
            drivers,
        )],
        ..Restored::default()
    });
    for (node, name) in [(&node, "a/other"), (&left, "a/left")] {
        let found = |name: &str| find_to_remove(node, name).map(|uid| uid.to_string());
        assert!(
            matches!(found(name), Err(PodLookupError::Unknown { .. })),
            "{name}"
        );
        assert_eq!(found(&format!("uid:{name}")).as_deref(), Ok(name));
    }

    // Pods that are being removed are on record and in flight.
    for pod in [&nameless, &in_default] {
        node.begin_release(pod).unwrap();
    }
    let found = |name: &str| find_to_remove(&node, name);
    assert!(matches!(found("a/job"), Err(PodLookupError::Unknown { .. })));
    assert!(matches!(found("job"), Err(PodLookupError::Ambiguous { .. })));
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
    assert_eq!(problems::of_start(&report(None)), []);
    let found = problems::of_start(&report(Some(imported)));
    let found: Vec<&str> = found.iter().map(|each| each.what.as_str()).collect();
    assert_eq!(
        found,
        [
            "at start, of an imported file 1 entry is replaced by later ones for the same container and resource, or claim"
        ]
    );
}

#[test]
fn a_pod_that_is_named_like_the_uid_of_another_is_not_taken_for_it() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "u1"),
        ("u3", "", ""),
        ("u4", "b", "u3"),
        ("u5", "b", "u5"),
    ]);
    let found = |name: &str| find(&node, name).map(|uid| uid.to_string());
    for (name, says) in [
        (
            "u1",
            "u1 is the UID of one pod and the name of another: say uid:u1 for a/job, or b/u1",
        ),
        (
            "u3",
            "u3 is the UID of one pod and the name of another: say uid:u3 for the first, or b/u3",
        ),
    ] {
        assert_eq!(found(name).unwrap_err().to_string(), says);
    }
    for (name, uid) in [
        ("uid:u1", "u1"),
        ("a/job", "u1"),
        ("b/u1", "u2"),
        ("uid:u3", "u3"),
        ("u5", "u5"),
    ] {
        assert_eq!(found(name).as_deref(), Ok(uid), "{name}");
    }
    assert!(found("uid:job").is_err() && found("uid:").is_err());
}

#[test]
fn what_is_waited_for_is_said_so_that_it_completes_a_sentence() {
    let reason = ReserveError::NotServed {
        resource: "acme.com/gpu".into(),
        last: None,
    };
    let event = waiting(&reason, Duration::from_millis(1500));
    assert_eq!(event.awaited, "a plugin that offers acme.com/gpu");
    assert_eq!(event.reason, "no device plugin offers acme.com/gpu");
    assert_eq!(event.resource, "acme.com/gpu");
    assert_eq!(event.waited_ms, 1500);
}

/// Something that is watched, with pauses that end when the test says so.
struct Watched {
    items: Arc<Mutex<Vec<u64>>>,
    revision: watch::Sender<u64>,
    told: mpsc::Receiver<Result<(u64, Vec<u64>), Status>>,
    pauses: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

impl Watched {
    fn new() -> Self {
        let items = Arc::new(Mutex::new(Vec::new()));
        let (revision, changes) = watch::channel(0);
        let (sender, told) = mpsc::channel(1);
        let (begun, pauses) = mpsc::unbounded_channel();
        let looked_at = Arc::clone(&items);
        tokio::spawn(async move {
            let list = || looked_at.lock().unwrap().clone();
            let pause = |_| {
                let (end, ended) = oneshot::channel();
                begun.send(end).unwrap();
                async { ended.await.unwrap() }
            };
            let wrap = |revision, items| (revision, items);
            follow(changes, list, wrap, pause, &sender).await;
        });
        Self {
            items,
            revision,
            told,
            pauses,
        }
    }

    fn change(&self, item: Option<u64>) {
        self.items.lock().unwrap().extend(item);
        self.revision.send_modify(|revision| *revision += 1);
    }

    async fn told(&mut self) -> Vec<u64> {
        let told = tokio::time::timeout(PATIENCE, self.told.recv()).await;
        let (_, items) = told.unwrap().unwrap().unwrap();
        items
    }

    async fn pause(&mut self) -> oneshot::Sender<()> {
        let begun = tokio::time::timeout(PATIENCE, self.pauses.recv()).await;
        begun.unwrap().unwrap()
    }
}

#[tokio::test]
async fn the_first_change_is_told_at_once_and_those_in_the_pause_after_it_together() {
    let mut watched = Watched::new();
    assert!(watched.told().await.is_empty());
    watched.pause().await.send(()).unwrap();
    watched.change(Some(1));
    assert_eq!(watched.told().await, [1]);
    let pause = watched.pause().await;
    for item in 2..10 {
        watched.change(Some(item));
        tokio::task::yield_now().await;
    }
    assert!(watched.told.try_recv().is_err());
    pause.send(()).unwrap();
    assert_eq!(watched.told().await, (1..10).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_change_that_nobody_sees_is_not_told() {
    let mut watched = Watched::new();
    assert!(watched.told().await.is_empty());
    watched.pause().await.send(()).unwrap();
    watched.change(None);
    watched.pause().await.send(()).unwrap();
    assert!(watched.told.try_recv().is_err());
    watched.change(Some(1));
    assert_eq!(watched.told().await, [1]);
}

async fn parse(host: &Host, bytes: usize, wait: Duration) -> Result<PodRequest, Status> {
    let note = "x".repeat(bytes);
    let metadata = format!("metadata: {{name: plain, annotations: {{note: {note}}}}}");
    let text = format!("{metadata}\nspec: {{containers: [{{name: main}}]}}");
    let name = String::new();
    host.parse(vec![NamedText { name, text }], Instant::now() + wait)
        .await
}

const SHORT: usize = 1 << 10;
const LONG: usize = 512 << 10;
const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_long_manifest_keeps_nobody_else_waiting() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let host = Host::new(agent.clone(), &report);
    // Each is polled once, on the only thread.
    assert!(parse(&host, SHORT, SOON).now_or_never().is_some());
    let mut long = Box::pin(parse(&host, LONG, SOON));
    assert!((&mut long).now_or_never().is_none());
    assert!(long.await.is_ok());
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_long_manifest_waits_for_another_one_but_not_after_it() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let host = Host::new(agent.clone(), &report);
    for _ in 0..5 {
        // Without any time to wait for its turn.
        assert!(parse(&host, LONG, Duration::ZERO).await.is_ok());
    }
    let other = host.parsing.clone().acquire_owned().await.unwrap();
    assert!(parse(&host, SHORT, SOON).await.is_ok());
    let late = parse(&host, LONG, Duration::ZERO).await.unwrap_err();
    assert_eq!(late.code(), tonic::Code::DeadlineExceeded);
    assert_eq!(late.message(), LONG_MANIFEST);
    let mut waits = Box::pin(parse(&host, LONG, SOON));
    assert!((&mut waits).now_or_never().is_none());
    drop(other);
    assert!(waits.await.is_ok());
    agent.stop().await.unwrap();
}

#[test]
fn an_admission_ends_with_its_answer() {
    let event = |event| v1::AdmitEvent { event: Some(event) };
    let waiting = event(v1::admit_event::Event::Waiting(v1::Waiting::default()));
    let admitted = event(v1::admit_event::Event::Admitted(v1::Pod::default()));
    for last in [Ok(admitted), Err(Status::aborted("no"))] {
        let (sender, receiver) = mpsc::channel(1);
        let mut events = Box::pin(until_admitted(waiting.clone(), receiver));
        let mut next = || events.next().now_or_never();
        assert!(matches!(next(), Some(Some(Ok(event))) if event == waiting));
        assert!(next().is_none());
        sender.try_send(last.clone()).unwrap();
        assert_eq!(next().flatten().unwrap().ok(), last.ok());
        // Although the channel is open still.
        assert!(matches!(next(), Some(None)));
        assert!(sender.is_closed());
    }
}

#[tokio::test]
async fn the_uptime_does_not_change_when_the_clock_of_the_system_is_set() {
    let root = tempfile::tempdir().unwrap();
    let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
    let mut host = Host::new(agent.clone(), &report);
    let day = 24 * 60 * 60 * 1000;
    for wall_clock in [|| Moment(0), || Moment(u64::MAX)] {
        host.wall_clock = wall_clock;
        let status = host.status(Request::new(v1::StatusRequest {})).await;
        let status = status.unwrap().into_inner();
        assert!(status.uptime_ms < day, "{}", status.uptime_ms);
        assert!(status.started_at_ms <= wall_clock().0);
    }
    // A clock that is read once, at the start, and goes on evenly from there.
    host.started = Moment(agent.store().now().0 - day);
    let status = host.status(Request::new(v1::StatusRequest {})).await;
    let uptime = status.unwrap().into_inner().uptime_ms;
    assert!((day..2 * day).contains(&uptime), "{uptime}");
    agent.stop().await.unwrap();
}

#[test]
fn ages_are_by_the_clock_of_devlet_and_never_negative() {
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
