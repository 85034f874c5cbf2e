//! Exponential backoff between attempts, reset after a connection that lasted.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// A connection that lasted this long resets the backoff.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Pauses that double from a minimum to a maximum.
#[derive(Debug)]
pub(crate) struct Backoff {
    builder: ExponentialBuilder,
    pauses: ExponentialBackoff,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        let builder = ExponentialBuilder::new().with_min_delay(min).with_max_delay(max);
        let builder = builder.without_max_times();
        let pauses = builder.build();
        Self { builder, pauses, max }
    }

    /// Returns the next pause.
    pub(crate) fn next_pause(&mut self) -> Duration {
        self.pauses.next().unwrap_or(self.max)
    }

    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.next_pause()).await;
    }

    pub(crate) fn reset(&mut self) {
        self.pauses = self.builder.build();
    }

    /// Resets the backoff if a connection lasted longer than [`STABLE_AFTER`].
    pub(crate) fn reset_after(&mut self, lasted: Duration) {
        if lasted > STABLE_AFTER {
            self.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum_until_a_connection_lasts() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::new(second, 5 * second);
        let pauses: Vec<Duration> = (0..5).map(|_| backoff.next_pause()).collect();
        assert_eq!(pauses, [1, 2, 4, 5, 5].map(|seconds| seconds * second));
        backoff.reset_after(second);
        assert_eq!(backoff.next_pause(), 5 * second);
        backoff.reset_after(2 * STABLE_AFTER);
        assert_eq!(backoff.next_pause(), second);
    }
}
