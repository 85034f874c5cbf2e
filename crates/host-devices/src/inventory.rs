//! The devices that rules make of the nodes of a host.
//!
//! A scan reads everything. A device that was listed and is gone stays in the inventory as unhealthy until it is back or
//! the process ends. A node that two rules match belongs to none of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::identity;
use crate::node::{Host, Node};
use crate::rule::Rule;
use crate::value::Permissions;

/// A device of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub id: String,
    /// Paths of its own nodes, in the order of their numbers.
    pub nodes: Vec<String>,
    /// Paths of nodes that it needs besides.
    pub with: Vec<String>,
    /// The path of the node inside the container, if it differs.
    pub container_path: Option<String>,
    pub permissions: Permissions,
    pub numa_node: Option<u16>,
    /// All nodes exist.
    pub is_healthy: bool,
}

/// A rule in a message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleName {
    /// The number in the configuration, beginning with 1.
    pub number: usize,
    pub resource: String,
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {} ({})", self.number, self.resource)
    }
}

/// Why nodes are not devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Problem {
    #[error(
        "{first} and {second} both match {node}; narrow one of them, for example with subsystem, usb or udev"
    )]
    Conflict {
        first: RuleName,
        second: RuleName,
        node: String,
    },
    #[error("{rule} matches nothing: looked for {looked_for} among the device nodes of this host")]
    Unmatched { rule: RuleName, looked_for: String },
    #[error(
        "{rule}: {node} is not a device without property {property} in udev's database; set another idFrom"
    )]
    NoProperty {
        rule: RuleName,
        node: String,
        property: String,
    },
    #[error("{rule}: {path} of `with` does not exist, so its devices are unhealthy")]
    Missing { rule: RuleName, path: String },
}

/// The result of a scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// The devices of every resource that a rule names.
    pub resources: BTreeMap<String, Vec<Device>>,
    /// All problems.
    pub problems: BTreeSet<Problem>,
}

/// The rules, and the devices that they have made.
#[derive(Debug)]
pub struct Inventory {
    host: Host,
    rules: Vec<Rule>,
    known: BTreeMap<String, BTreeMap<String, Device>>,
}

/// A device before ids are unique.
struct Candidate<'a> {
    id: String,
    rule: &'a Rule,
    nodes: Vec<&'a Node>,
}

impl Inventory {
    /// Returns an inventory of rules that [`check`](crate::check) has accepted.
    pub fn new(host: Host, rules: Vec<Rule>) -> Self {
        Self {
            host,
            rules,
            known: BTreeMap::new(),
        }
    }

    /// Reads all nodes again.
    pub fn scan(&mut self) -> Scan {
        let nodes = self.host.nodes();
        let mut problems = BTreeSet::new();
        let owners = owners(&self.rules, &nodes, &mut problems);
        let mut candidates: BTreeMap<&str, Vec<Candidate<'_>>> = BTreeMap::new();
        for (place, rule) in self.rules.iter().enumerate() {
            let owned = nodes.iter().zip(&owners);
            let owned = owned
                .filter(|(_, owner)| **owner == Some(place))
                .map(|(node, _)| node);
            let name = name(&self.rules, place);
            let found = candidates.entry(&rule.resource).or_default();
            found.extend(self.candidates(rule, &name, owned, &mut problems));
        }
        let mut resources = BTreeMap::new();
        for (resource, mut found) in candidates {
            make_unique(&mut found);
            let devices = found.into_iter().flat_map(|candidate| self.devices(candidate));
            let devices: BTreeMap<String, Device> =
                devices.map(|device| (device.id.clone(), device)).collect();
            resources.insert(resource.to_owned(), devices);
        }
        for (resource, devices) in resources {
            let known = self.known.entry(resource).or_default();
            for (_, gone) in known.iter_mut().filter(|(id, _)| !devices.contains_key(*id)) {
                gone.is_healthy = false;
            }
            known.extend(devices);
        }
        let list = |(resource, known): (&String, &BTreeMap<String, Device>)| {
            (resource.clone(), known.values().cloned().collect())
        };
        Scan {
            resources: self.known.iter().map(list).collect(),
            problems,
        }
    }

    /// Returns the devices of a rule.
    fn candidates<'a>(
        &self,
        rule: &'a Rule,
        name: &RuleName,
        nodes: impl Iterator<Item = &'a Node>,
        problems: &mut BTreeSet<Problem>,
    ) -> Vec<Candidate<'a>> {
        let mut groups: BTreeMap<String, Vec<&Node>> = BTreeMap::new();
        for node in nodes {
            groups.entry(identity::group(rule, node)).or_default().push(node);
        }
        for path in rule.with.iter().filter(|path| !self.host.exists(path)) {
            problems.insert(Problem::Missing {
                rule: name.clone(),
                path: path.clone(),
            });
        }
        let mut candidates = Vec::new();
        for mut nodes in groups.into_values() {
            nodes.sort_by_key(|node| natural(&node.path));
            match identity::id(rule, &nodes) {
                Ok(id) => candidates.push(Candidate { id, rule, nodes }),
                Err(property) => {
                    problems.insert(Problem::NoProperty {
                        rule: name.clone(),
                        node: nodes.first().map(|node| node.path.clone()).unwrap_or_default(),
                        property,
                    });
                }
            }
        }
        candidates
    }

    /// Returns a device, or its shares.
    fn devices(&self, candidate: Candidate<'_>) -> Vec<Device> {
        let Candidate { id, rule, nodes } = candidate;
        let device = |id: String| Device {
            id,
            nodes: nodes.iter().map(|node| node.path.clone()).collect(),
            with: rule.with.clone(),
            container_path: rule.container_path.clone(),
            permissions: rule.permissions.clone(),
            numa_node: nodes.iter().find_map(|node| node.numa_node),
            is_healthy: rule.with.iter().all(|path| self.host.exists(path)),
        };
        match rule.share {
            1 => vec![device(id)],
            shares => (0..shares)
                .map(|share| device(format!("{id}::{share}")))
                .collect(),
        }
    }
}

fn name(rules: &[Rule], place: usize) -> RuleName {
    RuleName {
        number: place + 1,
        resource: rules[place].resource.clone(),
    }
}

/// Returns the rule of each node. Reports nodes of several rules, and rules without nodes.
fn owners(rules: &[Rule], nodes: &[Node], problems: &mut BTreeSet<Problem>) -> Vec<Option<usize>> {
    let mut matched: BTreeSet<usize> = BTreeSet::new();
    let mut owners = Vec::with_capacity(nodes.len());
    for node in nodes {
        let places = rules.iter().enumerate().filter(|(_, rule)| rule.matches(node));
        let places: Vec<usize> = places.map(|(place, _)| place).collect();
        matched.extend(&places);
        owners.push(match places[..] {
            [place] => Some(place),
            _ => None,
        });
        if let [first, others @ ..] = &places[..] {
            problems.extend(others.iter().map(|other| Problem::Conflict {
                first: name(rules, *first),
                second: name(rules, *other),
                node: node.path.clone(),
            }));
        }
    }
    let unmatched = (0..rules.len()).filter(|place| !matched.contains(place));
    problems.extend(unmatched.map(|place| Problem::Unmatched {
        rule: name(rules, place),
        looked_for: rules[place].matching.to_string(),
    }));
    owners
}

/// Adds the port to ids of several USB devices, such as those with the serial number of their model, and a number to
/// ids of several nodes of one device.
fn make_unique(candidates: &mut [Candidate<'_>]) {
    candidates.sort_by_key(|candidate| candidate.nodes.first().map(|node| natural(&node.path)));
    let port = |candidate: &Candidate<'_>| {
        let usb = candidate.nodes.first().and_then(|node| node.usb.as_ref());
        usb.map(|usb| usb.port.clone())
    };
    let mut ports: BTreeMap<String, BTreeSet<Option<String>>> = BTreeMap::new();
    for candidate in &*candidates {
        ports
            .entry(candidate.id.clone())
            .or_default()
            .insert(port(candidate));
    }
    for candidate in &mut *candidates {
        let is_shared = ports.get(&candidate.id).is_some_and(|ports| ports.len() > 1);
        if let Some(port) = port(candidate).filter(|_| is_shared) {
            candidate.id = identity::plain(&format!("{}@{port}", candidate.id));
        }
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for candidate in candidates {
        let count = counts.entry(candidate.id.clone()).or_default();
        *count += 1;
        if *count > 1 {
            candidate.id = format!("{}-{}", candidate.id, *count - 1);
        }
    }
}

/// Returns a key that sorts `video10` after `video9`.
fn natural(path: &str) -> (String, u64) {
    let stem = path.trim_end_matches(|last: char| last.is_ascii_digit());
    (stem.to_owned(), path[stem.len()..].parse().unwrap_or(0))
}
