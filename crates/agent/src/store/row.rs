//! One change of a value in the database, and the table entries that it consists of.

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::dra::claims::Claim;
use devlet_core::shield::Lease;
use devlet_core::{ClaimUid, LeaseName, Pod, PodUid, ResourceName};
use prost::Message as _;

use super::claim_record;
use super::cluster_record::ClusterRecord;
use super::contest::Contest;
use super::kubelet_file::{BlockedBy, Hash, KubeletFile, PendingFile};
use super::lease_record;
use super::mirror_hashes::MirrorUpdate;
use super::node_id::Progress;
use super::record::{self, BlockedRecord, EntryRecord, ResourceRecord, TableRecord};
use super::tables::{BOOT_ID_KEY, CLUSTER_KEY, NODE_ID_KEY, STARTS_KEY, STOP_KEY};

/// A value to write; `None` removes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    Pod(PodUid, Option<Vec<u8>>),
    Claim(ClaimUid, Option<Vec<u8>>),
    Lease(LeaseName, Option<Vec<u8>>),
    /// The devices of a resource.
    List(ResourceName, Option<Vec<u8>>),
    Resource(ResourceName, Option<ResourceRecord>),
    /// A reason why no pod is admitted.
    Blocked(BlockedBy, Option<BlockedRecord>),
    BootId(String),
    Cluster(ClusterRecord),
    NodeId(String),
    Progress(Progress),
    Mirror(KubeletFile, MirrorUpdate),
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

    pub(crate) fn list(name: &ResourceName, list: &DeviceList) -> Self {
        Self::List(name.clone(), Some(lease_record::encode_list(list)))
    }

    pub(crate) fn lease(lease: &Lease) -> Self {
        Self::Lease(lease.name.clone(), Some(lease_record::encode(lease)))
    }

    /// Returns the table entries that it changes.
    pub(super) fn entries(&self) -> Vec<EntryRecord> {
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
            Self::Lease(name, record) => {
                vec![entry(
                    TableRecord::Leases,
                    name.as_str().as_bytes(),
                    record.clone(),
                )]
            }
            Self::List(name, record) => {
                vec![entry(
                    TableRecord::Lists,
                    name.as_str().as_bytes(),
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
            Self::Cluster(cluster) => {
                let record = Some(cluster.encode_to_vec());
                vec![entry(TableRecord::Meta, CLUSTER_KEY.as_bytes(), record)]
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
