//! GCRA rate limiter: burst `n`, refill `n` per period.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Limits the rate of one kind of event.
///
/// The state is one time: the arrival time at which the whole burst is available again.
#[derive(Debug, Clone, Copy)]
pub struct RateLimiter {
    interval: Duration,
    period: Duration,
    arrival_time: Instant,
}

impl RateLimiter {
    /// Allows `count` events in a period; 0 counts as 1.
    pub fn new(count: u32, period: Duration, now: Instant) -> Self {
        Self {
            interval: period / count.max(1),
            period,
            arrival_time: now,
        }
    }

    /// Counts one event, or returns when the next one is allowed.
    pub fn try_acquire(&mut self, now: Instant) -> Result<(), Instant> {
        let arrival_time = self.arrival_time.max(now) + self.interval;
        let earliest = arrival_time.checked_sub(self.period).unwrap_or(now);
        if earliest > now {
            return Err(earliest);
        }
        self.arrival_time = arrival_time;
        Ok(())
    }

    /// Charges `extra` time unconditionally, for an event that cost more than its interval.
    pub fn charge(&mut self, extra: Duration, now: Instant) {
        self.arrival_time = self.arrival_time.max(now) + extra;
    }

    /// Returns when the next event is allowed; `None` if it is allowed now.
    fn next_allowed_at(&self, now: Instant) -> Option<Instant> {
        let next = self.arrival_time.checked_sub(self.period)?;
        (next > now).then_some(next)
    }

    fn is_idle(&self, now: Instant) -> bool {
        self.arrival_time <= now
    }
}

/// One [`RateLimiter`] for each key. Idle keys are forgotten.
#[derive(Debug)]
pub struct KeyedRateLimiter<K> {
    count: u32,
    period: Duration,
    limiters: Mutex<Limiters<K>>,
}

#[derive(Debug)]
struct Limiters<K> {
    by_key: HashMap<K, RateLimiter>,
    /// Number of keys at which idle ones are removed.
    sweep_at: usize,
}

/// Minimum number of keys before idle ones are removed.
const MIN_SWEEP: usize = 1024;

impl<K: Eq + Hash> KeyedRateLimiter<K> {
    /// Allows `count` events of each key in a period; 0 counts as 1.
    pub fn new(count: u32, period: Duration) -> Self {
        Self {
            count,
            period,
            limiters: Mutex::new(Limiters {
                by_key: HashMap::new(),
                sweep_at: MIN_SWEEP,
            }),
        }
    }

    /// Counts one event of `key` and returns `true` if it is allowed.
    pub fn try_acquire(&self, key: K, now: Instant) -> bool {
        self.with(key, now, |limiter| limiter.try_acquire(now).is_ok())
    }

    /// Charges `count` events unconditionally; returns when the key is allowed again, at most two periods from now.
    pub fn charge(&self, key: K, count: u32, now: Instant) -> Option<Instant> {
        let interval = self.period / self.count.max(1);
        self.charge_time(key, interval.saturating_mul(count), now)
    }

    /// Takes back `count` events that were charged.
    pub fn refund(&self, key: &K, count: u32) {
        let mut limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(limiter) = limiters.by_key.get_mut(key) {
            let time = limiter.interval.saturating_mul(count);
            // Later charges begin now at the earliest, so the burst does not grow.
            limiter.arrival_time = limiter
                .arrival_time
                .checked_sub(time)
                .unwrap_or(limiter.arrival_time);
        }
    }

    /// Charges `extra` time unconditionally; returns when the key is allowed again, at most two periods from now.
    pub fn charge_time(&self, key: K, extra: Duration, now: Instant) -> Option<Instant> {
        self.with(key, now, |limiter| {
            let latest = now + 3 * limiter.period;
            limiter.charge(extra.min(latest - now), now);
            limiter.arrival_time = limiter.arrival_time.min(latest);
            limiter.next_allowed_at(now)
        })
    }

    /// Returns when the next event of `key` is allowed; `None` if it is allowed now.
    pub fn next_allowed_at(&self, key: &K, now: Instant) -> Option<Instant> {
        let limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        limiters.by_key.get(key)?.next_allowed_at(now)
    }

    fn with<T>(&self, key: K, now: Instant, with: impl FnOnce(&mut RateLimiter) -> T) -> T {
        let mut limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        if limiters.by_key.len() >= limiters.sweep_at {
            limiters.by_key.retain(|_, limiter| !limiter.is_idle(now));
            limiters.sweep_at = MIN_SWEEP.max(2 * limiters.by_key.len());
        }
        let limiter = limiters
            .by_key
            .entry(key)
            .or_insert_with(|| RateLimiter::new(self.count, self.period, now));
        with(limiter)
    }
}

/// Allows 100 log entries a minute, and counts suppressed ones.
#[derive(Debug)]
pub struct LogThrottle(Mutex<(RateLimiter, u64)>);

impl LogThrottle {
    pub fn new(now: Instant) -> Self {
        let limiter = RateLimiter::new(100, Duration::from_secs(60), now);
        Self(Mutex::new((limiter, 0)))
    }

    /// Returns `None` if the entry must be suppressed, else the number of entries suppressed since the last one, if any.
    pub fn try_acquire(&self, now: Instant) -> Option<Option<u64>> {
        let mut throttle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (limiter, suppressed) = &mut *throttle;
        if limiter.try_acquire(now).is_err() {
            *suppressed += 1;
            return None;
        }
        Some(Some(std::mem::take(suppressed)).filter(|suppressed| *suppressed > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_is_allowed_at_once_and_refilled_in_each_period() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(4, SECOND, start);
        for _ in 0..4 {
            assert_eq!(limiter.try_acquire(start), Ok(()));
        }
        assert_eq!(limiter.try_acquire(start), Err(start + SECOND / 4));
        assert_eq!(limiter.try_acquire(start + SECOND / 4), Ok(()));
        assert!(limiter.try_acquire(start + SECOND / 4).is_err());
        let later = start + 10 * SECOND;
        assert_eq!((0..10).filter(|_| limiter.try_acquire(later).is_ok()).count(), 4);
    }

    #[test]
    fn charged_time_delays_later_events() {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(4, SECOND, start);
        limiter.charge(SECOND / 2, start);
        assert_eq!(limiter.try_acquire(start), Ok(()), "half of the burst is left");
        assert_eq!(limiter.try_acquire(start), Ok(()));
        assert_eq!(limiter.try_acquire(start), Err(start + SECOND / 4));
        limiter.charge(3 * SECOND, start);
        assert_eq!(limiter.try_acquire(start), Err(start + 3 * SECOND + SECOND / 4));
        assert_eq!(limiter.try_acquire(start + 3 * SECOND + SECOND / 4), Ok(()));
    }

    #[test]
    fn charges_of_a_key_are_capped() {
        let start = Instant::now();
        let limiter = KeyedRateLimiter::new(4, SECOND);
        assert_eq!(limiter.charge(1, 4, start), None);
        assert_eq!(limiter.next_allowed_at(&1, start), None);
        assert_eq!(limiter.charge(1, 1, start), Some(start + SECOND / 4));
        assert!(limiter.next_allowed_at(&1, start).is_some() && limiter.next_allowed_at(&2, start).is_none());
        assert_eq!(limiter.next_allowed_at(&1, start + SECOND / 4), None);
        assert_eq!(limiter.charge(1, 1_000_000, start), Some(start + 2 * SECOND));
    }

    #[test]
    fn refunds_do_not_exceed_the_burst() {
        let start = Instant::now();
        let limiter = KeyedRateLimiter::new(4, SECOND);
        assert!(limiter.charge(1, 6, start).is_some());
        limiter.refund(&1, 2);
        assert_eq!(limiter.next_allowed_at(&1, start), None);
        limiter.refund(&1, 100);
        assert_eq!((0..10).filter(|_| limiter.try_acquire(1, start)).count(), 4);
    }

    #[test]
    fn suppressed_log_entries_are_counted() {
        let start = Instant::now();
        let throttle = LogThrottle::new(start);
        let logged = (0..130)
            .filter(|_| throttle.try_acquire(start) == Some(None))
            .count();
        assert_eq!(logged, 100);
        assert_eq!(throttle.try_acquire(start + SECOND), Some(Some(30)));
        assert_eq!(throttle.try_acquire(start + 2 * SECOND), Some(None));
    }

    #[test]
    fn keys_are_limited_separately_and_idle_ones_are_forgotten() {
        let limiter = KeyedRateLimiter::new(2, SECOND);
        let mut now = Instant::now();
        let acquire = |key| limiter.try_acquire(key, now);
        assert!(acquire(1) && acquire(1) && !acquire(1));
        assert!(acquire(2));
        for key in 0..3_000 {
            now += SECOND;
            assert!(limiter.try_acquire(key, now));
        }
        assert!(limiter.limiters.lock().unwrap().by_key.len() <= MIN_SWEEP);
    }
}
