//! Read-only queries about drivers and claims.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::fmt;

use super::answers::base;
use super::claims::{
    Claim, ClaimKey, DeviceShare, Entry, Failure, Preparation, PreparationState, PreparedDevice, Task,
};
use super::drivers::{Driver, Refused, WIPE_DELAY_MS};
use super::health::{DeviceHealth, PoolDevice};
use crate::device_plugin::inventory::LastPlugin;
use crate::id::{ClaimUid, ConnectionId, DriverName, Moment, PodUid, ReservationId};
use crate::node::Node;
use crate::pod::PodName;

/// A driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverView {
    /// Its name.
    pub name: DriverName,
    /// Its plugins, oldest first.
    pub plugins: Vec<DriverPluginView>,
    /// When the last connection was lost, if none is connected.
    pub unusable_since: Option<Moment>,
    /// The plugin that left last.
    pub last: Option<LastPlugin>,
}

/// A registered plugin of a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverPluginView {
    /// Its connection.
    pub connection: ConnectionId,
    /// Its socket.
    pub endpoint: String,
    /// The user ID of its process.
    pub uid: u32,
    /// The gRPC service that is used.
    pub service: String,
    /// The reason for this service.
    pub service_reason: String,
    /// The gRPC service of its health reports.
    pub health_service: Option<String>,
    /// The time of the registration.
    pub registered_at: Moment,
    /// `true` if it is connected.
    pub connected: bool,
    /// `true` if it is the plugin to call.
    pub serving: bool,
}

/// The phase of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// A pod uses it, and not every driver has prepared it.
    Preparing,
    /// Every driver has prepared it.
    Prepared,
    /// No pod uses it, and a driver has not unprepared it.
    Unpreparing,
    /// No pod uses it, and only abandoned drivers have not unprepared it.
    Abandoned,
    /// Every driver has unprepared it, and its record is to be deleted. It does not block other claims.
    Unprepared,
}

/// A claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimView<'a> {
    /// The claim in memory, which may be newer than its record.
    pub claim: &'a Claim,
    /// Its phase.
    pub phase: Phase,
    /// The pods that hold it or are being admitted with it.
    pub pods: Vec<PodUid>,
    /// The drivers that it waits for.
    pub waits: Vec<Wait>,
}

/// A driver that a claim waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The claim.
    pub claim: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// The driver.
    pub driver: DriverName,
    /// The state of the driver's work.
    pub reason: Reason,
    /// The last failure.
    pub failure: Option<Failure>,
    /// When the driver's last connection was lost, for [`Reason::NoDriver`].
    pub since: Option<Moment>,
}

impl Wait {
    /// Returns the text, with `since` after "is not connected". The caller formats the time.
    pub fn describe(&self, since: &str) -> String {
        let Self { claim, driver, .. } = self;
        match (&self.failure, self.reason) {
            (Some(Failure::Call { reason, .. }), Reason::Due(_)) => {
                return format!("ResourceClaim {claim}: driver {driver}: {reason}");
            }
            (Some(failure), Reason::Due(_)) => return failure.to_string(),
            _ => {}
        }
        let mut text = match self.reason {
            Reason::NotWritten => format!("ResourceClaim {claim} is not on disk yet"),
            Reason::NoDriver => format!("ResourceClaim {claim}: DRA driver {driver} is not connected{since}"),
            Reason::Calling => format!("ResourceClaim {claim}: DRA driver {driver} has not answered"),
            Reason::Due(_) => format!("ResourceClaim {claim}: DRA driver {driver} is to be called"),
        };
        if let Some(failure) = &self.failure {
            text.push_str(&format!(" (before that: {failure})"));
        }
        text
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(""))
    }
}

/// Returns the first 8 waits and the number of others, as text.
pub fn listed(waits: &[Wait]) -> String {
    listed_as(waits, Wait::to_string)
}

/// Returns the text of [`listed`] with another text for each wait.
pub fn listed_as(waits: &[Wait], describe: impl Fn(&Wait) -> String) -> String {
    const MAX: usize = 8;
    let mut text = String::new();
    for (index, wait) in waits.iter().take(MAX).enumerate() {
        if index > 0 {
            text.push_str("; ");
        }
        text.push_str(&describe(wait));
    }
    if waits.len() > MAX {
        text.push_str(&format!("; and {} more", waits.len() - MAX));
    }
    text
}

/// Reasons why a driver has not finished its work for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The intent is not on disk yet.
    NotWritten,
    /// None of its plugins is connected.
    NoDriver,
    /// A call is in flight.
    Calling,
    /// A call is due at this time, which is in the future if the last call failed.
    Due(Moment),
}

/// The health of a device that a container uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedDeviceView {
    /// The name of the claim within the pod.
    pub claim: String,
    /// The request that the container names.
    pub request: Option<String>,
    /// The claim's name.
    pub key: ClaimKey,
    /// The claim's UID.
    pub uid: ClaimUid,
    /// The driver.
    pub driver: DriverName,
    /// The device as the driver prepared it.
    pub device: PreparedDevice,
    /// Its health.
    pub health: DeviceHealth,
    /// The reason for its health.
    pub message: String,
}

impl Node {
    /// Returns all drivers that have registered since the start, by name.
    pub fn drivers(&self) -> Vec<DriverView> {
        let drivers = self.dra.drivers.drivers.iter();
        drivers.map(|(name, driver)| driver_view(name, driver)).collect()
    }

    /// Returns a driver.
    pub fn driver(&self, name: &DriverName) -> Option<DriverView> {
        let driver = self.dra.drivers.drivers.get(name)?;
        Some(driver_view(name, driver))
    }

    /// Returns refused plugins of drivers by socket.
    pub fn refused_drivers(&self) -> impl Iterator<Item = (&str, &Refused)> {
        let refused = self.dra.drivers.refused.iter();
        refused.map(|(socket, refused)| (socket.as_str(), refused))
    }

    /// Returns the plugin to call for a driver.
    pub fn serving_driver(&self, name: &DriverName) -> Option<ConnectionId> {
        self.dra.drivers.serving(name)
    }

    /// Returns the time when slices of a driver are outdated; `None` while a plugin is connected. The driver has had slices
    /// since `seen`.
    pub fn wipe_at(&self, driver: &DriverName, seen: Moment) -> Option<Moment> {
        let since = match self.dra.drivers.drivers.get(driver) {
            Some(driver) => driver.unusable_since?.max(seen),
            None => seen,
        };
        Some(since.after(WIPE_DELAY_MS))
    }

    /// Returns all claims, by UID.
    pub fn claims(&self) -> impl Iterator<Item = ClaimView<'_>> {
        self.dra
            .claims
            .entries
            .values()
            .map(|entry| self.claim_view(entry))
    }

    /// Returns the claims that have a record on disk, by UID.
    pub fn recorded_claims(&self) -> impl Iterator<Item = &Claim> {
        let entries = self.dra.claims.entries.values();
        entries.filter(|entry| entry.on_disk).map(|entry| &entry.claim)
    }

    /// Returns a claim.
    pub fn claim(&self, uid: &ClaimUid) -> Option<ClaimView<'_>> {
        Some(self.claim_view(self.dra.claims.entries.get(uid)?))
    }

    /// Returns a claim by name.
    pub fn claim_named(&self, key: &ClaimKey) -> Option<ClaimView<'_>> {
        self.claim(self.dra.claims.by_key.get(key)?)
    }

    /// Returns devices that several claims hold, with the claims. Only imported or restored records cause this.
    pub fn shared_claim_devices(&self) -> Vec<(DeviceShare, Vec<ClaimView<'_>>)> {
        let shared = self.dra.claims.shared_devices();
        shared
            .map(|(device, claims)| {
                let claims = claims.into_iter().map(|entry| self.claim_view(entry));
                (device, claims.collect())
            })
            .collect()
    }

    fn claim_view<'a>(&'a self, entry: &'a Entry) -> ClaimView<'a> {
        ClaimView {
            claim: &entry.claim,
            phase: entry.phase(),
            pods: entry.pods(),
            waits: self.waits(entry),
        }
    }

    /// Returns the drivers that a claim waits for: to prepare it, or to unprepare it if it is unused.
    fn waits(&self, entry: &Entry) -> Vec<Wait> {
        let pending = |driver: &&DriverName| {
            let preparation = entry.claim.preparations.get(*driver);
            preparation.is_some_and(|each| each.state == PreparationState::Pending)
        };
        let drivers: Vec<&DriverName> = if entry.is_unused() {
            entry.blocking().collect()
        } else if self.dra.claims.needs_intent(entry) {
            entry.claim.used_drivers().collect()
        } else {
            entry.claim.preparations.keys().filter(pending).collect()
        };
        let wait = |driver: &DriverName| {
            let task = entry.tasks.get(driver);
            let reason = if !entry.is_intended {
                Reason::NotWritten
            } else if task.is_some_and(Task::is_busy) {
                Reason::Calling
            } else if self.dra.drivers.serving(driver).is_none() {
                Reason::NoDriver
            } else {
                Reason::Due(task.map_or(Moment::default(), |task| task.retry_at))
            };
            Wait {
                claim: entry.claim.key.clone(),
                uid: entry.claim.uid.clone(),
                driver: driver.clone(),
                reason,
                failure: task.and_then(|task| task.failure.clone()),
                since: match reason {
                    Reason::NoDriver => self.dra.drivers.unusable_since(driver),
                    _ => None,
                },
            }
        };
        drivers.into_iter().map(wait).collect()
    }

    /// Returns the drivers and claims that an admission waits for before it can be committed.
    pub fn waiting_for(&self, id: ReservationId) -> Vec<Wait> {
        let reservation = self.ledger.reservations.get(&id);
        let uids = reservation
            .into_iter()
            .flat_map(|reservation| &reservation.claims);
        let entries = uids.filter_map(|uid| self.dra.claims.entries.get(uid));
        entries.flat_map(|entry| self.waits(entry)).collect()
    }

    /// Returns `true` if the pod already holds all devices and claims of the admission, so that only its record changes.
    pub fn has_everything(&self, id: ReservationId) -> bool {
        let Some(reservation) = self.ledger.reservations.get(&id) else {
            return false;
        };
        let held = self.ledger.pods.get(&reservation.pod).map(|pod| pod.claim_uids());
        let holds = |held: Vec<ClaimUid>| reservation.claims.iter().all(|uid| held.contains(uid));
        reservation.grants.is_empty() && held.is_some_and(holds) && self.waiting_for(id).is_empty()
    }

    /// Returns the drivers and claims that a recorded pod waits for before its containers can start. It is empty unless the
    /// machine was rebooted.
    pub fn unprepared_claims(&self, pod: &PodUid) -> Vec<Wait> {
        let uids = self.ledger.pods.get(pod).map(|pod| pod.claim_uids());
        let uids = uids.unwrap_or_default();
        let entries = uids.iter().filter_map(|uid| self.dra.claims.entries.get(uid));
        entries.flat_map(|entry| self.waits(entry)).collect()
    }

    /// Returns the drivers and claims that the removal of a pod waits for, without abandoned drivers.
    pub fn pending_unprepare(&self, pod: &PodUid) -> Vec<Wait> {
        let uids = self.dra.claims.left.get(pod).into_iter().flatten();
        let entries = uids.filter_map(|uid| self.dra.claims.entries.get(uid));
        entries.flat_map(|entry| self.waits(entry)).collect()
    }

    /// Returns the name of a pod that is on record, is being admitted, or was the last to leave a claim.
    pub fn name_of(&self, pod: &PodUid) -> Option<&PodName> {
        let is_known = |name: &&PodName| !name.name.is_empty();
        let on_record = self.ledger.pods.get(pod).map(|pod| &pod.name);
        let admitted = || {
            let id = self.ledger.in_flight.get(pod)?;
            self.ledger.reservations.get(id).map(|each| &each.name)
        };
        let gone = || {
            let left = self.dra.claims.left.get(pod)?.iter();
            let mut left = left.filter_map(|uid| self.dra.claims.entries.get(uid));
            left.find_map(|entry| Some(&entry.claim.pod_name).filter(is_known))
        };
        on_record.or_else(admitted).filter(is_known).or_else(gone)
    }

    /// Returns `true` if the pod was the last to leave a claim that is not unprepared.
    pub fn has_left(&self, pod: &PodUid) -> bool {
        let mut left = self.dra.claims.left.get(pod).into_iter().flatten();
        left.any(|uid| {
            let entry = self.dra.claims.entries.get(uid);
            entry.is_some_and(|entry| entry.phase() != Phase::Unprepared)
        })
    }

    /// Returns `true` if a pod may need unprepare calls: it holds claims, is being admitted with claims, or was the last to
    /// leave claims that are not unprepared.
    pub fn might_need_unprepare(&self, pod: &PodUid) -> bool {
        let holds = self
            .ledger
            .pods
            .get(pod)
            .is_some_and(|pod| !pod.claims.is_empty());
        let reservation = self.ledger.in_flight.get(pod);
        let reservation = reservation.and_then(|id| self.ledger.reservations.get(id));
        let joins = reservation.is_some_and(|reservation| !reservation.claims.is_empty());
        holds || joins || !self.pending_unprepare(pod).is_empty()
    }

    /// Returns the number of prepared claims that pods hold, by driver and in total.
    pub fn claims_in_use(&self) -> (BTreeMap<DriverName, usize>, usize) {
        let in_use = &self.dra.claims.in_use;
        (in_use.by_driver.clone(), in_use.all)
    }

    /// Returns the memory of a driver's prepared devices if these were its devices of the claim, in bytes.
    pub fn memory_with(&self, driver: &DriverName, claim: &ClaimUid, devices: &[PreparedDevice]) -> usize {
        self.dra.claims.memory_with(driver, claim, devices)
    }

    /// Returns the number of claims by phase, and the number of claims being prepared that wait for a driver that is not
    /// connected.
    pub fn claim_counts(&self) -> (BTreeMap<Phase, usize>, usize) {
        let claims = &self.dra.claims;
        let is_away = |(driver, preparation): (&DriverName, &Preparation)| {
            preparation.state == PreparationState::Pending && self.dra.drivers.serving(driver).is_none()
        };
        let preparing = claims.preparing.iter().filter_map(|uid| claims.entries.get(uid));
        let waiting = preparing.filter(|entry| entry.claim.preparations.iter().any(is_away));
        (claims.phases.clone(), waiting.count())
    }

    /// Returns the number of containers that use a device that the driver reports as unhealthy.
    pub fn containers_with_unhealthy_devices(&self, driver: &DriverName) -> usize {
        let known = self.dra.drivers.drivers.get(driver);
        let mut containers = BTreeSet::new();
        for device in known.into_iter().flat_map(|known| known.health.unhealthy()) {
            let claims = self.dra.claims.using(driver, device);
            let pods = claims.flat_map(|entry| &entry.holders);
            for pod in pods.filter_map(|pod| self.ledger.pods.get(pod)) {
                let uses_it = |container: &str| {
                    let mut used = self.used_devices(&pod.uid, container);
                    used.any(|(_, _, of, used)| of == driver && used.is_at(device))
                };
                let named = pod.claim_uses.iter().map(|each| each.container.as_str());
                containers.extend(named.filter(|each| uses_it(each)).map(|each| (&pod.uid, each)));
            }
        }
        containers.len()
    }

    /// Returns the number of reported devices of a driver by health. Expired reports count until [`Node::tick`].
    pub fn health_counts(&self, driver: &DriverName) -> BTreeMap<DeviceHealth, usize> {
        let driver = self.dra.drivers.drivers.get(driver);
        driver.map_or_else(BTreeMap::new, |driver| driver.health.counts().clone())
    }

    /// Returns the next time when [`Node::due_calls`] has a call.
    pub fn next_call(&self) -> Option<Moment> {
        self.dra.claims.next_retry(&self.dra.drivers)
    }

    /// Returns `true` if [`Node::begin_record`] has records to write.
    pub fn has_unrecorded(&self) -> bool {
        self.dra.claims.has_unrecorded()
    }

    /// Returns the next time when [`Node::tick`] removes a report.
    pub fn next_expiry(&self) -> Option<Moment> {
        let drivers = self.dra.drivers.drivers.values();
        drivers.filter_map(|driver| driver.health.next_expiry()).min()
    }

    /// Returns the health of a device, and the reason.
    pub fn device_health(
        &self,
        driver: &DriverName,
        device: &PoolDevice,
        now: Moment,
    ) -> (DeviceHealth, &str) {
        let driver = self.dra.drivers.drivers.get(driver);
        driver.map_or((DeviceHealth::Unknown, ""), |driver| {
            driver.health.of(device, now)
        })
    }

    /// Returns the devices of claims that a container uses, in the order in which it names them.
    pub fn claimed_devices(&self, pod: &PodUid, container: &str, now: Moment) -> Vec<ClaimedDeviceView> {
        let used = self.used_devices(pod, container);
        let view = |(usage, claim, driver, device): Used<'_>| {
            let (health, message) = self.device_health(driver, &device.pool_device(), now);
            ClaimedDeviceView {
                claim: usage.claim.clone(),
                request: usage.request.clone(),
                key: claim.key.clone(),
                uid: claim.uid.clone(),
                driver: driver.clone(),
                device: device.clone(),
                health,
                message: message.into(),
            }
        };
        used.map(view).collect()
    }

    /// Returns the CDI devices of the requests that a container names, each once. They are ordered by the container's
    /// references, then by driver, then by the driver's order.
    pub fn cdi_devices(&self, pod: &PodUid, container: &str) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let devices = self.used_devices(pod, container).map(|(.., device)| device);
        let names = devices.flat_map(|device| &device.cdi_devices);
        names.filter(|name| seen.insert(*name)).cloned().collect()
    }

    fn used_devices<'a>(&'a self, pod: &PodUid, container: &'a str) -> impl Iterator<Item = Used<'a>> {
        let pod = self.ledger.pods.get(pod).into_iter();
        let uses = pod.flat_map(move |pod| pod.claim_uses_of(container));
        uses.flat_map(|(usage, claim)| {
            let entry = self.dra.claims.entries.get(&claim.uid).into_iter();
            let preparations = entry.flat_map(|entry| &entry.claim.preparations);
            let preparations = preparations.filter(|(_, each)| !each.is_abandoned());
            let devices =
                preparations.flat_map(|(driver, each)| each.devices.iter().map(move |each| (driver, each)));
            let is_named = |device: &PreparedDevice| {
                let names = |request: &String| device.requests.iter().any(|each| base(each) == request);
                device.requests.is_empty() || usage.request.as_ref().is_none_or(names)
            };
            devices
                .filter(move |(_, device)| is_named(device))
                .map(move |(driver, device)| (usage, claim, driver, device))
        })
    }
}

type Used<'a> = (
    &'a crate::pod::ClaimUse,
    &'a crate::pod::PodClaim,
    &'a DriverName,
    &'a PreparedDevice,
);

fn driver_view(name: &DriverName, driver: &Driver) -> DriverView {
    let serving = driver.serving().map(|(id, _)| id);
    let plugins = driver.plugins.iter().map(|(id, plugin)| DriverPluginView {
        connection: *id,
        endpoint: plugin.endpoint.clone(),
        uid: plugin.process.uid,
        service: plugin.service.clone(),
        service_reason: plugin.service_reason.clone(),
        health_service: plugin.health_service.clone(),
        registered_at: plugin.registered_at,
        connected: plugin.connected,
        serving: serving == Some(*id),
    });
    DriverView {
        name: name.clone(),
        plugins: plugins.collect(),
        unusable_since: driver.unusable_since,
        last: driver.last.clone(),
    }
}
