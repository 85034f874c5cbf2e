//! Measures one admission: its outcome, its duration and its waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use devlet_core::ReserveError;
use tokio::time::Instant;

use super::names::Label;
use super::reason::{self, ADMITTED, GIVEN_UP, Outcome};
use super::{ByOutcome, ByResource, ByWait, Recorded};

/// An admission in progress. Dropped before `Admission::ended`, it counts as given up.
#[derive(Debug)]
pub struct Admission {
    recorded: Arc<Recorded>,
    pub(super) started: Instant,
    /// The total time of all waits, and the resource of the last one.
    waited: Mutex<Option<(Duration, Label)>>,
    outcome: Outcome,
}

impl Admission {
    pub(super) fn new(recorded: Arc<Recorded>) -> Self {
        Self {
            recorded,
            started: Instant::now(),
            waited: Mutex::default(),
            outcome: GIVEN_UP,
        }
    }

    /// Counts the admission as waiting until the returned guard is dropped.
    pub fn waits(&self, reason: &ReserveError) -> WaitGuard<'_> {
        let resource_name = match reason {
            ReserveError::NotServed { resource, .. }
            | ReserveError::NotListed { resource, .. }
            | ReserveError::NoHealthyDevice { resource, .. }
            | ReserveError::Reserved { resource, .. } => self.recorded.names.awaited(resource),
            _ => Label::none(),
        };
        let labels = ByWait {
            resource_name,
            reason: reason::of_reservation(reason),
        };
        self.recorded.waiting.get_or_create(&labels).inc();
        WaitGuard {
            admission: self,
            labels,
            since: Instant::now(),
        }
    }

    /// Records the outcome.
    pub(crate) fn ended<T, E>(mut self, result: &Result<T, E>)
    where
        Outcome: for<'a> From<&'a E>,
    {
        self.outcome = match result {
            Ok(_) => ADMITTED,
            Err(error) => Outcome::from(error),
        };
    }

    fn waited(&self) -> MutexGuard<'_, Option<(Duration, Label)>> {
        self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.recorded.admission_ended(self.outcome);
        let outcome = self.outcome.outcome;
        let times = &self.recorded.admission_times;
        times
            .get_or_create(&ByOutcome { outcome })
            .observe(self.started.elapsed().as_secs_f64());
        if let Some((waited, resource_name)) = self.waited().take() {
            let waits = self.recorded.waits.get_or_create(&ByResource { resource_name });
            waits.observe(waited.as_secs_f64());
        }
    }
}

/// Counts an admission as waiting until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it ends the wait"]
pub struct WaitGuard<'a> {
    admission: &'a Admission,
    labels: ByWait,
    pub(super) since: Instant,
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let recorded = &self.admission.recorded;
        recorded.waiting.get_or_create(&self.labels).dec();
        let mut waited = self.admission.waited();
        let before = waited.take().map_or(Duration::ZERO, |(time, _)| time);
        *waited = Some((before + self.since.elapsed(), self.labels.resource_name.clone()));
    }
}
