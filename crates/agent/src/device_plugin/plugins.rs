//! The clients of the plugins that are connected.
//!
//! The node knows connections by number and decides which one to call; this is where the number leads to a
//! socket. It holds no state of the node: an entry lives as long as the task of its connection.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use devlet_core::ConnectionId;

use super::client::PluginClient;

/// Clients by connection.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    clients: Arc<RwLock<HashMap<ConnectionId, PluginClient>>>,
}

impl Plugins {
    /// The client of a connection; `None` once it is lost.
    pub fn client(&self, connection: ConnectionId) -> Option<PluginClient> {
        self.clients.read().unwrap_or_else(PoisonError::into_inner).get(&connection).cloned()
    }

    /// Makes a client reachable until the answer is dropped.
    pub fn enter(&self, connection: ConnectionId, client: PluginClient) -> Entered {
        self.clients.write().unwrap_or_else(PoisonError::into_inner).insert(connection, client);
        Entered { plugins: self.clone(), connection }
    }
}

/// A client that is reachable.
#[derive(Debug)]
#[must_use = "dropping it makes the plugin unreachable"]
pub struct Entered {
    plugins: Plugins,
    connection: ConnectionId,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut clients = self.plugins.clients.write().unwrap_or_else(PoisonError::into_inner);
        clients.remove(&self.connection);
    }
}
