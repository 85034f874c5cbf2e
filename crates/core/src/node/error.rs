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

/// Reasons why the node refuses all admissions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Blocked {
    /// State about pods could not be read.
    #[error(
        "the state in {file} cannot be used: {reason}; so it is not known which devices are held; if a kubelet of this node wrote \
         it, repair and import it (devlet checkpoint repair {file} --out REPAIRED; devlet import REPAIRED), otherwise \
         declare that it held nothing more (devlet forget {file})"
    )]
    UnreadableState {
        /// The path of the quarantined file.
        file: String,
        /// Why the state cannot be used.
        reason: String,
    },
    /// State about claims could not be read.
    #[error(
        "the state in {file} cannot be used: {reason}; so it is not known which claims are prepared; if a kubelet of this node wrote \
         it, repair and import it (devlet checkpoint repair {file} --out REPAIRED; devlet import REPAIRED), otherwise \
         declare that it held nothing more (devlet forget {file})"
    )]
    UnreadableClaims {
        /// The path of the quarantined file.
        file: String,
        /// Why the state cannot be used.
        reason: String,
    },
    /// The database could be neither read nor repaired.
    #[error(
        "the database {file} could not be read, so it is not certain which devices and claims are held; import {files} \
         of this node (devlet import FILE), or declare that what is known is all (devlet forget {file})"
    )]
    UnreadableDatabase {
        /// The path of the quarantined file.
        file: String,
        /// The kubelet's files that have not been imported since then.
        files: String,
    },
    /// The database of this node is missing.
    #[error(
        "the database {file} is lost: {reason}; so it is not certain which devices and claims are held; stop devlet, put \
         the database back and start again, or import {files} of this node (devlet import FILE), or declare that what \
         is known is all (devlet forget {file})"
    )]
    LostDatabase {
        /// The path of the database, or of the quarantined file that was found there.
        file: String,
        /// The content found at that path.
        reason: String,
        /// The kubelet's files that have not been imported since then.
        files: String,
    },
    /// A kubelet's file would take devices or claims from recorded pods, or also give their devices to other pods.
    #[error(
        "{file} disagrees with devlet's record: {difference}; adopt the file (devlet import {file}), or keep the \
         record (devlet forget {file})"
    )]
    ContestedFile {
        /// The path of a copy of the file.
        file: String,
        /// The difference between the file and the record, as text.
        difference: String,
        /// Pods that stay blocked until an operator decides: those that the file adds or changes, and those that hold
        /// the same devices.
        pods: Vec<PodUid>,
    },
}

impl Blocked {
    /// Returns the file that an operator has to decide about.
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

/// Reasons why a pod cannot get its devices or claims.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The node refuses all admissions.
    #[error(transparent)]
    Blocked(#[from] Blocked),
    /// No plugin serves the resource. Waiting helps: a plugin may connect.
    #[error("no device plugin offers {resource}{}", last_seen(.last.as_ref()))]
    NotServed {
        /// The resource.
        resource: ResourceName,
        /// The plugin that served it last.
        last: Option<LastPlugin>,
    },
    /// A plugin is connected, but has not listed its devices yet. Waiting helps.
    #[error("the device plugin of {resource} at {endpoint} has not listed its devices yet")]
    NotListed {
        /// The resource.
        resource: ResourceName,
        /// The endpoint of the plugin.
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
        /// The endpoint of the plugin.
        endpoint: String,
        /// The number of listed devices.
        total: usize,
    },
    /// The recorded pods leave too few devices. Waiting does not help.
    #[error(
        "{wanted} {resource} requested, {free} free{} ({healthy} of {total} healthy)",
        match reserved { 0 => String::new(), reserved => alloc::format!(" and {reserved} reserved for other pods") }
    )]
    Insufficient {
        /// The resource.
        resource: ResourceName,
        /// The number of additional devices requested.
        wanted: usize,
        /// The number of free devices.
        free: usize,
        /// The number of devices held only by admissions and removals that have not ended.
        reserved: usize,
        /// The number of healthy devices.
        healthy: usize,
        /// The number of listed devices.
        total: usize,
    },
    /// The recorded pods leave enough devices, but other admissions have reserved some of them, or a pod that holds some
    /// of them is being removed. Waiting helps.
    #[error(
        "{wanted} {resource} requested, {free} free; {reserved} held by admissions or removals that have not ended"
    )]
    Reserved {
        /// The resource.
        resource: ResourceName,
        /// The number of additional devices requested.
        wanted: usize,
        /// The number of free devices.
        free: usize,
        /// The number of devices held only by admissions and removals that have not ended.
        reserved: usize,
    },
    /// Another admission or removal of the same pod, or an import of it or its claims, has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
    /// An imported pod, which does not have a spec on record, holds a different number of devices.
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
        /// The number of devices requested.
        wanted: usize,
        /// The number of devices held.
        held: usize,
    },
    /// The pod was admitted with another spec, or under another name.
    #[error("{0}")]
    SpecChanged(Box<SpecChange>),
    /// Two containers have the same name.
    #[error("two containers are called {container}")]
    DuplicateContainer {
        /// The name.
        container: ContainerName,
    },
    /// Another pod has the name.
    #[error("pod {other} has this name and another UID; remove it first")]
    NameTaken {
        /// The UID of that pod.
        other: PodUid,
    },
    /// Another pod of that name is being admitted or removed. Waiting helps.
    #[error("pod {other}, which has this name and another UID, is being admitted or removed")]
    NameReserved {
        /// The UID of that pod.
        other: PodUid,
    },
    /// No plugin of a driver is connected. Waiting helps: a plugin may connect.
    #[error("ResourceClaim {claim}: DRA driver {driver} is not {seen}")]
    NoDriver {
        /// The driver.
        driver: DriverName,
        /// A claim that needs it.
        claim: ClaimKey,
        /// The last known state of its plugins.
        seen: LastSeen,
    },
    /// The claim, or an earlier claim of the same name, is being unprepared. Waiting helps.
    #[error(
        "ResourceClaim {claim} (UID {uid}) is being unprepared{}{}",
        listed(" by ", .drivers),
        abandoned_at(.abandoned)
    )]
    Unpreparing {
        /// The claim.
        claim: ClaimKey,
        /// Its UID.
        uid: ClaimUid,
        /// The drivers that have not unprepared it.
        drivers: Vec<DriverName>,
        /// Abandoned drivers that the pod needs.
        abandoned: Vec<DriverName>,
    },
    /// Another claim has a device that one of its claims needs. Waiting helps, unless pods hold it.
    #[error(transparent)]
    DeviceInUse(#[from] Box<DeviceInUse>),
    /// Drivers have not prepared the pod's claims. Waiting helps.
    #[error("{}", waits_listed(.waits))]
    NotPrepared {
        /// The drivers and claims that the pod waits for.
        waits: Vec<Wait>,
    },
    /// Another claim has the name or UID, or the claim was allocated differently, and all pods that use that version are
    /// being admitted or removed. Waiting helps.
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
    /// Pods hold the claim with an earlier allocation.
    #[error("{}", .change.text(.claim))]
    Reallocated {
        /// The claim.
        claim: ClaimKey,
        /// The pods.
        pods: Vec<PodUid>,
        /// The difference between the allocations.
        change: Box<Reallocation>,
    },
    /// A claim of another name has the UID.
    #[error(
        "ResourceClaim {other} has the same UID, {uid}; the UID of ResourceClaim {claim} must be another one"
    )]
    ClaimUidTaken {
        /// The claim.
        claim: ClaimKey,
        /// The other claim.
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
    /// Returns `true` if the error ends as soon as completed work of drivers is on disk.
    pub fn awaits_record(&self) -> bool {
        match self {
            Self::Unpreparing {
                drivers, abandoned, ..
            } => drivers.is_empty() && abandoned.is_empty(),
            Self::DeviceInUse(conflict) => conflict.state == HolderState::NotRecorded,
            _ => false,
        }
    }

    /// Returns `true` if the error can end without an action of the caller.
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

/// The last known state of the plugins of a driver that does not have a connected plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LastSeen {
    /// No plugin has registered.
    Never,
    /// A plugin is registered.
    NotConnected {
        /// The endpoint of the plugin.
        endpoint: String,
        /// When the last connection was lost.
        since: Moment,
    },
    /// All plugins have left.
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

fn abandoned_at(drivers: &[DriverName]) -> String {
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

/// Reasons why an allocation cannot be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The reservation was aborted or is already committed.
    #[error("the reservation has ended")]
    Ended,
    /// The request or the answers belong to another reservation.
    #[error("the request or the answers do not match the reservation")]
    Mismatch,
    /// A driver has not prepared a claim.
    #[error("not all of the pod's claims are prepared")]
    NotPrepared,
}

/// Reasons why a pod cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PutError {
    /// An admission, removal or import of the same pod has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
}

/// Reasons why a pod cannot be removed now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// The pod is not on record.
    #[error("no such pod")]
    Unknown,
    /// Another admission, removal or import of the same pod has not ended yet.
    #[error("another operation for this pod is in flight")]
    InFlight,
}

/// Reasons why a plugin cannot connect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// A plugin of another user serves the resource.
    #[error(
        "{resource} is served by a plugin of user {first} at {endpoint}; user {uid} may not serve it too"
    )]
    OtherUser {
        /// The resource.
        resource: ResourceName,
        /// The user ID of the plugin that serves it.
        first: u32,
        /// The endpoint of that plugin.
        endpoint: String,
        /// The user ID of the rejected plugin.
        uid: u32,
    },
}
