//! Which claims are on the node, who holds them, and what their drivers still have to do.
//!
//! ```text
//!                begin_intent               every driver answered
//!   (unknown) ─────────────────► preparing ───────────────────────► prepared
//!                                   │  ▲   another pod joins   ▲       │
//!                                   │  └───────────────────────┘       │ the last pod leaves
//!                                   └───────────► unpreparing ◄────────┘
//!                                                      │ every driver agreed, and the record is gone
//!                                                      ▼
//!                                                  (unknown)
//! ```
//!
//! Who holds a claim is on record with the pods, and nowhere else: a claim that no pod holds and no admission has
//! joined is being unprepared. So nothing is written when a pod leaves but that the pod is gone, and after a crash
//! an admission that never was answered has left.
//!
//! A [`Claim`] is what is on record. It is written as an intent before the first driver is called, and with what
//! drivers answered together with the pod. What comes after that is written by and by (`Claims::begin_record`),
//! and a record is deleted when nothing is left to unprepare. In between memory may know more than the disk: it
//! costs a repeated call after a crash, and drivers are used to that.
//!
//! For each driver of a claim there is at most one call at a time. Calls that failed are repeated with a growing
//! pause, and alone, so that one claim holds up no other.
//!
//! `by_key`, `left`, `due`, `failing`, `to_write`, `done`, `devices`, `in_use`, `phases` and `preparing` are derived: with
//! ten thousand claims nobody wants to look through all of them. `Claims::settle` keeps them, and `check` recomputes them, after
//! every step of the history tests.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::answers::{self, InvalidAnswer};
use super::drivers::Drivers;
use super::health::{PoolDevice, cut};
use super::view::Phase;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid, RecordId, ReservationId};
use crate::node::{LastSeen, ReserveError};
use crate::pod::PodName;

mod claim;
mod entry;

pub use claim::{
    Allocated, AllocatedClaim, AllocatedDevice, AllocationResult, Call, Claim, ClaimKey, Failure,
    NotForgotten, Operation, Preparation, PreparationState, PreparedDevice, Record,
};
use entry::InFlight;
pub(crate) use entry::{Entry, InUse, Task};

/// How many claims are put into one call.
pub const MOST_CLAIMS: usize = 256;
/// How many calls of one driver run at a time for which nobody waits.
pub const MOST_CALLS: usize = 8;
/// The pause after the first failure; it doubles with each.
pub const FIRST_PAUSE_MS: u64 = 1000;
/// The longest pause.
pub const LONGEST_PAUSE_MS: u64 = 60 * 1000;

/// All claims.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub(crate) entries: BTreeMap<ClaimUid, Entry>,
    /// The claim that has a name; older ones that were given up on do not count.
    pub(crate) by_key: BTreeMap<ClaimKey, ClaimUid>,
    /// Unused claims by the pod that left last.
    pub(crate) left: BTreeMap<PodUid, BTreeSet<ClaimUid>>,
    /// Claims for which a driver is to be called without anybody waiting for it, and from when on.
    due: BTreeMap<DriverName, BTreeSet<(Moment, ClaimUid)>>,
    /// Claims for which the last call of a driver failed.
    failing: BTreeMap<DriverName, BTreeSet<ClaimUid>>,
    to_write: BTreeSet<ClaimUid>,
    done: BTreeSet<ClaimUid>,
    devices: DeviceIndex,
    pub(crate) in_use: InUse,
    pub(crate) phases: BTreeMap<Phase, usize>,
    /// Claims that are being prepared.
    pub(crate) preparing: BTreeSet<ClaimUid>,
    calls: BTreeMap<CallId, InFlight>,
    background: BTreeMap<DriverName, usize>,
    intents: BTreeMap<ReservationId, Vec<ClaimUid>>,
    records: BTreeMap<RecordId, Record>,
    next_call: u64,
    next_record: u64,
}

impl Claims {
    /// Takes in a claim from disk or from a kubelet's file. One that is known stays as it is.
    pub(crate) fn put(&mut self, claim: Claim) {
        if self.entries.contains_key(&claim.uid) {
            return;
        }
        let uid = claim.uid.clone();
        for (driver, preparation) in &claim.preparations {
            index_devices(&mut self.devices, &uid, driver, &preparation.devices);
        }
        // Of several claims of one name, at most one counts: the others were given up on.
        let named = self.by_key.get(&claim.key).and_then(|uid| self.entries.get(uid));
        if named.is_none_or(|other| other.is_unused() && other.blocking().next().is_none()) {
            self.by_key.insert(claim.key.clone(), uid.clone());
        }
        self.entries.insert(uid.clone(), Entry::new(claim, true));
        self.settle(&uid);
    }

    /// A pod on record holds a claim.
    pub(crate) fn hold(&mut self, pod: &PodUid, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.joiners.remove(pod);
            entry.holders.insert(pod.clone());
            self.by_key.insert(entry.claim.key.clone(), uid.clone());
            self.settle(uid);
        }
    }

    /// A pod on record is gone.
    pub(crate) fn let_go(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.holders.remove(pod);
            self.left_by(pod, name, uid);
        }
    }

    /// A pod is to leave. The records of the claims that it is the last to leave, as far as they do not say so.
    pub(crate) fn begin_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        uids: &[ClaimUid],
        is_leaving: impl Fn(&PodUid) -> bool,
    ) -> Vec<Claim> {
        let mut last_words = Vec::new();
        for uid in uids {
            let Some(entry) = self.entries.get_mut(uid) else {
                continue;
            };
            let stays = |other: &PodUid| other != pod && !is_leaving(other);
            let is_last = entry.joiners.is_empty() && !entry.holders.iter().any(stays);
            if is_last && entry.claim.pod != *pod {
                entry.writing += 1;
                last_words.push(Claim {
                    pod: pod.clone(),
                    pod_name: name.clone(),
                    ..entry.claim.clone()
                });
            }
        }
        last_words
    }

    /// What [`Claims::begin_release`] said is on disk, or will never be. To be called before the pod is gone.
    pub(crate) fn end_release(
        &mut self,
        pod: &PodUid,
        name: &PodName,
        last_words: &[ClaimUid],
        is_written: bool,
    ) {
        for uid in last_words {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                if is_written {
                    entry.claim.pod = pod.clone();
                    entry.claim.pod_name = name.clone();
                    // Somebody came after all, who may have learned something.
                    entry.dirty |= entry.pods() != [pod.clone()];
                }
            }
            self.settle(uid);
        }
    }

    /// An admission ended in nothing.
    pub(crate) fn leave(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.joiners.remove(pod);
            self.left_by(pod, name, uid);
        }
    }

    fn left_by(&mut self, pod: &PodUid, name: &PodName, uid: &ClaimUid) {
        if let Some(entry) = self.entries.get_mut(uid)
            && entry.is_unused()
        {
            if entry.claim.pod != *pod {
                entry.claim.pod = pod.clone();
                entry.claim.pod_name = name.clone();
                entry.dirty = true;
            }
            Self::unuse(entry);
            // Unpreparing starts afresh, whatever happened to preparing.
            entry.tasks.values_mut().for_each(Task::succeeded);
        }
        self.settle(uid);
    }

    // ---- joining

    /// Whether a pod can join a claim now.
    pub(crate) fn plan(&self, wanted: &AllocatedClaim, drivers: &Drivers) -> Result<(), ReserveError> {
        let unpreparing = |entry: &Entry, abandoned: Vec<DriverName>| ReserveError::Unpreparing {
            claim: entry.claim.key.clone(),
            uid: entry.claim.uid.clone(),
            drivers: entry.blocking().cloned().collect(),
            abandoned,
        };
        let missing = |driver: &DriverName| {
            let known = drivers.drivers.get(driver);
            let registered = known.and_then(|known| known.plugins.values().next_back());
            let last = known.and_then(|known| known.last.clone());
            Err(ReserveError::NoDriver {
                driver: driver.clone(),
                claim: wanted.key.clone(),
                seen: match (registered, drivers.unusable_since(driver), last) {
                    (Some(plugin), Some(since), _) => LastSeen::NotConnected {
                        endpoint: plugin.endpoint.clone(),
                        since,
                    },
                    (_, _, Some(last)) => LastSeen::Gone(last),
                    _ => LastSeen::Never,
                },
            })
        };
        let known = self.entries.get(&wanted.uid);
        if let Some(other) = known.filter(|entry| entry.claim.key != wanted.key) {
            return Err(ReserveError::ClaimUidTaken {
                claim: wanted.key.clone(),
                other: other.claim.key.clone(),
                uid: wanted.uid.clone(),
            });
        }
        if let Some(entry) = known.filter(|entry| entry.is_unused()) {
            // Drivers that were given up on are in the way of those who need them, and of nobody else.
            let is_needed = |driver: &&DriverName| wanted.drivers.contains_key(*driver);
            let needed: Vec<DriverName> = entry.claim.abandoned().filter(is_needed).cloned().collect();
            if !entry.is_abandoned() || !needed.is_empty() {
                return Err(unpreparing(entry, needed));
            }
        }
        if let Some(entry) = known.filter(|entry| !entry.is_unused()) {
            if !entry.claim.matches(wanted) {
                return Err(ReserveError::Reallocated {
                    claim: wanted.key.clone(),
                    pods: entry.pods(),
                });
            }
            for (driver, preparation) in &entry.claim.preparations {
                let allocated = wanted
                    .drivers
                    .get(driver)
                    .filter(|_| preparation.allocated.is_none());
                let pending = preparation.state == PreparationState::Pending
                    || allocated.is_some_and(|allocated| preparation.lacks(&allocated.devices));
                if pending && drivers.serving(driver).is_none() {
                    return missing(driver);
                }
            }
            return Ok(());
        }
        if let Some(entry) = self.by_key.get(&wanted.key).and_then(|uid| self.entries.get(uid)) {
            if !entry.is_unused() {
                return Err(ReserveError::ClaimNameTaken {
                    claim: wanted.key.clone(),
                    other: entry.claim.uid.clone(),
                    pods: entry.pods(),
                });
            }
            if entry.blocking().next().is_some() {
                return Err(unpreparing(entry, Vec::new()));
            }
        }
        for (driver, preparation) in Claim::new(wanted, &PodUid::from(""), &PodName::default()).preparations {
            let pending = preparation.state == PreparationState::Pending;
            if pending && drivers.serving(&driver).is_none() {
                return missing(&driver);
            }
        }
        Ok(())
    }

    /// An admission joins a claim. Only after [`Claims::plan`] said that it can.
    pub(crate) fn join(&mut self, pod: &PodUid, name: &PodName, wanted: &AllocatedClaim) {
        let uid = &wanted.uid;
        if self.entries.get(uid).is_some_and(Entry::is_unused) {
            self.use_again(Claim::new(wanted, pod, name));
        }
        let entry = self.entries.entry(uid.clone());
        let entry = entry.or_insert_with(|| Entry::new(Claim::new(wanted, pod, name), false));
        entry.joiners.insert(pod.clone());
        for (driver, preparation) in &mut entry.claim.preparations {
            if let (None, Some(allocated)) = (&preparation.allocated, wanted.drivers.get(driver)) {
                if preparation.lacks(&allocated.devices) {
                    preparation.state = PreparationState::Pending;
                }
                preparation.allocated = Some(allocated.devices.clone());
                entry.dirty = true;
            }
        }
        self.by_key.insert(wanted.key.clone(), uid.clone());
        self.settle(uid);
    }

    /// A claim that was abandoned is allocated anew, at other drivers. Those that were given up on stay on record, without
    /// what they prepared: nobody gets that.
    fn use_again(&mut self, anew: Claim) {
        let uid = anew.uid.clone();
        let Some(entry) = self.entries.get_mut(&uid) else {
            return;
        };
        for (driver, preparation) in &mut entry.claim.preparations {
            unindex_devices(&mut self.devices, &uid, driver, &preparation.devices);
            preparation.devices.clear();
        }
        let old = core::mem::replace(&mut entry.claim, anew);
        let given_up = old
            .preparations
            .into_iter()
            .filter(|(_, each)| each.is_abandoned());
        entry.claim.preparations.extend(given_up);
        // What the others had to do is done: no call is on its way or to be made.
        let tasks = entry.claim.preparations.iter().map(|(driver, each)| {
            let known = entry.tasks.remove(driver).filter(|_| each.is_abandoned());
            (driver.clone(), known.unwrap_or_default())
        });
        entry.tasks = tasks.collect();
        entry.is_intended = false;
        entry.dirty = true;
    }

    /// An admission of a claim that was abandoned ended before anything was asked for: what it brought is gone.
    fn unuse(entry: &mut Entry) {
        if !entry.is_intended && entry.on_disk {
            let Entry { claim, tasks, .. } = entry;
            claim.preparations.retain(|driver, each| {
                each.is_abandoned() || tasks.get(driver).is_some_and(|task| task.called)
            });
            tasks.retain(|driver, _| claim.preparations.contains_key(driver));
        }
    }

    /// The claims that must be on disk before a driver is called. What another admission is writing is not
    /// written twice: should that fail, it is here the next time.
    pub(crate) fn begin_intent(&mut self, id: ReservationId, uids: &[ClaimUid]) -> Vec<Claim> {
        let mut claims = Vec::new();
        for uid in uids {
            if let Some(entry) = self.entries.get_mut(uid)
                && !entry.is_intended
                && entry.writing == 0
            {
                entry.writing += 1;
                claims.push(entry.claim.clone());
            }
        }
        if !claims.is_empty() {
            let uids = claims.iter().map(|claim| claim.uid.clone());
            self.intents.entry(id).or_default().extend(uids);
        }
        claims
    }

    pub(crate) fn end_intent(&mut self, id: ReservationId, is_written: bool) {
        for uid in self.intents.remove(&id).unwrap_or_default() {
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
            }
            self.settle(&uid);
        }
    }

    /// The claims of a pod that is to be committed, as far as the disk does not have them like this; `None` if
    /// one is not prepared. One that needs no driver needs no intent either: it may be on its way to disk, or not even that.
    pub(crate) fn to_commit(&self, uids: &[ClaimUid]) -> Option<Vec<Claim>> {
        let mut claims = Vec::new();
        for uid in uids {
            let entry = self.entries.get(uid).filter(|entry| entry.claim.is_prepared())?;
            // A write that is in flight may say less, or fail.
            if entry.dirty || entry.writing > 0 || !entry.is_intended {
                claims.push(entry.claim.clone());
            }
        }
        Some(claims)
    }

    /// What [`Claims::to_commit`] returned is being written. What is learned from here on is not in it.
    pub(crate) fn begin_commit(&mut self, written: &[Claim]) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.committing |= entry.dirty;
                entry.dirty = false;
                entry.writing += 1;
            }
            self.settle(uid);
        }
    }

    /// It is on disk, or will never be. To be called before the pod holds them, or leaves them.
    pub(crate) fn end_commit(&mut self, written: &[Claim], is_written: bool) {
        for Claim { uid, .. } in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.on_disk |= is_written;
                entry.is_intended |= is_written;
                entry.dirty |= entry.committing && !is_written;
                entry.committing &= entry.writing > 0;
            }
            self.settle(uid);
        }
    }

    // ---- calls

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
                self.settle(uid);
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
            self.settle(uid);
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
                reason: cut(reason.into()),
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
            self.settle(&uid);
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

    // ---- records

    /// An operator gives up on a driver, for all claims that a pod has left. The claims that this is about.
    pub(crate) fn abandon(&mut self, pod: &PodUid, driver: &DriverName) -> Vec<ClaimUid> {
        let left = self.left.get(pod).cloned().unwrap_or_default();
        left.into_iter()
            .filter(|uid| self.abandon_claim(uid, driver))
            .collect()
    }

    /// An operator gives up on a driver, for a claim that no pod wants. Whether the driver had something to do for it.
    pub(crate) fn abandon_claim(&mut self, uid: &ClaimUid, driver: &DriverName) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else {
            return false;
        };
        let is_left = entry.is_unused() && !entry.deleting;
        if !is_left || !entry.blocking().any(|blocking| blocking == driver) {
            return false;
        }
        if let Some(preparation) = entry.claim.preparations.get_mut(driver) {
            preparation.state = PreparationState::Abandoned;
            entry.dirty = true;
        }
        self.settle(uid);
        true
    }

    pub(crate) fn has_unrecorded(&self) -> bool {
        !self.to_write.is_empty() || !self.done.is_empty()
    }

    pub(crate) fn begin_record(&mut self) -> Option<Record> {
        if !self.has_unrecorded() {
            return None;
        }
        let id = RecordId(self.next_record);
        self.next_record += 1;
        let mut record = Record {
            id,
            put: Vec::new(),
            delete: self.done.iter().cloned().collect(),
        };
        for uid in self.to_write.clone() {
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.dirty = false;
                entry.writing += 1;
                record.put.push(entry.claim.clone());
            }
            self.settle(&uid);
        }
        for uid in &record.delete {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.deleting = true;
            }
            self.settle(uid);
        }
        self.records.insert(id, record.clone());
        Some(record)
    }

    /// An operator does not even want to know any longer that drivers were given up on: the record of a claim is to be
    /// deleted as it is. Ends as any record.
    pub(crate) fn begin_forget(&mut self, uid: &ClaimUid) -> Result<Record, NotForgotten> {
        let entry = self.entries.get_mut(uid).ok_or(NotForgotten::Unknown)?;
        let claim = || entry.claim.key.clone();
        if !entry.is_unused() {
            let (claim, pods) = (claim(), entry.pods());
            return Err(NotForgotten::Held { claim, pods });
        }
        let drivers: Vec<DriverName> = entry.blocking().cloned().collect();
        if !drivers.is_empty() || entry.claim.abandoned().next().is_none() {
            let claim = claim();
            return Err(NotForgotten::NotAbandoned { claim, drivers });
        }
        if !entry.is_abandoned() || entry.tasks.values().any(Task::is_busy) {
            return Err(NotForgotten::InFlight { claim: claim() });
        }
        entry.deleting = true;
        let id = RecordId(self.next_record);
        self.next_record += 1;
        let record = Record {
            id,
            put: Vec::new(),
            delete: vec![uid.clone()],
        };
        self.records.insert(id, record.clone());
        self.settle(uid);
        Ok(record)
    }

    pub(crate) fn end_record(&mut self, id: RecordId, is_written: bool) {
        let Some(record) = self.records.remove(&id) else {
            return;
        };
        for Claim { uid, .. } in &record.put {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.writing = entry.writing.saturating_sub(1);
                entry.dirty |= !is_written;
            }
            self.settle(uid);
        }
        for uid in &record.delete {
            if is_written {
                self.forget(uid);
            } else if let Some(entry) = self.entries.get_mut(uid) {
                entry.deleting = false;
                self.settle(uid);
            }
        }
    }

    // ---- what is derived

    fn forget(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.remove(uid) else {
            return;
        };
        if self.by_key.get(&entry.claim.key) == Some(uid) {
            self.by_key.remove(&entry.claim.key);
        }
        if let Some(pod) = &entry.left {
            remove(&mut self.left, pod, uid);
        }
        if entry.counts {
            self.in_use.remove(&entry.claim);
        }
        self.counted_as(uid, entry.counted, None);
        for (driver, preparation) in &entry.claim.preparations {
            unindex_devices(&mut self.devices, uid, driver, &preparation.devices);
            remove(&mut self.failing, driver, uid);
            let queued = entry.tasks.get(driver).and_then(|task| task.queued);
            if let Some(queued) = queued {
                remove(&mut self.due, driver, &(queued, uid.clone()));
            }
        }
        self.to_write.remove(uid);
        self.done.remove(uid);
    }

    /// A claim is further than it was.
    fn counted_as(&mut self, uid: &ClaimUid, before: Option<Phase>, after: Option<Phase>) {
        if before == after {
            return;
        }
        if let Some(count) = before.and_then(|phase| self.phases.get_mut(&phase)) {
            *count = count.saturating_sub(1);
        }
        if let Some(phase) = after {
            *self.phases.entry(phase).or_default() += 1;
        }
        if before == Some(Phase::Preparing) {
            self.preparing.remove(uid);
        }
        if after == Some(Phase::Preparing) {
            self.preparing.insert(uid.clone());
        }
    }

    /// Brings up to date what is derived from a claim. One that was never written and that nobody wants is gone.
    fn settle(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.get(uid) else {
            return;
        };
        let is_done = entry.is_done();
        if is_done && !entry.on_disk {
            self.forget(uid);
            return;
        }
        let is_to_be_written = entry.is_to_be_written();
        let counts = !entry.holders.is_empty() && entry.claim.is_prepared();
        match (entry.counts, counts) {
            (false, true) => self.in_use.add(&entry.claim),
            (true, false) => self.in_use.remove(&entry.claim),
            _ => {}
        }
        let (before, phase) = (entry.counted, Some(entry.phase()));
        let left = entry.is_unused().then(|| entry.claim.pod.clone());
        if entry.left != left {
            if let Some(pod) = &entry.left {
                remove(&mut self.left, pod, uid);
            }
            if let Some(pod) = &left {
                self.left.entry(pod.clone()).or_default().insert(uid.clone());
            }
        }
        let due: Vec<Option<Moment>> = entry
            .claim
            .preparations
            .iter()
            .map(|(driver, preparation)| entry.due(driver, preparation))
            .collect();
        self.counted_as(uid, before, phase);
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        entry.left = left;
        entry.counts = counts;
        entry.counted = phase;
        for ((driver, task), due) in entry.tasks.iter_mut().zip(due) {
            if task.failures > 0 {
                self.failing
                    .entry(driver.clone())
                    .or_default()
                    .insert(uid.clone());
            } else {
                remove(&mut self.failing, driver, uid);
            }
            if task.queued != due {
                if let Some(queued) = task.queued {
                    remove(&mut self.due, driver, &(queued, uid.clone()));
                }
                if let Some(due) = due {
                    self.due
                        .entry(driver.clone())
                        .or_default()
                        .insert((due, uid.clone()));
                }
                task.queued = due;
            }
        }
        for (set, is_in) in [(&mut self.to_write, is_to_be_written), (&mut self.done, is_done)] {
            if is_in {
                set.insert(uid.clone());
            } else {
                set.remove(uid);
            }
        }
    }

    /// What memory a driver would fill with these devices for a claim, and all that it has prepared for others.
    pub(crate) fn memory_with(
        &self,
        driver: &DriverName,
        uid: &ClaimUid,
        devices: &[PreparedDevice],
    ) -> usize {
        let memory = |devices: &[PreparedDevice]| devices.iter().map(PreparedDevice::memory).sum::<usize>();
        let preparations = self.entries.get(uid).map(|entry| &entry.claim.preparations);
        let known = preparations.and_then(|preparations| preparations.get(driver));
        let before = known.map_or(0, |known| memory(&known.devices));
        let all = self.devices.bytes.get(driver).copied().unwrap_or(0);
        all.saturating_sub(before) + memory(devices)
    }

    /// The claims that use a device.
    pub(crate) fn using(&self, driver: &DriverName, device: &PoolDevice) -> impl Iterator<Item = &Entry> {
        let of_driver = self.devices.users.get(driver);
        let uids = of_driver.and_then(|devices| devices.get(device));
        uids.into_iter().flatten().filter_map(|uid| self.entries.get(uid))
    }

    /// Recomputes what is derived, and compares. For tests.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let mut again = Self {
            entries: self.entries.clone(),
            ..Self::default()
        };
        for entry in again.entries.values_mut() {
            entry.left = None;
            entry.counts = false;
            entry.counted = None;
            entry.tasks.values_mut().for_each(|task| task.queued = None);
        }
        for (uid, entry) in &self.entries {
            for (driver, preparation) in &entry.claim.preparations {
                index_devices(&mut again.devices, uid, driver, &preparation.devices);
            }
            again.settle(uid);
        }
        assert_eq!(
            again.entries.len(),
            self.entries.len(),
            "a claim is nobody's and not on disk"
        );
        assert_eq!(
            again.left, self.left,
            "the index of claims that pods left is out of step"
        );
        assert_eq!(again.due, self.due, "the index of calls to make is out of step");
        assert_eq!(
            again.failing, self.failing,
            "the index of failing calls is out of step"
        );
        assert_eq!(
            again.to_write, self.to_write,
            "the index of claims to write is out of step"
        );
        assert_eq!(
            again.done, self.done,
            "the index of claims to delete is out of step"
        );
        assert_eq!(again.devices, self.devices, "the index of devices is out of step");
        assert_eq!(
            again.in_use, self.in_use,
            "the number of claims in use is out of step"
        );
        let counted = |phases: &BTreeMap<Phase, usize>| {
            let counts = phases.iter().filter(|(_, count)| **count > 0);
            counts.map(|(phase, count)| (*phase, *count)).collect::<Vec<_>>()
        };
        assert_eq!(
            counted(&again.phases),
            counted(&self.phases),
            "the number of claims by phase is out of step"
        );
        assert_eq!(
            again.preparing, self.preparing,
            "the index of claims that are being prepared is out of step"
        );
        for (key, uid) in &self.by_key {
            assert_eq!(self.entries.get(uid).map(|entry| &entry.claim.key), Some(key));
        }
        for entry in self.entries.values().filter(|entry| !entry.is_unused()) {
            let named = self.by_key.get(&entry.claim.key);
            assert_eq!(named, Some(&entry.claim.uid), "two claims have one name");
        }
        let busy: BTreeSet<(CallId, &ClaimUid, &DriverName)> = self
            .entries
            .iter()
            .flat_map(|(uid, entry)| {
                let tasks = entry.tasks.iter();
                tasks.filter_map(move |(driver, task)| Some((task.busy?, uid, driver)))
            })
            .collect();
        let calls: BTreeSet<(CallId, &ClaimUid, &DriverName)> = self
            .calls
            .iter()
            .flat_map(|(id, call)| call.claims.iter().map(move |uid| (*id, uid, &call.driver)))
            .collect();
        assert_eq!(
            busy, calls,
            "a call is lost, or a driver is called twice for a claim"
        );
        for (driver, running) in &self.background {
            let calls = self
                .calls
                .values()
                .filter(|call| call.background && call.driver == *driver);
            assert_eq!(*running, calls.count());
        }
    }
}

/// Who uses a device, and what memory the devices of a driver take.
#[derive(Debug, Default, PartialEq, Eq)]
struct DeviceIndex {
    users: BTreeMap<DriverName, BTreeMap<PoolDevice, BTreeSet<ClaimUid>>>,
    bytes: BTreeMap<DriverName, usize>,
}

fn index_devices(index: &mut DeviceIndex, uid: &ClaimUid, driver: &DriverName, devices: &[PreparedDevice]) {
    for device in devices {
        let users = index.users.entry(driver.clone()).or_default();
        users.entry(device.place()).or_default().insert(uid.clone());
        *index.bytes.entry(driver.clone()).or_default() += device.memory();
    }
}

fn unindex_devices(index: &mut DeviceIndex, uid: &ClaimUid, driver: &DriverName, devices: &[PreparedDevice]) {
    let Some(of_driver) = index.users.get_mut(driver) else {
        return;
    };
    for device in devices {
        remove(of_driver, &device.place(), uid);
    }
    if of_driver.is_empty() {
        index.users.remove(driver);
        index.bytes.remove(driver);
    } else if let Some(bytes) = index.bytes.get_mut(driver) {
        let freed: usize = devices.iter().map(PreparedDevice::memory).sum();
        *bytes = bytes.saturating_sub(freed);
    }
}

impl PreparedDevice {
    pub(crate) fn is_at(&self, place: &PoolDevice) -> bool {
        self.pool == place.pool && self.device == place.device
    }

    /// What it takes, roughly.
    pub fn memory(&self) -> usize {
        const ENTRY: usize = 64;
        let names = self.requests.iter().chain(&self.cdi_devices);
        let names: usize = names.map(|name| name.len() + ENTRY).sum();
        ENTRY + self.pool.len() + self.device.len() + self.share.as_ref().map_or(0, String::len) + names
    }

    /// Where it is.
    pub fn place(&self) -> PoolDevice {
        PoolDevice {
            pool: self.pool.clone(),
            device: self.device.clone(),
        }
    }
}

/// Removes a value, and the set that it was the last of.
fn remove<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
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
            reason: cut(reason),
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

#[cfg(test)]
mod tests;
