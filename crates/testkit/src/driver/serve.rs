//! Services of a driver: three versions of the node service, two of health, and `pluginregistration.Registration`.

use std::sync::Arc;

use devlet_kubelet_api::plugin_registration::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use devlet_kubelet_api::{dra, dra_health};
use tokio::net::UnixListener;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use super::connection::{Connection, ConnectionHandle};
use super::{DeviceHealth, Driver, DriverEndpoint, PreparedDevice};
use crate::calls::Calls;
use crate::events::{Claim, Event, emit};
use crate::lists::Stream;
use crate::wire::{HasCalls, WireFaults};

/// Serves the node and health services.
pub(crate) fn endpoint(driver: &Arc<Driver>, listener: UnixListener) {
    serve(driver, listener, services(driver, Routes::default()));
}

/// Serves the registration socket.
pub(crate) fn registration(driver: &Arc<Driver>, listener: UnixListener) {
    let registration = RegistrationServer::new(Served(Arc::clone(driver)));
    let mut routes = Routes::new(registration);
    if driver.script.endpoint == DriverEndpoint::Registration {
        routes = services(driver, routes);
    }
    serve(driver, listener, routes);
}

fn services(driver: &Arc<Driver>, mut routes: Routes) -> Routes {
    let serves = |service| driver.script.serves(service);
    let served = || Served(Arc::clone(driver));
    if serves(dra::v1::SERVICE) {
        routes = routes.add_service(dra::v1::dra_plugin_server::DraPluginServer::new(served()));
    }
    if serves(dra::v1beta1::SERVICE) {
        routes = routes.add_service(dra::v1beta1::dra_plugin_server::DraPluginServer::new(served()));
    }
    if serves(dra::v1alpha3::SERVICE) {
        routes = routes.add_service(dra::v1alpha3::node_server::NodeServer::new(served()));
    }
    if serves(dra_health::v1::SERVICE) {
        routes = routes
            .add_service(dra_health::v1::dra_resource_health_server::DraResourceHealthServer::new(served()));
    }
    if serves(dra_health::v1alpha1::SERVICE) {
        routes = routes.add_service(
            dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(served()),
        );
    }
    routes
}

fn serve(driver: &Arc<Driver>, listener: UnixListener, routes: Routes) {
    let faults = Arc::clone(driver);
    let server = Server::builder()
        .layer(tower::layer::layer_fn(move |inner| WireFaults {
            inner,
            of: Arc::clone(&faults),
        }))
        .add_routes(routes);
    let driver = Arc::clone(driver);
    let connections = UnixListenerStream::new(listener);
    let connections = connections.map(move |stream| stream.map(|stream| Connection::new(stream, &driver)));
    tokio::spawn(server.serve_with_incoming(connections));
}

#[derive(Debug, Clone)]
struct Served(Arc<Driver>);

impl HasCalls for Driver {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

/// Implements a version of the node service. The versions differ in their names, and in share IDs.
macro_rules! node_service {
    ($api:ident, $service:path $(, $share:ident)?) => {
        #[tonic::async_trait]
        impl $service for Served {
            async fn node_prepare_resources(
                &self,
                request: Request<dra::$api::NodePrepareResourcesRequest>,
            ) -> Result<Response<dra::$api::NodePrepareResourcesResponse>, Status> {
                let connection = request.extensions().get::<ConnectionHandle>().cloned().unwrap_or_default();
                let claims = request.into_inner().claims.into_iter();
                let claims = claims.map(|claim| Claim {
                    namespace: claim.namespace,
                    name: claim.name,
                    uid: claim.uid,
                });
                let answer = self.0.prepare(dra::$api::SERVICE, claims.collect(), &connection).await?;
                let device = |device: PreparedDevice| dra::$api::Device {
                    request_names: device.requests,
                    pool_name: device.pool,
                    device_name: device.device,
                    cdi_device_ids: device.cdi,
                    $($share: device.share,)?
                };
                let claims = answer.into_iter().map(|(uid, outcome)| {
                    let (devices, error) = match outcome {
                        Ok(devices) => (devices.into_iter().map(device).collect(), String::new()),
                        Err(error) => (Vec::new(), error),
                    };
                    (uid, dra::$api::NodePrepareResourceResponse { devices, error })
                });
                Ok(Response::new(dra::$api::NodePrepareResourcesResponse {
                    claims: claims.collect(),
                }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<dra::$api::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<dra::$api::NodeUnprepareResourcesResponse>, Status> {
                let connection = request.extensions().get::<ConnectionHandle>().cloned().unwrap_or_default();
                let claims = request.into_inner().claims.into_iter();
                let claims = claims.map(|claim| Claim {
                    namespace: claim.namespace,
                    name: claim.name,
                    uid: claim.uid,
                });
                let answer = self.0.unprepare(dra::$api::SERVICE, claims.collect(), &connection).await?;
                let claims = answer.into_iter().map(|(uid, outcome)| {
                    let error = outcome.err().unwrap_or_default();
                    (uid, dra::$api::NodeUnprepareResourceResponse { error })
                });
                Ok(Response::new(dra::$api::NodeUnprepareResourcesResponse {
                    claims: claims.collect(),
                }))
            }
        }
    };
}

node_service!(v1, dra::v1::dra_plugin_server::DraPlugin, share_id);
node_service!(v1beta1, dra::v1beta1::dra_plugin_server::DraPlugin);
node_service!(v1alpha3, dra::v1alpha3::node_server::Node);

/// Implements a version of the health service. The versions differ only in their names.
macro_rules! health_service {
    ($api:ident) => {
        #[tonic::async_trait]
        impl dra_health::$api::dra_resource_health_server::DraResourceHealth for Served {
            type NodeWatchResourcesStream = Stream<dra_health::$api::NodeWatchResourcesResponse>;

            async fn node_watch_resources(
                &self,
                _: Request<dra_health::$api::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                self.0
                    .called(dra_health::$api::SERVICE, "NodeWatchResources")
                    .await?;
                let device = |each: &DeviceHealth| dra_health::$api::DeviceHealth {
                    device: Some(dra_health::$api::DeviceIdentifier {
                        pool_name: each.pool.clone(),
                        device_name: each.device.clone(),
                    }),
                    health: each.health,
                    last_updated_time: 0,
                    health_check_timeout_seconds: each.timeout_seconds,
                    message: each.message.clone(),
                };
                let message = move |list: &[DeviceHealth]| dra_health::$api::NodeWatchResourcesResponse {
                    devices: list.iter().map(device).collect(),
                };
                Ok(Response::new(self.0.health.stream(message)))
            }
        }
    };
}

health_service!(v1);
health_service!(v1alpha1);

#[tonic::async_trait]
impl Registration for Served {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.0.called("pluginregistration", "GetInfo").await?;
        let script = &self.0.script;
        Ok(Response::new(PluginInfo {
            r#type: script.kind.clone(),
            name: script.driver.clone(),
            endpoint: script.endpoint(),
            supported_versions: script.services.clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0
            .called("pluginregistration", "NotifyRegistrationStatus")
            .await?;
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
