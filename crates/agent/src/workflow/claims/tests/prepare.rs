//! Tests of preparing claims for an admission.

use super::*;

#[tokio::test]
async fn a_pod_gets_its_devices_and_its_claims() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU])]);
    let admission = bed.admit(&request);

    let received = bed.next_call().await;
    assert_eq!(
        (received.call.operation, received.claims()),
        (Operation::Prepare, vec!["c1"])
    );
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(
        dump["claims"][0]["uid"], "c1",
        "on disk before the driver is called"
    );
    assert_eq!(dump["pods"], serde_json::json!([]));
    received.done();

    let pod = admission.await.unwrap().unwrap();
    assert_eq!(pod.claims.len(), 1);
    assert_eq!(pod.allocations.len(), 1);
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(dump["pods"][0]["claims"][0]["uid"], "c1");
    assert_eq!(dump["claims"][0]["drivers"][0]["state"], "prepared");
    let (options, _) = bed.store.read(|node| node.run_options(&"a".into(), "main"));
    assert_eq!(options.cdi_devices, ["acme.com/gpu=c1"]);
}

#[tokio::test]
async fn drivers_are_called_concurrently_and_once_for_all_claims() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU, NIC]), ("c3", &[NIC])]);
    let admission = bed.admit(&request);

    let (one, other) = (bed.next_call().await, bed.next_call().await);
    let mut received = [
        (one.call.driver.as_str(), one.claims()),
        (other.call.driver.as_str(), other.claims()),
    ];
    received.sort();
    assert_eq!(received, [(GPU, vec!["c1", "c2"]), (NIC, vec!["c2", "c3"])]);
    one.done();
    other.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn only_failed_claims_are_retried() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    let admission = bed.admit(&request);
    bed.next_call().await.ends(End::Answers(&["c2"]));
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;

    bed.reconnect(GPU);

    let received = bed.next_call().await;
    assert_eq!(received.claims(), ["c2"]);
    received.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_failed_call_is_retried_after_a_pause_without_another_event() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.next_call().await.ends(End::Answers(&["c1"]));
    let failed = Instant::now();
    bed.next_call().await.done();
    assert!(
        failed.elapsed() >= Duration::from_millis(900),
        "{:?}",
        failed.elapsed()
    );
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_admission_fails_if_a_driver_is_late_and_its_claim_is_unprepared() {
    let mut bed = Bed::with_background();

    let refused = bed
        .admit_until(&pod("a", &[("c1", &[GPU])]), soon())
        .await
        .unwrap_err();

    let text = refused.to_string();
    assert!(matches!(refused, AdmitError::TimedOut { .. }), "{refused:?}");
    assert!(
        text.contains("ResourceClaim default/c1: DRA driver gpu.acme.com has not answered"),
        "{text}"
    );
    assert_eq!(bed.free(), 1);
    assert!(bed.store.read(|node| node.might_need_unprepare(&"a".into())));
    bed.next_call().await.done();
    let received = bed.next_call().await;
    assert_eq!(received.call.operation, Operation::Unprepare);
    received.done();
    bed.until_no_claims().await;
    assert_eq!(bed.store.dump().await.unwrap()["claims"], serde_json::json!([]));
    assert!(!bed.store.read(|node| node.might_need_unprepare(&"a".into())));
}

#[tokio::test]
async fn the_error_names_a_driver_that_fails_until_the_deadline() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU])]);
    let admission = bed.admit_by(&request, Instant::now() + Duration::from_millis(500));
    bed.next_call().await.ends(End::Answers(&["c1"]));
    let refused = admission.await.unwrap().unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("driver gpu.acme.com reports for ResourceClaim default/c1: no power"),
        "{text}"
    );
}

#[tokio::test]
async fn an_admission_calls_a_driver_again_after_it_reconnects() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let received = bed.next_call().await;
    bed.disconnect(GPU);
    // The call fails when the connection ends.
    drop(received);
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;
    bed.reconnect(GPU);
    bed.next_call().await.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn pods_that_share_a_claim_share_its_call() {
    let mut bed = Bed::new();
    let one = bed.admit(&without_widget("a", &[("c1", &[GPU])]));
    let received = bed.next_call().await;
    let other = bed.admit(&without_widget("b", &[("c1", &[GPU])]));
    bed.until(|node| node.is_in_flight(&"b".into())).await;

    received.done();

    one.await.unwrap().unwrap();
    other.await.unwrap().unwrap();
    let pods = bed.store.read(|node| node.claim(&"c1".into()).unwrap().pods);
    assert_eq!(pods.len(), 2);
    bed.remove("a", soon()).await.unwrap();
    assert!(
        bed.received.try_recv().is_err(),
        "no driver is called while a pod holds the claim"
    );
}

#[tokio::test]
async fn an_intent_that_another_admission_could_not_write_is_written() {
    let mut bed = Bed::new();
    let first = without_widget("a", &[("c1", &[GPU])]);
    let held = bed.store.hold(&first, &Preferences::new()).unwrap().unwrap();
    let intent = bed.store.update(|node| node.begin_intent(held.id()));
    assert_eq!(intent.put.len(), 1, "the intent is being written");
    let other = bed.admit(&without_widget("b", &[("c1", &[GPU])]));
    bed.until(|node| node.is_in_flight(&"b".into())).await;
    assert!(bed.received.try_recv().is_err(), "the intent is not on disk");

    bed.store.update(|node| node.cancel_intent(held.id()));
    drop(held);

    let received = tokio::time::timeout(Duration::from_secs(5), bed.received.recv()).await;
    received
        .expect("the other admission did not write the intent")
        .unwrap()
        .done();
    other.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pod_is_not_started_before_its_claims_are_on_record() {
    let mut bed = Bed::new();
    let claiming = pod("a", &[("c1", &[GPU])]);
    let (plugins, deadlines) = (PluginClients::default(), crate::config::Deadlines::default());
    let uid = PodUid::from("a");
    let start = |store| start_container(store, &plugins, &deadlines, &uid, "main", soon());
    let admission = bed.admit_by(&claiming, in_a_minute());
    let received = bed.next_call().await;
    let unknown = start(&bed.store).await.unwrap_err();
    assert!(matches!(unknown, StartContainerError::UnknownPod), "{unknown:?}");
    received.done();
    admission.await.unwrap().unwrap();
    start(&bed.store).await.unwrap();
}

#[tokio::test]
async fn a_call_that_panics_is_retried() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.next_call().await.ends(End::Panics);
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;
    bed.reconnect(GPU);
    bed.next_call().await.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn drivers_are_not_called_while_writes_fail() {
    let mut bed = Bed::new();
    bed.store.stop().await.unwrap();
    let refused = bed
        .admit_until(&without_widget("a", &[("c1", &[GPU])]), in_a_minute())
        .await;
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, AdmitError::Commit(CommitError::Write(_))),
        "{refused:?}"
    );
    assert!(bed.received.try_recv().is_err());
    assert_eq!(bed.claim_uids(), Vec::<String>::new());
}
