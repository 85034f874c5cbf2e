//! Tests of preference queries and of the use of preferences.

use alloc::vec;

use super::*;
use crate::PreferenceQuery;

fn node_that_asks(devices: &[&str]) -> (Node, ConnectionId) {
    let mut node = Node::default();
    let connection = connect(&mut node, offer_with_advice(GPU, "gpu.sock"));
    node.devices_listed(connection, list(devices));
    (node, connection)
}

fn preferences(container: usize, devices: &[&str]) -> Preferences {
    [((container, gpu()), ids(devices))].into()
}

// TestGetPreferredAllocationParameters, "Request for 1, socket 0, 0 already allocated, 0 reusable"
#[test]
fn a_plugin_is_asked_which_of_the_free_devices_it_prefers() {
    let (node, connection) = node_that_asks(&["c", "a", "b"]);

    let query = node.preference_query(&gpu_pod("p", 2), &Preferences::new());

    let expected = PreferenceQuery {
        container: 0,
        resource: gpu(),
        connection,
        available: ids(&["a", "b", "c"]),
        must_include: vec![],
        size: 2,
    };
    assert_eq!(query, Some(expected));
}

// TestGetPreferredAllocationParameters, "Request for 4, socket 0, 2 already allocated, 2 reusable"
#[test]
fn devices_of_init_containers_must_be_included() {
    let (node, _) = node_that_asks(&["a", "b", "c", "d"]);
    let request = pod("p", vec![init("init", &[(GPU, 1)]), app("main", &[(GPU, 3)])]);

    let query = node.preference_query(&request, &preferences(0, &["c"])).unwrap();

    assert_eq!(query.available, ids(&["a", "b", "c", "d"]));
    assert_eq!((query.must_include, query.size), (ids(&["c"]), 3));
}

// TestGetPreferredAllocationParameters, "Request for 4, socket 0, 4 already allocated, 2 reusable"
#[test]
fn devices_of_others_are_not_available() {
    let (mut node, _) = node_that_asks(&["a", "b", "c", "d"]);
    admit(&mut node, &gpu_pod("other", 1));
    reserve(&mut node, &gpu_pod("another", 1));

    let query = node
        .preference_query(&gpu_pod("p", 1), &Preferences::new())
        .unwrap();

    assert_eq!(query.available, ids(&["c", "d"]));
}

#[test]
fn devices_of_the_pods_other_containers_are_not_available() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(GPU, 1)])]);

    let query = node.preference_query(&request, &preferences(0, &["b"])).unwrap();

    assert_eq!((query.container, query.available), (1, ids(&["a", "c"])));
}

#[test]
fn unhealthy_devices_are_not_available() {
    let (mut node, connection) = node_that_asks(&[]);
    node.devices_listed(
        connection,
        list_of(vec![healthy("a"), healthy("b"), unhealthy("c")]),
    );

    let query = node
        .preference_query(&gpu_pod("p", 1), &Preferences::new())
        .unwrap();

    assert_eq!(query.available, ids(&["a", "b"]));
}

#[test]
fn a_plugin_without_preferences_is_not_queried() {
    let node = node_with_gpus(&["a", "b"]);

    assert_eq!(node.preference_query(&gpu_pod("p", 1), &Preferences::new()), None);
}

#[test]
fn a_plugin_is_not_asked_when_all_devices_are_needed() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(node.preference_query(&gpu_pod("p", 2), &Preferences::new()), None);
}

#[test]
fn a_plugin_is_not_queried_when_the_reusable_devices_are_just_enough() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![init("init", &[(GPU, 2)]), app("main", &[(GPU, 2)])]);

    assert_eq!(node.preference_query(&request, &preferences(0, &[])), None);
}

#[test]
fn a_plugin_is_queried_when_there_are_more_reusable_devices_than_needed() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![init("init", &[(GPU, 2)]), app("main", &[(GPU, 1)])]);

    let query = node
        .preference_query(&request, &preferences(0, &["c", "b"]))
        .unwrap();

    assert_eq!(
        query.available,
        ids(&["b", "c"]),
        "a free device would not be taken"
    );
    assert_eq!((query.must_include, query.size), (vec![], 1));
}

#[test]
fn a_plugin_that_has_answered_is_not_queried_again() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(
        node.preference_query(&gpu_pod("p", 1), &preferences(0, &[])),
        None
    );
}

#[test]
fn a_request_that_cannot_be_granted_queries_no_plugin() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let short_later = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(NIC, 1)])]);

    assert_eq!(node.preference_query(&gpu_pod("p", 3), &Preferences::new()), None);
    assert_eq!(node.preference_query(&short_later, &Preferences::new()), None);
}

#[test]
fn no_plugin_is_queried_for_a_pod_that_holds_its_devices() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.preference_query(&gpu_pod("p", 1), &Preferences::new()), None);
}

#[test]
fn the_plugin_of_the_active_list_is_queried() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    let newer = connect(&mut node, offer_with_advice(GPU, "newer.sock"));
    node.devices_listed(newer, list(&["x", "y"]));

    let query = node
        .preference_query(&gpu_pod("p", 1), &Preferences::new())
        .unwrap();

    assert_eq!((query.connection, query.available), (newer, ids(&["x", "y"])));
}

#[test]
fn a_query_changes_nothing() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let before = everything(&node);

    node.preference_query(&gpu_pod("p", 1), &Preferences::new());

    assert_eq!(everything(&node), before);
}

// TestGetPreferredAllocation
#[test]
fn preferences_are_followed() {
    let (mut node, _) = node_that_asks(&["a", "b", "c"]);

    let id = node
        .reserve(&gpu_pod("p", 2), &preferences(0, &["c", "b"]))
        .unwrap()
        .unwrap();

    assert_eq!(granted(&node, id, "main"), ["b", "c"]);
}

// Spec §12: in the kubelet state is not validated again after the call.
#[test]
fn outdated_preferences_are_ignored() {
    let (mut node, connection) = node_that_asks(&["a", "b", "c", "d"]);
    let stale = preferences(0, &["a", "b", "c"]);
    admit(&mut node, &gpu_pod("other", 1));
    node.devices_listed(
        connection,
        list_of(vec![healthy("a"), unhealthy("b"), healthy("d")]),
    );

    let id = node.reserve(&gpu_pod("p", 1), &stale).unwrap().unwrap();

    assert_eq!(granted(&node, id, "main"), ["d"]);
}

#[test]
fn preferences_for_another_container_or_resource_are_ignored() {
    let (mut node, _) = node_that_asks(&["a", "b", "c"]);
    let mut elsewhere = preferences(7, &["c"]);
    elsewhere.insert((0, NIC.into()), ids(&["c"]));

    let id = node.reserve(&gpu_pod("p", 1), &elsewhere).unwrap().unwrap();

    assert_eq!(granted(&node, id, "main"), ["a"]);
}

#[test]
fn the_containers_of_a_pod_are_queried_one_after_the_other() {
    let (mut node, _) = node_that_asks(&["a", "b", "c", "d", "e"]);
    let request = pod(
        "p",
        vec![
            init("one", &[(GPU, 2)]),
            sidecar("two", &[(GPU, 1)]),
            app("three", &[(GPU, 2)]),
        ],
    );
    let mut preferences = Preferences::new();
    let mut asked = Vec::new();

    while let Some(query) = node.preference_query(&request, &preferences) {
        // This plugin likes the last ones.
        let start = query.available.len() - query.size;
        asked.push((query.container, query.available.clone(), query.must_include));
        let key = (query.container, query.resource);
        preferences.insert(key, query.available[start..].to_vec());
    }

    assert_eq!(
        asked,
        [
            (0, ids(&["a", "b", "c", "d", "e"]), vec![]),
            (1, ids(&["d", "e"]), vec![]),
            (2, ids(&["a", "b", "c", "d"]), ids(&["d"])),
        ]
    );
    let id = node.reserve(&request, &preferences).unwrap().unwrap();
    let all = ["one", "two", "three"].map(|name| granted(&node, id, name).concat());
    assert_eq!(all, ["de", "e", "cd"]);
}
