//! The state of a cluster in the lists and in the status.

use devlet_client::v1;
use devlet_client::v1::devlet_server::Devlet as _;
use devlet_core::dra::drivers::WIPE_DELAY_MS;
use devlet_core::{Moment, PodName, PodRequest, Source};
use tokio::time::Instant;
use tonic::{Code, Request};

use super::super::{DevletService, problems};
use crate::agent::Agent;
use crate::cluster::{ClusterConnection, ClusterReport, ClusterSlice, WaitingPod};
use crate::config::Config;
use crate::manifest;

const GPU: &str = "gpu.acme.com";

struct Node {
    agent: Agent,
    service: DevletService,
    _root: tempfile::TempDir,
}

impl Node {
    /// A node with an API server.
    async fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (agent, report) = Agent::start(Config::new(root.path())).await.unwrap();
        let service = DevletService::new(agent.clone(), &report);
        let connection = ClusterConnection {
            mode: "agent",
            server: "https://10.0.0.1:6443/".into(),
            node: "worker-1".into(),
            identity: "system:node:worker-1".into(),
        };
        agent
            .cluster()
            .update(|state| state.connection = Some(connection));
        Self {
            agent,
            service,
            _root: root,
        }
    }

    async fn admit(&self, name: &str, source: Source) -> PodRequest {
        let text = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: main}}]}}}}"
        );
        let request = manifest::parse(&text, source, &[]).unwrap();
        self.agent.admit(&request, Instant::now(), |_| {}).await.unwrap();
        request
    }

    fn waits(&self, uid: &str, namespace: &str, name: &str, reason: &str) {
        let pod = WaitingPod {
            name: PodName {
                namespace: namespace.into(),
                name: name.into(),
            },
            since: self.agent.store().now(),
            reason: reason.into(),
        };
        self.agent.cluster().update(|state| {
            state.waiting.insert(uid.into(), pod);
        });
    }

    fn publishes(&self, name: &str, driver: &str, has_stale_owner: bool) {
        let slice = ClusterSlice {
            driver: driver.into(),
            pool: "worker-1".into(),
            generation: 3,
            devices: 8,
            created: "2023-11-14T22:13:20Z".into(),
            has_stale_owner,
            seen: Moment(0),
        };
        self.agent.cluster().update(|state| {
            state.slices.insert(name.into(), slice);
        });
    }

    async fn pods(&self, name: &str) -> Result<Vec<(String, v1::PodSource, String)>, Code> {
        let request = v1::ListPodsRequest { pod: name.into() };
        let listed = self.service.list_pods(Request::new(request)).await;
        let pods = listed.map_err(|status| status.code())?.into_inner().pods;
        let shown = |pod: v1::Pod| {
            let (source, reason) = (pod.source(), pod.waiting.map(|waiting| waiting.reason));
            (pod.id.unwrap().name, source, reason.unwrap_or_default())
        };
        Ok(pods.into_iter().map(shown).collect())
    }

    async fn slices(&self, driver: &str) -> Vec<v1::Slice> {
        let request = v1::ListSlicesRequest {
            driver: driver.into(),
        };
        let listed = self.service.list_slices(Request::new(request)).await;
        listed.unwrap().into_inner().slices
    }

    async fn drivers(&self) -> Vec<v1::Driver> {
        let request = Request::new(v1::ListDriversRequest::default());
        self.service
            .list_drivers(request)
            .await
            .unwrap()
            .into_inner()
            .drivers
    }

    async fn status(&self) -> v1::StatusResponse {
        let status = self.service.status(Request::new(v1::StatusRequest {})).await;
        status.unwrap().into_inner()
    }
}

fn waiting(name: &str, reason: &str) -> (String, v1::PodSource, String) {
    (name.into(), v1::PodSource::Kubernetes, reason.into())
}

#[tokio::test]
async fn pods_of_the_api_server_are_marked_and_listed_while_they_wait() {
    let node = Node::new().await;
    let own = node.admit("own", Source::Api).await;
    let admitted = node.admit("admitted", Source::Embedder).await;
    node.waits("u-1", "team-a", "job", "no plugin");
    node.waits("u-2", "team-b", "job", "no driver");
    node.waits(admitted.uid.as_str(), "default", "admitted", "its removal");

    let expected = [
        waiting("admitted", "its removal"),
        (own.name.name, v1::PodSource::Api, String::new()),
        waiting("job", "no plugin"),
        waiting("job", "no driver"),
    ];
    assert_eq!(node.pods("").await.unwrap(), expected);
    assert_eq!(
        node.pods("admitted").await.unwrap(),
        [waiting("admitted", "its removal")]
    );
    assert_eq!(
        node.pods("team-b/job").await.unwrap(),
        [waiting("job", "no driver")]
    );
    assert_eq!(node.pods("uid:u-1").await.unwrap(), [waiting("job", "no plugin")]);
    assert_eq!(node.pods("job").await.unwrap_err(), Code::InvalidArgument);
    assert_eq!(node.pods("none").await.unwrap_err(), Code::NotFound);
    assert_eq!(node.status().await.pods, 2);
    node.agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_pod_of_an_embedder_without_an_api_server_is_not_marked() {
    let node = Node::new().await;
    node.agent.cluster().update(|state| state.connection = None);
    node.admit("admitted", Source::Embedder).await;
    let expected = ("admitted".to_owned(), v1::PodSource::Embedder, String::new());
    assert_eq!(node.pods("").await.unwrap(), [expected]);
    assert_eq!(node.status().await.kubernetes, None);
    node.agent.stop().await.unwrap();
}

#[tokio::test]
async fn slices_are_listed_with_their_driver_and_the_time_of_their_deletion() {
    let node = Node::new().await;
    node.publishes("b", GPU, false);
    node.publishes("a", "nic.acme.com", true);
    let names = |slices: Vec<v1::Slice>| slices.into_iter().map(|slice| slice.name).collect::<Vec<_>>();
    assert_eq!(names(node.slices("").await), ["b", "a"]);
    assert_eq!(names(node.slices(GPU).await), ["b"]);
    let slice = node.slices(GPU).await.remove(0);
    assert_eq!((slice.generation, slice.devices, slice.wiped_at_ms), (3, 8, None));
    assert_eq!(slice.created_at_ms, 1_700_000_000_000);
    assert!(slice.age_ms > 0);

    let started = node.agent.store().now();
    node.agent
        .cluster()
        .update(|state| state.wipes_slices_since = Some(started));
    let slice = node.slices(GPU).await.remove(0);
    assert_eq!(slice.wiped_at_ms, Some(started.0 + WIPE_DELAY_MS));
    assert!((1..=WIPE_DELAY_MS).contains(&slice.wiped_in_ms));
    // Slices that come later have as long.
    let later = started.after(WIPE_DELAY_MS);
    node.agent.cluster().update(|state| {
        if let Some(slice) = state.slices.get_mut("b") {
            slice.seen = later;
        }
    });
    let slice = node.slices(GPU).await.remove(0);
    assert_eq!(slice.wiped_at_ms, Some(later.0 + WIPE_DELAY_MS));

    let drivers = node.drivers().await;
    let shown: Vec<_> = drivers
        .iter()
        .map(|driver| (driver.name.as_str(), driver.slices.len()))
        .collect();
    assert_eq!(shown, [(GPU, 1), ("nic.acme.com", 1)]);
    node.agent.stop().await.unwrap();
}

#[tokio::test]
async fn the_status_has_the_reconcilers_and_drivers_that_must_restart() {
    let node = Node::new().await;
    node.publishes("a", "nic.acme.com", false);
    let cluster = node.agent.cluster();
    // Its slices have been deleted as garbage.
    cluster.update(|state| {
        state.stale_drivers.insert(GPU.into());
    });
    cluster.succeeded("node", node.agent.store().now());
    cluster.failed("pods", node.agent.store().now(), "pods is forbidden".into());
    let status = node.status().await;
    assert!(status.ready);
    let what: Vec<&str> = status
        .problems
        .iter()
        .map(|problem| problem.hint.as_str())
        .collect();
    assert_eq!(
        what,
        ["driver gpu.acme.com must restart to publish its devices again"]
    );
    let kubernetes = status.kubernetes.unwrap();
    assert_eq!(kubernetes.server, "https://10.0.0.1:6443/");
    assert_eq!((kubernetes.slices, kubernetes.pods_waiting), (1, 0));
    let [healthy, failing] = &kubernetes.reconcilers[..] else {
        panic!("{:?}", kubernetes.reconcilers)
    };
    assert_eq!((healthy.name.as_str(), healthy.failing_since_ms), ("node", 0));
    assert!(healthy.last_success_ms > 0 && healthy.last_error.is_none());
    assert_eq!((failing.name.as_str(), failing.last_success_ms), ("pods", 0));
    assert!(failing.failing_since_ms > 0);
    assert_eq!(failing.last_error.clone().unwrap().message, "pods is forbidden");
    node.agent.stop().await.unwrap();
}

#[test]
fn a_reconciler_is_a_problem_after_a_minute_of_errors() {
    let cluster = ClusterReport::default();
    let problems = |now| {
        let problems = cluster.read(|state| problems::of_cluster(state, Moment(now)));
        problems
            .into_iter()
            .map(|problem| problem.what)
            .collect::<Vec<_>>()
    };
    cluster.succeeded("pods", Moment(0));
    // A quiet reconciler: a single error is not a problem.
    cluster.failed("pods", Moment(1_000_000), "first".into());
    cluster.failed("pods", Moment(1_060_000), "second".into());
    assert!(problems(1_060_000).is_empty());
    assert_eq!(
        problems(1_060_001),
        ["reconciler pods fails since 1970-01-01T00:16:40Z: second"]
    );
    cluster.succeeded("pods", Moment(1_070_000));
    assert!(problems(2_000_000).is_empty());
    cluster.failed("pods", Moment(2_000_000), "again".into());
    assert!(problems(2_060_000).is_empty());
}

#[test]
fn a_missing_node_object_is_a_problem_until_it_exists() {
    let cluster = ClusterReport::default();
    let problems = || cluster.read(|state| problems::of_cluster(state, Moment(0)));
    cluster.update(|state| {
        state.connection = Some(ClusterConnection {
            node: "worker-1".into(),
            ..ClusterConnection::default()
        });
        state.node_missing_since = Some(Moment(1_000_000));
    });
    // Other calls of the task succeed.
    cluster.succeeded("node", Moment(1_000_001));
    let [problem] = &problems()[..] else {
        panic!("{:?}", problems())
    };
    assert_eq!(
        problem.what,
        "the API server has had no Node object worker-1 since 1970-01-01T00:16:40Z"
    );
    cluster.update(|state| state.node_missing_since = None);
    assert!(problems().is_empty());
}

#[test]
fn pods_of_another_cluster_are_a_blocking_problem() {
    let cluster = ClusterReport::default();
    cluster.update(|state| state.pods_of = Some("Node worker-1 at https://10.0.0.1:6443/".into()));
    let problems = cluster.read(|state| problems::of_cluster(state, Moment(0)));
    let [problem] = &problems[..] else {
        panic!("{problems:?}")
    };
    assert!(problem.blocking && problem.what.contains("Node worker-1 at https://10.0.0.1:6443/"));
}
