//! Admits a pod: with everything that it requests, or with nothing.
//!
//! 1. Waits, up to the caller's deadline, for plugins and their first healthy devices, and for devices that other
//!    admissions in progress have reserved.
//! 2. Asks plugins for preferences where their options require it. Preferences only sort the choice: stale or missing
//!    ones are harmless, so no lock is held during the calls.
//! 3. Reserves the devices of all containers at once, and joins the claims.
//! 4. Calls `Allocate` on all plugins concurrently. Meanwhile drivers prepare the claims, once the intent is on disk; see
//!    [`super::prepare`].
//! 5. Writes the pod, then answers.
//!
//! All steps together end by the caller's deadline. The write has at least a second, and continues after a timeout. A call
//! to a plugin ends by the plugin's own deadline or the caller's, whichever is earlier. A plugin that did not answer in step
//! 2 is not asked again by the same admission.
//!
//! A failure before the write, or a caller that leaves, drops the reservation. That frees the devices, and the claims are
//! unprepared in the background.

use std::collections::BTreeSet;
use std::time::Duration;

use devlet_core::device_plugin::ledger::Grant;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{ConnectionId, Pod, PodRequest, PreferenceQuery, Preferences, ReserveError, ResourceName};
use devlet_kubelet_files::device_plugin::response::InvalidResponse;
use futures_util::future::try_join_all;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::claims::Claims;
use super::prepare::PrepareError;
use super::written;
use crate::config::Config;
use crate::device_plugin::answer;
use crate::device_plugin::clients::PluginClients;
use crate::dra::DriverCalls;
use crate::grpc::call::{CallDeadline, CallError, InvalidAnswer, MIN_CALL_TIME, seconds};
use crate::limits;
use crate::metrics::Metrics;
use crate::store::{self, Changes, CommitError, Held, Hold, HoldError, Store};

/// Maximum attempts, if devices vanish during the calls to their plugins.
const ATTEMPTS: usize = 5;

/// Why a pod was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    /// The request cannot be satisfied, and waiting does not help.
    #[error(transparent)]
    Refused(ReserveError),
    /// The deadline passed first.
    #[error("gave up after {}: {reason}", seconds(*.waited))]
    TimedOut { waited: Duration, reason: ReserveError },
    /// A call to a plugin failed.
    #[error("device plugin of {resource} at {endpoint}: {problem}")]
    Plugin {
        resource: ResourceName,
        /// The socket of the plugin.
        endpoint: String,
        problem: CallError,
    },
    /// The caller cancelled the admission.
    #[error("the admission was given up: devlet is stopping, or the caller has left")]
    GivenUp,
    /// Devices vanished during the calls in every attempt.
    #[error("devices of {resource} vanished while their plugin was being called, {ATTEMPTS} times in a row")]
    Vanishing { resource: ResourceName },
    /// A kubelet gives out the devices of this node.
    #[error(
        "the kubelet of this node gives out its devices, and devlet stands beside it (devlet serve --shield); create the pod in Kubernetes"
    )]
    Shielded,
    /// The pod could not be written.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// The calls that an admission makes. Each ends by `deadline`, the caller's deadline.
pub trait PluginCalls {
    /// `GetPreferredAllocation`.
    fn preferred(
        &self,
        question: &PreferenceQuery,
        deadline: Instant,
    ) -> impl Future<Output = Result<Vec<devlet_core::DeviceId>, CallError>> + Send;
    /// `Allocate`.
    fn allocate(
        &self,
        connection: ConnectionId,
        grant: &Grant,
        deadline: Instant,
    ) -> impl Future<Output = Result<Answer, CallError>> + Send;
}

/// Calls to plugins over gRPC.
#[derive(Debug, Clone, Copy)]
pub struct GrpcPluginCalls<'a> {
    pub store: &'a Store,
    pub plugins: &'a PluginClients,
    pub config: &'a Config,
    pub metrics: &'a Metrics,
}

impl PluginCalls for GrpcPluginCalls<'_> {
    async fn preferred(
        &self,
        question: &PreferenceQuery,
        deadline: Instant,
    ) -> Result<Vec<devlet_core::DeviceId>, CallError> {
        let call_deadline = CallDeadline {
            own: self.config.deadlines.preferred,
            caller: Some(deadline),
        };
        match self.plugins.client(question.connection) {
            Some(client) => client.preferred(question, call_deadline).await,
            None => Err(gone("GetPreferredAllocation")),
        }
    }

    async fn allocate(
        &self,
        connection: ConnectionId,
        grant: &Grant,
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        let Some(client) = self.plugins.client(connection) else {
            return Err(gone("Allocate"));
        };
        let call_deadline = CallDeadline {
            own: self.config.deadlines.allocate_of(&grant.resource),
            caller: Some(deadline),
        };
        let raw = client.allocate(&grant.devices, call_deadline).await?;
        Self::decode_answer(&raw).inspect_err(|error| client.calls().failed(error))
    }
}

impl GrpcPluginCalls<'_> {
    /// Decodes and checks a plugin's answer.
    fn decode_answer(raw: &[u8]) -> Result<Answer, CallError> {
        let invalid = |problem| CallError::Invalid {
            method: "Allocate",
            problem,
        };
        let damaged = |error: InvalidResponse| invalid(InvalidAnswer::Damaged(error.to_string()));
        let answer = store::answer(raw).map_err(damaged)?;
        limits::check_answer(&answer.options()).map_err(|exceeded| invalid(exceeded.into()))?;
        answer::check(&answer.options())
            .map_err(|reason| invalid(InvalidAnswer::Impossible(reason.to_string())))?;
        Ok(answer)
    }
}

fn gone(method: &'static str) -> CallError {
    CallError::Gone { method }
}

/// Admits a pod. `waiting` is told each time what is being waited for; its answer is dropped when that has ended.
///
/// Returns once the allocation is on disk. On any error all devices are free again, and claims are on their way to be
/// unprepared. `give_up` ends the admission
/// as long as nothing is being written; from then on the answer is what became of the write. A caller that drops
/// this future while the pod is being written does not get to know that it is admitted.
pub async fn admit<W>(
    store: &Store,
    calls: &impl PluginCalls,
    claims: &Claims<impl DriverCalls + 'static>,
    request: &PodRequest,
    deadline: Instant,
    give_up: &CancellationToken,
    mut waiting: impl FnMut(&ReserveError) -> W,
) -> Result<Pod, AdmitError> {
    let started = Instant::now();
    let mut changes = store.changes();
    let mut vanished = 0;
    let mut unresponsive = BTreeSet::new();
    loop {
        // What changes from here on is not missed.
        changes.mark_seen();
        let attempted = tokio::select! {
            // What was given up before it began changes nothing.
            biased;
            () = give_up.cancelled() => return Err(AdmitError::GivenUp),
            attempted = attempt(store, calls, claims, request, deadline, &mut unresponsive, &mut waiting) => attempted?,
        };
        let reason = match attempted {
            Attempt::Admitted(pod) => return Ok(*pod),
            Attempt::Agreed { held, answers } => {
                let committed = held.commit_with(request, answers, |write| written(deadline, write));
                match committed.await {
                    Err(CommitError::Vanished { resource }) => {
                        vanished += 1;
                        if vanished == ATTEMPTS {
                            return Err(AdmitError::Vanishing { resource });
                        }
                        continue;
                    }
                    committed => return Ok(committed?),
                }
            }
            Attempt::Unprepared(reason) => {
                let waited = started.elapsed();
                return Err(AdmitError::TimedOut { waited, reason });
            }
            Attempt::Wait(reason) => reason,
        };
        let mut until = deadline;
        if reason.awaits_record() {
            claims.wake();
            until = deadline.max(started + MIN_CALL_TIME);
        }
        let _waits = waiting(&reason);
        if !changed_by(until, &mut changes, give_up).await? {
            let waited = started.elapsed();
            return Err(AdmitError::TimedOut { waited, reason });
        }
    }
}

/// Waits for a change of the node. Returns `false` if `until` passes first, or the store has stopped.
async fn changed_by(
    until: Instant,
    changes: &mut Changes,
    give_up: &CancellationToken,
) -> Result<bool, AdmitError> {
    // Changes in quick succession must not extend the deadline.
    if Instant::now() >= until {
        return Ok(false);
    }
    tokio::select! {
        changed = timeout_at(until, changes.changed()) => Ok(matches!(changed, Ok(Ok(())))),
        () = give_up.cancelled() => Err(AdmitError::GivenUp),
    }
}

enum Attempt {
    /// It has everything already.
    Admitted(Box<Pod>),
    /// All plugins agreed: it only has to be written down.
    Agreed {
        held: Box<Held>,
        answers: Vec<(Answer, bool)>,
    },
    Wait(ReserveError),
    /// Its claims are not prepared, and there is no time left.
    Unprepared(ReserveError),
}

/// Why what was set aside is given back.
enum Stopped {
    Unprepared(ReserveError),
    Failed(AdmitError),
}

async fn attempt<W>(
    store: &Store,
    calls: &impl PluginCalls,
    claims: &Claims<impl DriverCalls + 'static>,
    request: &PodRequest,
    deadline: Instant,
    unresponsive: &mut BTreeSet<ConnectionId>,
    waiting: &mut impl FnMut(&ReserveError) -> W,
) -> Result<Attempt, AdmitError> {
    let held = match hold(store, calls, request, deadline, unresponsive).await {
        Ok(Hold::Held(held)) => held,
        Ok(Hold::Complete(pod)) => return Ok(Attempt::Admitted(pod)),
        Ok(Hold::Query(_)) => return Ok(Attempt::Wait(ReserveError::InFlight)),
        Err(HoldError::Refused(reason)) if reason.waiting_helps() => return Ok(Attempt::Wait(reason)),
        Err(HoldError::Refused(refused)) => return Err(AdmitError::Refused(refused)),
        Err(HoldError::Write(error)) => return Err(CommitError::Write(error).into()),
    };
    let grants = &held.reservation().grants;
    let Some(plugins) = held.plugins() else {
        return Ok(Attempt::Wait(ReserveError::InFlight));
    };
    let allocating = try_join_all(grants.iter().zip(plugins).map(async |(grant, plugin)| {
        let answer = calls.allocate(plugin.connection, grant, deadline).await;
        let named = |problem| AdmitError::Plugin {
            resource: grant.resource.clone(),
            endpoint: plugin.endpoint.clone(),
            problem,
        };
        let pre_start = plugin.options.pre_start_required;
        answer.map(|answer| (answer, pre_start)).map_err(named)
    }));
    let preparing = async {
        // A driver that is connected has that long, as plugins have.
        let deadline = deadline.max(Instant::now() + MIN_CALL_TIME);
        let prepared = claims.prepare(&held, deadline, waiting).await;
        prepared.map_err(|error| match error {
            PrepareError::TimedOut(waits) => Stopped::Unprepared(ReserveError::NotPrepared { waits }),
            PrepareError::Write(error) => Stopped::Failed(CommitError::Write(error).into()),
        })
    };
    let allocating = async { allocating.await.map_err(Stopped::Failed) };
    let answers = match tokio::try_join!(allocating, preparing) {
        Ok((answers, ())) => answers,
        Err(Stopped::Unprepared(reason)) => return Ok(Attempt::Unprepared(reason)),
        // The plugin died under the call: another one may come.
        Err(Stopped::Failed(AdmitError::Plugin {
            resource, problem, ..
        })) if problem.is_gone() => {
            return Ok(Attempt::Wait(ReserveError::NotServed { resource, last: None }));
        }
        Err(Stopped::Failed(error)) => return Err(error),
    };
    Ok(Attempt::Agreed { held, answers })
}

/// Reserves the pod's devices and claims, after the plugins that want to be asked have returned their preferences. A plugin
/// that returns an error has no preference. One that does not answer becomes `unresponsive`, and is not asked again.
async fn hold(
    store: &Store,
    calls: &impl PluginCalls,
    request: &PodRequest,
    deadline: Instant,
    unresponsive: &mut BTreeSet<ConnectionId>,
) -> Result<Hold, HoldError> {
    let mut preferences = Preferences::new();
    loop {
        let query = match store.hold_or_query(request, &preferences)? {
            Hold::Query(query) => query,
            hold => return Ok(hold),
        };
        let mut preferred = Vec::new();
        if !unresponsive.contains(&query.connection) {
            // Half of the time that is left, because an admission does not depend on preferences.
            let left = deadline.saturating_duration_since(Instant::now());
            match calls.preferred(&query, Instant::now() + left / 2).await {
                Ok(devices) => preferred = devices,
                Err(error) => {
                    tracing::warn!(resource = %query.resource, %error, "GetPreferredAllocation failed");
                    if error.is_timeout() {
                        unresponsive.insert(query.connection);
                    }
                }
            }
        }
        preferences.insert((query.container, query.resource), preferred);
    }
}

#[cfg(test)]
mod tests;
