//! Workflows: operations with a waiting caller. The node decides; workflows make calls and writes.

pub mod admit;
pub mod claims;
pub mod lease;
mod lease_witness;
pub(crate) mod plugin_session;
pub mod prepare;
mod reasons;
pub mod register_plugin;
pub mod remove;
pub mod start_container;
mod unprepare;

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{WriteError, in_time};

/// Time for a write that begins shortly before the caller's deadline, or after it.
const WRITE_GRACE: Duration = Duration::from_secs(1);

/// Pause before a rejection is answered, if rejections exceed their rate.
pub(crate) const REJECTION_PAUSE: Duration = Duration::from_secs(1);

/// Waits for a write until the caller's deadline, but at least for [`WRITE_GRACE`]. The write continues after a timeout.
async fn written<T, E: From<WriteError>>(
    deadline: Instant,
    write: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    in_time(deadline.max(Instant::now() + WRITE_GRACE), write).await
}
