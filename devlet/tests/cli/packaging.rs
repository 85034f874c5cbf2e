//! The systemd unit and the manifests for Kubernetes. `interop/kubernetes` tests the latter with an API server and Helm.

use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

use devlet_testkit::skip;
use serde_json::Value;

use crate::common::{Daemon, devlet, root, stderr};

const PROGRAM: &str = "/usr/bin/devlet";
const CONFIG: &str = "/etc/devlet.yaml";

const UNIT: &str = "devlet.service";
const SHIELD: &str = "devlet-shield.service";

fn unit(name: &str) -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::read_to_string(repository.join("packaging/systemd").join(name)).unwrap()
}

/// Returns the arguments of the command of a unit.
fn arguments(unit: &str) -> Vec<&str> {
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let mut words = line.unwrap().split(' ');
    assert_eq!(words.next(), Some(PROGRAM));
    words.collect()
}

#[test]
fn the_command_of_the_unit_starts_a_daemon_that_notifies() {
    let unit = unit(UNIT);
    assert!(unit.contains("\nType=notify\n"), "{unit}");
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
    for word in arguments(&unit) {
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
fn the_unit_of_the_shield_starts_without_any_file_and_after_any_number_of_failures() {
    let unit = unit(SHIELD);
    for line in [
        "Before=kubelet.service",
        "Type=notify",
        "Restart=always",
        "StartLimitIntervalSec=0",
        "OOMScoreAdjust=-999",
    ] {
        assert!(unit.lines().any(|each| each == line), "{line} is not in {unit}");
    }
    for hidden in ["ProtectHome=", "PrivateTmp=", "InaccessiblePaths="] {
        let hides = |line: &str| line.starts_with(hidden);
        assert!(
            !unit.lines().any(hides),
            "plugins mount paths that {hidden} hides"
        );
    }
    let file = unit
        .lines()
        .find_map(|line| line.strip_prefix("EnvironmentFile="));
    assert!(file.unwrap().starts_with('-'), "the file is optional");
    let root = root();
    let kubelet = root.path().join("kubelet");
    std::fs::create_dir(&kubelet).unwrap();
    let mut command = devlet();
    command.args(
        arguments(&unit)
            .into_iter()
            .filter(|word| *word != "$DEVLET_ARGS"),
    );
    command.arg("--kubelet-dir").arg(kubelet);
    command.arg("--root-dir").arg(root.path());

    let daemon = Daemon::started(command, root.path());

    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("systemd-analyze is not installed");
    }
    let root = root();
    for name in [UNIT, SHIELD] {
        let file = root.path().join(name);
        std::fs::write(&file, unit(name).replace(PROGRAM, env!("CARGO_BIN_EXE_devlet"))).unwrap();
        let verified = Command::new("systemd-analyze")
            .arg("verify")
            .arg(&file)
            .output()
            .unwrap();
        assert!(verified.status.success(), "{}", stderr(&verified));
        assert_eq!(stderr(&verified), "");
    }
}

/// The sandbox of the service may leave what devlet needs, and little else.
#[test]
fn the_unit_of_the_host_exposes_little() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("systemd-analyze is not installed");
    }
    let root = root();
    let file = root.path().join(UNIT);
    std::fs::write(&file, unit(UNIT)).unwrap();
    let rated = Command::new("systemd-analyze")
        // In tenths.
        .args(["security", "--offline=true", "--no-pager", "--threshold=40"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        rated.status.success(),
        "{}",
        String::from_utf8_lossy(&rated.stdout)
    );
}

/// A directory of `ReadWritePaths=` that does not exist fails the start.
#[test]
fn the_package_creates_what_the_unit_requires() {
    let unit = unit(UNIT);
    let required = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let created = |kind: &str, file: &str| -> Vec<String> {
        let lines = self::unit(file);
        let words = lines.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words
            .filter(|words| words[0] == kind)
            .map(|words| words[1].to_owned())
            .collect()
    };
    assert_eq!(
        created("d", "devlet.tmpfiles.conf"),
        [required("ReadWritePaths=")]
    );
    assert_eq!(created("g", "devlet.sysusers.conf"), [required("Group=")]);
}

fn kubernetes(file: &str) -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::read_to_string(repository.join("packaging/kubernetes").join(file)).unwrap()
}

/// Returns the objects of a manifest.
fn objects(manifest: &str) -> Vec<Value> {
    let documents = manifest.split("---\n").filter(|text| !text.trim().is_empty());
    documents
        .map(|text| serde_saphyr::from_str(text).unwrap())
        .collect()
}

#[test]
fn the_roles_have_exactly_the_documented_rights() {
    let texts = |list: &Value| -> Vec<String> {
        let list = list.as_array().unwrap().iter();
        list.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let mut granted = BTreeSet::new();
    for role in objects(&kubernetes("rbac.yaml")) {
        for rule in role["rules"].as_array().into_iter().flatten() {
            for resource in texts(&rule["resources"]) {
                let name = role["metadata"]["name"].as_str().unwrap();
                let verbs = texts(&rule["verbs"]).into_iter();
                granted.extend(verbs.map(|verb| (name.to_owned(), resource.clone(), verb)));
            }
        }
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(repository.join("docs/kubernetes.md")).unwrap();
    let (_, table) = text
        .split_once("| role | resource | verbs | for | as a node |\n")
        .unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let mut documented = BTreeSet::new();
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [role, resource] = [cells[1], cells[2]].map(|cell| cell.trim_matches('`').to_owned());
        let verbs = cells[3].split(", ").map(|verb| verb.trim_matches('`').to_owned());
        documented.extend(verbs.map(|verb| (role.clone(), resource.clone(), verb)));
    }
    assert_eq!(granted, documented);
}

#[test]
fn the_configuration_in_the_manifests_is_valid() {
    let root = root();
    let file = root.path().join("devlet.yaml");
    let objects = objects(&kubernetes("devlet.yaml"));
    let configuration = objects[0]["data"]["devlet.yaml"].as_str().unwrap();
    std::fs::write(&file, configuration).unwrap();
    let printed = devlet()
        .args(["config", "print", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(printed.status.success(), "{}", stderr(&printed));
}
