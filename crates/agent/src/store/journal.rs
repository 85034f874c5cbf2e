//! The journal: what was changed last, in front of the database and in the same file.
//!
//! ```text
//!   0        512                                        1 MiB
//!   ┌────────┬──────────┬──────────┬───┬────────────────┬──────────┐
//!   │ header │ record 7 │ record 8 │ … │ room, old ones │ database │
//!   └────────┴──────────┴──────────┴───┴────────────────┴──────────┘
//! ```
//!
//! A tree that never overwrites a page needs half a dozen of them for one small change, all over the file. A record is
//! one write to a place that exists already, and one sync. From time to time the database takes over what the journal
//! has, and says up to which number; then the journal begins anew.
//!
//! A record counts if it is whole, and has the number after the one before it. Behind the last one there may be the
//! beginning of one that was not answered for, and older ones. A newer one cannot be there, because each is synced
//! before the next: if it is, one in between has been damaged.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::backend::Counted;

/// What is in front of the database.
pub(crate) const LENGTH: u64 = 1 << 20;
/// What a drive writes as a whole.
const SECTOR: usize = 512;
const MAGIC: &[u8; 16] = b"devlet state 1\n\0";
const SALT: usize = 16;
const RECORD: &[u8; 4] = b"next";
/// The mark, the length of the content, the number, and the hash.
const HEAD: usize = 4 + 4 + 8 + 32;

/// Why a journal is none.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("it is no database of devlet's")]
    Foreign,
    #[error("record {missing} of its journal is damaged")]
    Damaged { missing: u64 },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The journal of an open database.
#[derive(Debug)]
pub(crate) struct Journal {
    file: Arc<Counted>,
    /// Part of every hash: who has something recorded cannot make it look like a record.
    salt: [u8; SALT],
    /// The last record.
    number: u64,
    /// Where the next one begins.
    end: usize,
}

fn length() -> usize {
    usize::try_from(LENGTH).unwrap_or(usize::MAX)
}

impl Journal {
    /// An empty one, on disk with the next sync.
    pub(crate) fn create(file: Arc<Counted>) -> io::Result<Self> {
        let mut salt = [0; SALT];
        for part in salt.chunks_mut(8) {
            let random = RandomState::new().build_hasher().finish().to_le_bytes();
            part.copy_from_slice(&random);
        }
        // All of it, so that no later write has to find room.
        let mut all = vec![0; length()];
        all[..MAGIC.len()].copy_from_slice(MAGIC);
        all[MAGIC.len()..MAGIC.len() + SALT].copy_from_slice(&salt);
        file.set_len(LENGTH)?;
        file.write(0, &all)?;
        Ok(Self {
            file,
            salt,
            number: 0,
            end: SECTOR,
        })
    }

    /// Whether there is one in front of a database; databases once began at the beginning.
    pub(crate) fn is_in(file: &Counted) -> io::Result<bool> {
        let mut magic = [0; 4];
        file.read(0, &mut magic)?;
        Ok(&magic != b"redb")
    }

    /// The journal of a file, and what is in it that the database does not have.
    pub(crate) fn open(file: Arc<Counted>) -> Result<Unread, JournalError> {
        let mut all = vec![0; length()];
        file.read(0, &mut all)?;
        if !all.starts_with(MAGIC) {
            return Err(JournalError::Foreign);
        }
        let mut salt = [0; SALT];
        salt.copy_from_slice(&all[MAGIC.len()..MAGIC.len() + SALT]);
        Ok(Unread { file, salt, all })
    }

    /// The last record's number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Writes a record and syncs. `false`: there is no room, and nothing was done.
    pub(crate) fn append(&mut self, content: &[u8]) -> io::Result<bool> {
        let bytes = (HEAD + content.len()).next_multiple_of(SECTOR);
        let Ok(length_of_content) = u32::try_from(content.len()) else {
            return Ok(false);
        };
        if bytes > length() - self.end {
            return Ok(false);
        }
        let number = self.number + 1;
        let mut record = Vec::with_capacity(bytes);
        record.extend_from_slice(RECORD);
        record.extend_from_slice(&length_of_content.to_le_bytes());
        record.extend_from_slice(&number.to_le_bytes());
        record.extend_from_slice(&hash(&self.salt, number, content));
        record.extend_from_slice(content);
        record.resize(bytes, 0);
        self.file.write(self.end as u64, &record)?;
        self.file.sync_data()?;
        self.number = number;
        self.end += bytes;
        Ok(true)
    }

    /// Whether the database has everything.
    pub(crate) fn is_empty(&self) -> bool {
        self.end == SECTOR
    }

    /// The database has everything up to the last record.
    pub(crate) fn begin_anew(&mut self) {
        self.end = SECTOR;
    }
}

/// A journal that has not been read.
pub(crate) struct Unread {
    file: Arc<Counted>,
    salt: [u8; SALT],
    all: Vec<u8>,
}

impl Unread {
    /// The contents of all records behind the number up to which the database has everything.
    pub(crate) fn read(self, taken_over: u64) -> Result<(Journal, Vec<Vec<u8>>), JournalError> {
        let (mut number, mut end) = (taken_over, SECTOR);
        let mut contents = Vec::new();
        while let Some((found, content)) = self.record_at(end)
            && found == number + 1
        {
            contents.push(content.to_vec());
            number = found;
            end += (HEAD + content.len()).next_multiple_of(SECTOR);
        }
        for place in (end..length()).step_by(SECTOR) {
            if let Some((found, _)) = self.record_at(place)
                && found > number
            {
                return Err(JournalError::Damaged { missing: number + 1 });
            }
        }
        let journal = Journal {
            file: self.file,
            salt: self.salt,
            number,
            end,
        };
        Ok((journal, contents))
    }

    fn record_at(&self, place: usize) -> Option<(u64, &[u8])> {
        let record = self.all.get(place..)?;
        let (mark, rest) = record.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let (expected, rest) = rest.split_first_chunk::<32>()?;
        if mark != RECORD {
            return None;
        }
        let content = rest.get(..usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
        let number = u64::from_le_bytes(*number);
        (hash(&self.salt, number, content) == *expected).then_some((number, content))
    }
}

fn hash(salt: &[u8; SALT], number: u64, content: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(salt);
    hash.update(number.to_le_bytes());
    hash.update(content);
    hash.finalize().into()
}

#[cfg(test)]
mod tests;
