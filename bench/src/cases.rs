//! The cases, in the order in which they reuse nodes.
//!
//! The two sides alternate within each round, and each waits until the other is idle, so that disturbances of the
//! machine affect both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use crate::bare::{self, Bare};
use crate::clock::Samples;
use crate::devlet::{self, Devlet};
use crate::embedded::Embedded;
use crate::kubelet::{self, Kubelet};
use crate::noise::{resident_mib, settled};
use crate::plugin;
use crate::process::Process;
use crate::report::{Bar, Row, Unit, number};

pub(crate) const RESOURCE: &str = "bench.devlet.dev/gpu";
/// Free devices, in most cases.
const FREE: usize = 128;
pub(crate) const CALLERS: usize = 64;
pub(crate) const KUBELET: &str = "kubelet";

/// The amount of work.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) mode: &'static str,
    /// Numbers of held pods.
    pub(crate) levels: Vec<usize>,
    pub(crate) rounds: usize,
    /// Samples per round in cheap cases.
    pub(crate) samples: usize,
    /// Duration of the cases with many callers, per side and round.
    pub(crate) loop_time: Duration,
    pub(crate) loop_level: usize,
    /// Pods held at a restart; devices and pods for the first list; devices of a large list.
    pub(crate) restart: usize,
    pub(crate) first_list: (usize, usize),
    pub(crate) large_list: usize,
    /// Numbers of held claims; the first is 0.
    pub(crate) claims: Vec<usize>,
    /// `true` if ratios are compared with their bars.
    pub(crate) judged: bool,
}

impl Plan {
    pub(crate) fn full() -> Self {
        Self {
            mode: "full",
            levels: vec![100, 1_000, 5_000, 10_000],
            rounds: 5,
            samples: 40,
            loop_time: Duration::from_secs(4),
            loop_level: 1_000,
            restart: 10_000,
            first_list: (10_000, 5_000),
            large_list: 50_000,
            claims: vec![0, 1_000, 5_000, 10_000],
            judged: true,
        }
    }

    pub(crate) fn quick() -> Self {
        Self {
            mode: "quick",
            levels: vec![100, 1_000],
            rounds: 3,
            samples: 40,
            loop_time: Duration::from_secs(2),
            loop_level: 1_000,
            restart: 1_000,
            first_list: (2_000, 1_000),
            large_list: 50_000,
            claims: vec![0, 1_000],
            judged: false,
        }
    }

    pub(crate) fn smoke() -> Self {
        Self {
            mode: "smoke",
            levels: vec![20],
            rounds: 1,
            samples: 5,
            loop_time: Duration::from_millis(200),
            loop_level: 20,
            restart: 20,
            first_list: (100, 20),
            large_list: 1_000,
            claims: vec![0, 20],
            judged: false,
        }
    }

    /// Returns the bar in a full run only: smaller runs do not reach the sizes.
    pub(crate) fn bar(&self, bar: Bar) -> Option<Bar> {
        self.judged.then_some(bar)
    }

    pub(crate) fn bar_of(&self, level: usize, bars: &[(usize, f64)]) -> Option<Bar> {
        let (_, times) = bars.iter().find(|(at, _)| *at == level)?;
        self.bar(Bar::AtLeast(*times))
    }
}

/// All running processes, and the results so far.
pub(crate) struct Bench {
    pub(crate) plan: Plan,
    pub(crate) work: PathBuf,
    pub(crate) kubelet: kubelet::Program,
    pub(crate) devlet: devlet::Program,
    pub(crate) plugin: Process,
    /// The peer of a bare caller's round trip: it only answers.
    pub(crate) peer: Process,
    bare: Bare,
    /// A node without pods, for comparison.
    empty: Devlet,
    sockets: usize,
    pub(crate) rows: Vec<Row>,
    bare_all: Samples,
    /// One per round, in milliseconds.
    bare_medians: Vec<f64>,
    empty_all: Samples,
}

/// The result of a run.
pub(crate) struct Outcome {
    pub(crate) rows: Vec<Row>,
    pub(crate) bare_medians: Vec<f64>,
}

pub(crate) fn progress(text: &str) {
    eprintln!("bench: {text}");
}

fn since(from: u64, until: u64) -> Duration {
    Duration::from_nanos(until.saturating_sub(from))
}

impl Bench {
    pub(crate) async fn new(
        plan: Plan,
        work: &Path,
        kubelet: kubelet::Program,
        devlet: devlet::Program,
    ) -> anyhow::Result<Self> {
        let this = std::env::current_exe()?;
        let log = work.join("plugin.log");
        let mut plugin = Process::start("the plugin", &this, &["plugin"], &log)?;
        let mut peer = Process::start("the bare peer", &this, &["plugin"], &log)?;
        let places = [work.join("bare-caller"), work.join("bare-plugin")];
        for place in &places {
            std::fs::create_dir_all(place)?;
        }
        offer(&mut peer, &places[0], "bare.sock", 1, false).await?;
        offer(&mut plugin, &places[1], "bare.sock", 1, false).await?;
        let [caller, callee] = places.map(|place| place.join("bare.sock"));
        let bare = Bare::new(&caller, &callee, &work.join("bare-file")).await?;
        let empty = devlet.start(&work.join("empty"), RESOURCE).await?;
        offer(&mut plugin, &empty.plugins(), "empty.sock", FREE, true).await?;
        empty.capacity(FREE).await?;
        Ok(Self {
            plan,
            work: work.to_owned(),
            kubelet,
            devlet,
            plugin,
            peer,
            bare,
            empty,
            sockets: 0,
            rows: Vec::new(),
            bare_all: Samples::default(),
            bare_medians: Vec::new(),
            empty_all: Samples::default(),
        })
    }

    pub(crate) async fn run(mut self) -> anyhow::Result<Outcome> {
        for level in self.plan.levels.clone() {
            self.held(level).await?;
        }
        self.against_bare();
        self.restart().await?;
        self.first_list().await?;
        self.large_list().await?;
        self.claims().await?;
        self.shield().await?;
        Ok(Outcome {
            rows: self.rows,
            bare_medians: self.bare_medians,
        })
    }

    /// Returns a path for a new directory.
    pub(crate) fn fresh(&mut self, name: &str) -> PathBuf {
        self.sockets += 1;
        self.work.join(format!("{name}-{}", self.sockets))
    }

    /// Lets the plugin register. Returns the time at which its list was sent.
    async fn offer(&mut self, directory: &Path, count: usize) -> anyhow::Result<u64> {
        self.sockets += 1;
        let socket = format!("bench-{}.sock", self.sockets);
        offer(&mut self.plugin, directory, &socket, count, true).await
    }

    /// Starts a kubelet with `held` pods and `devices` devices. Also returns the duration of its start.
    async fn kubelet(&mut self, held: usize, devices: usize) -> anyhow::Result<(Kubelet, Duration)> {
        kubelet::clear()?;
        self.kubelet.write_checkpoint(RESOURCE, held).await?;
        let (mut kubelet, start) = self.kubelet.start(RESOURCE, held).await?;
        self.offer(kubelet::directory(), devices).await?;
        kubelet.capacity(devices).await?;
        Ok((kubelet, start))
    }

    /// Starts a devlet with `held` pods and `devices` devices.
    async fn devlet(&mut self, held: usize, devices: usize) -> anyhow::Result<Devlet> {
        let root = self.fresh("devlet");
        let mut devlet = self.devlet.start(&root, RESOURCE).await?;
        self.offer(&devlet.plugins(), devices).await?;
        devlet.capacity(devices).await?;
        devlet.fill(held).await?;
        Ok(devlet)
    }

    /// Starts a process with devlet's agent, `held` pods and `devices` devices.
    async fn embedded(&mut self, held: usize, devices: usize) -> anyhow::Result<Embedded> {
        let root = self.fresh("agent");
        let mut agent = Embedded::start(&root, RESOURCE, &self.work.join("agent.log")).await?;
        self.offer(&agent.plugins(), devices).await?;
        agent.fill(held).await?;
        Ok(agent)
    }

    pub(crate) async fn bare_round(&mut self) -> anyhow::Result<()> {
        let mut round = Samples::default();
        let took = self.bare.measure(self.plan.samples).await?;
        round.extend(took.iter().copied());
        self.bare_all.extend(took);
        self.bare_medians.push(round.p50_ms());
        let took = self.empty.admit(self.plan.samples).await?;
        self.empty_all.extend(took);
        Ok(())
    }

    /// Measures admissions, and removals with admissions, while `level` pods are held.
    async fn held(&mut self, level: usize) -> anyhow::Result<()> {
        let shown = number(level as f64);
        progress(&format!("{shown} pods held"));
        let (mut kubelet, _) = self.kubelet(level, level + FREE).await?;
        let mut devlet = self.devlet(level, level + FREE).await?;
        let mut embedded = self.embedded(level, level + FREE).await?;
        let (theirs_per_round, theirs_per_churn) = match level {
            0..=100 => (20, 10),
            101..=1_000 => (10, 5),
            1_001..=5_000 => (5, 2),
            _ => (3, 1),
        };
        let (mut theirs, mut ours) = (Samples::default(), Samples::default());
        let (mut their_churn, mut our_churn) = (Samples::default(), Samples::default());
        let (mut in_process, mut empty) = (Samples::default(), Samples::default());
        for round in 1..=self.plan.rounds {
            progress(&format!("  round {round} of {}", self.plan.rounds));
            theirs.extend(kubelet.admit(theirs_per_round).await?);
            kubelet.keep(level).await?;
            settled(kubelet.pid()).await;
            ours.extend(devlet.admit(self.plan.samples).await?);
            in_process.extend(embedded.admit(self.plan.samples).await?);
            empty.extend(self.empty.admit(self.plan.samples).await?);
            self.bare_round().await?;
            their_churn.extend(kubelet.churn(theirs_per_churn).await?);
            settled(kubelet.pid()).await;
            our_churn.extend(devlet.churn(self.plan.samples).await?);
        }
        let admit = [(100, 3.0), (1_000, 25.0), (5_000, 100.0), (10_000, 200.0)];
        self.rows.push(Row::medians(
            format!("admit a pod in-process, {shown} held"),
            in_process.summary(),
            KUBELET,
            theirs.summary(),
            self.plan.bar_of(level, &admit),
        ));
        // Only information: the calls to the kubelet are in-process.
        self.rows.push(Row::medians(
            format!("admit a pod, {shown} held"),
            ours.summary(),
            KUBELET,
            theirs.summary(),
            None,
        ));
        self.rows.push(Row::medians(
            format!("one pod leaves, one comes, {shown} held"),
            our_churn.summary(),
            KUBELET,
            their_churn.summary(),
            self.plan.bar_of(level, &[(5_000, 1_000.0), (10_000, 3_000.0)]),
        ));
        if Some(&level) == self.plan.levels.last() {
            self.rows.push(Row::medians(
                format!("admit a pod, {shown} held compared with none"),
                ours.summary(),
                "devlet, none held,",
                empty.summary(),
                Some(Bar::AtMost(1.3)),
            ));
        }
        if level == self.plan.loop_level {
            self.callers(&mut kubelet, &mut devlet, &shown).await?;
        }
        kubelet.kill().await
    }

    /// Measures many callers that admit and remove pods.
    async fn callers(
        &mut self,
        kubelet: &mut Kubelet,
        devlet: &mut Devlet,
        held: &str,
    ) -> anyhow::Result<()> {
        let (mut theirs, mut ours) = (0.0, 0.0);
        for round in 1..=self.plan.rounds {
            progress(&format!(
                "  {CALLERS} callers, round {round} of {}",
                self.plan.rounds
            ));
            theirs += kubelet.pairs_per_second(CALLERS, self.plan.loop_time).await?;
            settled(kubelet.pid()).await;
            ours += devlet.pairs_per_second(CALLERS, self.plan.loop_time).await?;
        }
        let rounds = self.plan.rounds as f64;
        self.rows.push(Row::new(
            format!("{CALLERS} callers admit and remove, {held} held"),
            Unit::PairsPerSecond,
            ours / rounds,
            KUBELET,
            theirs / rounds,
            self.plan.bar(Bar::AtLeast(50.0)),
        ));
        Ok(())
    }

    fn against_bare(&mut self) {
        self.rows.push(Row::medians(
            "admit a pod, none held",
            self.empty_all.summary(),
            "two bare round trips and a sync",
            self.bare_all.summary(),
            Some(Bar::AtMost(1.5)),
        ));
    }

    /// Measures from exec after a crash until a holder is admitted again; for the kubelet, only the start of its manager.
    async fn restart(&mut self) -> anyhow::Result<()> {
        let held = self.plan.restart;
        let shown = number(held as f64);
        progress(&format!("restart with {shown} pods held"));
        let mut devlet = self.devlet(held, held + FREE).await?;
        kubelet::clear()?;
        self.kubelet.write_checkpoint(RESOURCE, held).await?;
        let (mut theirs, mut ours) = (Samples::default(), Samples::default());
        for round in 1..=self.plan.rounds {
            progress(&format!("  round {round} of {}", self.plan.rounds));
            let (kubelet, start) = self.kubelet.start(RESOURCE, held).await?;
            kubelet.kill().await?;
            theirs.add(start);
            for _ in 0..3 {
                ours.add(devlet.crash().await?);
            }
        }
        self.rows.push(Row::medians(
            format!("restart after a crash, {shown} held"),
            ours.summary(),
            KUBELET,
            theirs.summary(),
            self.plan.bar(Bar::AtLeast(100.0)),
        ));
        Ok(())
    }

    /// Measures from the first list after a restart until the capacity shows it; then the memory of both.
    async fn first_list(&mut self) -> anyhow::Result<()> {
        let (devices, held) = self.plan.first_list;
        let (shown, shown_held) = (number(devices as f64), number(held as f64));
        progress(&format!(
            "first list of {shown} devices with {shown_held} pods held"
        ));
        let mut devlet = self.devlet(held, devices).await?;
        let (mut theirs, mut ours) = (Samples::default(), Samples::default());
        let mut memory = None;
        for round in 1..=self.plan.rounds.min(3) {
            progress(&format!("  round {round} of {}", self.plan.rounds.min(3)));
            kubelet::clear()?;
            self.kubelet.write_checkpoint(RESOURCE, held).await?;
            let (mut kubelet, _) = self.kubelet.start(RESOURCE, held).await?;
            let handed_over = self.offer(kubelet::directory(), devices).await?;
            theirs.add(since(handed_over, kubelet.capacity(devices).await?));
            kubelet.admit(20).await?;
            settled(kubelet.pid()).await;
            for _ in 0..3 {
                devlet.crash().await?;
                let plugins = devlet.plugins();
                let handed_over = self.offer(&plugins, devices).await?;
                ours.add(since(handed_over, devlet.capacity(devices).await?));
            }
            devlet.admit(20).await?;
            memory = Some((resident_mib(devlet.pid())?, resident_mib(kubelet.pid())?));
            kubelet.kill().await?;
        }
        self.rows.push(Row::medians(
            format!("first list of {shown} devices, {shown_held} held"),
            ours.summary(),
            KUBELET,
            theirs.summary(),
            self.plan.bar(Bar::AtLeast(500.0)),
        ));
        let (our_memory, their_memory) = memory.context("no memory was measured")?;
        self.rows.push(Row::new(
            format!("resident memory, {shown} devices, {shown_held} held"),
            Unit::Mebibytes,
            our_memory,
            KUBELET,
            their_memory,
            self.plan.bar(Bar::AtMost(0.25)),
        ));
        Ok(())
    }

    /// Measures from a large list until the capacity shows it, and until a bare client has received it.
    async fn large_list(&mut self) -> anyhow::Result<()> {
        let count = self.plan.large_list;
        let shown = number(count as f64);
        progress(&format!("list of {shown} devices"));
        let root = self.fresh("devlet");
        let devlet = self.devlet.start(&root, RESOURCE).await?;
        offer(&mut self.plugin, &devlet.plugins(), "large.sock", count, true).await?;
        devlet.capacity(count).await?;
        let bare = self.fresh("bare-list");
        std::fs::create_dir_all(&bare)?;
        offer(&mut self.plugin, &bare, "large.sock", count, false).await?;
        let mut watch = bare::Watch::new(&bare.join("large.sock")).await?;
        watch.has(count).await?;
        let (mut theirs, mut ours) = (Samples::default(), Samples::default());
        for round in 1..=self.plan.rounds * 4 {
            let next = count - round % 2;
            let handed_over = list(&mut self.plugin, &bare, "large.sock", next).await?;
            theirs.add(since(handed_over, watch.has(next).await?));
            settled(devlet.pid()).await;
            let handed_over = list(&mut self.plugin, &devlet.plugins(), "large.sock", next).await?;
            ours.add(since(handed_over, devlet.capacity(next).await?));
            settled(devlet.pid()).await;
        }
        self.rows.push(Row::medians(
            format!("list of {shown} devices until capacity shows it"),
            ours.summary(),
            "a bare client",
            theirs.summary(),
            Some(Bar::AtMost(2.0)),
        ));
        Ok(())
    }
}

async fn offer(
    plugin: &mut Process,
    directory: &Path,
    socket: &str,
    count: usize,
    register: bool,
) -> anyhow::Result<u64> {
    let command = plugin::Command::Offer {
        directory: directory.to_owned(),
        socket: socket.to_owned(),
        resource: RESOURCE.to_owned(),
        count,
        register,
        pre_start: false,
    };
    plugin::ask(plugin, &command).await
}

async fn list(plugin: &mut Process, directory: &Path, socket: &str, count: usize) -> anyhow::Result<u64> {
    let command = plugin::Command::List {
        directory: directory.to_owned(),
        socket: socket.to_owned(),
        count,
    };
    plugin::ask(plugin, &command).await
}
