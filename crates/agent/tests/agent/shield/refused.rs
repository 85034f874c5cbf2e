//! Kubelets that must not get devices.

use devlet_agent::shield::runtime::program;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_is_too_old_gets_no_devices() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    allocate(&gpus, &["a"]).await;
    gpus.pre_start(&["a"]).await.unwrap();
    let mut state = agent.shield().subscribe();

    // Its program tells its version after it has been registered with.
    let program = program(std::process::id().try_into().unwrap()).unwrap();
    agent.shield().update(|state| {
        let version = Some("v1.28.15".to_owned());
        state.kubelet.as_mut().unwrap().version = version.clone();
        state.versions.insert(program, version);
    });

    kubelet.until(GPU, |gpus| gpus.devices.is_none()).await;
    let refusal = |state: &devlet_agent::shield::report::ShieldState| {
        let problem = state.registrations.get(GPU).cloned().flatten();
        problem.is_some_and(|text| text.contains("kubelet v1.28.15 does not hand CDI devices on"))
    };
    state.wait_for(refusal).await.unwrap();
    let adopting = agent.adopt_leases().await.unwrap_err().to_string();
    assert!(adopting.contains("kubelet v1.28.15"), "{adopting}");

    // The same program is not registered with again.
    agent.shield().update(|state| state.registrations.clear());
    drop(kubelet);
    let kubelet = node.kubelet();
    state.wait_for(refusal).await.unwrap();
    assert!(kubelet.resources().is_empty());
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_container_starts_while_the_kubelets_process_is_not_visible() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    allocate(&gpus, &["a"]).await;

    agent
        .shield()
        .update(|state| state.kubelet.as_mut().unwrap().pid = None);

    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("run devlet in the host's PID namespace"),
        "{refusal}"
    );
    let adopting = agent.adopt_leases().await.unwrap_err().to_string();
    assert!(
        adopting.contains("run devlet in the host's PID namespace"),
        "{adopting}"
    );
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_is_not_prepared_if_its_hook_cannot_be_run() {
    let node = Node::new();
    let mut config = node.config();
    config.shield.as_mut().unwrap().hook = node.path("absent");
    let agent = Agent::start(config).await.unwrap().0;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;

    let refusal = refused(&gpus, &["a"]).await;

    assert!(refusal.contains("absent does not exist"), "{refusal}");
    assert!(node.runtime(&device).is_err());
    agent.stop().await.unwrap();
}
