//! The state of the kubelet, its runtime, and devlet's registrations, for display.

use std::collections::BTreeMap;
use std::sync::Arc;

use devlet_core::ResourceName;
use tokio::sync::watch;

use crate::lease::spec::RuntimeCdi;

/// The state of a shield. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ShieldReport(Arc<watch::Sender<ShieldState>>);

/// The content of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShieldState {
    /// The kubelet that listens, as far as it is known.
    pub kubelet: Option<KubeletState>,
    /// The CDI configuration of the container runtime.
    pub runtime: RuntimeState,
    /// The registration of each resource: `None`, or why it failed.
    pub registrations: BTreeMap<ResourceName, Option<String>>,
    /// Lists of which the kubelet gets a part only, with the reason.
    pub shortened: BTreeMap<ResourceName, String>,
    /// Why the kubelet's record of devices cannot be used.
    pub checkpoint: Option<String>,
    /// Set once devlet has handed the devices back to the kubelet.
    pub left: Option<String>,
    /// Containers that the kubelet gave devices without devlet since the adoption, as text.
    pub bypassed: Vec<String>,
}

/// A kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletState {
    /// Its process ID, if it is visible.
    pub pid: Option<i32>,
    /// Its version, such as `v1.37.1`; `None` while unknown.
    pub version: Option<String>,
}

/// The CDI configuration of the container runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RuntimeState {
    /// It has not been asked, and why.
    #[default]
    Unasked,
    /// It cannot be determined.
    Unknown {
        /// Why.
        reason: String,
    },
    /// CDI is on, and the runtime reads devlet's directory.
    Ready {
        /// Name and version.
        name: String,
        /// How it treats CDI devices.
        cdi: RuntimeCdi,
    },
    /// Containers would start without their devices.
    Unfit {
        /// Name and version.
        name: String,
        /// The reason, and how to solve it.
        problem: String,
    },
}

impl ShieldReport {
    /// Returns the state.
    pub fn get(&self) -> ShieldState {
        self.0.borrow().clone()
    }

    /// Changes the state.
    pub(crate) fn update(&self, change: impl FnOnce(&mut ShieldState)) {
        self.0.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        });
    }

    /// Returns a receiver of the state.
    pub fn subscribe(&self) -> watch::Receiver<ShieldState> {
        self.0.subscribe()
    }
}
