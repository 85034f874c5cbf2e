//! The test's side of a process.

use std::collections::{BTreeSet, VecDeque};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::driver::{self, DeviceHealth, DriverScript, PreparedDevice};
use crate::events::{Claim, Event};
use crate::plugin;
use crate::script::{Answer, Device, Fault, Script};

/// Timeout for events that should happen at once, sized for a very busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

const VARIABLE: &str = "DEVLET_TESTKIT_SCRIPT";

/// For [`plugin_process!`](crate::plugin_process): if this process was started as a plugin, runs the plugin and then
/// exits.
pub fn become_plugin_if_asked() {
    let Some(script) = std::env::var_os(VARIABLE) else {
        return;
    };
    let script = script.to_str().expect("the script is UTF-8");
    // Ends the unfinished line of the test harness.
    println!();
    run(serde_json::from_str(script).expect("the script is JSON"));
    std::process::exit(0);
}

/// The role of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    Plugin(Script),
    Driver(DriverScript),
}

/// Runs a role until the end of its commands.
pub fn run(role: Role) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts");
    match role {
        Role::Plugin(script) => runtime.block_on(plugin::run(script)),
        Role::Driver(script) => runtime.block_on(driver::run(script)),
    }
    runtime.shutdown_background();
}

/// A running device plugin or DRA driver. It is killed when dropped.
#[derive(Debug)]
pub struct Plugin {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Event>,
    /// Events received while waiting for another one.
    pending: VecDeque<Event>,
    name: String,
}

impl Plugin {
    /// Starts a plugin. Does not wait for its registration.
    pub fn start(script: &Script) -> Self {
        Self::start_role(&Role::Plugin(script.clone()), &script.resource)
    }

    /// Starts a DRA driver. Does not wait for its registration.
    pub fn driver(script: &DriverScript) -> Self {
        Self::start_role(&Role::Driver(script.clone()), &script.driver)
    }

    fn start_role(role: &Role, name: &str) -> Self {
        let program = std::env::current_exe().expect("a test has an executable");
        Self::spawn(&program, role, name, |_| {})
    }

    /// Like [`Plugin::start`], as another user, which requires root. `program` is a copy of the test's executable that the
    /// user can read.
    pub fn start_as(uid: u32, gid: u32, program: &Path, script: &Script) -> Self {
        Self::start_role_as(uid, gid, program, &Role::Plugin(script.clone()), &script.resource)
    }

    /// Like [`Plugin::driver`], as another user; see [`Plugin::start_as`].
    pub fn driver_as(uid: u32, gid: u32, program: &Path, script: &DriverScript) -> Self {
        Self::start_role_as(uid, gid, program, &Role::Driver(script.clone()), &script.driver)
    }

    fn start_role_as(uid: u32, gid: u32, program: &Path, role: &Role, name: &str) -> Self {
        Self::spawn(program, role, name, |command| {
            command.uid(uid).gid(gid);
        })
    }

    fn spawn(program: &Path, role: &Role, name: &str, change: impl FnOnce(&mut Command)) -> Self {
        let text = serde_json::to_string(role).expect("scripts are plain");
        let mut command = Command::new(program);
        command
            .args(["--exact", "plugin_process", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, text)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the plugin starts");
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("stdout is piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                // Other lines are output of the test harness.
                if let Ok(event) = serde_json::from_str(&line)
                    && sender.send(event).is_err()
                {
                    return;
                }
            }
        });
        let name = name.to_owned();
        Self {
            child,
            stdin,
            lines,
            pending: VecDeque::new(),
            name,
        }
    }

    /// Starts a plugin, and returns after it has registered and sent its first list.
    pub fn registered(script: &Script) -> Self {
        let mut plugin = Self::start(script);
        plugin.until(&Event::Registered);
        plugin.until_list_of(script.all_devices().len());
        plugin
    }

    /// Starts a DRA driver, and returns after it has registered.
    pub fn registered_driver(script: &DriverScript) -> Self {
        let mut driver = Self::driver(script);
        driver.until(&Event::Registered);
        driver
    }

    /// Waits for an event. Earlier events stay available.
    pub fn until(&mut self, wanted: &Event) {
        self.find(&format!("{wanted:?}"), |event| (event == wanted).then_some(()));
    }

    /// Waits until a list of `devices` devices has been sent.
    pub fn until_list_of(&mut self, devices: usize) {
        self.until(&Event::ListSent { devices });
    }

    /// Waits for a call. Returns the devices in it, or the UIDs of the claims.
    pub fn called(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("a call of {method}"), |event| called(event, method))
    }

    /// Waits for a call of a DRA driver. Returns the service and the claims of the call.
    pub fn asked(&mut self, method: &str) -> (String, Vec<Claim>) {
        self.find(&format!("a call of {method}"), |event| match event {
            Event::Asked {
                service,
                method: called,
                claims,
            } if called == method => Some((service.clone(), claims.clone())),
            _ => None,
        })
    }

    /// Waits until a call for claims with [`Fault::Wait`] has been executed. Returns the UIDs of the claims in the coming
    /// answer.
    pub fn waits(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("{method} waits"), |event| match event {
            Event::Waits { method: called, ids } if called == method => Some(ids.clone()),
            _ => None,
        })
    }

    /// Waits until a call for claims is being answered. Returns the UIDs of the claims in the answer. The call has been
    /// executed.
    pub fn answered(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("an answer to {method}"), |event| match event {
            Event::Answered { method: called, ids } if called == method => Some(ids.clone()),
            _ => None,
        })
    }

    /// Waits until the kubelet rejects the plugin. Returns the error message.
    pub fn refused(&mut self) -> String {
        self.find("a refused registration", |event| match event {
            Event::RegisterFailed { message, .. } => Some(message.clone()),
            _ => None,
        })
    }

    /// Waits for the first event that `pick` accepts, and removes it.
    pub fn find<T>(&mut self, what: &str, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        let found = self
            .pending
            .iter()
            .enumerate()
            .find_map(|(place, event)| Some((place, pick(event)?)));
        if let Some((place, picked)) = found {
            self.pending.remove(place);
            return picked;
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(event) => match pick(&event) {
                    Some(picked) => return picked,
                    None => self.pending.push_back(event),
                },
                Err(RecvTimeoutError::Timeout) => {
                    panic!("{}: {what} did not occur; events: {:?}", self.name, self.pending)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("{} exited without {what}; events: {:?}", self.name, self.pending)
                }
            }
        }
    }

    /// Returns `true` if such a call has been received. Does not wait.
    pub fn was_called(&mut self, method: &str) -> bool {
        self.has_event(|event| called(event, method).is_some())
    }

    /// Returns `true` if such an event has been received. Does not wait.
    pub fn has_event(&mut self, is: impl Fn(&Event) -> bool) -> bool {
        self.pending.extend(self.lines.try_iter());
        self.pending.iter().any(is)
    }

    fn send(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("the plugin is running");
        writeln!(stdin, "{command}").expect("the plugin runs");
    }

    /// Drops the events received so far, so that a plugin can run for a long time.
    pub fn forget_events(&mut self) {
        self.take_events();
    }

    /// Returns and removes the events received so far.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.pending.extend(self.lines.try_iter());
        self.pending.drain(..).collect()
    }

    /// Sends a command and waits until it has been executed.
    pub fn command(&mut self, command: &str) {
        self.send(command);
        let done = self.find(command, |event| match event {
            Event::Done { command: done } if done == command => Some(Ok(())),
            Event::Refused {
                command: refused,
                reason,
            } if refused == command => Some(Err(reason.clone())),
            _ => None,
        });
        if let Err(reason) = done {
            panic!("{}: {command}: {reason}", self.name);
        }
    }

    /// Sends another list, and returns after it was sent.
    pub fn list(&mut self, devices: &[Device]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("list {text}"));
        self.until_list_of(devices.len());
    }

    /// Sets the health of one device.
    pub fn health(&mut self, device: &str, health: &str) {
        self.command(&format!("health {device} {health}"));
    }

    /// Starts to send lists in which only the health of all devices changes.
    pub fn flood(&mut self, lists: u32, per_second: u32) {
        self.command(&format!("flood {lists} {per_second}"));
    }

    /// Starts to register `count` times; see [`Plugin::registrations`].
    pub fn register_often(&mut self, count: u32, per_second: u32) {
        self.send(&format!("registrations {count} {per_second}"));
    }

    /// Waits for the end of the registrations. Returns the number of accepted and of rejected ones, and the distinct error
    /// messages.
    pub fn registrations(&mut self) -> (u32, u32, BTreeSet<String>) {
        self.find("the end of registrations", |event| match event {
            Event::Registrations {
                accepted,
                refused,
                messages,
            } => Some((*accepted, *refused, messages.clone())),
            _ => None,
        })
    }

    /// Sets the answer to `Allocate`.
    pub fn answer(&mut self, answer: &Answer) {
        let text = serde_json::to_string(answer).expect("answers are plain");
        self.command(&format!("answer {text}"));
    }

    /// Sets the devices that a driver prepares for any claim.
    pub fn prepares(&mut self, devices: &[PreparedDevice]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("devices {text}"));
    }

    /// Sets the devices that a driver prepares for a claim of this name.
    pub fn prepares_for(&mut self, claim: &str, devices: &[PreparedDevice]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("claim {claim} {text}"));
    }

    /// Returns the UIDs of the claims that a driver has prepared.
    pub fn prepared(&mut self) -> BTreeSet<String> {
        self.prepared_claims()
            .into_iter()
            .map(|claim| claim.uid)
            .collect()
    }

    /// Returns the claims that a driver has prepared, by UID.
    pub fn prepared_claims(&mut self) -> Vec<Claim> {
        self.command("claims");
        self.find("the claims", |event| match event {
            Event::Prepared { claims } => Some(claims.clone()),
            _ => None,
        })
    }

    /// Waits until a driver has prepared exactly these claims, by UID.
    pub fn until_prepared(&mut self, wanted: &BTreeSet<String>) {
        loop {
            let prepared = self.prepared();
            if prepared == *wanted {
                return;
            }
            let what = format!("{prepared:?} become {wanted:?}: an answer");
            self.find(&what, |event| {
                matches!(event, Event::Answered { .. }).then_some(())
            });
        }
    }

    /// Sets the health that a driver reports, and returns after it was sent.
    pub fn report(&mut self, health: &[DeviceHealth]) {
        let text = serde_json::to_string(health).expect("health is plain");
        self.command(&format!("health {text}"));
        self.until_list_of(health.len());
    }

    /// Sets the fault of a call.
    pub fn fault(&mut self, method: &str, fault: Option<&Fault>) {
        let text = serde_json::to_string(&fault).expect("faults are plain");
        self.command(&format!("fault {method} {text}"));
    }

    /// Ends the plugin and waits for it. Its sockets are removed.
    pub fn exit(self) {
        self.exit_with_events();
    }

    /// Like [`Plugin::exit`]; returns the events that were not waited for.
    pub fn exit_with_events(mut self) -> Vec<Event> {
        self.stdin = None;
        self.remaining_events()
    }

    /// Waits until the plugin has crashed.
    pub fn died(mut self) {
        let status = self.child.wait().expect("the plugin is our child");
        assert!(!status.success(), "{} exited without an error", self.name);
    }

    /// Kills the plugin as by `kill -9`. Its sockets are left behind.
    pub fn kill(self) {
        self.kill_with_events();
    }

    /// Like [`Plugin::kill`]; returns the events that were not waited for.
    pub fn kill_with_events(mut self) -> Vec<Event> {
        self.child.kill().expect("the plugin is our child");
        self.remaining_events()
    }

    fn remaining_events(&mut self) -> Vec<Event> {
        self.child.wait().expect("the plugin is our child");
        self.pending.extend(self.lines.iter());
        self.pending.drain(..).collect()
    }
}

fn called(event: &Event, wanted: &str) -> Option<Vec<String>> {
    match event {
        Event::Called { method, ids } if method == wanted => Some(ids.clone()),
        Event::Asked { method, claims, .. } if method == wanted => {
            Some(claims.iter().map(|claim| claim.uid.clone()).collect())
        }
        _ => None,
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
