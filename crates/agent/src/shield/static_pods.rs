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
//! Invariants:
//! - only opens of a process named `kubelet` wait, for [`MAX_DELAY`] at most, and every open succeeds;
//! - if devlet ends, the kernel ends the wait.

use std::io;
use std::time::Duration;

use devlet_core::shield::ContainerProcess;
use devlet_core::{Moment, ResourceName};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::fs::CWD;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::kubelet::{CHECK_PAUSE, Directory, SOCKET};
use super::list;
use super::report::{RuntimeState, ShieldReport, ShieldState};
use crate::lease::{checkpoint, process};
use crate::workflow::lease::LeaseWorkflow;

/// Longest delay of a kubelet's static pods. A kubelet creates its socket within about two seconds if its runtime is there.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// The name of processes whose opens are delayed.
const DELAYED: &str = "kubelet";

/// Delays opens of the files of static pods.
pub(super) struct StaticPods {
    opens: AsyncFd<Fanotify>,
    workflow: LeaseWorkflow,
    report: ShieldReport,
    /// When the machine was booted.
    booted: Moment,
}

impl StaticPods {
    /// Begins to watch: from now on, opens wait for [`Self::run`].
    #[expect(
        deprecated,
        reason = "the successor of `with_interest` is unsafe; the descriptor is owned and never replaced"
    )]
    pub(super) fn watch(workflow: LeaseWorkflow, report: ShieldReport, booted: Moment) -> io::Result<Self> {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let opens = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
        let watching = Self {
            opens: AsyncFd::with_interest(opens, Interest::READABLE)?,
            workflow,
            report,
            booted,
        };
        watching.mark();
        Ok(watching)
    }

    /// Serves until devlet stops. Then the kernel lets all opens succeed.
    pub(super) async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = self.serve() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn serve(&self) {
        // The last kubelet that has waited: it reads the files again and again.
        let mut ready = None;
        let mut waiting = FuturesUnordered::new();
        loop {
            let read = |opens: &Fanotify| opens.read_events().map_err(io::Error::from);
            tokio::select! {
                opened = timeout(CHECK_PAUSE, self.opens.async_io(Interest::READABLE, read)) => {
                    for open in opened.ok().and_then(Result::ok).into_iter().flatten() {
                        match kubelet(open.pid()).filter(|kubelet| ready.as_ref() != Some(kubelet)) {
                            Some(kubelet) => waiting.push(async move {
                                self.wait(open.pid()).await;
                                self.allow(&open);
                                kubelet
                            }),
                            None => self.allow(&open),
                        }
                    }
                }
                Some(kubelet) = waiting.next() => ready = Some(kubelet),
            }
            self.mark();
        }
    }

    /// Watches the directory, which may be another one by now. There may be none.
    fn mark(&self) {
        let flags = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_ONLYDIR;
        let opens = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_EVENT_ON_CHILD;
        let directory = &self.workflow.shield.static_pods;
        if let Err(error) = self.opens.get_ref().mark(flags, opens, CWD, Some(directory)) {
            tracing::debug!(directory = %directory.display(), %error, "static pods not watched");
        }
    }

    /// Waits until a kubelet has the devices.
    async fn wait(&self, pid: i32) {
        let began = Instant::now();
        if timeout(MAX_DELAY, self.until_ready(pid)).await.is_ok() {
            tracing::info!(pid, waited = ?began.elapsed(), "static pods delayed until the kubelet knew the devices");
        } else {
            tracing::warn!(pid, waited = ?MAX_DELAY, "static pods not delayed any more: they may be rejected");
        }
    }

    fn allow(&self, open: &FanotifyEvent) {
        let allow = |file| FanotifyResponse::new(file, Response::FAN_ALLOW);
        let answer = open
            .fd()
            .map(|file| self.opens.get_ref().write_response(allow(file)));
        if let Some(Err(error)) = answer {
            tracing::warn!(pid = open.pid(), %error, "open of a static pod not answered");
        }
    }

    async fn until_ready(&self, pid: i32) {
        let Ok(directory) = Directory::watch(&self.workflow.shield.device_plugins()) else {
            return;
        };
        let mut changes = self.report.subscribe();
        loop {
            let state = changes.borrow_and_update().clone();
            if !self.delays(&state)
                || state.kubelet.is_some_and(|kubelet| kubelet.pid == Some(pid)) && self.is_listed().await
            {
                return;
            }
            tokio::select! {
                () = directory.changed() => {}
                _ = changes.changed() => {}
            }
        }
    }

    /// Returns `false` if nothing is going to be registered.
    fn delays(&self, state: &ShieldState) -> bool {
        let registers = state.left.is_none() && !matches!(state.runtime, RuntimeState::Unfit { .. });
        registers && self.healthy().next().is_some()
    }

    /// Returns `true` if the running kubelet has recorded devices of each resource.
    async fn is_listed(&self) -> bool {
        let shield = &self.workflow.shield;
        let socket = std::fs::symlink_metadata(shield.device_plugins().join(SOCKET));
        let Ok(since) = socket.and_then(|about| about.modified()) else {
            return false;
        };
        let path = shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::healthy_since(&path, since)).await;
        matches!(read, Ok(Ok(listed)) if self.healthy().all(|resource| listed.contains(&resource)))
    }

    /// Returns the resources with devices that the kubelet can give out.
    fn healthy(&self) -> impl Iterator<Item = ResourceName> {
        let resources = self.workflow.store.read(|node| node.advertised_resources());
        resources.into_iter().filter(|resource| {
            let advertised = list::current(&self.workflow, resource, self.booted);
            let devices = advertised.list.devices();
            !advertised.held.is_empty() || devices.iter().any(|device| advertised.is_healthy(device))
        })
    }
}

/// Returns the process if it is a kubelet.
fn kubelet(pid: i32) -> Option<ContainerProcess> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let process = process::find(u32::try_from(pid).ok()?)?;
    (name.trim_end() == DELAYED).then_some(process)
}
