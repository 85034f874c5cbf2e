//! Label values that peers choose, limited in number.
//!
//! Plugins choose the names of resources and drivers, and pods may request any name. Plugins and pods each have a
//! quota of labels; later names share [`OTHER`]. Pods cannot use up the quota of plugins. The label of a resource that
//! the node has forgotten becomes free.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::sync::{PoisonError, RwLock};

use devlet_core::{DriverName, ResourceName};
use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Maximum resources of plugins with a label of their own, and maximum drivers.
pub const MAX_RESOURCES: usize = 100;

/// Maximum labels for resources that pods wait for and no plugin ever offered, and for drivers of claims.
pub const MAX_AWAITED: usize = 20;

/// Maximum labels for sockets in `plugins_registry`.
pub const MAX_SOCKETS: usize = 100;

pub(super) const OTHER: &str = "other";

/// The label of a resource or a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Label<N = ResourceName>(N);

/// The label of a driver.
pub(super) type DriverLabel = Label<DriverName>;

impl<N: for<'a> From<&'a str>> Label<N> {
    /// Returns the empty label, which Prometheus treats as absent.
    pub(super) fn none() -> Self {
        Self("".into())
    }

    /// Returns the label of a sum over all names.
    pub(super) fn any() -> Self {
        Self("<any>".into())
    }
}

impl<N: Borrow<str>> EncodeLabelValue for Label<N> {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.0.borrow())
    }
}

/// The resources or drivers with labels, assigned in the order of arrival.
#[derive(Debug)]
pub(super) struct Names<N = ResourceName> {
    known: RwLock<Known<N>>,
}

#[derive(Debug)]
struct Known<N> {
    offered: BTreeSet<N>,
    awaited: BTreeSet<N>,
    /// Names of `offered` that the node knew at the last scrape.
    seen: BTreeSet<N>,
}

impl<N> Default for Names<N> {
    fn default() -> Self {
        let known = Known {
            offered: BTreeSet::new(),
            awaited: BTreeSet::new(),
            seen: BTreeSet::new(),
        };
        Self {
            known: RwLock::new(known),
        }
    }
}

impl<N: Ord> Known<N> {
    fn has(&self, name: &N) -> bool {
        self.offered.contains(name) || self.awaited.contains(name)
    }
}

impl<N: Ord + Clone + for<'a> From<&'a str>> Names<N> {
    /// Returns the label of a name that a plugin offers.
    pub(super) fn offered(&self, name: &N) -> Label<N> {
        self.label(name, |known| (&mut known.offered, MAX_RESOURCES))
    }

    /// Returns the label of a name that a pod waits for or uses.
    pub(super) fn awaited(&self, name: &N) -> Label<N> {
        self.label(name, |known| (&mut known.awaited, MAX_AWAITED))
    }

    /// Frees the labels of names that the node knew at the last scrape and does not know `now`, and returns them.
    /// Names of plugins that never registered keep theirs.
    pub(super) fn forget_all_but<'a>(&self, now: impl Iterator<Item = &'a N>) -> Vec<Label<N>>
    where
        N: 'a,
    {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let now: BTreeSet<N> = now
            .filter(|name| known.offered.contains(*name))
            .cloned()
            .collect();
        let before = std::mem::replace(&mut known.seen, now);
        let gone: Vec<N> = before.difference(&known.seen).cloned().collect();
        known.offered.retain(|name| !gone.contains(name));
        let free = gone.into_iter().filter(|name| !known.awaited.contains(name));
        free.map(Label).collect()
    }

    fn label(&self, name: &N, room: impl FnOnce(&mut Known<N>) -> (&mut BTreeSet<N>, usize)) -> Label<N> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if known.has(name) {
            return Label(name.clone());
        }
        drop(known);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let (names, most) = room(&mut known);
        if names.len() < most {
            names.insert(name.clone());
        }
        if known.has(name) {
            Label(name.clone())
        } else {
            Label(OTHER.into())
        }
    }
}
