//! Rules on a host whose `/sys`, `/dev` and `/run/udev` are files of the test.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use devlet_host_devices::{Device, Host, Inventory, Problem, Rule, Scan, check};
use tempfile::TempDir;

const CONTROLLER: &str = "devices/pci0000:00/0000:00:14.0";
const ADAPTER: &str = "devices/pci0000:00/0000:00:14.0/usb1/1-1";

/// A host with a USB controller, which has two root hubs.
struct FakeHost(TempDir);

impl FakeHost {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        host.pci(CONTROLLER, "8086", "a12f");
        for hub in ["usb1", "usb2"] {
            host.write(&format!("sys/{CONTROLLER}/{hub}/uevent"), "");
        }
        host
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn pci(&self, directory: &str, vendor: &str, device: &str) {
        self.write(&format!("sys/{directory}/vendor"), &format!("0x{vendor}\n"));
        self.write(&format!("sys/{directory}/device"), &format!("0x{device}\n"));
        self.write(&format!("sys/{directory}/numa_node"), "1\n");
        self.link(&format!("sys/{directory}/subsystem"), "../../../bus/pci");
    }

    /// Plugs in a USB device with one interface.
    fn usb(&self, directory: &str, id: &str, serial: &str) {
        let (vendor, product) = id.split_once(':').unwrap();
        for (file, text) in [("idVendor", vendor), ("idProduct", product), ("serial", serial)] {
            self.write(&format!("sys/{directory}/{file}"), &format!("{text}\n"));
        }
        let interface = format!("{directory}/{}:1.0", directory.rsplit('/').next().unwrap());
        self.write(&format!("sys/{interface}/bInterfaceNumber"), "00\n");
    }

    /// Creates a node of a directory of sysfs.
    fn node(&self, directory: &str, subsystem: &str, number: &str, name: &str) {
        let uevent = format!("MAJOR=1\nMINOR=1\nDEVNAME={name}\n");
        self.write(&format!("sys/{directory}/uevent"), &uevent);
        let link = format!("sys/{directory}/subsystem");
        self.link(&link, &format!("../../class/{subsystem}"));
        self.link(&format!("sys/dev/char/{number}"), &format!("../../{directory}"));
        self.write(&format!("dev/{name}"), "");
    }

    /// Plugs in a USB serial adapter.
    fn serial(&self, port: &str, serial: &str, name: &str, minor: u32) {
        let hub = port.split('-').next().unwrap();
        let device = format!("{CONTROLLER}/usb{hub}/{port}");
        self.usb(&device, "10c4:ea60", serial);
        let parent = format!("{device}/{port}:1.0/{name}");
        self.write(&format!("sys/{parent}/port_number"), "0\n");
        self.node(
            &format!("{parent}/tty/{name}"),
            "tty",
            &format!("188:{minor}"),
            name,
        );
    }

    /// Plugs in a camera: a node for pictures and one for its description.
    fn camera(&self, names: [&str; 2]) {
        self.usb(ADAPTER, "046d:0825", "CAM1");
        for (index, name) in names.iter().enumerate() {
            let directory = format!("{ADAPTER}/1-1:1.0/video4linux/{name}");
            self.write(&format!("sys/{directory}/index"), &format!("{index}\n"));
            self.node(&directory, "video4linux", &format!("81:{index}"), name);
        }
    }

    fn unplug(&self, directory: &str, numbers: &[&str], names: &[&str]) {
        fs::remove_dir_all(self.path().join("sys").join(directory)).unwrap();
        for number in numbers {
            fs::remove_file(self.path().join("sys/dev/char").join(number)).unwrap();
        }
        for name in names {
            fs::remove_file(self.path().join("dev").join(name)).unwrap();
        }
    }

    fn inventory(&self, rules: &str) -> Inventory {
        Inventory::new(Host::new(self.path()), parsed(rules))
    }

    fn scan(&self, rules: &str) -> Scan {
        self.inventory(rules).scan()
    }

    /// Returns the devices of the only resource.
    fn devices(&self, rules: &str) -> Vec<Device> {
        only(self.scan(rules))
    }
}

fn parsed(rules: &str) -> Vec<Rule> {
    let rules: Vec<Rule> = serde_saphyr::from_str(rules).unwrap();
    check(&rules).unwrap();
    rules
}

fn only(scan: Scan) -> Vec<Device> {
    assert_eq!(scan.problems, [].into());
    assert_eq!(scan.resources.len(), 1);
    scan.resources.into_values().next().unwrap()
}

fn ids(devices: &[Device]) -> Vec<&str> {
    devices.iter().map(|device| device.id.as_str()).collect()
}

#[test]
fn ids_of_serial_adapters_stay_when_their_nodes_swap() {
    let rule = r#"[{resource: a.b/serial, match: {path: "/dev/ttyUSB*"}}]"#;
    let mut found = Vec::new();
    for names in [["ttyUSB0", "ttyUSB1"], ["ttyUSB1", "ttyUSB0"]] {
        let host = FakeHost::new();
        host.serial("1-1", "S1", names[0], 0);
        host.serial("1-2", "S2", names[1], 1);
        let devices = host.devices(rule);
        assert_eq!(
            ids(&devices),
            ["10c4:ea60:S1-if00-port0-ttyUSB", "10c4:ea60:S2-if00-port0-ttyUSB"]
        );
        assert!(
            devices
                .iter()
                .all(|device| device.is_healthy && device.numa_node == Some(1))
        );
        found.push(devices.into_iter().map(|device| device.nodes).collect::<Vec<_>>());
    }
    assert_eq!(found[0], [["/dev/ttyUSB0"], ["/dev/ttyUSB1"]]);
    assert_eq!(found[1], [["/dev/ttyUSB1"], ["/dev/ttyUSB0"]]);
}

#[test]
fn equal_or_missing_serial_numbers_give_ids_of_the_port() {
    let host = FakeHost::new();
    host.serial("1-1", "0001", "ttyUSB0", 0);
    host.serial("2-1", "0001", "ttyUSB1", 1);
    host.serial("1-2.4", "", "ttyUSB2", 2);
    let rule = "[{resource: a.b/serial, match: {subsystem: tty, usb: {vendor: 10c4, product: 0xea60}}}]";
    assert_eq!(
        ids(&host.devices(rule)),
        [
            "10c4:ea60:0001-if00-port0-ttyUSB@usb-0000:00:14.0-0:1",
            "10c4:ea60:0001-if00-port0-ttyUSB@usb-0000:00:14.0-1:1",
            "usb-0000:00:14.0-0:2.4-if00-port0-ttyUSB",
        ]
    );
    let by_port = "[{resource: a.b/serial, match: {subsystem: tty}, groupBy: usbDevice, idFrom: port}]";
    assert_eq!(
        ids(&host.devices(by_port)),
        [
            "usb-0000:00:14.0-0:1",
            "usb-0000:00:14.0-0:2.4",
            "usb-0000:00:14.0-1:1"
        ]
    );
}

#[test]
fn the_nodes_of_a_usb_device_are_one_device() {
    let host = FakeHost::new();
    host.camera(["video10", "video9"]);
    let grouped = "[{resource: a.b/cam, match: {subsystem: video4linux}, groupBy: usbDevice, as: /dev/camera, permissions: r}]";
    let devices = host.devices(grouped);
    assert_eq!(ids(&devices), ["046d:0825:CAM1"]);
    assert_eq!(devices[0].nodes, ["/dev/video9", "/dev/video10"]);
    assert_eq!(devices[0].container_path.as_deref(), Some("/dev/camera"));
    assert_eq!(devices[0].permissions.to_string(), "r");
    let single = "[{resource: a.b/cam, match: {subsystem: video4linux}}]";
    assert_eq!(
        ids(&host.devices(single)),
        [
            "046d:0825:CAM1-if00-index0-video",
            "046d:0825:CAM1-if00-index1-video"
        ]
    );
}

#[test]
fn properties_and_links_of_udev_match_and_name() {
    let host = FakeHost::new();
    host.camera(["video0", "video1"]);
    host.write(
        "run/udev/data/c81:0",
        "S:v4l/by-id/usb-cam-index0\nE:ID_V4L_CAPABILITIES=:capture:\nE:ID_SERIAL=Cam One\n",
    );
    host.write("run/udev/data/c81:1", "E:ID_V4L_CAPABILITIES=:\n");
    let by_property = "[{resource: a.b/c, match: {udev: {ID_V4L_CAPABILITIES: '*:capture:*'}}, groupBy: usbDevice, idFrom: ID_SERIAL}]";
    let devices = host.devices(by_property);
    assert_eq!(ids(&devices), ["Cam_One"]);
    assert_eq!(devices[0].nodes, ["/dev/video0"]);
    let by_link = "[{resource: a.b/c, match: {path: '/dev/v4l/by-id/*'}}]";
    assert_eq!(host.devices(by_link)[0].nodes, ["/dev/video0"]);
    let without = "[{resource: a.b/c, match: {subsystem: video4linux}, idFrom: ID_SERIAL}]";
    let scan = host.scan(without);
    assert_eq!(scan.resources["a.b/c"].len(), 1);
    let problem = scan.problems.first().unwrap().to_string();
    assert!(
        problem.contains("/dev/video1 is not a device without property ID_SERIAL"),
        "{problem}"
    );
}

#[test]
fn a_gpu_is_shared_and_has_the_nodes_of_its_family() {
    let host = FakeHost::new();
    let gpu = "devices/pci0000:00/0000:03:00.0";
    host.pci(gpu, "1002", "744c");
    host.node(
        &format!("{gpu}/drm/renderD128"),
        "drm",
        "226:128",
        "dri/renderD128",
    );
    host.node(&format!("{gpu}/drm/card0"), "drm", "226:0", "dri/card0");
    let rule = r#"[{resource: a.b/gpu, match: {path: "/dev/dri/renderD*", pci: {vendor: "1002"}}, with: [/dev/kfd], share: 2}]"#;
    let scan = host.scan(rule);
    assert!(scan.resources["a.b/gpu"].iter().all(|device| !device.is_healthy));
    let problem = scan.problems.first().unwrap().to_string();
    assert!(problem.contains("/dev/kfd of `with` does not exist"), "{problem}");

    host.write("dev/kfd", "");
    let devices = host.devices(rule);
    assert_eq!(
        ids(&devices),
        ["0000:03:00.0-renderD::0", "0000:03:00.0-renderD::1"]
    );
    for device in &devices {
        assert!(device.is_healthy);
        assert_eq!(device.nodes, ["/dev/dri/renderD128"]);
        assert_eq!(device.with, ["/dev/kfd"]);
    }
    let grouped = "[{resource: a.b/gpu, match: {pci: {}, subsystem: drm}, groupBy: device}]";
    let devices = host.devices(grouped);
    assert_eq!(ids(&devices), ["0000:03:00.0"]);
    assert_eq!(devices[0].nodes, ["/dev/dri/card0", "/dev/dri/renderD128"]);
    let all = "[{resource: a.b/gpu, match: {subsystem: drm}, groupBy: rule}]";
    assert_eq!(ids(&host.devices(all)), ["all"]);
}

#[test]
fn a_device_that_is_unplugged_is_unhealthy_until_it_is_back() {
    let host = FakeHost::new();
    host.serial("1-1", "S1", "ttyUSB0", 0);
    let mut inventory =
        host.inventory("[{resource: a.b/serial, match: {subsystem: tty}, groupBy: usbDevice}]");
    let listed = only(inventory.scan());
    assert!(listed[0].is_healthy);

    host.unplug(ADAPTER, &["188:0"], &["ttyUSB0"]);
    let scan = inventory.scan();
    let gone = &scan.resources["a.b/serial"];
    assert_eq!(ids(gone), ids(&listed));
    assert!(!gone[0].is_healthy);

    host.serial("1-1", "S1", "ttyUSB5", 5);
    let back = only(inventory.scan());
    assert_eq!(ids(&back), ids(&listed));
    assert!(back[0].is_healthy);
    assert_eq!(back[0].nodes, ["/dev/ttyUSB5"]);
}

#[test]
fn a_node_that_two_rules_match_belongs_to_neither() {
    let host = FakeHost::new();
    host.serial("1-1", "S1", "ttyUSB0", 0);
    let rules = r#"[{resource: a.b/serial, match: {path: "/dev/ttyUSB*"}},
        {resource: a.b/zigbee, match: {subsystem: tty, usb: {vendor: 10c4}}}]"#;
    let scan = host.scan(rules);
    assert!(scan.resources.values().all(Vec::is_empty));
    let problems: Vec<String> = scan.problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "rule 1 (a.b/serial) and rule 2 (a.b/zigbee) both match /dev/ttyUSB0; narrow one of them, for example with \
             subsystem, usb or udev"
        ]
    );
}

#[test]
fn a_rule_that_matches_nothing_has_a_resource_without_devices() {
    let host = FakeHost::new();
    let rule = "[{resource: a.b/cam, match: {subsystem: video4linux, usb: {vendor: 46d, serial: 'C*'}, udev: {A: b}}}]";
    let scan = host.scan(rule);
    assert_eq!(scan.resources["a.b/cam"], []);
    let Some(Problem::Unmatched { looked_for, .. }) = scan.problems.first() else {
        panic!("{:?}", scan.problems)
    };
    assert_eq!(
        looked_for,
        "subsystem video4linux, USB device 046d:*, serial number C*, A=b"
    );
}

#[test]
fn rules_without_effect_are_refused() {
    for (rule, said) in [
        (
            "{resource: a.b/c, match: {}}",
            "rule 1: match: it would match every node",
        ),
        (
            "{resource: a.b/c, match: {path: /etc/passwd}}",
            "rule 1: match.path: /etc/passwd is not below /dev",
        ),
        (
            "{resource: a.b/c, match: {path: /dev/x}, with: [/dev/../x]}",
            "rule 1: with: ",
        ),
        (
            "{resource: a.b/c, match: {path: /dev/x}, as: zigbee}",
            "rule 1: as: \"zigbee\" is not an absolute path",
        ),
        (
            "{resource: a.b/c, match: {path: /dev/x}, share: 0}",
            "rule 1: share: 0 is not a number from 1 to 10000",
        ),
        (
            "{resource: a.b/c, match: {path: /dev/x}}, {resource: a.b/c, match: {path: /dev/x}, share: 2}",
            "rule 2: match: another rule has the same resource and match",
        ),
    ] {
        let rules: Vec<Rule> = serde_saphyr::from_str(&format!("[{rule}]")).unwrap();
        let problem = check(&rules).unwrap_err().to_string();
        assert!(problem.starts_with(said), "{rule}: {problem}");
    }
}
