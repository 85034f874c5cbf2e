//! One connection to a peer, on which calls are made.
//!
//! tonic's own channel answers calls that lose their connection with `UNKNOWN` or `CANCELLED`, and those that
//! run out of time with `CANCELLED`. Here the status says what happened, for answers and for streams:
//!
//! | what happened | status |
//! | --- | --- |
//! | the connection ended, or had ended before | `UNAVAILABLE` |
//! | the time set with `Request::set_timeout` ran out | `DEADLINE_EXCEEDED` |
//! | the peer answered with a status, or reset the stream | as tonic has it |

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::BodyExt;
use tonic::body::Body;
use tonic::{ConnectError, Status, TimeoutExpired};
use tower::Service;

/// For generated clients; see the module for what it adds to tonic's.
#[derive(Debug, Clone)]
pub struct Channel(tonic::transport::Channel);

impl Channel {
    pub(super) fn new(inner: tonic::transport::Channel) -> Self {
        Self(inner)
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.0.poll_ready(cx).map_err(|error| status(error.into()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async {
            let answer = answer.await.map_err(|error| status(error.into()))?;
            Ok(answer.map(|body| Body::new(body.map_err(|error| status(error.into())))))
        })
    }
}

/// What an error of the transport means to the caller.
fn status(error: Box<dyn Error + Send + Sync>) -> Status {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        if error.is::<TimeoutExpired>() {
            return Status::deadline_exceeded("no answer in time");
        }
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
        || error.is::<ConnectError>()
}

/// The text of the innermost cause: the outer ones say no more than that something went wrong.
fn deepest(mut error: &(dyn Error + 'static)) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
