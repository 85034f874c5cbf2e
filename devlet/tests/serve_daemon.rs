//! `devlet serve` on the built binary: start, refusals, stop, what it says.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::Stdio;

use common::{Daemon, devlet, http_get, items, root, stderr, stdout, until};
use devlet_testkit::{Device, Plugin, Script};

devlet_testkit::plugin_process!();

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_daemon_says_where_it_is_and_stops_cleanly() {
    let root = root();
    let daemon = Daemon::on(root.path());

    for part in [
        "is running",
        "device-plugins/kubelet.sock",
        "devlet/devlet.sock",
        "get resources",
        "DEVLET_ROOT=",
    ] {
        assert!(daemon.banner.contains(part), "{part}: {}", daemon.banner);
    }
    for (path, expected) in [
        ("device-plugins", 0o750),
        ("plugins_registry", 0o750),
        ("devlet", 0o750),
        ("device-plugins/kubelet.sock", 0o660),
        ("devlet/devlet.sock", 0o660),
        ("devlet/state.redb", 0o600),
    ] {
        assert_eq!(mode(&root.path().join(path)), expected, "{path}");
    }
    assert_eq!(daemon.stop(), Some(0));
    for socket in ["device-plugins/kubelet.sock", "devlet/devlet.sock"] {
        assert!(!root.path().join(socket).exists(), "{socket} stays behind");
    }
}

#[test]
fn a_second_daemon_on_the_same_root_is_refused_and_the_first_goes_on() {
    let root = root();
    let daemon = Daemon::on(root.path());

    let second = devlet()
        .arg("serve")
        .arg("--root-dir")
        .arg(root.path())
        .output()
        .unwrap();

    assert_eq!(second.status.code(), Some(2));
    assert!(
        stderr(&second).contains("another devlet runs on"),
        "{}",
        stderr(&second)
    );
    assert!(daemon.run(&["status"]).status.success());
}

#[test]
fn a_live_kubelet_keeps_its_socket() {
    let root = root();
    std::fs::create_dir(root.path().join("device-plugins")).unwrap();
    let socket = root.path().join("device-plugins/kubelet.sock");
    let kubelet = UnixListener::bind(&socket).unwrap();

    let refused = devlet()
        .arg("serve")
        .arg("--root-dir")
        .arg(root.path())
        .output()
        .unwrap();

    assert_eq!(refused.status.code(), Some(2));
    let said = stderr(&refused);
    assert!(
        said.contains("kubelet.sock") && said.contains(&format!("pid {}", std::process::id())),
        "{said}"
    );
    assert!(
        said.contains("serve_daemon"),
        "the name of the process in the way: {said}"
    );
    assert!(
        std::os::unix::net::UnixStream::connect(&socket).is_ok(),
        "the socket was taken away"
    );
    drop(kubelet);
}

#[test]
fn a_stale_socket_is_in_nobodys_way() {
    let root = root();
    std::fs::create_dir(root.path().join("device-plugins")).unwrap();
    drop(UnixListener::bind(root.path().join("device-plugins/kubelet.sock")).unwrap());
    assert_eq!(Daemon::on(root.path()).stop(), Some(0));
}

// Many plugins watch nothing but their own socket, and register again when it is gone.
#[test]
fn sockets_of_plugins_are_removed_at_start_even_of_live_ones_and_nothing_else_is() {
    let root = root();
    let plugins = root.path().join("device-plugins");
    std::fs::create_dir(&plugins).unwrap();
    let _live = UnixListener::bind(plugins.join("live.sock")).unwrap();
    drop(UnixListener::bind(plugins.join("ended.sock")).unwrap());
    std::fs::write(plugins.join("DEPRECATION"), "").unwrap();

    let daemon = Daemon::on(root.path());

    assert!(!plugins.join("live.sock").exists());
    assert!(!plugins.join("ended.sock").exists());
    assert!(plugins.join("DEPRECATION").exists());
    let _new = UnixListener::bind(plugins.join("live.sock")).unwrap();
    assert_eq!(daemon.stop(), Some(0));
    assert!(plugins.join("live.sock").exists());
}

#[test]
fn sigint_stops_it_too() {
    let root = root();
    let mut daemon = Daemon::on(root.path());
    daemon.signal("-INT");
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
}

#[test]
fn systemd_is_told_when_it_is_ready_and_when_it_stops() {
    let root = root();
    let socket = root.path().join("notify");
    let notify = UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(devlet_testkit::PATIENCE)).unwrap();
    let mut command = devlet();
    command
        .env("NOTIFY_SOCKET", &socket)
        .arg("serve")
        .arg("--root-dir")
        .arg(root.path());
    let daemon = Daemon::started(command, root.path());
    let mut buffer = [0; 256];
    let mut next = || {
        let length = notify.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };

    assert_eq!(next(), "READY=1");
    daemon.signal("-TERM");
    assert_eq!(next(), "STOPPING=1");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn the_sample_needs_neither_root_nor_hardware() {
    let mut command = devlet();
    command.args(["serve", "--sample"]).stderr(Stdio::piped());
    let mut daemon = Daemon::started(command, Path::new("/"));
    let line = daemon
        .banner
        .lines()
        .find(|line| line.contains("export DEVLET_ROOT="))
        .unwrap();
    daemon.root = line.split_once('=').unwrap().1.into();
    assert!(
        daemon
            .banner
            .contains("admit --name job1 --limit sample.devlet.dev/widget=2"),
        "{}",
        daemon.banner
    );

    let pod = daemon.json(&["admit", "--name", "job1", "--limit", "sample.devlet.dev/widget=2"]);

    let container = &pod["containers"][0];
    assert_eq!(container["envs"]["SAMPLE_WIDGETS"], "widget-0,widget-1");
    assert_eq!(container["deviceNodes"][1]["containerPath"], "/dev/widget-1");
    let devices = items(&daemon.json(&["get", "devices"]));
    assert_eq!(devices.len(), 8);
    let root = daemon.root.clone();
    assert_eq!(daemon.stop(), Some(0));
    assert!(!root.exists(), "the fresh directory stays behind");
}

#[test]
fn health_readiness_and_metrics_are_served() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let script = Script::new(
        root.path(),
        "acme.com/gpu",
        vec![Device::new("a"), Device::new("b")],
    );
    let _plugin = Plugin::registered(&script);
    daemon.until_capacity("acme.com/gpu", 2);
    daemon.admit("job1", "acme.com/gpu=1");

    assert!(http_get(&address, "/healthz").starts_with("HTTP/1.1 200"));
    assert!(http_get(&address, "/readyz").ends_with("\r\n\r\nok"));
    let verbose = http_get(&address, "/readyz?verbose");
    for check in [
        "[+]running ok",
        "[+]listening ok",
        "[+]store ok",
        "[+]state ok",
        "readyz check passed",
    ] {
        assert!(verbose.contains(check), "{verbose}");
    }
    let metrics = http_get(&address, "/metrics");
    for line in [
        r#"kubelet_device_plugin_registration_total{resource_name="acme.com/gpu"} 1"#,
        r#"kubelet_device_plugin_alloc_duration_seconds_count{resource_name="acme.com/gpu"} 1"#,
        r#"devlet_resource_capacity{resource_name="acme.com/gpu"} 2"#,
        r#"devlet_resource_held{resource_name="acme.com/gpu"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    assert!(http_get(&address, "/nothing").starts_with("HTTP/1.1 404"));
}

/// Puts a socket of our own in the place of one of the daemon's, without a moment in which there is none.
fn take_place(socket: &Path) -> UnixListener {
    let aside = socket.with_extension("aside");
    let ours = UnixListener::bind(&aside).unwrap();
    std::fs::rename(&aside, socket).unwrap();
    ours
}

/// Waits until `/readyz` says this.
fn until_ready(address: &str, status: &str) -> String {
    until(status, || {
        let answer = http_get(address, "/readyz?verbose");
        answer
            .starts_with(&format!("HTTP/1.1 {status}"))
            .then_some(answer)
    })
}

#[test]
fn a_socket_for_plugins_that_is_taken_away_is_missed_and_made_again() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let script = |resource: &str| Script::new(root.path(), resource, vec![Device::new("a")]);
    let mut before = Plugin::registered(&script("acme.com/gpu"));
    daemon.until_capacity("acme.com/gpu", 1);
    let socket = root.path().join("device-plugins/kubelet.sock");

    let other = take_place(&socket);

    let unready = until_ready(&address, "503");
    assert!(unready.contains("[-]listening failed: the socket "), "{unready}");
    let status = daemon.run(&["status"]);
    assert_eq!(status.status.code(), Some(1));
    for said in [unready, stdout(&status)] {
        assert!(said.contains(socket.to_str().unwrap()), "{said}");
    }
    // Another's live socket stays, and is named as what is in the way.
    let blamed = until("the other process is named", || {
        let answer = http_get(&address, "/readyz?verbose");
        answer
            .contains(&format!("pid {}", std::process::id()))
            .then_some(answer)
    });
    assert!(blamed.starts_with("HTTP/1.1 503"), "{blamed}");
    assert!(stdout(&daemon.run(&["status"])).contains(&format!("pid {}", std::process::id())));
    // Who is connected goes on.
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["a"]);
    before.called("Allocate");

    drop(other);
    until_ready(&address, "200");
    assert_eq!(mode(&socket), 0o660);
    assert!(daemon.run(&["status"]).status.success());
    let _after = Plugin::registered(&script("acme.com/nic"));
    daemon.until_capacity("acme.com/nic", 1);

    // With nothing in its place.
    std::fs::remove_file(&socket).unwrap();
    until("the socket is back", || socket.exists().then_some(()));
    let _third = Plugin::registered(&script("acme.com/fpga"));
    daemon.until_capacity("acme.com/fpga", 1);

    // Nor its directory.
    let directory = socket.parent().unwrap();
    std::fs::remove_dir_all(directory).unwrap();
    until("the socket is back", || socket.exists().then_some(()));
    assert_eq!(mode(directory), 0o750);
    let _fourth = Plugin::registered(&script("acme.com/vpu"));
    daemon.until_capacity("acme.com/vpu", 1);
    assert_eq!(daemon.stop(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn the_socket_of_the_api_is_made_again_too_and_who_is_connected_stays() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let mut watch = daemon.command(&["get", "resources", "--watch", "-o", "json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    let socket = root.path().join("devlet/devlet.sock");

    let other = take_place(&socket);
    let unready = until_ready(&address, "503");
    assert!(unready.contains(socket.to_str().unwrap()), "{unready}");
    let _plugin = Plugin::registered(&Script::new(root.path(), "acme.com/gpu", vec![Device::new("a")]));
    let line = lines.next().unwrap().unwrap();
    assert!(line.contains("acme.com/gpu"), "{line}");

    drop(other);
    until_ready(&address, "200");
    assert!(daemon.run(&["status"]).status.success());
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn state_that_cannot_be_read_makes_it_unready_until_an_operator_decides() {
    let root = root();
    std::fs::create_dir(root.path().join("device-plugins")).unwrap();
    let file = root.path().join("device-plugins/kubelet_internal_checkpoint");
    std::fs::write(&file, "{ broken").unwrap();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let unready = http_get(&address, "/readyz");
    assert!(
        unready.starts_with("HTTP/1.1 503") && unready.contains("[-]state failed: "),
        "{unready}"
    );
}

#[test]
fn the_log_is_json_if_wanted() {
    let root = root();
    let mut command = devlet();
    command
        .args(["serve", "--log", "json", "--root-dir"])
        .arg(root.path())
        .stderr(Stdio::piped());
    let mut daemon = Daemon::started(command, root.path());
    let log = daemon.child.stderr.take().unwrap();
    assert_eq!(daemon.stop(), Some(0));
    let log = std::io::read_to_string(log).unwrap();
    assert!(log.lines().count() >= 2, "{log}");
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line["message"].is_string() && line["level"].is_string(), "{line}");
    }
}

#[test]
fn a_configuration_with_an_unknown_key_is_refused_with_a_hint() {
    let root = root();
    let file = root.path().join("devlet.yaml");
    std::fs::write(&file, "deadlines:\n  alocate: 5s\n").unwrap();
    let refused = devlet().args(["serve", "--config"]).arg(&file).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let said = stderr(&refused);
    assert!(
        said.contains("did you mean allocate?") && said.contains("line 2"),
        "{said}"
    );
}

#[test]
fn a_stop_without_a_place_for_the_database_is_an_error_that_says_what_to_do() {
    let root = root();
    let (daemon, log) = Daemon::logged(root.path(), &[]);
    let _plugin = Plugin::registered(&Script::new(root.path(), "acme.com/gpu", vec![Device::new("a")]));
    daemon.until_capacity("acme.com/gpu", 1);
    daemon.admit("kept", "acme.com/gpu=1");
    let database = root.path().join("devlet/state.redb");
    std::fs::remove_file(&database).unwrap();
    std::fs::create_dir(&database).unwrap();

    assert_eq!(daemon.stop(), Some(2));
    let said = log.until(&["stopped without a database"]);
    assert!(
        said.contains("another file is in its place; move that away"),
        "{said}"
    );
    let saved = said.split("what was answered is in ").nth(1).unwrap();
    let saved = saved.split(": move it there, too").next().unwrap();
    std::fs::remove_dir(&database).unwrap();
    std::fs::rename(saved, &database).unwrap();
    let daemon = Daemon::on(root.path());
    let pods = daemon.json(&["get", "pods"]);
    assert_eq!(items(&pods).len(), 1, "{pods}");
}

#[test]
fn the_configuration_that_is_printed_is_the_one_that_is_read() {
    let root = root();
    let file = root.path().join("devlet.yaml");
    let defaults = devlet().args(["config", "print", "--defaults"]).output().unwrap();
    assert!(
        stdout(&defaults).contains("# How long plugins may take."),
        "{}",
        stdout(&defaults)
    );
    std::fs::write(&file, stdout(&defaults).replace("wait: 1m", "wait: 5s")).unwrap();
    let print = |path: &Path| {
        devlet()
            .args(["config", "print", "--config"])
            .arg(path)
            .output()
            .unwrap()
    };
    let once = stdout(&print(&file));
    assert!(once.contains("wait: 5s"), "{once}");
    std::fs::write(&file, &once).unwrap();
    assert_eq!(stdout(&print(&file)), once);
}
