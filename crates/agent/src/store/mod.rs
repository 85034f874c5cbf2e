//! The one lock around the node, and everything of it that must survive.
//!
//! ```text
//!   workflows, reconcilers
//!      │ read, update, hold         │ commit, release, import, forget
//!      ▼                            ▼
//!   ┌───────────────┐ 2nd phase ┌────────┐  one transaction   ┌──────────┐
//!   │ Node (a lock) │ ◄──────── │ writer │ ─────────────────► │ database │
//!   └───────────────┘           └────────┘  of all that waits └──────────┘
//!                                   ▲ hash first                   │ snapshot
//!                               ┌──────────┐  from time to time    │
//!                               │ mirrorer │ ◄─────────────────────┘
//!                               └──────────┘ ──► kubelet_internal_checkpoint, dra_manager_state
//! ```
//!
//! - Closures that run under the lock cannot await.
//! - Memory follows the disk: a change is true when it has been synced, and then it is answered. If that fails it
//!   never was, and the caller gets the error.
//! - A queued change is carried out, even if its caller goes away (`commit_queue.rs`).
//! - A kubelet's file that we did not write is somebody else's word, and read at start (`open.rs`).
//!
//! Deliberately absent: the lock on the root directory (the caller's), and retries (the caller is told).

mod answer;
mod backend;
mod claim_record;
mod claims_file;
mod commit_queue;
mod contest;
mod database;
mod dump;
pub(crate) mod files;
mod import;
mod mirror;
mod node_id;
mod open;
mod record;
pub(crate) mod state_file;
mod wal;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devlet_core::device_plugin::ledger::Reservation;
use devlet_core::device_plugin::run_options::Answer;
use devlet_core::dra::claims::{Claim, ClaimKey, NotForgotten};
use devlet_core::dra::view::ClaimView;
use devlet_core::{
    Blocked, ClaimUid, Importing, Moment, Node, Pod, PodRequest, PodUid, Preferences,
    ReleaseError as ReleaseRefused, ReservationId, ReserveError,
};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

pub use crate::metrics::statistics::{BATCH_BOUNDS, DURATION_BOUNDS, Histogram, Statistics};
pub use answer::answer;
pub use backend::Storage;
pub(crate) use import::is_unknown_pod;
pub use import::{Difference, ImportReport, Undecodable, UnreadableFile};
pub use mirror::MirrorError;
pub(crate) use open::system_time;
pub use open::{Contested, Found, OnReboot, OpenError, OpenOptions, OpenReport, Reboot, SetAside, Takeover};
pub use writer::WriteError;

use crate::metrics::statistics::Counters;
use claims_file::ImportedClaims;
pub(crate) use commit_queue::in_time;
use commit_queue::{CommitQueue, PendingCommit, flatten_recv};
use contest::Contest;
use database::{BlockedBy, Hash, KubeletFile, PendingFile, Row};
use import::Imported;
use mirror::{Call, Doorbell};
use record::{BlockedRecord, ResourceRecord};
use writer::{Phase, Unplaced};

/// Tells the time; asked when a store is opened.
pub type Clock = Arc<dyn Fn() -> Moment + Send + Sync>;

/// Why nothing is set aside for a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// It cannot have what it asks for.
    #[error(transparent)]
    Refused(#[from] ReserveError),
    /// It could not be written. It heals by itself.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why an allocation is not on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The reservation has ended, or the answers do not fit it.
    #[error(transparent)]
    Ended(#[from] devlet_core::CommitError),
    /// It could not be written; all is as it was before the reservation.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why a pod still holds what it holds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// There is no such pod, or it is busy.
    #[error(transparent)]
    Refused(#[from] ReleaseRefused),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the record of a claim is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetClaimError {
    /// It is more than an operator may forget.
    #[error(transparent)]
    Refused(#[from] NotForgotten),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why a file was not imported. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// Not a sound file.
    #[error(transparent)]
    Unreadable(#[from] UnreadableFile),
    /// It has no pods, so it says nothing about the state that could not be read.
    #[error(
        "it holds nothing, so it does not say who held what in {file}; if that really was nothing: devlet forget \
         {file}"
    )]
    Empty {
        /// Where the state that could not be read is.
        file: String,
    },
    /// A pod of the file, or one that holds a claim of it, is being admitted, removed or imported.
    #[error("another operation for pod {pod} is in flight; import again when it has ended")]
    InFlight {
        /// That pod.
        pod: PodUid,
    },
    /// Another file with the claim is being imported.
    #[error("ResourceClaim {claim} is being imported from another file; import again when that has ended")]
    ClaimInFlight {
        /// The claim.
        claim: ClaimKey,
    },
    /// The file has devices for a claim on record that the record does not have.
    #[error(
        "ResourceClaim {claim} has other devices in the file than on record; first remove its pods ({}), which has its \
         drivers unprepare it, and import again",
        join(.pods)
    )]
    OtherDevices {
        /// The claim.
        claim: ClaimKey,
        /// The pods that hold it.
        pods: Vec<PodUid>,
    },
    /// Another command has ended the contest about the file first.
    #[error("another command has decided about {file} meanwhile; devlet status shows what is left to decide")]
    Settled {
        /// The contested file.
        file: String,
    },
    /// Another file of the same kind is contested, too.
    #[error(
        "{file} disagrees with devlet's record, too, and only one of the files can be adopted; first forget the other \
         one: devlet forget {file}"
    )]
    OtherContested {
        /// That file.
        file: String,
    },
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

fn join(pods: &[PodUid]) -> String {
    let pods: Vec<&str> = pods.iter().map(PodUid::as_str).collect();
    pods.join(", ")
}

/// Why a reason to admit no pod stays. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetFileError {
    /// There is no such reason any longer.
    #[error("another command has decided about {file} meanwhile; devlet status shows what is left to decide")]
    Settled {
        /// The file of the reason.
        file: String,
    },
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the database cannot be shown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// It is not open.
    #[error(transparent)]
    Closed(#[from] WriteError),
    /// It does not decode.
    #[error("the database cannot be read: {reason}")]
    Unreadable {
        /// Why not.
        reason: String,
    },
}

/// Why a store did not end well.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// The kubelet's file is not up to date: a kubelet must not take over. What was answered is on disk.
    #[error("the kubelet's file is out of date")]
    Mirror(#[from] MirrorError),
    /// The database is not in its place.
    #[error("{problem}; what was answered is in {}: move it there, too, before the next start", saved.display())]
    Unplaced {
        /// Why not.
        problem: WriteError,
        /// Where it is.
        saved: PathBuf,
    },
    /// There is no database.
    #[error(
        "{problem}; the next start has the pods of the kubelet's files, and admits no new pod until an operator decides"
    )]
    Lost {
        /// Why not.
        problem: WriteError,
    },
    /// The disk does not answer.
    #[error(
        "the disk has not answered for {} s: answered changes are on disk, but the kubelet's files may be out of date, \
         so a kubelet must not take over; look at the disk and the kernel's log",
        .waited.as_secs()
    )]
    Hangs {
        /// How long the stop waited.
        waited: Duration,
    },
    /// It has been stopped before.
    #[error("the store has been stopped")]
    Stopped,
}

/// Reasons why no pod is admitted that an import or an operator has ended.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    reasons: Vec<Blocked>,
    /// What is left of them: a lost database is settled by files of both kinds.
    left: Vec<(BlockedBy, BlockedRecord)>,
    /// Contests that stay open, as they are from now on.
    contested: BTreeMap<PendingFile, Contest>,
    /// Released when the change has ended.
    turn: Option<Turn>,
}

/// While pods are not admitted, one import or forget at a time decides.
type Turn = tokio::sync::OwnedMutexGuard<()>;

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    node: Node,
    /// Why no pod is admitted, as it is on record.
    blocked: BTreeMap<BlockedBy, BlockedRecord>,
    /// Files that an operator has to decide about, as they are on record.
    contested: BTreeMap<PendingFile, Contest>,
}

impl State {
    /// The reasons that an import of this file is an answer to, and what is to be written of that.
    ///
    /// An import is the answer about one unreadable file: if there are several of its kind, it is not known which one it
    /// replaces, so an operator has to forget them. A contested file that is adopted is the answer about itself alone.
    fn settled_by(
        &self,
        file: KubeletFile,
        is_empty: bool,
        is_incomplete: bool,
        is_adopted: bool,
    ) -> Result<(Settled, Vec<Row>), ImportError> {
        let (mut settled, mut rows) = (Settled::default(), Vec::new());
        // Which devices the lost parts held is not known: an operator has to decide.
        if is_incomplete {
            return Ok((settled, rows));
        }
        let unreadable = self.blocked.keys().filter(|by| by.kind() == Some(file));
        let is_answer = unreadable.count() == 1 && !is_adopted;
        for (&by, record) in &self.blocked {
            let after = match by {
                BlockedBy::Database => record.after_import(file),
                BlockedBy::File(_) if by.kind() == Some(file) && is_answer => None,
                BlockedBy::File(_) => continue,
            };
            if after.as_ref() == Some(record) {
                continue;
            }
            if is_empty {
                let file = record.file.clone();
                return Err(ImportError::Empty { file });
            }
            settled.reasons.push(record.blocked(by));
            settled.left.extend(after.clone().map(|record| (by, record)));
            rows.push(Row::Blocked(by, after));
        }
        Ok((settled, rows))
    }

    /// The contest about a file with this content.
    fn contest_about(&self, file: KubeletFile, hash: &Hash) -> Option<PendingFile> {
        let mut contests = self.contested.iter();
        let contest = contests.find(|(id, contest)| id.kind == file && contest.hash == *hash);
        contest.map(|(&id, _)| id)
    }

    /// The contest that this import decides, if its operator chose one of the files: no other one of its kind is open.
    fn adopts(&self, file: KubeletFile, hash: &Hash) -> Result<Option<(PendingFile, &Contest)>, ImportError> {
        let Some(id) = self.contest_about(file, hash) else {
            return Ok(None);
        };
        let mut others = self.contested.iter();
        match others.find(|(other, _)| other.kind == file && **other != id) {
            Some((_, other)) => {
                let file = other.file.clone();
                Err(ImportError::OtherContested { file })
            }
            None => Ok(self.contested.get(&id).map(|contest| (id, contest))),
        }
    }

    /// Begins to release pods that an adopted file does not have; none of them may be in flight. Returns what is to be
    /// written.
    fn begin_removal(&mut self, pods: &[PodUid]) -> Vec<Row> {
        let mut rows = Vec::new();
        for pod in pods {
            let claims = self.node.begin_release(pod);
            rows.extend(claims.iter().flatten().map(Row::claim));
            rows.push(Row::Pod(pod.clone(), None));
        }
        rows
    }

    /// Begins to end the reason why no pod is admitted that is about a file. `None` if there is no such reason.
    fn begin_forget(&mut self, file: &str, turn: Option<Turn>) -> Option<(Vec<Row>, Phase)> {
        let contest = self.contested.iter().find(|(_, contest)| contest.file == file);
        let Some((&id, contest)) = contest else {
            let (&by, record) = self.blocked.iter().find(|(_, record)| record.file == file)?;
            let rows = vec![Row::Blocked(by, None)];
            let phase = Phase::Forget {
                settled: Box::new(Settled {
                    reasons: vec![record.blocked(by)],
                    turn,
                    ..Settled::default()
                }),
                pods: Vec::new(),
                removed: Vec::new(),
            };
            return Some((rows, phase));
        };
        // Pods keep what is on record, and what other files in question give them. One that was removed meanwhile, or is
        // being removed, stays so.
        let others = || self.contested.iter().filter(|(other, _)| **other != id);
        let is_idle = |uid: &PodUid| !self.node.is_in_flight(uid);
        let (mut pods, mut removed) = (Vec::new(), Vec::new());
        for (uid, sides) in contest.pods.iter().filter(|(uid, _)| is_idle(uid)) {
            let Some(pod) = self.node.pod(uid) else {
                continue;
            };
            let others = others().map(|(_, contest)| contest);
            let allocations = contest::held(others, uid, &sides.on_record);
            if allocations.is_empty() && pod.claims.is_empty() {
                removed.push(uid.clone());
            } else if allocations != pod.allocations {
                pods.push(Pod {
                    allocations,
                    ..pod.clone()
                });
            }
        }
        let reasons = vec![contest.blocked()];
        let mut rows = vec![Row::Contested(id, None)];
        rows.extend(pods.iter().map(Row::pod));
        rows.extend(self.begin_removal(&removed));
        let phase = Phase::Forget {
            settled: Box::new(Settled {
                reasons,
                turn,
                ..Settled::default()
            }),
            pods,
            removed,
        };
        Some((rows, phase))
    }

    /// A reason why no pod is admitted has ended, and that is on disk.
    pub(crate) fn settle(&mut self, settled: Settled) {
        let Settled {
            reasons,
            left,
            contested,
            turn: _turn,
        } = settled;
        self.node.unblock(|reason| reasons.contains(reason));
        self.blocked
            .retain(|by, record| !reasons.contains(&record.blocked(*by)));
        self.contested
            .retain(|_, contest| !reasons.contains(&contest.blocked()));
        self.contested.extend(contested);
        for (by, record) in left {
            let blocked = record.blocked(by);
            // Another import may have ended meanwhile.
            if let Some(before) = self.blocked.insert(by, record) {
                let before = before.blocked(by);
                self.node.unblock(|reason| *reason == before);
            }
            self.node.block(blocked);
        }
    }

    fn check_idle(&self, pods: &BTreeSet<PodUid>) -> Result<(), ImportError> {
        match pods.iter().find(|pod| self.node.is_in_flight(pod)) {
            Some(pod) => Err(ImportError::InFlight { pod: pod.clone() }),
            None => Ok(()),
        }
    }

    /// Whether a claim is being unprepared: no pod can hold it before all of it is. Drivers may have been asked.
    fn is_leaving(&self, uid: &ClaimUid) -> bool {
        self.node.claim(uid).is_some_and(|view| view.pods.is_empty())
    }

    /// A claim that pods use must not be left by all of them before those of the file hold it: at least one of them is
    /// neither being admitted nor removed.
    fn check_stays(&self, known: &ClaimView<'_>) -> Result<(), ImportError> {
        let is_in_flight = |pod: &PodUid| self.node.is_in_flight(pod);
        match known.pods.first() {
            Some(pod) if known.pods.iter().all(is_in_flight) => {
                Err(ImportError::InFlight { pod: pod.clone() })
            }
            _ => Ok(()),
        }
    }

    /// From here on nobody else writes the pods of a file.
    fn begin_import(
        &mut self,
        imported: &Imported,
        hash: &Hash,
    ) -> Result<(Vec<Row>, Phase, Difference), ImportError> {
        let adopted = self.adopts(KubeletFile::Devices, hash)?;
        let is_empty = imported.pods.is_empty() && adopted.is_none();
        let (mut settled, mut unblocked) = self.settled_by(
            KubeletFile::Devices,
            is_empty,
            imported.is_incomplete,
            adopted.is_some(),
        )?;
        let mut importing = Importing {
            pods: imported.pods.keys().cloned().collect(),
            claims: BTreeMap::new(),
        };
        let (mut pods, mut difference) = imported.against(|uid| self.node.pod(uid));
        if let Some((id, contest)) = adopted {
            // The file is right about devices: a pod that it does not have has none.
            let lost = self
                .node
                .pods()
                .filter(|pod| !imported.pods.contains_key(&pod.uid));
            for pod in lost.filter(|pod| !pod.allocations.is_empty()) {
                if pod.claims.is_empty() {
                    difference.removed.push(pod.uid.clone());
                } else {
                    difference.changed.push(pod.uid.clone());
                    importing.pods.insert(pod.uid.clone());
                    let allocations = Vec::new();
                    pods.push(Pod {
                        allocations,
                        ..pod.clone()
                    });
                }
            }
            // Pods that only the file has hold its devices until now, too.
            let has_claims = |uid| self.node.pod(uid).is_some_and(|pod| !pod.claims.is_empty());
            let new = contest.pods.iter();
            let new = new.filter(|(uid, sides)| sides.on_record.is_empty() && !has_claims(uid));
            let new: BTreeSet<PodUid> = new.map(|(uid, _)| uid.clone()).collect();
            difference.changed.retain(|uid| !new.contains(uid));
            // A pod that was removed meanwhile is new already.
            difference.added.retain(|uid| !new.contains(uid));
            difference.added.extend(new);
            settled.reasons.push(contest.blocked());
            unblocked.push(Row::Contested(id, None));
        } else {
            settled.contested = self.with_contested(imported, &mut pods);
            let changed: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
            difference.changed.retain(|uid| changed.contains(uid));
            let contests = settled.contested.iter();
            unblocked.extend(contests.map(|(&id, contest)| Row::Contested(id, Some(contest.clone()))));
        }
        self.check_idle(&importing.pods)?;
        self.check_idle(&difference.removed.iter().cloned().collect())?;
        unblocked.extend(self.begin_removal(&difference.removed));
        let mut rows: Vec<Row> = pods.iter().map(Row::pod).collect();
        let known = self.node.known_resources();
        let new = imported
            .resources
            .iter()
            .filter(|name| !known.contains_key(*name));
        rows.extend(new.map(|name| Row::Resource(name.clone(), Some(ResourceRecord::default()))));
        rows.extend(unblocked);
        self.node.begin_import(&importing);
        let resources = imported.resources.clone();
        let phase = Phase::Import {
            pods,
            removed: difference.removed.clone(),
            importing,
            resources,
            claims: Vec::new(),
            settled: Box::new(settled),
        };
        Ok((rows, phase, difference))
    }

    /// Lets the pods of an import hold what contested files give them besides. Returns the contests about these pods, which
    /// from now on have on record what was imported.
    fn with_contested(&self, imported: &Imported, pods: &mut Vec<Pod>) -> BTreeMap<PendingFile, Contest> {
        let mut contested = self.contested.clone();
        if contested.is_empty() {
            return contested;
        }
        // Those that are as on record already count as imported, too.
        let known = imported.pods.keys().filter_map(|uid| self.node.pod(uid));
        let mut all: BTreeMap<PodUid, Pod> = known.map(|pod| (pod.uid.clone(), pod.clone())).collect();
        all.extend(pods.drain(..).map(|pod| (pod.uid.clone(), pod)));
        for (uid, pod) in &mut all {
            contest::note_on_record(contested.values_mut(), uid, &pod.allocations);
            pod.allocations = contest::held(contested.values(), uid, &pod.allocations);
        }
        let changed = all
            .into_values()
            .filter(|pod| self.node.pod(&pod.uid) != Some(pod));
        pods.extend(changed);
        contested.retain(|id, contest| self.contested.get(id) != Some(contest));
        contested
    }

    /// The same for a file about claims. What is known of a claim stays, and so do the claims that a pod holds besides.
    fn begin_claims_import(
        &mut self,
        imported: &ImportedClaims,
        hash: &Hash,
    ) -> Result<(Vec<Row>, Phase, ImportReport), ImportError> {
        let mut imported = imported.clone();
        let adopted = self.adopts(KubeletFile::Claims, hash)?;
        let adopted = adopted.map(|(id, contest)| (id, contest.blocked()));
        let is_empty = imported.claims.is_empty() && adopted.is_none();
        let (mut settled, mut unblocked) = self.settled_by(
            KubeletFile::Claims,
            is_empty,
            imported.is_incomplete,
            adopted.is_some(),
        )?;
        let is_taken = |claim: &Claim| {
            let named = self.node.claim_named(&claim.key);
            named.is_some_and(|other| other.claim.uid != claim.uid && !other.pods.is_empty())
                || self.is_leaving(&claim.uid)
        };
        let taken = imported.claims.values().filter(|claim| is_taken(claim));
        let left_out: Vec<Claim> = taken.cloned().collect();
        for claim in &left_out {
            imported.leave_out(&claim.uid);
        }
        let mut importing = Importing {
            pods: imported.pods.keys().cloned().collect(),
            claims: BTreeMap::new(),
        };
        self.check_idle(&importing.pods)?;
        let (mut claims, mut rows) = (Vec::new(), Vec::new());
        for (uid, claim) in &imported.claims {
            if self.node.is_importing(uid, &claim.key) {
                let claim = claim.key.clone();
                return Err(ImportError::ClaimInFlight { claim });
            }
            if let Some(known) = self.node.claim(uid) {
                if claim.has_more_than(known.claim) {
                    let (claim, pods) = (claim.key.clone(), known.pods.clone());
                    return Err(ImportError::OtherDevices { claim, pods });
                }
                self.check_stays(&known)?;
                continue;
            }
            importing.claims.insert(uid.clone(), claim.key.clone());
            rows.push(Row::claim(claim));
            claims.push(claim.clone());
        }
        let (mut pods, mut difference) = (Vec::new(), Difference::default());
        if adopted.is_some() {
            // The file is right about claims: a pod that it does not have holds none.
            let lost = self
                .node
                .pods()
                .filter(|pod| !imported.pods.contains_key(&pod.uid));
            for pod in lost.filter(|pod| !pod.claims.is_empty()) {
                match imported.pod(pod) {
                    Some(_) => _ = importing.pods.insert(pod.uid.clone()),
                    None => difference.removed.push(pod.uid.clone()),
                }
            }
            self.check_idle(&importing.pods)?;
            self.check_idle(&difference.removed.iter().cloned().collect())?;
        }
        for uid in &importing.pods {
            match self.node.pod(uid) {
                None => {
                    difference.added.push(uid.clone());
                    pods.push(imported.new_pod(uid));
                }
                Some(pod) => {
                    let more = match &adopted {
                        Some(_) => imported.pod(pod).unwrap_or_else(|| pod.clone()),
                        None => imported.pod_with_more(pod),
                    };
                    if more != *pod {
                        difference.changed.push(uid.clone());
                        pods.push(more);
                    }
                }
            }
        }
        if let Some((id, blocked)) = adopted {
            settled.reasons.push(blocked);
            unblocked.push(Row::Contested(id, None));
            unblocked.extend(self.begin_removal(&difference.removed));
        }
        rows.extend(pods.iter().map(Row::pod));
        rows.extend(unblocked);
        self.node.begin_import(&importing);
        let removed = difference.removed.clone();
        let mut report = imported.report(difference);
        report.claims = claims.iter().map(|claim| claim.uid.clone()).collect();
        report.left_out = left_out.into_iter().map(|claim| claim.key).collect();
        let phase = Phase::Import {
            pods,
            removed,
            importing,
            resources: BTreeSet::new(),
            claims,
            settled: Box::new(settled),
        };
        Ok((rows, phase, report))
    }
}

/// What the store's threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    latest: watch::Sender<u64>,
    health: watch::Sender<Option<WriteError>>,
    /// Why the kubelet's file is out of date.
    mirror_failure: Mutex<Option<String>>,
    /// Why an id file does not have the progress of the database.
    id_failure: Mutex<Option<String>>,
    /// What was in the place of a kubelet's file while the store was open.
    set_aside: Mutex<Vec<SetAside>>,
    /// Since when somebody has been writing.
    writing: Mutex<Option<Instant>>,
    /// How long that may last.
    patience: Duration,
    /// Whether the writer has been told that what is known of resources has changed.
    noted: AtomicBool,
    counters: Arc<Counters>,
}

impl Shared {
    fn note_id_failure(&self, failure: Option<String>) {
        let mut known = self.id_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = failure.as_ref().filter(|_| known.is_none()) {
            tracing::warn!(error, "id file not written, trying again");
        }
        *known = failure;
    }

    fn has_id_failure(&self) -> bool {
        let failure = self.id_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Transitions check before they change, so a panic in a closure leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        question(&self.lock().node)
    }

    fn change<T>(&self, transition: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let before = state.node.changes();
        let answer = transition(&mut state);
        let after = state.node.changes();
        // Whoever is woken wants the lock. Who comes later with an earlier change has nothing new to say.
        drop(state);
        if after != before {
            self.latest.send_if_modified(|latest| {
                let is_news = *latest < after;
                *latest = after.max(*latest);
                is_news
            });
        }
        answer
    }

    fn update<T>(&self, transition: impl FnOnce(&mut Node) -> T) -> T {
        self.change(|state| transition(&mut state.node))
    }

    fn writes_since(&self, began: Option<Instant>) {
        *self.writing.lock().unwrap_or_else(PoisonError::into_inner) = began;
    }

    /// A disk that does not answer.
    fn hangs(&self) -> Option<WriteError> {
        let writing = *self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = writing?.elapsed();
        (waited >= self.patience).then_some(WriteError::Hangs { waited })
    }
}

/// The node's state. Cheap to clone; all clones are the same store.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
    threads: Arc<Threads>,
    /// What nobody waits for is written by one at a time: who comes next knows that it is on disk.
    recording: Arc<tokio::sync::Mutex<()>>,
    /// Imports and forgets while pods are not admitted; see [`Turn`].
    deciding: Arc<tokio::sync::Mutex<()>>,
    clock: Steady,
}

/// Time that goes on evenly, however the machine's clock is set: as long as we run, nothing lasts longer or shorter
/// because of that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steady {
    start: Moment,
    started: Instant,
}

impl Steady {
    pub(crate) fn from(start: Moment) -> Self {
        let started = Instant::now();
        Self { start, started }
    }

    pub(crate) fn now(self) -> Moment {
        let since = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Moment(self.start.0.saturating_add(since))
    }
}

/// The ways to the store's threads. They end with the last of those who could ask them for anything.
#[derive(Debug)]
pub(crate) struct Threads {
    writer: CommitQueue,
    mirrorer: Doorbell,
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.mirrorer.quit();
        drop(self.writer.stop());
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the state of a node, or makes it; see [`OpenOptions`].
    pub fn open(options: OpenOptions) -> Result<(Self, OpenReport), OpenError> {
        open::open(options)
    }

    /// Answers a question about the state.
    pub fn read<T>(&self, question: impl FnOnce(&Node) -> T) -> T {
        self.shared.read(question)
    }

    /// Applies facts: what the world says. What must be durable has its own ways, except for the plugins that were
    /// seen: nobody waits for that, and it is on disk soon, with a change that comes along or by itself.
    pub fn update<T>(&self, transition: impl FnOnce(&mut Node) -> T) -> T {
        let (answer, is_news) = self.shared.update(|node| {
            let before = node.resource_changes();
            let answer = transition(node);
            (answer, node.resource_changes() != before)
        });
        if is_news {
            self.threads.writer.note();
        }
        self.threads.mirrorer.ring();
        answer
    }

    /// Follows [`Node::changes`].
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.shared.latest.subscribe()
    }

    /// The time: the clock's when the store was opened, and how long that was ago. A clock that is set in between
    /// changes nothing.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Whether changes can be written; the reason if the last one could not, or has not been for long. It heals by itself.
    pub fn health(&self) -> Result<(), WriteError> {
        let failure = self.shared.health.borrow().clone();
        failure.or_else(|| self.shared.hangs()).map_or(Ok(()), Err)
    }

    /// Why the kubelet's file is out of date, if it cannot be written. Nobody is refused because of that, but a
    /// kubelet must not take over.
    pub fn mirror_failure(&self) -> Option<String> {
        let failure = self.shared.mirror_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why an id file is out of date. Pods are admitted as long as the other one is not.
    pub fn id_failure(&self) -> Option<String> {
        let failure = self.shared.id_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What was found in the place of a kubelet's file and set aside since the store was opened.
    pub fn set_aside(&self) -> Vec<SetAside> {
        let set_aside = self.shared.set_aside.lock();
        set_aside.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What has been counted since the store was opened.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.snapshot()
    }

    /// Sets aside every device that the pod needs, or nothing. `None`: it has all of them, on disk.
    ///
    /// While the disk is known to refuse, nothing is set aside: no plugin is called for what cannot be written.
    pub fn hold(&self, request: &PodRequest, advice: &Preferences) -> Result<Option<Held>, HoldError> {
        let reserved = self.shared.change(|state| {
            let Some(id) = state.node.reserve(request, advice)? else {
                return Ok(None);
            };
            if let Err(error) = self.health() {
                let has_everything = state.node.has_everything(id);
                state.node.abort(id);
                // Who holds everything is not refused because something about it cannot be noted.
                return if has_everything {
                    Ok(None)
                } else {
                    Err(HoldError::Write(error))
                };
            }
            Ok(state.node.reservation(id).cloned().map(|each| (id, each)))
        })?;
        Ok(reserved.map(|(id, reservation)| Held {
            store: self.clone(),
            id,
            reservation,
        }))
    }

    /// Takes everything from a pod. Done when that is on disk.
    ///
    /// Nothing has happened if the future is dropped before it was first polled; from then on it is carried out.
    pub async fn release(&self, pod: &PodUid) -> Result<(), ReleaseError> {
        self.release_if(pod, |_| true).await
    }

    /// The same if, at the moment of decision, `still` says so; otherwise the pod counts as unknown.
    pub async fn release_if(
        &self,
        pod: &PodUid,
        still: impl FnOnce(&Node) -> bool,
    ) -> Result<(), ReleaseError> {
        let written = self.begin(|state| {
            if !still(&state.node) {
                return Err(ReleaseRefused::Unknown);
            }
            let claims = state.node.begin_release(pod)?;
            let mut rows = vec![Row::Pod(pod.clone(), None)];
            rows.extend(claims.iter().map(Row::claim));
            Ok(Some((rows, Phase::Release(pod.clone()))))
        })?;
        Ok(done(written).await?)
    }

    /// Writes what drivers have done without anybody waiting for it, and what an operator gave up on. Whether there was
    /// anything to write.
    pub async fn record_claims(&self) -> Result<bool, WriteError> {
        // In a task of its own: it keeps its turn until the write has ended, even if the caller leaves.
        let store = self.clone();
        let recording = tokio::spawn(async move { store.record_claims_in_turn().await });
        let deadline = tokio::time::Instant::now() + self.shared.patience;
        in_time(deadline, async {
            recording.await.unwrap_or(Err(WriteError::Stopped))
        })
        .await
    }

    async fn record_claims_in_turn(&self) -> Result<bool, WriteError> {
        let _turn = self.recording.lock().await;
        let written = self.begin(|state| {
            let change = state.node.begin_record().map(|record| {
                let mut rows: Vec<Row> = record.put.iter().map(Row::claim).collect();
                rows.extend(record.delete.into_iter().map(|uid| Row::Claim(uid, None)));
                (rows, Phase::Record(record.id))
            });
            Ok::<_, WriteError>(change)
        })?;
        match written {
            Some(written) => written.ended().await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Deletes what is left of a claim that was abandoned. Done when that is on disk.
    pub async fn forget_claim(&self, claim: &ClaimUid) -> Result<(), ForgetClaimError> {
        let written = self.begin(|state| {
            let record = state.node.begin_forget(claim)?;
            let rows = record.delete.into_iter().map(|uid| Row::Claim(uid, None));
            Ok::<_, NotForgotten>(Some((rows.collect(), Phase::Record(record.id))))
        })?;
        Ok(done(written).await?)
    }

    /// Takes in a kubelet's file of any version: its pods are added or, if they are known, hold what it says. Pods that it
    /// does not have stay. A file about claims adds claims, and that pods hold them. Afterwards pods are admitted again, if
    /// the file is an answer to why they were not.
    pub async fn import(&self, file: &[u8]) -> Result<ImportReport, ImportError> {
        let content = import::read(file)?;
        let hash: Hash = Sha256::digest(file).into();
        let kind = match content {
            import::Content::Devices(_) => KubeletFile::Devices,
            import::Content::Claims(_) => KubeletFile::Claims,
        };
        let contest = |state: &State| {
            let id = state.contest_about(kind, &hash)?;
            state.contested.get(&id).map(|contest| contest.file.clone())
        };
        let chosen = contest(&self.shared.lock());
        let turn = self.turn().await?;
        let (written, mut report) = {
            let mut report = None;
            let written = self.begin(|state| {
                if let Some(file) = chosen.filter(|_| contest(state).is_none()) {
                    return Err(ImportError::Settled { file });
                }
                let (rows, mut phase) = match &content {
                    import::Content::Devices(imported) => {
                        let (rows, phase, difference) = state.begin_import(imported, &hash)?;
                        report = Some(imported.report(difference, Vec::new()));
                        (rows, phase)
                    }
                    import::Content::Claims(imported) => {
                        let (rows, phase, of_claims) = state.begin_claims_import(imported, &hash)?;
                        report = Some(of_claims);
                        (rows, phase)
                    }
                };
                if let Phase::Import { settled, .. } = &mut phase {
                    settled.turn = turn;
                }
                Ok(Some((rows, phase)))
            })?;
            (written, report.ok_or(WriteError::Stopped)?)
        };
        done(written).await?;
        if let import::Content::Devices(_) = content {
            report.doubly_held = self.read(Node::doubly_held);
        }
        Ok(report)
    }

    /// Ends the first reason why no pod is admitted; see [`Store::forget_reason`].
    pub async fn forget(&self) -> Result<Vec<PodUid>, ForgetFileError> {
        match self.read(|node| node.blocked().cloned()) {
            Some(reason) => self.forget_reason(&reason).await,
            None => Ok(Vec::new()),
        }
    }

    /// Ends a reason why no pod is admitted: state that is lost or could not be read held nothing more than what is known,
    /// or a contested file is not adopted, and the record stays as it was. Pods are admitted again, unless there is
    /// another reason. Returns the pods that only the contested file had: they are removed.
    pub async fn forget_reason(&self, reason: &Blocked) -> Result<Vec<PodUid>, ForgetFileError> {
        let turn = self.turn().await?;
        let file = reason.file();
        let mut gone = Vec::new();
        let written = self.begin(|state| {
            let Some(change) = state.begin_forget(file, turn) else {
                let file = file.to_owned();
                return Err(ForgetFileError::Settled { file });
            };
            if let (_, Phase::Forget { removed, .. }) = &change {
                gone.clone_from(removed);
            }
            Ok(Some(change))
        })?;
        done(written).await?;
        Ok(gone)
    }

    /// Waits until no other import or forget is deciding; `None` if there is nothing to decide.
    async fn turn(&self) -> Result<Option<Turn>, WriteError> {
        if self.read(|node| node.blocked().is_none()) {
            return Ok(None);
        }
        let deadline = tokio::time::Instant::now() + self.shared.patience;
        let turn = Arc::clone(&self.deciding).lock_owned();
        in_time(deadline, async { Ok(Some(turn.await)) }).await
    }

    /// All of the database, for people.
    pub async fn dump(&self) -> Result<serde_json::Value, DumpError> {
        let snapshot = flatten_recv(self.threads.writer.read().await)?;
        let unreadable = |error: database::LoadError| DumpError::Unreadable {
            reason: error.to_string(),
        };
        Ok(dump::contents(&snapshot.contents().map_err(unreadable)?))
    }

    /// Writes the kubelet's file now, rather than in a while.
    pub async fn mirror(&self) -> Result<(), MirrorError> {
        let answer = self.threads.mirrorer.call(Call::Now).await;
        answer.unwrap_or(Err(MirrorError::Write(WriteError::Stopped)))
    }

    /// Ends the store: what was handed over is written, the kubelet's file is brought up to date, the database
    /// is closed. To be called when nobody changes anything any longer.
    pub async fn stop(&self) -> Result<(), StopError> {
        let mirrored = self.threads.mirrorer.call(Call::Stop).await;
        let stopped = self.threads.writer.stop().await;
        let (Ok(mirrored), Ok(stopped)) = (mirrored, stopped) else {
            return Err(StopError::Stopped);
        };
        match stopped {
            Ok(()) => Ok(mirrored?),
            Err(Unplaced {
                problem,
                saved: Some(saved),
            }) => Err(StopError::Unplaced { problem, saved }),
            Err(Unplaced { problem, saved: None }) => Err(StopError::Lost { problem }),
        }
    }

    /// Begins a change that is written in the order in which it was begun; `None` if there is nothing to be written.
    fn begin<E>(
        &self,
        begin: impl FnOnce(&mut State) -> Result<Option<(Vec<Row>, Phase)>, E>,
    ) -> Result<Option<PendingCommit>, E> {
        let queued = self.shared.change(|state| {
            let change = begin(state)?;
            Ok(change.map(|(rows, phase)| self.threads.writer.enqueue(rows, phase)))
        })?;
        // Not before here: the cancellation of a rejected change takes the lock.
        Ok(queued.map(|(written, rejected)| {
            drop(rejected);
            written
        }))
    }
}

/// Waits until a change is on disk.
async fn done(written: Option<PendingCommit>) -> Result<(), WriteError> {
    match written {
        Some(written) => written.done().await,
        None => Ok(()),
    }
}

/// A reservation that undoes itself.
///
/// Dropping it frees the devices and leaves the claims, so an early return and a cancelled request both leave the node
/// as it was.
#[must_use = "dropping a hold frees the devices"]
#[derive(Debug)]
pub struct Held {
    store: Store,
    id: ReservationId,
    reservation: Reservation,
}

impl Held {
    /// What is set aside.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Which it is, for questions.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// Writes down what must be on disk before a driver is called for the pod's claims. Done when it is there, or when
    /// there is nothing to be written: also because another admission is writing it. Whether there was.
    ///
    /// Once it was first polled it is carried out, whether somebody waits for it or not.
    pub async fn intent(&self) -> Result<bool, WriteError> {
        let written = self.store.begin(|state| {
            let intent = state.node.begin_intent(self.id);
            let mut rows: Vec<Row> = intent.put.iter().map(Row::claim).collect();
            rows.extend(intent.delete.into_iter().map(|uid| Row::Claim(uid, None)));
            let change = (!rows.is_empty()).then_some((rows, Phase::Intent(self.id)));
            Ok::<_, WriteError>(change)
        })?;
        let is_news = written.is_some();
        done(written).await?;
        Ok(is_news)
    }

    /// The plugins have agreed and all claims are prepared: gives everything to the pod. Done when that is on disk.
    ///
    /// `answers` are theirs, in the order of the grants, each with whether the plugin wants to be called before
    /// each start; they come from [`answer()`]. If the future is dropped before it was first polled, the devices
    /// are free again; from then on the change is carried out, whether somebody waits for it or not.
    pub async fn commit(
        self,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
    ) -> Result<Pod, CommitError> {
        let mut pod = None;
        let written = self.store.begin(|state| {
            let commit = state.node.begin_commit(self.id, request, answers)?;
            let mut rows: Vec<Row> = commit.claims.iter().map(Row::claim).collect();
            rows.push(Row::pod(&commit.pod));
            pod = Some(commit.pod);
            Ok::<_, devlet_core::CommitError>(Some((rows, Phase::Commit(self.id))))
        })?;
        done(written).await?;
        Ok(pod.ok_or(devlet_core::CommitError::Ended)?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Does nothing once the commit has begun.
        self.store.shared.update(|node| node.abort(self.id));
    }
}

#[cfg(test)]
mod tests;
