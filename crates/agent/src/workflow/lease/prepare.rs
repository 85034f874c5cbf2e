//! `PreStartContainer`: calls the plugin, keeps its answer, and writes the CDI specs of the leases.
//!
//! ```text
//!   try of the kubelet ──► begin ──► Allocate ──► record ──► PreStartContainer ──► specs ──► end
//!       │                    ▲       (each lease without an answer)
//!       │ 1.7 s              └── waits for the preparation of an earlier try
//!       └──► error: not answered yet
//! ```
//!
//! The kubelet must get an answer within two seconds: a container that waits for it cannot be removed. A plugin has its usual
//! deadline. So the preparation is a task, which goes on after the kubelet has its error. It is the only one for
//! these devices until it ends. An answer to `Allocate` is on record as soon as it is there, and the kubelet's next try
//! finds it.
//!
//! A late success of the plugin's `PreStartContainer` serves the next try, unless a container with one of the devices
//! has been started since, or the devices were prepared for other leases, or the plugin is another process. Each
//! later start of the container calls the plugin again.

use std::collections::BTreeSet;
use std::time::Duration;

use devlet_core::device_plugin::ledger::Grant;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::shield::{Lease, PreStart, PrepareError};
use devlet_core::{Availability, ContainerKind, DeviceId, LeaseName, Node, PluginView, ResourceName};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::{LeaseWorkflow, serving};
use crate::deadline;
use crate::grpc::call::{CallDeadline, CallError};
use crate::lease::checkpoint::{self, UnusableCheckpoint};
use crate::lease::containers::RuntimeSilent;
use crate::lease::spec::{self, HookCommand, SpecError};
use crate::store::{PreparingLeases, WriteError};
use crate::workflow::admit::{GrpcPluginCalls, PluginCalls as _};

/// Time after which the kubelet gets an error. The preparation goes on.
const ANSWER_TIME: Duration = Duration::from_millis(1700);

/// Part of [`ANSWER_TIME`] that a preparation does not spend on waiting for plugins and containers.
const WRITE_TIME: Duration = Duration::from_millis(200);

/// Age up to which a late `PreStartContainer` serves a try. A kubelet pauses for up to 5 minutes between the starts of a
/// container that keeps failing.
const PRE_START_MS: u64 = 6 * 60 * 1000;

/// Why a lease is not prepared. The text reaches `kubectl describe pod`.
#[derive(Debug, thiserror::Error)]
pub enum PrepareLeaseError {
    /// A device is in use.
    #[error("devlet: {resource}: {reason}; tried again soon")]
    Refused {
        resource: ResourceName,
        reason: PrepareError,
    },
    /// A device may be in use, and the runtime does not tell.
    #[error("devlet: {resource}: {reason}; {silent}; tried again soon")]
    Silent {
        resource: ResourceName,
        reason: PrepareError,
        silent: RuntimeSilent,
    },
    /// The kubelet's checkpoint cannot be used to find the lease.
    #[error("devlet: {resource}: the lease is not known, and {reason}")]
    Checkpoint {
        resource: ResourceName,
        reason: UnusableCheckpoint,
    },
    /// No plugin serves the resource.
    #[error(
        "devlet: {resource}: no device plugin serves it{}; the container starts when it is back; check the plugin's pod",
        .last.as_deref().map_or_else(String::new, |socket| format!(", the last one at {socket} has left"))
    )]
    NotServed {
        resource: ResourceName,
        /// The socket of the last plugin.
        last: Option<String>,
    },
    /// The plugin has found its devices, and one is not among them.
    #[error(
        "devlet: {resource}: device {device} does not exist any more: its device plugin does not list it; delete the pod, \
         unless the device comes back"
    )]
    Absent {
        resource: ResourceName,
        device: DeviceId,
    },
    /// A call to the plugin failed.
    #[error("devlet: device plugin of {resource} at {endpoint}: {problem}; tried again soon")]
    Plugin {
        resource: ResourceName,
        /// The socket of the plugin.
        endpoint: String,
        problem: CallError,
    },
    /// A call to the plugin goes on.
    #[error(
        "devlet: device plugin of {resource}{}: {method} has not been answered yet; devlet still waits, and keeps the answer \
         for the next try{}",
        .endpoint.as_deref().map_or_else(String::new, |socket| format!(" at {socket}")),
        .before.as_deref().map_or_else(String::new, |failure| format!("; the call before failed: {failure}"))
    )]
    Unanswered {
        resource: ResourceName,
        /// The socket of the plugin.
        endpoint: Option<String>,
        method: &'static str,
        /// Why the preparation before it failed, if the kubelet did not get that as an answer.
        before: Option<String>,
    },
    /// The leases could not be read or written in time.
    #[error("devlet: {resource}: the disk has not answered yet; tried again soon")]
    Slow { resource: ResourceName },
    /// The answer could not be written.
    #[error("devlet: {resource}: {reason}; tried again soon")]
    Write {
        resource: ResourceName,
        reason: WriteError,
    },
    /// The CDI spec could not be written.
    #[error("devlet: {resource}: {reason}")]
    Spec {
        resource: ResourceName,
        reason: SpecError,
    },
    /// devlet stops.
    #[error("devlet is stopping; tried again soon")]
    Stopping,
}

/// The plugin's answers, by lease.
type Answers = Vec<(LeaseName, Answer)>;

/// A try of the kubelet to start a container with these devices.
#[derive(Debug, Clone)]
struct Try {
    workflow: LeaseWorkflow,
    resource: ResourceName,
    devices: BTreeSet<DeviceId>,
    /// When the kubelet gets an error.
    deadline: Instant,
}

impl LeaseWorkflow {
    /// Prepares all leases of these devices before a container starts. Returns within two seconds. The preparation may
    /// go on after that.
    pub async fn prepare(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<(), PrepareLeaseError> {
        let attempt = Try {
            workflow: self.clone(),
            resource: resource.clone(),
            devices: devices.clone(),
            deadline: Instant::now() + ANSWER_TIME,
        };
        let preparing = tokio::spawn(attempt.clone().run());
        match timeout_at(attempt.deadline, preparing).await {
            Ok(ended) => ended.unwrap_or(Err(PrepareLeaseError::Stopping)),
            Err(_) => Err(attempt.unfinished()),
        }
    }
}

impl Try {
    async fn run(self) -> Result<(), PrepareLeaseError> {
        let preparing = self.begin().await?;
        let prepared = self.finish(&preparing).await;
        if Instant::now() >= self.deadline {
            let resource = &self.resource;
            preparing.end_late(match &prepared {
                Ok(pre_start) => {
                    tracing::info!(%resource, "container prepared for the kubelet's next try");
                    Ok(*pre_start)
                }
                Err(error) => {
                    tracing::warn!(%resource, %error, "container not prepared");
                    Err(match error {
                        PrepareLeaseError::Plugin { problem, .. } => problem.to_string(),
                        error => error.to_string(),
                    })
                }
            });
        }
        prepared.map(drop)
    }

    /// Begins a preparation. Waits a moment for an earlier one of these devices, and for containers to end.
    async fn begin(&self) -> Result<PreparingLeases, PrepareLeaseError> {
        let store = &self.workflow.store;
        // Before the plugin is called: its answer could not be kept, and no container could start.
        store.health().map_err(|reason| self.not_written(reason))?;
        let mut changes = store.subscribe();
        let (mut has_learned, mut has_asked, mut has_buried) = (false, false, false);
        loop {
            changes.borrow_and_update();
            let reason = match store.prepare_leases(&self.resource, &self.devices) {
                Ok(preparing) => return Ok(preparing),
                Err(reason) => reason,
            };
            let waiting_helps = match &reason {
                PrepareError::Unknown if !has_learned => {
                    has_learned = true;
                    self.learn().await?;
                    continue;
                }
                PrepareError::Adopted { .. } | PrepareError::Unwitnessed { .. } if !has_asked => {
                    has_asked = true;
                    self.witness(reason).await?;
                    continue;
                }
                PrepareError::Running { .. } if !has_buried => {
                    has_buried = true;
                    if self.workflow.bury(&self.resource, &self.devices).await {
                        continue;
                    }
                    true
                }
                PrepareError::Running { .. }
                | PrepareError::Preparing { .. }
                | PrepareError::Ending { .. } => true,
                PrepareError::Unknown | PrepareError::Adopted { .. } | PrepareError::Unwitnessed { .. } => {
                    false
                }
            };
            if !waiting_helps || !self.waits_for(&mut changes).await {
                return Err(match reason {
                    PrepareError::Preparing { .. } if self.is_preparing() => self.unfinished(),
                    reason => PrepareLeaseError::Refused {
                        resource: self.resource.clone(),
                        reason,
                    },
                });
            }
        }
    }

    /// Asks the runtime about the leases that keep the devices from being prepared.
    async fn witness(&self, reason: PrepareError) -> Result<(), PrepareLeaseError> {
        let asked = self.workflow.witness_overlapping(&self.resource, &self.devices);
        asked.await.map_err(|silent| PrepareLeaseError::Silent {
            resource: self.resource.clone(),
            reason,
            silent,
        })
    }

    /// Asks the plugin, keeps its answers, and writes the specs. Returns the plugin's `PreStartContainer`, if it was called.
    async fn finish(&self, preparing: &PreparingLeases) -> Result<Option<PreStart>, PrepareLeaseError> {
        let (answers, pre_start) = self.ask(preparing).await?;
        self.write_specs(&preparing.leases, answers).await?;
        Ok(pre_start)
    }

    /// Waits for a change of the node. Returns `false` if the time of this try is over.
    async fn waits_for(&self, changes: &mut watch::Receiver<u64>) -> bool {
        let soon = self.deadline - WRITE_TIME;
        // Changes in quick succession must not extend it.
        Instant::now() < soon && matches!(timeout_at(soon, changes.changed()).await, Ok(Ok(())))
    }

    fn is_preparing(&self) -> bool {
        let store = &self.workflow.store;
        store.read(|node| node.leases().preparing(&self.resource, &self.devices).is_some())
    }

    /// Returns the error of a try whose preparation goes on.
    fn unfinished(&self) -> PrepareLeaseError {
        let store = &self.workflow.store;
        if let Err(reason) = store.health() {
            return self.not_written(reason);
        }
        let resource = self.resource.clone();
        store.read(|node| match node.leases().preparing(&resource, &self.devices) {
            Some(preparing) => PrepareLeaseError::Unanswered {
                endpoint: serving(node, &resource).map(|plugin| plugin.endpoint),
                method: match preparing.lacks_answers {
                    true => "Allocate",
                    false => "PreStartContainer",
                },
                before: preparing.failure.map(str::to_owned),
                resource,
            },
            None => PrepareLeaseError::Slow { resource },
        })
    }

    fn not_written(&self, reason: WriteError) -> PrepareLeaseError {
        PrepareLeaseError::Write {
            resource: self.resource.clone(),
            reason,
        }
    }

    /// Adds the leases of the kubelet's checkpoint that devlet does not know.
    async fn learn(&self) -> Result<(), PrepareLeaseError> {
        let path = self.workflow.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        let held = read.unwrap_or_else(|_| Ok(Vec::new()));
        let held = held.map_err(|reason| PrepareLeaseError::Checkpoint {
            resource: self.resource.clone(),
            reason,
        })?;
        let store = &self.workflow.store;
        let now = store.now();
        let leases = held.iter().map(|held| held.to_lease(now)).collect();
        let adopted = store.adopt_leases(leases).await;
        adopted.map_err(|reason| self.not_written(reason))
    }

    /// Calls the plugin as far as it is necessary. While it is away, a container whose start does not need it is started
    /// again.
    async fn ask(
        &self,
        preparing: &PreparingLeases,
    ) -> Result<(Answers, Option<PreStart>), PrepareLeaseError> {
        let needs_plugin = |lease: &Lease| lease.answer.is_none() || lease.pre_start_required;
        let store = &self.workflow.store;
        let mut changes = store.subscribe();
        let mut answers = Answers::new();
        loop {
            changes.borrow_and_update();
            let asked = match store.read(|node| serving_or_gone(node, &self.resource)) {
                Ok(plugin) => self.ask_plugin(&plugin, preparing, &mut answers).await,
                Err(_) if !preparing.leases.iter().any(needs_plugin) => Ok(None),
                Err(error) => Err(error),
            };
            let waiting_helps = match &asked {
                Err(PrepareLeaseError::Plugin { problem, .. }) => problem.is_gone(),
                Err(PrepareLeaseError::NotServed { .. }) => true,
                Err(_) | Ok(_) => false,
            };
            if !waiting_helps || !self.waits_for(&mut changes).await {
                return asked.map(|pre_start| (answers, pre_start));
            }
        }
    }

    /// Calls `Allocate` for each lease that has no answer, also not among `answers`, and `PreStartContainer` if the plugin
    /// wants that.
    async fn ask_plugin(
        &self,
        plugin: &PluginView,
        preparing: &PreparingLeases,
        answers: &mut Answers,
    ) -> Result<Option<PreStart>, PrepareLeaseError> {
        let LeaseWorkflow {
            store,
            plugins,
            config,
            metrics,
            ..
        } = &self.workflow;
        let named = |problem| PrepareLeaseError::Plugin {
            resource: plugin.resource.clone(),
            endpoint: plugin.endpoint.clone(),
            problem,
        };
        let calls = GrpcPluginCalls {
            store,
            plugins,
            config,
            metrics,
        };
        let grant = Grant {
            container: "".into(),
            kind: ContainerKind::App,
            resource: plugin.resource.clone(),
            devices: self.devices.iter().cloned().collect(),
        };
        let is_required = plugin.options.pre_start_required;
        // The kubelet keeps the answer of a container from before devlet.
        let unanswered = preparing.leases.iter();
        let unanswered = unanswered.filter(|lease| lease.answer.is_none() && !lease.is_direct);
        for lease in unanswered {
            if answers.iter().any(|(name, _)| *name == lease.name) {
                continue;
            }
            if let Some(device) = store.read(|node| node.absent_device(lease).cloned()) {
                let resource = plugin.resource.clone();
                return Err(PrepareLeaseError::Absent { resource, device });
            }
            let call = calls.allocate(plugin.connection, &grant, deadline::after(deadline::MAX_DURATION));
            let answer = self.call(plugin, "Allocate", call).await.map_err(named)?;
            let recorded = preparing.record(vec![(lease.name.clone(), answer.clone(), is_required)]);
            recorded.await.map_err(|reason| self.not_written(reason))?;
            answers.push((lease.name.clone(), answer));
        }
        if !is_required {
            return Ok(None);
        }
        let earlier = preparing.pre_start.filter(|earlier| {
            earlier.connection == plugin.connection && store.now().since(earlier.at) <= PRE_START_MS
        });
        if earlier.is_some() {
            return Ok(earlier);
        }
        const METHOD: &str = "PreStartContainer";
        let client = plugins.client(plugin.connection);
        let client = client.ok_or_else(|| named(CallError::Gone { method: METHOD }))?;
        let call = client.pre_start(&grant.devices, CallDeadline::of(config.deadlines.pre_start));
        self.call(plugin, METHOD, call).await.map_err(named)?;
        Ok(Some(PreStart {
            connection: plugin.connection,
            at: store.now(),
        }))
    }

    /// Waits for a call, unless the plugin leaves or is replaced.
    async fn call<T>(
        &self,
        plugin: &PluginView,
        method: &'static str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        let store = &self.workflow.store;
        let mut changes = store.subscribe();
        let replaced = async {
            loop {
                changes.borrow_and_update();
                let serves = |node: &Node| {
                    serving(node, &self.resource).is_some_and(|now| now.connection == plugin.connection)
                };
                if !store.read(serves) || changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            ended = call => ended,
            () = replaced => Err(CallError::Gone { method }),
        }
    }

    async fn write_specs(&self, leases: &[Lease], answers: Answers) -> Result<(), PrepareLeaseError> {
        let recorded = leases.iter().filter(|lease| !lease.is_direct);
        let recorded = recorded.filter_map(|lease| Some((lease.name.clone(), lease.answer.clone()?)));
        let specs: Answers = recorded.chain(answers).collect();
        let workflow = &self.workflow;
        let (directory, runtime) = (workflow.shield.cdi.clone(), workflow.runtime.borrow().clone());
        let hook = HookCommand {
            path: workflow.shield.hook.clone(),
            socket: workflow.config.api_socket(),
        };
        let resource = self.resource.clone();
        // The directory may be on a disk that is slow.
        let written = tokio::task::spawn_blocking(move || {
            if !hook.path.exists() {
                return Err(SpecError::NoHook { path: hook.path });
            }
            specs.into_iter().try_for_each(|(name, answer)| {
                let options = answer.options();
                let lost = spec::lost_annotations(&options);
                if !lost.is_empty() {
                    tracing::warn!(%resource, annotations = ?lost, "annotations of the plugin's answer dropped: CDI cannot hand them on");
                }
                spec::write(&directory, &runtime, &name, &options, Some(&hook))
            })
        });
        let written = written.await.unwrap_or(Err(SpecError::Internal));
        written.map_err(|reason| PrepareLeaseError::Spec {
            resource: self.resource.clone(),
            reason,
        })
    }
}

/// Returns the plugin of a resource, or the error of its absence.
fn serving_or_gone(node: &Node, resource: &ResourceName) -> Result<PluginView, PrepareLeaseError> {
    serving(node, resource).ok_or_else(|| {
        let last = match node.availability(resource) {
            Availability::Gone(last) => last.map(|last| last.endpoint),
            Availability::NotListed | Availability::Serving => None,
        };
        PrepareLeaseError::NotServed {
            resource: resource.clone(),
            last,
        }
    })
}
