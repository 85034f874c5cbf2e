//! The status of pods as the API server has it, as far as the health of devices is concerned.

use std::collections::BTreeMap;
use std::sync::Arc;

use devlet_core::PodUid;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::events::PodRef;

/// The condition of a pod whose status a kubelet owns.
pub(super) const CONDITION: &str = "devlet.dev/DevicesHealthy";

/// The pods with devices or claims. Clones share them. The watch of pods keeps it up to date.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeenPods(Arc<watch::Sender<BTreeMap<PodUid, Arc<SeenPod>>>>);

/// A pod as the API server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenPod {
    pub(crate) pod: PodRef,
    pub(crate) object: PodStatus,
}

impl SeenPods {
    /// Adds or replaces a pod.
    pub(crate) fn put(&self, pod: PodRef, object: PodStatus) {
        let seen = Arc::new(SeenPod { pod, object });
        self.0.send_if_modified(|pods| {
            let uid = seen.pod.uid.clone();
            let last = pods.insert(uid, Arc::clone(&seen));
            last.as_ref() != Some(&seen)
        });
    }

    /// Removes a pod.
    pub(crate) fn remove(&self, uid: &PodUid) {
        self.0.send_if_modified(|pods| pods.remove(uid).is_some());
    }

    /// Removes all pods except those for which `is_kept` returns `true`.
    pub(crate) fn retain(&self, is_kept: impl Fn(&PodUid) -> bool) {
        self.0.send_if_modified(|pods| {
            let before = pods.len();
            pods.retain(|uid, _| is_kept(uid));
            pods.len() != before
        });
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<BTreeMap<PodUid, Arc<SeenPod>>> {
        self.0.subscribe()
    }
}

/// The parts of a Pod object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodStatus {
    metadata: Metadata,
    status: Status,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    resource_version: String,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    container_statuses: Option<Vec<ContainerStatus>>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
    conditions: Option<Vec<Condition>>,
    extended_resource_claim_status: Option<ExtendedResources>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ContainerStatus {
    pub(super) name: String,
    allocated_resources_status: Option<Vec<ResourceStatus>>,
}

/// The health of the devices that a container has of one resource or claim.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ResourceStatus {
    /// The resource, or `claim:NAME[/REQUEST]`.
    pub(super) name: String,
    pub(super) resources: Vec<DeviceStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct DeviceStatus {
    #[serde(rename = "resourceID")]
    pub(super) id: String,
    pub(super) health: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: String,
    pub(super) message: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ExtendedResources {
    request_mappings: Vec<RequestMapping>,
}

/// The extended resource of a container for which the scheduler made a request of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestMapping {
    container_name: String,
    resource_name: String,
    request_name: String,
}

impl PodStatus {
    pub(super) fn version(&self) -> &str {
        &self.metadata.resource_version
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Returns the containers with a status, with the path of the status in the object.
    pub(super) fn containers(&self) -> impl Iterator<Item = (String, &ContainerStatus)> {
        let Status {
            container_statuses: containers,
            init_container_statuses: init,
            ..
        } = &self.status;
        let lists = [("initContainerStatuses", init), ("containerStatuses", containers)];
        lists.into_iter().flat_map(|(list, statuses)| {
            let statuses = statuses.iter().flatten().enumerate();
            statuses.map(move |(index, status)| (format!("/status/{list}/{index}"), status))
        })
    }

    /// Returns `true` if a container has the health of a device.
    pub(super) fn has_health(&self) -> bool {
        self.containers()
            .any(|(_, status)| !status.resources().is_empty())
    }

    pub(super) fn condition(&self) -> Option<&Condition> {
        let mut conditions = self.status.conditions.iter().flatten();
        conditions.find(|condition| condition.kind == CONDITION)
    }

    /// Returns the extended resource for which a request of the pod's claim for extended resources was made.
    pub(super) fn extended_resource(&self, container: &str, request: &str) -> Option<&str> {
        let mappings = &self
            .status
            .extended_resource_claim_status
            .as_ref()?
            .request_mappings;
        let mapping = mappings
            .iter()
            .find(|each| each.container_name == container && each.request_name == request)?;
        Some(&mapping.resource_name)
    }
}

impl ContainerStatus {
    pub(super) fn resources(&self) -> &[ResourceStatus] {
        self.allocated_resources_status.as_deref().unwrap_or_default()
    }
}
