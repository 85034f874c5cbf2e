//! A node inside another program: `cargo run -p devlet-agent --example embed`.
//!
//! The program lists its pods, watches the node's capacity, admits a pod, starts its container, and removes the pod. The
//! device plugin is a separate process, as real ones are: this program, started again.

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use devlet_agent::agent::{ActivePods, Agent};
use devlet_agent::capacity::Capacities;
use devlet_agent::config::Config;
use devlet_agent::manifest;
use devlet_core::{PodUid, Source};
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

/// The pods of this program; `None` until it has found them.
type Pods = Arc<Mutex<Option<BTreeSet<PodUid>>>>;

#[tokio::main]
async fn embed() -> Result<(), Box<dyn Error>> {
    let root = tempfile::tempdir()?;
    let (agent, report) = Agent::start(Config::new(root.path())).await?;
    println!("the node runs on {}: {report:?}", root.path().display());

    // The node does not release anything until this program lists its pods, not even pods of a kubelet.
    let pods = Pods::default();
    agent.follow_pods(source(&pods), Duration::from_secs(10));
    agent.on_capacity(print_capacities);
    *lock(&pods) = Some(BTreeSet::new());

    let pod = manifest::parse(POD, Source::Embedder, &agent.config().foreign)?;
    let soon = || Instant::now() + Duration::from_millis(100);
    match agent.admit(&pod, soon(), |_| {}).await {
        Ok(_) => return Err("a pod was admitted without a plugin".into()),
        Err(error) => println!("without a plugin: {error}"),
    }

    let plugin = Plugin::start(&gpus(root.path()));
    let deadline = || Instant::now() + Duration::from_secs(60);
    let waiting = |reason: &devlet_core::ReserveError| println!("waiting: {reason}");
    // The pod must be listed before it is admitted, because pods that are not listed are removed.
    lock(&pods).get_or_insert_default().insert(pod.uid.clone());
    let admitted = agent.admit(&pod, deadline(), waiting).await?;
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
    let removed = agent.reconcile(&source(&pods)).await;
    println!("pods that are gone: {removed:?}");

    // When a pod has ended, this program removes it, or omits it from the next list.
    agent.remove(&admitted.uid, deadline()).await?;
    println!("pod {} is removed, its devices are free", admitted.uid);
    let again = agent.admit(&pod, deadline(), waiting).await?;
    lock(&pods).get_or_insert_default().remove(&pod.uid);
    let removed = agent.reconcile(&source(&pods)).await;
    println!("admitted again, and no longer on the list: {removed:?}");
    if agent.store().read(|node| node.pod(&again.uid).is_some()) {
        return Err("a pod that is not on the list keeps its devices".into());
    }

    drop(plugin);
    agent.stop().await?;
    println!("stopped");
    Ok(())
}

fn lock(pods: &Pods) -> MutexGuard<'_, Option<BTreeSet<PodUid>>> {
    pods.lock().unwrap_or_else(PoisonError::into_inner)
}

fn source(pods: &Pods) -> impl ActivePods + use<> {
    let pods = Arc::clone(pods);
    move || std::future::ready(lock(&pods).clone())
}

fn print_capacities(capacities: &Capacities) {
    for (resource, each) in capacities {
        let (capacity, allocatable, free) = (each.capacity, each.allocatable, each.free);
        println!("{resource}: capacity {capacity}, allocatable {allocatable}, free {free}");
    }
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
