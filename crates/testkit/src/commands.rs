//! What a process is told: lines on standard input.

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};

use crate::events::{Event, tell};

/// The commands still to come.
#[derive(Debug)]
pub(crate) struct Commands(Lines<BufReader<Stdin>>);

impl Commands {
    pub(crate) fn new() -> Self {
        Self(BufReader::new(tokio::io::stdin()).lines())
    }

    /// The next one; none when the process is to end.
    pub(crate) async fn next(&mut self) -> Option<String> {
        let line = self.0.next_line().await.ok().flatten();
        line.filter(|line| line != "exit")
    }

    /// Tells what came of a command.
    pub(crate) fn end(&self, command: String, carried_out: Result<(), String>) {
        tell(&match carried_out {
            Ok(()) => Event::Done { command },
            Err(reason) => Event::Refused { command, reason },
        });
    }
}
