//! `devlet cdi` on the built binary.

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
    assert!(table.contains("/dev/null -> /dev/widget0 (rw)"), "{table}");
}

#[test]
fn all_unknown_names_are_listed_with_their_reason() {
    let specs = directory(&[("a.json", W0_AGAIN), ("b.json", W0_AGAIN)]);
    let names = ["acme.com/widget=w0", "acme.com/widget=w9"];
    let output = cdi(&[&["resolve"], &names[..]].concat(), &[specs.path()]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("a.json and") && text.contains("b.json"), "{text}");
    assert!(text.contains("acme.com/widget=w9 (no such device)"), "{text}");
    assert_eq!(stdout(&output), "");
    assert_eq!(
        cdi(&["show", "acme.com/widget=w9"], &[specs.path()])
            .status
            .code(),
        Some(1)
    );
}

#[test]
fn resolve_changes_an_oci_spec_and_keeps_unknown_keys() {
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
fn resolve_refuses_a_file_that_is_not_an_oci_spec() {
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
fn a_directory_that_was_asked_for_must_be_there() {
    let specs = directory(&[("acme.yaml", WIDGETS)]);
    let file = specs.path().join("acme.yaml");
    for (bad, says) in [
        (Path::new("/does/not/exist"), "No such file"),
        (&file, "Not a directory"),
    ] {
        for command in [
            &["list"][..],
            &["validate"],
            &["show", "acme.com/widget=w1"],
            &["resolve", "acme.com/widget=w1"],
        ] {
            let output = cdi(command, &[specs.path(), bad]);
            assert_eq!(output.status.code(), Some(2), "{command:?} {}", bad.display());
            let expected = format!("error: cannot read {}: {says}", bad.display());
            assert!(stderr(&output).starts_with(&expected), "{}", stderr(&output));
        }
    }
}

#[test]
fn given_directories_do_not_matter_for_given_files() {
    let specs = directory(&[("acme.yaml", WIDGETS)]);
    let file = specs.path().join("acme.yaml");
    let output = cdi(&["validate", file.to_str().unwrap()], &[specs.path()]);
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    assert!(stderr(&output).contains("--cdi-dir"), "{}", stderr(&output));
}

#[test]
fn validate_sees_that_two_given_files_define_the_same_device() {
    let specs = directory(&[("acme.yaml", WIDGETS), ("again.json", W0_AGAIN)]);
    let paths = ["acme.yaml", "again.json"].map(|name| specs.path().join(name));
    let [one, other] = paths.each_ref().map(|path| path.to_str().unwrap());
    let output = cdi(&["validate", one, other], &[]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let text = stdout(&output);
    for path in [one, other] {
        assert!(
            text.contains(&format!("acme.com/widget=w0 is also defined in {path}")),
            "{text}"
        );
    }
    let twice = cdi(&["validate", one, one], &[]);
    assert_eq!(twice.status.code(), Some(0), "{}", stdout(&twice));
}

#[test]
fn validate_says_what_an_invalid_spec_is() {
    let specs = directory(&[("acme.yaml", &WIDGETS.replace("0.6.0", "0.3.0"))]);
    let path = specs.path().join("acme.yaml");
    for output in [
        cdi(&["validate", "-o", "json"], &[specs.path()]),
        cdi(&["validate", "-o", "json", path.to_str().unwrap()], &[]),
    ] {
        assert_eq!(output.status.code(), Some(1));
        let judged: Value = serde_json::from_slice(&output.stdout).unwrap();
        let judged = &judged[0];
        assert_eq!(judged["kind"], "acme.com/widget");
        assert_eq!(judged["cdiVersion"], "0.3.0");
        assert_eq!(judged["minimumVersion"], "0.6.0");
        assert_eq!(judged["devices"], 2);
        let problem = judged["problems"][0].as_str().unwrap();
        assert!(problem.contains("needs at least 0.6.0"), "{problem}");
    }
}

#[test]
fn resolve_keeps_numbers_as_they_are_written() {
    let numbers = [
        "12345678901234567890123",
        "0.1234567890123456789012",
        "-0",
        "1e5",
        "1e400",
    ];
    let config = format!(r#"{{"ociVersion": "1.2.0", "future": [{}]}}"#, numbers.join(", "));
    let specs = directory(&[("acme.yaml", WIDGETS), ("config", &config)]);
    let path = specs.path().join("config");
    for (format, before, after) in [("json", "    ", ""), ("yaml", "- ", "\n")] {
        let path = path.to_str().unwrap();
        let args = ["resolve", "acme.com/widget=w1", "--oci-spec", path, "-o", format];
        let output = cdi(&args, &[specs.path()]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        for number in numbers {
            let text = stdout(&output);
            assert!(
                text.contains(&format!("{before}{number}{after}")),
                "{number}: {text}"
            );
        }
    }
}

#[test]
fn hints_about_an_oci_spec_fit_the_error() {
    let deep = format!(r#"{{"a": {}{}}}"#, "[".repeat(200), "]".repeat(200));
    let lost = WIDGETS.replace("/dev/null", "/dev/none-of-these");
    let specs = directory(&[
        ("acme.yaml", WIDGETS),
        ("good", "{}"),
        ("list", "[]"),
        ("env", r#"{"process": {"env": {}}}"#),
        ("deep", &deep),
    ]);
    let others = directory(&[("acme.yaml", &lost)]);
    let resolve = |directory: &Path, name: &str, file: &str| {
        Command::new(env!("CARGO_BIN_EXE_devlet"))
            .args(["cdi", "resolve", name, "--oci-spec", "-", "--cdi-dir"])
            .arg(directory)
            .stdin(std::fs::File::open(specs.path().join(file)).unwrap())
            .output()
            .unwrap()
    };
    for (directory, name, file, error, hint) in [
        (
            &specs,
            "w0",
            "list",
            "standard input: the root of the OCI spec",
            "config.json",
        ),
        (
            &specs,
            "w0",
            "env",
            "standard input: process.env of the OCI spec",
            "config.json",
        ),
        (&specs, "w0", "deep", "at most 127 levels", "config.json"),
        (
            &others,
            "w0",
            "good",
            "/dev/none-of-these",
            "looked up on this host",
        ),
        (
            &specs,
            "w9",
            "good",
            "no such device",
            "devlet cdi list --cdi-dir /",
        ),
    ] {
        let output = resolve(directory.path(), &format!("acme.com/widget={name}"), file);
        assert_eq!(output.status.code(), Some(1), "{file}");
        let text = stderr(&output);
        let (first, second) = text.split_once("\nhint: ").unwrap_or((&text, ""));
        assert!(first.contains(error), "{text}");
        assert!(second.contains(hint), "{text}");
    }
}

#[test]
fn a_closed_pipe_does_not_make_a_bad_spec_good() {
    let specs = directory(&[("acme.yaml", &WIDGETS.replace("0.6.0", "0.3.0"))]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = Command::new(env!("CARGO_BIN_EXE_devlet"))
        .args(["cdi", "validate", "--cdi-dir"])
        .arg(specs.path())
        .stdout(writer)
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn text_of_a_spec_cannot_forge_lines_of_output() {
    let hostile = r#"{"cdiVersion":"0.6.0","kind":"acme.com/widget","devices":[{"name":"w0","annotations":{"a":"1\nforged"},"containerEdits":{"env":["A=1\nforged\u2028"],"mounts":[{"hostPath":"/a\nforged","containerPath":"/b"}]}}]}"#;
    let specs = directory(&[("a\nforged.json", hostile)]);
    for command in [
        &["list"][..],
        &["show", "acme.com/widget=w0"],
        &["resolve", "acme.com/widget=w0"],
        &["validate"],
    ] {
        let text = stdout(&cdi(command, &[specs.path()]));
        assert!(text.contains("\\nforged"), "{command:?}: {text}");
        assert!(!text.contains('\u{2028}'), "{command:?}: {text:?}");
        let forged = text.lines().find(|line| line.trim_start().starts_with("forged"));
        assert_eq!(forged, None, "{command:?}: {text}");
    }
}
