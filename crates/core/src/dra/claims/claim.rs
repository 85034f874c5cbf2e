//! A claim, and what is said about it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::dra::answers::InvalidAnswer;
use crate::dra::health::PoolDevice;
use crate::id::{CallId, ClaimUid, ConnectionId, DriverName, PodUid, RecordId};
use crate::node::listed;
use crate::pod::PodName;

/// What people call a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClaimKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A device that the scheduler gave to a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllocatedDevice {
    /// For which of the claim's requests; `request/subrequest` if it was one of several alternatives.
    pub request: String,
    /// Its pool.
    pub pool: String,
    /// Its name, unique within its pool only.
    pub device: String,
    /// Which share of it.
    pub share: Option<String>,
    /// For administration: others may use it too.
    pub admin_access: bool,
}

/// One line of a claim's allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationResult {
    /// The driver.
    pub driver: DriverName,
    /// The device.
    pub device: AllocatedDevice,
    /// Node operations that this device does not need.
    pub skip: Vec<String>,
}

/// A claim as a pod brings it: allocated, checked, and this pod may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// What is allocated, by driver.
    pub drivers: BTreeMap<DriverName, Allocated>,
}

/// What a claim has of one driver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allocated {
    /// The devices, sorted.
    pub devices: Vec<AllocatedDevice>,
    /// Node operations that none of them needs.
    pub skip: BTreeSet<String>,
}

pub(super) const ALL_OPERATIONS: &str = "*";
pub(super) const PREPARE: &str = "NodePrepareResources";
pub(super) const UNPREPARE: &str = "NodeUnprepareResources";

impl AllocatedClaim {
    /// Groups an allocation by driver. An operation is skipped if none of the driver's devices needs it.
    pub fn new(key: ClaimKey, uid: ClaimUid, results: impl IntoIterator<Item = AllocationResult>) -> Self {
        let mut skips: BTreeMap<DriverName, Vec<BTreeSet<String>>> = BTreeMap::new();
        let mut drivers: BTreeMap<DriverName, Allocated> = BTreeMap::new();
        for result in results {
            let skip = skips.entry(result.driver.clone()).or_default();
            skip.push(result.skip.into_iter().collect());
            drivers
                .entry(result.driver)
                .or_default()
                .devices
                .push(result.device);
        }
        for (driver, allocated) in &mut drivers {
            allocated.devices.sort();
            allocated.skip = skipped_by_all(skips.get(driver).map_or(&[][..], Vec::as_slice));
        }
        Self { key, uid, drivers }
    }
}

pub(super) fn skipped_by_all(lists: &[BTreeSet<String>]) -> BTreeSet<String> {
    let all = |operation: &str| {
        let skips = |list: &BTreeSet<String>| list.contains(operation) || list.contains(ALL_OPERATIONS);
        lists.iter().all(skips)
    };
    if all(ALL_OPERATIONS) {
        return lists
            .iter()
            .flatten()
            .filter(|each| *each == ALL_OPERATIONS)
            .cloned()
            .collect();
    }
    let named = lists.iter().flatten().filter(|each| *each != ALL_OPERATIONS);
    named.filter(|each| all(each)).cloned().collect()
}

/// A device that a driver made usable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// For which requests of the claim; for all if there are none.
    pub requests: Vec<String>,
    /// Its pool.
    pub pool: String,
    /// Its name, unique within its pool only.
    pub device: String,
    /// Which share of it.
    pub share: Option<String>,
    /// Qualified CDI device names.
    pub cdi_devices: Vec<String>,
}

/// A claim on record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// While no pod holds it: the pod that it was meant for, or that held it last.
    pub pod: PodUid,
    /// What that pod is called; empty if it is not known.
    pub pod_name: PodName,
    /// What each of its drivers does for it.
    pub preparations: BTreeMap<DriverName, Preparation>,
}

/// What a driver does for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preparation {
    /// What is allocated, sorted; `None` if the claim was imported and nobody has said.
    pub allocated: Option<Vec<AllocatedDevice>>,
    /// Node operations that are not needed.
    pub skip: BTreeSet<String>,
    /// How far it is.
    pub state: PreparationState,
    /// What it made usable, in its own order. Kept through a reboot, until it has answered again.
    pub devices: Vec<PreparedDevice>,
}

/// How far a driver is with a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PreparationState {
    /// It has not said that the claim is prepared.
    Pending,
    /// It has.
    Prepared,
    /// It has undone that.
    Unprepared,
    /// An operator gave up on it: nobody waits. Should the driver come back, it is still asked to unprepare, also if pods
    /// use the claim again without this driver.
    Abandoned,
}

impl Preparation {
    pub(crate) fn is_abandoned(&self) -> bool {
        self.state == PreparationState::Abandoned
    }

    /// Takes the prepared devices of an imported claim for what is allocated, before they are dropped.
    pub(super) fn keep_allocated(&mut self) {
        if self.allocated.is_some() {
            return;
        }
        let named = self.devices.iter().filter(|each| !each.device.is_empty());
        let mut allocated: Vec<AllocatedDevice> = named
            .map(|each| AllocatedDevice {
                request: each.requests.first().cloned().unwrap_or_default(),
                pool: each.pool.clone(),
                device: each.device.clone(),
                share: each.share.clone(),
                admin_access: false,
            })
            .collect();
        allocated.sort();
        self.allocated = Some(allocated);
    }

    /// Returns `true` if the driver is not called to prepare the claim.
    pub(crate) fn skips_prepare(&self) -> bool {
        self.skips(PREPARE)
    }

    pub(super) fn skips(&self, operation: &str) -> bool {
        self.skip.contains(operation) || self.skip.contains(ALL_OPERATIONS)
    }

    /// Whether a device is allocated that an import has not seen prepared. Old files do not name devices.
    pub(super) fn lacks(&self, allocated: &[AllocatedDevice]) -> bool {
        let is_unseen = |each: &AllocatedDevice| {
            let is_it = |known: &PreparedDevice| {
                known.device.is_empty() || (known.pool == each.pool && known.device == each.device)
            };
            !self.devices.iter().any(is_it)
        };
        self.state == PreparationState::Prepared && !self.skips(PREPARE) && allocated.iter().any(is_unseen)
    }
}

impl Claim {
    pub(super) fn new(allocated: &AllocatedClaim, pod: &PodUid, name: &PodName) -> Self {
        let preparation = |(driver, allocated): (&DriverName, &Allocated)| {
            let mut preparation = Preparation {
                allocated: Some(allocated.devices.clone()),
                skip: allocated.skip.clone(),
                state: PreparationState::Pending,
                devices: Vec::new(),
            };
            if preparation.skips(PREPARE) {
                preparation.state = PreparationState::Prepared;
            }
            (driver.clone(), preparation)
        };
        Self {
            key: allocated.key.clone(),
            uid: allocated.uid.clone(),
            pod: pod.clone(),
            pod_name: name.clone(),
            preparations: allocated.drivers.iter().map(preparation).collect(),
        }
    }

    /// A claim as a kubelet's file has it, with the operations that each driver skips and the devices that it is known to
    /// have prepared. What is allocated is not in such a file.
    pub fn imported(
        key: ClaimKey,
        uid: ClaimUid,
        pod: PodUid,
        drivers: impl IntoIterator<Item = (DriverName, BTreeSet<String>, Vec<PreparedDevice>)>,
    ) -> Self {
        let preparation = |(driver, skip, devices): (DriverName, BTreeSet<String>, Vec<PreparedDevice>)| {
            let mut preparation = Preparation {
                allocated: None,
                skip,
                state: PreparationState::Prepared,
                devices,
            };
            if preparation.devices.is_empty() && !preparation.skips(PREPARE) {
                preparation.state = PreparationState::Pending;
            }
            (driver, preparation)
        };
        Self {
            key,
            uid,
            pod,
            pod_name: PodName::default(),
            preparations: drivers.into_iter().map(preparation).collect(),
        }
    }

    /// Takes over from an earlier record of the same claim what is known to be allocated, as far as the devices that are
    /// prepared are among that, and each driver that has not unprepared it, unless this names all devices of it.
    pub fn remember(&mut self, earlier: &Self) {
        for (driver, preparation) in &mut self.preparations {
            let known = earlier.preparations.get(driver);
            let known = known.filter(|known| known.skip == preparation.skip && !known.is_abandoned());
            if let Some(allocated) = known.and_then(|known| known.allocated.as_ref()) {
                let is_allocated = |device: &PreparedDevice| {
                    let mut among = allocated.iter();
                    among.any(|each| each.pool == device.pool && each.device == device.device)
                };
                if preparation.devices.iter().all(is_allocated) && !preparation.lacks(allocated) {
                    preparation.allocated = Some(allocated.clone());
                }
            }
        }
        let is_held = |each: &Preparation| each.state != PreparationState::Unprepared;
        for (driver, known) in earlier.preparations.iter().filter(|(_, each)| is_held(each)) {
            let has_all = self.preparations.get(driver).is_some_and(|preparation| {
                let named: BTreeSet<_> = preparation.exclusive_devices(driver).collect();
                known
                    .exclusive_devices(driver)
                    .all(|device| named.contains(&device))
            });
            if !has_all {
                self.preparations.insert(driver.clone(), known.clone());
            }
        }
    }

    /// Returns `true` if the claim has a device that `other`, a record of the same claim, does not name. Shares and admin
    /// access do not count: not every kubelet's file has them.
    pub fn has_more_than(&self, other: &Self) -> bool {
        let named = other.named_devices().collect::<BTreeSet<_>>();
        self.named_devices().any(|device| !named.contains(&device))
    }

    /// Returns `true` if, for one driver, this record and another one of the same claim each have a device that the other
    /// does not name.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        self.preparations.keys().any(|driver| {
            let of_driver = |claim: &Self| -> BTreeSet<(String, String)> {
                let devices = claim.named_devices().filter(|(each, ..)| *each == driver);
                devices
                    .map(|(_, pool, device)| (pool.into(), device.into()))
                    .collect()
            };
            let (ours, theirs) = (of_driver(self), of_driver(other));
            !ours.is_subset(&theirs) && !theirs.is_subset(&ours)
        })
    }

    fn named_devices(&self) -> impl Iterator<Item = (&DriverName, &str, &str)> {
        let preparations = self.preparations.iter();
        let held = preparations.filter(|(_, each)| each.state != PreparationState::Unprepared);
        held.flat_map(|(driver, each)| {
            let allocated = each.allocated.iter().flatten();
            let allocated = allocated.map(|device| (device.pool.as_str(), device.device.as_str()));
            let prepared = each.devices.iter();
            let prepared = prepared.map(|device| (device.pool.as_str(), device.device.as_str()));
            let named = allocated.chain(prepared).filter(|(_, device)| !device.is_empty());
            named.map(move |(pool, device)| (driver, pool, device))
        })
    }

    /// Whether every driver has answered. Those that were given up on have nothing to do with whoever uses the claim now.
    pub fn is_prepared(&self) -> bool {
        let prepared = |each: &Preparation| each.state == PreparationState::Prepared || each.is_abandoned();
        self.preparations.values().all(prepared)
    }

    /// The drivers that were given up on, and have not unprepared it.
    pub fn abandoned(&self) -> impl Iterator<Item = &DriverName> {
        let preparations = self.preparations.iter();
        preparations
            .filter(|(_, each)| each.is_abandoned())
            .map(|(driver, _)| driver)
    }

    pub(super) fn is_abandoned_at(&self, driver: &DriverName) -> bool {
        self.preparations
            .get(driver)
            .is_some_and(Preparation::is_abandoned)
    }

    /// The others.
    pub(crate) fn used_drivers(&self) -> impl Iterator<Item = &DriverName> {
        let preparations = self.preparations.iter();
        preparations
            .filter(|(_, each)| !each.is_abandoned())
            .map(|(driver, _)| driver)
    }

    /// The machine was booted since this was recorded: what was prepared must be prepared again. Whether that
    /// changed anything.
    pub fn rebooted(&mut self) -> bool {
        let mut changed = false;
        for preparation in self.preparations.values_mut() {
            if preparation.state == PreparationState::Prepared && !preparation.skips(PREPARE) {
                preparation.state = PreparationState::Pending;
                changed = true;
            }
        }
        changed
    }

    /// Whether a pod that brings the claim means the same allocation. Of an imported claim only the devices are
    /// known that it was prepared with; if more are allocated, its driver is called again ([`Preparation::lacks`]).
    pub(super) fn matches(&self, other: &AllocatedClaim) -> bool {
        let same = |(driver, preparation): (&DriverName, &Preparation)| {
            other.drivers.get(driver).is_some_and(|allocated| {
                let is_allocated = |known: &PreparedDevice| {
                    let is_it =
                        |each: &AllocatedDevice| each.pool == known.pool && each.device == known.device;
                    known.device.is_empty() || allocated.devices.iter().any(is_it)
                };
                let devices = match &preparation.allocated {
                    Some(devices) => *devices == allocated.devices,
                    None => preparation.devices.iter().all(is_allocated),
                };
                devices && preparation.skip == allocated.skip
            })
        };
        let in_use = || self.preparations.iter().filter(|(_, each)| !each.is_abandoned());
        self.key == other.key && in_use().count() == other.drivers.len() && in_use().all(same)
    }
}

/// Why a driver's part of a claim is not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The driver could not.
    #[error("driver {driver} reports for ResourceClaim {claim}: {reason}")]
    Driver {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// What it says.
        reason: String,
    },
    /// There was no answer.
    #[error("driver {driver}: {reason}")]
    Call {
        /// The driver.
        driver: DriverName,
        /// What happened.
        reason: String,
    },
    /// The answer makes no sense.
    #[error(transparent)]
    Invalid(#[from] InvalidAnswer),
}

impl Failure {
    /// The claim, unless the failure is about all claims of a call.
    pub fn claim(&self) -> Option<&ClaimKey> {
        match self {
            Self::Driver { claim, .. } => Some(claim),
            Self::Call { .. } => None,
            Self::Invalid(answer) => answer.claim(),
        }
    }
}

/// Why the record of a claim is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotForgotten {
    /// There is none.
    #[error("no such claim on this node")]
    Unknown,
    /// Pods hold it, or are being admitted with it.
    #[error("ResourceClaim {claim} is in use; remove the pods first{}", listed(": ", .pods))]
    Held {
        /// The claim.
        claim: ClaimKey,
        /// The pods.
        pods: Vec<PodUid>,
    },
    /// Drivers have something to do for it, and nobody gave up on them.
    #[error(
        "ResourceClaim {claim} is being unprepared; abandon first the drivers that are gone for good{}",
        listed(": ", .drivers)
    )]
    NotAbandoned {
        /// The claim.
        claim: ClaimKey,
        /// The drivers.
        drivers: Vec<DriverName>,
    },
    /// Its driver is back and is being asked to unprepare it, or it is being written down.
    #[error("ResourceClaim {claim} is being worked on; see what becomes of it, and try again")]
    InFlight {
        /// The claim.
        claim: ClaimKey,
    },
}

/// What is asked of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// `NodePrepareResources`.
    Prepare,
    /// `NodeUnprepareResources`.
    Unprepare,
}

/// A call to make now. It ends with [`crate::Node::prepared`], [`crate::Node::unprepared`] or
/// [`crate::Node::call_failed`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Which one.
    pub id: CallId,
    /// What is asked.
    pub operation: Operation,
    /// Whose plugin.
    pub driver: DriverName,
    /// Which of them.
    pub connection: ConnectionId,
    /// For which claims.
    pub claims: Vec<(ClaimUid, ClaimKey)>,
}

/// Records that must be on disk before a driver is called, to be written in one piece.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Intent {
    /// The claims that are to be prepared.
    pub put: Vec<Claim>,
    /// Claims that are unprepared and whose devices these claims get.
    pub delete: Vec<ClaimUid>,
}

impl Intent {
    /// Returns `true` if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.put.is_empty()
    }
}

/// Changes of claims that nobody waits for, to be written in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// To say how it ended.
    pub id: RecordId,
    /// What is different now.
    pub put: Vec<Claim>,
    /// What is to be deleted.
    pub delete: Vec<ClaimUid>,
}

impl PreparedDevice {
    pub(crate) fn is_at(&self, place: &PoolDevice) -> bool {
        self.pool == place.pool && self.device == place.device
    }

    /// What it takes, roughly.
    pub fn memory(&self) -> usize {
        const ENTRY: usize = 64;
        let names = self.requests.iter().chain(&self.cdi_devices);
        let names: usize = names.map(|name| name.len() + ENTRY).sum();
        ENTRY + self.pool.len() + self.device.len() + self.share.as_ref().map_or(0, String::len) + names
    }

    /// Where it is.
    pub fn place(&self) -> PoolDevice {
        PoolDevice {
            pool: self.pool.clone(),
            device: self.device.clone(),
        }
    }
}
