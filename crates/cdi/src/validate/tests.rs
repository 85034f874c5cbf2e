use super::*;
use crate::spec::Device;

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

fn spec(kind: &str, version: &str) -> Spec {
    Spec {
        version: version.into(),
        kind: kind.into(),
        devices: vec![device("dev1")],
        ..Spec::default()
    }
}

fn good() -> Spec {
    spec("vendor.com/device", "1.1.0")
}

fn with_edits(container_edits: ContainerEdits) -> Spec {
    Spec {
        container_edits,
        ..good()
    }
}

fn edits() -> ContainerEdits {
    ContainerEdits::default()
}

fn node(path: &str, node_type: &str, permissions: &str) -> ContainerEdits {
    let (path, node_type, permissions) = (path.into(), node_type.into(), permissions.into());
    ContainerEdits {
        device_nodes: vec![DeviceNode {
            path,
            node_type,
            permissions,
            ..DeviceNode::default()
        }],
        ..edits()
    }
}

fn hook(hook_name: &str, path: &str, env: &[&str]) -> ContainerEdits {
    let env = env.iter().map(|&variable| variable.to_owned()).collect();
    let hook = Hook {
        hook_name: hook_name.into(),
        path: path.into(),
        env,
        ..Hook::default()
    };
    ContainerEdits {
        hooks: vec![hook],
        ..edits()
    }
}

fn mount(host_path: &str, container_path: &str) -> ContainerEdits {
    let (host_path, container_path) = (host_path.into(), container_path.into());
    ContainerEdits {
        mounts: vec![Mount {
            host_path,
            container_path,
            ..Mount::default()
        }],
        ..edits()
    }
}

fn clos(clos_id: &str) -> ContainerEdits {
    let rdt = IntelRdt {
        clos_id: clos_id.into(),
        ..IntelRdt::default()
    };
    ContainerEdits {
        intel_rdt: Some(rdt),
        ..edits()
    }
}

fn net(devices: &[(&str, &str)]) -> ContainerEdits {
    let net_devices = devices.iter().map(|&(host, name)| NetDevice {
        host_interface_name: host.into(),
        name: name.into(),
    });
    ContainerEdits {
        net_devices: net_devices.collect(),
        ..edits()
    }
}

fn env(variables: &[&str]) -> ContainerEdits {
    ContainerEdits {
        env: variables.iter().map(|&variable| variable.to_owned()).collect(),
        ..edits()
    }
}

#[test]
fn good_edits_are_valid_in_a_spec_and_in_a_device() {
    let mut cases = vec![
        env(&["FOO=BAR", "A=", "B==="]),
        node("/dev/null", "", ""),
        node("/dev/vendor", "b", "rwm"),
        node("/dev/vendor", "c", "none"),
        node("/dev/vendor", "u", "m"),
        node("/dev/vendor", "p", "rr"),
        mount("/dev/vendor-shared", "/dev/shared"),
        clos("foo.bar"),
        clos("/"),
        clos(""),
        clos(&"x".repeat(4095)),
        net(&[("eno3", "netdev0"), ("eno4", "netdev1")]),
    ];
    cases.extend(Hook::NAMES.map(|name| hook(name, "/usr/bin/hook", &["A=b"])));
    for edits in cases {
        assert_eq!(with_edits(edits.clone()).validate(), Ok(vec![]), "{edits:?}");
        let mut spec = good();
        spec.devices[0].container_edits = edits.clone();
        assert_eq!(spec.validate(), Ok(vec![]), "{edits:?}");
    }
    assert_eq!(
        with_edits(edits()).validate(),
        Ok(vec![]),
        "a spec may omit its own edits"
    );
}

#[test]
fn bad_edits_are_named_with_their_place() {
    let (path, host_path, container_path) = ("/dev/v".to_owned(), "/h".to_owned(), "/c".to_owned());
    let cases = [
        (
            env(&["A=b", ""]),
            InvalidEdits::Env {
                variable: String::new(),
            },
        ),
        (
            env(&["=foo"]),
            InvalidEdits::Env {
                variable: "=foo".into(),
            },
        ),
        (
            env(&["FOOBAR"]),
            InvalidEdits::Env {
                variable: "FOOBAR".into(),
            },
        ),
        (node("", "b", ""), InvalidEdits::NodePath),
        (
            node("/dev/v", "f", ""),
            InvalidEdits::NodeType {
                path: path.clone(),
                node_type: "f".into(),
            },
        ),
        (
            node("/dev/v", "b", "to land"),
            InvalidEdits::NodePermissions {
                path: path.clone(),
                permissions: "to land".into(),
            },
        ),
        (
            node("/dev/v", "b", "rxw"),
            InvalidEdits::NodePermissions {
                path,
                permissions: "rxw".into(),
            },
        ),
        (mount("", "/c"), InvalidEdits::MountHostPath { container_path }),
        (mount("/h", ""), InvalidEdits::MountContainerPath { host_path }),
        (
            hook("prestart", "", &[]),
            InvalidEdits::HookPath {
                name: "prestart".into(),
            },
        ),
        (
            hook("misCreateRuntime", "/b", &[]),
            InvalidEdits::HookName {
                name: "misCreateRuntime".into(),
            },
        ),
        (
            hook("poststart", "/b", &["=a"]),
            InvalidEdits::HookEnv {
                name: "poststart".into(),
                variable: "=a".into(),
            },
        ),
        (
            clos("foo/bar"),
            InvalidEdits::ClosId {
                clos_id: "foo/bar".into(),
            },
        ),
        (clos("."), InvalidEdits::ClosId { clos_id: ".".into() }),
        (clos(".."), InvalidEdits::ClosId { clos_id: "..".into() }),
        (
            clos("foo\nbar"),
            InvalidEdits::ClosId {
                clos_id: "foo\nbar".into(),
            },
        ),
        (
            clos(&"x".repeat(4096)),
            InvalidEdits::ClosId {
                clos_id: "x".repeat(4096),
            },
        ),
        (
            net(&[("", "n")]),
            InvalidEdits::NetHostInterface { name: "n".into() },
        ),
        (
            net(&[("e", "")]),
            InvalidEdits::NetName {
                host_interface: "e".into(),
            },
        ),
        (
            net(&[("e", "n"), ("e", "m")]),
            InvalidEdits::NetHostInterfaceTwice {
                host_interface: "e".into(),
            },
        ),
        (
            net(&[("e", "n"), ("f", "n")]),
            InvalidEdits::NetNameTwice { name: "n".into() },
        ),
    ];
    for (edits, source) in cases {
        let refused = with_edits(edits.clone()).validate();
        assert_eq!(
            refused,
            Err(InvalidSpec::Edits {
                place: Place::Spec,
                source: source.clone()
            })
        );
        let mut spec = good();
        spec.devices[0].container_edits = edits;
        let place = Place::Device("dev1".into());
        assert_eq!(spec.validate(), Err(InvalidSpec::Edits { place, source }));
    }
}

#[test]
fn a_kind_must_be_a_valid_vendor_and_class() {
    for kind in [
        "",
        "vendor.com",
        "vendor.com/",
        "/device",
        "vendor.com-/device",
        "vendor.com/device=",
        "v/c/d",
        "/",
    ] {
        assert!(
            matches!(spec(kind, "1.1.0").validate(), Err(InvalidSpec::Kind(_))),
            "{kind:?}"
        );
    }
}

#[test]
fn versions_must_be_known_and_high_enough() {
    for version in ["", "0.0.0", "0.1.0", "v0.2.0", "1.2.0", "1.0", "garbage"] {
        let refused = spec("vendor.com/device", version).validate();
        assert!(
            matches!(refused, Err(InvalidSpec::Version(_))),
            "{version:?}: {refused:?}"
        );
    }
    for version in ["0.3.0", "v0.3.0", "1.1.0", "v1.1.0"] {
        assert_eq!(
            spec("vendor.com/device", version).validate(),
            Ok(vec![]),
            "{version}"
        );
    }
    let gids = ContainerEdits {
        additional_gids: vec![1],
        ..edits()
    };
    let mut with_gids = Spec {
        container_edits: gids,
        ..spec("vendor.com/device", "0.6.0")
    };
    let too_low = InvalidSpec::VersionTooLow {
        stated: Version::V0_6_0,
        needed: Version::V0_7_0,
    };
    assert_eq!(with_gids.validate(), Err(too_low));
    for version in ["0.7.0", "0.8.0", "1.1.0"] {
        with_gids.version = version.into();
        assert_eq!(with_gids.validate(), Ok(vec![]));
    }
}

#[test]
fn a_version_that_only_runtimes_find_high_enough_is_a_warning() {
    let mut spec = spec("vendor.com/device", "0.3.0");
    spec.devices.push(device("dev2"));
    spec.devices[0].container_edits = mount("/h", "/c");
    spec.devices[0].container_edits.mounts[0].mount_type = "bind".into();
    let warning = Warning::VersionTooLow {
        stated: Version::V0_3_0,
        needed: Version::V0_4_0,
    };
    assert_eq!(spec.validate(), Ok(vec![warning]));
    spec.devices.swap(0, 1);
    let too_low = InvalidSpec::VersionTooLow {
        stated: Version::V0_3_0,
        needed: Version::V0_4_0,
    };
    assert_eq!(spec.validate(), Err(too_low));
}

#[test]
fn devices_must_exist_have_distinct_names_and_have_edits() {
    let none = Spec {
        devices: vec![],
        ..good()
    };
    assert_eq!(none.validate(), Err(InvalidSpec::NoDevices));
    let twice = Spec {
        devices: vec![device("dev1"), device("dev2"), device("dev1")],
        ..good()
    };
    assert_eq!(
        twice.validate(),
        Err(InvalidSpec::DuplicateDevice { name: "dev1".into() })
    );
    for name in ["", "a dev", "-dev", "dev-", "a/b"] {
        let misnamed = Spec {
            devices: vec![device(name)],
            ..good()
        };
        assert!(
            matches!(misnamed.validate(), Err(InvalidSpec::DeviceName(_))),
            "{name:?}"
        );
    }
    let empty = Spec {
        devices: vec![Device {
            name: "dev1".into(),
            ..Device::default()
        }],
        ..good()
    };
    assert_eq!(
        empty.validate(),
        Err(InvalidSpec::EmptyEdits { name: "dev1".into() })
    );
}

#[test]
fn annotation_keys_follow_the_rules_of_kubernetes() {
    let long = format!("a/{}", "x".repeat(64));
    let long_prefix = format!("{}/a", "x".repeat(254));
    let cases = [
        ("key", true),
        ("Example.COM/My_key.1-2", true),
        ("a", true),
        ("", false),
        ("/a", false),
        ("a/", false),
        ("a/b/c", false),
        ("-a", false),
        ("a_", false),
        ("b a d", false),
        ("exa_mple.com/a", false),
        ("example..com/a", false),
        ("-a.b/c", false),
        (&long, false),
        (&long_prefix, false),
    ];
    for (key, valid) in cases {
        let annotations: BTreeMap<_, _> = [(key.to_owned(), String::new())].into();
        let mut of_device = good();
        of_device.devices[0].annotations = annotations.clone();
        assert_eq!(of_device.validate().is_ok(), valid, "{key}");
        let of_spec = Spec {
            annotations,
            ..good()
        };
        let source = InvalidAnnotations::Key { key: key.to_owned() };
        let refused = Err(InvalidSpec::Annotations {
            place: Place::Spec,
            source,
        });
        assert_eq!(of_spec.validate(), if valid { Ok(vec![]) } else { refused });
    }
    let large = [("a".to_owned(), "x".repeat(256 * 1024))].into();
    let source = InvalidAnnotations::TooLarge {
        bytes: 256 * 1024 + 1,
    };
    let refused = Spec {
        annotations: large,
        ..good()
    }
    .validate();
    assert_eq!(
        refused,
        Err(InvalidSpec::Annotations {
            place: Place::Spec,
            source
        })
    );
}

#[test]
fn a_vendor_or_class_of_one_character_is_a_warning() {
    let warning = |part, value: &str| Warning::OneCharacter {
        part,
        value: value.into(),
    };
    assert_eq!(
        spec("v/gpu", "1.1.0").validate(),
        Ok(vec![warning(Part::Vendor, "v")])
    );
    assert_eq!(
        spec("one.com/d", "1.1.0").validate(),
        Ok(vec![warning(Part::Class, "d")])
    );
    assert_eq!(
        spec("v/d", "1.1.0").validate(),
        Ok(vec![warning(Part::Vendor, "v"), warning(Part::Class, "d")])
    );
}
