//! Leases: devices that a kubelet has given to a container, while devlet stands between it and the device plugins.
//!
//! The kubelet decides who has which device. devlet answers its `Allocate` with a lease, and prepares the lease before
//! each start of the container:
//!
//! ```text
//!          Allocate            PreStartContainer         the plugin has answered
//!   (none) ────────► granted ───────────────────► preparing ──────────────────► prepared ──┐ PreStartContainer
//!                      ▲ ▲                            │                            │ ▲      │ (preparing again)
//!                      │ └──────── failed ────────────┘                            │ └──────┘
//!                      └──────────────── reboot ───────────────────────────────────┤
//!                                                                                  ▼
//!                       ended: removed, once the kubelet does not know it and no container of it may run
//! ```
//!
//! Several leases may have the same devices: those of an init container and of a later container of its pod, and those of
//! a pod that is gone and of its successor. The calls of a kubelet do not tell them apart. So the rule is about
//! containers: a device is in at most one container that may run. A container may run from its start, which devlet
//! allows or refuses ([`Leases::begin_start`]), until its end is known.
//!
//! Leases that are found in the kubelet's record may have containers that devlet did not see start. Such a lease is neither
//! prepared nor ended before the runtime has told which of its containers run ([`Leases::begin_witness`]).
//!
//! A change that forbids something counts from its begin; one that allows something counts when it is on disk.
//!
//! A plugin may want a call before each start of a container. A call that ended after the kubelet had given up serves the
//! kubelet's next try ([`PreStart`]), once: it is lost as soon as a container with one of its devices starts, or
//! one of its devices is prepared for another set of leases. The caller checks that the plugin is the same, and how old the
//! call is.

mod advertise;
mod changes;
mod error;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

pub use advertise::Advertised;
pub(crate) use advertise::restore as restore_lists;
pub use changes::{LeaseChange, Preparation};
pub use error::{EndError, GrantError, PrepareError, StartError};

use crate::device_plugin::run_options::Answer;
use crate::id::{ConnectionId, ContainerName, DeviceId, LeaseName, Moment, PodUid, ResourceName};
use crate::node::Node;

/// Devices of one resource that the kubelet has given to one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The name, which only devlet, the kubelet and the runtime know.
    pub name: LeaseName,
    /// The resource.
    pub resource: ResourceName,
    /// The devices.
    pub devices: BTreeSet<DeviceId>,
    /// The plugin's answer to `Allocate`; `None` until the lease is prepared for the first time.
    pub answer: Option<Answer>,
    /// `true` if the plugin wants a call before each start of the container.
    pub pre_start_required: bool,
    /// When the kubelet asked for it.
    pub granted_at: Moment,
    /// `true` if the container starts without devlet's word: it got the plugin's answer from the kubelet itself, before devlet
    /// stood between them, or devlet has handed it over.
    pub is_direct: bool,
    /// The container that has it, if the kubelet has told.
    pub holder: Option<LeaseHolder>,
    /// `false` while containers of the lease may run that devlet did not see start: those from before its adoption.
    /// Never `true` for a direct lease, whose container starts without devlet.
    pub is_witnessed: bool,
    /// The containers that may run, by the runtime's ID.
    pub containers: BTreeMap<String, ContainerProcess>,
}

/// The first process of a container, and the group of all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerProcess {
    /// Its process ID on the host.
    pub pid: u32,
    /// Its start time in clock ticks since the boot, which tells it from a later process with the same ID.
    pub started: u64,
    /// Its control group, if no other process was in it at the start. The container runs while a process is in it.
    pub cgroup: Option<String>,
    /// The number of the PID namespace in which it has that ID.
    pub pid_namespace: u64,
}

/// The container that has a lease.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseHolder {
    /// The pod.
    pub pod: PodUid,
    /// The container.
    pub container: ContainerName,
}

/// The phase of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeasePhase {
    /// The plugin has not been called.
    Granted,
    /// The plugin is being called.
    Preparing,
    /// The plugin has answered.
    Prepared,
    /// Its removal is being written.
    Ending,
}

/// A successful call of a plugin's `PreStartContainer` that no container has used yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreStart {
    /// The plugin.
    pub connection: ConnectionId,
    /// When it was answered.
    pub at: Moment,
}

/// The reason why a lease does not change for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Busy {
    Preparing,
    Ending,
}

#[derive(Debug, Clone)]
struct Entry {
    lease: Lease,
    busy: Option<Busy>,
    pre_start: Option<PreStart>,
    /// Why the last preparation failed, if the kubelet did not get that as an answer.
    failure: Option<String>,
}

/// All leases.
#[derive(Debug, Clone, Default)]
pub struct Leases {
    entries: BTreeMap<LeaseName, Entry>,
    /// The leases of each device.
    by_device: BTreeMap<(ResourceName, DeviceId), BTreeSet<LeaseName>>,
}

/// A lease, for display.
#[derive(Debug, Clone, Copy)]
pub struct LeaseView<'a> {
    /// The lease.
    pub lease: &'a Lease,
    /// Its phase.
    pub phase: LeasePhase,
}

/// A preparation in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preparing<'a> {
    /// `true` if the plugin has not answered `Allocate` for all of its leases.
    pub lacks_answers: bool,
    /// Why the preparation before it failed, if the kubelet did not get that as an answer.
    pub failure: Option<&'a str>,
}

impl Node {
    /// Returns the leases.
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Returns the leases, to change them.
    pub fn leases_mut(&mut self) -> &mut Leases {
        self.changes += 1;
        &mut self.leases
    }
}

impl Lease {
    /// Forgets what a reboot has ended: containers, and the plugin's preparations. Returns `true` if there was something.
    pub fn rebooted(&mut self) -> bool {
        // A direct lease keeps its answer: the kubelet has it, too, and passes it on.
        let had_answer = !self.is_direct && self.answer.take().is_some();
        let had_containers = !self.containers.is_empty();
        self.containers.clear();
        let was_unwitnessed = !self.is_direct && !self.is_witnessed;
        self.is_witnessed = !self.is_direct;
        had_answer || had_containers || was_unwitnessed
    }

    /// Returns the pod that has it, if the kubelet has told.
    pub fn pod(&self) -> Option<&PodUid> {
        self.holder.as_ref().map(|holder| &holder.pod)
    }

    fn keys(&self) -> impl Iterator<Item = (ResourceName, DeviceId)> {
        let devices = self.devices.iter();
        devices.map(|device| (self.resource.clone(), device.clone()))
    }
}

impl Entry {
    fn view(&self) -> LeaseView<'_> {
        LeaseView {
            lease: &self.lease,
            phase: self.phase(),
        }
    }

    fn phase(&self) -> LeasePhase {
        match self.busy {
            Some(Busy::Preparing) => LeasePhase::Preparing,
            Some(Busy::Ending) => LeasePhase::Ending,
            None if self.lease.answer.is_some() => LeasePhase::Prepared,
            None => LeasePhase::Granted,
        }
    }
}

impl Leases {
    /// Returns the leases of durable records.
    pub(crate) fn restore(leases: impl IntoIterator<Item = Lease>) -> Self {
        let mut all = Self::default();
        leases.into_iter().for_each(|lease| all.insert(lease));
        all
    }

    /// Returns all leases, by name.
    pub fn iter(&self) -> impl Iterator<Item = LeaseView<'_>> {
        self.entries.values().map(Entry::view)
    }

    /// Returns a lease.
    pub fn get(&self, name: &str) -> Option<LeaseView<'_>> {
        self.entries.get(name).map(Entry::view)
    }

    /// Returns the names of the leases with exactly these devices.
    pub fn of_devices(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> Vec<LeaseName> {
        let Some(first) = devices.first() else {
            return Vec::new();
        };
        let names = self.by_device.get(&(resource.clone(), first.clone()));
        let names = names.into_iter().flatten();
        names
            .filter(|name| {
                let entry = self.entries.get(*name);
                entry.is_some_and(|entry| entry.lease.devices == *devices)
            })
            .cloned()
            .collect()
    }

    /// Returns the preparation of exactly these devices that is in progress.
    pub fn preparing(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> Option<Preparing<'_>> {
        let names = self.of_devices(resource, devices);
        let entries = names.iter().filter_map(|name| self.entries.get(name));
        let preparing = entries.filter(|entry| entry.busy == Some(Busy::Preparing));
        preparing.fold(None, |all: Option<Preparing<'_>>, entry| {
            let all = all.unwrap_or(Preparing {
                lacks_answers: false,
                failure: None,
            });
            Some(Preparing {
                lacks_answers: all.lacks_answers || entry.lease.answer.is_none(),
                failure: all.failure.or(entry.failure.as_deref()),
            })
        })
    }

    /// Records which container has a lease, according to the kubelet. Returns `true` if that is news.
    pub fn identify(&mut self, name: &LeaseName, holder: &LeaseHolder) -> bool {
        match self.entries.get_mut(name.as_str()) {
            Some(entry) if entry.lease.holder.as_ref() != Some(holder) => {
                entry.lease.holder = Some(holder.clone());
                true
            }
            _ => false,
        }
    }

    /// Returns the pods that have devices of a resource, as far as the kubelet has told.
    pub(crate) fn holders_of(&self, resource: &ResourceName) -> impl Iterator<Item = (&DeviceId, &PodUid)> {
        let entries = self
            .entries
            .values()
            .filter(|entry| entry.lease.resource == *resource);
        entries.flat_map(|entry| {
            let pod = entry.lease.pod();
            pod.into_iter()
                .flat_map(|pod| entry.lease.devices.iter().map(move |device| (device, pod)))
        })
    }

    /// Returns the resources of all leases.
    pub(crate) fn resources(&self) -> impl Iterator<Item = &ResourceName> {
        self.entries.values().map(|entry| &entry.lease.resource)
    }

    /// Returns the devices of a resource that leases have, each once.
    pub(crate) fn devices_of(&self, resource: &ResourceName) -> impl Iterator<Item = &DeviceId> {
        let from = (resource.clone(), DeviceId::from(""));
        let keys = self.by_device.range(from..).map(|(key, _)| key);
        keys.take_while(move |(name, _)| name == resource)
            .map(|(_, device)| device)
    }

    /// Returns the leases that share a device with these devices.
    fn overlapping<'a>(
        &'a self,
        resource: &'a ResourceName,
        devices: &'a BTreeSet<DeviceId>,
    ) -> impl Iterator<Item = (&'a DeviceId, &'a Entry)> {
        devices.iter().flat_map(move |device| {
            let names = self.by_device.get(&(resource.clone(), device.clone()));
            let entries = names.into_iter().flatten();
            entries.filter_map(move |name| Some((device, self.entries.get(name)?)))
        })
    }

    /// Drops the calls of `PreStartContainer` for any of these devices.
    fn drop_pre_starts(&mut self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) {
        let names = devices
            .iter()
            .filter_map(|device| self.by_device.get(&(resource.clone(), device.clone())));
        for name in names.flatten() {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.pre_start = None;
            }
        }
    }

    fn insert(&mut self, lease: Lease) {
        for key in lease.keys() {
            self.by_device.entry(key).or_default().insert(lease.name.clone());
        }
        let entry = Entry {
            busy: None,
            pre_start: None,
            failure: None,
            lease,
        };
        self.entries.insert(entry.lease.name.clone(), entry);
    }

    fn remove(&mut self, name: &LeaseName) {
        let Some(entry) = self.entries.remove(name) else {
            return;
        };
        for key in entry.lease.keys() {
            if let Some(names) = self.by_device.get_mut(&key) {
                names.remove(name);
                if names.is_empty() {
                    self.by_device.remove(&key);
                }
            }
        }
    }

    /// Checks what must hold at any time. For tests.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let mut indexed: BTreeMap<(ResourceName, DeviceId), BTreeSet<LeaseName>> = BTreeMap::new();
        let mut used: BTreeSet<(ResourceName, DeviceId)> = BTreeSet::new();
        for (name, entry) in &self.entries {
            assert_eq!(*name, entry.lease.name);
            for key in entry.lease.keys() {
                for container in entry.lease.containers.keys() {
                    assert!(used.insert(key.clone()), "{key:?} is also in {container}");
                }
                indexed.entry(key).or_default().insert(name.clone());
            }
            if entry.busy == Some(Busy::Ending) {
                assert!(entry.lease.containers.is_empty());
            }
        }
        assert_eq!(indexed, self.by_device);
    }
}
