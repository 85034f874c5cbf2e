//! Errors as label values: one word each, from a closed set.

use devlet_core::ReserveError;
use tonic::Code;

use crate::dra::registration;
use crate::dra::session::ConnectError;
use crate::grpc::call::CallError;
use crate::store::{CommitError, WriteError};
use crate::workflow::admit::AdmitError;
use crate::workflow::register_plugin::RegisterError;

/// How an admission ended, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) outcome: &'static str,
    pub(super) reason: &'static str,
}

const fn ended(outcome: &'static str, reason: &'static str) -> Ended {
    Ended { outcome, reason }
}

pub(super) const ADMITTED: Ended = ended("admitted", "");
pub(super) const GIVEN_UP: Ended = ended("given_up", "caller_left");

/// Every way in which an admission ends, so that each is there before it happens.
pub(super) const ADMISSION_ENDS: [Ended; 25] = [
    ADMITTED,
    ended("refused", "insufficient"),
    ended("refused", "blocked"),
    ended("refused", "changed"),
    ended("refused", "reallocated"),
    ended("refused", "device_in_use"),
    ended("refused", "name_taken"),
    ended("refused", "invalid"),
    ended("refused", "not_allowed"),
    ended("timed_out", "not_served"),
    ended("timed_out", "not_listed"),
    ended("timed_out", "reserved"),
    ended("timed_out", "in_flight"),
    ended("timed_out", "no_driver"),
    ended("timed_out", "unpreparing"),
    ended("timed_out", "not_prepared"),
    ended("failed", "plugin_silent"),
    ended("failed", "plugin_refused"),
    ended("failed", "plugin_answer"),
    ended("failed", "plugin_gone"),
    ended("failed", "devices_vanished"),
    ended("failed", "disk"),
    ended("failed", "stopping"),
    ended("failed", "reservation_ended"),
    GIVEN_UP,
];

pub(super) const TAKEN_IN: Ended = ended("taken_in", "");

/// The same for attempts to register.
pub(super) const REGISTRATION_ENDS: [Ended; 11] = [
    TAKEN_IN,
    ended("refused", "invalid"),
    ended("refused", "kind"),
    ended("refused", "not_allowed"),
    ended("refused", "not_theirs"),
    ended("refused", "other_user"),
    ended("refused", "over_limit"),
    ended("refused", "services"),
    ended("refused", "dial"),
    ended("refused", "handshake"),
    ended("refused", "options"),
];

pub(super) fn of_admission(error: &AdmitError) -> Ended {
    match error {
        AdmitError::Refused(reason) => ended("refused", of_reservation(reason)),
        AdmitError::TimedOut { reason, .. } => ended("timed_out", of_reservation(reason)),
        AdmitError::Plugin { problem, .. } => ended(
            "failed",
            match problem {
                CallError::TimedOut { .. } | CallError::CallerDeadline { .. } => "plugin_silent",
                CallError::Gone { .. } => "plugin_gone",
                CallError::Refused { .. } => "plugin_refused",
                CallError::Invalid { .. } => "plugin_answer",
            },
        ),
        AdmitError::Vanishing { .. } => ended("failed", "devices_vanished"),
        AdmitError::Commit(CommitError::Ended(_)) => ended("failed", "reservation_ended"),
        AdmitError::Commit(CommitError::Write(
            WriteError::Disk { .. } | WriteError::Hangs { .. } | WriteError::TimedOut { .. },
        )) => ended("failed", "disk"),
        AdmitError::Commit(CommitError::Write(WriteError::Stopped)) => ended("failed", "stopping"),
        AdmitError::GivenUp => GIVEN_UP,
    }
}

pub(super) fn of_reservation(error: &ReserveError) -> &'static str {
    match error {
        ReserveError::Blocked(_) => "blocked",
        ReserveError::NotServed { .. } => "not_served",
        ReserveError::NotListed { .. } | ReserveError::NoHealthyDevice { .. } => "not_listed",
        ReserveError::Insufficient { .. } => "insufficient",
        ReserveError::Reserved { .. } => "reserved",
        ReserveError::InFlight | ReserveError::NameReserved { .. } | ReserveError::ClaimReserved { .. } => {
            "in_flight"
        }
        ReserveError::RequestChanged { .. } | ReserveError::SpecChanged(_) => "changed",
        ReserveError::DuplicateContainer { .. } => "invalid",
        ReserveError::NameTaken { .. }
        | ReserveError::ClaimNameTaken { .. }
        | ReserveError::ClaimUidTaken { .. } => "name_taken",
        ReserveError::NoDriver { .. } => "no_driver",
        ReserveError::DeviceInUse(_) if !error.waiting_helps() => "device_in_use",
        ReserveError::Unpreparing { .. } | ReserveError::DeviceInUse(_) => "unpreparing",
        ReserveError::NotPrepared { .. } => "not_prepared",
        ReserveError::Reallocated { .. } => "reallocated",
    }
}

pub(super) fn of_registration(error: &RegisterError) -> &'static str {
    match error {
        RegisterError::Dial(_) => "dial",
        RegisterError::Options(_) => "options",
        RegisterError::NotAllowed { .. } => "not_allowed",
        RegisterError::SocketOwnerMismatch { .. } => "not_theirs",
        RegisterError::Refused(_) => "other_user",
        RegisterError::LimitExceeded(_) => "over_limit",
        RegisterError::Superseded => "superseded",
    }
}

pub(super) fn of_driver_registration(error: &registration::RegisterError) -> &'static str {
    use registration::RegisterError as Error;
    match error {
        Error::Link(ConnectError::Dial(_)) => "dial",
        Error::Link(ConnectError::SocketOwnerMismatch { .. }) => "not_theirs",
        Error::Asked { .. } => "options",
        Error::Services(_) => "services",
        Error::NotAllowed { .. } => "not_allowed",
        Error::Refused(_) => "other_user",
        Error::LimitExceeded(_) => "over_limit",
    }
}

/// The method, and the gRPC code as clients of gRPC call it.
pub(super) fn of_call(error: &CallError) -> (&'static str, &'static str) {
    match error {
        CallError::TimedOut { method, .. } | CallError::CallerDeadline { method, .. } => {
            (method, code(Code::DeadlineExceeded))
        }
        CallError::Gone { method } => (method, code(Code::Unavailable)),
        CallError::Refused { method, status } => (method, code(status.code())),
        CallError::Invalid { method, .. } => (method, INVALID_ANSWER),
    }
}

const INVALID_ANSWER: &str = "InvalidAnswer";

/// All codes that calls end with.
pub(super) fn codes() -> impl Iterator<Item = &'static str> {
    let codes = (0..=16).map(|number| code(Code::from(number)));
    codes.chain([INVALID_ANSWER])
}

pub(super) fn code(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
