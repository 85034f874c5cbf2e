//! Checks that every method is called by the full path that the kubelet and its plugins use.
//!
//! Each generated client calls the generated server of the same service, in memory. For every call, the log has
//! the path that the client requested and the method that the server ran.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use devlet_kubelet_api::{device_plugin, dra, dra_health, plugin_registration, pod_resources};
use tonic::body::Body;
use tonic::codegen::{BoxStream, Service, http, tokio_stream};
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

#[test]
fn device_plugin_v1beta1() {
    use device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
    use device_plugin::v1beta1::device_plugin_server::DevicePluginServer;
    use device_plugin::v1beta1::registration_client::RegistrationClient;
    use device_plugin::v1beta1::registration_server::RegistrationServer;
    use device_plugin::v1beta1::{
        AllocateRequest, Empty, PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest,
    };
    let log = Log::default();
    let mut kubelet = RegistrationClient::new(log.before(RegistrationServer::new(log.clone())));
    let mut plugin = DevicePluginClient::new(log.before(DevicePluginServer::new(log.clone())));

    answer(kubelet.register(RegisterRequest::default()));
    answer(plugin.get_device_plugin_options(Empty {}));
    only_message(answer(plugin.list_and_watch(Empty {})));
    answer(plugin.get_preferred_allocation(PreferredAllocationRequest::default()));
    answer(plugin.allocate(AllocateRequest::default()));
    answer(plugin.pre_start_container(PreStartContainerRequest::default()));

    log.is(&[
        ("/v1beta1.Registration/Register", "register"),
        (
            "/v1beta1.DevicePlugin/GetDevicePluginOptions",
            "get_device_plugin_options",
        ),
        ("/v1beta1.DevicePlugin/ListAndWatch", "list_and_watch"),
        (
            "/v1beta1.DevicePlugin/GetPreferredAllocation",
            "get_preferred_allocation",
        ),
        ("/v1beta1.DevicePlugin/Allocate", "allocate"),
        ("/v1beta1.DevicePlugin/PreStartContainer", "pre_start_container"),
    ]);
    assert_eq!(
        name(&RegistrationServer::new(log.clone())),
        "v1beta1.Registration"
    );
    assert_eq!(name(&DevicePluginServer::new(log)), "v1beta1.DevicePlugin");
}

#[test]
fn device_plugin_v1alpha2() {
    use device_plugin::v1alpha2::device_plugin_client::DevicePluginClient;
    use device_plugin::v1alpha2::device_plugin_server::DevicePluginServer;
    use device_plugin::v1alpha2::registration_client::RegistrationClient;
    use device_plugin::v1alpha2::registration_server::RegistrationServer;
    use device_plugin::v1alpha2::{AllocateRequest, Empty, RegisterRequest};
    let log = Log::default();
    let mut kubelet = RegistrationClient::new(log.before(RegistrationServer::new(log.clone())));
    let mut plugin = DevicePluginClient::new(log.before(DevicePluginServer::new(log.clone())));

    answer(kubelet.register(RegisterRequest::default()));
    only_message(answer(plugin.list_and_watch(Empty {})));
    answer(plugin.allocate(AllocateRequest::default()));

    log.is(&[
        ("/deviceplugin.Registration/Register", "register"),
        ("/deviceplugin.DevicePlugin/ListAndWatch", "list_and_watch"),
        ("/deviceplugin.DevicePlugin/Allocate", "allocate"),
    ]);
    assert_eq!(
        name(&RegistrationServer::new(log.clone())),
        "deviceplugin.Registration"
    );
    assert_eq!(name(&DevicePluginServer::new(log)), "deviceplugin.DevicePlugin");
}

#[test]
fn plugin_registration() {
    use plugin_registration::registration_client::RegistrationClient;
    use plugin_registration::registration_server::RegistrationServer;
    use plugin_registration::{InfoRequest, RegistrationStatus};
    let log = Log::default();
    let mut plugin = RegistrationClient::new(log.before(RegistrationServer::new(log.clone())));

    answer(plugin.get_info(InfoRequest {}));
    answer(plugin.notify_registration_status(RegistrationStatus::default()));

    log.is(&[
        ("/pluginregistration.Registration/GetInfo", "get_info"),
        (
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            "notify_registration_status",
        ),
    ]);
    assert_eq!(
        name(&RegistrationServer::new(log)),
        "pluginregistration.Registration"
    );
}

#[test]
fn dra_v1() {
    use dra::v1::dra_plugin_client::DraPluginClient;
    use dra::v1::dra_plugin_server::DraPluginServer;
    use dra::v1::{NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
    let log = Log::default();
    let mut driver = DraPluginClient::new(log.before(DraPluginServer::new(log.clone())));

    answer(driver.node_prepare_resources(NodePrepareResourcesRequest::default()));
    answer(driver.node_unprepare_resources(NodeUnprepareResourcesRequest::default()));

    log.is(&[
        (
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            "node_prepare_resources",
        ),
        (
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            "node_unprepare_resources",
        ),
    ]);
    assert_eq!(
        name(&DraPluginServer::new(log)),
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
    );
}

#[test]
fn dra_v1beta1() {
    use dra::v1beta1::dra_plugin_client::DraPluginClient;
    use dra::v1beta1::dra_plugin_server::DraPluginServer;
    use dra::v1beta1::{NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
    let log = Log::default();
    let mut driver = DraPluginClient::new(log.before(DraPluginServer::new(log.clone())));

    answer(driver.node_prepare_resources(NodePrepareResourcesRequest::default()));
    answer(driver.node_unprepare_resources(NodeUnprepareResourcesRequest::default()));

    log.is(&[
        (
            "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
            "node_prepare_resources",
        ),
        (
            "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
            "node_unprepare_resources",
        ),
    ]);
    assert_eq!(
        name(&DraPluginServer::new(log)),
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
    );
}

#[test]
fn dra_v1alpha3() {
    use dra::v1alpha3::node_client::NodeClient;
    use dra::v1alpha3::node_server::NodeServer;
    use dra::v1alpha3::{NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
    let log = Log::default();
    let mut driver = NodeClient::new(log.before(NodeServer::new(log.clone())));

    answer(driver.node_prepare_resources(NodePrepareResourcesRequest::default()));
    answer(driver.node_unprepare_resources(NodeUnprepareResourcesRequest::default()));

    log.is(&[
        ("/v1alpha3.Node/NodePrepareResources", "node_prepare_resources"),
        (
            "/v1alpha3.Node/NodeUnprepareResources",
            "node_unprepare_resources",
        ),
    ]);
    assert_eq!(name(&NodeServer::new(log)), dra::v1alpha3::WIRE_SERVICE);
}

#[test]
fn dra_health_v1() {
    use dra_health::v1::NodeWatchResourcesRequest;
    use dra_health::v1::dra_resource_health_client::DraResourceHealthClient;
    use dra_health::v1::dra_resource_health_server::DraResourceHealthServer;
    let log = Log::default();
    let mut driver = DraResourceHealthClient::new(log.before(DraResourceHealthServer::new(log.clone())));

    only_message(answer(driver.node_watch_resources(NodeWatchResourcesRequest {})));

    log.is(&[("/v1.DRAResourceHealth/NodeWatchResources", "node_watch_resources")]);
    assert_eq!(name(&DraResourceHealthServer::new(log)), dra_health::v1::SERVICE);
}

#[test]
fn dra_health_v1alpha1() {
    use dra_health::v1alpha1::NodeWatchResourcesRequest;
    use dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient;
    use dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer;
    let log = Log::default();
    let mut driver = DraResourceHealthClient::new(log.before(DraResourceHealthServer::new(log.clone())));

    only_message(answer(driver.node_watch_resources(NodeWatchResourcesRequest {})));

    log.is(&[(
        "/v1alpha1.DRAResourceHealth/NodeWatchResources",
        "node_watch_resources",
    )]);
    assert_eq!(
        name(&DraResourceHealthServer::new(log)),
        dra_health::v1alpha1::SERVICE
    );
}

#[test]
fn pod_resources_v1() {
    use pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
    use pod_resources::v1::pod_resources_lister_server::PodResourcesListerServer;
    use pod_resources::v1::{AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest};
    let log = Log::default();
    let mut kubelet = PodResourcesListerClient::new(log.before(PodResourcesListerServer::new(log.clone())));

    answer(kubelet.list(ListPodResourcesRequest {}));
    answer(kubelet.get_allocatable_resources(AllocatableResourcesRequest {}));
    answer(kubelet.get(GetPodResourcesRequest::default()));

    log.is(&[
        ("/v1.PodResourcesLister/List", "list"),
        (
            "/v1.PodResourcesLister/GetAllocatableResources",
            "get_allocatable_resources",
        ),
        ("/v1.PodResourcesLister/Get", "get"),
    ]);
    assert_eq!(name(&PodResourcesListerServer::new(log)), "v1.PodResourcesLister");
}

#[test]
fn pod_resources_v1alpha1() {
    use pod_resources::v1alpha1::ListPodResourcesRequest;
    use pod_resources::v1alpha1::pod_resources_lister_client::PodResourcesListerClient;
    use pod_resources::v1alpha1::pod_resources_lister_server::PodResourcesListerServer;
    let log = Log::default();
    let mut kubelet = PodResourcesListerClient::new(log.before(PodResourcesListerServer::new(log.clone())));

    answer(kubelet.list(ListPodResourcesRequest {}));

    log.is(&[("/v1alpha1.PodResourcesLister/List", "list")]);
    assert_eq!(
        name(&PodResourcesListerServer::new(log)),
        "v1alpha1.PodResourcesLister"
    );
}

#[test]
fn a_version_that_is_not_served_is_unimplemented() {
    use device_plugin::{v1alpha2, v1beta1};
    let kubelet = v1beta1::registration_server::RegistrationServer::new(Log::default());
    let mut old_plugin = v1alpha2::registration_client::RegistrationClient::new(kubelet);

    let refused = ready(old_plugin.register(v1alpha2::RegisterRequest::default()));

    assert_eq!(refused.unwrap_err().code(), tonic::Code::Unimplemented);
}

/// A log of calls, and a peer that serves every method with an empty answer.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn before<S>(&self, server: S) -> Logged<S> {
        Logged {
            log: self.clone(),
            server,
        }
    }

    fn push(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }

    fn unary<T: Default>(&self, method: &str) -> Result<Response<T>, Status> {
        self.push(method);
        Ok(Response::new(T::default()))
    }

    fn stream<T: Default + Send + 'static>(&self, method: &str) -> Result<Response<BoxStream<T>>, Status> {
        self.push(method);
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(T::default())]))))
    }

    #[track_caller]
    fn is(&self, calls: &[(&str, &str)]) {
        let lines: Vec<_> = calls.iter().flat_map(|&(path, method)| [path, method]).collect();
        assert_eq!(*self.0.lock().unwrap(), lines);
    }
}

/// A server that logs each request before it handles it.
struct Logged<S> {
    log: Log,
    server: S,
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Logged<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.server.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        self.log.push(request.uri().path());
        self.server.call(request)
    }
}

fn name<S: NamedService>(_: &S) -> &'static str {
    S::NAME
}

/// Polls once: a call in memory never waits.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a call in memory is pending"),
    }
}

fn answer<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> T {
    ready(call).unwrap().into_inner()
}

fn only_message<T>(mut stream: Streaming<T>) {
    assert!(ready(stream.message()).unwrap().is_some());
    assert!(ready(stream.message()).unwrap().is_none());
}

#[tonic::async_trait]
impl device_plugin::v1beta1::registration_server::Registration for Log {
    async fn register(
        &self,
        _: Request<device_plugin::v1beta1::RegisterRequest>,
    ) -> Result<Response<device_plugin::v1beta1::Empty>, Status> {
        self.unary("register")
    }
}

#[tonic::async_trait]
impl device_plugin::v1beta1::device_plugin_server::DevicePlugin for Log {
    async fn get_device_plugin_options(
        &self,
        _: Request<device_plugin::v1beta1::Empty>,
    ) -> Result<Response<device_plugin::v1beta1::DevicePluginOptions>, Status> {
        self.unary("get_device_plugin_options")
    }

    type ListAndWatchStream = BoxStream<device_plugin::v1beta1::ListAndWatchResponse>;

    async fn list_and_watch(
        &self,
        _: Request<device_plugin::v1beta1::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.stream("list_and_watch")
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<device_plugin::v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<device_plugin::v1beta1::PreferredAllocationResponse>, Status> {
        self.unary("get_preferred_allocation")
    }

    async fn allocate(
        &self,
        _: Request<device_plugin::v1beta1::AllocateRequest>,
    ) -> Result<Response<device_plugin::v1beta1::AllocateResponse>, Status> {
        self.unary("allocate")
    }

    async fn pre_start_container(
        &self,
        _: Request<device_plugin::v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<device_plugin::v1beta1::PreStartContainerResponse>, Status> {
        self.unary("pre_start_container")
    }
}

#[tonic::async_trait]
impl device_plugin::v1alpha2::registration_server::Registration for Log {
    async fn register(
        &self,
        _: Request<device_plugin::v1alpha2::RegisterRequest>,
    ) -> Result<Response<device_plugin::v1alpha2::Empty>, Status> {
        self.unary("register")
    }
}

#[tonic::async_trait]
impl device_plugin::v1alpha2::device_plugin_server::DevicePlugin for Log {
    type ListAndWatchStream = BoxStream<device_plugin::v1alpha2::ListAndWatchResponse>;

    async fn list_and_watch(
        &self,
        _: Request<device_plugin::v1alpha2::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.stream("list_and_watch")
    }

    async fn allocate(
        &self,
        _: Request<device_plugin::v1alpha2::AllocateRequest>,
    ) -> Result<Response<device_plugin::v1alpha2::AllocateResponse>, Status> {
        self.unary("allocate")
    }
}

#[tonic::async_trait]
impl plugin_registration::registration_server::Registration for Log {
    async fn get_info(
        &self,
        _: Request<plugin_registration::InfoRequest>,
    ) -> Result<Response<plugin_registration::PluginInfo>, Status> {
        self.unary("get_info")
    }

    async fn notify_registration_status(
        &self,
        _: Request<plugin_registration::RegistrationStatus>,
    ) -> Result<Response<plugin_registration::RegistrationStatusResponse>, Status> {
        self.unary("notify_registration_status")
    }
}

#[tonic::async_trait]
impl dra::v1::dra_plugin_server::DraPlugin for Log {
    async fn node_prepare_resources(
        &self,
        _: Request<dra::v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra::v1::NodePrepareResourcesResponse>, Status> {
        self.unary("node_prepare_resources")
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<dra::v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra::v1::NodeUnprepareResourcesResponse>, Status> {
        self.unary("node_unprepare_resources")
    }
}

#[tonic::async_trait]
impl dra::v1beta1::dra_plugin_server::DraPlugin for Log {
    async fn node_prepare_resources(
        &self,
        _: Request<dra::v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra::v1beta1::NodePrepareResourcesResponse>, Status> {
        self.unary("node_prepare_resources")
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<dra::v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra::v1beta1::NodeUnprepareResourcesResponse>, Status> {
        self.unary("node_unprepare_resources")
    }
}

#[tonic::async_trait]
impl dra::v1alpha3::node_server::Node for Log {
    async fn node_prepare_resources(
        &self,
        _: Request<dra::v1alpha3::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra::v1alpha3::NodePrepareResourcesResponse>, Status> {
        self.unary("node_prepare_resources")
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<dra::v1alpha3::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra::v1alpha3::NodeUnprepareResourcesResponse>, Status> {
        self.unary("node_unprepare_resources")
    }
}

#[tonic::async_trait]
impl dra_health::v1::dra_resource_health_server::DraResourceHealth for Log {
    type NodeWatchResourcesStream = BoxStream<dra_health::v1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<dra_health::v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        self.stream("node_watch_resources")
    }
}

#[tonic::async_trait]
impl dra_health::v1alpha1::dra_resource_health_server::DraResourceHealth for Log {
    type NodeWatchResourcesStream = BoxStream<dra_health::v1alpha1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<dra_health::v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        self.stream("node_watch_resources")
    }
}

#[tonic::async_trait]
impl pod_resources::v1::pod_resources_lister_server::PodResourcesLister for Log {
    async fn list(
        &self,
        _: Request<pod_resources::v1::ListPodResourcesRequest>,
    ) -> Result<Response<pod_resources::v1::ListPodResourcesResponse>, Status> {
        self.unary("list")
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<pod_resources::v1::AllocatableResourcesRequest>,
    ) -> Result<Response<pod_resources::v1::AllocatableResourcesResponse>, Status> {
        self.unary("get_allocatable_resources")
    }

    async fn get(
        &self,
        _: Request<pod_resources::v1::GetPodResourcesRequest>,
    ) -> Result<Response<pod_resources::v1::GetPodResourcesResponse>, Status> {
        self.unary("get")
    }
}

#[tonic::async_trait]
impl pod_resources::v1alpha1::pod_resources_lister_server::PodResourcesLister for Log {
    async fn list(
        &self,
        _: Request<pod_resources::v1alpha1::ListPodResourcesRequest>,
    ) -> Result<Response<pod_resources::v1alpha1::ListPodResourcesResponse>, Status> {
        self.unary("list")
    }
}
