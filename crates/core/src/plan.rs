//! Plan of an admission: the devices and claims that a whole pod would get. Planning changes nothing.
//!
//! Devices are chosen for each container in the order in which containers run, because later containers can reuse the
//! devices of a plain init container. A pod joins all of its claims or none. A final error takes precedence over an error
//! that waiting can resolve.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::device_plugin::bit_set::BitSet;
use crate::device_plugin::ledger::Grant;
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::select::select;
use crate::dra::claims::{AllocatedClaim, DeviceConflict, DeviceInUse, DeviceShare, HolderState};
use crate::dra::health::PoolDevice;
use crate::id::{ClaimUid, DeviceId, PodUid, ResourceName};
use crate::node::{Node, PreferenceQuery, Preferences, ReserveError};
use crate::pod::{ClaimUse, ContainerKind, Pod, PodClaim, PodName, PodRequest, Source};
use crate::spec_change::SpecChange;

impl Node {
    pub(crate) fn plan<'r>(
        &self,
        request: &'r PodRequest,
        preferences: &Preferences,
        query: bool,
    ) -> Result<(Plan, PlannedClaims<'r>), ReserveError> {
        if self.is_in_flight(&request.uid) {
            return Err(ReserveError::InFlight);
        }
        if let Some(contested) = self.contested_by(&request.uid) {
            return Err(contested.clone().into());
        }
        let pod = self.ledger.pods.get(&request.uid);
        self.check_identity(request, pod)?;
        let planner = Planner {
            node: self,
            request,
            pod,
            preferences,
            query,
            recorded_only: false,
            plan: Plan::default(),
            free: BTreeMap::new(),
            reusable: BTreeMap::new(),
        };
        let devices = planner.run().or_else(|reason| self.or_wait(request, pod, reason));
        let claims = self.plan_claims(request, pod);
        // A final error takes precedence over an error that waiting can resolve.
        match (devices, claims) {
            (Err(reason), _) if !reason.waiting_helps() => Err(reason),
            (_, Err(reason)) if !reason.waiting_helps() => Err(reason),
            (Err(reason), _) | (_, Err(reason)) => Err(reason),
            (Ok(plan), Ok(claims)) => Ok((plan, claims)),
        }
    }

    /// Returns the reason why a request cannot be reserved now. It may have another one by the time of its reservation.
    pub fn check(&self, request: &PodRequest) -> Result<(), ReserveError> {
        self.plan(request, &Preferences::new(), false).map(drop)
    }

    /// Replaces `Insufficient` by `Reserved` if the recorded pods leave enough devices. The pod then waits for the
    /// admissions and removals that hold the other devices: an admission that fails later must not cause a refusal.
    fn or_wait(
        &self,
        request: &PodRequest,
        pod: Option<&Pod>,
        reason: ReserveError,
    ) -> Result<Plan, ReserveError> {
        let ReserveError::Insufficient {
            resource,
            wanted,
            free,
            ..
        } = reason
        else {
            return Err(reason);
        };
        let planner = Planner {
            node: self,
            request,
            pod,
            preferences: &Preferences::new(),
            query: false,
            recorded_only: true,
            plan: Plan::default(),
            free: BTreeMap::new(),
            reusable: BTreeMap::new(),
        };
        match planner.run() {
            Err(reason) if !reason.waiting_helps() => Err(reason),
            Ok(_) | Err(_) => {
                let list = self.resources.get(&resource).map(|each| &*each.list);
                let count = |recorded_only| {
                    list.map_or(0, |list| {
                        free_devices(self, &resource, list, recorded_only).count()
                    })
                };
                Err(ReserveError::Reserved {
                    wanted,
                    free,
                    reserved: count(true) - count(false),
                    resource,
                })
            }
        }
    }

    /// Returns the pod's claims, each once, if it can join all of them now.
    fn plan_claims<'r>(
        &self,
        request: &'r PodRequest,
        pod: Option<&Pod>,
    ) -> Result<PlannedClaims<'r>, ReserveError> {
        let mut planned = BTreeMap::new();
        let mut names = BTreeMap::new();
        let mut devices = BTreeMap::new();
        let mut awaited = None;
        for claim in request.claims.iter().map(|each| &each.claim) {
            let other = names
                .insert(&claim.key, &claim.uid)
                .filter(|other| **other != claim.uid);
            if let Some(other) = other {
                return Err(ReserveError::ClaimNameTaken {
                    claim: claim.key.clone(),
                    other: other.clone(),
                    pods: Vec::new(),
                });
            }
            match planned.insert(&claim.uid, claim) {
                Some(same) if same == claim => continue,
                Some(other) if other.key != claim.key => {
                    return Err(ReserveError::ClaimUidTaken {
                        claim: claim.key.clone(),
                        other: other.key.clone(),
                        uid: claim.uid.clone(),
                    });
                }
                Some(_) => {
                    return Err(ReserveError::Reallocated {
                        claim: claim.key.clone(),
                        pods: Vec::new(),
                        change: Box::default(),
                    });
                }
                None => {}
            }
            let is_held = pod.is_some_and(|pod| pod.claims.iter().any(|each| each.uid == claim.uid));
            if let (Some(blocked), false) = (self.blocked(), is_held) {
                return Err(blocked.clone().into());
            }
            if let Some(conflict) = self.conflict_in_pod(request, &mut devices, claim) {
                return Err(conflict);
            }
            let is_leaving = |pod: &PodUid| self.ledger.releasing.contains_key(pod);
            let can_join = match self.is_importing(&claim.uid, &claim.key) {
                true => Err(ReserveError::InFlight),
                false => match self.dra.claims.plan(claim, &self.dra.drivers, is_leaving) {
                    Err(reason) if !reason.waiting_helps() => Err(self.with_pod_names(reason)),
                    can_join => match self.device_conflict(request, claim) {
                        Some(conflict) if can_join.is_ok() || !conflict.waiting_helps() => Err(conflict),
                        _ => can_join,
                    },
                },
            };
            match can_join {
                Err(reason) if reason.waiting_helps() => {
                    awaited.get_or_insert(reason);
                }
                other => other?,
            }
        }
        awaited.map_or(Ok(planned), Err)
    }

    /// Adds the names of the pods that hold a claim to the reason why another pod cannot use it.
    fn with_pod_names(&self, mut reason: ReserveError) -> ReserveError {
        if let ReserveError::Reallocated { pods, change, .. } = &mut reason {
            let named = pods.iter().map(|pod| {
                let name = self.name_of(pod).cloned().unwrap_or_default();
                (pod.clone(), name)
            });
            change.pods = named.collect();
        }
        reason
    }

    /// Returns the error if a recorded claim holds a device of this claim.
    fn device_conflict(&self, request: &PodRequest, claim: &AllocatedClaim) -> Option<ReserveError> {
        let is_leaving = |pod: &PodUid| self.ledger.releasing.contains_key(pod);
        let (device, DeviceConflict { holder, state }) =
            self.dra.claims.device_conflict(claim, is_leaving)?;
        let mut pods: Vec<(PodUid, PodName)> = holder
            .pods()
            .into_iter()
            .map(|pod| {
                let name = self.name_of(&pod).cloned().unwrap_or_default();
                (pod, name)
            })
            .collect();
        if pods.is_empty() {
            pods.push((holder.claim.pod.clone(), holder.claim.pod_name.clone()));
        }
        Some(ReserveError::DeviceInUse(Box::new(DeviceInUse {
            claim: claim.key.clone(),
            pod: request.name.clone(),
            device,
            holder: holder.claim.key.clone(),
            holder_uid: holder.claim.uid.clone(),
            holder_pods: pods,
            state,
        })))
    }

    /// Returns the error if two claims of the pod have the same device. Recorded claims that share a device are allowed.
    fn conflict_in_pod<'r>(
        &self,
        request: &PodRequest,
        devices: &mut BTreeMap<PoolDevice, Vec<(DeviceShare, &'r AllocatedClaim)>>,
        claim: &'r AllocatedClaim,
    ) -> Option<ReserveError> {
        let known = &self.dra.claims;
        for device in claim.exclusive_devices() {
            let of_device = devices.entry(device.device.clone()).or_default();
            let conflict = of_device.iter().find(|(other, holder)| {
                let is_recorded =
                    known.is_held_by(&claim.uid, &device) && known.is_held_by(&holder.uid, other);
                other.conflicts_with(&device) && !is_recorded
            });
            if let Some((_, other)) = conflict {
                return Some(ReserveError::DeviceInUse(Box::new(DeviceInUse {
                    claim: claim.key.clone(),
                    pod: request.name.clone(),
                    device,
                    holder: other.key.clone(),
                    holder_uid: other.uid.clone(),
                    holder_pods: Vec::new(),
                    state: match other.uid == claim.uid {
                        true => HolderState::SameClaim,
                        false => HolderState::SamePod,
                    },
                })));
            }
            of_device.push((device, claim));
        }
        None
    }

    /// Returns `true` if all claims of the pod are prepared and on disk.
    pub(crate) fn has_its_claims(&self, request: &PodRequest) -> bool {
        let held = self.ledger.pods.get(&request.uid);
        held.is_some_and(|pod| {
            pod.claims == pod_claims(request, Some(pod))
                && pod.claim_uses == claim_uses(request)
                && self
                    .dra
                    .claims
                    .to_commit(&pod.claim_uids())
                    .is_some_and(|unwritten| unwritten.is_empty())
        })
    }

    fn check_identity(&self, request: &PodRequest, pod: Option<&Pod>) -> Result<(), ReserveError> {
        if let Some(pod) = pod {
            let known = pod.source != Source::Imported && pod.fingerprint != 0;
            let renamed = !pod.name.name.is_empty() && pod.name != request.name;
            if known && (renamed || pod.fingerprint != request.fingerprint) {
                return Err(ReserveError::SpecChanged(Box::new(SpecChange::new(pod, request))));
            }
        }
        let mut names = BTreeSet::new();
        for container in &request.containers {
            if !names.insert(&container.name) {
                return Err(ReserveError::DuplicateContainer {
                    container: container.name.clone(),
                });
            }
        }
        let Some(other) = self
            .ledger
            .names
            .get(&request.name)
            .filter(|other| **other != request.uid)
        else {
            return Ok(());
        };
        let on_record = self.ledger.pods.get(other).filter(|pod| pod.name == request.name);
        match on_record.is_some() && !self.ledger.releasing.contains_key(other) {
            true => Err(ReserveError::NameTaken { other: other.clone() }),
            false => Err(ReserveError::NameReserved { other: other.clone() }),
        }
    }
}

/// Returns the claims to record for a pod. It keeps claims that it no longer requests until it is removed.
pub(crate) fn pod_claims(request: &PodRequest, held: Option<&Pod>) -> Vec<PodClaim> {
    let claim = |each: &crate::pod::ClaimRequest| PodClaim {
        name: each.name.clone(),
        key: each.claim.key.clone(),
        uid: each.claim.uid.clone(),
    };
    let mut claims: Vec<PodClaim> = request.claims.iter().map(claim).collect();
    for kept in held.into_iter().flat_map(|pod| &pod.claims) {
        if !claims.iter().any(|each| each.uid == kept.uid) {
            claims.push(kept.clone());
        }
    }
    claims
}

pub(crate) fn claim_uses(request: &PodRequest) -> Vec<ClaimUse> {
    let containers = request.containers.iter();
    let uses = containers.flat_map(|container| {
        container.claims.iter().map(|reference| ClaimUse {
            container: container.name.clone(),
            claim: reference.claim.clone(),
            request: reference.request.clone(),
        })
    });
    uses.collect()
}

/// The claims of a request by UID.
pub(crate) type PlannedClaims<'r> = BTreeMap<&'r ClaimUid, &'r AllocatedClaim>;

/// The devices that a pod would get, or the next query for a plugin.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) grants: Vec<Grant>,
    pub(crate) taken: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    pub(crate) query: Option<PreferenceQuery>,
}

/// Returns the free healthy devices of a resource. With `recorded_only`, devices that only admissions and removals in
/// flight hold count as free.
fn free_devices(node: &Node, name: &ResourceName, list: &DeviceList, recorded_only: bool) -> BitSet {
    let mut free = node.ledger.free.get(name).cloned().unwrap_or_default();
    if recorded_only {
        let indexes = node
            .ledger
            .held_in_flight(name)
            .filter_map(|id| list.index_of(id.as_str()));
        for index in indexes.filter(|index| list.healthy().contains(*index)) {
            free.insert(index);
        }
    }
    free
}

/// Plans a pod's containers in the order in which they run.
struct Planner<'a> {
    node: &'a Node,
    request: &'a PodRequest,
    pod: Option<&'a Pod>,
    preferences: &'a Preferences,
    query: bool,
    /// `true` if devices that only admissions and removals in flight hold count as free. Such a plan is never applied.
    recorded_only: bool,
    plan: Plan,
    /// The free devices of each resource seen so far, without those that the plan takes.
    free: BTreeMap<&'a ResourceName, BitSet>,
    /// Devices of init containers that later containers can reuse.
    reusable: BTreeMap<&'a ResourceName, BTreeSet<DeviceId>>,
}

impl<'a> Planner<'a> {
    fn run(mut self) -> Result<Plan, ReserveError> {
        let request = self.request;
        // A final error of a later container takes precedence.
        let mut awaited = None;
        for (index, container) in request.containers.iter().enumerate() {
            for (resource, &wanted) in container.wants.iter().filter(|&(_, &wanted)| wanted > 0) {
                let held = self.pod.and_then(|pod| pod.allocation(&container.name, resource));
                let devices = match held {
                    Some(held) if held.devices.len() == wanted => held.devices.clone(),
                    Some(held) => {
                        return Err(ReserveError::RequestChanged {
                            pod: request.uid.clone(),
                            name: request.name.clone(),
                            container: container.name.clone(),
                            resource: resource.clone(),
                            wanted,
                            held: held.devices.len(),
                        });
                    }
                    None => {
                        let devices = match self.choose(index, resource, wanted) {
                            Ok(Some(devices)) => devices,
                            Ok(None) => return Ok(self.plan),
                            Err(reason) if reason.waiting_helps() => {
                                awaited.get_or_insert(reason);
                                self.query = false;
                                continue;
                            }
                            Err(reason) => return Err(reason),
                        };
                        self.plan.grants.push(Grant {
                            container: container.name.clone(),
                            kind: container.kind,
                            resource: resource.clone(),
                            devices: devices.clone(),
                        });
                        devices
                    }
                };
                let reusable = self.reusable.entry(resource).or_default();
                match container.kind {
                    ContainerKind::Init => reusable.extend(devices),
                    ContainerKind::Sidecar | ContainerKind::App => {
                        for device in &devices {
                            reusable.remove(device);
                        }
                    }
                }
            }
        }
        awaited.map_or(Ok(self.plan), Err)
    }

    /// Returns devices for one container, or `None` if a plugin must be queried first.
    fn choose(
        &mut self,
        index: usize,
        name: &'a ResourceName,
        wanted: usize,
    ) -> Result<Option<Vec<DeviceId>>, ReserveError> {
        let node = self.node;
        if let Some(blocked) = node.blocked() {
            return Err(blocked.clone().into());
        }
        let resource = node.resources.get(name);
        let Some(resource) = resource.filter(|resource| !resource.plugins.is_empty()) else {
            let last = resource.and_then(|resource| resource.last.clone());
            return Err(ReserveError::NotServed {
                resource: name.clone(),
                last,
            });
        };
        let Some((connection, plugin)) = resource.serving() else {
            let endpoint = resource
                .plugins
                .values()
                .next_back()
                .map(|plugin| plugin.endpoint.clone());
            let endpoint = endpoint.unwrap_or_default();
            return Err(ReserveError::NotListed {
                resource: name.clone(),
                endpoint,
            });
        };
        let list = &*resource.list;
        if !plugin.ready {
            return Err(ReserveError::NoHealthyDevice {
                resource: name.clone(),
                endpoint: plugin.endpoint.clone(),
                total: list.len(),
            });
        }
        let reusable = self.reusable_by(index, name, list);
        let recorded_only = self.recorded_only;
        let free = self
            .free
            .entry(name)
            .or_insert_with(|| free_devices(node, name, list, recorded_only));
        let preferences = self.preferences.get(&(index, name.clone())).map(Vec::as_slice);
        let missing = wanted.saturating_sub(reusable.len());
        let count = free.count();
        // Without a choice, the plugin is not queried.
        let among_free = missing > 0 && missing < count;
        let among_reusable = wanted < reusable.len();
        let queries = self.query && preferences.is_none() && plugin.options.preferred_allocation;
        if queries && (among_free || among_reusable) {
            let mut query = PreferenceQuery {
                container: index,
                resource: name.clone(),
                connection,
                available: reusable.iter().cloned().collect(),
                must_include: Vec::new(),
                size: wanted,
            };
            if among_free {
                let free = free.iter().filter_map(|index| list.id_at(index).cloned());
                query.must_include = query.available.clone();
                query.available.extend(free);
                query.available.sort();
            }
            self.plan.query = Some(query);
            return Ok(None);
        }
        let chosen = select(list, free, &reusable, preferences.unwrap_or_default(), wanted);
        let Some(chosen) = chosen else {
            let now = node.ledger.free.get(name).map_or(0, |now| now.count_common(free));
            return Err(ReserveError::Insufficient {
                resource: name.clone(),
                wanted: missing,
                free: now,
                reserved: count - now,
                healthy: list.healthy().count(),
                total: list.len(),
            });
        };
        let fresh = chosen.iter().filter(|id| !reusable.contains(*id)).cloned();
        self.plan.taken.entry(name.clone()).or_default().extend(fresh);
        Ok(Some(chosen))
    }

    /// Returns the healthy devices of earlier init containers that this container can reuse. Devices of containers that may
    /// run at the same time are excluded. The plan removes the devices that it grants from the pool. Devices that the pod
    /// held before are excluded here: an imported file may have a later container, but not this one.
    fn reusable_by(&self, index: usize, name: &ResourceName, list: &DeviceList) -> BTreeSet<DeviceId> {
        let healthy = |id: &&DeviceId| {
            let index = list.index_of(id.as_str());
            index.is_some_and(|index| list.healthy().contains(index))
        };
        let pool = self.reusable.get(name).into_iter().flatten();
        let mut reusable: BTreeSet<DeviceId> = pool.filter(healthy).cloned().collect();
        if reusable.is_empty() {
            return reusable;
        }
        let kind_of = |position: usize| self.request.containers.get(position).map(|each| each.kind);
        let allocations = self.pod.into_iter().flat_map(|pod| &pod.allocations);
        for held in allocations.filter(|held| held.resource == *name) {
            let containers = &self.request.containers;
            let runs_apart = match containers.iter().position(|each| each.name == held.container) {
                Some(position) => kind_of(position.min(index)) == Some(ContainerKind::Init),
                // The container is not in the spec, so it may run at any time.
                None => false,
            };
            if !runs_apart {
                for device in &held.devices {
                    reusable.remove(device);
                }
            }
        }
        reusable
    }
}
