//! On real files, with a disk that can be told to fail, to wait, and to forget.

mod claim_files;
mod claims;
mod disk;
mod durability;
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

use super::backend::Behind;
use super::database::Place;
use super::{CommitError, MirrorError, OpenOptions, OpenReport, StopError, Storage, Store, answer, wal};

pub(super) const GPU: &str = "acme.com/gpu";
pub(super) const NOW: Moment = Moment(1_790_000_000_123);

/// A directory with a database and a kubelet's file, or the places for them.
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
            // Tests ask for it.
            mirror_interval: Duration::from_secs(3600),
            // Some disks of tests are slow.
            write_patience: Duration::from_secs(3600),
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

    /// The database behind the store.
    pub(super) fn place(&self, storage: Storage) -> Place {
        Place {
            path: self.database(),
            storage,
            counters: Arc::default(),
            boot_id: "boot-1".into(),
        }
    }

    /// Names in the directory, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

/// A plugin that offers this many devices, named 00, 01 and so on, on two NUMA nodes.
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
            uid: 0,
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

/// An answer with one variable, and with field 99, which nobody knows.
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

/// Returns when the disk takes writes again.
pub(super) async fn healed(store: &Store) {
    let mut health = store.shared.health.subscribe();
    let healed = health.wait_for(Option::is_none);
    tokio::time::timeout(Duration::from_secs(60), healed)
        .await
        .unwrap()
        .unwrap();
}

/// Waits for something that the clock of a thread of the store decides.
pub(super) async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "{what} does not happen");
}

/// Returns when the plugin of a resource is on disk as it should be.
pub(super) async fn noted(store: &Store, resource: &str, is_there: impl Fn(&serde_json::Value) -> bool) {
    // The writer does it by itself; only its own clock says when.
    let noted = async {
        while !is_there(&store.dump().await.unwrap()["resources"][resource]) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), noted)
        .await
        .unwrap();
}

/// A kubelet's file in which each pod's container `main` holds these devices.
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

/// The database behind the write-ahead log.
fn database(root: &Root) -> redb::Database {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(root.database())
        .unwrap();
    let file = Storage::default().over(FileBackend::new(file).unwrap(), &Arc::default());
    let first = wal::LENGTH;
    redb::Database::builder()
        .create_with_backend(Behind { file, first })
        .unwrap()
}

/// A name for a kubelet's file that leaves no room for the name under which a directory in its way is set aside.
pub(super) const LONG_NAME: &str = concat!(
    "kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-",
    "kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint-kubelet_internal_checkpoint"
);

/// Keeps a file with [`LONG_NAME`] from being replaced, until the directory that is returned is removed.
pub(super) fn obstruct(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap().to_str().unwrap();
    let obstacle = path.with_file_name(format!(".{name}.new"));
    std::fs::create_dir_all(obstacle.join("x")).unwrap();
    obstacle
}

/// What may be in the place of a state file, and must not be opened; see [`make`].
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
