//! The log, on standard error.
//!
//! Control characters are escaped here, in every field and both formats, so that texts of plugins and drivers cannot
//! forge a line or control a terminal.

mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _, Write};
use std::path::Path;

use anyhow::Context as _;
use devlet_agent::store::{Found, OpenReport};
use tracing_subscriber::Layer as _;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::debug_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{LogFormat, LogLevel, Settings};
use crate::output;

pub(super) use writer::LogWriter;

/// Starts the log. With the sample only warnings are logged, so that the banner stays readable.
pub(super) fn start(settings: &Settings, sample: bool) -> anyhow::Result<LogWriter> {
    let default = if sample { LogLevel::WARN } else { LogLevel::INFO };
    let filter = settings.log_level.as_ref().unwrap_or(&default).filter();
    let writer = LogWriter::stderr().context("cannot start the log")?;
    let layer = tracing_subscriber::fmt::layer();
    let layer = match settings.log {
        LogFormat::Text => layer
            .with_writer(writer.clone())
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .fmt_fields(
                debug_fn(|text, field, value| {
                    let value = format!("{value:?}");
                    let value = output::line(&value);
                    match (field.name(), text.has_ansi_escapes()) {
                        ("message", _) => write!(text, "{value}"),
                        (name, true) => write!(text, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{value}"),
                        (name, false) => write!(text, "{name}={value}"),
                    }
                })
                .delimited(" "),
            )
            .boxed(),
        LogFormat::Json => layer
            .with_writer(JsonLines(writer.clone()))
            .json()
            .flatten_event(true)
            .boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
    subscriber.try_init().context("cannot start the log")?;
    log_panics();
    Ok(writer)
}

/// Logs panics: the default hook writes to standard error, which may block.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("unknown");
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let backtrace = Backtrace::capture();
        match backtrace.status() {
            BacktraceStatus::Captured => {
                tracing::error!(panic = message, location, %backtrace, "thread panicked");
            }
            _ => tracing::error!(panic = message, location, "thread panicked"),
        }
    }));
}

/// Escapes the control characters that JSON allows inside strings.
struct JsonLines(LogWriter);

impl<'a> MakeWriter<'a> for JsonLines {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

impl Write for &JsonLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(line) {
            Ok(text) => self.0.line(output::json_line(text).as_bytes()),
            Err(_) => self.0.line(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Logs the state that a start found, and its treatment.
pub(super) fn opened(report: &OpenReport, root: &Path) {
    let root = root.display();
    match report.found {
        Found::Nothing => tracing::info!(%root, "started without earlier state"),
        Found::Database => tracing::info!(%root, "started with devlet's state"),
        Found::KubeletFile => tracing::info!(%root, "started with a kubelet's state"),
    }
    if let Some(takeover) = &report.takeover {
        let archive = takeover.archive.display();
        let difference = &takeover.difference;
        tracing::warn!(%archive, ?difference, "adopted state written by a kubelet");
    }
    for imported in [&report.imported, &report.imported_claims].into_iter().flatten() {
        let (format, entries) = (imported.format, imported.replaced_entries);
        if entries > 0 {
            tracing::warn!(
                ?format,
                entries,
                "duplicate entries of an imported file dropped; the last ones are used"
            );
        }
    }
    for aside in &report.set_aside {
        let (file, kept) = (aside.original.display(), aside.kept.display());
        tracing::error!(%file, %kept, reason = aside.reason, "unreadable state file set aside");
    }
    for contested in &report.contested {
        let (file, copy) = (contested.original.display(), contested.copy.display());
        let difference = &contested.difference;
        tracing::error!(%file, %copy, %difference, "kubelet file contested: import or forget the copy");
    }
    if let Some(reboot) = &report.reboot {
        let (kept, released) = (reboot.kept.len(), reboot.released.len());
        tracing::info!(kept, released, "machine rebooted; pods kept or released");
    }
    if report.repaired {
        tracing::info!("unclosed database checked");
    }
    for device in &report.doubly_held {
        let (resource, device, pods) = (&device.resource, &device.id, &device.holders);
        tracing::error!(%resource, %device, ?pods, "device of an imported file held by several pods");
    }
    if let Some(blocked) = &report.blocked {
        tracing::error!(reason = %blocked, "admission of pods blocked");
    }
}
