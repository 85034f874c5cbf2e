//! Limits the bytes that a process sends besides the data of its calls.
//!
//! A peer can send pings, settings and resets without end. Each costs time, and none serves a call. So every byte that is
//! read counts against the sender's process, until it turns out to belong to a call:
//!
//! - data of a call is refunded when the handler (or, of an answer, the caller) reads it;
//! - each answered call refunds [`CALL_BYTES`], for its headers and the window updates around it.
//!
//! A process over its limit is not read from until it has budget again: its writes block, nothing is lost, and memory
//! does not grow. Processes that make calls never notice the limit, however many calls they make.
//!
//! The limit also holds while a call is in flight. Otherwise one open watch, or one answer that the peer does not read,
//! would disable it. A plain limit on all bytes cannot be used instead: 16 MiB/s are too few for data, and enough for a
//! million pings per second, which take a whole core. Frames are not parsed: `h2` does that.
//!
//! One connection cannot keep a worker thread: tokio makes its task yield after 128 reads.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use crate::channel::CONNECTION_WINDOW;
use crate::peer::PeerCred;
use crate::rate_limit::{KeyedRateLimiter, LogThrottle};

/// Bytes that a process may send at once. Data that a handler has not read yet counts, so a whole window must fit.
const BURST: u32 = CONNECTION_WINDOW;

/// Time in which the burst is refilled: 64 KiB per second.
const PERIOD: Duration = Duration::from_secs(64);

/// Bytes that an answered call refunds besides its data.
const CALL_BYTES: u32 = 1024;

/// Bytes that a connection counts by itself before it charges its process. Connections on which calls cover all bytes
/// do not depend on other connections of their process.
const CHUNK: i64 = 4 * 1024;

/// Pause of a connection whose process is over the limit, until it checks again.
const PAUSE: Duration = Duration::from_millis(50);

/// Sender of bytes: a process, or one connection if the kernel does not tell the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Process { uid: u32, pid: i32 },
    Connection(u64),
}

/// The limits of all processes that use the same sockets. Clones share their state.
#[derive(Debug, Clone)]
pub struct ReadLimits(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: KeyedRateLimiter<Source>,
    connections: AtomicU64,
    log: LogThrottle,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self(Arc::new(Shared {
            limiter: KeyedRateLimiter::new(BURST, PERIOD),
            connections: AtomicU64::new(0),
            log: LogThrottle::new(Instant::now()),
        }))
    }
}

impl ReadLimits {
    /// Returns the limit of a new connection.
    pub(crate) fn for_connection(&self, peer: &PeerCred) -> Arc<ReadLimit> {
        let source = match peer.pid {
            Some(pid) => Source::Process { uid: peer.uid, pid },
            None => Source::Connection(self.0.connections.fetch_add(1, Ordering::Relaxed)),
        };
        Arc::new(ReadLimit {
            shared: self.0.clone(),
            peer: *peer,
            source,
            uncharged: AtomicI64::new(0),
        })
    }
}

/// The limit of one connection.
pub(crate) struct ReadLimit {
    shared: Arc<Shared>,
    peer: PeerCred,
    source: Source,
    /// Bytes that were read or, below 0, refunded, and that the process was not charged for.
    uncharged: AtomicI64,
}

impl ReadLimit {
    /// Counts bytes that were read. Returns `true` if the process is over its limit.
    fn charge(&self, bytes: usize) -> bool {
        self.count(i64::try_from(bytes).unwrap_or(i64::MAX)) && self.is_over()
    }

    /// Takes back bytes that were the data of a call.
    pub(crate) fn refund_data(&self, bytes: usize) {
        self.count(-i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Takes back the bytes of a call besides its data.
    pub(crate) fn refund_call(&self) {
        self.count(-i64::from(CALL_BYTES));
    }

    /// Returns `true` if the process was charged.
    fn count(&self, bytes: i64) -> bool {
        let uncharged = self
            .uncharged
            .fetch_add(bytes, Ordering::AcqRel)
            .saturating_add(bytes);
        if uncharged.abs() < CHUNK {
            return false;
        }
        self.settle();
        uncharged > 0
    }

    fn settle(&self) {
        let bytes = self.uncharged.swap(0, Ordering::AcqRel);
        let count = u32::try_from(bytes.unsigned_abs()).unwrap_or(u32::MAX);
        let limiter = &self.shared.limiter;
        if bytes > 0 {
            limiter.charge(self.source, count, Instant::now());
        } else {
            limiter.refund(&self.source, count);
        }
    }

    fn is_over(&self) -> bool {
        let now = Instant::now();
        self.shared.limiter.next_allowed_at(&self.source, now).is_some()
    }
}

impl Drop for ReadLimit {
    fn drop(&mut self) {
        self.settle();
    }
}

impl fmt::Debug for ReadLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadLimit")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

/// Pauses the reads of one connection while its process is over the limit.
#[derive(Debug)]
pub(crate) struct ReadThrottle {
    limit: Arc<ReadLimit>,
    pause: Option<Pin<Box<Sleep>>>,
    /// The log contains one entry for each connection.
    is_logged: bool,
}

impl ReadThrottle {
    pub(crate) fn new(limit: Arc<ReadLimit>) -> Self {
        Self {
            limit,
            pause: None,
            is_logged: false,
        }
    }

    /// Completes when the connection may be read from.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            if self.limit.is_over() {
                pause.as_mut().reset(Instant::now() + PAUSE);
            } else {
                self.pause = None;
            }
        }
        Poll::Ready(())
    }

    /// Counts bytes that were read.
    pub(crate) fn read(&mut self, bytes: usize) {
        if bytes == 0 || !self.limit.charge(bytes) {
            return;
        }
        if !std::mem::replace(&mut self.is_logged, true)
            && let Some(suppressed) = self.limit.shared.log.try_acquire(Instant::now())
        {
            tracing::warn!(peer = %self.limit.peer, suppressed, "peer throttled: it sends too many bytes besides calls");
        }
        self.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(pid: Option<i32>) -> PeerCred {
        PeerCred { uid: 0, gid: 0, pid }
    }

    fn burst() -> usize {
        BURST as usize
    }

    #[tokio::test]
    async fn connections_of_a_process_share_a_limit_and_unknown_processes_do_not() {
        for pid in [Some(7), None] {
            let limits = ReadLimits::default();
            let flood = limits.for_connection(&peer(pid));
            assert!(!flood.charge(burst() / 2));
            assert!(flood.charge(burst()));
            let other = limits.for_connection(&peer(pid));
            assert_eq!(other.charge(64 * 1024), pid.is_some());
            assert!(!limits.for_connection(&peer(Some(8))).charge(64 * 1024));
        }
    }

    #[tokio::test]
    async fn a_connection_whose_bytes_belong_to_calls_is_not_throttled_with_its_process() {
        let limits = ReadLimits::default();
        assert!(limits.for_connection(&peer(Some(7))).charge(2 * burst()));
        let calls = limits.for_connection(&peer(Some(7)));
        for _ in 0..10_000 {
            assert!(!calls.charge(2_500));
            calls.refund_data(2_000);
            calls.refund_call();
        }
    }

    #[tokio::test]
    async fn the_data_of_calls_is_not_limited() {
        let limits = ReadLimits::default();
        let upload = limits.for_connection(&peer(Some(7)));
        for _ in 0..1_000 {
            assert!(!upload.charge(burst() / 2));
            upload.refund_data(burst() / 2 - 1_000);
            upload.refund_call();
        }
    }

    #[tokio::test]
    async fn connections_that_end_count() {
        let limits = ReadLimits::default();
        for _ in 0..=BURST / 1_000 {
            assert!(!limits.for_connection(&peer(Some(7))).charge(1_000));
        }
        assert!(limits.for_connection(&peer(Some(7))).is_over());
    }

    #[tokio::test]
    async fn a_throttled_connection_is_read_again_when_there_is_budget() {
        let limits = ReadLimits::default();
        let mut throttle = ReadThrottle::new(limits.for_connection(&peer(Some(7))));
        throttle.read(burst() + 16 * 1024);
        let began = Instant::now();
        std::future::poll_fn(|cx| throttle.poll_ready(cx)).await;
        let paused = began.elapsed();
        assert!(paused >= Duration::from_millis(200), "{paused:?}");
    }
}
