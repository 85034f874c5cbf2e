//! Reports capacity after each change, and makes the changes that only time brings.

use std::collections::BTreeMap;
use std::time::Duration;

use devlet_core::device_plugin::inventory::GRACE_MS;
use devlet_core::{Capacity, Moment, Node, ResourceName};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::store::Store;

/// Pause after a change before grace periods are checked again.
const CHECK_PAUSE: Duration = Duration::from_millis(100);

/// Pause between evictions of idle resources.
pub(crate) const EVICT_PAUSE: Duration = Duration::from_secs(60 * 60);

/// The capacity of each known resource.
pub type Capacities = BTreeMap<ResourceName, Capacity>;

/// Calls `report` with the capacity of all resources, at once and after each change. Changes during a call are reported
/// together.
pub(crate) async fn follow(
    store: Store,
    stop: CancellationToken,
    mut report: impl FnMut(&Capacities) + Send,
) {
    let mut changes = store.subscribe();
    let mut last = None;
    loop {
        changes.borrow_and_update();
        let now = store.now();
        let current = store.read(|node| node.capacity(now));
        if last.as_ref() != Some(&current) {
            report(&current);
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

/// Ends the grace period of each plugin that left, which is a change that watchers of the node see. Its length is
/// measured by the monotonic clock.
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
                // Most changes do not affect grace periods: changes of a burst are checked together.
                Ok(()) => tokio::time::sleep(CHECK_PAUSE).await,
                Err(_) => return,
            },
            end = passed(next) => {
                store.update(|node| node.grace_ended(end));
            }
            () = stop.cancelled() => return,
        }
    }
}

/// Evicts resources that no plugin serves and no pod holds, also on an idle node.
pub(crate) async fn evict_idle(store: Store, stop: CancellationToken, pause: Duration) {
    let mut ticks = tokio::time::interval(pause);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
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
        let (sender, mut reported) = mpsc::unbounded_channel();
        let following = tokio::spawn(follow(store.clone(), stop.clone(), move |capacities| {
            let sums: Vec<_> = capacities.values().map(|each| each.capacity).collect();
            sender.send(sums).unwrap();
        }));
        assert_eq!(reported.recv().await.unwrap(), [1, 1]);

        // As if they had left some time ago, one after the other.
        let ago = |milliseconds| Moment(store.now().0 - milliseconds);
        store.update(|node| node.connection_lost(connections[0], ago(GRACE_MS - 300)));
        assert_eq!(
            reported.recv().await.unwrap(),
            [1, 1],
            "only allocatable is another one"
        );
        store.update(|node| node.connection_lost(connections[1], ago(GRACE_MS - 600)));
        assert_eq!(reported.recv().await.unwrap(), [1, 1]);

        assert_eq!(reported.recv().await.unwrap(), [0, 1]);
        assert_eq!(reported.recv().await.unwrap(), [0, 0]);

        stop.cancel();
        timer.await.unwrap();
        following.await.unwrap();
        assert_eq!(reported.recv().await, None);
    }

    #[tokio::test]
    async fn an_idle_resource_is_evicted_after_a_day_without_any_other_event() {
        let directory = tempfile::tempdir().unwrap();
        let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
        let (store, _) = Store::open(options).unwrap();
        let connection = serve(&store, "acme.com/gpu");
        let stop = CancellationToken::new();
        let timer = tokio::spawn(evict_idle(store.clone(), stop.clone(), CHECK_PAUSE));
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
