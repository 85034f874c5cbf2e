//! Resources, devices and device plugins in the format of `-o json`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::dra_device::{self, DraDevice};
use super::pods::PodId;
use super::time;
use crate::output::or_dash;
use crate::table::Tone;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Resource {
    pub(super) name: String,
    pub(super) capacity: u64,
    pub(super) allocatable: u64,
    pub(super) held: u64,
    pub(super) free: u64,
    pub(super) state: &'static str,
    pub(super) plugins: Vec<String>,
    /// The last plugin, while none is connected.
    pub(super) last_plugin: Option<LastPlugin>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LastPlugin {
    pub(super) endpoint: String,
    pub(super) gone_since: String,
    #[serde(skip)]
    pub(super) gone_for_ms: u64,
}

impl From<v1::LastPlugin> for LastPlugin {
    fn from(last: v1::LastPlugin) -> Self {
        Self {
            endpoint: last.endpoint,
            gone_since: time::moment(last.gone_since_ms),
            gone_for_ms: last.gone_for_ms,
        }
    }
}

impl From<v1::Resource> for Resource {
    fn from(resource: v1::Resource) -> Self {
        let state = match resource.state() {
            v1::ResourceState::Unspecified => "unknown",
            v1::ResourceState::Serving => "serving",
            v1::ResourceState::NotListed => "notListed",
            v1::ResourceState::Gone => "gone",
        };
        Self {
            name: resource.name,
            capacity: resource.capacity,
            allocatable: resource.allocatable,
            held: resource.held,
            free: resource.free,
            state,
            plugins: resource.plugins,
            last_plugin: resource.last_plugin.map(LastPlugin::from),
        }
    }
}

impl Resource {
    pub(super) fn tone(&self) -> Tone {
        match self.state {
            "serving" => Tone::Plain,
            "notListed" => Tone::Waiting,
            _ => Tone::Bad,
        }
    }

    /// Returns the last plugin, and the time since it disconnected.
    pub(super) fn last_text(&self) -> String {
        self.last_plugin.as_ref().map_or_else(String::new, |last| {
            format!("{}, gone for {}", last.endpoint, time::age(last.gone_for_ms))
        })
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Device {
    pub(super) resource: String,
    pub(super) id: String,
    pub(super) health: &'static str,
    pub(super) numa_nodes: Vec<i64>,
    pub(super) holders: Vec<PodId>,
    /// Only for devices of DRA drivers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dra: Option<DraDevice>,
}

impl From<v1::Device> for Device {
    fn from(device: v1::Device) -> Self {
        let health = match (&device.dra, device.listed, device.healthy) {
            (Some(dra), ..) => dra_device::health(dra.health()),
            (None, false, _) => "notListed",
            (None, true, true) => "healthy",
            (None, true, false) => "unhealthy",
        };
        Self {
            resource: device.resource,
            id: device.id,
            health,
            numa_nodes: device.numa_nodes,
            holders: device.holders.into_iter().map(PodId::from).collect(),
            dra: device.dra.map(DraDevice::from),
        }
    }
}

impl Device {
    pub(super) fn tone(&self) -> Tone {
        match self.health {
            "unhealthy" => Tone::Bad,
            "notListed" => Tone::Waiting,
            _ => Tone::Plain,
        }
    }

    pub(super) fn numa_text(&self) -> String {
        let nodes: Vec<String> = self.numa_nodes.iter().map(ToString::to_string).collect();
        or_dash(nodes.join(","))
    }

    pub(super) fn holders_text(&self) -> String {
        let holders: Vec<String> = self.holders.iter().map(PodId::short).collect();
        match holders.is_empty() {
            true => self.claims_text(),
            false => holders.join(", "),
        }
    }

    /// Returns the claims that have the device.
    pub(super) fn claims_text(&self) -> String {
        let claims = self.dra.as_ref().map(DraDevice::claims_text);
        or_dash(claims.unwrap_or_default())
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Plugin {
    pub(super) resource: String,
    pub(super) endpoint: String,
    /// The user that it runs as.
    pub(super) uid: u32,
    pub(super) pre_start_required: bool,
    pub(super) preferred_allocation: bool,
    /// `None` if it was rejected.
    pub(super) connected_at: Option<String>,
    #[serde(skip)]
    pub(super) age_ms: u64,
    /// `None` before its first list.
    pub(super) devices: Option<u64>,
    pub(super) state: &'static str,
    pub(super) connection: String,
    /// `None` if it is connected.
    pub(super) rejection: Option<PluginRejection>,
}

/// Why a plugin was rejected when it registered.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PluginRejection {
    pub(super) reason: String,
    pub(super) rejected_at: String,
    pub(super) attempts: u64,
    pub(super) pid: Option<i32>,
}

impl From<v1::PluginRejection> for PluginRejection {
    fn from(rejection: v1::PluginRejection) -> Self {
        Self {
            reason: rejection.reason,
            rejected_at: time::moment(rejection.rejected_at_ms),
            attempts: rejection.attempts,
            pid: rejection.pid,
        }
    }
}

impl From<v1::Plugin> for Plugin {
    fn from(plugin: v1::Plugin) -> Self {
        let state = match (plugin.in_force, plugin.devices) {
            _ if plugin.rejection.is_some() => "rejected",
            (true, _) => "serving",
            (false, Some(_)) => "standby",
            (false, None) => "notListed",
        };
        Self {
            resource: plugin.resource,
            endpoint: plugin.endpoint,
            uid: plugin.uid,
            pre_start_required: plugin.pre_start_required,
            preferred_allocation: plugin.preferred_allocation,
            connected_at: plugin
                .rejection
                .is_none()
                .then(|| time::moment(plugin.connected_at_ms)),
            age_ms: plugin.age_ms,
            devices: plugin.devices,
            state,
            connection: plugin.connection,
            rejection: plugin.rejection.map(PluginRejection::from),
        }
    }
}

impl Plugin {
    pub(super) fn tone(&self) -> Tone {
        match self.state {
            "notListed" => Tone::Waiting,
            "rejected" => Tone::Bad,
            _ => Tone::Plain,
        }
    }

    /// Returns the reason of the rejection; `-` if the plugin is connected.
    pub(super) fn reason_text(&self) -> String {
        let reason = self.rejection.as_ref().map(|each| each.reason.clone());
        or_dash(reason.unwrap_or_default())
    }

    /// Returns the time since it connected, or since it was rejected.
    pub(super) fn age_text(&self) -> String {
        time::age(self.age_ms)
    }

    pub(super) fn options_text(&self) -> String {
        let options = [
            (self.pre_start_required, "pre-start"),
            (self.preferred_allocation, "preferred"),
        ];
        let set: Vec<&str> = options
            .iter()
            .filter(|(set, _)| *set)
            .map(|(_, name)| *name)
            .collect();
        or_dash(set.join(","))
    }
}
