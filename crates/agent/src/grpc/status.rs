//! Which gRPC code stands for which error. Nothing else in the crate chooses one.
//!
//! The message is always the error's own text.

use std::fmt::Display;

use devlet_core::dra::claims::NotForgotten;
use devlet_core::{LastSeen, ReserveError};
use tonic::{Code, Status};

use crate::agent::RemoveError;
use crate::claims::ResolveError;
use crate::grpc::call::CallError;
use crate::host::{
    ClaimLookupError, ForgetError, NotAllowed, NothingToAbandon, PodLookupError, UnknownDriver,
};
use crate::limits::OverLimit;
use crate::manifest::InvalidManifest;
use crate::store::{CommitError, DumpError, ForgetClaimError, ImportError, WriteError};
use crate::words::since_when;
use crate::workflow::admit::AdmitError;
use crate::workflow::start_container::StartContainerError;

/// For a device plugin: a kubelet returns plain Go errors, which arrive as `UNKNOWN` with their text.
pub(crate) fn refusal(error: impl Display) -> Status {
    Status::unknown(error.to_string())
}

/// An error that callers of our API get to see.
trait Coded: Display {
    fn code(&self) -> Code;
}

macro_rules! statuses {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Status {
            fn from(error: $error) -> Self {
                Self::new(error.code(), error.to_string())
            }
        }
    )*};
}

statuses!(
    ClaimLookupError,
    DumpError,
    ForgetClaimError,
    ForgetError,
    ImportError,
    InvalidManifest,
    NotAllowed,
    NothingToAbandon,
    OverLimit,
    PodLookupError,
    RemoveError,
    ResolveError,
    StartContainerError,
    UnknownDriver,
    WriteError,
);

impl From<AdmitError> for Status {
    fn from(error: AdmitError) -> Self {
        let since = match &error {
            AdmitError::TimedOut { reason, .. } => since(reason),
            _ => String::new(),
        };
        Self::new(error.code(), format!("{error}{since}"))
    }
}

/// Since when the reason has been one. The core knows when a plugin left, but not how to say it.
pub(crate) fn since(reason: &ReserveError) -> String {
    match reason {
        ReserveError::NotServed { last: Some(last), .. } => {
            since_when(" and is gone since ", last.gone_since)
        }
        ReserveError::NoDriver { seen, .. } => match seen {
            LastSeen::NotConnected { since, .. } => since_when(", not connected since ", *since),
            LastSeen::Gone(last) => since_when(" and is gone since ", last.gone_since),
            LastSeen::Never => String::new(),
        },
        ReserveError::NotPrepared { waits } => {
            let since = waits.iter().filter_map(|wait| Some((&wait.driver, wait.since?)));
            let mut since: Vec<_> = since.collect();
            since.sort();
            since.dedup();
            let texts = since
                .into_iter()
                .map(|(driver, since)| since_when(&format!("; {driver} is not connected since "), since));
            texts.collect()
        }
        _ => String::new(),
    }
}

impl Coded for InvalidManifest {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for ResolveError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for OverLimit {
    fn code(&self) -> Code {
        Code::ResourceExhausted
    }
}

impl Coded for NotAllowed {
    fn code(&self) -> Code {
        Code::PermissionDenied
    }
}

impl Coded for PodLookupError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown { .. } => Code::NotFound,
            Self::Empty | Self::Ambiguous { .. } | Self::UidOrName { .. } => Code::InvalidArgument,
        }
    }
}

impl Coded for ClaimLookupError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown { .. } => Code::NotFound,
            Self::Ambiguous { .. } => Code::InvalidArgument,
        }
    }
}

impl Coded for UnknownDriver {
    fn code(&self) -> Code {
        Code::NotFound
    }
}

impl Coded for NothingToAbandon {
    fn code(&self) -> Code {
        match self {
            Self::ByPod { .. } | Self::ByClaim { .. } | Self::NoDriver { .. } => Code::InvalidArgument,
            Self::Held { .. } => Code::FailedPrecondition,
        }
    }
}

impl Coded for ForgetError {
    fn code(&self) -> Code {
        match self {
            Self::NothingBlocked | Self::OtherFile { .. } => Code::FailedPrecondition,
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for ForgetClaimError {
    fn code(&self) -> Code {
        match self {
            Self::Refused(NotForgotten::Unknown) => Code::NotFound,
            Self::Refused(NotForgotten::InFlight { .. }) => Code::Aborted,
            Self::Refused(NotForgotten::Held { .. } | NotForgotten::NotAbandoned { .. }) => {
                Code::FailedPrecondition
            }
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for ReserveError {
    fn code(&self) -> Code {
        match self {
            Self::Blocked(_) => Code::FailedPrecondition,
            Self::DuplicateContainer { .. } => Code::InvalidArgument,
            Self::NotServed { .. } | Self::NotListed { .. } | Self::NoDriver { .. } => Code::Unavailable,
            Self::Insufficient { .. } => Code::ResourceExhausted,
            Self::InFlight | Self::Unpreparing { .. } | Self::NotPrepared { .. } => Code::Aborted,
            Self::RequestChanged { .. }
            | Self::SpecChanged
            | Self::NameTaken { .. }
            | Self::Reallocated { .. }
            | Self::ClaimUidTaken { .. }
            | Self::ClaimNameTaken { .. } => Code::AlreadyExists,
        }
    }
}

impl Coded for CallError {
    fn code(&self) -> Code {
        match self {
            Self::TimedOut { .. } | Self::CutShort { .. } => Code::DeadlineExceeded,
            // The plugin's own code is about its own affairs.
            Self::Refused { .. } | Self::Invalid { .. } | Self::Gone { .. } => Code::Aborted,
        }
    }
}

impl Coded for AdmitError {
    fn code(&self) -> Code {
        match self {
            Self::Refused(reason) => reason.code(),
            Self::TimedOut { .. } => Code::DeadlineExceeded,
            Self::Plugin { problem, .. } => problem.code(),
            Self::Vanishing { .. } => Code::Aborted,
            Self::GivenUp => Code::Unavailable,
            Self::Commit(error) => error.code(),
        }
    }
}

impl Coded for CommitError {
    fn code(&self) -> Code {
        match self {
            Self::Ended(_) => Code::Aborted,
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for WriteError {
    /// It heals by itself, or another devlet will be there: trying again is right.
    fn code(&self) -> Code {
        Code::Unavailable
    }
}

impl Coded for RemoveError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown { .. } => Code::NotFound,
            Self::InFlight { .. } | Self::Unpreparing { .. } => Code::DeadlineExceeded,
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for StartContainerError {
    fn code(&self) -> Code {
        match self {
            Self::UnknownPod | Self::UnknownContainer { .. } => Code::NotFound,
            Self::Plugin { problem, .. } => problem.code(),
            Self::TimedOut { .. } | Self::Unprepared { .. } => Code::DeadlineExceeded,
        }
    }
}

impl Coded for ImportError {
    fn code(&self) -> Code {
        match self {
            Self::Unreadable(_) => Code::InvalidArgument,
            Self::Empty { .. } => Code::FailedPrecondition,
            Self::InFlight { .. } | Self::ClaimInFlight { .. } => Code::Aborted,
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for DumpError {
    fn code(&self) -> Code {
        match self {
            Self::Closed(error) => error.code(),
            Self::Unreadable { .. } => Code::DataLoss,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use devlet_core::Moment;
    use devlet_core::device_plugin::inventory::Last;

    use super::*;

    #[test]
    fn who_gave_up_is_told_for_what_and_since_when_it_is_gone() {
        let last = Last {
            endpoint: "/run/gpu.sock".into(),
            gone_since: Moment(1_700_000_000_000),
        };
        let reason = ReserveError::NotServed {
            resource: "acme.com/gpu".into(),
            last: Some(last),
        };
        let status = Status::from(AdmitError::TimedOut {
            waited: Duration::from_secs(60),
            reason,
        });
        assert_eq!(status.code(), Code::DeadlineExceeded);
        assert_eq!(
            status.message(),
            "gave up after 60 s: no device plugin offers acme.com/gpu; the last one answered at /run/gpu.sock and is \
             gone since 2023-11-14T22:13:20Z"
        );
    }

    #[test]
    fn too_few_devices_and_another_spec_are_told_apart() {
        let code = |reason| Status::from(AdmitError::Refused(reason)).code();
        let few = ReserveError::Insufficient {
            resource: "acme.com/gpu".into(),
            wanted: 3,
            free: 1,
            healthy: 2,
            total: 2,
        };
        assert_eq!(code(few), Code::ResourceExhausted);
        assert_eq!(code(ReserveError::SpecChanged), Code::AlreadyExists);
    }
}
