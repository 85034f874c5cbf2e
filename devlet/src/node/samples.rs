//! Sample answers of devlet's API, for tests.

use std::collections::BTreeMap;

use devlet_client::v1;

/// Returns a pod with one container, one device and one option of each kind.
pub(super) fn pod() -> v1::Pod {
    let options = v1::RunOptions {
        envs: BTreeMap::from([("GPU".to_owned(), "gpu-0".to_owned())]),
        mounts: vec![v1::Mount {
            container_path: "/usr/acme".into(),
            host_path: "/opt/acme".into(),
            read_only: true,
        }],
        device_nodes: vec![v1::DeviceNode {
            container_path: "/dev/gpu".into(),
            host_path: "/dev/null".into(),
            permissions: "rw".into(),
        }],
        annotations: BTreeMap::from([("acme.com/slot".to_owned(), "3".to_owned())]),
        cdi_devices: vec!["acme.com/gpu=gpu-0".into()],
    };
    let devices = v1::HeldDevices {
        resource: "acme.com/gpu".into(),
        ids: vec!["gpu-0".into()],
        pre_start_required: true,
        numa: vec![v1::NumaDevices {
            node: 1,
            ids: vec!["gpu-0".into()],
        }],
    };
    let container = v1::Container {
        name: "main".into(),
        kind: v1::ContainerKind::App.into(),
        devices: vec![devices],
        options: Some(options),
        conflicts: Vec::new(),
        claim_devices: vec![used_device()],
    };
    v1::Pod {
        id: Some(v1::PodId {
            uid: "u-1".into(),
            namespace: "default".into(),
            name: "job1".into(),
        }),
        source: v1::PodSource::Api.into(),
        before_reboot: false,
        labels: BTreeMap::from([("app".to_owned(), "train".to_owned())]),
        admitted_at_ms: 1_700_000_000_000,
        age_ms: 7_000,
        waiting: None,
        container_names: Vec::new(),
        containers: vec![container],
        claims: vec![v1::PodClaim {
            name: "mine".into(),
            claim: Some(claim()),
        }],
    }
}

pub(super) fn wait() -> v1::Wait {
    v1::Wait {
        claim: Some(id()),
        driver: "nic.acme.com".into(),
        text: "ResourceClaim default/gpu: DRA driver nic.acme.com is not connected".into(),
        reason: v1::WaitReason::NoDriver.into(),
        retry_at_ms: 0,
        failure: "it broke".into(),
    }
}

fn id() -> v1::ClaimId {
    v1::ClaimId {
        namespace: "default".into(),
        name: "gpu".into(),
        uid: "c-1".into(),
    }
}

pub(super) fn device() -> v1::ClaimDevice {
    v1::ClaimDevice {
        requests: vec!["big".into()],
        pool: "node-1".into(),
        device: "gpu-0".into(),
        share_id: None,
        cdi_devices: vec!["acme.com/gpu=gpu-0".into()],
        health: v1::DeviceHealth::Unhealthy.into(),
        health_message: "too hot".into(),
    }
}

pub(super) fn used_device() -> v1::UsedDevice {
    v1::UsedDevice {
        claim: "mine".into(),
        request: "big".into(),
        id: Some(id()),
        driver: "gpu.acme.com".into(),
        device: Some(device()),
    }
}

/// Returns a claim with two drivers; one has not completed.
pub(super) fn claim() -> v1::Claim {
    let prepared = v1::ClaimDriver {
        name: "gpu.acme.com".into(),
        state: v1::PreparationState::Prepared.into(),
        allocated: vec![v1::AllocatedDevice {
            request: "big/first".into(),
            pool: "node-1".into(),
            device: "gpu-0".into(),
            share_id: None,
            admin_access: true,
        }],
        skip_node_operations: vec!["NodeUnprepareResources".into()],
        not_prepared: Vec::new(),
        devices: vec![device()],
    };
    let pending = v1::ClaimDriver {
        name: "nic.acme.com".into(),
        state: v1::PreparationState::Pending.into(),
        ..Default::default()
    };
    v1::Claim {
        admitted_at_ms: 1_700_000_000_000,
        age_ms: 7_000,
        id: Some(id()),
        phase: v1::ClaimPhase::Preparing.into(),
        pods: vec![v1::PodId {
            uid: "u-1".into(),
            namespace: "default".into(),
            name: "job1".into(),
        }],
        last_pod: None,
        drivers: vec![prepared, pending],
        waits: vec![wait()],
    }
}

pub(super) fn refused() -> v1::RefusedDriver {
    v1::RefusedDriver {
        name: "gpu.acme.com".into(),
        socket: "/registry/gpu.sock".into(),
        reason: "user 7 may not serve gpu.acme.com".into(),
        hint: "ask".into(),
        refused_at_ms: 0,
        age_ms: 0,
        attempts: 3,
    }
}

pub(super) fn driver() -> v1::Driver {
    let plugin = |endpoint: &str, connected, serving| v1::DriverPlugin {
        endpoint: endpoint.into(),
        uid: 0,
        service: "v1.DRAPlugin".into(),
        service_reason: "the newest of v1beta1.DRAPlugin, v1.DRAPlugin".into(),
        health_service: "v1.DRAResourceHealth".into(),
        registered_at_ms: 1,
        age_ms: 7_000,
        connected,
        serving,
        connection: "7".into(),
    };
    v1::Driver {
        name: "gpu.acme.com".into(),
        plugins: vec![
            plugin("/run/old.sock", false, false),
            plugin("/run/new.sock", true, true),
        ],
        claims: 3,
        waits: vec![wait()],
        slices: vec![slice()],
        ..Default::default()
    }
}

/// Returns a slice that is to be deleted, and whose owner is gone.
pub(super) fn slice() -> v1::Slice {
    v1::Slice {
        name: "node-1-gpu-x7k2p".into(),
        driver: "gpu.acme.com".into(),
        pool: "node-1".into(),
        generation: 3,
        devices: 8,
        created_at_ms: 1_700_000_000_000,
        age_ms: 7_000,
        has_stale_owner: true,
        wiped_at_ms: Some(1_700_000_037_000),
        wiped_in_ms: 30_000,
    }
}

/// Returns a pod of an API server that waits for its admission.
pub(super) fn waiting_pod() -> v1::Pod {
    v1::Pod {
        id: Some(v1::PodId {
            uid: "u-2".into(),
            namespace: "team-a".into(),
            name: "job2".into(),
        }),
        source: v1::PodSource::Kubernetes.into(),
        waiting: Some(v1::PodWaiting {
            reason: "no device plugin offers acme.com/gpu".into(),
            since_ms: 1_700_000_000_000,
            age_ms: 9_000,
        }),
        ..v1::Pod::default()
    }
}
