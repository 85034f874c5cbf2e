//! Label values of metrics for the errors of workflows, registrations and calls.

use tonic::Code;

use super::admit::AdmitError;
use super::register_plugin::RegisterError;
use crate::dra::registration;
use crate::dra::session::ConnectError;
use crate::grpc::call::{CallError, InvalidAnswer};
use crate::metrics::reason::{self, CallFailure, Outcome, Reason};
use crate::store::{CommitError, WriteError};

impl From<&AdmitError> for Outcome {
    fn from(error: &AdmitError) -> Self {
        let failed = |reason| Self::new("failed", reason);
        match error {
            AdmitError::Refused(reason) => Self::new("refused", reason::of_reservation(reason)),
            AdmitError::TimedOut { reason, .. } => Self::new("timed_out", reason::of_reservation(reason)),
            AdmitError::Plugin { problem, .. } => failed(match problem {
                CallError::TimedOut { .. } | CallError::CallerDeadline { .. } => "plugin_silent",
                CallError::Gone { .. } => "plugin_gone",
                CallError::Refused { .. } => "plugin_refused",
                CallError::Invalid { .. } => "plugin_answer",
            }),
            AdmitError::Vanishing { .. } | AdmitError::Commit(CommitError::Vanished { .. }) => {
                failed("devices_vanished")
            }
            AdmitError::Commit(CommitError::Ended(_)) => failed("reservation_ended"),
            AdmitError::Commit(CommitError::Write(
                WriteError::Disk { .. } | WriteError::Hangs { .. } | WriteError::TimedOut { .. },
            )) => failed("disk"),
            AdmitError::Commit(CommitError::Write(WriteError::Stopped)) => failed("stopping"),
            AdmitError::GivenUp => reason::GIVEN_UP,
            AdmitError::Shielded => Self::new("refused", "blocked"),
        }
    }
}

impl From<&RegisterError> for Reason {
    fn from(error: &RegisterError) -> Self {
        Self(match error {
            RegisterError::Dial(_) => "dial",
            RegisterError::Options(_) => "options",
            RegisterError::NotAllowed { .. } => "not_allowed",
            RegisterError::SocketOwnerMismatch { .. } => "socket_owner",
            RegisterError::Refused(_) => "other_user",
            RegisterError::LimitExceeded(_) => "over_limit",
            RegisterError::Superseded => "superseded",
        })
    }
}

impl From<&registration::RegisterDriverError> for Reason {
    fn from(error: &registration::RegisterDriverError) -> Self {
        use registration::RegisterDriverError as Error;
        Self(match error {
            Error::Connect(ConnectError::Dial(_)) => "dial",
            Error::Connect(ConnectError::SocketOwnerMismatch { .. }) => "socket_owner",
            Error::ServiceProbe { .. } => "options",
            Error::Services(_) => "services",
            Error::NotAllowed { .. } => "not_allowed",
            Error::Refused(_) => "other_user",
            Error::LimitExceeded(_) => "over_limit",
        })
    }
}

impl From<&CallError> for CallFailure {
    fn from(error: &CallError) -> Self {
        let failure = |method, code| Self {
            method,
            code: Some(code),
            limit: None,
        };
        match error {
            CallError::TimedOut { method, .. } | CallError::CallerDeadline { method, .. } => {
                failure(method, Code::DeadlineExceeded)
            }
            CallError::Gone { method } => failure(method, Code::Unavailable),
            CallError::Refused { method, status } => failure(method, status.code()),
            CallError::Invalid { method, problem } => Self {
                method,
                code: None,
                limit: match problem {
                    InvalidAnswer::LimitExceeded(exceeded) => Some(exceeded.limit),
                    _ => None,
                },
            },
        }
    }
}
