//! The progress line of commands that wait: redrawn on a terminal, a new line every few seconds elsewhere.

use std::io::{self, IsTerminal as _, Write};
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::output::escape_control;

/// Interval between redraws of the line.
const TICK: Duration = Duration::from_secs(1);

/// Interval between lines if standard error is not a terminal.
const PAUSE: Duration = Duration::from_secs(5);

/// Shows on standard error what the command waits for, and clears the line when dropped.
pub(super) struct Progress {
    line: Line<io::Stderr>,
    started: Instant,
    ticks: Interval,
}

impl Progress {
    pub(super) fn new() -> Self {
        let (stderr, started) = (io::stderr(), Instant::now());
        let mut ticks = tokio::time::interval_at(started + TICK, TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let terminal = stderr.is_terminal();
        Self {
            line: Line::new(stderr, terminal),
            started,
            ticks,
        }
    }

    /// Sets the text of the line.
    pub(super) fn waiting_for(&mut self, what: &str) {
        self.line.waiting_for(what, self.started.elapsed());
    }

    /// Prints a line above the one that is redrawn.
    pub(super) fn note(&mut self, text: &str) {
        self.line.clear();
        crate::output::warn(text);
        self.line.draw(self.started.elapsed());
    }

    /// Waits for a future, and redraws the line meanwhile.
    pub(super) async fn during<T>(&mut self, something: impl Future<Output = T>) -> T {
        let mut something = std::pin::pin!(something);
        loop {
            tokio::select! {
                biased;
                done = &mut something => return done,
                _ = self.ticks.tick() => self.line.draw(self.started.elapsed()),
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.line.clear();
    }
}

struct Line<W: Write> {
    to: W,
    terminal: bool,
    what: Option<String>,
    /// Time of the last line, if standard error is not a terminal.
    last: Option<Duration>,
    drawn: bool,
}

impl<W: Write> Line<W> {
    fn new(to: W, terminal: bool) -> Self {
        Self {
            to,
            terminal,
            what: None,
            last: None,
            drawn: false,
        }
    }

    fn waiting_for(&mut self, what: &str, waited: Duration) {
        self.what = Some(escape_control(what).replace('\n', " "));
        self.draw(waited);
    }

    /// Draws the line. Errors are ignored, because they would be reported on standard error, too.
    fn draw(&mut self, waited: Duration) {
        let Some(what) = &self.what else { return };
        let seconds = waited.as_secs();
        if self.terminal {
            let _ = write!(self.to, "\r\x1b[Kwaiting for {what}, {seconds} s");
            let _ = self.to.flush();
            self.drawn = true;
        } else if self.last.is_none_or(|last| waited.saturating_sub(last) >= PAUSE) {
            let _ = writeln!(self.to, "waiting for {what}, {seconds} s");
            self.last = Some(waited);
        }
    }

    fn clear(&mut self) {
        if self.drawn {
            let _ = write!(self.to, "\r\x1b[K");
            let _ = self.to.flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(terminal: bool, steps: impl FnOnce(&mut Line<Vec<u8>>)) -> String {
        let mut line = Line::new(Vec::new(), terminal);
        steps(&mut line);
        line.clear();
        String::from_utf8(line.to).unwrap()
    }

    fn wait(line: &mut Line<Vec<u8>>) {
        line.draw(Duration::ZERO);
        line.waiting_for("a plugin that offers acme.com/gpu", Duration::from_millis(10));
        (1..=12).for_each(|second| line.draw(Duration::from_secs(second)));
    }

    #[test]
    fn on_a_terminal_the_line_is_redrawn_and_cleared_at_the_end() {
        let text = written(true, wait);
        assert!(
            text.contains("\r\x1b[Kwaiting for a plugin that offers acme.com/gpu, 12 s"),
            "{text:?}"
        );
        assert!(!text.contains('\n'), "{text:?}");
        assert!(text.ends_with("\r\x1b[K"), "{text:?}");
    }

    #[test]
    fn elsewhere_there_is_a_plain_line_every_five_seconds() {
        let expected =
            [0, 6, 11].map(|second| format!("waiting for a plugin that offers acme.com/gpu, {second} s\n"));
        assert_eq!(written(false, wait), expected.concat());
    }

    #[test]
    fn nothing_is_written_without_a_wait() {
        assert_eq!(written(true, |line| line.draw(Duration::from_secs(7))), "");
    }

    #[test]
    fn control_characters_in_plugin_names_are_escaped() {
        let text = written(false, |line| {
            line.waiting_for("\x1b]0;x\x07\nnext", Duration::ZERO);
        });
        assert_eq!(text, "waiting for \\u{1b}]0;x\\u{7} next, 0 s\n");
    }
}
