//! Devices of leases as the kubelet and the views show them.

use alloc::sync::Arc;

use super::leases::{grant, ids, prepare, start};
use super::*;
use crate::device_plugin::inventory::{EVICT_AFTER_MS, GRACE_MS};
use crate::node::Restored;
use crate::shield::LeaseHolder;

/// A node whose plugin lists devices on two NUMA nodes.
fn served() -> Node {
    let mut node = Node::default();
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    let devices = vec![
        healthy_on("g0", &[0]),
        healthy_on("g1", &[0]),
        healthy_on("g2", &[1]),
    ];
    node.devices_listed(connection, list_of(devices));
    node
}

#[test]
fn a_pod_with_a_lease_is_shown_as_the_holder_of_its_devices() {
    let mut node = served();
    grant(node.leases_mut(), "a", &[1]);
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    assert!(node.leases_mut().identify(&"a".into(), &holder));
    assert!(!node.leases_mut().identify(&"a".into(), &holder));

    let devices = node.devices(&GPU.into());

    let holders: Vec<usize> = devices.iter().map(|device| device.holders.len()).collect();
    assert_eq!(holders, [0, 1, 0]);
}

#[test]
fn the_kubelet_is_advised_to_choose_devices_that_no_container_has() {
    let mut node = served();
    let choose = |node: &Node, available: &[usize], count: usize, preferred: &[DeviceId]| {
        node.lease_choice(&GPU.into(), &ids(available), &ids(&[]), count, preferred)
    };
    assert_eq!(choose(&node, &[0, 1, 2], 2, &[]), ["g0".into(), "g1".into()]);
    assert_eq!(choose(&node, &[0, 1, 2], 1, &["g1".into()]), ["g1".into()]);
    grant(node.leases_mut(), "a", &[1]);
    prepare(node.leases_mut(), &[1]);
    start(node.leases_mut(), "a", "c1").unwrap();

    assert_eq!(
        choose(&node, &[0, 1, 2], 2, &["g1".into()]),
        ["g0".into(), "g2".into()]
    );
    // The kubelet decides: without another device, one that a container still has is chosen.
    assert_eq!(choose(&node, &[1], 1, &[]), ["g1".into()]);
    assert!(choose(&node, &[1], 2, &[]).is_empty());
}

#[test]
fn devices_of_a_plugin_that_looks_for_them_stay_advertised() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    let shown = |node: &Node, now| {
        let advertised = node.advertised(&GPU.into(), now, START, 1_000);
        (advertised.list.healthy().count(), advertised.is_expired)
    };
    assert_eq!(shown(&node, START), (3, false));
    node.connection_lost(connection, START);
    assert_eq!(shown(&node, START.after(999)), (3, false));
    assert_eq!(shown(&node, START.after(1_000)), (3, true));
    // A new process that has found nothing yet does not change that.
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, list_of(Vec::new()));
    assert_eq!(shown(&node, START.after(999)), (3, false));
    node.devices_listed(connection, list(&["g0"]));
    assert_eq!(shown(&node, START.after(5_000)), (1, false));
    node.devices_listed(connection, list_of(Vec::new()));
    assert_eq!(shown(&node, START.after(5_000)), (0, false));
}

/// A list with these devices, all unhealthy.
fn unhealthy(names: &[&str]) -> Arc<DeviceList> {
    let device = |name: &&str| Device {
        id: (*name).into(),
        healthy: false,
        nodes: Vec::new(),
    };
    Arc::new(list_of(names.iter().map(device).collect()))
}

/// Returns the devices that the kubelet gets as healthy.
fn shown(node: &Node, now: Moment) -> Vec<String> {
    let advertised = node.advertised(&GPU.into(), now, START, 1_000);
    let listed = advertised.list.devices().iter();
    let listed = listed
        .filter(|device| advertised.is_healthy(device))
        .map(|device| &device.id);
    let mut shown: Vec<String> = listed
        .chain(advertised.unlisted())
        .map(ToString::to_string)
        .collect();
    shown.sort();
    shown
}

#[test]
fn devices_of_containers_stay_healthy_while_their_plugin_is_away() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);

    assert_eq!(shown(&node, START.after(1_000)), ["g1"]);

    // They are not drawn from the list: after a restart, it may be lost.
    let leases = node.leases().iter().map(|view| view.lease.clone()).collect();
    let node = Node::restore(Restored {
        leases,
        ..Restored::default()
    });
    assert!(node.advertised_resources().contains(GPU));
    assert_eq!(shown(&node, START.after(5_000)), ["g1"]);
}

#[test]
fn the_last_list_before_a_shutdown_does_not_lose_devices_of_containers() {
    for last in [unhealthy(&["g0", "g1", "g2"]), unhealthy(&[])] {
        let mut node = served();
        let connection = node.serving(&GPU.into()).unwrap();
        grant(node.leases_mut(), "a", &[1]);
        node.devices_listed(connection, last);
        // A plugin that has found its devices is right about them.
        assert!(shown(&node, START).is_empty());

        node.connection_lost(connection, START);

        assert_eq!(shown(&node, START), ["g1"]);
    }
}

#[test]
fn a_plugin_that_lists_unhealthy_devices_after_its_restart_is_believed() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, unhealthy(&[]));
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);

    node.devices_listed(connection, unhealthy(&["g0", "g1", "g2"]));

    assert_eq!(shown(&node, START.after(999)), ["g1"]);
    assert!(shown(&node, START.after(1_000)).is_empty());
    // A plugin that comes and goes without a device gets no more time.
    node.connection_lost(connection, START.after(900));
    assert_eq!(shown(&node, START.after(1_000)), ["g1"]);
}

#[test]
fn a_plugin_that_is_away_gets_time_once_and_is_forgotten_after_it() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    let end = START.after(1_000 + GRACE_MS);
    let to_forget = |node: &Node, now| node.lists_to_forget(now, START, 1_000);
    assert!(to_forget(&node, end).is_empty(), "a container has a device");
    let ending = node.leases_mut().begin_end("a").unwrap();
    node.leases_mut().finish(ending);

    assert!(to_forget(&node, START.after(999 + GRACE_MS)).is_empty());
    assert_eq!(to_forget(&node, end), [GPU.into()]);
    // A reboot gives it time again.
    assert!(node.lists_to_forget(end, START.after(1), 1_000).is_empty());

    node.forget_lists(&[GPU.into()]);
    assert!(node.advertised_resources().is_empty());
    assert!(to_forget(&node, end).is_empty());
    // The record is replaced, too.
    assert_eq!(node.unrecorded_lists().len(), 0, "it has never been recorded");
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, list(&["g0"]));
    assert_eq!(shown(&node, end), ["g0"]);
}

#[test]
fn a_resource_with_a_lease_is_not_idle() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    node.evict_idle(START.after(EVICT_AFTER_MS));
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);
}

#[test]
fn leased_devices_are_held_and_not_free() {
    let mut node = served();
    grant(node.leases_mut(), "a", &[1]);
    grant(node.leases_mut(), "b", &[1]);
    grant(node.leases_mut(), "absent", &[7]);

    let capacity = node.capacity_of(&GPU.into(), START);

    assert_eq!((capacity.held, capacity.free), (2, 2));
    assert_eq!(node.devices(&GPU.into()).len(), 3);
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    node.leases_mut().identify(&"absent".into(), &holder);
    assert_eq!(node.devices(&GPU.into()).len(), 4);
}
