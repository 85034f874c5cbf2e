//! Symbolic links at the path of the database.

use std::path::{Path, PathBuf};

use super::fs;
use super::kubelet_file::BlockedBy;
use super::open_report::OpenError;
use super::persisted_state::PersistedState;
use super::state_file::{self, StateFileError};

/// Maximum symbolic links in a row, as in the kernel.
const MAX_LINKS: usize = 40;

/// Resolves a symbolic link to a regular file. A database is replaced by renaming, which must not replace the link.
pub(super) fn resolve(path: &Path) -> PathBuf {
    let is_link = path.is_symlink() && path.is_file();
    let target = is_link.then(|| path.canonicalize().ok());
    target.flatten().unwrap_or_else(|| path.to_owned())
}

/// Returns the chain of paths behind a symbolic link, up to a file or to a path that does not exist.
pub(super) fn link_targets(path: &Path) -> Vec<PathBuf> {
    let mut names = Vec::new();
    let mut name = path.to_owned();
    while names.len() < MAX_LINKS
        && let Ok(target) = std::fs::read_link(&name)
    {
        name = fs::directory_of(&name).join(target);
        names.push(name.clone());
    }
    names
}

/// Checks that no other user can replace a target of a link.
pub(super) fn check_link_targets(names: &[PathBuf]) -> Result<(), OpenError> {
    for directory in names.iter().map(|name| fs::directory_of(name)) {
        let metadata = std::fs::metadata(directory).map_err(StateFileError::from);
        let checked = metadata.and_then(|metadata| state_file::check_directory(&metadata, false));
        checked.map_err(|error| OpenError::unusable(directory, &error))?;
    }
    Ok(())
}

/// Returns the quarantined link that this database replaced, if the link leads to a file again.
pub(super) fn restored_link(persisted: &PersistedState) -> Option<PathBuf> {
    let record = persisted.metadata.blocked.get(&BlockedBy::Database)?;
    let link = Path::new(&record.file);
    (record.is_lost && link.is_symlink() && link.is_file()).then(|| link.to_owned())
}
