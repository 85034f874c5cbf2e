//! Operations on files: atomic replacement, quarantine under another name, and the identity of files.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use devlet_core::Moment;
use rustix::fs::OFlags;

use super::clock::system_time;
use super::state_file;

/// Only the user of devlet may read and write.
pub(crate) const PRIVATE: u32 = 0o600;
const PRIVATE_DIRECTORY: u32 = 0o700;

/// Follows the name of a quarantined file; the time follows it.
pub(crate) const QUARANTINE_SUFFIX: &str = ".unreadable-";

/// Appends `suffix` to the file name of `path`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

pub(crate) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Syncs the file's directory, which makes created, renamed and removed names durable.
pub(crate) fn sync_directory_of(path: &Path) -> io::Result<()> {
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits();
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags.cast_signed());
    options.open(directory_of(path))?.sync_all()
}

/// Identifies a file among all files that exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(metadata: &fs::Metadata) -> Self {
        let (device, inode) = (metadata.dev(), metadata.ino());
        Self { device, inode }
    }

    /// Returns the ID of the file at `path`, following links.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        Self::of_at_least(path, 0)
    }

    /// Like [`FileId::at`], but `None` if the file is shorter than `length` bytes.
    pub(crate) fn of_at_least(path: &Path, length: u64) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        (metadata.len() >= length).then(|| Self::of(&metadata))
    }
}

/// Identifies one version of a file: it differs after each write, even if the file is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileStamp {
    id: FileId,
    /// Time of the last change of content or attributes: seconds and nanoseconds.
    ctime: (i64, i64),
    length: u64,
}

impl FileStamp {
    pub(crate) fn of(metadata: &fs::Metadata) -> Self {
        Self {
            id: FileId::of(metadata),
            ctime: (metadata.ctime(), metadata.ctime_nsec()),
            length: metadata.len(),
        }
    }

    /// Returns the stamp of the file at `path`, without following links.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        fs::symlink_metadata(path).ok().as_ref().map(Self::of)
    }
}

/// Creates an empty file of devlet's own under a temporary name.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    free_temporary_name(path)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(PRIVATE);
    options.open(path)
}

/// Frees a temporary name. A file that a crash left there is removed; a directory is not devlet's, so it is quarantined.
fn free_temporary_name(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(_) if is_directory(path) => quarantine_directory(path),
        done => done,
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

fn quarantine_directory(path: &Path) -> io::Result<()> {
    let kept = move_to_quarantine(path, system_time())?;
    tracing::warn!(path = %path.display(), kept = %kept.display(), "directory set aside");
    Ok(())
}

/// Removes the permissions of other users.
pub(crate) fn make_private(file: &File, metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.permissions().mode() & 0o777 != PRIVATE {
        file.set_permissions(Permissions::from_mode(PRIVATE))?;
    }
    Ok(())
}

/// Replaces a file atomically: a reader, even after a crash, sees the old content or the new. The new content is durable
/// only after the directory has been synced, too.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // A kubelet uses a leading dot, too: it skips such names when it lists its directory.
    let name = path
        .file_name()
        .map(|name| format!(".{}.new", name.to_string_lossy()));
    let temporary = directory_of(path).join(name.unwrap_or_default());
    let write = || {
        let mut file = create_private(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        if is_directory(path) {
            quarantine_directory(path)?;
        }
        fs::rename(&temporary, path)
    };
    let written = write();
    if written.is_err() {
        // The next attempt removes it in any case.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Overwrites a small file of devlet's own in place, with one write. That needs neither free space nor a temporary name.
/// The content is padded with newlines to the length of the file.
pub(crate) fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let opened = state_file::open(path, true).map_err(io::Error::other)?;
    let (file, metadata) = opened.ok_or(io::ErrorKind::NotFound)?;
    state_file::check_access(&metadata).map_err(io::Error::other)?;
    let mut padded = content.to_vec();
    let length = usize::try_from(metadata.len()).unwrap_or_default();
    padded.resize(length.max(content.len()), b'\n');
    file.write_all_at(&padded, 0)?;
    file.sync_all()
}

/// Writes a new private file, creating its directory if needed. Returns the name that was free.
pub(crate) fn write_new(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let mut directory = fs::DirBuilder::new();
    directory.recursive(true).mode(PRIVATE_DIRECTORY);
    directory.create(directory_of(path))?;
    with_unused_name(path, |candidate| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(PRIVATE);
        let mut file = options.open(candidate)?;
        let written = file.write_all(content).and_then(|()| file.sync_all());
        // A partial file would keep space occupied on a full disk.
        written.inspect_err(|_| _ = fs::remove_file(candidate))
    })
}

/// Gives a file a second name, `<name>.unreadable-<timestamp>`, which devlet never writes to. The caller removes or
/// replaces the original after the new state is on disk, so a start after a crash finds the original again. A directory
/// cannot have a second name and was never state, so it is moved.
pub(crate) fn quarantine(path: &Path, now: Moment) -> io::Result<PathBuf> {
    if fs::symlink_metadata(path)?.is_dir() {
        return move_to_quarantine(path, now);
    }
    with_unused_name(&quarantine_path(path, now), |candidate| {
        match fs::hard_link(path, candidate) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // Some file systems do not support hard links.
                let opened = state_file::open(path, false).map_err(io::Error::other)?;
                let (mut source, _) = opened.ok_or(io::ErrorKind::NotFound)?;
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).mode(PRIVATE);
                let mut copy = options.open(candidate)?;
                io::copy(&mut source, &mut copy)?;
                copy.sync_all()
            }
            done => done,
        }
    })
}

/// Renames a file of any kind to `<name>.unreadable-<timestamp>`, without opening it.
pub(crate) fn move_to_quarantine(path: &Path, now: Moment) -> io::Result<PathBuf> {
    with_unused_name(
        &quarantine_path(path, now),
        |candidate| match fs::symlink_metadata(candidate) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(path, candidate),
            Err(error) => Err(error),
        },
    )
}

fn quarantine_path(path: &Path, now: Moment) -> PathBuf {
    with_suffix(path, &format!("{QUARANTINE_SUFFIX}{}", timestamp(now)))
}

/// Removes the original of a quarantined file, if it still exists, and syncs the directory.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync_directory_of(path),
    }
}

/// Calls `attempt` with `path`, then with numbered names, until one does not exist. Syncs the directory.
fn with_unused_name(path: &Path, attempt: impl Fn(&Path) -> io::Result<()>) -> io::Result<PathBuf> {
    let mut candidate = path.to_owned();
    for number in 2_u32.. {
        match attempt(&candidate) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                candidate = with_suffix(path, &format!("-{number}"));
            }
            Err(error) => return Err(error),
        }
    }
    sync_directory_of(&candidate)?;
    Ok(candidate)
}

/// Formats a moment for use in a file name.
pub(crate) fn timestamp(now: Moment) -> String {
    i64::try_from(now.0)
        .ok()
        .and_then(|milliseconds| jiff::Timestamp::from_millisecond(milliseconds).ok())
        .map_or_else(
            || now.0.to_string(),
            |time| time.strftime("%Y%m%dT%H%M%S.%3fZ").to_string(),
        )
}
