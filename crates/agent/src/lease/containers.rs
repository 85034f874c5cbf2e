//! The containers of the node, as the container runtime reports them. They tell which pod a container is of, and whether
//! containers run that devlet did not see start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use devlet_core::shield::{ContainerProcess, LeaseHolder};
use devlet_core::{PodName, PodUid};
use devlet_kubelet_api::cri::v1 as cri;
use devlet_uds::channel::Channel;
use devlet_uds::{PeerConnection, ReadLimits};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::process;
use crate::config::Shield;

/// Where the CRI of known runtimes is.
const SOCKETS: [&str; 2] = ["/run/containerd/containerd.sock", "/run/crio/crio.sock"];

/// Time for the runtime to list its containers. A kubelet that starts a container may wait for it.
const LIST_TIME: Duration = Duration::from_millis(800);

/// The longest list of containers.
const MAX_LIST: usize = 64 << 20;

/// Prefix of the labels that a kubelet adds to pods and containers.
const KUBELET_LABELS: &str = "io.kubernetes.";

/// The kubelet's labels of a container.
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Client of a container runtime.
pub type Client = cri::runtime_service_client::RuntimeServiceClient<Channel>;

/// The reason why the runtime does not tell.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeSilent {
    /// No runtime is known.
    #[error("no socket of a container runtime at {}; name it with --runtime-endpoint", SOCKETS.join(" or "))]
    NoSocket,
    /// It cannot be asked.
    #[error("container runtime at {}: {reason}", .socket.display())]
    Failed { socket: PathBuf, reason: String },
}

/// A pod that the runtime has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sandbox {
    /// Its name.
    pub name: PodName,
    /// Its labels, without those of the kubelet.
    pub labels: BTreeMap<String, String>,
    /// `false` once it has been stopped.
    pub is_ready: bool,
}

/// The pods and containers of a runtime.
#[derive(Debug, Clone, Default)]
pub struct Containers {
    /// The pods.
    pub pods: BTreeMap<PodUid, Sandbox>,
    /// The containers that have not ended.
    live: BTreeMap<LeaseHolder, Vec<Live>>,
    connection: Option<(PeerConnection, Client)>,
}

/// A container that has not ended.
#[derive(Debug, Clone)]
struct Live {
    id: String,
    runs: bool,
}

/// The part of a container's verbose status that tells its process.
#[derive(Deserialize)]
struct Info {
    pid: u32,
}

/// Returns the socket of the runtime.
pub fn socket(shield: &Shield) -> Result<PathBuf, RuntimeSilent> {
    let known = || SOCKETS.iter().map(Path::new).find(|socket| socket.exists());
    let named = shield.runtime.clone();
    named
        .or_else(|| known().map(Path::to_owned))
        .ok_or(RuntimeSilent::NoSocket)
}

/// Connects to the runtime.
pub async fn connect(socket: &Path, deadline: Instant) -> Result<(PeerConnection, Client), RuntimeSilent> {
    let dialed = devlet_uds::connect_once_limited(socket, deadline, &ReadLimits::default()).await;
    let dialed = dialed.map_err(|error| failed(socket, error.to_string()))?;
    let client = Client::new(dialed.channel.clone()).max_decoding_message_size(MAX_LIST);
    Ok((dialed, client))
}

/// Returns the error of a call on the runtime.
pub fn failed(socket: &Path, reason: impl Into<String>) -> RuntimeSilent {
    RuntimeSilent::Failed {
        socket: socket.to_owned(),
        reason: reason.into(),
    }
}

/// Asks the runtime for its pods and containers.
pub async fn list(shield: &Shield) -> Result<Containers, RuntimeSilent> {
    let socket = socket(shield)?;
    let deadline = Instant::now() + LIST_TIME;
    let listing = async {
        let (connection, mut client) = connect(&socket, deadline).await?;
        let refused = |status: tonic::Status| failed(&socket, status.message());
        let pods = client.list_pod_sandbox(cri::ListPodSandboxRequest {}).await;
        let pods = pods.map_err(refused)?.into_inner().items;
        let containers = client.list_containers(cri::ListContainersRequest {}).await;
        let containers = containers.map_err(refused)?.into_inner().containers;
        Ok(Containers {
            connection: Some((connection, client)),
            ..Containers::new(pods, containers)
        })
    };
    let listed = timeout_at(deadline, listing).await;
    listed.unwrap_or_else(|_| Err(failed(&socket, format!("no answer within {LIST_TIME:?}"))))
}

impl Containers {
    fn new(sandboxes: Vec<cri::PodSandbox>, containers: Vec<cri::Container>) -> Self {
        let mut pods: BTreeMap<PodUid, Sandbox> = BTreeMap::new();
        for sandbox in sandboxes {
            let is_ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
            let Some(metadata) = sandbox.metadata else {
                continue;
            };
            let pod = pods.entry(metadata.uid.into()).or_default();
            pod.is_ready |= is_ready;
            pod.name = PodName {
                namespace: metadata.namespace,
                name: metadata.name,
            };
            let labels = sandbox.labels.into_iter();
            pod.labels = labels
                .filter(|(key, _)| !key.starts_with(KUBELET_LABELS))
                .collect();
        }
        let mut live: BTreeMap<LeaseHolder, Vec<Live>> = BTreeMap::new();
        for container in containers {
            let state = container.state();
            let (Some(pod), Some(name)) = (
                container.labels.get(POD_UID),
                container.labels.get(CONTAINER_NAME),
            ) else {
                continue;
            };
            if state != cri::ContainerState::ContainerExited {
                let holder = LeaseHolder {
                    pod: pod.as_str().into(),
                    container: name.as_str().into(),
                };
                live.entry(holder).or_default().push(Live {
                    id: container.id,
                    runs: state == cri::ContainerState::ContainerRunning,
                });
            }
        }
        Self {
            pods,
            live,
            connection: None,
        }
    }

    /// Returns `true` if a container of this name runs, or may run soon.
    pub fn may_run(&self, holder: &LeaseHolder) -> bool {
        self.live.contains_key(holder)
    }

    /// Returns `true` if a container of this name runs.
    pub fn runs(&self, holder: &LeaseHolder) -> bool {
        let mut live = self.live.get(holder).into_iter().flatten();
        live.any(|live| live.runs)
    }

    /// Returns `true` if the runtime has the pod, and has not stopped it, or one of its containers may run.
    pub fn has_pod_of(&self, holder: &LeaseHolder) -> bool {
        self.may_run(holder) || self.pods.get(&holder.pod).is_some_and(|pod| pod.is_ready)
    }

    /// Returns the containers of this name that run, except those that are known already; `None` while one of them is
    /// between its creation and its start, or does not tell its process.
    pub async fn running(
        &self,
        holder: &LeaseHolder,
        is_known: impl Fn(&str) -> bool,
    ) -> Option<Vec<(String, ContainerProcess)>> {
        let mut found = Vec::new();
        for live in self.live.get(holder).into_iter().flatten() {
            if is_known(&live.id) {
                continue;
            }
            let pid = match live.runs {
                true => self.pid(&live.id).await?,
                false => return None,
            };
            match process::find(pid) {
                Some(process) => found.push((live.id.clone(), process)),
                // The container has ended since.
                None if process::is_absent(pid) => {}
                None => return None,
            }
        }
        Some(found)
    }

    /// Returns the first process of a container.
    async fn pid(&self, container: &str) -> Option<u32> {
        let request = cri::ContainerStatusRequest {
            container_id: container.to_owned(),
            verbose: true,
        };
        let (_, client) = self.connection.as_ref()?;
        let mut client = client.clone();
        let asked = timeout_at(Instant::now() + LIST_TIME, client.container_status(request));
        let status = asked.await.ok()?.ok()?.into_inner();
        let info: Info = serde_json::from_str(status.info.get("info")?).ok()?;
        (info.pid != 0).then_some(info.pid)
    }
}
