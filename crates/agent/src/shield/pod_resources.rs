//! The devices that containers have according to the kubelet's pod resources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use devlet_core::shield::Lease;
use devlet_core::{ContainerName, DeviceId, PodName, ResourceName};
use devlet_kubelet_api::pod_resources::v1 as pod_resources;
use devlet_uds::ReadLimits;
use pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use tokio::time::Instant;

/// Time for the kubelet to list pod resources.
const LIST_TIME: Duration = Duration::from_secs(2);

/// The longest list of pod resources.
const MAX_LIST: usize = 64 << 20;

/// The devices of one container, by resource.
pub(super) type Devices = BTreeMap<ResourceName, BTreeSet<DeviceId>>;

/// The containers of all pods with their devices. Plain init containers are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Listed(BTreeMap<PodName, BTreeMap<ContainerName, Devices>>);

impl Listed {
    pub(super) fn new(pods: Vec<pod_resources::PodResources>) -> Self {
        let devices = |container: pod_resources::ContainerResources| {
            let mut all = Devices::new();
            for devices in container.devices {
                let of_resource = all.entry(devices.resource_name.into()).or_default();
                of_resource.extend(devices.device_ids.into_iter().map(DeviceId::from));
            }
            (container.name.into(), all)
        };
        let pod = |pod: pod_resources::PodResources| {
            let name = PodName {
                namespace: pod.namespace,
                name: pod.name,
            };
            (name, pod.containers.into_iter().map(devices).collect())
        };
        Self(pods.into_iter().map(pod).collect())
    }

    /// Returns `true` if a container still has the devices of a lease. `pod` is the name of its pod, if it is known.
    pub(super) fn has(&self, lease: &Lease, pod: Option<&PodName>) -> bool {
        let has = |devices: &Devices| {
            let devices = devices.get(&lease.resource);
            devices.is_some_and(|devices| lease.devices.is_subset(devices))
        };
        match (pod, &lease.holder) {
            (Some(pod), Some(holder)) => self.0.get(pod).is_some_and(|containers| {
                // One that is not listed is a plain init container.
                containers.get(&holder.container).is_none_or(has)
            }),
            _ => self.0.values().flat_map(BTreeMap::values).any(has),
        }
    }

    /// Returns `true` if the pod is listed.
    pub(super) fn has_pod(&self, pod: &PodName) -> bool {
        self.0.contains_key(pod)
    }

    /// Returns the devices of a container; `None` if it is not listed.
    pub(super) fn devices(&self, pod: &PodName, container: &ContainerName) -> Option<&Devices> {
        self.0.get(pod)?.get(container)
    }
}

/// Asks the kubelet; `None` if it does not say.
pub(super) async fn list(kubelet: &Path) -> Option<Listed> {
    let socket = kubelet.join("pod-resources/kubelet.sock");
    let deadline = Instant::now() + LIST_TIME;
    let listing = async {
        let dialed = devlet_uds::connect_once_limited(&socket, deadline, &ReadLimits::default())
            .await
            .ok()?;
        let client = PodResourcesListerClient::new(dialed.channel.clone());
        let mut client = client.max_decoding_message_size(MAX_LIST);
        let answer = client
            .list(pod_resources::ListPodResourcesRequest {})
            .await
            .ok()?;
        Some(Listed::new(answer.into_inner().pod_resources))
    };
    tokio::time::timeout_at(deadline, listing).await.ok()?
}
