//! `devlet shield check`: whether a node can use the shield.

use std::path::{Path, PathBuf};
use std::time::Duration;

use devlet_agent::config::Shield;
use devlet_agent::lease::checkpoint;
use devlet_agent::shield::beside;
use devlet_agent::shield::report::{HOST_PIDS, RuntimeState};
use devlet_agent::shield::runtime;
use tokio::time::Instant;

use crate::Outcome;
use crate::output::{self, escape_control};
use crate::table::Tone;

/// Time for the kubelet to accept a connection.
const DIAL_TIME: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Root directory of the kubelet
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Socket of the container runtime [default: that of containerd or CRI-O]
    #[arg(long, value_name = "SOCKET")]
    runtime_endpoint: Option<PathBuf>,
    /// Directory where devlet would write CDI specs
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    cdi_dir: PathBuf,
}

/// The result of one check.
enum Found {
    Good(String),
    /// Not certain, or of no consequence.
    Note(String),
    Bad(String),
}

pub(super) async fn run(args: &Args) -> anyhow::Result<Outcome> {
    let endpoint = args.runtime_endpoint.as_deref();
    let shield = Shield {
        cdi: args.cdi_dir.clone(),
        runtime: endpoint.map(crate::config::runtime_socket),
        ..Shield::new(&args.kubelet_dir, "")
    };
    let all = [
        ("User", user()),
        ("Kubelet", kubelet(&shield).await),
        ("Checkpoint", devices(&shield)),
        ("Plugins", plugins(&shield.device_plugins())),
        ("Runtime", container_runtime(&shield).await),
        ("CDI", directory(&shield.cdi)),
    ];
    let mut text = String::new();
    for (subject, found) in &all {
        let line = match found {
            Found::Good(what) => format!("ok    {}", escape_control(what)),
            Found::Note(what) => format!("{}  {}", Tone::Waiting.paint("note"), escape_control(what)),
            Found::Bad(what) => format!("{}   {}", Tone::Bad.paint("bad"), escape_control(what)),
        };
        text.push_str(&format!("{:<11} {line}\n", format!("{subject}:")));
    }
    output::out(&text)?;
    let is_bad = all.iter().any(|(_, found)| matches!(found, Found::Bad(_)));
    Ok(if is_bad { Outcome::Bad } else { Outcome::Fine })
}

fn user() -> Found {
    match rustix::process::geteuid().is_root() {
        true => Found::Good("root".into()),
        false => {
            Found::Bad("devlet must run as root to write CDI specs and to register with the kubelet".into())
        }
    }
}

async fn kubelet(shield: &Shield) -> Found {
    let directory = shield.device_plugins();
    if !directory.is_dir() {
        return Found::Bad(format!(
            "no directory {}; name the kubelet's with --kubelet-dir",
            directory.display()
        ));
    }
    let socket = directory.join("kubelet.sock");
    let dialed = devlet_uds::connect(&socket, Instant::now() + DIAL_TIME).await;
    let pid = match dialed {
        Ok(dialed) => dialed.peer.pid,
        Err(error) => {
            return Found::Note(format!(
                "no kubelet listens, so its version is not known: {error}"
            ));
        }
    };
    let Some(pid) = pid else {
        return Found::Bad(format!("its process is not visible; {HOST_PIDS}"));
    };
    match runtime::kubelet_version(pid).await {
        Some(version) if runtime::is_new_enough(&version) => Found::Good(version),
        Some(version) => Found::Bad(format!(
            "{version} does not hand CDI devices on to the runtime; 1.29 or later does"
        )),
        None => Found::Note("its program does not tell its version".into()),
    }
}

fn devices(shield: &Shield) -> Found {
    match checkpoint::read(&shield.checkpoint()) {
        Ok(held) => {
            let leased = held.iter().filter(|held| held.lease.is_some()).count();
            let all = output::count(held.len(), "container");
            Found::Good(format!("{all} with devices, {leased} of them through devlet"))
        }
        Err(error) => Found::Bad(format!("{error}; see devlet checkpoint verify")),
    }
}

fn plugins(directory: &Path) -> Found {
    let names = beside::sockets(directory);
    match names.is_empty() {
        true => Found::Good("none beside devlet".into()),
        false => Found::Note(format!(
            "{} in the kubelet's directory; point each at devlet's: {}",
            output::count(names.len(), "socket"),
            names.join(", ")
        )),
    }
}

async fn container_runtime(shield: &Shield) -> Found {
    match runtime::ask(shield).await {
        RuntimeState::Ready { name, .. } => Found::Good(format!("{name}, CDI is on")),
        RuntimeState::Unfit { name, problem } => Found::Bad(format!("{name}: {problem}")),
        RuntimeState::Unknown { reason } => Found::Note(format!("not known whether CDI is on: {reason}")),
        RuntimeState::Unasked => Found::Note("not asked".into()),
    }
}

/// Checks that specs can be written to a directory, without leaving anything behind.
fn directory(path: &Path) -> Found {
    if !path.exists() {
        return Found::Note(format!("{} does not exist; devlet creates it", path.display()));
    }
    match tempfile::tempfile_in(path) {
        Ok(_) => Found::Good(format!("{} can be written", path.display())),
        Err(error) => Found::Bad(format!("{} cannot be written: {error}", path.display())),
    }
}
