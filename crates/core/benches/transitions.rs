//! What a transition costs on a small node and on a full one.

use std::collections::BTreeMap;

use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{
    Advice, ContainerKind, ContainerRequest, Moment, Node, PodName, PodRequest, ReservationId, Source,
};
use divan::Bencher;

const GPU: &str = "acme.com/gpu";

fn main() {
    divan::main();
}

fn devices(count: usize) -> Vec<Device> {
    let device = |number: usize| Device {
        id: format!("GPU-{number:08x}-93b6-9ec0-c1c5-3dd8b5b1a1b6").into(),
        healthy: true,
        nodes: vec![(number % 2) as i64],
    };
    (0..count).map(device).collect()
}

fn offer(advises: bool) -> Offer {
    Offer {
        resource: GPU.into(),
        endpoint: "gpu.sock".into(),
        uid: 0,
        may_share: false,
        options: PluginOptions {
            pre_start_required: false,
            preferred_allocation: advises,
        },
    }
}

fn pod(number: usize, devices: usize) -> PodRequest {
    PodRequest {
        uid: format!("{number:08x}-5b7c-4a7a-9c0e-3f3a8f1f0000").into(),
        name: PodName {
            namespace: "default".into(),
            name: format!("job-{number}"),
        },
        source: Source::Api,
        fingerprint: 1,
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(GPU.into(), devices)]),
        }],
    }
}

fn reserve(node: &mut Node, request: &PodRequest) -> ReservationId {
    let reserved = node.reserve(request, &Advice::new());
    reserved.ok().flatten().unwrap_or_else(|| std::process::abort())
}

fn admit(node: &mut Node, request: &PodRequest) {
    let id = reserve(node, request);
    let answers = vec![(Answer::default(), false); 1];
    let written = node.begin_commit(id, request, answers);
    assert!(written.is_ok());
    node.finish_commit(id);
}

fn release(node: &mut Node, request: &PodRequest) {
    assert!(node.begin_release(&request.uid).is_ok());
    node.finish_release(&request.uid);
}

fn node(devices_offered: usize, pods: usize, advises: bool) -> Node {
    let mut node = Node::default();
    if let Ok((connection, _)) = node.plugin_connected(offer(advises), Moment(0)) {
        node.devices_listed(connection, DeviceList::new(devices(devices_offered)).0);
    }
    for number in 0..pods {
        admit(&mut node, &pod(number, 1));
    }
    node
}

/// One pod with one device comes and goes beside this many others, of 20,000 devices.
#[divan::bench(args = [0, 10_000])]
fn reserve_commit_release(bencher: Bencher, pods: usize) {
    let mut node = node(20_000, pods, false);
    let request = pod(1_000_000, 1);
    bencher.bench_local(|| {
        admit(&mut node, &request);
        release(&mut node, &request);
    });
}

/// One pod with one device is refused by its plugin.
#[divan::bench(args = [0, 10_000])]
fn reserve_abort(bencher: Bencher, pods: usize) {
    let mut node = node(20_000, pods, false);
    let request = pod(1_000_000, 1);
    bencher.bench_local(|| {
        let id = reserve(&mut node, &request);
        node.abort(id);
    });
}

/// One pod takes this many devices, of 20,000.
#[divan::bench(args = [10, 1_000, 10_000])]
fn reserve_commit_release_many(bencher: Bencher, wanted: usize) {
    let mut node = node(20_000, 0, false);
    let request = pod(1_000_000, wanted);
    bencher.bench_local(|| {
        admit(&mut node, &request);
        release(&mut node, &request);
    });
}

/// A pod that holds its device is admitted again.
#[divan::bench(args = [1, 10_000])]
fn admit_again(bencher: Bencher, pods: usize) {
    let mut node = node(20_000, pods, false);
    let request = pod(0, 1);
    bencher.bench_local(|| node.reserve(&request, &Advice::new()));
}

/// A plugin is to be asked which of nearly 20,000 devices it prefers.
#[divan::bench]
fn question(bencher: Bencher) {
    let node = node(20_000, 0, true);
    let request = pod(1_000_000, 1);
    bencher.bench_local(|| node.question(&request, &Advice::new()));
}

/// A list of 50,000 devices, from the message to the node, while this many are held.
#[divan::bench(args = [0, 10_000])]
fn list_of_50_000(bencher: Bencher, pods: usize) {
    let mut node = node(50_000, pods, false);
    let connection = node.serving(&GPU.into()).unwrap_or_else(|| std::process::abort());
    let mut round = 0;
    bencher
        .with_inputs(|| {
            round += 1;
            let mut devices = devices(50_000);
            devices[round % 50_000].healthy = false;
            devices
        })
        .bench_local_values(|devices| node.devices_listed(connection, DeviceList::new(devices).0));
}
