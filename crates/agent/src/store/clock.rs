//! Time for the store: the system's clock at start, monotonic from then on.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use devlet_core::Moment;

/// Returns the current time. It is called once, when a store is opened.
pub type Clock = Arc<dyn Fn() -> Moment + Send + Sync>;

/// Returns the time of the system's clock.
pub(crate) fn system_time() -> Moment {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Moment(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// A clock that advances steadily from its start time, even if the system's clock is set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MonotonicClock {
    start: Moment,
    started: Instant,
}

impl MonotonicClock {
    pub(crate) fn from(start: Moment) -> Self {
        let started = Instant::now();
        Self { start, started }
    }

    pub(crate) fn now(self) -> Moment {
        let since = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Moment(self.start.0.saturating_add(since))
    }
}
