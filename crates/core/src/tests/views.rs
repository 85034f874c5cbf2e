//! Tests of views.

use alloc::collections::BTreeSet;
use alloc::string::ToString;
use alloc::vec;

use super::*;
use crate::device_plugin::impaired::Impairment;
use crate::device_plugin::inventory::{GRACE_MS, LastPlugin};
use crate::device_plugin::run_options::RunOptions;
use crate::{Availability, PodUid};

#[test]
fn devices_are_those_listed_and_those_held() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a", "b"]);
    admit(&mut node, &gpu_pod("p", 1));
    node.devices_listed(only, list_of(vec![healthy_on("b", &[1]), unhealthy("c")]));

    let devices = node.devices(&gpu());

    let seen: Vec<_> = devices
        .iter()
        .map(|each| {
            (
                each.id.as_str(),
                each.listed,
                each.healthy,
                &each.nodes[..],
                each.holders.len(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("a", false, false, &[][..], 1),
            ("b", true, true, &[1], 0),
            ("c", true, false, &[], 0),
        ]
    );
}

#[test]
fn devices_of_a_plugin_that_left_are_shown_as_such() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a"]);
    node.connection_lost(only, START);

    let devices = node.devices(&gpu());

    assert_eq!((devices[0].listed, devices[0].healthy), (false, false));
}

// TestGetPodAndContainerForDevice
#[test]
fn the_same_id_under_two_resources_is_two_devices() {
    let mut node = node_serving(&[(GPU, &["0"]), (NIC, &["0"])]);
    admit(&mut node, &gpu_pod("p", 1));

    let holders = |resource: &str| node.devices(&resource.into())[0].holders.clone();

    assert_eq!((holders(GPU), holders(NIC)), (vec!["p".into()], vec![]));
    assert!(node.devices(&"acme.com/unknown".into()).is_empty());
}

#[test]
fn a_reserved_device_shows_its_pod() {
    let mut node = node_with_gpus(&["a"]);

    reserve(&mut node, &gpu_pod("p", 1));

    assert_eq!(node.devices(&gpu())[0].holders, ["p".into()]);
    assert_eq!(node.capacity_of(&gpu(), START).held, 1);
}

// TestGetAllocatableDevicesHealthTransition
#[test]
fn healthy_devices_follow_the_active_list() {
    let mut node = Node::default();
    let only = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(only, list_of(vec![healthy("a"), unhealthy("b")]));
    let healthy = |node: &Node| {
        let list = node.active_lists().remove(&gpu()).unwrap();
        list.map(|list| list.healthy_ids().cloned().collect::<Vec<_>>())
    };
    let before = healthy(&node);
    node.devices_listed(only, list(&["a", "b"]));
    let after = healthy(&node);
    node.connection_lost(only, START);

    assert_eq!(before, Some(ids(&["a"])));
    assert_eq!(after, Some(ids(&["a", "b"])));
    assert_eq!(healthy(&node), None, "the key stays");
}

#[test]
fn only_the_pods_of_a_synced_source_are_orphans() {
    let mut node = node_with_gpus(&["a", "b", "c", "d", "e"]);
    for (uid, source) in [
        ("api", Source::Api),
        ("gone", Source::Embedder),
        ("there", Source::Embedder),
    ] {
        let request = PodRequest {
            source,
            ..gpu_pod(uid, 1)
        };
        admit(&mut node, &request);
    }
    node.put(imported("old", &[("main", GPU, &["d"])])).unwrap();
    node.put(imported("also there", &[("main", GPU, &["e"])]))
        .unwrap();
    let active: BTreeSet<PodUid> = ["there".into(), "also there".into()].into();

    let orphans = node.orphans(Source::Embedder, &active, node.admissions());

    assert_eq!(orphans, ["gone".into(), "old".into()]);
}

#[test]
fn a_list_does_not_cover_pods_that_were_admitted_after_it_was_requested() {
    let mut node = node_with_gpus(&["a", "b", "c"]);
    let pod = |uid| PodRequest {
        source: Source::Embedder,
        ..gpu_pod(uid, 1)
    };
    admit(&mut node, &pod("before"));
    admit(&mut node, &pod("again"));

    let asked = node.admissions();
    assert!(
        node.reserve(&pod("again"), &Preferences::new())
            .unwrap()
            .is_none()
    );
    admit(&mut node, &pod("since"));

    let list = BTreeSet::new();
    assert_eq!(node.orphans(Source::Embedder, &list, asked), ["before".into()]);
    let next = node.admissions();
    assert_eq!(node.orphans(Source::Embedder, &list, next).len(), 3);
}

#[test]
fn the_end_of_the_grace_period_is_a_change_and_final() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a", "b"]);
    assert_eq!(node.next_grace_end(), None);
    node.connection_lost(only, START);
    let end = node.next_grace_end().unwrap();
    assert_eq!(end.since(START), GRACE_MS);
    assert!(!node.grace_ended(Moment(end.0 - 1)));
    assert_eq!(node.capacity_of(&gpu(), START).capacity, 2);

    let before = node.changes();
    assert!(node.grace_ended(end));

    assert_eq!(node.changes(), before + 1);
    // Even if the clock was set back meanwhile.
    assert_eq!(node.capacity_of(&gpu(), START).capacity, 0);
    assert_eq!(node.next_grace_end(), None);
    serve(&mut node, GPU, "gpu.sock", &["a"]);
    assert_eq!(node.capacity_of(&gpu(), START).capacity, 1);
}

#[test]
fn an_adopted_pod_answers_to_its_new_source() {
    let mut node = node_with_gpus(&["a"]);
    node.put(imported("p", &[("main", GPU, &["a"])])).unwrap();
    admit(&mut node, &gpu_pod("p", 1));

    let asked = node.admissions();
    assert!(node.orphans(Source::Embedder, &BTreeSet::new(), asked).is_empty());
}

#[test]
fn devices_held_twice_are_reported_with_both_holders() {
    let mut node = node_with_gpus(&["a", "b"]);
    node.put(imported("p", &[("main", GPU, &["a", "b"])])).unwrap();
    node.put(imported("q", &[("main", GPU, &["b"])])).unwrap();

    let twice = node.doubly_held();

    assert_eq!(twice.len(), 1);
    assert_eq!(
        (twice[0].id.as_str(), &twice[0].holders),
        ("b", &vec!["p".into(), "q".into()])
    );
}

#[test]
fn plugins_show_their_last_list_and_the_active_one() {
    let mut node = Node::default();
    serve(&mut node, GPU, "first.sock", &["a", "b"]);
    let second = serve(&mut node, GPU, "second.sock", &["c"]);
    connect(&mut node, offer(GPU, "third.sock"));

    let plugins = node.plugins();

    let seen: Vec<_> = plugins
        .iter()
        .map(|each| (each.endpoint.as_str(), each.devices, each.is_active))
        .collect();
    assert_eq!(
        seen,
        [
            ("first.sock", Some(2), false),
            ("second.sock", Some(1), true),
            ("third.sock", None, false)
        ]
    );
    assert_eq!(node.plugin(second).unwrap().resource, gpu());
    assert_eq!(second.to_string(), "1");
}

#[test]
fn resources_show_their_availability() {
    let mut node = node_with_gpus(&["a"]);
    connect(&mut node, offer(NIC, "nic.sock"));
    node.put(imported("p", &[("main", "acme.com/old", &["x"])]))
        .unwrap();

    let resources = node.resources(START);

    let seen: Vec<_> = resources
        .iter()
        .map(|each| {
            (
                each.name.as_str(),
                &each.availability,
                each.plugins.len(),
                each.capacity.held,
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (GPU, &Availability::Serving, 1, 0),
            (NIC, &Availability::NotListed, 1, 0),
            ("acme.com/old", &Availability::Gone(None), 0, 1),
        ]
    );
}

#[test]
fn a_resource_that_is_gone_names_its_last_plugin() {
    let mut node = Node::default();
    let only = serve(&mut node, GPU, "gpu.sock", &["a"]);
    node.connection_lost(only, START);
    let last = LastPlugin {
        endpoint: "gpu.sock".into(),
        gone_since: START,
    };

    assert_eq!(node.availability(&gpu()), Availability::Gone(Some(last.clone())));
    assert_eq!(node.known_resources(), [(gpu(), Some(last))].into());
}

// TestGetDeviceRunContainerOptions
#[test]
fn run_options_are_those_of_one_container() {
    let mut node = node_with_gpus(&["a", "b"]);
    let request = pod("p", vec![app("one", &[(GPU, 1)]), app("two", &[(GPU, 1)])]);
    let id = reserve(&mut node, &request);
    let answer = |value: &str| {
        let options = RunOptions {
            envs: [("GPU".into(), value.into())].into(),
            ..RunOptions::default()
        };
        (Answer::new([], options), false)
    };
    node.begin_commit(id, &request, vec![answer("first"), answer("second")])
        .unwrap();
    node.finish_commit(id);

    let (options, conflicts) = node.run_options(&"p".into(), "two");

    assert_eq!(options.envs["GPU"], "second");
    assert!(conflicts.is_empty());
    assert_eq!(node.run_options(&"p".into(), "three").0, Default::default());
}

#[test]
fn pods_are_listed_by_uid() {
    let mut node = node_with_gpus(&["a", "b"]);
    admit(&mut node, &gpu_pod("q", 1));
    admit(&mut node, &gpu_pod("p", 1));

    let uids: Vec<_> = node.pods().map(|pod| pod.uid.as_str()).collect();

    assert_eq!(uids, ["p", "q"]);
}

#[test]
fn devices_that_pods_hold_and_no_plugin_calls_healthy_are_impaired() {
    let mut node = Node::default();
    let plugin = serve(&mut node, GPU, "gpu.sock", &["a", "b", "c", "d"]);
    admit(&mut node, &gpu_pod("p", 2));
    admit(&mut node, &gpu_pod("q", 1));
    let reserved = reserve(&mut node, &gpu_pod("r", 1));
    let impaired = |node: &Node| -> Vec<_> {
        let groups = node.all_impaired().into_iter();
        let texts = |ids: Vec<String>| ids.join(" ");
        groups
            .map(|group| {
                let devices = group.devices.iter().map(ToString::to_string).collect();
                let pods = group.pods.iter().map(ToString::to_string).collect();
                (group.impairment, texts(devices), texts(pods))
            })
            .collect()
    };
    assert!(impaired(&node).is_empty());

    node.devices_listed(
        plugin,
        list_of(vec![unhealthy("a"), healthy("b"), unhealthy("d")]),
    );
    assert_eq!(
        impaired(&node),
        [
            (Impairment::NotListed, "c".into(), "q".into()),
            (Impairment::Unhealthy, "a".into(), "p".into()),
        ],
        "d is only reserved"
    );

    node.abort(reserved);
    node.connection_lost(plugin, START);
    assert_eq!(
        impaired(&node),
        [(Impairment::PluginGone, "a b c".into(), "p q".into())]
    );
    let again = connect(&mut node, offer(GPU, "gpu.sock"));
    assert!(impaired(&node).is_empty(), "it may list them yet");
    node.devices_listed(again, list(&["a", "b", "c"]));
    assert!(impaired(&node).is_empty());
}
