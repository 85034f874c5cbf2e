//! Commands for a running devlet, on the built binary, when there is none.
#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Nothing of the caller's environment leads to a devlet.
fn devlet(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devlet"));
    command.args(args).stdin(Stdio::null());
    for variable in ["DEVLET_ROOT", "XDG_STATE_HOME"] {
        command.env_remove(variable);
    }
    command.env("HOME", home).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn every_command_says_that_devlet_is_not_running_and_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().to_str().unwrap();
    let file = directory.path().join("pod.yaml");
    std::fs::write(&file, "kind: Pod").unwrap();
    let file = file.to_str().unwrap();
    for command in [
        &["status"][..],
        &["get", "resources"],
        &["get", "pods", "--watch", "-o", "wide"],
        &["describe", "pod", "job1"],
        &["describe", "resource", "acme.com/gpu"],
        &["describe", "device", "gpu-0"],
        &["admit", "-f", file],
        &[
            "admit",
            "--name",
            "job1",
            "--limit",
            "acme.com/gpu=2",
            "--wait",
            "1s",
        ],
        &["options", "job1", "main", "--format", "podman"],
        &["remove", "job1"],
        &["import", file],
        &["forget", file],
        &["state", "dump"],
    ] {
        let output = devlet(directory.path(), &[command, &["--root-dir", root]].concat());
        let expected = format!(
            "error: devlet is not running: no socket at {root}/devlet/devlet.sock; start it with `devlet serve`\n"
        );
        assert_eq!(stderr(&output), expected, "{command:?}");
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(output.stdout.is_empty(), "{command:?}");
    }
}

#[test]
fn a_socket_that_nobody_listens_on_is_told_from_none() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("devlet")).unwrap();
    drop(UnixListener::bind(directory.path().join("devlet/devlet.sock")).unwrap());
    let output = devlet(
        directory.path(),
        &["status", "--root-dir", directory.path().to_str().unwrap()],
    );
    assert!(
        stderr(&output).contains("nobody answers at"),
        "{}",
        stderr(&output)
    );
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_root_in_the_environment_is_the_only_place_to_look() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_devlet"));
    command
        .arg("status")
        .env("DEVLET_ROOT", "/nowhere/at/all")
        .env("HOME", directory.path());
    let text = stderr(&command.output().unwrap());
    assert!(
        text.contains("no socket at /nowhere/at/all/devlet/devlet.sock;"),
        "{text}"
    );
}

#[test]
fn wrong_usage_is_told_before_anybody_is_called() {
    let directory = tempfile::tempdir().unwrap();
    for (command, hint) in [
        (&["admit"][..], "--name"),
        (&["admit", "--name", "job1", "--limit", "gpu"], "acme.com/gpu=2"),
        (&["admit", "--name", "job1", "--wait", "soon"], "1h30m"),
        (
            &["admit", "--name", "job1", "--limit", "gpu=1"],
            "gpu is no device",
        ),
        (
            &["admit", "-f", "pod.yaml", "--name", "job1"],
            "cannot be used with",
        ),
        (&["get"], "resources|devices|plugins|pods"),
        (&["describe"], "pod|resource|device"),
        (&["get", "everything"], "resources"),
        (
            &["get", "pods", "--resource", "acme.com/gpu"],
            "get devices --resource",
        ),
        (&["options", "job1", "--oci-spec", "config.json"], "--format oci"),
        (
            &["admit", "-f", "/nowhere/pod.yaml"],
            "cannot read /nowhere/pod.yaml",
        ),
        (&["import", "/nowhere/file"], "cannot read /nowhere/file"),
    ] {
        let output = devlet(directory.path(), command);
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(stderr(&output).contains(hint), "{command:?}: {}", stderr(&output));
    }
}
