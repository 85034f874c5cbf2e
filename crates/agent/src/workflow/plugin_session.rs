//! The session of one registered device plugin: receives its lists, and dials again when the connection breaks.
//!
//! ```text
//!             first list            stream ends            socket still exists
//!   connected ──────────► listening ───────────► backoff ─────────────────────► connected
//!                                                   │ socket is gone, or replaced by another registration
//!                                                   ▼
//!                                                  end
//! ```
//!
//! Each connection has a number in the node. A late message of an earlier connection changes nothing.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use devlet_core::{ConnectionId, Node};
use devlet_uds::PeerConnection;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::register_plugin::{Candidate, RegisterError, Registrar};
use crate::backoff::Backoff;
use crate::device_plugin::client::{ListError, PluginClient};
use crate::device_plugin::clients::ClientEntry;
use crate::device_plugin::impaired;
use crate::device_plugin::list_intake::ListIntake;

const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// A connected plugin.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) client: PluginClient,
    pub(crate) peer: PeerConnection,
    /// Cancelled when another registration replaces this one, or the node stops.
    pub(crate) cancelled: CancellationToken,
    pub(crate) _entry: ClientEntry,
}

/// Runs until the plugin is gone or replaced, or the node stops.
pub(crate) async fn run(registrar: Registrar, candidate: Candidate, first: Connection) {
    let socket = SocketIdentity::of(&candidate.socket);
    let mut connection = first;
    let mut backoff = Backoff::new(MIN_PAUSE, MAX_PAUSE);
    loop {
        let started = Instant::now();
        let cancelled = connection.cancelled.clone();
        tokio::select! {
            () = listen(&registrar, &candidate, &connection) => {}
            () = cancelled.cancelled() => {}
        }
        on_disconnect(&registrar, &candidate, &connection);
        drop(connection);
        if cancelled.is_cancelled() {
            return;
        }
        backoff.reset_after(started.elapsed());
        let Some(next) = reconnect(&registrar, &candidate, socket, &mut backoff).await else {
            return;
        };
        connection = next;
        let (resource, conn) = (&candidate.resource, connection.id);
        tracing::info!(%resource, %conn, "device plugin reconnected");
    }
}

/// Dials the plugin until it answers. Returns `None` if the plugin is gone for good, was replaced, or the node stops.
async fn reconnect(
    registrar: &Registrar,
    candidate: &Candidate,
    socket: Option<SocketIdentity>,
    backoff: &mut Backoff,
) -> Option<Connection> {
    loop {
        tokio::select! {
            () = backoff.wait() => {}
            () = registrar.stop.cancelled() => return None,
        }
        let now = SocketIdentity::of(&candidate.socket);
        if registrar.store.read(|node| has_reregistered(node, candidate)) {
            return None;
        }
        if now.is_none() || now != socket {
            let resource = &candidate.resource;
            tracing::info!(%resource, "device plugin gone");
            return None;
        }
        // Another process may replace the socket and register while the plugin is dialled; that one must stay.
        let connected = tokio::select! {
            connected = registrar.connect(candidate, socket) => connected,
            () = registrar.stop.cancelled() => return None,
        };
        match connected {
            Ok(connection) => return Some(connection),
            // The next attempt checks whether another plugin is in its place.
            Err(RegisterError::Dial(_) | RegisterError::Options(_) | RegisterError::Superseded) => {}
            // Others may leave.
            Err(RegisterError::LimitExceeded(exceeded)) => registrar.metrics.limit_hit(exceeded.limit.name()),
            Err(error) => {
                registrar.rejected(candidate.rejection(&error));
                return None;
            }
        }
    }
}

/// Receives lists until the stream or the connection ends.
async fn listen(registrar: &Registrar, candidate: &Candidate, connection: &Connection) {
    let resource = &candidate.resource;
    let intake = ListIntake {
        store: &registrar.store,
        metrics: &registrar.metrics,
        config: &registrar.config,
        decoder: &registrar.decoder,
        resource,
        connection: connection.id,
    };
    let closed = connection.peer.closed();
    tokio::select! {
        ended = intake.run(&connection.client) => if let Err(error) = ended {
            let conn = connection.id;
            connection.client.calls().lists_ended(error.code());
            if let ListError::LimitExceeded(exceeded) = &error {
                registrar.metrics.limit_hit(exceeded.limit.name());
            }
            tracing::warn!(%resource, %conn, %error, "ListAndWatch ended");
        },
        () = closed.wait() => {}
    }
}

fn on_disconnect(registrar: &Registrar, candidate: &Candidate, connection: &Connection) {
    let now = registrar.store.now();
    let lost = |node: &mut Node| node.connection_lost(connection.id, now);
    let is_news = match registrar.stop.is_cancelled() {
        // devlet closes the connection, so the plugin is not at fault.
        true => registrar.store.update(lost),
        false => impaired::update(&registrar.store, &candidate.resource, lost),
    };
    connection.peer.close();
    if is_news {
        registrar.metrics.lost(&candidate.resource);
        let (resource, conn) = (&candidate.resource, connection.id);
        tracing::info!(%resource, %conn, endpoint = %candidate.socket.display(), "device plugin lost");
    }
}

/// Inode and creation time: they differ between a socket and a later one at the same path, which belongs to another plugin
/// until it registers. The change time is not part of it, because plugins change the mode of their sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketIdentity {
    inode: u64,
    created: Option<SystemTime>,
}

impl SocketIdentity {
    /// Returns `None` if there is no socket at the path.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::symlink_metadata(path).ok()?;
        let is_socket = metadata.file_type().is_socket();
        is_socket.then(|| Self {
            inode: metadata.ino(),
            created: metadata.created().ok(),
        })
    }
}

/// Returns `true` if the plugin has registered by itself since it was lost.
pub(super) fn has_reregistered(node: &Node, candidate: &Candidate) -> bool {
    let endpoint = candidate.socket.display().to_string();
    let plugins = node.plugins();
    plugins
        .iter()
        .any(|plugin| plugin.resource == candidate.resource && plugin.endpoint == endpoint)
}
