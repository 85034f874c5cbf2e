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
    /// A plugin answers. A plugin of the same resource and endpoint is replaced: its connection is returned, and
    /// whatever still comes from it changes nothing. Another user does not get in beside a connected plugin, nor
    /// in its place, unless that is allowed.
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
        let same_place = |plugin: &Plugin| plugin.endpoint == offer.endpoint;
        let resource = self.resources.entry(offer.resource.clone()).or_default();
        let replaced = resource
            .plugins
            .iter()
            .find(|(_, plugin)| same_place(plugin))
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

    /// A plugin asked to register and was rejected. Returns whether that is news: the same rejection again is not.
    pub fn plugin_rejected(&mut self, rejection: Rejection, now: Moment) -> bool {
        let is_news = self.rejections.insert(rejection, now);
        self.changes += u64::from(is_news);
        is_news
    }

    /// A plugin says which devices there are. Whether that changed anything: a connection that has been replaced
    /// or lost has no say, and neither has one that repeats itself.
    ///
    /// A long list takes a while to compare and to free. Whoever has many waiting for the node compares it with
    /// [`Node::lists_before`], hands over the one that is equal, and keeps the others until the node is free again.
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

    /// Whether this connection is one still.
    pub fn is_connected(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    /// The lists that the next one of this connection may take the place of: the plugin's last one, and the one
    /// that counts.
    pub fn lists_before(&self, connection: ConnectionId) -> Vec<Arc<DeviceList>> {
        let name = self.connections.get(&connection);
        let Some(resource) = name.and_then(|name| self.resources.get(name)) else {
            return Vec::new();
        };
        let own = resource.plugins.get(&connection);
        let own = own.and_then(|plugin| plugin.list.as_ref().map(|(_, list)| list));
        own.into_iter().chain([&resource.list]).cloned().collect()
    }

    /// A plugin answers no longer. Whether that was news.
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

    /// These resources exist, whether a plugin serves them or not.
    pub fn add_resources(&mut self, names: impl IntoIterator<Item = ResourceName>) {
        for name in names {
            self.resources.entry(name).or_default();
            self.changes += 1;
            self.resource_changes += 1;
        }
        self.limit_idle();
    }

    /// Forgets resources that no plugin has served for a day and no pod holds. A resource that came with a kubelet's
    /// file, and that no plugin has served since, is forgotten a day after the first call that finds it unused.
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
        self.forget(old);
    }

    /// Whoever may register can invent names: those that were left first are forgotten first.
    fn limit_idle(&mut self) {
        if self.resources.len() <= MAX_IDLE {
            return;
        }
        let mut idle = self.idle();
        let surplus = idle.len().saturating_sub(MAX_IDLE);
        idle.sort();
        let oldest = idle.into_iter().take(surplus);
        let oldest = oldest.map(|(_, name)| name.clone()).collect();
        self.forget(oldest);
    }

    /// Resources that nobody serves and nobody holds, and since when no plugin is there.
    fn idle(&self) -> Vec<(Option<Moment>, &ResourceName)> {
        let is_idle = |(name, resource): &(&ResourceName, &Resource)| {
            resource.plugins.is_empty() && !self.ledger.held.contains_key(*name)
        };
        let idle = self.resources.iter().filter(is_idle);
        idle.map(|(name, resource)| (resource.last.as_ref().map(|last| last.gone_since), name))
            .collect()
    }

    fn forget(&mut self, names: Vec<ResourceName>) {
        for name in names {
            self.resources.remove(&name);
            self.ledger.free.remove(&name);
            self.changes += 1;
            self.resource_changes += 1;
        }
    }

    /// The grace period of every plugin whose period ends by then is over, whatever the clock of those who ask says.
    /// Whether that was news.
    pub fn grace_ended(&mut self, end: Moment) -> bool {
        let mut news = false;
        for resource in self.resources.values_mut() {
            if resource.grace_end().is_some_and(|own| own <= end) {
                resource.idle_since = None;
                news = true;
            }
        }
        self.changes += u64::from(news);
        news
    }

    fn resource_of(&mut self, connection: ConnectionId) -> Option<(ResourceName, &mut Resource)> {
        let name = self.connections.get(&connection)?.clone();
        let resource = self.resources.get_mut(&name)?;
        Some((name, resource))
    }
}
