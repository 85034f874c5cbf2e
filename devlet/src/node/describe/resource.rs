//! `devlet describe resource`: a resource, its plugins and its devices.

use devlet_client::{Client, v1};
use serde::Serialize;

use super::{field, no_such};
use crate::Outcome;
use crate::node::inventory::{Device, Plugin, Resource};
use crate::node::kind::Kind;
use crate::node::time;
use crate::output::{self, Output, escape_control, table};
use crate::table::Cell;

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
struct ResourceShown {
    #[serde(flatten)]
    resource: Resource,
    connections: Vec<Plugin>,
    devices: Vec<Device>,
}

pub(super) async fn run(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let resources = client
        .list_resources(v1::ListResourcesRequest {})
        .await?
        .resources;
    let Some(resource) = resources.iter().find(|resource| resource.name == name) else {
        let known = resources.into_iter().map(|resource| resource.name);
        return Ok(no_such(Kind::Resources, &name, known));
    };
    let resource = resource.clone();
    let plugins = client.list_plugins(v1::ListPluginsRequest {}).await?.plugins;
    let devices = client
        .list_devices(v1::ListDevicesRequest {
            resource: name.clone(),
        })
        .await?
        .devices;
    let shown = ResourceShown {
        resource: resource.into(),
        connections: plugins
            .into_iter()
            .filter(|each| each.resource == name && each.rejection.is_none())
            .map(Plugin::from)
            .collect(),
        devices: devices.into_iter().map(Device::from).collect(),
    };
    output::print(output, &shown, ResourceShown::table)?;
    Ok(Outcome::Fine)
}

impl ResourceShown {
    fn table(&self) -> String {
        let resource = &self.resource;
        let mut text = format!(
            "Name:         {}\nState:        {}\nCapacity:     {}\nAllocatable:  {}\nHeld:         {}\nFree:         {}\n",
            escape_control(&resource.name),
            resource.tone().paint(resource.state),
            resource.capacity,
            resource.allocatable,
            resource.held,
            resource.free,
        );
        if resource.last_plugin.is_some() {
            text.push_str(&field("Last plugin:  ", &resource.last_text()));
        }
        if !self.connections.is_empty() {
            let plugins = self.connections.iter().map(|plugin| {
                let devices = plugin
                    .devices
                    .map_or_else(|| "-".to_owned(), |number| number.to_string());
                [
                    Cell::new(plugin.state).tone(plugin.tone()),
                    devices.into(),
                    plugin.uid.to_string().into(),
                    plugin.options_text().into(),
                    time::age(plugin.age_ms).into(),
                    plugin.endpoint.as_str().into(),
                ]
            });
            let header = ["STATE", "DEVICES", "UID", "OPTIONS", "AGE", "PLUGIN"];
            text.push_str(&format!("\n{}", table(header, plugins)));
        }
        if !self.devices.is_empty() {
            let devices = self.devices.iter().map(|device| {
                [
                    Cell::new(device.id.as_str()),
                    Cell::new(device.health).tone(device.tone()),
                    device.numa_text().into(),
                    device.holders_text().into(),
                ]
            });
            text.push_str(&format!(
                "\n{}",
                table(["DEVICE", "HEALTH", "NUMA", "HELD BY"], devices)
            ));
        }
        text
    }
}
