//! Messages that are too long, told as the limit that they are over.
//!
//! tonic refuses them before they are read, with a text of its own that names no limit: [`Bounded`] puts ours in its
//! place, and counts it. For answers that we get, see [`is_too_large`].

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::Service;

use crate::limits::Limit;
use crate::metrics::Metrics;

/// Whether a message was over the limit on this side. The words are tonic's, which has no other way to say it.
pub(crate) fn is_too_large(status: &Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("decoded message length too large")
}

/// A generated service whose requests have at most so many bytes.
#[derive(Debug, Clone)]
pub(crate) struct Bounded<S> {
    service: S,
    limit: Limit,
    most: usize,
    metrics: Metrics,
}

impl<S> Bounded<S> {
    /// `service` must have been told the same number.
    pub(crate) fn new(service: S, limit: Limit, most: usize, metrics: &Metrics) -> Self {
        Self {
            service,
            limit,
            most,
            metrics: metrics.clone(),
        }
    }
}

impl<S: NamedService> NamedService for Bounded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Bounded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.service.call(request);
        let (limit, most, metrics) = (self.limit, self.most, self.metrics.clone());
        Box::pin(async move {
            let answer = answer.await?;
            // A call that is refused at once has its status where others have only headers.
            let refused = Status::from_header_map(answer.headers());
            if !refused.is_some_and(|status| is_too_large(&status)) {
                return Ok(answer);
            }
            metrics.limit_hit(limit.name());
            let over = limit.exceeded("the request is too large", most);
            Ok(Status::from(over).into_http())
        })
    }
}
