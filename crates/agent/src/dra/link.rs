//! The task of one registered plugin: it keeps a connection, and dials again when that breaks.
//!
//! ```text
//!              dialled                 connection ends
//!   registered ────────► connected ───────────────────► backoff ──► dialled again
//!        │                   │                             │
//!        └───────────────────┴──── deregistered or replaced, or the node stops ──► end
//! ```
//!
//! That a connection ends is noticed at once and without a call. All calls, and the stream of health, share it.

use std::path::PathBuf;
use std::time::Duration;

use devlet_core::ConnectionId;
use devlet_uds::{DialError, PeerConnection, ReadLimits};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::DriverClient;
use super::health;
use super::registration::{Candidate, DriverRegistrar};
use crate::config::Config;
use crate::limits::seats::Seat;

/// How long a dial may take: a process that listens has a queue of its own.
const DIAL: Duration = Duration::from_millis(100);
/// Pauses between dials, and after connections that did not last.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Between dials: they cost next to nothing.
const LONGEST_PAUSE_UNTIL_DIALLED: Duration = Duration::from_secs(2);
/// After connections that did not last.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A connection that lasted this long was a good one: the next pause is a short one.
const GOOD: Duration = Duration::from_secs(60);

/// Why a plugin is not connected.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It cannot be reached.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// Its socket is somebody else's.
    #[error("the socket {} is of user {owner}, not of user {uid}, who registers it", socket.display())]
    NotTheirs {
        /// The socket.
        socket: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who asks.
        uid: u32,
    },
}

/// A plugin that is registered.
#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) id: ConnectionId,
    pub(super) candidate: Candidate,
    /// It is not registered any longer, or the node stops.
    pub(super) dismissed: CancellationToken,
    pub(super) _seat: Seat,
}

/// Dials a plugin once. Whoever answers must be who registered.
pub(super) async fn dial(
    candidate: &Candidate,
    config: &Config,
    limits: &ReadLimits,
) -> Result<PeerConnection, LinkError> {
    let Candidate {
        driver,
        endpoint,
        uid,
        ..
    } = candidate;
    let dialed = devlet_uds::connect_limited(endpoint, Instant::now() + DIAL, limits).await?;
    for owner in [dialed.owner, dialed.peer.uid] {
        if !config.access.may_name(*uid, owner, driver.as_str()) {
            return Err(LinkError::NotTheirs {
                socket: endpoint.clone(),
                owner,
                uid: *uid,
            });
        }
    }
    Ok(dialed)
}

/// Stays connected with a plugin until it is dismissed.
pub(super) async fn follow(registrar: DriverRegistrar, plugin: Plugin, first: Option<PeerConnection>) {
    let dismissed = plugin.dismissed.clone();
    tokio::select! {
        () = stay(&registrar, &plugin, first) => {}
        () = dismissed.cancelled() => {}
    }
}

async fn stay(registrar: &DriverRegistrar, plugin: &Plugin, first: Option<PeerConnection>) {
    let (mut dialed, mut pause) = (first, FIRST_PAUSE);
    loop {
        let next = match dialed.take() {
            Some(dialed) => dialed,
            None => dialled_at_last(registrar, plugin).await,
        };
        let began = Instant::now();
        serve(registrar, plugin, next).await;
        if began.elapsed() > GOOD {
            pause = FIRST_PAUSE;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn dialled_at_last(registrar: &DriverRegistrar, plugin: &Plugin) -> PeerConnection {
    let (mut pause, mut last) = (FIRST_PAUSE, String::new());
    loop {
        let error = match dial(&plugin.candidate, &registrar.config, &registrar.read_limits).await {
            Ok(dialed) => return dialed,
            Err(error) => error.to_string(),
        };
        if error != last {
            let (driver, conn) = (&plugin.candidate.driver, plugin.id);
            tracing::warn!(%driver, %conn, error, "DRA driver is not connected");
            last = error;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE_UNTIL_DIALLED);
    }
}

/// Until the connection ends.
async fn serve(registrar: &DriverRegistrar, plugin: &Plugin, dialed: PeerConnection) {
    let driver = &plugin.candidate.driver;
    let process = (plugin.candidate.uid, plugin.candidate.pid);
    let rpcs = registrar.metrics.driver(driver);
    let client = DriverClient::new(
        &dialed,
        &plugin.candidate.services,
        rpcs,
        &registrar.config.limits,
    );
    let gone = dialed.closed();
    let _linked = Linked::new(registrar, plugin, dialed, client.clone());
    tokio::select! {
        () = gone.wait() => {}
        () = health::follow(registrar, plugin.id, driver, &client, process) => {}
    }
}

/// A plugin that is connected; dropped, it is not any longer.
struct Linked<'a> {
    registrar: &'a DriverRegistrar,
    plugin: &'a Plugin,
    dialed: PeerConnection,
}

impl<'a> Linked<'a> {
    fn new(
        registrar: &'a DriverRegistrar,
        plugin: &'a Plugin,
        dialed: PeerConnection,
        client: DriverClient,
    ) -> Self {
        // It can be called as soon as the node knows.
        registrar.drivers.link(plugin.id, Some(client));
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

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        let (registrar, id) = (self.registrar, self.plugin.id);
        let now = registrar.store.now();
        let news = registrar.store.update(|node| {
            node.health_stream_ended(id);
            node.link_lost(id, now)
        });
        registrar.drivers.link(id, None);
        self.dialed.close();
        let driver = &self.plugin.candidate.driver;
        registrar.metrics.driver_lost(driver);
        if news {
            tracing::info!(%driver, conn = %id, "DRA driver is not connected any longer");
        }
    }
}
