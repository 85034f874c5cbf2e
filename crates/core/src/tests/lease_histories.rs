//! Leases: random histories against a model of the containers and of the disk.

use alloc::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::leases::{found, ids, names};
use super::*;
use crate::shield::{ContainerProcess, Lease, LeaseChange, Leases, PreStart};
use crate::{ConnectionId, LeaseName, Moment};

const DEVICES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Grant(Vec<usize>),
    Prepare(u8),
    /// The plugin answers; `true` if the kubelet has given up before.
    Answer(u8, bool),
    Abort(u8),
    Start(u8),
    Stop(u8),
    End(u8),
    Write(bool),
    Restart,
    /// The database is lost, and leases are found in the kubelet's record.
    Lose,
    /// The runtime tells which containers of a lease run.
    Witness(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let devices = || proptest::sample::subsequence((0..DEVICES).collect::<Vec<_>>(), 1..=DEVICES);
    prop_oneof![
        3 => devices().prop_map(Step::Grant),
        5 => any::<u8>().prop_map(Step::Prepare),
        5 => (any::<u8>(), any::<bool>()).prop_map(|(number, is_late)| Step::Answer(number, is_late)),
        1 => any::<u8>().prop_map(Step::Abort),
        6 => any::<u8>().prop_map(Step::Start),
        4 => any::<u8>().prop_map(Step::Stop),
        3 => any::<u8>().prop_map(Step::End),
        10 => proptest::bool::weighted(0.9).prop_map(Step::Write),
        1 => Just(Step::Restart),
        1 => Just(Step::Lose),
        4 => any::<u8>().prop_map(Step::Witness),
    ]
}

/// The leases, with the containers that run and the records on disk.
#[derive(Default)]
struct World {
    leases: Leases,
    disk: BTreeMap<LeaseName, Lease>,
    queue: Vec<LeaseChange>,
    /// Preparations in flight, each with the call of `PreStartContainer` in it.
    preparing: Vec<(Vec<LeaseName>, PreStart)>,
    /// When a container with a device was last started, or a plugin last called for it.
    used: BTreeMap<DeviceId, Moment>,
    /// Containers that run, with their leases. A hook was answered for each.
    running: BTreeMap<String, (LeaseName, BTreeSet<DeviceId>)>,
    /// Containers whose hook waits for the disk.
    starting: BTreeMap<String, (LeaseName, BTreeSet<DeviceId>)>,
    next: usize,
}

fn pick<T: Clone>(all: impl Iterator<Item = T>, number: u8) -> Option<T> {
    let all: Vec<T> = all.collect();
    all.get(usize::from(number) % all.len().max(1)).cloned()
}

impl World {
    fn lease(&self, number: u8) -> Option<Lease> {
        pick(self.leases.iter().map(|view| view.lease.clone()), number)
    }

    fn use_devices(&mut self, devices: &BTreeSet<DeviceId>) -> Moment {
        self.next += 1;
        let now = Moment(u64::try_from(self.next).unwrap());
        self.used
            .extend(devices.iter().map(|device| (device.clone(), now)));
        now
    }

    fn write(&mut self, is_written: bool) {
        for change in self.queue.drain(..) {
            if !is_written {
                if let LeaseChange::Start(_, container) = &change {
                    self.starting.remove(container);
                }
                self.leases.cancel(change);
                continue;
            }
            for lease in change.put() {
                self.disk.insert(lease.name.clone(), lease.clone());
            }
            for name in change.delete() {
                self.disk.remove(name);
            }
            if let LeaseChange::Start(_, container) = &change
                && let Some(started) = self.starting.remove(container)
            {
                self.running.insert(container.clone(), started);
            }
            self.leases.finish(change);
        }
        if !is_written {
            // The writer makes a new file from memory.
            let all = self.leases.iter();
            self.disk = all
                .map(|view| (view.lease.name.clone(), view.lease.clone()))
                .collect();
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Grant(devices) => {
                self.next += 1;
                let name = format!("l{}", self.next);
                let change = self
                    .leases
                    .begin_grant(name.into(), GPU.into(), ids(&devices), START);
                self.queue.push(change.unwrap());
            }
            Step::Prepare(number) => {
                let Some(lease) = self.lease(number) else { return };
                let busy =
                    |device: &DeviceId| self.running.values().any(|(_, devices)| devices.contains(device));
                let is_busy = lease.devices.iter().any(busy);
                if let Ok(preparation) = self.leases.begin_prepare(&GPU.into(), &lease.devices) {
                    assert!(!is_busy, "prepared {:?} while a container has one", lease.devices);
                    if let Some(earlier) = preparation.pre_start {
                        let used = lease.devices.iter().filter_map(|device| self.used.get(device));
                        assert!(used.max() <= Some(&earlier.at), "a call was used twice");
                    }
                    let at = self.use_devices(&lease.devices);
                    let connection = ConnectionId(1);
                    let call = PreStart { connection, at };
                    self.preparing.push((names(&preparation), call));
                }
            }
            Step::Answer(number, is_late) => {
                if self.preparing.is_empty() {
                    return;
                }
                let (names, call) = self
                    .preparing
                    .swap_remove(usize::from(number) % self.preparing.len());
                let answers = names.iter().map(|name| (name.clone(), Answer::default(), false));
                self.queue.extend(self.leases.begin_prepared(answers));
                self.write(true);
                self.leases.end_prepare(&names, is_late.then_some(call), None);
            }
            Step::Abort(number) => {
                if !self.preparing.is_empty() {
                    let (names, _) = self
                        .preparing
                        .swap_remove(usize::from(number) % self.preparing.len());
                    self.leases.end_prepare(&names, None, Some("failed"));
                }
            }
            Step::Start(number) => {
                let Some(lease) = self.lease(number) else { return };
                self.next += 1;
                let container = format!("c{}", self.next);
                let process = ContainerProcess::default();
                if let Ok(change) = self.leases.begin_start(lease.name.as_str(), &container, process) {
                    self.use_devices(&lease.devices);
                    self.queue.push(change);
                    self.starting.insert(container, (lease.name, lease.devices));
                }
            }
            Step::Stop(number) => {
                let Some(container) = pick(self.running.keys().cloned(), number) else {
                    return;
                };
                let (lease, _) = self.running.remove(&container).unwrap();
                self.queue
                    .extend(self.leases.begin_stop(lease.as_str(), &container));
            }
            Step::End(number) => {
                let Some(lease) = self.lease(number) else { return };
                self.queue.extend(self.leases.begin_end(lease.name.as_str()).ok());
            }
            Step::Write(is_written) => self.write(is_written),
            Step::Restart => {
                // Unwritten changes are lost, and no hook was answered for them.
                self.queue.clear();
                self.starting.clear();
                self.preparing.clear();
                self.leases = Leases::restore(self.disk.values().cloned());
            }
            Step::Lose => {
                for lease in self.disk.values_mut() {
                    let (name, devices) = (lease.name.as_str(), lease.devices.iter());
                    *lease = Lease {
                        devices: devices.cloned().collect(),
                        ..found(name, &[], "p")
                    };
                }
                self.take(Step::Restart);
            }
            Step::Witness(number) => {
                let Some(lease) = self.lease(number) else { return };
                let running = self.running.iter();
                let running = running.filter(|(_, (name, _))| *name == lease.name);
                let containers: Vec<_> = running
                    .map(|(id, _)| (id.clone(), ContainerProcess::default()))
                    .collect();
                self.queue
                    .extend(self.leases.begin_witness(lease.name.as_str(), containers));
            }
        }
    }

    fn check(&self) {
        self.leases.check();
        let mut used = BTreeSet::new();
        for (container, (lease, devices)) in &self.running {
            for device in devices {
                assert!(used.insert(device), "{device} is in two containers that run");
            }
            for known in [
                self.leases.get(lease.as_str()).map(|view| view.lease),
                self.disk.get(lease),
            ] {
                let known = known.expect("a lease ended although its container runs");
                assert!(
                    known.containers.contains_key(container) || !known.is_witnessed,
                    "{container} of {lease} is forgotten"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn a_device_is_in_one_running_container_whatever_happens(
        steps in proptest::collection::vec(step(), 1..120)
    ) {
        let mut world = World::default();
        for step in steps {
            world.take(step);
            world.check();
        }
    }
}
