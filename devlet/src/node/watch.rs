//! `devlet get --watch`: redraws a table on a terminal, prints changed rows elsewhere, and reconnects after a restart.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use devlet_client::{Client, Code, NoAnswer, Status, Watch};
use tokio::time::{Instant, timeout_at};

use super::listing::{Item, Listing, cells, columns};
use super::select::Filter;
use crate::jsonpath;
use crate::output::{self, Output};
use crate::table::{Cell, Screen, Table, TerminalSize, terminal_size};

/// Maximum time for a stopped devlet to come back.
const RECONNECT: Duration = Duration::from_secs(30);

/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(200);

/// Interval between updates of ages on a terminal.
const TICK: Duration = Duration::from_secs(1);

/// Clears the screen.
const CLEAR: &str = "\u{1b}[2J";
/// Moves the cursor to the first line.
const HOME: &str = "\u{1b}[H";
/// Clears the rest of the line.
const CLEAR_LINE: &str = "\u{1b}[K";
/// Clears all lines below.
const CLEAR_BELOW: &str = "\u{1b}[J";

/// Filter, order and format of the list.
pub(super) struct View<'a> {
    pub(super) output: &'a Output,
    pub(super) filter: &'a Filter<'a>,
    pub(super) sort_by: Option<&'a jsonpath::Path>,
    pub(super) no_headers: bool,
}

impl View<'_> {
    pub(super) fn is_wide(&self) -> bool {
        *self.output == Output::Wide
    }

    /// Filters and sorts a list.
    pub(super) fn narrow<L: Listing>(&self, list: &mut L) -> anyhow::Result<()> {
        list.items_mut().retain(|item| self.filter.admits(item));
        match self.sort_by {
            Some(path) => super::select::sort_by(list.items_mut(), path),
            None => Ok(()),
        }
    }
}

/// Shows the list and all changes until it is interrupted, or devlet does not come back.
pub(super) async fn run<M, L: Listing + From<M>>(
    client: Client,
    timeout: Duration,
    view: &View<'_>,
    watch: impl AsyncFn(&Client) -> Result<Watch<M>, Status>,
) -> anyhow::Result<()> {
    let socket = client.path().to_owned();
    let mut printer = Printer::new(view);
    let mut updates = watch(&client).await?;
    loop {
        let loss = follow::<M, L>(&mut printer, &mut updates, &socket).await?;
        let limit = RECONNECT.as_secs();
        output::warn(&format!("{loss}; waiting up to {limit}s for it to come back"));
        let first;
        (first, updates) = again(&socket, timeout, RECONNECT, &watch).await?;
        printer.update(L::from(first))?;
    }
}

/// Prints updates until devlet stops or does not answer. Returns a text that says which.
async fn follow<M, L: Listing + From<M>>(
    printer: &mut Printer<'_, L>,
    updates: &mut Watch<M>,
    socket: &Path,
) -> anyhow::Result<String> {
    let mut ticks = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            update = updates.message() => match update {
                Ok(Some(update)) => printer.update(L::from(update))?,
                Ok(None) => return Ok(stopped(socket)),
                Err(status) => return loss(&status, socket).ok_or_else(|| status.into()),
            },
            _ = ticks.tick() => printer.redraw()?,
        }
    }
}

/// Returns a text on how devlet was lost; `None` if it answered and refused.
fn loss(status: &Status, socket: &Path) -> Option<String> {
    match std::error::Error::source(status) {
        Some(source) => Some(match source.downcast_ref::<NoAnswer>() {
            Some(no_answer) => no_answer.to_string(),
            None => stopped(socket),
        }),
        // The answer of a devlet that stops.
        None => (status.code() == Code::Unavailable).then(|| stopped(socket)),
    }
}

fn stopped(socket: &Path) -> String {
    format!("devlet at {} has stopped", socket.display())
}

/// Connects to the same socket again. Returns the list, and the updates that follow.
async fn again<M>(
    socket: &Path,
    timeout: Duration,
    limit: Duration,
    watch: &impl AsyncFn(&Client) -> Result<Watch<M>, Status>,
) -> anyhow::Result<(M, Watch<M>)> {
    let deadline = Instant::now() + limit;
    let sockets = [socket.to_owned()];
    loop {
        let first = async {
            let mut updates = watch(&Client::connect_any(&sockets, timeout).await?).await?;
            let first = updates.message().await?;
            // A devlet that stops ends a watch immediately.
            let first = first.ok_or_else(|| anyhow!("{}", stopped(socket)))?;
            anyhow::Ok((first, updates))
        };
        let problem = match timeout_at(deadline, first).await {
            Ok(Ok(watched)) => return Ok(watched),
            Ok(Err(error)) => match error.downcast_ref::<Status>() {
                Some(status) => match loss(status, socket) {
                    Some(text) => text,
                    None => return Err(error),
                },
                None => error.to_string(),
            },
            Err(_) => "it does not answer".to_owned(),
        };
        if Instant::now() + PAUSE >= deadline {
            let (socket, limit) = (socket.display(), limit.as_secs());
            return Err(anyhow!(
                "devlet at {socket} did not come back within {limit}s: {problem}"
            ));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Prints updates of a list.
struct Printer<'a, L> {
    view: &'a View<'a>,
    /// Redraws in place.
    is_screen: bool,
    last: Option<L>,
    drawn: String,
    /// The printed rows, by key.
    rows: BTreeMap<String, (String, Vec<Cell>)>,
    /// Column widths of the last header; empty before the first one.
    widths: Vec<usize>,
}

/// The title of the first column of changes.
const EVENT: &str = "EVENT";

/// Column widths are rounded up to multiples of this, so that later rows with slightly longer cells fit.
const COLUMN_STEP: usize = 8;

impl<'a, L: Listing> Printer<'a, L> {
    fn new(view: &'a View<'a>) -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let is_table = matches!(view.output, Output::Table | Output::Wide);
        Self {
            view,
            is_screen: is_table && terminal_size().is_some() && !is_dumb,
            last: None,
            drawn: String::new(),
            rows: BTreeMap::new(),
            widths: Vec::new(),
        }
    }

    fn update(&mut self, mut list: L) -> anyhow::Result<()> {
        self.view.narrow(&mut list)?;
        match self.view.output {
            Output::Json => output::out(&(serde_json::to_string(&list)? + "\n"))?,
            Output::Yaml => {
                let document = serde_saphyr::to_string(&list)?;
                output::out(&format!("---\n{}\n", document.trim_end()))?;
            }
            Output::JsonPath(template) => {
                let value = serde_json::to_value(&list)?;
                if self.last.is_none() {
                    output::warn_of_missing_key(template, &value);
                }
                let text = template.render(&value);
                let end = if text.ends_with('\n') { "" } else { "\n" };
                output::out(&format!("{text}{end}"))?;
            }
            Output::Table | Output::Wide if self.is_screen => {}
            Output::Table | Output::Wide | Output::Name => {
                let changes = self.changes(&list);
                let text = self.changes_text(changes);
                if !text.is_empty() {
                    output::out(&text)?;
                }
            }
        }
        self.last = Some(list);
        self.redraw()
    }

    /// Returns the rows that were added, changed or removed since the last update.
    fn changes(&mut self, list: &L) -> Vec<(&'static str, String, Vec<Cell>)> {
        let wide = self.view.is_wide();
        let mut before = std::mem::take(&mut self.rows);
        let mut changes = Vec::new();
        for item in list.items() {
            let (name, row) = (item.name(), cells(item, wide));
            let event = match before.remove(&item.key()) {
                None => Some("ADDED"),
                Some((_, old)) if Cell::same_row(&row, &old) => None,
                Some(_) => Some("MODIFIED"),
            };
            if let Some(event) = event {
                changes.push((event, name.clone(), row.clone()));
            }
            self.rows.insert(item.key(), (name, row));
        }
        changes.extend(before.into_values().map(|(name, row)| ("DELETED", name, row)));
        changes
    }

    fn changes_text(&mut self, changes: Vec<(&'static str, String, Vec<Cell>)>) -> String {
        if changes.is_empty() {
            return String::new();
        }
        if *self.view.output == Output::Name {
            let kind = L::Item::KIND.one();
            let line = |(_, name, _): &(_, String, _)| format!("{kind}/{}\n", output::line(name));
            return changes.iter().map(line).collect();
        }
        let header = std::iter::once(EVENT).chain(columns::<L::Item>(self.view.is_wide()));
        let mut table = Table::new(header);
        for (event, _, row) in changes {
            table.push(std::iter::once(Cell::new(event)).chain(row).collect());
        }
        let widths = table.widths();
        let is_wider = self.widths.is_empty()
            || self
                .widths
                .iter()
                .zip(&widths)
                .any(|(known, width)| known < width);
        self.widths.resize(widths.len(), 0);
        for (known, width) in self.widths.iter_mut().zip(widths) {
            *known = (*known).max(width.next_multiple_of(COLUMN_STEP));
        }
        // The header is printed with the first rows, and again when rows do not fit below it.
        let table = table.hide_headers(!is_wider || self.view.no_headers);
        let screen = Screen {
            width: None,
            ..Screen::stdout()
        };
        table.render_with(&self.widths, screen)
    }

    /// Draws the last update again, after ages or the size of the terminal changed.
    fn redraw(&mut self) -> anyhow::Result<()> {
        let (Some(list), true, Some(size)) = (&self.last, self.is_screen, terminal_size()) else {
            return Ok(());
        };
        let wide = self.view.is_wide();
        let screen = Screen::for_list(wide);
        let table = list.table(wide).hide_headers(self.view.no_headers).render(screen);
        let none = if list.items().is_empty() {
            self.view.filter.none(L::Item::KIND) + "\n"
        } else {
            String::new()
        };
        let text = frame(&format!("{table}{none}{}", list.notes()), size);
        if text != self.drawn {
            let clear = if self.drawn.is_empty() { CLEAR } else { "" };
            output::out(&format!("{clear}{text}"))?;
            self.drawn = text;
        }
        Ok(())
    }
}

/// Returns the lines that fit on the terminal, drawn over the previous ones.
fn frame(text: &str, size: TerminalSize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    // The cursor needs the last line.
    let room = size.rows.saturating_sub(1).max(1);
    let mut drawn = HOME.to_owned();
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    for line in lines.iter().take(shown) {
        drawn.push_str(&format!("{line}{CLEAR_LINE}\n"));
    }
    if shown < lines.len() {
        drawn.push_str(&format!("... {} more lines{CLEAR_LINE}\n", lines.len() - shown));
    }
    drawn + CLEAR_BELOW
}

#[cfg(test)]
mod tests {
    use devlet_client::v1;

    use super::*;
    use crate::node::listing::{Pods, Resources};
    use crate::node::samples;

    fn resources(numbers: &[(&str, u64)]) -> Resources {
        let resource = |(name, held): &(&str, u64)| v1::Resource {
            name: (*name).into(),
            held: *held,
            ..Default::default()
        };
        Resources::from(v1::ResourceList {
            revision: 1,
            resources: numbers.iter().map(resource).collect(),
        })
    }

    fn table_view<'a>(filter: &'a Filter<'a>) -> View<'a> {
        View {
            output: &Output::Table,
            filter,
            sort_by: None,
            no_headers: false,
        }
    }

    fn printed(printer: &mut Printer<'_, Resources>, list: &Resources) -> Vec<String> {
        let changes = printer.changes(list);
        let text = printer.changes_text(changes);
        text.lines().map(str::to_owned).collect()
    }

    /// The first two words of each line.
    fn events(lines: &[String]) -> Vec<Vec<&str>> {
        let words = lines.iter().map(|line| line.split_whitespace().take(2));
        words.map(Iterator::collect).collect()
    }

    #[test]
    fn only_rows_that_changed_are_printed_again() {
        let filter = Filter::default();
        let view = table_view(&filter);
        let mut printer = Printer::new(&view);
        let first = printed(&mut printer, &resources(&[("a", 0), ("b", 0)]));
        assert_eq!(
            events(&first),
            [["EVENT", "NAME"], ["ADDED", "a"], ["ADDED", "b"]]
        );
        let second = printed(&mut printer, &resources(&[("b", 1), ("c", 0)]));
        assert_eq!(
            events(&second),
            [["MODIFIED", "b"], ["ADDED", "c"], ["DELETED", "a"]]
        );
        assert!(printed(&mut printer, &resources(&[("b", 1), ("c", 0)])).is_empty());
    }

    #[test]
    fn later_rows_align_with_the_column_titles() {
        let filter = Filter::default();
        let view = table_view(&filter);
        let mut printer = Printer::new(&view);
        assert!(printed(&mut printer, &resources(&[])).is_empty());
        let mut lines = printed(&mut printer, &resources(&[("acme.com/gpu", 7)]));
        lines.extend(printed(
            &mut printer,
            &resources(&[("acme.com/gpu", 7), ("acme.com/gpus", 7)]),
        ));
        let column = |lines: &[String]| -> Vec<String> {
            let held = lines[0].find("HELD").unwrap();
            let cells = lines
                .iter()
                .map(|line| line.get(held..held + 2).unwrap_or_default());
            cells.map(str::to_owned).collect()
        };
        assert_eq!(column(&lines), ["HE", "7 ", "7 "], "{lines:#?}");
        let wider = printed(&mut printer, &resources(&[("acme.com/accelerator", 7)]));
        assert_eq!(column(&wider), ["HE", "7 ", "7 ", "7 "], "{wider:#?}");
        assert_eq!(printed(&mut printer, &resources(&[])).len(), 1);
    }

    #[test]
    fn a_new_age_does_not_change_a_row() {
        let pods = |age_ms| {
            let mut pod = samples::pod();
            pod.age_ms = age_ms;
            Pods::from(v1::PodList {
                revision: 1,
                pods: vec![pod],
            })
        };
        let filter = Filter::default();
        let view = table_view(&filter);
        let mut printer = Printer::new(&view);
        assert_eq!(printer.changes(&pods(1)).len(), 1);
        assert_eq!(printer.changes(&pods(1_000_000)).len(), 0);
    }

    #[test]
    fn a_list_that_is_longer_than_the_terminal_is_cut() {
        let size = TerminalSize { columns: 80, rows: 4 };
        assert_eq!(
            frame("a\nb\nc\n", size),
            "\u{1b}[Ha\u{1b}[K\nb\u{1b}[K\nc\u{1b}[K\n\u{1b}[J"
        );
        let cut = frame("a\nb\nc\nd\ne\n", size);
        assert!(
            cut.contains("b\u{1b}[K\n... 3 more lines") && !cut.contains('c'),
            "{cut:?}"
        );
    }

    #[tokio::test]
    async fn a_devlet_that_does_not_come_back_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("none.sock");
        let watch = async |client: &Client| client.watch_pods(v1::ListPodsRequest::default()).await;
        let ended = again(&socket, Duration::from_secs(1), Duration::ZERO, &watch).await;
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("did not come back within"), "{error}");
    }
}
