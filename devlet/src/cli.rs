//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::{cdi, checkpoint, node};

/// The kubelet's device managers, standing alone.
#[derive(Debug, Parser)]
#[command(name = "devlet", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 fine, 1 the thing that was checked is bad, 2 wrong usage or a path that \
                        cannot be read or written."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Node(node::Command),
    /// Read, verify, convert and repair the kubelet's device state files
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// List, check and resolve Container Device Interface specs
    #[command(subcommand)]
    Cdi(cdi::Command),
    /// Print a completion script for a shell
    #[command(
        after_help = "Examples:\n  devlet completions bash > /etc/bash_completion.d/devlet\n  \
                            devlet completions fish > ~/.config/fish/completions/devlet.fish"
    )]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    #[command(after_help = "Examples:\n  devlet man --out /usr/local/share/man/man1")]
    Man {
        /// The directory to write them to; it is created if need be
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}
