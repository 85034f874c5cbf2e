//! Plugins, pods and the daemon together: restarts in all combinations, plugins that hang in each call, and plugins that
//! replace each other.

use std::path::Path;
use std::process::Stdio;

use devlet_testkit::{Device, Door, Event, Fault, Options, Plugin, Script};
use tempfile::TempDir;

use crate::common::{Daemon, items, root, stderr};

const GPU: &str = "acme.com/gpu";

fn gpus(root: &Path, count: usize) -> Script {
    let devices = (0..count).map(|number| Device::new(&format!("gpu{number}")));
    Script::new(root, GPU, devices.collect())
}

/// The parts that restart in a round.
#[derive(Debug, Clone, Copy)]
struct Restarts {
    pod: bool,
    daemon: bool,
    plugin: bool,
}

/// Admits the pod again if `admitted`, and returns its devices.
fn devices_of_the_pod(daemon: &Daemon, admitted: bool) -> Vec<String> {
    if admitted {
        return daemon.admit("job1", "acme.com/gpu=2");
    }
    let pods = items(&daemon.json(&["get", "pods"]));
    assert_eq!(pods.len(), 1, "{pods:?}");
    crate::common::ids(&pods[0])
}

fn restarted(root: &TempDir, daemon: Daemon, plugin: Plugin, what: Restarts) -> (Daemon, Plugin) {
    let (mut daemon, mut plugin) = (daemon, plugin);
    if what.plugin {
        plugin.kill();
        daemon.until_gone(GPU);
        plugin = Plugin::start(&Script {
            door: Door::Later,
            ..gpus(root.path(), 4)
        });
    }
    if what.daemon {
        daemon.kill();
        daemon = Daemon::on(root.path());
    }
    if what.plugin || what.daemon {
        // Plugins do this when they start, and when they see a new kubelet.sock.
        plugin.command("register");
        plugin.until(&Event::Registered);
        daemon.until_capacity(GPU, 4);
    }
    (daemon, plugin)
}

#[test]
fn assignments_are_kept_whoever_restarts() {
    let root = root();
    let mut daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 4));
    daemon.until_capacity(GPU, 4);
    let got = daemon.admit("job1", "acme.com/gpu=2");
    for round in 0..8 {
        let what = Restarts {
            pod: round & 1 > 0,
            daemon: round & 2 > 0,
            plugin: round & 4 > 0,
        };

        (daemon, plugin) = restarted(&root, daemon, plugin, what);

        assert_eq!(devices_of_the_pod(&daemon, what.pod), got, "{what:?}");
        let others = daemon.admit("job2", "acme.com/gpu=2");
        assert!(
            others.iter().all(|id| !got.contains(id)),
            "{what:?}: {others:?} and {got:?}"
        );
        assert!(daemon.run(&["remove", "job2"]).status.success());
    }
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_plugin_in_the_registry_is_found_again_by_a_new_daemon() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&Script {
        door: Door::Registry,
        ..gpus(root.path(), 2)
    });
    daemon.until_capacity(GPU, 2);
    daemon.kill();
    let daemon = Daemon::on(root.path());
    plugin.until(&Event::Registered);
    daemon.until_capacity(GPU, 2);
}

#[test]
fn the_newest_list_counts_and_the_older_one_is_back_when_it_leaves() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut old = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);

    let new = Plugin::registered(&Script {
        socket: "new.sock".into(),
        ..gpus(root.path(), 3)
    });
    daemon.until_capacity(GPU, 3);
    new.exit();
    daemon.until_capacity(GPU, 2);

    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
    assert_eq!(old.called("Allocate"), ["gpu0"]);
}

#[test]
fn two_plugins_swap_and_nothing_is_lost_or_given_twice() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let socket = |name: &str| Script {
        socket: name.into(),
        ..gpus(root.path(), 4)
    };
    let mut current = Plugin::registered(&socket("a.sock"));
    daemon.until_capacity(GPU, 4);
    let got = daemon.admit("job1", "acme.com/gpu=2");
    for name in ["b.sock", "a.sock", "b.sock"] {
        let mut next = Plugin::registered(&socket(name));
        let endpoint = |plugin: &serde_json::Value| plugin["endpoint"].as_str().unwrap().to_owned();
        daemon.until("plugins", |list| {
            items(list)
                .iter()
                .any(|each| each["state"] == "serving" && endpoint(each).ends_with(name))
        });
        current.exit();
        daemon.until("plugins", |list| items(list).len() == 1);
        let others = daemon.admit("job2", "acme.com/gpu=2");
        assert!(
            others.iter().all(|id| !got.contains(id)),
            "{others:?} and {got:?}"
        );
        assert_eq!(next.called("Allocate"), others);
        assert!(daemon.run(&["remove", "job2"]).status.success());
        current = next;
    }
    assert_eq!(daemon.admit("job1", "acme.com/gpu=2"), got);
}

#[test]
fn a_broken_stream_is_taken_up_again() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut plugin = Plugin::registered(&gpus(root.path(), 2));
    daemon.until_capacity(GPU, 2);
    plugin.called("ListAndWatch");
    plugin.command("end-stream");
    plugin.called("ListAndWatch");
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=2").len(), 2);
}

/// Starts a daemon with short deadlines, and a good plugin with pods that must not be affected.
fn impatient() -> (TempDir, Daemon, Plugin) {
    let root = root();
    let config = "deadlines: {options: 300ms, preferred: 300ms, allocate: 300ms, preStart: 300ms, info: 300ms, \
                  notify: 300ms}";
    let daemon = Daemon::configured(root.path(), config);
    let good = Script::new(
        root.path(),
        "acme.com/good",
        (0..8).map(|id| Device::new(&id.to_string())).collect(),
    );
    let good = Plugin::registered(&good);
    daemon.until_capacity("acme.com/good", 8);
    (root, daemon, good)
}

fn good_pods_go_on(daemon: &Daemon) {
    assert_eq!(daemon.admit("good", "acme.com/good=1").len(), 1);
    assert!(daemon.run(&["options", "good"]).status.success());
    assert!(daemon.run(&["remove", "good"]).status.success());
}

#[test]
fn a_plugin_that_hangs_when_asked_for_its_options_is_not_registered() {
    let (root, daemon, _good) = impatient();
    let mut plugin = Plugin::start(&gpus(root.path(), 1).with_fault("GetDevicePluginOptions", Fault::Hang));
    plugin.called("GetDevicePluginOptions");
    good_pods_go_on(&daemon);
    let said = plugin.refused();
    assert!(
        said.contains("GetDevicePluginOptions was not answered within 0.3 s"),
        "{said}"
    );
    plugin.fault("GetDevicePluginOptions", None);
    plugin.command("register");
    plugin.until(&Event::Registered);
    daemon.until_capacity(GPU, 1);
}

#[test]
fn a_plugin_that_never_lists_is_named_to_the_caller_that_waits() {
    let (root, daemon, _good) = impatient();
    let mut plugin = Plugin::start(&gpus(root.path(), 1).with_fault("ListAndWatch", Fault::Hang));
    plugin.until(&Event::Registered);
    plugin.called("ListAndWatch");
    let refused = daemon.refused(&[
        "admit",
        "--name",
        "job1",
        "--limit",
        "acme.com/gpu=1",
        "--wait",
        "300ms",
    ]);
    assert!(refused.contains("has not listed its devices yet"), "{refused}");
    good_pods_go_on(&daemon);
}

#[test]
fn advice_that_does_not_come_is_done_without() {
    let (root, daemon, _good) = impatient();
    let options = Options {
        preferred: true,
        pre_start: false,
    };
    let script = Script {
        options,
        ..gpus(root.path(), 2)
    };
    let mut plugin = Plugin::registered(&script.with_fault("GetPreferredAllocation", Fault::Hang));
    daemon.until_capacity(GPU, 2);
    assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
    plugin.called("GetPreferredAllocation");
    plugin.fault("GetPreferredAllocation", Some(&Fault::TooManyContainers));
    assert_eq!(daemon.admit("job2", "acme.com/gpu=1"), ["gpu1"]);
    good_pods_go_on(&daemon);
}

#[test]
fn a_plugin_that_hangs_before_the_start_stops_that_start_alone() {
    let (root, daemon, _good) = impatient();
    let options = Options {
        pre_start: true,
        preferred: false,
    };
    let script = Script {
        options,
        ..gpus(root.path(), 1)
    };
    let mut plugin = Plugin::registered(&script.with_fault("PreStartContainer", Fault::Hang));
    daemon.until_capacity(GPU, 1);
    daemon.admit("job1", "acme.com/gpu=1");
    let refused = daemon.refused(&["options", "job1"]);
    assert!(
        refused.contains("PreStartContainer was not answered within 0.3 s"),
        "{refused}"
    );
    good_pods_go_on(&daemon);
    plugin.fault("PreStartContainer", None);
    let options = daemon.run(&["options", "job1"]);
    assert!(options.status.success(), "{}", stderr(&options));
}

#[test]
fn a_start_waits_for_the_plugin_that_wants_to_know_even_after_a_restart() {
    let (root, daemon, _good) = impatient();
    let options = Options {
        pre_start: true,
        preferred: false,
    };
    let script = Script {
        options,
        ..gpus(root.path(), 1)
    };
    let plugin = Plugin::registered(&script);
    daemon.until_capacity(GPU, 1);
    daemon.admit("job1", "acme.com/gpu=1");
    plugin.exit();
    daemon.kill();
    let daemon = Daemon::on(root.path());

    let refused = daemon.refused(&["options", "job1", "--wait", "100ms"]);
    assert!(refused.contains(GPU), "{refused}");
    let mut start = daemon.command(&["options", "job1", "--wait", "1h"]);
    let start = start.stdout(Stdio::null()).stderr(Stdio::piped());
    let start = start.spawn().unwrap();
    let mut plugin = Plugin::registered(&script);

    let started = start.wait_with_output().unwrap();
    assert!(started.status.success(), "{}", stderr(&started));
    assert_eq!(plugin.called("PreStartContainer"), ["gpu0"]);
}

#[test]
fn a_plugin_in_the_registry_that_hangs_is_asked_again() {
    let (root, daemon, _good) = impatient();
    let script = Script {
        door: Door::Registry,
        ..gpus(root.path(), 1)
    };
    let mut plugin = Plugin::start(&script.with_fault("GetInfo", Fault::Hang));
    plugin.called("GetInfo");
    good_pods_go_on(&daemon);
    plugin.fault("GetInfo", None);
    plugin.until(&Event::Registered);
    daemon.until_capacity(GPU, 1);
}

#[test]
fn a_plugin_that_does_not_listen_to_its_registration_serves_all_the_same() {
    let refusal = Fault::Refuse {
        code: 2,
        message: "so what".into(),
    };
    for (fault, said) in [(Fault::Hang, "no answer within 0.3 s"), (refusal, "so what")] {
        let root = root();
        let config = root.path().join("devlet.yaml");
        std::fs::write(&config, "deadlines: {notify: 300ms}").unwrap();
        let (daemon, log) = Daemon::logged(root.path(), &["--config", config.to_str().unwrap()]);
        let script = Script {
            door: Door::Registry,
            ..gpus(root.path(), 1)
        };

        let mut plugin = Plugin::start(&script.with_fault("NotifyRegistrationStatus", fault));
        plugin.called("NotifyRegistrationStatus");

        // It is notified once, and not treated as a refused plugin, which would be tried again.
        let warning = loop {
            let warning = log.until(&["WARN"]);
            // The daemon may find the socket before the plugin listens on it.
            if !warning.contains("dial failed at socket") {
                break warning;
            }
        };
        assert!(
            warning.contains("plugin registered; NotifyRegistrationStatus failed") && warning.contains(said),
            "{warning}"
        );
        daemon.until_capacity(GPU, 1);
        assert_eq!(daemon.admit("job1", "acme.com/gpu=1"), ["gpu0"]);
    }
}
