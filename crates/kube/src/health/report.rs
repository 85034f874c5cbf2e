//! The health of the devices of a pod, in the terms of its status.

use std::collections::{BTreeMap, BTreeSet};

use devlet_agent::agent::Agent;
use devlet_core::dra::health::DeviceHealth;
use devlet_core::dra::view::ClaimedDeviceView;
use devlet_core::{Allocation, Availability, ContainerName, DeviceId, Moment, Node, PodUid};
use serde_json::{Value, json};

use super::status::{CONDITION, Condition, DeviceStatus, PodStatus, ResourceStatus, SeenPod};

/// Maximum devices in the message of a condition.
const MAX_LISTED: usize = 8;

/// The health of the devices of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct PodHealth {
    /// By container and by resource or claim, sorted.
    containers: BTreeMap<ContainerName, BTreeMap<String, BTreeSet<DeviceStatus>>>,
    /// Resources and drivers with an unhealthy device.
    pub(super) unhealthy: BTreeSet<String>,
}

impl PodHealth {
    /// Returns the health of the devices of a pod as the node knows it now. Takes one short lock.
    pub(super) fn current(agent: &Agent, seen: &SeenPod) -> Self {
        let now = agent.store().now();
        let SeenPod { pod, object } = seen;
        agent.store().read(|node| Self::of(node, &pod.uid, object, now))
    }

    /// Returns the health of the devices of a pod. `object` has the names of extended resources that a driver serves.
    fn of(node: &Node, uid: &PodUid, object: &PodStatus, now: Moment) -> Self {
        let mut health = Self::default();
        let Some(pod) = node.pod(uid) else {
            return health;
        };
        for allocation in &pod.allocations {
            let Allocation {
                container, resource, ..
            } = allocation;
            for id in &allocation.devices {
                let device = status(id.to_string(), plugin_health(node, allocation, id), String::new());
                health.add(container, resource.as_str(), resource.to_string(), device);
            }
        }
        let containers: BTreeSet<&ContainerName> =
            pod.claim_uses.iter().map(|each| &each.container).collect();
        for container in containers {
            for view in node.claimed_devices(uid, container.as_str(), now) {
                let Some(name) = name(container, &view, object) else {
                    continue;
                };
                let driver = view.driver.to_string();
                let id = view.device.cdi_devices.first().cloned().unwrap_or_else(|| {
                    let device = &view.device;
                    format!("{driver}/{}/{}", device.pool, device.device)
                });
                health.add(container, &driver, name, status(id, view.health, view.message));
            }
        }
        health
    }

    fn add(&mut self, container: &ContainerName, source: &str, name: String, device: DeviceStatus) {
        if device.health == text(DeviceHealth::Unhealthy) {
            self.unhealthy.insert(source.to_owned());
        }
        let containers = self.containers.entry(container.clone()).or_default();
        let devices = containers.entry(name).or_default();
        // Two devices of a claim may have the same CDI id, and ids are unique in a status: the worse health counts.
        let same = devices.iter().find(|each| each.id == device.id).cloned();
        match same {
            Some(same) if rank(&same.health) >= rank(&device.health) => {}
            Some(same) => {
                devices.remove(&same);
                devices.insert(device);
            }
            None => {
                devices.insert(device);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    fn resources(&self, container: &str) -> Vec<ResourceStatus> {
        let resources = self.containers.get(container).into_iter().flatten();
        let resources = resources.map(|(name, devices)| ResourceStatus {
            name: name.clone(),
            resources: devices.iter().cloned().collect(),
        });
        resources.collect()
    }

    /// Returns the JSON patch that writes the health into the statuses of containers; `None` if it is there. Containers
    /// without a status are left out: only the node agent can create it.
    pub(super) fn patch(&self, uid: &PodUid, object: &PodStatus) -> Option<Value> {
        let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid.as_str() })];
        for (path, status) in object.containers() {
            let resources = self.resources(&status.name);
            if !resources.is_empty() && resources != status.resources() {
                // The list may have changed meanwhile.
                operations
                    .push(json!({ "op": "test", "path": format!("{path}/name"), "value": status.name }));
                let path = format!("{path}/allocatedResourcesStatus");
                operations.push(json!({ "op": "add", "path": path, "value": resources }));
            }
        }
        (operations.len() > 1).then_some(Value::Array(operations))
    }

    /// Returns the strategic merge patch that writes the health as a condition of the pod; `None` if it is there.
    pub(super) fn condition_patch(&self, uid: &PodUid, object: &PodStatus, now: &str) -> Option<Value> {
        let condition = self.condition();
        let known = object.condition();
        if known == Some(&condition) {
            return None;
        }
        let has_same_status = known.is_some_and(|known| known.status == condition.status);
        let mut condition = json!(condition);
        if !has_same_status {
            condition["lastTransitionTime"] = json!(now);
        }
        Some(json!({ "metadata": { "uid": uid.as_str() }, "status": { "conditions": [condition] } }))
    }

    fn condition(&self) -> Condition {
        let all = self.containers.iter().flat_map(|(container, resources)| {
            let devices = resources
                .iter()
                .flat_map(|(name, devices)| devices.iter().map(move |device| (name, device)));
            devices.map(move |(name, device)| (container, name, device))
        });
        let bad: Vec<_> = all
            .filter(|(.., device)| device.health != text(DeviceHealth::Healthy))
            .collect();
        let (status, reason) = if bad.is_empty() {
            ("True", "DevicesHealthy")
        } else if self.unhealthy.is_empty() {
            ("Unknown", "DeviceHealthUnknown")
        } else {
            ("False", "DevicesUnhealthy")
        };
        let describe = |(container, name, device): &(&ContainerName, &String, &DeviceStatus)| {
            let health = device.health.to_lowercase();
            let DeviceStatus { id, message, .. } = device;
            match message {
                Some(message) => format!("container {container}: {name} {id} is {health}: {message}"),
                None => format!("container {container}: {name} {id} is {health}"),
            }
        };
        let mut message: Vec<String> = bad.iter().take(MAX_LISTED).map(describe).collect();
        if bad.len() > MAX_LISTED {
            message.push(format!("and {} more", bad.len() - MAX_LISTED));
        }
        Condition {
            kind: CONDITION.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: message.join("; "),
        }
    }
}

/// Returns the name of a claimed device's entry; `None` if the extended resource is not known.
fn name(container: &ContainerName, view: &ClaimedDeviceView, object: &PodStatus) -> Option<String> {
    let request = view.request.as_deref();
    match (view.claim.as_str(), request) {
        ("", request) => {
            let resource = object.extended_resource(container.as_str(), request.unwrap_or_default())?;
            Some(resource.to_owned())
        }
        (claim, Some(request)) => Some(format!("claim:{claim}/{request}")),
        (claim, None) => Some(format!("claim:{claim}")),
    }
}

/// Returns the health of a device of a plugin. Without a plugin, it is unknown.
fn plugin_health(node: &Node, allocation: &Allocation, id: &DeviceId) -> DeviceHealth {
    if node.is_healthy(&allocation.resource, id) {
        DeviceHealth::Healthy
    } else if node.availability(&allocation.resource) == Availability::Serving {
        DeviceHealth::Unhealthy
    } else {
        DeviceHealth::Unknown
    }
}

fn status(id: String, health: DeviceHealth, message: String) -> DeviceStatus {
    DeviceStatus {
        id,
        health: text(health).to_owned(),
        message: (!message.is_empty()).then_some(message),
    }
}

fn text(health: DeviceHealth) -> &'static str {
    match health {
        DeviceHealth::Unknown => "Unknown",
        DeviceHealth::Healthy => "Healthy",
        DeviceHealth::Unhealthy => "Unhealthy",
    }
}

fn rank(health: &str) -> u8 {
    match health {
        "Healthy" => 0,
        "Unknown" => 1,
        _ => 2,
    }
}

#[cfg(test)]
impl PodHealth {
    /// One unhealthy device of this resource.
    pub(super) fn unhealthy_device(resource: &str) -> Self {
        let mut health = Self::default();
        let device = status("0".to_owned(), DeviceHealth::Unhealthy, String::new());
        health.add(&"main".into(), resource, resource.to_owned(), device);
        health
    }
}

#[cfg(test)]
mod tests;
