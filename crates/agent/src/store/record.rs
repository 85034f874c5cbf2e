//! Records: the values of the database.
//!
//! Every value is a protobuf message, so that fields can be added: a record without a field has its default. A field that
//! changes the meaning of a record by its absence needs a new schema version instead, because an older devlet would drop
//! it at its next write.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use devlet_core::device_plugin::inventory::LastPlugin;
use devlet_core::{
    Allocation, Blocked, ClaimUse, ContainerKind, ContainerName, DeviceId, Moment, Node, Pod, PodMetadata,
    PodName, PodUid, ResourceName, Source,
};
use prost::Message as _;

use super::answer::recorded;
use super::claim_record::{ClaimUseRecord, PodClaimRecord};
use super::kubelet_file::{BlockedBy, KubeletFile};

/// Why a value does not decode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidRecord {
    #[error("not a valid protobuf message")]
    Malformed,
    #[error("unknown source {0}")]
    Source(i32),
    #[error("unknown kind of container {0}")]
    Kind(i32),
    #[error("unknown state of a claim {0}")]
    State(i32),
    #[error("device {index} of {devices} is on a NUMA node")]
    Index { index: u32, devices: usize },
    #[error("{0} bytes where a number should be")]
    Length(usize),
    #[error("an entry of the write-ahead log is invalid")]
    Entry,
}

impl From<prost::DecodeError> for InvalidRecord {
    fn from(_: prost::DecodeError) -> Self {
        Self::Malformed
    }
}

/// A pod; its UID is the key.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PodRecord {
    #[prost(string, tag = "1")]
    pub(crate) namespace: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(enumeration = "SourceRecord", tag = "3")]
    pub(crate) source: i32,
    #[prost(fixed64, tag = "4")]
    pub(crate) fingerprint: u64,
    #[prost(bool, tag = "5")]
    pub(crate) before_reboot: bool,
    #[prost(message, repeated, tag = "6")]
    pub(crate) allocations: Vec<AllocationRecord>,
    /// Empty if unknown.
    #[prost(string, repeated, tag = "7")]
    pub(crate) containers: Vec<String>,
    #[prost(message, repeated, tag = "8")]
    pub(crate) claims: Vec<PodClaimRecord>,
    #[prost(message, repeated, tag = "9")]
    pub(crate) claim_uses: Vec<ClaimUseRecord>,
    #[prost(btree_map = "string, string", tag = "10")]
    pub(crate) labels: BTreeMap<String, String>,
    /// Milliseconds since the Unix epoch; none if unknown.
    #[prost(uint64, optional, tag = "11")]
    pub(crate) admitted_at: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum SourceRecord {
    Unspecified = 0,
    Api = 1,
    Embedder = 2,
    Imported = 3,
}

/// Devices of one resource that a container holds.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocationRecord {
    #[prost(string, tag = "1")]
    pub(crate) container: String,
    #[prost(enumeration = "KindRecord", tag = "2")]
    pub(crate) kind: i32,
    #[prost(string, tag = "3")]
    pub(crate) resource: String,
    #[prost(string, repeated, tag = "4")]
    pub(crate) devices: Vec<String>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) nodes: Vec<NumaRecord>,
    /// The bytes of the plugin's answer.
    #[prost(bytes = "vec", tag = "6")]
    pub(crate) answer: Vec<u8>,
    #[prost(bool, tag = "7")]
    pub(crate) pre_start_required: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum KindRecord {
    Unknown = 0,
    Init = 1,
    Sidecar = 2,
    App = 3,
}

/// The devices on a NUMA node, by their index in the list of devices.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NumaRecord {
    #[prost(sint64, tag = "1")]
    pub(crate) node: i64,
    #[prost(uint32, repeated, tag = "2")]
    pub(crate) indices: Vec<u32>,
}

/// A known resource; its name is the key.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct ResourceRecord {
    /// Endpoint of its last plugin; empty if there was none.
    #[prost(string, tag = "1")]
    pub(crate) endpoint: String,
    /// When the plugin disconnected, in milliseconds since the Unix epoch; none while it is connected.
    #[prost(uint64, optional, tag = "2")]
    pub(crate) gone_since: Option<u64>,
}

/// A change in the write-ahead log.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct WalRecord {
    /// In the order in which they are applied.
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<EntryRecord>,
}

/// The new value of one key.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct EntryRecord {
    #[prost(enumeration = "TableRecord", tag = "1")]
    pub(crate) table: i32,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) key: Vec<u8>,
    /// None removes the key.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub(crate) value: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum TableRecord {
    Unspecified = 0,
    Meta = 1,
    Pods = 2,
    Resources = 3,
    /// Keys are numbers: 8 bytes, little endian.
    Mirrors = 4,
    Claims = 5,
    /// Keys are numbers: 8 bytes, little endian.
    ClaimMirrors = 6,
    Leases = 7,
    Lists = 8,
}

/// Why no pod is admitted.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct BlockedRecord {
    /// Path of the lost or unreadable state.
    #[prost(string, tag = "1")]
    pub(crate) file: String,
    /// Why it cannot be used.
    #[prost(string, tag = "2")]
    pub(crate) reason: String,
    /// It is a database.
    #[prost(bool, tag = "3")]
    pub(crate) is_database: bool,
    /// It is a database that is lost.
    #[prost(bool, tag = "10")]
    pub(crate) is_lost: bool,
    /// For a database: a kubelet's file about devices has been imported since.
    #[prost(bool, tag = "11")]
    pub(crate) devices_imported: bool,
    /// For a database: a kubelet's file about claims has been imported since.
    #[prost(bool, tag = "12")]
    pub(crate) claims_imported: bool,
}

impl BlockedRecord {
    /// Returns the reason for the node.
    pub(crate) fn blocked(&self, by: BlockedBy) -> Blocked {
        let (file, reason) = (self.file.clone(), self.reason.clone());
        match () {
            () if self.is_database => {
                let files = self.wanted_files().to_owned();
                match self.is_lost {
                    true => Blocked::LostDatabase { file, reason, files },
                    false => Blocked::UnreadableDatabase { file, files },
                }
            }
            () if by.kind() == Some(KubeletFile::Claims) => Blocked::UnreadableClaims { file, reason },
            () => Blocked::UnreadableState { file, reason },
        }
    }

    /// Returns the record about a database after the import of a kubelet's file; `None` if the import ends the block.
    pub(crate) fn after_import(&self, file: KubeletFile) -> Option<Self> {
        let mut after = self.clone();
        match file {
            KubeletFile::Devices => after.devices_imported = true,
            KubeletFile::Claims => after.claims_imported = true,
        }
        (!(after.devices_imported && after.claims_imported)).then_some(after)
    }

    fn wanted_files(&self) -> &'static str {
        match (self.devices_imported, self.claims_imported) {
            (true, _) => "dra_manager_state",
            (false, true) => "kubelet_internal_checkpoint",
            (false, false) => "both kubelet_internal_checkpoint and dra_manager_state",
        }
    }
}

/// A kubelet's file that disagrees with the record, until an operator decides.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct ContestedRecord {
    /// Path of a copy of the file.
    #[prost(string, tag = "1")]
    pub(crate) file: String,
    /// SHA-256 of the file.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) hash: Vec<u8>,
    /// The difference between the file and the record, as text.
    #[prost(string, tag = "3")]
    pub(crate) difference: String,
    /// Pods of the file.
    #[prost(message, repeated, tag = "4")]
    pub(crate) sides: Vec<SidesRecord>,
    /// Pods that devlet does not answer for: those that the file adds or changes, and those with the same devices.
    #[prost(string, repeated, tag = "5")]
    pub(crate) pods: Vec<String>,
}

/// The allocations of a pod of a contested file, each as a [`PodRecord`]; empty if there are none.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct SidesRecord {
    #[prost(string, tag = "1")]
    pub(crate) uid: String,
    /// Without contested files.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) on_record: Vec<u8>,
    /// In the file.
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) in_file: Vec<u8>,
}

/// Interned names, which many records share.
#[derive(Debug, Default)]
pub(crate) struct Names {
    containers: BTreeSet<ContainerName>,
    resources: BTreeSet<ResourceName>,
}

fn intern<N: Ord + Clone + Borrow<str> + From<String>>(known: &mut BTreeSet<N>, name: String) -> N {
    if let Some(name) = known.get(name.as_str()) {
        return name.clone();
    }
    let name = N::from(name);
    known.insert(name.clone());
    name
}

impl PodRecord {
    pub(crate) fn decode_from(bytes: &[u8]) -> Result<Self, InvalidRecord> {
        Ok(Self::decode(bytes)?)
    }

    pub(crate) fn into_pod(self, uid: &str, names: &mut Names) -> Result<Pod, InvalidRecord> {
        let source = match SourceRecord::try_from(self.source) {
            Ok(SourceRecord::Api) => Source::Api,
            Ok(SourceRecord::Embedder) => Source::Embedder,
            Ok(SourceRecord::Imported) => Source::Imported,
            _ => return Err(InvalidRecord::Source(self.source)),
        };
        let containers = self.containers.into_iter();
        let containers = containers
            .map(|name| intern(&mut names.containers, name))
            .collect();
        let mut allocations = Vec::with_capacity(self.allocations.len());
        for allocation in self.allocations {
            allocations.push(allocation.into_allocation(names)?);
        }
        let claims = self.claims.into_iter();
        let claim_uses = self.claim_uses.into_iter().map(|usage| ClaimUse {
            container: intern(&mut names.containers, usage.container),
            claim: usage.claim,
            request: usage.request,
        });
        Ok(Pod {
            uid: uid.into(),
            name: PodName {
                namespace: self.namespace,
                name: self.name,
            },
            source,
            fingerprint: self.fingerprint,
            metadata: PodMetadata {
                labels: self.labels,
                admitted_at: self.admitted_at.map(Moment),
            },
            before_reboot: self.before_reboot,
            containers,
            allocations,
            claims: claims.map(PodClaimRecord::into_claim).collect(),
            claim_uses: claim_uses.collect(),
        })
    }
}

impl From<&Pod> for PodRecord {
    fn from(pod: &Pod) -> Self {
        let source = match pod.source {
            Source::Api => SourceRecord::Api,
            Source::Embedder => SourceRecord::Embedder,
            Source::Imported => SourceRecord::Imported,
        };
        Self {
            namespace: pod.name.namespace.clone(),
            name: pod.name.name.clone(),
            source: source.into(),
            fingerprint: pod.fingerprint,
            labels: pod.metadata.labels.clone(),
            admitted_at: pod.metadata.admitted_at.map(|moment| moment.0),
            before_reboot: pod.before_reboot,
            containers: pod.containers.iter().map(|name| name.as_str().into()).collect(),
            allocations: pod.allocations.iter().map(AllocationRecord::from).collect(),
            claims: pod.claims.iter().map(PodClaimRecord::from).collect(),
            claim_uses: pod.claim_uses.iter().map(ClaimUseRecord::from).collect(),
        }
    }
}

impl AllocationRecord {
    fn into_allocation(self, names: &mut Names) -> Result<Allocation, InvalidRecord> {
        let kind = match KindRecord::try_from(self.kind) {
            Ok(KindRecord::Unknown) => None,
            Ok(KindRecord::Init) => Some(ContainerKind::Init),
            Ok(KindRecord::Sidecar) => Some(ContainerKind::Sidecar),
            Ok(KindRecord::App) => Some(ContainerKind::App),
            Err(_) => return Err(InvalidRecord::Kind(self.kind)),
        };
        let devices: Vec<DeviceId> = self.devices.into_iter().map(DeviceId::from).collect();
        let mut nodes = Vec::with_capacity(self.nodes.len());
        for NumaRecord { node, indices } in self.nodes {
            let device = |index: u32| {
                let device = usize::try_from(index).ok().and_then(|at| devices.get(at));
                device.cloned().ok_or(InvalidRecord::Index {
                    index,
                    devices: devices.len(),
                })
            };
            let mut ids = Vec::with_capacity(indices.len());
            for index in indices {
                ids.push(device(index)?);
            }
            nodes.push((node, ids));
        }
        nodes.sort();
        Ok(Allocation {
            container: intern(&mut names.containers, self.container),
            kind,
            resource: intern(&mut names.resources, self.resource),
            devices,
            nodes,
            answer: recorded(self.answer),
            pre_start_required: self.pre_start_required,
        })
    }

    /// The devices by NUMA node.
    pub(crate) fn devices_by_node(&self) -> BTreeMap<i64, Vec<String>> {
        let ids = |record: &NumaRecord| {
            let ids = record.indices.iter().filter_map(|&index| {
                let index = usize::try_from(index).ok()?;
                self.devices.get(index).cloned()
            });
            (record.node, ids.collect())
        };
        self.nodes.iter().map(ids).collect()
    }
}

impl From<&Allocation> for AllocationRecord {
    fn from(allocation: &Allocation) -> Self {
        let kind = match allocation.kind {
            None => KindRecord::Unknown,
            Some(ContainerKind::Init) => KindRecord::Init,
            Some(ContainerKind::Sidecar) => KindRecord::Sidecar,
            Some(ContainerKind::App) => KindRecord::App,
        };
        // The list is sorted.
        let index = |id: &DeviceId| allocation.devices.binary_search(id).ok()?.try_into().ok();
        let nodes = allocation.nodes.iter().map(|(node, ids)| NumaRecord {
            node: *node,
            indices: ids.iter().filter_map(index).collect(),
        });
        Self {
            container: allocation.container.as_str().into(),
            kind: kind.into(),
            resource: allocation.resource.as_str().into(),
            devices: allocation.devices.iter().map(|id| id.as_str().into()).collect(),
            nodes: nodes.collect(),
            answer: allocation.answer.raw.to_vec(),
            pre_start_required: allocation.pre_start_required,
        }
    }
}

impl ResourceRecord {
    /// Returns the last plugin. One that was connected when the record was written counts as gone since `now`.
    pub(crate) fn last(&self, now: Moment) -> Option<LastPlugin> {
        (!self.endpoint.is_empty()).then(|| LastPlugin {
            endpoint: self.endpoint.clone(),
            gone_since: self.gone_since.map_or(now, Moment),
        })
    }
}

/// Returns every known resource with its current or last plugin.
pub(crate) fn known_resources(node: &Node) -> BTreeMap<ResourceName, ResourceRecord> {
    let mut known: BTreeMap<ResourceName, ResourceRecord> = node
        .known_resources()
        .into_iter()
        .map(|(name, last)| {
            let record = last.map(|last| ResourceRecord {
                endpoint: last.endpoint,
                gone_since: Some(last.gone_since.0),
            });
            (name, record.unwrap_or_default())
        })
        .collect();
    // Oldest first, so that the newest of several plugins is kept.
    for plugin in node.plugins() {
        let record = ResourceRecord {
            endpoint: plugin.endpoint,
            gone_since: None,
        };
        known.insert(plugin.resource, record);
    }
    known
}

/// Returns the key and the record of a pod.
pub(crate) fn encode_pod(pod: &Pod) -> (PodUid, Vec<u8>) {
    (pod.uid.clone(), PodRecord::from(pod).encode_to_vec())
}
