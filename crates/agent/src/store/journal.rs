//! The journal: what was changed last, in front of the database and in the same file.
//!
//! ```text
//!   0        512                                               1 MiB
//!   ┌────────┬──────────┬──────────┬───┬──────────┬─────────────┬──────────┐
//!   │ header │ record 7 │ record 8 │ … │ the last │ older ones  │ database │
//!   └────────┴──────────┴──────────┴───┴──────────┴─────────────┴──────────┘
//! ```
//!
//! A tree that never overwrites a page needs half a dozen of them for one small change, all over the file. A record is
//! one write to a place that exists already, and one sync. From time to time the database takes over what the journal
//! has, and says up to which number; then the journal begins anew.
//!
//! Records have consecutive numbers. Each is written together with a sector that says that it is the last, in the
//! place of the one that said so before. So a damaged record is noticed: something of it, or of a later one, is behind
//! it. What was written in part, and nobody was answered for, is a record of several sectors, or lacks the sector that
//! says that it is the last. (A record of several sectors that was damaged later looks the same, if it is the last.)

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
const LAST: &[u8; 4] = b"last";
const HASH: usize = 32;
/// The mark, the length of the content, the number, a hash of these, and one of the content.
const HEAD: usize = 4 + 4 + 8 + HASH + HASH;

/// Why a journal is none.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("it is no database of devlet's")]
    Foreign,
    #[error("its first sector is damaged")]
    Header,
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
        all[MAGIC.len() + SALT..][..HASH].copy_from_slice(&hash(&salt, &[MAGIC]));
        all[SECTOR..][..HEAD].copy_from_slice(&head(&salt, LAST, 0, &[]));
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

    /// The journal of a file that nobody else can be writing to.
    pub(crate) fn open(file: Arc<Counted>) -> Result<Unread, JournalError> {
        let salt = Self::check(&file)?;
        let mut all = vec![0; length()];
        file.read(0, &mut all)?;
        Ok(Unread { file, salt, all })
    }

    /// Whether a file begins as one with a journal does; the salt. This never changes.
    pub(crate) fn check(file: &Counted) -> Result<[u8; SALT], JournalError> {
        let mut first = [0; SECTOR];
        file.read(0, &mut first)?;
        if !first.starts_with(MAGIC) {
            return Err(JournalError::Foreign);
        }
        let mut salt = [0; SALT];
        salt.copy_from_slice(&first[MAGIC.len()..MAGIC.len() + SALT]);
        if first[MAGIC.len() + SALT..][..HASH] != hash(&salt, &[MAGIC]) {
            return Err(JournalError::Header);
        }
        Ok(salt)
    }

    /// The last record's number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Writes a record and syncs. `false`: there is no room, and nothing was done.
    pub(crate) fn append(&mut self, content: &[u8]) -> io::Result<bool> {
        let bytes = (HEAD + content.len()).next_multiple_of(SECTOR);
        if u32::try_from(content.len()).is_err() || bytes + SECTOR > length() - self.end {
            return Ok(false);
        }
        let number = self.number + 1;
        let mut record = Vec::with_capacity(bytes + SECTOR);
        record.extend_from_slice(&head(&self.salt, RECORD, number, content));
        record.extend_from_slice(content);
        record.resize(bytes, 0);
        record.extend_from_slice(&head(&self.salt, LAST, number, &[]));
        record.resize(bytes + SECTOR, 0);
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

    /// How many bytes there is room for.
    pub(crate) fn room(&self) -> usize {
        length().saturating_sub(self.end)
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

/// What a sector says that it is.
enum Found<'a> {
    Record(u64, &'a [u8]),
    /// The beginning of a record, of which the rest is another one's.
    Half(u64),
    Last(u64),
}

impl Unread {
    /// The contents of all records behind the number up to which the database has everything.
    pub(crate) fn read(self, taken_over: u64) -> Result<(Journal, Vec<Vec<u8>>), JournalError> {
        let (mut number, mut end) = (None, SECTOR);
        let mut contents = Vec::new();
        let last = loop {
            let next = number.map_or(taken_over + 1, |number: u64| number + 1);
            match self.found_at(end) {
                // The first one may be any that the database has.
                Some(Found::Record(found, content)) if found == next || number.is_none() && found < next => {
                    if found > taken_over {
                        contents.push(content.to_vec());
                    }
                    number = Some(found);
                    end += (HEAD + content.len()).next_multiple_of(SECTOR);
                }
                Some(Found::Half(found)) if found == next && found > taken_over => break found - 1,
                Some(Found::Last(found)) if number.is_none_or(|number| number == found) => break found,
                // The sector behind a record that nobody was answered for may not have been written.
                _ if number.is_some_and(|number| number > taken_over) => {
                    if self.has_any_behind(end, next) {
                        return Err(JournalError::Damaged { missing: next });
                    }
                    break next - 1;
                }
                // A record that begins where the journal does may have been written in part, over older ones.
                Some(Found::Half(_)) | None if number.is_some() || self.is_old(end, taken_over) => {
                    if self.has_records_behind(end, taken_over) {
                        return Err(JournalError::Damaged { missing: next });
                    }
                    break taken_over;
                }
                _ => return Err(JournalError::Damaged { missing: next }),
            }
        };
        if last < taken_over {
            return Err(JournalError::Damaged { missing: last + 1 });
        }
        let journal = Journal {
            file: self.file,
            salt: self.salt,
            number: last,
            end: if contents.is_empty() { SECTOR } else { end },
        };
        Ok((journal, contents))
    }

    /// Whether a record begins here that the database has.
    fn is_old(&self, place: usize, taken_over: u64) -> bool {
        matches!(self.found_at(place), Some(Found::Half(found)) if found <= taken_over)
    }

    /// Whether anything of this record or a later one was written: if so, it was whole.
    fn has_any_behind(&self, end: usize, number: u64) -> bool {
        self.behind(end).any(|found| match found {
            Found::Record(found, _) | Found::Half(found) | Found::Last(found) => found >= number,
        })
    }

    /// Whether there are records behind this number.
    fn has_records_behind(&self, end: usize, number: u64) -> bool {
        self.behind(end).any(|found| match found {
            Found::Record(found, _) | Found::Half(found) => found > number,
            Found::Last(_) => false,
        })
    }

    fn behind(&self, end: usize) -> impl Iterator<Item = Found<'_>> {
        let places = (end..length()).step_by(SECTOR);
        places.filter_map(|place| self.found_at(place))
    }

    fn found_at(&self, place: usize) -> Option<Found<'_>> {
        let record = self.all.get(place..)?;
        let (mark, rest) = record.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (number, _) = rest.split_first_chunk::<8>()?;
        let (found, rest) = record.split_at_checked(HEAD)?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let number = u64::from_le_bytes(*number);
        let (fields, hashes) = found.split_at_checked(HEAD - 2 * HASH)?;
        let (of_fields, of_content) = hashes.split_at_checked(HASH)?;
        if of_fields != hash(&self.salt, &[fields]) {
            return None;
        }
        if mark == LAST {
            return Some(Found::Last(number));
        }
        let content = rest.get(..length)?;
        if of_content == hash(&self.salt, &[fields, content]) {
            return Some(Found::Record(number, content));
        }
        // A sector is written as a whole.
        (HEAD + length > SECTOR).then_some(Found::Half(number))
    }
}

fn head(salt: &[u8; SALT], mark: &[u8; 4], number: u64, content: &[u8]) -> [u8; HEAD] {
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX).to_le_bytes();
    let mut head = [0; HEAD];
    let (fields, hashes) = head.split_at_mut(HEAD - 2 * HASH);
    fields[..4].copy_from_slice(mark);
    fields[4..8].copy_from_slice(&length);
    fields[8..].copy_from_slice(&number.to_le_bytes());
    let (of_fields, of_content) = hashes.split_at_mut(HASH);
    of_fields.copy_from_slice(&hash(salt, &[fields]));
    of_content.copy_from_slice(&hash(salt, &[fields, content]));
    head
}

fn hash(salt: &[u8; SALT], parts: &[&[u8]]) -> [u8; HASH] {
    let mut hash = Sha256::new();
    hash.update(salt);
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests;
