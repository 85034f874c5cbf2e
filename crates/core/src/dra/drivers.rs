//! Registered plugins of DRA drivers.
//!
//! A driver may have several plugins, during an update for example. The newest connected plugin is called. A plugin is
//! registered until its socket is removed, and connected while its transport is up:
//!
//! ```text
//!               registered                     link_up
//!   (unknown) ─────────────► not connected ◄──────────────► connected
//!        ▲                        │           link_lost         │
//!        └────────────────────────┴─────── deregistered ────────┘
//! ```
//!
//! A driver is usable while one of its plugins is connected. Its slices are outdated after it has been unusable for
//! [`WIPE_DELAY_MS`]. At most [`MAX_GONE`] drivers without a plugin and [`MAX_REFUSED`] refused plugins are kept.

use alloc::collections::BTreeMap;
use alloc::string::String;

use crate::device_plugin::inventory::LastPlugin;
use crate::dra::health::{Health, truncate};
use crate::id::{ConnectionId, DriverName, Moment, ProcessId};
use crate::quota::PluginIdentity;

/// The period after which the slices of an unusable driver are deleted, in milliseconds.
pub const WIPE_DELAY_MS: u64 = 30 * 1000;

/// The maximum number of drivers without a plugin. Beyond it, the oldest is removed.
pub const MAX_GONE: usize = 256;

/// The maximum number of refused plugins. Beyond it, the oldest is removed.
pub const MAX_REFUSED: usize = 64;

/// A valid registration of a plugin that accepts connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverOffer {
    /// The driver.
    pub driver: DriverName,
    /// The plugin's socket.
    pub endpoint: String,
    /// The process.
    pub process: ProcessId,
    /// `true` if it may serve the driver together with a plugin of another user.
    pub may_share: bool,
    /// The gRPC service that is used.
    pub service: String,
    /// The reason for this service, as text.
    pub service_reason: String,
    /// The gRPC service of its health reports; `None` if it does not report health.
    pub health_service: Option<String>,
}

/// The conflict with a registered plugin because of which another one is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverConflict {
    /// A plugin of another user serves the driver.
    #[error("{driver} is served by a plugin of user {first} at {endpoint}; user {uid} may not serve it too")]
    OtherUser {
        /// The driver.
        driver: DriverName,
        /// The user ID of the plugin that serves it.
        first: u32,
        /// The endpoint of that plugin.
        endpoint: String,
        /// The user ID of the rejected plugin.
        uid: u32,
    },
}

/// The refusal of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The driver name that the plugin reports. It may be any text.
    pub driver: String,
    /// The reason as text.
    pub reason: String,
    /// A hint for the operator; may be empty.
    pub hint: String,
}

/// A refused plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The last refusal.
    pub refusal: Refusal,
    /// The time of the last refusal.
    pub at: Moment,
    /// The number of refusals.
    pub attempts: u64,
}

/// A plugin that is registered.
#[derive(Debug, Clone)]
pub(crate) struct DriverPlugin {
    pub(crate) endpoint: String,
    pub(crate) process: ProcessId,
    pub(crate) service: String,
    pub(crate) service_reason: String,
    pub(crate) health_service: Option<String>,
    pub(crate) registered_at: Moment,
    pub(crate) connected: bool,
}

/// The plugins and device health of a driver.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    /// Oldest first.
    pub(crate) plugins: BTreeMap<ConnectionId, DriverPlugin>,
    /// Time since which no plugin is connected.
    pub(crate) unusable_since: Option<Moment>,
    /// The plugin that left last.
    pub(crate) last: Option<LastPlugin>,
    pub(crate) health: Health,
}

impl Driver {
    /// Returns the plugin to call.
    pub(crate) fn serving(&self) -> Option<(ConnectionId, &DriverPlugin)> {
        let connected = |(_, plugin): &(&ConnectionId, &DriverPlugin)| plugin.connected;
        let newest = self.plugins.iter().rev().find(connected);
        newest.map(|(id, plugin)| (*id, plugin))
    }

    /// Updates `unusable_since` after a change of plugins or connections.
    fn recompute(&mut self, now: Moment) {
        if self.serving().is_some() {
            self.unusable_since = None;
        } else {
            self.unusable_since.get_or_insert(now);
        }
    }
}

/// All drivers that have registered since the start.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    pub(crate) drivers: BTreeMap<DriverName, Driver>,
    pub(crate) connections: BTreeMap<ConnectionId, DriverName>,
    /// Refused plugins by socket.
    pub(crate) refused: BTreeMap<String, Refused>,
}

impl Drivers {
    pub(crate) fn register(
        &mut self,
        id: ConnectionId,
        offer: DriverOffer,
        now: Moment,
    ) -> Result<Option<ConnectionId>, DriverConflict> {
        let known = self.drivers.get(&offer.driver);
        let mut plugins = known.into_iter().flat_map(|driver| driver.plugins.values());
        let other = plugins.find(|plugin| plugin.process.uid != offer.process.uid);
        if let (Some(other), false) = (other, offer.may_share) {
            return Err(DriverConflict::OtherUser {
                first: other.process.uid,
                endpoint: other.endpoint.clone(),
                uid: offer.process.uid,
                driver: offer.driver,
            });
        }
        let driver = self.drivers.entry(offer.driver.clone()).or_default();
        let existing = driver
            .plugins
            .iter()
            .find(|(_, plugin)| plugin.endpoint == offer.endpoint);
        let replaced = existing.map(|(id, _)| *id);
        let plugin = DriverPlugin {
            endpoint: offer.endpoint,
            process: offer.process,
            service: offer.service,
            service_reason: offer.service_reason,
            health_service: offer.health_service,
            registered_at: now,
            connected: false,
        };
        driver.plugins.insert(id, plugin);
        driver.recompute(now);
        self.connections.insert(id, offer.driver);
        if let Some(replaced) = replaced {
            self.deregister(replaced, now);
        }
        Ok(replaced)
    }

    /// Returns all plugins of drivers that are registered.
    pub(crate) fn registered_plugins(&self) -> impl Iterator<Item = PluginIdentity<'_>> {
        self.drivers.iter().flat_map(|(name, driver)| {
            driver.plugins.values().map(|plugin| PluginIdentity {
                process: plugin.process,
                name: name.as_str(),
                endpoint: &plugin.endpoint,
            })
        })
    }

    /// Removes a plugin. Returns its driver if the plugin was registered.
    pub(crate) fn deregister(&mut self, id: ConnectionId, now: Moment) -> Option<DriverName> {
        let name = self.connections.remove(&id)?;
        let driver = self.drivers.get_mut(&name)?;
        let plugin = driver.plugins.remove(&id)?;
        driver.last = Some(LastPlugin {
            endpoint: plugin.endpoint,
            gone_since: now,
        });
        driver.health.stream_ended(id);
        driver.recompute(now);
        self.limit_gone();
        Some(name)
    }

    /// Removes the driver that has been gone longest, if there are more than [`MAX_GONE`].
    fn limit_gone(&mut self) {
        let gone = self
            .drivers
            .iter()
            .filter(|(_, driver)| driver.plugins.is_empty());
        if gone.clone().count() <= MAX_GONE {
            return;
        }
        let longest = gone.min_by_key(|(_, driver)| driver.unusable_since);
        let longest = longest.map(|(name, _)| name.clone());
        if let Some(name) = longest {
            self.drivers.remove(&name);
        }
    }

    /// Records a refusal. Beyond [`MAX_REFUSED`], the oldest refusal is removed.
    pub(crate) fn refuse(&mut self, socket: &str, refusal: Refusal, now: Moment) {
        let refusal = Refusal {
            driver: truncate(refusal.driver),
            reason: truncate(refusal.reason),
            hint: truncate(refusal.hint),
        };
        let attempts = self.refused.get(socket).map_or(0, |known| known.attempts);
        let refused = Refused {
            refusal,
            at: now,
            attempts: attempts.saturating_add(1),
        };
        self.refused.insert(socket.into(), refused);
        if self.refused.len() > MAX_REFUSED {
            let others = self.refused.iter().filter(|(other, _)| *other != socket);
            let oldest = others.min_by_key(|(_, refused)| refused.at);
            if let Some(oldest) = oldest.map(|(socket, _)| socket.clone()) {
                self.refused.remove(&oldest);
            }
        }
    }

    /// Sets whether a plugin is connected. Returns its driver if that changed.
    pub(crate) fn link(&mut self, id: ConnectionId, is_up: bool, now: Moment) -> Option<DriverName> {
        let name = self.connections.get(&id)?;
        let driver = self.drivers.get_mut(name)?;
        let plugin = driver.plugins.get_mut(&id)?;
        if plugin.connected == is_up {
            return None;
        }
        plugin.connected = is_up;
        driver.recompute(now);
        Some(name.clone())
    }

    pub(crate) fn serving(&self, name: &DriverName) -> Option<ConnectionId> {
        self.drivers.get(name)?.serving().map(|(id, _)| id)
    }

    /// Returns when the last connection of a driver was lost, if none is connected.
    pub(crate) fn unusable_since(&self, name: &DriverName) -> Option<Moment> {
        self.drivers.get(name)?.unusable_since
    }
}
