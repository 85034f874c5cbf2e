//! The kubelet's directory of device plugins: after each start of the kubelet, all resources are registered at once.
//!
//! ```text
//!              kubelet.sock is new              every resource: listen, register
//!   waiting ───────────────────────► session ─────────────────────────────────────► registered
//!      ▲                                │ another kubelet.sock,                         │ list not followed
//!      └────────────────────────────────┘ or the runtime cannot be used                 └──► register again
//! ```
//!
//! A kubelet removes all sockets in the directory before it makes its own. It fails pods whose resource is not registered
//! within a second or less. So nothing slow comes before a registration.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use devlet_core::{Moment, ResourceName};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::DevicePluginServer;
use devlet_kubelet_api::device_plugin::v1beta1::registration_client::RegistrationClient;
use devlet_uds::server::{self, ServerLimits, ignore_refusals};
use devlet_uds::{DialError, PeerConnection};
use rustix::fs::inotify;
use sha2::{Digest as _, Sha256};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use super::endpoint::{self, Endpoint};
use super::report::{RuntimeState, ShieldReport};
use crate::limits::MAX_SHORT_MESSAGE;
use crate::workflow::lease::LeaseWorkflow;

/// Interval of checks without an event: the directory may have been replaced.
const CHECK_PAUSE: Duration = Duration::from_secs(1);

/// Time for the kubelet to accept a connection and to answer `Register`. It calls back meanwhile.
const REGISTER_TIME: Duration = Duration::from_secs(10);

/// Pause before a registration is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Time for the kubelet to follow the list of a resource that it has registered.
const FOLLOW_TIME: Duration = Duration::from_secs(10);

/// The longest request of a kubelet: a list of all free devices.
const MAX_REQUEST: usize = 16 << 20;

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

    fn add(&self) -> io::Result<()> {
        let events = inotify::WatchFlags::CREATE
            | inotify::WatchFlags::MOVED_TO
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::ONLYDIR;
        inotify::add_watch(self.inotify.get_ref(), &self.path, events)?;
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.path.join("kubelet.sock")
    }

    fn identity(&self) -> Option<Identity> {
        let about = std::fs::symlink_metadata(self.socket()).ok()?;
        let identity = (about.dev(), about.ino(), about.ctime(), about.ctime_nsec());
        about.file_type().is_socket().then_some(identity)
    }

    /// Waits for an event, or for [`CHECK_PAUSE`].
    async fn changed(&self) {
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
    let mut session: Option<(Identity, CancellationToken)> = None;
    let mut number = 0;
    let mut runtime = report.subscribe();
    loop {
        let may_register = {
            let state = runtime.borrow_and_update();
            state.left.is_none() && may_register(&state.runtime, workflow.shield.require_runtime)
        };
        let identity = directory.identity().filter(|_| may_register);
        let current = session.as_ref().map(|(identity, _)| *identity);
        // Without a socket, a kubelet may just be removing the sockets in the directory. It fails to start if devlet removes
        // one at the same time. So a session ends when the kubelet has made its own socket, after that.
        if identity != current && (identity.is_some() || !may_register) {
            if let Some((_, ended)) = session.take() {
                ended.cancel();
                report.update(|state| {
                    state.registrations.clear();
                    state.kubelet = None;
                });
            }
            if let Some(identity) = identity {
                number += 1;
                let ended = stop.child_token();
                tasks.spawn(
                    Session {
                        workflow: workflow.clone(),
                        report: report.clone(),
                        directory: directory.path.clone(),
                        socket: directory.socket(),
                        number,
                        dialed: Arc::default(),
                        booted,
                        tasks: tasks.clone(),
                        ended: ended.clone(),
                    }
                    .run(),
                );
                session = Some((identity, ended));
            }
        }
        tokio::select! {
            () = directory.changed() => {}
            // Fails only if no report is left, and this task has one.
            _ = runtime.changed() => {}
            () = stop.cancelled() => return,
        }
    }
}

fn may_register(runtime: &RuntimeState, require: bool) -> bool {
    match runtime {
        RuntimeState::Unfit { .. } => false,
        RuntimeState::Ready { .. } => true,
        RuntimeState::Unasked | RuntimeState::Unknown { .. } => !require,
    }
}

/// All registrations at one run of the kubelet.
#[derive(Clone)]
struct Session {
    workflow: LeaseWorkflow,
    report: ShieldReport,
    directory: PathBuf,
    socket: PathBuf,
    /// In the names of the sockets: those of an earlier session may still be there.
    number: u32,
    /// One connection for all registrations at the start of the kubelet.
    dialed: Arc<OnceCell<PeerConnection>>,
    booted: Moment,
    tasks: TaskTracker,
    ended: CancellationToken,
}

impl Session {
    /// Serves and registers every resource, and those that come later, until the session ends.
    async fn run(self) {
        let mut served: BTreeMap<ResourceName, CancellationToken> = BTreeMap::new();
        let mut changes = self.workflow.store.subscribe();
        loop {
            changes.borrow_and_update();
            let wanted: BTreeSet<ResourceName> = self.workflow.store.read(|node| node.advertised_resources());
            served.retain(|name, ended| {
                let is_wanted = wanted.contains(name);
                if !is_wanted {
                    ended.cancel();
                    self.report.update(|state| _ = state.registrations.remove(name));
                }
                is_wanted
            });
            for resource in wanted {
                served.entry(resource).or_insert_with_key(|resource| {
                    let ended = self.ended.child_token();
                    let serving = self.clone().serve(resource.clone(), ended.clone());
                    self.tasks.spawn(serving);
                    ended
                });
            }
            tokio::select! {
                () = self.ended.cancelled() => return,
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    /// Serves one resource, and keeps it registered.
    async fn serve(self, resource: ResourceName, ended: CancellationToken) {
        let name = socket_name(&resource, self.number);
        loop {
            let problem = match devlet_uds::listen(self.directory.join(&name), devlet_uds::DEFAULT_MODE) {
                Ok(listener) => {
                    let followers = Arc::new(watch::channel(0).0);
                    let endpoint = Endpoint {
                        workflow: self.workflow.clone(),
                        resource: resource.clone(),
                        report: self.report.clone(),
                        booted: self.booted,
                        followers: Arc::clone(&followers),
                        stop: ended.clone(),
                    };
                    let service = DevicePluginServer::new(endpoint).max_decoding_message_size(MAX_REQUEST);
                    let serving = server::serve(
                        listener,
                        Routes::new(service),
                        ServerLimits::default(),
                        ignore_refusals(),
                        ended.clone().cancelled_owned(),
                    );
                    tokio::select! {
                        served = serving => served.err().map(|error| error.to_string()),
                        () = self.stay_registered(&resource, &name, &followers) => None,
                    }
                }
                Err(error) => Some(error.to_string()),
            };
            if ended.is_cancelled() {
                return;
            }
            if let Some(problem) = problem {
                self.registered(&resource, Some(problem));
            }
            tokio::select! {
                () = ended.cancelled() => return,
                () = tokio::time::sleep(RETRY_PAUSE) => {}
            }
        }
    }

    /// Registers, and again whenever the kubelet stops to follow the list.
    async fn stay_registered(&self, resource: &ResourceName, name: &str, followers: &watch::Sender<usize>) {
        loop {
            let registered = self.register(resource, name).await;
            let is_registered = registered.is_ok();
            self.registered(resource, registered.err());
            if is_registered {
                let mut followed = followers.subscribe();
                let is_followed = timeout(FOLLOW_TIME, followed.wait_for(|count| *count > 0))
                    .await
                    .is_ok();
                if is_followed {
                    // Fails only if the sender is dropped, and this function has it.
                    let _ = followed.wait_for(|count| *count == 0).await;
                }
                self.registered(
                    resource,
                    Some("the kubelet does not follow the list of devices".into()),
                );
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn dial(&self, deadline: Instant) -> Result<PeerConnection, DialError> {
        let dial = || devlet_uds::connect(&self.socket, deadline);
        let first = self.dialed.get_or_try_init(dial).await?;
        match first.closed().is_closed() {
            true => dial().await,
            false => Ok(first.clone()),
        }
    }

    async fn register(&self, resource: &ResourceName, name: &str) -> Result<(), String> {
        let deadline = Instant::now() + REGISTER_TIME;
        let dialed = self.dial(deadline).await.map_err(|error| error.to_string())?;
        let pid = dialed.peer.pid;
        self.report
            .update(|state| state.kubelet.get_or_insert_default().pid = pid);
        let client = RegistrationClient::new(dialed.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_SHORT_MESSAGE);
        let registering = client.register(endpoint::registration(resource, name.to_owned()));
        let registered = tokio::time::timeout_at(deadline, registering).await;
        match registered {
            Ok(Ok(_)) => {
                tracing::info!(%resource, "registered with the kubelet");
                Ok(())
            }
            Ok(Err(status)) => Err(format!("the kubelet refused: {}", status.message())),
            Err(_) => Err(format!("the kubelet did not answer within {REGISTER_TIME:?}")),
        }
    }

    fn registered(&self, resource: &ResourceName, problem: Option<String>) {
        if let Some(problem) = &problem {
            tracing::warn!(%resource, problem, "not registered with the kubelet, trying again");
        }
        self.report.update(|state| {
            state.registrations.insert(resource.clone(), problem);
        });
    }
}

/// Returns the name of a resource's socket, which is short enough for a socket's path, and unique.
fn socket_name(resource: &ResourceName, session: u32) -> String {
    let readable: String = resource
        .as_str()
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '_'
            }
        })
        .take(40)
        .collect();
    let hash = Sha256::digest(resource.as_str().as_bytes());
    let hash: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("devlet-{readable}-{hash}-{session}.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_name_is_short_and_unique() {
        let (slash, underscore) = (
            socket_name(&"a.com/b_c".into(), 1),
            socket_name(&"a.com_b/c".into(), 1),
        );
        assert_ne!(slash, underscore);
        assert!(slash.starts_with("devlet-a.com_b_c-"), "{slash}");
        let long = socket_name(&format!("a.com/{}", "x".repeat(300)).as_str().into(), u32::MAX);
        assert!(
            "/var/lib/kubelet/device-plugins/".len() + long.len() <= 107,
            "{long}"
        );
    }

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
