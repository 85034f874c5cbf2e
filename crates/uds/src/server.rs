//! Serving gRPC on a unix socket to peers that may be old, slow or hostile.
//!
//! tonic does the serving; this module decides who gets in, and when a connection ends:
//!
//! ```text
//!             admitted, below the limit          heard in time
//!   accepted ───────────────────────────► silent ───────────────► serving
//!      │ over the limit                      │                       │ shutdown: GOAWAY, drain,
//!      ├──────► told why ──────► dropped ◄───┴───────────────────────┘ then cut
//!      └── not admitted ────────────▲
//! ```
//!
//! Invariants:
//! - a peer that is not admitted is dropped before a byte of it is read;
//! - where a call is expected, a connection without a whole request ends in time, whatever else it sends;
//! - at the limit, a connection makes room that never had a call, or where calls are expected has none under way; and a
//!   process that has most of its user's connections makes room for other processes of that user;
//! - who is over the limit all the same is answered why, a few at a time and for a moment; more of them get GOAWAY;
//! - [`serve`] returns at most [`ServerLimits::drain`] and a moment after `shutdown`, whatever the peers do;
//! - when [`serve`] has returned or was dropped, its connections are closed and its socket is removed.
//!
//! Streams that never end keep a connection busy: end them first, or they are cut after
//! [`ServerLimits::drain`].

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::abortable::Abortable;
use crate::authority::AuthorityRewriter;
use crate::call_tracking::{Calls, Connection, TrackCallsLayer};
use crate::channel::{CONNECTION_WINDOW, STREAM_WINDOW};
use crate::chatter::{Chatter, Speakers};
use crate::listen::{Checked, Listener};
use crate::peer::PeerCred;
use crate::rate_limit::LogThrottle;

/// How many bytes of a client come before anything that means something.
const PREFACE_LENGTH: usize = 24;

/// How long to wait when the system has no descriptor or memory left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Pause between two checks that the socket is in place; longer if it could not be made again, because each attempt
/// disturbs another process that may listen there.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
const FAILED_CHECK_PAUSE: Duration = Duration::from_secs(5);

/// How many connections over the limit a user may have to be told so, and for how long.
const TOLD_PER_UID: usize = 8;
const TOLD_TIME: Duration = Duration::from_secs(2);

/// How long cut connections get to notice.
const CUT_TIME: Duration = Duration::from_secs(1);

/// What a server puts up with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections that one user may have at a time. Default: 256.
    pub connections_per_uid: usize,
    /// Calls that one connection may have under way. Default: 256.
    pub streams_per_connection: u32,
    /// HTTP/2 frames that one process may send besides its calls: so many at once, and as many a second. A connection
    /// without a call counts for 64. Default: 10,000.
    pub frames_per_second: u32,
    /// How long a peer may take to send the HTTP/2 preface. Default: 10 s.
    pub preface: Duration,
    /// Whether peers come to make a call, with a short answer: the first request must be whole by then, too. Default: no.
    pub expects_call: bool,
    /// How long calls may go on after a shutdown. Default: 5 s.
    pub drain: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections_per_uid: 256,
            streams_per_connection: 256,
            frames_per_second: 10_000,
            preface: Duration::from_secs(10),
            expects_call: false,
            drain: Duration::from_secs(5),
        }
    }
}

/// Why a server refused a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The user has [`ServerLimits::connections_per_uid`] connections.
    TooManyConnections,
    /// The process sends too many frames besides calls.
    TooManyFrames,
}

/// Called for each refusal, so that the user of a server can count them.
pub type OnRefusal = Arc<dyn Fn(Refusal) + Send + Sync>;

/// Returns a callback for servers whose refusals are not counted.
pub fn ignore_refusals() -> OnRefusal {
    Arc::new(|_| {})
}

/// Why a server ended on its own.
#[derive(Debug, thiserror::Error)]
#[error("the gRPC server on {} failed: {problem}", path.display())]
pub struct ServeError {
    path: std::path::PathBuf,
    problem: tonic::transport::Error,
}

/// Serves `routes` to everyone who connects to `listener`, until `shutdown` completes.
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
    let cut = CancellationToken::new();
    // For when this future is dropped.
    let _cut_all = cut.clone().drop_guard();
    let closing = CancellationToken::new();
    let drain = limits.drain;
    let server = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(limits.streams_per_connection)
        .layer(TrackCallsLayer)
        .add_routes(routes);
    let speakers = Speakers::new(limits.frames_per_second);
    let incoming = Incoming {
        check: check_after(CHECK_PAUSE, &listener),
        listener,
        speakers,
        refusals: LogThrottle::new(Instant::now()),
        limits,
        on_refusal,
        users: HashMap::new(),
        pause: None,
        cut: cut.clone(),
    };
    let mut serving = pin!(server.serve_with_incoming_shutdown(incoming, async {
        shutdown.await;
        closing.cancel();
    }));
    tokio::select! {
        ended = &mut serving => return ended.map_err(failed),
        () = async { closing.cancelled().await; tokio::time::sleep(drain).await } => {}
    }
    tracing::warn!(socket = %path.display(), ?drain, "calls still under way after a shutdown are cut");
    cut.cancel();
    match tokio::time::timeout(CUT_TIME, serving).await {
        Ok(ended) => ended.map_err(failed),
        // Nothing is read or written any more; what is left are tasks that have not been run.
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

/// The peers that got in.
struct Incoming {
    listener: Listener,
    limits: ServerLimits,
    on_refusal: OnRefusal,
    users: HashMap<u32, User>,
    speakers: Speakers,
    refusals: LogThrottle,
    pause: Option<Pin<Box<Sleep>>>,
    /// The next check that the socket is in place; `None` if it could not run.
    check: Pin<Box<dyn Future<Output = Option<Checked>> + Send>>,
    cut: CancellationToken,
}

/// The connections of a user, the oldest first.
#[derive(Default)]
struct User {
    seats: Vec<Seat>,
    /// Those over the limit, who are being told.
    told: Vec<Weak<()>>,
}

/// A connection of a user.
struct Seat {
    pid: Option<i32>,
    cut: CancellationToken,
    calls: Arc<Calls>,
    /// Gone with the connection.
    taken: Weak<()>,
}

impl User {
    /// Forgets connections that are gone. Whether any is left.
    fn is_there(&mut self) -> bool {
        self.seats.retain(|seat| seat.taken.strong_count() > 0);
        self.told.retain(|taken| taken.strong_count() > 0);
        !self.seats.is_empty() || !self.told.is_empty()
    }
}

impl Incoming {
    /// A connection for another peer of this user, and what cuts it; if there are too many, another one may have to go.
    fn seat(&mut self, peer: &PeerCred, calls: &Arc<Calls>) -> Result<(Arc<()>, CancellationToken), String> {
        self.users.retain(|_, user| user.is_there());
        let frames = self.limits.frames_per_second;
        if self.speakers.is_over(peer) {
            (self.on_refusal)(Refusal::TooManyFrames);
            return Err(format!(
                "{peer} says too much besides its calls, limits.framesPerSecond allows {frames}"
            ));
        }
        let most = self.limits.connections_per_uid;
        let seats = &mut self.users.entry(peer.uid).or_default().seats;
        if seats.len() >= most {
            (self.on_refusal)(Refusal::TooManyConnections);
            let place = place_to_give_up(seats, peer.pid, &self.limits)
                .ok_or_else(|| format!("user {} has too many connections: {most} are possible", peer.uid))?;
            seats.remove(place).cut.cancel();
        }
        let (taken, cut) = (Arc::new(()), self.cut.child_token());
        seats.push(Seat {
            pid: peer.pid,
            cut: cut.clone(),
            calls: calls.clone(),
            taken: Arc::downgrade(&taken),
        });
        Ok((taken, cut))
    }

    fn on_frames(&self) -> crate::chatter::OnHit {
        let on_refusal = self.on_refusal.clone();
        Arc::new(move || on_refusal(Refusal::TooManyFrames))
    }

    /// A place for a moment, in which a peer over the limit is told so.
    fn moment(&mut self, peer: &PeerCred) -> Option<Arc<()>> {
        let told = &mut self.users.entry(peer.uid).or_default().told;
        if told.len() >= TOLD_PER_UID {
            return None;
        }
        let taken = Arc::new(());
        told.push(Arc::downgrade(&taken));
        Some(taken)
    }

    fn receive(&mut self, stream: UnixStream) -> Option<Accepted> {
        let path = self.listener.path();
        let peer = match PeerCred::of(&stream) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!(socket = %path.display(), %error, "peer without credentials dropped");
                return None;
            }
        };
        if !self.listener.admits(&peer) {
            tracing::warn!(socket = %path.display(), %peer, "peer not admitted");
            return None;
        }
        let calls = Arc::new(Calls::default());
        let (seat, cut, refused) = match self.seat(&peer, &calls) {
            Ok((seat, cut)) => (seat, cut, None),
            Err(error) => {
                if let Some(suppressed) = self.refusals.try_acquire(Instant::now()) {
                    let socket = self.listener.path().display();
                    tracing::warn!(%socket, %peer, %error, suppressed, "connection refused");
                }
                let Some(seat) = self.moment(&peer) else {
                    say_goodbye(stream, &error);
                    return None;
                };
                (seat, self.cut.child_token(), Some(Arc::from(error)))
            }
        };
        let mut chatter = Chatter::new(&peer, calls.clone(), &self.speakers, self.on_frames());
        if refused.is_some() {
            chatter.spare();
        }
        let preface = self.limits.preface;
        let (until, time) = match &refused {
            Some(_) => (Until::Never, preface.min(TOLD_TIME)),
            None if self.limits.expects_call => (Until::Call, preface),
            None => (Until::Preface, preface),
        };
        Some(Accepted {
            stream: Abortable::new(
                AuthorityRewriter::new(stream),
                cut,
                CancellationToken::new(),
                chatter,
            ),
            connection: Connection {
                peer,
                calls,
                has_streams: !self.limits.expects_call,
                refused,
            },
            patience: Some(Patience {
                until,
                heard: 0,
                timer: Box::pin(tokio::time::sleep(time)),
            }),
            _seat: seat,
        })
    }
}

/// Whose connection ends so that there is room for another one of the same user. The oldest that is of no use, first
/// among those of a process that has most of all; else that process's newest, unless the newcomer is of it, too.
///
/// Plugins dial again when they have something to say. Callers who keep a connection count on it.
fn place_to_give_up(seats: &[Seat], newcomer: Option<i32>, limits: &ServerLimits) -> Option<usize> {
    let mut counts: BTreeMap<Option<i32>, usize> = BTreeMap::new();
    for seat in seats {
        *counts.entry(seat.pid).or_default() += 1;
    }
    let mut counts = counts.into_iter();
    let greedy = counts.find(|(_, count)| count * 2 > limits.connections_per_uid);
    let is_greedy = |seat: &Seat| greedy.is_some_and(|(pid, _)| pid == seat.pid);
    let is_idle = |seat: &Seat| seat.calls.is_idle() && (limits.expects_call || !seat.calls.has_had_call());
    let first = |is_right: &dyn Fn(&Seat) -> bool| seats.iter().position(is_right);
    first(&|seat| is_idle(seat) && is_greedy(seat))
        .or_else(|| first(&is_idle))
        .or_else(|| {
            seats
                .iter()
                .rposition(|seat| is_greedy(seat) && seat.pid != newcomer)
        })
}

/// Says why a connection ends, as HTTP/2 does: empty settings, then GOAWAY with a text. A peer that cannot be told at
/// once is not told.
fn say_goodbye(stream: UnixStream, reason: &str) {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const GOAWAY: u8 = 7;
    const ENHANCE_YOUR_CALM: u32 = 11;
    let last_stream = 0_u32.to_be_bytes();
    let payload = [&last_stream, &ENHANCE_YOUR_CALM.to_be_bytes(), reason.as_bytes()].concat();
    let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
    let head = [&length[1..], &[GOAWAY, 0], &last_stream].concat();
    if let Ok(mut stream) = stream.into_std() {
        let _ = io::Write::write(&mut stream, &[&SETTINGS, &head[..], &payload].concat());
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
                    tracing::warn!(socket = %this.listener.path().display(), %error, "cannot accept a connection");
                    this.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}

/// A connection on which [`serve`] answers.
struct Accepted {
    stream: Abortable<AuthorityRewriter<UnixStream>>,
    connection: Connection,
    /// Until it has ended.
    patience: Option<Patience>,
    _seat: Arc<()>,
}

/// How long something is waited for.
struct Patience {
    until: Until,
    heard: usize,
    timer: Pin<Box<Sleep>>,
}

/// What a peer has to do.
enum Until {
    /// Say that it speaks HTTP/2.
    Preface,
    /// Make a call.
    Call,
    /// It has to go.
    Never,
}

impl Accepted {
    /// An error once the peer has taken too long. To be asked whenever something is read or written: a peer can keep us
    /// from either.
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(patience) = &mut self.patience else {
            return Ok(());
        };
        let is_over = match patience.until {
            Until::Preface => patience.heard >= PREFACE_LENGTH,
            Until::Call => self.connection.calls.has_had_call(),
            Until::Never => false,
        };
        if is_over {
            self.patience = None;
        } else if patience.timer.as_mut().poll(cx).is_ready() {
            tracing::debug!(peer = %self.connection.peer, "peer dropped: it took too long");
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
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
        if let Some(patience) = &mut this.patience {
            patience.heard += buf.filled().len() - before;
        }
        this.in_time(cx)?;
        polled
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.in_time(cx)?;
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.in_time(cx)?;
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
        this.in_time(cx)?;
        Pin::new(&mut this.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
