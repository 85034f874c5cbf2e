//! The kubelet's directory of device plugins: after each start of the kubelet, all resources are registered at once.
//!
//! ```text
//!                 kubelet.sock is new             every resource registers
//!   no kubelet ─────────────────────► kubelet ─────────────────────────────► registered
//!      ▲                                 │ another kubelet.sock                  │ list not followed
//!      │ the runtime cannot be used      └──► all register again                 └──► one registers again
//! ```
//!
//! A kubelet removes all sockets in the directory before it makes its own, and fails pods whose resource is not registered within
//! a second or less. So nothing slow comes before a registration: the sockets of resources exist before (`served_resource`).

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use devlet_core::{Moment, ResourceName};
use devlet_uds::{DialError, PeerConnection, ReadLimits};
use rustix::fs::inotify;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::report::{RuntimeState, ShieldReport};
use super::served_resource::{self, ServedResource};
use crate::workflow::lease::LeaseWorkflow;

/// The kubelet's socket for registrations.
pub(super) const SOCKET: &str = "kubelet.sock";

/// Interval of checks without an event: the directory may have been replaced.
pub(super) const CHECK_PAUSE: Duration = Duration::from_secs(1);

/// The kubelet's directory cannot be watched.
#[derive(Debug, thiserror::Error)]
#[error("cannot watch the kubelet's directory {}: {problem}", directory.display())]
pub struct WatchError {
    pub directory: PathBuf,
    pub problem: io::Error,
}

/// A socket, told from a later one at the same path.
type Identity = (u64, u64, i64, i64);

/// The kubelet's directory.
pub(super) struct Directory {
    path: PathBuf,
    inotify: AsyncFd<OwnedFd>,
}

impl Directory {
    /// Watches a directory, and creates it as a kubelet does.
    #[expect(
        deprecated,
        reason = "its successor is unsafe; the descriptor is owned and never replaced"
    )]
    pub(super) fn watch(path: &Path) -> Result<Self, WatchError> {
        let watch = || -> io::Result<AsyncFd<OwnedFd>> {
            std::fs::create_dir_all(path)?;
            let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
            let inotify = inotify::init(flags)?;
            AsyncFd::with_interest(inotify, Interest::READABLE)
        };
        let directory = |inotify| Self {
            path: path.to_owned(),
            inotify,
        };
        let watched = watch().map(directory).and_then(|directory| {
            directory.add()?;
            Ok(directory)
        });
        watched.map_err(|problem| WatchError {
            directory: path.to_owned(),
            problem,
        })
    }

    /// Makes room for sockets: those of an earlier process are removed. Only for the start of devlet.
    pub(super) fn prepare(&self) -> Result<(), WatchError> {
        served_resource::prepare(&self.path).map_err(|problem| WatchError {
            directory: self.path.clone(),
            problem,
        })
    }

    fn add(&self) -> io::Result<()> {
        let events = inotify::WatchFlags::CREATE
            | inotify::WatchFlags::MOVED_TO
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::ONLYDIR;
        inotify::add_watch(self.inotify.get_ref(), &self.path, events)?;
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Waits for an event, or for [`CHECK_PAUSE`].
    pub(super) async fn changed(&self) {
        let read = async {
            let Ok(mut ready) = self.inotify.readable().await else {
                return std::future::pending().await;
            };
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(self.inotify.get_ref(), &mut buffer);
            while events.next().is_ok() {}
            ready.clear_ready();
        };
        if timeout(CHECK_PAUSE, read).await.is_err() {
            // The directory may be another one by now. Adding the watch again changes nothing otherwise.
            let _ = self.add();
        }
    }
}

/// Registers all resources after each start of the kubelet, until devlet stops.
pub(super) async fn run(
    directory: Directory,
    workflow: LeaseWorkflow,
    report: ShieldReport,
    booted: Moment,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let mut current = None;
    let kubelet = watch::Sender::new(None);
    let mut served: BTreeMap<ResourceName, CancellationToken> = BTreeMap::new();
    let mut runtime = report.subscribe();
    let mut changes = workflow.store.subscribe();
    loop {
        let may_register = {
            let state = runtime.borrow_and_update();
            state.left.is_none() && may_register(&state.runtime, workflow.shield.require_runtime)
        };
        changes.borrow_and_update();
        let wanted = workflow.store.read(|node| node.advertised_resources());
        served.retain(|resource, ended| {
            let is_wanted = may_register && wanted.contains(resource);
            if !is_wanted {
                ended.cancel();
                report.update(|state| _ = state.registrations.remove(resource));
            }
            is_wanted
        });
        for resource in wanted.into_iter().filter(|_| may_register) {
            served.entry(resource).or_insert_with_key(|resource| {
                let ended = stop.child_token();
                let served = ServedResource {
                    workflow: workflow.clone(),
                    report: report.clone(),
                    resource: resource.clone(),
                    directory: directory.path.clone(),
                    booted,
                    kubelet: kubelet.subscribe(),
                    ended: ended.clone(),
                };
                tasks.spawn(served.run());
                ended
            });
        }
        let identity = identity(&directory.socket()).filter(|_| may_register);
        // Without a socket, a kubelet may just be starting, and it is the last one that is known.
        if identity != current && (identity.is_some() || !may_register) {
            current = identity;
            report.update(|state| {
                state.registrations.clear();
                state.kubelet = None;
            });
            kubelet.send_replace(identity.map(|identity| Kubelet {
                socket: directory.socket(),
                identity,
                dialed: Arc::default(),
            }));
        }
        tokio::select! {
            () = directory.changed() => {}
            // Fails only if no report is left, and this task has one.
            _ = runtime.changed() => {}
            // Fails only if the store is gone, and this task has it.
            _ = changes.changed() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Returns `false` if the runtime may start containers without their devices.
pub(super) fn may_register(runtime: &RuntimeState, require: bool) -> bool {
    match runtime {
        RuntimeState::Unfit { .. } => false,
        RuntimeState::Ready { .. } => true,
        RuntimeState::Unasked | RuntimeState::Unknown { .. } => !require,
    }
}

/// One run of a kubelet.
#[derive(Debug, Clone)]
pub(super) struct Kubelet {
    socket: PathBuf,
    identity: Identity,
    /// One connection for the registrations at its start.
    dialed: Arc<OnceCell<PeerConnection>>,
}

impl Kubelet {
    /// Connects, unless there is a connection. It is never one to a later kubelet, to which all resources register anyway.
    pub(super) async fn dial(&self, deadline: Instant) -> Result<PeerConnection, DialError> {
        let first = || devlet_uds::connect(&self.socket, deadline);
        let mut dialed = self.dialed.get_or_try_init(first).await?.clone();
        if dialed.closed().is_closed() {
            let limits = ReadLimits::default();
            dialed = devlet_uds::connect_once_limited(&self.socket, deadline, &limits).await?;
        }
        if identity(&self.socket) == Some(self.identity) {
            Ok(dialed)
        } else {
            Err(DialError::Missing {
                path: self.socket.clone(),
            })
        }
    }
}

fn identity(socket: &Path) -> Option<Identity> {
    let about = std::fs::symlink_metadata(socket).ok()?;
    let identity = (about.dev(), about.ino(), about.ctime(), about.ctime_nsec());
    about.file_type().is_socket().then_some(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_registered_while_the_runtime_would_drop_devices() {
        let unfit = RuntimeState::Unfit {
            name: String::new(),
            problem: String::new(),
        };
        let ready = RuntimeState::Ready {
            name: String::new(),
            cdi: Default::default(),
        };
        let unknown = RuntimeState::Unknown {
            reason: String::new(),
        };
        for (state, required, optional) in [
            (unfit, false, false),
            (ready, true, true),
            (unknown, false, true),
            (RuntimeState::Unasked, false, true),
        ] {
            assert_eq!(may_register(&state, true), required, "{state:?}");
            assert_eq!(may_register(&state, false), optional, "{state:?}");
        }
    }
}
