//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::{cdi, checkpoint, config, node, serve};

/// The kubelet's device managers, standing alone.
#[derive(Debug, Parser)]
#[command(name = "devlet", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 fine, 1 the thing that was checked is bad or a running devlet said no, 2 wrong \
                  usage, no running devlet, or a path that cannot be read or written."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the node: plugins and drivers register, pods get devices
    #[command(
        after_help = "Examples:\n  devlet serve --sample\n  devlet serve --http 127.0.0.1:7350\n  \
        devlet serve --config /etc/devlet.yaml --log json\n\n\
        Stops on SIGTERM and SIGINT. Exit codes: 0 stopped, 2 wrong usage, or it cannot start: the root directory is \
        in use by another devlet or a kubelet, or cannot be written."
    )]
    Serve(serve::Args),
    /// The device plugin of `serve --sample`
    #[command(hide = true)]
    SamplePlugin(serve::sample::Args),
    /// The DRA driver of `serve --sample`
    #[command(hide = true)]
    SampleDriver(serve::sample::Args),
    /// Show what can be set
    #[command(subcommand)]
    Config(config::Command),
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
