use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::*;

const VENDOR1: &str = "
cdiVersion: '0.3.0'
kind: vendor1.com/device
containerEdits:
  env: [SPEC=1]
devices:
- name: dev1
  containerEdits:
    env: [DEV1=1]
    deviceNodes: [{path: /dev/vendor1-dev1, type: b, major: 10, minor: 1}]
- name: dev2
  containerEdits:
    env: [DEV2=2]
    hooks:
    - {hookName: createRuntime, path: /bin/cr, args: [--verbose], env: [H=1]}
    - {hookName: createContainer, path: /bin/cc}
- name: unstated
  containerEdits:
    deviceNodes: [{path: /dev/no-such-device}]
";

fn registry_of(files: &[(&str, &str)]) -> (TempDir, Registry) {
    let directory = TempDir::new().unwrap();
    for (name, text) in files {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let registry = Registry::load([directory.path()]);
    (directory, registry)
}

#[test]
fn a_device_brings_its_spec_edits_and_its_own() {
    let (_directory, registry) = registry_of(&[("vendor1.yaml", VENDOR1)]);
    let mut oci = json!({
        "process": { "env": ["ORIG=1"] },
        "linux": { "devices": [{ "path": "/dev/null" }] },
    });
    registry.inject(&mut oci, ["vendor1.com/device=dev1"]).unwrap();
    let expected = json!({
        "process": { "env": ["ORIG=1", "SPEC=1", "DEV1=1"] },
        "linux": {
            "devices": [
                { "path": "/dev/null" },
                { "path": "/dev/vendor1-dev1", "type": "b", "major": 10, "minor": 1 },
            ],
            "resources": { "devices": [{ "allow": true, "type": "b", "major": 10, "minor": 1, "access": "rwm" }] },
        },
    });
    assert_eq!(oci, expected);
}

#[test]
fn spec_edits_come_once_and_devices_in_the_order_of_names() {
    let vendor2 = VENDOR1
        .replace("vendor1", "vendor2")
        .replace("SPEC", "OTHER")
        .replace("DEV", "OTHER");
    let (_directory, registry) = registry_of(&[("vendor1.yaml", VENDOR1), ("vendor2.yaml", &vendor2)]);
    let names = [
        "vendor1.com/device=dev2",
        "vendor2.com/device=dev1",
        "vendor1.com/device=dev1",
        "vendor1.com/device=dev2",
    ];
    let edits = registry.resolve(names).unwrap();
    assert_eq!(edits.env, ["SPEC=1", "DEV2=2", "OTHER=1", "OTHER1=1", "DEV1=1"]);
    let hooks: Vec<_> = edits.hooks.iter().map(|hook| hook.hook_name.as_str()).collect();
    assert_eq!(
        hooks,
        ["createRuntime", "createContainer"],
        "a repeated device is merged once"
    );
    assert_eq!(
        serde_json::to_value(&edits).unwrap()["hooks"][0]["args"],
        json!(["--verbose"])
    );
}

#[test]
fn no_names_change_nothing() {
    let (_directory, registry) = registry_of(&[("vendor1.yaml", VENDOR1)]);
    let none: [&str; 0] = [];
    let mut oci = json!({ "a": 1 });
    registry.inject(&mut oci, none).unwrap();
    assert_eq!(oci, json!({ "a": 1 }));
}

#[test]
fn all_unresolvable_names_are_listed_with_their_reasons() {
    let conflict = "cdiVersion: 0.3.0\nkind: c.com/c\ndevices: [{name: x, containerEdits: {env: [A=b]}}]";
    let invalid = "cdiVersion: 9.9.9\nkind: b.com/c\ndevices: [{name: x, containerEdits: {env: [A=b]}}]";
    let unknown_field =
        "cdiVersion: 0.3.0\nnew: 1\nkind: b.com/c\ndevices: [{name: y, containerEdits: {env: [A=b]}}]";
    let (directory, registry) = registry_of(&[
        ("vendor1.yaml", VENDOR1),
        ("1.json", conflict),
        ("2.json", conflict),
        ("3.yaml", invalid),
        ("4.yaml", unknown_field),
        ("5.json", "{"),
    ]);
    let at = |name: &str| directory.path().join(name);
    let mut oci = json!({ "untouched": true });
    let names = [
        "vendor1.com/device=dev1",
        "vendor1.com/device=none",
        "c.com/c=x",
        "b.com/c=x",
        "b.com/c=y",
        "/dev/null",
    ];
    let Err(InjectError::Unresolvable(refused)) = registry.inject(&mut oci, names) else {
        panic!("must not be injected");
    };
    assert_eq!(oci, json!({ "untouched": true }));
    let listed: Vec<_> = refused.names.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(listed, names[1..]);
    let reasons: Vec<_> = refused.names.iter().map(|one| &one.reason).collect();
    assert_eq!(
        *reasons[0],
        Reason::Unknown {
            unreadable: vec![at("5.json")]
        }
    );
    assert_eq!(
        *reasons[1],
        Reason::Conflicting {
            paths: vec![at("1.json"), at("2.json")]
        }
    );
    assert!(matches!(reasons[2], Reason::Broken { path, .. } if *path == at("3.yaml")));
    assert!(
        matches!(reasons[3], Reason::Broken { path, message } if *path == at("4.yaml") && message.contains("new"))
    );
    assert!(matches!(reasons[4], Reason::Name(InvalidName::Path { .. })));

    let text = refused.to_string();
    assert!(
        text.starts_with("unresolvable CDI devices: vendor1.com/device=none (no such device, but "),
        "{text}"
    );
    for part in [
        "; c.com/c=x (defined in ",
        "1.json and ",
        "3.yaml, which is broken: CDI version",
        "; /dev/null (",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn an_error_of_one_device_leaves_the_oci_spec_untouched() {
    let (_directory, registry) = registry_of(&[("vendor1.yaml", VENDOR1)]);
    let mut oci = json!({ "process": { "env": [] } });
    let names = ["vendor1.com/device=dev1", "vendor1.com/device=unstated"];
    let refused = registry.inject(&mut oci, names);
    assert!(
        matches!(refused, Err(InjectError::Apply(ApplyError::HostDevice { .. }))),
        "{refused:?}"
    );
    assert_eq!(oci, json!({ "process": { "env": [] } }));
}

#[test]
fn annotations_lead_to_injected_devices() {
    let (_directory, registry) = registry_of(&[("vendor1.yaml", VENDOR1)]);
    let annotations = [(
        "cdi.k8s.io/vendor1_devices",
        "vendor1.com/device=dev1,vendor1.com/device=dev2",
    )];
    let requests = crate::annotations::parse(annotations).unwrap();
    let mut oci = json!({});
    registry
        .inject(&mut oci, requests.iter().flat_map(|request| &request.devices))
        .unwrap();
    assert_eq!(oci["process"]["env"], json!(["SPEC=1", "DEV1=1", "DEV2=2"]));
}
