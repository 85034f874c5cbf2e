use alloc::vec;
use alloc::vec::Vec;

use super::{Device, DeviceList};
use crate::tests::{healthy, healthy_on, list, list_of, unhealthy};

#[test]
fn devices_in_any_order_are_sorted() {
    assert_eq!(list(&["c", "a", "b"]), list(&["a", "b", "c"]));
}

// Spec §27.16: the kubelet counts a device that is named twice once as healthy and once as unhealthy.
#[test]
fn of_a_device_that_is_named_twice_the_last_entry_counts() {
    let (list, left_out) = DeviceList::new(vec![healthy("a"), healthy("b"), unhealthy("a")]);

    assert_eq!(left_out, 1);
    assert_eq!(list.devices(), [unhealthy("a"), healthy("b")]);
    assert_eq!(list.healthy().count(), 1);
}

#[test]
fn lists_differ_if_any_device_does() {
    let ids: Vec<_> = (0..100)
        .map(|number| alloc::format!("{}", number * 37 % 101))
        .collect();
    let devices: Vec<_> = ids.iter().map(|id| healthy(id)).collect();
    let (list, _) = DeviceList::new(devices.clone());
    assert_eq!(list, DeviceList::new(devices.clone()).0);
    let differs = |change: fn(&mut Vec<Device>)| {
        let mut devices = devices.clone();
        change(&mut devices);
        list != DeviceList::new(devices).0
    };
    assert!(differs(|devices| drop(devices.pop())));
    assert!(differs(|devices| devices[7].healthy = false));
    assert!(differs(|devices| devices[7].id = "other".into()));
    assert!(differs(|devices| devices[7].nodes = vec![1]));
    assert!(differs(|devices| devices[7].nodes = vec![-1]));
}

#[test]
fn a_list_with_duplicates_equals_one_without() {
    let (twice, _) = DeviceList::new(vec![healthy_on("a", &[0]), healthy_on("a", &[0])]);

    assert_eq!(twice, list_of(vec![healthy_on("a", &[0])]));
}

// TestDeviceNUMANodes
#[test]
fn nodes_are_sorted_and_named_once() {
    let list = list_of(vec![healthy_on("a", &[1, 0, 1]), healthy("b")]);

    assert_eq!(list.get("a").unwrap().nodes, [0, 1]);
    assert_eq!(list.by_node().keys().copied().collect::<Vec<_>>(), [0, 1]);
}

// TestDeviceNUMANodes, "unknown NUMA IDs from device plugin are dropped". Spec §27.24: ids from 64 on make the
// kubelet panic.
#[test]
fn nodes_that_no_machine_has_do_not_steer_the_choice() {
    let list = list_of(vec![healthy_on("a", &[-1, 63, 64, i64::MAX, i64::MIN])]);

    assert_eq!(list.by_node().keys().copied().collect::<Vec<_>>(), [63]);
    assert_eq!(
        list.get("a").unwrap().nodes.len(),
        5,
        "they are on record all the same"
    );
}

#[test]
fn a_device_is_found_by_its_name_only() {
    let list = list(&["a", "c"]);

    assert_eq!((list.index_of("c"), list.index_of("b")), (Some(1), None));
    assert!(list.get("").is_none());
    assert!(!list.is_empty() && DeviceList::default().is_empty());
}
