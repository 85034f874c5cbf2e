//! Facts about device plugins: connections, lists of devices, and resources that are no longer used.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{ConnectError, Node};
use crate::device_plugin::inventory::{EVICT_AFTER_MS, LastPlugin, MAX_IDLE, Offer, Plugin, Resource};
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::rejections::Rejection;
use crate::id::{ConnectionId, Moment, ResourceName};

impl Node {
    /// Adds a plugin that has connected. Returns its connection, and the connection that it replaces, which had the same
    /// resource and endpoint. Later messages of a replaced connection change nothing. A plugin of another user can
    /// neither join nor replace a connected plugin unless `may_share` is set.
    pub fn plugin_connected(
        &mut self,
        offer: Offer,
        now: Moment,
    ) -> Result<(ConnectionId, Option<ConnectionId>), ConnectError> {
        let known = self.resources.get(&offer.resource);
        let mut plugins = known.into_iter().flat_map(|resource| resource.plugins.values());
        let other = plugins.find(|plugin| plugin.process.uid != offer.process.uid);
        if let (Some(other), false) = (other, offer.may_share) {
            let (first, endpoint, uid) = (other.process.uid, other.endpoint.clone(), offer.process.uid);
            return Err(ConnectError::OtherUser {
                resource: offer.resource,
                first,
                endpoint,
                uid,
            });
        }
        let is_replaced = |plugin: &Plugin| plugin.endpoint == offer.endpoint;
        let resource = self.resources.entry(offer.resource.clone()).or_default();
        let replaced = resource
            .plugins
            .iter()
            .find(|(_, plugin)| is_replaced(plugin))
            .map(|(id, _)| *id);
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        self.rejections.remove(offer.resource.as_str(), &offer.endpoint);
        let Offer {
            resource: name,
            endpoint,
            process,
            options,
            ..
        } = offer;
        resource.plugins.insert(
            id,
            Plugin {
                endpoint,
                process,
                options,
                connected_at: now,
                ready: false,
                list: None,
            },
        );
        self.connections.insert(id, name);
        self.changes += 1;
        self.resource_changes += 1;
        if let Some(replaced) = replaced {
            self.connection_lost(replaced, now);
        }
        Ok((id, replaced))
    }

    /// Records that a plugin asked to register and was rejected. Returns `false` if the same rejection is recorded
    /// already.
    pub fn plugin_rejected(&mut self, rejection: Rejection, now: Moment) -> bool {
        let is_new = self.rejections.insert(rejection, now);
        self.changes += u64::from(is_new);
        is_new
    }

    /// Records the device list of a plugin. Returns `true` if that changed anything. A list of a replaced or lost
    /// connection changes nothing, and neither does a repeated list.
    ///
    /// Long lists take time to compare and to free. To keep a lock on the node short, a caller compares the list with
    /// [`Node::lists_before`] first, passes the equal one, and frees the others after it releases the lock.
    pub fn devices_listed(&mut self, connection: ConnectionId, list: impl Into<Arc<DeviceList>>) -> bool {
        let list = list.into();
        let Some((name, resource)) = self.resource_of(connection) else {
            return false;
        };
        let Some(plugin) = resource.plugins.get_mut(&connection) else {
            return false;
        };
        let is_same = plugin
            .list
            .as_ref()
            .is_some_and(|(_, last)| Arc::ptr_eq(last, &list) || *last == list);
        if is_same && resource.active == Some(connection) {
            return false;
        }
        let number = self.next_list;
        self.next_list += 1;
        if let Some(resource) = self.resources.get_mut(&name) {
            if let Some(plugin) = resource.plugins.get_mut(&connection) {
                plugin.ready |= list.healthy().count() > 0;
                plugin.list = Some((number, list));
            }
            resource.recompute();
            self.ledger.list_changed(&name, resource);
        }
        self.changes += 1;
        true
    }

    /// Returns `true` if this connection has been neither lost nor replaced.
    pub fn is_connected(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    /// Returns the lists that the next list of this connection may replace: the plugin's last list, and the active list.
    pub fn lists_before(&self, connection: ConnectionId) -> Vec<Arc<DeviceList>> {
        let name = self.connections.get(&connection);
        let Some(resource) = name.and_then(|name| self.resources.get(name)) else {
            return Vec::new();
        };
        let own = resource.plugins.get(&connection);
        let own = own.and_then(|plugin| plugin.list.as_ref().map(|(_, list)| list));
        own.into_iter().chain([&resource.list]).cloned().collect()
    }

    /// Removes a plugin whose connection is lost. Returns `false` if the connection was unknown.
    pub fn connection_lost(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let Some(name) = self.connections.remove(&connection) else {
            return false;
        };
        let Some(resource) = self.resources.get_mut(&name) else {
            return false;
        };
        let Some(plugin) = resource.plugins.remove(&connection) else {
            return false;
        };
        if plugin.ready {
            resource.ready_until = Some(now);
        }
        resource.last = Some(LastPlugin {
            endpoint: plugin.endpoint,
            gone_since: now,
        });
        if resource.recompute() {
            if resource.active.is_none() {
                resource.idle_since = Some(now);
            }
            self.ledger.list_changed(&name, resource);
        }
        self.changes += 1;
        self.resource_changes += 1;
        self.limit_idle();
        true
    }

    /// Adds resources that no plugin need serve.
    pub fn add_resources(&mut self, names: impl IntoIterator<Item = ResourceName>) {
        for name in names {
            self.resources.entry(name).or_default();
            self.changes += 1;
            self.resource_changes += 1;
        }
        self.limit_idle();
    }

    /// Removes resources that neither a pod nor a lease holds and no plugin has served for [`EVICT_AFTER_MS`]. For an imported resource that
    /// no plugin has ever served, the period begins with the first call that finds it unused.
    pub fn evict_idle(&mut self, now: Moment) {
        let mut old = Vec::new();
        let idle: BTreeSet<ResourceName> = self.idle().into_iter().map(|(_, name)| name.clone()).collect();
        for (name, resource) in &mut self.resources {
            if !idle.contains(name) {
                resource.unused_since = None;
                continue;
            }
            let since = match &resource.last {
                Some(last) => last.gone_since,
                None => *resource.unused_since.get_or_insert(now),
            };
            if now.since(since) >= EVICT_AFTER_MS {
                old.push(name.clone());
            }
        }
        self.remove_resources(old);
    }

    /// Removes the oldest idle resources beyond [`MAX_IDLE`]. Plugins can register any number of names.
    fn limit_idle(&mut self) {
        if self.resources.len() <= MAX_IDLE {
            return;
        }
        let mut idle = self.idle();
        let surplus = idle.len().saturating_sub(MAX_IDLE);
        idle.sort();
        let oldest = idle.into_iter().take(surplus);
        let oldest = oldest.map(|(_, name)| name.clone()).collect();
        self.remove_resources(oldest);
    }

    /// Returns resources without plugins and holders, with the time when the last plugin left.
    fn idle(&self) -> Vec<(Option<Moment>, &ResourceName)> {
        let is_idle = |(name, resource): &(&ResourceName, &Resource)| {
            let is_held =
                self.ledger.held.contains_key(*name) || self.leases.devices_of(name).next().is_some();
            resource.plugins.is_empty() && !is_held
        };
        let idle = self.resources.iter().filter(is_idle);
        idle.map(|(name, resource)| (resource.last.as_ref().map(|last| last.gone_since), name))
            .collect()
    }

    fn remove_resources(&mut self, names: Vec<ResourceName>) {
        for name in names {
            self.resources.remove(&name);
            self.ledger.free.remove(&name);
            self.changes += 1;
            self.resource_changes += 1;
        }
    }

    /// Ends every grace period that ends by `end`, for later queries with any clock. Returns `true` if there was one.
    pub fn grace_ended(&mut self, end: Moment) -> bool {
        let mut has_changed = false;
        for resource in self.resources.values_mut() {
            if resource.grace_end().is_some_and(|own| own <= end) {
                resource.idle_since = None;
                has_changed = true;
            }
        }
        self.changes += u64::from(has_changed);
        has_changed
    }

    fn resource_of(&mut self, connection: ConnectionId) -> Option<(ResourceName, &mut Resource)> {
        let name = self.connections.get(&connection)?.clone();
        let resource = self.resources.get_mut(&name)?;
        Some((name, resource))
    }
}
