//! The header `Retry-After`, which `kube` does not pass on: copied into the body of an error.
//!
//! Priority and fairness sends the pause only there, with a plain text as the body.

use futures_util::future::BoxFuture;
use http::header::{CONTENT_LENGTH, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use kube::client::DynBody;
use kube::core::Status;
use kube::core::response::StatusDetails;
use tower::BoxError;
use tower::util::AndThenLayer;

type Answer = Response<Box<DynBody>>;

type Rewritten = BoxFuture<'static, Result<Answer, BoxError>>;

/// Returns a layer of a client.
pub(super) fn layer() -> AndThenLayer<impl FnOnce(Answer) -> Rewritten + Clone> {
    AndThenLayer::new(|answer| Box::pin(with_pause(answer)) as Rewritten)
}

async fn with_pause(answer: Answer) -> Result<Answer, BoxError> {
    let code = answer.status();
    let header = answer.headers().get(RETRY_AFTER);
    // A date is possible, but API servers send seconds.
    let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok());
    let Some(seconds) = seconds.filter(|_| code.is_client_error() || code.is_server_error()) else {
        return Ok(answer);
    };
    let (mut head, body) = answer.into_parts();
    let text = body.collect().await?.to_bytes();
    let body = serde_json::to_vec(&status(&text, code, seconds))?;
    head.headers.remove(CONTENT_LENGTH);
    let body = Full::from(body).map_err(BoxError::from);
    Ok(Response::from_parts(head, Box::new(body)))
}

/// Returns the error with its pause.
fn status(text: &[u8], code: StatusCode, seconds: u32) -> Status {
    let mut status = serde_json::from_slice(text).unwrap_or_else(|_| {
        let message = String::from_utf8_lossy(text);
        let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
        Status::failure(message.trim(), &reason).with_code(code.as_u16())
    });
    let details = status.details.get_or_insert(StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: 0,
    });
    details.retry_after_seconds = details.retry_after_seconds.max(seconds);
    status
}
