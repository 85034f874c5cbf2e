//! Fault injection: plugins and drivers, and the faults that are injected into them.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use devlet_client::Code;
use devlet_testkit::{Device, DeviceHealth, Door, DriverScript, Event, Fault, Plugin, Script};

use crate::load::Dice;

pub(crate) const RESOURCES: [(&str, usize); 3] = [
    ("acme.com/gpu", 256),
    ("acme.com/nic", 2000),
    ("other.org/fpga", 64),
];

pub(crate) const DRIVERS: [&str; 2] = ["tpu.acme.com", "disk.other.org"];

const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

fn script(root: &Path, index: usize) -> Script {
    let (resource, count) = RESOURCES[index];
    let devices = (0..count)
        .map(|number| Device::on(&format!("d{number:04}"), (number % 2) as i64))
        .collect();
    let mut script = Script::new(root, resource, devices);
    script.door = if index == 2 { Door::Registry } else { Door::Kubelet };
    script.options.preferred = index == 1;
    script.answer.envs = [("VISIBLE".to_owned(), "{ids}".to_owned())].into();
    script
}

fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

fn refusal(code: Code) -> Fault {
    Fault::Refuse {
        code: code as i32,
        message: "not today".into(),
    }
}

/// The plugins and drivers that faults are injected into.
pub(crate) struct Troubles {
    plugins: Plugins,
    pub(crate) drivers: Drivers,
    dice: Dice,
    round: u64,
}

impl Troubles {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            plugins: Plugins::new(root),
            drivers: Drivers::new(root),
            dice: Dice(4711),
            round: 0,
        }
    }

    /// Injects the next fault, and blocks while it lasts.
    pub(crate) fn next(&mut self) {
        let round = self.round / 2;
        match self.round % 2 {
            0 => self.plugins.trouble(self.dice.roll(3) as usize, round),
            _ => self.drivers.trouble(self.dice.roll(2) as usize, round),
        }
        self.round += 1;
        self.plugins.forget_events();
        self.drivers.note();
    }
}

struct Plugins {
    root: PathBuf,
    running: Vec<Option<Plugin>>,
}

impl Plugins {
    fn new(root: &Path) -> Self {
        let start = |index| Some(Plugin::registered(&script(root, index)));
        Self {
            root: root.to_owned(),
            running: (0..RESOURCES.len()).map(start).collect(),
        }
    }

    fn plugin(&mut self, index: usize) -> &mut Plugin {
        self.running[index].as_mut().unwrap()
    }

    fn start(&mut self, index: usize) {
        self.running[index] = Some(Plugin::registered(&script(&self.root, index)));
    }

    /// Injects a fault into a call for a time.
    fn fault(&mut self, index: usize, call: &str, fault: &Fault, ms: u64) {
        self.plugin(index).fault(call, Some(fault));
        pause(ms);
        self.plugin(index).fault(call, None);
    }

    fn trouble(&mut self, index: usize, round: u64) {
        let all = script(&self.root, index).devices;
        match round % 9 {
            0 => {
                self.running[index].take().unwrap().kill();
                pause(300);
                self.start(index);
            }
            1 => {
                self.running[index].take().unwrap().exit();
                self.start(index);
            }
            2 => self.fault(index, "Allocate", &Fault::Hang, 500),
            3 => self.fault(index, "Allocate", &refusal(Code::Internal), 200),
            4 => {
                self.plugin(index).list(&all[..all.len() / 2]);
                pause(200);
                self.plugin(index).list(&all);
            }
            5 => {
                for _ in 0..20 {
                    self.plugin(index).health("d0001", "Unhealthy");
                    self.plugin(index).health("d0001", "Healthy");
                }
            }
            6 => self.plugin(index).command("end-stream"),
            7 => {
                for socket in ["device-plugins/kubelet.sock", "devlet/devlet.sock"] {
                    for _ in 0..10 {
                        let mut stream = UnixStream::connect(self.root.join(socket)).unwrap();
                        let _ =
                            stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense that is not a frame");
                    }
                }
            }
            _ => self.fault(1, "GetPreferredAllocation", &refusal(Code::Unavailable), 200),
        }
    }

    fn forget_events(&mut self) {
        let running = self.running.iter_mut().flatten();
        running.for_each(Plugin::forget_events);
    }
}

/// The drivers, and the claims that they have prepared.
pub(crate) struct Drivers {
    root: PathBuf,
    running: Vec<Option<Plugin>>,
    /// Number of updates of each driver to another instance.
    updates: [usize; 2],
    /// Claims that are or may be prepared: driver, and UID of the claim. They outlive the driver's process, as devices do.
    done: BTreeSet<(String, String)>,
}

impl Drivers {
    fn new(root: &Path) -> Self {
        let mut all = Self {
            root: root.to_owned(),
            running: DRIVERS.map(|_| None).into(),
            updates: [0; 2],
            done: BTreeSet::new(),
        };
        (0..DRIVERS.len()).for_each(|index| all.start(index));
        all
    }

    fn driver(&mut self, index: usize) -> &mut Plugin {
        self.running[index].as_mut().unwrap()
    }

    fn start(&mut self, index: usize) {
        let instance = ["a", "b"][self.updates[index] % 2];
        let script = DriverScript {
            instance: instance.into(),
            ..DriverScript::new(&self.root, DRIVERS[index])
        };
        let health = vec![DeviceHealth::healthy("pool", "shared-0")];
        self.running[index] = Some(Plugin::registered_driver(&script.with_health(health)));
    }

    fn fault(&mut self, index: usize, call: &str, fault: &Fault, ms: u64) {
        self.driver(index).fault(call, Some(fault));
        pause(ms);
        self.driver(index).fault(call, None);
    }

    fn trouble(&mut self, index: usize, round: u64) {
        match round % 8 {
            0 => {
                let events = self.running[index].take().unwrap().kill_with_events();
                self.noted(index, events);
                pause(300);
                self.start(index);
            }
            // An update: the new instance starts before the old one ends.
            1 => {
                let old = self.running[index].take().unwrap();
                self.updates[index] += 1;
                self.start(index);
                let events = old.exit_with_events();
                self.noted(index, events);
            }
            2 => self.fault(index, PREPARE, &Fault::Hang, 500),
            3 => self.fault(index, UNPREPARE, &Fault::Hang, 500),
            4 => {
                let failure = Fault::FailClaims {
                    names: Vec::new(),
                    message: "not today".into(),
                };
                self.fault(index, PREPARE, &failure, 200);
            }
            5 => self.fault(index, UNPREPARE, &refusal(Code::Internal), 200),
            6 => self.driver(index).command("hang-up"),
            _ => {
                for _ in 0..20 {
                    let ill = DeviceHealth::unhealthy("pool", "shared-0", "ill");
                    self.driver(index).report(&[ill]);
                    let well = DeviceHealth::healthy("pool", "shared-0");
                    self.driver(index).report(&[well]);
                }
            }
        }
    }

    /// Records the calls of the drivers since the last time.
    fn note(&mut self) {
        for index in 0..DRIVERS.len() {
            let events = self.driver(index).take_events();
            self.noted(index, events);
        }
    }

    fn noted(&mut self, index: usize, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Waits { method, ids } | Event::Answered { method, ids } if method == PREPARE => {
                    self.add(index, ids);
                }
                Event::Answered { ids, .. } => {
                    for uid in ids {
                        self.done.remove(&(DRIVERS[index].to_owned(), uid));
                    }
                }
                _ => {}
            }
        }
    }

    fn add(&mut self, index: usize, uids: impl IntoIterator<Item = String>) {
        let done = uids.into_iter().map(|uid| (DRIVERS[index].to_owned(), uid));
        self.done.extend(done);
    }

    /// Returns the claims that are or may be prepared: driver, and UID of the claim.
    pub(crate) fn done(&mut self) -> &BTreeSet<(String, String)> {
        for index in 0..DRIVERS.len() {
            // The answer arrives after all earlier events.
            let prepared = self.driver(index).prepared();
            self.add(index, prepared);
        }
        self.note();
        &self.done
    }

    /// Makes a driver prepare claims without answering.
    pub(crate) fn keeps_silent(&mut self, index: usize) {
        self.driver(index).fault(PREPARE, Some(&Fault::Wait));
    }

    /// Waits until it has prepared a claim without answering.
    pub(crate) fn until_silent(&mut self, index: usize) {
        let done = self.driver(index).waits(PREPARE);
        self.add(index, done);
    }

    /// Makes the driver answer again.
    pub(crate) fn speaks_again(&mut self, index: usize) {
        self.driver(index).fault(PREPARE, None);
    }
}
