//! Converts resources, devices, plugins and pods into messages of the API.

use devlet_client::v1;
use devlet_core::device_plugin::inventory::LastPlugin;
use devlet_core::device_plugin::rejections::Rejected;
use devlet_core::device_plugin::run_options::{self, Conflict, ConflictKind, RunOptions};
use devlet_core::{
    Allocation, Availability, ContainerKind, ContainerName, ContainerRequest, Moment, Node, PluginView, Pod,
    PodUid, ResourceName, ResourceView, Source,
};

use super::convert_claims;

pub(super) fn resources(node: &Node, now: Moment) -> Vec<v1::Resource> {
    node.resources(now)
        .into_iter()
        .map(|view| resource(node, view, now))
        .collect()
}

fn resource(node: &Node, view: ResourceView, now: Moment) -> v1::Resource {
    let (state, last) = match view.availability {
        Availability::Serving => (v1::ResourceState::Serving, None),
        Availability::NotListed => (v1::ResourceState::NotListed, None),
        Availability::Gone(last) => (v1::ResourceState::Gone, last),
    };
    let plugins = view.plugins.iter().filter_map(|id| node.plugin(*id));
    v1::Resource {
        capacity: number(view.capacity.capacity),
        allocatable: number(view.capacity.allocatable),
        held: number(view.capacity.held),
        free: number(view.capacity.free),
        state: state.into(),
        plugins: plugins.map(|plugin| plugin.endpoint).collect(),
        last_plugin: last.map(|last| last_plugin(last, now)),
        name: view.name.to_string(),
    }
}

pub(super) fn last_plugin(last: LastPlugin, now: Moment) -> v1::LastPlugin {
    v1::LastPlugin {
        gone_since_ms: last.gone_since.0,
        gone_for_ms: age(last.gone_since, now),
        endpoint: last.endpoint,
    }
}

/// Returns the milliseconds from `since` to `now`; 0 if the clock was set back in an earlier run.
pub(super) fn age(since: Moment, now: Moment) -> u64 {
    now.0.saturating_sub(since.0)
}

pub(super) fn number(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

pub(super) fn devices(node: &Node, resource: &ResourceName) -> Vec<v1::Device> {
    let device = |view: devlet_core::DeviceView| v1::Device {
        resource: view.resource.to_string(),
        id: view.id.to_string(),
        listed: view.listed,
        healthy: view.healthy,
        numa_nodes: view.nodes,
        holders: view.holders.iter().map(|uid| pod_id(node, uid)).collect(),
        dra: None,
    };
    node.devices(resource).into_iter().map(device).collect()
}

pub(super) fn plugin(view: PluginView, now: Moment) -> v1::Plugin {
    v1::Plugin {
        resource: view.resource.to_string(),
        endpoint: view.endpoint,
        uid: view.uid,
        pre_start_required: view.options.pre_start_required,
        preferred_allocation: view.options.preferred_allocation,
        connected_at_ms: view.connected_at.0,
        age_ms: age(view.connected_at, now),
        devices: view.devices.map(number),
        in_force: view.is_active,
        connection: view.connection.to_string(),
        rejection: None,
    }
}

/// Converts a plugin that was rejected when it registered.
pub(super) fn rejected_plugin(rejected: &Rejected, now: Moment) -> v1::Plugin {
    let Rejected {
        rejection,
        at,
        attempts,
    } = rejected;
    v1::Plugin {
        resource: rejection.resource.clone(),
        endpoint: rejection.endpoint.clone(),
        // The highest number stands for an unknown user.
        uid: rejection.uid.unwrap_or(u32::MAX),
        rejection: Some(v1::PluginRejection {
            reason: rejection.reason.clone(),
            rejected_at_ms: at.0,
            attempts: *attempts,
            pid: rejection.pid,
        }),
        age_ms: age(*at, now),
        ..v1::Plugin::default()
    }
}

/// Returns the id of a pod that is recorded, in admission, or gone with claims left.
pub(super) fn pod_id(node: &Node, uid: &PodUid) -> v1::PodId {
    let name = node.name_of(uid).cloned().unwrap_or_default();
    v1::PodId {
        uid: uid.to_string(),
        namespace: name.namespace,
        name: name.name,
    }
}

fn id_of(pod: &Pod) -> v1::PodId {
    v1::PodId {
        uid: pod.uid.to_string(),
        namespace: pod.name.namespace.clone(),
        name: pod.name.name.clone(),
    }
}

/// Converts a pod with the containers that hold devices or use claims.
pub(super) fn pod(node: &Node, pod: &Pod, now: Moment) -> v1::Pod {
    let has_any =
        |name: &&str| pod.allocations_of(name).next().is_some() || pod.claim_uses_of(name).next().is_some();
    let mut names: Vec<&str> = pod.containers.iter().map(ContainerName::as_str).collect();
    names.retain(has_any);
    // Only the containers with devices are known of an imported pod. Allocations of one container are adjacent.
    let mut last = "";
    for allocation in pod.allocations.iter().filter(|_| pod.containers.is_empty()) {
        if allocation.container.as_str() != last {
            last = allocation.container.as_str();
            names.push(last);
        }
    }
    let containers = names.into_iter().map(|name| container_of(node, pod, name, now));
    message(node, pod, containers.collect(), now)
}

/// Converts a pod with all containers of its request.
pub(super) fn pod_with(node: &Node, pod: &Pod, requests: &[ContainerRequest], now: Moment) -> v1::Pod {
    let container = |request: &ContainerRequest| v1::Container {
        kind: kind(Some(request.kind)).into(),
        ..container_of(node, pod, request.name.as_str(), now)
    };
    message(node, pod, requests.iter().map(container).collect(), now)
}

fn message(node: &Node, pod: &Pod, containers: Vec<v1::Container>, now: Moment) -> v1::Pod {
    let claims = pod.claims.iter().filter_map(|each| {
        let claim = convert_claims::claim(node, &node.claim(&each.uid)?, now);
        Some(v1::PodClaim {
            name: each.name.clone(),
            claim: Some(claim),
        })
    });
    let source = match pod.source {
        Source::Api => v1::PodSource::Api,
        Source::Embedder => v1::PodSource::Embedder,
        Source::Imported => v1::PodSource::Imported,
    };
    v1::Pod {
        id: Some(id_of(pod)),
        source: source.into(),
        before_reboot: pod.before_reboot,
        containers,
        container_names: pod.containers.iter().map(ToString::to_string).collect(),
        claims: claims.collect(),
        labels: pod.metadata.labels.clone(),
        admitted_at_ms: pod.metadata.admitted_at.map_or(0, |moment| moment.0),
        age_ms: pod.metadata.admitted_at.map_or(0, |moment| age(moment, now)),
        waiting: None,
    }
}

fn container_of(node: &Node, pod: &Pod, name: &str, now: Moment) -> v1::Container {
    let (options, conflicts) = crate::run_options::of_container(node, &pod.uid, name);
    container(node, &pod.uid, name, options, conflicts, now)
}

/// Converts a container of a pod with these options.
pub(super) fn container(
    node: &Node,
    pod: &PodUid,
    name: &str,
    options: RunOptions,
    conflicts: Vec<Conflict>,
    now: Moment,
) -> v1::Container {
    let claim_devices = node.claimed_devices(pod, name, now);
    let pod = node.pod(pod);
    let held = pod
        .into_iter()
        .flat_map(|pod| &pod.allocations)
        .filter(|allocation| allocation.container.as_str() == name)
        .collect();
    v1::Container {
        claim_devices: claim_devices
            .into_iter()
            .map(convert_claims::used_device)
            .collect(),
        ..container_with(name, held, options, conflicts)
    }
}

/// Converts a container with these devices and options.
pub(super) fn container_with(
    name: &str,
    mut held: Vec<&Allocation>,
    options: RunOptions,
    conflicts: Vec<Conflict>,
) -> v1::Container {
    held.sort_by(|one, other| one.resource.cmp(&other.resource));
    let conflict = |conflict: Conflict| v1::Conflict {
        what: contested(conflict.kind).to_owned(),
        key: conflict.key,
        kept: conflict.kept.to_string(),
        dropped: conflict.dropped.to_string(),
    };
    v1::Container {
        name: name.to_owned(),
        kind: kind(held.first().and_then(|allocation| allocation.kind)).into(),
        devices: held.into_iter().map(held_devices).collect(),
        options: Some(run_options_message(options)),
        conflicts: conflicts.into_iter().map(conflict).collect(),
        claim_devices: Vec::new(),
    }
}

fn kind(kind: Option<ContainerKind>) -> v1::ContainerKind {
    match kind {
        None => v1::ContainerKind::Unspecified,
        Some(ContainerKind::Init) => v1::ContainerKind::Init,
        Some(ContainerKind::Sidecar) => v1::ContainerKind::Sidecar,
        Some(ContainerKind::App) => v1::ContainerKind::App,
    }
}

fn held_devices(allocation: &Allocation) -> v1::HeldDevices {
    let texts = |ids: &[devlet_core::DeviceId]| ids.iter().map(ToString::to_string).collect();
    let numa = allocation.nodes.iter().map(|(node, ids)| v1::NumaDevices {
        node: *node,
        ids: texts(ids),
    });
    v1::HeldDevices {
        resource: allocation.resource.to_string(),
        ids: texts(&allocation.devices),
        pre_start_required: allocation.pre_start_required,
        numa: numa.collect(),
    }
}

fn run_options_message(options: RunOptions) -> v1::RunOptions {
    let mount = |mount: run_options::Mount| v1::Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    };
    let node = |node: run_options::DeviceNode| v1::DeviceNode {
        container_path: node.container_path,
        host_path: node.host_path,
        permissions: node.permissions,
    };
    v1::RunOptions {
        envs: options.envs,
        mounts: options.mounts.into_iter().map(mount).collect(),
        device_nodes: options.device_nodes.into_iter().map(node).collect(),
        annotations: options.annotations,
        cdi_devices: options.cdi_devices,
    }
}

pub(super) fn contested(what: ConflictKind) -> &'static str {
    match what {
        ConflictKind::Env => "env",
        ConflictKind::Mount => "mount",
        ConflictKind::DeviceNode => "deviceNode",
        ConflictKind::Annotation => "annotation",
    }
}
