//! Clients of plugins, by connection: the node decides which connection to call, and this map finds its client.
//!
//! It does not hold state of the node: an entry lives as long as the session of its connection.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use devlet_core::ConnectionId;
use tokio_util::sync::CancellationToken;

/// Clients by connection. Clones share them.
#[derive(Debug, Clone)]
pub struct Clients<C>(Arc<RwLock<HashMap<ConnectionId, Entry<C>>>>);

/// A registered plugin, and its client while it is connected.
#[derive(Debug)]
struct Entry<C> {
    client: Option<C>,
    cancelled: CancellationToken,
}

impl<C> Default for Clients<C> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<C: Clone> Clients<C> {
    /// Adds a plugin. Cancelling `cancelled` ends its session.
    pub fn insert(&self, id: ConnectionId, client: Option<C>, cancelled: CancellationToken) {
        self.write().insert(id, Entry { client, cancelled });
    }

    /// Returns the client of a connection; `None` once it is lost.
    pub fn get(&self, id: ConnectionId) -> Option<C> {
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(&id)?.client.clone()
    }

    /// Sets the client of a plugin, or removes it when the connection is lost.
    pub fn set(&self, id: ConnectionId, client: Option<C>) {
        if let Some(entry) = self.write().get_mut(&id) {
            entry.client = client;
        }
    }

    /// Ends the session of a plugin that is gone or replaced.
    pub fn cancel(&self, id: ConnectionId) {
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(&id) {
            entry.cancelled.cancel();
        }
    }

    /// Removes a plugin.
    pub fn remove(&self, id: ConnectionId) {
        self.write().remove(&id);
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<ConnectionId, Entry<C>>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
