//! Watch: a stream of complete lists.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::sleep;
use tonic::{Status, Streaming};

use crate::channel::Channel;
use crate::deadline::Deadline;

/// Minimum and maximum interval between two keepalive pings.
const PINGS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// The messages of a watch: the complete list, now and after each change.
pub struct Watch<T> {
    first: Option<T>,
    updates: Streaming<T>,
    /// Completes when devlet no longer answers.
    unanswered: Option<Pin<Box<dyn Future<Output = Status> + Send>>>,
}

impl<T> Watch<T> {
    /// Returns after the first message, which devlet sends at once.
    pub(crate) async fn new(mut updates: Streaming<T>) -> Result<Self, Status> {
        let first = updates.message().await?;
        Ok(Self {
            first,
            updates,
            unanswered: None,
        })
    }

    /// Sends keepalive pings from now on, and ends the watch if one is not answered in time.
    pub(crate) fn with_keepalive(mut self, channel: Channel, timeout: Duration) -> Self {
        self.unanswered = Some(Box::pin(unanswered(channel, timeout)));
        self
    }

    /// Returns the next message, or `None` after devlet has stopped. Cancel safe.
    pub async fn message(&mut self) -> Result<Option<T>, Status> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        match &mut self.unanswered {
            None => self.updates.message().await,
            Some(unanswered) => tokio::select! {
                biased;
                update = self.updates.message() => update,
                status = unanswered => Err(status),
            },
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Watch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("first", &self.first)
            .finish_non_exhaustive()
    }
}

/// Sends pings until one is not answered in time.
async fn unanswered(channel: Channel, timeout: Duration) -> Status {
    let pause = timeout.clamp(PINGS.0, PINGS.1);
    loop {
        sleep(pause).await;
        let deadline = Deadline::after(channel.path(), timeout);
        if let Err(status) = deadline.bound(channel.ping()).await {
            return status;
        }
    }
}
