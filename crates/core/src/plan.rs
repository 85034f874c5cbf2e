//! What a pod would get: a decision for the whole pod that changes nothing yet.
//!
//! Devices are chosen container by container, in the order in which they run, since a plain init container passes its
//! devices on. Claims are joined all or none. What waiting would help against counts only if nothing else stands in the
//! way.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::device_plugin::bits::Bits;
use crate::device_plugin::ledger::Grant;
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::select::select;
use crate::dra::claims::AllocatedClaim;
use crate::id::{ClaimUid, DeviceId, ResourceName};
use crate::node::{Advice, Node, Question, ReserveError};
use crate::pod::{ClaimUse, ContainerKind, Pod, PodClaim, PodRequest, Source};

impl Node {
    pub(crate) fn plan<'r>(
        &self,
        request: &'r PodRequest,
        advice: &Advice,
        ask: bool,
    ) -> Result<(Plan, PlannedClaims<'r>), ReserveError> {
        if self.is_in_flight(&request.uid) {
            return Err(ReserveError::InFlight);
        }
        let pod = self.ledger.pods.get(&request.uid);
        self.check_identity(request, pod)?;
        let mut planner = Planner {
            node: self,
            request,
            pod,
            advice,
            ask,
            plan: Plan::default(),
            free: BTreeMap::new(),
            passed_on: BTreeMap::new(),
        };
        let devices = planner.run();
        let plan = planner.plan;
        let claims = self.plan_claims(request, pod);
        // What waiting would help against counts only if nothing else stands in the way.
        match (devices, claims) {
            (Err(reason), _) if !reason.waiting_helps() => Err(reason),
            (_, Err(reason)) if !reason.waiting_helps() => Err(reason),
            (Err(reason), _) | (_, Err(reason)) => Err(reason),
            (Ok(()), Ok(claims)) => Ok((plan, claims)),
        }
    }

    /// The pod's claims, each once, if it can join all of them now.
    fn plan_claims<'r>(
        &self,
        request: &'r PodRequest,
        pod: Option<&Pod>,
    ) -> Result<PlannedClaims<'r>, ReserveError> {
        let mut planned = BTreeMap::new();
        let mut names = BTreeMap::new();
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
                    });
                }
                None => {}
            }
            let is_held = pod.is_some_and(|pod| pod.claims.iter().any(|each| each.uid == claim.uid));
            if let (Some(blocked), false) = (self.blocked(), is_held) {
                return Err(blocked.clone().into());
            }
            let can_join = match self.is_importing(&claim.uid, &claim.key) {
                true => Err(ReserveError::InFlight),
                false => self.dra.claims.plan(claim, &self.dra.drivers),
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

    /// Whether the pod has all its claims, prepared and on disk.
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
                return Err(ReserveError::SpecChanged);
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
        match self.ledger.names.get(&request.name) {
            Some(other) if *other != request.uid => Err(ReserveError::NameTaken { other: other.clone() }),
            _ => Ok(()),
        }
    }
}

/// The claims of a pod as they are recorded. What it holds but does not ask for any longer stays with it until it
/// is removed.
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

/// The claims of a request, each once.
pub(crate) type PlannedClaims<'r> = BTreeMap<&'r ClaimUid, &'r AllocatedClaim>;

/// A decision for a whole pod that has not been carried out.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) grants: Vec<Grant>,
    pub(crate) taken: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    pub(crate) question: Option<Question>,
}

/// Goes through a pod's containers in the order in which they run.
struct Planner<'a> {
    node: &'a Node,
    request: &'a PodRequest,
    pod: Option<&'a Pod>,
    advice: &'a Advice,
    ask: bool,
    plan: Plan,
    /// What is free of each resource that has been looked at, less what the plan takes.
    free: BTreeMap<&'a ResourceName, Bits>,
    /// Devices of init containers that later containers may take over.
    passed_on: BTreeMap<&'a ResourceName, BTreeSet<DeviceId>>,
}

impl<'a> Planner<'a> {
    fn run(&mut self) -> Result<(), ReserveError> {
        let request = self.request;
        // What waiting would help against counts only if nothing else stands in the way.
        let mut awaited = None;
        for (index, container) in request.containers.iter().enumerate() {
            for (resource, &wanted) in container.wants.iter().filter(|&(_, &wanted)| wanted > 0) {
                let held = self.pod.and_then(|pod| pod.allocation(&container.name, resource));
                let devices = match held {
                    Some(held) if held.devices.len() == wanted => held.devices.clone(),
                    Some(held) => {
                        return Err(ReserveError::RequestChanged {
                            container: container.name.clone(),
                            resource: resource.clone(),
                            wanted,
                            held: held.devices.len(),
                        });
                    }
                    None => {
                        let devices = match self.choose(index, resource, wanted) {
                            Ok(Some(devices)) => devices,
                            Ok(None) => return Ok(()),
                            Err(reason) if reason.waiting_helps() => {
                                awaited.get_or_insert(reason);
                                self.ask = false;
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
                let passed_on = self.passed_on.entry(resource).or_default();
                match container.kind {
                    ContainerKind::Init => passed_on.extend(devices),
                    ContainerKind::Sidecar | ContainerKind::App => {
                        for device in &devices {
                            passed_on.remove(device);
                        }
                    }
                }
            }
        }
        awaited.map_or(Ok(()), Err)
    }

    /// Devices for one container, or `None` if a plugin should be asked first.
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
        let passed_on = self.passed_on_to(index, name, list);
        let free = self
            .free
            .entry(name)
            .or_insert_with(|| node.ledger.free.get(name).cloned().unwrap_or_default());
        let advice = self.advice.get(&(index, name.clone())).map(Vec::as_slice);
        let missing = wanted.saturating_sub(passed_on.len());
        let count = free.count();
        // With nothing to choose, there is nothing to ask.
        let among_free = missing > 0 && missing < count;
        let among_passed_on = wanted < passed_on.len();
        let asks = self.ask && advice.is_none() && plugin.options.preferred_allocation;
        if asks && (among_free || among_passed_on) {
            let mut question = Question {
                container: index,
                resource: name.clone(),
                connection,
                available: passed_on.iter().cloned().collect(),
                must_include: Vec::new(),
                size: wanted,
            };
            if among_free {
                let free = free.iter().filter_map(|place| list.id_at(place).cloned());
                question.must_include = question.available.clone();
                question.available.extend(free);
                question.available.sort();
            }
            self.plan.question = Some(question);
            return Ok(None);
        }
        let chosen = select(list, free, &passed_on, advice.unwrap_or_default(), wanted);
        let Some(chosen) = chosen else {
            return Err(ReserveError::Insufficient {
                resource: name.clone(),
                wanted: missing,
                free: count,
                healthy: list.healthy().count(),
                total: list.len(),
            });
        };
        let fresh = chosen.iter().filter(|id| !passed_on.contains(*id)).cloned();
        self.plan.taken.entry(name.clone()).or_default().extend(fresh);
        Ok(Some(chosen))
    }

    /// The devices that earlier init containers pass on to this one: healthy ones, and none of a container that may
    /// run beside it. What the plan gives to such a container leaves the pool by itself. What the pod held before
    /// must be looked for: a file may know a later container and not this one.
    fn passed_on_to(&self, index: usize, name: &ResourceName, list: &DeviceList) -> BTreeSet<DeviceId> {
        let healthy = |id: &&DeviceId| {
            let place = list.place_of(id.as_str());
            place.is_some_and(|place| list.healthy().contains(place))
        };
        let pool = self.passed_on.get(name).into_iter().flatten();
        let mut passed_on: BTreeSet<DeviceId> = pool.filter(healthy).cloned().collect();
        if passed_on.is_empty() {
            return passed_on;
        }
        let kind_of = |place: usize| self.request.containers.get(place).map(|each| each.kind);
        let allocations = self.pod.into_iter().flat_map(|pod| &pod.allocations);
        for held in allocations.filter(|held| held.resource == *name) {
            let containers = &self.request.containers;
            let ends_before_the_other = match containers.iter().position(|each| each.name == held.container) {
                Some(place) => kind_of(place.min(index)) == Some(ContainerKind::Init),
                // The spec does not say when it runs.
                None => false,
            };
            if !ends_before_the_other {
                for device in &held.devices {
                    passed_on.remove(device);
                }
            }
        }
        passed_on
    }
}
