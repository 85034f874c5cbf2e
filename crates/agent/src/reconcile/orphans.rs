//! Removes pods that no longer exist according to an embedder.

use std::collections::BTreeSet;
use std::time::Duration;

use devlet_core::{Node, PodUid, Source};
use futures_util::future::join_all;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::display::NamedPod;
use crate::store::{ReleaseError, Store, is_unknown_pod};

/// A source of the pods that exist.
///
/// A function that returns the list, `async || Some(...)`, is one.
pub trait ActivePods: Send + Sync {
    /// Returns all pods that exist, or `None` while that is not known; then nothing is removed.
    ///
    /// A pod belongs on the list before it is admitted, and until its containers have ended for good.
    fn active(&self) -> impl Future<Output = Option<BTreeSet<PodUid>>> + Send;
}

impl<F, A> ActivePods for F
where
    F: Fn() -> A + Send + Sync,
    A: Future<Output = Option<BTreeSet<PodUid>>> + Send,
{
    fn active(&self) -> impl Future<Output = Option<BTreeSet<PodUid>>> + Send {
        self()
    }
}

/// Calls [`remove`] at once, and then again after each pause, until `stop`.
pub(crate) async fn follow(store: Store, source: impl ActivePods, pause: Duration, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let removing = async {
        loop {
            ticks.tick().await;
            remove(&store, &source).await;
        }
    };
    tokio::select! {
        () = removing => {}
        () = stop.cancelled() => {}
    }
}

/// Returns the pods of the embedder, and imported ones, that are not on its complete list, which was requested after `asked`
/// admissions.
pub(crate) fn missing_in(store: &Store, active: &BTreeSet<PodUid>, asked: u64) -> Vec<PodUid> {
    let mut orphans = store.read(|node| node.orphans(Source::Embedder, active, asked));
    // Pods without a readable UID are on no list: only an operator knows whether they exist.
    orphans.retain(|pod| !is_unknown_pod(pod));
    orphans
}

/// Removes the pods of the embedder, and imported ones, that are not on its list, and returns them.
///
/// The list covers only pods that were admitted before it was requested. A pod that is admitted, or admitted again,
/// while the list is made is kept.
pub(crate) async fn remove(store: &Store, source: &impl ActivePods) -> Vec<PodUid> {
    let asked = store.read(Node::admissions);
    let Some(active) = source.active().await else {
        return Vec::new();
    };
    let orphans = missing_in(store, &active, asked);
    // Removed concurrently, so that they share a write.
    let removals = orphans.into_iter().map(async |pod| {
        let label = store.read(|node| NamedPod::of(node, &pod)).label();
        // The pod may have been admitted again meanwhile.
        let still = |node: &Node| node.list_covers(&pod, Source::Embedder, asked);
        match store.release_if(&pod, still).await {
            Ok(()) => {
                tracing::info!(pod = %label, uid = %pod, "inactive pod removed");
                Some(pod)
            }
            Err(ReleaseError::Refused(_)) => None,
            Err(ReleaseError::Write(error)) => {
                tracing::warn!(pod = %label, uid = %pod, %error, "inactive pod not removed yet: state cannot be written");
                None
            }
        }
    });
    join_all(removals).await.into_iter().flatten().collect()
}
