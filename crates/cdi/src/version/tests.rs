use super::*;
use crate::spec::{Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice};

fn of_both(edits: &ContainerEdits) -> [Spec; 2] {
    let device = Device {
        name: "device0".into(),
        container_edits: edits.clone(),
        ..Device::default()
    };
    let whole = Spec {
        container_edits: edits.clone(),
        ..Spec::default()
    };
    [
        whole,
        Spec {
            devices: vec![device],
            ..Spec::default()
        },
    ]
}

fn node(host_path: &str) -> DeviceNode {
    DeviceNode {
        path: "/some/path".into(),
        host_path: host_path.into(),
        ..DeviceNode::default()
    }
}

fn rdt(rdt: IntelRdt) -> ContainerEdits {
    ContainerEdits {
        intel_rdt: Some(rdt),
        ..ContainerEdits::default()
    }
}

#[test]
fn edits_of_spec_and_device_need_the_version_that_brought_them() {
    let none = ContainerEdits::default();
    let typed = Mount {
        mount_type: "bind".into(),
        ..Mount::default()
    };
    let cases = [
        (none.clone(), Version::V0_3_0),
        (
            ContainerEdits {
                env: vec!["FOO=bar".into()],
                ..none.clone()
            },
            Version::V0_3_0,
        ),
        (
            ContainerEdits {
                hooks: vec![Hook::default()],
                ..none.clone()
            },
            Version::V0_3_0,
        ),
        (
            ContainerEdits {
                mounts: vec![Mount::default()],
                ..none.clone()
            },
            Version::V0_3_0,
        ),
        (
            ContainerEdits {
                mounts: vec![Mount::default(), typed.clone()],
                ..none.clone()
            },
            Version::V0_4_0,
        ),
        (
            ContainerEdits {
                device_nodes: vec![node("")],
                ..none.clone()
            },
            Version::V0_3_0,
        ),
        (
            ContainerEdits {
                device_nodes: vec![node("/host/path")],
                ..none.clone()
            },
            Version::V0_5_0,
        ),
        (
            ContainerEdits {
                device_nodes: vec![node("/some/path")],
                ..none.clone()
            },
            Version::V0_5_0,
        ),
        (
            ContainerEdits {
                device_nodes: vec![node("/h")],
                mounts: vec![typed],
                ..none.clone()
            },
            Version::V0_5_0,
        ),
        (rdt(IntelRdt::default()), Version::V0_7_0),
        (
            rdt(IntelRdt {
                clos_id: "foo".into(),
                ..IntelRdt::default()
            }),
            Version::V0_7_0,
        ),
        (
            ContainerEdits {
                additional_gids: vec![5],
                ..none.clone()
            },
            Version::V0_7_0,
        ),
        (
            ContainerEdits {
                additional_gids: vec![0],
                ..none.clone()
            },
            Version::V0_7_0,
        ),
        (
            rdt(IntelRdt {
                schemata: Some(vec!["L3:0=ff".into()]),
                ..IntelRdt::default()
            }),
            Version::V1_1_0,
        ),
        (
            rdt(IntelRdt {
                schemata: Some(vec![]),
                ..IntelRdt::default()
            }),
            Version::V1_1_0,
        ),
        (
            rdt(IntelRdt {
                enable_monitoring: true,
                ..IntelRdt::default()
            }),
            Version::V1_1_0,
        ),
        (
            ContainerEdits {
                net_devices: vec![NetDevice::default()],
                ..none
            },
            Version::V1_1_0,
        ),
    ];
    for (edits, version) in cases {
        for spec in of_both(&edits) {
            assert_eq!(spec.minimum_version(), version, "{spec:?}");
        }
    }
}

#[test]
fn names_and_annotations_need_a_version_too() {
    let annotated = |key: &str| [(key.to_owned(), "value".to_owned())].into();
    let device = |name: &str| Device {
        name: name.into(),
        ..Device::default()
    };
    let cases = [
        (
            Spec {
                kind: "vendor.com/class".into(),
                ..Spec::default()
            },
            Version::V0_3_0,
        ),
        (
            Spec {
                kind: "vendor.com/class.sub".into(),
                ..Spec::default()
            },
            Version::V0_6_0,
        ),
        (
            Spec {
                devices: vec![device("device0")],
                ..Spec::default()
            },
            Version::V0_3_0,
        ),
        (
            Spec {
                devices: vec![device("a"), device("0")],
                ..Spec::default()
            },
            Version::V0_5_0,
        ),
        (
            Spec {
                annotations: annotated("key"),
                ..Spec::default()
            },
            Version::V0_6_0,
        ),
        (
            Spec {
                devices: vec![Device {
                    annotations: annotated("key"),
                    ..device("device0")
                }],
                ..Spec::default()
            },
            Version::V0_6_0,
        ),
        (
            Spec {
                annotations: annotated("key"),
                container_edits: ContainerEdits {
                    device_nodes: vec![node("/h")],
                    ..Default::default()
                },
                ..Spec::default()
            },
            Version::V0_6_0,
        ),
    ];
    for (spec, version) in cases {
        assert_eq!(spec.minimum_version(), version, "{spec:?}");
    }
}

#[test]
fn a_host_path_counts_in_any_device_though_runtimes_overlook_it() {
    let edits = ContainerEdits {
        device_nodes: vec![node("/h")],
        ..ContainerEdits::default()
    };
    let [_, mut spec] = of_both(&edits);
    spec.devices.push(Device {
        name: "last".into(),
        ..Device::default()
    });
    assert_eq!(spec.minimum_version(), Version::V0_5_0);
    assert_eq!(spec.version_seen_by_runtimes(), Version::V0_3_0);
}

#[test]
fn versions_are_read_with_and_without_a_v() {
    for version in Version::ALL {
        assert_eq!(version.to_string().parse(), Ok(version));
        assert_eq!(format!("v{version}").parse(), Ok(version));
    }
    for text in [
        "",
        "v",
        "vv1.1.0",
        "V1.1.0",
        "0.1.0",
        "v0.2.0",
        "1.2.0",
        "1.1",
        "1.1.1",
        " 1.1.0",
        "not-a-version",
    ] {
        let refused = text.parse::<Version>();
        assert_eq!(
            refused,
            Err(UnknownVersion {
                version: text.to_owned()
            })
        );
    }
    assert_eq!(Version::ALL.last(), Some(&Version::NEWEST));
    assert!(Version::ALL.is_sorted());
}
