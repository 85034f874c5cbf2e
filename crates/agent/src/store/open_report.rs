//! The report of a start, and why a start failed.

use std::io;
use std::path::{Path, PathBuf};

use devlet_core::{Blocked, DeviceView, Node, PodUid};

use super::import_report::{Difference, ImportReport};
use super::state_file::StateFileError;

/// The result of a start.
#[derive(Debug)]
pub struct OpenReport {
    /// The source of the state.
    pub found: Found,
    /// The import of the kubelet's file about devices, if any.
    pub imported: Option<ImportReport>,
    /// The import of the kubelet's file about claims, if any.
    pub imported_claims: Option<ImportReport>,
    /// State that a kubelet wrote since the last run.
    pub takeover: Option<Takeover>,
    /// Kubelet's files that an operator has to decide about.
    pub contested: Vec<Contested>,
    /// Files that could not be used.
    pub quarantined: Vec<Quarantined>,
    /// A reboot of the machine since the last run.
    pub reboot: Option<Reboot>,
    /// The database had not been closed, or was damaged and could be restored.
    pub repaired: bool,
    /// Devices that more than one pod holds.
    pub doubly_held: Vec<DeviceView>,
    /// Why no pod is admitted, if so.
    pub blocked: Option<Blocked>,
}

impl OpenReport {
    pub(super) fn new(quarantined: Vec<Quarantined>) -> Self {
        Self {
            found: Found::Nothing,
            imported: None,
            imported_claims: None,
            takeover: None,
            contested: Vec::new(),
            quarantined,
            reboot: None,
            repaired: false,
            doubly_held: Vec::new(),
            blocked: None,
        }
    }

    /// Adds the state of the restored node: devices that more than one pod holds, and the block.
    pub(super) fn describe(&mut self, node: &Node) {
        self.doubly_held = node.doubly_held();
        self.blocked = node.blocked().cloned();
        if let Some(imported) = &mut self.imported {
            imported.doubly_held.clone_from(&self.doubly_held);
        }
    }
}

/// The source of the state at a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// No state, or no readable one.
    Nothing,
    /// The database.
    Database,
    /// The kubelet's file.
    KubeletFile,
}

/// A file that was set aside because it could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// Its path before.
    pub original: PathBuf,
    /// Its path now.
    pub kept: PathBuf,
    /// Why it could not be used.
    pub reason: String,
}

/// Adopted state that a kubelet wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// Path of devlet's previous state, as JSON.
    pub archive: PathBuf,
    /// The changes to pods.
    pub difference: Difference,
}

/// A kubelet's file that disagrees with the record; an operator has to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contested {
    /// Its path.
    pub original: PathBuf,
    /// Path of a copy.
    pub copy: PathBuf,
    /// The difference between the file and the record, as text.
    pub difference: String,
}

/// A reboot of the machine since the last run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reboot {
    /// ID of the previous boot.
    pub previous: String,
    /// Pods that are marked as from before the reboot.
    pub kept: Vec<PodUid>,
    /// Pods that were released.
    pub released: Vec<PodUid>,
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another devlet has the database open.
    #[error("{} is in use by another process", .path.display())]
    InUse {
        /// The database.
        path: PathBuf,
    },
    /// A later devlet wrote the database.
    #[error(
        "{} has schema {found}, but this devlet knows only up to {known}; use the version that wrote it, or a \
         later one",
        .path.display()
    )]
    NewerSchema {
        /// The database.
        path: PathBuf,
        /// Schema of the database.
        found: u32,
        /// Latest known schema.
        known: u32,
    },
    /// Another user controls a file of the state.
    #[error("{}: {reason}, so that user could replace devlet's state; to allow it: {remedy}", .path.display())]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// The users besides root and devlet's own that may write it.
        reason: String,
        /// The command that changes that.
        remedy: String,
    },
    /// The disk reports an error.
    #[error("{}: {reason}", .path.display())]
    Disk {
        /// The file.
        path: PathBuf,
        /// The error.
        reason: String,
    },
    /// An unreadable file could not be quarantined.
    #[error("{} cannot be read ({reason}) and cannot be set aside", .path.display())]
    Quarantine {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        reason: String,
        /// The error of the quarantine.
        source: io::Error,
    },
    /// devlet's state could not be archived, so the kubelet's file was not adopted.
    #[error("{} cannot be written", .path.display())]
    Archive {
        /// The archive.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("a thread cannot be started")]
    Thread {
        /// The error.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns the error for a file of devlet's own that cannot be used.
    pub(crate) fn unusable(path: &Path, error: &StateFileError) -> Self {
        let (path, reason) = (path.to_owned(), error.to_string());
        match error.remedy(&path) {
            Some(remedy) => Self::Untrusted { path, reason, remedy },
            None => Self::Disk { path, reason },
        }
    }
}
