//! Tests of admissions with fake plugins.

use std::collections::BTreeMap;
use std::sync::Arc;

use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::{ContainerKind, ContainerRequest, DeviceId, PodMetadata, PodName, PodUid, Source};
use tokio_util::task::TaskTracker;

use super::*;
use crate::dra::clients::DriverClients;
use crate::store::OpenOptions;

const GPU: &str = "acme.com/gpu";

fn node_with_one_gpu(directory: &tempfile::TempDir) -> Store {
    node_with_gpus(directory, 1, PluginOptions::default())
}

fn node_with_gpus(directory: &tempfile::TempDir, count: usize, plugin: PluginOptions) -> Store {
    let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
    let (store, _) = Store::open(options).unwrap();
    let offer = Offer {
        resource: GPU.into(),
        endpoint: "gpu.sock".into(),
        process: devlet_core::ProcessId { uid: 0, pid: None },
        may_share: false,
        options: plugin,
    };
    let device = |number: usize| Device {
        id: DeviceId::from(format!("gpu{number}")),
        healthy: true,
        nodes: Vec::new(),
    };
    let devices = (0..count).map(device).collect();
    let now = store.now();
    store.update(|node| {
        let (connection, _) = node.plugin_connected(offer, now).unwrap();
        node.devices_listed(connection, DeviceList::new(devices).0);
    });
    store
}

fn wants_a_gpu(uid: &str) -> PodRequest {
    PodRequest {
        uid: PodUid::from(uid),
        name: PodName {
            namespace: "default".into(),
            name: uid.into(),
        },
        source: Source::Api,
        fingerprint: 1,
        metadata: PodMetadata::default(),
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(GPU.into(), 1)]),
            claims: Vec::new(),
        }],
        claims: Vec::new(),
    }
}

fn free(store: &Store) -> usize {
    let now = store.now();
    store.read(|node| node.capacity_of(&GPU.into(), now).free)
}

fn no_drivers(store: &Store) -> Claims<DriverClients> {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let drivers = DriverClients::new(Arc::new(Config::new("")));
    let metrics = Metrics::default();
    Claims::new(store.clone(), drivers, metrics, tasks, stop, usize::MAX)
}

/// A plugin that answers.
struct Answering;

impl PluginCalls for Answering {
    async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
        panic!("the plugin does not want to be asked")
    }

    async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
        Ok(store::answer(&b""[..]).unwrap())
    }
}

#[tokio::test]
async fn an_admission_takes_the_state_lock_three_times() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_gpus(&directory, 2, PluginOptions::default());
    let (claims, give_up) = (no_drivers(&store), CancellationToken::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    let admit = async |uid| {
        admit(
            &store,
            &Answering,
            &claims,
            &wants_a_gpu(uid),
            deadline,
            &give_up,
            |_| {},
        )
        .await
    };
    // The first write also has the resource that the plugin has just registered.
    admit("a").await.unwrap();
    let before = store.locks();
    let admitted = admit("b").await;
    // To reserve, to begin the commit, and to finish it. The API reads the pod once more for its answer.
    let locks = store.locks() - before;
    admitted.unwrap();
    assert_eq!(locks, 3);
}

/// A plugin that cancels the admission when it is called, and then answers or hangs.
struct CancelsAdmission {
    token: CancellationToken,
    answers: bool,
}

impl PluginCalls for CancelsAdmission {
    async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
        Ok(Vec::new())
    }

    async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
        self.token.cancel();
        if !self.answers {
            std::future::pending::<()>().await;
        }
        Ok(Answer::default())
    }
}

async fn admit_with(store: &Store, answers: bool, uid: &str) -> Result<Pod, AdmitError> {
    let token = CancellationToken::new();
    let calls = CancelsAdmission {
        token: token.clone(),
        answers,
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    admit(
        store,
        &calls,
        &no_drivers(store),
        &wants_a_gpu(uid),
        deadline,
        &token,
        |_| {},
    )
    .await
}

/// A plugin that times out when it is asked for preferences, and allocates at once.
#[derive(Default)]
struct NoPreferences {
    asked: std::sync::atomic::AtomicUsize,
}

impl PluginCalls for NoPreferences {
    async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
        self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Err(CallError::TimedOut {
            method: "GetPreferredAllocation",
            deadline: Duration::from_secs(10),
        })
    }

    async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
        Ok(Answer::default())
    }
}

#[tokio::test]
async fn a_plugin_that_does_not_answer_is_asked_once_for_all_containers() {
    let directory = tempfile::tempdir().unwrap();
    let options = PluginOptions {
        preferred_allocation: true,
        ..PluginOptions::default()
    };
    let store = node_with_gpus(&directory, 8, options);
    let mut request = wants_a_gpu("a");
    for name in ["second", "third"] {
        let container = request.containers[0].clone();
        request.containers.push(ContainerRequest {
            name: name.into(),
            ..container
        });
    }
    let calls = NoPreferences::default();
    let deadline = Instant::now() + Duration::from_secs(60);
    let never = CancellationToken::new();

    let pod = admit(
        &store,
        &calls,
        &no_drivers(&store),
        &request,
        deadline,
        &never,
        |_| {},
    )
    .await
    .unwrap();

    assert_eq!(pod.allocations.len(), 3);
    assert_eq!(calls.asked.into_inner(), 1);
}

/// A plugin that refuses its first call once `refuse` is cancelled, and answers all others.
#[derive(Default)]
struct RefusesTheFirst {
    called: CancellationToken,
    refuse: CancellationToken,
}

impl PluginCalls for RefusesTheFirst {
    async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
        Ok(Vec::new())
    }

    async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
        if self.called.is_cancelled() {
            return Ok(Answer::default());
        }
        self.called.cancel();
        self.refuse.cancelled().await;
        let (method, problem) = ("Allocate", InvalidAnswer::NoContainer);
        Err(CallError::Invalid { method, problem })
    }
}

#[tokio::test]
async fn a_pod_gets_the_devices_of_an_admission_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_one_gpu(&directory);
    let (calls, drivers, never) = (
        RefusesTheFirst::default(),
        no_drivers(&store),
        CancellationToken::new(),
    );
    let deadline = Instant::now() + Duration::from_secs(60);
    let (first, second) = (wants_a_gpu("a"), wants_a_gpu("b"));

    let fails = admit(&store, &calls, &drivers, &first, deadline, &never, |_| {});
    let waits = async {
        calls.called.cancelled().await;
        let refuse = |reason: &ReserveError| {
            assert!(matches!(reason, ReserveError::Reserved { .. }), "{reason}");
            calls.refuse.cancel();
        };
        admit(&store, &calls, &drivers, &second, deadline, &never, refuse).await
    };
    let (failed, admitted) = tokio::join!(fails, waits);

    assert!(matches!(failed, Err(AdmitError::Plugin { .. })), "{failed:?}");
    assert_eq!(admitted.unwrap().uid.as_str(), "b");
    let (third, past) = (wants_a_gpu("c"), Instant::now());
    let refused = admit(&store, &calls, &drivers, &third, past, &never, |_| {}).await;
    assert!(matches!(refused, Err(AdmitError::Refused(_))), "{refused:?}");
}

#[tokio::test]
async fn a_pod_is_admitted_once_a_first_list_without_healthy_devices_is_followed_by_another() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_gpus(&directory, 0, PluginOptions::default());
    let (calls, drivers, never) = (
        NoPreferences::default(),
        no_drivers(&store),
        CancellationToken::new(),
    );
    let deadline = Instant::now() + Duration::from_secs(60);
    let request = wants_a_gpu("a");

    let list_one = |reason: &ReserveError| {
        assert!(matches!(reason, ReserveError::NoHealthyDevice { .. }), "{reason}");
        store.update(|node| {
            let connection = node.serving(&GPU.into()).unwrap();
            let device = Device {
                id: "gpu0".into(),
                healthy: true,
                nodes: Vec::new(),
            };
            node.devices_listed(connection, DeviceList::new(vec![device]).0);
        });
    };
    let pod = admit(&store, &calls, &drivers, &request, deadline, &never, list_one).await;

    assert_eq!(pod.unwrap().allocations.len(), 1);
}

#[tokio::test]
async fn a_cancelled_admission_frees_the_devices() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_one_gpu(&directory);
    let ended = admit_with(&store, false, "a").await;
    assert!(matches!(ended, Err(AdmitError::GivenUp)), "{ended:?}");
    assert_eq!(free(&store), 1);
}

#[tokio::test]
async fn an_admission_that_was_cancelled_before_it_began_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_one_gpu(&directory);
    let cancelled = CancellationToken::new();
    cancelled.cancel();
    let deadline = Instant::now() + Duration::from_secs(60);
    for round in 0..20 {
        let (calls, drivers, request) = (NoPreferences::default(), no_drivers(&store), wants_a_gpu("a"));
        let ended = admit(&store, &calls, &drivers, &request, deadline, &cancelled, |_| {}).await;
        assert!(
            matches!(ended, Err(AdmitError::GivenUp)),
            "round {round}: {ended:?}"
        );
    }
}

#[tokio::test]
async fn an_admission_that_is_cancelled_during_the_write_reports_its_outcome() {
    let directory = tempfile::tempdir().unwrap();
    let store = node_with_one_gpu(&directory);
    for round in 0..20 {
        let uid = format!("pod-{round}");
        let admitted = admit_with(&store, true, &uid).await.is_ok();
        let uid = PodUid::from(uid.as_str());
        let held = store.read(|node| node.pod(&uid).is_some());
        assert_eq!(admitted, held, "round {round}");
        assert_eq!(free(&store), usize::from(!held), "round {round}");
        if held {
            store.release(&uid).await.unwrap();
        }
    }
}
