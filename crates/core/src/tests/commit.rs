//! Tests of commits and removals, in every order in which they can end.

use alloc::vec;

use super::*;
use crate::device_plugin::run_options::RunOptions;
use crate::{CommitError, PutError, ReleaseError};

#[test]
fn a_committed_pod_holds_its_devices() {
    let mut node = node_with_gpus(&["a", "b"]);

    let pod = admit(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.pod(&"p".into()), Some(&pod));
    assert_eq!((free(&node, GPU), node.is_in_flight(&"p".into())), (1, false));
    assert_sound(&node);
}

#[test]
fn a_pod_is_not_there_before_it_is_on_disk() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    begin_commit(&mut node, id, &gpu_pod("p", 1));

    assert_eq!(node.pod(&"p".into()), None);
    assert_eq!(node.pod_named(&named("p")), None);
    assert_eq!(free(&node, GPU), 0);
    assert_sound(&node);
}

// TestAllocate: the answer is kept unchanged; spec §27.21: so is the wish to be called before each start.
#[test]
fn answers_are_recorded_with_their_grants() {
    let mut node = node_serving(&[(GPU, &["a"]), (NIC, &["n"])]);
    let request = pod(
        "p",
        vec![app("one", &[(GPU, 1), (NIC, 1)]), app("two", &[(GPU, 0)])],
    );
    let id = reserve(&mut node, &request);
    let answer = |name: &str| {
        let options = RunOptions {
            cdi_devices: vec![name.into()],
            ..RunOptions::default()
        };
        Answer::new(name.as_bytes(), options)
    };

    let pod = node
        .begin_commit(id, &request, vec![(answer("gpu"), false), (answer("nic"), true)])
        .unwrap()
        .pod;

    let recorded: Vec<_> = pod
        .allocations
        .iter()
        .map(|each| (each.resource.as_str(), &*each.answer.raw, each.pre_start_required))
        .collect();
    assert_eq!(recorded, [(GPU, &b"gpu"[..], false), (NIC, b"nic", true)]);
    node.finish_commit(id);
    assert_eq!(node.run_options(&"p".into(), "one").0.cdi_devices, ["gpu", "nic"]);
}

// Spec §27.5: in the kubelet a refused allocation leaks.
#[test]
fn an_aborted_reservation_frees_the_devices() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    node.abort(id);

    assert_eq!((free(&node, GPU), node.is_in_flight(&"p".into())), (1, false));
    assert_eq!(node.reservation(id), None);
    assert_sound(&node);
}

#[test]
fn aborting_twice_changes_nothing() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    node.abort(id);
    reserve(&mut node, &gpu_pod("q", 1));
    let before = everything(&node);

    node.abort(id);

    assert_eq!(everything(&node), before, "the device is another pod's by now");
}

#[test]
fn a_commit_that_is_being_written_cannot_be_aborted() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    begin_commit(&mut node, id, &gpu_pod("p", 1));
    let before = everything(&node);

    node.abort(id);

    assert_eq!(everything(&node), before);
    node.finish_commit(id);
    assert!(node.pod(&"p".into()).is_some());
}

#[test]
fn a_commit_that_could_not_be_written_frees_the_devices() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    begin_commit(&mut node, id, &gpu_pod("p", 1));

    node.cancel_commit(id);

    assert_eq!((free(&node, GPU), node.pod(&"p".into())), (1, None));
    assert_sound(&node);
}

#[test]
fn an_adoption_that_could_not_be_written_leaves_the_pod_as_it_was() {
    let mut node = node_with_gpus(&["a", "b"]);
    let before = imported("p", &[("main", GPU, &["a"])]);
    node.put(before.clone()).unwrap();
    let id = reserve(&mut node, &gpu_pod("p", 1));
    begin_commit(&mut node, id, &gpu_pod("p", 1));

    node.cancel_commit(id);

    assert_eq!((node.pod(&"p".into()), free(&node, GPU)), (Some(&before), 1));
    assert_eq!(node.pod_named(&named("p")), None);
    assert_sound(&node);
}

#[test]
fn a_commit_begins_once() {
    let mut node = node_with_gpus(&["a"]);
    let request = gpu_pod("p", 1);
    let id = reserve(&mut node, &request);
    begin_commit(&mut node, id, &request);

    let again = node.begin_commit(id, &request, vec![(Answer::default(), false)]);

    assert_eq!(again, Err(CommitError::Ended));
}

#[test]
fn an_aborted_reservation_cannot_be_committed() {
    let mut node = node_with_gpus(&["a"]);
    let request = gpu_pod("p", 1);
    let id = reserve(&mut node, &request);
    node.abort(id);

    let refused = node.begin_commit(id, &request, vec![(Answer::default(), false)]);

    assert_eq!(refused, Err(CommitError::Ended));
    assert_eq!(refused.unwrap_err().to_string(), "the reservation has ended");
}

// Spec §10.3 step 8 and §27.5: an answer for no container leaks devices in the kubelet.
#[test]
fn answers_that_do_not_match_the_grants_commit_nothing() {
    let mut node = node_with_gpus(&["a"]);
    let request = gpu_pod("p", 1);
    let id = reserve(&mut node, &request);
    let before = everything(&node);

    let refused = node.begin_commit(id, &request, vec![]);

    assert_eq!(refused, Err(CommitError::Mismatch));
    assert_eq!(everything(&node), before);
    node.abort(id);
    assert_eq!(free(&node, GPU), 1);
}

#[test]
fn a_reservation_is_not_committed_for_another_pod() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    let refused = node.begin_commit(id, &gpu_pod("q", 1), vec![(Answer::default(), false)]);

    assert_eq!(refused, Err(CommitError::Mismatch));
}

#[test]
fn a_reservation_is_not_committed_with_a_container_missing() {
    let mut node = node_with_gpus(&["a", "b"]);
    let id = reserve(
        &mut node,
        &pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(GPU, 1)])]),
    );
    let fewer = pod("p", vec![app("one", &[(GPU, 1)])]);

    let refused = node.begin_commit(id, &fewer, vec![(Answer::default(), false); 2]);

    assert_eq!(refused, Err(CommitError::Mismatch));
    assert_sound(&node);
}

#[test]
fn finishing_what_was_not_begun_changes_nothing() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    let before = everything(&node);

    node.finish_commit(id);

    assert_eq!(everything(&node), before);
    assert_sound(&node);
}

#[test]
fn finishing_twice_changes_nothing() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    commit(&mut node, id, &gpu_pod("p", 1));
    release(&mut node, "p");
    let before = everything(&node);

    node.finish_commit(id);

    assert_eq!(everything(&node), before, "a pod that was removed stays removed");
}

#[test]
fn operations_on_an_ended_reservation_change_nothing() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));
    commit(&mut node, id, &gpu_pod("p", 1));
    let before = everything(&node);

    node.abort(id);
    node.cancel_commit(id);
    node.finish_commit(id);

    assert_eq!(everything(&node), before);
}

#[test]
fn reservations_do_not_get_in_each_others_way() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    let (p, q) = (gpu_pod("p", 1), gpu_pod("q", 1));
    let (first, second) = (reserve(&mut node, &p), reserve(&mut node, &q));
    begin_commit(&mut node, second, &q);
    node.abort(first);
    let third = reserve(&mut node, &gpu_pod("r", 2));

    node.finish_commit(second);

    assert_eq!(granted(&node, third, "main"), ["a", "c"]);
    assert_eq!(held(node.pod(&"q".into()).unwrap(), "main"), ["b"]);
    assert_sound(&node);
}

// TestDevicesToAllocateConflictWithUpdateAllocatedDevices
#[test]
fn a_removal_during_an_admission_does_not_disturb_it() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    let id = reserve(&mut node, &gpu_pod("q", 1));

    release(&mut node, "p");

    assert_eq!(granted(&node, id, "main"), ["b"]);
    assert_eq!(free(&node, GPU), 1);
    assert_sound(&node);
}

// TestGetDeviceRunContainerOptions: after the pod left, there are none.
#[test]
fn a_released_pod_leaves_nothing_behind() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));

    release(&mut node, "p");

    assert_eq!((free(&node, GPU), node.pod(&"p".into())), (1, None));
    assert_eq!(node.run_options(&"p".into(), "main").0, RunOptions::default());
    assert_eq!(node.pod_named(&named("p")), None);
    assert_sound(&node);
}

#[test]
fn a_pod_keeps_its_devices_until_the_removal_is_on_disk() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));

    node.begin_release(&"p".into()).unwrap();

    assert_eq!(free(&node, GPU), 0);
    assert!(node.is_in_flight(&"p".into()) && node.pod(&"p".into()).is_some());
    assert_sound(&node);
}

#[test]
fn a_removal_that_could_not_be_written_leaves_the_pod_as_it_was() {
    let mut node = node_with_gpus(&["a"]);
    let pod = admit(&mut node, &gpu_pod("p", 1));
    node.begin_release(&"p".into()).unwrap();

    node.cancel_release(&"p".into());

    assert_eq!((node.pod(&"p".into()), free(&node, GPU)), (Some(&pod), 0));
    assert_eq!(node.reserve(&gpu_pod("p", 1), &Preferences::new()), Ok(None));
    release(&mut node, "p");
}

#[test]
fn a_removal_ends_once() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    release(&mut node, "p");
    admit(&mut node, &gpu_pod("p", 1));
    let before = everything(&node);

    node.finish_release(&"p".into());
    node.cancel_release(&"p".into());

    assert_eq!(everything(&node), before);
}

#[test]
fn a_removal_that_was_not_begun_does_not_end() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));

    node.finish_release(&"p".into());

    assert!(node.pod(&"p".into()).is_some());
}

#[test]
fn a_pod_is_removed_once_at_a_time() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.begin_release(&"p".into()).unwrap();

    assert_eq!(node.begin_release(&"p".into()), Err(ReleaseError::InFlight));
}

#[test]
fn a_pod_that_is_being_admitted_is_not_removed() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.begin_release(&"p".into()), Err(ReleaseError::InFlight));
    begin_commit(&mut node, id, &gpu_pod("p", 1));
    assert_eq!(node.begin_release(&"p".into()), Err(ReleaseError::InFlight));
}

#[test]
fn a_pod_that_is_not_there_is_not_removed() {
    let mut node = Node::default();

    assert_eq!(node.begin_release(&"p".into()), Err(ReleaseError::Unknown));
}

#[test]
fn a_uid_under_another_name_is_refused_and_keeps_its_own() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &gpu_pod("p", 1));
    let renamed = PodRequest {
        name: named("other"),
        ..gpu_pod("p", 1)
    };

    let refused = node.reserve(&renamed, &Preferences::new());

    let text = refused.unwrap_err().to_string();
    assert!(text.contains("what differs: the name is "), "{text}");
    assert!(node.pod_named(&named("p")).is_some() && node.pod_named(&named("other")).is_none());
    assert_sound(&node);
}

#[test]
fn both_holders_of_a_device_keep_it_until_both_are_gone() {
    let mut node = node_with_gpus(&["a"]);
    node.put(imported("p", &[("main", GPU, &["a"])])).unwrap();
    node.put(imported("q", &[("main", GPU, &["a"])])).unwrap();

    release(&mut node, "p");
    let after_one = free(&node, GPU);
    release(&mut node, "q");

    assert_eq!((after_one, free(&node, GPU)), (0, 1));
    assert_sound(&node);
}

#[test]
fn both_holders_of_a_device_are_adopted() {
    let mut node = node_with_gpus(&["a"]);
    node.put(imported("p", &[("main", GPU, &["a"])])).unwrap();
    node.put(imported("q", &[("main", GPU, &["a"])])).unwrap();

    let (p, q) = (
        admit(&mut node, &gpu_pod("p", 1)),
        admit(&mut node, &gpu_pod("q", 1)),
    );

    assert_eq!(
        (held(&p, "main"), held(&q, "main")),
        (vec!["a".into()], vec!["a".into()])
    );
    assert_sound(&node);
}

#[test]
fn putting_a_pod_again_replaces_it() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(imported("p", &[("main", GPU, &["a"])])).unwrap();

    node.put(imported("p", &[("main", GPU, &["b"])])).unwrap();

    assert_eq!(free(&node, GPU), 1);
    assert_eq!(held(&admit(&mut node, &gpu_pod("q", 1)), "main"), ["a"]);
    assert_sound(&node);
}

#[test]
fn a_pod_that_is_being_admitted_or_removed_is_not_replaced() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.begin_release(&"p".into()).unwrap();
    reserve(&mut node, &gpu_pod("q", 1));
    let before = everything(&node);

    let refused = ["p", "q"].map(|uid| node.put(imported(uid, &[("main", GPU, &["c"])])));

    assert_eq!(refused, [Err(PutError::InFlight), Err(PutError::InFlight)]);
    assert_eq!(everything(&node), before);
}

#[test]
fn a_device_that_is_put_while_reserved_is_held_twice() {
    let mut node = node_with_gpus(&["a"]);
    let id = reserve(&mut node, &gpu_pod("p", 1));

    node.put(imported("q", &[("main", GPU, &["a"])])).unwrap();

    assert_eq!(node.doubly_held().len(), 1);
    node.abort(id);
    assert_eq!(free(&node, GPU), 0, "the imported pod still has it");
    assert_sound(&node);
}

#[test]
fn every_change_is_counted() {
    let mut node = Node::default();
    let mut seen = vec![node.changes()];
    let request = gpu_pod("p", 1);

    let only = connect(&mut node, offer(GPU, "gpu.sock"));
    seen.push(node.changes());
    node.devices_listed(only, list(&["a"]));
    seen.push(node.changes());
    let id = reserve(&mut node, &request);
    seen.push(node.changes());
    begin_commit(&mut node, id, &request);
    seen.push(node.changes());
    node.finish_commit(id);
    seen.push(node.changes());
    node.begin_release(&"p".into()).unwrap();
    seen.push(node.changes());
    node.finish_release(&"p".into());
    seen.push(node.changes());
    node.connection_lost(only, START);
    seen.push(node.changes());

    assert!(seen.is_sorted_by(|one, next| one < next), "{seen:?}");
}

#[test]
fn a_pod_that_is_put_without_devices_holds_no_resource() {
    let mut node = Node::default();

    node.put(imported("p", &[("main", GPU, &[])])).unwrap();

    assert!(node.capacity(START).is_empty());
    assert_sound(&node);
}
