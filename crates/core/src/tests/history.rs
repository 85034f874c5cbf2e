//! Random histories, compared with a model that has pods, reservations and lists, without derived state.
//!
//! The disk is part of the model: a pod is on it from the write after `begin_commit` to the write after
//! `begin_release`. A restart may occur at any time and restores only the disk.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;

use proptest::prelude::*;

use super::*;
use crate::device_plugin::inventory::GRACE_MS;
use crate::device_plugin::ledger::Grant;
use crate::device_plugin::run_options::RunOptions;
use crate::{Blocked, CommitError, PodUid, PutError, Restored};

const RESOURCES: [&str; 2] = [GPU, NIC];
const DEVICES: usize = 6;
const PODS: usize = 5;
/// The usual shape of each pod.
const USUAL: [usize; PODS] = [7, 3, 2, 8, 1];
const CONTAINERS: [&str; 5] = ["i", "j", "s", "m", "n"];

#[derive(Debug, Clone)]
enum Step {
    Connect(Newcomer),
    List(u8, Vec<(usize, bool, Option<i64>)>),
    Lose(u8),
    Reserve {
        pod: usize,
        shape: usize,
        taste: usize,
    },
    Abort(u8),
    BeginCommit(u8),
    WriteCommit(u8),
    FinishCommit(u8),
    CancelCommit(u8),
    BeginRelease(usize),
    WriteRelease(usize),
    FinishRelease(usize),
    CancelRelease(usize),
    Import(usize, Vec<(usize, usize, Vec<usize>)>),
    /// A pod is imported in part and then admitted.
    Adopt {
        pod: usize,
        known: u8,
        first: usize,
    },
    Restart,
    Block(bool),
    Wait(u64),
}

#[derive(Debug, Clone)]
struct Newcomer {
    resource: usize,
    endpoint: usize,
    uid: u32,
    may_share: bool,
    asks: bool,
}

fn newcomer() -> impl Strategy<Value = Newcomer> {
    (
        0..RESOURCES.len(),
        0..3_usize,
        0..2_u32,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(resource, endpoint, uid, may_share, asks)| Newcomer {
            resource,
            endpoint,
            uid,
            may_share,
            asks,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let devices =
        || proptest::collection::vec((0..DEVICES, any::<bool>(), proptest::option::of(0..3_i64)), 0..9);
    let healthy = proptest::collection::vec((0..DEVICES, Just(true), Just(None)), 0..9);
    let holding = (
        0..CONTAINERS.len(),
        0..RESOURCES.len(),
        proptest::collection::vec(0..DEVICES, 0..3),
    );
    let pod = || 0..PODS;
    prop_oneof![
        2 => newcomer().prop_map(Step::Connect),
        2 => (any::<u8>(), devices()).prop_map(|(connection, list)| Step::List(connection, list)),
        2 => (any::<u8>(), healthy).prop_map(|(connection, list)| Step::List(connection, list)),
        1 => any::<u8>().prop_map(Step::Lose),
        4 => (pod(), 0..shapes().len(), 0..9_usize)
            .prop_map(|(pod, shape, taste)| Step::Reserve { pod, shape, taste }),
        5 => (pod(), 0..9_usize).prop_map(|(pod, taste)| Step::Reserve { pod, shape: USUAL[pod], taste }),
        1 => any::<u8>().prop_map(Step::Abort),
        6 => any::<u8>().prop_map(Step::BeginCommit),
        6 => any::<u8>().prop_map(Step::WriteCommit),
        6 => any::<u8>().prop_map(Step::FinishCommit),
        1 => any::<u8>().prop_map(Step::CancelCommit),
        3 => pod().prop_map(Step::BeginRelease),
        3 => pod().prop_map(Step::WriteRelease),
        3 => pod().prop_map(Step::FinishRelease),
        1 => pod().prop_map(Step::CancelRelease),
        1 => (pod(), proptest::collection::vec(holding, 0..4)).prop_map(|(pod, held)| Step::Import(pod, held)),
        2 => (pod(), any::<u8>(), 0..DEVICES).prop_map(|(pod, known, first)| Step::Adopt { pod, known, first }),
        1 => Just(Step::Restart),
        1 => any::<bool>().prop_map(Step::Block),
        1 => (0..2 * GRACE_MS).prop_map(Step::Wait),
    ]
}

fn shapes() -> Vec<Vec<ContainerRequest>> {
    vec![
        vec![app("m", &[(GPU, 1)])],
        vec![app("m", &[(GPU, 2), (NIC, 1)])],
        vec![
            init("i", &[(GPU, 2)]),
            app("m", &[(GPU, 1)]),
            app("n", &[(GPU, 1)]),
        ],
        vec![
            init("i", &[(GPU, 1)]),
            sidecar("s", &[(GPU, 1)]),
            app("m", &[(GPU, 1)]),
        ],
        vec![
            sidecar("s", &[(GPU, 1), (NIC, 1)]),
            init("i", &[(NIC, 2)]),
            app("m", &[(NIC, 1)]),
        ],
        vec![
            init("i", &[(GPU, 1)]),
            init("j", &[(GPU, 2)]),
            app("m", &[(GPU, 1), (NIC, 0)]),
        ],
        vec![app("m", &[])],
        vec![
            init("i", &[(GPU, 3)]),
            sidecar("s", &[(GPU, 1)]),
            init("j", &[(GPU, 2)]),
            app("m", &[(GPU, 1)]),
            app("n", &[(GPU, 1)]),
        ],
        vec![init("i", &[(GPU, 1), (NIC, 1)]), app("n", &[(NIC, 1), (GPU, 2)])],
    ]
}

/// An imported pod with some of the containers of its usual spec, which share as many devices as possible.
fn half_known(pod: usize, known: u8, first: usize) -> Vec<(usize, usize, Vec<usize>)> {
    let mut holdings = Vec::new();
    for (place, container) in shapes()[USUAL[pod]].iter().enumerate() {
        let name = CONTAINERS
            .iter()
            .position(|name| *name == container.name.as_str());
        for (resource, &wanted) in container.wants.iter().filter(|_| known & (1 << place) != 0) {
            let resource = RESOURCES.iter().position(|name| *name == resource.as_str());
            let devices = (first..first + wanted).map(|device| device % DEVICES);
            holdings.push((name.unwrap(), resource.unwrap(), devices.collect()));
        }
    }
    holdings
}

fn uid(pod: usize) -> PodUid {
    format!("p{pod}").into()
}

fn device_id(device: usize) -> DeviceId {
    format!("d{device}").into()
}

/// Two of the pods have the same name, and every spec has one of a few shapes.
fn request(pod: usize, shape: usize) -> PodRequest {
    PodRequest {
        uid: uid(pod),
        name: named(&format!("n{}", pod % (PODS - 1))),
        source: Source::Api,
        fingerprint: shape as u64 + 1,
        metadata: PodMetadata::default(),
        containers: shapes().swap_remove(shape),
        claims: Vec::new(),
    }
}

#[derive(Debug)]
struct PluginModel {
    resource: usize,
    endpoint: usize,
    uid: u32,
    /// `true` if it has listed a healthy device.
    ready: bool,
    /// The time and content of its last list.
    list: Option<(usize, BTreeMap<DeviceId, Device>)>,
}

#[derive(Debug, PartialEq)]
enum Phase {
    Reserved,
    Writing(Pod),
    Written(Pod),
    Ended,
}

#[derive(Debug)]
struct ReservationModel {
    id: ReservationId,
    request: PodRequest,
    grants: Vec<Grant>,
    phase: Phase,
}

type Holders = BTreeMap<(ResourceName, DeviceId), BTreeSet<PodUid>>;

#[derive(Default)]
struct World {
    node: Node,
    now: Moment,
    /// `true` if plugins list their devices in reverse order.
    backwards: bool,
    connections: Vec<ConnectionId>,
    plugins: BTreeMap<ConnectionId, PluginModel>,
    /// The length of the last active list of a resource, and when it ended.
    idle: BTreeMap<usize, (Moment, usize)>,
    lists: usize,
    reservations: Vec<ReservationModel>,
    /// Pods that are being removed, with `true` if that is on disk.
    releasing: BTreeMap<PodUid, bool>,
    pods: BTreeMap<PodUid, Pod>,
    disk: BTreeMap<PodUid, Pod>,
    /// Devices of imported pods, which need not have been free.
    imported: BTreeSet<(PodUid, ResourceName, DeviceId)>,
}

impl World {
    fn active(&self, resource: usize) -> Option<(ConnectionId, &BTreeMap<DeviceId, Device>)> {
        let lists = self
            .plugins
            .iter()
            .filter(|(_, plugin)| plugin.resource == resource);
        lists
            .filter_map(|(id, plugin)| plugin.list.as_ref().map(|(number, list)| (number, *id, list)))
            .max_by_key(|(number, ..)| **number)
            .map(|(_, id, list)| (id, list))
    }

    fn is_healthy(&self, resource: &ResourceName, device: &DeviceId) -> bool {
        let resource = RESOURCES
            .iter()
            .position(|name| *name == resource.as_str())
            .unwrap();
        let list = self.active(resource).map(|(_, list)| list);
        list.and_then(|list| list.get(device))
            .is_some_and(|device| device.healthy)
    }

    fn holders(&self) -> Holders {
        let mut holders = Holders::new();
        let mut note = |pod: &PodUid, resource: &ResourceName, devices: &[DeviceId]| {
            for device in devices {
                let key = (resource.clone(), device.clone());
                holders.entry(key).or_default().insert(pod.clone());
            }
        };
        for pod in self.pods.values() {
            for held in &pod.allocations {
                note(&pod.uid, &held.resource, &held.devices);
            }
        }
        for reservation in self.reservations.iter().filter(|each| each.phase != Phase::Ended) {
            for grant in &reservation.grants {
                note(&reservation.request.uid, &grant.resource, &grant.devices);
            }
        }
        holders
    }

    fn in_flight(&self, pod: &PodUid) -> bool {
        let reserved = |each: &ReservationModel| each.request.uid == *pod && each.phase != Phase::Ended;
        self.releasing.contains_key(pod) || self.reservations.iter().any(reserved)
    }

    /// Returns a reservation: usually one that has not ended, sometimes any.
    fn pick(&self, number: u8) -> Option<usize> {
        let all = 0..self.reservations.len();
        let live = all
            .clone()
            .filter(|&index| self.reservations[index].phase != Phase::Ended);
        let from: Vec<usize> = if number.is_multiple_of(4) {
            all.collect()
        } else {
            live.collect()
        };
        (!from.is_empty()).then(|| from[usize::from(number / 4) % from.len()])
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Connect(newcomer) => self.connect(newcomer),
            Step::List(number, devices) => self.list(*number, devices),
            Step::Lose(number) => self.lose(*number),
            Step::Reserve { pod, shape, taste } => self.reserve(&request(*pod, *shape), *taste),
            Step::Abort(number) => self.abort(*number),
            Step::BeginCommit(number) => self.begin_commit(*number),
            Step::WriteCommit(number) => {
                if let Some(index) = self.pick(*number)
                    && let Phase::Writing(pod) = &self.reservations[index].phase
                {
                    let pod = pod.clone();
                    self.disk.insert(pod.uid.clone(), pod.clone());
                    self.reservations[index].phase = Phase::Written(pod);
                }
            }
            Step::FinishCommit(number) => self.finish_commit(*number),
            Step::CancelCommit(number) => self.cancel_commit(*number),
            Step::BeginRelease(pod) => {
                let pod = uid(*pod);
                let can = self.pods.contains_key(&pod) && !self.in_flight(&pod);
                assert_eq!(self.node.begin_release(&pod).is_ok(), can);
                if can {
                    self.releasing.insert(pod, false);
                }
            }
            Step::WriteRelease(pod) => {
                if let Some(written) = self.releasing.get_mut(&uid(*pod)) {
                    *written = true;
                    self.disk.remove(&uid(*pod));
                }
            }
            Step::FinishRelease(pod) => self.finish_release(&uid(*pod)),
            Step::CancelRelease(pod) => {
                let pod = uid(*pod);
                if self.releasing.get(&pod) != Some(&true) {
                    self.node.cancel_release(&pod);
                    self.releasing.remove(&pod);
                }
            }
            Step::Import(pod, holdings) => self.import(*pod, holdings),
            Step::Adopt { pod, known, first } => {
                self.import(*pod, &half_known(*pod, *known, *first));
                self.check();
                self.reserve(&request(*pod, USUAL[*pod]), 0);
            }
            Step::Restart => self.restart(),
            Step::Block(true) => self.node.block(Blocked::UnreadableState {
                file: "f".into(),
                reason: "torn".into(),
            }),
            Step::Block(false) => self.node.unblock(|_| true),
            Step::Wait(time) => self.now.0 += time,
        }
    }

    fn connect(&mut self, newcomer: &Newcomer) {
        let mut offer = offer(
            RESOURCES[newcomer.resource],
            &format!("{}.sock", newcomer.endpoint),
        );
        offer.process.uid = newcomer.uid;
        offer.may_share = newcomer.may_share;
        offer.options.preferred_allocation = newcomer.asks;
        let beside = self
            .plugins
            .values()
            .filter(|each| each.resource == newcomer.resource);
        let stranger = beside.clone().any(|each| each.uid != newcomer.uid);
        let connected = self.node.plugin_connected(offer, self.now);
        assert_eq!(
            connected.is_err(),
            stranger && !newcomer.may_share,
            "{connected:?}"
        );
        let Ok((id, replaced)) = connected else { return };
        let same = |(_, each): &(&ConnectionId, &PluginModel)| {
            each.resource == newcomer.resource && each.endpoint == newcomer.endpoint
        };
        let expected = self.plugins.iter().find(same).map(|(id, _)| *id);
        assert_eq!(replaced, expected);
        if let Some(replaced) = replaced {
            self.leave(replaced);
        }
        assert!(
            !self.connections.contains(&id),
            "a connection's number was used twice"
        );
        self.connections.push(id);
        let plugin = PluginModel {
            resource: newcomer.resource,
            endpoint: newcomer.endpoint,
            uid: newcomer.uid,
            ready: false,
            list: None,
        };
        self.plugins.insert(id, plugin);
    }

    fn list(&mut self, number: u8, devices: &[(usize, bool, Option<i64>)]) {
        let Some(connection) = self.connection(number) else {
            return;
        };
        let sent: Vec<Device> = devices
            .iter()
            .map(|(device, healthy, node)| Device {
                id: device_id(*device),
                healthy: *healthy,
                nodes: node.iter().copied().collect(),
            })
            .collect();
        let meant: BTreeMap<DeviceId, Device> =
            sent.iter().map(|each| (each.id.clone(), each.clone())).collect();
        let sent = if self.backwards {
            meant.values().rev().cloned().collect()
        } else {
            sent
        };
        let before = self.before_a_late_message(connection);
        let news = self.node.devices_listed(connection, list_of(sent));
        let Some(plugin) = self.plugins.get_mut(&connection) else {
            assert_eq!(
                (news, before),
                (false, Some(everything(&self.node))),
                "a late list had a say"
            );
            return;
        };
        plugin.ready |= meant.values().any(|device| device.healthy);
        plugin.list = Some((self.lists, meant));
        self.lists += 1;
    }

    fn lose(&mut self, number: u8) {
        let Some(connection) = self.connection(number) else {
            return;
        };
        let before = self.before_a_late_message(connection);
        let news = self.node.connection_lost(connection, self.now);
        if let Some(before) = before {
            assert_eq!(
                (news, before),
                (false, everything(&self.node)),
                "the end of a replaced connection changed the node"
            );
        }
        self.leave(connection);
    }

    fn leave(&mut self, connection: ConnectionId) {
        let Some(resource) = self.plugins.get(&connection).map(|plugin| plugin.resource) else {
            return;
        };
        let length = self.active(resource).map(|(_, list)| list.len());
        self.plugins.remove(&connection);
        if let (Some(length), None) = (length, self.active(resource)) {
            self.idle.insert(resource, (self.now, length));
        }
    }

    fn connection(&self, number: u8) -> Option<ConnectionId> {
        (!self.connections.is_empty()).then(|| self.connections[usize::from(number) % self.connections.len()])
    }

    fn before_a_late_message(&self, connection: ConnectionId) -> Option<String> {
        let late = !self.plugins.contains_key(&connection);
        late.then(|| everything(&self.node))
    }

    fn reserve(&mut self, request: &PodRequest, taste: usize) {
        let preferences = self.ask(request, taste);
        let (holders, before) = (self.holders(), everything(&self.node));
        let in_flight = self.in_flight(&request.uid);
        let outcome = self.node.reserve(request, &preferences);
        assert!(
            !in_flight || outcome == Err(ReserveError::InFlight),
            "two operations for one pod: {outcome:?}"
        );
        let holds_all = self
            .pods
            .get(&request.uid)
            .is_some_and(|pod| holds_all(pod, request));
        let known = self
            .pods
            .get(&request.uid)
            .filter(|pod| pod.source != Source::Imported);
        let spec_changed = known.is_some_and(|pod| pod.fingerprint != request.fingerprint);
        assert!(
            outcome.is_err() || !spec_changed,
            "another spec under the same UID"
        );
        match outcome {
            Ok(None) => {
                assert!(holds_all, "admitted without its devices");
                assert_eq!(everything(&self.node), before);
            }
            Ok(Some(id)) => {
                let reservation = self.node.reservation(id).unwrap();
                let grants = reservation.grants.clone();
                assert!(
                    self.reservations.iter().all(|each| each.id != id),
                    "a number was used twice"
                );
                self.check_grants(request, &grants, &holders);
                assert!(
                    grants.is_empty() || self.node.blocked().is_none(),
                    "a blocked node gave devices"
                );
                self.reservations.push(ReservationModel {
                    id,
                    request: request.clone(),
                    grants,
                    phase: Phase::Reserved,
                });
            }
            Err(error) => {
                assert_eq!(everything(&self.node), before, "a refusal changed something");
                let same_pod = self.pods.get(&request.uid).is_some_and(|pod| {
                    pod.source == Source::Imported || pod.fingerprint == request.fingerprint
                });
                self.check_refusal(request, &error);
                let name_taken = matches!(
                    error,
                    ReserveError::NameTaken { .. } | ReserveError::NameReserved { .. }
                );
                assert!(
                    in_flight || name_taken || !(same_pod && holds_all),
                    "a holder was refused: {error}"
                );
            }
        }
    }

    /// Checks that an error is final only because of recorded pods that are not being removed, and of plugins that have
    /// listed a healthy device. Otherwise the pod waits.
    fn check_refusal(&self, request: &PodRequest, error: &ReserveError) {
        match error {
            ReserveError::Insufficient { resource, .. } => {
                assert!(self.is_ready(resource), "the plugin may still be starting");
                if let Some(needed) = self.needed(request, resource) {
                    assert!(
                        needed > self.left_by_pods(resource),
                        "a reservation refused a pod"
                    );
                }
            }
            ReserveError::Reserved { resource, .. } => {
                if let Some(needed) = self.needed(request, resource) {
                    let left = self.left_by_pods(resource);
                    assert!(needed <= left, "{needed} can never be had while {left} are left");
                }
                let in_flight = self.reservations.iter().any(|each| each.phase != Phase::Ended);
                assert!(in_flight || !self.releasing.is_empty(), "nothing to wait for");
            }
            ReserveError::NoHealthyDevice { resource, .. } => {
                assert!(!self.is_ready(resource), "the devices are gone");
            }
            ReserveError::NameTaken { other } => {
                let named = self.pods.get(other).is_some_and(|pod| pod.name == request.name);
                assert!(
                    named && !self.releasing.contains_key(other),
                    "the name may be free soon"
                );
            }
            ReserveError::NameReserved { other } => assert!(self.in_flight(other), "nothing to wait for"),
            _ => {}
        }
    }

    fn is_ready(&self, resource: &ResourceName) -> bool {
        let index = RESOURCES.iter().position(|name| *name == resource.as_str());
        let active = self.active(index.unwrap());
        active.is_some_and(|(connection, _)| self.plugins[&connection].ready)
    }

    /// Returns the healthy devices that are free once every admission in flight has been aborted and every removal has ended.
    fn left_by_pods(&self, resource: &ResourceName) -> usize {
        let stays = |pod: &&Pod| !self.releasing.contains_key(&pod.uid);
        let held = |id: &DeviceId| {
            let mut allocations = self.pods.values().filter(stays).flat_map(|pod| &pod.allocations);
            allocations.any(|each| each.resource == *resource && each.devices.contains(id))
        };
        let devices = (0..DEVICES).map(device_id);
        devices
            .filter(|id| self.is_healthy(resource, id) && !held(id))
            .count()
    }

    /// Returns the number of devices that the containers need together, with reuse of init containers' devices; `None` if the
    /// pod holds some already.
    fn needed(&self, request: &PodRequest, resource: &ResourceName) -> Option<usize> {
        if let Some(pod) = self.pods.get(&request.uid)
            && pod.allocations.iter().any(|each| each.resource == *resource)
        {
            return None;
        }
        let (mut needed, mut passed_on) = (0, 0);
        for container in &request.containers {
            let wanted = container.wants.get(resource).copied().unwrap_or(0);
            let reused = wanted.min(passed_on);
            needed += wanted - reused;
            match container.kind {
                ContainerKind::Init => passed_on = wanted.max(passed_on),
                ContainerKind::Sidecar | ContainerKind::App => passed_on -= reused,
            }
        }
        Some(needed)
    }

    /// Returns random preferences of plugins, with available and invented devices.
    fn ask(&self, request: &PodRequest, taste: usize) -> Preferences {
        let holders = self.holders();
        let mut preferences = Preferences::new();
        while let Some(query) = self.node.preference_query(request, &preferences) {
            let resource = RESOURCES
                .iter()
                .position(|name| *name == query.resource.as_str())
                .unwrap();
            assert_eq!(Some(query.connection), self.active(resource).map(|(id, _)| id));
            assert!(query.available.is_sorted_by(|one, next| one < next));
            assert!(query.available.len() > query.size, "nothing to choose");
            assert!(query.must_include.len() < query.size);
            let include = &query.must_include;
            assert!(include.iter().all(|id| query.available.contains(id)));
            for device in &query.available {
                assert!(self.is_healthy(&query.resource, device));
                let holders = holders.get(&(query.resource.clone(), device.clone()));
                assert!(holders.is_none_or(|holders| holders.contains(&request.uid)));
            }
            let mut liked = query.available;
            let length = liked.len();
            liked.rotate_left(taste % length);
            liked.truncate(taste);
            liked.extend([device_id(taste), "bogus".into(), device_id(0)]);
            let again = preferences.insert((query.container, query.resource), liked);
            assert!(again.is_none(), "asked twice");
        }
        preferences
    }

    /// Checks that a reservation is complete, takes only free devices or those of the pod, and shares devices only with
    /// containers that have ended.
    fn check_grants(&self, request: &PodRequest, grants: &[Grant], holders: &Holders) {
        let pod = self.pods.get(&request.uid);
        for grant in grants {
            for device in &grant.devices {
                let holders = holders.get(&(grant.resource.clone(), device.clone()));
                let own = holders.is_some_and(|holders| holders.contains(&request.uid));
                assert!(own || holders.is_none(), "a device of another pod was given");
                assert!(
                    self.is_healthy(&grant.resource, device),
                    "an unhealthy device was given"
                );
            }
        }
        let mut uses: Vec<(Option<usize>, bool, &ResourceName, BTreeSet<&DeviceId>)> = Vec::new();
        for (place, container) in request.containers.iter().enumerate() {
            for (resource, &wanted) in container.wants.iter().filter(|(_, wanted)| **wanted > 0) {
                let held = pod.and_then(|pod| pod.allocation(&container.name, resource));
                let mine = |grant: &&Grant| grant.container == container.name && grant.resource == *resource;
                let granted: Vec<_> = grants.iter().filter(mine).collect();
                let devices = match (held, &granted[..]) {
                    (Some(held), []) => &held.devices,
                    (None, [granted]) => &granted.devices,
                    other => panic!("not one source of devices: {other:?}"),
                };
                assert_eq!(devices.len(), wanted, "not everything was given");
                let distinct: BTreeSet<_> = devices.iter().collect();
                assert!(
                    held.is_some() || distinct.len() == wanted,
                    "a device was given twice"
                );
                uses.push((Some(place), held.is_none(), resource, distinct));
            }
        }
        for held in pod.into_iter().flat_map(|pod| &pod.allocations) {
            let known = |each: &ContainerRequest| {
                each.name == held.container
                    && each.wants.get(&held.resource).is_some_and(|wanted| *wanted > 0)
            };
            if !request.containers.iter().any(known) {
                let place = request
                    .containers
                    .iter()
                    .position(|each| each.name == held.container);
                uses.push((place, false, &held.resource, held.devices.iter().collect()));
            }
        }
        for (index, (place, granted, resource, devices)) in uses.iter().enumerate() {
            for (other_place, other_granted, other_resource, other_devices) in &uses[index + 1..] {
                let shared = resource == other_resource && !devices.is_disjoint(other_devices);
                if shared && (*granted || *other_granted) {
                    let first = place.zip(*other_place).map(|(one, other)| one.min(other));
                    let kind = first.map(|place| request.containers[place].kind);
                    assert_eq!(
                        kind,
                        Some(ContainerKind::Init),
                        "containers that run together share a device"
                    );
                }
            }
        }
    }

    fn abort(&mut self, number: u8) {
        let Some(index) = self.pick(number) else { return };
        let before = everything(&self.node);
        self.node.abort(self.reservations[index].id);
        if self.reservations[index].phase == Phase::Reserved {
            self.reservations[index].phase = Phase::Ended;
        } else {
            assert_eq!(everything(&self.node), before, "aborted too late");
        }
    }

    fn begin_commit(&mut self, number: u8) {
        let Some(index) = self.pick(number) else { return };
        let ReservationModel {
            id,
            request,
            grants,
            phase,
        } = &mut self.reservations[index];
        let answer = |grant: &Grant| {
            let raw = format!("{}/{}", grant.container, grant.resource);
            (Answer::new(raw.as_bytes(), RunOptions::default()), true)
        };
        let outcome = self
            .node
            .begin_commit(*id, request, grants.iter().map(answer).collect());
        if *phase != Phase::Reserved {
            assert_eq!(outcome, Err(CommitError::Ended));
            return;
        }
        let pod = outcome.unwrap().pod;
        assert!(holds_all(&pod, request), "committed without its devices");
        for grant in grants {
            let held = pod.allocation(&grant.container, &grant.resource).unwrap();
            assert_eq!(held.devices, grant.devices);
            assert_eq!(&*held.answer.raw, answer(grant).0.raw.as_ref());
        }
        for earlier in self
            .pods
            .get(&pod.uid)
            .into_iter()
            .flat_map(|pod| &pod.allocations)
        {
            let now = pod.allocation(&earlier.container, &earlier.resource).unwrap();
            assert_eq!(
                (&now.devices, &now.answer),
                (&earlier.devices, &earlier.answer),
                "it changed"
            );
        }
        *phase = Phase::Writing(pod);
    }

    /// Finishes removals that are on disk, and tries removals that were not begun or have ended.
    fn finish_commit(&mut self, number: u8) {
        let Some(index) = self.pick(number) else { return };
        let reservation = &mut self.reservations[index];
        if matches!(reservation.phase, Phase::Writing(_)) {
            return;
        }
        self.node.finish_commit(reservation.id);
        if let Phase::Written(pod) = &reservation.phase {
            self.pods.insert(pod.uid.clone(), pod.clone());
            reservation.phase = Phase::Ended;
        }
    }

    fn cancel_commit(&mut self, number: u8) {
        let Some(index) = self.pick(number) else { return };
        let reservation = &mut self.reservations[index];
        if !matches!(reservation.phase, Phase::Written(_)) {
            self.node.cancel_commit(reservation.id);
            reservation.phase = Phase::Ended;
        }
    }

    fn finish_release(&mut self, pod: &PodUid) {
        match self.releasing.get(pod) {
            Some(false) => {}
            Some(true) => {
                self.node.finish_release(pod);
                self.releasing.remove(pod);
                self.pods.remove(pod);
                self.imported.retain(|(holder, ..)| holder != pod);
            }
            None => {
                let before = everything(&self.node);
                self.node.finish_release(pod);
                assert_eq!(everything(&self.node), before);
            }
        }
    }

    fn import(&mut self, pod: usize, holdings: &[(usize, usize, Vec<usize>)]) {
        let mut distinct: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
        for (container, resource, devices) in holdings {
            let key = (CONTAINERS[*container], RESOURCES[*resource]);
            let devices = devices.iter().map(|device| device_id(*device).to_string());
            distinct.entry(key).or_default().extend(devices);
        }
        let holdings: Vec<(&str, &str, Vec<&str>)> = distinct
            .iter()
            .map(|((container, resource), devices)| {
                (
                    *container,
                    *resource,
                    devices.iter().map(String::as_str).collect(),
                )
            })
            .collect();
        let holdings: Vec<(&str, &str, &[&str])> = holdings
            .iter()
            .map(|(container, resource, devices)| (*container, *resource, &devices[..]))
            .collect();
        let pod = imported(uid(pod).as_str(), &holdings);
        let in_flight = self.in_flight(&pod.uid);
        let outcome = self.node.put(pod.clone());
        assert_eq!(outcome == Err(PutError::InFlight), in_flight);
        if outcome.is_ok() {
            self.imported.retain(|(holder, ..)| *holder != pod.uid);
            for (resource, devices) in pod.devices() {
                let marks = devices
                    .into_iter()
                    .map(|id| (pod.uid.clone(), resource.clone(), id.clone()));
                self.imported.extend(marks);
            }
            self.disk.insert(pod.uid.clone(), pod.clone());
            self.pods.insert(pod.uid.clone(), pod);
        }
    }

    fn restart(&mut self) {
        self.node = Node::restore(Restored {
            pods: self.disk.clone(),
            resources: self.node.known_resources(),
            ..Restored::default()
        });
        self.pods.clone_from(&self.disk);
        self.imported.retain(|(pod, ..)| self.disk.contains_key(pod));
        self.connections.clear();
        self.plugins.clear();
        self.idle.clear();
        self.reservations.clear();
        self.releasing.clear();
    }

    fn check(&self) {
        assert_sound(&self.node);
        let pods: BTreeMap<PodUid, Pod> = self
            .node
            .pods()
            .map(|pod| (pod.uid.clone(), pod.clone()))
            .collect();
        assert_eq!(pods, self.pods, "a pod is not what was committed");
        let live = self.reservations.iter().filter(|each| each.phase != Phase::Ended);
        assert_eq!(
            self.node.ledger.reservations.len(),
            live.count(),
            "a reservation leaked"
        );
        for reservation in &self.reservations {
            let grants = self.node.reservation(reservation.id).map(|each| &each.grants);
            let expected = (reservation.phase != Phase::Ended).then_some(&reservation.grants);
            assert_eq!(
                grants, expected,
                "a reservation changed, or ended otherwise than once"
            );
        }
        for pod in (0..PODS).map(uid) {
            assert_eq!(self.node.is_in_flight(&pod), self.in_flight(&pod));
        }
        let holders = self.holders();
        for ((resource, device), pods) in &holders {
            let fair = pods.iter().filter(|pod| {
                !self
                    .imported
                    .contains(&((*pod).clone(), resource.clone(), device.clone()))
            });
            assert!(
                fair.count() <= 1,
                "{device} of {resource} has two holders: {pods:?}"
            );
        }
        for (index, name) in RESOURCES.into_iter().enumerate() {
            self.check_resource(index, &name.into(), &holders);
        }
    }

    fn check_resource(&self, index: usize, name: &ResourceName, holders: &Holders) {
        let active = self.active(index);
        assert_eq!(self.node.serving(name), active.map(|(id, _)| id));
        let list = active.map(|(_, list)| list);
        let healthy: Vec<&Device> = list
            .into_iter()
            .flat_map(BTreeMap::values)
            .filter(|each| each.healthy)
            .collect();
        let is_held = |device: &DeviceId| holders.contains_key(&(name.clone(), device.clone()));
        let capacity = self.node.capacity_of(name, self.now);
        let graced = self
            .idle
            .get(&index)
            .filter(|(since, _)| self.now.0 - since.0 <= GRACE_MS);
        let expected = list
            .map(BTreeMap::len)
            .or(graced.map(|(_, length)| *length))
            .unwrap_or(0);
        assert_eq!(capacity.capacity, expected, "capacity of {name}");
        assert_eq!(capacity.allocatable, healthy.len(), "allocatable of {name}");
        let free = healthy.iter().filter(|each| !is_held(&each.id)).count();
        assert_eq!(capacity.free, free, "free devices of {name}");
        for view in self.node.devices(name) {
            let holders = holders
                .get(&(name.clone(), view.id.clone()))
                .cloned()
                .unwrap_or_default();
            assert_eq!(view.holders.iter().cloned().collect::<BTreeSet<_>>(), holders);
            assert_eq!(view.healthy, self.is_healthy(name, &view.id));
        }
    }

    /// Ends all operations, and then removes all pods.
    fn wind_up(&mut self) {
        for reservation in &mut self.reservations {
            match &reservation.phase {
                Phase::Reserved => self.node.abort(reservation.id),
                Phase::Writing(_) => self.node.cancel_commit(reservation.id),
                Phase::Written(pod) => {
                    self.node.finish_commit(reservation.id);
                    self.pods.insert(pod.uid.clone(), pod.clone());
                }
                Phase::Ended => {}
            }
            reservation.phase = Phase::Ended;
        }
        for pod in core::mem::take(&mut self.pods).into_keys() {
            if !self.releasing.contains_key(&pod) {
                self.node.begin_release(&pod).unwrap();
            }
            self.node.finish_release(&pod);
        }
        self.releasing.clear();
    }
}

fn holds_all(pod: &Pod, request: &PodRequest) -> bool {
    request.containers.iter().all(|container| {
        container
            .wants
            .iter()
            .filter(|(_, wanted)| **wanted > 0)
            .all(|(resource, wanted)| {
                pod.allocation(&container.name, resource)
                    .is_some_and(|held| held.devices.len() == *wanted)
            })
    })
}

fn live_through(history: &[Step], backwards: bool) -> String {
    let mut world = World {
        now: START,
        backwards,
        ..World::default()
    };
    for resource in 0..RESOURCES.len() {
        world.apply(&Step::Connect(Newcomer {
            resource,
            endpoint: 0,
            uid: 0,
            may_share: false,
            asks: resource == 0,
        }));
        let all = (0..DEVICES).map(|device| (device, true, None)).collect();
        world.apply(&Step::List(resource as u8, all));
    }
    for step in history {
        world.apply(step);
        world.check();
    }
    let end = everything(&world.node);
    world.wind_up();
    world.check();
    assert!(
        world.node.ledger.held.is_empty(),
        "a device is held without a pod"
    );
    end
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_the_invariants(history in proptest::collection::vec(step(), 1..80)) {
        let once = live_through(&history, false);
        let again = live_through(&history, true);
        prop_assert_eq!(once, again, "the same history led to another state");
    }
}
