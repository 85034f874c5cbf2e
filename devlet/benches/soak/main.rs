//! Mixed load with faults for a long time: the daemon's resource usage must return to its initial level.
//!
//! ```text
//! cargo bench -p devlet --bench soak -- [--minutes 30] [--out DIR]
//! ```
//!
//! One daemon, three plugins, two DRA drivers. Callers admit pods with devices, with their own or shared claims, and with
//! both; they request run options, list and remove; some cancel calls. Every second a fault is injected: a plugin or driver
//! is killed and restarted, is updated, hangs, refuses, loses devices, flips their health, or ends its stream or
//! connection; or a socket receives garbage.
//!
//! After a warm-up everything is drained and measured; the soak follows; then everything is drained and measured again.
//! Each time, the listed pods must match the answers, and the drivers must have prepared exactly the claims that pods
//! hold. At the end the daemon is killed with claims half prepared, and restarted: the same checks must pass, and after
//! the removal of all pods no claim may remain.
//!
//! Prints a table; with `--out`, `soak.json` and a chart, `soak.svg`, are written too. Exit code 1 if something grew.

// A benchmark fails by panicking, as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../tests/common/mod.rs"]
mod common;
mod load;
mod troubles;
mod usage;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Daemon, root};
use devlet_client::{Client, locate};
use load::{
    CALLERS, Dice, Held, Known, Tally, Wish, admit, call, check, claims_of, remove, remove_late,
    until_no_other_claims,
};
use tokio::runtime::Runtime;
use troubles::Troubles;
use usage::{Sample, report, sample, settled};

const WARM_UP: Duration = Duration::from_secs(60);
const SAMPLE: Duration = Duration::from_secs(5);
/// A short deadline, so that calls of drivers that hang time out often.
const CONFIG: &str = "http: 127.0.0.1:0\nlogLevel: error\ndeadlines: {prepare: 500ms}\n";
/// Admitted pods when the daemon is killed, and pods with an admission in flight.
const LAST: u64 = 50;
const LATE: usize = 5;

fn client(runtime: &Runtime, root: &Path) -> Client {
    runtime.block_on(Client::connect(locate::socket(root))).unwrap()
}

/// Runs load and faults for a time, then drains everything.
fn run(
    daemon: &Daemon,
    address: &str,
    troubles: &mut Troubles,
    time: Duration,
    tally: &Arc<Tally>,
    mut each: impl FnMut(Sample),
) {
    let runtime = Runtime::new().unwrap();
    let client = client(&runtime, &daemon.root);
    let stop = Arc::new(AtomicBool::new(false));
    let known = Arc::new(Mutex::new(Known::default()));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            runtime.spawn(call(
                client.clone(),
                number,
                Arc::clone(&stop),
                Arc::clone(tally),
                Arc::clone(&known),
            ))
        })
        .collect();
    let started = Instant::now();
    let mut sampled = started;
    while started.elapsed() < time {
        std::thread::sleep(Duration::from_secs(1));
        troubles.next();
        Tally::count(&tally.faults);
        if sampled.elapsed() >= SAMPLE {
            sampled = Instant::now();
            each(sample(daemon, address, started.elapsed()));
        }
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        runtime.block_on(caller).unwrap();
    }
    let Known { held, left } = std::mem::take(&mut *known.lock().unwrap());
    runtime.block_on(async {
        for name in &left {
            remove_late(&client, name, tally).await;
        }
        drained(&client, troubles, &held).await;
    });
}

/// Checks that exactly the answered pods and claims exist, removes all pods, and checks that nothing is left.
async fn drained(client: &Client, troubles: &mut Troubles, held: &Held) {
    check(client, held).await;
    until_no_other_claims(client, held).await;
    assert_eq!(
        *troubles.drivers.done(),
        claims_of(held),
        "what drivers have done"
    );
    for name in held.keys() {
        remove(client, name).await.unwrap();
    }
    let none = Held::new();
    check(client, &none).await;
    until_no_other_claims(client, &none).await;
    assert_eq!(
        *troubles.drivers.done(),
        claims_of(&none),
        "what drivers have done"
    );
}

/// Kills the daemon while pods hold claims and other admissions are in flight, then restarts and checks it.
fn power_cut(daemon: Daemon, troubles: &mut Troubles) {
    let runtime = Runtime::new().unwrap();
    let root = daemon.root.clone();
    let before = client(&runtime, &root);
    let mut held = Held::new();
    for number in 0..LAST {
        let wish = Wish::rolled(&format!("last-{number}"), &mut Dice(number));
        let answer = runtime.block_on(admit(&before, &wish)).unwrap();
        held.insert(wish.name, answer);
    }
    assert!(!claims_of(&held).is_empty(), "no pod has claims");
    troubles.drivers.keeps_silent(0);
    for number in 0..LATE {
        let client = before.clone();
        let wish = Wish::of_claim(&format!("late-{number}"), 0);
        // The answer is lost.
        runtime.spawn(async move { admit(&client, &wish).await.map(drop) });
    }
    troubles.drivers.until_silent(0);
    daemon.kill();
    troubles.drivers.speaks_again(0);

    let daemon = Daemon::configured(&root, CONFIG);
    let after = client(&runtime, &root);
    runtime.block_on(drained(&after, troubles, &held));
    drop((before, after));
    assert_eq!(daemon.stop(), Some(0));
}

fn main() {
    devlet_testkit::become_plugin_if_asked();
    let mut minutes = 30.0;
    let mut out = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--minutes" => {
                minutes = arguments
                    .next()
                    .and_then(|text| text.parse().ok())
                    .expect("--minutes NUMBER");
            }
            "--out" => out = Some(PathBuf::from(arguments.next().expect("--out DIR"))),
            // From cargo.
            "--bench" => {}
            other => panic!("{other}? The arguments are --minutes NUMBER and --out DIR"),
        }
    }
    let time = Duration::from_secs_f64(minutes * 60.0);
    let root = root();
    let daemon = Daemon::configured(root.path(), CONFIG);
    let address = daemon.http();
    let mut troubles = Troubles::new(root.path());
    let tally = Arc::new(Tally::default());

    let warm_up = WARM_UP.min(time);
    println!("warming up for {} s, then {minutes} minutes", warm_up.as_secs());
    run(&daemon, &address, &mut troubles, warm_up, &tally, |_| {});
    let before = settled(&daemon, &address);
    let tally = Arc::new(Tally::default());
    let mut samples = vec![before];
    run(&daemon, &address, &mut troubles, time, &tally, |each| {
        samples.push(each);
    });
    let after = settled(&daemon, &address);
    power_cut(daemon, &mut troubles);
    report(minutes, before, after, &samples, &tally, out.as_deref());
}
