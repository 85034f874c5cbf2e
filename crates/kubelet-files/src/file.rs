//! Result of every reader in this crate: the content, its checksum, and warnings.

use crate::format::Format;
use crate::go_json::{self, DroppedList, Reader, SyntaxError, TypeError};
use crate::position::Position;

/// A file that decodes. Its checksum may still be wrong. Code that acts on the content uses [`File::verified`];
/// code that only displays it uses [`File::unverified`].
#[derive(Debug, Clone, PartialEq)]
pub struct File<T> {
    /// The format that the bytes are in.
    pub format: Format,
    /// `None` for formats that carry no checksum.
    pub checksum: Option<Checksum>,
    /// Input that the decoder accepted although it is unusual.
    pub warnings: Warnings,
    content: T,
}

impl<T> File<T> {
    pub(crate) fn new(format: Format, checksum: Option<Checksum>, warnings: Warnings, content: T) -> Self {
        Self {
            format,
            checksum,
            warnings,
            content,
        }
    }

    /// Returns the content if the checksum is right or the format does not have one.
    pub fn verified(self) -> Result<T, ChecksumMismatch> {
        match self.checksum {
            Some(checksum) if !checksum.is_valid() => Err(ChecksumMismatch(checksum)),
            _ => Ok(self.content),
        }
    }

    /// Returns the content without checking the checksum.
    pub fn unverified(&self) -> &T {
        &self.content
    }

    pub(crate) fn map<U>(self, convert: impl FnOnce(T) -> U) -> File<U> {
        let Self {
            format,
            checksum,
            warnings,
            content,
        } = self;
        File {
            format,
            checksum,
            warnings,
            content: convert(content),
        }
    }
}

/// The checksum stored in a file and the one computed from its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum {
    /// As stored in the file, or the default that a kubelet assumes if the file does not store one.
    pub stored: u64,
    /// As computed from the decoded content.
    pub computed: u64,
}

impl Checksum {
    /// Returns `true` if the stored checksum matches the content.
    pub fn is_valid(self) -> bool {
        self.stored == self.computed
    }
}

/// The content does not match the stored checksum. Kubelets report "checkpoint is corrupted".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("checkpoint is corrupted: the stored checksum is {}, the content has {}", .0.stored, .0.computed)]
pub struct ChecksumMismatch(pub Checksum);

/// Why a file does not decode. `problem` is the text of the kubelet's own decoder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or truncated.
    #[error("{problem}, {at}")]
    Syntax {
        /// The decoder's error text.
        problem: String,
        at: Position,
    },
    /// JSON, with a value of the wrong type.
    #[error("{problem}, {at}")]
    Type {
        /// The decoder's error text.
        problem: String,
        at: Position,
    },
    /// Some entries list devices as V1 does, others as V2 does.
    #[error(
        "entries of two formats in one file: devices as a list (V1) {flat}, by NUMA node (V2) {per_numa}"
    )]
    Mixed {
        /// The first entry in the form of V1.
        flat: Position,
        /// The first entry in the form of V2.
        per_numa: Position,
    },
    /// JSON, but not a file that a kubelet writes.
    #[error("{0}")]
    UnknownKind(UnknownKind),
}

/// A JSON document that is not one of the kubelet's device files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnknownKind {
    /// The document is `null`.
    #[error("the document is null: there is no state in it")]
    Null,
    /// The document is a list, a string, a number or a boolean.
    #[error("not a kubelet device file: those are JSON objects")]
    NotAnObject,
    /// An object, with none of the keys of any format.
    #[error("not a kubelet device file: it has none of the keys Data, Checksum, entries, PodDeviceEntries")]
    NoKnownKey,
}

impl ReadError {
    pub(crate) fn syntax(bytes: &[u8], error: SyntaxError) -> Self {
        Self::Syntax {
            at: Position::of(bytes, error.offset),
            problem: error.message,
        }
    }

    pub(crate) fn wrong_type(bytes: &[u8], error: &TypeError) -> Self {
        Self::Type {
            at: Position::of(bytes, error.offset),
            problem: error.message.clone(),
        }
    }

    /// Returns the error text of a kubelet's decoder, if it has one for this error.
    pub fn kubelet_text(&self) -> Option<&str> {
        match self {
            Self::Syntax { problem, .. } | Self::Type { problem, .. } => Some(problem),
            Self::Mixed { .. } | Self::UnknownKind(_) => None,
        }
    }

    pub(crate) fn inside(self, field: &'static str) -> Self {
        match self {
            Self::Syntax { problem, at } => Self::Syntax {
                problem,
                at: at.inside(field),
            },
            Self::Type { problem, at } => Self::Type {
                problem,
                at: at.inside(field),
            },
            other => other,
        }
    }
}

/// Input that a decoder accepted although it is unusual.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Warnings {
    /// The first warnings, in the order of the file.
    pub list: Vec<Warning>,
    /// Number of warnings that are not in the list.
    pub left_out: usize,
}

/// One warning and its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}, {at}")]
pub struct Warning {
    pub kind: WarningKind,
    pub at: Position,
}

/// Unusual input that a kubelet's decoder accepts silently.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WarningKind {
    /// Ignored, and lost at the next write.
    #[error("unknown key {0:?} is ignored")]
    UnknownKey(String),
    /// The later value takes effect.
    #[error("key {0:?} is repeated, the later value is used")]
    DuplicateKey(String),
    /// Not UTF-8, or half of a surrogate pair.
    #[error("bytes that are not valid UTF-8 were read as U+FFFD")]
    Substituted,
}

impl Warnings {
    pub(crate) fn take(reader: &mut Reader<'_>, bytes: &[u8]) -> Self {
        let (list, left_out) = reader.take_warnings();
        let public = |warning: go_json::Warning| Warning {
            at: Position::of(bytes, warning.offset),
            kind: match warning.kind {
                go_json::WarningKind::UnknownKey(key) => WarningKind::UnknownKey(key),
                go_json::WarningKind::DuplicateKey(key) => WarningKind::DuplicateKey(key),
                go_json::WarningKind::Substituted => WarningKind::Substituted,
            },
        };
        Self {
            list: list.into_iter().map(public).collect(),
            left_out,
        }
    }

    pub(crate) fn append(&mut self, other: Self, field: &'static str) {
        self.list.extend(other.list.into_iter().map(|warning| Warning {
            at: warning.at.inside(field),
            ..warning
        }));
        self.left_out += other.left_out;
    }

    /// Returns one line per warning, for display.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.list.iter().map(ToString::to_string).collect();
        if self.left_out > 0 {
            lines.push(format!("{} more of these", self.left_out));
        }
        lines
    }

    /// Returns `true` if there are no warnings.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.left_out == 0
    }
}

/// Reads a whole document with `decode`; syntax errors come before type errors, as in Go.
pub(crate) fn document<'a>(
    bytes: &'a [u8],
    decode: impl FnOnce(&mut Reader<'a>) -> Result<(), SyntaxError>,
) -> Result<Warnings, ReadError> {
    let mut reader = Reader::new(bytes);
    decode(&mut reader)
        .and_then(|()| reader.end())
        .map_err(|error| ReadError::syntax(bytes, error))?;
    match reader.first_type_error() {
        Some(error) => Err(ReadError::wrong_type(bytes, error)),
        None => Ok(Warnings::take(&mut reader, bytes)),
    }
}

/// The readable parts of a damaged file.
#[derive(Debug)]
pub(crate) struct Salvaged<T> {
    pub(crate) content: T,
    /// The error at the point where the document ends too early.
    pub(crate) broken_off: Option<ReadError>,
    /// The first broken syntax, or the first wrong type outside of anything that is dropped as a whole.
    pub(crate) outside: Option<ReadError>,
    /// The elements that were left out.
    pub(crate) dropped: DroppedList,
}

impl<T> Salvaged<T> {
    /// Wraps the content of a sound file.
    pub(crate) fn sound(content: T) -> Self {
        Self {
            content,
            broken_off: None,
            outside: None,
            dropped: DroppedList::default(),
        }
    }

    /// Wraps the content that a scan found in a file of `length` bytes with broken syntax.
    pub(crate) fn scanned(content: T, error: ReadError, length: usize, dropped: DroppedList) -> Self {
        let is_cut = matches!(&error, ReadError::Syntax { at, .. } if at.offset >= length);
        let (broken_off, outside) = match is_cut {
            true => (Some(error), None),
            false => (None, Some(error)),
        };
        Self {
            content,
            broken_off,
            outside,
            dropped,
        }
    }

    pub(crate) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Salvaged<U> {
        let Self {
            content,
            broken_off,
            outside,
            dropped,
        } = self;
        Salvaged {
            content: convert(content),
            broken_off,
            outside,
            dropped,
        }
    }
}

/// Reads a document in which elements have values of wrong types. Broken syntax ends the reading.
pub(crate) fn salvage_with<'a>(
    bytes: &'a [u8],
    decode: impl FnOnce(&mut Reader<'a>) -> Result<(), SyntaxError>,
) -> Salvaged<()> {
    let mut reader = Reader::salvaging(bytes);
    let ended = decode(&mut reader).and_then(|()| reader.end());
    Salvaged {
        content: (),
        broken_off: ended.err().map(|error| ReadError::syntax(bytes, error)),
        outside: reader
            .first_type_error()
            .map(|error| ReadError::wrong_type(bytes, error)),
        dropped: reader.take_dropped(),
    }
}
