//! The other sockets of a node with a kubelet: the container runtime, pod resources, and the kubelet's pods.

use std::path::{Path, PathBuf};
use std::pin::Pin;

use devlet_kubelet_api::cri::v1 as cri;
use devlet_kubelet_api::pod_resources::v1 as resources;
use devlet_kubelet_api::pods::v1alpha1 as pods;
use futures_util::{Stream, StreamExt as _};
use prost::Message as _;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};

/// A container runtime that reports what a test says, until it is dropped.
#[derive(Debug)]
pub struct Runtime {
    /// The pods and containers.
    pub reports: watch::Sender<Reports>,
    _serving: JoinSet<()>,
}

/// The pods and containers of a runtime.
#[derive(Debug, Clone, Default)]
pub struct Reports {
    pub pods: Vec<cri::PodSandbox>,
    pub containers: Vec<cri::Container>,
    /// The process of every container.
    pub pid: u32,
    /// Its configuration, as JSON; none if it does not tell.
    pub config: Option<String>,
}

impl Reports {
    /// Adds a pod that runs.
    #[must_use]
    pub fn pod(mut self, uid: &str, name: &str) -> Self {
        self.pods.push(cri::PodSandbox {
            id: format!("sandbox-{uid}"),
            metadata: Some(cri::PodSandboxMetadata {
                name: name.to_owned(),
                uid: uid.to_owned(),
                namespace: "default".to_owned(),
            }),
            labels: [
                ("app".to_owned(), name.to_owned()),
                ("io.kubernetes.pod.uid".to_owned(), uid.to_owned()),
            ]
            .into(),
            ..cri::PodSandbox::default()
        });
        self
    }

    /// Adds a container of a pod.
    #[must_use]
    pub fn container(mut self, pod: &str, name: &str, id: &str, state: cri::ContainerState) -> Self {
        self.containers.push(cri::Container {
            id: id.to_owned(),
            state: state.into(),
            labels: [
                ("io.kubernetes.pod.uid".to_owned(), pod.to_owned()),
                ("io.kubernetes.container.name".to_owned(), name.to_owned()),
            ]
            .into(),
        });
        self
    }
}

impl Runtime {
    /// Starts on a socket.
    pub fn start(socket: &Path, reports: Reports) -> Self {
        let (reports, seen) = watch::channel(reports);
        let service = cri::runtime_service_server::RuntimeServiceServer::new(RuntimeService(seen));
        let mut serving = JoinSet::new();
        serve(
            &mut serving,
            socket.to_owned(),
            Server::builder().add_service(service),
        );
        Self {
            reports,
            _serving: serving,
        }
    }
}

fn serve(serving: &mut JoinSet<()>, socket: PathBuf, router: Router) {
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let _ = std::fs::remove_file(&socket);
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    serving.spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
}

#[derive(Debug)]
struct RuntimeService(watch::Receiver<Reports>);

#[tonic::async_trait]
impl cri::runtime_service_server::RuntimeService for RuntimeService {
    async fn version(
        &self,
        _: Request<cri::VersionRequest>,
    ) -> Result<Response<cri::VersionResponse>, Status> {
        Ok(Response::new(cri::VersionResponse {
            runtime_name: "scripted".into(),
            runtime_version: "v1".into(),
        }))
    }

    async fn status(&self, _: Request<cri::StatusRequest>) -> Result<Response<cri::StatusResponse>, Status> {
        let config = self.0.borrow().config.clone();
        let info = config.map(|config| ("config".to_owned(), config));
        Ok(Response::new(cri::StatusResponse {
            info: info.into_iter().collect(),
        }))
    }

    async fn list_pod_sandbox(
        &self,
        _: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        let items = self.0.borrow().pods.clone();
        Ok(Response::new(cri::ListPodSandboxResponse { items }))
    }

    async fn list_containers(
        &self,
        _: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        let containers = self.0.borrow().containers.clone();
        Ok(Response::new(cri::ListContainersResponse { containers }))
    }

    async fn container_status(
        &self,
        _: Request<cri::ContainerStatusRequest>,
    ) -> Result<Response<cri::ContainerStatusResponse>, Status> {
        let info = format!("{{\"pid\": {}}}", self.0.borrow().pid);
        Ok(Response::new(cri::ContainerStatusResponse {
            info: [("info".to_owned(), info)].into(),
        }))
    }
}

/// A container of a pod that the kubelet reports.
#[derive(Debug, Clone)]
pub struct PodContainer {
    pub name: String,
    /// The limit of each resource.
    pub limits: Vec<(String, String)>,
    /// The devices of each resource.
    pub devices: Vec<(String, Vec<String>)>,
}

/// A pod that the kubelet reports.
#[derive(Debug, Clone)]
pub struct KubeletPod {
    pub uid: String,
    pub name: String,
    pub containers: Vec<PodContainer>,
}

/// The sockets by which a kubelet reports its pods, until it is dropped.
#[derive(Debug)]
pub struct KubeletPods {
    /// The pods of the kubelet.
    pub pods: watch::Sender<Vec<KubeletPod>>,
    _serving: JoinSet<()>,
}

impl KubeletPods {
    /// Serves pod resources below a kubelet's root directory and, like newer kubelets, its pods if `is_new`.
    pub fn start(root: &Path, is_new: bool, reported: Vec<KubeletPod>) -> Self {
        let (sender, seen) = watch::channel(reported);
        let mut serving = JoinSet::new();
        let lister =
            resources::pod_resources_lister_server::PodResourcesListerServer::new(PodService(seen.clone()));
        serve(
            &mut serving,
            root.join("pod-resources/kubelet.sock"),
            Server::builder().add_service(lister),
        );
        if is_new {
            let service = pods::pods_server::PodsServer::new(PodService(seen));
            serve(
                &mut serving,
                root.join("pods-api/pods-api.sock"),
                Server::builder().add_service(service),
            );
        }
        Self {
            pods: sender,
            _serving: serving,
        }
    }
}

impl KubeletPod {
    /// Returns a pod with one container with a limit of one device, and devices of that resource.
    pub fn new(uid: &str, name: &str, container: &str, resource: &str, devices: &[&str]) -> Self {
        let devices: Vec<String> = devices.iter().map(|id| (*id).to_owned()).collect();
        Self {
            uid: uid.to_owned(),
            name: name.to_owned(),
            containers: vec![PodContainer {
                name: container.to_owned(),
                limits: vec![(resource.to_owned(), "1".to_owned())],
                devices: match devices.is_empty() {
                    true => Vec::new(),
                    false => vec![(resource.to_owned(), devices)],
                },
            }],
        }
    }

    fn event(&self) -> pods::WatchPodsEvent {
        let container = |container: &PodContainer| {
            let limits = container.limits.iter();
            let limits = limits.map(|(name, quantity)| {
                let string = quantity.clone();
                (name.clone(), pods::Quantity { string })
            });
            pods::Container {
                name: container.name.clone(),
                resources: Some(pods::ResourceRequirements {
                    limits: limits.collect(),
                }),
                ..pods::Container::default()
            }
        };
        let pod = pods::Pod {
            metadata: Some(pods::ObjectMeta {
                name: self.name.clone(),
                namespace: "default".to_owned(),
                uid: self.uid.clone(),
                ..pods::ObjectMeta::default()
            }),
            spec: Some(pods::PodSpec {
                containers: self.containers.iter().map(container).collect(),
                ..pods::PodSpec::default()
            }),
            status: None,
        };
        pods::WatchPodsEvent {
            r#type: pods::EventType::Added.into(),
            pod: pod.encode_to_vec(),
        }
    }
}

#[derive(Debug)]
struct PodService(watch::Receiver<Vec<KubeletPod>>);

#[tonic::async_trait]
impl resources::pod_resources_lister_server::PodResourcesLister for PodService {
    async fn list(
        &self,
        _: Request<resources::ListPodResourcesRequest>,
    ) -> Result<Response<resources::ListPodResourcesResponse>, Status> {
        let container = |container: &PodContainer| resources::ContainerResources {
            name: container.name.clone(),
            devices: container
                .devices
                .iter()
                .map(|(resource, ids)| resources::ContainerDevices {
                    resource_name: resource.clone(),
                    device_ids: ids.clone(),
                    topology: None,
                })
                .collect(),
            ..resources::ContainerResources::default()
        };
        let pod = |pod: &KubeletPod| resources::PodResources {
            name: pod.name.clone(),
            namespace: "default".to_owned(),
            containers: pod.containers.iter().map(container).collect(),
            ..resources::PodResources::default()
        };
        Ok(Response::new(resources::ListPodResourcesResponse {
            pod_resources: self.0.borrow().iter().map(pod).collect(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<resources::AllocatableResourcesRequest>,
    ) -> Result<Response<resources::AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn get(
        &self,
        _: Request<resources::GetPodResourcesRequest>,
    ) -> Result<Response<resources::GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }
}

#[tonic::async_trait]
impl pods::pods_server::Pods for PodService {
    type WatchPodsStream = Pin<Box<dyn Stream<Item = Result<pods::WatchPodsEvent, Status>> + Send>>;

    async fn watch_pods(
        &self,
        _: Request<pods::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let lists = WatchStream::new(self.0.clone());
        let events = lists.flat_map(|pods| {
            let complete = pods::WatchPodsEvent {
                r#type: pods::EventType::InitialSyncComplete.into(),
                pod: Vec::new(),
            };
            let events: Vec<_> = pods.iter().map(KubeletPod::event).chain([complete]).collect();
            futures_util::stream::iter(events.into_iter().map(Ok))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn list_pods(
        &self,
        _: Request<pods::ListPodsRequest>,
    ) -> Result<Response<pods::ListPodsResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn get_pod(
        &self,
        _: Request<pods::GetPodRequest>,
    ) -> Result<Response<pods::GetPodResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }
}
