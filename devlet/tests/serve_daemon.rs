//! `devlet serve` on the built binary: start, refusals, stop, what it says.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Daemon, devlet, http_get, items, root, stderr, stdout, until};
use devlet_testkit::{Device, DriverScript, Fault, PATIENCE, Plugin, Script};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

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
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
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
    // Those of the sample plugin, and of the sample driver.
    assert_eq!(devices.len(), 8 + 4);
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

/// The writing end of a pipe that is full, and its reading end.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'\n'; 4096]).is_ok() {}
    while writer.write(b"\n").is_ok() {}
    fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

#[test]
fn full_pipes_as_standard_error_and_output_stop_neither_the_daemon_nor_its_end() {
    let root = root();
    let ((log, stderr), (banner, stdout)) = (full_pipe(), full_pipe());
    let mut command = devlet();
    command.args(["serve", "--log-level", "debug", "--root-dir"]);
    command.arg(root.path()).stdout(stdout).stderr(stderr);
    let mut daemon = Running(command.spawn().unwrap());
    // The command has descriptors of its own, which would keep the pipes open.
    drop(command);
    until("an answer", || {
        let mut status = devlet();
        status.env("DEVLET_ROOT", root.path()).arg("status");
        status.output().unwrap().status.success().then_some(())
    });
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended = until("its end", || daemon.0.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
    drop((log, banner));
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_mistyped_log_level_is_refused_with_the_near_match() {
    let root = root();
    let file = root.path().join("devlet.yaml");
    std::fs::write(&file, "logLevel: wran\n").unwrap();
    let mut by_flag = devlet();
    by_flag
        .args(["serve", "--log-level", "wran", "--root-dir"])
        .arg(root.path());
    let mut by_file = devlet();
    by_file
        .args(["serve", "--config"])
        .arg(&file)
        .arg("--root-dir")
        .arg(root.path());
    for mut command in [by_flag, by_file] {
        let refused = command.output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        let said = stderr(&refused);
        assert!(said.contains("did you mean warn?"), "{said}");
    }
}

#[test]
fn the_root_directory_is_that_of_the_environment_unless_a_flag_names_one() {
    let (by_flag, by_environment, by_file) = (root(), root(), root());
    let file = by_file.path().join("devlet.yaml");
    std::fs::write(&file, format!("rootDir: {}\n", by_file.path().display())).unwrap();
    let mut command = devlet();
    command
        .env("DEVLET_ROOT", by_environment.path())
        .args(["serve", "--config"])
        .arg(&file);
    drop(Daemon::started(&mut command, by_environment.path()));
    assert!(by_environment.path().join("devlet/devlet.sock").exists());
    command.arg("--root-dir").arg(by_flag.path());
    drop(Daemon::started(&mut command, by_flag.path()));
    assert!(by_flag.path().join("devlet/devlet.sock").exists());
    assert!(!by_file.path().join("devlet").exists());
}

#[test]
fn deadlines_beyond_any_clock_are_capped() {
    let root = root();
    let longest = "18446744073709551615";
    let deadlines = [
        "dial",
        "options",
        "preferred",
        "allocate",
        "preStart",
        "prepare",
        "info",
        "notify",
    ];
    let deadlines: String = deadlines
        .iter()
        .map(|key| format!("  {key}: {longest}\n"))
        .collect();
    let daemon = Daemon::configured(root.path(), &format!("wait: {longest}\ndeadlines:\n{deadlines}"));
    let _plugin = Plugin::registered(&Script::new(root.path(), "acme.com/gpu", vec![Device::new("a")]));
    daemon.until_capacity("acme.com/gpu", 1);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["a"]);
    let _driver = Plugin::registered_driver(&DriverScript::new(root.path(), "gpu.acme.com"));
    daemon.until("drivers", |list| items(list).len() == 1);
    let removed = daemon.run(&["remove", "job1", "--wait", longest]);
    assert!(removed.status.success(), "{}", stderr(&removed));
}

#[test]
fn slow_http_connections_are_closed_and_limited() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id()))
            .unwrap()
            .count()
    };
    let before = descriptors();
    let slow: Vec<TcpStream> = (0..500)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ").unwrap();
            stream
        })
        .collect();
    // It is behind all of them.
    assert!(http_get(&address, "/healthz").starts_with("HTTP/1.1 200"));
    let now = descriptors();
    assert!(now < before + 80, "{before}, then {now}");
    assert!(daemon.run(&["status"]).status.success());
    // The last one is not pushed out by others: it has had its time.
    let mut last = slow.last().unwrap();
    last.set_read_timeout(Some(PATIENCE)).unwrap();
    let ended = last.read_to_end(&mut Vec::new());
    let is_timeout = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    assert!(
        !ended.is_err_and(|error| is_timeout(&error)),
        "the connection stays open"
    );
    until("the end of all", || (descriptors() <= before).then_some(()));
}

#[test]
fn logs_name_pods_with_their_devices_and_debug_shows_calls_on_plugins() {
    let root = root();
    let (daemon, log) = Daemon::logged(root.path(), &["--log-level", "debug"]);
    let _plugin = Plugin::registered(&Script::new(root.path(), "acme.com/gpu", vec![Device::new("a")]));
    daemon.until_capacity("acme.com/gpu", 1);
    daemon.admit("k1", "acme.com/gpu=1");
    let pod = daemon.json(&["describe", "pod", "k1"]);
    let named = format!("pod=default/k1 uid={}", pod["uid"].as_str().unwrap());
    assert!(daemon.run(&["remove", "k1"]).status.success());
    assert_eq!(daemon.stop(), Some(0));
    let lines = log.rest();
    let line = |part: &str| {
        let found = lines.iter().find(|line| line.contains(part));
        found.unwrap_or_else(|| panic!("no {part} in {lines:#?}"))
    };
    let admitted = line("pod admitted");
    assert!(
        admitted.contains(&named) && admitted.contains("devices=acme.com/gpu=a"),
        "{admitted}"
    );
    assert!(line("pod removed").contains(&named));
    let call = line("method=\"Allocate\"");
    assert!(
        call.contains("DEBUG") && call.contains("took=") && call.contains("outcome=Ok"),
        "{call}"
    );
    let foreign = lines
        .iter()
        .find(|line| line.contains("Frame") || line.contains("h2::"));
    assert_eq!(foreign, None);
}

#[test]
fn http_is_served_on_a_name_and_on_a_port_alone() {
    for address in ["localhost:0", ":0"] {
        let root = root();
        let daemon = Daemon::with(root.path(), &["--http", address]);
        let port = daemon.http().rsplit_once(':').unwrap().1.to_owned();
        assert!(http_get(&format!("127.0.0.1:{port}"), "/healthz").starts_with("HTTP/1.1 200"));
    }
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
fn texts_of_peers_cannot_forge_lines_of_the_log() {
    const FORGED: &str = "busy\n2026-01-01T00:00:00Z ERROR forged\r\u{1b}[31m\u{9b}31m\u{2028}";
    let refusal = Fault::Refuse {
        code: 9,
        message: FORGED.into(),
    };
    for format in ["text", "json"] {
        let root = root();
        let (daemon, log) = Daemon::logged(root.path(), &["--log", format]);
        let script = DriverScript::new(root.path(), "gpu.acme.com").with_fault("GetInfo", refusal.clone());
        let _driver = Plugin::driver(&script);
        let line = log.until(&["busy", "forged"]);
        let harmless = |line: &str| !line.chars().any(|each| each.is_control() || each == '\u{2028}');
        assert!(
            line.contains("busy") && line.contains("forged") && harmless(&line),
            "{line:?}"
        );
        if format == "json" {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert!(line["error"].as_str().unwrap().contains(FORGED), "{line}");
        }
        // So it is with the names of sockets.
        let socket = root.path().join("plugins_registry/x\nERROR forged\u{1b}.sock");
        drop(UnixListener::bind(socket).unwrap());
        let line = log.until(&["x\\n", "ERROR forged"]);
        assert!(line.contains("ERROR forged") && harmless(&line), "{line:?}");
        assert_eq!(daemon.stop(), Some(0));
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
    let place = format!(
        "error: {}:2:3: unknown key alocate; did you mean allocate?",
        file.display()
    );
    assert!(said.starts_with(&place), "{said}");
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
        stdout(&defaults).contains("# Timeouts of calls to plugins and drivers."),
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

/// A daemon that was started with SIGHUP handled like this, an option of `env`.
fn with_hangup(root: &Path, option: &str) -> Daemon {
    let mut command = Command::new("env");
    command.args([option, env!("CARGO_BIN_EXE_devlet"), "serve", "--root-dir"]);
    Daemon::started(command.arg(root), root)
}

#[test]
fn a_hangup_stops_the_daemon_cleanly() {
    let root = root();
    let mut daemon = with_hangup(root.path(), "--default-signal=HUP");
    daemon.signal("-HUP");
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
    let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
    assert!(mirror.exists(), "the state was not handed over");
}

#[test]
fn a_hangup_that_was_ignored_at_the_start_stays_ignored() {
    let root = root();
    let daemon = with_hangup(root.path(), "--ignore-signal=HUP");
    daemon.signal("-HUP");
    assert!(daemon.run(&["get", "pods"]).status.success());
    assert_eq!(daemon.stop(), Some(0));
}

/// A daemon with a plugin of 4 devices, and pod `held`, which has one of them. The mirror says so.
fn daemon_with_a_pod(root: &Path) -> (Daemon, Plugin) {
    let daemon = Daemon::on(root);
    let devices = (0..4)
        .map(|number| Device::new(&format!("gpu{number}")))
        .collect();
    let plugin = Plugin::registered(&Script::new(root, "acme.com/gpu", devices));
    daemon.until_capacity("acme.com/gpu", 4);
    daemon.admit("held", "acme.com/gpu=1");
    (daemon, plugin)
}

/// The file that an operator has to decide about, as `status` and a refused admission name it.
fn to_decide(daemon: &Daemon) -> String {
    let refused = daemon.refused(&["admit", "--name", "new", "--limit", "acme.com/gpu=1"]);
    assert!(
        refused.contains("devlet import ") && refused.contains("devlet forget "),
        "{refused}"
    );
    let status = daemon.run(&["status"]);
    assert_eq!(status.status.code(), Some(1));
    let status = daemon.run(&["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let problems = status["problems"].as_array().unwrap();
    let blocking = problems.iter().find(|problem| problem["blocking"] == true);
    let hint = blocking.unwrap()["hint"].as_str().unwrap();
    let file = hint.split("devlet forget ").nth(1).unwrap();
    file.split([' ', ';']).next().unwrap().to_owned()
}

#[test]
fn a_database_that_is_gone_is_no_first_start() {
    for with_mirror in [true, false] {
        let root = root();
        let (daemon, _plugin) = daemon_with_a_pod(root.path());
        daemon.admit("since", "acme.com/gpu=1");
        daemon.kill();
        std::fs::remove_file(root.path().join("devlet/state.redb")).unwrap();
        let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
        if !with_mirror {
            // It may not have been written yet.
            let _ = std::fs::remove_file(&mirror);
        }

        let (daemon, log) = Daemon::logged(root.path(), &["--http", "127.0.0.1:0"]);

        log.until(&["is lost"]);
        let unready = http_get(&daemon.http(), "/readyz");
        assert!(unready.starts_with("HTTP/1.1 503"), "{unready}");
        let file = to_decide(&daemon);
        assert_eq!(Path::new(&file), root.path().join("devlet/state.redb"));
        assert!(daemon.run(&["forget", &file]).status.success());
        assert!(daemon.run(&["status"]).status.success());
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn import_and_forget_say_what_still_blocks() {
    let theirs = include_bytes!("../../crates/kubelet-files/testdata/deviceplugin/v2-one-pod.json");
    for choice in ["forget", "import"] {
        let root = root();
        let (daemon, _plugin) = daemon_with_a_pod(root.path());
        assert_eq!(daemon.stop(), Some(0));
        let database = root.path().join("devlet/state.redb");
        std::fs::remove_file(&database).unwrap();
        let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
        std::fs::write(&mirror, "broken").unwrap();
        let sound = root.path().join("sound");
        std::fs::write(&sound, theirs).unwrap();
        let daemon = Daemon::on(root.path());
        let status = stdout(&daemon.run(&["status", "-o", "json"]));
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let blocking = |problem: &&serde_json::Value| problem["blocking"] == true;
        let blocking = status["problems"].as_array().unwrap().iter().filter(blocking);
        assert_eq!(blocking.count(), 2, "{status}");
        let run = |args: &[&str]| {
            let done = daemon.run(args);
            assert!(done.status.success(), "{args:?}: {}", stderr(&done));
            stdout(&done)
        };
        let is_admitted = || daemon.run(&["status"]).status.success();

        // An import ends the reason of the file, and that of the database only with a file about claims.
        let (said, last) = match choice {
            "import" => {
                let said = run(&["import", sound.to_str().unwrap()]);
                (said, database.to_str().unwrap().to_owned())
            }
            _ => {
                let said = run(&["forget", database.to_str().unwrap()]);
                (said, to_decide(&daemon))
            }
        };

        let expected = format!("pods are still not admitted because of {last}: see devlet status\n");
        assert!(said.ends_with(&expected) && !is_admitted(), "{choice}: {said}");
        assert_eq!(run(&["forget", &last]), "forgotten: pods are admitted again\n");
        assert!(is_admitted());
    }
}

#[test]
fn a_database_behind_a_link_is_back_after_its_disk_is_mounted() {
    let root = root();
    let (disk, database) = (root.path().join("disk"), root.path().join("devlet/state.redb"));
    let (daemon, _plugin) = daemon_with_a_pod(root.path());
    assert_eq!(daemon.stop(), Some(0));
    std::fs::create_dir(&disk).unwrap();
    std::fs::rename(&database, disk.join("state.redb")).unwrap();
    std::os::unix::fs::symlink(disk.join("state.redb"), &database).unwrap();
    std::fs::rename(&disk, root.path().join("unmounted")).unwrap();
    for _ in 0..2 {
        let daemon = Daemon::on(root.path());
        let status = daemon.run(&["status"]);
        let said = format!(
            "mount the disk that {} points to, and restart devlet",
            database.display()
        );
        assert!(stdout(&status).contains(&said), "{}", stdout(&status));
        daemon.kill();
    }
    std::fs::rename(root.path().join("unmounted"), &disk).unwrap();

    let (daemon, _plugin) = daemon_with_a_pod(root.path());

    assert!(daemon.run(&["status"]).status.success());
    assert!(database.is_symlink());
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn an_older_copy_of_the_database_is_lost_and_gives_no_device_again() {
    let root = root();
    let database = root.path().join("devlet/state.redb");
    let (daemon, _plugin) = daemon_with_a_pod(root.path());
    assert_eq!(daemon.stop(), Some(0));
    let older = std::fs::read(&database).unwrap();
    let (daemon, _plugin) = daemon_with_a_pod(root.path());
    daemon.admit("since", "acme.com/gpu=1");
    daemon.kill();
    let newer = std::fs::read(&database).unwrap();
    std::fs::write(&database, older).unwrap();

    let (daemon, log) = Daemon::logged(root.path(), &[]);

    log.until(&["is lost", "older copy"]);
    let file = to_decide(&daemon);
    assert!(Path::new(&file).is_file(), "{file}");
    assert_eq!(daemon.stop(), Some(0));
    // The database of the last run is right, and so it stays after a kill.
    std::fs::write(&database, newer).unwrap();
    for _ in 0..2 {
        let daemon = Daemon::on(root.path());
        assert!(daemon.json(&["get", "pods"]).to_string().contains("since"));
        daemon.kill();
    }
}

#[test]
fn devices_of_a_damaged_checkpoint_stay_held_until_its_unknown_pod_is_forgotten() {
    let root = root();
    let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
    std::fs::create_dir(mirror.parent().unwrap()).unwrap();
    let whole = include_str!("../../crates/kubelet-files/testdata/deviceplugin/v2-one-pod.json");
    // The UID of the pod is damaged, and the file is cut off behind its entry.
    let uid = "\"5b7c6d3e-0d7e-4a7a-9c0e-3f3a8f1f0001\"";
    let damaged = whole.replace(uid, "7");
    let damaged = damaged.split_once("\"RegisteredDevices\"").unwrap().0;
    std::fs::write(&mirror, damaged).unwrap();
    let daemon = Daemon::on(root.path());
    let aside = to_decide(&daemon);
    let out = root.path().join("repaired");
    let out = out.to_str().unwrap();

    let repaired = daemon.run(&["checkpoint", "repair", &aside, "--out", out]);
    assert_eq!(repaired.status.code(), Some(1), "{}", stdout(&repaired));
    let imported = daemon.run(&["import", out]);
    assert!(imported.status.success(), "{}", stderr(&imported));

    // Parts of the file are lost: an operator decides that no other pod runs.
    assert_eq!(to_decide(&daemon), aside);
    assert!(daemon.run(&["forget", &aside]).status.success());
    let pod = "devlet-unknown-pod-1";
    let status = stdout(&daemon.run(&["status"]));
    assert!(
        status.contains(pod) && status.contains("vendor.com/gpu"),
        "{status}"
    );
    let pods = daemon.json(&["get", "pods"]);
    assert_eq!(items(&pods)[0]["uid"], pod, "{pods}");
    let devices = ["gpu0", "gpu1"].map(Device::new).to_vec();
    let _plugin = Plugin::registered(&Script::new(root.path(), "vendor.com/gpu", devices));
    daemon.until_capacity("vendor.com/gpu", 2);
    let devices = daemon.json(&["get", "devices"]);
    let held = items(&devices).into_iter().find(|device| device["id"] == "gpu0");
    assert!(held.unwrap().to_string().contains(pod), "{devices}");
    assert_eq!(daemon.admit("other", "vendor.com/gpu=1"), ["gpu1"]);
    let admit = ["admit", "--name", "next", "--limit", "vendor.com/gpu=1"];
    let refused = daemon.refused(&admit);
    assert!(refused.contains("vendor.com/gpu"), "{refused}");
    let refused = daemon.refused(&["remove", pod]);
    assert!(
        refused.contains(&format!("devlet forget --pod {pod}")),
        "{refused}"
    );

    let forgotten = daemon.run(&["forget", "--pod", pod]);

    assert!(forgotten.status.success(), "{}", stderr(&forgotten));
    assert_eq!(daemon.admit("next", "vendor.com/gpu=1"), ["gpu0"]);
    assert!(daemon.run(&["status"]).status.success());
}

#[test]
fn a_mirror_that_is_replaced_while_devlet_is_stopped_overrules_nothing() {
    let root = root();
    let (daemon, _plugin) = daemon_with_a_pod(root.path());
    daemon.until("pods", |list| items(list).len() == 1);
    assert_eq!(daemon.stop(), Some(0));
    let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
    let theirs = include_bytes!("../../crates/kubelet-files/testdata/deviceplugin/v2-one-pod.json");
    for choice in ["forget", "import"] {
        std::fs::write(&mirror, theirs).unwrap();
        let daemon = Daemon::on(root.path());
        let file = to_decide(&daemon);
        assert_eq!(
            items(&daemon.json(&["get", "pods"])).len(),
            2,
            "{choice}: both sides"
        );
        // A crash changes nothing.
        daemon.kill();
        let daemon = Daemon::on(root.path());
        assert_eq!(to_decide(&daemon), file);

        let chosen = daemon.run(&[choice, &file]);

        assert!(chosen.status.success(), "{}", stderr(&chosen));
        let pods = daemon.json(&["get", "pods"]);
        assert_eq!(items(&pods).len(), 1, "{choice}: {pods}");
        let is_ours = items(&pods)[0]["name"] == "held";
        assert_eq!(is_ours, choice == "forget", "{pods}");
        assert!(daemon.run(&["status"]).status.success());
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn a_named_pipe_hangs_neither_a_start_nor_a_stop_wherever_it_is() {
    let root = root();
    let (daemon, _plugin) = daemon_with_a_pod(root.path());
    let pipe = |path: &Path| {
        let _ = std::fs::remove_file(path);
        let made = Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    };
    let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
    pipe(&mirror);
    assert_eq!(daemon.stop(), Some(0));
    assert!(mirror.is_file(), "the mirror is written in its place");

    pipe(&mirror);
    pipe(&root.path().join("dra_manager_state"));
    pipe(&root.path().join("devlet/lock"));
    pipe(&root.path().join("devlet/node-id"));
    let daemon = Daemon::on(root.path());
    let status = daemon.run(&["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let problems = status["problems"].as_array().unwrap().iter();
    let unused = problems.filter(|problem| problem["what"].as_str().unwrap().contains("was not used"));
    assert_eq!(unused.count(), 4, "{status}");
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 1);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_mirror_that_is_replaced_on_an_idle_node_is_noticed() {
    let root = root();
    let mirror = root.path().join("device-plugins/kubelet_internal_checkpoint");
    let (daemon, log) = Daemon::logged(root.path(), &[]);
    until("the mirror", || mirror.exists().then_some(()));

    std::fs::write(&mirror, "{}").unwrap();

    log.until(&["kubelet file not updated"]);
    let status = daemon.run(&["status"]);
    assert!(
        stdout(&status).contains("was written by another process"),
        "{}",
        stdout(&status)
    );
}

#[test]
fn directories_and_files_that_others_may_write_are_refused_with_the_command_to_type() {
    let root = root();
    assert_eq!(Daemon::on(root.path()).stop(), Some(0));
    let refusal = || {
        let mut command = devlet();
        command.args(["serve", "--root-dir"]).arg(root.path());
        let refused = command.output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        stderr(&refused)
    };
    for path in [
        "",
        "devlet",
        "devlet/state.redb",
        "devlet/lock",
        "devlet/node-id",
        ".devlet-node-id",
    ] {
        let path = if path.is_empty() {
            root.path().to_owned()
        } else {
            root.path().join(path)
        };
        let before = std::fs::metadata(&path).unwrap().permissions();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        let said = refusal();
        assert!(said.contains(&format!("chmod go-w {}", path.display())), "{said}");
        std::fs::set_permissions(&path, before).unwrap();
    }
    // Plugins of other users put their sockets there.
    let plugins = root.path().join("device-plugins");
    std::fs::set_permissions(&plugins, std::fs::Permissions::from_mode(0o777)).unwrap();
    for mode in [0o755, 0o1777] {
        std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(Daemon::on(root.path()).stop(), Some(0));
    }
}
