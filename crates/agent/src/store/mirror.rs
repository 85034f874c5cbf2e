//! The kubelet's files, kept in step with the database.
//!
//! Nobody waits for them, so they are written from time to time by a thread of its own, each like this:
//!
//! ```text
//!   rung ──wait a while──► what is on disk ──hash──► record the hash ──synced──► replace the file
//!                                                                                      │ synced
//!                                                            forget the one before ◄───┘
//! ```
//!
//! The hash is on disk before the file is. So a file at start whose hash is not on record was written by somebody
//! else: a kubelet. On record are the file that is there and, while it is being replaced, the one to come; not older
//! ones, because a kubelet may come to the same state again, and write the same file. The file is made from a snapshot
//! of the database, not from memory: it holds no lock while it is made, and it never contains what was not answered.
//!
//! A file about claims is not made before there are any.
//!
//! While the node is blocked there is no mirror: it would be read as a state in which nothing is held.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use devlet_core::ResourceName;
use devlet_core::device_plugin::list::DeviceList;
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Devices, Entry};
use sha2::{Digest as _, Sha256};
use tokio::sync::oneshot;

use super::Shared;
use super::claims_file;
use super::database::{Hash, InFile, KubeletFile, LoadError, Row, Snapshot, Surroundings};
use super::desk::{Outbox, settled};
use super::files;
use super::writer::{Phase, WriteError};

/// Mirrors take at most this part of the time.
const SHARE_OF_TIME: u32 = 20;

/// Why the kubelet's file is not up to date.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// Its hash cannot be recorded.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// What it should contain cannot be read.
    #[error("the database cannot be read: {reason}")]
    Read {
        /// Why not.
        reason: String,
    },
    /// Somebody else wrote the file since we did.
    #[error(
        "{} was written by somebody else, so it is left alone; if a kubelet runs here, stop devlet",
        .path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be replaced.
    #[error("{} cannot be replaced", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl From<LoadError> for MirrorError {
    fn from(error: LoadError) -> Self {
        Self::Read {
            reason: error.to_string(),
        }
    }
}

pub(crate) enum Call {
    Ring,
    Now(oneshot::Sender<Result<(), MirrorError>>),
    Stop(oneshot::Sender<Result<(), MirrorError>>),
    /// At once, with nothing written.
    Quit,
}

/// How others say that something may have changed.
#[derive(Debug, Clone)]
pub(crate) struct Doorbell {
    calls: Sender<Call>,
    rung: Arc<AtomicBool>,
}

impl Doorbell {
    pub(crate) fn new(calls: Sender<Call>, rung: Arc<AtomicBool>) -> Self {
        Self { calls, rung }
    }

    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Nobody at home: the store is being stopped.
            let _ = self.calls.send(Call::Ring);
        }
    }

    pub(crate) fn quit(&self) {
        let _ = self.calls.send(Call::Quit);
    }

    pub(crate) fn call(
        &self,
        call: fn(oneshot::Sender<Result<(), MirrorError>>) -> Call,
    ) -> oneshot::Receiver<Result<(), MirrorError>> {
        let (done, answer) = oneshot::channel();
        let _ = self.calls.send(call(done));
        answer
    }
}

/// A kubelet's file that is kept.
pub(crate) struct MirroredFile {
    pub(crate) file: KubeletFile,
    pub(crate) path: PathBuf,
    /// What is in it.
    pub(crate) in_file: InFile,
    /// The one that we wrote last.
    pub(crate) seen: Option<Seen>,
}

pub(crate) struct Mirrorer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) outbox: Outbox,
    pub(crate) files: Vec<MirroredFile>,
    pub(crate) interval: Duration,
    /// What is on disk, as far as it comes from here.
    pub(crate) around: Surroundings,
    pub(crate) calls: Receiver<Call>,
    /// Whether somebody has rung since this last looked.
    pub(crate) rung: Arc<AtomicBool>,
}

impl Mirrorer {
    /// Until stopped, or until nobody is left who could ring.
    pub(crate) fn run(mut self) {
        let mut wait: Option<Instant> = None;
        let mut pause = self.interval;
        let mut was_failing = false;
        loop {
            let call = match wait {
                None => self.calls.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => self
                    .calls
                    .recv_timeout(until.saturating_duration_since(Instant::now())),
            };
            let answer = match call {
                Ok(Call::Ring) => {
                    wait.get_or_insert_with(|| Instant::now() + pause);
                    continue;
                }
                Ok(Call::Now(answer)) => Some((answer, false)),
                Ok(Call::Stop(answer)) => Some((answer, true)),
                Err(RecvTimeoutError::Timeout) => None,
                Ok(Call::Quit) | Err(RecvTimeoutError::Disconnected) => return,
            };
            let started = Instant::now();
            let result = self.reconcile();
            pause = self.interval.max(started.elapsed() * SHARE_OF_TIME);
            wait = result.is_err().then(|| Instant::now() + pause);
            let is_failing = result.is_err();
            self.note_failure(result.as_ref().err());
            match (answer, result) {
                (Some((answer, last)), result) => {
                    // Whoever asked and has gone needs no answer.
                    let _ = answer.send(result);
                    if last {
                        return;
                    }
                }
                (None, Err(error)) if !was_failing => {
                    let error = in_full(&error);
                    tracing::warn!(error, "the kubelet's file is out of date, trying again");
                }
                (None, _) => {}
            }
            was_failing = is_failing;
        }
    }

    fn note_failure(&self, error: Option<&MirrorError>) {
        let failure = self.shared.mirror_failure.lock();
        *failure.unwrap_or_else(PoisonError::into_inner) = error.map(in_full);
    }

    fn reconcile(&mut self) -> Result<(), MirrorError> {
        // From here on, a change may be missing in what is read, so it must ring again.
        self.rung.store(false, Ordering::Release);
        let (lists, blocked) = self
            .shared
            .read(|node| (node.lists_in_force(), node.blocked().is_some()));
        if blocked || self.files.is_empty() {
            return Ok(());
        }
        let snapshot = settled(self.outbox.read().blocking_recv())?;
        let mut files = std::mem::take(&mut self.files);
        let mut result = Ok(());
        for file in &mut files {
            let content = match file.file {
                KubeletFile::Devices => {
                    let content = checkpoint(&snapshot, &lists);
                    content.map(|content| Some(device_plugin::write(&content)))
                }
                KubeletFile::Claims => claims_file::mirror(&snapshot),
            };
            let kept = content.map_err(MirrorError::from);
            let kept = kept.and_then(|content| self.keep(file, content));
            // One that cannot be kept is no reason not to keep the other.
            result = result.and(kept);
        }
        self.files = files;
        result
    }

    /// Brings a file up to date.
    fn keep(&mut self, file: &mut MirroredFile, content: Option<String>) -> Result<(), MirrorError> {
        self.be_certain(file)?;
        let path = file.path.clone();
        if content.is_none() && file.in_file == InFile::Absent && Seen::of(&path).is_none() {
            return Ok(());
        }
        let content = content.unwrap_or_else(claims_file::empty);
        let hash: Hash = Sha256::digest(&content).into();
        if file.in_file == InFile::Hash(hash) {
            return self.confirm(file, &hash);
        }
        let mirrors = self.around.mirrors(file.file);
        if !mirrors.knows(&hash) {
            let mirror = mirrors.next(hash, file.in_file);
            self.write(&[Row::Mirror(file.file, mirror)])?;
        }
        let failed = |source| MirrorError::File {
            path: path.clone(),
            source,
        };
        self.check_ours(file)?;
        files::replace(&path, content.as_bytes()).map_err(failed)?;
        file.in_file = InFile::Uncertain;
        files::sync_directory_of(&path).map_err(failed)?;
        file.in_file = InFile::Hash(hash);
        file.seen = Seen::of(&path);
        self.shared.counters.mirrors.fetch_add(1, Ordering::Relaxed);
        self.confirm(file, &hash)
    }

    /// The file with this hash is in place, whatever happens: it is the only one that is known.
    fn confirm(&mut self, file: &MirroredFile, hash: &Hash) -> Result<(), MirrorError> {
        match self.around.mirrors(file.file).confirmed(hash) {
            Some(mirror) => Ok(self.write(&[Row::Mirror(file.file, mirror)])?),
            None => Ok(()),
        }
    }

    /// Makes sure that the file that is there stays there, and which one it is.
    fn be_certain(&self, file: &mut MirroredFile) -> Result<(), MirrorError> {
        if file.in_file != InFile::Uncertain {
            return Ok(());
        }
        let path = &file.path;
        files::sync_directory_of(path).map_err(|source| MirrorError::File {
            path: path.clone(),
            source,
        })?;
        file.in_file = match hash_of(path)? {
            None => InFile::Absent,
            Some(hash) if self.around.mirrors(file.file).knows(&hash) => InFile::Hash(hash),
            Some(_) => return Err(foreign(path)),
        };
        Ok(())
    }

    /// Whether the file is the one that we wrote last, or another one that we know.
    fn check_ours(&self, file: &MirroredFile) -> Result<(), MirrorError> {
        let path = &file.path;
        let seen = Seen::of(path);
        if seen.is_none() || seen == file.seen {
            return Ok(());
        }
        match hash_of(path)? {
            Some(hash) if !self.around.mirrors(file.file).knows(&hash) => Err(foreign(path)),
            _ => Ok(()),
        }
    }

    fn write(&mut self, rows: &[Row]) -> Result<(), WriteError> {
        self.outbox.write(rows.to_vec(), Phase::Nothing).wait()?;
        rows.iter().for_each(|row| self.around.follow(row));
        Ok(())
    }
}

fn foreign(path: &Path) -> MirrorError {
    let path = path.to_owned();
    MirrorError::Foreign { path }
}

fn hash_of(path: &Path) -> Result<Option<Hash>, MirrorError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(Sha256::digest(&bytes).into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(MirrorError::File {
            path: path.to_owned(),
            source,
        }),
    }
}

fn in_full(error: &MirrorError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// What tells a file from one that was written in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    inode: u64,
    changed: (i64, i64),
    length: u64,
}

impl Seen {
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let about = std::fs::symlink_metadata(path).ok()?;
        let changed = (about.ctime(), about.ctime_nsec());
        Some(Self {
            inode: about.ino(),
            changed,
            length: about.len(),
        })
    }
}

/// What the kubelet's file should say, entries in the order of pods, containers and resources.
fn checkpoint(
    snapshot: &Snapshot,
    lists: &BTreeMap<ResourceName, Option<Arc<DeviceList>>>,
) -> Result<Checkpoint, LoadError> {
    let mut entries = Vec::new();
    snapshot.pods(|uid, record| {
        let start = entries.len();
        entries.extend(record.allocations.into_iter().map(|allocation| {
            let nodes = allocation.devices_by_node().into_iter();
            Entry {
                pod_uid: uid.to_owned(),
                devices: Devices::PerNuma(Some(nodes.map(|(node, ids)| (node, Some(ids))).collect())),
                container: allocation.container,
                resource: allocation.resource,
                alloc_resp: Some(allocation.answer),
            }
        }));
        if let Some(pod) = entries.get_mut(start..) {
            pod.sort_by(|one, other| {
                (&one.container, &one.resource).cmp(&(&other.container, &other.resource))
            });
        }
    })?;
    let registered = lists.iter().map(|(name, list)| {
        let healthy = list.iter().flat_map(|list| list.healthy_ids());
        let texts = healthy.map(|id| id.as_str().to_owned());
        (name.as_str().to_owned(), Some(texts.collect()))
    });
    Ok(Checkpoint {
        // As a kubelet: nothing, not an empty list.
        entries: (!entries.is_empty()).then_some(entries),
        registered: Some(registered.collect()),
    })
}
