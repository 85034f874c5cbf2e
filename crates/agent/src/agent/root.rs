//! Prepares the root directory: creates its directories, checks their owners, and locks it.
//!
//! Only root and the user of devlet may be able to replace the state. So the root directory, `devlet/` and the files in it
//! must belong to one of them, and other users may not write them. `device-plugins` and `plugins_registry` are different:
//! device plugins of other users put their sockets there, and nothing in there is trusted without a check.
//!
//! Deliberately absent: checks of the directories above the root directory. They belong to the administrator.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use super::StartError;
use crate::config::Config;
use crate::store::fs::{self, PRIVATE};
use crate::store::state_file::{self, StateFileError};
use crate::store::{self, Quarantined};

/// Creates the directories of a node, and checks which users may write them.
pub(crate) fn prepare(config: &Config) -> Result<(), StartError> {
    for directory in [config.root.clone(), config.own()] {
        make_directory(&directory)?;
        // In a sticky root other users can only add files, and `devlet/` is checked itself.
        check_directory(&directory, directory == config.root)?;
    }
    make_directory(&config.device_plugins())?;
    make_directory(&config.plugins_registry())
}

fn make_directory(path: &Path) -> Result<(), StartError> {
    let failed = |problem| StartError::Directory {
        path: path.to_owned(),
        problem,
    };
    let made = DirBuilder::new()
        .recursive(true)
        .mode(devlet_uds::DIRECTORY_MODE)
        .create(path);
    made.map_err(|problem| match problem.kind() {
        // The system reports a file, or a link to nowhere, as one that exists already.
        io::ErrorKind::AlreadyExists => failed(rustix::io::Errno::NOTDIR.into()),
        _ => failed(problem),
    })
}

fn check_directory(path: &Path, sticky: bool) -> Result<(), StartError> {
    let metadata = std::fs::metadata(path).map_err(|problem| StartError::Directory {
        path: path.to_owned(),
        problem,
    })?;
    state_file::check_directory(&metadata, sticky).map_err(|problem| untrusted(path, &problem))
}

fn untrusted(path: &Path, problem: &StateFileError) -> StartError {
    StartError::Untrusted {
        path: path.to_owned(),
        problem: problem.to_string(),
        remedy: problem.remedy(path).unwrap_or_default(),
    }
}

/// Takes the lock of the root directory. Anything but a regular file in its place is set aside and returned.
pub(crate) fn lock(config: &Config) -> Result<(File, Option<Quarantined>), StartError> {
    let path = config.lock();
    let (file, set_aside) = match open_lock(&path) {
        Err(StateFileError::NotRegular { kind }) => {
            let moved = fs::move_to_quarantine(&path, store::system_time());
            let kept = moved.map_err(|problem| lock_failed(&path, problem))?;
            let set_aside = Quarantined {
                original: path.clone(),
                kept,
                reason: StateFileError::NotRegular { kind }.to_string(),
            };
            (open_lock(&path), Some(set_aside))
        }
        opened => (opened, None),
    };
    let file = file.map_err(|error| match error {
        StateFileError::Io(problem) => lock_failed(&path, problem),
        problem @ (StateFileError::Owner { .. } | StateFileError::Writable { .. }) => {
            untrusted(&path, &problem)
        }
        problem => lock_failed(&path, io::Error::other(problem.to_string())),
    })?;
    match file.try_lock() {
        Ok(()) => Ok((file, set_aside)),
        Err(std::fs::TryLockError::WouldBlock) => Err(StartError::Locked {
            root: config.root.clone(),
        }),
        Err(std::fs::TryLockError::Error(problem)) => Err(lock_failed(&path, problem)),
    }
}

fn open_lock(path: &Path) -> Result<File, StateFileError> {
    let (file, metadata) = state_file::open_or_create(path, PRIVATE)?;
    state_file::check_access(&metadata)?;
    Ok(file)
}

fn lock_failed(path: &Path, problem: io::Error) -> StartError {
    StartError::Lock {
        path: path.to_owned(),
        problem,
    }
}
