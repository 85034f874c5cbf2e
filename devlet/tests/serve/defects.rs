//! Known defects of the kubelet that devlet does not have.

use std::path::Path;
use std::process::{Child, Output, Stdio};

use devlet_testkit::{Device, Door, Event, Fault, Options, Plugin, Script};
use serde_json::Value;

use crate::common::{Daemon, ids, items, root, stderr};

const GPU: &str = "acme.com/gpu";

fn gpus(root: &Path, count: usize) -> Script {
    let devices = (0..count).map(|number| Device::on(&format!("gpu{number}"), (number % 2) as i64));
    Script::new(root, GPU, devices.collect())
}

/// Starts an admission.
fn admitting(daemon: &Daemon, name: &str, limit: &str) -> Child {
    let mut admit = daemon.command(&["admit", "--name", name, "--limit", limit, "-o", "json"]);
    let admit = admit.stdout(Stdio::piped()).stderr(Stdio::piped());
    admit.spawn().unwrap()
}

fn admitted(admission: Child) -> Vec<String> {
    let output: Output = admission.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    ids(&serde_json::from_slice(&output.stdout).unwrap())
}

fn resource(list: &Value) -> Value {
    let all = items(list);
    all.into_iter()
        .find(|each| each["name"] == GPU)
        .unwrap_or_default()
}

#[test]
fn a_plugin_that_registers_again_replaces_itself_and_its_death_is_noticed() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    for _ in 0..3 {
        plugin.command("register");
        plugin.until(&Event::Registered);
        plugin.until_list_of(2);
    }
    assert_eq!(items(&daemon.json(&["get", "plugins"])).len(), 1);
    // Its changes still arrive.
    plugin.list(&[Device::new("gpu0"), Device::new("gpu1"), Device::new("gpu2")]);
    daemon.until_capacity(GPU, 3);
    // The daemon notices its end.
    plugin.kill();
    daemon.until_gone(GPU);
    assert_eq!(items(&daemon.json(&["get", "plugins"])).len(), 0);
    // The next plugin can use its path.
    let mut next = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
    assert_eq!(next.called("Allocate"), ["gpu0"]);
}

#[test]
fn a_new_instance_takes_over_the_path_of_one_that_lives() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut old = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);

    let mut new = Plugin::registered(&gpus(root.path(), 3));

    daemon.until_capacity(GPU, 3);
    // The old one still serves, without callers.
    old.command(r#"list [{"id":"old"}]"#);
    old.kill();
    assert_eq!(daemon.admit("job1", "acme.com/gpu=3").len(), 3);
    assert_eq!(new.called("Allocate").len(), 3);
    assert_eq!(items(&daemon.json(&["get", "plugins"])).len(), 1);
    new.kill();
    daemon.until_gone(GPU);
}

#[test]
fn a_held_device_that_vanishes_neither_crashes_nor_unseats_its_pod() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);

    plugin.list(&[Device::on("gpu1", 1)]);

    daemon.until_capacity(GPU, 1);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
    assert_eq!(daemon.admit("job2", "acme.com/gpu=1"), ["gpu1"]);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn the_last_device_that_vanishes_under_the_call_refuses_the_pod_and_nothing_else() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let gone = Fault::DropDevice("gpu0".into());
    let mut plugin = Plugin::registered(&gpus(root.path(), 1).with_fault("Allocate", gone));
    daemon.until_capacity(GPU, 1);
    let admission = admitting(&daemon, "job1", "acme.com/gpu=1");
    plugin.called("Allocate");
    daemon.until_capacity(GPU, 0);
    plugin.fault("Allocate", None);
    plugin.command("proceed");

    let refused = admission.wait_with_output().unwrap();

    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("1 acme.com/gpu requested, 0 free"),
        "{}",
        stderr(&refused)
    );
    plugin.list(&[Device::on("gpu0", 0)]);
    daemon.until_capacity(GPU, 1);
    assert_eq!(daemon.admit("job2", "acme.com/gpu=1"), ["gpu0"]);
}

#[test]
fn a_holder_with_an_init_container_is_admitted_again_while_its_plugin_is_late() {
    let root = root();
    let manifest = root.path().join("pod.yaml");
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: job1}\nspec:\n  initContainers:\n  - name: prepare\n    \
                resources: {limits: {acme.com/gpu: 1}}\n  containers:\n  - name: main\n    resources: {limits: \
                {acme.com/gpu: 2}}\n";
    std::fs::write(&manifest, text).unwrap();
    let again = ["admit", "-f", manifest.to_str().unwrap(), "--wait", "0s"];
    let daemon = Daemon::on(root.path());
    let plugin = Plugin::registered(&gpus(root.path(), 3));
    daemon.until_capacity(GPU, 3);
    let first = daemon.json(&again[..3]);
    plugin.kill();
    daemon.kill();

    let daemon = Daemon::on(root.path());

    assert_eq!(daemon.json(&again)["containers"], first["containers"]);
}

#[test]
fn failed_calls_leave_nothing_allocated() {
    let root = root();
    let daemon = Daemon::configured(root.path(), "deadlines: {preferred: 1s, allocate: 1s}");
    let options = Options {
        preferred: true,
        pre_start: false,
    };
    let mut plugin = Plugin::registered(&Script {
        options,
        ..gpus(root.path(), 3)
    });
    daemon.until_capacity(GPU, 3);
    let broken = Fault::Refuse {
        code: 13,
        message: "broken".into(),
    };
    for fault in [Fault::NoContainers, broken.clone(), Fault::Hang] {
        plugin.fault("Allocate", Some(&fault));
        daemon.refused(&["admit", "--name", "job1", "--limit", "acme.com/gpu=1"]);
        plugin.called("GetPreferredAllocation");
        let now = resource(&daemon.json(&["get", "resources"]));
        assert_eq!((&now["held"], &now["free"]), (&0.into(), &3.into()), "{fault:?}");
    }
    plugin.fault("Allocate", None);
    // Advice is optional, and each device is taken once.
    for (pod, fault) in [("job1", broken), ("job2", Fault::Hang)] {
        plugin.fault("GetPreferredAllocation", Some(&fault));
        daemon.admit(pod, "acme.com/gpu=1");
        plugin.called("GetPreferredAllocation");
    }
    let now = resource(&daemon.json(&["get", "resources"]));
    assert_eq!((&now["held"], &now["free"]), (&2.into(), &1.into()));
    for pod in ["job1", "job2"] {
        assert!(daemon.run(&["remove", pod]).status.success());
    }
    assert_eq!(daemon.admit("job3", "acme.com/gpu=3").len(), 3);
}

#[test]
fn a_plugin_that_hangs_in_any_call_holds_nobody_else_up() {
    let root = root();
    // No deadline helps here: a pod of the hung plugin would wait for an hour.
    let config = "deadlines: {options: 1h, preferred: 1h, allocate: 1h, preStart: 1h, info: 1h, notify: 1h}";
    let daemon = Daemon::configured(root.path(), config);
    let _good = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    let hung = |name: &str, method: &str| {
        let options = Options {
            preferred: method == "GetPreferredAllocation",
            pre_start: method == "PreStartContainer",
        };
        let door = match method {
            "GetInfo" | "NotifyRegistrationStatus" => Door::Registry,
            _ => Door::Kubelet,
        };
        let devices = vec![Device::new("a"), Device::new("b")];
        let script = Script {
            options,
            door,
            ..Script::new(root.path(), &format!("acme.com/{name}"), devices)
        };
        Plugin::start(&script.with_fault(method, Fault::Hang))
    };
    let mut stuck = Vec::new();
    let mut plugins = Vec::new();
    for (name, method) in [
        ("options", "GetDevicePluginOptions"),
        ("list", "ListAndWatch"),
        ("preferred", "GetPreferredAllocation"),
        ("allocate", "Allocate"),
        ("start", "PreStartContainer"),
        ("info", "GetInfo"),
        ("notify", "NotifyRegistrationStatus"),
    ] {
        let mut plugin = hung(name, method);
        let limit = format!("acme.com/{name}=1");
        match method {
            "GetPreferredAllocation" | "Allocate" => stuck.push(admitting(&daemon, name, &limit)),
            "PreStartContainer" => {
                assert_eq!(admitted(admitting(&daemon, name, &limit)).len(), 1);
                let mut start = daemon.command(&["options", name]);
                stuck.push(start.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
            }
            _ => {}
        }
        plugin.called(method);

        assert_eq!(daemon.admit("job", "acme.com/gpu=1"), ["gpu0"], "{method}");
        assert!(daemon.run(&["options", "job"]).status.success(), "{method}");
        assert!(daemon.run(&["remove", "job"]).status.success(), "{method}");
        plugins.push(plugin);
    }
    // It does not prevent another plugin from registering.
    let _late = Plugin::registered(&Script::new(root.path(), "acme.com/late", vec![Device::new("a")]));
    daemon.until_capacity("acme.com/late", 1);
    for mut each in stuck {
        assert!(each.try_wait().unwrap().is_none(), "it did not hang");
        each.kill().unwrap();
        each.wait().unwrap();
    }
}

#[test]
fn of_two_plugins_the_one_that_knows_the_device_is_called() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let named = |socket: &str, ids: &[&str]| Script {
        socket: socket.into(),
        ..Script::new(root.path(), GPU, ids.iter().map(|id| Device::new(id)).collect())
    };
    let mut survivor = Plugin::registered(&named("survivor.sock", &["a", "b"]));
    daemon.until_capacity(GPU, 2);
    let mut leaver = Plugin::registered(&named("leaver.sock", &["z"]));
    daemon.until_capacity(GPU, 1);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["z"]);
    assert_eq!(leaver.called("Allocate"), ["z"]);

    leaver.exit();

    // No list comes, and the call does not need one.
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job2", "acme.com/gpu=2"), ["a", "b"]);
    assert_eq!(survivor.called("Allocate"), ["a", "b"]);
}

#[test]
fn a_list_with_a_device_twice_counts_it_once() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let sick = Device {
        health: "Unhealthy".into(),
        ..Device::new("a")
    };
    let devices = vec![Device::new("a"), Device::new("b"), sick];
    let _plugin = Plugin::registered(&Script::new(root.path(), GPU, devices));
    let now = daemon.until("resources", |list| resource(list)["capacity"] == 2);
    assert_eq!(resource(&now)["allocatable"], 1);
}

#[test]
fn an_endpoint_that_leads_elsewhere_is_refused() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let outside = root.path().join("outside.sock");
    let outside = outside.to_str().unwrap();
    for endpoint in ["../outside.sock", "sub/../x.sock", "./x.sock", "..", outside] {
        let mut plugin = Plugin::start(&Script {
            door: Door::Claim,
            socket: endpoint.into(),
            ..gpus(root.path(), 1)
        });
        let said = plugin.refused();
        assert!(
            said.contains("is not the plain name of a socket"),
            "{endpoint}: {said}"
        );
    }
    let plugins = items(&daemon.json(&["get", "plugins"]));
    assert!(
        plugins.iter().all(|each| !each["rejection"].is_null()),
        "{plugins:?}"
    );
}

#[test]
fn a_limit_of_zero_needs_no_plugin() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let manifest = root.path().join("pod.yaml");
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: job1}, spec: {containers: \
               [{name: main, resources: {limits: {acme.com/gpu: 0}}}]}}";
    std::fs::write(&manifest, pod).unwrap();
    let pod = daemon.json(&["admit", "-f", manifest.to_str().unwrap(), "--wait", "0s"]);
    assert_eq!(pod["containers"][0]["devices"], serde_json::json!([]));
}

#[test]
fn a_stream_that_fails_at_once_is_asked_again_and_counts_for_nothing_until_then() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let broken = Fault::Refuse {
        code: 13,
        message: "no list today".into(),
    };
    let mut plugin = Plugin::start(&gpus(root.path(), 2).with_fault("ListAndWatch", broken));
    plugin.until(&Event::Registered);
    for _ in 0..2 {
        plugin.called("ListAndWatch");
    }
    let now = resource(&daemon.json(&["get", "resources"]));
    assert!(
        now.is_null() || (now["capacity"] == 0 && now["allocatable"] == 0),
        "{now}"
    );
    plugin.fault("ListAndWatch", None);
    daemon.until_capacity(GPU, 2);
}
