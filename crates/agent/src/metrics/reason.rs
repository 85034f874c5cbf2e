//! Label values for outcomes, reasons and gRPC codes: one word each, from closed sets.
//!
//! Errors of other modules become one of these there, so that this module does not import them.

use devlet_core::ReserveError;
use tonic::Code;

use crate::limits::Limit;

/// The reason for which a plugin was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reason(pub(crate) &'static str);

/// The outcome of an admission or a registration, and its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(super) outcome: &'static str,
    pub(super) reason: &'static str,
}

impl Outcome {
    pub(crate) const fn new(outcome: &'static str, reason: &'static str) -> Self {
        Self { outcome, reason }
    }
}

/// A call of a plugin or driver that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallFailure {
    pub(crate) method: &'static str,
    /// The gRPC code; `None` if an answer arrived that is not valid.
    pub(crate) code: Option<Code>,
    /// The limit that the answer exceeds.
    pub(crate) limit: Option<Limit>,
}

impl CallFailure {
    /// Returns the code as a label value.
    pub(super) fn code(&self) -> &'static str {
        self.code.map_or(INVALID_ANSWER, code)
    }
}

pub(super) const ADMITTED: Outcome = Outcome::new("admitted", "");
pub(crate) const GIVEN_UP: Outcome = Outcome::new("given_up", "caller_left");

/// Every outcome of an admission. Each counter exists from the start.
pub(super) const ADMISSION_OUTCOMES: [Outcome; 25] = [
    ADMITTED,
    Outcome::new("refused", "insufficient"),
    Outcome::new("refused", "blocked"),
    Outcome::new("refused", "changed"),
    Outcome::new("refused", "reallocated"),
    Outcome::new("refused", "device_in_use"),
    Outcome::new("refused", "name_taken"),
    Outcome::new("refused", "invalid"),
    Outcome::new("refused", "not_allowed"),
    Outcome::new("timed_out", "not_served"),
    Outcome::new("timed_out", "not_listed"),
    Outcome::new("timed_out", "reserved"),
    Outcome::new("timed_out", "in_flight"),
    Outcome::new("timed_out", "no_driver"),
    Outcome::new("timed_out", "unpreparing"),
    Outcome::new("timed_out", "not_prepared"),
    Outcome::new("failed", "plugin_silent"),
    Outcome::new("failed", "plugin_refused"),
    Outcome::new("failed", "plugin_answer"),
    Outcome::new("failed", "plugin_gone"),
    Outcome::new("failed", "devices_vanished"),
    Outcome::new("failed", "disk"),
    Outcome::new("failed", "stopping"),
    Outcome::new("failed", "reservation_ended"),
    GIVEN_UP,
];

pub(super) const REGISTERED: Outcome = Outcome::new("registered", "");

/// Every outcome of a registration. Each counter exists from the start.
pub(super) const REGISTRATION_OUTCOMES: [Outcome; 11] = [
    REGISTERED,
    Outcome::new("refused", "invalid"),
    Outcome::new("refused", "kind"),
    Outcome::new("refused", "not_allowed"),
    Outcome::new("refused", "socket_owner"),
    Outcome::new("refused", "other_user"),
    Outcome::new("refused", "over_limit"),
    Outcome::new("refused", "services"),
    Outcome::new("refused", "dial"),
    Outcome::new("refused", "handshake"),
    Outcome::new("refused", "options"),
];

/// Returns the label value for the reason of a rejected or waiting reservation.
pub(crate) fn of_reservation(error: &ReserveError) -> &'static str {
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

const INVALID_ANSWER: &str = "InvalidAnswer";

/// Returns the label values of all codes.
pub(super) fn codes() -> impl Iterator<Item = &'static str> {
    let codes = (0..=16).map(|number| code(Code::from(number)));
    codes.chain([INVALID_ANSWER])
}

/// Returns the name of a gRPC code as Go clients print it.
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
