//! Registers the plugins whose sockets are in `plugins_registry`.
//!
//! [`watcher`] lists the sockets, [`handshake`] is one attempt to register the plugin behind one of them, and [`run`]
//! schedules the attempts. The watcher always lists all sockets, so there is no second list to compare with.
//!
//! A user with write access to the directory can create any number of sockets. Therefore attempts are limited per owner
//! of the socket, and root and devlet's own user have separate limits. A socket that fails does not count until its backoff
//! ends.

pub mod handshake;
pub mod status;
pub mod watcher;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use devlet_uds::rate_limit::RateLimiter;
use futures_util::{StreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use handshake::{Handshake, HandshakeError, RegisteredPlugin};
use status::{RegistryStatus, Summary};
use watcher::{Listing, Socket, WatchError, Watcher};

use crate::deadline::sleep_until_some;

/// Maximum attempts at a time on sockets of one owner.
const ATTEMPTS_PER_OWNER: usize = 32;

/// Maximum attempts at a time on sockets of all owners but root and devlet's own user.
const ATTEMPTS_OF_OTHERS: usize = 64;

/// Backoff after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(122);

/// Failures after which a socket that cannot be dialled is reported as dead.
const DEAD_AFTER: u32 = 3;

/// Maximum failures that are logged, as a burst and per minute. Further failures are only counted.
const LOGGED_FAILURES: u32 = 20;

/// Watches the directory until `stop`.
pub async fn run(
    watcher: Watcher,
    handshake: Handshake,
    status: RegistryStatus,
    stop: CancellationToken,
) -> Result<(), WatchError> {
    let (ended, mut endings) = mpsc::unbounded_channel();
    let mut registry = Registry {
        handshake,
        stop: stop.clone(),
        tasks: TaskTracker::new(),
        ended,
        entries: BTreeMap::new(),
        attempts: 0,
        failures: [FailureLog::new(), FailureLog::new()],
    };
    // A stream keeps its progress when another branch is ready first.
    let listings = stream::unfold(watcher, async |mut watcher: Watcher| {
        let listing = watcher.changed().await;
        Some((listing, watcher))
    });
    let mut listings = pin!(listings);
    let mut listing = Listing::default();
    loop {
        let wake = registry.start_attempts();
        status.set(registry.summary(&listing));
        tokio::select! {
            Some(listed) = listings.next() => {
                listing = listed?;
                registry.update(&listing);
            }
            Some(ending) = endings.recv() => {
                registry.attempt_ended(ending);
                while let Ok(ending) = endings.try_recv() {
                    registry.attempt_ended(ending);
                }
            }
            () = sleep_until_some(wake) => {}
            () = stop.cancelled() => break,
        }
    }
    registry.tasks.close();
    registry.tasks.wait().await;
    Ok(())
}

/// The sockets of the directory, and the attempts to register their plugins.
struct Registry {
    handshake: Handshake,
    stop: CancellationToken,
    tasks: TaskTracker,
    ended: mpsc::UnboundedSender<Ending>,
    entries: BTreeMap<PathBuf, Entry>,
    /// Number of attempts so far.
    attempts: u64,
    /// Logs for sockets of trusted owners, and of others.
    failures: [FailureLog; 2],
}

struct Entry {
    socket: Socket,
    state: State,
    /// Failures in a row.
    failures: u32,
    /// The last attempt failed because the socket does not accept connections.
    is_undialable: bool,
}

enum State {
    /// Waits for an attempt, which starts at this time or later.
    Waiting(Instant),
    /// An attempt of this number is in flight.
    Attempting(u64, CancellationToken),
    /// The plugin is registered. Cancelling this deregisters a DRA driver.
    Registered(CancellationToken),
}

/// The end of an attempt.
struct Ending {
    path: PathBuf,
    attempt: u64,
    result: Result<(), HandshakeError>,
}

impl Registry {
    /// Applies a listing: adds new sockets, and removes entries of missing ones with their DRA drivers. A socket that was
    /// created again under the same name is new, without backoff.
    fn update(&mut self, listing: &Listing) {
        let handshake = &self.handshake;
        self.entries.retain(|path, entry| {
            let is_listed = listing
                .sockets
                .get(path)
                .is_some_and(|socket| socket.identity == entry.socket.identity);
            if !is_listed {
                if let State::Attempting(_, cancel) | State::Registered(cancel) = &entry.state {
                    cancel.cancel();
                }
                handshake.registrar.metrics.socket_left(path);
                handshake.drivers.refusal_ended(path);
            }
            is_listed
        });
        let now = Instant::now();
        for (path, socket) in &listing.sockets {
            if let Some(entry) = self.entries.get_mut(path) {
                entry.socket = *socket;
                continue;
            }
            self.handshake.registrar.metrics.socket_found(path);
            let entry = Entry {
                socket: *socket,
                state: State::Waiting(now),
                failures: 0,
                is_undialable: false,
            };
            self.entries.insert(path.clone(), entry);
        }
    }

    /// Starts the attempts that are due, within the limits. Returns when the next one is due.
    fn start_attempts(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let (mut by_owner, mut others) = (HashMap::<u32, usize>::new(), 0);
        let (mut due, mut next) = (Vec::new(), None::<Instant>);
        for (path, entry) in &self.entries {
            match &entry.state {
                State::Attempting(..) => {
                    *by_owner.entry(entry.socket.owner).or_default() += 1;
                    others += usize::from(!entry.socket.is_trusted);
                }
                State::Waiting(at) if *at <= now => due.push((*at, path.clone())),
                State::Waiting(at) => next = Some(next.map_or(*at, |next| next.min(*at))),
                State::Registered(_) => {}
            }
        }
        due.sort_unstable();
        for (_, path) in due {
            let Some(entry) = self.entries.get_mut(&path) else {
                continue;
            };
            let Socket {
                owner, is_trusted, ..
            } = entry.socket;
            let of_owner = by_owner.entry(owner).or_default();
            // At the limit: it starts when another attempt ends.
            if *of_owner >= ATTEMPTS_PER_OWNER || (!is_trusted && others >= ATTEMPTS_OF_OTHERS) {
                continue;
            }
            *of_owner += 1;
            others += usize::from(!is_trusted);
            self.attempts += 1;
            let cancel = self.stop.child_token();
            entry.state = State::Attempting(self.attempts, cancel.clone());
            let (handshake, ended) = (self.handshake.clone(), self.ended.clone());
            self.tasks
                .spawn(attempt(handshake, path, self.attempts, ended, cancel));
        }
        next
    }

    fn attempt_ended(&mut self, ending: Ending) {
        let Ending {
            path,
            attempt,
            result,
        } = ending;
        let Some(entry) = self.entries.get_mut(&path) else {
            return;
        };
        let State::Attempting(number, cancel) = &entry.state else {
            return;
        };
        // The socket may have been replaced in the meantime.
        if *number != attempt {
            return;
        }
        let (metrics, drivers) = (&self.handshake.registrar.metrics, &self.handshake.drivers);
        let error = match result {
            Ok(()) => {
                metrics.socket_registered(&path);
                drivers.refusal_ended(&path);
                entry.failures = 0;
                entry.state = State::Registered(cancel.clone());
                return;
            }
            Err(error) => error,
        };
        if let Some(reason) = error.reason() {
            metrics.registration_refused(reason);
        }
        let pause = (FIRST_PAUSE * (1 << entry.failures.min(16))).min(LONGEST_PAUSE);
        entry.failures = entry.failures.saturating_add(1);
        entry.is_undialable = matches!(error, HandshakeError::Dial { .. });
        let now = Instant::now();
        entry.state = State::Waiting(now + pause);
        let [of_trusted, of_others] = &mut self.failures;
        let log = if entry.socket.is_trusted {
            of_trusted
        } else {
            of_others
        };
        if !error.is_rejection() {
            log.failed(&path, &error, pause, now);
        }
    }

    fn summary(&self, listing: &Listing) -> Summary {
        let dead = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_undialable && entry.failures >= DEAD_AFTER);
        let mut summary = Summary {
            skipped_sockets: listing.skipped_sockets,
            skipped_directories: listing.skipped_directories,
            ..Summary::default()
        };
        for (path, _) in dead {
            summary.add_dead(path);
        }
        summary
    }
}

/// Tries to register the plugin behind a socket. A DRA driver stays registered until `cancel`.
async fn attempt(
    handshake: Handshake,
    path: PathBuf,
    attempt: u64,
    ended: mpsc::UnboundedSender<Ending>,
    cancel: CancellationToken,
) {
    let result = tokio::select! {
        result = handshake.attempt(&path) => result,
        () = cancel.cancelled() => return,
    };
    let (result, driver) = match result {
        Ok(RegisteredPlugin::Driver(registered)) => (Ok(()), Some(registered)),
        Ok(RegisteredPlugin::DevicePlugin) => (Ok(()), None),
        Err(error) => (Err(error), None),
    };
    // The registry may have stopped.
    let _ = ended.send(Ending {
        path,
        attempt,
        result,
    });
    if driver.is_some() {
        cancel.cancelled().await;
    }
}

/// Logs failed attempts, at a limited rate.
struct FailureLog {
    rate: RateLimiter,
    unlogged: u64,
}

impl FailureLog {
    fn new() -> Self {
        Self {
            rate: RateLimiter::new(LOGGED_FAILURES, Duration::from_secs(60), Instant::now()),
            unlogged: 0,
        }
    }

    fn failed(&mut self, socket: &Path, error: &HandshakeError, retry_in: Duration, now: Instant) {
        if self.rate.try_acquire(now).is_err() {
            self.unlogged += 1;
            return;
        }
        let socket = socket.display();
        match std::mem::take(&mut self.unlogged) {
            0 => tracing::warn!(%socket, %error, ?retry_in, "plugin not registered"),
            unlogged => {
                tracing::warn!(%socket, %error, ?retry_in, unlogged, "plugin not registered");
            }
        }
    }
}
