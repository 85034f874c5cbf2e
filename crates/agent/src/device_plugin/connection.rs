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
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use devlet_core::{ConnectionId, Node, ResourceName};
use devlet_uds::PeerConnection;
use devlet_uds::rate_limit::RateLimiter;
use futures_util::future::OptionFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::{ListError, Lists, PluginClient, RawList};
use super::impaired;
use super::plugins::Entered;
use crate::limits::Limit;
use crate::limits::portions::Portions;
use crate::limits::seats::{Account, Seat};
use crate::store::Store;
use crate::workflow::register::{Candidate, RegisterError, Registrar};

/// Pauses between attempts to dial again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A connection that lasted this long was a good one: the next pause is a short one.
const GOOD: Duration = Duration::from_secs(60);

/// Lists of so many bytes take a while to decode, compare and free.
const LARGE: usize = 64 << 10;
/// So many bytes of lists that do not count are heard in a second, and each counts for so many more.
const PASSED_OVER_PER_SECOND: usize = 8 << 20;
const PASSED_OVER: usize = 1 << 10;
/// Timers are not more exact.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// A plugin that is connected.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) client: PluginClient,
    pub(crate) dialed: PeerConnection,
    /// Another registration took this one's place, or the node stops.
    pub(crate) dismissed: CancellationToken,
    /// Keeps the client reachable.
    pub(crate) _entered: Entered,
    pub(crate) _seat: Seat,
}

/// Follows a plugin until it is gone for good.
pub(crate) async fn follow(registrar: Registrar, candidate: Candidate, first: Connection) {
    let socket = identity(&candidate.socket);
    let mut connection = first;
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
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
            if registrar.store.read(|node| registered_anew(node, &candidate)) {
                return;
            }
            if now.is_none() || now != socket {
                let resource = &candidate.resource;
                tracing::info!(%resource, "device plugin is gone for good, unless it registers again");
                return;
            }
            // While it is dialled, another process may take its place and register: that one is not to be replaced.
            let still =
                |node: &Node| identity(&candidate.socket) == socket && !registered_anew(node, &candidate);
            let connected = tokio::select! {
                connected = registrar.connect(&candidate, still) => connected,
                () = registrar.stop.cancelled() => return,
            };
            match connected {
                Ok(connection) => break connection,
                // What has taken its place is looked at first.
                Err(RegisterError::Dial(_) | RegisterError::Options(_) | RegisterError::Superseded) => {}
                Err(error) => {
                    registrar.rejected(candidate.rejection(&error));
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
        let mut limiter = RateLimiter::new(
            registrar.config.limits.lists_per_second,
            Duration::from_secs(1),
            Instant::now(),
        );
        let mut is_first = true;
        while let Some(mut list) = lists.next().await? {
            if let Err(due) = limiter.try_acquire(Instant::now()) {
                registrar.metrics.limit_hit(Limit::LISTS_PER_SECOND.name());
                (list, ()) = newest(list, &mut lists, tokio::time::sleep_until(due)).await?;
                // It is due.
                let _ = limiter.try_acquire(Instant::now());
            }
            let taken = take(list, &mut lists, is_first, registrar, resource, connection).await?;
            let Taken { changed, repeated } = taken;
            is_first = false;
            if repeated > 0 {
                tracing::warn!(%resource, repeated, "device plugin lists devices more than once");
            }
            registrar.metrics.listed(resource, changed);
        }
        Ok::<(), ListError>(())
    };
    let gone = connection.dialed.closed();
    tokio::select! {
        ended = ended => if let Err(error) = ended {
            let conn = connection.id;
            connection.client.calls().lists_ended(error.code());
            if let ListError::OverLimit(over) = &error {
                registrar.metrics.limit_hit(over.limit.name());
            }
            tracing::warn!(%resource, %conn, %error, "ListAndWatch ended");
        },
        () = gone.wait() => {}
    }
}

/// The last of the lists that come until something else does: a plugin that sends more of them than it may is heard all the
/// same, so that what counts in the end is not long out of date. One that sends without end is heard slowly.
async fn newest<T>(
    first: RawList,
    lists: &mut Lists,
    until: impl Future<Output = T>,
) -> Result<(RawList, T), ListError> {
    let (mut newest, mut owed) = (first, Duration::ZERO);
    let mut until = pin!(until);
    loop {
        owed += pause_after(newest.size() + PASSED_OVER);
        let pause = match owed < SHORTEST_PAUSE {
            true => None,
            false => Some(tokio::time::sleep(std::mem::take(&mut owed))),
        };
        let next = async {
            OptionFuture::from(pause).await;
            lists.next().await
        };
        tokio::select! {
            biased;
            until = &mut until => return Ok((newest, until)),
            next = next => match next? {
                Some(next) => newest = next,
                None => return Ok((newest, until.await)),
            },
        }
    }
}

/// Until the next list is heard, after one of so many bytes that did not count.
fn pause_after(bytes: usize) -> Duration {
    let micros = bytes.saturating_mul(1_000_000) / PASSED_OVER_PER_SECOND;
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// What became of a list.
struct Taken {
    /// Whether anything is different now.
    changed: bool,
    /// How many entries named a device again.
    repeated: usize,
}

/// Takes a list in. Large ones have turns ([`Turns`](crate::limits::portions::Turns)): a process that sends many of them has
/// them taken in with pauses; so has one that sends too many small ones. Newer lists that come meanwhile take its place. A list
/// that comes too late for its connection changes nothing.
async fn take(
    list: RawList,
    lists: &mut Lists,
    is_first: bool,
    registrar: &Registrar,
    resource: &ResourceName,
    connection: &Connection,
) -> Result<Taken, ListError> {
    let (id, account) = (connection.id, connection.client.account());
    let most = registrar.config.limits.bytes_per_plugin;
    let (turns, process) = (&registrar.decoding, Some(account.process()));
    if list.size() < LARGE && !turns.had_much_itself(process) {
        return turns.at_once(process, |portions| {
            take_now(list, &registrar.store, resource, id, account, most, portions)
        });
    }
    let (list, turn) = newest(list, lists, turns.turn_or_pauses(process, is_first)).await?;
    if turn.has_pauses() {
        registrar.metrics.limit_hit(Limit::LISTS_PER_SECOND.name());
    }
    let (store, account, resource) = (registrar.store.clone(), Arc::clone(account), resource.clone());
    let work = move |portions: &mut Portions| take_now(list, &store, &resource, id, &account, most, portions);
    let taken = turn.work(work).await;
    taken.unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string()).into()))
}

fn take_now(
    list: RawList,
    store: &Store,
    resource: &ResourceName,
    connection: ConnectionId,
    account: &Account,
    most: usize,
    portions: &mut Portions,
) -> Result<Taken, ListError> {
    let is_kept = |resource: &str| store.read(|node| node.keeps_list(resource));
    let hold = |memory| match store.read(|node| node.is_connected(connection)) {
        true => account.list(memory, most, is_kept),
        // It is not kept.
        false => Ok(()),
    };
    let (list, repeated) = list.decode(hold, portions)?;
    let list = Arc::new(list);
    // Compared, and freed in the end, while nobody has to wait for the node.
    let mut before = store.read(|node| node.lists_before(connection));
    let same = before
        .iter()
        .find(|known| known.says_the_same(&list, &mut || portions.step()));
    let counts = Arc::clone(same.unwrap_or(&list));
    let changed = impaired::update(store, resource, |node| node.devices_listed(connection, counts));
    before.push(list);
    for list in before.into_iter().filter_map(Arc::into_inner) {
        for device in list.into_devices() {
            drop(device);
            portions.step();
        }
    }
    Ok(Taken { changed, repeated })
}

fn lose(registrar: &Registrar, candidate: &Candidate, connection: &Connection) {
    let now = registrar.store.now();
    let lost = |node: &mut Node| node.connection_lost(connection.id, now);
    let news = match registrar.stop.is_cancelled() {
        // devlet leaves, not the plugin.
        true => registrar.store.update(lost),
        false => impaired::update(&registrar.store, &candidate.resource, lost),
    };
    connection.dialed.close();
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
fn registered_anew(node: &Node, candidate: &Candidate) -> bool {
    let endpoint = candidate.socket.display().to_string();
    let plugins = node.plugins();
    plugins
        .iter()
        .any(|plugin| plugin.resource == candidate.resource && plugin.endpoint == endpoint)
}
