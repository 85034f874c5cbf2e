//! What plugins currently offer.
//!
//! Several plugins may serve one resource, during an update for example. The newest list counts as a whole; when
//! its plugin leaves, the newest list of one that is still connected counts again. When the last one leaves,
//! the list stays, to be counted as unhealthy, until the grace period is over.
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
//! makes admissions wait. Afterwards the same list means that the devices are gone, and admissions are refused.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;

use super::list::DeviceList;
use crate::id::{ConnectionId, Moment, ProcessId, ResourceName};

/// How long the devices of a plugin that left count towards capacity.
pub const GRACE_MS: u64 = 5 * 60 * 1000;

/// How long a resource is remembered that nobody serves and nobody holds.
pub const EVICT_AFTER_MS: u64 = 24 * 60 * 60 * 1000;

/// How many such resources are remembered at most.
pub const MAX_IDLE: usize = 1024;

/// A well-formed wish to serve a resource, from a plugin that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The resource.
    pub resource: ResourceName,
    /// The socket at which the plugin answers.
    pub endpoint: String,
    /// The process that it runs as.
    pub process: ProcessId,
    /// Whether it may serve the resource beside a plugin of another user.
    pub may_share: bool,
    /// What it wants to be asked.
    pub options: PluginOptions,
}

/// What a plugin wants to be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PluginOptions {
    /// Before each start of a container.
    pub pre_start_required: bool,
    /// Before devices are chosen.
    pub preferred_allocation: bool,
}

/// A plugin that is connected.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    pub(crate) endpoint: String,
    pub(crate) process: ProcessId,
    pub(crate) options: PluginOptions,
    pub(crate) connected_at: Moment,
    /// Whether it has listed a healthy device since it connected.
    pub(crate) ready: bool,
    /// Its last list, and the list's number among all lists.
    pub(crate) list: Option<(u64, Arc<DeviceList>)>,
}

/// What is known of a resource.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resource {
    pub(crate) plugins: BTreeMap<ConnectionId, Plugin>,
    /// The list that counts; without a plugin, the last one.
    pub(crate) list: Arc<DeviceList>,
    /// The connection of that list; `None` without a plugin.
    pub(crate) active: Option<ConnectionId>,
    /// The process that sent that list.
    pub(crate) list_process: Option<ProcessId>,
    /// When the list was last in force, if it is not: plugins that come and go without a list do not prolong the
    /// grace period.
    pub(crate) idle_since: Option<Moment>,
    /// The plugin that was seen last, and when it left.
    pub(crate) last: Option<LastPlugin>,
    /// Since when it is known to be unused, if no plugin has ever served it here.
    pub(crate) unused_since: Option<Moment>,
}

/// The trace of a plugin that left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastPlugin {
    /// Where it answered.
    pub endpoint: String,
    /// Since when it does not.
    pub gone_since: Moment,
}

impl Resource {
    /// The plugin whose list counts.
    pub(crate) fn serving(&self) -> Option<(ConnectionId, &Plugin)> {
        let id = self.active?;
        Some((id, self.plugins.get(&id)?))
    }

    /// Makes the newest list of a connected plugin count. Whether another list counts than before.
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
                changed
            }
            None => self.active.take().is_some(),
        }
    }

    /// When its devices do not count any longer, if no plugin lists them until then.
    pub(crate) fn grace_end(&self) -> Option<Moment> {
        let since = self.idle_since.filter(|_| self.active.is_none())?;
        Some(Moment(since.0.saturating_add(GRACE_MS)))
    }

    /// Whether capacity still counts the list.
    pub(crate) fn counts(&self, now: Moment) -> bool {
        let in_grace = |since: Moment| now.since(since) <= GRACE_MS;
        self.active.is_some() || self.idle_since.is_some_and(in_grace)
    }
}
