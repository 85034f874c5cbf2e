//! What plugins are asked before devices are chosen, and what comes of their preferences.

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
fn what_init_containers_pass_on_must_be_included() {
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
fn a_plugin_that_gives_no_advice_is_not_asked() {
    let node = node_with_gpus(&["a", "b"]);

    assert_eq!(node.preference_query(&gpu_pod("p", 1), &Preferences::new()), None);
}

#[test]
fn a_plugin_is_not_asked_when_all_devices_are_needed() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(node.preference_query(&gpu_pod("p", 2), &Preferences::new()), None);
}

#[test]
fn a_plugin_is_not_asked_when_what_is_passed_on_is_just_enough() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![init("init", &[(GPU, 2)]), app("main", &[(GPU, 2)])]);

    assert_eq!(node.preference_query(&request, &preferences(0, &[])), None);
}

#[test]
fn of_more_than_enough_that_is_passed_on_the_plugin_may_choose() {
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
fn a_plugin_that_has_advised_is_not_asked_again() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(
        node.preference_query(&gpu_pod("p", 1), &preferences(0, &[])),
        None
    );
}

#[test]
fn a_request_that_cannot_be_granted_asks_nobody() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let short_later = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(NIC, 1)])]);

    assert_eq!(node.preference_query(&gpu_pod("p", 3), &Preferences::new()), None);
    assert_eq!(node.preference_query(&short_later, &Preferences::new()), None);
}

#[test]
fn nothing_is_asked_for_a_pod_that_holds_its_devices() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.preference_query(&gpu_pod("p", 1), &Preferences::new()), None);
}

#[test]
fn the_plugin_whose_list_counts_is_asked() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    let newer = connect(&mut node, offer_with_advice(GPU, "newer.sock"));
    node.devices_listed(newer, list(&["x", "y"]));

    let query = node
        .preference_query(&gpu_pod("p", 1), &Preferences::new())
        .unwrap();

    assert_eq!((query.connection, query.available), (newer, ids(&["x", "y"])));
}

#[test]
fn asking_changes_nothing() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let before = everything(&node);

    node.preference_query(&gpu_pod("p", 1), &Preferences::new());

    assert_eq!(everything(&node), before);
}

// TestGetPreferredAllocation
#[test]
fn advice_is_followed() {
    let (mut node, _) = node_that_asks(&["a", "b", "c"]);

    let id = node
        .reserve(&gpu_pod("p", 2), &preferences(0, &["c", "b"]))
        .unwrap()
        .unwrap();

    assert_eq!(granted(&node, id, "main"), ["b", "c"]);
}

// Spec §12: in the kubelet state is not validated again after the call.
#[test]
fn advice_that_has_been_overtaken_is_harmless() {
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
fn advice_for_another_container_or_resource_is_not_taken() {
    let (mut node, _) = node_that_asks(&["a", "b", "c"]);
    let mut elsewhere = preferences(7, &["c"]);
    elsewhere.insert((0, NIC.into()), ids(&["c"]));

    let id = node.reserve(&gpu_pod("p", 1), &elsewhere).unwrap().unwrap();

    assert_eq!(granted(&node, id, "main"), ["a"]);
}

#[test]
fn a_pod_with_many_containers_is_asked_about_one_after_the_other() {
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
