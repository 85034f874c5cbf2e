//! Which containers of a pod share devices.

use alloc::vec;

use super::*;

// TestInitContainerDeviceAllocation
#[test]
fn init_containers_share_with_each_other_and_with_app_containers() {
    let mut node = node_with_gpus(&["a", "b"]);
    let request = pod(
        "p",
        vec![
            init("one", &[(GPU, 1)]),
            init("two", &[(GPU, 2)]),
            app("three", &[(GPU, 1)]),
            app("four", &[(GPU, 1)]),
        ],
    );

    let pod = admit(&mut node, &request);

    assert_eq!(held(&pod, "one"), ["a"]);
    assert_eq!(held(&pod, "two"), ["a", "b"]);
    assert_eq!(
        (held(&pod, "three"), held(&pod, "four")),
        (vec!["a".into()], vec!["b".into()])
    );
}

// TestRestartableInitContainerDeviceAllocation
#[test]
fn sidecars_and_app_containers_never_share() {
    let mut node = node_with_gpus(&["a", "b", "c", "d"]);
    let request = pod(
        "p",
        vec![
            init("init", &[(GPU, 1)]),
            sidecar("one", &[(GPU, 1)]),
            sidecar("two", &[(GPU, 1)]),
            app("three", &[(GPU, 1)]),
            app("four", &[(GPU, 1)]),
        ],
    );

    let pod = admit(&mut node, &request);

    assert_eq!(held(&pod, "init"), ["a"]);
    let others = ["one", "two", "three", "four"].map(|name| held(&pod, name).remove(0));
    assert_eq!(others, ["a", "b", "c", "d"]);
}

#[test]
fn devices_of_a_sidecar_are_no_longer_reusable() {
    let mut node = node_with_gpus(&["a", "b"]);
    let request = pod(
        "p",
        vec![
            init("one", &[(GPU, 1)]),
            sidecar("two", &[(GPU, 1)]),
            init("three", &[(GPU, 1)]),
            app("four", &[(GPU, 1)]),
        ],
    );

    let pod = admit(&mut node, &request);

    assert_eq!(
        (held(&pod, "two"), held(&pod, "three")),
        (vec!["a".into()], vec!["b".into()])
    );
    assert_eq!(held(&pod, "four"), ["b"]);
}

#[test]
fn devices_of_a_sidecar_are_not_reused() {
    let mut node = node_with_gpus(&["a"]);
    let request = pod("p", vec![sidecar("one", &[(GPU, 1)]), app("two", &[(GPU, 1)])]);

    let refused = refusal(&mut node, &request);

    assert_eq!(
        refused.to_string(),
        "1 acme.com/gpu requested, 0 free (1 of 1 healthy)"
    );
}

#[test]
fn devices_are_not_reused_by_another_pod() {
    let mut node = node_with_gpus(&["a"]);
    admit(&mut node, &pod("p", vec![init("init", &[(GPU, 1)])]));

    let refused = refusal(&mut node, &gpu_pod("q", 1));

    assert!(
        matches!(refused, ReserveError::Insufficient { free: 0, .. }),
        "{refused:?}"
    );
}

#[test]
fn devices_of_one_resource_are_not_reused_for_another() {
    let mut node = node_serving(&[(GPU, &["a"]), (NIC, &["a", "b"])]);
    let request = pod("p", vec![init("one", &[(GPU, 1)]), app("two", &[(NIC, 1)])]);

    let pod = admit(&mut node, &request);

    assert_eq!(
        (held(&pod, "one"), held(&pod, "two")),
        (vec!["a".into()], vec!["a".into()])
    );
    assert_eq!((free(&node, GPU), free(&node, NIC)), (0, 1));
}

#[test]
fn releasing_a_pod_that_shares_frees_each_device_once() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(
        &mut node,
        &pod("p", vec![init("one", &[(GPU, 2)]), app("two", &[(GPU, 1)])]),
    );

    release(&mut node, "p");

    assert_eq!(free(&node, GPU), 2);
    assert_sound(&node);
}

/// The file knows the init container and one of two app containers, which took the device over.
fn half_known() -> Pod {
    imported("p", &[("init", GPU, &["a"]), ("last", GPU, &["a"])])
}

#[test]
fn devices_of_a_later_container_are_not_reused_by_one_that_runs_at_the_same_time() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(half_known()).unwrap();
    let request = pod(
        "p",
        vec![
            init("init", &[(GPU, 1)]),
            app("new", &[(GPU, 1)]),
            app("last", &[(GPU, 1)]),
        ],
    );

    let id = reserve(&mut node, &request);

    assert_eq!(granted(&node, id, "new"), ["b"]);
}

#[test]
fn devices_of_a_later_container_may_be_reused_by_an_init_container() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(half_known()).unwrap();
    let request = pod(
        "p",
        vec![
            init("init", &[(GPU, 1)]),
            init("new", &[(GPU, 1)]),
            app("last", &[(GPU, 1)]),
        ],
    );

    let id = reserve(&mut node, &request);

    assert_eq!(granted(&node, id, "new"), ["a"]);
}

#[test]
fn devices_of_a_container_that_is_not_in_the_spec_are_not_reused() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(half_known()).unwrap();
    let request = pod("p", vec![init("init", &[(GPU, 1)]), app("new", &[(GPU, 1)])]);

    let id = reserve(&mut node, &request);

    assert_eq!(granted(&node, id, "new"), ["b"]);
}

#[test]
fn unhealthy_devices_are_not_reused() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "only.sock", &["a", "b"]);
    node.put(imported("p", &[("init", GPU, &["a"])])).unwrap();
    node.devices_listed(only, list_of(vec![unhealthy("a"), healthy("b")]));

    let id = reserve(
        &mut node,
        &pod("p", vec![init("init", &[(GPU, 1)]), app("main", &[(GPU, 1)])]),
    );

    assert_eq!(granted(&node, id, "main"), ["b"]);
}

#[test]
fn held_devices_of_an_init_container_are_reused() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(imported("p", &[("init", GPU, &["b"])])).unwrap();
    let request = pod("p", vec![init("init", &[(GPU, 1)]), app("main", &[(GPU, 1)])]);

    let id = reserve(&mut node, &request);

    assert_eq!(granted(&node, id, "main"), ["b"]);
    assert_eq!(free(&node, GPU), 1);
    node.abort(id);
    assert_eq!(free(&node, GPU), 1, "the device was the pod's before");
    assert_sound(&node);
}
