//! The gRPC code of each error that a caller of the API can get.
//!
//! The message is the text of the error, truncated if it is long.

use std::fmt::Display;

use devlet_core::dra::claims::BeginForgetError;
use devlet_core::{LastSeen, PodName, ReserveError};
use tonic::{Code, Status};

use super::{ClaimLookupError, ForgetError, NotAllowed, NothingToAbandon, PodLookupError, UnknownDriver};
use crate::agent::RemoveError;
use crate::display::format_since;
use crate::grpc::call::CallError;
use crate::limits::LimitExceeded;
use crate::manifest::{InvalidManifest, ResolveError};
use crate::peer_text::status_message;
use crate::store::{CommitError, DumpError, ForgetClaimError, ForgetFileError, ImportError, WriteError};
use crate::workflow::admit::AdmitError;
use crate::workflow::start_container::StartContainerError;

/// An error with a gRPC code.
trait Coded: Display {
    fn code(&self) -> Code;
}

macro_rules! statuses {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Status {
            fn from(error: $error) -> Self {
                Self::new(error.code(), status_message(error))
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
    LimitExceeded,
    PodLookupError,
    RemoveError,
    ResolveError,
    StartContainerError,
    UnknownDriver,
    WriteError,
);

impl From<AdmitError> for Status {
    fn from(error: AdmitError) -> Self {
        let more = match &error {
            AdmitError::TimedOut { reason, .. } => since(reason),
            AdmitError::Refused(reason) => removal_command(reason),
            _ => String::new(),
        };
        Self::new(error.code(), status_message(format_args!("{error}{more}")))
    }
}

/// Returns the command that removes the conflicting pod, to follow "remove it first".
fn removal_command(reason: &ReserveError) -> String {
    match reason {
        ReserveError::SpecChanged(change) => {
            let PodName { namespace, name } = &change.name;
            format!(" with `devlet remove {namespace}/{name}`")
        }
        // The record of an imported pod may lack its name, so the UID is used.
        ReserveError::NameTaken { other: uid } | ReserveError::RequestChanged { pod: uid, .. } => {
            format!(" with `devlet remove uid:{uid}`")
        }
        _ => String::new(),
    }
}

/// Returns the time since which the reason applies, as a text to append. The core does not format times.
pub(super) fn since(reason: &ReserveError) -> String {
    match reason {
        ReserveError::NotServed { last: Some(last), .. } => {
            format_since(" and is gone since ", last.gone_since)
        }
        ReserveError::NoDriver { seen, .. } => match seen {
            LastSeen::NotConnected { since, .. } => format_since(", not connected since ", *since),
            LastSeen::Gone(last) => format_since(" and is gone since ", last.gone_since),
            LastSeen::Never => String::new(),
        },
        ReserveError::NotPrepared { waits } => {
            let since = waits.iter().filter_map(|wait| Some((&wait.driver, wait.since?)));
            let mut since: Vec<_> = since.collect();
            since.sort();
            since.dedup();
            let texts = since
                .into_iter()
                .map(|(driver, since)| format_since(&format!("; {driver} is not connected since "), since));
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

impl Coded for LimitExceeded {
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
            Self::NotAdmitted { .. } => Code::FailedPrecondition,
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
            Self::NothingBlocked
            | Self::OtherFile { .. }
            | Self::Refused(ForgetFileError::Settled { .. }) => Code::FailedPrecondition,
            Self::Refused(ForgetFileError::Write(error)) => error.code(),
        }
    }
}

impl Coded for ForgetClaimError {
    fn code(&self) -> Code {
        match self {
            Self::Refused(BeginForgetError::Unknown) => Code::NotFound,
            Self::Refused(BeginForgetError::InFlight { .. }) => Code::Aborted,
            Self::Refused(BeginForgetError::Held { .. } | BeginForgetError::NotAbandoned { .. }) => {
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
            Self::NotServed { .. }
            | Self::NotListed { .. }
            | Self::NoHealthyDevice { .. }
            | Self::NoDriver { .. } => Code::Unavailable,
            Self::Insufficient { .. } | Self::Reserved { .. } => Code::ResourceExhausted,
            Self::InFlight
            | Self::NameReserved { .. }
            | Self::ClaimReserved { .. }
            | Self::Unpreparing { .. }
            | Self::NotPrepared { .. } => Code::Aborted,
            Self::DeviceInUse(_) if self.waiting_helps() => Code::Aborted,
            Self::DeviceInUse(_) => Code::ResourceExhausted,
            Self::RequestChanged { .. }
            | Self::SpecChanged(_)
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
            Self::TimedOut { .. } | Self::CallerDeadline { .. } => Code::DeadlineExceeded,
            // The code of the plugin describes its own state, not that of devlet.
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
            Self::Shielded => Code::FailedPrecondition,
            Self::Commit(error) => error.code(),
        }
    }
}

impl Coded for CommitError {
    fn code(&self) -> Code {
        match self {
            Self::Ended(_) | Self::Vanished { .. } => Code::Aborted,
            Self::Write(error) => error.code(),
        }
    }
}

impl Coded for WriteError {
    /// The disk may recover, or another devlet may take over, so a retry is right.
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
            Self::Contested(_) => Code::FailedPrecondition,
            Self::Plugin { problem, .. } => problem.code(),
            Self::TimedOut { .. } | Self::Unprepared { .. } => Code::DeadlineExceeded,
        }
    }
}

impl Coded for ImportError {
    fn code(&self) -> Code {
        match self {
            Self::Unreadable(_) => Code::InvalidArgument,
            Self::Empty { .. }
            | Self::Settled { .. }
            | Self::OtherContested { .. }
            | Self::OtherDevices { .. }
            | Self::LeftOut { .. } => Code::FailedPrecondition,
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

    use devlet_core::device_plugin::inventory::LastPlugin;
    use devlet_core::{Moment, SpecChange};

    use super::*;

    #[test]
    fn a_timeout_names_the_missing_plugin_and_since_when_it_is_gone() {
        let last = LastPlugin {
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
            reserved: 0,
            healthy: 2,
            total: 2,
        };
        assert_eq!(code(few), Code::ResourceExhausted);
        let change = SpecChange {
            uid: "u-1".into(),
            name: PodName {
                namespace: "team-a".into(),
                name: "job1".into(),
            },
            held: vec!["2 acme.com/gpu in container main".into()],
            differences: Vec::new(),
        };
        let changed = Status::from(AdmitError::Refused(ReserveError::SpecChanged(Box::new(change))));
        assert_eq!(changed.code(), Code::AlreadyExists);
        assert_eq!(
            changed.message(),
            "pod team-a/job1 (u-1) was admitted with another spec; it holds 2 acme.com/gpu in container main; what \
             differs: something that is not on record; remove it first with `devlet remove team-a/job1`"
        );
        let imported = ReserveError::RequestChanged {
            pod: "u-1".into(),
            name: PodName {
                namespace: "team-a".into(),
                name: "job1".into(),
            },
            container: "main".into(),
            resource: "acme.com/gpu".into(),
            wanted: 3,
            held: 2,
        };
        let imported = Status::from(AdmitError::Refused(imported));
        assert_eq!(
            imported.message(),
            "pod team-a/job1 (u-1) holds 2 acme.com/gpu in container main, but now requests 3; remove it first with \
             `devlet remove uid:u-1`"
        );
    }
}
