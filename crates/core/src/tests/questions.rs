//! What plugins are asked before devices are chosen, and what comes of their advice.

use alloc::vec;

use super::*;
use crate::Question;

fn node_that_asks(devices: &[&str]) -> (Node, ConnectionId) {
    let mut node = Node::default();
    let connection = connect(&mut node, offer_with_advice(GPU, "gpu.sock"));
    node.devices_listed(connection, list(devices));
    (node, connection)
}

fn advice(container: usize, devices: &[&str]) -> Advice {
    [((container, gpu()), ids(devices))].into()
}

// TestGetPreferredAllocationParameters, "Request for 1, socket 0, 0 already allocated, 0 reusable"
#[test]
fn a_plugin_is_asked_which_of_the_free_devices_it_prefers() {
    let (node, connection) = node_that_asks(&["c", "a", "b"]);

    let question = node.question(&gpu_pod("p", 2), &Advice::new());

    let expected = Question {
        container: 0,
        resource: gpu(),
        connection,
        available: ids(&["a", "b", "c"]),
        must_include: vec![],
        size: 2,
    };
    assert_eq!(question, Some(expected));
}

// TestGetPreferredAllocationParameters, "Request for 4, socket 0, 2 already allocated, 2 reusable"
#[test]
fn what_init_containers_pass_on_must_be_included() {
    let (node, _) = node_that_asks(&["a", "b", "c", "d"]);
    let request = pod("p", vec![init("init", &[(GPU, 1)]), app("main", &[(GPU, 3)])]);

    let question = node.question(&request, &advice(0, &["c"])).unwrap();

    assert_eq!(question.available, ids(&["a", "b", "c", "d"]));
    assert_eq!((question.must_include, question.size), (ids(&["c"]), 3));
}

// TestGetPreferredAllocationParameters, "Request for 4, socket 0, 4 already allocated, 2 reusable"
#[test]
fn devices_of_others_are_not_available() {
    let (mut node, _) = node_that_asks(&["a", "b", "c", "d"]);
    admit(&mut node, &gpu_pod("other", 1));
    reserve(&mut node, &gpu_pod("another", 1));

    let question = node.question(&gpu_pod("p", 1), &Advice::new()).unwrap();

    assert_eq!(question.available, ids(&["c", "d"]));
}

#[test]
fn devices_of_the_pods_other_containers_are_not_available() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(GPU, 1)])]);

    let question = node.question(&request, &advice(0, &["b"])).unwrap();

    assert_eq!((question.container, question.available), (1, ids(&["a", "c"])));
}

#[test]
fn unhealthy_devices_are_not_available() {
    let (mut node, connection) = node_that_asks(&[]);
    node.devices_listed(
        connection,
        list_of(vec![healthy("a"), healthy("b"), unhealthy("c")]),
    );

    let question = node.question(&gpu_pod("p", 1), &Advice::new()).unwrap();

    assert_eq!(question.available, ids(&["a", "b"]));
}

#[test]
fn a_plugin_that_gives_no_advice_is_not_asked() {
    let node = node_with_gpus(&["a", "b"]);

    assert_eq!(node.question(&gpu_pod("p", 1), &Advice::new()), None);
}

#[test]
fn a_plugin_is_not_asked_when_all_devices_are_needed() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(node.question(&gpu_pod("p", 2), &Advice::new()), None);
}

#[test]
fn a_plugin_is_not_asked_when_what_is_passed_on_is_just_enough() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![init("init", &[(GPU, 2)]), app("main", &[(GPU, 2)])]);

    assert_eq!(node.question(&request, &advice(0, &[])), None);
}

#[test]
fn of_more_than_enough_that_is_passed_on_the_plugin_may_choose() {
    let (node, _) = node_that_asks(&["a", "b", "c"]);
    let request = pod("p", vec![init("init", &[(GPU, 2)]), app("main", &[(GPU, 1)])]);

    let question = node.question(&request, &advice(0, &["c", "b"])).unwrap();

    assert_eq!(
        question.available,
        ids(&["b", "c"]),
        "a free device would not be taken"
    );
    assert_eq!((question.must_include, question.size), (vec![], 1));
}

#[test]
fn a_plugin_that_has_advised_is_not_asked_again() {
    let (node, _) = node_that_asks(&["a", "b"]);

    assert_eq!(node.question(&gpu_pod("p", 1), &advice(0, &[])), None);
}

#[test]
fn a_request_that_cannot_be_granted_asks_nobody() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let short_later = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(NIC, 1)])]);

    assert_eq!(node.question(&gpu_pod("p", 3), &Advice::new()), None);
    assert_eq!(node.question(&short_later, &Advice::new()), None);
}

#[test]
fn nothing_is_asked_for_a_pod_that_holds_its_devices() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.question(&gpu_pod("p", 1), &Advice::new()), None);
}

#[test]
fn the_plugin_whose_list_counts_is_asked() {
    let (mut node, _) = node_that_asks(&["a", "b"]);
    let newer = connect(&mut node, offer_with_advice(GPU, "newer.sock"));
    node.devices_listed(newer, list(&["x", "y"]));

    let question = node.question(&gpu_pod("p", 1), &Advice::new()).unwrap();

    assert_eq!(
        (question.connection, question.available),
        (newer, ids(&["x", "y"]))
    );
}

#[test]
fn asking_changes_nothing() {
    let (node, _) = node_that_asks(&["a", "b"]);
    let before = everything(&node);

    node.question(&gpu_pod("p", 1), &Advice::new());

    assert_eq!(everything(&node), before);
}

// TestGetPreferredAllocation
#[test]
fn advice_is_followed() {
    let (mut node, _) = node_that_asks(&["a", "b", "c"]);

    let id = node
        .reserve(&gpu_pod("p", 2), &advice(0, &["c", "b"]))
        .unwrap()
        .unwrap();

    assert_eq!(granted(&node, id, "main"), ["b", "c"]);
}

// Spec §12: in the kubelet state is not validated again after the call.
#[test]
fn advice_that_has_been_overtaken_is_harmless() {
    let (mut node, connection) = node_that_asks(&["a", "b", "c", "d"]);
    let stale = advice(0, &["a", "b", "c"]);
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
    let mut elsewhere = advice(7, &["c"]);
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
    let mut advice = Advice::new();
    let mut asked = Vec::new();

    while let Some(question) = node.question(&request, &advice) {
        // This plugin likes the last ones.
        let start = question.available.len() - question.size;
        asked.push((
            question.container,
            question.available.clone(),
            question.must_include,
        ));
        let key = (question.container, question.resource);
        advice.insert(key, question.available[start..].to_vec());
    }

    assert_eq!(
        asked,
        [
            (0, ids(&["a", "b", "c", "d", "e"]), vec![]),
            (1, ids(&["d", "e"]), vec![]),
            (2, ids(&["a", "b", "c", "d"]), ids(&["d"])),
        ]
    );
    let id = node.reserve(&request, &advice).unwrap().unwrap();
    let all = ["one", "two", "three"].map(|name| granted(&node, id, name).concat());
    assert_eq!(all, ["de", "e", "cd"]);
}
