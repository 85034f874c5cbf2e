//! The tables of the database, and how they are read and written.
//!
//! | table | key | value |
//! | --- | --- | --- |
//! | `meta` | `schema` | version of everything below, 4 bytes, little endian |
//! | | `boot-id` | text |
//! | | `cluster` | [`ClusterRecord`](super::cluster_record::ClusterRecord), of an integration with a cluster |
//! | | `node-id` | text: ID of the node (`node_id.rs`) |
//! | | `starts` | number of starts with this database, 8 bytes, little endian |
//! | | `stop` | text: random ID of the last clean stop, removed at the next start |
//! | | `blocked-database`; `blocked`, `blocked-claims`, and both followed by `.1`, `.2` and so on | [`BlockedRecord`](super::record::BlockedRecord), until an operator decides |
//! | | `contested`, `contested-claims`, and both followed by `.1`, `.2` and so on | [`ContestedRecord`](super::record::ContestedRecord), until an operator decides |
//! | | `foreign`, `foreign-claims` | SHA-256 of a kubelet's file that another process wrote while devlet ran, until that file is gone |
//! | | `checkpoint` | number of the last record of the write-ahead log that the tables contain, 8 bytes, little endian |
//! | `pods` | UID | [`PodRecord`] |
//! | `claims` | UID | [`ClaimRecord`](super::claim_record::ClaimRecord) |
//! | `leases` | name | [`LeaseRecord`](super::lease_record::LeaseRecord); absent in a database of an earlier version |
//! | `lists` | resource | [`ListRecord`](super::lease_record::ListRecord); absent in a database of an earlier version |
//! | `resources` | name | [`ResourceRecord`] |
//! | `mirrors`, `claim-mirrors` | count | SHA-256 of the kubelet's file that is in place, written or adopted by devlet, and of its next version |

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::thread;

use devlet_core::dra::claims::Claim;
use devlet_core::shield::Lease;
use devlet_core::{ClaimUid, LeaseName};
use prost::Message as _;
use redb::{
    AccessGuard, ReadTransaction, ReadableDatabase as _, ReadableTable as _, ReadableTableMetadata as _,
    StorageError, TableDefinition, TableError, WriteTransaction,
};

use super::kubelet_file::KubeletFile;
use super::lease_record;
use super::load_error::LoadError;
use super::persisted_state::{NodeMetadata, PersistedState, decode_array, decode_claim, decode_pod};
use super::record::{EntryRecord, InvalidRecord, Names, PodRecord, ResourceRecord, TableRecord};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const PODS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pods");
const CLAIMS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("claims");
const LEASES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("leases");
const LISTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("lists");
const RESOURCES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("resources");
const MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("mirrors");
const CLAIM_MIRRORS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("claim-mirrors");

/// Records in a table from which two threads read it.
const PARALLEL_READ_MIN: usize = 1_000;

const SCHEMA_KEY: &str = "schema";
pub(super) const BOOT_ID_KEY: &str = "boot-id";
pub(super) const CLUSTER_KEY: &str = "cluster";
pub(super) const NODE_ID_KEY: &str = "node-id";
pub(super) const STARTS_KEY: &str = "starts";
pub(super) const STOP_KEY: &str = "stop";
const CHECKPOINT_KEY: &str = "checkpoint";
pub(super) const BLOCKED_DATABASE_KEY: &str = "blocked-database";

/// The version of the tables and their records.
pub(crate) const SCHEMA: u32 = 1;

impl KubeletFile {
    fn mirrors_table(self) -> TableDefinition<'static, u64, &'static [u8]> {
        match self {
            Self::Devices => MIRRORS,
            Self::Claims => CLAIM_MIRRORS,
        }
    }
}

/// Creates all tables, and sets the schema version.
pub(super) fn create(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(SCHEMA_KEY, &SCHEMA.to_le_bytes()[..])?;
    for table in [PODS, CLAIMS, LEASES, LISTS, RESOURCES] {
        transaction.open_table(table)?;
    }
    for table in [MIRRORS, CLAIM_MIRRORS] {
        transaction.open_table(table)?;
    }
    Ok(())
}

/// Records the number of the last record of the write-ahead log that the tables contain.
pub(super) fn set_checkpoint(transaction: &WriteTransaction, number: u64) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(CHECKPOINT_KEY, &number.to_le_bytes()[..])?;
    Ok(())
}

/// Applies entries of the write-ahead log to the tables.
pub(super) fn write_entries(
    transaction: &WriteTransaction,
    entries: impl IntoIterator<Item = EntryRecord>,
) -> Result<(), redb::Error> {
    // Opened on first use: most changes affect one table.
    let (mut meta, mut pods, mut claims, mut resources) = (None, None, None, None);
    let (mut leases, mut lists) = (None, None);
    let invalid = || redb::Error::Corrupted(InvalidRecord::Entry.to_string());
    for entry in entries {
        let table = TableRecord::try_from(entry.table).map_err(|_| invalid())?;
        let texts = match table {
            TableRecord::Meta => (&mut meta, META),
            TableRecord::Pods => (&mut pods, PODS),
            TableRecord::Claims => (&mut claims, CLAIMS),
            TableRecord::Leases => (&mut leases, LEASES),
            TableRecord::Lists => (&mut lists, LISTS),
            TableRecord::Resources => (&mut resources, RESOURCES),
            TableRecord::Mirrors | TableRecord::ClaimMirrors => {
                let number = entry.key.as_slice().try_into().map_err(|_| invalid())?;
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
            TableRecord::Unspecified => return Err(invalid()),
        };
        let (table, definition) = texts;
        let table = match table {
            Some(table) => table,
            none => none.insert(transaction.open_table(definition)?),
        };
        let key = str::from_utf8(&entry.key).map_err(|_| invalid())?;
        match entry.value {
            Some(value) => table.insert(key, value.as_slice())?,
            None => table.remove(key)?,
        };
    }
    Ok(())
}

/// A consistent view of the tables.
pub(crate) struct Snapshot(ReadTransaction);

impl Snapshot {
    pub(super) fn of(database: &redb::Database) -> Result<Self, redb::Error> {
        Ok(Self(database.begin_read()?))
    }

    pub(super) fn check_schema(&self) -> Result<(), LoadError> {
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        let version = meta.get(SCHEMA_KEY)?;
        let Some(version) = version else {
            return Err(LoadError::Unreadable("it does not have a schema version".into()));
        };
        match u32::from_le_bytes(decode_array(version.value())?) {
            SCHEMA => Ok(()),
            found if found > SCHEMA => Err(LoadError::Newer { found, known: SCHEMA }),
            found => Err(LoadError::Unreadable(format!("it has schema {found}"))),
        }
    }

    /// Returns the number of the last record of the write-ahead log that the tables contain.
    pub(super) fn last_checkpoint(&self) -> Result<u64, LoadError> {
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        let Some(number) = meta.get(CHECKPOINT_KEY)? else {
            return Ok(0);
        };
        Ok(u64::from_le_bytes(decode_array(number.value())?))
    }

    /// Calls `each` with the UID and the record of every pod.
    pub(crate) fn pods(&self, mut each: impl FnMut(&str, PodRecord)) -> Result<(), LoadError> {
        let pods = self.0.open_table(PODS).map_err(redb::Error::from)?;
        for pod in pods.iter()? {
            let (uid, bytes) = pod?;
            each(uid.value(), PodRecord::decode_from(bytes.value())?);
        }
        Ok(())
    }

    /// Reads every claim.
    pub(crate) fn claims(&self) -> Result<BTreeMap<ClaimUid, Claim>, LoadError> {
        self.all(CLAIMS, |_, uid, bytes| {
            let claim = decode_claim(uid, bytes)?;
            Ok((claim.uid.clone(), claim))
        })
    }

    /// Reads every lease.
    fn leases(&self) -> Result<BTreeMap<LeaseName, Lease>, LoadError> {
        self.all_if_any(LEASES, |name, bytes| {
            let lease = lease_record::decode(name, bytes)?;
            Ok((lease.name.clone(), lease))
        })
    }

    /// Reads a table that may be absent.
    fn all_if_any<K: Ord, V>(
        &self,
        table: TableDefinition<'_, &'static str, &'static [u8]>,
        decode: impl Fn(&str, &[u8]) -> Result<(K, V), InvalidRecord>,
    ) -> Result<BTreeMap<K, V>, LoadError> {
        let table = match self.0.open_table(table) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(BTreeMap::new()),
            table => table.map_err(redb::Error::from)?,
        };
        let entries = decode_entries(table.iter()?, |_, key, bytes| decode(key, bytes))?;
        Ok(entries.into_iter().collect())
    }

    /// Reads a table. The two halves of a large one are read in parallel.
    fn all<K: Ord + Send, V: Send>(
        &self,
        table: TableDefinition<'_, &'static str, &'static [u8]>,
        decode: impl Fn(&mut Names, &str, &[u8]) -> Result<(K, V), InvalidRecord> + Sync,
    ) -> Result<BTreeMap<K, V>, LoadError> {
        let table = self.0.open_table(table).map_err(redb::Error::from)?;
        let count = usize::try_from(table.len()?).unwrap_or(usize::MAX);
        let all = if count < PARALLEL_READ_MIN {
            decode_entries(table.iter()?, &decode)?
        } else {
            let (first, last) = (count / 2, count - count / 2);
            thread::scope(|scope| {
                let backwards = || decode_entries(table.iter()?.rev().take(last), &decode);
                let beside = thread::Builder::new().spawn_scoped(scope, backwards);
                let mut all = decode_entries(table.iter()?.take(first), &decode)?;
                let mut rest = match beside {
                    Ok(beside) => beside.join().unwrap_or_else(|panic| resume_unwind(panic))?,
                    Err(_) => backwards()?,
                };
                rest.reverse();
                all.append(&mut rest);
                Ok::<_, LoadError>(all)
            })?
        };
        // Sorted already, so the map is built without rebalancing.
        Ok(all.into_iter().collect())
    }

    pub(crate) fn load(&self) -> Result<PersistedState, LoadError> {
        let pods = self.all(PODS, |names, uid, bytes| {
            let pod = decode_pod(names, uid, bytes)?;
            Ok((pod.uid.clone(), pod))
        })?;
        let mut metadata = NodeMetadata::default();
        let meta = self.0.open_table(META).map_err(redb::Error::from)?;
        for row in meta.iter()? {
            let (key, value) = row?;
            if ![SCHEMA_KEY, CHECKPOINT_KEY].contains(&key.value()) {
                metadata.apply_meta(key.value(), Some(value.value()))?;
            }
        }
        let resources = self.0.open_table(RESOURCES).map_err(redb::Error::from)?;
        for resource in resources.iter()? {
            let (name, bytes) = resource?;
            let record = ResourceRecord::decode(bytes.value())?;
            metadata.resources.insert(name.value().into(), record);
        }
        for file in KubeletFile::ALL {
            let mirrors = self
                .0
                .open_table(file.mirrors_table())
                .map_err(redb::Error::from)?;
            for mirror in mirrors.iter()? {
                let (number, hash) = mirror?;
                let of_file = metadata.mirrors.entry(file).or_default();
                of_file.0.insert(number.value(), decode_array(hash.value())?);
            }
        }
        let (claims, leases) = (self.claims()?, self.leases()?);
        let lists = self.all_if_any(LISTS, |name, bytes| {
            Ok((name.into(), lease_record::decode_list(bytes)?))
        })?;
        Ok(PersistedState {
            pods,
            claims,
            leases,
            lists,
            metadata,
        })
    }
}

fn decode_entries<'a, T>(
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
