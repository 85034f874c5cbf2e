//! Writes and removes spec files.
//!
//! A file appears under its name complete and on disk, or not at all. It is written under another name that
//! runtimes ignore, synced, and renamed; then the directory is synced.

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

/// Maximum length in bytes of a file name on Linux.
const MAX_FILE_NAME: usize = 255;

/// A text that is not a plain file name: it may be a path, or too long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} must be a plain file name of at most {MAX_FILE_NAME} bytes, with its extension")]
pub struct InvalidFileName {
    /// The name as given.
    pub name: String,
}

/// Why a spec was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Runtimes would reject the file.
    #[error(transparent)]
    Invalid(#[from] InvalidSpec),
    /// The file would crash runtimes.
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
    /// The file would be too large to be read back.
    #[error("the spec has more than {MAX_SPEC_BYTES} bytes")]
    TooLarge,
    /// The content cannot be serialized.
    #[error("the spec cannot be written as {format}: {message}")]
    Format {
        /// `JSON` or `YAML`.
        format: &'static str,
        /// The serializer's error text.
        message: String,
    },
    /// A file system operation failed.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Why a spec file was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The name is not a plain file name.
    #[error(transparent)]
    FileName(#[from] InvalidFileName),
    /// A file system operation failed.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl Spec {
    /// Validates the spec and writes it to `directory`, with the lowest version that its content needs.
    ///
    /// `name` decides the format: JSON if it ends in `.json`, YAML if in `.yaml`; otherwise `.yaml` is appended. A
    /// file of that name is replaced, and a missing directory is created. Returns the file's path.
    ///
    /// A vendor or class of one character is rejected, because such a file crashes containerd 1.7 to 2.3,
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

    /// Returns the text that [`Spec::write`] writes to a file of this name.
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

    /// Removes a file that [`Spec::write`] wrote with the same arguments. A missing file is not an error.
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
            // Runtimes read JSON with a YAML parser, which rejects or folds these even in quotes. They occur only
            // in strings, where JSON allows to escape them.
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
        // Report the first error, not one of the cleanup.
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    sync_directory(directory)
}

fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    // A process with the same ID may have crashed here and left a file.
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
