//! Reading and parsing the file at the path of a kubelet's file.

use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::claims_file::ImportedClaims;
use super::devices_file::ImportedDevices;
use super::import::Content;
use super::kubelet_file::{Hash, KubeletFile};
use super::state_file::{self, StateFileError};

/// The file at the path of a kubelet's file.
pub(super) enum FileOnDisk {
    Absent,
    /// Not parsed yet: a mirror need not be.
    Present {
        bytes: Vec<u8>,
        hash: Hash,
    },
    Unreachable {
        reason: String,
        /// A kubelet can have written it.
        may_be_state: bool,
        hash: Option<Hash>,
    },
}

/// A parsed [`FileOnDisk`].
pub(super) enum ParsedFile {
    Absent,
    Sound(SoundFile),
    Unreadable { reason: String, may_be_state: bool },
}

/// A kubelet's file that can be imported.
pub(super) struct SoundFile {
    pub(super) content: Content,
    pub(super) bytes: Vec<u8>,
    pub(super) hash: Hash,
}

impl FileOnDisk {
    pub(super) fn read(path: Option<&Path>) -> Self {
        match path.map(Self::read_file) {
            None => Self::Absent,
            Some(Ok(on_disk)) => on_disk,
            Some(Err(error)) => Self::unreachable(&error, None),
        }
    }

    fn read_file(path: &Path) -> Result<Self, StateFileError> {
        let Some((file, metadata)) = state_file::open(path, false)? else {
            return Ok(Self::Absent);
        };
        let checked = state_file::check_access(&metadata).and_then(|()| state_file::check_links(&metadata));
        if let Err(error) = checked.as_ref()
            && !error.may_be_state()
        {
            return Ok(Self::unreachable(error, None));
        }
        let bytes = state_file::read_open(file, &metadata)?;
        let hash = Sha256::digest(&bytes).into();
        Ok(match checked {
            Ok(()) => Self::Present { bytes, hash },
            Err(error) => Self::unreachable(&error, Some(hash)),
        })
    }

    fn unreachable(error: &StateFileError, hash: Option<Hash>) -> Self {
        Self::Unreachable {
            reason: error.to_string(),
            may_be_state: error.may_be_state(),
            hash,
        }
    }

    /// Returns the hash of the content, even if the file cannot be used.
    pub(super) fn content_hash(&self) -> Option<Hash> {
        match self {
            Self::Absent => None,
            Self::Present { hash, .. } => Some(*hash),
            Self::Unreachable { hash, .. } => *hash,
        }
    }

    /// Returns the hash of the content if the file can be used.
    pub(super) fn hash(&self) -> Option<Hash> {
        match self {
            Self::Present { hash, .. } => Some(*hash),
            Self::Absent | Self::Unreachable { .. } => None,
        }
    }

    pub(super) fn parse(self, file: KubeletFile) -> ParsedFile {
        match self {
            Self::Absent => ParsedFile::Absent,
            Self::Unreachable {
                reason, may_be_state, ..
            } => ParsedFile::Unreadable { reason, may_be_state },
            Self::Present { bytes, hash } => {
                let content = match file {
                    KubeletFile::Devices => ImportedDevices::read(&bytes).map(Content::Devices),
                    KubeletFile::Claims => ImportedClaims::read(&bytes).map(Content::Claims),
                };
                match content {
                    Ok(content) => ParsedFile::Sound(SoundFile { content, bytes, hash }),
                    Err(error) => ParsedFile::Unreadable {
                        reason: error.to_string(),
                        may_be_state: true,
                    },
                }
            }
        }
    }
}
