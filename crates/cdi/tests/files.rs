//! Writes spec files to disk and reads them back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use devlet_cdi::{
    ContainerEdits, Device, DeviceNode, Hook, IntelRdt, MAX_SPEC_BYTES, Mount, NetDevice, Part, ReadError,
    Registry, Spec, SpecFile, Version, WriteError,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn device(name: &str) -> Device {
    let container_edits = ContainerEdits {
        env: vec!["FOO=BAR".into()],
        ..ContainerEdits::default()
    };
    Device {
        name: name.into(),
        container_edits,
        ..Device::default()
    }
}

fn spec(kind: &str) -> Spec {
    Spec {
        kind: kind.into(),
        devices: vec![device("dev1"), device("dev2")],
        ..Spec::default()
    }
}

fn file_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn a_written_spec_has_the_lowest_version_and_is_found() {
    let directory = TempDir::new().unwrap();
    let missing = directory.path().join("made/on/demand");
    let mut spec = spec("vendor.com/gpu");
    spec.version = "1.1.0".into();
    let path = spec.write(&missing, "gpus").unwrap();

    assert_eq!(path, missing.join("gpus.yaml"));
    assert_eq!(file_names(&missing), ["gpus.yaml"], "no temporary file is left");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    let read = SpecFile::read(&path).unwrap();
    assert_eq!(read.spec.version, "0.3.0");
    assert_eq!(read.spec.devices, spec.devices);
    assert_eq!(Registry::load([&missing]).definitions().count(), 2);
}

#[test]
fn the_extension_chooses_the_format() {
    let directory = TempDir::new().unwrap();
    for (name, file, first) in [
        ("a.json", "a.json", '{'),
        ("a.yaml", "a.yaml", 'c'),
        ("vendor.com-gpu_claim.1", "vendor.com-gpu_claim.1.yaml", 'c'),
    ] {
        let path = spec("vendor.com/gpu").write(directory.path(), name).unwrap();
        assert_eq!(path, directory.path().join(file));
        assert!(fs::read_to_string(path).unwrap().starts_with(first));
    }
}

#[test]
fn writing_again_replaces_and_removing_twice_is_fine() {
    let directory = TempDir::new().unwrap();
    spec("vendor.com/gpu").write(directory.path(), "x").unwrap();
    let path = spec("vendor.com/nic").write(directory.path(), "x").unwrap();
    assert_eq!(SpecFile::read(&path).unwrap().spec.kind, "vendor.com/nic");
    Spec::remove(directory.path(), "x").unwrap();
    assert!(!path.exists());
    Spec::remove(directory.path(), "x").unwrap();
    Spec::remove(directory.path().join("nowhere"), "x").unwrap();
}

#[test]
fn an_invalid_spec_is_not_written_and_the_old_file_stays() {
    let directory = TempDir::new().unwrap();
    let path = spec("vendor.com/gpu").write(directory.path(), "x").unwrap();
    let before = fs::read(&path).unwrap();
    let no_devices = Spec {
        devices: vec![],
        ..spec("vendor.com/gpu")
    };
    let bad_edits = Spec {
        container_edits: ContainerEdits {
            env: vec!["=".into()],
            ..ContainerEdits::default()
        },
        ..spec("vendor.com/gpu")
    };
    for invalid in [no_devices, bad_edits, spec("vendor.com"), spec("")] {
        assert!(
            matches!(invalid.write(directory.path(), "x"), Err(WriteError::Invalid(_))),
            "{invalid:?}"
        );
    }
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(file_names(directory.path()), ["x.yaml"]);
}

#[test]
fn a_spec_that_crashes_runtimes_is_not_written() {
    let directory = TempDir::new().unwrap();
    for (kind, part) in [
        ("v/gpu", Part::Vendor),
        ("one.com/d", Part::Class),
        ("v/d", Part::Vendor),
    ] {
        let refused = spec(kind).write(directory.path(), "x").unwrap_err();
        assert!(
            matches!(&refused, WriteError::OneCharacter { part: found, .. } if *found == part),
            "{kind}"
        );
        assert!(
            refused
                .to_string()
                .contains("crashes container runtimes (containerd 1.7 to 2.3, CRI-O, podman)")
        );
    }
    assert!(file_names(directory.path()).is_empty());
}

#[test]
fn file_names_with_directories_are_rejected() {
    let directory = TempDir::new().unwrap();
    let inner = directory.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let long = "x".repeat(251);
    for name in ["", "../x", "/tmp/x.json", "a/b", "..//", "x\0y", &long, "/"] {
        assert!(
            matches!(
                spec("vendor.com/gpu").write(&inner, name),
                Err(WriteError::FileName(_))
            ),
            "{name:?}"
        );
        assert!(Spec::remove(&inner, name).is_err(), "{name:?}");
    }
    assert_eq!(file_names(directory.path()), ["inner"]);
    for name in ["..", ".", &long[..250]] {
        let path = spec("vendor.com/gpu").write(&inner, name).unwrap();
        assert_eq!(
            path.parent(),
            Some(&*inner),
            "with an extension {name:?} is a plain name"
        );
    }
}

#[test]
fn a_failed_rename_leaves_no_temporary_file() {
    let directory = TempDir::new().unwrap();
    fs::create_dir(directory.path().join("x.json")).unwrap();
    assert!(matches!(
        spec("vendor.com/gpu").write(directory.path(), "x.json"),
        Err(WriteError::Io { .. })
    ));
    assert_eq!(file_names(directory.path()), ["x.json"]);
}

#[test]
fn generated_names_are_those_of_other_tools() {
    let spec = spec("vendor.com/gpu");
    assert_eq!(spec.file_name().unwrap(), "vendor.com-gpu");
    assert_eq!(
        spec.transient_file_name("claim-1").unwrap(),
        "vendor.com-gpu_claim-1"
    );
    assert_eq!(
        spec.transient_file_name("../../etc/x").unwrap(),
        "vendor.com-gpu_.._.._etc_x"
    );
    for kind in ["", "vendor.com", "/gpu", "vendor.com/", "../x/y"] {
        let misnamed = Spec {
            kind: kind.into(),
            ..Spec::default()
        };
        assert!(
            misnamed.file_name().is_err() && misnamed.transient_file_name("a").is_err(),
            "{kind:?}"
        );
    }
}

#[test]
fn transient_specs_are_written_and_removed() {
    let directory = TempDir::new().unwrap();
    let count = || Registry::load([directory.path()]).definitions().count();
    let mut specs = [
        spec("vendor.com/gpu"),
        spec("vendor.com/nic"),
        spec("other.com/gpu"),
    ];
    specs[1].devices.truncate(1);
    let names = specs
        .each_ref()
        .map(|spec| spec.transient_file_name("pod/1").unwrap());
    for (spec, name) in specs.iter().zip(&names) {
        spec.write(directory.path(), name).unwrap();
    }
    assert_eq!(count(), 5);
    Spec::remove(directory.path(), &names[0]).unwrap();
    assert_eq!(count(), 3);
}

#[test]
fn the_error_for_an_oversized_file_names_the_limit() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("large.json");
    fs::write(&path, vec![b' '; MAX_SPEC_BYTES + 1]).unwrap();
    let refused = SpecFile::read(&path).unwrap_err();
    assert_eq!(refused.to_string(), "the spec has more than 16777216 bytes");
    assert!(matches!(
        SpecFile::read(directory.path()),
        Err(ReadError::NotAFile)
    ));
    assert!(matches!(SpecFile::read("/dev/zero"), Err(ReadError::NotAFile)));
    assert!(matches!(
        SpecFile::read(directory.path().join("none")),
        Err(ReadError::Io(_))
    ));
}

/// Text with characters that are difficult for a serializer.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z/]{1,8}",
        "[ -~]{1,12}",
        "(null|~|true|yes|0x1f|007|1e3|-|---|<<|=|2001-01-01|\\.inf|!x|&a|\\*a|#x|a: b|a #b|%|@|`)",
        "[\\x00-\\x20\u{7f}-\u{a0}\u{2028}\u{2029}\u{feff}\u{fffe}\u{1f600}'\"\\\\é-]{1,6}",
    ]
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(text(), 0..3)
}

fn variables() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(text().prop_map(|value| format!("K={value}")), 0..3)
}

fn node() -> impl Strategy<Value = DeviceNode> {
    let optional = proptest::option::of(any::<u32>());
    let numbers = (
        any::<i64>(),
        any::<i64>(),
        optional.clone(),
        optional.clone(),
        optional,
    );
    (
        text(),
        prop_oneof![Just(String::new()), text()],
        "[bcup]?",
        "(none|[rwm]{0,3})",
        numbers,
    )
        .prop_map(
            |(path, host_path, node_type, permissions, (major, minor, file_mode, uid, gid))| DeviceNode {
                path,
                host_path,
                node_type,
                major,
                minor,
                file_mode,
                permissions,
                uid,
                gid,
            },
        )
}

fn edits() -> impl Strategy<Value = ContainerEdits> {
    let mount = (text(), text(), texts(), "[a-z]{0,5}").prop_map(
        |(host_path, container_path, options, mount_type)| Mount {
            host_path,
            container_path,
            options,
            mount_type,
        },
    );
    let hook = (
        0..6usize,
        text(),
        texts(),
        variables(),
        proptest::option::of(any::<i64>()),
    )
        .prop_map(|(name, path, args, env, timeout)| Hook {
            hook_name: Hook::NAMES[name].into(),
            path,
            args,
            env,
            timeout,
        });
    let rdt = (
        "[a-z]{0,4}",
        "[ -~]{0,9}",
        "[ -~]{0,9}",
        proptest::option::of(texts()),
        any::<bool>(),
    )
        .prop_map(
            |(clos_id, l3_cache_schema, mem_bw_schema, schemata, enable_monitoring)| IntelRdt {
                clos_id,
                l3_cache_schema,
                mem_bw_schema,
                schemata,
                enable_monitoring,
            },
        );
    let net = text().prop_map(|name| NetDevice {
        host_interface_name: "eth0".into(),
        name,
    });
    (
        variables(),
        proptest::collection::vec(node(), 0..3),
        proptest::collection::vec(net, 0..2),
        proptest::collection::vec(hook, 0..3),
        proptest::collection::vec(mount, 0..3),
        proptest::option::of(rdt),
        proptest::collection::vec(any::<u32>(), 0..3),
    )
        .prop_map(
            |(env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids)| ContainerEdits {
                env,
                device_nodes,
                net_devices,
                hooks,
                mounts,
                intel_rdt,
                additional_gids,
            },
        )
}

fn any_spec() -> impl Strategy<Value = Spec> {
    let annotations =
        || proptest::collection::btree_map("(null|true|[a-z0-9]{1,3}(/[a-z0-9]{1,3})?)", text(), 0..3);
    let device = (annotations(), edits()).prop_map(|(annotations, mut container_edits)| {
        if container_edits.is_empty() {
            container_edits.env.push("A=b".into());
        }
        Device {
            name: String::new(),
            annotations,
            container_edits,
        }
    });
    let devices = proptest::collection::btree_map("[a-z0-9]([a-z0-9.:_-]{0,5}[a-z0-9])?", device, 1..4);
    (
        "[a-z][a-z0-9.-]{0,5}[a-z0-9]/[a-z][a-z0-9.]{0,3}[a-z]",
        annotations(),
        devices,
        edits(),
    )
        .prop_map(|(kind, annotations, devices, container_edits)| Spec {
            version: String::new(),
            kind,
            annotations,
            devices: devices
                .into_iter()
                .map(|(name, device)| Device { name, ..device })
                .collect(),
            container_edits,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_spec_written_is_read_back_equal_at_its_minimum_version(mut spec in any_spec()) {
        let directory = TempDir::new().unwrap();
        let minimum = spec.minimum_version();
        let paths = ["x.json", "x.yaml"].map(|name| spec.write(directory.path(), name).unwrap());
        spec.version = minimum.to_string();
        prop_assert_eq!(spec.validate(), Ok(vec![]));
        for path in paths {
            let read = SpecFile::read(&path).unwrap();
            prop_assert_eq!(&read.spec, &spec, "{}", path.display());
            prop_assert!(read.warnings.is_empty());
        }
        if minimum > Version::OLDEST {
            spec.version = Version::OLDEST.to_string();
            let too_low = spec.validate();
            prop_assert!(too_low.is_err() || too_low.is_ok_and(|warnings| !warnings.is_empty()));
        }
    }
}
