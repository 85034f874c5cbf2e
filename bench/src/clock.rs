//! Timestamps that processes can compare, and statistics of durations.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Returns nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let parts = u64::try_from(time.tv_sec)
        .ok()
        .zip(u64::try_from(time.tv_nsec).ok());
    parts.map_or(0, |(seconds, nanos)| seconds * 1_000_000_000 + nanos)
}

/// Repeated measurements of one duration.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<Duration>);

/// Statistics of [`Samples`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    pub(crate) p10_ms: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p90_ms: f64,
}

impl Samples {
    pub(crate) fn add(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn extend(&mut self, more: impl IntoIterator<Item = Duration>) {
        self.0.extend(more);
    }

    pub(crate) fn append(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    pub(crate) fn summary(&self) -> Summary {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = |percent: usize| {
            let place = sorted.len().saturating_sub(1) * percent / 100;
            sorted
                .get(place)
                .map_or(f64::NAN, |sample| sample.as_secs_f64() * 1e3)
        };
        Summary {
            count: sorted.len(),
            p10_ms: at(10),
            p50_ms: at(50),
            p90_ms: at(90),
        }
    }

    pub(crate) fn p50_ms(&self) -> f64 {
        self.summary().p50_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_the_order() {
        let mut samples = Samples::default();
        samples.extend([5, 1, 4, 2, 3].map(Duration::from_millis));
        let summary = samples.summary();
        assert_eq!((summary.count, summary.p50_ms), (5, 3.0));
        assert!(summary.p10_ms <= summary.p50_ms && summary.p50_ms <= summary.p90_ms);
    }

    #[test]
    fn an_empty_set_does_not_have_a_median() {
        assert!(Samples::default().p50_ms().is_nan());
    }

    #[test]
    fn the_clock_advances() {
        let earlier = now();
        assert!(earlier > 0 && now() >= earlier);
    }
}
