//! Admitting a pod: everything it asks for, or nothing.
//!
//! 1. If a resource has no plugin yet, or its plugin has not listed a healthy device yet, wait for that, up to the
//!    caller's deadline. The same if other admissions that have not ended have reserved the devices.
//! 2. Ask plugins that want to be asked which devices they would choose. Advice is only a sort order: stale or
//!    missing advice is harmless, so no lock is held while it is given.
//! 3. Set the devices aside for all containers at once, and join the claims.
//! 4. Call `Allocate` on all plugins at the same time, each with its deadline. Meanwhile, drivers prepare the claims, once
//!    it is on disk that they are to: see [`super::claims`].
//! 5. Write the pod down, then answer.
//!
//! The caller's deadline bounds all of it; 5 has at least a second, and goes on if the disk does not answer in time. A plugin has as long as its own deadline says, or as the caller has
//! left. One that was silent when it was asked for advice is not asked again by the same admission.
//!
//! Whatever goes wrong before 5, and if the caller leaves, the devices are free again, and the claims are unprepared
//! without anybody waiting for it: the reservation undoes itself when it is dropped.

use std::collections::BTreeSet;
use std::time::Duration;

use devlet_core::device_plugin::ledger::Grant;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::{ConnectionId, Pod, PodRequest, PreferenceQuery, Preferences, ReserveError, ResourceName};
use devlet_kubelet_files::device_plugin::response::InvalidResponse;
use futures_util::future::try_join_all;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::claims::{Claims, PrepareError};
use super::written;
use crate::config::Config;
use crate::device_plugin::answer;
use crate::device_plugin::clients::PluginClients;
use crate::dra::DriverCalls;
use crate::grpc::call::{CallDeadline, CallError, InvalidAnswer, MIN_CALL_TIME, seconds};
use crate::limits;
use crate::metrics::Metrics;
use crate::store::{self, CommitError, Held, Hold, HoldError, Store};

/// How often devices that vanish while a plugin is being called are chosen anew.
const ATTEMPTS: usize = 5;

/// Why a pod was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    /// It cannot have what it asks for.
    #[error(transparent)]
    Refused(ReserveError),
    /// What it waited for did not come.
    #[error("gave up after {}: {reason}", seconds(*.waited))]
    TimedOut {
        /// How long it waited.
        waited: Duration,
        /// For what.
        reason: ReserveError,
    },
    /// A plugin said no, or nothing.
    #[error("device plugin of {resource} at {endpoint}: {problem}")]
    Plugin {
        /// The resource.
        resource: ResourceName,
        /// Where the plugin answers.
        endpoint: String,
        /// What happened.
        problem: CallError,
    },
    /// Whoever asked does not want to wait any longer.
    #[error("the admission was given up: devlet is stopping, or the caller has left")]
    GivenUp,
    /// Devices kept vanishing while their plugin was being called.
    #[error("devices of {resource} vanished while their plugin was being called, {ATTEMPTS} times in a row")]
    Vanishing {
        /// The resource.
        resource: ResourceName,
    },
    /// It could not be written down.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// The calls that an admission makes. None may last beyond `deadline`, which is the caller's.
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

/// Calls to real plugins.
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
        let patience = CallDeadline {
            own: self.config.deadlines.preferred,
            caller: Some(deadline),
        };
        match self.plugins.client(question.connection) {
            Some(client) => client.preferred(question, patience).await,
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
        let patience = CallDeadline {
            own: self.config.deadlines.allocate_of(&grant.resource),
            caller: Some(deadline),
        };
        let raw = client.allocate(&grant.devices, patience).await?;
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
    let mut changes = store.subscribe();
    let mut vanished = 0;
    let mut unresponsive = BTreeSet::new();
    loop {
        // What changes from here on is not missed.
        changes.borrow_and_update();
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
            claims.hurry();
            until = deadline.max(started + MIN_CALL_TIME);
        }
        let _waits = waiting(&reason);
        let changed = tokio::select! {
            changed = timeout_at(until, changes.changed()) => changed,
            () = give_up.cancelled() => return Err(AdmitError::GivenUp),
        };
        match changed {
            Ok(Ok(())) => {}
            // The store has stopped, or time is up.
            Ok(Err(_)) | Err(_) => {
                return Err(AdmitError::TimedOut {
                    waited: started.elapsed(),
                    reason,
                });
            }
        }
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
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
    use devlet_core::device_plugin::list::{Device, DeviceList};
    use devlet_core::{ContainerKind, ContainerRequest, DeviceId, PodMetadata, PodName, PodUid, Source};
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::dra::clients::DriverClients;
    use crate::store::OpenOptions;

    const GPU: &str = "acme.com/gpu";

    fn node_with_one_gpu(directory: &tempfile::TempDir) -> Store {
        node_with_gpus(directory, 1, PluginOptions::default())
    }

    fn node_with_gpus(directory: &tempfile::TempDir, count: usize, plugin: PluginOptions) -> Store {
        let options = OpenOptions::new(directory.path().join("state.redb"), "boot".to_owned());
        let (store, _) = Store::open(options).unwrap();
        let offer = Offer {
            resource: GPU.into(),
            endpoint: "gpu.sock".into(),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            options: plugin,
        };
        let device = |number: usize| Device {
            id: DeviceId::from(format!("gpu{number}")),
            healthy: true,
            nodes: Vec::new(),
        };
        let devices = (0..count).map(device).collect();
        let now = store.now();
        store.update(|node| {
            let (connection, _) = node.plugin_connected(offer, now).unwrap();
            node.devices_listed(connection, DeviceList::new(devices).0);
        });
        store
    }

    fn wants_a_gpu(uid: &str) -> PodRequest {
        PodRequest {
            uid: PodUid::from(uid),
            name: PodName {
                namespace: "default".into(),
                name: uid.into(),
            },
            source: Source::Api,
            fingerprint: 1,
            metadata: PodMetadata::default(),
            containers: vec![ContainerRequest {
                name: "main".into(),
                kind: ContainerKind::App,
                wants: BTreeMap::from([(GPU.into(), 1)]),
                claims: Vec::new(),
            }],
            claims: Vec::new(),
        }
    }

    fn free(store: &Store) -> usize {
        let now = store.now();
        store.read(|node| node.capacity_of(&GPU.into(), now).free)
    }

    fn no_drivers(store: &Store) -> Claims<DriverClients> {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let drivers = DriverClients::new(Arc::new(Config::new("")));
        let metrics = Metrics::default();
        Claims::new(store.clone(), drivers, metrics, tasks, stop, usize::MAX)
    }

    /// A plugin that answers.
    struct Answering;

    impl PluginCalls for Answering {
        async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
            panic!("the plugin does not want to be asked")
        }

        async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
            Ok(store::answer(&b""[..]).unwrap())
        }
    }

    #[tokio::test]
    async fn an_admission_takes_the_state_lock_three_times() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_one_gpu(&directory);
        let request = wants_a_gpu("a");
        let (claims, give_up) = (no_drivers(&store), CancellationToken::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        let before = store.locks();
        let admitted = admit(&store, &Answering, &claims, &request, deadline, &give_up, |_| {}).await;
        // To reserve, to begin the commit, and to finish it. The API reads the pod once more for its answer.
        let locks = store.locks() - before;
        admitted.unwrap();
        assert_eq!(locks, 3);
    }

    /// A plugin that gives up for its caller when it is called, and then answers or not.
    struct GivingUp {
        token: CancellationToken,
        answers: bool,
    }

    impl PluginCalls for GivingUp {
        async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
            Ok(Vec::new())
        }

        async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
            self.token.cancel();
            if !self.answers {
                std::future::pending::<()>().await;
            }
            Ok(Answer::default())
        }
    }

    async fn admit_with(store: &Store, answers: bool, uid: &str) -> Result<Pod, AdmitError> {
        let token = CancellationToken::new();
        let calls = GivingUp {
            token: token.clone(),
            answers,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        admit(
            store,
            &calls,
            &no_drivers(store),
            &wants_a_gpu(uid),
            deadline,
            &token,
            |_| {},
        )
        .await
    }

    /// A plugin that never gives advice, and allocates at once.
    #[derive(Default)]
    struct NoAdvice {
        asked: std::sync::atomic::AtomicUsize,
    }

    impl PluginCalls for NoAdvice {
        async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
            self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Err(CallError::TimedOut {
                method: "GetPreferredAllocation",
                deadline: Duration::from_secs(10),
            })
        }

        async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
            Ok(Answer::default())
        }
    }

    #[tokio::test]
    async fn a_plugin_that_is_silent_is_asked_once_whatever_the_number_of_containers() {
        let directory = tempfile::tempdir().unwrap();
        let options = PluginOptions {
            preferred_allocation: true,
            ..PluginOptions::default()
        };
        let store = node_with_gpus(&directory, 8, options);
        let mut request = wants_a_gpu("a");
        for name in ["second", "third"] {
            let container = request.containers[0].clone();
            request.containers.push(ContainerRequest {
                name: name.into(),
                ..container
            });
        }
        let calls = NoAdvice::default();
        let deadline = Instant::now() + Duration::from_secs(60);
        let never = CancellationToken::new();

        let pod = admit(
            &store,
            &calls,
            &no_drivers(&store),
            &request,
            deadline,
            &never,
            |_| {},
        )
        .await
        .unwrap();

        assert_eq!(pod.allocations.len(), 3);
        assert_eq!(calls.asked.into_inner(), 1);
    }

    /// A plugin that holds up its first call until it is told to refuse it, and agrees to all others.
    #[derive(Default)]
    struct RefusesTheFirst {
        called: CancellationToken,
        refuse: CancellationToken,
    }

    impl PluginCalls for RefusesTheFirst {
        async fn preferred(&self, _: &PreferenceQuery, _: Instant) -> Result<Vec<DeviceId>, CallError> {
            Ok(Vec::new())
        }

        async fn allocate(&self, _: ConnectionId, _: &Grant, _: Instant) -> Result<Answer, CallError> {
            if self.called.is_cancelled() {
                return Ok(Answer::default());
            }
            self.called.cancel();
            self.refuse.cancelled().await;
            let (method, problem) = ("Allocate", InvalidAnswer::NoContainer);
            Err(CallError::Invalid { method, problem })
        }
    }

    #[tokio::test]
    async fn a_pod_gets_the_devices_of_an_admission_that_fails() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_one_gpu(&directory);
        let (calls, drivers, never) = (
            RefusesTheFirst::default(),
            no_drivers(&store),
            CancellationToken::new(),
        );
        let deadline = Instant::now() + Duration::from_secs(60);
        let (first, second) = (wants_a_gpu("a"), wants_a_gpu("b"));

        let fails = admit(&store, &calls, &drivers, &first, deadline, &never, |_| {});
        let waits = async {
            calls.called.cancelled().await;
            let refuse = |reason: &ReserveError| {
                assert!(matches!(reason, ReserveError::Reserved { .. }), "{reason}");
                calls.refuse.cancel();
            };
            admit(&store, &calls, &drivers, &second, deadline, &never, refuse).await
        };
        let (failed, admitted) = tokio::join!(fails, waits);

        assert!(matches!(failed, Err(AdmitError::Plugin { .. })), "{failed:?}");
        assert_eq!(admitted.unwrap().uid.as_str(), "b");
        let (third, past) = (wants_a_gpu("c"), Instant::now());
        let refused = admit(&store, &calls, &drivers, &third, past, &never, |_| {}).await;
        assert!(matches!(refused, Err(AdmitError::Refused(_))), "{refused:?}");
    }

    #[tokio::test]
    async fn a_pod_is_admitted_once_a_first_list_without_healthy_devices_is_followed_by_another() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_gpus(&directory, 0, PluginOptions::default());
        let (calls, drivers, never) = (NoAdvice::default(), no_drivers(&store), CancellationToken::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        let request = wants_a_gpu("a");

        let list_one = |reason: &ReserveError| {
            assert!(matches!(reason, ReserveError::NoHealthyDevice { .. }), "{reason}");
            store.update(|node| {
                let connection = node.serving(&GPU.into()).unwrap();
                let device = Device {
                    id: "gpu0".into(),
                    healthy: true,
                    nodes: Vec::new(),
                };
                node.devices_listed(connection, DeviceList::new(vec![device]).0);
            });
        };
        let pod = admit(&store, &calls, &drivers, &request, deadline, &never, list_one).await;

        assert_eq!(pod.unwrap().allocations.len(), 1);
    }

    #[tokio::test]
    async fn an_admission_that_is_given_up_frees_the_devices() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_one_gpu(&directory);
        let ended = admit_with(&store, false, "a").await;
        assert!(matches!(ended, Err(AdmitError::GivenUp)), "{ended:?}");
        assert_eq!(free(&store), 1);
    }

    #[tokio::test]
    async fn an_admission_that_was_given_up_before_it_began_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_one_gpu(&directory);
        let given_up = CancellationToken::new();
        given_up.cancel();
        let deadline = Instant::now() + Duration::from_secs(60);
        for round in 0..20 {
            let (calls, drivers, request) = (NoAdvice::default(), no_drivers(&store), wants_a_gpu("a"));
            let ended = admit(&store, &calls, &drivers, &request, deadline, &given_up, |_| {}).await;
            assert!(
                matches!(ended, Err(AdmitError::GivenUp)),
                "round {round}: {ended:?}"
            );
        }
    }

    #[tokio::test]
    async fn an_admission_that_is_given_up_at_the_last_moment_says_what_is_true() {
        let directory = tempfile::tempdir().unwrap();
        let store = node_with_one_gpu(&directory);
        for round in 0..20 {
            let uid = format!("pod-{round}");
            let admitted = admit_with(&store, true, &uid).await.is_ok();
            let uid = PodUid::from(uid.as_str());
            let held = store.read(|node| node.pod(&uid).is_some());
            assert_eq!(admitted, held, "round {round}");
            assert_eq!(free(&store), usize::from(!held), "round {round}");
            if held {
                store.release(&uid).await.unwrap();
            }
        }
    }
}
