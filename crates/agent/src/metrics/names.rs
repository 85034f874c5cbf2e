//! Label values that others choose, and how many of them there are at most.
//!
//! Plugins choose the names of resources, and pods may ask for any. Each of the two gets so many labels; whatever
//! comes later shares [`OTHER`]. Pods cannot use up those of plugins.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::sync::{PoisonError, RwLock};

use devlet_core::ResourceName;
use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// How many resources of plugins have a label of their own.
pub const MOST_RESOURCES: usize = 100;

/// How many resources that pods wait for and no plugin ever offered have one.
pub const MOST_AWAITED: usize = 20;

/// How many sockets in `plugins_registry` have one.
pub const MOST_SOCKETS: usize = 100;

pub(super) const OTHER: &str = "other";

/// The label of a resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Label(ResourceName);

impl Label {
    /// For what is about no resource: to Prometheus an empty label is none.
    pub(super) fn none() -> Self {
        Self("".into())
    }
}

impl EncodeLabelValue for Label {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.0.as_str())
    }
}

/// Which resources have labels. First come, first served, until the process ends.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    offered: BTreeSet<ResourceName>,
    awaited: BTreeSet<ResourceName>,
}

impl Known {
    fn has(&self, resource: &ResourceName) -> bool {
        self.offered.contains(resource) || self.awaited.contains(resource)
    }
}

impl Names {
    /// Of a resource that a plugin offers.
    pub(super) fn offered(&self, resource: &ResourceName) -> Label {
        self.label(resource, |known| (&mut known.offered, MOST_RESOURCES))
    }

    /// Of a resource that a pod waits for.
    pub(super) fn awaited(&self, resource: &ResourceName) -> Label {
        self.label(resource, |known| (&mut known.awaited, MOST_AWAITED))
    }

    fn label(
        &self,
        resource: &ResourceName,
        room: impl FnOnce(&mut Known) -> (&mut BTreeSet<ResourceName>, usize),
    ) -> Label {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if known.has(resource) {
            return Label(resource.clone());
        }
        drop(known);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let (names, most) = room(&mut known);
        if names.len() < most {
            names.insert(resource.clone());
        }
        if known.has(resource) {
            Label(resource.clone())
        } else {
            Label(OTHER.into())
        }
    }
}
