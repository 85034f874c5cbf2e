//! Device plugins and pods: registration, admission, and restarts of plugins and of the daemon.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use devlet_testkit::{Answer, Api, Device, DeviceNode, Door, Event, Fault, Mount, Options, Plugin, Script};
use serde_json::{Value, json};

use crate::common::{Daemon, ids, items, root, stderr, stdout};

const GPU: &str = "acme.com/gpu";

fn gpus(root: &Path, count: usize) -> Script {
    let devices = (0..count).map(|number| Device::on(&format!("gpu{number}"), (number % 2) as i64));
    let envs = [("GPUS".to_owned(), "{ids}".to_owned())].into();
    let answer = Answer {
        envs,
        ..Answer::default()
    };
    Script {
        answer,
        ..Script::new(root, GPU, devices.collect())
    }
}

#[test]
fn plugins_get_in_through_every_door() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let device = || vec![Device::new("a"), Device::new("b")];
    let of = |resource: &str, door, api| Script {
        door,
        api,
        ..Script::new(root.path(), resource, device())
    };
    let scripts = [
        of("acme.com/kubelet", Door::Kubelet, Api::V1beta1),
        of("acme.com/registry", Door::Registry, Api::V1beta1),
        of("acme.com/elsewhere", Door::RegistryWithEndpoint, Api::V1beta1),
        of("acme.com/old", Door::Kubelet, Api::V1alpha2),
    ];

    let mut plugins: Vec<Plugin> = scripts.iter().map(Plugin::registered).collect();

    for script in &scripts {
        daemon.until_capacity(&script.resource, 2);
        let pod = script.resource.split('/').next_back().unwrap();
        assert_eq!(daemon.admit(pod, &format!("{}=2", script.resource)), ["a", "b"]);
    }
    for plugin in &mut plugins {
        assert_eq!(plugin.called("Allocate"), ["a", "b"]);
    }
    assert_eq!(items(&daemon.json(&["get", "plugins"])).len(), 4);
}

#[test]
fn a_plugin_that_takes_the_path_of_one_that_ended_is_not_taken_for_it() {
    let root = root();
    let (daemon, log) = Daemon::logged(root.path(), &[]);
    let of = |resource: &str| Script {
        socket: "shared.sock".into(),
        ..Script::new(root.path(), resource, vec![Device::new("a")])
    };
    let ended = Plugin::registered(&of(GPU));
    daemon.until_capacity(GPU, 1);
    ended.kill();
    let _other = Plugin::registered(&of("acme.com/nic"));
    daemon.until_capacity("acme.com/nic", 1);

    let said = log.until(&["device plugin gone resource", "device plugin reconnected"]);
    assert!(
        said.contains("device plugin gone") && said.contains(GPU),
        "{said}"
    );
    let plugins = daemon.json(&["get", "plugins"]);
    let resources: Vec<_> = items(&plugins)
        .iter()
        .map(|each| each["resource"].clone())
        .collect();
    assert_eq!(resources, ["acme.com/nic"]);
}

#[test]
fn a_pod_is_admitted_shown_started_and_removed() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let answer = Answer {
        envs: [("GPUS".to_owned(), "{ids}".to_owned())].into(),
        mounts: vec![Mount {
            container_path: "/usr/acme".into(),
            host_path: "/opt/acme".into(),
            read_only: true,
        }],
        device_nodes: vec![DeviceNode {
            container_path: "/dev/gpu".into(),
            host_path: "/dev/null".into(),
            permissions: "rw".into(),
        }],
        annotations: [
            ("acme.com/x", "1"),
            ("cdi.k8s.io/acme", "acme.com/gpu=all,acme.com/gpu=noted"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
        cdi_devices: vec!["acme.com/gpu=all".into()],
        unknown_field: Some("from the future".into()),
    };
    let options = Options {
        pre_start: true,
        preferred: true,
    };
    let mut plugin = Plugin::registered(&Script {
        answer,
        options,
        ..gpus(root.path(), 4)
    });
    daemon.until_capacity(GPU, 4);

    let pod = daemon.json(&["admit", "--name", "job1", "--limit", "acme.com/gpu=2"]);

    assert_eq!(pod["pod"]["name"], "job1");
    // The plugin prefers the last ones.
    assert_eq!(
        pod["containers"][0]["devices"],
        json!([{"resource": GPU, "ids": ["gpu2", "gpu3"]}])
    );
    assert_eq!(pod["containers"][0]["envs"], json!({"GPUS": "gpu2,gpu3"}));
    assert_eq!(pod["containers"][0]["cdiDevices"], json!(["acme.com/gpu=all"]));
    assert_eq!(plugin.called("Allocate"), ["gpu2", "gpu3"]);
    assert!(!plugin.was_called("PreStartContainer"));

    let options = daemon.run(&["options", "job1", "--format", "podman"]);
    assert!(options.status.success(), "{}", stderr(&options));
    assert_eq!(plugin.called("PreStartContainer"), ["gpu2", "gpu3"]);
    for part in [
        "GPUS=gpu2,gpu3",
        "/dev/null:/dev/gpu:rw",
        "/opt/acme",
        "--device=acme.com/gpu=all",
        "--device=acme.com/gpu=noted",
    ] {
        assert!(stdout(&options).contains(part), "{part}: {}", stdout(&options));
    }

    let spec = root.path().join("config.json");
    std::fs::write(
        &spec,
        r#"{"future": 12345678901234567890123, "annotations": {"x": "1"}}"#,
    )
    .unwrap();
    let cdi = root.path().join("cdi");
    std::fs::create_dir(&cdi).unwrap();
    let device = |name: &str, env: &str| json!({"name": name, "containerEdits": {"env": [env]}});
    let devices = [device("all", "CDI=1"), device("noted", "NOTED=1")];
    let acme = json!({"cdiVersion": "0.5.0", "kind": "acme.com/gpu", "devices": devices});
    std::fs::write(cdi.join("acme.json"), acme.to_string()).unwrap();
    let oci = ["options", "job1", "--no-start", "--format", "oci", "--oci-spec"].map(str::to_owned);
    let rest = [&spec, Path::new("--cdi-dir"), &cdi].map(|path| path.to_str().unwrap().to_owned());
    let oci: Vec<&str> = oci.iter().chain(&rest).map(String::as_str).collect();
    let oci = daemon.run(&oci);
    assert!(oci.status.success(), "{}", stderr(&oci));
    for part in [
        r#""future": 12345678901234567890123"#,
        r#""acme.com/x": "1""#,
        r#""x": "1""#,
        "GPUS=gpu2,gpu3",
        "CDI=1",
        "NOTED=1",
    ] {
        assert!(stdout(&oci).contains(part), "{part}: {}", stdout(&oci));
    }

    assert!(daemon.run(&["remove", "job1"]).status.success());
    assert!(daemon.refused(&["options", "job1"]).contains("job1"));
    assert_eq!(daemon.admit("job2", "acme.com/gpu=4").len(), 4);
}

#[test]
fn a_pod_waits_for_its_plugin_and_gets_in_when_it_comes() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut admit = daemon.command(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=1",
        "-o",
        "json",
    ]);
    let admit = admit.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiting = admit.spawn().unwrap();
    let mut said = std::io::BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    assert!(line.contains("waiting for") && line.contains(GPU), "{line}");

    let _plugin = Plugin::registered(&gpus(root.path(), 1));

    let admitted = waiting.wait_with_output().unwrap();
    assert!(admitted.status.success());
    assert_eq!(ids(&serde_json::from_slice(&admitted.stdout).unwrap()), ["gpu0"]);
}

#[test]
fn a_plugin_that_never_comes_is_named_when_time_is_up() {
    let root = root();
    let daemon = Daemon::on(root.path());
    Plugin::registered(&gpus(root.path(), 1)).exit();
    daemon.until_gone(GPU);
    for (limit, wanted) in [
        ("acme.com/gpu=1", "acme.com_gpu.sock and is gone since 2"),
        ("acme.com/fpga=1", "acme.com/fpga"),
    ] {
        let refused = daemon.refused(&["admit", "--name", "job1", "--limit", limit, "--wait", "100ms"]);
        assert!(refused.contains(wanted), "{refused}");
    }
}

#[test]
fn too_few_devices_fail_at_once() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    daemon.admit("job1", "acme.com/gpu=1");

    let refused = daemon.refused(&[
        "admit",
        "--name",
        "job2",
        "--limit",
        "acme.com/gpu=2",
        "--wait",
        "1h",
    ]);

    assert!(refused.contains("2 acme.com/gpu requested, 1 free"), "{refused}");
    plugin.called("Allocate");
    assert!(
        !plugin.was_called("Allocate"),
        "the plugin was asked for what it does not have"
    );
}

#[test]
fn a_plugin_that_hangs_disturbs_nobody_elses_pods() {
    let root = root();
    let daemon = Daemon::configured(
        root.path(),
        "deadlines: {allocateByResource: {acme.com/hung: 1s}}",
    );
    let hung = Script::new(root.path(), "acme.com/hung", vec![Device::new("a")]);
    let mut hung = Plugin::registered(&hung.with_fault("Allocate", Fault::Hang));
    let _good = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity("acme.com/hung", 1);
    daemon.until_capacity(GPU, 2);
    let mut admit = daemon.command(&["admit", "--name", "stuck", "--limit", "acme.com/hung=1"]);
    let stuck = admit
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    hung.called("Allocate");

    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);

    let stuck = stuck.wait_with_output().unwrap();
    assert_eq!(stuck.status.code(), Some(1));
    assert!(
        stderr(&stuck).contains("Allocate was not answered within 1 s"),
        "{}",
        stderr(&stuck)
    );
    // The refused pod has left nothing behind.
    hung.fault("Allocate", None);
    assert_eq!(daemon.admit("free", "acme.com/hung=1"), ["a"]);
}

#[test]
fn a_plugin_that_refuses_leaves_the_devices_free() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let refuse = Fault::Refuse {
        code: 13,
        message: "out of order".into(),
    };
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", refuse));
    daemon.until_capacity(GPU, 1);
    let refused = daemon.refused(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    assert!(refused.contains("out of order"), "{refused}");
    // The plugin runs and has refused: the pod does not wait for another one.
    plugin.fault(
        "Allocate",
        Some(&Fault::Refuse {
            code: 14,
            message: "try later".into(),
        }),
    );
    let refused = daemon.refused(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=1",
        "--wait",
        "1h",
    ]);
    assert!(refused.contains("try later"), "{refused}");
    plugin.fault("Allocate", Some(&Fault::NoContainers));
    let refused = daemon.refused(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    assert!(
        refused.contains("does not contain a response for the container"),
        "{refused}"
    );
    plugin.fault("Allocate", None);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
}

#[test]
fn an_answer_that_no_runtime_can_carry_out_is_refused_with_the_plugin_named() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let node = |permissions: &str| DeviceNode {
        container_path: String::new(),
        host_path: "/dev/null".into(),
        permissions: permissions.into(),
    };
    let bad = Script {
        answer: Answer {
            device_nodes: vec![node("zzz")],
            ..Answer::default()
        },
        ..gpus(root.path(), 1)
    };
    // A kubelet and its runtime accept this: the host path is used, and all access is permitted.
    let good = Script {
        answer: Answer {
            device_nodes: vec![node("")],
            ..Answer::default()
        },
        socket: "good.sock".into(),
        resource: "acme.com/nic".into(),
        ..gpus(root.path(), 1)
    };
    let _plugins = [bad, good].map(|script| Plugin::registered(&script));
    daemon.until_capacity(GPU, 1);
    daemon.until_capacity("acme.com/nic", 1);

    let refused = daemon.refused(&["admit", "--name", "bad", "--limit", "acme.com/gpu=1"]);

    let named = ["acme.com/gpu", "acme.com_gpu.sock", "\"/dev/null\"", "\"zzz\""];
    assert!(named.iter().all(|part| refused.contains(part)), "{refused}");
    daemon.admit("good", "acme.com/nic=1");
    let options = daemon.run(&["options", "good", "--format", "docker"]);
    assert_eq!(stdout(&options), "--device=/dev/null:/dev/null:rwm\n");
}

#[test]
fn a_plugin_that_dies_under_the_call_is_waited_for() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", Fault::Die));
    daemon.until_capacity(GPU, 1);
    let mut admit = daemon.command(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=1",
        "-o",
        "json",
    ]);
    let admit = admit.stdout(Stdio::piped()).stderr(Stdio::piped());
    let waiting = admit.spawn().unwrap();
    plugin.died();

    let _next = Plugin::registered(&gpus(root.path(), 1));

    let admitted = waiting.wait_with_output().unwrap();
    assert!(admitted.status.success());
    assert_eq!(ids(&serde_json::from_slice(&admitted.stdout).unwrap()), ["gpu0"]);
}

#[test]
fn a_device_that_vanishes_under_the_call_is_replaced() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin =
        Plugin::registered(&gpus(root.path(), 2).with_fault("Allocate", Fault::DropDevice("gpu0".into())));
    daemon.until_capacity(GPU, 2);
    let mut admit = daemon.command(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=1",
        "-o",
        "json",
    ]);
    let admit = admit.stdout(Stdio::piped()).stderr(Stdio::piped());
    let waiting = admit.spawn().unwrap();
    assert_eq!(plugin.called("Allocate"), ["gpu0"]);
    daemon.until_capacity(GPU, 1);
    plugin.fault("Allocate", None);
    plugin.command("proceed");
    assert_eq!(plugin.called("Allocate"), ["gpu1"]);
    let admitted = waiting.wait_with_output().unwrap();
    assert_eq!(ids(&serde_json::from_slice(&admitted.stdout).unwrap()), ["gpu1"]);
}

#[test]
fn assignments_survive_a_killed_daemon_and_are_given_again_at_once() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let plugin = Plugin::registered(&gpus(root.path(), 4));
    daemon.until_capacity(GPU, 4);
    let got = daemon.admit("job1", "acme.com/gpu=3");
    daemon.kill();
    plugin.kill();

    let daemon = Daemon::on(root.path());

    assert!(daemon.banner.contains("1 pod from before"), "{}", daemon.banner);
    // No plugin runs, and the pod does not need one.
    let again = daemon.json(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=3",
        "--wait",
        "0s",
    ]);
    assert_eq!(ids(&again), got);
    assert_eq!(again["containers"][0]["envs"]["GPUS"], got.join(","));
    let mut plugin = Plugin::registered(&gpus(root.path(), 4));
    daemon.until_capacity(GPU, 4);
    assert!(
        daemon
            .refused(&["admit", "--name", "job2", "--limit", "acme.com/gpu=2"])
            .contains("1 free")
    );
    let rest = daemon.admit("job2", "acme.com/gpu=1");
    assert!(!got.contains(&rest[0]), "{rest:?} is held twice");
    assert_eq!(plugin.called("Allocate"), rest);
}

#[test]
fn a_restarted_plugin_finds_its_devices_still_assigned() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    let got = daemon.admit("job1", "acme.com/gpu=1");
    plugin.exit();
    daemon.until_gone(GPU);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), got);

    let _plugin = Plugin::registered(&gpus(root.path(), 2));

    daemon.until_capacity(GPU, 2);
    let rest = daemon.admit("job2", "acme.com/gpu=1");
    assert_ne!(rest, got);
}

#[test]
fn health_changes_are_seen() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    plugin.health("gpu0", "Unhealthy");
    daemon.until("resources", |list| items(list)[0]["allocatable"] == 1);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu1"]);
    plugin.list(&[Device::new("gpu0"), Device::new("gpu1"), Device::new("gpu2")]);
    daemon.until_capacity(GPU, 3);
}

#[test]
fn trouble_with_devices_that_pods_hold_is_logged_and_a_problem_until_it_is_over() {
    let root = root();
    // As with --sample.
    let (daemon, log) = Daemon::logged(root.path(), &["--log-level", "warn"]);
    let mut plugin = Plugin::registered(&gpus(root.path(), 3));
    daemon.until_capacity(GPU, 3);
    daemon.admit("job", "acme.com/gpu=2");
    let problems = || -> Vec<String> {
        let status = daemon.json(&["status"]);
        assert_eq!(status["ready"], true);
        let problems = status["problems"].as_array().unwrap().iter();
        problems
            .map(|each| each["what"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(problems(), [""; 0]);

    plugin.health("gpu0", "Unhealthy");
    let line = log.until(&["held devices unhealthy"]);
    assert!(
        line.contains("WARN") && line.contains("gpu0") && line.contains("default/job"),
        "{line}"
    );
    let found = problems();
    let expected = "1 device of acme.com/gpu that a pod holds is unhealthy: gpu0 (held by default/job (";
    assert!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");

    plugin.list(&[Device::new("gpu1")]);
    log.until(&["held devices no longer listed"]);
    daemon.until_capacity(GPU, 1);
    let found = problems();
    assert!(
        found[0].contains("2 devices of acme.com/gpu that pods hold are no longer listed"),
        "{found:?}"
    );

    plugin.exit();
    log.until(&["device plugin gone while pods hold its devices"]);
    let found = problems();
    let parts = [
        "no device plugin serves 2 devices",
        "gpu0, gpu2",
        "acme.com_gpu.sock until 20",
    ];
    assert!(
        found.len() == 1 && parts.iter().all(|part| found[0].contains(part)),
        "{found:?}"
    );

    let _plugin = Plugin::registered(&gpus(root.path(), 3));
    daemon.until_capacity(GPU, 3);
    assert_eq!(problems(), [""; 0]);
}

#[test]
fn a_caller_that_leaves_leaves_nothing_behind() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", Fault::Hang));
    daemon.until_capacity(GPU, 1);
    let mut admit = daemon.command(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::null());
    let mut leaver = admit.spawn().unwrap();
    plugin.called("Allocate");
    leaver.kill().unwrap();
    leaver.wait().unwrap();
    daemon.until("resources", |list| items(list)[0]["held"] == 0);
    plugin.fault("Allocate", None);
    assert_eq!(daemon.admit("job2", "acme.com/gpu=1"), ["gpu0"]);
}

#[test]
fn resources_of_others_are_passed_over() {
    let root = root();
    let daemon = Daemon::configured(root.path(), "foreign: [other.org/*]\nwait: 100ms");
    let pod = daemon.json(&["admit", "--name", "job1", "--limit", "other.org/thing=1"]);
    assert_eq!(pod["containers"][0]["devices"], json!([]));
    daemon.refused(&["admit", "--name", "job2", "--limit", "acme.com/gpu=1"]);
}

#[test]
fn a_plugin_with_a_bad_name_is_refused_in_the_kubelets_words() {
    let root = root();
    let _daemon = Daemon::on(root.path());
    let mut plugin = Plugin::start(&Script {
        socket: "x.sock".into(),
        ..Script::new(root.path(), "gpu", vec![Device::new("a")])
    });
    assert_eq!(plugin.refused(), r#"the ResourceName "gpu" is invalid"#);
}

#[test]
fn a_rejected_plugin_is_logged_once_and_listed_with_its_reason_until_it_registers() {
    let root = root();
    let (daemon, log) = Daemon::logged(root.path(), &[]);
    let broken = Fault::Refuse {
        code: 13,
        message: "broken".into(),
    };
    let mut plugin = Plugin::start(&gpus(root.path(), 1).with_fault("GetDevicePluginOptions", broken));
    assert!(plugin.refused().contains("broken"));
    let line = log.until(&["device plugin rejected"]);
    let user = rustix::process::getuid().as_raw();
    for part in [
        "WARN",
        "resource=\"acme.com/gpu\"",
        &format!("uid={user}"),
        "pid=",
        "broken",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let mut invalid = Plugin::start(&Script {
        socket: "x.sock".into(),
        ..Script::new(root.path(), "gpu", vec![Device::new("a")])
    });
    invalid.refused();
    assert!(
        log.until(&["device plugin rejected"])
            .contains("resource=\"gpu\"")
    );
    let found = Script {
        door: Door::Registry,
        ..Script::new(root.path(), "no-slash", vec![Device::new("a")])
    };
    let mut found = Plugin::start(&found);
    found.refused();
    assert!(
        log.until(&["device plugin rejected"])
            .contains("resource=\"no-slash\"")
    );

    let rejected = |list: &Value| -> Vec<String> {
        let plugins = items(list);
        let rejected = plugins.iter().filter(|each| !each["rejection"].is_null());
        rejected
            .map(|each| each["resource"].as_str().unwrap().to_owned())
            .collect()
    };
    let plugins = daemon.json(&["get", "plugins"]);
    assert_eq!(rejected(&plugins), [GPU, "gpu", "no-slash"]);
    let table = stdout(&daemon.run(&["get", "plugins"]));
    let row = table.lines().find(|line| line.contains("x.sock")).unwrap();
    assert!(row.contains("rejected") && row.contains("is invalid"), "{table}");
    let status = daemon.json(&["status"]);
    let problem = status["problems"][0]["what"].as_str().unwrap();
    assert_eq!(
        problem,
        "3 device plugins were rejected: acme.com/gpu, gpu, no-slash"
    );
    assert_eq!(status["ready"], true);

    plugin.fault("GetDevicePluginOptions", None);
    plugin.command("register");
    plugin.until(&Event::Registered);

    assert_eq!(rejected(&daemon.json(&["get", "plugins"])), ["gpu", "no-slash"]);
}

#[test]
fn stopping_does_not_wait_for_plugins_or_watchers() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", Fault::Hang));
    daemon.until_capacity(GPU, 1);
    let mut watch = daemon.command(&["get", "pods", "--watch", "-o", "json"]);
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut lines = std::io::BufReader::new(watch.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
    let mut admit = daemon.command(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::null());
    let mut admit = admit.spawn().unwrap();
    plugin.called("Allocate");

    let started = std::time::Instant::now();
    assert_eq!(daemon.stop(), Some(0));

    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    assert!(!admit.wait().unwrap().success());
    // The watch waits for the daemon to come back.
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn a_list_that_a_kubelet_would_cut_off_is_read() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1));
    // Over 4 MiB, the limit of grpc-go.
    let padding = "x".repeat(100);
    let devices: Vec<Device> = (0..50_000)
        .map(|number| Device::on(&format!("{padding}-{number:05}"), number % 2))
        .collect();
    plugin.list(&devices);
    daemon.until("resources", |list| items(list)[0]["capacity"] == 50_000);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1000").len(), 1000);
}

/// The record of a pod does not contain the options of the plugin that serves now.
#[test]
fn the_plugin_that_serves_says_whether_it_wants_to_know_of_a_start() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let wanting = |pre_start| Script {
        options: Options {
            pre_start,
            preferred: false,
        },
        ..gpus(root.path(), 2)
    };
    let start = |daemon: &Daemon, pod: &str| {
        let options = daemon.run(&["options", pod]);
        assert!(options.status.success(), "{}", stderr(&options));
    };
    let plugin = Plugin::registered(&wanting(false));
    daemon.until_capacity(GPU, 2);
    daemon.admit("first", "acme.com/gpu=1");
    plugin.exit();

    let mut plugin = Plugin::registered(&wanting(true));
    daemon.until_capacity(GPU, 2);
    daemon.admit("second", "acme.com/gpu=1");
    start(&daemon, "first");
    assert_eq!(plugin.called("PreStartContainer"), ["gpu0"]);
    plugin.exit();

    let plugin = Plugin::registered(&wanting(false).with_fault("PreStartContainer", Fault::Hang));
    daemon.until_capacity(GPU, 2);
    start(&daemon, "second");
    plugin.exit();
    assert_eq!(daemon.stop(), Some(0));

    // A kubelet's file does not contain them either.
    std::fs::remove_dir_all(root.path().join("devlet")).unwrap();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&wanting(true));
    daemon.until_capacity(GPU, 2);
    start(
        &daemon,
        daemon.json(&["get", "pods"])["pods"][0]["uid"].as_str().unwrap(),
    );
    assert_eq!(plugin.called("PreStartContainer").len(), 1);
}

#[test]
fn a_rejection_is_recorded_although_the_caller_gave_up_before() {
    let root = root();
    let config = root.path().join("config.yaml");
    std::fs::write(&config, "deadlines: {dial: 500ms}").unwrap();
    let (daemon, log) = Daemon::logged(root.path(), &["--config", config.to_str().unwrap()]);
    // It accepts connections and does not answer.
    let socket = root.path().join("device-plugins/silent.sock");
    let silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let plugin = Plugin::start(&Script {
        door: Door::Claim,
        socket: "silent.sock".into(),
        ..gpus(root.path(), 1)
    });
    let dialed = silent.accept().unwrap();
    plugin.kill();

    let line = log.until(&["device plugin rejected"]);
    assert!(line.contains("silent.sock"), "{line}");
    let plugins = daemon.json(&["get", "plugins"]);
    assert_eq!(items(&plugins)[0]["resource"], GPU);
    drop(dialed);
}

#[test]
fn device_nodes_and_mounts_are_shown_as_runtimes_use_them() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let node = |container_path: &str, permissions: &str| DeviceNode {
        container_path: container_path.into(),
        host_path: "/dev/null".into(),
        permissions: permissions.into(),
    };
    let answer = Answer {
        device_nodes: vec![node("", ""), node("dev/x", "r")],
        mounts: vec![Mount {
            container_path: "opt/acme".into(),
            host_path: "/tmp".into(),
            read_only: true,
        }],
        ..Answer::default()
    };
    let script = Script {
        answer,
        ..gpus(root.path(), 1)
    };
    let _plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 1);
    daemon.admit("job", "acme.com/gpu=1");
    let described = stdout(&daemon.run(&["describe", "pod", "job"]));
    for part in [
        "/dev/null -> /dev/null (rwm)",
        "/dev/null -> /dev/x (r)",
        "/tmp -> /opt/acme (ro)",
    ] {
        assert!(described.contains(part), "{described}");
    }
    let options = stdout(&daemon.run(&["options", "job", "--format", "podman"]));
    assert_eq!(
        options.trim_end(),
        "--device=/dev/null:/dev/null:rwm --device=/dev/null:/dev/x:r \
         --mount=type=bind,source=/tmp,target=/opt/acme,readonly"
    );
}
