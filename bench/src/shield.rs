//! The shield: what devlet adds to the calls before a container starts.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, Empty, ListAndWatchResponse, PreStartContainerRequest,
    RegisterRequest,
};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::cases::{Bench, RESOURCE, progress};
use crate::clock::Samples;
use crate::kubelet;
use crate::plugin::{self, connect, device_id};
use crate::report::{Bar, Row};

/// Most that devlet may add to the plugin's own calls, in milliseconds.
const MOST_ADDED: f64 = 2.0;

impl Bench {
    /// Measures `PreStartContainer` of a new container through devlet, and the plugin's calls that are made in it.
    pub(crate) async fn shield(&mut self) -> anyhow::Result<()> {
        progress("containers behind the shield");
        kubelet::clear()?;
        let mut registered = Registrations::serve(kubelet::directory())?;
        let root = self.fresh("shield");
        let devlet = self.devlet.start_shield(&root, RESOURCE).await?;
        let offer = plugin::Command::Offer {
            directory: devlet.plugins(),
            socket: "shield.sock".to_owned(),
            resource: RESOURCE.to_owned(),
            count: self.plan.rounds * self.plan.samples,
            register: true,
            pre_start: true,
        };
        plugin::ask(&mut self.plugin, &offer).await?;
        let endpoint = registered.recv().await.context("devlet does not register")?;
        let mut through = Side::new(&kubelet::directory().join(endpoint)).await?;
        let mut direct = Side::new(&devlet.plugins().join("shield.sock")).await?;
        let (mut theirs, mut ours) = (Samples::default(), Samples::default());
        let mut both = Samples::default();
        for round in 0..self.plan.rounds {
            progress(&format!("  round {} of {}", round + 1, self.plan.rounds));
            for sample in 0..self.plan.samples {
                let device = device_id(round * self.plan.samples + sample);
                theirs.add(direct.allocate(&device).await? + direct.pre_start(&device).await?);
                let allocate = through.allocate(&device).await?;
                let pre_start = through.pre_start(&device).await?;
                ours.add(pre_start);
                both.add(allocate + pre_start);
            }
            self.bare_round().await?;
        }
        self.rows.push(Row::medians(
            "PreStartContainer of a new container through the shield",
            ours.summary(),
            "Allocate and PreStartContainer of the plugin",
            theirs.summary(),
            self.plan.bar(Bar::Adds(MOST_ADDED)),
        ));
        // Only information: a container waits for the sum of both.
        self.rows.push(Row::medians(
            "Allocate and PreStartContainer through the shield",
            both.summary(),
            "those of the plugin",
            theirs.summary(),
            None,
        ));
        Ok(())
    }
}

/// A device plugin as a kubelet calls it.
struct Side {
    client: DevicePluginClient<Channel>,
    /// The list, which a kubelet follows.
    _list: Streaming<ListAndWatchResponse>,
}

impl Side {
    async fn new(socket: &Path) -> anyhow::Result<Self> {
        let mut client = DevicePluginClient::new(connect(socket).await?);
        let mut list = client.list_and_watch(Empty {}).await?.into_inner();
        list.message().await?.context("the list has ended")?;
        Ok(Self { client, _list: list })
    }

    async fn allocate(&mut self, device: &str) -> anyhow::Result<Duration> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: vec![device.to_owned()],
            }],
        };
        let began = Instant::now();
        self.client.allocate(request).await?;
        Ok(began.elapsed())
    }

    async fn pre_start(&mut self, device: &str) -> anyhow::Result<Duration> {
        let request = PreStartContainerRequest {
            devices_ids: vec![device.to_owned()],
        };
        let began = Instant::now();
        self.client.pre_start_container(request).await?;
        Ok(began.elapsed())
    }
}

/// A kubelet that accepts every registration, and sends the endpoint.
struct Registrations(mpsc::Sender<String>);

impl Registrations {
    fn serve(directory: &Path) -> anyhow::Result<mpsc::Receiver<String>> {
        let (sender, endpoints) = mpsc::channel(16);
        let listener = UnixListener::bind(directory.join("kubelet.sock"))?;
        let serving = Server::builder()
            .add_service(RegistrationServer::new(Self(sender)))
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(async move { drop(serving.await) });
        Ok(endpoints)
    }
}

#[tonic::async_trait]
impl Registration for Registrations {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let _ = self.0.send(request.into_inner().endpoint).await;
        Ok(Response::new(Empty {}))
    }
}
