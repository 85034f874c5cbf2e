//! What becomes of a connection's calls: whether a peer has ever asked for anything, and whether it waits for an answer.
//!
//! A request counts once all of it has come: half a request makes no connection busy. tonic tells none of this, so that
//! [`TrackCalls`] sits between the connection and the services.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

use crate::peer::PeerCred;

/// A connection, as those who answer its requests see it.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    pub(crate) peer: PeerCred,
    pub(crate) calls: Arc<Calls>,
    /// Whether an answer may be a stream. Then its call is under way until it has been passed on; other answers are
    /// short, and a peer that does not take them waits for nothing.
    pub(crate) has_streams: bool,
    /// What every request is answered with, if there is no place for this connection.
    pub(crate) refused: Option<Arc<str>>,
}

/// The calls of a connection.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    under_way: AtomicUsize,
    any: AtomicBool,
}

impl Calls {
    /// Whether the peer waits for no answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }

    /// Whether there has been a whole request.
    pub(crate) fn has_had_call(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }
}

/// One of them.
#[derive(Debug)]
struct CallGuard {
    calls: Arc<Calls>,
    is_complete: AtomicBool,
}

impl CallGuard {
    fn mark_complete(&self) {
        if !self.is_complete.swap(true, Ordering::AcqRel) {
            self.calls.under_way.fetch_add(1, Ordering::AcqRel);
            self.calls.any.store(true, Ordering::Release);
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if *self.is_complete.get_mut() {
            self.calls.under_way.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Makes services [`TrackCalls`].
#[derive(Debug, Clone)]
pub(crate) struct TrackCallsLayer;

impl<S> Layer<S> for TrackCallsLayer {
    type Service = TrackCalls<S>;

    fn layer(&self, service: S) -> TrackCalls<S> {
        TrackCalls(service)
    }
}

/// Services whose calls are known to their [`Connection`]. They find the [`PeerCred`] among a request's extensions.
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
        if let Some(over) = connection.refused {
            let refusal = Status::resource_exhausted(&*over).into_http();
            return Box::pin(std::future::ready(Ok(refusal)));
        }
        request.extensions_mut().insert(connection.peer);
        let call = Arc::new(CallGuard {
            calls: connection.calls,
            is_complete: AtomicBool::new(false),
        });
        let has_streams = connection.has_streams;
        let request = request.map(|body| Body::new(TrackedBody::new(body, call.clone())));
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // An answer may come before the end of the question; then that is all that there is.
            call.mark_complete();
            if !has_streams {
                return Ok(answer);
            }
            Ok(answer.map(|body| Body::new(TrackedBody::new(body, call))))
        })
    }
}

/// A body of a call; once its end was seen, the request is whole.
struct TrackedBody {
    body: Body,
    call: Arc<CallGuard>,
}

impl TrackedBody {
    fn new(body: Body, call: Arc<CallGuard>) -> Self {
        if body.is_end_stream() {
            call.mark_complete();
        }
        Self { body, call }
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
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
