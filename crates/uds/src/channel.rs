//! A gRPC channel over one connection, which never reconnects.
//!
//! It uses `h2` without hyper's and tonic's channels. Those keep calls in queues, each of which wakes one more task. They
//! send the body of a request in a separate task after its headers, so a small request wakes the peer twice. tonic's channel
//! also reconnects by itself, and calls that lose their connection end with `UNKNOWN` or `CANCELLED`. Here a request is sent
//! as a whole, and the status says what happened, for answers and for streams:
//!
//! | what happened | status |
//! | --- | --- |
//! | the connection ended, or had ended before | `UNAVAILABLE` |
//! | the time set with `Request::set_timeout` ran out | `DEADLINE_EXCEEDED` |
//! | the peer answered with a status, or reset the stream | as tonic has it |

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use h2::{Ping, PingPong, RecvStream};
use http::header::{HeaderMap, HeaderValue, USER_AGENT};
use http::uri::{Authority, Scheme, Uri};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use crate::read_limit::ReadLimit;

/// HTTP/2 window of one stream, large enough for a list of devices to arrive in one go.
pub const STREAM_WINDOW: u32 = 2 * 1024 * 1024;

/// HTTP/2 window of a whole connection.
pub const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;

/// The `user-agent` header.
const CALLER: HeaderValue = HeaderValue::from_static(concat!("devlet/", env!("CARGO_PKG_VERSION")));
const TIMEOUT: &str = "grpc-timeout";

/// Maximum bytes of an answer's headers or trailers. They contain error texts: with a lower limit, a long text would end
/// the call or the connection, and get lost. Callers shorten it.
const LONGEST_HEAD: u32 = 1 << 20;

/// Maximum number of concurrent calls until the peer has sent its own.
const FIRST_CALLS: usize = 100;

/// A channel for generated clients.
#[derive(Debug, Clone)]
pub struct Channel {
    requests: SendRequest<Bytes>,
    path: Arc<Path>,
    pings: Arc<Mutex<Option<PingPong>>>,
    limit: Option<Arc<ReadLimit>>,
}

/// Error: the connection of a channel has ended. It is the source of the [`Status`] of calls that lost their connection,
/// and distinguishes them from calls that the peer answered with `UNAVAILABLE`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the connection to {} has ended: dial again", path.display())]
pub struct ConnectionEnded {
    /// The socket.
    pub path: Arc<Path>,
    /// `false` if the peer did not process the request, because the channel no longer takes calls.
    pub was_sent: bool,
}

impl ConnectionEnded {
    /// Returns the status of a call that ended for this reason.
    fn status(self, message: String) -> Status {
        let mut status = Status::unavailable(message);
        status.set_source(Arc::new(self));
        status
    }
}

/// Returns `true` if the call was not made because its channel no longer takes calls.
pub fn is_ended(status: &Status) -> bool {
    let source =
        std::error::Error::source(status).and_then(|source| source.downcast_ref::<ConnectionEnded>());
    source.is_some_and(|ended| !ended.was_sent)
}

impl Channel {
    /// Starts HTTP/2 on a connection to `path`. The connection ends with the last clone of the channel and the last call.
    pub async fn open(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &Path,
    ) -> Result<Self, h2::Error> {
        Self::open_limited(stream, path, None).await
    }

    /// Opens a channel that refunds the data of answers to `limit`.
    pub(crate) async fn open_limited(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &Path,
        limit: Option<Arc<ReadLimit>>,
    ) -> Result<Self, h2::Error> {
        let mut builder = Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .initial_max_send_streams(FIRST_CALLS)
            .max_header_list_size(LONGEST_HEAD)
            .enable_push(false);
        let (requests, mut connection) = builder.handshake(stream).await?;
        let pings = Arc::new(Mutex::new(connection.ping_pong()));
        tokio::spawn(async move {
            // The calls report why it ended.
            let _ = connection.await;
        });
        Ok(Self {
            requests,
            path: path.into(),
            pings,
            limit,
        })
    }

    /// Sends an HTTP/2 ping, and returns once the peer has answered it.
    pub async fn ping(&self) -> Result<(), Status> {
        let pings = self.pings.clone();
        // h2 has one ping at a time: one that the caller gives up on still ends before the next.
        let answered = tokio::spawn(async move {
            match pings.lock().await.as_mut() {
                Some(pings) => pings.ping(Ping::opaque()).await.map(drop),
                None => Ok(()),
            }
        });
        match answered.await {
            Ok(Err(error)) => Err(status(error, &self.path)),
            // An error here means that the runtime shuts down.
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sends a request as a whole, and returns the answer without its body.
    async fn ask(self, request: http::Request<Body>) -> Result<http::Response<RecvStream>, Status> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let path = &self.path;
        let not_sent = |_| {
            let ended = ConnectionEnded {
                path: path.clone(),
                was_sent: false,
            };
            let message = ended.to_string();
            ended.status(message)
        };
        let mut requests = self.requests.clone().ready().await.map_err(not_sent)?;
        let request = http::Request::from_parts(head, ());
        let (answer, mut rest) = requests.send_request(request, false).map_err(not_sent)?;
        // If this fails, the answer says why.
        let _ = rest.send_data(body, true);
        answer
            .await
            .map_err(|error| match error.is_go_away() && error.is_remote() {
                // The peer did not process it.
                true => not_sent(error),
                false => status(error, path),
            })
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        // The call reports that the connection has ended: generated clients turn an error here into `UNKNOWN`.
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
        let (path, limit) = (self.path.clone(), self.limit.clone());
        let answer = self.clone().ask(request);
        Box::pin(async move {
            let answer = match time {
                Some(time) => tokio::time::timeout(time, answer)
                    .await
                    .map_err(|_| Status::deadline_exceeded("no answer in time"))?,
                None => answer.await,
            };
            let answer = answer?;
            if let Some(limit) = &limit {
                limit.refund_call();
            }
            Ok(answer.map(|stream| Body::new(Answer { stream, path, limit })))
        })
    }
}

/// The body of an answer.
struct Answer {
    stream: RecvStream,
    path: Arc<Path>,
    limit: Option<Arc<ReadLimit>>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match ready!(self.stream.poll_data(cx)) {
            Some(Ok(data)) => {
                if let Some(limit) = &self.limit {
                    limit.refund_data(data.len());
                }
                // This fails if the stream has ended, and then the window does not matter.
                let _ = self.stream.flow_control().release_capacity(data.len());
                Some(Ok(Frame::data(data)))
            }
            Some(Err(error)) => Some(Err(status(error, &self.path))),
            None => {
                let trailers = ready!(self.stream.poll_trailers(cx));
                trailers
                    .map(|trailers| trailers.map(Frame::trailers))
                    .map_err(|error| status(error, &self.path))
                    .transpose()
            }
        };
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// Parses the `grpc-timeout` header: digits and a unit.
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

/// Converts an error of the transport.
fn status(error: h2::Error, path: &Arc<Path>) -> Status {
    match error.is_io() || error.is_go_away() {
        true => {
            let ended = ConnectionEnded {
                path: path.clone(),
                was_sent: true,
            };
            ended.status(error.to_string())
        }
        false => Status::from_error(error.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use tonic::Code;

    use super::*;

    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    /// Without an error; the last processed stream is 0, which is not a stream.
    const GOAWAY: &[u8] = &[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    /// RST_STREAM of the first call.
    const CANCEL: &[u8] = &[0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8];
    const HEADERS: u8 = 1;

    /// Returns the status of a call that the peer answers with these bytes.
    async fn answered(answer: &[u8]) -> Status {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let channel = Channel::open(ours, Path::new("/run/peer.sock")).await.unwrap();
        let request = http::Request::post("/service/Method")
            .body(Body::empty())
            .unwrap();
        let call = channel.clone().call(request);
        let peer = async {
            theirs.read_exact(&mut [0; 24]).await.unwrap();
            theirs.write_all(SETTINGS).await.unwrap();
            loop {
                let mut head = [0; 9];
                theirs.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                theirs.read_exact(&mut vec![0; length as usize]).await.unwrap();
                if head[3] == HEADERS {
                    break;
                }
            }
            theirs.write_all(answer).await.unwrap();
            // Open until the call has ended, unless there was no answer at all.
            (!answer.is_empty()).then_some(theirs)
        };
        let (ended, _open) = tokio::join!(call, peer);
        let Err(status) = ended else {
            panic!("the call succeeded")
        };
        status
    }

    #[tokio::test]
    async fn a_ping_is_answered_or_ends_with_the_connection() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let channel = Channel::open(ours, Path::new("/run/peer.sock")).await.unwrap();
        let mut peer = h2::server::handshake(theirs).await.unwrap();
        tokio::select! {
            answered = channel.ping() => answered.unwrap(),
            _ = peer.accept() => panic!("there is no call"),
        }
        // The peer does not answer this one, and the next one is sent meanwhile.
        assert!(channel.ping().now_or_never().is_none());
        let (ended, ()) = tokio::join!(channel.ping(), async { drop(peer) });
        assert_eq!(ended.unwrap_err().code(), Code::Unavailable);
    }

    #[tokio::test]
    async fn a_request_that_the_peer_did_not_process_was_not_sent() {
        let status = answered(GOAWAY).await;
        assert!(is_ended(&status), "{status:?}");
    }

    #[tokio::test]
    async fn a_connection_that_ends_under_a_call_is_unavailable() {
        let status = answered(&[]).await;
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(!is_ended(&status), "{status:?}");
        let source = std::error::Error::source(&status).unwrap();
        assert!(source.is::<ConnectionEnded>(), "{status:?}");
    }

    #[tokio::test]
    async fn a_reset_stream_has_the_status_of_the_reset() {
        let status = answered(CANCEL).await;
        assert_eq!(status.code(), Code::Cancelled, "{status:?}");
    }
}
