use devlet_agent::cluster::ClusterState;
use devlet_agent::config::Config;
use devlet_agent::manifest::PodObject;
use devlet_agent::store::ClusterRecord;
use devlet_core::{PodMetadata, PodName};
use serde_json::{Value, json};

use super::*;
use crate::Access;
use crate::events::Event;

fn admitted(source: Source, before_reboot: bool) -> Node {
    let mut node = Node::default();
    let pod = Pod {
        uid: "u".into(),
        name: PodName::default(),
        source,
        fingerprint: 0,
        metadata: PodMetadata::default(),
        before_reboot,
        containers: Vec::new(),
        allocations: Vec::new(),
        claims: Vec::new(),
        claim_uses: Vec::new(),
    };
    node.put(pod).unwrap();
    node
}

#[test]
fn a_pod_from_before_the_last_boot_or_of_another_source_is_admitted_again() {
    for (source, before_reboot, agent, observe) in [
        (Source::Embedder, false, true, true),
        (Source::Embedder, true, false, true),
        (Source::Api, false, false, true),
        (Source::Api, true, false, true),
    ] {
        let node = admitted(source, before_reboot);
        let settled = |mode| is_settled(&node, &"u".into(), mode);
        let expected = (agent, observe);
        assert_eq!(
            (settled(Mode::Agent), settled(Mode::Observe)),
            expected,
            "{source:?}"
        );
    }
}

#[test]
fn labels_do_not_change_what_a_pod_needs() {
    let target = |label: &str, count: &str| {
        let object = json!({
            "metadata": {"name": "p", "namespace": "default", "uid": "u", "labels": {"a": label}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"acme.com/gpu": count}}}]},
        });
        let object: PodObject = serde_json::from_value(object).unwrap();
        Target::Admitted(object.into_unresolved(Source::Embedder, &[]).unwrap())
    };
    assert_ne!(target("1", "1"), target("2", "1"));
    assert!(target("1", "1").needs_same(&target("2", "1")));
    assert!(!target("1", "1").needs_same(&target("1", "2")));
}

/// The pods of a node whose API server is not reachable.
struct World {
    pods: Pods,
    agent: Agent,
    events: mpsc::Receiver<Event>,
    _root: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (agent, _) = Agent::start(Config::new(root.path().join("root"))).await.unwrap();
        let kubeconfig = root.path().join("kubeconfig");
        let text = "{clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], current-context: x, \
                    contexts: [{name: x, context: {cluster: c, user: u}}], users: [{name: u, user: {}}]}";
        std::fs::write(&kubeconfig, text).unwrap();
        let connection = Connection::open(Access::Kubeconfig(kubeconfig)).await.unwrap();
        let (queue, events) = Events::channel();
        let context = Context {
            agent: agent.clone(),
            claims: ApiClaims::new(&agent, &connection),
            connection,
            node: "worker-1".into(),
            events: queue,
            mode: Mode::Agent,
            final_delete: true,
            beside_kubelet: false,
            seen: SeenPods::default(),
            lists: watch::channel(0).0,
        };
        Self {
            pods: Pods::new(context),
            agent,
            events,
            _root: root,
        }
    }

    async fn admit(&self, uid: &str) {
        let object = json!({
            "metadata": {"name": uid, "namespace": "default", "uid": uid},
            "spec": {"containers": [{"name": "main"}]},
        });
        let object: PodObject = serde_json::from_value(object).unwrap();
        let pod = object.into_unresolved(Source::Embedder, &[]).unwrap();
        let now = tokio::time::Instant::now();
        self.agent.admit(&pod.request, now, |_| {}).await.unwrap();
    }

    async fn shows(&mut self, uid: &str, spec: &Value, status: &Value) {
        let mut object = json!({
            "metadata": {
                "name": uid, "namespace": "default", "uid": uid, "deletionTimestamp": "2026-01-01T00:00:00Z",
                "deletionGracePeriodSeconds": 30,
            },
            "spec": spec,
            "status": status,
        });
        if status.is_null() {
            object["metadata"]["deletionTimestamp"] = Value::Null;
            object["status"] = json!({});
        }
        let pod = serde_json::from_value(object).unwrap();
        self.pods.changed(Change::Present(pod)).await;
    }

    /// A complete list of pods without containers.
    async fn lists(&mut self, uids: &[&str]) {
        self.pods.changed(Change::ListBegin).await;
        for uid in uids {
            self.shows(uid, &json!({"containers": []}), &Value::Null).await;
        }
        self.pods.changed(Change::ListEnd).await;
    }

    fn target(&self, uid: &str) -> Option<&Target> {
        self.pods.target(&uid.into())
    }
}

#[tokio::test]
async fn a_pod_that_cannot_be_read_is_reported_once() {
    let mut world = World::new().await;
    let broken = json!({"containers": [], "resourceClaims": "none"});
    world.shows("u", &broken, &Value::Null).await;
    world.shows("u", &broken, &Value::Null).await;
    let event = world.events.try_recv().unwrap();
    assert_eq!(event.reason, worker::ADMISSION);
    assert!(world.events.try_recv().is_err());
    let is_shown = |state: &ClusterState| state.waiting.contains_key(&PodUid::from("u"));
    assert!(world.agent.cluster().read(is_shown));
    // Its object is not left behind.
    world.shows("u", &broken, &json!({"phase": "Pending"})).await;
    let target = world.target("u");
    assert!(
        matches!(target, Some(Target::Removed(removal)) if removal.deletes_object),
        "{target:?}"
    );
}

#[tokio::test]
async fn a_deleted_pod_whose_containers_have_not_ended_has_its_grace_period() {
    let mut world = World::new().await;
    world.admit("u").await;
    let spec = json!({"containers": [{"name": "main", "resources": {"limits": {"acme.com/gpu": "1"}}}]});
    for (statuses, expected) in [
        (json!([]), false),
        (json!([{"state": {"running": {}}}]), false),
        (
            json!([{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]),
            true,
        ),
    ] {
        let status = json!({"phase": "Pending", "containerStatuses": statuses});
        world.shows("u", &spec, &status).await;
        let Some(Target::Ending(ending)) = world.target("u") else {
            panic!("{:?}", world.target("u"))
        };
        assert_eq!(
            (ending.is_idle, ending.grace),
            (expected, Duration::from_secs(30))
        );
    }
    // Its deletion has begun, which changes the object.
    world.agent.store().release(&"u".into()).await.unwrap();
    let statuses = json!([{"state": {"waiting": {}}, "lastState": {"terminated": {}}}]);
    let status = json!({"phase": "Running", "containerStatuses": statuses});
    world.shows("u", &spec, &status).await;
    assert!(matches!(world.target("u"), Some(Target::Ending(_))));
}

#[tokio::test]
async fn the_list_of_another_cluster_removes_nothing_that_is_on_record() {
    let mut world = World::new().await;
    for uid in ["a", "b"] {
        world.admit(uid).await;
    }
    let other = ClusterRecord {
        node: "worker-2".into(),
        server: "https://10.0.0.1:6443/".into(),
    };
    world.agent.store().record_cluster(other.clone()).await.unwrap();
    let refused = |world: &World| world.agent.cluster().read(|state| state.pods_of.clone());
    world.lists(&[]).await;
    assert!(world.target("a").is_none() && world.target("b").is_none());
    assert_eq!(
        refused(&world).as_deref(),
        Some("Node worker-2 at https://10.0.0.1:6443/")
    );
    assert_eq!(world.agent.store().cluster(), Some(other));

    // A pod on record is listed: only the address is another one.
    world.lists(&["a"]).await;
    assert!(matches!(world.target("b"), Some(Target::Removed(_))));
    assert_eq!(refused(&world), None);
    let recorded = world.agent.store().cluster().unwrap();
    assert_eq!(recorded.node, "worker-1");
    world.lists(&[]).await;
    assert!(matches!(world.target("a"), Some(Target::Removed(_))));
}
