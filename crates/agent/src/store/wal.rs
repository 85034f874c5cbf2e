//! The write-ahead log: the latest changes, stored in front of the redb database in the same file.
//!
//! ```text
//!   0        4 KiB  12 KiB                                             1 MiB
//!   ┌────────┬──────┬──────────┬──────────┬───┬──────────┬─────────────┬──────────┐
//!   │ header │ mark │ record 8 │ record 9 │ … │ the last │ old records │ database │
//!   └────────┴──────┴──────────┴──────────┴───┴──────────┴─────────────┴──────────┘
//! ```
//!
//! redb rewrites half a dozen pages for one small change. A record is one write to blocks that exist, one small write of
//! the mark, and one sync for both. A checkpoint copies the records into the database, which stores the number of the
//! last one. Then the log starts over at its beginning.
//!
//! Every sector carries a salted checksum that covers its offset. A sector that was never written has a fixed pattern. So a
//! torn write can be distinguished from damage. A torn write leaves whole sectors, new or old; a flipped bit or a zeroed
//! sector leaves an invalid one.
//!
//! The mark contains the number of the last record and the ID of the boot that wrote it. It is written after the record,
//! and a change is answered only when both are synced. A start needs all records behind the last checkpoint, up to the
//! mark:
//!
//! | found | then | because |
//! | --- | --- | --- |
//! | the mark or a record before the marked one is damaged or missing | blocked | it was synced and answered |
//! | the marked record has an invalid sector | blocked | a torn write leaves valid sectors |
//! | it has old sectors, and the mark is of the same boot | blocked | the record was in the page cache before the mark was |
//! | it has old sectors, and the mark is of another boot | dropped | power was lost before the sync, so it was not answered |
//! | one complete record behind the mark | kept | devlet or the machine stopped between the two writes |
//! | a part of a record behind the mark | ignored | devlet or the machine stopped during the write, before the answer |
//! | two records behind the mark | blocked | the mark is out of date: the first of them was synced with its own |
//! | the mark is older than the last checkpoint | blocked | the checkpoint was synced after it |
//!
//! The mark is more than 4 KiB away from every record, so that one bad page never damages both.
//!
//! Deliberately absent: protection against a drive that reports a sync as done and then loses the write.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::file_backend::MeteredFile;

/// Length of the log in bytes: the offset of the database.
pub(crate) const LENGTH: u64 = 1 << 20;
/// Bytes that a drive writes atomically.
const SECTOR: usize = 512;
const MAGIC: &[u8; 16] = b"devlet state 2\n\0";
const SALT_LENGTH: usize = 16;
const HASH_LENGTH: usize = 32;
/// Offset of the mark.
const MARK_OFFSET: usize = 4 << 10;
/// Offset of the first record.
const FIRST_RECORD: usize = 12 << 10;
/// Content of sectors that were never written. Not zero: a zeroed sector is damage.
const BLANK: u8 = 0xb1;
/// Length of the checksum of a sector in bytes.
const CHECKSUM_LENGTH: usize = 16;
/// Bytes of a sector in front of its payload.
const HEAD_LENGTH: usize = CHECKSUM_LENGTH + 8 + 8 + 8 + 4 + 4;
/// Bytes of a record that one sector holds.
const PAYLOAD_LENGTH: usize = SECTOR - HEAD_LENGTH;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalError {
    #[error("it is not a database of this devlet")]
    Foreign,
    #[error("its first sector is damaged")]
    Header,
    #[error("the end mark of its write-ahead log is damaged")]
    Mark,
    #[error("record {number} of its write-ahead log is damaged or missing")]
    Damaged { number: u64 },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The log of an open database.
#[derive(Debug)]
pub(crate) struct Wal {
    file: Arc<MeteredFile>,
    salt: Salt,
    boot: u64,
    /// Random: distinguishes a record from an earlier attempt to write a record of the same number.
    session: u64,
    /// Number of the last record.
    number: u64,
    /// Offset of the next record.
    end: usize,
}

/// Part of every hash, so that recorded content cannot imitate a sector of the log.
type Salt = [u8; SALT_LENGTH];

fn length() -> usize {
    usize::try_from(LENGTH).unwrap_or(usize::MAX)
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Returns the number of sectors of a record.
fn sectors(content: usize) -> usize {
    content.div_ceil(PAYLOAD_LENGTH).max(1)
}

impl Wal {
    /// Writes an empty log, which is on disk after the next sync.
    pub(crate) fn create(file: Arc<MeteredFile>, boot_id: &str) -> io::Result<Self> {
        let mut salt = [0; SALT_LENGTH];
        for part in salt.chunks_mut(8) {
            part.copy_from_slice(&random().to_le_bytes());
        }
        // Write the whole log now, so that later writes need no free space.
        let mut all = vec![BLANK; length()];
        all[..SECTOR].fill(0);
        all[..MAGIC.len()].copy_from_slice(MAGIC);
        all[MAGIC.len()..][..SALT_LENGTH].copy_from_slice(&salt);
        all[MAGIC.len() + SALT_LENGTH..][..HASH_LENGTH].copy_from_slice(&hash(&salt, &[MAGIC]));
        let wal = Self {
            file,
            salt,
            boot: boot_hash(&salt, boot_id),
            session: random(),
            number: 0,
            end: FIRST_RECORD,
        };
        all[MARK_OFFSET..][..SECTOR].copy_from_slice(&encode(&salt, MARK_OFFSET, &wal.head(0, 0), &[]));
        wal.file.set_len(LENGTH)?;
        wal.file.write(0, &all)?;
        Ok(wal)
    }

    /// Reads the header, which never changes, and returns the salt.
    pub(crate) fn check(file: &MeteredFile) -> Result<Salt, WalError> {
        let mut first = [0; SECTOR];
        file.read(0, &mut first)?;
        if !first.starts_with(MAGIC) {
            return Err(WalError::Foreign);
        }
        let mut salt = [0; SALT_LENGTH];
        salt.copy_from_slice(&first[MAGIC.len()..][..SALT_LENGTH]);
        if first[MAGIC.len() + SALT_LENGTH..][..HASH_LENGTH] != hash(&salt, &[MAGIC]) {
            return Err(WalError::Header);
        }
        Ok(salt)
    }

    /// Reads the log of a locked file. Returns the contents of all records behind `checkpoint`, the number of the last
    /// record that the database contains.
    pub(crate) fn open(
        file: Arc<MeteredFile>,
        boot_id: &str,
        checkpoint: u64,
    ) -> Result<(Self, Vec<Vec<u8>>), WalError> {
        let salt = Self::check(&file)?;
        let mut bytes = vec![0; length()];
        file.read(0, &mut bytes)?;
        let image = Image { salt, bytes };
        let Sector::Written(mark, _) = image.sector(MARK_OFFSET) else {
            return Err(WalError::Mark);
        };
        if mark.number < checkpoint {
            let number = mark.number + 1;
            return Err(WalError::Damaged { number });
        }
        let boot = boot_hash(&salt, boot_id);
        let (mut number, mut end) = (checkpoint, FIRST_RECORD);
        let (mut contents, mut last) = (Vec::new(), None);
        while number <= mark.number {
            let next = number + 1;
            let is_marked = next == mark.number;
            match image.record(end, next) {
                Some((head, content)) if !is_marked || head.session == mark.session => {
                    end += sectors(content.len()) * SECTOR;
                    contents.push(content);
                    (number, last) = (next, Some(head));
                }
                _ if next > mark.number => break,
                _ if is_marked && mark.boot != boot && image.is_torn(end, &mark) => break,
                _ => return Err(WalError::Damaged { number: next }),
            }
        }
        if number > mark.number && image.record(end, number + 1).is_some() {
            return Err(WalError::Mark);
        }
        let wal = Self {
            file,
            salt,
            boot,
            session: random(),
            number,
            end: if contents.is_empty() { FIRST_RECORD } else { end },
        };
        if number != mark.number {
            let head = last.unwrap_or_else(|| wal.head(number, 0));
            wal.write_mark(&Head { boot, ..head })?;
            wal.file.sync_data()?;
        }
        Ok((wal, contents))
    }

    /// Returns the number of the last record.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Writes a record and syncs. Returns `false`, without writing, if there is not enough space.
    pub(crate) fn append(&mut self, content: &[u8]) -> io::Result<bool> {
        let count = sectors(content.len());
        let Ok(length) = u32::try_from(content.len()) else {
            return Ok(false);
        };
        if count * SECTOR > self.free_bytes() {
            return Ok(false);
        }
        let number = self.number + 1;
        let head = self.head(number, length);
        let mut record = Vec::with_capacity(count * SECTOR);
        for (index, offset) in (0..).zip((self.end..).step_by(SECTOR).take(count)) {
            let first = record.len() / SECTOR * PAYLOAD_LENGTH;
            let part = content.get(first..).unwrap_or_default();
            let part = part.get(..PAYLOAD_LENGTH).unwrap_or(part);
            record.extend_from_slice(&encode(&self.salt, offset, &Head { index, ..head }, part));
        }
        self.file.write(self.end as u64, &record)?;
        self.write_mark(&head)?;
        self.file.sync_data()?;
        self.number = number;
        self.end += record.len();
        Ok(true)
    }

    fn write_mark(&self, head: &Head) -> io::Result<()> {
        self.file
            .write(MARK_OFFSET as u64, &encode(&self.salt, MARK_OFFSET, head, &[]))
    }

    fn head(&self, number: u64, length: u32) -> Head {
        Head {
            number,
            session: self.session,
            boot: self.boot,
            length,
            index: 0,
        }
    }

    /// Returns `true` if the database contains all records.
    pub(crate) fn is_empty(&self) -> bool {
        self.end == FIRST_RECORD
    }

    /// Returns the number of bytes left for records.
    pub(crate) fn free_bytes(&self) -> usize {
        length().saturating_sub(self.end)
    }

    /// Starts over, because the database contains all records.
    pub(crate) fn reset(&mut self) {
        self.end = FIRST_RECORD;
    }
}

/// The fields of a sector. Those of the mark are the fields of the record that it marks.
#[derive(Debug, Clone, Copy)]
struct Head {
    number: u64,
    session: u64,
    /// Hash of the ID of the boot in which it was written.
    boot: u64,
    /// Length of the whole record.
    length: u32,
    /// Position of the sector in the record.
    index: u32,
}

/// The bytes of a log.
struct Image {
    salt: Salt,
    bytes: Vec<u8>,
}

enum Sector<'a> {
    Blank,
    Written(Head, &'a [u8]),
    Invalid,
}

impl Image {
    /// Returns the record of this number at this offset, if it is complete.
    fn record(&self, offset: usize, number: u64) -> Option<(Head, Vec<u8>)> {
        let Sector::Written(first, _) = self.sector(offset) else {
            return None;
        };
        let length = usize::try_from(first.length).ok()?;
        let mut content = Vec::new();
        for (index, offset) in (0..).zip((offset..).step_by(SECTOR).take(sectors(length))) {
            let Sector::Written(head, payload) = self.sector(offset) else {
                return None;
            };
            let is_of_record = (head.number, head.session, head.length, head.index)
                == (number, first.session, first.length, index);
            if !is_of_record {
                return None;
            }
            content.extend_from_slice(payload);
        }
        content.truncate(length);
        Some((first, content))
    }

    /// Returns `true` if an interrupted write can have left the record: each sector is its own or an older one.
    fn is_torn(&self, offset: usize, mark: &Head) -> bool {
        let Ok(length) = usize::try_from(mark.length) else {
            return false;
        };
        let mut offsets = (offset..).step_by(SECTOR).take(sectors(length));
        offsets.all(|offset| match self.sector(offset) {
            Sector::Blank => true,
            Sector::Written(head, _) => head.number <= mark.number,
            Sector::Invalid => false,
        })
    }

    fn sector(&self, offset: usize) -> Sector<'_> {
        let Some(bytes) = offset
            .checked_add(SECTOR)
            .and_then(|end| self.bytes.get(offset..end))
        else {
            return Sector::Invalid;
        };
        if bytes.iter().all(|byte| *byte == BLANK) {
            return Sector::Blank;
        }
        decode(&self.salt, offset, bytes)
            .map_or(Sector::Invalid, |(head, payload)| Sector::Written(head, payload))
    }
}

fn encode(salt: &Salt, offset: usize, head: &Head, payload: &[u8]) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    let (checksum, rest) = sector.split_at_mut(CHECKSUM_LENGTH);
    rest[..8].copy_from_slice(&head.number.to_le_bytes());
    rest[8..16].copy_from_slice(&head.session.to_le_bytes());
    rest[16..24].copy_from_slice(&head.boot.to_le_bytes());
    rest[24..28].copy_from_slice(&head.length.to_le_bytes());
    rest[28..32].copy_from_slice(&head.index.to_le_bytes());
    rest[32..][..payload.len()].copy_from_slice(payload);
    checksum.copy_from_slice(&sector_checksum(salt, offset, rest));
    sector
}

fn decode<'a>(salt: &Salt, offset: usize, sector: &'a [u8]) -> Option<(Head, &'a [u8])> {
    let (checksum, rest) = sector.split_at_checked(CHECKSUM_LENGTH)?;
    if checksum != sector_checksum(salt, offset, rest) {
        return None;
    }
    let (number, rest) = rest.split_first_chunk()?;
    let (session, rest) = rest.split_first_chunk()?;
    let (boot, rest) = rest.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (index, payload) = rest.split_first_chunk()?;
    let head = Head {
        number: u64::from_le_bytes(*number),
        session: u64::from_le_bytes(*session),
        boot: u64::from_le_bytes(*boot),
        length: u32::from_le_bytes(*length),
        index: u32::from_le_bytes(*index),
    };
    Some((head, payload))
}

fn sector_checksum(salt: &Salt, offset: usize, rest: &[u8]) -> [u8; CHECKSUM_LENGTH] {
    let hash = hash(salt, &[&(offset as u64).to_le_bytes(), rest]);
    let mut checksum = [0; CHECKSUM_LENGTH];
    checksum.copy_from_slice(&hash[..CHECKSUM_LENGTH]);
    checksum
}

fn boot_hash(salt: &Salt, boot_id: &str) -> u64 {
    let hash = hash(salt, &[boot_id.as_bytes()]);
    let mut boot = [0; 8];
    boot.copy_from_slice(&hash[..8]);
    u64::from_le_bytes(boot)
}

fn hash(salt: &Salt, parts: &[&[u8]]) -> [u8; HASH_LENGTH] {
    let mut hash = Sha256::new();
    hash.update(salt);
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests;
