//! Starts of a kubelet: it reads static pods, creates its socket, and then admits the pods.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Child;
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

/// Returns `true` if opens of static pods in this directory wait for this process: `fanotify ino:1f sdev:23 ...`.
fn is_watched(node: &Node) -> bool {
    let directory = std::fs::metadata(node.path("manifests")).unwrap().ino();
    let mark = format!("fanotify ino:{directory:x} ");
    let files = std::fs::read_dir("/proc/self/fdinfo").unwrap();
    let abouts = files.filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
    abouts.into_iter().any(|about| about.contains(&mark))
}

async fn until(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < devlet_testkit::PATIENCE);
        tokio::task::yield_now().await;
    }
}

/// Returns devlet's sockets with their inodes, without those that do not listen yet.
fn sockets(node: &Node) -> Vec<(std::ffi::OsString, u64)> {
    let files = std::fs::read_dir(node.path("kubelet/device-plugins/devlet")).unwrap();
    let socket = |file: std::io::Result<std::fs::DirEntry>| {
        let file = file.unwrap();
        (file.file_name(), file.metadata().unwrap().ino())
    };
    let is_listening = |(name, _): &(std::ffi::OsString, u64)| name.to_string_lossy().ends_with(".sock");
    files.map(socket).filter(is_listening).collect()
}

/// Starts a process named `kubelet` that opens the pod twice, and waits until it has. It ends with its standard input.
fn opened_by_child(node: &Node) -> Child {
    let program = node.path("kubelet-program");
    std::fs::create_dir_all(&program).unwrap();
    let program = program.join("kubelet");
    if !program.exists() {
        std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
    }
    let mut child = Command::new(program)
        .args(["-c", r#"exec 3<"$1"; exec 3<"$1"; echo; read line"#, "sh"])
        .arg(node.path("manifests/pod.yaml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let opened = child.stdout.as_mut().unwrap().read(&mut [0]).unwrap();
    assert_eq!(opened, 1, "the opens succeed");
    child
}

#[tokio::test(flavor = "multi_thread")]
async fn static_pods_are_watched_only_while_no_kubelet_runs() {
    if !rustix::process::geteuid().is_root() {
        return devlet_testkit::skip("only root can delay an open");
    }
    let (node, config) = node();
    let agent = Agent::start(config).await.unwrap().0;
    assert!(is_watched(&node));

    for _ in 0..2 {
        // Nothing is registered, so the opens do not wait.
        let mut child = opened_by_child(&node);
        until(|| !is_watched(&node)).await;
        drop(child.stdin.take());
        child.wait().unwrap();
        until(|| is_watched(&node)).await;
    }
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_runs_before_devlet_is_not_watched() {
    if !rustix::process::geteuid().is_root() {
        return devlet_testkit::skip("only root can delay an open");
    }
    let (node, config) = node();
    let kubelet = node.kubelet();
    let agent = Agent::start(config).await.unwrap().0;
    let _plugin = Plugin::registered(&node.script());
    kubelet.until_healthy(GPU, 3).await;

    assert!(!is_watched(&node));
    agent.stop().await.unwrap();
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

    until(|| !sockets(&node).is_empty()).await;
    let served = sockets(&node);

    let opened = opening(&node);
    let kubelet = node.kubelet();
    kubelet.until_healthy(GPU, 3).await;
    list(&node, &["acme.com/other"]);
    list(&node, &["acme.com/other", GPU]);

    assert_eq!(opened.join().unwrap(), 2);
    assert_eq!(sockets(&node), served, "the wait leaves the sockets alone");
    until(|| !is_watched(&node)).await;
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
