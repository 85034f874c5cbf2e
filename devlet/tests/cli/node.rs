//! Commands for a daemon when no daemon runs.

use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a command without the variables of the environment that lead to a daemon.
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
fn a_socket_without_a_process_is_distinguished_from_a_missing_one() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("devlet")).unwrap();
    drop(UnixListener::bind(directory.path().join("devlet/devlet.sock")).unwrap());
    let output = devlet(
        directory.path(),
        &["status", "--root-dir", directory.path().to_str().unwrap()],
    );
    assert!(
        stderr(&output).contains("no process listens on"),
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
    let expected = "error: devlet is not running: no socket at /nowhere/at/all/devlet/devlet.sock; start it with \
                    `devlet serve`, or name its root directory with --root-dir or DEVLET_ROOT (now /nowhere/at/all)\n";
    assert_eq!(text, expected);
}

#[test]
fn without_a_root_all_places_that_were_searched_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let output = devlet(directory.path(), &["status"]);
    let own = directory.path().join(".local/state/devlet/devlet/devlet.sock");
    // A daemon of this machine may run in the default place.
    if output.status.code() == Some(2) {
        let expected = format!(
            "no socket at {} or /var/lib/kubelet/devlet/devlet.sock; start it with `devlet serve`, or name its root \
             directory with --root-dir or DEVLET_ROOT (not set)\n",
            own.display()
        );
        assert!(stderr(&output).ends_with(&expected), "{}", stderr(&output));
    }
}

#[test]
fn a_devlet_that_accepts_and_never_answers_is_given_up_on() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("devlet")).unwrap();
    let socket = directory.path().join("devlet/devlet.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    let root = directory.path().to_str().unwrap();
    let output = devlet(
        directory.path(),
        &["status", "--root-dir", root, "--timeout", "100ms"],
    );
    let expected = format!(
        "error: devlet at {} does not answer (waited 0.1 s)\n",
        socket.display()
    );
    assert_eq!(stderr(&output), expected);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_devlet_that_ends_during_a_command_has_stopped() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("devlet")).unwrap();
    let socket = directory.path().join("devlet/devlet.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // The peer ends after the connection preface.
            let _ = stream.unwrap().read_exact(&mut [0; 24]);
        }
    });
    let file = directory.path().join("file");
    std::fs::write(&file, "kind: Pod").unwrap();
    let (root, file) = (directory.path().to_str().unwrap(), file.to_str().unwrap());
    let expected = format!(
        "error: devlet at {} has stopped before it answered, or this user has too many connections: see devlet's log\n",
        socket.display()
    );
    for command in [
        &["status"][..],
        &["get", "pods"],
        &["describe", "pod", "job1"],
        &["admit", "-f", file],
        &["admit", "-f", file, "--wait", "1s"],
        &["admit", "--name", "job1", "--limit", "acme.com/gpu=1"],
        &["options", "job1"],
        &["remove", "job1"],
        &["remove", "job1", "job2", "--ignore-not-found"],
        &["remove", "--all"],
        &["remove", "--claim", "gpu", "--abandon-driver", "gpu.acme.com"],
        &["import", file],
        &["forget", file],
        &["forget", "--claim", "gpu"],
        &["forget", "--pod", "uid"],
        &["state", "dump"],
    ] {
        let output = devlet(directory.path(), &[command, &["--root-dir", root]].concat());
        assert_eq!(stderr(&output), expected, "{command:?}");
        assert_eq!(output.status.code(), Some(2), "{command:?}");
    }
}

/// No daemon runs: a command checks its arguments before it connects.
#[test]
fn wrong_usage_of_any_command_is_exit_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let garbage = directory.path().join("garbage");
    std::fs::write(&garbage, "garbage").unwrap();
    let garbage = garbage.to_str().unwrap();
    for (command, hint) in [
        (&["admit"][..], "--name"),
        (&["admit", "--name", "job1", "--limit", "gpu"], "acme.com/gpu=2"),
        (&["admit", "--name", "job1", "--wait", "soon"], "1h30m"),
        (
            &["admit", "--name", "job1", "--limit", "memory=1"],
            "memory is not a device",
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
        (&["options", ""], "the name is empty"),
        (
            &["admit", "-f", "/nowhere/pod.yaml"],
            "cannot read /nowhere/pod.yaml",
        ),
        (&["import", "/nowhere/file"], "cannot read /nowhere/file"),
        (&["import", ""], "a value is required"),
        (&["import", "/"], "it is a directory"),
        // Invalid names.
        (
            &["admit", "--name", "", "--limit", "acme.com/gpu=1"],
            "the name is empty",
        ),
        (
            &[
                "admit",
                "--name",
                "job1",
                "--namespace",
                "",
                "--limit",
                "acme.com/gpu=1",
            ],
            "the name is empty",
        ),
        (
            &[
                "admit",
                "--name",
                "job1",
                "--container",
                "",
                "--limit",
                "acme.com/gpu=1",
            ],
            "the name is empty",
        ),
        (&["options", "pod/"], "NAMESPACE/NAME"),
        (&["options", "job1", ""], "the name is empty"),
        (&["remove", ""], "the name is empty"),
        (&["remove", "job1", ""], "the name is empty"),
        (&["remove", "", "--dry-run"], "the name is empty"),
        (&["remove", "pod", ""], "the name is empty"),
        (&["remove", "--all", "-n", ""], "the name is empty"),
        (&["remove", "-l", "", "--dry-run"], "KEY=VALUE"),
        (&["remove", "pod/"], "NAMESPACE/NAME"),
        (&["remove", "/job1"], "NAMESPACE/NAME"),
        (&["remove", "uid:"], "NAMESPACE/NAME"),
        (&["remove", "-n", "", "job1"], "the name is empty"),
        (
            &["remove", "--claim", "", "--abandon-driver", "gpu.acme.com"],
            "the name is empty",
        ),
        (&["remove", "job1", "--abandon-driver", ""], "the name is empty"),
        (&["get", ""], "a value is required"),
        (&["get", "pods", ""], "the name is empty"),
        (&["get", "pods/a/"], "NAMESPACE/NAME"),
        (&["get", "pod/"], "the name is empty"),
        (&["get", "pods", " "], "the name is empty"),
        (&["describe", "pod/"], "the name is empty"),
        (&["get", "pods", "-n", ""], "the name is empty"),
        (&["get", "devices", "--resource", ""], "the name is empty"),
        (&["describe", "pod", ""], "the name is empty"),
        (&["describe", "claim", ""], "the name is empty"),
        (&["describe", "device", ""], "the name is empty"),
        (&["describe", "driver", ""], "the name is empty"),
        (&["describe", "plugin", ""], "the name is empty"),
        (&["describe", "resource", ""], "the name is empty"),
        (&["forget", ""], "a value is required"),
        (&["forget", "--claim", ""], "the name is empty"),
        (&["forget", "--claim", "team-a/"], "name of a claim"),
        (&["forget", "--pod", ""], "the name is empty"),
        (&["cdi", "show", "gpu0"], "vendor.com/class=name"),
        (&["cdi", "resolve", ""], "vendor.com/class=name"),
        // Kinds, shapes and paths.
        (&["describe", "everything", "x"], "resources"),
        (&["describe", "pod"], "describe pod NAME"),
        (&["remove", "claim", "gpu"], "only pods can"),
        (&["remove", "claim", "gpu"], "--claim CLAIM --abandon-driver"),
        (&["admit", "-f", "-", "-f", "-"], "-f names standard input twice"),
        (&["admit", "-f", garbage, "-f", garbage], "garbage twice"),
        (&["get", "pod/a", "claim/b"], "one kind"),
        (&["get", "pods", "-o", "xml"], "jsonpath=TEMPLATE"),
        (
            &["get", "pods", "-o", "jsonpath={.pods"],
            "lacks its closing brace",
        ),
        (&["get", "pods", "-o", "jsonpath="], "write a JSONPath"),
        (&["get", "pods", "--sort-by", "{{"], "not a JSONPath"),
        (&["get", "pods", "--sort-by", ""], "write a JSONPath"),
        (&["get", "pods", "-l", "!!"], "label selector"),
        (&["get", "pods", "-l", "a=b=c"], "\"b=c\" is not a label value"),
        (&["remove", "-l", "a=b=c", "--dry-run"], "is not a label value"),
        (&["remove", "-l", "a=b,"], "ends in a comma"),
        (
            &["get", "pods", "--sort-by", "nope"],
            "pods do not have a key nope; the keys are .admittedAt, ",
        ),
        (&["get", "pods", "--sort-by", ".metadata.name"], ", .name, "),
        (&["get", "claims", "--sort-by", "{.nope}"], ".phase"),
        (&["get", "devices", "--sort-by", "$['nope']"], ".dra"),
        (&["remove", "-l", ""], "KEY=VALUE"),
        (&["describe", "pod", "job1", "-o", "name"], "jsonpath=TEMPLATE"),
        (&["options", "job1", "--format", "xml"], "podman"),
        (&["--color", "pink", "status"], "auto"),
        (&["completions", "cmd"], "bash"),
        // Durations.
        (&["status", "--timeout", "soon"], "1h30m"),
        (
            &["get", "pods", "--watch", "--timeout", "-1s"],
            "\"-1s\" is negative",
        ),
        (
            &["admit", "--name", "job1", "--limit", "a.com/b=1", "--wait", "-1s"],
            "\"-1s\" is negative",
        ),
        (&["remove", "job1", "--wait", "-5"], "\"-5\" is negative"),
        (&["remove", "job1", "--wait", ""], "1h30m"),
        (&["options", "job1", "--wait", "5 parsecs"], "1h30m"),
        // Flags that exclude or need each other.
        (&["get", "pods", "-n", "a", "-A"], "cannot be used with"),
        (&["get", "claims", "-l", "a=b"], "claims do not have labels"),
        (&["get", "resources", "-n", "a"], "do not have a namespace"),
        (
            &["describe", "resource", "x", "-n", "a"],
            "do not have a namespace",
        ),
        (&["remove"], "required arguments"),
        (&["remove", "--all", "job1"], "not both"),
        (&["remove", "--all", "--claim", "gpu"], "cannot be used with"),
        (&["remove", "--claim", "gpu"], "--abandon-driver"),
        (&["forget"], "required arguments"),
        (&["forget", "--claim", "a", "--pod", "b"], "cannot be used with"),
        (
            &["checkpoint", "convert", garbage, "--out", "a", "--in-place"],
            "cannot be used with",
        ),
        (&["checkpoint", "convert", "-", "--in-place"], "needs a file"),
        (
            &["cdi", "validate", garbage, "--cdi-dir", "/"],
            "cannot be used with",
        ),
        // Commands and flags that do not exist.
        (&["frobnicate"], "unrecognized subcommand"),
        (&["state", "frobnicate"], "unrecognized subcommand"),
        (&["config", "frobnicate"], "unrecognized subcommand"),
        (&["status", "extra"], "unexpected argument"),
        (&["version", "extra"], "unexpected argument"),
        (&["get", "pods", "--frobnicate"], "unexpected argument"),
        (&["cdi", "list", "extra"], "unexpected argument"),
        // Files that cannot be read or written, and files of ours that are wrong.
        (&["checkpoint", "show", "/nowhere"], "cannot read /nowhere"),
        (&["checkpoint", "show", ""], "a value is required"),
        (
            &["checkpoint", "show", garbage, "--role", "x"],
            "dra_manager_state",
        ),
        (&["checkpoint", "verify"], "required arguments"),
        (&["checkpoint", "verify", "/nowhere"], "cannot read /nowhere"),
        (
            &["checkpoint", "convert", garbage, "--to", "x"],
            "device-plugin-v2",
        ),
        (&["checkpoint", "repair", "/nowhere"], "cannot read /nowhere"),
        (&["cdi", "list", "--cdi-dir", "/nowhere"], "cannot read /nowhere"),
        (&["cdi", "validate", "/nowhere"], "cannot read /nowhere"),
        (
            &["cdi", "resolve", "a.com/b=c", "--oci-spec", "/nowhere"],
            "cannot read /nowhere",
        ),
        (
            &["config", "print", "--config", "/nowhere"],
            "cannot read /nowhere",
        ),
        (
            &["config", "print", "--config", garbage],
            "garbage:1:1: expected keys and values",
        ),
        (&["man", "--out", garbage], "cannot write"),
        (&["serve", "--root-dir", garbage], "cannot create"),
        (&["serve", "--log", "xml"], "json"),
        (&["serve", "--log-level", "wran"], "did you mean warn"),
        (&["serve", "--http", "x"], "not an address"),
    ] {
        let output = devlet(directory.path(), command);
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(stderr(&output).contains(hint), "{command:?}: {}", stderr(&output));
    }
}
