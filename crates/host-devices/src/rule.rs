//! A rule: the nodes that it matches, and the devices that are made of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::node::Node;
use crate::value::{Glob, HexId, IdSource, Permissions};

/// Maximum devices that one device is shared as.
const MAX_SHARES: u32 = 10_000;

/// One entry of `hostDevices`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rule {
    /// The name of the resource that the devices belong to.
    pub resource: String,
    /// The nodes of the devices. All given keys must match.
    #[serde(rename = "match")]
    pub matching: Match,
    /// The nodes that are one device; by default each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_by: Option<GroupBy>,
    /// The source of the ids.
    #[serde(default, skip_serializing_if = "is_default")]
    pub id_from: IdSource,
    /// Paths of nodes that each device needs besides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub with: Vec<String>,
    /// Number of devices that each device is offered as.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub share: u32,
    /// The path of the node inside the container; by default that of the host.
    #[serde(default, rename = "as", skip_serializing_if = "Option::is_none")]
    pub container_path: Option<String>,
    /// Access of a container to the nodes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub permissions: Permissions,
}

/// The nodes that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Match {
    /// A pattern of the path, or of a link that udev made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<Glob>,
    /// The subsystem of the kernel, such as `tty`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subsystem: Option<String>,
    /// The USB device that the node belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usb: Option<UsbMatch>,
    /// The PCI device that the node belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciMatch>,
    /// Patterns of properties of udev's database.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub udev: BTreeMap<String, Glob>,
}

/// A USB device; without keys, any.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct UsbMatch {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor: Option<HexId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<HexId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<Glob>,
}

/// A PCI device; without keys, any.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PciMatch {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor: Option<HexId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<HexId>,
    /// The address, such as `0000:03:00.*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<Glob>,
}

/// The nodes that are one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GroupBy {
    /// All matched nodes of a USB device.
    UsbDevice,
    /// All matched nodes of a USB, PCI or platform device.
    Device,
    /// All nodes that the rule matches.
    Rule,
}

/// Why a rule is not valid: the key, and the problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rule {number}: {key}: {problem}")]
pub struct InvalidRule {
    /// The number of the rule, beginning with 1.
    pub number: usize,
    /// The key of the rule, and the one below it.
    pub key: &'static str,
    /// The value of the key, if it is a text.
    pub value: Option<String>,
    problem: String,
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Rule {
    /// Returns `true` if all keys of `match` fit the node.
    pub fn matches(&self, node: &Node) -> bool {
        let matching = &self.matching;
        let Match {
            path,
            subsystem,
            usb,
            pci,
            udev,
        } = matching;
        path.as_ref()
            .is_none_or(|path| node.names().any(|name| path.matches(name)))
            && subsystem
                .as_ref()
                .is_none_or(|subsystem| *subsystem == node.subsystem)
            && usb.as_ref().is_none_or(|usb| usb.matches(node))
            && pci.as_ref().is_none_or(|pci| pci.matches(node))
            && udev.iter().all(|(key, pattern)| {
                node.properties
                    .get(key)
                    .is_some_and(|value| pattern.matches(value))
            })
    }

    /// Returns the first value that is not valid: the key, the value, and the problem.
    fn problem(&self) -> Option<(&'static str, Option<&str>, String)> {
        let is_node = |path: &str| path.starts_with("/dev/") && !path.split('/').any(|part| part == "..");
        if self.matching == Match::default() {
            let problem = "it would match every node; write path, subsystem, usb, pci or udev";
            return Some(("match", None, problem.into()));
        }
        if let Some(path) = &self.matching.path
            && !is_node(path.as_str())
        {
            let problem = format!("{path} is not below /dev");
            return Some(("match.path", Some(path.as_str()), problem));
        }
        if let Some(path) = self.with.iter().find(|path| !is_node(path)) {
            return Some(("with", Some(path), format!("{path} is not below /dev")));
        }
        if let Some(path) = &self.container_path
            && !(path.starts_with('/') && path.len() > 1)
        {
            return Some(("as", Some(path), format!("{path:?} is not an absolute path")));
        }
        (!(1..=MAX_SHARES).contains(&self.share)).then(|| {
            let problem = format!("{} is not a number from 1 to {MAX_SHARES}", self.share);
            ("share", None, problem)
        })
    }
}

/// Checks what the types of the keys do not. Names of resources are not checked.
pub fn check(rules: &[Rule]) -> Result<(), InvalidRule> {
    let mut seen = BTreeSet::new();
    for (place, rule) in rules.iter().enumerate() {
        let twice = || {
            // Two rules with the same text would match the same nodes.
            let is_new = seen.insert(format!("{} {}", rule.resource, rule.matching));
            let problem = "another rule has the same resource and match; remove one".to_owned();
            (!is_new).then_some(("match", None, problem))
        };
        if let Some((key, value, problem)) = rule.problem().or_else(twice) {
            return Err(InvalidRule {
                number: place + 1,
                key,
                value: value.map(str::to_owned),
                problem,
            });
        }
    }
    Ok(())
}

impl UsbMatch {
    fn matches(&self, node: &Node) -> bool {
        let Some(usb) = &node.usb else { return false };
        self.vendor.is_none_or(|vendor| vendor.0 == usb.vendor)
            && self.product.is_none_or(|product| product.0 == usb.product)
            && self
                .serial
                .as_ref()
                .is_none_or(|serial| serial.matches(&usb.serial))
    }
}

impl PciMatch {
    fn matches(&self, node: &Node) -> bool {
        let Some(pci) = &node.pci else { return false };
        self.vendor.is_none_or(|vendor| vendor.0 == pci.vendor)
            && self.device.is_none_or(|device| device.0 == pci.device)
            && self
                .address
                .as_ref()
                .is_none_or(|address| address.matches(&pci.address))
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any = |id: Option<HexId>| id.map_or("*".to_owned(), |id| id.to_string());
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.path.iter().map(|path| format!("path {path}")));
        parts.extend(
            self.subsystem
                .iter()
                .map(|subsystem| format!("subsystem {subsystem}")),
        );
        if let Some(usb) = &self.usb {
            parts.push(format!("USB device {}:{}", any(usb.vendor), any(usb.product)));
            parts.extend(usb.serial.iter().map(|serial| format!("serial number {serial}")));
        }
        if let Some(pci) = &self.pci {
            parts.push(format!("PCI device {}:{}", any(pci.vendor), any(pci.device)));
            parts.extend(pci.address.iter().map(|address| format!("at {address}")));
        }
        parts.extend(self.udev.iter().map(|(key, pattern)| format!("{key}={pattern}")));
        f.write_str(&parts.join(", "))
    }
}
