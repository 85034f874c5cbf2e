//! `devlet describe device`: a device, and the pods and claims that hold it.

use devlet_client::{Client, v1};
use serde::Serialize;

use super::{field, no_such};
use crate::Outcome;
use crate::node::inventory::Device;
use crate::node::kind::Kind;
use crate::node::listing::Item as _;
use crate::node::pods::PodId;
use crate::node::select::Filter;
use crate::output::{self, Output, escape_control};

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
struct DeviceShown {
    #[serde(flatten)]
    device: Device,
    containers: Vec<Holder>,
}

/// A container that has the device.
#[derive(Debug, Serialize)]
struct Holder {
    pod: PodId,
    container: String,
}

pub(super) async fn run(client: &Client, name: &str, output: Output) -> anyhow::Result<Outcome> {
    let devices = client
        .list_devices(v1::ListDevicesRequest::default())
        .await?
        .devices;
    let devices: Vec<Device> = devices.into_iter().map(Device::from).collect();
    let filter = Filter {
        names: vec![name.to_owned()],
        ..Filter::default()
    };
    if let Some(problem) = filter.problems(&devices).first() {
        output::warn(&format!("error: {}", problem.text(Kind::Devices)));
        return Ok(Outcome::Bad);
    }
    let Some(device) = devices.into_iter().find(|device| device.is_called(name)) else {
        return Ok(no_such(Kind::Devices, name, std::iter::empty()));
    };
    let mut containers = Vec::new();
    for holder in &device.holders {
        let pods = client
            .list_pods(v1::ListPodsRequest {
                pod: holder.uid.clone(),
            })
            .await;
        // The pod may have been removed in the meantime.
        for pod in pods.map(|list| list.pods).unwrap_or_default() {
            for container in pod.containers {
                let has = |held: &v1::HeldDevices| {
                    held.resource == device.resource && held.ids.contains(&device.id)
                };
                let uses = |used: &v1::UsedDevice| {
                    let place = used.device.as_ref().map(|each| (&each.pool, &each.device));
                    let dra = device.dra.as_ref().map(|each| (&each.pool, &each.device));
                    dra.is_some() && used.driver == device.resource && place == dra
                };
                if container.devices.iter().any(has) || container.claim_devices.iter().any(uses) {
                    containers.push(Holder {
                        pod: holder.clone(),
                        container: container.name,
                    });
                }
            }
        }
    }
    output::print(output, &DeviceShown { device, containers }, DeviceShown::table)?;
    Ok(Outcome::Fine)
}

impl DeviceShown {
    fn table(&self) -> String {
        let device = &self.device;
        let (kind, message) = match &device.dra {
            Some(dra) => ("Driver:  ", dra.health_message.as_deref()),
            None => ("Resource:", None),
        };
        let message = message.map_or_else(String::new, |message| format!(" ({message})"));
        let health = field("Health:      ", &format!("{}{message}", device.health));
        let health = health.replacen(device.health, &device.tone().paint(device.health), 1);
        let mut text = format!(
            "{kind}    {}\nId:          {}\n{health}NUMA nodes:  {}\n",
            escape_control(&device.resource),
            escape_control(&device.id),
            device.numa_text(),
        );
        for claim in device.dra.iter().flat_map(|dra| &dra.claims) {
            text.push_str(&field("Claim:       ", &claim.text()));
        }
        if device.holders.is_empty() {
            text.push_str("Held by:     -\n");
        }
        for holder in &device.holders {
            let containers: Vec<&str> = self
                .containers
                .iter()
                .filter(|each| each.pod.uid == holder.uid)
                .map(|each| each.container.as_str())
                .collect();
            let containers = if containers.is_empty() {
                String::new()
            } else {
                format!(", in {}", containers.join(" and "))
            };
            text.push_str(&field(
                "Held by:     ",
                &format!("{}{containers}", holder.short()),
            ));
        }
        if device.holders.len() > 1 && device.dra.is_none() {
            let note = "it is not allocated again until all of these pods are removed";
            text.push_str(&field("Note:        ", note));
        }
        text
    }
}
