//! The clients of registered plugins of drivers, by connection, and calls on them.

use std::sync::Arc;

use devlet_core::ConnectionId;
use devlet_core::dra::claims::Call;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::DriverClient;
use super::{DriverCallError, DriverCalls, Prepared, Unprepared};
use crate::config::Config;
use crate::grpc::call::CallDeadline;
use crate::store::Clients;

/// Clients by connection. An entry lives as long as the registration of its plugin.
#[derive(Debug, Clone)]
pub struct DriverClients {
    config: Arc<Config>,
    clients: Clients<DriverClient>,
}

impl DriverClients {
    /// Creates an empty map. `config` has the deadlines of drivers.
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            config,
            clients: Clients::default(),
        }
    }

    /// Adds a registered plugin. Cancelling `cancelled` ends its session.
    pub(super) fn insert(&self, id: ConnectionId, cancelled: CancellationToken) {
        self.clients.insert(id, None, cancelled);
    }

    /// Sets the client of a plugin, or removes it when the connection is lost.
    pub(super) fn set_client(&self, id: ConnectionId, client: Option<DriverClient>) {
        self.clients.set(id, client);
    }

    /// Removes a plugin that is gone or replaced, and ends its session.
    pub(super) fn cancel(&self, id: ConnectionId) {
        self.clients.cancel(id);
        self.clients.remove(id);
    }

    fn client(&self, call: &Call) -> Result<DriverClient, DriverCallError> {
        let client = self.clients.get(call.connection);
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
