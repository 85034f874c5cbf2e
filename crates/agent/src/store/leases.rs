//! Writes of leases, and the preparation that ends itself.

use std::collections::BTreeSet;

use devlet_core::device_plugin::run_options::Answer;
use devlet_core::shield::{
    ContainerProcess, EndError, GrantError, Lease, LeaseChange, Leases, PreStart, Preparation, PrepareError,
    StartError,
};
use devlet_core::{DeviceId, LeaseName, ResourceName};

use super::completion::Completion;
use super::error::WriteError;
use super::row::Row;
use super::{Store, done};

/// Why a change of a lease was not made: it was refused, or it could not be written.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError<E> {
    /// The change is refused.
    #[error(transparent)]
    Refused(E),
    /// The change could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Leases whose plugin is being called. Dropping it ends the preparation.
#[derive(Debug)]
#[must_use = "dropping it ends the preparation"]
pub struct PreparingLeases {
    store: Store,
    /// The leases, as they were at the begin.
    pub leases: Vec<Lease>,
    /// An earlier call of `PreStartContainer` for all of them that no container has used.
    pub pre_start: Option<PreStart>,
    /// What the next preparation gets from this one.
    ended: (Option<PreStart>, Option<String>),
}

impl PreparingLeases {
    /// Ends the preparation after the kubelet has given up: a call that its next try may use, or an error.
    pub fn end_late(mut self, ended: Result<Option<PreStart>, String>) {
        self.ended = match ended {
            Ok(pre_start) => (pre_start, None),
            Err(failure) => (None, Some(failure)),
        };
    }

    /// Records the plugin's answers. Returns when they are on disk.
    pub async fn record(&self, answers: Vec<(LeaseName, Answer, bool)>) -> Result<(), WriteError> {
        let change = |leases: &mut Leases| Ok::<_, WriteError>(leases.begin_prepared(answers));
        self.store.change_leases(change).await
    }
}

impl Drop for PreparingLeases {
    fn drop(&mut self) {
        let names: Vec<LeaseName> = self.leases.iter().map(|lease| lease.name.clone()).collect();
        let (pre_start, failure) = &self.ended;
        self.store.shared.update(|node| {
            let leases = node.leases_mut();
            leases.end_prepare(&names, *pre_start, failure.as_deref());
        });
    }
}

impl Store {
    /// Grants a lease. Returns when it is on disk.
    pub async fn grant_lease(
        &self,
        name: LeaseName,
        resource: ResourceName,
        devices: Vec<DeviceId>,
    ) -> Result<(), LeaseError<GrantError>> {
        let now = self.now();
        let grant = |leases: &mut Leases| {
            let change = leases.begin_grant(name, resource, devices, now);
            change.map(Some).map_err(LeaseError::Refused)
        };
        self.change_leases(grant).await
    }

    /// Adds the leases that are not known yet. Returns when they are on disk.
    pub async fn adopt_leases(&self, adopted: Vec<Lease>) -> Result<(), WriteError> {
        let adopt = |leases: &mut Leases| Ok::<_, WriteError>(leases.begin_adopt(adopted));
        self.change_leases(adopt).await
    }

    /// Begins to prepare all leases of these devices.
    pub fn prepare_leases(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<PreparingLeases, PrepareError> {
        let begun = self.shared.update(|node| {
            // A refusal changes nothing, so waiting callers are not woken.
            node.leases().check_prepare(resource, devices)?;
            node.leases_mut().begin_prepare(resource, devices)
        });
        let Preparation { leases, pre_start } = begun?;
        Ok(PreparingLeases {
            store: self.clone(),
            leases,
            pre_start,
            ended: (None, None),
        })
    }

    /// Lets a container of a lease start. Returns when that is on disk.
    pub async fn start_leased(
        &self,
        name: &str,
        container: &str,
        process: ContainerProcess,
    ) -> Result<(), LeaseError<StartError>> {
        let start = |leases: &mut Leases| {
            let change = leases.begin_start(name, container, process);
            change.map(Some).map_err(LeaseError::Refused)
        };
        self.change_leases(start).await
    }

    /// Records that a container of a lease has ended. Returns when that is on disk.
    pub async fn stop_leased(&self, name: &str, container: &str) -> Result<(), WriteError> {
        let stop = |leases: &mut Leases| Ok::<_, WriteError>(leases.begin_stop(name, container));
        self.change_leases(stop).await
    }

    /// Records the containers of a lease that the runtime has found. Returns when they are on disk.
    pub async fn witness_lease(
        &self,
        name: &str,
        found: Vec<(String, ContainerProcess)>,
    ) -> Result<(), WriteError> {
        let witness = |leases: &mut Leases| Ok::<_, WriteError>(leases.begin_witness(name, found));
        self.change_leases(witness).await
    }

    /// Ends a lease that the kubelet does not know any more. Returns when that is on disk.
    pub async fn end_lease(&self, name: &str) -> Result<(), LeaseError<EndError>> {
        let end = |leases: &mut Leases| leases.begin_end(name).map(Some).map_err(LeaseError::Refused);
        self.change_leases(end).await
    }

    /// Hands all prepared leases over to the kubelet. Returns when that is on disk.
    pub async fn hand_leases_over(&self) -> Result<(), WriteError> {
        let hand_over = |leases: &mut Leases| Ok::<_, WriteError>(leases.begin_hand_over());
        self.change_leases(hand_over).await
    }

    /// Records the devices that plugins listed last, so that they can be advertised after a restart.
    pub async fn record_lists(&self) -> Result<(), WriteError> {
        let lists = self.read(|node| node.unrecorded_lists());
        // Encoded before the lock is taken: lists may be long.
        let rows: Vec<Row> = lists.iter().map(|(name, list)| Row::list(name, list)).collect();
        let change = (!rows.is_empty()).then_some((rows, Completion::Lists(lists)));
        done(self.begin(|_| Ok::<_, WriteError>(change))?).await
    }

    async fn change_leases<E: From<WriteError>>(
        &self,
        begin: impl FnOnce(&mut Leases) -> Result<Option<LeaseChange>, E>,
    ) -> Result<(), E> {
        let written = self.begin(|state| {
            let change = begin(state.node.leases_mut())?;
            Ok::<_, E>(change.map(|change| {
                let put = change.put().iter().map(Row::lease);
                let delete = change.delete().iter().map(|name| Row::Lease(name.clone(), None));
                let rows = put.chain(delete).collect();
                (rows, Completion::Lease(change))
            }))
        })?;
        Ok(done(written).await?)
    }
}
