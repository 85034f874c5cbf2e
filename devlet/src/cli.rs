//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ColorChoice, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum as _};

use crate::output::OutputArg;
use crate::{cdi, checkpoint, config, node, serve, shield};

/// The kubelet's device managers as a standalone daemon.
#[derive(Debug, Parser)]
#[command(name = "devlet", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 the checked object is invalid or a running devlet refused the request, 2 wrong \
                  usage, no running devlet, or a path that cannot be read or written."
)]
pub(crate) struct Cli {
    /// Use colours; auto means on a terminal, unless NO_COLOR is set or TERM is dumb
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: ColorChoice,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Returns the commands and options that completion offers. Hidden commands are left out, because clap offers them
    /// if no other command starts with the word.
    pub(crate) fn completion_command() -> clap::Command {
        let full = Self::command();
        let commands = full.get_subcommands().filter(|command| !command.is_hide_set());
        clap::Command::new("devlet")
            .version(env!("CARGO_PKG_VERSION"))
            .propagate_version(true)
            .args(full.get_arguments().cloned())
            .subcommands(commands.cloned())
    }

    /// Parses the command line. Usage errors follow `--color`, too.
    pub(crate) fn read() -> Self {
        let color = color_argument(std::env::args_os());
        let matches = Self::command().color(color).get_matches();
        let cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        let color = match cli.color {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        };
        color.write_global();
        cli
    }
}

/// Returns the value of `--color` from the unparsed command line.
fn color_argument(words: impl Iterator<Item = OsString>) -> ColorChoice {
    let words: Vec<OsString> = words.collect();
    let values = words
        .iter()
        .enumerate()
        .filter_map(|(place, word)| match word.to_str()? {
            "--color" => words.get(place + 1)?.to_str(),
            word => word.strip_prefix("--color="),
        });
    values
        .filter_map(|value| ColorChoice::from_str(value, false).ok())
        .next_back()
        .unwrap_or_default()
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon: plugins and drivers register, pods get devices
    #[command(
        after_help = "Examples:\n  devlet serve --sample\n  devlet serve --http 127.0.0.1:7350\n  \
        devlet serve --config /etc/devlet.yaml --log json\n\n\
        Stops on SIGTERM, SIGINT and SIGHUP (nothing is reloaded). Exit codes: 0 stopped; 2 wrong usage, the start failed \
        (the root directory is in use by another devlet or a kubelet, or cannot be written), or the final write of the \
        state failed: the error names the files that are out of date."
    )]
    Serve(serve::Args),
    /// Run the device plugin of `serve --sample`
    #[command(hide = true)]
    SamplePlugin(serve::sample::Args),
    /// Run the DRA driver of `serve --sample`
    #[command(hide = true)]
    SampleDriver(serve::sample::Args),
    /// Run the device plugin of `hostDevices`
    #[command(hide = true)]
    HostDevices(serve::host_devices::Args),
    /// Tell devlet that a container of a lease starts or ends; container runtimes run it
    #[command(hide = true)]
    LeaseHook(shield::HookArgs),
    /// List the devices of this host, with the lines of the configuration that offer them
    #[command(after_help = "Examples:\n  devlet discover\n  devlet discover -o json\n\n\
        Works without a running devlet. The lines below the table belong into the configuration file; see \
        docs/host-devices.md. Exit codes: 0 listed, 2 wrong usage.")]
    Discover {
        #[command(flatten)]
        output: OutputArg,
    },
    /// Check, enter and leave the place between a kubelet and device plugins
    #[command(subcommand)]
    Shield(shield::Command),
    /// Show the configuration
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
                            devlet completions fish > ~/.config/fish/completions/devlet.fish\n\n\
                            The script calls devlet, so that names of pods, claims, resources, devices, plugins, \
                            drivers and slices are completed from the running devlet."
    )]
    Completions {
        /// Shell that runs the script
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    #[command(after_help = "Examples:\n  devlet man --out /usr/local/share/man/man1")]
    Man {
        /// Directory to write the pages to; created if missing
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}
