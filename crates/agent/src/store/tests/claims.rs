//! Claims are on disk before a driver is called, and until they are unprepared.

use std::io::ErrorKind;

use devlet_core::dra::claims::{
    AllocatedClaim, AllocatedDevice, AllocationResult, Call, Claim, ClaimKey, Operation, PreparationState,
    PreparedDevice,
};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::{ClaimReference, ClaimRequest, ClaimUid, ReservationId, ReserveError};

use super::disk::Disk;
use super::*;
use crate::store::{Held, HoldError, OnReboot};

pub(super) const DRIVER: &str = "gpu.acme.com";

/// Connects a DRA driver.
pub(super) fn drive(store: &Store) -> ConnectionId {
    let offer = DriverOffer {
        driver: DRIVER.into(),
        endpoint: "/run/driver.sock".into(),
        process: devlet_core::ProcessId { uid: 0, pid: None },
        may_share: false,
        service: "v1.DRAPlugin".into(),
        service_reason: String::new(),
        health_service: None,
    };
    store.update(|node| {
        let (connection, _) = node.driver_registered(offer, NOW).unwrap();
        node.link_up(connection, NOW);
        connection
    })
}

/// Returns the request of a pod with a container that uses one claim with one device.
pub(super) fn claiming(uid: &str, claim: &str) -> PodRequest {
    let allocated = AllocationResult {
        driver: DRIVER.into(),
        device: AllocatedDevice {
            request: "req".into(),
            pool: "pool".into(),
            device: format!("dev-{claim}"),
            share: Some("share".into()),
            admin_access: true,
        },
        skip: Vec::new(),
    };
    let key = ClaimKey {
        namespace: "default".into(),
        name: claim.into(),
    };
    let mut request = request(uid, 0);
    request.containers[0].claims.push(ClaimReference {
        claim: "gpu".into(),
        request: Some("req".into()),
    });
    request.claims.push(ClaimRequest {
        name: "gpu".into(),
        claim: AllocatedClaim::new(key, format!("uid-{claim}").into(), [allocated]),
    });
    request
}

/// Carries out the calls that the driver would get.
pub(super) fn answer_calls(store: &Store, calls: Vec<Call>) {
    for call in calls {
        let uids = call.claims.into_iter().map(|(uid, _)| uid);
        store.update(|node| match call.operation {
            Operation::Prepare => {
                let device = |uid: &ClaimUid| PreparedDevice {
                    requests: vec!["req".into()],
                    pool: "pool".into(),
                    device: uid.as_str().replace("uid-", "dev-"),
                    share: Some("share".into()),
                    cdi_devices: vec![format!("acme.com/gpu={uid}")],
                };
                let results = uids.map(|uid| (uid.clone(), Ok(vec![device(&uid)])));
                let failures = node.prepared(call.id, results.collect(), |_| true, NOW);
                assert_eq!(failures, []);
            }
            Operation::Unprepare => {
                let failures = node.unprepared(call.id, uids.map(|uid| (uid, Ok(()))).collect(), NOW);
                assert_eq!(failures, []);
            }
        });
    }
}

pub(super) fn prepare(store: &Store, id: ReservationId) {
    let calls = store.update(|node| node.prepare_calls(id, NOW));
    answer_calls(store, calls);
}

fn unprepare(store: &Store) {
    let calls = store.update(|node| node.due_calls(NOW));
    answer_calls(store, calls);
}

fn hold(store: &Store, request: &PodRequest) -> Held {
    store.hold(request, &Preferences::new()).unwrap().unwrap()
}

pub(super) async fn admit_claiming(store: &Store, uid: &str, claim: &str) -> Result<Pod, CommitError> {
    let request = claiming(uid, claim);
    let held = hold(store, &request);
    held.intent().await?;
    prepare(store, held.id());
    held.commit(&request, Vec::new()).await
}

pub(super) fn claims(store: &Store) -> Vec<Claim> {
    store.read(|node| node.claims().map(|view| view.claim.clone()).collect())
}

/// Returns a copy of the files as a kill at this moment would leave them.
fn after_a_kill(root: &Root) -> (Root, Store) {
    let after = Root::new();
    std::fs::copy(root.database(), after.database()).unwrap();
    let store = after.open();
    (after, store)
}

#[tokio::test]
async fn a_restart_restores_claims_and_their_holders() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    admit_claiming(&store, "b", "one").await.unwrap();
    admit_claiming(&store, "c", "two").await.unwrap();
    let before = (pods(&store), claims(&store));
    store.stop().await.unwrap();

    let store = root.open();

    assert_eq!((pods(&store), claims(&store)), before);
    assert_eq!(before.1.len(), 2);
    let holders = store.read(|node| node.claim(&"uid-one".into()).unwrap().pods);
    assert_eq!(holders, ["a".into(), "b".into()]);
    let names = store.read(|node| node.cdi_devices(&"c".into(), "main"));
    assert_eq!(names, ["acme.com/gpu=uid-two"]);
    assert!(
        store.update(|node| node.due_calls(NOW)).is_empty(),
        "there is nothing to be done"
    );
}

#[tokio::test]
async fn an_intent_is_on_disk_before_a_driver_is_called() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    let held = hold(&store, &claiming("a", "one"));
    let early = store.update(|node| node.prepare_calls(held.id(), NOW));
    assert_eq!(early, [], "nothing is on disk yet");

    held.intent().await.unwrap();

    let (_root, revived) = after_a_kill(&root);
    let on_disk = claims(&revived);
    assert_eq!(on_disk[0].uid, "uid-one".into());
    let state = on_disk[0].preparations[DRIVER].state;
    assert_eq!(state, PreparationState::Pending);
    assert!(pods(&revived).is_empty());
    drive(&revived);
    let due = revived.update(|node| node.due_calls(NOW));
    assert_eq!(due[0].operation, Operation::Unprepare, "it may have been called");
    let syncs = disk.syncs();
    held.intent().await.unwrap();
    assert_eq!(disk.syncs(), syncs, "it is there already");
    let calls = store.update(|node| node.prepare_calls(held.id(), NOW));
    assert_eq!(calls.len(), 1);
}

#[tokio::test]
async fn a_pod_and_its_claims_are_one_write() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    store.mirror().await.unwrap();
    let request = claiming("a", "one");
    let held = hold(&store, &request);
    held.intent().await.unwrap();
    prepare(&store, held.id());
    let syncs = disk.syncs();

    held.commit(&request, Vec::new()).await.unwrap();

    assert_eq!(disk.syncs(), syncs + 1);
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived), claims(&store));
    assert!(claims(&revived)[0].is_prepared());
    assert_eq!(pods(&revived), pods(&store));
}

#[tokio::test]
async fn a_pod_that_joins_or_leaves_a_claim_costs_one_write() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.mirror().await.unwrap();
    let syncs = disk.syncs();

    admit_claiming(&store, "b", "one").await.unwrap();
    assert_eq!(disk.syncs(), syncs + 1, "the intent is there already");
    store.release(&"a".into()).await.unwrap();
    assert_eq!(disk.syncs(), syncs + 2);
    assert!(!store.record_claims().await.unwrap(), "others hold the claim");
    assert_eq!(disk.syncs(), syncs + 2);

    store.release(&"b".into()).await.unwrap();
    assert_eq!(disk.syncs(), syncs + 3);
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived)[0].pod, "b".into(), "who held it last");
}

#[tokio::test]
async fn a_claim_is_on_disk_until_it_is_unprepared() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.release(&"a".into()).await.unwrap();
    assert!(
        !store.record_claims().await.unwrap(),
        "the driver has not been asked"
    );
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived).len(), 1);
    drive(&revived);
    assert_eq!(revived.read(|node| node.pending_unprepare(&"a".into())).len(), 1);
    unprepare(&revived);
    assert!(
        revived
            .read(|node| node.pending_unprepare(&"a".into()))
            .is_empty()
    );

    unprepare(&store);
    assert!(store.record_claims().await.unwrap());

    assert_eq!(claims(&store), []);
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived), []);
}

#[tokio::test]
async fn an_abandoned_preparation_is_recorded() {
    let root = Root::new();
    let store = root.open();
    let connection = drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    store.update(|node| node.driver_deregistered(connection, NOW));
    store.release(&"a".into()).await.unwrap();
    let abandoned = store.update(|node| node.abandon(&"a".into(), &DRIVER.into()));
    assert_eq!(abandoned, ["uid-one".into()]);
    assert!(store.record_claims().await.unwrap());
    store.stop().await.unwrap();

    let store = root.open();

    let state = claims(&store)[0].preparations[DRIVER].state;
    assert_eq!(state, PreparationState::Abandoned);
    assert!(store.read(|node| node.pending_unprepare(&"a".into())).is_empty());
}

#[tokio::test]
async fn an_intent_that_cannot_be_written_is_undone() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    let held = hold(&store, &claiming("a", "one"));
    disk.fail_syncs(Some(ErrorKind::StorageFull));

    held.intent().await.unwrap_err();

    assert_eq!(store.update(|node| node.prepare_calls(held.id(), NOW)), []);
    drop(held);
    assert_eq!(claims(&store), []);
    let refused = store.hold(&claiming("b", "two"), &Preferences::new());
    assert!(matches!(refused, Err(HoldError::Write(_))), "{refused:?}");
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    admit_claiming(&store, "b", "two").await.unwrap();
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived), claims(&store));
}

#[tokio::test]
async fn a_commit_that_cannot_be_written_leaves_a_claim_to_be_unprepared() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    let request = claiming("b", "two");
    let held = hold(&store, &request);
    held.intent().await.unwrap();
    prepare(&store, held.id());
    disk.fail_syncs(Some(ErrorKind::StorageFull));

    held.commit(&request, Vec::new()).await.unwrap_err();

    assert_eq!(uids(&store), ["a"]);
    disk.fail_syncs(None);
    wait_until_healthy(&store).await;
    // The database was created again from memory.
    let (_root, revived) = after_a_kill(&root);
    assert_eq!(claims(&revived), claims(&store));
    assert_eq!(claims(&revived).len(), 2);
    unprepare(&store);
    store.record_claims().await.unwrap();
    assert_eq!(claims(&store).len(), 1, "only what no pod holds is unprepared");
}

#[tokio::test]
async fn a_release_that_cannot_be_written_does_not_unprepare_claims() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    disk.fail_syncs(Some(ErrorKind::StorageFull));

    store.release(&"a".into()).await.unwrap_err();

    assert_eq!(store.update(|node| node.due_calls(NOW)), []);
    assert_eq!(uids(&store), ["a"]);
}

#[tokio::test]
async fn a_pod_that_holds_everything_is_admitted_on_a_full_disk() {
    let root = Root::new();
    let disk = Disk::default();
    let store = root.open_on(disk.storage());
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();
    disk.fail_syncs(Some(ErrorKind::StorageFull));
    store.release(&"a".into()).await.unwrap_err();

    let mut again = claiming("a", "one");
    assert!(store.hold(&again, &Preferences::new()).unwrap().is_none());

    again.claims.extend(claiming("a", "two").claims);
    let refused = store.hold(&again, &Preferences::new());
    assert!(matches!(refused, Err(HoldError::Write(_))), "{refused:?}");
}

#[tokio::test]
async fn a_stopped_store_rejects_intents() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    let held = hold(&store, &claiming("a", "one"));
    store.stop().await.unwrap();
    held.intent().await.unwrap_err();
    drop(held);
    assert_eq!(claims(&store), []);
}

#[tokio::test]
async fn after_a_reboot_claims_are_to_be_prepared_again_or_unprepared() {
    for (on_reboot, operation) in [
        (OnReboot::Keep, Operation::Prepare),
        (OnReboot::Release, Operation::Unprepare),
    ] {
        let root = Root::new();
        let store = root.open();
        drive(&store);
        admit_claiming(&store, "a", "one").await.unwrap();
        admit_claiming(&store, "b", "one").await.unwrap();
        store.stop().await.unwrap();
        let reboot = || OpenOptions {
            boot_id: "boot-2".into(),
            on_reboot,
            ..root.options()
        };
        let (store, _) = Store::open(reboot()).unwrap();
        // Also if the process is killed early.
        store.stop().await.unwrap();
        let (store, report) = Store::open(reboot()).unwrap();
        assert_eq!(report.reboot, None);
        drive(&store);

        let due = store.update(|node| node.due_calls(NOW));

        assert_eq!(due[0].operation, operation);
        let claim = &claims(&store)[0];
        assert_eq!(claim.preparations[DRIVER].state, PreparationState::Pending);
        assert_eq!(claim.preparations[DRIVER].devices.len(), 1, "kept for the record");
        if on_reboot == OnReboot::Release {
            assert_eq!(claim.pod, "b".into());
            let refused = store.hold(&claiming("a", "one"), &Preferences::new());
            let reason = match refused {
                Err(HoldError::Refused(reason)) => reason,
                other => panic!("{other:?}"),
            };
            assert!(matches!(reason, ReserveError::Unpreparing { .. }), "{reason}");
        }
    }
}

#[tokio::test]
async fn claims_are_in_a_dump() {
    let root = Root::new();
    let store = root.open();
    drive(&store);
    admit_claiming(&store, "a", "one").await.unwrap();

    let dump = store.dump().await.unwrap();

    let device = serde_json::json!({
        "pool": "pool", "device": "dev-one", "shareId": "share",
        "requests": ["req"], "cdiDevices": ["acme.com/gpu=uid-one"],
    });
    let driver = &dump["claims"][0]["drivers"][0];
    assert_eq!(driver["state"], "prepared");
    assert_eq!(driver["devices"][0], device);
    assert_eq!(driver["allocated"][0]["adminAccess"], true);
    assert_eq!(dump["pods"][0]["claims"][0]["uid"], "uid-one");
    assert_eq!(dump["pods"][0]["claimUses"][0]["request"], "req");
}
