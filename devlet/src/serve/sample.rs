//! The sample device plugin: harmless devices on two NUMA nodes.
//!
//! `serve --sample` starts it as a separate process, `devlet sample-plugin`, which uses only the kubelet's protocol on
//! the kubelet's socket. This applies to the DRA driver in `driver`, too. `helper` supervises both.

pub(super) mod driver;

use std::path::{Path, PathBuf};

use devlet_agent::agent::Agent;
use devlet_core::{Availability, Node};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, DeviceSpec, Empty, HEALTHY,
    ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, TopologyInfo,
};
use devlet_uds::server;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::helper::{self, Helper, Helpers};

/// The resource that the plugin offers.
pub(super) const RESOURCE: &str = "sample.devlet.dev/widget";

/// The devices: name, NUMA node, and the harmless device node of the host behind each.
pub(super) const DEVICES: [(&str, i64, &str); 8] = [
    ("widget-0", 0, "/dev/null"),
    ("widget-1", 0, "/dev/zero"),
    ("widget-2", 0, "/dev/null"),
    ("widget-3", 0, "/dev/zero"),
    ("widget-4", 1, "/dev/null"),
    ("widget-5", 1, "/dev/zero"),
    ("widget-6", 1, "/dev/null"),
    ("widget-7", 1, "/dev/zero"),
];

const SOCKET: &str = "sample-widget.sock";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Root directory of the node
    #[arg(long, value_name = "DIR")]
    root_dir: PathBuf,
}

/// Starts the plugin and the driver, and returns once their devices can be allocated.
pub(super) async fn start(helpers: &mut Helpers, agent: &Agent, root: &Path) -> anyhow::Result<()> {
    let resource = RESOURCE.into();
    let lists = move |node: &Node| node.availability(&resource) == Availability::Serving;
    helpers
        .start(Helper::new("sample-plugin", root), agent, lists)
        .await?;
    let name = driver::NAME.into();
    let serves = move |node: &Node| node.serving_driver(&name).is_some();
    helpers
        .start(Helper::new("sample-driver", root), agent, serves)
        .await
}

/// Runs the plugin until standard input ends.
pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let directory = args.root_dir.join("device-plugins");
    let listener = devlet_uds::listen(directory.join(SOCKET), devlet_uds::DEFAULT_MODE)?;
    let routes = Routes::new(DevicePluginServer::new(PluginService));
    let ended = helper::input_ends();
    let serving = tokio::spawn(server::serve(
        listener,
        routes,
        helper::limits(),
        server::ignore_refusals(),
        ended,
    ));
    helper::register(&directory, &[(RESOURCE, SOCKET)]).await?;
    serving.await??;
    Ok(())
}

#[derive(Debug)]
struct PluginService;

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let options = DevicePluginOptions {
            pre_start_required: false,
            get_preferred_allocation_available: true,
        };
        Ok(Response::new(options))
    }

    /// Sends one list and nothing after it: these devices never fail.
    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |(id, node, _): (&str, i64, &str)| Device {
            id: id.into(),
            health: HEALTHY.into(),
            topology: Some(TopologyInfo {
                nodes: vec![NumaNode { id: node }],
            }),
        };
        let list = ListAndWatchResponse {
            devices: DEVICES.into_iter().map(device).collect(),
        };
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            if sender.send(Ok(list)).await.is_ok() {
                sender.closed().await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let container_responses = requests.iter().map(preferred).collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let answers: Result<_, Status> = requests.iter().map(|each| answer(&each.devices_ids)).collect();
        Ok(Response::new(AllocateResponse {
            container_responses: answers?,
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

fn node_of(id: &str) -> i64 {
    DEVICES
        .iter()
        .find(|(name, ..)| *name == id)
        .map_or(-1, |(_, node, _)| *node)
}

/// Prefers devices of one NUMA node: the one with the fewest free devices that are enough.
fn preferred(request: &ContainerPreferredAllocationRequest) -> ContainerPreferredAllocationResponse {
    let size = usize::try_from(request.allocation_size).unwrap_or(0);
    let mut device_ids = request.must_include_device_ids.clone();
    let on = |node: i64| {
        request
            .available_device_ids
            .iter()
            .filter(move |id| node_of(id) == node)
    };
    let mut nodes = [0, 1].map(|node| (on(node).count(), node));
    nodes.sort_by_key(|&(free, node)| {
        (
            free < size,
            if free < size { usize::MAX - free } else { free },
            node,
        )
    });
    for id in nodes.into_iter().flat_map(|(_, node)| on(node)) {
        if device_ids.len() < size && !device_ids.contains(id) {
            device_ids.push(id.clone());
        }
    }
    ContainerPreferredAllocationResponse { device_ids }
}

fn answer(ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
    let mut response = ContainerAllocateResponse::default();
    for id in ids {
        let Some((name, _, host)) = DEVICES.iter().find(|(name, ..)| name == id) else {
            return Err(Status::not_found(format!("no such widget: {id}")));
        };
        response.devices.push(DeviceSpec {
            container_path: format!("/dev/{name}"),
            host_path: (*host).into(),
            permissions: "rw".into(),
        });
    }
    response.envs.insert("SAMPLE_WIDGETS".into(), ids.join(","));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(available: &[usize], size: i32) -> Vec<String> {
        let available_device_ids = available
            .iter()
            .map(|&number| DEVICES[number].0.to_owned())
            .collect();
        let must_include_device_ids = Vec::new();
        let allocation_size = size;
        preferred(&ContainerPreferredAllocationRequest {
            available_device_ids,
            must_include_device_ids,
            allocation_size,
        })
        .device_ids
    }

    #[test]
    fn devices_of_one_node_are_preferred() {
        assert_eq!(advice(&[0, 1, 2, 3, 4, 5, 6, 7], 2), ["widget-0", "widget-1"]);
        assert_eq!(advice(&[3, 4, 5], 2), ["widget-4", "widget-5"]);
        assert_eq!(advice(&[3, 4, 5], 1), ["widget-3"]);
        assert_eq!(advice(&[3, 4, 5], 3), ["widget-4", "widget-5", "widget-3"]);
    }

    #[test]
    fn a_container_gets_its_devices_in_a_variable() {
        let answer = answer(&["widget-1".into(), "widget-4".into()]).unwrap();
        assert_eq!(answer.envs["SAMPLE_WIDGETS"], "widget-1,widget-4");
        let hosts: Vec<&str> = answer
            .devices
            .iter()
            .map(|device| device.host_path.as_str())
            .collect();
        assert_eq!(hosts, ["/dev/zero", "/dev/null"]);
    }
}
