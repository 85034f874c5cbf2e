//! Watch streams: a list at once, and again after each change that is visible in it.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use super::service::DevletService;
use crate::cluster::ClusterState;
use crate::shield::report::ShieldState;

/// Pause after a list was sent. Changes come in bursts: the first is sent at once, the others together.
const PAUSE: Duration = Duration::from_millis(100);

/// Pause after a list without changes, as a multiple of the time to make it, up to [`PAUSE`].
const IDLE_PAUSE_FACTOR: u32 = 9;

/// A stream of answers.
pub(super) type Updates<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl DevletService {
    /// Streams the result of `list` at once and whenever it differs, until the caller leaves or the node stops.
    pub(super) fn watch<T, L>(
        &self,
        list: impl Fn(&Self) -> T + Send + Sync + 'static,
        wrap: fn(u64, T) -> L,
    ) -> Response<Updates<L>>
    where
        T: Clone + PartialEq + Send + Sync + 'static,
        L: Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(1);
        let service = self.clone();
        self.agent.spawn(async move {
            let changes = Changes {
                node: service.agent.store().subscribe(),
                cluster: service.agent.cluster().subscribe(),
                shield: service.agent.shield().subscribe(),
            };
            let list = || list(&service);
            let stop = service.agent.stopping();
            tokio::select! {
                // Checked first: a stopping node must not send a list that looks like that of a restarted one.
                biased;
                () = stop.cancelled() => {}
                () = sender.closed() => {}
                () = follow(changes, list, wrap, tokio::time::sleep, &sender) => {}
            }
        });
        Response::new(Box::pin(ReceiverStream::new(receiver)))
    }
}

/// Changes that a list may show.
pub(super) struct Changes {
    pub(super) node: watch::Receiver<u64>,
    pub(super) cluster: watch::Receiver<ClusterState>,
    pub(super) shield: watch::Receiver<ShieldState>,
}

impl Changes {
    /// Returns the revision of the node. Changes up to now are seen.
    fn see(&mut self) -> u64 {
        self.cluster.mark_unchanged();
        self.shield.mark_unchanged();
        *self.node.borrow_and_update()
    }

    /// Completes after the next change. Fails when the node is gone.
    async fn next(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.node.changed() => changed,
            changed = self.cluster.changed() => changed,
            changed = self.shield.changed() => changed,
        }
    }
}

/// Sends the result of `list` at once, and after each change that makes it differ.
pub(super) async fn follow<T: Clone + PartialEq, L, P: Future<Output = ()>>(
    mut changes: Changes,
    list: impl Fn() -> T,
    wrap: fn(u64, T) -> L,
    pause: impl Fn(Duration) -> P,
    sender: &mpsc::Sender<Result<L, Status>>,
) {
    let mut last = None;
    loop {
        let revision = changes.see();
        let began = Instant::now();
        let items = list();
        let time = if last.as_ref() == Some(&items) {
            PAUSE.min(began.elapsed() * IDLE_PAUSE_FACTOR)
        } else {
            if sender.send(Ok(wrap(revision, items.clone()))).await.is_err() {
                return;
            }
            last = Some(items);
            PAUSE
        };
        pause(time).await;
        if changes.next().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
