//! Which of the free devices a container gets.
//!
//! In this order:
//! 1. devices that an earlier init container of the pod passes on;
//! 2. devices that the plugin advises, in its order;
//! 3. devices on as few NUMA nodes as possible, beginning with those that the container already has devices on:
//!    the node with the least devices left that still has enough of them, or else the one with the most;
//! 4. devices without a NUMA node.
//!
//! Within a node, in the order of ids. Same input, same choice.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use super::bits::Bits;
use super::list::DeviceList;
use crate::id::DeviceId;

/// Picks `wanted` devices, or `None` if there are too few.
pub(crate) fn select(
    list: &DeviceList,
    free: &Bits,
    passed_on: &BTreeSet<DeviceId>,
    advice: &[DeviceId],
    wanted: usize,
) -> Option<Vec<DeviceId>> {
    let mut chosen: Vec<DeviceId> = Vec::with_capacity(wanted);
    let mut passed_on = passed_on.clone();
    let advised: Vec<DeviceId> = advice
        .iter()
        .filter_map(|id| passed_on.take(id))
        .take(wanted)
        .collect();
    chosen.extend(advised);
    let missing = wanted - chosen.len();
    chosen.extend(passed_on.into_iter().take(missing));
    if chosen.len() < wanted {
        let mut left = free.clone();
        for id in &chosen {
            left.remove(list.place_of(id.as_str()).unwrap_or(usize::MAX));
        }
        if left.count() < wanted - chosen.len() {
            return None;
        }
        for place in advice.iter().filter_map(|id| list.place_of(id.as_str())) {
            if chosen.len() < wanted && left.contains(place) {
                left.remove(place);
                chosen.push(list.devices()[place].id.clone());
            }
        }
        take_by_node(list, &mut left, &mut chosen, wanted);
        let missing = wanted - chosen.len();
        chosen.extend(
            left.iter()
                .take(missing)
                .map(|place| list.devices()[place].id.clone()),
        );
    }
    chosen.sort();
    (chosen.len() == wanted).then_some(chosen)
}

/// Fills up with devices that have a NUMA node.
fn take_by_node(list: &DeviceList, left: &mut Bits, chosen: &mut Vec<DeviceId>, wanted: usize) {
    // Nodes that the container is on already cost nothing.
    let mut started: BTreeSet<i64> = chosen
        .iter()
        .filter_map(|id| list.get(id.as_str()))
        .flat_map(|device| device.nodes.iter().copied())
        .collect();
    while chosen.len() < wanted {
        let missing = wanted - chosen.len();
        let candidates = list.by_node().iter().filter_map(|(&node, places)| {
            let count = left.count_common(places);
            (count > 0).then_some((node, count))
        });
        // Sorted ascending, the first is best.
        let rank = |&(node, count): &(i64, usize)| {
            let enough = count >= missing;
            let size = if enough { count } else { usize::MAX - count };
            (!started.contains(&node), !enough, size, node)
        };
        let Some((node, _)) = candidates.min_by_key(rank) else {
            return;
        };
        let places: Vec<usize> = list.by_node()[&node].iter_common(left).take(missing).collect();
        for place in places {
            left.remove(place);
            chosen.push(list.devices()[place].id.clone());
        }
        started.insert(node);
    }
}
