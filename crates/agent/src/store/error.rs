//! Errors of the store's operations.

use std::path::PathBuf;
use std::time::Duration;

use devlet_core::dra::claims::{BeginForgetError, ClaimKey};
use devlet_core::{PodUid, ReleaseError as ReleaseRefused, ReserveError, ResourceName};

use super::import_report::UnreadableFile;
use super::kubelet_files::MirrorError;

/// Why a change is not on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The disk rejects the write.
    #[error("{} cannot be written: {reason}", .path.display())]
    Disk {
        /// The database.
        path: PathBuf,
        /// The error of the disk.
        reason: String,
        /// Kind of that error, if it is an I/O error.
        kind: Option<std::io::ErrorKind>,
    },
    /// The disk does not answer.
    #[error("the disk has not answered for {} s: look at it, and at the kernel's log", .waited.as_secs())]
    Hangs {
        /// Time since the write began.
        waited: Duration,
    },
    /// The disk did not answer before the caller's deadline. The change stays queued.
    #[error(
        "the disk does not answer (waited {:.1} s); the change may still be written; try again, and look at the \
         kernel's log if it stays so",
        .waited.as_secs_f64()
    )]
    TimedOut {
        /// Time that the caller waited.
        waited: Duration,
    },
    /// The store has been stopped.
    #[error("the store has been stopped")]
    Stopped,
}

/// Why a pod's request could not be reserved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// The request cannot be satisfied.
    #[error(transparent)]
    Refused(#[from] ReserveError),
    /// The disk does not accept writes at present. devlet keeps retrying.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why an allocation is not on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The reservation has ended, or the answers do not fit it.
    #[error(transparent)]
    Ended(#[from] devlet_core::CommitError),
    /// A device has left its plugin's list, or is unhealthy, since it was reserved.
    #[error("a device of {resource} vanished while its plugin was being called")]
    Vanished {
        /// The resource.
        resource: ResourceName,
    },
    /// It could not be written; the reservation is undone.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why a pod was not released.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// There is no such pod, or another operation for it is in flight.
    #[error(transparent)]
    Refused(#[from] ReleaseRefused),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the record of a claim was not deleted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetClaimError {
    /// The claim is not one that an operator may forget.
    #[error(transparent)]
    Refused(#[from] BeginForgetError),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why a file was not imported. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The file is damaged, or not one of the kubelet's.
    #[error(transparent)]
    Unreadable(#[from] UnreadableFile),
    /// The file is empty, so it does not replace the unreadable state.
    #[error(
        "it holds nothing, so it does not say who held what in {file}; if that really was nothing: devlet forget \
         {file}"
    )]
    Empty {
        /// Path of the unreadable state.
        file: String,
    },
    /// A pod of the file, or one that holds a claim of it, is being admitted, removed or imported.
    #[error("another operation for pod {pod} is in flight; import again when it has ended")]
    InFlight {
        /// The pod.
        pod: PodUid,
    },
    /// Another file with the claim is being imported.
    #[error("ResourceClaim {claim} is being imported from another file; import again when that has ended")]
    ClaimInFlight {
        /// The claim.
        claim: ClaimKey,
    },
    /// A claim of the file cannot be imported yet, and the import would end a block.
    #[error(
        "ResourceClaim {claim} cannot be imported yet: pods hold another claim of that name, or its drivers are still \
         unpreparing it; remove these pods, wait until devlet get claims does not list it any more, and import again"
    )]
    LeftOut {
        /// The claim.
        claim: ClaimKey,
    },
    /// The file has devices for a claim that are not on record.
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
    /// Another command has decided about the contested file first.
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
        /// The other file.
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

/// Why a reason that blocks admissions was not removed. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetFileError {
    /// The reason does not exist any longer.
    #[error("another command has decided about {file} meanwhile; devlet status shows what is left to decide")]
    Settled {
        /// The file of the reason.
        file: String,
    },
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Why the database could not be dumped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// The database is not open.
    #[error(transparent)]
    Closed(#[from] WriteError),
    /// The database does not decode.
    #[error("the database cannot be read: {reason}")]
    Unreadable {
        /// The error.
        reason: String,
    },
}

/// Why a stop of the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// The kubelet's file is not up to date, so a kubelet must not take over. Answered changes are on disk.
    #[error("the kubelet's file is out of date")]
    Mirror(#[from] MirrorError),
    /// The database is not at its path.
    #[error("{problem}; what was answered is in {}: move it there, too, before the next start", saved.display())]
    Misplaced {
        /// Why it is not.
        problem: WriteError,
        /// Where it is saved.
        saved: PathBuf,
    },
    /// The database does not exist and could not be saved.
    #[error(
        "{problem}; the next start has the pods of the kubelet's files, and admits no new pod until an operator decides"
    )]
    Lost {
        /// Why it could not.
        problem: WriteError,
    },
    /// The disk does not answer.
    #[error(
        "the disk has not answered for {} s: answered changes are on disk, but the kubelet's files may be out of date, \
         so a kubelet must not take over; look at the disk and the kernel's log",
        .waited.as_secs()
    )]
    Hangs {
        /// Time that the stop waited.
        waited: Duration,
    },
    /// The store has been stopped before.
    #[error("the store has been stopped")]
    Stopped,
}

/// The database is not at its path when the writer ends.
#[derive(Debug)]
pub(crate) struct MisplacedDatabase {
    pub(crate) problem: WriteError,
    /// Where its content is saved.
    pub(crate) saved: Option<PathBuf>,
}
