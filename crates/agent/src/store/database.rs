//! The database: a write-ahead log and redb tables in one file.
//!
//! A change is first appended to the write-ahead log (`wal.rs`). A checkpoint copies the log into the tables (`tables.rs`)
//! when the log is almost full or a snapshot is requested.
//!
//! A new file is filled in one transaction under a temporary name, synced, and renamed: an incomplete database never has
//! the final name. After a failed write, the file is created again from memory. Pages of a failed sync cannot be trusted,
//! even if they are readable until the next reboot.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use prost::Message as _;
use redb::Durability;
use redb::backends::FileBackend;

use super::error::WriteError;
use super::file_backend::{MeteredFile, OffsetBackend, Storage};
use super::fs::{self, FileId};
use super::load_error::LoadError;
use super::node_id::NotWritten;
use super::persisted_state::PersistedState;
use super::record::{EntryRecord, WalRecord};
use super::row::Row;
use super::state_file;
use super::tables::{self, Snapshot};
use super::wal::{self, Wal};
use crate::metrics::statistics::Counters;

/// Free bytes in the log below which a checkpoint is made. Most changes are smaller.
const MIN_FREE_WAL: usize = 64 << 10;

/// Size of redb's page cache in bytes. The state of a node fits into it.
const CACHE_BYTES: usize = 8 << 20;

/// An opened database with its content.
pub(crate) struct Loaded {
    pub(crate) database: Database,
    pub(crate) persisted: PersistedState,
    /// The database had not been closed, or was damaged and could be restored.
    pub(crate) repaired: bool,
}

/// The path of a database and how its file is accessed.
#[derive(Debug, Clone)]
pub(crate) struct DatabaseFile {
    pub(crate) path: PathBuf,
    pub(crate) storage: Storage,
    pub(crate) counters: Arc<Counters>,
    /// Distinguishes a write that a power loss interrupted from damage, see `wal.rs`.
    pub(crate) boot_id: String,
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    database: redb::Database,
    wal: Wal,
    /// Changes that are in the log but not yet in the tables.
    pending: Vec<EntryRecord>,
    /// ID of the open file. It stays unique while the file is open.
    pub(crate) file_id: FileId,
}

impl DatabaseFile {
    /// Opens an existing database and reads its content.
    pub(crate) fn open(&self) -> Result<Loaded, LoadError> {
        // redb panics on some damaged files.
        let opened = catch_unwind(AssertUnwindSafe(|| self.try_open()));
        opened.unwrap_or_else(|_| Err(LoadError::Unreadable("it is damaged: redb panicked".into())))
    }

    fn try_open(&self) -> Result<Loaded, LoadError> {
        let (file, about) = state_file::open(&self.path, true)?.ok_or(LoadError::Absent)?;
        state_file::check_access(&about)?;
        if about.len() == 0 {
            return Err(LoadError::Unreadable("it is empty".into()));
        }
        fs::make_private(&file, &about)?;
        let file = self.storage.wrap(FileBackend::new(file)?, &self.counters);
        Wal::check(&file)?;
        if file.length()? <= wal::LENGTH {
            // redb would treat it as a new file and grow it.
            return Err(LoadError::Unreadable("it ends with its write-ahead log".into()));
        }
        // This locks the file. Until then, another process may write to the log.
        let (database, mut repaired) = verified(Arc::clone(&file), wal::LENGTH)?;
        let checkpoint = Snapshot::of(&database)?.last_checkpoint()?;
        let (wal, records) = Wal::open(file, &self.boot_id, checkpoint)?;
        let mut database = Database {
            database,
            wal,
            pending: Vec::new(),
            file_id: FileId::of(&about),
        };
        repaired |= !records.is_empty();
        for record in records {
            let record = WalRecord::decode(record.as_slice())?;
            database.pending.extend(record.entries);
        }
        Snapshot::of(&database.database)?.check_schema()?;
        let mut persisted = Snapshot::of(&database.database)?.load()?;
        // Without a checkpoint, so that a start needs no free disk space.
        persisted.apply(&database.pending)?;
        Ok(Loaded {
            database,
            persisted,
            repaired,
        })
    }

    /// Creates a database with these rows and renames it to the final path, replacing an existing file.
    pub(crate) fn create(&self, rows: &[Row]) -> Result<Database, redb::Error> {
        let temporary = fs::with_suffix(&self.path, ".new");
        let create = || {
            let file = fs::create_private(&temporary)?;
            let file_id = FileId::of(&file.metadata()?);
            let file = self.storage.wrap(FileBackend::new(file)?, &self.counters);
            let wal = Wal::create(Arc::clone(&file), &self.boot_id)?;
            let database = Database {
                database: builder().create_with_backend(OffsetBackend {
                    file,
                    offset: wal::LENGTH,
                })?,
                wal,
                pending: Vec::new(),
                file_id,
            };
            database.initialize(rows)?;
            std::fs::rename(&temporary, &self.path)?;
            fs::sync_directory_of(&self.path)?;
            Ok(database)
        };
        let created = catch_redb_panic(create);
        if created.is_err() {
            // The next attempt removes it in any case.
            let _ = std::fs::remove_file(&temporary);
        }
        created
    }
}

fn builder() -> redb::Builder {
    let mut builder = redb::Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

/// Opens a database and verifies every page. Returns `true` with it if it had to be repaired.
fn verified(file: Arc<MeteredFile>, offset: u64) -> Result<(redb::Database, bool), LoadError> {
    let repaired = Arc::new(AtomicBool::new(false));
    let mut builder = builder();
    builder.set_repair_callback({
        let repaired = Arc::clone(&repaired);
        move |_| repaired.store(true, Ordering::Relaxed)
    });
    let mut database = builder.create_with_backend(OffsetBackend { file, offset })?;
    // A repair verifies every page; opening a cleanly closed file does not.
    if !repaired.load(Ordering::Relaxed) && !database.check_integrity()? {
        repaired.store(true, Ordering::Relaxed);
    }
    let repaired = repaired.load(Ordering::Relaxed);
    Ok((database, repaired))
}

impl DatabaseFile {
    /// Counts a failed write and returns its error.
    pub(crate) fn failure(&self, error: &redb::Error) -> WriteError {
        self.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: self.path.clone(),
            reason: disk_reason(error),
            kind: io_kind(error),
        }
    }

    /// Counts a failed write of an id file and returns its error.
    pub(crate) fn not_written(&self, not: &NotWritten) -> WriteError {
        self.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: not.path.clone(),
            reason: not.error.to_string(),
            kind: Some(not.error.kind()),
        }
    }
}

/// Turns a panic of redb into an error: redb panics on some disk errors, which must not end the writer thread.
fn catch_redb_panic<T>(action: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, redb::Error> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| {
        Err(redb::Error::Corrupted(
            "the database is damaged: redb panicked".into(),
        ))
    })
}

impl Database {
    fn initialize(&self, rows: &[Row]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_two_phase_commit(true);
        tables::create(&transaction)?;
        tables::write_entries(&transaction, rows.iter().flat_map(Row::entries))?;
        Ok(transaction.commit()?)
    }

    /// Writes all rows or none. They are on disk when this returns.
    pub(crate) fn write<'a>(&mut self, rows: impl IntoIterator<Item = &'a Row>) -> Result<(), redb::Error> {
        let entries = rows.into_iter().flat_map(Row::entries).collect();
        catch_redb_panic(|| {
            let record = WalRecord { entries };
            let bytes = record.encode_to_vec();
            let mut is_written = self.wal.append(&bytes)?;
            if !is_written {
                self.checkpoint()?;
                is_written = self.wal.append(&bytes)?;
            }
            self.pending.extend(record.entries);
            // A change that is larger than the log goes directly into the tables.
            if is_written { Ok(()) } else { self.checkpoint() }
        })
    }

    /// Makes a checkpoint if the log is almost full, so that later writes need not wait for one.
    pub(crate) fn ensure_wal_space(&mut self) -> Result<(), redb::Error> {
        if self.wal.free_bytes() >= MIN_FREE_WAL {
            return Ok(());
        }
        self.checkpoint()
    }

    /// Copies the log into the tables durably, with one sync, and resets the log.
    pub(crate) fn checkpoint(&mut self) -> Result<(), redb::Error> {
        if self.pending.is_empty() && self.wal.is_empty() {
            return Ok(());
        }
        self.apply_pending(Durability::Immediate)?;
        self.wal.reset();
        Ok(())
    }

    fn apply_pending(&mut self, durability: Durability) -> Result<(), redb::Error> {
        catch_redb_panic(|| {
            let mut transaction = self.database.begin_write()?;
            transaction.set_durability(durability)?;
            // With it, a damaged commit is detected instead of silently rolled back.
            transaction.set_two_phase_commit(true);
            tables::write_entries(&transaction, std::mem::take(&mut self.pending))?;
            tables::set_checkpoint(&transaction, self.wal.number())?;
            Ok(transaction.commit()?)
        })
    }

    /// Returns the state on disk. It does not sync: changes that are not durable in the tables stay in the log.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot, redb::Error> {
        if !self.pending.is_empty() {
            self.apply_pending(Durability::None)?;
        }
        Snapshot::of(&self.database)
    }
}

fn io_kind(error: &redb::Error) -> Option<io::ErrorKind> {
    match error {
        redb::Error::Io(error) => Some(error.kind()),
        _ => None,
    }
}

/// Returns the reason for an error, without redb's own prefix for I/O errors.
pub(crate) fn disk_reason(error: &redb::Error) -> String {
    match error {
        redb::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}
