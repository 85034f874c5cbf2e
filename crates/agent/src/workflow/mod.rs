//! Workflows: operations for which a caller waits, each from top to bottom. The node decides; workflows call and write.

pub mod admit;
pub mod claims;
pub(crate) mod plugin_session;
mod reasons;
pub mod register_plugin;
pub mod remove;
pub mod start_container;

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{WriteError, in_time};

/// Time for a write that begins shortly before the caller's deadline, or after it.
const WRITE_GRACE: Duration = Duration::from_secs(1);

/// Waits for a write until the caller's deadline, but at least for [`WRITE_GRACE`]. The write is carried out even if this
/// gives up.
async fn written<T, E: From<WriteError>>(
    deadline: Instant,
    write: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    in_time(deadline.max(Instant::now() + WRITE_GRACE), write).await
}
