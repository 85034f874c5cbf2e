//! Options for opening a store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::clock::{Clock, system_time};
use super::file_backend::Storage;
use super::kubelet_file::KubeletFile;
use crate::config::OnReboot;

/// Default of [`OpenOptions::write_timeout`].
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Default of [`OpenOptions::mirror_interval`].
const MIRROR_INTERVAL: Duration = Duration::from_secs(5);

/// Paths of the state, and facts about the machine.
#[derive(Clone)]
pub struct OpenOptions {
    /// The database. Its directory must exist.
    pub database: PathBuf,
    /// A file outside of the database's directory with the node's ID. It distinguishes a first start from a start after
    /// that directory was lost. `None` if there is no such file.
    pub node_id: Option<PathBuf>,
    /// The kubelet's file about devices, imported and mirrored; `None` for none.
    pub checkpoint: Option<PathBuf>,
    /// The kubelet's file about claims, imported and mirrored; `None` for none.
    pub claims: Option<PathBuf>,
    /// Differs for each boot of the machine.
    pub boot_id: String,
    /// Treatment of pods after a reboot of the machine.
    pub on_reboot: OnReboot,
    /// Returns the time. It is called once, at the start.
    pub clock: Clock,
    /// Minimum pause between updates of the kubelet's files.
    pub mirror_interval: Duration,
    /// Duration from which a write counts as stalled.
    pub write_timeout: Duration,
    /// Wraps the file of the database.
    pub storage: Storage,
}

impl OpenOptions {
    /// Returns options with the system's clock and defaults.
    pub fn new(database: impl Into<PathBuf>, boot_id: impl Into<String>) -> Self {
        Self {
            database: database.into(),
            node_id: None,
            checkpoint: None,
            claims: None,
            boot_id: boot_id.into(),
            on_reboot: OnReboot::Keep,
            clock: Arc::new(system_time),
            mirror_interval: MIRROR_INTERVAL,
            write_timeout: WRITE_TIMEOUT,
            storage: Storage::default(),
        }
    }

    pub(super) fn path_of(&self, file: KubeletFile) -> Option<&Path> {
        match file {
            KubeletFile::Devices => self.checkpoint.as_deref(),
            KubeletFile::Claims => self.claims.as_deref(),
        }
    }
}
