//! Between the wire and the core: device lists.

use devlet_core::DeviceId;
use devlet_core::device_plugin::list::Device;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use prost::Message as _;
use prost::bytes::Bytes;

use super::client::ListError;
use crate::grpc::fields::{FieldIter, WireError};
use crate::limits::portions::Portions;
use crate::limits::{Limit, Limits, shortened};

/// What a device takes besides its id and nodes, roughly: a place in the list, and the allocations around it.
const DEVICE_BYTES: usize = 96;

/// All that is said of a device may be so many times as long as its id.
const LONGEST_ENTRY: usize = 64;

/// The field of the devices in a list, in every version, and the only one.
const DEVICES: u32 = 1;

/// The devices of a list within bounds, and how much memory they take, roughly. `device` decodes one.
pub(super) fn devices(
    list: Bytes,
    device: impl Fn(Bytes) -> Result<Device, WireError>,
    limits: &Limits,
    portions: &mut Portions,
) -> Result<(Vec<Device>, usize), ListError> {
    let mut count = 0;
    for entry in FieldIter::of(list.clone(), DEVICES) {
        let bytes = entry?.1.len();
        count += 1;
        Limit::DEVICES_PER_RESOURCE.check(count, limits.devices_per_resource, || {
            format!("the list has {count} devices or more")
        })?;
        if bytes > limits.id_bytes.saturating_mul(LONGEST_ENTRY) {
            let what = format!(
                "a device has {bytes} bytes, more than {LONGEST_ENTRY} times as many as its id may have"
            );
            return Err(Limit::ID_BYTES.exceeded(what, limits.id_bytes).into());
        }
        portions.step();
    }
    let (mut devices, mut memory) = (Vec::with_capacity(count), 0);
    for entry in FieldIter::of(list, DEVICES) {
        let (DEVICES, entry) = entry? else {
            continue;
        };
        let bytes = entry.len();
        let device = device(entry)?;
        let id = device.id.as_str();
        Limit::ID_BYTES.check(id.len(), limits.id_bytes, || {
            format!("the id {} has {} bytes", shortened(id), id.len())
        })?;
        memory += DEVICE_BYTES + id.len() + device.nodes.len() * size_of::<i64>();
        devices.push(device);
        portions.step_over(bytes);
    }
    Ok((devices, memory))
}

/// A device of `ListAndWatch`.
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

/// The same from a plugin of 2017, which knows nothing of topology.
pub(super) fn device_2017(entry: Bytes) -> Result<Device, WireError> {
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
        let portions = &mut Portions::in_one_go();
        devices(list, device, limits, portions).map(|(devices, _)| devices)
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

    // What is decoded entry by entry is what the generated code makes of the whole.
    #[test]
    fn damaged_or_not_a_list_says_what_its_message_does() {
        let bytes = list(vec![named("a", &[0, -5]), named("", &[]), named("b", &[64])]);
        let spoilt = (0..bytes.len()).flat_map(|place| {
            let bytes = &bytes;
            let cut = std::iter::once(bytes[..place].to_vec());
            cut.chain((0..8).map(move |bit| {
                let mut spoilt = bytes.clone();
                spoilt[place] ^= 1 << bit;
                spoilt
            }))
        });
        let mut damaged = 0;
        for bytes in spoilt.chain([bytes.clone()]) {
            let whole = v1beta1::ListAndWatchResponse::decode(&*bytes);
            let wanted = whole.ok().map(|whole| {
                let entry = |each: &v1beta1::Device| device(each.encode_to_vec().into()).unwrap();
                whole.devices.iter().map(entry).collect::<Vec<_>>()
            });
            damaged += usize::from(wanted.is_none());
            let found = all(bytes.clone().into(), &Limits::default());
            assert_eq!(found.ok(), wanted, "{bytes:?}");
        }
        assert!(damaged > 100, "{damaged}");
    }

    #[test]
    fn a_list_of_too_much_is_refused_before_it_is_decoded() {
        let limits = Limits {
            devices_per_resource: 2,
            id_bytes: 8,
            ..Limits::default()
        };
        let too_much = [
            (
                list(vec![named("a", &[]); 3]),
                "the list has 3 devices or more, limits.devicesPerResource allows 2",
            ),
            // Numbers that mean nothing.
            (
                vec![0x10, 1, 0x10, 2, 0x10, 3],
                "the list has 3 devices or more, limits.devicesPerResource allows 2",
            ),
            (
                list(vec![named("a", &[0; 1000])]),
                "a device has 2015 bytes, more than 64 times as many as its id may have, limits.idBytes allows 8",
            ),
            (
                list(vec![named("ninebytes", &[])]),
                "the id \"ninebytes\" has 9 bytes, limits.idBytes allows 8",
            ),
        ];
        for (list, wanted) in too_much {
            let error = all(list.into(), &limits).unwrap_err();
            assert_eq!(error.to_string(), wanted);
        }
    }
}
