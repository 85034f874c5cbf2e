//! Device lists that a kubelet accepts: it takes messages of up to 4 MiB.

use devlet_core::device_plugin::list::Device;
use devlet_core::shield::Advertised;
use devlet_core::{Moment, ResourceName};
use devlet_kubelet_api::device_plugin::v1beta1::{
    self, HEALTHY, ListAndWatchResponse, NumaNode, TopologyInfo, UNHEALTHY,
};
use prost::Message as _;

use crate::workflow::lease::LeaseWorkflow;

/// The longest message that a kubelet takes.
const MAX_BYTES: usize = 4 << 20;

/// Returns what to tell the kubelet about a resource. `booted` is when the machine was booted.
pub(super) fn current(workflow: &LeaseWorkflow, resource: &ResourceName, booted: Moment) -> Advertised {
    let store = &workflow.store;
    let away = workflow.shield.away_ms();
    let now = store.now();
    store.read(|node| node.advertised(resource, now, booted, away))
}

/// A list for the kubelet.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KubeletList {
    pub(crate) message: ListAndWatchResponse,
    /// The number of devices that the plugin lists, if not all fit into the message.
    pub(crate) shortened_from: Option<usize>,
}

/// Returns the message for a list. Of a list that is too long, the devices that fit remain: first those that containers
/// have while the plugin is away, then the others in the order of their ids. A long list is encoded without what a kubelet does not need: the word for unhealthy devices.
pub(crate) fn encode(advertised: &Advertised) -> KubeletList {
    encode_within(advertised, MAX_BYTES)
}

fn encode_within(advertised: &Advertised, max: usize) -> KubeletList {
    let listed = advertised.list.devices().iter();
    let listed = listed.map(|device| to_wire(device, advertised.is_healthy(device)));
    let unlisted = advertised.unlisted().map(|id| v1beta1::Device {
        id: id.as_str().into(),
        health: HEALTHY.into(),
        topology: None,
    });
    let mut message = ListAndWatchResponse {
        devices: unlisted.chain(listed).collect(),
    };
    if message.encoded_len() <= max {
        return KubeletList {
            message,
            shortened_from: None,
        };
    }
    let all = message.devices.len();
    for device in &mut message.devices {
        if device.health == UNHEALTHY {
            device.health.clear();
        }
    }
    message
        .devices
        .sort_by_key(|device| !advertised.held.contains(device.id.as_str()));
    let mut length = 0;
    let fits = |device: &&v1beta1::Device| {
        let bytes = device.encoded_len();
        length += 1 + prost::length_delimiter_len(bytes) + bytes;
        length <= max
    };
    let kept = message.devices.iter().take_while(fits).count();
    message.devices.truncate(kept);
    KubeletList {
        message,
        shortened_from: (kept < all).then_some(all),
    }
}

fn to_wire(device: &Device, is_healthy: bool) -> v1beta1::Device {
    let nodes = device.nodes.iter().map(|&id| NumaNode { id });
    v1beta1::Device {
        id: device.id.as_str().into(),
        health: if is_healthy { HEALTHY } else { UNHEALTHY }.into(),
        topology: (!device.nodes.is_empty()).then(|| TopologyInfo {
            nodes: nodes.collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use devlet_core::device_plugin::list::DeviceList;

    use super::*;

    fn advertised(count: usize, is_expired: bool) -> Advertised {
        let device = |number: usize| Device {
            id: format!("d{number:02}").into(),
            healthy: number != 1,
            nodes: if number == 0 { vec![1] } else { Vec::new() },
        };
        Advertised {
            list: Arc::new(DeviceList::new((0..count).map(device).collect()).0),
            held: BTreeSet::new(),
            is_expired,
            until: None,
        }
    }

    fn shown(list: &KubeletList) -> BTreeMap<&str, (&str, usize)> {
        list.message
            .devices
            .iter()
            .map(|device| {
                let nodes = device
                    .topology
                    .as_ref()
                    .map_or(0, |topology| topology.nodes.len());
                (device.id.as_str(), (device.health.as_str(), nodes))
            })
            .collect()
    }

    #[test]
    fn a_list_keeps_health_and_topology() {
        let list = encode(&advertised(3, false));
        let expected = [
            ("d00", (HEALTHY, 1)),
            ("d01", (UNHEALTHY, 0)),
            ("d02", (HEALTHY, 0)),
        ];
        assert_eq!(shown(&list), BTreeMap::from(expected));
        assert_eq!(list.shortened_from, None);
    }

    #[test]
    fn devices_of_a_plugin_that_stays_away_are_unhealthy() {
        let list = encode(&advertised(2, true));
        assert_eq!(
            shown(&list),
            BTreeMap::from([("d00", (UNHEALTHY, 1)), ("d01", (UNHEALTHY, 0))])
        );
    }

    #[test]
    fn devices_that_containers_have_stay_healthy() {
        let mut list = advertised(2, true);
        list.held = ["d01".into(), "d07".into()].into();
        let expected = [
            ("d00", (UNHEALTHY, 1)),
            ("d01", (HEALTHY, 0)),
            ("d07", (HEALTHY, 0)),
        ];
        assert_eq!(shown(&encode(&list)), BTreeMap::from(expected));
    }

    #[test]
    fn a_list_that_is_too_long_is_made_small_before_it_is_shortened() {
        let all = advertised(10, false);
        let whole = encode(&all).message.encoded_len();

        let small = encode_within(&all, whole - 1);
        assert_eq!(small.shortened_from, None);
        assert_eq!(small.message.devices.len(), 10);
        assert_ne!(small.message.devices[1].health, HEALTHY);

        let part = encode_within(&all, whole / 2);
        assert_eq!(part.shortened_from, Some(10));
        let length = part.message.encoded_len();
        assert!(
            length <= whole / 2 && length + 20 > whole / 2,
            "{length} of {whole}"
        );
        assert_eq!(part.message.devices[0].id, "d00");
    }

    #[test]
    fn a_list_that_is_shortened_keeps_the_devices_of_containers() {
        let mut all = advertised(10, true);
        all.held = ["d09".into()].into();
        let whole = encode(&all).message.encoded_len();

        let part = encode_within(&all, whole / 2);

        assert_eq!(shown(&part).get("d09"), Some(&(HEALTHY, 0)));
    }
}
