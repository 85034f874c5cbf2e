//! `devlet serve --shield`: the binary between a kubelet's side of the API and plugins, and the hook of runtimes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use devlet_kubelet_api::device_plugin::v1beta1::{CdiDevice, ContainerAllocateResponse};
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_testkit::{Device, Kubelet, KubeletPod, KubeletPods, Plugin, RegisteredPlugin, Script};
use prost::Message as _;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{Daemon, devlet, ids, items, root, stderr, stdout};

const GPU: &str = "acme.com/gpu";

/// The directories of a node: devlet's root, the kubelet's root, and two for CDI specs.
struct Node(TempDir);

impl Node {
    fn new() -> Self {
        let root = root();
        for name in ["d", "k", "cdi", "etc"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        Self(root)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn daemon(&self) -> Daemon {
        let path = |name: &str| self.path(name).display().to_string();
        let config = format!(
            "shield: {{cdiDir: {}, permanentCdiDir: {}}}",
            path("cdi"),
            path("etc")
        );
        let file = self.path("devlet.yaml");
        std::fs::write(&file, config).unwrap();
        let absent = format!("unix://{}", path("absent.sock"));
        let args = [
            "--shield",
            "--kubelet-dir",
            &path("k"),
            "--config",
            file.to_str().unwrap(),
            "--runtime-endpoint",
            &absent,
        ];
        Daemon::with(&self.path("d"), &args)
    }

    fn plugin(&self) -> Plugin {
        let devices = vec![Device::new("a"), Device::new("b")];
        Plugin::registered(&Script::new(self.path("d"), GPU, devices))
    }

    /// Returns the device of the only spec in a directory.
    fn spec(&self, directory: &str) -> Value {
        let [file] = <[PathBuf; 1]>::try_from(files(&self.path(directory))).unwrap();
        let spec: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        spec["devices"][0].clone()
    }

    fn shield(&self, command: &str) -> Output {
        let mut devlet = devlet();
        devlet.args(["shield", command, "--root-dir"]).arg(self.path("d"));
        devlet.output().unwrap()
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Returns the program and the arguments of a hook of a device. It waits for `wait` seconds.
fn hook_command(device: &Value, stage: &str, wait: u64) -> Vec<String> {
    let hooks = device["containerEdits"]["hooks"].as_array().unwrap();
    let hook = hooks.iter().find(|hook| hook["hookName"] == stage).unwrap();
    let timeout = hook["timeout"].as_u64().unwrap();
    let args = hook["args"].as_array().unwrap().iter().skip(1);
    let mut command: Vec<String> = [&hook["path"]]
        .into_iter()
        .chain(args)
        .map(|arg| arg.as_str().unwrap().to_owned())
        .collect();
    let place = command.iter().position(|arg| arg == "--wait").unwrap() + 1;
    assert!(command[place].parse::<u64>().unwrap() < timeout && timeout < 120);
    command[place] = wait.to_string();
    command
}

/// Starts a hook as a runtime does.
fn start_hook(command: &[String], container: &str, pid: u32) -> Child {
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let state =
        serde_json::json!({ "ociVersion": "1.2.0", "id": container, "pid": pid, "status": "created" });
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(state.to_string().as_bytes()).unwrap();
    child
}

/// Runs a hook of a device that does not wait.
fn hook(device: &Value, stage: &str, container: &str) -> Output {
    let command = hook_command(device, stage, 0);
    let child = start_hook(&command, container, std::process::id());
    child.wait_with_output().unwrap()
}

async fn refused(gpus: &RegisteredPlugin, devices: &[&str]) -> String {
    gpus.pre_start(devices).await.unwrap_err().message().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_decide_which_container_has_a_device() {
    let node = Node::new();
    let daemon = node.daemon();
    let _plugin = node.plugin();
    let kubelet = Kubelet::start(&node.path("k"));
    let gpus = kubelet.until_healthy(GPU, 2).await;
    gpus.allocate(&["a"]).await.unwrap();
    gpus.pre_start(&["a"]).await.unwrap();
    let device = node.spec("cdi");

    let started = hook(&device, "createRuntime", "c1");
    assert!(started.status.success(), "{}", stderr(&started));
    let refusal = refused(&gpus, &["a"]).await;
    assert!(refusal.contains("waiting for container c1 to end"), "{refusal}");
    let second = hook(&device, "createRuntime", "c2");
    assert!(!second.status.success());
    assert!(
        stderr(&second).contains("container c1 still has device a"),
        "{}",
        stderr(&second)
    );

    let listed = stdout(&node.shield("leases"));
    let status = daemon.json(&["status"]);
    assert_eq!(status["shield"]["leases"], 1);
    assert_eq!(status["shield"]["cdi"], "unknown");
    assert_eq!(status["shield"]["kubeletPid"], std::process::id());
    let row = listed.lines().find(|line| line.contains(GPU)).unwrap();
    assert!(row.contains("prepared") && row.ends_with('1'), "{listed}");
    assert!(hook(&device, "poststop", "c1").status.success());
    gpus.pre_start(&["a"]).await.unwrap();
    assert!(hook(&device, "createRuntime", "c2").status.success());
    assert_eq!(daemon.stop(), Some(0));

    // Without devlet, no container starts, and the end of one is no error.
    assert!(!hook(&device, "createRuntime", "c3").status.success());
    assert!(hook(&device, "poststop", "c2").status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_waits_for_the_earlier_container_and_for_devlet() {
    let node = Node::new();
    let daemon = node.daemon();
    let _plugin = node.plugin();
    let kubelet = Kubelet::start(&node.path("k"));
    let gpus = kubelet.until_healthy(GPU, 2).await;
    gpus.allocate(&["a"]).await.unwrap();
    gpus.pre_start(&["a"]).await.unwrap();
    let device = node.spec("cdi");
    let waiting = hook_command(&device, "createRuntime", 60);
    assert!(hook(&device, "createRuntime", "c1").status.success());

    let second = start_hook(&waiting, "c2", std::process::id());
    // By the time that this one is refused, the other one waits.
    assert!(!hook(&device, "createRuntime", "c3").status.success());
    assert!(hook(&device, "poststop", "c1").status.success());
    let second = second.wait_with_output().unwrap();
    assert!(second.status.success(), "{}", stderr(&second));

    // A stop of devlet does not wait for hooks, and a hook goes on with the next devlet.
    let third = start_hook(&waiting, "c4", std::process::id());
    assert!(!hook(&device, "createRuntime", "c5").status.success());
    assert_eq!(daemon.stop(), Some(0));
    let daemon = node.daemon();
    assert!(hook(&device, "poststop", "c2").status.success());
    let third = third.wait_with_output().unwrap();
    assert!(third.status.success(), "{}", stderr(&third));
    assert_eq!(daemon.stop(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_devlet_cannot_see_does_not_start() {
    let can_unshare = Command::new("unshare").args(["--pid", "--fork", "true"]).status();
    if !can_unshare.is_ok_and(|status| status.success()) {
        return devlet_testkit::skip("needs unshare");
    }
    let node = Node::new();
    let daemon = node.daemon();
    let _plugin = node.plugin();
    let kubelet = Kubelet::start(&node.path("k"));
    let gpus = kubelet.until_healthy(GPU, 2).await;
    gpus.allocate(&["a"]).await.unwrap();
    gpus.pre_start(&["a"]).await.unwrap();
    let device = node.spec("cdi");

    // A runtime of another PID namespace reports a process of that namespace.
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc"].map(String::from);
    let command = [&unshare[..], &hook_command(&device, "createRuntime", 0)].concat();
    let refused = start_hook(&command, "c1", 1).wait_with_output().unwrap();

    assert!(!refused.status.success());
    let text = stderr(&refused);
    assert!(
        text.contains("is not visible to devlet; run devlet in the host's PID namespace"),
        "{text}"
    );
    // It has not started.
    gpus.pre_start(&["a"]).await.unwrap();
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_kubelet_that_devlet_cannot_see_does_not_pass_the_check() {
    let can_unshare = Command::new("unshare").args(["--pid", "--fork", "true"]).status();
    if !can_unshare.is_ok_and(|status| status.success()) {
        return devlet_testkit::skip("needs unshare");
    }
    let node = Node::new();
    std::fs::create_dir(node.path("k/device-plugins")).unwrap();
    let _listener =
        std::os::unix::net::UnixListener::bind(node.path("k/device-plugins/kubelet.sock")).unwrap();
    let mut check = Command::new("unshare");
    check
        .args(["--pid", "--fork", "--mount-proc"])
        .arg(devlet().get_program());
    check
        .args(["shield", "check", "--kubelet-dir"])
        .arg(node.path("k"));
    let checked = check.arg("--cdi-dir").arg(node.path("cdi")).output().unwrap();

    assert_eq!(checked.status.code(), Some(1));
    let text = stdout(&checked);
    assert!(
        text.contains("its process is not visible; run devlet in the host's"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_need_no_devlet_after_it_has_left() {
    let node = Node::new();
    let daemon = node.daemon();
    let plugin = node.plugin();
    let kubelet = Kubelet::start(&node.path("k"));
    let gpus = kubelet.until_healthy(GPU, 2).await;
    gpus.allocate(&["a"]).await.unwrap();
    let waiting = node.shield("leave");
    assert_eq!(waiting.status.code(), Some(1));
    assert!(
        stderr(&waiting).contains("a container waits for devices a of acme.com/gpu"),
        "{}",
        stderr(&waiting)
    );
    gpus.pre_start(&["a"]).await.unwrap();

    let left = node.shield("leave");

    assert!(left.status.success(), "{}", stderr(&left));
    assert_eq!(node.spec("etc")["containerEdits"]["hooks"], Value::Null);
    assert!(files(&node.path("cdi")).is_empty());
    kubelet.until(GPU, |gpus| gpus.devices.is_none()).await;
    drop(plugin);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn the_kubelets_own_directory_is_refused_as_the_root() {
    let node = Node::new();
    let mut serve = devlet();
    serve
        .args(["serve", "--shield", "--kubelet-dir"])
        .arg(node.path("k"));
    let refused = serve.arg("--root-dir").arg(node.path("k")).output().unwrap();

    assert_eq!(refused.status.code(), Some(2));
    let text = stderr(&refused);
    assert!(
        text.contains("is the kubelet's root directory; choose another one"),
        "{text}"
    );
}

#[test]
fn a_node_without_a_kubelet_does_not_pass_the_check() {
    let node = Node::new();
    let mut check = devlet();
    check
        .args(["shield", "check", "--kubelet-dir"])
        .arg(node.path("k"));
    let checked = check.arg("--cdi-dir").arg(node.path("cdi")).output().unwrap();

    assert_eq!(checked.status.code(), Some(1));
    let text = stdout(&checked);
    assert!(text.contains("name the kubelet's with --kubelet-dir"), "{text}");
}

/// Writes the kubelet's checkpoint with one container, which has a device.
fn checkpoint(node: &Node, device: &str) {
    let answer = ContainerAllocateResponse {
        cdi_devices: vec![CdiDevice {
            name: device.to_owned(),
        }],
        ..ContainerAllocateResponse::default()
    };
    let entry = Entry {
        pod_uid: "u1".into(),
        container: "main".into(),
        resource: GPU.into(),
        devices: Devices::PerNuma(Some([(-1, Some(vec!["a".into()]))].into())),
        alloc_resp: Some(answer.encode_to_vec()),
    };
    let checkpoint = Checkpoint {
        entries: Some(vec![entry]),
        registered: None,
    };
    let path = node.path("k/device-plugins/kubelet_internal_checkpoint");
    std::fs::write(path, device_plugin::write(&checkpoint)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_the_kubelet_are_shown_with_their_names() {
    let node = Node::new();
    let pods = vec![KubeletPod::new("u1", "job", "main", GPU, &["a"])];
    let _pods = KubeletPods::start(&node.path("k"), true, pods);
    let daemon = node.daemon();
    let _plugin = node.plugin();
    let kubelet = Kubelet::start(&node.path("k"));
    let gpus = kubelet.until_healthy(GPU, 2).await;
    let answer = gpus.allocate(&["a"]).await.unwrap();
    checkpoint(&node, &answer.cdi_devices[0].name);
    let adopted = node.shield("adopt");
    assert!(adopted.status.success(), "{}", stderr(&adopted));

    let named = |list: &Value| items(list).iter().any(|pod| pod["name"] == "job");
    let listed = daemon.until("pods", named);
    let pod = &items(&listed)[0];
    assert_eq!(
        (&pod["namespace"], &pod["source"]),
        (&"default".into(), &"kubelet".into())
    );
    assert_eq!(pod["containers"][0]["name"], "main");
    assert_eq!(pod["containers"][0]["kind"], "app");
    assert_eq!(ids(pod), ["a"]);
    let described = daemon.json(&["describe", "pod", "job"]);
    assert_eq!(described["uid"], "u1");
    let devices = daemon.json(&["get", "devices"]);
    let device = items(&devices).into_iter().find(|device| device["id"] == "a");
    assert_eq!(device.unwrap()["holders"][0]["name"], "job");
    let device = daemon.json(&["describe", "device", "a"]);
    assert_eq!(device["containers"][0]["container"], "main");
    let leases = stdout(&node.shield("leases"));
    assert!(leases.contains("default/job"), "{leases}");
    let resource = &items(&daemon.json(&["get", "resources"]))[0];
    assert_eq!((&resource["held"], &resource["free"]), (&1.into(), &1.into()));
    assert_eq!(daemon.json(&["status"])["pods"], 1);
    // The pod is the kubelet's.
    let refused = daemon.refused(&["remove", "job"]);
    assert!(refused.contains("job"), "{refused}");
    assert_eq!(daemon.stop(), Some(0));
}
