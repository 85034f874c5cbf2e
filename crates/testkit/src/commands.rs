//! Commands of a process: lines on standard input.

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};

use crate::events::{Event, emit};

/// The remaining commands.
#[derive(Debug)]
pub(crate) struct Commands(Lines<BufReader<Stdin>>);

impl Commands {
    pub(crate) fn new() -> Self {
        Self(BufReader::new(tokio::io::stdin()).lines())
    }

    /// Returns the next command, or `None` if the process must exit.
    pub(crate) async fn next(&mut self) -> Option<String> {
        let line = self.0.next_line().await.ok().flatten();
        line.filter(|line| line != "exit")
    }

    /// Reports the result of a command.
    pub(crate) fn end(&self, command: String, result: Result<(), String>) {
        emit(&match result {
            Ok(()) => Event::Done { command },
            Err(reason) => Event::Refused { command, reason },
        });
    }
}
