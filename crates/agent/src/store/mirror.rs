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
//! Every interval the thread compares the files with those that it left, even if nothing has changed. A file that another
//! process has written since is left alone and reported, and its hash is recorded: devlet was running, so no kubelet was
//! in charge, and the next start does not adopt that file. The hash is forgotten when the file is gone for good: a start has
//! set it aside, or our own is in its place. Anything that is not a regular file is set aside.
//!
//! A file about claims is not made before there are any.
//!
//! While the node is blocked no mirror is written: it would be read as a state in which nothing is held. The files are
//! compared as usual. A file that differs from what is on record is a problem, and a stop fails: a kubelet must not take over.

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
use super::commit_queue::{CommitQueue, flatten_recv};
use super::completion::Completion;
use super::error::WriteError;
use super::fs::{self, FileStamp};
use super::kubelet_file::{Hash, KubeletFile};
use super::load_error::LoadError;
use super::mirror_hashes::MirrorFileState;
use super::open::{SetAside, system_time};
use super::persisted_state::NodeMetadata;
use super::row::Row;
use super::state_file::{self, StateFileError};
use super::tables::Snapshot;

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
    /// It differs from what is on record, and no mirror is written while pods are not admitted.
    #[error(
        "{} is not written while no pod is admitted; devlet status shows what has to be decided first",
        .path.display()
    )]
    Blocked {
        /// The file.
        path: PathBuf,
    },
    /// Another process wrote the file while devlet ran.
    #[error(
        "{} was written by another process while devlet ran, so it is left alone now and not adopted at the next start; \
         if a kubelet runs here, stop one of the two; otherwise remove the file, and devlet writes it again",
        .path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// Something that is not a file is in its place, and stays there.
    #[error("{} cannot be set aside ({reason})", .path.display())]
    SetAside {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// Why it stays.
        source: io::Error,
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
    /// Its content.
    pub(crate) file_state: MirrorFileState,
    /// The file that had this content; `None` if there was no file, or it has not been looked at.
    pub(crate) seen: Option<FileStamp>,
    /// The file of another process that is in its place.
    pub(crate) foreign: Option<FileStamp>,
}

impl MirroredFile {
    /// Whether the file is the one that was looked at last.
    fn is_as_left(&self) -> bool {
        let is_certain = match self.file_state {
            MirrorFileState::Absent => self.seen.is_none(),
            MirrorFileState::Hash(_) => self.seen.is_some(),
            MirrorFileState::Uncertain => false,
        };
        is_certain && self.foreign.is_none() && FileStamp::at(&self.path) == self.seen
    }
}

pub(crate) struct Mirrorer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: CommitQueue,
    pub(crate) files: Vec<MirroredFile>,
    pub(crate) interval: Duration,
    /// What is on disk, as far as it comes from here.
    pub(crate) metadata: NodeMetadata,
    pub(crate) calls: Receiver<Call>,
    /// Whether somebody has rung since this last looked.
    pub(crate) rung: Arc<AtomicBool>,
}

impl Mirrorer {
    /// Runs until it is stopped, or until no sender is left.
    pub(crate) fn run(mut self) {
        let mut wait: Option<Instant> = None;
        let mut pause = self.interval;
        let mut was_failing = false;
        let mut checked = Instant::now();
        loop {
            let until = wait.unwrap_or(checked + self.interval);
            let call = self
                .calls
                .recv_timeout(until.saturating_duration_since(Instant::now()));
            if matches!(call, Err(RecvTimeoutError::Timeout)) && wait.is_none() {
                checked = Instant::now();
                if self.files.iter().all(MirroredFile::is_as_left) {
                    continue;
                }
            }
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
            checked = Instant::now();
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
                    tracing::warn!(error, "kubelet file not updated, trying again");
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
            .read(|node| (node.active_lists(), node.blocked().is_some()));
        let mut files = std::mem::take(&mut self.files);
        let reconciled = self.reconcile_files(&mut files, &lists, blocked);
        self.files = files;
        reconciled
    }

    /// Looks at the files, and brings them up to date unless no pod is admitted.
    fn reconcile_files(
        &mut self,
        files: &mut [MirroredFile],
        lists: &BTreeMap<ResourceName, Option<Arc<DeviceList>>>,
        is_blocked: bool,
    ) -> Result<(), MirrorError> {
        // A file that cannot be updated does not keep the other from being updated.
        let mut result = Ok(());
        let mut usable = Vec::new();
        for file in files {
            match self.look(file) {
                Ok(()) => usable.push(file),
                Err(error) => result = result.and(Err(error)),
            }
        }
        if usable.is_empty() {
            return result;
        }
        let snapshot = flatten_recv(self.queue.read().blocking_recv())?;
        for file in usable {
            let content = match file.file {
                KubeletFile::Devices => {
                    let content = checkpoint(&snapshot, lists);
                    content.map(|content| Some(device_plugin::write(&content)))
                }
                KubeletFile::Claims => claims_file::mirror(&snapshot),
            };
            let kept = content.map_err(MirrorError::from);
            let kept = kept.and_then(|content| match is_blocked {
                true => check_complete(file, content),
                false => self.keep(file, content),
            });
            result = result.and(kept);
        }
        result
    }

    /// Brings a file up to date that has been looked at.
    fn keep(&mut self, file: &mut MirroredFile, content: Option<String>) -> Result<(), MirrorError> {
        if content.is_none() && file.file_state == MirrorFileState::Absent {
            return self.forget_foreign(file, None);
        }
        let content = content.unwrap_or_else(claims_file::empty);
        let hash: Hash = Sha256::digest(&content).into();
        if file.file_state == MirrorFileState::Hash(hash) {
            return self.confirm(file, &hash);
        }
        let mirrors = self.metadata.mirrors(file.file);
        if !mirrors.knows(&hash) {
            let mirror = mirrors.next(hash, file.file_state);
            self.write(&[Row::Mirror(file.file, mirror)])?;
        }
        let path = file.path.clone();
        let failed = |source| MirrorError::File {
            path: path.clone(),
            source,
        };
        // Another process may have written it meanwhile.
        self.look(file)?;
        fs::replace(&path, content.as_bytes()).map_err(failed)?;
        // Read once more: another process may have written it again before it could be told from this one.
        (file.file_state, file.seen) = (MirrorFileState::Uncertain, None);
        self.look(file)?;
        self.shared.counters.mirrors.fetch_add(1, Ordering::Relaxed);
        self.confirm(file, &hash)
    }

    /// The file with this hash is in place, whatever happens: it is the only one that is known.
    fn confirm(&mut self, file: &MirroredFile, hash: &Hash) -> Result<(), MirrorError> {
        let confirmed = self.metadata.mirrors(file.file).confirmed(hash);
        self.forget_foreign(file, confirmed.map(|mirror| Row::Mirror(file.file, mirror)))
    }

    /// Writes a row, and that a file of another process is gone for good: from now on, the same content is the word of a
    /// kubelet.
    fn forget_foreign(&mut self, file: &MirroredFile, row: Option<Row>) -> Result<(), MirrorError> {
        let is_recorded = self.metadata.foreign.contains_key(&file.file);
        let foreign = is_recorded.then_some(Row::Foreign(file.file, None));
        let rows: Vec<Row> = row.into_iter().chain(foreign).collect();
        if rows.is_empty() {
            return Ok(());
        }
        Ok(self.write(&rows)?)
    }

    /// Finds out what is in the place of a file, if it is not the file that was looked at last.
    fn look(&mut self, file: &mut MirroredFile) -> Result<(), MirrorError> {
        if file.is_as_left() {
            return Ok(());
        }
        let path = file.path.clone();
        if file.foreign.is_some() && FileStamp::at(&path) == file.foreign {
            return Err(MirrorError::Foreign { path });
        }
        file.foreign = None;
        let failed = |source| MirrorError::File {
            path: path.clone(),
            source,
        };
        // A power loss must not bring back another file than the one that is found.
        fs::sync_directory_of(&path).map_err(failed)?;
        match state_file::read(&path) {
            Ok(None) => (file.file_state, file.seen) = (MirrorFileState::Absent, None),
            Ok(Some((content, metadata))) => {
                let (hash, seen): (Hash, _) = (Sha256::digest(&content).into(), FileStamp::of(&metadata));
                if !self.metadata.mirrors(file.file).knows(&hash) {
                    file.foreign = Some(seen);
                    return Err(self.foreign(file, Some(hash)));
                }
                (file.file_state, file.seen) = (MirrorFileState::Hash(hash), Some(seen));
            }
            Err(StateFileError::Io(source)) => return Err(failed(source)),
            Err(error @ StateFileError::NotRegular { .. }) => {
                self.set_aside(&path, &error)?;
                (file.file_state, file.seen) = (MirrorFileState::Absent, None);
            }
            Err(_) => {
                file.foreign = FileStamp::at(&path);
                return Err(self.foreign(file, None));
            }
        }
        Ok(())
    }

    /// Records that another process wrote a file while devlet ran.
    fn foreign(&mut self, file: &MirroredFile, hash: Option<Hash>) -> MirrorError {
        let path = file.path.clone();
        match hash.map(|hash| self.write(&[Row::Foreign(file.file, Some(hash))])) {
            Some(Err(error)) => error.into(),
            None | Some(Ok(())) => MirrorError::Foreign { path },
        }
    }

    fn set_aside(&self, path: &Path, error: &StateFileError) -> Result<(), MirrorError> {
        let reason = error.to_string();
        let original = path.to_owned();
        let kept = match fs::move_to_quarantine(path, system_time()) {
            Ok(kept) => kept,
            Err(source) => {
                return Err(MirrorError::SetAside {
                    path: original,
                    reason,
                    source,
                });
            }
        };
        tracing::warn!(path = %path.display(), kept = %kept.display(), reason, "kubelet file set aside");
        let mut set_aside = self.shared.set_aside.lock();
        let set_aside = set_aside.as_mut().unwrap_or_else(|poisoned| poisoned.get_mut());
        // The latest, should another process keep doing that.
        set_aside.retain(|other: &SetAside| other.original != original);
        set_aside.push(SetAside {
            original,
            kept,
            reason,
        });
        Ok(())
    }

    fn write(&mut self, rows: &[Row]) -> Result<(), WriteError> {
        self.queue.write(rows.to_vec(), Completion::Nothing).wait()?;
        rows.iter().for_each(|row| self.metadata.apply(row));
        Ok(())
    }
}

/// Checks that a file has all that is on record, while no mirror is written.
fn check_complete(file: &MirroredFile, content: Option<String>) -> Result<(), MirrorError> {
    let file_state = content.map_or(MirrorFileState::Absent, |content| {
        MirrorFileState::Hash(Sha256::digest(content).into())
    });
    match file_state == file.file_state {
        true => Ok(()),
        false => Err(MirrorError::Blocked {
            path: file.path.clone(),
        }),
    }
}

fn in_full(error: &MirrorError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
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
