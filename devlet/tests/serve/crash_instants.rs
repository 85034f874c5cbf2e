//! `kill -9` at the moments when a claim could be forgotten: after the restart it is unprepared, unless a pod holds it.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};

use devlet_testkit::{DriverScript, Event, Fault, Plugin, PreparedDevice};
use serde_json::json;

use crate::common::{Daemon, root, stderr};

const DRIVER: &str = "gpu.acme.com";
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

fn driver(root: &std::path::Path) -> Plugin {
    let device = PreparedDevice {
        requests: vec!["req".into()],
        ..PreparedDevice::new("node", "{name}", "acme.com/gpu={name}")
    };
    Plugin::registered_driver(&DriverScript {
        devices: vec![device],
        ..DriverScript::new(root, DRIVER)
    })
}

/// Writes the manifests of a pod and its claim, and returns the arguments that admit it.
fn manifests(daemon: &Daemon, pod: &str, claim: &str) -> Vec<String> {
    let text = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {pod}, uid: uid-{pod}}}
spec:
  resourceClaims: [{{name: mine, resourceClaimName: {claim}}}]
  containers: [{{name: main, resources: {{claims: [{{name: mine}}]}}}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {claim}, uid: uid-{claim}}}
spec: {{devices: {{requests: [{{name: req}}]}}}}
status:
  reservedFor: [{{resource: pods, name: a, uid: uid-a}}, {{resource: pods, name: b, uid: uid-b}}]
  allocation: {{devices: {{results: [{{request: req, driver: {DRIVER}, pool: node, device: {claim}}}]}}}}
"
    );
    let path = daemon.root.join(format!("{pod}.yaml"));
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    vec!["admit".to_owned(), "-f".to_owned(), path]
}

fn admit(daemon: &Daemon, pod: &str, claim: &str) {
    let args = manifests(daemon, pod, claim);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = daemon.run(&args);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Starts a command without waiting for its end.
fn start(daemon: &Daemon, args: &[&str]) -> Child {
    let mut command = daemon.command(args);
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn until_serving(daemon: &Daemon) {
    daemon.until("drivers", |list| {
        list["drivers"][0]["plugins"]
            .as_array()
            .is_some_and(|plugins| plugins.iter().any(|plugin| plugin["serving"] == true))
    });
}

/// Returns the moments of a call to kill the daemon at.
fn instants() -> [Fault; 3] {
    // Before the driver carries the call out, before it answers, and before devlet has stored the answer (mostly).
    [Fault::Hang, Fault::Wait, Fault::KillCaller]
}

/// Kills the daemon when the call has reached the moment of the fault.
fn killed(
    mut daemon: Daemon,
    driver: &mut Plugin,
    (method, claim): (&str, &str),
    fault: &Fault,
    mut caller: Child,
) {
    match fault {
        Fault::Hang => assert_eq!(driver.called(method), [claim]),
        Fault::Wait => assert_eq!(driver.waits(method), [claim]),
        _ => driver.find("a kill", |event| {
            matches!(event, Event::KilledCaller { .. }).then_some(())
        }),
    }
    if !matches!(fault, Fault::KillCaller) {
        let _ = daemon.child.kill();
    }
    daemon.child.wait().unwrap();
    caller.wait().unwrap();
    driver.fault(method, None);
    driver.forget_events();
}

/// Returns the names of the pods.
fn names(daemon: &Daemon) -> Vec<String> {
    let pods = daemon.json(&["get", "pods"]);
    let name = |pod: &serde_json::Value| pod["name"].as_str().unwrap().to_owned();
    crate::common::items(&pods).iter().map(name).collect()
}

fn prepared(uids: &[&str]) -> BTreeSet<String> {
    uids.iter().map(|uid| (*uid).to_owned()).collect()
}

#[test]
fn an_admission_that_is_killed_while_a_driver_is_called_is_undone() {
    for fault in instants() {
        let root = root();
        let daemon = Daemon::on(root.path());
        let mut driver = driver(root.path());
        until_serving(&daemon);
        admit(&daemon, "a", "kept");
        assert_eq!(driver.called(PREPARE), ["uid-kept"]);
        driver.fault(PREPARE, Some(&fault));
        let args = manifests(&daemon, "b", "lost");
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let caller = start(&daemon, &args);
        killed(daemon, &mut driver, (PREPARE, "uid-lost"), &fault, caller);

        let daemon = Daemon::on(root.path());

        if names(&daemon) == ["a", "b"] {
            // The admission was on disk before the kill.
            assert!(matches!(fault, Fault::KillCaller), "{fault:?}");
            assert_eq!(driver.prepared(), prepared(&["uid-kept", "uid-lost"]));
            assert_eq!(daemon.stop(), Some(0));
            continue;
        }
        let (_, claims) = driver.asked(UNPREPARE);
        assert_eq!(claims[0].uid, "uid-lost", "{fault:?}");
        let list = daemon.until("claims", |list| {
            list["claims"].as_array().is_some_and(|all| all.len() == 1)
        });
        assert_eq!(list["claims"][0]["uid"], "uid-kept", "{fault:?}");
        driver.until_prepared(&prepared(&["uid-kept"]));
        assert!(
            !driver.was_called(PREPARE),
            "{fault:?}: what a pod holds is prepared already"
        );
        admit(&daemon, "b", "lost");
        assert_eq!(
            driver.prepared(),
            prepared(&["uid-kept", "uid-lost"]),
            "{fault:?}"
        );
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn a_removal_that_is_killed_while_a_driver_is_called_is_carried_on() {
    for fault in instants() {
        let root = root();
        let daemon = Daemon::on(root.path());
        let mut driver = driver(root.path());
        until_serving(&daemon);
        admit(&daemon, "a", "kept");
        admit(&daemon, "b", "gone");
        driver.fault(UNPREPARE, Some(&fault));
        let caller = start(&daemon, &["remove", "b"]);
        killed(daemon, &mut driver, (UNPREPARE, "uid-gone"), &fault, caller);

        let daemon = Daemon::on(root.path());

        assert_eq!(names(&daemon), ["a"], "{fault:?}: the removal was on disk");
        // With an answer, the removal of the claim may have been on disk before the kill.
        if !matches!(fault, Fault::KillCaller) {
            let (_, claims) = driver.asked(UNPREPARE);
            assert_eq!(claims[0].uid, "uid-gone", "{fault:?}");
        }
        daemon.until("claims", |list| {
            list["claims"].as_array().is_some_and(|all| all.len() == 1)
        });
        driver.until_prepared(&prepared(&["uid-kept"]));
        assert!(!driver.was_called(PREPARE), "{fault:?}");
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn a_kill_during_a_removal_leaves_a_shared_claim_to_its_other_pod() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut driver = driver(root.path());
    until_serving(&daemon);
    admit(&daemon, "a", "shared");
    admit(&daemon, "b", "shared");
    driver.asked(PREPARE);
    let mut removal = start(&daemon, &["remove", "b"]);
    daemon.kill();
    removal.wait().unwrap();

    let daemon = Daemon::on(root.path());

    until_serving(&daemon);
    let list = daemon.json(&["get", "claims"]);
    assert_eq!(list["claims"][0]["uid"], "uid-shared");
    assert_eq!(driver.prepared(), prepared(&["uid-shared"]));
    assert!(!driver.was_called(UNPREPARE));
    let output = daemon.run(&["remove", "a"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let _ = daemon.run(&["remove", "b"]);
    driver.until_prepared(&prepared(&[]));
    daemon.until("claims", |list| list["claims"] == json!([]));
}
