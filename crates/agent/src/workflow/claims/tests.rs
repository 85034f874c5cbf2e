//! Tests of claims, with a fake driver: the test ends each of its calls.

mod background;
mod prepare;
mod unprepare;

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
    PodRequest, PodUid, PreferenceQuery, Preferences, Source,
};
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::device_plugin::clients::PluginClients;
use crate::dra::{Prepared, Unprepared};
use crate::grpc::call::CallError;
use crate::reconcile;
use crate::store::{CommitError, OpenOptions};
use crate::workflow::admit::{self, AdmitError, PluginCalls};
use crate::workflow::remove::{self, RemoveError};
use crate::workflow::start_container::{StartContainerError, start_container};

const GPU: &str = "gpu.acme.com";
const NIC: &str = "nic.acme.com";
const WIDGET: &str = "acme.com/widget";

/// A call that ends when the test chooses its end.
struct ReceivedCall {
    call: Call,
    end: oneshot::Sender<End>,
}

enum End {
    /// The call succeeds, except for these claims.
    Answers(&'static [&'static str]),
    /// The answer does not contain any claim.
    OmitsClaims,
    Panics,
}

impl ReceivedCall {
    fn claims(&self) -> Vec<&str> {
        self.call.claims.iter().map(|(uid, _)| uid.as_str()).collect()
    }

    /// Answers with success for all claims.
    fn done(self) {
        self.ends(End::Answers(&[]));
    }

    fn ends(self, end: End) {
        assert!(self.end.send(end).is_ok(), "the call has been cancelled");
    }
}

struct Fake(mpsc::UnboundedSender<ReceivedCall>);

impl Fake {
    async fn receive(&self, call: &Call) -> Result<Vec<(ClaimUid, Result<(), String>)>, DriverCallError> {
        let (end, ended) = oneshot::channel();
        let call = call.clone();
        let (driver, uids) = (call.driver.clone(), call.claims.clone());
        self.0.send(ReceivedCall { call, end }).unwrap();
        match ended.await {
            Ok(End::Answers(failing)) => {
                let uids = uids.into_iter().map(|(uid, _)| uid);
                Ok(uids
                    .map(|uid| {
                        let fails = failing.contains(&uid.as_str());
                        (uid, if fails { Err("no power".to_owned()) } else { Ok(()) })
                    })
                    .collect())
            }
            Ok(End::OmitsClaims) => Ok(Vec::new()),
            Ok(End::Panics) => panic!("on purpose"),
            Err(_) => Err(DriverCallError::NotConnected { driver }),
        }
    }
}

impl DriverCalls for Fake {
    async fn prepare(&self, call: &Call, _: Instant) -> Result<Prepared, DriverCallError> {
        assert_eq!(call.operation, Operation::Prepare);
        let results = self.receive(call).await?.into_iter();
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
        Ok(self.receive(call).await?.into_iter().collect())
    }
}

fn device_of(uid: &str) -> String {
    format!("dev-{uid}")
}

/// A node with one widget and two fake drivers.
struct Bed {
    directory: tempfile::TempDir,
    store: Store,
    claims: Claims<Fake>,
    received: mpsc::UnboundedReceiver<ReceivedCall>,
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

    /// Like [`Bed::on`], with a limit on the memory of each driver.
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
        let (sender, received) = mpsc::unbounded_channel();
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
            received,
            tasks,
            stop,
            drivers: BTreeMap::new(),
        };
        bed.connect(GPU);
        bed.connect(NIC);
        bed
    }

    /// With the background passes of `reconcile::claims`.
    fn with_background() -> Self {
        let bed = Self::new();
        bed.run();
        bed
    }

    fn run(&self) {
        self.tasks
            .spawn(reconcile::claims::run(self.claims.clone(), self.stop.clone()));
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

    /// Connects a driver again: failed calls are retried at once.
    fn reconnect(&self, driver: &'static str) {
        self.disconnect(driver);
        let now = self.store.now();
        self.store.update(|node| node.link_up(self.drivers[driver], now));
    }

    async fn next_call(&mut self) -> ReceivedCall {
        let received = tokio::time::timeout(Duration::from_secs(60), self.received.recv());
        received.await.expect("no driver was called").unwrap()
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

    /// Admits a pod, with success of all drivers.
    async fn admitted(&mut self, request: &PodRequest) -> Pod {
        let admission = self.admit(request);
        let drivers: BTreeSet<_> = request
            .claims
            .iter()
            .flat_map(|each| each.claim.drivers.keys())
            .collect();
        for _ in drivers {
            self.next_call().await.done();
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

    fn claim_uids(&self) -> Vec<String> {
        let uids = |node: &Node| node.claims().map(|view| view.claim.uid.to_string()).collect();
        self.store.read(uids)
    }

    async fn until(&self, condition: impl Fn(&Node) -> bool) {
        let mut changes = self.store.subscribe();
        let waiting = async {
            loop {
                changes.borrow_and_update();
                if self.store.read(&condition) {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting)
            .await
            .unwrap();
    }

    async fn until_no_claims(&self) {
        self.until(|node| node.claims().next().is_none()).await;
    }

    /// Stops the node, and opens its state again.
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

/// Returns a pod that uses a widget, and claims of these drivers.
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

/// Like [`pod`], without the widget.
fn without_widget(uid: &str, claims: &[(&str, &[&str])]) -> PodRequest {
    let mut request = pod(uid, claims);
    request.containers[0].wants.clear();
    request
}
