//! Callers that admit and remove pods, and the answers that they got.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use devlet_client::{Client, Code, Status, v1};
use devlet_testkit::PATIENCE;

use crate::troubles::{DRIVERS, RESOURCES};

pub(crate) const CALLERS: usize = 16;
const PODS_PER_CALLER: usize = 40;
/// Claims that any pod may use.
const SHARED: u64 = 8;
/// Maximum time of an admission or a removal.
const WAIT: Duration = Duration::from_secs(2);

/// The answer for each pod of a caller.
pub(crate) type Held = BTreeMap<String, Answer>;

/// State that the callers share.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) held: Held,
    /// Pods whose caller cancelled the admission and then removed them. The removal may have overtaken the admission, so
    /// they are removed once more before their next admission.
    pub(crate) left: BTreeSet<String>,
}

/// The devices of a pod.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// By resource and id.
    devices: BTreeSet<(String, String)>,
    /// Devices of claims: driver, UID of the claim, CDI name.
    claimed: BTreeSet<(String, String, String)>,
}

impl Answer {
    fn of(pod: &v1::Pod) -> Self {
        let held = pod.containers.iter().flat_map(|container| &container.devices);
        let ids = held.flat_map(|held| held.ids.iter().map(|id| (held.resource.clone(), id.clone())));
        let used = pod
            .containers
            .iter()
            .flat_map(|container| &container.claim_devices);
        let names = used.flat_map(|used| {
            let uid = used.id.clone().unwrap_or_default().uid;
            let names = used
                .device
                .iter()
                .flat_map(|device| device.cdi_devices.iter().cloned());
            names.map(move |name| (used.driver.clone(), uid.clone(), name))
        });
        Self {
            devices: ids.collect(),
            claimed: names.collect(),
        }
    }
}

/// Returns the claims that drivers must have prepared: driver, and UID of the claim.
pub(crate) fn claims_of(held: &Held) -> BTreeSet<(String, String)> {
    let all = held.values().flat_map(|answer| &answer.claimed);
    all.map(|(driver, uid, _)| (driver.clone(), uid.clone()))
        .collect()
}

/// Counts of events.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) admitted: AtomicU64,
    /// Admissions with claims.
    pub(crate) claimed: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) removed: AtomicU64,
    pub(crate) left: AtomicU64,
    /// Cancelled admissions that completed after the removal of the pod.
    pub(crate) late: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) faults: AtomicU64,
}

impl Tally {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// A pseudo-random generator with a fixed seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (number ^ (number >> 31)) % sides
    }
}

/// A pod to admit.
pub(crate) struct Wish {
    pub(crate) name: String,
    /// For each container, a resource and the number of devices, if any.
    devices: Vec<Option<(&'static str, u64)>>,
    /// The drivers of each claim, by its name. All containers use all claims.
    claims: Vec<(String, &'static [&'static str])>,
}

impl Wish {
    /// Returns a random pod with devices, claims, or both. A claim of its own is allocated again each time, possibly of
    /// other drivers.
    pub(crate) fn rolled(name: &str, dice: &mut Dice) -> Self {
        let mut resource = || RESOURCES[dice.roll(3) as usize].0;
        let (first, second) = (resource(), resource());
        let mut devices = vec![Some((first, 1 + dice.roll(3)))];
        if dice.roll(4) == 0 {
            devices.push(Some((second, 1)));
        }
        let own = format!("own-{name}");
        let shared = format!("shared-{}", dice.roll(SHARED));
        let claims = match dice.roll(8) {
            0 => vec![(own, &DRIVERS[..1])],
            1 => vec![(own, &DRIVERS[..])],
            2 => vec![(shared, &DRIVERS[..])],
            3 => vec![(own, &DRIVERS[1..]), (shared, &DRIVERS[..])],
            _ => Vec::new(),
        };
        if !claims.is_empty() && dice.roll(2) == 0 {
            devices = vec![None];
        }
        Self {
            name: name.to_owned(),
            devices,
            claims,
        }
    }

    /// Returns a pod with one claim of this driver and nothing else.
    pub(crate) fn of_claim(name: &str, driver: usize) -> Self {
        Self {
            name: name.to_owned(),
            devices: vec![None],
            claims: vec![(format!("own-{name}"), &DRIVERS[driver..=driver])],
        }
    }

    /// Returns the manifest of the pod and its claims, as in a cluster.
    fn manifest(&self) -> String {
        let pod = &self.name;
        let list = |each: fn(&String) -> String| {
            let all: Vec<String> = self.claims.iter().map(|(name, _)| each(name)).collect();
            all.join(", ")
        };
        let claims = list(|name| format!("{{name: {name}, resourceClaimName: {name}}}"));
        let used = list(|name| format!("{{name: {name}}}"));
        let mut text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}, uid: {pod}}}\nspec:\n  resourceClaims: [{claims}]\n  \
             containers:\n"
        );
        for (devices, name) in self.devices.iter().zip(["main", "second"]) {
            let limits = devices.map(|(resource, count)| format!("{resource}: {count}"));
            let limits = limits.unwrap_or_default();
            let _ = writeln!(
                text,
                "  - {{name: {name}, resources: {{limits: {{{limits}}}, claims: [{used}]}}}}"
            );
        }
        for (name, drivers) in &self.claims {
            let result = |driver| format!("{{request: one, driver: {driver}, pool: pool, device: {name}}}");
            let results = drivers.iter().map(result).collect::<Vec<_>>().join(", ");
            let _ = write!(
                text,
                "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}, uid: uid-{name}}}\n\
                 spec: {{devices: {{requests: [{{name: one}}]}}}}\nstatus:\n  reservedFor: [{{resource: pods, name: {pod}, \
                 uid: {pod}}}]\n  allocation: {{devices: {{results: [{results}]}}}}\n"
            );
        }
        text
    }

    /// Returns the expected claim devices of the pod.
    fn claimed(&self) -> BTreeSet<(String, String, String)> {
        let claims = self.claims.iter();
        let used = claims.flat_map(|(name, drivers)| {
            drivers.iter().map(move |driver| {
                let (uid, cdi) = (format!("uid-{name}"), format!("{driver}/device={name}"));
                ((*driver).to_owned(), uid, cdi)
            })
        });
        used.collect()
    }
}

/// Admits a pod. The answer must contain all of its claims.
pub(crate) async fn admit(client: &Client, wish: &Wish) -> Result<Answer, Status> {
    let request = v1::AdmitRequest {
        manifest: wish.manifest(),
        wait_ms: Some(WAIT.as_millis() as u64),
        ..Default::default()
    };
    let mut events = client.admit(request).await?;
    while let Some(event) = events.message().await? {
        if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
            let answer = Answer::of(&pod);
            assert_eq!(answer.claimed, wish.claimed(), "{}", wish.name);
            return Ok(answer);
        }
    }
    Err(Status::unavailable("the stream ended without an answer"))
}

/// Removes a pod. If a driver exceeds the time, the removal continues in the background.
pub(crate) async fn remove(client: &Client, pod: &str) -> Result<(), Status> {
    let request = v1::RemovePodRequest {
        pod: pod.to_owned(),
        wait_ms: Some(WAIT.as_millis() as u64),
        ..Default::default()
    };
    match client.remove_pod(request).await {
        Err(status) if matches!(status.code(), Code::NotFound | Code::DeadlineExceeded) => Ok(()),
        answer => answer.map(drop),
    }
}

/// Removes a pod with a cancelled admission once more.
pub(crate) async fn remove_late(client: &Client, pod: &str, tally: &Tally) {
    let request = v1::ListPodsRequest { pod: pod.to_owned() };
    match client.list_pods(request).await {
        Ok(_) => Tally::count(&tally.late),
        Err(status) => assert_eq!(status.code(), Code::NotFound, "{status:?}"),
    }
    remove(client, pod).await.unwrap();
}

/// Runs one caller until it is stopped.
pub(crate) async fn call(
    client: Client,
    number: usize,
    stop: Arc<AtomicBool>,
    tally: Arc<Tally>,
    known: Arc<Mutex<Known>>,
) {
    let mut dice = Dice(number as u64);
    while !stop.load(Ordering::Relaxed) {
        let name = format!("pod-{number}-{}", dice.roll(PODS_PER_CALLER as u64));
        let is_held = known.lock().unwrap().held.contains_key(&name);
        let has_left = known.lock().unwrap().left.remove(&name);
        if has_left {
            remove_late(&client, &name, &tally).await;
        }
        if is_held {
            remove(&client, &name).await.unwrap();
            known.lock().unwrap().held.remove(&name);
            Tally::count(&tally.removed);
        } else if dice.roll(20) == 0 {
            // Cancels the admission, then removes the pod.
            let patience = Duration::from_micros(dice.roll(3000));
            let wish = Wish::rolled(&name, &mut dice);
            let _ = tokio::time::timeout(patience, admit(&client, &wish)).await;
            remove(&client, &name).await.unwrap();
            known.lock().unwrap().left.insert(name);
            Tally::count(&tally.left);
        } else {
            come(&client, &Wish::rolled(&name, &mut dice), &tally, &known).await;
        }
        if dice.roll(50) == 0 {
            client.list_pods(v1::ListPodsRequest::default()).await.unwrap();
            client
                .list_resources(v1::ListResourcesRequest::default())
                .await
                .unwrap();
            client
                .list_claims(v1::ListClaimsRequest::default())
                .await
                .unwrap();
            Tally::count(&tally.reads);
        }
        tokio::time::sleep(Duration::from_millis(2 + dice.roll(40))).await;
    }
}

/// Admits and starts a pod. Only expected errors are allowed.
async fn come(client: &Client, wish: &Wish, tally: &Tally, known: &Mutex<Known>) {
    match admit(client, wish).await {
        Ok(answer) => {
            Tally::count(&tally.admitted);
            if !answer.claimed.is_empty() {
                Tally::count(&tally.claimed);
            }
            known.lock().unwrap().held.insert(wish.name.clone(), answer);
            let request = v1::StartContainerRequest {
                pod: wish.name.clone(),
                container: "main".into(),
                ..Default::default()
            };
            client.start_container(request).await.unwrap();
        }
        Err(status) => {
            let expected = matches!(
                status.code(),
                Code::ResourceExhausted
                    | Code::DeadlineExceeded
                    | Code::FailedPrecondition
                    | Code::Aborted
                    | Code::Unavailable
                    | Code::Internal
                    | Code::Unknown
                    | Code::PermissionDenied
            );
            assert!(expected, "{}: {status:?}", wish.name);
            Tally::count(&tally.refused);
        }
    }
}

/// Checks that the listed pods match the answers, no device is held twice, and all claims are prepared and list their pods.
pub(crate) async fn check(client: &Client, held: &Held) {
    let pods = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    let name = |id: Option<v1::PodId>| id.unwrap().name;
    let there: Held = pods
        .iter()
        .map(|pod| (name(pod.id.clone()), Answer::of(pod)))
        .collect();
    assert_eq!(there, *held, "the listed pods differ from the answers");
    let all: Vec<_> = there.values().flat_map(|answer| &answer.devices).collect();
    let distinct: BTreeSet<_> = all.iter().collect();
    assert_eq!(all.len(), distinct.len(), "a device is held twice");
    let list = client
        .list_claims(v1::ListClaimsRequest::default())
        .await
        .unwrap();
    let known = prepared(&list);
    for (claim, pods) in holders(held) {
        assert_eq!(known.get(&claim), Some(&pods), "{claim}, which was answered");
    }
}

/// Waits until only the claims that pods hold are listed.
pub(crate) async fn until_no_other_claims(client: &Client, held: &Held) {
    let wanted = holders(held);
    let mut last = v1::ClaimList::default();
    let found = async {
        let request = v1::ListClaimsRequest::default();
        let mut lists = client.watch_claims(request).await.unwrap();
        while last.revision == 0 || prepared(&last) != wanted || last.claims.len() != wanted.len() {
            last = lists.message().await.unwrap().unwrap();
        }
    };
    let found = tokio::time::timeout(PATIENCE, found).await;
    assert!(found.is_ok(), "claims stay: {:#?}, not {wanted:?}", last.claims);
}

/// Returns the pods that hold each claim, by the UID of the claim.
fn holders(held: &Held) -> BTreeMap<String, BTreeSet<String>> {
    let mut all = BTreeMap::<_, BTreeSet<_>>::new();
    for (pod, answer) in held {
        for (_, uid, _) in &answer.claimed {
            all.entry(uid.clone()).or_default().insert(pod.clone());
        }
    }
    all
}

/// Like [`holders`], from a list and for prepared claims only.
fn prepared(list: &v1::ClaimList) -> BTreeMap<String, BTreeSet<String>> {
    let claims = list.claims.iter();
    claims
        .filter(|claim| claim.phase() == v1::ClaimPhase::Prepared)
        .map(|claim| {
            let pods = claim.pods.iter().map(|pod| pod.name.clone()).collect();
            (claim.id.clone().unwrap_or_default().uid, pods)
        })
        .collect()
}
