//! Nodes for benchmarks.

use std::collections::BTreeMap;

use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{
    ContainerKind, ContainerRequest, Moment, Node, PodMetadata, PodName, PodRequest, Preferences,
    ReservationId, Source,
};

pub(crate) const GPU: &str = "acme.com/gpu";

pub(crate) fn devices(count: usize) -> Vec<Device> {
    let device = |number: usize| Device {
        id: format!("GPU-{number:08x}-93b6-9ec0-c1c5-3dd8b5b1a1b6").into(),
        healthy: true,
        nodes: vec![(number % 2) as i64],
    };
    (0..count).map(device).collect()
}

pub(crate) fn offer(prefers: bool) -> Offer {
    Offer {
        resource: GPU.into(),
        endpoint: "gpu.sock".into(),
        process: devlet_core::ProcessId { uid: 0, pid: None },
        may_share: false,
        options: PluginOptions {
            pre_start_required: false,
            preferred_allocation: prefers,
        },
    }
}

pub(crate) fn pod(number: usize, devices: usize) -> PodRequest {
    PodRequest {
        uid: format!("{number:08x}-5b7c-4a7a-9c0e-3f3a8f1f0000").into(),
        name: PodName {
            namespace: "default".into(),
            name: format!("job-{number}"),
        },
        source: Source::Api,
        fingerprint: 1,
        metadata: PodMetadata::default(),
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(GPU.into(), devices)]),
            claims: Vec::new(),
        }],
        claims: Vec::new(),
    }
}

pub(crate) fn reserve(node: &mut Node, request: &PodRequest) -> ReservationId {
    let reserved = node.reserve(request, &Preferences::new());
    reserved.ok().flatten().unwrap_or_else(|| std::process::abort())
}

pub(crate) fn admit(node: &mut Node, request: &PodRequest) {
    let id = reserve(node, request);
    let answers = vec![(Answer::default(), false); 1];
    let written = node.begin_commit(id, request, answers);
    assert!(written.is_ok());
    node.finish_commit(id);
}

pub(crate) fn release(node: &mut Node, request: &PodRequest) {
    assert!(node.begin_release(&request.uid).is_ok());
    node.finish_release(&request.uid);
}

pub(crate) fn node(devices_offered: usize, pods: usize, prefers: bool) -> Node {
    let mut node = Node::default();
    if let Ok((connection, _)) = node.plugin_connected(offer(prefers), Moment(0)) {
        node.devices_listed(connection, DeviceList::new(devices(devices_offered)).0);
    }
    for number in 0..pods {
        admit(&mut node, &pod(number, 1));
    }
    node
}
