//! The node: one value that changes only through the transitions of this module and of [`crate::dra`].
//!
//! `facts` holds what plugins report, `admission` and `removal` the two-phase operations, `error` their errors.

mod admission;
mod error;
mod facts;
mod removal;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

pub use admission::{PreferenceQuery, Preferences, Reserved};
pub(crate) use error::listed;
pub use error::{Blocked, CommitError, ConnectError, LastSeen, PutError, ReleaseError, ReserveError};

use crate::device_plugin::inventory::{LastPlugin, Resource};
use crate::device_plugin::ledger::Ledger;
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::rejections::Rejections;
use crate::dra::Dra;
use crate::dra::claims::Claim;
use crate::id::{ConnectionId, PodUid, ResourceName};
use crate::import::Importing;
use crate::pod::Pod;
use crate::shield::{Lease, Leases, restore_lists};

/// The state that durable records describe at start.
#[derive(Debug, Clone, Default)]
pub struct Restored {
    /// Pods with their allocations, by UID.
    pub pods: BTreeMap<PodUid, Pod>,
    /// Resources that plugins have served, and the last plugin of each.
    pub resources: BTreeMap<ResourceName, Option<LastPlugin>>,
    /// Claims. If the machine was booted since they were recorded, [`Claim::rebooted`] must have been called.
    pub claims: Vec<Claim>,
    /// Leases. If the machine was booted since they were recorded, [`Lease::rebooted`] must have been called.
    pub leases: Vec<Lease>,
    /// The devices that plugins listed last.
    pub lists: BTreeMap<ResourceName, DeviceList>,
}

/// The state of one node.
#[derive(Debug, Default)]
pub struct Node {
    pub(crate) resources: BTreeMap<ResourceName, Resource>,
    pub(crate) connections: BTreeMap<ConnectionId, ResourceName>,
    pub(crate) rejections: Rejections,
    pub(crate) ledger: Ledger,
    pub(crate) dra: Dra,
    pub(crate) leases: Leases,
    pub(crate) blocked: Vec<Blocked>,
    pub(crate) importing: Importing,
    pub(crate) next_connection: u64,
    next_reservation: u64,
    next_list: u64,
    next_admission: u64,
    pub(crate) changes: u64,
    resource_changes: u64,
}

impl Node {
    /// Returns a node with the pods, claims and resources of durable records. The resources do not have devices until
    /// plugins list them.
    pub fn restore(restored: Restored) -> Self {
        let mut node = Self::default();
        for (name, last) in restored.resources {
            node.resources.insert(
                name,
                Resource {
                    last,
                    ..Resource::default()
                },
            );
        }
        restore_lists(&mut node.resources, restored.lists);
        for claim in restored.claims {
            node.dra.claims.put(claim);
        }
        for pod in restored.pods.values() {
            for uid in pod.claim_uids() {
                node.dra.claims.hold(&pod.uid, &uid);
            }
        }
        node.leases = Leases::restore(restored.leases);
        node.ledger = Ledger::restore(restored.pods);
        node.changes += 1;
        node
    }

    /// Returns the number of admissions. [`Node::orphans`] uses it to find pods that were admitted after a list of pods
    /// was requested.
    pub fn admissions(&self) -> u64 {
        self.next_admission
    }

    /// Returns the number of changes. Waiting operations check their condition again when it grows.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the number of changes of [`Node::known_resources`] and of the set of connected plugins.
    pub fn resource_changes(&self) -> u64 {
        self.resource_changes
    }

    /// Refuses all admissions until [`Node::unblock`]. Several reasons may apply at once.
    pub fn block(&mut self, reason: Blocked) {
        self.changes += 1;
        self.blocked.push(reason);
    }

    /// Removes the reasons for which `is_over` returns `true`. Pods are admitted again when none is left.
    pub fn unblock(&mut self, is_over: impl Fn(&Blocked) -> bool) {
        self.changes += 1;
        self.blocked.retain(|reason| !is_over(reason));
    }

    /// Adds or replaces a pod that durable records or a kubelet's file describe. A device that another pod holds gets a
    /// second holder. It is free only after both pods are removed.
    pub fn put(&mut self, pod: Pod) -> Result<(), PutError> {
        if self.is_in_flight(&pod.uid) {
            return Err(PutError::InFlight);
        }
        self.replace_pod(pod);
        Ok(())
    }

    fn replace_pod(&mut self, pod: Pod) {
        let earlier = self.ledger.remove(&pod.uid);
        let claims = pod.claim_uids();
        for uid in earlier.iter().flat_map(Pod::claim_uids) {
            if !claims.contains(&uid) {
                self.dra.claims.release(&pod.uid, &pod.name, &uid);
            }
        }
        if let Some(earlier) = earlier {
            self.ledger.unname(&earlier.name, &earlier.uid);
            for (name, devices) in earlier.devices() {
                let resource = self.resources.get(name);
                self.ledger.release(&earlier.uid, name, devices, resource);
            }
        }
        for uid in &claims {
            self.dra.claims.hold(&pod.uid, uid);
        }
        for (name, devices) in pod.devices() {
            let resource = self.resources.get(name);
            self.ledger
                .hold(&pod.uid, name, devices.into_iter().cloned(), resource);
        }
        self.ledger.name(&pod.name, &pod.uid);
        self.ledger.insert(pod);
        self.changes += 1;
    }
}
