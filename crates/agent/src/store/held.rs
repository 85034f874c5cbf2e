//! A reservation that undoes itself.

use std::pin::Pin;

use devlet_core::device_plugin::ledger::{Grant, Reservation};
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{
    Node, PluginView, Pod, PodRequest, PreferenceQuery, Preferences, ReservationId, ReserveError, Reserved,
    ResourceName,
};

#[cfg(doc)]
use super::answer;
use super::completion::Completion;
use super::error::{CommitError, HoldError, WriteError};
use super::row::Row;
use super::{Store, done};

/// A reservation. Dropping it frees the devices and leaves the claims, so an early return and a cancelled request both
/// leave the node as it was.
#[must_use = "dropping a hold frees the devices"]
#[derive(Debug)]
pub struct Held {
    pub(super) store: Store,
    pub(super) id: ReservationId,
    pub(super) reservation: Reservation,
    pub(super) plugins: Option<Vec<PluginView>>,
    /// `true` until the commit has begun: from then on the writer ends the reservation.
    pub(super) is_armed: bool,
}

/// The result of [`Store::hold_or_query`].
#[derive(Debug)]
pub enum Hold {
    /// A plugin has to be asked for its preference first. Nothing is reserved.
    Query(PreferenceQuery),
    /// The pod has everything, on disk.
    Complete(Box<Pod>),
    /// The pod's devices and claims are reserved.
    Held(Box<Held>),
}

impl Held {
    /// Returns the reserved devices and claims.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Returns the plugin to call for each grant; `None` if one of them was not connected.
    pub fn plugins(&self) -> Option<&[PluginView]> {
        self.plugins.as_deref()
    }

    /// Returns the ID of the reservation.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// Records the pod's claims, which must be on disk before a driver is called for them. Returns `true` when they are on
    /// disk, or `false` if there is nothing to write, for example because another admission is writing it.
    ///
    /// After the first poll the change is written even if the future is dropped.
    pub async fn intent(&self) -> Result<bool, WriteError> {
        let written = self.store.begin(|state| {
            let intent = state.node.begin_intent(self.id);
            let mut rows: Vec<Row> = intent.put.iter().map(Row::claim).collect();
            rows.extend(intent.delete.into_iter().map(|uid| Row::Claim(uid, None)));
            let change = (!rows.is_empty()).then_some((rows, Completion::Intent(self.id)));
            Ok::<_, WriteError>(change)
        })?;
        let is_news = written.is_some();
        done(written).await?;
        Ok(is_news)
    }

    /// Allocates the reservation to the pod, after the plugins have answered and all claims are prepared. Returns when that is
    /// on disk.
    ///
    /// `answers` are those of the plugins, in the order of the grants, from [`answer()`]; `true` with an answer if the
    /// plugin requires a call before each start. If the future is dropped before its first poll, the devices are free
    /// again. After the first poll the change is written even if the future is dropped.
    pub async fn commit(
        self,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
    ) -> Result<Pod, CommitError> {
        self.commit_with(request, answers, |written| written).await
    }

    /// Commits like [`Held::commit`], and waits for the write as long as `wait` does. The write is carried out even if
    /// `wait` gives up.
    pub(crate) async fn commit_with<F>(
        mut self,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
        wait: impl FnOnce(PendingWrite) -> F,
    ) -> Result<Pod, CommitError>
    where
        F: Future<Output = Result<(), WriteError>>,
    {
        let (mut pod, mut recorded) = (None, None);
        let written = self.store.begin(|state| {
            let node = &mut state.node;
            if let Some(resource) = vanished(node, &self.reservation.grants) {
                return Err(CommitError::Vanished { resource });
            }
            if node.has_everything(self.id) {
                recorded = node.pod(&request.uid).cloned();
            }
            let commit = node.begin_commit(self.id, request, answers)?;
            self.is_armed = false;
            let mut rows: Vec<Row> = commit.claims.iter().map(Row::claim).collect();
            rows.push(Row::pod(&commit.pod));
            pod = Some(commit.pod);
            Ok(Some((rows, Completion::Commit(self.id))))
        })?;
        match wait(Box::pin(done(written))).await {
            Ok(()) => Ok(pod.ok_or(devlet_core::CommitError::Ended)?),
            // A pod that holds everything is admitted even if a change of its record cannot be written.
            Err(error) => recorded.ok_or(CommitError::Write(error)),
        }
    }
}

impl Store {
    /// Reserves every device and claim that the pod needs, or nothing. Returns `None` if the pod has all of them on disk.
    ///
    /// While writes fail, nothing is reserved: a plugin must not be called for an allocation that cannot be written.
    pub fn hold(&self, request: &PodRequest, preferences: &Preferences) -> Result<Option<Held>, HoldError> {
        let held = self.hold_with(request, |node| {
            let reserved = node.reserve(request, preferences)?;
            Ok(reserved.map_or(Reserved::Complete, Reserved::Reservation))
        })?;
        Ok(match held {
            Hold::Held(held) => Some(*held),
            Hold::Complete(_) | Hold::Query(_) => None,
        })
    }

    /// Reserves like [`Store::hold`], unless a plugin has to be asked for its preference first.
    pub fn hold_or_query(&self, request: &PodRequest, preferences: &Preferences) -> Result<Hold, HoldError> {
        self.hold_with(request, |node| node.reserve_or_query(request, preferences))
    }

    fn hold_with(
        &self,
        request: &PodRequest,
        reserve: impl FnOnce(&mut Node) -> Result<Reserved, ReserveError>,
    ) -> Result<Hold, HoldError> {
        let health = self.health();
        self.shared.change(|state| {
            let node = &mut state.node;
            let complete = |node: &Node| {
                let pod = node.pod(&request.uid).cloned();
                pod.map(|pod| Hold::Complete(Box::new(pod)))
                    .ok_or(HoldError::Refused(ReserveError::InFlight))
            };
            let id = match (reserve(node)?, &health) {
                (Reserved::Query(_), Err(error)) => return Err(HoldError::Write(error.clone())),
                (Reserved::Query(query), Ok(())) => return Ok(Hold::Query(query)),
                (Reserved::Complete, _) => return complete(node),
                (Reserved::Reservation(id), _) => id,
            };
            if let Err(error) = health {
                let has_everything = node.has_everything(id);
                node.abort(id);
                // A pod that holds everything is admitted even if a write is pending for it.
                return match has_everything {
                    true => complete(node),
                    false => Err(HoldError::Write(error)),
                };
            }
            let reservation = node.reservation(id).cloned();
            let reservation = reservation.ok_or(HoldError::Refused(ReserveError::InFlight))?;
            let plugin = |grant: &Grant| node.plugin(node.serving(&grant.resource)?);
            let plugins = reservation.grants.iter().map(plugin).collect();
            Ok(Hold::Held(Box::new(Held {
                store: self.clone(),
                id,
                reservation,
                plugins,
                is_armed: true,
            })))
        })
    }
}

/// A write that a commit waits for.
pub(crate) type PendingWrite = Pin<Box<dyn Future<Output = Result<(), WriteError>> + Send>>;

/// Returns a resource of which a granted device has left the list or is unhealthy, while its plugin is connected.
fn vanished(node: &Node, grants: &[Grant]) -> Option<ResourceName> {
    let is_vanished = |grant: &&Grant| {
        let mut devices = grant.devices.iter();
        node.serving(&grant.resource).is_some()
            && devices.any(|device| !node.is_healthy(&grant.resource, device))
    };
    grants
        .iter()
        .find(is_vanished)
        .map(|grant| grant.resource.clone())
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_armed {
            self.store.shared.update(|node| node.abort(self.id));
        }
    }
}
