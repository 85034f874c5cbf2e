//! Tables for people: columns separated by spaces, without rules.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};

use anstyle::{AnsiColor, Style};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::output::{self, line};

/// Spaces between two columns.
const GAP: usize = 2;

/// The width of a label and the spaces behind it, without the gap.
const LABEL_WIDTH: usize = 10;

/// Minimum width of a column that is cut.
const MIN_CUT_WIDTH: usize = 12;

/// Severity of a cell, shown as a colour on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Tone {
    #[default]
    Plain,
    /// Red: unhealthy, failed, gone.
    Bad,
    /// Yellow: waiting.
    Waiting,
}

impl Tone {
    fn style(self) -> Style {
        match self {
            Self::Plain => Style::new(),
            Self::Bad => AnsiColor::Red.on_default(),
            Self::Waiting => AnsiColor::Yellow.on_default(),
        }
    }

    /// Returns `text` in this colour, if standard output shows colours.
    pub(crate) fn paint(self, text: &str) -> String {
        painted(text, self, output::stdout_has_colour())
    }
}

fn painted(text: &str, tone: Tone, colour: bool) -> String {
    if !colour || tone == Tone::Plain || text.is_empty() {
        return text.to_owned();
    }
    let style = tone.style();
    format!("{style}{text}{style:#}")
}

/// One cell. Control characters in it are escaped when it is printed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cell {
    lines: Vec<String>,
    /// Text for tables that must fit on a terminal.
    short: Option<String>,
    tone: Tone,
    /// Changes with time, such as an age. A watch does not count that as a change of the row.
    passing: bool,
}

impl Cell {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self {
            lines: vec![text.into()],
            ..Self::default()
        }
    }

    pub(crate) fn lines(lines: Vec<String>) -> Self {
        Self {
            lines,
            ..Self::default()
        }
    }

    /// Sets a shorter text, for [`Cell::shortened`].
    pub(crate) fn short(mut self, text: impl Into<String>) -> Self {
        self.short = Some(text.into());
        self
    }

    /// Returns the cell with its shorter text, if it has one.
    pub(crate) fn shortened(mut self) -> Self {
        if let Some(short) = self.short.take() {
            self.lines = vec![short];
        }
        self
    }

    pub(crate) fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }

    /// Creates a cell for an age, such as `5m`.
    pub(crate) fn passing(text: impl Into<String>) -> Self {
        Self {
            passing: true,
            ..Self::new(text)
        }
    }

    /// Returns `true` if two rows are equal, ages ignored.
    pub(crate) fn same_row(row: &[Self], other: &[Self]) -> bool {
        let same = |(a, b): (&Self, &Self)| a.passing || a.lines == b.lines;
        row.len() == other.len() && row.iter().zip(other).all(same)
    }

    fn escaped(&self) -> Vec<String> {
        self.lines.iter().map(|text| line(text).into_owned()).collect()
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

/// Width and colours of the output that a table is rendered for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Maximum columns; cells are wrapped between words to fit. `None`: never wrapped.
    pub(crate) width: Option<usize>,
    /// Cuts words that are wider than their column.
    pub(crate) cut: bool,
    pub(crate) colour: bool,
}

impl Screen {
    /// Standard output for a list. The wide form is never wrapped; the other form always fits on a terminal.
    pub(crate) fn for_list(wide: bool) -> Self {
        let screen = Self::stdout();
        Self {
            width: screen.width.filter(|_| !wide),
            cut: !wide,
            ..screen
        }
    }

    /// Standard output: rows are wrapped only on a terminal.
    pub(crate) fn stdout() -> Self {
        Self {
            width: terminal_size().map(|size| size.columns),
            cut: false,
            colour: output::stdout_has_colour(),
        }
    }
}

/// Columns and lines of a terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TerminalSize {
    pub(crate) columns: usize,
    pub(crate) rows: usize,
}

/// Returns the size of the terminal, if standard output is one.
pub(crate) fn terminal_size() -> Option<TerminalSize> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stdout).ok()?;
    let or = |number: u16, usual: usize| if number == 0 { usual } else { usize::from(number) };
    Some(TerminalSize {
        columns: or(size.ws_col, 80),
        rows: or(size.ws_row, 24),
    })
}

/// Rows of cells below a header.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<Cell>>,
    headers_hidden: bool,
}

impl Table {
    pub(crate) fn new<H: Into<String>>(header: impl IntoIterator<Item = H>) -> Self {
        Self {
            header: header.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn push(&mut self, row: Vec<Cell>) {
        self.rows.push(row);
    }

    pub(crate) fn hide_headers(mut self, hidden: bool) -> Self {
        self.headers_hidden = hidden;
        self
    }

    pub(crate) fn render(&self, screen: Screen) -> String {
        self.render_with(&self.widths(), screen)
    }

    /// Returns the width of each column, for rows that are printed later: see [`Table::render_with`].
    pub(crate) fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.header.iter().map(|title| title.width()).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                let longest = cell.escaped().iter().map(|text| text.width()).max();
                *width = (*width).max(longest.unwrap_or(0));
            }
        }
        widths
    }

    /// Renders the table with columns at least as wide as given.
    pub(crate) fn render_with(&self, widths: &[usize], screen: Screen) -> String {
        let mut widths = widths.to_vec();
        if let Some(width) = screen.width {
            self.shrink(&mut widths, width, screen.cut);
        }
        let mut text = String::new();
        if !self.headers_hidden {
            let header: Vec<Vec<String>> = self.header.iter().map(|title| vec![title.clone()]).collect();
            push_row(&mut text, &header, &[], &widths, false);
        }
        for row in &self.rows {
            let cells: Vec<Vec<String>> = row
                .iter()
                .zip(&widths)
                .map(|(cell, &width)| {
                    cell.escaped()
                        .iter()
                        .flat_map(|text| wrap(text, width, screen.cut))
                        .collect()
                })
                .collect();
            let tones: Vec<Tone> = row.iter().map(|cell| cell.tone).collect();
            push_row(&mut text, &cells, &tones, &widths, screen.colour);
        }
        text
    }

    /// Narrows the widest columns until the table fits, without breaking words. With `cut`, then narrows further from
    /// the last column to the first.
    fn shrink(&self, widths: &mut [usize], available: usize, cut: bool) {
        let longest_word = |column: usize| {
            let title = self.header.get(column).map_or(0, |title| title.width());
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let texts = cells.flat_map(Cell::escaped);
            let words = texts.map(|text| text.split(' ').map(|word| word.width()).max().unwrap_or(0));
            words.max().unwrap_or(0).max(title)
        };
        let least: Vec<usize> = (0..widths.len()).map(longest_word).collect();
        shrink_to(widths, available, &least);
        // Names are on the left: they are cut last.
        for column in (0..widths.len()).rev().filter(|_| cut) {
            let mut least = widths.to_vec();
            least[column] = least[column].min(MIN_CUT_WIDTH);
            shrink_to(widths, available, &least);
        }
    }
}

fn shrink_to(widths: &mut [usize], available: usize, least: &[usize]) {
    let gaps = GAP * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > available {
        let columns = widths.iter_mut().zip(least);
        let widest = columns
            .filter(|(width, least)| **width > **least)
            .max_by_key(|(width, _)| **width);
        match widest {
            Some((width, _)) => *width -= 1,
            None => break,
        }
    }
}

/// Returns `label` followed by `text`, wrapped between words on a terminal.
pub(crate) fn labelled(label: &str, text: &str, tone: Tone, screen: Screen) -> String {
    let mut table = Table::new(["", ""]).hide_headers(true);
    table.push(vec![Cell::new(label), Cell::new(text).tone(tone)]);
    table.render_with(&[LABEL_WIDTH, text.width()], screen)
}

/// Like [`labelled`], with further lines indented by the width of the label.
pub(crate) fn hanging(label: &str, text: &str, screen: Screen) -> String {
    let indent = label.width();
    let width = screen
        .width
        .map_or(usize::MAX, |width| width.saturating_sub(indent));
    let lines = wrap(&line(text), width, false);
    let lines = lines.iter().enumerate().map(|(number, line)| match number {
        0 => format!("{label}{line}\n"),
        _ => format!("{:indent$}{line}\n", ""),
    });
    lines.collect()
}

/// Appends the lines of one row.
fn push_row(text: &mut String, cells: &[Vec<String>], tones: &[Tone], widths: &[usize], colour: bool) {
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    for at in 0..height {
        // Spaces are added before the next word, so that no line ends in spaces.
        let mut missing = 0;
        for (column, (cell, &width)) in cells.iter().zip(widths).enumerate() {
            let word = cell.get(at).map_or("", String::as_str);
            if !word.is_empty() {
                let _ = write!(text, "{:missing$}", "");
                missing = 0;
                let tone = tones.get(column).copied().unwrap_or_default();
                text.push_str(&painted(word, tone, colour));
            }
            missing += width.saturating_sub(word.width()) + GAP;
        }
        text.push('\n');
    }
}

/// Wraps `text` into lines of at most `width` columns. A longer word gets its own line, or is cut.
fn wrap(text: &str, width: usize, cut: bool) -> Vec<String> {
    if text.width() <= width {
        return vec![text.to_owned()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ if cut && word.width() > width => lines.push(shortened(word, width)),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns the start of a word, with an ellipsis.
fn shortened(word: &str, width: usize) -> String {
    let mut text = String::new();
    for character in word.chars() {
        if text.width() + character.width().unwrap_or(0) + 1 > width {
            break;
        }
        text.push(character);
    }
    text + "\u{2026}"
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIPE: Screen = Screen {
        width: None,
        cut: false,
        colour: false,
    };

    fn table() -> Table {
        let mut table = Table::new(["NAME", "STATE", "PODS"]);
        table.push(vec![
            "acme.com/gpu".into(),
            Cell::new("gone").tone(Tone::Bad),
            "default/one, default/two".into(),
        ]);
        table.push(vec!["b".into(), Cell::new(""), "-".into()]);
        table
    }

    #[test]
    fn columns_line_up_and_no_line_ends_in_spaces() {
        let text = table().render(PIPE);
        let expected = "NAME          STATE  PODS\n\
                        acme.com/gpu  gone   default/one, default/two\n\
                        b                    -\n";
        assert_eq!(text, expected);
        assert!(!table().hide_headers(true).render(PIPE).contains("NAME"));
    }

    #[test]
    fn a_narrow_terminal_wraps_between_words_and_never_inside_one() {
        let narrow = Screen {
            width: Some(34),
            ..PIPE
        };
        let expected = "NAME          STATE  PODS\n\
                        acme.com/gpu  gone   default/one,\n\
                        \u{20}                    default/two\n\
                        b                    -\n";
        assert_eq!(table().render(narrow), expected);
        let narrower = Screen {
            width: Some(10),
            ..narrow
        };
        assert_eq!(table().render(narrower), expected);
    }

    #[test]
    fn a_word_that_does_not_fit_is_cut_if_cut_is_set() {
        let mut table = Table::new(["NAME", "STATE"]);
        table.push(vec!["a-very-long-name-of-a-pod".into(), "gone".into()]);
        let screen = Screen {
            width: Some(20),
            cut: true,
            ..PIPE
        };
        assert_eq!(
            table.render(screen),
            "NAME           STATE\na-very-long-\u{2026}  gone\n"
        );
    }

    #[test]
    fn names_on_the_left_are_cut_last() {
        let mut table = Table::new(["RESOURCE", "HELD BY"]);
        table.push(vec![
            "acme.com/accelerator".into(),
            "machine-learning/train-0".into(),
        ]);
        let screen = Screen {
            width: Some(36),
            cut: true,
            ..PIPE
        };
        let expected = "RESOURCE              HELD BY\nacme.com/accelerator  machine-learn\u{2026}\n";
        assert_eq!(table.render(screen), expected);
    }

    #[test]
    fn a_labelled_text_is_wrapped_behind_its_label() {
        let screen = Screen {
            width: Some(24),
            ..PIPE
        };
        let text = labelled("Problem:", "the disk is full today", Tone::Plain, screen);
        assert_eq!(text, "Problem:    the disk is\n            full today\n");
        assert_eq!(labelled("", "a", Tone::Plain, PIPE), "            a\n");
    }

    #[test]
    fn a_long_text_is_wrapped_between_words_and_a_long_word_continues_past_the_edge() {
        let screen = Screen {
            width: Some(24),
            ..PIPE
        };
        let path = "/var/lib/kubelet/plugins/gpu.sock";
        let text = hanging("Reason:  ", &format!("user 7 may not serve {path}\u{7}"), screen);
        let expected = format!("Reason:  user 7 may not\n         serve\n         {path}\\u{{7}}\n");
        assert_eq!(text, expected);
        assert_eq!(hanging("Reason:  ", "no room", PIPE), "Reason:  no room\n");
        assert_eq!(hanging("Reason:  ", "", screen), "Reason:  \n");
    }

    #[test]
    fn colours_surround_the_text_and_change_no_column() {
        let coloured = Screen { colour: true, ..PIPE };
        let text = table().render(coloured);
        assert!(text.contains("\u{1b}[31mgone\u{1b}[0m   default/one"), "{text:?}");
        assert_eq!(
            text.replace("\u{1b}[31m", "").replace("\u{1b}[0m", ""),
            table().render(PIPE)
        );
    }

    #[test]
    fn control_characters_in_a_cell_are_escaped() {
        let mut table = Table::new(["A"]);
        table.push(vec!["x\u{1b}[31m\ny".into()]);
        assert_eq!(table.render(PIPE), "A\nx\\u{1b}[31m\\ny\n");
    }
}
