//! Records of leases, and of the devices that plugins listed last.

use std::collections::BTreeMap;

use devlet_core::Moment;
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::shield::{ContainerProcess, Lease, LeaseHolder};
use prost::Message as _;

use super::answer::recorded;
use super::record::InvalidRecord;

/// A lease; its name is the key.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LeaseRecord {
    #[prost(string, tag = "1")]
    pub(crate) resource: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) devices: Vec<String>,
    /// The plugin's answer; none before the plugin was called.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub(crate) answer: Option<Vec<u8>>,
    #[prost(uint64, tag = "4")]
    pub(crate) granted_at: u64,
    #[prost(bool, tag = "5")]
    pub(crate) is_direct: bool,
    /// Containers that may run, by the runtime's ID.
    #[prost(btree_map = "string, message", tag = "6")]
    pub(crate) containers: BTreeMap<String, ProcessRecord>,
    #[prost(bool, tag = "7")]
    pub(crate) pre_start_required: bool,
    /// The pod and the container that have it; none while they are unknown.
    #[prost(message, optional, tag = "8")]
    pub(crate) holder: Option<HolderRecord>,
    /// Containers may run that devlet did not see start.
    #[prost(bool, tag = "9")]
    pub(crate) is_unwitnessed: bool,
}

/// The container that has a lease.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct HolderRecord {
    #[prost(string, tag = "1")]
    pub(crate) pod: String,
    #[prost(string, tag = "2")]
    pub(crate) container: String,
}

/// The first process of a container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct ProcessRecord {
    #[prost(uint32, tag = "1")]
    pub(crate) pid: u32,
    /// In clock ticks since the boot.
    #[prost(uint64, tag = "2")]
    pub(crate) started: u64,
    /// The directory of its control group.
    #[prost(string, optional, tag = "3")]
    pub(crate) cgroup: Option<String>,
    #[prost(uint64, tag = "4")]
    pub(crate) pid_namespace: u64,
}

/// The devices of a resource; its name is the key.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListRecord {
    #[prost(message, repeated, tag = "1")]
    pub(crate) devices: Vec<DeviceRecord>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DeviceRecord {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(bool, tag = "2")]
    pub(crate) healthy: bool,
    #[prost(int64, repeated, tag = "3")]
    pub(crate) nodes: Vec<i64>,
}

pub(crate) fn encode_list(list: &DeviceList) -> Vec<u8> {
    let device = |device: &Device| DeviceRecord {
        id: device.id.as_str().into(),
        healthy: device.healthy,
        nodes: device.nodes.clone(),
    };
    let devices = list.devices().iter().map(device).collect();
    ListRecord { devices }.encode_to_vec()
}

pub(crate) fn decode_list(bytes: &[u8]) -> Result<DeviceList, InvalidRecord> {
    let record = ListRecord::decode(bytes)?;
    let device = |record: DeviceRecord| Device {
        id: record.id.into(),
        healthy: record.healthy,
        nodes: record.nodes,
    };
    let devices = record.devices.into_iter().map(device).collect();
    Ok(DeviceList::new(devices).0)
}

pub(crate) fn encode(lease: &Lease) -> Vec<u8> {
    let containers = lease.containers.iter();
    let containers = containers.map(|(id, process)| {
        let process = ProcessRecord {
            pid: process.pid,
            started: process.started,
            pid_namespace: process.pid_namespace,
            cgroup: process.cgroup.clone(),
        };
        (id.clone(), process)
    });
    let record = LeaseRecord {
        resource: lease.resource.as_str().into(),
        devices: lease.devices.iter().map(|id| id.as_str().into()).collect(),
        answer: lease.answer.as_ref().map(|answer| answer.raw.to_vec()),
        granted_at: lease.granted_at.0,
        is_direct: lease.is_direct,
        containers: containers.collect(),
        pre_start_required: lease.pre_start_required,
        holder: lease.holder.as_ref().map(|holder| HolderRecord {
            pod: holder.pod.to_string(),
            container: holder.container.to_string(),
        }),
        is_unwitnessed: !lease.is_witnessed,
    };
    record.encode_to_vec()
}

pub(crate) fn decode(name: &str, bytes: &[u8]) -> Result<Lease, InvalidRecord> {
    let record = LeaseRecord::decode(bytes)?;
    let containers = record.containers.into_iter();
    let containers = containers.map(|(id, process)| {
        let process = ContainerProcess {
            pid: process.pid,
            started: process.started,
            pid_namespace: process.pid_namespace,
            cgroup: process.cgroup,
        };
        (id, process)
    });
    Ok(Lease {
        name: name.into(),
        resource: record.resource.into(),
        devices: record.devices.into_iter().map(Into::into).collect(),
        answer: record.answer.map(recorded),
        granted_at: Moment(record.granted_at),
        is_direct: record.is_direct,
        containers: containers.collect(),
        pre_start_required: record.pre_start_required,
        holder: record.holder.map(|holder| LeaseHolder {
            pod: holder.pod.into(),
            container: holder.container.into(),
        }),
        is_witnessed: !record.is_unwitnessed && !record.is_direct,
    })
}
