//! devlet as a library: a process around its agent, called like the kubelet's managers.
//!
//! It reads one [`Command`] per line and answers each with an [`Answer`]. Times are measured in this process, around
//! [`Agent::admit`], so that the communication with this process is not included.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use devlet_agent::agent::Agent;
use devlet_agent::config::Config;
use devlet_agent::manifest;
use devlet_agent::workflow::admit::AdmitError;
use devlet_core::{PodRequest, PodUid, Source};
use futures_util::stream::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::devlet;
use crate::process::{Process, answer_lines};

/// Admissions in flight while a node is filled.
const FILLERS: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A command to the process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Command {
    /// Admit this number of pods concurrently. They stay.
    Fill(usize),
    /// Admit this number of pods one by one, and remove them afterwards.
    Admit(usize),
}

/// The result of a command.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Answer {
    /// Duration of each measured admission.
    nanos: Vec<u64>,
    error: Option<String>,
}

/// A process with an agent. Killed when dropped.
pub(crate) struct Embedded {
    root: PathBuf,
    process: Process,
}

impl Embedded {
    /// Starts the process. Plugins can register when the first command is answered.
    pub(crate) async fn start(root: &Path, resource: &str, log: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(root)?;
        let shown = root.display().to_string();
        let args = ["agent", "--root", &shown, "--resource", resource];
        let process = Process::start("the agent", &std::env::current_exe()?, &args, log)?;
        let mut embedded = Self {
            root: root.to_owned(),
            process,
        };
        embedded.fill(0).await?;
        Ok(embedded)
    }

    /// Returns the directory in which plugins register.
    pub(crate) fn plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// Admits `count` pods concurrently. They stay.
    pub(crate) async fn fill(&mut self, count: usize) -> anyhow::Result<()> {
        self.call(Command::Fill(count)).await.map(drop)
    }

    /// Admits pods one by one, and removes them afterwards. Returns the duration of each admission.
    pub(crate) async fn admit(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let answer = self.call(Command::Admit(count)).await?;
        Ok(answer.nanos.into_iter().map(Duration::from_nanos).collect())
    }

    async fn call(&mut self, command: Command) -> anyhow::Result<Answer> {
        let answer: Answer = self.process.call(&command).await?;
        match answer.error {
            Some(error) => bail!("agent command {command:?} failed: {error}"),
            None => Ok(answer),
        }
    }
}

/// Runs the process until its standard input ends.
pub(crate) async fn run(root: PathBuf, resource: &str) -> anyhow::Result<()> {
    let (agent, _) = Agent::start(Config::new(root)).await?;
    let mut next = 0;
    answer_lines(async |command| {
        let (Command::Fill(count) | Command::Admit(count)) = command;
        let numbers = next..next + count;
        next = numbers.end;
        let done = match requests(&agent, numbers, resource) {
            Ok(requests) => carry_out(&agent, command, requests).await,
            Err(error) => Err(error),
        };
        done.unwrap_or_else(|error| Answer {
            error: Some(format!("{error:#}")),
            ..Answer::default()
        })
    })
    .await?;
    agent.stop().await?;
    Ok(())
}

/// Returns the requests of pods, from the manifests that `devlet serve` gets.
fn requests(agent: &Agent, numbers: Range<usize>, resource: &str) -> anyhow::Result<Vec<PodRequest>> {
    let foreign = &agent.config().foreign;
    let request = |number| {
        let pod = devlet::manifest(number, resource);
        Ok(manifest::parse(&pod, Source::Embedder, foreign)?)
    };
    numbers.map(request).collect()
}

/// Admits pods in tasks, which run on the threads of the agent.
async fn carry_out(agent: &Agent, command: Command, requests: Vec<PodRequest>) -> anyhow::Result<Answer> {
    match command {
        Command::Fill(_) => {
            let admissions = requests
                .into_iter()
                .map(|request| tokio::spawn(admit(agent.clone(), vec![request])));
            let mut admissions = futures_util::stream::iter(admissions).buffer_unordered(FILLERS);
            while let Some(admitted) = admissions.next().await {
                admitted??;
            }
            Ok(Answer::default())
        }
        Command::Admit(_) => {
            let pods: Vec<PodUid> = requests.iter().map(|request| request.uid.clone()).collect();
            let nanos = tokio::spawn(admit(agent.clone(), requests)).await??;
            for pod in &pods {
                agent.remove(pod, deadline()).await?;
            }
            Ok(Answer { nanos, error: None })
        }
    }
}

/// Admits pods one by one. Returns the duration of each admission, in nanoseconds.
async fn admit(agent: Agent, requests: Vec<PodRequest>) -> Result<Vec<u64>, AdmitError> {
    let mut nanos = Vec::with_capacity(requests.len());
    for request in &requests {
        let began = Instant::now();
        agent.admit(request, deadline(), |_| {}).await?;
        nanos.push(began.elapsed().as_nanos() as u64);
    }
    Ok(nanos)
}

fn deadline() -> Instant {
    Instant::now() + TIMEOUT
}
