//! A disk that fills up under the daemon, on the built binary.
//!
//! The disk is a small one in memory, in a mount namespace of the test's own: the test runs itself again in there.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use common::{Daemon, http_get, items, root, stderr, stdout, until};
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
    let _plugin = Plugin::registered(&script.with_fault("Allocate", Fault::LargeEnv(30_000)));
    daemon.until_capacity(GPU, 2000);
    let held = daemon.admit("before", "acme.com/gpu=1");

    fill(&root.path().join("filler"));
    // There is room in the journal for some more.
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

    // What is to be noted of the pod has its place in the journal.
    let ready = http_get(&daemon.http(), "/readyz?verbose");
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 1);
    assert!(daemon.run(&["options", "before"]).status.success());
    let _plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 2000);
    daemon.admit("new", "acme.com/gpu=1");
    daemon.kill();

    let daemon = Daemon::with(root.path(), &[]);
    assert_eq!(items(&daemon.json(&["get", "pods"])).len(), 2);
    assert_eq!(daemon.stop(), Some(0));
}
