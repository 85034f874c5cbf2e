//! Tests of connections, device lists and resources.

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::device_plugin::inventory::{EVICT_AFTER_MS, GRACE_MS, LastPlugin, MAX_IDLE};
use crate::device_plugin::rejections::{MAX_REJECTIONS, RETENTION_MS, Rejection};
use crate::{Availability, Capacity, ConnectError, Restored};

fn counts(node: &Node, now: Moment) -> (usize, usize) {
    let Capacity {
        capacity,
        allocatable,
        ..
    } = node.capacity_of(&gpu(), now);
    (capacity, allocatable)
}

fn listed(node: &Node) -> Vec<String> {
    let devices = node.devices(&gpu()).into_iter().filter(|device| device.listed);
    devices.map(|device| device.id.to_string()).collect()
}

// TestDevicePluginReRegistration
#[test]
fn a_second_plugin_with_the_same_devices_changes_no_count() {
    let mut node = node_with_gpus(&["a", "b"]);

    serve(&mut node, GPU, "second.sock", &["a", "b"]);

    assert_eq!(counts(&node, START), (2, 2));
}

// TestDevicePluginReRegistration
#[test]
fn the_newest_list_counts_as_a_whole() {
    let mut node = node_with_gpus(&["a", "b"]);

    serve(&mut node, GPU, "second.sock", &["c"]);

    assert_eq!(listed(&node), ["c"]);
    assert_eq!(counts(&node, START), (1, 1));
}

// e2e "Device Plugin Multiple: DP2 takes long time to start working"
#[test]
fn a_second_plugin_without_a_list_leaves_the_first_one_serving() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a"]);

    connect(&mut node, offer(GPU, "second.sock"));

    assert_eq!(node.serving(&gpu()), Some(first));
    assert_eq!(counts(&node, START), (1, 1));
}

// Spec §27.11: the kubelet does not bring the list of the other plugin back.
#[test]
fn when_the_newest_plugin_leaves_the_list_of_the_other_counts_again() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a", "b"]);
    let second = serve(&mut node, GPU, "second.sock", &["z"]);

    node.connection_lost(second, START);

    assert_eq!(listed(&node), ["a", "b"]);
    assert_eq!((node.serving(&gpu()), free(&node, GPU)), (Some(first), 2));
}

#[test]
fn the_newest_list_of_the_remaining_plugins_is_active() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a"]);
    serve(&mut node, GPU, "second.sock", &["b"]);
    node.devices_listed(first, list(&["a", "c"]));
    let third = serve(&mut node, GPU, "third.sock", &["z"]);

    node.connection_lost(third, START);

    assert_eq!(
        listed(&node),
        ["a", "c"],
        "the first plugin spoke after the second"
    );
}

// e2e "Device Plugin Multiple: Basic rollout of device plugins with zero downtime"
#[test]
fn when_an_older_plugin_leaves_nothing_changes_for_the_newer() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a", "b"]);
    let second = serve(&mut node, GPU, "second.sock", &["a", "b", "c"]);

    node.connection_lost(first, START);

    assert_eq!(
        (node.serving(&gpu()), counts(&node, START)),
        (Some(second), (3, 3))
    );
}

// e2e "Device Plugin Multiple: DP2 changed its mind"
#[test]
fn an_older_plugin_that_repeats_its_list_is_the_newest_again() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a"]);
    serve(&mut node, GPU, "second.sock", &["b"]);

    let news = node.devices_listed(first, list(&["a"]));

    assert!(news);
    assert_eq!(
        (node.serving(&gpu()), listed(&node)),
        (Some(first), vec!["a".to_string()])
    );
}

// Spec §27.13: the kubelet writes its file on every message.
#[test]
fn a_repeated_list_changes_nothing() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a"]);
    let before = everything(&node);

    let news = node.devices_listed(only, list(&["a"]));

    assert!(!news);
    assert_eq!(everything(&node), before);
}

// Spec §27.1: in the kubelet this wedges the plugin.
#[test]
fn a_plugin_at_the_same_endpoint_replaces_the_one_before() {
    let mut node = Node::default();
    let old = serve(&mut node, GPU, "same.sock", &["a"]);

    let (new, replaced) = node.plugin_connected(offer(GPU, "same.sock"), START).unwrap();

    assert_eq!(replaced, Some(old));
    assert_eq!(
        node.plugins()
            .iter()
            .map(|plugin| plugin.connection)
            .collect::<Vec<_>>(),
        [new]
    );
    assert_eq!(node.availability(&gpu()), Availability::NotListed);
}

#[test]
fn a_replaced_plugin_leaves_the_list_of_another_active() {
    let mut node = Node::default();
    let other = serve(&mut node, GPU, "other.sock", &["a"]);
    serve(&mut node, GPU, "same.sock", &["b"]);

    connect(&mut node, offer(GPU, "same.sock"));

    assert_eq!(
        (node.serving(&gpu()), listed(&node)),
        (Some(other), vec!["a".to_string()])
    );
}

#[test]
fn one_endpoint_may_serve_two_resources() {
    let mut node = Node::default();
    serve(&mut node, GPU, "same.sock", &["a"]);

    let (_, replaced) = node.plugin_connected(offer(NIC, "same.sock"), START).unwrap();

    assert_eq!(replaced, None);
    assert_eq!(node.plugins().len(), 2);
}

#[test]
fn late_messages_of_a_replaced_connection_change_nothing() {
    let mut node = Node::default();
    let old = serve(&mut node, GPU, "same.sock", &["a"]);
    serve(&mut node, GPU, "same.sock", &["a", "b"]);
    let before = everything(&node);

    let news = (
        node.devices_listed(old, list(&["z"])),
        node.connection_lost(old, START),
    );

    assert_eq!(news, (false, false));
    assert_eq!(everything(&node), before);
}

#[test]
fn late_messages_of_a_lost_connection_change_nothing() {
    let mut node = Node::default();
    let lost = serve(&mut node, GPU, "only.sock", &["a"]);
    node.connection_lost(lost, START);
    let before = everything(&node);

    let news = (
        node.devices_listed(lost, list(&["a"])),
        node.connection_lost(lost, Moment(START.0 + 1)),
    );

    assert_eq!(news, (false, false));
    assert_eq!(everything(&node), before);
}

#[test]
fn a_second_plugin_of_another_user_is_refused() {
    let mut node = node_with_gpus(&["a"]);
    let before = everything(&node);
    let stranger = Offer {
        process: crate::ProcessId { uid: 1001, pid: None },
        ..offer(GPU, "stranger.sock")
    };

    let refused = node.plugin_connected(stranger, START).unwrap_err();

    assert_eq!(
        refused.to_string(),
        "acme.com/gpu is served by a plugin of user 0 at acme.com/gpu.sock; user 1001 may not serve it too"
    );
    assert_eq!(everything(&node), before);
}

#[test]
fn another_user_cannot_take_over_the_endpoint_of_a_connected_plugin() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "same.sock", &["a"]);
    let stranger = Offer {
        process: crate::ProcessId { uid: 1001, pid: None },
        ..offer(GPU, "same.sock")
    };

    let refused = node.plugin_connected(stranger, START);

    assert!(
        matches!(
            refused,
            Err(ConnectError::OtherUser {
                first: 0,
                uid: 1001,
                ..
            })
        ),
        "{refused:?}"
    );
    assert_eq!(node.serving(&gpu()), Some(first));
}

#[test]
fn a_plugin_of_another_user_that_may_share_is_accepted() {
    let mut node = node_with_gpus(&["a"]);
    let guest = Offer {
        process: crate::ProcessId { uid: 1001, pid: None },
        may_share: true,
        ..offer(GPU, "guest.sock")
    };

    assert!(node.plugin_connected(guest, START).is_ok());
    assert_eq!(node.plugins().len(), 2);
}

#[test]
fn another_user_may_serve_a_resource_after_its_plugin_left() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "same.sock", &["a"]);
    node.connection_lost(first, START);
    let next = Offer {
        process: crate::ProcessId { uid: 1001, pid: None },
        ..offer(GPU, "same.sock")
    };

    assert!(node.plugin_connected(next, START).is_ok());
}

// TestUpdateCapacityAllocatable; e2e "will lower allocatable to a number of unhealthy devices and then back"
#[test]
fn unhealthy_devices_count_towards_capacity_only() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "only.sock"));
    let mut seen = Vec::new();

    for devices in [
        vec![healthy("a"), healthy("b"), unhealthy("c")],
        vec![healthy("a"), healthy("b")],
        vec![healthy("a"), unhealthy("b"), unhealthy("c")],
        vec![unhealthy("b"), unhealthy("c")],
        vec![],
        vec![healthy("a")],
    ] {
        node.devices_listed(only, list_of(devices));
        seen.push(counts(&node, START));
    }

    assert_eq!(seen, [(3, 2), (2, 2), (3, 1), (2, 0), (0, 0), (1, 1)]);
}

// TestGetAllocatableDevicesMultipleResources
#[test]
fn resources_are_independent() {
    let mut node = node_serving(&[(GPU, &["a", "b"]), (NIC, &["a"])]);

    let nic = node.serving(&NIC.into()).unwrap();
    node.connection_lost(nic, START);

    assert_eq!(counts(&node, START), (2, 2));
    assert_eq!(node.capacity_of(&NIC.into(), START).allocatable, 0);
}

// TestUpdateCapacityAllocatable, TestEndpointSyncOnDisconnect; e2e "when device plugin is stopped after
// provisioning devices, node allocatable will be set to zero"
#[test]
fn when_the_last_plugin_leaves_allocatable_is_zero_and_capacity_lasts_for_the_grace() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a", "b"]);

    node.connection_lost(only, START);

    assert_eq!(counts(&node, START), (2, 0));
    assert_eq!(counts(&node, Moment(START.0 + GRACE_MS)), (2, 0));
    assert_eq!(counts(&node, Moment(START.0 + GRACE_MS + 1)), (0, 0));
    assert_eq!(
        counts(&node, Moment(0)),
        (2, 0),
        "a clock that is set back ends nothing"
    );
}

#[test]
fn a_plugin_that_never_lists_does_not_bring_back_what_the_grace_has_ended() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a", "b"]);
    node.connection_lost(only, START);
    let later = Moment(START.0 + GRACE_MS + 1);

    let (silent, _) = node.plugin_connected(offer(GPU, "only.sock"), later).unwrap();

    assert_eq!(counts(&node, later), (0, 0));
    node.connection_lost(silent, later);
    assert_eq!(counts(&node, later), (0, 0));
}

#[test]
fn a_plugin_that_crashes_before_its_list_does_not_prolong_the_grace() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a"]);
    node.connection_lost(only, START);
    let later = Moment(START.0 + GRACE_MS);
    let (silent, _) = node.plugin_connected(offer(GPU, "only.sock"), later).unwrap();

    node.connection_lost(silent, later);

    assert_eq!(counts(&node, later), (1, 0));
    assert_eq!(counts(&node, Moment(later.0 + 1)), (0, 0));
}

// e2e "when ListAndWatch fails immediately, node allocatable will be set to zero"
#[test]
fn a_plugin_that_leaves_before_its_first_list_counts_for_nothing() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "only.sock"));

    node.connection_lost(only, START);

    assert_eq!(counts(&node, START), (0, 0));
}

#[test]
fn the_same_list_after_the_plugin_came_back_is_active_again() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "only.sock", &["a"]);
    node.connection_lost(first, START);

    serve(&mut node, GPU, "only.sock", &["a"]);

    assert_eq!((counts(&node, START), free(&node, GPU)), ((1, 1), 1));
}

// TestUpdateCapacityAllocatable: after the checkpoint was read again
#[test]
fn after_a_restart_a_resource_is_known_and_counts_for_nothing() {
    let last = LastPlugin {
        endpoint: "old.sock".into(),
        gone_since: START,
    };
    let resources = [(gpu(), Some(last.clone()))].into();

    let node = Node::restore(Restored {
        resources,
        ..Restored::default()
    });

    assert_eq!(node.capacity(START), [(gpu(), Capacity::default())].into());
    assert_eq!(node.availability(&gpu()), Availability::Gone(Some(last)));
}

#[test]
fn a_device_that_vanishes_while_held_stays_with_its_pod() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));

    node.devices_listed(only, list(&["b"]));

    assert_eq!(held(node.pod(&"p".into()).unwrap(), "main"), ["a"]);
    assert_eq!(free(&node, GPU), 1);
    assert_sound(&node);
}

#[test]
fn a_device_that_comes_back_while_held_is_not_free() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.devices_listed(only, list(&[]));

    node.devices_listed(only, list(&["a"]));

    assert_eq!(free(&node, GPU), 0);
    assert_sound(&node);
}

#[test]
fn a_device_that_is_released_while_unlisted_is_free_when_it_comes_back() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.devices_listed(only, list(&["b"]));
    release(&mut node, "p");

    node.devices_listed(only, list(&["a", "b"]));

    assert_eq!(free(&node, GPU), 2);
    assert_sound(&node);
}

#[test]
fn a_device_that_is_released_while_unhealthy_is_not_free() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.devices_listed(only, list_of(vec![unhealthy("a")]));

    release(&mut node, "p");

    assert_eq!(free(&node, GPU), 0);
    assert_sound(&node);
}

#[test]
fn a_device_that_is_released_while_the_plugin_is_away_is_not_free() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.connection_lost(only, START);

    release(&mut node, "p");

    assert_eq!(node.capacity_of(&gpu(), START).free, 0);
    assert_sound(&node);
}

// Spec §27.3: a device that leaves the list during Allocate makes the kubelet crash.
#[test]
fn a_device_that_vanishes_while_reserved_is_committed_without_a_node() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "only.sock"));
    node.devices_listed(only, list_of(vec![healthy_on("a", &[1]), healthy_on("b", &[1])]));
    let request = gpu_pod("p", 2);
    let id = reserve(&mut node, &request);
    node.devices_listed(only, list_of(vec![healthy_on("b", &[1])]));

    let pod = commit(&mut node, id, &request);

    assert_eq!(pod.allocations[0].nodes, [(-1, ids(&["a"])), (1, ids(&["b"]))]);
    assert_sound(&node);
}

#[test]
fn a_list_that_changes_during_a_reservation_does_not_free_what_is_set_aside() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["b", "c"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    node.devices_listed(only, list(&["a", "b", "c"]));

    assert_eq!(granted(&node, id, "main"), ["b"]);
    assert_eq!(
        admit(&mut node, &gpu_pod("q", 2)).allocations[0].devices,
        ids(&["a", "c"])
    );
    assert_sound(&node);
}

// TestGetContainerDevices
#[test]
fn a_device_on_two_nodes_is_recorded_under_both() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "only.sock"));
    node.devices_listed(only, list_of(vec![healthy_on("a", &[0, 1])]));

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(pod.allocations[0].nodes, [(0, ids(&["a"])), (1, ids(&["a"]))]);
}

#[test]
fn a_huge_number_of_nodes_is_accepted() {
    let devices = (0..2_000)
        .map(|number| healthy_on(&format!("{number:05}"), &[number]))
        .collect();
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "only.sock"));

    node.devices_listed(only, list_of(devices));

    assert_eq!(
        admit(&mut node, &gpu_pod("p", 2_000)).allocations[0]
            .devices
            .len(),
        2_000
    );
}

#[test]
fn idle_resources_are_limited_and_the_oldest_are_removed_first() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &pod("p", vec![app("main", &[(GPU, 1)])]));
    let serving = node.serving(&gpu()).unwrap();
    node.connection_lost(serving, START);
    for number in 0..=MAX_IDLE {
        let connection = connect(&mut node, offer(&format!("acme.com/{number:05}"), "x.sock"));
        node.connection_lost(connection, Moment(START.0 + 1 + number as u64));
    }

    let known = node.known_resources();

    assert_eq!(known.len(), MAX_IDLE + 1);
    assert!(known.contains_key(&gpu()), "it is held");
    assert!(!known.contains_key("acme.com/00000"));
    assert!(known.contains_key("acme.com/00001"));
}

#[test]
fn a_resource_is_forgotten_a_day_after_its_plugin_left() {
    let mut node = node_with_gpus(&["a"]);
    let serving = node.serving(&gpu()).unwrap();
    node.evict_idle(Moment(START.0 + 2 * EVICT_AFTER_MS));
    assert!(node.known_resources().contains_key(&gpu()), "it is served");
    node.connection_lost(serving, START);

    node.evict_idle(Moment(START.0 + EVICT_AFTER_MS - 1));
    assert!(node.known_resources().contains_key(&gpu()));
    let changes = (node.changes(), node.resource_changes());
    node.evict_idle(Moment(START.0 + EVICT_AFTER_MS));
    assert!(!node.known_resources().contains_key(&gpu()));
    assert!(node.changes() > changes.0 && node.resource_changes() > changes.1);
}

#[test]
fn a_resource_that_no_plugin_ever_served_is_forgotten_after_a_day_without_pods() {
    let mut node = Node::default();
    node.add_resources([ResourceName::from("acme.com/old")]);
    let is_known = |node: &Node| node.known_resources().contains_key("acme.com/old");
    let later = |milliseconds| Moment(START.0 + milliseconds);

    node.evict_idle(START);
    node.evict_idle(later(EVICT_AFTER_MS - 1));
    assert!(is_known(&node));
    node.evict_idle(later(EVICT_AFTER_MS));
    assert!(!is_known(&node));

    let mut held = Node::restore(Restored {
        pods: [imported("p", &[("main", "acme.com/old", &["a"])])]
            .into_iter()
            .map(|pod| (pod.uid.clone(), pod))
            .collect(),
        resources: [(ResourceName::from("acme.com/old"), None)].into_iter().collect(),
        ..Restored::default()
    });
    held.evict_idle(START);
    held.evict_idle(later(2 * EVICT_AFTER_MS));
    assert!(is_known(&held), "a pod holds it");
}

#[test]
fn passing_the_same_list_again_changes_nothing_and_earlier_lists_are_returned() {
    let mut node = Node::default();
    let first = serve(&mut node, GPU, "first.sock", &["a"]);
    let second = connect(&mut node, offer(GPU, "second.sock"));
    let [counts] = &node.lists_before(second)[..] else {
        panic!("the second has listed nothing, the first has")
    };
    assert_eq!(**counts, list(&["a"]));
    node.devices_listed(second, list(&["b"]));

    let own: Vec<_> = node.lists_before(first).iter().map(|each| each.len()).collect();
    assert_eq!(own, [1, 1], "its own, and the one that counts");
    let before = node.lists_before(second);
    assert!(!node.devices_listed(second, before[0].clone()), "the same");
    assert!(node.devices_listed(second, list(&["b", "c"])));
    assert_eq!(*before[0], list(&["b"]));
    node.connection_lost(second, Moment(1));
    assert!(node.lists_before(second).is_empty());
    assert_sound(&node);
}

fn rejection(resource: &str, endpoint: &str, reason: &str) -> Rejection {
    Rejection {
        resource: resource.into(),
        endpoint: endpoint.into(),
        uid: Some(7),
        pid: None,
        reason: reason.into(),
    }
}

#[test]
fn a_rejection_is_kept_until_the_plugin_registers_or_for_an_hour() {
    let mut node = Node::default();
    let later = Moment(START.0 + 1);
    assert!(node.plugin_rejected(rejection(GPU, "gpu.sock", "no"), START));
    let changes = node.changes();
    assert!(
        !node.plugin_rejected(rejection(GPU, "gpu.sock", "no"), later),
        "the same"
    );
    assert_eq!(node.changes(), changes);
    assert!(node.plugin_rejected(rejection(GPU, "gpu.sock", "never"), later));
    assert!(node.plugin_rejected(rejection(NIC, "nic.sock", "no"), later));
    let newest = node.rejected_plugins(later).next().unwrap();
    assert_eq!((newest.rejection.reason.as_str(), newest.attempts), ("never", 3));

    connect(&mut node, offer(GPU, "gpu.sock"));

    let left = |node: &Node, now| {
        let rejected = node.rejected_plugins(now);
        rejected
            .map(|each| each.rejection.resource.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(left(&node, later), [NIC]);
    assert!(left(&node, Moment(later.0 + RETENTION_MS)).is_empty());
}

#[test]
fn of_too_many_rejections_the_oldest_is_forgotten() {
    let mut node = Node::default();
    for number in 0..=MAX_REJECTIONS {
        let now = Moment(START.0 + number as u64);
        node.plugin_rejected(rejection(GPU, &alloc::format!("{number}.sock"), "no"), now);
    }
    let rejected: Vec<_> = node.rejected_plugins(START).collect();
    assert_eq!(rejected.len(), MAX_REJECTIONS);
    assert!(rejected.iter().all(|each| each.rejection.endpoint != "0.sock"));
}

#[test]
fn rejections_of_one_user_do_not_displace_those_of_others() {
    let mut node = Node::default();
    let other = Rejection {
        uid: Some(8),
        ..rejection(NIC, "nic.sock", "no")
    };
    node.plugin_rejected(other, START);
    for number in 0..2 * MAX_REJECTIONS {
        let now = Moment(START.0 + 1 + number as u64);
        node.plugin_rejected(rejection(GPU, &alloc::format!("{number}.sock"), "no"), now);
    }
    let rejected: Vec<_> = node.rejected_plugins(START).collect();
    assert_eq!(rejected.len(), MAX_REJECTIONS);
    assert!(rejected.iter().any(|each| each.rejection.resource == NIC));
}
