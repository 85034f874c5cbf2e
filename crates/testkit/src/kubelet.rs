//! The kubelet's side of the device plugin API: registers plugins, follows their lists, and calls them as a kubelet does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Device, DevicePluginOptions, Empty, PreStartContainerRequest,
    PreferredAllocationRequest, RegisterRequest,
};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

use crate::plugin::dial;
use crate::process::PATIENCE;

/// The longest message that a kubelet takes.
const MAX_MESSAGE: usize = 4 << 20;

/// A plugin as the kubelet knows it.
#[derive(Debug, Clone)]
pub struct RegisteredPlugin {
    pub endpoint: String,
    pub options: DevicePluginOptions,
    /// The devices of the last list; none after the end of the stream.
    pub devices: Option<Vec<Device>>,
    /// Time from the start of the kubelet to the registration.
    pub after: Duration,
    client: DevicePluginClient<Channel>,
}

type Plugins = Arc<watch::Sender<BTreeMap<String, RegisteredPlugin>>>;

/// A kubelet that runs until it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    plugins: Plugins,
    _serving: JoinSet<()>,
}

impl Kubelet {
    /// Starts as a kubelet does: removes the sockets in its directory, then listens on its own.
    ///
    /// Dropping it leaves its socket behind, as a kubelet does.
    pub fn start(root: &Path) -> Self {
        let directory = root.join("device-plugins");
        std::fs::create_dir_all(&directory).unwrap();
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "sock") {
                std::fs::remove_file(path).unwrap();
            }
        }
        let plugins = Plugins::default();
        let service = RegistrationServer::new(Service {
            directory: directory.clone(),
            plugins: Arc::clone(&plugins),
            started: Instant::now(),
        });
        let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let server = Server::builder().add_service(service);
            let incoming = UnixListenerStream::new(listener);
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Self {
            plugins,
            _serving: serving,
        }
    }

    /// Waits until the plugin of a resource is as wanted.
    pub async fn until(
        &self,
        resource: &str,
        mut wanted: impl FnMut(&RegisteredPlugin) -> bool,
    ) -> RegisteredPlugin {
        let mut plugins = self.plugins.subscribe();
        let found = plugins.wait_for(|plugins| plugins.get(resource).is_some_and(&mut wanted));
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(found) => found.unwrap()[resource].clone(),
            Err(_) => panic!(
                "{resource} not in time: {:#?}",
                self.plugins.borrow().get(resource)
            ),
        }
    }

    /// Waits until a resource has this number of healthy devices.
    pub async fn until_healthy(&self, resource: &str, count: usize) -> RegisteredPlugin {
        self.until(resource, |plugin| plugin.healthy() == Some(count))
            .await
    }

    /// Returns the registered resources.
    pub fn resources(&self) -> Vec<String> {
        self.plugins.borrow().keys().cloned().collect()
    }
}

impl RegisteredPlugin {
    /// Returns the number of healthy devices; `None` without a list.
    pub fn healthy(&self) -> Option<usize> {
        let devices = self.devices.as_ref()?;
        Some(devices.iter().filter(|device| device.health == "Healthy").count())
    }

    /// Calls `Allocate` for one container.
    pub async fn allocate(&self, devices: &[&str]) -> Result<ContainerAllocateResponse, Status> {
        let container = ContainerAllocateRequest {
            devices_ids: owned(devices),
        };
        let request = AllocateRequest {
            container_requests: vec![container],
        };
        let answer = self.client.clone().allocate(request).await?.into_inner();
        Ok(answer.container_responses.into_iter().next().unwrap())
    }

    /// Calls `PreStartContainer`.
    pub async fn pre_start(&self, devices: &[&str]) -> Result<(), Status> {
        let request = PreStartContainerRequest {
            devices_ids: owned(devices),
        };
        self.client.clone().pre_start_container(request).await.map(drop)
    }

    /// Calls `GetPreferredAllocation` for one container.
    pub async fn prefer(
        &self,
        available: &[&str],
        must_include: &[&str],
        size: i32,
    ) -> Result<Vec<String>, Status> {
        let container = ContainerPreferredAllocationRequest {
            available_device_ids: owned(available),
            must_include_device_ids: owned(must_include),
            allocation_size: size,
        };
        let request = PreferredAllocationRequest {
            container_requests: vec![container],
        };
        let answer = self
            .client
            .clone()
            .get_preferred_allocation(request)
            .await?
            .into_inner();
        Ok(answer.container_responses.into_iter().next().unwrap().device_ids)
    }
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[derive(Debug, Clone)]
struct Service {
    directory: PathBuf,
    plugins: Plugins,
    started: Instant,
}

#[tonic::async_trait]
impl Registration for Service {
    /// Calls the plugin back before it answers.
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let after = self.started.elapsed();
        let request = request.into_inner();
        let channel = dial(self.directory.join(&request.endpoint)).await;
        let channel = channel.map_err(|error| Status::unknown(error.to_string()))?;
        let mut client = DevicePluginClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
        let registered = RegisteredPlugin {
            endpoint: request.endpoint.clone(),
            options,
            devices: None,
            after,
            client: client.clone(),
        };
        let resource = request.resource_name;
        self.plugins.send_modify(|plugins| {
            plugins.insert(resource.clone(), registered);
        });
        tokio::spawn(follow(client, Arc::clone(&self.plugins), resource));
        Ok(Response::new(Empty {}))
    }
}

async fn follow(mut client: DevicePluginClient<Channel>, plugins: Plugins, resource: String) {
    let set = |devices: Option<Vec<Device>>| {
        plugins.send_modify(|plugins| {
            if let Some(plugin) = plugins.get_mut(&resource) {
                plugin.devices = devices;
            }
        });
    };
    if let Ok(lists) = client.list_and_watch(Empty {}).await {
        let mut lists = lists.into_inner();
        while let Ok(Some(list)) = lists.message().await {
            set(Some(list.devices));
        }
    }
    set(None);
}
