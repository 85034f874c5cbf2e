//! The systemd unit: systemd accepts it, and its command starts a daemon.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

use devlet_testkit::skip;

use crate::common::{Daemon, devlet, root, stderr};

const PROGRAM: &str = "/usr/bin/devlet";
const CONFIG: &str = "/etc/devlet.yaml";

fn unit() -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::read_to_string(repository.join("packaging/systemd/devlet.service")).unwrap()
}

#[test]
fn the_command_of_the_unit_starts_a_daemon_that_notifies() {
    let unit = unit();
    assert!(unit.contains("\nType=notify\n"), "{unit}");
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="))
        .unwrap();
    let mut words = line.split(' ');
    assert_eq!(words.next(), Some(PROGRAM));
    let root = root();
    let config = root.path().join("devlet.yaml");
    // The documentation tells operators to put this there.
    let defaults = devlet().args(["config", "print", "--defaults"]).output().unwrap();
    std::fs::write(&config, &defaults.stdout).unwrap();
    let socket = root.path().join("notify");
    let notify = UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(devlet_testkit::PATIENCE)).unwrap();
    let mut command = devlet();
    command.env("NOTIFY_SOCKET", &socket);
    for word in words {
        command.arg(if word == CONFIG {
            config.as_os_str()
        } else {
            word.as_ref()
        });
    }
    command.arg("--root-dir").arg(root.path());

    let daemon = Daemon::started(command, root.path());

    let mut buffer = [0; 64];
    let length = notify.recv(&mut buffer).unwrap();
    assert_eq!(buffer[..length].trim_ascii(), b"READY=1");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("systemd-analyze is not installed");
    }
    let root = root();
    let file = root.path().join("devlet.service");
    std::fs::write(&file, unit().replace(PROGRAM, env!("CARGO_BIN_EXE_devlet"))).unwrap();
    let verified = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&file)
        .output()
        .unwrap();
    assert!(verified.status.success(), "{}", stderr(&verified));
    assert_eq!(stderr(&verified), "");
}
