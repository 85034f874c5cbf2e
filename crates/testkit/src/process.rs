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
use crate::output::print_lines;
use crate::plugin;
use crate::script::{Answer, Device, Fault, Script};

/// How long a test waits for something that should happen at once, on a machine that is very busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

const VARIABLE: &str = "DEVLET_TESTKIT_SCRIPT";

/// For [`plugin_process!`](crate::plugin_process): if this process was started to be a plugin, it is one and then
/// ends.
pub fn become_plugin_if_asked() {
    let Some(script) = std::env::var_os(VARIABLE) else {
        return;
    };
    let script = script.to_str().expect("the script is UTF-8");
    // The line of the test harness is unfinished.
    println!();
    run(serde_json::from_str(script).expect("the script is JSON"));
    std::process::exit(0);
}

/// What a process is to be.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    Plugin(Script),
    Driver(DriverScript),
}

/// Plays a role until told to end.
pub fn run(role: Role) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts");
    match role {
        Role::Plugin(script) => runtime.block_on(plugin::live(script)),
        Role::Driver(script) => runtime.block_on(driver::live(script)),
    }
    runtime.shutdown_background();
}

/// A running device plugin or DRA driver. It is killed when dropped.
#[derive(Debug)]
pub struct Plugin {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Event>,
    /// Events that came while another one was waited for.
    passed: VecDeque<Event>,
    name: String,
}

impl Plugin {
    /// Starts a plugin; it may not have registered yet.
    pub fn start(script: &Script) -> Self {
        Self::play(&Role::Plugin(script.clone()), &script.resource)
    }

    /// Starts a DRA driver; it may not have registered yet.
    pub fn driver(script: &DriverScript) -> Self {
        Self::play(&Role::Driver(script.clone()), &script.driver)
    }

    fn play(role: &Role, name: &str) -> Self {
        let program = std::env::current_exe().expect("a test has an executable");
        Self::spawn(&program, role, name, |_| {})
    }

    /// The same as another user, which takes root. `program` is a copy of the test's executable that they can reach.
    pub fn start_as(uid: u32, gid: u32, program: &Path, script: &Script) -> Self {
        Self::start_role_as(uid, gid, program, &Role::Plugin(script.clone()), &script.resource)
    }

    /// The same for a DRA driver.
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
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the plugin starts");
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("stdout is piped");
        print_lines(child.stderr.take().expect("stderr is piped"), |_| {});
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                // Everything else is the test harness talking.
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
            passed: VecDeque::new(),
            name,
        }
    }

    /// Starts a plugin, and returns once it has registered and its first list is out.
    pub fn registered(script: &Script) -> Self {
        let mut plugin = Self::start(script);
        plugin.until(&Event::Registered);
        plugin.until_list_of(script.all_devices().len());
        plugin
    }

    /// Starts a DRA driver, and returns once it has registered.
    pub fn registered_driver(script: &DriverScript) -> Self {
        let mut driver = Self::driver(script);
        driver.until(&Event::Registered);
        driver
    }

    /// Waits for an event; those that come before it can still be waited for.
    pub fn until(&mut self, wanted: &Event) {
        self.find(&format!("{wanted:?}"), |event| (event == wanted).then_some(()));
    }

    /// Waits until a list of this many devices has been sent.
    pub fn until_list_of(&mut self, devices: usize) {
        self.until(&Event::ListSent { devices });
    }

    /// Waits for a call; the devices that it names, or the UIDs of the claims.
    pub fn called(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("a call of {method}"), |event| called(event, method))
    }

    /// Waits for a call of a DRA driver: the service, and the claims that the call names.
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

    /// Waits until a call for claims with [`Fault::Wait`] has been carried out; the UIDs of those that the answer will
    /// name.
    pub fn waits(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("{method} waits"), |event| match event {
            Event::Waits { method: called, ids } if called == method => Some(ids.clone()),
            _ => None,
        })
    }

    /// Waits until a call for claims is being answered; the UIDs of those that the answer names. What it asked for
    /// has been done.
    pub fn answered(&mut self, method: &str) -> Vec<String> {
        self.find(&format!("an answer to {method}"), |event| match event {
            Event::Answered { method: called, ids } if called == method => Some(ids.clone()),
            _ => None,
        })
    }

    /// Waits until the kubelet refuses the plugin; its words.
    pub fn refused(&mut self) -> String {
        self.find("a refused registration", |event| match event {
            Event::RegisterFailed { message, .. } => Some(message.clone()),
            _ => None,
        })
    }

    /// Waits for the first event that `pick` likes, and takes it out.
    pub fn find<T>(&mut self, what: &str, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        let found = self
            .passed
            .iter()
            .enumerate()
            .find_map(|(place, event)| Some((place, pick(event)?)));
        if let Some((place, picked)) = found {
            self.passed.remove(place);
            return picked;
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(event) => match pick(&event) {
                    Some(picked) => return picked,
                    None => self.passed.push_back(event),
                },
                Err(RecvTimeoutError::Timeout) => {
                    panic!("{}: {what} did not come; came: {:?}", self.name, self.passed)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("{} ended without {what}; came: {:?}", self.name, self.passed)
                }
            }
        }
    }

    /// Whether such a call has come so far; does not wait.
    pub fn was_called(&mut self, method: &str) -> bool {
        self.has_come(|event| called(event, method).is_some())
    }

    /// Whether such an event has come so far; does not wait.
    pub fn has_come(&mut self, is: impl Fn(&Event) -> bool) -> bool {
        self.passed.extend(self.lines.try_iter());
        self.passed.iter().any(is)
    }

    fn tell(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("the plugin has not been told to end");
        writeln!(stdin, "{command}").expect("the plugin runs");
    }

    /// Forgets what has come so far, so that a plugin can run for long.
    pub fn forget_events(&mut self) {
        self.take_events();
    }

    /// What has come so far and was not waited for.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.passed.extend(self.lines.try_iter());
        self.passed.drain(..).collect()
    }

    /// Gives a command and waits until it has been carried out.
    pub fn command(&mut self, command: &str) {
        self.tell(command);
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

    /// Another list, sent when this returns.
    pub fn list(&mut self, devices: &[Device]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("list {text}"));
        self.until_list_of(devices.len());
    }

    /// The health of one device.
    pub fn health(&mut self, device: &str, health: &str) {
        self.command(&format!("health {device} {health}"));
    }

    /// Lists that say nothing new but the health of all devices, and that alternates; they go out from now on.
    pub fn flood(&mut self, lists: u32, per_second: u32) {
        self.command(&format!("flood {lists} {per_second}"));
    }

    /// Registers so often from now on; see [`Plugin::registrations`].
    pub fn register_often(&mut self, count: u32, per_second: u32) {
        self.tell(&format!("registrations {count} {per_second}"));
    }

    /// Waits until the plugin has registered often: how many times that ended well, and not, and the refusals,
    /// each once.
    pub fn registrations(&mut self) -> (u32, u32, BTreeSet<String>) {
        self.find("the end of registrations", |event| match event {
            Event::Registrations {
                taken_in,
                refused,
                messages,
            } => Some((*taken_in, *refused, messages.clone())),
            _ => None,
        })
    }

    /// What `Allocate` answers from now on.
    pub fn answer(&mut self, answer: &Answer) {
        let text = serde_json::to_string(answer).expect("answers are plain");
        self.command(&format!("answer {text}"));
    }

    /// What a driver prepares for any claim from now on.
    pub fn prepares(&mut self, devices: &[PreparedDevice]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("devices {text}"));
    }

    /// What a driver prepares for a claim of this name from now on.
    pub fn prepares_for(&mut self, claim: &str, devices: &[PreparedDevice]) {
        let text = serde_json::to_string(devices).expect("devices are plain");
        self.command(&format!("claim {claim} {text}"));
    }

    /// The UIDs of the claims that a driver has prepared.
    pub fn prepared(&mut self) -> BTreeSet<String> {
        self.prepared_claims()
            .into_iter()
            .map(|claim| claim.uid)
            .collect()
    }

    /// The claims that a driver has prepared, by UID.
    pub fn prepared_claims(&mut self) -> Vec<Claim> {
        self.command("claims");
        self.find("the claims", |event| match event {
            Event::Prepared { claims } => Some(claims.clone()),
            _ => None,
        })
    }

    /// Waits until a driver has prepared these claims and no others, by UID.
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

    /// What a driver's streams of health say; they have said it when this returns.
    pub fn report(&mut self, health: &[DeviceHealth]) {
        let text = serde_json::to_string(health).expect("health is plain");
        self.command(&format!("health {text}"));
        self.until_list_of(health.len());
    }

    /// How a call is answered from now on.
    pub fn fault(&mut self, method: &str, fault: Option<&Fault>) {
        let text = serde_json::to_string(&fault).expect("faults are plain");
        self.command(&format!("fault {method} {text}"));
    }

    /// Ends the plugin well; it is gone, and so are its sockets, when this returns.
    pub fn exit(self) {
        self.exit_with_last_words();
    }

    /// The same; all that it told and was not waited for.
    pub fn exit_with_last_words(mut self) -> Vec<Event> {
        self.stdin = None;
        self.last_words()
    }

    /// Waits until the plugin has died by itself.
    pub fn died(mut self) {
        let status = self.child.wait().expect("the plugin is our child");
        assert!(!status.success(), "{} ended well", self.name);
    }

    /// Ends the plugin as by `kill -9`; its sockets stay behind.
    pub fn kill(self) {
        self.kill_with_last_words();
    }

    /// The same; all that it told and was not waited for.
    pub fn kill_with_last_words(mut self) -> Vec<Event> {
        self.child.kill().expect("the plugin is our child");
        self.last_words()
    }

    fn last_words(&mut self) -> Vec<Event> {
        self.child.wait().expect("the plugin is our child");
        self.passed.extend(self.lines.iter());
        self.passed.drain(..).collect()
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
