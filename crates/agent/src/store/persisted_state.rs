//! The content of the database in memory.

use std::collections::BTreeMap;

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::dra::claims::Claim;
use devlet_core::shield::Lease;
use devlet_core::{ClaimUid, LeaseName, Pod, PodUid, ResourceName};
use prost::Message as _;

use super::claim_record::ClaimRecord;
use super::cluster_record::ClusterRecord;
use super::contest::Contest;
use super::kubelet_file::{BlockedBy, Hash, KubeletFile, PendingFile};
use super::lease_record;
use super::load_error::LoadError;
use super::mirror_hashes::{MirrorHashes, MirrorUpdate};
use super::node_id::Progress;
use super::record::{
    BlockedRecord, ContestedRecord, EntryRecord, InvalidRecord, Names, PodRecord, ResourceRecord, TableRecord,
};
use super::row::Row;
use super::tables::{BOOT_ID_KEY, CLUSTER_KEY, NODE_ID_KEY, STARTS_KEY, STOP_KEY};

/// Metadata besides pods and claims. The writer caches it for rebuilding the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeMetadata {
    pub(crate) boot_id: Option<String>,
    pub(crate) cluster: Option<ClusterRecord>,
    pub(crate) node_id: Option<String>,
    pub(crate) progress: Progress,
    pub(crate) blocked: BTreeMap<BlockedBy, BlockedRecord>,
    pub(crate) contested: BTreeMap<PendingFile, Contest>,
    pub(crate) foreign: BTreeMap<KubeletFile, Hash>,
    pub(crate) resources: BTreeMap<ResourceName, ResourceRecord>,
    pub(crate) mirrors: BTreeMap<KubeletFile, MirrorHashes>,
}

impl NodeMetadata {
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        rows.extend(self.boot_id.clone().map(Row::BootId));
        rows.extend(self.cluster.clone().map(Row::Cluster));
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
                Row::Mirror(file, MirrorUpdate { number, hash, forget })
            }));
        }
        rows
    }

    /// Applies a row that has been written.
    pub(crate) fn apply(&mut self, row: &Row) {
        match row {
            Row::Pod(..) | Row::Claim(..) | Row::Lease(..) | Row::List(..) => {}
            Row::Resource(name, Some(record)) => {
                self.resources.insert(name.clone(), record.clone());
            }
            Row::Resource(name, None) => {
                self.resources.remove(name);
            }
            Row::Blocked(by, record) => put(&mut self.blocked, *by, record.clone()),
            Row::BootId(id) => self.boot_id = Some(id.clone()),
            Row::Cluster(cluster) => self.cluster = Some(cluster.clone()),
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

    /// Applies a value of the table `meta`; `None` removes it.
    pub(super) fn apply_meta(&mut self, key: &str, value: Option<&[u8]>) -> Result<(), InvalidRecord> {
        if key == BOOT_ID_KEY {
            self.boot_id = value.map(decode_text);
        } else if key == CLUSTER_KEY {
            self.cluster = value.map(ClusterRecord::decode).transpose()?;
        } else if key == NODE_ID_KEY {
            self.node_id = value.map(decode_text);
        } else if key == STARTS_KEY {
            let starts = value.map(decode_array).transpose()?;
            self.progress.starts = starts.map_or(0, u64::from_le_bytes);
        } else if key == STOP_KEY {
            self.progress.stop = value.map(decode_text);
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
            put(&mut self.foreign, file, value.map(decode_array).transpose()?);
        } else {
            return Err(InvalidRecord::Entry);
        }
        Ok(())
    }

    /// Returns an unused number for a record about an unreadable kubelet's file.
    pub(crate) fn next_blocked(&self, kind: KubeletFile) -> BlockedBy {
        let known = self.blocked.keys().filter_map(|by| match by {
            BlockedBy::Database => None,
            BlockedBy::File(file) => Some(*file),
        });
        BlockedBy::File(PendingFile::next(kind, known))
    }

    /// Returns `true` if no pod is admitted because a database is lost or unreadable.
    pub(crate) fn is_blocked_by_database(&self) -> bool {
        self.blocked.values().any(|record| record.is_database)
    }

    /// Returns the hashes of the files of this kind.
    pub(crate) fn mirrors(&self, file: KubeletFile) -> &MirrorHashes {
        static NONE: MirrorHashes = MirrorHashes(BTreeMap::new());
        self.mirrors.get(&file).unwrap_or(&NONE)
    }
}

/// Everything in the database.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct PersistedState {
    pub(crate) pods: BTreeMap<PodUid, Pod>,
    pub(crate) claims: BTreeMap<ClaimUid, Claim>,
    pub(crate) leases: BTreeMap<LeaseName, Lease>,
    pub(crate) lists: BTreeMap<ResourceName, DeviceList>,
    pub(crate) metadata: NodeMetadata,
}

impl PersistedState {
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = self.metadata.rows();
        rows.extend(self.claims.values().map(Row::claim));
        rows.extend(self.leases.values().map(Row::lease));
        rows.extend(self.lists.iter().map(|(name, list)| Row::list(name, list)));
        rows.extend(self.pods.values().map(Row::pod));
        rows
    }

    /// Applies entries of the write-ahead log that are not in the tables.
    pub(super) fn apply(&mut self, entries: &[EntryRecord]) -> Result<(), LoadError> {
        // Of several entries for one key, the last one counts.
        let last: BTreeMap<(i32, &[u8]), Option<&[u8]>> = entries
            .iter()
            .map(|entry| ((entry.table, &*entry.key), entry.value.as_deref()))
            .collect();
        let mut names = Names::default();
        for ((table, key), value) in last {
            let key_text = || str::from_utf8(key).map_err(|_| InvalidRecord::Entry);
            match TableRecord::try_from(table).map_err(|_| InvalidRecord::Entry)? {
                TableRecord::Pods => {
                    let pod = value
                        .map(|bytes| decode_pod(&mut names, key_text()?, bytes))
                        .transpose()?;
                    put(&mut self.pods, key_text()?.into(), pod);
                }
                TableRecord::Claims => {
                    let claim = value.map(|bytes| decode_claim(key_text()?, bytes)).transpose()?;
                    put(&mut self.claims, key_text()?.into(), claim);
                }
                TableRecord::Leases => {
                    let lease = value
                        .map(|bytes| lease_record::decode(key_text()?, bytes))
                        .transpose()?;
                    put(&mut self.leases, key_text()?.into(), lease);
                }
                TableRecord::Lists => {
                    let list = value.map(lease_record::decode_list).transpose()?;
                    put(&mut self.lists, key_text()?.into(), list);
                }
                TableRecord::Resources => {
                    let record = value.map(ResourceRecord::decode).transpose()?;
                    put(&mut self.metadata.resources, key_text()?.into(), record);
                }
                TableRecord::Meta => self.metadata.apply_meta(key_text()?, value)?,
                table @ (TableRecord::Mirrors | TableRecord::ClaimMirrors) => {
                    let mut files = KubeletFile::ALL.into_iter();
                    let file = files.find(|file| file.mirrors_record() == table);
                    let mirrors = self
                        .metadata
                        .mirrors
                        .entry(file.ok_or(InvalidRecord::Entry)?)
                        .or_default();
                    let hash = value.map(decode_array).transpose()?;
                    put(&mut mirrors.0, u64::from_le_bytes(decode_array(key)?), hash);
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

pub(super) fn decode_pod(names: &mut Names, uid: &str, bytes: &[u8]) -> Result<Pod, InvalidRecord> {
    PodRecord::decode_from(bytes)?.into_pod(uid, names)
}

pub(super) fn decode_claim(uid: &str, bytes: &[u8]) -> Result<Claim, InvalidRecord> {
    ClaimRecord::decode_from(bytes)?.into_claim(uid)
}

fn decode_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(super) fn decode_array<const LENGTH: usize>(bytes: &[u8]) -> Result<[u8; LENGTH], InvalidRecord> {
    bytes.try_into().map_err(|_| InvalidRecord::Length(bytes.len()))
}
