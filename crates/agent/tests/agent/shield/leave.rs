//! Leaving a kubelet, and coming back.

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
