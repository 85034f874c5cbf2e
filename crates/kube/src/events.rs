//! Events about pods, which explain in `kubectl describe pod` why a pod waits.
//!
//! Best effort: events that the API server does not take in time are dropped.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_core::{PodName, PodUid};
use http::StatusCode;
use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::FIELD_MANAGER;
use crate::connection::{CallError, Connection};
use crate::task::{Task, reached};

/// Maximum events in the queue, and maximum events that are known.
const MAX_QUEUED: usize = 256;

/// Pause between two writes.
const WRITE_PAUSE: Duration = Duration::from_millis(100);

/// Pause before the count of an event is written again.
const REPEAT_PAUSE: Duration = Duration::from_secs(60);

/// The program that events name.
const COMPONENT: &str = "devlet";

/// Limits of the API, in bytes.
const MAX_NAME: usize = 253;
const MAX_MESSAGE: usize = 1024;

/// The queue of events. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<Event>,
}

/// An event about a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Event {
    pub(crate) pod: PodRef,
    pub(crate) kind: Kind,
    /// One word, as a kubelet's: `UnexpectedAdmissionError`.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// The pod that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodRef {
    pub(crate) name: PodName,
    pub(crate) uid: PodUid,
}

/// The severity of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Normal,
    Warning,
}

impl Events {
    /// Returns a queue, and its end for the task that writes the events.
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Event>) {
        let (queue, events) = mpsc::channel(MAX_QUEUED);
        (Self { queue }, events)
    }

    /// Adds an event. Drops it if the queue is full.
    pub(crate) fn record(&self, pod: &PodRef, kind: Kind, reason: &'static str, message: String) {
        let event = Event {
            pod: pod.clone(),
            kind,
            reason,
            message,
        };
        // The log and `status` have the same message.
        let _ = self.queue.try_send(event);
    }
}

/// Writes the events until the node stops.
///
/// Repetitions of an event raise its count, at most once per [`REPEAT_PAUSE`]. Events that wait are kept during an outage,
/// up to a limit.
pub(crate) async fn run(
    agent: Agent,
    connection: Connection,
    node: String,
    mut events: mpsc::Receiver<Event>,
) {
    let mut task = Task::new("events", &agent);
    let mut series = Series::default();
    loop {
        let due = series.next_due();
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => {
                    series.add(event, Timestamp::now(), Instant::now());
                    continue;
                }
                None => return,
            },
            () = reached(due) => {}
            () = task.stopped() => return,
        }
        let Some(key) = series.due(Instant::now()) else {
            continue;
        };
        let pause = match write(&connection, &node, &key, &mut series).await {
            Ok(()) => {
                task.succeeded();
                series.written(&key, Instant::now());
                WRITE_PAUSE
            }
            Err(error) => {
                let pause = task.failed(&error);
                match is_final(&error) {
                    true => drop(series.known.remove(&key)),
                    false => series.postponed(&key, Instant::now() + pause),
                }
                pause
            }
        };
        if !task.pause(pause).await {
            return;
        }
    }
}

/// Returns `true` if repeating a write does not help: the namespace is being deleted, or a right is missing.
fn is_final(error: &CallError) -> bool {
    let is_refused = |code: StatusCode| code.is_client_error() && code != StatusCode::UNAUTHORIZED;
    error.retry_after().is_none() && error.code().is_some_and(is_refused)
}

async fn write(
    connection: &Connection,
    node: &str,
    key: &Event,
    series: &mut Series,
) -> Result<(), CallError> {
    let Some(state) = series.known.get_mut(key) else {
        return Ok(());
    };
    let namespace = &key.pod.name.namespace;
    if let Some(name) = &state.name {
        let patch = json!({ "count": state.count, "lastTimestamp": seconds(state.last) });
        let patched = connection.call(|client| async move {
            let events = Api::<ApiEvent>::namespaced(client, namespace);
            let params = PatchParams {
                field_manager: Some(FIELD_MANAGER.to_owned()),
                ..PatchParams::default()
            };
            events.patch(name, &params, &Patch::Merge(&patch)).await
        });
        match patched.await {
            // It has expired.
            Err(error) if error.is_not_found() => {
                state.name = None;
                state.count = 1;
            }
            other => return other.map(drop),
        }
    }
    let name = event_name(&key.pod.name.name, state.last);
    let event = api_event(&name, node, key, state);
    let created = connection.call(|client| async move {
        let events = Api::<ApiEvent>::namespaced(client, namespace);
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        events.create(&params, &event).await
    });
    created.await?;
    state.name = Some(name);
    Ok(())
}

/// Events that wait, and those that were written lately, to count repetitions.
#[derive(Debug, Default)]
struct Series {
    known: BTreeMap<Event, State>,
}

#[derive(Debug)]
struct State {
    count: i32,
    first: Timestamp,
    last: Timestamp,
    /// The name of the Event object, once it is written.
    name: Option<String>,
    /// The time of the next write; `None` if there is nothing to write.
    due: Option<Instant>,
    /// The earliest time of the next write.
    not_before: Instant,
}

impl Series {
    /// Adds an event or counts a repetition. Over the limit, an event without anything to write is forgotten, or the new
    /// one is dropped.
    fn add(&mut self, event: Event, at: Timestamp, now: Instant) {
        if let Some(state) = self.known.get_mut(&event) {
            state.count = state.count.saturating_add(1);
            state.last = at;
            state.due = state.due.or(Some(state.not_before.max(now)));
            return;
        }
        if self.known.len() >= MAX_QUEUED {
            let idle = self.known.iter().filter(|(_, state)| state.due.is_none());
            let oldest = idle.min_by_key(|(_, state)| state.last);
            let Some(oldest) = oldest.map(|(event, _)| event.clone()) else {
                return;
            };
            self.known.remove(&oldest);
        }
        let state = State {
            count: 1,
            first: at,
            last: at,
            name: None,
            due: Some(now),
            not_before: now,
        };
        self.known.insert(event, state);
    }

    fn next_due(&self) -> Option<Instant> {
        self.known.values().filter_map(|state| state.due).min()
    }

    /// Returns the event that has waited longest, if its time has come.
    fn due(&self, now: Instant) -> Option<Event> {
        let due = self
            .known
            .iter()
            .filter_map(|(event, state)| Some((state.due?, event)));
        let due = due.filter(|(due, _)| *due <= now);
        due.min().map(|(_, event)| event.clone())
    }

    /// Writes the other events first: a namespace may refuse its own.
    fn postponed(&mut self, event: &Event, until: Instant) {
        if let Some(state) = self.known.get_mut(event) {
            state.due = Some(until);
        }
    }

    fn written(&mut self, event: &Event, now: Instant) {
        if let Some(state) = self.known.get_mut(event) {
            state.due = None;
            state.not_before = now + REPEAT_PAUSE;
        }
    }
}

/// Returns a unique name that begins with the pod's, as those of a kubelet.
fn event_name(pod: &str, at: Timestamp) -> String {
    let suffix = format!(".{:x}", at.as_nanosecond());
    let length = pod.len().min(MAX_NAME - suffix.len());
    let pod = pod.get(..length).unwrap_or_default();
    format!("{}{suffix}", pod.trim_end_matches(['.', '-']))
}

fn api_event(name: &str, node: &str, event: &Event, state: &State) -> ApiEvent {
    let Event {
        pod,
        kind,
        reason,
        message,
    } = event;
    let kind = match kind {
        Kind::Normal => "Normal",
        Kind::Warning => "Warning",
    };
    ApiEvent {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(pod.name.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.name.namespace.clone()),
            name: Some(pod.name.name.clone()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        },
        type_: Some(kind.to_owned()),
        reason: Some((*reason).to_owned()),
        message: Some(shortened(message)),
        source: Some(EventSource {
            component: Some(COMPONENT.to_owned()),
            host: Some(node.to_owned()),
        }),
        reporting_component: Some(COMPONENT.to_owned()),
        reporting_instance: Some(node.to_owned()),
        first_timestamp: Some(Time(state.first)),
        last_timestamp: Some(Time(state.last)),
        count: Some(state.count),
        ..ApiEvent::default()
    }
}

/// Returns the beginning of a message that is too long for the API.
fn shortened(message: &str) -> String {
    if message.len() <= MAX_MESSAGE {
        return message.to_owned();
    }
    let end = (0..=MAX_MESSAGE - 3)
        .rev()
        .find(|end| message.is_char_boundary(*end));
    let start = message.get(..end.unwrap_or_default()).unwrap_or_default();
    format!("{start}...")
}

fn seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str) -> Event {
        let name = PodName {
            namespace: "default".to_owned(),
            name: "p".to_owned(),
        };
        Event {
            pod: PodRef {
                name,
                uid: PodUid::from("1"),
            },
            kind: Kind::Warning,
            reason: "UnexpectedAdmissionError",
            message: message.to_owned(),
        }
    }

    #[test]
    fn repetitions_are_counted_and_written_after_a_pause() {
        let (mut series, now) = (Series::default(), Instant::now());
        let at = Timestamp::now();
        series.add(event("a"), at, now);
        series.add(event("a"), at, now);
        assert_eq!(series.due(now), Some(event("a")));
        series.written(&event("a"), now);
        assert_eq!(series.next_due(), None);

        series.add(event("a"), at, now);
        assert_eq!(series.due(now), None);
        assert_eq!(series.due(now + REPEAT_PAUSE), Some(event("a")));
        assert_eq!(series.known[&event("a")].count, 3);
    }

    #[test]
    fn new_events_are_dropped_when_too_many_wait_and_replace_written_ones() {
        let (mut series, now) = (Series::default(), Instant::now());
        for number in 0..=MAX_QUEUED {
            series.add(event(&number.to_string()), Timestamp::now(), now);
        }
        assert_eq!(series.known.len(), MAX_QUEUED);
        let last = event(&MAX_QUEUED.to_string());
        assert!(!series.known.contains_key(&last));

        series.written(&event("7"), now);
        series.add(last.clone(), Timestamp::now(), now);
        assert_eq!(series.known.len(), MAX_QUEUED);
        assert!(series.known.contains_key(&last) && !series.known.contains_key(&event("7")));
    }

    #[test]
    fn an_event_that_cannot_be_written_does_not_hold_up_others() {
        let (mut series, now) = (Series::default(), Instant::now());
        series.add(event("a"), Timestamp::now(), now);
        series.add(event("b"), Timestamp::now(), now);
        assert_eq!(series.due(now), Some(event("a")));
        let later = now + WRITE_PAUSE;
        series.postponed(&event("a"), later);
        assert_eq!(series.due(later), Some(event("b")));
        series.written(&event("b"), later);
        assert_eq!(series.due(later), Some(event("a")));
    }

    #[test]
    fn an_event_is_dropped_when_repeating_it_does_not_help() {
        let refused = |code: u16| {
            let status = kube::core::Status::failure("", "").with_code(code);
            is_final(&CallError::from(kube::Error::Api(Box::new(status))))
        };
        assert!(refused(403) && refused(404));
        // New credentials help, and so does time.
        assert!(!refused(401) && !refused(429) && !refused(500));
        assert!(!is_final(&CallError::Timeout));
    }

    #[test]
    fn names_and_messages_keep_to_the_limits_of_the_api() {
        let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(event_name("p", at), "p.18867251edfa0000");
        let long = format!("{}-{}", "a".repeat(235), "b".repeat(17));
        assert!(event_name(&long, at).len() <= MAX_NAME);
        assert!(event_name(&long, at).starts_with("aaa") && !event_name(&long, at).contains("-."));

        assert_eq!(shortened("short"), "short");
        let long = shortened(&"ä".repeat(MAX_MESSAGE));
        assert!(
            long.len() <= MAX_MESSAGE && long.ends_with("ä..."),
            "{}",
            long.len()
        );
    }
}
