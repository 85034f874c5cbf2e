//! An oracle process for one kubelet release (see `interop/checkpoints`).

use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, ensure};

#[derive(Debug)]
pub(crate) struct Oracle {
    child: Child,
    /// `None` only during the drop.
    input: Option<BufWriter<ChildStdin>>,
    output: BufReader<ChildStdout>,
}

/// A kind of file, as the oracles name it, and its bytes.
pub(crate) type Request<'a> = (u8, &'a [u8]);

impl Oracle {
    pub(crate) fn start(program: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        let input = child.stdin.take().context("no pipe to the oracle")?;
        let output = child.stdout.take().context("no pipe from the oracle")?;
        Ok(Self {
            child,
            input: Some(BufWriter::with_capacity(1 << 16, input)),
            output: BufReader::with_capacity(1 << 16, output),
        })
    }

    /// Sends requests and reads answers concurrently, so that neither side blocks the other.
    pub(crate) fn ask(&mut self, requests: &[Request<'_>]) -> anyhow::Result<Vec<Vec<u8>>> {
        let Self { input, output, .. } = self;
        let input = input.as_mut().context("the oracle was stopped")?;
        std::thread::scope(|scope| {
            let sent = scope.spawn(move || -> anyhow::Result<()> {
                for (kind, bytes) in requests {
                    input.write_all(&[*kind])?;
                    input.write_all(&u32::try_from(bytes.len())?.to_be_bytes())?;
                    input.write_all(bytes)?;
                }
                Ok(input.flush()?)
            });
            let mut answers = Vec::with_capacity(requests.len());
            for _ in requests {
                let mut line = Vec::new();
                let length = output.read_until(b'\n', &mut line)?;
                ensure!(length > 0, "an oracle exited");
                answers.push(line);
            }
            match sent.join() {
                Ok(sent) => sent?,
                Err(_) => anyhow::bail!("the writer thread panicked"),
            }
            Ok(answers)
        })
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        // At the end of its input the oracle removes its scratch directory and exits.
        self.input = None;
        let _ = self.child.wait();
    }
}
