//! Starts with a `dra_manager_state`: every row of the table in `open.rs`, and interactions of the two files.

mod imports;
mod takeovers;
mod unreadable;

use std::collections::BTreeSet;
use std::pin::pin;

use devlet_core::dra::claims::{
    AllocatedClaim, AllocatedDevice, AllocationResult, BeginForgetError, Operation, PreparationState,
};
use devlet_core::{Blocked, ReserveError};
use devlet_kubelet_files::Format;
use devlet_kubelet_files::dra::{self, envelope};

use super::claims::{DRIVER, admit_claiming, answer_calls, claiming, claims, drive, prepare};
use super::disk::Disk;
use super::durability::start;
use super::*;
use crate::store::load_error::LoadError;
use crate::store::{Found, HoldError, ImportError, ImportReport, MirrorError, OnReboot};

const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kubelet-files/testdata/dra");

fn testdata(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TESTDATA).join(name)).unwrap()
}

/// Returns a claim with one device for these pods, as a kubelet writes it.
fn kubelets(name: &str, pods: &[&str], devices: bool) -> dra::Claim {
    let device = dra::Device {
        pool: "pool".into(),
        name: format!("dev-{name}"),
        share_id: Some("share".into()),
        requests: Some(vec!["req".into()]),
        cdi_devices: Some(vec![format!("acme.com/gpu={name}")]),
    };
    let driver = dra::Driver {
        devices: devices.then(|| vec![device]),
        skip_node_operations: None,
    };
    dra::Claim {
        uid: format!("uid-{name}"),
        name: name.into(),
        namespace: "default".into(),
        pods: Some(pods.iter().map(ToString::to_string).collect()),
        drivers: Some(BTreeMap::from([(DRIVER.to_owned(), driver)])),
    }
}

fn write(root: &Root, claims: &[dra::Claim]) {
    std::fs::write(root.claims_file(), envelope::write(Some(claims))).unwrap();
}

fn read(root: &Root) -> Vec<dra::Claim> {
    let file = envelope::read(&std::fs::read(root.claims_file()).unwrap()).unwrap();
    file.verified().unwrap().claims.unwrap_or_default()
}

fn names(store: &Store) -> Vec<String> {
    claims(store).into_iter().map(|claim| claim.key.name).collect()
}

/// Returns a stopped root with a pod and its claim.
async fn root_with_a_claim() -> Root {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.stop().await.unwrap();
    root
}

/// Returns a copy of the files, as a kill at this moment would leave them.
fn copy(root: &Root) -> Root {
    let after = Root::new();
    for (from, to) in [
        (root.database(), after.database()),
        (root.claims_file(), after.claims_file()),
    ] {
        std::fs::copy(from, to).unwrap();
    }
    after
}

#[tokio::test]
async fn a_first_start_imports_a_file_of_any_version() {
    let cases = [
        ("flat-1.27/01-single.json", Format::DraFlat1_27, 1),
        ("envelope-v1/03-single-device.json", Format::DraEnvelopeV1, 1),
        ("envelope-v1/06-two-claims.json", Format::DraEnvelopeV1, 2),
        ("envelope-v1/00-nil-list.json", Format::DraEnvelopeV1, 0),
    ];
    for (name, format, count) in cases {
        let root = Root::new();
        std::fs::write(root.claims_file(), testdata(name)).unwrap();

        let (store, report) = root.open_with_report();

        assert_eq!(report.found, Found::KubeletFile, "{name}");
        let imported = report.imported_claims.unwrap();
        assert_eq!(
            (imported.format, imported.claims.len()),
            (format, count),
            "{name}"
        );
        assert_eq!(claims(&store).len(), count, "{name}");
        for claim in claims(&store) {
            assert!(claim.is_prepared(), "{name}");
            let holders = store.read(|node| node.claim(&claim.uid).unwrap().pods);
            let pods = pods(&store);
            assert!(!holders.is_empty() && holders.iter().all(|uid| pods.iter().any(|pod| pod.uid == *uid)));
            assert!(pods.iter().all(|pod| pod.source == Source::Imported));
        }
        // The hash of the file is known before the first mirror is written.
        drop(store);
        // A copy of a database that is being closed may be incomplete.
        let is_closed = || {
            !matches!(
                root.database_file(Storage::default()).open(),
                Err(LoadError::InUse)
            )
        };
        wait_until("the store is closed", is_closed).await;
        let (_, report) = copy(&root).open_with_report();
        assert!(
            report.takeover.is_none() && report.imported_claims.is_none(),
            "{name}"
        );
    }
}

#[tokio::test]
async fn every_flat_file_of_a_kubelet_is_imported() {
    for (folder, files) in [
        ("flat-1.27", 3),
        ("flat-1.28-1.29", 2),
        ("flat-1.28-extra", 7),
        ("flat-1.30", 2),
        ("flat-1.30-extra", 23),
    ] {
        let mut seen = 0;
        for entry in std::fs::read_dir(Path::new(TESTDATA).join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let entries = file["entries"].as_array().cloned().unwrap_or_default();
            let expected = entries
                .iter()
                .map(|entry| entry["ClaimName"].as_str().unwrap().to_owned());
            let expected: BTreeSet<String> = expected.collect();
            let root = Root::new();
            std::fs::copy(&path, root.claims_file()).unwrap();
            let (store, report) = root.open_with_report();
            assert_eq!(report.blocked, None, "{}", path.display());
            let imported = report.imported_claims.unwrap();
            assert_eq!(imported.claims.len(), expected.len(), "{}", path.display());
            assert_eq!(
                imported.replaced_entries,
                entries.len() - expected.len(),
                "{}",
                path.display()
            );
            let names: BTreeSet<String> = names(&store).into_iter().collect();
            assert_eq!(names, expected, "{}", path.display());
            seen += 1;
        }
        assert_eq!(seen, files, "{folder}");
    }
}

#[tokio::test]
async fn an_imported_claim_that_no_pod_holds_is_unprepared() {
    let mut claim = kubelets("one", &[], true);
    claim.pods = None;
    for at_a_start in [true, false] {
        let root = Root::new();
        if at_a_start {
            write(&root, std::slice::from_ref(&claim));
        }
        let store = root.open();
        if !at_a_start {
            let file = envelope::write(Some(std::slice::from_ref(&claim)));
            store.import(file.as_bytes()).await.unwrap();
        }
        drive(&store);
        let calls = store.update(|node| node.due_calls(NOW));
        assert_eq!(calls[0].operation, Operation::Unprepare);
        answer_calls(&store, calls);
        assert!(store.record_claims().await.unwrap());
        assert_eq!(names(&store), [""; 0]);
        store.stop().await.unwrap();
        if at_a_start {
            assert_eq!(read(&root), []);
        }
    }
}

#[tokio::test]
async fn an_imported_claim_that_names_devices_is_prepared_and_kept_while_a_pod_holds_it() {
    let root = Root::new();
    write(
        &root,
        &[kubelets("one", &["p", "q"], true), kubelets("two", &["p"], false)],
    );
    let store = root.open();
    drive(&store);
    let states = || {
        let claims = claims(&store);
        let states = claims.iter().map(|claim| claim.preparations[DRIVER].state);
        states.collect::<Vec<_>>()
    };
    assert_eq!(states(), [PreparationState::Prepared, PreparationState::Pending]);
    assert_eq!(
        store.update(|node| node.due_calls(NOW)),
        [],
        "no driver is called for an imported claim"
    );

    store.release(&"p".into()).await.unwrap();
    let calls = store.update(|node| node.due_calls(NOW));
    let asked: Vec<&str> = calls
        .iter()
        .flat_map(|call| &call.claims)
        .map(|(uid, _)| uid.as_str())
        .collect();
    assert_eq!(asked, ["uid-two"], "the other one has a holder");
    answer_calls(&store, calls);
    store.release(&"q".into()).await.unwrap();
    let calls = store.update(|node| node.due_calls(NOW));
    assert_eq!(calls[0].operation, Operation::Unprepare);
}

#[tokio::test]
async fn a_pod_that_was_imported_with_its_claim_is_admitted_without_a_call() {
    let root = Root::new();
    write(&root, &[kubelets("one", &["a"], true)]);
    let store = root.open();
    let request = claiming("a", "one");
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    assert_eq!(store.update(|node| node.prepare_calls(held.id(), NOW)), []);
    let pod = held.commit(&request, Vec::new()).await.unwrap();
    assert_eq!(pod.claims[0].name, "gpu");
    let names = store.read(|node| node.cdi_devices(&"a".into(), "main"));
    assert_eq!(names, ["acme.com/gpu=one"]);
}

#[tokio::test]
async fn without_claims_there_is_no_file_and_with_the_last_one_it_is_empty() {
    let root = Root::new();
    let store = root.open();
    offer(&store, GPU, 2);
    admit(&store, "w", 1).await.unwrap();
    store.mirror().await.unwrap();
    assert!(!root.claims_file().exists());

    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    admit_claiming(&store, "b", "one").await.unwrap();
    store.mirror().await.unwrap();
    let mirrored = read(&root);
    let mut expected = kubelets("one", &["a", "b"], true);
    let devices = expected
        .drivers
        .as_mut()
        .unwrap()
        .get_mut(DRIVER)
        .unwrap()
        .devices
        .as_mut();
    devices.unwrap()[0].cdi_devices = Some(vec!["acme.com/gpu=uid-one".into()]);
    assert_eq!(mirrored, [expected]);

    for uid in ["a", "b"] {
        store.release(&uid.into()).await.unwrap();
    }
    store.mirror().await.unwrap();
    let pods = read(&root).remove(0).pods.unwrap();
    assert_eq!(
        pods.into_iter().collect::<Vec<_>>(),
        ["b"],
        "a kubelet unprepares it for a pod that is gone"
    );
    let calls = store.update(|node| node.due_calls(NOW));
    answer_calls(&store, calls);
    store.record_claims().await.unwrap();
    store.mirror().await.unwrap();
    assert_eq!(read(&root), []);
    assert_eq!(
        std::fs::read_to_string(root.claims_file()).unwrap(),
        String::from_utf8(testdata("envelope-v1/00-nil-list.json"))
            .unwrap()
            .trim_end()
    );
}

#[tokio::test]
async fn an_unchanged_mirror_is_kept_and_a_removed_one_is_written_again() {
    let root = root_with_a_claim().await;
    let (store, report) = root.open_with_report();
    assert!(report.takeover.is_none() && report.imported_claims.is_none());
    assert_eq!(names(&store), ["one"]);
    store.stop().await.unwrap();
    std::fs::remove_file(root.claims_file()).unwrap();
    let (store, report) = root.open_with_report();
    assert!(report.takeover.is_none());
    assert_eq!(names(&store), ["one"]);
    store.stop().await.unwrap();
    assert_eq!(read(&root).len(), 1);
}

/// Returns the request of a pod with its own claim on a device.
fn wanting(device: &str) -> PodRequest {
    let mut request = claiming("new", "new");
    let key = request.claims[0].claim.key.clone();
    let allocated = AllocationResult {
        driver: DRIVER.into(),
        device: AllocatedDevice {
            request: "req".into(),
            pool: "pool".into(),
            device: device.into(),
            share: None,
            admin_access: false,
        },
        skip: Vec::new(),
    };
    request.claims[0].claim = AllocatedClaim::new(key, "uid-new".into(), [allocated]);
    request
}

#[tokio::test]
async fn a_file_that_another_process_writes_meanwhile_is_left_alone() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.mirror().await.unwrap();
    write(&root, &[kubelets("theirs", &["k"], true)]);
    admit_claiming(&store, "b", "two").await.unwrap();

    let refused = store.mirror().await.unwrap_err();

    assert!(matches!(refused, MirrorError::Foreign { .. }), "{refused:?}");
    assert_eq!(read(&root)[0].name, "theirs");
    let devices = std::fs::metadata(root.checkpoint());
    assert!(devices.is_ok(), "the other file is still updated");
    store.stop().await.unwrap_err();
    let (store, report) = root.open_with_report();
    assert!(
        report.takeover.is_none() && report.contested.is_empty(),
        "{report:?}"
    );
    assert_eq!(report.quarantined[0].original, root.claims_file());
    assert_eq!(names(&store), ["one", "two"]);
}

#[tokio::test]
async fn a_pending_preparation_is_written_without_devices() {
    let root = root_with_a_claim().await;
    let options = OpenOptions {
        boot_id: "boot-2".into(),
        on_reboot: OnReboot::Keep,
        ..root.options()
    };
    let (store, _) = Store::open(options).unwrap();
    store.mirror().await.unwrap();
    let driver = read(&root).remove(0).drivers.unwrap().remove(DRIVER).unwrap();
    assert_eq!(driver.devices, None);
}

#[tokio::test]
async fn of_two_claims_of_one_name_the_file_has_the_one_that_a_pod_holds() {
    for (old, new) in [("uid-1", "uid-2"), ("uid-2", "uid-1")] {
        let root = Root::new();
        let store = root.open();
        let connection = drive(&store);
        admit_with_uid(&store, "a", old).await;
        store.update(|node| node.driver_deregistered(connection, NOW));
        store.release(&"a".into()).await.unwrap();
        let abandoned = store.update(|node| node.abandon(&"a".into(), &DRIVER.into()));
        assert_eq!(abandoned, [old.into()]);
        assert!(store.record_claims().await.unwrap());
        drive(&store);
        admit_with_uid(&store, "b", new).await;
        assert_eq!(names(&store), ["one", "one"]);

        store.mirror().await.unwrap();

        let file = read(&root);
        assert_eq!(file.len(), 1, "{file:?}");
        assert_eq!(file[0].uid, new);
        assert_eq!(file[0].pods, Some(BTreeSet::from(["b".to_owned()])));
    }
}

/// Returns a root with an abandoned claim that no pod holds.
async fn root_with_an_abandoned_claim() -> (Root, Store) {
    let root = Root::new();
    let store = root.open();
    let connection = drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.update(|node| node.driver_deregistered(connection, NOW));
    store.release(&"a".into()).await.unwrap();
    store.update(|node| node.abandon(&"a".into(), &DRIVER.into()));
    assert!(store.record_claims().await.unwrap());
    (root, store)
}

#[tokio::test]
async fn an_abandoned_driver_is_not_listed_for_a_claim_that_is_used_again() {
    let (root, store) = root_with_an_abandoned_claim().await;
    let mut request = claiming("b", "one");
    request.claims[0].claim.drivers.clear();
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.intent().await.unwrap();
    held.commit(&request, Vec::new()).await.unwrap();
    store.mirror().await.unwrap();
    let file = read(&root);
    assert_eq!(file[0].pods, Some(BTreeSet::from(["b".to_owned()])));
    assert_eq!(file[0].drivers, Some(BTreeMap::new()), "a kubelet would call it");
    store.stop().await.unwrap();
    let store = root.open();
    let state = claims(&store)[0].preparations[DRIVER].state;
    assert_eq!(state, PreparationState::Abandoned, "it is still on record");
    drive(&store);
    let calls = store.update(|node| node.due_calls(NOW));
    assert_eq!(calls[0].operation, Operation::Unprepare);
}

#[tokio::test]
async fn a_claim_that_is_forgotten_is_neither_in_the_database_nor_in_the_file() {
    let (root, store) = root_with_an_abandoned_claim().await;
    store.mirror().await.unwrap();
    assert_eq!(read(&root).len(), 1, "a kubelet would unprepare it");

    store.forget_claim(&"uid-one".into()).await.unwrap();

    let unknown = store.forget_claim(&"uid-one".into()).await.unwrap_err();
    assert_eq!(unknown, BeginForgetError::Unknown.into());
    // After a kill before the file was written: its hash is known, so it has nothing new.
    let killed = copy(&root);
    assert_eq!(names(&killed.open()), Vec::<String>::new());
    store.stop().await.unwrap();
    assert_eq!(read(&root), []);
    let store = root.open();
    assert_eq!(names(&store), Vec::<String>::new());
    assert_eq!(asked_to_unprepare(&store), Vec::<String>::new());
}

/// Imports the file that an operator has to decide about.
async fn adopt_contested(store: &Store, report: &OpenReport) -> ImportReport {
    assert!(report.blocked.is_some());
    let [contested] = &report.contested[..] else {
        panic!("{report:?}");
    };
    let file = std::fs::read(&contested.copy).unwrap();
    let imported = store.import(&file).await.unwrap();
    assert_eq!(store.read(|node| node.blocked().cloned()), None);
    imported
}

fn asked_to_unprepare(store: &Store) -> Vec<String> {
    drive(store);
    let calls = store.update(|node| node.due_calls(NOW));
    assert!(calls.iter().all(|call| call.operation == Operation::Unprepare));
    let claims = calls.iter().flat_map(|call| &call.claims);
    claims.map(|(uid, _)| uid.to_string()).collect()
}

/// Returns the request of a pod with the claim `one` of this UID.
async fn admit_with_uid(store: &Store, pod: &str, uid: &str) {
    let mut request = claiming(pod, uid.trim_start_matches("uid-"));
    request.claims[0].claim.key.name = "one".into();
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.intent().await.unwrap();
    prepare(store, held.id());
    held.commit(&request, Vec::new()).await.unwrap();
}
