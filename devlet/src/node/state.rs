//! `devlet state`: the content of the database.

use clap::Subcommand;
use devlet_client::v1;
use serde_json::Value;

use super::ConnectArg;
use crate::Outcome;
use crate::output::{self, Output};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the whole database as JSON
    #[command(after_help = "Examples:\n  devlet state dump | jq .pods\n\n\
        Exit codes: 0 printed, 1 the database cannot be read, 2 devlet cannot be reached.")]
    Dump {
        #[command(flatten)]
        connect: ConnectArg,
    },
}

pub(super) async fn run(command: Command) -> anyhow::Result<Outcome> {
    let Command::Dump { connect } = command;
    let dump = connect
        .connect()
        .await?
        .dump_state(v1::DumpStateRequest {})
        .await?;
    let state: Value = serde_json::from_str(&dump.json)?;
    output::print(Output::Json, &state, |_| String::new())?;
    Ok(Outcome::Fine)
}
