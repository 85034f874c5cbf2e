//! Files that a kubelet wrote after devlet: adopted at a start, or contested.

use super::*;

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
