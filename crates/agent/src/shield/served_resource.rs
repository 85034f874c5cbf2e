//! One resource that devlet serves as a device plugin, and its registration with each kubelet.
//!
//! The socket is in a directory of its own below the kubelet's: a kubelet that starts removes the sockets in its directory, but
//! not those in directories below. So the resource is served before the kubelet starts, and needs only to register.
//!
//! Each socket has another name. A kubelet that still knows a path refuses to register it a second time, and may never
//! forget it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use devlet_core::{Moment, ResourceName};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::DevicePluginServer;
use devlet_kubelet_api::device_plugin::v1beta1::registration_client::RegistrationClient;
use devlet_uds::PeerConnection;
use devlet_uds::server::{self, ServerLimits, ignore_refusals};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use uuid::Uuid;

use super::endpoint::{self, Endpoint};
use super::kubelet::Kubelet;
use super::report::ShieldReport;
use super::runtime;
use crate::limits::MAX_SHORT_MESSAGE;
use crate::workflow::lease::LeaseWorkflow;

/// The directory of devlet's sockets, below the kubelet's.
const DIRECTORY: &str = "devlet";

/// Time for the kubelet to accept a connection and to answer `Register`. It calls back meanwhile.
const REGISTER_TIME: Duration = Duration::from_secs(10);

/// Pause before a registration is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Time for the kubelet to follow the list of a resource that it has registered.
const FOLLOW_TIME: Duration = Duration::from_secs(10);

/// The longest request of a kubelet: a list of all free devices.
const MAX_REQUEST: usize = 16 << 20;

/// What the problem of a registration begins with if the kubelet refused it.
pub(super) const REFUSED: &str = "the kubelet refused";

/// Creates the directory of sockets, and removes those of an earlier process.
pub(super) fn prepare(kubelet: &Path) -> io::Result<()> {
    let directory = kubelet.join(DIRECTORY);
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::create_dir(&directory)
}

/// A resource, and what its registrations need.
pub(super) struct ServedResource {
    pub(super) workflow: LeaseWorkflow,
    pub(super) report: ShieldReport,
    pub(super) resource: ResourceName,
    /// The kubelet's directory.
    pub(super) directory: PathBuf,
    /// When the machine was booted.
    pub(super) booted: Moment,
    pub(super) kubelet: watch::Receiver<Option<Kubelet>>,
    pub(super) ended: CancellationToken,
}

impl ServedResource {
    /// Serves the resource on one socket after another, until it ends.
    pub(super) async fn run(self) {
        let mut kubelets = self.kubelet.clone();
        loop {
            kubelets.borrow_and_update();
            let name = socket_name(&self.resource);
            let problem = match self.listen(&name) {
                Ok(listener) => {
                    let followers = Arc::new(watch::channel(0).0);
                    let endpoint = Endpoint {
                        workflow: self.workflow.clone(),
                        resource: self.resource.clone(),
                        report: self.report.clone(),
                        booted: self.booted,
                        followers: Arc::clone(&followers),
                        stop: self.ended.clone(),
                    };
                    let service = DevicePluginServer::new(endpoint).max_decoding_message_size(MAX_REQUEST);
                    let serving = server::serve(
                        listener,
                        Routes::new(service),
                        ServerLimits::default(),
                        ignore_refusals(),
                        self.ended.clone().cancelled_owned(),
                    );
                    tokio::select! {
                        served = serving => served.err().map(|error| error.to_string()),
                        () = self.stay_registered(&name, &followers) => None,
                        problem = self.report.refused() => {
                            self.registered(Some(problem));
                            tokio::select! {
                                () = self.ended.cancelled() => return,
                                // Fails only if devlet stops.
                                _ = kubelets.changed() => continue,
                            }
                        }
                    }
                }
                Err(error) => Some(error.to_string()),
            };
            if self.ended.is_cancelled() {
                return;
            }
            if problem.is_some() {
                self.registered(problem);
                tokio::select! {
                    () = self.ended.cancelled() => return,
                    () = tokio::time::sleep(RETRY_PAUSE) => {}
                }
            }
        }
    }

    fn listen(&self, name: &str) -> Result<devlet_uds::Listener, devlet_uds::ListenError> {
        // The kubelet's directory may be another one by now. Without it, the listener says why.
        let _ = std::fs::create_dir(self.directory.join(DIRECTORY));
        devlet_uds::listen(self.directory.join(name), devlet_uds::DEFAULT_MODE)
    }

    /// Registers with each kubelet. Returns when another socket is necessary.
    async fn stay_registered(&self, name: &str, followers: &watch::Sender<usize>) {
        let mut kubelets = self.kubelet.clone();
        loop {
            let Some(kubelet) = kubelets.borrow_and_update().clone() else {
                let _ = kubelets.changed().await;
                continue;
            };
            if !self.directory.join(name).exists() {
                return;
            }
            tokio::select! {
                is_used = self.follow(&kubelet, name, followers) => if is_used {
                    return;
                },
                changed = kubelets.changed() => if changed.is_err() {
                    // devlet stops: calls in flight get their answers.
                    std::future::pending::<()>().await;
                },
            }
        }
    }

    /// Registers, and returns after the kubelet's interest has ended: `true` if the kubelet may still know the socket.
    async fn follow(&self, kubelet: &Kubelet, name: &str, followers: &watch::Sender<usize>) -> bool {
        let deadline = Instant::now() + REGISTER_TIME;
        let dialed = kubelet.dial(deadline).await;
        let is_used = dialed.is_ok();
        let registered = match dialed {
            Ok(dialed) => self.register(&dialed, name, deadline).await,
            Err(error) => Err(error.to_string()),
        };
        let is_registered = registered.is_ok();
        self.registered(registered.err());
        if is_registered {
            let mut followed = followers.subscribe();
            // Fails only if the sender is dropped, and the caller has it.
            let is_followed = timeout(FOLLOW_TIME, followed.wait_for(|count| *count > 0))
                .await
                .is_ok();
            if is_followed {
                let _ = followed.wait_for(|count| *count == 0).await;
            }
            self.registered(Some("the kubelet does not follow the list of devices".into()));
        }
        // A kubelet that has ended is replaced by another one, which finds the socket as it is.
        tokio::time::sleep(RETRY_PAUSE).await;
        is_used
    }

    async fn register(&self, dialed: &PeerConnection, name: &str, deadline: Instant) -> Result<(), String> {
        let pid = dialed.peer.pid;
        let program = pid.and_then(runtime::program);
        let mut refusal = None;
        self.report.update(|state| {
            let kubelet = state.kubelet.get_or_insert_default();
            kubelet.pid = pid;
            if let Some(version) = program.and_then(|program| state.versions.get(&program)) {
                kubelet.version = version.clone();
                kubelet.is_asked = true;
            }
            refusal = kubelet.refusal();
        });
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let client = RegistrationClient::new(dialed.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_SHORT_MESSAGE);
        let registering = client.register(endpoint::registration(&self.resource, name.to_owned()));
        let registered = tokio::time::timeout_at(deadline, registering).await;
        match registered {
            Ok(Ok(_)) => {
                tracing::info!(resource = %self.resource, "registered with the kubelet");
                Ok(())
            }
            Ok(Err(status)) => Err(format!("{REFUSED}: {}", status.message())),
            Err(_) => Err(format!("the kubelet did not answer within {REGISTER_TIME:?}")),
        }
    }

    fn registered(&self, problem: Option<String>) {
        if let Some(problem) = &problem {
            tracing::warn!(resource = %self.resource, problem, "not registered with the kubelet, trying again");
        }
        self.report.update(|state| {
            state.registrations.insert(self.resource.clone(), problem);
        });
    }
}

/// Returns a name that is short enough for a socket's path, and that no earlier socket had.
fn socket_name(resource: &ResourceName) -> String {
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
    let random = Uuid::new_v4().simple().to_string();
    format!(
        "{DIRECTORY}/{readable}-{}.sock",
        random.get(..12).unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_name_is_short_and_unique() {
        let name = socket_name(&"a.com/b_c".into());
        assert_ne!(name, socket_name(&"a.com/b_c".into()));
        assert!(name.starts_with("devlet/a.com_b_c-"), "{name}");
        let long = socket_name(&format!("a.com/{}", "x".repeat(300)).as_str().into());
        assert!(
            "/var/lib/kubelet/device-plugins/".len() + long.len() <= 107,
            "{long}"
        );
    }
}
