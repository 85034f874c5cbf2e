//! `devlet serve`: the daemon.
//!
//! ```text
//!   settings ──► log ──► Agent ──► API ──► HTTP ──► samples ──► banner, READY=1
//!                                                                    │ SIGTERM, SIGINT
//!                        exit 0 ◄── Agent stopped ◄── STOPPING=1 ◄───┘
//! ```
//!
//! Everything starts before anything is said, so that who reads the banner, or is told by systemd, finds it all
//! there. A second signal does not wait for a clean stop.

mod banner;
mod descriptors;
mod http;
mod log;
pub(crate) mod sample;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use devlet_agent::agent::{Agent, StartError};
use devlet_agent::grpc::uds::ListenError;
use devlet_agent::host;
use devlet_agent::store::StopError;
use devlet_client::locate;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{LogFormat, Settings};
use crate::{Outcome, output};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where plugins look for devlet and it keeps its state [default: /var/lib/kubelet for root, otherwise devlet
    /// below the user's state directory]
    #[arg(long, value_name = "DIR")]
    root_dir: Option<PathBuf>,
    /// A configuration file; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve /healthz, /readyz and /metrics there, such as 127.0.0.1:7350
    #[arg(long, value_name = "ADDR")]
    http: Option<SocketAddr>,
    /// Bring a sample device plugin and a sample DRA driver; without --root-dir in a fresh directory, so that no root is needed
    #[arg(long)]
    sample: bool,
    /// How to log, on standard error
    #[arg(long, value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// How much to log: error, warn, info, debug or trace; or by module, such as info,devlet_agent=debug
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

/// Where the node lives.
struct Root {
    path: PathBuf,
    /// Removed at the end.
    fresh: Option<TempDir>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut settings = match &args.config {
        Some(path) => Settings::read(path)?,
        None => Settings::default(),
    };
    settings.root_dir = args.root_dir.or(settings.root_dir);
    settings.http = args.http.or(settings.http);
    settings.log = args.log.unwrap_or(settings.log);
    settings.log_level = args.log_level.or(settings.log_level);
    log::start(&settings, args.sample)?;
    let files = descriptors::raise();
    let root = root(settings.root_dir.as_deref(), args.sample)?;
    // More than one: whoever waits for the disk keeps a thread.
    let threads = std::thread::available_parallelism().map_or(2, |count| count.get().max(2));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("cannot start")?;
    let served = runtime.block_on(serve(&settings, &root, args.sample, files));
    // Whoever still waits for a disk that hangs is not waited for.
    runtime.shutdown_background();
    served?;
    if let Some(fresh) = root.fresh {
        let path = fresh.path().to_owned();
        fresh
            .close()
            .with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(Outcome::Fine)
}

async fn serve(settings: &Settings, root: &Root, sample: bool, files: usize) -> anyhow::Result<()> {
    // Before anything else: a signal that comes early must not cut the start in two.
    let mut signals = Signals::new().context("cannot wait for signals")?;
    let web = match settings.http {
        Some(address) => Some(listen(address).await?),
        None => None,
    };
    let mut config = settings.node(root.path.clone());
    descriptors::fit(&mut config.limits, files);
    let (agent, report) = Agent::start(config).await.map_err(|error| explained(&error))?;
    if let Err(error) = host::serve(&agent, &report) {
        // Nothing has been answered yet.
        let _ = stop(&agent).await;
        return Err(error).context("devlet's own API cannot be served");
    }
    let address = match web {
        Some(listener) => {
            let address = listener.local_addr().ok();
            agent.spawn(http::serve(listener, agent.clone()));
            address
        }
        None => None,
    };
    let samples = match sample {
        true => match sample::start(&agent, &root.path).await {
            Ok(samples) => Some(samples),
            Err(error) => {
                let _ = stop(&agent).await;
                return Err(error);
            }
        },
        false => None,
    };
    // Nobody may be there to read it, which is no reason to stop.
    let _ = output::out(&banner::text(&agent, address, sample, root.fresh.is_some()));
    log::opened(&report, &root.path);
    notify(&[sd_notify::NotifyState::Ready]);

    let reason = signals.next().await;
    notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!(signal = reason, "stopping");
    let stopped = tokio::select! {
        stopped = stop(&agent) => stopped,
        reason = signals.another() => {
            tracing::warn!(signal = reason, "stopped before everything was done");
            Ok(())
        }
    };
    if let Some(samples) = samples {
        samples.stop().await;
    }
    stopped
}

/// An error if what was answered is not where the next start looks for it.
async fn stop(agent: &Agent) -> anyhow::Result<()> {
    match agent.stop().await {
        Ok(()) => tracing::info!("stopped"),
        Err(error @ (StopError::Mirror(_) | StopError::Stopped)) => {
            tracing::error!(error = %output::chain(&error), "stopped; what was answered is on disk");
        }
        Err(error @ (StopError::Unplaced { .. } | StopError::Lost { .. })) => {
            return Err(error).context("stopped without a database");
        }
    }
    Ok(())
}

fn root(named: Option<&Path>, sample: bool) -> anyhow::Result<Root> {
    if let Some(path) = named {
        let path = std::path::absolute(path).context("--root-dir")?;
        return Ok(Root { path, fresh: None });
    }
    if sample {
        // Short, for the sockets below it: a path that is dialled has at most 107 bytes.
        let fresh = tempfile::Builder::new()
            .prefix("devlet-")
            .tempdir()
            .context("no directory for the sample")?;
        return Ok(Root {
            path: fresh.path().to_owned(),
            fresh: Some(fresh),
        });
    }
    let path = match is_root() {
        true => Some(PathBuf::from(locate::SYSTEM_ROOT)),
        false => locate::user_root(),
    };
    let path = path.context("there is no home directory: say --root-dir DIR")?;
    Ok(Root { path, fresh: None })
}

fn is_root() -> bool {
    // The configuration of a node knows who it runs as.
    devlet_agent::config::Config::new("").access.own_uid == 0
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "health and metrics are served to other machines, without encryption");
    }
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))
}

/// The error of a start, and what the one in the way is called.
fn explained(error: &StartError) -> anyhow::Error {
    let in_the_way = match error {
        StartError::Listen(ListenError::InUse { peer: Some(peer), .. }) => peer.pid,
        _ => None,
    };
    let name = in_the_way.and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    match name {
        Some(name) => anyhow::anyhow!("{} (it is called {:?})", output::chain(error), name.trim_end()),
        None => anyhow::anyhow!(output::chain(error)),
    }
}

/// Tells systemd, if it wants to know.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Another signal that is meant as one: `timeout` and others send each of them twice.
    async fn another(&mut self) -> &'static str {
        let first = Instant::now();
        loop {
            let signal = self.next().await;
            if first.elapsed() > Duration::from_secs(1) {
                return signal;
            }
        }
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// `devlet sample-plugin`, for `serve --sample`.
pub(crate) fn run_sample(args: &sample::Args) -> anyhow::Result<Outcome> {
    run_process(sample::run(args))
}

/// `devlet sample-driver`, for `serve --sample`.
pub(crate) fn run_sample_driver(args: &sample::Args) -> anyhow::Result<Outcome> {
    run_process(sample::driver::run(args))
}

fn run_process(process: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start")?;
    runtime.block_on(process)?;
    // A thread still reads standard input, which never ends in a terminal.
    runtime.shutdown_background();
    Ok(Outcome::Fine)
}
