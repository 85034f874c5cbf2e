//! Starts with a `dra_manager_state`: every row of the table in `open.rs`, and interactions of the two files.

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

#[tokio::test]
async fn an_unreadable_file_and_no_database_block_the_node() {
    for file in [&b"{ broken"[..], b"{}", b"null", b""] {
        let root = Root::new();
        std::fs::write(root.claims_file(), file).unwrap();

        let (store, report) = root.open_with_report();

        let [aside] = &report.quarantined[..] else {
            panic!("{report:?}");
        };
        assert_eq!(aside.original, root.claims_file());
        assert_eq!(std::fs::read(&aside.kept).unwrap(), file);
        assert!(!root.claims_file().exists());
        let file = aside.kept.display().to_string();
        assert!(
            matches!(&report.blocked, Some(Blocked::UnreadableClaims { file: blocked, .. }) if *blocked == file),
            "{report:?}"
        );
        drive(&store);
        let refused = store.hold(&claiming("a", "one"), &Preferences::new());
        assert!(
            matches!(refused, Err(HoldError::Refused(ReserveError::Blocked(_)))),
            "{refused:?}"
        );
        stop(&store).await;
        assert!(
            !root.claims_file().exists(),
            "while it is blocked there is no mirror"
        );
    }
}

#[tokio::test]
async fn each_of_two_unreadable_files_needs_a_decision() {
    let root = Root::new();
    std::fs::write(root.claims_file(), "{ broken").unwrap();
    std::fs::write(root.checkpoint(), "{ broken").unwrap();
    let store = root.open();
    assert_eq!(store.read(|node| node.blocked_by().len()), 2);

    store
        .import(kubelet_file(&[("k", &["00"])]).as_bytes())
        .await
        .unwrap();

    let blocked = |store: &Store| store.read(|node| node.blocked().cloned());
    assert!(matches!(blocked(&store), Some(Blocked::UnreadableClaims { .. })));
    stop(&store).await;
    let store = root.open();
    assert!(matches!(blocked(&store), Some(Blocked::UnreadableClaims { .. })));
    store.forget().await.unwrap();
    assert_eq!(blocked(&store), None);
    store.stop().await.unwrap();
    assert_eq!(blocked(&root.open()), None);
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
async fn damaged_claims_stay_held_and_the_node_blocked() {
    let root = Root::new();
    let whole = envelope::write(Some(&[
        kubelets("one", &["a"], true),
        kubelets("two", &["b"], true),
    ]));
    // One claim lacks its UID, name and pods. A byte before a quote of the other one is damaged.
    let lost = whole.find("ClaimUID").unwrap()..whole.find(r#",\"DriverState"#).unwrap();
    let (before, rest) = (&whole[..lost.start], &whole[lost.end..]);
    let zeros = "\0".repeat(lost.len());
    let end = rest.rfind(r#"\"Devices"#).unwrap();
    let damaged = format!("{before}{zeros}{}T{}", &rest[..end], &rest[end + 1..]);
    std::fs::write(root.claims_file(), &damaged).unwrap();
    let store = root.open();
    let repaired = devlet_kubelet_files::salvage(damaged.as_bytes(), None).unwrap();

    let report = store.import(repaired.text.as_bytes()).await.unwrap();

    assert!(report.incomplete);
    assert!(store.read(|node| node.blocked().is_some()), "an operator decides");
    assert_eq!(names(&store), ["devlet-unknown-claim-1", "two"]);
    store.forget().await.unwrap();
    drive(&store);
    for device in ["dev-one", "dev-two"] {
        let refused = store.hold(&wanting(device), &Preferences::new());
        assert!(
            matches!(refused, Err(HoldError::Refused(_))),
            "{device}: {refused:?}"
        );
    }
    store.hold(&wanting("dev-free"), &Preferences::new()).unwrap();
}

#[tokio::test]
async fn an_unreadable_file_beside_a_readable_database_blocks_until_an_operator_decides() {
    let root = root_with_a_claim().await;
    std::fs::write(root.claims_file(), "{ broken").unwrap();
    let (store, report) = root.open_with_report();
    assert!(
        matches!(report.blocked, Some(Blocked::UnreadableClaims { .. })),
        "{report:?}"
    );
    assert_eq!(report.quarantined.len(), 1);
    assert_eq!(names(&store), ["one"]);
    store.forget().await.unwrap();
    store.stop().await.unwrap();
    assert_eq!(read(&root).len(), 1);
}

#[tokio::test]
async fn a_file_that_a_kubelet_wrote_is_adopted() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    offer(&store, GPU, 4);
    admit(&store, "w", 1).await.unwrap();
    admit_claiming(&store, "a", "one").await.unwrap();
    admit_claiming(&store, "b", "two").await.unwrap();
    let before = claims(&store);
    store.stop().await.unwrap();
    // The kubelet has removed pod b, and admitted another one that shares the claim of a.
    let mut file = read(&root);
    file.retain(|claim| claim.name == "one");
    file[0].pods.as_mut().unwrap().insert("k".into());
    file.push(kubelets("three", &["k"], true));
    write(&root, &file);

    let (store, report) = root.open_with_report();

    assert!(report.takeover.is_none(), "{report:?}");
    let lost = "it lacks ResourceClaim default/two of pod default/b (b), and it has pod k";
    assert!(report.contested[0].difference.starts_with(lost), "{report:?}");
    assert_eq!(uids(&store), ["a", "b", "w"], "the record stays");
    assert_eq!(names(&store), ["one", "two"]);
    let imported = adopt_contested(&store, &report).await;
    assert_eq!(imported.difference.added, ["k".into()]);
    assert_eq!(imported.difference.removed, ["b".into()]);
    assert_eq!(uids(&store), ["a", "k", "w"]);
    let one = &claims(&store)[0];
    assert_eq!(
        one.preparations, before[0].preparations,
        "what we know of it is not forgotten"
    );
    assert_eq!(asked_to_unprepare(&store), ["uid-two"]);
    drop(store);
    let (_, report) = copy(&root).open_with_report();
    assert!(report.takeover.is_none(), "it is known from now on");
}

#[tokio::test]
async fn a_claim_with_other_devices_is_contested_and_imported_only_after_its_pods_are_gone() {
    let root = root_with_a_claim().await;
    let mut file = read(&root);
    let drivers = file[0].drivers.as_mut().unwrap();
    let devices = drivers
        .values_mut()
        .flat_map(|driver| driver.devices.iter_mut().flatten());
    devices.for_each(|device| device.name = "dev-other".into());
    write(&root, &file);

    let (store, report) = root.open_with_report();

    drive(&store);
    let [contested] = &report.contested[..] else {
        panic!("{report:?}");
    };
    let expected = "it lacks devices of ResourceClaim default/one of pod default/a (a), and it has other devices for \
                    ResourceClaim default/one";
    assert_eq!(contested.difference, expected);
    let copy = std::fs::read(&contested.copy).unwrap();
    let refused = store.import(&copy).await.unwrap_err();
    assert!(matches!(refused, ImportError::OtherDevices { .. }), "{refused:?}");
    store.release(&"a".into()).await.unwrap();
    // Its drivers are still unpreparing it.
    let refused = store.import(&copy).await.unwrap_err();
    assert!(matches!(refused, ImportError::LeftOut { .. }), "{refused:?}");
    let calls = store.update(|node| node.due_calls(NOW));
    answer_calls(&store, calls);
    store.record_claims().await.unwrap();
    store.import(&copy).await.unwrap();
    assert_eq!(store.read(|node| node.blocked().cloned()), None);
    let refused = store.hold(&wanting("dev-other"), &Preferences::new());
    assert!(matches!(refused, Err(HoldError::Refused(_))), "{refused:?}");
}

#[tokio::test]
async fn a_file_ends_no_block_while_one_of_its_claims_is_left_out() {
    let root = root_with_a_claim().await;
    std::fs::write(root.claims_file(), "{ broken").unwrap();
    let store = root.open();
    // Another claim of the name that a pod holds.
    let mut other = kubelets("one", &["k"], true);
    other.uid = "uid-other".into();
    let file = envelope::write(Some(&[other, kubelets("two", &["k"], true)]));

    let refused = store.import(file.as_bytes()).await.unwrap_err();

    assert!(matches!(refused, ImportError::LeftOut { .. }), "{refused:?}");
    assert!(store.read(|node| node.blocked().is_some()));
    assert_eq!(names(&store), ["one"]);
}

#[tokio::test]
async fn a_further_file_does_not_end_a_contest() {
    let root = root_with_a_claim().await;
    let ours = read(&root);
    write(&root, &[kubelets("theirs", &["k"], true)]);
    let (store, report) = root.open_with_report();
    assert_eq!(report.contested.len(), 1, "{report:?}");
    stop(&store).await;
    // It only adds a claim.
    let mut further = ours.clone();
    further.push(kubelets("two", &["l"], true));
    write(&root, &further);

    let (store, report) = root.open_with_report();

    assert_eq!(report.contested.len(), 1, "{report:?}");
    assert_eq!(store.read(|node| node.blocked_by().len()), 2);
    assert_eq!(names(&store), ["one"]);
    stop(&store).await;
    // The record itself is not another contest.
    let ours = envelope::write(Some(&ours)) + "\n";
    std::fs::write(root.claims_file(), ours).unwrap();
    let (store, report) = root.open_with_report();
    assert!(
        report.contested.is_empty() && report.takeover.is_none(),
        "{report:?}"
    );
    let file = envelope::write(Some(&further));
    let refused = store.import(file.as_bytes()).await.unwrap_err();
    assert!(
        matches!(refused, ImportError::OtherContested { .. }),
        "{refused:?}"
    );
    store.forget().await.unwrap();
    store.import(file.as_bytes()).await.unwrap();
    assert_eq!(names(&store), ["one", "two"]);
    assert_eq!(store.read(|node| node.blocked().cloned()), None);
}

#[tokio::test]
async fn each_file_counts_only_for_its_own_kind() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    offer(&store, GPU, 4);
    let mut request = claiming("a", "one");
    request.containers[0].wants = BTreeMap::from([(GPU.into(), 1)]);
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.intent().await.unwrap();
    prepare(&store, held.id());
    held.commit(&request, vec![(answer(RAW).unwrap(), false)])
        .await
        .unwrap();
    store.stop().await.unwrap();
    let claims_file = std::fs::read(root.claims_file()).unwrap();

    // A kubelet has released only the devices of the pod.
    std::fs::write(root.checkpoint(), kubelet_file(&[("k", &["03"])])).unwrap();
    let (store, report) = root.open_with_report();
    let difference = adopt_contested(&store, &report).await.difference;
    assert_eq!(difference.changed, ["a".into()]);
    assert_eq!(difference.added, ["k".into()]);
    assert_eq!(uids(&store), ["a", "k"]);
    assert_eq!(names(&store), ["one"]);
    store.stop().await.unwrap();
    assert_eq!(std::fs::read(root.claims_file()).unwrap(), claims_file);

    // Then it has released the claims, too.
    write(&root, &[]);
    let (store, report) = root.open_with_report();
    let difference = adopt_contested(&store, &report).await.difference;
    assert_eq!(difference.removed, ["a".into()]);
    assert_eq!(uids(&store), ["k"]);
    assert_eq!(asked_to_unprepare(&store), ["uid-one"]);
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
async fn an_import_adds_claims_and_their_holders() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    admit_claiming(&store, "b", "name").await.unwrap();
    let mut other = kubelets("name", &["x"], true);
    other.uid = "another".into();
    let file = envelope::write(Some(&[
        kubelets("one", &["k"], false),
        kubelets("two", &["a", "k"], true),
        other,
    ]));

    let report = store.import(file.as_bytes()).await.unwrap();

    assert_eq!(report.claims, ["uid-two".into()]);
    assert_eq!(report.difference.added, ["k".into()]);
    assert_eq!(report.difference.changed, ["a".into()]);
    assert_eq!(report.left_out[0].to_string(), "default/name");
    assert!(
        claims(&store)
            .iter()
            .all(devlet_core::dra::claims::Claim::is_prepared),
        "known ones stay as they are"
    );
    let before = (pods(&store), claims(&store));
    store.stop().await.unwrap();
    let store = root.open();
    assert_eq!((pods(&store), claims(&store)), before);
}

#[tokio::test]
async fn a_file_without_claims_does_not_unblock() {
    let root = Root::new();
    std::fs::write(root.claims_file(), "{ broken").unwrap();
    let store = root.open();
    let refused = store.import(envelope::write(None).as_bytes()).await.unwrap_err();
    assert!(matches!(refused, ImportError::Empty { .. }), "{refused:?}");
    let file = envelope::write(Some(&[kubelets("one", &["k"], true)]));
    store.import(file.as_bytes()).await.unwrap();
    assert_eq!(store.read(|node| node.blocked().cloned()), None);
    assert_eq!(names(&store), ["one"]);
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

#[tokio::test]
async fn an_import_does_not_bring_back_a_claim_that_was_abandoned() {
    let (_root, store) = root_with_an_abandoned_claim().await;
    let file = envelope::write(Some(&[kubelets("one", &["k"], true)]));
    let report = store.import(file.as_bytes()).await.unwrap();
    assert_eq!(report.left_out[0].to_string(), "default/one");
    assert_eq!(
        pods(&store),
        [],
        "it would wait for a claim that is being unprepared"
    );
}

#[tokio::test]
async fn an_import_does_not_bring_back_a_claim_that_is_being_unprepared() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    let file = envelope::write(Some(&[kubelets("one", &["a", "k"], true)]));
    store.release(&"a".into()).await.unwrap();
    let is_left_out = async || {
        let report = store.import(file.as_bytes()).await.unwrap();
        assert_eq!(report.left_out[0].to_string(), "default/one");
        assert_eq!(pods(&store), [], "its driver may undo it at any time");
    };
    is_left_out().await;
    let calls = store.update(|node| node.due_calls(NOW));
    assert_eq!(calls[0].operation, Operation::Unprepare);
    is_left_out().await;
    answer_calls(&store, calls);
    is_left_out().await;
    assert!(store.record_claims().await.unwrap());

    // Now the claim is gone, and only the file has it.
    let report = store.import(file.as_bytes()).await.unwrap();
    assert_eq!((report.claims.len(), report.left_out.len()), (1, 0));
    assert_eq!(uids(&store), ["a", "k"]);
}

#[tokio::test]
async fn a_claim_is_not_imported_while_all_its_pods_are_in_flight() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    let file = envelope::write(Some(&[kubelets("one", &["k"], true)]));
    store
        .update(|node| node.begin_release(&"a".into()))
        .expect("it is on record");

    let refused = store.import(file.as_bytes()).await.unwrap_err();

    assert_eq!(refused, ImportError::InFlight { pod: "a".into() });
    store.update(|node| node.cancel_release(&"a".into()));
    store.import(file.as_bytes()).await.unwrap();
    assert_eq!(uids(&store), ["a", "k"]);
}

#[tokio::test]
async fn a_pod_waits_for_a_claim_that_is_being_imported() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    let file = envelope::write(Some(&[kubelets("one", &["k"], true)]));
    disk.hold_syncs();
    let mut import = pin!(store.import(file.as_bytes()));
    assert!(start(&mut import).is_pending());

    let refused = store
        .hold(&claiming("a", "one"), &Preferences::new())
        .unwrap_err();
    assert_eq!(refused, ReserveError::InFlight.into());
    let left = envelope::write(Some(&[kubelets("one", &[], false)]));
    let twice = store.import(left.as_bytes()).await.unwrap_err();
    let key = claiming("a", "one").claims[0].claim.key.clone();
    assert_eq!(twice, ImportError::ClaimInFlight { claim: key });
    disk.release_syncs();
    import.await.unwrap();

    // It joins the claim on disk and is dropped: the claim is unchanged.
    drop(store.hold(&claiming("a", "one"), &Preferences::new()).unwrap());
    assert_eq!(claims(&store)[0].preparations[DRIVER].devices.len(), 1);
    store.release(&"k".into()).await.unwrap();
    let calls = store.update(|node| node.due_calls(NOW));
    assert_eq!(calls[0].operation, Operation::Unprepare);
    answer_calls(&store, calls);
    assert!(store.record_claims().await.unwrap());
    store.stop().await.unwrap();
    assert_eq!(names(&root.open()), Vec::<String>::new());
}

/// Changes the file as a kubelet that took over and stopped again, and starts devlet.
async fn take_over(root: &Root, change: impl FnOnce(&mut Vec<dra::Claim>)) -> Store {
    let mut file = read(root);
    change(&mut file);
    let file = envelope::write(Some(&file));
    // The newline makes the hash unknown. A kubelet does not write it, but accepts it.
    std::fs::write(root.claims_file(), file + "\n").unwrap();
    let (store, report) = root.open_with_report();
    if report.takeover.is_none() {
        adopt_contested(&store, &report).await;
    }
    store
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

#[tokio::test]
async fn a_kubelet_does_not_take_away_what_its_file_cannot_contain() {
    for (old, new) in [("uid-1", "uid-2"), ("uid-2", "uid-1")] {
        for is_removed in [false, true] {
            let root = Root::new();
            let store = root.open();
            let connection = drive(&store);
            admit_with_uid(&store, "a", old).await;
            store.update(|node| node.driver_deregistered(connection, NOW));
            store.release(&"a".into()).await.unwrap();
            store.update(|node| node.abandon(&"a".into(), &DRIVER.into()));
            assert!(store.record_claims().await.unwrap());
            drive(&store);
            admit_with_uid(&store, "b", new).await;
            store.stop().await.unwrap();

            let store = take_over(&root, |file| {
                assert_eq!(file[0].uid, new);
                file.truncate(usize::from(!is_removed));
            })
            .await;

            let left = claims(&store).into_iter().map(|claim| claim.uid.to_string());
            let left: Vec<String> = left.collect();
            assert!(left.contains(&old.to_owned()), "{left:?}");
            assert_eq!(uids(&store).is_empty(), is_removed);
            // A claim that the operator takes from its pods is unprepared, even if a kubelet has already done so.
            let mut expected = vec![old];
            expected.extend(is_removed.then_some(new));
            expected.sort_unstable();
            assert_eq!(asked_to_unprepare(&store), expected);
        }
    }
}

#[tokio::test]
async fn an_abandoned_driver_is_still_called_after_a_kubelet_has_unprepared_the_rest() {
    for is_removed in [false, true] {
        let (root, store) = root_with_an_abandoned_claim().await;
        let mut request = claiming("b", "one");
        request.claims[0].claim.drivers.clear();
        let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
        held.intent().await.unwrap();
        held.commit(&request, Vec::new()).await.unwrap();
        store.stop().await.unwrap();

        let store = take_over(&root, |file| file.truncate(usize::from(!is_removed))).await;

        assert_eq!(uids(&store).is_empty(), is_removed);
        assert_eq!(asked_to_unprepare(&store), ["uid-one"]);
    }
}

#[tokio::test]
async fn a_file_that_lacks_a_claim_does_not_end_its_unpreparation() {
    for state in ["unpreparing", "pending", "abandoned"] {
        for has_another_driver in [false, true] {
            let root = Root::new();
            let store = root.open();
            let connection = drive(&store);
            admit_claiming(&store, "other", "two").await.unwrap();
            store.mirror().await.unwrap();
            let mut old = read(&root);
            let mut request = claiming("a", "one");
            let drivers = &mut request.claims[0].claim.drivers;
            let device = &mut drivers.values_mut().next().unwrap().devices[0];
            device.admin_access = false;
            let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
            held.intent().await.unwrap();
            if state == "pending" {
                drop(held);
            } else {
                prepare(&store, held.id());
                held.commit(&request, Vec::new()).await.unwrap();
                store.update(|node| node.driver_deregistered(connection, NOW));
                store.release(&"a".into()).await.unwrap();
            }
            if state == "abandoned" {
                store.update(|node| node.abandon(&"a".into(), &DRIVER.into()));
                assert!(store.record_claims().await.unwrap());
            }
            let before = claims(&store);
            store.stop().await.unwrap();
            if has_another_driver {
                // The file has the claim, but neither its driver nor its devices.
                let mut claim = kubelets("one", &["k"], true);
                let drivers = claim.drivers.as_mut().unwrap();
                let driver = drivers.remove(DRIVER).unwrap();
                drivers.insert("other.acme.com".into(), driver);
                old.push(claim);
            }
            write(&root, &old);

            let (store, report) = root.open_with_report();

            assert_eq!(report.blocked, None, "{state}");
            let after = claims(&store);
            let one = after
                .iter()
                .find(|claim| claim.uid.as_str() == "uid-one")
                .unwrap();
            let was = before.iter().find(|claim| claim.uid == one.uid).unwrap();
            assert_eq!(
                one.preparations.get(DRIVER),
                was.preparations.get(DRIVER),
                "{state}"
            );
            drive(&store);
            let mut rival = claiming("b", "rival");
            rival.claims[0].claim.drivers = request.claims[0].claim.drivers.clone();
            store.hold(&rival, &Preferences::new()).unwrap_err();
            if !has_another_driver {
                assert_eq!(asked_to_unprepare(&store), ["uid-one"], "{state}");
            }
        }
    }
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
