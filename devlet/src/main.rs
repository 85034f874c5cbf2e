//! The `devlet` binary: one module per subcommand, and the modules that they share.

mod cdi;
mod checkpoint;
mod cli;
mod config;
mod discover;
mod duration;
mod files;
mod jsonpath;
mod manual;
mod node;
mod oci;
mod output;
mod serve;
mod shield;
mod table;

use std::process::ExitCode;

use cli::{Cli, Command};

/// Result of a command that ran. A command that cannot run returns an error, with exit code 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Fine,
    /// The checked object is invalid, or devlet refused the request: exit code 1.
    Bad,
    /// The command failed and has printed the error: exit code 2.
    Failed,
}

fn main() -> ExitCode {
    clap_complete::CompleteEnv::with_factory(Cli::completion_command).complete();
    let cli = Cli::read();
    let ended = match cli.command {
        Command::Cdi(command) => cdi::run(command),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Config(command) => config::run(command),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { out } => manual::man(&out),
        Command::LeaseHook(args) => shield::run_hook(args),
        Command::Discover { output } => discover::run(output.output),
        Command::HostDevices(args) => serve::run_host_devices(&args),
        Command::SamplePlugin(args) => serve::run_sample(&args),
        Command::SampleDriver(args) => serve::run_sample_driver(&args),
        Command::Shield(command) => shield::run(command),
        Command::Serve(args) => serve::run(args),
        Command::Node(command) => node::run(command),
    };
    match ended {
        Ok(Outcome::Fine) => ExitCode::SUCCESS,
        Ok(Outcome::Bad) => ExitCode::from(1),
        Ok(Outcome::Failed) => ExitCode::from(2),
        // The reader closed the pipe: `devlet ... | head`.
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error);
            ExitCode::from(2)
        }
    }
}
