//! Resource usage of the daemon before and after: as a table, as JSON and as a chart.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::common::{Daemon, http_get};
use crate::load::Tally;

/// Resource usage of the daemon at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    at: Duration,
    resident_kib: u64,
    descriptors: u64,
    tasks: u64,
    database_kib: u64,
    pods: u64,
    claims: u64,
}

pub(crate) fn sample(daemon: &Daemon, address: &str, at: Duration) -> Sample {
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
        claims: metric("devlet_claims"),
    }
}

/// Waits until no operation is in flight.
pub(crate) fn settled(daemon: &Daemon, address: &str) -> Sample {
    let mut last = sample(daemon, address, Duration::ZERO);
    for _ in 0..60 {
        std::thread::sleep(Duration::from_millis(500));
        let next = sample(daemon, address, Duration::ZERO);
        let counts = |sample: &Sample| (sample.tasks, sample.descriptors, sample.pods, sample.claims);
        if counts(&next) == counts(&last) && next.resident_kib.abs_diff(last.resident_kib) < 64 {
            return next;
        }
        last = next;
    }
    last
}

/// Title and value of a curve.
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

pub(crate) fn report(
    minutes: f64,
    before: Sample,
    after: Sample,
    samples: &[Sample],
    tally: &Tally,
    out: Option<&Path>,
) {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "\n{} admitted ({} with claims), {} removed, {} refused, {} callers left ({} of their pods came after they \
         had been removed), {} lists read, {} faults",
        get(&tally.admitted),
        get(&tally.claimed),
        get(&tally.removed),
        get(&tally.refused),
        get(&tally.left),
        get(&tally.late),
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
        ("claims", before.claims, after.claims, 0),
    ];
    println!("\n{:<24}{:>12}{:>12}{:>12}", "", "before", "most", "after");
    let most: [fn(&Sample) -> u64; 6] = [
        |s| s.resident_kib,
        |s| s.descriptors,
        |s| s.tasks,
        |s| s.database_kib,
        |s| s.pods,
        |s| s.claims,
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
                    s.pods,
                    s.claims
                ])
            })
            .collect();
        let all = json!({
            "minutes": minutes,
            "columns": ["seconds", "residentKib", "descriptors", "tasks", "databaseKib", "pods", "claims"],
            "samples": each,
            "admitted": get(&tally.admitted),
            "admittedWithClaims": get(&tally.claimed),
            "faults": get(&tally.faults),
        });
        std::fs::write(out.join("soak.json"), format!("{all:#}\n")).unwrap();
        std::fs::write(out.join("soak.svg"), chart(samples)).unwrap();
    }
    if grew {
        std::process::exit(1);
    }
}
