//! Selection of devices for a container.
//!
//! Devices are taken in this order:
//! 1. devices of earlier init containers of the pod that the container can reuse;
//! 2. devices that the plugin prefers, in its order;
//! 3. devices on as few NUMA nodes as possible, beginning with the nodes that the container already uses: then the
//!    node with the fewest free devices that still has enough of them, or else the node with the most;
//! 4. devices without a NUMA node.
//!
//! Within a node, devices are taken in the order of ids. Equal inputs lead to equal choices.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use super::bit_set::BitSet;
use super::list::DeviceList;
use crate::id::DeviceId;

/// Picks `wanted` devices and removes them from `free`. Returns `None` if there are too few. `reusable` and `free` must
/// not have a device in common.
pub(crate) fn select(
    list: &DeviceList,
    free: &mut BitSet,
    reusable: &BTreeSet<DeviceId>,
    preferences: &[DeviceId],
    wanted: usize,
) -> Option<Vec<DeviceId>> {
    if wanted.saturating_sub(reusable.len()) > free.count() {
        return None;
    }
    let mut chosen = reuse(reusable, preferences, wanted);
    if chosen.len() < wanted {
        let mut picks = Picks {
            list,
            free,
            chosen: &mut chosen,
            wanted,
        };
        picks.take(preferences.iter().filter_map(|id| list.index_of(id.as_str())));
        picks.take_by_node();
        let rest: Vec<usize> = picks.free.iter().take(picks.missing()).collect();
        picks.take(rest);
    }
    debug_assert_eq!(chosen.len(), wanted, "reusable devices are not free");
    chosen.sort();
    Some(chosen)
}

/// Returns as many reusable devices as possible, preferred devices first.
fn reuse(reusable: &BTreeSet<DeviceId>, preferences: &[DeviceId], wanted: usize) -> Vec<DeviceId> {
    if reusable.len() <= wanted {
        return reusable.iter().cloned().collect();
    }
    let mut left: BTreeSet<&DeviceId> = reusable.iter().collect();
    let preferred = preferences.iter().filter_map(|id| left.take(id)).take(wanted);
    let mut chosen: Vec<DeviceId> = preferred.cloned().collect();
    let missing = wanted - chosen.len();
    chosen.extend(left.into_iter().take(missing).cloned());
    chosen
}

/// An incomplete selection.
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

    /// Takes free devices at these indexes until there are enough.
    fn take(&mut self, indexes: impl IntoIterator<Item = usize>) {
        for index in indexes {
            if self.missing() == 0 {
                return;
            }
            if self.free.contains(index)
                && let Some(id) = self.list.id_at(index)
            {
                self.free.remove(index);
                self.chosen.push(id.clone());
            }
        }
    }

    /// Takes devices with a NUMA node until there are enough.
    fn take_by_node(&mut self) {
        // Nodes that the container already uses come first.
        let mut started: BTreeSet<i64> = self
            .chosen
            .iter()
            .filter_map(|id| self.list.get(id.as_str()))
            .flat_map(|device| device.nodes.iter().copied())
            .collect();
        while self.missing() > 0 {
            let missing = self.missing();
            let candidates = self.list.by_node().iter().filter_map(|(&node, indexes)| {
                let count = self.free.count_common(indexes);
                (count > 0).then_some((node, count, indexes))
            });
            // The smallest rank is the best.
            let rank = |&(node, count, _): &(i64, usize, &BitSet)| {
                let enough = count >= missing;
                let size = if enough { count } else { usize::MAX - count };
                (!started.contains(&node), !enough, size, node)
            };
            let Some((node, _, indexes)) = candidates.min_by_key(rank) else {
                return;
            };
            let indexes: Vec<usize> = indexes.iter_common(self.free).take(missing).collect();
            self.take(indexes);
            started.insert(node);
        }
    }
}

#[cfg(test)]
mod tests;
