//! Keeps a starting kubelet from admitting static pods before it has their devices.
//!
//! ```text
//!   kubelet: reads static pods ─────► kubelet.sock ─────► first pods admitted
//!              │ the open waits                            ▲
//!   devlet:    └───────── registers, lists are known ──────┘ now it succeeds
//! ```
//!
//! A kubelet admits static pods within milliseconds after it has created `kubelet.sock`: a registration cannot win that race
//! for sure. But a kubelet reads the files of static pods before, in a goroutine of their own. devlet delays the open of these
//! files with permission events of fanotify. Other pods come later by themselves, because the kubelet asks the API server.
//!
//! The directory is watched only until a kubelet has the devices, and again once that kubelet has ended: opens of a
//! running kubelet do not depend on devlet.
//!
//! Invariants:
//! - only opens of a process named `kubelet` wait, and those of one process for [`MAX_DELAY`] in all;
//! - devlet lets every open succeed, and if it ends, the kernel does. The kernel denies an open if it finds no free descriptor
//!   in devlet for it.

mod opens;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use devlet_core::{Moment, ResourceName};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::kubelet::{self, CHECK_PAUSE, Directory, SOCKET};
use super::report::{RuntimeState, ShieldReport, ShieldState};
use super::{list, served_resource};
use crate::lease::checkpoint;
use crate::workflow::lease::LeaseWorkflow;
use opens::Opens;

/// Longest delay of a kubelet's static pods. A kubelet creates its socket within about two seconds if its runtime is there.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Delays opens of the files of static pods.
pub(super) struct StaticPods {
    opens: Opens,
    /// The kubelet that was running at the start.
    running: Option<Process>,
    devices: Devices,
}

/// Why static pods wait no longer.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// The kubelet knows the devices.
    Known,
    /// Nothing is going to be registered.
    Nothing,
    /// The kubelet has had its time.
    Late,
    /// The kubelet has ended.
    Ended,
}

impl StaticPods {
    /// Begins to watch, unless a kubelet runs: from now on, opens wait for [`Self::run`].
    pub(super) fn watch(workflow: LeaseWorkflow, report: ShieldReport, booted: Moment) -> io::Result<Self> {
        let mut opens = Opens::new(workflow.shield.static_pods.clone())?;
        // A kubelet that listens has read its static pods.
        let listening = listener(&workflow.shield.device_plugins().join(SOCKET));
        let running = listening.and_then(Process::find);
        if running.is_none() {
            opens.watch();
        }
        let devices = Devices {
            workflow,
            report,
            booted,
        };
        Ok(Self {
            opens,
            running,
            devices,
        })
    }

    /// Serves until devlet stops. Then the kernel lets all opens succeed.
    pub(super) async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = self.serve() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn serve(mut self) {
        let mut last = None;
        loop {
            if let Some(kubelet) = self.running.take() {
                self.opens.answer(kubelet.ended()).await;
                last = Some(kubelet.pid);
            }
            self.opens.watch();
            let kubelet = self.starting(last).await;
            let began = Instant::now();
            let outcome = async {
                tokio::select! {
                    outcome = self.devices.wait(kubelet.pid) => outcome,
                    () = kubelet.ended() => Outcome::Ended,
                }
            };
            let outcome = self.opens.answer(outcome).await;
            if self.opens.first().is_some() {
                report(kubelet.pid, outcome, began.elapsed());
            }
            if matches!(outcome, Outcome::Ended) {
                last = Some(kubelet.pid);
                self.opens.release();
            } else {
                self.opens.ignore();
                self.running = Some(kubelet);
            }
        }
    }

    /// Returns the next kubelet that opens a file or listens, other than the last one.
    async fn starting(&mut self, last: Option<i32>) -> Process {
        loop {
            if let Some(pid) = self.opens.first() {
                match Process::find(pid) {
                    Some(kubelet) => return kubelet,
                    None => self.opens.release(),
                }
            }
            tokio::select! {
                kubelet = self.devices.registered(last) => return kubelet,
                () = self.opens.next() => {}
            }
        }
    }
}

fn report(pid: i32, outcome: Outcome, waited: Duration) {
    match outcome {
        Outcome::Known => {
            tracing::info!(
                pid,
                ?waited,
                "static pods delayed until the kubelet knew the devices"
            );
        }
        Outcome::Nothing => tracing::info!(
            pid,
            ?waited,
            "static pods not delayed: there is nothing to register"
        ),
        Outcome::Late => {
            tracing::warn!(
                pid,
                ?waited,
                "static pods not delayed any more: they may be rejected"
            );
        }
        Outcome::Ended => tracing::info!(pid, ?waited, "kubelet ended while its static pods were delayed"),
    }
}

/// What a kubelet must know before it admits static pods.
struct Devices {
    workflow: LeaseWorkflow,
    report: ShieldReport,
    /// When the machine was booted.
    booted: Moment,
}

impl Devices {
    /// Returns the kubelet that listens, unless it is the last one.
    async fn registered(&self, last: Option<i32>) -> Process {
        let mut changes = self.report.subscribe();
        loop {
            let pid = changes
                .borrow_and_update()
                .kubelet
                .as_ref()
                .and_then(|kubelet| kubelet.pid);
            let listening = pid.filter(|_| pid != last).and_then(Process::find);
            match listening {
                Some(kubelet) => return kubelet,
                // Fails only if no report is left, and this task has one.
                None => _ = changes.changed().await,
            }
        }
    }

    /// Waits until a kubelet has the devices.
    async fn wait(&self, pid: i32) -> Outcome {
        let waited = timeout(MAX_DELAY, self.until_ready(pid)).await;
        waited.unwrap_or(Outcome::Late)
    }

    async fn until_ready(&self, pid: i32) -> Outcome {
        let directory = Directory::watch(&self.workflow.shield.device_plugins());
        if let Err(error) = &directory {
            tracing::warn!(%error, "kubelet's directory checked again and again instead");
        }
        let mut changes = self.report.subscribe();
        loop {
            let state = changes.borrow_and_update().clone();
            if !self.delays(&state, pid) {
                return Outcome::Nothing;
            }
            if listens(&state, pid) && self.is_listed(&state, pid).await {
                return Outcome::Known;
            }
            let changed = async {
                match &directory {
                    Ok(directory) => directory.changed().await,
                    Err(_) => sleep(CHECK_PAUSE).await,
                }
            };
            tokio::select! {
                () = changed => {}
                _ = changes.changed() => {}
            }
        }
    }

    /// Returns `false` if nothing is going to be registered.
    fn delays(&self, state: &ShieldState, pid: i32) -> bool {
        // The runtime answers soon after the start.
        let may_register = matches!(state.runtime, RuntimeState::Unasked)
            || kubelet::may_register(&state.runtime, self.workflow.shield.require_runtime);
        // What is known may be about the kubelet before.
        let kubelet = state.kubelet.as_ref().filter(|_| listens(state, pid));
        let is_refused = kubelet.is_some_and(|kubelet| kubelet.refusal().is_some());
        let registers = state.left.is_none() && may_register && !is_refused;
        registers && self.healthy(state, pid).next().is_some()
    }

    /// Returns `true` if the running kubelet has recorded devices of each resource.
    async fn is_listed(&self, state: &ShieldState, pid: i32) -> bool {
        let shield = &self.workflow.shield;
        let socket = std::fs::symlink_metadata(shield.device_plugins().join(SOCKET));
        let Ok(since) = socket.and_then(|about| about.modified()) else {
            return false;
        };
        let path = shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::healthy_since(&path, since)).await;
        matches!(read, Ok(Ok(listed)) if self.healthy(state, pid).all(|resource| listed.contains(&resource)))
    }

    /// Returns the resources with devices that the kubelet can give out, without those that it has refused.
    fn healthy(&self, state: &ShieldState, pid: i32) -> impl Iterator<Item = ResourceName> {
        let resources = self.workflow.store.read(|node| node.advertised_resources());
        let is_refused = move |resource: &ResourceName| {
            let problem = state.registrations.get(resource).and_then(Option::as_ref);
            listens(state, pid)
                && problem.is_some_and(|problem| problem.starts_with(served_resource::REFUSED))
        };
        resources.into_iter().filter(move |resource| {
            let advertised = list::current(&self.workflow, resource, self.booted);
            let devices = advertised.list.devices();
            let has_any =
                !advertised.held.is_empty() || devices.iter().any(|device| advertised.is_healthy(device));
            has_any && !is_refused(resource)
        })
    }
}

fn listens(state: &ShieldState, pid: i32) -> bool {
    let kubelet = state.kubelet.as_ref();
    kubelet.is_some_and(|kubelet| kubelet.pid == Some(pid))
}

/// Returns the process that listens on a socket, without a wait for it.
fn listener(socket: &Path) -> Option<i32> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    net::connect(&client, &SocketAddrUnix::new(socket).ok()?).ok()?;
    UnixStream::from_std(client.into()).ok()?.peer_cred().ok()?.pid()
}

/// A process of a kubelet.
struct Process {
    pid: i32,
    /// Readable once the process has ended. `None` if the kernel does not give one.
    handle: Option<AsyncFd<OwnedFd>>,
}

impl Process {
    /// Returns `None` if there is no such process.
    #[expect(
        deprecated,
        reason = "its successor is unsafe; the descriptor is owned and never replaced"
    )]
    fn find(pid: i32) -> Option<Self> {
        let handle = match pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()) {
            Ok(handle) => AsyncFd::with_interest(handle, Interest::READABLE).ok(),
            Err(Errno::SRCH) => return None,
            Err(_) => None,
        };
        Some(Self { pid, handle })
    }

    async fn ended(&self) {
        if let Some(handle) = &self.handle {
            // Fails only if devlet ends.
            let _ = handle.readable().await;
            return;
        }
        let process = Pid::from_raw(self.pid);
        while process.is_some_and(|process| test_kill_process(process) != Err(Errno::SRCH)) {
            sleep(CHECK_PAUSE).await;
        }
    }
}
