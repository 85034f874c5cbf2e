//! Test cases of the kubelet that no other module here covers.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use devlet_testkit::{Device, Door, Event, Fault, Options, Plugin, Script};

use crate::common::{Daemon, items, root, stderr};

const GPU: &str = "acme.com/gpu";

fn devices(ids: &[&str]) -> Vec<Device> {
    ids.iter().map(|id| Device::new(id)).collect()
}

fn gpus(root: &Path, socket: &str, ids: &[&str]) -> Script {
    Script {
        socket: socket.into(),
        ..Script::new(root, GPU, devices(ids))
    }
}

#[test]
fn the_newest_list_counts_through_every_door_whatever_the_options() {
    let root = root();
    let daemon = Daemon::on(root.path());
    for door in [Door::Kubelet, Door::Registry, Door::RegistryWithEndpoint] {
        for (pre_start, preferred) in [(false, false), (false, true), (true, false), (true, true)] {
            let started = |socket: &str, ids: &[&str]| {
                Plugin::registered(&Script {
                    door,
                    options: Options { pre_start, preferred },
                    ..gpus(root.path(), socket, ids)
                })
            };
            let in_force = |socket: &str| {
                daemon.until("plugins", |list| {
                    let is = |each: &&serde_json::Value| each["state"] == "serving";
                    let all = items(list);
                    let endpoint = all.iter().find(is).map(|each| each["endpoint"].clone());
                    endpoint.is_some_and(|path| path.as_str().unwrap().ends_with(socket))
                });
            };
            // Each round has its own names, so that it does not see the plugins of the round before.
            let name = |number: u32| format!("{door:?}-{pre_start}-{preferred}-{number}.sock");
            let first = started(&name(1), &["a", "b"]);
            daemon.until_capacity(GPU, 2);
            let second = started(&name(2), &["a", "b"]);
            in_force(&name(2));
            daemon.until_capacity(GPU, 2);
            let third = started(&name(3), &["c"]);
            daemon.until_capacity(GPU, 1);
            third.exit();
            daemon.until_capacity(GPU, 2);
            for plugin in [second, first] {
                plugin.exit();
            }
            daemon.until_gone(GPU);
        }
    }
}

#[test]
fn a_new_plugin_that_is_slow_leaves_the_old_one_serving() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut old = Plugin::registered(&gpus(root.path(), "old.sock", &["a", "b"]));
    daemon.until_capacity(GPU, 2);
    let slow = gpus(root.path(), "new.sock", &["a", "b"]).with_fault("ListAndWatch", Fault::Wait);
    let mut new = Plugin::start(&slow);
    new.until(&Event::Registered);
    new.called("ListAndWatch");

    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["a"]);

    assert_eq!(old.called("Allocate"), ["a"]);
    new.command("proceed");
    new.until_list_of(2);
    daemon.until("plugins", |list| {
        let all = items(list);
        let is_new = |each: &serde_json::Value| each["endpoint"].as_str().unwrap().ends_with("new.sock");
        all.iter().any(|each| is_new(each) && each["state"] == "serving")
    });
    old.exit();
    daemon.until("plugins", |list| items(list).len() == 1);
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job2", "acme.com/gpu=1"), ["b"]);
    assert_eq!(new.called("Allocate"), ["b"]);
}

#[test]
fn a_plugin_whose_options_fail_is_not_used() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let broken = Fault::Refuse {
        code: 13,
        message: "no options today".into(),
    };
    let script = gpus(root.path(), "gpu.sock", &["a"]).with_fault("GetDevicePluginOptions", broken);
    let mut plugin = Plugin::start(&script);
    let said = plugin.refused();
    assert!(said.contains("no options today"), "{said}");
    assert_eq!(items(&daemon.json(&["get", "resources"])).len(), 0);
    let plugins = items(&daemon.json(&["get", "plugins"]));
    assert!(
        plugins.iter().all(|each| !each["rejection"].is_null()),
        "{plugins:?}"
    );
}

#[test]
fn all_plugins_of_a_pod_are_called_at_the_same_time() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let resources = ["acme.com/one", "acme.com/two", "acme.com/three"];
    let waiting = |resource: &&str| {
        let script = Script::new(root.path(), resource, devices(&["a"])).with_fault("Allocate", Fault::Wait);
        let plugin = Plugin::registered(&script);
        daemon.until_capacity(resource, 1);
        plugin
    };
    let mut plugins: Vec<Plugin> = resources.iter().map(waiting).collect();
    let limits = resources.map(|resource| format!("{resource}=1"));
    let mut args = vec!["admit", "--name", "job1"];
    for limit in &limits {
        args.extend(["--limit", limit]);
    }
    let mut admit = daemon.command(&args);
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::piped());
    let admission = admit.spawn().unwrap();

    // No plugin answers before all of them have been called.
    for plugin in &mut plugins {
        plugin.called("Allocate");
    }
    for plugin in &mut plugins {
        plugin.command("proceed");
    }

    let output = admission.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_removal_while_advice_is_given_disturbs_nothing() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let options = Options {
        preferred: true,
        pre_start: false,
    };
    let mut plugin = Plugin::registered(&Script {
        options,
        ..gpus(root.path(), "gpu.sock", &["a", "b", "c", "d"])
    });
    daemon.until_capacity(GPU, 4);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["d"]);
    plugin.called("GetPreferredAllocation");
    plugin.fault("GetPreferredAllocation", Some(&Fault::Wait));
    let mut admit = daemon.command(&["admit", "--name", "job2", "--limit", "acme.com/gpu=2"]);
    let admit = admit.stdout(Stdio::null()).stderr(Stdio::piped());
    let admission = admit.spawn().unwrap();
    plugin.called("GetPreferredAllocation");

    assert!(daemon.run(&["remove", "job1"]).status.success());
    plugin.fault("GetPreferredAllocation", None);
    plugin.command("proceed");

    let output = admission.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(daemon.admit("job2", "acme.com/gpu=2"), ["b", "c"]);
    assert_eq!(daemon.admit("job3", "acme.com/gpu=2"), ["a", "d"]);
}

/// Admits a pod from a manifest.
fn admit(daemon: &Daemon, spec: &str, name: &str) -> std::process::Output {
    let file = daemon.root.join(format!("{name}.yaml"));
    let text = format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {spec}\n");
    std::fs::write(&file, text).unwrap();
    daemon.run(&["admit", "-o", "json", "-f", file.to_str().unwrap()])
}

#[test]
fn a_sidecar_keeps_what_it_takes_over_from_an_init_container() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _plugin = Plugin::registered(&gpus(root.path(), "", &["a", "b", "c"]));
    daemon.until_capacity(GPU, 3);
    let limits = |count: usize| format!("resources: {{limits: {{acme.com/gpu: {count}}}}}");
    let spec = format!(
        "{{initContainers: [{{name: prepare, {}}}, {{name: side, restartPolicy: Always, {}}}], \
         containers: [{{name: main, {}}}]}}",
        limits(3),
        limits(1),
        limits(2)
    );

    let admitted = admit(&daemon, &spec, "job1");

    // Three devices are enough: one of the other two containers reuses the device of the init container, never both.
    assert!(admitted.status.success(), "{}", stderr(&admitted));
    let pod: serde_json::Value = serde_json::from_slice(&admitted.stdout).unwrap();
    let ids = |container: usize| -> BTreeSet<String> {
        let ids = pod["containers"][container]["devices"][0]["ids"]
            .as_array()
            .unwrap();
        ids.iter().map(|id| id.as_str().unwrap().to_owned()).collect()
    };
    let (prepare, side, main) = (ids(0), ids(1), ids(2));
    assert_eq!((prepare.len(), side.len(), main.len()), (3, 1, 2));
    assert!(side.is_disjoint(&main), "{pod}");
    // With one more for the main container, no device is left to reuse.
    assert!(daemon.run(&["remove", "job1"]).status.success());
    let refused = admit(&daemon, &spec.replace(&limits(2), &limits(3)), "job2");
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("acme.com/gpu"), "{}", stderr(&refused));
}

#[test]
fn devices_that_a_whole_pod_asks_for_are_refused_with_the_right_place() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _plugin = Plugin::registered(&gpus(root.path(), "", &["a"]));
    daemon.until_capacity(GPU, 1);
    let refused = admit(
        &daemon,
        "{resources: {limits: {cpu: 1, acme.com/gpu: 1}}, containers: [{name: main}]}",
        "job1",
    );
    assert_eq!(refused.status.code(), Some(1));
    let said = stderr(&refused);
    assert!(
        said.contains("acme.com/gpu") && said.contains("asked for by containers"),
        "{said}"
    );
    // A resource that is not a device may be there.
    let spec =
        "{resources: {limits: {cpu: 1}}, containers: [{name: main, resources: {limits: {acme.com/gpu: 1}}}]}";
    assert!(admit(&daemon, spec, "job2").status.success());
}
