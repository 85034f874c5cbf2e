//! Spec files on disk: reading them, and their names.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::name::{InvalidName, split_kind};
use crate::parse::{MAX_SPEC_BYTES, ParseError, document, names_in};
use crate::spec::Spec;
use crate::validate::{InvalidSpec, Warning};

/// Why a file cannot be used as a spec.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be opened or read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is a directory, a fifo, a socket or a device. Opening a fifo could block forever.
    #[error("it is not a regular file")]
    NotAFile,
    /// Its content is not a spec.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// It is a spec, but not a valid one.
    #[error("{problem}")]
    Invalid {
        /// Its content.
        spec: Box<Spec>,
        /// The rule that it breaks.
        problem: InvalidSpec,
    },
}

/// A valid spec and the file that it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecFile {
    /// The path of the file.
    pub path: PathBuf,
    /// Index of its directory in the list of directories; a higher one takes precedence. 0 for a single file.
    pub priority: usize,
    /// The content of the file.
    pub spec: Spec,
    /// Parts that are valid but likely to cause problems.
    pub warnings: Vec<Warning>,
}

impl SpecFile {
    /// Reads and validates one file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        Self::load(path.as_ref(), 0).map_err(|broken| broken.error)
    }

    pub(crate) fn load(path: &Path, priority: usize) -> Result<Self, Broken> {
        let bytes = read_bounded(path).map_err(|error| Broken { error, names: None })?;
        let (spec, warning): (Spec, Option<Warning>) = document(&bytes).map_err(|error| Broken {
            error: error.into(),
            names: names_in(&bytes),
        })?;
        let mut warnings = match spec.validate() {
            Ok(warnings) => warnings,
            Err(problem) => {
                let spec = Box::new(spec);
                return Err(Broken {
                    error: ReadError::Invalid { spec, problem },
                    names: names_in(&bytes),
                });
            }
        };
        warnings.extend(warning);
        Ok(Self {
            path: path.to_owned(),
            priority,
            spec,
            warnings,
        })
    }
}

/// Why a file cannot be used, with the names of its devices as far as they could be read.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) error: ReadError,
    pub(crate) names: Option<Vec<String>>,
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, ReadError> {
    // Without O_NONBLOCK, opening a fifo waits for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
    if !file.metadata()?.is_file() {
        return Err(ReadError::NotAFile);
    }
    let mut bytes = Vec::new();
    // The size can change during the read, so the read itself is bounded.
    file.take(MAX_SPEC_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_SPEC_BYTES {
        return Err(ParseError::TooLarge.into());
    }
    Ok(bytes)
}

/// Returns `true` if a file of this name in a spec directory is read as a spec.
pub(crate) fn is_spec_name(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.ends_with(b".json") || name.ends_with(b".yaml")
}

impl Spec {
    /// Returns the usual file name for the spec of a vendor and class, `<vendor>-<class>`, without an extension.
    pub fn file_name(&self) -> Result<String, InvalidName> {
        let (vendor, class) = split_kind(&self.kind)?;
        Ok(format!("{vendor}-{class}"))
    }

    /// Returns the usual file name for a spec with the lifetime of another object, such as a claim or a container:
    /// `<vendor>-<class>_<id>`, without an extension. A `/` in `id` becomes `_`.
    pub fn transient_file_name(&self, id: &str) -> Result<String, InvalidName> {
        Ok(format!("{}_{}", self.file_name()?, id.replace('/', "_")))
    }
}
