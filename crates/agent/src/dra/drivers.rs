//! The clients of the plugins that are registered.
//!
//! The node knows plugins by the number of their connection and decides which one to call; this is where the number
//! leads to a socket. It holds no state of the node: an entry lives as long as the registration of its plugin.

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
pub struct Drivers {
    config: Arc<Config>,
    plugins: Arc<RwLock<HashMap<ConnectionId, Entry>>>,
}

/// A plugin that is registered, and its client while it is connected.
#[derive(Debug)]
struct Entry {
    client: Option<DriverClient>,
    dismissed: CancellationToken,
}

impl Drivers {
    /// `config` says how long drivers may take.
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            config,
            plugins: Arc::default(),
        }
    }

    /// A plugin has registered. Cancelling `dismissed` ends its task.
    pub(super) fn enter(&self, id: ConnectionId, dismissed: CancellationToken) {
        let entry = Entry {
            client: None,
            dismissed,
        };
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        plugins.insert(id, entry);
    }

    /// A plugin is connected, or is not any longer.
    pub(super) fn link(&self, id: ConnectionId, client: Option<DriverClient>) {
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = plugins.get_mut(&id) {
            entry.client = client;
        }
    }

    /// A plugin has gone, or another one has taken its place.
    pub(super) fn dismiss(&self, id: ConnectionId) {
        let mut plugins = self.plugins.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = plugins.remove(&id) {
            entry.dismissed.cancel();
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

    fn patience(&self, call: &Call, deadline: Instant) -> CallDeadline {
        CallDeadline {
            own: self.config.deadlines.prepare_of(&call.driver),
            caller: Some(deadline),
        }
    }
}

impl DriverCalls for Drivers {
    async fn prepare(&self, call: &Call, deadline: Instant) -> Result<Prepared, DriverCallError> {
        let patience = self.patience(call, deadline);
        Ok(self.client(call)?.prepare(&call.claims, patience).await?)
    }

    async fn unprepare(&self, call: &Call, deadline: Instant) -> Result<Unprepared, DriverCallError> {
        let patience = self.patience(call, deadline);
        Ok(self.client(call)?.unprepare(&call.claims, patience).await?)
    }
}
