//! The Node and cluster whose pods are on record. The list of another one has none of them, and must not remove them.
//!
//! Another name, or another address of the API server, may be the same node: then a pod on record is on the list.

use std::collections::BTreeSet;

use devlet_agent::store::ClusterRecord;
use devlet_core::{Node, PodUid, Source};

use super::{Context, List};
use crate::Mode;

/// Returns `true` if pods on record that are not on a complete list are gone. Records the Node and cluster of the list.
pub(super) async fn is_ours(context: &Context, list: &List) -> bool {
    if context.mode == Mode::Observe {
        return true;
    }
    let store = context.agent.store();
    let current = ClusterRecord {
        node: context.node.clone(),
        server: context.connection.server(),
    };
    let known = store.cluster();
    let is_known = known.as_ref() == Some(&current);
    let missing = context.agent.missing_in(&list.seen, list.asked);
    let may_be_another = known.is_some() && !is_known && !missing.is_empty();
    let other = known.filter(|_| may_be_another && !store.read(|node| has_any(node, &list.seen)));
    let described = other.map(|other| format!("Node {} at {}", other.node, other.server));
    if let Some(owner) = &described {
        tracing::error!(
            owner,
            missing = missing.len(),
            "pods on record are those of another Node or cluster; none is removed"
        );
    }
    let is_ours = described.is_none();
    context.agent.cluster().update(|state| state.pods_of = described);
    if is_ours
        && !is_known
        && let Err(error) = store.record_cluster(current).await
    {
        // The next list records it.
        tracing::warn!(%error, "Node and cluster of the pods not recorded");
    }
    is_ours
}

/// Returns `true` if any pod of a cluster that is on record is on the list.
fn has_any(node: &Node, listed: &BTreeSet<PodUid>) -> bool {
    let mut pods = node.pods().filter(|pod| pod.source == Source::Embedder);
    pods.any(|pod| listed.contains(&pod.uid))
}
