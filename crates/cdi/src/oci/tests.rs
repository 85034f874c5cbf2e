use std::io;

use proptest::prelude::*;

use super::*;
use crate::spec::NetDevice;

fn no_host(_: &Path) -> Result<HostNode, LookupError> {
    Err(io::Error::from(io::ErrorKind::NotFound).into())
}

fn host_with(node_type: NodeType) -> impl Fn(&Path) -> Result<HostNode, LookupError> {
    move |path| match path.to_str() {
        Some("/dev/host") => Ok(HostNode {
            node_type,
            major: 7,
            minor: 8,
            mode: 0o640,
        }),
        _ => no_host(path),
    }
}

fn edits(value: Value) -> ContainerEdits {
    serde_json::from_value(value).unwrap()
}

fn applied(edits_of: Value, oci: Value) -> Value {
    applied_on(no_host, edits_of, oci)
}

fn applied_on(
    host: impl Fn(&Path) -> Result<HostNode, LookupError>,
    edits_of: Value,
    mut oci: Value,
) -> Value {
    edits(edits_of).apply_with(&mut oci, host).unwrap();
    oci
}

#[test]
fn empty_edits_change_nothing() {
    let oci = json!({ "ociVersion": "1.2.0", "process": null, "x": [1.5, null] });
    assert_eq!(applied(json!({}), oci.clone()), oci);
}

#[test]
fn variables_replace_the_last_of_the_same_name_in_place() {
    let env = |env: Value| json!({ "process": { "env": env } });
    for (edits, before, after) in [
        (json!(["BAR=foo"]), json!({}), env(json!(["BAR=foo"]))),
        (json!(["A=1", "A=2"]), json!({}), env(json!(["A=2"]))),
        (
            json!(["FOO=new"]),
            env(json!(["FOO=old", "B=1"])),
            env(json!(["FOO=new", "B=1"])),
        ),
        (
            json!(["A=9"]),
            env(json!(["A=1", "A=2", "B"])),
            env(json!(["A=1", "A=9", "B"])),
        ),
        (json!(["B=9", "A"]), env(json!(["B"])), env(json!(["B=9", "A"]))),
        (
            json!(["A=1"]),
            json!({ "process": { "env": null } }),
            env(json!(["A=1"])),
        ),
    ] {
        assert_eq!(applied(json!({ "env": edits }), before), after);
    }
}

#[test]
fn a_device_node_gets_a_cgroup_rule_with_its_permissions() {
    for (permissions, access) in [
        (None, Some("rwm")),
        (Some("r"), Some("r")),
        (Some("none"), None),
        (Some(""), Some("rwm")),
    ] {
        let mut node = json!({ "path": "/dev/v", "type": "b", "major": 10, "minor": 0 });
        if let Some(permissions) = permissions {
            node["permissions"] = json!(permissions);
        }
        let mut rule = json!({ "allow": true, "type": "b", "major": 10, "minor": 0 });
        if let Some(access) = access {
            rule["access"] = json!(access);
        }
        let expected = json!({ "linux": {
            "devices": [{ "path": "/dev/v", "type": "b", "major": 10, "minor": 0 }],
            "resources": { "devices": [rule] },
        }});
        assert_eq!(applied(json!({ "deviceNodes": [node] }), json!({})), expected);
    }
}

#[test]
fn only_block_and_character_devices_get_a_cgroup_rule() {
    for node_type in ["u", "p"] {
        let node = json!({ "path": "/dev/v", "type": node_type, "major": 10 });
        let oci = applied(json!({ "deviceNodes": [node] }), json!({}));
        assert_eq!(oci["linux"]["devices"][0]["type"], node_type);
        assert_eq!(oci["linux"].get("resources"), None);
    }
}

#[test]
fn a_device_node_replaces_one_of_the_same_path_at_the_end() {
    let oci = json!({ "linux": {
        "devices": [{ "path": "/dev/v", "x": 1 }, { "path": "/dev/null", "x": 2 }],
        "resources": { "devices": [{ "allow": false }], "memory": { "limit": 5 } },
    }});
    let node =
        json!({ "path": "/dev/v", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 0, "gid": 5 });
    let after = applied(json!({ "deviceNodes": [node] }), oci);
    let node =
        json!({ "path": "/dev/v", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 0, "gid": 5 });
    assert_eq!(
        after["linux"]["devices"],
        json!([{ "path": "/dev/null", "x": 2 }, node])
    );
    let rule = json!({ "allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm" });
    let resources = json!({ "devices": [{ "allow": false }, rule], "memory": { "limit": 5 } });
    assert_eq!(after["linux"]["resources"], resources);
}

#[test]
fn a_device_node_belongs_to_the_user_of_the_process_unless_that_is_root() {
    let node = json!({ "deviceNodes": [{ "path": "/dev/v", "type": "u", "major": 1 }] });
    let of = |uid: u32, gid: u32| json!({ "process": { "user": { "uid": uid, "gid": gid } } });
    let owned = applied(node.clone(), of(1000, 100));
    assert_eq!(
        (
            &owned["linux"]["devices"][0]["uid"],
            &owned["linux"]["devices"][0]["gid"]
        ),
        (&json!(1000), &json!(100))
    );
    let root = applied(node, of(0, 0));
    assert_eq!(
        root["linux"]["devices"][0],
        json!({ "path": "/dev/v", "type": "u", "major": 1, "minor": 0 })
    );
    let stated =
        json!({ "deviceNodes": [{ "path": "/dev/v", "type": "u", "major": 1, "uid": 0, "gid": 0 }] });
    assert_eq!(applied(stated, of(1000, 100))["linux"]["devices"][0]["uid"], 0);
}

#[test]
fn omitted_properties_of_a_device_node_come_from_the_host() {
    let full = json!({ "path": "/dev/c", "type": "b", "major": 7, "minor": 8, "fileMode": 0o640 });
    let cases = [
        (json!({ "path": "/dev/c", "hostPath": "/dev/host" }), full.clone()),
        (
            json!({ "path": "/dev/c", "hostPath": "/dev/host", "type": "b", "minor": 99 }),
            full,
        ),
        (
            json!({ "path": "/dev/host", "major": 3, "minor": 4 }),
            json!({ "path": "/dev/host", "type": "b", "major": 3, "minor": 4, "fileMode": 0o640 }),
        ),
        (
            json!({ "path": "/dev/host", "type": "c", "major": 3, "minor": 4 }),
            json!({ "path": "/dev/host", "type": "c", "major": 3, "minor": 4, "fileMode": 0o640 }),
        ),
        (
            json!({ "path": "/dev/host", "type": "c", "major": 3, "fileMode": 0 }),
            json!({ "path": "/dev/host", "type": "c", "major": 3, "minor": 0, "fileMode": 0 }),
        ),
    ];
    for (node, device) in cases {
        let oci = applied_on(
            host_with(NodeType::Block),
            json!({ "deviceNodes": [node] }),
            json!({}),
        );
        assert_eq!(oci["linux"]["devices"], json!([device]), "{node}");
    }
    let fifo = json!({ "deviceNodes": [{ "path": "/dev/host" }] });
    let oci = applied_on(host_with(NodeType::Fifo), fifo, json!({}));
    let device = json!({ "path": "/dev/host", "type": "p", "major": 0, "minor": 0, "fileMode": 0o640 });
    assert_eq!(oci, json!({ "linux": { "devices": [device] } }));
}

#[test]
fn a_host_that_cannot_complete_a_device_node_is_an_error() {
    let apply = |node: Value| {
        let mut oci = json!({});
        let refused = edits(json!({ "env": ["A=b"], "deviceNodes": [node] }))
            .apply_with(&mut oci, host_with(NodeType::Character));
        assert_eq!(oci, json!({}), "an error must not leave half of the edits");
        refused.unwrap_err().to_string()
    };
    assert_eq!(
        apply(json!({ "path": "/dev/none" })),
        "host device \"/dev/none\": entity not found"
    );
    apply(json!({ "path": "/dev/none", "type": "c" }));
    apply(json!({ "path": "/dev/none", "major": 5 }));
    assert_eq!(
        apply(json!({ "path": "/dev/c", "hostPath": "/dev/host", "type": "b" })),
        "host device \"/dev/host\" has type c, but \"b\" is stated"
    );
    apply(json!({ "path": "/dev/host", "type": "u" }));
}

#[test]
fn the_null_device_of_the_real_host_is_found() {
    let found = HostNode::lookup(Path::new("/dev/null")).unwrap();
    assert_eq!(
        (found.node_type, found.major, found.minor),
        (NodeType::Character, 1, 3)
    );
    assert!(matches!(
        HostNode::lookup(Path::new("/")),
        Err(LookupError::NotADevice)
    ));
    assert!(matches!(
        HostNode::lookup(Path::new("/dev/no such thing")),
        Err(LookupError::Io(_))
    ));
}

#[test]
fn mounts_replace_the_same_destination_and_are_sorted_by_depth() {
    let mount = |destination: &str, source: &str| json!({ "destination": destination, "source": source });
    let new = |path: &str| json!({ "hostPath": "new", "containerPath": path });
    let cases = [
        (vec![], vec![new("/dest/path")], vec![mount("/dest/path", "new")]),
        (
            vec![mount("/c/b", "1"), mount("/a/b/c", "2"), mount("/b", "3")],
            vec![new("/x/y")],
            vec![
                mount("/b", "3"),
                mount("/c/b", "1"),
                mount("/x/y", "new"),
                mount("/a/b/c", "2"),
            ],
        ),
        (
            vec![mount("/x/y", "1"), mount("/a/b", "2"), mount("/x/y", "3")],
            vec![new("/x/y")],
            vec![mount("/a/b", "2"), mount("/x/y", "3"), mount("/x/y", "new")],
        ),
        (
            vec![
                mount("/a/./b//c/../d/", "1"),
                mount("rel", "2"),
                mount("../../x", "3"),
                mount("/", "4"),
            ],
            vec![new("/..")],
            vec![
                mount("rel", "2"),
                mount("/", "4"),
                mount("/..", "new"),
                mount("../../x", "3"),
                mount("/a/./b//c/../d/", "1"),
            ],
        ),
    ];
    for (before, added, after) in cases {
        let oci = applied(json!({ "mounts": added }), json!({ "mounts": before }));
        assert_eq!(oci, json!({ "mounts": after }));
    }
    let unsorted = json!({ "mounts": [mount("/a/b", "1"), mount("/a", "2")] });
    assert_eq!(
        applied(json!({ "env": [] }), unsorted.clone()),
        unsorted,
        "no new mount, no new order"
    );
}

#[test]
fn a_bind_mount_into_a_user_namespace_maps_ids() {
    let user = json!({ "linux": { "namespaces": [{ "type": "pid" }, { "type": "user", "path": "/foo" }] } });
    for (mount_type, options, expected) in [
        ("bind", json!([]), json!(["idmap"])),
        ("bind", json!(["rbind"]), json!(["rbind", "ridmap"])),
        ("", json!(["ro", "bind"]), json!(["ro", "bind", "idmap"])),
        ("", json!(["rbind", "bind"]), json!(["rbind", "bind", "idmap"])),
        ("bind", json!(["bind", "ridmap"]), json!(["bind", "ridmap"])),
        ("tmpfs", json!(["ro"]), json!(["ro"])),
    ] {
        let mount =
            json!({ "hostPath": "/h", "containerPath": "/c", "type": mount_type, "options": options });
        let mapped = applied(json!({ "mounts": [mount] }), user.clone());
        assert_eq!(mapped["mounts"][0]["options"], expected);
        let plain = applied(json!({ "mounts": [mount] }), json!({}));
        assert_eq!(plain["mounts"][0].get("options").unwrap_or(&json!([])), &options);
    }
}

#[test]
fn all_six_hooks_are_appended() {
    let hooks: Vec<_> = Hook::NAMES
        .iter()
        .map(|name| json!({ "hookName": name, "path": "/bin/hook", "args": ["hook", name], "env": ["A=b"], "timeout": 5 }))
        .collect();
    let oci = applied(
        json!({ "hooks": hooks }),
        json!({ "hooks": { "prestart": [{ "path": "/old" }] } }),
    );
    for name in Hook::NAMES {
        let hook = json!({ "path": "/bin/hook", "args": ["hook", name], "env": ["A=b"], "timeout": 5 });
        let expected = if name == "prestart" {
            json!([{ "path": "/old" }, hook])
        } else {
            json!([hook])
        };
        assert_eq!(oci["hooks"][name], expected);
    }
    let mut oci = json!({});
    let refused = edits(json!({ "hooks": [{ "hookName": "never", "path": "/x" }] })).apply(&mut oci);
    assert!(matches!(refused, Err(ApplyError::HookName { name }) if name == "never"));
    assert_eq!(oci, json!({}));
}

#[test]
fn intel_rdt_replaces_an_earlier_configuration() {
    let rdt = json!({ "closID": "c", "l3CacheSchema": "L3:0=f", "memBwSchema": "MB:0=5",
        "schemata": ["L2:0=f"], "enableMonitoring": true });
    let oci = applied(
        json!({ "intelRdt": rdt }),
        json!({ "linux": { "intelRdt": { "closID": "old", "x": 1 } } }),
    );
    assert_eq!(oci, json!({ "linux": { "intelRdt": rdt } }));
    let empty = applied(
        json!({ "intelRdt": { "schemata": [], "enableMonitoring": false } }),
        json!({}),
    );
    assert_eq!(empty, json!({ "linux": { "intelRdt": {} } }));
}

#[test]
fn network_devices_are_set_by_host_interface() {
    let before =
        json!({ "linux": { "netDevices": { "eno3": { "name": "old" }, "eth9": { "name": "kept" } } } });
    let devices =
        json!([{ "hostInterfaceName": "eno3", "name": "n0" }, { "hostInterfaceName": "eno4", "name": "n1" }]);
    let oci = applied(json!({ "netDevices": devices }), before);
    let expected = json!({ "eno3": { "name": "n0" }, "eno4": { "name": "n1" }, "eth9": { "name": "kept" } });
    assert_eq!(oci["linux"]["netDevices"], expected);
}

#[test]
fn additional_groups_are_added_once_and_never_root() {
    for (gids, before, after) in [
        (json!([4, 5, 6]), json!(null), json!([4, 5, 6])),
        (json!([4, 5]), json!([5, 7]), json!([5, 7, 4])),
        (json!([4, 4]), json!([]), json!([4])),
        (json!([0, 1]), json!([0]), json!([0, 1])),
    ] {
        let oci = json!({ "process": { "user": { "uid": 1, "additionalGids": before } } });
        let expected = json!({ "process": { "user": { "uid": 1, "additionalGids": after } } });
        assert_eq!(applied(json!({ "additionalGids": gids }), oci), expected);
    }
    assert_eq!(applied(json!({ "additionalGids": [0] }), json!({})), json!({}));
}

#[test]
fn an_oci_spec_of_the_wrong_shape_is_an_error_that_names_the_field() {
    let all = json!({
        "env": ["A=b"], "additionalGids": [5], "intelRdt": {},
        "deviceNodes": [{ "path": "/dev/v", "type": "b", "major": 1 }],
        "mounts": [{ "hostPath": "/h", "containerPath": "/c" }],
        "hooks": [{ "hookName": "poststop", "path": "/x" }],
        "netDevices": [{ "hostInterfaceName": "e", "name": "n" }],
    });
    for (oci, field) in [
        (json!([]), "the root"),
        (json!({ "process": 5 }), "process"),
        (json!({ "process": { "env": {} } }), "process.env"),
        (json!({ "process": { "user": "me" } }), "process.user"),
        (
            json!({ "process": { "user": { "additionalGids": 5 } } }),
            "process.user.additionalGids",
        ),
        (json!({ "linux": [] }), "linux"),
        (json!({ "linux": { "devices": {} } }), "linux.devices"),
        (json!({ "linux": { "resources": true } }), "linux.resources"),
        (
            json!({ "linux": { "resources": { "devices": "all" } } }),
            "linux.resources.devices",
        ),
        (json!({ "linux": { "netDevices": [] } }), "linux.netDevices"),
        (json!({ "mounts": {} }), "mounts"),
        (json!({ "hooks": [] }), "hooks"),
        (json!({ "hooks": { "poststop": {} } }), "hooks.poststop"),
    ] {
        let mut edited = oci.clone();
        let refused = edits(all.clone()).apply_with(&mut edited, no_host);
        assert!(
            matches!(&refused, Err(ApplyError::OciSpec { field: found, .. }) if found == field),
            "{refused:?}"
        );
        assert_eq!(edited, oci);
    }
}

#[test]
fn fields_that_edits_do_not_touch_stay_unchanged() {
    let oci = json!({
        "ociVersion": "9.9", "future": { "a": [1, 2.5, null, -3, 18446744073709551615u64] },
        "process": { "env": ["P=1"], "user": { "uid": 7, "umask": 18, "x": "y" }, "cwd": "/", "rlimits": [{}] },
        "mounts": [{ "destination": "/proc", "uidMappings": [1], "new": true }],
        "linux": { "devices": [{ "path": "/dev/a", "new": 1 }], "resources": { "new": { "b": 1 } }, "new": [] },
        "hooks": { "future": [1], "prestart": [{ "path": "/p", "new": 1 }] },
    });
    let mut edited = oci.clone();
    let edits = edits(json!({
        "env": ["A=b"], "additionalGids": [5],
        "deviceNodes": [{ "path": "/dev/v", "type": "b", "major": 1 }],
        "mounts": [{ "hostPath": "/h", "containerPath": "/c/d" }],
        "hooks": [{ "hookName": "prestart", "path": "/x" }],
    }));
    edits.apply_with(&mut edited, no_host).unwrap();
    for list in ["/process/env", "/mounts", "/linux/devices", "/hooks/prestart"] {
        edited.pointer_mut(list).unwrap().as_array_mut().unwrap().pop();
    }
    edited["process"]["user"]
        .as_object_mut()
        .unwrap()
        .remove("additionalGids");
    edited["linux"]["resources"]
        .as_object_mut()
        .unwrap()
        .remove("devices");
    assert_eq!(edited, oci);
}

#[test]
fn appended_edits_come_after_and_their_rdt_wins() {
    let mut merged = edits(json!({ "env": ["A=1"], "additionalGids": [5], "intelRdt": { "closID": "one" } }));
    merged.append(&edits(json!({})));
    merged.append(&edits(json!({ "env": ["A=2"], "additionalGids": [5], "intelRdt": { "closID": "two" },
        "netDevices": [{ "hostInterfaceName": "e", "name": "n" }], "mounts": [{ "hostPath": "h", "containerPath": "c" }],
        "hooks": [{ "hookName": "prestart", "path": "p" }], "deviceNodes": [{ "path": "d" }] })));
    assert_eq!(merged.env, ["A=1", "A=2"]);
    assert_eq!(merged.additional_gids, [5, 5]);
    assert_eq!(merged.intel_rdt.unwrap().clos_id, "two");
    assert_eq!(
        merged.net_devices,
        [NetDevice {
            host_interface_name: "e".into(),
            name: "n".into()
        }]
    );
    assert_eq!(
        (merged.mounts.len(), merged.hooks.len(), merged.device_nodes.len()),
        (1, 1, 1)
    );
}

proptest! {
    #[test]
    fn depth_is_that_of_the_cleaned_path(path in "[/a.]{0,12}") {
        // The cleaned path, written out.
        let mut parts: Vec<&str> = Vec::new();
        for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
            if part == ".." && parts.last().is_some_and(|last| *last != "..") {
                parts.pop();
            } else if part != ".." || !path.starts_with('/') {
                parts.push(part);
            }
        }
        let cleaned = if path.starts_with('/') { format!("/{}", parts.join("/")) } else { parts.join("/") };
        prop_assert_eq!(depth(&path), cleaned.matches('/').count(), "{}", cleaned);
    }
}
