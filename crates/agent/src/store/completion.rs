//! The second phase of a change: what it does in memory when it is on disk, or when it is cancelled.

use std::collections::BTreeSet;
use std::sync::Arc;

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::dra::claims::Claim;
use devlet_core::shield::LeaseChange;
use devlet_core::{Importing, Pod, PodUid, RecordId, ReservationId, ResourceName};

use super::cluster_record::ClusterRecord;
use super::decisions::Settled;
use super::{Shared, State};

/// Runs a completion once. Dropping the guard cancels the change.
pub(crate) struct CompletionGuard {
    completion: Option<Completion>,
    shared: Arc<Shared>,
}

impl CompletionGuard {
    pub(crate) fn new(completion: Completion, shared: Arc<Shared>) -> Self {
        let completion = Some(completion);
        Self { completion, shared }
    }

    /// Returns `true` if the change affects the node, not only the disk.
    pub(crate) fn changes_node(&self) -> bool {
        !matches!(self.completion, None | Some(Completion::Nothing))
    }

    /// Completes the change if it is written, otherwise cancels it.
    pub(crate) fn run(&mut self, state: &mut State, is_written: bool) {
        match self.completion.take() {
            Some(completion) if is_written => completion.finish(state),
            Some(completion) => completion.cancel(state),
            None => {}
        }
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            self.shared.change(|state| completion.cancel(state));
        }
    }
}

/// The effect of a change on memory.
#[derive(Debug)]
pub(crate) enum Completion {
    Intent(ReservationId),
    Commit(ReservationId),
    Release(PodUid),
    Record(RecordId),
    /// `pods` have changed or are new.
    Import {
        pods: Vec<Pod>,
        removed: Vec<PodUid>,
        importing: Importing,
        resources: BTreeSet<ResourceName>,
        claims: Vec<Claim>,
        settled: Box<Settled>,
    },
    /// `pods` hold again what they held before a contested file; `removed` were only in that file.
    Forget {
        settled: Box<Settled>,
        pods: Vec<Pod>,
        removed: Vec<PodUid>,
    },
    Lease(LeaseChange),
    Lists(Vec<(ResourceName, Arc<DeviceList>)>),
    Cluster(ClusterRecord),
    /// The change affects the disk only.
    Nothing,
}

impl Completion {
    pub(crate) fn finish(self, state: &mut State) {
        let node = &mut state.node;
        match self {
            Self::Intent(id) => node.finish_intent(id),
            Self::Commit(id) => node.finish_commit(id),
            Self::Release(pod) => node.finish_release(&pod),
            Self::Record(id) => node.finish_record(id),
            Self::Lease(change) => node.leases_mut().finish(change),
            Self::Cluster(cluster) => state.cluster = Some(cluster),
            Self::Lists(lists) => {
                for (name, list) in lists {
                    node.list_recorded(&name, list);
                }
            }
            Self::Import {
                pods,
                removed,
                importing,
                resources,
                claims,
                settled,
            } => {
                node.end_import(&importing);
                for pod in &removed {
                    node.finish_release(pod);
                }
                for claim in claims {
                    node.put_claim(claim);
                }
                for pod in pods {
                    let put = node.put(pod);
                    debug_assert!(put.is_ok(), "a pod that is being imported is in flight");
                }
                node.add_resources(resources);
                state.settle(*settled);
            }
            Self::Forget {
                settled,
                pods,
                removed,
            } => {
                for pod in &removed {
                    node.finish_release(pod);
                }
                for pod in pods {
                    // Fails for a pod that is being admitted or removed by now: that operation decides.
                    let _ = node.put(pod);
                }
                state.settle(*settled);
            }
            Self::Nothing => {}
        }
    }

    pub(crate) fn cancel(self, state: &mut State) {
        match self {
            Self::Intent(id) => state.node.cancel_intent(id),
            Self::Commit(id) => state.node.cancel_commit(id),
            Self::Release(pod) => state.node.cancel_release(&pod),
            Self::Record(id) => state.node.cancel_record(id),
            Self::Lease(change) => state.node.leases_mut().cancel(change),
            Self::Import {
                importing, removed, ..
            } => {
                state.node.end_import(&importing);
                for pod in &removed {
                    state.node.cancel_release(pod);
                }
            }
            Self::Forget { removed, .. } => {
                for pod in &removed {
                    state.node.cancel_release(pod);
                }
            }
            Self::Lists(_) | Self::Cluster(_) | Self::Nothing => {}
        }
    }
}
