//! `kill -9` under load, with claims of two drivers: devlet forgets no claim, keeps claims of pods prepared, and unprepares
//! all others in the end. The drivers report which claims they have prepared.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use devlet_client::{Client, Code, Status, locate, v1};
use devlet_testkit::{DriverScript, Event, Fault, Plugin};
use tokio::sync::watch;

use crate::common::{Daemon, root};
use crate::crash::{random, rounds};

const WORKERS: usize = 8;
const PODS_PER_WORKER: usize = 3;
const DRIVERS: [&str; 2] = ["one.acme.com", "two.acme.com"];

/// A pod of a worker. Number 0 has a claim of one driver, number 1 a claim of both drivers. Number 2 has a claim of one
/// driver, and shares a claim of both drivers with a pod of another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    worker: usize,
    number: usize,
}

impl Job {
    fn all() -> impl Iterator<Item = Self> {
        (0..WORKERS).flat_map(|worker| (0..PODS_PER_WORKER).map(move |number| Self { worker, number }))
    }

    fn name(self) -> String {
        format!("pod-{}-{}", self.worker, self.number)
    }

    /// Returns its claims: the name and the drivers of each.
    fn claims(self) -> Vec<(String, &'static [&'static str])> {
        let own = format!("own-{}-{}", self.worker, self.number);
        match self.number {
            0 => vec![(own, &DRIVERS[self.worker % 2..][..1])],
            1 => vec![(own, &DRIVERS)],
            _ => vec![
                (own, &DRIVERS[..1]),
                (format!("shared-{}", self.worker / 2), &DRIVERS),
            ],
        }
    }

    /// Returns the manifests of the pod and of its claims.
    fn manifest(self) -> String {
        let pod = self.name();
        let claims = self.claims();
        let mut text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}, uid: {pod}}}\nspec:\n  resourceClaims:\n"
        );
        for (name, _) in &claims {
            writeln!(text, "  - {{name: {name}, resourceClaimName: {name}}}").unwrap();
        }
        text += "  containers:\n  - name: main\n    resources:\n      claims:\n";
        for (name, _) in &claims {
            writeln!(text, "      - {{name: {name}}}").unwrap();
        }
        for (name, drivers) in claims {
            write!(
                text,
                "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}, uid: uid-{name}}}\n\
                 spec: {{devices: {{requests: [{{name: one}}]}}}}\nstatus:\n  reservedFor:\n"
            )
            .unwrap();
            for user in Self::all().filter(|job| job.claims().iter().any(|(used, _)| *used == name)) {
                let user = user.name();
                writeln!(text, "  - {{resource: pods, name: {user}, uid: {user}}}").unwrap();
            }
            text += "  allocation:\n    devices:\n      results:\n";
            for driver in drivers {
                writeln!(
                    text,
                    "      - {{request: one, driver: {driver}, pool: pool, device: {name}}}"
                )
                .unwrap();
            }
        }
        text
    }

    /// Returns the CDI names for a runtime.
    fn cdi_devices(self) -> BTreeSet<String> {
        let claims = self.claims().into_iter();
        let names = claims.flat_map(|(name, drivers)| {
            let name = move |driver: &&str| format!("{driver}/device={name}");
            drivers.iter().map(name).collect::<Vec<_>>()
        });
        names.collect()
    }
}

/// The state of a pod as far as the callers know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It was removed, or never admitted.
    Absent,
    Holds,
    /// A call was not answered: devlet has carried it out or not.
    InDoubt,
}

/// The answers to all calls, and their number.
#[derive(Debug)]
struct Answers {
    pods: Mutex<BTreeMap<Job, Known>>,
    count: watch::Sender<u64>,
}

impl Answers {
    fn known(&self, job: Job) -> Known {
        self.pods.lock().unwrap()[&job]
    }

    fn set(&self, job: Job, known: Known) {
        self.pods.lock().unwrap().insert(job, known);
    }
}

fn cdi_devices(pod: &v1::Pod) -> BTreeSet<String> {
    let used = pod
        .containers
        .iter()
        .flat_map(|container| &container.claim_devices);
    let devices = used.filter_map(|used| used.device.as_ref());
    devices.flat_map(|device| device.cdi_devices.clone()).collect()
}

async fn admit(client: &Client, job: Job) -> Result<(), Status> {
    let request = v1::AdmitRequest {
        manifest: job.manifest(),
        ..v1::AdmitRequest::default()
    };
    let mut events = client.admit(request).await?;
    while let Some(event) = events.message().await? {
        if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
            assert_eq!(cdi_devices(&pod), job.cdi_devices());
            return Ok(());
        }
    }
    Err(Status::unavailable("the stream ended without an answer"))
}

async fn remove(client: &Client, job: Job) -> Result<(), Status> {
    let request = v1::RemovePodRequest {
        pod: job.name(),
        ..v1::RemovePodRequest::default()
    };
    client.remove_pod(request).await.map(drop)
}

/// Admits and removes a worker's pods in turn until the daemon is gone.
async fn work(client: Client, answers: Arc<Answers>, worker: usize) {
    for number in (0..PODS_PER_WORKER).cycle() {
        let job = Job { worker, number };
        let known = answers.known(job);
        answers.set(job, Known::InDoubt);
        let answered = match known {
            Known::Absent => admit(&client, job).await.map(|()| Known::Holds),
            Known::Holds => remove(&client, job).await.map(|()| Known::Absent),
            Known::InDoubt => panic!("{job:?} was not checked after the last crash"),
        };
        match answered {
            Ok(known) => {
                answers.set(job, known);
                answers.count.send_modify(|count| *count += 1);
            }
            Err(status) => {
                let lost = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled);
                assert!(lost, "{job:?}: {status:?}");
                return;
            }
        }
    }
}

/// When the daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kill {
    /// At a random moment.
    Anywhen,
    /// By a driver, right after it has answered this call.
    Answered(usize, &'static str),
    /// When a driver has carried this call out, and before it answers.
    Unanswered(usize, &'static str),
}

const CALLS: [&str; 2] = ["NodePrepareResources", "NodeUnprepareResources"];

impl Kill {
    fn of(round: u64) -> Self {
        let driver = (round / 2 % 2) as usize;
        match round % 8 {
            0 | 4 => Self::Anywhen,
            1..=3 => Self::Answered(driver, CALLS[0]),
            5 => Self::Unanswered(driver, CALLS[0]),
            6 => Self::Answered(driver, CALLS[1]),
            _ => Self::Unanswered(driver, CALLS[1]),
        }
    }
}

/// The state after a restart.
#[derive(Debug)]
struct Found {
    /// For each driver, the UIDs of claims that pods hold.
    held: [BTreeSet<String>; 2],
    /// At the crash, a driver had prepared a claim that no pod holds: the crash came between the call and the commit.
    answered_in_vain: bool,
}

/// Compares the answers with the state of devlet and of the drivers, and resolves the doubts.
///
/// `at_crash` has the UIDs of the claims that each driver had prepared at the crash: since the restart, devlet may have
/// unprepared some of them.
async fn check(
    client: &Client,
    answers: &Answers,
    drivers: &mut [Plugin; 2],
    at_crash: &[BTreeSet<String>; 2],
    round: u64,
) -> Found {
    // The claims come first: a claim is recorded before a driver prepares it, and until a driver has unprepared it.
    let claims = client
        .list_claims(v1::ListClaimsRequest::default())
        .await
        .unwrap()
        .claims;
    let on_record: BTreeSet<String> = claims.into_iter().map(|claim| claim.id.unwrap().uid).collect();
    let pods = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    let there: BTreeMap<String, v1::Pod> = pods
        .into_iter()
        .map(|pod| (pod.id.clone().unwrap().name, pod))
        .collect();
    let prepared = [drivers[0].prepared(), drivers[1].prepared()];
    for (driver, prepared) in DRIVERS.iter().zip(&prepared) {
        let forgotten: Vec<&String> = prepared.difference(&on_record).collect();
        assert!(
            forgotten.is_empty(),
            "round {round}: {driver} has prepared {forgotten:?}, which devlet has not recorded"
        );
    }
    let mut held = [BTreeSet::new(), BTreeSet::new()];
    let mut wanted_in_vain = BTreeSet::new();
    let mut known = answers.pods.lock().unwrap();
    for (&job, known) in known.iter_mut() {
        let found = there.get(&job.name());
        match known {
            Known::Absent => assert_eq!(found, None, "round {round}: {job:?} is back"),
            Known::Holds => assert!(found.is_some(), "round {round}: {job:?} is gone"),
            Known::InDoubt => {
                *known = if found.is_some() {
                    Known::Holds
                } else {
                    Known::Absent
                };
            }
        }
        if let Some(pod) = found {
            assert_eq!(cdi_devices(pod), job.cdi_devices(), "round {round}: {job:?}");
        }
        for (claim, of) in job.claims() {
            let uid = format!("uid-{claim}");
            for (place, driver) in DRIVERS
                .iter()
                .enumerate()
                .filter(|(_, driver)| of.contains(driver))
            {
                if found.is_some() {
                    assert!(
                        prepared[place].contains(&uid),
                        "round {round}: {job:?} holds {uid}, which {driver} has not prepared"
                    );
                    held[place].insert(uid.clone());
                } else if at_crash[place].contains(&uid) {
                    wanted_in_vain.insert((place, uid.clone()));
                }
            }
        }
    }
    assert_eq!(
        there.len(),
        held_pods(&known),
        "round {round}: a pod that no caller has admitted"
    );
    let answered_in_vain = wanted_in_vain
        .iter()
        .any(|(place, uid)| !held[*place].contains(uid));
    Found {
        held,
        answered_in_vain,
    }
}

fn held_pods(known: &BTreeMap<Job, Known>) -> usize {
    known.values().filter(|known| **known == Known::Holds).count()
}

#[test]
fn no_claim_is_forgotten_by_kills_under_load() {
    let all = rounds();
    let root = root();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answers = Arc::new(Answers {
        pods: Mutex::new(Job::all().map(|job| (job, Known::Absent)).collect()),
        count: watch::Sender::new(0),
    });
    for directory in ["", "plugins_registry"] {
        let _ = std::fs::create_dir(root.path().join(directory));
    }
    let mut drivers = DRIVERS.map(|driver| Plugin::driver(&DriverScript::new(root.path(), driver)));
    let mut at_crash = [BTreeSet::new(), BTreeSet::new()];
    let (mut half_done, mut in_vain) = (0_u64, 0_u64);
    for round in 0..=all {
        let daemon = Daemon::with(root.path(), &["--log-level", "error"]);
        let client = runtime
            .block_on(Client::connect(locate::socket(root.path())))
            .unwrap();
        let found = runtime.block_on(check(&client, &answers, &mut drivers, &at_crash, round));
        for driver in &mut drivers {
            driver.until(&Event::Registered);
        }
        let kill = Kill::of(round);
        if found.answered_in_vain {
            half_done += 1;
            in_vain += u64::from(
                round > 0 && matches!(Kill::of(round - 1), Kill::Answered(_, call) if call == CALLS[0]),
            );
        }
        // Only in some rounds: unfinished work must survive several crashes.
        if round % 4 == 0 {
            for (driver, held) in drivers.iter_mut().zip(&found.held) {
                driver.until_prepared(held);
            }
        }
        if round == all {
            for driver in &mut drivers {
                driver.forget_events();
            }
            runtime.block_on(finish(&client, &answers));
            for driver in &mut drivers {
                driver.until_prepared(&BTreeSet::new());
            }
            runtime.block_on(no_claims(&client));
            drop(client);
            assert_eq!(daemon.stop(), Some(0));
            break;
        }
        for driver in &mut drivers {
            driver.forget_events();
        }

        let mut count = answers.count.subscribe();
        let (wanted, pause) = (random(round) % 50, random(round + all) % 3000);
        let target = *count.borrow() + wanted;
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| runtime.spawn(work(client.clone(), Arc::clone(&answers), worker)))
            .collect();
        runtime.block_on(async {
            count.wait_for(|count| *count >= target).await.unwrap();
            if kill == Kill::Anywhen {
                tokio::time::sleep(Duration::from_micros(pause)).await;
            }
        });
        match kill {
            Kill::Anywhen => {}
            Kill::Answered(driver, call) => {
                let driver = &mut drivers[driver];
                driver.fault(call, Some(&Fault::KillCaller));
                driver.find("a killed caller", |event| {
                    matches!(event, Event::KilledCaller { .. }).then_some(())
                });
                driver.fault(call, None);
            }
            Kill::Unanswered(driver, call) => {
                let driver = &mut drivers[driver];
                driver.fault(call, Some(&Fault::Wait));
                driver.waits(call);
                driver.fault(call, None);
            }
        }
        daemon.kill();
        for worker in workers {
            runtime.block_on(worker).unwrap();
        }
        at_crash = [drivers[0].prepared(), drivers[1].prepared()];
    }
    let answered = *answers.count.borrow();
    assert!(answered >= all, "only {answered} calls were answered in all");
    assert!(
        half_done >= all / 4,
        "only {half_done} of {all} crashes left unfinished work"
    );
    assert!(
        in_vain >= all * 3 / 20,
        "only {in_vain} of {all} crashes came between a driver's answer and the commit"
    );
    println!(
        "{all} kills, {answered} answered calls, {half_done} with unfinished work, {in_vain} before a commit"
    );
}

/// Removes all pods.
async fn finish(client: &Client, answers: &Answers) {
    let held: Vec<Job> = {
        let known = answers.pods.lock().unwrap();
        known
            .iter()
            .filter(|(_, known)| **known == Known::Holds)
            .map(|(job, _)| *job)
            .collect()
    };
    for job in held {
        remove(client, job).await.unwrap();
    }
}

async fn no_claims(client: &Client) {
    let mut lists = client
        .watch_claims(v1::ListClaimsRequest::default())
        .await
        .unwrap();
    while let Some(list) = lists.message().await.unwrap() {
        if list.claims.is_empty() {
            return;
        }
    }
    panic!("the watch ended while there were claims");
}
