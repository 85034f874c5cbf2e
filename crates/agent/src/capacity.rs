//! Capacity for those who want to be told: whatever changes it, and if it is only time that passes.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_core::device_plugin::inventory::GRACE_MS;
use devlet_core::{Capacity, Moment, Node, ResourceName};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::store::Store;

/// Between two looks at whether a grace period begins or ends another time.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Between two looks for resources that can be forgotten.
pub(crate) const FORGET_PAUSE: Duration = Duration::from_secs(60 * 60);

/// How many devices of each known resource there are.
pub type Capacities = BTreeMap<ResourceName, Capacity>;

/// Tells the capacity of all resources, now and whenever it is another one. Changes that come while somebody is being
/// told are told as one.
pub(crate) async fn follow(store: Store, stop: CancellationToken, mut tell: impl FnMut(&Capacities) + Send) {
    let mut changes = store.subscribe();
    let mut last = None;
    loop {
        changes.borrow_and_update();
        let now = store.now();
        let current = store.read(|node| node.capacity(now));
        if last.as_ref() != Some(&current) {
            tell(&current);
            last = Some(current);
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = stop.cancelled() => return,
        }
    }
}

/// Ends the grace period of each plugin that left, so that whoever follows the node's changes sees that, too. How
/// long it lasts is measured by a clock that nobody sets.
pub(crate) async fn end_graces(store: Store, stop: CancellationToken) {
    let mut changes = store.subscribe();
    let mut next: Option<(Moment, Instant)> = None;
    loop {
        changes.borrow_and_update();
        next = match (store.read(Node::next_grace_end), next) {
            (Some(end), Some((known, due))) if known == end => Some((end, due)),
            (Some(end), _) => {
                let left = end.since(store.now()).min(GRACE_MS);
                Some((end, Instant::now() + Duration::from_millis(left)))
            }
            (None, _) => None,
        };
        tokio::select! {
            changed = changes.changed() => match changed {
                // Nearly all changes are about something else: they are looked at together.
                Ok(()) => tokio::time::sleep(LOOK_PAUSE).await,
                Err(_) => return,
            },
            end = passed(next) => {
                store.update(|node| node.grace_ended(end));
            }
            () = stop.cancelled() => return,
        }
    }
}

/// Forgets resources that no plugin serves and no pod holds, also on a node where nothing else happens.
pub(crate) async fn forget_idle(store: Store, stop: CancellationToken, pause: Duration) {
    let mut looks = tokio::time::interval(pause);
    loop {
        tokio::select! {
            _ = looks.tick() => {
                let now = store.now();
                store.update(|node| node.evict_idle(now));
            }
            () = stop.cancelled() => return,
        }
    }
}

async fn passed(next: Option<(Moment, Instant)>) -> Moment {
    match next {
        Some((end, due)) => {
            tokio::time::sleep_until(due).await;
            end
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use devlet_core::device_plugin::inventory::{EVICT_AFTER_MS, Offer, PluginOptions};
    use devlet_core::device_plugin::list::{Device, DeviceList};
    use devlet_core::{ConnectionId, DeviceId};
    use tokio::sync::mpsc;

    use super::*;
    use crate::store::OpenOptions;

    fn serve(store: &Store, resource: &str) -> ConnectionId {
        let offer = Offer {
            resource: resource.into(),
            endpoint: "a.sock".into(),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            options: PluginOptions::default(),
        };
        let device = Device {
            id: DeviceId::from("0"),
            healthy: true,
            nodes: Vec::new(),
        };
        let now = store.now();
        store.update(|node| {
            let (connection, _) = node.plugin_connected(offer, now).unwrap();
            node.devices_listed(connection, DeviceList::new(vec![device]).0);
            connection
        })
    }

    #[tokio::test]
    async fn the_end_of_each_grace_period_is_told_without_any_other_event() {
        let directory = tempfile::tempdir().unwrap();
        let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
        let (store, _) = Store::open(options).unwrap();
        let connections = [serve(&store, "acme.com/gpu"), serve(&store, "acme.com/nic")];
        let stop = CancellationToken::new();
        let timer = tokio::spawn(end_graces(store.clone(), stop.clone()));
        let (sender, mut told) = mpsc::unbounded_channel();
        let following = tokio::spawn(follow(store.clone(), stop.clone(), move |capacities| {
            let sums: Vec<_> = capacities.values().map(|each| each.capacity).collect();
            sender.send(sums).unwrap();
        }));
        assert_eq!(told.recv().await.unwrap(), [1, 1]);

        // As if they had left some time ago, one after the other.
        let ago = |milliseconds| Moment(store.now().0 - milliseconds);
        store.update(|node| node.connection_lost(connections[0], ago(GRACE_MS - 300)));
        assert_eq!(
            told.recv().await.unwrap(),
            [1, 1],
            "only allocatable is another one"
        );
        store.update(|node| node.connection_lost(connections[1], ago(GRACE_MS - 600)));
        assert_eq!(told.recv().await.unwrap(), [1, 1]);

        assert_eq!(told.recv().await.unwrap(), [0, 1]);
        assert_eq!(told.recv().await.unwrap(), [0, 0]);

        stop.cancel();
        timer.await.unwrap();
        following.await.unwrap();
        assert_eq!(told.recv().await, None);
    }

    #[tokio::test]
    async fn a_resource_that_was_left_a_day_ago_is_forgotten_without_any_other_event() {
        let directory = tempfile::tempdir().unwrap();
        let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
        let (store, _) = Store::open(options).unwrap();
        let connection = serve(&store, "acme.com/gpu");
        let stop = CancellationToken::new();
        let timer = tokio::spawn(forget_idle(store.clone(), stop.clone(), LOOK_PAUSE));
        tokio::task::yield_now().await;
        let long_ago = Moment(store.now().0 - EVICT_AFTER_MS);
        store.update(|node| node.connection_lost(connection, long_ago));

        let is_known = || store.read(|node| node.known_resources().contains_key("acme.com/gpu"));
        let mut changes = store.subscribe();
        while is_known() {
            changes.changed().await.unwrap();
        }

        stop.cancel();
        timer.await.unwrap();
    }
}
