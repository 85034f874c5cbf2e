//! Fingerprints of pods.

use super::*;

#[test]
fn the_fingerprint_depends_only_on_requests() {
    let print = |text: &str| parsed(text).unwrap().fingerprint;
    let one =
        print("metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/gpu: 1}}}]}");
    assert_ne!(one, 0);
    for same in [
        "metadata: {name: c, labels: {x: y}}\nspec: {containers: [{name: b, image: i, resources: {limits: {acme.com/gpu: '1'}}}]}",
        "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {cpu: 1, acme.com/gpu: 1, acme.com/nic: 0}}}]}",
        "metadata: {name: a}\nspec: {initContainers: [], containers: [{name: b, resources: {limits: {acme.com/gpu: 1000m}}}]}",
    ] {
        assert_eq!(print(same), one, "{same}");
    }
    for other in [
        "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/gpu: 2}}}]}",
        "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/nic: 1}}}]}",
        "metadata: {name: a}\nspec: {containers: [{name: c, resources: {limits: {acme.com/gpu: 1}}}]}",
        "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/gpu: 1}}}, {name: c}]}",
        "metadata: {name: a}\nspec: {initContainers: [{name: b, resources: {limits: {acme.com/gpu: 1}}}], containers: [{name: c}]}",
    ] {
        assert_ne!(print(other), one, "{other}");
    }
}

#[test]
fn the_fingerprint_never_changes_between_versions() {
    assert_eq!(parsed(FULL).unwrap().fingerprint, 0x4f36_0665_fba3_7303);
}

#[test]
fn the_fingerprint_does_not_depend_on_foreign_patterns() {
    let text = "metadata: {name: a}\nspec: {containers: [{name: b, resources: {limits: {acme.com/gpu: 1}}}]}";
    let ours = parse(text, Source::Api, &[]).unwrap();
    let foreign = parse(text, Source::Api, &["acme.com/*".to_owned()]).unwrap();
    assert_ne!(ours.containers, foreign.containers);
    assert_eq!(ours.fingerprint, foreign.fingerprint);
}
