//! Tests of unpreparing the claims of a removed pod.

use super::*;

#[tokio::test]
async fn the_removal_of_the_last_pod_waits_for_its_drivers() {
    let mut bed = Bed::with_background();
    bed.admitted(&pod("a", &[("c1", &[GPU, NIC])])).await;
    let removal = bed.remove_by_task("a");
    for _ in [GPU, NIC] {
        let received = bed.next_call().await;
        assert_eq!(
            (received.call.operation, received.claims()),
            (Operation::Unprepare, vec!["c1"])
        );
        assert!(!removal.is_finished());
        received.done();
    }
    removal.await.unwrap().unwrap();
    assert_eq!(bed.free(), 1);
    bed.until_no_claims().await;
    let unknown = bed.remove("a", soon()).await.unwrap_err();
    assert!(matches!(unknown, RemoveError::Unknown { .. }), "{unknown:?}");
}

#[tokio::test]
async fn a_claim_that_a_driver_omits_is_not_unprepared() {
    let mut bed = Bed::with_background();
    bed.admitted(&pod("a", &[("c1", &[GPU])])).await;
    let removal = bed.remove_by_task("a");
    bed.next_call().await.ends(End::OmitsClaims);
    let received = bed.next_call().await;
    assert_eq!(
        (received.call.operation, received.claims()),
        (Operation::Unprepare, vec!["c1"]),
        "the driver is called again"
    );
    assert!(!removal.is_finished());
    let waits = bed.store.read(|node| node.pending_unprepare(&"a".into()));
    let failure = waits[0].failure.as_ref().unwrap().to_string();
    assert_eq!(
        failure,
        "driver gpu.acme.com did not answer for ResourceClaim default/c1"
    );
    received.done();
    removal.await.unwrap().unwrap();
    bed.until_no_claims().await;
}

#[tokio::test]
async fn a_removal_that_times_out_names_the_driver_and_can_be_repeated() {
    let mut bed = Bed::with_background();
    bed.admitted(&pod("a", &[("c1", &[GPU])])).await;

    let late = bed.remove("a", soon()).await.unwrap_err();

    let text = late.to_string();
    assert!(matches!(late, RemoveError::Unpreparing { .. }), "{late:?}");
    assert!(
        text.contains("ResourceClaim default/c1: DRA driver gpu.acme.com has not answered"),
        "{text}"
    );
    assert!(text.contains("abandon the driver"), "{text}");
    assert_eq!(bed.free(), 1, "the devices are free");
    assert!(bed.store.read(|node| node.might_need_unprepare(&"a".into())));
    let again = bed.remove_by_task("a");
    bed.next_call().await.done();
    again.await.unwrap().unwrap();
    bed.until_no_claims().await;
}

#[tokio::test]
async fn a_driver_that_is_gone_for_good_can_be_abandoned() {
    let mut bed = Bed::with_background();
    bed.admitted(&pod("a", &[("c1", &[GPU, NIC])])).await;
    bed.disconnect(GPU);
    let removal = bed.remove_by_task("a");
    bed.next_call().await.done();
    let is_left = |node: &Node| {
        let waits = node.pending_unprepare(&"a".into());
        waits.len() == 1 && waits[0].reason == Reason::NoDriver
    };
    bed.until(is_left).await;
    assert!(!removal.is_finished());

    bed.remove_without("a", &[GPU], in_a_minute()).await.unwrap();

    removal.await.unwrap().unwrap();
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(dump["claims"][0]["drivers"][0]["state"], "abandoned");
    // The driver comes back.
    let mut bed = bed.restarted("boot-1").await;
    bed.run();
    let received = bed.next_call().await;
    assert_eq!(
        (received.call.operation, received.claims()),
        (Operation::Unprepare, vec!["c1"])
    );
    received.done();
    bed.until_no_claims().await;
}

#[tokio::test]
async fn a_claim_can_be_prepared_again_once_it_is_unprepared() {
    let mut bed = Bed::with_background();
    let request = pod("a", &[("c1", &[GPU])]);
    for _ in 0..3 {
        bed.admitted(&request).await;
        let removal = bed.remove_by_task("a");
        bed.next_call().await.done();
        removal.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_failing_claim_does_not_delay_other_claims() {
    let mut bed = Bed::with_background();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    bed.admitted(&request).await;
    let removal = bed.remove_by_task("a");
    bed.next_call().await.ends(End::Answers(&["c1"]));
    bed.until(|node| node.claim(&"c2".into()).is_none()).await;
    assert_eq!(bed.claim_uids(), ["c1"]);
    bed.reconnect(GPU);
    let received = bed.next_call().await;
    assert_eq!(received.claims(), ["c1"]);
    received.done();
    removal.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pod_without_claims_needs_neither_drivers_nor_extra_writes() {
    let mut bed = Bed::with_background();
    let before = bed.store.statistics().batches.count;
    let request = pod("a", &[]);
    bed.admit_until(&request, in_a_minute()).await.unwrap();
    bed.remove("a", in_a_minute()).await.unwrap();
    assert_eq!(bed.store.statistics().batches.count, before + 2);
    assert!(bed.received.try_recv().is_err());
}
