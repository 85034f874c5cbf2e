//! What a start makes of what it finds.
//!
//! | database | kubelet's file | then |
//! | --- | --- | --- |
//! | none, and no trace of devlet | none | nothing is held |
//! | none, and no trace of devlet | sound | it is imported |
//! | none, and no trace of devlet | unreadable | set aside; no pod is admitted until an operator decides |
//! | readable | none, or its hash is on record | the database is right |
//! | readable | sound, hash unknown, adds to the record | a kubelet wrote it: our state is archived, the file is imported |
//! | readable | sound, hash unknown, takes devices or claims from pods on record or gives their devices to other pods, too | contested: our state is archived, the file copied; the devices of both sides are held, and no new pod is admitted until an operator imports or forgets the copy |
//! | readable, with a contested file | sound, hash unknown | contested, too, unless it has exactly what is on record: an operator decides about each |
//! | readable | written by another process while devlet ran | set aside; the database is right |
//! | readable | unreadable, hash unknown, of root or the user of devlet | set aside; the database is right, but a kubelet may have given more: no new pod is admitted until an operator decides |
//! | readable | not a regular file, or of another user | set aside; the database is right |
//! | lost or unreadable | sound | set aside; the file, which may lag behind, is imported; no new pod is admitted until an operator decides |
//! | lost or unreadable | none or unreadable | set aside; no pod is admitted until an operator decides |
//!
//! A database is lost if it is missing, a link to nowhere or anything but a file, another node's, without a node id, or an
//! older copy, although there is a trace of an earlier start (`node_id.rs`). A kubelet's file is unreadable, too, if it is not a
//! regular file with one name, of a bounded size, that belongs to root or the user of devlet and that no other user may
//! write (`state_file.rs`).
//!
//! A link to nowhere is set aside, too, and put back by the start that finds a file behind it: the disk of the database
//! was not mounted. The database that was made in its place had no new pods, and is kept.
//!
//! Each reason has its own record and its own way out. That of the database ends when kubelet's files of both kinds were
//! imported, or when it is forgotten. While a file is contested, the pods that it adds or changes are not answered, nor
//! those that hold the same devices.
//!
//! There are two such files, one about devices and one about claims (`dra_manager_state`), and each is judged by itself: it
//! says nothing about what the other one is about. Claims that no pod on record holds, and that a kubelet's file lacks, stay
//! on record until their drivers have unprepared them.
//!
//! What is set aside keeps its old name until the new state is on disk. So a crash on the way leads to the same
//! row of the table again, and never to the first one.
//!
//! What a start has to write is written before anything else happens, or there is no start. A reboot is different: its
//! marks follow from the boot ID at any time, so they are written as soon as the disk takes them, and until then nobody
//! new is admitted.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use devlet_core::device_plugin::inventory::LastPlugin;
use devlet_core::dra::claims::Claim;
use devlet_core::{Blocked, ClaimUid, DeviceView, Moment, Node, Pod, PodUid, ResourceName, Restored, Source};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::backend::Storage;
use super::claims_file::ImportedClaims;
use super::commit_queue::CommitQueue;
use super::contest::{self, Contest, Disagreement};
use super::database::{
    BlockedBy, Contents, Database, Hash, InFile, KubeletFile, LoadError, Loaded, PendingFile, Place, Row,
    Surroundings, reason,
};
use super::files::Identity;
use super::import::{Content, Difference, ImportReport, Imported};
use super::mirror::{Doorbell, MirroredFile, Mirrorer};
use super::node_id::{IdFiles, Progress, Traces};
use super::record::BlockedRecord;
use super::state_file::{self, StateFileError};
use super::writer::{NOTE_PAUSE, WriteError, Writer};
use super::{Clock, Shared, State, Steady, Store, Threads, dump, files};
pub use crate::config::OnReboot;
use crate::metrics::statistics::Counters;

/// A disk that takes longer than this hangs.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// Maximum symbolic links in a row, as in the kernel.
const MAX_LINKS: usize = 40;

/// How long changes may be missing in the kubelet's file, unless the options say otherwise.
const MIRROR_INTERVAL: Duration = Duration::from_secs(5);

/// Where the state is, and what is known about the machine.
#[derive(Clone)]
pub struct OpenOptions {
    /// The database. Its directory must exist.
    pub database: PathBuf,
    /// A file outside of the database's directory that keeps the node's id: it tells a first start from one after that
    /// directory was lost. `None` if there is no such place.
    pub node_id: Option<PathBuf>,
    /// The kubelet's file, imported and mirrored; `None` if there is none to care about.
    pub checkpoint: Option<PathBuf>,
    /// The kubelet's file about claims, likewise.
    pub claims: Option<PathBuf>,
    /// Tells one boot of the machine from another.
    pub boot_id: String,
    /// What becomes of pods of our API when the machine has been rebooted.
    pub on_reboot: OnReboot,
    /// Tells the time, once: from then on it goes on evenly.
    pub clock: Clock,
    /// How long changes may be missing in the kubelet's file.
    pub mirror_interval: Duration,
    /// How long a write may take before the disk counts as one that hangs.
    pub write_patience: Duration,
    /// What is between the database and its file.
    pub storage: Storage,
}

impl OpenOptions {
    /// Options with the system's clock and everything else as usual.
    pub fn new(database: impl Into<PathBuf>, boot_id: impl Into<String>) -> Self {
        Self {
            database: database.into(),
            node_id: None,
            checkpoint: None,
            claims: None,
            boot_id: boot_id.into(),
            on_reboot: OnReboot::Keep,
            clock: Arc::new(system_time),
            mirror_interval: MIRROR_INTERVAL,
            write_patience: WRITE_PATIENCE,
            storage: Storage::default(),
        }
    }
}

impl OpenOptions {
    fn path_of(&self, file: KubeletFile) -> Option<&Path> {
        match file {
            KubeletFile::Devices => self.checkpoint.as_deref(),
            KubeletFile::Claims => self.claims.as_deref(),
        }
    }
}

/// The time of the system.
pub(crate) fn system_time() -> Moment {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Moment(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// What was found and done at start.
#[derive(Debug)]
pub struct OpenReport {
    /// What the state was made from.
    pub found: Found,
    /// What came out of the kubelet's file, if it was imported.
    pub imported: Option<ImportReport>,
    /// The same of the one about claims.
    pub imported_claims: Option<ImportReport>,
    /// A kubelet has written the file since we did.
    pub takeover: Option<Takeover>,
    /// Kubelet's files that an operator has to decide about.
    pub contested: Vec<Contested>,
    /// What could not be read.
    pub set_aside: Vec<SetAside>,
    /// The machine has been rebooted.
    pub reboot: Option<Reboot>,
    /// The database had not been closed, or was damaged and could be restored.
    pub repaired: bool,
    /// Devices that more than one pod holds.
    pub doubly_held: Vec<DeviceView>,
    /// Why nobody is admitted.
    pub blocked: Option<Blocked>,
}

/// What the state was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing, or nothing that can be read.
    Nothing,
    /// The database.
    Database,
    /// The kubelet's file.
    KubeletFile,
}

/// Something that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Where it was.
    pub original: PathBuf,
    /// Where it is.
    pub kept: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// A kubelet was in charge in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// Where our state from before it is, as JSON.
    pub archive: PathBuf,
    /// What it changed.
    pub difference: Difference,
}

/// A kubelet's file that would take devices or claims from pods on record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contested {
    /// Where it was found.
    pub original: PathBuf,
    /// Where a copy of it is.
    pub copy: PathBuf,
    /// What it says that the record does not, in words.
    pub difference: String,
}

/// The machine has been rebooted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reboot {
    /// The boot before.
    pub previous: String,
    /// Pods that are marked as from before it.
    pub kept: Vec<PodUid>,
    /// Pods that were released.
    pub released: Vec<PodUid>,
}

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// One devlet per database.
    #[error("{} is in use by another process", .path.display())]
    InUse {
        /// The database.
        path: PathBuf,
    },
    /// Written by a later devlet.
    #[error(
        "{} has schema {found}, but this devlet knows only up to {known}; use the version that wrote it, or a \
         later one",
        .path.display()
    )]
    NewerSchema {
        /// The database.
        path: PathBuf,
        /// Its schema.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// Another user controls a file of the state.
    #[error("{}: {reason}, so that user could replace devlet's state; to allow it: {remedy}", .path.display())]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// The users besides root and devlet's own that may write it.
        reason: String,
        /// The command that changes that.
        remedy: String,
    },
    /// The disk refuses.
    #[error("{}: {reason}", .path.display())]
    Disk {
        /// The file.
        path: PathBuf,
        /// What the disk says.
        reason: String,
    },
    /// A file that cannot be read cannot be set aside either.
    #[error("{} cannot be read ({reason}) and cannot be set aside", .path.display())]
    SetAside {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// Why it stays.
        source: io::Error,
    },
    /// Our state cannot be archived, so the kubelet's is not taken in.
    #[error("{} cannot be written", .path.display())]
    Archive {
        /// The archive.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No thread to be had.
    #[error("a thread cannot be started")]
    Thread {
        /// Why not.
        source: io::Error,
    },
}

impl OpenError {
    /// A file of our own that cannot be used as it is.
    pub(crate) fn unusable(path: &Path, error: &StateFileError) -> Self {
        let (path, reason) = (path.to_owned(), error.to_string());
        match error.remedy(&path) {
            Some(remedy) => Self::Untrusted { path, reason, remedy },
            None => Self::Disk { path, reason },
        }
    }
}

/// What is in the place of a kubelet's file.
enum InPlace {
    Absent,
    /// Not looked at yet: a file of ours need not be.
    Present {
        bytes: Vec<u8>,
        hash: Hash,
    },
    Unreachable {
        reason: String,
        /// Whether it can be the word of a kubelet.
        may_be_state: bool,
        hash: Option<Hash>,
    },
}

/// The same, looked at.
enum Verdict {
    Absent,
    Sound(Sound),
    Unreadable { reason: String, may_be_state: bool },
}

/// A kubelet's file that can be imported.
struct Sound {
    content: Content,
    bytes: Vec<u8>,
    hash: Hash,
}

impl InPlace {
    fn read(path: Option<&Path>) -> Self {
        match path.map(Self::read_file) {
            None => Self::Absent,
            Some(Ok(in_place)) => in_place,
            Some(Err(error)) => Self::unreachable(&error, None),
        }
    }

    fn read_file(path: &Path) -> Result<Self, StateFileError> {
        let Some((file, metadata)) = state_file::open(path, false)? else {
            return Ok(Self::Absent);
        };
        let checked = state_file::check_access(&metadata).and_then(|()| state_file::check_links(&metadata));
        if let Err(error) = checked.as_ref()
            && !error.may_be_state()
        {
            return Ok(Self::unreachable(error, None));
        }
        let bytes = state_file::read_open(file, &metadata)?;
        let hash = Sha256::digest(&bytes).into();
        Ok(match checked {
            Ok(()) => Self::Present { bytes, hash },
            Err(error) => Self::unreachable(&error, Some(hash)),
        })
    }

    fn unreachable(error: &StateFileError, hash: Option<Hash>) -> Self {
        Self::Unreachable {
            reason: error.to_string(),
            may_be_state: error.may_be_state(),
            hash,
        }
    }

    /// The hash of the content, even if the file is not used.
    fn content_hash(&self) -> Option<Hash> {
        match self {
            Self::Absent => None,
            Self::Present { hash, .. } => Some(*hash),
            Self::Unreachable { hash, .. } => *hash,
        }
    }

    fn hash(&self) -> Option<Hash> {
        match self {
            Self::Present { hash, .. } => Some(*hash),
            Self::Absent | Self::Unreachable { .. } => None,
        }
    }

    fn judge(self, file: KubeletFile) -> Verdict {
        match self {
            Self::Absent => Verdict::Absent,
            Self::Unreachable {
                reason, may_be_state, ..
            } => Verdict::Unreadable { reason, may_be_state },
            Self::Present { bytes, hash } => {
                let content = match file {
                    KubeletFile::Devices => Imported::read(&bytes).map(Content::Devices),
                    KubeletFile::Claims => ImportedClaims::read(&bytes).map(Content::Claims),
                };
                match content {
                    Ok(content) => Verdict::Sound(Sound { content, bytes, hash }),
                    Err(error) => Verdict::Unreadable {
                        reason: error.to_string(),
                        may_be_state: true,
                    },
                }
            }
        }
    }
}

pub(crate) fn open(options: OpenOptions) -> Result<(Store, OpenReport), OpenError> {
    let now = (options.clock)();
    let clock = Steady::from(now);
    let counters = Arc::new(Counters::default());
    let place = Place {
        path: followed(&options.database),
        storage: options.storage.clone(),
        counters,
        boot_id: options.boot_id.clone(),
    };
    let behind = link_targets(&options.database);
    if place.path != options.database {
        check_link_targets(&behind)?;
    }
    let mut traces = Traces::find(&options.database, &behind, options.node_id.as_deref(), now)?;
    let mut opening = Opening {
        now,
        in_file: BTreeMap::new(),
        failure: None,
        report: OpenReport {
            found: Found::Nothing,
            imported: None,
            imported_claims: None,
            takeover: None,
            contested: Vec::new(),
            set_aside: std::mem::take(&mut traces.set_aside),
            reboot: None,
            repaired: false,
            doubly_held: Vec::new(),
            blocked: None,
        },
        options: &options,
        place: &place,
        traces: &traces,
    };
    // Both take a while when a node holds much.
    let (files, opened) = thread::scope(|scope| {
        let read = || KubeletFile::ALL.map(|file| (file, InPlace::read(options.path_of(file))));
        let files = thread::Builder::new().spawn_scoped(scope, read);
        let opened = place.open();
        let files = files.map_or_else(|_| read(), |files| files.join().unwrap_or_else(|_| read()));
        (files, opened)
    });
    let (database, contents) = match opened {
        Ok(loaded) => match opening.contradiction(&loaded.contents) {
            _ if let Some(link) = link_that_leads_again(&loaded.contents) => {
                drop(loaded);
                let aside = opening.put_back(&link)?;
                let (store, mut report) = open(options)?;
                report.set_aside.push(aside);
                return Ok((store, report));
            }
            None => opening.with_database(loaded, files)?,
            Some(reason) => {
                drop(loaded);
                let aside = opening.keep_aside(&place.path, reason)?;
                opening.without_database(files, Some(opening.lost(&aside.kept, aside.reason)))?
            }
        },
        Err(LoadError::Absent) => {
            let lost = opening.missing();
            opening.without_database(files, lost)?
        }
        Err(LoadError::Unreadable(reason)) => {
            let aside = opening.keep_aside(&place.path, reason)?;
            let blocked = match traces.copy() {
                Some(_) => opening.lost(&aside.kept, format!("it cannot be read ({})", aside.reason)),
                None => opening.blame(&aside),
            };
            opening.without_database(files, Some(blocked))?
        }
        Err(LoadError::Unusable(StateFileError::NotRegular { kind })) => {
            let reason = match std::fs::read_link(&place.path) {
                Ok(target) => format!(
                    "it is a symbolic link to {}, where no file is; mount the disk that {} points to, and restart devlet",
                    target.display(),
                    place.path.display()
                ),
                Err(_) => StateFileError::NotRegular { kind }.to_string(),
            };
            let aside = opening.keep_aside(&place.path, reason)?;
            let lost = opening.lost(&aside.kept, aside.reason);
            opening.without_database(files, Some(lost))?
        }
        Err(LoadError::Unusable(error)) => return Err(OpenError::unusable(&place.path, &error)),
        Err(LoadError::InUse) => return Err(OpenError::InUse { path: place.path }),
        Err(LoadError::Newer { found, known }) => {
            let path = place.path;
            return Err(OpenError::NewerSchema { path, found, known });
        }
        Err(LoadError::Io(error)) => return Err(opening.disk(error.to_string())),
    };
    let (in_file, mut failure, mut report) = (opening.in_file, opening.failure, opening.report);
    // After the database has it, and before anything is answered. While the database is lost, the files show which one
    // is right.
    let is_lost = contents.around.is_blocked_by_database();
    let mut recording = Recording {
        files: traces.files,
        is_recorded: failure.is_none() || is_lost,
        failure: None,
    };
    let ours = database.identity;
    let database = failure.is_none().then_some(database);
    if let Some(id) = contents.around.node_id.as_ref().filter(|_| !is_lost) {
        let known = recording.files.newest().filter(|_| failure.is_some()).cloned();
        let progress = known.as_ref().unwrap_or(&contents.around.progress);
        match recording.files.write(id, progress) {
            Ok(not_written) => recording.failure = not_written.map(|not| not.to_string()),
            Err(not) if not.has_id => {
                recording.is_recorded = false;
                failure.get_or_insert(place.not_written(&not));
            }
            Err(not) => {
                return Err(OpenError::Disk {
                    path: not.path,
                    reason: not.error.to_string(),
                });
            }
        }
    }
    let is_imported = report.imported.is_some() || report.imported_claims.is_some();
    let Contents { pods, claims, around } = contents;
    let node = restore((pods, claims), &around, is_imported, clock.now());
    report.doubly_held = node.doubly_held();
    report.blocked = node.blocked().cloned();
    if let Some(imported) = &mut report.imported {
        imported.doubly_held.clone_from(&report.doubly_held);
    }
    let store = start(
        options,
        clock,
        place,
        ((ours, database), recording, failure),
        around,
        &in_file,
        node,
    )?;
    Ok((store, report))
}

/// The progress of the database in the id files.
struct Recording {
    files: IdFiles,
    /// Whether a file has it.
    is_recorded: bool,
    /// Why a file does not have it.
    failure: Option<String>,
}

/// The file that a symbolic link to a regular file means. A database is replaced as a whole, which must not replace the
/// link.
fn followed(path: &Path) -> PathBuf {
    let is_link = path.is_symlink() && path.is_file();
    let target = is_link.then(|| path.canonicalize().ok());
    target.flatten().unwrap_or_else(|| path.to_owned())
}

/// The names behind a symbolic link, up to a file or to one that does not exist.
fn link_targets(path: &Path) -> Vec<PathBuf> {
    let mut names = Vec::new();
    let mut name = path.to_owned();
    while names.len() < MAX_LINKS
        && let Ok(target) = std::fs::read_link(&name)
    {
        name = files::directory_of(&name).join(target);
        names.push(name.clone());
    }
    names
}

/// Checks that no other user can replace what is behind a link.
fn check_link_targets(names: &[PathBuf]) -> Result<(), OpenError> {
    for directory in names.iter().map(|name| files::directory_of(name)) {
        let metadata = std::fs::metadata(directory).map_err(StateFileError::from);
        let checked = metadata.and_then(|metadata| state_file::check_directory(&metadata, false));
        checked.map_err(|error| OpenError::unusable(directory, &error))?;
    }
    Ok(())
}

/// The link in the place of which a database was made while it led nowhere, if it leads to a file now.
fn link_that_leads_again(contents: &Contents) -> Option<PathBuf> {
    let record = contents.around.blocked.get(&BlockedBy::Database)?;
    let link = Path::new(&record.file);
    (record.is_lost && link.is_symlink() && link.is_file()).then(|| link.to_owned())
}

fn restore(
    (pods, claims): (BTreeMap<PodUid, Pod>, BTreeMap<ClaimUid, Claim>),
    around: &Surroundings,
    is_imported: bool,
    now: Moment,
) -> Node {
    let known = around.resources.iter();
    let known = known.map(|(name, record)| (name.clone(), record.last(now)));
    let mut resources: BTreeMap<ResourceName, Option<LastPlugin>> = known.collect();
    // A name of which no plugin is known, from a file that was imported in an earlier run, says nothing any longer;
    // one that was left long ago neither.
    if !is_imported && resources.values().any(Option::is_none) {
        let allocations = pods.values().flat_map(|pod| &pod.allocations);
        let held: BTreeSet<&ResourceName> = allocations.map(|each| &each.resource).collect();
        resources.retain(|name, last| last.is_some() || held.contains(name));
    }
    let mut node = Node::restore(Restored {
        pods,
        resources,
        claims: claims.into_values().collect(),
    });
    node.evict_idle(now);
    for (by, record) in &around.blocked {
        node.block(record.blocked(*by));
    }
    for contest in around.contested.values() {
        node.block(contest.blocked());
    }
    node
}

fn start(
    options: OpenOptions,
    clock: Steady,
    place: Place,
    ((ours, database), recording, failure): ((Identity, Option<Database>), Recording, Option<WriteError>),
    around: Surroundings,
    in_file: &BTreeMap<KubeletFile, InFile>,
    node: Node,
) -> Result<Store, OpenError> {
    let (latest, _) = watch::channel(node.changes());
    let (health, _) = watch::channel(None);
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            node,
            blocked: around.blocked.clone(),
            contested: around.contested.clone(),
        }),
        latest,
        health,
        mirror_failure: Mutex::new(None),
        id_failure: Mutex::new(None),
        set_aside: Mutex::default(),
        writing: Mutex::new(None),
        patience: options.write_patience,
        noted: AtomicBool::new(false),
        counters: Arc::clone(&place.counters),
    });
    shared.note_id_failure(recording.failure);
    let (sender, inbox) = mpsc::channel();
    let (caller, calls) = mpsc::channel();
    let rung = Arc::new(AtomicBool::new(false));
    let doorbell = Doorbell::new(caller, Arc::clone(&rung));
    let files = [
        (KubeletFile::Devices, options.checkpoint),
        (KubeletFile::Claims, options.claims),
    ];
    let files = files.into_iter().filter_map(|(file, path)| {
        Some(MirroredFile {
            file,
            path: path?,
            in_file: in_file.get(&file).copied().unwrap_or(InFile::Absent),
            seen: None,
            foreign: None,
        })
    });
    let writer = Writer {
        shared: Arc::clone(&shared),
        place,
        ours: Some(ours),
        database,
        around: around.clone(),
        id_files: recording.files,
        is_recorded: recording.is_recorded,
        inbox,
        doorbell: doorbell.clone(),
        clock,
        // What a start makes of the records is news, too.
        note_due: Some(Instant::now() + NOTE_PAUSE),
        active: Instant::now(),
    };
    writer.note_health(failure);
    let queue = CommitQueue::new(sender, Arc::clone(&shared));
    let mirrorer = Mirrorer {
        shared: Arc::clone(&shared),
        queue: queue.clone(),
        files: files.collect(),
        interval: options.mirror_interval,
        around,
        calls,
        rung,
    };
    let thread = |name: &str, body: Box<dyn FnOnce() + Send>| {
        let started = thread::Builder::new().name(name.into()).spawn(body);
        started.map_err(|source| OpenError::Thread { source })
    };
    let threads = Arc::new(Threads {
        writer: queue,
        mirrorer: doorbell.clone(),
    });
    thread("devlet-writer", Box::new(move || writer.run()))?;
    thread("devlet-mirror", Box::new(move || mirrorer.run()))?;
    // The file may be of an older version, or absent.
    doorbell.ring();
    Ok(Store {
        shared,
        threads,
        recording: Arc::default(),
        deciding: Arc::default(),
        clock,
    })
}

/// A start under way.
struct Opening<'a> {
    options: &'a OpenOptions,
    place: &'a Place,
    traces: &'a Traces,
    now: Moment,
    in_file: BTreeMap<KubeletFile, InFile>,
    /// What could not be written yet.
    failure: Option<WriteError>,
    report: OpenReport,
}

impl Opening<'_> {
    fn with_database(
        &mut self,
        loaded: Loaded,
        files: [(KubeletFile, InPlace); 2],
    ) -> Result<(Database, Contents), OpenError> {
        let Loaded {
            mut database,
            mut contents,
            repaired,
        } = loaded;
        self.report.found = Found::Database;
        self.report.repaired = repaired;
        let (mut rows, mut remove, mut said) = (Vec::new(), Vec::new(), Vec::new());
        let mut gone = Vec::new();
        if contents.around.node_id.is_none() {
            // It must have one before the files have it, or it would be taken for another node's.
            rows.push(Row::NodeId(self.traces.id()));
            rows.iter().for_each(|row| contents.around.follow(row));
        }
        for (file, in_place) in files {
            let mirrors = contents.around.mirrors(file);
            if let Some(hash) = in_place.hash().filter(|hash| mirrors.knows(hash)) {
                let is_certain = mirrors.confirmed(&hash).is_none();
                let in_file = if is_certain {
                    InFile::Hash(hash)
                } else {
                    InFile::Uncertain
                };
                self.in_file.insert(file, in_file);
                continue;
            }
            if in_place.hash().as_ref() == contents.around.foreign.get(&file) && in_place.hash().is_some() {
                let reason =
                    "another process wrote it while devlet ran, so it is not a kubelet's state".to_owned();
                remove.push(self.keep_file_aside(file, reason)?.original);
                gone.push(Row::Foreign(file, None));
                continue;
            }
            // A copy of our own mirror, such as one with a second name, says nothing new.
            let content = in_place.content_hash();
            let is_foreign = content.is_some() && content.as_ref() == contents.around.foreign.get(&file);
            let is_known = is_foreign || content.is_some_and(|hash| mirrors.knows(&hash));
            match in_place.judge(file) {
                Verdict::Absent => {}
                Verdict::Sound(sound) => {
                    self.stays(file)?;
                    said.push((file, sound));
                }
                Verdict::Unreadable { reason, may_be_state } => {
                    let original = if self.is_kept(&contents, file) {
                        self.path_of(file)
                    } else {
                        let aside = self.keep_file_aside(file, reason)?;
                        if may_be_state && !is_known {
                            // A kubelet may have given devices or claims meanwhile.
                            let record = self.blame(&aside);
                            let blocked = Row::Blocked(contents.around.next_blocked(file), Some(record));
                            contents.around.follow(&blocked);
                            rows.push(blocked);
                        }
                        aside.original
                    };
                    remove.push(original);
                    if is_foreign {
                        gone.push(Row::Foreign(file, None));
                    }
                }
            }
        }
        if !said.is_empty() {
            let archive = self.archive(&contents)?;
            let adopted = self.adopt(&mut contents, &said, true);
            let (news, difference) = adopted.inspect_err(|_| self.remove_copies(&archive))?;
            rows.extend(news);
            if self.report.imported.is_some() || self.report.imported_claims.is_some() {
                self.report.takeover = Some(Takeover { archive, difference });
            }
        }
        let must_be_written = !rows.is_empty();
        rows.extend(self.reboot(&mut contents));
        contents.around.progress = self.next_start(&contents.around.progress);
        rows.push(Row::Progress(contents.around.progress.clone()));
        // So the disk is tried before a plugin is called, and records that a killed process left in the page cache are
        // synced before they count.
        match database.write(&rows) {
            Err(error) if must_be_written => return Err(self.disk(reason(&error))),
            written => {
                let written = written.and_then(|()| database.make_room());
                self.failure = written.err().map(|error| self.place.failure(&error));
            }
        }
        for path in remove {
            self.remove(&path)?;
        }
        // Not before: a file that a crash leaves in its place is still the one that another process wrote.
        if self.failure.is_none() && !gone.is_empty() {
            match database.write(&gone) {
                Ok(()) => gone.iter().for_each(|row| contents.around.follow(row)),
                Err(error) => self.failure = Some(self.place.failure(&error)),
            }
        }
        Ok((database, contents))
    }

    /// `lost` is why a database that there was is not there.
    fn without_database(
        &mut self,
        files: [(KubeletFile, InPlace); 2],
        lost: Option<BlockedRecord>,
    ) -> Result<(Database, Contents), OpenError> {
        let mut contents = Contents::default();
        contents.around.boot_id = Some(self.options.boot_id.clone());
        contents.around.node_id = Some(self.traces.id());
        contents.around.progress = self.next_start(&Progress::default());
        if let Some(record) = lost {
            contents.around.blocked.insert(BlockedBy::Database, record);
        }
        let (mut remove, mut said) = (Vec::new(), Vec::new());
        for (file, in_place) in files {
            match in_place.judge(file) {
                Verdict::Absent => {}
                Verdict::Sound(sound) => {
                    self.report.found = Found::KubeletFile;
                    said.push((file, sound));
                }
                Verdict::Unreadable { reason, .. } => {
                    let aside = self.keep_file_aside(file, reason)?;
                    let blocked_by = contents.around.next_blocked(file);
                    contents.around.blocked.insert(blocked_by, self.blame(&aside));
                    remove.push(aside.original);
                }
            }
        }
        // Files may lag behind a database that is lost: what is in them counts, and no new pod is admitted until an
        // operator has decided that this is all.
        self.adopt(&mut contents, &said, false)?;
        let created = self.place.create(&contents.rows());
        let database = created.map_err(|error| self.disk(reason(&error)))?;
        for path in remove {
            self.remove(&path)?;
        }
        Ok((database, contents))
    }

    /// Puts a link back in the place of the database that was made meanwhile, which is kept.
    fn put_back(&mut self, link: &Path) -> Result<SetAside, OpenError> {
        let path = self.place.path.clone();
        let reason = format!(
            "it stood in for the database that {} points to, which is back",
            path.display()
        );
        let aside = self.keep_aside(&path, reason)?;
        let moved = std::fs::rename(link, &path).and_then(|()| files::sync_directory_of(&path));
        moved.map_err(|error| self.disk(error.to_string()))?;
        Ok(aside)
    }

    /// Why a database that is not there is lost; `None` if this is the first start.
    fn missing(&self) -> Option<BlockedRecord> {
        let trace = self.traces.any()?;
        let reason = format!(
            "there is no such file, though {} shows that devlet has run here",
            trace.display()
        );
        Some(self.lost(&self.options.database, reason))
    }

    /// Why a database is not the last one of this node.
    fn contradiction(&self, contents: &Contents) -> Option<String> {
        // One that was made in the place of a lost one is no older copy of anything, and blocked.
        if contents.around.is_blocked_by_database() {
            return None;
        }
        let id = contents.around.node_id.as_deref();
        self.traces.contradiction(id, &contents.around.progress)
    }

    /// The progress of this start, ahead of the database and the files.
    fn next_start(&self, database: &Progress) -> Progress {
        let files = self.traces.files.newest().map_or(0, |newest| newest.starts);
        Progress::of_start(files.max(database.starts).saturating_add(1))
    }

    fn lost(&self, file: &Path, reason: String) -> BlockedRecord {
        let reason = match self.traces.copy() {
            Some(copy) => format!("{reason}; {copy}"),
            None => reason,
        };
        BlockedRecord {
            file: file.display().to_string(),
            reason,
            is_database: true,
            is_lost: true,
            ..BlockedRecord::default()
        }
    }

    fn blame(&self, aside: &SetAside) -> BlockedRecord {
        BlockedRecord {
            file: aside.kept.display().to_string(),
            reason: aside.reason.clone(),
            is_database: aside.original == self.place.path,
            ..BlockedRecord::default()
        }
    }

    /// Keeps a copy of a file that disagrees with the record, and lets pods hold the devices of both sides.
    fn contest(
        &mut self,
        contents: &mut Contents,
        file: KubeletFile,
        sound: &Sound,
        disagreement: &Disagreement,
    ) -> Result<Contest, OpenError> {
        let original = self.path_of(file);
        let name = original.file_name().unwrap_or_default().to_string_lossy();
        let name = format!("{name}.contested-{}", files::timestamp(self.now));
        let path = self.place.path.with_file_name(name);
        let copy = files::write_new(&path, &sound.bytes);
        let copy = copy.map_err(|source| OpenError::Archive { path, source })?;
        let difference = contest::difference(contents, &sound.content, disagreement);
        let (pods, changed) = match &sound.content {
            Content::Devices(imported) => contest::hold_both(contents, imported),
            Content::Claims(_) => Default::default(),
        };
        let contest = Contest {
            file: copy.display().to_string(),
            hash: sound.hash,
            difference: difference.clone(),
            unanswered: contest::unanswered(contents, &changed),
            pods,
        };
        self.report.contested.push(Contested {
            original,
            copy,
            difference,
        });
        Ok(contest)
    }

    /// Takes in what kubelets' files say, and their hashes; and says what is to be written.
    fn adopt(
        &mut self,
        contents: &mut Contents,
        said: &[(KubeletFile, Sound)],
        has_record: bool,
    ) -> Result<(Vec<Row>, Difference), OpenError> {
        let (pods, claims) = (contents.pods.clone(), contents.claims.clone());
        let contested = contents.around.contested.clone();
        let mut rows = Vec::new();
        let mut adopted = Vec::new();
        for (file, sound) in said {
            let Sound { content, hash, .. } = sound;
            let mirror = contents.around.mirrors(*file).next(*hash, InFile::Hash(*hash));
            rows.push(Row::Mirror(*file, mirror));
            self.in_file.insert(*file, InFile::Hash(*hash));
            let disagreement = match has_record {
                true => contest::disagreement(contents, content),
                false => Disagreement::default(),
            };
            // Contests of this kind that an operator has not decided about. This file does not end them.
            let open = contested.iter().filter(|(id, _)| id.kind == *file);
            let is_contested = open.clone().next().is_some();
            if is_contested
                && (open.clone().any(|(_, contest)| contest.hash == *hash)
                    || contest::is_on_record(contents, content))
            {
                continue;
            }
            if is_contested || !disagreement.is_empty() {
                let contest = self.contest(contents, *file, sound, &disagreement)?;
                let id = PendingFile::next(*file, contested.keys().copied());
                contents.around.contested.insert(id, contest);
                continue;
            }
            adopted.push(content);
            match content {
                Content::Devices(imported) => {
                    adopt_devices(contents, imported);
                    let known = &contents.around.resources;
                    let resources = imported.resources.iter();
                    let new = resources.filter(|name| !known.contains_key(*name));
                    rows.extend(new.map(|name| Row::Resource(name.clone(), Some(Default::default()))));
                }
                Content::Claims(imported) => adopt_claims(contents, imported),
            }
        }
        rows.iter().for_each(|row| contents.around.follow(row));
        let contests = contents.around.contested.iter();
        let news = contests.filter(|(id, contest)| contested.get(*id) != Some(*contest));
        rows.extend(news.map(|(&id, contest)| Row::Contested(id, Some(contest.clone()))));
        let difference = Difference::between(&pods, &contents.pods);
        let uids = difference.added.iter().chain(&difference.changed);
        rows.extend(uids.filter_map(|uid| contents.pods.get(uid)).map(Row::pod));
        let removed = difference.removed.iter();
        rows.extend(removed.map(|uid| Row::Pod(uid.clone(), None)));
        let is_same = |claim: &&Claim| claims.get(&claim.uid) == Some(claim);
        let changed = contents.claims.values().filter(|claim| !is_same(claim));
        rows.extend(changed.map(Row::claim));
        let gone = claims.keys().filter(|uid| !contents.claims.contains_key(*uid));
        rows.extend(gone.map(|uid| Row::Claim(uid.clone(), None)));
        for content in adopted {
            match content {
                Content::Devices(imported) => {
                    self.report.imported = Some(imported.report(difference.clone(), Vec::new()));
                }
                Content::Claims(imported) => {
                    let mut report = imported.report(difference.clone());
                    let new = contents.claims.keys().filter(|uid| !claims.contains_key(*uid));
                    report.claims = new.cloned().collect();
                    self.report.imported_claims = Some(report);
                }
            }
        }
        Ok((rows, difference))
    }

    /// Removes the files of a start that could not write all of them: the next one writes them again.
    fn remove_copies(&self, archive: &Path) {
        let copies = self.report.contested.iter().map(|each| each.copy.as_path());
        for path in copies.chain([archive]) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Makes sure that a power loss does not bring back the file that we knew.
    fn stays(&self, file: KubeletFile) -> Result<(), OpenError> {
        let Some(path) = self.options.path_of(file) else {
            return Ok(());
        };
        files::sync_directory_of(path).map_err(|error| OpenError::Disk {
            path: path.to_owned(),
            reason: error.to_string(),
        })
    }

    /// A kubelet was in charge in between: our state from before.
    fn archive(&self, contents: &Contents) -> Result<PathBuf, OpenError> {
        let directory = self.place.path.with_file_name("archive");
        let path = directory.join(format!("{}.json", files::timestamp(self.now)));
        let archive = format!("{:#}\n", dump::contents(contents));
        files::write_new(&path, archive.as_bytes()).map_err(|source| OpenError::Archive { path, source })
    }

    /// If the machine has been rebooted: what is to be written about it.
    fn reboot(&mut self, contents: &mut Contents) -> Vec<Row> {
        let now = &self.options.boot_id;
        let before = contents.around.boot_id.replace(now.clone());
        let Some(previous) = before.filter(|before| before != now) else {
            return Vec::new();
        };
        let release = |source| self.options.on_reboot == OnReboot::Release && source == Source::Api;
        let mut reboot = Reboot {
            previous,
            kept: Vec::new(),
            released: Vec::new(),
        };
        let mut rows = vec![Row::BootId(now.clone())];
        let mut left = BTreeMap::new();
        contents.pods.retain(|uid, pod| {
            let released = release(pod.source);
            if released {
                reboot.released.push(uid.clone());
                let who = (uid.clone(), pod.name.clone());
                left.extend(pod.claim_uids().into_iter().map(|claim| (claim, who.clone())));
                rows.push(Row::Pod(uid.clone(), None));
            } else {
                reboot.kept.push(uid.clone());
                pod.before_reboot = true;
                rows.push(Row::pod(pod));
            }
            !released
        });
        for pod in contents.pods.values() {
            pod.claim_uids().iter().for_each(|claim| drop(left.remove(claim)));
        }
        for (uid, claim) in &mut contents.claims {
            let last = left.remove(uid).filter(|(pod, _)| claim.pod != *pod);
            let is_left = last.is_some();
            if let Some((pod, name)) = last {
                claim.pod = pod;
                claim.pod_name = name;
            }
            if claim.rebooted() || is_left {
                rows.push(Row::claim(claim));
            }
        }
        self.report.reboot = Some(reboot);
        rows
    }

    fn keep_file_aside(&mut self, file: KubeletFile, reason: String) -> Result<SetAside, OpenError> {
        self.keep_aside(&self.path_of(file), reason)
    }

    fn path_of(&self, file: KubeletFile) -> PathBuf {
        self.options.path_of(file).unwrap_or(&self.place.path).to_owned()
    }

    /// Returns `true` if a file has been set aside and recorded already: a crash followed before it was removed.
    fn is_kept(&self, contents: &Contents, file: KubeletFile) -> bool {
        let found = Identity::at(&self.path_of(file));
        let mut records = contents.around.blocked.values();
        found.is_some() && records.any(|record| Identity::at(Path::new(&record.file)) == found)
    }

    fn keep_aside(&mut self, path: &Path, reason: String) -> Result<SetAside, OpenError> {
        let kept = files::keep_aside(path, self.now).map_err(|source| OpenError::SetAside {
            path: path.to_owned(),
            reason: reason.clone(),
            source,
        })?;
        let set_aside = SetAside {
            original: path.to_owned(),
            kept,
            reason,
        };
        self.report.set_aside.push(set_aside.clone());
        Ok(set_aside)
    }

    fn remove(&self, path: &Path) -> Result<(), OpenError> {
        files::remove(path).map_err(|error| OpenError::Disk {
            path: path.to_owned(),
            reason: error.to_string(),
        })
    }

    fn disk(&self, reason: String) -> OpenError {
        OpenError::Disk {
            path: self.place.path.clone(),
            reason,
        }
    }
}

/// A kubelet's file about devices is right about them: a pod that it does not have has none.
fn adopt_devices(contents: &mut Contents, imported: &Imported) {
    let (pods, _) = imported.against(|uid| contents.pods.get(uid));
    contents
        .pods
        .extend(pods.into_iter().map(|pod| (pod.uid.clone(), pod)));
    contents.pods.retain(|uid, pod| {
        if !imported.pods.contains_key(uid) {
            pod.allocations.clear();
        }
        imported.pods.contains_key(uid) || !pod.claims.is_empty()
    });
}

/// Adds a kubelet's file about claims to the record. A claim that the file lacks is not held by a pod on record, so it is
/// being prepared or unprepared: it stays, and its drivers unprepare it, once more if a kubelet did that already.
fn adopt_claims(contents: &mut Contents, imported: &ImportedClaims) {
    let mut claims = imported.claims.clone();
    for (uid, known) in std::mem::take(&mut contents.claims) {
        match claims.entry(uid) {
            Entry::Occupied(mut claim) => claim.get_mut().remember(&known),
            Entry::Vacant(vacant) => _ = vacant.insert(known),
        }
    }
    contents.claims = claims;
    let known = std::mem::take(&mut contents.pods);
    let kept = known.into_values().filter_map(|pod| imported.pod(&pod));
    contents.pods = kept.map(|pod| (pod.uid.clone(), pod)).collect();
    for uid in imported.pods.keys() {
        let pod = || imported.new_pod(uid);
        contents.pods.entry(uid.clone()).or_insert_with(pod);
    }
}
