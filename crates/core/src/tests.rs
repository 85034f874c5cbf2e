//! Unit tests of the node, and their common helpers.

extern crate std;

mod admission;
mod advertised;
mod commit;
mod dra;
mod dra_history;
mod history;
mod inventory;
mod lease_histories;
mod leases;
mod preferences;
mod reuse;
mod views;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};

use crate::device_plugin::inventory::{Offer, PluginOptions};
use crate::device_plugin::list::{Device, DeviceList};
use crate::device_plugin::run_options::Answer;
use crate::{
    Allocation, ConnectionId, ContainerKind, ContainerRequest, DeviceId, Moment, Node, Pod, PodMetadata,
    PodName, PodRequest, Preferences, ReservationId, ReserveError, ResourceName, Source,
};

pub(crate) const GPU: &str = "acme.com/gpu";
pub(crate) const NIC: &str = "acme.com/nic";
pub(crate) const START: Moment = Moment(1_000_000);

pub(crate) fn healthy(id: &str) -> Device {
    healthy_on(id, &[])
}

pub(crate) fn healthy_on(id: &str, nodes: &[i64]) -> Device {
    Device {
        id: id.into(),
        healthy: true,
        nodes: nodes.to_vec(),
    }
}

pub(crate) fn unhealthy(id: &str) -> Device {
    Device {
        healthy: false,
        ..healthy(id)
    }
}

pub(crate) fn list_of(devices: Vec<Device>) -> DeviceList {
    DeviceList::new(devices).0
}

pub(crate) fn list(ids: &[&str]) -> DeviceList {
    list_of(ids.iter().map(|id| healthy(id)).collect())
}

pub(crate) fn offer(resource: &str, endpoint: &str) -> Offer {
    Offer {
        resource: resource.into(),
        endpoint: endpoint.into(),
        process: crate::ProcessId { uid: 0, pid: None },
        may_share: false,
        options: PluginOptions::default(),
    }
}

pub(crate) fn offer_with_advice(resource: &str, endpoint: &str) -> Offer {
    let mut offer = offer(resource, endpoint);
    offer.options.preferred_allocation = true;
    offer
}

pub(crate) fn connect(node: &mut Node, offer: Offer) -> ConnectionId {
    node.plugin_connected(offer, START).unwrap().0
}

/// A plugin that has listed its devices.
pub(crate) fn serve(node: &mut Node, resource: &str, endpoint: &str, ids: &[&str]) -> ConnectionId {
    let connection = connect(node, offer(resource, endpoint));
    node.devices_listed(connection, list(ids));
    connection
}

pub(crate) fn node_serving(resources: &[(&str, &[&str])]) -> Node {
    let mut node = Node::default();
    for (resource, ids) in resources {
        serve(&mut node, resource, &format!("{resource}.sock"), ids);
    }
    node
}

pub(crate) fn node_with_gpus(ids: &[&str]) -> Node {
    node_serving(&[(GPU, ids)])
}

fn container(name: &str, kind: ContainerKind, wants: &[(&str, usize)]) -> ContainerRequest {
    ContainerRequest {
        name: name.into(),
        kind,
        wants: wants
            .iter()
            .map(|&(resource, count)| (resource.into(), count))
            .collect(),
        claims: Vec::new(),
    }
}

pub(crate) fn init(name: &str, wants: &[(&str, usize)]) -> ContainerRequest {
    container(name, ContainerKind::Init, wants)
}

pub(crate) fn sidecar(name: &str, wants: &[(&str, usize)]) -> ContainerRequest {
    container(name, ContainerKind::Sidecar, wants)
}

pub(crate) fn app(name: &str, wants: &[(&str, usize)]) -> ContainerRequest {
    container(name, ContainerKind::App, wants)
}

pub(crate) fn named(name: &str) -> PodName {
    PodName {
        namespace: "default".into(),
        name: name.into(),
    }
}

/// A pod of the API with its UID as its name.
pub(crate) fn pod(uid: &str, containers: Vec<ContainerRequest>) -> PodRequest {
    PodRequest {
        uid: uid.into(),
        name: named(uid),
        source: Source::Api,
        fingerprint: 7,
        metadata: PodMetadata::default(),
        containers,
        claims: Vec::new(),
    }
}

/// A pod of one container that wants GPUs.
pub(crate) fn gpu_pod(uid: &str, count: usize) -> PodRequest {
    pod(uid, vec![app("main", &[(GPU, count)])])
}

/// A pod as a kubelet's file describes it.
pub(crate) fn imported(uid: &str, holdings: &[(&str, &str, &[&str])]) -> Pod {
    let allocation = |&(container, resource, ids): &(&str, &str, &[&str])| Allocation {
        container: container.into(),
        kind: None,
        resource: resource.into(),
        devices: ids.iter().map(|&id| id.into()).collect(),
        nodes: vec![(-1, ids.iter().map(|&id| id.into()).collect())],
        answer: Answer::default(),
        pre_start_required: false,
    };
    Pod {
        uid: uid.into(),
        name: PodName::default(),
        source: Source::Imported,
        fingerprint: 0,
        metadata: PodMetadata::default(),
        before_reboot: false,
        containers: Vec::new(),
        allocations: holdings.iter().map(allocation).collect(),
        claims: Vec::new(),
        claim_uses: Vec::new(),
    }
}

pub(crate) fn reserve(node: &mut Node, request: &PodRequest) -> ReservationId {
    node.reserve(request, &Preferences::new()).unwrap().unwrap()
}

/// Returns the reason of a refusal, which a check finds too.
pub(crate) fn refusal(node: &mut Node, request: &PodRequest) -> ReserveError {
    let refused = node.reserve(request, &Preferences::new()).unwrap_err();
    assert_eq!(node.check(request).as_ref(), Err(&refused));
    refused
}

/// As many answers as there are grants, all empty.
pub(crate) fn answers(node: &Node, id: ReservationId) -> Vec<(Answer, bool)> {
    let grants = node
        .reservation(id)
        .map_or(0, |reservation| reservation.grants.len());
    vec![(Answer::default(), false); grants]
}

pub(crate) fn begin_commit(node: &mut Node, id: ReservationId, request: &PodRequest) -> Pod {
    let answers = answers(node, id);
    node.begin_commit(id, request, answers).unwrap().pod
}

pub(crate) fn commit(node: &mut Node, id: ReservationId, request: &PodRequest) -> Pod {
    let pod = begin_commit(node, id, request);
    node.finish_commit(id);
    pod
}

/// Admits a pod and returns it.
pub(crate) fn admit(node: &mut Node, request: &PodRequest) -> Pod {
    let id = reserve(node, request);
    commit(node, id, request)
}

pub(crate) fn release(node: &mut Node, uid: &str) {
    node.begin_release(&uid.into()).unwrap();
    node.finish_release(&uid.into());
}

/// The devices that a reservation gives to a container.
pub(crate) fn granted(node: &Node, id: ReservationId, container: &str) -> Vec<String> {
    let grants = &node.reservation(id).unwrap().grants;
    let mine = grants
        .iter()
        .filter(|grant| grant.container.as_str() == container);
    mine.flat_map(|grant| grant.devices.iter().map(ToString::to_string))
        .collect()
}

/// The devices that a container holds.
pub(crate) fn held(pod: &Pod, container: &str) -> Vec<String> {
    pod.allocations_of(container)
        .flat_map(|allocation| allocation.devices.iter().map(ToString::to_string))
        .collect()
}

pub(crate) fn free(node: &Node, resource: &str) -> usize {
    node.capacity_of(&resource.into(), START).free
}

pub(crate) fn ids(names: &[&str]) -> Vec<DeviceId> {
    names.iter().map(|&name| name.into()).collect()
}

pub(crate) fn gpu() -> ResourceName {
    GPU.into()
}

/// Returns the whole state of the node for comparison, without the number of admissions.
pub(crate) fn everything(node: &Node) -> String {
    let ledger = &node.ledger;
    let pods = (&ledger.pods, &ledger.names, &ledger.releasing);
    let held = (
        &ledger.reservations,
        &ledger.in_flight,
        &ledger.held,
        &ledger.free,
    );
    let plugins = (&node.resources, &node.connections, &node.blocked);
    format!("{pods:?} {held:?} {plugins:?} {}", node.changes())
}

pub(crate) fn assert_sound(node: &Node) {
    node.ledger.check(&node.resources);
    node.dra.claims.check();
    node.check_members();
}
