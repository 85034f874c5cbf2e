//! The state of the kubelet, its runtime, and devlet's registrations, for display.

use std::collections::BTreeMap;
use std::sync::Arc;

use devlet_core::shield::LeaseHolder;
use devlet_core::{ContainerName, LeaseName, PodName, PodUid, ResourceName};
use tokio::sync::watch;

use super::pods::KubeletPod;
use super::runtime;
use crate::lease::containers::Sandbox;
use crate::lease::spec::RuntimeCdi;
use crate::metrics::ShieldCounts;

/// What to do if devlet does not see processes of the host.
pub const HOST_PIDS: &str = "run devlet in the host's PID namespace (in a pod: hostPID: true)";

/// What is shown after devlet has left.
pub const HAS_LEFT: &str =
    "devlet has handed the devices back to the kubelet; devlet shield adopt takes them over again";

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
    /// The versions of kubelets, by their programs; `None` if the program does not tell.
    pub versions: BTreeMap<Program, Option<String>>,
    /// Set once devlet has handed the devices back to the kubelet.
    pub left: Option<String>,
    /// Containers that the kubelet gave devices without devlet since the adoption, by their leases.
    pub bypassed: BTreeMap<LeaseName, LeaseHolder>,
    /// Sockets of plugins in the kubelet's directory that are not devlet's.
    pub beside: Vec<String>,
    /// Containers without devices that they must have.
    pub missing: Vec<MissingDevices>,
    /// Why the runtime does not tell which containers run.
    pub silent: Option<String>,
    /// The pods that the runtime has.
    pub sandboxes: Arc<BTreeMap<PodUid, Sandbox>>,
    /// The pods that the kubelet has; `None` if it does not report them.
    pub pods: Option<Arc<BTreeMap<PodUid, KubeletPod>>>,
}

/// A container for which the kubelet has no devices of a resource that it requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MissingDevices {
    /// Its pod.
    pub pod: PodName,
    /// Its name.
    pub container: ContainerName,
    /// The resource.
    pub resource: ResourceName,
    /// What that means for the container.
    pub state: MissingState,
}

/// The state of a container without devices in the kubelet's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingState {
    /// It runs without them.
    Running,
    /// It runs, and the runtime has not called the hook of its lease: it ignores devlet's CDI specs.
    Unhooked,
    /// It runs with them, and cannot be started again.
    Forgotten,
    /// It cannot be started.
    Stopped,
}

impl ShieldState {
    /// Returns the name of a pod, if the kubelet or the runtime has it.
    pub fn pod_name(&self, pod: &PodUid) -> Option<&PodName> {
        let reported = self.pods.as_ref().and_then(|pods| pods.get(pod));
        let started = || self.sandboxes.get(pod).map(|sandbox| &sandbox.name);
        reported.map(|pod| &pod.name).or_else(started)
    }
}

/// The file of a program: device, inode, size, and time of the last change.
pub type Program = (u64, u64, u64, i64);

/// A kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletState {
    /// Its process ID, if it is visible.
    pub pid: Option<i32>,
    /// Its version, such as `v1.37.1`; `None` while unknown.
    pub version: Option<String>,
    /// `true` once its program has been asked for the version.
    pub is_asked: bool,
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

impl ShieldState {
    /// Returns `true` if the kubelet's process is not visible, so that those of containers are not either.
    pub fn is_blind(&self) -> bool {
        self.kubelet.as_ref().is_some_and(|kubelet| kubelet.pid.is_none())
    }
}

impl ShieldState {
    /// Returns why devlet must not give devices to containers of this node.
    pub fn unfit(&self) -> Option<String> {
        if self.is_blind() {
            return Some(format!(
                "the process of the kubelet is not visible to devlet; {HOST_PIDS}"
            ));
        }
        if let RuntimeState::Unfit { name, problem } = &self.runtime {
            return Some(format!("the container runtime {name} cannot be used: {problem}"));
        }
        self.kubelet.as_ref()?.refusal()
    }
}

impl KubeletState {
    /// Returns why devlet must not give devices to this kubelet.
    pub fn refusal(&self) -> Option<String> {
        let version = self.version.as_ref()?;
        (!runtime::is_new_enough(version)).then(|| {
            format!("kubelet {version} does not hand CDI devices on, so containers would start without their devices")
        })
    }
}

impl ShieldReport {
    /// Returns once the kubelet's program has been asked for its version, with the reason to refuse this kubelet.
    pub(crate) async fn judged(&self) -> Option<String> {
        let mut state = self.subscribe();
        let asked = |state: &ShieldState| state.kubelet.as_ref().is_some_and(|kubelet| kubelet.is_asked);
        // Fails only if no report is left.
        let state = state.wait_for(asked).await.ok()?;
        state.kubelet.as_ref()?.refusal()
    }

    /// Waits until it is known that devices must not be given to the kubelet. Returns the reason.
    pub(crate) async fn refused(&self) -> String {
        let mut state = self.subscribe();
        loop {
            let refusal = state
                .borrow_and_update()
                .kubelet
                .as_ref()
                .and_then(KubeletState::refusal);
            if let Some(refusal) = refusal {
                return refusal;
            }
            // Fails only if no report is left, and this function has one.
            let _ = state.changed().await;
        }
    }

    /// Reads the state.
    pub(crate) fn read<T>(&self, question: impl FnOnce(&ShieldState) -> T) -> T {
        question(&self.0.borrow())
    }

    /// Returns the state.
    pub fn get(&self) -> ShieldState {
        self.0.borrow().clone()
    }

    /// Returns the numbers for metrics.
    pub fn counts(&self) -> ShieldCounts {
        let state = self.0.borrow();
        let failed = state
            .registrations
            .values()
            .filter(|problem| problem.is_some())
            .count();
        ShieldCounts {
            registered: state.registrations.len() - failed,
            unregistered: failed,
            missing: state.missing.len(),
            bypassed: state.bypassed.len(),
            is_runtime_ready: matches!(state.runtime, RuntimeState::Ready { .. }),
        }
    }

    /// Changes the state.
    pub fn update(&self, change: impl FnOnce(&mut ShieldState)) {
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
