//! Commands for a running devlet, on the built binary and its sample plugin.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Daemon, root, stderr, stdout};
use serde_json::{Value, json};

const WIDGET: &str = "sample.devlet.dev/widget";

fn sample(root: &std::path::Path) -> Daemon {
    let daemon = Daemon::with(root, &["--sample"]);
    daemon.until("resources", |list| list["resources"][0]["state"] == "serving");
    daemon
}

fn text(daemon: &Daemon, args: &[&str]) -> String {
    let output = daemon.run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn a_container_gets_its_options_in_the_shape_of_each_runtime() {
    let root = root();
    let daemon = sample(root.path());
    let admitted = daemon.json(&["admit", "--name", "job1", "--limit", &format!("{WIDGET}=1")]);
    let id = admitted["containers"][0]["devices"][0]["ids"][0]
        .as_str()
        .unwrap();

    let options: Value = serde_json::from_str(&text(&daemon, &["options", "job1"])).unwrap();
    assert_eq!(options, admitted);
    let env = text(&daemon, &["options", "default/job1", "main", "--format", "env"]);
    assert_eq!(env, format!("SAMPLE_WIDGETS={id}\n"));
    for engine in ["podman", "docker"] {
        let arguments = text(&daemon, &["options", "job1", "--format", engine]);
        assert!(
            arguments.starts_with(&format!("--env=SAMPLE_WIDGETS={id} --device=")),
            "{arguments}"
        );
    }
    let config = root.path().join("config.json");
    std::fs::write(&config, r#"{"ociVersion": "1.2.0", "process": {"env": ["A=1"]}}"#).unwrap();
    let uid = admitted["pod"]["uid"].as_str().unwrap();
    let args = [
        "options",
        uid,
        "--format",
        "oci",
        "--oci-spec",
        config.to_str().unwrap(),
    ];
    let oci: Value = serde_json::from_str(&text(&daemon, &args)).unwrap();
    assert_eq!(
        oci["process"]["env"],
        json!(["A=1", format!("SAMPLE_WIDGETS={id}")])
    );
    assert_eq!(oci["linux"]["devices"][0]["path"], format!("/dev/{id}"));
}

#[test]
fn pods_are_told_apart_by_namespace() {
    let root = root();
    let daemon = sample(root.path());
    let limit = format!("{WIDGET}=1");
    for namespace in ["a", "b"] {
        daemon.json(&[
            "admit",
            "--name",
            "job1",
            "--namespace",
            namespace,
            "--limit",
            &limit,
        ]);
    }
    let ambiguous = daemon.refused(&["remove", "job1"]);
    assert_eq!(
        ambiguous,
        "error: several pods are called job1: name one of a/job1, b/job1\n"
    );
    assert!(text(&daemon, &["remove", "a/job1"]).starts_with("removed a/job1 ("));
    assert!(text(&daemon, &["remove", "job1"]).starts_with("removed b/job1 ("));
    assert!(
        daemon
            .refused(&["remove", "job1"])
            .starts_with("error: no such pod: job1\n")
    );
}

#[test]
fn people_see_tables_and_programs_see_keys() {
    let root = root();
    let daemon = sample(root.path());
    daemon.json(&["admit", "--name", "job1", "--limit", &format!("{WIDGET}=2")]);

    let status = daemon.json(&["status"]);
    assert_eq!(
        (&status["ready"], &status["pods"], &status["problems"]),
        (&json!(true), &json!(1), &json!([]))
    );
    let resource = daemon.json(&["describe", "resource", WIDGET]);
    assert_eq!((&resource["held"], &resource["free"]), (&json!(2), &json!(6)));
    assert_eq!(resource["devices"].as_array().unwrap().len(), 8);
    let device = resource["devices"]
        .as_array()
        .unwrap()
        .iter()
        .find(|device| device["holders"] != json!([]));
    let id = device.unwrap()["id"].as_str().unwrap();
    let device = daemon.json(&["describe", "device", &format!("{WIDGET}/{id}")]);
    assert_eq!(device["containers"][0]["pod"]["name"], "job1");
    assert_eq!(device["containers"][0]["container"], "main");

    for (args, expected) in [
        (&["status"][..], "State:      ready"),
        (&["get", "resources"], "serving"),
        (&["get", "resources", "-o", "wide"], "sample-widget.sock"),
        (&["get", "devices", "--resource", WIDGET], "default/job1"),
        (&["get", "plugins"], "serving"),
        (&["get", "pods", "-o", "wide"], id),
        (&["get", "pods", "-o", "yaml"], "name: job1"),
        (&["describe", "pod", "job1"], "Container main (app)"),
        (&["describe", "device", id], "Held by:     default/job1, in main"),
    ] {
        let text = text(&daemon, args);
        assert!(text.contains(expected), "{args:?}: {text}");
    }
    for args in [
        ["describe", "pod", "none"],
        ["describe", "resource", "acme.com/none"],
        ["describe", "device", "none"],
    ] {
        assert!(daemon.refused(&args).contains("none"), "{args:?}");
    }
}

#[test]
fn a_bad_file_is_not_imported_and_the_way_out_is_named() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let file = root.path().join("bad");
    std::fs::write(&file, "{").unwrap();
    let refused = daemon.refused(&["import", file.to_str().unwrap()]);
    assert!(refused.contains("devlet checkpoint repair"), "{refused}");
    let good =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../samples/kubelet_internal_checkpoint");
    let imported = daemon.json(&["import", good.to_str().unwrap()]);
    assert_eq!(imported["added"].as_array().unwrap().len(), 2);
    let state: Value = serde_json::from_str(&text(&daemon, &["state", "dump"])).unwrap();
    assert_eq!(state["pods"].as_array().unwrap().len(), 2);
}
