//! Connected device plugins and the active device list of each resource.
//!
//! Several plugins may serve one resource, during an update for example. The newest list is active as a whole. When its
//! plugin leaves, the newest list of a connected plugin becomes active. When the last plugin leaves, capacity counts the
//! devices as unhealthy until the grace period ends.
//!
//! ```text
//!              connected                listed
//!   unknown ─────────────► connected ───────────► serving ──┐ listed
//!                              ▲  ▲                  │   ▲──┘
//!                    connected │  └──── lost ────────┤ (another plugin is connected without a list)
//!                            gone ◄──── lost ────────┘ (the last one)
//! ```
//!
//! A plugin is *ready* once it has listed a healthy device on its connection. Some plugins first send an empty list, or
//! one in which every device is unhealthy, while they look for their devices: until the plugin is ready, such a list
//! makes admissions wait. Once the plugin is ready, such a list means that the devices are gone, and admissions are
//! refused.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;

use super::list::DeviceList;
use crate::id::{ConnectionId, Moment, ProcessId, ResourceName};

/// The period in which capacity counts the devices of a resource after its last plugin left, in milliseconds.
pub const GRACE_MS: u64 = 5 * 60 * 1000;

/// The period after which an idle resource, without plugins and holders, is removed, in milliseconds.
pub const EVICT_AFTER_MS: u64 = 24 * 60 * 60 * 1000;

/// The maximum number of idle resources. Beyond it, the oldest are removed.
pub const MAX_IDLE: usize = 1024;

/// A valid registration of a plugin that accepts connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The resource.
    pub resource: ResourceName,
    /// The plugin's socket.
    pub endpoint: String,
    /// The process.
    pub process: ProcessId,
    /// `true` if it may serve the resource together with a plugin of another user.
    pub may_share: bool,
    /// Its options.
    pub options: PluginOptions,
}

/// The optional calls of a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PluginOptions {
    /// `true` if `PreStartContainer` is required before each start of a container.
    pub pre_start_required: bool,
    /// `true` if `GetPreferredAllocation` is available.
    pub preferred_allocation: bool,
}

/// A plugin that is connected.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    pub(crate) endpoint: String,
    pub(crate) process: ProcessId,
    pub(crate) options: PluginOptions,
    pub(crate) connected_at: Moment,
    /// `true` if it has listed a healthy device since it connected.
    pub(crate) ready: bool,
    /// Its last list, and the list's number among all lists.
    pub(crate) list: Option<(u64, Arc<DeviceList>)>,
}

/// The plugins and devices of a resource.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resource {
    pub(crate) plugins: BTreeMap<ConnectionId, Plugin>,
    /// The active list; without a plugin, the last active list.
    pub(crate) list: Arc<DeviceList>,
    /// The last list of a plugin that had found its devices.
    pub(crate) remembered: Arc<DeviceList>,
    /// The remembered list that is on record.
    pub(crate) recorded: Option<Arc<DeviceList>>,
    /// The plugin of the active list.
    pub(crate) active: Option<ConnectionId>,
    /// The process that sent the list.
    pub(crate) list_process: Option<ProcessId>,
    /// When the last active list ended. Plugins that connect and leave without a list do not extend the grace period.
    pub(crate) idle_since: Option<Moment>,
    /// The plugin that left last.
    pub(crate) last: Option<LastPlugin>,
    /// When the last plugin left that had found its devices, since the start.
    pub(crate) ready_until: Option<Moment>,
    /// When it was first found unused, if no plugin has ever served it.
    pub(crate) unused_since: Option<Moment>,
}

/// A plugin that has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastPlugin {
    /// Its socket.
    pub endpoint: String,
    /// When it left.
    pub gone_since: Moment,
}

impl Resource {
    /// Returns the plugin of the active list.
    pub(crate) fn serving(&self) -> Option<(ConnectionId, &Plugin)> {
        let id = self.active?;
        Some((id, self.plugins.get(&id)?))
    }

    /// Activates the newest list of a connected plugin. Returns `true` if the active list changed.
    pub(crate) fn recompute(&mut self) -> bool {
        let newest = self
            .plugins
            .iter()
            .filter_map(|(id, plugin)| plugin.list.as_ref().map(|(number, list)| (*number, *id, list)))
            .max_by_key(|&(number, id, _)| (number, id));
        match newest {
            Some((_, id, list)) => {
                let changed = self.active != Some(id) || !Arc::ptr_eq(&self.list, list);
                self.list = Arc::clone(list);
                self.active = Some(id);
                self.list_process = self.plugins.get(&id).map(|plugin| plugin.process);
                if self.plugins.get(&id).is_some_and(|plugin| plugin.ready) {
                    self.remembered = Arc::clone(&self.list);
                }
                changed
            }
            None => self.active.take().is_some(),
        }
    }

    /// Returns the end of the grace period, if no list is active.
    pub(crate) fn grace_end(&self) -> Option<Moment> {
        let since = self.idle_since.filter(|_| self.active.is_none())?;
        Some(Moment(since.0.saturating_add(GRACE_MS)))
    }

    /// Returns `true` if capacity counts the list: it is active, or in its grace period.
    pub(crate) fn counts(&self, now: Moment) -> bool {
        let in_grace = |since: Moment| now.since(since) <= GRACE_MS;
        self.active.is_some() || self.idle_since.is_some_and(in_grace)
    }
}
