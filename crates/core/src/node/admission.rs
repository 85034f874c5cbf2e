//! Admission of a pod: preferences of plugins, reservation of devices and claims, and the commit in two phases.

use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::{CommitError, Node, ReserveError};
use crate::device_plugin::ledger::{Commit, Reservation};
use crate::device_plugin::run_options::Answer;
use crate::id::{ClaimUid, ConnectionId, DeviceId, PodUid, ReservationId, ResourceName};
use crate::plan::{Plan, PlannedClaims, claim_uses, pod_claims};
use crate::pod::{Allocation, Pod, PodMetadata, PodRequest};

/// Answers of `GetPreferredAllocation`: for each container (by its index in the request) and resource, the devices in
/// order of preference.
pub type Preferences = BTreeMap<(usize, ResourceName), Vec<DeviceId>>;

/// A `GetPreferredAllocation` call to make before devices are chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreferenceQuery {
    /// The container's index in the request.
    pub container: usize,
    /// The resource.
    pub resource: ResourceName,
    /// The connection of the plugin to call.
    pub connection: ConnectionId,
    /// The devices to choose from, sorted.
    pub available: Vec<DeviceId>,
    /// The available devices that the container gets in any case.
    pub must_include: Vec<DeviceId>,
    /// The total number of devices for the container.
    pub size: usize,
}

/// The result of [`Node::reserve_or_query`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reserved {
    /// A plugin has to be asked for its preference first. Nothing is reserved.
    Query(PreferenceQuery),
    /// The pod holds everything already, and its record is complete.
    Complete,
    /// The pod's devices and claims are reserved.
    Reservation(ReservationId),
}

impl Node {
    /// Reserves like [`Node::reserve`], unless a plugin has to be asked for its preference first. Plans once in the common
    /// case, in which no plugin wants to be asked.
    pub fn reserve_or_query(
        &mut self,
        request: &PodRequest,
        preferences: &Preferences,
    ) -> Result<Reserved, ReserveError> {
        let mut planned = self.plan(request, preferences, true);
        let query = planned.as_mut().ok().and_then(|(plan, _)| plan.query.take());
        if query.is_some() || planned.is_err() {
            // Without preferences: a plugin is not asked for a request that cannot be granted.
            planned = self.plan(request, preferences, false);
        }
        let (plan, claims) = planned?;
        if let Some(query) = query {
            return Ok(Reserved::Query(query));
        }
        let reserved = self.reserve_planned(request, plan, claims);
        Ok(reserved.map_or(Reserved::Complete, Reserved::Reservation))
    }

    /// Returns the next query for this request, given the preferences that plugins have returned so far. Returns `None`
    /// for a request that cannot be granted: [`Node::reserve`] returns the reason.
    #[cfg(test)]
    pub(crate) fn preference_query(
        &self,
        request: &PodRequest,
        preferences: &Preferences,
    ) -> Option<PreferenceQuery> {
        let query = self.plan(request, preferences, true).ok()?.0.query?;
        self.plan(request, preferences, false).ok()?;
        Some(query)
    }

    /// Reserves all devices and joins all claims that the pod needs, or changes nothing.
    ///
    /// The pod keeps the devices that it holds already. So it can be admitted again in any state of its plugins. Then the
    /// result is `Ok(None)`, or a reservation without grants if the record of the pod changes (it was imported, or
    /// admitted before a reboot).
    pub fn reserve(
        &mut self,
        request: &PodRequest,
        preferences: &Preferences,
    ) -> Result<Option<ReservationId>, ReserveError> {
        let (plan, claims) = self.plan(request, preferences, false)?;
        Ok(self.reserve_planned(request, plan, claims))
    }

    fn reserve_planned(
        &mut self,
        request: &PodRequest,
        plan: Plan,
        claims: PlannedClaims<'_>,
    ) -> Option<ReservationId> {
        let is_recorded = self.ledger.pods.get(&request.uid).is_some_and(|pod| {
            pod.source == request.source
                && pod.name == request.name
                && pod.fingerprint == request.fingerprint
                && pod.metadata.labels == request.metadata.labels
                && !pod.before_reboot
        });
        if plan.grants.is_empty() && is_recorded && self.has_its_claims(request) {
            self.admitted(&request.uid);
            return None;
        }
        let id = ReservationId(self.next_reservation);
        self.next_reservation += 1;
        for (name, devices) in &plan.taken {
            let resource = self.resources.get(name);
            self.ledger
                .hold(&request.uid, name, devices.iter().cloned(), resource);
        }
        let reservation = Reservation {
            pod: request.uid.clone(),
            name: request.name.clone(),
            grants: plan.grants,
            taken: plan.taken,
            claims: claims.keys().map(|uid| (*uid).clone()).collect(),
            committing: None,
        };
        for claim in claims.into_values() {
            self.dra.claims.join(&request.uid, &request.name, claim);
        }
        self.ledger.name(&request.name, &request.uid);
        self.ledger.in_flight.insert(request.uid.clone(), id);
        self.ledger.reservations.insert(id, reservation);
        self.changes += 1;
        Some(id)
    }

    fn admitted(&mut self, pod: &PodUid) {
        self.ledger.admitted.insert(pod.clone(), self.next_admission);
        self.next_admission += 1;
    }

    /// Returns a reservation that has not ended.
    pub fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        self.ledger.reservations.get(&id)
    }

    /// Frees the devices and leaves the claims of a reservation. Does nothing after [`Node::begin_commit`].
    pub fn abort(&mut self, id: ReservationId) {
        let committing = self
            .ledger
            .reservations
            .get(&id)
            .is_none_or(|each| each.committing.is_some());
        if !committing {
            self.drop_reservation(id);
        }
    }

    /// Begins the commit after all plugins have answered and all claims are prepared. Returns the pod and its claims, to be
    /// written in one transaction. `answers` has the answers of the plugins in the order of the grants, each with `true`
    /// if the plugin requires `PreStartContainer`.
    pub fn begin_commit(
        &mut self,
        id: ReservationId,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
    ) -> Result<Commit, CommitError> {
        let reservation = self.ledger.reservations.get(&id).ok_or(CommitError::Ended)?;
        if reservation.committing.is_some() {
            return Err(CommitError::Ended);
        }
        let is_its_pod = reservation.pod == request.uid && reservation.name == request.name;
        let uids: BTreeSet<&ClaimUid> = request.claims.iter().map(|each| &each.claim.uid).collect();
        let are_its_claims = reservation.claims.iter().eq(uids);
        if !is_its_pod || !are_its_claims || reservation.grants.len() != answers.len() {
            return Err(CommitError::Mismatch);
        }
        let claims = self.dra.claims.to_commit(&reservation.claims);
        let claims = claims.ok_or(CommitError::NotPrepared)?;
        let mut granted: BTreeMap<_, _> = reservation
            .grants
            .iter()
            .zip(answers)
            .map(|(grant, answer)| ((&grant.container, &grant.resource), (grant, answer)))
            .collect();
        let held = self.ledger.pods.get(&request.uid);
        let mut allocations = Vec::new();
        for container in &request.containers {
            for resource in container.wants.keys() {
                if let Some((grant, (answer, pre_start_required))) =
                    granted.remove(&(&container.name, resource))
                {
                    allocations.push(Allocation {
                        container: container.name.clone(),
                        kind: Some(container.kind),
                        resource: resource.clone(),
                        devices: grant.devices.clone(),
                        nodes: self.nodes_of(resource, &grant.devices),
                        answer,
                        pre_start_required,
                    });
                } else if let Some(kept) = held.and_then(|pod| pod.allocation(&container.name, resource)) {
                    allocations.push(Allocation {
                        kind: Some(container.kind),
                        ..kept.clone()
                    });
                }
            }
        }
        if !granted.is_empty() {
            return Err(CommitError::Mismatch);
        }
        // The pod keeps allocations that it no longer requests until it is removed.
        for kept in held.into_iter().flat_map(|pod| &pod.allocations) {
            let known =
                |each: &Allocation| each.container == kept.container && each.resource == kept.resource;
            if !allocations.iter().any(known) {
                allocations.push(kept.clone());
            }
        }
        let admitted_at = held.and_then(|pod| pod.metadata.admitted_at);
        let pod = Pod {
            uid: request.uid.clone(),
            name: request.name.clone(),
            source: request.source,
            fingerprint: request.fingerprint,
            metadata: PodMetadata {
                labels: request.metadata.labels.clone(),
                admitted_at: admitted_at.or(request.metadata.admitted_at),
            },
            before_reboot: false,
            containers: request.containers.iter().map(|each| each.name.clone()).collect(),
            allocations,
            claims: pod_claims(request, held),
            claim_uses: claim_uses(request),
        };
        let commit = Commit { pod, claims };
        self.dra.claims.begin_commit(&commit.claims);
        if let Some(reservation) = self.ledger.reservations.get_mut(&id) {
            reservation.committing = Some(commit.clone());
        }
        self.changes += 1;
        Ok(commit)
    }

    /// Completes a commit that is on disk. Does nothing unless [`Node::begin_commit`] was called.
    pub fn finish_commit(&mut self, id: ReservationId) {
        let Entry::Occupied(mut entry) = self.ledger.reservations.entry(id) else {
            return;
        };
        let Some(Commit { pod, claims }) = entry.get_mut().committing.take() else {
            return;
        };
        let reservation = entry.remove();
        self.ledger.in_flight.remove(&reservation.pod);
        self.admitted(&reservation.pod);
        self.dra.claims.end_commit(&claims, true);
        for uid in &reservation.claims {
            self.dra.claims.hold(&pod.uid, uid);
        }
        // The reservation already holds the devices and the name.
        if let Some(earlier) = self.ledger.insert(pod)
            && earlier.name != reservation.name
        {
            self.ledger.unname(&earlier.name, &earlier.uid);
        }
        self.changes += 1;
    }

    /// Cancels a commit that could not be written.
    pub fn cancel_commit(&mut self, id: ReservationId) {
        self.drop_reservation(id);
    }

    fn drop_reservation(&mut self, id: ReservationId) {
        let Some(reservation) = self.ledger.reservations.remove(&id) else {
            return;
        };
        self.ledger.in_flight.remove(&reservation.pod);
        if self
            .ledger
            .pods
            .get(&reservation.pod)
            .is_none_or(|pod| pod.name != reservation.name)
        {
            self.ledger.unname(&reservation.name, &reservation.pod);
        }
        for (name, devices) in &reservation.taken {
            let resource = self.resources.get(name);
            self.ledger.release(&reservation.pod, name, devices, resource);
        }
        if let Some(Commit { claims, .. }) = &reservation.committing {
            self.dra.claims.end_commit(claims, false);
        }
        for uid in &reservation.claims {
            self.dra.claims.leave(&reservation.pod, &reservation.name, uid);
        }
        self.changes += 1;
    }

    /// Returns devices by NUMA node, with -1 for devices without one. A device that has left the list since it was
    /// reserved counts as a device without a node.
    fn nodes_of(&self, name: &ResourceName, devices: &[DeviceId]) -> Vec<(i64, Vec<DeviceId>)> {
        let mut nodes: BTreeMap<i64, Vec<DeviceId>> = BTreeMap::new();
        for id in devices {
            let known = self
                .resources
                .get(name)
                .and_then(|resource| resource.list.get(id.as_str()));
            match known.map_or(&[][..], |device| &device.nodes) {
                [] => nodes.entry(-1).or_default().push(id.clone()),
                many => many
                    .iter()
                    .for_each(|node| nodes.entry(*node).or_default().push(id.clone())),
            }
        }
        nodes.into_iter().collect()
    }
}
