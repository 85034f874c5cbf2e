//! Output of results and errors: formats, escaping, colours.

use std::borrow::Cow;
use std::io::{self, Write as _};

use anstream::{AutoStream, ColorChoice};
use anyhow::Context as _;
use serde::Serialize;

use crate::jsonpath::Template;
use crate::table::{Cell, Screen, Table};

/// Output format of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Table,
    /// For people, with additional columns if the command has them.
    Wide,
    Json,
    Yaml,
    /// The parts of the JSON that a template selects.
    JsonPath(Box<Template>),
    /// `KIND/NAME` lines; only for `devlet get`.
    Name,
}

const FORMATS: &str = "table, wide, json, yaml or jsonpath=TEMPLATE";

impl Output {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "table" => Self::Table,
            "wide" => Self::Wide,
            "json" => Self::Json,
            "yaml" => Self::Yaml,
            text => match text.strip_prefix("jsonpath=") {
                Some(template) => Self::JsonPath(Box::new(template.parse()?)),
                None => return Err(format!("write {FORMATS}")),
            },
        })
    }

    fn parse_of_list(text: &str) -> Result<Self, String> {
        match text {
            "name" => Ok(Self::Name),
            text => {
                Self::parse(text).map_err(|problem| problem.replace(FORMATS, &format!("name, {FORMATS}")))
            }
        }
    }
}

/// `-o` of commands that print one result.
#[derive(Debug, clap::Args)]
pub(crate) struct OutputArg {
    /// Output format: table, wide, json, yaml or jsonpath=TEMPLATE
    #[arg(short = 'o', long = "output", value_name = "FORMAT", default_value = "table", value_parser = Output::parse)]
    #[arg(add = clap_complete::ArgValueCandidates::new(|| formats(&["table", "wide", "json", "yaml", "jsonpath="])))]
    pub(crate) output: Output,
}

/// `-o` of commands that list named objects.
#[derive(Debug, clap::Args)]
pub(crate) struct ListOutputArg {
    /// Output format: table, wide, name, json, yaml or jsonpath=TEMPLATE
    #[arg(short = 'o', long = "output", value_name = "FORMAT", default_value = "table", value_parser = Output::parse_of_list)]
    #[arg(add = clap_complete::ArgValueCandidates::new(|| formats(&["table", "wide", "name", "json", "yaml", "jsonpath="])))]
    pub(crate) output: Output,
}

fn formats(names: &[&str]) -> Vec<clap_complete::CompletionCandidate> {
    names
        .iter()
        .map(clap_complete::CompletionCandidate::new)
        .collect()
}

/// Prints `value` as JSON or YAML, or `table` for people.
pub(crate) fn print<T: Serialize>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    print_text(match output {
        Output::Table | Output::Wide | Output::Name => table(value),
        Output::Json => serde_json::to_string_pretty(value)?,
        Output::Yaml => serde_saphyr::to_string(value)?,
        // As kubectl does, without a line break of its own.
        Output::JsonPath(template) => {
            let value = serde_json::to_value(value)?;
            warn_of_missing_key(&template, &value);
            return ignore_broken_pipe(out(&template.render(&value)));
        }
    })
}

/// Prints `results` as JSON or YAML, or one line for each.
pub(crate) fn print_lines<T: Serialize>(
    output: Output,
    results: &[T],
    line: impl Fn(&T) -> String,
) -> anyhow::Result<()> {
    print(output, &results, |results| {
        results.iter().map(|result| line(result) + "\n").collect()
    })
}

/// Warns about a template key that does not exist. Its result is empty and the command succeeds, as with kubectl.
pub(crate) fn warn_of_missing_key(template: &Template, value: &serde_json::Value) {
    if let Some(missing) = template.missing_key(value) {
        warn(&format!("warning: -o jsonpath: {missing}"));
    }
}

/// Prints a result, with a line break at its end.
pub(crate) fn print_text(mut text: String) -> anyhow::Result<()> {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    ignore_broken_pipe(out(&text))
}

/// Ignores a closed pipe: with `devlet ... | head`, the exit code is still that of the command.
fn ignore_broken_pipe(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    match printed {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        printed => printed,
    }
}

pub(crate) fn out(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to standard output")
}

/// Returns a table for people. Cells come from files and peers, so their control characters are escaped.
pub(crate) fn table<const N: usize, C: Into<Cell>>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [C; N]>,
) -> String {
    table_on(Screen::stdout(), header, rows)
}

/// Like [`table`], indented by two spaces.
pub(crate) fn indented_table<const N: usize, C: Into<Cell>>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [C; N]>,
) -> String {
    let mut screen = Screen::stdout();
    screen.width = screen.width.map(|width| width.saturating_sub(2));
    let text = table_on(screen, header, rows);
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Like [`table`], with cells of several lines.
pub(crate) fn table_of_lines<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [Vec<String>; N]>,
) -> String {
    table(header, rows.into_iter().map(|row| row.map(Cell::lines)))
}

/// Like [`table`], for a given screen.
pub(crate) fn table_on<const N: usize, C: Into<Cell>>(
    screen: Screen,
    header: [&str; N],
    rows: impl IntoIterator<Item = [C; N]>,
) -> String {
    let mut table = Table::new(header);
    for row in rows {
        table.push(row.into_iter().map(Into::into).collect());
    }
    table.render(screen)
}

/// Returns `true` if standard output shows colours: on a terminal, unless `--color`, `NO_COLOR` or `TERM=dumb` disable them.
pub(crate) fn stdout_has_colour() -> bool {
    AutoStream::choice(&io::stdout()) != ColorChoice::Never
}

/// Returns `text` on one line, with line breaks and other control characters escaped.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    match escape_control(text) {
        Cow::Borrowed(text) if !text.contains('\n') => Cow::Borrowed(text),
        text => Cow::Owned(text.replace('\n', "\\n")),
    }
}

/// Escapes control characters inside the strings of a line of JSON. JSON itself requires that only of ASCII ones.
pub(crate) fn json_line(json: &str) -> Cow<'_, str> {
    let harmful = |character: char| character != '\n' && (character.is_control() || is_invisible(character));
    if !json.contains(harmful) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        match harmful(character) {
            true => escaped.push_str(&format!("\\u{:04x}", u32::from(character))),
            false => escaped.push(character),
        }
    }
    Cow::Owned(escaped)
}

/// Returns `text` with control characters escaped, except line breaks.
pub(crate) fn escape_control(text: &str) -> Cow<'_, str> {
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

/// Returns `true` for characters that reorder or break the text around them, or are not displayed.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}'
    )
}

/// Prints the error and its causes, on one line.
pub(crate) fn print_error(error: &anyhow::Error) {
    warn(&error_line(error));
}

/// Returns the line that [`print_error`] prints.
pub(crate) fn error_line(error: &anyhow::Error) -> String {
    line(&format!("error: {}", chain(error.as_ref()))).into_owned()
}

/// Returns an error and its causes. If an error text already ends in that of its cause, the cause is not repeated.
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

/// Writes a line to standard error. A write error is ignored, because there is no other place to report it.
pub(crate) fn warn(text: &str) {
    let text = line(text);
    let styles = clap::builder::Styles::styled();
    let style = match text.split_once(": ") {
        Some(("error", _)) => Some(styles.get_error()),
        Some(("warning", _)) => Some(styles.get_invalid()),
        _ => None,
    };
    let mut stderr = anstream::stderr().lock();
    let _ = match (style, text.split_once(':')) {
        (Some(style), Some((label, rest))) => writeln!(stderr, "{style}{label}:{style:#}{rest}"),
        _ => writeln!(stderr, "{text}"),
    };
}

pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns `-` for an empty text.
pub(crate) fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

/// Formats a number of things: "1 device", "2 devices".
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
    fn a_cause_is_printed_once() {
        let source = || io::Error::from(io::ErrorKind::NotFound);
        let with_cause = anyhow::Error::from(Problem::Told { source: source() }).context("it does not start");
        assert_eq!(
            chain(with_cause.as_ref()),
            "it does not start: cannot open it: entity not found"
        );
        let untold = Problem::Untold { source: source() };
        assert_eq!(chain(&untold), "cannot watch it: entity not found");
    }
}
