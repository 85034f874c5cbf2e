//! The device plugin of one resource, as the kubelet sees it.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;

use devlet_core::shield::Advertised;
use devlet_core::{DeviceId, Moment, ResourceName};
use devlet_kubelet_api::device_plugin::v1beta1::{
    self, AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, device_plugin_server,
};
use futures_util::Stream;
use futures_util::stream;
use tokio::sync::watch;
use tokio::time::Duration;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::list::{self, KubeletList};
use super::report::{HOST_PIDS, ShieldReport, ShieldState};
use crate::workflow::lease::LeaseWorkflow;

/// The options of every resource: the plugin is called before each start, and devlet has a choice of its own.
pub(super) const OPTIONS: DevicePluginOptions = DevicePluginOptions {
    pre_start_required: true,
    get_preferred_allocation_available: true,
};

/// Time for the kubelet's program to tell its version. The plugin is asked meanwhile.
const JUDGE_TIME: Duration = Duration::from_millis(1500);

/// The device plugin of one resource.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) workflow: LeaseWorkflow,
    pub(super) resource: ResourceName,
    pub(super) report: ShieldReport,
    /// When the machine was booted.
    pub(super) booted: Moment,
    /// The number of lists that the kubelet follows.
    pub(super) followers: Arc<watch::Sender<usize>>,
    pub(super) stop: CancellationToken,
}

/// Counts a list that the kubelet follows.
struct Follower(Arc<watch::Sender<usize>>);

impl Follower {
    fn new(followers: &Arc<watch::Sender<usize>>) -> Self {
        followers.send_modify(|count| *count += 1);
        Self(Arc::clone(followers))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// A list that the kubelet follows.
struct Following {
    endpoint: Endpoint,
    changes: watch::Receiver<u64>,
    /// The last list for the kubelet.
    last: Option<Advertised>,
    _follower: Follower,
}

impl Following {
    /// Returns the next list that differs from the last one; `None` at the end.
    async fn next(&mut self) -> Option<ListAndWatchResponse> {
        loop {
            self.changes.borrow_and_update();
            let endpoint = &self.endpoint;
            let advertised = list::current(&endpoint.workflow, &endpoint.resource, endpoint.booted);
            let last = self.last.as_ref();
            if !last.is_some_and(|last| last.shows_same(&advertised)) {
                let shown = endpoint.shown(list::encode(&advertised));
                self.last = Some(advertised);
                return Some(shown);
            }
            let wait = advertised
                .until
                .map(|until| Duration::from_millis(until.since(endpoint.workflow.store.now())));
            let expired = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = endpoint.stop.cancelled() => return None,
                changed = self.changes.changed() => changed.ok()?,
                () = expired => {}
            }
        }
    }
}

impl Endpoint {
    fn shown(&self, list: KubeletList) -> ListAndWatchResponse {
        let KubeletList {
            message,
            shortened_from,
        } = list;
        self.report.update(|state| match shortened_from {
            Some(all) => {
                let kept = message.devices.len();
                let text = format!("a kubelet takes 4 MiB, so only {kept} of {all} devices are advertised");
                state.shortened.insert(self.resource.clone(), text);
            }
            None => _ = state.shortened.remove(&self.resource),
        });
        message
    }
}

fn ids(ids: Vec<String>) -> BTreeSet<DeviceId> {
    ids.into_iter().map(DeviceId::from).collect()
}

#[tonic::async_trait]
impl device_plugin_server::DevicePlugin for Endpoint {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let following = Following {
            changes: self.workflow.store.subscribe(),
            last: None,
            _follower: Follower::new(&self.followers),
            endpoint: self.clone(),
        };
        let lists = stream::unfold(following, async |mut following| {
            let list = following.next().await?;
            Some((Ok(list), following))
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let (available, must_include) = (
                ids(container.available_device_ids),
                ids(container.must_include_device_ids),
            );
            let size = usize::try_from(container.allocation_size).unwrap_or_default();
            let preferred = self
                .workflow
                .prefer(&self.resource, &available, &must_include, size);
            container_responses.push(ContainerPreferredAllocationResponse {
                device_ids: preferred.await.iter().map(ToString::to_string).collect(),
            });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let devices = container.devices_ids.into_iter().map(DeviceId::from).collect();
            let name = self.workflow.grant(&self.resource, devices).await;
            container_responses.push(ContainerAllocateResponse {
                cdi_devices: vec![CdiDevice { name }],
                ..ContainerAllocateResponse::default()
            });
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let devices = ids(request.into_inner().devices_ids);
        if self.report.read(ShieldState::is_blind) {
            // The runtime's hook would refuse the container, which fails some pods for good.
            return Err(Status::unknown(format!(
                "devlet: the process of the kubelet is not visible to devlet; {HOST_PIDS}"
            )));
        }
        // A kubelet that is too old would start the container without its devices.
        let judged = async {
            let judged = tokio::time::timeout(JUDGE_TIME, self.report.judged()).await;
            let unknown = || Some("the version of the kubelet is not known yet; tried again soon".to_owned());
            judged.unwrap_or_else(|_| unknown())
        };
        let preparing = async { tokio::join!(self.workflow.prepare(&self.resource, &devices), judged) };
        let (prepared, refusal) = tokio::select! {
            prepared = preparing => prepared,
            // A stop must not wait for a plugin: pods that come meanwhile fail.
            () = self.stop.cancelled() => {
                let resource = &self.resource;
                return Err(Status::unknown(format!("devlet: {resource}: devlet is stopping; tried again soon")));
            }
        };
        if let Some(refusal) = refusal {
            return Err(Status::unknown(format!("devlet: {}: {refusal}", self.resource)));
        }
        match prepared {
            Ok(()) => Ok(Response::new(PreStartContainerResponse {})),
            Err(error) => {
                tracing::warn!(resource = %self.resource, %error, "container not prepared");
                Err(Status::unknown(error.to_string()))
            }
        }
    }
}

/// Returns the request that registers a resource.
pub(super) fn registration(resource: &ResourceName, endpoint: String) -> v1beta1::RegisterRequest {
    v1beta1::RegisterRequest {
        version: v1beta1::VERSION.into(),
        endpoint,
        resource_name: resource.as_str().into(),
        options: Some(OPTIONS),
    }
}
