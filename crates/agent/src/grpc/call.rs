//! One call on a plugin or driver: its deadline, its answer and its errors.
//!
//! Answers are available as bytes: they may have unknown fields, and long ones are checked before they are decoded.

use std::path::Path;
use std::time::Duration;

use devlet_uds::PeerConnection;
use devlet_uds::channel::{Channel, is_ended};
use http::uri::PathAndQuery;
use prost::bytes::{Buf as _, Bytes};
use tokio::time::{Instant, timeout_at};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::{Code, Request, Response, Status};

use super::fields::WireError;
use super::oversize::is_too_large;
use crate::deadline;
use crate::limits::{Limit, LimitExceeded};
use crate::peer_text::shorten_status;

/// Tolerance for a peer whose timer runs ahead of ours.
const CLOCK_SKEW: Duration = Duration::from_millis(5);

/// Time for a connection to end after a call failed because of its end.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Error of a call on a plugin or driver.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The plugin did not answer in time.
    #[error("{method} was not answered within {} s", .deadline.as_secs_f32())]
    TimedOut {
        method: &'static str,
        deadline: Duration,
    },
    /// The caller's deadline passed before the plugin's.
    #[error("{method} was not answered before the caller's deadline, {:.1} s after the call; wait longer", .waited.as_secs_f32())]
    CallerDeadline { method: &'static str, waited: Duration },
    /// The connection ended during the call.
    #[error("{method}: the plugin went away")]
    Gone { method: &'static str },
    /// The plugin refused.
    #[error("{method}: {} ({:?})", .status.message(), .status.code())]
    Refused {
        method: &'static str,
        status: Box<Status>,
    },
    /// The answer cannot be used.
    #[error("{method}: {problem}")]
    Invalid {
        method: &'static str,
        problem: InvalidAnswer,
    },
}

/// Reason why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnswer {
    /// It does not contain a part for the container.
    #[error("the answer does not contain a response for the container")]
    NoContainer,
    /// It cannot be decoded.
    #[error("the answer is damaged: {0}")]
    Damaged(String),
    /// It exceeds a limit.
    #[error(transparent)]
    LimitExceeded(#[from] LimitExceeded),
    /// Container runtimes cannot carry it out.
    #[error("no container runtime can carry out the answer: {0}")]
    Impossible(String),
}

impl From<WireError> for InvalidAnswer {
    fn from(error: WireError) -> Self {
        Self::Damaged(error.to_string())
    }
}

impl From<prost::DecodeError> for InvalidAnswer {
    fn from(error: prost::DecodeError) -> Self {
        Self::Damaged(error.to_string())
    }
}

impl CallError {
    /// Returns `true` if the plugin's connection ended, so that waiting for the plugin helps.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Returns `true` if the plugin did not answer in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::CallerDeadline { .. })
    }
}

/// Minimum time that a connected plugin gets to answer.
pub const MIN_CALL_TIME: Duration = Duration::from_secs(1);

/// The time that a call may take.
#[derive(Debug, Clone, Copy)]
pub struct CallDeadline {
    /// The plugin's own deadline.
    pub own: Duration,
    /// The caller's deadline. A connected plugin always gets at least [`MIN_CALL_TIME`].
    pub caller: Option<Instant>,
}

impl CallDeadline {
    /// Returns a deadline without a caller.
    pub(crate) fn of(own: Duration) -> Self {
        Self { own, caller: None }
    }

    /// Returns the deadline of a call that is made now.
    pub(crate) fn end(&self) -> Instant {
        let now = Instant::now();
        let own = deadline::after_start(now, self.own);
        self.caller
            .map_or(own, |caller| caller.max(now + MIN_CALL_TIME).min(own))
    }
}

/// Waits for an answer until the deadline, and logs the call, its duration and its outcome.
pub(crate) async fn call_with_deadline<T>(
    method: &'static str,
    deadline: CallDeadline,
    limit: (Limit, usize),
    dialed: &PeerConnection,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> (Duration, Result<T, CallError>) {
    let (took, ended) = call_with_deadline_unlogged(method, deadline, limit, dialed, call).await;
    if ended.is_ok() {
        log_answer(method, dialed.channel.path(), took, None);
    }
    (took, ended)
}

/// Logs a call that was answered, with the error that the answer contains, if any.
pub(crate) fn log_answer(method: &'static str, peer: &Path, took: Duration, error: Option<&str>) {
    let peer = peer.display();
    match error {
        Some(error) => tracing::debug!(method, %peer, ?took, outcome = "Failed", error, "call ended"),
        None => tracing::debug!(method, %peer, ?took, outcome = ?Code::Ok, "call ended"),
    }
}

/// Waits as [`call_with_deadline`] does. The caller logs a successful answer with [`log_answer`].
pub(crate) async fn call_with_deadline_unlogged<T>(
    method: &'static str,
    deadline: CallDeadline,
    limit: (Limit, usize),
    dialed: &PeerConnection,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> (Duration, Result<T, CallError>) {
    let CallDeadline { own, caller } = deadline;
    let (called, end) = (Instant::now(), deadline.end());
    let ended = timeout_at(end, call).await;
    let took = called.elapsed();
    if !matches!(ended, Ok(Ok(_))) {
        log_call(method, dialed.channel.path(), took, ended.as_ref().ok());
    }
    let status = match ended {
        Ok(Ok(response)) => return (took, Ok(response.into_inner())),
        Ok(Err(status)) if !peer_timed_out(&status, end) => status,
        Ok(Err(_)) | Err(_) => {
            let error = match end < deadline::after_start(called, own) {
                true => CallError::CallerDeadline { method, waited: took },
                false => CallError::TimedOut {
                    method,
                    deadline: own,
                },
            };
            return (took, Err(error));
        }
    };
    (
        took,
        Err(classify_failure(method, status, caller, limit, dialed).await),
    )
}

/// Logs a call on a plugin or driver. `ended` is `None` if it was not answered in time.
pub(crate) fn log_call<T>(
    method: &'static str,
    peer: &Path,
    took: Duration,
    ended: Option<&Result<Response<T>, Status>>,
) {
    let outcome = match ended {
        Some(Ok(_)) => Code::Ok,
        Some(Err(status)) => status.code(),
        None => Code::DeadlineExceeded,
    };
    let peer = peer.display();
    match ended {
        Some(Err(status)) => {
            let error = shorten_status(status);
            tracing::debug!(method, %peer, ?took, ?outcome, error = error.message(), "call ended");
        }
        _ => tracing::debug!(method, %peer, ?took, ?outcome, "call ended"),
    }
}

/// Returns `true` if the peer gave up because of the deadline, which it knows too: its timer may run ahead of ours.
fn peer_timed_out(status: &Status, end: Instant) -> bool {
    let gave_up = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled);
    gave_up && Instant::now() + CLOCK_SKEW >= end
}

async fn classify_failure(
    method: &'static str,
    status: Status,
    caller: Option<Instant>,
    (limit, max_bytes): (Limit, usize),
    dialed: &PeerConnection,
) -> CallError {
    if is_too_large(&status) {
        let problem = limit.exceeded("the answer is too large", max_bytes).into();
        return CallError::Invalid { method, problem };
    }
    // The peer sent GOAWAY; only older streams keep the connection open.
    if is_ended(&status) {
        dialed.close();
    }
    // A plugin may answer with these codes itself. It has gone only if its connection ends, too.
    let grace = Instant::now() + CLOSE_GRACE;
    let grace = caller.map_or(grace, |caller| caller.min(grace));
    let looks_gone = matches!(status.code(), Code::Unavailable | Code::Cancelled);
    if looks_gone && timeout_at(grace, dialed.closed().wait()).await.is_ok() {
        return CallError::Gone { method };
    }
    CallError::Refused {
        method,
        status: Box::new(shorten_status(&status)),
    }
}

/// Makes a unary call; the answer has at most `max_bytes` bytes.
pub(crate) async fn unary(
    channel: &Channel,
    path: &'static str,
    request: Request<Bytes>,
    max_bytes: usize,
) -> Result<Response<Bytes>, Status> {
    let mut grpc = ready(channel, max_bytes).await?;
    grpc.unary(request, PathAndQuery::from_static(path), BytesCodec)
        .await
}

/// Makes a call that is answered with a stream; each message has at most `max_bytes` bytes.
pub(crate) async fn stream(
    channel: &Channel,
    path: &'static str,
    request: Request<Bytes>,
    max_bytes: usize,
) -> Result<Streaming<Bytes>, Status> {
    let mut grpc = ready(channel, max_bytes).await?;
    let answer = grpc.server_streaming(request, PathAndQuery::from_static(path), BytesCodec);
    Ok(answer.await?.into_inner())
}

async fn ready(channel: &Channel, max_bytes: usize) -> Result<Grpc<Channel>, Status> {
    let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(max_bytes);
    grpc.ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(grpc)
}

/// Codec for messages that stay encoded.
#[derive(Debug, Clone, Copy, Default)]
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        use prost::bytes::BufMut as _;
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Formats a time in seconds, with tenths unless they are 0.
pub(crate) fn seconds(time: Duration) -> String {
    let tenths = (time.as_millis() + 50) / 100;
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} s"),
        (whole, tenths) => format!("{whole}.{tenths} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_in_seconds_and_tenths() {
        let texts =
            [0, 49, 300, 1_000, 1_940, 59_960, 60_020].map(|time| seconds(Duration::from_millis(time)));
        assert_eq!(texts, ["0 s", "0 s", "0.3 s", "1 s", "1.9 s", "60 s", "60 s"]);
    }
}
