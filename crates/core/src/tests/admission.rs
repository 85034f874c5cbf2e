//! Tests of admission and of the errors that refuse it.

use alloc::string::ToString;
use alloc::vec;

use super::*;
use crate::{Blocked, Restored};

fn unreadable() -> Blocked {
    Blocked::UnreadableState {
        file: "checkpoint.bad".into(),
        reason: "torn".into(),
    }
}

// TestPodContainerDeviceAllocation, "Successful allocation of two Res1 resources and one Res2 resource"
#[test]
fn a_container_gets_devices_of_every_resource_it_wants() {
    let mut node = node_serving(&[(GPU, &["a", "b"]), (NIC, &["n", "o"])]);

    let pod = admit(&mut node, &pod("p", vec![app("main", &[(GPU, 2), (NIC, 1)])]));

    assert_eq!(held(&pod, "main"), ["a", "b", "n"]);
    assert_eq!((free(&node, GPU), free(&node, NIC)), (0, 1));
}

// TestPodContainerDeviceAllocation, "Requesting to create a pod without enough resources should fail"
#[test]
fn too_few_devices_refuse_the_pod_and_change_nothing() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    admit(&mut node, &gpu_pod("p", 2));
    let before = everything(&node);

    let refused = refusal(&mut node, &gpu_pod("q", 2));

    assert_eq!(
        refused.to_string(),
        "2 acme.com/gpu requested, 1 free (3 of 3 healthy)"
    );
    assert_eq!(everything(&node), before);
}

#[test]
fn too_few_devices_refuse_the_pod_at_once_even_if_another_resource_has_no_plugin() {
    let mut node = node_with_gpus(&["a"]);
    let mut request = gpu_pod("p", 2);
    // Before acme.com/gpu in the order of names.
    request.containers[0].wants.insert("aaa.com/x".into(), 1);

    let refused = refusal(&mut node, &request);

    assert!(matches!(refused, ReserveError::Insufficient { .. }), "{refused}");
}

#[test]
fn a_pod_waits_for_devices_that_other_admissions_have_only_reserved() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    admit(&mut node, &gpu_pod("p", 1));
    let other = reserve(&mut node, &gpu_pod("q", 1));

    let refused = refusal(&mut node, &gpu_pod("r", 2));

    assert!(refused.waiting_helps(), "{refused}");
    assert_eq!(
        refused.to_string(),
        "2 acme.com/gpu requested, 1 free; 1 held by admissions or removals that have not ended"
    );
    let too_many = refusal(&mut node, &gpu_pod("r", 3));
    assert!(!too_many.waiting_helps(), "{too_many}");
    assert_eq!(
        too_many.to_string(),
        "3 acme.com/gpu requested, 1 free and 1 reserved for other pods (3 of 3 healthy)"
    );
    node.abort(other);
    reserve(&mut node, &gpu_pod("r", 2));
}

#[test]
fn a_pod_that_waits_for_a_reservation_is_refused_once_that_is_committed() {
    let mut node = node_with_gpus(&["a"]);
    let (request, waiting) = (gpu_pod("p", 1), gpu_pod("q", 1));
    let id = reserve(&mut node, &request);
    begin_commit(&mut node, id, &request);
    assert!(refusal(&mut node, &waiting).waiting_helps(), "the write may fail");

    let before = node.changes();
    node.finish_commit(id);

    assert_ne!(node.changes(), before, "those that wait look again");
    assert!(!refusal(&mut node, &waiting).waiting_helps());
    node.begin_release(&"p".into()).unwrap();
    assert!(
        refusal(&mut node, &waiting).waiting_helps(),
        "it is being removed"
    );
    node.cancel_release(&"p".into());
    assert!(!refusal(&mut node, &waiting).waiting_helps());
}

#[test]
fn a_pod_whose_containers_share_devices_waits_only_if_those_can_be_enough() {
    let mut node = node_with_gpus(&["a", "b"]);
    let other = reserve(&mut node, &gpu_pod("q", 1));
    let needs_two = pod("p", vec![init("i", &[(GPU, 2)]), app("m", &[(GPU, 2)])]);
    let needs_three = pod("p", vec![sidecar("s", &[(GPU, 1)]), app("m", &[(GPU, 2)])]);

    assert!(refusal(&mut node, &needs_two).waiting_helps());
    assert!(!refusal(&mut node, &needs_three).waiting_helps());
    node.abort(other);
    reserve(&mut node, &needs_two);
}

// TestPodContainerDeviceAllocation, "Successful allocation of all available Res1 resources and Res2 resources"
#[test]
fn the_last_device_can_be_had() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    admit(&mut node, &gpu_pod("p", 2));

    let pod = admit(&mut node, &gpu_pod("q", 1));

    assert_eq!(held(&pod, "main"), ["c"]);
}

#[test]
fn one_short_resource_reserves_nothing() {
    let mut node = node_serving(&[(GPU, &["a", "b"]), (NIC, &["n"])]);
    let before = everything(&node);

    let refused = refusal(
        &mut node,
        &pod("p", vec![app("one", &[(GPU, 2)]), app("two", &[(NIC, 2)])]),
    );

    assert_eq!(
        refused.to_string(),
        "2 acme.com/nic requested, 1 free (1 of 1 healthy)"
    );
    assert_eq!(everything(&node), before);
}

#[test]
fn one_short_container_reserves_nothing() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    let before = everything(&node);

    refusal(
        &mut node,
        &pod("p", vec![app("one", &[(GPU, 2)]), app("two", &[(GPU, 2)])]),
    );

    assert_eq!(everything(&node), before);
}

#[test]
fn an_absurd_count_is_refused() {
    let mut node = node_with_gpus(&["a"]);

    let refused = refusal(&mut node, &gpu_pod("p", usize::MAX));

    assert!(
        matches!(
            refused,
            ReserveError::Insufficient {
                wanted: usize::MAX,
                ..
            }
        ),
        "{refused:?}"
    );
}

// TestPodContainerDeviceToAllocate, "Admission error in case resource is not registered"
#[test]
fn a_resource_without_a_plugin_is_named() {
    let refused = refusal(&mut Node::default(), &gpu_pod("p", 1));

    assert_eq!(refused.to_string(), "no device plugin offers acme.com/gpu");
}

#[test]
fn a_plugin_that_left_is_named() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a"]);
    node.connection_lost(only, START);

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(
        refused.to_string(),
        "no device plugin offers acme.com/gpu; the last one answered at gpu.sock"
    );
    let ReserveError::NotServed { last: Some(last), .. } = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(last.gone_since, START);
}

#[test]
fn a_plugin_that_has_not_listed_its_devices_is_named() {
    let mut node = Node::default();
    connect(&mut node, offer(GPU, "gpu.sock"));

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(
        refused.to_string(),
        "the device plugin of acme.com/gpu at gpu.sock has not listed its devices yet"
    );
}

// TestPodContainerDeviceToAllocate, "Admission error in case no healthy devices to allocate present"
#[test]
fn unhealthy_devices_are_not_given() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(only, list(&["a", "b"]));
    node.devices_listed(only, list_of(vec![unhealthy("a"), unhealthy("b")]));

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(
        refused.to_string(),
        "1 acme.com/gpu requested, 0 free (0 of 2 healthy)"
    );
    assert!(!refused.waiting_helps());
}

// As Intel's NPU plugin does: it looks for its devices only after its first list.
#[test]
fn a_pod_waits_for_a_plugin_that_has_not_listed_a_healthy_device_since_it_connected() {
    let mut node = Node::default();
    let first = connect(&mut node, offer(GPU, "gpu.sock"));
    for (devices, text) in [
        (vec![], "its list is empty"),
        (vec![unhealthy("a")], "0 of 1 healthy"),
        (vec![], "its list is empty"),
    ] {
        node.devices_listed(first, list_of(devices));
        let refused = refusal(&mut node, &gpu_pod("p", 1));
        assert!(refused.waiting_helps(), "{refused}");
        assert_eq!(
            refused.to_string(),
            alloc::format!(
                "the device plugin of acme.com/gpu at gpu.sock has not listed a healthy device yet ({text})"
            )
        );
    }
    node.devices_listed(first, list(&["a"]));
    node.devices_listed(first, list(&[]));
    assert!(
        !refusal(&mut node, &gpu_pod("p", 1)).waiting_helps(),
        "the device is gone"
    );
    let again = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(again, list(&[]));
    assert!(
        refusal(&mut node, &gpu_pod("p", 1)).waiting_helps(),
        "it may be starting"
    );
    node.devices_listed(again, list(&["a"]));
    admit(&mut node, &gpu_pod("p", 1));
}

// Spec §27.18; TestDevicePreStartContainer: not called when quantity is 0
#[test]
fn zero_devices_need_no_plugin() {
    let mut node = Node::default();

    let pod = admit(&mut node, &gpu_pod("p", 0));

    assert!(pod.allocations.is_empty());
    assert_eq!(node.pod(&"p".into()), Some(&pod));
}

#[test]
fn admitting_a_pod_again_changes_nothing() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    let before = everything(&node);

    let again = node.reserve(&gpu_pod("p", 1), &Preferences::new());

    assert_eq!(again, Ok(None));
    assert_eq!(everything(&node), before);
}

// TestPodContainerDeviceToAllocate, "...devices previously allocated no longer healthy"; spec §27.4; e2e "Keeps
// device plugin assignments": here a pod that holds its devices is admitted whatever its plugins do.
#[test]
fn a_holder_is_admitted_again_whatever_its_plugin_does() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));

    node.devices_listed(only, list_of(vec![unhealthy("a")]));
    let while_unhealthy = node.reserve(&gpu_pod("p", 1), &Preferences::new());
    node.devices_listed(only, list(&["z"]));
    let while_unlisted = node.reserve(&gpu_pod("p", 1), &Preferences::new());
    node.connection_lost(only, START);
    let while_gone = node.reserve(&gpu_pod("p", 1), &Preferences::new());
    connect(&mut node, offer(GPU, "gpu.sock"));
    let before_the_list = node.reserve(&gpu_pod("p", 1), &Preferences::new());

    assert_eq!(
        [while_unhealthy, while_unlisted, while_gone, before_the_list],
        [const { Ok(None) }; 4]
    );
}

// e2e "Keeps device plugin assignments across pod and kubelet restarts"
#[test]
fn a_holder_is_admitted_again_after_a_restart() {
    let mut node = node_with_gpus(&["a", "b"]);
    let pod = admit(&mut node, &gpu_pod("p", 1));

    let mut node = Node::restore(Restored {
        pods: [(pod.uid.clone(), pod.clone())].into(),
        resources: node.known_resources(),
        ..Restored::default()
    });

    assert_eq!(node.reserve(&gpu_pod("p", 1), &Preferences::new()), Ok(None));
    assert_eq!(node.pod(&"p".into()), Some(&pod));
    assert!(matches!(
        refusal(&mut node, &gpu_pod("q", 1)),
        ReserveError::NotServed { .. }
    ));
    serve(&mut node, GPU, "gpu.sock", &["a", "b"]);
    assert_eq!(held(&admit(&mut node, &gpu_pod("q", 1)), "main"), ["b"]);
    assert_sound(&node);
}

#[test]
fn a_pod_from_before_a_reboot_is_written_again() {
    let mut node = node_with_gpus(&["a"]);
    let mut before = admit(&mut node, &gpu_pod("p", 1));
    before.before_reboot = true;
    node.put(before.clone()).unwrap();

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert!(!pod.before_reboot);
    assert_eq!(pod.allocations, before.allocations);
}

#[test]
fn another_spec_is_refused() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    let other = |count| PodRequest {
        fingerprint: 8,
        ..gpu_pod("p", count)
    };
    let before = "was admitted with another spec; it holds 1 acme.com/gpu in container main";

    let unknown = refusal(&mut node, &other(1)).to_string();
    assert!(unknown.contains(before), "{unknown}");
    assert!(
        unknown.ends_with("; what differs: something that is not on record; remove it first"),
        "{unknown}"
    );
    let mut more = other(2);
    let mut second = more.containers[0].clone();
    second.name = "log".into();
    second.wants.clear();
    more.containers.push(second);
    let told = refusal(&mut node, &more).to_string();
    let differs = "; what differs: container log is new, container main asks for 2 acme.com/gpu and holds 1; remove it first";
    assert!(told.contains(before) && told.ends_with(differs), "{told}");
}

#[test]
fn a_spec_that_was_not_known_is_put_on_record() {
    let mut node = node_with_gpus(&["a"]);
    let known = admit(&mut node, &gpu_pod("p", 1));
    node.put(Pod {
        fingerprint: 0,
        ..known
    })
    .unwrap();

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(pod.fingerprint, 7);
}

// Spec §10.4 step 1
#[test]
fn a_changed_count_is_refused() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    node.put(imported("p", &[("main", GPU, &["a", "b"])])).unwrap();

    let refused = refusal(&mut node, &gpu_pod("p", 3));

    assert_eq!(
        refused.to_string(),
        "pod default/p (p) holds 2 acme.com/gpu in container main, but now requests 3; remove it first"
    );
}

#[test]
fn a_name_belongs_to_one_pod() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    let impostor = PodRequest {
        name: named("p"),
        ..gpu_pod("q", 1)
    };

    let refused = refusal(&mut node, &impostor);

    assert_eq!(
        refused.to_string(),
        "pod p has this name and another UID; remove it first"
    );
    release(&mut node, "p");
    assert!(node.reserve(&impostor, &Preferences::new()).is_ok());
}

#[test]
fn the_name_of_a_pod_in_flight_can_be_waited_for() {
    let mut node = node_with_gpus(&["a", "b"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    let impostor = PodRequest {
        name: named("p"),
        ..gpu_pod("q", 1)
    };

    let refused = refusal(&mut node, &impostor);

    assert!(
        matches!(refused, ReserveError::NameReserved { .. }),
        "{refused:?}"
    );
    assert!(refused.waiting_helps());
    node.abort(id);
    assert!(
        node.reserve(&impostor, &Preferences::new()).is_ok(),
        "the name is free again"
    );
}

#[test]
fn the_same_name_in_another_namespace_is_another_name() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    let mut other = gpu_pod("q", 1);
    other.name = PodName {
        namespace: "elsewhere".into(),
        name: "p".into(),
    };

    assert!(node.reserve(&other, &Preferences::new()).is_ok());
}

#[test]
fn a_pod_is_admitted_once_at_a_time() {
    let mut node = node_with_gpus(&["a", "b"]);
    reserve(&mut node, &gpu_pod("p", 1));
    let before = everything(&node);

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(refused.to_string(), "another operation for this pod is in flight");
    assert_eq!(everything(&node), before);
}

#[test]
fn a_pod_that_is_being_removed_is_not_admitted() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.begin_release(&"p".into()).unwrap();

    assert_eq!(refusal(&mut node, &gpu_pod("p", 1)), ReserveError::InFlight);
}

#[test]
fn two_containers_of_one_name_are_refused() {
    let mut node = node_with_gpus(&["a", "b"]);
    let before = everything(&node);

    let refused = refusal(
        &mut node,
        &pod("p", vec![init("same", &[(GPU, 1)]), app("same", &[(GPU, 2)])]),
    );

    assert_eq!(refused.to_string(), "two containers are called same");
    assert_eq!(everything(&node), before);
}

#[test]
fn an_imported_pod_is_adopted_with_what_it_holds() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(imported("p", &[("main", GPU, &["b"])])).unwrap();

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(held(&pod, "main"), ["b"]);
    assert_eq!(
        (pod.source, pod.fingerprint, &pod.name),
        (Source::Api, 7, &named("p"))
    );
    assert_eq!(pod.allocations[0].kind, Some(ContainerKind::App));
    assert_eq!(node.pod_named(&named("p")), Some(&pod));
    assert_eq!(node.reserve(&gpu_pod("p", 1), &Preferences::new()), Ok(None));
    assert_sound(&node);
}

#[test]
fn an_imported_pod_is_adopted_while_its_plugin_is_away() {
    let mut node = Node::default();
    node.put(imported("p", &[("main", GPU, &["b"])])).unwrap();

    let id = reserve(&mut node, &gpu_pod("p", 1));

    assert!(
        node.reservation(id).unwrap().grants.is_empty(),
        "no plugin is to be called"
    );
}

#[test]
fn an_imported_pod_gets_what_the_file_does_not_have() {
    let mut node = node_serving(&[(GPU, &["a"]), (NIC, &["n"])]);
    node.put(imported("p", &[("main", GPU, &["a"])])).unwrap();

    let pod = admit(&mut node, &pod("p", vec![app("main", &[(GPU, 1), (NIC, 1)])]));

    assert_eq!(held(&pod, "main"), ["a", "n"]);
    assert_sound(&node);
}

#[test]
fn an_imported_pod_keeps_what_it_does_not_ask_for() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(imported("p", &[("main", GPU, &["a"]), ("old", GPU, &["b"])]))
        .unwrap();

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(held(&pod, "old"), ["b"]);
    release(&mut node, "p");
    assert_eq!(free(&node, GPU), 2);
    assert_sound(&node);
}

#[test]
fn a_blocked_node_refuses_new_pods() {
    let mut node = node_with_gpus(&["a"]);
    node.block(unreadable());
    let before = everything(&node);

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(refused, ReserveError::Blocked(unreadable()));
    assert!(
        refused
            .to_string()
            .starts_with("the state in checkpoint.bad cannot be used: torn")
    );
    assert_eq!(everything(&node), before);
}

#[test]
fn a_blocked_node_says_so_even_where_a_plugin_is_missing() {
    let mut node = Node::default();
    node.block(unreadable());

    let refused = refusal(&mut node, &gpu_pod("p", 1));

    assert_eq!(
        refused,
        ReserveError::Blocked(unreadable()),
        "waiting for the plugin is pointless"
    );
}

#[test]
fn a_blocked_node_asks_no_plugin() {
    let mut node = Node::default();
    let only = connect(&mut node, offer_with_advice(GPU, "gpu.sock"));
    node.devices_listed(only, list(&["a", "b"]));
    node.block(unreadable());

    assert_eq!(node.preference_query(&gpu_pod("p", 1), &Preferences::new()), None);
}

#[test]
fn a_blocked_node_admits_holders_again() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.block(unreadable());

    assert_eq!(node.reserve(&gpu_pod("p", 1), &Preferences::new()), Ok(None));
}

#[test]
fn a_node_that_is_blocked_no_longer_admits() {
    let mut node = node_with_gpus(&["a"]);
    node.block(unreadable());

    node.unblock(|_| true);

    assert_eq!(node.blocked(), None);
    admit(&mut node, &gpu_pod("p", 1));
}

#[test]
fn a_reservation_from_before_the_block_ends_as_usual() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    node.block(unreadable());

    let pod = commit(&mut node, id, &gpu_pod("p", 1));

    assert_eq!(node.pod(&"p".into()), Some(&pod));
}
