//! One connection to a peer, on which calls are made.
//!
//! It is hyper's, without tonic's channel around it: that one connects again by itself, keeps calls in a queue of its own,
//! each of which wakes one task more, and answers calls that lose their connection with `UNKNOWN` or `CANCELLED`. Here the
//! status says what happened, for answers and for streams:
//!
//! | what happened | status |
//! | --- | --- |
//! | the connection ended, or had ended before | `UNAVAILABLE` |
//! | the time set with `Request::set_timeout` ran out | `DEADLINE_EXCEEDED` |
//! | the peer answered with a status, or reset the stream | as tonic has it |

use std::error::Error;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{HeaderMap, HeaderValue, USER_AGENT};
use http::uri::{Authority, Scheme, Uri};
use http_body_util::BodyExt;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;

use super::uds::{CONNECTION_WINDOW, STREAM_WINDOW};

/// What a peer sees of who calls.
const CALLER: HeaderValue = HeaderValue::from_static(concat!("devlet/", env!("CARGO_PKG_VERSION")));
const TIMEOUT: &str = "grpc-timeout";

/// For generated clients; see the module.
#[derive(Debug, Clone)]
pub struct Channel {
    requests: SendRequest<Body>,
    path: Arc<Path>,
}

/// The connection to which a channel belonged has ended.
#[derive(Debug, thiserror::Error)]
#[error("the connection to {} {ENDED}", path.display())]
struct Ended<'a> {
    path: &'a Path,
}

const ENDED: &str = "has ended: dial again";

/// Whether a call could not be made because its channel takes no more. The way through the library leaves only words.
pub(crate) fn is_ended(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message().ends_with(ENDED)
}

impl Channel {
    /// Speaks HTTP/2 on a connection to `path`, until that ends, or this, all its clones and all calls have.
    pub(super) async fn open(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &Path,
    ) -> hyper::Result<Self> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .adaptive_window(false);
        let (requests, connection) = builder.handshake(TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            // Whoever calls is told why it ended.
            let _ = connection.await;
        });
        Ok(Self {
            requests,
            path: path.into(),
        })
    }

    fn ended(&self) -> Status {
        Status::unavailable(Ended { path: &self.path }.to_string())
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        // A connection that has ended is told by the call: generated clients turn what is told here into `UNKNOWN`.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let mut target = std::mem::take(request.uri_mut()).into_parts();
        target.scheme = Some(Scheme::HTTP);
        target.authority = Some(Authority::from_static("localhost"));
        match Uri::from_parts(target) {
            Ok(target) => *request.uri_mut() = target,
            Err(error) => {
                let refused = Status::internal(error.to_string());
                return Box::pin(std::future::ready(Err(refused)));
            }
        }
        request.headers_mut().insert(USER_AGENT, CALLER);
        let time = time_of(request.headers());
        let answer = self.requests.send_request(request);
        let channel = self.clone();
        Box::pin(async move {
            let answer = match time {
                Some(time) => tokio::time::timeout(time, answer)
                    .await
                    .map_err(|_| Status::deadline_exceeded("no answer in time"))?,
                None => answer.await,
            };
            let answer =
                answer.map_err(
                    |error| match error.is_canceled() && channel.requests.is_closed() {
                        // It was not sent.
                        true => channel.ended(),
                        false => status(error.into()),
                    },
                )?;
            Ok(answer.map(|body| Body::new(body.map_err(|error| status(error.into())))))
        })
    }
}

/// How long a call may take, as the peer is told: digits and a unit.
fn time_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(count.saturating_mul(60))),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// What an error of the transport means to the caller.
fn status(error: Box<dyn Error + Send + Sync>) -> Status {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        if is_end_of_connection(error) {
            return Status::unavailable(deepest(error));
        }
        cause = error.source();
    }
    Status::from_error(error)
}

fn is_end_of_connection(error: &(dyn Error + 'static)) -> bool {
    let in_hyper = |error: &hyper::Error| error.is_canceled() || error.is_closed();
    let in_h2 = |error: &h2::Error| error.is_io() || error.is_go_away();
    error.downcast_ref().is_some_and(in_hyper)
        || error.downcast_ref().is_some_and(in_h2)
        || error.is::<io::Error>()
}

/// The text of the innermost cause: the outer ones say no more than that something went wrong.
fn deepest(mut error: &(dyn Error + 'static)) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
