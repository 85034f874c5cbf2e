//! Plugins whose lists are too long, too many, damaged, or lies; pods of another plugin do not notice.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

mod common;
mod hostile;

use devlet_client::v1::ResourceState;
use devlet_testkit::{Device, Event, Fault, Plugin, Script};
use hostile::{BAD, Neighbourhood};

devlet_testkit::plugin_process!();

#[test]
fn a_hundred_thousand_devices_are_taken_and_nobody_else_notices() {
    let mut neighbours = Neighbourhood::new();
    let script = Script {
        many: 100_000,
        ..neighbours.bad(0)
    };
    let mut plugin = Plugin::start(&script);
    neighbours.pods_go_on();
    neighbours.until_capacity(BAD, 100_000);
    assert_eq!(neighbours.admit("big", BAD).unwrap(), "many-0");
    assert_eq!(plugin.called("Allocate"), ["many-0"]);
    plugin.flood(3, 0);
    plugin.until(&Event::Flooded { lists: 3 });
    neighbours.until_capacity(BAD, 100_000);
    neighbours.remove("big");
    plugin.exit();
    neighbours.unharmed_within(256);
}

#[test]
fn a_device_that_is_listed_twice_is_one_device() {
    let mut neighbours = Neighbourhood::new();
    let mut script = neighbours.bad(2);
    script.devices.extend(neighbours.bad(1).devices);
    let _plugin = Plugin::registered(&script);
    neighbours.until_capacity(BAD, 2);
    neighbours.pods_go_on();
    let mut got = [neighbours.admit("one", BAD), neighbours.admit("two", BAD)].map(Result::unwrap);
    got.sort();
    assert_eq!(got, ["bad-0", "bad-1"]);
    let refused = neighbours.admit("three", BAD).unwrap_err();
    assert!(refused.contains("0 free (2 of 2 healthy)"), "{refused}");
    neighbours.unharmed();
}

#[test]
fn ids_with_control_characters_are_served_and_never_reach_a_terminal_as_they_are() {
    let mut neighbours = Neighbourhood::new();
    let id = "a\u{1b}[2J\n\r\0b";
    let script = Script::new(neighbours.root(), BAD, vec![Device::new(id)]);
    let mut plugin = Plugin::registered(&script);
    neighbours.until_capacity(BAD, 1);
    neighbours.pods_go_on();
    assert_eq!(neighbours.admit("one", BAD).unwrap(), id);
    assert_eq!(plugin.called("Allocate"), [id]);
    for command in [&["get", "devices"][..], &["describe", "pod", "one"]] {
        let output = neighbours.daemon.run(command);
        let text = common::stdout(&output);
        assert!(output.status.success() && text.contains('a'), "{text}");
        let is_safe = |character: char| character == '\n' || !character.is_control();
        assert!(text.chars().all(is_safe), "{text:?}");
    }
    neighbours.unharmed();
}

#[test]
fn a_list_that_is_not_utf_8_ends_the_connection_and_the_next_one_counts() {
    let mut neighbours = Neighbourhood::new();
    // ListAndWatchResponse { devices: [Device { ID: "\xff\xfe" }] }
    let raw = Fault::Raw(vec![0x0a, 4, 0x0a, 2, 0xff, 0xfe]);
    let mut plugin = Plugin::start(&neighbours.bad(1).with_fault("ListAndWatch", raw));
    plugin.until(&Event::Registered);
    plugin.called("ListAndWatch");
    neighbours.pods_go_on();
    // It is dialled again.
    plugin.called("ListAndWatch");
    assert_eq!(neighbours.resource(BAD).unwrap().capacity, 0);
    plugin.fault("ListAndWatch", None);
    neighbours.until_capacity(BAD, 1);
    neighbours.unharmed();
}

#[test]
fn numa_nodes_that_no_machine_has_are_told_and_do_no_harm() {
    let mut neighbours = Neighbourhood::new();
    let devices = [("a", 64), ("b", -5), ("c", i64::MAX), ("d", i64::MIN), ("e", 0)];
    let devices = devices.map(|(id, node)| Device::on(id, node));
    let _plugin = Plugin::registered(&Script::new(neighbours.root(), BAD, devices.into()));
    neighbours.until_capacity(BAD, 5);
    neighbours.pods_go_on();
    let mut got: Vec<String> = (0..5)
        .map(|number| neighbours.admit(&format!("bad-{number}"), BAD).unwrap())
        .collect();
    got.sort();
    assert_eq!(got, ["a", "b", "c", "d", "e"]);
    neighbours.unharmed();
}

#[test]
fn health_that_flips_a_thousand_times_a_second_settles_on_its_last_word() {
    let mut neighbours = Neighbourhood::new();
    let mut plugin = Plugin::registered(&neighbours.bad(3));
    neighbours.until_capacity(BAD, 3);
    plugin.flood(1_001, 1_000);
    neighbours.pods_go_on();
    plugin.until(&Event::Flooded { lists: 1_001 });
    neighbours.until_capacity(BAD, 3);
    assert!(neighbours.hits("listsPerSecond") > 0, "{}", neighbours.metrics());
    neighbours.unharmed();
}

#[test]
fn lists_without_end_leave_memory_as_it_was() {
    let mut neighbours = Neighbourhood::new();
    let script = Script {
        many: 1_000,
        ..neighbours.bad(0)
    };
    let mut plugin = Plugin::registered(&script);
    neighbours.until_capacity(BAD, 1_000);
    plugin.flood(2_001, 0);
    while !plugin.has_event(|event| matches!(event, Event::Flooded { .. })) {
        neighbours.one_pod_goes_on();
    }
    neighbours.until_capacity(BAD, 1_000);
    plugin.exit();
    neighbours.unharmed();
}

#[test]
fn half_a_list_and_a_list_that_drips_are_no_lists() {
    for fault in [Fault::Half, Fault::Drip { pause_ms: 10 }] {
        let mut neighbours = Neighbourhood::configured("wait: 200ms");
        let mut plugin = Plugin::start(&neighbours.bad(1).with_fault("ListAndWatch", fault));
        plugin.until(&Event::Registered);
        plugin.called("ListAndWatch");
        let refused = neighbours.admit("waits", BAD).unwrap_err();
        assert!(refused.contains("has not listed its devices yet"), "{refused}");
        neighbours.pods_go_on();
        let state = neighbours.resource(BAD).unwrap().state();
        assert_eq!(state, ResourceState::NotListed);
        plugin.exit();
        neighbours.unharmed();
    }
}
