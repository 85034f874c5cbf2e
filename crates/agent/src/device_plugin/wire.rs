//! Between the wire and the core: device lists.

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::Device;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use prost::Message as _;
use prost::bytes::Bytes;

use super::client::ListError;
use crate::grpc::fields::{Damage, Fields};
use crate::limits::portions::Portions;
use crate::limits::{Limit, Limits, shortened};

/// What a device takes besides its id and nodes, roughly: a place in the list, and the allocations around it.
const DEVICE_BYTES: usize = 96;

/// The field of the devices in a list, in every version, and the only one.
const DEVICES: u32 = 1;

/// The devices of a list within bounds, and how much memory they take, roughly. `device` decodes one.
pub(super) fn devices(
    list: Bytes,
    device: impl Fn(Bytes) -> Result<Device, Damage>,
    limits: &Limits,
    portions: &mut Portions,
) -> Result<(Vec<Device>, usize), ListError> {
    let mut count = 0;
    for entry in Fields::of(list.clone(), DEVICES) {
        count += usize::from(entry?.0 == DEVICES);
        portions.step();
    }
    Limit::DEVICES_PER_RESOURCE.check(count, limits.devices_per_resource, || {
        format!("the list has {count} devices")
    })?;
    let (mut devices, mut memory) = (Vec::with_capacity(count), 0);
    for entry in Fields::of(list, DEVICES) {
        let (DEVICES, entry) = entry? else {
            continue;
        };
        let device = device(entry)?;
        let id = device.id.as_str();
        Limit::ID_BYTES.check(id.len(), limits.id_bytes, || {
            format!("the id {} has {} bytes", shortened(id), id.len())
        })?;
        memory += DEVICE_BYTES + id.len() + device.nodes.len() * size_of::<i64>();
        devices.push(device);
        portions.step();
    }
    Ok((devices, memory))
}

/// A device of `ListAndWatch`.
pub(super) fn device(entry: Bytes) -> Result<Device, Damage> {
    let device = v1beta1::Device::decode(entry)?;
    Ok(Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1beta1::HEALTHY,
        nodes: device
            .topology
            .into_iter()
            .flat_map(|each| each.nodes)
            .map(|node| node.id)
            .collect(),
    })
}

/// The same from a plugin of 2017, which knows nothing of topology.
pub(super) fn device_2017(entry: Bytes) -> Result<Device, Damage> {
    let device = v1alpha2::Device::decode(entry)?;
    Ok(Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1alpha2::HEALTHY,
        nodes: Vec::new(),
    })
}
