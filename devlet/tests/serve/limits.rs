//! Each limit of the configuration: the refusal names it, a metric counts it, and pods of another plugin are not affected.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use devlet_client::v1::ResourceState;
use devlet_client::{Client, locate, v1};
use devlet_testkit::{
    Answer, Babbler, Device, DeviceNode, Door, Event, Fault, Mount, Options, PATIENCE, Plugin, Script,
    nonsense_of_a_client,
};

use crate::hostile::{BAD, GOOD, Neighbourhood};

#[test]
fn a_list_over_a_limit_is_refused_whole_and_its_plugin_lost_until_it_is_shorter() {
    let crowded = Device {
        numa: (0..32).collect(),
        ..Device::new("crowded")
    };
    for (config, limit, excess) in [
        (
            "devicesPerResource: 4",
            "devicesPerResource",
            Device::new("fifth"),
        ),
        ("listBytes: 200", "listBytes", Device::new(&"x".repeat(200))),
        ("bytesPerPlugin: 700", "bytesPerPlugin", crowded),
    ] {
        let mut neighbours = Neighbourhood::configured(&format!("limits: {{{config}}}"));
        let list = neighbours.bad(4).devices;
        let mut plugin = Plugin::registered(&neighbours.bad(4));
        neighbours.until_capacity(BAD, 4);
        assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");

        let mut more = list.clone();
        more.push(excess);
        plugin.list(&more);
        neighbours.until_resource(BAD, |each| each.state() == ResourceState::Gone);
        neighbours.pods_go_on();

        assert!(neighbours.hits(limit) > 0, "{limit}: {}", neighbours.metrics());
        assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0", "{limit}");
        plugin.list(&list);
        neighbours.until_capacity(BAD, 4);
        neighbours.unharmed();
    }
}

#[test]
fn a_list_with_a_long_id_is_refused_whole() {
    let mut neighbours = Neighbourhood::new();
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    plugin.list(&[Device::new(&"x".repeat(1025))]);
    neighbours.until_resource(BAD, |each| each.state() == ResourceState::Gone);
    neighbours.pods_go_on();
    neighbours.unharmed();
}

#[test]
fn an_answer_over_a_limit_is_refused_and_frees_its_device() {
    let mut neighbours = Neighbourhood::configured("limits: {answerBytes: 2000000}");
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    const MANY: usize = 16_385;
    let long_path = format!("/{}", "x".repeat(4095));
    let envs = |number: usize, value: &str| {
        let env = |number| (format!("E{number}"), value.to_owned());
        (0..number).map(env).collect()
    };
    let mount = |path: &str| Mount {
        container_path: path.into(),
        host_path: "/x".into(),
        read_only: true,
    };
    let node = |path: &str| DeviceNode {
        container_path: "/x".into(),
        host_path: path.into(),
        permissions: "rw".into(),
    };
    let none = Answer::default();
    let large = Answer {
        envs: envs(1, &"x".repeat(2_000_000)),
        ..none.clone()
    };
    plugin.answer(&large);
    let refused = neighbours.admit("bad", BAD).unwrap_err();
    assert!(refused.contains("limits.answerBytes allows 2000000"), "{refused}");
    assert_eq!(neighbours.hits("answerBytes"), 1);
    for (max, answer) in [
        (
            16_384,
            Answer {
                envs: envs(MANY, ""),
                ..none.clone()
            },
        ),
        (
            16_384,
            Answer {
                annotations: envs(MANY, ""),
                ..none.clone()
            },
        ),
        (
            16_384,
            Answer {
                mounts: vec![mount("/a"); MANY],
                ..none.clone()
            },
        ),
        (
            16_384,
            Answer {
                device_nodes: vec![node("/a"); MANY],
                ..none.clone()
            },
        ),
        (
            16_384,
            Answer {
                cdi_devices: vec!["a.b/c=d".into(); MANY],
                ..none.clone()
            },
        ),
        (
            131_072,
            Answer {
                envs: envs(1, &"x".repeat(131_072)),
                ..none.clone()
            },
        ),
        (
            131_072,
            Answer {
                annotations: envs(1, &"x".repeat(131_072)),
                ..none.clone()
            },
        ),
        (
            4095,
            Answer {
                mounts: vec![mount(&long_path)],
                ..none.clone()
            },
        ),
        (
            4095,
            Answer {
                device_nodes: vec![node(&long_path)],
                ..none.clone()
            },
        ),
    ] {
        plugin.answer(&answer);
        let refused = neighbours.admit("bad", BAD).unwrap_err();
        assert!(refused.contains(&format!("devlet allows {max}")), "{refused}");
        neighbours.one_pod_goes_on();
    }
    plugin.answer(&none);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}

#[test]
fn lists_of_a_process_count_together_over_its_resources() {
    let mut neighbours = Neighbourhood::configured("limits: {bytesPerPlugin: 1700}");
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    for resource in ["evil.example/two", "evil.example/three"] {
        plugin.command(&format!("offer {resource}"));
        plugin.until(&Event::Registered);
        neighbours.until_resource(resource, |each| each.state() == ResourceState::Serving);
    }
    // This list alone is within the limit, and together with those of the other resources it is not.
    let long: Vec<Device> = (0..15).map(|number| Device::new(&number.to_string())).collect();
    let hits = neighbours.hits("bytesPerPlugin");
    plugin.list(&long);
    while neighbours.hits("bytesPerPlugin") == hits {
        neighbours.one_pod_goes_on();
    }
    neighbours.unharmed();
}

#[test]
fn the_number_of_resources_of_a_process_is_limited() {
    let mut neighbours = Neighbourhood::configured("limits: {resourcesPerPlugin: 2}");
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    for (resource, registered) in [("evil.example/two", true), ("evil.example/three", false)] {
        plugin.command(&format!("offer {resource}"));
        if registered {
            plugin.until(&Event::Registered);
            neighbours.until_resource(resource, |each| each.state() == ResourceState::Serving);
        } else {
            let refused = plugin.refused();
            assert!(
                refused.contains("limits.resourcesPerPlugin allows 2"),
                "{refused}"
            );
        }
        neighbours.pods_go_on();
    }
    // It may register again a resource that it already serves.
    plugin.command("register");
    plugin.until(&Event::Registered);
    assert_eq!(neighbours.hits("resourcesPerPlugin"), 1);
    neighbours.unharmed();
}

#[test]
fn the_number_of_plugins_is_limited() {
    let neighbours = Neighbourhood::configured("limits: {plugins: 2}");
    let second = Plugin::registered(&neighbours.bad(1));
    let other = Script {
        resource: "evil.example/other".into(),
        ..neighbours.bad(1)
    };
    let refused = Plugin::start(&other).refused();
    assert!(refused.contains("limits.plugins allows 2"), "{refused}");
    assert!(neighbours.hits("plugins") > 0);
    second.exit();
    neighbours.until_resource(BAD, |each| each.state() == ResourceState::Gone);
    // Its slot is free again.
    let _third = Plugin::registered(&other);
    neighbours.until_capacity("evil.example/other", 1);
    neighbours.unharmed();
}

#[test]
fn silent_sockets_in_the_registry_keep_no_plugin_out() {
    let mut neighbours = Neighbourhood::configured("limits: {plugins: 2}");
    let script = |resource: &str| Script {
        door: Door::Registry,
        resource: resource.into(),
        ..neighbours.bad(1)
    };
    let silent = ["a", "b"].map(|name| {
        let socket = neighbours.root().join(format!("plugins_registry/{name}.sock"));
        Babbler::at(&socket, Vec::new())
    });
    silent.iter().for_each(Babbler::until_heard);
    let mut plugin = Plugin::start(&script(BAD));
    plugin.until(&Event::Registered);
    neighbours.one_pod_goes_on();
    drop(silent);
    neighbours.unharmed();
}

#[test]
fn a_registration_has_a_maximum_size() {
    let neighbours = Neighbourhood::new();
    let script = Script {
        socket: format!("{}.sock", "x".repeat(64 << 10)),
        door: Door::Claim,
        ..neighbours.bad(1)
    };
    let refused = Plugin::start(&script).refused();
    assert!(
        refused.contains("message length too large") && refused.contains("65536 bytes"),
        "{refused}"
    );
    neighbours.unharmed();
}

#[test]
fn the_answer_to_get_info_has_a_maximum_size() {
    let neighbours = Neighbourhood::new();
    let long = || Fault::Zeros((64 << 10) + 1);
    for (door, method) in [
        (Door::Kubelet, "GetDevicePluginOptions"),
        (Door::Registry, "GetInfo"),
    ] {
        let script = Script {
            door,
            ..neighbours.bad(1).with_fault(method, long())
        };
        let refused = Plugin::start(&script).refused();
        assert!(
            refused.contains(method) && refused.contains("devlet allows 65536"),
            "{refused}"
        );
    }
    neighbours.unharmed();
}

#[test]
fn advice_that_is_too_long_is_done_without() {
    let neighbours = Neighbourhood::configured("limits: {listBytes: 100}");
    let script = Script {
        options: Options {
            preferred: true,
            ..Options::default()
        },
        ..neighbours.bad(2)
    };
    let advice = Fault::Raw(vec![0; 101]);
    let mut plugin = Plugin::registered(&script.with_fault("GetPreferredAllocation", advice));
    neighbours.until_capacity(BAD, 2);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    plugin.called("GetPreferredAllocation");
    assert_eq!(neighbours.hits("listBytes"), 1);
    neighbours.unharmed();
}

#[test]
fn a_request_has_a_maximum_size() {
    let neighbours = Neighbourhood::configured("limits: {requestBytes: 300}");
    let refused = neighbours.admit(&"x".repeat(300), GOOD).unwrap_err();
    assert!(
        refused.contains("message length too large") && refused.contains("300 bytes"),
        "{refused}"
    );
    neighbours.unharmed();
}

#[test]
fn a_manifest_has_a_maximum_size() {
    let neighbours = Neighbourhood::configured("limits: {manifestBytes: 200}");
    let refused = neighbours.admit(&"x".repeat(200), GOOD).unwrap_err();
    assert!(refused.contains("limits.manifestBytes allows 200"), "{refused}");
    assert_eq!(neighbours.hits("manifestBytes"), 1);
    neighbours.unharmed();
}

#[test]
fn many_callers_that_wait_for_a_plugin_do_not_block_others() {
    let mut neighbours = Neighbourhood::configured("");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let waiting: Vec<_> = (0..300)
        .map(|number| {
            let manifest = format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: w{number}}}\nspec: {{containers: [{{name: c, resources: \
                 {{limits: {{unserved.example/device: 1}}}}}}]}}"
            );
            runtime.block_on(async {
                let client = Client::connect(locate::socket(&neighbours.daemon.root)).await.unwrap();
                let request = v1::AdmitRequest {
                    manifest,
                    wait_ms: Some(600_000),
                    ..Default::default()
                };
                let mut events = client.admit(request).await.unwrap();
                // It waits for a plugin.
                events.message().await.unwrap().unwrap();
                events
            })
        })
        .collect();

    neighbours.pods_go_on();
    assert!(neighbours.daemon.run(&["get", "pods"]).status.success());
    drop(waiting);
    neighbours.unharmed();
}

#[test]
fn connections_over_the_limit_of_a_user_are_closed_at_once() {
    let mut neighbours = Neighbourhood::configured("limits: {connectionsPerUid: 8, callersPerUid: 8}");
    // The good pods use one connection to one of these sockets.
    for socket in neighbours.sockets() {
        let all: Vec<UnixStream> = (0..9).map(|_| UnixStream::connect(&socket).unwrap()).collect();
        let mut newest = &all[8];
        newest.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(newest.read_to_end(&mut Vec::new()).unwrap(), 0);
        let limit = if socket.ends_with("devlet.sock") {
            "callersPerUid"
        } else {
            "connectionsPerUid"
        };
        assert!(neighbours.hits(limit) > 0);
        neighbours.pods_go_on();
        let before = neighbours.usage().descriptors;
        drop(all);
        while neighbours.usage().descriptors > before - 7 {
            neighbours.one_pod_goes_on();
        }
        others_get_in(&mut neighbours);
    }
    neighbours.unharmed();
}

fn pings_of(nonsense: Vec<(&str, Vec<u8>)>) -> Vec<u8> {
    let mut all = nonsense.into_iter();
    let pings = all.find(|(name, _)| *name == "pings without end");
    pings.unwrap().1
}

/// Other processes of the same user: a command, and a plugin.
fn others_get_in(neighbours: &mut Neighbourhood) {
    assert!(neighbours.daemon.run(&["get", "pods"]).status.success());
    let _plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    neighbours.pods_go_on();
}

#[test]
fn a_process_that_floods_without_calls_is_throttled_alone() {
    let mut neighbours = Neighbourhood::new();
    let pings = pings_of(nonsense_of_a_client());
    for socket in neighbours.sockets() {
        let mut flood = UnixStream::connect(&socket).unwrap();
        let mut answers = flood.try_clone().unwrap();
        std::thread::spawn(move || while answers.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {});
        flood.write_all(&pings).unwrap();
        // Without the greeting.
        let pings = &pings[33..];
        flood.set_nonblocking(true).unwrap();
        let (mut sent, end) = (0, Instant::now() + Duration::from_secs(3));
        while Instant::now() < end {
            sent += flood.write(pings).unwrap_or_default();
            neighbours.one_pod_goes_on();
        }
        assert!(sent < 6 << 20, "the flood is not throttled: {sent} bytes");
    }
    others_get_in(&mut neighbours);
    neighbours.unharmed();
}

#[test]
fn a_command_over_the_limit_of_its_user_is_refused_and_counted() {
    let mut neighbours = Neighbourhood::configured("limits: {callersPerUid: 3}");
    // The good pods use one more connection.
    let mut waiting: Vec<_> = (0..2)
        .map(|number| {
            let name = format!("w{number}");
            let limit = "unserved.example/device=1";
            let args = ["admit", "--name", &name, "--limit", limit, "--wait", "10m"];
            let mut command = neighbours.daemon.command(&args);
            let command = command.stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap()
        })
        .collect();
    let wait = "devlet_admissions_waiting{resource_name=\"unserved.example/device\",reason=\"not_served\"} 2";
    while !neighbours.metrics().contains(wait) {
        neighbours.one_pod_goes_on();
    }
    let refused = neighbours.daemon.run(&["get", "pods"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("this user has too many connections"), "{said}");
    assert!(neighbours.hits("callersPerUid") > 0);
    neighbours.pods_go_on();
    for each in &mut waiting {
        each.kill().unwrap();
        each.wait().unwrap();
    }
    neighbours.unharmed();
}

#[test]
fn a_plugin_over_the_limit_of_its_user_is_refused_and_counted() {
    let mut neighbours = Neighbourhood::configured("limits: {connectionsPerUid: 2}");
    let hanging = [0, 1].map(|number| {
        let script = Script {
            resource: format!("evil.example/{number}"),
            ..neighbours
                .bad(1)
                .with_fault("GetDevicePluginOptions", Fault::Hang)
        };
        let mut plugin = Plugin::start(&script);
        plugin.called("GetDevicePluginOptions");
        plugin
    });
    Plugin::start(&neighbours.bad(1)).refused();
    assert!(neighbours.hits("connectionsPerUid") > 0);
    neighbours.pods_go_on();
    drop(hanging);
    neighbours.unharmed();
}

#[test]
fn without_free_descriptors_new_connections_wait_and_pods_go_on() {
    let mut neighbours = Neighbourhood::new();
    neighbours.limit_descriptors(64);
    let socket = neighbours.kubelet_socket();
    let all: Vec<UnixStream> = (0..100).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    while neighbours.usage().descriptors < 64 {
        neighbours.one_pod_goes_on();
    }
    neighbours.pods_go_on();
    drop(all);
    let _plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    neighbours.unharmed();
}

#[test]
fn with_few_descriptors_one_user_cannot_take_them_all() {
    let mut neighbours = Neighbourhood::with_descriptors(64);
    let (sockets, before) = (neighbours.sockets(), neighbours.usage().descriptors);
    let all: Vec<UnixStream> = (0..200)
        .map(|number| UnixStream::connect(&sockets[number % 2]).unwrap())
        .collect();
    // No event reports that the daemon has handled all of them.
    while neighbours.hits("connectionsPerUid") == 0 || neighbours.hits("callersPerUid") == 0 {
        neighbours.one_pod_goes_on();
    }
    neighbours.pods_go_on();
    assert!(neighbours.usage().descriptors < 64, "{:?}", neighbours.usage());
    drop(all);
    while neighbours.usage().descriptors > before {
        neighbours.one_pod_goes_on();
    }
    let _plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    assert!(neighbours.daemon.run(&["get", "pods"]).status.success());
    neighbours.unharmed();
}
