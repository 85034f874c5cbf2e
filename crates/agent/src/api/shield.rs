//! `devlet.shield.v1`: the runtime's hooks, and the state of a devlet beside a kubelet.

use std::time::Duration;

use devlet_client::shield_v1 as v1;
use devlet_client::v1::Problem;
use devlet_core::shield::{LeaseHolder, LeasePhase, LeaseView, StartError};
use devlet_uds::PeerCred;
use tonic::{Request, Response, Status};

use super::convert::{self, number};
use super::kubelet_pods;
use super::service::DevletService;
use crate::agent::Agent;
use crate::deadline;
use crate::display::pod_label;
use crate::lease::process;
use crate::peer_text::status_message;
use crate::shield::report::{HOST_PIDS, MissingDevices, MissingState, RuntimeState, ShieldState};
use crate::store::LeaseError;
use crate::workflow::lease::{LeaseWorkflow, short};

impl DevletService {
    /// Refuses callers other than root and devlet's own user.
    fn allow_owner<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let uid = request.extensions().get::<PeerCred>().map(|peer| peer.uid);
        match uid.is_some_and(|uid| self.agent.config().access.is_trusted(uid)) {
            true => Ok(()),
            false => Err(Status::permission_denied(
                "only root and the user that devlet runs as may do this",
            )),
        }
    }

    /// Refuses calls if there is no kubelet beside devlet.
    fn shields(&self) -> Result<&LeaseWorkflow, Status> {
        match self.agent.leases() {
            Some(leases) => Ok(leases),
            None => Err(Status::failed_precondition(
                "devlet does not stand beside a kubelet; start it with `devlet serve --shield`",
            )),
        }
    }
}

#[tonic::async_trait]
impl v1::shield_server::Shield for DevletService {
    async fn container_starting(
        &self,
        request: Request<v1::ContainerStartingRequest>,
    ) -> Result<Response<v1::ContainerStartingResponse>, Status> {
        self.allow_owner(&request)?;
        let leases = self.shields()?;
        let v1::ContainerStartingRequest {
            lease,
            container,
            pid,
            started,
            wait_ms,
        } = request.into_inner();
        // Otherwise its end could not be seen either.
        let process = process::find(pid).filter(|process| process.started == started);
        let process = process.ok_or_else(|| {
            Status::failed_precondition(format!(
                "process {pid} of the container is not visible to devlet; {HOST_PIDS}"
            ))
        })?;
        let deadline = deadline::after(Duration::from_millis(wait_ms));
        let stopping = self.agent.stopping();
        let started = tokio::select! {
            started = leases.start(&lease, &container, process, deadline) => started,
            () = stopping.cancelled() => return Err(Status::unavailable("devlet is stopping")),
        };
        match started {
            Ok(()) => Ok(Response::new(v1::ContainerStartingResponse {})),
            Err(LeaseError::Refused(refused @ StartError::Ended)) => {
                Err(Status::not_found(refused.to_string()))
            }
            Err(LeaseError::Refused(refused)) => Err(Status::failed_precondition(refused.to_string())),
            Err(LeaseError::Write(error)) => Err(Status::unavailable(status_message(error))),
        }
    }

    async fn container_ended(
        &self,
        request: Request<v1::ContainerEndedRequest>,
    ) -> Result<Response<v1::ContainerEndedResponse>, Status> {
        self.allow_owner(&request)?;
        let v1::ContainerEndedRequest { lease, container } = request.into_inner();
        let process = self.read(|node| {
            let lease = node.leases().get(&lease)?.lease;
            lease.containers.get(&container).cloned()
        });
        if process.as_ref().is_some_and(process::has_others) {
            // Its end is found by itself.
            tracing::warn!(container, "container ended, but a process of it still runs");
            return Ok(Response::new(v1::ContainerEndedResponse {}));
        }
        self.agent.store().stop_leased(&lease, &container).await?;
        Ok(Response::new(v1::ContainerEndedResponse {}))
    }

    async fn state(&self, _: Request<v1::StateRequest>) -> Result<Response<v1::StateResponse>, Status> {
        self.shields()?;
        let report = self.agent.shield().get();
        let state = report.clone();
        let now = self.now();
        let (fitness, runtime, runtime_problem) = match state.runtime {
            RuntimeState::Ready { name, .. } => (v1::RuntimeFitness::Ready, name, String::new()),
            RuntimeState::Unfit { name, problem } => (v1::RuntimeFitness::Unfit, name, problem),
            RuntimeState::Unknown { reason } => (v1::RuntimeFitness::Unknown, String::new(), reason),
            RuntimeState::Unasked => (v1::RuntimeFitness::Unknown, String::new(), "not asked yet".into()),
        };
        let registrations = state.registrations.into_iter();
        let shield = self.agent.config().shield.as_ref();
        Ok(Response::new(v1::StateResponse {
            kubelet_dir: shield
                .map(|shield| shield.kubelet.display().to_string())
                .unwrap_or_default(),
            kubelet_running: state.kubelet.is_some(),
            kubelet_pid: state
                .kubelet
                .as_ref()
                .and_then(|kubelet| kubelet.pid)
                .map_or(0, i64::from),
            kubelet_version: state
                .kubelet
                .and_then(|kubelet| kubelet.version)
                .unwrap_or_default(),
            runtime,
            fitness: fitness.into(),
            runtime_problem,
            registrations: registrations
                .map(|(resource, problem)| v1::Registration {
                    resource: resource.to_string(),
                    problem: problem.unwrap_or_default(),
                })
                .collect(),
            leases: self.read(|node| {
                let views = node.leases().iter();
                views.map(|view| lease(&view, &report, now)).collect()
            }),
            now_ms: now.0,
        }))
    }

    async fn adopt(&self, request: Request<v1::AdoptRequest>) -> Result<Response<v1::AdoptResponse>, Status> {
        self.allow_owner(&request)?;
        self.shields()?;
        let adopted = self.agent.adopt_leases().await;
        let (containers, direct) = adopted.map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(v1::AdoptResponse {
            containers: number(containers),
            direct: number(direct),
        }))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveResponse>, Status> {
        self.allow_owner(&request)?;
        self.shields()?;
        let left = self.agent.leave_kubelet().await;
        let (leases, directory) = left.map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(v1::LeaveResponse {
            leases: number(leases),
            directory: directory.display().to_string(),
        }))
    }
}

fn lease(view: &LeaseView<'_>, state: &ShieldState, now: devlet_core::Moment) -> v1::Lease {
    let LeaseView { lease, phase } = view;
    let holder = lease.holder.as_ref();
    let name = lease.pod().and_then(|pod| state.pod_name(pod)).cloned();
    let name = name.unwrap_or_default();
    let phase = match phase {
        LeasePhase::Granted => "granted",
        LeasePhase::Preparing => "preparing",
        LeasePhase::Prepared => "prepared",
        LeasePhase::Ending => "ending",
    };
    v1::Lease {
        name: short(&lease.name).to_owned(),
        resource: lease.resource.to_string(),
        devices: lease.devices.iter().map(ToString::to_string).collect(),
        phase: phase.to_owned(),
        pod_uid: holder.map(|holder| holder.pod.to_string()).unwrap_or_default(),
        container: holder
            .map(|holder| holder.container.to_string())
            .unwrap_or_default(),
        running: lease.containers.keys().cloned().collect(),
        direct: lease.is_direct,
        age_ms: convert::age(lease.granted_at, now),
        pod_namespace: name.namespace,
        pod_name: name.name,
        unwitnessed: !lease.is_witnessed && !lease.is_direct,
    }
}

/// Returns the problems of a devlet beside a kubelet.
pub(super) fn problems(agent: &Agent) -> Vec<Problem> {
    let Some(shield) = &agent.config().shield else {
        return Vec::new();
    };
    let state = agent.shield().get();
    let problem = |what: String, hint: &str, blocking| Problem {
        what,
        hint: hint.to_owned(),
        blocking,
    };
    let mut problems = Vec::new();
    if state.is_blind() {
        problems.push(problem(
            "devlet does not see the process of the kubelet, so it would not see containers; no container starts".into(),
            HOST_PIDS,
            true,
        ));
    }
    match &state.runtime {
        RuntimeState::Unfit { name, problem: why } => problems.push(problem(
            format!("the container runtime {name} cannot be used: {why}"),
            "no resource is registered with the kubelet until then",
            true,
        )),
        RuntimeState::Unknown { reason } => problems.push(problem(
            format!("it is not known whether the container runtime has CDI on: {reason}"),
            "a runtime with CDI off starts containers without their devices; check it with devlet shield check",
            shield.require_runtime,
        )),
        RuntimeState::Unasked | RuntimeState::Ready { .. } => {}
    }
    if let Some(version) = state
        .kubelet
        .as_ref()
        .and_then(|kubelet| kubelet.version.as_ref())
        && !crate::shield::runtime::is_new_enough(version)
    {
        problems.push(problem(
            format!(
                "kubelet {version} does not hand CDI devices on, so containers start without their devices"
            ),
            "update it to 1.29 or later, or go back to the kubelet alone: devlet shield leave",
            true,
        ));
    }
    problems.extend(absent_devices(agent).into_iter().map(|text| {
        problem(
            text,
            "delete its pod, so that another one gets a device that exists, unless the device comes back",
            false,
        )
    }));
    for (resource, why) in &state.registrations {
        if let Some(why) = why {
            problems.push(problem(
                format!("{resource} is not registered with the kubelet: {why}"),
                "tried again twice a second; pods that request it fail meanwhile",
                false,
            ));
        }
    }
    for (resource, why) in &state.shortened {
        problems.push(problem(
            format!("{resource}: {why}"),
            "let its plugin list fewer devices",
            false,
        ));
    }
    if let Some(why) = &state.checkpoint {
        problems.push(problem(
            why.clone(),
            "no lease ends until it can be read; a kubelet that finds it damaged forgets who has which device: see \
             devlet checkpoint verify",
            false,
        ));
    }
    if let Some(text) = &state.left {
        problems.push(problem(
            text.clone(),
            "let the plugins register with the kubelet again, then stop devlet",
            true,
        ));
    }
    problems.extend(state.bypassed.iter().map(|(_, LeaseHolder { pod, container })| {
        let pod = kubelet_pods::label(&state, pod);
        problem(
            format!("container {container} of pod {pod} got devices from a plugin beside devlet"),
            "a plugin registers with the kubelet directly; let it use devlet's directory only",
            false,
        )
    }));
    problems.extend(state.missing.iter().map(missing));
    problems.extend(state.beside.iter().map(|socket| {
        problem(
            format!("a plugin listens at {socket} in the kubelet's directory"),
            "pods of its resource hang or bypass devlet if it registers there, too; let it use devlet's directory only",
            false,
        )
    }));
    problems.extend(unwitnessed(agent, &state));
    problems
}

/// Returns the containers that wait for a device that does not exist any more.
fn absent_devices(agent: &Agent) -> Vec<String> {
    agent.store().read(|node| {
        let views = node.leases().iter();
        let waiting = views.filter(|view| view.phase == LeasePhase::Granted);
        let absent = waiting.filter_map(|view| Some((view, node.absent_device(view.lease)?)));
        absent
            .map(|(view, device)| {
                let resource = &view.lease.resource;
                let of = view.lease.holder.as_ref().map_or_else(String::new, |holder| {
                    format!(" {} of pod {}", holder.container, holder.pod)
                });
                format!(
                    "container{of} waits for device {device} of {resource}, which its plugin does not list"
                )
            })
            .collect()
    })
}

/// Returns the problem of a container for which the kubelet has no devices.
fn missing(missing: &MissingDevices) -> Problem {
    let MissingDevices {
        pod,
        container,
        resource,
        state,
    } = missing;
    let of = format!("container {container} of pod {}", pod_label(pod));
    Problem {
        what: match state {
            MissingState::Running | MissingState::Unhooked => {
                format!("{of} runs without the devices of {resource} that it requests")
            }
            MissingState::Forgotten => {
                format!(
                    "the kubelet has forgotten the devices of {resource} that {of} has, and cannot start it again"
                )
            }
            MissingState::Stopped => {
                format!("{of} cannot start: the kubelet has no devices of {resource} for it")
            }
        },
        hint: format!(
            "{}; delete the pod: kubectl delete pod -n {} {}",
            match state {
                MissingState::Unhooked =>
                    "the container runtime ignored devlet's CDI spec, see devlet shield check",
                _ => "the kubelet's checkpoint was lost or damaged",
            },
            pod.namespace,
            pod.name
        ),
        blocking: false,
    }
}

/// Returns the problem of leases whose containers are not known, because the runtime does not tell.
fn unwitnessed(agent: &Agent, state: &ShieldState) -> Option<Problem> {
    let silent = state.silent.as_ref()?;
    let count = agent.store().read(|node| {
        let leases = node.leases().iter();
        leases.filter(|view| !view.lease.is_witnessed).count()
    });
    (count > 0).then(|| Problem {
        what: format!(
            "it is not known whether containers of {count} leases from before devlet run: {silent}"
        ),
        hint: "no other container gets their devices until the runtime answers".to_owned(),
        blocking: false,
    })
}
