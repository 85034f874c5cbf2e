//! Starts of a kubelet: it reads static pods, creates its socket, and then admits the pods.

use std::fs::File;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::SystemTime;

use super::*;

/// A kubelet's directories, and one for static pods with a pod.
fn node() -> (Node, Config) {
    // Only opens of processes with this name wait.
    std::fs::write("/proc/self/comm", "kubelet").unwrap();
    let node = Node::new();
    let directory = node.path("manifests");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("pod.yaml"), "").unwrap();
    let mut config = node.config();
    config.shield.as_mut().unwrap().static_pods = directory;
    (node, config)
}

/// Opens the pod in a thread, and returns once the open waits. The thread returns the number of resources in the checkpoint
/// after it.
fn opening(node: &Node) -> JoinHandle<usize> {
    let (pod, kubelet) = (
        node.path("manifests/pod.yaml"),
        node.path("kubelet/device-plugins"),
    );
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        sender
            .send(std::fs::read_link("/proc/thread-self").unwrap())
            .unwrap();
        File::open(pod).unwrap();
        listed(&kubelet)
    });
    let status = Path::new("/proc").join(receiver.recv().unwrap()).join("stat");
    // The state follows the name: `12 (name) D`.
    while !std::fs::read_to_string(&status).unwrap().contains(") D ") {
        std::thread::yield_now();
    }
    thread
}

fn listed(directory: &Path) -> usize {
    let Ok(bytes) = std::fs::read(directory.join("kubelet_internal_checkpoint")) else {
        return 0;
    };
    let file = device_plugin::read(&bytes).unwrap();
    file.verified().unwrap().registered.unwrap().len()
}

/// Writes the kubelet's checkpoint, with a device of each of these resources.
fn list(node: &Node, resources: &[&str]) {
    let listed = |name: &&str| ((*name).to_owned(), Some(vec!["a".to_owned()]));
    let checkpoint = Checkpoint {
        entries: None,
        registered: Some(resources.iter().map(listed).collect()),
    };
    let directory = node.path("kubelet/device-plugins");
    std::fs::write(directory.join("new"), device_plugin::write(&checkpoint)).unwrap();
    std::fs::rename(
        directory.join("new"),
        directory.join("kubelet_internal_checkpoint"),
    )
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn static_pods_wait_until_the_kubelet_knows_the_devices() {
    if !rustix::process::geteuid().is_root() {
        return devlet_testkit::skip("only root can delay an open");
    }
    let (node, config) = node();
    let agent = Agent::start(config).await.unwrap().0;
    let _plugin = Plugin::registered(&node.script());
    // As the last kubelet left it.
    list(&node, &[GPU]);
    let checkpoint = File::open(node.path("kubelet/device-plugins/kubelet_internal_checkpoint")).unwrap();
    checkpoint.set_modified(SystemTime::UNIX_EPOCH).unwrap();

    let opened = opening(&node);
    let kubelet = node.kubelet();
    kubelet.until_healthy(GPU, 3).await;
    list(&node, &["acme.com/other"]);
    list(&node, &["acme.com/other", GPU]);

    assert_eq!(opened.join().unwrap(), 2);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn static_pods_wait_no_longer_than_devlet_runs() {
    if !rustix::process::geteuid().is_root() {
        return devlet_testkit::skip("only root can delay an open");
    }
    let (node, config) = node();
    let agent = Agent::start(config).await.unwrap().0;
    let _plugin = Plugin::registered(&node.script());
    let kubelet = node.kubelet();
    kubelet.until_healthy(GPU, 3).await;

    let opened = opening(&node);
    agent.stop().await.unwrap();

    assert_eq!(opened.join().unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_stays_gets_another_socket_from_the_next_devlet() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let first = kubelet.until_healthy(GPU, 3).await.endpoint;
    agent.store().record_lists().await.unwrap();
    agent.stop().await.unwrap();
    drop(agent);

    let agent = node.devlet().await;
    let next = kubelet.until(GPU, |plugin| plugin.endpoint != first).await;

    // The next kubelet finds the socket as it is.
    drop(kubelet);
    let kubelet = node.kubelet();
    let again = kubelet.until_healthy(GPU, 3).await;
    assert_eq!(again.endpoint, next.endpoint);
    agent.stop().await.unwrap();
}
