//! Device plugins that were rejected when they registered, for people who wonder why a plugin does not serve.
//!
//! The newest rejection of each resource and endpoint is kept for an hour, or until that plugin registers.

use alloc::collections::BTreeMap;
use alloc::string::String;

use crate::dra::health::cut;
use crate::id::Moment;

/// How long a rejection is kept.
pub const KEPT_MS: u64 = 60 * 60 * 1000;

/// How many rejections are kept. When there are more, the oldest one of the user with the most goes, so that one user
/// cannot hide the rejections of others.
pub const MOST_REJECTIONS: usize = 64;

/// A registration that was rejected. The texts are the plugin's own and may be anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The resource that it wanted to serve.
    pub resource: String,
    /// Where it answers.
    pub endpoint: String,
    /// The user that it runs as, if known.
    pub uid: Option<u32>,
    /// Its process, if visible.
    pub pid: Option<i32>,
    /// Why, in words for people.
    pub reason: String,
}

/// The newest rejection of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// What was rejected.
    pub rejection: Rejection,
    /// When.
    pub at: Moment,
    /// How often, since it last registered.
    pub attempts: u64,
}

/// All rejections that are kept, by resource and endpoint.
#[derive(Debug, Default)]
pub(crate) struct Rejections(BTreeMap<(String, String), Rejected>);

impl Rejections {
    /// Keeps a rejection. Returns whether the plugin was not rejected before, or for another reason.
    pub(crate) fn insert(&mut self, rejection: Rejection, now: Moment) -> bool {
        self.0.retain(|_, rejected| is_kept(rejected, now));
        let rejection = Rejection {
            resource: cut(rejection.resource),
            endpoint: cut(rejection.endpoint),
            reason: cut(rejection.reason),
            ..rejection
        };
        let key = (rejection.resource.clone(), rejection.endpoint.clone());
        let earlier = self.0.get(&key);
        let is_new = earlier.is_none_or(|earlier| earlier.rejection.reason != rejection.reason);
        let attempts = earlier.map_or(1, |earlier| earlier.attempts.saturating_add(1));
        if earlier.is_none() && self.0.len() >= MOST_REJECTIONS {
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

    /// Removes the oldest rejection of the user with the most, after one more of user `next`.
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

    /// Forgets the rejection of a plugin that has registered. Returns whether there was one.
    pub(crate) fn remove(&mut self, resource: &str, endpoint: &str) -> bool {
        self.0
            .remove(&(cut(resource.into()), cut(endpoint.into())))
            .is_some()
    }

    pub(crate) fn iter(&self, now: Moment) -> impl Iterator<Item = &Rejected> {
        self.0.values().filter(move |rejected| is_kept(rejected, now))
    }
}

fn is_kept(rejected: &Rejected, now: Moment) -> bool {
    now.since(rejected.at) < KEPT_MS
}
