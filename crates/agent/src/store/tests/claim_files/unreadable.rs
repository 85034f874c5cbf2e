//! Files that cannot be read, and damaged ones.

use super::*;

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
