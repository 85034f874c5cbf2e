//! The pods of the node: admitted when they appear, removed when they are gone or have ended.
//!
//! A pod has a worker while devlet and the API server disagree about it. The record of the node says whether a pod is
//! admitted, so pods without devices and admitted pods cost nothing here. Nothing is removed because it is absent before the
//! first complete list.

mod object;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devlet_agent::agent::Agent;
use devlet_agent::manifest::UnresolvedPod;
use devlet_core::{DriverName, Node, PodUid, ResourceName, Source};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::Mode;
use crate::claims::ApiClaims;
use crate::connection::Connection;
use crate::events::{Events, PodRef};
use crate::health::SeenPods;
use crate::watch::{self as objects, Change};
use object::{Stage, WatchedPod};

/// Changes that wait for the reconciler. Then the watch is not read on.
const MAX_QUEUED: usize = 64;

const NOT_ADMITTED: &str = "not admitted: devlet observes only, so admit it over devlet's API";

/// The parts that workers use.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) agent: Agent,
    pub(crate) connection: Connection,
    pub(crate) claims: ApiClaims,
    pub(crate) events: Events,
    pub(crate) mode: Mode,
    /// `true` if deleted pods are deleted from the API server once their claims are unprepared.
    pub(crate) final_delete: bool,
    /// `true` if claims, and resources without a plugin of devlet, are a kubelet's.
    pub(crate) beside_kubelet: bool,
    /// The pods whose devices have a health that is reported.
    pub(crate) seen: SeenPods,
    /// The number of complete lists.
    pub(crate) lists: watch::Sender<u64>,
}

/// Follows the pods of a node until devlet stops.
pub(crate) async fn run(context: Context, node: String) {
    let (agent, stop) = (context.agent.clone(), context.agent.stopping());
    let (sender, mut changes) = mpsc::channel(MAX_QUEUED);
    let fields = format!("spec.nodeName={node}");
    let connection = context.connection.clone();
    let mut node_changes = agent.store().subscribe();
    agent.spawn(objects::follow("pods", agent.clone(), connection, fields, sender));
    let mut pods = Pods {
        context: Arc::new(context),
        unsettled: BTreeMap::new(),
        workers: JoinSet::new(),
        list: None,
        passed_over: BTreeMap::new(),
        resources: BTreeSet::new(),
    };
    loop {
        tokio::select! {
            change = changes.recv() => match change {
                Some(change) => pods.changed(change),
                None => return,
            },
            Some(ended) = pods.workers.join_next() => if let Ok(ended) = ended {
                pods.ended(ended);
            },
            Ok(()) = node_changes.changed(), if !pods.passed_over.is_empty() => pods.look_again(),
            () = stop.cancelled() => return,
        }
    }
}

/// The state that a pod shall have here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// With its devices and claims.
    Admitted(UnresolvedPod),
    /// Gone.
    Removed(Removal),
}

/// A removal of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Removal {
    pub(crate) pod: PodRef,
    /// The drivers that the removal abandons.
    pub(crate) abandoned: BTreeSet<DriverName>,
    /// `true` if the Pod object is deleted afterwards.
    pub(crate) deletes_object: bool,
}

/// A pod with a worker.
struct Unsettled {
    target: Arc<Target>,
    /// Ends the worker. The next one starts when it has ended.
    cancel: CancellationToken,
    /// Ends a pause of the worker, because the API server has reported the pod again.
    wake: Arc<Notify>,
}

/// A list in progress.
struct List {
    /// Admissions before the list was requested.
    asked: u64,
    seen: BTreeSet<PodUid>,
}

struct Pods {
    context: Arc<Context>,
    unsettled: BTreeMap<PodUid, Unsettled>,
    workers: JoinSet<(PodUid, Arc<Target>)>,
    list: Option<List>,
    /// Beside a kubelet: pods with resources that no plugin of devlet has served. They may be of a plugin that comes later.
    passed_over: BTreeMap<PodUid, WatchedPod>,
    /// Beside a kubelet: the resources that counted when the pods were passed over.
    resources: BTreeSet<ResourceName>,
}

impl Pods {
    fn changed(&mut self, change: Change<WatchedPod>) {
        match change {
            Change::ListBegin => {
                self.list = Some(List {
                    asked: self.read(Node::admissions),
                    seen: BTreeSet::new(),
                });
            }
            Change::ListEnd => {
                if let Some(list) = self.list.take() {
                    self.remove_missing(&list);
                    self.context.seen.retain(|uid| list.seen.contains(uid));
                    self.passed_over.retain(|uid, _| list.seen.contains(uid));
                    self.context.lists.send_modify(|lists| *lists += 1);
                }
            }
            Change::Present(pod) => {
                if let Some(known) = pod.identity() {
                    if let Some(list) = &mut self.list {
                        list.seen.insert(known.uid.clone());
                    }
                    let status = pod.status.clone();
                    self.present(known.clone(), pod);
                    if self.unsettled.contains_key(&known.uid) || self.is_admitted(&known.uid) {
                        self.context.seen.put(known, status);
                    }
                }
            }
            Change::Deleted(pod) => {
                if let Some(known) = pod.identity() {
                    self.context.seen.remove(&known.uid);
                    self.passed_over.remove(&known.uid);
                    self.gone(known, pod.abandoned);
                }
            }
        }
    }

    fn present(&mut self, known: PodRef, pod: WatchedPod) {
        self.passed_over.remove(&known.uid);
        match pod.stage {
            Stage::Ended { is_deleted } => self.has_ended(known, pod, is_deleted),
            Stage::Active | Stage::Terminating { .. } if self.is_admitted(&known.uid) => {
                self.settle(&known.uid);
            }
            // Without its devices, it has not been started here.
            Stage::Terminating { has_started } => self.has_ended(known, pod, !has_started),
            Stage::Active => match self.unresolved(pod.clone()) {
                Ok(wanted) if !wanted.needs_anything() => {
                    if self.context.beside_kubelet && self.wants_others(&pod) {
                        self.passed_over.insert(known.uid.clone(), pod);
                    }
                    self.settle(&known.uid);
                }
                Ok(_) if self.context.mode == Mode::Observe => {
                    self.context.waits(&known, NOT_ADMITTED.to_owned());
                }
                Ok(pod) => self.set(known.uid, Target::Admitted(pod)),
                Err(problem) => self.context.waits(&known, problem),
            },
        }
    }

    /// Removes a pod whose containers have ended for good, and its object if that `is_deletable`.
    fn has_ended(&mut self, known: PodRef, pod: WatchedPod, is_deletable: bool) {
        let deletes_object = is_deletable && self.context.final_delete && self.needs_devices(&pod);
        let is_unsettled = self.target(&known.uid).is_some();
        if deletes_object || is_unsettled || self.is_held(&known.uid, &pod.abandoned) {
            self.remove(Removal {
                pod: known,
                abandoned: pod.abandoned,
                deletes_object,
            });
        } else {
            self.settle(&known.uid);
        }
    }

    /// Removes a pod that does not exist any longer.
    fn gone(&mut self, pod: PodRef, abandoned: BTreeSet<DriverName>) {
        let is_leaving = match self.target(&pod.uid) {
            Some(Target::Removed(removal)) => abandoned.is_subset(&removal.abandoned),
            Some(Target::Admitted(_)) => false,
            None => {
                self.context.settled(&pod.uid);
                !self.is_held(&pod.uid, &abandoned)
            }
        };
        if !is_leaving {
            self.remove(Removal {
                pod,
                abandoned,
                deletes_object: false,
            });
        }
    }

    /// Removes the pods that are not on a complete list.
    fn remove_missing(&mut self, list: &List) {
        let mut missing: BTreeSet<PodUid> = BTreeSet::new();
        if self.context.mode == Mode::Agent {
            missing.extend(self.context.agent.missing_in(&list.seen, list.asked));
        }
        missing.extend(self.unsettled.keys().cloned());
        let waiting = self
            .context
            .agent
            .cluster()
            .read(|state| state.waiting.keys().cloned().collect::<Vec<_>>());
        missing.extend(waiting);
        for uid in missing.difference(&list.seen) {
            let name = self.read(|node| node.name_of(uid).cloned());
            let pod = PodRef {
                name: name.unwrap_or_default(),
                uid: uid.clone(),
            };
            self.gone(pod, BTreeSet::new());
        }
    }

    /// Decides again about the pods that were passed over, if a plugin has registered for a new resource.
    fn look_again(&mut self) {
        let resources: BTreeSet<ResourceName> = self.read(Node::known_resources).into_keys().collect();
        let is_same = resources.is_subset(&self.resources);
        self.resources = resources;
        if is_same {
            return;
        }
        for pod in std::mem::take(&mut self.passed_over).into_values() {
            if let Some(known) = pod.identity() {
                self.present(known, pod);
            }
        }
    }

    /// Returns `true` if a pod wants devices of any resource.
    fn wants_others(&self, pod: &WatchedPod) -> bool {
        let foreign = &self.context.agent.config().foreign;
        let object = pod.object.clone().ok();
        let all = object.and_then(|object| object.into_unresolved(Source::Embedder, foreign).ok());
        all.is_some_and(|mut all| {
            all.retain_devices(|_| true);
            all.needs_anything()
        })
    }

    fn unresolved(&self, pod: WatchedPod) -> Result<UnresolvedPod, String> {
        let foreign = &self.context.agent.config().foreign;
        let unresolved = pod.object?.into_unresolved(Source::Embedder, foreign);
        let mut unresolved = unresolved.map_err(|problem| problem.to_string())?;
        if self.context.beside_kubelet {
            let known = self.read(Node::known_resources);
            unresolved.retain_devices(|resource| known.contains_key(resource));
        }
        Ok(unresolved)
    }

    fn needs_devices(&self, pod: &WatchedPod) -> bool {
        self.unresolved(pod.clone()).is_ok_and(|pod| pod.needs_anything())
    }

    /// Returns `true` if the pod has its devices. In the mode `agent`, a pod that a client of devlet's API has admitted, or
    /// that is imported, is admitted again: from then on it exists while the API server lists it.
    fn is_admitted(&self, uid: &PodUid) -> bool {
        let is_ours = |source| source == Source::Embedder || self.context.mode == Mode::Observe;
        self.read(|node| node.pod(uid).is_some_and(|pod| is_ours(pod.source)))
    }

    /// Returns `true` if a removal changes anything.
    fn is_held(&self, uid: &PodUid, abandoned: &BTreeSet<DriverName>) -> bool {
        self.read(|node| {
            let is_known = node.pod(uid).is_some() || node.is_in_flight(uid);
            let mut waits = node.pending_unprepare(uid).into_iter();
            is_known || waits.any(|wait| abandoned.contains(&wait.driver))
        })
    }

    fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        self.context.agent.store().read(question)
    }

    /// Forgets a pod that waits, because nothing is left to do.
    fn settle(&self, uid: &PodUid) {
        if self.target(uid).is_none() {
            self.context.settled(uid);
        }
    }

    /// Returns the target of the pod's worker.
    fn target(&self, uid: &PodUid) -> Option<&Target> {
        self.unsettled.get(uid).map(|unsettled| &*unsettled.target)
    }

    fn remove(&mut self, removal: Removal) {
        if self.context.mode == Mode::Agent {
            self.set(removal.pod.uid.clone(), Target::Removed(removal));
        }
    }

    fn set(&mut self, uid: PodUid, target: Target) {
        match self.unsettled.get_mut(&uid) {
            Some(unsettled) if *unsettled.target == target => unsettled.wake.notify_one(),
            Some(unsettled) => {
                unsettled.target = Arc::new(target);
                unsettled.cancel.cancel();
            }
            None => self.start(uid, Arc::new(target)),
        }
    }

    fn start(&mut self, uid: PodUid, target: Arc<Target>) {
        let (cancel, wake) = (CancellationToken::new(), Arc::new(Notify::new()));
        let (context, token) = (Arc::clone(&self.context), cancel.clone());
        let woken = Arc::clone(&wake);
        let (ended, work) = ((uid.clone(), Arc::clone(&target)), Arc::clone(&target));
        self.workers.spawn(async move {
            // In a box: most of the time a worker only sleeps.
            let working = Box::pin(async move { worker::reach(&context, &work, &woken).await });
            let _ = token.run_until_cancelled(working).await;
            ended
        });
        let unsettled = Unsettled { target, cancel, wake };
        self.unsettled.insert(uid, unsettled);
    }

    /// Ends the bookkeeping of a worker, or starts the next one if the target has changed meanwhile.
    fn ended(&mut self, (uid, reached): (PodUid, Arc<Target>)) {
        let Some(Unsettled { target, .. }) = self.unsettled.remove(&uid) else {
            return;
        };
        if Arc::ptr_eq(&target, &reached) {
            self.context.settled(&uid);
        } else {
            self.start(uid, target);
        }
    }
}
