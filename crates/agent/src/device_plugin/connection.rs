//! The task of one registered plugin: it follows the plugin's lists, and dials again when the connection breaks.
//!
//! ```text
//!             first list            stream ends            socket is there
//!   connected ──────────► following ───────────► backoff ─────────────────► connected
//!                                                   │ socket is gone, or replaced by another registration
//!                                                   ▼
//!                                                  end
//! ```
//!
//! The node is told of every connection and of its end, and holds the numbers apart: what comes late from an
//! earlier connection changes nothing.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use devlet_core::ConnectionId;
use tokio_util::sync::CancellationToken;

use super::client::PluginClient;
use super::plugins::Entered;
use crate::grpc::uds::Dialed;
use crate::workflow::register::{Candidate, RegisterError, Registrar};

/// Pauses between attempts to dial again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A connection that lasted this long was a good one: the next pause is a short one.
const GOOD: Duration = Duration::from_secs(60);

/// A plugin that is connected.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) client: PluginClient,
    pub(crate) dialed: Dialed,
    /// Another registration took this one's place, or the node stops.
    pub(crate) dismissed: CancellationToken,
    /// Keeps the client reachable.
    pub(crate) _entered: Entered,
}

/// Follows a plugin until it is gone for good.
pub(crate) async fn follow(registrar: Registrar, candidate: Candidate, first: Connection) {
    let socket = identity(&candidate.socket);
    let mut connection = first;
    let mut pause = FIRST_PAUSE;
    loop {
        let started = tokio::time::Instant::now();
        let dismissed = connection.dismissed.clone();
        tokio::select! {
            () = listen(&registrar, &candidate, &connection) => {}
            () = dismissed.cancelled() => {}
        }
        lose(&registrar, &candidate, &connection);
        drop(connection);
        if dismissed.is_cancelled() {
            return;
        }
        if started.elapsed() > GOOD {
            pause = FIRST_PAUSE;
        }
        connection = loop {
            let stopped = async { registrar.stop.cancelled().await };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stopped => return,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            let now = identity(&candidate.socket);
            if registered_anew(&registrar, &candidate) {
                return;
            }
            if now.is_none() || now != socket {
                let resource = &candidate.resource;
                tracing::info!(%resource, "device plugin is gone for good, unless it registers again");
                return;
            }
            let connected = tokio::select! {
                connected = registrar.connect(&candidate) => connected,
                () = registrar.stop.cancelled() => return,
            };
            match connected {
                Ok(connection) => break connection,
                Err(RegisterError::Dial(_) | RegisterError::Options(_)) => {}
                Err(error) => {
                    let resource = &candidate.resource;
                    tracing::warn!(%resource, %error, "device plugin is not taken in again");
                    return;
                }
            }
        };
        let (resource, conn) = (&candidate.resource, connection.id);
        tracing::info!(%resource, %conn, "device plugin connected again");
    }
}

/// Passes lists on until there are no more.
async fn listen(registrar: &Registrar, candidate: &Candidate, connection: &Connection) {
    let resource = &candidate.resource;
    let ended = async {
        let mut lists = connection.client.lists().await?;
        while let Some((list, repeated)) = lists.next().await? {
            if repeated > 0 {
                tracing::warn!(%resource, repeated, "device plugin lists devices more than once");
            }
            let changed = registrar
                .store
                .update(|node| node.devices_listed(connection.id, list));
            registrar.metrics.listed(resource, changed);
        }
        Ok::<(), tonic::Status>(())
    };
    let gone = connection.dialed.gone();
    tokio::select! {
        ended = ended => if let Err(status) = ended {
            let conn = connection.id;
            connection.client.calls().lists_ended(status.code());
            tracing::warn!(%resource, %conn, code = ?status.code(), error = status.message(), "ListAndWatch ended");
        },
        () = gone.wait() => {}
    }
}

fn lose(registrar: &Registrar, candidate: &Candidate, connection: &Connection) {
    let now = registrar.store.now();
    let news = registrar
        .store
        .update(|node| node.connection_lost(connection.id, now));
    connection.dialed.hang_up();
    if news {
        registrar.metrics.lost(&candidate.resource);
        let (resource, conn) = (&candidate.resource, connection.id);
        tracing::info!(%resource, %conn, endpoint = %candidate.socket.display(), "device plugin lost");
    }
}

/// What tells a socket from a later one at the same path, which is that of another plugin until it registers. Not the
/// time of change: plugins change the mode of their sockets.
fn identity(path: &Path) -> Option<(u64, Option<SystemTime>)> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| (metadata.ino(), metadata.created().ok()))
}

/// Whether the plugin has registered by itself in the meantime.
fn registered_anew(registrar: &Registrar, candidate: &Candidate) -> bool {
    let endpoint = candidate.socket.display().to_string();
    registrar.store.read(|node| {
        let plugins = node.plugins();
        plugins
            .iter()
            .any(|plugin| plugin.resource == candidate.resource && plugin.endpoint == endpoint)
    })
}
