//! Admission latency of a well-behaved plugin's pods during misbehaviour of others: `cargo bench -p devlet --bench hostile`.
//!
//! For each behaviour, rounds of pods are admitted one after the other, alternately without and with it. The 99th
//! percentile of each round with it is divided by those of the rounds before and after, so that other load on the machine
//! and its disk affects both. The result is the median of these ratios. Offenders run with `SCHED_IDLE`, because devlet
//! cannot limit the processor time that they use themselves; the first rows are controls that only use processor time.
//! Needs root, and `chrt` of util-linux. The benchmark fails if a behaviour ends early, or if anything is lost or leaked
//! after it, as in the tests `serve/hostile_*`.
//!
//! The spread of the ratios gives the confidence of the median. If the error may be nearly as large as the bar allows,
//! the row is without a verdict. Exit code 1: a behaviour is over the bar; 3: the machine is too busy for a verdict.
//!
//! Each row also has the processor time that devlet spends on the behaviour, which does not depend on the disk.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/hostile/mod.rs"]
mod hostile;

use std::any::Any;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser as _;
use devlet_client::{Client, v1};
use devlet_testkit::{
    Babbler, Device, DeviceHealth, Door, DriverScript, Fault, Options, Plugin, Script, nonsense_of_a_client,
    nonsense_of_a_server,
};
use hostile::{BAD, Instead, Neighbourhood, admitted, pod_with_claim, pod_with_device, throw};

/// Pods per round.
const PODS: usize = 250;
/// Maximum ratio of a passing row.
const BAR: f64 = 1.5;
/// Maximum error factor of a ratio with a verdict.
const NOISE: f64 = 1.3;
/// Pause after a behaviour ends.
const SETTLE: Duration = Duration::from_millis(500);
/// Maximum growth of the daemon's memory, in MiB.
const ROOM_MIB: u64 = 256;
/// Concurrent pods of an offender.
const CROWD: usize = 16;
/// Connections to each socket.
const CONNECTIONS: usize = 200;
/// Name of the misbehaving driver.
const DRIVER: &str = "dra.evil.example";

const BEGIN: &str = "<!-- cargo bench -p devlet --bench hostile -- --publish writes from here -->";
const END: &str = "<!-- to here, and no further -->";

/// A behaviour that continues until it is dropped.
type Going = Box<dyn Any>;
type Behaviour = (&'static str, fn(&Neighbourhood) -> Going);

const BEHAVIOURS: &[Behaviour] = &[
    ("(control: burns a core and leaves devlet alone)", |_| {
        again_and_again(|| {
            std::hint::black_box((0..1_000_000_u64).fold(0, |sum, number| sum ^ number));
        })
    }),
    ("(control: starts processes and leaves devlet alone)", |_| {
        let own = std::env::current_exe().unwrap();
        again_and_again(move || {
            let mut help = Command::new(&own);
            help.args(["--bench", "--help"]).stdout(Stdio::null());
            assert!(help.status().unwrap().success());
        })
    }),
    // Registrations.
    ("registers and vanishes", |neighbours| {
        let script = neighbours.bad(2);
        again_and_again(move || Plugin::registered(&script).kill())
    }),
    ("registers 1,000 times a second", |neighbours| {
        let mut plugin = Plugin::registered(&neighbours.bad(2));
        plugin.register_often(1_000_000, 1_000);
        Box::new(plugin)
    }),
    // Calls.
    ("hangs in GetDevicePluginOptions, pods wait", |neighbours| {
        silent(neighbours, "GetDevicePluginOptions", Fault::Hang)
    }),
    ("hangs in ListAndWatch, pods wait", |neighbours| {
        silent(neighbours, "ListAndWatch", Fault::Hang)
    }),
    ("hangs in GetPreferredAllocation, pods wait", |neighbours| {
        silent(neighbours, "GetPreferredAllocation", Fault::Hang)
    }),
    ("hangs in Allocate, pods wait", |neighbours| {
        silent(neighbours, "Allocate", Fault::Hang)
    }),
    ("hangs in PreStartContainer, pods wait", |neighbours| {
        silent(neighbours, "PreStartContainer", Fault::Hang)
    }),
    ("half a list, pods wait", |neighbours| {
        silent(neighbours, "ListAndWatch", Fault::Half)
    }),
    ("half an answer to Allocate, pods wait", |neighbours| {
        silent(neighbours, "Allocate", Fault::Half)
    }),
    ("a list one byte at a time, pods wait", |neighbours| {
        silent(neighbours, "ListAndWatch", Fault::Drip { pause_ms: 10 })
    }),
    (
        "an answer to Allocate, a byte a second, pods wait",
        |neighbours| silent(neighbours, "Allocate", Fault::Drip { pause_ms: 1_000 }),
    ),
    ("answers to Allocate that are none", |neighbours| {
        let faults = [
            Fault::NoContainers,
            // A length beyond the end of the message.
            Fault::Raw(vec![0x0a, 200, 1]),
            // A variable that is not UTF-8.
            Fault::Raw(vec![0x0a, 5, 0x0a, 3, 0x0a, 1, 0xff]),
        ];
        refused_in_turn(neighbours, faults.into())
    }),
    ("10 MB of variables in every answer", |neighbours| {
        refused_in_turn(neighbours, vec![Fault::LargeEnv(10 << 20)])
    }),
    // Lists.
    ("100,000 devices, over and over", |neighbours| {
        let lists = Fault::EndlessDevices(100_000);
        let plugin = Plugin::start(&neighbours.bad(0).with_fault("ListAndWatch", lists));
        until_listed(neighbours, 100_000);
        Box::new(plugin)
    }),
    ("1,000 devices, as often as they are taken", |neighbours| {
        flood(neighbours, &many(neighbours, 1_000), 1_000, 0)
    }),
    ("flips health 1,000 times a second", |neighbours| {
        flood(neighbours, &many(neighbours, 3), 3, 1_000)
    }),
    ("lists of lies, as often as they are taken", |neighbours| {
        let lies = [
            ("a", 64),
            ("a", -5),
            ("b", i64::MIN),
            ("\u{1b}[2J\n\r\0", i64::MAX),
        ];
        let script = Script {
            devices: lies.map(|(id, node)| Device::on(id, node)).into(),
            ..neighbours.bad(0)
        };
        flood(neighbours, &script, 3, 0)
    }),
    ("a list that is not UTF-8, pods wait", |neighbours| {
        silent(
            neighbours,
            "ListAndWatch",
            Fault::Raw(vec![0x0a, 4, 0x0a, 2, 0xff, 0xfe]),
        )
    }),
    // Sockets and directories.
    ("manifests of almost 1 MiB, one after the other", |neighbours| {
        let other = neighbours.caller();
        let long = "x".repeat(1_000_000);
        again_and_again(move || _ = other.admit(&long, BAD))
    }),
    ("200 connections to each socket that say nothing", |neighbours| {
        Box::new(connections(neighbours))
    }),
    ("200 connections to each socket, a byte a second", |neighbours| {
        let mut open = connections(neighbours);
        let pause = Duration::from_secs(1) / open.len() as u32;
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let places = 0..open.len();
        let mut turns = preface
            .iter()
            .flat_map(move |byte| places.clone().map(move |place| (place, *byte)))
            .cycle();
        again_and_again(move || {
            let (place, byte) = turns.next().unwrap();
            // The server may close the connection before the end.
            let _ = open[place].write_all(&[byte]);
            std::thread::sleep(pause);
        })
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
    ("deletes and recreates the registry", |neighbours| {
        let registry = neighbours.root().join("plugins_registry");
        again_and_again(move || {
            std::fs::remove_dir_all(&registry).unwrap();
            std::fs::create_dir(&registry).unwrap();
        })
    }),
    ("its socket becomes a file, a directory, a link", |neighbours| {
        let script = Script {
            socket: "bad.sock".into(),
            ..neighbours.bad(1)
        };
        let claim = Script {
            door: Door::Claim,
            ..script.clone()
        };
        let socket = neighbours.root().join("device-plugins/bad.sock");
        let own = neighbours.kubelet_socket();
        let mut kinds = Instead::ALL.into_iter().cycle();
        again_and_again(move || {
            let mut plugin = Plugin::registered(&script);
            let kind = kinds.next().unwrap();
            std::fs::remove_file(&socket).unwrap();
            kind.put(&socket, &own);
            Plugin::start(&claim).refused();
            plugin.command("end-stream");
            plugin.kill();
            kind.take_away(&socket);
        })
    }),
    // Drivers.
    (
        "a driver hangs in NodePrepareResources, pods wait",
        |neighbours| silent_driver(neighbours, "NodePrepareResources"),
    ),
    (
        "a driver hangs in NodeUnprepareResources, pods wait",
        |neighbours| silent_driver(neighbours, "NodeUnprepareResources"),
    ),
    ("a driver's health of 10,000 devices, without end", |neighbours| {
        let devices = (0..10_000).map(|number| DeviceHealth::healthy("pool", &number.to_string()));
        let script = DriverScript::new(neighbours.root(), DRIVER).with_health(Vec::new());
        let mut driver = Plugin::registered_driver(&script);
        driver.until_list_of(0);
        driver.report(&devices.collect::<Vec<_>>());
        driver.flood(u32::MAX, 0);
        Box::new(driver)
    }),
];

/// Runs a plugin that answers a call not at all or only in part, and pods that wait for it.
fn silent(neighbours: &Neighbourhood, call: &str, fault: Fault) -> Going {
    let options = Options {
        preferred: true,
        pre_start: true,
    };
    let script = Script {
        options,
        ..neighbours.bad(CROWD)
    };
    let mut plugin = Plugin::start(&script.with_fault(call, fault));
    let crowd = crowd(neighbours, |name| pod_with_device(name, BAD));
    plugin.called(call);
    Box::new((crowd, plugin))
}

/// Like [`silent`], for a driver.
fn silent_driver(neighbours: &Neighbourhood, call: &str) -> Going {
    let script = DriverScript::new(neighbours.root(), DRIVER);
    let mut driver = Plugin::driver(&script.with_fault(call, Fault::Hang));
    let crowd = crowd(neighbours, |name| pod_with_claim(name, DRIVER));
    driver.called(call);
    Box::new((crowd, driver))
}

/// Admits, starts and removes pods in a loop. Refusals are ignored.
fn crowd(neighbours: &Neighbourhood, manifest: fn(&str) -> String) -> Going {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let [_, socket] = neighbours.sockets();
    for number in 0..CROWD {
        let client = runtime.block_on(Client::connect(socket.clone())).unwrap();
        runtime.spawn(async move {
            let name = format!("waits-{number}");
            loop {
                one_life(&client, &name, manifest(&name)).await;
            }
        });
    }
    Box::new(runtime)
}

async fn one_life(client: &Client, pod: &str, manifest: String) {
    let request = v1::AdmitRequest {
        manifest,
        ..Default::default()
    };
    if admitted(client, request).await.is_ok() {
        let request = v1::StartContainerRequest {
            pod: pod.to_owned(),
            container: "main".into(),
            ..Default::default()
        };
        let _ = client.start_container(request).await;
    }
    let request = v1::RemovePodRequest {
        pod: pod.to_owned(),
        ..Default::default()
    };
    let _ = client.remove_pod(request).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// Runs a plugin with alternating faults in its answers to `Allocate`, and a pod that requests its devices.
fn refused_in_turn(neighbours: &Neighbourhood, faults: Vec<Fault>) -> Going {
    let mut plugin = Plugin::registered(&neighbours.bad(1));
    neighbours.until_capacity(BAD, 1);
    let other = neighbours.caller();
    let mut faults = faults.into_iter().cycle();
    again_and_again(move || {
        plugin.fault("Allocate", faults.next().as_ref());
        other.admit("bad", BAD).unwrap_err();
    })
}

fn many(neighbours: &Neighbourhood, many: usize) -> Script {
    Script {
        many,
        ..neighbours.bad(0)
    }
}

/// Waits for the plugin's first list. Until then, the list of an earlier plugin may still be in use.
fn until_listed(neighbours: &Neighbourhood, devices: u64) {
    neighbours.until_resource(BAD, |each| {
        (each.capacity, each.allocatable) == (devices, devices)
    });
}

/// Sends lists in a loop at a rate per second; 0 means without a pause.
fn flood(neighbours: &Neighbourhood, script: &Script, capacity: u64, per_second: u32) -> Going {
    let mut plugin = Plugin::registered(script);
    until_listed(neighbours, capacity);
    plugin.flood(u32::MAX, per_second);
    Box::new(plugin)
}

fn connections(neighbours: &Neighbourhood) -> Vec<UnixStream> {
    let sockets = neighbours.sockets().into_iter();
    let connect = |socket| (0..CONNECTIONS).map(move |_| UnixStream::connect(&socket).unwrap());
    sockets.flat_map(connect).collect()
}

fn touch(file: &Path) {
    std::fs::write(file, "").unwrap();
    std::fs::remove_file(file).unwrap();
}

/// A thread that repeats an action until it is dropped.
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
        let ended = self.thread.take().map(JoinHandle::join);
        let went_on = !matches!(ended, Some(Err(_)));
        assert!(went_on || std::thread::panicking(), "the behaviour ended early");
    }
}

#[derive(Debug, clap::Parser)]
struct Args {
    /// Run only behaviours with one of these texts in their name
    names: Vec<String>,
    /// Minimum rounds of each behaviour
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Maximum rounds of each behaviour, if the ratio is uncertain
    #[arg(long, default_value_t = 60)]
    most_rounds: usize,
    /// Run one short round of each behaviour, without a verdict
    #[arg(long)]
    quick: bool,
    /// Write the table to docs/performance.md, if there is a conclusion
    #[arg(long, conflicts_with_all = ["quick", "names"])]
    publish: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|each| name.contains(each.as_str()))
    }

    fn size(&self) -> Size {
        if self.quick {
            Size {
                rounds: 2..=2,
                pods: 50,
            }
        } else {
            let rounds = self.rounds.max(2);
            Size {
                rounds: rounds..=self.most_rounds.max(rounds),
                pods: PODS,
            }
        }
    }
}

/// Size of a measurement.
struct Size {
    /// Minimum and maximum rounds of each behaviour.
    rounds: RangeInclusive<usize>,
    /// Pods in each round.
    pods: usize,
}

/// Measurements of one round of pods.
struct Round {
    /// 99th percentile of the admission time, in milliseconds.
    p99: f64,
    took: Duration,
    /// Processor time of the daemon.
    busy: Duration,
}

impl Round {
    fn of(neighbours: &mut Neighbourhood, pods: usize) -> Self {
        let (began, busy) = (Instant::now(), neighbours.usage().busy);
        let mut times: Vec<Duration> = (0..pods).map(|_| neighbours.one_pod_goes_on()).collect();
        times.sort();
        Self {
            p99: times[(pods - 1) * 99 / 100].as_secs_f64() * 1e3,
            took: began.elapsed(),
            busy: neighbours.usage().busy - busy,
        }
    }
}

struct Row {
    name: &'static str,
    /// Medians of the rounds' 99th percentiles, in milliseconds.
    quiet: f64,
    during: f64,
    /// Median ratio of a round with the behaviour to the rounds around it.
    ratio: f64,
    /// Number of ratios.
    rounds: usize,
    /// Error factor of the ratio, in both directions.
    noise: f64,
    /// Lower bound of the ratio.
    low: f64,
    /// Share of one processor that the daemon spends on the behaviour.
    share: f64,
}

impl Row {
    /// Computes a row. There is one more quiet round than rounds with the behaviour.
    fn new(name: &'static str, quiet: &[Round], during: &[Round]) -> Self {
        let ratios = during.iter().zip(quiet.windows(2));
        let ratios = ratios.map(|(during, around)| during.p99 / (around[0].p99 * around[1].p99).sqrt());
        let ratios = in_order(ratios);
        let (low, high) = trusted(&ratios);
        let busy = |rounds: &[Round]| rounds.iter().map(|round| round.busy.as_secs_f64()).sum::<f64>();
        // Both kinds of rounds have the same number of pods.
        let own = busy(quiet) * during.len() as f64 / quiet.len() as f64;
        let took: Duration = during.iter().map(|round| round.took).sum();
        Self {
            name,
            quiet: median(&in_order(quiet.iter().map(|round| round.p99))),
            during: median(&in_order(during.iter().map(|round| round.p99))),
            ratio: median(&ratios),
            rounds: ratios.len(),
            noise: (high / low).sqrt(),
            low,
            share: (busy(during) - own) / took.as_secs_f64(),
        }
    }

    fn is_control(&self) -> bool {
        self.name.starts_with('(')
    }

    fn is_noisy(&self) -> bool {
        self.noise > NOISE
    }

    fn is_over(&self) -> bool {
        // The lower bound is over the bar, so noise does not matter.
        !self.is_control() && (self.low > BAR || !self.is_noisy() && self.ratio > BAR)
    }

    fn verdict(&self) -> &'static str {
        match self {
            _ if self.is_control() => "",
            _ if self.is_over() => "**over the bar**",
            _ if self.is_noisy() => "too noisy to say",
            _ => "ok",
        }
    }

    fn line(&self) -> String {
        let Self {
            name,
            quiet,
            during,
            ratio,
            rounds,
            noise,
            low: _,
            share,
        } = self;
        let share = share * 100.0;
        let verdict = self.verdict();
        format!(
            "| {name:<52} | {quiet:>8.2} | {during:>8.2} | {ratio:>5.2} | {noise:>5.2} | {rounds:>3} | {share:>4.0} | {verdict} |"
        )
    }
}

fn in_order(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the median of sorted values.
fn median(values: &[f64]) -> f64 {
    let last = values.len() - 1;
    f64::midpoint(values[last / 2], values[last.div_ceil(2)])
}

/// Returns the confidence interval of the median: 95 % for independent values. Here it is about 90 %, because neighbouring
/// ratios share a quiet round and the number of rounds depends on the ratios.
fn trusted(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    // Each value is below or above the true median with equal probability.
    let place = ((count - 1.96 * count.sqrt()) / 2.0).floor().max(0.0) as usize;
    (values[place], values[values.len() - 1 - place])
}

/// Sets the scheduling policy of this thread and its children: `SCHED_IDLE` or the normal one.
fn set_idle(is_idle: bool) {
    let policy = if is_idle { "--idle" } else { "--other" };
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let set = Command::new("chrt")
        .args([policy, "--pid", "0", &thread])
        .status();
    match set {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("chrt {policy} {status}: run this as root"),
        Err(error) => panic!("chrt (of util-linux) cannot be run: {error}"),
    }
}

fn row(name: &'static str, begin: fn(&Neighbourhood) -> Going, size: &Size) -> Row {
    let mut neighbours = Neighbourhood::configured("logLevel: error\n");
    let mut quiet = vec![Round::of(&mut neighbours, size.pods)];
    let mut during = Vec::new();
    loop {
        // Threads and processes inherit the policy.
        set_idle(true);
        let going = begin(&neighbours);
        set_idle(false);
        during.push(Round::of(&mut neighbours, size.pods));
        drop(going);
        // The effects of the behaviour wear off.
        let settled = Instant::now() + SETTLE;
        while Instant::now() < settled {
            neighbours.one_pod_goes_on();
        }
        quiet.push(Round::of(&mut neighbours, size.pods));
        if during.len() < *size.rounds.start() {
            continue;
        }
        let row = Row::new(name, &quiet, &during);
        if !row.is_noisy() || row.is_over() || during.len() >= *size.rounds.end() {
            neighbours.unharmed_within(ROOM_MIB);
            return row;
        }
    }
}

fn main() -> ExitCode {
    devlet_testkit::become_plugin_if_asked();
    let args = Args::parse();
    let size = args.size();
    let head = "| while another plugin or caller ... | p99 undisturbed, ms | p99 meanwhile, ms | ratio | noise | rounds | devlet's work, % | |\n\
                | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |";
    println!("{head}");
    let mut rows = Vec::new();
    for (name, begin) in BEHAVIOURS.iter().filter(|(name, _)| args.wants(name)) {
        let row = row(name, *begin, &size);
        println!("{}", row.line());
        rows.push(row);
    }
    let Size { pods, .. } = size;
    let legend = format!(
        "Admission of a pod of a good plugin; rounds of {pods} pods with the behaviour, in turns with as many without, \
         more of them where the ratio was not certain; medians of the rounds' 99th percentiles. Ratio: of a round to those before and after, the median. \
         Noise: by what factor it may be off, in 9 of 10 cases. Devlet's work: processor time that it spends on the \
         behaviour, of one processor. The bar is {BAR}."
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

/// Replaces the table in the document.
fn publish(table: &str) {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance.md");
    let text = std::fs::read_to_string(document).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    std::fs::write(document, format!("{before}{BEGIN}\n\n{table}\n{END}{after}")).unwrap();
}
