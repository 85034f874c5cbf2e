//! Tests on real files, with disks that fail, wait, or lose writes.

mod claim_files;
mod claims;
mod disk;
mod durability;
mod leases;
mod mirroring;
mod power_loss;
mod schema;
mod starting;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::{
    ConnectionId, ContainerKind, ContainerRequest, Moment, Pod, PodMetadata, PodName, PodRequest,
    Preferences, Source,
};
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use redb::backends::FileBackend;

use super::database::DatabaseFile;
use super::file_backend::OffsetBackend;
use super::{CommitError, MirrorError, OpenOptions, OpenReport, StopError, Storage, Store, answer, wal};

pub(super) const GPU: &str = "acme.com/gpu";
pub(super) const NOW: Moment = Moment(1_790_000_000_123);

/// A directory for a database and kubelet's files.
pub(super) struct Root(tempfile::TempDir);

impl Root {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn database(&self) -> PathBuf {
        self.path().join("state.redb")
    }

    pub(super) fn checkpoint(&self) -> PathBuf {
        self.path().join("kubelet_internal_checkpoint")
    }

    pub(super) fn claims_file(&self) -> PathBuf {
        self.path().join("dra_manager_state")
    }

    pub(super) fn options(&self) -> OpenOptions {
        OpenOptions {
            checkpoint: Some(self.checkpoint()),
            claims: Some(self.claims_file()),
            clock: Arc::new(|| NOW),
            // Tests request mirrors themselves.
            mirror_interval: Duration::from_secs(3600),
            // Tests hold up some disks.
            write_timeout: Duration::from_secs(3600),
            ..OpenOptions::new(self.database(), "boot-1")
        }
    }

    pub(super) fn open(&self) -> Store {
        self.open_with_report().0
    }

    pub(super) fn open_with_report(&self) -> (Store, OpenReport) {
        Store::open(self.options()).unwrap()
    }

    pub(super) fn open_on(&self, storage: Storage) -> Store {
        let options = OpenOptions {
            storage,
            ..self.options()
        };
        Store::open(options).unwrap().0
    }

    /// Returns the database of the store.
    pub(super) fn database_file(&self, storage: Storage) -> DatabaseFile {
        DatabaseFile {
            path: self.database(),
            storage,
            counters: Arc::default(),
            boot_id: "boot-1".into(),
        }
    }

    /// Returns the names in the directory, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

/// Connects a plugin with `count` devices, named 00, 01 and so on, on two NUMA nodes.
pub(super) fn offer(store: &Store, resource: &str, count: usize) -> ConnectionId {
    let devices = (0..count).map(|number| Device {
        id: format!("{number:02}").into(),
        healthy: true,
        nodes: vec![i64::from(number >= count / 2)],
    });
    let (list, _) = DeviceList::new(devices.collect());
    store.update(|node| {
        let offer = Offer {
            resource: resource.into(),
            endpoint: "/run/plugin.sock".into(),
            process: devlet_core::ProcessId { uid: 0, pid: None },
            may_share: false,
            options: PluginOptions::default(),
        };
        let (connection, _) = node.plugin_connected(offer, NOW).unwrap();
        node.devices_listed(connection, list);
        connection
    })
}

pub(super) fn request(uid: &str, gpus: usize) -> PodRequest {
    PodRequest {
        uid: uid.into(),
        name: PodName {
            namespace: "default".into(),
            name: uid.into(),
        },
        source: Source::Api,
        fingerprint: 7,
        metadata: PodMetadata::default(),
        containers: vec![ContainerRequest {
            name: "main".into(),
            kind: ContainerKind::App,
            wants: BTreeMap::from([(GPU.into(), gpus)]),
            claims: Vec::new(),
        }],
        claims: Vec::new(),
    }
}

/// An answer with one variable, and with the unknown field 99.
pub(super) const RAW: &[u8] = b"\x0a\x06\x0a\x01K\x12\x01V\x9a\x06\x03new";

pub(super) async fn admit_raw(store: &Store, uid: &str, gpus: usize, raw: &[u8]) -> Result<Pod, CommitError> {
    let request = request(uid, gpus);
    let held = store.hold(&request, &Preferences::new()).unwrap().unwrap();
    held.commit(&request, vec![(answer(raw).unwrap(), true)]).await
}

pub(super) async fn admit(store: &Store, uid: &str, gpus: usize) -> Result<Pod, CommitError> {
    admit_raw(store, uid, gpus, RAW).await
}

pub(super) fn pods(store: &Store) -> Vec<Pod> {
    store.read(|node| node.pods().cloned().collect())
}

pub(super) fn uids(store: &Store) -> Vec<String> {
    let uids = pods(store);
    uids.iter().map(|pod| pod.uid.to_string()).collect()
}

pub(super) fn free(store: &Store) -> usize {
    store.read(|node| node.capacity_of(&GPU.into(), NOW).free)
}

/// Waits until writes succeed again.
pub(super) async fn wait_until_healthy(store: &Store) {
    let mut health = store.shared.health.subscribe();
    let healthy = health.wait_for(Option::is_none);
    tokio::time::timeout(MAX_WAIT, healthy).await.unwrap().unwrap();
}

/// Maximum duration of a wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Interval of checks for conditions without an event.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Waits until a thread of the store has made `condition` true. `subject` is for the message of a timeout.
pub(super) async fn wait_until(subject: &str, condition: impl Fn() -> bool) {
    let polling = async {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        while !condition() {
            ticks.tick().await;
        }
    };
    let waited = tokio::time::timeout(MAX_WAIT, polling).await;
    assert!(waited.is_ok(), "timed out: {subject}");
}

/// Waits until the writer has flushed metadata of a resource for which `condition` is true.
pub(super) async fn wait_for_resource(
    store: &Store,
    resource: &str,
    condition: impl Fn(&serde_json::Value) -> bool,
) {
    let polling = async {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        while !condition(&store.dump().await.unwrap()["resources"][resource]) {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(MAX_WAIT, polling).await.unwrap();
}

/// Returns a kubelet's file in which the container `main` of each pod holds these devices.
pub(super) fn kubelet_file(pods: &[(&str, &[&str])]) -> String {
    let entries = pods.iter().map(|(uid, devices)| Entry {
        pod_uid: (*uid).into(),
        container: "main".into(),
        resource: GPU.into(),
        devices: Devices::PerNuma(Some(BTreeMap::from([(
            0,
            Some(devices.iter().map(|&id| id.into()).collect()),
        )]))),
        alloc_resp: Some(RAW.to_vec()),
    });
    device_plugin::write(&Checkpoint {
        entries: Some(entries.collect()),
        registered: Some(BTreeMap::from([(GPU.into(), Some(Vec::new()))])),
    })
}

/// Opens the redb database behind the write-ahead log.
fn database(root: &Root) -> redb::Database {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(root.database())
        .unwrap();
    let file = Storage::default().wrap(FileBackend::new(file).unwrap(), &Arc::default());
    let offset = wal::LENGTH;
    redb::Database::builder()
        .create_with_backend(OffsetBackend { file, offset })
        .unwrap()
}

/// A name for a kubelet's file that is too long to be extended by the suffix of a quarantined file.
pub(super) const LONG_NAME: &str = concat!(
    "kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-",
    "kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint"
);

/// Prevents the replacement of a file with [`LONG_NAME`], until the returned directory is removed.
pub(super) fn obstruct(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap().to_str().unwrap();
    let obstacle = path.with_file_name(format!(".{name}.new"));
    std::fs::create_dir_all(obstacle.join("x")).unwrap();
    obstacle
}

/// Kinds of files that must not be opened at the path of a state file; see [`make`].
pub(super) const NOT_FILES: [&str; 4] = ["named pipe", "directory", "link to a device", "dangling link"];

pub(super) fn make(kind: &str, path: &Path) {
    match kind {
        "named pipe" => {
            let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
            rustix::fs::mknodat(rustix::fs::CWD, path, fifo, mode, 0).unwrap();
        }
        "directory" => std::fs::create_dir_all(path.join("with/something/in/it")).unwrap(),
        "link to a device" => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
        "dangling link" => std::os::unix::fs::symlink("/nowhere/state", path).unwrap(),
        other => panic!("{other}"),
    }
}

/// Stops a store that may be blocked: then the kubelet's files may differ from the record.
pub(super) async fn stop(store: &Store) {
    match store.stop().await {
        Ok(()) | Err(StopError::Mirror(MirrorError::Blocked { .. })) => {}
        Err(error) => panic!("{error:?}"),
    }
}
