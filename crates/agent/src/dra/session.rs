//! The session of one registered plugin of a driver: keeps a connection, and dials again when it breaks.
//!
//! ```text
//!              dialled                 connection ends
//!   registered ────────► connected ───────────────────► backoff ──► dialled again
//!        │                   │                             │
//!        └───────────────────┴──── deregistered or replaced, or the node stops ──► end
//! ```
//!
//! The end of a connection is noticed at once, without a call. All calls and the health stream share the connection.

use std::path::PathBuf;
use std::time::Duration;

use devlet_core::{ConnectionId, ProcessId};
use devlet_uds::{DialError, PeerConnection, ReadLimits};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::DriverClient;
use super::health;
use super::registration::{DriverCandidate, DriverRegistrar};
use crate::backoff::Backoff;
use crate::config::Config;

/// Deadline of a dial. It is short, because the kernel queues connections for a process that listens.
const DIAL_TIMEOUT: Duration = Duration::from_millis(100);
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// Maximum pause between dials, which are cheap.
const MAX_DIAL_PAUSE: Duration = Duration::from_secs(2);
/// Maximum pause after connections that did not last.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Reason why a plugin is not connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket does not accept connections.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The socket belongs to another user.
    #[error("the socket {} is of user {owner}, not of user {uid}, who registers it", socket.display())]
    SocketOwnerMismatch {
        /// The socket.
        socket: PathBuf,
        /// The user that owns it.
        owner: u32,
        /// The user that registers it.
        uid: u32,
    },
}

/// A registered plugin.
#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) id: ConnectionId,
    pub(super) candidate: DriverCandidate,
    /// Cancelled when the plugin is deregistered or replaced, or the node stops.
    pub(super) cancelled: CancellationToken,
}

/// Dials a plugin once. The socket and the process behind it must belong to the user that registered it.
pub(super) async fn dial(
    candidate: &DriverCandidate,
    config: &Config,
    limits: &ReadLimits,
) -> Result<PeerConnection, ConnectError> {
    let DriverCandidate {
        driver,
        endpoint,
        process: ProcessId { uid, .. },
        ..
    } = candidate;
    let dialed = devlet_uds::connect_limited(endpoint, Instant::now() + DIAL_TIMEOUT, limits).await?;
    for owner in [dialed.owner, dialed.peer.uid] {
        if !config.access.may_name(*uid, owner, driver.as_str()) {
            return Err(ConnectError::SocketOwnerMismatch {
                socket: endpoint.clone(),
                owner,
                uid: *uid,
            });
        }
    }
    Ok(dialed)
}

/// Keeps a plugin connected until it is cancelled.
pub(super) async fn run(registrar: DriverRegistrar, plugin: Plugin, first: Option<PeerConnection>) {
    let cancelled = plugin.cancelled.clone();
    tokio::select! {
        () = keep_connected(&registrar, &plugin, first) => {}
        () = cancelled.cancelled() => {}
    }
}

async fn keep_connected(registrar: &DriverRegistrar, plugin: &Plugin, first: Option<PeerConnection>) {
    let (mut dialed, mut backoff) = (first, Backoff::new(MIN_PAUSE, MAX_PAUSE));
    loop {
        let next = match dialed.take() {
            Some(dialed) => dialed,
            None => dial_until_connected(registrar, plugin).await,
        };
        let started = Instant::now();
        serve(registrar, plugin, next).await;
        backoff.reset_after(started.elapsed());
        backoff.wait().await;
    }
}

async fn dial_until_connected(registrar: &DriverRegistrar, plugin: &Plugin) -> PeerConnection {
    let (mut backoff, mut last) = (Backoff::new(MIN_PAUSE, MAX_DIAL_PAUSE), String::new());
    loop {
        let error = match dial(&plugin.candidate, &registrar.config, &registrar.read_limits).await {
            Ok(dialed) => return dialed,
            Err(error) => error.to_string(),
        };
        if error != last {
            let (driver, conn) = (&plugin.candidate.driver, plugin.id);
            tracing::warn!(%driver, %conn, error, "DRA driver not connected");
            last = error;
        }
        backoff.wait().await;
    }
}

/// Serves a connection until it ends.
async fn serve(registrar: &DriverRegistrar, plugin: &Plugin, dialed: PeerConnection) {
    let driver = &plugin.candidate.driver;
    let rpcs = registrar.metrics.driver(driver);
    let client = DriverClient::new(
        &dialed,
        &plugin.candidate.services,
        rpcs,
        &registrar.config.limits,
    );
    let closed = dialed.closed();
    let _connected = ConnectedGuard::new(registrar, plugin, dialed, client.clone());
    tokio::select! {
        () = closed.wait() => {}
        () = health::run(registrar, plugin.id, driver, &client) => {}
    }
}

/// A connected plugin. Dropping it reports the lost connection to the node.
struct ConnectedGuard<'a> {
    registrar: &'a DriverRegistrar,
    plugin: &'a Plugin,
    dialed: PeerConnection,
}

impl<'a> ConnectedGuard<'a> {
    fn new(
        registrar: &'a DriverRegistrar,
        plugin: &'a Plugin,
        dialed: PeerConnection,
        client: DriverClient,
    ) -> Self {
        // Must precede `link_up`, after which the node may request a call.
        registrar.drivers.set_client(plugin.id, Some(client));
        let now = registrar.store.now();
        if registrar.store.update(|node| node.link_up(plugin.id, now)) {
            let (driver, conn) = (&plugin.candidate.driver, plugin.id);
            tracing::info!(%driver, %conn, "DRA driver connected");
        }
        Self {
            registrar,
            plugin,
            dialed,
        }
    }
}

impl Drop for ConnectedGuard<'_> {
    fn drop(&mut self) {
        let (registrar, id) = (self.registrar, self.plugin.id);
        let now = registrar.store.now();
        let changed = registrar.store.update(|node| {
            node.health_stream_ended(id);
            node.link_lost(id, now)
        });
        registrar.drivers.set_client(id, None);
        self.dialed.close();
        let driver = &self.plugin.candidate.driver;
        registrar.metrics.driver_lost(driver);
        if changed {
            tracing::info!(%driver, conn = %id, "DRA driver disconnected");
        }
    }
}
