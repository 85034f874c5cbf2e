//! Device plugins and pods on the built binary: registration, admission, and restarts of everybody.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Daemon, ids, items, root, stderr, stdout};
use devlet_testkit::{Answer, Api, Device, DeviceNode, Door, Fault, Mount, Options, Plugin, Script};
use serde_json::json;

devlet_testkit::plugin_process!();

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

    let said = log.until(&["device plugin is gone for good", "device plugin connected again"]);
    assert!(said.contains("is gone for good") && said.contains(GPU), "{said}");
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
        annotations: [("acme.com/x".to_owned(), "1".to_owned())].into(),
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
    // The plugin advises the last ones.
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
        "acme.com/gpu=all",
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
    let acme = r#"{"cdiVersion": "0.5.0", "kind": "acme.com/gpu", "devices": [{"name": "all", "containerEdits": {"env": ["CDI=1"]}}]}"#;
    std::fs::write(cdi.join("acme.json"), acme).unwrap();
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
    let admit = admit
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
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
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
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
    // Nothing of it is left behind.
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
    // It is there, and says so itself: there is nothing to wait for.
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
    assert!(refused.contains("answered for no container"), "{refused}");
    plugin.fault("Allocate", None);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
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
    let waiting = admit.stdout(std::process::Stdio::piped()).spawn().unwrap();
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
    let waiting = admit.stdout(std::process::Stdio::piped()).spawn().unwrap();
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
    // No plugin is there, and none is needed.
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
fn a_caller_that_leaves_leaves_nothing_behind() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", Fault::Hang));
    daemon.until_capacity(GPU, 1);
    let mut admit = daemon.command(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    let mut leaver = admit.stderr(std::process::Stdio::null()).spawn().unwrap();
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
fn stopping_does_not_wait_for_plugins_or_watchers() {
    let root = root();
    let daemon = Daemon::configured(root.path(), "limits: {drain: 10s}");
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", Fault::Hang));
    daemon.until_capacity(GPU, 1);
    let mut watch = daemon.command(&["get", "pods", "--watch", "-o", "json"]);
    let mut watch = watch
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut lines = std::io::BufReader::new(watch.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
    let mut admit = daemon.command(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
    let mut admit = admit.stderr(std::process::Stdio::null()).spawn().unwrap();
    plugin.called("Allocate");

    let started = std::time::Instant::now();
    assert_eq!(daemon.stop(), Some(0));

    assert!(
        started.elapsed() < Duration::from_secs(8),
        "{:?}",
        started.elapsed()
    );
    assert!(!admit.wait().unwrap().success());
    watch.wait().unwrap();
}

#[test]
fn a_list_that_a_kubelet_would_cut_off_is_read() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1));
    // Over 4 MiB, which is where grpc-go stops.
    let padding = "x".repeat(100);
    let devices: Vec<Device> = (0..50_000)
        .map(|number| Device::on(&format!("{padding}-{number:05}"), number % 2))
        .collect();
    plugin.list(&devices);
    daemon.until("resources", |list| items(list)[0]["capacity"] == 50_000);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1000").len(), 1000);
}

/// What is on disk of a pod does not say what its plugin of today wants.
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

    // A kubelet's file does not say either.
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
