//! The service: which method of the API does what.

use std::sync::Arc;
use std::time::Duration;

use devlet_client::v1;
use devlet_client::v1::devlet_server::Devlet;
use devlet_core::{Moment, Node};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::lookup::{self, PodLookupError, UnknownDriver};
use super::watch::Updates;
use super::{admit, convert, convert_claims, file_notes, lists};
use crate::agent::Agent;
use crate::deadline;
use crate::display::NamedPod;
use crate::store::{OpenReport, system_time};
use devlet_uds::PeerCred;

/// The caller may not change anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}; allow it under access.admit in devlet's configuration", describe_user(.uid.as_ref()))]
pub struct NotAllowed {
    /// The user of the caller, if the kernel reports it.
    pub uid: Option<u32>,
}

fn describe_user(uid: Option<&u32>) -> String {
    match uid {
        Some(uid) => format!("user {uid} may not admit or remove pods"),
        None => "a user that is not known may not admit or remove pods".to_owned(),
    }
}

/// The service of one node.
#[derive(Debug, Clone)]
pub struct DevletService {
    pub(super) agent: Agent,
    /// Start time by the store's monotonic clock.
    pub(super) started: Moment,
    pub(super) wall_clock: fn() -> Moment,
    /// Problems that were found when the node started.
    pub(super) start_problems: Arc<Vec<v1::Problem>>,
    /// Allows one long manifest to be parsed at a time.
    pub(super) parsing: Arc<Semaphore>,
}

impl DevletService {
    /// Returns the service for a node that was opened with this report.
    pub fn new(agent: Agent, report: &OpenReport) -> Self {
        let started = agent.store().now();
        Self {
            agent,
            started,
            wall_clock: system_time,
            start_problems: Arc::new(file_notes::at_start(report)),
            parsing: Arc::new(Semaphore::new(1)),
        }
    }

    pub(super) fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        self.agent.store().read(question)
    }

    pub(super) fn now(&self) -> Moment {
        self.agent.store().now()
    }

    /// Rejects callers that may not change anything.
    pub(super) fn allow<T>(&self, request: &Request<T>) -> Result<(), NotAllowed> {
        let uid = request.extensions().get::<PeerCred>().map(|peer| peer.uid);
        if uid.is_some_and(|uid| self.agent.config().access.may_admit(uid)) {
            Ok(())
        } else {
            Err(NotAllowed { uid })
        }
    }

    /// Returns the error for a pod that must be admitted.
    pub(super) fn not_admitted(&self, error: PodLookupError) -> PodLookupError {
        self.agent
            .cluster()
            .read(|state| lookup::not_admitted(state, error))
    }

    /// Returns the deadline of a call that waits at most `wait_ms`, or as long as the configuration says.
    pub(super) fn deadline(&self, wait_ms: Option<u64>) -> Instant {
        let wait = wait_ms.map_or(self.agent.config().wait, Duration::from_millis);
        deadline::after(wait)
    }
}

#[tonic::async_trait]
impl Devlet for DevletService {
    type AdmitStream = Updates<v1::AdmitEvent>;
    type WatchResourcesStream = Updates<v1::ResourceList>;
    type WatchDevicesStream = Updates<v1::DeviceList>;
    type WatchPluginsStream = Updates<v1::PluginList>;
    type WatchPodsStream = Updates<v1::PodList>;
    type WatchDriversStream = Updates<v1::DriverList>;
    type WatchClaimsStream = Updates<v1::ClaimList>;
    type WatchSlicesStream = Updates<v1::SliceList>;

    async fn admit(&self, request: Request<v1::AdmitRequest>) -> Result<Response<Self::AdmitStream>, Status> {
        let metrics = self.agent.metrics();
        self.allow(&request)
            .inspect_err(|_| metrics.rejected("not_allowed"))?;
        let request = request.into_inner();
        let deadline = self.deadline(request.wait_ms);
        let request = self
            .parse_request(request, deadline)
            .await
            .inspect_err(|_| metrics.rejected("invalid"))?;
        let events = admit::start(&self.agent, request, deadline).await?;
        Ok(Response::new(Box::pin(events)))
    }

    async fn start_container(
        &self,
        request: Request<v1::StartContainerRequest>,
    ) -> Result<Response<v1::StartContainerResponse>, Status> {
        self.allow(&request)?;
        let v1::StartContainerRequest {
            pod,
            container,
            wait_ms,
        } = request.into_inner();
        let pod = self.read(|node| lookup::find_pod(node, &pod));
        let pod = pod.map_err(|error| self.not_admitted(error))?;
        let deadline = self.deadline(wait_ms);
        let (options, conflicts) = self.agent.start_container(&pod, &container, deadline).await?;
        for conflict in &conflicts {
            let named = self.read(|node| NamedPod::of(node, &pod));
            tracing::warn!(
                pod = %named.label(), uid = %pod, container, what = convert::contested(conflict.kind), key = conflict.key,
                kept = %conflict.kept, dropped = %conflict.dropped, "device plugins disagree"
            );
        }
        let now = self.now();
        let (id, container) = self.read(|node| {
            let id = convert::pod_id(node, &pod);
            let container = convert::container(node, &pod, &container, options, conflicts, now);
            (id, container)
        });
        Ok(Response::new(v1::StartContainerResponse {
            pod: Some(id),
            container: Some(container),
        }))
    }

    async fn remove_pod(
        &self,
        request: Request<v1::RemovePodRequest>,
    ) -> Result<Response<v1::RemovePodResponse>, Status> {
        self.allow(&request)?;
        Ok(Response::new(self.remove(request.into_inner()).await?))
    }

    async fn abandon_claim(
        &self,
        request: Request<v1::AbandonClaimRequest>,
    ) -> Result<Response<v1::AbandonClaimResponse>, Status> {
        self.allow(&request)?;
        Ok(Response::new(self.abandon(request.into_inner()).await?))
    }

    async fn forget_claim(
        &self,
        request: Request<v1::ForgetClaimRequest>,
    ) -> Result<Response<v1::ForgetClaimResponse>, Status> {
        self.allow(&request)?;
        let claims = self.forget_claims(&request.get_ref().claim).await?;
        Ok(Response::new(v1::ForgetClaimResponse { claims }))
    }

    async fn list_resources(
        &self,
        _: Request<v1::ListResourcesRequest>,
    ) -> Result<Response<v1::ResourceList>, Status> {
        let revision = self.read(Node::changes);
        Ok(Response::new(lists::resource_list(revision, self.resources())))
    }

    async fn list_devices(
        &self,
        request: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::DeviceList>, Status> {
        let revision = self.read(Node::changes);
        let devices = self.devices(&request.get_ref().resource);
        Ok(Response::new(lists::device_list(revision, devices)))
    }

    async fn list_plugins(
        &self,
        _: Request<v1::ListPluginsRequest>,
    ) -> Result<Response<v1::PluginList>, Status> {
        let revision = self.read(Node::changes);
        Ok(Response::new(lists::plugin_list(revision, self.plugins())))
    }

    async fn list_pods(
        &self,
        request: Request<v1::ListPodsRequest>,
    ) -> Result<Response<v1::PodList>, Status> {
        let name = &request.get_ref().pod;
        let revision = self.read(Node::changes);
        let pods = match name.as_str() {
            "" => self.pods(),
            name => self.pods_named(name)?,
        };
        Ok(Response::new(lists::pod_list(revision, pods)))
    }

    async fn list_drivers(
        &self,
        request: Request<v1::ListDriversRequest>,
    ) -> Result<Response<v1::DriverList>, Status> {
        let driver = request.into_inner().driver;
        let revision = self.read(Node::changes);
        let found = self.drivers(&driver);
        if found.0.is_empty() && found.1.is_empty() && !driver.is_empty() {
            return Err(UnknownDriver { driver }.into());
        }
        Ok(Response::new(lists::driver_list(revision, found)))
    }

    async fn list_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<v1::ClaimList>, Status> {
        let name = &request.get_ref().claim;
        let revision = self.read(Node::changes);
        if !name.is_empty() {
            self.read(|node| lookup::find_claims(node, name))?;
        }
        Ok(Response::new(lists::claim_list(revision, self.claims(name))))
    }

    async fn list_slices(
        &self,
        request: Request<v1::ListSlicesRequest>,
    ) -> Result<Response<v1::SliceList>, Status> {
        let revision = self.read(Node::changes);
        let slices = self.slices(&request.get_ref().driver);
        Ok(Response::new(lists::slice_list(revision, slices)))
    }

    async fn might_need_unprepare(
        &self,
        request: Request<v1::MightNeedUnprepareRequest>,
    ) -> Result<Response<v1::MightNeedUnprepareResponse>, Status> {
        let name = &request.get_ref().pod;
        Ok(Response::new(self.read(|node| {
            let pod = match lookup::find_pod(node, name) {
                // A pod without any record has nothing left to unprepare.
                Err(PodLookupError::Unknown { .. }) => lookup::find_unrecorded(node, name),
                found => Some(found?),
            };
            let waits = pod.as_ref().map(|pod| node.pending_unprepare(pod));
            Ok::<_, PodLookupError>(v1::MightNeedUnprepareResponse {
                might_need_unprepare: pod.is_some_and(|pod| node.might_need_unprepare(&pod)),
                waits: waits.iter().flatten().map(convert_claims::wait).collect(),
            })
        })?))
    }

    async fn watch_resources(
        &self,
        _: Request<v1::ListResourcesRequest>,
    ) -> Result<Response<Self::WatchResourcesStream>, Status> {
        Ok(self.watch(Self::resources, lists::resource_list))
    }

    async fn watch_devices(
        &self,
        request: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<Self::WatchDevicesStream>, Status> {
        let resource = request.into_inner().resource;
        Ok(self.watch(move |service| service.devices(&resource), lists::device_list))
    }

    async fn watch_plugins(
        &self,
        _: Request<v1::ListPluginsRequest>,
    ) -> Result<Response<Self::WatchPluginsStream>, Status> {
        Ok(self.watch(Self::plugins, lists::plugin_list))
    }

    async fn watch_pods(
        &self,
        request: Request<v1::ListPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let name = request.into_inner().pod;
        Ok(self.watch(move |service| service.pods_matching(&name), lists::pod_list))
    }

    async fn watch_drivers(
        &self,
        request: Request<v1::ListDriversRequest>,
    ) -> Result<Response<Self::WatchDriversStream>, Status> {
        let name = request.into_inner().driver;
        Ok(self.watch(move |service| service.drivers(&name), lists::driver_list))
    }

    async fn watch_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<Self::WatchClaimsStream>, Status> {
        let name = request.into_inner().claim;
        Ok(self.watch(move |service| service.claims(&name), lists::claim_list))
    }

    async fn watch_slices(
        &self,
        request: Request<v1::ListSlicesRequest>,
    ) -> Result<Response<Self::WatchSlicesStream>, Status> {
        let driver = request.into_inner().driver;
        Ok(self.watch(move |service| service.slices(&driver), lists::slice_list))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Ok(Response::new(self.node_status().await))
    }

    async fn import(
        &self,
        request: Request<v1::ImportRequest>,
    ) -> Result<Response<v1::ImportResponse>, Status> {
        self.allow(&request)?;
        Ok(Response::new(self.import_file(request.into_inner()).await?))
    }

    async fn forget(
        &self,
        request: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetResponse>, Status> {
        self.allow(&request)?;
        let v1::ForgetRequest { file, pod } = request.into_inner();
        let response = if pod.is_empty() {
            self.forget_file(&file).await?
        } else {
            self.forget_unknown_pod(pod).await?
        };
        Ok(Response::new(response))
    }

    async fn dump_state(
        &self,
        _: Request<v1::DumpStateRequest>,
    ) -> Result<Response<v1::DumpStateResponse>, Status> {
        let json = self.agent.store().dump().await?.to_string();
        Ok(Response::new(v1::DumpStateResponse { json }))
    }
}
