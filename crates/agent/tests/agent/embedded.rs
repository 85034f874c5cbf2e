//! The node inside another program: its source of pods, its capacity callback, its deadlines, and its end.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::config::Config;
use devlet_agent::manifest;
use devlet_agent::workflow::admit::AdmitError;
use devlet_core::dra::claims::{AllocatedClaim, AllocatedDevice, AllocationResult, ClaimKey};
use devlet_core::{Capacity, ClaimReference, ClaimRequest, PodRequest, PodUid, Source};
use devlet_testkit::{Device, DriverScript, Fault, Options, PATIENCE, Plugin, PreparedDevice, Script};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

const GPU: &str = "acme.com/gpu";

/// Shorter than any deadline of a plugin.
const IMPATIENCE: Duration = Duration::from_millis(300);

async fn node(root: &Path) -> Agent {
    Agent::start(Config::new(root)).await.unwrap().0
}

fn pod(name: &str, source: Source) -> PodRequest {
    let text = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: main, resources: \
         {{limits: {{{GPU}: 1}}}}}}]}}}}"
    );
    manifest::parse(&text, source, &[]).unwrap()
}

fn gpus(root: &Path) -> Script {
    let devices = vec![Device::new("a"), Device::new("b"), Device::new("c")];
    Script::new(root, GPU, devices)
}

fn held(agent: &Agent) -> usize {
    let now = agent.store().now();
    agent.store().read(|node| node.capacity_of(&GPU.into(), now).held)
}

async fn admit(agent: &Agent, pod: &PodRequest) {
    agent.admit(pod, Instant::now() + PATIENCE, |_| {}).await.unwrap();
}

/// Returns a source of pods that always has this list.
fn list(pods: &[&PodRequest]) -> impl Fn() -> std::future::Ready<Option<BTreeSet<PodUid>>> + use<> {
    let active: BTreeSet<PodUid> = pods.iter().map(|pod| pod.uid.clone()).collect();
    move || std::future::ready(Some(active.clone()))
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_twice_is_as_good_as_once() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let (first, second) = tokio::join!(agent.stop(), agent.stop());
    first.unwrap();
    second.unwrap();
    agent.stop().await.unwrap();
    drop(agent);
    node(root.path()).await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_ended_while_the_node_was_away_are_released_once_the_list_is_in() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let plugin = Plugin::start(&gpus(root.path()));
    let pods = [
        pod("stays", Source::Embedder),
        pod("ended", Source::Embedder),
        pod("of-another-source", Source::Api),
    ];
    for pod in &pods {
        admit(&agent, pod).await;
    }
    drop(plugin);
    agent.stop().await.unwrap();
    drop(agent);

    let agent = node(root.path()).await;
    let not_synced = || std::future::ready(None);
    assert!(agent.reconcile(&not_synced).await.is_empty());
    assert_eq!(held(&agent), 3, "the list is not in yet");
    assert_eq!(agent.reconcile(&list(&[&pods[0]])).await, [pods[1].uid.clone()]);

    assert_eq!(held(&agent), 2);
    // No plugin runs, and the admission does not need one.
    let at_once = Instant::now() + Duration::from_millis(1);
    agent.admit(&pods[0], at_once, |_| {}).await.unwrap();
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_admitted_while_the_list_is_made_is_not_taken_for_gone() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let _plugin = Plugin::start(&gpus(root.path()));
    let [old, again, new] = ["old", "again", "new"].map(|name| pod(name, Source::Embedder));
    admit(&agent, &old).await;
    admit(&agent, &again).await;
    let late = async || {
        admit(&agent, &again).await;
        admit(&agent, &new).await;
        Some(BTreeSet::new())
    };

    assert_eq!(agent.reconcile(&late).await, [old.uid]);
    assert_eq!(held(&agent), 2);
    assert_eq!(agent.reconcile(&list(&[&new])).await, [again.uid]);
    agent.stop().await.unwrap();
}

const DRIVER: &str = "gpu.acme.com";

/// Returns a request of a pod with one container and a claim of the same name.
fn claiming(name: &str) -> PodRequest {
    let text = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: main}}]}}}}"
    );
    let mut pod = manifest::parse(&text, Source::Embedder, &[]).unwrap();
    let device = AllocatedDevice {
        request: "req".into(),
        pool: "node".into(),
        device: name.into(),
        share: None,
        admin_access: false,
    };
    let result = AllocationResult {
        driver: DRIVER.into(),
        device,
        skip: Vec::new(),
    };
    let key = ClaimKey {
        namespace: "default".into(),
        name: name.into(),
    };
    pod.claims.push(ClaimRequest {
        name: "claim".into(),
        claim: AllocatedClaim::new(key, name.into(), [result]),
    });
    pod.containers[0].claims.push(ClaimReference {
        claim: "claim".into(),
        request: None,
    });
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_pods_that_are_gone_are_unprepared_in_batches_and_one_holds_up_no_other() {
    const PODS: usize = 40;
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let device = PreparedDevice {
        requests: vec!["req".into()],
        ..PreparedDevice::new("node", "{name}", "acme.com/gpu={name}")
    };
    let mut driver = Plugin::driver(&DriverScript {
        devices: vec![device],
        ..DriverScript::new(root.path(), DRIVER)
    });
    let pods: Vec<PodRequest> = (0..PODS)
        .map(|number| claiming(&format!("pod-{number:02}")))
        .collect();
    for pod in &pods {
        admit(&agent, pod).await;
        let (options, _) = agent
            .start_container(&pod.uid, "main", Instant::now() + PATIENCE)
            .await
            .unwrap();
        assert_eq!(options.cdi_devices, [format!("acme.com/gpu={}", pod.name.name)]);
    }
    driver.fault(
        "NodeUnprepareResources",
        Some(&Fault::FailClaims {
            names: vec!["pod-07".into()],
            message: "stuck".into(),
        }),
    );
    let writes = agent.store().statistics().batches.count;

    let removed = agent.reconcile(&list(&[&pods[0]])).await;

    assert_eq!(removed.len(), PODS - 1);
    let writes = agent.store().statistics().batches.count - writes;
    assert!(writes < 20, "they share writes: {writes}");
    let (mut asked, mut calls) = (BTreeSet::new(), 0);
    while asked.len() < PODS - 1 {
        let (_, claims) = driver.asked("NodeUnprepareResources");
        asked.extend(claims.into_iter().map(|claim| claim.uid));
        calls += 1;
    }
    assert!(calls < PODS / 2, "they share calls: {calls}");
    let stuck = PodUid::from(pods[7].uid.as_str());
    let mut changes = agent.store().subscribe();
    let left = |uid: &PodUid| agent.store().read(|node| node.pending_unprepare(uid).len());
    while pods[1..].iter().map(|pod| left(&pod.uid)).sum::<usize>() > 1 {
        changes.changed().await.unwrap();
    }
    assert!(agent.might_need_unprepare(&stuck));
    driver.fault("NodeUnprepareResources", None);
    let deadline = Instant::now() + PATIENCE;
    agent.remove(&stuck, deadline).await.unwrap();
    assert!(!agent.might_need_unprepare(&stuck));
    assert_eq!(driver.prepared(), BTreeSet::from(["pod-00".to_owned()]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_followed_is_asked_until_the_node_stops() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let _plugin = Plugin::start(&gpus(root.path()));
    let (stays, ends) = (pod("stays", Source::Embedder), pod("ends", Source::Embedder));
    admit(&agent, &stays).await;
    admit(&agent, &ends).await;
    let mut changes = agent.store().subscribe();

    agent.follow_pods(list(&[&stays]), Duration::from_millis(10));
    while held(&agent) > 1 {
        changes.changed().await.unwrap();
    }

    // A source that does not answer does not delay the stop.
    agent.follow_pods(std::future::pending, Duration::from_millis(10));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn capacity_is_told_at_once_and_whenever_it_changes() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let (sender, mut told) = mpsc::unbounded_channel();
    let node = agent.clone();
    agent.on_capacity(move |capacities| {
        // The callback may read the store: devlet holds no lock.
        node.store().read(|_| ());
        let _ = sender.send(capacities.get(GPU).copied());
    });
    assert_eq!(told.recv().await.unwrap(), None);

    let plugin = Plugin::registered(&gpus(root.path()));
    let mut until = async |wanted: Capacity| while told.recv().await.unwrap() != Some(wanted) {};
    let all = Capacity {
        capacity: 3,
        allocatable: 3,
        held: 0,
        free: 3,
    };
    until(all).await;
    admit(&agent, &pod("job", Source::Embedder)).await;
    let less = Capacity {
        held: 1,
        free: 2,
        ..all
    };
    until(less).await;
    drop(plugin);
    let gone = Capacity {
        allocatable: 0,
        free: 0,
        ..less
    };
    until(gone).await;

    agent.stop().await.unwrap();
    assert_eq!(told.recv().await, None, "the callback is not called any longer");
}

/// Returns the error for a caller with a short deadline, from a plugin that hangs.
async fn cut_short(method: &str, options: Options) -> (Agent, tempfile::TempDir, Plugin, String) {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let script = Script {
        options,
        ..gpus(root.path())
    };
    let plugin = Plugin::registered(&script.with_fault(method, Fault::Hang));
    let mut changes = agent.store().subscribe();
    while agent.store().read(|node| node.serving(&GPU.into()).is_none()) {
        changes.changed().await.unwrap();
    }
    let request = pod("job", Source::Embedder);
    let admitted = agent.admit(&request, Instant::now() + IMPATIENCE, |_| {}).await;
    let error = match admitted {
        Ok(pod) => {
            let started = agent.start_container(&pod.uid, "main", Instant::now() + IMPATIENCE);
            let error = started.await.unwrap_err();
            assert!(error.source().is_none());
            error.to_string()
        }
        Err(error @ AdmitError::Plugin { .. }) => {
            assert_eq!(held(&agent), 0);
            assert!(error.source().is_none());
            error.to_string()
        }
        Err(error) => error.to_string(),
    };
    (agent, root, plugin, error)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_deadline_bounds_every_call_and_is_named() {
    let cases = [("Allocate", false), ("PreStartContainer", true)];
    for (method, pre_start) in cases {
        let called = Instant::now();
        let options = Options {
            preferred: false,
            pre_start,
        };
        let (agent, root, _plugin, error) = cut_short(method, options).await;
        let start = format!(
            "device plugin of {GPU} at {}/device-plugins/acme.com_gpu.sock: {method} was not answered before the \
             caller's deadline, ",
            root.path().display()
        );
        assert!(error.starts_with(&start), "{error}");
        // Far below the deadlines of plugins, even on a busy machine.
        assert!(called.elapsed() < Duration::from_secs(9), "{method}");
        agent.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impatient_caller_does_without_advice() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let script = Script {
        options: Options {
            preferred: true,
            pre_start: false,
        },
        ..gpus(root.path())
    };
    let mut plugin = Plugin::registered(&script.with_fault("GetPreferredAllocation", Fault::Hang));
    let deadline = Instant::now() + Duration::from_secs(4);

    agent
        .admit(&pod("job", Source::Embedder), deadline, |_| {})
        .await
        .unwrap();

    plugin.called("GetPreferredAllocation");
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_gives_up_names_the_pod() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut plugin = Plugin::registered(&gpus(root.path()).with_fault("Allocate", Fault::Hang));
    let request = pod("job", Source::Embedder);
    let uid = request.uid.clone();
    let (give_up, given_up) = oneshot::channel::<()>();
    let admitting = {
        let agent = agent.clone();
        tokio::spawn(async move {
            tokio::select! {
                ended = agent.admit(&request, Instant::now() + PATIENCE, |_| {}) => drop(ended.unwrap_err()),
                _ = given_up => {}
            }
        })
    };
    let plugin = tokio::task::spawn_blocking(move || {
        plugin.called("Allocate");
        plugin
    });
    let _plugin = plugin.await.unwrap();

    let refused = agent.remove(&uid, Instant::now() + IMPATIENCE).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!(
            "pod default/job ({uid}) is still being admitted or removed, which did not end in time; wait longer"
        )
    );
    give_up.send(()).unwrap();
    admitting.await.unwrap();
    let refused = agent.remove(&uid, Instant::now() + IMPATIENCE).await.unwrap_err();
    assert_eq!(refused.to_string(), format!("no such pod: {uid}"));
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn the_text_of_a_system_error_appears_once() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Agent::start(Config::new(&file)).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("Not a directory"), "{said}");
    let mut cause = error.source();
    while let Some(each) = cause {
        assert!(!said.contains(&each.to_string()), "{said}: {each}");
        cause = each.source();
    }
}
