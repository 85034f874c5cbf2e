//! Leaving a kubelet, and coming back.

use devlet_agent::shield::report::{RuntimeState, ShieldState};
use devlet_kubelet_api::device_plugin::v1beta1::{CdiDevice, ContainerAllocateResponse};

use super::*;

/// Returns the answer that the kubelet keeps for a lease.
fn answer_with(device: &str) -> Vec<u8> {
    let cdi_devices = vec![CdiDevice {
        name: device.to_owned(),
    }];
    let answer = ContainerAllocateResponse {
        cdi_devices,
        ..Default::default()
    };
    answer.encode_to_vec()
}

async fn stays(agent: &Agent) -> String {
    agent.leave_kubelet().await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn devlet_that_has_left_stays_away_after_a_restart_until_it_adopts() {
    let node = Node::new();
    let agent = node.devlet().await;
    let plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    gpus.pre_start(&["a"]).await.unwrap();
    agent.store().record_lists().await.unwrap();
    assert_eq!(agent.leave_kubelet().await.unwrap(), (1, node.path("etc")));
    kubelet.until(GPU, |gpus| gpus.devices.is_none()).await;
    agent.stop().await.unwrap();
    drop((agent, plugin));

    let agent = node.devlet().await;
    assert!(agent.shield().get().left.is_some());
    node.checkpoint(&[("p", &["a"], &answer_with(&device))]);
    assert_eq!(agent.adopt_leases().await.unwrap(), (1, 0));
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;

    // Its container may have been started without devlet's word.
    gpus.pre_start(&["a"]).await.unwrap();
    allocate(&gpus, &["a"]).await;
    let refusal = refused(&gpus, &["a"]).await;
    assert!(refusal.contains("from before devlet took over"), "{refusal}");
    agent.stop().await.unwrap();
    drop(agent);
    let agent = node.devlet().await;
    assert_eq!(agent.shield().get().left, None);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn devlet_does_not_leave_while_that_would_harm_containers() {
    let node = Node::new();
    let agent = node.devlet().await;
    let mut plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let path = node.path("kubelet/device-plugins/kubelet_internal_checkpoint");

    std::fs::write(&path, "{}x").unwrap();
    let reason = stays(&agent).await;
    assert!(
        reason.contains("kubelet_internal_checkpoint cannot be used"),
        "{reason}"
    );

    let unknown = lease::qualified(&lease::new_name());
    node.checkpoint(&[("p", &["c"], &answer_with(&unknown))]);
    let reason = stays(&agent).await;
    assert!(
        reason.contains("pod p has a lease that devlet does not know"),
        "{reason}"
    );
    std::fs::remove_file(&path).unwrap();

    let device = allocate(&gpus, &["a"]).await;
    let reason = stays(&agent).await;
    assert!(reason.contains("a container waits for devices a"), "{reason}");

    plugin.fault("Allocate", Some(&Fault::Wait));
    refused(&gpus, &["a"]).await;
    let reason = stays(&agent).await;
    assert!(
        reason.contains("devices a of acme.com/gpu are being prepared"),
        "{reason}"
    );
    plugin.command("proceed");
    let name = lease::unqualified(&device).unwrap();
    super::super::driver::until(&agent, |node| {
        (node.leases().get(name.as_str())?.phase == LeasePhase::Prepared).then_some(())
    })
    .await;
    gpus.pre_start(&["a"]).await.unwrap();

    start(&agent, &device, "c1").await.unwrap();
    let reason = stays(&agent).await;
    assert!(
        reason.contains("container c1 still runs with devices a"),
        "{reason}"
    );
    agent.store().stop_leased(name.as_str(), "c1").await.unwrap();

    std::fs::write(node.path("etc"), "not a directory").unwrap();
    let reason = stays(&agent).await;
    assert!(reason.contains("the CDI spec cannot be written"), "{reason}");
    std::fs::remove_file(node.path("etc")).unwrap();

    // Registrations have not ended.
    kubelet.until_healthy(GPU, 3).await;
    agent.leave_kubelet().await.unwrap();
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_answer_cannot_be_read_keeps_its_devices() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    node.checkpoint(&[("p", &["a"], b"\xff")]);
    assert_eq!(agent.adopt_leases().await.unwrap(), (1, 1));
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;

    allocate(&gpus, &["a", "b"]).await;
    let refusal = refused(&gpus, &["a", "b"]).await;

    assert!(
        refusal.contains("of pod p from before devlet took over"),
        "{refusal}"
    );
    agent.stop().await.unwrap();
}

/// A runtime that reads CDI specs from these directories of a node.
fn reading(node: &Node, directories: &[&str]) -> Reports {
    let directories: Vec<PathBuf> = directories.iter().map(|name| node.path(name)).collect();
    Reports {
        config: Some(json!({ "enableCDI": true, "cdiSpecDirs": directories }).to_string()),
        ..Reports::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn devlet_does_not_leave_to_a_directory_that_the_runtime_does_not_read() {
    let node = Node::new();
    let runtime = node.runtime_with(reading(&node, &["cdi"]));
    let agent = node.devlet().await;
    let mut state = agent.shield().subscribe();
    let is_ready = |state: &ShieldState| matches!(state.runtime, RuntimeState::Ready { .. });
    state.wait_for(is_ready).await.unwrap();
    let _plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    gpus.pre_start(&["a"]).await.unwrap();

    let reason = stays(&agent).await;
    assert!(reason.contains("set shield.permanentCdiDir"), "{reason}");
    // A runtime that is away has not changed its configuration.
    drop(runtime);
    std::fs::remove_file(node.path("cri.sock")).unwrap();
    let reason = stays(&agent).await;
    assert!(reason.contains("set shield.permanentCdiDir"), "{reason}");

    assert!(node.runtime(&device).is_ok());
    let _runtime = node.runtime_with(reading(&node, &["cdi", "etc"]));
    agent.leave_kubelet().await.unwrap();
    assert!(node.runtime(&device).is_err());
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_keep_their_specs_if_one_of_the_new_ones_cannot_be_written() {
    let node = Node::new();
    let agent = node.devlet().await;
    let _plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let mut devices = Vec::new();
    for id in ["a", "b"] {
        devices.push(allocate(&gpus, &[id]).await);
        gpus.pre_start(&[id]).await.unwrap();
    }
    devices.sort();
    let last = lease::unqualified(&devices[1]).unwrap();
    let blocked = node.path(&format!("etc/devlet.dev-lease-{}.json", last.as_str()));
    std::fs::create_dir_all(blocked.join("in the way")).unwrap();

    let reason = stays(&agent).await;

    assert!(reason.contains("the CDI spec cannot be written"), "{reason}");
    for device in devices {
        assert!(node.runtime(&device).is_ok(), "{device}");
    }
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_not_taken_over_while_its_runtime_would_drop_devices() {
    let node = Node::new();
    let _runtime = node.runtime_with(Reports {
        config: Some(json!({ "enableCDI": false }).to_string()),
        ..Reports::default()
    });
    let agent = node.devlet().await;
    let mut state = agent.shield().subscribe();
    let is_unfit = |state: &ShieldState| matches!(state.runtime, RuntimeState::Unfit { .. });
    state.wait_for(is_unfit).await.unwrap();
    node.checkpoint(&[("p", &["a"], b"")]);

    let reason = agent.adopt_leases().await.unwrap_err().to_string();

    assert!(
        reason.contains("scripted v1 cannot be used: CDI is off"),
        "{reason}"
    );
    agent.stop().await.unwrap();
}
