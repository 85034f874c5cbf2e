//! Random histories of pods with claims, drivers, a disk and crashes, compared with a model of the outside: the disk, the
//! work of drivers, and the acknowledged operations.
//!
//! Writes are queued, reach the disk in any order, and are acknowledged in the order in which they reached it. A crash may
//! occur at any time. It may lose the newest writes that were not acknowledged.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::dra::{answer_of, claim_of, is_cdi_name, key, offer_of, result};
use super::*;
use crate::dra::claims::{
    AllocatedClaim, AllocatedDevice, Call, Claim, Operation, PreparationState, PreparedDevice,
};
use crate::dra::view::{ClaimView, Phase};
use crate::{ClaimRequest, ClaimUid, DriverName, PodClaim, PodUid, RecordId, Restored};

const DRIVERS: [&str; 3] = ["d0", "d1", "d2"];
const PODS: usize = 5;

#[derive(Debug, Clone, Copy)]
enum Step {
    Register(usize, usize),
    /// A plugin registers and is connected.
    Return(usize),
    Link(u8, bool),
    Deregister(u8),
    Reserve(usize, usize),
    /// This many steps of an admission, without other steps between them.
    Admit(usize, usize, usize),
    /// This many steps of a removal, without other steps between them.
    Remove(usize, usize),
    Abort(u8),
    Intent(u8),
    Prepare(u8),
    Commit(u8),
    Release(usize),
    Unprepare(usize),
    Abandon(usize, usize),
    /// A claim of two drivers is abandoned at one of them, and reallocated at the other.
    AbandonAndReturn(usize, usize),
    Forget(usize),
    /// A claim of two drivers is abandoned at both, and forgotten.
    AbandonAndForget(usize, usize),
    Due,
    Record,
    Answer(u8, Style),
    Write(u8),
    FailWrite(u8),
    Acknowledge,
    Wait(u64),
    /// A claim comes from a kubelet's file, with a pod that holds it or without.
    Import(usize, usize, bool),
    Crash {
        lost: usize,
        executed: bool,
        rebooted: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Style {
    Good,
    Partial,
    FailedBefore,
    FailedAfter,
    Missing,
    Stray,
    Foreign,
}

fn step() -> impl Strategy<Value = Step> {
    let style = prop_oneof![
        12 => Just(Style::Good),
        2 => Just(Style::Partial),
        1 => Just(Style::FailedBefore),
        1 => Just(Style::FailedAfter),
        1 => Just(Style::Missing),
        1 => Just(Style::Stray),
        1 => Just(Style::Foreign),
    ];
    prop_oneof![
        2 => (0..DRIVERS.len(), 0..2_usize).prop_map(|(driver, endpoint)| Step::Register(driver, endpoint)),
        3 => (0..DRIVERS.len()).prop_map(Step::Return),
        4 => (any::<u8>(), prop::bool::weighted(0.7)).prop_map(|(number, is_up)| Step::Link(number, is_up)),
        1 => any::<u8>().prop_map(Step::Deregister),
        8 => (0..PODS, 0..shapes().len()).prop_map(|(pod, shape)| Step::Reserve(pod, shape)),
        14 => (0..PODS, 0..shapes().len(), 0..9_usize)
            .prop_map(|(pod, shape, steps)| Step::Admit(pod, shape, steps)),
        6 => (0..PODS, 0..6_usize).prop_map(|(pod, steps)| Step::Remove(pod, steps)),
        1 => any::<u8>().prop_map(Step::Abort),
        8 => any::<u8>().prop_map(Step::Intent),
        8 => any::<u8>().prop_map(Step::Prepare),
        6 => any::<u8>().prop_map(Step::Commit),
        3 => (0..PODS).prop_map(Step::Release),
        3 => (0..PODS).prop_map(Step::Unprepare),
        1 => (0..PODS, 0..DRIVERS.len()).prop_map(|(pod, driver)| Step::Abandon(pod, driver)),
        2 => (0..PODS, 0..4_usize).prop_map(|(pod, steps)| Step::AbandonAndReturn(pod, steps)),
        1 => (0..CLAIMS).prop_map(Step::Forget),
        2 => (0..PODS, 0..4_usize).prop_map(|(pod, steps)| Step::AbandonAndForget(pod, steps)),
        2 => Just(Step::Due),
        2 => Just(Step::Record),
        12 => (any::<u8>(), style).prop_map(|(number, style)| Step::Answer(number, style)),
        14 => any::<u8>().prop_map(Step::Write),
        1 => any::<u8>().prop_map(Step::FailWrite),
        14 => Just(Step::Acknowledge),
        2 => (0..70_000_u64).prop_map(Step::Wait),
        1 => (0..CLAIMS, 0..PODS, prop::bool::weighted(0.7))
            .prop_map(|(claim, pod, is_held)| Step::Import(claim, pod, is_held)),
        1 => (0..3_usize, any::<bool>(), prop::bool::weighted(0.3))
            .prop_map(|(lost, executed, rebooted)| Step::Crash { lost, executed, rebooted }),
    ]
}

/// Claims of pods: two have the same name, two are one claim with different allocations, and some do not need a driver. From
/// 7 on they share devices with others: as a whole, by share, or with admin access.
fn catalogue(index: usize) -> AllocatedClaim {
    let shared = |name: &str, uid: &str, share: Option<&str>| {
        let mut result = result("d2", "req", "shared");
        result.device.share = share.map(Into::into);
        AllocatedClaim::new(key(name), uid.into(), [result])
    };
    match index {
        0 => claim_of("k0", "c0", &[("d0", "a", &[])]),
        1 => claim_of("k0", "c0", &[("d0", "b", &[]), ("d1", "b", &[])]),
        2 => claim_of("k0", "c2", &[("d1", "a", &[])]),
        3 => claim_of("k3", "c3", &[("d0", "c", &[]), ("d1", "c", &[])]),
        4 => claim_of("k4", "c4", &[("d1", "d", &["*"]), ("d2", "d", &[])]),
        5 => claim_of("k5", "c5", &[("d0", "e", &["NodeUnprepareResources"])]),
        6 => claim_of("k6", "c6", &[]),
        7 => claim_of("k7", "c7", &[("d0", "a", &[])]),
        8 => {
            let mut result = result("d0", "req", "a");
            result.device.admin_access = true;
            AllocatedClaim::new(key("k8"), "c8".into(), [result])
        }
        9 => shared("k9", "c9", Some("s1")),
        10 => shared("k10", "c10", Some("s2")),
        11 => shared("k11", "c11", None),
        12 => claim_of("k12", "c12", &[("d0", "b", &[]), ("d1", "a", &[])]),
        13 => claim_of("k13", "c13", &[("d0", "e", &[]), ("d1", "b", &[])]),
        14 => claim_of("k14", "c14", &[("d1", "d", &["*"])]),
        _ => shared("k15", "c15", Some("s1")),
    }
}

const CLAIMS: usize = 16;

fn shapes() -> Vec<&'static [usize]> {
    vec![
        &[0],
        &[1],
        &[2],
        &[0, 3],
        &[3, 3],
        &[3, 4],
        &[5, 6],
        &[6],
        &[0, 3, 4],
        &[],
        &[7],
        &[7, 8],
        &[8],
        &[9, 10],
        &[10],
        &[11],
        &[12],
        &[13],
        &[14],
        &[15],
        &[0, 7],
    ]
}

/// The devices of a driver that has prepared a claim.
fn devices_of(claim: &Claim, driver: &DriverName) -> Vec<AllocatedDevice> {
    let Some(preparation) = claim.preparations.get(driver) else {
        return Vec::new();
    };
    let prepared = preparation.devices.iter().map(|each| AllocatedDevice {
        request: String::new(),
        pool: each.pool.clone(),
        device: each.device.clone(),
        share: each.share.clone(),
        admin_access: false,
    });
    preparation
        .allocated
        .clone()
        .unwrap_or_else(|| prepared.collect())
}

/// Returns `true` if two claims must not have these devices at the same time. Independent of the tested code.
fn collide(one: &AllocatedDevice, other: &AllocatedDevice) -> bool {
    let is_exclusive = !one.admin_access && !other.admin_access;
    let is_same = (&one.pool, &one.device) == (&other.pool, &other.device);
    is_exclusive && is_same && (one.share.is_none() || other.share.is_none() || one.share == other.share)
}

fn uid(pod: usize) -> PodUid {
    format!("p{pod}").into()
}

fn request(pod: usize, shape: usize) -> PodRequest {
    let claims = shapes()[shape].iter().enumerate();
    let claims = claims.map(|(place, index)| ClaimRequest {
        name: format!("n{place}"),
        claim: catalogue(*index),
    });
    PodRequest {
        claims: claims.collect(),
        fingerprint: shape as u64 + 1,
        metadata: PodMetadata::default(),
        ..super::pod(uid(pod).as_str(), vec![app("main", &[])])
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Disk {
    pods: BTreeMap<PodUid, Pod>,
    claims: BTreeMap<ClaimUid, Claim>,
}

#[derive(Debug, Clone)]
enum Change {
    Intent(ReservationId),
    Commit(ReservationId, Box<Pod>),
    Release(PodUid),
    Record(RecordId),
}

#[derive(Debug, Clone)]
struct Write {
    pods: Vec<(PodUid, Option<Pod>)>,
    put: Vec<Claim>,
    delete: Vec<ClaimUid>,
    change: Change,
}

#[derive(Debug)]
struct Admission {
    id: ReservationId,
    request: PodRequest,
    committing: bool,
}

type Part = (ClaimUid, DriverName);

#[derive(Default)]
struct World {
    node: Node,
    now: Moment,
    connections: Vec<(ConnectionId, usize, usize)>,
    registered: BTreeSet<ConnectionId>,
    disk: Disk,
    handed_over: Vec<Write>,
    /// Written and not acknowledged, with the disk as it was before.
    written: VecDeque<(Change, Disk)>,
    admissions: Vec<Admission>,
    releasing: BTreeSet<PodUid>,
    /// Pods with an acknowledged admission.
    pods: BTreeMap<PodUid, Pod>,
    calls: Vec<Call>,
    /// Claims that drivers may have prepared: called, and not unprepared since then.
    touched: BTreeSet<Part>,
    /// The devices of `touched`.
    devices: BTreeMap<Part, Vec<AllocatedDevice>>,
    /// Claims that shared a device when one of them was imported.
    imported_together: BTreeSet<(ClaimUid, ClaimUid)>,
    /// Claims that drivers have prepared.
    truth: BTreeSet<Part>,
    /// Claims that were on disk at the last reboot.
    rebooted: BTreeSet<ClaimUid>,
}

impl World {
    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Register(driver, endpoint) => self.register(driver, endpoint),
            Step::Link(number, is_up) => {
                if let Some(&(id, ..)) = nth(&self.connections, number) {
                    match is_up {
                        true => self.node.link_up(id, self.now),
                        false => self.node.link_lost(id, self.now),
                    };
                }
            }
            Step::Deregister(number) => {
                if let Some(&(id, ..)) = nth(&self.connections, number) {
                    let was = self.registered.remove(&id);
                    assert_eq!(self.node.driver_deregistered(id, self.now), was);
                }
            }
            Step::Return(driver) => self.bring_back(driver),
            Step::Reserve(pod, shape) => self.reserve(request(pod, shape)),
            Step::Admit(pod, shape, steps) => {
                self.reserve(request(pod, shape));
                let last = u8::try_from(self.admissions.len()).unwrap().wrapping_sub(1);
                let all = [
                    &[Step::Intent(last)][..],
                    &[Step::Write(0); 4],
                    &[Step::Acknowledge; 4],
                    &[Step::Prepare(last)],
                    &[Step::Answer(0, Style::Good); 4],
                    &[Step::Commit(last)],
                    &[Step::Write(0); 4],
                    &[Step::Acknowledge; 4],
                ];
                all.into_iter()
                    .take(steps)
                    .flatten()
                    .for_each(|step| self.apply(step));
            }
            Step::Remove(pod, steps) => {
                let all = [
                    &[Step::Release(pod)][..],
                    &[Step::Write(0); 4],
                    &[Step::Acknowledge; 4],
                    &[Step::Unprepare(pod)],
                    &[Step::Answer(0, Style::Good); 4],
                ];
                all.into_iter()
                    .take(steps)
                    .flatten()
                    .for_each(|step| self.apply(step));
            }
            Step::Abort(number) => {
                if let Some(place) = place(&self.admissions, number) {
                    self.node.abort(self.admissions[place].id);
                    if !self.admissions[place].committing {
                        self.admissions.remove(place);
                    }
                }
            }
            Step::Intent(number) => {
                if let Some(admission) = nth(&self.admissions, number) {
                    let intent = self.node.begin_intent(admission.id);
                    let change = Change::Intent(admission.id);
                    if !intent.is_empty() {
                        for uid in &intent.delete {
                            assert!(self.members(uid).is_empty(), "a claim that pods hold is deleted");
                        }
                        self.hand_over(Vec::new(), intent.put, intent.delete, change);
                    }
                }
            }
            Step::Prepare(number) => {
                if let Some(admission) = nth(&self.admissions, number) {
                    let calls = self.node.prepare_calls(admission.id, self.now);
                    self.start(calls);
                }
            }
            Step::Commit(number) => self.commit(number),
            Step::Release(pod) => self.release(&uid(pod)),
            Step::Unprepare(pod) => {
                let calls = self.node.unprepare_calls(&uid(pod), self.now);
                self.start(calls);
            }
            Step::Abandon(pod, driver) => {
                self.node.abandon(&uid(pod), &DRIVERS[driver].into());
                let remaining = self.node.pending_unprepare(&uid(pod));
                assert!(
                    remaining
                        .iter()
                        .all(|wait| wait.driver.as_str() != DRIVERS[driver])
                );
            }
            Step::AbandonAndReturn(pod, steps) => {
                for step in [
                    Step::Admit(pod, 1, 9),
                    Step::Remove(pod, steps),
                    Step::Abandon(pod, 1),
                ] {
                    self.apply(&step);
                }
                self.apply(&Step::Unprepare(pod));
                self.apply(&Step::Answer(0, Style::Good));
                self.apply(&Step::Admit(pod, 0, 9));
            }
            Step::Forget(index) => self.forget(&catalogue(index).uid),
            Step::AbandonAndForget(pod, steps) => {
                for step in [
                    Step::Admit(pod, 1, 9),
                    Step::Remove(pod, steps),
                    Step::Abandon(pod, 0),
                    Step::Abandon(pod, 1),
                    Step::Record,
                    Step::Write(0),
                    Step::Acknowledge,
                ] {
                    self.apply(&step);
                }
                if steps % 2 == 1 {
                    // The driver has come back.
                    self.apply(&Step::Return(0));
                    self.apply(&Step::Due);
                }
                self.apply(&Step::Forget(1));
            }
            Step::Due => {
                let calls = self.node.due_calls(self.now);
                self.start(calls);
            }
            Step::Record => self.record(),
            Step::Answer(number, style) => {
                if let Some(place) = place(&self.calls, number) {
                    let call = self.calls.remove(place);
                    self.answer(&call, style);
                }
            }
            Step::Write(number) => {
                if let Some(place) = place(&self.handed_over, number) {
                    self.write(place);
                }
            }
            Step::FailWrite(number) => {
                if self.written.is_empty()
                    && let Some(place) = place(&self.handed_over, number)
                {
                    let change = self.handed_over.remove(place).change;
                    self.settle(change, false);
                    // The store rebuilds its file from memory.
                    let claims = self.node.recorded_claims();
                    self.disk.claims = claims.map(|claim| (claim.uid.clone(), claim.clone())).collect();
                    self.disk.pods = self
                        .node
                        .pods()
                        .map(|pod| (pod.uid.clone(), pod.clone()))
                        .collect();
                }
            }
            Step::Acknowledge => {
                if let Some((change, _)) = self.written.pop_front() {
                    self.settle(change, true);
                }
            }
            Step::Import(claim, pod, is_held) => self.import(&catalogue(claim), &uid(pod), is_held),
            Step::Wait(milliseconds) => self.now = self.now.after(milliseconds),
            Step::Crash {
                lost,
                executed,
                rebooted,
            } => self.crash(lost, executed, rebooted),
        }
    }

    fn bring_back(&mut self, driver: usize) {
        self.register(driver, 0);
        let (id, ..) = *self.connections.last().unwrap();
        self.node.link_up(id, self.now);
    }

    fn register(&mut self, driver: usize, endpoint: usize) {
        let offer = offer_of(DRIVERS[driver], &format!("{endpoint}.sock"));
        let (id, replaced) = self.node.driver_registered(offer, self.now).unwrap();
        let same = |each: &&(ConnectionId, usize, usize)| {
            (each.1, each.2) == (driver, endpoint) && self.registered.contains(&each.0)
        };
        let expected = self.connections.iter().find(same).map(|each| each.0);
        assert_eq!(replaced, expected, "another plugin was replaced");
        if let Some(replaced) = replaced {
            self.registered.remove(&replaced);
        }
        self.connections.push((id, driver, endpoint));
        self.registered.insert(id);
    }

    /// Returns pods that hold a claim or are being admitted with it, according to acknowledged operations.
    fn members(&self, uid: &ClaimUid) -> BTreeSet<PodUid> {
        let holds = |pod: &&Pod| pod.claims.iter().any(|each| each.uid == *uid);
        let holders = self.pods.values().filter(holds).map(|pod| pod.uid.clone());
        let joined = |each: &&Admission| each.request.claims.iter().any(|each| each.claim.uid == *uid);
        let joiners = self
            .admissions
            .iter()
            .filter(joined)
            .map(|each| each.request.uid.clone());
        holders.chain(joiners).collect()
    }

    /// Checks that an error of a claim is final only because of recorded pods that are not being removed.
    fn check_refusal(&self, error: &ReserveError) {
        let is_held = |is_it: &dyn Fn(&PodClaim) -> bool| {
            let stays = |(uid, _): &(&PodUid, &Pod)| !self.releasing.contains(*uid);
            let mut pods = self.pods.iter().filter(stays);
            pods.any(|(_, pod)| pod.claims.iter().any(is_it))
        };
        match error {
            // Claims of one pod may conflict with each other, too.
            ReserveError::Reallocated { claim, pods, .. }
            | ReserveError::ClaimNameTaken { claim, pods, .. } => {
                assert!(pods.is_empty() || is_held(&|each| each.key == *claim), "{error}");
            }
            ReserveError::ClaimReserved { uid, pods, .. } => {
                let is_held = is_held(&|each| each.uid == *uid);
                assert!(!pods.is_empty() && !is_held, "nothing to wait for: {error}");
            }
            _ => {}
        }
    }

    fn reserve(&mut self, request: PodRequest) {
        let in_the_way = |wanted: &&AllocatedClaim| {
            let known = self.node.claim(&wanted.uid);
            known.is_some_and(|view| {
                let mut abandoned = view.claim.abandoned();
                let is_needed = abandoned.any(|driver| wanted.drivers.contains_key(driver));
                let is_out = matches!(view.phase, Phase::Abandoned | Phase::Unprepared);
                view.pods.is_empty() && (!is_out || is_needed)
            })
        };
        let wanted = request.claims.iter().map(|each| &each.claim);
        let unpreparing: Vec<AllocatedClaim> = wanted.filter(in_the_way).cloned().collect();
        let before = self.node.changes();
        match self.node.reserve(&request, &Preferences::new()) {
            Ok(Some(id)) => {
                assert!(
                    unpreparing.is_empty(),
                    "a pod joined a claim that is being unprepared: {unpreparing:?}"
                );
                for wanted in request.claims.iter().map(|each| &each.claim) {
                    let claim = self.node.claim(&wanted.uid).unwrap().claim;
                    let is_it = |(driver, each): (&DriverName, &crate::dra::claims::Allocated)| {
                        claim.preparations[driver].allocated.as_ref() == Some(&each.devices)
                    };
                    let given_up = claim.abandoned().count();
                    assert_eq!(claim.preparations.len() - given_up, wanted.drivers.len());
                    assert!(
                        wanted.drivers.iter().all(is_it),
                        "a pod joined a claim that was allocated otherwise"
                    );
                }
                for wanted in request.claims.iter().map(|each| &each.claim) {
                    self.check_free(wanted);
                }
                self.admissions.push(Admission {
                    id,
                    request,
                    committing: false,
                });
            }
            Ok(None) => {
                assert!(self.pods.contains_key(&request.uid));
                for uid in request.claims.iter().map(|each| &each.claim.uid) {
                    assert_eq!(self.node.claim(uid).unwrap().phase, Phase::Prepared);
                    assert!(
                        self.disk.claims[uid].is_prepared(),
                        "{uid} was answered and is not on disk"
                    );
                }
            }
            Err(error) => {
                assert_eq!(self.node.changes(), before, "a refusal changed something");
                self.check_refusal(&error);
            }
        }
    }

    /// Checks that no driver may have prepared a device of a claim for another claim.
    fn check_free(&self, wanted: &AllocatedClaim) {
        for ((uid, driver), devices) in self.devices.iter().filter(|((uid, _), _)| *uid != wanted.uid) {
            let wanted_devices = wanted
                .drivers
                .get(driver)
                .into_iter()
                .flat_map(|each| &each.devices);
            for device in wanted_devices {
                assert!(
                    self.may_share(uid, &wanted.uid) || !devices.iter().any(|each| collide(each, device)),
                    "{device:?} of {driver} is given to {} while {driver} may have it prepared for {uid}",
                    wanted.uid
                );
            }
        }
    }

    fn may_share(&self, one: &ClaimUid, other: &ClaimUid) -> bool {
        let pairs = &self.imported_together;
        pairs.contains(&(one.clone(), other.clone())) || pairs.contains(&(other.clone(), one.clone()))
    }

    /// Imports an unknown claim of a kubelet's file, with a pod that holds it.
    fn import(&mut self, claim: &AllocatedClaim, pod: &PodUid, is_held: bool) {
        let is_busy = !self.handed_over.is_empty() || !self.written.is_empty();
        let is_known = self.node.claim(&claim.uid).is_some() || self.node.claim_named(&claim.key).is_some();
        if is_busy || is_known || self.node.pod(pod).is_some() || self.node.is_in_flight(pod) {
            return;
        }
        let drivers = claim.drivers.iter().map(|(driver, allocated)| {
            let prepared = |each: &AllocatedDevice| PreparedDevice {
                requests: vec![each.request.clone()],
                pool: each.pool.clone(),
                device: each.device.clone(),
                share: each.share.clone(),
                cdi_devices: Vec::new(),
            };
            let devices = allocated.devices.iter().map(prepared).collect();
            (driver.clone(), allocated.skip.clone(), devices)
        });
        let imported = Claim::imported(claim.key.clone(), claim.uid.clone(), pod.clone(), drivers);
        for view in self.node.claims() {
            for driver in imported.preparations.keys() {
                let known = devices_of(view.claim, driver);
                let new = devices_of(&imported, driver);
                if known
                    .iter()
                    .any(|known| new.iter().any(|new| collide(known, new)))
                {
                    let pair = (imported.uid.clone(), view.claim.uid.clone());
                    self.imported_together.insert(pair);
                }
            }
        }
        for (driver, preparation) in &imported.preparations {
            if preparation.skip.contains("*") {
                continue;
            }
            let part = (imported.uid.clone(), driver.clone());
            // The file does not say that access is for administration.
            let devices = claim.drivers[driver].devices.clone();
            self.devices.insert(part.clone(), devices);
            self.touched.insert(part.clone());
            self.truth.insert(part);
        }
        self.disk.claims.insert(imported.uid.clone(), imported.clone());
        self.node.put_claim(imported.clone());
        if is_held {
            let holder = Pod {
                uid: pod.clone(),
                name: PodName::default(),
                source: Source::Imported,
                fingerprint: 0,
                before_reboot: false,
                metadata: PodMetadata::default(),
                containers: Vec::new(),
                allocations: Vec::new(),
                claims: vec![PodClaim {
                    name: String::new(),
                    key: imported.key,
                    uid: imported.uid,
                }],
                claim_uses: Vec::new(),
            };
            self.disk.pods.insert(pod.clone(), holder.clone());
            self.pods.insert(pod.clone(), holder.clone());
            self.node.put(holder).unwrap();
        }
    }

    fn commit(&mut self, number: u8) {
        let Some(place) = place(&self.admissions, number) else {
            return;
        };
        let Admission {
            id,
            request,
            committing,
        } = &mut self.admissions[place];
        // An admission waits for the write of its intent.
        let is_intent = |change: &Change| matches!(change, Change::Intent(intent) if intent == id);
        let handed_over = self.handed_over.iter().map(|write| &write.change);
        if handed_over
            .chain(self.written.iter().map(|(change, _)| change))
            .any(is_intent)
        {
            return;
        }
        let answers = answers(&self.node, *id);
        let waits = self.node.waiting_for(*id);
        match self.node.begin_commit(*id, request, answers) {
            Ok(commit) => {
                assert!(!*committing && waits.is_empty());
                *committing = true;
                let pods = vec![(commit.pod.uid.clone(), Some(commit.pod.clone()))];
                let change = Change::Commit(*id, Box::new(commit.pod));
                self.hand_over(pods, commit.claims, Vec::new(), change);
            }
            Err(_) => assert!(
                *committing || !waits.is_empty(),
                "nothing is missing, and yet there is no commit"
            ),
        }
    }

    fn release(&mut self, pod: &PodUid) {
        if let Ok(put) = self.node.begin_release(pod) {
            self.releasing.insert(pod.clone());
            let change = Change::Release(pod.clone());
            self.hand_over(vec![(pod.clone(), None)], put, Vec::new(), change);
        }
    }

    /// An operator deletes the record of an abandoned claim.
    fn forget(&mut self, uid: &ClaimUid) {
        let phase = self.node.claim(uid).map(|view| view.phase);
        if let Ok(record) = self.node.begin_forget(uid) {
            assert_eq!(phase, Some(Phase::Abandoned), "{uid} is forgotten");
            assert!(
                self.members(uid).is_empty(),
                "a claim that pods want is forgotten"
            );
            self.truth.retain(|(claim, _)| claim != uid);
            self.touched.retain(|(claim, _)| claim != uid);
            self.devices.retain(|(claim, _), _| claim != uid);
            self.hand_over(Vec::new(), Vec::new(), record.delete, Change::Record(record.id));
        }
    }

    fn record(&mut self) {
        if let Some(record) = self.node.begin_record() {
            for uid in &record.delete {
                assert!(self.members(uid).is_empty(), "a claim that pods hold is deleted");
            }
            self.hand_over(Vec::new(), record.put, record.delete, Change::Record(record.id));
        }
    }

    fn hand_over(
        &mut self,
        pods: Vec<(PodUid, Option<Pod>)>,
        put: Vec<Claim>,
        delete: Vec<ClaimUid>,
        change: Change,
    ) {
        self.handed_over.push(Write {
            pods,
            put,
            delete,
            change,
        });
    }

    fn write(&mut self, place: usize) {
        let write = self.handed_over.remove(place);
        let before = self.disk.clone();
        for (uid, pod) in write.pods {
            match pod {
                Some(pod) => self.disk.pods.insert(uid, pod),
                None => self.disk.pods.remove(&uid),
            };
        }
        for claim in write.put {
            self.disk.claims.insert(claim.uid.clone(), claim);
        }
        for uid in write.delete {
            self.disk.claims.remove(&uid);
        }
        self.written.push_back((write.change, before));
    }

    fn settle(&mut self, change: Change, is_written: bool) {
        let node = &mut self.node;
        match (change, is_written) {
            (Change::Intent(id), true) => node.finish_intent(id),
            (Change::Intent(id), false) => {
                node.cancel_intent(id);
                node.abort(id);
                self.admissions.retain(|each| each.id != id);
            }
            (Change::Commit(id, pod), _) => {
                match is_written {
                    true => node.finish_commit(id),
                    false => node.cancel_commit(id),
                }
                if is_written {
                    self.pods.insert(pod.uid.clone(), *pod);
                }
                self.admissions.retain(|each| each.id != id);
            }
            (Change::Release(pod), true) => {
                node.finish_release(&pod);
                self.pods.remove(&pod);
                self.releasing.remove(&pod);
            }
            (Change::Release(pod), false) => {
                node.cancel_release(&pod);
                self.releasing.remove(&pod);
            }
            (Change::Record(id), true) => node.finish_record(id),
            (Change::Record(id), false) => node.cancel_record(id),
        }
    }

    /// Drivers are called.
    fn start(&mut self, calls: Vec<Call>) {
        for call in calls {
            let serving = self.node.serving_driver(&call.driver);
            assert_eq!(
                serving,
                Some(call.connection),
                "not the plugin that serves is called"
            );
            for (uid, _) in &call.claims {
                let asked = |other: &Call| {
                    other.driver == call.driver && other.claims.iter().any(|(other, _)| other == uid)
                };
                assert!(
                    !self.calls.iter().any(asked),
                    "{} is called twice at once for {uid}",
                    call.driver
                );
                let members = self.members(uid);
                let record = self.disk.claims.get(uid);
                let known = record.is_some_and(|claim| claim.preparations.contains_key(&call.driver));
                assert!(known, "{} is called for {uid}, which is not on disk", call.driver);
                match call.operation {
                    Operation::Prepare => {
                        assert!(!members.is_empty(), "{uid} is prepared without pods");
                        self.touched.insert((uid.clone(), call.driver.clone()));
                        let devices = devices_of(self.node.claim(uid).unwrap().claim, &call.driver);
                        self.devices.insert((uid.clone(), call.driver.clone()), devices);
                    }
                    Operation::Unprepare => {
                        let claim = self.node.claim(uid).unwrap().claim;
                        let is_given_up = claim.abandoned().any(|driver| *driver == call.driver);
                        assert!(
                            members.is_empty() || is_given_up,
                            "{uid} is unprepared while {members:?} hold it"
                        );
                    }
                }
            }
            self.calls.push(call);
        }
    }

    /// A driver executes a call.
    fn execute(&mut self, call: &Call, uid: &ClaimUid) {
        let part = (uid.clone(), call.driver.clone());
        match call.operation {
            Operation::Prepare => {
                self.truth.insert(part);
            }
            Operation::Unprepare => {
                self.truth.remove(&part);
                self.touched.remove(&part);
                self.devices.remove(&part);
            }
        }
    }

    fn answer(&mut self, call: &Call, style: Style) {
        let mut prepared: BTreeMap<ClaimUid, Result<Vec<PreparedDevice>, String>> = BTreeMap::new();
        for (place, (uid, _)) in call.claims.iter().enumerate() {
            let fails = style == Style::FailedBefore || style == Style::Partial && place % 2 == 0;
            if fails {
                prepared.insert(uid.clone(), Err("no".into()));
                continue;
            }
            self.execute(call, uid);
            let claim = self.node.claim(uid).unwrap().claim;
            let mut devices = answer_of(claim, &call.driver);
            if style == Style::Foreign
                && let Some(device) = devices.first_mut()
            {
                device.device.push('x');
            }
            if style != Style::Missing || place > 0 {
                prepared.insert(uid.clone(), Ok(devices));
            }
        }
        if style == Style::Stray {
            prepared.insert("stray".into(), Ok(Vec::new()));
        }
        let is_late = !self.registered.contains(&call.connection);
        let before = self.claims();
        match (style, call.operation) {
            (Style::FailedBefore | Style::FailedAfter, _) => self.node.call_failed(call.id, "gone", self.now),
            (_, Operation::Prepare) => {
                self.node.prepared(call.id, prepared, is_cdi_name, self.now);
            }
            (_, Operation::Unprepare) => {
                let results = prepared.into_iter().map(|(uid, result)| (uid, result.map(drop)));
                self.node.unprepared(call.id, results.collect(), self.now);
            }
        }
        let fine = matches!(
            style,
            Style::Good | Style::Partial | Style::Foreign | Style::Missing
        );
        if is_late || !fine {
            let after = self.claims();
            for (uid, claim) in &before {
                assert_eq!(
                    after.get(uid),
                    Some(claim),
                    "an answer that does not count changed {uid}"
                );
            }
        }
    }

    fn claims(&self) -> BTreeMap<ClaimUid, (Claim, Vec<PodUid>)> {
        let view = |view: ClaimView<'_>| (view.claim.uid.clone(), (view.claim.clone(), view.pods));
        self.node.claims().map(view).collect()
    }

    fn crash(&mut self, lost: usize, executed: bool, rebooted: bool) {
        for _ in 0..lost {
            if let Some((_, before)) = self.written.pop_back() {
                self.disk = before;
            }
        }
        let calls = core::mem::take(&mut self.calls);
        for call in calls.iter().filter(|_| executed) {
            for (uid, _) in &call.claims {
                self.execute(call, uid);
            }
        }
        if rebooted {
            self.truth.clear();
            self.rebooted.extend(self.disk.claims.keys().cloned());
            for claim in self.disk.claims.values_mut() {
                claim.rebooted();
            }
            for pod in self.disk.pods.values_mut() {
                pod.before_reboot = true;
            }
        }
        *self = Self {
            node: Node::restore(Restored {
                pods: self.disk.pods.clone(),
                claims: self.disk.claims.values().cloned().collect(),
                ..Restored::default()
            }),
            now: self.now,
            pods: self.disk.pods.clone(),
            disk: core::mem::take(&mut self.disk),
            touched: core::mem::take(&mut self.touched),
            truth: core::mem::take(&mut self.truth),
            devices: core::mem::take(&mut self.devices),
            imported_together: core::mem::take(&mut self.imported_together),
            rebooted: core::mem::take(&mut self.rebooted),
            ..Self::default()
        };
    }

    fn check(&mut self) {
        assert_sound(&self.node);
        // A driver that skips unprepare does not keep a claim after its pods are gone.
        let (node, touched) = (&self.node, &self.touched);
        let is_used = |uid: &ClaimUid| node.claim(uid).is_some_and(|view| !view.pods.is_empty());
        let skips = |uid: &ClaimUid| matches!(uid.as_str(), "c5");
        self.devices.retain(|(uid, _), _| !skips(uid) || is_used(uid));
        let is_there =
            |uid: &ClaimUid| node.claim(uid).is_some() || touched.iter().any(|(touched, _)| touched == uid);
        self.imported_together
            .retain(|(one, other)| is_there(one) && is_there(other));
        for ((uid, driver), devices) in &self.devices {
            for ((other, _), theirs) in self.devices.iter().filter(|((_, each), _)| each == driver) {
                let is_twice = devices
                    .iter()
                    .any(|one| theirs.iter().any(|other| collide(one, other)));
                assert!(
                    uid == other || !is_twice || self.may_share(uid, other),
                    "{driver} has a device of both {uid} and {other}"
                );
            }
        }
        let shared = self.node.shared_claim_devices();
        assert!(
            shared.is_empty() || !self.imported_together.is_empty(),
            "claims share a device: {shared:?}"
        );
        for (uid, driver) in &self.touched {
            let record = self.disk.claims.get(uid);
            let known = record.is_some_and(|claim| claim.preparations.contains_key(driver));
            let skips = |claim: &AllocatedClaim| {
                let allocated = claim.drivers.get(driver).filter(|_| claim.uid == *uid);
                allocated.is_some_and(|each| each.skip.iter().any(|skip| skip != "NodePrepareResources"))
            };
            let skipped = (0..CLAIMS).map(catalogue).any(|claim| skips(&claim));
            assert!(
                known || skipped,
                "{driver} may have prepared {uid}, and the disk does not know"
            );
        }
        for view in self.node.claims() {
            let uid = &view.claim.uid;
            let members = self.members(uid);
            assert_eq!(view.pods, members.iter().cloned().collect::<Vec<_>>());
            let in_use = matches!(view.phase, Phase::Preparing | Phase::Prepared);
            assert_eq!(
                in_use,
                !members.is_empty(),
                "{uid} is {:?} with {members:?}",
                view.phase
            );
            if view.phase == Phase::Prepared {
                for (driver, preparation) in &view.claim.preparations {
                    if preparation.state == PreparationState::Abandoned {
                        assert_eq!(preparation.devices, [], "a pod could get what is not its own");
                        continue;
                    }
                    let is_prepared = self.truth.contains(&(uid.clone(), driver.clone()));
                    assert!(
                        is_prepared || preparation.skip.contains("*"),
                        "{driver} has not prepared {uid}"
                    );
                }
            }
        }
        for pod in self.pods.values() {
            assert_eq!(
                self.node.pod(&pod.uid),
                Some(pod),
                "a pod is not what was committed"
            );
            assert_eq!(
                self.node.might_need_unprepare(&pod.uid),
                self.may_need_unprepare(pod)
            );
            for uid in pod.claim_uids() {
                let phase = self.node.claim(&uid).map(|view| view.phase);
                let again = phase == Some(Phase::Preparing) && self.rebooted.contains(&uid);
                assert!(
                    phase == Some(Phase::Prepared) || again,
                    "{uid} of {} is {phase:?}",
                    pod.uid
                );
            }
        }
        for pod in self.disk.pods.values() {
            for uid in pod.claim_uids() {
                let claim = self.disk.claims.get(&uid);
                let is_prepared = claim.is_some_and(Claim::is_prepared);
                assert!(
                    is_prepared || claim.is_some() && self.rebooted.contains(&uid),
                    "{uid} on disk: {claim:?}"
                );
            }
        }
    }

    fn may_need_unprepare(&self, pod: &Pod) -> bool {
        let admitted = self.admissions.iter().any(|each| each.request.uid == pod.uid);
        let claims = self.admissions.iter().filter(|each| each.request.uid == pod.uid);
        let joins = admitted && claims.flat_map(|each| &each.request.claims).next().is_some();
        !pod.claims.is_empty() || joins || !self.node.pending_unprepare(&pod.uid).is_empty()
    }

    /// Lets drivers answer, writes succeed and time pass, until nothing changes.
    fn calm_down(&mut self) {
        for admission in core::mem::take(&mut self.admissions) {
            if admission.committing {
                self.admissions.push(admission);
            } else {
                self.node.abort(admission.id);
            }
        }
        (0..DRIVERS.len()).for_each(|driver| self.bring_back(driver));
        for _ in 0..100 {
            while !self.handed_over.is_empty() {
                self.write(0);
            }
            while let Some((change, _)) = self.written.pop_front() {
                self.settle(change, true);
            }
            while let Some(call) = self.calls.pop() {
                self.answer(&call, Style::Good);
            }
            self.check();
            let calls = self.node.due_calls(self.now);
            self.start(calls);
            self.record();
            if self.calls.is_empty() && self.handed_over.is_empty() {
                match self.node.next_call() {
                    Some(at) => self.now = self.now.max(at),
                    None => return,
                }
            }
        }
        panic!("it does not come to rest: {}", everything(&self.node));
    }

    fn check_at_rest(&self) {
        let mut held: BTreeSet<ClaimUid> = BTreeSet::new();
        for view in self.node.claims() {
            // An imported claim is prepared again after a reboot when a pod requests it.
            if view
                .claim
                .preparations
                .values()
                .any(|each| each.allocated.is_none())
            {
                held.insert(view.claim.uid.clone());
                continue;
            }
            assert!(
                !view.pods.is_empty(),
                "{} is left behind: {:?}",
                view.claim.uid,
                view.phase
            );
            assert_eq!(
                view.phase,
                Phase::Prepared,
                "{} is not prepared: {:?}",
                view.claim.uid,
                view.waits
            );
            assert_eq!(
                self.disk.claims.get(&view.claim.uid),
                Some(view.claim),
                "memory and disk differ"
            );
            let left = view.claim.abandoned().next();
            assert_eq!(left, None, "{} is not asked to unprepare", view.claim.uid);
            held.insert(view.claim.uid.clone());
        }
        let on_disk: BTreeSet<ClaimUid> = self.disk.claims.keys().cloned().collect();
        assert_eq!(on_disk, held, "the disk has other claims than the node");
        for (uid, driver) in self.truth.iter().filter(|(uid, _)| uid.as_str() != "c5") {
            let view = self.node.claim(uid);
            assert!(
                view.is_some_and(|view| view.claim.preparations.contains_key(driver)),
                "{uid} was forgotten, and {driver} still has it"
            );
        }
    }
}

fn place<T>(values: &[T], number: u8) -> Option<usize> {
    usize::from(number).checked_rem(values.len())
}

fn nth<T>(values: &[T], number: u8) -> Option<&T> {
    values.get(place(values, number)?)
}

fn live_through(history: &[Step]) -> String {
    let mut world = World {
        now: START,
        ..World::default()
    };
    for driver in 0..DRIVERS.len() {
        world.bring_back(driver);
    }
    for step in history {
        world.apply(step);
        world.check();
    }
    let end = everything(&world.node);
    world.calm_down();
    world.check_at_rest();
    for pod in world.pods.clone().into_keys() {
        world.release(&pod);
    }
    world.calm_down();
    world.check_at_rest();
    assert_eq!(
        world.disk,
        Disk::default(),
        "something is left of pods that are gone"
    );
    end
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_the_invariants_of_claims(history in proptest::collection::vec(step(), 1..100)) {
        let once = live_through(&history);
        let again = live_through(&history);
        prop_assert_eq!(once, again, "the same history led to another state");
    }
}
