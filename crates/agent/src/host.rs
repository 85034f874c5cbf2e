//! Our own API, `devlet.v1`, on `devlet/devlet.sock`.
//!
//! Parse, do, answer: what things mean is in the `.proto` file, what happens in the workflows, and which code an
//! error gets in `grpc/status.rs`. Whoever can open the socket may ask; changing anything takes a user that the
//! configuration allows.
//!
//! An admission lives as long as its stream: if the caller leaves, it is dropped, and what was set aside is free
//! again. Streams end when the node stops, so that stopping does not wait for them.

mod claims;
mod convert;
mod dra_devices;
mod problems;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use devlet_client::v1;
use devlet_client::v1::devlet_server::{Devlet, DevletServer};
use devlet_core::dra::view::listed;
use devlet_core::{
    ClaimUid, DriverName, Moment, Node, Pod, PodName, PodRequest, PodUid, ReserveError, ResourceName, Source,
};
use devlet_uds::server::{self, ServerLimits};
use devlet_uds::{ListenError, PeerCred};
use futures_util::stream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::agent::Agent;
use crate::deadline;
use crate::grpc::status::since;
use crate::limits::Limit;
use crate::manifest;
use crate::store::{ForgetClaimError, ForgetFileError, OpenReport, is_unknown_pod, system_time};
use crate::words::{self, NamedPod, pod_label};
use crate::workflow::admit::AdmitError;

pub use claims::{ClaimLookupError, NothingToAbandon, UnknownDriver};

/// Manifests of so many bytes take a while to parse.
const LARGE_MANIFEST: usize = 64 << 10;
const LONG_MANIFEST: &str = "manifests of 64 KiB and more are parsed one after the other, and this one's turn did not come in \
                             time: admit it again, with a longer wait, or shorten it";

/// The pause between two snapshots of a watch: changes come in bursts, and the first of them is told at once.
const WATCH_PAUSE: Duration = Duration::from_millis(100);
/// After a look that found nothing new, the next one has to wait so many times longer than it took.
const WATCH_REST: u32 = 9;

/// Time after which a connection to the API without a call in flight is closed.
const IDLE: Duration = Duration::from_secs(300);

/// The caller may not change anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}; allow it under access.admit in devlet's configuration", who(.uid.as_ref()))]
pub struct NotAllowed {
    /// The caller, if the kernel says.
    pub uid: Option<u32>,
}

fn who(uid: Option<&u32>) -> String {
    match uid {
        Some(uid) => format!("user {uid} may not admit or remove pods"),
        None => "a user that is not known may not admit or remove pods".to_owned(),
    }
}

/// Why a text does not lead to a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodLookupError {
    /// The text is empty.
    #[error("no pod is named: say its UID, its name, or namespace/name")]
    Empty,
    /// None is called that.
    #[error("no such pod: {name}")]
    Unknown {
        /// The text.
        name: String,
    },
    /// Several are.
    #[error("several pods are called {name}: name one of {}", .pods.join(", "))]
    Ambiguous {
        /// The text.
        name: String,
        /// With their namespaces.
        pods: Vec<String>,
    },
    /// It is the UID of one pod and the name of others.
    #[error(
        "{name} is the UID of one pod and the name of another: say uid:{name} for {}, or {}",
        .of.as_deref().unwrap_or("the first"), .named.join(" or ")
    )]
    UidOrName {
        /// The text.
        name: String,
        /// The pod whose UID it is, if it has a name.
        of: Option<String>,
        /// Those whose name it is, with their namespaces.
        named: Vec<String>,
    },
}

/// Why a file is not forgotten.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetError {
    /// There is nothing to decide.
    #[error("there is no file to forget: pods are admitted")]
    NothingBlocked,
    /// It is about another file.
    #[error("the file to decide about is {file}")]
    OtherFile {
        /// That file.
        file: String,
    },
    /// It stays as it is.
    #[error(transparent)]
    Refused(#[from] ForgetFileError),
}

/// The service.
#[derive(Debug, Clone)]
pub struct Host {
    agent: Agent,
    /// By the steady clock of the store.
    started: Moment,
    wall_clock: fn() -> Moment,
    /// What a human should know of how the node started.
    findings: Arc<Vec<v1::Problem>>,
    /// Long manifests are parsed one at a time.
    parsing: Arc<Semaphore>,
}

/// Serves our API for a node until it stops.
pub fn serve(agent: &Agent, report: &OpenReport) -> Result<(), ListenError> {
    let listener = devlet_uds::listen(agent.config().api_socket(), devlet_uds::DEFAULT_MODE)?;
    agent.serves_api_on(&listener);
    let service = DevletServer::new(Host::new(agent.clone(), report));
    let limits = &agent.config().limits;
    let largest = limits.request_bytes;
    let service = service.max_decoding_message_size(largest);
    let routes = Routes::new(service);
    // A caller that waits for a plugin has a connection or a call all the time, and must not shut others out.
    let callers = limits.callers_per_uid;
    let limits = ServerLimits {
        connections_per_uid: callers,
        streams_per_connection: u32::try_from(callers).unwrap_or(u32::MAX),
        idle: Some(IDLE),
        ..limits.server.clone()
    };
    let stopping = agent.stopping().cancelled_owned();
    let serving = server::serve(
        listener,
        routes,
        limits,
        agent.metrics().on_refusal(Limit::CALLERS_PER_UID),
        stopping,
    );
    agent.spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "devlet's own API is not served any longer");
        }
    });
    Ok(())
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Host {
    /// The service for a node that was opened with this report.
    pub fn new(agent: Agent, report: &OpenReport) -> Self {
        let started = agent.store().now();
        let findings = Arc::new(problems::of_start(report));
        Self {
            agent,
            started,
            wall_clock: system_time,
            findings,
            parsing: Arc::new(Semaphore::new(1)),
        }
    }

    fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        self.agent.store().read(question)
    }

    /// Whether the caller may change anything.
    fn allow<T>(&self, request: &Request<T>) -> Result<(), NotAllowed> {
        let uid = request.extensions().get::<PeerCred>().map(|peer| peer.uid);
        if uid.is_some_and(|uid| self.agent.config().access.may_admit(uid)) {
            Ok(())
        } else {
            Err(NotAllowed { uid })
        }
    }

    /// The files because of which no pod is admitted.
    fn blocked_by(&self) -> Vec<String> {
        self.read(|node| {
            let reasons = node.blocked_by().iter();
            reasons.map(|reason| reason.file().to_owned()).collect()
        })
    }

    fn deadline(&self, wait_ms: Option<u64>) -> Instant {
        let wait = wait_ms.map_or(self.agent.config().wait, Duration::from_millis);
        deadline::after(wait)
    }

    /// Parses manifests. Long ones are parsed one at a time, on a thread on which that delays no other call.
    async fn parse(&self, texts: Vec<NamedText>, deadline: Instant) -> Result<PodRequest, Status> {
        let parse = |agent: &Agent, texts: &[NamedText]| {
            let texts = texts.iter().map(|each| manifest::Text {
                name: &each.name,
                text: &each.text,
            });
            manifest::request(texts, Source::Api, &agent.config().foreign)
        };
        if bytes(&texts) < LARGE_MANIFEST {
            return Ok(parse(&self.agent, &texts)?);
        }
        let permit = tokio::time::timeout_at(deadline, self.parsing.clone().acquire_owned()).await;
        let permit = permit.map_err(|_| Status::deadline_exceeded(LONG_MANIFEST))?;
        let agent = self.agent.clone();
        let parsed = tokio::task::spawn_blocking(move || {
            // Held to the end of the work, even if the caller leaves.
            let _permit = permit;
            parse(&agent, &texts)
        });
        let parsed = parsed
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(parsed?)
    }

    /// What a caller wants admitted, from all of its manifests.
    async fn request(&self, texts: Vec<NamedText>, deadline: Instant) -> Result<PodRequest, Status> {
        let limits = &self.agent.config().limits;
        let bytes = bytes(&texts);
        let most = limits.manifest_bytes;
        let what = || format!("the manifest has {bytes} bytes");
        let checked = Limit::MANIFEST_BYTES.check(bytes, most, what);
        checked.inspect_err(|over| self.agent.metrics().limit_hit(over.limit.name()))?;
        self.parse(texts, deadline).await
    }

    /// Sends what `list` says now and when it says something else, as long as somebody listens.
    fn watch<T, L>(
        &self,
        list: impl Fn(&Host) -> T + Send + Sync + 'static,
        wrap: fn(u64, T) -> L,
    ) -> Response<Answers<L>>
    where
        T: Clone + PartialEq + Send + Sync + 'static,
        L: Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(1);
        let host = self.clone();
        self.agent.spawn(async move {
            let changes = host.agent.store().changed();
            let look = || list(&host);
            let stop = host.agent.stopping();
            tokio::select! {
                // A node that stops sends no first list: the caller would take it for a node that has come back.
                biased;
                () = stop.cancelled() => {}
                () = sender.closed() => {}
                () = follow(changes, look, wrap, tokio::time::sleep, &sender) => {}
            }
        });
        Response::new(Box::pin(ReceiverStream::new(receiver)))
    }

    fn resources(&self) -> Vec<v1::Resource> {
        let now = self.agent.store().now();
        self.read(|node| convert::resources(node, now))
    }

    fn devices(&self, resource: &str) -> Vec<v1::Device> {
        let now = self.agent.store().now();
        self.read(|node| {
            let names: Vec<ResourceName> = match resource.is_empty() {
                true => node.capacity(now).into_keys().collect(),
                false => vec![ResourceName::from(resource)],
            };
            let devices = names.iter().flat_map(|name| convert::devices(node, name));
            devices.chain(dra_devices::devices(node, resource, now)).collect()
        })
    }

    fn plugins(&self) -> Vec<v1::Plugin> {
        let now = self.agent.store().now();
        self.read(|node| {
            let connected = node.plugins().into_iter();
            let connected = connected.map(|view| convert::plugin(view, now));
            let rejected = node.rejected_plugins(now);
            let rejected = rejected.map(|each| convert::rejected_plugin(each, now));
            connected.chain(rejected).collect()
        })
    }

    fn drivers(&self, name: &str) -> (Vec<v1::Driver>, Vec<v1::RefusedDriver>) {
        let now = self.agent.store().now();
        self.read(|node| (claims::drivers(node, name, now), claims::refused(node, name, now)))
    }

    fn claims(&self, name: &str) -> Vec<v1::Claim> {
        let now = self.agent.store().now();
        self.read(|node| claims::claims(node, name, now))
    }

    fn pods(&self) -> Vec<v1::Pod> {
        let now = self.agent.store().now();
        let pods = self.read(|node| node.pods().map(|pod| convert::pod(node, pod, now)).collect());
        let mut pods: Vec<v1::Pod> = pods;
        pods.sort_by_cached_key(|pod| {
            let id = pod.id.clone().unwrap_or_default();
            (id.namespace, id.name, id.uid)
        });
        pods
    }

    /// The pod that a caller means, or none.
    fn pods_called(&self, name: &str) -> Vec<v1::Pod> {
        if name.is_empty() {
            return self.pods();
        }
        let now = self.agent.store().now();
        self.read(|node| {
            let uid = find(node, name).ok();
            let pod = uid.and_then(|uid| node.pod(&uid));
            pod.map(|pod| convert::pod(node, pod, now)).into_iter().collect()
        })
    }
}

/// A manifest, and its name, which may be empty.
struct NamedText {
    name: String,
    text: String,
}

fn bytes(texts: &[NamedText]) -> usize {
    texts.iter().map(|each| each.text.len()).sum()
}

/// Sends what `list` says now, and when it says something else after a change.
async fn follow<T: Clone + PartialEq, L, P: Future<Output = ()>>(
    mut changes: watch::Receiver<u64>,
    list: impl Fn() -> T,
    wrap: fn(u64, T) -> L,
    pause: impl Fn(Duration) -> P,
    sender: &mpsc::Sender<Result<L, Status>>,
) {
    let mut last = None;
    loop {
        let revision = *changes.borrow_and_update();
        let began = Instant::now();
        let items = list();
        let time = if last.as_ref() == Some(&items) {
            WATCH_PAUSE.min(began.elapsed() * WATCH_REST)
        } else {
            if sender.send(Ok(wrap(revision, items.clone()))).await.is_err() {
                return;
            }
            last = Some(items);
            WATCH_PAUSE
        };
        pause(time).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// The pod that a caller means: by UID, `uid:` and a UID, `namespace/name`, or a name that only one namespace has.
fn find(node: &Node, name: &str) -> Result<PodUid, PodLookupError> {
    let unknown = || PodLookupError::Unknown {
        name: name.to_owned(),
    };
    // Claims of which nobody knows the pod have an empty UID there, which is not to be taken for a pod.
    if name.strip_prefix("uid:").unwrap_or(name).is_empty() {
        return Err(PodLookupError::Empty);
    }
    // No name has a colon in it.
    if let Some(uid) = name.strip_prefix("uid:") {
        let pod = node.pod(&PodUid::from(uid));
        return pod.map(|pod| pod.uid.clone()).ok_or_else(unknown);
    }
    if let Some((namespace, name)) = name.split_once('/') {
        let name = PodName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        return node
            .pod_named(&name)
            .map(|pod| pod.uid.clone())
            .ok_or_else(unknown);
    }
    let named: Vec<_> = node.pods().filter(|pod| pod.name.name == name).collect();
    let full = |pod: &Pod| format!("{}/{}", pod.name.namespace, pod.name.name);
    if let Some(pod) = node.pod(&PodUid::from(name)) {
        let others = named.iter().filter(|other| other.uid != pod.uid);
        let named: Vec<String> = others.map(|other| full(other)).collect();
        if named.is_empty() {
            return Ok(pod.uid.clone());
        }
        return Err(PodLookupError::UidOrName {
            name: name.to_owned(),
            of: (!pod.name.name.is_empty()).then(|| full(pod)),
            named,
        });
    }
    match named[..] {
        [] => Err(unknown()),
        [pod] => Ok(pod.uid.clone()),
        [..] => Err(PodLookupError::Ambiguous {
            name: name.to_owned(),
            pods: named.into_iter().map(full).collect(),
        }),
    }
}

/// The same among pods that are not on record: those that are still being admitted, of which only the UID is known, the
/// caller's or the one that a name stands for; and those that are gone while drivers unprepare their claims.
fn find_elsewhere(node: &Node, name: &str) -> Option<PodUid> {
    let (namespace, short) = name.split_once('/').unwrap_or(("default", name));
    let derived = manifest::derived_uid(&PodName {
        namespace: namespace.to_owned(),
        name: short.to_owned(),
    });
    // With a slash it is a name. UIDs in a kubelet's file may contain one, too.
    let uid = match name.strip_prefix("uid:") {
        Some(uid) => Some(uid),
        None => (!name.contains('/')).then_some(name),
    };
    // A pod on record that has that UID and another name, or none, is not meant.
    let is_elsewhere =
        |uid: &PodUid| node.pod(uid).is_none() && (node.is_in_flight(uid) || !node.remaining(uid).is_empty());
    (uid.map(PodUid::from).into_iter().chain([derived]))
        .find(is_elsewhere)
        .or_else(|| claims::pod_that_left(node, name))
}

/// The pod that is to be removed, on record or not.
fn find_to_remove(node: &Node, name: &str) -> Result<PodUid, PodLookupError> {
    match find(node, name) {
        Err(unknown @ PodLookupError::Unknown { .. }) => find_elsewhere(node, name).ok_or(unknown),
        found => found,
    }
}

/// Completes "waiting for ...".
fn awaited(reason: &ReserveError) -> String {
    match reason {
        ReserveError::NotServed { resource, .. } => format!("a plugin that offers {resource}"),
        ReserveError::NotListed { resource, endpoint } => {
            format!("the plugin at {endpoint} to list its {resource}")
        }
        ReserveError::NoHealthyDevice {
            resource, endpoint, ..
        } => {
            format!("the plugin at {endpoint} to list a healthy {resource}")
        }
        ReserveError::Reserved { resource, .. } => {
            format!("{resource} that other admissions have reserved")
        }
        ReserveError::NameReserved { other } => {
            format!("the admission or removal of pod {other}, which has the same name, to end")
        }
        ReserveError::ClaimReserved { claim, .. } => {
            format!("admissions or removals of pods with another version of ResourceClaim {claim} to end")
        }
        ReserveError::InFlight => "another operation for this pod to end".to_owned(),
        ReserveError::NoDriver { driver, claim, .. } => {
            format!("a plugin of DRA driver {driver}, for ResourceClaim {claim}")
        }
        ReserveError::Unpreparing { claim, .. } => format!("ResourceClaim {claim} to be unprepared"),
        ReserveError::DeviceInUse(conflict) => {
            format!(
                "{}, which ResourceClaim {} still has",
                conflict.device, conflict.holder
            )
        }
        ReserveError::NotPrepared { waits } => format!("its claims: {}", listed(waits)),
        other => other.to_string(),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn waiting(reason: &ReserveError, waited: Duration) -> v1::Waiting {
    let resource = match reason {
        ReserveError::NotServed { resource, .. }
        | ReserveError::NotListed { resource, .. }
        | ReserveError::NoHealthyDevice { resource, .. }
        | ReserveError::Reserved { resource, .. } => resource.to_string(),
        _ => String::new(),
    };
    let driver = match reason {
        ReserveError::NoDriver { driver, .. } => driver.to_string(),
        _ => String::new(),
    };
    v1::Waiting {
        awaited: awaited(reason),
        reason: format!("{reason}{}", since(reason)),
        resource,
        waited_ms: milliseconds(waited),
        driver,
    }
}

/// Returns the devices and claims that a pod holds, for the log: `acme.com/gpu=a, acme.com/gpu=b`, `default/gpu`.
fn held(pod: &v1::Pod) -> [String; 2] {
    let devices = pod.containers.iter().flat_map(|container| &container.devices);
    let ids = devices.flat_map(|each| each.ids.iter().map(move |id| format!("{}={id}", each.resource)));
    let claims = pod
        .claims
        .iter()
        .filter_map(|each| each.claim.as_ref()?.id.as_ref());
    let claims = claims.map(|id| format!("{}/{}", id.namespace, id.name));
    [words::first(ids), words::first(claims)]
}

/// Admits a pod, and tells the caller when what is waited for changes.
async fn admission(
    agent: &Agent,
    request: &PodRequest,
    deadline: Instant,
    give_up: &CancellationToken,
    sender: &mpsc::Sender<Result<v1::AdmitEvent, Status>>,
) -> Result<v1::Pod, Status> {
    let started = Instant::now();
    let mut last = None;
    let admitted = agent.admit_unless(request, deadline, give_up, |reason| {
        if last.as_ref() == Some(reason) {
            return;
        }
        last = Some(reason.clone());
        let event = v1::admit_event::Event::Waiting(waiting(reason, started.elapsed()));
        // A caller that does not read along misses a reason, and gets to know the next.
        let _ = sender.try_send(Ok(v1::AdmitEvent { event: Some(event) }));
    });
    let pod = admitted.await?;
    let now = agent.store().now();
    let message = |node: &Node| convert::pod_with(node, &pod, &request.containers, now);
    Ok(agent.store().read(message))
}

/// The events of an admission. They end with the one after which none follows, so that the end goes out along with it.
fn until_admitted(
    first: v1::AdmitEvent,
    events: mpsc::Receiver<Result<v1::AdmitEvent, Status>>,
) -> impl Stream<Item = Result<v1::AdmitEvent, Status>> {
    let is_last = |event: &v1::AdmitEvent| matches!(event.event, Some(v1::admit_event::Event::Admitted(_)));
    stream::unfold(
        (Some(Ok(first)), Some(events)),
        move |(first, mut events)| async move {
            let event = match first {
                Some(first) => first,
                None => events.as_mut()?.recv().await?,
            };
            if event.as_ref().map_or(true, is_last) {
                events = None;
            }
            Some((event, (None, events)))
        },
    )
}

#[tonic::async_trait]
impl Devlet for Host {
    type AdmitStream = Answers<v1::AdmitEvent>;
    type WatchResourcesStream = Answers<v1::ResourceList>;
    type WatchDevicesStream = Answers<v1::DeviceList>;
    type WatchPluginsStream = Answers<v1::PluginList>;
    type WatchPodsStream = Answers<v1::PodList>;
    type WatchDriversStream = Answers<v1::DriverList>;
    type WatchClaimsStream = Answers<v1::ClaimList>;

    async fn admit(&self, request: Request<v1::AdmitRequest>) -> Result<Response<Self::AdmitStream>, Status> {
        let metrics = self.agent.metrics();
        self.allow(&request)
            .inspect_err(|_| metrics.turned_away("not_allowed"))?;
        let v1::AdmitRequest {
            manifest,
            wait_ms,
            manifests,
            names,
        } = request.into_inner();
        let deadline = self.deadline(wait_ms);
        // A caller that has all of them in `manifests` leaves `manifest` empty.
        let first = (!manifest.is_empty() || manifests.is_empty()).then_some(manifest);
        let names = names.into_iter().chain(std::iter::repeat(String::new()));
        let texts = first.into_iter().chain(manifests).zip(names);
        let texts = texts.map(|(text, name)| NamedText { name, text });
        let request = self
            .request(texts.collect(), deadline)
            .await
            .inspect_err(|_| metrics.turned_away("invalid"))?;
        let (sender, mut events) = mpsc::channel(16);
        let agent = self.agent.clone();
        self.agent.spawn(async move {
            let give_up = agent.stopping().child_token();
            // What is being written is waited for, even if its caller has left or the node stops.
            let caller_leaves = async {
                sender.closed().await;
                give_up.cancel();
                std::future::pending::<()>().await;
            };
            let ended = tokio::select! {
                // First: one that left before anything was done for it may have asked to remove the pod, and been told that
                // there is none.
                biased;
                () = caller_leaves => return,
                ended = admission(&agent, &request, deadline, &give_up, &sender) => ended,
            };
            let logged = ended.as_ref().map(held);
            let logged = logged.map_err(|status| status.message().to_owned());
            let event = ended.map(|pod| v1::AdmitEvent {
                event: Some(v1::admit_event::Event::Admitted(pod)),
            });
            // If nobody is there any longer, the pod is found admitted when it is admitted again.
            let _ = sender.send(event).await;
            drop(sender);
            // Whoever waits for the answer does not wait for the log.
            tokio::task::yield_now().await;
            let (pod, uid) = (pod_label(&request.name), &request.uid);
            match logged {
                Ok(held) => {
                    let [devices, claims] = held.map(|names| {
                        Some(names)
                            .filter(|names| !names.is_empty())
                            .map(tracing::field::display)
                    });
                    tracing::info!(%pod, %uid, devices, claims, "pod admitted");
                }
                Err(reason) => tracing::info!(%pod, %uid, %reason, "pod rejected"),
            }
        });
        // The answer begins with its first event: an admission that need not wait wakes its caller once, not twice.
        let first = events
            .recv()
            .await
            .unwrap_or_else(|| Err(AdmitError::GivenUp.into()))?;
        Ok(Response::new(Box::pin(until_admitted(first, events))))
    }

    async fn start_container(
        &self,
        request: Request<v1::StartContainerRequest>,
    ) -> Result<Response<v1::StartContainerResponse>, Status> {
        self.allow(&request)?;
        let request = request.into_inner();
        let pod = self.read(|node| find(node, &request.pod))?;
        let deadline = self.deadline(request.wait_ms);
        let (options, conflicts) = self
            .agent
            .start_container(&pod, &request.container, deadline)
            .await?;
        for conflict in &conflicts {
            let named = self.read(|node| NamedPod::of(node, &pod));
            tracing::warn!(
                pod = %named.label(), uid = %pod, container = request.container, what = convert::contested(conflict.what), key = conflict.key,
                kept = %conflict.kept, dropped = %conflict.dropped, "device plugins disagree"
            );
        }
        let now = self.agent.store().now();
        let (id, container) = self.read(|node| {
            let id = convert::pod_id(node, &pod);
            let container = convert::container(node, &pod, &request.container, options, conflicts, now);
            (id, container)
        });
        Ok(Response::new(v1::StartContainerResponse {
            pod: Some(id),
            container: Some(container),
        }))
    }

    async fn remove_pod(
        &self,
        request: Request<v1::RemovePodRequest>,
    ) -> Result<Response<v1::RemovePodResponse>, Status> {
        self.allow(&request)?;
        let request = request.into_inner();
        let (pod, id) = self.read(|node| {
            let pod = find_to_remove(node, &request.pod)?;
            let id = convert::pod_id(node, &pod);
            Ok::<_, PodLookupError>((pod, id))
        })?;
        if is_unknown_pod(&pod) {
            return Err(Status::failed_precondition(format!(
                "{pod} stands for a pod whose UID could not be read; when that pod is gone: devlet forget --pod {pod}"
            )));
        }
        let drivers = request.abandon_drivers.into_iter().map(DriverName::from);
        let drivers: BTreeSet<DriverName> = drivers.collect();
        if !drivers.is_empty() {
            self.read(|node| claims::check_abandoned(node, &pod, &drivers))?;
        }
        let deadline = self.deadline(request.wait_ms);
        let abandoned = self.agent.remove_without(&pod, &drivers, deadline).await?;
        let label = if id.name.is_empty() {
            "-".to_owned()
        } else {
            format!("{}/{}", id.namespace, id.name)
        };
        tracing::info!(pod = %label, uid = %pod, "pod removed");
        let mut abandoned: Vec<v1::ClaimId> = abandoned
            .iter()
            .map(|each| claims::id(&each.claim, &each.uid))
            .collect();
        abandoned.dedup();
        Ok(Response::new(v1::RemovePodResponse {
            pod: Some(id),
            abandoned,
        }))
    }

    async fn abandon_claim(
        &self,
        request: Request<v1::AbandonClaimRequest>,
    ) -> Result<Response<v1::AbandonClaimResponse>, Status> {
        self.allow(&request)?;
        let request = request.into_inner();
        let drivers: BTreeSet<DriverName> = request.drivers.into_iter().map(DriverName::from).collect();
        let uids = self.read(|node| claims::find_to_abandon(node, &request.claim, &drivers))?;
        for uid in &uids {
            for driver in &drivers {
                self.agent.abandon_claim(uid, driver).await?;
            }
        }
        let now = self.agent.store().now();
        let left = self.read(|node| {
            let views = uids.iter().filter_map(|uid| node.claim(uid));
            views.map(|view| claims::claim(node, &view, now)).collect()
        });
        Ok(Response::new(v1::AbandonClaimResponse { claims: left }))
    }

    async fn forget_claim(
        &self,
        request: Request<v1::ForgetClaimRequest>,
    ) -> Result<Response<v1::ForgetClaimResponse>, Status> {
        self.allow(&request)?;
        let ids = self.read(|node| claims::ids(node, &request.get_ref().claim))?;
        let (mut forgotten, mut kept) = (Vec::new(), None);
        for id in ids {
            match self.agent.forget_claim(&ClaimUid::from(id.uid.as_str())).await {
                Ok(()) => forgotten.push(id),
                Err(ForgetClaimError::Refused(reason)) => {
                    kept.get_or_insert(reason);
                }
                Err(error) => return Err(error.into()),
            }
        }
        match kept {
            // Of several claims of one name, it is about those that were abandoned.
            Some(reason) if forgotten.is_empty() => Err(ForgetClaimError::from(reason).into()),
            _ => Ok(Response::new(v1::ForgetClaimResponse { claims: forgotten })),
        }
    }

    async fn list_resources(
        &self,
        _: Request<v1::ListResourcesRequest>,
    ) -> Result<Response<v1::ResourceList>, Status> {
        let revision = self.read(Node::changes);
        Ok(Response::new(resource_list(revision, self.resources())))
    }

    async fn list_devices(
        &self,
        request: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::DeviceList>, Status> {
        let revision = self.read(Node::changes);
        let devices = self.devices(&request.get_ref().resource);
        Ok(Response::new(device_list(revision, devices)))
    }

    async fn list_plugins(
        &self,
        _: Request<v1::ListPluginsRequest>,
    ) -> Result<Response<v1::PluginList>, Status> {
        let revision = self.read(Node::changes);
        Ok(Response::new(plugin_list(revision, self.plugins())))
    }

    async fn list_pods(
        &self,
        request: Request<v1::ListPodsRequest>,
    ) -> Result<Response<v1::PodList>, Status> {
        let name = &request.get_ref().pod;
        let revision = self.read(Node::changes);
        if !name.is_empty() {
            self.read(|node| find(node, name))?;
        }
        Ok(Response::new(pod_list(revision, self.pods_called(name))))
    }

    async fn list_drivers(
        &self,
        request: Request<v1::ListDriversRequest>,
    ) -> Result<Response<v1::DriverList>, Status> {
        let driver = request.into_inner().driver;
        let revision = self.read(Node::changes);
        let found = self.drivers(&driver);
        if found.0.is_empty() && found.1.is_empty() && !driver.is_empty() {
            return Err(UnknownDriver { driver }.into());
        }
        Ok(Response::new(driver_list(revision, found)))
    }

    async fn list_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<v1::ClaimList>, Status> {
        let name = &request.get_ref().claim;
        let revision = self.read(Node::changes);
        if !name.is_empty() {
            self.read(|node| claims::find(node, name))?;
        }
        Ok(Response::new(claim_list(revision, self.claims(name))))
    }

    async fn might_need_unprepare(
        &self,
        request: Request<v1::MightNeedUnprepareRequest>,
    ) -> Result<Response<v1::MightNeedUnprepareResponse>, Status> {
        let name = &request.get_ref().pod;
        Ok(Response::new(self.read(|node| {
            let pod = match find(node, name) {
                // Nobody knows it, so nothing is left of it.
                Err(PodLookupError::Unknown { .. }) => find_elsewhere(node, name),
                found => Some(found?),
            };
            let waits = pod.as_ref().map(|pod| node.remaining(pod));
            Ok::<_, PodLookupError>(v1::MightNeedUnprepareResponse {
                might_need_unprepare: pod.is_some_and(|pod| node.might_need_unprepare(&pod)),
                waits: waits.iter().flatten().map(claims::wait).collect(),
            })
        })?))
    }

    async fn watch_resources(
        &self,
        _: Request<v1::ListResourcesRequest>,
    ) -> Result<Response<Self::WatchResourcesStream>, Status> {
        Ok(self.watch(Self::resources, resource_list))
    }

    async fn watch_devices(
        &self,
        request: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<Self::WatchDevicesStream>, Status> {
        let resource = request.into_inner().resource;
        Ok(self.watch(move |host| host.devices(&resource), device_list))
    }

    async fn watch_plugins(
        &self,
        _: Request<v1::ListPluginsRequest>,
    ) -> Result<Response<Self::WatchPluginsStream>, Status> {
        Ok(self.watch(Self::plugins, plugin_list))
    }

    async fn watch_pods(
        &self,
        request: Request<v1::ListPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let name = request.into_inner().pod;
        Ok(self.watch(move |host| host.pods_called(&name), pod_list))
    }

    async fn watch_drivers(
        &self,
        request: Request<v1::ListDriversRequest>,
    ) -> Result<Response<Self::WatchDriversStream>, Status> {
        let name = request.into_inner().driver;
        Ok(self.watch(move |host| host.drivers(&name), driver_list))
    }

    async fn watch_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<Self::WatchClaimsStream>, Status> {
        let name = request.into_inner().claim;
        Ok(self.watch(move |host| host.claims(&name), claim_list))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        let health = self.agent.store().health();
        let mirror = self.agent.store().mirror_failure();
        let id_file = self.agent.store().id_failure();
        let set_aside = self.agent.store().set_aside();
        let unreachable = self.agent.unreachable().await;
        let resources = self.resources();
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let gone = |resource: &&v1::Resource| resource.state() == v1::ResourceState::Gone;
        let root = &self.agent.config().root;
        let now = self.agent.store().now();
        let uptime_ms = convert::age(self.started, now);
        Ok(Response::new(self.read(|node| {
            let mut problems = problems::of_now(node, now, health.as_ref().err(), mirror.as_deref());
            problems.extend(problems::of_id_files(id_file.as_deref()));
            problems.extend(problems::of_sockets(&unreachable));
            problems.extend(problems::of_registry(&self.agent.registry_summary()));
            let ready = !problems.iter().any(|problem| problem.blocking);
            problems.extend(problems::of_set_aside(&set_aside));
            problems.extend(self.findings.iter().cloned());
            let counts = claims::counts(node);
            v1::StatusResponse {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                root_dir: root.display().to_string(),
                pid: i64::from(std::process::id()),
                uptime_ms,
                // By the wall clock as it is now.
                started_at_ms: (self.wall_clock)().0.saturating_sub(uptime_ms),
                revision: node.changes(),
                ready,
                pods: count(node.pods().count()),
                pods_before_reboot: count(node.pods().filter(|pod| pod.before_reboot).count()),
                plugins: count(node.plugins().len()),
                resources: count(resources.len()),
                resources_without_plugin: count(resources.iter().filter(gone).count()),
                problems,
                drivers: counts.drivers,
                drivers_without_plugin: counts.drivers_without_plugin,
                claims: counts.claims,
                claims_waiting: counts.claims_waiting,
                wait_ms: milliseconds(self.agent.config().wait),
            }
        })))
    }

    async fn import(
        &self,
        request: Request<v1::ImportRequest>,
    ) -> Result<Response<v1::ImportResponse>, Status> {
        self.allow(&request)?;
        let request = request.into_inner();
        let report = self.agent.store().import(&request.content).await?;
        tracing::info!(
            file = request.name,
            added = report.difference.added.len(),
            changed = report.difference.changed.len(),
            removed = report.difference.removed.len(),
            "kubelet's file imported"
        );
        let ids =
            |uids: &[PodUid]| self.read(|node| uids.iter().map(|uid| convert::pod_id(node, uid)).collect());
        Ok(Response::new(v1::ImportResponse {
            added: ids(&report.difference.added),
            changed: ids(&report.difference.changed),
            notes: problems::import_notes(&report),
            blocked_by: self.blocked_by(),
        }))
    }

    async fn forget(
        &self,
        request: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetResponse>, Status> {
        self.allow(&request)?;
        let v1::ForgetRequest { file, pod } = request.into_inner();
        if !pod.is_empty() {
            let pod = PodUid::from(pod);
            if !is_unknown_pod(&pod) {
                let advice = format!("pod {pod} is not an unknown pod: devlet remove {pod}");
                return Err(Status::failed_precondition(advice));
            }
            self.agent.remove(&pod, self.deadline(None)).await?;
            tracing::warn!(%pod, "unknown pod forgotten, its devices are free");
            return Ok(Response::new(v1::ForgetResponse {
                removed: Vec::new(),
                blocked_by: self.blocked_by(),
            }));
        }
        let reasons = self.read(|node| node.blocked_by().to_vec());
        let Some(first) = reasons.first() else {
            return Err(ForgetError::NothingBlocked.into());
        };
        let reason = reasons.iter().find(|reason| is_same_file(&file, reason.file()));
        let Some(reason) = reason else {
            let file = first.file().to_owned();
            return Err(ForgetError::OtherFile { file }.into());
        };
        // Their names are gone afterwards.
        let names = self.read(|node| {
            let pods = match reason {
                devlet_core::Blocked::ContestedFile { pods, .. } => pods.as_slice(),
                _ => &[],
            };
            let named = |uid: &PodUid| (uid.clone(), convert::pod_id(node, uid));
            pods.iter().map(named).collect::<BTreeMap<_, _>>()
        });
        let removed = self.agent.store().forget_reason(reason).await;
        let removed = removed.map_err(ForgetError::Refused)?;
        for uid in &removed {
            tracing::warn!(%uid, file, "pod of contested file removed, its devices are free");
        }
        tracing::info!(file, removed = removed.len(), "file forgotten");
        let removed = removed.iter().filter_map(|uid| names.get(uid).cloned());
        Ok(Response::new(v1::ForgetResponse {
            removed: removed.collect(),
            blocked_by: self.blocked_by(),
        }))
    }

    async fn dump_state(
        &self,
        _: Request<v1::DumpStateRequest>,
    ) -> Result<Response<v1::DumpStateResponse>, Status> {
        let json = self.agent.store().dump().await?.to_string();
        Ok(Response::new(v1::DumpStateResponse { json }))
    }
}

fn is_same_file(one: &str, other: &str) -> bool {
    let real = |path: &str| Path::new(path).canonicalize().ok();
    one == other || real(one).is_some_and(|path| Some(path) == real(other))
}

fn resource_list(revision: u64, resources: Vec<v1::Resource>) -> v1::ResourceList {
    v1::ResourceList { revision, resources }
}

fn device_list(revision: u64, devices: Vec<v1::Device>) -> v1::DeviceList {
    v1::DeviceList { revision, devices }
}

fn plugin_list(revision: u64, plugins: Vec<v1::Plugin>) -> v1::PluginList {
    v1::PluginList { revision, plugins }
}

fn pod_list(revision: u64, pods: Vec<v1::Pod>) -> v1::PodList {
    v1::PodList { revision, pods }
}

fn driver_list(
    revision: u64,
    (drivers, refused): (Vec<v1::Driver>, Vec<v1::RefusedDriver>),
) -> v1::DriverList {
    v1::DriverList {
        revision,
        drivers,
        refused,
    }
}

fn claim_list(revision: u64, claims: Vec<v1::Claim>) -> v1::ClaimList {
    v1::ClaimList { revision, claims }
}

#[cfg(test)]
mod tests;
