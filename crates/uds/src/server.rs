//! Serves gRPC on a unix socket to peers that may be old, slow or hostile.
//!
//! tonic serves; this module decides which connections are accepted, and `connection.rs` when they end:
//!
//! ```text
//!             admitted, below the limits            first request in time
//!   accepted ────────────────────────────► waiting ──────────────────────► serving
//!      │                                      │                               │ idle for too long, or
//!      └──────────────► closed ◄──────────────┴───────────────────────────────┘ shutdown: GOAWAY, drain, abort
//! ```
//!
//! Invariants:
//! - a peer that is not admitted is closed before a byte of it is read;
//! - a user has at most [`ServerLimits::connections_per_uid`] connections, and opens at most [`ACCEPTS`] in each
//!   [`ACCEPT_PERIOD`]; further ones are closed at once, reported and logged;
//! - where a call is expected, a connection without a whole request ends in time, whatever else it sends;
//! - a connection without a call in flight ends after [`ServerLimits::idle`];
//! - a process can send as much data in calls as it likes, but few bytes besides (`read_limit.rs`);
//! - streams that are opened and reset at once are limited by `h2`, which ends the connection;
//! - [`serve`] returns at most [`ServerLimits::drain`] and one second after `shutdown`, whatever the peers do;
//! - when [`serve`] has returned or was dropped, its connections are closed and its socket is removed.
//!
//! Streams that never end keep a connection busy: end them first, or they are aborted after [`ServerLimits::drain`].

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::call_tracking::TrackCallsLayer;
use crate::channel::{CONNECTION_WINDOW, STREAM_WINDOW};
use crate::connection::{Accepted, ConnectionSlot, Deadlines};
use crate::listen::{Checked, Listener};
use crate::peer::PeerCred;
use crate::rate_limit::{KeyedRateLimiter, LogThrottle};
use crate::read_limit::ReadLimits;

/// Connections that one user may open in each [`ACCEPT_PERIOD`].
pub const ACCEPTS: u32 = 1024;
pub const ACCEPT_PERIOD: Duration = Duration::from_secs(4);

/// Maximum number of streams of a connection that were reset before a handler saw them.
const PENDING_RESETS: usize = 20;
/// Maximum number of streams of a connection that were reset because of the peer's errors. tonic does not have a limit by default.
const ERROR_RESETS: usize = 1024;

/// Pause after an error of `accept`: the system does not have a descriptor or memory for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Interval between checks that the socket path is still ours. It is longer after a check that failed, because each
/// attempt disturbs another process that may listen there.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
const FAILED_CHECK_PAUSE: Duration = Duration::from_secs(5);

/// Time for connections to end after they were aborted.
const ABORT_TIME: Duration = Duration::from_secs(1);

/// Limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections of one user. Default: 256.
    pub connections_per_uid: usize,
    /// Calls in flight on one connection. Default: 256.
    pub streams_per_connection: u32,
    /// Time for a peer to send the HTTP/2 preface. Default: 10 s.
    pub preface: Duration,
    /// `true` if peers connect to make a call: the first request must be complete within `preface`, too. Default: `false`.
    pub expects_call: bool,
    /// Time after which a connection without a call in flight is closed. Default: never.
    pub idle: Option<Duration>,
    /// Time for calls to end after a shutdown. Default: 5 s.
    pub drain: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections_per_uid: 256,
            streams_per_connection: 256,
            preface: Duration::from_secs(10),
            expects_call: false,
            idle: None,
            drain: Duration::from_secs(5),
        }
    }
}

/// Reason why a server closed a connection at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The user has [`ServerLimits::connections_per_uid`] connections.
    TooManyConnections,
    /// The user opened [`ACCEPTS`] connections within [`ACCEPT_PERIOD`].
    TooManyAttempts,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooManyConnections => "the user has too many connections",
            Self::TooManyAttempts => "the user opens connections too fast",
        })
    }
}

/// Called for each refusal, so that the user of a server can count them.
pub type OnRefusal = Arc<dyn Fn(Refusal) + Send + Sync>;

/// Returns a callback for servers whose refusals are not counted.
pub fn ignore_refusals() -> OnRefusal {
    Arc::new(|_| {})
}

/// Error: a server ended by itself.
#[derive(Debug, thiserror::Error)]
#[error("the gRPC server on {} failed: {problem}", path.display())]
pub struct ServeError {
    path: std::path::PathBuf,
    problem: tonic::transport::Error,
}

/// Serves `routes` to the peers that connect to `listener`, until `shutdown` completes.
///
/// Handlers find the caller as [`PeerCred`] among the extensions of the request.
pub async fn serve(
    listener: Listener,
    routes: Routes,
    limits: ServerLimits,
    on_refusal: OnRefusal,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let path = listener.path().to_owned();
    let failed = |problem| ServeError {
        path: path.clone(),
        problem,
    };
    let abort = CancellationToken::new();
    // For when this future is dropped.
    let _abort_all = abort.clone().drop_guard();
    let closing = CancellationToken::new();
    let drain = limits.drain;
    let server = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(limits.streams_per_connection)
        .http2_max_pending_accept_reset_streams(Some(PENDING_RESETS))
        .http2_max_local_error_reset_streams(Some(ERROR_RESETS))
        .layer(TrackCallsLayer)
        .add_routes(routes);
    let incoming = Incoming {
        check: check_after(CHECK_PAUSE, &listener),
        listener,
        limits,
        on_refusal,
        users: UidConnections::default(),
        accepts: KeyedRateLimiter::new(ACCEPTS, ACCEPT_PERIOD),
        read_limits: ReadLimits::default(),
        refusals: LogThrottle::new(Instant::now()),
        pause: None,
        abort: abort.clone(),
    };
    let mut serving = pin!(server.serve_with_incoming_shutdown(incoming, async {
        shutdown.await;
        closing.cancel();
    }));
    tokio::select! {
        ended = &mut serving => return ended.map_err(failed),
        () = async { closing.cancelled().await; tokio::time::sleep(drain).await } => {}
    }
    tracing::warn!(socket = %path.display(), ?drain, "calls in flight aborted at shutdown");
    abort.cancel();
    match tokio::time::timeout(ABORT_TIME, serving).await {
        Ok(ended) => ended.map_err(failed),
        // Reads and writes have ended; the remaining tasks have not run yet.
        Err(_) => Ok(()),
    }
}

/// Checks after a pause whether the socket is in place, on a thread of its own: the disk may hang.
fn check_after(
    pause: Duration,
    listener: &Listener,
) -> Pin<Box<dyn Future<Output = Option<Checked>> + Send>> {
    let check = listener.check();
    Box::pin(async move {
        tokio::time::sleep(pause).await;
        tokio::task::spawn_blocking(|| check.run()).await.ok()
    })
}

/// The number of connections of each user.
#[derive(Debug, Default)]
struct UidConnections(HashMap<u32, ConnectionSlot>);

impl UidConnections {
    /// Counts one more connection of a user, unless the user has `max`.
    fn reserve_slot(&mut self, uid: u32, max: usize) -> Option<ConnectionSlot> {
        // The map itself has one reference.
        self.0.retain(|_, slot| Arc::strong_count(slot) > 1);
        let slot = self.0.entry(uid).or_default();
        (Arc::strong_count(slot) <= max).then(|| Arc::clone(slot))
    }
}

/// The accepted connections.
struct Incoming {
    listener: Listener,
    limits: ServerLimits,
    on_refusal: OnRefusal,
    users: UidConnections,
    accepts: KeyedRateLimiter<u32>,
    read_limits: ReadLimits,
    refusals: LogThrottle,
    pause: Option<Pin<Box<Sleep>>>,
    /// The next check that the socket is in place; `None` if it could not run.
    check: Pin<Box<dyn Future<Output = Option<Checked>> + Send>>,
    abort: CancellationToken,
}

impl Incoming {
    fn receive(&mut self, stream: UnixStream) -> Option<Accepted> {
        let socket = self.listener.path().display();
        let peer = match PeerCred::of(&stream) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!(%socket, %error, "peer without credentials dropped");
                return None;
            }
        };
        if !self.listener.admits(&peer) {
            tracing::warn!(%socket, %peer, "peer not admitted");
            return None;
        }
        let slot = match self.reserve_slot(&peer) {
            Ok(slot) => slot,
            Err(refusal) => {
                (self.on_refusal)(refusal);
                if let Some(suppressed) = self.refusals.try_acquire(Instant::now()) {
                    let socket = self.listener.path().display();
                    let limit = self.limits.connections_per_uid;
                    tracing::warn!(%socket, %peer, reason = %refusal, limit, suppressed, "connection refused");
                }
                return None;
            }
        };
        let deadlines = Deadlines {
            preface: self.limits.preface,
            expects_call: self.limits.expects_call,
            idle: self.limits.idle,
        };
        let abort = self.abort.child_token();
        Some(Accepted::new(
            stream,
            peer,
            deadlines,
            &self.read_limits,
            abort,
            slot,
        ))
    }

    fn reserve_slot(&mut self, peer: &PeerCred) -> Result<ConnectionSlot, Refusal> {
        if !self.accepts.try_acquire(peer.uid, Instant::now()) {
            return Err(Refusal::TooManyAttempts);
        }
        let max = self.limits.connections_per_uid;
        let slot = self.users.reserve_slot(peer.uid, max);
        slot.ok_or(Refusal::TooManyConnections)
    }
}

impl Stream for Incoming {
    type Item = io::Result<Accepted>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(pause) = &mut this.pause {
                ready!(pause.as_mut().poll(cx));
                this.pause = None;
            }
            let accepted = match this.listener.socket().poll_accept(cx) {
                Poll::Ready(accepted) => accepted,
                // No connection waits in the old socket, so none is lost if it is replaced.
                Poll::Pending => {
                    let checked = ready!(this.check.as_mut().poll(cx));
                    let pause = match checked.is_none_or(|checked| this.listener.ensure_published(checked)) {
                        true => CHECK_PAUSE,
                        false => FAILED_CHECK_PAUSE,
                    };
                    this.check = check_after(pause, &this.listener);
                    continue;
                }
            };
            match accepted {
                Ok((stream, _)) => {
                    if let Some(accepted) = this.receive(stream) {
                        return Poll::Ready(Some(Ok(accepted)));
                    }
                }
                Err(error) => {
                    tracing::warn!(socket = %this.listener.path().display(), %error, "connection not accepted");
                    this.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_at_most_the_maximum_of_slots() {
        let mut users = UidConnections::default();
        let first = users.reserve_slot(1, 2);
        let second = users.reserve_slot(1, 2);
        assert!(first.is_some() && second.is_some());
        assert!(users.reserve_slot(1, 2).is_none());
        assert!(users.reserve_slot(2, 2).is_some());
        drop(first);
        assert!(users.reserve_slot(1, 2).is_some());
    }
}
