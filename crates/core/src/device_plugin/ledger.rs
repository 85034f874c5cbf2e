//! Record of device ownership.
//!
//! The ledger is the only record of ownership. A device is free, reserved by an admission in flight, or allocated to a
//! pod:
//!
//! ```text
//!          reserve              begin_commit               finish_commit
//!   free ───────────► reserved ─────────────► committing ───────────────► allocated
//!     ▲                  │                        │ cancel_commit             │ begin_release
//!     └────── abort ─────┴────────────────────────┘◄───── finish_release ─────┘ (cancel_release: back)
//! ```
//!
//! In `committing`, the change is being written. It takes effect here when it is on disk, and is dropped if the write
//! fails.
//!
//! `held` and `free` are indexes derived from pods and reservations, for nodes with 10,000 held devices.
//! `check` recomputes them after every step of the history tests.

use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use super::inventory::Resource;
use crate::dra::claims::Claim;
use crate::id::{ClaimUid, DeviceId, PodUid, ReservationId, ResourceName};
use crate::pod::{ContainerKind, Pod, PodName};

/// Devices and claims reserved for a pod while its plugins are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// The UID of the pod.
    pub pod: PodUid,
    pub(crate) name: PodName,
    /// The new devices of each container, in the order of the request.
    pub grants: Vec<Grant>,
    /// The devices that the pod did not hold before.
    pub(crate) taken: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// The claims that the pod has joined.
    pub claims: Vec<ClaimUid>,
    /// The commit that is being written. From then on the reservation cannot be aborted.
    pub(crate) committing: Option<Commit>,
}

/// A pod and its claims, to be written in one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// The pod.
    pub pod: Pod,
    /// The claims that differ from their records on disk.
    pub claims: Vec<Claim>,
}

/// Devices of one resource for one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The container's name.
    pub container: crate::id::ContainerName,
    /// The kind of the container.
    pub kind: ContainerKind,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
}

/// All reservations and allocations.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) pods: BTreeMap<PodUid, Pod>,
    pub(crate) reservations: BTreeMap<ReservationId, Reservation>,
    /// Pods with a reservation in flight.
    pub(crate) in_flight: BTreeMap<PodUid, ReservationId>,
    /// Pods and reservations by name. Imported pods do not have a name.
    pub(crate) names: BTreeMap<PodName, PodUid>,
    /// The number of the last admission of each pod since the node started.
    pub(crate) admitted: BTreeMap<PodUid, u64>,
    /// Pods whose removal is being written, with the claims in the same transaction.
    pub(crate) releasing: BTreeMap<PodUid, Vec<ClaimUid>>,
    /// Holders of each device: more than one only if an imported file says so.
    pub(crate) held: BTreeMap<ResourceName, BTreeMap<DeviceId, Vec<PodUid>>>,
    /// Healthy devices of the active list without a holder.
    pub(crate) free: BTreeMap<ResourceName, BitSet>,
}

impl Ledger {
    /// Returns a ledger with these pods. The indexes are built in one pass.
    pub(crate) fn restore(pods: BTreeMap<PodUid, Pod>) -> Self {
        let named = pods.values().filter(|pod| !pod.name.name.is_empty());
        let names = named.map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
        let mut holders: BTreeMap<&ResourceName, Vec<(&DeviceId, &PodUid)>> = BTreeMap::new();
        for pod in pods.values() {
            for allocation in &pod.allocations {
                let of_resource = holders.entry(&allocation.resource).or_default();
                of_resource.extend(allocation.devices.iter().map(|device| (device, &pod.uid)));
            }
        }
        let held = holders.into_iter().filter(|(_, holders)| !holders.is_empty());
        let held = held.map(|(name, mut holders)| {
            holders.sort();
            // Several containers of a pod may use the same device.
            holders.dedup();
            let by_device = holders.chunk_by(|(one, _), (other, _)| one == other);
            let by_device = by_device.filter_map(|same| {
                let (device, _) = same.first()?;
                Some((
                    (*device).clone(),
                    same.iter().map(|(_, pod)| (*pod).clone()).collect(),
                ))
            });
            (name.clone(), by_device.collect())
        });
        let held = held.collect();
        Self {
            pods,
            names,
            held,
            ..Self::default()
        }
    }

    /// Recomputes the free devices after a change of the active list.
    pub(crate) fn list_changed(&mut self, name: &ResourceName, resource: &Resource) {
        self.free.insert(name.clone(), self.free_of(name, resource));
    }

    fn free_of(&self, name: &ResourceName, resource: &Resource) -> BitSet {
        if resource.active.is_none() {
            return BitSet::none(resource.list.len());
        }
        let mut free = resource.list.healthy().clone();
        for device in self.held.get(name).into_iter().flat_map(BTreeMap::keys) {
            if let Some(index) = resource.list.index_of(device.as_str()) {
                free.remove(index);
            }
        }
        free
    }

    /// Returns devices of a resource that only admissions and removals in flight hold. An admission may still be aborted,
    /// and a removal frees its devices.
    pub(crate) fn held_in_flight<'a>(&'a self, name: &'a ResourceName) -> impl Iterator<Item = &'a DeviceId> {
        let taken = self.reservations.values().filter_map(|each| each.taken.get(name));
        let leaving = self.releasing.keys().filter_map(|pod| self.pods.get(pod));
        let leaving = leaving.flat_map(|pod| &pod.allocations);
        let leaving = leaving.filter(move |held| held.resource == *name);
        let devices = taken.flatten().chain(leaving.flat_map(|held| &held.devices));
        let takes = move |pod: &PodUid, device: &DeviceId| {
            let reservation = self.in_flight.get(pod).and_then(|id| self.reservations.get(id));
            let taken = reservation.and_then(|each| each.taken.get(name));
            taken.is_some_and(|taken| taken.contains(device))
        };
        let held = self.held.get(name);
        devices.filter(move |device| {
            let holders = held.and_then(|held| held.get(*device)).into_iter().flatten();
            holders
                .into_iter()
                .all(|pod| self.releasing.contains_key(pod) || takes(pod, device))
        })
    }

    /// Adds a pod. Returns the pod that it replaces.
    pub(crate) fn insert(&mut self, pod: Pod) -> Option<Pod> {
        self.pods.insert(pod.uid.clone(), pod)
    }

    /// Removes a pod.
    pub(crate) fn remove(&mut self, pod: &PodUid) -> Option<Pod> {
        self.pods.remove(pod)
    }

    /// Indexes a pod by its name, if it has one.
    pub(crate) fn name(&mut self, name: &PodName, pod: &PodUid) {
        if !name.name.is_empty() {
            self.names.insert(name.clone(), pod.clone());
        }
    }

    /// Removes a name from the index, if it belongs to this pod.
    pub(crate) fn unname(&mut self, name: &PodName, pod: &PodUid) {
        if self.names.get(name) == Some(pod) {
            self.names.remove(name);
        }
    }

    /// Makes `pod` a holder of the devices.
    pub(crate) fn hold(
        &mut self,
        pod: &PodUid,
        name: &ResourceName,
        devices: impl IntoIterator<Item = DeviceId>,
        resource: Option<&Resource>,
    ) {
        let mut devices = devices.into_iter().peekable();
        if devices.peek().is_none() {
            return;
        }
        let held = self.held.entry(name.clone()).or_default();
        for device in devices {
            if let Some(resource) = resource
                && let Some(index) = resource.list.index_of(device.as_str())
                && let Some(free) = self.free.get_mut(name)
            {
                free.remove(index);
            }
            match held.entry(device) {
                // `vec!` allocates room for one holder. A second one is rare.
                Entry::Vacant(device) => {
                    device.insert(vec![pod.clone()]);
                }
                Entry::Occupied(mut holders) if !holders.get().contains(pod) => {
                    holders.get_mut().push(pod.clone());
                }
                Entry::Occupied(_) => {}
            }
        }
    }

    /// Removes `pod` from the holders of the devices.
    pub(crate) fn release<'a>(
        &mut self,
        pod: &PodUid,
        name: &ResourceName,
        devices: impl IntoIterator<Item = &'a DeviceId>,
        resource: Option<&Resource>,
    ) {
        let Some(held) = self.held.get_mut(name) else {
            return;
        };
        for device in devices {
            let Some(holders) = held.get_mut(device) else {
                continue;
            };
            holders.retain(|holder| holder != pod);
            if !holders.is_empty() {
                continue;
            }
            held.remove(device);
            if let Some(resource) = resource
                && resource.active.is_some()
                && let Some(index) = resource.list.index_of(device.as_str())
                && resource.list.healthy().contains(index)
                && let Some(free) = self.free.get_mut(name)
            {
                free.insert(index);
            }
        }
        if held.is_empty() {
            self.held.remove(name);
        }
    }

    /// Recomputes the indexes and compares them.
    #[cfg(test)]
    pub(crate) fn check(&self, resources: &BTreeMap<ResourceName, Resource>) {
        let mut held: BTreeMap<ResourceName, BTreeMap<DeviceId, BTreeSet<PodUid>>> = BTreeMap::new();
        let mut add = |pod: &PodUid, resource: &ResourceName, device: &DeviceId| {
            let devices = held.entry(resource.clone()).or_default();
            devices.entry(device.clone()).or_default().insert(pod.clone());
        };
        for pod in self.pods.values() {
            for (resource, devices) in pod.devices() {
                devices
                    .into_iter()
                    .for_each(|device| add(&pod.uid, resource, device));
            }
        }
        for reservation in self.reservations.values() {
            for (resource, devices) in &reservation.taken {
                devices
                    .iter()
                    .for_each(|device| add(&reservation.pod, resource, device));
            }
        }
        let recorded: BTreeMap<ResourceName, BTreeMap<DeviceId, BTreeSet<PodUid>>> = self
            .held
            .iter()
            .map(|(resource, devices)| {
                let sets = devices
                    .iter()
                    .map(|(id, pods)| (id.clone(), pods.iter().cloned().collect()));
                (resource.clone(), sets.collect())
            })
            .collect();
        assert_eq!(recorded, held, "the index of holders is inconsistent");
        for (name, resource) in resources {
            let free = self.free.get(name).cloned().unwrap_or_default();
            assert_eq!(
                free.iter().collect::<Vec<_>>(),
                self.free_of(name, resource).iter().collect::<Vec<_>>(),
                "the index of free devices of {name} is inconsistent"
            );
        }
        let in_flight: BTreeMap<PodUid, ReservationId> = self
            .reservations
            .iter()
            .map(|(id, reservation)| (reservation.pod.clone(), *id))
            .collect();
        assert_eq!(
            self.in_flight, in_flight,
            "a reservation is lost, or a pod has two"
        );
        let named = self.pods.values().map(|pod| (&pod.name, &pod.uid));
        let named = named.chain(self.reservations.values().map(|each| (&each.name, &each.pod)));
        let names: BTreeMap<PodName, PodUid> = named
            .filter(|(name, _)| !name.name.is_empty())
            .map(|(name, uid)| (name.clone(), uid.clone()))
            .collect();
        assert_eq!(self.names, names, "the index of names is inconsistent");
    }
}
