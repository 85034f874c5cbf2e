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

/// The devices that a driver prepared for each claim, or the driver's error.
pub type Prepared = BTreeMap<ClaimUid, Result<Vec<PreparedDevice>, String>>;

/// The claims that a driver has unprepared, or the driver's error for each.
pub type Unprepared = BTreeMap<ClaimUid, Result<(), String>>;

/// Error of a call on a driver.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DriverCallError {
    /// The plugin is not connected.
    #[error("the plugin of driver {driver} is not connected")]
    NotConnected {
        /// The driver.
        driver: DriverName,
    },
    /// The call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Calls on drivers. A call ends at the driver's own deadline or at `deadline`, whichever is earlier.
///
/// Answers are returned unchecked: the node knows the claims of the call, and checks the answer.
pub trait DriverCalls: Send + Sync {
    /// Calls `NodePrepareResources`.
    fn prepare(
        &self,
        call: &Call,
        deadline: Instant,
    ) -> impl Future<Output = Result<Prepared, DriverCallError>> + Send;

    /// Calls `NodeUnprepareResources`.
    fn unprepare(
        &self,
        call: &Call,
        deadline: Instant,
    ) -> impl Future<Output = Result<Unprepared, DriverCallError>> + Send;
}
