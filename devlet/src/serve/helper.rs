//! Helpers of the daemon: processes that use only the kubelet's protocols, as any plugin does.
//!
//! A helper is a hidden subcommand of this program. It ends when its standard input ends, so that it never outlives the
//! daemon. If it ends early, the daemon restarts it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use devlet_agent::agent::Agent;
use devlet_core::Node;
use devlet_kubelet_api::device_plugin::v1beta1::registration_client::RegistrationClient;
use devlet_kubelet_api::device_plugin::v1beta1::{KUBELET_SOCKET, RegisterRequest, VERSION};
use devlet_uds::server::ServerLimits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause before a helper that ended is restarted; doubled after each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The tasks that supervise the helpers.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Helpers {
    /// Starts a helper, and returns once it has registered.
    pub(super) async fn start(
        &mut self,
        helper: Helper,
        agent: &Agent,
        serves: impl Fn(&Node) -> bool,
    ) -> anyhow::Result<()> {
        let process = helper.registered(agent, serves).await?;
        self.tasks
            .push(tokio::spawn(helper.keep(process, self.stop.clone())));
        Ok(())
    }

    pub(super) async fn stop(self) {
        self.stop.cancel();
        for task in self.tasks {
            if let Err(error) = task.await {
                tracing::warn!(%error, "helper task failed");
            }
        }
    }
}

/// A subcommand to run.
#[derive(Debug)]
pub(super) struct Helper {
    command: &'static str,
    root: PathBuf,
    /// The first line of its standard input.
    input: Vec<u8>,
}

/// A running helper.
#[derive(Debug)]
struct Process {
    child: Child,
    /// Separate from the child, because waiting for the child would close it.
    stdin: Option<ChildStdin>,
}

impl Helper {
    pub(super) fn new(command: &'static str, root: &Path) -> Self {
        Self {
            command,
            root: root.to_owned(),
            input: Vec::new(),
        }
    }

    /// Sets the first line of its standard input.
    pub(super) fn with_input(mut self, line: String) -> Self {
        self.input = line.into_bytes();
        self.input.push(b'\n');
        self
    }

    async fn registered(&self, agent: &Agent, serves: impl Fn(&Node) -> bool) -> anyhow::Result<Process> {
        let command = self.command;
        let mut process = self.spawn().await?;
        let deadline = Instant::now() + START_TIMEOUT;
        let mut changes = agent.store().subscribe();
        while !agent.store().read(&serves) {
            tokio::select! {
                changed = timeout_at(deadline, changes.changed()) => if changed.is_err() {
                    bail!("devlet {command} did not register within {} s", START_TIMEOUT.as_secs());
                },
                ended = process.child.wait() => {
                    bail!("devlet {command} ended: {}", ended.context("cannot wait for it")?)
                }
            }
        }
        Ok(process)
    }

    async fn spawn(&self) -> anyhow::Result<Process> {
        let cannot = || format!("cannot start devlet {}", self.command);
        let program = std::env::current_exe().with_context(cannot)?;
        let mut command = Command::new(program);
        command.arg(self.command).arg("--root-dir").arg(&self.root);
        // In its own process group, so that Ctrl-C on a terminal signals only the daemon.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .process_group(0);
        let mut child = command.spawn().with_context(cannot)?;
        let mut stdin = child.stdin.take();
        if let Some(stdin) = &mut stdin {
            stdin.write_all(&self.input).await.with_context(cannot)?;
        }
        Ok(Process { child, stdin })
    }

    /// Runs until `stop` is cancelled. A process that ends before that is restarted.
    async fn keep(self, mut process: Process, stop: CancellationToken) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            let ended = tokio::select! {
                () = stop.cancelled() => return self.stop(process).await,
                ended = process.child.wait() => ended,
            };
            if began.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            tracing::warn!(helper = self.command, how, again_in = ?pause, "helper ended");
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            match self.spawn().await {
                Ok(spawned) => process = spawned,
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
    }

    async fn stop(&self, mut process: Process) {
        drop(process.stdin.take());
        let ended = tokio::time::timeout(Duration::from_secs(2), process.child.wait());
        if ended.await.is_err() {
            // Dropping the child kills it.
            tracing::warn!(helper = self.command, "helper killed: it did not end in time");
        }
    }
}

/// Completes when standard input ends.
pub(super) async fn input_ends() {
    let mut ignored = [0; 64];
    let mut stdin = tokio::io::stdin();
    while matches!(stdin.read(&mut ignored).await, Ok(read) if read > 0) {}
}

pub(super) fn limits() -> ServerLimits {
    ServerLimits {
        drain: Duration::from_millis(100),
        ..ServerLimits::default()
    }
}

/// Registers resources, each with its socket in the directory.
pub(super) async fn register(directory: &Path, resources: &[(&str, &str)]) -> anyhow::Result<()> {
    let kubelet = devlet_uds::connect(directory.join(KUBELET_SOCKET), Instant::now() + START_TIMEOUT).await?;
    for (resource, socket) in resources {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: (*socket).into(),
            resource_name: (*resource).into(),
            options: None,
        };
        let registered = RegistrationClient::new(kubelet.channel.clone())
            .register(request)
            .await;
        registered
            .map_err(|status| anyhow::anyhow!("registration of {resource} refused: {}", status.message()))?;
    }
    Ok(())
}
