//! Load of the machine by other processes.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

/// Maximum share of the processors' time used by other processes; above it, the run is inconclusive.
pub(crate) const MOST_OTHER_LOAD: f64 = 0.10;
/// Maximum spread of bare round trips with a sync between rounds; above it, the run is inconclusive.
pub(crate) const MOST_SPREAD: f64 = 1.5;

/// Processor time, in ticks.
#[derive(Debug, Clone, Copy, Default)]
struct Ticks {
    all: u64,
    busy: u64,
    ours: u64,
}

/// Measures the load of the processors during a run.
#[derive(Debug)]
pub(crate) struct Watch {
    began: Ticks,
    live: BTreeSet<u32>,
}

/// Noise of a run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Noise {
    /// Share of all processors' time used by other processes, the kernel, and the hypervisor.
    pub(crate) other_load: f64,
    /// Of the medians of bare round trips with a sync, per round: the last decile divided by the first. So a single
    /// slow round does not invalidate the run.
    pub(crate) spread: f64,
    /// The largest median divided by the smallest.
    pub(crate) extremes: f64,
    pub(crate) bare_medians_ms: Vec<f64>,
}

impl Noise {
    pub(crate) fn new(other_load: f64, bare_medians_ms: Vec<f64>) -> Self {
        let mut sorted = bare_medians_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = |place: usize| sorted.get(place).copied().unwrap_or(f64::NAN);
        Self {
            other_load,
            spread: at(last - last / 10) / at(last / 10),
            extremes: at(last) / at(0),
            bare_medians_ms,
        }
    }

    pub(crate) fn too_busy(&self) -> Option<String> {
        if self.other_load > MOST_OTHER_LOAD {
            return Some(format!(
                "other processes took {:.0} % of the processors; at most {:.0} % is quiet enough",
                self.other_load * 100.0,
                MOST_OTHER_LOAD * 100.0
            ));
        }
        if self.spread.is_nan() || self.spread > MOST_SPREAD {
            return Some(format!(
                "bare round trips with a sync took {:.1} times as long in a tenth of the rounds as in another; at most \
                 {MOST_SPREAD} is steady enough",
                self.spread
            ));
        }
        None
    }
}

impl Watch {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut watch = Self {
            began: Ticks::default(),
            live: BTreeSet::new(),
        };
        watch.began = watch.ticks()?;
        Ok(watch)
    }

    /// Returns the share of the processors that others have used so far.
    pub(crate) fn other_load(&mut self) -> anyhow::Result<f64> {
        let now = self.ticks()?;
        let busy = now.busy.saturating_sub(self.began.busy);
        let ours = now.ours.saturating_sub(self.began.ours);
        let all = now.all.saturating_sub(self.began.all).max(1);
        Ok(busy.saturating_sub(ours) as f64 / all as f64)
    }

    fn ticks(&mut self) -> anyhow::Result<Ticks> {
        let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        let line = stat.lines().next().unwrap_or_default();
        let (all, busy) = machine(line);
        let me = std::process::id();
        self.live = children(me);
        // Our exited processes are counted for the process that waited for them.
        let mut ours = own(me, true);
        for &pid in &self.live {
            ours += own(pid, true);
        }
        Ok(Ticks { all, busy, ours })
    }
}

/// Returns all ticks of the processors, and those that were not idle.
fn machine(line: &str) -> (u64, u64) {
    // user nice system idle iowait irq softirq steal; guest time is part of the first two.
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|field| field.parse().ok())
        .collect();
    let all: u64 = fields.iter().sum();
    let idle: u64 = fields.iter().skip(3).take(2).sum();
    (all, all - idle)
}

fn children(pid: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return found;
    };
    for task in tasks.flatten() {
        let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    found
}

/// Returns the ticks of a process, and optionally of its exited children.
fn own(pid: u32, with_ended: bool) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is a name, which may contain any character.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let times = rest
        .split_whitespace()
        .skip(11)
        .take(if with_ended { 4 } else { 2 });
    times.filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// Waits until a process is idle, so that its remaining work is not measured as another's.
pub(crate) async fn settled(pid: Option<u32>) {
    let Some(pid) = pid else { return };
    let mut before = own(pid, false);
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(40)).await;
        let now = own(pid, false);
        if now == before {
            return;
        }
        before = now;
    }
}

/// Returns the resident memory of a process.
pub(crate) fn resident_mib(pid: Option<u32>) -> anyhow::Result<f64> {
    let pid = pid.context("the process has ended")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.context("no VmRSS")? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_idle_and_stolen_time_is_not() {
        assert_eq!(machine("cpu  10 0 5 100 20 1 2 3 0 0"), (141, 21));
    }

    #[test]
    fn a_busy_machine_is_reported() {
        let noise = |other_load, slowest| Noise::new(other_load, vec![1.0, slowest]);
        assert_eq!(noise(0.02, 1.2).too_busy(), None);
        assert!(noise(0.5, 1.2).too_busy().is_some_and(|why| why.contains("50 %")));
        assert!(
            noise(0.02, 3.0)
                .too_busy()
                .is_some_and(|why| why.contains("3.0 times"))
        );
        assert!(noise(0.02, f64::NAN).too_busy().is_some());
        assert!(Noise::new(0.02, Vec::new()).too_busy().is_some());
    }

    #[test]
    fn one_slow_round_of_many_is_reported_and_tolerated_and_a_tenth_of_them_is_not() {
        let rounds = |slow: usize| Noise::new(0.02, [vec![1.0; 20], vec![3.0; slow]].concat());
        let noise = rounds(1);
        assert_eq!((noise.spread, noise.extremes), (1.0, 3.0));
        assert_eq!(noise.too_busy(), None);
        assert!(rounds(3).too_busy().is_some());
    }

    #[test]
    fn a_process_has_memory() {
        assert!(resident_mib(Some(std::process::id())).is_ok_and(|mib| mib > 0.1));
    }
}
