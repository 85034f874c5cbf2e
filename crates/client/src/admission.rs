//! Events of a pod's admission.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::{FutureExt as _, Stream, StreamExt as _};
use tokio::time::Sleep;
use tonic::{Status, Streaming};

use crate::deadline::Deadline;
use crate::v1::AdmitEvent;
use crate::v1::admit_event::Event;

/// The events of an admission: any number of `waiting`, then `admitted`. Dropping it earlier cancels the admission.
///
/// `admitted` is returned after the end of the stream. HTTP/2 counts a stream that is dropped earlier as an error, and
/// ends the connection with all its calls after a thousand of those.
#[derive(Debug)]
pub struct Admission {
    events: Streaming<AdmitEvent>,
    /// The last event, until the stream has ended.
    last: Option<AdmitEvent>,
    deadline: Deadline,
    time_up: Option<Pin<Box<Sleep>>>,
}

impl Admission {
    pub(crate) fn new(events: Streaming<AdmitEvent>, deadline: Deadline) -> Self {
        Self {
            events,
            last: None,
            time_up: deadline.sleep().map(Box::pin),
            deadline,
        }
    }

    /// Returns the next event, or `None` after `admitted`. Cancel safe.
    pub async fn message(&mut self) -> Result<Option<AdmitEvent>, Status> {
        self.next().await.transpose()
    }
}

impl Stream for Admission {
    type Item = Result<AdmitEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.last.is_none() {
            match self.events.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(event))) if matches!(event.event, Some(Event::Admitted(_))) => {
                    self.last = Some(event);
                }
                Poll::Ready(other) => return Poll::Ready(other),
                Poll::Pending => {
                    if let Some(time_up) = &mut self.time_up {
                        ready!(time_up.poll_unpin(cx));
                        self.time_up = None;
                        return Poll::Ready(Some(Err(self.deadline.passed().into())));
                    }
                    return Poll::Pending;
                }
            }
        }
        // The pod is admitted, even if the connection is lost now.
        let _ = ready!(self.events.poll_next_unpin(cx));
        Poll::Ready(self.last.take().map(Ok))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use tokio::sync::mpsc;
    use tokio_stream::wrappers::UnboundedReceiverStream;
    use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride};
    use tonic::codegen::http::StatusCode;
    use tonic_prost::ProstCodec;

    use super::*;
    use crate::v1::{Pod, Waiting};

    type Sender = mpsc::UnboundedSender<Result<AdmitEvent, Status>>;

    fn admission() -> (Sender, Admission) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut codec = ProstCodec::<AdmitEvent, AdmitEvent>::default();
        let events = UnboundedReceiverStream::new(receiver);
        let no_override = SingleMessageCompressionOverride::default();
        let body = EncodeBody::new_server(codec.encoder(), events, None, no_override, None);
        let events = Streaming::new_response(codec.decoder(), body, StatusCode::OK, None, None);
        (
            sender,
            Admission::new(events, Deadline::none(Path::new("devlet.sock"))),
        )
    }

    fn event(event: Event) -> AdmitEvent {
        AdmitEvent { event: Some(event) }
    }

    #[test]
    fn an_admitted_pod_is_reported_at_the_end_of_the_stream() {
        let (sender, mut events) = admission();
        let waiting = event(Event::Waiting(Waiting::default()));
        let admitted = event(Event::Admitted(Pod::default()));
        let mut next = || events.message().now_or_never().map(Result::unwrap);

        sender.send(Ok(waiting.clone())).unwrap();
        assert_eq!(next(), Some(Some(waiting)));
        sender.send(Ok(admitted.clone())).unwrap();
        // Polled and cancelled more than once.
        assert_eq!([next(), next()], [None, None]);
        drop(sender);
        assert_eq!(next(), Some(Some(admitted)));
        assert_eq!(next(), Some(None));
    }

    #[test]
    fn a_refusal_is_an_error_and_the_end() {
        let (sender, mut events) = admission();
        sender.send(Err(Status::resource_exhausted("full"))).unwrap();
        let error = events.message().now_or_never().unwrap().unwrap_err();
        assert_eq!(error.message(), "full");
        drop(sender);
        assert_eq!(events.message().now_or_never().unwrap().unwrap(), None);
    }
}
