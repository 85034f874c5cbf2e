//! DRA drivers: registration, sessions, calls and health.
//!
//! [`registration`] registers a plugin when its socket is found, [`services`] chooses the service to call, [`session`] keeps the
//! connection, and `health` receives reports on it. [`clients`] finds the client for a call.

pub mod client;
pub mod clients;
mod health;
pub mod registration;
pub mod services;
pub mod session;
mod wire;

use std::collections::BTreeMap;

use devlet_core::dra::claims::{Call, PreparedDevice};
use devlet_core::{ClaimUid, DriverName};
use tokio::time::Instant;

use crate::grpc::call::CallError;

/// What a driver prepared, claim by claim, or why not.
pub type Prepared = BTreeMap<ClaimUid, Result<Vec<PreparedDevice>, String>>;

/// Which claims a driver has unprepared, or why not.
pub type Unprepared = BTreeMap<ClaimUid, Result<(), String>>;

/// Why a driver has not answered.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DriverCallError {
    /// The plugin that was to be called is gone.
    #[error("the plugin of driver {driver} is not connected")]
    NotConnected {
        /// The driver.
        driver: DriverName,
    },
    /// It was called.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// The calls on drivers. None lasts longer than the driver may take, nor beyond `deadline`.
///
/// Answers are as they came: the node knows which claims it asked about, and what is wrong with an answer.
pub trait DriverCalls: Send + Sync {
    /// `NodePrepareResources`.
    fn prepare(
        &self,
        call: &Call,
        deadline: Instant,
    ) -> impl Future<Output = Result<Prepared, DriverCallError>> + Send;

    /// `NodeUnprepareResources`.
    fn unprepare(
        &self,
        call: &Call,
        deadline: Instant,
    ) -> impl Future<Output = Result<Unprepared, DriverCallError>> + Send;
}
