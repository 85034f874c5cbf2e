//! Events about pods, which explain in `kubectl describe pod` why a pod waits.
//!
//! Best effort: events that the API server does not take in time are dropped.

use devlet_agent::agent::Agent;
use devlet_core::{PodName, PodUid};
use tokio::sync::mpsc;

use crate::connection::Connection;

/// Maximum events that wait for the API server.
const MAX_QUEUED: usize = 256;

/// The queue of events. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<Event>,
}

/// An event about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
pub(crate) async fn run(_agent: Agent, _connection: Connection, mut events: mpsc::Receiver<Event>) {
    while events.recv().await.is_some() {}
}
