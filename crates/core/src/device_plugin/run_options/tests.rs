use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use super::{Answer, Conflict, ConflictKind, DeviceNode, Mount, RunOptions, merge};
use crate::pod::Allocation;
use crate::tests::{GPU, NIC};

fn allocation(resource: &str, options: RunOptions) -> Allocation {
    Allocation {
        container: "main".into(),
        kind: None,
        resource: resource.into(),
        devices: Vec::new(),
        nodes: Vec::new(),
        answer: Answer::new([], options),
        pre_start_required: false,
    }
}

fn env(value: &str) -> RunOptions {
    RunOptions {
        envs: [("MODE".to_string(), value.to_string())].into(),
        ..RunOptions::default()
    }
}

fn mount(container_path: &str, host_path: &str, read_only: bool) -> Mount {
    Mount {
        container_path: container_path.into(),
        host_path: host_path.into(),
        read_only,
    }
}

fn mounts(mounts: Vec<Mount>) -> RunOptions {
    RunOptions {
        mounts,
        ..RunOptions::default()
    }
}

fn device_node(host_path: &str, permissions: &str) -> RunOptions {
    RunOptions {
        device_nodes: vec![DeviceNode {
            container_path: "/dev/x".into(),
            host_path: host_path.into(),
            permissions: permissions.into(),
        }],
        ..RunOptions::default()
    }
}

fn cdi(names: &[&str]) -> RunOptions {
    RunOptions {
        cdi_devices: names.iter().map(ToString::to_string).collect(),
        ..RunOptions::default()
    }
}

fn conflict(kind: ConflictKind, key: &str) -> Vec<Conflict> {
    vec![Conflict {
        kind,
        key: key.into(),
        kept: GPU.into(),
        dropped: NIC.into(),
    }]
}

// TestDeviceRunContainerOptions, "empty response"
#[test]
fn empty_answers_give_empty_options() {
    let merged = merge(&[allocation(GPU, RunOptions::default())]);

    assert_eq!(merged, (RunOptions::default(), vec![]));
}

// TestDeviceRunContainerOptions, "cdi devices are handled", "cdi devices from multiple resources are handled"
// and "duplicate cdi devices are skipped"
#[test]
fn cdi_devices_are_named_once_in_the_order_of_resources() {
    let (merged, conflicts) = merge(&[
        allocation(NIC, cdi(&["v/c=3", "v/c=1"])),
        allocation(GPU, cdi(&["v/c=2", "v/c=1", "v/c=2"])),
    ]);

    assert_eq!(merged.cdi_devices, ["v/c=2", "v/c=1", "v/c=3"]);
    assert!(conflicts.is_empty());
}

// Spec §27.12: in the kubelet the winner is random.
#[test]
fn the_first_resource_by_name_wins_in_any_order_of_answers() {
    let (gpu, nic) = (allocation(GPU, env("gpu")), allocation(NIC, env("nic")));

    let merged = merge([&nic, &gpu]);

    assert_eq!(merged.0.envs["MODE"], "gpu");
    assert_eq!(merged.1, conflict(ConflictKind::Env, "MODE"));
    assert_eq!(merged, merge([&gpu, &nic]));
}

#[test]
fn equal_values_do_not_conflict() {
    let (merged, conflicts) = merge(&[
        allocation(GPU, mounts(vec![mount("/lib", "/usr/lib", true)])),
        allocation(NIC, mounts(vec![mount("/lib", "/usr/lib", true)])),
    ]);

    assert_eq!(merged.mounts.len(), 1);
    assert!(conflicts.is_empty());
}

#[test]
fn two_host_paths_for_one_mount_are_a_conflict() {
    let (merged, conflicts) = merge(&[
        allocation(GPU, mounts(vec![mount("/lib", "/gpu", true)])),
        allocation(
            NIC,
            mounts(vec![mount("/lib", "/nic", true), mount("/etc", "/nic", true)]),
        ),
    ]);

    let paths: Vec<&String> = merged.mounts.iter().map(|mount| &mount.host_path).collect();
    assert_eq!(paths, ["/gpu", "/nic"]);
    assert_eq!(conflicts, conflict(ConflictKind::Mount, "/lib"));
}

// The kubelet does not compare these.
#[test]
fn one_mount_to_be_written_to_and_not_is_a_conflict() {
    let (merged, conflicts) = merge(&[
        allocation(GPU, mounts(vec![mount("/lib", "/usr/lib", true)])),
        allocation(NIC, mounts(vec![mount("/lib", "/usr/lib", false)])),
    ]);

    assert!(merged.mounts[0].read_only);
    assert_eq!(conflicts, conflict(ConflictKind::Mount, "/lib"));
}

#[test]
fn two_host_paths_for_one_device_node_are_a_conflict() {
    let (merged, conflicts) = merge(&[
        allocation(GPU, device_node("/dev/gpu", "rw")),
        allocation(NIC, device_node("/dev/nic", "rw")),
    ]);

    assert_eq!(merged.device_nodes[0].host_path, "/dev/gpu");
    assert_eq!(conflicts, conflict(ConflictKind::DeviceNode, "/dev/x"));
}

#[test]
fn other_permissions_for_one_device_node_are_a_conflict() {
    let (merged, conflicts) = merge(&[
        allocation(GPU, device_node("/dev/x", "r")),
        allocation(NIC, device_node("/dev/x", "rwm")),
    ]);

    assert_eq!(merged.device_nodes[0].permissions, "r");
    assert_eq!(conflicts, conflict(ConflictKind::DeviceNode, "/dev/x"));
}

#[test]
fn two_values_for_one_annotation_are_a_conflict() {
    let annotation = |value: &str| RunOptions {
        annotations: [("key".to_string(), value.to_string())].into(),
        ..RunOptions::default()
    };

    let (merged, conflicts) = merge(&[
        allocation(GPU, annotation("gpu")),
        allocation(NIC, annotation("nic")),
    ]);

    assert_eq!(merged.annotations["key"], "gpu");
    assert_eq!(conflicts, conflict(ConflictKind::Annotation, "key"));
}

#[test]
fn a_variable_and_an_annotation_of_the_same_name_do_not_meet() {
    let annotation = RunOptions {
        annotations: [("MODE".to_string(), "other".to_string())].into(),
        ..RunOptions::default()
    };

    let (merged, conflicts) = merge(&[allocation(GPU, env("one")), allocation(NIC, annotation)]);

    assert_eq!((merged.envs.len(), merged.annotations.len()), (1, 1));
    assert!(conflicts.is_empty());
}

#[test]
fn the_order_within_an_answer_is_kept() {
    let listed = vec![mount("/b", "/1", false), mount("/a", "/2", false)];

    let (merged, _) = merge(&[allocation(GPU, mounts(listed.clone()))]);

    assert_eq!(merged.mounts, listed);
}

#[test]
fn an_answer_that_contradicts_itself_is_reported_too() {
    let listed = vec![mount("/a", "/1", false), mount("/a", "/2", false)];

    let (merged, conflicts) = merge(&[allocation(GPU, mounts(listed))]);

    assert_eq!(merged.mounts, [mount("/a", "/1", false)]);
    assert_eq!(
        (&conflicts[0].kept, &conflicts[0].dropped),
        (&GPU.into(), &GPU.into())
    );
}
