//! `devlet shield`: devlet beside a kubelet, and the hook that container runtimes run.

mod check;
mod hook;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use devlet_client::locate;
use devlet_client::shield_v1 as v1;
use devlet_client::shield_v1::shield_client::ShieldClient;
use devlet_uds::PeerConnection;
use tokio::time::Instant;

use crate::Outcome;
use crate::output::{self, escape_control};

pub(crate) use hook::{Args as HookArgs, run as run_hook};

/// Time for a running devlet to answer.
const ANSWER_TIME: Duration = Duration::from_secs(30);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Tell whether this node can use `devlet serve --shield`
    #[command(after_help = "Examples:\n  devlet shield check\n  \
        devlet shield check --runtime-endpoint /run/containerd/containerd.sock\n\n\
        Changes nothing, and needs no running devlet. Exit codes: 0 it can, 1 it cannot, 2 wrong usage.")]
    Check(check::Args),
    /// Show the leases, and the kubelet and the runtime beside devlet
    #[command(after_help = "Examples:\n  devlet shield leases\n\n\
        Exit codes: 0 printed, 1 refused, 2 devlet cannot be reached.")]
    Leases(ConnectArgs),
    /// Take over the devices that the kubelet has given to running containers
    #[command(after_help = "Examples:\n  devlet shield adopt\n\n\
        Run it before the plugins are pointed at devlet's directory. No container is restarted. Exit codes: 0 adopted, 1 \
        refused, for example because the kubelet's checkpoint is damaged, 2 devlet cannot be reached.")]
    Adopt(ConnectArgs),
    /// Hand the devices back to the kubelet
    #[command(after_help = "Examples:\n  devlet shield leave\n\n\
        Containers that run keep their devices, and can be started again without devlet. Point the plugins at the kubelet's \
        directory again right after it, then stop devlet. Exit codes: 0 handed back, 1 refused, for example because a \
        container waits for its plugin, 2 devlet cannot be reached.")]
    Leave(ConnectArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConnectArgs {
    /// Root directory of the devlet to connect to [default: $DEVLET_ROOT, or else /var/lib/devlet]
    #[arg(long, value_name = "DIR")]
    root_dir: Option<PathBuf>,
}

pub(crate) fn run(command: Command) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start")?.block_on(async {
        match command {
            Command::Check(args) => check::run(&args).await,
            Command::Leases(args) => leases(&args).await,
            Command::Adopt(args) => adopt(&args).await,
            Command::Leave(args) => leave(&args).await,
        }
    })
}

/// Connects to a running devlet.
async fn connect(socket: &Path, deadline: Instant) -> anyhow::Result<PeerConnection> {
    let dialed = devlet_uds::connect(socket, deadline).await;
    dialed.with_context(|| format!("devlet is not running: {}", socket.display()))
}

impl ConnectArgs {
    fn socket(&self) -> PathBuf {
        let root = self.root_dir.clone().or_else(locate::named_root);
        locate::socket(&root.unwrap_or_else(|| locate::SHIELD_ROOT.into()))
    }
}

/// Prints the refusal of a call.
fn refused(status: &devlet_client::Status) -> Outcome {
    output::warn(&format!("error: {}", escape_control(status.message())));
    Outcome::Bad
}

async fn adopt(args: &ConnectArgs) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + ANSWER_TIME;
    let dialed = connect(&args.socket(), deadline).await?;
    let mut client = ShieldClient::new(dialed.channel.clone());
    let answer = match client.adopt(v1::AdoptRequest {}).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return Ok(refused(&status)),
    };
    output::out(&format!(
        "{} of the kubelet known, {} with devices from before devlet\n",
        output::count(
            usize::try_from(answer.containers).unwrap_or_default(),
            "container"
        ),
        answer.direct
    ))?;
    Ok(Outcome::Fine)
}

async fn leave(args: &ConnectArgs) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + ANSWER_TIME;
    let dialed = connect(&args.socket(), deadline).await?;
    let mut client = ShieldClient::new(dialed.channel.clone());
    let answer = match client.leave(v1::LeaveRequest {}).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return Ok(refused(&status)),
    };
    output::out(&format!(
        "{} handed back; CDI specs that containers need: {}\n\
         Now point the plugins at the kubelet's directory, then stop devlet.\n",
        output::count(usize::try_from(answer.leases).unwrap_or_default(), "lease"),
        escape_control(&answer.directory)
    ))?;
    Ok(Outcome::Fine)
}

async fn leases(args: &ConnectArgs) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + ANSWER_TIME;
    let dialed = connect(&args.socket(), deadline).await?;
    let client = ShieldClient::new(dialed.channel.clone());
    let mut client = client.max_decoding_message_size(devlet_client::MAX_MESSAGE_BYTES);
    let state = match client.state(v1::StateRequest {}).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return Ok(refused(&status)),
    };
    let or = |text: &str, other: &str| match text {
        "" => other.to_owned(),
        text => escape_control(text).into_owned(),
    };
    let kubelet = match state.kubelet_running {
        true => format!(
            "pid {}, {}",
            state.kubelet_pid,
            or(&state.kubelet_version, "version unknown")
        ),
        false => "not running".to_owned(),
    };
    let cdi = match state.fitness() {
        v1::RuntimeFitness::Ready => "CDI is on".to_owned(),
        v1::RuntimeFitness::Unfit | v1::RuntimeFitness::Unknown => or(&state.runtime_problem, "unknown"),
    };
    output::out(&format!(
        "Kubelet:  {kubelet} ({})\nRuntime:  {}: {cdi}\n\n",
        escape_control(&state.kubelet_dir),
        or(&state.runtime, "unknown"),
    ))?;
    let rows = state.leases.iter().map(|lease| {
        [
            escape_control(&lease.name).into_owned(),
            escape_control(&lease.resource).into_owned(),
            escape_control(&lease.devices.join(",")).into_owned(),
            lease.phase.clone(),
            match lease.pod_name.as_str() {
                "" => or(&lease.pod_uid, "-"),
                name => escape_control(&format!("{}/{name}", lease.pod_namespace)).into_owned(),
            },
            or(&lease.container, "-"),
            match lease.unwitnessed {
                true => "?".to_owned(),
                false => lease.running.len().to_string(),
            },
        ]
    });
    let header = [
        "LEASE",
        "RESOURCE",
        "DEVICES",
        "PHASE",
        "POD",
        "CONTAINER",
        "RUNNING",
    ];
    output::out(&output::table(header, rows))?;
    Ok(Outcome::Fine)
}
