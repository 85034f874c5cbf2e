//! Decodes device lists from the wire into core types.

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::Device;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use prost::Message as _;
use prost::bytes::Bytes;

use super::client::ListError;
use crate::grpc::fields::{FieldIter, WireError};
use crate::limits::{Limit, Limits, check_name};

/// Maximum length in bytes of a device's entry: its id, health and NUMA nodes.
const MAX_ENTRY_BYTES: usize = 64 << 10;

/// Number of the field with the devices in a list, in every version.
const DEVICES: u32 = 1;

/// Decodes the devices of a list with `device`, and checks them against `limits`. The number and size of the entries are
/// checked first, so that a short message cannot make devlet allocate much memory.
pub(super) fn devices(
    list: Bytes,
    device: impl Fn(Bytes) -> Result<Device, WireError>,
    limits: &Limits,
) -> Result<Vec<Device>, ListError> {
    let mut count = 0;
    for entry in FieldIter::of(list.clone(), DEVICES) {
        let bytes = entry?.1.len();
        count += 1;
        Limit::DEVICES_PER_RESOURCE.check(count, limits.devices_per_resource, || {
            format!("the list has {count} devices or more")
        })?;
        Limit::FIXED.check(bytes, MAX_ENTRY_BYTES, || format!("a device has {bytes} bytes"))?;
    }
    let mut devices = Vec::with_capacity(count);
    for entry in FieldIter::of(list, DEVICES) {
        let (DEVICES, entry) = entry? else {
            continue;
        };
        let device = device(entry)?;
        check_name("the id", device.id.as_str())?;
        devices.push(device);
    }
    Ok(devices)
}

/// Decodes a device of `ListAndWatch`.
pub(super) fn device(entry: Bytes) -> Result<Device, WireError> {
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

/// Decodes a device of a v1alpha2 plugin, which does not have topology.
pub(super) fn device_v1alpha2(entry: Bytes) -> Result<Device, WireError> {
    let device = v1alpha2::Device::decode(entry)?;
    Ok(Device {
        id: DeviceId::from(device.id),
        healthy: device.health == v1alpha2::HEALTHY,
        nodes: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(list: Bytes, limits: &Limits) -> Result<Vec<Device>, ListError> {
        devices(list, device, limits)
    }

    fn list(devices: Vec<v1beta1::Device>) -> Vec<u8> {
        v1beta1::ListAndWatchResponse { devices }.encode_to_vec()
    }

    fn named(id: &str, nodes: &[i64]) -> v1beta1::Device {
        let node = |id: &i64| v1beta1::NumaNode { id: *id };
        let nodes = nodes.iter().map(node).collect();
        v1beta1::Device {
            id: id.to_owned(),
            health: v1beta1::HEALTHY.to_owned(),
            topology: Some(v1beta1::TopologyInfo { nodes }),
        }
    }

    #[test]
    fn entries_decode_as_in_the_whole_message_even_if_damaged() {
        let bytes = list(vec![named("a", &[0, -5]), named("", &[]), named("b", &[64])]);
        let damaged = (0..bytes.len()).flat_map(|place| {
            let bytes = &bytes;
            let cut = std::iter::once(bytes[..place].to_vec());
            cut.chain((0..8).map(move |bit| {
                let mut damaged = bytes.clone();
                damaged[place] ^= 1 << bit;
                damaged
            }))
        });
        let mut rejected = 0;
        for bytes in damaged.chain([bytes.clone()]) {
            let whole = v1beta1::ListAndWatchResponse::decode(&*bytes);
            let wanted = whole.ok().map(|whole| {
                let entry = |each: &v1beta1::Device| device(each.encode_to_vec().into()).unwrap();
                whole.devices.iter().map(entry).collect::<Vec<_>>()
            });
            rejected += usize::from(wanted.is_none());
            let found = all(bytes.clone().into(), &Limits::default());
            assert_eq!(found.ok(), wanted, "{bytes:?}");
        }
        assert!(rejected > 100, "{rejected}");
    }

    #[test]
    fn a_list_over_a_limit_is_rejected_before_it_is_decoded() {
        let limits = Limits {
            devices_per_resource: 2,
            ..Limits::default()
        };
        let over_limit = [
            (
                list(vec![named("a", &[]); 3]),
                "the list has 3 devices or more, limits.devicesPerResource allows 2",
            ),
            // Unknown fields that are numbers.
            (
                vec![0x10, 1, 0x10, 2, 0x10, 3],
                "the list has 3 devices or more, limits.devicesPerResource allows 2",
            ),
            (
                list(vec![named("a", &[0; 40_000])]),
                "a device has 80016 bytes, devlet allows 65536",
            ),
            (
                list(vec![named(&"x".repeat(1025), &[])]),
                &format!(
                    "the id \"{}\"… has 1025 bytes, devlet allows 1024",
                    "x".repeat(64)
                ),
            ),
        ];
        for (list, wanted) in over_limit {
            let error = all(list.into(), &limits).unwrap_err();
            assert_eq!(error.to_string(), wanted);
        }
    }
}
