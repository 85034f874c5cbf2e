//! The content of the database as JSON, for people.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use devlet_core::dra::claims::{AllocatedDevice, Claim, Preparation, PreparationState, PreparedDevice};
use devlet_core::shield::Lease;
use devlet_core::{Allocation, ClaimUse, ContainerKind, DriverName, Pod, PodClaim, Source};
use serde_json::{Map, Value, json};

use super::kubelet_file::{Hash, KubeletFile};
use super::persisted_state::PersistedState;

pub(crate) fn to_json(persisted: &PersistedState) -> Value {
    let metadata = &persisted.metadata;
    let blocked = metadata.blocked.values();
    let blocked = blocked.map(|blocked| json!({ "file": blocked.file, "reason": blocked.reason }));
    let contested = metadata.contested.values();
    let contested = contested.map(|each| json!({ "file": each.file, "difference": each.difference }));
    let resources = metadata.resources.iter().map(|(name, record)| {
        let endpoint = (!record.endpoint.is_empty()).then_some(record.endpoint.as_str());
        let record = json!({ "endpoint": endpoint, "goneSince": record.gone_since });
        (name.as_str().to_owned(), record)
    });
    let mirrors = |file| {
        let mirrors = metadata.mirrors(file).0.iter();
        let mirrors = mirrors.map(|(number, hash)| json!({ "number": number, "sha256": hex(hash) }));
        mirrors.collect::<Vec<_>>()
    };
    json!({
        "schema": super::tables::SCHEMA,
        "bootId": metadata.boot_id,
        "nodeId": metadata.node_id,
        "cluster": metadata.cluster.as_ref().map(|cluster| json!({ "node": cluster.node, "server": cluster.server })),
        "starts": metadata.progress.starts,
        "contested": contested.collect::<Vec<_>>(),
        "blocked": blocked.collect::<Vec<_>>(),
        "claims": persisted.claims.values().map(claim).collect::<Vec<_>>(),
        "leases": persisted.leases.values().map(lease).collect::<Vec<_>>(),
        "pods": persisted.pods.values().map(pod).collect::<Vec<_>>(),
        "resources": resources.collect::<Map<_, _>>(),
        "mirrors": mirrors(KubeletFile::Devices),
        "claimMirrors": mirrors(KubeletFile::Claims),
    })
}

fn pod(pod: &Pod) -> Value {
    let source = match pod.source {
        Source::Api => "api",
        Source::Embedder => "embedder",
        Source::Imported => "imported",
    };
    json!({
        "uid": pod.uid.as_str(),
        "namespace": pod.name.namespace,
        "name": pod.name.name,
        "source": source,
        // A string, because some JSON readers do not support integers of this size.
        "fingerprint": format!("{:016x}", pod.fingerprint),
        "labels": pod.metadata.labels,
        "admittedAtMs": pod.metadata.admitted_at.map(|moment| moment.0),
        "beforeReboot": pod.before_reboot,
        "containers": pod.containers.iter().map(devlet_core::ContainerName::as_str).collect::<Vec<_>>(),
        "allocations": pod.allocations.iter().map(allocation).collect::<Vec<_>>(),
        "claims": pod.claims.iter().map(pod_claim).collect::<Vec<_>>(),
        "claimUses": pod.claim_uses.iter().map(claim_use).collect::<Vec<_>>(),
    })
}

fn pod_claim(claim: &PodClaim) -> Value {
    json!({
        "name": claim.name,
        "claimNamespace": claim.key.namespace,
        "claimName": claim.key.name,
        "uid": claim.uid.as_str(),
    })
}

fn claim_use(usage: &ClaimUse) -> Value {
    json!({
        "container": usage.container.as_str(),
        "claim": usage.claim,
        "request": usage.request,
    })
}

fn claim(claim: &Claim) -> Value {
    json!({
        "uid": claim.uid.as_str(),
        "namespace": claim.key.namespace,
        "name": claim.key.name,
        "pod": claim.pod.as_str(),
        "drivers": claim.preparations.iter().map(preparation).collect::<Vec<_>>(),
    })
}

fn lease(lease: &Lease) -> Value {
    let containers = lease.containers.iter();
    let containers =
        containers.map(|(id, process)| json!({ "id": id, "pid": process.pid, "started": process.started }));
    let devices = lease.devices.iter().map(devlet_core::DeviceId::as_str);
    json!({
        "name": lease.name.as_str(),
        "resource": lease.resource.as_str(),
        "devices": devices.collect::<Vec<_>>(),
        "answer": lease.answer.as_ref().map(|answer| STANDARD.encode(&answer.raw)),
        "grantedAtMs": lease.granted_at.0,
        "direct": lease.is_direct,
        "preStartRequired": lease.pre_start_required,
        "containers": containers.collect::<Vec<_>>(),
    })
}

fn preparation((driver, preparation): (&DriverName, &Preparation)) -> Value {
    let state = match preparation.state {
        PreparationState::Pending => "pending",
        PreparationState::Prepared => "prepared",
        PreparationState::Unprepared => "unprepared",
        PreparationState::Abandoned => "abandoned",
    };
    let allocated = preparation.allocated.as_ref();
    json!({
        "name": driver.as_str(),
        "state": state,
        "allocated": allocated.map(|devices| devices.iter().map(allocated_device).collect::<Vec<_>>()),
        "skippedOperations": preparation.skip,
        "devices": preparation.devices.iter().map(prepared_device).collect::<Vec<_>>(),
    })
}

fn allocated_device(device: &AllocatedDevice) -> Value {
    json!({
        "request": device.request,
        "pool": device.pool,
        "device": device.device,
        "shareId": device.share,
        "adminAccess": device.admin_access,
    })
}

fn prepared_device(device: &PreparedDevice) -> Value {
    json!({
        "requests": device.requests,
        "pool": device.pool,
        "device": device.device,
        "shareId": device.share,
        "cdiDevices": device.cdi_devices,
    })
}

fn allocation(allocation: &Allocation) -> Value {
    let kind = allocation.kind.map(|kind| match kind {
        ContainerKind::Init => "init",
        ContainerKind::Sidecar => "sidecar",
        ContainerKind::App => "app",
    });
    let texts =
        |ids: &[devlet_core::DeviceId]| ids.iter().map(|id| id.as_str().to_owned()).collect::<Vec<_>>();
    let nodes = allocation
        .nodes
        .iter()
        .map(|(node, ids)| (node.to_string(), json!(texts(ids))));
    json!({
        "container": allocation.container.as_str(),
        "kind": kind,
        "resource": allocation.resource.as_str(),
        "devices": texts(&allocation.devices),
        "numaNodes": nodes.collect::<Map<_, _>>(),
        "answer": STANDARD.encode(&allocation.answer.raw),
        "preStartRequired": allocation.pre_start_required,
    })
}

fn hex(hash: &Hash) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
