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
//! `by_key`, `left`, `due`, `failing`, `to_write`, `done`, `devices` and `in_use` are derived: with ten thousand claims
//! nobody wants to look through all of them. `Claims::settle` keeps them, and `check` recomputes them, after
//! every step of the history tests.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::answers::{self, InvalidAnswer};
use super::drivers::Drivers;
use super::health::{PoolDevice, cut};
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid, RecordId, ReservationId};
use crate::node::ReserveError;
use crate::pod::PodName;

/// How many claims are put into one call.
pub const MOST_CLAIMS: usize = 256;
/// How many calls of one driver run at a time for which nobody waits.
pub const MOST_CALLS: usize = 8;
/// The pause after the first failure; it doubles with each.
pub const FIRST_PAUSE_MS: u64 = 1000;
/// The longest pause.
pub const LONGEST_PAUSE_MS: u64 = 60 * 1000;

/// What people call a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClaimKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A device that the scheduler gave to a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllocatedDevice {
    /// For which of the claim's requests; `request/subrequest` if it was one of several alternatives.
    pub request: String,
    /// Its pool.
    pub pool: String,
    /// Its name, unique within its pool only.
    pub device: String,
    /// Which share of it.
    pub share: Option<String>,
    /// For administration: others may use it too.
    pub admin_access: bool,
}

/// One line of a claim's allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationResult {
    /// The driver.
    pub driver: DriverName,
    /// The device.
    pub device: AllocatedDevice,
    /// Node operations that this device does not need.
    pub skip: Vec<String>,
}

/// A claim as a pod brings it: allocated, checked, and this pod may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// What is allocated, by driver.
    pub drivers: BTreeMap<DriverName, Allocated>,
}

/// What a claim has of one driver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allocated {
    /// The devices, sorted.
    pub devices: Vec<AllocatedDevice>,
    /// Node operations that none of them needs.
    pub skip: BTreeSet<String>,
}

const ALL_OPERATIONS: &str = "*";
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

impl AllocatedClaim {
    /// Groups an allocation by driver. An operation is skipped if none of the driver's devices needs it.
    pub fn new(key: ClaimKey, uid: ClaimUid, results: impl IntoIterator<Item = AllocationResult>) -> Self {
        let mut skips: BTreeMap<DriverName, Vec<BTreeSet<String>>> = BTreeMap::new();
        let mut drivers: BTreeMap<DriverName, Allocated> = BTreeMap::new();
        for result in results {
            let skip = skips.entry(result.driver.clone()).or_default();
            skip.push(result.skip.into_iter().collect());
            drivers
                .entry(result.driver)
                .or_default()
                .devices
                .push(result.device);
        }
        for (driver, allocated) in &mut drivers {
            allocated.devices.sort();
            allocated.skip = skipped_by_all(skips.get(driver).map_or(&[][..], Vec::as_slice));
        }
        Self { key, uid, drivers }
    }
}

fn skipped_by_all(lists: &[BTreeSet<String>]) -> BTreeSet<String> {
    let all = |operation: &str| {
        let skips = |list: &BTreeSet<String>| list.contains(operation) || list.contains(ALL_OPERATIONS);
        lists.iter().all(skips)
    };
    if all(ALL_OPERATIONS) {
        return lists
            .iter()
            .flatten()
            .filter(|each| *each == ALL_OPERATIONS)
            .cloned()
            .collect();
    }
    let named = lists.iter().flatten().filter(|each| *each != ALL_OPERATIONS);
    named.filter(|each| all(each)).cloned().collect()
}

/// A device that a driver made usable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// For which requests of the claim; for all if there are none.
    pub requests: Vec<String>,
    /// Its pool.
    pub pool: String,
    /// Its name, unique within its pool only.
    pub device: String,
    /// Which share of it.
    pub share: Option<String>,
    /// Qualified CDI device names.
    pub cdi_devices: Vec<String>,
}

/// A claim on record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// While no pod holds it: the pod that it was meant for, or that held it last.
    pub pod: PodUid,
    /// What that pod is called; empty if it is not known.
    pub pod_name: PodName,
    /// What each of its drivers does for it.
    pub preparations: BTreeMap<DriverName, Preparation>,
}

/// What a driver does for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preparation {
    /// What is allocated, sorted; `None` if the claim was imported and nobody has said.
    pub allocated: Option<Vec<AllocatedDevice>>,
    /// Node operations that are not needed.
    pub skip: BTreeSet<String>,
    /// How far it is.
    pub state: PreparationState,
    /// What it made usable, in its own order. Kept through a reboot, until it has answered again.
    pub devices: Vec<PreparedDevice>,
}

/// How far a driver is with a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PreparationState {
    /// It has not said that the claim is prepared.
    Pending,
    /// It has.
    Prepared,
    /// It has undone that.
    Unprepared,
    /// An operator gave up on it: nobody waits. Should the driver come back, it is still asked to unprepare.
    Abandoned,
}

impl Preparation {
    fn skips(&self, operation: &str) -> bool {
        self.skip.contains(operation) || self.skip.contains(ALL_OPERATIONS)
    }
}

impl Claim {
    fn new(allocated: &AllocatedClaim, pod: &PodUid, name: &PodName) -> Self {
        let preparation = |(driver, allocated): (&DriverName, &Allocated)| {
            let mut preparation = Preparation {
                allocated: Some(allocated.devices.clone()),
                skip: allocated.skip.clone(),
                state: PreparationState::Pending,
                devices: Vec::new(),
            };
            if preparation.skips(PREPARE) {
                preparation.state = PreparationState::Prepared;
            }
            (driver.clone(), preparation)
        };
        Self {
            key: allocated.key.clone(),
            uid: allocated.uid.clone(),
            pod: pod.clone(),
            pod_name: name.clone(),
            preparations: allocated.drivers.iter().map(preparation).collect(),
        }
    }

    /// A claim as a kubelet's file has it, with the operations that each driver skips and the devices that it is known to
    /// have prepared. What is allocated is not in such a file.
    pub fn imported(
        key: ClaimKey,
        uid: ClaimUid,
        pod: PodUid,
        drivers: impl IntoIterator<Item = (DriverName, BTreeSet<String>, Vec<PreparedDevice>)>,
    ) -> Self {
        let preparation = |(driver, skip, devices): (DriverName, BTreeSet<String>, Vec<PreparedDevice>)| {
            let mut preparation = Preparation {
                allocated: None,
                skip,
                state: PreparationState::Prepared,
                devices,
            };
            if preparation.devices.is_empty() && !preparation.skips(PREPARE) {
                preparation.state = PreparationState::Pending;
            }
            (driver, preparation)
        };
        Self {
            key,
            uid,
            pod,
            pod_name: PodName::default(),
            preparations: drivers.into_iter().map(preparation).collect(),
        }
    }

    /// Takes over what is known to be allocated, from an earlier record of the same claim, as far as the devices that are
    /// prepared are among that.
    pub fn remember(&mut self, earlier: &Self) {
        for (driver, preparation) in &mut self.preparations {
            let known = earlier.preparations.get(driver);
            let known = known.filter(|known| known.skip == preparation.skip);
            if let Some(allocated) = known.and_then(|known| known.allocated.as_ref()) {
                let is_allocated = |device: &PreparedDevice| {
                    let mut among = allocated.iter();
                    among.any(|each| each.pool == device.pool && each.device == device.device)
                };
                if preparation.devices.iter().all(is_allocated) {
                    preparation.allocated = Some(allocated.clone());
                }
            }
        }
    }

    /// Whether every driver has answered.
    pub fn is_prepared(&self) -> bool {
        let prepared = |each: &Preparation| each.state == PreparationState::Prepared;
        self.preparations.values().all(prepared)
    }

    /// The machine was booted since this was recorded: what was prepared must be prepared again. Whether that
    /// changed anything.
    pub fn rebooted(&mut self) -> bool {
        let mut changed = false;
        for preparation in self.preparations.values_mut() {
            if preparation.state == PreparationState::Prepared && !preparation.skips(PREPARE) {
                preparation.state = PreparationState::Pending;
                changed = true;
            }
        }
        changed
    }

    /// Whether a pod that brings the claim means the same allocation. Of an imported claim only the devices are
    /// known that it was prepared with.
    fn matches(&self, other: &AllocatedClaim) -> bool {
        let same = |(driver, preparation): (&DriverName, &Preparation)| {
            other.drivers.get(driver).is_some_and(|allocated| {
                let is_allocated = |known: &PreparedDevice| {
                    let is_it =
                        |each: &AllocatedDevice| each.pool == known.pool && each.device == known.device;
                    known.device.is_empty() || allocated.devices.iter().any(is_it)
                };
                let devices = match &preparation.allocated {
                    Some(devices) => *devices == allocated.devices,
                    None => preparation.devices.iter().all(is_allocated),
                };
                devices && preparation.skip == allocated.skip
            })
        };
        self.key == other.key
            && self.preparations.len() == other.drivers.len()
            && self.preparations.iter().all(same)
    }
}

/// Why a driver's part of a claim is not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The driver could not.
    #[error("driver {driver} reports for ResourceClaim {claim}: {reason}")]
    Driver {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// What it says.
        reason: String,
    },
    /// There was no answer.
    #[error("driver {driver}: {reason}")]
    Call {
        /// The driver.
        driver: DriverName,
        /// What happened.
        reason: String,
    },
    /// The answer makes no sense.
    #[error(transparent)]
    Invalid(#[from] InvalidAnswer),
}

/// What is asked of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// `NodePrepareResources`.
    Prepare,
    /// `NodeUnprepareResources`.
    Unprepare,
}

/// A call to make now. It ends with [`crate::Node::prepared`], [`crate::Node::unprepared`] or
/// [`crate::Node::call_failed`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Which one.
    pub id: CallId,
    /// What is asked.
    pub operation: Operation,
    /// Whose plugin.
    pub driver: DriverName,
    /// Which of them.
    pub connection: ConnectionId,
    /// For which claims.
    pub claims: Vec<(ClaimUid, ClaimKey)>,
}

/// Changes of claims that nobody waits for, to be written in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// To say how it ended.
    pub id: RecordId,
    /// What is different now.
    pub put: Vec<Claim>,
    /// What is to be deleted.
    pub delete: Vec<ClaimUid>,
}

/// What is known of a driver's part of a claim besides the record.
#[derive(Debug, Clone, Default)]
pub(crate) struct Task {
    busy: Option<CallId>,
    /// Whether the driver may know of the claim.
    called: bool,
    failures: u32,
    pub(crate) retry_at: Moment,
    pub(crate) failure: Option<Failure>,
    /// Its place in `due`.
    queued: Option<Moment>,
}

impl Task {
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    fn failed(&mut self, failure: Failure, now: Moment) {
        let pause = FIRST_PAUSE_MS << self.failures.min(16);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now.after(pause.min(LONGEST_PAUSE_MS));
        self.failure = Some(failure);
    }

    fn succeeded(&mut self) {
        self.failures = 0;
        self.retry_at = Moment::default();
        self.failure = None;
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) claim: Claim,
    /// Pods on record that hold it.
    pub(crate) holders: BTreeSet<PodUid>,
    /// Pods whose admission has joined it and has not ended.
    pub(crate) joiners: BTreeSet<PodUid>,
    /// Whether there is a record of it on disk.
    pub(crate) on_disk: bool,
    /// Whether memory knows more than the disk.
    dirty: bool,
    /// Writes of its record that are in flight.
    writing: usize,
    /// The deletion of its record is in flight.
    deleting: bool,
    pub(crate) tasks: BTreeMap<DriverName, Task>,
    /// Its place in `left`.
    left: Option<PodUid>,
    /// Whether it counts in `in_use`.
    counts: bool,
}

impl Entry {
    fn new(claim: Claim, on_disk: bool) -> Self {
        // Of a claim from disk nobody knows whether a driver was called for it.
        let task = Task {
            called: on_disk,
            ..Task::default()
        };
        let drivers = claim.preparations.keys().cloned();
        Self {
            tasks: drivers.map(|driver| (driver, task.clone())).collect(),
            claim,
            holders: BTreeSet::new(),
            joiners: BTreeSet::new(),
            on_disk,
            dirty: false,
            writing: 0,
            deleting: false,
            left: None,
            counts: false,
        }
    }

    /// Whether no pod wants it any longer.
    pub(crate) fn is_unused(&self) -> bool {
        self.holders.is_empty() && self.joiners.is_empty()
    }

    pub(crate) fn pods(&self) -> Vec<PodUid> {
        self.holders.union(&self.joiners).cloned().collect()
    }

    fn is_called(&self, driver: &DriverName) -> bool {
        self.tasks.get(driver).is_some_and(|task| task.called)
    }

    /// Whether a driver must still be asked to unprepare it, once it is unused.
    fn needs_unprepare(&self, driver: &DriverName, preparation: &Preparation) -> bool {
        preparation.state != PreparationState::Unprepared
            && !preparation.skips(UNPREPARE)
            && self.is_called(driver)
    }

    /// The drivers that must unprepare an unused claim before it is out of the way.
    pub(crate) fn blocking(&self) -> impl Iterator<Item = &DriverName> {
        let preparations = self.claim.preparations.iter();
        preparations
            .filter(|(driver, preparation)| {
                let busy = self.tasks.get(*driver).is_some_and(Task::is_busy);
                preparation.state != PreparationState::Abandoned
                    && (busy || self.needs_unprepare(driver, preparation))
            })
            .map(|(driver, _)| driver)
    }

    /// Whether nothing is left to do for it, and nothing in flight.
    fn is_done(&self) -> bool {
        let done = |(driver, preparation): (&DriverName, &Preparation)| {
            let busy = self.tasks.get(driver).is_some_and(Task::is_busy);
            !busy && !self.needs_unprepare(driver, preparation)
        };
        self.is_unused() && self.writing == 0 && !self.deleting && self.claim.preparations.iter().all(done)
    }

    /// Whether a driver is to be called without anybody waiting for it, and since when.
    fn due(&self, driver: &DriverName, preparation: &Preparation) -> Option<Moment> {
        let task = self.tasks.get(driver).filter(|task| !task.is_busy())?;
        let wanted = if self.is_unused() {
            self.needs_unprepare(driver, preparation)
        } else {
            // An admission calls for itself. An imported claim waits for one: until then nobody has said that
            // its pod is still there.
            !self.holders.is_empty()
                && preparation.state == PreparationState::Pending
                && preparation.allocated.is_some()
        };
        (wanted && self.on_disk && !self.deleting).then_some(task.retry_at)
    }

    fn is_to_be_written(&self) -> bool {
        // What an admission has learned is written with its pod.
        self.dirty && self.on_disk && !self.deleting && self.joiners.is_empty() && !self.is_done()
    }
}

#[derive(Debug, Clone)]
struct InFlight {
    operation: Operation,
    driver: DriverName,
    connection: ConnectionId,
    claims: Vec<ClaimUid>,
    /// Whether nobody waits for it.
    background: bool,
}

/// How many claims that pods hold are prepared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct InUse {
    pub(crate) all: usize,
    pub(crate) by_driver: BTreeMap<DriverName, usize>,
}

impl InUse {
    fn add(&mut self, claim: &Claim) {
        self.all += 1;
        for driver in claim.preparations.keys() {
            *self.by_driver.entry(driver.clone()).or_default() += 1;
        }
    }

    fn remove(&mut self, claim: &Claim) {
        self.all = self.all.saturating_sub(1);
        for driver in claim.preparations.keys() {
            if let Some(count) = self.by_driver.get_mut(driver) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.by_driver.remove(driver);
                }
            }
        }
    }
}

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
    /// Who uses a device.
    devices: BTreeMap<DriverName, BTreeMap<PoolDevice, BTreeSet<ClaimUid>>>,
    pub(crate) in_use: InUse,
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
            // Unpreparing starts afresh, whatever happened to preparing.
            entry.tasks.values_mut().for_each(Task::succeeded);
        }
        self.settle(uid);
    }

    // ---- joining

    /// Whether a pod can join a claim now.
    pub(crate) fn plan(&self, wanted: &AllocatedClaim, drivers: &Drivers) -> Result<(), ReserveError> {
        let unpreparing = |entry: &Entry| ReserveError::Unpreparing {
            claim: entry.claim.key.clone(),
            uid: entry.claim.uid.clone(),
            drivers: entry.blocking().cloned().collect(),
        };
        let missing = |driver: &DriverName| {
            let known = drivers.drivers.get(driver);
            let endpoint = known.and_then(|known| known.plugins.values().next_back());
            Err(ReserveError::NoDriver {
                driver: driver.clone(),
                claim: wanted.key.clone(),
                endpoint: endpoint.map(|plugin| plugin.endpoint.clone()),
                last: known.and_then(|known| known.last.clone()),
            })
        };
        if let Some(entry) = self.entries.get(&wanted.uid) {
            if entry.is_unused() {
                return Err(unpreparing(entry));
            }
            if !entry.claim.matches(wanted) {
                return Err(ReserveError::Reallocated {
                    claim: wanted.key.clone(),
                    pods: entry.pods(),
                });
            }
            for (driver, preparation) in &entry.claim.preparations {
                let pending = preparation.state == PreparationState::Pending;
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
                return Err(unpreparing(entry));
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
        let entry = self.entries.entry(uid.clone());
        let entry = entry.or_insert_with(|| Entry::new(Claim::new(wanted, pod, name), false));
        entry.joiners.insert(pod.clone());
        for (driver, preparation) in &mut entry.claim.preparations {
            if let (None, Some(allocated)) = (&preparation.allocated, wanted.drivers.get(driver)) {
                preparation.allocated = Some(allocated.devices.clone());
                entry.dirty = true;
            }
        }
        self.by_key.insert(wanted.key.clone(), uid.clone());
        self.settle(uid);
    }

    /// The claims that must be on disk before a driver is called. What another admission is writing is not
    /// written twice: should that fail, it is here the next time.
    pub(crate) fn begin_intent(&mut self, id: ReservationId, uids: &[ClaimUid]) -> Vec<Claim> {
        let mut claims = Vec::new();
        for uid in uids {
            if let Some(entry) = self.entries.get_mut(uid)
                && !entry.on_disk
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
            }
            self.settle(&uid);
        }
    }

    /// The claims of a pod that is to be committed, as far as the disk does not have them like this; `None` if
    /// one is not prepared.
    pub(crate) fn begin_commit(&self, uids: &[ClaimUid]) -> Option<Vec<Claim>> {
        let mut claims = Vec::new();
        for uid in uids {
            let entry = self.entries.get(uid).filter(|entry| entry.on_disk)?;
            if !entry.claim.is_prepared() {
                return None;
            }
            // A write that is in flight may say less, or fail.
            if entry.dirty || entry.writing > 0 {
                claims.push(entry.claim.clone());
            }
        }
        Some(claims)
    }

    /// The records that [`Claims::begin_commit`] returned are on disk.
    pub(crate) fn committed(&mut self, written: &[ClaimUid]) {
        for uid in written {
            if let Some(entry) = self.entries.get_mut(uid) {
                entry.dirty = false;
            }
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
                    Operation::Prepare => preparation.state == PreparationState::Pending,
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

    /// Calls for which nobody waits: unused claims are unprepared, and those that pods hold are prepared again
    /// after a reboot.
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
            let (unprepare, prepare): (Vec<ClaimUid>, Vec<ClaimUid>) = due
                .map(|(_, uid)| uid.clone())
                .partition(|uid| self.entries.get(uid).is_some_and(Entry::is_unused));
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
                let is_late = call.operation == Operation::Prepare && entry.is_unused();
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
                    Operation::Unprepare => preparation.state = PreparationState::Unprepared,
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
        let mut abandoned = Vec::new();
        for uid in self.left.get(pod).cloned().unwrap_or_default() {
            let Some(entry) = self.entries.get_mut(&uid).filter(|entry| !entry.deleting) else {
                continue;
            };
            if !entry.blocking().any(|blocking| blocking == driver) {
                continue;
            }
            if let Some(preparation) = entry.claim.preparations.get_mut(driver) {
                preparation.state = PreparationState::Abandoned;
                entry.dirty = true;
                abandoned.push(uid.clone());
            }
            self.settle(&uid);
        }
        abandoned
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
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        entry.left = left;
        entry.counts = counts;
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

    /// The claims that use a device.
    pub(crate) fn using(&self, driver: &DriverName, device: &PoolDevice) -> impl Iterator<Item = &Entry> {
        let uids = self.devices.get(driver).and_then(|devices| devices.get(device));
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

type DeviceIndex = BTreeMap<DriverName, BTreeMap<PoolDevice, BTreeSet<ClaimUid>>>;

fn index_devices(index: &mut DeviceIndex, uid: &ClaimUid, driver: &DriverName, devices: &[PreparedDevice]) {
    for device in devices {
        let devices = index.entry(driver.clone()).or_default();
        devices.entry(device.place()).or_default().insert(uid.clone());
    }
}

fn unindex_devices(index: &mut DeviceIndex, uid: &ClaimUid, driver: &DriverName, devices: &[PreparedDevice]) {
    let Some(of_driver) = index.get_mut(driver) else {
        return;
    };
    for device in devices {
        remove(of_driver, &device.place(), uid);
    }
    if of_driver.is_empty() {
        index.remove(driver);
    }
}

impl PreparedDevice {
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
