//! The sample DRA driver: harmless devices, described by a real CDI spec.
//!
//! It runs as a separate process, `devlet sample-driver`, and serves the kubelet's protocols: registration, DRA and
//! health. Drivers usually read the allocation of a claim from an API server. This driver asks devlet instead, which
//! received the allocation with the pod.
//!
//! When it ends it removes its files: its sockets, and below `sample` in the root directory the CDI spec and sample
//! manifests.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use devlet_cdi::{ContainerEdits, DeviceNode, Spec};
use devlet_client::{Client, v1};
use devlet_kubelet_api::dra;
use devlet_kubelet_api::dra::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use devlet_kubelet_api::dra::v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use devlet_kubelet_api::dra_health;
use devlet_kubelet_api::dra_health::v1::dra_resource_health_server::{
    DraResourceHealth, DraResourceHealthServer,
};
use devlet_kubelet_api::dra_health::v1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use devlet_kubelet_api::plugin_registration::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::plugin_registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use devlet_uds::server;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::Args;
use crate::serve::helper::{input_ends, limits};

/// The driver's name.
pub(in crate::serve) const NAME: &str = "gadget.sample.devlet.dev";

/// The pool of its devices.
const POOL: &str = "sample";

/// The devices, and the harmless device node of the host behind each.
pub(in crate::serve) const DEVICES: [(&str, &str); 4] = [
    ("gadget-0", "/dev/null"),
    ("gadget-1", "/dev/zero"),
    ("gadget-2", "/dev/null"),
    ("gadget-3", "/dev/zero"),
];

/// The CDI kind of the devices.
const CDI_KIND: &str = "sample.devlet.dev/gadget";

/// Time for which a health report is valid.
const LEASE: Duration = Duration::from_secs(30);
/// Interval between health reports.
const PAUSE: Duration = Duration::from_secs(10);

/// Timeout of the call that asks devlet for the allocation of a claim.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Paths of the CDI spec and the sample manifests, below the root directory.
pub(in crate::serve) const DIRECTORY: &str = "sample";
pub(in crate::serve) const POD: &str = "pod.yaml";
pub(in crate::serve) const CLAIM: &str = "claim.yaml";
pub(in crate::serve) const CDI: &str = "cdi";

/// Runs the driver until standard input ends.
pub(in crate::serve) async fn run(args: &Args) -> anyhow::Result<()> {
    let root = std::path::absolute(&args.root_dir).context("--root-dir")?;
    let leftovers = OwnDirectories(vec![root.join(DIRECTORY), root.join("plugins").join(NAME)]);
    leftovers.remove();
    describe(&root.join(DIRECTORY))?;
    let served = serve(&root).await;
    leftovers.remove();
    served
}

/// The driver's directories, removed at its end.
struct OwnDirectories(Vec<PathBuf>);

impl OwnDirectories {
    fn remove(&self) {
        for directory in &self.0 {
            // The directory may not exist. Another error cannot be handled here.
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// Writes the CDI spec and the sample manifests.
fn describe(directory: &Path) -> anyhow::Result<()> {
    let device = |(name, host): &(&str, &str)| devlet_cdi::Device {
        name: (*name).to_owned(),
        container_edits: ContainerEdits {
            env: vec![format!(
                "SAMPLE_{}=1",
                name.to_ascii_uppercase().replace('-', "_")
            )],
            device_nodes: vec![DeviceNode {
                path: format!("/dev/{name}"),
                host_path: (*host).to_owned(),
                permissions: "rw".to_owned(),
                ..DeviceNode::default()
            }],
            ..ContainerEdits::default()
        },
        ..devlet_cdi::Device::default()
    };
    let spec = Spec {
        kind: CDI_KIND.to_owned(),
        devices: DEVICES.iter().map(device).collect(),
        ..Spec::default()
    };
    spec.write(directory.join(CDI), &spec.file_name()?)?;
    let pod = include_str!("../../../../samples/gadget-pod.yaml");
    let claim = include_str!("../../../../samples/gadget-claim.yaml");
    for (name, text) in [(POD, pod), (CLAIM, claim)] {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

async fn serve(root: &Path) -> anyhow::Result<()> {
    let endpoint = root.join("plugins").join(NAME).join("dra.sock");
    for directory in [endpoint.parent(), Some(&root.join("plugins_registry"))]
        .into_iter()
        .flatten()
    {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    let driver = DraService {
        devlet: root.join("devlet").join("devlet.sock"),
    };
    let routes =
        Routes::new(DraPluginServer::new(driver)).add_service(DraResourceHealthServer::new(HealthService));
    let ended = CancellationToken::new();
    let listener = devlet_uds::listen(&endpoint, devlet_uds::DEFAULT_MODE)?;
    let end = ended.clone().cancelled_owned();
    let calls = tokio::spawn(server::serve(
        listener,
        routes,
        limits(),
        server::ignore_refusals(),
        end,
    ));
    // Last, because devlet calls the driver as soon as it finds the socket.
    let registration = Routes::new(RegistrationServer::new(RegistrationService { endpoint }));
    let socket = root.join("plugins_registry").join(format!("{NAME}-reg.sock"));
    let listener = devlet_uds::listen(socket, devlet_uds::DEFAULT_MODE)?;
    let end = ended.clone().cancelled_owned();
    let registered = tokio::spawn(server::serve(
        listener,
        registration,
        limits(),
        server::ignore_refusals(),
        end,
    ));
    input_ends().await;
    ended.cancel();
    registered.await??;
    calls.await??;
    Ok(())
}

/// The registration service.
#[derive(Debug)]
struct RegistrationService {
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let services = [dra::v1::SERVICE, dra_health::v1::SERVICE];
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.into(),
            name: NAME.into(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: services.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The DRA service.
#[derive(Debug)]
struct DraService {
    /// Root directory of the devlet to ask for allocations.
    devlet: PathBuf,
}

#[tonic::async_trait]
impl DraPlugin for DraService {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut claims = HashMap::new();
        for claim in request.into_inner().claims {
            let answer = match self.prepared(&claim).await {
                Ok(devices) => NodePrepareResourceResponse {
                    devices,
                    error: String::new(),
                },
                Err(problem) => NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error: format!("{problem:#}"),
                },
            };
            claims.insert(claim.uid, answer);
        }
        let claims = claims.into_iter().collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    /// Answers without an action: preparing does not change anything.
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

impl DraService {
    /// Returns the devices of a claim.
    async fn prepared(&self, claim: &Claim) -> anyhow::Result<Vec<Device>> {
        let client = Client::connect(&self.devlet).await?.with_timeout(TIMEOUT);
        let request = v1::ListClaimsRequest {
            claim: format!("uid:{}", claim.uid),
        };
        let listed = client.list_claims(request).await.map_err(|status| {
            anyhow::anyhow!(
                "cannot get the allocation of the claim from devlet: {}",
                status.message()
            )
        })?;
        let drivers = listed.claims.into_iter().flat_map(|claim| claim.drivers);
        let ours = drivers.filter(|driver| driver.name == NAME);
        ours.flat_map(|driver| driver.allocated).map(prepared).collect()
    }
}

fn prepared(allocated: v1::AllocatedDevice) -> anyhow::Result<Device> {
    let is_it = |(name, _): &&(&str, &str)| *name == allocated.device;
    if allocated.pool != POOL || !DEVICES.iter().any(|device| is_it(&device)) {
        let names: Vec<&str> = DEVICES.iter().map(|(name, _)| *name).collect();
        anyhow::bail!(
            "there is no device {}/{}; the pool {POOL} has {}",
            allocated.pool,
            allocated.device,
            names.join(", ")
        );
    }
    // An alternative of a request is named `request/alternative`.
    let request = allocated.request.split('/').next().unwrap_or_default();
    Ok(Device {
        request_names: vec![request.to_owned()],
        cdi_device_ids: vec![format!("{CDI_KIND}={}", allocated.device)],
        pool_name: allocated.pool,
        device_name: allocated.device,
        share_id: allocated.share_id,
    })
}

/// The health service. The devices never fail.
#[derive(Debug)]
struct HealthService;

#[tonic::async_trait]
impl DraResourceHealth for HealthService {
    type NodeWatchResourcesStream = ReceiverStream<Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let report = || NodeWatchResourcesResponse {
            devices: DEVICES.iter().map(|(name, _)| health(name)).collect(),
        };
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            while sender.send(Ok(report())).await.is_ok() {
                tokio::select! {
                    () = tokio::time::sleep(PAUSE) => {}
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn health(device: &str) -> DeviceHealth {
    DeviceHealth {
        device: Some(DeviceIdentifier {
            pool_name: POOL.into(),
            device_name: device.into(),
        }),
        health: HealthStatus::Healthy.into(),
        last_updated_time: jiff::Timestamp::now().as_second(),
        health_check_timeout_seconds: i64::try_from(LEASE.as_secs()).unwrap_or_default(),
        message: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated(pool: &str, device: &str) -> v1::AllocatedDevice {
        v1::AllocatedDevice {
            request: "blue/first".into(),
            pool: pool.into(),
            device: device.into(),
            ..v1::AllocatedDevice::default()
        }
    }

    #[test]
    fn a_device_is_prepared_for_its_request_if_it_exists() {
        let device = prepared(allocated("sample", "gadget-2")).unwrap();
        assert_eq!(device.request_names, ["blue"]);
        assert_eq!(device.cdi_device_ids, ["sample.devlet.dev/gadget=gadget-2"]);
        for (pool, device) in [("sample", "gadget-9"), ("other", "gadget-2")] {
            let refused = prepared(allocated(pool, device)).unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("there is no device {pool}/{device};")),
                "{refused}"
            );
        }
    }

    #[test]
    fn every_device_is_in_a_valid_cdi_spec() {
        let directory = tempfile::tempdir().unwrap();
        describe(directory.path()).unwrap();
        let registry = devlet_cdi::Registry::load([directory.path().join(CDI)]);
        for (name, _) in DEVICES {
            let edits = registry.resolve([format!("{CDI_KIND}={name}")]).unwrap();
            assert_eq!(edits.device_nodes[0].path, format!("/dev/{name}"));
        }
    }
}
