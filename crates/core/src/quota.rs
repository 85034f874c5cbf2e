//! Quotas of plugins and drivers: connections in total and per user, names per process, memory of lists per process.
//!
//! The checks are views: a caller checks and then changes the node under one lock.

use crate::device_plugin::inventory::Resource;
use crate::device_plugin::list::DeviceList;
use crate::id::{ConnectionId, ProcessId};
use crate::node::Node;

/// The maximum values of the quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluginLimits {
    /// Plugins and drivers that are connected. A quarter of it is reserved for trusted users, and each other user has a
    /// quarter.
    pub plugins: usize,
    /// Resources and drivers that one process serves.
    pub names_per_process: usize,
    /// Bytes of memory that the lists of one process take.
    pub list_bytes_per_process: usize,
}

/// A quota that a plugin or its list would exceed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// All connections are in use.
    #[error("{connected} plugins are connected")]
    Plugins {
        /// Plugins and drivers that are connected.
        connected: usize,
    },
    /// A user that is not trusted has used its quarter.
    #[error(
        "{connected} plugins of user {uid} are connected, and each user but root and devlet's own has a quarter of the \
         connections"
    )]
    PluginsOfUser {
        /// Plugins and drivers of the user that are connected.
        connected: usize,
        /// The user.
        uid: u32,
    },
    /// Only the quarter of trusted users is left.
    #[error(
        "{connected} plugins of users other than root and devlet's own are connected, and a quarter of the connections is \
         reserved for these two"
    )]
    PluginsOfOthers {
        /// Plugins and drivers of users that are not trusted.
        connected: usize,
    },
    /// The process serves as many names as it may.
    #[error("the process serves {served} resources or drivers already")]
    Names {
        /// The names that it serves.
        served: usize,
    },
    /// The lists of the process take too much memory.
    #[error("the lists of the plugin's process, with this one, take {bytes} bytes of memory")]
    ListMemory {
        /// The memory of all its lists.
        bytes: usize,
    },
}

/// A plugin or driver that is connected, or wants to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluginIdentity<'a> {
    /// Its process.
    pub process: ProcessId,
    /// The resource or driver that it serves.
    pub name: &'a str,
    /// The socket at which it answers.
    pub endpoint: &'a str,
}

impl Node {
    /// Checks that a plugin or driver may connect. One of the same name and endpoint is replaced.
    pub fn check_plugin_quota(
        &self,
        plugin: PluginIdentity<'_>,
        limits: &PluginLimits,
        is_trusted: impl Fn(u32) -> bool,
    ) -> Result<(), QuotaError> {
        let is_replaced =
            |other: &PluginIdentity<'_>| (other.name, other.endpoint) == (plugin.name, plugin.endpoint);
        let connected = || self.connected_plugins().filter(|other| !is_replaced(other));
        let own_names = connected().filter(|other| other.process == plugin.process);
        let mut names: alloc::vec::Vec<&str> = own_names.map(|other| other.name).collect();
        names.sort_unstable();
        names.dedup();
        if !names.contains(&plugin.name) && names.len() >= limits.names_per_process {
            return Err(QuotaError::Names { served: names.len() });
        }
        let max = limits.plugins;
        let all = connected().count();
        if all >= max {
            return Err(QuotaError::Plugins { connected: all });
        }
        let uid = plugin.process.uid;
        if is_trusted(uid) {
            return Ok(());
        }
        let own = connected().filter(|other| other.process.uid == uid).count();
        if own >= (max / 4).max(1) {
            return Err(QuotaError::PluginsOfUser { connected: own, uid });
        }
        let others = connected().filter(|other| !is_trusted(other.process.uid)).count();
        if others >= max - max / 4 {
            return Err(QuotaError::PluginsOfOthers { connected: others });
        }
        Ok(())
    }

    /// Checks that the node may keep a list of this connection. The list of a plugin that left counts until another
    /// plugin lists the resource, or the resource is forgotten.
    pub fn check_list_quota(
        &self,
        connection: ConnectionId,
        list: &DeviceList,
        limits: &PluginLimits,
    ) -> Result<(), QuotaError> {
        let name = self.connections.get(&connection);
        let plugin = name.and_then(|name| self.resources.get(name)?.plugins.get(&connection));
        let Some(process) = plugin.map(|plugin| plugin.process) else {
            // A list of a lost connection is dropped.
            return Ok(());
        };
        let others = self.resources.iter().map(|(other, resource)| {
            let is_replaced = Some(other) == name;
            resource.list_memory_of(process, connection, is_replaced)
        });
        let bytes = others.sum::<usize>() + list.memory();
        if bytes > limits.list_bytes_per_process {
            return Err(QuotaError::ListMemory { bytes });
        }
        Ok(())
    }

    fn connected_plugins(&self) -> impl Iterator<Item = PluginIdentity<'_>> {
        let resources = self.resources.iter().flat_map(|(name, resource)| {
            resource.plugins.values().map(|plugin| PluginIdentity {
                process: plugin.process,
                name: name.as_str(),
                endpoint: &plugin.endpoint,
            })
        });
        resources.chain(self.dra.drivers.registered_plugins())
    }
}

impl Resource {
    /// Returns the memory of the lists that a process has sent, except that of one connection.
    fn list_memory_of(&self, process: ProcessId, except: ConnectionId, is_replaced: bool) -> usize {
        let connected = self.plugins.iter().filter(|(id, _)| **id != except);
        let own = connected.filter(|(_, plugin)| plugin.process == process);
        let lists = own.filter_map(|(_, plugin)| plugin.list.as_ref());
        let kept = self.active.is_none() && !is_replaced && self.list_process == Some(process);
        lists.map(|(_, list)| list.memory()).sum::<usize>() + if kept { self.list.memory() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::{String, ToString as _};

    use super::*;
    use crate::device_plugin::inventory::{Offer, PluginOptions};
    use crate::id::Moment;
    use crate::tests::list;

    const NOW: Moment = Moment(1);

    fn limits(plugins: usize, list_bytes_per_process: usize) -> PluginLimits {
        PluginLimits {
            plugins,
            names_per_process: 2,
            list_bytes_per_process,
        }
    }

    fn process(uid: u32, pid: i32) -> ProcessId {
        ProcessId { uid, pid: Some(pid) }
    }

    fn connect(
        node: &mut Node,
        process: ProcessId,
        resource: &str,
        limits: &PluginLimits,
    ) -> Result<ConnectionId, String> {
        let endpoint = format!("/{}-{:?}.sock", process.uid, process.pid);
        let plugin = PluginIdentity {
            process,
            name: resource,
            endpoint: &endpoint,
        };
        let is_trusted = |uid| [0, 7].contains(&uid);
        let checked = node.check_plugin_quota(plugin, limits, is_trusted);
        checked.map_err(|error| error.to_string())?;
        let offer = Offer {
            resource: resource.into(),
            endpoint,
            process,
            may_share: true,
            options: PluginOptions::default(),
        };
        Ok(node.plugin_connected(offer, NOW).unwrap().0)
    }

    #[test]
    fn one_user_cannot_use_the_connections_of_others_and_some_are_reserved_for_root() {
        let mut node = Node::default();
        let limits = limits(16, usize::MAX);
        let mut take = |uid: u32, pid: i32| connect(&mut node, process(uid, pid), "acme.com/gpu", &limits);
        for uid in [1000, 1001, 1002] {
            for pid in 0..4 {
                take(uid, pid).unwrap();
            }
            let refused = take(uid, 4).unwrap_err();
            assert!(
                refused.starts_with(&format!("4 plugins of user {uid} are connected")),
                "{refused}"
            );
        }
        let refused = take(1003, 0).unwrap_err();
        assert!(
            refused.contains("a quarter of the connections is reserved"),
            "{refused}"
        );
        for (uid, pid) in [(0, 0), (0, 1), (7, 0)] {
            take(uid, pid).unwrap();
        }
        let last = take(7, 1).unwrap();
        assert_eq!(take(0, 2).unwrap_err(), "16 plugins are connected");
        take(7, 1).unwrap();
        node.connection_lost(last, NOW);
    }

    #[test]
    fn a_process_serves_a_limited_number_of_names() {
        let mut node = Node::default();
        let limits = limits(16, usize::MAX);
        for resource in ["acme.com/a", "acme.com/b", "acme.com/a"] {
            connect(&mut node, process(0, 1), resource, &limits).unwrap();
        }
        let refused = connect(&mut node, process(0, 1), "acme.com/c", &limits).unwrap_err();
        assert_eq!(refused, "the process serves 2 resources or drivers already");
        connect(&mut node, process(0, 2), "acme.com/c", &limits).unwrap();
    }

    #[test]
    fn lists_of_one_process_count_together_while_they_are_kept() {
        let mut node = Node::default();
        let one = list(&["d"]);
        let limits = limits(16, 2 * one.memory());
        let mut connections = |pid, resource| connect(&mut node, process(0, pid), resource, &limits).unwrap();
        let (left, stays, other) = (
            connections(1, "acme.com/a"),
            connections(1, "acme.com/b"),
            connections(2, "acme.com/c"),
        );
        let two = list(&["d", "e"]);
        node.devices_listed(left, one.clone());
        let refused = node.check_list_quota(stays, &two, &limits).unwrap_err();
        let bytes = one.memory() + two.memory();
        assert_eq!(refused, QuotaError::ListMemory { bytes });
        assert_eq!(node.check_list_quota(stays, &one, &limits), Ok(()));
        assert_eq!(
            node.check_list_quota(left, &two, &limits),
            Ok(()),
            "in place of the last"
        );
        assert_eq!(
            node.check_list_quota(other, &two, &limits),
            Ok(()),
            "of another process"
        );
        // The list of a plugin that left is kept until another plugin lists the resource.
        node.connection_lost(left, NOW);
        assert!(node.check_list_quota(stays, &two, &limits).is_err());
        let heir = connect(&mut node, process(2, 1), "acme.com/a", &limits).unwrap();
        node.devices_listed(heir, one);
        assert_eq!(node.check_list_quota(stays, &two, &limits), Ok(()));
    }
}
