//! The work on one pod: an admission or a removal, repeated until it succeeds.

use std::borrow::Cow;
use std::mem;
use std::time::Duration;

use devlet_agent::agent::RemoveError;
use devlet_agent::cluster::WaitingPod;
use devlet_agent::display::pod_label;
use devlet_agent::manifest::{ResolveError, UnresolvedPod};
use devlet_agent::workflow::admit::AdmitError;
use devlet_core::{PodRequest, PodUid, ReserveError};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::{Context, Ending, Removal, Target};
use crate::connection::CallError;
use crate::events::{Kind, PodRef};
use crate::task::{self, Task};

/// Time after which the claims of a waiting pod are looked up again, unless a call to a plugin or driver may take longer.
const ATTEMPT: Duration = Duration::from_secs(60);

/// Time that a node agent has, after a pod's grace period, to report the end of its containers.
const REPORT_TIME: Duration = Duration::from_secs(10);

/// Time that a pod waits before an event reports the reason.
const EVENT_DELAY: Duration = Duration::from_secs(5);

/// Reasons of events, as a kubelet's.
pub(super) const ADMISSION: &str = "UnexpectedAdmissionError";
const CLAIMS: &str = "FailedPrepareDynamicResources";

/// Longest pause between two attempts to admit a pod; jitter doubles it at most. A report of the API server about the pod, a
/// new list, and a change of the node that matters to it end the pause.
const MAX_ADMIT_PAUSE: Duration = Duration::from_secs(30);

/// The task of final deletions, in `status`.
const DELETION: &str = "pod-deletion";

/// Works until the pod has its target state. `woken` ends a pause between attempts to admit it.
pub(super) async fn reach(context: &Context, target: &Target, woken: &Notify) {
    match target {
        Target::Admitted(pod) => admit(context, pod, woken).await,
        Target::Ending(ending) => end(context, ending).await,
        Target::Removed(removal) => remove(context, removal).await,
    }
}

/// Why an attempt to admit a pod failed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Claims(#[from] ResolveError),
    #[error("{}", reason(.0))]
    Admission(#[from] AdmitError),
}

/// Returns the reason without the time that the attempt took, which differs each time.
fn reason(error: &AdmitError) -> String {
    match error {
        AdmitError::TimedOut { reason, .. } => reason.to_string(),
        other => other.to_string(),
    }
}

async fn admit(context: &Context, pod: &UnresolvedPod, woken: &Notify) {
    let mut admission = Admission {
        context,
        pod: PodRef {
            name: pod.request.name.clone(),
            uid: pod.request.uid.clone(),
        },
        since: Instant::now(),
        told: None,
        refused: None,
    };
    let mut pauses = task::pauses(MAX_ADMIT_PAUSE);
    loop {
        let failed = match admission.attempt(pod).await {
            Ok(()) => {
                let PodRef { name, uid } = &admission.pod;
                tracing::info!(pod = %pod_label(name), %uid, "pod admitted");
                return;
            }
            Err(failed) => failed,
        };
        let event = match &failed {
            Failed::Claims(_) => (CLAIMS, None),
            Failed::Admission(AdmitError::Refused(reason) | AdmitError::TimedOut { reason, .. }) => {
                event_of(reason)
            }
            Failed::Admission(_) => (ADMISSION, None),
        };
        admission.waits(event, failed.to_string());
        admission
            .pause(pauses.next().unwrap_or(MAX_ADMIT_PAUSE), woken)
            .await;
    }
}

/// The reason of an event, and the kind of error within it.
type EventReason = (&'static str, Option<mem::Discriminant<ReserveError>>);

/// An admission in progress.
struct Admission<'a> {
    context: &'a Context,
    pod: PodRef,
    since: Instant,
    /// The last reason that an event has reported.
    told: Option<EventReason>,
    /// The request that the node has refused last, and its answer before that.
    refused: Option<(PodRequest, Option<ReserveError>)>,
}

impl Admission<'_> {
    /// Reports that the pod waits: at once in `status`, and after a while by an event, which has each reason once.
    fn waits(&mut self, event: EventReason, message: String) {
        let is_late = self.since.elapsed() >= EVENT_DELAY;
        if is_late && self.told.replace(event) != Some(event) {
            let PodRef { name, uid } = &self.pod;
            tracing::info!(pod = %pod_label(name), %uid, reason = %message, "pod waits");
            let message = format!("{message}; devlet keeps trying");
            let events = &self.context.events;
            events.record(&self.pod, Kind::Warning, event.0, message);
        }
        self.context.waits(&self.pod, message);
    }

    /// Tries once to admit the pod. Waits for plugins, drivers and other pods.
    async fn attempt(&mut self, pod: &UnresolvedPod) -> Result<(), Failed> {
        self.refused = None;
        let time = self.time();
        let deadline = Instant::now() + time;
        let request = loop {
            let request = match pod.has_claims() {
                true => Cow::Owned(pod.clone().resolve(&self.context.claims).await?),
                false => Cow::Borrowed(&pod.request),
            };
            let has_waited = self.until_possible(&request, deadline).await;
            // A claim may have got another allocation meanwhile. A kubelet looks it up before each attempt, too.
            if !has_waited || !pod.has_claims() {
                break request;
            }
        };
        let before = self.answer(&request);
        let now = Instant::now();
        let deadline = if now < deadline { now + time } else { deadline };
        // In a box: thousands of pods may wait before this.
        let admitted = Box::pin(self.admit(&request, deadline)).await;
        self.refused = admitted.is_err().then(|| (request.into_owned(), before));
        Ok(admitted?)
    }

    /// Waits before the next attempt, which may call the API server.
    async fn pause(&self, pause: Duration, woken: &Notify) {
        let least = pause.min(task::PASS_PAUSE);
        tokio::time::sleep(least).await;
        tokio::select! {
            () = tokio::time::sleep(pause.saturating_sub(least)) => {}
            () = woken.notified() => {}
            () = self.answer_changes() => {}
        }
    }

    /// Completes when the node answers a refused request in another way.
    async fn answer_changes(&self) {
        let mut changes = self.context.agent.store().subscribe();
        while let Some((request, before)) = &self.refused {
            let checked = Instant::now();
            if self.answer(request) != *before {
                return;
            }
            if !changed(&mut changes, checked).await {
                break;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Returns the node's reason against a request, if it has one.
    fn answer(&self, request: &PodRequest) -> Option<ReserveError> {
        self.context.agent.store().read(|node| node.check(request).err())
    }

    /// Returns the time for which looked up claims count.
    fn time(&self) -> Duration {
        let deadlines = &self.context.agent.config().deadlines;
        let resources = deadlines.allocate_by_resource.values();
        let drivers = deadlines.prepare_by_driver.values();
        let calls = resources.chain(drivers).copied();
        let calls = calls.chain([deadlines.allocate, deadlines.prepare]);
        calls.fold(ATTEMPT, Duration::max)
    }

    /// Waits while the node lacks devices or drivers that may come, up to the deadline. Returns `true` if it has waited.
    async fn until_possible(&mut self, request: &PodRequest, deadline: Instant) -> bool {
        let store = self.context.agent.store();
        let mut changes = store.subscribe();
        let mut has_waited = false;
        while Instant::now() < deadline {
            let checked = Instant::now();
            changes.borrow_and_update();
            match store.read(|node| node.check(request)) {
                Err(reason) if reason.waiting_helps() && !reason.awaits_record() => {
                    self.waits(event_of(&reason), reason.to_string());
                }
                _ => break,
            }
            has_waited = true;
            if !changed(&mut changes, checked).await {
                break;
            }
        }
        has_waited
    }

    async fn admit(&mut self, request: &PodRequest, deadline: Instant) -> Result<(), AdmitError> {
        let agent = self.context.agent.clone();
        let (latest, mut reasons) = watch::channel(None);
        let admission = agent.admit(request, deadline, |reason: &ReserveError| {
            latest.send_if_modified(|latest| latest.replace(reason.clone()).as_ref() != Some(reason));
        });
        tokio::pin!(admission);
        loop {
            tokio::select! {
                admitted = &mut admission => return admitted.map(drop),
                _ = timeout(EVENT_DELAY, reasons.changed()) => {
                    let reason = reasons.borrow_and_update().clone();
                    if let Some(reason) = reason {
                        self.waits(event_of(&reason), reason.to_string());
                    }
                }
            }
        }
    }
}

/// Waits for a change of the node since a check, for a while. Pods that wait do not check a node that changes all the time
/// each time. Returns `false` if the node stops.
async fn changed(changes: &mut watch::Receiver<u64>, checked: Instant) -> bool {
    // The timeout only lets an event report the reason.
    if let Ok(Err(_)) = timeout(EVENT_DELAY, changes.changed()).await {
        return false;
    }
    sleep_until(checked + task::MIN_PAUSE).await;
    true
}

fn event_of(reason: &ReserveError) -> EventReason {
    let name = match reason {
        ReserveError::NoDriver { .. }
        | ReserveError::Unpreparing { .. }
        | ReserveError::DeviceInUse(_)
        | ReserveError::NotPrepared { .. }
        | ReserveError::ClaimReserved { .. }
        | ReserveError::Reallocated { .. }
        | ReserveError::ClaimUidTaken { .. }
        | ReserveError::ClaimNameTaken { .. } => CLAIMS,
        _ => ADMISSION,
    };
    (name, Some(mem::discriminant(reason)))
}

/// Keeps a pod until the time has passed that its containers have to end. Then it is removed if none of them runs.
async fn end(context: &Context, ending: &Ending) {
    tokio::time::sleep(ending.grace + REPORT_TIME).await;
    if ending.is_idle {
        return remove(context, &ending.removal).await;
    }
    let reason = "deleted, and its grace period is over, but the status does not report each container as terminated: the \
                  node agent must report it";
    context.waits(&ending.removal.pod, reason.to_owned());
    std::future::pending::<()>().await;
}

async fn remove(context: &Context, removal: &Removal) {
    let pod = &removal.pod;
    let mut pauses = task::pauses(task::MAX_PAUSE);
    loop {
        let deadline = Instant::now() + context.agent.config().wait;
        let removed = context
            .agent
            .remove_without(&pod.uid, &removal.abandoned, deadline);
        match removed.await {
            Ok(abandoned) => {
                for each in abandoned {
                    let (claim, driver) = (each.claim, each.driver);
                    let message = format!(
                        "devlet no longer waits for DRA driver {driver} to unprepare ResourceClaim {claim}: the pod has the \
                         annotation devlet.dev/abandon-driver"
                    );
                    context
                        .events
                        .record(pod, Kind::Normal, "DriverAbandoned", message);
                }
                tracing::info!(pod = %pod_label(&pod.name), uid = %pod.uid, "pod removed");
                break;
            }
            Err(RemoveError::Unknown { .. }) => break,
            // Its devices are free, and the node goes on with its claims.
            Err(RemoveError::Unpreparing { .. }) if !removal.deletes_object => break,
            Err(error) => {
                context.waits(pod, error.to_string());
            }
        }
        tokio::time::sleep(pauses.next().unwrap_or(task::MAX_PAUSE)).await;
    }
    if removal.deletes_object {
        delete_object(context, pod).await;
    }
}

/// Deletes the Pod object for good. Another pod of the same name is not deleted.
async fn delete_object(context: &Context, pod: &PodRef) {
    let params = DeleteParams::default()
        .grace_period(0)
        .preconditions(Preconditions {
            uid: Some(pod.uid.to_string()),
            resource_version: None,
        });
    let mut task = Task::new(DELETION, &context.agent);
    loop {
        let deleted = context.connection.call(async |client| {
            let pods: Api<Pod> = Api::namespaced(client, &pod.name.namespace);
            pods.delete(&pod.name.name, &params).await
        });
        let error = match deleted.await {
            Ok(_) => {
                tracing::info!(pod = %pod_label(&pod.name), uid = %pod.uid, "Pod object deleted");
                return task.succeeded();
            }
            Err(error) if is_gone(&error) => return task.succeeded(),
            Err(error) => error,
        };
        context.waits(pod, format!("the Pod object cannot be deleted: {error}"));
        tokio::time::sleep(task.failed(&error)).await;
    }
}

/// Returns `true` if the Pod object does not exist, or is another pod of the same name.
fn is_gone(error: &CallError) -> bool {
    error.is_not_found() || error.code() == Some(http::StatusCode::CONFLICT)
}

impl Context {
    /// Shows that a pod waits. The time since which it waits stays the same if only the reason changes. Returns `false` if this
    /// is shown already.
    pub(super) fn waits(&self, pod: &PodRef, reason: String) -> bool {
        let now = self.agent.store().now();
        let is_known = self.agent.cluster().read(|state| {
            let known = state.waiting.get(&pod.uid);
            known.is_some_and(|known| known.reason == reason)
        });
        if is_known {
            return false;
        }
        self.agent.cluster().update(|state| {
            let waiting = state.waiting.entry(pod.uid.clone());
            let waiting = waiting.or_insert_with(|| WaitingPod {
                name: pod.name.clone(),
                since: now,
                reason: String::new(),
            });
            waiting.reason = reason;
        });
        true
    }

    /// Shows that a pod does not wait any longer.
    pub(super) fn settled(&self, pod: &PodUid) {
        let waits = self.agent.cluster().read(|state| state.waiting.contains_key(pod));
        if waits {
            self.agent.cluster().update(|state| {
                state.waiting.remove(pod);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_waiting_pod_checks_a_node_that_changes_all_the_time_a_few_times_per_second() {
        let (sender, mut changes) = watch::channel(0);
        let changing = async {
            loop {
                sender.send_modify(|changes| *changes += 1);
                tokio::task::yield_now().await;
            }
        };
        let checking = async {
            for _ in 0..3 {
                let checked = Instant::now();
                assert!(changed(&mut changes, checked).await);
                assert!(checked.elapsed() >= task::MIN_PAUSE);
            }
        };
        tokio::select! {
            () = changing => {}
            () = checking => {}
        }
    }
}
