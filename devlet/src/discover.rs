//! `devlet discover`: the devices of this host, found with a catalog of rules, and the rules to copy.

use devlet_host_devices::{Device, Host, Inventory, Node, Rule};
use serde::Serialize;

use crate::Outcome;
use crate::config::Settings;
use crate::output::{self, Output, or_dash, table};

/// A configuration with a rule per line.
const CATALOG: &str = include_str!("discover/catalog.yaml");

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Discovered {
    devices: Vec<DeviceShown>,
    /// The rules that offer the devices, for the configuration.
    host_devices: Vec<Rule>,
    /// The same as text.
    #[serde(skip)]
    lines: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct DeviceShown {
    resource: String,
    id: String,
    nodes: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    with: Vec<String>,
    /// The name of a USB device, and USB or PCI ids.
    about: String,
}

pub(crate) fn run(output: Output) -> anyhow::Result<Outcome> {
    let discovered = discover(&Host::new("/"))?;
    if matches!(output, Output::Table | Output::Wide) && discovered.devices.is_empty() {
        output::warn("no known devices on this host; `hostDevices` can name any node below /dev");
        return Ok(Outcome::Fine);
    }
    output::print(output, &discovered, Discovered::text)?;
    Ok(Outcome::Fine)
}

fn discover(host: &Host) -> anyhow::Result<Discovered> {
    let rules = Settings::parse(CATALOG)?.host_devices;
    let lines = CATALOG.lines().filter(|line| line.starts_with('-'));
    let nodes = host.nodes();
    let mut found = Discovered {
        devices: Vec::new(),
        host_devices: Vec::new(),
        lines: Vec::new(),
    };
    for (rule, line) in rules.into_iter().zip(lines) {
        // Shares would be listed one by one.
        let single = Rule {
            share: 1,
            ..rule.clone()
        };
        let scan = Inventory::new(host.clone(), vec![single]).scan();
        let devices: Vec<Device> = scan.resources.into_values().flatten().collect();
        if devices.is_empty() {
            continue;
        }
        let shown = devices.into_iter().map(|device| DeviceShown {
            resource: rule.resource.clone(),
            about: about(&device, &nodes),
            id: device.id,
            nodes: device.nodes,
            with: device.with,
        });
        found.devices.extend(shown);
        found.host_devices.push(rule);
        found.lines.push(line);
    }
    Ok(found)
}

/// Returns the names and ids of the device behind the first node.
fn about(device: &Device, nodes: &[Node]) -> String {
    let Some(node) = nodes.iter().find(|node| device.nodes.first() == Some(&node.path)) else {
        return String::new();
    };
    match (&node.usb, &node.pci) {
        (Some(usb), _) => format!("USB {:04x}:{:04x} {}", usb.vendor, usb.product, usb.name)
            .trim_end()
            .to_owned(),
        (_, Some(pci)) => format!("PCI {:04x}:{:04x}", pci.vendor, pci.device),
        _ => String::new(),
    }
}

impl Discovered {
    fn text(&self) -> String {
        let rows = self.devices.iter().map(|device| {
            let nodes: Vec<&str> = device
                .nodes
                .iter()
                .chain(&device.with)
                .map(String::as_str)
                .collect();
            [
                device.resource.clone(),
                device.id.clone(),
                nodes.join(" "),
                or_dash(device.about.clone()),
            ]
        });
        let table = table(["RESOURCE", "ID", "NODES", "DEVICE"], rows);
        format!(
            "{table}\nLines for the configuration file:\n\nhostDevices:\n{}\n",
            self.lines.join("\n")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalog_is_a_configuration_with_a_rule_per_line() {
        let rules = Settings::parse(CATALOG).unwrap().host_devices;
        let lines = CATALOG.lines().filter(|line| line.starts_with('-'));
        assert_eq!(rules.len(), lines.clone().count());
        for (rule, line) in rules.iter().zip(lines) {
            assert!(line.contains(&format!("resource: {},", rule.resource)), "{line}");
        }
    }
}
