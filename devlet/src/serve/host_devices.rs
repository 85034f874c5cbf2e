//! The device plugin of `hostDevices`: device nodes of this host, without a plugin of their own.
//!
//! The daemon runs it as a separate process, `devlet host-devices`, which uses only the kubelet's protocol on the
//! kubelet's socket. The first line of its standard input is the configuration. It serves one socket per resource.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use devlet_agent::agent::Agent;
use devlet_core::{Availability, Node, ResourceName};
use devlet_host_devices::{Device, Host, Inventory, Problem, Rule, Scan, Watcher};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use devlet_kubelet_api::device_plugin::v1beta1::{
    self as wire, AllocateRequest, AllocateResponse, ContainerAllocateResponse, DevicePluginOptions,
    DeviceSpec, Empty, HEALTHY, ListAndWatchResponse, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, TopologyInfo,
    UNHEALTHY,
};
use devlet_uds::server;
use tokio::io::AsyncBufReadExt as _;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::helper::{self, Helper, Helpers};
use super::log;
use crate::config::Settings;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Root directory of the node
    #[arg(long, value_name = "DIR")]
    root_dir: PathBuf,
    /// Root directory of /sys, /dev and /run
    #[arg(long, value_name = "DIR", default_value = "/")]
    host_root: PathBuf,
}

/// The devices of one resource.
type Devices = Arc<Vec<Device>>;

/// Refuses rules of which two match a node of this host.
pub(super) fn check(rules: &[Rule]) -> anyhow::Result<()> {
    let scan = Inventory::new(Host::new("/"), rules.to_vec()).scan();
    let is_conflict = |problem: &&Problem| matches!(problem, Problem::Conflict { .. });
    match scan.problems.iter().find(is_conflict) {
        Some(conflict) => bail!("hostDevices: {conflict}"),
        None => Ok(()),
    }
}

/// Starts the plugin, and returns once all resources are registered.
pub(super) async fn start(
    helpers: &mut Helpers,
    agent: &Agent,
    settings: &Settings,
    root: &Path,
) -> anyhow::Result<()> {
    let rules = &settings.host_devices;
    let resources: Vec<ResourceName> = rules.iter().map(|rule| rule.resource.as_str().into()).collect();
    let serves = move |node: &Node| {
        let mut resources = resources.iter();
        resources.all(|resource| node.availability(resource) == Availability::Serving)
    };
    let line = serde_json::to_string(&settings.of_host_devices())?;
    let helper = Helper::new("host-devices", root).with_input(line);
    helpers.start(helper, agent, serves).await
}

/// Runs the plugin until standard input ends.
pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut input = tokio::io::BufReader::new(tokio::io::stdin());
    let mut line = String::new();
    input
        .read_line(&mut line)
        .await
        .context("cannot read the configuration")?;
    let settings = Settings::parse(&line).context("cannot read the configuration")?;
    let log = log::start(&settings, false)?;
    let stop = CancellationToken::new();
    let served = tokio::select! {
        served = serve(args, settings.host_devices, &stop) => served,
        () = helper::input_ends() => Ok(()),
    };
    stop.cancel();
    log.flush();
    served
}

async fn serve(args: &Args, rules: Vec<Rule>, stop: &CancellationToken) -> anyhow::Result<()> {
    let host = Host::new(&args.host_root);
    let mut watcher = Watcher::new(host.clone()).context("cannot watch device nodes")?;
    if let Some(error) = watcher.fallback() {
        tracing::warn!(%error, "kernel events refused; only directories of /dev are watched");
    }
    let (mut inventory, scan) = scanned(Inventory::new(host, rules)).await?;
    let mut reported = report(&scan, &BTreeSet::new());
    let directory = args.root_dir.join("device-plugins");
    let (mut lists, mut sockets) = (BTreeMap::new(), Vec::new());
    for (number, (resource, devices)) in scan.resources.into_iter().enumerate() {
        let socket = format!("host-devices-{number}.sock");
        let (list, devices) = watch::channel(Arc::new(devices));
        let listener = devlet_uds::listen(directory.join(&socket), devlet_uds::DEFAULT_MODE)?;
        let routes = Routes::new(DevicePluginServer::new(PluginService { devices }));
        let ended = stop.clone().cancelled_owned();
        let refusals = server::ignore_refusals();
        tokio::spawn(server::serve(listener, routes, helper::limits(), refusals, ended));
        lists.insert(resource.clone(), list);
        sockets.push((resource, socket));
    }
    let registrations: Vec<(&str, &str)> = sockets
        .iter()
        .map(|(resource, socket)| (resource.as_str(), socket.as_str()))
        .collect();
    helper::register(&directory, &registrations).await?;
    loop {
        watcher.changed().await.context("cannot watch device nodes")?;
        let (scanned, scan) = scanned(inventory).await?;
        inventory = scanned;
        reported = report(&scan, &reported);
        for (resource, devices) in scan.resources {
            let Some(list) = lists.get(&resource) else {
                continue;
            };
            list.send_if_modified(|known| {
                let is_new = **known != devices;
                if is_new {
                    tracing::info!(%resource, devices = devices.len(), "host devices changed");
                    *known = Arc::new(devices);
                }
                is_new
            });
        }
    }
}

/// Scans on a thread of its own: sysfs of a busy host may be slow.
async fn scanned(mut inventory: Inventory) -> anyhow::Result<(Inventory, Scan)> {
    let scanning = tokio::task::spawn_blocking(move || {
        let scan = inventory.scan();
        (inventory, scan)
    });
    scanning.await.context("the scan failed")
}

/// Logs problems that are new, and returns all.
fn report(scan: &Scan, reported: &BTreeSet<Problem>) -> BTreeSet<Problem> {
    for problem in scan.problems.difference(reported) {
        match problem {
            Problem::Conflict { .. } => tracing::error!("hostDevices: {problem}; it belongs to neither"),
            _ => tracing::warn!("hostDevices: {problem}"),
        }
    }
    scan.problems.clone()
}

/// The service of one resource.
#[derive(Debug)]
struct PluginService {
    devices: watch::Receiver<Devices>,
}

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut devices = self.devices.clone();
        devices.mark_changed();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    changed = devices.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
                let list = list(&devices.borrow_and_update());
                if sender.send(Ok(list)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("the options do not offer it"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let devices = self.devices.borrow().clone();
        let requests = request.into_inner().container_requests;
        let answers = requests.iter().map(|each| answer(&devices, &each.devices_ids));
        Ok(Response::new(AllocateResponse {
            container_responses: answers.collect::<Result<_, Status>>()?,
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

fn list(devices: &[Device]) -> ListAndWatchResponse {
    let device = |device: &Device| wire::Device {
        id: device.id.clone(),
        health: if device.is_healthy { HEALTHY } else { UNHEALTHY }.into(),
        topology: device.numa_node.map(|node| TopologyInfo {
            nodes: vec![NumaNode { id: node.into() }],
        }),
    };
    ListAndWatchResponse {
        devices: devices.iter().map(device).collect(),
    }
}

/// Returns the nodes of devices. A node that several of them have is there once.
fn answer(devices: &[Device], ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
    let mut response = ContainerAllocateResponse::default();
    let mut named: BTreeMap<&str, usize> = BTreeMap::new();
    for id in ids {
        let Some(device) = devices.iter().find(|device| device.id == *id) else {
            return Err(Status::not_found(format!("there is no device {id}")));
        };
        if !device.is_healthy {
            return Err(Status::failed_precondition(format!(
                "the device {id} is unplugged or incomplete"
            )));
        }
        let own = device
            .nodes
            .iter()
            .map(|path| (path, device.container_path.as_deref()));
        for (path, name) in own.chain(device.with.iter().map(|path| (path, None))) {
            if response.devices.iter().any(|spec| spec.host_path == *path) {
                continue;
            }
            let container_path = match name {
                None => path.clone(),
                Some(name) => {
                    let count = named.entry(name).or_default();
                    *count += 1;
                    match *count {
                        1 => name.to_owned(),
                        count => format!("{name}-{}", count - 1),
                    }
                }
            };
            response.devices.push(DeviceSpec {
                container_path,
                host_path: path.clone(),
                permissions: device.permissions.to_string(),
            });
        }
    }
    Ok(response)
}
