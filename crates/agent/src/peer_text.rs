//! Limits on texts to and from peers: errors, names, kinds and versions.
//!
//! Texts from plugins and drivers are truncated where they enter, before they are logged, stored or passed on. Control
//! characters stay: the log, the command line and gRPC each escape them.

use std::fmt::Display;

use tonic::Status;

/// Maximum bytes of a text from a peer.
const MAX_TEXT_BYTES: usize = 1024;

/// Maximum bytes of a status message that devlet sends. Percent-encoded it takes up to three times as many, and clients
/// accept 16 KiB of headers.
const MAX_STATUS_BYTES: usize = 4 * 1024;

/// Returns the message of a status that devlet sends.
pub(crate) fn status_message(error: impl Display) -> String {
    shorten_to(MAX_STATUS_BYTES, error.to_string())
}

/// Returns the status for a device plugin. A kubelet returns plain Go errors, which arrive as `UNKNOWN` with their text.
pub(crate) fn refusal(error: impl Display) -> Status {
    Status::unknown(status_message(error))
}

/// Shortens a text from a peer.
pub(crate) fn shorten(text: String) -> String {
    shorten_to(MAX_TEXT_BYTES, text)
}

/// Shortens a text to `max` bytes. A shortened text ends with its original length in bytes.
fn shorten_to(max: usize, mut text: String) -> String {
    if text.len() > max {
        let end = format!("… ({} bytes)", text.len());
        text.truncate(text.floor_char_boundary(max.saturating_sub(end.len())));
        text.push_str(&end);
    }
    text
}

/// Shortens the message of a status from a peer, and drops its details and metadata.
pub(crate) fn shorten_status(status: &Status) -> Status {
    Status::new(status.code(), shorten(status.message().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_texts_keep_their_beginning_and_end_with_their_length() {
        for text in ["", "busy", &"x".repeat(MAX_TEXT_BYTES)] {
            assert_eq!(shorten(text.to_owned()), text);
        }
        for text in ["x".repeat(MAX_TEXT_BYTES + 1), "ü".repeat(50_000)] {
            let short = shorten(text.clone());
            assert!(
                short.len() <= MAX_TEXT_BYTES && short.len() > MAX_TEXT_BYTES - 4,
                "{}",
                short.len()
            );
            let (start, end) = short.split_once('…').unwrap();
            assert!(text.starts_with(start));
            assert_eq!(end, format!(" ({} bytes)", text.len()));
        }
    }
}
