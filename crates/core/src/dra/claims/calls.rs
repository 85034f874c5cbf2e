//! Calls of drivers and the handling of their answers.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use super::indexes::{index_devices, remove, unindex_devices};
use super::{
    Call, Claim, Claims, Entry, Failure, InFlight, MAX_BACKGROUND_CALLS, MAX_CLAIMS, Operation,
    PreparationState, PreparedDevice, Task,
};
use crate::dra::answers::{self, InvalidAnswer};
use crate::dra::drivers::Drivers;
use crate::dra::health::truncate;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid};

impl Claims {
    /// Returns calls that prepare these claims, unless one is in flight: one for each driver, and one for each claim
    /// that has failed before.
    pub(crate) fn prepare_calls(&mut self, uids: &[ClaimUid], drivers: &Drivers, now: Moment) -> Vec<Call> {
        self.calls_for(uids, Operation::Prepare, drivers, now)
    }

    /// Returns calls that unprepare the claims that a pod was the last to leave.
    pub(crate) fn unprepare_calls(&mut self, pod: &PodUid, drivers: &Drivers, now: Moment) -> Vec<Call> {
        let uids: Vec<ClaimUid> = self.left.get(pod).into_iter().flatten().cloned().collect();
        self.calls_for(&uids, Operation::Unprepare, drivers, now)
    }

    fn calls_for(
        &mut self,
        uids: &[ClaimUid],
        operation: Operation,
        drivers: &Drivers,
        now: Moment,
    ) -> Vec<Call> {
        let mut wanted: BTreeMap<DriverName, Vec<ClaimUid>> = BTreeMap::new();
        for uid in uids {
            let Some(entry) = self
                .entries
                .get(uid)
                .filter(|entry| entry.on_disk && !entry.deleting)
            else {
                continue;
            };
            for (driver, preparation) in &entry.claim.preparations {
                let needed = match operation {
                    Operation::Prepare => entry.is_intended && preparation.state == PreparationState::Pending,
                    Operation::Unprepare => entry.is_unused() && entry.needs_unprepare(driver, preparation),
                };
                let is_free = |task: &Task| !task.is_busy() && task.retry_at <= now;
                if needed && entry.tasks.get(driver).is_some_and(is_free) {
                    wanted.entry(driver.clone()).or_default().push(uid.clone());
                }
            }
        }
        let mut calls = Vec::new();
        for (driver, uids) in wanted {
            if let Some(connection) = drivers.serving(&driver) {
                self.call(operation, &driver, connection, uids, None, &mut calls);
            }
        }
        calls
    }

    /// Returns background calls. They unprepare unused claims, and used claims at abandoned drivers. They prepare claims that
    /// pods hold again after a reboot.
    pub(crate) fn due_calls(&mut self, drivers: &Drivers, now: Moment) -> Vec<Call> {
        let mut calls = Vec::new();
        let names: Vec<DriverName> = self.due.keys().cloned().collect();
        for driver in names {
            let Some(connection) = drivers.serving(&driver) else {
                continue;
            };
            let room =
                MAX_BACKGROUND_CALLS.saturating_sub(self.background.get(&driver).copied().unwrap_or(0));
            let due = self.due.get(&driver).into_iter().flatten();
            let due = due.take_while(|(since, _)| *since <= now).take(room * MAX_CLAIMS);
            let (unprepare, prepare): (Vec<ClaimUid>, Vec<ClaimUid>) =
                due.map(|(_, uid)| uid.clone()).partition(|uid| {
                    let entry = self.entries.get(uid);
                    entry.is_some_and(|entry| entry.is_unused() || entry.claim.is_abandoned_at(&driver))
                });
            for (operation, uids) in [(Operation::Prepare, prepare), (Operation::Unprepare, unprepare)] {
                self.call(
                    operation,
                    &driver,
                    connection,
                    uids,
                    Some(MAX_BACKGROUND_CALLS),
                    &mut calls,
                );
            }
        }
        calls
    }

    /// Adds calls to `calls` and marks them as in flight. With `max`, they are background calls, limited to this number.
    fn call(
        &mut self,
        operation: Operation,
        driver: &DriverName,
        connection: ConnectionId,
        uids: Vec<ClaimUid>,
        max: Option<usize>,
        calls: &mut Vec<Call>,
    ) {
        let failed = |uid: &ClaimUid| {
            let task = self.entries.get(uid).and_then(|entry| entry.tasks.get(driver));
            task.is_some_and(|task| task.failures > 0)
        };
        let (alone, together): (Vec<ClaimUid>, Vec<ClaimUid>) = uids.into_iter().partition(failed);
        let batches = together.chunks(MAX_CLAIMS).chain(alone.chunks(1));
        for batch in batches {
            let running = self.background.get(driver).copied().unwrap_or(0);
            if max.is_some_and(|max| running >= max) {
                break;
            }
            let id = CallId(self.next_call);
            self.next_call += 1;
            let mut claims = Vec::with_capacity(batch.len());
            for uid in batch {
                let Some(entry) = self.entries.get_mut(uid) else {
                    continue;
                };
                if let Some(task) = entry.tasks.get_mut(driver) {
                    task.busy = Some(id);
                    task.called = true;
                }
                claims.push((uid.clone(), entry.claim.key.clone()));
                self.reindex(uid);
            }
            if max.is_some() {
                self.background.insert(driver.clone(), running + 1);
            }
            let in_flight = InFlight {
                operation,
                driver: driver.clone(),
                connection,
                claims: batch.to_vec(),
                background: max.is_some(),
            };
            self.calls.insert(id, in_flight);
            calls.push(Call {
                id,
                operation,
                driver: driver.clone(),
                connection,
                claims,
            });
        }
    }

    /// Removes a call from the calls in flight.
    fn end_call(&mut self, id: CallId) -> Option<InFlight> {
        let call = self.calls.remove(&id)?;
        for uid in &call.claims {
            let entry = self.entries.get_mut(uid);
            if let Some(task) = entry.and_then(|entry| entry.tasks.get_mut(&call.driver)) {
                task.busy = None;
            }
        }
        if call.background
            && let Some(running) = self.background.get_mut(&call.driver)
        {
            *running = running.saturating_sub(1);
            if *running == 0 {
                self.background.remove(&call.driver);
            }
        }
        Some(call)
    }

    /// Ends a call and applies `outcome` to each of its claims. The outcome of a replaced or deregistered plugin is
    /// ignored.
    fn handle_answer(
        &mut self,
        id: CallId,
        drivers: &Drivers,
        now: Moment,
        mut outcome: impl FnMut(&Entry, &DriverName, Operation) -> Result<Vec<PreparedDevice>, Failure>,
    ) -> Vec<Failure> {
        let Some(call) = self.end_call(id) else {
            return Vec::new();
        };
        let counts = drivers.connections.contains_key(&call.connection);
        let mut failures = Vec::new();
        for uid in &call.claims {
            if counts && let Some(entry) = self.entries.get_mut(uid) {
                let outcome = outcome(entry, &call.driver, call.operation);
                // The claim is no longer to be prepared.
                let is_late = call.operation == Operation::Prepare
                    && (entry.is_unused() || entry.claim.is_abandoned_at(&call.driver));
                if let Err(failure) = &outcome {
                    failures.push(failure.clone());
                }
                if !is_late {
                    self.apply(uid, &call.driver, call.operation, outcome, now);
                }
            }
            self.reindex(uid);
        }
        failures
    }

    fn apply(
        &mut self,
        uid: &ClaimUid,
        driver: &DriverName,
        operation: Operation,
        outcome: Result<Vec<PreparedDevice>, Failure>,
        now: Moment,
    ) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        let (Some(preparation), Some(task)) = (
            entry.claim.preparations.get_mut(driver),
            entry.tasks.get_mut(driver),
        ) else {
            return;
        };
        match outcome {
            Err(failure) => task.failed(failure, now),
            Ok(devices) => {
                task.succeeded();
                match operation {
                    Operation::Prepare => {
                        unindex_devices(&mut self.devices, uid, driver, &preparation.devices);
                        index_devices(&mut self.devices, uid, driver, &devices);
                        preparation.devices = devices;
                        preparation.state = PreparationState::Prepared;
                        entry.dirty = true;
                    }
                    Operation::Unprepare => {
                        preparation.state = PreparationState::Unprepared;
                        unindex_devices(&mut self.devices, uid, driver, &preparation.devices);
                        preparation.devices.clear();
                        // Written only if other drivers have pending work. Otherwise the record is deleted.
                        entry.dirty = true;
                        if !entry.is_unused() {
                            // The driver was abandoned, and the pods that use the claim now do not need it.
                            entry.claim.preparations.remove(driver);
                            entry.tasks.remove(driver);
                            remove(&mut self.failing, driver, uid);
                        }
                    }
                }
            }
        }
    }

    pub(crate) fn prepared(
        &mut self,
        id: CallId,
        mut results: BTreeMap<ClaimUid, Result<Vec<PreparedDevice>, String>>,
        is_cdi_name: fn(&str) -> bool,
        drivers: &Drivers,
        now: Moment,
    ) -> Vec<Failure> {
        let unexpected = self.unexpected_claim(id, results.keys());
        self.handle_answer(id, drivers, now, |entry, driver, operation| {
            let claim = &entry.claim;
            let devices = result(claim, driver, &mut results, unexpected.as_ref())?;
            if operation != Operation::Prepare {
                return Err(wrong_operation(driver));
            }
            let preparation = claim.preparations.get(driver);
            let allocated = preparation.and_then(|each| each.allocated.as_deref());
            Ok(answers::check(
                driver,
                &claim.key,
                allocated,
                devices,
                is_cdi_name,
            )?)
        })
    }

    pub(crate) fn unprepared(
        &mut self,
        id: CallId,
        mut results: BTreeMap<ClaimUid, Result<(), String>>,
        drivers: &Drivers,
        now: Moment,
    ) -> Vec<Failure> {
        let unexpected = self.unexpected_claim(id, results.keys());
        self.handle_answer(id, drivers, now, |entry, driver, operation| {
            result(&entry.claim, driver, &mut results, unexpected.as_ref())?;
            match operation {
                Operation::Prepare => Err(wrong_operation(driver)),
                Operation::Unprepare => Ok(Vec::new()),
            }
        })
    }

    pub(crate) fn call_failed(&mut self, id: CallId, reason: &str, drivers: &Drivers, now: Moment) {
        self.handle_answer(id, drivers, now, |_, driver, _| {
            Err(Failure::Call {
                driver: driver.clone(),
                reason: truncate(reason.into()),
            })
        });
    }

    /// Returns a claim of the answer that the call did not have.
    fn unexpected_claim<'a>(
        &self,
        id: CallId,
        mut answered: impl Iterator<Item = &'a ClaimUid>,
    ) -> Option<ClaimUid> {
        let asked: BTreeSet<&ClaimUid> = self
            .calls
            .get(&id)
            .into_iter()
            .flat_map(|call| &call.claims)
            .collect();
        answered.find(|uid| !asked.contains(uid)).cloned()
    }

    /// Ends the backoff of all failed calls of a driver that has connected.
    pub(crate) fn driver_connected(&mut self, driver: &DriverName) {
        for uid in self.failing.get(driver).cloned().unwrap_or_default() {
            let entry = self.entries.get_mut(&uid);
            if let Some(task) = entry.and_then(|entry| entry.tasks.get_mut(driver)) {
                task.failures = 0;
                task.retry_at = Moment::default();
            }
            self.reindex(&uid);
        }
    }

    /// Returns the time of the next due background call of a connected driver.
    pub(crate) fn next_retry(&self, drivers: &Drivers) -> Option<Moment> {
        let serving = self
            .due
            .iter()
            .filter(|(driver, _)| drivers.serving(driver).is_some());
        serving
            .filter_map(|(_, due)| due.first().map(|(since, _)| *since))
            .min()
    }
}

fn result<T>(
    claim: &Claim,
    driver: &DriverName,
    results: &mut BTreeMap<ClaimUid, Result<T, String>>,
    unexpected: Option<&ClaimUid>,
) -> Result<T, Failure> {
    let driver = driver.clone();
    if let Some(uid) = unexpected {
        let uid = uid.clone();
        return Err(InvalidAnswer::UnknownClaim { driver, uid }.into());
    }
    let key = claim.key.clone();
    match results.remove(&claim.uid) {
        None => Err(InvalidAnswer::Missing { driver, claim: key }.into()),
        Some(Err(reason)) => Err(Failure::Driver {
            driver,
            claim: key,
            reason: truncate(reason),
        }),
        Some(Ok(answer)) => Ok(answer),
    }
}

fn wrong_operation(driver: &DriverName) -> Failure {
    Failure::Call {
        driver: driver.clone(),
        reason: "the answer is for another operation".into(),
    }
}
