//! The node inside another program: its list of pods, and its end.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::config::Config;
use devlet_agent::manifest;
use devlet_agent::store::StopError;
use devlet_core::{PodRequest, Source};
use devlet_testkit::{Device, PATIENCE, Plugin, Script};
use tokio::time::Instant;

devlet_testkit::plugin_process!();

const GPU: &str = "acme.com/gpu";

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

fn held(agent: &Agent) -> usize {
    let now = agent.store().now();
    agent.store().read(|node| node.capacity_of(&GPU.into(), now).held)
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_twice_is_told_and_harmless() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    agent.stop().await.unwrap();
    assert!(matches!(agent.stop().await, Err(StopError::Stopped)));
    drop(agent);
    node(root.path()).await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_ended_while_the_node_was_away_are_released_once_the_list_is_in() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let devices = vec![Device::new("a"), Device::new("b"), Device::new("c")];
    let plugin = Plugin::start(&Script::new(root.path(), GPU, devices));
    let pods = [
        pod("stays", Source::Embedder),
        pod("ended", Source::Embedder),
        pod("somebody-elses", Source::Api),
    ];
    for pod in &pods {
        agent.admit(pod, Instant::now() + PATIENCE, |_| {}).await.unwrap();
    }
    drop(plugin);
    agent.stop().await.unwrap();
    drop(agent);

    let agent = node(root.path()).await;
    assert_eq!(held(&agent), 3, "the list is not in yet");
    let active = BTreeSet::from([pods[0].uid.clone()]);
    assert_eq!(agent.pods_synced(&active).await, [pods[1].uid.clone()]);

    assert_eq!(held(&agent), 2);
    // Nobody is there to be asked, and nobody is asked.
    let at_once = Instant::now() + Duration::from_millis(1);
    agent.admit(&pods[0], at_once, |_| {}).await.unwrap();
    agent.stop().await.unwrap();
}
