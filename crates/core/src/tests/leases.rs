//! Leases: refusals one by one.

use alloc::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::LeaseName;
use crate::shield::{
    ContainerProcess, EndError, GrantError, Lease, LeaseHolder, Leases, PreStart, Preparation, PrepareError,
    StartError,
};

pub(super) fn ids(numbers: &[usize]) -> BTreeSet<DeviceId> {
    numbers.iter().map(|number| format!("g{number}").into()).collect()
}

pub(super) fn grant(leases: &mut Leases, name: &str, devices: &[usize]) {
    let change = leases.begin_grant(name.into(), GPU.into(), ids(devices), START);
    leases.finish(change.unwrap());
}

pub(super) fn names(preparation: &Preparation) -> Vec<LeaseName> {
    let leases = preparation.leases.iter();
    leases.map(|lease| lease.name.clone()).collect()
}

pub(super) fn prepare(leases: &mut Leases, devices: &[usize]) {
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

pub(super) fn start(leases: &mut Leases, name: &str, container: &str) -> Result<(), StartError> {
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
pub(super) fn found(name: &str, devices: &[usize], pod: &str) -> Lease {
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
fn a_lease_that_was_handed_over_is_in_use_until_the_kubelet_forgets_it() {
    let mut leases = Leases::default();
    grant(&mut leases, "old", &[0]);
    grant(&mut leases, "waiting", &[1]);
    prepare(&mut leases, &[0]);
    let change = leases.begin_hand_over().unwrap();
    leases.finish(change);
    assert_eq!(leases.begin_hand_over(), None);
    grant(&mut leases, "new", &[0]);

    let (device, pod) = ("g0".into(), None);
    assert_eq!(refused(&mut leases, &[0]), PrepareError::Adopted { device, pod });
    let end = leases.begin_end("old").unwrap();
    leases.finish(end);
    prepare(&mut leases, &[0]);
    prepare(&mut leases, &[1]);
}
