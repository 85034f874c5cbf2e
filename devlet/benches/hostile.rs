//! devlet's cost of misbehaving peers, and admission latency of others: `cargo bench -p devlet --bench hostile`.
//!
//! For each behaviour, rounds of pods of a well-behaved plugin are admitted one after the other, alternately without and
//! with the behaviour. A row passes if all of these hold:
//!
//! - devlet's own processor time for the behaviour is at most 25 % of one core;
//! - memory returns to within 128 MiB of its size before, and file descriptors to their number before;
//! - every admission of the well-behaved plugin's pods succeeds, and nothing is lost, as in the tests `serve/hostile_*`.
//!
//! The 99th percentiles of the admission time are reported and not judged. Offenders run with `SCHED_IDLE`, because devlet
//! cannot limit the processor time that they use themselves. The first rows are controls without a verdict: they use
//! processor time and do not call devlet. Needs root, and `chrt` of util-linux. Exit code 1: a row does not pass.

// Helpers are not tests to clippy.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/hostile/mod.rs"]
mod hostile;

use std::any::Any;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
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
/// Maximum share of one core that devlet may spend on a behaviour.
const MAX_SHARE: f64 = 0.25;
/// Growth of the daemon's memory, in MiB, at which a row does not pass. A list of 100,000 devices stays known for minutes
/// after its plugin has left, and the allocator keeps freed memory.
const ROOM_MIB: u64 = 128;
/// Pause after a behaviour ends.
const SETTLE: Duration = Duration::from_millis(500);
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
    ("(control: uses a core, without calls to devlet)", |_| {
        again_and_again(|| {
            std::hint::black_box((0..1_000_000_u64).fold(0, |sum, number| sum ^ number));
        })
    }),
    ("(control: starts processes, without calls to devlet)", |_| {
        let own = std::env::current_exe().unwrap();
        again_and_again(move || {
            let mut help = Command::new(&own);
            help.args(["--bench", "--help"]).stdout(Stdio::null());
            assert!(help.status().unwrap().success());
        })
    }),
    // Registrations.
    ("registers and exits, in a loop", |neighbours| {
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
    ("sends half a list, pods wait", |neighbours| {
        silent(neighbours, "ListAndWatch", Fault::Half)
    }),
    ("sends half an answer to Allocate, pods wait", |neighbours| {
        silent(neighbours, "Allocate", Fault::Half)
    }),
    ("sends a list one byte at a time, pods wait", |neighbours| {
        silent(neighbours, "ListAndWatch", Fault::Drip { pause_ms: 10 })
    }),
    (
        "answers Allocate with one byte a second, pods wait",
        |neighbours| silent(neighbours, "Allocate", Fault::Drip { pause_ms: 1_000 }),
    ),
    ("malformed answers to Allocate", |neighbours| {
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
    ("lists of 100,000 devices, without a pause", |neighbours| {
        let lists = Fault::EndlessDevices(100_000);
        let plugin = Plugin::start(&neighbours.bad(0).with_fault("ListAndWatch", lists));
        until_listed(neighbours, 100_000);
        Box::new(plugin)
    }),
    ("lists of 1,000 devices, without a pause", |neighbours| {
        flood(neighbours, &many(neighbours, 1_000), 1_000, 0)
    }),
    ("flips health 1,000 times a second", |neighbours| {
        flood(neighbours, &many(neighbours, 3), 3, 1_000)
    }),
    ("lists with invalid devices, without a pause", |neighbours| {
        let invalid = [
            ("a", 64),
            ("a", -5),
            ("b", i64::MIN),
            ("\u{1b}[2J\n\r\0", i64::MAX),
        ];
        let script = Script {
            devices: invalid.map(|(id, node)| Device::on(id, node)).into(),
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
    ("manifests of almost 1 MiB, without a pause", |neighbours| {
        let other = neighbours.caller();
        let long = "x".repeat(1_000_000);
        again_and_again(move || _ = other.admit(&long, BAD))
    }),
    ("200 silent connections to each socket", |neighbours| {
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
    ("malformed HTTP/2 on every socket", |neighbours| {
        let sockets = neighbours.sockets();
        let mut all = nonsense_of_a_client().into_iter().cycle();
        again_and_again(move || {
            let (_, bytes) = all.next().unwrap();
            sockets.iter().for_each(|socket| drop(throw(socket, &bytes)));
        })
    }),
    ("malformed HTTP/2 from sockets in the registry", |neighbours| {
        let registry = neighbours.root().join("plugins_registry");
        let babbler = |(number, (_, bytes))| Babbler::at(&registry.join(format!("{number}.sock")), bytes);
        let all: Vec<Babbler> = nonsense_of_a_server()
            .into_iter()
            .enumerate()
            .map(babbler)
            .collect();
        Box::new(all)
    }),
    ("inotify events, without a pause", |neighbours| {
        let file = neighbours.root().join("plugins_registry/file");
        again_and_again(move || touch(&file))
    }),
    ("deletes and recreates the registry, in a loop", |neighbours| {
        let registry = neighbours.root().join("plugins_registry");
        again_and_again(move || {
            std::fs::remove_dir_all(&registry).unwrap();
            std::fs::create_dir(&registry).unwrap();
        })
    }),
    (
        "replaces its socket by a file, a directory, a link",
        |neighbours| {
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
        },
    ),
    // Drivers.
    (
        "a driver hangs in NodePrepareResources, pods wait",
        |neighbours| silent_driver(neighbours, "NodePrepareResources"),
    ),
    (
        "a driver hangs in NodeUnprepareResources, pods wait",
        |neighbours| silent_driver(neighbours, "NodeUnprepareResources"),
    ),
    (
        "a driver's health of 10,000 devices, without a pause",
        |neighbours| {
            let devices = (0..10_000).map(|number| DeviceHealth::healthy("pool", &number.to_string()));
            let script = DriverScript::new(neighbours.root(), DRIVER).with_health(Vec::new());
            let mut driver = Plugin::registered_driver(&script);
            driver.until_list_of(0);
            driver.report(&devices.collect::<Vec<_>>());
            driver.flood(u32::MAX, 0);
            Box::new(driver)
        },
    ),
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
    /// Rounds of each behaviour
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run two short rounds of each behaviour, without a verdict on processor time and memory
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Write the table to docs/performance.md
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
        let (rounds, pods) = if self.quick { (2, 50) } else { (self.rounds, PODS) };
        Size { rounds, pods }
    }
}

/// Size of a measurement.
struct Size {
    /// Rounds with each behaviour, and as many without.
    rounds: u32,
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

/// Measurements of one behaviour.
struct Row {
    /// Medians of the rounds' 99th percentiles, in milliseconds.
    p99_without: f64,
    p99_with: f64,
    /// Share of one core that the daemon spends on the behaviour. Negative if the machine disturbed the measurement.
    share: f64,
    /// Growth of the daemon's memory, after the behaviour ended.
    grown_mib: u64,
}

impl Row {
    /// Computes a row from equal numbers of rounds without and with the behaviour.
    fn new(without: &[Round], with: &[Round], grown_mib: u64) -> Self {
        let busy = |rounds: &[Round]| rounds.iter().map(|round| round.busy.as_secs_f64()).sum::<f64>();
        let took: Duration = with.iter().map(|round| round.took).sum();
        Self {
            p99_without: median_p99(without),
            p99_with: median_p99(with),
            // All rounds have the same number of pods, so the daemon's work for them is the same.
            share: (busy(with) - busy(without)) / took.as_secs_f64(),
            grown_mib,
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.share > MAX_SHARE, self.grown_mib >= ROOM_MIB) {
            (false, false) => OK,
            (true, false) => "**too much CPU**",
            (false, true) => "**too much memory**",
            (true, true) => "**too much CPU and memory**",
        }
    }
}

const OK: &str = "ok";
const FAILED: &str = "**failed**";

/// Returns the verdict on a behaviour. A row is missing if a check failed.
fn verdict(name: &str, row: Option<&Row>) -> &'static str {
    match row {
        None => FAILED,
        // A control.
        Some(_) if name.starts_with('(') => "",
        Some(row) => row.verdict(),
    }
}

fn line(name: &str, row: Option<&Row>) -> String {
    let verdict = verdict(name, row);
    let Some(row) = row else {
        return format!("| {name:<52} | | | | | | {verdict} |");
    };
    let Row {
        p99_without,
        p99_with,
        share,
        grown_mib,
    } = row;
    let (ratio, percent) = (p99_with / p99_without, share * 100.0);
    format!(
        "| {name:<52} | {p99_without:>8.2} | {p99_with:>8.2} | {ratio:>5.2} | {percent:>5.1} | {grown_mib:>4} | {verdict} |"
    )
}

fn median_p99(rounds: &[Round]) -> f64 {
    let mut values: Vec<f64> = rounds.iter().map(|round| round.p99).collect();
    values.sort_by(f64::total_cmp);
    let last = values.len() - 1;
    f64::midpoint(values[last / 2], values[last.div_ceil(2)])
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

/// Measures a behaviour, and panics if a check fails.
fn measure(begin: fn(&Neighbourhood) -> Going, size: &Size) -> Row {
    let mut neighbours = Neighbourhood::configured("logLevel: error\n");
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..size.rounds {
        without.push(Round::of(&mut neighbours, size.pods));
        // Threads and processes inherit the policy.
        set_idle(true);
        let going = begin(&neighbours);
        set_idle(false);
        with.push(Round::of(&mut neighbours, size.pods));
        drop(going);
        // The effects of the behaviour wear off.
        let settled = Instant::now() + SETTLE;
        while Instant::now() < settled {
            neighbours.one_pod_goes_on();
        }
    }
    neighbours.intact();
    Row::new(&without, &with, neighbours.grown_mib())
}

fn main() -> ExitCode {
    devlet_testkit::become_plugin_if_asked();
    let args = Args::parse();
    let (size, began) = (args.size(), Instant::now());
    let head = "| while another plugin or caller ... | p99 without, ms | p99 with, ms | ratio | CPU, % | memory, MiB | verdict |\n\
                | --- | ---: | ---: | ---: | ---: | ---: | --- |";
    println!("{head}");
    let (mut lines, mut verdicts) = (Vec::new(), Vec::new());
    for (name, begin) in BEHAVIOURS.iter().filter(|(name, _)| args.wants(name)) {
        // A failed check is a row of the table, and is described on standard error.
        let row = std::panic::catch_unwind(AssertUnwindSafe(|| measure(*begin, &size))).ok();
        if row.is_none() {
            set_idle(false);
        }
        let line = line(name, row.as_ref());
        println!("{line}");
        lines.push(line);
        verdicts.push(verdict(name, row.as_ref()));
    }
    let Size { rounds, pods } = size;
    let legend = format!(
        "Admissions of pods of a well-behaved plugin: {rounds} rounds of {pods} pods with the behaviour, alternating with as \
         many without. p99: median of the rounds' 99th percentiles; ratio: their quotient. CPU: devlet's processor time \
         for the behaviour, as a share of one core. Memory: growth after the behaviour ended. The bar: at most {:.0} % \
         CPU, less than {ROOM_MIB} MiB, descriptors return, every admission succeeds, nothing is lost. The p99 is not judged.",
        MAX_SHARE * 100.0
    );
    println!("\n{legend}");
    if args.publish {
        publish(&format!("{legend}\n\n{head}\n{}\n", lines.join("\n")));
    }
    let is_bad = |verdict: &&&str| match args.quick {
        true => **verdict == FAILED,
        false => !["", OK].contains(*verdict),
    };
    let bad = verdicts.iter().filter(is_bad).count();
    println!(
        "\n{bad} of {} rows do not pass; {} s",
        verdicts.len(),
        began.elapsed().as_secs()
    );
    if args.quick {
        println!("This was a quick run: processor time and memory do not count.");
    }
    ExitCode::from(u8::from(bad > 0))
}

/// Replaces the table in the document.
fn publish(table: &str) {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/performance.md");
    let text = std::fs::read_to_string(document).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    std::fs::write(document, format!("{before}{BEGIN}\n\n{table}\n{END}{after}")).unwrap();
}
