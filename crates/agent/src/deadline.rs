//! Deadlines from durations that configurations, callers and embedders choose, without overflow.

use std::time::Duration;

use tokio::time::Instant;

/// Maximum duration. Longer ones are reduced to it, since an `Instant` plus a longer one may overflow and panic.
pub const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Returns the instant `time` from now.
pub(crate) fn after(time: Duration) -> Instant {
    after_start(Instant::now(), time)
}

/// Returns the instant `time` after `start`.
pub(crate) fn after_start(start: Instant, time: Duration) -> Instant {
    start + time.min(MAX_DURATION)
}

/// Sleeps until an instant. Without one, never completes.
pub(crate) async fn sleep_until_some(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maximum_duration_does_not_overflow() {
        let (start, soon) = (Instant::now(), Duration::from_secs(60));
        assert_eq!(after_start(start, soon), start + soon);
        assert_eq!(after_start(start, Duration::MAX), start + MAX_DURATION);
        assert!(after(Duration::MAX) > start + soon);
    }
}
