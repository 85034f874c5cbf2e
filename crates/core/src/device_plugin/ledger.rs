//! Who holds which device.
//!
//! The ledger is the only record of ownership. A device is free, reserved by an allocation in flight, or
//! allocated to a pod:
//!
//! ```text
//!          reserve              begin_commit               finish_commit
//!   free ───────────► reserved ─────────────► committing ───────────────► allocated
//!     ▲                  │                        │ cancel_commit             │ begin_release
//!     └────── abort ─────┴────────────────────────┘◄───── finish_release ─────┘ (cancel_release: back)
//! ```
//!
//! From `committing` on a change is being written; it becomes true here when it is on disk, and never was if
//! that fails.
//!
//! `held` and `free` are derived from pods and reservations. They exist because a node may hold ten thousand
//! devices; `check` recomputes them, and runs after every step of the history tests.

use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use super::inventory::Resource;
use crate::dra::claims::Claim;
use crate::id::{ClaimUid, DeviceId, PodUid, ReservationId, ResourceName};
use crate::pod::{ContainerKind, Pod, PodName};

/// Devices set aside for a pod while its plugins are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// For whom.
    pub pod: PodUid,
    pub(crate) name: PodName,
    /// What each container gets in addition to what it holds already, in the order of the request.
    pub grants: Vec<Grant>,
    /// The devices that the pod did not hold before.
    pub(crate) taken: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// The claims that the pod has joined.
    pub claims: Vec<ClaimUid>,
    /// What is being written; from then on it cannot be aborted.
    pub(crate) committing: Option<Commit>,
}

/// A pod with everything that it gets, to be written in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// The pod.
    pub pod: Pod,
    /// Those of its claims of which the disk does not know everything.
    pub claims: Vec<Claim>,
}

/// Devices of one resource for one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The container's name.
    pub container: crate::id::ContainerName,
    /// When it runs.
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
    /// Who has which name, reservations included. Imported pods have none.
    pub(crate) names: BTreeMap<PodName, PodUid>,
    /// When a pod was last admitted, for those that were since the node started: the number of its admission.
    pub(crate) admitted: BTreeMap<PodUid, u64>,
    /// Pods whose release is being written, and the claims that are written with it.
    pub(crate) releasing: BTreeMap<PodUid, Vec<ClaimUid>>,
    /// Holders of each device: one, unless a file that we imported says otherwise.
    pub(crate) held: BTreeMap<ResourceName, BTreeMap<DeviceId, Vec<PodUid>>>,
    /// Healthy devices of the list in force that nobody holds.
    pub(crate) free: BTreeMap<ResourceName, BitSet>,
}

impl Ledger {
    /// A ledger with these pods. What is derived from them is made in one go.
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
            // Within a pod, containers may pass devices on.
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

    /// Another list counts: which of its devices are free?
    pub(crate) fn list_changed(&mut self, name: &ResourceName, resource: &Resource) {
        self.free.insert(name.clone(), self.free_of(name, resource));
    }

    fn free_of(&self, name: &ResourceName, resource: &Resource) -> BitSet {
        if resource.active.is_none() {
            return BitSet::none(resource.list.len());
        }
        let mut free = resource.list.healthy().clone();
        for device in self.held.get(name).into_iter().flat_map(BTreeMap::keys) {
            if let Some(place) = resource.list.place_of(device.as_str()) {
                free.remove(place);
            }
        }
        free
    }

    /// Devices of a resource that are held only by admissions and removals that have not ended. An admission may still
    /// be aborted, and a removal frees its devices.
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

    /// Puts a pod among those that hold something; the one that had its UID.
    pub(crate) fn insert(&mut self, pod: Pod) -> Option<Pod> {
        self.pods.insert(pod.uid.clone(), pod)
    }

    /// Takes a pod out again.
    pub(crate) fn remove(&mut self, pod: &PodUid) -> Option<Pod> {
        self.pods.remove(pod)
    }

    /// Gives a name to a pod; one without a name gets none.
    pub(crate) fn name(&mut self, name: &PodName, pod: &PodUid) {
        if !name.name.is_empty() {
            self.names.insert(name.clone(), pod.clone());
        }
    }

    /// Takes a name back, if it is this pod's.
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
                && let Some(place) = resource.list.place_of(device.as_str())
                && let Some(free) = self.free.get_mut(name)
            {
                free.remove(place);
            }
            match held.entry(device) {
                // Room for one: there are many, and there is hardly ever a second.
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

    /// `pod` holds the devices no longer.
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
                && let Some(place) = resource.list.place_of(device.as_str())
                && resource.list.healthy().contains(place)
                && let Some(free) = self.free.get_mut(name)
            {
                free.insert(place);
            }
        }
        if held.is_empty() {
            self.held.remove(name);
        }
    }

    /// Recomputes what is derived, and compares. For tests.
    #[cfg(test)]
    pub(crate) fn check(&self, resources: &BTreeMap<ResourceName, Resource>) {
        let mut held: BTreeMap<ResourceName, BTreeMap<DeviceId, BTreeSet<PodUid>>> = BTreeMap::new();
        let mut note = |pod: &PodUid, resource: &ResourceName, device: &DeviceId| {
            let devices = held.entry(resource.clone()).or_default();
            devices.entry(device.clone()).or_default().insert(pod.clone());
        };
        for pod in self.pods.values() {
            for (resource, devices) in pod.devices() {
                devices
                    .into_iter()
                    .for_each(|device| note(&pod.uid, resource, device));
            }
        }
        for reservation in self.reservations.values() {
            for (resource, devices) in &reservation.taken {
                devices
                    .iter()
                    .for_each(|device| note(&reservation.pod, resource, device));
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
        assert_eq!(recorded, held, "the index of holders is out of step");
        for (name, resource) in resources {
            let free = self.free.get(name).cloned().unwrap_or_default();
            assert_eq!(
                free.iter().collect::<Vec<_>>(),
                self.free_of(name, resource).iter().collect::<Vec<_>>(),
                "the index of free devices of {name} is out of step"
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
        assert_eq!(self.names, names, "the index of names is out of step");
    }
}
