//! With drivers that do what the test says, call by call.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::ledger::Grant;
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::dra::claims::{AllocatedClaim, AllocatedDevice, AllocationResult, ClaimKey, PreparedDevice};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::dra::health::{DeviceHealth, HealthReport, PoolDevice};
use devlet_core::{
    ClaimReference, ClaimRequest, ConnectionId, ContainerKind, ContainerRequest, Pod, PodMetadata, PodName,
    PodRequest, PreferenceQuery, Preferences, Source,
};
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::device_plugin::clients::PluginClients;
use crate::dra::{Prepared, Unprepared};
use crate::grpc::call::CallError;
use crate::store::{CommitError, OpenOptions};
use crate::workflow::admit::{self, AdmitError, PluginCalls};
use crate::workflow::remove::{self, RemoveError};
use crate::workflow::start_container::{StartContainerError, start_container};

const GPU: &str = "gpu.acme.com";
const NIC: &str = "nic.acme.com";
const WIDGET: &str = "acme.com/widget";

/// A call that waits for the test to say how it ends.
struct Asked {
    call: Call,
    end: oneshot::Sender<End>,
}

enum End {
    /// For each claim that is named: it fails.
    Does(&'static [&'static str]),
    /// It answers, and says nothing about any claim.
    SaysNothing,
    Panics,
}

impl Asked {
    fn claims(&self) -> Vec<&str> {
        self.call.claims.iter().map(|(uid, _)| uid.as_str()).collect()
    }

    /// The driver does its work.
    fn done(self) {
        self.ends(End::Does(&[]));
    }

    fn ends(self, end: End) {
        assert!(self.end.send(end).is_ok(), "the call has been given up");
    }
}

struct Fake(mpsc::UnboundedSender<Asked>);

impl Fake {
    async fn ask(&self, call: &Call) -> Result<Vec<(ClaimUid, Result<(), String>)>, DriverCallError> {
        let (end, ended) = oneshot::channel();
        let call = call.clone();
        let (driver, uids) = (call.driver.clone(), call.claims.clone());
        self.0.send(Asked { call, end }).unwrap();
        match ended.await {
            Ok(End::Does(failing)) => {
                let uids = uids.into_iter().map(|(uid, _)| uid);
                Ok(uids
                    .map(|uid| {
                        let fails = failing.contains(&uid.as_str());
                        (uid, if fails { Err("no power".to_owned()) } else { Ok(()) })
                    })
                    .collect())
            }
            Ok(End::SaysNothing) => Ok(Vec::new()),
            Ok(End::Panics) => panic!("on purpose"),
            Err(_) => Err(DriverCallError::NotConnected { driver }),
        }
    }
}

impl DriverCalls for Fake {
    async fn prepare(&self, call: &Call, _: Instant) -> Result<Prepared, DriverCallError> {
        assert_eq!(call.operation, Operation::Prepare);
        let results = self.ask(call).await?.into_iter();
        let device = |uid: &ClaimUid| PreparedDevice {
            requests: vec!["req".into()],
            pool: "pool".into(),
            device: device_of(uid.as_str()),
            share: None,
            cdi_devices: vec![format!("acme.com/gpu={uid}")],
        };
        Ok(results
            .map(|(uid, result)| (uid.clone(), result.map(|()| vec![device(&uid)])))
            .collect())
    }

    async fn unprepare(&self, call: &Call, _: Instant) -> Result<Unprepared, DriverCallError> {
        assert_eq!(call.operation, Operation::Unprepare);
        Ok(self.ask(call).await?.into_iter().collect())
    }
}

fn device_of(uid: &str) -> String {
    format!("dev-{uid}")
}

/// A node with one widget, and drivers in the test's hands.
struct Bed {
    directory: tempfile::TempDir,
    store: Store,
    claims: Claims<Fake>,
    asked: mpsc::UnboundedReceiver<Asked>,
    tasks: TaskTracker,
    stop: CancellationToken,
    drivers: BTreeMap<&'static str, ConnectionId>,
}

impl Bed {
    fn new() -> Self {
        Self::on(tempfile::tempdir().unwrap(), "boot-1")
    }

    fn on(directory: tempfile::TempDir, boot: &str) -> Self {
        Self::limited(directory, boot, usize::MAX)
    }

    /// Whose drivers may fill so much memory.
    fn limited(directory: tempfile::TempDir, boot: &str, bytes_per_driver: usize) -> Self {
        let options = OpenOptions::new(directory.path().join("state.redb"), boot);
        let (store, _) = Store::open(options).unwrap();
        let now = store.now();
        store.update(|node| {
            let offer = Offer {
                resource: WIDGET.into(),
                endpoint: "widget.sock".into(),
                process: devlet_core::ProcessId { uid: 0, pid: None },
                may_share: false,
                options: PluginOptions::default(),
            };
            let (connection, _) = node.plugin_connected(offer, now).unwrap();
            let device = Device {
                id: "w0".into(),
                healthy: true,
                nodes: Vec::new(),
            };
            node.devices_listed(connection, DeviceList::new(vec![device]).0);
        });
        let (sender, asked) = mpsc::unbounded_channel();
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let claims = Claims::new(
            store.clone(),
            Fake(sender),
            Metrics::default(),
            tasks.clone(),
            stop.clone(),
            bytes_per_driver,
        );
        let mut bed = Self {
            directory,
            store,
            claims,
            asked,
            tasks,
            stop,
            drivers: BTreeMap::new(),
        };
        bed.connect(GPU);
        bed.connect(NIC);
        bed
    }

    /// With the rounds.
    fn with_rounds() -> Self {
        let bed = Self::new();
        bed.run();
        bed
    }

    fn run(&self) {
        self.tasks.spawn(self.claims.clone().run());
    }

    fn connect(&mut self, driver: &'static str) {
        let offer = DriverOffer {
            driver: driver.into(),
            endpoint: format!("{driver}.sock"),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            service: "v1.DRAPlugin".into(),
            service_reason: String::new(),
            health_service: None,
        };
        let now = self.store.now();
        let connection = self.store.update(|node| {
            let (connection, _) = node.driver_registered(offer, now).unwrap();
            node.link_up(connection, now);
            connection
        });
        self.drivers.insert(driver, connection);
    }

    fn disconnect(&self, driver: &'static str) {
        let now = self.store.now();
        self.store
            .update(|node| node.link_lost(self.drivers[driver], now));
    }

    /// It comes back: what failed is tried again at once.
    fn reconnect(&self, driver: &'static str) {
        self.disconnect(driver);
        let now = self.store.now();
        self.store.update(|node| node.link_up(self.drivers[driver], now));
    }

    async fn asked(&mut self) -> Asked {
        let asked = tokio::time::timeout(Duration::from_secs(60), self.asked.recv());
        asked.await.expect("a driver is called").unwrap()
    }

    async fn admit_until(&self, request: &PodRequest, deadline: Instant) -> Result<Pod, AdmitError> {
        let never = CancellationToken::new();
        admit::admit(
            &self.store,
            &Widgets,
            &self.claims,
            request,
            deadline,
            &never,
            |_| {},
        )
        .await
    }

    /// Admits in the background.
    fn admit(&self, request: &PodRequest) -> JoinHandle<Result<Pod, AdmitError>> {
        self.admit_by(request, in_a_minute())
    }

    fn admit_by(&self, request: &PodRequest, deadline: Instant) -> JoinHandle<Result<Pod, AdmitError>> {
        let (store, claims, request) = (self.store.clone(), self.claims.clone(), request.clone());
        tokio::spawn(async move {
            let never = CancellationToken::new();
            admit::admit(&store, &Widgets, &claims, &request, deadline, &never, |_| {}).await
        })
    }

    /// Admits a pod, with drivers that do their work.
    async fn admitted(&mut self, request: &PodRequest) -> Pod {
        let admission = self.admit(request);
        let drivers: BTreeSet<_> = request
            .claims
            .iter()
            .flat_map(|each| each.claim.drivers.keys())
            .collect();
        for _ in drivers {
            self.asked().await.done();
        }
        admission.await.unwrap().unwrap()
    }

    async fn remove(&self, pod: &str, deadline: Instant) -> Result<(), RemoveError> {
        self.remove_without(pod, &[], deadline).await
    }

    async fn remove_without(
        &self,
        pod: &str,
        drivers: &[&str],
        deadline: Instant,
    ) -> Result<(), RemoveError> {
        let drivers = drivers.iter().map(|&driver| driver.into()).collect();
        remove::remove(&self.store, &self.claims, &pod.into(), &drivers, deadline)
            .await
            .map(drop)
    }

    fn remove_by_task(&self, pod: &'static str) -> JoinHandle<Result<(), RemoveError>> {
        let (store, claims) = (self.store.clone(), self.claims.clone());
        tokio::spawn(async move {
            remove::remove(&store, &claims, &pod.into(), &BTreeSet::new(), in_a_minute())
                .await
                .map(drop)
        })
    }

    fn free(&self) -> usize {
        let now = self.store.now();
        self.store.read(|node| node.capacity_of(&WIDGET.into(), now).free)
    }

    fn known(&self) -> Vec<String> {
        let uids = |node: &Node| node.claims().map(|view| view.claim.uid.to_string()).collect();
        self.store.read(uids)
    }

    async fn until(&self, is_so: impl Fn(&Node) -> bool) {
        let mut changes = self.store.subscribe();
        let waiting = async {
            loop {
                changes.borrow_and_update();
                if self.store.read(&is_so) {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting)
            .await
            .unwrap();
    }

    async fn nothing_known(&self) {
        self.until(|node| node.claims().next().is_none()).await;
    }

    /// Ends everything, and starts again.
    async fn restarted(self, boot: &str) -> Self {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.store.stop().await.unwrap();
        Self::on(self.directory, boot)
    }
}

struct Widgets;

impl PluginCalls for Widgets {
    async fn preferred(
        &self,
        _: &PreferenceQuery,
        _: Instant,
    ) -> Result<Vec<devlet_core::DeviceId>, CallError> {
        Ok(Vec::new())
    }

    async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
        Ok(Answer::default())
    }
}

fn in_a_minute() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

/// A pod that uses a widget, and claims of these drivers.
fn pod(uid: &str, claims: &[(&str, &[&str])]) -> PodRequest {
    let claims = claims.iter().map(|(claim, drivers)| {
        let results = drivers.iter().map(|&driver| AllocationResult {
            driver: driver.into(),
            device: AllocatedDevice {
                request: "req".into(),
                pool: "pool".into(),
                device: device_of(claim),
                share: None,
                admin_access: false,
            },
            skip: Vec::new(),
        });
        let key = ClaimKey {
            namespace: "default".into(),
            name: (*claim).into(),
        };
        ClaimRequest {
            name: (*claim).into(),
            claim: AllocatedClaim::new(key, (*claim).into(), results),
        }
    });
    let claims: Vec<ClaimRequest> = claims.collect();
    PodRequest {
        uid: uid.into(),
        name: PodName {
            namespace: "default".into(),
            name: uid.into(),
        },
        source: Source::Api,
        fingerprint: 1,
        metadata: PodMetadata::default(),
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(WIDGET.into(), 1)]),
            claims: claims
                .iter()
                .map(|claim| ClaimReference {
                    claim: claim.name.clone(),
                    request: None,
                })
                .collect(),
        }],
        claims,
    }
}

/// The same without the widget, of which there is one.
fn without_widget(uid: &str, claims: &[(&str, &[&str])]) -> PodRequest {
    let mut request = pod(uid, claims);
    request.containers[0].wants.clear();
    request
}

#[tokio::test]
async fn a_pod_has_its_devices_and_its_claims() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU])]);
    let admission = bed.admit(&request);

    let asked = bed.asked().await;
    assert_eq!(
        (asked.call.operation, asked.claims()),
        (Operation::Prepare, vec!["c1"])
    );
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(
        dump["claims"][0]["uid"], "c1",
        "on disk before the driver is called"
    );
    assert_eq!(dump["pods"], serde_json::json!([]));
    asked.done();

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
async fn drivers_are_called_at_the_same_time_each_once_for_all_claims() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU, NIC]), ("c3", &[NIC])]);
    let admission = bed.admit(&request);

    let (one, other) = (bed.asked().await, bed.asked().await);
    let mut asked = [
        (one.call.driver.as_str(), one.claims()),
        (other.call.driver.as_str(), other.claims()),
    ];
    asked.sort();
    assert_eq!(asked, [(GPU, vec!["c1", "c2"]), (NIC, vec!["c2", "c3"])]);
    one.done();
    other.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn only_what_failed_is_tried_again() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    let admission = bed.admit(&request);
    bed.asked().await.ends(End::Does(&["c2"]));
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;

    bed.reconnect(GPU);

    let asked = bed.asked().await;
    assert_eq!(asked.claims(), ["c2"]);
    asked.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_failure_is_tried_again_after_a_pause_without_any_other_event() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.asked().await.ends(End::Does(&["c1"]));
    let failed = Instant::now();
    bed.asked().await.done();
    assert!(
        failed.elapsed() >= Duration::from_millis(900),
        "{:?}",
        failed.elapsed()
    );
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_driver_that_is_late_costs_the_admission_and_its_answer_is_undone() {
    let mut bed = Bed::with_rounds();

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
    bed.asked().await.done();
    let asked = bed.asked().await;
    assert_eq!(asked.call.operation, Operation::Unprepare);
    asked.done();
    bed.nothing_known().await;
    assert_eq!(bed.store.dump().await.unwrap()["claims"], serde_json::json!([]));
    assert!(!bed.store.read(|node| node.might_need_unprepare(&"a".into())));
}

#[tokio::test]
async fn a_driver_that_fails_until_the_deadline_is_in_the_error() {
    let mut bed = Bed::new();
    let request = pod("a", &[("c1", &[GPU])]);
    let admission = bed.admit_by(&request, Instant::now() + Duration::from_millis(500));
    bed.asked().await.ends(End::Does(&["c1"]));
    let refused = admission.await.unwrap().unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("driver gpu.acme.com reports for ResourceClaim default/c1: no power"),
        "{text}"
    );
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_take_the_answer_along() {
    let mut bed = Bed::with_rounds();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let asked = bed.asked().await;

    admission.abort();
    assert!(admission.await.unwrap_err().is_cancelled());

    assert_eq!(bed.free(), 1);
    asked.done();
    let asked = bed.asked().await;
    assert_eq!(asked.call.operation, Operation::Unprepare);
    asked.done();
    bed.nothing_known().await;
}

#[tokio::test]
async fn an_admission_that_waits_for_a_driver_tells_of_it_and_calls_it_when_it_comes() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let asked = bed.asked().await;
    bed.disconnect(GPU);
    // The call dies with the connection.
    drop(asked);
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;
    bed.reconnect(GPU);
    bed.asked().await.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn pods_that_share_a_claim_share_its_call() {
    let mut bed = Bed::new();
    let one = bed.admit(&without_widget("a", &[("c1", &[GPU])]));
    let asked = bed.asked().await;
    let other = bed.admit(&without_widget("b", &[("c1", &[GPU])]));
    bed.until(|node| node.is_in_flight(&"b".into())).await;

    asked.done();

    one.await.unwrap().unwrap();
    other.await.unwrap().unwrap();
    let pods = bed.store.read(|node| node.claim(&"c1".into()).unwrap().pods);
    assert_eq!(pods.len(), 2);
    bed.remove("a", soon()).await.unwrap();
    assert!(
        bed.asked.try_recv().is_err(),
        "nobody is called while a pod holds the claim"
    );
}

#[tokio::test]
async fn an_intent_that_another_admission_could_not_write_is_written() {
    let mut bed = Bed::new();
    let first = without_widget("a", &[("c1", &[GPU])]);
    let held = bed.store.hold(&first, &Preferences::new()).unwrap().unwrap();
    let intent = bed.store.update(|node| node.begin_intent(held.id()));
    assert_eq!(intent.put.len(), 1, "it is being written");
    let other = bed.admit(&without_widget("b", &[("c1", &[GPU])]));
    bed.until(|node| node.is_in_flight(&"b".into())).await;
    assert!(bed.asked.try_recv().is_err(), "it is not on disk");

    bed.store.update(|node| node.cancel_intent(held.id()));
    drop(held);

    let asked = tokio::time::timeout(Duration::from_secs(5), bed.asked.recv()).await;
    asked.expect("the other one writes it").unwrap().done();
    other.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_refusing_plugin_leaves_claims_to_be_unprepared() {
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
    let mut bed = Bed::with_rounds();
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
    // Whether the driver was called before the plugin refused, or not: nothing is left.
    while !bed.known().is_empty() {
        let gone = bed.store.clone();
        let mut changes = gone.subscribe();
        tokio::select! {
            asked = bed.asked.recv() => asked.unwrap().done(),
            _ = changes.changed() => {}
        }
    }
}

#[tokio::test]
async fn the_last_pod_to_leave_waits_for_its_drivers() {
    let mut bed = Bed::with_rounds();
    bed.admitted(&pod("a", &[("c1", &[GPU, NIC])])).await;
    let removal = bed.remove_by_task("a");
    for _ in [GPU, NIC] {
        let asked = bed.asked().await;
        assert_eq!(
            (asked.call.operation, asked.claims()),
            (Operation::Unprepare, vec!["c1"])
        );
        assert!(!removal.is_finished());
        asked.done();
    }
    removal.await.unwrap().unwrap();
    assert_eq!(bed.free(), 1);
    bed.nothing_known().await;
    let unknown = bed.remove("a", soon()).await.unwrap_err();
    assert!(matches!(unknown, RemoveError::Unknown { .. }), "{unknown:?}");
}

#[tokio::test]
async fn a_driver_that_says_nothing_about_a_claim_has_not_unprepared_it() {
    let mut bed = Bed::with_rounds();
    bed.admitted(&pod("a", &[("c1", &[GPU])])).await;
    let removal = bed.remove_by_task("a");
    bed.asked().await.ends(End::SaysNothing);
    let asked = bed.asked().await;
    assert_eq!(
        (asked.call.operation, asked.claims()),
        (Operation::Unprepare, vec!["c1"]),
        "it is asked again"
    );
    assert!(!removal.is_finished());
    let waits = bed.store.read(|node| node.pending_unprepare(&"a".into()));
    let failure = waits[0].failure.as_ref().unwrap().to_string();
    assert_eq!(
        failure,
        "driver gpu.acme.com did not answer for ResourceClaim default/c1"
    );
    asked.done();
    removal.await.unwrap().unwrap();
    bed.nothing_known().await;
}

#[tokio::test]
async fn a_pod_whose_claims_are_not_on_record_is_not_started() {
    let mut bed = Bed::new();
    let claiming = pod("a", &[("c1", &[GPU])]);
    let (plugins, deadlines) = (PluginClients::default(), crate::config::Deadlines::default());
    let uid = PodUid::from("a");
    let start = |store| start_container(store, &plugins, &deadlines, &uid, "main", soon());
    let admission = bed.admit_by(&claiming, in_a_minute());
    let asked = bed.asked().await;
    let unknown = start(&bed.store).await.unwrap_err();
    assert!(matches!(unknown, StartContainerError::UnknownPod), "{unknown:?}");
    asked.done();
    admission.await.unwrap().unwrap();
    start(&bed.store).await.unwrap();
}

#[tokio::test]
async fn a_removal_that_takes_too_long_says_what_it_waits_for_and_can_be_repeated() {
    let mut bed = Bed::with_rounds();
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
    bed.asked().await.done();
    again.await.unwrap().unwrap();
    bed.nothing_known().await;
}

#[tokio::test]
async fn a_driver_that_is_gone_for_good_can_be_given_up_on() {
    let mut bed = Bed::with_rounds();
    bed.admitted(&pod("a", &[("c1", &[GPU, NIC])])).await;
    bed.disconnect(GPU);
    let removal = bed.remove_by_task("a");
    bed.asked().await.done();
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
    // It comes back after all.
    let mut bed = bed.restarted("boot-1").await;
    bed.run();
    let asked = bed.asked().await;
    assert_eq!(
        (asked.call.operation, asked.claims()),
        (Operation::Unprepare, vec!["c1"])
    );
    asked.done();
    bed.nothing_known().await;
}

#[tokio::test]
async fn what_a_driver_may_fill_for_all_claims_together_is_limited() {
    // A device of these takes 220 bytes.
    let mut bed = Bed::limited(tempfile::tempdir().unwrap(), "boot-1", 300);
    bed.run();
    let both = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    let admission = bed.admit_by(&both, soon());
    bed.asked().await.done();
    let refused = admission.await.unwrap().unwrap_err().to_string();
    assert_eq!(
        refused.matches("limits.bytesPerDriver allows 300").count(),
        1,
        "the first one fits: {refused}"
    );
    assert!(refused.contains("driver gpu.acme.com reports for ResourceClaim default/c2: too much"));
    // Both are unprepared, and there is room again.
    while !bed.known().is_empty() {
        let gone = bed.store.clone();
        let mut changes = gone.subscribe();
        tokio::select! {
            asked = bed.asked.recv() => asked.unwrap().done(),
            _ = changes.changed() => {}
        }
    }
    let pod = bed.admitted(&pod("a", &[("c2", &[GPU]), ("c3", &[NIC])])).await;
    assert_eq!(pod.claims.len(), 2, "each driver has its own");
}

#[tokio::test]
async fn a_claim_can_be_had_again_as_soon_as_it_is_unprepared() {
    let mut bed = Bed::with_rounds();
    let request = pod("a", &[("c1", &[GPU])]);
    for _ in 0..3 {
        bed.admitted(&request).await;
        let removal = bed.remove_by_task("a");
        bed.asked().await.done();
        removal.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn one_claim_that_fails_holds_up_no_other() {
    let mut bed = Bed::with_rounds();
    let request = pod("a", &[("c1", &[GPU]), ("c2", &[GPU])]);
    bed.admitted(&request).await;
    let removal = bed.remove_by_task("a");
    bed.asked().await.ends(End::Does(&["c1"]));
    bed.until(|node| node.claim(&"c2".into()).is_none()).await;
    assert_eq!(bed.known(), ["c1"]);
    bed.reconnect(GPU);
    let asked = bed.asked().await;
    assert_eq!(asked.claims(), ["c1"]);
    asked.done();
    removal.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_call_that_panics_has_ended() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.asked().await.ends(End::Panics);
    bed.until(|node| {
        node.claims()
            .any(|view| view.waits.iter().any(|wait| wait.failure.is_some()))
    })
    .await;
    bed.reconnect(GPU);
    bed.asked().await.done();
    admission.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_node_that_stops_does_not_wait_for_drivers() {
    let mut bed = Bed::with_rounds();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    let asked = bed.asked().await;
    bed.stop.cancel();
    bed.tasks.close();
    tokio::time::timeout(Duration::from_secs(60), bed.tasks.wait())
        .await
        .unwrap();
    assert!(asked.end.is_closed());
    let ended = admission.await.unwrap();
    assert!(matches!(ended, Err(AdmitError::TimedOut { .. })), "{ended:?}");
}

#[tokio::test]
async fn a_restart_undoes_what_was_never_answered() {
    let mut bed = Bed::new();
    let admission = bed.admit(&pod("a", &[("c1", &[GPU])]));
    bed.asked().await.done();
    // Answered by the driver or not: the process ends before the pod is there.
    admission.abort();
    let _ = admission.await;
    bed.store.release(&"a".into()).await.ok();
    let mut bed = bed.restarted("boot-1").await;
    assert_eq!(bed.known(), ["c1"]);
    bed.run();
    let asked = bed.asked().await;
    assert_eq!(asked.call.operation, Operation::Unprepare);
    asked.done();
    bed.nothing_known().await;
}

#[tokio::test]
async fn after_a_reboot_claims_are_prepared_again_and_containers_wait_for_that() {
    let mut bed = Bed::new();
    bed.admitted(&without_widget("a", &[("c1", &[GPU])])).await;
    let mut bed = bed.restarted("boot-2").await;
    bed.run();
    let asked = bed.asked().await;
    assert_eq!(
        (asked.call.operation, asked.claims()),
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

    asked.done();

    let (options, _) = start(in_a_minute()).await.unwrap();
    assert_eq!(options.cdi_devices, ["acme.com/gpu=c1"]);
    bed.until(|node| !node.has_unrecorded()).await;
    let dump = bed.store.dump().await.unwrap();
    assert_eq!(dump["claims"][0]["drivers"][0]["state"], "prepared");
}

#[tokio::test]
async fn health_that_is_not_renewed_is_not_known_any_longer() {
    let bed = Bed::with_rounds();
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

#[tokio::test]
async fn a_pod_without_claims_calls_nobody_and_costs_no_write() {
    let mut bed = Bed::with_rounds();
    let before = bed.store.statistics().batches.count;
    let request = pod("a", &[]);
    bed.admit_until(&request, in_a_minute()).await.unwrap();
    bed.remove("a", in_a_minute()).await.unwrap();
    assert_eq!(bed.store.statistics().batches.count, before + 2);
    assert!(bed.asked.try_recv().is_err());
}

#[tokio::test]
async fn what_cannot_be_written_is_not_asked_for() {
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
    assert!(bed.asked.try_recv().is_err());
    assert_eq!(bed.known(), Vec::<String>::new());
}
