//! The whole node: facts and two-phase operations.

use alloc::boxed::Box;
use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::device_plugin::inventory::{FORGOTTEN_AFTER_MS, Last, MOST_IDLE, Offer, Plugin, Resource};
use crate::device_plugin::ledger::{Commit, Ledger, Reservation};
use crate::device_plugin::list::DeviceList;
use crate::device_plugin::rejections::{Rejection, Rejections};
use crate::device_plugin::run_options::Answer;
use crate::dra::Dra;
use crate::dra::claims::{Claim, ClaimKey, DeviceInUse, HolderState, Reallocation};
use crate::dra::view::{Wait, listed as waits_listed};
use crate::id::{
    ClaimUid, ConnectionId, ContainerName, DeviceId, DriverName, Moment, PodUid, ReservationId, ResourceName,
};
use crate::import::Importing;
use crate::plan::{claim_uses, pod_claims};
use crate::pod::{Allocation, Pod, PodMetadata, PodName, PodRequest};
use crate::spec_change::SpecChange;

/// What a plugin advises: for a container (by its place in the request) and a resource, devices in the order of
/// preference.
pub type Advice = BTreeMap<(usize, ResourceName), Vec<DeviceId>>;

/// A question to put to a plugin before devices are chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The container's place in the request.
    pub container: usize,
    /// The resource.
    pub resource: ResourceName,
    /// Whom to ask.
    pub connection: ConnectionId,
    /// The devices to choose from, sorted.
    pub available: Vec<DeviceId>,
    /// Of these, the ones that the container gets in any case.
    pub must_include: Vec<DeviceId>,
    /// How many it gets in all.
    pub size: usize,
}

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
        last: Option<Last>,
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
    Gone(Last),
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

fn last_seen(last: Option<&Last>) -> String {
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

/// What durable records say at start.
#[derive(Debug, Clone, Default)]
pub struct Restored {
    /// Pods with their allocations, by UID.
    pub pods: BTreeMap<PodUid, Pod>,
    /// Resources that plugins have served, and the last plugin of each.
    pub resources: BTreeMap<ResourceName, Option<Last>>,
    /// Claims. If the machine was booted since they were recorded, [`Claim::rebooted`] must have been called.
    pub claims: Vec<Claim>,
}

/// The node.
#[derive(Debug, Default)]
pub struct Node {
    pub(crate) resources: BTreeMap<ResourceName, Resource>,
    pub(crate) connections: BTreeMap<ConnectionId, ResourceName>,
    pub(crate) rejections: Rejections,
    pub(crate) ledger: Ledger,
    pub(crate) dra: Dra,
    pub(crate) blocked: Vec<Blocked>,
    pub(crate) importing: Importing,
    pub(crate) next_connection: u64,
    next_reservation: u64,
    next_list: u64,
    next_admission: u64,
    pub(crate) changes: u64,
    resource_changes: u64,
}

impl Node {
    /// A node as durable records describe it: allocations whole, resources known but without devices.
    pub fn restore(restored: Restored) -> Self {
        let mut node = Self::default();
        for (name, last) in restored.resources {
            node.resources.insert(
                name,
                Resource {
                    last,
                    ..Resource::default()
                },
            );
        }
        for claim in restored.claims {
            node.dra.claims.put(claim);
        }
        for pod in restored.pods.values() {
            for uid in pod.claim_uids() {
                node.dra.claims.hold(&pod.uid, &uid);
            }
        }
        node.ledger = Ledger::restore(restored.pods);
        node.changes += 1;
        node
    }

    /// Counts admissions, so that a list of pods can be told from those that were admitted while it was made: see
    /// [`Node::orphans`].
    pub fn admissions(&self) -> u64 {
        self.next_admission
    }

    /// Counts every change, so that those who wait know when to look again.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Counts changes of [`Node::known_resources`], and those of plugins that are connected.
    pub fn resource_changes(&self) -> u64 {
        self.resource_changes
    }

    /// Admits nobody until `unblock`. There may be several reasons.
    pub fn block(&mut self, reason: Blocked) {
        self.changes += 1;
        self.blocked.push(reason);
    }

    /// These reasons are no more. Without any, pods are admitted again.
    pub fn unblock(&mut self, is_over: impl Fn(&Blocked) -> bool) {
        self.changes += 1;
        self.blocked.retain(|reason| !is_over(reason));
    }

    // ---- facts

    /// A plugin answers. A plugin of the same resource and endpoint is replaced: its connection is returned, and
    /// whatever still comes from it changes nothing. Another user does not get in beside a connected plugin, nor
    /// in its place, unless that is allowed.
    pub fn plugin_connected(
        &mut self,
        offer: Offer,
        now: Moment,
    ) -> Result<(ConnectionId, Option<ConnectionId>), ConnectError> {
        let known = self.resources.get(&offer.resource);
        let mut plugins = known.into_iter().flat_map(|resource| resource.plugins.values());
        let other = plugins.find(|plugin| plugin.uid != offer.uid);
        if let (Some(other), false) = (other, offer.may_share) {
            let (first, endpoint, uid) = (other.uid, other.endpoint.clone(), offer.uid);
            return Err(ConnectError::OtherUser {
                resource: offer.resource,
                first,
                endpoint,
                uid,
            });
        }
        let same_place = |plugin: &Plugin| plugin.endpoint == offer.endpoint;
        let resource = self.resources.entry(offer.resource.clone()).or_default();
        let replaced = resource
            .plugins
            .iter()
            .find(|(_, plugin)| same_place(plugin))
            .map(|(id, _)| *id);
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        self.rejections.remove(offer.resource.as_str(), &offer.endpoint);
        let Offer {
            resource: name,
            endpoint,
            uid,
            options,
            ..
        } = offer;
        resource.plugins.insert(
            id,
            Plugin {
                endpoint,
                uid,
                options,
                connected_at: now,
                ready: false,
                list: None,
            },
        );
        self.connections.insert(id, name);
        self.changes += 1;
        self.resource_changes += 1;
        if let Some(replaced) = replaced {
            self.connection_lost(replaced, now);
        }
        Ok((id, replaced))
    }

    /// A plugin asked to register and was rejected. Returns whether that is news: the same rejection again is not.
    pub fn plugin_rejected(&mut self, rejection: Rejection, now: Moment) -> bool {
        let is_news = self.rejections.insert(rejection, now);
        self.changes += u64::from(is_news);
        is_news
    }

    /// A plugin says which devices there are. Whether that changed anything: a connection that has been replaced
    /// or lost has no say, and neither has one that repeats itself.
    ///
    /// A long list takes a while to compare and to free. Whoever has many waiting for the node compares it with
    /// [`Node::lists_before`], hands over the one that is equal, and keeps the others until the node is free again.
    pub fn devices_listed(&mut self, connection: ConnectionId, list: impl Into<Arc<DeviceList>>) -> bool {
        let list = list.into();
        let Some((name, resource)) = self.resource_of(connection) else {
            return false;
        };
        let Some(plugin) = resource.plugins.get_mut(&connection) else {
            return false;
        };
        let is_same = plugin
            .list
            .as_ref()
            .is_some_and(|(_, last)| Arc::ptr_eq(last, &list) || *last == list);
        if is_same && resource.in_force == Some(connection) {
            return false;
        }
        let number = self.next_list;
        self.next_list += 1;
        if let Some(resource) = self.resources.get_mut(&name) {
            if let Some(plugin) = resource.plugins.get_mut(&connection) {
                plugin.ready |= list.healthy().count() > 0;
                plugin.list = Some((number, list));
            }
            resource.settle();
            self.ledger.list_changed(&name, resource);
        }
        self.changes += 1;
        true
    }

    /// Whether this connection is one still.
    pub fn is_connected(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    /// The lists that the next one of this connection may take the place of: the plugin's last one, and the one
    /// that counts.
    pub fn lists_before(&self, connection: ConnectionId) -> Vec<Arc<DeviceList>> {
        let name = self.connections.get(&connection);
        let Some(resource) = name.and_then(|name| self.resources.get(name)) else {
            return Vec::new();
        };
        let own = resource.plugins.get(&connection);
        let own = own.and_then(|plugin| plugin.list.as_ref().map(|(_, list)| list));
        own.into_iter().chain([&resource.list]).cloned().collect()
    }

    /// A plugin answers no longer. Whether that was news.
    pub fn connection_lost(&mut self, connection: ConnectionId, now: Moment) -> bool {
        let Some(name) = self.connections.remove(&connection) else {
            return false;
        };
        let Some(resource) = self.resources.get_mut(&name) else {
            return false;
        };
        let Some(plugin) = resource.plugins.remove(&connection) else {
            return false;
        };
        resource.last = Some(Last {
            endpoint: plugin.endpoint,
            gone_since: now,
        });
        if resource.settle() {
            if resource.in_force.is_none() {
                resource.idle_since = Some(now);
            }
            self.ledger.list_changed(&name, resource);
        }
        self.changes += 1;
        self.resource_changes += 1;
        self.limit_idle();
        true
    }

    /// These resources exist, whether a plugin serves them or not.
    pub fn know(&mut self, names: impl IntoIterator<Item = ResourceName>) {
        for name in names {
            self.resources.entry(name).or_default();
            self.changes += 1;
            self.resource_changes += 1;
        }
        self.limit_idle();
    }

    /// Forgets resources that no plugin has served for a day and no pod holds. A resource that came with a kubelet's
    /// file, and that no plugin has served since, is forgotten a day after the first call that finds it unused.
    pub fn forget_idle(&mut self, now: Moment) {
        let mut old = Vec::new();
        let idle: BTreeSet<ResourceName> = self.idle().into_iter().map(|(_, name)| name.clone()).collect();
        for (name, resource) in &mut self.resources {
            if !idle.contains(name) {
                resource.unused_since = None;
                continue;
            }
            let since = match &resource.last {
                Some(last) => last.gone_since,
                None => *resource.unused_since.get_or_insert(now),
            };
            if now.since(since) >= FORGOTTEN_AFTER_MS {
                old.push(name.clone());
            }
        }
        self.forget(old);
    }

    /// Whoever may register can invent names: those that were left first are forgotten first.
    fn limit_idle(&mut self) {
        if self.resources.len() <= MOST_IDLE {
            return;
        }
        let mut idle = self.idle();
        let surplus = idle.len().saturating_sub(MOST_IDLE);
        idle.sort();
        let oldest = idle.into_iter().take(surplus);
        let oldest = oldest.map(|(_, name)| name.clone()).collect();
        self.forget(oldest);
    }

    /// Resources that nobody serves and nobody holds, and since when no plugin is there.
    fn idle(&self) -> Vec<(Option<Moment>, &ResourceName)> {
        let is_idle = |(name, resource): &(&ResourceName, &Resource)| {
            resource.plugins.is_empty() && !self.ledger.held.contains_key(*name)
        };
        let idle = self.resources.iter().filter(is_idle);
        idle.map(|(name, resource)| (resource.last.as_ref().map(|last| last.gone_since), name))
            .collect()
    }

    fn forget(&mut self, names: Vec<ResourceName>) {
        for name in names {
            self.resources.remove(&name);
            self.ledger.free.remove(&name);
            self.changes += 1;
            self.resource_changes += 1;
        }
    }

    /// The grace period of every plugin whose period ends by then is over, whatever the clock of those who ask says.
    /// Whether that was news.
    pub fn grace_ended(&mut self, end: Moment) -> bool {
        let mut news = false;
        for resource in self.resources.values_mut() {
            if resource.grace_end().is_some_and(|own| own <= end) {
                resource.idle_since = None;
                news = true;
            }
        }
        self.changes += u64::from(news);
        news
    }

    fn resource_of(&mut self, connection: ConnectionId) -> Option<(ResourceName, &mut Resource)> {
        let name = self.connections.get(&connection)?.clone();
        let resource = self.resources.get_mut(&name)?;
        Some((name, resource))
    }

    // ---- admission

    /// The next question to put to a plugin for this request, given what plugins have advised so far. A request
    /// that cannot be granted has no questions: [`Node::reserve`] says why.
    pub fn question(&self, request: &PodRequest, advice: &Advice) -> Option<Question> {
        let question = self.plan(request, advice, true).ok()?.0.question?;
        self.plan(request, advice, false).ok()?;
        Some(question)
    }

    /// Sets aside every device that the pod needs, or nothing at all.
    ///
    /// What the pod holds already is kept as it is, which makes admitting it again a matter of course, whatever
    /// its plugins do: the answer is then `Ok(None)`, or a reservation without grants if there is something new
    /// to be written about the pod (it was imported, or admitted before a reboot).
    pub fn reserve(
        &mut self,
        request: &PodRequest,
        advice: &Advice,
    ) -> Result<Option<ReservationId>, ReserveError> {
        let (plan, claims) = self.plan(request, advice, false)?;
        let settled = self.ledger.pods.get(&request.uid).is_some_and(|pod| {
            pod.source == request.source
                && pod.name == request.name
                && pod.fingerprint == request.fingerprint
                && pod.metadata.labels == request.metadata.labels
                && !pod.before_reboot
        });
        if plan.grants.is_empty() && settled && self.has_its_claims(request) {
            self.admitted(&request.uid);
            return Ok(None);
        }
        let id = ReservationId(self.next_reservation);
        self.next_reservation += 1;
        for (name, devices) in &plan.taken {
            let resource = self.resources.get(name);
            self.ledger
                .hold(&request.uid, name, devices.iter().cloned(), resource);
        }
        let reservation = Reservation {
            pod: request.uid.clone(),
            name: request.name.clone(),
            grants: plan.grants,
            taken: plan.taken,
            claims: claims.keys().map(|uid| (*uid).clone()).collect(),
            committing: None,
        };
        for claim in claims.into_values() {
            self.dra.claims.join(&request.uid, &request.name, claim);
        }
        self.ledger.name(&request.name, &request.uid);
        self.ledger.in_flight.insert(request.uid.clone(), id);
        self.ledger.reservations.insert(id, reservation);
        self.changes += 1;
        Ok(Some(id))
    }

    fn admitted(&mut self, pod: &PodUid) {
        self.ledger.admitted.insert(pod.clone(), self.next_admission);
        self.next_admission += 1;
    }

    /// What is set aside.
    pub fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        self.ledger.reservations.get(&id)
    }

    /// Frees what was set aside. Does nothing once [`Node::begin_commit`] was called.
    pub fn abort(&mut self, id: ReservationId) {
        let committing = self
            .ledger
            .reservations
            .get(&id)
            .is_none_or(|each| each.committing.is_some());
        if !committing {
            self.drop_reservation(id);
        }
    }

    /// The plugins have agreed, and all claims are prepared: the pod as it is to be written, in one piece with
    /// its claims. `answers` are the plugins', in the order of the grants, each with whether the plugin wants to
    /// be called before each start.
    pub fn begin_commit(
        &mut self,
        id: ReservationId,
        request: &PodRequest,
        answers: Vec<(Answer, bool)>,
    ) -> Result<Commit, CommitError> {
        let reservation = self.ledger.reservations.get(&id).ok_or(CommitError::Ended)?;
        if reservation.committing.is_some() {
            return Err(CommitError::Ended);
        }
        let is_its_pod = reservation.pod == request.uid && reservation.name == request.name;
        let uids: BTreeSet<&ClaimUid> = request.claims.iter().map(|each| &each.claim.uid).collect();
        let are_its_claims = reservation.claims.iter().eq(uids);
        if !is_its_pod || !are_its_claims || reservation.grants.len() != answers.len() {
            return Err(CommitError::Mismatch);
        }
        let claims = self.dra.claims.to_commit(&reservation.claims);
        let claims = claims.ok_or(CommitError::NotPrepared)?;
        let mut granted: BTreeMap<_, _> = reservation
            .grants
            .iter()
            .zip(answers)
            .map(|(grant, answer)| ((&grant.container, &grant.resource), (grant, answer)))
            .collect();
        let held = self.ledger.pods.get(&request.uid);
        let mut allocations = Vec::new();
        for container in &request.containers {
            for resource in container.wants.keys() {
                if let Some((grant, (answer, pre_start_required))) =
                    granted.remove(&(&container.name, resource))
                {
                    allocations.push(Allocation {
                        container: container.name.clone(),
                        kind: Some(container.kind),
                        resource: resource.clone(),
                        devices: grant.devices.clone(),
                        nodes: self.nodes_of(resource, &grant.devices),
                        answer,
                        pre_start_required,
                    });
                } else if let Some(kept) = held.and_then(|pod| pod.allocation(&container.name, resource)) {
                    allocations.push(Allocation {
                        kind: Some(container.kind),
                        ..kept.clone()
                    });
                }
            }
        }
        if !granted.is_empty() {
            return Err(CommitError::Mismatch);
        }
        // What the pod holds but does not ask for any longer stays with it until it is removed.
        for kept in held.into_iter().flat_map(|pod| &pod.allocations) {
            let known =
                |each: &Allocation| each.container == kept.container && each.resource == kept.resource;
            if !allocations.iter().any(known) {
                allocations.push(kept.clone());
            }
        }
        let admitted_at = held.and_then(|pod| pod.metadata.admitted_at);
        let pod = Pod {
            uid: request.uid.clone(),
            name: request.name.clone(),
            source: request.source,
            fingerprint: request.fingerprint,
            metadata: PodMetadata {
                labels: request.metadata.labels.clone(),
                admitted_at: admitted_at.or(request.metadata.admitted_at),
            },
            before_reboot: false,
            containers: request.containers.iter().map(|each| each.name.clone()).collect(),
            allocations,
            claims: pod_claims(request, held),
            claim_uses: claim_uses(request),
        };
        let commit = Commit { pod, claims };
        self.dra.claims.begin_commit(&commit.claims);
        if let Some(reservation) = self.ledger.reservations.get_mut(&id) {
            reservation.committing = Some(commit.clone());
        }
        self.changes += 1;
        Ok(commit)
    }

    /// The pod is on disk. Does nothing unless [`Node::begin_commit`] was called.
    pub fn finish_commit(&mut self, id: ReservationId) {
        let Entry::Occupied(mut entry) = self.ledger.reservations.entry(id) else {
            return;
        };
        let Some(Commit { pod, claims }) = entry.get_mut().committing.take() else {
            return;
        };
        let reservation = entry.remove();
        self.ledger.in_flight.remove(&reservation.pod);
        self.admitted(&reservation.pod);
        self.dra.claims.end_commit(&claims, true);
        for uid in &reservation.claims {
            self.dra.claims.hold(&pod.uid, uid);
        }
        // The devices are held already, and the name is taken.
        if let Some(earlier) = self.ledger.insert(pod)
            && earlier.name != reservation.name
        {
            self.ledger.unname(&earlier.name, &earlier.uid);
        }
        self.changes += 1;
    }

    /// The pod could not be written.
    pub fn cancel_commit(&mut self, id: ReservationId) {
        self.drop_reservation(id);
    }

    fn drop_reservation(&mut self, id: ReservationId) {
        let Some(reservation) = self.ledger.reservations.remove(&id) else {
            return;
        };
        self.ledger.in_flight.remove(&reservation.pod);
        if self
            .ledger
            .pods
            .get(&reservation.pod)
            .is_none_or(|pod| pod.name != reservation.name)
        {
            self.ledger.unname(&reservation.name, &reservation.pod);
        }
        for (name, devices) in &reservation.taken {
            let resource = self.resources.get(name);
            self.ledger.let_go(&reservation.pod, name, devices, resource);
        }
        if let Some(Commit { claims, .. }) = &reservation.committing {
            self.dra.claims.end_commit(claims, false);
        }
        for uid in &reservation.claims {
            self.dra.claims.leave(&reservation.pod, &reservation.name, uid);
        }
        self.changes += 1;
    }

    /// Where devices are, for the record: by NUMA node, -1 for those without one. A device that has left the
    /// list since it was reserved counts as one without.
    fn nodes_of(&self, name: &ResourceName, devices: &[DeviceId]) -> Vec<(i64, Vec<DeviceId>)> {
        let mut nodes: BTreeMap<i64, Vec<DeviceId>> = BTreeMap::new();
        for id in devices {
            let known = self
                .resources
                .get(name)
                .and_then(|resource| resource.list.get(id.as_str()));
            match known.map_or(&[][..], |device| &device.nodes) {
                [] => nodes.entry(-1).or_default().push(id.clone()),
                many => many
                    .iter()
                    .for_each(|node| nodes.entry(*node).or_default().push(id.clone())),
            }
        }
        nodes.into_iter().collect()
    }

    // ---- removal

    /// The pod is to be removed; until [`Node::finish_release`] it keeps what it holds. The claims that are to be
    /// written in one piece with that: those that it is the last to hold, unless they say so already.
    pub fn begin_release(&mut self, pod: &PodUid) -> Result<Vec<Claim>, ReleaseError> {
        if self.is_in_flight(pod) {
            return Err(ReleaseError::InFlight);
        }
        let held = self.ledger.pods.get(pod).ok_or(ReleaseError::Unknown)?;
        let is_leaving = |other: &PodUid| self.ledger.releasing.contains_key(other);
        let (name, uids) = (&held.name, held.claim_uids());
        let claims = self.dra.claims.begin_release(pod, name, &uids, is_leaving);
        let uids = claims.iter().map(|claim| claim.uid.clone()).collect();
        self.ledger.releasing.insert(pod.clone(), uids);
        self.changes += 1;
        Ok(claims)
    }

    /// The removal is on disk.
    pub fn finish_release(&mut self, pod: &PodUid) {
        let Some(last_words) = self.ledger.releasing.remove(pod) else {
            return;
        };
        if let Some(Pod { name, .. }) = self.ledger.pods.get(pod) {
            self.dra.claims.end_release(pod, name, &last_words, true);
        }
        let Some(pod) = self.ledger.remove(pod) else {
            return;
        };
        self.ledger.admitted.remove(&pod.uid);
        for uid in pod.claim_uids() {
            self.dra.claims.let_go(&pod.uid, &pod.name, &uid);
        }
        self.ledger.unname(&pod.name, &pod.uid);
        for (name, devices) in pod.devices() {
            let resource = self.resources.get(name);
            self.ledger.let_go(&pod.uid, name, devices, resource);
        }
        self.changes += 1;
    }

    /// The removal could not be written.
    pub fn cancel_release(&mut self, pod: &PodUid) {
        if let Some(last_words) = self.ledger.releasing.remove(pod) {
            let name = PodName::default();
            self.dra.claims.end_release(pod, &name, &last_words, false);
            self.changes += 1;
        }
    }

    /// Takes in a pod as durable records or a kubelet's file describe it. A device that another pod holds too
    /// gets a second holder, and is free only when both are gone.
    pub fn put(&mut self, pod: Pod) -> Result<(), PutError> {
        if self.is_in_flight(&pod.uid) {
            return Err(PutError::InFlight);
        }
        self.take_in(pod);
        Ok(())
    }

    fn take_in(&mut self, pod: Pod) {
        let earlier = self.ledger.remove(&pod.uid);
        let claims = pod.claim_uids();
        for uid in earlier.iter().flat_map(Pod::claim_uids) {
            if !claims.contains(&uid) {
                self.dra.claims.let_go(&pod.uid, &pod.name, &uid);
            }
        }
        if let Some(earlier) = earlier {
            self.ledger.unname(&earlier.name, &earlier.uid);
            for (name, devices) in earlier.devices() {
                let resource = self.resources.get(name);
                self.ledger.let_go(&earlier.uid, name, devices, resource);
            }
        }
        for uid in &claims {
            self.dra.claims.hold(&pod.uid, uid);
        }
        for (name, devices) in pod.devices() {
            let resource = self.resources.get(name);
            self.ledger
                .hold(&pod.uid, name, devices.into_iter().cloned(), resource);
        }
        self.ledger.name(&pod.name, &pod.uid);
        self.ledger.insert(pod);
        self.changes += 1;
    }
}
