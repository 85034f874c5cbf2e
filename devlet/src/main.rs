//! The `devlet` binary: one file per subcommand, and what they share.

mod cdi;
mod checkpoint;
mod cli;
mod config;
mod duration;
mod files;
mod jsonpath;
mod manual;
mod node;
mod oci;
mod output;
mod serve;
mod table;

use std::process::ExitCode;

use cli::{Cli, Command};

/// How a command ended. Anything that keeps it from doing its work at all is an error instead, with exit code 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Fine,
    /// The thing that was looked at is bad.
    Bad,
    /// The command could not do its work, and has reported the error itself.
    Failed,
}

fn main() -> ExitCode {
    clap_complete::CompleteEnv::with_factory(Cli::offered).complete();
    let cli = Cli::read();
    let ended = match cli.command {
        Command::Cdi(command) => cdi::run(command),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Config(command) => config::run(command),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { out } => manual::man(&out),
        Command::SamplePlugin(args) => serve::run_sample(&args),
        Command::SampleDriver(args) => serve::run_sample_driver(&args),
        Command::Serve(args) => serve::run(args),
        Command::Node(command) => node::run(command),
    };
    match ended {
        Ok(Outcome::Fine) => ExitCode::SUCCESS,
        Ok(Outcome::Bad) => ExitCode::from(1),
        Ok(Outcome::Failed) => ExitCode::from(2),
        // The reader of our output has seen enough: `devlet ... | head`.
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error);
            ExitCode::from(2)
        }
    }
}
