//! Detects answers that are too long.

use tonic::{Code, Status};

/// Returns `true` if a message exceeded the limit on this side. tonic reports that only as text.
pub(crate) fn is_too_large(status: &Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("decoded message length too large")
}
