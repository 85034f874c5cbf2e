//! Errors of the node's transitions, one type for each kind of transition.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use crate::device_plugin::inventory::LastPlugin;
use crate::dra::claims::{ClaimKey, DeviceInUse, HolderState, Reallocation};
use crate::dra::view::{Wait, listed as waits_listed};
use crate::id::{ClaimUid, ContainerName, DriverName, Moment, PodUid, ResourceName};
use crate::pod::PodName;
use crate::spec_change::SpecChange;

/// Why no pod is admitted at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Blocked {
    /// There is state that could not be read.
    #[error(
        "the state in {file} cannot be used: {reason}; so it is not known which devices are held; if a kubelet of this node wrote \
         it, repair and import it (devlet checkpoint repair {file} --out REPAIRED; devlet import REPAIRED), otherwise \
         declare that it held nothing more (devlet forget {file})"
    )]
    UnreadableState {
        /// Where it was set aside.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There is state about claims that could not be read.
    #[error(
        "the state in {file} cannot be used: {reason}; so it is not known which claims are prepared; if a kubelet of this node wrote \
         it, repair and import it (devlet checkpoint repair {file} --out REPAIRED; devlet import REPAIRED), otherwise \
         declare that it held nothing more (devlet forget {file})"
    )]
    UnreadableClaims {
        /// Where it was set aside.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There is a database that could not be read, and that cannot be repaired.
    #[error(
        "the database {file} could not be read, so it is not certain which devices and claims are held; import {files} \
         of this node (devlet import FILE), or declare that what is known is all (devlet forget {file})"
    )]
    UnreadableDatabase {
        /// Where it was set aside.
        file: String,
        /// The kubelet's files that have not been imported since.
        files: String,
    },
    /// The database of this node is not there.
    #[error(
        "the database {file} is lost: {reason}; so it is not certain which devices and claims are held; stop devlet, put \
         the database back and start again, or import {files} of this node (devlet import FILE), or declare that what \
         is known is all (devlet forget {file})"
    )]
    LostDatabase {
        /// Where it should be, or where the file in its place was set aside.
        file: String,
        /// What was found instead.
        reason: String,
        /// The kubelet's files that have not been imported since.
        files: String,
    },
    /// A kubelet's file would take devices or claims from pods on record, or give their devices to other pods, too.
    #[error(
        "{file} disagrees with devlet's record: {difference}; adopt the file (devlet import {file}), or keep the \
         record (devlet forget {file})"
    )]
    ContestedFile {
        /// Where a copy of it is.
        file: String,
        /// What it says that the record does not, in words.
        difference: String,
        /// Pods that are not answered until then: those that the file adds or changes, and those that hold the same
        /// devices.
        pods: Vec<PodUid>,
    },
}

impl Blocked {
    /// The file that an operator has to decide about.
    pub fn file(&self) -> &str {
        match self {
            Self::UnreadableState { file, .. }
            | Self::UnreadableClaims { file, .. }
            | Self::UnreadableDatabase { file, .. }
            | Self::LostDatabase { file, .. }
            | Self::ContestedFile { file, .. } => file,
        }
    }
}

/// Why a pod cannot have what it asks for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// Nobody is admitted.
    #[error(transparent)]
    Blocked(#[from] Blocked),
    /// No plugin serves the resource now. One may come: waiting helps.
    #[error("no device plugin offers {resource}{}", last_seen(.last.as_ref()))]
    NotServed {
        /// The resource.
        resource: ResourceName,
        /// The plugin that did.
        last: Option<LastPlugin>,
    },
    /// A plugin is connected, but has not listed its devices yet. Waiting helps.
    #[error("the device plugin of {resource} at {endpoint} has not listed its devices yet")]
    NotListed {
        /// The resource.
        resource: ResourceName,
        /// The plugin.
        endpoint: String,
    },
    /// A plugin is connected, but has not listed a healthy device since it connected: it may still be starting.
    /// Waiting helps.
    #[error(
        "the device plugin of {resource} at {endpoint} has not listed a healthy device yet ({})",
        match total { 0 => "its list is empty".into(), total => alloc::format!("0 of {total} healthy") }
    )]
    NoHealthyDevice {
        /// The resource.
        resource: ResourceName,
        /// The plugin.
        endpoint: String,
        /// How many devices it lists.
        total: usize,
    },
    /// Too few devices are left by the pods on record. Waiting does not help.
    #[error(
        "{wanted} {resource} requested, {free} free{} ({healthy} of {total} healthy)",
        match reserved { 0 => String::new(), reserved => alloc::format!(" and {reserved} reserved for other pods") }
    )]
    Insufficient {
        /// The resource.
        resource: ResourceName,
        /// How many more are wanted.
        wanted: usize,
        /// How many are free.
        free: usize,
        /// How many more are held only by admissions and removals that have not ended.
        reserved: usize,
        /// How many are healthy.
        healthy: usize,
        /// How many there are.
        total: usize,
    },
    /// The pods on record leave enough devices, but other admissions have reserved some of them, or a pod that
    /// holds some of them is being removed. Waiting helps.
    #[error(
        "{wanted} {resource} requested, {free} free; {reserved} held by admissions or removals that have not ended"
    )]
    Reserved {
        /// The resource.
        resource: ResourceName,
        /// How many more are wanted.
        wanted: usize,
        /// How many are free.
        free: usize,
        /// How many more are held only by admissions and removals that have not ended.
        reserved: usize,
    },
    /// Another admission or removal of the same pod, or an import of it or its claims, has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
    /// The pod, of which a kubelet's file does not have the spec, holds a different number of devices.
    #[error(
        "pod {}/{} ({pod}) holds {held} {resource} in container {container}, but now requests {wanted}; remove it first",
        .name.namespace, .name.name
    )]
    RequestChanged {
        /// The UID of the pod.
        pod: PodUid,
        /// Its name.
        name: PodName,
        /// The container.
        container: ContainerName,
        /// The resource.
        resource: ResourceName,
        /// How many it wants now.
        wanted: usize,
        /// How many it holds.
        held: usize,
    },
    /// The pod was admitted with another spec, or under another name.
    #[error("{0}")]
    SpecChanged(Box<SpecChange>),
    /// Containers could not be told apart.
    #[error("two containers are called {container}")]
    DuplicateContainer {
        /// Their name.
        container: ContainerName,
    },
    /// Another pod has the name.
    #[error("pod {other} has this name and another UID; remove it first")]
    NameTaken {
        /// That pod.
        other: PodUid,
    },
    /// Another pod of that name is being admitted or removed. Waiting helps.
    #[error("pod {other}, which has this name and another UID, is being admitted or removed")]
    NameReserved {
        /// That pod.
        other: PodUid,
    },
    /// No plugin of a driver is connected. One may come: waiting helps.
    #[error("ResourceClaim {claim}: DRA driver {driver} is not {seen}")]
    NoDriver {
        /// The driver.
        driver: DriverName,
        /// A claim that needs it.
        claim: ClaimKey,
        /// What is known of its plugins.
        seen: LastSeen,
    },
    /// The claim, or an earlier one of that name, is on its way out. Waiting helps.
    #[error(
        "ResourceClaim {claim} (UID {uid}) is being unprepared{}{}",
        listed(" by ", .drivers),
        given_up_on(.abandoned)
    )]
    Unpreparing {
        /// The claim.
        claim: ClaimKey,
        /// Its UID.
        uid: ClaimUid,
        /// By whom.
        drivers: Vec<DriverName>,
        /// Who was given up on, if that is in the way.
        abandoned: Vec<DriverName>,
    },
    /// Another claim has a device that one of its claims needs. Waiting helps, unless pods hold it.
    #[error(transparent)]
    DeviceInUse(#[from] Box<DeviceInUse>),
    /// Drivers have not prepared its claims. Waiting helps.
    #[error("{}", waits_listed(.waits))]
    NotPrepared {
        /// Which drivers, and which claims.
        waits: Vec<Wait>,
    },
    /// Another claim has its name or UID, or it was allocated otherwise, and all pods that use that are being admitted or
    /// removed. Waiting helps.
    #[error(
        "ResourceClaim {claim} cannot be used while pods with another version of it, or of its UID {uid}, are being admitted or removed{}",
        listed(": ", .pods)
    )]
    ClaimReserved {
        /// The claim.
        claim: ClaimKey,
        /// The UID of the claim that the pods use.
        uid: ClaimUid,
        /// The pods.
        pods: Vec<PodUid>,
    },
    /// Pods hold the claim as it was allocated earlier.
    #[error("{}", .change.text(.claim))]
    Reallocated {
        /// The claim.
        claim: ClaimKey,
        /// The pods.
        pods: Vec<PodUid>,
        /// What differs.
        change: Box<Reallocation>,
    },
    /// A claim of another name has the UID.
    #[error(
        "ResourceClaim {other} has the same UID, {uid}; the UID of ResourceClaim {claim} must be another one"
    )]
    ClaimUidTaken {
        /// The claim.
        claim: ClaimKey,
        /// The other one.
        other: ClaimKey,
        /// Their UID.
        uid: ClaimUid,
    },
    /// Pods hold another claim of the same name.
    #[error(
        "an older ResourceClaim {claim} with UID {other} is still in use; remove the pods that hold it{}",
        listed(": ", .pods)
    )]
    ClaimNameTaken {
        /// The name.
        claim: ClaimKey,
        /// The older claim.
        other: ClaimUid,
        /// The pods.
        pods: Vec<PodUid>,
    },
}

impl ReserveError {
    /// Returns `true` if the reason passes as soon as it is on disk what drivers have done.
    pub fn awaits_record(&self) -> bool {
        match self {
            Self::Unpreparing {
                drivers, abandoned, ..
            } => drivers.is_empty() && abandoned.is_empty(),
            Self::DeviceInUse(conflict) => conflict.state == HolderState::NotRecorded,
            _ => false,
        }
    }

    /// Whether the reason may pass by itself.
    pub fn waiting_helps(&self) -> bool {
        if let Self::DeviceInUse(conflict) = self {
            let is_final = matches!(
                conflict.state,
                HolderState::Held | HolderState::SamePod | HolderState::SameClaim
            );
            return !is_final;
        }
        matches!(
            self,
            Self::NotServed { .. }
                | Self::NotListed { .. }
                | Self::NoHealthyDevice { .. }
                | Self::Reserved { .. }
                | Self::NameReserved { .. }
                | Self::ClaimReserved { .. }
                | Self::InFlight
                | Self::NoDriver { .. }
                | Self::Unpreparing { .. }
                | Self::NotPrepared { .. }
        )
    }
}

/// What is known of the plugins of a driver of which none is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LastSeen {
    /// There was none.
    Never,
    /// One is registered.
    NotConnected {
        /// Where it should answer.
        endpoint: String,
        /// Since when none is connected.
        since: Moment,
    },
    /// None is registered any longer.
    Gone(LastPlugin),
}

impl core::fmt::Display for LastSeen {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Never => f.write_str("registered"),
            Self::NotConnected { endpoint, .. } => {
                write!(f, "connected: its plugin at {endpoint} does not answer")
            }
            Self::Gone(last) => write!(f, "registered; the last one answered at {}", last.endpoint),
        }
    }
}

pub(crate) fn listed<T: core::fmt::Display>(before: &str, names: &[T]) -> String {
    let mut text = String::new();
    for (place, name) in names.iter().enumerate() {
        text.push_str(if place == 0 { before } else { ", " });
        text.push_str(&alloc::format!("{name}"));
    }
    text
}

fn given_up_on(drivers: &[DriverName]) -> String {
    if drivers.is_empty() {
        return String::new();
    }
    let mut text = listed("; it was abandoned at driver ", drivers);
    text.push_str(", which must come back to unprepare it: start the driver, or use a ResourceClaim that is allocated without it");
    text
}

fn last_seen(last: Option<&LastPlugin>) -> String {
    last.map_or_else(String::new, |last| {
        alloc::format!("; the last one answered at {}", last.endpoint)
    })
}

/// Why an allocation cannot be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// It was aborted, or committed already.
    #[error("the reservation has ended")]
    Ended,
    /// The request or the answers are not those of the reservation.
    #[error("the request or the answers do not match the reservation")]
    Mismatch,
    /// A driver has not prepared a claim.
    #[error("not all of the pod's claims are prepared")]
    NotPrepared,
}

/// Why a pod is not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PutError {
    /// An admission, removal or import of the same pod has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
}

/// Why a pod cannot be released now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// It holds nothing.
    #[error("no such pod")]
    Unknown,
    /// Another admission, removal or import of the same pod has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
}

/// Why a plugin is not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The resource is served by somebody else.
    #[error(
        "{resource} is served by a plugin of user {first} at {endpoint}; user {uid} may not serve it too"
    )]
    OtherUser {
        /// The resource.
        resource: ResourceName,
        /// The user that serves it.
        first: u32,
        /// Where.
        endpoint: String,
        /// The user that wants to.
        uid: u32,
    },
}
