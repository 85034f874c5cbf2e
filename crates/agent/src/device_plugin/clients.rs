//! The clients of connected plugins, by connection.
//!
//! The node decides which connection to call; this map finds the client of that connection. It does not hold state of the
//! node: an entry lives as long as the task of its connection.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use devlet_core::ConnectionId;
use tokio_util::sync::CancellationToken;

use super::client::PluginClient;

/// Clients by connection.
#[derive(Debug, Clone, Default)]
pub struct PluginClients {
    clients: Arc<RwLock<HashMap<ConnectionId, (PluginClient, CancellationToken)>>>,
}

impl PluginClients {
    /// Returns the client of a connection; `None` once it is lost.
    pub fn client(&self, connection: ConnectionId) -> Option<PluginClient> {
        let clients = self.clients.read().unwrap_or_else(PoisonError::into_inner);
        clients.get(&connection).map(|(client, _)| client.clone())
    }

    /// Adds a client until the returned entry is dropped. `cancelled` ends the task of the connection.
    pub fn insert(
        &self,
        connection: ConnectionId,
        client: PluginClient,
        cancelled: CancellationToken,
    ) -> ClientEntry {
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        clients.insert(connection, (client, cancelled));
        ClientEntry {
            plugins: self.clone(),
            connection,
        }
    }

    /// Ends the task of a connection that has been replaced.
    pub fn cancel(&self, connection: ConnectionId) {
        let clients = self.clients.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cancelled)) = clients.get(&connection) {
            cancelled.cancel();
        }
    }
}

/// A client in the map.
#[derive(Debug)]
#[must_use = "dropping it removes the client"]
pub struct ClientEntry {
    plugins: PluginClients,
    connection: ConnectionId,
}

impl Drop for ClientEntry {
    fn drop(&mut self) {
        let mut clients = self
            .plugins
            .clients
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        clients.remove(&self.connection);
    }
}
