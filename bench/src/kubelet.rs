//! The kubelet's side: a process around its own managers, see `bench/kubelet/main.go`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use crate::driver::Registered;
use crate::plugin;
use crate::process::Process;

/// The kubelet's directory: a constant of its API.
pub(crate) const DIRECTORY: &str = "/var/lib/kubelet/device-plugins";

#[derive(Debug, Default, Serialize)]
struct Command<'a> {
    #[serde(rename = "Do")]
    what: &'a str,
    #[serde(rename = "Resource")]
    resource: &'a str,
    #[serde(rename = "Held")]
    held: usize,
    #[serde(rename = "Count")]
    count: usize,
    #[serde(rename = "IDs")]
    ids: Vec<String>,
    #[serde(rename = "Answer")]
    answer: String,
    #[serde(rename = "Callers")]
    callers: usize,
    #[serde(rename = "Millis")]
    millis: u128,
    #[serde(rename = "Dir")]
    directory: PathBuf,
    #[serde(rename = "Drivers")]
    drivers: Vec<Driver<'a>>,
}

#[derive(Debug, Serialize)]
struct Driver<'a> {
    #[serde(rename = "Name")]
    name: &'a str,
    #[serde(rename = "Endpoint")]
    endpoint: &'a Path,
}

#[derive(Debug, Deserialize)]
struct Answer {
    error: Option<String>,
    #[serde(default)]
    nanos: Vec<u64>,
    #[serde(default)]
    at: u64,
    #[serde(default)]
    pairs: u64,
}

/// Paths of the program and its log.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) log: PathBuf,
}

impl Program {
    /// Writes the file of a kubelet with `held` pods, each with a device.
    pub(crate) async fn write_checkpoint(&self, resource: &str, held: usize) -> anyhow::Result<()> {
        let command = Command {
            what: "write",
            resource,
            held,
            ids: (0..held).map(plugin::device_id).collect(),
            answer: STANDARD.encode(plugin::allocated().encode_to_vec()),
            ..Command::default()
        };
        let mut process = self.process()?;
        call(&mut process, &command).await?;
        process.kill().await
    }

    /// Starts a kubelet on the present file. Returns the duration of its device manager's start.
    pub(crate) async fn start(
        &self,
        resource: &'static str,
        held: usize,
    ) -> anyhow::Result<(Kubelet, Duration)> {
        let mut kubelet = Kubelet {
            process: self.process()?,
            resource,
        };
        let answer = kubelet.ask("start", |command| command.held = held).await?;
        Ok((kubelet, durations(&answer).sum()))
    }

    /// Starts a kubelet with `held` pods, each with a claim of the drivers. Its DRA manager does not use its own
    /// directory.
    pub(crate) async fn with_claims(
        &self,
        directory: &Path,
        drivers: &[Registered],
        held: usize,
    ) -> anyhow::Result<WithClaims> {
        std::fs::create_dir_all(directory)?;
        let mut process = self.process()?;
        for what in ["write-claims", "start-claims"] {
            let drivers = drivers.iter().map(|driver| Driver {
                name: driver.name,
                endpoint: &driver.endpoint,
            });
            let command = Command {
                what,
                held,
                directory: directory.to_owned(),
                drivers: drivers.collect(),
                ..Command::default()
            };
            call(&mut process, &command).await?;
        }
        Ok(WithClaims(process))
    }

    fn process(&self) -> anyhow::Result<Process> {
        Process::start("the kubelet", &self.path, &[], &self.log)
    }
}

/// A running kubelet.
pub(crate) struct Kubelet {
    process: Process,
    resource: &'static str,
}

impl Kubelet {
    async fn ask(&mut self, what: &str, more: impl FnOnce(&mut Command<'_>)) -> anyhow::Result<Answer> {
        let mut command = Command {
            what,
            resource: self.resource,
            ..Command::default()
        };
        more(&mut command);
        call(&mut self.process, &command).await
    }

    /// Returns the time at which its capacity was first `count` devices.
    pub(crate) async fn capacity(&mut self, count: usize) -> anyhow::Result<u64> {
        Ok(self.ask("capacity", |command| command.count = count).await?.at)
    }

    /// Admits pods that stay.
    pub(crate) async fn admit(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let answer = self.ask("admit", |command| command.count = count).await?;
        Ok(durations(&answer).collect())
    }

    /// Removes all pods but the first ones.
    pub(crate) async fn keep(&mut self, held: usize) -> anyhow::Result<()> {
        self.ask("forget", |command| command.held = held).await?;
        Ok(())
    }

    /// Removes one pod and admits one, `count` times.
    pub(crate) async fn churn(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let answer = self.ask("churn", |command| command.count = count).await?;
        Ok(durations(&answer).collect())
    }

    /// Returns the admissions with removals per second of many callers.
    pub(crate) async fn pairs_per_second(&mut self, callers: usize, time: Duration) -> anyhow::Result<f64> {
        let more = |command: &mut Command<'_>| {
            command.callers = callers;
            command.millis = time.as_millis();
        };
        let answer = self.ask("loop", more).await?;
        let took: Duration = durations(&answer).sum();
        Ok(answer.pairs as f64 / took.as_secs_f64())
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    pub(crate) async fn kill(self) -> anyhow::Result<()> {
        self.process.kill().await
    }
}

/// A running kubelet with claims.
pub(crate) struct WithClaims(Process);

impl WithClaims {
    /// Admits and removes pods with a claim of the first driver. Returns the duration of each pair.
    pub(crate) async fn pairs(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let command = Command {
            what: "claim-pairs",
            count,
            ..Command::default()
        };
        let answer = call(&mut self.0, &command).await?;
        Ok(durations(&answer).collect())
    }

    /// Returns the admissions with removals per second of many callers. Each pod has a claim of all drivers.
    pub(crate) async fn pairs_per_second(&mut self, callers: usize, time: Duration) -> anyhow::Result<f64> {
        let command = Command {
            what: "claim-loop",
            callers,
            millis: time.as_millis(),
            ..Command::default()
        };
        let answer = call(&mut self.0, &command).await?;
        let took: Duration = durations(&answer).sum();
        Ok(answer.pairs as f64 / took.as_secs_f64())
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.0.pid()
    }

    pub(crate) async fn kill(self) -> anyhow::Result<()> {
        self.0.kill().await
    }
}

/// Empties the directory for the next kubelet.
pub(crate) fn clear() -> anyhow::Result<()> {
    for entry in std::fs::read_dir(DIRECTORY)? {
        std::fs::remove_file(entry?.path())?;
    }
    Ok(())
}

pub(crate) fn directory() -> &'static Path {
    Path::new(DIRECTORY)
}

async fn call(process: &mut Process, command: &Command<'_>) -> anyhow::Result<Answer> {
    let answer: Answer = process.call(command).await?;
    match answer.error {
        Some(error) => bail!("kubelet command {} failed: {error}", command.what),
        None => Ok(answer),
    }
}

fn durations(answer: &Answer) -> impl Iterator<Item = Duration> {
    answer.nanos.iter().copied().map(Duration::from_nanos)
}
