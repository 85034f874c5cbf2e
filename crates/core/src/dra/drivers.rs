//! Which plugins serve which driver.
//!
//! A driver may have several plugins at once, during an update for example; the newest one that is connected is
//! called. A plugin is registered until its socket goes, and connected while its transport is up:
//!
//! ```text
//!               registered                     link_up
//!   (unknown) ─────────────► not connected ◄──────────────► connected
//!        ▲                        │           link_lost         │
//!        └────────────────────────┴─────── deregistered ────────┘
//! ```
//!
//! A driver is usable while one of its plugins is connected. What it has published is out of date when it has not
//! been usable for [`WIPE_DELAY_MS`]. Of drivers without a plugin the last [`MOST_GONE`] are remembered, of plugins that
//! were not taken in the last [`MOST_REFUSED`], as long as they are there.

use alloc::collections::BTreeMap;
use alloc::string::String;

use crate::device_plugin::inventory::LastPlugin;
use crate::dra::health::{Health, cut};
use crate::id::{ConnectionId, DriverName, Moment, ProcessId};
use crate::quota::PluginIdentity;

/// How long a driver may be away before its slices are wiped.
pub const WIPE_DELAY_MS: u64 = 30 * 1000;

/// How many drivers without a plugin are remembered.
pub const MOST_GONE: usize = 256;

/// How many plugins that were refused are remembered.
pub const MOST_REFUSED: usize = 64;

/// A well-formed wish to serve a driver, from a plugin that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverOffer {
    /// The driver.
    pub driver: DriverName,
    /// The socket at which the plugin answers.
    pub endpoint: String,
    /// The process that it runs as.
    pub process: ProcessId,
    /// Whether it may serve the driver beside a plugin of another user.
    pub may_share: bool,
    /// What is spoken with it.
    pub service: String,
    /// Why that, in words for people.
    pub service_reason: String,
    /// How it reports the health of devices, in words for people; `None` if it does not.
    pub health_service: Option<String>,
}

/// Why a plugin is not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The driver is served by somebody else.
    #[error("{driver} is served by a plugin of user {first} at {endpoint}; user {uid} may not serve it too")]
    OtherUser {
        /// The driver.
        driver: DriverName,
        /// The user that serves it.
        first: u32,
        /// Where.
        endpoint: String,
        /// The user that wants to.
        uid: u32,
    },
}

/// A plugin that is not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The driver that it says it is of: any text.
    pub driver: String,
    /// Why, in words for people.
    pub reason: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

/// What is remembered of a plugin that is not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The last time that it was.
    pub refusal: Refusal,
    /// When that was.
    pub at: Moment,
    /// How often it was.
    pub attempts: u64,
}

/// A plugin that is registered.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    pub(crate) endpoint: String,
    pub(crate) process: ProcessId,
    pub(crate) service: String,
    pub(crate) service_reason: String,
    pub(crate) health_service: Option<String>,
    pub(crate) registered_at: Moment,
    pub(crate) connected: bool,
}

/// What is known of a driver.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    /// Oldest first.
    pub(crate) plugins: BTreeMap<ConnectionId, Plugin>,
    /// Since when no plugin is connected, and whether its slices have been wiped since.
    pub(crate) unusable: Option<Unusable>,
    /// The plugin that was seen last, and when it left.
    pub(crate) last: Option<LastPlugin>,
    pub(crate) health: Health,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Unusable {
    pub(crate) since: Moment,
    pub(crate) wiped: bool,
}

impl Driver {
    /// The plugin to call.
    pub(crate) fn serving(&self) -> Option<(ConnectionId, &Plugin)> {
        let connected = |(_, plugin): &(&ConnectionId, &Plugin)| plugin.connected;
        let newest = self.plugins.iter().rev().find(connected);
        newest.map(|(id, plugin)| (*id, plugin))
    }

    /// Plugins or connections came or went.
    fn recompute(&mut self, now: Moment) {
        if self.serving().is_some() {
            self.unusable = None;
        } else {
            self.unusable.get_or_insert(Unusable {
                since: now,
                wiped: false,
            });
        }
    }
}

/// All drivers that have ever registered since the start.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    pub(crate) drivers: BTreeMap<DriverName, Driver>,
    pub(crate) connections: BTreeMap<ConnectionId, DriverName>,
    /// Plugins that are not taken in, by the socket where they were found.
    pub(crate) refused: BTreeMap<String, Refused>,
}

impl Drivers {
    pub(crate) fn register(
        &mut self,
        id: ConnectionId,
        offer: DriverOffer,
        now: Moment,
    ) -> Result<Option<ConnectionId>, RegisterError> {
        let known = self.drivers.get(&offer.driver);
        let mut plugins = known.into_iter().flat_map(|driver| driver.plugins.values());
        let other = plugins.find(|plugin| plugin.process.uid != offer.process.uid);
        if let (Some(other), false) = (other, offer.may_share) {
            return Err(RegisterError::OtherUser {
                first: other.process.uid,
                endpoint: other.endpoint.clone(),
                uid: offer.process.uid,
                driver: offer.driver,
            });
        }
        let driver = self.drivers.entry(offer.driver.clone()).or_default();
        let in_place = driver
            .plugins
            .iter()
            .find(|(_, plugin)| plugin.endpoint == offer.endpoint);
        let replaced = in_place.map(|(id, _)| *id);
        let plugin = Plugin {
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

    /// The driver, if that was news.
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
        self.forget();
        Some(name)
    }

    /// Forgets who has been gone for longest, if there are too many of them; those whose slices are wiped first.
    fn forget(&mut self) {
        let gone = self
            .drivers
            .iter()
            .filter(|(_, driver)| driver.plugins.is_empty());
        if gone.clone().count() <= MOST_GONE {
            return;
        }
        let away = |(_, driver): &(&DriverName, &Driver)| {
            driver.unusable.map(|unusable| (!unusable.wiped, unusable.since))
        };
        let longest = gone.min_by_key(away).map(|(name, _)| name.clone());
        if let Some(name) = longest {
            self.drivers.remove(&name);
        }
    }

    /// A plugin was not taken in. Of too many, the one that was refused longest ago is forgotten.
    pub(crate) fn refuse(&mut self, socket: &str, refusal: Refusal, now: Moment) {
        let refusal = Refusal {
            driver: cut(refusal.driver),
            reason: cut(refusal.reason),
            hint: cut(refusal.hint),
        };
        let attempts = self.refused.get(socket).map_or(0, |known| known.attempts);
        let refused = Refused {
            refusal,
            at: now,
            attempts: attempts.saturating_add(1),
        };
        self.refused.insert(socket.into(), refused);
        if self.refused.len() > MOST_REFUSED {
            let others = self.refused.iter().filter(|(other, _)| *other != socket);
            let oldest = others.min_by_key(|(_, refused)| refused.at);
            if let Some(oldest) = oldest.map(|(socket, _)| socket.clone()) {
                self.refused.remove(&oldest);
            }
        }
    }

    /// The driver, if that was news.
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

    /// Since when none of a driver's plugins is connected.
    pub(crate) fn unusable_since(&self, name: &DriverName) -> Option<Moment> {
        let unusable = self.drivers.get(name)?.unusable?;
        Some(unusable.since)
    }

    /// When slices of drivers are to be wiped that have not been.
    pub(crate) fn wipes(&self) -> impl Iterator<Item = (Moment, &DriverName)> {
        self.drivers.iter().filter_map(|(name, driver)| {
            let unusable = driver.unusable.filter(|unusable| !unusable.wiped)?;
            Some((unusable.since.after(WIPE_DELAY_MS), name))
        })
    }
}
