//! Label values that others choose, and how many of them there are at most.
//!
//! Plugins choose the names of resources and drivers, and pods may ask for any. Each of the two gets so many labels;
//! whatever comes later shares [`OTHER`]. Pods cannot use up those of plugins. The label of a resource that the node has
//! forgotten is free again.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::sync::{PoisonError, RwLock};

use devlet_core::{DriverName, ResourceName};
use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// How many resources of plugins have a label of their own, and how many drivers.
pub const MOST_RESOURCES: usize = 100;

/// How many resources that pods wait for and no plugin ever offered have one, and how many drivers of claims.
pub const MOST_AWAITED: usize = 20;

/// How many sockets in `plugins_registry` have one.
pub const MOST_SOCKETS: usize = 100;

pub(super) const OTHER: &str = "other";

/// The label of a resource or a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Label<N = ResourceName>(N);

/// The label of a driver.
pub(super) type DriverLabel = Label<DriverName>;

impl<N: for<'a> From<&'a str>> Label<N> {
    /// For what is about none: to Prometheus an empty label is no label.
    pub(super) fn none() -> Self {
        Self("".into())
    }

    /// For what is about all of them.
    pub(super) fn any() -> Self {
        Self("<any>".into())
    }
}

impl<N: Borrow<str>> EncodeLabelValue for Label<N> {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.0.borrow())
    }
}

/// Which resources or drivers have labels. First come, first served.
#[derive(Debug)]
pub(super) struct Names<N = ResourceName> {
    known: RwLock<Known<N>>,
}

#[derive(Debug)]
struct Known<N> {
    offered: BTreeSet<N>,
    awaited: BTreeSet<N>,
    /// Those of `offered` that the node knew when somebody last looked.
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
    /// Of one that a plugin offers.
    pub(super) fn offered(&self, name: &N) -> Label<N> {
        self.label(name, |known| (&mut known.offered, MOST_RESOURCES))
    }

    /// Of one that a pod waits for or uses.
    pub(super) fn awaited(&self, name: &N) -> Label<N> {
        self.label(name, |known| (&mut known.awaited, MOST_AWAITED))
    }

    /// The node knows these now: the labels of those that it has forgotten are given back. What plugins did that were
    /// never taken in stays to be seen.
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
