//! Lower bound for all sides: round trips and syncs without any other work.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use devlet_client::channel::Channel;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, Empty, ListAndWatchResponse,
};
use devlet_kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use devlet_kubelet_api::dra::v1::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use tokio::net::UnixStream;
use tonic::Streaming;

use crate::{clock, plugin};

const PAGE: usize = 4096;
const PAGES: u64 = 1024;

/// Two processes to call, and a file to write.
pub(crate) struct Bare {
    caller: DevicePluginClient<Channel>,
    plugin: DevicePluginClient<Channel>,
    disk: Disk,
}

impl Bare {
    pub(crate) async fn new(caller: &Path, plugin: &Path, file: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            caller: DevicePluginClient::new(connect(caller).await?),
            plugin: DevicePluginClient::new(connect(plugin).await?),
            disk: Disk::new(file)?,
        })
    }

    /// Measures `count` times a round trip to each process and one 4 KiB write with a sync.
    pub(crate) async fn measure(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: vec![plugin::device_id(0)],
            }],
        };
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            self.caller.allocate(request.clone()).await?;
            self.plugin.allocate(request.clone()).await?;
            self.disk.sync()?;
            took.push(began.elapsed());
        }
        Ok(took)
    }
}

/// Lower bound for a pod with a claim: two processes to call twice each, and a file to write.
pub(crate) struct BareClaims {
    caller: DraPluginClient<Channel>,
    driver: DraPluginClient<Channel>,
    disk: Disk,
}

impl BareClaims {
    pub(crate) async fn new(caller: &Path, driver: &Path, file: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            caller: DraPluginClient::new(connect(caller).await?),
            driver: DraPluginClient::new(connect(driver).await?),
            disk: Disk::new(file)?,
        })
    }

    /// Measures a call to admit, the driver's call to prepare, with a sync before and after. Then measures a call
    /// to remove and the driver's call to unprepare, with a sync in between.
    pub(crate) async fn measure(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let claims = vec![Claim {
            namespace: "default".to_owned(),
            uid: "00000000-2f53-4c1b-8a55-6a0f3b1d0000".to_owned(),
            name: "claim-0".to_owned(),
        }];
        let prepare = NodePrepareResourcesRequest {
            claims: claims.clone(),
        };
        let unprepare = NodeUnprepareResourcesRequest { claims };
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            self.caller.node_prepare_resources(prepare.clone()).await?;
            self.disk.sync()?;
            self.driver.node_prepare_resources(prepare.clone()).await?;
            self.disk.sync()?;
            self.caller.node_unprepare_resources(unprepare.clone()).await?;
            self.disk.sync()?;
            self.driver.node_unprepare_resources(unprepare.clone()).await?;
            took.push(began.elapsed());
        }
        Ok(took)
    }
}

/// Connects as devlet and its callers do.
async fn connect(path: &Path) -> anyhow::Result<Channel> {
    let stream = UnixStream::connect(path)
        .await
        .with_context(|| format!("cannot connect to {}", path.display()))?;
    Ok(Channel::open(stream, path).await?)
}

/// A file with preallocated pages.
struct Disk {
    file: File,
    page: u64,
}

impl Disk {
    fn new(path: &Path) -> anyhow::Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        for page in 0..PAGES {
            file.write_all_at(&[1; PAGE], page * PAGE as u64)?;
        }
        file.sync_all()?;
        Ok(Self { file, page: 0 })
    }

    /// Writes one page, and syncs.
    fn sync(&mut self) -> std::io::Result<()> {
        self.file
            .write_all_at(&[self.page as u8; PAGE], self.page % PAGES * PAGE as u64)?;
        self.page += 1;
        self.file.sync_data()
    }
}

/// A client of tonic that receives a plugin's lists and drops them.
pub(crate) struct Watch(Streaming<ListAndWatchResponse>);

impl Watch {
    pub(crate) async fn new(plugin: &Path) -> anyhow::Result<Self> {
        let mut client = DevicePluginClient::new(plugin::connect(plugin).await?);
        Ok(Self(client.list_and_watch(Empty {}).await?.into_inner()))
    }

    /// Returns the time at which a list of `count` devices had been received and decoded.
    pub(crate) async fn has(&mut self, count: usize) -> anyhow::Result<u64> {
        loop {
            let list = self.0.message().await?.context("the plugin's stream has ended")?;
            let at = clock::now();
            if list.devices.len() == count {
                return Ok(at);
            }
        }
    }
}
