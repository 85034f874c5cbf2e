//! What every reader of this crate answers: the content, and how far to trust it.

use crate::format::Format;
use crate::go_json::{self, DroppedList, Reader, SyntaxError, TypeError};
use crate::position::Position;

/// A file that decodes. Its checksum may still be wrong: [`File::verified`] is the way to the content for those
/// who act on it, [`File::unverified`] for those who only look.
#[derive(Debug, Clone, PartialEq)]
pub struct File<T> {
    /// The format that the bytes are in.
    pub format: Format,
    /// `None` for formats that carry no checksum.
    pub checksum: Option<Checksum>,
    /// What the decoder passed over without a word.
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

    /// The content, if the checksum is right or the format has none.
    pub fn verified(self) -> Result<T, ChecksumMismatch> {
        match self.checksum {
            Some(checksum) if !checksum.is_valid() => Err(ChecksumMismatch(checksum)),
            _ => Ok(self.content),
        }
    }

    /// The content, whatever its checksum says.
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

/// The checksum in a file and the one that its content has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum {
    /// As the file says. What a kubelet assumes for a file that does not say.
    pub stored: u64,
    /// As computed from the decoded content.
    pub computed: u64,
}

impl Checksum {
    /// Whether the two agree.
    pub fn is_valid(self) -> bool {
        self.stored == self.computed
    }
}

/// The content is not what was written. Kubelets say "checkpoint is corrupted".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("checkpoint is corrupted: the stored checksum is {}, the content has {}", .0.stored, .0.computed)]
pub struct ChecksumMismatch(pub Checksum);

/// Why a file does not decode. `problem` is in the words of the kubelet's own decoder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or cut off.
    #[error("{problem}, {at}")]
    Syntax {
        /// What the decoder says.
        problem: String,
        /// Where.
        at: Position,
    },
    /// JSON, with a value of the wrong type.
    #[error("{problem}, {at}")]
    Type {
        /// What the decoder says.
        problem: String,
        /// Where.
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
    /// JSON, but no file that a kubelet writes.
    #[error("{0}")]
    UnknownKind(UnknownKind),
}

/// A JSON document that is none of the kubelet's device files.
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

    /// The words of a kubelet's decoder, where there are any.
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

/// What a decoder passed over in silence.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Warnings {
    /// The first ones, in the order of the file.
    pub list: Vec<Warning>,
    /// How many more there are.
    pub left_out: usize,
}

/// One thing that a decoder passed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}, {at}")]
pub struct Warning {
    /// What.
    pub kind: WarningKind,
    /// Where.
    pub at: Position,
}

/// Something that a kubelet's decoder accepts without a word.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WarningKind {
    /// Ignored, and lost at the next write.
    #[error("unknown key {0:?} is ignored")]
    UnknownKey(String),
    /// The later value wins.
    #[error("key {0:?} stands twice, the later value counts")]
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

    /// For people, one line each.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.list.iter().map(ToString::to_string).collect();
        if self.left_out > 0 {
            lines.push(format!("{} more of these", self.left_out));
        }
        lines
    }

    /// Whether there is nothing to warn of.
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

/// What could be read of a damaged file.
#[derive(Debug)]
pub(crate) struct Salvaged<T> {
    pub(crate) content: T,
    /// Where the document ends too early.
    pub(crate) broken_off: Option<ReadError>,
    /// The first broken syntax, or the first wrong type outside of anything that is dropped as a whole.
    pub(crate) outside: Option<ReadError>,
    /// The elements that were left out.
    pub(crate) dropped: DroppedList,
}

impl<T> Salvaged<T> {
    /// The content of a sound file.
    pub(crate) fn sound(content: T) -> Self {
        Self {
            content,
            broken_off: None,
            outside: None,
            dropped: DroppedList::default(),
        }
    }

    /// The content that a scan found in a file of `length` bytes with broken syntax.
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
