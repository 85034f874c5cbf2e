use serde_json::{Value, json};

use super::*;

fn pod(changes: &Value) -> WatchedPod {
    let mut object = json!({
        "metadata": {"name": "job", "namespace": "team-a", "uid": "pod-1", "resourceVersion": "7"},
        "spec": {"containers": [{"name": "main"}, {"name": "log"}]},
    });
    merge(&mut object, changes);
    serde_json::from_value(object).unwrap()
}

fn merge(object: &mut Value, changes: &Value) {
    match (object, changes) {
        (Value::Object(object), Value::Object(changes)) => {
            for (key, value) in changes {
                merge(object.entry(key).or_insert(Value::Null), value);
            }
        }
        (object, changes) => *object = changes.clone(),
    }
}

#[test]
fn a_pod_has_ended_when_its_phase_or_all_its_containers_say_so() {
    let running = json!({"state": {"running": {"startedAt": "now"}}});
    let ended = json!({"state": {"terminated": {"exitCode": 0}}});
    let waiting = json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}});
    let two = |one: &Value, other: &Value| json!({"phase": "Running", "containerStatuses": [one, other]});
    let (active, has_ended) = (Stage::Active, |is_deleted| Stage::Ended { is_deleted });
    let terminating = |has_started, is_idle| Stage::Terminating {
        has_started,
        is_idle,
        grace: Duration::from_secs(30),
    };
    for (status, alive, deleted) in [
        (json!({}), active, terminating(false, false)),
        (json!({"phase": "Pending"}), active, terminating(false, false)),
        (json!({"phase": "Running"}), active, terminating(true, false)),
        (json!({"phase": "Succeeded"}), has_ended(false), has_ended(true)),
        (json!({"phase": "Failed"}), has_ended(false), has_ended(true)),
        (two(&running, &ended), active, terminating(true, false)),
        (two(&ended, &waiting), active, terminating(true, true)),
        (
            json!({"phase": "Pending", "containerStatuses": [waiting, waiting]}),
            active,
            terminating(false, true),
        ),
        (two(&ended, &ended), active, has_ended(true)),
        (
            json!({"phase": "Failed", "containerStatuses": [running, ended]}),
            active,
            terminating(true, false),
        ),
        // The agent has not reported both containers.
        (
            json!({"phase": "Running", "containerStatuses": [ended]}),
            active,
            terminating(true, false),
        ),
        (
            json!({"phase": "Pending", "initContainerStatuses": [running], "containerStatuses": [waiting, waiting]}),
            active,
            terminating(true, false),
        ),
        (
            json!({"phase": "Running", "ephemeralContainerStatuses": [running], "containerStatuses": [ended, ended]}),
            active,
            terminating(true, false),
        ),
    ] {
        assert_eq!(pod(&json!({"status": status})).stage, alive, "{status}");
        let metadata = json!({
            "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30,
        });
        let terminating = pod(&json!({"status": status, "metadata": metadata}));
        assert_eq!(terminating.stage, deleted, "{status}, deleted");
    }
}

#[test]
fn the_annotation_names_the_drivers_that_a_removal_abandons() {
    for (value, drivers) in [
        (json!("gpu.acme.com"), &["gpu.acme.com"][..]),
        (
            json!(" gpu.acme.com, nic.acme.com,"),
            &["gpu.acme.com", "nic.acme.com"],
        ),
        (json!(""), &[]),
    ] {
        let annotations = json!({"devlet.dev/abandon-driver": value, "other": "x"});
        let named = pod(&json!({"metadata": {"annotations": annotations}})).abandoned;
        assert_eq!(named, drivers.iter().copied().map(DriverName::from).collect());
    }
    assert!(pod(&json!({})).abandoned.is_empty());
}

#[test]
fn a_pod_that_cannot_be_read_keeps_its_identity() {
    let broken = pod(&json!({"spec": {"resourceClaims": "none"}}));
    let known = broken.identity().unwrap();
    assert_eq!(
        (known.name.namespace.as_str(), known.uid.as_str()),
        ("team-a", "pod-1")
    );
    assert!(broken.object.is_err());
}
