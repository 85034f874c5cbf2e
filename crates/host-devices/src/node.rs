//! The device nodes of a host, from `/sys`, `/dev` and udev's database.
//!
//! Files of sysfs disappear at any time: a node whose files cannot be read is one that is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Maximum depth of directories below `/dev`.
const MAX_DEPTH: usize = 8;

/// Directories of `/dev` without nodes of devices, or with other nodes for each process.
const SKIPPED: [&str; 5] = ["pts", "shm", "mqueue", "hugepages", "fd"];

/// A host below a root directory: `/`, or that of a test.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// The path on the host, such as `/dev/ttyUSB0`.
    pub path: String,
    /// Links to it that udev made.
    pub links: Vec<String>,
    /// The subsystem of the kernel; empty if sysfs does not have the node.
    pub subsystem: String,
    /// The name of the parent that is neither USB nor PCI, such as `fe801000.csi`.
    pub(crate) parent: Option<String>,
    pub usb: Option<Usb>,
    pub pci: Option<Pci>,
    /// Facts that distinguish nodes of one device, such as `if00-port0`.
    pub(crate) function: Vec<String>,
    pub numa_node: Option<u16>,
    /// Properties of udev's database.
    pub properties: BTreeMap<String, String>,
}

/// The USB device that a node belongs to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Usb {
    pub vendor: u16,
    pub product: u16,
    /// Empty if the device has none.
    pub serial: String,
    /// The name that the device gives itself.
    pub name: String,
    /// The place: controller, root hub of the controller, and ports.
    pub port: String,
}

/// The PCI device that a node belongs to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Pci {
    pub vendor: u16,
    pub device: u16,
    pub address: String,
}

impl Node {
    /// Returns the path, and the links to it.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.path).chain(&self.links).map(String::as_str)
    }
}

impl Host {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directories of `/dev` and udev's database, whose changes are changes of nodes.
    pub(crate) fn directories(&self) -> Vec<PathBuf> {
        let mut directories = vec![self.at("/run/udev/data")];
        let mut nodes = Vec::new();
        walk(&self.at("/dev"), 0, &mut nodes, &mut directories);
        directories
    }

    /// Returns `true` if a node exists.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Returns all nodes by path: those of sysfs that exist in `/dev`, and others in `/dev`.
    pub fn nodes(&self) -> Vec<Node> {
        let mut nodes = BTreeMap::new();
        for (directory, letter) in [("/sys/dev/char", 'c'), ("/sys/dev/block", 'b')] {
            for entry in fs::read_dir(self.at(directory)).into_iter().flatten().flatten() {
                let number = entry.file_name().to_string_lossy().into_owned();
                if let Some(node) = self.of_sysfs(&entry.path(), &format!("{letter}{number}")) {
                    nodes.insert(node.path.clone(), node);
                }
            }
        }
        let mut others = Vec::new();
        walk(&self.at("/dev"), 0, &mut others, &mut Vec::new());
        let root = self.root.to_string_lossy();
        for path in others {
            // Nodes with names that are not UTF-8 cannot be sent to a device manager.
            let Some(path) = path
                .to_str()
                .and_then(|path| path.strip_prefix(root.trim_end_matches('/')))
            else {
                continue;
            };
            let other = || Node {
                path: path.to_owned(),
                ..Node::default()
            };
            nodes.entry(path.to_owned()).or_insert_with(other);
        }
        nodes.into_values().collect()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Reads a directory of sysfs.
    fn of_sysfs(&self, link: &Path, number: &str) -> Option<Node> {
        let directory = link.canonicalize().ok()?;
        let uevent = fs::read_to_string(directory.join("uevent")).ok()?;
        let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
        let path = format!("/dev/{}", name.trim_start_matches("/dev/"));
        if !self.exists(&path) {
            return None;
        }
        let sys = self.at("/sys").canonicalize().ok()?;
        let mut node = Node {
            subsystem: target(&directory.join("subsystem")).unwrap_or_default(),
            path,
            ..Node::default()
        };
        for above in directory.ancestors().take_while(|above| *above != sys) {
            add_ancestor(&mut node, above);
        }
        if node.usb.is_none() && node.pci.is_none() {
            node.parent = target(&directory.join("device"));
        }
        node.function.reverse();
        if let Some(index) = text(&directory.join("index")) {
            node.function.push(format!("index{index}"));
        }
        self.add_database(&mut node, number);
        Some(node)
    }

    /// Adds links and properties of udev's database.
    fn add_database(&self, node: &mut Node, number: &str) {
        let file = self.at("/run/udev/data").join(number);
        for line in fs::read_to_string(file).unwrap_or_default().lines() {
            match line.split_at_checked(2) {
                Some(("S:", link)) => node.links.push(format!("/dev/{link}")),
                Some(("E:", property)) => {
                    if let Some((key, value)) = property.split_once('=') {
                        node.properties.insert(key.to_owned(), value.to_owned());
                    }
                }
                _ => {}
            }
        }
    }
}

/// Adds facts of a directory of sysfs to a node below it.
fn add_ancestor(node: &mut Node, above: &Path) {
    if node.numa_node.is_none() {
        node.numa_node = text(&above.join("numa_node")).and_then(|number| number.parse().ok());
    }
    if node.usb.is_some() || node.pci.is_some() {
        return;
    }
    let mut add = |label: &str, file: &str| {
        let number = text(&above.join(file));
        node.function
            .extend(number.map(|number| format!("{label}{number}")));
    };
    add("port", "port_number");
    add("if", "bInterfaceNumber");
    node.usb = usb(above);
    node.pci = pci(above);
}

/// Returns the USB device of a directory.
fn usb(directory: &Path) -> Option<Usb> {
    let vendor = hex(&directory.join("idVendor"))?;
    let product = hex(&directory.join("idProduct"))?;
    Some(Usb {
        vendor,
        product,
        serial: text(&directory.join("serial")).unwrap_or_default(),
        name: text(&directory.join("product")).unwrap_or_default(),
        port: usb_port(directory),
    })
}

/// Returns the place of a USB device. Numbers of buses change from boot to boot, so a bus is named after its controller.
fn usb_port(directory: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let own = name(directory).unwrap_or_default();
    // 1-2.3 is port 3 of the hub at port 2 of bus 1.
    let ports = own.split_once('-').map_or("0", |(_, ports)| ports);
    let bus_number = |path: &Path| name(path)?.strip_prefix("usb")?.parse::<u32>().ok();
    let Some(bus) = directory.ancestors().find(|above| bus_number(above).is_some()) else {
        return own.clone();
    };
    let Some(controller) = bus.parent() else {
        return own.clone();
    };
    let entries = fs::read_dir(controller).into_iter().flatten().flatten();
    let buses: BTreeSet<u32> = entries.filter_map(|entry| bus_number(&entry.path())).collect();
    let hub = buses
        .iter()
        .position(|number| Some(*number) == bus_number(bus))
        .unwrap_or(0);
    format!("usb-{}-{hub}:{ports}", name(controller).unwrap_or_default())
}

/// Returns the PCI device of a directory.
fn pci(directory: &Path) -> Option<Pci> {
    (target(&directory.join("subsystem"))? == "pci").then_some(())?;
    Some(Pci {
        vendor: hex(&directory.join("vendor"))?,
        device: hex(&directory.join("device"))?,
        address: directory.file_name()?.to_str()?.to_owned(),
    })
}

fn text(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn hex(file: &Path) -> Option<u16> {
    u16::from_str_radix(text(file)?.trim_start_matches("0x"), 16).ok()
}

/// Returns the last name of a link's target.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

/// Collects the device nodes and directories below a directory. Links are not followed.
fn walk(directory: &Path, depth: usize, nodes: &mut Vec<PathBuf>, directories: &mut Vec<PathBuf>) {
    directories.push(directory.to_owned());
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        let is_skipped = || depth == 0 && SKIPPED.iter().any(|name| entry.file_name() == *name);
        if kind.is_char_device() || kind.is_block_device() {
            nodes.push(entry.path());
        } else if kind.is_dir() && depth < MAX_DEPTH && !is_skipped() && !is_mount(directory, &entry.path()) {
            walk(&entry.path(), depth + 1, nodes, directories);
        }
    }
}

/// Returns `true` if another file system is mounted at a directory.
fn is_mount(above: &Path, directory: &Path) -> bool {
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev()).ok();
    device(above) != device(directory)
}
