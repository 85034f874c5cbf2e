use devlet_core::Restored;
use devlet_core::dra::claims::ClaimKey;

use super::*;
use crate::api::tests::node;

#[test]
fn a_pod_is_found_by_uid_by_full_name_and_by_a_unique_name() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "job"),
        ("u3", "b", "other"),
        ("u4", "", ""),
    ]);
    let found = |name: &str| find_pod(&node, name).map(|uid| uid.to_string());
    for (name, uid) in [
        ("u1", "u1"),
        ("a/job", "u1"),
        ("b/job", "u2"),
        ("other", "u3"),
        ("u4", "u4"),
    ] {
        assert_eq!(found(name).as_deref(), Ok(uid), "{name}");
    }
    for name in ["", "uid:"] {
        assert_eq!(found(name), Err(PodLookupError::Empty), "{name}");
    }
    for name in ["/", "c/job", "u9", "a/other"] {
        let name = name.to_owned();
        assert_eq!(found(&name), Err(PodLookupError::Unknown { name }));
    }
    let ambiguous = found("job").unwrap_err().to_string();
    assert_eq!(ambiguous, "several pods are called job: name one of a/job, b/job");
}

#[test]
fn claims_of_unknown_pods_do_not_match_an_empty_name() {
    let key = ClaimKey {
        namespace: "default".to_owned(),
        name: "one".to_owned(),
    };
    let drivers = [(DriverName::from("gpu.acme.com"), BTreeSet::new(), Vec::new())];
    let claim = Claim::imported(key, "c-1".into(), PodUid::from(""), drivers);
    let node = Node::restore(Restored {
        claims: vec![claim],
        ..Restored::default()
    });
    for name in ["", "uid:"] {
        let refused = find_to_remove(&node, name).unwrap_err().to_string();
        assert_eq!(
            refused,
            "no pod is named: say its UID, its name, or namespace/name"
        );
    }
}

#[test]
fn a_name_with_a_slash_does_not_match_a_pod_without_a_name() {
    let derived = |namespace: &str| {
        manifest::derived_uid(&PodName {
            namespace: namespace.to_owned(),
            name: "job".to_owned(),
        })
    };
    let (nameless, in_default) = (derived("a"), derived("default"));
    let mut node = node(&[
        (nameless.as_str(), "", ""),
        ("a/other", "", ""),
        (in_default.as_str(), "default", "job"),
        ("u2", "b", "job"),
    ]);
    let key = ClaimKey {
        namespace: "a".to_owned(),
        name: "one".to_owned(),
    };
    let drivers = [(DriverName::from("gpu.acme.com"), BTreeSet::new(), Vec::new())];
    let left = Node::restore(Restored {
        claims: vec![Claim::imported(
            key,
            "c-1".into(),
            PodUid::from("a/left"),
            drivers,
        )],
        ..Restored::default()
    });
    for (node, name) in [(&node, "a/other"), (&left, "a/left")] {
        let found = |name: &str| find_to_remove(node, name).map(|uid| uid.to_string());
        assert!(
            matches!(found(name), Err(PodLookupError::Unknown { .. })),
            "{name}"
        );
        assert_eq!(found(&format!("uid:{name}")).as_deref(), Ok(name));
    }

    // Pods that are being removed are on record and in flight.
    for pod in [&nameless, &in_default] {
        node.begin_release(pod).unwrap();
    }
    let found = |name: &str| find_to_remove(&node, name);
    assert!(matches!(found("a/job"), Err(PodLookupError::Unknown { .. })));
    assert!(matches!(found("job"), Err(PodLookupError::Ambiguous { .. })));
}

#[test]
fn a_text_that_is_a_uid_and_a_name_is_ambiguous() {
    let node = node(&[
        ("u1", "a", "job"),
        ("u2", "b", "u1"),
        ("u3", "", ""),
        ("u4", "b", "u3"),
        ("u5", "b", "u5"),
    ]);
    let found = |name: &str| find_pod(&node, name).map(|uid| uid.to_string());
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
