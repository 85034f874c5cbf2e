//! Which gRPC code stands for which error. Nothing else in the crate chooses one.

use std::fmt::Display;

use tonic::Status;

/// For a device plugin: a kubelet returns plain Go errors, which arrive as `UNKNOWN` with their text.
pub(crate) fn refusal(error: impl Display) -> Status {
    Status::unknown(error.to_string())
}
