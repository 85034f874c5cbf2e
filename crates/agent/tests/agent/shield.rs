//! devlet between a kubelet and plugins: what the kubelet is told and answered, whatever the plugin does.

mod leave;
mod refused;
mod slow;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use devlet_agent::agent::Agent;
use devlet_agent::config::{Config, Shield};
use devlet_agent::lease;
use devlet_cdi::Registry;
use devlet_core::LeaseName;
use devlet_core::shield::{ContainerProcess, LeasePhase};
use devlet_kubelet_api::cri::v1::ContainerState;
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_testkit::{
    Answer, Device, Fault, Kubelet, Options, Plugin, RegisteredPlugin, Reports, Runtime, Script,
};
use prost::Message as _;
use serde_json::{Value, json};
use tempfile::TempDir;

mod start;

const GPU: &str = "acme.com/gpu";

/// Far below the 30 s of a kubelet, and far above the 1.7 s of devlet: the machine may be busy.
const PROMPT: Duration = Duration::from_secs(10);

/// The directories of a node.
struct Node {
    directory: TempDir,
}

impl Node {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["devlet", "kubelet", "cdi"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn config(&self) -> Config {
        Config {
            shield: Some(Shield {
                cdi: self.path("cdi"),
                permanent_cdi: self.path("etc"),
                runtime: Some(self.path("cri.sock")),
                ..Shield::new(self.path("kubelet"), std::env::current_exe().unwrap())
            }),
            ..Config::new(self.path("devlet"))
        }
    }

    async fn devlet(&self) -> Agent {
        Agent::start(self.config()).await.unwrap().0
    }

    fn runtime_with(&self, reports: Reports) -> Runtime {
        Runtime::start(&self.path("cri.sock"), reports)
    }

    fn kubelet(&self) -> Kubelet {
        Kubelet::start(&self.path("kubelet"))
    }

    fn script(&self) -> Script {
        let devices = vec![Device::new("a"), Device::on("b", 0), Device::on("c", 1)];
        Script {
            answer: Answer {
                envs: [("GPU".to_owned(), "{ids}".to_owned())].into(),
                ..Answer::default()
            },
            ..Script::new(self.path("devlet"), GPU, devices)
        }
    }

    /// Returns the environment that the runtime gives to a container with this CDI device, or the runtime's error.
    fn runtime(&self, device: &str) -> Result<Value, String> {
        let mut oci = json!({ "ociVersion": "1.2.0", "process": { "env": [] } });
        let injected = Registry::load([self.path("cdi")]).inject(&mut oci, [device]);
        injected.map_err(|error| error.to_string())?;
        Ok(oci["process"]["env"].clone())
    }

    /// Writes the kubelet's checkpoint with one container for each lease.
    fn checkpoint(&self, held: &[(&str, &[&str], &[u8])]) {
        let entry = |(number, (pod, devices, answer)): (usize, &(&str, &[&str], &[u8]))| Entry {
            pod_uid: (*pod).to_owned(),
            container: format!("c{number}"),
            resource: GPU.to_owned(),
            devices: Devices::PerNuma(Some(
                [(-1, Some(devices.iter().map(|id| (*id).to_owned()).collect()))].into(),
            )),
            alloc_resp: Some(answer.to_vec()),
        };
        let checkpoint = Checkpoint {
            entries: Some(held.iter().enumerate().map(entry).collect()),
            registered: Some([(GPU.to_owned(), Some(Vec::new()))].into()),
        };
        let path = self.path("kubelet/device-plugins/kubelet_internal_checkpoint");
        std::fs::write(path, device_plugin::write(&checkpoint)).unwrap();
    }
}

/// Allocates devices as the kubelet does, and returns the name of the CDI device.
async fn allocate(plugin: &RegisteredPlugin, devices: &[&str]) -> String {
    let answer = plugin.allocate(devices).await.unwrap();
    assert_eq!(answer.envs.len() + answer.devices.len() + answer.mounts.len(), 0);
    let [device] = answer.cdi_devices.try_into().unwrap();
    device.name
}

async fn refused(plugin: &RegisteredPlugin, devices: &[&str]) -> String {
    let began = Instant::now();
    let refused = plugin.pre_start(devices).await.unwrap_err();
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    refused.message().to_owned()
}

/// Starts a container of a lease, as the runtime's hook does.
async fn start(agent: &Agent, device: &str, container: &str) -> Result<LeaseName, String> {
    let lease = lease::unqualified(device).unwrap();
    let process = lease::process::find(std::process::id()).unwrap();
    let started = agent
        .store()
        .start_leased(lease.as_str(), container, process)
        .await;
    started.map(|()| lease).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_gets_what_the_plugin_answers_when_it_starts() {
    let node = Node::new();
    let agent = node.devlet().await;
    let mut plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;
    assert!(gpus.options.pre_start_required);

    let device = allocate(&gpus, &["b", "a"]).await;
    assert!(!plugin.was_called("Allocate"));
    assert!(node.runtime(&device).unwrap_err().contains("no such device"));
    gpus.pre_start(&["a", "b"]).await.unwrap();

    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a,b"]));
    assert_eq!(plugin.called("Allocate"), ["a", "b"]);
    // Each start is prepared, with the same answer.
    plugin.forget_events();
    gpus.pre_start(&["b", "a"]).await.unwrap();
    assert!(!plugin.was_called("Allocate"));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn all_resources_are_registered_at_once_when_the_kubelet_starts() {
    const RESOURCES: usize = 50;
    let node = Node::new();
    let agent = node.devlet().await;
    let plugins: Vec<Plugin> = (0..RESOURCES)
        .map(|number| {
            let script = Script::new(
                node.path("devlet"),
                &format!("acme.com/r{number}"),
                vec![Device::new("a")],
            );
            Plugin::start(&script)
        })
        .collect();
    super::driver::until(&agent, |node| {
        (node.advertised_resources().len() == RESOURCES).then_some(())
    })
    .await;

    for _ in 0..2 {
        let kubelet = node.kubelet();
        for number in 0..RESOURCES {
            kubelet.until_healthy(&format!("acme.com/r{number}"), 1).await;
        }
        assert_eq!(kubelet.resources().len(), RESOURCES);
    }
    drop(plugins);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_waits_while_the_plugin_is_away_and_starts_when_it_is_back() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    plugin.kill();
    super::driver::until(&agent, |node| node.plugins().is_empty().then_some(())).await;

    let device = allocate(&gpus, &["a"]).await;
    let refusal = refused(&gpus, &["a"]).await;

    assert!(refusal.contains("no device plugin serves it"), "{refusal}");
    assert!(node.runtime(&device).is_err());
    let _plugin = Plugin::registered(&node.script());
    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_hangs_or_refuses_delays_the_kubelet_by_less_than_2_s() {
    let node = Node::new();
    let mut config = node.config();
    config.deadlines.allocate = Duration::from_millis(300);
    config.deadlines.pre_start = Duration::from_millis(300);
    let agent = Agent::start(config).await.unwrap().0;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&Script {
        options: Options {
            pre_start: true,
            preferred: true,
        },
        ..node.script()
    });
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    let refuse = Fault::Refuse {
        code: 9,
        message: "out of luck".into(),
    };
    for (method, fault, text) in [
        ("Allocate", Fault::Hang, "Allocate"),
        ("Allocate", refuse, "out of luck"),
        ("PreStartContainer", Fault::Hang, "PreStartContainer"),
    ] {
        plugin.fault(method, Some(&fault));
        let refusal = refused(&gpus, &["a"]).await;
        assert!(refusal.contains(text) && refusal.contains(GPU), "{refusal}");
        assert!(node.runtime(&device).is_err());
        plugin.fault(method, None);
    }
    plugin.fault("GetPreferredAllocation", Some(&Fault::Hang));
    let began = Instant::now();
    let preferred = gpus.prefer(&["a", "b", "c"], &["c"], 2).await.unwrap();
    assert!(began.elapsed() < PROMPT);
    assert_eq!(preferred, ["b", "c"], "devlet prefers devices with a NUMA node");

    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_waits_for_the_container_that_has_it() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let old = allocate(&gpus, &["a", "b"]).await;
    gpus.pre_start(&["a", "b"]).await.unwrap();
    let lease = start(&agent, &old, "old").await.unwrap();

    let new = allocate(&gpus, &["b"]).await;
    let refusal = refused(&gpus, &["b"]).await;

    assert!(refusal.contains("waiting for container old to end"), "{refusal}");
    // The kubelet is advised to choose another device.
    assert_eq!(gpus.prefer(&["a", "b", "c"], &[], 1).await.unwrap(), ["c"]);
    agent.store().stop_leased(lease.as_str(), "old").await.unwrap();
    gpus.pre_start(&["b"]).await.unwrap();
    start(&agent, &new, "new").await.unwrap();
    assert!(
        start(&agent, &old, "late")
            .await
            .unwrap_err()
            .contains("new still has device b")
    );
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_process_is_gone_has_ended() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let old = allocate(&gpus, &["a"]).await;
    gpus.pre_start(&["a"]).await.unwrap();
    let lease = lease::unqualified(&old).unwrap();
    let gone = ContainerProcess {
        started: 1,
        ..lease::process::find(std::process::id()).unwrap()
    };
    agent
        .store()
        .start_leased(lease.as_str(), "old", gone)
        .await
        .unwrap();

    gpus.pre_start(&["a"]).await.unwrap();

    start(&agent, &old, "next").await.unwrap();
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_devices_stay_advertised_and_leases_are_known() {
    let node = Node::new();
    let agent = node.devlet().await;
    let plugin = Plugin::registered(&node.script());
    let first = node.kubelet();
    let gpus = first.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    gpus.pre_start(&["a"]).await.unwrap();
    drop(plugin);
    agent.store().record_lists().await.unwrap();
    agent.stop().await.unwrap();
    drop((agent, first));

    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;

    // The plugin is not needed to start the container again.
    std::fs::remove_dir_all(node.path("cdi")).unwrap();
    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_of_a_plugin_that_stays_away_become_unhealthy() {
    let node = Node::new();
    let mut config = node.config();
    config.shield.as_mut().unwrap().away = Duration::from_millis(300);
    let agent = Agent::start(config).await.unwrap().0;
    let kubelet = node.kubelet();
    let plugin = Plugin::registered(&node.script());
    kubelet.until_healthy(GPU, 3).await;

    plugin.kill();

    let gpus = kubelet.until_healthy(GPU, 0).await;
    assert_eq!(gpus.devices.unwrap().len(), 3);
    let _plugin = Plugin::registered(&node.script());
    kubelet.until_healthy(GPU, 3).await;
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_its_plugin_does_not_list_any_more_is_named() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    allocate(&gpus, &["c"]).await;
    drop(plugin);
    super::driver::until(&agent, |node| node.plugins().is_empty().then_some(())).await;
    let mut upgraded = Plugin::registered(&Script {
        devices: vec![Device::new("a"), Device::new("b")],
        ..node.script()
    });
    super::driver::until(&agent, |node| node.serving(&GPU.into())).await;

    let refusal = refused(&gpus, &["c"]).await;

    assert!(refusal.contains("device c does not exist any more"), "{refusal}");
    assert!(!upgraded.was_called("Allocate"));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_devlet_lost_are_found_in_the_kubelets_checkpoint() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("no lease of devlet has these devices"),
        "{refusal}"
    );
    let name = lease::new_name();
    let device = lease::qualified(&name);
    let answer = devlet_kubelet_api::device_plugin::v1beta1::ContainerAllocateResponse {
        cdi_devices: vec![devlet_kubelet_api::device_plugin::v1beta1::CdiDevice { name: device.clone() }],
        ..Default::default()
    };
    node.checkpoint(&[("p", &["a"], &answer.encode_to_vec())]);

    // Its container may run, and devlet did not see it start.
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("waiting for the container runtime to tell"),
        "{refusal}"
    );
    let mut container = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let _runtime = node.runtime_with(Reports {
        pid: container.id(),
        ..Reports::default()
            .pod("p", "job")
            .container("p", "c0", "x1", ContainerState::ContainerRunning)
    });
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("waiting for container x1 of pod p to end"),
        "{refusal}"
    );
    drop(container.stdin.take());
    container.wait().unwrap();
    gpus.pre_start(&["a"]).await.unwrap();

    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    let phase = agent
        .store()
        .read(|node| node.leases().get(name.as_str()).map(|view| view.phase));
    assert_eq!(phase, Some(LeasePhase::Prepared));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_from_before_the_adoption_are_known() {
    let node = Node::new();
    std::fs::create_dir_all(node.path("kubelet/device-plugins")).unwrap();
    let answer = devlet_kubelet_api::device_plugin::v1beta1::ContainerAllocateResponse {
        envs: [("GPU".to_owned(), "a".to_owned())].into(),
        ..Default::default()
    };
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    node.checkpoint(&[("p", &["a", "b"], &answer.encode_to_vec())]);
    let runtime = node.runtime_with(Reports::default().pod("p", "job"));
    assert_eq!(agent.adopt_leases().await.unwrap(), (1, 1));
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;

    // Its container is started again without a new answer, and no other one gets its devices.
    gpus.pre_start(&["b", "a"]).await.unwrap();
    assert!(!plugin.was_called("Allocate"));
    allocate(&gpus, &["a"]).await;
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("of pod p from before devlet took over"),
        "{refusal}"
    );
    assert_eq!(gpus.prefer(&["a", "b", "c"], &[], 1).await.unwrap(), ["c"]);
    let held = agent.store().read(|node| node.devices(&GPU.into()));
    let holders: Vec<usize> = held.iter().map(|device| device.holders.len()).collect();
    assert_eq!(holders, [1, 1, 0]);

    // The kubelet has removed the pod, and its container has not ended.
    node.checkpoint(&[]);
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("of pod p from before devlet took over"),
        "{refusal}"
    );
    runtime.reports.send_replace(Reports::default());
    gpus.pre_start(&["a"]).await.unwrap();

    std::fs::write(
        node.path("kubelet/device-plugins/kubelet_internal_checkpoint"),
        "{}x",
    )
    .unwrap();
    let refused = agent.adopt_leases().await.unwrap_err().to_string();
    assert!(
        refused.contains("kubelet_internal_checkpoint cannot be used"),
        "{refused}"
    );
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_devlet_are_refused_beside_a_kubelet() {
    let node = Node::new();
    let agent = node.devlet().await;
    let text = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c}]}}";
    let pod = devlet_agent::manifest::parse(text, devlet_core::Source::Embedder, &[]).unwrap();
    let refused = agent
        .admit(&pod, tokio::time::Instant::now(), |_| {})
        .await
        .unwrap_err();
    assert!(
        refused.to_string().contains("create the pod in Kubernetes"),
        "{refused}"
    );
    agent.stop().await.unwrap();
}
