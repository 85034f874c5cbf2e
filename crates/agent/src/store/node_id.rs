//! The ID of a node and the progress of its database, which distinguish a lost or older database from a first start.
//!
//! A random ID is in the database, in a file beside it, and in a file outside of its directory. All three are written before
//! anything is answered, the database first. A crash in between leaves a database with an ID that the next start writes to
//! the files that lack it. So a database is lost if it is missing or has another ID while a trace of an earlier start
//! exists. Its content is unknown, and no pod may be admitted as if it had been empty. Only a directory without any trace
//! means a first start.
//!
//! Traces are the two files, and files that earlier starts and stops left beside the database: `.saved-*`, `.unreadable-*`
//! and `archive`. A lock, a socket or an incomplete database (`.new`) are not traces: they exist before the first answer.
//!
//! The database and both files also have the number of starts, and after a clean stop a random ID of that stop:
//!
//! | database, compared with each file | then |
//! | --- | --- |
//! | without an ID | from before the files: lost |
//! | fewer starts | an older copy: lost |
//! | as many starts, and the file has a stop that the database lacks | a copy from within the last run: lost |
//! | as many starts, and the file does not have a stop | the last run was killed, or both are equal |
//! | more starts | a crash before the files were written |
//!
//! The database is written first, so it may be ahead of the files but is never behind. While the node is blocked because its
//! database is lost, the files stay as they are: the lost database may be put back. As soon as a running devlet notices
//! that its database was removed or replaced, it raises the number in the files. Then the file in its place is an older
//! copy, even after a kill.
//!
//! One file with the progress is enough to recognise an older copy. A file that cannot be written is reported. While neither
//! file has the progress, no change is written to the database.
//!
//! Deliberately absent: protection against a copy from within a run that was killed before it noticed, which would need a
//! second write per admission, and against copies of the database and both files together.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use devlet_core::Moment;
use uuid::Uuid;

use super::fs::{self, QUARANTINE_SUFFIX};
use super::open_report::{OpenError, Quarantined};
use super::state_file::{self, StateFileError};

/// The file beside the database.
const FILE: &str = "node-id";

/// The progress of a database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Number of starts with it, plus the number of times that it was found removed or replaced.
    pub(crate) starts: u64,
    /// ID of the last clean stop, if nothing has changed since.
    pub(crate) stop: Option<String>,
}

impl Progress {
    /// Returns the progress after a start.
    pub(crate) fn of_start(starts: u64) -> Self {
        Self { starts, stop: None }
    }

    /// Returns the progress after a clean stop.
    pub(crate) fn stopped(&self) -> Self {
        Self {
            starts: self.starts,
            stop: Some(Uuid::new_v4().to_string()),
        }
    }

    /// Returns `true` if a database with this progress is older than a file.
    fn is_behind(&self, file: &Self) -> bool {
        self.starts < file.starts
            || (self.starts == file.starts && file.stop.is_some() && self.stop != file.stop)
    }
}

/// The content of an id file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    id: Uuid,
    progress: Progress,
}

impl Entry {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let id = Uuid::parse_str(lines.next()?.trim()).ok()?;
        let mut progress = Progress::default();
        // A file that was overwritten in place is padded with newlines.
        for line in lines.filter(|line| !line.is_empty()) {
            match line.split_once(' ')? {
                ("starts", number) => progress.starts = number.parse().ok()?,
                ("stop", id) => progress.stop = Some(Uuid::parse_str(id).ok()?.to_string()),
                _ => return None,
            }
        }
        Some(Self { id, progress })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\nstarts {}", self.id, self.progress.starts)?;
        match &self.progress.stop {
            Some(stop) => writeln!(f, "stop {stop}"),
            None => Ok(()),
        }
    }
}

/// The id files and their contents.
#[derive(Debug, Default)]
pub(crate) struct IdFiles(Vec<(PathBuf, Option<Entry>)>);

/// An id file that cannot be written.
#[derive(Debug)]
pub(crate) struct NotWritten {
    pub(crate) path: PathBuf,
    pub(crate) error: io::Error,
    /// At least one file has an ID from an earlier start.
    pub(crate) has_id: bool,
}

impl fmt::Display for NotWritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be written: {}", self.path.display(), self.error)
    }
}

impl IdFiles {
    /// Returns the progress of the most recent file.
    pub(crate) fn newest(&self) -> Option<&Progress> {
        let entries = self.0.iter().filter_map(|(_, entry)| entry.as_ref());
        let all = entries.map(|entry| &entry.progress);
        all.max_by_key(|progress| (progress.starts, progress.stop.is_some()))
    }

    /// Writes the ID and the progress to the files that do not have them. Both files are tried. Returns an error if neither
    /// file has the progress, because an older copy of the database would not be recognised. Otherwise returns a file that
    /// does not have it, if any.
    pub(crate) fn write(&mut self, id: &str, progress: &Progress) -> Result<Option<NotWritten>, NotWritten> {
        let Ok(id) = Uuid::parse_str(id) else {
            return Ok(None);
        };
        let progress = progress.clone();
        let new = Entry { id, progress };
        let last = self.0.len().saturating_sub(1);
        let (mut is_written, mut failed) = (false, None);
        for (number, (path, entry)) in self.0.iter_mut().enumerate() {
            match write_file(path, entry.as_ref(), &new) {
                Ok(()) => {
                    *entry = Some(new.clone());
                    is_written = true;
                }
                // Only root may write to the root directory, so the file was never created.
                Err(error)
                    if number < last
                        && entry.is_none()
                        && error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    tracing::warn!(path = %path.display(), %error, "node id not written");
                }
                Err(error) => failed = failed.or(Some((path.clone(), error))),
            }
        }
        let Some((path, error)) = failed else {
            return Ok(None);
        };
        let has_id = self.0.iter().any(|(_, entry)| entry.is_some());
        let not_written = NotWritten { path, error, has_id };
        if is_written {
            Ok(Some(not_written))
        } else {
            Err(not_written)
        }
    }
}

/// Replaces an id file, or overwrites it if that fails because the disk is full or another user holds the temporary name. If
/// a power loss tears the overwritten file, the other file is still complete.
fn write_file(path: &Path, old: Option<&Entry>, new: &Entry) -> io::Result<()> {
    if old == Some(new) {
        return Ok(());
    }
    let content = new.to_string();
    match fs::replace(path, content.as_bytes()) {
        Ok(()) => fs::sync_directory_of(path),
        Err(error) if old.is_some() => fs::overwrite(path, content.as_bytes()).map_err(|_| error),
        Err(error) => Err(error),
    }
}

/// Files that earlier starts left.
#[derive(Debug)]
pub(crate) struct Traces {
    /// The id files.
    pub(crate) files: IdFiles,
    /// Paths that show that devlet has run here.
    found: Vec<PathBuf>,
    /// The newest database that a stop saved beside its path.
    saved: Option<PathBuf>,
    /// The newest database that a start quarantined.
    old_database: Option<PathBuf>,
    /// Files at the paths of the id files that could not be used.
    pub(crate) quarantined: Vec<Quarantined>,
}

impl Traces {
    /// Looks for traces. `targets` are the targets of the database if it is a link, `outside` is the id file outside of its
    /// directory.
    pub(crate) fn find(
        database: &Path,
        targets: &[PathBuf],
        outside: Option<&Path>,
        now: Moment,
    ) -> Result<Self, OpenError> {
        let mut traces = Self {
            files: IdFiles::default(),
            found: Vec::new(),
            saved: None,
            old_database: None,
            quarantined: Vec::new(),
        };
        // The file outside comes first: it remains when the whole directory is replaced.
        for path in outside
            .map(Path::to_owned)
            .into_iter()
            .chain([database.with_file_name(FILE)])
        {
            let entry = traces.read(&path, now)?;
            traces.files.0.push((path, entry));
        }
        traces.list(database).map_err(|error| OpenError::Disk {
            path: database.to_owned(),
            reason: error.to_string(),
        })?;
        for name in targets {
            // The directory may be on a disk that is not mounted.
            if let Err(error) = traces.list(name) {
                tracing::debug!(path = %name.display(), %error, "directory not listed");
            }
        }
        Ok(traces)
    }

    fn read(&mut self, path: &Path, now: Moment) -> Result<Option<Entry>, OpenError> {
        match state_file::read(path) {
            Ok(None) => Ok(None),
            Ok(Some((content, _))) => {
                self.found.push(path.to_owned());
                let text = String::from_utf8_lossy(&content);
                Ok(Entry::parse(&text))
            }
            Err(StateFileError::NotRegular { kind }) => {
                let reason = StateFileError::NotRegular { kind }.to_string();
                let kept = fs::move_to_quarantine(path, now).map_err(|source| OpenError::Quarantine {
                    path: path.to_owned(),
                    reason: reason.clone(),
                    source,
                })?;
                self.found.push(kept.clone());
                self.quarantined.push(Quarantined {
                    original: path.to_owned(),
                    kept,
                    reason,
                });
                Ok(None)
            }
            Err(error) => Err(OpenError::unusable(path, &error)),
        }
    }

    /// Looks for traces beside the database.
    fn list(&mut self, database: &Path) -> io::Result<()> {
        let Some((directory, name)) = database.parent().zip(database.file_name()) else {
            return Ok(());
        };
        let name = name.to_string_lossy();
        let (saved, unreadable) = (format!("{name}.saved-"), format!("{name}{QUARANTINE_SUFFIX}"));
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let (path, is_file) = (entry.path(), entry.file_type().is_ok_and(|kind| kind.is_file()));
            let text = path.file_name().unwrap_or_default().to_string_lossy();
            let copy = if text.starts_with(&saved) {
                &mut self.saved
            } else if text.starts_with(&unreadable) {
                &mut self.old_database
            } else if text == "archive" {
                self.found.push(path);
                continue;
            } else {
                continue;
            };
            // Names end with a timestamp.
            if is_file && copy.as_deref().and_then(Path::file_name) <= path.file_name() {
                *copy = Some(path.clone());
            }
            self.found.push(path);
        }
        Ok(())
    }

    /// Returns one of the traces.
    pub(crate) fn any(&self) -> Option<&Path> {
        self.saved.as_ref().or(self.found.first()).map(PathBuf::as_path)
    }

    /// Describes a file that may be the lost database.
    pub(crate) fn copy(&self) -> Option<String> {
        match (&self.saved, &self.old_database) {
            (Some(saved), _) => Some(format!("{} may be it", saved.display())),
            (None, Some(old)) => Some(format!("an earlier start set {} aside", old.display())),
            (None, None) => None,
        }
    }

    /// Returns the ID of the node, or a new one.
    pub(crate) fn id(&self) -> String {
        let mut entries = self.files.0.iter().filter_map(|(_, entry)| entry.as_ref());
        let known = entries.next().map(|entry| entry.id);
        known.unwrap_or_else(Uuid::new_v4).to_string()
    }

    /// Returns why a database is not the latest one of this node.
    pub(crate) fn contradiction(&self, id: Option<&str>, progress: &Progress) -> Option<String> {
        self.files.0.iter().find_map(|(path, entry)| {
            let (path, entry) = (path.display(), entry.as_ref()?);
            // A database gets an id before the files do.
            let Some(id) = id else {
                return Some(format!(
                    "it does not have a node id, so it is older than {path}; to use it anyway, put it back and remove {FILE} \
                     and .devlet-{FILE}"
                ));
            };
            if entry.id.to_string() != id {
                return Some(format!(
                    "it belongs to another node, as {path} shows; if it is right and that file is not, put the database \
                     back and remove that file"
                ));
            }
            progress.is_behind(&entry.progress).then(|| {
                format!(
                    "it is an older copy (start {}; {path} was last written by start {}); to use it anyway, put it \
                     back and remove {FILE} and .devlet-{FILE}",
                    progress.starts, entry.progress.starts
                )
            })
        })
    }
}
