//! Services of a plugin: `DevicePlugin` of both versions, and `pluginregistration.Registration`.

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use devlet_kubelet_api::device_plugin::v1alpha2::device_plugin_server as server_2017;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server as server;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_kubelet_api::plugin_registration::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::plugin_registration::{
    DEVICE_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{NamedService, UnaryService};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};
use tower::Service;

use crate::calls::Calls;
use crate::events::{Event, emit};
use crate::lists::{Listed, Stream};
use crate::plugin::State;
use crate::script::{Answer, Device, Door, Fault};
use crate::sockets::Sockets;
use crate::wire::{HasCalls, WireFaults};

/// Starts to serve on a socket.
pub(crate) fn serve(state: &Arc<State>, sockets: &mut Sockets, path: PathBuf) {
    let listener = sockets.listen(path);
    let served = Served(Arc::clone(state));
    let today = WithUnknownFields {
        served: served.clone(),
        inner: server::DevicePluginServer::new(served.clone()),
    };
    let faults = Arc::clone(&served.0);
    let server = Server::builder()
        .layer(tower::layer::layer_fn(move |inner| WireFaults {
            inner,
            of: Arc::clone(&faults),
        }))
        .add_service(today)
        .add_service(server_2017::DevicePluginServer::new(served.clone()))
        .add_service(RegistrationServer::new(served));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
}

#[derive(Debug, Clone)]
struct Served(Arc<State>);

impl HasCalls for State {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Served {
    /// Returns a stream of the current list and all later ones, as messages of one of the versions.
    async fn lists<T: Send + 'static>(
        &self,
        message: impl Fn(&[Device]) -> T + Send + Sync + 'static,
    ) -> Result<Response<Stream<T>>, Status> {
        self.0.called("ListAndWatch", &[]).await?;
        Ok(Response::new(self.0.devices.stream(message)))
    }

    async fn allocate_answer(&self, request: v1beta1::AllocateRequest) -> Result<RawAnswers, Status> {
        let requests = request.container_requests;
        let ids: Vec<String> = requests
            .iter()
            .flat_map(|each| each.devices_ids.clone())
            .collect();
        let fault = self.0.called("Allocate", &ids).await?;
        let mut answer = self.0.answer();
        if let Some(Fault::LargeEnv(bytes)) = fault {
            answer.envs.insert("LARGE".into(), "x".repeat(bytes));
        }
        let mut containers: Vec<RawAnswer> = requests
            .iter()
            .map(|each| raw_answer(&answer, &each.devices_ids))
            .collect();
        match fault {
            Some(Fault::NoContainers) => containers.clear(),
            Some(Fault::TooManyContainers) => containers.push(raw_answer(&answer, &[])),
            _ => {}
        }
        Ok(RawAnswers { containers })
    }
}

impl Listed for Device {
    fn set_health(&mut self, healthy: bool) {
        let health = if healthy { v1beta1::HEALTHY } else { "Unhealthy" };
        health.clone_into(&mut self.health);
    }
}

/// `AllocateResponse`, with an additional field.
#[derive(Clone, PartialEq, prost::Message)]
struct RawAnswers {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<RawAnswer>,
}

/// `ContainerAllocateResponse`, with an additional field.
#[derive(Clone, PartialEq, prost::Message)]
struct RawAnswer {
    #[prost(btree_map = "string, string", tag = "1")]
    envs: std::collections::BTreeMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    mounts: Vec<v1beta1::Mount>,
    #[prost(message, repeated, tag = "3")]
    devices: Vec<v1beta1::DeviceSpec>,
    #[prost(btree_map = "string, string", tag = "4")]
    annotations: std::collections::BTreeMap<String, String>,
    #[prost(message, repeated, tag = "5")]
    cdi_devices: Vec<v1beta1::CdiDevice>,
    #[prost(string, optional, tag = "1000")]
    unknown: Option<String>,
}

fn raw_answer(answer: &Answer, ids: &[String]) -> RawAnswer {
    let joined = ids.join(",");
    let mount = |mount: &crate::script::Mount| v1beta1::Mount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        read_only: mount.read_only,
    };
    let node = |node: &crate::script::DeviceNode| v1beta1::DeviceSpec {
        container_path: node.container_path.clone(),
        host_path: node.host_path.clone(),
        permissions: node.permissions.clone(),
    };
    let cdi = |name: &String| v1beta1::CdiDevice { name: name.clone() };
    RawAnswer {
        envs: (answer.envs.iter())
            .map(|(name, value)| (name.clone(), value.replace("{ids}", &joined)))
            .collect(),
        mounts: answer.mounts.iter().map(mount).collect(),
        devices: answer.device_nodes.iter().map(node).collect(),
        annotations: answer.annotations.clone(),
        cdi_devices: answer.cdi_devices.iter().map(cdi).collect(),
        unknown: answer.unknown_field.clone(),
    }
}

#[tonic::async_trait]
impl server::DevicePlugin for Served {
    type ListAndWatchStream = Stream<v1beta1::ListAndWatchResponse>;

    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        self.0.called("GetDevicePluginOptions", &[]).await?;
        let options = self.0.script.options;
        Ok(Response::new(v1beta1::DevicePluginOptions {
            pre_start_required: options.pre_start,
            get_preferred_allocation_available: options.preferred,
        }))
    }

    async fn list_and_watch(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |device: &Device| v1beta1::Device {
            id: device.id.clone(),
            health: device.health.clone(),
            topology: (!device.numa.is_empty()).then(|| v1beta1::TopologyInfo {
                nodes: device.numa.iter().map(|&id| v1beta1::NumaNode { id }).collect(),
            }),
        };
        let message = move |devices: &[Device]| v1beta1::ListAndWatchResponse {
            devices: devices.iter().map(device).collect(),
        };
        self.lists(message).await
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let ids: Vec<String> = requests
            .iter()
            .flat_map(|each| each.available_device_ids.clone())
            .collect();
        let fault = self.0.called("GetPreferredAllocation", &ids).await?;
        let mut container_responses: Vec<_> = requests.into_iter().map(prefer_the_last).collect();
        if fault == Some(Fault::TooManyContainers) {
            container_responses.push(v1beta1::ContainerPreferredAllocationResponse::default());
        }
        Ok(Response::new(v1beta1::PreferredAllocationResponse {
            container_responses,
        }))
    }

    /// Not called: [`WithUnknownFields`] answers instead.
    async fn allocate(
        &self,
        _: Request<v1beta1::AllocateRequest>,
    ) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        Err(Status::new(Code::Unimplemented, "answered by WithUnknownFields"))
    }

    async fn pre_start_container(
        &self,
        request: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        self.0
            .called("PreStartContainer", &request.into_inner().devices_ids)
            .await?;
        Ok(Response::new(v1beta1::PreStartContainerResponse {}))
    }
}

fn prefer_the_last(
    request: v1beta1::ContainerPreferredAllocationRequest,
) -> v1beta1::ContainerPreferredAllocationResponse {
    let size = usize::try_from(request.allocation_size).unwrap_or(0);
    let mut device_ids = request.must_include_device_ids;
    for id in request.available_device_ids.into_iter().rev() {
        if device_ids.len() < size && !device_ids.contains(&id) {
            device_ids.push(id);
        }
    }
    v1beta1::ContainerPreferredAllocationResponse { device_ids }
}

#[tonic::async_trait]
impl server_2017::DevicePlugin for Served {
    type ListAndWatchStream = Stream<v1alpha2::ListAndWatchResponse>;

    async fn list_and_watch(
        &self,
        _: Request<v1alpha2::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |device: &Device| v1alpha2::Device {
            id: device.id.clone(),
            health: device.health.clone(),
        };
        let message = move |devices: &[Device]| v1alpha2::ListAndWatchResponse {
            devices: devices.iter().map(device).collect(),
        };
        self.lists(message).await
    }

    async fn allocate(
        &self,
        request: Request<v1alpha2::AllocateRequest>,
    ) -> Result<Response<v1alpha2::AllocateResponse>, Status> {
        let ids = request.into_inner().devices_ids;
        self.0.called("Allocate", &ids).await?;
        let answer = raw_answer(&self.0.answer(), &ids);
        let mount = |mount: v1beta1::Mount| v1alpha2::Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            read_only: mount.read_only,
        };
        let node = |node: v1beta1::DeviceSpec| v1alpha2::DeviceSpec {
            container_path: node.container_path,
            host_path: node.host_path,
            permissions: node.permissions,
        };
        Ok(Response::new(v1alpha2::AllocateResponse {
            envs: answer.envs,
            mounts: answer.mounts.into_iter().map(mount).collect(),
            devices: answer.devices.into_iter().map(node).collect(),
            annotations: answer.annotations,
        }))
    }
}

#[tonic::async_trait]
impl Registration for Served {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.0.called("GetInfo", &[]).await?;
        let script = &self.0.script;
        let endpoint = match script.door {
            Door::RegistryWithEndpoint => script.root.join("device-plugins").join(script.socket_name()),
            _ => Default::default(),
        };
        Ok(Response::new(PluginInfo {
            r#type: DEVICE_PLUGIN.into(),
            name: script.resource.clone(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec![v1beta1::VERSION.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.called("NotifyRegistrationStatus", &[]).await?;
        let status = request.into_inner();
        emit(&match status.plugin_registered {
            true => Event::Registered,
            false => Event::RegisterFailed {
                code: Code::Unknown as i32,
                message: status.error,
            },
        });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The current service, with more fields in the answers to `Allocate` than the bindings have.
#[derive(Debug, Clone)]
struct WithUnknownFields {
    served: Served,
    inner: server::DevicePluginServer<Served>,
}

impl NamedService for WithUnknownFields {
    const NAME: &'static str = "v1beta1.DevicePlugin";
}

pub(crate) type Answering<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl Service<http::Request<Body>> for WithUnknownFields {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != "/v1beta1.DevicePlugin/Allocate" {
            return Box::pin(self.inner.call(request));
        }
        let served = self.served.clone();
        Box::pin(async move {
            let codec = tonic_prost::ProstCodec::<RawAnswers, v1beta1::AllocateRequest>::default();
            Ok(tonic::server::Grpc::new(codec)
                .unary(Allocate(served), request)
                .await)
        })
    }
}

struct Allocate(Served);

impl UnaryService<v1beta1::AllocateRequest> for Allocate {
    type Response = RawAnswers;
    type Future = Answering<Result<Response<RawAnswers>, Status>>;

    fn call(&mut self, request: Request<v1beta1::AllocateRequest>) -> Self::Future {
        let served = self.0.clone();
        Box::pin(async move { Ok(Response::new(served.allocate_answer(request.into_inner()).await?)) })
    }
}
