//! Imports of a `dra_manager_state` into a running store.

use super::*;

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
