//! The number of syncs, counted by strace: one for a single admission, one for a removal, fewer than one per admission if
//! many come together, and none for a read. A claim needs one more before its driver is called, and one more when it has
//! been unprepared.
//!
//! The test runs itself again under strace. Between the cases it looks for files with the name of the next case.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use devlet_agent::store::{OpenOptions, Store, answer};
use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::dra::claims::{AllocatedClaim, AllocatedDevice, AllocationResult, ClaimKey};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::{
    ClaimReference, ClaimRequest, ContainerKind, ContainerRequest, PodMetadata, PodName, PodRequest,
    Preferences, Source,
};
use devlet_testkit::skip;

const GPU: &str = "acme.com/gpu";
const DRIVER: &str = "gpu.acme.com";
const TOGETHER: usize = 64;

fn request(uid: &str) -> PodRequest {
    PodRequest {
        uid: uid.into(),
        name: PodName {
            namespace: "default".into(),
            name: uid.into(),
        },
        source: Source::Api,
        fingerprint: 1,
        metadata: PodMetadata::default(),
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(GPU.into(), 1)]),
            claims: Vec::new(),
        }],
        claims: Vec::new(),
    }
}

async fn admit(store: Store, uid: String) {
    let request = request(&uid);
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    let answers = vec![(answer(&b""[..]).unwrap(), false)];
    held.commit(&request, answers).await.unwrap();
}

/// Returns a request of a pod with a device and a claim.
fn claiming(uid: &str) -> PodRequest {
    let mut request = request(uid);
    request.containers[0].claims.push(ClaimReference {
        claim: "claim".into(),
        request: None,
    });
    let key = ClaimKey {
        namespace: "default".into(),
        name: uid.into(),
    };
    let result = AllocationResult {
        driver: DRIVER.into(),
        device: AllocatedDevice {
            request: "req".into(),
            pool: "pool".into(),
            device: "device".into(),
            share: None,
            admin_access: false,
        },
        skip: Vec::new(),
    };
    request.claims.push(ClaimRequest {
        name: "claim".into(),
        claim: AllocatedClaim::new(key, uid.into(), [result]),
    });
    request
}

/// Writes a line with this name into the trace.
fn mark(name: &str) {
    let _ = Path::new("/devlet-test").join(name).exists();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "runs under strace, started by the other test"]
async fn traced() {
    let root = tempfile::tempdir().unwrap();
    let options = OpenOptions {
        mirror_interval: Duration::from_secs(3600),
        ..OpenOptions::new(root.path().join("state.redb"), "boot")
    };
    let (store, _) = Store::open(options).unwrap();
    let devices = (0..TOGETHER + 2).map(|number| Device {
        id: format!("{number:03}").into(),
        healthy: true,
        nodes: Vec::new(),
    });
    let (list, _) = DeviceList::new(devices.collect());
    let now = store.now();
    store.update(|node| {
        let offer = Offer {
            resource: GPU.into(),
            endpoint: "/run/plugin.sock".into(),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            options: PluginOptions::default(),
        };
        let (connection, _) = node.plugin_connected(offer, now).unwrap();
        node.devices_listed(connection, list);
        let offer = DriverOffer {
            driver: DRIVER.into(),
            endpoint: "/run/driver.sock".into(),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            service: "v1.DRAPlugin".into(),
            service_reason: String::new(),
            health_service: None,
        };
        let (connection, _) = node.driver_registered(offer, now).unwrap();
        node.link_up(connection, now);
    });
    // The first change also writes the known resources.
    admit(store.clone(), "first".into()).await;
    store.release(&"first".into()).await.unwrap();
    mark("lone");
    admit(store.clone(), "lone".into()).await;
    mark("together");
    let admissions = (0..TOGETHER).map(|number| tokio::spawn(admit(store.clone(), format!("pod-{number}"))));
    for admission in admissions.collect::<Vec<_>>() {
        admission.await.unwrap();
    }
    mark("removal");
    store.release(&"pod-0".into()).await.unwrap();
    mark("removed");
    assert!(!store.record_claims().await.unwrap());
    mark("claim");
    let claiming = claiming("claiming");
    let held = store.hold(&claiming, &Preferences::new()).unwrap().unwrap();
    held.intent().await.unwrap();
    mark("intended");
    let calls = store.update(|node| node.prepare_calls(held.id(), now));
    for call in calls {
        let results = call.claims.into_iter().map(|(uid, _)| (uid, Ok(Vec::new())));
        store.update(|node| node.prepared(call.id, results.collect(), |_| true, now));
    }
    let answers = vec![(answer(&b""[..]).unwrap(), false)];
    held.commit(&claiming, answers).await.unwrap();
    mark("claim-removal");
    store.release(&claiming.uid).await.unwrap();
    mark("claim-unprepared");
    for call in store.update(|node| node.unprepare_calls(&claiming.uid, now)) {
        let results = call.claims.into_iter().map(|(uid, _)| (uid, Ok(())));
        store.update(|node| node.unprepared(call.id, results.collect(), now));
    }
    assert!(store.record_claims().await.unwrap());
    mark("questions");
    assert_eq!(store.read(|node| node.pods().count()), TOGETHER);
    assert!(
        store
            .hold(&request("lone"), &Preferences::new())
            .unwrap()
            .is_none()
    );
    store.dump().await.unwrap();
    mark("end");
}

#[test]
fn syncs_as_the_kernel_sees_them() {
    let can_trace = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    if !can_trace.is_ok_and(|output| output.status.success()) {
        return skip("strace is not installed, or cannot trace processes");
    }
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let traced = Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-e",
            "trace=fsync,fdatasync,sync_file_range,syncfs,sync,msync,statx,stat,newfstatat",
        ])
        .arg("-o")
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "store_syncs::traced", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    assert!(
        traced.status.success(),
        "{}",
        String::from_utf8_lossy(&traced.stdout)
    );

    let trace = std::fs::read_to_string(trace).unwrap();
    let mut syncs: BTreeMap<&str, usize> = BTreeMap::new();
    let mut place = "start";
    for line in trace.lines() {
        if let Some((_, after)) = line.split_once("/devlet-test/") {
            place = after.split('"').next().unwrap();
        }
        // A call that another thread interrupts is in the trace twice.
        if line.contains("sync") && !line.contains("resumed>") {
            *syncs.entry(place).or_default() += 1;
        }
    }
    let count = |place: &str| syncs.get(place).copied().unwrap_or(0);
    assert!(count("start") > 0, "the trace works: {syncs:?}");
    assert_eq!(count("lone"), 1, "{syncs:?}");
    assert!((1..TOGETHER).contains(&count("together")), "{syncs:?}");
    assert_eq!(count("removal"), 1, "{syncs:?}");
    assert_eq!(count("removed"), 0, "{syncs:?}");
    assert_eq!(count("claim"), 1, "{syncs:?}");
    assert_eq!(count("intended"), 1, "{syncs:?}");
    assert_eq!(count("claim-removal"), 1, "{syncs:?}");
    assert_eq!(count("claim-unprepared"), 1, "{syncs:?}");
    assert_eq!(count("questions"), 0, "{syncs:?}");
}
