//! A disk that fills up under the daemon, on the built binary.
//!
//! The disk is a small one in memory, in a mount namespace of the test's own: the test runs itself again in there.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, ChildStderr, Command};
use std::time::{Duration, Instant};

use common::{Daemon, http_get, items, not_tested, root, stderr, stdout, until};
use devlet_testkit::{Device, Fault, Plugin, Script};

devlet_testkit::plugin_process!();

const INSIDE: &str = "DEVLET_TEST_DISK";
const GPU: &str = "acme.com/gpu";

/// Runs a test of this file on a disk of its own; true if this is that run.
fn on_a_small_disk(test: &str, root: &Path) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"])
            .arg(root)
            .output()
            .unwrap();
        assert!(mounted.status.success(), "{}", stderr(&mounted));
        return true;
    }
    // Who is not root is root in a namespace of users, where the system allows that.
    let is_root = std::fs::metadata(root).unwrap().uid() == 0;
    let namespaces = if is_root { "-m" } else { "-rm" };
    let inside = Command::new("unshare")
        .arg(namespaces)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    assert!(
        inside.status.success() && stdout(&inside).contains("1 passed"),
        "{}{}",
        stdout(&inside),
        stderr(&inside)
    );
    false
}

/// Takes all the space that is left.
fn fill(file: &Path) {
    let mut file = std::fs::File::create(file).unwrap();
    for size in [1 << 20, 4096, 1] {
        while file.write(&vec![1; size]).is_ok_and(|written| written > 0) {}
    }
}

#[test]
fn a_full_disk_refuses_new_pods_touches_no_others_and_heals() {
    let root = root();
    if !on_a_small_disk(
        "a_full_disk_refuses_new_pods_touches_no_others_and_heals",
        root.path(),
    ) {
        return;
    }
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let devices = (0..2000)
        .map(|number| Device::new(&format!("gpu{number}")))
        .collect();
    let script = Script::new(root.path(), GPU, devices);
    let script = script.with_fault("Allocate", Fault::LargeEnv(30_000));
    let plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2000);
    let held = daemon.admit("before", "acme.com/gpu=1");

    fill(&root.path().join("filler"));
    // The write-ahead log has room for some more.
    let mut number = 0;
    let refused = until("a refusal", || {
        number += 1;
        let refused = daemon.run(&[
            "admit",
            "--name",
            &format!("job{number}"),
            "--limit",
            "acme.com/gpu=1",
        ]);
        (!refused.status.success()).then(|| stderr(&refused))
    });

    assert!(refused.contains("No space left on device"), "{refused}");
    let unready = http_get(&address, "/readyz?verbose");
    assert!(unready.starts_with("HTTP/1.1 503"), "{unready}");
    assert!(
        unready.contains("[-]store failed: ") && unready.contains("No space left"),
        "{unready}"
    );
    let status = daemon.run(&["status"]);
    assert_eq!(status.status.code(), Some(1));
    assert!(stdout(&status).contains("No space left"), "{}", stdout(&status));
    // Who has devices keeps them and can be started.
    assert_eq!(daemon.admit("before", "acme.com/gpu=1"), held);
    assert!(daemon.run(&["options", "before"]).status.success());
    let pods = items(&daemon.json(&["get", "pods"])).len();
    assert_eq!(pods, number, "the refused pod is on record, or another is not");

    // A restart finds out before it calls a plugin.
    daemon.kill();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    assert!(daemon.banner.contains("No space left"), "{}", daemon.banner);
    let unready = http_get(&address, "/readyz?verbose");
    assert!(
        unready.starts_with("HTTP/1.1 503") && unready.contains("No space left"),
        "{unready}"
    );
    drop(plugin);
    let mut plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2000);
    let refused = daemon.refused(&["admit", "--name", "early", "--limit", "acme.com/gpu=1"]);
    assert!(refused.contains("No space left on device"), "{refused}");
    assert!(!plugin.was_called("Allocate"));
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), pods);

    std::fs::remove_file(root.path().join("filler")).unwrap();
    until("it heals", || {
        http_get(&address, "/readyz")
            .starts_with("HTTP/1.1 200")
            .then_some(())
    });
    daemon.admit("after", "acme.com/gpu=1");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_full_disk_after_a_reboot_is_no_reason_not_to_start() {
    let root = root();
    if !on_a_small_disk(
        "a_full_disk_after_a_reboot_is_no_reason_not_to_start",
        root.path(),
    ) {
        return;
    }
    let daemon = Daemon::with(root.path(), &[]);
    let devices = (0..2000)
        .map(|number| Device::new(&format!("gpu{number}")))
        .collect();
    let script = Script::new(root.path(), GPU, devices);
    let plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2000);
    daemon.admit("before", "acme.com/gpu=1900");
    assert_eq!(daemon.stop(), Some(0));
    drop(plugin);
    let boot_id = root.path().join("boot_id");
    std::fs::write(&boot_id, "00000000-0000-4000-8000-000000000000\n").unwrap();
    let mounted = Command::new("mount")
        .arg("--bind")
        .args([&boot_id, Path::new("/proc/sys/kernel/random/boot_id")])
        .output()
        .unwrap();
    assert!(mounted.status.success(), "{}", stderr(&mounted));
    fill(&root.path().join("filler"));

    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);

    // The change of the pod fits into the write-ahead log.
    let ready = http_get(&daemon.http(), "/readyz?verbose");
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 1);
    assert!(daemon.run(&["options", "before"]).status.success());
    let _plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2000);
    daemon.admit("new", "acme.com/gpu=1");
    daemon.kill();

    let (daemon, log) = Daemon::logged(root.path(), &[]);
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 2);
    // There is no space for the kubelet's files.
    assert_eq!(daemon.stop(), Some(2));
    let error = log.until(&["error: stopped"]);
    assert!(
        error.contains("a kubelet must not take over") && error.contains("No space left"),
        "{error}"
    );
}

/// Delays every sync and every removal of a file by a process by two minutes, from when this returns until it is dropped.
struct HungDisk {
    strace: Child,
    /// Kept open: strace reports each new thread.
    _messages: BufReader<ChildStderr>,
}

impl HungDisk {
    /// `None` where processes cannot be traced.
    fn of(daemon: &Daemon) -> Option<Self> {
        let mut strace = Command::new("strace")
            .args(["-f", "-o", "/dev/null", "-e", "trace=fdatasync,fsync,unlinkat"])
            .args(["-e", "inject=fdatasync,fsync,unlinkat:delay_enter=120000000"])
            .args(["-p", &daemon.child.id().to_string()])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .ok()?;
        let mut line = String::new();
        let mut messages = BufReader::new(strace.stderr.take().unwrap());
        let read = messages.read_line(&mut line);
        (read.is_ok() && line.contains("attached")).then_some(Self {
            strace,
            _messages: messages,
        })
    }
}

impl Drop for HungDisk {
    fn drop(&mut self) {
        let _ = self.strace.kill();
        let _ = self.strace.wait();
    }
}

#[test]
fn a_disk_that_hangs_keeps_neither_a_caller_nor_a_stop() {
    let root = root();
    let (mut daemon, log) = Daemon::logged(root.path(), &["--http", "127.0.0.1:0"]);
    let address = daemon.http();
    let script = Script::new(root.path(), GPU, vec![Device::new("gpu0"), Device::new("gpu1")]);
    let _plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2);
    daemon.admit("before", "acme.com/gpu=1");
    let Some(hung) = HungDisk::of(&daemon) else {
        return not_tested("strace cannot attach to the daemon");
    };

    let started = Instant::now();
    let admit = [
        "admit",
        "--name",
        "job",
        "--limit",
        "acme.com/gpu=1",
        "--wait",
        "2s",
    ];
    let refused = daemon.refused(&admit);
    assert!(
        refused.contains("the change may still be written; try again"),
        "{refused}"
    );
    let remove = ["remove", "before", "--wait", "2s"];
    let refused = daemon.refused(&remove);
    assert!(
        refused.contains("the change may still be written; try again"),
        "{refused}"
    );
    // Twice two seconds, and time for two processes.
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "{:?}",
        started.elapsed()
    );

    let started = Instant::now();
    daemon.signal("-TERM");
    log.until(&["stopping"]);
    let healthy = http_get(&address, "/healthz");
    assert!(healthy.starts_with("HTTP/1.1 200"), "{healthy}");
    let unready = http_get(&address, "/readyz?verbose");
    assert!(
        unready.starts_with("HTTP/1.1 503") && unready.contains("[-]running failed: devlet is stopping"),
        "{unready}"
    );
    log.until(&["socket not removed yet: the disk does not answer"]);
    let error = log.until(&["error: "]);
    let took = started.elapsed();
    assert!(took < Duration::from_secs(18), "{took:?}");
    assert!(error.contains("the disk has not answered"), "{error}");
    // A thread that is traced ends with its tracer.
    drop(hung);
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
}

#[test]
fn a_second_signal_ends_a_stop_that_waits_for_a_disk() {
    let root = root();
    let (mut daemon, log) = Daemon::logged(root.path(), &[]);
    let Some(hung) = HungDisk::of(&daemon) else {
        return not_tested("strace cannot attach to the daemon");
    };

    daemon.signal("-TERM");
    // Waits for the removal of the socket. Signals in the first second count as the same signal.
    log.until(&["socket not removed yet: the disk does not answer"]);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(2) {
        daemon.signal("-TERM");
    }

    log.until(&["error: stopped by a second signal (SIGTERM)"]);
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    drop(hung);
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
}
