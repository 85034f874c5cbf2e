//! Dynamic resource allocation: drivers, the claims that they prepare for pods, and the health of their devices.
//!
//! An admission runs in these steps:
//!
//! 1. [`Node::reserve`] reserves the devices and joins the claims, or changes nothing.
//! 2. [`Node::begin_intent`] returns the records that must be on disk before a driver is called; then
//!    [`Node::finish_intent`]. The intent is empty if another admission is writing the same records.
//! 3. [`Node::prepare_calls`]; a call ends with [`Node::prepared`] or [`Node::call_failed`]. Steps 2 and 3 are repeated
//!    after each change, until [`Node::waiting_for`] is empty.
//! 4. [`Node::begin_commit`] and [`Node::finish_commit`].
//!
//! A removal calls [`Node::begin_release`] and [`Node::finish_release`]. Then it repeats [`Node::unprepare_calls`] after
//! each change, until [`Node::pending_unprepare`] is empty. The claims of an aborted admission are unprepared in the same
//! way.
//!
//! In the background, [`Node::due_calls`] unprepares claims that no pod holds, and prepares claims of pods again after a
//! reboot. [`Node::begin_record`] returns the records of that.

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

use claims::{BeginForgetError, Call, Claim, Claims, Failure, Intent, PreparedDevice, Record};
use drivers::{DriverConflict, DriverOffer, Drivers, Refusal};
use health::{HealthReport, PoolDevice};

/// Drivers and claims.
#[derive(Debug, Default)]
pub(crate) struct Dra {
    pub(crate) drivers: Drivers,
    pub(crate) claims: Claims,
}

/// The devices and pods that a health report changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HealthChange {
    /// The devices.
    pub devices: Vec<(DriverName, PoolDevice)>,
    /// The pods that use them.
    pub pods: Vec<PodUid>,
    /// The number of reports dropped because the table is full.
    pub dropped: usize,
}

impl Node {
    // ---- facts

    /// Adds a registered plugin of a driver, which [`Node::link_up`] marks as connected. Returns its connection, and the
    /// connection that it replaces, which had the same driver and endpoint. Later messages of a replaced connection
    /// change nothing. A plugin of another user can neither join nor replace a plugin unless `may_share` is set.
    pub fn driver_registered(
        &mut self,
        offer: DriverOffer,
        now: Moment,
    ) -> Result<(ConnectionId, Option<ConnectionId>), DriverConflict> {
        let id = ConnectionId(self.next_connection);
        let replaced = self.dra.drivers.register(id, offer, now)?;
        self.next_connection += 1;
        self.changes += 1;
        Ok((id, replaced))
    }

    /// Marks a plugin as connected. Returns `false` if nothing changed.
    pub fn link_up(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let Some(driver) = self.dra.drivers.link(connection, true, now) else {
            return false;
        };
        self.dra.claims.driver_connected(&driver);
        self.changes += 1;
        true
    }

    /// Marks a plugin as not connected; it stays registered. Returns `false` if nothing changed.
    pub fn link_lost(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let has_changed = self.dra.drivers.link(connection, false, now).is_some();
        self.changes += u64::from(has_changed);
        has_changed
    }

    /// Removes a plugin. Returns `false` if nothing changed.
    pub fn driver_deregistered(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let has_changed = self.dra.drivers.deregister(connection, now).is_some();
        self.changes += u64::from(has_changed);
        has_changed
    }

    /// Records that the plugin at a socket was refused.
    pub fn driver_refused(&mut self, socket: &str, refusal: Refusal, now: Moment) {
        self.dra.drivers.refuse(socket, refusal, now);
        self.changes += 1;
    }

    /// Removes the refusal of a plugin that has registered, or whose socket is gone.
    pub fn refusal_ended(&mut self, socket: &str) {
        let known = self.dra.drivers.refused.remove(socket);
        self.changes += u64::from(known.is_some());
    }

    /// Records health reports of a plugin. Reports of a replaced or deregistered plugin are ignored.
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
        let (changed, dropped) = driver.health.reported(connection, reports, now);
        let devices = changed.into_iter().map(|device| (name.clone(), device)).collect();
        let change = self.health_changed(devices);
        HealthChange { dropped, ..change }
    }

    /// Records the end of a plugin's health stream. Its reports stay valid until they expire.
    pub fn health_stream_ended(&mut self, connection: ConnectionId) {
        let drivers = &mut self.dra.drivers;
        let name = drivers.connections.get(&connection);
        if let Some(driver) = name.and_then(|name| drivers.drivers.get_mut(name)) {
            driver.health.stream_ended(connection);
        }
    }

    /// Removes expired health reports.
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
            dropped: 0,
        }
    }

    // ---- prepare

    /// Returns the records that must be on disk before a driver is called for the pod's claims; empty if they are. Ends
    /// with [`Node::finish_intent`] or [`Node::cancel_intent`], also if the admission has ended meanwhile.
    pub fn begin_intent(&mut self, id: ReservationId) -> Intent {
        let Some(reservation) = self.ledger.reservations.get(&id) else {
            return Intent::default();
        };
        self.dra.claims.begin_intent(id, &reservation.claims)
    }

    /// Completes an intent that is on disk.
    pub fn finish_intent(&mut self, id: ReservationId) {
        self.dra.claims.end_intent(id, true);
        self.changes += 1;
    }

    /// Cancels an intent that could not be written. [`Node::abort`] must follow.
    pub fn cancel_intent(&mut self, id: ReservationId) {
        self.dra.claims.end_intent(id, false);
        self.changes += 1;
    }

    /// Returns the calls to make now for the claims of an admission, without those that another admission has started.
    pub fn prepare_calls(&mut self, id: ReservationId, now: Moment) -> Vec<Call> {
        let Some(reservation) = self.ledger.reservations.get(&id) else {
            return Vec::new();
        };
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.prepare_calls(&reservation.claims, drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// Ends a prepare call with the driver's answer: for each claim its devices or an error. Returns the failures. An
    /// answer of a replaced or deregistered plugin only ends the call.
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

    /// Ends a call without an answer.
    pub fn call_failed(&mut self, call: CallId, reason: &str, now: Moment) {
        let Dra { drivers, claims } = &mut self.dra;
        claims.call_failed(call, reason, drivers, now);
        self.changes += 1;
    }

    // ---- unprepare

    /// Returns the calls to make now for the claims that the pod was the last to leave.
    pub fn unprepare_calls(&mut self, pod: &PodUid, now: Moment) -> Vec<Call> {
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.unprepare_calls(pod, drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// Ends an unprepare call with the driver's answer: for each claim success or an error. Returns the failures.
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

    /// Abandons a driver for the claims that the pod was the last to leave: operations no longer wait for it. The claims
    /// stay on record until the driver comes back and unprepares them. Durable after [`Node::begin_record`] has been
    /// written. Returns the claims.
    pub fn abandon(&mut self, pod: &PodUid, driver: &DriverName) -> Vec<ClaimUid> {
        let abandoned = self.dra.claims.abandon(pod, driver);
        self.changes += u64::from(!abandoned.is_empty());
        abandoned
    }

    /// Abandons a driver for one unused claim. Returns `false` if the claim did not wait for the driver.
    pub fn abandon_claim(&mut self, claim: &ClaimUid, driver: &DriverName) -> bool {
        let is_abandoned = self.dra.claims.abandon_claim(claim, driver);
        self.changes += u64::from(is_abandoned);
        is_abandoned
    }

    /// Begins to delete the record of an abandoned claim. Its abandoned drivers are then never called to unprepare it. Ends
    /// with [`Node::finish_record`] or [`Node::cancel_record`].
    pub fn begin_forget(&mut self, claim: &ClaimUid) -> Result<Record, BeginForgetError> {
        let record = self.dra.claims.begin_forget(claim)?;
        self.changes += 1;
        Ok(record)
    }

    // ---- background work

    /// Returns the background calls to make now, of all connected drivers.
    pub fn due_calls(&mut self, now: Moment) -> Vec<Call> {
        let Dra { drivers, claims } = &mut self.dra;
        let calls = claims.due_calls(drivers, now);
        self.changes += u64::from(!calls.is_empty());
        calls
    }

    /// Returns claim records to write and to delete in one transaction. Ends with [`Node::finish_record`] or
    /// [`Node::cancel_record`].
    pub fn begin_record(&mut self) -> Option<Record> {
        self.dra.claims.begin_record()
    }

    /// Completes a record that is on disk.
    pub fn finish_record(&mut self, id: RecordId) {
        self.dra.claims.end_record(id, true);
        self.changes += 1;
    }

    /// Cancels a record that could not be written.
    pub fn cancel_record(&mut self, id: RecordId) {
        self.dra.claims.end_record(id, false);
        self.changes += 1;
    }

    /// Adds a claim of a kubelet's file, which is on disk, before the pods that hold it. A known claim stays unchanged.
    /// [`Node::begin_import`] prevents that a pod joins it meanwhile.
    pub fn put_claim(&mut self, claim: Claim) {
        self.dra.claims.put(claim);
        self.changes += 1;
    }

    /// Compares the holders of claims with the pods and reservations.
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
        assert_eq!(held, holders, "the holders of claims differ from the pods");
        assert_eq!(
            in_flight, joiners,
            "the joiners of claims differ from the reservations"
        );
    }
}
