//! A background task: its backoff, and its state in `status`.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use devlet_agent::agent::Agent;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::connection::CallError;

pub(crate) const MIN_PAUSE: Duration = Duration::from_millis(200);

/// Short, so that the node agrees with the API server soon after an outage. Jitter spreads the nodes.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Pause between two passes over the state of the node. The changes of a burst are written together.
pub(crate) const PASS_PAUSE: Duration = Duration::from_secs(1);

/// A background task that repeats its attempts. Successes and errors are visible in `status`.
pub(crate) struct Task {
    name: &'static str,
    agent: Agent,
    stop: CancellationToken,
    pauses: ExponentialBackoff,
    /// The last error that was logged, so that an outage is logged once.
    logged: Option<String>,
}

impl Task {
    pub(crate) fn new(name: &'static str, agent: &Agent) -> Self {
        Self {
            name,
            agent: agent.clone(),
            stop: agent.stopping(),
            pauses: pauses(MAX_PAUSE),
            logged: None,
        }
    }

    /// Records a success, and resets the backoff.
    pub(crate) fn succeeded(&mut self) {
        self.pauses = pauses(MAX_PAUSE);
        self.recovered();
    }

    /// Records a success that may be short, and does not reset the backoff.
    pub(crate) fn recovered(&mut self) {
        if self.logged.take().is_some() {
            tracing::info!(task = self.name, "API server task recovered");
        }
        self.progressed();
    }

    /// Records the success of one step. The backoff goes on, because the next step may fail each time.
    pub(crate) fn progressed(&self) {
        self.agent
            .cluster()
            .succeeded(self.name, self.agent.store().now());
    }

    /// Records an error, and returns the pause before the next attempt.
    pub(crate) fn failed(&mut self, error: &CallError) -> Duration {
        let pause = self.pauses.next().unwrap_or(MAX_PAUSE);
        let pause = error.retry_after().map_or(pause, |asked| asked.max(pause));
        let message = error.to_string();
        if self.logged.as_ref() != Some(&message) {
            tracing::warn!(task = self.name, error = %message, "API server task failed; devlet keeps retrying");
            self.logged = Some(message.clone());
        }
        self.agent
            .cluster()
            .failed(self.name, self.agent.store().now(), message);
        pause
    }

    /// Completes when the node stops.
    pub(crate) async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    /// Waits. Returns `false` if the node stops.
    pub(crate) async fn pause(&self, pause: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.stop.cancelled() => false,
        }
    }

    /// Repeats an attempt until it succeeds. Returns `None` if the node stops.
    pub(crate) async fn retry<T, F>(&mut self, mut attempt: impl FnMut() -> F) -> Option<T>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        loop {
            let attempted = tokio::select! {
                attempted = attempt() => attempted,
                () = self.stop.cancelled() => return None,
            };
            match attempted {
                Ok(value) => {
                    self.succeeded();
                    return Some(value);
                }
                Err(error) => {
                    let pause = self.failed(&error);
                    if !self.pause(pause).await {
                        return None;
                    }
                }
            }
        }
    }
}

/// Completes at a time; never if there is none.
pub(crate) async fn reached(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Returns the pauses between attempts. They double up to `longest`; jitter adds up to as much again.
pub(crate) fn pauses(longest: Duration) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(MIN_PAUSE)
        .with_max_delay(longest)
        .with_jitter()
        .without_max_times()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_with_jitter() {
        let longest = Duration::from_secs(30);
        let all: Vec<Duration> = pauses(longest).take(20).collect();
        assert!((MIN_PAUSE..=2 * MIN_PAUSE).contains(&all[0]), "{all:?}");
        assert!(
            all[10..]
                .iter()
                .all(|pause| (longest..=2 * longest).contains(pause)),
            "{all:?}"
        );
    }
}
