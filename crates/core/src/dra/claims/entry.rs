//! What is known of a claim besides its record.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::claim::UNPREPARE;
use super::{
    Claim, DeviceShare, FIRST_PAUSE_MS, Failure, LONGEST_PAUSE_MS, Operation, Preparation, PreparationState,
};
use crate::dra::view::Phase;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid};

/// What is known of a driver's part of a claim besides the record.
#[derive(Debug, Clone, Default)]
pub(crate) struct Task {
    pub(super) busy: Option<CallId>,
    /// Whether the driver may know of the claim.
    pub(super) called: bool,
    pub(super) failures: u32,
    pub(crate) retry_at: Moment,
    pub(crate) failure: Option<Failure>,
    /// Its place in `due`.
    pub(super) queued: Option<Moment>,
}

impl Task {
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    pub(super) fn failed(&mut self, failure: Failure, now: Moment) {
        let pause = FIRST_PAUSE_MS << self.failures.min(16);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now.after(pause.min(LONGEST_PAUSE_MS));
        self.failure = Some(failure);
    }

    pub(super) fn succeeded(&mut self) {
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
    /// Whether that record has the drivers that are to prepare it. Not if it only has those that were given up on.
    pub(crate) is_intended: bool,
    /// Whether memory knows more than the disk.
    pub(super) dirty: bool,
    /// Whether a commit in flight has what the disk has not.
    pub(super) committing: bool,
    /// Writes of its record that are in flight.
    pub(super) writing: usize,
    /// The deletion of its record is in flight.
    pub(super) deleting: bool,
    pub(crate) tasks: BTreeMap<DriverName, Task>,
    /// The devices that it has in the index of holders.
    pub(super) holds: BTreeSet<DeviceShare>,
    /// Its place in `left`.
    pub(super) left: Option<PodUid>,
    /// Whether it counts in `in_use`.
    pub(super) counts: bool,
    /// As what it counts in `phases`.
    pub(super) counted: Option<Phase>,
}

impl Entry {
    pub(super) fn new(claim: Claim, on_disk: bool) -> Self {
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
            is_intended: on_disk,
            dirty: false,
            committing: false,
            writing: 0,
            deleting: false,
            holds: BTreeSet::new(),
            left: None,
            counts: false,
            counted: None,
        }
    }

    /// How far it is.
    pub(crate) fn phase(&self) -> Phase {
        match (self.is_unused(), self.claim.is_prepared()) {
            (false, true) => Phase::Prepared,
            (false, false) => Phase::Preparing,
            (true, _) if self.blocking().next().is_some() => Phase::Unpreparing,
            (true, _) if self.claim.abandoned().next().is_some() => Phase::Abandoned,
            (true, _) => Phase::Unprepared,
        }
    }

    /// Whether no pod wants it any longer.
    pub(crate) fn is_unused(&self) -> bool {
        self.holders.is_empty() && self.joiners.is_empty()
    }

    pub(crate) fn pods(&self) -> Vec<PodUid> {
        self.holders.union(&self.joiners).cloned().collect()
    }

    pub(super) fn is_called(&self, driver: &DriverName) -> bool {
        self.tasks.get(driver).is_some_and(|task| task.called)
    }

    /// Whether a driver must still be asked to unprepare it, once it is unused.
    pub(super) fn needs_unprepare(&self, driver: &DriverName, preparation: &Preparation) -> bool {
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
                !preparation.is_abandoned() && (busy || self.needs_unprepare(driver, preparation))
            })
            .map(|(driver, _)| driver)
    }

    /// Returns `true` if a pod may use the claim again at drivers that were not given up on: all of them have unprepared
    /// it, and no write of what it was is in flight, which would pass for one of what it becomes.
    pub(super) fn is_reusable(&self) -> bool {
        self.is_unused() && self.writing == 0 && !self.deleting && self.blocking().next().is_none()
    }

    /// Returns `true` if only drivers that were given up on have not unprepared the claim.
    pub(super) fn is_abandoned(&self) -> bool {
        self.is_reusable() && self.claim.abandoned().next().is_some()
    }

    /// Whether no pod wants it, and no driver has anything left to do for it.
    pub(super) fn is_over(&self) -> bool {
        let done = |(driver, preparation): (&DriverName, &Preparation)| {
            let busy = self.tasks.get(driver).is_some_and(Task::is_busy);
            !busy && !self.needs_unprepare(driver, preparation)
        };
        self.is_unused() && self.claim.preparations.iter().all(done)
    }

    /// Whether nothing is left to do for it, and nothing in flight.
    pub(super) fn is_done(&self) -> bool {
        self.writing == 0 && !self.deleting && self.is_over()
    }

    /// Whether a driver is to be called without anybody waiting for it, and since when.
    pub(super) fn due(&self, driver: &DriverName, preparation: &Preparation) -> Option<Moment> {
        let task = self.tasks.get(driver).filter(|task| !task.is_busy())?;
        let wanted = if self.is_unused() || preparation.is_abandoned() {
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

    pub(super) fn is_to_be_written(&self) -> bool {
        // What an admission has learned is written with its pod, and what is over is deleted.
        self.dirty && self.on_disk && !self.deleting && self.joiners.is_empty() && !self.is_over()
    }
}

#[derive(Debug, Clone)]
pub(super) struct InFlight {
    pub(super) operation: Operation,
    pub(super) driver: DriverName,
    pub(super) connection: ConnectionId,
    pub(super) claims: Vec<ClaimUid>,
    /// Whether nobody waits for it.
    pub(super) background: bool,
}

/// How many claims that pods hold are prepared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct InUse {
    pub(crate) all: usize,
    pub(crate) by_driver: BTreeMap<DriverName, usize>,
}

impl InUse {
    pub(super) fn add(&mut self, claim: &Claim) {
        self.all += 1;
        for driver in claim.used_drivers() {
            *self.by_driver.entry(driver.clone()).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, claim: &Claim) {
        self.all = self.all.saturating_sub(1);
        for driver in claim.used_drivers() {
            if let Some(count) = self.by_driver.get_mut(driver) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.by_driver.remove(driver);
                }
            }
        }
    }
}
