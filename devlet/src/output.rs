//! How results are shown.

use std::borrow::Cow;
use std::io::{self, Write as _};

use anyhow::Context as _;
use clap::ValueEnum;
use comfy_table::{Table, presets};
use serde::Serialize;

/// The shape of what a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Output {
    /// For people
    #[default]
    Table,
    /// For people, with more columns where there are more
    Wide,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

/// `-o`, the same on every command that shows something.
#[derive(Debug, clap::Args)]
pub(crate) struct OutputArg {
    /// How to print the result
    #[arg(short = 'o', long = "output", value_name = "FORMAT", default_value = "table")]
    pub(crate) output: Output,
}

/// Prints `value` as JSON or YAML, or `table` for people.
pub(crate) fn print<T: Serialize>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    print_text(match output {
        Output::Table | Output::Wide => table(value),
        Output::Json => serde_json::to_string_pretty(value)?,
        Output::Yaml => serde_saphyr::to_string(value)?,
    })
}

/// Prints a result, with a line break at its end.
pub(crate) fn print_text(mut text: String) -> anyhow::Result<()> {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    match out(&text) {
        // Whoever reads our output has seen enough: `devlet ... | head`. What was found out stands.
        Err(error) if is_broken_pipe(&error) => Ok(()),
        printed => printed,
    }
}

pub(crate) fn out(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to standard output")
}

/// A table without rules. Cells come from files, so nothing in them may steer the terminal or look like a row.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    table_of_lines(header, rows.into_iter().map(|row| row.map(|cell| vec![cell])))
}

/// Like [`table`], with cells of several lines.
pub(crate) fn table_of_lines<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [Vec<String>; N]>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| {
            let lines: Vec<_> = cell.iter().map(|text| line(text)).collect();
            lines.join("\n")
        }));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// `text` on one line, with line breaks and other control characters written out.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    match shown(text) {
        Cow::Borrowed(text) if !text.contains('\n') => Cow::Borrowed(text),
        text => Cow::Owned(text.replace('\n', "\\n")),
    }
}

/// `text` with control characters written out, line breaks excepted.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    let harmful = |character: char| character != '\n' && (character.is_control() || is_invisible(character));
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().map(|character| {
        if harmful(character) {
            character.escape_unicode().to_string()
        } else {
            character.to_string()
        }
    });
    Cow::Owned(escaped.collect())
}

/// Characters that reorder or break the text around them, or hide in it.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}'
    )
}

/// The error and its causes, on one line.
pub(crate) fn complain(error: &anyhow::Error) {
    warn(&format!("error: {}", chain(error.as_ref())));
}

/// An error and its causes. Many errors end in the words of their cause, which are then said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.ends_with(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// A line on standard error. That it cannot be written is nothing anybody could be told.
pub(crate) fn warn(text: &str) {
    let _ = writeln!(io::stderr(), "{}", line(text));
}

pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// "1 device", "2 devices".
pub(crate) fn count(number: usize, one: &str) -> String {
    let ending = match (number, one.ends_with('y')) {
        (1, _) => return format!("1 {one}"),
        (_, true) => format!("{}ies", &one[..one.len() - 1]),
        (_, false) => format!("{one}s"),
    };
    format!("{number} {ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Problem {
        #[error("cannot open it: {source}")]
        Told { source: io::Error },
        #[error("cannot watch it")]
        Untold { source: io::Error },
    }

    #[test]
    fn a_cause_is_said_once() {
        let source = || io::Error::from(io::ErrorKind::NotFound);
        let told = anyhow::Error::from(Problem::Told { source: source() }).context("it does not start");
        assert_eq!(
            chain(told.as_ref()),
            "it does not start: cannot open it: entity not found"
        );
        let untold = Problem::Untold { source: source() };
        assert_eq!(chain(&untold), "cannot watch it: entity not found");
    }
}
