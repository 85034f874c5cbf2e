//! Mirrors of the state in the kubelet's files, written by a thread of its own.
//!
//! ```text
//!   request ──pause──► snapshot ──hash──► record the hash ──synced──► replace the file
//!                                                                          │ synced
//!                                              remove the previous hash ◄──┘
//! ```
//!
//! The hash is on disk before the file is. So a file with an unknown hash at start was written by another process: a
//! kubelet. The recorded hashes are those of the current file and, during a replacement, of the next one. Older hashes are
//! removed, because a kubelet can reach the same state again and write the same content. The content comes from a snapshot
//! of the database, not from memory: this needs no lock, and a mirror never has changes that were not answered.
//!
//! At every interval the thread compares the files with those that it left, even if nothing has changed. A file that
//! another process has written since is left alone and reported, and its hash is recorded. devlet was running, so a kubelet
//! was not in charge, and the next start does not adopt that file. The hash is removed when the file is durably gone:
//! quarantined at a start, or replaced by a mirror. Anything that is not a regular file is quarantined.
//!
//! The file about claims is created with the first claim.
//!
//! While the node is blocked, no mirror is written: readers would take it for a state in which nothing is held. The files
//! are still compared. If one differs from the record, that is reported and a stop fails: a kubelet must not take over.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use devlet_core::ResourceName;
use devlet_core::device_plugin::list::DeviceList;
use sha2::{Digest as _, Sha256};
use tokio::sync::oneshot;

use super::Shared;
use super::claims_file;
use super::clock::system_time;
use super::commit_queue::{CommitQueue, flatten_recv};
use super::completion::Completion;
use super::devices_file;
use super::error::WriteError;
use super::fs::{self, FileStamp};
use super::kubelet_file::{Hash, KubeletFile};
use super::load_error::LoadError;
use super::mirror_hashes::MirrorFileState;
use super::open_report::Quarantined;
use super::persisted_state::NodeMetadata;
use super::row::Row;
use super::state_file::{self, StateFileError};

/// Minimum pause after an update, as a multiple of its duration.
const MIN_PAUSE_FACTOR: u32 = 20;

/// Why the kubelet's file is not up to date.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// Its hash cannot be recorded.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The content to write cannot be read from the database.
    #[error("the database cannot be read: {reason}")]
    Read {
        /// The error.
        reason: String,
    },
    /// The file differs from the record, and no mirror is written while pods are not admitted.
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
    /// The path is not a regular file, and cannot be quarantined.
    #[error("{} cannot be set aside ({reason})", .path.display())]
    Quarantine {
        /// The file.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
        /// The error of the quarantine.
        source: io::Error,
    },
    /// The file cannot be replaced.
    #[error("{} cannot be replaced", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
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

/// A request to the thread that writes mirrors.
pub(crate) enum MirrorRequest {
    /// The state may have changed: update the files after a pause.
    Later,
    Now(oneshot::Sender<Result<(), MirrorError>>),
    Stop(oneshot::Sender<Result<(), MirrorError>>),
    /// Ends the thread without writing.
    Quit,
}

/// Sends requests to the thread that writes mirrors.
#[derive(Debug, Clone)]
pub(crate) struct MirrorHandle {
    requests: Sender<MirrorRequest>,
    is_requested: Arc<AtomicBool>,
}

impl MirrorHandle {
    pub(crate) fn new(requests: Sender<MirrorRequest>, is_requested: Arc<AtomicBool>) -> Self {
        Self {
            requests,
            is_requested,
        }
    }

    /// Requests that the kubelet's files be rewritten.
    pub(crate) fn request(&self) {
        if !self.is_requested.swap(true, Ordering::AcqRel) {
            // Fails while the store is being stopped.
            let _ = self.requests.send(MirrorRequest::Later);
        }
    }

    pub(crate) fn quit(&self) {
        let _ = self.requests.send(MirrorRequest::Quit);
    }

    pub(crate) fn send(
        &self,
        request: fn(oneshot::Sender<Result<(), MirrorError>>) -> MirrorRequest,
    ) -> oneshot::Receiver<Result<(), MirrorError>> {
        let (done, answer) = oneshot::channel();
        let _ = self.requests.send(request(done));
        answer
    }
}

/// A kubelet's file that devlet keeps up to date.
pub(crate) struct MirroredFile {
    pub(crate) file: KubeletFile,
    pub(crate) path: PathBuf,
    pub(crate) file_state: MirrorFileState,
    /// Stamp of the file with that content; `None` if it is absent or has not been inspected.
    pub(crate) stamp: Option<FileStamp>,
    /// Stamp of a file that another process put in its place.
    pub(crate) foreign: Option<FileStamp>,
}

impl MirroredFile {
    /// Returns `true` if the file is the one that was last inspected.
    fn is_unchanged(&self) -> bool {
        let is_certain = match self.file_state {
            MirrorFileState::Absent => self.stamp.is_none(),
            MirrorFileState::Hash(_) => self.stamp.is_some(),
            MirrorFileState::Uncertain => false,
        };
        is_certain && self.foreign.is_none() && FileStamp::at(&self.path) == self.stamp
    }
}

pub(crate) struct KubeletFileWriter {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: CommitQueue,
    pub(crate) files: Vec<MirroredFile>,
    pub(crate) interval: Duration,
    /// Copy of the metadata on disk. The hashes of files are up to date, because only this thread changes them.
    pub(crate) metadata: NodeMetadata,
    pub(crate) requests: Receiver<MirrorRequest>,
    /// A request has been sent since the last update began.
    pub(crate) is_requested: Arc<AtomicBool>,
}

impl KubeletFileWriter {
    /// Runs until it is stopped, or until no sender is left.
    pub(crate) fn run(mut self) {
        let mut wait: Option<Instant> = None;
        let mut pause = self.interval;
        let mut was_failing = false;
        let mut checked = Instant::now();
        loop {
            let until = wait.unwrap_or(checked + self.interval);
            let request = self
                .requests
                .recv_timeout(until.saturating_duration_since(Instant::now()));
            if matches!(request, Err(RecvTimeoutError::Timeout)) && wait.is_none() {
                checked = Instant::now();
                if self.files.iter().all(MirroredFile::is_unchanged) {
                    continue;
                }
            }
            let answer = match request {
                Ok(MirrorRequest::Later) => {
                    wait.get_or_insert_with(|| Instant::now() + pause);
                    continue;
                }
                Ok(MirrorRequest::Now(answer)) => Some((answer, false)),
                Ok(MirrorRequest::Stop(answer)) => Some((answer, true)),
                Err(RecvTimeoutError::Timeout) => None,
                Ok(MirrorRequest::Quit) | Err(RecvTimeoutError::Disconnected) => return,
            };
            let started = Instant::now();
            let result = self.reconcile();
            pause = self.interval.max(started.elapsed() * MIN_PAUSE_FACTOR);
            wait = result.is_err().then(|| Instant::now() + pause);
            checked = Instant::now();
            let is_failing = result.is_err();
            self.set_failure(result.as_ref().err());
            match (answer, result) {
                (Some((answer, last)), result) => {
                    // Fails if the caller has stopped waiting.
                    let _ = answer.send(result);
                    if last {
                        return;
                    }
                }
                (None, Err(error)) if !was_failing => {
                    let error = with_source(&error);
                    tracing::warn!(error, "kubelet file not updated, trying again");
                }
                (None, _) => {}
            }
            was_failing = is_failing;
        }
    }

    fn set_failure(&self, error: Option<&MirrorError>) {
        let failure = self.shared.mirror_failure.lock();
        *failure.unwrap_or_else(PoisonError::into_inner) = error.map(with_source);
    }

    fn reconcile(&mut self) -> Result<(), MirrorError> {
        // A change from here on may be missing in the snapshot, so it must send a request again.
        self.is_requested.store(false, Ordering::Release);
        let (lists, blocked) = self
            .shared
            .read(|node| (node.active_lists(), node.blocked().is_some()));
        let mut files = std::mem::take(&mut self.files);
        let reconciled = self.reconcile_files(&mut files, &lists, blocked);
        self.files = files;
        reconciled
    }

    /// Inspects the files, and updates them unless the node is blocked.
    fn reconcile_files(
        &mut self,
        files: &mut [MirroredFile],
        lists: &BTreeMap<ResourceName, Option<Arc<DeviceList>>>,
        is_blocked: bool,
    ) -> Result<(), MirrorError> {
        // Both files are tried, even if the first one fails.
        let mut result = Ok(());
        let mut usable = Vec::new();
        for file in files {
            match self.inspect(file) {
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
                KubeletFile::Devices => devices_file::mirror(&snapshot, lists).map(Some),
                KubeletFile::Claims => claims_file::mirror(&snapshot),
            };
            let kept = content.map_err(MirrorError::from);
            let kept = kept.and_then(|content| match is_blocked {
                true => check_complete(file, content),
                false => self.update(file, content),
            });
            result = result.and(kept);
        }
        result
    }

    /// Updates a file that has been inspected.
    fn update(&mut self, file: &mut MirroredFile, content: Option<String>) -> Result<(), MirrorError> {
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
        // Another process may have written it in the meantime.
        self.inspect(file)?;
        fs::replace(&path, content.as_bytes()).map_err(failed)?;
        // Read again: another process may have replaced it before its stamp was taken.
        (file.file_state, file.stamp) = (MirrorFileState::Uncertain, None);
        self.inspect(file)?;
        self.shared.counters.mirrors.fetch_add(1, Ordering::Relaxed);
        self.confirm(file, &hash)
    }

    /// Removes all other hashes, after the file with this hash is durable.
    fn confirm(&mut self, file: &MirroredFile, hash: &Hash) -> Result<(), MirrorError> {
        let confirmed = self.metadata.mirrors(file.file).confirmed(hash);
        self.forget_foreign(file, confirmed.map(|mirror| Row::Mirror(file.file, mirror)))
    }

    /// Writes a row, and removes the hash of a file of another process that is durably gone. From now on, a file with that
    /// content is adopted as a kubelet's.
    fn forget_foreign(&mut self, file: &MirroredFile, row: Option<Row>) -> Result<(), MirrorError> {
        let is_recorded = self.metadata.foreign.contains_key(&file.file);
        let foreign = is_recorded.then_some(Row::Foreign(file.file, None));
        let rows: Vec<Row> = row.into_iter().chain(foreign).collect();
        if rows.is_empty() {
            return Ok(());
        }
        Ok(self.write(&rows)?)
    }

    /// Reads a file if it is not the one that was last inspected. Fails if another process wrote it.
    fn inspect(&mut self, file: &mut MirroredFile) -> Result<(), MirrorError> {
        if file.is_unchanged() {
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
        // After this, a power loss cannot bring back an earlier file.
        fs::sync_directory_of(&path).map_err(failed)?;
        match state_file::read(&path) {
            Ok(None) => (file.file_state, file.stamp) = (MirrorFileState::Absent, None),
            Ok(Some((content, metadata))) => {
                let (hash, stamp): (Hash, _) = (Sha256::digest(&content).into(), FileStamp::of(&metadata));
                if !self.metadata.mirrors(file.file).knows(&hash) {
                    file.foreign = Some(stamp);
                    return Err(self.record_foreign(file, Some(hash)));
                }
                (file.file_state, file.stamp) = (MirrorFileState::Hash(hash), Some(stamp));
            }
            Err(StateFileError::Io(source)) => return Err(failed(source)),
            Err(error @ StateFileError::NotRegular { .. }) => {
                self.quarantine(&path, &error)?;
                (file.file_state, file.stamp) = (MirrorFileState::Absent, None);
            }
            Err(_) => {
                file.foreign = FileStamp::at(&path);
                return Err(self.record_foreign(file, None));
            }
        }
        Ok(())
    }

    /// Records that another process wrote a file while devlet ran.
    fn record_foreign(&mut self, file: &MirroredFile, hash: Option<Hash>) -> MirrorError {
        let path = file.path.clone();
        match hash.map(|hash| self.write(&[Row::Foreign(file.file, Some(hash))])) {
            Some(Err(error)) => error.into(),
            None | Some(Ok(())) => MirrorError::Foreign { path },
        }
    }

    fn quarantine(&self, path: &Path, error: &StateFileError) -> Result<(), MirrorError> {
        let reason = error.to_string();
        let original = path.to_owned();
        let kept = match fs::move_to_quarantine(path, system_time()) {
            Ok(kept) => kept,
            Err(source) => {
                return Err(MirrorError::Quarantine {
                    path: original,
                    reason,
                    source,
                });
            }
        };
        tracing::warn!(path = %path.display(), kept = %kept.display(), reason, "kubelet file set aside");
        let mut quarantined = self.shared.quarantined.lock();
        let quarantined = quarantined.as_mut().unwrap_or_else(|poisoned| poisoned.get_mut());
        // Only the latest per path, in case another process keeps doing that.
        quarantined.retain(|other: &Quarantined| other.original != original);
        quarantined.push(Quarantined {
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

/// Checks that a file equals the record, while no mirror is written.
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

/// Formats an error with its source.
fn with_source(error: &MirrorError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
