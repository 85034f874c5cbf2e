//! The pods of the node: admitted when they appear, removed when they are gone or have ended.
//!
//! A pod has a worker while devlet and the API server disagree about it. The record of the node says whether a pod is
//! admitted, so pods without devices and admitted pods cost nothing here. Nothing is removed because it is absent before the
//! first complete list.

mod object;
mod owner;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::display::pod_label;
use devlet_agent::manifest::UnresolvedPod;
use devlet_core::{DriverName, Node, Pod, PodUid, ResourceName, Source};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::Mode;
use crate::claims::ApiClaims;
use crate::connection::Connection;
use crate::events::{Events, Kind, PodRef};
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
    /// Name of the Node object.
    pub(crate) node: String,
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
pub(crate) async fn run(context: Context) {
    let (agent, stop) = (context.agent.clone(), context.agent.stopping());
    let (sender, mut changes) = mpsc::channel(MAX_QUEUED);
    let fields = format!("spec.nodeName={}", context.node);
    let connection = context.connection.clone();
    let mut node_changes = agent.store().subscribe();
    agent.spawn(objects::follow("pods", agent.clone(), connection, fields, sender));
    let mut pods = Pods::new(context);
    loop {
        tokio::select! {
            change = changes.recv() => match change {
                Some(change) => pods.changed(change).await,
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
    /// With them until its containers have ended.
    Ending(Ending),
    /// Gone.
    Removed(Removal),
}

impl Target {
    /// Returns `true` if the other target differs at most in labels, which do not interrupt an admission.
    fn needs_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Admitted(pod), Self::Admitted(other)) => {
                let mut other = other.clone();
                let labels = &pod.request.metadata.labels;
                other.request.metadata.labels.clone_from(labels);
                *pod == other
            }
            (one, other) => one == other,
        }
    }
}

/// A pod that is being deleted, and whose containers have not been reported as terminated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    pub(crate) removal: Removal,
    /// Time that its containers have to end.
    pub(crate) grace: Duration,
    /// `true` if it is removed after that time, because no container is reported as running.
    pub(crate) is_idle: bool,
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
    fn new(context: Context) -> Self {
        Self {
            context: Arc::new(context),
            unsettled: BTreeMap::new(),
            workers: JoinSet::new(),
            list: None,
            passed_over: BTreeMap::new(),
            resources: BTreeSet::new(),
        }
    }

    async fn changed(&mut self, change: Change<WatchedPod>) {
        match change {
            Change::ListBegin => {
                self.list = Some(List {
                    asked: self.read(Node::admissions),
                    seen: BTreeSet::new(),
                });
            }
            Change::ListEnd => {
                if let Some(list) = self.list.take() {
                    let is_ours = owner::is_ours(&self.context, &list).await;
                    self.remove_missing(&list, is_ours);
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
            Stage::Active if self.read(|node| is_settled(node, &known.uid, self.context.mode)) => {
                self.settle(&known.uid);
            }
            Stage::Terminating { is_idle, grace, .. } if self.is_admitted(&known.uid) => {
                self.ends(known, pod, grace, is_idle);
            }
            // Without its devices, it has not been started here.
            Stage::Terminating { has_started, .. } => self.has_ended(known, pod, !has_started),
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
                Err(problem) => self.cannot_read(&known, problem),
            },
        }
    }

    /// Reports a pod that cannot be read, once for each reason.
    fn cannot_read(&self, pod: &PodRef, problem: String) {
        if self.context.waits(pod, problem.clone()) && self.context.mode == Mode::Agent {
            let PodRef { name, uid } = pod;
            tracing::warn!(pod = %pod_label(name), %uid, %problem, "pod not admitted: it cannot be read");
            let events = &self.context.events;
            events.record(pod, Kind::Warning, worker::ADMISSION, problem);
        }
    }

    /// Keeps the devices of a pod until its containers have ended.
    fn ends(&mut self, known: PodRef, pod: WatchedPod, grace: Duration, is_idle: bool) {
        if self.context.mode == Mode::Observe {
            return self.settle(&known.uid);
        }
        let removal = Removal {
            pod: known.clone(),
            deletes_object: self.context.final_delete && self.needs_devices(&pod),
            abandoned: pod.abandoned,
        };
        let ending = Ending {
            removal,
            grace,
            is_idle,
        };
        self.set(known.uid, Target::Ending(ending));
    }

    /// Removes a pod whose containers have ended for good, and its object if that `is_deletable`.
    fn has_ended(&mut self, known: PodRef, pod: WatchedPod, is_deletable: bool) {
        let removal = match self.target(&known.uid) {
            Some(Target::Removed(removal)) => Some(removal),
            Some(Target::Ending(ending)) if ending.is_idle => Some(&ending.removal),
            _ => None,
        };
        let removal = removal.filter(|removal| removal.deletes_object && !self.is_admitted(&known.uid));
        let is_leaving = removal.is_some();
        // Its deletion has begun, and the first part of it is a change of the object.
        if removal.is_some_and(|removal| removal.abandoned == pod.abandoned) {
            return;
        }
        let deletes_object =
            is_leaving || (is_deletable && self.context.final_delete && self.needs_devices(&pod));
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
            Some(Target::Admitted(_) | Target::Ending(_)) => false,
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

    /// Removes the pods that are not on a complete list. Of another cluster, it says nothing about pods on record.
    fn remove_missing(&mut self, list: &List, is_ours: bool) {
        let mut missing: BTreeSet<PodUid> = BTreeSet::new();
        if self.context.mode == Mode::Agent && is_ours {
            missing.extend(self.context.agent.missing_in(&list.seen, list.asked));
        }
        missing.extend(self.unsettled.keys().cloned());
        let waiting = self
            .context
            .agent
            .cluster()
            .read(|state| state.waiting.keys().cloned().collect::<Vec<_>>());
        missing.extend(waiting);
        missing.retain(|uid| is_ours || self.read(|node| node.pod(uid).is_none()));
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

    /// Returns `true` if the pod needs devices or claims, or cannot be read.
    fn needs_devices(&self, pod: &WatchedPod) -> bool {
        self.unresolved(pod.clone())
            .map_or(true, |pod| pod.needs_anything())
    }

    /// Returns `true` if the pod has devices or claims here.
    fn is_admitted(&self, uid: &PodUid) -> bool {
        self.read(|node| is_admitted(node, uid, self.context.mode))
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
            // The next worker writes the labels.
            Some(unsettled) if unsettled.target.needs_same(&target) => {
                unsettled.target = Arc::new(target);
                unsettled.wake.notify_one();
            }
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

/// Returns `true` if the pod has its devices. In the mode `agent`, a pod that a client of devlet's API has admitted, or
/// that is imported, is admitted again: from then on it exists while the API server lists it.
fn is_admitted(node: &Node, uid: &PodUid, mode: Mode) -> bool {
    let is_ours = |source| source == Source::Embedder || mode == Mode::Observe;
    node.pod(uid).is_some_and(|pod| is_ours(pod.source))
}

/// Returns `true` if nothing is left to do for an active pod. One from before the last boot is admitted again, which prepares
/// its claims.
fn is_settled(node: &Node, uid: &PodUid, mode: Mode) -> bool {
    let is_current = |pod: &Pod| mode == Mode::Observe || !pod.before_reboot;
    is_admitted(node, uid, mode) && node.pod(uid).is_some_and(is_current)
}

#[cfg(test)]
mod tests;
