use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use super::select;
use crate::device_plugin::list::DeviceList;
use crate::id::DeviceId;
use crate::tests::{healthy, healthy_on, ids, list, list_of};

/// Chooses when all devices of the list that are not passed on are free.
fn choose(list: &DeviceList, passed_on: &[&str], advice: &[&str], wanted: usize) -> Option<Vec<String>> {
    let mut free = list.healthy().clone();
    for id in passed_on {
        free.remove(list.index_of(id).unwrap_or(usize::MAX));
    }
    let passed_on: BTreeSet<DeviceId> = ids(passed_on).into_iter().collect();
    let chosen = select(list, &mut free, &passed_on, &ids(advice), wanted)?;
    assert!(
        chosen.iter().all(|id| list
            .index_of(id.as_str())
            .is_none_or(|place| !free.contains(place))),
        "what was chosen is not free any longer"
    );
    Some(chosen.iter().map(ToString::to_string).collect())
}

fn two_sockets() -> DeviceList {
    list_of(vec![
        healthy_on("a0", &[0]),
        healthy_on("b1", &[1]),
        healthy_on("c0", &[0]),
        healthy_on("d1", &[1]),
        healthy_on("e0", &[0]),
        healthy("f"),
    ])
}

#[test]
fn without_nodes_and_advice_devices_go_by_their_ids() {
    assert_eq!(choose(&list(&["c", "a", "b"]), &[], &[], 2).unwrap(), ["a", "b"]);
}

#[test]
fn too_few_devices_are_none() {
    assert_eq!(choose(&list(&["a"]), &[], &[], 2), None);
    assert_eq!(choose(&list(&[]), &[], &[], 1), None);
}

#[test]
fn an_absurd_request_is_refused_like_any_other() {
    assert_eq!(choose(&list(&["a"]), &["p"], &["a"], usize::MAX), None);
}

#[test]
fn passed_on_devices_come_before_free_ones() {
    assert_eq!(
        choose(&list(&["a", "b", "z"]), &["z"], &[], 2).unwrap(),
        ["a", "z"]
    );
}

#[test]
fn advice_does_not_keep_passed_on_devices_from_being_used() {
    assert_eq!(
        choose(&list(&["a", "b", "z"]), &["z"], &["a", "b"], 2).unwrap(),
        ["a", "z"]
    );
}

#[test]
fn advice_chooses_among_passed_on_devices() {
    assert_eq!(
        choose(&list(&["a", "x", "y", "z"]), &["x", "y", "z"], &["z", "a"], 2).unwrap(),
        ["x", "z"]
    );
}

// TestTopologyAlignedAllocation, "preferred aligned accepted"
#[test]
fn advice_is_honoured() {
    assert_eq!(choose(&two_sockets(), &[], &["f", "b1"], 2).unwrap(), ["b1", "f"]);
}

// TestTopologyAlignedAllocation, "bogus ignored"; TestResourceDeviceInstanceFilter
#[test]
fn foreign_and_repeated_advice_is_ignored() {
    let chosen = choose(&list(&["a", "b", "c"]), &[], &["bogus", "c", "c", ""], 2);

    assert_eq!(chosen.unwrap(), ["a", "c"]);
}

#[test]
fn advice_on_devices_that_are_not_free_is_ignored() {
    let list = list(&["a", "b", "c"]);
    let mut free = list.healthy().clone();
    free.remove(2);

    let chosen = select(&list, &mut free, &BTreeSet::new(), &ids(&["c"]), 1);

    assert_eq!(chosen.unwrap(), ids(&["a"]));
}

#[test]
fn of_too_much_advice_the_first_counts() {
    assert_eq!(
        choose(&list(&["a", "b", "c"]), &[], &["c", "b", "a"], 2).unwrap(),
        ["b", "c"]
    );
}

// TestTopologyAlignedAllocation, "Request for 2, socket 1"
#[test]
fn the_smallest_node_that_suffices_is_chosen() {
    assert_eq!(choose(&two_sockets(), &[], &[], 2).unwrap(), ["b1", "d1"]);
}

#[test]
fn of_equal_nodes_the_lowest_is_chosen() {
    let list = list_of(vec![healthy_on("a", &[1]), healthy_on("b", &[0])]);

    assert_eq!(choose(&list, &[], &[], 1).unwrap(), ["b"]);
}

// TestTopologyAlignedAllocation, "Request for 4, unsatisfiable, prefer socket 0"
#[test]
fn when_no_node_suffices_the_largest_is_used_up_first() {
    assert_eq!(
        choose(&two_sockets(), &[], &[], 4).unwrap(),
        ["a0", "b1", "c0", "e0"]
    );
}

#[test]
fn devices_without_a_node_come_last() {
    assert_eq!(
        choose(&two_sockets(), &[], &[], 5).unwrap(),
        ["a0", "b1", "c0", "d1", "e0"]
    );
    assert_eq!(choose(&two_sockets(), &[], &[], 6).unwrap().len(), 6);
}

// TestTopologyAlignedAllocation, "Request for 1, partial alignment"
#[test]
fn a_device_with_a_node_is_preferred_to_one_without() {
    let list = list_of(vec![healthy("a"), healthy_on("b", &[0])]);

    assert_eq!(choose(&list, &[], &[], 1).unwrap(), ["b"]);
}

// TestTopologyAlignedAllocation, "preferred aligned accepted, unaligned ignored": topped up from the same node.
#[test]
fn devices_beyond_the_preferences_come_from_the_same_node() {
    assert_eq!(choose(&two_sockets(), &[], &["c0"], 2).unwrap(), ["a0", "c0"]);
}

#[test]
fn devices_beyond_the_reusable_ones_come_from_the_same_node() {
    assert_eq!(choose(&two_sockets(), &["e0"], &[], 2).unwrap(), ["a0", "e0"]);
}

#[test]
fn a_device_on_two_nodes_is_given_once() {
    let list = list_of(vec![
        healthy_on("a", &[0, 1]),
        healthy_on("b", &[0]),
        healthy_on("c", &[1]),
    ]);

    assert_eq!(choose(&list, &[], &[], 3).unwrap(), ["a", "b", "c"]);
}

#[test]
fn a_reusable_device_that_is_not_listed_is_selected() {
    assert_eq!(choose(&list(&["a"]), &["ghost"], &[], 2).unwrap(), ["a", "ghost"]);
}

#[test]
fn nothing_wanted_is_nothing_chosen() {
    assert!(choose(&list(&["a"]), &["a"], &["a"], 0).unwrap().is_empty());
}
