use std::sync::{Arc, Mutex};

use devlet_core::Moment;
use devlet_testkit::PATIENCE;
use tokio::sync::oneshot;

use super::*;
use crate::cluster::ClusterReport;
use crate::shield::ShieldReport;

/// A watched list, with pauses that the test ends.
struct Watched {
    items: Arc<Mutex<Vec<u64>>>,
    revision: watch::Sender<u64>,
    cluster: ClusterReport,
    _shield: ShieldReport,
    sent: mpsc::Receiver<Result<(u64, Vec<u64>), Status>>,
    pauses: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

impl Watched {
    fn new() -> Self {
        let items = Arc::new(Mutex::new(Vec::new()));
        let (revision, node) = watch::channel(0);
        let cluster = ClusterReport::default();
        let shield = ShieldReport::default();
        let changes = Changes {
            node,
            cluster: cluster.subscribe(),
            shield: shield.subscribe(),
        };
        let (sender, sent) = mpsc::channel(1);
        let (begun, pauses) = mpsc::unbounded_channel();
        let shared = Arc::clone(&items);
        tokio::spawn(async move {
            let list = || shared.lock().unwrap().clone();
            let pause = |_| {
                let (end, ended) = oneshot::channel();
                begun.send(end).unwrap();
                async { ended.await.unwrap() }
            };
            let wrap = |revision, items| (revision, items);
            follow(changes, list, wrap, pause, &sender).await;
        });
        Self {
            items,
            revision,
            cluster,
            _shield: shield,
            sent,
            pauses,
        }
    }

    fn change(&self, item: Option<u64>) {
        self.items.lock().unwrap().extend(item);
        self.revision.send_modify(|revision| *revision += 1);
    }

    async fn sent(&mut self) -> Vec<u64> {
        let sent = tokio::time::timeout(PATIENCE, self.sent.recv()).await;
        let (_, items) = sent.unwrap().unwrap().unwrap();
        items
    }

    async fn pause(&mut self) -> oneshot::Sender<()> {
        let begun = tokio::time::timeout(PATIENCE, self.pauses.recv()).await;
        begun.unwrap().unwrap()
    }
}

#[tokio::test]
async fn the_first_change_is_sent_at_once_and_later_ones_together() {
    let mut watched = Watched::new();
    assert!(watched.sent().await.is_empty());
    watched.pause().await.send(()).unwrap();
    watched.change(Some(1));
    assert_eq!(watched.sent().await, [1]);
    let pause = watched.pause().await;
    for item in 2..10 {
        watched.change(Some(item));
        tokio::task::yield_now().await;
    }
    assert!(watched.sent.try_recv().is_err());
    pause.send(()).unwrap();
    assert_eq!(watched.sent().await, (1..10).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_change_that_is_not_visible_is_not_sent() {
    let mut watched = Watched::new();
    assert!(watched.sent().await.is_empty());
    watched.pause().await.send(()).unwrap();
    watched.change(None);
    watched.pause().await.send(()).unwrap();
    assert!(watched.sent.try_recv().is_err());
    watched.change(Some(1));
    assert_eq!(watched.sent().await, [1]);
}

#[tokio::test]
async fn a_change_of_a_cluster_is_sent_and_a_success_of_its_tasks_is_not() {
    let mut watched = Watched::new();
    assert!(watched.sent().await.is_empty());
    watched.pause().await.send(()).unwrap();
    watched.items.lock().unwrap().push(1);
    watched.cluster.succeeded("pods", Moment(1));
    watched.cluster.failed("pods", Moment(2), "no answer".into());
    tokio::task::yield_now().await;
    assert!(watched.sent.try_recv().is_err());
    watched.cluster.update(|state| state.waiting.clear());
    assert_eq!(watched.sent().await, [1]);
}
