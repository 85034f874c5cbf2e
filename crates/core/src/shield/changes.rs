//! Changes of leases, in two phases: `begin_...` returns what to write, [`Leases::finish`] follows the write.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;

use super::{Busy, ContainerProcess, Lease, LeasePhase, Leases, PreStart};
use super::{EndError, GrantError, PrepareError, StartError};
use crate::device_plugin::run_options::Answer;
use crate::id::{DeviceId, LeaseName, Moment, PodUid, ResourceName};

/// A change of leases that is being written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseChange {
    /// New leases.
    Grant(Vec<Lease>),
    /// Leases with the plugin's answers.
    Prepared(Vec<Lease>),
    /// A container starts.
    Start(Box<Lease>, String),
    /// A container has ended.
    Stop(Box<Lease>, String),
    /// The runtime has told which containers of a lease run.
    Witness(Box<Lease>),
    /// Leases end.
    End(Vec<LeaseName>),
    /// Containers of leases start without devlet from now on.
    HandOver(Vec<Lease>),
}

/// Leases that are being prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preparation {
    /// The leases, as they were at the begin.
    pub leases: Vec<Lease>,
    /// An earlier call for all of them that no container has used.
    pub pre_start: Option<PreStart>,
}

impl LeaseChange {
    /// Returns the records to write.
    pub fn put(&self) -> &[Lease] {
        match self {
            Self::Grant(leases) | Self::Prepared(leases) | Self::HandOver(leases) => leases,
            Self::Start(lease, _) | Self::Stop(lease, _) | Self::Witness(lease) => {
                core::slice::from_ref(&**lease)
            }
            Self::End(_) => &[],
        }
    }

    /// Returns the records to delete.
    pub fn delete(&self) -> &[LeaseName] {
        match self {
            Self::End(names) => names,
            _ => &[],
        }
    }
}

impl Leases {
    /// Begins a lease for devices that the kubelet has chosen.
    pub fn begin_grant(
        &self,
        name: LeaseName,
        resource: ResourceName,
        devices: impl IntoIterator<Item = DeviceId>,
        now: Moment,
    ) -> Result<LeaseChange, GrantError> {
        let devices: BTreeSet<DeviceId> = devices.into_iter().collect();
        if devices.is_empty() {
            return Err(GrantError::NoDevices);
        }
        if self.entries.contains_key(&name) {
            return Err(GrantError::NameTaken);
        }
        let lease = Lease {
            name,
            resource,
            devices,
            answer: None,
            pre_start_required: false,
            granted_at: now,
            is_direct: false,
            holder: None,
            is_witnessed: true,
            containers: Default::default(),
        };
        Ok(LeaseChange::Grant([lease].into()))
    }

    /// Begins leases that the kubelet's record names and devlet does not know. Returns `None` if there is none.
    pub fn begin_adopt(&self, leases: impl IntoIterator<Item = Lease>) -> Option<LeaseChange> {
        let unknown = |lease: &Lease| !lease.devices.is_empty() && !self.entries.contains_key(&lease.name);
        let leases: Vec<Lease> = leases.into_iter().filter(unknown).collect();
        (!leases.is_empty()).then_some(LeaseChange::Grant(leases))
    }

    /// Checks that the leases of these devices can be prepared now. Returns their names.
    pub fn check_prepare(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<Vec<LeaseName>, PrepareError> {
        let names = self.of_devices(resource, devices);
        if names.is_empty() {
            return Err(PrepareError::Unknown);
        }
        // The kubelet allocates all containers of a pod at once, so a lease that was granted is another pod's than an adopted one.
        let is_granted =
            |name: &LeaseName| self.entries.get(name).is_some_and(|entry| !entry.lease.is_direct);
        let has_granted = names.iter().any(is_granted);
        // Containers of one pod may have devices in common.
        let pods: BTreeSet<Option<&PodUid>> = names
            .iter()
            .filter_map(|name| Some(self.entries.get(name)?.lease.pod()))
            .collect();
        for (device, entry) in self.overlapping(resource, devices) {
            if let Some(busy) = entry.busy {
                return Err(match busy {
                    Busy::Preparing => PrepareError::Preparing {
                        device: device.clone(),
                    },
                    Busy::Ending => PrepareError::Ending {
                        device: device.clone(),
                    },
                });
            }
            let (device, pod) = (device.clone(), entry.lease.pod().cloned());
            if let Some(container) = entry.lease.containers.keys().next() {
                let container = container.clone();
                return Err(PrepareError::Running {
                    device,
                    container,
                    pod,
                });
            }
            if entry.lease.is_direct && (has_granted || !pods.contains(&entry.lease.pod())) {
                return Err(PrepareError::Adopted { device, pod });
            }
            if !entry.lease.is_direct && !entry.lease.is_witnessed {
                return Err(PrepareError::Unwitnessed { device, pod });
            }
        }
        Ok(names)
    }

    /// Begins to prepare all leases of these devices, before a container of one of them starts. The plugin must be asked
    /// for an answer for each lease that has none. Ends with [`Leases::end_prepare`].
    pub fn begin_prepare(
        &mut self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<Preparation, PrepareError> {
        let names = self.check_prepare(resource, devices)?;
        let mut calls = names.iter().map(|name| self.entries.get(name)?.pre_start);
        let first = calls.next().flatten();
        let pre_start = first.filter(|first| calls.all(|call| call == Some(*first)));
        self.drop_pre_starts(resource, devices);
        let entries = names.iter().filter_map(|name| {
            let entry = self.entries.get_mut(name)?;
            entry.busy = Some(Busy::Preparing);
            Some(entry.lease.clone())
        });
        Ok(Preparation {
            leases: entries.collect(),
            pre_start,
        })
    }

    /// Ends a preparation. `pre_start` is a call that the kubelet's next try may use, and `failure` an error that the
    /// kubelet did not get: it had given up.
    pub fn end_prepare(&mut self, leases: &[LeaseName], pre_start: Option<PreStart>, failure: Option<&str>) {
        for name in leases {
            if let Some(entry) = self.entries.get_mut(name)
                && entry.busy == Some(Busy::Preparing)
            {
                entry.busy = None;
                entry.pre_start = pre_start;
                entry.failure = failure.map(String::from);
            }
        }
    }

    /// Begins to record the plugin's answers, each with `true` if the plugin wants a call before each start. Returns
    /// `None` if all leases have their answers on record already.
    pub fn begin_prepared(
        &mut self,
        answers: impl IntoIterator<Item = (LeaseName, Answer, bool)>,
    ) -> Option<LeaseChange> {
        let answered = answers
            .into_iter()
            .filter_map(|(name, answer, pre_start_required)| {
                let lease = &self.entries.get(&name)?.lease;
                let prepared = Lease {
                    answer: Some(answer),
                    pre_start_required,
                    ..lease.clone()
                };
                (prepared != *lease).then_some(prepared)
            });
        let leases: Vec<Lease> = answered.collect();
        (!leases.is_empty()).then_some(LeaseChange::Prepared(leases))
    }

    /// Checks that a container may start now: its lease is prepared, and no other container that may run has one of its
    /// devices.
    pub fn check_start(&self, name: &str, container: &str) -> Result<(), StartError> {
        let entry = self.entries.get(name).ok_or(StartError::Ended)?;
        let lease = &entry.lease;
        match entry.phase() {
            LeasePhase::Prepared => {}
            LeasePhase::Granted => return Err(StartError::NotPrepared),
            LeasePhase::Preparing => return Err(StartError::Preparing),
            LeasePhase::Ending => return Err(StartError::Ended),
        }
        for (device, other) in self.overlapping(&lease.resource, &lease.devices) {
            let device = || device.clone();
            if !other.lease.is_witnessed && other.lease.name.as_str() != name {
                return Err(StartError::Unwitnessed { device: device() });
            }
            if other.busy == Some(Busy::Preparing) {
                return Err(StartError::Preparing);
            }
            let mut running = other.lease.containers.keys();
            if let Some(other) =
                running.find(|id| other.lease.name.as_str() != name || id.as_str() != container)
            {
                return Err(StartError::Running {
                    device: device(),
                    container: other.clone(),
                });
            }
        }
        Ok(())
    }

    /// Begins the start of a container, whose ID is never used again. Refused as [`Leases::check_start`] says.
    pub fn begin_start(
        &mut self,
        name: &str,
        container: &str,
        process: ContainerProcess,
    ) -> Result<LeaseChange, StartError> {
        self.check_start(name, container)?;
        let lease = &self.entries.get(name).ok_or(StartError::Ended)?.lease;
        let (resource, devices) = (lease.resource.clone(), lease.devices.clone());
        self.drop_pre_starts(&resource, &devices);
        let entry = self.entries.get_mut(name).ok_or(StartError::Ended)?;
        entry.lease.containers.insert(container.to_string(), process);
        Ok(LeaseChange::Start(
            Box::new(entry.lease.clone()),
            container.to_string(),
        ))
    }

    /// Begins the end of a container. Returns `None` if it is not known to run.
    pub fn begin_stop(&self, name: &str, container: &str) -> Option<LeaseChange> {
        let mut lease = self.entries.get(name)?.lease.clone();
        lease.containers.remove(container)?;
        Some(LeaseChange::Stop(Box::new(lease), container.to_string()))
    }

    /// Begins to record containers of a lease that devlet did not see start. They count at once. Afterwards all of its
    /// containers are known, unless the lease is direct. Returns `None` if that is not news.
    pub fn begin_witness(
        &mut self,
        name: &str,
        found: impl IntoIterator<Item = (String, ContainerProcess)>,
    ) -> Option<LeaseChange> {
        let lease = &mut self.entries.get_mut(name)?.lease;
        let before = lease.containers.len();
        lease.containers.extend(found);
        let is_witnessed = !lease.is_direct;
        let is_news = lease.containers.len() != before || lease.is_witnessed != is_witnessed;
        is_news.then(|| {
            LeaseChange::Witness(Box::new(Lease {
                is_witnessed,
                ..lease.clone()
            }))
        })
    }

    /// Begins the end of a lease that the kubelet does not know any more. The caller knows that no container of a direct
    /// lease runs.
    pub fn begin_end(&mut self, name: &str) -> Result<LeaseChange, EndError> {
        let entry = self.entries.get_mut(name).ok_or(EndError::Unknown)?;
        if entry.busy.is_some() {
            return Err(EndError::Busy);
        }
        if let Some(container) = entry.lease.containers.keys().next() {
            return Err(EndError::Running {
                container: container.clone(),
            });
        }
        if !entry.lease.is_direct && !entry.lease.is_witnessed {
            return Err(EndError::Unwitnessed);
        }
        entry.busy = Some(Busy::Ending);
        Ok(LeaseChange::End([entry.lease.name.clone()].into()))
    }

    /// Begins to hand all prepared leases over to the kubelet: their containers start without devlet's word, so from now
    /// on devlet does not know whether one runs. Returns `None` if there is none.
    pub fn begin_hand_over(&self) -> Option<LeaseChange> {
        let entries = self.entries.values().map(|entry| &entry.lease);
        let handed = entries.filter(|lease| !lease.is_direct && lease.answer.is_some());
        let leases: Vec<Lease> = handed
            .map(|lease| Lease {
                is_direct: true,
                is_witnessed: false,
                ..lease.clone()
            })
            .collect();
        (!leases.is_empty()).then_some(LeaseChange::HandOver(leases))
    }

    /// Ends a change that is on disk.
    pub fn finish(&mut self, change: LeaseChange) {
        match change {
            LeaseChange::Grant(leases) => leases.into_iter().for_each(|lease| self.insert(lease)),
            LeaseChange::Prepared(leases) => {
                for lease in leases {
                    if let Some(entry) = self.entries.get_mut(&lease.name) {
                        entry.lease.answer = lease.answer;
                        entry.lease.pre_start_required = lease.pre_start_required;
                    }
                }
            }
            LeaseChange::HandOver(leases) => {
                for lease in leases {
                    if let Some(entry) = self.entries.get_mut(&lease.name) {
                        entry.lease.is_direct = true;
                        entry.lease.is_witnessed = false;
                    }
                }
            }
            LeaseChange::Start(..) => {}
            LeaseChange::Stop(lease, container) => self.stopped(&lease.name, &container),
            LeaseChange::Witness(lease) => {
                if let Some(entry) = self.entries.get_mut(&lease.name) {
                    entry.lease.is_witnessed = lease.is_witnessed;
                }
            }
            LeaseChange::End(names) => names.iter().for_each(|name| self.remove(name)),
        }
    }

    /// Ends a change that could not be written.
    pub fn cancel(&mut self, change: LeaseChange) {
        match change {
            LeaseChange::Grant(_)
            | LeaseChange::Prepared(_)
            | LeaseChange::HandOver(_)
            | LeaseChange::Stop(..) => {}
            // The containers that were found may run all the same.
            LeaseChange::Witness(_) => {}
            // The container does not start.
            LeaseChange::Start(lease, container) => self.stopped(&lease.name, &container),
            LeaseChange::End(names) => {
                for name in names {
                    if let Some(entry) = self.entries.get_mut(&name) {
                        entry.busy = None;
                    }
                }
            }
        }
    }

    fn stopped(&mut self, name: &LeaseName, container: &str) {
        if let Some(entry) = self.entries.get_mut(name) {
            entry.lease.containers.remove(container);
        }
    }
}
