//! `devlet lease-hook`: the OCI hook in the CDI spec of a lease.
//!
//! The start of a container waits for devlet, and fails without it: only devlet knows whether another container
//! still has its devices. Its end is only reported, because devlet also finds out by itself.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use devlet_client::shield_v1 as v1;
use devlet_client::shield_v1::shield_client::ShieldClient;
use serde::Deserialize;
use tokio::time::Instant;

use super::connect;
use crate::Outcome;
use crate::output;

/// Time for devlet to answer. It may be starting.
const ANSWER_TIME: Duration = Duration::from_secs(3);

/// The longest state that a runtime passes.
const MAX_STATE: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Socket of devlet's API
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
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
    let Args { socket, event, lease } = args;
    let deadline = Instant::now() + ANSWER_TIME;
    let reporting = async {
        let dialed = connect(&socket, deadline).await?;
        let mut client = ShieldClient::new(dialed.channel.clone());
        let container = state.id;
        let answered = match event {
            Event::Start => {
                let pid = state.pid;
                let request = v1::ContainerStartingRequest {
                    lease,
                    container,
                    pid,
                };
                client.container_starting(request).await.map(drop)
            }
            Event::Stop => {
                let request = v1::ContainerEndedRequest { lease, container };
                client.container_ended(request).await.map(drop)
            }
        };
        answered.map_err(|status| anyhow::anyhow!("devlet: {}", status.message()))
    };
    let reported = tokio::time::timeout_at(deadline, reporting).await;
    reported.unwrap_or_else(|_| Err(anyhow::anyhow!("devlet did not answer within {ANSWER_TIME:?}")))
}
