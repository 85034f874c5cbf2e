//! Dynamic resource allocation: drivers, the claims that they prepare for pods, and the health of their devices.
//!
//! An admission, from the request to the pod that has its devices and its claims:
//!
//! 1. [`Node::reserve`] checks everything, takes the devices and joins the claims, or does nothing.
//! 2. [`Node::begin_intent`]: what must be on disk before a driver is called; then [`Node::finish_intent`]. It is
//!    empty if another admission is writing the same.
//! 3. [`Node::prepare_calls`]; a call ends with [`Node::prepared`] or [`Node::call_failed`]. 2 and 3 again after
//!    each change, until [`Node::waiting_for`] says that nothing is missing.
//! 4. [`Node::begin_commit`] and [`Node::finish_commit`].
//!
//! A removal: [`Node::begin_release`] and [`Node::finish_release`]; then [`Node::unprepare_calls`], again after
//! each change, until [`Node::remaining`] says that nobody is waited for. An admission that is aborted leaves its
//! claims in the same way.
//!
//! What nobody waits for: [`Node::due_calls`] unprepares claims that no pod holds, and prepares those of pods
//! again after a reboot. [`Node::begin_record`] is what is to be written of that.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid, RecordId, ReservationId};
use crate::node::Node;

pub mod answers;
pub mod claims;
pub mod device_view;
pub mod drivers;
pub mod health;
pub mod view;

use claims::{Call, Claim, Claims, Failure, Intent, NotForgotten, PreparedDevice, Record};
use drivers::{DriverOffer, Drivers, Refusal, RegisterError};
use health::{HealthReport, PoolDevice};

/// Drivers and claims.
#[derive(Debug, Default)]
pub(crate) struct Dra {
    pub(crate) drivers: Drivers,
    pub(crate) claims: Claims,
}

/// What a report of health changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HealthChange {
    /// The devices.
    pub devices: Vec<(DriverName, PoolDevice)>,
    /// The pods that use them.
    pub pods: Vec<PodUid>,
    /// How many devices there was no room for.
    pub left_out: usize,
}

impl Node {
    // ---- facts

    /// A plugin of a driver has registered; [`Node::link_up`] says when it is connected. A plugin of the same
    /// driver and endpoint is replaced: its connection is returned, and whatever still comes from it changes
    /// nothing. Another user does not get in beside a plugin, nor in its place, unless that is allowed.
    pub fn driver_registered(
        &mut self,
        offer: DriverOffer,
        now: Moment,
    ) -> Result<(ConnectionId, Option<ConnectionId>), RegisterError> {
        let id = ConnectionId(self.next_connection);
        let replaced = self.dra.drivers.register(id, offer, now)?;
        self.next_connection += 1;
        self.changes += 1;
        Ok((id, replaced))
    }

    /// A plugin's transport is up. Whether that was news.
    pub fn link_up(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let Some(driver) = self.dra.drivers.link(connection, true, now) else {
            return false;
        };
        self.dra.claims.driver_is_back(&driver);
        self.changes += 1;
        true
    }

    /// A plugin's transport is down; it stays registered. Whether that was news.
    pub fn link_lost(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let news = self.dra.drivers.link(connection, false, now).is_some();
        self.changes += u64::from(news);
        news
    }

    /// A plugin has gone. Whether that was news.
    pub fn driver_deregistered(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let news = self.dra.drivers.deregister(connection, now).is_some();
        self.changes += u64::from(news);
        news
    }

    /// A plugin that was found at a socket was not taken in.
    pub fn driver_refused(&mut self, socket: &str, refusal: Refusal, now: Moment) {
        self.dra.drivers.refuse(socket, refusal, now);
        self.changes += 1;
    }

    /// The plugin at a socket was taken in, or the socket is gone.
    pub fn refusal_ended(&mut self, socket: &str) {
        let known = self.dra.drivers.refused.remove(socket);
        self.changes += u64::from(known.is_some());
    }

    /// What a driver that is gone had published has been wiped.
    pub fn slices_wiped(&mut self, driver: &DriverName) {
        let driver = self.dra.drivers.drivers.get_mut(driver);
        if let Some(unusable) = driver.and_then(|driver| driver.unusable.as_mut()) {
            unusable.wiped = true;
            self.changes += 1;
        }
    }

    /// A plugin says how devices are. One that has been replaced or has gone has no say.
    pub fn health_reported(
        &mut self,
        connection: ConnectionId,
        reports: Vec<HealthReport>,
        now: Moment,
    ) -> HealthChange {
        let Some(name) = self.dra.drivers.connections.get(&connection).cloned() else {
            return HealthChange::default();
        };
        let Some(driver) = self.dra.drivers.drivers.get_mut(&name) else {
            return HealthChange::default();
        };
        let (changed, left_out) = driver.health.reported(connection, reports, now);
        let devices = changed.into_iter().map(|device| (name.clone(), device)).collect();
        let change = self.health_changed(devices);
        HealthChange { left_out, ..change }
    }

    /// A plugin reports no longer; what it said holds until it expires.
    pub fn health_stream_ended(&mut self, connection: ConnectionId) {
        let drivers = &mut self.dra.drivers;
        let name = drivers.connections.get(&connection);
        if let Some(driver) = name.and_then(|name| drivers.drivers.get_mut(name)) {
            driver.health.stream_ended(connection);
        }
    }

    /// Time has passed: what has been reported too long ago is not known any longer.
    pub fn tick(&mut self, now: Moment) -> HealthChange {
        let mut devices = Vec::new();
        for (name, driver) in &mut self.dra.drivers.drivers {
            let expired = driver.health.expire(now).into_iter();
            devices.extend(expired.map(|device| (name.clone(), device)));
        }
        self.health_changed(devices)
    }

    fn health_changed(&mut self, devices: Vec<(DriverName, PoolDevice)>) -> HealthChange {
        if !devices.is_empty() {
            self.changes += 1;
        }
        let claims = devices
            .iter()
            .flat_map(|(driver, device)| self.dra.claims.using(driver, device));
        let mut pods: Vec<PodUid> = claims.flat_map(claims::Entry::pods).collect();
        pods.sort();
        pods.dedup();
        HealthChange {
            devices,
            pods,
            left_out: 0,
        }
    }

    // ---- preparing

    /// What must be on disk before a driver is called for the pod's claims; nothing if it is there already.
    /// Ends with [`Node::finish_intent`] or [`Node::cancel_intent`], also if the admission has ended meanwhile.
    pub fn begin_intent(&mut self, id: ReservationId) -> Intent {
        let Some(reservation) = self.ledger.reservations.get(&id) else {
            return Intent::default();
        };
        self.dra.claims.begin_intent(id, &reservation.claims)
    }

    /// The intent is on disk.
    pub fn finish_intent(&mut self, id: ReservationId) {
        self.dra.claims.end_intent(id, true);
        self.changes += 1;
    }

    /// The intent could not be written. To be followed by [`Node::abort`].
    pub fn cancel_intent(&mut self, id: ReservationId) {
        self.dra.claims.end_intent(id, false);
        self.changes += 1;
    }

    /// Calls to make now for the claims of an admission. What another admission has asked for is not asked again.
    pub fn prepare_calls(&mut self, id: ReservationId, now: Moment) -> Vec<Call> {
        let Some(reservation) = self.ledger.reservations.get(&id) else {
            return Vec::new();
        };
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.prepare_calls(&reservation.claims, drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// A driver has answered: for each claim its devices, or why it has none. What is wrong with the answer is
    /// returned. An answer of a plugin that has been replaced or has gone changes nothing but that the call has
    /// ended.
    pub fn prepared(
        &mut self,
        call: CallId,
        results: BTreeMap<ClaimUid, Result<Vec<PreparedDevice>, String>>,
        is_cdi_name: fn(&str) -> bool,
        now: Moment,
    ) -> Vec<Failure> {
        let Dra { drivers, claims } = &mut self.dra;
        let failures = claims.prepared(call, results, is_cdi_name, drivers, now);
        self.changes += 1;
        failures
    }

    /// There was no answer.
    pub fn call_failed(&mut self, call: CallId, reason: &str, now: Moment) {
        let Dra { drivers, claims } = &mut self.dra;
        claims.call_failed(call, reason, drivers, now);
        self.changes += 1;
    }

    // ---- unpreparing

    /// Calls to make now for the claims that a pod was the last to leave.
    pub fn unprepare_calls(&mut self, pod: &PodUid, now: Moment) -> Vec<Call> {
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.unprepare_calls(pod, drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// A driver has answered: for each claim that it is done, or why not. What is wrong with the answer is
    /// returned.
    pub fn unprepared(
        &mut self,
        call: CallId,
        results: BTreeMap<ClaimUid, Result<(), String>>,
        now: Moment,
    ) -> Vec<Failure> {
        let Dra { drivers, claims } = &mut self.dra;
        let failures = claims.unprepared(call, results, drivers, now);
        self.changes += 1;
        failures
    }

    /// Gives up on a driver, for the claims that a pod was the last to leave: nobody waits for it any longer. The
    /// claims stay on record until the driver comes back and unprepares them. True when [`Node::begin_record`] has
    /// written it. The claims that this is about.
    pub fn abandon(&mut self, pod: &PodUid, driver: &DriverName) -> Vec<ClaimUid> {
        let abandoned = self.dra.claims.abandon(pod, driver);
        self.changes += u64::from(!abandoned.is_empty());
        abandoned
    }

    /// The same for one claim that no pod wants, whoever left it. Whether the driver had something to do for it.
    pub fn abandon_claim(&mut self, claim: &ClaimUid, driver: &DriverName) -> bool {
        let is_abandoned = self.dra.claims.abandon_claim(claim, driver);
        self.changes += u64::from(is_abandoned);
        is_abandoned
    }

    /// The record of a claim that was abandoned is to be deleted, and with it what drivers that were given up on have not
    /// unprepared: nobody asks them any longer. Ends with [`Node::finish_record`] or [`Node::cancel_record`].
    pub fn begin_forget(&mut self, claim: &ClaimUid) -> Result<Record, NotForgotten> {
        let record = self.dra.claims.begin_forget(claim)?;
        self.changes += 1;
        Ok(record)
    }

    // ---- what nobody waits for

    /// Calls to make now that nobody waits for, of all drivers that can be called.
    pub fn due_calls(&mut self, now: Moment) -> Vec<Call> {
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.due_calls(drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// Records of claims to write and to delete, in one piece. Ends with [`Node::finish_record`] or
    /// [`Node::cancel_record`].
    pub fn begin_record(&mut self) -> Option<Record> {
        self.dra.claims.begin_record()
    }

    /// It is on disk.
    pub fn finish_record(&mut self, id: RecordId) {
        self.dra.claims.end_record(id, true);
        self.changes += 1;
    }

    /// It could not be written.
    pub fn cancel_record(&mut self, id: RecordId) {
        self.dra.claims.end_record(id, false);
        self.changes += 1;
    }

    /// Takes in a claim from a kubelet's file, before the pods that hold it; it is on disk. One that is known
    /// stays as it is: [`Node::begin_import`] sees to it that nobody joins it meanwhile.
    pub fn put_claim(&mut self, claim: Claim) {
        self.dra.claims.put(claim);
        self.changes += 1;
    }

    /// Compares who holds claims with what pods and reservations say. For tests.
    #[cfg(test)]
    pub(crate) fn check_members(&self) {
        use alloc::collections::BTreeSet;
        let known = |uid: &ClaimUid| self.dra.claims.entries.contains_key(uid);
        let pods = self.ledger.pods.values().flat_map(|pod| {
            let uids = pod.claim_uids().into_iter();
            uids.filter(known).map(|uid| (uid, pod.uid.clone()))
        });
        let holders: BTreeSet<(ClaimUid, PodUid)> = pods.collect();
        let joined = self.ledger.reservations.values().flat_map(|each| {
            let uids = each.claims.iter().cloned();
            uids.map(|uid| (uid, each.pod.clone()))
        });
        let joiners: BTreeSet<(ClaimUid, PodUid)> = joined.collect();
        let (mut held, mut in_flight) = (BTreeSet::new(), BTreeSet::new());
        for (uid, entry) in &self.dra.claims.entries {
            held.extend(entry.holders.iter().map(|pod| (uid.clone(), pod.clone())));
            in_flight.extend(entry.joiners.iter().map(|pod| (uid.clone(), pod.clone())));
        }
        assert_eq!(held, holders, "who holds a claim is out of step with the pods");
        assert_eq!(
            in_flight, joiners,
            "who has joined a claim is out of step with the reservations"
        );
    }
}
