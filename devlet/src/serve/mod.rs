//! `devlet serve`: the daemon.
//!
//! ```text
//!   settings ──► log ──► Agent ──► API ──► HTTP ──► helpers ──► banner, READY=1
//!                                                                    │ SIGTERM, SIGINT, SIGHUP
//!                        exit 0 ◄── Agent stopped ◄── STOPPING=1 ◄───┘
//! ```
//!
//! The banner and READY=1 come last, when everything has started. A second signal ends the process without waiting for
//! a clean stop.

mod banner;
mod cluster;
mod descriptors;
mod helper;
pub(crate) mod host_devices;
mod http;
mod log;
pub(crate) mod sample;

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use devlet_agent::agent::{Agent, StartError};
use devlet_agent::api;
use devlet_agent::config::Config;
use devlet_agent::store::{OpenReport, StopError};
use devlet_client::locate;
use devlet_uds::ListenError;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{HttpAddress, LogFormat, LogLevel, Settings};
use crate::{Outcome, output};
use cluster::ClusterArgs;
use helper::Helpers;
use log::LogWriter;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory of the plugin sockets and of the state [default: $DEVLET_ROOT, or else rootDir of the configuration
    /// file, or else /var/lib/kubelet for root and devlet below the user's state directory for others]
    #[arg(long, value_name = "DIR")]
    root_dir: Option<PathBuf>,
    /// Configuration file; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stand between the kubelet of this node and device plugins; see docs/shield.md
    #[arg(long)]
    shield: bool,
    /// Root directory of the kubelet, for --shield [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    kubelet_dir: Option<PathBuf>,
    /// Socket of the container runtime, for --shield [default: that of containerd or CRI-O]
    #[arg(long, value_name = "SOCKET")]
    runtime_endpoint: Option<PathBuf>,
    /// Serve /healthz, /readyz and /metrics at this address, such as localhost:7359, or :7359 for all interfaces
    #[arg(long, value_name = "ADDR")]
    http: Option<HttpAddress>,
    /// Start a sample device plugin and a sample DRA driver too; without a root directory, in a temporary one
    #[arg(long)]
    sample: bool,
    /// Format of the log on standard error
    #[arg(long, value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace or off; or by module, such as info,devlet_agent=debug
    #[arg(long, value_name = "LEVEL", add = LogLevel::candidates())]
    log_level: Option<LogLevel>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Maximum time to print the banner: standard output may be a full pipe.
const BANNER_TIMEOUT: Duration = Duration::from_secs(1);

/// Time after which a start is reported as slow.
const SLOW_START: Duration = Duration::from_secs(3);

/// Maximum time for a start to complete after a signal.
const START_GRACE: Duration = Duration::from_secs(5);

/// The root directory of the node.
struct Root {
    path: PathBuf,
    /// The directory to remove at the end, if it is temporary.
    fresh: Option<TempDir>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut settings = match &args.config {
        Some(path) => Settings::read(path)?,
        None => Settings::default(),
    };
    settings.root_dir = args.root_dir.or_else(locate::named_root).or(settings.root_dir);
    settings.http = args.http.or(settings.http);
    settings.log = args.log.unwrap_or(settings.log);
    settings.log_level = args.log_level.or(settings.log_level);
    args.cluster.apply(&mut settings.kubernetes);
    cluster::check(&settings.kubernetes)?;
    settings.shield.enabled |= args.shield;
    if let Some(directory) = args.kubelet_dir {
        settings.shield.kubelet_dir = directory;
    }
    settings.shield.runtime_endpoint = args.runtime_endpoint.or(settings.shield.runtime_endpoint);
    if settings.shield.enabled {
        cluster::check_without_shield(&settings.kubernetes)?;
    }
    let log = log::start(&settings, args.sample)?;
    let ended = run_logged(&settings, args.sample, &log);
    if let Err(error) = &ended {
        // Through the queue of the log: standard error may be a pipe that is full.
        log.line(format!("{}\n", output::error_line(error)).as_bytes());
    }
    log.flush();
    Ok(ended.map_or(Outcome::Failed, |()| Outcome::Fine))
}

fn run_logged(settings: &Settings, sample: bool, log: &LogWriter) -> anyhow::Result<()> {
    let files = descriptors::raise();
    let shielded = settings
        .shield
        .enabled
        .then(|| PathBuf::from(locate::SHIELD_ROOT));
    let root = root(settings.root_dir.clone().or(shielded).as_deref(), sample)?;
    settings.shield.check_root(&root.path)?;
    // More than one: a task that waits for the disk blocks its thread.
    let threads = std::thread::available_parallelism().map_or(2, |count| count.get().max(2));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("cannot start")?;
    let served = runtime.block_on(serve(settings, &root, sample, files, log));
    // Does not wait for threads that are blocked by a disk that hangs.
    runtime.shutdown_background();
    served?;
    if let Some(fresh) = root.fresh {
        let path = fresh.path().to_owned();
        fresh
            .close()
            .with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

async fn serve(
    settings: &Settings,
    root: &Root,
    sample: bool,
    files: usize,
    log: &LogWriter,
) -> anyhow::Result<()> {
    // First of all: an early signal must not interrupt the start.
    let mut signals = Signals::new().context("cannot wait for signals")?;
    host_devices::check(&settings.host_devices)?;
    let web = match &settings.http {
        Some(address) => Some(listen(address).await?),
        None => None,
    };
    let mut config = settings.node(root.path.clone());
    descriptors::fit(&mut config.limits, files, config.shield.is_some());
    let (agent, report) = start(config, &mut signals).await?;
    if let Err(error) = api::serve(&agent, &report) {
        // No request has been answered yet.
        let _ = stop(&agent).await;
        return Err(error).context("cannot serve devlet's API");
    }
    if let Err(error) = cluster::join(&agent, &settings.kubernetes).await {
        let _ = stop(&agent).await;
        return Err(error);
    }
    let address = match web {
        Some(listener) => {
            let address = listener.local_addr().ok();
            // Served until the process ends, so that the state of a slow stop can be queried.
            tokio::spawn(http::serve(listener, agent.clone(), log.clone()));
            address
        }
        None => None,
    };
    let mut helpers = Helpers::default();
    if let Err(error) = start_helpers(&mut helpers, settings, &agent, &root.path, sample).await {
        let _ = stop(&agent).await;
        return Err(error);
    }
    print_banner(banner::text(&agent, address, sample, root.fresh.is_some())).await;
    log::opened(&report, &root.path);
    notify(&[sd_notify::NotifyState::Ready]);
    tokio::spawn(feed_watchdog());

    let reason = match signals.waiting.take() {
        Some(reason) => reason,
        None => signals.next().await,
    };
    notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!(signal = reason, "stopping");
    let stopped = tokio::select! {
        stopped = stop(&agent) => stopped,
        reason = signals.another() => {
            Err(anyhow::anyhow!(
                "stopped by a second signal ({reason}): answered changes are on disk, but the kubelet's files may be out of \
                 date, so a kubelet must not take over"
            ))
        }
    };
    helpers.stop().await;
    if stopped.is_err() {
        // Closing the database would wait for a disk that may hang. The end of the process closes it instead.
        std::mem::forget(agent);
    }
    stopped
}

/// Starts the plugin of host devices and the samples, as far as they are wanted.
async fn start_helpers(
    helpers: &mut Helpers,
    settings: &Settings,
    agent: &Agent,
    root: &Path,
    sample: bool,
) -> anyhow::Result<()> {
    if !settings.host_devices.is_empty() {
        host_devices::start(helpers, agent, settings, root).await?;
    }
    if sample {
        sample::start(helpers, agent, root).await?;
    }
    Ok(())
}

/// Starts the node on its own thread, because the disk may hang. After a signal, the start gets [`START_GRACE`] to
/// complete, so that the node can be stopped cleanly.
async fn start(config: Config, signals: &mut Signals) -> anyhow::Result<(Agent, OpenReport)> {
    let root = config.root.clone();
    let runtime = tokio::runtime::Handle::current();
    let mut starting = pin!(tokio::task::spawn_blocking(move || {
        runtime.block_on(Agent::start(config))
    }));
    let warned = async {
        tokio::time::sleep(SLOW_START).await;
        tracing::warn!(root = %root.display(), "start delayed: check the disk and the kernel's log");
        std::future::pending::<()>().await;
    };
    let given_up = async {
        let reason = signals.next().await;
        signals.waiting = Some(reason);
        tracing::info!(signal = reason, "stop requested; the start completes first");
        tokio::select! {
            () = tokio::time::sleep(START_GRACE) => {}
            _ = signals.another() => {}
        }
    };
    let started = tokio::select! {
        biased;
        started = &mut starting => started.context("cannot start")?,
        () = warned => return Err(anyhow::anyhow!("cannot start")),
        () = given_up => {
            return Err(anyhow::anyhow!(
                "stopped before the start was complete: the disk below {} did not respond; check it and the kernel's log",
                root.display()
            ));
        }
    };
    started.map_err(|error| describe_start_error(&error))
}

/// Prints the banner. Gives up after [`BANNER_TIMEOUT`]: standard output may be closed, or a pipe that is full.
async fn print_banner(text: String) {
    let printed = tokio::task::spawn_blocking(move || output::out(&text));
    let _ = tokio::time::timeout(BANNER_TIMEOUT, printed).await;
}

/// Stops the node. Fails if the files that the next start, or a kubelet, reads are out of date.
async fn stop(agent: &Agent) -> anyhow::Result<()> {
    let stopped = agent.stop().await;
    match &stopped {
        Ok(()) => tracing::info!("stopped"),
        Err(error) => tracing::error!(error = %output::chain(error), "stopped with an error"),
    }
    stopped.map_err(|error| match error {
        StopError::Mirror(_) => anyhow::Error::new(error)
            .context("stopped; answered changes are on disk, but a kubelet must not take over"),
        StopError::Misplaced { .. } | StopError::Lost { .. } => {
            anyhow::Error::new(error).context("stopped without a database")
        }
        StopError::Hangs { .. } | StopError::Stopped => error.into(),
    })
}

fn root(named: Option<&Path>, sample: bool) -> anyhow::Result<Root> {
    if let Some(path) = named {
        let path = std::path::absolute(path).context("cannot make the root directory absolute")?;
        return Ok(Root { path, fresh: None });
    }
    if sample {
        // Short, because the path of a socket has at most 107 bytes.
        let fresh = tempfile::Builder::new()
            .prefix("devlet-")
            .tempdir()
            .context("cannot create a temporary root directory")?;
        return Ok(Root {
            path: fresh.path().to_owned(),
            fresh: Some(fresh),
        });
    }
    let path = match is_root() {
        true => Some(PathBuf::from(locate::SYSTEM_ROOT)),
        false => locate::user_root(),
    };
    let path = path.context("there is no home directory: set --root-dir DIR")?;
    Ok(Root { path, fresh: None })
}

fn is_root() -> bool {
    // The configuration of a node contains its user.
    Config::new("").access.own_uid == 0
}

/// Listens on the first candidate address that exists on this machine.
async fn listen(address: &HttpAddress) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address.candidates.as_slice())
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "health and metrics exposed to other machines without encryption");
    }
    Ok(listener)
}

/// Returns the error of a start, with the name of the process that uses the root directory.
fn describe_start_error(error: &StartError) -> anyhow::Error {
    let in_the_way = match error {
        StartError::Listen(ListenError::InUse { peer: Some(peer), .. }) => peer.pid,
        _ => None,
    };
    let name = in_the_way.and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    match name {
        Some(name) => anyhow::anyhow!("{} (its name is {:?})", output::chain(error), name.trim_end()),
        None => anyhow::anyhow!(output::chain(error)),
    }
}

/// Notifies the watchdog of systemd, if there is one.
async fn feed_watchdog() {
    let Some(time) = sd_notify::watchdog_enabled() else {
        return;
    };
    loop {
        notify(&[sd_notify::NotifyState::Watchdog]);
        tokio::time::sleep(time / 2).await;
    }
}

/// Notifies systemd, if `NOTIFY_SOCKET` is set.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "notification of the service manager failed");
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` if SIGHUP was ignored at the start, as `nohup` does.
    hangup: Option<Signal>,
    /// A signal that was received during the start and is not handled yet.
    waiting: Option<&'static str>,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: match ignores_hangup() {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
            waiting: None,
        })
    }

    /// Waits for another signal. Ignores immediate duplicates: `timeout` and others send each signal twice.
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
            () = received(self.hangup.as_mut()) => "SIGHUP",
        }
    }
}

async fn received(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Returns `true` if the process was started with SIGHUP ignored: bit 0 of the mask in `/proc`.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 != 0)
}

/// Runs `devlet sample-plugin`, for `serve --sample`.
pub(crate) fn run_sample(args: &sample::Args) -> anyhow::Result<Outcome> {
    run_process(sample::run(args))
}

/// Runs `devlet sample-driver`, for `serve --sample`.
pub(crate) fn run_sample_driver(args: &sample::Args) -> anyhow::Result<Outcome> {
    run_process(sample::driver::run(args))
}

/// Runs `devlet host-devices`, for `hostDevices` of the configuration.
pub(crate) fn run_host_devices(args: &host_devices::Args) -> anyhow::Result<Outcome> {
    run_process(host_devices::run(args))
}

fn run_process(process: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start")?;
    runtime.block_on(process)?;
    // A thread still reads standard input, which does not end on a terminal.
    runtime.shutdown_background();
    Ok(Outcome::Fine)
}
