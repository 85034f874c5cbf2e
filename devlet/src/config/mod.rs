//! The configuration and `devlet config`.
//!
//! `file` defines the keys; `log_level`, `http_address` and `uid` parse values; `print` writes the settings with
//! explanations.

mod file;
mod http_address;
mod log_level;
mod print;
mod shield;
mod uid;

use std::path::PathBuf;

use clap::Subcommand;

use crate::{Outcome, output};

pub(crate) use file::{KubernetesSettings, LogFormat, ModeSetting, Settings, SliceSettings};
#[cfg(feature = "kubernetes")]
pub(crate) use file::{UnhealthySetting, WipeSetting};
pub(crate) use http_address::HttpAddress;
pub(crate) use log_level::LogLevel;
pub(crate) use shield::runtime_socket;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the settings as a configuration file
    #[command(after_help = "Examples:\n  devlet config print --defaults > devlet.yaml\n  \
        devlet config print --config devlet.yaml\n\n\
        Exit codes: 0 printed, 2 the file cannot be read or is not a configuration.")]
    Print {
        /// Print the defaults
        #[arg(long, conflicts_with = "config")]
        defaults: bool,
        /// Configuration file to read
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Omit the explanations
        #[arg(long)]
        plain: bool,
    },
}

pub(crate) fn run(command: Command) -> anyhow::Result<Outcome> {
    let Command::Print {
        defaults: _,
        config,
        plain,
    } = command;
    let settings = match config {
        Some(path) => Settings::read(&path)?,
        None => Settings::default(),
    };
    output::out(&print::text(&settings, plain)?)?;
    Ok(Outcome::Fine)
}
