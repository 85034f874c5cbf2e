//! The clients of the plugins that are connected.
//!
//! The node knows connections by number and decides which one to call; this is where the number leads to a
//! socket. It holds no state of the node: an entry lives as long as the task of its connection.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use devlet_core::ConnectionId;
use tokio_util::sync::CancellationToken;

use super::client::PluginClient;

/// Clients by connection.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    clients: Arc<RwLock<HashMap<ConnectionId, (PluginClient, CancellationToken)>>>,
}

impl Plugins {
    /// The client of a connection; `None` once it is lost.
    pub fn client(&self, connection: ConnectionId) -> Option<PluginClient> {
        let clients = self.clients.read().unwrap_or_else(PoisonError::into_inner);
        clients.get(&connection).map(|(client, _)| client.clone())
    }

    /// Makes a client reachable until the answer is dropped. `dismissed` ends the task of the connection.
    pub fn enter(
        &self,
        connection: ConnectionId,
        client: PluginClient,
        dismissed: CancellationToken,
    ) -> Entered {
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        clients.insert(connection, (client, dismissed));
        Entered {
            plugins: self.clone(),
            connection,
        }
    }

    /// Ends the task of a connection that has been replaced.
    pub fn dismiss(&self, connection: ConnectionId) {
        let clients = self.clients.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, dismissed)) = clients.get(&connection) {
            dismissed.cancel();
        }
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
        let mut clients = self
            .plugins
            .clients
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        clients.remove(&self.connection);
    }
}
