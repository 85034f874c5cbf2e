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
            host_path: "/etc".into(),
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

fn runtime(directory: &Path) -> RuntimeCdi {
    RuntimeCdi {
        directories: vec![directory.to_owned()],
        gives_to_user: false,
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

    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options(),
        Some(&hook()),
    )
    .unwrap();

    let oci = container(directory.path(), &name);
    assert_eq!(oci["process"]["env"], json!(["GPU=0"]));
    assert_eq!(oci["linux"]["devices"][0]["path"], "/dev/x");
    assert_eq!(oci["linux"]["devices"][0]["major"], 1);
    assert_eq!(oci["mounts"][0]["source"], "/etc");
    assert_eq!(oci["mounts"][0]["options"], json!(["rbind", "rprivate", "ro"]));
    for (stage, word) in HOOKS {
        let hook = &oci["hooks"][stage][0];
        assert_eq!(hook["path"], "/usr/bin/devlet");
        assert_eq!(hook["args"][6], word);
        assert_eq!(hook["args"][7], name.as_str());
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

    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options,
        Some(&hook()),
    )
    .unwrap();

    let oci = container(directory.path(), &name);
    assert_eq!(oci["process"]["env"], json!(["ALL=1", "ONE=0", "TWO=1"]));
    assert_eq!(lost_annotations(&options), ["acme.com/note"]);

    options.cdi_devices = vec!["acme.com/gpu=9".into()];
    let refused = write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options,
        Some(&hook()),
    )
    .unwrap_err();
    assert!(refused.to_string().contains("acme.com/gpu=9"), "{refused}");
}

#[test]
fn a_spec_is_written_once_and_removed_with_its_lease() {
    let directory = tempfile::tempdir().unwrap();
    let name = crate::lease::new_name();
    let path = directory.path().join(file_name(&name));
    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options(),
        Some(&hook()),
    )
    .unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    let first = inode();
    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options(),
        Some(&hook()),
    )
    .unwrap();
    assert_eq!(inode(), first);

    std::fs::write(&path, "{}").unwrap();
    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &options(),
        Some(&hook()),
    )
    .unwrap();
    assert_ne!(std::fs::read_to_string(&path).unwrap(), "{}");

    remove(directory.path(), &name);
    assert!(!path.exists());
}

#[test]
fn an_empty_answer_makes_a_valid_spec_without_hooks() {
    let directory = tempfile::tempdir().unwrap();
    let name = crate::lease::new_name();
    write(
        directory.path(),
        &runtime(directory.path()),
        &name,
        &RunOptions::default(),
        None,
    )
    .unwrap();
    assert_eq!(
        container(directory.path(), &name)["process"]["env"],
        json!([NO_EDITS])
    );
}

#[test]
fn the_source_of_a_mount_is_created_if_it_does_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("vendor/1");
    let with_mount = |source: &Path| RunOptions {
        mounts: vec![Bind {
            container_path: "/data".into(),
            host_path: source.display().to_string(),
            read_only: true,
        }],
        ..RunOptions::default()
    };
    let cdi = runtime(directory.path());
    let write = |source: &Path| {
        write(
            directory.path(),
            &cdi,
            &"a".into(),
            &with_mount(source),
            Some(&hook()),
        )
    };

    write(&source).unwrap();

    assert!(source.is_dir());
    // It may be on a file system that a reboot empties.
    std::fs::remove_dir(&source).unwrap();
    write(&source).unwrap();
    assert!(source.is_dir());
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    write(&file).unwrap();
    assert!(file.is_file());
    std::os::unix::fs::symlink("nowhere", directory.path().join("link")).unwrap();
    let refused = write(&directory.path().join("link")).unwrap_err().to_string();
    assert!(
        refused.contains("link, which does not exist and cannot be created"),
        "{refused}"
    );
}

#[test]
fn a_device_node_keeps_its_owner_unless_the_runtime_gives_it_to_the_user() {
    use std::os::unix::fs::MetadataExt as _;
    let host = std::fs::metadata("/dev/null").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut cdi = runtime(directory.path());
    let owner = |cdi: &RuntimeCdi| {
        let spec = spec(cdi, &"a".into(), &options(), Some(&hook())).unwrap();
        let node = &spec.devices[0].container_edits.device_nodes[0];
        (node.uid, node.gid)
    };
    assert_eq!(owner(&cdi), (Some(host.uid()), Some(host.gid())));
    cdi.gives_to_user = true;
    assert_eq!(owner(&cdi), (None, None));
}

#[test]
fn cdi_devices_of_a_plugin_are_found_where_the_runtime_looks() {
    let (directory, vendor) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let spec = r#"{"cdiVersion": "0.5.0", "kind": "acme.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"env": ["ONE=0"]}}]}"#;
    std::fs::write(vendor.path().join("acme.json"), spec).unwrap();
    let options = RunOptions {
        cdi_devices: vec!["acme.com/gpu=0".into()],
        ..RunOptions::default()
    };
    let write = |cdi: &RuntimeCdi| write(directory.path(), cdi, &"a".into(), &options, Some(&hook()));
    assert!(write(&RuntimeCdi::default()).is_err());

    write(&runtime(vendor.path())).unwrap();

    assert_eq!(
        container(directory.path(), &"a".into())["process"]["env"],
        json!(["ONE=0"])
    );
}

#[test]
fn the_leases_with_specs_are_known_from_their_files() {
    let directory = tempfile::tempdir().unwrap();
    for file in [
        "devlet.dev-lease-a1.json",
        "devlet.dev-lease-.x.json",
        "acme.json",
        "devlet.dev-lease-b",
    ] {
        std::fs::write(directory.path().join(file), "{}").unwrap();
    }
    assert_eq!(names(directory.path()), ["a1".into()]);
    assert!(names(Path::new("/nowhere")).is_empty());
}

/// Makes a device node, which requires root.
fn make_node(path: &Path) {
    let node = rustix::fs::makedev(1, 3);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::CharacterDevice,
        0o600.into(),
        node,
    )
    .unwrap();
}

#[test]
fn a_directory_stands_for_all_nodes_below_it() {
    let directory = tempfile::tempdir().unwrap();
    let host = directory.path();
    for name in ["a", "b/c", "b/pts"] {
        std::fs::create_dir_all(host.join(name)).unwrap();
    }
    std::fs::write(host.join("file"), "").unwrap();
    std::os::unix::fs::symlink("/dev/null", host.join("a/link")).unwrap();
    if !rustix::process::geteuid().is_root() {
        devlet_testkit::skip("needs root");
        return;
    }
    for name in ["n0", "console", "a/n1", "b/c/n2", "b/pts/0"] {
        make_node(&host.join(name));
    }
    let node = |host_path: &Path| Node {
        container_path: "/dev/acme".into(),
        host_path: host_path.display().to_string(),
        permissions: "r".into(),
    };

    let found = device_nodes(&[node(host)]).unwrap();

    let mut paths: Vec<&str> = found.iter().map(|node| node.path.as_str()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["/dev/acme/a/n1", "/dev/acme/b/c/n2", "/dev/acme/n0"]);
    assert!(found.iter().all(|node| node.permissions == "r"));

    for number in 0..=MAX_ENTRIES {
        std::fs::File::create(host.join(format!("b/{number}"))).unwrap();
    }
    let refused = device_nodes(&[node(host)]).unwrap_err().to_string();
    assert!(refused.contains("with more than 16384 entries"), "{refused}");
}
