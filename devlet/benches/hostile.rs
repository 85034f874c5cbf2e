//! What the pods of a good plugin notice while somebody else misbehaves: `cargo bench -p devlet --bench hostile`.
//!
//! For each behaviour, rounds of pods are admitted one after the other, without it and with it in turns, so that what
//! else happens on the machine hits both; the ratio of the 99th percentiles is what counts. Offenders run with the
//! lowest priority, because what they burn themselves is nothing that devlet could do something about; the first row is
//! one that does nothing but that. Needs root, to end it.
//!
//! The rounds without the behaviour are also compared with each other: where every other one of them differs from the
//! rest by nearly as much as the bar allows, the row says nothing. Exit code 1: a behaviour is over the bar; 3: the
//! machine is too busy to say.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/hostile/mod.rs"]
mod hostile;

use std::any::Any;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser as _;
use devlet_testkit::{Babbler, Fault, Plugin, Script, nonsense_of_a_client, nonsense_of_a_server};
use hostile::{BAD, Neighbourhood, throw};

const PODS: usize = 500;
const BAR: f64 = 1.5;
/// More than that among undisturbed rounds, and a ratio says nothing.
const NOISE: f64 = 1.3;
/// How long a behaviour has to wear off.
const SETTLE: Duration = Duration::from_secs(1);

const BEGIN: &str = "<!-- cargo bench -p devlet --bench hostile -- --publish writes from here -->";
const END: &str = "<!-- to here, and no further -->";

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
    ("manifests of almost 1 MiB, one after the other", |neighbours| {
        let other = neighbours.caller();
        let long = "x".repeat(1_000_000);
        again_and_again(move || _ = other.admit(&long, BAD))
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

#[derive(Debug, clap::Parser)]
struct Args {
    /// Only the behaviours that have one of these in their name
    names: Vec<String>,
    /// How often each behaviour begins and ends
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// One short round of each: to try it, not to judge
    #[arg(long)]
    quick: bool,
    /// Put the table into docs/performance.md, if there is a conclusion
    #[arg(long, conflicts_with_all = ["quick", "names"])]
    publish: bool,
    /// What cargo says
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|each| name.contains(each.as_str()))
    }

    /// Rounds, and pods in each.
    fn size(&self) -> (usize, usize) {
        if self.quick {
            (2, 50)
        } else {
            (self.rounds.max(2), PODS)
        }
    }
}

/// 99th percentiles, in milliseconds.
struct Row {
    name: &'static str,
    quiet: f64,
    during: f64,
    /// By how much the quiet rounds differ from each other.
    noise: f64,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.during / self.quiet
    }

    fn is_control(&self) -> bool {
        self.name.starts_with('(')
    }

    fn is_noisy(&self) -> bool {
        self.noise > NOISE
    }

    fn is_over(&self) -> bool {
        !self.is_control() && !self.is_noisy() && self.ratio() > BAR
    }

    fn verdict(&self) -> &'static str {
        match self {
            _ if self.is_control() => "",
            _ if self.is_noisy() => "too noisy to say",
            _ if self.is_over() => "**over the bar**",
            _ => "ok",
        }
    }

    fn line(&self) -> String {
        let Self {
            name,
            quiet,
            during,
            noise,
        } = self;
        let ratio = self.ratio();
        let verdict = self.verdict();
        format!("| {name:<50} | {quiet:>8.2} | {during:>8.2} | {ratio:>5.2} | {noise:>5.2} | {verdict} |")
    }
}

/// How long the admissions of so many pods take, each.
fn measure(neighbours: &mut Neighbourhood, pods: usize) -> Vec<Duration> {
    (0..pods).map(|_| neighbours.one_pod_goes_on()).collect()
}

fn p99<'a>(rounds: impl IntoIterator<Item = &'a Vec<Duration>>) -> f64 {
    let mut times: Vec<Duration> = rounds.into_iter().flatten().copied().collect();
    times.sort();
    times[(times.len() - 1) * 99 / 100].as_secs_f64() * 1e3
}

/// Of this thread, and of whatever it starts.
fn set_niceness(niceness: i32) {
    if let Err(error) = rustix::process::setpriority_process(None, niceness) {
        panic!("run this as root: niceness {niceness}: {error}");
    }
}

fn row(name: &'static str, begin: fn(&Neighbourhood) -> Going, (rounds, pods): (usize, usize)) -> Row {
    let mut neighbours = Neighbourhood::configured("logLevel: error\n");
    let (mut quiet, mut during) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        quiet.push(measure(&mut neighbours, pods));
        // Threads and processes inherit it.
        set_niceness(19);
        let going = begin(&neighbours);
        set_niceness(0);
        during.push(measure(&mut neighbours, pods));
        drop(going);
        // What is left of it ends.
        let settled = Instant::now() + SETTLE;
        while Instant::now() < settled {
            neighbours.one_pod_goes_on();
        }
    }
    quiet.push(measure(&mut neighbours, pods));
    let halves = [p99(quiet.iter().step_by(2)), p99(quiet.iter().skip(1).step_by(2))];
    Row {
        name,
        quiet: p99(&quiet),
        during: p99(&during),
        noise: halves[0].max(halves[1]) / halves[0].min(halves[1]),
    }
}

fn main() -> ExitCode {
    devlet_testkit::become_plugin_if_asked();
    let args = Args::parse();
    let (rounds, pods) = args.size();
    let head = "| while another plugin or caller ... | p99 undisturbed, ms | p99 meanwhile, ms | ratio | noise | |\n\
                | --- | ---: | ---: | ---: | ---: | --- |";
    println!("{head}");
    let mut rows = Vec::new();
    for (name, begin) in BEHAVIOURS.iter().filter(|(name, _)| args.wants(name)) {
        let row = row(name, *begin, (rounds, pods));
        println!("{}", row.line());
        rows.push(row);
    }
    let legend = format!(
        "Admission of a pod of a good plugin; {rounds} rounds of {pods} pods with the behaviour, in turns with as many \
         without. Noise: by how much the undisturbed rounds differ among themselves. The bar is {BAR}."
    );
    println!("\n{legend}");
    let noisy = rows.iter().filter(|row| row.is_noisy()).count();
    let over = rows.iter().filter(|row| row.is_over()).count();
    if args.quick {
        println!("\nThis was a quick run: no conclusion.");
        return ExitCode::SUCCESS;
    }
    if noisy > 0 {
        println!(
            "\nNo conclusion: the machine is too busy in {noisy} of {} rows.",
            rows.len()
        );
        return ExitCode::from(3);
    }
    if args.publish {
        let lines: Vec<String> = rows.iter().map(Row::line).collect();
        publish(&format!("{legend}\n\n{head}\n{}\n", lines.join("\n")));
    }
    println!("\n{over} of {} over the bar", rows.len());
    ExitCode::from(u8::from(over > 0))
}

/// Puts the table into the document, in the place of the one before.
fn publish(table: &str) {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance.md");
    let text = std::fs::read_to_string(document).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    std::fs::write(document, format!("{before}{BEGIN}\n\n{table}\n{END}{after}")).unwrap();
}
