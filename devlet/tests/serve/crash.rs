//! `kill -9` under load: after each restart every answered change is there, and no device has two holders.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use devlet_client::{Client, Code, Status, locate, v1};
use devlet_testkit::{Device, Door, Event, Plugin, Script};
use tokio::sync::watch;

use crate::common::{Daemon, root};

const WORKERS: usize = 8;
const PODS_PER_WORKER: usize = 2;
/// Enough for all pods at once, so that every admission succeeds.
const DEVICES: usize = 64;
const GPU: &str = "acme.com/gpu";

/// Returns how often the daemon is killed: 20 times, or the number in `DEVLET_CRASH_ROUNDS`.
pub(crate) fn rounds() -> u64 {
    match std::env::var("DEVLET_CRASH_ROUNDS") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 20,
    }
}

/// The state of a pod as far as the callers know it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Known {
    /// It was removed, or never admitted.
    Absent,
    /// It was admitted with these devices.
    Holds(BTreeSet<String>),
    /// A call was not answered: devlet has carried it out or not.
    InDoubt,
}

/// The answers to all calls, and their number.
#[derive(Debug)]
struct Answers {
    pods: Mutex<BTreeMap<String, Known>>,
    count: watch::Sender<u64>,
}

impl Answers {
    fn known(&self, pod: &str) -> Known {
        self.pods
            .lock()
            .unwrap()
            .get(pod)
            .cloned()
            .unwrap_or(Known::Absent)
    }

    fn set(&self, pod: &str, known: Known) {
        self.pods.lock().unwrap().insert(pod.to_owned(), known);
    }
}

/// Returns a pseudorandom number, the same one for a seed in every run.
pub(crate) fn random(seed: u64) -> u64 {
    let mut number = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^= number >> 31;
    number = number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number ^ (number >> 27)
}

fn devices(pod: &v1::Pod) -> BTreeSet<String> {
    let held = pod.containers.iter().flat_map(|container| &container.devices);
    held.flat_map(|held| held.ids.clone()).collect()
}

async fn admit(client: &Client, pod: &str, count: u64) -> Result<BTreeSet<String>, Status> {
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}}}\nspec:\n  containers:\n  - name: main\n    \
         resources: {{limits: {{{GPU}: {count}}}}}\n"
    );
    let mut events = client
        .admit(v1::AdmitRequest {
            manifest,
            ..Default::default()
        })
        .await?;
    while let Some(event) = events.message().await? {
        if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
            return Ok(devices(&pod));
        }
    }
    Err(Status::unavailable("the stream ended without an answer"))
}

async fn remove(client: &Client, pod: &str) -> Result<(), Status> {
    let request = v1::RemovePodRequest {
        pod: pod.to_owned(),
        ..Default::default()
    };
    client.remove_pod(request).await.map(drop)
}

/// Admits and removes a worker's pods in turn until the daemon is gone.
async fn work(client: Client, answers: Arc<Answers>, worker: usize) {
    for step in 0.. {
        let pod = format!("pod-{worker}-{}", step % PODS_PER_WORKER);
        let known = answers.known(&pod);
        answers.set(&pod, Known::InDoubt);
        let answered = match known {
            Known::Absent => {
                let count = 1 + random(worker as u64) % 3;
                admit(&client, &pod, count).await.map(Known::Holds)
            }
            Known::Holds(_) => remove(&client, &pod).await.map(|()| Known::Absent),
            Known::InDoubt => panic!("{pod} was not checked after the last crash"),
        };
        match answered {
            Ok(known) => {
                answers.set(&pod, known);
                answers.count.send_modify(|count| *count += 1);
            }
            Err(status) => {
                let lost = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled);
                assert!(lost, "{pod}: {status:?}");
                return;
            }
        }
    }
}

/// Compares the answers with the pods that are there, and resolves the doubts.
async fn check(client: &Client, answers: &Answers, round: u64) {
    let pods = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    let there: BTreeMap<String, BTreeSet<String>> = pods
        .iter()
        .map(|pod| (pod.id.clone().unwrap().name, devices(pod)))
        .collect();
    let mut known = answers.pods.lock().unwrap();
    for (pod, known) in known.iter_mut() {
        let found = there.get(pod);
        match known {
            Known::Absent => assert_eq!(found, None, "round {round}: {pod} is back"),
            Known::Holds(devices) => assert_eq!(found, Some(&*devices), "round {round}: {pod}"),
            Known::InDoubt => *known = found.cloned().map_or(Known::Absent, Known::Holds),
        }
    }
    assert!(
        there.keys().all(|pod| known.contains_key(pod)),
        "round {round}: a pod that no caller has admitted"
    );
    let all: Vec<&String> = there.values().flatten().collect();
    let distinct: BTreeSet<&String> = all.iter().copied().collect();
    assert_eq!(
        all.len(),
        distinct.len(),
        "round {round}: a device is held twice: {there:?}"
    );
}

/// Compares the held devices in the list of devices with those in the list of pods.
async fn check_devices(client: &Client, round: u64) {
    let request = v1::ListDevicesRequest { resource: GPU.into() };
    let listed = client.list_devices(request).await.unwrap().devices;
    assert_eq!(listed.len(), DEVICES, "round {round}");
    let pods = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    let held: BTreeSet<String> = pods.iter().flat_map(devices).collect();
    for device in listed {
        assert_eq!(
            device.holders.len(),
            usize::from(held.contains(&device.id)),
            "round {round}: {device:?}"
        );
    }
}

#[test]
fn nothing_that_was_answered_is_lost_by_kills_under_load() {
    let all = rounds();
    let root = root();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answers = Arc::new(Answers {
        pods: Mutex::default(),
        count: watch::Sender::new(0),
    });
    for directory in ["", "plugins_registry"] {
        let _ = std::fs::create_dir(root.path().join(directory));
    }
    let devices = (0..DEVICES)
        .map(|number| Device::new(&format!("gpu{number:02}")))
        .collect();
    let mut plugin = Plugin::start(&Script {
        door: Door::Registry,
        ..Script::new(root.path(), GPU, devices)
    });
    for round in 0..all {
        let daemon = Daemon::with(root.path(), &["--log-level", "error"]);
        let client = runtime
            .block_on(Client::connect(locate::socket(root.path())))
            .unwrap();
        runtime.block_on(check(&client, &answers, round));
        plugin.until(&Event::Registered);
        runtime.block_on(async {
            let mut resources = client
                .watch_resources(v1::ListResourcesRequest::default())
                .await
                .unwrap();
            while let Some(list) = resources.message().await.unwrap() {
                if list
                    .resources
                    .iter()
                    .any(|each| each.allocatable == DEVICES as u64)
                {
                    break;
                }
            }
            check_devices(&client, round).await;
        });

        let mut count = answers.count.subscribe();
        let (wanted, pause) = (random(round) % 50, random(round + all) % 3000);
        let target = *count.borrow() + wanted;
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| runtime.spawn(work(client.clone(), Arc::clone(&answers), worker)))
            .collect();
        runtime.block_on(async {
            count.wait_for(|count| *count >= target).await.unwrap();
            tokio::time::sleep(Duration::from_micros(pause)).await;
        });
        daemon.kill();
        for worker in workers {
            runtime.block_on(worker).unwrap();
        }
    }
    let daemon = Daemon::with(root.path(), &["--log-level", "error"]);
    let client = runtime
        .block_on(Client::connect(locate::socket(root.path())))
        .unwrap();
    runtime.block_on(check(&client, &answers, all));
    drop(client);
    assert_eq!(daemon.stop(), Some(0));
    let answered = *answers.count.borrow();
    assert!(answered >= all, "only {answered} calls were answered in all");
    println!("{all} kills, {answered} answered calls, none lost");
}
