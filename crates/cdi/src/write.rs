//! Writing and removing spec files.
//!
//! A file appears under its name complete and on disk, or not at all: it is written under another name that
//! runtimes do not look at, synced, renamed, and the directory is synced.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::file::is_spec_name;
use crate::name::Part;
use crate::parse::MAX_SPEC_BYTES;
use crate::spec::Spec;
use crate::validate::{InvalidSpec, Warning};

/// The longest file name of Linux file systems.
const MAX_FILE_NAME: usize = 255;

/// A file name that would lead elsewhere, or nowhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} must be a plain file name of at most {MAX_FILE_NAME} bytes, with its extension")]
pub struct InvalidFileName {
    /// The name as given.
    pub name: String,
}

/// Why a spec was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Runtimes would refuse the file.
    #[error(transparent)]
    Invalid(#[from] InvalidSpec),
    /// Runtimes would not survive the file.
    #[error(
        "the {part} {value:?} has one character, and a spec file with it crashes container runtimes \
         (containerd 1.7 to 2.3, CRI-O, podman)"
    )]
    OneCharacter {
        /// Vendor or class.
        part: Part,
        /// The character.
        value: String,
    },
    /// The name is not a plain file name.
    #[error(transparent)]
    FileName(#[from] InvalidFileName),
    /// It could not be read back.
    #[error("the spec has more than {MAX_SPEC_BYTES} bytes")]
    TooLarge,
    /// The content cannot be put into the form of the file.
    #[error("the spec cannot be written as {format}: {message}")]
    Format {
        /// `JSON` or `YAML`.
        format: &'static str,
        /// What the writer says.
        message: String,
    },
    /// The file system refuses.
    #[error("{}: {source}", .path.display())]
    Io {
        /// What was being written.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a spec file was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The name is not a plain file name.
    #[error(transparent)]
    FileName(#[from] InvalidFileName),
    /// The file system refuses.
    #[error("{}: {source}", .path.display())]
    Io {
        /// What was being removed.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl Spec {
    /// Validates the spec and writes it to `directory`, at the lowest version that its content needs.
    ///
    /// `name` decides the format: JSON if it ends in `.json`, YAML if in `.yaml`; otherwise `.yaml` is
    /// appended. A file of that name is replaced, and a missing directory is made. Returns the file's path.
    ///
    /// A vendor or class of one character is refused, because such a file crashes containerd 1.7 to 2.3,
    /// CRI-O and podman.
    pub fn write(&self, directory: impl AsRef<Path>, name: &str) -> Result<PathBuf, WriteError> {
        let directory = directory.as_ref();
        let path = spec_path(directory, name)?;
        let text = self.to_text(name)?;
        replace_file(directory, &path, text.as_bytes()).map_err(|source| WriteError::Io {
            path: path.clone(),
            source,
        })?;
        Ok(path)
    }

    /// What [`Spec::write`] puts into a file of this name.
    pub fn to_text(&self, name: &str) -> Result<String, WriteError> {
        if let Some(Warning::OneCharacter { part, value }) = self.validate_content()?.into_iter().next() {
            return Err(WriteError::OneCharacter { part, value });
        }
        let mut spec = self.clone();
        spec.version = self.minimum_version().to_string();
        let text = if name.ends_with(".json") {
            spec.to_json()?
        } else {
            spec.to_yaml()?
        };
        if text.len() > MAX_SPEC_BYTES {
            return Err(WriteError::TooLarge);
        }
        Ok(text)
    }

    /// Removes a file that [`Spec::write`] made of the same arguments. A file that is not there is no error.
    pub fn remove(directory: impl AsRef<Path>, name: &str) -> Result<(), RemoveError> {
        let directory = directory.as_ref();
        let path = spec_path(directory, name)?;
        match fs::remove_file(&path).and_then(|()| sync_directory(directory)) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(RemoveError::Io { path, source }),
            _ => Ok(()),
        }
    }

    fn to_json(&self) -> Result<String, WriteError> {
        let format = |error: serde_json::Error| WriteError::Format {
            format: "JSON",
            message: error.to_string(),
        };
        let json = serde_json::to_string_pretty(self).map_err(format)?;
        let mut text = String::with_capacity(json.len() + 1);
        for c in json.chars() {
            // Runtimes read JSON with a YAML parser, which refuses or folds these even in quotes. They can
            // stand only in a string, where JSON allows to escape them.
            match c {
                '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                    text.push_str(&format!("\\u{:04x}", u32::from(c)));
                }
                _ => text.push(c),
            }
        }
        text.push('\n');
        Ok(text)
    }

    fn to_yaml(&self) -> Result<String, WriteError> {
        let options = serde_saphyr::ser_options! {
            prefer_block_scalars: false,
            compact_list_indent: false,
        };
        let yaml =
            serde_saphyr::to_string_with_options(self, options).map_err(|error| WriteError::Format {
                format: "YAML",
                message: error.to_string(),
            })?;
        Ok(yaml)
    }
}

fn spec_path(directory: &Path, name: &str) -> Result<PathBuf, InvalidFileName> {
    let full = if is_spec_name(OsStr::new(name)) {
        name.to_owned()
    } else {
        format!("{name}.yaml")
    };
    if name.is_empty() || full.len() > MAX_FILE_NAME || full.contains(['/', '\0']) {
        return Err(InvalidFileName {
            name: name.to_owned(),
        });
    }
    Ok(directory.join(full))
}

fn replace_file(directory: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);

    fs::create_dir_all(directory)?;
    let temporary = directory.join(format!(
        ".cdi-spec.{}.{}.tmp",
        std::process::id(),
        WRITES.fetch_add(1, Ordering::Relaxed)
    ));
    let renamed = write_synced(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        // The error to report is the first one.
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    sync_directory(directory)
}

fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    // A process with the same ID may have died here before: what it left is nobody's.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
