//! Leases: refusals one by one, and random histories against a model of the containers and of the disk.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::LeaseName;
use crate::device_plugin::inventory::{EVICT_AFTER_MS, GRACE_MS};
use crate::node::Restored;
use crate::shield::{
    ContainerProcess, EndError, GrantError, Lease, LeaseChange, LeaseHolder, Leases, PreStart, Preparation,
    PrepareError, StartError,
};
use crate::{ConnectionId, Moment};

fn ids(numbers: &[usize]) -> BTreeSet<DeviceId> {
    numbers.iter().map(|number| format!("g{number}").into()).collect()
}

fn grant(leases: &mut Leases, name: &str, devices: &[usize]) {
    let change = leases.begin_grant(name.into(), GPU.into(), ids(devices), START);
    leases.finish(change.unwrap());
}

fn names(preparation: &Preparation) -> Vec<LeaseName> {
    let leases = preparation.leases.iter();
    leases.map(|lease| lease.name.clone()).collect()
}

fn prepare(leases: &mut Leases, devices: &[usize]) {
    let preparation = leases.begin_prepare(&GPU.into(), &ids(devices)).unwrap();
    let names = names(&preparation);
    let answers = names.iter().map(|name| (name.clone(), Answer::default(), false));
    if let Some(change) = leases.begin_prepared(answers) {
        leases.finish(change);
    }
    leases.end_prepare(&names, None, None);
}

/// Prepares leases after the kubelet has given up, with a call of `PreStartContainer`.
fn prepare_late(leases: &mut Leases, devices: &[usize]) -> PreStart {
    let call = PreStart {
        connection: ConnectionId(1),
        at: START,
    };
    let preparation = leases.begin_prepare(&GPU.into(), &ids(devices)).unwrap();
    leases.end_prepare(&names(&preparation), Some(call), None);
    call
}

/// Begins a preparation, ends it at once, and returns the earlier call that it may use.
fn earlier_call(leases: &mut Leases, devices: &[usize]) -> Option<PreStart> {
    let preparation = leases.begin_prepare(&GPU.into(), &ids(devices)).unwrap();
    leases.end_prepare(&names(&preparation), None, None);
    preparation.pre_start
}

fn start(leases: &mut Leases, name: &str, container: &str) -> Result<(), StartError> {
    let change = leases.begin_start(name, container, ContainerProcess::default())?;
    leases.finish(change);
    Ok(())
}

fn stop(leases: &mut Leases, name: &str, container: &str) {
    let change = leases.begin_stop(name, container).unwrap();
    leases.finish(change);
}

fn refused(leases: &mut Leases, devices: &[usize]) -> PrepareError {
    leases.begin_prepare(&GPU.into(), &ids(devices)).unwrap_err()
}

#[test]
fn all_leases_of_the_same_devices_are_prepared_together() {
    let mut leases = Leases::default();
    grant(&mut leases, "init", &[0, 1]);
    grant(&mut leases, "main", &[0, 1]);
    grant(&mut leases, "other", &[0]);

    let prepared = leases.begin_prepare(&GPU.into(), &ids(&[0, 1])).unwrap();

    assert_eq!(names(&prepared), ["init".into(), "main".into()]);
}

#[test]
fn a_late_call_of_the_plugin_serves_one_start() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0]);
    prepare(&mut leases, &[0]);
    assert_eq!(earlier_call(&mut leases, &[0]), None);

    let call = prepare_late(&mut leases, &[0]);

    assert_eq!(earlier_call(&mut leases, &[0]), Some(call));
    assert_eq!(earlier_call(&mut leases, &[0]), None);
}

#[test]
fn a_late_call_is_lost_when_one_of_its_devices_is_used() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0, 1]);
    prepare(&mut leases, &[0, 1]);
    prepare_late(&mut leases, &[0, 1]);
    start(&mut leases, "a", "c1").unwrap();
    stop(&mut leases, "a", "c1");
    assert_eq!(earlier_call(&mut leases, &[0, 1]), None);

    // By a preparation of other leases.
    grant(&mut leases, "b", &[1]);
    prepare_late(&mut leases, &[0, 1]);
    prepare(&mut leases, &[1]);
    assert_eq!(earlier_call(&mut leases, &[0, 1]), None);

    // A lease that came later was not part of the call.
    prepare_late(&mut leases, &[0, 1]);
    grant(&mut leases, "c", &[0, 1]);
    assert_eq!(earlier_call(&mut leases, &[0, 1]), None);
}

#[test]
fn a_preparation_in_progress_tells_why_the_one_before_it_failed() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0]);
    assert_eq!(leases.preparing(&GPU.into(), &ids(&[0])), None);
    let preparation = leases.begin_prepare(&GPU.into(), &ids(&[0])).unwrap();
    leases.end_prepare(&names(&preparation), None, Some("broken"));

    leases.begin_prepare(&GPU.into(), &ids(&[0])).unwrap();

    let preparing = leases.preparing(&GPU.into(), &ids(&[0])).unwrap();
    assert!(preparing.lacks_answers);
    assert_eq!(preparing.failure, Some("broken"));
    assert_eq!(leases.preparing(&GPU.into(), &ids(&[1])), None);
    leases.end_prepare(&names(&preparation), None, None);
    prepare(&mut leases, &[0]);
    leases.begin_prepare(&GPU.into(), &ids(&[0])).unwrap();
    let preparing = leases.preparing(&GPU.into(), &ids(&[0])).unwrap();
    assert!(!preparing.lacks_answers && preparing.failure.is_none());
}

#[test]
fn a_device_waits_for_the_end_of_the_container_that_has_it() {
    let mut leases = Leases::default();
    grant(&mut leases, "old", &[0, 1]);
    prepare(&mut leases, &[0, 1]);
    start(&mut leases, "old", "c1").unwrap();
    grant(&mut leases, "new", &[1, 2]);

    let refusal = refused(&mut leases, &[1, 2]);

    assert_eq!(
        refusal.to_string(),
        "waiting for container c1 to end: it still has device g1"
    );
    assert_eq!(
        leases.begin_end("old"),
        Err(EndError::Running {
            container: "c1".into()
        })
    );
    stop(&mut leases, "old", "c1");
    prepare(&mut leases, &[1, 2]);
}

#[test]
fn a_container_that_comes_late_does_not_start_beside_its_successor() {
    let mut leases = Leases::default();
    grant(&mut leases, "old", &[0]);
    prepare(&mut leases, &[0]);
    grant(&mut leases, "new", &[0]);
    prepare(&mut leases, &[0]);
    start(&mut leases, "new", "c2").unwrap();

    let late = start(&mut leases, "old", "c1");

    let (device, container) = ("g0".into(), "c2".into());
    assert_eq!(late, Err(StartError::Running { device, container }));
    // A hook that is run again is not another container.
    start(&mut leases, "new", "c2").unwrap();
}

#[test]
fn no_container_starts_while_the_plugin_is_called_for_its_device() {
    let mut leases = Leases::default();
    grant(&mut leases, "old", &[0]);
    prepare(&mut leases, &[0]);
    grant(&mut leases, "new", &[0, 1]);
    leases.begin_prepare(&GPU.into(), &ids(&[0, 1])).unwrap();

    assert_eq!(start(&mut leases, "old", "c1"), Err(StartError::Preparing));
    assert_eq!(start(&mut leases, "new", "c2"), Err(StartError::Preparing));
    let device = "g0".into();
    assert_eq!(refused(&mut leases, &[0]), PrepareError::Preparing { device });
}

#[test]
fn a_lease_that_ends_is_neither_prepared_nor_started() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0]);
    prepare(&mut leases, &[0]);
    let end = leases.begin_end("a").unwrap();

    assert_eq!(start(&mut leases, "a", "c1"), Err(StartError::Ended));
    let device = "g0".into();
    assert_eq!(refused(&mut leases, &[0]), PrepareError::Ending { device });
    assert_eq!(leases.begin_end("a"), Err(EndError::Busy));

    leases.cancel(end);
    start(&mut leases, "a", "c1").unwrap();
}

#[test]
fn a_lease_without_an_answer_starts_no_container() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0]);
    assert_eq!(start(&mut leases, "a", "c1"), Err(StartError::NotPrepared));
    assert_eq!(start(&mut leases, "b", "c1"), Err(StartError::Ended));
    assert_eq!(refused(&mut leases, &[1]), PrepareError::Unknown);
    assert_eq!(
        leases.begin_grant("b".into(), GPU.into(), [], START),
        Err(GrantError::NoDevices)
    );
    assert_eq!(
        leases.begin_grant("a".into(), GPU.into(), ids(&[1]), START),
        Err(GrantError::NameTaken)
    );
}

#[test]
fn a_reboot_ends_containers_and_preparations() {
    let mut leases = Leases::default();
    grant(&mut leases, "a", &[0]);
    prepare(&mut leases, &[0]);
    start(&mut leases, "a", "c1").unwrap();
    let mut lease = leases.get("a").unwrap().lease.clone();

    assert!(lease.rebooted());

    let mut leases = Leases::restore([lease.clone()]);
    assert!(!lease.rebooted());
    assert_eq!(start(&mut leases, "a", "c2"), Err(StartError::NotPrepared));
    prepare(&mut leases, &[0]);
    start(&mut leases, "a", "c2").unwrap();
}

#[test]
fn a_container_from_before_the_adoption_keeps_its_devices() {
    let mut leases = Leases::default();
    let direct = Lease {
        name: "direct".into(),
        resource: GPU.into(),
        devices: ids(&[0, 1]),
        answer: Some(Answer::default()),
        pre_start_required: false,
        granted_at: START,
        is_direct: true,
        holder: None,
        is_witnessed: false,
        containers: BTreeMap::new(),
    };
    let change = leases.begin_adopt([direct.clone()]).unwrap();
    leases.finish(change);
    assert_eq!(leases.begin_adopt([direct]), None);
    grant(&mut leases, "new", &[1]);

    let (device, pod) = ("g1".into(), None);
    assert_eq!(refused(&mut leases, &[1]), PrepareError::Adopted { device, pod });
    // Its own container is started again by the kubelet.
    prepare(&mut leases, &[0, 1]);
}

#[test]
fn a_successor_with_the_same_devices_waits_for_the_end_of_an_adopted_lease() {
    let mut leases = Leases::default();
    let direct = Lease {
        name: "direct".into(),
        resource: GPU.into(),
        devices: ids(&[0]),
        answer: Some(Answer::default()),
        pre_start_required: false,
        granted_at: START,
        is_direct: true,
        holder: None,
        is_witnessed: false,
        containers: BTreeMap::new(),
    };
    let change = leases.begin_adopt([direct]).unwrap();
    leases.finish(change);
    grant(&mut leases, "new", &[0]);

    let (device, pod) = ("g0".into(), None);
    assert_eq!(refused(&mut leases, &[0]), PrepareError::Adopted { device, pod });
}

/// A lease that was found in the kubelet's record.
fn found(name: &str, devices: &[usize], pod: &str) -> Lease {
    Lease {
        name: name.into(),
        resource: GPU.into(),
        devices: ids(devices),
        answer: None,
        pre_start_required: false,
        granted_at: START,
        is_direct: false,
        holder: Some(LeaseHolder {
            pod: pod.into(),
            container: "c".into(),
        }),
        is_witnessed: false,
        containers: BTreeMap::new(),
    }
}

fn adopt(leases: &mut Leases, lease: Lease) {
    let change = leases.begin_adopt([lease]).unwrap();
    leases.finish(change);
}

fn witness(leases: &mut Leases, name: &str, containers: &[&str]) {
    let containers = containers
        .iter()
        .map(|id| ((*id).into(), ContainerProcess::default()));
    let change = leases.begin_witness(name, containers).unwrap();
    leases.finish(change);
}

#[test]
fn devices_wait_until_the_containers_of_a_lease_that_was_found_are_known() {
    let mut leases = Leases::default();
    grant(&mut leases, "prepared", &[0]);
    prepare(&mut leases, &[0]);
    adopt(&mut leases, found("a", &[0, 1], "p"));
    let device = DeviceId::from("g0");

    let pod = Some("p".into());
    let refusal = refused(&mut leases, &[0]);
    assert_eq!(
        refusal,
        PrepareError::Unwitnessed {
            device: device.clone(),
            pod
        }
    );
    assert_eq!(
        start(&mut leases, "prepared", "c2"),
        Err(StartError::Unwitnessed { device })
    );
    assert_eq!(leases.begin_end("a"), Err(EndError::Unwitnessed));

    witness(&mut leases, "a", &["c1"]);
    assert!(matches!(refused(&mut leases, &[0]), PrepareError::Running { .. }));
    assert_eq!(leases.begin_witness("a", []), None);
    stop(&mut leases, "a", "c1");
    start(&mut leases, "prepared", "c2").unwrap();
    leases.begin_end("a").unwrap();
}

#[test]
fn containers_that_were_found_count_before_they_are_written() {
    let mut leases = Leases::default();
    adopt(&mut leases, found("a", &[0], "p"));
    let running = [("c1".into(), ContainerProcess::default())];
    let change = leases.begin_witness("a", running).unwrap();
    assert!(matches!(refused(&mut leases, &[0]), PrepareError::Running { .. }));

    leases.cancel(change);

    stop(&mut leases, "a", "c1");
    assert!(matches!(
        refused(&mut leases, &[0]),
        PrepareError::Unwitnessed { .. }
    ));
}

#[test]
fn a_direct_lease_never_counts_as_witnessed() {
    let mut leases = Leases::default();
    adopt(
        &mut leases,
        Lease {
            is_direct: true,
            ..found("direct", &[0], "p")
        },
    );
    grant(&mut leases, "new", &[0]);

    witness(&mut leases, "direct", &["c1"]);
    assert!(matches!(refused(&mut leases, &[0]), PrepareError::Running { .. }));
    stop(&mut leases, "direct", "c1");

    assert!(matches!(refused(&mut leases, &[0]), PrepareError::Adopted { .. }));
    let end = leases.begin_end("direct").unwrap();
    leases.finish(end);
    prepare(&mut leases, &[0]);
}

#[test]
fn containers_of_one_pod_from_before_the_adoption_share_devices() {
    let mut leases = Leases::default();
    let direct = |name, devices: &[usize], pod| Lease {
        is_direct: true,
        answer: Some(Answer::default()),
        ..found(name, devices, pod)
    };
    adopt(&mut leases, direct("init", &[0, 1], "p"));
    adopt(&mut leases, direct("main", &[0], "p"));
    adopt(&mut leases, direct("other", &[1], "q"));

    prepare(&mut leases, &[0]);
    assert!(matches!(
        refused(&mut leases, &[0, 1]),
        PrepareError::Adopted { .. }
    ));
}

#[test]
fn leased_devices_are_held_and_not_free() {
    let mut node = served();
    grant(node.leases_mut(), "a", &[1]);
    grant(node.leases_mut(), "b", &[1]);
    grant(node.leases_mut(), "absent", &[7]);

    let capacity = node.capacity_of(&GPU.into(), START);

    assert_eq!((capacity.held, capacity.free), (2, 2));
    assert_eq!(node.devices(&GPU.into()).len(), 3);
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    node.leases_mut().identify(&"absent".into(), &holder);
    assert_eq!(node.devices(&GPU.into()).len(), 4);
}

/// A node whose plugin lists devices on two NUMA nodes.
fn served() -> Node {
    let mut node = Node::default();
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    let devices = vec![
        healthy_on("g0", &[0]),
        healthy_on("g1", &[0]),
        healthy_on("g2", &[1]),
    ];
    node.devices_listed(connection, list_of(devices));
    node
}

#[test]
fn a_pod_with_a_lease_is_shown_as_the_holder_of_its_devices() {
    let mut node = served();
    grant(node.leases_mut(), "a", &[1]);
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    assert!(node.leases_mut().identify(&"a".into(), &holder));
    assert!(!node.leases_mut().identify(&"a".into(), &holder));

    let devices = node.devices(&GPU.into());

    let holders: Vec<usize> = devices.iter().map(|device| device.holders.len()).collect();
    assert_eq!(holders, [0, 1, 0]);
}

#[test]
fn the_kubelet_is_advised_to_choose_devices_that_no_container_has() {
    let mut node = served();
    let choose = |node: &Node, available: &[usize], count: usize, preferred: &[DeviceId]| {
        node.lease_choice(&GPU.into(), &ids(available), &ids(&[]), count, preferred)
    };
    assert_eq!(choose(&node, &[0, 1, 2], 2, &[]), ["g0".into(), "g1".into()]);
    assert_eq!(choose(&node, &[0, 1, 2], 1, &["g1".into()]), ["g1".into()]);
    grant(node.leases_mut(), "a", &[1]);
    prepare(node.leases_mut(), &[1]);
    start(node.leases_mut(), "a", "c1").unwrap();

    assert_eq!(
        choose(&node, &[0, 1, 2], 2, &["g1".into()]),
        ["g0".into(), "g2".into()]
    );
    // The kubelet decides: without another device, one that a container still has is chosen.
    assert_eq!(choose(&node, &[1], 1, &[]), ["g1".into()]);
    assert!(choose(&node, &[1], 2, &[]).is_empty());
}

#[test]
fn devices_of_a_plugin_that_looks_for_them_stay_advertised() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    let shown = |node: &Node, now| {
        let advertised = node.advertised(&GPU.into(), now, START, 1_000);
        (advertised.list.healthy().count(), advertised.is_expired)
    };
    assert_eq!(shown(&node, START), (3, false));
    node.connection_lost(connection, START);
    assert_eq!(shown(&node, START.after(999)), (3, false));
    assert_eq!(shown(&node, START.after(1_000)), (3, true));
    // A new process that has found nothing yet does not change that.
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, list_of(Vec::new()));
    assert_eq!(shown(&node, START.after(999)), (3, false));
    node.devices_listed(connection, list(&["g0"]));
    assert_eq!(shown(&node, START.after(5_000)), (1, false));
    node.devices_listed(connection, list_of(Vec::new()));
    assert_eq!(shown(&node, START.after(5_000)), (0, false));
}

/// A list with these devices, all unhealthy.
fn unhealthy(names: &[&str]) -> Arc<DeviceList> {
    let device = |name: &&str| Device {
        id: (*name).into(),
        healthy: false,
        nodes: Vec::new(),
    };
    Arc::new(list_of(names.iter().map(device).collect()))
}

/// Returns the devices that the kubelet is told to be healthy.
fn shown(node: &Node, now: Moment) -> Vec<String> {
    let advertised = node.advertised(&GPU.into(), now, START, 1_000);
    let listed = advertised.list.devices().iter();
    let listed = listed
        .filter(|device| advertised.is_healthy(device))
        .map(|device| &device.id);
    let mut shown: Vec<String> = listed
        .chain(advertised.unlisted())
        .map(ToString::to_string)
        .collect();
    shown.sort();
    shown
}

#[test]
fn devices_of_containers_stay_healthy_while_their_plugin_is_away() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);

    assert_eq!(shown(&node, START.after(1_000)), ["g1"]);

    // They are not drawn from the list: after a restart, it may be lost.
    let leases = node.leases().iter().map(|view| view.lease.clone()).collect();
    let node = Node::restore(Restored {
        leases,
        ..Restored::default()
    });
    assert!(node.advertised_resources().contains(GPU));
    assert_eq!(shown(&node, START.after(5_000)), ["g1"]);
}

#[test]
fn the_last_list_before_a_shutdown_does_not_lose_devices_of_containers() {
    for last in [unhealthy(&["g0", "g1", "g2"]), unhealthy(&[])] {
        let mut node = served();
        let connection = node.serving(&GPU.into()).unwrap();
        grant(node.leases_mut(), "a", &[1]);
        node.devices_listed(connection, last);
        // A plugin that has found its devices is right about them.
        assert!(shown(&node, START).is_empty());

        node.connection_lost(connection, START);

        assert_eq!(shown(&node, START), ["g1"]);
    }
}

#[test]
fn a_plugin_that_lists_unhealthy_devices_after_its_restart_is_believed() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, unhealthy(&[]));
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);

    node.devices_listed(connection, unhealthy(&["g0", "g1", "g2"]));

    assert_eq!(shown(&node, START.after(999)), ["g1"]);
    assert!(shown(&node, START.after(1_000)).is_empty());
    // A plugin that comes and goes without a device gets no more time.
    node.connection_lost(connection, START.after(900));
    assert_eq!(shown(&node, START.after(1_000)), ["g1"]);
}

#[test]
fn a_plugin_that_is_away_gets_time_once_and_is_forgotten_after_it() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    let end = START.after(1_000 + GRACE_MS);
    let to_forget = |node: &Node, now| node.lists_to_forget(now, START, 1_000);
    assert!(to_forget(&node, end).is_empty(), "a container has a device");
    let ending = node.leases_mut().begin_end("a").unwrap();
    node.leases_mut().finish(ending);

    assert!(to_forget(&node, START.after(999 + GRACE_MS)).is_empty());
    assert_eq!(to_forget(&node, end), [GPU.into()]);
    // A reboot gives it time again.
    assert!(node.lists_to_forget(end, START.after(1), 1_000).is_empty());

    node.forget_lists(&[GPU.into()]);
    assert!(node.advertised_resources().is_empty());
    assert!(to_forget(&node, end).is_empty());
    // The record is replaced, too.
    assert_eq!(node.unrecorded_lists().len(), 0, "it has never been recorded");
    let connection = connect(&mut node, offer(GPU, "gpu.sock"));
    node.devices_listed(connection, list(&["g0"]));
    assert_eq!(shown(&node, end), ["g0"]);
}

#[test]
fn a_resource_with_a_lease_is_not_idle() {
    let mut node = served();
    let connection = node.serving(&GPU.into()).unwrap();
    grant(node.leases_mut(), "a", &[1]);
    node.connection_lost(connection, START);
    node.evict_idle(START.after(EVICT_AFTER_MS));
    assert_eq!(shown(&node, START), ["g0", "g1", "g2"]);
}

const DEVICES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Grant(Vec<usize>),
    Prepare(u8),
    /// The plugin answers; `true` if the kubelet has given up before.
    Answer(u8, bool),
    Abort(u8),
    Start(u8),
    Stop(u8),
    End(u8),
    Write(bool),
    Restart,
    /// The database is lost, and leases are found in the kubelet's record.
    Lose,
    /// The runtime tells which containers of a lease run.
    Witness(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let devices = || proptest::sample::subsequence((0..DEVICES).collect::<Vec<_>>(), 1..=DEVICES);
    prop_oneof![
        3 => devices().prop_map(Step::Grant),
        5 => any::<u8>().prop_map(Step::Prepare),
        5 => (any::<u8>(), any::<bool>()).prop_map(|(number, is_late)| Step::Answer(number, is_late)),
        1 => any::<u8>().prop_map(Step::Abort),
        6 => any::<u8>().prop_map(Step::Start),
        4 => any::<u8>().prop_map(Step::Stop),
        3 => any::<u8>().prop_map(Step::End),
        10 => proptest::bool::weighted(0.9).prop_map(Step::Write),
        1 => Just(Step::Restart),
        1 => Just(Step::Lose),
        4 => any::<u8>().prop_map(Step::Witness),
    ]
}

/// The leases, with the containers that run and the records on disk.
#[derive(Default)]
struct World {
    leases: Leases,
    disk: BTreeMap<LeaseName, Lease>,
    queue: Vec<LeaseChange>,
    /// Preparations in flight, each with the call of `PreStartContainer` in it.
    preparing: Vec<(Vec<LeaseName>, PreStart)>,
    /// When a container with a device was last started, or a plugin last called for it.
    used: BTreeMap<DeviceId, Moment>,
    /// Containers that run, with their leases. A hook was answered for each.
    running: BTreeMap<String, (LeaseName, BTreeSet<DeviceId>)>,
    /// Containers whose hook waits for the disk.
    starting: BTreeMap<String, (LeaseName, BTreeSet<DeviceId>)>,
    next: usize,
}

fn pick<T: Clone>(all: impl Iterator<Item = T>, number: u8) -> Option<T> {
    let all: Vec<T> = all.collect();
    all.get(usize::from(number) % all.len().max(1)).cloned()
}

impl World {
    fn lease(&self, number: u8) -> Option<Lease> {
        pick(self.leases.iter().map(|view| view.lease.clone()), number)
    }

    fn use_devices(&mut self, devices: &BTreeSet<DeviceId>) -> Moment {
        self.next += 1;
        let now = Moment(u64::try_from(self.next).unwrap());
        self.used
            .extend(devices.iter().map(|device| (device.clone(), now)));
        now
    }

    fn write(&mut self, is_written: bool) {
        for change in self.queue.drain(..) {
            if !is_written {
                if let LeaseChange::Start(_, container) = &change {
                    self.starting.remove(container);
                }
                self.leases.cancel(change);
                continue;
            }
            for lease in change.put() {
                self.disk.insert(lease.name.clone(), lease.clone());
            }
            for name in change.delete() {
                self.disk.remove(name);
            }
            if let LeaseChange::Start(_, container) = &change
                && let Some(started) = self.starting.remove(container)
            {
                self.running.insert(container.clone(), started);
            }
            self.leases.finish(change);
        }
        if !is_written {
            // The writer makes a new file from memory.
            let all = self.leases.iter();
            self.disk = all
                .map(|view| (view.lease.name.clone(), view.lease.clone()))
                .collect();
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Grant(devices) => {
                self.next += 1;
                let name = format!("l{}", self.next);
                let change = self
                    .leases
                    .begin_grant(name.into(), GPU.into(), ids(&devices), START);
                self.queue.push(change.unwrap());
            }
            Step::Prepare(number) => {
                let Some(lease) = self.lease(number) else { return };
                let busy =
                    |device: &DeviceId| self.running.values().any(|(_, devices)| devices.contains(device));
                let is_busy = lease.devices.iter().any(busy);
                if let Ok(preparation) = self.leases.begin_prepare(&GPU.into(), &lease.devices) {
                    assert!(!is_busy, "prepared {:?} while a container has one", lease.devices);
                    if let Some(earlier) = preparation.pre_start {
                        let used = lease.devices.iter().filter_map(|device| self.used.get(device));
                        assert!(used.max() <= Some(&earlier.at), "a call was used twice");
                    }
                    let at = self.use_devices(&lease.devices);
                    let connection = ConnectionId(1);
                    let call = PreStart { connection, at };
                    self.preparing.push((names(&preparation), call));
                }
            }
            Step::Answer(number, is_late) => {
                if self.preparing.is_empty() {
                    return;
                }
                let (names, call) = self
                    .preparing
                    .swap_remove(usize::from(number) % self.preparing.len());
                let answers = names.iter().map(|name| (name.clone(), Answer::default(), false));
                self.queue.extend(self.leases.begin_prepared(answers));
                self.write(true);
                self.leases.end_prepare(&names, is_late.then_some(call), None);
            }
            Step::Abort(number) => {
                if !self.preparing.is_empty() {
                    let (names, _) = self
                        .preparing
                        .swap_remove(usize::from(number) % self.preparing.len());
                    self.leases.end_prepare(&names, None, Some("failed"));
                }
            }
            Step::Start(number) => {
                let Some(lease) = self.lease(number) else { return };
                self.next += 1;
                let container = format!("c{}", self.next);
                let process = ContainerProcess::default();
                if let Ok(change) = self.leases.begin_start(lease.name.as_str(), &container, process) {
                    self.use_devices(&lease.devices);
                    self.queue.push(change);
                    self.starting.insert(container, (lease.name, lease.devices));
                }
            }
            Step::Stop(number) => {
                let Some(container) = pick(self.running.keys().cloned(), number) else {
                    return;
                };
                let (lease, _) = self.running.remove(&container).unwrap();
                self.queue
                    .extend(self.leases.begin_stop(lease.as_str(), &container));
            }
            Step::End(number) => {
                let Some(lease) = self.lease(number) else { return };
                self.queue.extend(self.leases.begin_end(lease.name.as_str()).ok());
            }
            Step::Write(is_written) => self.write(is_written),
            Step::Restart => {
                // Unwritten changes are lost, and no hook was answered for them.
                self.queue.clear();
                self.starting.clear();
                self.preparing.clear();
                self.leases = Leases::restore(self.disk.values().cloned());
            }
            Step::Lose => {
                for lease in self.disk.values_mut() {
                    let (name, devices) = (lease.name.as_str(), lease.devices.iter());
                    *lease = Lease {
                        devices: devices.cloned().collect(),
                        ..found(name, &[], "p")
                    };
                }
                self.take(Step::Restart);
            }
            Step::Witness(number) => {
                let Some(lease) = self.lease(number) else { return };
                let running = self.running.iter();
                let running = running.filter(|(_, (name, _))| *name == lease.name);
                let containers: Vec<_> = running
                    .map(|(id, _)| (id.clone(), ContainerProcess::default()))
                    .collect();
                self.queue
                    .extend(self.leases.begin_witness(lease.name.as_str(), containers));
            }
        }
    }

    fn check(&self) {
        self.leases.check();
        let mut used = BTreeSet::new();
        for (container, (lease, devices)) in &self.running {
            for device in devices {
                assert!(used.insert(device), "{device} is in two containers that run");
            }
            for known in [
                self.leases.get(lease.as_str()).map(|view| view.lease),
                self.disk.get(lease),
            ] {
                let known = known.expect("a lease ended although its container runs");
                assert!(
                    known.containers.contains_key(container) || !known.is_witnessed,
                    "{container} of {lease} is forgotten"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn a_device_is_in_one_running_container_whatever_happens(
        steps in proptest::collection::vec(step(), 1..120)
    ) {
        let mut world = World::default();
        for step in steps {
            world.take(step);
            world.check();
        }
    }
}
