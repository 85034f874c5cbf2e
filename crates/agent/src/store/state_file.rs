//! Safe opening and reading of state files: only regular files of bounded size, without following links or blocking.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

/// Maximum size of a state file in bytes. A file with 10,000 pods has a few megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// Mode bits that let the group and others write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why a file is not read as state.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateFileError {
    /// Opening it could block or never end.
    #[error("it is {kind}, not a regular file")]
    NotRegular {
        /// With its article.
        kind: &'static str,
    },
    /// Another user controls its content.
    #[error("it is owned by uid {uid}, not by root or the user that devlet runs as")]
    Owner {
        /// The owner.
        uid: u32,
    },
    /// Another user can change its content.
    #[error("other users may write it (mode {:04o})", .mode & 0o7777)]
    Writable {
        /// The permission bits.
        mode: u32,
    },
    /// It can be changed through another name.
    #[error("it has {links} hard links instead of one")]
    Links {
        /// How many names the file has.
        links: u64,
    },
    /// Reading it could use up the memory.
    #[error("it has {bytes} bytes, more than the {MAX_BYTES} that are read")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl StateFileError {
    /// Returns `true` if root or the user of devlet can have written the file nevertheless.
    pub(crate) fn may_be_state(&self) -> bool {
        match self {
            Self::NotRegular { .. } | Self::Owner { .. } => false,
            Self::Writable { .. } | Self::Links { .. } | Self::TooLarge { .. } | Self::Io(_) => true,
        }
    }

    /// Returns the command that takes control of the file or directory away from another user.
    pub(crate) fn remedy(&self, path: &Path) -> Option<String> {
        let path = path.display();
        match self {
            Self::Owner { .. } => {
                let uid = rustix::process::geteuid().as_raw();
                Some(format!("chown {uid} {path}"))
            }
            Self::Writable { .. } => Some(format!("chmod go-w {path}")),
            Self::NotRegular { .. } | Self::Links { .. } | Self::TooLarge { .. } | Self::Io(_) => None,
        }
    }
}

/// Opens a regular file for reading, or for reading and writing. `None` if the path does not exist.
pub(crate) fn open(path: &Path, write: bool) -> Result<Option<(File, Metadata)>, StateFileError> {
    // Opening a device can have side effects, so the kind is checked before and after.
    match fs::symlink_metadata(path) {
        Ok(metadata) => check_kind(&metadata)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let file = match options().read(true).write(write).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    Ok(Some((file, metadata)))
}

/// Opens a regular file for writing. Creates it with this mode if the path does not exist.
pub(crate) fn open_or_create(path: &Path, mode: u32) -> Result<(File, Metadata), StateFileError> {
    if let Some(opened) = open(path, true)? {
        return Ok(opened);
    }
    let file = options().write(true).create(true).mode(mode).open(path)?;
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    Ok((file, metadata))
}

/// Reads a file that belongs to root or the user of devlet, and that no other user may write. `None` if the path does not
/// exist.
pub(crate) fn read(path: &Path) -> Result<Option<(Vec<u8>, Metadata)>, StateFileError> {
    let Some((file, metadata)) = open(path, false)? else {
        return Ok(None);
    };
    check_access(&metadata)?;
    let content = read_open(file, &metadata)?;
    Ok(Some((content, metadata)))
}

/// Reads an open file, up to [`MAX_BYTES`].
pub(crate) fn read_open(file: File, metadata: &Metadata) -> Result<Vec<u8>, StateFileError> {
    let bytes = metadata.len();
    if bytes > MAX_BYTES {
        return Err(StateFileError::TooLarge { bytes });
    }
    let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
    // The file may grow while it is read.
    file.take(MAX_BYTES + 1).read_to_end(&mut content)?;
    let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
    if bytes > MAX_BYTES {
        return Err(StateFileError::TooLarge { bytes });
    }
    Ok(content)
}

/// Checks that a file has only one name, so that it cannot be changed through another one.
pub(crate) fn check_links(metadata: &Metadata) -> Result<(), StateFileError> {
    match metadata.nlink() {
        1 => Ok(()),
        links => Err(StateFileError::Links { links }),
    }
}

/// Checks that a file is controlled by root or by the user of devlet.
pub(crate) fn check_access(metadata: &Metadata) -> Result<(), StateFileError> {
    let (uid, mode) = (metadata.uid(), metadata.mode());
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(StateFileError::Owner { uid });
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(StateFileError::Writable { mode });
    }
    Ok(())
}

/// Checks that no other user can replace files in a directory. `sticky` accepts a sticky directory: its users can remove
/// only their own files.
pub(crate) fn check_directory(metadata: &Metadata, sticky: bool) -> Result<(), StateFileError> {
    let (uid, gid, mode) = (metadata.uid(), metadata.gid(), metadata.mode());
    let own = rustix::process::geteuid().as_raw();
    if uid != 0 && uid != own {
        return Err(StateFileError::Owner { uid });
    }
    // The group of root, and the private group of a user, which by convention has the user's number.
    let has_private_group = gid == 0 || gid == own;
    let writable = mode
        & if has_private_group {
            0o002
        } else {
            WRITABLE_BY_OTHERS
        };
    let is_sticky = sticky && mode & 0o1000 != 0;
    if writable != 0 && !is_sticky {
        return Err(StateFileError::Writable { mode });
    }
    Ok(())
}

fn options() -> OpenOptions {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits();
    let mut options = OpenOptions::new();
    options.custom_flags(flags.cast_signed());
    options
}

fn check_kind(metadata: &Metadata) -> Result<(), StateFileError> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let kind = if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(StateFileError::NotRegular { kind })
}
