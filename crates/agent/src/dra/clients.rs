//! The clients of registered plugins of drivers, by connection.
//!
//! The node decides which connection to call; this map finds the client of that connection. It does not hold state of the
//! node: an entry lives as long as the registration of its plugin.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use devlet_core::ConnectionId;
use devlet_core::dra::claims::Call;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::DriverClient;
use super::{DriverCallError, DriverCalls, Prepared, Unprepared};
use crate::config::Config;
use crate::grpc::call::CallDeadline;

/// Clients by connection.
#[derive(Debug, Clone)]
pub struct DriverClients {
    config: Arc<Config>,
    plugins: Arc<RwLock<HashMap<ConnectionId, Entry>>>,
}

/// A registered plugin, and its client while it is connected.
#[derive(Debug)]
struct Entry {
    client: Option<DriverClient>,
    cancelled: CancellationToken,
}

impl DriverClients {
    /// Creates an empty map. `config` has the deadlines of drivers.
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            config,
            plugins: Arc::default(),
        }
    }

    /// Adds a registered plugin. Cancelling `cancelled` ends its session.
    pub(super) fn insert(&self, id: ConnectionId, cancelled: CancellationToken) {
        let entry = Entry {
            client: None,
            cancelled,
        };
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        plugins.insert(id, entry);
    }

    /// Sets the client of a plugin, or removes it when the connection is lost.
    pub(super) fn set_client(&self, id: ConnectionId, client: Option<DriverClient>) {
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = plugins.get_mut(&id) {
            entry.client = client;
        }
    }

    /// Removes a plugin that is gone or replaced, and ends its session.
    pub(super) fn cancel(&self, id: ConnectionId) {
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = plugins.remove(&id) {
            entry.cancelled.cancel();
        }
    }

    fn client(&self, call: &Call) -> Result<DriverClient, DriverCallError> {
        let plugins = self.plugins.read().unwrap_or_else(PoisonError::into_inner);
        let client = plugins
            .get(&call.connection)
            .and_then(|entry| entry.client.clone());
        client.ok_or_else(|| DriverCallError::NotConnected {
            driver: call.driver.clone(),
        })
    }

    fn deadline(&self, call: &Call, deadline: Instant) -> CallDeadline {
        CallDeadline {
            own: self.config.deadlines.prepare_of(&call.driver),
            caller: Some(deadline),
        }
    }
}

impl DriverCalls for DriverClients {
    async fn prepare(&self, call: &Call, deadline: Instant) -> Result<Prepared, DriverCallError> {
        let deadline = self.deadline(call, deadline);
        Ok(self.client(call)?.prepare(&call.claims, deadline).await?)
    }

    async fn unprepare(&self, call: &Call, deadline: Instant) -> Result<Unprepared, DriverCallError> {
        let deadline = self.deadline(call, deadline);
        Ok(self.client(call)?.unprepare(&call.claims, deadline).await?)
    }
}
