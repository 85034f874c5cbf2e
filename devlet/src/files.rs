//! Reading and writing the files that users name.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::OFlags;

/// Maximum bytes of an input file. A kubelet writes 260 bytes per container; showing a file takes 50 times its size.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a file as a whole, or standard input for `-`.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path == Path::new("-") {
        return read_all(io::stdin().lock(), 0).context("cannot read standard input");
    }
    let cannot = || format!("cannot read {}", path.display());
    // Without O_NONBLOCK, opening a pipe that has not been opened for writing blocks forever.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed())
        .open(path)
        .with_context(cannot)?;
    let about = file.metadata().with_context(cannot)?;
    if let Some(what) = not_a_file(&about) {
        bail!("cannot read {}: it is {what}, not a file", path.display());
    }
    if about.file_type().is_fifo() {
        return read_pipe(file).with_context(cannot);
    }
    read_all(file, about.len()).with_context(cannot)
}

/// Reads a pipe such as `<(...)`. Fails if no process has it open for writing.
fn read_pipe(mut pipe: File) -> anyhow::Result<Vec<u8>> {
    let mut start = [0; 4096];
    let start = match pipe.read(&mut start) {
        Ok(0) => bail!("it is a pipe that no process writes to"),
        Ok(length) => &start[..length],
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => &[],
        Err(error) => return Err(error.into()),
    };
    let flags = rustix::fs::fcntl_getfl(&pipe).map_err(io::Error::from)?;
    rustix::fs::fcntl_setfl(&pipe, flags - OFlags::NONBLOCK).map_err(io::Error::from)?;
    read_all(start.chain(pipe), 0)
}

fn not_a_file(about: &Metadata) -> Option<&'static str> {
    let kind = about.file_type();
    if kind.is_dir() {
        Some("a directory")
    } else if kind.is_socket() {
        Some("a socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        Some("a device node")
    } else {
        None
    }
}

fn read_all(from: impl Read, expected: u64) -> anyhow::Result<Vec<u8>> {
    let most = MAX_FILE_BYTES >> 20;
    if expected > MAX_FILE_BYTES {
        bail!("it has {expected} bytes; the largest file read here has {most} MiB");
    }
    let mut bytes = Vec::new();
    from.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        bail!("it has more than {most} MiB; the largest file read here has {most} MiB");
    }
    Ok(bytes)
}

/// Returns the name to print for a path.
pub(crate) fn name_of(path: &Path) -> String {
    if path == Path::new("-") {
        "standard input".into()
    } else {
        path.display().to_string()
    }
}

/// Output file of a command: a new file, or a regular file to replace.
#[derive(Debug)]
pub(crate) struct Destination {
    /// As the user named it.
    path: PathBuf,
    /// The path with links resolved: a link stays, and its target is replaced.
    target: PathBuf,
    old: Option<Metadata>,
}

impl Destination {
    /// Returns the destination at `path`, which must be a regular file or not exist.
    fn of(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write {}", path.display());
        let found = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self {
                    path: path.to_owned(),
                    target: path.to_owned(),
                    old: None,
                });
            }
            found => found.with_context(cannot)?,
        };
        let target = if found.is_symlink() {
            std::fs::canonicalize(path).with_context(|| format!("{}: its link is dangling", cannot()))?
        } else {
            path.to_owned()
        };
        let old = std::fs::metadata(&target).with_context(cannot)?;
        if !old.is_file() {
            let what = not_a_file(&old).unwrap_or("a pipe");
            bail!("cannot write {}: it is {what}, not a file", path.display());
        }
        Ok(Self {
            path: path.to_owned(),
            target,
            old: Some(old),
        })
    }

    /// Returns the destination at `out`. Fails if that is the input file, or the file that standard output goes to.
    pub(crate) fn beside(input: &Path, out: &Path, hint: &str) -> anyhow::Result<Self> {
        let destination = Self::of(out)?;
        let Some(old) = &destination.old else {
            return Ok(destination);
        };
        let same = |other: &Metadata| (other.dev(), other.ino()) == (old.dev(), old.ino());
        let read = if input == Path::new("-") {
            opened(io::stdin())
        } else {
            std::fs::metadata(input)
        };
        if read.is_ok_and(|read| same(&read)) {
            bail!("{} is the input file; {hint}", out.display());
        }
        if opened(io::stdout()).is_ok_and(|written| same(&written)) {
            bail!(
                "{} is the file that standard output goes to; omit --out to write there",
                out.display()
            );
        }
        Ok(destination)
    }

    /// Writes `bytes` atomically: a crash leaves either the old file or the new one.
    ///
    /// The new file keeps the mode of the old one, and its owner if permissions allow; otherwise it has mode 0600.
    pub(crate) fn write(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        put(&self.target, bytes, self.old.as_ref(), Existing::Replaced).with_context(cannot)
    }
}

fn opened(stream: impl AsFd) -> io::Result<Metadata> {
    File::from(stream.as_fd().try_clone_to_owned()?).metadata()
}

/// Replaces the file at `path` with `bytes`, and keeps its old content as `path.bak`. An existing backup is not
/// overwritten.
pub(crate) fn replace(path: &Path, old_bytes: &[u8], bytes: &[u8]) -> anyhow::Result<PathBuf> {
    let destination = Destination::of(path)?;
    let mut name = OsString::from(path);
    name.push(".bak");
    let backup = PathBuf::from(name);
    match put(&backup, old_bytes, destination.old.as_ref(), Existing::Kept) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => bail!(
            "{} exists already: move it away first, so that no backup is lost",
            backup.display()
        ),
        kept => kept.with_context(|| format!("cannot write {}", backup.display()))?,
    }
    destination.write(bytes)?;
    Ok(backup)
}

/// Treatment of an existing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existing {
    Replaced,
    Kept,
}

/// Writes a synced file with the mode and owner of `like`.
fn put(path: &Path, bytes: &[u8], like: Option<&Metadata>, existing: Existing) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let mode = like.map_or(0o600, |about| about.mode() & 0o7777);
    let mut temporary = tempfile::Builder::new()
        .prefix(".devlet-")
        .permissions(std::fs::Permissions::from_mode(0o600))
        .tempfile_in(directory)?;
    temporary.write_all(bytes)?;
    if let Some(like) = like {
        // Only root may change the owner. Another user most likely owns the file already.
        let _ = std::os::unix::fs::fchown(temporary.as_file(), Some(like.uid()), Some(like.gid()));
    }
    temporary
        .as_file()
        .set_permissions(std::fs::Permissions::from_mode(mode))?;
    temporary.as_file().sync_all()?;
    let named = match existing {
        Existing::Replaced => temporary.persist(path),
        Existing::Kept => temporary.persist_noclobber(path),
    };
    named.map_err(|error| error.error)?;
    File::open(directory)?.sync_all()
}
