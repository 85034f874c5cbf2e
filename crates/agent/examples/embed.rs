//! A node inside another program: `cargo run -p devlet-agent --example embed`.
//!
//! The program knows which pods there are, follows the node's capacity, admits a pod, starts its container, and
//! lets the pod go. The device plugin is a process of its own, as real ones are: this program, started again.

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::config::Config;
use devlet_agent::manifest;
use devlet_core::{Capacity, PodUid, ResourceName, Source};
use devlet_testkit::{Answer, Device, Plugin, Script};
use tokio::time::Instant;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: job, namespace: default}
spec:
  containers:
  - name: main
    resources: {limits: {acme.com/gpu: 2}}
";

fn main() -> Result<(), Box<dyn Error>> {
    devlet_testkit::become_plugin_if_asked();
    embed()
}

#[tokio::main]
async fn embed() -> Result<(), Box<dyn Error>> {
    let root = tempfile::tempdir()?;
    let (agent, report) = Agent::start(Config::new(root.path())).await?;
    println!("the node runs on {}: {report:?}", root.path().display());

    // The pods that this program has. Until it says so, nothing is released: not even what a kubelet left.
    let mut active: BTreeSet<PodUid> = BTreeSet::new();
    let removed = agent.pods_synced(&active).await;
    println!("pods from before that are gone: {}", removed.len());

    let (printing, node) = (agent.stopping(), agent.clone());
    agent.spawn(async move {
        tokio::select! {
            () = on_capacity(&node, print_capacity) => {}
            () = printing.cancelled() => {}
        }
    });

    let pod = manifest::parse(POD, Source::Embedder, &agent.config().foreign)?;
    let soon = || Instant::now() + Duration::from_millis(100);
    match agent.admit(&pod, soon(), |_| {}).await {
        Ok(_) => return Err("a pod was admitted without a plugin".into()),
        Err(error) => println!("without a plugin: {error}"),
    }

    let plugin = Plugin::start(&gpus(root.path()));
    let deadline = || Instant::now() + Duration::from_secs(60);
    let waiting = |reason: &devlet_core::ReserveError| println!("waiting: {reason}");
    let admitted = agent.admit(&pod, deadline(), waiting).await?;
    active.insert(admitted.uid.clone());
    for allocation in &admitted.allocations {
        let (container, resource) = (&allocation.container, &allocation.resource);
        println!("container {container} has {:?} of {resource}", allocation.devices);
    }
    let (options, conflicts) = agent.start_container(&admitted.uid, "main", deadline()).await?;
    println!(
        "the runtime adds {:?}, conflicts: {}",
        options.envs,
        conflicts.len()
    );

    // The pod has ended: either the next list does not have it, or it is removed by name.
    agent.remove(&admitted.uid, deadline()).await?;
    active.remove(&admitted.uid);
    println!("pod {} is removed, its devices are free", admitted.uid);
    let again = agent.admit(&pod, deadline(), waiting).await?;
    let removed = agent.pods_synced(&active).await;
    println!("admitted again, and no longer on the list: {removed:?}");
    if removed != [again.uid] {
        return Err("a pod that is not on the list keeps its devices".into());
    }

    drop(plugin);
    agent.stop().await?;
    println!("stopped");
    Ok(())
}

/// Calls back whenever the capacity of a resource is not what it was.
async fn on_capacity(agent: &Agent, mut changed: impl FnMut(&ResourceName, Capacity)) {
    let mut changes = agent.store().changed();
    let mut known = std::collections::BTreeMap::new();
    loop {
        changes.borrow_and_update();
        let now = agent.store().now();
        let current = agent.store().read(|node| node.capacity(now));
        for (resource, capacity) in &current {
            if known.get(resource) != Some(capacity) {
                changed(resource, *capacity);
            }
        }
        known = current;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn print_capacity(resource: &ResourceName, capacity: Capacity) {
    let Capacity {
        capacity,
        allocatable,
        held,
        free,
    } = capacity;
    println!("{resource}: capacity {capacity}, allocatable {allocatable}, held {held}, free {free}");
}

fn gpus(root: &std::path::Path) -> Script {
    let devices = (0..4).map(|number| Device::on(&format!("gpu{number}"), number % 2));
    let answer = Answer {
        envs: [("GPUS".to_owned(), "{ids}".to_owned())].into(),
        ..Answer::default()
    };
    Script {
        answer,
        ..Script::new(root, "acme.com/gpu", devices.collect())
    }
}
