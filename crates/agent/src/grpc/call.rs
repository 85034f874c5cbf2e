//! One call: how long it may take, what it is answered with, and what went wrong.
//!
//! Answers can be had as the bytes that came: they may have fields that we do not know, and what is long is looked at
//! before it is decoded.

use std::path::Path;
use std::time::Duration;

use devlet_client::channel::{Channel, is_ended};
use http::uri::PathAndQuery;
use prost::bytes::{Buf as _, Bytes};
use tokio::time::{Instant, timeout_at};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::{Code, Request, Response, Status};

use super::fields::Damage;
use super::oversize::is_too_large;
use super::uds::Dialed;
use crate::deadline;
use crate::limits::{Limit, OverLimit};
use crate::peer_text::shorten_status;

/// How far ahead of ours a peer's timer may be.
const AHEAD: Duration = Duration::from_millis(5);

/// How long a connection may take to end after a call on it failed for that reason.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why a call did not end well.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The plugin did not answer in time.
    #[error("{method} was not answered within {} s", .deadline.as_secs_f32())]
    TimedOut {
        /// The call.
        method: &'static str,
        /// How long we waited.
        deadline: Duration,
    },
    /// Whoever waits for the answer cannot wait any longer; the plugin might have had more time.
    #[error("{method} was not answered before the caller's deadline, {:.1} s after the call; wait longer", .waited.as_secs_f32())]
    CutShort {
        /// The call.
        method: &'static str,
        /// How long the plugin had.
        waited: Duration,
    },
    /// The plugin went away under the call.
    #[error("{method}: the plugin went away")]
    Gone {
        /// The call.
        method: &'static str,
    },
    /// The plugin refused.
    #[error("{method}: {} ({:?})", .status.message(), .status.code())]
    Refused {
        /// The call.
        method: &'static str,
        /// The answer.
        status: Box<Status>,
    },
    /// The plugin answered something that is no answer.
    #[error("{method}: {problem}")]
    Invalid {
        /// The call.
        method: &'static str,
        /// What is wrong with it.
        problem: InvalidAnswer,
    },
}

/// An answer that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnswer {
    /// There is none for the container.
    #[error("the plugin answered for no container")]
    NoContainer,
    /// It is not what it should be.
    #[error("the answer is damaged: {0}")]
    Damaged(String),
    /// There is too much of it.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// No container runtime can carry it out.
    #[error("no container runtime can carry out the answer: {0}")]
    Impossible(String),
}

impl From<Damage> for InvalidAnswer {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage.to_string())
    }
}

impl From<prost::DecodeError> for InvalidAnswer {
    fn from(error: prost::DecodeError) -> Self {
        Self::Damaged(error.to_string())
    }
}

impl CallError {
    /// Whether the plugin went away, so that waiting for it helps.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Whether the plugin said nothing in the time that it had.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::CutShort { .. })
    }
}

/// What a plugin is given to answer, however little time its caller has left.
pub const LEAST: Duration = Duration::from_secs(1);

/// How long a call may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// The plugin's own deadline.
    pub own: Duration,
    /// The deadline of whoever waits for the answer. A plugin that is there has [`LEAST`] all the same: somebody who
    /// does not want to wait for plugins that are not there does not mean those.
    pub caller: Option<Instant>,
}

impl Patience {
    /// Nobody in particular waits.
    pub(crate) fn of(own: Duration) -> Self {
        Self { own, caller: None }
    }

    /// When it ends for a call that is made now.
    pub(crate) fn end(&self) -> Instant {
        let now = Instant::now();
        let own = deadline::after_start(now, self.own);
        self.caller.map_or(own, |caller| caller.max(now + LEAST).min(own))
    }
}

/// Waits for an answer, as long as patience lasts, and logs the call: how long that took, and the answer.
pub(crate) async fn within<T>(
    method: &'static str,
    patience: Patience,
    limit: (Limit, usize),
    dialed: &Dialed,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> (Duration, Result<T, CallError>) {
    let (took, ended) = within_unlogged(method, patience, limit, dialed, call).await;
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

/// The same, but an answer is not logged: the caller does that with [`log_answer`].
pub(crate) async fn within_unlogged<T>(
    method: &'static str,
    patience: Patience,
    limit: (Limit, usize),
    dialed: &Dialed,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> (Duration, Result<T, CallError>) {
    let Patience { own, caller } = patience;
    let (called, end) = (Instant::now(), patience.end());
    let ended = timeout_at(end, call).await;
    let took = called.elapsed();
    if !matches!(ended, Ok(Ok(_))) {
        log_call(method, dialed.channel.path(), took, ended.as_ref().ok());
    }
    let status = match ended {
        Ok(Ok(response)) => return (took, Ok(response.into_inner())),
        Ok(Err(status)) if !is_timeout(&status, end) => status,
        Ok(Err(_)) | Err(_) => {
            let error = match end < deadline::after_start(called, own) {
                true => CallError::CutShort { method, waited: took },
                false => CallError::TimedOut {
                    method,
                    deadline: own,
                },
            };
            return (took, Err(error));
        }
    };
    (took, Err(explained(method, status, caller, limit, dialed).await))
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

/// Whether a peer gave up because time was up: it was told of the deadline, too, and its timer may be a little ahead of
/// ours.
fn is_timeout(status: &Status, end: Instant) -> bool {
    let gave_up = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled);
    gave_up && Instant::now() + AHEAD >= end
}

async fn explained(
    method: &'static str,
    status: Status,
    caller: Option<Instant>,
    (limit, largest): (Limit, usize),
    dialed: &Dialed,
) -> CallError {
    if is_too_large(&status) {
        let problem = limit.exceeded("the answer is too large", largest).into();
        return CallError::Invalid { method, problem };
    }
    // It has said goodbye, and only streams from before keep the connection open.
    if is_ended(&status) {
        dialed.hang_up();
    }
    // A plugin may say so itself; only if its connection ends, too, there is something to wait for.
    let farewell = Instant::now() + FAREWELL;
    let farewell = caller.map_or(farewell, |caller| caller.min(farewell));
    let looks_gone = matches!(status.code(), Code::Unavailable | Code::Cancelled);
    if looks_gone && timeout_at(farewell, dialed.gone().wait()).await.is_ok() {
        return CallError::Gone { method };
    }
    CallError::Refused {
        method,
        status: Box::new(shorten_status(&status)),
    }
}

/// Calls with bytes, for bytes of which there are at most so many.
pub(crate) async fn unary(
    channel: &Channel,
    path: &'static str,
    request: Request<Bytes>,
    largest: usize,
) -> Result<Response<Bytes>, Status> {
    let mut grpc = ready(channel, largest).await?;
    grpc.unary(request, PathAndQuery::from_static(path), AsBytes)
        .await
}

/// Calls with bytes, for messages each of which has at most so many.
pub(crate) async fn stream(
    channel: &Channel,
    path: &'static str,
    request: Request<Bytes>,
    largest: usize,
) -> Result<Streaming<Bytes>, Status> {
    let mut grpc = ready(channel, largest).await?;
    let answer = grpc.server_streaming(request, PathAndQuery::from_static(path), AsBytes);
    Ok(answer.await?.into_inner())
}

async fn ready(channel: &Channel, largest: usize) -> Result<Grpc<Channel>, Status> {
    let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(largest);
    grpc.ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(grpc)
}

/// Messages as the bytes that they are.
#[derive(Debug, Clone, Copy, Default)]
struct AsBytes;

impl Codec for AsBytes {
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

impl Encoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        use prost::bytes::BufMut as _;
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
/// A time as people say it: in seconds, with tenths if there are any.
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
    fn times_are_told_in_seconds_and_tenths() {
        let said =
            [0, 49, 300, 1_000, 1_940, 59_960, 60_020].map(|time| seconds(Duration::from_millis(time)));
        assert_eq!(said, ["0 s", "0 s", "0.3 s", "1 s", "1.9 s", "60 s", "60 s"]);
    }
}
