//! The pods of the kubelet, from kubelets that report them (PodsAPI, from 1.36). They tell which devices a container must
//! have. Other kubelets have no such socket.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::{ContainerKind, ContainerName, PodName, PodUid, ResourceName};
use devlet_kubelet_api::pods::v1alpha1 as api;
use devlet_uds::ReadLimits;
use prost::Message as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::report::ShieldReport;

/// Pause between two attempts to follow the pods.
const PAUSE: Duration = Duration::from_secs(5);

/// Time for the kubelet to accept a connection.
const DIAL_TIME: Duration = Duration::from_secs(2);

/// A pod that has not ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletPod {
    /// Its name.
    pub name: PodName,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its containers.
    pub containers: BTreeMap<ContainerName, KubeletContainer>,
}

/// A container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletContainer {
    /// Its kind.
    pub kind: ContainerKind,
    /// The extended resources that it requests from device plugins.
    pub requests: BTreeSet<ResourceName>,
}

/// Follows the pods of each kubelet until devlet stops.
pub(super) async fn run(kubelet: std::path::PathBuf, report: ShieldReport, stop: CancellationToken) {
    let socket = kubelet.join("pods-api/pods-api.sock");
    let run = async {
        loop {
            if let Some(problem) = follow(&socket, &report).await {
                tracing::debug!(problem, "pods of the kubelet not followed");
            }
            report.update(|state| state.pods = None);
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = run => {}
        () = stop.cancelled() => {}
    }
}

/// Reports the pods until the connection ends. Returns why it ended.
async fn follow(socket: &Path, report: &ShieldReport) -> Option<String> {
    let deadline = Instant::now() + DIAL_TIME;
    let dialed = devlet_uds::connect_once_limited(socket, deadline, &ReadLimits::default()).await;
    let dialed = match dialed {
        Ok(dialed) => dialed,
        Err(error) => return Some(error.to_string()),
    };
    let mut client = api::pods_client::PodsClient::new(dialed.channel.clone());
    let mut events = match client.watch_pods(api::WatchPodsRequest {}).await {
        Ok(events) => events.into_inner(),
        Err(status) => return Some(status.message().to_owned()),
    };
    let mut pods = BTreeMap::new();
    let mut is_complete = false;
    loop {
        match events.message().await {
            Ok(Some(event)) => {
                is_complete |= event.r#type() == api::EventType::InitialSyncComplete;
                take(&mut pods, &event);
            }
            Ok(None) => return None,
            Err(status) => return Some(status.message().to_owned()),
        }
        if is_complete {
            report.update(|state| {
                if state.pods.as_deref() != Some(&pods) {
                    state.pods = Some(Arc::new(pods.clone()));
                }
            });
        }
    }
}

/// Applies an event. A pod that has ended, or that cannot be decoded, is not a pod with containers.
fn take(pods: &mut BTreeMap<PodUid, KubeletPod>, event: &api::WatchPodsEvent) {
    let Ok(pod) = api::Pod::decode(event.pod.as_slice()) else {
        return;
    };
    let uid = PodUid::from(pod.metadata.clone().unwrap_or_default().uid);
    let phase = pod.status.as_ref().map_or("", |status| status.phase.as_str());
    match event.r#type() {
        api::EventType::Added | api::EventType::Modified if !matches!(phase, "Succeeded" | "Failed") => {
            pods.insert(uid, KubeletPod::from(pod));
        }
        api::EventType::InitialSyncComplete | api::EventType::Unspecified => {}
        _ => _ = pods.remove(&uid),
    }
}

impl From<api::Pod> for KubeletPod {
    fn from(pod: api::Pod) -> Self {
        let claims = pod
            .status
            .and_then(|status| status.extended_resource_claim_status);
        let claims = claims.map(|claims| claims.request_mappings).unwrap_or_default();
        let spec = pod.spec.unwrap_or_default();
        let container = |container: api::Container, kind| {
            let is_of_driver = |resource: &str| {
                let mut mappings = claims.iter();
                mappings.any(|each| each.container_name == container.name && each.resource_name == resource)
            };
            let limits = container.resources.clone().unwrap_or_default().limits;
            let requests = limits
                .into_iter()
                .filter(|(name, quantity)| {
                    name.contains('/') && quantity.string != "0" && !is_of_driver(name)
                })
                .map(|(name, _)| name.into());
            let requests = requests.collect();
            (
                container.name.as_str().into(),
                KubeletContainer { kind, requests },
            )
        };
        let first = spec.init_containers.into_iter().map(|each| {
            let is_sidecar = each.restart_policy == "Always";
            let kind = if is_sidecar {
                ContainerKind::Sidecar
            } else {
                ContainerKind::Init
            };
            container(each, kind)
        });
        let apps = spec.containers.into_iter();
        let containers = first.chain(apps.map(|each| container(each, ContainerKind::App)));
        let containers = containers.collect();
        let metadata = pod.metadata.unwrap_or_default();
        Self {
            name: PodName {
                namespace: metadata.namespace,
                name: metadata.name,
            },
            labels: metadata.labels,
            containers,
        }
    }
}
