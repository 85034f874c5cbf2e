//! Why a database cannot be opened or read.

use std::io;

use redb::{DatabaseError, StorageError};

use super::record::InvalidRecord;
use super::state_file::StateFileError;
use super::wal::WalError;

/// Why a database cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("no such file")]
    Absent,
    #[error("another process has it open")]
    InUse,
    #[error("schema {found}, but this devlet knows only up to {known}")]
    Newer { found: u32, known: u32 },
    #[error("{0}")]
    Unreadable(String),
    /// Something that is not a file, or that another user controls.
    #[error(transparent)]
    Unusable(StateFileError),
    #[error(transparent)]
    Io(io::Error),
}

impl From<StateFileError> for LoadError {
    fn from(error: StateFileError) -> Self {
        match error {
            StateFileError::Io(error) => error.into(),
            other => Self::Unusable(other),
        }
    }
}

impl From<DatabaseError> for LoadError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::DatabaseAlreadyOpen => Self::InUse,
            DatabaseError::Storage(error) => error.into(),
            other => Self::Unreadable(other.to_string()),
        }
    }
}

impl From<StorageError> for LoadError {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::Io(error) => error.into(),
            other => Self::Unreadable(other.to_string()),
        }
    }
}

impl From<io::Error> for LoadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // redb reports a file that is not a database like this.
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Self::Unreadable(error.to_string()),
            io::ErrorKind::NotFound => Self::Absent,
            _ => Self::Io(error),
        }
    }
}

impl From<redb::Error> for LoadError {
    fn from(error: redb::Error) -> Self {
        match error {
            redb::Error::Io(error) => error.into(),
            other => Self::Unreadable(other.to_string()),
        }
    }
}

impl From<WalError> for LoadError {
    fn from(error: WalError) -> Self {
        match error {
            WalError::Io(error) => error.into(),
            other => Self::Unreadable(other.to_string()),
        }
    }
}

impl From<InvalidRecord> for LoadError {
    fn from(error: InvalidRecord) -> Self {
        Self::Unreadable(error.to_string())
    }
}

impl From<prost::DecodeError> for LoadError {
    fn from(error: prost::DecodeError) -> Self {
        InvalidRecord::from(error).into()
    }
}
