//! Index of the claims that hold each device: at most one, unless imported or restored records differ.
//!
//! The unit is (driver, pool, device, share ID). Two claims conflict if they hold the same share of a device, or if one
//! of them holds the whole device. Devices allocated with admin access are not held.
//!
//! A claim holds its devices from the time a pod joins it until the disk has it as unprepared, or does not have a record of
//! it. Otherwise a crash could restore a claim with a device that another claim has got meanwhile. [`Entry::holds`] has the
//! devices of a claim in the index. It grows with the state in memory, and shrinks when disk and memory are equal.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{AllocatedClaim, AllocatedDevice, ClaimKey, Claims, Entry, Preparation, PreparationState};
use crate::dra::health::PoolDevice;
use crate::id::{ClaimUid, DriverName, PodUid};
use crate::node::listed;
use crate::pod::PodName;

/// A device, or a share of one, as a claim holds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceShare {
    /// The driver.
    pub driver: DriverName,
    /// The device.
    pub device: PoolDevice,
    /// The share ID; `None` for the whole device.
    pub share: Option<String>,
}

impl core::fmt::Display for DeviceShare {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let PoolDevice { pool, device } = &self.device;
        match &self.share {
            Some(share) => write!(
                f,
                "share {share} of device {pool}/{device} of driver {}",
                self.driver
            ),
            None => write!(f, "device {pool}/{device} of driver {}", self.driver),
        }
    }
}

impl DeviceShare {
    /// Returns `true` if one claim cannot hold this while another claim holds `other`.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let same_share = self.share.is_none() || other.share.is_none() || self.share == other.share;
        self.driver == other.driver && self.device == other.device && same_share
    }

    fn allocated(driver: &DriverName, device: &AllocatedDevice) -> Option<Self> {
        (!device.admin_access).then(|| Self {
            driver: driver.clone(),
            device: PoolDevice {
                pool: device.pool.clone(),
                device: device.device.clone(),
            },
            share: device.share.clone(),
        })
    }
}

impl AllocatedClaim {
    /// Returns the devices without admin access.
    pub(crate) fn exclusive_devices(&self) -> impl Iterator<Item = DeviceShare> {
        self.drivers.iter().flat_map(|(driver, allocated)| {
            let devices = allocated.devices.iter();
            devices.filter_map(|device| DeviceShare::allocated(driver, device))
        })
    }
}

impl Preparation {
    /// Returns the devices without admin access. A kubelet's file has only prepared devices, and very old files do not name
    /// them.
    pub(super) fn exclusive_devices<'a>(
        &'a self,
        driver: &'a DriverName,
    ) -> impl Iterator<Item = DeviceShare> + 'a {
        let allocated = self.allocated.iter().flatten();
        let allocated = allocated.filter_map(|device| DeviceShare::allocated(driver, device));
        let prepared = self.devices.iter().filter(|each| !each.device.is_empty());
        let prepared = prepared.filter(|_| self.allocated.is_none());
        allocated.chain(prepared.map(|each| DeviceShare {
            driver: driver.clone(),
            device: each.pool_device(),
            share: each.share.clone(),
        }))
    }
}

impl Entry {
    /// Returns the devices that the claim would hold if it were restored from its state in memory.
    pub(super) fn needed_devices(&self) -> BTreeSet<DeviceShare> {
        let is_unused = self.is_unused();
        let holds = |preparation: &Preparation| {
            preparation.state != PreparationState::Unprepared
                && !(is_unused && preparation.skips(super::claim::UNPREPARE))
        };
        let preparations = self.claim.preparations.iter();
        preparations
            .filter(|(_, preparation)| holds(preparation))
            .flat_map(|(driver, preparation)| preparation.exclusive_devices(driver))
            .collect()
    }

    /// Returns `true` if the state in memory holds the device, not only the record on disk.
    fn needs(&self, device: &DeviceShare) -> bool {
        let preparation = self.claim.preparations.get(&device.driver);
        preparation.is_some_and(|preparation| {
            preparation.state != PreparationState::Unprepared
                && preparation
                    .exclusive_devices(&device.driver)
                    .any(|each| each.conflicts_with(device))
        })
    }
}

/// A claim that holds a device of another claim's request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceConflict<'a> {
    pub(crate) holder: &'a Entry,
    pub(crate) state: HolderState,
}

/// The state of a claim that holds a device of another claim's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HolderState {
    /// The claim itself has the device twice.
    SameClaim,
    /// Another claim of the same pod has the device too.
    SamePod,
    /// Recorded pods hold it. Waiting does not help.
    Held,
    /// All of its pods are being admitted or removed.
    InFlight,
    /// Its driver has not unprepared it.
    Unpreparing,
    /// Its driver was abandoned and has not unprepared it.
    Abandoned,
    /// It is unprepared, but the record is not on disk yet.
    NotRecorded,
}

/// The error that another claim holds a device of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInUse {
    /// The claim that needs the device.
    pub claim: ClaimKey,
    /// The pod that requests the claim.
    pub pod: PodName,
    /// The device.
    pub device: DeviceShare,
    /// The claim that has the device.
    pub holder: ClaimKey,
    /// Its UID.
    pub holder_uid: ClaimUid,
    /// The pods that use it, or the one that used it last; names may be empty.
    pub holder_pods: Vec<(PodUid, PodName)>,
    /// The state of that claim.
    pub state: HolderState,
}

impl core::error::Error for DeviceInUse {}

impl core::fmt::Display for DeviceInUse {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self {
            claim,
            pod,
            device,
            holder,
            holder_uid,
            ..
        } = self;
        let driver = &device.driver;
        if self.state == HolderState::SameClaim {
            return write!(
                f,
                "ResourceClaim {claim} of pod {} has {device} twice in status.allocation; allocate another device, or a \
                 shareID for each",
                full_name(pod)
            );
        }
        write!(
            f,
            "ResourceClaim {claim} of pod {} needs {device}, which ",
            full_name(pod)
        )?;
        let pods: Vec<String> = self.holder_pods.iter().map(named_pod).collect();
        let pods = listed(if pods.len() == 1 { " of pod " } else { " of pods " }, &pods);
        let holder = format!("ResourceClaim {holder} (UID {holder_uid}){pods}");
        match self.state {
            HolderState::SameClaim | HolderState::SamePod => {
                write!(f, "{holder} of the same pod needs too; allocate another device")
            }
            HolderState::Held => write!(f, "{holder} holds; remove that pod, or allocate another device"),
            HolderState::InFlight => write!(
                f,
                "{holder} has; the admission or removal of that pod has not ended"
            ),
            HolderState::Unpreparing => {
                write!(f, "driver {driver} has not yet unprepared for {holder}")
            }
            HolderState::Abandoned => write!(
                f,
                "driver {driver} was to unprepare for {holder} when it was abandoned; start the driver, or forget that claim"
            ),
            HolderState::NotRecorded => write!(f, "is unprepared for {holder}, but that is not on disk yet"),
        }
    }
}

pub(super) fn named_pod((uid, name): &(PodUid, PodName)) -> String {
    match name.name.is_empty() {
        true => format!("{uid}"),
        false => format!("{} ({uid})", full_name(name)),
    }
}

fn full_name(PodName { namespace, name }: &PodName) -> String {
    format!("{namespace}/{name}")
}

/// The claims that hold a device. The share comes first, so that holders of the whole device precede those of shares.
type Holders = BTreeSet<(Option<String>, ClaimUid)>;

/// All devices that claims hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceHolders {
    holders: BTreeMap<(DriverName, PoolDevice), Holders>,
}

impl DeviceHolders {
    pub(super) fn insert(&mut self, uid: &ClaimUid, device: &DeviceShare) {
        let holders = self.holders.entry((device.driver.clone(), device.device.clone()));
        holders.or_default().insert((device.share.clone(), uid.clone()));
    }

    pub(super) fn remove(&mut self, uid: &ClaimUid, device: &DeviceShare) {
        let key = (device.driver.clone(), device.device.clone());
        if let Some(holders) = self.holders.get_mut(&key) {
            holders.remove(&(device.share.clone(), uid.clone()));
            if holders.is_empty() {
                self.holders.remove(&key);
            }
        }
    }

    /// Returns the claims that conflict with a device or share. A whole device conflicts with each of its shares.
    fn of(&self, device: &DeviceShare) -> impl Iterator<Item = &ClaimUid> {
        let first = ClaimUid::from("");
        let holders = self.holders.get(&(device.driver.clone(), device.device.clone()));
        let is_whole = device.share.is_none();
        let whole = holders
            .into_iter()
            .flatten()
            .take_while(move |(share, _)| is_whole || share.is_none());
        let share = device.share.clone();
        let same = holders
            .filter(|_| !is_whole)
            .into_iter()
            .flat_map(move |holders| holders.range((share.clone(), first.clone())..));
        let share = device.share.clone();
        let same = same.take_while(move |(other, _)| *other == share);
        whole.chain(same).map(|(_, uid)| uid)
    }
}

impl Claims {
    /// Updates the index for a claim. A device is removed only if no record on disk holds it.
    pub(super) fn index_holds(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        let needed = entry.needed_devices();
        if needed == entry.holds {
            return;
        }
        for device in needed.difference(&entry.holds) {
            self.holders.insert(uid, device);
        }
        if entry.on_disk || entry.writing > 0 {
            entry.holds.extend(needed);
            return;
        }
        for device in entry.holds.difference(&needed) {
            self.holders.remove(uid, device);
        }
        entry.holds = needed;
    }

    /// Removes the devices that neither memory nor disk holds, after a record of the claim was written.
    pub(super) fn release_unneeded(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        if entry.writing > 0 || entry.dirty || entry.committing {
            return;
        }
        let needed = entry.needed_devices();
        for device in entry.holds.difference(&needed) {
            self.holders.remove(uid, device);
        }
        entry.holds.retain(|device| needed.contains(device));
    }

    /// Returns the other claims that hold a device.
    fn other_holders(&self, uid: &ClaimUid, device: &DeviceShare) -> Vec<&Entry> {
        let others = self.holders.of(device).filter(|other| *other != uid);
        others.filter_map(|other| self.entries.get(other)).collect()
    }

    /// Returns a conflict of one of the claim's devices. A final conflict takes precedence over one that waiting can
    /// resolve. Devices that the claim already holds are not checked, so restored records may share a device. A claim that
    /// is over does not conflict: the next write ([`Claims::begin_intent`]) deletes its record.
    pub(crate) fn device_conflict(
        &self,
        wanted: &AllocatedClaim,
        is_leaving: impl Fn(&PodUid) -> bool,
    ) -> Option<(DeviceShare, DeviceConflict<'_>)> {
        let mut awaited = None;
        for device in wanted.exclusive_devices() {
            if self.is_held_by(&wanted.uid, &device) {
                continue;
            }
            for holder in self.other_holders(&wanted.uid, &device) {
                if holder.is_done() {
                    continue;
                }
                let is_blocking = || holder.blocking().any(|driver| *driver == device.driver);
                let state = if !holder.needs(&device) {
                    HolderState::NotRecorded
                } else if holder.claim.is_abandoned_at(&device.driver) {
                    HolderState::Abandoned
                } else if holder.is_unused() {
                    match is_blocking() {
                        true => HolderState::Unpreparing,
                        false => HolderState::NotRecorded,
                    }
                } else if holder.holders.iter().all(&is_leaving) {
                    HolderState::InFlight
                } else {
                    HolderState::Held
                };
                let conflict = (device.clone(), DeviceConflict { holder, state });
                if state == HolderState::Held {
                    return Some(conflict);
                }
                awaited.get_or_insert(conflict);
            }
        }
        awaited
    }

    /// Returns `true` if pods use a claim that holds a device.
    pub(crate) fn is_held_by(&self, uid: &ClaimUid, device: &DeviceShare) -> bool {
        let known = self.entries.get(uid);
        known.is_some_and(|known| !known.is_unused() && known.holds.contains(device) && known.needs(device))
    }

    /// Returns the claims without pods whose records must be deleted before a claim is recorded.
    pub(super) fn superseded(&self, uid: &ClaimUid) -> Vec<ClaimUid> {
        let Some(entry) = self.entries.get(uid) else {
            return Vec::new();
        };
        let mut superseded = Vec::new();
        for device in &entry.needed_devices() {
            for other in self.other_holders(uid, device) {
                if other.is_over() && !superseded.contains(&other.claim.uid) {
                    superseded.push(other.claim.uid.clone());
                }
            }
        }
        superseded
    }

    /// Returns devices that several claims hold, with these claims. Only imported or restored records cause this.
    pub(crate) fn shared_devices(&self) -> impl Iterator<Item = (DeviceShare, Vec<&Entry>)> {
        let devices = self
            .holders
            .holders
            .iter()
            .filter(|(_, holders)| holders.len() > 1);
        devices.filter_map(|((driver, device), holders)| {
            let mut by_share: BTreeMap<Option<&String>, Vec<&Entry>> = BTreeMap::new();
            for (share, uid) in holders {
                let held = DeviceShare {
                    driver: driver.clone(),
                    device: device.clone(),
                    share: share.clone(),
                };
                let holder = self.entries.get(uid);
                if let Some(holder) = holder.filter(|holder| !holder.is_over() && holder.needs(&held)) {
                    by_share.entry(share.as_ref()).or_default().push(holder);
                }
            }
            let is_whole = by_share.contains_key(&None);
            let (share, claims) = match is_whole {
                true => (None, by_share.into_values().flatten().collect()),
                false => by_share.into_iter().find(|(_, claims)| claims.len() > 1)?,
            };
            let shared = DeviceShare {
                driver: driver.clone(),
                device: device.clone(),
                share: share.cloned(),
            };
            (claims.len() > 1).then_some((shared, claims))
        })
    }
}
