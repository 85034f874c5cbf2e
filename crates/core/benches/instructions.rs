//! Instruction counts of transitions on a small and a full node, measured by callgrind.
//!
//! Counts do not depend on other load of the machine. `cargo bench -p devlet-core --bench instructions` compares them with
//! `instructions.txt`, and `-- --update` rewrites that file. The process runs itself under valgrind, once per case.

mod nodes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use devlet_core::device_plugin::list::DeviceList;
use devlet_core::dra::claims::{AllocatedClaim, AllocatedDevice, AllocationResult, ClaimKey, PreparedDevice};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::{ClaimRequest, Moment, Node, PodRequest, Preferences};

use nodes::{GPU, admit, devices, node, pod, release, reserve};

/// The maximum relative excess over the expected count. Compilers differ by less.
const TOLERANCE: f64 = 0.10;

const FULL: usize = 10_000;
const OFFERED: usize = 20_000;

type Work = Box<dyn FnMut()>;
type Case = (&'static str, fn(usize) -> Work);

/// The cases. Each function takes the number of pods that hold a device, prepares a node, and returns the measured work.
const CASES: [Case; 6] = [
    ("reserve_commit", reserve_commit),
    ("release", release_one),
    ("reserve_abort", reserve_abort),
    ("admit_again", admit_again),
    ("list_of_1000", list_of_1000),
    ("claim", claim),
];

const DRIVER: &str = "gpu.acme.com";

/// A claim is prepared for a pod and unprepared after it, on a node with this many claims.
fn claim(held: usize) -> Work {
    let mut node = node(0, 0, false);
    let offer = DriverOffer {
        driver: DRIVER.into(),
        endpoint: "gpu.sock".into(),
        process: devlet_core::ProcessId { uid: 0, pid: None },
        may_share: false,
        service: String::new(),
        service_reason: String::new(),
        health_service: None,
    };
    if let Ok((connection, _)) = node.driver_registered(offer, Moment(0)) {
        node.link_up(connection, Moment(0));
    }
    for number in 0..held {
        admit_with_claim(&mut node, &pod_with_claim(number));
    }
    let request = pod_with_claim(1_000_000);
    Box::new(move || {
        admit_with_claim(&mut node, &request);
        release(&mut node, &request);
        let calls = node.unprepare_calls(&request.uid, Moment(0));
        for call in calls {
            let results = call.claims.iter().map(|(uid, _)| (uid.clone(), Ok(())));
            node.unprepared(call.id, results.collect(), Moment(0));
        }
        if let Some(record) = node.begin_record() {
            node.finish_record(record.id);
        }
        assert!(node.claim(&request.claims[0].claim.uid).is_none());
    })
}

fn pod_with_claim(number: usize) -> PodRequest {
    let mut request = pod(number, 0);
    let device = AllocatedDevice {
        request: "gpu".into(),
        pool: "node".into(),
        device: format!("gpu-{number}"),
        share: None,
        admin_access: false,
    };
    let result = AllocationResult {
        driver: DRIVER.into(),
        device,
        skip: Vec::new(),
    };
    let key = ClaimKey {
        namespace: "default".into(),
        name: format!("claim-{number}"),
    };
    let uid = format!("{number:08x}-0000-4a7a-9c0e-3f3a8f1f0000").into();
    request.containers[0].wants.clear();
    request.claims = vec![ClaimRequest {
        name: "gpu".into(),
        claim: AllocatedClaim::new(key, uid, [result]),
    }];
    request
}

fn admit_with_claim(node: &mut Node, request: &PodRequest) {
    let id = reserve(node, request);
    assert_eq!(node.begin_intent(id).put.len(), 1);
    node.finish_intent(id);
    for call in node.prepare_calls(id, Moment(0)) {
        let results = call.claims.iter().map(|(uid, _)| {
            let device = &request.claims[0].claim.drivers[DRIVER].devices[0];
            let prepared = PreparedDevice {
                requests: vec!["gpu".into()],
                pool: device.pool.clone(),
                device: device.device.clone(),
                share: None,
                cdi_devices: vec![format!("acme.com/gpu={}", device.device)],
            };
            (uid.clone(), Ok(vec![prepared]))
        });
        let failures = node.prepared(call.id, results.collect(), |_| true, Moment(0));
        assert!(failures.is_empty());
    }
    assert!(node.begin_commit(id, request, Vec::new()).is_ok());
    node.finish_commit(id);
}

fn reserve_commit(held: usize) -> Work {
    let mut node = node(OFFERED, held, false);
    let request = pod(1_000_000, 1);
    Box::new(move || admit(&mut node, &request))
}

fn release_one(held: usize) -> Work {
    let mut node = node(OFFERED, held, false);
    let request = pod(1_000_000, 1);
    admit(&mut node, &request);
    Box::new(move || release(&mut node, &request))
}

fn reserve_abort(held: usize) -> Work {
    let mut node = node(OFFERED, held, false);
    let request = pod(1_000_000, 1);
    Box::new(move || {
        let id = reserve(&mut node, &request);
        node.abort(id);
    })
}

fn admit_again(held: usize) -> Work {
    let mut node = node(OFFERED, held.max(1), false);
    let request = pod(0, 1);
    Box::new(move || drop(node.reserve(&request, &Preferences::new())))
}

/// A decoded and sorted list replaces a longer one.
fn list_of_1000(held: usize) -> Work {
    let mut node = node(OFFERED, held, false);
    let Some(connection) = node.serving(&GPU.into()) else {
        return Box::new(|| {});
    };
    let mut list = Some(DeviceList::new(devices(1_000)).0);
    Box::new(move || {
        if let Some(list) = list.take() {
            let _ = node.devices_listed(connection, list);
        }
    })
}

/// Callgrind counts only in this function.
#[inline(never)]
fn measured(work: &mut dyn FnMut()) {
    work();
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["case", name, held] => one(name, held),
        [] => check(),
        ["--update"] => update(),
        _ => Err(format!("unknown arguments {args:?}; expected none or --update")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn one(name: &str, held: &str) -> Result<(), String> {
    let (_, prepare) = CASES
        .iter()
        .find(|(case, _)| *case == name)
        .ok_or("no such case")?;
    let held = held.parse().map_err(|_| "the number of pods is not a number")?;
    measured(&mut *prepare(held));
    Ok(())
}

/// By case and number held.
type Counts = BTreeMap<(String, usize), u64>;

fn count() -> Result<Counts, String> {
    let mut counts = Counts::new();
    for (name, _) in CASES {
        for held in [0, FULL] {
            let count = count_one(name, held)?;
            println!("{name:<16} {held:>6} held {count:>12} instructions");
            counts.insert((name.to_owned(), held), count);
        }
    }
    Ok(counts)
}

fn count_one(name: &str, held: usize) -> Result<u64, String> {
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let out = std::env::temp_dir().join(format!("devlet-instructions-{}", std::process::id()));
    let ran = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--quiet",
            "--toggle-collect=*instructions::measured*",
        ])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(this)
        .args(["case", name, &held.to_string()])
        .output()
        .map_err(|error| format!("valgrind cannot be run: {error}; install it"))?;
    let found = std::fs::read_to_string(&out).unwrap_or_default();
    let _ = std::fs::remove_file(&out);
    let totals = found.lines().find_map(|line| line.strip_prefix("totals:"));
    let count = totals.and_then(|total| total.trim().parse().ok()).unwrap_or(0);
    match count {
        0 => Err(format!(
            "callgrind counted no instructions in {name}:\n{}",
            String::from_utf8_lossy(&ran.stderr)
        )),
        count => Ok(count),
    }
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.txt")
}

fn expected() -> Result<Counts, String> {
    let path = file();
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let parsed = |line: &str| {
        let mut words = line.split_whitespace();
        let key = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some((key, words.next()?.parse().ok()?))
    };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| parsed(line).ok_or_else(|| format!("{}: invalid line {line:?}", path.display())))
        .collect()
}

fn check() -> Result<(), String> {
    let expected = expected()?;
    let mut wrong = Vec::new();
    for ((name, held), count) in count()? {
        match expected.get(&(name.clone(), held)) {
            None => wrong.push(format!("{name} with {held} held is not in {}", file().display())),
            Some(&before) => {
                let more = count as f64 / before as f64 - 1.0;
                if more > TOLERANCE {
                    wrong.push(format!(
                        "{name} with {held} held takes {count} instructions, {:.0} % more than {before}",
                        more * 100.0
                    ));
                }
            }
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    wrong.push(
        "to accept the new counts: cargo bench -p devlet-core --bench instructions -- --update".to_owned(),
    );
    Err(wrong.join("\n"))
}

fn update() -> Result<(), String> {
    let mut text =
        "# case, pods that hold a device, instructions; written by the bench `instructions`\n".to_owned();
    for ((name, held), count) in count()? {
        text += &format!("{name} {held} {count}\n");
    }
    std::fs::write(file(), text).map_err(|error| error.to_string())
}
