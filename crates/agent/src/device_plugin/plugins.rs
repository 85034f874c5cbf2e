//! The clients of the plugins that are connected.
//!
//! The node knows connections by number and decides which one to call; this is where the number leads to a
//! socket. It holds no state of the node: an entry lives as long as the task of its connection.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use devlet_core::{ConnectionId, ResourceName};
use tokio_util::sync::CancellationToken;

use super::client::PluginClient;
use crate::grpc::uds::PeerCred;
use crate::limits::{Limit, Limits, OverLimit};

/// Clients by connection.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    clients: Arc<RwLock<HashMap<ConnectionId, (PluginClient, CancellationToken)>>>,
    seats: Arc<Mutex<Seats>>,
}

/// What a process serves, and where; and how often, since one registration may replace another.
type Seats = BTreeMap<Process, BTreeMap<(ResourceName, PathBuf), usize>>;

/// A user, and the process if it is visible from here.
pub(crate) type Process = (u32, Option<i32>);

/// The process at the other end.
pub(crate) fn process(peer: &PeerCred) -> Process {
    (peer.uid, peer.pid)
}

impl Plugins {
    /// The client of a connection; `None` once it is lost.
    pub fn client(&self, connection: ConnectionId) -> Option<PluginClient> {
        let clients = self.clients.read().unwrap_or_else(PoisonError::into_inner);
        clients.get(&connection).map(|(client, _)| client.clone())
    }

    /// A place for a plugin, which is held until the answer is dropped.
    pub(crate) fn seat(
        &self,
        process: Process,
        resource: &ResourceName,
        socket: PathBuf,
        limits: &Limits,
    ) -> Result<Seat, OverLimit> {
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (resource.clone(), socket);
        let taken = seats.values().map(BTreeMap::len).sum::<usize>();
        let own = seats.get(&process);
        if own.is_none_or(|own| !own.contains_key(&key)) {
            Limit::PLUGINS.check(taken + 1, limits.plugins, || {
                format!("{taken} plugins are connected")
            })?;
        }
        let mut resources: Vec<&ResourceName> = own
            .into_iter()
            .flat_map(BTreeMap::keys)
            .map(|key| &key.0)
            .collect();
        resources.dedup();
        if !resources.contains(&resource) {
            let served = resources.len();
            Limit::RESOURCES_PER_PLUGIN.check(served + 1, limits.resources_per_plugin, || {
                format!("the process serves {served} resources already")
            })?;
        }
        *seats.entry(process).or_default().entry(key.clone()).or_default() += 1;
        Ok(Seat {
            plugins: self.clone(),
            process,
            key,
        })
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

/// A place among the plugins.
#[derive(Debug)]
#[must_use = "dropping it gives the place to somebody else"]
pub(crate) struct Seat {
    plugins: Plugins,
    process: Process,
    key: (ResourceName, PathBuf),
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.plugins.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(own) = seats.get_mut(&self.process) else {
            return;
        };
        if let Some(number) = own.get_mut(&self.key) {
            *number -= 1;
            if *number == 0 {
                own.remove(&self.key);
            }
        }
        if own.is_empty() {
            seats.remove(&self.process);
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
