//! The database: tables, schema, and how a file of it comes to be.
//!
//! | table | key | value |
//! | --- | --- | --- |
//! | `meta` | `schema` | version of everything below, 4 bytes, little endian |
//! | | `boot-id` | text |
//! | | `node-id` | text: the node that the database belongs to (`node_id.rs`) |
//! | | `starts` | how often devlet was started with it, 8 bytes, little endian |
//! | | `stop` | text: random id of the last clean stop, until the next start |
//! | | `blocked-database`; `blocked`, `blocked-claims`, and both followed by `.1`, `.2` and so on | [`BlockedRecord`], until an operator decides |
//! | | `contested`, `contested-claims`, and both followed by `.1`, `.2` and so on | [`ContestedRecord`], until an operator chooses |
//! | | `foreign`, `foreign-claims` | SHA-256 of a kubelet's file that another process wrote while devlet ran, until that file is gone |
//! | | `checkpoint` | number of the last record of the write-ahead log that is in here, 8 bytes, little endian |
//! | `pods` | UID | [`PodRecord`] |
//! | `claims` | UID | [`ClaimRecord`] |
//! | `resources` | name | [`ResourceRecord`] |
//! | `mirrors`, `claim-mirrors` | count | SHA-256 of the kubelet's file that is in place, written by us or taken in, and of the one that is to replace it |
//!
//! A change is first written to the write-ahead log in front of the database (`wal.rs`). A checkpoint copies the log into
//! the tables when the log is full or a snapshot is asked for.
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
use super::contest::Contest;
use super::files::{self, Identity};
use super::node_id::{NotWritten, Progress};
use super::record::{
    self, BlockedRecord, ContestedRecord, EntryRecord, InvalidRecord, Names, PodRecord, ResourceRecord,
    TableRecord, WalRecord,
};
use super::state_file::{self, StateFileError};
use super::wal::{self, Wal, WalError};
use super::writer::WriteError;
use crate::metrics::statistics::Counters;

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const PODS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pods");
const CLAIMS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("claims");
const RESOURCES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("resources");
const MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("mirrors");

const CLAIM_MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("claim-mirrors");

/// So many records are worth a thread.
const MANY: usize = 1_000;

/// Room in the log below which a checkpoint is due: more bytes than most changes have.
const LOW_ROOM: usize = 64 << 10;

const SCHEMA_KEY: &str = "schema";
const BOOT_ID_KEY: &str = "boot-id";
const NODE_ID_KEY: &str = "node-id";
const STARTS_KEY: &str = "starts";
const STOP_KEY: &str = "stop";
const CHECKPOINT_KEY: &str = "checkpoint";
const BLOCKED_DATABASE_KEY: &str = "blocked-database";

/// The version of the tables and their records.
pub(crate) const SCHEMA: u32 = 1;

/// Memory for pages; a node's whole state fits.
const CACHE_BYTES: usize = 8 << 20;

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

    fn contested_key(self) -> &'static str {
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

    fn foreign_key(self) -> &'static str {
        match self {
            Self::Devices => "foreign",
            Self::Claims => "foreign-claims",
        }
    }
}

/// A kubelet's file that an operator has to decide about, by its number among those of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PendingFile {
    pub(crate) kind: KubeletFile,
    pub(crate) number: u32,
}

impl PendingFile {
    /// The number behind those of `known`.
    pub(crate) fn next(kind: KubeletFile, known: impl Iterator<Item = Self>) -> Self {
        let numbers = known.filter(|each| each.kind == kind).map(|each| each.number);
        let number = numbers.max().map_or(0, |last| last.saturating_add(1));
        Self { kind, number }
    }

    /// The key of its record; `key` is that of the first of its kind.
    fn key(self, key: impl Fn(KubeletFile) -> &'static str) -> String {
        match self.number {
            0 => key(self.kind).to_owned(),
            number => format!("{}.{number}", key(self.kind)),
        }
    }

    fn of_key(text: &str, key: impl Fn(KubeletFile) -> &'static str) -> Option<Self> {
        let (first, number) = match text.split_once('.') {
            Some((first, number)) => (first, number.parse().ok()?),
            None => (text, 0),
        };
        let kind = KubeletFile::ALL.into_iter().find(|kind| key(*kind) == first)?;
        Some(Self { kind, number })
    }
}

/// The state because of which no pod is admitted. Each has its own record, and its own way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlockedBy {
    /// A lost or unreadable database.
    Database,
    /// A kubelet's file that could not be read.
    File(PendingFile),
}

impl BlockedBy {
    /// The kind of the kubelet's file.
    pub(crate) fn kind(self) -> Option<KubeletFile> {
        match self {
            Self::Database => None,
            Self::File(file) => Some(file.kind),
        }
    }

    fn key(self) -> String {
        match self {
            Self::Database => BLOCKED_DATABASE_KEY.to_owned(),
            Self::File(file) => file.key(KubeletFile::blocked_key),
        }
    }

    fn of_key(key: &str) -> Option<Self> {
        match key {
            BLOCKED_DATABASE_KEY => Some(Self::Database),
            key => PendingFile::of_key(key, KubeletFile::blocked_key).map(Self::File),
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
    /// Why no pod is admitted.
    Blocked(BlockedBy, Option<BlockedRecord>),
    BootId(String),
    NodeId(String),
    Progress(Progress),
    Mirror(KubeletFile, Mirror),
    /// A file that disagrees with the record.
    Contested(PendingFile, Option<Contest>),
    /// A file that another process wrote while devlet ran.
    Foreign(KubeletFile, Option<Hash>),
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
            Self::Blocked(by, blocked) => {
                let record = blocked.as_ref().map(prost::Message::encode_to_vec);
                vec![entry(TableRecord::Meta, by.key().as_bytes(), record)]
            }
            Self::BootId(id) => {
                let id = Some(id.clone().into_bytes());
                vec![entry(TableRecord::Meta, BOOT_ID_KEY.as_bytes(), id)]
            }
            Self::NodeId(id) => {
                let id = Some(id.clone().into_bytes());
                vec![entry(TableRecord::Meta, NODE_ID_KEY.as_bytes(), id)]
            }
            Self::Progress(progress) => {
                let starts = Some(progress.starts.to_le_bytes().to_vec());
                let stop = progress.stop.clone().map(String::into_bytes);
                vec![
                    entry(TableRecord::Meta, STARTS_KEY.as_bytes(), starts),
                    entry(TableRecord::Meta, STOP_KEY.as_bytes(), stop),
                ]
            }
            Self::Contested(id, contest) => {
                let record = contest.as_ref().map(|each| each.record().encode_to_vec());
                let key = id.key(KubeletFile::contested_key);
                vec![entry(TableRecord::Meta, key.as_bytes(), record)]
            }
            Self::Foreign(file, hash) => {
                let hash = hash.map(|hash| hash.to_vec());
                vec![entry(TableRecord::Meta, file.foreign_key().as_bytes(), hash)]
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
    pub(crate) node_id: Option<String>,
    pub(crate) progress: Progress,
    pub(crate) blocked: BTreeMap<BlockedBy, BlockedRecord>,
    pub(crate) contested: BTreeMap<PendingFile, Contest>,
    pub(crate) foreign: BTreeMap<KubeletFile, Hash>,
    pub(crate) resources: BTreeMap<ResourceName, ResourceRecord>,
    pub(crate) mirrors: BTreeMap<KubeletFile, Mirrors>,
}

impl Surroundings {
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        rows.extend(self.boot_id.clone().map(Row::BootId));
        rows.extend(self.node_id.clone().map(Row::NodeId));
        rows.push(Row::Progress(self.progress.clone()));
        let contested = self.contested.iter();
        rows.extend(contested.map(|(&id, contest)| Row::Contested(id, Some(contest.clone()))));
        let foreign = self.foreign.iter();
        rows.extend(foreign.map(|(&file, &hash)| Row::Foreign(file, Some(hash))));
        let blocked = self.blocked.iter();
        rows.extend(blocked.map(|(&by, record)| Row::Blocked(by, Some(record.clone()))));
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
            Row::Blocked(by, record) => put(&mut self.blocked, *by, record.clone()),
            Row::BootId(id) => self.boot_id = Some(id.clone()),
            Row::NodeId(id) => self.node_id = Some(id.clone()),
            Row::Progress(progress) => self.progress = progress.clone(),
            Row::Contested(id, contest) => put(&mut self.contested, *id, contest.clone()),
            Row::Foreign(file, hash) => put(&mut self.foreign, *file, *hash),
            Row::Mirror(file, mirror) => {
                let mirrors = self.mirrors.entry(*file).or_default();
                mirrors.0.insert(mirror.number, mirror.hash);
                for number in &mirror.forget {
                    mirrors.0.remove(number);
                }
            }
        }
    }

    /// Follows a value of the table `meta`.
    fn follow_meta(&mut self, key: &str, value: Option<&[u8]>) -> Result<(), InvalidRecord> {
        if key == BOOT_ID_KEY {
            self.boot_id = value.map(text);
        } else if key == NODE_ID_KEY {
            self.node_id = value.map(text);
        } else if key == STARTS_KEY {
            let starts = value.map(array).transpose()?;
            self.progress.starts = starts.map_or(0, u64::from_le_bytes);
        } else if key == STOP_KEY {
            self.progress.stop = value.map(text);
        } else if let Some(by) = BlockedBy::of_key(key) {
            let record = value.map(BlockedRecord::decode).transpose()?;
            put(&mut self.blocked, by, record);
        } else if let Some(id) = PendingFile::of_key(key, KubeletFile::contested_key) {
            let contest = value.map(|bytes| Contest::try_from(ContestedRecord::decode(bytes)?));
            put(&mut self.contested, id, contest.transpose()?);
        } else if let Some(file) = KubeletFile::ALL
            .into_iter()
            .find(|file| key == file.foreign_key())
        {
            put(&mut self.foreign, file, value.map(array).transpose()?);
        } else {
            return Err(InvalidRecord::Entry);
        }
        Ok(())
    }

    /// The place of a further record about a kubelet's file that cannot be read.
    pub(crate) fn next_blocked(&self, kind: KubeletFile) -> BlockedBy {
        let known = self.blocked.keys().filter_map(|by| match by {
            BlockedBy::Database => None,
            BlockedBy::File(file) => Some(*file),
        });
        BlockedBy::File(PendingFile::next(kind, known))
    }

    /// Whether no pod is admitted because a database is lost or unreadable.
    pub(crate) fn is_blocked_by_database(&self) -> bool {
        self.blocked.values().any(|record| record.is_database)
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

    /// Applies changes that are in the write-ahead log only.
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
                TableRecord::Meta => self.around.follow_meta(text()?, value)?,
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

fn text(bytes: &[u8]) -> String {
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

/// What was found in a file.
pub(crate) struct Loaded {
    pub(crate) database: Database,
    pub(crate) contents: Contents,
    /// It had not been closed, or was damaged and could be restored.
    pub(crate) repaired: bool,
}

/// Where a database is and what its bytes go through.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) storage: Storage,
    pub(crate) counters: Arc<Counters>,
    /// Tells a write that a power loss interrupted from damage, see `wal.rs`.
    pub(crate) boot_id: String,
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    database: redb::Database,
    wal: Wal,
    /// Changes that are in the log and not in the tables.
    pending: Vec<EntryRecord>,
    /// Of its file, which is open, so no other gets the same.
    pub(crate) identity: Identity,
}

impl Place {
    /// Opens the database that is there.
    pub(crate) fn open(&self) -> Result<Loaded, LoadError> {
        // The database asserts things about itself that a damaged file may belie.
        let opened = catch_unwind(AssertUnwindSafe(|| self.try_open()));
        opened.unwrap_or_else(|_| Err(LoadError::Unreadable("it contradicts itself".into())))
    }

    fn try_open(&self) -> Result<Loaded, LoadError> {
        let (file, about) = state_file::open(&self.path, true)?.ok_or(LoadError::Absent)?;
        state_file::check_access(&about)?;
        if about.len() == 0 {
            return Err(LoadError::Unreadable("it is empty".into()));
        }
        files::make_private(&file, &about)?;
        let file = self.storage.over(FileBackend::new(file)?, &self.counters);
        Wal::check(&file)?;
        if file.length()? <= wal::LENGTH {
            // redb would take that for a new file, and grow it.
            return Err(LoadError::Unreadable("it ends with its write-ahead log".into()));
        }
        // This locks the file: before it, another process may still write to the log.
        let (database, mut repaired) = verified(Arc::clone(&file), wal::LENGTH)?;
        let checkpoint = last_checkpoint(&database)?;
        let (wal, records) = Wal::open(file, &self.boot_id, checkpoint)?;
        let mut database = Database {
            database,
            wal,
            pending: Vec::new(),
            identity: Identity::of(&about),
        };
        repaired |= !records.is_empty();
        for record in records {
            let record = WalRecord::decode(record.as_slice())?;
            database.pending.extend(record.entries);
        }
        Snapshot::of(&database.database)?.check_schema()?;
        let mut contents = Snapshot::of(&database.database)?.contents()?;
        // No checkpoint: a start needs no space on the disk.
        contents.follow(&database.pending)?;
        Ok(Loaded {
            database,
            contents,
            repaired,
        })
    }

    /// Puts a new database with this content in place of whatever is there.
    pub(crate) fn create(&self, rows: &[Row]) -> Result<Database, redb::Error> {
        let temporary = files::beside(&self.path, ".new");
        let create = || {
            let file = files::create_private(&temporary)?;
            let identity = Identity::of(&file.metadata()?);
            let file = self.storage.over(FileBackend::new(file)?, &self.counters);
            let wal = Wal::create(Arc::clone(&file), &self.boot_id)?;
            let database = Database {
                database: builder().create_with_backend(Behind {
                    file,
                    first: wal::LENGTH,
                })?,
                wal,
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

/// The number of the last record of the log that is in the tables.
fn last_checkpoint(database: &redb::Database) -> Result<u64, LoadError> {
    let snapshot = Snapshot::of(database)?;
    let meta = snapshot.0.open_table(META).map_err(redb::Error::from)?;
    let Some(number) = meta.get(CHECKPOINT_KEY)? else {
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

    /// Counts an id file that could not be written.
    pub(crate) fn not_written(&self, not: &NotWritten) -> WriteError {
        self.counters.failed_writes.fetch_add(1, Ordering::Relaxed);
        WriteError::Disk {
            path: not.path.clone(),
            reason: not.error.to_string(),
            kind: Some(not.error.kind()),
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
        set_schema(&transaction)?;
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
            let record = WalRecord { entries };
            let bytes = record.encode_to_vec();
            let mut is_written = self.wal.append(&bytes)?;
            if !is_written {
                self.checkpoint()?;
                is_written = self.wal.append(&bytes)?;
            }
            self.pending.extend(record.entries);
            // A change that is larger than the log goes into the tables at once.
            if is_written { Ok(()) } else { self.checkpoint() }
        })
    }

    /// Makes a checkpoint if the log is almost full, before a caller has to wait for it, or for a disk that is full.
    pub(crate) fn make_room(&mut self) -> Result<(), redb::Error> {
        if self.wal.room() >= LOW_ROOM {
            return Ok(());
        }
        self.checkpoint()
    }

    /// Copies the log into the tables durably, with one sync, and lets the log start over.
    pub(crate) fn checkpoint(&mut self) -> Result<(), redb::Error> {
        if self.pending.is_empty() && self.wal.is_empty() {
            return Ok(());
        }
        self.apply(Durability::Immediate)?;
        self.wal.reset();
        Ok(())
    }

    fn apply(&mut self, durability: Durability) -> Result<(), redb::Error> {
        guarded(|| {
            let mut transaction = self.database.begin_write()?;
            transaction.set_durability(durability)?;
            // Damage is noticed then, rather than the transaction forgotten.
            transaction.set_two_phase_commit(true);
            write_entries(&transaction, std::mem::take(&mut self.pending))?;
            let number = self.wal.number().to_le_bytes();
            transaction
                .open_table(META)?
                .insert(CHECKPOINT_KEY, &number[..])?;
            Ok(transaction.commit()?)
        })
    }

    /// The state that is on disk now. Without a sync: the log keeps the changes that are on disk nowhere else.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot, redb::Error> {
        if !self.pending.is_empty() {
            self.apply(Durability::None)?;
        }
        Snapshot::of(&self.database)
    }
}

fn set_schema(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(SCHEMA_KEY, &SCHEMA.to_le_bytes()[..])?;
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

    fn check_schema(&self) -> Result<(), LoadError> {
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        let version = meta.get(SCHEMA_KEY)?;
        let Some(version) = version else {
            return Err(LoadError::Unreadable("it has no schema".into()));
        };
        match u32::from_le_bytes(array(version.value())?) {
            SCHEMA => Ok(()),
            found if found > SCHEMA => Err(LoadError::Newer { found, known: SCHEMA }),
            found => Err(LoadError::Unreadable(format!("it has schema {found}"))),
        }
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
        for row in meta.iter()? {
            let (key, value) = row?;
            if ![SCHEMA_KEY, CHECKPOINT_KEY].contains(&key.value()) {
                around.follow_meta(key.value(), Some(value.value()))?;
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
