//! The kubelet's calls about a lease: `Allocate` grants it, `PreStartContainer` prepares it.
//!
//! 1. `Allocate` does not call the plugin. A kubelet fails a pod for good if `Allocate` fails, and stops everything else
//!    while it waits.
//! 2. `PreStartContainer` calls the plugin, keeps its answer, and writes the CDI spec. If it fails, the kubelet shows the
//!    error and tries again. It must answer soon: a container that waits for it cannot be removed.
//!
//! A lease that devlet does not know is found in the kubelet's checkpoint.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::ledger::Grant;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::shield::{Lease, PrepareError};
use devlet_core::{
    Availability, ContainerKind, DeviceId, LeaseName, Node, PluginView, PreferenceQuery, ResourceName,
};
use tokio::time::{Instant, timeout_at};

use super::admit::{GrpcPluginCalls, PluginCalls as _};
use crate::config::{Config, Shield};
use crate::device_plugin::clients::PluginClients;
use crate::grpc::call::{CallDeadline, CallError};
use crate::lease::checkpoint::{self, UnusableCheckpoint};
use crate::lease::spec::{self, HookCommand, SpecError};
use crate::lease::{self, process};
use crate::metrics::Metrics;
use crate::store::{LeaseError, PreparingLeases, Store, WriteError, in_time};

/// Time to prepare a lease, the plugin's calls included. A kubelet shows the error after it.
const PREPARE_TIME: Duration = Duration::from_millis(1700);

/// Time that is left for the write and the spec after the plugin has answered.
const WRITE_TIME: Duration = Duration::from_millis(200);

/// Time for the write of a new lease. The kubelet waits for it, and serves no other pod meanwhile.
const GRANT_TIME: Duration = Duration::from_millis(500);

/// Time for a plugin to say which devices it prefers. The kubelet waits for it, too.
const PREFERENCE_TIME: Duration = Duration::from_millis(200);

/// Why a lease is not prepared. The text reaches `kubectl describe pod`.
#[derive(Debug, thiserror::Error)]
pub enum PrepareLeaseError {
    /// A device is in use.
    #[error("devlet: {resource}: {reason}; tried again soon")]
    Refused {
        resource: ResourceName,
        reason: PrepareError,
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
    /// A call to the plugin failed.
    #[error("devlet: device plugin of {resource} at {endpoint}: {problem}; tried again soon")]
    Plugin {
        resource: ResourceName,
        /// The socket of the plugin.
        endpoint: String,
        problem: CallError,
    },
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
}

/// Why the devices of the kubelet's checkpoint are not taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] UnusableCheckpoint),
    /// The leases cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the devices are not handed back to the kubelet.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// A container waits for its plugin.
    #[error(
        "a container waits for devices {devices} of {resource}, and only devlet can prepare them; wait until its plugin \
         is back, or delete its pod"
    )]
    Waiting { resource: ResourceName, devices: String },
    /// A spec cannot be written.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The devices and leases that the plugin is asked about before a container starts.
struct Question<'a> {
    resource: &'a ResourceName,
    devices: &'a BTreeSet<DeviceId>,
    leases: &'a [Lease],
    deadline: Instant,
}

/// The plugin's answers, by lease; `true` if it wants a call before each start.
type Answers = Vec<(LeaseName, Answer, bool)>;

/// Serves the kubelet's calls about leases.
#[derive(Debug, Clone)]
pub struct LeaseWorkflow {
    pub(crate) store: Store,
    pub(crate) plugins: PluginClients,
    pub(crate) config: Arc<Config>,
    pub(crate) shield: Arc<Shield>,
    pub(crate) metrics: Metrics,
}

impl LeaseWorkflow {
    /// Grants a lease for devices that the kubelet has chosen. Returns its CDI device.
    pub async fn grant(&self, resource: &ResourceName, devices: Vec<DeviceId>) -> String {
        let name = lease::new_name();
        let granting = self.store.grant_lease(name.clone(), resource.clone(), devices);
        let granted = in_time(Instant::now() + GRANT_TIME, granting).await;
        if let Err(error) = granted {
            // The kubelet must not fail the pod. It records the lease, and devlet finds it there.
            tracing::warn!(%resource, %error, "lease not recorded; the kubelet's checkpoint has it");
        }
        lease::qualified(&name)
    }

    /// Prepares all leases of these devices before a container starts.
    pub async fn prepare(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<(), PrepareLeaseError> {
        let deadline = Instant::now() + PREPARE_TIME;
        let preparing = self.begin(resource, devices).await?;
        let question = Question {
            resource,
            devices,
            leases: &preparing.leases,
            deadline: deadline - WRITE_TIME,
        };
        let answers = self.ask(&question).await?;
        let recording = preparing.record(answers.clone());
        let recorded = in_time(deadline, recording).await;
        recorded.map_err(|reason| PrepareLeaseError::Write {
            resource: resource.clone(),
            reason,
        })?;
        self.write_specs(resource, &preparing.leases, answers).await
    }

    async fn begin(
        &self,
        resource: &ResourceName,
        devices: &BTreeSet<DeviceId>,
    ) -> Result<PreparingLeases, PrepareLeaseError> {
        let begin = || self.store.prepare_leases(resource, devices);
        let refused = |reason| PrepareLeaseError::Refused {
            resource: resource.clone(),
            reason,
        };
        match begin() {
            Err(PrepareError::Unknown) => self.learn(resource).await?,
            Err(reason @ PrepareError::Running { .. }) => {
                if !self.bury(resource, devices).await {
                    return Err(refused(reason));
                }
            }
            begun => return begun.map_err(refused),
        }
        begin().map_err(refused)
    }

    /// Adds the leases of the kubelet's checkpoint that devlet does not know.
    async fn learn(&self, resource: &ResourceName) -> Result<(), PrepareLeaseError> {
        let path = self.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        let held = read.unwrap_or_else(|_| Ok(Vec::new()));
        let held = held.map_err(|reason| PrepareLeaseError::Checkpoint {
            resource: resource.clone(),
            reason,
        })?;
        let now = self.store.now();
        let leases = held.iter().map(|held| held.to_lease(now)).collect();
        let adopted = self.store.adopt_leases(leases).await;
        adopted.map_err(|reason| PrepareLeaseError::Write {
            resource: resource.clone(),
            reason,
        })
    }

    /// Records the end of containers whose process is gone. Returns `true` if there was one.
    async fn bury(&self, resource: &ResourceName, devices: &BTreeSet<DeviceId>) -> bool {
        let dead = self.store.read(|node| {
            let leases = node.leases().iter().map(|view| view.lease);
            let leases =
                leases.filter(|lease| lease.resource == *resource && !lease.devices.is_disjoint(devices));
            dead_containers(leases)
        });
        let mut is_news = false;
        for (name, container) in dead {
            is_news |= self.store.stop_leased(name.as_str(), &container).await.is_ok();
        }
        is_news
    }

    /// Calls `Allocate` of the plugin for each lease without an answer, and `PreStartContainer` if it wants that. While
    /// the plugin is away, a container whose start does not need it is started again.
    async fn ask(&self, question: &Question<'_>) -> Result<Answers, PrepareLeaseError> {
        let needs_plugin = |lease: &Lease| lease.answer.is_none() || lease.pre_start_required;
        let mut changes = self.store.subscribe();
        loop {
            changes.borrow_and_update();
            let asked = match self.store.read(|node| serving_or_gone(node, question.resource)) {
                Ok(plugin) => self.ask_plugin(&plugin, question).await,
                Err(_) if !question.leases.iter().any(needs_plugin) => return Ok(Answers::new()),
                Err(error) => Err(error),
            };
            let waiting_helps = match &asked {
                Err(PrepareLeaseError::Plugin { problem, .. }) => problem.is_gone(),
                Err(_) => true,
                Ok(_) => false,
            };
            if !waiting_helps || !matches!(timeout_at(question.deadline, changes.changed()).await, Ok(Ok(())))
            {
                return asked;
            }
        }
    }

    async fn ask_plugin(
        &self,
        plugin: &PluginView,
        question: &Question<'_>,
    ) -> Result<Answers, PrepareLeaseError> {
        let named = |problem| PrepareLeaseError::Plugin {
            resource: plugin.resource.clone(),
            endpoint: plugin.endpoint.clone(),
            problem,
        };
        let calls = GrpcPluginCalls {
            store: &self.store,
            plugins: &self.plugins,
            config: &self.config,
            metrics: &self.metrics,
        };
        let grant = Grant {
            container: "".into(),
            kind: ContainerKind::App,
            resource: plugin.resource.clone(),
            devices: question.devices.iter().cloned().collect(),
        };
        let is_required = plugin.options.pre_start_required;
        let mut answers = Answers::new();
        for lease in question.leases.iter().filter(|lease| lease.answer.is_none()) {
            let answer = calls.allocate(plugin.connection, &grant, question.deadline).await;
            answers.push((lease.name.clone(), answer.map_err(named)?, is_required));
        }
        if is_required {
            let client = self.plugins.client(plugin.connection);
            let client = client.ok_or_else(|| {
                named(CallError::Gone {
                    method: "PreStartContainer",
                })
            })?;
            let deadline = CallDeadline {
                own: self.config.deadlines.pre_start,
                caller: Some(question.deadline),
            };
            client.pre_start(&grant.devices, deadline).await.map_err(named)?;
        }
        Ok(answers)
    }

    async fn write_specs(
        &self,
        resource: &ResourceName,
        leases: &[Lease],
        answers: Answers,
    ) -> Result<(), PrepareLeaseError> {
        let recorded = leases.iter().filter(|lease| !lease.is_direct);
        let recorded = recorded.filter_map(|lease| Some((lease.name.clone(), lease.answer.clone()?)));
        let specs: Vec<_> = recorded
            .chain(answers.into_iter().map(|(name, answer, _)| (name, answer)))
            .collect();
        let (directory, hook) = (self.shield.cdi.clone(), self.hook());
        let resource = resource.clone();
        let named = resource.clone();
        // The directory may be on a disk that is slow.
        let written = tokio::task::spawn_blocking(move || {
            specs.into_iter().try_for_each(|(name, answer)| {
                let options = answer.options();
                let lost = spec::lost_annotations(&options);
                if !lost.is_empty() {
                    tracing::warn!(%named, annotations = ?lost, "annotations of the plugin's answer dropped: CDI cannot hand them on");
                }
                spec::write(&directory, &name, &options, Some(&hook))
            })
        });
        let written = written.await.unwrap_or(Err(SpecError::Internal));
        written.map_err(|reason| PrepareLeaseError::Spec { resource, reason })
    }

    fn hook(&self) -> HookCommand {
        HookCommand {
            path: self.shield.hook.clone(),
            socket: self.config.api_socket(),
        }
    }

    /// Returns the devices that the kubelet should choose: as the plugin prefers, if it says so in time.
    pub async fn prefer(
        &self,
        resource: &ResourceName,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Vec<DeviceId> {
        let plugin = self.store.read(|node| serving(node, resource));
        let client = plugin
            .filter(|plugin| plugin.options.preferred_allocation)
            .and_then(|plugin| Some((plugin.connection, self.plugins.client(plugin.connection)?)));
        let mut preferences = Vec::new();
        if let Some((connection, client)) = client {
            let query = PreferenceQuery {
                container: 0,
                connection,
                resource: resource.clone(),
                available: available.iter().cloned().collect(),
                must_include: must_include.iter().cloned().collect(),
                size,
            };
            let deadline = CallDeadline {
                own: PREFERENCE_TIME.min(self.config.deadlines.preferred),
                caller: None,
            };
            match client.preferred(&query, deadline).await {
                Ok(preferred) => preferences = preferred,
                Err(error) => tracing::warn!(%resource, %error, "GetPreferredAllocation failed"),
            }
        }
        self.store
            .read(|node| node.lease_choice(resource, available, must_include, size, &preferences))
    }

    /// Takes over the devices of the kubelet's checkpoint. Returns the number of containers, and of those among them that
    /// got their devices before devlet stood between.
    pub async fn adopt(&self) -> Result<(usize, usize), AdoptError> {
        let path = self.shield.checkpoint();
        let read = tokio::task::spawn_blocking(move || checkpoint::read(&path)).await;
        let held = read.unwrap_or_else(|_| Ok(Vec::new()))?;
        let now = self.store.now();
        let leases: Vec<Lease> = held.iter().map(|held| held.to_lease(now)).collect();
        let direct = leases.iter().filter(|lease| lease.is_direct).count();
        let all = leases.len();
        self.store.adopt_leases(leases).await?;
        self.store.update(|node| {
            for held in &held {
                node.leases_mut().identify(&held.name(), &held.holder);
            }
        });
        Ok((all, direct))
    }

    /// Returns all leases that devlet serves, if the plugin has answered for each.
    pub fn answered_leases(&self) -> Result<Vec<Lease>, LeaveError> {
        let leases: Vec<Lease> = self.store.read(|node| {
            let leases = node.leases().iter().map(|view| view.lease.clone());
            leases.filter(|lease| !lease.is_direct).collect()
        });
        match leases.iter().find(|lease| lease.answer.is_none()) {
            None => Ok(leases),
            Some(lease) => Err(LeaveError::Waiting {
                resource: lease.resource.clone(),
                devices: lease
                    .devices
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    /// Writes the specs of all leases so that containers start without devlet, also after a reboot. Returns the number of
    /// leases and the directory.
    pub async fn write_permanent_specs(&self) -> Result<(usize, PathBuf), LeaveError> {
        let leases = self.answered_leases()?;
        let count = leases.len();
        let (temporary, permanent) = (self.shield.cdi.clone(), self.shield.permanent_cdi.clone());
        let directory = permanent.clone();
        let written = tokio::task::spawn_blocking(move || {
            for lease in leases {
                let Some(answer) = &lease.answer else { continue };
                spec::write(&permanent, &lease.name, &answer.options(), None)?;
                if permanent != temporary {
                    // Specs in the temporary directory take precedence.
                    spec::remove(&temporary, &lease.name);
                }
            }
            Ok(())
        });
        written.await.unwrap_or(Err(SpecError::Internal))?;
        Ok((count, directory))
    }

    /// Ends a lease that the kubelet does not know any more, unless a container of it may run.
    pub async fn end(&self, name: &LeaseName) -> bool {
        match self.store.end_lease(name.as_str()).await {
            Ok(()) => {
                let (directory, ended) = (self.shield.cdi.clone(), name.clone());
                let removed = tokio::task::spawn_blocking(move || spec::remove(&directory, &ended));
                let _ = removed.await;
                tracing::info!(lease = %short(name), "lease ended");
                true
            }
            Err(LeaseError::Refused(_)) => false,
            Err(LeaseError::Write(error)) => {
                tracing::warn!(lease = %short(name), %error, "end of a lease not recorded, trying again");
                false
            }
        }
    }
}

/// Returns the containers whose process is gone, each with its lease.
pub(crate) fn dead_containers<'a>(leases: impl Iterator<Item = &'a Lease>) -> Vec<(LeaseName, String)> {
    let containers = leases.flat_map(|lease| lease.containers.iter().map(move |each| (lease, each)));
    let dead = containers.filter(|(_, (_, process))| !process::is_alive(**process));
    dead.map(|(lease, (id, _))| (lease.name.clone(), id.clone()))
        .collect()
}

/// Returns the beginning of a lease's name, for logs: the whole name would allow others to use it.
pub(crate) fn short(name: &LeaseName) -> &str {
    name.as_str().get(..8).unwrap_or_default()
}

fn serving(node: &Node, resource: &ResourceName) -> Option<PluginView> {
    match node.availability(resource) {
        Availability::Serving => node.plugin(node.serving(resource)?),
        Availability::NotListed | Availability::Gone(_) => None,
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
