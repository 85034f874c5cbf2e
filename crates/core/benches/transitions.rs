//! Run times of transitions on a small and a full node.

mod nodes;

use devlet_core::Preferences;
use devlet_core::device_plugin::list::DeviceList;
use divan::Bencher;

use nodes::{GPU, admit, devices, node, pod, release, reserve};

fn main() {
    divan::main();
}

/// One pod with one device is admitted and removed, with this many other pods and 20,000 devices.
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
    bencher.bench_local(|| node.reserve(&request, &Preferences::new()));
}

/// A preference query with nearly 20,000 devices is built.
#[divan::bench]
fn query(bencher: Bencher) {
    let mut node = node(20_000, 0, true);
    let request = pod(1_000_000, 1);
    bencher.bench_local(|| node.reserve_or_query(&request, &Preferences::new()));
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
