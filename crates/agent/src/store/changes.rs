//! Changes of the node, for operations that wait.

use devlet_uds::rate_limit::RateLimiter;
use tokio::sync::watch;
use tokio::sync::watch::error::RecvError;
use tokio::time::{Duration, Instant, sleep_until};

/// Changes after which one operation checks its condition again; burst and refill per second. Without a limit, each
/// waiting operation would check after every change of all others.
const CHECKS_PER_SECOND: u32 = 100;

/// The changes of the node since an operation last checked its condition.
#[derive(Debug)]
pub(crate) struct Changes {
    latest: watch::Receiver<u64>,
    limiter: RateLimiter,
}

impl Changes {
    pub(super) fn new(latest: watch::Receiver<u64>) -> Self {
        Self {
            latest,
            limiter: RateLimiter::new(CHECKS_PER_SECOND, Duration::from_secs(1), Instant::now()),
        }
    }

    /// Marks all changes so far as seen.
    pub(crate) fn mark_seen(&mut self) {
        self.latest.mark_unchanged();
    }

    /// Completes when there is a change that is not seen and the rate allows a check. Fails if the store is gone.
    pub(crate) async fn changed(&mut self) -> Result<(), RecvError> {
        // Changes during the pause stay unseen, also if this future is dropped.
        while let Err(next) = self.limiter.try_acquire(Instant::now()) {
            sleep_until(next).await;
        }
        self.latest.changed().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn checks_are_limited_and_no_change_is_lost() {
        const MORE: u32 = 5;
        let (sender, receiver) = watch::channel(0);
        let mut changes = Changes::new(receiver);
        let began = Instant::now();
        for change in 1..=CHECKS_PER_SECOND + MORE {
            sender.send_replace(u64::from(change));
            // Dropped during the pause, if there is one.
            if changes.changed().now_or_never().is_none() {
                changes.changed().await.unwrap();
            }
        }
        assert!(began.elapsed() >= Duration::from_secs(1) * MORE / CHECKS_PER_SECOND);

        sender.send_replace(0);
        changes.mark_seen();
        assert!(changes.latest.changed().now_or_never().is_none());
    }
}
