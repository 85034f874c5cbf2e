//! Ids of devices, from facts that stay when nodes are numbered in another order.

use crate::node::{Node, Usb};
use crate::rule::{GroupBy, Rule};
use crate::value::IdSource;

/// Returns what nodes of one device have in common. Nodes without it are devices of their own.
pub(crate) fn group(rule: &Rule, node: &Node) -> String {
    let port = node.usb.as_ref().map(|usb| usb.port.clone());
    let group = match rule.group_by {
        None => None,
        Some(GroupBy::UsbDevice) => port,
        Some(GroupBy::Device) => port
            .or(node.pci.as_ref().map(|pci| pci.address.clone()))
            .or(node.parent.clone()),
        Some(GroupBy::Rule) => Some("rule".into()),
    };
    group.unwrap_or_else(|| node.path.clone())
}

/// Returns the id of a device, or the property that no node has.
pub(crate) fn id(rule: &Rule, nodes: &[&Node]) -> Result<String, String> {
    let Some(node) = nodes.first() else {
        return Err(String::new());
    };
    let base = match &rule.id_from {
        IdSource::Serial => serial(node),
        IdSource::Port => port(node),
        IdSource::Property(name) => {
            let mut values = nodes.iter().filter_map(|node| node.properties.get(name));
            values.next().cloned().ok_or_else(|| name.clone())?
        }
    };
    let is_part = node.usb.is_some() || node.pci.is_some() || node.parent.is_some();
    let id = match rule.group_by {
        Some(GroupBy::Rule) if rule.id_from == IdSource::Serial => "all".into(),
        Some(_) => base,
        None if is_part => {
            let mut parts = vec![base];
            parts.extend(node.function.iter().cloned());
            parts.push(stem(&node.path));
            parts.join("-")
        }
        None => base,
    };
    Ok(plain(&id))
}

fn serial(node: &Node) -> String {
    match &node.usb {
        Some(Usb {
            vendor,
            product,
            serial,
            ..
        }) if !serial.is_empty() => format!("{vendor:04x}:{product:04x}:{serial}"),
        _ => port(node),
    }
}

fn port(node: &Node) -> String {
    if let Some(usb) = &node.usb {
        return usb.port.clone();
    }
    if let Some(pci) = &node.pci {
        return pci.address.clone();
    }
    let name = || node.path.trim_start_matches("/dev/").replace('/', "-");
    node.parent.clone().unwrap_or_else(name)
}

/// Returns the name of a node without the numbers that the kernel counts up: `ttyUSB`, `renderD`, `pcmCDp`.
fn stem(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or_default();
    let mut stem = String::new();
    for letter in name.trim_end_matches(|last: char| last.is_ascii_digit()).chars() {
        let is_number = letter.is_ascii_digit() && stem.ends_with(|last: char| last.is_ascii_uppercase());
        if !is_number {
            stem.push(letter);
        }
    }
    stem.trim_end_matches('-').to_owned()
}

/// Replaces characters that are awkward in commands and files.
pub(crate) fn plain(id: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._:@-".contains(letter);
    id.chars()
        .map(|letter| if is_plain(letter) { letter } else { '_' })
        .collect()
}
