//! What the pods of a good plugin notice while somebody else misbehaves: `cargo bench -p devlet --bench hostile`.
//!
//! For each behaviour, pods are admitted one after the other without it, with it, and without it again, several times
//! over; the ratio of the 99th percentiles is what counts. Everything runs on this machine: what the offender burns
//! itself is part of the number, so the first row is an offender that has nothing to do with devlet. A row whose
//! two quiet measurements differ by as much as the bar allows says nothing, and is marked.
//!
//! An argument runs only the behaviours that have it in their name.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/hostile/mod.rs"]
mod hostile;

use std::any::Any;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devlet_testkit::{Babbler, Fault, Plugin, Script, nonsense_of_a_client, nonsense_of_a_server};
use hostile::{BAD, Neighbourhood, throw};

const ROUNDS: usize = 3;
const PODS: usize = 200;
const BAR: f64 = 1.5;

/// Goes on until it is dropped.
type Going = Box<dyn Any>;
type Behaviour = (&'static str, fn(&Neighbourhood) -> Going);

const BEHAVIOURS: &[Behaviour] = &[
    ("(control: burns a core and leaves devlet alone)", |_| {
        again_and_again(|| {
            std::hint::black_box((0..1_000_000_u64).fold(0, |sum, number| sum ^ number));
        })
    }),
    ("registers and vanishes", |neighbours| {
        let script = neighbours.bad(2);
        again_and_again(move || Plugin::registered(&script).kill())
    }),
    ("registers 1,000 times a second", |neighbours| {
        let mut plugin = Plugin::registered(&neighbours.bad(2));
        plugin.register_often(1_000_000, 1_000);
        Box::new(plugin)
    }),
    ("half a list", |neighbours| {
        Box::new(Plugin::start(
            &neighbours.bad(1).with_fault("ListAndWatch", Fault::Half),
        ))
    }),
    ("a list one byte at a time", |neighbours| {
        let fault = Fault::Drip { pause_ms: 10 };
        Box::new(Plugin::start(
            &neighbours.bad(1).with_fault("ListAndWatch", fault),
        ))
    }),
    ("hangs in Allocate, 16 pods wait", |neighbours| {
        let plugin = Plugin::registered(&neighbours.bad(16).with_fault("Allocate", Fault::Hang));
        neighbours.until_capacity(BAD, 16);
        let waiting: Vec<Waiting> = (0..16).map(|number| waiting(neighbours, number)).collect();
        Box::new((plugin, waiting))
    }),
    ("100,000 devices, over and over", |neighbours| {
        flood(neighbours, 100_000, 0)
    }),
    ("1,000 devices, as often as they are taken", |neighbours| {
        flood(neighbours, 1_000, 0)
    }),
    ("flips health 1,000 times a second", |neighbours| {
        flood(neighbours, 3, 1_000)
    }),
    ("10 MB of variables in every answer", |neighbours| {
        let plugin = Plugin::registered(
            &neighbours
                .bad(1)
                .with_fault("Allocate", Fault::LargeEnv(10 << 20)),
        );
        neighbours.until_capacity(BAD, 1);
        let other = neighbours.caller();
        Box::new((plugin, again_and_again(move || _ = other.admit("bad", BAD))))
    }),
    ("200 connections to each socket that say nothing", |neighbours| {
        let silent = neighbours.sockets().map(|socket| {
            let connect = |_| UnixStream::connect(&socket).unwrap();
            (0..200).map(connect).collect::<Vec<_>>()
        });
        Box::new(silent)
    }),
    ("HTTP/2 nonsense on every socket", |neighbours| {
        let sockets = neighbours.sockets();
        let mut all = nonsense_of_a_client().into_iter().cycle();
        again_and_again(move || {
            let (_, bytes) = all.next().unwrap();
            sockets.iter().for_each(|socket| drop(throw(socket, &bytes)));
        })
    }),
    ("HTTP/2 nonsense from sockets in the registry", |neighbours| {
        let registry = neighbours.root().join("plugins_registry");
        let babbler = |(number, (_, bytes))| Babbler::at(&registry.join(format!("{number}.sock")), bytes);
        let all: Vec<Babbler> = nonsense_of_a_server()
            .into_iter()
            .enumerate()
            .map(babbler)
            .collect();
        Box::new(all)
    }),
    ("inotify events without end", |neighbours| {
        let file = neighbours.root().join("plugins_registry/file");
        again_and_again(move || touch(&file))
    }),
];

fn touch(file: &Path) {
    std::fs::write(file, "").unwrap();
    std::fs::remove_file(file).unwrap();
}

fn flood(neighbours: &Neighbourhood, many: usize, per_second: u32) -> Going {
    let mut plugin = Plugin::registered(&Script {
        many,
        ..neighbours.bad(0)
    });
    neighbours.until_resource(BAD, |each| each.capacity == many as u64);
    plugin.flood(u32::MAX, per_second);
    Box::new(plugin)
}

struct Waiting(Child);

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn waiting(neighbours: &Neighbourhood, number: usize) -> Waiting {
    let limit = format!("{BAD}=1");
    let name = format!("waits-{number}");
    let mut command = neighbours
        .daemon
        .command(&["admit", "--name", &name, "--limit", &limit]);
    Waiting(
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    )
}

/// A thread that does it until it is dropped.
struct Again {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn again_and_again(mut what: impl FnMut() + Send + 'static) -> Going {
    let ends = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ends);
    let thread = std::thread::spawn(move || {
        while !end.load(Ordering::Relaxed) {
            what();
        }
    });
    Box::new(Again {
        ends,
        thread: Some(thread),
    })
}

impl Drop for Again {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// How long the admissions of so many pods take, each.
fn measure(neighbours: &mut Neighbourhood) -> Vec<Duration> {
    (0..PODS).map(|_| neighbours.one_pod_goes_on()).collect()
}

fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort();
    times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3
}

fn main() {
    devlet_testkit::become_plugin_if_asked();
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|each| !each.starts_with('-'))
        .collect();
    println!(
        "{:<50} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6}",
        "behaviour", "p50 quiet", "p50", "p99 quiet", "p99", "ratio", "noise"
    );
    let mut broken = 0;
    for (name, begin) in BEHAVIOURS {
        if !wanted.is_empty() && !wanted.iter().any(|each| name.contains(each.as_str())) {
            continue;
        }
        broken += usize::from(!row(name, *begin));
    }
    println!("\nms; {ROUNDS} rounds of {PODS} pods before, during and after; the bar is {BAR}");
    if broken > 0 {
        println!("{broken} over the bar");
        std::process::exit(1);
    }
}

/// Prints the numbers of a behaviour; whether they are not above the bar, or say nothing.
fn row(name: &str, begin: fn(&Neighbourhood) -> Going) -> bool {
    let mut neighbours = Neighbourhood::configured("logLevel: error\n");
    let (mut before, mut during, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        before.extend(measure(&mut neighbours));
        let going = begin(&neighbours);
        during.extend(measure(&mut neighbours));
        drop(going);
        let settled = Instant::now() + Duration::from_secs(1);
        while Instant::now() < settled {
            neighbours.one_pod_goes_on();
        }
        after.extend(measure(&mut neighbours));
    }
    let quiet = [percentile(&mut before, 99), percentile(&mut after, 99)];
    let noise = quiet[0].max(quiet[1]) / quiet[0].min(quiet[1]);
    let mut all_quiet = [before, after].concat();
    let p99_quiet = percentile(&mut all_quiet, 99);
    let p99 = percentile(&mut during, 99);
    let ratio = p99 / p99_quiet;
    let verdict = match (ratio <= BAR, noise <= BAR) {
        (true, _) => "",
        (false, true) => "over the bar",
        (false, false) => "too noisy to say",
    };
    println!(
        "{name:<50} {:>9.2} {:>9.2} {p99_quiet:>9.2} {p99:>9.2} {ratio:>6.2} {noise:>6.2} {verdict}",
        percentile(&mut all_quiet, 50),
        percentile(&mut during, 50),
    );
    ratio <= BAR || noise > BAR || name.starts_with('(')
}
