use std::collections::BTreeSet;

use devlet_core::dra::claims::{AllocatedDevice, Claim, Preparation, PreparedDevice};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::dra::health::HealthReport;
use devlet_core::{ConnectionId, Pod, PodClaim, PodMetadata, PodName, ProcessId, Source};
use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "gpu.acme.com";
const NOW: Moment = Moment(1_000_000);

fn key() -> ClaimKey {
    ClaimKey {
        namespace: "default".to_owned(),
        name: "gpus".to_owned(),
    }
}

fn prepared(device: &str) -> PreparedDevice {
    PreparedDevice {
        requests: Vec::new(),
        pool: "n".to_owned(),
        device: device.to_owned(),
        share: None,
        cdi_devices: Vec::new(),
    }
}

/// A node whose driver has prepared devices `a` and `b` of a claim, and left out `c`.
fn node(pod: &str) -> (Node, ConnectionId) {
    let mut node = Node::default();
    let offer = DriverOffer {
        driver: DRIVER.into(),
        endpoint: "dra.sock".into(),
        process: ProcessId { uid: 0, pid: None },
        may_share: false,
        service: String::new(),
        service_reason: String::new(),
        health_service: None,
    };
    let (driver, _) = node.driver_registered(offer, NOW).unwrap();
    let allocated = |device: &str| AllocatedDevice {
        request: "gpu".to_owned(),
        pool: "n".to_owned(),
        device: device.to_owned(),
        share: None,
        admin_access: false,
    };
    let preparation = Preparation {
        allocated: Some(["a", "b", "c"].map(allocated).into()),
        skip: BTreeSet::new(),
        state: PreparationState::Prepared,
        devices: vec![prepared("a"), prepared("b")],
    };
    node.put_claim(Claim {
        key: key(),
        uid: "c1".into(),
        pod: pod.into(),
        pod_name: PodName::default(),
        preparations: BTreeMap::from([(DriverName::from(DRIVER), preparation)]),
    });
    let claim = PodClaim {
        name: "gpus".to_owned(),
        key: key(),
        uid: "c1".into(),
    };
    node.put(Pod {
        uid: pod.into(),
        name: PodName {
            namespace: "default".to_owned(),
            name: "p".to_owned(),
        },
        source: Source::Embedder,
        fingerprint: 0,
        metadata: PodMetadata::default(),
        before_reboot: false,
        containers: vec!["main".into()],
        allocations: Vec::new(),
        claims: vec![claim],
        claim_uses: Vec::new(),
    })
    .unwrap();
    (node, driver)
}

fn reported(node: &mut Node, driver: ConnectionId, health: DeviceHealth, message: &str) {
    let report = HealthReport {
        device: PoolDevice {
            pool: "n".to_owned(),
            device: "b".to_owned(),
        },
        health,
        message: message.to_owned(),
        lease_ms: 0,
    };
    node.health_reported(driver, vec![report], NOW);
}

fn report(node: &Node) -> ClaimReport {
    ClaimReport::all(node, NOW, false)
        .remove(&ClaimUid::from("c1"))
        .unwrap()
}

/// The status of a claim with these allocated devices and conditions.
fn status(allocated: &[&str], devices: &Value) -> ResourceClaimStatus {
    let result = |device: &&str| json!({ "request": "gpu", "driver": DRIVER, "pool": "n", "device": device });
    let results: Vec<Value> = allocated.iter().map(result).collect();
    let status = json!({ "allocation": { "devices": { "results": results } }, "devices": devices });
    serde_json::from_value(status).unwrap()
}

fn condition(kind: &str, status: &str, reason: &str, message: &str, time: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": time,
    })
}

fn device(name: &str, conditions: &[Value]) -> Value {
    json!({ "driver": DRIVER, "pool": "n", "device": name, "conditions": conditions })
}

fn merged(report: &ClaimReport, status: &ResourceClaimStatus, now: &str) -> Option<Value> {
    match report.merge(status, now.parse().unwrap()) {
        Merged::Same => None,
        Merged::Differs(devices) => Some(json!(devices)),
    }
}

const FIRST: &str = "2026-01-01T00:00:00Z";
const LATER: &str = "2026-01-02T00:00:00Z";
const LEFT_OUT: &str = "the driver prepared the claim without this device";

#[test]
fn each_allocated_device_has_its_conditions_and_a_driver_keeps_its_own() {
    let (mut node, driver) = node("u");
    reported(&mut node, driver, DeviceHealth::Healthy, "");
    let ready = condition("Ready", "True", "Up", "", FIRST);
    let known = status(
        &["a", "b", "c"],
        &json!([device("a", std::slice::from_ref(&ready))]),
    );
    let ours = |kind, reason| condition(kind, "True", reason, "", FIRST);
    let prepared = || ours(PREPARED, "Prepared");
    let expected = json!([
        device("a", &[prepared()]),
        device("b", &[ours(HEALTHY, "Healthy"), prepared()]),
        device("c", &[condition(PREPARED, "False", "LeftOut", LEFT_OUT, FIRST)]),
    ]);
    assert_eq!(merged(&report(&node), &known, FIRST), Some(expected.clone()));

    let mut written = expected;
    written[0]["conditions"] = json!([ready, prepared()]);
    let known = status(&["a", "b", "c"], &written);
    assert_eq!(merged(&report(&node), &known, LATER), None);
}

#[test]
fn a_condition_keeps_its_time_while_its_status_is_the_same() {
    let (mut node, driver) = node("u");
    reported(&mut node, driver, DeviceHealth::Unhealthy, "hot");
    let bad = |message: &str, time: &str| condition(HEALTHY, "False", "Unhealthy", message, time);
    let prepared = || condition(PREPARED, "True", "Prepared", "", FIRST);
    let before = device("b", &[bad("cold", FIRST), prepared()]);
    let known = status(&["b"], &json!([before]));
    let expected = json!([device("b", &[bad("hot", FIRST), prepared()])]);
    assert_eq!(merged(&report(&node), &known, LATER), Some(expected));

    reported(&mut node, driver, DeviceHealth::Healthy, "");
    let good = condition(HEALTHY, "True", "Healthy", "", LATER);
    let expected = json!([device("b", &[good, prepared()])]);
    assert_eq!(merged(&report(&node), &known, LATER), Some(expected));
    // A health that is not known any longer is left out, which removes the condition.
    reported(&mut node, driver, DeviceHealth::Unknown, "");
    let expected = json!([device("b", &[prepared()])]);
    assert_eq!(merged(&report(&node), &known, LATER), Some(expected));
}

#[test]
fn soon_after_the_start_a_health_that_is_not_known_yet_is_left_alone() {
    let (mut node, driver) = node("u");
    let bad = condition(HEALTHY, "False", "Unhealthy", "hot", FIRST);
    let prepared = condition(PREPARED, "True", "Prepared", "", FIRST);
    let known = status(&["b"], &json!([device("b", &[bad, prepared.clone()])]));
    let early = |node: &Node| {
        ClaimReport::all(node, NOW, true)
            .remove(&ClaimUid::from("c1"))
            .unwrap()
    };
    assert_eq!(merged(&early(&node), &known, LATER), None);
    assert_eq!(
        merged(&report(&node), &known, LATER),
        Some(json!([device("b", &[prepared])]))
    );
    assert!(!report(&node).is_written(&early(&node)));
    reported(&mut node, driver, DeviceHealth::Healthy, "");
    assert!(
        report(&node)
            .devices
            .values()
            .any(|each| each.health == Some(DeviceHealth::Healthy))
    );
    assert!(merged(&early(&node), &known, LATER).is_some());
}

#[test]
fn devices_that_are_not_allocated_any_longer_are_left_out() {
    let (node, _) = node("u");
    let known = status(&["other"], &json!([]));
    assert_eq!(merged(&report(&node), &known, FIRST), None);
    assert_eq!(
        merged(&report(&node), &ResourceClaimStatus::default(), FIRST),
        None
    );
}

#[test]
fn a_report_is_written_again_when_it_differs_or_all_pods_are_others() {
    let (mut first, driver) = node("u");
    let last = report(&first);
    assert!(report(&first).is_written(&last));
    assert!(!report(&node("other").0).is_written(&last));
    reported(&mut first, driver, DeviceHealth::Healthy, "");
    assert!(!report(&first).is_written(&last));
}
