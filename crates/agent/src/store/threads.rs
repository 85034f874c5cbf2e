//! The threads of an open store: the writer of the database, and the writer of the kubelet's files.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use devlet_core::Node;

use super::clock::MonotonicClock;
use super::commit_queue::CommitQueue;
use super::database::{Database, DatabaseFile};
use super::error::WriteError;
use super::fs::FileId;
use super::kubelet_file::KubeletFile;
use super::kubelet_files::{KubeletFileWriter, MirrorHandle, MirroredFile};
use super::mirror_hashes::MirrorFileState;
use super::node_id::IdFiles;
use super::open_options::OpenOptions;
use super::open_report::OpenError;
use super::persisted_state::NodeMetadata;
use super::writer::{RESOURCE_FLUSH_DELAY, Writer};
use super::{Shared, State, Store};

/// Handles of the store's threads. Dropping them ends the threads.
#[derive(Debug)]
pub(crate) struct Threads {
    pub(super) writer: CommitQueue,
    pub(super) mirror: MirrorHandle,
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.mirror.quit();
        drop(self.writer.stop());
    }
}

/// The progress of the database in the id files.
pub(super) struct RecordedProgress {
    pub(super) files: IdFiles,
    /// A file has the progress.
    pub(super) is_recorded: bool,
    /// Why a file does not have the progress.
    pub(super) failure: Option<String>,
}

/// The state of a node, before the threads of its store are started.
pub(super) struct Opened {
    pub(super) clock: MonotonicClock,
    pub(super) file: DatabaseFile,
    pub(super) file_id: FileId,
    /// `None` if it could not be written.
    pub(super) database: Option<Database>,
    pub(super) progress: RecordedProgress,
    pub(super) failure: Option<WriteError>,
    pub(super) metadata: NodeMetadata,
    pub(super) file_states: BTreeMap<KubeletFile, MirrorFileState>,
    pub(super) node: Node,
}

impl Opened {
    pub(super) fn start(self, options: OpenOptions) -> Result<Store, OpenError> {
        let state = State {
            node: self.node,
            blocked: self.metadata.blocked.clone(),
            contested: self.metadata.contested.clone(),
            cluster: self.metadata.cluster.clone(),
        };
        let shared = Arc::new(Shared::new(
            state,
            options.write_timeout,
            Arc::clone(&self.file.counters),
        ));
        shared.set_id_failure(self.progress.failure);
        let (sender, inbox) = mpsc::channel();
        let (requester, requests) = mpsc::channel();
        let is_requested = Arc::new(AtomicBool::new(false));
        let mirror = MirrorHandle::new(requester, Arc::clone(&is_requested));
        let queue = CommitQueue::new(sender, Arc::clone(&shared));
        let file_writer = KubeletFileWriter {
            shared: Arc::clone(&shared),
            queue: queue.clone(),
            interval: options.mirror_interval,
            files: mirrored_files(options, &self.file_states),
            metadata: self.metadata.clone(),
            requests,
            is_requested,
        };
        let writer = Writer {
            shared: Arc::clone(&shared),
            file: self.file,
            own_file: Some(self.file_id),
            database: self.database,
            metadata: self.metadata,
            id_files: self.progress.files,
            is_progress_recorded: self.progress.is_recorded,
            inbox,
            mirror: mirror.clone(),
            clock: self.clock,
            // A start may have changed metadata of resources.
            resource_flush_at: Some(Instant::now() + RESOURCE_FLUSH_DELAY),
            last_active: Instant::now(),
        };
        writer.set_health(self.failure);
        let threads = Arc::new(Threads {
            writer: queue,
            mirror: mirror.clone(),
        });
        spawn("devlet-writer", move || writer.run())?;
        spawn("devlet-mirror", move || file_writer.run())?;
        // The files may be of an older version, or absent.
        mirror.request();
        Ok(Store {
            shared,
            threads,
            recording: Arc::default(),
            deciding: Arc::default(),
            clock: self.clock,
        })
    }
}

fn mirrored_files(
    options: OpenOptions,
    file_states: &BTreeMap<KubeletFile, MirrorFileState>,
) -> Vec<MirroredFile> {
    let files = [
        (KubeletFile::Devices, options.checkpoint),
        (KubeletFile::Claims, options.claims),
    ];
    let files = files.into_iter().filter_map(|(file, path)| {
        Some(MirroredFile {
            file,
            path: path?,
            file_state: file_states.get(&file).copied().unwrap_or(MirrorFileState::Absent),
            stamp: None,
            foreign: None,
        })
    });
    files.collect()
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), OpenError> {
    let started = thread::Builder::new().name(name.into()).spawn(body);
    started.map(drop).map_err(|source| OpenError::Thread { source })
}
