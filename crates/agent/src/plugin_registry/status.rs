//! Sockets in `plugins_registry` that are not served, for `devlet status`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

/// Maximum dead sockets that are named. Further ones are only counted.
const NAMED: usize = 3;

/// The newest `Summary`. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct RegistryStatus(Arc<watch::Sender<Summary>>);

impl RegistryStatus {
    pub(super) fn set(&self, summary: Summary) {
        self.0.send_replace(summary);
    }

    pub(crate) fn get(&self) -> Summary {
        self.0.borrow().clone()
    }
}

/// Sockets and directories that are not served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Number of sockets that do not accept connections.
    pub(crate) dead: usize,
    /// The first of these sockets.
    pub(crate) named: Vec<PathBuf>,
    /// Number of sockets over the limit.
    pub(crate) skipped_sockets: usize,
    /// Number of directories over the limit, or too deep.
    pub(crate) skipped_directories: usize,
}

impl Summary {
    pub(super) fn add_dead(&mut self, socket: &Path) {
        self.dead += 1;
        if self.named.len() < NAMED {
            self.named.push(socket.to_owned());
        }
    }
}
