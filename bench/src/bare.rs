//! What nobody can be faster than: round trips and syncs with nothing in between.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, Empty, ListAndWatchResponse,
};
use tonic::Streaming;
use tonic::transport::Channel;

use crate::{clock, plugin};

const PAGE: usize = 4096;
const PAGES: u64 = 1024;

/// Two processes to call, and a file to write.
pub(crate) struct Bare {
    caller: DevicePluginClient<Channel>,
    plugin: DevicePluginClient<Channel>,
    file: File,
    page: u64,
}

impl Bare {
    pub(crate) async fn new(caller: &Path, plugin: &Path, file: &Path) -> anyhow::Result<Self> {
        let file = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
        for page in 0..PAGES {
            file.write_all_at(&[1; PAGE], page * PAGE as u64)?;
        }
        file.sync_all()?;
        Ok(Self {
            caller: DevicePluginClient::new(plugin::connect(caller).await?),
            plugin: DevicePluginClient::new(plugin::connect(plugin).await?),
            file,
            page: 0,
        })
    }

    /// A round trip to each process and one 4 KiB write with a sync, again and again.
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
            self.file
                .write_all_at(&[self.page as u8; PAGE], self.page % PAGES * PAGE as u64)?;
            self.file.sync_data()?;
            self.page += 1;
            took.push(began.elapsed());
        }
        Ok(took)
    }
}

/// A client that watches a plugin's list and does nothing with it.
pub(crate) struct Watch(Streaming<ListAndWatchResponse>);

impl Watch {
    pub(crate) async fn new(plugin: &Path) -> anyhow::Result<Self> {
        let mut client = DevicePluginClient::new(plugin::connect(plugin).await?);
        Ok(Self(client.list_and_watch(Empty {}).await?.into_inner()))
    }

    /// When a list of so many devices had been received and decoded.
    pub(crate) async fn has(&mut self, count: usize) -> anyhow::Result<u64> {
        loop {
            let list = self.0.message().await?.context("the plugin lists no longer")?;
            let at = clock::now();
            if list.devices.len() == count {
                return Ok(at);
            }
        }
    }
}
