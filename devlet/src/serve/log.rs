//! The log, on standard error.

use std::io::IsTerminal as _;
use std::path::Path;

use anyhow::Context as _;
use devlet_agent::store::{Found, OpenReport};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{LogFormat, Settings};

/// From now on everything is logged. With the sample, only what is wrong: the banner is to be read.
pub(super) fn start(settings: &Settings, sample: bool) -> anyhow::Result<()> {
    let usual = if sample { "warn" } else { "info" };
    let level = settings.log_level.as_deref().unwrap_or(usual);
    let targets: Targets = level
        .parse()
        .with_context(|| format!("{level:?} is not a log level; say error, warn, info, debug or trace"))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let layer = match settings.log {
        LogFormat::Text => lines
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(targets));
    subscriber.try_init().context("the log cannot be started")
}

/// What a start made of what it found.
pub(super) fn opened(report: &OpenReport, root: &Path) {
    let root = root.display();
    match report.found {
        Found::Nothing => tracing::info!(%root, "started with nothing held"),
        Found::Database => tracing::info!(%root, "started with the state that devlet left"),
        Found::KubeletFile => tracing::info!(%root, "started with the state that a kubelet left"),
    }
    if let Some(takeover) = &report.takeover {
        let archive = takeover.archive.display();
        let difference = &takeover.difference;
        tracing::warn!(%archive, ?difference, "a kubelet was in charge in between; its word counts");
    }
    for imported in [&report.imported, &report.imported_claims].into_iter().flatten() {
        let (format, entries) = (imported.format, imported.replaced_entries);
        if entries > 0 {
            tracing::warn!(
                ?format,
                entries,
                "of an imported file, later entries of the same name replace others"
            );
        }
    }
    for aside in &report.set_aside {
        let (file, kept) = (aside.original.display(), aside.kept.display());
        tracing::error!(%file, %kept, reason = aside.reason, "state that cannot be read was set aside");
    }
    if let Some(reboot) = &report.reboot {
        let (kept, released) = (reboot.kept.len(), reboot.released.len());
        tracing::info!(kept, released, "the machine was rebooted: pods from before it");
    }
    if report.repaired {
        tracing::info!("the database had not been closed, and was checked");
    }
    if let Some(schema) = report.migrated_from {
        tracing::info!(schema, "the database was brought up to date");
    }
    for device in &report.doubly_held {
        let (resource, device, pods) = (&device.resource, &device.id, &device.holders);
        tracing::error!(%resource, %device, ?pods, "device is held by several pods, as an imported file says");
    }
    if let Some(blocked) = &report.blocked {
        tracing::error!(reason = %blocked, "nobody is admitted");
    }
}
