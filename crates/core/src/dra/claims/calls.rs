//! What drivers are asked, and what becomes of their answers.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use super::indexes::{index_devices, remove, unindex_devices};
use super::{
    Call, Claim, Claims, Entry, Failure, InFlight, MOST_CALLS, MOST_CLAIMS, Operation, PreparationState,
    PreparedDevice, Task,
};
use crate::dra::answers::{self, InvalidAnswer};
use crate::dra::drivers::Drivers;
use crate::dra::health::truncate;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid};

impl Claims {
    /// Calls that prepare these claims, as far as none is on its way. One for each driver, and one for each claim
    /// that has failed before.
    pub(crate) fn prepare_calls(&mut self, uids: &[ClaimUid], drivers: &Drivers, now: Moment) -> Vec<Call> {
        self.calls_for(uids, Operation::Prepare, drivers, now)
    }

    /// Calls that unprepare the claims that a pod was the last to leave.
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

    /// Calls for which nobody waits: unused claims are unprepared, by drivers that were given up on also those that are in
    /// use again; and claims that pods hold are prepared again after a reboot.
    pub(crate) fn due_calls(&mut self, drivers: &Drivers, now: Moment) -> Vec<Call> {
        let mut calls = Vec::new();
        let names: Vec<DriverName> = self.due.keys().cloned().collect();
        for driver in names {
            let Some(connection) = drivers.serving(&driver) else {
                continue;
            };
            let room = MOST_CALLS.saturating_sub(self.background.get(&driver).copied().unwrap_or(0));
            let due = self.due.get(&driver).into_iter().flatten();
            let due = due
                .take_while(|(since, _)| *since <= now)
                .take(room * MOST_CLAIMS);
            let (unprepare, prepare): (Vec<ClaimUid>, Vec<ClaimUid>) =
                due.map(|(_, uid)| uid.clone()).partition(|uid| {
                    let entry = self.entries.get(uid);
                    entry.is_some_and(|entry| entry.is_unused() || entry.claim.is_abandoned_at(&driver))
                });
            for (operation, uids) in [(Operation::Prepare, prepare), (Operation::Unprepare, unprepare)] {
                self.call(operation, &driver, connection, uids, Some(MOST_CALLS), &mut calls);
            }
        }
        calls
    }

    /// Notes calls that are to be made. With `most`, nobody waits for them, and no more than that are on their way.
    fn call(
        &mut self,
        operation: Operation,
        driver: &DriverName,
        connection: ConnectionId,
        uids: Vec<ClaimUid>,
        most: Option<usize>,
        calls: &mut Vec<Call>,
    ) {
        let failed = |uid: &ClaimUid| {
            let task = self.entries.get(uid).and_then(|entry| entry.tasks.get(driver));
            task.is_some_and(|task| task.failures > 0)
        };
        let (alone, together): (Vec<ClaimUid>, Vec<ClaimUid>) = uids.into_iter().partition(failed);
        let batches = together.chunks(MOST_CLAIMS).chain(alone.chunks(1));
        for batch in batches {
            let running = self.background.get(driver).copied().unwrap_or(0);
            if most.is_some_and(|most| running >= most) {
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
            if most.is_some() {
                self.background.insert(driver.clone(), running + 1);
            }
            let in_flight = InFlight {
                operation,
                driver: driver.clone(),
                connection,
                claims: batch.to_vec(),
                background: most.is_some(),
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

    /// A call has ended: nothing but that.
    fn ended(&mut self, id: CallId) -> Option<InFlight> {
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

    /// A call has ended. What it means for each of its claims is for `outcome` to say, unless the plugin has been
    /// replaced or has left: then it means nothing.
    fn answered(
        &mut self,
        id: CallId,
        drivers: &Drivers,
        now: Moment,
        mut outcome: impl FnMut(&Entry, &DriverName, Operation) -> Result<Vec<PreparedDevice>, Failure>,
    ) -> Vec<Failure> {
        let Some(call) = self.ended(id) else {
            return Vec::new();
        };
        let counts = drivers.connections.contains_key(&call.connection);
        let mut failures = Vec::new();
        for uid in &call.claims {
            if counts && let Some(entry) = self.entries.get_mut(uid) {
                let outcome = outcome(entry, &call.driver, call.operation);
                // What was to be prepared is not wanted any longer.
                let is_late = call.operation == Operation::Prepare
                    && (entry.is_unused() || entry.claim.is_abandoned_at(&call.driver));
                if let Err(failure) = &outcome {
                    failures.push(failure.clone());
                }
                if !is_late {
                    self.note(uid, &call.driver, call.operation, outcome, now);
                }
            }
            self.reindex(uid);
        }
        failures
    }

    fn note(
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
                        // Written only if others still have to: otherwise the record is deleted.
                        entry.dirty = true;
                        if !entry.is_unused() {
                            // It was given up on, and has nothing to do with those who use the claim now.
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
        let stray = self.stray(id, results.keys());
        self.answered(id, drivers, now, |entry, driver, operation| {
            let claim = &entry.claim;
            let devices = result(claim, driver, &mut results, stray.as_ref())?;
            if operation != Operation::Prepare {
                return Err(mixed_up(driver));
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
        let stray = self.stray(id, results.keys());
        self.answered(id, drivers, now, |entry, driver, operation| {
            result(&entry.claim, driver, &mut results, stray.as_ref())?;
            match operation {
                Operation::Prepare => Err(mixed_up(driver)),
                Operation::Unprepare => Ok(Vec::new()),
            }
        })
    }

    pub(crate) fn call_failed(&mut self, id: CallId, reason: &str, drivers: &Drivers, now: Moment) {
        self.answered(id, drivers, now, |_, driver, _| {
            Err(Failure::Call {
                driver: driver.clone(),
                reason: truncate(reason.into()),
            })
        });
    }

    /// A claim that an answer is about, and the call is not.
    fn stray<'a>(&self, id: CallId, mut answered: impl Iterator<Item = &'a ClaimUid>) -> Option<ClaimUid> {
        let asked: BTreeSet<&ClaimUid> = self
            .calls
            .get(&id)
            .into_iter()
            .flat_map(|call| &call.claims)
            .collect();
        answered.find(|uid| !asked.contains(uid)).cloned()
    }

    /// A driver can be called again: nobody need wait any longer.
    pub(crate) fn driver_is_back(&mut self, driver: &DriverName) {
        for uid in self.failing.get(driver).cloned().unwrap_or_default() {
            let entry = self.entries.get_mut(&uid);
            if let Some(task) = entry.and_then(|entry| entry.tasks.get_mut(driver)) {
                task.failures = 0;
                task.retry_at = Moment::default();
            }
            self.reindex(&uid);
        }
    }

    /// When the next call is due that failed before, of a driver that can be called.
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
    stray: Option<&ClaimUid>,
) -> Result<T, Failure> {
    let driver = driver.clone();
    if let Some(uid) = stray {
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

fn mixed_up(driver: &DriverName) -> Failure {
    Failure::Call {
        driver: driver.clone(),
        reason: "the answer is not to what was asked".into(),
    }
}
