//! Admissions over the API: the manifests of a request, and the stream of events.

use std::time::Duration;

use devlet_client::v1;
use devlet_client::v1::admit_event::Event;
use devlet_core::dra::view::listed;
use devlet_core::{Node, PodRequest, ReserveError, Source};
use futures_util::future::join_all;
use futures_util::stream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::convert;
use super::node_status::milliseconds;
use super::service::DevletService;
use super::status::since;
use crate::agent::Agent;
use crate::display::{self, pod_label};
use crate::grpc::call::MIN_CALL_TIME;
use crate::limits::Limit;
use crate::long_decode;
use crate::manifest::{LookedUp, Parsed, Text};
use crate::workflow::admit::AdmitError;

/// Manifests of at least this many bytes in total are parsed one at a time, on a blocking thread.
const LARGE_MANIFEST: usize = 64 << 10;

pub(super) const LONG_MANIFEST: &str = "manifests of 64 KiB and more are parsed one after the other, and this one's turn did \
                                        not come in time: admit it again, with a longer wait, or shorten it";

const LONG_LOOKUP: &str = "the API server did not answer in time about the claims that are not among the manifests: admit \
                           the pod again, with a longer wait";

/// Events that may wait for a caller that does not read. Further reasons to wait are dropped.
const EVENTS: usize = 16;

type AdmitResult = Result<v1::AdmitEvent, Status>;

/// A manifest, and its name, which may be empty.
pub(super) struct NamedText {
    pub(super) name: String,
    pub(super) text: String,
}

fn views(texts: &[NamedText]) -> Vec<Text<'_>> {
    let views = texts.iter().map(|each| Text {
        name: &each.name,
        text: &each.text,
    });
    views.collect()
}

fn total_bytes(texts: &[NamedText]) -> usize {
    texts.iter().map(|each| each.text.len()).sum()
}

impl DevletService {
    /// Parses the manifests of a request, within the limits.
    pub(super) async fn parse_request(
        &self,
        request: v1::AdmitRequest,
        deadline: Instant,
    ) -> Result<PodRequest, Status> {
        let v1::AdmitRequest {
            manifest,
            manifests,
            names,
            ..
        } = request;
        // A caller that puts all manifests into `manifests` leaves `manifest` empty.
        let first = (!manifest.is_empty() || manifests.is_empty()).then_some(manifest);
        let names = names.into_iter().chain(std::iter::repeat(String::new()));
        let texts = first.into_iter().chain(manifests).zip(names);
        let texts: Vec<NamedText> = texts.map(|(text, name)| NamedText { name, text }).collect();
        let bytes = total_bytes(&texts);
        let what = || format!("the manifest has {bytes} bytes");
        let max = self.agent.config().limits.manifest_bytes;
        let checked = Limit::MANIFEST_BYTES.check(bytes, max, what);
        checked.inspect_err(|over| self.agent.metrics().limit_hit(over.limit.name()))?;
        self.parse(texts, deadline).await
    }

    /// Parses manifests. Large ones do not delay other calls: they are parsed one at a time, on a blocking thread, each with a
    /// cooldown, so that all of them together use a fifth of a core.
    pub(super) async fn parse(&self, texts: Vec<NamedText>, deadline: Instant) -> Result<PodRequest, Status> {
        if total_bytes(&texts) < LARGE_MANIFEST {
            let parsed = Parsed::new(&views(&texts), Source::Api, &self.agent.config().foreign)?;
            return self.resolve(parsed, &texts, deadline).await;
        }
        // At least a second: the cooldown after another large manifest must not use up a short deadline.
        let deadline = deadline.max(Instant::now() + MIN_CALL_TIME);
        let permit = tokio::time::timeout_at(deadline, self.parsing.clone().acquire_owned()).await;
        let permit = permit.map_err(|_| Status::deadline_exceeded(LONG_MANIFEST))?;
        let (agent, stopping) = (self.agent.clone(), self.agent.stopping());
        let (sender, parsed) = oneshot::channel();
        // In a task of the node: a caller that leaves does not end the cooldown.
        self.agent.spawn(async move {
            let started = Instant::now();
            let parse = move || {
                let parsed = Parsed::new(&views(&texts), Source::Api, &agent.config().foreign);
                parsed.map(|parsed| (parsed, texts))
            };
            let parsed = tokio::task::spawn_blocking(parse).await;
            let cooldown = long_decode::cooldown(started.elapsed());
            let _ = sender.send(parsed);
            tokio::select! {
                () = tokio::time::sleep(cooldown) => {}
                () = stopping.cancelled() => {}
            }
            drop(permit);
        });
        let parsed = parsed
            .await
            .map_err(|_| Status::unavailable("devlet is stopping"))?;
        let parsed = parsed.map_err(|error| Status::internal(error.to_string()))?;
        let (parsed, texts) = parsed?;
        self.resolve(parsed, &texts, deadline).await
    }

    /// Looks up the claims that are not among the manifests, if the node has a source of claims, and checks all claims.
    async fn resolve(
        &self,
        parsed: Parsed,
        texts: &[NamedText],
        deadline: Instant,
    ) -> Result<PodRequest, Status> {
        let mut looked_up = LookedUp::new();
        if let Some(source) = self.agent.claim_source() {
            let lookups = parsed.missing().into_iter().map(async |key| {
                let found = source.claim(&key).await;
                (key, found)
            });
            let found = tokio::time::timeout_at(deadline, join_all(lookups)).await;
            looked_up = found
                .map_err(|_| Status::deadline_exceeded(LONG_LOOKUP))?
                .into_iter()
                .collect();
        }
        Ok(parsed.resolve(&views(texts), &looked_up)?)
    }
}

/// Starts an admission in a task of its own, and returns its events.
///
/// Returns only with the first event, so that an admission without waits wakes its caller once, not twice.
pub(super) async fn start(
    agent: &Agent,
    request: PodRequest,
    deadline: Instant,
) -> Result<impl Stream<Item = AdmitResult> + use<>, Status> {
    let (sender, mut events) = mpsc::channel(EVENTS);
    agent.spawn(admit_and_log(agent.clone(), request, deadline, sender));
    let first = events.recv().await;
    let first = first.unwrap_or_else(|| Err(AdmitError::GivenUp.into()))?;
    Ok(until_admitted(first, events))
}

/// Runs an admission, sends its result, then logs it.
async fn admit_and_log(
    agent: Agent,
    request: PodRequest,
    deadline: Instant,
    sender: mpsc::Sender<AdmitResult>,
) {
    let result = admit_while_connected(&agent, &request, deadline, &sender).await;
    let logged = result.as_ref().map(held);
    let logged = logged.map_err(|status| status.message().to_owned());
    let event = result.map(|pod| v1::AdmitEvent {
        event: Some(Event::Admitted(pod)),
    });
    // If the caller has left, it finds the pod admitted when it admits it again.
    let _ = sender.send(event).await;
    drop(sender);
    // The caller gets its answer before the log is written.
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
}

/// Runs an admission, and cancels it when the caller leaves or the node stops. A write in progress is completed first.
async fn admit_while_connected(
    agent: &Agent,
    request: &PodRequest,
    deadline: Instant,
    sender: &mpsc::Sender<AdmitResult>,
) -> Result<v1::Pod, Status> {
    let give_up = agent.stopping().child_token();
    let admission = run_admission(agent, request, deadline, &give_up, sender);
    tokio::pin!(admission);
    tokio::select! {
        // Checked first: a caller that left before the start may have removed the pod, and been told that it is unknown.
        biased;
        () = sender.closed() => {
            give_up.cancel();
            admission.await
        }
        result = &mut admission => result,
    }
}

/// Admits a pod, and sends an event when the reason to wait changes.
async fn run_admission(
    agent: &Agent,
    request: &PodRequest,
    deadline: Instant,
    give_up: &CancellationToken,
    sender: &mpsc::Sender<AdmitResult>,
) -> Result<v1::Pod, Status> {
    let started = Instant::now();
    let mut last = None;
    let admitted = agent.admit_unless(request, deadline, give_up, |reason| {
        if last.as_ref() == Some(reason) {
            return;
        }
        last = Some(reason.clone());
        let event = Event::Waiting(waiting(reason, started.elapsed()));
        // A caller that does not read misses this reason, and gets the next one.
        let _ = sender.try_send(Ok(v1::AdmitEvent { event: Some(event) }));
    });
    let pod = admitted.await?;
    let now = agent.store().now();
    let message = |node: &Node| convert::pod_with(node, &pod, &request.containers, now);
    Ok(agent.store().read(message))
}

/// Streams the events of an admission, and ends with its result: an error, or the admitted pod.
///
/// The stream ends without waiting for the sender, so that its end is sent along with the last event.
pub(super) fn until_admitted(
    first: v1::AdmitEvent,
    events: mpsc::Receiver<AdmitResult>,
) -> impl Stream<Item = AdmitResult> {
    let is_last = |event: &v1::AdmitEvent| matches!(event.event, Some(Event::Admitted(_)));
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

pub(super) fn waiting(reason: &ReserveError, waited: Duration) -> v1::Waiting {
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
        awaited: describe_wait(reason),
        reason: format!("{reason}{}", since(reason)),
        resource,
        waited_ms: milliseconds(waited),
        driver,
    }
}

/// Returns a text that completes "waiting for ...".
fn describe_wait(reason: &ReserveError) -> String {
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

/// Returns the devices and claims that a pod holds, for the log: `acme.com/gpu=a, acme.com/gpu=b`, `default/gpu`.
fn held(pod: &v1::Pod) -> [String; 2] {
    let devices = pod.containers.iter().flat_map(|container| &container.devices);
    let ids = devices.flat_map(|each| each.ids.iter().map(move |id| format!("{}={id}", each.resource)));
    let claims = pod
        .claims
        .iter()
        .filter_map(|each| each.claim.as_ref()?.id.as_ref());
    let claims = claims.map(|id| format!("{}/{}", id.namespace, id.name));
    [display::first(ids), display::first(claims)]
}

#[cfg(test)]
mod tests;
