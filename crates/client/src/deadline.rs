//! Deadlines of calls to devlet.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, Sleep, timeout_at};
use tonic::Status;

/// devlet did not answer in time: it hangs, or is stopped. This is the source of the [`Status`] of such a call, and
/// distinguishes it from a status that devlet sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("devlet at {} does not answer (waited {} s)", path.display(), seconds(*.waited))]
pub struct NoAnswer {
    pub path: PathBuf,
    /// Duration of the wait.
    pub waited: Duration,
}

/// Rounds to tenths, as in `1.5`.
fn seconds(waited: Duration) -> f64 {
    (waited.as_secs_f64() * 10.0).round() / 10.0
}

impl From<NoAnswer> for Status {
    fn from(error: NoAnswer) -> Self {
        let mut status = Self::deadline_exceeded(error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

/// The deadline of a call, if it has one.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    path: Arc<Path>,
    /// The deadline, and its distance from the start.
    end: Option<(Instant, Duration)>,
}

impl Deadline {
    pub(crate) fn none(path: &Path) -> Self {
        let path = path.into();
        Self { path, end: None }
    }

    pub(crate) fn after(path: &Path, limit: Duration) -> Self {
        // A limit that overflows the clock means no limit.
        let end = Instant::now().checked_add(limit);
        Self {
            path: path.into(),
            end: end.map(|end| (end, limit)),
        }
    }

    /// Waits for an answer until the deadline.
    pub(crate) async fn bound<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        match self.end {
            None => call.await,
            Some((end, _)) => timeout_at(end, call)
                .await
                .unwrap_or_else(|_| Err(self.passed().into())),
        }
    }

    pub(crate) fn is_past(&self) -> bool {
        self.end.is_some_and(|(end, _)| Instant::now() >= end)
    }

    /// Returns a future that ends at the deadline.
    pub(crate) fn sleep(&self) -> Option<Sleep> {
        self.end.map(|(end, _)| tokio::time::sleep_until(end))
    }

    /// Returns the error for a passed deadline.
    pub(crate) fn passed(&self) -> NoAnswer {
        NoAnswer {
            path: self.path.to_path_buf(),
            waited: self.end.map_or(Duration::MAX, |(_, limit)| limit),
        }
    }
}
