//! A connection that the server accepted, with its deadlines.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use crate::abortable::Abortable;
use crate::authority::AuthorityRewriter;
use crate::call_tracking::{Activity, Calls, Connection};
use crate::peer::PeerCred;
use crate::read_limit::{ReadLimits, ReadThrottle};

/// Length of the bytes with which an HTTP/2 client begins.
const PREFACE_LENGTH: usize = 24;

/// Time that a peer may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadlines {
    /// For the HTTP/2 preface and, if a call is expected, for the first whole request.
    pub(crate) preface: Duration,
    pub(crate) expects_call: bool,
    /// Without a call in flight.
    pub(crate) idle: Option<Duration>,
}

/// Counts a connection of a user while it exists.
pub(crate) type ConnectionSlot = Arc<()>;

/// A connection on which [`serve`](crate::server::serve) answers.
pub(crate) struct Accepted {
    stream: Abortable<AuthorityRewriter<UnixStream>>,
    connection: Connection,
    deadlines: Deadlines,
    accepted: Instant,
    /// Bytes that were read.
    received: usize,
    /// Fires when the deadlines have to be checked; `None` if no deadline is left.
    timer: Option<Pin<Box<Sleep>>>,
    _slot: ConnectionSlot,
}

impl Accepted {
    pub(crate) fn new(
        stream: UnixStream,
        peer: PeerCred,
        deadlines: Deadlines,
        limits: &ReadLimits,
        abort: CancellationToken,
        slot: ConnectionSlot,
    ) -> Self {
        let limit = limits.for_connection(&peer);
        let calls = Arc::new(Calls::new(limit.clone()));
        let throttle = ReadThrottle::new(limit);
        Self {
            stream: Abortable::new(
                AuthorityRewriter::new(stream),
                abort,
                CancellationToken::new(),
                Some(throttle),
            ),
            connection: Connection { peer, calls },
            deadlines,
            accepted: Instant::now(),
            received: 0,
            timer: Some(Box::pin(tokio::time::sleep(deadlines.preface))),
            _slot: slot,
        }
    }

    /// Returns an error if the peer has missed a deadline. Every read and write calls this, because a peer can block either.
    fn check_deadline(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while let Some(timer) = &mut self.timer {
            if timer.as_mut().poll(cx).is_pending() {
                return Ok(());
            }
            let now = Instant::now();
            let waits_since = match self.connection.calls.activity() {
                Activity::InFlight => now,
                Activity::IdleSince(since) => since,
                Activity::NoCallYet if !self.deadlines.expects_call && self.received >= PREFACE_LENGTH => {
                    self.accepted
                }
                Activity::NoCallYet => return Err(self.late("it did not make a request in time")),
            };
            let next = self.deadlines.idle.and_then(|idle| waits_since.checked_add(idle));
            match next {
                Some(next) if next <= now => return Err(self.late("it is idle")),
                Some(next) => timer.as_mut().reset(next),
                None => self.timer = None,
            }
        }
        Ok(())
    }

    fn late(&self, reason: &str) -> io::Error {
        tracing::debug!(peer = %self.connection.peer, reason, "connection closed");
        io::ErrorKind::TimedOut.into()
    }
}

impl Connected for Accepted {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        self.connection.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.received = this.received.saturating_add(buf.filled().len() - before);
        this.check_deadline(cx)?;
        polled
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check_deadline(cx)?;
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check_deadline(cx)?;
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check_deadline(cx)?;
        Pin::new(&mut this.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
