//! The DRA driver of both sides, in the process of the plugin: it answers every call at once.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use devlet_kubelet_api::dra::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use devlet_kubelet_api::dra::v1::{
    Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse, SERVICE,
};
use devlet_kubelet_api::plugin_registration::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::plugin_registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The pool of all devices.
pub(crate) const POOL: &str = "bench";

/// A served driver; lives until the process exits.
#[derive(Debug, Clone)]
struct Driver {
    name: Arc<str>,
    endpoint: Arc<str>,
    registered: mpsc::Sender<Result<(), String>>,
}

/// Serves a driver at a socket. With a directory to register in, returns after the registration.
pub(crate) async fn serve(name: &str, endpoint: &Path, registry: Option<&Path>) -> anyhow::Result<()> {
    let (sender, mut registered) = mpsc::channel(1);
    let driver = Driver {
        name: name.into(),
        endpoint: endpoint.display().to_string().into(),
        registered: sender,
    };
    if let Some(directory) = endpoint.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let listener = listen(endpoint)?;
    let serving = Server::builder()
        .add_service(DraPluginServer::new(driver.clone()))
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(async move { drop(serving.await) });
    let Some(registry) = registry else {
        return Ok(());
    };
    let listener = listen(&registry.join(format!("{name}-reg.sock")))?;
    let serving = Server::builder()
        .add_service(RegistrationServer::new(driver))
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(async move { drop(serving.await) });
    let status = registered.recv().await.context("the driver was not registered")?;
    status
        .map_err(anyhow::Error::msg)
        .context("the driver was rejected")
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).with_context(|| format!("cannot bind {}", path.display()))
}

/// Registration information of a driver, for both sides.
#[derive(Debug, Clone)]
pub(crate) struct Registered {
    pub(crate) name: &'static str,
    pub(crate) endpoint: PathBuf,
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter().map(|claim| {
            let device = Device {
                cdi_device_ids: vec![format!("{}/device={}", self.name, claim.name)],
                pool_name: POOL.to_owned(),
                device_name: claim.name,
                ..Device::default()
            };
            let prepared = NodePrepareResourceResponse {
                devices: vec![device],
                error: String::new(),
            };
            (claim.uid, prepared)
        });
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: claims.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims.map(|claim| (claim.uid, NodeUnprepareResourceResponse::default()));
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: claims.collect(),
        }))
    }
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.to_owned(),
            name: self.name.to_string(),
            endpoint: self.endpoint.to_string(),
            supported_versions: vec![SERVICE.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let outcome = match status.plugin_registered {
            true => Ok(()),
            false => Err(status.error),
        };
        let _ = self.registered.try_send(outcome);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
