//! What becomes of a connection's calls: whether a peer has ever asked for anything, and whether it waits for an answer.
//!
//! A request counts once all of it has come: half a request makes no connection busy. tonic tells none of this, so that
//! [`Attended`] sits between the connection and the services.

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

use super::uds::PeerCred;
use crate::limits::OverLimit;

/// A connection, as those who answer its requests see it.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    pub(super) peer: PeerCred,
    pub(super) calls: Arc<Calls>,
    /// Whether an answer may be a stream. Then its call is under way until it has been passed on; other answers are
    /// short, and a peer that does not take them waits for nothing.
    pub(super) has_streams: bool,
    /// What every request is answered with, if there is no place for this connection.
    pub(super) refused: Option<Arc<OverLimit>>,
}

/// The calls of a connection.
#[derive(Debug, Default)]
pub(super) struct Calls {
    under_way: AtomicUsize,
    any: AtomicBool,
}

impl Calls {
    /// Whether the peer waits for no answer.
    pub(super) fn are_none(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }

    /// Whether there has been a whole request.
    pub(super) fn were_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }
}

/// One of them.
#[derive(Debug)]
struct Call {
    calls: Arc<Calls>,
    is_whole: AtomicBool,
}

impl Call {
    fn is_whole(&self) {
        if !self.is_whole.swap(true, Ordering::AcqRel) {
            self.calls.under_way.fetch_add(1, Ordering::AcqRel);
            self.calls.any.store(true, Ordering::Release);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if *self.is_whole.get_mut() {
            self.calls.under_way.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Makes services [`Attended`].
#[derive(Debug, Clone)]
pub(super) struct Attend;

impl<S> Layer<S> for Attend {
    type Service = Attended<S>;

    fn layer(&self, service: S) -> Attended<S> {
        Attended(service)
    }
}

/// Services whose calls are known to their [`Connection`]. They find the [`PeerCred`] among a request's extensions.
#[derive(Debug, Clone)]
pub(super) struct Attended<S>(S);

impl<S> Service<Request<Body>> for Attended<S>
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
            let refusal = Status::from(OverLimit::clone(&over)).into_http();
            return Box::pin(std::future::ready(Ok(refusal)));
        }
        request.extensions_mut().insert(connection.peer);
        let call = Arc::new(Call {
            calls: connection.calls,
            is_whole: AtomicBool::new(false),
        });
        let has_streams = connection.has_streams;
        let request = request.map(|body| Body::new(Followed::new(body, call.clone())));
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // An answer may come before the end of the question; then that is all that there is.
            call.is_whole();
            if !has_streams {
                return Ok(answer);
            }
            Ok(answer.map(|body| Body::new(Followed::new(body, call))))
        })
    }
}

/// A body of a call; once its end was seen, the request is whole.
struct Followed {
    body: Body,
    call: Arc<Call>,
}

impl Followed {
    fn new(body: Body, call: Arc<Call>) -> Self {
        if body.is_end_stream() {
            call.is_whole();
        }
        Self { body, call }
    }
}

impl HttpBody for Followed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.call.is_whole();
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
