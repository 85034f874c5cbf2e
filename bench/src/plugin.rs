//! The device plugin of both sides: one process that answers every call at once.
//!
//! It reads one [`Command`] per line and answers each with an [`Answer`]. A bare client of the same server measures
//! a round trip and a list without devlet or the kubelet in between.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use devlet_kubelet_api::device_plugin::v1beta1::registration_client::RegistrationClient;
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, DeviceSpec,
    Empty, ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, TopologyInfo,
};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::process::{Process, answer_lines};
use crate::{clock, driver};

/// A command to the plugin process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Serve `count` devices on a socket, replacing an earlier offer, and register if there is a kubelet. Answered
    /// when the list was sent, or without a kubelet, when the socket is served.
    Offer {
        directory: PathBuf,
        socket: String,
        resource: String,
        count: usize,
        register: bool,
        pre_start: bool,
    },
    /// Serve a DRA driver at this socket too, and register if there is a directory for it. Answered when it is
    /// registered, or without a directory, when the socket is served.
    Drive {
        driver: String,
        endpoint: PathBuf,
        registry: Option<PathBuf>,
    },
    /// Send another list to the watcher of that socket.
    List {
        directory: PathBuf,
        socket: String,
        count: usize,
    },
}

/// The result of a command.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Time at which the list was passed to the gRPC library, by [`clock::now`].
    pub(crate) at: u64,
    pub(crate) error: Option<String>,
}

/// Returns the name of a device, with a realistic length.
pub(crate) fn device_id(number: usize) -> String {
    format!("GPU-{number:08x}-93b6-9ec0-c1c5-3dd8b5b1a1b6")
}

/// Returns the answer for any container.
pub(crate) fn allocated() -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: BTreeMap::from([("BENCH_DEVICES".to_owned(), "all".to_owned())]),
        devices: vec![DeviceSpec {
            container_path: "/dev/bench".to_owned(),
            host_path: "/dev/null".to_owned(),
            permissions: "rw".to_owned(),
        }],
        ..ContainerAllocateResponse::default()
    }
}

fn list(count: usize) -> ListAndWatchResponse {
    let device = |number| Device {
        id: device_id(number),
        health: "Healthy".to_owned(),
        topology: Some(TopologyInfo {
            nodes: vec![NumaNode { id: 0 }],
        }),
    };
    ListAndWatchResponse {
        devices: (0..count).map(device).collect(),
    }
}

/// Gives the plugin process a command. Returns the time in its answer.
pub(crate) async fn ask(plugin: &mut Process, command: &Command) -> anyhow::Result<u64> {
    let answer: Answer = plugin.call(command).await?;
    match answer.error {
        Some(error) => bail!("plugin command {command:?} failed: {error}"),
        None => Ok(answer.at),
    }
}

/// Runs the plugin process until its standard input ends.
pub(crate) async fn run() -> anyhow::Result<()> {
    let mut offers = HashMap::new();
    answer_lines(async |command| match carry_out(command, &mut offers).await {
        Ok(at) => Answer { at, error: None },
        Err(error) => Answer {
            at: 0,
            error: Some(format!("{error:#}")),
        },
    })
    .await
}

/// The services of one socket.
struct Offer {
    server: JoinHandle<()>,
    watcher: Watcher,
    handed_over: mpsc::Receiver<u64>,
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn carry_out(command: Command, offers: &mut HashMap<PathBuf, Offer>) -> anyhow::Result<u64> {
    match command {
        Command::Offer {
            directory,
            socket,
            resource,
            count,
            register,
            pre_start,
        } => {
            let path = directory.join(&socket);
            drop(offers.remove(&path));
            let options = DevicePluginOptions {
                pre_start_required: pre_start,
                ..DevicePluginOptions::default()
            };
            let mut offer = serve(&path, count, options)?;
            let mut at = clock::now();
            if register {
                announce(&directory, socket, resource, options).await?;
                at = offer
                    .handed_over
                    .recv()
                    .await
                    .context("ListAndWatch was not called")?;
            }
            offers.insert(path, offer);
            Ok(at)
        }
        Command::Drive {
            driver,
            endpoint,
            registry,
        } => {
            driver::serve(&driver, &endpoint, registry.as_deref()).await?;
            Ok(clock::now())
        }
        Command::List {
            directory,
            socket,
            count,
        } => {
            let offer = offers
                .get_mut(&directory.join(socket))
                .context("there is no offer at this socket")?;
            let message = list(count);
            // Discard the first list of a later watcher: it is not the requested one.
            while offer.handed_over.try_recv().is_ok() {}
            let watcher = offer
                .watcher
                .lock()
                .await
                .clone()
                .context("no client watches the list")?;
            let at = clock::now();
            watcher
                .send(Ok(message))
                .await
                .context("the watcher has disconnected")?;
            Ok(at)
        }
    }
}

fn serve(path: &Path, count: usize, options: DevicePluginOptions) -> anyhow::Result<Offer> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).with_context(|| format!("cannot bind {}", path.display()))?;
    let (sender, handed_over) = mpsc::channel(16);
    let watcher = Watcher::default();
    let plugin = Plugin {
        count,
        options,
        watcher: watcher.clone(),
        handed_over: sender,
    };
    let serving = Server::builder()
        .add_service(DevicePluginServer::new(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let server = tokio::spawn(async move { drop(serving.await) });
    Ok(Offer {
        server,
        watcher,
        handed_over,
    })
}

async fn announce(
    directory: &Path,
    endpoint: String,
    resource_name: String,
    options: DevicePluginOptions,
) -> anyhow::Result<()> {
    let channel = connect(&directory.join("kubelet.sock")).await?;
    let request = RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint,
        resource_name,
        options: Some(options),
    };
    RegistrationClient::new(channel)
        .register(request)
        .await
        .context("the registration was rejected")?;
    Ok(())
}

/// Opens a plain channel to a unix socket.
pub(crate) async fn connect(path: &Path) -> anyhow::Result<Channel> {
    let path = path.to_owned();
    let shown = path.display().to_string();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await;
    channel.with_context(|| format!("cannot connect to {shown}"))
}

type Lists = mpsc::Sender<Result<ListAndWatchResponse, Status>>;
type Watcher = Arc<Mutex<Option<Lists>>>;

struct Plugin {
    count: usize,
    options: DevicePluginOptions,
    watcher: Watcher,
    handed_over: mpsc::Sender<u64>,
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.options))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let message = list(self.count);
        *self.watcher.lock().await = Some(sender.clone());
        let _ = self.handed_over.try_send(clock::now());
        let _ = sender.send(Ok(message)).await;
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Ok(Response::new(PreferredAllocationResponse::default()))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests.len();
        Ok(Response::new(AllocateResponse {
            container_responses: vec![allocated(); containers],
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse::default()))
    }
}
