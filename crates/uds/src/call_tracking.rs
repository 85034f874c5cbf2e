//! Tracks whether a connection has had a request and has one in flight.
//!
//! A request counts once all of it has arrived: half a request does not keep a connection open. tonic does not report
//! any of this, so [`TrackCalls`] sits between the connection and the services.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

use crate::peer::PeerCred;
use crate::read_limit::ReadLimit;

/// A connection, as [`TrackCalls`] gets it with each request.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    pub(crate) peer: PeerCred,
    pub(crate) calls: Arc<Calls>,
}

/// The calls of a connection.
#[derive(Debug)]
pub(crate) struct Calls {
    state: Mutex<State>,
    limit: Arc<ReadLimit>,
}

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    /// When the last call ended.
    idle_since: Option<Instant>,
}

/// State of a connection's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    /// The connection has not had a whole request.
    NoCallYet,
    InFlight,
    IdleSince(Instant),
}

impl Calls {
    pub(crate) fn new(limit: Arc<ReadLimit>) -> Self {
        Self {
            state: Mutex::default(),
            limit,
        }
    }

    pub(crate) fn activity(&self) -> Activity {
        match *self.state() {
            State { in_flight: 1.., .. } => Activity::InFlight,
            State {
                idle_since: Some(since),
                ..
            } => Activity::IdleSince(since),
            State { idle_since: None, .. } => Activity::NoCallYet,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call. It is in flight from the end of its request until this is dropped.
#[derive(Debug)]
struct CallGuard {
    calls: Arc<Calls>,
    is_complete: AtomicBool,
}

impl CallGuard {
    /// Counts the call as in flight: all of the request has arrived.
    fn mark_complete(&self) {
        if !self.is_complete.swap(true, Ordering::AcqRel) {
            self.calls.state().in_flight += 1;
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if *self.is_complete.get_mut() {
            let mut state = self.calls.state();
            state.in_flight -= 1;
            state.idle_since = Some(Instant::now());
        }
    }
}

/// Wraps services in [`TrackCalls`].
#[derive(Debug, Clone)]
pub(crate) struct TrackCallsLayer;

impl<S> Layer<S> for TrackCallsLayer {
    type Service = TrackCalls<S>;

    fn layer(&self, service: S) -> TrackCalls<S> {
        TrackCalls(service)
    }
}

/// Reports calls to their [`Connection`]. Services find the [`PeerCred`] among a request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct TrackCalls<S>(S);

impl<S> Service<Request<Body>> for TrackCalls<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(connection) = request.extensions_mut().remove::<Connection>() else {
            return Box::pin(self.0.call(request));
        };
        request.extensions_mut().insert(connection.peer);
        let call = Arc::new(CallGuard {
            calls: connection.calls,
            is_complete: AtomicBool::new(false),
        });
        let request = request.map(|body| Body::new(RequestBody::new(body, call.clone())));
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // A service may answer before the end of the request, and then ignores the rest.
            call.mark_complete();
            call.calls.limit.refund_call();
            Ok(answer.map(|body| Body::new(ResponseBody { body, _call: call })))
        })
    }
}

/// The body of a request. At its end the request is complete.
struct RequestBody {
    body: Body,
    call: Arc<CallGuard>,
}

impl RequestBody {
    fn new(body: Body, call: Arc<CallGuard>) -> Self {
        if body.is_end_stream() {
            call.mark_complete();
        }
        Self { body, call }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            self.call.calls.limit.refund_data(data.len());
        }
        if frame.is_none() || self.body.is_end_stream() {
            self.call.mark_complete();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer. Its call is in flight until the body is dropped.
struct ResponseBody {
    body: Body,
    _call: Arc<CallGuard>,
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
