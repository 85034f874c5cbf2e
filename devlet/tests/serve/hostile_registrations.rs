//! Plugins that register and do not serve, or register too often. Pods of another plugin are not affected.

use devlet_client::v1::ResourceState;
use devlet_testkit::{Api, Door, Event, Plugin, Script};

use crate::hostile::{BAD, IMPATIENT, Neighbourhood};

#[test]
fn a_plugin_that_registers_and_vanishes_leaves_nothing_behind() {
    let mut neighbours = Neighbourhood::new();
    for number in 0..5 {
        let plugin = Plugin::registered(&neighbours.bad(2));
        neighbours.until_capacity(BAD, 2);
        match number % 2 {
            0 => plugin.kill(),
            _ => plugin.exit(),
        }
        neighbours.until_resource(BAD, |each| each.state() == ResourceState::Gone);
        neighbours.one_pod_goes_on();
    }
    neighbours.unharmed();
}

#[test]
fn a_plugin_that_is_gone_when_it_is_dialled_is_not_registered() {
    let mut neighbours = Neighbourhood::configured(IMPATIENT);
    let mut plugin = Plugin::start(&Script {
        door: Door::Claim,
        ..neighbours.bad(1)
    });
    neighbours.pods_go_on();
    let said = plugin.refused();
    assert!(said.contains("no socket at"), "{said}");
    assert!(neighbours.resource(BAD).is_none());
    neighbours.unharmed();
}

#[test]
fn a_plugin_that_registers_a_thousand_times_a_second_is_slowed_down_alone() {
    slowed_down_alone(Api::V1beta1);
}

#[test]
fn so_is_one_of_2017() {
    slowed_down_alone(Api::V1alpha2);
}

fn slowed_down_alone(api: Api) {
    let mut neighbours = Neighbourhood::configured("limits: {registrationsPerMinute: 50}");
    let mut plugin = Plugin::registered(&Script {
        api,
        ..neighbours.bad(2)
    });
    neighbours.until_capacity(BAD, 2);
    plugin.register_often(1_000, 1_000);
    while !plugin.has_event(|event| matches!(event, Event::Registrations { .. })) {
        neighbours.one_pod_goes_on();
    }
    let (registered, refused, messages) = plugin.registrations();
    assert!(
        registered > 0 && refused > 0,
        "{registered} registered, {refused} refused"
    );
    let named = |limit: &str| messages.iter().any(|message| message.contains(limit));
    assert!(named("limits.registrationsPerMinute allows 50"), "{messages:?}");
    assert!(
        named(&format!(
            "the process registers {BAD} too often, devlet allows 10"
        )),
        "{messages:?}"
    );
    assert!(neighbours.hits("registrationsPerMinute") > 0);
    // The plugin of another process can still register.
    let _other = Plugin::registered(&Script {
        resource: "acme.com/other".into(),
        ..neighbours.bad(1)
    });
    neighbours.until_capacity("acme.com/other", 1);
    neighbours.until_capacity(BAD, 2);
    neighbours.unharmed();
}
