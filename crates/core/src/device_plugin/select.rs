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

use super::bit_set::BitSet;
use super::list::DeviceList;
use crate::id::DeviceId;

/// Picks `wanted` devices and takes them out of `free`, or `None` if there are too few. No device that is passed
/// on is free.
pub(crate) fn select(
    list: &DeviceList,
    free: &mut BitSet,
    passed_on: &BTreeSet<DeviceId>,
    advice: &[DeviceId],
    wanted: usize,
) -> Option<Vec<DeviceId>> {
    if wanted.saturating_sub(passed_on.len()) > free.count() {
        return None;
    }
    let mut chosen = reuse(passed_on, advice, wanted);
    if chosen.len() < wanted {
        let mut picks = Picks {
            list,
            free,
            chosen: &mut chosen,
            wanted,
        };
        picks.take(advice.iter().filter_map(|id| list.place_of(id.as_str())));
        picks.take_by_node();
        let rest: Vec<usize> = picks.free.iter().take(picks.missing()).collect();
        picks.take(rest);
    }
    debug_assert_eq!(chosen.len(), wanted, "what is passed on is not free");
    chosen.sort();
    Some(chosen)
}

/// As many as possible of the devices that are passed on, advised ones first.
fn reuse(passed_on: &BTreeSet<DeviceId>, advice: &[DeviceId], wanted: usize) -> Vec<DeviceId> {
    if passed_on.len() <= wanted {
        return passed_on.iter().cloned().collect();
    }
    let mut left: BTreeSet<&DeviceId> = passed_on.iter().collect();
    let advised = advice.iter().filter_map(|id| left.take(id)).take(wanted);
    let mut chosen: Vec<DeviceId> = advised.cloned().collect();
    let missing = wanted - chosen.len();
    chosen.extend(left.into_iter().take(missing).cloned());
    chosen
}

/// A choice that is being made.
struct Picks<'a> {
    list: &'a DeviceList,
    free: &'a mut BitSet,
    chosen: &'a mut Vec<DeviceId>,
    wanted: usize,
}

impl Picks<'_> {
    fn missing(&self) -> usize {
        self.wanted.saturating_sub(self.chosen.len())
    }

    /// Takes those of the places that are free, until there are enough.
    fn take(&mut self, places: impl IntoIterator<Item = usize>) {
        for place in places {
            if self.missing() == 0 {
                return;
            }
            if self.free.contains(place)
                && let Some(id) = self.list.id_at(place)
            {
                self.free.remove(place);
                self.chosen.push(id.clone());
            }
        }
    }

    /// Fills up with devices that have a NUMA node.
    fn take_by_node(&mut self) {
        // Nodes that the container is on already cost nothing.
        let mut started: BTreeSet<i64> = self
            .chosen
            .iter()
            .filter_map(|id| self.list.get(id.as_str()))
            .flat_map(|device| device.nodes.iter().copied())
            .collect();
        while self.missing() > 0 {
            let missing = self.missing();
            let candidates = self.list.by_node().iter().filter_map(|(&node, places)| {
                let count = self.free.count_common(places);
                (count > 0).then_some((node, count, places))
            });
            // Sorted ascending, the first is best.
            let rank = |&(node, count, _): &(i64, usize, &BitSet)| {
                let enough = count >= missing;
                let size = if enough { count } else { usize::MAX - count };
                (!started.contains(&node), !enough, size, node)
            };
            let Some((node, _, places)) = candidates.min_by_key(rank) else {
                return;
            };
            let places: Vec<usize> = places.iter_common(self.free).take(missing).collect();
            self.take(places);
            started.insert(node);
        }
    }
}

#[cfg(test)]
mod tests;
