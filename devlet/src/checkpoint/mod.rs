//! `devlet checkpoint`: the kubelet's device state files.

mod convert;
mod repair;
mod show;
mod verify;

use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use devlet_kubelet_files::Role;

use crate::Outcome;
use crate::output::OutputArg;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the format of a file, and the devices that each pod holds
    #[command(after_help = "Examples:\n  \
        devlet checkpoint show /var/lib/kubelet/dra_manager_state\n  \
        devlet checkpoint show -o json kubelet_internal_checkpoint\n\n\
        A file with a wrong checksum is shown, too, with a warning. Exit codes: 0 shown, 1 the file cannot be \
        decoded, 2 wrong usage or an unreadable path.")]
    Show {
        /// State file, - for standard input
        file: PathBuf,
        #[command(flatten)]
        role: RoleArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Check that a kubelet would load everything in a file
    #[command(after_help = "Examples:\n  \
        devlet checkpoint verify /var/lib/kubelet/dra_manager_state\n  \
        devlet checkpoint verify kubelet_internal_checkpoint dra_manager_state\n\n\
        The reference is the kubelet of 1.37. Exit codes: 0 it loads all content of the documents, 1 it would \
        refuse a file, drop or replace a part of it, or read it as an empty state, 2 wrong usage or an \
        unreadable path.")]
    Verify {
        /// State files, - for standard input
        #[arg(required = true)]
        files: Vec<PathBuf>,
        #[command(flatten)]
        role: RoleArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Write a file in the newest format
    #[command(after_help = "Examples:\n  \
        devlet checkpoint convert kubelet_internal_checkpoint --out converted\n  \
        devlet checkpoint convert /var/lib/kubelet/dra_manager_state --in-place\n\n\
        Entries keep their order, and plugins' answers their bytes. Stop the kubelet before converting its files \
        in place. Exit codes: 0 written, 1 the file is damaged (see repair), 2 wrong usage or a path that \
        cannot be read or written.")]
    Convert {
        /// State file, - for standard input
        file: PathBuf,
        /// Format to write
        #[arg(long, value_name = "FORMAT")]
        to: Option<Target>,
        /// File to write [default: standard output]
        #[arg(long, value_name = "FILE", conflicts_with = "in_place")]
        out: Option<PathBuf>,
        /// Replace the file, and keep the old one with .bak added to its name
        #[arg(long)]
        in_place: bool,
        #[command(flatten)]
        role: RoleArg,
    },
    /// Save the intact parts of a damaged file
    #[command(after_help = "Examples:\n  \
        devlet checkpoint repair kubelet_internal_checkpoint\n  \
        devlet checkpoint repair kubelet_internal_checkpoint --out repaired\n\n\
        Nothing is written without --out. Exit codes: 0 nothing was lost, 1 some or all content was lost, 2 wrong usage \
        or a path that cannot be read or written.")]
    Repair {
        /// State file, - for standard input
        file: PathBuf,
        /// File to write the intact parts to, in the newest format
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        role: RoleArg,
        #[command(flatten)]
        output: OutputArg,
    },
}

/// Which of the kubelet's files a file is.
#[derive(Debug, clap::Args)]
pub(crate) struct RoleArg {
    /// Treat the file as this one of the kubelet's files, if neither its name nor its content shows which one it is
    #[arg(long, value_name = "FILE")]
    role: Option<RoleName>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum RoleName {
    KubeletInternalCheckpoint,
    DraManagerState,
    DraHealthState,
}

impl RoleArg {
    fn of(&self, path: &Path) -> Option<Role> {
        match self.role {
            Some(RoleName::KubeletInternalCheckpoint) => Some(Role::DevicePlugin),
            Some(RoleName::DraManagerState) => Some(Role::DraManager),
            Some(RoleName::DraHealthState) => Some(Role::DraHealth),
            None => Role::of_file_name(path.file_name()?.to_str()?),
        }
    }
}

/// A format that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// kubelet_internal_checkpoint of 1.20 and later
    DevicePluginV2,
    /// dra_manager_state of 1.31 and later
    DraEnvelopeV1,
}

pub(crate) fn run(command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Show { file, role, output } => show::run(&file, &role, output.output),
        Command::Verify { files, role, output } => verify::run(&files, &role, output.output),
        Command::Convert {
            file,
            to,
            out,
            in_place,
            role,
        } => convert::run(&file, to, out.as_deref(), in_place, &role),
        Command::Repair {
            file,
            out,
            role,
            output,
        } => repair::run(&file, out.as_deref(), &role, output.output),
    }
}
