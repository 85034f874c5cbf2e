//! Receives a connected plugin's reports about the health of its devices.
//!
//! A stream that ends is opened again, with backoff, unless the plugin does not implement it. A message may be about some
//! devices only, so none is skipped: a plugin that sends too many is read slowly, and HTTP/2 flow control holds it back.

use std::time::Duration;

use devlet_core::{ConnectionId, DriverName};
use devlet_uds::rate_limit::RateLimiter;
use prost::bytes::Bytes;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::client::DriverClient;
use super::registration::DriverRegistrar;
use super::wire;
use crate::backoff::Backoff;
use crate::grpc::call::InvalidAnswer;
use crate::grpc::oversize::is_too_large;
use crate::limits::{Limit, Limits};
use crate::long_decode::LONG_MESSAGE;
use crate::peer_text::shorten_status;
use crate::store::Store;

const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Reports that one plugin may send: burst, and refill per second.
const REPORTS_PER_SECOND: u32 = 10_000;
/// A message counts as at least one report per this many bytes.
const BYTES_PER_REPORT: usize = 256;
/// Maximum number of reports handed to the node under one lock.
const BATCH: usize = 64;

/// Reason why a stream has ended.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    /// The plugin ended the stream, or the connection was lost.
    #[error("{} ({:?})", .0.message(), .0.code())]
    Ended(#[source] Status),
    /// A message cannot be decoded, or exceeds a limit.
    #[error(transparent)]
    Invalid(#[from] InvalidAnswer),
}

impl From<Status> for WatchError {
    fn from(status: Status) -> Self {
        Self::Ended(shorten_status(&status))
    }
}

impl WatchError {
    fn code(&self) -> Code {
        match self {
            Self::Ended(status) => status.code(),
            Self::Invalid(InvalidAnswer::LimitExceeded(_)) => Code::ResourceExhausted,
            Self::Invalid(_) => Code::Internal,
        }
    }
}

/// Receives reports, and opens the stream again when it ends. Runs until it is dropped.
pub(super) async fn run(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    driver: &DriverName,
    client: &DriverClient,
) {
    let mut backoff = Backoff::new(MIN_PAUSE, MAX_PAUSE);
    loop {
        let started = Instant::now();
        let ended = listen(registrar, id, driver, client).await;
        registrar.store.update(|node| node.health_stream_ended(id));
        match ended {
            Ok(Some(())) => tracing::debug!(%driver, conn = %id, "health stream ended by DRA driver"),
            // The plugin does not offer a stream.
            Ok(None) => std::future::pending().await,
            Err(error) if error.code() == Code::Unimplemented => {
                tracing::info!(%driver, conn = %id, "health stream not implemented by DRA driver, though it lists the service");
                std::future::pending::<()>().await;
            }
            Err(error) => {
                client.rpcs().watch_ended(error.code());
                if let WatchError::Invalid(InvalidAnswer::LimitExceeded(exceeded)) = &error {
                    registrar.metrics.limit_hit(exceeded.limit.name());
                }
                tracing::warn!(%driver, conn = %id, %error, "NodeWatchResources ended");
            }
        }
        backoff.reset_after(started.elapsed());
        backoff.wait().await;
    }
}

/// Receives messages until the stream ends. Returns `None` if the plugin does not offer a stream.
async fn listen(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    driver: &DriverName,
    client: &DriverClient,
) -> Result<Option<()>, WatchError> {
    let Some(stream) = client.watch().await else {
        return Ok(None);
    };
    let mut stream = stream?;
    let limits = &registrar.config.limits;
    let mut rate = RateLimiter::new(REPORTS_PER_SECOND, Duration::from_secs(1), Instant::now());
    let mut warned = false;
    let too_large = |status: Status| match is_too_large(&status) {
        true => {
            let exceeded = Limit::ANSWER_BYTES.exceeded("the message is too large", limits.answer_bytes);
            WatchError::Invalid(exceeded.into())
        }
        false => WatchError::from(status),
    };
    while let Some(message) = stream.message().await.map_err(too_large)? {
        if let Err(allowed_at) = rate.try_acquire(Instant::now()) {
            tokio::time::sleep_until(allowed_at).await;
            let _ = rate.try_acquire(Instant::now());
        }
        let size = message.len();
        let (decoded, cooldown) = decode(registrar, id, message).await;
        tokio::time::sleep(cooldown).await;
        let outcome = decoded?;
        let reports = outcome.reports.max(size / BYTES_PER_REPORT);
        let reports = u32::try_from(reports).unwrap_or(u32::MAX);
        rate.charge(
            Duration::from_secs(1) / REPORTS_PER_SECOND * reports,
            Instant::now(),
        );
        registrar.metrics.health_reported(driver, outcome.changed > 0);
        if outcome.nameless + outcome.dropped > 0 && !warned {
            let Outcome {
                nameless, dropped, ..
            } = outcome;
            tracing::warn!(
                %driver, conn = %id, nameless, dropped,
                "health reports ignored: devices without a name, or too many devices"
            );
            warned = true;
        }
    }
    Ok(Some(()))
}

/// The effect of a message.
#[derive(Debug, Default)]
struct Outcome {
    /// Reports in the message.
    reports: usize,
    /// Devices whose health has changed.
    changed: usize,
    /// Reports about devices without a name.
    nameless: usize,
    /// Reports about devices beyond the node's limit.
    dropped: usize,
}

/// Decodes a message and hands it to the node. Returns the cooldown of the plugin.
async fn decode(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    message: Bytes,
) -> (Result<Outcome, InvalidAnswer>, Duration) {
    let (config, store) = (registrar.config.clone(), registrar.store.clone());
    let size = message.len();
    let decode = move || apply(message, &config.limits, &store, id);
    if size < LONG_MESSAGE {
        return (decode(), Duration::ZERO);
    }
    let panicked = |error: tokio::task::JoinError| {
        let damaged = InvalidAnswer::Damaged(error.to_string());
        (Err(damaged), Duration::ZERO)
    };
    registrar.decoder.run(decode).await.unwrap_or_else(panicked)
}

fn apply(message: Bytes, limits: &Limits, store: &Store, id: ConnectionId) -> Result<Outcome, InvalidAnswer> {
    let (mut reports, nameless) = wire::decode_reports(message, limits)?;
    let mut outcome = Outcome {
        reports: reports.len() + nameless,
        nameless,
        ..Outcome::default()
    };
    while !reports.is_empty() {
        let rest = reports.split_off(reports.len().min(BATCH));
        let batch = std::mem::replace(&mut reports, rest);
        let now = store.now();
        let change = store.update(|node| node.health_reported(id, batch, now));
        outcome.changed += change.devices.len();
        outcome.dropped += change.dropped;
    }
    Ok(outcome)
}
