//! devlet between a kubelet and the device plugins: a kubelet to the plugins, a device plugin to the kubelet.
//!
//! ```text
//!   plugins ──Register, ListAndWatch──► devlet ──Register, ListAndWatch──► kubelet
//!           ◄──Allocate, PreStart──────  │  ◄──Allocate, PreStart─────────
//!                                        └──CDI spec──► container runtime ──hooks──► devlet
//! ```
//!
//! | module | purpose |
//! | --- | --- |
//! | `kubelet` | watches the kubelet's directory, and registers after each start of the kubelet |
//! | `served_resource` | one resource: its socket, and its registration |
//! | `endpoint` | the device plugin of one resource |
//! | `list` | device lists that a kubelet accepts |
//! | `static_pods` | keeps a starting kubelet from admitting static pods before it has the lists |
//! | `release` | ends leases that the kubelet does not know any more |
//! | `missing` | finds containers without devices that they must have |
//! | `pod_resources` | the devices that containers have according to the kubelet |
//! | `beside` | finds plugins in the kubelet's directory |
//! | `pods` | the pods that the kubelet reports |
//! | `runtime` | asks the container runtime and the kubelet about themselves |
//! | `report` | what is shown about all this |

pub mod beside;
mod endpoint;
mod kubelet;
mod list;
mod missing;
mod pod_resources;
pub mod pods;
mod release;
pub mod report;
pub mod runtime;
mod served_resource;
mod static_pods;

use std::time::Duration;

use devlet_core::Moment;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::workflow::lease::LeaseWorkflow;
pub use kubelet::WatchError;
use report::RuntimeState;
pub use report::ShieldReport;
use static_pods::StaticPods;

/// Pauses between questions to the runtime: while its configuration is right, and otherwise.
const READY_PAUSE: Duration = Duration::from_secs(60);
const ASK_PAUSE: Duration = Duration::from_secs(5);

/// Pause between writes of the lists that plugins change.
const RECORD_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause between looks for lists of plugins that are gone for good.
const FORGET_PAUSE: Duration = Duration::from_secs(60);

/// The most programs of kubelets whose versions are remembered.
const MAX_PROGRAMS: usize = 16;

/// Starts to stand between the kubelet and the plugins.
pub(crate) fn start(
    workflow: LeaseWorkflow,
    report: ShieldReport,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<(), WatchError> {
    let directory = kubelet::Directory::watch(&workflow.shield.device_plugins())?;
    directory.prepare()?;
    let booted = booted(workflow.store.now());
    tasks.spawn(record_lists(workflow.clone(), booted, stop.clone()));
    tasks.spawn(release::run(workflow.clone(), report.clone(), stop.clone()));
    let kubelet = workflow.shield.kubelet.clone();
    tasks.spawn(pods::run(kubelet, report.clone(), stop.clone()));
    tasks.spawn(follow_kubelets(report.clone(), stop.clone()));
    tasks.spawn(watch_runtime(workflow.clone(), report.clone(), stop.clone()));
    match StaticPods::watch(workflow.clone(), report.clone(), booted) {
        Ok(watching) => _ = tasks.spawn(watching.run(stop.clone())),
        Err(error) => {
            tracing::warn!(%error, "static pods not delayed: a kubelet may reject them at its start");
        }
    }
    tasks.spawn(kubelet::run(
        directory,
        workflow,
        report,
        booted,
        tasks.clone(),
        stop.clone(),
    ));
    Ok(())
}

/// Returns when the machine was booted.
fn booted(now: Moment) -> Moment {
    let uptime = std::fs::read_to_string("/proc/uptime").ok();
    let seconds = uptime.and_then(|text| text.split_once('.')?.0.parse::<u64>().ok());
    Moment(
        now.0
            .saturating_sub(seconds.unwrap_or_default().saturating_mul(1000)),
    )
}

/// Records the devices that plugins list, so that they are advertised after a restart, and forgets those of plugins that
/// are gone for good.
async fn record_lists(workflow: LeaseWorkflow, booted: Moment, stop: CancellationToken) {
    let (store, away) = (&workflow.store, workflow.shield.away_ms());
    let mut changes = store.subscribe();
    let run = async {
        loop {
            changes.borrow_and_update();
            let now = store.now();
            let gone = store.read(|node| node.lists_to_forget(now, booted, away));
            if !gone.is_empty() {
                store.update(|node| node.forget_lists(&gone));
            }
            if let Err(error) = store.record_lists().await {
                tracing::warn!(%error, "device lists not recorded, trying again");
            }
            tokio::time::sleep(RECORD_PAUSE).await;
            // Lists are also forgotten without a change.
            let _ = tokio::time::timeout(FORGET_PAUSE, changes.changed()).await;
        }
    };
    tokio::select! {
        () = run => {}
        () = stop.cancelled() => {}
    }
}

/// Asks the runtime again and again, because it may be started or configured later.
async fn watch_runtime(workflow: LeaseWorkflow, report: ShieldReport, stop: CancellationToken) {
    let run = async {
        // Without it, paths through links cannot be compared with those of the runtime.
        let directory = &workflow.shield.cdi;
        if let Err(error) = tokio::fs::create_dir_all(directory).await {
            tracing::warn!(%error, directory = %directory.display(), "directory of CDI specs not created");
        }
        loop {
            let runtime = runtime::ask(&workflow.shield).await;
            if let (RuntimeState::Unfit { name, problem }, true) = (&runtime, report.get().runtime != runtime)
            {
                tracing::error!(runtime = name, problem, "nothing is registered with the kubelet");
            }
            let is_ready = matches!(runtime, RuntimeState::Ready { .. });
            if let RuntimeState::Ready { cdi, .. } = &runtime {
                workflow.runtime.send_replace(cdi.clone());
            }
            // A runtime that is slow or restarts has not changed its configuration.
            let is_unknown = matches!(runtime, RuntimeState::Unknown { .. });
            report.update(|state| match state.runtime {
                RuntimeState::Unfit { .. } | RuntimeState::Ready { .. } if is_unknown => {}
                _ => state.runtime = runtime,
            });
            tokio::time::sleep(if is_ready { READY_PAUSE } else { ASK_PAUSE }).await;
        }
    };
    tokio::select! {
        () = run => {}
        () = stop.cancelled() => {}
    }
}

/// Finds out the version of each kubelet that listens, at once. A program is asked once, also over restarts of the kubelet.
async fn follow_kubelets(report: ShieldReport, stop: CancellationToken) {
    let mut changes = report.subscribe();
    let run = async {
        loop {
            let asked = {
                let state = changes.borrow_and_update();
                let kubelet = state.kubelet.as_ref().filter(|kubelet| !kubelet.is_asked);
                let pid = kubelet.and_then(|kubelet| kubelet.pid);
                pid.map(|pid| (pid, runtime::program(pid)))
            };
            if let Some((pid, program)) = asked {
                let known =
                    program.and_then(|program| report.read(|state| state.versions.get(&program).cloned()));
                let version = match known {
                    Some(version) => version,
                    None => runtime::kubelet_version(pid).await,
                };
                report.update(|state| {
                    if state.versions.len() >= MAX_PROGRAMS {
                        state.versions.clear();
                    }
                    state
                        .versions
                        .extend(program.map(|program| (program, version.clone())));
                    if let Some(kubelet) = state.kubelet.as_mut().filter(|kubelet| kubelet.pid == Some(pid)) {
                        kubelet.version = version;
                        kubelet.is_asked = true;
                    }
                });
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = run => {}
        () = stop.cancelled() => {}
    }
}
