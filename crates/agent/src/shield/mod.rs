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
//! | `endpoint` | the device plugin of one resource |
//! | `list` | device lists that a kubelet accepts |
//! | `release` | ends leases that the kubelet does not know any more |
//! | `report` | what is shown about all this |

mod endpoint;
mod kubelet;
mod list;
mod release;
pub mod report;

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::store::Store;
use crate::workflow::lease::LeaseWorkflow;
pub use kubelet::WatchError;
pub use report::ShieldReport;

/// Pause between writes of the lists that plugins change.
const RECORD_PAUSE: Duration = Duration::from_secs(1);

/// Starts to stand between the kubelet and the plugins.
pub(crate) fn start(
    workflow: LeaseWorkflow,
    report: ShieldReport,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<(), WatchError> {
    let directory = kubelet::Directory::watch(&workflow.shield.device_plugins())?;
    tasks.spawn(record_lists(workflow.store.clone(), stop.clone()));
    tasks.spawn(release::run(workflow.clone(), report.clone(), stop.clone()));
    let started = workflow.store.now();
    tasks.spawn(kubelet::run(
        directory,
        workflow,
        report,
        started,
        tasks.clone(),
        stop.clone(),
    ));
    Ok(())
}

/// Records the devices that plugins list, so that they are advertised after a restart.
async fn record_lists(store: Store, stop: CancellationToken) {
    let mut changes = store.subscribe();
    let run = async {
        loop {
            changes.borrow_and_update();
            if let Err(error) = store.record_lists().await {
                tracing::warn!(%error, "device lists not recorded, trying again");
            }
            tokio::time::sleep(RECORD_PAUSE).await;
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
