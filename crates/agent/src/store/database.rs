//! The database: tables, schema, and how a file of it comes to be.
//!
//! | table | key | value |
//! | --- | --- | --- |
//! | `meta` | `schema` | version of everything below, 4 bytes, little endian |
//! | | `boot-id` | text |
//! | | `blocked`, `blocked-claims` | [`BlockedRecord`], while nobody is admitted |
//! | | `journal` | number of the last record of the journal that is in here, 8 bytes, little endian |
//! | `pods` | UID | [`PodRecord`] |
//! | `claims` | UID | [`ClaimRecord`] |
//! | `resources` | name | [`ResourceRecord`] |
//! | `mirrors`, `claim-mirrors` | count | SHA-256 of the kubelet's file that is in place, written by us or taken in, and of the one that is to replace it |
//!
//! What is written goes to the journal first, in front of the database (`journal.rs`), and is taken over when that is
//! full or somebody wants to look. A file of before there was one is made anew when it is opened.
//!
//! A file is created beside its place, filled in one transaction, synced, and renamed: under its own name there
//! is never half a database. After a write that failed the same is done again from memory, because pages that a
//! failed sync has left behind cannot be trusted, however well they read until the next reboot.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use devlet_core::dra::claims::Claim;
use devlet_core::{ClaimUid, Pod, PodUid, ResourceName};
use prost::Message as _;
use redb::backends::FileBackend;
use redb::{
    AccessGuard, DatabaseError, Durability, ReadTransaction, ReadableDatabase as _,
    ReadableTableMetadata as _, StorageError, TableDefinition,
};
use redb::{ReadableTable as _, WriteTransaction};

use super::backend::{Behind, Counted, Storage};
use super::claim_record::{self, ClaimRecord};
use super::files::{self, Identity};
use super::journal::{self, Journal, JournalError};
use super::record::{
    self, BlockedRecord, EntryRecord, InvalidRecord, JournalRecord, Names, PodRecord, ResourceRecord,
    TableRecord,
};
use super::statistics::Counters;
use super::writer::WriteError;

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const PODS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pods");
const CLAIMS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("claims");
const RESOURCES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("resources");
const MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("mirrors");

const CLAIM_MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("claim-mirrors");

/// So many records are worth a thread.
const MANY: usize = 1_000;

/// More bytes than a change usually has.
const USUAL: usize = 64 << 10;

const SCHEMA_KEY: &str = "schema";
const BOOT_ID_KEY: &str = "boot-id";
const BLOCKED_KEY: &str = "blocked";
const BLOCKED_CLAIMS_KEY: &str = "blocked-claims";
const JOURNAL_KEY: &str = "journal";

/// The schema since which there are claims.
pub(crate) const FIRST_WITH_CLAIMS: u32 = 3;

/// Memory for pages; a node's whole state fits.
const CACHE_BYTES: usize = 8 << 20;

/// The steps from each schema to the next; the first is from 1 to 2. The newest schema follows from their number.
const MIGRATIONS: Migrations<'static> = &[pods_name_their_containers, claims_have_records];

/// From 1 to 2: a pod's record has the names of all its containers. A record without them says that they are not
/// known, so none changes.
fn pods_name_their_containers(_: &WriteTransaction) -> Result<(), redb::Error> {
    Ok(())
}

/// From 2 to 3: claims have records, and the records of pods name them.
fn claims_have_records(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(CLAIMS)?;
    transaction.open_table(CLAIM_MIRRORS)?;
    Ok(())
}

type Migration = fn(&WriteTransaction) -> Result<(), redb::Error>;
pub(crate) type Migrations<'a> = &'a [Migration];

/// The schema that a list of migrations leads to.
pub(crate) fn newest(migrations: Migrations<'_>) -> u32 {
    u32::try_from(migrations.len()).map_or(u32::MAX, |steps| steps.saturating_add(1))
}

pub(crate) type Hash = [u8; 32];

/// Which of the kubelet's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KubeletFile {
    /// `kubelet_internal_checkpoint`
    Devices,
    /// `dra_manager_state`
    Claims,
}

impl KubeletFile {
    pub(crate) const ALL: [Self; 2] = [Self::Devices, Self::Claims];

    fn mirrors(self) -> TableDefinition<'static, u64, &'static [u8]> {
        match self {
            Self::Devices => MIRRORS,
            Self::Claims => CLAIM_MIRRORS,
        }
    }

    fn mirrors_record(self) -> TableRecord {
        match self {
            Self::Devices => TableRecord::Mirrors,
            Self::Claims => TableRecord::ClaimMirrors,
        }
    }

    fn blocked_key(self) -> &'static str {
        match self {
            Self::Devices => BLOCKED_KEY,
            Self::Claims => BLOCKED_CLAIMS_KEY,
        }
    }
}

/// A kubelet file that is ours, by its number among all of them, and the numbers of those that are forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirror {
    pub(crate) number: u64,
    pub(crate) hash: Hash,
    pub(crate) forget: Vec<u64>,
}

/// What is known of the kubelet's file as it is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InFile {
    Absent,
    Hash(Hash),
    /// It is one of those that are known, but a crash or a power loss might bring another one of them back.
    Uncertain,
}

/// One value to be written; `None` removes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    Pod(PodUid, Option<Vec<u8>>),
    Claim(ClaimUid, Option<Vec<u8>>),
    Resource(ResourceName, Option<ResourceRecord>),
    /// By the file that cannot be read; a database counts as one about devices.
    Blocked(KubeletFile, Option<BlockedRecord>),
    BootId(String),
    Mirror(KubeletFile, Mirror),
}

impl Row {
    pub(crate) fn pod(pod: &Pod) -> Self {
        let (uid, bytes) = record::encode_pod(pod);
        Self::Pod(uid, Some(bytes))
    }

    pub(crate) fn claim(claim: &Claim) -> Self {
        let (uid, bytes) = claim_record::encode_claim(claim);
        Self::Claim(uid, Some(bytes))
    }

    /// What it changes in the tables.
    fn entries(&self) -> Vec<EntryRecord> {
        let entry = |table: TableRecord, key: &[u8], value: Option<Vec<u8>>| EntryRecord {
            table: table.into(),
            key: key.to_vec(),
            value,
        };
        match self {
            Self::Pod(uid, record) => vec![entry(TableRecord::Pods, uid.as_str().as_bytes(), record.clone())],
            Self::Claim(uid, record) => {
                vec![entry(
                    TableRecord::Claims,
                    uid.as_str().as_bytes(),
                    record.clone(),
                )]
            }
            Self::Resource(name, record) => {
                let record = record.as_ref().map(prost::Message::encode_to_vec);
                vec![entry(TableRecord::Resources, name.as_str().as_bytes(), record)]
            }
            Self::Blocked(file, blocked) => {
                let record = blocked.as_ref().map(prost::Message::encode_to_vec);
                vec![entry(TableRecord::Meta, file.blocked_key().as_bytes(), record)]
            }
            Self::BootId(id) => {
                let id = Some(id.clone().into_bytes());
                vec![entry(TableRecord::Meta, BOOT_ID_KEY.as_bytes(), id)]
            }
            Self::Mirror(file, mirror) => {
                let table = file.mirrors_record();
                let key = |number: u64| number.to_le_bytes();
                let hash = Some(mirror.hash.to_vec());
                let put = entry(table, &key(mirror.number), hash);
                let forget = mirror.forget.iter();
                let forget = forget.map(|&number| entry(table, &key(number), None));
                std::iter::once(put).chain(forget).collect()
            }
        }
    }
}

/// Everything in the database but the pods and claims. Small, so the writer keeps it to be able to write it again.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Surroundings {
    pub(crate) boot_id: Option<String>,
    pub(crate) blocked: BTreeMap<KubeletFile, BlockedRecord>,
    pub(crate) resources: BTreeMap<ResourceName, ResourceRecord>,
    pub(crate) mirrors: BTreeMap<KubeletFile, Mirrors>,
}

impl Surroundings {
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        rows.extend(self.boot_id.clone().map(Row::BootId));
        let blocked = self.blocked.iter();
        rows.extend(blocked.map(|(&file, record)| Row::Blocked(file, Some(record.clone()))));
        let resources = self.resources.iter();
        rows.extend(resources.map(|(name, record)| Row::Resource(name.clone(), Some(record.clone()))));
        for (&file, mirrors) in &self.mirrors {
            rows.extend(mirrors.0.iter().map(|(&number, &hash)| {
                let forget = Vec::new();
                Row::Mirror(file, Mirror { number, hash, forget })
            }));
        }
        rows
    }

    /// Follows what has been written.
    pub(crate) fn follow(&mut self, row: &Row) {
        match row {
            Row::Pod(..) | Row::Claim(..) => {}
            Row::Resource(name, Some(record)) => {
                self.resources.insert(name.clone(), record.clone());
            }
            Row::Resource(name, None) => {
                self.resources.remove(name);
            }
            Row::Blocked(file, Some(record)) => {
                self.blocked.insert(*file, record.clone());
            }
            Row::Blocked(file, None) => {
                self.blocked.remove(file);
            }
            Row::BootId(id) => self.boot_id = Some(id.clone()),
            Row::Mirror(file, mirror) => {
                let mirrors = self.mirrors.entry(*file).or_default();
                mirrors.0.insert(mirror.number, mirror.hash);
                for number in &mirror.forget {
                    mirrors.0.remove(number);
                }
            }
        }
    }

    /// The files of this kind that are ours.
    pub(crate) fn mirrors(&self, file: KubeletFile) -> &Mirrors {
        static NONE: Mirrors = Mirrors(BTreeMap::new());
        self.mirrors.get(&file).unwrap_or(&NONE)
    }
}

/// Hashes of a kubelet's file that are ours, by number.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Mirrors(pub(crate) BTreeMap<u64, Hash>);

impl Mirrors {
    pub(crate) fn knows(&self, hash: &Hash) -> bool {
        self.0.values().any(|known| known == hash)
    }

    /// The record of a file that is about to be written in the place of `in_file`, which stays known until it is
    /// gone. Others are forgotten: a kubelet that writes the same again means it.
    pub(crate) fn next(&self, hash: Hash, in_file: InFile) -> Mirror {
        let last = self.0.last_key_value().map_or(0, |(&number, _)| number);
        let may_come_back = |known: &Hash| in_file == InFile::Uncertain || in_file == InFile::Hash(*known);
        let forget = self.0.iter().filter(|(_, known)| !may_come_back(known));
        Mirror {
            number: last + 1,
            hash,
            forget: forget.map(|(&number, _)| number).collect(),
        }
    }

    /// The record of a file that is in place for good: the others are forgotten. `None`: there are none.
    pub(crate) fn confirmed(&self, hash: &Hash) -> Option<Mirror> {
        let (&number, &hash) = self.0.iter().find(|(_, known)| *known == hash)?;
        let others = self.0.keys().copied().filter(|other| *other != number);
        let forget: Vec<u64> = others.collect();
        (!forget.is_empty()).then_some(Mirror { number, hash, forget })
    }
}

/// Everything in the database.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Contents {
    pub(crate) pods: BTreeMap<PodUid, Pod>,
    pub(crate) claims: BTreeMap<ClaimUid, Claim>,
    pub(crate) around: Surroundings,
}

impl Contents {
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = self.around.rows();
        rows.extend(self.claims.values().map(Row::claim));
        rows.extend(self.pods.values().map(Row::pod));
        rows
    }

    /// Follows what the journal has, and the database does not know.
    fn follow(&mut self, entries: &[EntryRecord]) -> Result<(), LoadError> {
        // Only the last one of each counts.
        let last: BTreeMap<(i32, &[u8]), Option<&[u8]>> = entries
            .iter()
            .map(|entry| ((entry.table, &*entry.key), entry.value.as_deref()))
            .collect();
        let mut names = Names::default();
        for ((table, key), value) in last {
            let text = || str::from_utf8(key).map_err(|_| InvalidRecord::Entry);
            match TableRecord::try_from(table).map_err(|_| InvalidRecord::Entry)? {
                TableRecord::Pods => {
                    let pod = value.map(|bytes| pod(&mut names, text()?, bytes)).transpose()?;
                    put(&mut self.pods, text()?.into(), pod);
                }
                TableRecord::Claims => {
                    let claim = value.map(|bytes| claim(text()?, bytes)).transpose()?;
                    put(&mut self.claims, text()?.into(), claim);
                }
                TableRecord::Resources => {
                    let record = value.map(ResourceRecord::decode).transpose()?;
                    put(&mut self.around.resources, text()?.into(), record);
                }
                TableRecord::Meta if text()? == BOOT_ID_KEY => self.around.boot_id = value.map(boot_id),
                TableRecord::Meta => {
                    let mut files = KubeletFile::ALL.into_iter();
                    let file = files.find(|file| Ok(file.blocked_key()) == text());
                    let record = value.map(BlockedRecord::decode).transpose()?;
                    put(
                        &mut self.around.blocked,
                        file.ok_or(InvalidRecord::Entry)?,
                        record,
                    );
                }
                table @ (TableRecord::Mirrors | TableRecord::ClaimMirrors) => {
                    let mut files = KubeletFile::ALL.into_iter();
                    let file = files.find(|file| file.mirrors_record() == table);
                    let mirrors = self
                        .around
                        .mirrors
                        .entry(file.ok_or(InvalidRecord::Entry)?)
                        .or_default();
                    let hash = value.map(array).transpose()?;
                    put(&mut mirrors.0, u64::from_le_bytes(array(key)?), hash);
                }
                TableRecord::Unspecified => return Err(InvalidRecord::Entry.into()),
            }
        }
        Ok(())
    }
}

fn put<K: Ord, V>(all: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => _ = all.insert(key, value),
        None => _ = all.remove(&key),
    }
}

// ---- what the bytes of a table say

fn pod(names: &mut Names, uid: &str, bytes: &[u8]) -> Result<Pod, InvalidRecord> {
    PodRecord::decode_from(bytes)?.into_pod(uid, names)
}

fn claim(uid: &str, bytes: &[u8]) -> Result<Claim, InvalidRecord> {
    ClaimRecord::decode_from(bytes)?.into_claim(uid)
}

fn boot_id(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn array<const LENGTH: usize>(bytes: &[u8]) -> Result<[u8; LENGTH], InvalidRecord> {
    bytes.try_into().map_err(|_| InvalidRecord::Length(bytes.len()))
}

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
    #[error(transparent)]
    Io(io::Error),
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
            // This is how the database says that a file is none of its own.
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

impl From<JournalError> for LoadError {
    fn from(error: JournalError) -> Self {
        match error {
            JournalError::Io(error) => error.into(),
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

/// What was found in a file.
pub(crate) struct Loaded {
    pub(crate) database: Database,
    pub(crate) contents: Contents,
    /// It had not been closed, or was damaged and could be restored.
    pub(crate) repaired: bool,
    /// The schema that it had before.
    pub(crate) migrated_from: Option<u32>,
}

/// Where a database is and what its bytes go through.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) storage: Storage,
    pub(crate) counters: Arc<Counters>,
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    database: redb::Database,
    journal: Journal,
    /// What the journal has, and the database does not know.
    pending: Vec<EntryRecord>,
    /// Of its file, which is open, so no other gets the same.
    pub(crate) identity: Identity,
}

impl Place {
    /// Opens the database that is there.
    pub(crate) fn open(&self) -> Result<Loaded, LoadError> {
        self.open_with(MIGRATIONS)
    }

    pub(crate) fn open_with(&self, migrations: Migrations<'_>) -> Result<Loaded, LoadError> {
        // The database asserts things about itself that a damaged file may belie.
        let opened = catch_unwind(AssertUnwindSafe(|| self.try_open(migrations)));
        opened.unwrap_or_else(|_| Err(LoadError::Unreadable("it contradicts itself".into())))
    }

    fn try_open(&self, migrations: Migrations<'_>) -> Result<Loaded, LoadError> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&self.path)?;
        let about = file.metadata()?;
        if about.len() == 0 {
            return Err(LoadError::Unreadable("it is empty".into()));
        }
        files::make_private(&self.path)?;
        let file = self.storage.over(FileBackend::new(file)?, &self.counters);
        if !Journal::is_in(&file)? {
            return self.open_without_journal(file, migrations);
        }
        Journal::check(&file)?;
        if file.length()? <= journal::LENGTH {
            // The database would take that for a new file, and grow it.
            return Err(LoadError::Unreadable("it ends with its journal".into()));
        }
        // This locks the file: before it, another process may still write to the journal.
        let (database, mut repaired) = verified(Arc::clone(&file), journal::LENGTH)?;
        let taken_over = taken_over(&database)?;
        let (journal, records) = Journal::open(file)?.read(taken_over)?;
        let mut database = Database {
            database,
            journal,
            pending: Vec::new(),
            identity: Identity::of(&about),
        };
        repaired |= !records.is_empty();
        for record in records {
            let record = JournalRecord::decode(record.as_slice())?;
            database.pending.extend(record.entries);
        }
        let found = Snapshot::of(&database.database)?.schema()?;
        if found < newest(migrations) {
            database.snapshot()?;
        }
        let migrated_from = migrate(&database.database, migrations)?;
        if migrated_from.is_some() {
            // That was for good, and so is what came before it.
            database.journal.begin_anew();
        }
        let mut contents = Snapshot::of(&database.database)?.contents()?;
        // The journal goes on: a start needs no room on the disk, nor does anybody wait for the database.
        contents.follow(&database.pending)?;
        Ok(Loaded {
            database,
            contents,
            repaired,
            migrated_from,
        })
    }

    /// A file of before there was a journal; it gets one.
    fn open_without_journal(
        &self,
        file: Arc<Counted>,
        migrations: Migrations<'_>,
    ) -> Result<Loaded, LoadError> {
        let (old, repaired) = verified(file, 0)?;
        let migrated_from = migrate(&old, migrations)?;
        let contents = Snapshot::of(&old)?.contents()?;
        drop(old);
        Ok(Loaded {
            database: self.create(&contents.rows())?,
            contents,
            repaired,
            migrated_from,
        })
    }

    /// Puts a new database with this content in place of whatever is there.
    pub(crate) fn create(&self, rows: &[Row]) -> Result<Database, redb::Error> {
        let temporary = files::beside(&self.path, ".new");
        let create = || {
            let file = files::create_private(&temporary)?;
            let identity = Identity::of(&file.metadata()?);
            let file = self.storage.over(FileBackend::new(file)?, &self.counters);
            let journal = Journal::create(Arc::clone(&file))?;
            let database = Database {
                database: builder().create_with_backend(Behind {
                    file,
                    first: journal::LENGTH,
                })?,
                journal,
                pending: Vec::new(),
                identity,
            };
            database.initialize(rows)?;
            std::fs::rename(&temporary, &self.path)?;
            files::sync_directory_of(&self.path)?;
            Ok(database)
        };
        let created = guarded(create);
        if created.is_err() {
            // It is rubbish now, and the next attempt removes it in any case.
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

/// A database of which every page has been looked at, and whether it had to be repaired.
fn verified(file: Arc<Counted>, first: u64) -> Result<(redb::Database, bool), LoadError> {
    let repaired = Arc::new(AtomicBool::new(false));
    let mut builder = builder();
    builder.set_repair_callback({
        let repaired = Arc::clone(&repaired);
        move |_| repaired.store(true, Ordering::Relaxed)
    });
    let mut database = builder.create_with_backend(Behind { file, first })?;
    // A repair has verified every page. A file that was closed cleanly has not been looked at.
    if !repaired.load(Ordering::Relaxed) && !database.check_integrity()? {
        repaired.store(true, Ordering::Relaxed);
    }
    let repaired = repaired.load(Ordering::Relaxed);
    Ok((database, repaired))
}

/// Up to which record the database has what is in its journal.
fn taken_over(database: &redb::Database) -> Result<u64, LoadError> {
    let snapshot = Snapshot::of(database)?;
    let meta = snapshot.0.open_table(META).map_err(redb::Error::from)?;
    let Some(number) = meta.get(JOURNAL_KEY)? else {
        return Ok(0);
    };
    Ok(u64::from_le_bytes(array(number.value())?))
}

impl Place {
    /// Counts a write that failed, and says why it did.
    pub(crate) fn failure(&self, error: &redb::Error) -> WriteError {
        self.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: self.path.clone(),
            reason: reason(error),
            kind: io_kind(error),
        }
    }
}

/// The database asserts things about itself; an error of the disk must not end the thread that writes.
fn guarded<T>(action: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, redb::Error> {
    catch_unwind(AssertUnwindSafe(action))
        .unwrap_or_else(|_| Err(redb::Error::Corrupted("the database contradicts itself".into())))
}

impl Database {
    fn initialize(&self, rows: &[Row]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_two_phase_commit(true);
        set_schema(&transaction, newest(MIGRATIONS))?;
        transaction.open_table(PODS)?;
        transaction.open_table(CLAIMS)?;
        transaction.open_table(RESOURCES)?;
        transaction.open_table(MIRRORS)?;
        transaction.open_table(CLAIM_MIRRORS)?;
        write_entries(&transaction, rows.iter().flat_map(Row::entries))?;
        Ok(transaction.commit()?)
    }

    /// Writes all rows or none; they are on disk when this returns.
    pub(crate) fn write<'a>(&mut self, rows: impl IntoIterator<Item = &'a Row>) -> Result<(), redb::Error> {
        let entries = rows.into_iter().flat_map(Row::entries).collect();
        guarded(|| {
            let record = JournalRecord { entries };
            let bytes = record.encode_to_vec();
            let mut is_written = self.journal.append(&bytes)?;
            if !is_written {
                self.take_over()?;
                is_written = self.journal.append(&bytes)?;
            }
            self.pending.extend(record.entries);
            // What is larger than the journal has no other place.
            if is_written { Ok(()) } else { self.take_over() }
        })
    }

    /// Whether there is room in the journal for what a change usually is.
    pub(crate) fn has_room(&self) -> bool {
        self.journal.room() >= USUAL
    }

    /// What is in the journal goes into the database for good, and the journal begins anew: one sync.
    pub(crate) fn take_over(&mut self) -> Result<(), redb::Error> {
        if self.pending.is_empty() && self.journal.is_empty() {
            return Ok(());
        }
        self.apply(Durability::Immediate)?;
        self.journal.begin_anew();
        Ok(())
    }

    fn apply(&mut self, durability: Durability) -> Result<(), redb::Error> {
        guarded(|| {
            let mut transaction = self.database.begin_write()?;
            transaction.set_durability(durability)?;
            // Damage is noticed then, rather than the transaction forgotten.
            transaction.set_two_phase_commit(true);
            write_entries(&transaction, std::mem::take(&mut self.pending))?;
            let number = self.journal.number().to_le_bytes();
            transaction.open_table(META)?.insert(JOURNAL_KEY, &number[..])?;
            Ok(transaction.commit()?)
        })
    }

    /// What is on disk now, whatever is written later. The journal keeps what is on disk nowhere else: no sync.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot, redb::Error> {
        if !self.pending.is_empty() {
            self.apply(Durability::None)?;
        }
        Snapshot::of(&self.database)
    }
}

fn migrate(database: &redb::Database, migrations: Migrations<'_>) -> Result<Option<u32>, LoadError> {
    let found = Snapshot::of(database)?.schema()?;
    let known = newest(migrations);
    if found > known {
        return Err(LoadError::Newer { found, known });
    }
    if found == known {
        return Ok(None);
    }
    let first = usize::try_from(found).ok().and_then(|found| found.checked_sub(1));
    let Some(steps) = first.and_then(|first| migrations.get(first..)) else {
        return Err(LoadError::Unreadable(format!("it has schema {found}")));
    };
    let mut transaction = database.begin_write().map_err(redb::Error::from)?;
    transaction.set_two_phase_commit(true);
    for step in steps {
        step(&transaction)?;
    }
    set_schema(&transaction, known)?;
    transaction.commit().map_err(redb::Error::from)?;
    Ok(Some(found))
}

fn set_schema(transaction: &WriteTransaction, version: u32) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(SCHEMA_KEY, &version.to_le_bytes()[..])?;
    Ok(())
}

fn write_entries(
    transaction: &WriteTransaction,
    entries: impl IntoIterator<Item = EntryRecord>,
) -> Result<(), redb::Error> {
    // Opened when needed: most changes touch one table.
    let (mut meta, mut pods, mut claims, mut resources) = (None, None, None, None);
    let foreign = || redb::Error::Corrupted(InvalidRecord::Entry.to_string());
    for entry in entries {
        let table = TableRecord::try_from(entry.table).map_err(|_| foreign())?;
        let texts = match table {
            TableRecord::Meta => (&mut meta, META),
            TableRecord::Pods => (&mut pods, PODS),
            TableRecord::Claims => (&mut claims, CLAIMS),
            TableRecord::Resources => (&mut resources, RESOURCES),
            TableRecord::Mirrors | TableRecord::ClaimMirrors => {
                let number = entry.key.as_slice().try_into().map_err(|_| foreign())?;
                let number = u64::from_le_bytes(number);
                let mut table = transaction.open_table(match table {
                    TableRecord::ClaimMirrors => CLAIM_MIRRORS,
                    _ => MIRRORS,
                })?;
                match entry.value {
                    Some(hash) => table.insert(number, hash.as_slice())?,
                    None => table.remove(number)?,
                };
                continue;
            }
            TableRecord::Unspecified => return Err(foreign()),
        };
        let (table, definition) = texts;
        let table = match table {
            Some(table) => table,
            none => none.insert(transaction.open_table(definition)?),
        };
        let key = str::from_utf8(&entry.key).map_err(|_| foreign())?;
        match entry.value {
            Some(value) => table.insert(key, value.as_slice())?,
            None => table.remove(key)?,
        };
    }
    Ok(())
}

/// The database at one moment.
pub(crate) struct Snapshot(ReadTransaction);

impl Snapshot {
    fn of(database: &redb::Database) -> Result<Self, redb::Error> {
        Ok(Self(database.begin_read()?))
    }

    fn schema(&self) -> Result<u32, LoadError> {
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        let version = meta.get(SCHEMA_KEY)?;
        let Some(version) = version else {
            return Err(LoadError::Unreadable("it has no schema".into()));
        };
        Ok(u32::from_le_bytes(array(version.value())?))
    }

    /// Every pod's record, by UID.
    pub(crate) fn pods(&self, mut each: impl FnMut(&str, PodRecord)) -> Result<(), LoadError> {
        let pods = self.0.open_table(PODS).map_err(redb::Error::from)?;
        for pod in pods.iter()? {
            let (uid, bytes) = pod?;
            each(uid.value(), PodRecord::decode_from(bytes.value())?);
        }
        Ok(())
    }

    /// Every claim, by UID.
    pub(crate) fn claims(&self) -> Result<BTreeMap<ClaimUid, Claim>, LoadError> {
        self.all(CLAIMS, |_, uid, bytes| {
            let claim = claim(uid, bytes)?;
            Ok((claim.uid.clone(), claim))
        })
    }

    /// All of a table. If there is much, one half is read beside the other.
    fn all<K: Ord + Send, V: Send>(
        &self,
        table: TableDefinition<'_, &'static str, &'static [u8]>,
        decode: impl Fn(&mut Names, &str, &[u8]) -> Result<(K, V), InvalidRecord> + Sync,
    ) -> Result<BTreeMap<K, V>, LoadError> {
        let table = self.0.open_table(table).map_err(redb::Error::from)?;
        let count = usize::try_from(table.len()?).unwrap_or(usize::MAX);
        let all = if count < MANY {
            read(table.iter()?, &decode)?
        } else {
            let (first, last) = (count / 2, count - count / 2);
            thread::scope(|scope| {
                let backwards = || read(table.iter()?.rev().take(last), &decode);
                let beside = thread::Builder::new().spawn_scoped(scope, backwards);
                let mut all = read(table.iter()?.take(first), &decode)?;
                let mut rest = match beside {
                    Ok(beside) => beside.join().unwrap_or_else(|panic| resume_unwind(panic))?,
                    Err(_) => backwards()?,
                };
                rest.reverse();
                all.append(&mut rest);
                Ok::<_, LoadError>(all)
            })?
        };
        // They come in order, so the map is made in one go.
        Ok(all.into_iter().collect())
    }

    pub(crate) fn contents(&self) -> Result<Contents, LoadError> {
        let pods = self.all(PODS, |names, uid, bytes| {
            let pod = pod(names, uid, bytes)?;
            Ok((pod.uid.clone(), pod))
        })?;
        let mut around = Surroundings::default();
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        if let Some(id) = meta.get(BOOT_ID_KEY)? {
            around.boot_id = Some(boot_id(id.value()));
        }
        for file in KubeletFile::ALL {
            if let Some(blocked) = meta.get(file.blocked_key())? {
                around
                    .blocked
                    .insert(file, BlockedRecord::decode(blocked.value())?);
            }
        }
        let resources = self.0.open_table(RESOURCES).map_err(redb::Error::from)?;
        for resource in resources.iter()? {
            let (name, bytes) = resource?;
            let record = ResourceRecord::decode(bytes.value())?;
            around.resources.insert(name.value().into(), record);
        }
        for file in KubeletFile::ALL {
            let mirrors = self.0.open_table(file.mirrors()).map_err(redb::Error::from)?;
            for mirror in mirrors.iter()? {
                let (number, hash) = mirror?;
                let of_file = around.mirrors.entry(file).or_default();
                of_file.0.insert(number.value(), array(hash.value())?);
            }
        }
        let claims = self.claims()?;
        Ok(Contents { pods, claims, around })
    }
}

/// What these entries of a table say.
fn read<'a, T>(
    entries: impl Iterator<
        Item = Result<(AccessGuard<'a, &'static str>, AccessGuard<'a, &'static [u8]>), StorageError>,
    >,
    decode: impl Fn(&mut Names, &str, &[u8]) -> Result<T, InvalidRecord>,
) -> Result<Vec<T>, LoadError> {
    let mut names = Names::default();
    let decoded = entries.map(|entry| {
        let (key, value) = entry?;
        Ok(decode(&mut names, key.value(), value.value())?)
    });
    decoded.collect()
}

/// What a failed write means for those who wait for it.
fn io_kind(error: &redb::Error) -> Option<io::ErrorKind> {
    match error {
        redb::Error::Io(error) => Some(error.kind()),
        _ => None,
    }
}

/// What the disk says, without the words of the database around it.
pub(crate) fn reason(error: &redb::Error) -> String {
    match error {
        redb::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// The schema that this version writes.
pub(crate) fn newest_schema() -> u32 {
    newest(MIGRATIONS)
}
