//! Pods in the format of `-o json`. The keys are an interface.

use std::collections::BTreeMap;

use devlet_client::v1;
use serde::Serialize;

use super::claims::{AdmittedClaim, PodClaim, UsedDevice, admitted};
use super::time;
use crate::output::or_dash;
use crate::table::Tone;

#[derive(Debug, Clone, Serialize)]
pub(super) struct PodId {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
}

impl From<v1::PodId> for PodId {
    fn from(id: v1::PodId) -> Self {
        Self {
            uid: id.uid,
            namespace: id.namespace,
            name: id.name,
        }
    }
}

impl PodId {
    /// Returns `namespace/name`, or the UID of a pod without a name.
    pub(super) fn short(&self) -> String {
        if self.name.is_empty() {
            self.uid.clone()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }
}

/// Returns `namespace/name (UID)`, or the UID of a pod without a name.
pub(super) fn id_text(id: &v1::PodId) -> String {
    if id.name.is_empty() {
        id.uid.clone()
    } else {
        format!("{}/{} ({})", id.namespace, id.name, id.uid)
    }
}

/// A pod with the run options of its containers: the answer to `devlet admit` and `devlet options`.
#[derive(Debug, Serialize)]
pub(super) struct Admitted {
    pub(super) pod: PodId,
    pub(super) claims: Vec<AdmittedClaim>,
    pub(super) containers: Vec<Container>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) devices: Vec<Devices>,
    #[serde(flatten)]
    pub(super) options: RunOptions,
}

#[derive(Debug, Serialize)]
pub(super) struct Devices {
    pub(super) resource: String,
    pub(super) ids: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RunOptions {
    pub(super) envs: BTreeMap<String, String>,
    pub(super) mounts: Vec<Mount>,
    pub(super) device_nodes: Vec<DeviceNode>,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) cdi_devices: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mount {
    pub(super) container_path: String,
    pub(super) host_path: String,
    pub(super) read_only: bool,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeviceNode {
    pub(super) container_path: String,
    pub(super) host_path: String,
    pub(super) permissions: String,
}

impl From<v1::RunOptions> for RunOptions {
    fn from(options: v1::RunOptions) -> Self {
        let mount = |mount: v1::Mount| Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            read_only: mount.read_only,
        };
        let node = |node: v1::DeviceNode| DeviceNode {
            container_path: node.container_path,
            host_path: node.host_path,
            permissions: node.permissions,
        };
        Self {
            envs: options.envs,
            mounts: options.mounts.into_iter().map(mount).collect(),
            device_nodes: options.device_nodes.into_iter().map(node).collect(),
            annotations: options.annotations,
            cdi_devices: options.cdi_devices,
        }
    }
}

impl RunOptions {
    /// Returns the options as rows: kind and value.
    pub(super) fn lines(&self) -> Vec<[String; 2]> {
        let line = |what: &str, text: String| [what.to_owned(), text];
        let envs = self
            .envs
            .iter()
            .map(|(name, value)| line("env", format!("{name}={value}")));
        let nodes = self
            .device_nodes
            .iter()
            .map(|node| line("device node", node.text()));
        let mounts = self.mounts.iter().map(|mount| line("mount", mount.text()));
        let annotations = self.annotations.iter();
        let annotations = annotations.map(|(key, value)| line("annotation", format!("{key}={value}")));
        let cdi = self
            .cdi_devices
            .iter()
            .map(|name| line("CDI device", name.clone()));
        envs.chain(nodes)
            .chain(mounts)
            .chain(annotations)
            .chain(cdi)
            .collect()
    }
}

impl Mount {
    fn text(&self) -> String {
        let mode = if self.read_only { "ro" } else { "rw" };
        format!("{} -> {} ({mode})", self.host_path, self.container_path)
    }
}

impl DeviceNode {
    fn text(&self) -> String {
        format!(
            "{} -> {} ({})",
            self.host_path, self.container_path, self.permissions
        )
    }
}

impl From<v1::Container> for Container {
    fn from(container: v1::Container) -> Self {
        let held = |held: v1::HeldDevices| Devices {
            resource: held.resource,
            ids: held.ids,
        };
        Self {
            name: container.name,
            devices: container.devices.into_iter().map(held).collect(),
            options: container.options.unwrap_or_default().into(),
        }
    }
}

impl From<v1::Pod> for Admitted {
    fn from(pod: v1::Pod) -> Self {
        Self {
            pod: pod.id.unwrap_or_default().into(),
            claims: admitted(pod.claims),
            containers: pod.containers.into_iter().map(Container::from).collect(),
        }
    }
}

/// Returns the texts of conflicts between the plugins of a container.
pub(super) fn conflict_texts(container: &v1::Container) -> impl Iterator<Item = String> {
    container.conflicts.iter().map(|conflict| {
        let what = match conflict.what.as_str() {
            "env" => "the variable",
            "mount" => "the mount on",
            "deviceNode" => "the device node",
            "annotation" => "the annotation",
            other => other,
        };
        format!(
            "container {}: the plugins of {} and {} disagree about {what} {}; the first one is used",
            container.name, conflict.kept, conflict.dropped, conflict.key
        )
    })
}

/// A pod in `get` and `describe`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Pod {
    #[serde(flatten)]
    pub(super) id: PodId,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) source: &'static str,
    /// `None` if unknown.
    pub(super) admitted_at: Option<String>,
    #[serde(skip)]
    pub(super) age_ms: u64,
    pub(super) before_reboot: bool,
    /// Set for a pod of an API server that waits for its admission, or for the end of its removal.
    pub(super) waiting: Option<Waiting>,
    pub(super) claims: Vec<PodClaim>,
    pub(super) containers: Vec<PodContainer>,
}

/// The reason why a pod waits.
#[derive(Debug, Serialize)]
pub(super) struct Waiting {
    pub(super) reason: String,
    pub(super) since: String,
    #[serde(skip)]
    age_ms: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodContainer {
    pub(super) name: String,
    /// `None` if unknown.
    pub(super) kind: Option<&'static str>,
    pub(super) devices: Vec<PodDevices>,
    pub(super) claim_devices: Vec<UsedDevice>,
    #[serde(flatten)]
    pub(super) options: RunOptions,
    pub(super) conflicts: Vec<Conflict>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodDevices {
    pub(super) resource: String,
    pub(super) ids: Vec<String>,
    pub(super) pre_start_required: bool,
    /// Devices by NUMA node, -1 for those without one.
    pub(super) numa_nodes: BTreeMap<i64, Vec<String>>,
}

#[derive(Debug, Serialize)]
pub(super) struct Conflict {
    pub(super) what: String,
    pub(super) key: String,
    pub(super) kept: String,
    pub(super) dropped: String,
}

impl From<v1::Pod> for Pod {
    fn from(pod: v1::Pod) -> Self {
        let source = match pod.source() {
            v1::PodSource::Unspecified => "unknown",
            v1::PodSource::Api => "api",
            v1::PodSource::Embedder => "embedder",
            v1::PodSource::Imported => "imported",
            v1::PodSource::Kubernetes => "kubernetes",
            v1::PodSource::Kubelet => "kubelet",
        };
        let waiting = |waiting: v1::PodWaiting| Waiting {
            reason: waiting.reason,
            since: time::moment(waiting.since_ms),
            age_ms: waiting.age_ms,
        };
        Self {
            id: pod.id.unwrap_or_default().into(),
            waiting: pod.waiting.map(waiting),
            labels: pod.labels,
            source,
            admitted_at: time::known_moment(pod.admitted_at_ms),
            age_ms: pod.age_ms,
            before_reboot: pod.before_reboot,
            claims: pod.claims.into_iter().map(PodClaim::from).collect(),
            containers: pod.containers.into_iter().map(PodContainer::from).collect(),
        }
    }
}

impl From<v1::Container> for PodContainer {
    fn from(container: v1::Container) -> Self {
        let kind = match container.kind() {
            v1::ContainerKind::Unspecified => None,
            v1::ContainerKind::Init => Some("init"),
            v1::ContainerKind::Sidecar => Some("sidecar"),
            v1::ContainerKind::App => Some("app"),
        };
        let held = |held: v1::HeldDevices| PodDevices {
            resource: held.resource,
            ids: held.ids,
            pre_start_required: held.pre_start_required,
            numa_nodes: held.numa.into_iter().map(|numa| (numa.node, numa.ids)).collect(),
        };
        let conflict = |conflict: v1::Conflict| Conflict {
            what: conflict.what,
            key: conflict.key,
            kept: conflict.kept,
            dropped: conflict.dropped,
        };
        Self {
            name: container.name,
            kind,
            devices: container.devices.into_iter().map(held).collect(),
            claim_devices: container
                .claim_devices
                .into_iter()
                .map(UsedDevice::from)
                .collect(),
            options: container.options.unwrap_or_default().into(),
            conflicts: container.conflicts.into_iter().map(conflict).collect(),
        }
    }
}

impl Pod {
    /// Returns the age for people, or the time for which the pod waits; `-` if unknown.
    pub(super) fn age_text(&self) -> String {
        match (&self.waiting, &self.admitted_at) {
            (Some(waiting), _) => time::age(waiting.age_ms),
            (None, Some(_)) => time::age(self.age_ms),
            (None, None) => "-".to_owned(),
        }
    }

    /// Returns `false` for a pod that waits and holds nothing.
    pub(super) fn is_recorded(&self) -> bool {
        self.waiting.is_none() || self.admitted_at.is_some()
    }

    pub(super) fn waiting_text(&self) -> String {
        let reason = self.waiting.as_ref().map(|waiting| waiting.reason.clone());
        or_dash(reason.unwrap_or_default())
    }

    pub(super) fn tone(&self) -> Tone {
        match self.waiting {
            Some(_) => Tone::Waiting,
            None => Tone::Plain,
        }
    }

    /// Returns each device once, by resource: containers of a pod may reuse devices.
    pub(super) fn devices(&self) -> BTreeMap<&str, std::collections::BTreeSet<&str>> {
        let mut devices: BTreeMap<&str, std::collections::BTreeSet<&str>> = BTreeMap::new();
        for held in self.containers.iter().flat_map(|container| &container.devices) {
            devices
                .entry(&held.resource)
                .or_default()
                .extend(held.ids.iter().map(String::as_str));
        }
        devices
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node::samples;

    #[test]
    fn an_admitted_pod_has_exactly_the_documented_keys() {
        let shown = serde_json::to_value(Admitted::from(samples::pod())).unwrap();
        let expected = json!({
            "pod": {"uid": "u-1", "namespace": "default", "name": "job1"},
            "claims": [{
                "name": "gpu",
                "namespace": "default",
                "uid": "c-1",
                "drivers": [
                    {"name": "gpu.acme.com", "devices": [{
                        "requests": ["big"], "pool": "node-1", "device": "gpu-0", "shareID": null,
                        "cdiDevices": ["acme.com/gpu=gpu-0"],
                    }]},
                    {"name": "nic.acme.com", "devices": []},
                ],
            }],
            "containers": [{
                "name": "main",
                "devices": [{"resource": "acme.com/gpu", "ids": ["gpu-0"]}],
                "envs": {"GPU": "gpu-0"},
                "mounts": [{"containerPath": "/usr/acme", "hostPath": "/opt/acme", "readOnly": true}],
                "deviceNodes": [{"containerPath": "/dev/gpu", "hostPath": "/dev/null", "permissions": "rw"}],
                "annotations": {"acme.com/slot": "3"},
                "cdiDevices": ["acme.com/gpu=gpu-0"],
            }],
        });
        assert_eq!(shown, expected);
        let keys: Vec<&String> = shown.as_object().unwrap().keys().collect();
        assert_eq!(keys.len(), 3);
    }

    #[test]
    fn a_container_without_devices_has_all_keys() {
        let bare = v1::Container {
            name: "log".into(),
            ..Default::default()
        };
        let expected = json!({
            "name": "log", "devices": [], "envs": {}, "mounts": [], "deviceNodes": [], "annotations": {},
            "cdiDevices": [],
        });
        assert_eq!(serde_json::to_value(Container::from(bare)).unwrap(), expected);
    }

    #[test]
    fn a_listed_pod_has_additional_keys() {
        let shown = serde_json::to_value(Pod::from(samples::pod())).unwrap();
        assert_eq!(shown["uid"], "u-1");
        assert_eq!(shown["source"], "api");
        assert_eq!(shown["labels"], json!({"app": "train"}));
        assert_eq!(shown["admittedAt"], "2023-11-14T22:13:20Z");
        assert_eq!(shown["containers"][0]["kind"], "app");
        assert_eq!(
            shown["containers"][0]["devices"][0]["numaNodes"],
            json!({"1": ["gpu-0"]})
        );
        assert_eq!(shown["containers"][0]["envs"], json!({"GPU": "gpu-0"}));
        let device = &shown["containers"][0]["claimDevices"][0];
        assert_eq!(device["podClaim"], "mine");
        assert_eq!(device["claim"]["uid"], "c-1");
        assert_eq!(
            (&device["device"], &device["health"]),
            (&json!("gpu-0"), &json!("unhealthy"))
        );
        assert_eq!(shown["claims"][0]["podClaim"], "mine");
        assert_eq!(shown["claims"][0]["name"], "gpu");
    }
}
