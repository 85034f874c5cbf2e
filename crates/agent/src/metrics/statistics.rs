//! Counters of the store: syncs, writes, batches and mirrored files.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets for durations, in seconds: from 50 µs to 60 s.
pub const DURATION_BOUNDS: [f64; 19] = [
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
];

/// Upper bounds of the buckets for the number of changes that share a write.
pub const BATCH_BOUNDS: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// A snapshot of the counters since the store was opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// Syncs of the database file.
    pub syncs: u64,
    /// Failed writes; each failed a whole batch.
    pub failed_writes: u64,
    /// Duration of each sync in seconds.
    pub sync_durations: Histogram,
    /// Number of changes in each write.
    pub batches: Histogram,
    /// Duration of each write in seconds, including the sync.
    pub write_durations: Histogram,
    /// Mirrors of the kubelet's file that were written.
    pub mirrors: u64,
}

/// A cumulative distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Upper bounds of the buckets, each with the number of values up to it.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all values.
    pub sum: f64,
    /// The number of all values.
    pub count: u64,
}

/// The counters, shared by the threads of the store.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) syncs: AtomicU64,
    pub(crate) failed_writes: AtomicU64,
    pub(crate) mirrors: AtomicU64,
    pub(crate) sync_durations: Tally<19>,
    pub(crate) batches: Tally<10>,
    pub(crate) write_durations: Tally<19>,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            syncs: AtomicU64::new(0),
            failed_writes: AtomicU64::new(0),
            mirrors: AtomicU64::new(0),
            sync_durations: Tally::new(&DURATION_BOUNDS, 1e9),
            batches: Tally::new(&BATCH_BOUNDS, 1.0),
            write_durations: Tally::new(&DURATION_BOUNDS, 1e9),
        }
    }
}

impl Counters {
    pub(crate) fn snapshot(&self) -> Statistics {
        Statistics {
            syncs: self.syncs.load(Ordering::Relaxed),
            failed_writes: self.failed_writes.load(Ordering::Relaxed),
            mirrors: self.mirrors.load(Ordering::Relaxed),
            sync_durations: self.sync_durations.snapshot(),
            batches: self.batches.snapshot(),
            write_durations: self.write_durations.snapshot(),
        }
    }
}

/// A histogram that several threads update. The sum is in whole units: nanoseconds or changes.
#[derive(Debug)]
pub(crate) struct Tally<const N: usize> {
    bounds: &'static [f64; N],
    units: f64,
    buckets: [AtomicU64; N],
    sum: AtomicU64,
    count: AtomicU64,
}

impl<const N: usize> Tally<N> {
    fn new(bounds: &'static [f64; N], units: f64) -> Self {
        Self {
            bounds,
            units,
            buckets: [const { AtomicU64::new(0) }; N],
            sum: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }
    }

    pub(crate) fn add_duration(&self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.add(duration.as_secs_f64(), nanoseconds);
    }

    pub(crate) fn add_count(&self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.add(f64::from(count), u64::from(count));
    }

    fn add(&self, value: f64, units: u64) {
        let bucket = self.bounds.iter().position(|&bound| value <= bound);
        if let Some(bucket) = bucket.and_then(|place| self.buckets.get(place)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add(units, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    #[allow(clippy::cast_precision_loss, reason = "a sum for a chart")]
    fn snapshot(&self) -> Histogram {
        let mut below = 0;
        let bounds = self.bounds.iter().zip(&self.buckets);
        let buckets = bounds.map(|(&bound, bucket)| {
            below += bucket.load(Ordering::Relaxed);
            (bound, below)
        });
        Histogram {
            buckets: buckets.collect(),
            sum: self.sum.load(Ordering::Relaxed) as f64 / self.units,
            count: self.count.load(Ordering::Relaxed),
        }
    }
}
