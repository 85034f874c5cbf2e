use devlet_core::{Pod, Restored};

use super::*;

fn node(pods: &[(&str, &str, &str)]) -> Node {
    let pod = |(uid, namespace, name): &(&str, &str, &str)| Pod {
        uid: PodUid::from(*uid),
        name: PodName {
            namespace: (*namespace).to_owned(),
            name: (*name).to_owned(),
        },
        source: Source::Api,
        fingerprint: 1,
        before_reboot: false,
        containers: Vec::new(),
        allocations: Vec::new(),
    };
    Node::restore(Restored {
        pods: pods.iter().map(pod).collect(),
        ..Restored::default()
    })
}

#[test]
fn a_pod_is_found_by_uid_by_full_name_and_by_a_name_that_is_clear() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "job"),
        ("u3", "b", "other"),
        ("u4", "", ""),
    ]);
    let found = |name: &str| find(&node, name).map(|uid| uid.to_string());
    for (name, uid) in [
        ("u1", "u1"),
        ("a/job", "u1"),
        ("b/job", "u2"),
        ("other", "u3"),
        ("u4", "u4"),
    ] {
        assert_eq!(found(name).as_deref(), Ok(uid), "{name}");
    }
    for name in ["", "/", "c/job", "u9", "a/other"] {
        let name = name.to_owned();
        assert_eq!(found(&name), Err(PodLookupError::Unknown { name }));
    }
    let ambiguous = found("job").unwrap_err().to_string();
    assert_eq!(ambiguous, "several pods are called job: name one of a/job, b/job");
}

#[test]
fn a_pod_that_is_named_like_the_uid_of_another_is_not_taken_for_it() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "u1"),
        ("u3", "", ""),
        ("u4", "b", "u3"),
        ("u5", "b", "u5"),
    ]);
    let found = |name: &str| find(&node, name).map(|uid| uid.to_string());
    for (name, says) in [
        (
            "u1",
            "u1 is the UID of one pod and the name of another: say uid:u1 for a/job, or b/u1",
        ),
        (
            "u3",
            "u3 is the UID of one pod and the name of another: say uid:u3 for the first, or b/u3",
        ),
    ] {
        assert_eq!(found(name).unwrap_err().to_string(), says);
    }
    for (name, uid) in [
        ("uid:u1", "u1"),
        ("a/job", "u1"),
        ("b/u1", "u2"),
        ("uid:u3", "u3"),
        ("u5", "u5"),
    ] {
        assert_eq!(found(name).as_deref(), Ok(uid), "{name}");
    }
    assert!(found("uid:job").is_err() && found("uid:").is_err());
}

#[test]
fn what_is_waited_for_is_said_so_that_it_completes_a_sentence() {
    let reason = ReserveError::NotServed {
        resource: "acme.com/gpu".into(),
        last: None,
    };
    let event = waiting(&reason, Duration::from_millis(1500));
    assert_eq!(event.awaited, "a plugin that offers acme.com/gpu");
    assert_eq!(event.reason, "no device plugin offers acme.com/gpu");
    assert_eq!(event.resource, "acme.com/gpu");
    assert_eq!(event.waited_ms, 1500);
}
