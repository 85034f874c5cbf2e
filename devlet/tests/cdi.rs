//! `devlet cdi` on the built binary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

const WIDGETS: &str = r#"
cdiVersion: "0.6.0"
kind: acme.com/widget
containerEdits:
  env: [ACME=1]
devices:
- name: w0
  annotations: {acme.com/slot: "3"}
  containerEdits:
    deviceNodes:
    - {path: /dev/widget0, hostPath: /dev/null, permissions: rw}
    mounts:
    - {hostPath: /opt/acme, containerPath: /usr/acme, options: [ro, bind]}
- name: w1
  containerEdits: {env: [WIDGET=1]}
"#;

const W0_AGAIN: &str = r#"{"cdiVersion":"0.3.0","kind":"acme.com/widget","devices":[{"name":"w0","containerEdits":{"env":["AGAIN=1"]}}]}"#;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(directory.path().join(name), content).unwrap();
    }
    directory
}

fn cdi(args: &[&str], directories: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devlet"));
    command.arg("cdi").args(args).stdin(Stdio::null());
    for directory in directories {
        command.arg("--cdi-dir").arg(directory);
    }
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn list_shows_which_definition_counts_and_a_broken_file_hides_nothing() {
    let low = directory(&[("acme.yaml", WIDGETS), ("broken.json", "{")]);
    let high = directory(&[("again.json", W0_AGAIN)]);
    let listed = json_of(&cdi(&["list", "-o", "json"], &[low.path(), high.path()]));
    let devices: Vec<(&str, bool)> = listed["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| {
            (
                device["name"].as_str().unwrap(),
                device["usable"].as_bool().unwrap(),
            )
        })
        .collect();
    let expected = [
        ("acme.com/widget=w0", false),
        ("acme.com/widget=w0", true),
        ("acme.com/widget=w1", true),
    ];
    assert_eq!(devices, expected);
    assert_eq!(listed["problems"].as_array().unwrap().len(), 1);
    assert!(
        listed["problems"][0].as_str().unwrap().contains("broken.json"),
        "{listed}"
    );
}

#[test]
fn show_has_the_edits_of_the_spec_and_of_the_device() {
    let specs = directory(&[("acme.yaml", WIDGETS)]);
    let shown = json_of(&cdi(
        &["show", "acme.com/widget=w0", "-o", "json"],
        &[specs.path()],
    ));
    assert_eq!(shown["annotations"], json!({"acme.com/slot": "3"}));
    assert_eq!(shown["edits"]["env"], json!(["ACME=1"]));
    assert_eq!(shown["edits"]["deviceNodes"][0]["hostPath"], "/dev/null");
    let table = stdout(&cdi(&["show", "acme.com/widget=w0"], &[specs.path()]));
    assert!(table.contains("/dev/widget0 from /dev/null (rw)"), "{table}");
}

#[test]
fn names_that_lead_nowhere_are_all_told_with_their_reason() {
    let specs = directory(&[("a.json", W0_AGAIN), ("b.json", W0_AGAIN)]);
    let names = ["acme.com/widget=w0", "acme.com/widget=w9", "nonsense"];
    let output = cdi(&[&["resolve"], &names[..]].concat(), &[specs.path()]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("a.json and") && text.contains("b.json"), "{text}");
    assert!(text.contains("acme.com/widget=w9 (no such device)"), "{text}");
    assert!(text.contains("\"nonsense\" has no vendor"), "{text}");
    assert_eq!(stdout(&output), "");
    assert_eq!(
        cdi(&["show", "acme.com/widget=w9"], &[specs.path()])
            .status
            .code(),
        Some(1)
    );
}

#[test]
fn resolve_changes_an_oci_spec_and_keeps_what_it_does_not_know() {
    let specs = directory(&[("acme.yaml", WIDGETS)]);
    let config = specs.path().join("config");
    let before =
        json!({"ociVersion": "1.2.0", "process": {"env": ["PATH=/bin"]}, "future": {"x": [1, {"y": null}]}});
    std::fs::write(&config, before.to_string()).unwrap();
    let names = ["acme.com/widget=w0", "acme.com/widget=w1"];
    let args = [&["resolve", "--oci-spec", config.to_str().unwrap()], &names[..]].concat();
    let after = json_of(&cdi(&args, &[specs.path()]));
    assert_eq!(after["future"], before["future"]);
    assert_eq!(
        after["process"]["env"],
        json!(["PATH=/bin", "ACME=1", "WIDGET=1"])
    );
    let node = &after["linux"]["devices"][0];
    assert_eq!(
        (&node["path"], &node["major"], &node["minor"]),
        (&json!("/dev/widget0"), &json!(1), &json!(3))
    );
    assert_eq!(after["linux"]["resources"]["devices"][0]["access"], "rw");
    assert_eq!(after["mounts"][0]["destination"], "/usr/acme");
    assert_eq!(
        std::fs::read_to_string(&config).unwrap(),
        before.to_string(),
        "the file was changed"
    );
}

#[test]
fn resolve_refuses_what_is_no_oci_spec() {
    let specs = directory(&[("acme.yaml", WIDGETS), ("text", "not json"), ("list", "[]")]);
    for file in ["text", "list"] {
        let path = specs.path().join(file);
        let output = cdi(
            &[
                "resolve",
                "acme.com/widget=w0",
                "--oci-spec",
                path.to_str().unwrap(),
            ],
            &[specs.path()],
        );
        assert_eq!(output.status.code(), Some(1), "{file}: {}", stdout(&output));
        assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
    }
    let missing = cdi(
        &["resolve", "acme.com/widget=w0", "--oci-spec", "/does/not/exist"],
        &[specs.path()],
    );
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn validate_judges_files_and_directories() {
    let specs = directory(&[("acme.yaml", WIDGETS)]);
    assert_eq!(cdi(&["validate"], &[specs.path()]).status.code(), Some(0));
    std::fs::write(specs.path().join("again.json"), W0_AGAIN).unwrap();
    std::fs::write(
        specs.path().join("short.json"),
        W0_AGAIN.replace("acme.com/widget", "a/b"),
    )
    .unwrap();
    let output = cdi(&["validate"], &[specs.path()]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains("acme.com/widget=w0 is also defined in"), "{text}");
    assert!(text.contains("crashes container runtimes"), "{text}");

    let bad = specs.path().join("bad");
    std::fs::write(&bad, "cdiVersion: 9.9.9").unwrap();
    assert_eq!(
        cdi(&["validate", bad.to_str().unwrap()], &[]).status.code(),
        Some(1)
    );
    assert_eq!(
        cdi(&["validate", specs.path().to_str().unwrap()], &[])
            .status
            .code(),
        Some(2)
    );
    assert_eq!(cdi(&["validate", "/does/not/exist"], &[]).status.code(), Some(2));
}

#[test]
fn a_directory_that_does_not_exist_is_empty() {
    let output = cdi(&["list"], &[Path::new("/does/not/exist")]);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        stderr(&output).contains("no devices in /does/not/exist"),
        "{}",
        stderr(&output)
    );
}
