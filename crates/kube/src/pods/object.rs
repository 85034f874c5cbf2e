//! A Pod of the API server, trimmed while it is decoded, and its stage of life.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Duration;

use devlet_agent::manifest::PodObject;
use devlet_core::{DriverName, PodName, PodUid};
use k8s_openapi::api::core::v1::Pod;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::events::PodRef;
use crate::health::PodStatus;

/// A Pod object without the parts that are not about devices.
#[derive(Debug, Clone)]
pub(crate) struct WatchedPod {
    /// Name, namespace, UID and resource version only.
    metadata: ObjectMeta,
    pub(crate) stage: Stage,
    /// The drivers that its removal abandons.
    pub(crate) abandoned: BTreeSet<DriverName>,
    /// Its devices and claims, or the reason why they cannot be read.
    pub(crate) object: Result<PodObject, String>,
    /// Its status, for the health of its devices.
    pub(crate) status: PodStatus,
}

/// The stage of a pod's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its containers run, or shall run.
    Active,
    /// It is being deleted. Its containers may still run, or the node agent has not reported them.
    Terminating {
        /// `true` if the node agent has reported that they run.
        has_started: bool,
        /// `true` if the node agent has reported each of them, and none as running: some have never been started, or wait to be
        /// started again.
        is_idle: bool,
        /// Time that they have to end.
        grace: Duration,
    },
    /// Its containers have ended for good.
    Ended {
        /// `true` if the pod is being deleted.
        is_deleted: bool,
    },
}

impl WatchedPod {
    /// Returns the pod's identity, or `None` if the object lacks it.
    pub(crate) fn identity(&self) -> Option<PodRef> {
        let ObjectMeta {
            name, namespace, uid, ..
        } = &self.metadata;
        let name = PodName {
            namespace: namespace.clone()?,
            name: name.clone()?,
        };
        let uid = PodUid::from(uid.as_deref()?);
        Some(PodRef { name, uid })
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Parts {
    metadata: Metadata,
    spec: Spec,
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    deletion_timestamp: Option<String>,
    deletion_grace_period_seconds: Option<i64>,
    annotations: Option<Annotations>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Annotations {
    /// DRA drivers, separated by commas, whose unprepare calls a removal does not wait for.
    #[serde(rename = "devlet.dev/abandon-driver")]
    abandon_driver: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    containers: Vec<serde::de::IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    phase: Option<String>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    state: Option<State>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct State {
    running: Option<serde::de::IgnoredAny>,
    terminated: Option<serde::de::IgnoredAny>,
}

impl ContainerStatus {
    fn is_running(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.running.is_some())
    }

    /// A container that waits may run already, because statuses lag behind.
    fn is_terminated(&self) -> bool {
        self.state
            .as_ref()
            .is_some_and(|state| state.terminated.is_some())
    }
}

impl Parts {
    fn stage(&self) -> Stage {
        let is_deleted = self.metadata.deletion_timestamp.is_some();
        let phase = self.status.phase.as_deref().unwrap_or_default();
        let has_running = self.status.has_running();
        // Controllers write `Failed` while containers run.
        let has_ended = matches!(phase, "Succeeded" | "Failed") && !has_running;
        let has_stopped = is_deleted && !has_running && self.are_all(ContainerStatus::is_terminated);
        match (has_ended || has_stopped, is_deleted) {
            (true, _) => Stage::Ended { is_deleted },
            (false, true) => Stage::Terminating {
                has_started: has_running || !matches!(phase, "" | "Pending"),
                is_idle: !has_running && self.are_all(|_| true),
                grace: self.metadata.grace(),
            },
            (false, false) => Stage::Active,
        }
    }

    /// Returns `true` if every container is reported, and has this property.
    fn are_all(&self, property: impl Fn(&ContainerStatus) -> bool) -> bool {
        let all = self.status.container_statuses.as_deref().unwrap_or_default();
        all.len() >= self.spec.containers.len() && all.iter().all(property)
    }
}

impl Metadata {
    fn grace(&self) -> Duration {
        let seconds = self.deletion_grace_period_seconds.unwrap_or_default();
        Duration::from_secs(seconds.try_into().unwrap_or_default())
    }
}

impl Status {
    fn has_running(&self) -> bool {
        let all = [
            &self.init_container_statuses,
            &self.container_statuses,
            &self.ephemeral_container_statuses,
        ];
        let mut all = all.into_iter().flatten().flatten();
        all.any(ContainerStatus::is_running)
    }
}

/// Returns the drivers in the annotation.
fn abandoned(annotations: Option<&Annotations>) -> BTreeSet<DriverName> {
    let names = annotations.and_then(|annotations| annotations.abandon_driver.as_deref());
    let names = names.unwrap_or_default().split(',').map(str::trim);
    let names = names.filter(|name| !name.is_empty());
    names.map(DriverName::from).collect()
}

impl<'de> Deserialize<'de> for WatchedPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let parts = Parts::deserialize(&value).map_err(D::Error::custom)?;
        Ok(Self {
            stage: parts.stage(),
            abandoned: abandoned(parts.metadata.annotations.as_ref()),
            // One pod that cannot be read must not hide the others.
            object: PodObject::deserialize(&value).map_err(|error| error.to_string()),
            status: PodStatus::deserialize(&value).unwrap_or_default(),
            metadata: ObjectMeta {
                name: parts.metadata.name,
                namespace: parts.metadata.namespace,
                uid: parts.metadata.uid,
                resource_version: parts.metadata.resource_version,
                ..ObjectMeta::default()
            },
        })
    }
}

impl Resource for WatchedPod {
    type DynamicType = ();
    type Scope = <Pod as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        Pod::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Pod::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Pod::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests;
