//! Measures devlet and the kubelet's own managers side by side. See `bench/README.md`; `bench/run` runs it.

mod bare;
mod cases;
mod chart;
mod claims;
mod clock;
mod cluster;
mod devlet;
mod driver;
mod embedded;
mod kubelet;
mod noise;
mod plugin;
mod process;
mod report;
mod shield;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};

use cases::{Bench, Plan};
use noise::Noise;
use report::Report;

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure. Exit codes: 0 every bar is met, 1 a bar is missed, 2 the measurement failed, 3 the machine is too
    /// busy for a conclusion
    Compare(Compare),
    /// Run the device plugin of both sides
    Plugin,
    /// Run devlet's agent as a library
    Agent {
        /// Root directory of the node
        #[arg(long)]
        root: PathBuf,
        /// Resource of its pods
        #[arg(long)]
        resource: String,
    },
}

#[derive(Debug, clap::Args)]
struct Compare {
    /// Path of the built program of `bench/kubelet`
    #[arg(long)]
    kubelet: PathBuf,
    /// Release that it was built from
    #[arg(long)]
    kubelet_version: String,
    /// Path of the built devlet
    #[arg(long)]
    devlet: PathBuf,
    /// Working directory; all durable files are below it
    #[arg(long)]
    work: PathBuf,
    /// Output directory of `table.md`, `results.json` and `chart.svg`
    #[arg(long)]
    out: PathBuf,
    /// Times of admissions from an API server, as `interop/kubernetes/run --latency` writes them
    #[arg(long)]
    latency: PathBuf,
    /// Use fewer pods and rounds, for one or two minutes: for experiments, not for conclusions
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Do as little as possible, to check that everything works
    #[arg(long)]
    smoke: bool,
    /// Document to write the table into, if the run is conclusive
    #[arg(long)]
    publish: Option<PathBuf>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> anyhow::Result<u8> {
    let runtime = match command {
        // As many as `devlet serve` has.
        Command::Agent { .. } => tokio::runtime::Builder::new_multi_thread()
            .worker_threads(std::thread::available_parallelism().map_or(2, |count| count.get().max(2)))
            .enable_all()
            .build()?,
        // One thread each for the caller and the plugin, on both sides: wakeups of other threads in them are not to
        // be measured.
        Command::Compare(_) | Command::Plugin => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?,
    };
    match command {
        Command::Agent { root, resource } => runtime.block_on(embedded::run(root, &resource)).map(|()| 0),
        Command::Plugin => runtime.block_on(plugin::run()).map(|()| 0),
        Command::Compare(args) => runtime.block_on(compare(&args)),
    }
}

async fn compare(args: &Compare) -> anyhow::Result<u8> {
    let plan = match args {
        Compare { quick: true, .. } => Plan::quick(),
        Compare { smoke: true, .. } => Plan::smoke(),
        _ => Plan::full(),
    };
    let (mode, judged) = (plan.mode, plan.judged);
    std::fs::create_dir_all(&args.out)?;
    let log = |name: &str| args.work.join(name);
    let kubelet = kubelet::Program {
        path: args.kubelet.clone(),
        log: log("kubelet.log"),
    };
    let devlet = devlet::Program {
        path: args.devlet.clone(),
        log: log("devlet.log"),
    };
    let began = Instant::now();
    let mut watch = noise::Watch::start()?;
    let bench = Bench::new(plan, &args.work, kubelet, devlet).await?;
    let mut outcome = bench.run().await?;
    outcome.rows.extend(cluster::rows(&args.latency)?);
    let noise = Noise::new(watch.other_load()?, outcome.bare_medians);
    let inconclusive = noise
        .too_busy()
        .map(|why| format!("the machine is too busy: {why}"))
        .or_else(|| (!judged).then(|| format!("this was a {mode} run")));
    let report = Report {
        devlet: version(&args.devlet)?,
        kubelet: args.kubelet_version.clone(),
        machine: machine(&args.work),
        mode,
        took_seconds: began.elapsed().as_secs(),
        noise,
        inconclusive,
        rows: outcome.rows,
    };
    let table = report.table();
    std::fs::write(args.out.join("table.md"), &table)?;
    std::fs::write(
        args.out.join("results.json"),
        serde_json::to_string_pretty(&report)? + "\n",
    )?;
    let chart = chart::svg(&report);
    std::fs::write(args.out.join("chart.svg"), &chart)?;
    println!("{table}");
    println!(
        "Also in {}: table.md, results.json, chart.svg.",
        args.out.display()
    );
    if report.noise.too_busy().is_some() && mode != "smoke" {
        return Ok(3);
    }
    if let (Some(document), None) = (&args.publish, &report.inconclusive) {
        publish(document, &table)?;
        std::fs::write(document.with_extension("svg"), &chart)?;
    }
    Ok(u8::from(judged && report.missed() > 0))
}

fn version(devlet: &Path) -> anyhow::Result<String> {
    let output = std::process::Command::new(devlet).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", devlet.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn machine(work: &Path) -> String {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let stat = std::process::Command::new("findmnt")
        .args(["-n", "-o", "FSTYPE", "-T"])
        .arg(work)
        .output();
    let files = stat.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    );
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{processors} processors, Linux {}, {files}", kernel.trim())
}

const BEGIN: &str = "<!-- bench/run --publish writes from here -->";
const END: &str = "<!-- to here -->";

/// Replaces the table in a document.
fn publish(document: &Path, table: &str) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(document).with_context(|| format!("cannot read {}", document.display()))?;
    std::fs::write(document, replaced(&text, table)?)?;
    Ok(())
}

fn replaced(text: &str, table: &str) -> anyhow::Result<String> {
    let parts = text.split_once(BEGIN).zip(text.split_once(END));
    let Some(((before, _), (_, after))) = parts else {
        bail!("cannot find the table: it must be between {BEGIN} and {END}");
    };
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_replaces_the_previous_one() {
        let text = format!("a\n{BEGIN}\n\nold\n\n{END}\nb\n");
        let new = replaced(&text, "| new |\n").unwrap_or_default();
        assert_eq!(new, format!("a\n{BEGIN}\n\n| new |\n\n{END}\nb\n"));
        assert!(replaced("nothing", "| new |").is_err());
    }
}
