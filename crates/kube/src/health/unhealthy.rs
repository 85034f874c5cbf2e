//! Devices that stay unhealthy for long enough to remove their pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBackoff;
use devlet_agent::agent::Agent;
use devlet_core::PodUid;
use tokio::time::Instant;

use super::report::PodHealth;
use super::status::SeenPod;
use super::{HealthSettings, OnUnhealthy};
use crate::task;

/// Time for which a device must be unhealthy without a break before its pod is removed.
const REMOVAL_DELAY: Duration = Duration::from_secs(10);

/// Longest pause after a removal that the API server refused; jitter doubles it at most.
const MAX_REFUSED_PAUSE: Duration = Duration::from_secs(60);

/// The pods with an unhealthy device of a chosen resource, and the time since which it has been unhealthy.
#[derive(Debug, Default)]
pub(super) struct Unhealthy {
    chosen: BTreeMap<String, OnUnhealthy>,
    since: BTreeMap<(PodUid, String), Instant>,
    /// Pods whose removal was refused, and the time of the next attempt.
    refused: BTreeMap<PodUid, (Instant, ExponentialBackoff)>,
}

impl Unhealthy {
    pub(super) fn new(settings: HealthSettings) -> Self {
        Self {
            chosen: settings.on_unhealthy,
            since: BTreeMap::new(),
            refused: BTreeMap::new(),
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
        let is_refused = self.refused.get(uid).is_some_and(|(next, _)| now < *next);
        removal.filter(|_| !is_refused)
    }

    /// Records that the API server has refused to remove a pod for now. `asked` is the pause that it asks for.
    pub(super) fn refused(&mut self, uid: &PodUid, asked: Option<Duration>, now: Instant) {
        let known = self.refused.remove(uid).map(|(_, pauses)| pauses);
        let mut pauses = known.unwrap_or_else(|| task::pauses(MAX_REFUSED_PAUSE));
        let pause = pauses.next().unwrap_or(MAX_REFUSED_PAUSE);
        let pause = pause.max(asked.unwrap_or_default()).max(task::PASS_PAUSE);
        self.refused.insert(uid.clone(), (now + pause, pauses));
    }

    /// Forgets pods that are gone, and those whose device has become healthy, however briefly.
    pub(super) fn forget_recovered(&mut self, agent: &Agent, pods: &BTreeMap<PodUid, Arc<SeenPod>>) {
        self.since.retain(|(uid, name), _| {
            let seen = pods.get(uid);
            seen.is_some_and(|seen| PodHealth::current(agent, seen).unhealthy.contains(name))
        });
        let left = &self.since;
        self.refused
            .retain(|uid, _| left.keys().any(|(pod, _)| pod == uid));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.since.is_empty()
    }

    /// Completes when another pod is to be removed than at `now`.
    pub(super) async fn due(&self, now: Instant) {
        let due = self.since.values().map(|since| *since + REMOVAL_DELAY);
        let due = due.chain(self.refused.values().map(|(next, _)| *next));
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

    #[test]
    fn a_removal_that_is_refused_is_tried_again_less_and_less_often() {
        let mut unhealthy = Unhealthy::new(HealthSettings {
            on_unhealthy: BTreeMap::from([("acme.com/gpu".to_owned(), OnUnhealthy::Evict)]),
        });
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let health = PodHealth::unhealthy_device("acme.com/gpu");
        unhealthy.observe(&uid, &health, start);
        let mut now = start + REMOVAL_DELAY;
        let mut pauses = Vec::new();
        for _ in 0..12 {
            assert!(unhealthy.observe(&uid, &health, now).is_some());
            unhealthy.refused(&uid, None, now);
            let (next, _) = unhealthy.refused[&uid];
            let last = next - Duration::from_millis(1);
            assert!(unhealthy.observe(&uid, &health, last).is_none());
            pauses.push(next - now);
            now = next;
        }
        assert!(
            pauses[0] >= task::PASS_PAUSE && pauses[11] >= MAX_REFUSED_PAUSE,
            "{pauses:?}"
        );
        unhealthy.refused(&uid, Some(Duration::from_secs(1000)), now);
        assert!(
            unhealthy
                .observe(&uid, &health, now + Duration::from_secs(999))
                .is_none()
        );
    }
}
