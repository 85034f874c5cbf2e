//! Devices that stay unhealthy for long enough to remove their pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_core::PodUid;
use tokio::time::Instant;

use super::report::PodHealth;
use super::status::SeenPod;
use super::{HealthSettings, OnUnhealthy};

/// Time for which a device must be unhealthy without a break before its pod is removed.
const REMOVAL_DELAY: Duration = Duration::from_secs(10);

/// The pods with an unhealthy device of a chosen resource, and the time since which it has been unhealthy.
#[derive(Debug, Default)]
pub(super) struct Unhealthy {
    chosen: BTreeMap<String, OnUnhealthy>,
    since: BTreeMap<(PodUid, String), Instant>,
}

impl Unhealthy {
    pub(super) fn new(settings: HealthSettings) -> Self {
        Self {
            chosen: settings.on_unhealthy,
            since: BTreeMap::new(),
        }
    }

    /// Records the health of a pod's devices. Returns how to remove the pod, if it is time to.
    pub(super) fn observe(&mut self, uid: &PodUid, health: &PodHealth, now: Instant) -> Option<OnUnhealthy> {
        self.since
            .retain(|(pod, name), _| pod != uid || health.unhealthy.contains(name));
        let mut removal = None;
        for name in &health.unhealthy {
            let Some(how) = self.chosen.get(name) else {
                continue;
            };
            let key = (uid.clone(), name.clone());
            let since = *self.since.entry(key).or_insert(now);
            if now >= since + REMOVAL_DELAY {
                removal = removal.or(Some(*how));
            }
        }
        removal
    }

    /// Forgets pods that are gone, and those whose device has become healthy, however briefly.
    pub(super) fn forget_recovered(&mut self, agent: &Agent, pods: &BTreeMap<PodUid, Arc<SeenPod>>) {
        self.since.retain(|(uid, name), _| {
            let seen = pods.get(uid);
            seen.is_some_and(|seen| PodHealth::current(agent, seen).unhealthy.contains(name))
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.since.is_empty()
    }

    /// Completes when another pod is to be removed than at `now`.
    pub(super) async fn due(&self, now: Instant) {
        let due = self.since.values().map(|since| *since + REMOVAL_DELAY);
        match due.filter(|due| *due > now).min() {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_removed_when_a_device_of_a_chosen_resource_has_stayed_unhealthy() {
        let mut unhealthy = Unhealthy::new(HealthSettings {
            on_unhealthy: BTreeMap::from([("acme.com/gpu".to_owned(), OnUnhealthy::Evict)]),
        });
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let mut removal = |resource: Option<&str>, seconds: u64| {
            let health = resource.map_or_else(PodHealth::default, PodHealth::unhealthy_device);
            unhealthy.observe(&uid, &health, start + Duration::from_secs(seconds))
        };
        let gpu = Some("acme.com/gpu");
        assert_eq!(removal(gpu, 0), None);
        assert_eq!(removal(gpu, 9), None);
        assert_eq!(removal(None, 9), None);
        assert_eq!(removal(gpu, 10), None, "it was healthy in between");
        assert_eq!(removal(gpu, 20), Some(OnUnhealthy::Evict));
        assert_eq!(removal(Some("acme.com/nic"), 30), None);
        assert_eq!(removal(Some("acme.com/nic"), 60), None);
    }
}
