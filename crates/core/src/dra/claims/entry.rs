//! In-memory state of a claim besides its record.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::claim::UNPREPARE;
use super::{
    Claim, DeviceShare, Failure, MAX_BACKOFF_MS, MIN_BACKOFF_MS, Operation, Preparation, PreparationState,
};
use crate::dra::view::Phase;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, Moment, PodUid};

/// In-memory state of a driver's work for a claim.
#[derive(Debug, Clone, Default)]
pub(crate) struct Task {
    pub(super) busy: Option<CallId>,
    /// `true` if the driver may have been called for the claim.
    pub(super) called: bool,
    pub(super) failures: u32,
    pub(crate) retry_at: Moment,
    pub(crate) failure: Option<Failure>,
    /// Its time in the index `due`.
    pub(super) queued: Option<Moment>,
}

impl Task {
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    pub(super) fn failed(&mut self, failure: Failure, now: Moment) {
        let backoff = MIN_BACKOFF_MS << self.failures.min(16);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now.after(backoff.min(MAX_BACKOFF_MS));
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
    /// Recorded pods that hold it.
    pub(crate) holders: BTreeSet<PodUid>,
    /// Pods whose admission has joined it and has not ended.
    pub(crate) joiners: BTreeSet<PodUid>,
    /// `true` if it has a record on disk.
    pub(crate) on_disk: bool,
    /// `true` if that record has the drivers that prepare it. `false` if it has only abandoned drivers.
    pub(crate) is_intended: bool,
    /// `true` if memory is newer than the record.
    pub(super) dirty: bool,
    /// `true` if a commit in flight writes changes that are not on disk.
    pub(super) committing: bool,
    /// The number of writes of its record in flight.
    pub(super) writing: usize,
    /// `true` if the deletion of its record is in flight.
    pub(super) deleting: bool,
    pub(crate) tasks: BTreeMap<DriverName, Task>,
    /// Its devices in the index of holders.
    pub(super) holds: BTreeSet<DeviceShare>,
    /// Its pod in the index `left`.
    pub(super) left: Option<PodUid>,
    /// `true` if it counts in `in_use`.
    pub(super) counts: bool,
    /// Its phase in the index `phases`.
    pub(super) counted: Option<Phase>,
}

impl Entry {
    pub(super) fn new(claim: Claim, on_disk: bool) -> Self {
        // Drivers may have been called for a claim from disk.
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

    pub(crate) fn phase(&self) -> Phase {
        match (self.is_unused(), self.claim.is_prepared()) {
            (false, true) => Phase::Prepared,
            (false, false) => Phase::Preparing,
            (true, _) if self.blocking().next().is_some() => Phase::Unpreparing,
            (true, _) if self.claim.abandoned().next().is_some() => Phase::Abandoned,
            (true, _) => Phase::Unprepared,
        }
    }

    /// Returns `true` if no pod holds the claim and no admission has joined it.
    pub(crate) fn is_unused(&self) -> bool {
        self.holders.is_empty() && self.joiners.is_empty()
    }

    pub(crate) fn pods(&self) -> Vec<PodUid> {
        self.holders.union(&self.joiners).cloned().collect()
    }

    pub(super) fn is_called(&self, driver: &DriverName) -> bool {
        self.tasks.get(driver).is_some_and(|task| task.called)
    }

    /// Returns `true` if a driver must unprepare the claim once it is unused.
    pub(super) fn needs_unprepare(&self, driver: &DriverName, preparation: &Preparation) -> bool {
        preparation.state != PreparationState::Unprepared
            && !preparation.skips(UNPREPARE)
            && self.is_called(driver)
    }

    /// Returns the drivers that must unprepare an unused claim before it stops blocking other claims.
    pub(crate) fn blocking(&self) -> impl Iterator<Item = &DriverName> {
        let preparations = self.claim.preparations.iter();
        preparations
            .filter(|(driver, preparation)| {
                let busy = self.tasks.get(*driver).is_some_and(Task::is_busy);
                !preparation.is_abandoned() && (busy || self.needs_unprepare(driver, preparation))
            })
            .map(|(driver, _)| driver)
    }

    /// Returns `true` if a pod may reuse the claim: all drivers except abandoned ones have unprepared it, and no write of
    /// its old record is in flight, which could be mistaken for a write of the new record.
    pub(super) fn is_reusable(&self) -> bool {
        self.is_unused() && self.writing == 0 && !self.deleting && self.blocking().next().is_none()
    }

    /// Returns `true` if only abandoned drivers have not unprepared the claim.
    pub(super) fn is_abandoned(&self) -> bool {
        self.is_reusable() && self.claim.abandoned().next().is_some()
    }

    /// Returns `true` if the claim is unused and no driver has pending work for it.
    pub(super) fn is_over(&self) -> bool {
        let done = |(driver, preparation): (&DriverName, &Preparation)| {
            let busy = self.tasks.get(driver).is_some_and(Task::is_busy);
            !busy && !self.needs_unprepare(driver, preparation)
        };
        self.is_unused() && self.claim.preparations.iter().all(done)
    }

    /// Returns `true` if the claim is over, and no write is in flight.
    pub(super) fn is_done(&self) -> bool {
        self.writing == 0 && !self.deleting && self.is_over()
    }

    /// Returns the time of the background call of a driver, if one is due.
    pub(super) fn due(&self, driver: &DriverName, preparation: &Preparation) -> Option<Moment> {
        let task = self.tasks.get(driver).filter(|task| !task.is_busy())?;
        let wanted = if self.is_unused() || preparation.is_abandoned() {
            self.needs_unprepare(driver, preparation)
        } else {
            // Admissions make their own calls. An imported claim waits for an admission, which confirms that its pod
            // still exists.
            !self.holders.is_empty()
                && preparation.state == PreparationState::Pending
                && preparation.allocated.is_some()
        };
        (wanted && self.on_disk && !self.deleting).then_some(task.retry_at)
    }

    pub(super) fn is_to_be_written(&self) -> bool {
        // Changes during an admission are written with its pod, and claims that are over are deleted.
        self.dirty && self.on_disk && !self.deleting && self.joiners.is_empty() && !self.is_over()
    }
}

#[derive(Debug, Clone)]
pub(super) struct InFlight {
    pub(super) operation: Operation,
    pub(super) driver: DriverName,
    pub(super) connection: ConnectionId,
    pub(super) claims: Vec<ClaimUid>,
    /// `true` for a background call.
    pub(super) background: bool,
}

/// The number of prepared claims that pods hold.
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
