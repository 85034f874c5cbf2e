//! Commands that talk to a running devlet.
//!
//! One module per command, and the modules that they share: `pods`, `inventory`, `drivers` and `claims` define the
//! format of `-o json`, `progress` the line that shows what a command waits for.
//!
//! A refusal by the node is printed as the node worded it, with exit code 1. A node that cannot be reached, or that ends
//! before it answers, is exit code 2.

mod admit;
mod claims;
mod complete;
mod describe;
mod dra_device;
mod drivers;
mod get;
mod import;
mod inventory;
mod kind;
mod kubernetes;
mod listing;
mod options;
mod pods;
mod progress;
mod remove;
mod runtime;
#[cfg(test)]
mod samples;
mod select;
mod selector;
mod slices;
mod state;
mod status;
mod time;
mod version;
mod watch;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Subcommand;
use devlet_client::channel::ConnectionEnded;
use devlet_client::{Client, ConnectError, NoAnswer, Status, locate};

use crate::Outcome;
use crate::duration::Span;
use crate::output::{self, OutputArg};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the state of a running devlet, and its problems
    #[command(after_help = "Examples:\n  devlet status\n  devlet status -o json\n\n\
        Exit codes: 0 pods can be admitted, 1 they cannot, 2 devlet cannot be reached.")]
    Status {
        #[command(flatten)]
        connect: ConnectArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List resources, devices, plugins, pods, drivers, claims or slices
    #[command(
        after_help = "Examples:\n  devlet get resources\n  devlet get devices --resource acme.com/gpu -o wide\n  \
        devlet get pods -n team-a -l app=train\n  devlet get pod/job1 -o jsonpath='{.pods[*].uid}'\n  \
        devlet get pods --sort-by .admittedAt --watch\n\n\
        Short names: res, dev, pl, po, dr, cl, sl. Without --namespace, pods and claims of all namespaces are listed. \
        With --watch a table is redrawn on a terminal; elsewhere changed rows are printed, or the whole list as \
        a line of JSON or a YAML document. Exit codes: 0 listed, 1 refused, or a name does not exist, 2 wrong \
        usage, or devlet cannot be reached or did not come back within 30 seconds."
    )]
    Get(get::Args),
    /// Show the details of a resource, device, plugin, pod, driver, claim or slice
    #[command(
        after_help = "Examples:\n  devlet describe pod job1\n  devlet describe pod/job1\n  devlet describe resource acme.com/gpu\n  \
        devlet describe device acme.com/gpu/gpu-0\n  devlet describe driver gpu.acme.com\n  \
        devlet describe claim team-a/gpu\n\n\
        A pod or a claim is named by its name, namespace/name or UID; a device by its id or RESOURCE/ID. Exit codes: 0 shown, \
        1 it does not exist, 2 devlet cannot be reached."
    )]
    Describe(describe::Args),
    /// Allocate the devices that a pod requests, and prepare its claims
    #[command(after_help = "Examples:\n  devlet admit -f pod.yaml\n  \
        devlet admit -f pod.yaml -f claim.yaml\n  \
        devlet admit --name job1 --limit acme.com/gpu=2 -o json\n\n\
        A pod gets all of its devices or none, and keeps them until it is removed; admitting it again shows them. \
        Exit codes: 0 admitted, 1 refused, 2 wrong usage, an unreadable file, or devlet cannot be reached.")]
    Admit(admit::Args),
    /// Print the options that a container needs for its devices, right before it starts
    #[command(after_help = "Examples:\n  devlet options job1\n  \
        args=$(devlet options job1 --format podman) && eval \"podman run $args IMAGE\"\n  \
        devlet options job1 main --format oci --oci-spec config.json > changed.json\n\n\
        Notifies plugins that request PreStartContainer, unless --no-start is given. Arguments are quoted for a \
        shell, so use `eval` with them; with `&&`, nothing runs if they could not be printed. Exit codes: 0 printed, 1 refused, 2 wrong usage, an unreadable file, or devlet cannot \
        be reached.")]
    Options(options::Args),
    /// Remove pods, and release their devices and claims; `delete` is an alias
    #[command(
        alias = "delete",
        after_help = "Examples:\n  devlet remove job1\n  devlet remove team-a/job1 team-a/job2\n  \
        devlet remove --all -n team-a --dry-run\n  devlet remove -l app=train\n  \
        devlet remove job1 --abandon-driver gpu.acme.com\n  \
        devlet remove --claim team-a/gpus --abandon-driver gpu.acme.com\n\n\
        Stop the containers first. Exit codes: 0 removed, 1 there is no such pod (unless --ignore-not-found is given), or it \
        cannot be removed, or a driver has not unprepared its claims, 2 devlet cannot be reached."
    )]
    Remove(remove::Args),
    /// Import the pods or the claims of a kubelet's state file
    #[command(
        after_help = "Examples:\n  devlet checkpoint repair damaged --out repaired && devlet import repaired\n\n\
        Pods of the file are added, or changed to hold its devices; other pods stay. If an unreadable file blocks \
        admission, the import ends that. Exit codes: 0 imported, 1 the file is invalid or devlet refused, 2 an \
        unreadable path, or devlet cannot be reached."
    )]
    Import(import::ImportArgs),
    /// Forget an unreadable state file, or an abandoned claim
    #[command(
        after_help = "Examples:\n  devlet forget /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint.unreadable\n  \
        devlet forget --claim team-a/gpus\n\n\
        The file is the one that `devlet status` names. Devices of its pods count as free afterwards. A claim must \
        have been abandoned: `devlet remove --abandon-driver`. Exit \
        codes: 0 done, 1 devlet refused, 2 devlet cannot be reached."
    )]
    Forget(import::ForgetArgs),
    /// Print the version of this program and of a running devlet
    #[command(after_help = "Examples:\n  devlet version\n  devlet version -o json\n\n\
        Exit codes: 0 printed, also if no devlet runs, 2 wrong usage.")]
    Version(version::Args),
    /// Print the database
    #[command(subcommand)]
    State(state::Command),
}

/// The devlet to connect to, and its timeout.
#[derive(Debug, clap::Args)]
pub(crate) struct ConnectArg {
    /// Root directory of the devlet to connect to [default: $DEVLET_ROOT, or else the first of the user's state
    /// directory and /var/lib/kubelet in which one listens]
    #[arg(long, value_name = "DIR")]
    root_dir: Option<PathBuf>,
    /// Maximum time for devlet to answer; the time of --wait is added
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10s",
        allow_hyphen_values = true
    )]
    timeout: Span,
}

impl ConnectArg {
    async fn connect(&self) -> anyhow::Result<Client> {
        let sockets = locate::sockets(self.root_dir.as_deref());
        match Client::connect_any(&sockets, self.timeout.0).await {
            Err(error @ ConnectError::NotRunning { .. }) if self.root_dir.is_none() => {
                let variable = std::env::var_os(locate::ROOT_VARIABLE).filter(|value| !value.is_empty());
                let now = variable.map_or_else(
                    || "not set".to_owned(),
                    |root| format!("now {}", PathBuf::from(root).display()),
                );
                anyhow::bail!(
                    "{error}, or name its root directory with --root-dir or {} ({now})",
                    locate::ROOT_VARIABLE
                );
            }
            connected => Ok(connected?),
        }
    }
}

pub(crate) fn run(command: Command) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.context("cannot start")?.block_on(dispatch(command));
    match ended.map_err(anyhow::Error::downcast::<Status>) {
        Ok(outcome) => Ok(outcome),
        Err(Ok(status)) => refused(&status),
        Err(Err(error)) => Err(error),
    }
}

async fn dispatch(command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Status { connect, output } => status::run(&connect, output.output).await,
        Command::Get(args) => get::run(args).await,
        Command::Describe(args) => describe::run(args).await,
        Command::Admit(args) => admit::run(args).await,
        Command::Options(args) => options::run(args).await,
        Command::Remove(args) => remove::run(args).await,
        Command::Import(args) => import::import(args).await,
        Command::Forget(args) => import::forget(args).await,
        Command::Version(args) => version::run(args).await,
        Command::State(command) => state::run(command).await,
    }
}

fn refused(status: &Status) -> anyhow::Result<Outcome> {
    match no_answer(status) {
        Some(error) => Err(error),
        None => {
            output::warn(&format!("error: {}", answer(status)));
            Ok(Outcome::Bad)
        }
    }
}

/// Returns the error of a call that devlet did not answer. A status that devlet sent does not have a source.
fn no_answer(status: &Status) -> Option<anyhow::Error> {
    let source = std::error::Error::source(status)?;
    if let Some(no_answer) = source.downcast_ref::<NoAnswer>() {
        return Some(no_answer.clone().into());
    }
    Some(match source.downcast_ref::<ConnectionEnded>() {
        Some(ConnectionEnded { path, .. }) => {
            anyhow::anyhow!(
                "devlet at {} has stopped before it answered, or this user has too many connections: see devlet's log",
                path.display()
            )
        }
        None => anyhow::anyhow!("the connection to devlet is lost: {}", status.message()),
    })
}

/// Returns the text of an answer that refuses a call.
fn answer(status: &Status) -> &str {
    match status.message() {
        "" => status.code().description(),
        text => text,
    }
}
