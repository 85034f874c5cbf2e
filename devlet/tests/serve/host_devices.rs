//! `hostDevices`: device nodes of this machine, and hotplug on a host whose `/sys` and `/dev` are files of the test.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::path::Path;
use std::process::{Child, Stdio};

use devlet_testkit::{print_lines, skip};
use serde_json::{Value, json};

use crate::common::{Daemon, devlet, ids, items, root, stderr, until};

const ADAPTER: &str = "host.devlet.dev/adapter";

/// The plugin on its own, on a fake host; killed when dropped.
struct HostPlugin(Child);

impl HostPlugin {
    fn start(daemon: &Daemon, host: &Path) -> Self {
        let rules = json!({"hostDevices": [
            {"resource": ADAPTER, "match": {"path": "/dev/ttyUSB*"}, "groupBy": "usbDevice"},
        ]});
        let mut command = devlet();
        command.args(["host-devices", "--root-dir"]).arg(&daemon.root);
        command.arg("--host-root").arg(host);
        let command = command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        print_lines(child.stderr.take().unwrap(), |_| {});
        writeln!(child.stdin.as_mut().unwrap(), "{rules}").unwrap();
        Self(child)
    }

    fn signal(&self, signal: &str) {
        let mut kill = std::process::Command::new("kill");
        assert!(
            kill.args([signal, &self.0.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }
}

impl Drop for HostPlugin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Plugs a USB serial adapter into a fake host.
fn plug(host: &Path, serial: &str, name: &str) {
    let usb = host.join("sys/devices/usb1").join(format!("1-{serial}"));
    let tty = usb.join("tty").join(name);
    fs::create_dir_all(&tty).unwrap();
    for (file, text) in [("idVendor", "10c4"), ("idProduct", "ea60"), ("serial", serial)] {
        fs::write(usb.join(file), text).unwrap();
    }
    fs::create_dir_all(host.join("dev")).unwrap();
    fs::write(host.join("dev").join(name), "").unwrap();
    fs::write(tty.join("uevent"), format!("DEVNAME={name}\n")).unwrap();
    let links = host.join("sys/dev/char");
    fs::create_dir_all(&links).unwrap();
    symlink(&tty, links.join(name)).unwrap();
}

fn unplug(host: &Path, name: &str) {
    fs::remove_file(host.join("sys/dev/char").join(name)).unwrap();
    fs::remove_file(host.join("dev").join(name)).unwrap();
}

/// Changes udev's database, which causes a scan.
fn write_udev(host: &Path) {
    let database = host.join("run/udev/data");
    fs::create_dir_all(&database).unwrap();
    let new = host.join("run/new");
    fs::write(&new, "").unwrap();
    fs::rename(new, database.join("c188:0")).unwrap();
}

fn health(daemon: &Daemon, wanted: &[(&str, &str)]) {
    daemon.until("devices", |list| {
        let all = items(list);
        let found = wanted.iter().all(|(id, health)| {
            all.iter()
                .any(|each| each["id"] == *id && each["health"] == *health)
        });
        found && all.len() == wanted.len()
    });
}

fn nodes(pod: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let nodes = pod["containers"][0]["deviceNodes"].as_array().unwrap().iter();
    nodes
        .map(|node| {
            (
                text(&node["hostPath"]),
                text(&node["containerPath"]),
                text(&node["permissions"]),
            )
        })
        .collect()
}

#[test]
fn an_admitted_pod_gets_nodes_of_this_machine() {
    let root = root();
    let daemon = Daemon::configured(
        root.path(),
        "hostDevices:\n\
         - {resource: host.devlet.dev/null, match: {path: /dev/null}, as: /dev/void, with: [/dev/zero], permissions: r}\n\
         - {resource: host.devlet.dev/full, match: {path: /dev/full}, share: 3}\n\
         - {resource: host.devlet.dev/none, match: {path: '/dev/no-such-*'}}\n",
    );
    let capacity = |name: &str| {
        let all = items(&daemon.json(&["get", "resources"]));
        all.iter().find(|each| each["name"] == name).unwrap()["capacity"].clone()
    };
    assert_eq!(capacity("host.devlet.dev/null"), 1);
    assert_eq!(capacity("host.devlet.dev/full"), 3);
    assert_eq!(capacity("host.devlet.dev/none"), 0);

    let pod = daemon.json(&["admit", "--name", "a", "--limit", "host.devlet.dev/null=1"]);
    assert_eq!(ids(&pod), ["null"]);
    let node = |host: &str, inside: &str, may: &str| (host.to_owned(), inside.to_owned(), may.to_owned());
    assert_eq!(
        nodes(&pod),
        [
            node("/dev/null", "/dev/void", "r"),
            node("/dev/zero", "/dev/zero", "r")
        ]
    );
    let shared = daemon.json(&["admit", "--name", "b", "--limit", "host.devlet.dev/full=2"]);
    assert_eq!(nodes(&shared), [node("/dev/full", "/dev/full", "rw")]);
    assert_eq!(daemon.admit("c", "host.devlet.dev/full=1").len(), 1);
    daemon.refused(&[
        "admit",
        "--name",
        "d",
        "--limit",
        "host.devlet.dev/full=1",
        "--wait",
        "0s",
    ]);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn two_rules_that_match_one_node_are_refused_at_the_start() {
    let root = root();
    let file = root.path().join("devlet.yaml");
    let rules = "hostDevices:\n- {resource: a.b/one, match: {path: '/dev/nul*'}}\n- {resource: a.b/two, match: {path: /dev/null}}\n";
    fs::write(&file, rules).unwrap();
    let mut command = devlet();
    let command = command.arg("serve").arg("--root-dir").arg(root.path());
    let output = command.arg("--config").arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = "error: hostDevices: rule 1 (a.b/one) and rule 2 (a.b/two) both match /dev/null; narrow one";
    assert!(stderr(&output).contains(said), "{}", stderr(&output));
}

#[test]
fn a_device_that_is_unplugged_while_held_is_unhealthy_and_still_held() {
    let (root, host) = (root(), root());
    let host = host.path();
    write_udev(host);
    plug(host, "S1", "ttyUSB0");
    let daemon = Daemon::on(root.path());
    let _plugin = HostPlugin::start(&daemon, host);
    daemon.until_capacity(ADAPTER, 1);
    assert_eq!(daemon.admit("a", &format!("{ADAPTER}=1")), ["10c4:ea60:S1"]);

    unplug(host, "ttyUSB0");
    plug(host, "S2", "ttyUSB0");
    write_udev(host);
    health(
        &daemon,
        &[("10c4:ea60:S1", "unhealthy"), ("10c4:ea60:S2", "healthy")],
    );
    let pod = daemon.json(&["admit", "--name", "b", "--limit", &format!("{ADAPTER}=1")]);
    assert_eq!(ids(&pod), ["10c4:ea60:S2"]);
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 2);

    plug(host, "S1", "ttyUSB1");
    write_udev(host);
    health(
        &daemon,
        &[("10c4:ea60:S1", "healthy"), ("10c4:ea60:S2", "healthy")],
    );
}

#[test]
fn an_overflow_of_kernel_events_hides_no_device() {
    let (root, host) = (root(), root());
    let host = host.path();
    plug(host, "S1", "ttyUSB0");
    let event = Path::new("/sys/class/mem/null/uevent");
    if fs::write(event, "change").is_err() {
        return skip("only root can make the kernel send events");
    }
    let daemon = Daemon::on(root.path());
    let plugin = HostPlugin::start(&daemon, host);
    daemon.until_capacity(ADAPTER, 1);

    plugin.signal("-STOP");
    plug(host, "S2", "ttyUSB1");
    for _ in 0..5000 {
        fs::write(event, "change").unwrap();
    }
    assert!(
        dropped_events(plugin.0.id()) > 0,
        "the queue of the socket has room for all events"
    );
    plugin.signal("-CONT");
    daemon.until_capacity(ADAPTER, 2);

    // The socket still works.
    plug(host, "S3", "ttyUSB2");
    fs::write(event, "change").unwrap();
    daemon.until_capacity(ADAPTER, 3);
}

/// Returns the events that the kernel could not queue on the netlink socket of a process.
fn dropped_events(pid: u32) -> u64 {
    let sockets = fs::read_to_string("/proc/net/netlink").unwrap();
    let rows = sockets
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = rows.filter(|row| row[1] == "15" && row[2] == pid.to_string());
    own.map(|row| row[8].parse::<u64>().unwrap()).sum()
}

#[test]
fn the_plugin_is_started_again_if_it_ends() {
    let root = root();
    let config = "hostDevices: [{resource: host.devlet.dev/null, match: {path: /dev/null}}]";
    let daemon = Daemon::configured(root.path(), config);
    daemon.until_capacity("host.devlet.dev/null", 1);
    // A thread of the runtime may be the parent.
    let find = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.child.id()))
            .unwrap()
            .flatten();
        let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let all = lists.collect::<Vec<_>>().join(" ");
        all.split_whitespace().next().map(str::to_owned)
    };
    let first = until("the helper", find);
    let mut kill = std::process::Command::new("kill");
    assert!(kill.args(["-KILL", &first]).status().unwrap().success());
    until("another helper", || find().filter(|pid| *pid != first));
    daemon.until_capacity("host.devlet.dev/null", 1);
    assert_eq!(daemon.admit("a", "host.devlet.dev/null=1"), ["null"]);
    let socket = fs::metadata(root.path().join("device-plugins/host-devices-0.sock")).unwrap();
    assert!(socket.file_type().is_socket());
}
