//! Files that must be whole or absent, and files that must never be lost.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use devlet_core::Moment;
use rustix::fs::OFlags;

use super::open::system_time;
use super::state_file;

/// Only the user of devlet may read and write.
pub(crate) const PRIVATE: u32 = 0o600;
const PRIVATE_DIRECTORY: u32 = 0o700;

/// The names of files that could not be read go on like this, up to the time.
pub(crate) const ASIDE: &str = ".unreadable-";

/// `path` with `suffix` after its name.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
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

/// Makes names in the file's directory durable.
pub(crate) fn sync_directory_of(path: &Path) -> io::Result<()> {
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits();
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags.cast_signed());
    options.open(directory_of(path))?.sync_all()
}

/// What tells one file from every other that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(crate) fn of(about: &fs::Metadata) -> Self {
        let (device, inode) = (about.dev(), about.ino());
        Self { device, inode }
    }

    /// Of the file that has this name, unless it has been cut short.
    pub(crate) fn of_at_least(path: &Path, length: u64) -> Option<Self> {
        let about = fs::metadata(path).ok()?;
        (about.len() >= length).then(|| Self::of(&about))
    }

    /// Of the file that has this name.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::of)
    }
}

/// Creates an empty file of our own under a temporary name.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    clear(path)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(PRIVATE);
    options.open(path)
}

/// Frees a temporary name: a file that a crash left there is removed, a directory, which is not ours, is moved aside.
fn clear(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(_) if is_directory(path) => move_directory_aside(path),
        done => done,
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

fn move_directory_aside(path: &Path) -> io::Result<()> {
    let kept = move_aside(path, system_time())?;
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

/// Replaces a file as a whole: a reader, even after a crash, sees the old content or the new. Which one it is
/// after a crash is certain only when the directory has been synced, too.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // With a dot in front, as a kubelet does: it lists its directory without such names.
    let name = path
        .file_name()
        .map(|name| format!(".{}.new", name.to_string_lossy()));
    let temporary = directory_of(path).join(name.unwrap_or_default());
    let write = || {
        let mut file = create_private(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        if is_directory(path) {
            move_directory_aside(path)?;
        }
        fs::rename(&temporary, path)
    };
    let written = write();
    if written.is_err() {
        // It is useless now, and the next attempt removes it in any case.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Overwrites a small file of our own in place, with one write: that needs neither space on the disk nor a temporary name. The
/// content is padded with newlines to the length of the file.
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

/// Writes a file of our own that was not there before, in a directory of our own.
pub(crate) fn write_new(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let mut directory = fs::DirBuilder::new();
    directory.recursive(true).mode(PRIVATE_DIRECTORY);
    directory.create(directory_of(path))?;
    unused(path, |candidate| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(PRIVATE);
        let mut file = options.open(candidate)?;
        let written = file.write_all(content).and_then(|()| file.sync_all());
        // A part of it takes space that may be what the disk lacks.
        written.inspect_err(|_| _ = fs::remove_file(candidate))
    })
}

/// Gives a file a second name, `<name>.unreadable-<timestamp>`, under which nothing will ever write. The file
/// itself is removed or replaced afterwards, when the state that follows from it is on disk: a crash in between leads
/// back here, not to a start without it. A directory, which has no second name and was never state, is moved.
pub(crate) fn keep_aside(path: &Path, now: Moment) -> io::Result<PathBuf> {
    if fs::symlink_metadata(path)?.is_dir() {
        return move_aside(path, now);
    }
    unused(&aside(path, now), |candidate| {
        match fs::hard_link(path, candidate) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // Some file systems have no links.
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

/// Moves whatever has this name to `<name>.unreadable-<timestamp>`, without opening it.
pub(crate) fn move_aside(path: &Path, now: Moment) -> io::Result<PathBuf> {
    unused(&aside(path, now), |candidate| {
        match fs::symlink_metadata(candidate) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(path, candidate),
            Err(error) => Err(error),
        }
    })
}

fn aside(path: &Path, now: Moment) -> PathBuf {
    beside(path, &format!("{ASIDE}{}", timestamp(now)))
}

/// Removes a file that has been kept aside, if it still has its old name.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync_directory_of(path),
    }
}

/// Tries names until one is not taken.
fn unused(path: &Path, attempt: impl Fn(&Path) -> io::Result<()>) -> io::Result<PathBuf> {
    let mut candidate = path.to_owned();
    for number in 2_u32.. {
        match attempt(&candidate) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                candidate = beside(path, &format!("-{number}"));
            }
            Err(error) => return Err(error),
        }
    }
    sync_directory_of(&candidate)?;
    Ok(candidate)
}

/// A moment as a part of a file name.
pub(crate) fn timestamp(now: Moment) -> String {
    i64::try_from(now.0)
        .ok()
        .and_then(|milliseconds| jiff::Timestamp::from_millisecond(milliseconds).ok())
        .map_or_else(
            || now.0.to_string(),
            |time| time.strftime("%Y%m%dT%H%M%S.%3fZ").to_string(),
        )
}
