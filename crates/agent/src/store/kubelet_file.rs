//! The kubelet's state files: their kinds, and the keys of records about them.

use super::record::TableRecord;
use super::tables::BLOCKED_DATABASE_KEY;

/// SHA-256 of a file.
pub(crate) type Hash = [u8; 32];

/// A kind of state file of the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KubeletFile {
    /// `kubelet_internal_checkpoint`
    Devices,
    /// `dra_manager_state`
    Claims,
}

impl KubeletFile {
    pub(crate) const ALL: [Self; 2] = [Self::Devices, Self::Claims];

    /// The table with the hashes of its mirrors.
    pub(super) fn mirrors_record(self) -> TableRecord {
        match self {
            Self::Devices => TableRecord::Mirrors,
            Self::Claims => TableRecord::ClaimMirrors,
        }
    }

    pub(super) fn contested_key(self) -> &'static str {
        match self {
            Self::Devices => "contested",
            Self::Claims => "contested-claims",
        }
    }

    fn blocked_key(self) -> &'static str {
        match self {
            Self::Devices => "blocked",
            Self::Claims => "blocked-claims",
        }
    }

    pub(super) fn foreign_key(self) -> &'static str {
        match self {
            Self::Devices => "foreign",
            Self::Claims => "foreign-claims",
        }
    }
}

/// A kubelet's file that an operator has to decide about, numbered among those of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PendingFile {
    pub(crate) kind: KubeletFile,
    pub(crate) number: u32,
}

impl PendingFile {
    /// Returns the next number after those in `known`.
    pub(crate) fn next(kind: KubeletFile, known: impl Iterator<Item = Self>) -> Self {
        let numbers = known.filter(|each| each.kind == kind).map(|each| each.number);
        let number = numbers.max().map_or(0, |last| last.saturating_add(1));
        Self { kind, number }
    }

    /// Returns the key of its record. `key` returns the key of the first file of a kind.
    pub(super) fn key(self, key: impl Fn(KubeletFile) -> &'static str) -> String {
        match self.number {
            0 => key(self.kind).to_owned(),
            number => format!("{}.{number}", key(self.kind)),
        }
    }

    /// Parses the key of a record; see [`PendingFile::key`].
    pub(super) fn of_key(text: &str, key: impl Fn(KubeletFile) -> &'static str) -> Option<Self> {
        let (first, number) = match text.split_once('.') {
            Some((first, number)) => (first, number.parse().ok()?),
            None => (text, 0),
        };
        let kind = KubeletFile::ALL.into_iter().find(|kind| key(*kind) == first)?;
        Some(Self { kind, number })
    }
}

/// State that blocks admissions. Each has its own record and is resolved separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlockedBy {
    /// A lost or unreadable database.
    Database,
    /// An unreadable kubelet's file.
    File(PendingFile),
}

impl BlockedBy {
    /// Returns the kind of the kubelet's file.
    pub(crate) fn kind(self) -> Option<KubeletFile> {
        match self {
            Self::Database => None,
            Self::File(file) => Some(file.kind),
        }
    }

    pub(super) fn key(self) -> String {
        match self {
            Self::Database => BLOCKED_DATABASE_KEY.to_owned(),
            Self::File(file) => file.key(KubeletFile::blocked_key),
        }
    }

    pub(super) fn of_key(key: &str) -> Option<Self> {
        match key {
            BLOCKED_DATABASE_KEY => Some(Self::Database),
            key => PendingFile::of_key(key, KubeletFile::blocked_key).map(Self::File),
        }
    }
}
