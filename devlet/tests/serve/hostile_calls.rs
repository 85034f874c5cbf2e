//! Plugins that do not answer calls, or answer them in part or with invalid data. Pods of another plugin are not affected.

use std::time::{Duration, Instant};

use devlet_testkit::{Answer, Door, Event, Fault, Mount, Options, Plugin, Script};

use crate::hostile::{BAD, IMPATIENT, Neighbourhood};

/// Returns the ways not to answer a call.
fn silences() -> [Fault; 3] {
    [Fault::Hang, Fault::Half, Fault::Drip { pause_ms: 10 }]
}

#[test]
fn a_plugin_that_does_not_answer_when_asked_for_its_options_is_not_registered() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    for fault in silences() {
        let mut plugin = Plugin::start(&neighbours.bad(1).with_fault("GetDevicePluginOptions", fault));
        plugin.called("GetDevicePluginOptions");
        neighbours.pods_go_on();
        let said = plugin.refused();
        assert!(
            said.contains("GetDevicePluginOptions was not answered within 0.3 s"),
            "{said}"
        );
    }
    neighbours.unharmed();
}

#[test]
fn advice_that_does_not_come_whole_is_done_without() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let options = Options {
        preferred: true,
        pre_start: false,
    };
    let mut plugin = Plugin::registered(&Script {
        options,
        ..neighbours.bad(4)
    });
    neighbours.until_capacity(BAD, 4);
    for (number, fault) in silences().into_iter().enumerate() {
        plugin.fault("GetPreferredAllocation", Some(&fault));
        let got = neighbours.admit(&format!("bad-{number}"), BAD).unwrap();
        assert_eq!(got, format!("bad-{number}"));
        plugin.called("GetPreferredAllocation");
        neighbours.pods_go_on();
    }
    neighbours.unharmed();
}

#[test]
fn a_plugin_that_does_not_answer_an_allocation_whole_keeps_no_device_from_others() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    for fault in silences() {
        plugin.fault("Allocate", Some(&fault));
        let refused = neighbours.admit("bad", BAD).unwrap_err();
        assert!(
            refused.contains("Allocate was not answered within 0.3 s"),
            "{refused}"
        );
        neighbours.pods_go_on();
    }
    plugin.fault("Allocate", None);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}

#[test]
fn a_long_error_text_is_shortened_and_costs_neither_the_call_nor_the_connection() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    for bytes in [6_000, 16_000, 100_000] {
        // Each of these takes three bytes on the wire.
        let message = format!("the device is broken{}", "\n".repeat(bytes - 20));
        plugin.fault("Allocate", Some(&Fault::Refuse { code: 9, message }));
        let refused = neighbours.admit("bad", BAD).unwrap_err();
        let is_short = refused.len() < 1_500 && refused.contains(&format!("({bytes} bytes)"));
        assert!(is_short && refused.contains("the device is broken"), "{refused}");
        neighbours.pods_go_on();
    }
    plugin.fault("Allocate", None);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}

#[test]
fn a_plugin_that_does_not_answer_before_a_start_stops_that_start_alone() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let options = Options {
        preferred: false,
        pre_start: true,
    };
    let mut plugin = Plugin::registered(&Script {
        options,
        ..neighbours.bad(1)
    });
    neighbours.until_capacity(BAD, 1);
    neighbours.admit("bad", BAD).unwrap();
    for fault in silences() {
        plugin.fault("PreStartContainer", Some(&fault));
        let refused = neighbours.daemon.refused(&["options", "bad"]);
        assert!(
            refused.contains("PreStartContainer was not answered within 0.3 s"),
            "{refused}"
        );
        neighbours.pods_go_on();
    }
    neighbours.unharmed();
}

#[test]
fn a_plugin_in_the_registry_that_does_not_answer_whole_gets_in_all_the_same() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    for call in ["GetInfo", "NotifyRegistrationStatus"] {
        for fault in silences() {
            let script = Script {
                door: Door::Registry,
                ..neighbours.bad(1)
            };
            let mut plugin = Plugin::start(&script.with_fault(call, fault));
            plugin.called(call);
            neighbours.pods_go_on();
            plugin.fault(call, None);
            // A plugin that ignores the notification stays registered, and is not notified again.
            if call == "GetInfo" {
                plugin.until(&Event::Registered);
            }
            neighbours.until_capacity(BAD, 1);
            plugin.exit();
            neighbours.until_resource(BAD, |each| each.allocatable == 0);
        }
    }
    neighbours.unharmed();
}

#[test]
fn an_allocation_without_an_answer_fails_and_frees_its_device() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    for (fault, problem) in [
        (
            Fault::NoContainers,
            "the answer does not contain a response for the container",
        ),
        (
            Fault::Raw(Vec::new()),
            "the answer does not contain a response for the container",
        ),
        (Fault::Raw(vec![0x0a, 200, 1]), "the answer is damaged"),
        // AllocateResponse { container_responses: [{ envs: {"\xff": ""} }] }
        (
            Fault::Raw(vec![0x0a, 5, 0x0a, 3, 0x0a, 1, 0xff]),
            "the answer is damaged",
        ),
    ] {
        plugin.fault("Allocate", Some(&fault));
        let refused = neighbours.admit("bad", BAD).unwrap_err();
        assert!(refused.contains(problem), "{fault:?}: {refused}");
        neighbours.pods_go_on();
    }
    plugin.fault("Allocate", Some(&Fault::TooManyContainers));
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}

#[test]
fn pods_that_fail_at_a_plugin_again_and_again_are_slowed_down_alone() {
    let neighbours = Neighbourhood::configured(IMPATIENT);
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    plugin.fault("Allocate", Some(&Fault::NoContainers));
    let began = Instant::now();
    // The limit is 60 in a minute.
    for _ in 0..62 {
        neighbours.admit("bad", BAD).unwrap_err();
    }
    assert!(began.elapsed() >= Duration::from_secs(1));
    plugin.fault("Allocate", None);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}

fn mount(container_path: &str, host_path: &str) -> Mount {
    Mount {
        container_path: container_path.into(),
        host_path: host_path.into(),
        read_only: false,
    }
}

#[test]
fn mounts_that_contradict_each_other_or_lead_out_are_told_as_they_are() {
    let mut neighbours = Neighbourhood::new();
    let mounts = vec![
        mount("/data", "/srv/one"),
        mount("/data", "/srv/two"),
        mount("/lib/../../etc", "/srv/../etc"),
    ];
    let answer = Answer {
        mounts,
        ..Answer::default()
    };
    let _plugin = Plugin::registered(&Script {
        answer,
        ..neighbours.bad(1)
    });
    neighbours.until_capacity(BAD, 1);
    neighbours.admit("bad", BAD).unwrap();
    neighbours.pods_go_on();
    let output = neighbours.daemon.run(&["options", "bad"]);
    let options = crate::common::stdout(&output);
    for path in ["/srv/one", "/srv/../etc", "/lib/../../etc"] {
        assert!(options.contains(path), "{path}: {options}");
    }
    assert!(!options.contains("/srv/two"), "{options}");
    neighbours.unharmed();
}

#[test]
fn ten_megabytes_of_variables_are_refused_and_leave_nothing_behind() {
    let mut neighbours = Neighbourhood::new();
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    // One variable: AllocateResponse { container_responses: [{ envs: {"A": "xxx…"} }] }
    plugin.fault("Allocate", Some(&Fault::LargeEnv(10 << 20)));
    for _ in 0..3 {
        let refused = neighbours.admit("bad", BAD).unwrap_err();
        assert!(refused.contains("limits.answerBytes"), "{refused}");
        neighbours.pods_go_on();
    }
    assert_eq!(neighbours.hits("answerBytes"), 3);
    plugin.fault("Allocate", None);
    assert_eq!(neighbours.admit("bad", BAD).unwrap(), "bad-0");
    neighbours.unharmed();
}
