//! Taking a node over from its kubelet while containers run, and handing it back.
//!
//! After devlet has left, containers start from CDI specs without hooks, so devlet cannot know which of them run. Their leases
//! are those of direct containers from then on: if devlet comes back, their devices are in use until the kubelet forgets
//! them.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use devlet_core::LeaseName;
use devlet_core::ResourceName;
use devlet_core::shield::{Lease, LeasePhase};

use super::LeaseWorkflow;
use crate::lease::checkpoint::{self, Held, UnusableCheckpoint};
use crate::lease::containers;
use crate::lease::spec::{self, SpecError};
use crate::store::{WriteError, fs};

/// Why the devices of the kubelet's checkpoint are not taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// Containers could not be given their devices.
    #[error("{0}")]
    Unfit(String),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] UnusableCheckpoint),
    /// The leases cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// It cannot be recorded that devlet is back.
    #[error("{} cannot be removed: {problem}", path.display())]
    Marker { path: PathBuf, problem: io::Error },
}

/// Why the devices are not handed back to the kubelet.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// A container waits for its plugin.
    #[error(
        "a container waits for devices {devices} of {resource}, and only devlet can prepare them; wait until its plugin \
         is back, or delete its pod"
    )]
    Waiting { resource: ResourceName, devices: String },
    /// A plugin is being called.
    #[error(
        "devices {devices} of {resource} are being prepared for a container; try again when that has ended"
    )]
    Preparing { resource: ResourceName, devices: String },
    /// The kubelet's record cannot be compared.
    #[error(transparent)]
    Checkpoint(#[from] UnusableCheckpoint),
    /// The kubelet knows a lease that devlet does not know.
    #[error(
        "container {container} of pod {pod} has a lease that devlet does not know, so it could not be started again; \
         run devlet shield adopt, or delete the pod"
    )]
    Unknown { pod: String, container: String },
    /// The kubelet could give the devices of a container that runs to another one.
    #[error(
        "container {container} still runs with devices {devices} of {resource}, although the kubelet has removed its pod; \
         wait until it has ended"
    )]
    Orphaned {
        container: String,
        resource: ResourceName,
        devices: String,
    },
    /// The runtime would start containers without their devices.
    #[error("containers could not be started again with their devices: {0}")]
    Unfit(String),
    /// The runtime does not read the specs.
    #[error(
        "containers could not be started again: the container runtime reads CDI specs from {}, not from {}; set \
         shield.permanentCdiDir to one of its directories that a reboot does not empty",
        read.iter().map(|directory| directory.display().to_string()).collect::<Vec<_>>().join(", "),
        directory.display()
    )]
    Unread { directory: PathBuf, read: Vec<PathBuf> },
    /// A spec cannot be written.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The leases cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// It cannot be recorded that devlet has left.
    #[error("{} cannot be written: {problem}", path.display())]
    Marker { path: PathBuf, problem: io::Error },
}

impl LeaseWorkflow {
    /// Takes over the devices of the kubelet's checkpoint. Returns the number of containers, and of those among them that
    /// got their devices before devlet stood between.
    pub async fn adopt(&self) -> Result<(usize, usize), AdoptError> {
        let held = self.held().await?;
        let containers = containers::list(&self.shield).await.ok();
        let held = self.current(&held, containers.as_ref());
        let now = self.store.now();
        let leases: Vec<Lease> = held.iter().map(|held| held.to_lease(now)).collect();
        let direct = leases.iter().filter(|lease| lease.is_direct).count();
        let all = leases.len();
        self.store.adopt_leases(leases).await?;
        self.store.update(|node| {
            for held in &held {
                node.leases_mut().identify(&held.name(), &held.holder);
            }
        });
        let path = self.config.left_marker();
        fs::remove(&path).map_err(|problem| AdoptError::Marker { path, problem })?;
        Ok((all, direct))
    }

    async fn held(&self) -> Result<Vec<Held>, UnusableCheckpoint> {
        let path = self.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        read.unwrap_or_else(|_| Ok(Vec::new()))
    }

    /// Checks that all containers can be started again without devlet, and that the kubelet gives no device away that one
    /// has. Returns the leases that devlet serves.
    pub async fn check_leave(&self) -> Result<Vec<Lease>, LeaveError> {
        let held = self.held().await?;
        let containers = containers::list(&self.shield).await.ok();
        let held = self.current(&held, containers.as_ref());
        let known: BTreeSet<LeaseName> = held.iter().map(|held| held.name()).collect();
        self.store.read(|node| {
            let leased = held.iter().filter(|held| held.lease.is_some());
            let mut unknown = leased.filter(|held| node.leases().get(held.name().as_str()).is_none());
            if let Some(held) = unknown.next() {
                return Err(LeaveError::Unknown {
                    pod: held.holder.pod.to_string(),
                    container: held.holder.container.to_string(),
                });
            }
            let mut leases = Vec::new();
            for view in node.leases().iter() {
                let lease = view.lease;
                let (resource, devices) = (lease.resource.clone(), devices(lease));
                if view.phase == LeasePhase::Preparing {
                    return Err(LeaveError::Preparing { resource, devices });
                }
                if let Some(container) = lease.containers.keys().next()
                    && !known.contains(&lease.name)
                {
                    let container = container.clone();
                    return Err(LeaveError::Orphaned {
                        container,
                        resource,
                        devices,
                    });
                }
                if lease.is_direct {
                    continue;
                }
                if lease.answer.is_none() {
                    return Err(LeaveError::Waiting { resource, devices });
                }
                leases.push(lease.clone());
            }
            Ok(leases)
        })
    }

    /// Writes the specs of all leases so that containers start without devlet, also after a reboot, and records that devlet
    /// has left. Returns the number of leases and the directory.
    pub async fn leave(&self) -> Result<(usize, PathBuf), LeaveError> {
        let leases = self.check_leave().await?;
        let count = leases.len();
        let (temporary, permanent) = (self.shield.cdi.clone(), self.shield.permanent_cdi.clone());
        let (directory, names): (_, Vec<_>) = (
            permanent.clone(),
            leases.iter().map(|lease| lease.name.clone()).collect(),
        );
        let runtime = self.runtime.borrow().clone();
        let written = tokio::task::spawn_blocking(move || {
            let answered = leases
                .iter()
                .filter_map(|lease| Some((lease, lease.answer.as_ref()?)));
            for (lease, answer) in answered {
                spec::write(&permanent, &runtime, &lease.name, &answer.options(), None)?;
            }
            Ok::<_, SpecError>(())
        });
        written.await.unwrap_or(Err(SpecError::Internal))?;
        self.store.hand_leases_over().await?;
        let path = self.config.left_marker();
        let marked =
            fs::replace(&path, b"devlet has left the kubelet\n").and_then(|()| fs::sync_directory_of(&path));
        marked.map_err(|problem| LeaveError::Marker { path, problem })?;
        if directory != temporary {
            // Specs in the temporary directory take precedence.
            let removed = tokio::task::spawn_blocking(move || {
                names.iter().for_each(|name| spec::remove(&temporary, name));
            });
            let _ = removed.await;
        }
        Ok((count, directory))
    }
}

fn devices(lease: &Lease) -> String {
    let devices: Vec<&str> = lease.devices.iter().map(|id| id.as_str()).collect();
    devices.join(", ")
}
