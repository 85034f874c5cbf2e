//! `devlet lease-hook`: the OCI hook in the CDI spec of a lease.
//!
//! The start of a container waits for devlet, also while it is restarted, and for the end of an earlier container with its
//! devices. It fails without devlet's word: only devlet knows whether another container still has its devices. A failure is
//! final for a pod with `restartPolicy: Never`, so the hook waits for as long as runtimes and kubelets allow. The end of a
//! container is only reported, because devlet also finds out by itself.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use devlet_agent::lease::process;
use devlet_client::shield_v1 as v1;
use devlet_client::shield_v1::shield_client::ShieldClient;
use devlet_client::{Code, Status};
use serde::Deserialize;
use tokio::time::Instant;

use super::connect;
use crate::Outcome;
use crate::output;

/// Time to report the end of a container.
const STOP_TIME: Duration = Duration::from_secs(3);

/// Time for devlet to answer after its own wait.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Pause before a devlet that went away is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The longest state that a runtime passes.
const MAX_STATE: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Socket of devlet's API
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// Seconds to wait before a start is refused
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u64,
    /// The event
    event: Event,
    /// The lease
    lease: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Event {
    Start,
    Stop,
}

/// The state of a container, which an OCI runtime passes to its hooks.
#[derive(Debug, Deserialize)]
struct State {
    id: String,
    #[serde(default)]
    pid: u32,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut text = String::new();
    let read = std::io::stdin().take(MAX_STATE).read_to_string(&mut text);
    read.context("cannot read the state of the container")?;
    let state: State = serde_json::from_str(&text).context("the state of the container is invalid")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let event = args.event;
    let reported = runtime.context("cannot start")?.block_on(report(args, state));
    match (event, reported) {
        (_, Ok(())) => Ok(Outcome::Fine),
        (Event::Start, Err(error)) => Err(error),
        // The container has ended in any case.
        (Event::Stop, Err(error)) => {
            output::print_error(&error);
            Ok(Outcome::Fine)
        }
    }
}

async fn report(args: Args, state: State) -> anyhow::Result<()> {
    match args.event {
        Event::Start => start(args, state).await,
        Event::Stop => {
            let deadline = Instant::now() + STOP_TIME;
            let request = v1::ContainerEndedRequest {
                lease: args.lease,
                container: state.id,
            };
            let reporting = async {
                let dialed = connect(&args.socket, deadline).await?;
                let ended = ShieldClient::new(dialed.channel.clone())
                    .container_ended(request)
                    .await;
                ended.map(drop).map_err(|status| refusal(&status))
            };
            let reported = tokio::time::timeout_at(deadline, reporting).await;
            reported.unwrap_or_else(|_| Err(anyhow::anyhow!("devlet did not answer within {STOP_TIME:?}")))
        }
    }
}

/// Waits until the container may start.
async fn start(args: Args, state: State) -> anyhow::Result<()> {
    let process = process::find(state.pid);
    let process =
        process.with_context(|| format!("process {} of the container is not visible", state.pid))?;
    let until = Instant::now() + Duration::from_secs(args.wait);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let request = v1::ContainerStartingRequest {
            lease: args.lease.clone(),
            container: state.id.clone(),
            pid: process.pid,
            started: process.started,
            wait_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        };
        let asking = async {
            let dialed = connect(&args.socket, until.max(Instant::now() + RETRY_PAUSE)).await?;
            let answered = ShieldClient::new(dialed.channel.clone())
                .container_starting(request)
                .await;
            Ok::<_, anyhow::Error>(answered)
        };
        let asked = tokio::time::timeout(left + ANSWER_TIME, asking).await;
        match asked.with_context(|| format!("devlet did not answer within {:?}", left + ANSWER_TIME))?? {
            Ok(_) => return Ok(()),
            // It stops, was killed, or cannot write for now.
            Err(status) if may_come_back(&status) && Instant::now() < until => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Err(status) => return Err(refusal(&status)),
        }
    }
}

fn may_come_back(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::Unknown)
}

fn refusal(status: &Status) -> anyhow::Error {
    anyhow::anyhow!("devlet: {}", status.message())
}
