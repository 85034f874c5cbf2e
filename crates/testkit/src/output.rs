//! Output of child processes, and reports of skipped tests.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::panic::Location;

/// Environment variable that makes [`skip`] panic if its value is `1`.
const NO_SKIP: &str = "DEVLET_NO_SKIP";

/// Reads lines from a child process until its end, prints each one to standard error, and passes it to `each`.
///
/// The reading thread inherits the output capture of the test that starts it. So the test harness shows the lines only if
/// that test fails.
pub fn print_lines(stream: impl Read + Send + 'static, mut each: impl FnMut(&str) + Send + 'static) {
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line);
            let text = text.strip_suffix('\n').unwrap_or(&text);
            eprintln!("{text}");
            each(text);
            line.clear();
        }
    });
}

/// Prints `skipped: TEST: REASON` to standard error. A test that cannot run on this machine calls this and returns.
///
/// # Panics
///
/// If the environment variable `DEVLET_NO_SKIP` is `1`.
#[track_caller]
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    // With `--test-threads=1`, tests run on the main thread.
    let test = match thread.name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => Location::caller().to_string(),
    };
    if std::env::var_os(NO_SKIP).is_some_and(|value| value == "1") {
        panic!("{test} cannot run here, and {NO_SKIP} is set: {reason}");
    }
    // `eprintln!` is captured, and the harness does not show captured output of tests that pass.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
}
