//! How often something may happen: so many times at once, and as many in each period.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// One who does something again and again.
///
/// It is the time at which nothing would be owed any more: each time adds its share of the period.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    share: Duration,
    period: Duration,
    settled: Instant,
}

impl Pace {
    /// So many times in a period; 0 counts as 1.
    pub fn new(times: u32, period: Duration, now: Instant) -> Self {
        Self {
            share: period / times.max(1),
            period,
            settled: now,
        }
    }

    /// Takes one time, or says when there will be one.
    pub fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let settled = self.settled.max(now) + self.share;
        let earliest = settled.checked_sub(self.period).unwrap_or(now);
        if earliest > now {
            return Err(earliest);
        }
        self.settled = settled;
        Ok(())
    }

    /// Something took more than its share: so much more is owed.
    pub fn owe(&mut self, more: Duration, now: Instant) {
        self.settled = self.settled.max(now) + more;
    }

    /// When there will be a time again, if there is none now.
    fn due(&self, now: Instant) -> Option<Instant> {
        let due = self.settled.checked_sub(self.period)?;
        (due > now).then_some(due)
    }

    fn is_settled(&self, now: Instant) -> bool {
        self.settled <= now
    }
}

/// The same for many, each by itself. Those that owe nothing are not remembered.
#[derive(Debug)]
pub struct Paces<K> {
    times: u32,
    period: Duration,
    paces: Mutex<Known<K>>,
}

#[derive(Debug)]
struct Known<K> {
    by_name: HashMap<K, Pace>,
    /// At how many the idle ones are forgotten.
    many: usize,
}

const MANY: usize = 1024;

impl<K: Eq + Hash> Paces<K> {
    /// Each so many times in a period.
    pub fn new(times: u32, period: Duration) -> Self {
        Self {
            times,
            period,
            paces: Mutex::new(Known {
                by_name: HashMap::new(),
                many: MANY,
            }),
        }
    }

    /// The same, of nobody yet.
    pub fn alike(&self) -> Self {
        Self::new(self.times, self.period)
    }

    /// Whether this one may now.
    pub fn take(&self, who: K, now: Instant) -> bool {
        self.with(who, now, |pace| pace.take(now).is_ok())
    }

    /// This one did it so many times, whether it might or not. If that was too often, when it will be forgiven; no longer
    /// than two more periods.
    pub fn owe(&self, who: K, times: u32, now: Instant) -> Option<Instant> {
        let share = self.period / self.times.max(1);
        self.owe_time(who, share.saturating_mul(times), now)
    }

    /// The same in time.
    pub fn owe_time(&self, who: K, more: Duration, now: Instant) -> Option<Instant> {
        self.with(who, now, |pace| {
            let most = now + 3 * pace.period;
            pace.owe(more.min(most - now), now);
            pace.settled = pace.settled.min(most);
            pace.due(now)
        })
    }

    /// Until when this one has to wait, if it has to.
    pub fn due(&self, who: &K, now: Instant) -> Option<Instant> {
        let paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        paces.by_name.get(who)?.due(now)
    }

    /// When this one will owe nothing, if it owes something now.
    pub fn settles(&self, who: &K, now: Instant) -> Option<Instant> {
        let paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = paces.by_name.get(who)?;
        (!pace.is_settled(now)).then_some(pace.settled)
    }

    fn with<T>(&self, who: K, now: Instant, with: impl FnOnce(&mut Pace) -> T) -> T {
        let mut paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        if paces.by_name.len() >= paces.many {
            paces.by_name.retain(|_, pace| !pace.is_settled(now));
            paces.many = MANY.max(2 * paces.by_name.len());
        }
        let pace = paces
            .by_name
            .entry(who)
            .or_insert_with(|| Pace::new(self.times, self.period, now));
        with(pace)
    }
}

/// What comes again and again, and is said 100 times a minute.
#[derive(Debug)]
pub struct Mentions(Mutex<(Pace, u64)>);

impl Mentions {
    pub fn new(now: Instant) -> Self {
        Self(Mutex::new((Pace::new(100, Duration::from_secs(60), now), 0)))
    }

    /// Whether it is said this time. If so, how often it was not since the last one, if ever.
    pub fn take(&self, now: Instant) -> Option<Option<u64>> {
        let mut mentions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (pace, unsaid) = &mut *mentions;
        if pace.take(now).is_err() {
            *unsaid += 1;
            return None;
        }
        Some(Some(std::mem::take(unsaid)).filter(|unsaid| *unsaid > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn so_many_at_once_and_as_many_in_each_period() {
        let start = Instant::now();
        let mut pace = Pace::new(4, SECOND, start);
        for _ in 0..4 {
            assert_eq!(pace.take(start), Ok(()));
        }
        assert_eq!(pace.take(start), Err(start + SECOND / 4));
        assert_eq!(pace.take(start + SECOND / 4), Ok(()));
        assert!(pace.take(start + SECOND / 4).is_err());
        let later = start + 10 * SECOND;
        assert_eq!((0..10).filter(|_| pace.take(later).is_ok()).count(), 4);
    }

    #[test]
    fn what_is_owed_is_paid_off_in_time() {
        let start = Instant::now();
        let mut pace = Pace::new(4, SECOND, start);
        pace.owe(SECOND / 2, start);
        assert_eq!(pace.take(start), Ok(()), "a period's worth is free");
        assert_eq!(pace.take(start), Ok(()));
        assert_eq!(pace.take(start), Err(start + SECOND / 4));
        pace.owe(3 * SECOND, start);
        assert_eq!(pace.take(start), Err(start + 3 * SECOND + SECOND / 4));
        assert_eq!(pace.take(start + 3 * SECOND + SECOND / 4), Ok(()));
    }

    #[test]
    fn what_was_done_anyway_is_owed_and_not_for_ever() {
        let start = Instant::now();
        let paces = Paces::new(4, SECOND);
        assert_eq!(paces.owe(1, 4, start), None);
        assert_eq!(paces.due(&1, start), None);
        assert_eq!(paces.owe(1, 1, start), Some(start + SECOND / 4));
        assert!(paces.due(&1, start).is_some() && paces.due(&2, start).is_none());
        assert_eq!(paces.due(&1, start + SECOND / 4), None);
        assert_eq!(paces.owe(1, 1_000_000, start), Some(start + 2 * SECOND));
    }

    #[test]
    fn what_is_said_too_often_is_counted() {
        let start = Instant::now();
        let mentions = Mentions::new(start);
        let said = (0..130).filter(|_| mentions.take(start) == Some(None)).count();
        assert_eq!(said, 100);
        assert_eq!(mentions.take(start + SECOND), Some(Some(30)));
        assert_eq!(mentions.take(start + 2 * SECOND), Some(None));
    }

    #[test]
    fn each_has_its_own_pace_and_the_idle_are_forgotten() {
        let paces = Paces::new(2, SECOND);
        let mut now = Instant::now();
        let take = |who| paces.take(who, now);
        assert!(take(1) && take(1) && !take(1));
        assert!(take(2));
        for who in 0..3_000 {
            now += SECOND;
            assert!(paces.take(who, now));
        }
        assert!(paces.paces.lock().unwrap().by_name.len() <= MANY);
    }
}
