use std::sync::Arc;

use devlet_core::shield::{Lease, LeasePhase};

use super::*;
use crate::config::{Config, Shield};
use crate::lease::spec;

fn lease(name: &str, devices: &[&str]) -> Lease {
    Lease {
        name: name.into(),
        resource: "acme.com/gpu".into(),
        devices: devices.iter().map(|id| DeviceId::from(*id)).collect(),
        answer: None,
        pre_start_required: false,
        granted_at: Moment(0),
        is_direct: false,
        containers: BTreeMap::new(),
    }
}

#[test]
fn a_lease_is_known_while_the_checkpoint_names_it_and_a_container_has_its_devices() {
    let lease = lease("a", &["g0", "g1"]);
    let view = LeaseView {
        lease: &lease,
        phase: LeasePhase::Granted,
        holder: None,
    };
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    let named = BTreeMap::from([(LeaseName::from("a"), holder)]);
    let listed = |ids: &[&str]| {
        let ids = ids.iter().map(|id| DeviceId::from(*id)).collect();
        Some(Listed::from([(ResourceName::from("acme.com/gpu"), ids)]))
    };
    let late = Moment(MIN_AGE_MS);
    for (holders, listed, now, unknown) in [
        (&named, listed(&["g0", "g1", "g2"]), late, false),
        // The kubelet does not list pod resources.
        (&named, None, late, false),
        (&named, listed(&["g0"]), late, true),
        (&named, Some(Listed::new()), late, true),
        (&BTreeMap::new(), listed(&["g0", "g1"]), late, true),
        // The checkpoint is written after the call.
        (&BTreeMap::new(), None, Moment(MIN_AGE_MS - 1), false),
    ] {
        assert_eq!(
            is_unknown(&view, holders, listed.as_ref(), now),
            unknown,
            "{listed:?}"
        );
    }
}

/// A node without a kubelet, and one lease that was granted long ago.
async fn workflow(root: &Path, lease: Lease) -> LeaseWorkflow {
    for name in ["devlet", "device-plugins"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    let options = crate::store::OpenOptions::new(root.join("devlet/state.redb"), "boot");
    let store = crate::store::Store::open(options).unwrap().0;
    store.adopt_leases(vec![lease]).await.unwrap();
    LeaseWorkflow {
        store,
        plugins: Default::default(),
        config: Arc::new(Config::new(root)),
        shield: Arc::new(Shield {
            cdi: root.join("cdi"),
            permanent_cdi: root.join("etc"),
            ..Shield::new(root, "devlet")
        }),
        metrics: Default::default(),
        runtime: Default::default(),
    }
}

fn is_there(workflow: &LeaseWorkflow) -> bool {
    workflow.store.read(|node| node.leases().get("a").is_some())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_unknown_twice_ends() {
    let root = tempfile::tempdir().unwrap();
    let workflow = workflow(root.path(), lease("a", &["g0"])).await;
    let report = ShieldReport::default();

    let suspects = compare(&workflow, &report, BTreeSet::new()).await;
    assert!(is_there(&workflow) && suspects.len() == 1);
    // Not while the record of the kubelet cannot be read.
    let checkpoint = workflow.shield.checkpoint();
    std::fs::write(&checkpoint, "damaged").unwrap();
    let suspects = compare(&workflow, &report, suspects).await;
    assert!(is_there(&workflow) && suspects.len() == 1);
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

    let suspects = compare(&workflow, &report, BTreeSet::new()).await;
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

    compare(&workflow, &ShieldReport::default(), BTreeSet::new()).await;

    for directory in ["cdi", "etc"] {
        assert!(spec(directory, "a").exists() && !spec(directory, "b").exists());
        assert!(root.path().join(directory).join("acme.json").exists());
    }
}
