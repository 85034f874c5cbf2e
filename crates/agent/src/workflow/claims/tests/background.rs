//! Tests of claims without a waiting caller: after failures, restarts and reboots.

use super::*;

#[tokio::test]
async fn the_result_of_a_call_is_recorded_after_its_caller_left() {
    let mut bed = Bed::with_background();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let received = bed.next_call().await;

    admission.abort();
    assert!(admission.await.unwrap_err().is_cancelled());

    assert_eq!(bed.free(), 1);
    received.done();
    let received = bed.next_call().await;
    assert_eq!(received.call.operation, Operation::Unprepare);
    received.done();
    bed.until_no_claims().await;
}

#[tokio::test]
async fn claims_are_unprepared_after_a_plugin_refused() {
    struct Refusing;
    impl PluginCalls for Refusing {
        async fn preferred(
            &self,
            _: &PreferenceQuery,
            _: Instant,
        ) -> Result<Vec<devlet_core::DeviceId>, CallError> {
            Ok(Vec::new())
        }
        async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
            let deadline = Duration::ZERO;
            Err(CallError::TimedOut {
                method: "Allocate",
                deadline,
            })
        }
    }
    let mut bed = Bed::with_background();
    let never = CancellationToken::new();
    let request = pod("a", &[("c1", &[GPU])]);
    let refused = admit::admit(
        &bed.store,
        &Refusing,
        &bed.claims,
        &request,
        in_a_minute(),
        &never,
        |_| {},
    );
    let refused = refused.await.unwrap_err();
    assert!(matches!(refused, AdmitError::Plugin { .. }), "{refused:?}");
    assert_eq!(bed.free(), 1);
    // The driver may have been called before the plugin refused.
    while !bed.claim_uids().is_empty() {
        let gone = bed.store.clone();
        let mut changes = gone.subscribe();
        tokio::select! {
            received = bed.received.recv() => received.unwrap().done(),
            _ = changes.changed() => {}
        }
    }
}

#[tokio::test]
async fn the_memory_for_all_claims_of_a_driver_is_limited() {
    // Each device takes 220 bytes.
    let mut bed = Bed::limited(tempfile::tempdir().unwrap(), "boot-1", 300);
    bed.run();
    let both = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    let admission = bed.admit_by(&both, soon());
    bed.next_call().await.done();
    let refused = admission.await.unwrap().unwrap_err().to_string();
    assert_eq!(
        refused.matches("limits.bytesPerDriver allows 300").count(),
        1,
        "the first one fits: {refused}"
    );
    assert!(refused.contains("driver gpu.acme.com reports for ResourceClaim default/c2: too much"));
    // Both are unprepared, which frees the memory.
    while !bed.claim_uids().is_empty() {
        let gone = bed.store.clone();
        let mut changes = gone.subscribe();
        tokio::select! {
            received = bed.received.recv() => received.unwrap().done(),
            _ = changes.changed() => {}
        }
    }
    let pod = bed.admitted(&pod("a", &[("c2", &[GPU]), ("c3", &[NIC])])).await;
    assert_eq!(pod.claims.len(), 2, "each driver has its own limit");
}

#[tokio::test]
async fn a_node_that_stops_does_not_wait_for_drivers() {
    let mut bed = Bed::with_background();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let received = bed.next_call().await;
    bed.stop.cancel();
    bed.tasks.close();
    tokio::time::timeout(Duration::from_secs(60), bed.tasks.wait())
        .await
        .unwrap();
    assert!(received.end.is_closed());
    let ended = admission.await.unwrap();
    assert!(matches!(ended, Err(AdmitError::TimedOut { .. })), "{ended:?}");
}

#[tokio::test]
async fn claims_of_an_unanswered_admission_are_unprepared_after_a_restart() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.next_call().await.done();
    // The process ends before the pod is on record.
    admission.abort();
    let _ = admission.await;
    bed.store.release(&"a".into()).await.ok();
    let mut bed = bed.restarted("boot-1").await;
    assert_eq!(bed.claim_uids(), ["c1"]);
    bed.run();
    let received = bed.next_call().await;
    assert_eq!(received.call.operation, Operation::Unprepare);
    received.done();
    bed.until_no_claims().await;
}

#[tokio::test]
async fn after_a_reboot_claims_are_prepared_again_and_containers_wait_for_that() {
    let mut bed = Bed::new();
    bed.admitted(&without_widget("a", &[("c1", &[GPU])])).await;
    let mut bed = bed.restarted("boot-2").await;
    bed.run();
    let received = bed.next_call().await;
    assert_eq!(
        (received.call.operation, received.claims()),
        (Operation::Prepare, vec!["c1"])
    );
    let (plugins, deadlines) = (PluginClients::default(), crate::config::Deadlines::default());
    let uid = PodUid::from("a");
    let start = |deadline| start_container(&bed.store, &plugins, &deadlines, &uid, "main", deadline);
    let late = start(soon()).await.unwrap_err();
    assert!(matches!(late, StartContainerError::Unprepared { .. }), "{late:?}");
    assert!(
        late.to_string()
            .contains("DRA driver gpu.acme.com has not answered"),
        "{late}"
    );

    received.done();

    let (options, _) = start(in_a_minute()).await.unwrap();
    assert_eq!(options.cdi_devices, ["acme.com/gpu=c1"]);
    bed.until(|node| !node.has_unrecorded()).await;
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(dump["claims"][0]["drivers"][0]["state"], "prepared");
}

#[tokio::test]
async fn device_health_expires_without_a_new_report() {
    let bed = Bed::with_background();
    let device = PoolDevice {
        pool: "pool".into(),
        device: "dev".into(),
    };
    let report = HealthReport {
        device: device.clone(),
        health: DeviceHealth::Healthy,
        message: String::new(),
        lease_ms: 50,
    };
    let now = bed.store.now();
    let health = |node: &Node| node.device_health(&GPU.into(), &device, now).0;
    bed.store
        .update(|node| node.health_reported(bed.drivers[GPU], vec![report], now));
    assert_eq!(bed.store.read(health), DeviceHealth::Healthy);
    bed.until(|node| node.next_expiry().is_none()).await;
}
