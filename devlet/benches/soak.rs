//! Mixed load with faults for a long time: what the daemon uses must return to where it was.
//!
//! ```text
//! cargo bench -p devlet --bench soak -- [--minutes 30] [--out DIR]
//! ```
//!
//! One daemon, three plugins. Callers admit pods, ask for run options, list and remove; some leave in the middle.
//! Every second something breaks: a plugin is killed and comes back, hangs, refuses, loses devices, flips their
//! health, ends its stream, or somebody talks nonsense to a socket. After a warm-up everything is drained and measured;
//! then comes the soak; then everything is drained and measured again. At the end the daemon is killed and started
//! once more: what was answered must be there.
//!
//! Prints a table; with `--out`, `soak.json` and a chart, `soak.svg`, are written too. Exit code 1 if something grew.

// A benchmark reports by panicking, as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Daemon, http_get, root};
use devlet_client::{Client, Code, Status, locate, v1};
use devlet_testkit::{Device, Door, Fault, Plugin, Script};
use serde_json::json;

const CALLERS: usize = 16;
const PODS_PER_CALLER: usize = 40;
const WARM_UP: Duration = Duration::from_secs(60);
const SAMPLE: Duration = Duration::from_secs(5);
const RESOURCES: [(&str, usize); 3] = [
    ("acme.com/gpu", 256),
    ("acme.com/nic", 2000),
    ("other.org/fpga", 64),
];

/// What a caller was told of each of its pods.
type Held = BTreeMap<String, BTreeSet<(String, String)>>;

#[derive(Debug, Default)]
struct Tally {
    admitted: AtomicU64,
    refused: AtomicU64,
    removed: AtomicU64,
    left: AtomicU64,
    reads: AtomicU64,
    faults: AtomicU64,
}

impl Tally {
    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Numbers that look random, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (number ^ (number >> 31)) % sides
    }
}

/// What the daemon uses.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Duration,
    resident_kib: u64,
    descriptors: u64,
    tasks: u64,
    database_kib: u64,
    pods: u64,
}

fn sample(daemon: &Daemon, address: &str, at: Duration) -> Sample {
    let process = PathBuf::from(format!("/proc/{}", daemon.child.id()));
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident_kib = resident
        .and_then(|text| text.trim().trim_end_matches("kB").trim().parse().ok())
        .unwrap();
    let descriptors = std::fs::read_dir(process.join("fd")).unwrap().count() as u64;
    let database = std::fs::metadata(daemon.root.join("devlet/state.redb")).unwrap();
    let metrics = http_get(address, "/metrics");
    let metric = |name: &str| {
        let values = metrics.lines().filter(|line| line.starts_with(name));
        values
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum::<f64>() as u64
    };
    Sample {
        at,
        resident_kib,
        descriptors,
        tasks: metric("devlet_tasks"),
        database_kib: database.len() / 1024,
        pods: metric("devlet_pods"),
    }
}

fn script(root: &Path, index: usize) -> Script {
    let (resource, count) = RESOURCES[index];
    let devices = (0..count)
        .map(|number| Device::on(&format!("d{number:04}"), (number % 2) as i64))
        .collect();
    let mut script = Script::new(root, resource, devices);
    script.door = if index == 2 { Door::Registry } else { Door::Kubelet };
    script.options.preferred = index == 1;
    script.answer.envs = [("VISIBLE".to_owned(), "{ids}".to_owned())].into();
    script
}

fn manifest(name: &str, dice: &mut Dice) -> String {
    let (resource, _) = RESOURCES[dice.roll(3) as usize];
    let count = 1 + dice.roll(3);
    let mut text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - name: main\n    \
         resources: {{limits: {{{resource}: {count}}}}}\n"
    );
    if dice.roll(4) == 0 {
        let (other, _) = RESOURCES[dice.roll(3) as usize];
        text += &format!("  - name: second\n    resources: {{limits: {{{other}: 1}}}}\n");
    }
    text
}

fn devices(pod: &v1::Pod) -> BTreeSet<(String, String)> {
    let held = pod.containers.iter().flat_map(|container| &container.devices);
    held.flat_map(|held| held.ids.iter().map(|id| (held.resource.clone(), id.clone())))
        .collect()
}

async fn admit(client: &Client, manifest: String) -> Result<v1::Pod, Status> {
    let request = v1::AdmitRequest {
        manifest,
        wait_ms: Some(2000),
        ..Default::default()
    };
    let mut events = client.admit(request).await?;
    while let Some(event) = events.message().await? {
        if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
            return Ok(pod);
        }
    }
    Err(Status::unavailable("the stream ended without an answer"))
}

async fn remove(client: &Client, pod: &str) -> Result<(), Status> {
    let request = v1::RemovePodRequest {
        pod: pod.to_owned(),
        ..Default::default()
    };
    match client.remove_pod(request).await {
        Err(status) if status.code() == Code::NotFound => Ok(()),
        answer => answer.map(drop),
    }
}

/// One caller, until told to stop.
async fn call(
    client: Client,
    number: usize,
    stop: Arc<AtomicBool>,
    tally: Arc<Tally>,
    held: Arc<Mutex<Held>>,
) {
    let mut dice = Dice(number as u64);
    while !stop.load(Ordering::Relaxed) {
        let name = format!("pod-{number}-{}", dice.roll(PODS_PER_CALLER as u64));
        let known = held.lock().unwrap().contains_key(&name);
        if known {
            remove(&client, &name).await.unwrap();
            held.lock().unwrap().remove(&name);
            Tally::count(&tally.removed);
        } else if dice.roll(20) == 0 {
            // Leaves in the middle; whatever became of it is removed.
            let patience = Duration::from_micros(dice.roll(3000));
            let _ = tokio::time::timeout(patience, admit(&client, manifest(&name, &mut dice))).await;
            remove(&client, &name).await.unwrap();
            Tally::count(&tally.left);
        } else {
            match admit(&client, manifest(&name, &mut dice)).await {
                Ok(pod) => {
                    held.lock().unwrap().insert(name.clone(), devices(&pod));
                    Tally::count(&tally.admitted);
                    let request = v1::StartContainerRequest {
                        pod: name,
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
                    assert!(expected, "{status:?}");
                    Tally::count(&tally.refused);
                }
            }
        }
        if dice.roll(50) == 0 {
            client.list_pods(v1::ListPodsRequest::default()).await.unwrap();
            client
                .list_resources(v1::ListResourcesRequest::default())
                .await
                .unwrap();
            Tally::count(&tally.reads);
        }
        tokio::time::sleep(Duration::from_millis(2 + dice.roll(40))).await;
    }
}

/// The plugins, and what happens to them.
struct Troubles {
    root: PathBuf,
    plugins: Vec<Option<Plugin>>,
    dice: Dice,
    round: u64,
}

impl Troubles {
    fn new(root: &Path) -> Self {
        let plugins = (0..RESOURCES.len())
            .map(|index| Some(Plugin::registered(&script(root, index))))
            .collect();
        Self {
            root: root.to_owned(),
            plugins,
            dice: Dice(4711),
            round: 0,
        }
    }

    fn plugin(&mut self, index: usize) -> &mut Plugin {
        self.plugins[index].as_mut().unwrap()
    }

    /// The next thing that goes wrong; blocks for as long as it lasts.
    fn next(&mut self) {
        let index = self.dice.roll(3) as usize;
        let all = script(&self.root, index).devices;
        let pause = |ms| std::thread::sleep(Duration::from_millis(ms));
        self.round += 1;
        match self.round % 9 {
            0 => {
                self.plugins[index].take().unwrap().kill();
                pause(300);
                self.plugins[index] = Some(Plugin::registered(&script(&self.root, index)));
            }
            1 => {
                self.plugins[index].take().unwrap().exit();
                self.plugins[index] = Some(Plugin::registered(&script(&self.root, index)));
            }
            2 => {
                self.plugin(index).fault("Allocate", Some(&Fault::Hang));
                pause(500);
                self.plugin(index).fault("Allocate", None);
            }
            3 => {
                let refusal = Fault::Refuse {
                    code: Code::Internal as i32,
                    message: "not today".into(),
                };
                self.plugin(index).fault("Allocate", Some(&refusal));
                pause(200);
                self.plugin(index).fault("Allocate", None);
            }
            4 => {
                self.plugin(index).list(&all[..all.len() / 2]);
                pause(200);
                self.plugin(index).list(&all);
            }
            5 => {
                for _ in 0..20 {
                    self.plugin(index).health("d0001", "Unhealthy");
                    self.plugin(index).health("d0001", "Healthy");
                }
            }
            6 => self.plugin(index).command("end-stream"),
            7 => {
                for socket in ["device-plugins/kubelet.sock", "devlet/devlet.sock"] {
                    for _ in 0..10 {
                        let mut stream = UnixStream::connect(self.root.join(socket)).unwrap();
                        let _ =
                            stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense that is no frame");
                    }
                }
            }
            _ => {
                let advice = Fault::Refuse {
                    code: Code::Unavailable as i32,
                    message: "no advice".into(),
                };
                self.plugin(1).fault("GetPreferredAllocation", Some(&advice));
                pause(200);
                self.plugin(1).fault("GetPreferredAllocation", None);
            }
        }
        for plugin in self.plugins.iter_mut().flatten() {
            plugin.forget_events();
        }
    }
}

/// Load and faults for a while, then everything is removed again.
fn run(
    daemon: &Daemon,
    address: &str,
    troubles: &mut Troubles,
    time: Duration,
    tally: &Arc<Tally>,
    mut each: impl FnMut(Sample),
) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime
        .block_on(Client::connect(locate::socket(&daemon.root)))
        .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let held = Arc::new(Mutex::new(Held::new()));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            runtime.spawn(call(
                client.clone(),
                number,
                Arc::clone(&stop),
                Arc::clone(tally),
                Arc::clone(&held),
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
    runtime.block_on(async {
        let held = std::mem::take(&mut *held.lock().unwrap());
        check(&client, &held).await;
        for name in held.keys() {
            remove(&client, name).await.unwrap();
        }
        check(&client, &Held::new()).await;
    });
}

/// What is there is what was answered, and no device is there twice.
async fn check(client: &Client, held: &Held) {
    let pods = client
        .list_pods(v1::ListPodsRequest::default())
        .await
        .unwrap()
        .pods;
    let there: Held = pods
        .iter()
        .map(|pod| (pod.id.clone().unwrap().name, devices(pod)))
        .collect();
    assert_eq!(there, *held, "what was answered is not what is there");
    let all: Vec<_> = there.values().flatten().collect();
    let distinct: BTreeSet<_> = all.iter().collect();
    assert_eq!(all.len(), distinct.len(), "a device is held twice");
}

/// Waits until nothing is under way any longer.
fn settled(daemon: &Daemon, address: &str) -> Sample {
    let mut last = sample(daemon, address, Duration::ZERO);
    for _ in 0..60 {
        std::thread::sleep(Duration::from_millis(500));
        let next = sample(daemon, address, Duration::ZERO);
        if (next.tasks, next.descriptors, next.pods) == (last.tasks, last.descriptors, last.pods)
            && next.resident_kib.abs_diff(last.resident_kib) < 64
        {
            return next;
        }
        last = next;
    }
    last
}

/// A title, and what is drawn.
type Row = (&'static str, fn(&Sample) -> f64);

fn chart(samples: &[Sample]) -> String {
    const WIDTH: f64 = 720.0;
    const HEIGHT: f64 = 90.0;
    let rows: [Row; 4] = [
        ("resident memory, MiB", |s| s.resident_kib as f64 / 1024.0),
        ("file descriptors", |s| s.descriptors as f64),
        ("tasks", |s| s.tasks as f64),
        ("database, MiB", |s| s.database_kib as f64 / 1024.0),
    ];
    let end = samples.last().map_or(1.0, |last| last.at.as_secs_f64());
    let height = 130.0 * rows.len() as f64 + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\"><style>text{{fill:#555}}path{{fill:none;stroke:#3b7dd8;stroke-width:1.5}}\
         line{{stroke:#999;stroke-width:.5}}@media(prefers-color-scheme:dark){{text{{fill:#bbb}}}}</style>\n",
        WIDTH + 80.0
    );
    for (place, (title, value)) in rows.iter().enumerate() {
        let top = 130.0 * place as f64 + 25.0;
        let most = samples.iter().map(value).fold(1.0, f64::max) * 1.1;
        let points: Vec<String> = samples
            .iter()
            .map(|each| {
                let x = 60.0 + each.at.as_secs_f64() / end * WIDTH;
                format!("{x:.1},{:.1}", top + HEIGHT - value(each) / most * HEIGHT)
            })
            .collect();
        let bottom = top + HEIGHT;
        let _ = writeln!(
            svg,
            "<text x=\"60\" y=\"{:.0}\">{title}</text><text x=\"52\" y=\"{:.0}\" text-anchor=\"end\">{most:.0}</text>\
             <text x=\"52\" y=\"{bottom:.0}\" text-anchor=\"end\">0</text>\
             <line x1=\"60\" x2=\"{:.0}\" y1=\"{bottom:.0}\" y2=\"{bottom:.0}\"/><path d=\"M{}\"/>",
            top - 6.0,
            top + 10.0,
            60.0 + WIDTH,
            points.join("L")
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"60\" y=\"{:.0}\">0 to {:.0} minutes</text></svg>",
        height - 4.0,
        end / 60.0
    );
    svg
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
    let options = ["--http", "127.0.0.1:0", "--log-level", "warn"];
    let daemon = Daemon::with(root.path(), &options);
    let address = daemon.banner.split("http://").nth(1).unwrap();
    let address: String = address
        .chars()
        .take_while(|c| !c.is_whitespace() && *c != '/')
        .collect();
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

    // Once more with pods, and then the power goes.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime
        .block_on(Client::connect(locate::socket(root.path())))
        .unwrap();
    let mut held = Held::new();
    for number in 0..50 {
        let name = format!("last-{number}");
        let pod = runtime
            .block_on(admit(&client, manifest(&name, &mut Dice(number))))
            .unwrap();
        held.insert(name, devices(&pod));
    }
    drop(client);
    daemon.kill();
    let daemon = Daemon::with(root.path(), &options);
    let client = runtime
        .block_on(Client::connect(locate::socket(root.path())))
        .unwrap();
    runtime.block_on(check(&client, &held));
    drop(client);
    assert_eq!(daemon.stop(), Some(0));

    report(minutes, before, after, &samples, &tally, out.as_deref());
}

fn report(
    minutes: f64,
    before: Sample,
    after: Sample,
    samples: &[Sample],
    tally: &Tally,
    out: Option<&Path>,
) {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "\n{} admitted, {} removed, {} refused, {} callers left, {} lists read, {} faults",
        get(&tally.admitted),
        get(&tally.removed),
        get(&tally.refused),
        get(&tally.left),
        get(&tally.reads),
        get(&tally.faults)
    );
    // Allocators keep some; a leak of any call would be far more after this many.
    let rows = [
        (
            "resident memory, KiB",
            before.resident_kib,
            after.resident_kib,
            before.resident_kib / 4 + 4096,
        ),
        ("file descriptors", before.descriptors, after.descriptors, 0),
        ("tasks", before.tasks, after.tasks, 0),
        (
            "database, KiB",
            before.database_kib,
            after.database_kib,
            before.database_kib / 2,
        ),
        ("pods", before.pods, after.pods, 0),
    ];
    println!("\n{:<24}{:>12}{:>12}{:>12}", "", "before", "most", "after");
    let most: [fn(&Sample) -> u64; 5] = [
        |s| s.resident_kib,
        |s| s.descriptors,
        |s| s.tasks,
        |s| s.database_kib,
        |s| s.pods,
    ];
    let mut grew = false;
    for ((name, before, after, slack), most) in rows.into_iter().zip(most) {
        let bad = after > before + slack;
        grew |= bad;
        let most = samples.iter().map(most).max().unwrap_or_default();
        println!(
            "{name:<24}{before:>12}{most:>12}{after:>12}{}",
            if bad { "  GREW" } else { "" }
        );
    }
    if let Some(out) = out {
        let each: Vec<_> = samples
            .iter()
            .map(|s| {
                json!([
                    s.at.as_secs(),
                    s.resident_kib,
                    s.descriptors,
                    s.tasks,
                    s.database_kib,
                    s.pods
                ])
            })
            .collect();
        let all = json!({
            "minutes": minutes,
            "columns": ["seconds", "residentKib", "descriptors", "tasks", "databaseKib", "pods"],
            "samples": each,
            "admitted": get(&tally.admitted),
            "faults": get(&tally.faults),
        });
        std::fs::write(out.join("soak.json"), format!("{all:#}\n")).unwrap();
        std::fs::write(out.join("soak.svg"), chart(samples)).unwrap();
    }
    if grew {
        std::process::exit(1);
    }
}
