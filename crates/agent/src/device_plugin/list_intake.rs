//! Receives a plugin's device lists, decodes them, and hands them to the node.
//!
//! Lists are limited to `limits.listsPerSecond`. Long ones are decoded one at a time on a blocking thread, with a cooldown
//! ([`LongDecoder`]). While a plugin waits for either, its stream is not read: HTTP/2 flow control slows the plugin down.
//! Afterwards only the newest list that has arrived is decoded.

use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::{ConnectionId, ResourceName};
use devlet_uds::rate_limit::RateLimiter;
use futures_util::FutureExt as _;
use tokio::time::Instant;

use super::client::{ListError, Lists, PluginClient, RawList};
use super::impaired;
use crate::config::Config;
use crate::limits::{Limit, Limits};
use crate::long_decode::{LONG_MESSAGE, LongDecoder};
use crate::metrics::Metrics;
use crate::store::Store;

/// Maximum number of lists that are skipped at once for a newer one.
const MAX_SKIPPED: usize = 1024;

/// Receives the lists of one connection.
pub(crate) struct ListIntake<'a> {
    pub(crate) store: &'a Store,
    pub(crate) metrics: &'a Metrics,
    pub(crate) config: &'a Arc<Config>,
    pub(crate) decoder: &'a LongDecoder,
    pub(crate) resource: &'a ResourceName,
    pub(crate) connection: ConnectionId,
}

/// The effect of a list.
struct ListOutcome {
    /// `true` if the node has changed.
    changed: bool,
    /// Number of entries that repeat a device.
    repeated: usize,
}

impl ListIntake<'_> {
    /// Receives lists until the stream ends.
    pub(crate) async fn run(&self, client: &PluginClient) -> Result<(), ListError> {
        let resource = self.resource;
        let mut lists = client.lists().await?;
        let mut rate = RateLimiter::new(
            self.config.limits.lists_per_second,
            Duration::from_secs(1),
            Instant::now(),
        );
        let mut cooldown = Duration::ZERO;
        while let Some(mut list) = lists.next().await? {
            if let Err(allowed_at) = rate.try_acquire(Instant::now()) {
                self.metrics.limit_hit(Limit::LISTS_PER_SECOND.name());
                tokio::time::sleep_until(allowed_at).await;
                let _ = rate.try_acquire(Instant::now());
                list = newest(list, &mut lists)?;
            } else if !cooldown.is_zero() {
                list = newest(list, &mut lists)?;
            }
            let decoded;
            (decoded, cooldown) = self.decode(list).await;
            // Also after a list that is rejected: the plugin may send it again on a new connection.
            tokio::time::sleep(cooldown).await;
            let ListOutcome { changed, repeated } = decoded?;
            if repeated > 0 {
                tracing::warn!(%resource, repeated, "device listed more than once by its plugin");
            }
            self.metrics.listed(resource, changed);
        }
        Ok(())
    }

    /// Decodes a list and hands it to the node. Returns the cooldown of the plugin.
    async fn decode(&self, list: RawList) -> (Result<ListOutcome, ListError>, Duration) {
        let (store, config) = (self.store.clone(), Arc::clone(self.config));
        let (resource, connection) = (self.resource.clone(), self.connection);
        let size = list.size();
        let decode = move || apply(list, &store, &resource, connection, &config.limits);
        if size < LONG_MESSAGE {
            return (decode(), Duration::ZERO);
        }
        let panicked = |error: tokio::task::JoinError| {
            let status = tonic::Status::internal(error.to_string());
            (Err(status.into()), Duration::ZERO)
        };
        self.decoder.run(decode).await.unwrap_or_else(panicked)
    }
}

/// Returns the newest list that has arrived.
fn newest(first: RawList, lists: &mut Lists) -> Result<RawList, ListError> {
    let mut newest = first;
    for _ in 0..MAX_SKIPPED {
        match lists.next().now_or_never() {
            Some(next) => match next? {
                Some(list) => newest = list,
                None => break,
            },
            None => break,
        }
    }
    Ok(newest)
}

/// Decodes a list and hands it to the node. The list of a lost connection is ignored.
fn apply(
    list: RawList,
    store: &Store,
    resource: &ResourceName,
    connection: ConnectionId,
    limits: &Limits,
) -> Result<ListOutcome, ListError> {
    let (list, repeated) = list.decode()?;
    let list = Arc::new(list);
    // Long lists take a while to compare and to free, so both happen outside of the lock.
    let known = store.read(|node| node.lists_before(connection));
    let same = known.iter().find(|known| ***known == *list);
    let current: Arc<DeviceList> = Arc::clone(same.unwrap_or(&list));
    let changed = impaired::update(store, resource, |node| {
        node.check_list_quota(connection, &current, &limits.plugin_limits())?;
        Ok::<_, devlet_core::QuotaError>(node.devices_listed(connection, current))
    });
    let changed = changed.map_err(|error| limits.quota_exceeded(&error))?;
    Ok(ListOutcome { changed, repeated })
}
