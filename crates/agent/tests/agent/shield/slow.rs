//! Plugins that are slower than a kubelet waits: their answers are kept for its next try.

use devlet_testkit::Event;

use super::*;

/// Returns the number of calls of a method that the plugin has received.
fn calls(plugin: &mut Plugin, method: &str) -> usize {
    // The answer to a command comes after the events of earlier calls.
    plugin.fault("GetPreferredAllocation", None);
    let events = plugin.take_events();
    let is_call = |event: &&Event| matches!(event, Event::Called { method: called, .. } if called == method);
    events.iter().filter(is_call).count()
}

/// Waits until the lease of a CDI device has a phase.
async fn until_phase(agent: &Agent, device: &str, phase: LeasePhase) {
    let name = lease::unqualified(device).unwrap();
    super::super::driver::until(agent, |node| {
        let view = node.leases().get(name.as_str())?;
        (view.phase == phase).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_kept_for_the_next_try() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("Allocate", Some(&Fault::Wait));

    for _ in 0..2 {
        let refusal = refused(&gpus, &["a"]).await;
        let text = "gpu.sock: Allocate has not been answered yet; devlet still waits";
        assert!(refusal.contains(text), "{refusal}");
    }
    // Other leases of the device wait for the same call.
    allocate(&gpus, &["a", "b"]).await;
    let refusal = refused(&gpus, &["a", "b"]).await;
    assert!(
        refusal.contains("is being prepared for another container"),
        "{refusal}"
    );
    plugin.command("proceed");
    until_phase(&agent, &device, LeasePhase::Prepared).await;

    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    assert_eq!(calls(&mut plugin, "Allocate"), 1);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_survives_a_restart() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&Script {
        options: Options {
            pre_start: true,
            ..Options::default()
        },
        ..node.script()
    });
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("Allocate", Some(&Fault::Wait));
    plugin.fault("PreStartContainer", Some(&Fault::Hang));
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("Allocate has not been answered yet"),
        "{refusal}"
    );
    plugin.command("proceed");
    // The answer is on record before anything else is asked.
    plugin.called("PreStartContainer");
    agent.stop().await.unwrap();
    drop((agent, kubelet, plugin));

    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    gpus.pre_start(&["a"]).await.unwrap();

    assert!(!plugin.was_called("Allocate"));
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_pre_start_serves_the_next_try_and_no_later_start() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&Script {
        options: Options {
            pre_start: true,
            ..Options::default()
        },
        ..node.script()
    });
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("PreStartContainer", Some(&Fault::Wait));
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("PreStartContainer has not been answered yet"),
        "{refusal}"
    );
    plugin.command("proceed");
    until_phase(&agent, &device, LeasePhase::Prepared).await;
    assert_eq!(calls(&mut plugin, "PreStartContainer"), 1);
    plugin.fault("PreStartContainer", None);

    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(calls(&mut plugin, "PreStartContainer"), 0);

    start(&agent, &device, "c1").await.unwrap();
    let lease = lease::unqualified(&device).unwrap();
    agent.store().stop_leased(lease.as_str(), "c1").await.unwrap();
    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(calls(&mut plugin, "PreStartContainer"), 1);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_is_restarted_is_asked_again() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("Allocate", Some(&Fault::Hang));
    let refusal = refused(&gpus, &["a"]).await;
    assert!(
        refusal.contains("Allocate has not been answered yet"),
        "{refusal}"
    );

    plugin.kill();
    until_phase(&agent, &device, LeasePhase::Granted).await;
    let mut plugin = Plugin::registered(&node.script());
    gpus.pre_start(&["a"]).await.unwrap();

    assert_eq!(calls(&mut plugin, "Allocate"), 1);
    assert_eq!(node.runtime(&device).unwrap(), json!(["GPU=a"]));
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_is_shown_at_the_next_try() {
    let node = Node::new();
    let mut config = node.config();
    config.deadlines.allocate = Duration::from_secs(2);
    let agent = Agent::start(config).await.unwrap().0;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("Allocate", Some(&Fault::Hang));
    refused(&gpus, &["a"]).await;
    until_phase(&agent, &device, LeasePhase::Granted).await;

    let refusal = refused(&gpus, &["a"]).await;

    let text = "the call before failed: Allocate was not answered within 2 s";
    assert!(refusal.contains(text), "{refusal}");
    assert_eq!(calls(&mut plugin, "Allocate"), 2);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_a_plugin() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let mut plugin = Plugin::registered(&node.script());
    let gpus = kubelet.until_healthy(GPU, 3).await;
    let device = allocate(&gpus, &["a"]).await;
    plugin.fault("Allocate", Some(&Fault::Wait));

    let (refusal, stopped) = tokio::join!(refused(&gpus, &["a"]), async {
        until_phase(&agent, &device, LeasePhase::Preparing).await;
        agent.stop().await
    });

    assert!(refusal.contains("devlet is stopping"), "{refusal}");
    stopped.unwrap();
}
