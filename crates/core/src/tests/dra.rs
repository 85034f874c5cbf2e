//! Tests of claims, drivers and device health.

use super::*;
use crate::device_plugin::ledger::Commit;
use crate::dra::HealthChange;
use crate::dra::claims::{
    AllocatedClaim, AllocatedDevice, AllocationResult, BeginForgetError, Call, Claim, ClaimKey, Failure,
    MAX_BACKGROUND_CALLS, MAX_CLAIMS, MIN_BACKOFF_MS, Operation, Preparation, PreparationState,
    PreparedDevice,
};
use crate::dra::drivers::{DriverOffer, MAX_GONE, MAX_REFUSED, Refusal, WIPE_DELAY_MS};
use crate::dra::health::{DEFAULT_LEASE_MS, DeviceHealth, HealthReport, PoolDevice};
use crate::dra::view::{Phase, Reason};
use crate::{
    Blocked, ClaimReference, ClaimRequest, ClaimUid, CommitError, DriverName, Importing, PodClaim, Restored,
};

pub(crate) fn key(name: &str) -> ClaimKey {
    ClaimKey {
        namespace: "default".into(),
        name: name.into(),
    }
}

pub(crate) fn result(driver: &str, request: &str, device: &str) -> AllocationResult {
    AllocationResult {
        driver: driver.into(),
        device: AllocatedDevice {
            request: request.into(),
            pool: "pool".into(),
            device: device.into(),
            share: None,
            admin_access: false,
        },
        skip: Vec::new(),
    }
}

/// A claim with one device of each driver: the driver, the device, and what is skipped.
pub(crate) fn claim_of(name: &str, uid: &str, drivers: &[(&str, &str, &[&str])]) -> AllocatedClaim {
    let results = drivers.iter().map(|&(driver, device, skip)| AllocationResult {
        skip: skip.iter().map(ToString::to_string).collect(),
        ..result(driver, "req", device)
    });
    AllocatedClaim::new(key(name), uid.into(), results)
}

pub(crate) fn offer_of(driver: &str, endpoint: &str) -> DriverOffer {
    DriverOffer {
        driver: driver.into(),
        endpoint: endpoint.into(),
        process: crate::ProcessId { uid: 0, pid: None },
        may_share: false,
        service: "v1.DRAPlugin".into(),
        service_reason: "it is the newest".into(),
        health_service: None,
    }
}

/// Returns the devices that a working driver answers.
pub(crate) fn answer_of(claim: &Claim, driver: &DriverName) -> Vec<PreparedDevice> {
    let allocated = claim.preparations[driver].allocated.iter().flatten();
    let device = |each: &AllocatedDevice| PreparedDevice {
        requests: vec![each.request.clone()],
        pool: each.pool.clone(),
        device: each.device.clone(),
        share: each.share.clone(),
        cdi_devices: vec![format!("{driver}/dev={}", each.device)],
    };
    allocated.map(device).collect()
}

pub(crate) fn is_cdi_name(name: &str) -> bool {
    name.contains("/dev=")
}

fn node_with(drivers: &[&str]) -> Node {
    let mut node = Node::default();
    for driver in drivers {
        connect_driver(&mut node, driver, "0.sock");
    }
    node
}

fn connect_driver(node: &mut Node, driver: &str, endpoint: &str) -> ConnectionId {
    let (connection, _) = node.driver_registered(offer_of(driver, endpoint), START).unwrap();
    node.link_up(connection, START);
    connection
}

/// A pod of one container that uses all of each claim.
fn pod_with(uid: &str, claims: &[AllocatedClaim]) -> PodRequest {
    let claims = claims.iter().enumerate().map(|(place, claim)| ClaimRequest {
        name: format!("claim-{place}"),
        claim: claim.clone(),
    });
    let claims: Vec<ClaimRequest> = claims.collect();
    let mut main = app("main", &[]);
    main.claims = claims.iter().map(|each| reference(&each.name, None)).collect();
    PodRequest {
        claims,
        ..pod(uid, vec![main])
    }
}

fn reference(claim: &str, request: Option<&str>) -> ClaimReference {
    ClaimReference {
        claim: claim.into(),
        request: request.map(Into::into),
    }
}

fn intend(node: &mut Node, id: ReservationId) {
    node.begin_intent(id);
    node.finish_intent(id);
}

/// Every driver does its work.
fn answer_all(node: &mut Node, calls: Vec<Call>) {
    for call in calls {
        answer(node, &call);
    }
}

fn answer(node: &mut Node, call: &Call) -> Vec<Failure> {
    let uids = call.claims.iter().map(|(uid, _)| uid.clone());
    match call.operation {
        Operation::Prepare => {
            let devices = |uid: ClaimUid| {
                let devices = answer_of(node.claim(&uid).unwrap().claim, &call.driver);
                (uid, Ok(devices))
            };
            let results = uids.map(devices).collect();
            node.prepared(call.id, results, is_cdi_name, START)
        }
        Operation::Unprepare => node.unprepared(call.id, uids.map(|uid| (uid, Ok(()))).collect(), START),
    }
}

fn prepare(node: &mut Node, id: ReservationId) {
    intend(node, id);
    let calls = node.prepare_calls(id, START);
    answer_all(node, calls);
}

fn admit_with(node: &mut Node, request: &PodRequest) -> Commit {
    let id = reserve(node, request);
    prepare(node, id);
    let commit = node.begin_commit(id, request, Vec::new()).unwrap();
    node.finish_commit(id);
    assert_sound(node);
    commit
}

/// Runs background calls and writes until none is left.
fn rest(node: &mut Node) {
    loop {
        let calls = node.due_calls(START);
        let record = node.begin_record();
        if calls.is_empty() && record.is_none() {
            return assert_sound(node);
        }
        answer_all(node, calls);
        if let Some(record) = record {
            node.finish_record(record.id);
        }
    }
}

fn phase(node: &Node, uid: &str) -> Option<Phase> {
    node.claim(&uid.into()).map(|view| view.phase)
}

fn asked(calls: &[Call]) -> Vec<(&str, Vec<&str>)> {
    calls
        .iter()
        .map(|call| {
            (
                call.driver.as_str(),
                call.claims.iter().map(|(uid, _)| uid.as_str()).collect(),
            )
        })
        .collect()
}

fn on(driver: &'static str) -> AllocatedClaim {
    claim_of("k", "c", &[(driver, "a", &[])])
}

// ---- devices

fn share_of(name: &str, uid: &str, share: Option<&str>, admin_access: bool) -> AllocatedClaim {
    let mut result = result("d0", "req", "a");
    result.device.share = share.map(Into::into);
    result.device.admin_access = admin_access;
    AllocatedClaim::new(key(name), uid.into(), [result])
}

#[test]
fn a_device_that_a_claim_holds_is_refused_to_other_claims() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    let request = pod_with("q", &[claim_of("k1", "c1", &[("d0", "a", &[])])]);
    let refused = refusal(&mut node, &request);
    assert!(!refused.waiting_helps());
    assert_eq!(
        refused.to_string(),
        "ResourceClaim default/k1 of pod default/q needs device pool/a of driver d0, which ResourceClaim default/k (UID c) \
         of pod default/p (p) holds; remove that pod, or allocate another device"
    );
    let both = pod_with(
        "r",
        &[
            claim_of("k2", "c2", &[("d0", "b", &[])]),
            claim_of("k3", "c3", &[("d0", "b", &[])]),
        ],
    );
    assert_eq!(
        refusal(&mut node, &both).to_string(),
        "ResourceClaim default/k3 of pod default/r needs device pool/b of driver d0, which ResourceClaim default/k2 (UID \
         c2) of the same pod needs too; allocate another device"
    );
    reserve(&mut node, &pod_with("s", &[on("d0")]));
}

#[test]
fn a_claim_that_has_a_device_twice_is_refused() {
    let mut node = node_with(&["d0"]);
    let twice = |change: fn(&mut AllocationResult)| {
        let mut results = [result("d0", "one", "a"), result("d0", "two", "a")];
        change(&mut results[1]);
        pod_with("p", &[AllocatedClaim::new(key("k"), "c".into(), results)])
    };
    for (change, device) in [
        ((|_| {}) as fn(&mut AllocationResult), "device"),
        (
            |result| result.device.share = Some("s".into()),
            "share s of device",
        ),
    ] {
        let refused = refusal(&mut node, &twice(change));
        assert!(!refused.waiting_helps());
        assert_eq!(
            refused.to_string(),
            format!(
                "ResourceClaim default/k of pod default/p has {device} pool/a of driver d0 twice in status.allocation; \
                 allocate another device, or a shareID for each"
            )
        );
    }
    admit_with(&mut node, &twice(|result| result.device.admin_access = true));
}

#[test]
fn admin_access_and_another_share_of_a_device_are_not_refused() {
    let mut node = node_with(&["d0"]);
    admit_with(
        &mut node,
        &pod_with("p", &[share_of("k", "c", Some("s1"), false)]),
    );
    admit_with(
        &mut node,
        &pod_with("q", &[share_of("k1", "c1", Some("s2"), false)]),
    );
    admit_with(&mut node, &pod_with("r", &[share_of("k2", "c2", None, true)]));
    for (uid, share) in [("same", Some("s1")), ("whole", None)] {
        let refused = refusal(&mut node, &pod_with("s", &[share_of("k3", uid, share, false)]));
        assert!(matches!(refused, ReserveError::DeviceInUse(_)), "{refused}");
        assert!(!refused.waiting_helps());
    }
    assert_eq!(node.shared_claim_devices(), []);
}

#[test]
fn a_device_is_waited_for_until_it_is_unprepared() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("q", &[claim_of("k1", "c1", &[("d0", "a", &[])])]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    let refused = refusal(&mut node, &request);
    assert!(refused.waiting_helps(), "the other admission may fail: {refused}");
    node.abort(id);

    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    release(&mut node, "p");
    let calls = node.unprepare_calls(&"p".into(), START);
    node.call_failed(calls[0].id, "busy", START);
    let refused = refusal(&mut node, &request);
    assert!(refused.waiting_helps());
    assert_eq!(
        refused.to_string(),
        "ResourceClaim default/k1 of pod default/q needs device pool/a of driver d0, which driver d0 has not yet unprepared \
         for ResourceClaim default/k (UID c) of pod default/p (p)"
    );
    node.abandon(&"p".into(), &"d0".into());
    let refused = refusal(&mut node, &request);
    assert!(refused.waiting_helps());
    assert!(refused.to_string().contains("was abandoned"), "{refused}");
}

#[test]
fn a_device_that_is_unprepared_is_given_again_at_once_and_its_old_record_is_deleted_with_the_new_one() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    release(&mut node, "p");
    let calls = node.unprepare_calls(&"p".into(), START);
    answer_all(&mut node, calls);
    assert_eq!(phase(&node, "c"), Some(Phase::Unprepared));
    assert!(!node.has_left(&"p".into()));

    let id = reserve(
        &mut node,
        &pod_with("q", &[claim_of("k1", "c1", &[("d0", "a", &[])])]),
    );
    let intent = node.begin_intent(id);
    assert_eq!(intent.put[0].uid.as_str(), "c1");
    assert_eq!(intent.delete, ["c".into()]);
    assert_eq!(node.begin_record(), None, "it is being deleted");
    node.finish_intent(id);
    assert_eq!(phase(&node, "c"), None);
    assert_sound(&node);
}

#[test]
fn a_claim_that_is_unprepared_can_be_used_again_at_once() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    release(&mut node, "p");
    let calls = node.unprepare_calls(&"p".into(), START);
    answer_all(&mut node, calls);
    let commit = admit_with(&mut node, &pod_with("q", &[on("d0")]));
    assert!(commit.claims[0].is_prepared());
    rest(&mut node);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
}

#[test]
fn records_that_share_a_device_are_kept_and_no_other_claim_gets_it() {
    let mut node = node_with(&["d0"]);
    let prepared = || PreparedDevice {
        requests: vec!["req".into()],
        pool: "pool".into(),
        device: "a".into(),
        share: None,
        cdi_devices: Vec::new(),
    };
    for uid in ["c1", "c2"] {
        let drivers = [("d0".into(), Default::default(), vec![prepared()])];
        node.put_claim(Claim::imported(key(uid), uid.into(), uid.into(), drivers));
        let mut pod = imported(uid, &[]);
        pod.claims.push(PodClaim {
            name: String::new(),
            key: key(uid),
            uid: uid.into(),
        });
        node.put(pod).unwrap();
    }
    let shared = node.shared_claim_devices();
    assert_eq!(shared.len(), 1);
    assert_eq!(shared[0].0.to_string(), "device pool/a of driver d0");
    assert_eq!(shared[0].1.len(), 2);
    let refused = refusal(&mut node, &pod_with("q", &[on("d0")]));
    assert!(!refused.waiting_helps(), "{refused}");
    // The pods can be admitted again with what they hold.
    reserve(
        &mut node,
        &pod_with("c1", &[claim_of("c1", "c1", &[("d0", "a", &[])])]),
    );
    assert_sound(&node);
}

// ---- preparing

#[test]
fn a_claim_is_on_disk_before_a_driver_is_called() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    let intent = node.begin_intent(id).put;
    assert_eq!(intent.len(), 1);
    assert_eq!(intent[0].pod.as_str(), "p");
    assert_eq!(node.prepare_calls(id, START), []);
    assert_eq!(node.waiting_for(id)[0].reason, Reason::NotWritten);

    node.finish_intent(id);

    assert_eq!(asked(&node.prepare_calls(id, START)), [("d0", vec!["c"])]);
    assert_eq!(node.waiting_for(id)[0].reason, Reason::Calling);
}

#[test]
fn a_pod_and_its_claims_are_written_in_one_piece() {
    let mut node = node_with(&["d0", "d1"]);
    let claim = claim_of("k", "c", &[("d0", "a", &[]), ("d1", "b", &[])]);
    let commit = admit_with(&mut node, &pod_with("p", &[claim]));
    assert_eq!(commit.pod.claims[0].uid.as_str(), "c");
    assert!(commit.claims[0].is_prepared());
    let cdi = commit.claims[0]
        .preparations
        .values()
        .flat_map(|each| &each.devices[0].cdi_devices);
    assert_eq!(cdi.collect::<Vec<_>>(), ["d0/dev=a", "d1/dev=b"]);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
    assert_eq!(node.begin_record(), None, "it is all on disk");
}

#[test]
fn a_pod_with_unprepared_claims_is_not_committed() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0")]);
    let id = reserve(&mut node, &request);
    intend(&mut node, id);
    assert_eq!(
        node.begin_commit(id, &request, Vec::new()),
        Err(CommitError::NotPrepared)
    );
    let other = pod_with("p", &[]);
    assert_eq!(
        node.begin_commit(id, &other, Vec::new()),
        Err(CommitError::Mismatch)
    );
}

#[test]
fn all_claims_are_checked_before_any_is_joined() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0"), claim_of("k1", "c1", &[("d1", "a", &[])])]);
    let refused = refusal(&mut node, &request);
    assert!(refused.waiting_helps());
    assert_eq!(
        refused.to_string(),
        "ResourceClaim default/k1: DRA driver d1 is not registered"
    );
    assert_eq!(node.claims().count(), 0);
    assert!(!node.is_in_flight(&"p".into()));
}

#[test]
fn a_driver_that_is_not_connected_is_waited_for() {
    let mut node = Node::default();
    let (connection, _) = node.driver_registered(offer_of("d0", "0.sock"), START).unwrap();
    let request = pod_with("p", &[on("d0")]);
    let refused = refusal(&mut node, &request);
    assert!(refused.waiting_helps());
    assert!(
        refused
            .to_string()
            .contains("its plugin at 0.sock does not answer"),
        "{refused}"
    );
    node.link_up(connection, START);
    reserve(&mut node, &request);
}

#[test]
fn a_final_error_takes_precedence_over_one_that_waiting_resolves() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    let other = claim_of("k", "other", &[("d0", "a", &[])]);
    let missing = claim_of("k1", "c1", &[("d1", "a", &[])]);
    let refused = refusal(&mut node, &pod_with("q", &[missing, other]));
    assert!(
        matches!(refused, ReserveError::ClaimNameTaken { .. }),
        "{refused}"
    );
}

#[test]
fn a_claim_that_a_pod_names_twice_counts_once() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0"), on("d0")]);
    let id = reserve(&mut node, &request);
    intend(&mut node, id);
    let calls = node.prepare_calls(id, START);
    assert_eq!(asked(&calls), [("d0", vec!["c"])]);
    answer_all(&mut node, calls);
    let pod = node.begin_commit(id, &request, Vec::new()).unwrap().pod;
    assert_eq!(pod.claims.len(), 2);
    assert_eq!(pod.claim_uids().len(), 1);
}

#[test]
fn two_pods_that_prepare_one_claim_make_one_write_and_one_call() {
    let mut node = node_with(&["d0"]);
    let (p, q) = (pod_with("p", &[on("d0")]), pod_with("q", &[on("d0")]));
    let (first, second) = (reserve(&mut node, &p), reserve(&mut node, &q));
    assert_eq!(node.begin_intent(first).put.len(), 1);
    assert_eq!(node.begin_intent(second).put, []);
    node.finish_intent(first);
    let calls = node.prepare_calls(first, START);
    assert_eq!(node.prepare_calls(second, START), []);
    answer_all(&mut node, calls);
    assert_eq!(node.waiting_for(second), []);
    for (id, request) in [(first, &p), (second, &q)] {
        node.begin_commit(id, request, Vec::new()).unwrap();
        node.finish_commit(id);
    }
    assert_eq!(node.claim(&"c".into()).unwrap().pods.len(), 2);
}

#[test]
fn an_intent_that_could_not_be_written_is_written_by_the_next() {
    let mut node = node_with(&["d0"]);
    let first = reserve(&mut node, &pod_with("p", &[on("d0")]));
    let second = reserve(&mut node, &pod_with("q", &[on("d0")]));
    node.begin_intent(first);
    node.cancel_intent(first);
    node.abort(first);
    assert_eq!(node.begin_intent(second).put.len(), 1);
    node.finish_intent(second);
    assert_eq!(node.prepare_calls(second, START).len(), 1);
}

#[test]
fn a_prepared_claim_is_joined_without_its_driver() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    node.driver_deregistered(connection, START);
    let request = pod_with("q", &[on("d0")]);
    let id = reserve(&mut node, &request);
    assert_eq!(node.begin_intent(id).put, []);
    assert_eq!(node.prepare_calls(id, START), []);
    let commit = node.begin_commit(id, &request, Vec::new()).unwrap();
    assert_eq!(commit.claims, [], "the disk knows the claim");
}

#[test]
fn an_admitted_pod_is_admitted_again_without_a_write() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0")]);
    admit_with(&mut node, &request);
    assert_eq!(node.reserve(&request, &Preferences::new()), Ok(None));
}

#[test]
fn a_pod_without_claims_touches_none() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[]);
    let id = reserve(&mut node, &request);
    assert_eq!(node.begin_intent(id).put, []);
    assert_eq!(node.begin_commit(id, &request, Vec::new()).unwrap().claims, []);
    node.finish_commit(id);
    assert!(!node.might_need_unprepare(&"p".into()));
    assert_eq!(node.begin_release(&"p".into()), Ok(Vec::new()));
    node.finish_release(&"p".into());
    assert_eq!(node.begin_record(), None);
}

#[test]
fn a_claim_without_devices_needs_no_driver() {
    let mut node = Node::default();
    admit_with(&mut node, &pod_with("p", &[claim_of("k", "c", &[])]));
    release(&mut node, "p");
    rest(&mut node);
    assert_eq!(phase(&node, "c"), None);
}

#[test]
fn a_failed_claim_is_retried_alone_after_a_pause_and_the_others_stay_prepared() {
    let mut node = node_with(&["d0"]);
    let claims = ["a", "b", "c"].map(|name| claim_of(name, name, &[("d0", name, &[])]));
    let id = reserve(&mut node, &pod_with("p", &claims));
    intend(&mut node, id);
    let calls = node.prepare_calls(id, START);
    assert_eq!(asked(&calls), [("d0", vec!["a", "b", "c"])]);
    let driver = "d0".into();
    let good = answer_of(node.claim(&"a".into()).unwrap().claim, &driver);
    let results = [("a".into(), Ok(good)), ("b".into(), Err("no luck".into()))];
    let failures = node.prepared(calls[0].id, results.into(), is_cdi_name, START);
    let texts: Vec<String> = failures.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "driver d0 reports for ResourceClaim default/b: no luck",
            "driver d0 did not answer for ResourceClaim default/c"
        ]
    );
    assert_eq!(phase(&node, "a"), Some(Phase::Prepared));
    let later = START.after(MIN_BACKOFF_MS);
    assert_eq!(node.waiting_for(id)[0].reason, Reason::Due(later));
    assert_eq!(node.waiting_for(id)[0].failure.as_ref(), failures.first());
    assert_eq!(node.prepare_calls(id, START), []);
    let calls = node.prepare_calls(id, later);
    assert_eq!(asked(&calls), [("d0", vec!["b"]), ("d0", vec!["c"])]);
    for call in &calls {
        node.call_failed(call.id, "deadline exceeded", later);
    }
    assert_eq!(
        node.waiting_for(id)[0].reason,
        Reason::Due(later.after(2 * MIN_BACKOFF_MS))
    );
}

#[test]
fn a_driver_that_is_back_is_called_at_once() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let call = node.prepare_calls(id, START).remove(0);
    node.link_lost(connection, START);
    node.call_failed(call.id, "broken pipe", START);
    assert_eq!(node.waiting_for(id)[0].reason, Reason::NoDriver);
    node.link_up(connection, START);
    assert_eq!(node.prepare_calls(id, START).len(), 1);
}

#[test]
fn a_late_answer_of_a_replaced_plugin_changes_nothing() {
    let mut node = Node::default();
    connect_driver(&mut node, "d0", "0.sock");
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let late = node.prepare_calls(id, START).remove(0);
    let newer = connect_driver(&mut node, "d0", "0.sock");
    assert_eq!(node.prepare_calls(id, START), [], "the first call has not ended");

    assert_eq!(answer(&mut node, &late), []);

    assert_eq!(phase(&node, "c"), Some(Phase::Preparing));
    let calls = node.prepare_calls(id, START);
    assert_eq!(calls[0].connection, newer);
    answer(&mut node, &late);
    assert_eq!(phase(&node, "c"), Some(Phase::Preparing), "a call ends once");
    answer_all(&mut node, calls);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
}

#[test]
fn an_answer_for_a_claim_that_was_not_asked_about_counts_for_nothing() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let call = node.prepare_calls(id, START).remove(0);
    let good = answer_of(node.claim(&"c".into()).unwrap().claim, &call.driver);
    let results = [("c".into(), Ok(good)), ("x".into(), Ok(Vec::new()))];
    let failures = node.prepared(call.id, results.into(), is_cdi_name, START);
    let text = failures[0].to_string();
    assert_eq!(
        text,
        "driver d0 answered for claim UID \"x\", which it was not asked about"
    );
    assert_eq!(phase(&node, "c"), Some(Phase::Preparing));
}

#[test]
fn an_answer_to_another_question_counts_for_nothing() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let call = node.prepare_calls(id, START).remove(0);
    assert_eq!(
        node.unprepared(call.id, [("c".into(), Ok(()))].into(), START)
            .len(),
        1
    );
    assert_eq!(phase(&node, "c"), Some(Phase::Preparing));
}

#[test]
fn skipped_operations_need_no_driver() {
    let mut node = node_with(&["d1"]);
    let skips_all = claim_of("k", "c", &[("d0", "a", &["*"])]);
    let commit = admit_with(&mut node, &pod_with("p", &[skips_all]));
    assert_eq!(commit.claims, [], "the intent has all claims");
    release(&mut node, "p");
    rest(&mut node);
    assert_eq!(phase(&node, "c"), None);

    let skips_unprepare = claim_of("k", "c", &[("d1", "a", &["NodeUnprepareResources"])]);
    let id = reserve(&mut node, &pod_with("q", &[skips_unprepare]));
    intend(&mut node, id);
    assert_eq!(node.prepare_calls(id, START).len(), 1);
    node.abort(id);
    assert_eq!(node.due_calls(START), []);
}

#[test]
fn no_pod_joins_a_claim_while_state_is_unreadable() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    node.block(Blocked::UnreadableState {
        file: "x".into(),
        reason: "torn".into(),
    });
    let refused = refusal(&mut node, &pod_with("q", &[on("d0")]));
    assert!(matches!(refused, ReserveError::Blocked(_)), "{refused}");
    assert_eq!(
        node.reserve(&pod_with("p", &[on("d0")]), &Preferences::new()),
        Ok(None)
    );
}

// ---- sharing, leaving

#[test]
fn a_claim_is_unprepared_with_the_last_pod_only() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    admit_with(&mut node, &pod_with("q", &[on("d0")]));
    release(&mut node, "p");
    assert!(!node.might_need_unprepare(&"p".into()));
    assert_eq!(node.unprepare_calls(&"p".into(), START), []);
    assert_eq!(node.due_calls(START), []);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));

    let written = node.begin_release(&"q".into()).unwrap();
    assert_eq!(written[0].pod.as_str(), "q", "p was on record");
    node.finish_release(&"q".into());

    assert!(node.might_need_unprepare(&"q".into()));
    assert_eq!(node.pending_unprepare(&"q".into())[0].driver.as_str(), "d0");
    let calls = node.unprepare_calls(&"q".into(), START);
    assert_eq!(asked(&calls), [("d0", vec!["c"])]);
    assert_eq!(node.due_calls(START), [], "one call at a time");
    answer_all(&mut node, calls);
    assert!(!node.might_need_unprepare(&"q".into()));
    let record = node.begin_record().unwrap();
    assert_eq!((record.put.len(), record.delete.len()), (0, 1));
    assert!(phase(&node, "c").is_some(), "the disk still has it");
    node.finish_record(record.id);
    assert_eq!(phase(&node, "c"), None);
}

#[test]
fn a_pod_that_joins_while_the_last_one_leaves_keeps_the_claim() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    node.begin_release(&"p".into()).unwrap();
    let request = pod_with("q", &[on("d0")]);
    let id = reserve(&mut node, &request);
    node.finish_release(&"p".into());
    assert_eq!(node.due_calls(START), []);
    node.begin_commit(id, &request, Vec::new()).unwrap();
    node.finish_commit(id);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
    assert_sound(&node);
}

#[test]
fn no_pod_joins_a_claim_that_is_being_unprepared() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    release(&mut node, "p");
    for again in [on("d0"), claim_of("k", "newer", &[("d0", "a", &[])])] {
        let refused = refusal(&mut node, &pod_with("q", &[again]));
        assert!(refused.waiting_helps());
        assert_eq!(
            refused.to_string(),
            "ResourceClaim default/k (UID c) is being unprepared by d0"
        );
    }
    rest(&mut node);
    reserve(&mut node, &pod_with("q", &[on("d0")]));
}

#[test]
fn a_newer_claim_of_the_same_name_waits_for_pods_to_be_removed() {
    let mut node = node_with(&["d0"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    let refused = refusal(
        &mut node,
        &pod_with("q", &[claim_of("k", "newer", &[("d0", "a", &[])])]),
    );
    assert!(!refused.waiting_helps());
    assert_eq!(
        refused.to_string(),
        "an older ResourceClaim default/k with UID c is still in use; remove the pods that hold it: p"
    );
}

#[test]
fn a_claim_that_only_an_admission_in_flight_uses_otherwise_can_be_waited_for() {
    let others = [
        ("another name", claim_of("other", "c", &[("d0", "b", &[])])),
        ("another UID", claim_of("k", "newer", &[("d0", "b", &[])])),
        ("another allocation", claim_of("k", "c", &[("d0", "b", &[])])),
    ];
    for (case, other) in others {
        let mut node = node_with(&["d0"]);
        let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
        let request = pod_with("q", &[other]);

        let refused = refusal(&mut node, &request);

        assert!(
            matches!(refused, ReserveError::ClaimReserved { .. }) && refused.waiting_helps(),
            "{case}: {refused:?}"
        );
        node.abort(id);
        assert!(node.reserve(&request, &Preferences::new()).is_ok(), "{case}");
    }
}

#[test]
fn a_reallocated_claim_is_unprepared_first() {
    let mut node = node_with(&["d0", "d1"]);
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    let others: [&[(&str, &str, &[&str])]; 4] = [
        &[("d0", "b", &[])],
        &[("d1", "a", &[])],
        &[("d0", "a", &[]), ("d1", "a", &[])],
        &[("d0", "a", &["*"])],
    ];
    for other in others {
        let refused = refusal(&mut node, &pod_with("q", &[claim_of("k", "c", other)]));
        assert!(matches!(refused, ReserveError::Reallocated { .. }), "{refused}");
        assert!(!refused.waiting_helps());
    }
    let moved = refusal(
        &mut node,
        &pod_with("q", &[claim_of("k", "c", &[("d0", "b", &[])])]),
    );
    assert_eq!(
        moved.to_string(),
        "the allocation of ResourceClaim default/k has changed since pods were admitted with it: it had pool/a of d0 then, and \
         has pool/b of d0 now; pods that hold it: default/p (p); remove them first: devlet remove default/p"
    );
    let new_pod = pod_with("q", &[claim_of("k", "c", others[1])]);
    release(&mut node, "p");
    assert!(refusal(&mut node, &new_pod).waiting_helps());
    let calls = node.due_calls(START);
    assert_eq!(
        (calls[0].operation, calls[0].driver.as_str()),
        (Operation::Unprepare, "d0")
    );
    answer_all(&mut node, calls);
    rest(&mut node);
    let commit = admit_with(&mut node, &new_pod);
    assert!(commit.claims[0].preparations.contains_key("d1"));
}

#[test]
fn an_admission_that_called_no_driver_leaves_without_a_call() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0")]);
    let id = reserve(&mut node, &request);
    node.abort(id);
    assert_eq!(node.claims().count(), 0, "it was never written");

    let id = reserve(&mut node, &request);
    node.begin_intent(id);
    node.abort(id);
    assert_eq!(phase(&node, "c"), Some(Phase::Unprepared), "it is being written");
    node.finish_intent(id);
    assert_eq!(node.due_calls(START), []);
    assert!(!node.might_need_unprepare(&"p".into()));
    rest(&mut node);
    assert_eq!(node.claims().count(), 0);
}

#[test]
fn an_admission_that_is_given_up_during_a_call_is_unprepared_after_it() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let call = node.prepare_calls(id, START).remove(0);
    node.abort(id);
    assert!(node.might_need_unprepare(&"p".into()));
    assert_eq!(node.due_calls(START), []);
    answer(&mut node, &call);
    assert_eq!(node.begin_record(), None, "no record changes");
    let calls = node.due_calls(START);
    assert_eq!(calls[0].operation, Operation::Unprepare);
}

#[test]
fn a_driver_that_was_given_up_on_during_a_call_stays_so() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    intend(&mut node, id);
    let call = node.prepare_calls(id, START).remove(0);
    node.abort(id);
    assert_eq!(node.pending_unprepare(&"p".into())[0].reason, Reason::Calling);
    node.abandon(&"p".into(), &"d0".into());
    answer(&mut node, &call);
    assert_eq!(phase(&node, "c"), Some(Phase::Abandoned));
    assert_eq!(node.pending_unprepare(&"p".into()), []);
}

#[test]
fn one_claim_that_fails_holds_up_no_other() {
    let mut node = node_with(&["d0", "d1"]);
    let both = claim_of("k1", "c1", &[("d0", "x", &[]), ("d1", "x", &[])]);
    admit_with(&mut node, &pod_with("p", &[on("d0"), both]));
    release(&mut node, "p");
    let calls = node.due_calls(START);
    assert_eq!(asked(&calls), [("d0", vec!["c", "c1"]), ("d1", vec!["c1"])]);
    node.call_failed(calls[1].id, "down", START);
    let results = [("c".into(), Ok(())), ("c1".into(), Err("busy".into()))];
    node.unprepared(calls[0].id, results.into(), START);
    assert_eq!(node.begin_record().unwrap().delete, ["c".into()]);
    assert_eq!(node.next_call(), Some(START.after(MIN_BACKOFF_MS)));
    let waits = node.pending_unprepare(&"p".into());
    assert_eq!(
        waits.iter().map(|wait| wait.driver.as_str()).collect::<Vec<_>>(),
        ["d0", "d1"]
    );
}

#[test]
fn a_driver_that_is_gone_for_good_can_be_given_up_on() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    node.driver_deregistered(connection, START);
    release(&mut node, "p");
    assert_eq!(node.pending_unprepare(&"p".into())[0].reason, Reason::NoDriver);
    assert_eq!(node.abandon(&"p".into(), &"other".into()), []);
    assert_eq!(node.abandon(&"p".into(), &"d0".into()), ["c".into()]);
    assert_eq!(node.pending_unprepare(&"p".into()), []);
    assert!(!node.might_need_unprepare(&"p".into()));
    assert_eq!(phase(&node, "c"), Some(Phase::Abandoned));
    let lost = node.begin_record().unwrap();
    assert_eq!(node.begin_record(), None, "it is being written");
    node.cancel_record(lost.id);
    let record = node.begin_record().unwrap();
    assert_eq!(
        record.put[0].preparations["d0"].state,
        PreparationState::Abandoned
    );
    node.finish_record(record.id);

    let mut node = Node::restore(Restored {
        claims: record.put,
        ..Restored::default()
    });
    assert_eq!(
        phase(&node, "c"),
        Some(Phase::Abandoned),
        "it is still to be seen"
    );
    assert_eq!(
        refusal(&mut node, &pod_with("q", &[on("d0")])).to_string(),
        "ResourceClaim default/k (UID c) is being unprepared; it was abandoned at driver d0, which must come back \
         to unprepare it: start the driver, or use a ResourceClaim that is allocated without it"
    );
    connect_driver(&mut node, "d0", "0.sock");
    let other_device = claim_of("k", "newer", &[("d0", "b", &[])]);
    reserve(&mut node, &pod_with("q", &[other_device]));
    rest(&mut node);
    assert_eq!(phase(&node, "c"), None, "the driver is back");
    assert_eq!(node.claim_named(&key("k")).unwrap().claim.uid.as_str(), "newer");
}

#[test]
fn an_unprepared_claim_is_not_prepared() {
    let mut node = node_with(&["d0", "d1"]);
    let both = claim_of("k", "c", &[("d0", "x", &[]), ("d1", "x", &[])]);
    admit_with(&mut node, &pod_with("p", &[both]));
    release(&mut node, "p");
    let calls = node.unprepare_calls(&"p".into(), START);
    answer(&mut node, &calls[0]);
    assert_sound(&node);
    let preparations = &node.claim(&"c".into()).unwrap().claim.preparations;
    assert_eq!(preparations["d0"].state, PreparationState::Unprepared);
    assert_eq!(preparations["d0"].devices, []);
    assert_eq!(preparations["d1"].devices.len(), 1);
}

#[test]
fn only_the_last_pod_to_leave_writes_that_it_did() {
    let mut node = node_with(&["d0"]);
    for pod in ["p", "q"] {
        admit_with(&mut node, &pod_with(pod, &[on("d0")]));
    }
    assert_eq!(
        node.begin_release(&"q".into()).unwrap(),
        [],
        "another pod holds it"
    );
    node.cancel_release(&"q".into());
    assert_eq!(
        node.begin_release(&"p".into()).unwrap(),
        [],
        "another pod holds it"
    );
    node.finish_release(&"p".into());
    let written = node.begin_release(&"q".into()).unwrap();
    assert_eq!((written.len(), written[0].pod.as_str()), (1, "q"));
}

/// A claim of two drivers, prepared for pod p, which has left; d0 is gone and was given up on.
fn abandoned_at_d0() -> Node {
    let mut node = node_with(&["d1"]);
    let connection = connect_driver(&mut node, "d0", "0.sock");
    let both = claim_of("k", "c", &[("d0", "x", &[]), ("d1", "x", &[])]);
    admit_with(&mut node, &pod_with("p", &[both]));
    node.driver_deregistered(connection, START);
    release(&mut node, "p");
    node.abandon(&"p".into(), &"d0".into());
    rest(&mut node);
    assert_eq!(phase(&node, "c"), Some(Phase::Abandoned));
    node
}

#[test]
fn a_claim_that_was_abandoned_can_be_used_again_without_that_driver() {
    let mut node = abandoned_at_d0();
    let wanted = pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]);
    let id = reserve(&mut node, &wanted);
    assert_eq!(node.prepare_calls(id, START), [], "it is not on disk");
    let intent = node.begin_intent(id).put;
    let states = |claim: &Claim| {
        let preparations = claim.preparations.iter();
        let states = preparations.map(|(driver, each)| (driver.to_string(), each.state));
        states.collect::<Vec<_>>()
    };
    assert_eq!(
        states(&intent[0]),
        [
            ("d0".into(), PreparationState::Abandoned),
            ("d1".into(), PreparationState::Pending)
        ],
        "what was given up on stays on record"
    );
    node.finish_intent(id);
    prepare(&mut node, id);
    node.begin_commit(id, &wanted, Vec::new()).unwrap();
    node.finish_commit(id);
    assert_sound(&node);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
    let claim = node.claim(&"c".into()).unwrap().claim;
    assert_eq!(
        claim.preparations["d0"].devices,
        [],
        "no container gets its devices"
    );

    let mut node = Node::restore(restart(&node));
    connect_driver(&mut node, "d0", "0.sock");
    let calls = node.due_calls(START);
    assert_eq!(asked(&calls), [("d0", vec!["c"])]);
    assert_eq!(calls[0].operation, Operation::Unprepare);
    answer_all(&mut node, calls);
    let record = node.begin_record().unwrap();
    assert_eq!(
        states(&record.put[0]),
        [("d1".into(), PreparationState::Prepared)]
    );
    node.finish_record(record.id);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared), "its pod keeps it");
    assert_eq!(node.due_calls(START), []);
}

#[test]
fn a_claim_that_was_abandoned_can_be_forgotten() {
    let mut node = abandoned_at_d0();
    assert_eq!(node.begin_forget(&"x".into()), Err(BeginForgetError::Unknown));
    let lost = node.begin_forget(&"c".into()).unwrap();
    let twice = node.begin_forget(&"c".into());
    assert_eq!(twice, Err(BeginForgetError::InFlight { claim: key("k") }));
    let other = pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]);
    assert!(refusal(&mut node, &other).waiting_helps(), "it is being deleted");
    node.cancel_record(lost.id);
    assert_eq!(
        phase(&node, "c"),
        Some(Phase::Abandoned),
        "it could not be written"
    );

    let record = node.begin_forget(&"c".into()).unwrap();
    assert_eq!((record.put, record.delete), (Vec::new(), vec!["c".into()]));
    node.finish_record(record.id);

    assert_sound(&node);
    assert_eq!(phase(&node, "c"), None);
    connect_driver(&mut node, "d0", "0.sock");
    assert_eq!(node.due_calls(START), [], "the driver is not called");
    let new_pod = pod_with("q", &[claim_of("k", "c", &[("d0", "x", &[])])]);
    reserve(&mut node, &new_pod);
}

#[test]
fn a_claim_that_a_pod_uses_or_a_driver_has_to_unprepare_is_not_forgotten() {
    let mut node = node_with(&["d1"]);
    let connection = connect_driver(&mut node, "d0", "0.sock");
    let both = claim_of("k", "c", &[("d0", "x", &[]), ("d1", "x", &[])]);
    admit_with(&mut node, &pod_with("p", &[both]));
    let held = node.begin_forget(&"c".into()).unwrap_err();
    assert_eq!(
        held.to_string(),
        "ResourceClaim default/k is in use; remove the pods first: p"
    );
    node.driver_deregistered(connection, START);
    release(&mut node, "p");
    node.abandon(&"p".into(), &"d0".into());
    let waits = node.begin_forget(&"c".into()).unwrap_err();
    assert_eq!(
        waits.to_string(),
        "ResourceClaim default/k is being unprepared; abandon first the drivers that are gone for good: d1"
    );
    rest(&mut node);
    connect_driver(&mut node, "d0", "0.sock");
    let calls = node.due_calls(START);
    let busy = node.begin_forget(&"c".into());
    assert_eq!(busy, Err(BeginForgetError::InFlight { claim: key("k") }));
    answer_all(&mut node, calls);
    let done = node.begin_forget(&"c".into()).unwrap_err();
    assert!(
        matches!(done, BeginForgetError::NotAbandoned { .. }),
        "it is to be deleted anyway"
    );
}

#[test]
fn an_abandoned_claim_that_is_given_up_again_is_as_it_was() {
    let mut node = abandoned_at_d0();
    let before = node.claim(&"c".into()).unwrap().claim.preparations.len();
    let id = reserve(
        &mut node,
        &pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]),
    );
    node.abort(id);
    assert_eq!((before, phase(&node, "c")), (2, Some(Phase::Abandoned)));
    let claim = node.claim(&"c".into()).unwrap().claim;
    let drivers: Vec<&str> = claim.preparations.keys().map(DriverName::as_str).collect();
    assert_eq!(drivers, ["d0"], "d1 was not called");
    assert_eq!(node.pending_unprepare(&"q".into()), []);
}

#[test]
fn a_late_answer_of_a_driver_that_was_given_up_on_prepares_nothing() {
    let mut node = node_with(&["d0", "d1"]);
    let both = claim_of("k", "c", &[("d0", "x", &[]), ("d1", "x", &[])]);
    let id = reserve(&mut node, &pod_with("p", &[both]));
    intend(&mut node, id);
    let calls = node.prepare_calls(id, START);
    let (late, other) = (calls[0].clone(), calls[1].clone());
    assert_eq!(late.driver.as_str(), "d0");
    node.abort(id);
    answer(&mut node, &other);
    node.abandon(&"p".into(), &"d0".into());
    let calls = node.unprepare_calls(&"p".into(), START);
    answer_all(&mut node, calls);
    let wanted = pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]);
    let id = reserve(&mut node, &wanted);
    answer(&mut node, &late);
    let claim = node.claim(&"c".into()).unwrap().claim;
    assert_eq!(claim.preparations["d0"].state, PreparationState::Abandoned);
    assert_eq!(node.begin_intent(id).put.len(), 1);
}

#[test]
fn an_import_keeps_abandoned_drivers() {
    let node = abandoned_at_d0();
    let known = node.claim(&"c".into()).unwrap().claim.clone();
    let mut imported = Claim::imported(key("k"), "c".into(), "q".into(), []);
    imported.merge_earlier(&known);
    assert_eq!(
        imported.abandoned().map(DriverName::as_str).collect::<Vec<_>>(),
        ["d0"]
    );
}

#[test]
fn plugins_that_are_refused_are_remembered_while_they_are_there_and_not_too_many() {
    let mut node = Node::default();
    let refuse = |node: &mut Node, socket: &str, now: Moment| {
        let refusal = Refusal {
            driver: "x".repeat(5000),
            reason: "y".repeat(5000),
            hint: String::new(),
        };
        node.driver_refused(socket, refusal, now);
    };
    refuse(&mut node, "a.sock", START);
    refuse(&mut node, "a.sock", START.after(1));
    let (socket, refused) = node.refused_drivers().next().unwrap();
    assert_eq!(
        (socket, refused.attempts, refused.at),
        ("a.sock", 2, START.after(1))
    );
    assert!(refused.refusal.driver.len() <= 1024 && refused.refusal.reason.len() <= 1024);
    let before = node.changes();
    node.refusal_ended("a.sock");
    assert!(node.refused_drivers().next().is_none() && node.changes() > before);
    for number in 0..MAX_REFUSED as u64 + 10 {
        refuse(&mut node, &format!("{number:03}.sock"), START.after(number));
    }
    assert_eq!(node.refused_drivers().count(), MAX_REFUSED);
    let (oldest, _) = node.refused_drivers().next().unwrap();
    assert_eq!(oldest, "010.sock", "the oldest are forgotten");
}

#[test]
fn claims_are_counted_by_how_far_they_are() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    let counts = |node: &Node| {
        let (phases, waiting) = node.claim_counts();
        let of = |phase: Phase| phases.get(&phase).copied().unwrap_or(0);
        let [preparing, prepared] = [Phase::Preparing, Phase::Prepared].map(of);
        (
            waiting,
            preparing,
            prepared,
            of(Phase::Unpreparing),
            of(Phase::Abandoned),
        )
    };
    let request = pod_with("p", &[on("d0")]);
    let id = reserve(&mut node, &request);
    assert_eq!(counts(&node), (0, 1, 0, 0, 0));
    node.link_lost(connection, START);
    assert_eq!(counts(&node), (1, 1, 0, 0, 0), "its driver is away");
    node.link_up(connection, START);
    prepare(&mut node, id);
    node.begin_commit(id, &request, Vec::new()).unwrap();
    node.finish_commit(id);
    assert_eq!(counts(&node), (0, 0, 1, 0, 0));
    node.driver_deregistered(connection, START);
    release(&mut node, "p");
    assert_eq!(counts(&node), (0, 0, 0, 1, 0));
    node.abandon(&"p".into(), &"d0".into());
    assert_eq!(counts(&node), (0, 0, 0, 0, 1));
    connect_driver(&mut node, "d0", "0.sock");
    rest(&mut node);
    assert_eq!(counts(&node), (0, 0, 0, 0, 0));
}

#[test]
fn containers_with_unhealthy_devices_are_counted_once_each() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    let two = claim_of("k", "c", &[("d0", "a", &[]), ("d0", "b", &[])]);
    for pod in ["p", "q"] {
        admit_with(&mut node, &pod_with(pod, std::slice::from_ref(&two)));
    }
    let ill = |node: &Node| node.containers_with_unhealthy_devices(&"d0".into());
    assert_eq!(ill(&node), 0);
    let unhealthy = ["a", "b", "unused"].map(|device| report(device, DeviceHealth::Unhealthy));
    node.health_reported(connection, unhealthy.to_vec(), START);
    assert_eq!(ill(&node), 2, "two devices, two pods with one container each");
    release(&mut node, "q");
    assert_eq!(ill(&node), 1);
    let well = ["a", "b"].map(|device| report(device, DeviceHealth::Healthy));
    node.health_reported(connection, well.to_vec(), START);
    assert_eq!(ill(&node), 0);
}

#[test]
fn background_calls_of_a_driver_are_bounded() {
    let claims: Vec<Claim> = (0..MAX_CLAIMS * MAX_BACKGROUND_CALLS + 1)
        .map(|number| imported_claim(&format!("c{number}"), &[]))
        .collect();
    let mut node = Node::restore(Restored {
        claims,
        ..Restored::default()
    });
    connect_driver(&mut node, "d0", "0.sock");
    let calls = node.due_calls(START);
    assert_eq!(calls.len(), MAX_BACKGROUND_CALLS);
    assert!(calls.iter().all(|call| call.claims.len() == MAX_CLAIMS));
    assert_eq!(node.due_calls(START), []);
    answer_all(&mut node, calls);
    assert_eq!(node.due_calls(START).len(), 1);
}

// ---- restarts

fn restart(node: &Node) -> Restored {
    Restored {
        pods: node.pods().map(|pod| (pod.uid.clone(), pod.clone())).collect(),
        claims: node.recorded_claims().cloned().collect(),
        ..Restored::default()
    }
}

#[test]
fn an_admission_that_was_never_answered_is_unprepared_after_a_restart() {
    let mut node = node_with(&["d0"]);
    let id = reserve(&mut node, &pod_with("p", &[on("d0")]));
    prepare(&mut node, id);
    let mut node = Node::restore(restart(&node));
    assert_eq!(phase(&node, "c"), Some(Phase::Unpreparing));
    assert!(node.might_need_unprepare(&"p".into()));
    connect_driver(&mut node, "d0", "0.sock");
    assert_eq!(node.due_calls(START)[0].operation, Operation::Unprepare);
}

#[test]
fn an_unprepare_of_one_driver_is_recorded_while_another_driver_is_gone() {
    let mut node = node_with(&["d1"]);
    let gone = connect_driver(&mut node, "d0", "0.sock");
    let claim = claim_of("k", "c", &[("d0", "a", &[]), ("d1", "b", &[])]);
    admit_with(&mut node, &pod_with("p", &[claim]));
    node.driver_deregistered(gone, START);
    release(&mut node, "p");
    let calls = node.unprepare_calls(&"p".into(), START);
    assert_eq!(asked(&calls), [("d1", vec!["c"])]);
    answer_all(&mut node, calls);

    let record = node.begin_record().unwrap();
    let states: Vec<PreparationState> = record.put[0]
        .preparations
        .values()
        .map(|each| each.state)
        .collect();
    assert_eq!(states, [PreparationState::Prepared, PreparationState::Unprepared]);
    let mut node = Node::restore(Restored {
        claims: record.put,
        ..Restored::default()
    });
    let remaining = node.pending_unprepare(&"p".into());
    let drivers: Vec<&str> = remaining.iter().map(|wait| wait.driver.as_str()).collect();
    assert_eq!(drivers, ["d0"]);
    connect_driver(&mut node, "d0", "0.sock");
    connect_driver(&mut node, "d1", "0.sock");
    assert_eq!(asked(&node.due_calls(START)), [("d0", vec!["c"])]);
}

#[test]
fn claims_of_pods_are_in_use_after_a_restart() {
    let mut node = node_with(&["d0"]);
    let request = pod_with("p", &[on("d0")]);
    admit_with(&mut node, &request);
    let mut node = Node::restore(restart(&node));
    assert_eq!(node.claims_in_use(), ([("d0".into(), 1)].into(), 1));
    assert_eq!(node.cdi_devices(&"p".into(), "main"), ["d0/dev=a"]);
    assert_eq!(node.reserve(&request, &Preferences::new()), Ok(None));
    assert_eq!(node.due_calls(START), []);
}

#[test]
fn claims_of_pods_are_prepared_again_after_a_reboot() {
    let mut node = node_with(&["d0"]);
    let skips = claim_of("k1", "c1", &[("d0", "b", &["*"])]);
    let request = pod_with("p", &[on("d0"), skips]);
    admit_with(&mut node, &request);
    let mut restored = restart(&node);
    let changed: Vec<bool> = restored.claims.iter_mut().map(Claim::rebooted).collect();
    assert_eq!(changed, [true, false]);
    let mut node = Node::restore(restored);
    assert_eq!(node.unprepared_claims(&"p".into())[0].reason, Reason::NoDriver);
    assert_eq!(
        node.cdi_devices(&"p".into(), "main"),
        ["d0/dev=a"],
        "for the record"
    );
    connect_driver(&mut node, "d0", "0.sock");
    let calls = node.due_calls(START);
    assert_eq!(
        (calls[0].operation, asked(&calls)),
        (Operation::Prepare, vec![("d0", vec!["c"])])
    );
    answer_all(&mut node, calls);
    assert_eq!(node.unprepared_claims(&"p".into()), []);
    let record = node.begin_record().unwrap();
    assert!(record.put[0].is_prepared());

    let id = reserve(&mut node, &request);
    let commit = node.begin_commit(id, &request, Vec::new()).unwrap();
    assert_eq!(commit.claims.len(), 1, "it is not on disk yet");
    node.cancel_commit(id);
    node.finish_record(record.id);
    assert_eq!(node.reserve(&request, &Preferences::new()), Ok(None));
}

#[test]
fn a_change_during_the_removal_of_the_last_pod_is_written_again() {
    let mut claim = imported_claim("c", &["a"]);
    claim.pod = "other".into();
    let mut node = node_that_imported(claim);
    let written = node.begin_release(&"p".into()).unwrap();
    assert_eq!(written[0].preparations["d0"].allocated, None);
    let request = pod_with("q", &[claim_of("c", "c", &[("d0", "a", &[])])]);
    let id = reserve(&mut node, &request);
    node.begin_commit(id, &request, Vec::new()).unwrap();
    node.finish_commit(id);
    node.finish_release(&"p".into());
    let record = node.begin_record().unwrap();
    assert!(record.put[0].preparations["d0"].allocated.is_some());
}

/// A claim as a kubelet's file describes it.
fn imported_claim(uid: &str, devices: &[&str]) -> Claim {
    let device = |device: &&str| PreparedDevice {
        requests: vec!["req".into()],
        pool: "pool".into(),
        device: (*device).into(),
        share: None,
        cdi_devices: vec![format!("d0/dev={device}")],
    };
    let preparation = Preparation {
        allocated: None,
        skip: Default::default(),
        state: match devices {
            [] => PreparationState::Pending,
            _ => PreparationState::Prepared,
        },
        devices: devices.iter().map(device).collect(),
    };
    Claim {
        key: key(uid),
        uid: uid.into(),
        pod: "p".into(),
        pod_name: PodName::default(),
        preparations: [("d0".into(), preparation)].into(),
    }
}

fn node_that_imported(claim: Claim) -> Node {
    let mut pod = imported("p", &[]);
    pod.claims.push(PodClaim {
        name: String::new(),
        key: claim.key.clone(),
        uid: claim.uid.clone(),
    });
    let mut node = Node::default();
    node.put_claim(claim);
    node.put(pod).unwrap();
    connect_driver(&mut node, "d0", "0.sock");
    assert_sound(&node);
    node
}

#[test]
fn no_pod_joins_a_claim_that_is_being_imported() {
    let mut node = node_with(&["d0"]);
    let importing = Importing {
        pods: ["p".into()].into(),
        claims: [("c".into(), key("c"))].into(),
    };
    let pods = [
        pod_with("p", &[]),
        pod_with("q", &[claim_of("c", "c", &[("d0", "a", &[])])]),
        pod_with("r", &[claim_of("c", "of-the-same-name", &[("d0", "a", &[])])]),
    ];
    let joins = |node: &mut Node, pod: &PodRequest| {
        let reserved = node.reserve(pod, &Preferences::new());
        reserved.map(|id| id.map(|id| node.abort(id)).is_some())
    };
    node.begin_import(&importing);
    for pod in &pods {
        assert_eq!(joins(&mut node, pod), Err(ReserveError::InFlight));
    }
    let before = node.changes();
    node.end_import(&importing);
    assert!(node.changes() > before, "those who wait look again");
    for pod in &pods {
        assert_eq!(joins(&mut node, pod), Ok(true), "it could not be written");
    }

    node.begin_import(&importing);
    node.end_import(&importing);
    node.put_claim(imported_claim("c", &["a"]));
    let mut pod = imported("p", &[]);
    pod.claims.push(PodClaim {
        name: String::new(),
        key: key("c"),
        uid: "c".into(),
    });
    node.put(pod).unwrap();
    // A pod joins it and aborts: it is prepared and on disk as before.
    assert_eq!(joins(&mut node, &pods[1]), Ok(true));
    assert_sound(&node);
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
    assert_eq!(node.recorded_claims().count(), 1);
    release(&mut node, "p");
    assert_eq!(node.due_calls(START)[0].operation, Operation::Unprepare);
}

#[test]
fn an_imported_claim_that_names_devices_is_prepared() {
    let mut node = node_that_imported(imported_claim("c", &["a"]));
    assert_eq!(phase(&node, "c"), Some(Phase::Prepared));
    assert_eq!(node.due_calls(START), []);
    let other = pod_with("q", &[claim_of("c", "c", &[("d0", "b", &[])])]);
    assert!(matches!(
        refusal(&mut node, &other),
        ReserveError::Reallocated { .. }
    ));
    let request = pod_with("p", &[claim_of("c", "c", &[("d0", "a", &[])])]);
    let id = reserve(&mut node, &request);
    assert_eq!(node.prepare_calls(id, START), []);
    let commit = node.begin_commit(id, &request, Vec::new()).unwrap();
    assert_eq!(
        commit.claims[0].preparations["d0"]
            .allocated
            .as_ref()
            .unwrap()
            .len(),
        1
    );
    node.finish_commit(id);
    assert_eq!(node.cdi_devices(&"p".into(), "main"), ["d0/dev=a"]);
    release(&mut node, "p");
    assert_eq!(node.due_calls(START)[0].operation, Operation::Unprepare);
}

#[test]
fn an_imported_claim_that_lacks_a_device_is_prepared_again() {
    let more = [result("d0", "req", "a"), result("d0", "req", "b")];
    let request = pod_with("p", &[AllocatedClaim::new(key("c"), "c".into(), more)]);
    let mut node = node_that_imported(imported_claim("c", &["a"]));
    let id = reserve(&mut node, &request);
    intend(&mut node, id);
    let calls = node.prepare_calls(id, START);
    assert_eq!(asked(&calls), [("d0", vec!["c"])]);
    answer_all(&mut node, calls);
    node.begin_commit(id, &request, Vec::new()).unwrap();
    node.finish_commit(id);
    assert_sound(&node);
    assert_eq!(node.cdi_devices(&"p".into(), "main"), ["d0/dev=a", "d0/dev=b"]);

    // An old file does not name devices, so a missing device cannot be detected.
    let mut node = node_that_imported(imported_claim("c", &[""]));
    let id = reserve(&mut node, &request);
    assert_eq!(node.prepare_calls(id, START), []);

    let mut node = node_that_imported(imported_claim("c", &["a"]));
    let connection = node.driver(&"d0".into()).unwrap().plugins[0].connection;
    node.driver_deregistered(connection, START);
    assert!(matches!(
        refusal(&mut node, &request),
        ReserveError::NoDriver { .. }
    ));
}

#[test]
fn an_imported_claim_without_devices_waits_for_its_pod() {
    let mut node = node_that_imported(imported_claim("c", &[]));
    assert_eq!(node.due_calls(START), [], "no admission has confirmed the pod");
    let id = reserve(
        &mut node,
        &pod_with("p", &[claim_of("c", "c", &[("d0", "a", &[])])]),
    );
    assert_eq!(asked(&node.prepare_calls(id, START)), [("d0", vec!["c"])]);
}

// ---- devices of containers

#[test]
fn a_container_gets_the_devices_of_the_requests_that_it_names_each_once() {
    let mut node = node_with(&["d0", "d1"]);
    let results = [
        result("d1", "big/half", "h"),
        result("d0", "big/half", "a"),
        result("d0", "small", "b"),
        result("d1", "bigger", "g"),
    ];
    let claim = AllocatedClaim::new(key("k"), "c".into(), results);
    let mut request = pod_with("p", &[claim, on_other()]);
    let uses: [(&str, &[ClaimReference]); 4] = [
        (
            "main",
            &[reference("claim-1", None), reference("claim-0", Some("big"))],
        ),
        (
            "all",
            &[reference("claim-0", None), reference("claim-0", Some("small"))],
        ),
        ("none", &[]),
        ("unknown", &[reference("claim-0", Some("nothing"))]),
    ];
    request.containers = uses
        .iter()
        .map(|(name, claims)| ContainerRequest {
            claims: claims.to_vec(),
            ..app(name, &[])
        })
        .collect();
    let id = reserve(&mut node, &request);
    intend(&mut node, id);
    for call in node.prepare_calls(id, START) {
        let prepared = |(uid, _): &(ClaimUid, ClaimKey)| {
            let mut devices = answer_of(node.claim(uid).unwrap().claim, &call.driver);
            devices
                .iter_mut()
                .for_each(|each| each.cdi_devices.insert(0, format!("{}/dev=common", call.driver)));
            (uid.clone(), Ok(devices))
        };
        let results = call.claims.iter().map(prepared).collect();
        assert_eq!(node.prepared(call.id, results, is_cdi_name, START), []);
    }
    node.begin_commit(id, &request, Vec::new()).unwrap();
    node.finish_commit(id);
    let cdi = |container: &str| node.run_options(&"p".into(), container).0.cdi_devices;
    assert_eq!(
        cdi("main"),
        [
            "d0/dev=common",
            "d0/dev=o",
            "d0/dev=a",
            "d1/dev=common",
            "d1/dev=h"
        ]
    );
    let all = [
        "d0/dev=common",
        "d0/dev=a",
        "d0/dev=b",
        "d1/dev=common",
        "d1/dev=h",
        "d1/dev=g",
    ];
    assert_eq!(cdi("all"), all);
    assert_eq!(cdi("none"), [""; 0]);
    assert_eq!(cdi("unknown"), [""; 0]);
}

fn on_other() -> AllocatedClaim {
    claim_of("other", "o", &[("d0", "o", &[])])
}

// ---- drivers

#[test]
fn the_newest_connected_plugin_of_a_driver_serves() {
    let mut node = Node::default();
    let driver: DriverName = "d0".into();
    let first = connect_driver(&mut node, "d0", "0.sock");
    let (second, replaced) = node.driver_registered(offer_of("d0", "1.sock"), START).unwrap();
    assert_eq!((replaced, node.serving_driver(&driver)), (None, Some(first)));
    assert!(node.link_up(second, START));
    assert!(!node.link_up(second, START), "no news");
    assert_eq!(node.serving_driver(&driver), Some(second));
    node.link_lost(second, START);
    assert_eq!(node.serving_driver(&driver), Some(first));
    node.link_up(second, START);
    assert!(node.driver_deregistered(first, START));
    assert!(!node.driver_deregistered(first, START), "no news");
    assert_eq!(node.serving_driver(&driver), Some(second));
    assert!(!node.link_up(first, START), "it has gone");
    let (third, replaced) = node.driver_registered(offer_of("d0", "1.sock"), START).unwrap();
    assert_eq!((replaced, node.serving_driver(&driver)), (Some(second), None));
    let view = node.driver(&driver).unwrap();
    assert_eq!(
        view.plugins
            .iter()
            .map(|plugin| plugin.connection)
            .collect::<Vec<_>>(),
        [third]
    );
    assert_eq!(view.last.unwrap().endpoint, "1.sock");
}

#[test]
fn another_user_serves_a_driver_only_if_that_is_allowed() {
    let mut node = node_with(&["d0"]);
    let mut offer = offer_of("d0", "1.sock");
    offer.process.uid = 7;
    let before = everything(&node);
    let refused = node.driver_registered(offer.clone(), START).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "d0 is served by a plugin of user 0 at 0.sock; user 7 may not serve it too"
    );
    assert_eq!(everything(&node), before);
    offer.may_share = true;
    assert!(node.driver_registered(offer, START).is_ok());
}

#[test]
fn slices_are_outdated_when_a_driver_has_been_away_for_a_while() {
    let mut node = Node::default();
    let driver: DriverName = "d0".into();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    assert_eq!(node.wipe_at(&driver, START), None);
    node.link_lost(connection, START);
    node.driver_deregistered(connection, START.after(5));
    let due = START.after(WIPE_DELAY_MS);
    assert_eq!(node.wipe_at(&driver, START), Some(due), "the first loss counts");
    let restored = START.after(10 * WIPE_DELAY_MS);
    assert_eq!(
        node.wipe_at(&driver, restored),
        Some(restored.after(WIPE_DELAY_MS)),
        "slices that appear later, too"
    );
    connect_driver(&mut node, "d0", "0.sock");
    assert_eq!(node.wipe_at(&driver, START), None);
    assert_eq!(node.wipe_at(&"other".into(), START), Some(due));
}

// ---- health

fn report(device: &str, health: DeviceHealth) -> HealthReport {
    HealthReport {
        device: PoolDevice {
            pool: "pool".into(),
            device: device.into(),
        },
        health,
        message: "hot".into(),
        lease_ms: 0,
    }
}

#[test]
fn pods_that_share_a_device_hear_of_its_health() {
    let mut node = Node::default();
    let connection = connect_driver(&mut node, "d0", "0.sock");
    admit_with(&mut node, &pod_with("p", &[on("d0")]));
    admit_with(&mut node, &pod_with("q", &[on("d0")]));
    let change = node.health_reported(connection, vec![report("a", DeviceHealth::Unhealthy)], START);
    assert_eq!(
        (change.devices.len(), change.pods),
        (1, vec!["p".into(), "q".into()])
    );
    let same = node.health_reported(connection, vec![report("a", DeviceHealth::Unhealthy)], START);
    assert_eq!(same, HealthChange::default());
    let other = node.health_reported(connection, vec![report("free", DeviceHealth::Healthy)], START);
    assert_eq!((other.devices.len(), other.pods), (1, Vec::new()));
    let views = node.claimed_devices(&"p".into(), "main", START);
    assert_eq!(
        (views[0].health, &*views[0].message),
        (DeviceHealth::Unhealthy, "hot")
    );

    node.driver_deregistered(connection, START);
    let late = node.health_reported(connection, vec![report("a", DeviceHealth::Healthy)], START);
    assert_eq!(late, HealthChange::default(), "it has gone");
    let views = node.claimed_devices(&"p".into(), "main", START);
    assert_eq!(
        views[0].health,
        DeviceHealth::Unhealthy,
        "its report is still valid"
    );

    let end = node.next_expiry().unwrap();
    assert_eq!(end, START.after(DEFAULT_LEASE_MS));
    let expired = node.tick(end);
    assert_eq!(expired.pods, ["p".into(), "q".into()]);
    assert_eq!(
        node.claimed_devices(&"p".into(), "main", end)[0].health,
        DeviceHealth::Unknown
    );
    assert_eq!(node.next_expiry(), None);
}

#[test]
fn after_a_restart_a_name_stands_for_the_claim_that_counts() {
    let record = |uid: &str, state| {
        let mut claim = Claim::imported(key("c"), uid.into(), "old".into(), []);
        let preparation = Preparation {
            allocated: None,
            skip: Default::default(),
            state,
            devices: Vec::new(),
        };
        claim.preparations.insert("d0".into(), preparation);
        claim
    };
    let holder = Pod {
        claims: vec![PodClaim {
            name: "c".into(),
            key: key("c"),
            uid: "used".into(),
        }],
        ..imported("p", &[])
    };
    let restored = |claims: Vec<Claim>, pods: Vec<Pod>| {
        Node::restore(Restored {
            claims,
            pods: pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect(),
            ..Restored::default()
        })
    };
    for other in ["a-first", "z-last"] {
        let abandoned = record(other, PreparationState::Abandoned);
        let used = record("used", PreparationState::Prepared);
        let mut claims = vec![used.clone(), abandoned.clone()];
        claims.sort_by(|one, two| one.uid.cmp(&two.uid));
        let node = restored(claims.clone(), vec![holder.clone()]);
        assert_eq!(node.claim_named(&key("c")).unwrap().claim.uid, "used".into());
        // It is unused and not unprepared: a new claim of that name must wait.
        let mut node = restored(claims, Vec::new());
        connect_driver(&mut node, "d0", "0.sock");
        let request = pod_with("q", &[claim_of("c", "new", &[("d0", "d", &[])])]);
        let refused = node.reserve(&request, &Preferences::new());
        assert!(
            matches!(refused, Err(ReserveError::Unpreparing { .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn of_drivers_that_are_gone_only_the_last_are_remembered() {
    let mut node = Node::default();
    let (kept, _) = node.driver_registered(offer_of("kept", "k.sock"), START).unwrap();
    node.link_up(kept, START);
    for number in 0..2 * MAX_GONE {
        let now = START.after(number as u64);
        let name = format!("d{number:04}");
        let (id, _) = node.driver_registered(offer_of(&name, "d.sock"), now).unwrap();
        node.driver_deregistered(id, now);
    }
    let drivers = node.drivers();
    assert_eq!(drivers.len(), MAX_GONE + 1);
    assert!(node.driver(&"kept".into()).is_some());
    let last = format!("d{:04}", 2 * MAX_GONE - 1);
    assert!(node.driver(&last.as_str().into()).is_some() && node.driver(&"d0000".into()).is_none());
}

#[test]
fn an_intent_of_another_allocation_is_none() {
    let mut node = abandoned_at_d0();
    connect_driver(&mut node, "d2", "0.sock");
    let other = pod_with("r", &[claim_of("k", "c", &[("d2", "z", &[])])]);
    let left = reserve(
        &mut node,
        &pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]),
    );
    node.begin_intent(left);
    node.abort(left);

    // The write in flight names d1.
    let refused = node.reserve(&other, &Preferences::new()).unwrap_err();
    assert!(refused.waiting_helps(), "{refused}");
    node.finish_intent(left);

    let id = reserve(&mut node, &other);
    let on_disk = node.begin_intent(id).put;
    assert!(on_disk[0].preparations.contains_key("d2"));
    node.finish_intent(id);
    assert_eq!(asked(&node.prepare_calls(id, START)), [("d2", vec!["c"])]);
}

#[test]
fn joining_a_claim_that_needs_no_driver_does_not_wait_for_another_intent() {
    for is_written in [true, false] {
        let mut node = Node::default();
        let shared = claim_of("k", "c", &[("d0", "a", &["*"])]);
        let shared = core::slice::from_ref(&shared);
        let (p, q) = (pod_with("p", shared), pod_with("q", shared));
        let first = reserve(&mut node, &p);
        assert_eq!(node.begin_intent(first).put.len(), 1);
        let second = reserve(&mut node, &q);
        assert!(node.begin_intent(second).is_empty(), "one write is enough");
        assert_eq!(node.waiting_for(second), []);

        let commit = node.begin_commit(second, &q, Vec::new()).unwrap();

        assert_eq!(commit.claims.len(), 1, "it may be the only one that is written");
        if is_written {
            node.finish_intent(first);
        } else {
            node.cancel_intent(first);
        }
        node.abort(first);
        node.finish_commit(second);
        let view = node.claim(&"c".into()).unwrap();
        assert_eq!((view.phase, view.pods), (Phase::Prepared, vec!["q".into()]));
        assert_eq!(node.recorded_claims().count(), 1, "it is on disk");
        assert_sound(&node);
    }
}

#[test]
fn a_change_during_a_commit_is_written_later() {
    let mut node = abandoned_at_d0();
    let wanted = pod_with("q", &[claim_of("k", "c", &[("d1", "y", &[])])]);
    let id = reserve(&mut node, &wanted);
    intend(&mut node, id);
    prepare(&mut node, id);
    node.begin_commit(id, &wanted, Vec::new()).unwrap();
    connect_driver(&mut node, "d0", "0.sock");
    let calls = node.due_calls(START);
    assert_eq!(asked(&calls), [("d0", vec!["c"])]);
    answer_all(&mut node, calls);

    node.finish_commit(id);

    let record = node.begin_record().unwrap();
    assert_eq!(&record.put[0], node.claim(&"c".into()).unwrap().claim);
}
