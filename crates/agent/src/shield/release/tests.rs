use std::path::Path;
use std::sync::Arc;

use devlet_core::shield::{Lease, LeasePhase};
use devlet_core::{DeviceId, ResourceName};
use devlet_kubelet_api::cri::v1::ContainerState;
use devlet_kubelet_api::pod_resources::v1 as api;
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use devlet_testkit::{KubeletPod, KubeletPods, Reports, Runtime};

use super::super::report::MissingState;
use super::*;
use crate::config::{Config, Shield};
use crate::lease::spec;

const GPU: &str = "acme.com/gpu";

fn lease(name: &str, devices: &[&str]) -> Lease {
    Lease {
        name: name.into(),
        resource: GPU.into(),
        devices: devices.iter().map(|id| DeviceId::from(*id)).collect(),
        answer: None,
        pre_start_required: false,
        granted_at: Moment(0),
        is_direct: false,
        holder: Some(LeaseHolder {
            pod: "p".into(),
            container: "c".into(),
        }),
        is_witnessed: true,
        containers: BTreeMap::new(),
    }
}

fn listed(container: &str, devices: &[&str]) -> Listed {
    let devices = api::ContainerDevices {
        resource_name: GPU.into(),
        device_ids: devices.iter().map(|id| (*id).to_owned()).collect(),
        topology: None,
    };
    let container = api::ContainerResources {
        name: container.to_owned(),
        devices: vec![devices],
        ..api::ContainerResources::default()
    };
    Listed::new(vec![api::PodResources {
        name: "job".into(),
        namespace: "default".into(),
        containers: vec![container],
        ..api::PodResources::default()
    }])
}

#[test]
fn a_lease_is_known_while_the_checkpoint_names_it_and_its_container_has_its_devices() {
    let lease = lease("a", &["g0", "g1"]);
    let view = LeaseView {
        lease: &lease,
        phase: LeasePhase::Granted,
    };
    let (named, none) = (BTreeSet::from([LeaseName::from("a")]), BTreeSet::new());
    let pod = PodName {
        namespace: "default".into(),
        name: "job".into(),
    };
    let other = PodName::default();
    let late = Moment(MIN_AGE_MS);
    for (names, listed, pod, now, unknown) in [
        (&named, Some(listed("c", &["g0", "g1", "g2"])), None, late, false),
        (&named, Some(listed("c", &["g0", "g1"])), Some(&pod), late, false),
        // A plain init container is not listed.
        (&named, Some(listed("main", &["g0"])), Some(&pod), late, false),
        // Another pod has the devices now.
        (&named, Some(listed("c", &["g0", "g1"])), Some(&other), late, true),
        // The kubelet does not list pod resources.
        (&named, None, None, late, false),
        (&named, Some(listed("c", &["g0"])), None, late, true),
        (&named, Some(Listed::default()), None, late, true),
        (&none, Some(listed("c", &["g0", "g1"])), None, late, true),
        // The checkpoint is written after the call.
        (&none, None, None, Moment(MIN_AGE_MS - 1), false),
    ] {
        assert_eq!(
            is_unknown(&view, names, listed.as_ref(), pod, now),
            unknown,
            "{listed:?}"
        );
    }
}

/// A node without a kubelet, and one lease that was granted long ago.
async fn workflow(root: &Path, lease: Lease) -> LeaseWorkflow {
    let workflow = empty(root);
    workflow.store.adopt_leases(vec![lease]).await.unwrap();
    workflow
}

/// A node without leases. Its runtime is at `cri.sock`.
fn empty(root: &Path) -> LeaseWorkflow {
    for name in ["devlet", "device-plugins"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    let options = crate::store::OpenOptions::new(root.join("devlet/state.redb"), "boot");
    LeaseWorkflow {
        store: crate::store::Store::open(options).unwrap().0,
        plugins: Default::default(),
        config: Arc::new(Config::new(root)),
        shield: Arc::new(Shield {
            cdi: root.join("cdi"),
            permanent_cdi: root.join("etc"),
            runtime: Some(root.join("cri.sock")),
            ..Shield::new(root, "devlet")
        }),
        metrics: Default::default(),
        runtime: Default::default(),
    }
}

/// Writes the kubelet's checkpoint: one container of pod `p` has a device, directly from a plugin.
fn checkpoint(workflow: &LeaseWorkflow) {
    let entry = Entry {
        pod_uid: "p".into(),
        container: "c".into(),
        resource: GPU.into(),
        devices: Devices::PerNuma(Some([(-1, Some(vec!["g0".into()]))].into())),
        alloc_resp: Some(Vec::new()),
    };
    let checkpoint = Checkpoint {
        entries: Some(vec![entry]),
        registered: None,
    };
    std::fs::write(workflow.shield.checkpoint(), device_plugin::write(&checkpoint)).unwrap();
}

fn leases(workflow: &LeaseWorkflow) -> Vec<Lease> {
    workflow
        .store
        .read(|node| node.leases().iter().map(|view| view.lease.clone()).collect())
}

fn is_there(workflow: &LeaseWorkflow) -> bool {
    workflow.store.read(|node| node.leases().get("a").is_some())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_unknown_twice_ends() {
    let root = tempfile::tempdir().unwrap();
    let workflow = workflow(root.path(), lease("a", &["g0"])).await;
    let report = ShieldReport::default();

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    assert!(is_there(&workflow) && suspects.leases.len() == 1);
    // Not while the record of the kubelet cannot be read.
    let checkpoint = workflow.shield.checkpoint();
    std::fs::write(&checkpoint, "damaged").unwrap();
    let suspects = compare(&workflow, &report, suspects).await;
    assert!(is_there(&workflow) && suspects.leases.len() == 1);
    assert!(
        report
            .get()
            .checkpoint
            .unwrap()
            .contains("kubelet_internal_checkpoint")
    );
    std::fs::remove_file(&checkpoint).unwrap();
    compare(&workflow, &report, suspects).await;

    assert!(!is_there(&workflow));
    assert_eq!(report.get().checkpoint, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_does_not_end_before_its_container() {
    let root = tempfile::tempdir().unwrap();
    let mut running = lease("a", &["g0"]);
    let alive = crate::lease::process::find(std::process::id()).unwrap();
    running.containers.insert("c".into(), alive);
    let workflow = workflow(root.path(), running).await;
    let report = ShieldReport::default();

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    let suspects = compare(&workflow, &report, suspects).await;
    assert!(is_there(&workflow));

    workflow.store.stop_leased("a", "c").await.unwrap();
    compare(&workflow, &report, suspects).await;
    assert!(!is_there(&workflow));
}

#[tokio::test(flavor = "multi_thread")]
async fn specs_without_a_lease_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let workflow = workflow(root.path(), lease("a", &["g0"])).await;
    let spec = |directory: &str, name: &str| root.path().join(directory).join(spec::file_name(&name.into()));
    for directory in ["cdi", "etc"] {
        std::fs::create_dir(root.path().join(directory)).unwrap();
        for name in ["a", "b"] {
            std::fs::write(spec(directory, name), "{}").unwrap();
        }
        std::fs::write(root.path().join(directory).join("acme.json"), "{}").unwrap();
    }

    compare(&workflow, &ShieldReport::default(), Suspects::default()).await;

    for directory in ["cdi", "etc"] {
        assert!(spec(directory, "a").exists() && !spec(directory, "b").exists());
        assert!(root.path().join(directory).join("acme.json").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_is_left_over_is_not_adopted() {
    let root = tempfile::tempdir().unwrap();
    let workflow = empty(root.path());
    checkpoint(&workflow);
    let report = ShieldReport::default();
    report.update(|state| _ = state.registrations.insert(GPU.into(), None));
    let runtime = Runtime::start(&root.path().join("cri.sock"), Reports::default());

    compare(&workflow, &report, Suspects::default()).await;
    assert_eq!(leases(&workflow), []);
    assert!(report.get().bypassed.is_empty());

    // The pod runs.
    runtime.reports.send_replace(Reports::default().pod("p", "job"));
    compare(&workflow, &report, Suspects::default()).await;
    assert_eq!(leases(&workflow).len(), 1);
    let state = report.get();
    assert_eq!(state.bypassed.len(), 1);
    assert_eq!(state.pod_name(&"p".into()).unwrap().name, "job");

    // It has ended. The record of the kubelet still names it, and its pod resources do not.
    let _kubelet = KubeletPods::start(root.path(), false, Vec::new());
    runtime.reports.send_replace(Reports::default());
    let direct = leases(&workflow).remove(0).name;
    workflow.end_if_stopped(&direct, None).await;
    assert_eq!(leases(&workflow).len(), 1, "the runtime was not asked");
    let containers = containers::list(&workflow.shield).await.unwrap();
    workflow.end_if_stopped(&direct, Some(&containers)).await;
    compare(&workflow, &report, Suspects::default()).await;
    assert_eq!(leases(&workflow), []);
    assert!(report.get().bypassed.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_runtime_all_entries_are_adopted_and_their_devices_wait() {
    let root = tempfile::tempdir().unwrap();
    let workflow = workflow(
        root.path(),
        Lease {
            is_witnessed: false,
            ..lease("a", &["g1"])
        },
    )
    .await;
    checkpoint(&workflow);
    let report = ShieldReport::default();

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    compare(&workflow, &report, suspects).await;

    assert_eq!(leases(&workflow).len(), 2);
    let silent = report.get().silent.unwrap();
    assert!(silent.contains("container runtime at"), "{silent}");
    let refused = workflow
        .prepare(&GPU.into(), &[DeviceId::from("g1")].into())
        .await;
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("waiting for the container runtime to tell") && text.contains("cri.sock"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_that_devlet_did_not_see_start_keep_their_devices() {
    let root = tempfile::tempdir().unwrap();
    let unwitnessed = Lease {
        is_witnessed: false,
        ..lease("a", &["g0"])
    };
    let workflow = workflow(root.path(), unwitnessed).await;
    let reports = |state| Reports {
        pid: std::process::id(),
        ..Reports::default()
            .pod("p", "job")
            .container("p", "c", "c1", state)
    };
    // Between its creation and its start, its hook may have run.
    let created = reports(ContainerState::ContainerCreated);
    let runtime = Runtime::start(&root.path().join("cri.sock"), created);
    let report = ShieldReport::default();

    compare(&workflow, &report, Suspects::default()).await;
    assert!(!leases(&workflow)[0].is_witnessed);

    runtime
        .reports
        .send_replace(reports(ContainerState::ContainerRunning));
    compare(&workflow, &report, Suspects::default()).await;
    let found = leases(&workflow).remove(0);
    assert!(
        found.is_witnessed && found.containers.contains_key("c1"),
        "{found:?}"
    );
    let refused = workflow
        .prepare(&GPU.into(), &[DeviceId::from("g0")].into())
        .await;
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("waiting for container c1 of pod p"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_does_not_end_before_the_runtime_has_stopped_its_pod() {
    let root = tempfile::tempdir().unwrap();
    let workflow = workflow(root.path(), lease("a", &["g0"])).await;
    let runtime = Runtime::start(&root.path().join("cri.sock"), Reports::default().pod("p", "job"));
    let report = ShieldReport::default();

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    let suspects = compare(&workflow, &report, suspects).await;
    assert!(is_there(&workflow) && suspects.leases.len() == 1);

    runtime.reports.send_replace(Reports::default());
    compare(&workflow, &report, suspects).await;
    assert!(!is_there(&workflow));
}

/// A node whose kubelet has lost its checkpoint, while a pod runs.
async fn forgotten(root: &Path, is_new: bool) -> (LeaseWorkflow, ShieldReport, Runtime, KubeletPods) {
    let mut with_device = lease("a", &["g0"]);
    let alive = crate::lease::process::find(std::process::id()).unwrap();
    with_device.containers.insert("c1".into(), alive);
    let workflow = workflow(root, with_device).await;
    let running = ContainerState::ContainerRunning;
    let reports = Reports::default()
        .pod("p", "job")
        .container("p", "c", "c1", running)
        .pod("q", "other")
        .container("q", "c", "c2", running);
    let runtime = Runtime::start(&root.join("cri.sock"), reports);
    let pods = vec![
        KubeletPod::new("p", "job", "c", GPU, &[]),
        KubeletPod::new("q", "other", "c", GPU, &[]),
        KubeletPod::new("r", "good", "c", GPU, &["g1"]),
    ];
    let kubelet = KubeletPods::start(root, is_new, pods);
    let report = ShieldReport::default();
    (workflow, report, runtime, kubelet)
}

fn missing(report: &ShieldReport) -> Vec<(String, MissingState)> {
    let missing = report.get().missing.into_iter();
    missing.map(|each| (each.pod.name, each.state)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_without_devices_are_found_by_the_limits_of_their_pods() {
    let root = tempfile::tempdir().unwrap();
    let (workflow, report, runtime, kubelet) = forgotten(root.path(), true).await;
    served(&workflow);
    let stop = CancellationToken::new();
    tokio::spawn(super::super::pods::run(
        workflow.shield.kubelet.clone(),
        report.clone(),
        stop.clone(),
    ));
    let mut states = report.subscribe();
    let followed = states.wait_for(|state| state.pods.as_ref().is_some_and(|pods| pods.len() == 3));
    tokio::time::timeout(devlet_testkit::PATIENCE, followed)
        .await
        .unwrap()
        .unwrap();

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    assert_eq!(missing(&report), []);
    let suspects = compare(&workflow, &report, suspects).await;
    assert_eq!(
        missing(&report),
        [
            ("job".to_owned(), MissingState::Forgotten),
            ("other".to_owned(), MissingState::Running)
        ]
    );

    // The container has ended, and the kubelet does not start it again.
    runtime
        .reports
        .send_modify(|reports| _ = reports.containers.pop());
    let suspects = compare(&workflow, &report, suspects).await;
    compare(&workflow, &report, suspects).await;
    assert_eq!(missing(&report)[1], ("other".to_owned(), MissingState::Stopped));
    kubelet.pods.send_replace(Vec::new());
    compare(&workflow, &report, Suspects::default()).await;
    assert_eq!(missing(&report), []);
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_kubelet_tells_of_containers_that_had_leases() {
    let root = tempfile::tempdir().unwrap();
    let (workflow, report, _runtime, _kubelet) = forgotten(root.path(), false).await;
    served(&workflow);

    let suspects = compare(&workflow, &report, Suspects::default()).await;
    compare(&workflow, &report, suspects).await;

    assert_eq!(missing(&report), [("job".to_owned(), MissingState::Forgotten)]);
}

/// Lets a plugin list devices.
fn served(workflow: &LeaseWorkflow) {
    use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
    use devlet_core::device_plugin::list::{Device, DeviceList};
    let offer = Offer {
        resource: ResourceName::from(GPU),
        endpoint: "gpu.sock".into(),
        process: devlet_core::ProcessId { uid: 0, pid: None },
        may_share: false,
        options: PluginOptions::default(),
    };
    let device = |id: &str| Device {
        id: id.into(),
        healthy: true,
        nodes: Vec::new(),
    };
    let (list, _) = DeviceList::new(["g0", "g1"].map(device).into());
    let now = workflow.store.now();
    workflow.store.update(|node| {
        let (connection, _) = node.plugin_connected(offer, now).unwrap();
        node.devices_listed(connection, list);
    });
}
