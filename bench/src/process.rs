//! Processes that read a command per line and answer with a line.

use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

/// A child process. Killed when dropped.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a program; its standard error is appended to a file.
    pub(crate) fn start(
        name: &'static str,
        program: &Path,
        args: &[&str],
        log: &Path,
    ) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(append(log)?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let stdin = child.stdin.take().context("no standard input")?;
        let stdout = child.stdout.take().context("no standard output")?;
        Ok(Self {
            name,
            child,
            stdin,
            stdout: BufReader::new(stdout).lines(),
        })
    }

    pub(crate) async fn call<A: DeserializeOwned>(&mut self, command: &impl Serialize) -> anyhow::Result<A> {
        let line = serde_json::to_string(command)? + "\n";
        self.stdin.write_all(line.as_bytes()).await?;
        self.stdin.flush().await?;
        match self.stdout.next_line().await? {
            Some(line) => {
                serde_json::from_str(&line).with_context(|| format!("{} answered {line}", self.name))
            }
            None => bail!("{} has exited; see its log", self.name),
        }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills the process, as in a crash.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().await?;
        Ok(())
    }
}

/// In such a process: answers each line of standard input, until its end.
pub(crate) async fn answer_lines<C: DeserializeOwned, A: Serialize>(
    mut carry_out: impl AsyncFnMut(C) -> A,
) -> anyhow::Result<()> {
    let (sender, mut lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        for line in lines {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    while let Some(line) = lines.recv().await {
        let answer = carry_out(serde_json::from_str(&line)?).await;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

pub(crate) fn append(log: &Path) -> anyhow::Result<File> {
    let file = File::options().create(true).append(true).open(log);
    file.with_context(|| format!("cannot write {}", log.display()))
}
