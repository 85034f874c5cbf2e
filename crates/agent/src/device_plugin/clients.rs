//! The clients of connected plugins, by connection.

use devlet_core::ConnectionId;
use tokio_util::sync::CancellationToken;

use super::client::PluginClient;
use crate::store::Clients;

/// Clients by connection.
#[derive(Debug, Clone, Default)]
pub struct PluginClients(Clients<PluginClient>);

impl PluginClients {
    /// Returns the client of a connection; `None` once it is lost.
    pub fn client(&self, connection: ConnectionId) -> Option<PluginClient> {
        self.0.get(connection)
    }

    /// Adds a client until the returned entry is dropped. `cancelled` ends the task of the connection.
    pub fn insert(
        &self,
        connection: ConnectionId,
        client: PluginClient,
        cancelled: CancellationToken,
    ) -> ClientEntry {
        self.0.insert(connection, Some(client), cancelled);
        ClientEntry {
            plugins: self.clone(),
            connection,
        }
    }

    /// Ends the task of a connection that has been replaced.
    pub fn cancel(&self, connection: ConnectionId) {
        self.0.cancel(connection);
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
        self.plugins.0.remove(self.connection);
    }
}
