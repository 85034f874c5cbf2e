//! What a connected plugin says about the health of its devices, for as long as it is connected.
//!
//! A stream that ends is asked for again, after a pause that grows; a plugin that has no such service is not. Messages
//! may be about some of the devices only, so none can be passed over: a plugin that sends too many is read slowly, and
//! waits.

use std::time::Duration;

use devlet_core::dra::health::HealthReport;
use devlet_core::{ConnectionId, DriverName};
use devlet_uds::rate_limit::RateLimiter;
use prost::bytes::Bytes;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::client::DriverClient;
use super::registration::DriverRegistrar;
use super::wire;
use crate::grpc::call::InvalidAnswer;
use crate::grpc::oversize::is_too_large;
use crate::limits::portions::Portions;
use crate::limits::seats::Process;
use crate::limits::{Limit, Limits};
use crate::peer_text::shorten_status;
use crate::store::Store;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A stream that lasted this long was a good one: the next pause is a short one.
const GOOD: Duration = Duration::from_secs(60);

/// So many messages are heard at once and in a second.
const MESSAGES_PER_SECOND: u32 = 1000;
/// And so many bytes of them.
const BYTES_PER_SECOND: usize = 4 << 20;
/// And so many devices.
const DEVICES_PER_SECOND: usize = 10_000;
/// Messages of so many bytes take a while to decode and to take in.
const LARGE: usize = 8 << 10;
/// So many reports are taken in in one go: others wait for the node meanwhile.
const PORTION: usize = 64;

/// Why a stream has ended.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    /// The plugin, or the way to it, says so.
    #[error("{} ({:?})", .0.message(), .0.code())]
    Ended(#[source] Status),
    /// It sent something that is no message, or too much of one.
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
            Self::Invalid(InvalidAnswer::OverLimit(_)) => Code::ResourceExhausted,
            Self::Invalid(_) => Code::Internal,
        }
    }
}

/// Passes on what the plugin says, again and again. Does not end.
pub(super) async fn follow(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    driver: &DriverName,
    client: &DriverClient,
    process: Process,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let began = Instant::now();
        let ended = listen(registrar, id, driver, client, process).await;
        registrar.store.update(|node| node.health_stream_ended(id));
        match ended {
            Ok(Some(())) => tracing::debug!(%driver, conn = %id, "DRA driver ended its reports of health"),
            // It does not offer any.
            Ok(None) => std::future::pending().await,
            Err(error) if error.code() == Code::Unimplemented => {
                tracing::info!(%driver, conn = %id, "DRA driver does not report health, though it says so");
                std::future::pending::<()>().await;
            }
            Err(error) => {
                client.rpcs().watch_ended(error.code());
                if let WatchError::Invalid(InvalidAnswer::OverLimit(over)) = &error {
                    registrar.metrics.limit_hit(over.limit.name());
                }
                tracing::warn!(%driver, conn = %id, %error, retry_in = ?pause, "NodeWatchResources ended");
            }
        }
        if began.elapsed() > GOOD {
            pause = FIRST_PAUSE;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Passes messages on until there are no more; `None` if there is no stream at all.
async fn listen(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    driver: &DriverName,
    client: &DriverClient,
    process: Process,
) -> Result<Option<()>, WatchError> {
    let Some(stream) = client.watch().await else {
        return Ok(None);
    };
    let mut stream = stream?;
    let limits = &registrar.config.limits;
    let mut limiter = RateLimiter::new(MESSAGES_PER_SECOND, Duration::from_secs(1), Instant::now());
    let mut complained = false;
    let too_large = |status: Status| match is_too_large(&status) {
        true => {
            let over = Limit::ANSWER_BYTES.exceeded("the message is too large", limits.answer_bytes);
            WatchError::Invalid(over.into())
        }
        false => WatchError::from(status),
    };
    while let Some(message) = stream.message().await.map_err(too_large)? {
        if let Err(due) = limiter.try_acquire(Instant::now()) {
            tokio::time::sleep_until(due).await;
            // It is due.
            let _ = limiter.try_acquire(Instant::now());
        }
        limiter.charge(weight(message.len(), BYTES_PER_SECOND), Instant::now());
        let taken = take(registrar, id, message, process).await?;
        limiter.charge(weight(taken.reports, DEVICES_PER_SECOND), Instant::now());
        registrar.metrics.health_reported(driver, taken.changed > 0);
        if taken.nameless + taken.left_out > 0 && !complained {
            let Taken {
                nameless, left_out, ..
            } = taken;
            tracing::warn!(
                %driver, conn = %id, nameless, left_out,
                "DRA driver reports devices that have no name, or more than are kept"
            );
            complained = true;
        }
    }
    Ok(Some(()))
}

/// How much so much of something counts of which there may be `per_second`.
fn weight(size: usize, per_second: usize) -> Duration {
    let nanoseconds = size.saturating_mul(1_000_000_000) / per_second;
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

/// What became of a message: how many reports it had, how many devices are different now, how many have no name, and how
/// many are too many.
#[derive(Debug, Default)]
struct Taken {
    reports: usize,
    changed: usize,
    nameless: usize,
    left_out: usize,
}

/// Takes a message in: long ones with pauses, and where they keep nobody else waiting.
async fn take(
    registrar: &DriverRegistrar,
    id: ConnectionId,
    message: Bytes,
    process: Process,
) -> Result<Taken, InvalidAnswer> {
    if message.len() < LARGE {
        let limits = &registrar.config.limits;
        return take_now(message, limits, &registrar.store, id, &mut Portions::in_one_go());
    }
    let (config, store) = (registrar.config.clone(), registrar.store.clone());
    let work = move |portions: &mut Portions| take_now(message, &config.limits, &store, id, portions);
    let turn = registrar.decoding.turn_with_pauses(Some(process)).await;
    let taken = turn.work(work).await;
    taken.unwrap_or_else(|error| Err(InvalidAnswer::Damaged(error.to_string())))
}

fn take_now(
    message: Bytes,
    limits: &Limits,
    store: &Store,
    id: ConnectionId,
    portions: &mut Portions,
) -> Result<Taken, InvalidAnswer> {
    let (reports, nameless) = wire::reports(message, limits, portions)?;
    let mut taken = Taken {
        reports: reports.len() + nameless,
        nameless,
        ..Taken::default()
    };
    let mut reports = reports.into_iter();
    loop {
        let portion: Vec<HealthReport> = reports.by_ref().take(PORTION).collect();
        let now = store.now();
        let change = store.update(|node| node.health_reported(id, portion, now));
        taken.changed += change.devices.len();
        taken.left_out += change.left_out;
        if reports.len() == 0 {
            return Ok(taken);
        }
        portions.portion();
    }
}
