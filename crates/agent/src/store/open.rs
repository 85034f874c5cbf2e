//! The start of a store: decides which of the files found at start is the state.
//!
//! | database | kubelet's file | then |
//! | --- | --- | --- |
//! | none, and no trace of devlet | none | nothing is held |
//! | none, and no trace of devlet | sound | it is imported |
//! | none, and no trace of devlet | unreadable | quarantined; no pod is admitted until an operator decides |
//! | readable | none, or its hash is on record | the database counts |
//! | readable | sound, hash unknown, adds to the record | a kubelet wrote it: devlet's state is archived, the file is imported |
//! | readable | sound, hash unknown, takes devices or claims from pods on record or also gives their devices to other pods | contested: devlet's state is archived, the file copied; the devices of both sides are held, and no new pod is admitted until an operator imports or forgets the copy |
//! | readable, with a contested file | sound, hash unknown | also contested, unless it has exactly what is on record: an operator decides about each |
//! | readable | written by another process while devlet ran | quarantined; the database counts |
//! | readable | unreadable, hash unknown, of root or the user of devlet | quarantined; the database counts, but a kubelet may have given more: no new pod is admitted until an operator decides |
//! | readable | not a regular file, or of another user | quarantined; the database counts |
//! | lost or unreadable | sound | quarantined; the file, which may lag behind, is imported; no new pod is admitted until an operator decides |
//! | lost or unreadable | none or unreadable | quarantined; no pod is admitted until an operator decides |
//!
//! A database is lost if there is a trace of an earlier start (`node_id.rs`), and the database is missing, a dangling link,
//! not a regular file, of another node, without a node ID, or an older copy. A kubelet's file also counts as unreadable if
//! it is not a regular file with one name and a bounded size that belongs to root or the user of devlet, and that no other
//! user may write (`state_file.rs`).
//!
//! A dangling link is quarantined, too: the disk of the database was not mounted. The start that finds a file behind the
//! link puts it back. The database that was created in its place did not get new pods, and is kept.
//!
//! Each block has its own record and is ended separately. That of the database ends when kubelet's files of both kinds were
//! imported, or when it is forgotten. While a file is contested, devlet does not answer for the pods that it adds or
//! changes, nor for pods that hold the same devices.
//!
//! There are two such files, about devices and about claims (`dra_manager_state`), and each is judged separately. A claim
//! that a kubelet's file lacks and that no pod on record holds stays on record until its drivers have unprepared it.
//!
//! A quarantined file keeps its old name, too, until the new state is on disk. So a start after a crash finds the same row
//! of the table again, and never the first one.
//!
//! The rows of a start are written before anything else happens, or the start fails. A reboot is different: its marks can
//! be derived from the boot ID at any time, so they are written when the disk accepts them. Until then, no new pod is
//! admitted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use devlet_core::device_plugin::inventory::LastPlugin;
use devlet_core::{Moment, Node, ResourceName, Restored};

use super::Store;
use super::clock::MonotonicClock;
use super::database::{Database, DatabaseFile, Loaded, disk_reason};
use super::database_link::{check_link_targets, link_targets, resolve, restored_link};
use super::error::WriteError;
use super::file_on_disk::{FileOnDisk, ParsedFile, SoundFile};
use super::kubelet_file::{BlockedBy, KubeletFile};
use super::load_error::LoadError;
use super::mirror_hashes::MirrorFileState;
use super::node_id::{IdFiles, Progress, Traces};
use super::open_options::OpenOptions;
use super::open_report::{Found, OpenError, OpenReport, Takeover};
use super::persisted_state::{NodeMetadata, PersistedState};
use super::record::BlockedRecord;
use super::row::Row;
use super::state_file::StateFileError;
use super::threads::{self, RecordedProgress};
use crate::metrics::statistics::Counters;

pub(crate) fn open(options: OpenOptions) -> Result<(Store, OpenReport), OpenError> {
    let now = (options.clock)();
    let clock = MonotonicClock::from(now);
    let file = database_file(&options);
    let targets = link_targets(&options.database);
    if file.path != options.database {
        check_link_targets(&targets)?;
    }
    let mut traces = Traces::find(&options.database, &targets, options.node_id.as_deref(), now)?;
    let mut startup = Startup {
        now,
        file_states: BTreeMap::new(),
        failure: None,
        report: OpenReport::new(std::mem::take(&mut traces.quarantined)),
        options: &options,
        file: &file,
        traces: &traces,
    };
    let (files, opened) = read_files(&options, &file);
    if let Ok(loaded) = &opened
        && let Some(link) = restored_link(&loaded.persisted)
    {
        drop(opened);
        let quarantined = startup.put_back(&link)?;
        let (store, mut report) = open(options)?;
        report.quarantined.push(quarantined);
        return Ok((store, report));
    }
    let (database, persisted) = startup.load(opened, files)?;
    let Startup {
        file_states,
        mut failure,
        mut report,
        ..
    } = startup;
    let file_id = database.file_id;
    let database = failure.is_none().then_some(database);
    let progress = record_progress(traces.files, &file, &persisted.metadata, &mut failure)?;
    let is_imported = report.imported.is_some() || report.imported_claims.is_some();
    let metadata = persisted.metadata.clone();
    let node = restore(persisted, is_imported, clock.now());
    report.describe(&node);
    let opened = threads::Opened {
        clock,
        file,
        file_id,
        database,
        progress,
        failure,
        metadata,
        file_states,
        node,
    };
    Ok((opened.start(options)?, report))
}

fn database_file(options: &OpenOptions) -> DatabaseFile {
    DatabaseFile {
        path: resolve(&options.database),
        storage: options.storage.clone(),
        counters: Arc::new(Counters::default()),
        boot_id: options.boot_id.clone(),
    }
}

/// Reads the kubelet's files and the database, in parallel: both take long for a node with many pods.
fn read_files(options: &OpenOptions, file: &DatabaseFile) -> (KubeletFiles, Result<Loaded, LoadError>) {
    thread::scope(|scope| {
        let read = || KubeletFile::ALL.map(|file| (file, FileOnDisk::read(options.path_of(file))));
        let files = thread::Builder::new().spawn_scoped(scope, read);
        let opened = file.open();
        let files = files.map_or_else(|_| read(), |files| files.join().unwrap_or_else(|_| read()));
        (files, opened)
    })
}

/// Writes the progress of the database to the id files: after the database has it, and before anything is answered. While
/// the database is lost, the files stay as they are, because they identify the right one.
fn record_progress(
    files: IdFiles,
    file: &DatabaseFile,
    metadata: &NodeMetadata,
    failure: &mut Option<WriteError>,
) -> Result<RecordedProgress, OpenError> {
    let is_lost = metadata.is_blocked_by_database();
    let mut recorded = RecordedProgress {
        files,
        is_recorded: failure.is_none() || is_lost,
        failure: None,
    };
    let Some(id) = metadata.node_id.as_ref().filter(|_| !is_lost) else {
        return Ok(recorded);
    };
    let known = recorded.files.newest().filter(|_| failure.is_some()).cloned();
    let progress = known.as_ref().unwrap_or(&metadata.progress);
    match recorded.files.write(id, progress) {
        Ok(not_written) => recorded.failure = not_written.map(|not| not.to_string()),
        Err(not) if not.has_id => {
            recorded.is_recorded = false;
            failure.get_or_insert(file.not_written(&not));
        }
        Err(not) => {
            return Err(OpenError::Disk {
                path: not.path,
                reason: not.error.to_string(),
            });
        }
    }
    Ok(recorded)
}

fn restore(persisted: PersistedState, is_imported: bool, now: Moment) -> Node {
    let PersistedState {
        pods,
        claims,
        leases,
        lists,
        metadata,
    } = persisted;
    let known = metadata.resources.iter();
    let known = known.map(|(name, record)| (name.clone(), record.last(now)));
    let mut resources: BTreeMap<ResourceName, Option<LastPlugin>> = known.collect();
    // Names without a plugin, from a file that an earlier run imported, are dropped unless pods hold them.
    if !is_imported && resources.values().any(Option::is_none) {
        let allocations = pods.values().flat_map(|pod| &pod.allocations);
        let held: BTreeSet<&ResourceName> = allocations.map(|each| &each.resource).collect();
        resources.retain(|name, last| last.is_some() || held.contains(name));
    }
    let mut node = Node::restore(Restored {
        pods,
        resources,
        claims: claims.into_values().collect(),
        leases: leases.into_values().collect(),
        lists,
    });
    node.evict_idle(now);
    for (by, record) in &metadata.blocked {
        node.block(record.blocked(*by));
    }
    for contest in metadata.contested.values() {
        node.block(contest.blocked());
    }
    node
}

/// A start in progress.
pub(super) struct Startup<'a> {
    pub(super) options: &'a OpenOptions,
    pub(super) file: &'a DatabaseFile,
    pub(super) traces: &'a Traces,
    pub(super) now: Moment,
    pub(super) file_states: BTreeMap<KubeletFile, MirrorFileState>,
    /// Why the database could not be written yet.
    failure: Option<WriteError>,
    pub(super) report: OpenReport,
}

type KubeletFiles = [(KubeletFile, FileOnDisk); 2];

/// The consequences of the kubelet's files for a start with a database.
#[derive(Default)]
struct Examined {
    /// To write before anything else happens.
    rows: Vec<Row>,
    /// Originals of quarantined files, to remove after that.
    remove: Vec<PathBuf>,
    /// To write after they are removed.
    removed: Vec<Row>,
    /// Files to adopt or contest.
    sound: Vec<(KubeletFile, SoundFile)>,
}

impl Startup<'_> {
    fn load(
        &mut self,
        opened: Result<Loaded, LoadError>,
        files: KubeletFiles,
    ) -> Result<(Database, PersistedState), OpenError> {
        let path = self.file.path.clone();
        let lost = match opened {
            Ok(loaded) => match self.contradiction(&loaded.persisted) {
                None => return self.with_database(loaded, files),
                Some(reason) => {
                    drop(loaded);
                    let quarantined = self.quarantine(&path, reason)?;
                    Some(self.lost(&quarantined.kept, quarantined.reason))
                }
            },
            Err(LoadError::Absent) => self.missing(),
            Err(LoadError::Unreadable(reason)) => {
                let quarantined = self.quarantine(&path, reason)?;
                Some(match self.traces.copy() {
                    Some(_) => {
                        let reason = format!("it cannot be read ({})", quarantined.reason);
                        self.lost(&quarantined.kept, reason)
                    }
                    None => self.blocked_record(&quarantined),
                })
            }
            Err(LoadError::Unusable(StateFileError::NotRegular { kind })) => {
                let reason = match std::fs::read_link(&path) {
                    Ok(target) => format!(
                        "it is a symbolic link to {}, where no file is; mount the disk that {} points to, and restart devlet",
                        target.display(),
                        path.display()
                    ),
                    Err(_) => StateFileError::NotRegular { kind }.to_string(),
                };
                let quarantined = self.quarantine(&path, reason)?;
                Some(self.lost(&quarantined.kept, quarantined.reason))
            }
            Err(LoadError::Unusable(error)) => return Err(OpenError::unusable(&path, &error)),
            Err(LoadError::InUse) => return Err(OpenError::InUse { path }),
            Err(LoadError::Newer { found, known }) => {
                return Err(OpenError::NewerSchema { path, found, known });
            }
            Err(LoadError::Io(error)) => return Err(self.disk(error.to_string())),
        };
        self.without_database(files, lost)
    }

    fn with_database(
        &mut self,
        loaded: Loaded,
        files: KubeletFiles,
    ) -> Result<(Database, PersistedState), OpenError> {
        let Loaded {
            mut database,
            mut persisted,
            repaired,
        } = loaded;
        self.report.found = Found::Database;
        self.report.repaired = repaired;
        let Examined {
            mut rows,
            remove,
            removed,
            sound,
        } = self.examine(&mut persisted, files)?;
        if !sound.is_empty() {
            let archive = self.archive(&persisted)?;
            let adopted = self.adopt(&mut persisted, &sound, true);
            let (adopted, difference) = adopted.inspect_err(|_| self.remove_copies(&archive))?;
            rows.extend(adopted);
            if self.report.imported.is_some() || self.report.imported_claims.is_some() {
                self.report.takeover = Some(Takeover { archive, difference });
            }
        }
        let must_be_written = !rows.is_empty();
        rows.extend(self.reboot(&mut persisted));
        persisted.metadata.progress = self.next_start(&persisted.metadata.progress);
        rows.push(Row::Progress(persisted.metadata.progress.clone()));
        // This tests the disk before a plugin is called, and syncs records that a killed process left in the page cache.
        match database.write(&rows) {
            Err(error) if must_be_written => return Err(self.disk(disk_reason(&error))),
            written => {
                let written = written.and_then(|()| database.ensure_wal_space());
                self.failure = written.err().map(|error| self.file.failure(&error));
            }
        }
        for path in remove {
            self.remove(&path)?;
        }
        // Only after the removal: if a crash leaves the file in place, its hash must still be known.
        if self.failure.is_none() && !removed.is_empty() {
            match database.write(&removed) {
                Ok(()) => removed.iter().for_each(|row| persisted.metadata.apply(row)),
                Err(error) => self.failure = Some(self.file.failure(&error)),
            }
        }
        Ok((database, persisted))
    }

    /// Compares the kubelet's files with the record, and quarantines those that cannot be used.
    fn examine(
        &mut self,
        persisted: &mut PersistedState,
        files: KubeletFiles,
    ) -> Result<Examined, OpenError> {
        let mut examined = Examined::default();
        if persisted.metadata.node_id.is_none() {
            // Before the id files get it, or the database would be taken for another node's.
            examined.rows.push(Row::NodeId(self.traces.id()));
            examined.rows.iter().for_each(|row| persisted.metadata.apply(row));
        }
        for (file, on_disk) in files {
            self.examine_file(file, on_disk, persisted, &mut examined)?;
        }
        Ok(examined)
    }

    fn examine_file(
        &mut self,
        file: KubeletFile,
        on_disk: FileOnDisk,
        persisted: &mut PersistedState,
        examined: &mut Examined,
    ) -> Result<(), OpenError> {
        let mirrors = persisted.metadata.mirrors(file);
        if let Some(hash) = on_disk.hash().filter(|hash| mirrors.knows(hash)) {
            let is_certain = mirrors.confirmed(&hash).is_none();
            let file_state = if is_certain {
                MirrorFileState::Hash(hash)
            } else {
                MirrorFileState::Uncertain
            };
            self.file_states.insert(file, file_state);
            return Ok(());
        }
        let foreign = persisted.metadata.foreign.get(&file);
        if on_disk.hash().is_some() && on_disk.hash().as_ref() == foreign {
            let reason =
                "another process wrote it while devlet ran, so it is not a kubelet's state".to_owned();
            examined.remove.push(self.quarantine_file(file, reason)?.original);
            examined.removed.push(Row::Foreign(file, None));
            return Ok(());
        }
        // A copy of a mirror, such as one with a second name, has nothing new.
        let content = on_disk.content_hash();
        let is_foreign = content.is_some() && content.as_ref() == foreign;
        let is_known = is_foreign || content.is_some_and(|hash| mirrors.knows(&hash));
        match on_disk.parse(file) {
            ParsedFile::Absent => {}
            ParsedFile::Sound(sound) => {
                self.sync_directory_of(file)?;
                examined.sound.push((file, sound));
            }
            ParsedFile::Unreadable { reason, may_be_state } => {
                let original = if self.is_quarantined(persisted, file) {
                    self.path_of(file)
                } else {
                    let quarantined = self.quarantine_file(file, reason)?;
                    if may_be_state && !is_known {
                        // A kubelet may have given devices or claims in the meantime.
                        let record = self.blocked_record(&quarantined);
                        let blocked = Row::Blocked(persisted.metadata.next_blocked(file), Some(record));
                        persisted.metadata.apply(&blocked);
                        examined.rows.push(blocked);
                    }
                    quarantined.original
                };
                examined.remove.push(original);
                if is_foreign {
                    examined.removed.push(Row::Foreign(file, None));
                }
            }
        }
        Ok(())
    }

    /// Creates a database. `lost` says why a previous one is lost.
    fn without_database(
        &mut self,
        files: KubeletFiles,
        lost: Option<BlockedRecord>,
    ) -> Result<(Database, PersistedState), OpenError> {
        let mut persisted = PersistedState::default();
        persisted.metadata.boot_id = Some(self.options.boot_id.clone());
        persisted.metadata.node_id = Some(self.traces.id());
        persisted.metadata.progress = self.next_start(&Progress::default());
        if let Some(record) = lost {
            persisted.metadata.blocked.insert(BlockedBy::Database, record);
        }
        let (mut remove, mut found) = (Vec::new(), Vec::new());
        for (file, on_disk) in files {
            match on_disk.parse(file) {
                ParsedFile::Absent => {}
                ParsedFile::Sound(sound) => {
                    self.report.found = Found::KubeletFile;
                    found.push((file, sound));
                }
                ParsedFile::Unreadable { reason, .. } => {
                    let quarantined = self.quarantine_file(file, reason)?;
                    let blocked_by = persisted.metadata.next_blocked(file);
                    persisted
                        .metadata
                        .blocked
                        .insert(blocked_by, self.blocked_record(&quarantined));
                    remove.push(quarantined.original);
                }
            }
        }
        // Files may lag behind a lost database. They are adopted, and no new pod is admitted until an operator has decided
        // that nothing is missing.
        self.adopt(&mut persisted, &found, false)?;
        let created = self.file.create(&persisted.rows());
        let database = created.map_err(|error| self.disk(disk_reason(&error)))?;
        for path in remove {
            self.remove(&path)?;
        }
        Ok((database, persisted))
    }

    /// Returns why a database is not the latest one of this node.
    fn contradiction(&self, persisted: &PersistedState) -> Option<String> {
        // A database that replaced a lost one is blocked, and not compared with the id files.
        if persisted.metadata.is_blocked_by_database() {
            return None;
        }
        let id = persisted.metadata.node_id.as_deref();
        self.traces.contradiction(id, &persisted.metadata.progress)
    }

    /// Returns the progress of this start, which is ahead of the database and the id files.
    fn next_start(&self, database: &Progress) -> Progress {
        let files = self.traces.files.newest().map_or(0, |newest| newest.starts);
        Progress::of_start(files.max(database.starts).saturating_add(1))
    }

    pub(super) fn path_of(&self, file: KubeletFile) -> PathBuf {
        self.options.path_of(file).unwrap_or(&self.file.path).to_owned()
    }

    pub(super) fn disk(&self, reason: String) -> OpenError {
        OpenError::Disk {
            path: self.file.path.clone(),
            reason,
        }
    }
}
