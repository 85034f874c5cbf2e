//! Reading and writing the files that users name.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// Far beyond any file that a kubelet writes (260 bytes a container), and far below what hurts.
const LARGEST: u64 = 512 << 20;

/// The whole of a file, or of standard input for `-`.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path == Path::new("-") {
        return read_all(io::stdin().lock(), 0).context("cannot read standard input");
    }
    let cannot = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot)?;
    let about = file.metadata().with_context(cannot)?;
    if let Some(what) = not_a_file(&about) {
        bail!("cannot read {}: it is {what}, not a file", path.display());
    }
    read_all(file, about.len()).with_context(cannot)
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

fn read_all(from: impl io::Read, expected: u64) -> anyhow::Result<Vec<u8>> {
    if expected > LARGEST {
        bail!("it has {expected} bytes; the largest file read here has {LARGEST}");
    }
    let mut bytes = Vec::new();
    from.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        bail!("it is larger than {LARGEST} bytes, the most that is read here");
    }
    Ok(bytes)
}

/// Puts `bytes` in place of `path` so that a crash leaves either the old file or the new one.
///
/// The new file has the mode and, as far as we may, the owner of the one it replaces, or else mode 0600.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    // A link stays a link: what it points to is replaced.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = match std::fs::metadata(&target) {
        Ok(about) if not_a_file(&about).is_some() => {
            bail!(
                "cannot write {}: it is {}",
                path.display(),
                not_a_file(&about).unwrap_or_default()
            );
        }
        old => old.ok(),
    };
    let directory = match target.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let mode = old.as_ref().map_or(0o600, |about| about.mode() & 0o7777);
    let mut temporary = tempfile::Builder::new()
        .prefix(".devlet-")
        .permissions(std::fs::Permissions::from_mode(0o600))
        .tempfile_in(&directory)
        .with_context(cannot)?;
    temporary.write_all(bytes).with_context(cannot)?;
    if let Some(old) = old {
        // Only root may give files away; for anybody else the file was their own before.
        let _ = std::os::unix::fs::fchown(temporary.as_file(), Some(old.uid()), Some(old.gid()));
    }
    temporary
        .as_file()
        .set_permissions(std::fs::Permissions::from_mode(mode))
        .with_context(cannot)?;
    temporary.as_file().sync_all().with_context(cannot)?;
    temporary
        .persist(&target)
        .map_err(|error| error.error)
        .with_context(cannot)?;
    File::open(&directory)
        .and_then(|directory| directory.sync_all())
        .with_context(cannot)?;
    Ok(())
}

/// Keeps the file at `path` as `path.bak`. An earlier backup is not overwritten.
pub(crate) fn back_up(path: &Path, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    let mut name = OsString::from(path);
    name.push(".bak");
    let backup = PathBuf::from(name);
    if backup.symlink_metadata().is_ok() {
        bail!(
            "{} exists already: move it away first, so that no backup is lost",
            backup.display()
        );
    }
    let about = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    write_atomically(&backup, bytes)?;
    std::fs::set_permissions(&backup, about.permissions())
        .with_context(|| format!("cannot set the mode of {}", backup.display()))?;
    Ok(backup)
}
