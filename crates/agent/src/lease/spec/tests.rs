use std::collections::BTreeMap;

use devlet_core::device_plugin::run_options::{DeviceNode as Node, Mount as Bind};
use serde_json::json;

use super::*;

fn hook() -> HookCommand {
    HookCommand {
        path: "/usr/bin/devlet".into(),
        socket: "/run/devlet.sock".into(),
    }
}

fn options() -> RunOptions {
    RunOptions {
        envs: [("GPU".to_owned(), "0".to_owned())].into(),
        mounts: vec![Bind {
            container_path: "/data".into(),
            host_path: "/srv/data".into(),
            read_only: true,
        }],
        device_nodes: vec![Node {
            container_path: "/dev/x".into(),
            host_path: "/dev/null".into(),
            permissions: "rw".into(),
        }],
        ..RunOptions::default()
    }
}

/// Applies the spec of a lease as a runtime does.
fn container(directory: &Path, name: &LeaseName) -> serde_json::Value {
    let mut oci = json!({ "ociVersion": "1.2.0", "process": { "env": [] } });
    Registry::load([directory])
        .inject(&mut oci, [crate::lease::qualified(name)])
        .unwrap();
    oci
}

#[test]
fn a_runtime_adds_what_the_plugin_answered_and_calls_the_hooks() {
    let directory = tempfile::tempdir().unwrap();
    let name = crate::lease::new_name();

    write(directory.path(), &name, &options(), Some(&hook())).unwrap();

    let oci = container(directory.path(), &name);
    assert_eq!(oci["process"]["env"], json!(["GPU=0"]));
    assert_eq!(oci["linux"]["devices"][0]["path"], "/dev/x");
    assert_eq!(oci["linux"]["devices"][0]["major"], 1);
    assert_eq!(oci["mounts"][0]["source"], "/srv/data");
    assert_eq!(oci["mounts"][0]["options"], json!(["rbind", "rprivate", "ro"]));
    for (stage, word) in HOOKS {
        let hook = &oci["hooks"][stage][0];
        assert_eq!(hook["path"], "/usr/bin/devlet");
        assert_eq!(hook["args"][4], word);
        assert_eq!(hook["args"][5], name.as_str());
    }
    let text = std::fs::read_to_string(directory.path().join(file_name(&name))).unwrap();
    assert!(text.contains("\"cdiVersion\": \"0.5.0\""), "{text}");
}

#[test]
fn cdi_devices_of_a_plugin_are_resolved_into_the_spec() {
    let directory = tempfile::tempdir().unwrap();
    let vendor = r#"{"cdiVersion": "0.5.0", "kind": "acme.com/gpu", "containerEdits": {"env": ["ALL=1"]},
        "devices": [{"name": "0", "containerEdits": {"env": ["ONE=0"]}},
                    {"name": "1", "containerEdits": {"env": ["TWO=1"]}}]}"#;
    std::fs::write(directory.path().join("acme.json"), vendor).unwrap();
    let name = crate::lease::new_name();
    let mut options = RunOptions {
        cdi_devices: vec!["acme.com/gpu=0".into()],
        annotations: BTreeMap::from([
            ("cdi.k8s.io/acme".to_owned(), "acme.com/gpu=1".to_owned()),
            ("acme.com/note".to_owned(), "x".to_owned()),
        ]),
        ..RunOptions::default()
    };

    write(directory.path(), &name, &options, Some(&hook())).unwrap();

    let oci = container(directory.path(), &name);
    assert_eq!(oci["process"]["env"], json!(["ALL=1", "ONE=0", "TWO=1"]));
    assert_eq!(lost_annotations(&options), ["acme.com/note"]);

    options.cdi_devices = vec!["acme.com/gpu=9".into()];
    let refused = write(directory.path(), &name, &options, Some(&hook())).unwrap_err();
    assert!(refused.to_string().contains("acme.com/gpu=9"), "{refused}");
}

#[test]
fn a_spec_is_written_once_and_removed_with_its_lease() {
    let directory = tempfile::tempdir().unwrap();
    let name = crate::lease::new_name();
    let path = directory.path().join(file_name(&name));
    write(directory.path(), &name, &options(), Some(&hook())).unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    let first = inode();
    write(directory.path(), &name, &options(), Some(&hook())).unwrap();
    assert_eq!(inode(), first);

    std::fs::write(&path, "{}").unwrap();
    write(directory.path(), &name, &options(), Some(&hook())).unwrap();
    assert_ne!(std::fs::read_to_string(&path).unwrap(), "{}");

    remove(directory.path(), &name);
    assert!(!path.exists());
}

#[test]
fn an_empty_answer_makes_a_valid_spec_without_hooks() {
    let directory = tempfile::tempdir().unwrap();
    let name = crate::lease::new_name();
    write(directory.path(), &name, &RunOptions::default(), None).unwrap();
    assert_eq!(
        container(directory.path(), &name)["process"]["env"],
        json!([NO_EDITS])
    );
}
