//! The API of devlet, with plugin processes.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::api::{self, DevletService};
use devlet_agent::config::Config;
use devlet_client::v1::admit_event::Event;
use devlet_client::v1::devlet_server::Devlet as _;
use devlet_client::{Admission, Client, Code, Status, v1};
use devlet_testkit::{Answer, Device, Fault, Options, PATIENCE, Plugin, Script};
use devlet_uds::PeerCred;
use tempfile::TempDir;
use tokio_stream::StreamExt as _;
use tonic::{Request, Response};

const GPU: &str = "acme.com/gpu";

/// A node and a client of its API.
struct Running {
    root: TempDir,
    agent: Agent,
    client: Client,
}

impl Running {
    async fn start() -> Self {
        Self::on(tempfile::tempdir().unwrap(), |_| {}).await
    }

    async fn on(root: TempDir, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(root.path());
        change(&mut config);
        let (agent, report) = Agent::start(config).await.unwrap();
        api::serve(&agent, &report).unwrap();
        let client = Client::connect(agent.config().api_socket()).await.unwrap();
        Self { root, agent, client }
    }

    fn path(&self) -> &Path {
        self.root.path()
    }

    /// Starts a plugin process, and returns when it serves.
    async fn plugin(&self, script: Script) -> Plugin {
        let plugin = tokio::task::spawn_blocking(move || Plugin::registered(&script))
            .await
            .unwrap();
        let mut resources = self
            .client
            .watch_resources(v1::ListResourcesRequest {})
            .await
            .unwrap();
        let serving = |each: &v1::Resource| each.state() == v1::ResourceState::Serving;
        while !resources
            .message()
            .await
            .unwrap()
            .unwrap()
            .resources
            .iter()
            .any(serving)
        {}
        plugin
    }

    async fn admission(&self, manifest: &str, wait_ms: u64) -> Admission {
        let manifest = manifest.to_owned();
        let request = v1::AdmitRequest {
            manifest,
            wait_ms: Some(wait_ms),
            ..Default::default()
        };
        self.client.admit(request).await.unwrap()
    }

    async fn admit(&self, manifest: &str) -> Result<v1::Pod, Status> {
        let request = v1::AdmitRequest {
            manifest: manifest.to_owned(),
            wait_ms: Some(60_000),
            ..Default::default()
        };
        let mut events = self.client.admit(request).await?;
        loop {
            match events.message().await?.unwrap().event {
                Some(Event::Admitted(pod)) => return Ok(pod),
                Some(Event::Waiting(_)) | None => {}
            }
        }
    }

    async fn pods(&self) -> Vec<v1::Pod> {
        self.client
            .list_pods(v1::ListPodsRequest::default())
            .await
            .unwrap()
            .pods
    }

    async fn free(&self) -> u64 {
        let list = self
            .client
            .list_resources(v1::ListResourcesRequest {})
            .await
            .unwrap();
        list.resources.iter().find(|each| each.name == GPU).unwrap().free
    }

    async fn remove(&self, pod: &str) -> Result<v1::PodId, Status> {
        let request = v1::RemovePodRequest {
            pod: pod.to_owned(),
            ..Default::default()
        };
        Ok(self.client.remove_pod(request).await?.pod.unwrap())
    }
}

fn gpus(root: &Path, number: usize) -> Script {
    let device = |place: usize| Device::on(&format!("gpu-{place}"), i64::try_from(place % 2).unwrap());
    let answer = Answer {
        envs: BTreeMap::from([("GPUS".to_owned(), "{ids}".to_owned())]),
        ..Answer::default()
    };
    Script {
        answer,
        ..Script::new(root, GPU, (0..number).map(device).collect())
    }
}

fn wants(name: &str, number: usize) -> String {
    format!(
        "metadata: {{name: {name}}}\nspec: {{containers: [{{name: main, resources: {{limits: {{{GPU}: {number}}}}}}}, \
         {{name: log}}]}}"
    )
}

fn ids(pod: &v1::Pod) -> Vec<String> {
    let devices = pod.containers.iter().flat_map(|container| &container.devices);
    devices.flat_map(|held| held.ids.clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_admitted_started_listed_and_removed() {
    let node = Running::start().await;
    let pre_start = Options {
        pre_start: true,
        preferred: false,
    };
    let script = Script {
        options: pre_start,
        ..gpus(node.path(), 4)
    };
    let mut plugin = node.plugin(script).await;

    let pod = node.admit(&wants("job1", 2)).await.unwrap();
    let names: Vec<&str> = pod.containers.iter().map(|each| each.name.as_str()).collect();
    assert_eq!(
        names,
        ["main", "log"],
        "containers without devices are answered too"
    );
    assert_eq!(ids(&pod).len(), 2);
    let options = pod.containers[0].options.clone().unwrap();
    assert_eq!(options.envs["GPUS"], ids(&pod).join(","));
    let again = v1::Pod {
        age_ms: pod.age_ms,
        ..node.admit(&wants("job1", 2)).await.unwrap()
    };
    assert_eq!(again, pod, "again is the same");
    assert_eq!(node.free().await, 2);

    let request = v1::StartContainerRequest {
        pod: "job1".into(),
        container: "main".into(),
        wait_ms: None,
    };
    let started = node.client.start_container(request).await.unwrap();
    assert_eq!(started.container.unwrap(), pod.containers[0]);
    assert_eq!(plugin.called("PreStartContainer"), ids(&pod));
    let start = |container: &str| v1::StartContainerRequest {
        pod: "job1".into(),
        container: container.into(),
        wait_ms: None,
    };
    let without = node.client.start_container(start("log")).await.unwrap();
    assert_eq!(
        without.container.unwrap().options,
        Some(v1::RunOptions::default())
    );
    let typo = node.client.start_container(start("mian")).await.unwrap_err();
    assert_eq!(typo.code(), Code::NotFound);
    assert!(typo.message().ends_with("it has main, log"), "{typo}");

    let devices = v1::ListDevicesRequest { resource: GPU.into() };
    let devices = node.client.list_devices(devices).await.unwrap().devices;
    let held: Vec<&str> = devices
        .iter()
        .filter(|each| !each.holders.is_empty())
        .map(|each| each.id.as_str())
        .collect();
    assert_eq!(held, ids(&pod));
    assert_eq!(
        devices[0].holders.first().map(|holder| holder.name.as_str()),
        Some("job1")
    );
    let plugins = node
        .client
        .list_plugins(v1::ListPluginsRequest {})
        .await
        .unwrap()
        .plugins;
    assert_eq!((plugins[0].devices, plugins[0].in_force), (Some(4), true));

    let removed = node.remove("default/job1").await.unwrap();
    assert_eq!(Some(removed), pod.id);
    assert_eq!(node.free().await, 4);
    assert_eq!(node.pods().await, []);
    assert_eq!(node.remove("job1").await.unwrap_err().code(), Code::NotFound);
    node.agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_sees_what_is_waited_for_and_gets_it_when_it_comes() {
    let node = Running::start().await;
    let mut events = node.admission(&wants("job1", 1), 60_000).await;
    let Some(Event::Waiting(waiting)) = events.message().await.unwrap().unwrap().event else {
        panic!("nothing to wait for");
    };
    assert_eq!(waiting.awaited, format!("a plugin that offers {GPU}"));
    assert_eq!(waiting.resource, GPU);

    let _plugin = node.plugin(gpus(node.path(), 1)).await;

    let pod = loop {
        match events.message().await.unwrap().unwrap().event {
            Some(Event::Admitted(pod)) => break pod,
            Some(Event::Waiting(_)) | None => {}
        }
    };
    assert_eq!(ids(&pod), ["gpu-0"]);
    assert!(events.message().await.unwrap().is_none(), "the stream ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_have_codes_and_reasons() {
    let node = Running::start().await;
    let mut gave_up = node.admission(&wants("job0", 1), 0).await;
    let gave_up = loop {
        match gave_up.message().await {
            Ok(event) => assert!(event.is_some()),
            Err(status) => break status,
        }
    };
    assert_eq!(gave_up.code(), Code::DeadlineExceeded);
    assert!(
        gave_up
            .message()
            .contains(&format!("no device plugin offers {GPU}")),
        "{gave_up}"
    );

    let mut plugin = node.plugin(gpus(node.path(), 1)).await;
    let few = node.admit(&wants("job1", 2)).await.unwrap_err();
    assert_eq!(few.code(), Code::ResourceExhausted);
    assert_eq!(few.message(), "2 acme.com/gpu requested, 1 free (1 of 1 healthy)");

    let no_pod = node.admit("kind: Deployment").await.unwrap_err();
    assert_eq!(no_pod.code(), Code::InvalidArgument);

    node.admit(&wants("job1", 1)).await.unwrap();
    let other_spec = node.admit(&wants("job1", 2)).await.unwrap_err();
    assert_eq!(other_spec.code(), Code::AlreadyExists);
    node.remove("job1").await.unwrap();

    let refuse = Fault::Refuse {
        code: 9,
        message: "on fire".into(),
    };
    let plugin = tokio::task::spawn_blocking(move || {
        plugin.fault("Allocate", Some(&refuse));
        plugin
    });
    let _plugin = plugin.await.unwrap();
    let refused = node.admit(&wants("job2", 1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted);
    assert!(refused.message().contains("on fire"), "{refused}");
    assert_eq!(node.free().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admission_ends_with_its_caller() {
    let node = Running::on(tempfile::tempdir().unwrap(), |config| {
        config.deadlines.allocate = Duration::from_secs(3600);
    })
    .await;
    let script = gpus(node.path(), 1).with_fault("Allocate", Fault::Hang);
    let mut plugin = node.plugin(script).await;
    let manifest = wants("job1", 1);
    let mut admission = Box::pin(node.admission(&manifest, 3_600_000));
    let called = tokio::task::spawn_blocking(move || {
        plugin.called("Allocate");
        plugin
    });
    let _plugin = tokio::select! {
        plugin = called => plugin.unwrap(),
        _ = &mut admission => panic!("nothing has happened that could be told"),
    };
    assert_eq!(node.free().await, 0);
    drop(admission);

    let request = v1::ListDevicesRequest::default();
    let mut devices = node.client.watch_devices(request).await.unwrap();
    let free = async {
        let is_free = |each: &v1::Device| each.holders.is_empty();
        while !devices
            .message()
            .await
            .unwrap()
            .unwrap()
            .devices
            .iter()
            .all(is_free)
        {}
    };
    tokio::time::timeout(PATIENCE, free)
        .await
        .expect("the device is still set aside");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_has_everything_now_and_after_each_change_and_ends_with_the_node() {
    let node = Running::start().await;
    let mut pods = node
        .client
        .watch_pods(v1::ListPodsRequest::default())
        .await
        .unwrap();
    assert_eq!(pods.message().await.unwrap().unwrap().pods, []);

    // The pod asks for no devices, and is admitted.
    node.admit("metadata: {name: plain}\nspec: {containers: [{name: main}]}")
        .await
        .unwrap();
    let listed = pods.message().await.unwrap().unwrap();
    assert_eq!(listed.pods.len(), 1);
    assert!(listed.revision > 0);

    node.remove("plain").await.unwrap();
    assert_eq!(pods.message().await.unwrap().unwrap().pods, []);

    node.agent.stop().await.unwrap();
    assert!(pods.message().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_users_that_are_allowed_change_anything() {
    let root = tempfile::tempdir().unwrap();
    let mut config = Config::new(root.path());
    config.access.own_uid = 500;
    config.access.admit = vec![1002];
    let (agent, report) = Agent::start(config).await.unwrap();
    let host = DevletService::new(agent, &report);
    let code = |answer: Result<(), Status>| answer.err().map(|status| status.code());
    for (uid, allowed) in [(0, true), (500, true), (1002, true), (1001, false)] {
        let expected = (!allowed).then_some(Code::PermissionDenied);
        let manifest = "metadata: {name: plain}\nspec: {containers: [{name: main}]}";
        let admit = v1::AdmitRequest {
            manifest: manifest.into(),
            ..Default::default()
        };
        let mut admission = host.admit(from(uid, admit)).await.map(Response::into_inner);
        if let Ok(events) = &mut admission {
            events.next().await.unwrap().unwrap();
        }
        assert_eq!(code(admission.map(drop)), expected, "{uid}");
        let start = v1::StartContainerRequest {
            pod: "plain".into(),
            container: "main".into(),
            wait_ms: None,
        };
        assert_eq!(
            code(host.start_container(from(uid, start)).await.map(drop)),
            expected,
            "{uid}"
        );
        let remove = v1::RemovePodRequest {
            pod: "plain".into(),
            ..Default::default()
        };
        assert_eq!(
            code(host.remove_pod(from(uid, remove)).await.map(drop)),
            expected,
            "{uid}"
        );
        if !allowed {
            let import = host.import(from(uid, v1::ImportRequest::default())).await;
            assert_eq!(code(import.map(drop)), expected, "{uid}");
            let abandon = host
                .abandon_claim(from(uid, v1::AbandonClaimRequest::default()))
                .await;
            assert_eq!(code(abandon.map(drop)), expected, "{uid}");
            let forget = host
                .forget_claim(from(uid, v1::ForgetClaimRequest::default()))
                .await;
            assert_eq!(code(forget.map(drop)), expected, "{uid}");
            let forget = host.forget(from(uid, v1::ForgetRequest::default())).await;
            assert_eq!(code(forget.map(drop)), expected, "{uid}");
        }
        assert!(
            host.list_pods(from(uid, v1::ListPodsRequest::default()))
                .await
                .is_ok(),
            "every user may ask"
        );
    }
    let without_user = host
        .remove_pod(Request::new(v1::RemovePodRequest::default()))
        .await;
    assert_eq!(code(without_user.map(drop)), Some(Code::PermissionDenied));
}

/// Returns a request with the credentials of a user.
fn from<T>(uid: u32, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(PeerCred {
        uid,
        gid: uid,
        pid: None,
    });
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn state_that_cannot_be_read_is_reported_until_an_operator_decides() {
    let root = tempfile::tempdir().unwrap();
    let plugins = root.path().join("device-plugins");
    std::fs::create_dir(&plugins).unwrap();
    std::fs::write(plugins.join("kubelet_internal_checkpoint"), "{broken").unwrap();
    let node = Running::on(root, |_| {}).await;

    let status = node.client.status(v1::StatusRequest {}).await.unwrap();
    assert!(!status.ready);
    let problem = status.problems.iter().find(|problem| problem.blocking).unwrap();
    assert!(problem.hint.contains("devlet forget "), "{problem:?}");
    let refused = node.admit(&wants("job1", 1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);

    let other = v1::ForgetRequest {
        file: "/other".into(),
        pod: String::new(),
    };
    let refused = node.client.forget(other).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let file = refused.message().rsplit(' ').next().unwrap().to_owned();
    assert!(problem.hint.contains(&file), "{refused}");

    node.client
        .forget(v1::ForgetRequest {
            file: file.clone(),
            pod: String::new(),
        })
        .await
        .unwrap();
    let status = node.client.status(v1::StatusRequest {}).await.unwrap();
    assert!(status.ready);
    assert!(
        status.problems.iter().any(|problem| problem.hint.contains(&file)),
        "it stays worth knowing"
    );
    let again = node
        .client
        .forget(v1::ForgetRequest {
            file,
            pod: String::new(),
        })
        .await
        .unwrap_err();
    assert!(again.message().contains("no file to forget"), "{again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_read_has_a_hint_that_helps() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("devlet")).unwrap();
    std::fs::write(root.path().join("devlet/state.redb"), "broken").unwrap();
    let node = Running::on(root, |_| {}).await;

    let status = node.client.status(v1::StatusRequest {}).await.unwrap();

    let problem = status.problems.iter().find(|problem| problem.blocking).unwrap();
    assert!(!problem.hint.contains("repair"), "{problem:?}");
    assert!(problem.hint.contains("devlet import "), "{problem:?}");
    let file = problem.hint.rsplit(' ').next().unwrap().to_owned();
    node.client
        .forget(v1::ForgetRequest {
            file,
            pod: String::new(),
        })
        .await
        .unwrap();
    assert!(node.client.status(v1::StatusRequest {}).await.unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_kubelet_took_away_in_between_is_for_the_operator_to_decide() {
    let node = Running::start().await;
    let _plugin = node.plugin(gpus(node.path(), 4)).await;
    let pod = node.admit(&wants("job1", 1)).await.unwrap();
    node.agent.stop().await.unwrap();
    let file = node.agent.config().kubelet_checkpoint();
    let theirs = include_str!("../../../kubelet-files/testdata/deviceplugin/v2-one-pod.json");
    std::fs::write(file, theirs).unwrap();
    let Running { root, agent, client } = node;
    drop((agent, client));

    let node = Running::on(root, |_| {}).await;

    let status = node.client.status(v1::StatusRequest {}).await.unwrap();
    assert!(!status.ready);
    let problem = status.problems.iter().find(|problem| problem.blocking).unwrap();
    let gone = format!("({})", pod.id.unwrap().uid);
    assert!(problem.what.contains(&gone), "{problem:?}");
    assert!(
        problem.hint.contains("devlet import ") && problem.hint.contains("devlet forget "),
        "{problem:?}"
    );
    let request = v1::ImportRequest {
        content: theirs.into(),
        name: "theirs".into(),
    };
    let imported = node.client.import(request).await.unwrap();
    assert!(
        imported.notes.iter().any(|note| note.contains("was removed")),
        "{imported:?}"
    );
    assert!(node.client.status(v1::StatusRequest {}).await.unwrap().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_start_leaves_plugins_their_sockets() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("device-plugins")).unwrap();
    let socket = root.path().join("device-plugins/plugin.sock");
    let _plugin = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    // devlet does not open a database that other users may write.
    std::fs::create_dir(root.path().join("devlet")).unwrap();
    let database = root.path().join("devlet/state.redb");
    std::fs::write(&database, "").unwrap();
    std::fs::set_permissions(&database, std::fs::Permissions::from_mode(0o666)).unwrap();

    Agent::start(Config::new(root.path())).await.unwrap_err();

    assert!(socket.exists());
    std::fs::remove_file(&database).unwrap();
    let (agent, _) = Agent::start(Config::new(root.path())).await.unwrap();
    assert!(!socket.exists(), "plugins are to register again");
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelets_file_is_imported_and_the_database_shown() {
    let node = Running::start().await;
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../samples/kubelet_internal_checkpoint");
    let content = std::fs::read(sample).unwrap();
    let request = v1::ImportRequest {
        content,
        name: "sample".into(),
    };
    let imported = node.client.import(request.clone()).await.unwrap();
    assert!(!imported.added.is_empty());
    let pods = node.pods().await;
    assert_eq!(pods.len(), imported.added.len());
    assert!(pods.iter().all(|pod| pod.source() == v1::PodSource::Imported));
    assert!(
        pods.iter()
            .all(|pod| pod.containers.iter().all(|each| !each.devices.is_empty()))
    );
    let again = node.client.import(request).await.unwrap();
    assert_eq!((again.added.len(), again.changed.len()), (0, 0));

    let dump = node
        .client
        .dump_state(v1::DumpStateRequest {})
        .await
        .unwrap()
        .json;
    assert!(dump.contains(&imported.added[0].uid), "{dump}");

    let garbage = v1::ImportRequest {
        content: b"{".to_vec(),
        name: "garbage".into(),
    };
    assert_eq!(
        node.client.import(garbage).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    node.remove(&imported.added[0].uid).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admission_that_waits_ends_when_the_node_does() {
    let node = Running::start().await;
    let mut events = node.admission(&wants("job1", 1), 3_600_000).await;
    assert!(events.message().await.unwrap().is_some());
    let stopped = tokio::time::timeout(Duration::from_secs(30), node.agent.stop()).await;
    assert!(stopped.is_ok(), "stopping waits for an admission");
    let ended = events.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable);
}
