//! Rejected registrations of device plugins, kept for diagnosis.
//!
//! The newest rejection of each resource and endpoint is kept for [`RETENTION_MS`], or until that plugin registers.

use alloc::collections::BTreeMap;
use alloc::string::String;

use crate::dra::health::truncate;
use crate::id::Moment;

/// The period for which a rejection is kept, in milliseconds.
pub const RETENTION_MS: u64 = 60 * 60 * 1000;

/// The maximum number of rejections. Beyond it, the oldest rejection of the user with the most rejections is removed, so
/// that one user cannot displace the rejections of others.
pub const MAX_REJECTIONS: usize = 64;

/// A rejected registration. The plugin controls the texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The requested resource.
    pub resource: String,
    /// The plugin's socket.
    pub endpoint: String,
    /// The user ID of its process, if known.
    pub uid: Option<u32>,
    /// The process ID, if visible.
    pub pid: Option<i32>,
    /// The reason as text.
    pub reason: String,
}

/// The newest rejection of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The rejected registration.
    pub rejection: Rejection,
    /// The time of the newest rejection.
    pub at: Moment,
    /// The number of rejections since it last registered.
    pub attempts: u64,
}

/// All rejections that are kept, by resource and endpoint.
#[derive(Debug, Default)]
pub(crate) struct Rejections(BTreeMap<(String, String), Rejected>);

impl Rejections {
    /// Adds a rejection. Returns `false` if the plugin was rejected before for the same reason.
    pub(crate) fn insert(&mut self, rejection: Rejection, now: Moment) -> bool {
        self.0.retain(|_, rejected| is_kept(rejected, now));
        let rejection = Rejection {
            resource: truncate(rejection.resource),
            endpoint: truncate(rejection.endpoint),
            reason: truncate(rejection.reason),
            ..rejection
        };
        let key = (rejection.resource.clone(), rejection.endpoint.clone());
        let earlier = self.0.get(&key);
        let is_new = earlier.is_none_or(|earlier| earlier.rejection.reason != rejection.reason);
        let attempts = earlier.map_or(1, |earlier| earlier.attempts.saturating_add(1));
        if earlier.is_none() && self.0.len() >= MAX_REJECTIONS {
            self.remove_one(rejection.uid);
        }
        self.0.insert(
            key,
            Rejected {
                rejection,
                at: now,
                attempts,
            },
        );
        is_new
    }

    /// Removes the oldest rejection of the user with the most rejections, counting one more for user `next`.
    fn remove_one(&mut self, next: Option<u32>) {
        let mut counts: BTreeMap<Option<u32>, usize> = BTreeMap::from([(next, 1)]);
        for rejected in self.0.values() {
            *counts.entry(rejected.rejection.uid).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let of_most = |rejected: &Rejected| counts.get(&rejected.rejection.uid).copied() == most;
        let candidates = self.0.iter().filter(|(_, rejected)| of_most(rejected));
        let oldest = candidates.min_by_key(|(_, rejected)| rejected.at);
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.0.remove(&key);
        }
    }

    /// Removes the rejection of a plugin that has registered. Returns `true` if there was one.
    pub(crate) fn remove(&mut self, resource: &str, endpoint: &str) -> bool {
        self.0
            .remove(&(truncate(resource.into()), truncate(endpoint.into())))
            .is_some()
    }

    pub(crate) fn iter(&self, now: Moment) -> impl Iterator<Item = &Rejected> {
        self.0.values().filter(move |rejected| is_kept(rejected, now))
    }
}

fn is_kept(rejected: &Rejected, now: Moment) -> bool {
    now.since(rejected.at) < RETENTION_MS
}
