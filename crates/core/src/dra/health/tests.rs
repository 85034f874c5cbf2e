use alloc::format;
use alloc::vec;

use super::*;

const OLD: ConnectionId = ConnectionId(1);
const NEW: ConnectionId = ConnectionId(2);
const START: Moment = Moment(1_000_000);

fn at(device: &str) -> PoolDevice {
    PoolDevice {
        pool: "pool".into(),
        device: device.into(),
    }
}

fn report(device: &str, health: DeviceHealth, lease_ms: u64) -> HealthReport {
    HealthReport {
        device: at(device),
        health,
        message: String::new(),
        lease_ms,
    }
}

fn healthy(device: &str) -> HealthReport {
    report(device, DeviceHealth::Healthy, 0)
}

fn unhealthy(device: &str) -> HealthReport {
    report(device, DeviceHealth::Unhealthy, 0)
}

fn of(health: &Health, device: &str, now: Moment) -> DeviceHealth {
    health.of(&at(device), now).0
}

#[test]
fn a_report_holds_for_its_lease() {
    let mut health = Health::default();
    let (changed, _) = health.reported(
        OLD,
        vec![healthy("a"), report("b", DeviceHealth::Healthy, 5)],
        START,
    );
    assert_eq!(changed, [at("a"), at("b")]);
    assert_eq!(
        of(&health, "a", START.after(DEFAULT_LEASE_MS - 1)),
        DeviceHealth::Healthy
    );
    assert_eq!(
        of(&health, "a", START.after(DEFAULT_LEASE_MS)),
        DeviceHealth::Unknown
    );
    assert_eq!(of(&health, "b", START.after(5)), DeviceHealth::Unknown);
    assert_eq!(of(&health, "c", START), DeviceHealth::Unknown);
    assert_eq!(health.next_expiry(), Some(START.after(5)));
}

#[test]
fn a_repeated_report_extends_the_lease_and_changes_nothing() {
    let mut health = Health::default();
    health.reported(OLD, vec![healthy("a")], START);
    let later = START.after(DEFAULT_LEASE_MS - 1);
    assert_eq!(health.reported(OLD, vec![healthy("a")], later).0, []);
    assert_eq!(
        of(&health, "a", START.after(DEFAULT_LEASE_MS)),
        DeviceHealth::Healthy
    );
    assert_eq!(health.next_expiry(), Some(later.after(DEFAULT_LEASE_MS)));
    assert_eq!(health.reported(OLD, vec![unhealthy("a")], later).0, [at("a")]);
}

#[test]
fn an_expired_report_is_a_change_unless_it_was_unknown() {
    let mut health = Health::default();
    let unknown = report("u", DeviceHealth::Unknown, 0);
    health.reported(OLD, vec![healthy("a"), unknown], START);
    let end = START.after(DEFAULT_LEASE_MS);
    assert_eq!(
        health.reported(OLD, vec![healthy("b")], end).0,
        [at("a"), at("b")]
    );
    assert_eq!(health.expire(end), []);
    assert_eq!(health.devices.len(), 1);
}

#[test]
fn the_newest_plugin_that_reports_is_believed() {
    let mut health = Health::default();
    health.reported(OLD, vec![unhealthy("a"), unhealthy("b")], START);
    health.reported(NEW, vec![healthy("a")], START);
    assert_eq!(
        health
            .reported(OLD, vec![unhealthy("a"), unhealthy("b")], START)
            .0,
        []
    );
    assert_eq!(of(&health, "a", START), DeviceHealth::Healthy);
    health.stream_ended(OLD);
    assert_eq!(
        of(&health, "b", START),
        DeviceHealth::Unhealthy,
        "one stream ends, all reports stay valid"
    );
    health.stream_ended(NEW);
    assert_eq!(of(&health, "a", START), DeviceHealth::Healthy);
    assert_eq!(health.reported(OLD, vec![unhealthy("a")], START).0, [at("a")]);
}

#[test]
fn memory_is_bounded() {
    let mut health = Health::default();
    let flood = (0..MAX_DEVICES + 3)
        .map(|number| healthy(&format!("{number}")))
        .collect();
    let (changed, dropped) = health.reported(OLD, flood, START);
    assert_eq!(
        (changed.len(), dropped, health.devices.len()),
        (MAX_DEVICES, 3, MAX_DEVICES)
    );
    let known = health.reported(OLD, vec![unhealthy("0"), unhealthy("new")], START);
    assert_eq!(known, (vec![at("0")], 1));
}

#[test]
fn no_lease_is_longer_than_the_longest() {
    let mut health = Health::default();
    health.reported(OLD, vec![report("a", DeviceHealth::Healthy, u64::MAX)], START);
    assert_eq!(health.next_expiry(), Some(START.after(MAX_LEASE_MS)));
}

#[test]
fn reports_of_ended_streams_are_replaced_in_a_full_table() {
    let mut health = Health::default();
    let flood = (1..MAX_DEVICES)
        .map(|number| healthy(&format!("{number}")))
        .collect();
    health.reported(OLD, flood, START);
    health.reported(
        OLD,
        vec![report("last", DeviceHealth::Unhealthy, u64::MAX)],
        START,
    );
    assert_eq!(health.reported(NEW, vec![healthy("new")], START), (vec![], 1));
    health.stream_ended(OLD);
    let (changed, dropped) = health.reported(NEW, vec![healthy("new"), healthy("1"), healthy("2")], START);
    assert_eq!(
        (changed, dropped),
        (vec![at("1"), at("new"), at("10"), at("1")], 0)
    );
    let fresh = (0..MAX_DEVICES)
        .map(|number| healthy(&format!("new-{number}")))
        .collect();
    let (_, dropped) = health.reported(NEW, fresh, START);
    assert_eq!((dropped, health.devices.len()), (3, MAX_DEVICES), "its own stay");
    assert_eq!(of(&health, "new", START), DeviceHealth::Healthy);
    assert_eq!(of(&health, "last", START), DeviceHealth::Unknown);
    assert_eq!(health.counts()[&DeviceHealth::Healthy], MAX_DEVICES);
}

#[test]
fn messages_are_cut_between_characters() {
    for (message, length) in [
        (String::new(), 0),
        ("x".repeat(MAX_MESSAGE), MAX_MESSAGE),
        ("x".repeat(MAX_MESSAGE + 1), MAX_MESSAGE),
        ("ä".repeat(MAX_MESSAGE), MAX_MESSAGE - 1),
    ] {
        let is_cut = message.len() > MAX_MESSAGE;
        let cut = truncate(message);
        assert_eq!((cut.len(), cut.ends_with(ELLIPSIS)), (length, is_cut));
    }
}

#[test]
fn devices_are_counted_by_how_they_are() {
    let mut health = Health::default();
    let counted = |health: &Health| {
        let of = |which| health.counts().get(&which).copied().unwrap_or(0);
        (
            of(DeviceHealth::Healthy),
            of(DeviceHealth::Unhealthy),
            of(DeviceHealth::Unknown),
        )
    };
    let unknown = report("c", DeviceHealth::Unknown, 0);
    health.reported(OLD, vec![healthy("a"), unhealthy("b"), unknown], START);
    assert_eq!(counted(&health), (1, 1, 1));
    let short = report("a", DeviceHealth::Unhealthy, 5);
    health.reported(OLD, vec![short, healthy("c"), healthy("c")], START);
    assert_eq!(counted(&health), (1, 2, 0));
    health.expire(START.after(5));
    assert_eq!(counted(&health), (1, 1, 0));
    health.expire(START.after(DEFAULT_LEASE_MS));
    assert_eq!(counted(&health), (0, 0, 0));
}
