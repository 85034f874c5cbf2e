//! Containers of leases that devlet did not see start: those of leases that were found in the kubelet's record.
//!
//! A direct lease is one whose container starts without devlet, at any time. So it ends only after the runtime has just
//! been asked.

use std::collections::BTreeSet;

use devlet_core::shield::{LeaseHolder, LeaseView};
use devlet_core::{DeviceId, LeaseName, ResourceName};

use super::lease::LeaseWorkflow;
use crate::lease::checkpoint::{self, Held};
use crate::lease::containers::{self, Containers, RuntimeSilent};

impl LeaseWorkflow {
    /// Asks the runtime for its containers, and records those of leases that devlet did not see start.
    pub async fn witness(&self) -> Result<Containers, RuntimeSilent> {
        let containers = containers::list(&self.shield).await?;
        self.record_witnessed(&containers).await;
        Ok(containers)
    }

    /// Records the containers that devlet did not see start.
    pub async fn record_witnessed(&self, containers: &Containers) {
        let unwitnessed: Vec<(LeaseName, LeaseHolder, BTreeSet<String>)> = self.store.read(|node| {
            let views = node.leases().iter().filter(|view| !view.lease.is_witnessed);
            let leases = views.filter_map(|LeaseView { lease, .. }| {
                let known = lease.containers.keys().cloned().collect();
                Some((lease.name.clone(), lease.holder.clone()?, known))
            });
            leases.collect()
        });
        for (name, holder, known) in unwitnessed {
            let Some(found) = containers.running(&holder, |id| known.contains(id)).await else {
                continue;
            };
            if let Err(error) = self.store.witness_lease(name.as_str(), found).await {
                tracing::warn!(%error, "containers of a lease not recorded, trying again");
            }
        }
    }

    /// Asks the runtime about leases that keep these devices from being prepared. Ends the direct ones that neither the
    /// kubelet nor the runtime has any more. Returns the reason why the runtime does not tell.
    pub(super) async fn witness_overlapping(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<(), RuntimeSilent> {
        let containers = self.witness().await?;
        let path = self.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        // A kubelet writes its record before it starts a container with these devices.
        let Ok(Ok(held)) = read else { return Ok(()) };
        let named: BTreeSet<LeaseName> = held.iter().map(Held::name).collect();
        let is_gone = |LeaseView { lease, .. }: &LeaseView<'_>| {
            lease.is_direct
                && lease.resource == *resource
                && !lease.devices.is_disjoint(devices)
                && !named.contains(&lease.name)
                && has_ended(lease.holder.as_ref(), &containers)
        };
        let gone: Vec<LeaseName> = self.store.read(|node| {
            let gone = node.leases().iter().filter(is_gone);
            gone.map(|view| view.lease.name.clone()).collect()
        });
        for name in gone {
            self.end(&name).await;
        }
        Ok(())
    }

    /// Ends a lease that the kubelet does not know any more, unless the runtime has not stopped its pod.
    pub async fn end_if_stopped(&self, name: &LeaseName, containers: Option<&Containers>) -> bool {
        let lease = self
            .store
            .read(|node| Some(node.leases().get(name.as_str())?.lease.clone()));
        let Some(lease) = lease else { return false };
        let has_ended = match containers {
            Some(containers) => lease.holder.is_none() || has_ended(lease.holder.as_ref(), containers),
            None => !lease.is_direct,
        };
        has_ended && self.end(name).await
    }

    /// Returns the entries of the kubelet's record that are not left over: it keeps those of pods that are gone until the
    /// next allocation. Without the runtime's word, all of them count.
    pub fn current<'a>(&self, held: &'a [Held], containers: Option<&Containers>) -> Vec<&'a Held> {
        let is_current = |held: &&Held| match containers {
            Some(containers) => containers.has_pod_of(&held.holder),
            None => true,
        };
        held.iter().filter(is_current).collect()
    }
}

/// Returns `true` if no container of this name runs, and none can be started: the runtime has stopped its pod.
fn has_ended(holder: Option<&LeaseHolder>, containers: &Containers) -> bool {
    holder.is_some_and(|holder| !containers.has_pod_of(holder))
}
