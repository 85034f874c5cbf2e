//! Answers that a gRPC library would not send: hand-made bytes in an HTTP/2 stream.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use devlet_kubelet_api::device_plugin::v1beta1;
use http_body::Frame;
use http_body_util::StreamBody;
use prost::Message as _;
use prost::bytes::Bytes;
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http;
use tower::Service;

use crate::calls::Calls;
use crate::events::{Event, emit};
use crate::script::Fault;
use crate::serve::Answering;

/// A service with faults.
pub(crate) trait HasCalls {
    fn calls(&self) -> &Calls;
}

/// A layer around all services of a process that applies faults.
#[derive(Debug)]
pub(crate) struct WireFaults<S, P> {
    pub(crate) inner: S,
    pub(crate) of: Arc<P>,
}

impl<S: Clone, P> Clone for WireFaults<S, P> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            of: Arc::clone(&self.of),
        }
    }
}

impl<S, P> Service<http::Request<Body>> for WireFaults<S, P>
where
    P: HasCalls,
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let Some(fault) = self.of.calls().wire_fault(method) else {
            return Box::pin(self.inner.call(request));
        };
        emit(&Event::Called {
            method: method.to_owned(),
            ids: Vec::new(),
        });
        let stays_open = matches!(method, "ListAndWatch" | "NodeWatchResources");
        let (sender, receiver) = channel(1);
        tokio::spawn(async move {
            // On an error the caller has disconnected.
            let _ = answer(fault, stays_open, &sender).await;
        });
        let body = Body::new(StreamBody::new(ReceiverStream::new(receiver)));
        let mut response = http::Response::new(body);
        let grpc = http::HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
        Box::pin(async { Ok(response) })
    }
}

type Piece = Result<Frame<Bytes>, Status>;
type Disconnected = tokio::sync::mpsc::error::SendError<Piece>;

async fn answer(fault: Fault, stays_open: bool, sender: &Sender<Piece>) -> Result<(), Disconnected> {
    let data = |bytes: Vec<u8>| sender.send(Ok(Frame::data(Bytes::from(bytes))));
    let fault = match fault {
        Fault::Zeros(count) => Fault::Raw(vec![0; count]),
        fault => fault,
    };
    match fault {
        Fault::Half => data([header(1_000), b"half".to_vec()].concat()).await?,
        Fault::Drip { pause_ms } => {
            let mut pause = tokio::time::interval(Duration::from_millis(pause_ms));
            for byte in header(1 << 10) {
                pause.tick().await;
                data(vec![byte]).await?;
            }
            loop {
                pause.tick().await;
                data(vec![0]).await?;
            }
        }
        Fault::Raw(bytes) => {
            data(message(&bytes)).await?;
            if !stays_open {
                let mut trailers = http::HeaderMap::new();
                trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
                return sender.send(Ok(Frame::trailers(trailers))).await;
            }
        }
        Fault::Endless(bytes) => endless([message(&bytes)], sender).await?,
        Fault::EndlessDevices(count) => {
            let list = |health: &str| {
                let device = |number| v1beta1::Device {
                    id: format!("many-{number}"),
                    health: health.to_owned(),
                    topology: None,
                };
                let devices = (0..count).map(device).collect();
                message(&v1beta1::ListAndWatchResponse { devices }.encode_to_vec())
            };
            endless([list(v1beta1::HEALTHY), list("Unhealthy")], sender).await?;
        }
        _ => {}
    }
    sender.closed().await;
    Ok(())
}

/// Sends all messages repeatedly.
async fn endless<const COUNT: usize>(
    messages: [Vec<u8>; COUNT],
    sender: &Sender<Piece>,
) -> Result<(), Disconnected> {
    let messages = messages.map(Bytes::from);
    for message in messages.iter().cycle() {
        sender.send(Ok(Frame::data(message.clone()))).await?;
    }
    Ok(())
}

fn message(bytes: &[u8]) -> Vec<u8> {
    [header(bytes.len()), bytes.to_vec()].concat()
}

/// Returns the gRPC header of an uncompressed message of `length` bytes.
fn header(length: usize) -> Vec<u8> {
    let length = u32::try_from(length).expect("a message is no longer than that");
    [&[0], &length.to_be_bytes()[..]].concat()
}
