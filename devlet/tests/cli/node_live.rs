//! Commands for a running daemon, with its sample plugin.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::common::{Daemon, root, stderr, stdout};

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

/// Runs the example of the help text, with a `podman` that prints its arguments.
#[test]
fn no_container_is_started_if_its_options_cannot_be_printed() {
    let root = root();
    let daemon = sample(root.path());
    let help = text(&daemon, &["options", "--help"]);
    let example = help.lines().find(|line| line.contains("args=$(")).unwrap();
    let run = |job: &str| {
        let script = format!(
            "devlet() {{ \"$DEVLET\" \"$@\"; }}; podman() {{ echo ran \"$@\"; }}\n{}",
            example.replace("job1", job)
        );
        let mut shell = std::process::Command::new("sh");
        shell.env("DEVLET", env!("CARGO_BIN_EXE_devlet"));
        shell.env("DEVLET_ROOT", root.path()).args(["-c", &script]);
        shell.output().unwrap()
    };
    daemon.admit("job1", &format!("{WIDGET}=1"));
    let started = run("job1");
    assert!(stdout(&started).contains("--device="), "{}", stdout(&started));
    let missing = run("none");
    assert!(!missing.status.success());
    assert_eq!(stdout(&missing), "");
}

#[test]
fn a_container_that_the_command_line_has_to_name_is_wrong_usage() {
    let root = root();
    let daemon = sample(root.path());
    let manifest = root.path().join("two.json");
    let container = |name| json!({"name": name, "resources": {"limits": {WIDGET: 1}}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "two"},
        "spec": {"containers": [container("a"), container("b")]},
    });
    std::fs::write(&manifest, pod.to_string()).unwrap();
    daemon.json(&["admit", "-f", manifest.to_str().unwrap()]);
    let output = daemon.run(&["options", "two", "--format", "env"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        stderr(&output),
        "error: the pod has several containers: name one of a, b\n"
    );
    // A container that the pod does not have is not wrong usage.
    let unknown = daemon.refused(&["options", "two", "c", "--format", "env"]);
    assert_eq!(
        unknown,
        "error: the pod does not have a container \"c\"; it has a, b\n"
    );
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
        (&["describe", "plugin", "sample-widget.sock"], "serving"),
        (&["describe", "plugin", WIDGET], "sample-widget.sock"),
        (&["get", "plugins", WIDGET], "sample-widget.sock"),
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

/// Admits a pod with a label and one widget.
fn admit_labelled(daemon: &Daemon, namespace: &str, name: &str, team: &str) {
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"acme.com/team": team}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {WIDGET: 1}}}]},
    });
    let file = daemon.root.join("pod.json");
    std::fs::write(&file, manifest.to_string()).unwrap();
    daemon.json(&["admit", "-f", file.to_str().unwrap()]);
}

#[test]
fn pods_are_chosen_by_name_namespace_and_label_also_after_a_restart() {
    let root = root();
    let daemon = sample(root.path());
    for (namespace, name, team) in [("a", "one", "x"), ("a", "two", "y"), ("b", "one", "x")] {
        admit_labelled(&daemon, namespace, name, team);
    }
    drop(daemon);
    let daemon = sample(root.path());

    for (args, expected) in [
        (
            &["get", "pods", "-o", "name"][..],
            "pod/a/one\npod/a/two\npod/b/one\n",
        ),
        (
            &["get", "po", "-A", "-o", "name"],
            "pod/a/one\npod/a/two\npod/b/one\n",
        ),
        (
            &["get", "pods", "-n", "a", "-o", "name"],
            "pod/a/one\npod/a/two\n",
        ),
        (
            &["get", "pods", "-l", "acme.com/team=x", "-o", "name"],
            "pod/a/one\npod/b/one\n",
        ),
        (
            &["get", "pods", "two", "b/one", "-o", "name"],
            "pod/a/two\npod/b/one\n",
        ),
        (&["get", "pod/one", "-n", "b", "-o", "name"], "pod/b/one\n"),
        (
            &[
                "get",
                "pod",
                "two",
                "-o",
                "jsonpath={.pods[*].labels['acme.com/team']}",
            ],
            "y",
        ),
        (
            &[
                "get",
                "pods",
                "--sort-by",
                ".labels['acme.com/team']",
                "-o",
                "jsonpath={range .pods[*]}{.name} {end}",
            ],
            "one one two ",
        ),
        (&["describe", "pod/two", "-o", "jsonpath={.namespace}"], "a"),
        (
            &["get", "res", "-o", "name"],
            "resource/sample.devlet.dev/widget\n",
        ),
    ] {
        assert_eq!(text(&daemon, args), expected, "{args:?}");
    }
    let rows = text(&daemon, &["get", "pods", "--no-headers"]);
    assert_eq!(rows.lines().count(), 3, "{rows}");
    assert!(daemon.json(&["get", "pods"])["pods"][0]["admittedAt"].is_string());

    for (args, expected) in [
        (
            &["get", "pods", "one"][..],
            "one may be a/one or b/one: name one of them",
        ),
        (&["get", "pods", "tow"], "no such pod: tow; did you mean a/two?"),
        (
            &["remove", "tow"],
            "error: no such pod: tow; did you mean a/two?\n",
        ),
        (
            &["remove", "claim/x"],
            "hint: claims are removed with their pods; ",
        ),
        (
            &["get", "devices", "--resource", "widget"],
            "did you mean sample.devlet.dev/widget?",
        ),
        (
            &["get", "devices", "--resource", "none.org/x"],
            "no such resource: none.org/x",
        ),
    ] {
        let refused = daemon.refused(args);
        assert!(refused.contains(expected), "{args:?}: {refused}");
    }
    for (path, expected) in [
        (".nmae", "pods do not have a key nmae; the keys are .admittedAt, "),
        (
            ".labels.none",
            "no pod has a value at this path; the keys are .admittedAt, ",
        ),
    ] {
        let unsorted = daemon.run(&["get", "pods", "--sort-by", path]);
        assert_eq!(unsorted.status.code(), Some(2));
        let expected = format!("error: --sort-by: {expected}");
        assert!(stderr(&unsorted).starts_with(&expected), "{}", stderr(&unsorted));
    }
    for path in [".name", "name", "{.name}", "$.name", ".labels['acme.com/team']"] {
        text(&daemon, &["get", "pods", "--sort-by", path]);
    }
    let empty = daemon.run(&["get", "pods", "-o", "jsonpath={.items[*].metadata.name}"]);
    assert!(empty.status.success() && stdout(&empty).is_empty());
    assert_eq!(
        stderr(&empty),
        "warning: -o jsonpath: no .items here; the keys are .pods, .revision\n"
    );
    for args in [
        &["get", "pods", "-n", "a", "-A"][..],
        &["get", "devices", "-n", "a"],
        &["get", "devices", "-l", "a=b"],
        &["get", "pods", "-l", "a b"],
        &["get", "pods", "-o", "jsonpath={.pods"],
        &["get", "pod/one", "claim/two"],
        &["remove", "a/one", "--all"],
        &["remove"],
    ] {
        assert_eq!(daemon.run(args).status.code(), Some(2), "{args:?}");
    }

    let would = text(
        &daemon,
        &["remove", "-l", "acme.com/team=x", "-n", "b", "--dry-run"],
    );
    assert!(
        would.starts_with("would remove b/one (") && would.lines().count() == 1,
        "{would}"
    );
    let output = daemon.run(&["delete", "pod", "a/one", "none", "pod/two"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output).lines().count(), 2, "{}", stdout(&output));
    assert!(
        stderr(&output).contains("no such pod: none"),
        "{}",
        stderr(&output)
    );
    assert!(text(&daemon, &["remove", "--all"]).starts_with("removed b/one ("));
    for (args, expected) in [
        (&["get", "pods"][..], "No pods.\n"),
        (&["get", "pods", "-n", "a"], "No pods in namespace a.\n"),
        (&["get", "claims"], "No claims.\n"),
        (&["remove", "--all"], "No pods.\n"),
    ] {
        let output = daemon.run(args);
        assert!(output.status.success() && stdout(&output).is_empty(), "{args:?}");
        assert_eq!(stderr(&output), expected, "{args:?}");
    }
}

#[test]
fn a_watch_prints_changed_rows_and_survives_a_restart_of_the_daemon() {
    let root = root();
    let daemon = sample(root.path());
    let mut watch = daemon.command(&["get", "pods", "--watch"]);
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut row = || {
        let line = lines.next().unwrap().unwrap();
        line.split_whitespace()
            .take(3)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    admit_labelled(&daemon, "a", "one", "x");
    assert_eq!(row(), ["EVENT", "NAMESPACE", "NAME"]);
    assert_eq!(row(), ["ADDED", "a", "one"]);

    assert_eq!(daemon.stop(), Some(0));
    let mut noted = BufReader::new(watch.stderr.take().unwrap()).lines();
    let note = noted.next().unwrap().unwrap();
    let socket = root.path().join("devlet/devlet.sock");
    let expected = format!(
        "devlet at {} has stopped; waiting up to 30s for it to come back",
        socket.display()
    );
    assert_eq!(note, expected);
    let daemon = sample(root.path());
    admit_labelled(&daemon, "a", "two", "x");
    assert_eq!(row(), ["ADDED", "a", "two"], "the first one is as it was");
    text(&daemon, &["remove", "one"]);
    assert_eq!(row(), ["DELETED", "a", "one"]);
    watch.kill().unwrap();
    watch.wait().unwrap();
    assert_eq!(noted.count(), 0, "one note for each stop");
}

/// Returns the completions in bash for the last of these words.
fn completed(daemon: &Daemon, words: &[&str]) -> Vec<String> {
    let mut command = daemon.command(&[]);
    command
        .env("COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
        .env("_CLAP_COMPLETE_COMP_TYPE", "9")
        .env("_CLAP_COMPLETE_SPACE", "true")
        .env("_CLAP_IFS", "\n")
        .args(["--", "devlet"])
        .args(words);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).lines().map(str::to_owned).collect()
}

#[test]
fn completion_offers_names_of_the_running_devlet_and_no_hidden_commands() {
    let root = root();
    let daemon = sample(root.path());
    admit_labelled(&daemon, "a", "one", "x");
    for (words, expected) in [
        (&["get", "pods", ""][..], &["one"][..]),
        (&["get", "pods", "a/"], &["a/one"]),
        (&["get", "po/o"], &["po/one"]),
        (&["get", "devices", "--resource", "sam"], &[WIDGET]),
        (&["describe", "resource", ""], &[WIDGET]),
        (&["describe", "driver", ""], &["gadget.sample.devlet.dev"]),
        (&["describe", "device", "widget-0"], &["widget-0"]),
        (&["remove", ""], &["one"]),
        (&["options", "o"], &["one"]),
        (&["remove", "pod/"], &["pod/one"]),
        (&["options", "--no-start", "one", ""], &["main"]),
        (&["admit", "--limit", ""], &["sample.devlet.dev/widget="]),
        (&["get", "pods", "-n", ""], &["a"]),
        (
            &["get", "devices", "--resource", ""],
            &[WIDGET, "gadget.sample.devlet.dev"],
        ),
        (&["serve", "--log-level", ""], &["warn", "debug"]),
        (&["delete", ""], &["one"]),
    ] {
        let offered = completed(&daemon, words);
        for name in expected {
            assert!(offered.iter().any(|each| each == name), "{words:?}: {offered:?}");
        }
    }
    let commands = completed(&daemon, &[""]);
    for name in ["describe", "remove"] {
        assert!(commands.iter().any(|each| each == name), "{name}: {commands:?}");
    }
    for word in ["", "sample"] {
        let commands = completed(&daemon, &[word]);
        let hidden = commands.iter().find(|each| each.starts_with("sample"));
        assert_eq!(hidden, None, "{word}");
    }
    daemon.signal("-STOP");
    assert!(
        !completed(&daemon, &["get", "pods", ""])
            .iter()
            .any(|each| each == "one")
    );
}

#[test]
fn colours_are_for_terminals_unless_they_are_asked_for() {
    let root = root();
    let daemon = sample(root.path());
    let red = "\u{1b}[31m";
    let plain = daemon.run(&["get", "pods", "none"]);
    assert_eq!(
        stderr(&plain),
        "error: no such pod: none; `devlet get pods` lists them\n"
    );
    let styled = daemon.run(&["get", "pods", "none", "--color", "always"]);
    assert!(
        stderr(&styled).contains(red) && stderr(&styled).contains("error:"),
        "{:?}",
        stderr(&styled)
    );
    let usage = daemon.run(&["--color=always", "get", "nothing"]);
    assert!(stderr(&usage).contains(red), "{:?}", stderr(&usage));
    let never = daemon.run(&["--color=never", "get", "nothing"]);
    assert!(!stderr(&never).contains('\u{1b}'), "{:?}", stderr(&never));
}

#[test]
fn the_versions_of_both_sides_are_printed() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let ours = env!("CARGO_PKG_VERSION");
    assert_eq!(daemon.json(&["version"]), json!({"client": ours, "daemon": ours}));
    daemon.signal("-STOP");
    let stopped = text(&daemon, &["version", "--timeout", "100ms"]);
    let socket = root.path().join("devlet/devlet.sock");
    let expected = format!(
        "Client:  {ours}\nDaemon:  - (devlet at {} does not answer (waited 0.1 s))\n",
        socket.display()
    );
    assert_eq!(stopped, expected);
    drop(daemon);
    let mut alone = crate::common::devlet();
    let output = alone
        .env("DEVLET_ROOT", root.path())
        .arg("version")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(
        stdout(&output).contains("Daemon:  - (devlet is not running"),
        "{}",
        stdout(&output)
    );
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

#[test]
fn no_command_waits_for_ever_for_a_devlet_that_is_stopped() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let file = root.path().join("file");
    std::fs::write(&file, "kind: Pod").unwrap();
    let file = file.to_str().unwrap();
    daemon.signal("-STOP");
    for command in [
        &["status"][..],
        &["get", "resources"],
        &["get", "pods", "--watch"],
        &["describe", "pod", "job1"],
        &["describe", "resource", "acme.com/gpu"],
        &["describe", "device", "gpu-0"],
        &["describe", "driver", "gpu.acme.com"],
        &["describe", "claim", "gpu"],
        &["admit", "-f", file],
        &["admit", "-f", file, "--wait", "50ms"],
        &["options", "job1"],
        &["remove", "job1"],
        &["remove", "job1", "--wait", "50ms"],
        &["remove", "--claim", "gpu", "--abandon-driver", "gpu.acme.com"],
        &["import", file],
        &["forget", file],
        &["forget", "--claim", "gpu"],
        &["state", "dump"],
    ] {
        let output = daemon.run(&[command, &["--timeout", "50ms"]].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        let expected = format!(
            "error: devlet at {}",
            root.path().join("devlet/devlet.sock").display()
        );
        let text = stderr(&output);
        assert!(text.starts_with(&expected), "{command:?}: {text}");
        assert!(text.contains(" does not answer (waited 0"), "{command:?}: {text}");
    }
}

#[test]
fn an_admission_ends_although_devlet_is_stopped_meanwhile() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let args = ["admit", "--name", "job1", "--limit", "acme.com/gpu=1"];
    let mut admit = daemon.command(&[&args[..], &["--wait", "500ms", "--timeout", "100ms"]].concat());
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut admit = admit.spawn().unwrap();
    let mut lines = BufReader::new(admit.stderr.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.starts_with("waiting for a plugin"), "{line}");

    daemon.signal("-STOP");
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();

    assert!(rest.contains("does not answer (waited 0.6 s)"), "{rest}");
    assert_eq!(admit.wait().unwrap().code(), Some(2));
}

#[test]
fn an_admission_ends_when_devlet_is_killed_meanwhile() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let args = ["admit", "--name", "job1", "--limit", "acme.com/gpu=1"];
    let mut admit = daemon.command(&args);
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut admit = admit.spawn().unwrap();
    let mut lines = BufReader::new(admit.stderr.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.starts_with("waiting for a plugin"), "{line}");

    daemon.kill();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();

    assert!(rest.contains("has stopped before it answered"), "{rest}");
    assert_eq!(admit.wait().unwrap().code(), Some(2));
}

#[test]
fn a_watch_reports_a_devlet_that_does_not_answer_and_goes_on_when_it_does() {
    let root = root();
    let daemon = sample(root.path());
    let mut watch = daemon.command(&["get", "pods", "--watch", "-o", "json", "--timeout", "1s"]);
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lists = BufReader::new(watch.stdout.take().unwrap()).lines();
    lists.next().unwrap().unwrap();
    let mut notes = BufReader::new(watch.stderr.take().unwrap()).lines();

    daemon.signal("-STOP");
    let note = notes.next().unwrap().unwrap();
    let expected = format!(
        "devlet at {} does not answer (waited 1 s); waiting up to 30s for it to come back",
        root.path().join("devlet/devlet.sock").display()
    );
    assert_eq!(note, expected);

    daemon.signal("-CONT");
    daemon.admit("one", &format!("{WIDGET}=1"));
    let has_pod = |line: &str| {
        let list: Value = serde_json::from_str(line).unwrap();
        list["pods"][0]["name"] == "one"
    };
    assert!(lists.any(|line| has_pod(&line.unwrap())));
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn a_mistyped_resource_is_wrong_usage_and_the_near_one_is_named() {
    let root = root();
    let daemon = sample(root.path());
    for (limit, expected) in [
        ("widget=1", "; did you mean sample.devlet.dev/widget?"),
        (
            "gpu=1",
            "the name of a resource has a domain, as in acme.com/gpu\n",
        ),
        ("cpu=1", "cpu is not a device"),
        ("=0", "write RESOURCE=COUNT"),
        ("sample.devlet.dev/widget=0", "the count is 0: omit a resource"),
        (
            "sample.devlet.dev/widget=many",
            "\"many\" is not a number of devices",
        ),
        (
            "Sample.devlet.dev/widget=1",
            "error: container main: \"Sample.devlet.dev/widget\" is not the name of a device resource",
        ),
        (
            "gadget.sample.devlet.dev=1",
            "is a DRA driver, and its devices are allocated by a claim",
        ),
    ] {
        let output = daemon.run(&["admit", "--name", "job1", "--limit", limit]);
        assert_eq!(output.status.code(), Some(2), "{limit}");
        assert!(stderr(&output).contains(expected), "{limit}: {}", stderr(&output));
    }
    let none = daemon.run(&["admit", "--name", "job1"]);
    assert_eq!(none.status.code(), Some(2), "no limit at all");
    assert!(
        stderr(&none).contains("--limit <RESOURCE=COUNT>"),
        "{}",
        stderr(&none)
    );

    let unknown = ["--limit", "sample.devlet.dev/widgets=1", "--wait", "100ms"];
    let waited = daemon.refused(&[&["admit", "--name", "job1"], &unknown[..]].concat());
    let near = "note: no plugin offers sample.devlet.dev/widgets; did you mean sample.devlet.dev/widget?\n";
    assert!(waited.contains(near), "{waited}");
    assert_eq!(daemon.json(&["status"])["pods"], 0);
}

#[test]
fn a_pod_without_devices_is_reported() {
    let root = root();
    let config = "foreign: [acme.com/*]\n";
    let daemon = Daemon::configured(root.path(), config);
    let file = root.path().join("pod.yaml");
    std::fs::write(
        &file,
        "metadata: {name: plain}\nspec: {containers: [{name: main}]}",
    )
    .unwrap();
    let output = daemon.run(&["admit", "-f", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let note = stderr(&output);
    assert!(note.starts_with("note: pod default/plain ("), "{note}");
    assert!(note.ends_with(") requests no device and no claim\n"), "{note}");

    let foreign = daemon.run(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    assert!(foreign.status.success(), "{}", stderr(&foreign));
    let note = stderr(&foreign);
    assert!(note.starts_with("note: pod default/job1 ("), "{note}");
    assert!(
        note.contains(") gets no acme.com/gpu from devlet: it is `foreign` in the configuration"),
        "{note}"
    );
}

#[test]
fn an_invalid_manifest_is_refused_with_file_line_and_column() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let pod = file(
        "pod.yaml",
        "metadata: {name: job1}\nspec: {containers: [{name: main}]}\n",
    );
    let bad = file("bad.yaml", "kind: ResourceClaim\nmetadata:\n\tname: gpu\n");
    assert_eq!(
        daemon.refused(&["admit", "-f", &pod, "-f", &bad]),
        format!("error: {bad}:3:2: a tab is not allowed here; indent with spaces\n")
    );
    let mut stdin = daemon.command(&["admit", "-f", "-"]);
    stdin.stdin(std::fs::File::open(&bad).unwrap());
    let output = stdin.output().unwrap();
    assert_eq!(
        stderr(&output),
        "error: -:3:2: a tab is not allowed here; indent with spaces\n"
    );
}
