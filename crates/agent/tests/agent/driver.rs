//! DRA drivers inside the test: each has its own runtime, and ends as a process does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::config::Config;
use devlet_core::Node;
use devlet_core::dra::view::DriverView;
use devlet_kubelet_api::plugin_registration::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::plugin_registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use devlet_kubelet_api::{dra, dra_health};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// The longest time that a test waits for an event, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const DRIVER: &str = "gpu.acme.com";

pub(crate) async fn node(root: &Path) -> Agent {
    Agent::start(Config::new(root)).await.unwrap().0
}

/// Waits until the node is as wanted.
pub(crate) async fn until<T>(agent: &Agent, wanted: impl Fn(&Node) -> Option<T>) -> T {
    let mut changes = agent.store().subscribe();
    let found = async {
        loop {
            changes.borrow_and_update();
            if let Some(found) = agent.store().read(&wanted) {
                return found;
            }
            changes.changed().await.unwrap();
        }
    };
    match tokio::time::timeout(PATIENCE, found).await {
        Ok(found) => found,
        Err(_) => panic!("not in time: {:#?}", agent.store().read(Node::drivers)),
    }
}

/// Waits until the driver is as wanted.
pub(crate) async fn until_driver(agent: &Agent, wanted: impl Fn(&DriverView) -> bool) -> DriverView {
    until(agent, |node| node.driver(&DRIVER.into()).filter(&wanted)).await
}

pub(crate) fn is_connected(driver: &DriverView) -> bool {
    driver.plugins.iter().any(|plugin| plugin.connected)
}

/// An event of a driver.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// devlet has sent the status of the registration.
    Told { registered: bool, error: String },
    /// devlet has called a method. The deadline is the text on the wire.
    Called {
        service: &'static str,
        method: &'static str,
        claims: Vec<String>,
        deadline: Option<String>,
    },
    /// devlet has opened a stream of health reports.
    Watched { service: &'static str },
}

/// Health reports: device, health, timeout in seconds.
pub(crate) type Reports = Vec<(String, i32, i64)>;

/// The properties of a driver.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    pub(crate) root: PathBuf,
    /// The socket in `plugins_registry`.
    pub(crate) registry: String,
    /// The socket in `plugins`; `None` if the driver serves on the registration socket.
    pub(crate) endpoint: Option<String>,
    pub(crate) name: String,
    pub(crate) listed: Vec<&'static str>,
    /// The services that it serves. They may differ from the listed ones.
    pub(crate) has: Vec<&'static str>,
    /// The driver does not answer calls.
    pub(crate) hangs: bool,
    /// The first health reports; `None` ends the stream.
    pub(crate) reports: Option<Reports>,
}

impl Driver {
    /// Returns a driver of a current Kubernetes release.
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            registry: "gpu-reg.sock".into(),
            endpoint: Some("dra.sock".into()),
            name: DRIVER.into(),
            listed: vec!["v1.DRAPlugin", "v1beta1.DRAPlugin"],
            has: vec!["v1.DRAPlugin", "v1beta1.DRAPlugin"],
            hangs: false,
            reports: None,
        }
    }

    pub(crate) fn registry_socket(&self) -> PathBuf {
        self.root.join("plugins_registry").join(&self.registry)
    }

    pub(crate) fn endpoint_socket(&self) -> PathBuf {
        match &self.endpoint {
            Some(name) => self.root.join("plugins").join(name),
            None => self.registry_socket(),
        }
    }

    /// Creates the sockets and serves.
    pub(crate) fn start(&self) -> Process {
        let mut process = self.start_unregistered();
        process.register();
        process
    }

    /// Serves only on the endpoint.
    pub(crate) fn start_unregistered(&self) -> Process {
        let process = self.start_without_endpoint();
        if self.endpoint.is_some() {
            process.serve(&self.endpoint_socket());
        }
        process
    }

    /// Starts a process without sockets.
    pub(crate) fn start_without_endpoint(&self) -> Process {
        std::fs::create_dir_all(self.root.join("plugins")).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (events, heard) = mpsc::unbounded_channel();
        let served = Served(Arc::new(Inner {
            driver: self.clone(),
            events,
            reports: watch::Sender::new(self.reports.clone()),
            connections: AtomicUsize::new(0),
            ends: watch::Sender::new(false),
        }));
        Process {
            runtime: Some(runtime),
            served,
            events: heard,
        }
    }
}

/// A running driver. A drop kills it and leaves its sockets behind.
pub(crate) struct Process {
    runtime: Option<Runtime>,
    served: Served,
    events: mpsc::UnboundedReceiver<Event>,
}

impl Process {
    fn driver(&self) -> &Driver {
        &self.served.0.driver
    }

    /// Creates the registration socket.
    pub(crate) fn register(&mut self) {
        self.serve(&self.driver().registry_socket());
    }

    pub(crate) fn serve(&self, path: &Path) {
        let served = self.served.clone();
        // The watcher sees only the final name of the socket, which already accepts connections.
        let hidden = path.with_file_name(format!(".{}", path.file_name().unwrap().display()));
        let _ = std::fs::remove_file(&hidden);
        let runtime = self.runtime.as_ref().unwrap();
        let listener = {
            let _guard = runtime.enter();
            UnixListener::bind(&hidden).unwrap()
        };
        std::fs::rename(hidden, path).unwrap();
        let counter = Arc::clone(&served.0);
        let incoming = UnixListenerStream::new(listener).map(move |stream| {
            counter.connections.fetch_add(1, Ordering::SeqCst);
            stream
        });
        let has = |service: &str| served.0.driver.has.contains(&service);
        let mut routes = Routes::new(RegistrationServer::new(served.clone()));
        if has("v1.DRAPlugin") {
            routes = routes.add_service(dra::v1::dra_plugin_server::DraPluginServer::new(served.clone()));
        }
        if has("v1beta1.DRAPlugin") {
            routes = routes.add_service(dra::v1beta1::dra_plugin_server::DraPluginServer::new(
                served.clone(),
            ));
        }
        if has("v1alpha3.Node") {
            routes = routes.add_service(dra::v1alpha3::node_server::NodeServer::new(served.clone()));
        }
        if has("v1.DRAResourceHealth") {
            use dra_health::v1::dra_resource_health_server::DraResourceHealthServer;
            routes = routes.add_service(DraResourceHealthServer::new(served.clone()));
        }
        if has("v1alpha1.DRAResourceHealth") {
            use dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer;
            routes = routes.add_service(DraResourceHealthServer::new(served.clone()));
        }
        let server = tonic::transport::Server::builder().add_routes(routes);
        let mut ends = served.0.ends.subscribe();
        let end = async move {
            let _ = ends.wait_for(|ends| *ends).await;
        };
        runtime.spawn(async { server.serve_with_incoming_shutdown(incoming, end).await });
    }

    /// Returns the next event.
    pub(crate) async fn event(&mut self) -> Event {
        tokio::time::timeout(PATIENCE, self.events.recv())
            .await
            .unwrap()
            .unwrap()
    }

    /// Waits for the status of the registration, and returns the error if it was refused.
    pub(crate) async fn told(&mut self) -> Result<(), String> {
        loop {
            if let Event::Told { registered, error } = self.event().await {
                return if registered { Ok(()) } else { Err(error) };
            }
        }
    }

    /// Sends health reports; `None` ends the streams.
    pub(crate) fn report(&self, reports: Option<Reports>) {
        self.served.0.reports.send_replace(reports);
    }

    /// Accepts no more calls, and ends after the current ones.
    pub(crate) fn shut_down(&self) {
        self.served.0.ends.send_replace(true);
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.served.0.connections.load(Ordering::SeqCst)
    }

    /// Ends the driver and removes its sockets.
    pub(crate) fn exit(self) {
        let driver = self.driver().clone();
        drop(self);
        let _ = std::fs::remove_file(driver.registry_socket());
        let _ = std::fs::remove_file(driver.endpoint_socket());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Clone)]
struct Served(Arc<Inner>);

struct Inner {
    driver: Driver,
    events: mpsc::UnboundedSender<Event>,
    reports: watch::Sender<Option<Reports>>,
    connections: AtomicUsize,
    ends: watch::Sender<bool>,
}

impl Served {
    fn tell(&self, event: Event) {
        let _ = self.0.events.send(event);
    }

    async fn called<T>(
        &self,
        service: &'static str,
        method: &'static str,
        request: &Request<T>,
        claims: Vec<String>,
    ) {
        let deadline = request.metadata().get("grpc-timeout");
        let deadline = deadline.map(|value| value.to_str().unwrap().to_owned());
        self.tell(Event::Called {
            service,
            method,
            claims,
            deadline,
        });
        if self.0.driver.hangs {
            std::future::pending::<()>().await;
        }
    }

    fn reports<T: Send + 'static>(
        &self,
        service: &'static str,
        message: impl Fn(Reports) -> T + Send + Sync + 'static,
    ) -> Stream<T> {
        self.tell(Event::Watched { service });
        let reports = WatchStream::new(self.0.reports.subscribe());
        let reports = reports.map_while(|reports| reports);
        Box::pin(reports.map(move |reports| Ok(message(reports))))
    }
}

type Stream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Registration for Served {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let driver = &self.0.driver;
        let endpoint = match driver.endpoint {
            Some(_) => driver.endpoint_socket(),
            None => PathBuf::new(),
        };
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.into(),
            name: driver.name.clone(),
            endpoint: endpoint.display().to_string(),
            supported_versions: driver.listed.iter().map(|each| (*each).to_owned()).collect(),
        }))
    }

    /// Returns an error after a refusal, as the usual helper library does.
    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        self.tell(Event::Told {
            registered: status.plugin_registered,
            error: status.error.clone(),
        });
        match status.plugin_registered {
            true => Ok(Response::new(RegistrationStatusResponse {})),
            false => Err(Status::internal(status.error)),
        }
    }
}

macro_rules! node_service {
    ($module:ident, $server:ident, $trait:ident, $service:literal $(, $share:ident)?) => {
        #[tonic::async_trait]
        impl dra::$module::$server::$trait for Served {
            async fn node_prepare_resources(
                &self,
                request: Request<dra::$module::NodePrepareResourcesRequest>,
            ) -> Result<Response<dra::$module::NodePrepareResourcesResponse>, Status> {
                use dra::$module::*;
                let uids: Vec<String> = request.get_ref().claims.iter().map(|claim| claim.uid.clone()).collect();
                self.called($service, "NodePrepareResources", &request, uids).await;
                let claims: BTreeMap<String, NodePrepareResourceResponse> = request.into_inner().claims.into_iter()
                    .filter(|claim| claim.name != "forgotten")
                    .map(|claim| {
                        let device = Device {
                            pool_name: "pool".into(),
                            device_name: claim.name.clone(),
                            cdi_device_ids: vec![format!("acme.com/gpu={}", claim.name)],
                            $($share: Some("share".into()),)?
                            ..Default::default()
                        };
                        let error = if claim.name == "bad" { "no such device" } else { "" };
                        let answer = NodePrepareResourceResponse { devices: vec![device], error: error.into() };
                        (claim.uid, answer)
                    })
                    .collect();
                Ok(Response::new(NodePrepareResourcesResponse { claims }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<dra::$module::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<dra::$module::NodeUnprepareResourcesResponse>, Status> {
                use dra::$module::*;
                let uids: Vec<String> = request.get_ref().claims.iter().map(|claim| claim.uid.clone()).collect();
                self.called($service, "NodeUnprepareResources", &request, uids).await;
                let claims = request.into_inner().claims.into_iter().map(|claim| {
                    let error = if claim.name == "bad" { "busy" } else { "" };
                    (claim.uid, NodeUnprepareResourceResponse { error: error.into() })
                });
                Ok(Response::new(NodeUnprepareResourcesResponse { claims: claims.collect() }))
            }
        }
    };
}

node_service!(v1, dra_plugin_server, DraPlugin, "v1.DRAPlugin", share_id);
node_service!(v1beta1, dra_plugin_server, DraPlugin, "v1beta1.DRAPlugin");
node_service!(v1alpha3, node_server, Node, "v1alpha3.Node");

macro_rules! health_service {
    ($module:ident, $service:literal) => {
        #[tonic::async_trait]
        impl dra_health::$module::dra_resource_health_server::DraResourceHealth for Served {
            type NodeWatchResourcesStream = Stream<dra_health::$module::NodeWatchResourcesResponse>;

            async fn node_watch_resources(
                &self,
                _: Request<dra_health::$module::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                use dra_health::$module::*;
                let message = |reports: Reports| NodeWatchResourcesResponse {
                    devices: reports
                        .into_iter()
                        .map(|(device, health, seconds)| DeviceHealth {
                            device: Some(DeviceIdentifier {
                                pool_name: "pool".into(),
                                device_name: device,
                            }),
                            health,
                            last_updated_time: 0,
                            health_check_timeout_seconds: seconds,
                            message: "because".into(),
                        })
                        .collect(),
                };
                Ok(Response::new(self.reports($service, message)))
            }
        }
    };
}

health_service!(v1, "v1.DRAResourceHealth");
health_service!(v1alpha1, "v1alpha1.DRAResourceHealth");
